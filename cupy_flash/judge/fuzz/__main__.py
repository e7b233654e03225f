"""``python -m cupy_flash.judge.fuzz calls|problems|pairs|lengths``: as many as one likes, each of which one line repeats."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter

import click

from .supervise import Failure, supervise


@click.command(name="python -m cupy_flash.judge.fuzz", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kind", type=click.Choice(("calls", "problems", "pairs", "lengths")))
@click.option("--count", type=click.IntRange(1), default=1000, show_default=True, help="How many.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Another seed draws others, by other kernels.")
@click.option("--start", type=click.IntRange(0), default=0, show_default=True, help="The number of the first one.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="How long one may take.")
def main(kind: str, count: int, seed: int, start: int, seconds: float | None) -> None:
    """Draw malformed CALLS, which have to be refused, or valid PROBLEMS, which are judged against the oracle.

    PAIRS are problems that ask something for each pair of a query and a key: scores, masks, biases, ALiBi, dropout.
    LENGTHS are those of sequences that have their own: packed, padded, in pages.

    Prints a line that repeats each failure and what went wrong. Exits with 1 if anything failed.
    """
    began = time.perf_counter()
    failures: list[Failure] = []
    with click.progressbar(length=count, label=kind, file=sys.stderr) as bar:
        for happened in supervise(kind, seed, start, count, seconds):
            if not isinstance(happened, Failure):
                bar.update(happened - start + 1 - bar.pos)
                continue
            failures.append(happened)
            if sys.stderr.isatty():
                click.echo(err=True)
            click.echo(f"python -m cupy_flash.judge.fuzz {kind} --seed {seed} --start {happened.index} --count 1")
            click.echo(f"  {happened.what}")
    took = f"{count} {kind} of seed {seed} in {time.perf_counter() - began:.0f} s"
    if not failures:
        click.echo(f"{took}: all as it should be")
        return
    click.echo(f"{took}: {len(failures)} failed")
    for what, number in Counter(_kind(failure.what) for failure in failures).most_common():
        click.echo(f"{number:6}  {what}")
    sys.exit(1)


def _kind(what: str) -> str:
    """The beginning of the first line, without numbers: equal for equal faults."""
    line = what.partition("\n")[0]
    if line.startswith("two tracebacks"):
        return "two tracebacks"
    for rest in (", got ", "; at first", ": odd", " in row"):
        line = line.partition(rest)[0]
    return re.sub(r"\d[\d.e+-]*", "#", line)[:100]


if __name__ == "__main__":
    main()
