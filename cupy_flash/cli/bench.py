"""``bench``: how fast attention is on this machine's GPU, beside its peers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..measure.bench import Bench, CellResult, Contender, Effort, Failure, compare_all, measure, reason
from ..measure.cells import DIRECTIONS, SUITES
from ..measure.peers import ALGORITHMS, KERNELS, PEERS, contenders
from ..measure.sweep import sweep
from .devices import INSTALL_CUPY, cupy_installed, devices
from .lists import SIZES, names
from .output import echo_progress, table, terminal_width, tflops
from .plotting import OUTPUT, plot_option
from .sweep import candidates_of, check_sweep, faults_of, finding_of, print_sweep

DTYPES = ("float16", "bfloat16", "float32")
MASKS = {"full": False, "causal": True}
EFFORT = Effort()
SECONDS = click.FloatRange(min=0, min_open=True)


@dataclass(frozen=True)
class Report:
    """All that a run of the command found."""

    device: str
    versions: dict[str, str]
    matmul: dict[str, float]  # operations per second of cuBLAS, by dtype
    effort: Effort
    deterministic: bool
    sweeps: bool  # results are `Swept`: the contenders of each cell are its candidates, all of this project
    contenders: tuple[Contender, ...]
    missing: tuple[Failure, ...]  # what was asked for and is not there
    results: tuple[CellResult, ...] = ()

    @property
    def ours(self) -> tuple[str, ...]:
        """The contenders that are kernels of this project, by name."""
        return tuple(c.name for c in self.contenders if c.ours)


@click.command()
@click.argument("direction", type=click.Choice((*DIRECTIONS, "both")), default="both")
@click.option("--suite", type=click.Choice(tuple(SUITES)), default="quick", show_default=True, help="What is measured.")
@click.option("--dtype", "dtypes", type=names(*DTYPES), help="Instead of the suite's.")
@click.option("--dim", "dims", type=SIZES, help="Head dims instead of the suite's.")
@click.option("--dim-v", type=click.IntRange(1, 256), help="Of values, if that is another than that of keys.")
@click.option("--seq", "seqs", type=SIZES, help="Sequence lengths instead of the suite's.")
@click.option("--mask", "masks", type=names(*MASKS), default=",".join(MASKS), show_default=True, help="Which masks.")
@click.option("--algorithm", "algorithms", type=names(*ALGORITHMS), default=",".join(ALGORITHMS), help="Of this project.")
@click.option("--kernel", "kernels", type=names(*KERNELS), default=(), help="Of v2: these, not the planner's choice.")
@click.option("--peers", type=names(*PEERS, "none"), default=",".join(PEERS), help="By default all that are installed.")
@click.option("--sweep", "sweeps", is_flag=True, help="Every tile for the forward's kernel, beside the one that is chosen.")
@click.option("--deterministic", is_flag=True, help="This project's backward adds in a fixed order; peers stay as they are.")
@click.option("--rounds", type=click.IntRange(1), default=EFFORT.rounds, show_default=True, help="Turns in a cell.")
@click.option("--seconds", type=SECONDS, default=EFFORT.seconds, show_default=True, help="GPU time of a contender in a cell.")
@click.option("--graphs", is_flag=True, help="Launch from CUDA graphs whatever can be captured: peers without their hosts.")
@click.option("--json", "json_path", type=OUTPUT, metavar="FILE", help="Write what was found, again after each cell.")
@plot_option
@click.pass_context
def bench(
    context: click.Context,
    direction: str,
    suite: str,
    dtypes: tuple[str, ...] | None,
    dims: tuple[int, ...] | None,
    dim_v: int | None,
    seqs: tuple[int, ...] | None,
    masks: tuple[str, ...],
    algorithms: tuple[str, ...],
    kernels: tuple[str, ...],
    peers: tuple[str, ...],
    sweeps: bool,
    deterministic: bool,
    rounds: int,
    seconds: float,
    graphs: bool,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Measure TFLOP/s beside other libraries.

    Forward, backward or both (the default), in one process: cupy_flash, the formula in CuPy, PyTorch's backends and
    FlashAttention-4, as far as they are installed. Every cell has 16,384 tokens of 2048 numbers: heads are 2048 / dim. Results
    are judged before they are timed. Exits with 1 if a kernel of this project fails.

    With --sweep, the forward alone: in each cell all tiles that can serve it, those of the kernel's tuning table and a few more,
    and whether the one that the table chooses is the fastest.

    \b
    Examples:
      cupy-flash bench forward --dim 128 --seq 1024,8192
      cupy-flash bench both --dim 192 --dim-v 128 --dtype bfloat16
      cupy-flash bench both --suite paper --json found.json --plot found.png
      cupy-flash bench forward --sweep --dtype bfloat16
    """
    if sweeps:
        check_sweep(context, direction, kernels)
    if kernels and "v2" not in algorithms:
        raise click.UsageError(f"--kernel is for v2, and --algorithm leaves {', '.join(algorithms)} only")
    directions = DIRECTIONS if direction == "both" else (direction,)
    for kernel in kernels:
        if KERNELS[kernel] not in directions:
            raise click.UsageError(f"--kernel: {kernel} computes the {KERNELS[kernel]}, which is not measured")
    given = {"dtypes": dtypes, "dims": dims, "dim_v": dim_v, "seqs": seqs, "masks": tuple(MASKS[mask] for mask in masks)}
    chosen = replace(SUITES[suite], **{name: value for name, value in given.items() if value})
    cells = chosen.cells(directions)
    machine, effort = machine_of(), Effort(rounds, seconds, graphs)
    if sweeps:
        there, missing = (), ()
        swept = candidates_of(cells, machine.architecture, *kernels or (None,))
        measured = sweep(swept, faults_of(swept), machine, effort)
    else:
        there, missing = contenders(algorithms, [peer for peer in peers if peer != "none"], deterministic, kernels)
        measured = measure(cells, there, machine, effort)
    rates = echo_progress((_matmul_rate(machine, dtype) for dtype in chosen.dtypes), len(chosen.dtypes), "cuBLAS   ")
    matmul = {dtype: rate for dtype, rate in zip(chosen.dtypes, rates) if isinstance(rate, float)}
    missing = (*missing, *(rate for rate in rates if isinstance(rate, Failure)))
    report = Report(machine.device, machine.versions, matmul, effort, deterministic, sweeps, there, missing)

    measured = _written(measured, report, machine, json_path)
    report = replace(report, results=tuple(echo_progress(measured, len(cells), "measuring")), versions=machine.versions)
    print_report(report)
    if plot:
        from ..measure.plots import plot_bench

        title = f"{report.device}, cupy_flash {__version__}"
        for path in plot_bench(report.results, report.ours, title, plot):
            click.echo(f"figure in {path}", err=True)
    failures = [failure for r in report.results for failure in r.failures]
    context.exit(1 if any(report.sweeps or failure.contender in report.ours for failure in failures) else 0)


def machine_of(kind: Callable[[], Any] | None = None) -> Any:
    """This machine's GPU, as a `GpuBench` or what else is asked for."""
    if not cupy_installed():
        raise click.ClickException(f"bench needs CuPy: {INSTALL_CUPY}")
    try:
        found = devices()
    except Exception:  # no driver, or a CuPy that does not load: `doctor` tells them apart
        found = []
    if not found:
        raise click.ClickException("bench needs a CUDA device; the command doctor says what is missing")
    from ..measure.stopwatch import GpuBench

    return (kind or GpuBench)()


def _matmul_rate(machine: Bench, dtype: str) -> float | Failure:
    try:
        return machine.matmul_rate(dtype)
    except Exception as error:  # such as a dtype that CuPy's product lacks: the peers are worth measuring all the same
        return Failure(f"cuBLAS in {dtype}", reason(error))


def _written(results: Iterable[CellResult], report: Report, machine: Bench, path: Path | None) -> Iterator[CellResult]:
    """The results as they come; all of them so far are in the file before the next is measured."""
    _write(report, path)
    for result in results:
        report = replace(report, results=(*report.results, result), versions=machine.versions)
        _write(report, path)
        yield result


def _write(report: Report, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(record_of(report), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"--json: {error}") from error


def record_of(report: Report) -> dict[str, Any]:
    """A report as JSON has it; rates are in TFLOP/s."""
    return {
        "cupy_flash": __version__,
        "device": report.device,
        "versions": report.versions,
        "matmul_tflops": {dtype: rate / 1e12 for dtype, rate in report.matmul.items()},
        "effort": asdict(report.effort),
        "deterministic": report.deterministic,
        "contenders": [{"name": c.name, "ours": c.ours} for c in report.contenders],
        "missing": [asdict(failure) for failure in report.missing],
        "cells": [
            {
                **asdict(r.cell),
                "flops": r.cell.flops,
                "measurements": [asdict(m) | {"tflops": r.cell.flops / m.seconds / 1e12} for m in r.measurements],
                "failures": [asdict(failure) for failure in r.failures],
                **(finding_of(r) if report.sweeps else {}),
            }
            for r in report.results
        ],
        "comparisons": [asdict(comparison) for comparison in compare_all(report.results, report.contenders)],
    }


def print_report(report: Report) -> None:
    """Print rates, comparisons and failures."""
    rates = ", ".join(f"{rate / 1e12:.0f} TFLOP/s in {dtype}" for dtype, rate in report.matmul.items())
    click.echo(report.device + (f"; cuBLAS multiplies two matrices of 8192 rows at {rates}" if rates else ""))
    if report.sweeps:
        print_sweep(report.results)
    else:
        for direction in DIRECTIONS:
            results = [r for r in report.results if r.cell.direction == direction]
            if results:
                _print_rates(results, report)
        _print_comparisons(report)
    _print_notes(report)


def _print_rates(results: Sequence[CellResult], report: Report) -> None:
    names = [c.name for c in report.contenders if any(r.of(c.name) for r in results)]
    first = next((name for name in reversed(report.ours) if name in names), None)
    direction = results[0].cell.direction + (", deterministic" if report.deterministic else "")
    brackets = f", in brackets how many times as fast {first} is" if first else ""
    click.echo(f"\n{direction}: TFLOP/s{brackets}; share of cuBLAS; spread from the 20th to the 80th percentile\n")
    rows = []
    for r in results:
        cell = r.cell
        rates = [_rate(r, name, first) for name in names]
        limit = report.matmul.get(cell.dtype)
        share = f"{r.rate(first) / limit:.0%}" if limit and first and r.of(first) else ""
        spread = max((m.spread for m in r.measurements), default=0)
        rows.append((cell.dtype, cell.dims, cell.mask, str(cell.seq), *rates, share, f"{spread:.1%}"))
    header = ("dtype", "dim", "mask", "seq", *names, "share", "spread")
    for line in table(header, rows, "<><>" + ">" * (len(names) + 2), terminal_width()):
        click.echo(line)


def _rate(result: CellResult, name: str, first: str | None) -> str:
    """Such as '304 (1.13)', with a mark behind a result that is not known to be right."""
    found = result.of(name)
    if found is None:
        return ""
    speedup = result.speedup(first, name) if first and name != first else None
    return tflops(result.rate(name)) + (f" ({speedup:.2f})" if speedup else "") + ("!" if found.note else "")


def _print_comparisons(report: Report) -> None:
    rows = [
        (c.direction, c.contender, c.peer, f"{c.mean:.2f}", f"{c.least:.2f}", f"{c.most:.2f}", str(c.cells))
        for c in compare_all(report.results, report.contenders)
    ]
    if rows:
        click.echo("\ntimes as fast, over all cells with both\n")
        header = ("", "", "beside", "geometric mean", "least", "most", "cells")
        for line in table(header, rows, "<<<>>>>", terminal_width()):
            click.echo(line)


def _print_notes(report: Report) -> None:
    """What is missing, what failed and what is marked, each reason once."""
    lines = [f"{failure.contender}: {failure.message}" for failure in report.missing]
    failed = Counter((f.contender, f.message) for r in report.results for f in r.failures)
    lines += [f"{name}: failed in {number} cells: {message}" for (name, message), number in failed.items()]
    marked = [(m.contender, r.cell, m.note) for r in report.results for m in r.measurements if m.note]
    lines += [f"! {name}: {cell}: {note}" for name, cell, note in marked]
    if lines:
        click.echo()
    for line in lines:
        click.secho(line, fg="red" if line.partition(":")[0] in report.ours else "yellow")
