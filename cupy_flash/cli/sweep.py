"""What ``bench --sweep`` refuses, prints and writes; the command itself is in `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import click
from click.core import ParameterSource

from ..errors import UnsupportedError
from ..judge.check import in_parallel
from ..measure.cells import Cell
from ..measure.sweep import Candidate, Swept, candidates, fault_of
from ..plan.architecture import Architecture
from ..plan.kernel import KernelPlan
from .output import UserError, echo_progress, table, terminal_width, tflops

ALONE = ("algorithms", "peers", "deterministic", "plot")  # parameters of the command that a sweep has no use for


def check_sweep(context: click.Context, direction: str, kernels: Sequence[str]) -> None:
    """Refuse what cannot be swept, and options that would have no effect."""
    if direction != "forward":
        raise click.UsageError(f"--sweep: expected the direction forward, as in bench forward --sweep, got {direction}")
    if len(kernels) > 1:
        raise click.UsageError(f"--sweep: expected one --kernel at most, got {', '.join(kernels)}")
    for parameter in context.command.params:
        if parameter.name in ALONE and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--sweep and {parameter.opts[0]} exclude each other")


def candidates_of(
    cells: Sequence[Cell], architecture: Architecture, kernel: str | None
) -> list[tuple[Cell, tuple[Candidate, ...]]]:
    """Each cell with its candidates."""
    try:
        return [(cell, candidates(cell, architecture, kernel)) for cell in cells]
    except (UnsupportedError, ValueError) as error:
        raise UserError(f"--sweep: {error}") from error


def faults_of(cells: Sequence[tuple[Cell, tuple[Candidate, ...]]]) -> dict[KernelPlan, str]:
    """What the compiler says of every candidate, behind a progress bar."""
    plans = list(dict.fromkeys(candidate.plan for _, there in cells for candidate in there))
    return dict(zip(plans, echo_progress(in_parallel(fault_of, plans), len(plans), "compiling")))


def finding_of(result: Swept) -> dict[str, Any]:
    """What a sweep adds to the record of a cell."""
    return {
        "kernel": result.kernel,
        "chosen": result.chosen,
        "fastest": result.fastest and result.fastest.contender,
        "ratio": result.ratio,
        "spread": result.spread,
        "beaten": result.beaten,
        "faults": {fault.contender: fault.message for fault in result.faults},
    }


def print_sweep(results: Sequence[Swept]) -> None:
    """Print all rates, the fastest tile of each cell beside the table's choice, and where that is beaten."""
    for (kernel, dtype, dim, mask), group in groupby(results, lambda r: (r.kernel, r.cell.dtype, r.cell.dim, r.cell.mask)):
        click.echo(f"\n{kernel}, {dtype}, dim {dim}, {mask}: TFLOP/s by sequence length, * behind the table's choice\n")
        _print_rates(list(group))
    click.echo("\nthe table's choice and the fastest tile, in TFLOP/s; how many times as fast that is; larger spread of the two\n")
    header = ("dtype", "dim", "mask", "seq", "chosen", "", "fastest", "", "times", "spread")
    for line in table(header, map(_comparison, results), "<><><><>>>", terminal_width()):
        click.echo(line)
    beaten = [r for r in results if r.beaten]
    click.echo(f"\nthe table's choice is beaten by more than the spread in {len(beaten)} of {len(results)} cells")
    for r in beaten:
        click.echo(f"{r.cell}: {r.fastest.contender} is {r.ratio:.3f} times as fast as {r.chosen}, spread {r.spread:.1%}")


def _print_rates(results: Sequence[Swept]) -> None:
    """The cells of a table differ in their length alone, so they have the same candidates."""
    faults = {fault.contender: fault.message for r in results for fault in r.faults}
    names = dict.fromkeys(found.contender for r in results for found in (*r.measurements, *r.failures, *r.faults))
    rows = [(name, *(_rate(r, name) for r in results), faults.get(name, "")) for name in names]
    header = ("tile", *(f"{r.cell.seq} " for r in results), "")
    for line in table(header, rows, "<" + ">" * len(results) + "<", terminal_width()):
        click.echo(line)


def _rate(result: Swept, name: str) -> str:
    rate = result.rate(name)
    return "" if rate is None else tflops(rate) + ("*" if name == result.chosen else " ")


def _comparison(result: Swept) -> tuple[str, ...]:
    cell, fastest = result.cell, result.fastest
    chosen = result.rate(result.chosen)
    figures = ("", "") if result.ratio is None else (f"{result.ratio:.3f}", f"{result.spread:.1%}")
    return (
        *(cell.dtype, str(cell.dim), cell.mask, str(cell.seq)),
        *(result.chosen, tflops(chosen) if chosen else ""),
        *((fastest.contender, tflops(result.rate(fastest.contender))) if fastest else ("", "")),
        *figures,
    )
