"""``bench-distributed``: how fast attention is on several GPUs of this host, and what the model says of any number."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..measure.distributed import SCHEMES, Measured, Setting, forecasts, machine, measured, read
from ..measure.spans import KINDS, mean_of
from .lists import SIZES, names
from .output import UserError, table, terminal_width, tflops
from .plotting import OUTPUT, plot_option


@click.command("bench-distributed")
@click.option("--devices", type=SIZES, default="2", show_default=True, help="How many of them, from the first on.")
@click.option("--rows", type=SIZES, default="8192", show_default=True, help="Tokens of each device.")
@click.option("--heads", type=click.IntRange(1), default=64, show_default=True, help="Query heads.")
@click.option("--heads-kv", type=click.IntRange(1), default=8, show_default=True, help="Key-value heads.")
@click.option("--dim", type=click.IntRange(1), default=128, show_default=True, help="Head dim.")
@click.option("--schemes", type=names(*SCHEMES), default=",".join(SCHEMES), show_default=True, help="What is measured.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Times of which the median is taken.")
@click.option("--calls", type=click.IntRange(1), default=4, show_default=True, help="In a round, behind one that does not count.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True, help="Seconds.")
@click.option("--forecast", is_flag=True, help="What the model says, of any number of devices, without any.")
@click.option("--mpi", is_flag=True, help="Ranks are the processes that mpiexec has started, not threads of this one.")
@click.option("--timeline", is_flag=True, help="Note when each rank computes, copies and exchanges.")
@click.option("--json", "json_path", type=OUTPUT, metavar="FILE", help="Write what was found.")
@plot_option
@click.option(
    "--read", "found_path", type=click.Path(path_type=Path), metavar="FILE", help="Measure nothing: draw what --json wrote."
)
@click.pass_context
def bench_distributed(
    context: click.Context,
    devices: tuple[int, ...],
    rows: tuple[int, ...],
    heads: int,
    heads_kv: int,
    dim: int,
    schemes: tuple[str, ...],
    rounds: int,
    calls: int,
    timeout: float,
    forecast: bool,
    mpi: bool,
    timeline: bool,
    json_path: Path | None,
    plot: Path | None,
    found_path: Path | None,
) -> None:
    """Measure attention on several GPUs.

    In bfloat16, causal, in zigzag order: each scheme through NCCL, forward and backward, in TFLOP/s of each device and as a share
    of what it does alone, beside the share that the model says. What a device does alone is measured in the same rounds, on all
    devices at the same time. "host ms" is how long a call takes until it returns: if that is as long as the call, the device waits
    for Python, which threads take turns with and processes (--mpi) do not. Results are judged before they are timed. Exits with 1
    if one fails.

    With --timeline, one more call of each kind is noted, behind two others: when each rank computes, merges, copies and exchanges.
    An exchange lasts until the other rank has come as well. Sums are printed, --json has all of it, and --plot draws it.

    \b
    Examples:
      cupy-flash bench-distributed --devices 2,4,8 --rows 8192,65536 --json found.json
      mpiexec -n 2 cupy-flash bench-distributed --mpi
      cupy-flash bench-distributed --timeline --json found.json --plot found.png
      cupy-flash bench-distributed --forecast --devices 8,64 --rows 131072
    """
    _check_timeline(timeline, forecast, plot, found_path)
    if found_path is not None:
        _draw(*_found(found_path), plot)
        return
    world = None
    if mpi and not forecast:
        world = _world()
        devices = (world.size,)
    shows = world is None or world.rank == 0
    if not forecast:
        _check_devices(max(devices) if world is None else 1)
    report: dict[str, Any] = {"version": __version__}
    if not forecast:
        report |= {"machine": machine(), "ranks": "threads" if world is None else "processes"}
    found: list[Measured] = []
    for count in devices:
        for tokens in rows:
            setting = Setting(tokens, heads, heads_kv, dim)
            if forecast:
                found += forecasts(setting, count, schemes)
            else:
                found += measured(setting, count, schemes, rounds, calls, timeout, world, timeline)
            if json_path is not None and shows:
                text = json.dumps({**report, "results": [asdict(row) for row in found]}, indent=2)
                json_path.write_text(text + "\n", encoding="utf-8")
    failed = [row for row in found if row.error]
    if not shows:
        context.exit(int(bool(failed)))
    if "machine" in report:
        click.echo(f"{report['machine']}; ranks are {report['ranks']}")
    times = ("ms", "host ms", "TFLOP/s", "alone", "share", "model")
    head = ("devices", "tokens", "scheme", "direction", *times, "sent MB", "memory MB")
    lines = [
        (
            str(row.ranks), str(row.rows), row.scheme, row.direction, _milliseconds(row.seconds), _milliseconds(row.host),
            *("-" if rate is None else tflops(rate) for rate in (row.rate, row.alone)),
            "-" if row.share is None else f"{row.share:.3f}", f"{row.forecast:.3f}",
            f"{row.sent_bytes / 1e6:.0f}", f"{row.memory_bytes / 1e6:.0f}",
        )
        for row in found
    ]  # fmt: skip
    click.echo("\n".join(table(head, lines, ">><<>>>>>>>>", terminal_width())))
    if timeline:
        _print_spans(found)
    if plot is not None:
        _draw(found, report["machine"], plot)
    for row in failed:
        click.echo(f"{row.scheme}, {row.direction}, {row.ranks} devices: {row.error}", err=True)
    context.exit(int(bool(failed)))


def _check_timeline(timeline: bool, forecast: bool, plot: Path | None, found_path: Path | None) -> None:
    if timeline and (forecast or found_path is not None):
        raise click.UsageError("--timeline: expected devices to be measured, got --forecast or --read")
    if (plot is None) if found_path is not None else (plot is not None and not timeline):
        raise click.UsageError("--plot: expected beside --timeline, or beside --read, which needs it")


def _found(path: Path) -> tuple[list[Measured], str]:
    """What was measured, and on what."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return list(read(report["results"])), str(report["machine"])
    except OSError as error:
        raise UserError(f"--read: expected a file that --json has written, got {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--read: expected a file that --json has written of devices, got {str(path)!r}: {error!r}") from error


def _draw(found: list[Measured], machine: str, plot: Path) -> None:
    if not any(row.spans for row in found):
        raise UserError("--plot: expected results with timelines, which --timeline notes, got none")
    from ..measure.plots import plot_timelines

    for path in plot_timelines(found, machine, plot):
        click.echo(f"figure in {path}", err=True)


def _print_spans(found: list[Measured]) -> None:
    """What the time of a call goes to, in milliseconds, as the mean of ranks."""
    head = ("devices", "tokens", "scheme", "direction", "noted ms", *KINDS, "beneath attention")
    lines = [
        (str(row.ranks), str(row.rows), row.scheme, row.direction, *map(_milliseconds, mean_of(row.spans)))
        for row in found
        if row.spans
    ]
    click.echo("\n" + "\n".join(table(head, lines, ">><<>>>>>>", terminal_width())))


def _check_devices(devices: int) -> None:
    try:
        import cupy

        there = cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0
    except ImportError:
        there = 0
    if there < devices:
        raise click.UsageError(f"--devices: expected at most {there}, which this machine has, got {devices}; --forecast needs none")
    try:
        from cupy.cuda import nccl  # noqa: F401  which CuPy has where it finds the library
    except ImportError:
        raise click.UsageError("several devices need NCCL: pip install nvidia-nccl-cu12, or -cu13 beside CuPy of CUDA 13") from None


def _world() -> Any:
    try:
        from mpi4py import MPI
    except ImportError:
        raise click.UsageError("--mpi: expected mpi4py, which is not installed: pip install -e '.[mpi]'") from None
    return MPI.COMM_WORLD


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"
