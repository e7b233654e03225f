"""``traffic``: device memory that attention moves and takes, counted without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click

from ..errors import CompileError, UnsupportedError
from ..machine import toolchain
from ..measure.traffic import Count, Setting, count
from ..plan.architecture import HOST, Architecture
from .arguments import ARCHITECTURE, json_option
from .lists import SIZES
from .output import UserError, echo_json, echo_progress, table, terminal_width
from .plotting import plot_option

DTYPES = ("float16", "bfloat16", "float32")
NOTES = """\
read, written  between device memory and the chip, counted while this machine executes the kernels; naive: each NumPy operation
               reads its operands once and writes its result once
GFLOP          of matrix products; a kernel computes whole tiles
constant       elements moved, over N d + N^2 for naive and S d^2 / M for the kernels: N queries and keys of dim d, S scores that
               are not masked, M elements of shared memory in a block ({chips})
memory         the most in use at once besides the inputs: of naive, two arrays of scores; of v1, state, result and log-sum-exp;
               of v2, result and log-sum-exp\
"""
KEPT = "Which tiles of documents are seen is found before, and not counted: a TileMask keeps it for all layers."


@click.command()
@click.option("--seq", "seqs", type=SIZES, default="128,256,512,1024", show_default=True, help="Queries, and as many keys.")
@click.option("--dim", type=click.IntRange(1, 256), default=64, show_default=True, help="Head dim.")
@click.option("--heads", type=click.IntRange(min=1), default=1, show_default=True, help="Heads; each is executed.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Batch elements; each is executed.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float16", show_default=True, help="Of the arrays.")
@click.option("--causal", is_flag=True, help="Query i sees the keys up to i.")
@click.option(
    "--documents", type=click.IntRange(min=1), default=1, show_default=True, help="In a row, of equal length: a query sees its own."
)
@click.option("--arch", type=ARCHITECTURE, default=HOST.name, show_default=True, help="Whose kernels are executed.")
@plot_option
@json_option
def traffic(
    seqs: tuple[int, ...],
    dim: int,
    heads: int,
    batch: int,
    dtype: str,
    causal: bool,
    documents: int,
    arch: Architecture,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Count the device memory that attention moves.

    Bytes, FLOPs and memory of the textbook formula (naive) and of the kernels v1 and v2, beside the papers' formulas: why
    attention that keeps its scores on the chip is fast, visible without a GPU.

    \b
    Examples:
      cupy-flash traffic
      cupy-flash traffic --seq 256,512 --dim 128 --causal --plot traffic.png
      cupy-flash traffic --seq 3072 --documents 8
    """
    try:
        toolchain.prove()
    except CompileError as error:
        raise click.ClickException(str(error)) from error
    settings = [Setting(seq, dim, batch, heads, dtype, causal, documents) for seq in seqs]
    try:
        counts = echo_progress(_counted(settings, arch), sum(len(s.algorithms) for s in settings), "executing")
    except (UnsupportedError, ValueError) as error:
        raise UserError(str(error)) from error
    if plot:
        from ..measure.plots import plot_traffic

        plot_traffic(counts, plot)
        click.echo(f"figure in {plot}", err=True)
    if as_json:
        echo_json({"architecture": arch.name, "counts": list(map(_record, counts))})
        return
    mask = ("causal" if causal else "full") + (f", {documents} documents" if documents > 1 else "")
    click.echo(f"forward of {dtype}, batch {batch}, heads {heads}, dim {dim}, {mask}; kernels of {arch}\n")
    _print_moved(counts)
    click.echo()
    _print_memory(counts)
    chips = sorted({(c.algorithm, c.chip_elements) for c in counts if c.chip_elements})
    click.echo("\n" + NOTES.format(chips=", ".join(f"{name} {elements}" for name, elements in chips)))
    if documents > 1:
        click.echo(KEPT)


def _counted(settings: list[Setting], arch: Architecture) -> Iterator[Count]:
    for setting in settings:
        for algorithm in setting.algorithms:
            yield count(setting, algorithm, arch.name)


def _print_moved(counts: list[Count]) -> None:
    rows = []
    for naive, *kernels in _by_setting(counts):
        for c in (naive, *kernels):
            times = "" if c is naive else f"{naive.moved_bytes / c.moved_bytes:.1f}"
            figures = (_bytes(c.read_bytes), _bytes(c.written_bytes), times, f"{c.flops * 1e-9:.3f}", f"{c.intensity:.0f}")
            rows.append((str(c.setting.seq), c.algorithm, *figures, f"{c.constant:.2f}"))
    header = ("seq", "", "read", "written", "naive is x", "GFLOP", "FLOP/byte", "constant")
    _print(header, rows, "><>>>>>>")


def _print_memory(counts: list[Count]) -> None:
    rows = []
    for naive, *kernels in _by_setting(counts):
        saved = [f"{1 - c.memory_bytes / naive.memory_bytes:.1%}" for c in kernels]
        rows.append((str(naive.setting.seq), *(_bytes(c.memory_bytes) for c in (naive, *kernels)), *saved))
    names = counts[0].setting.algorithms[1:]
    header = ("seq", "memory of naive", *names, *(f"{name} saves" for name in names))
    _print(header, rows, ">" * len(header))


def _by_setting(counts: list[Count]) -> Iterator[tuple[Count, ...]]:
    for _, group in groupby(counts, lambda c: c.setting):
        yield tuple(group)


def _print(header: tuple[str, ...], rows: list[tuple[str, ...]], sides: str) -> None:
    for line in table(header, rows, sides, terminal_width()):
        click.echo(line)


def _bytes(size: int) -> str:
    """Thousands of bytes, in which the smallest and the largest figure of a table can be compared."""
    return f"{size / 1000:.1f} kB"


def _record(c: Count) -> dict[str, object]:
    derived = ("moved_bytes", "intensity", "formula", "constant")
    return asdict(c) | {name: getattr(c, name) for name in derived}
