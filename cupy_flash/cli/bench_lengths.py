"""``bench-lengths``: how fast sequences of several lengths are on this machine's GPU: packed, in pages, and while decoding."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..measure.bench import CellResult, Effort, Failure, Measurement, measure, reason
from ..measure.lengths import CALLS, ROWS, LengthsCell, cells
from ..measure.lengths_machine import Graph
from ..measure.lengths_peers import DENSE, PEERS, batch_invariant, contenders
from . import bench
from .lists import names
from .output import echo_progress, table, terminal_width, tflops
from .plotting import OUTPUT

EFFORT = Effort(rounds=3, seconds=0.15)
TITLES = {
    "packed": "documents one behind the other, causal: TFLOP/s of pairs that are seen",
    "pages": "caches in shuffled pages beside contiguous ones",
    "decode": f"one query on each cache, one of {CALLS} calls in a graph: keys and values read once, from memory",
    "step": f"a layer's step of decoding, one of {CALLS} in a graph",
}


@dataclass(frozen=True)
class LengthsReport:
    """All that a run of the command found."""

    device: str
    versions: dict[str, str]
    copy_rate: float | None  # bytes per second that a copy reads and writes
    effort: Effort
    missing: tuple[Failure, ...] = ()  # what was asked for and is not there
    results: tuple[CellResult, ...] = ()
    ours: frozenset[str] = frozenset()
    graphs: dict[tuple[LengthsCell, str], Graph] = field(default_factory=dict)  # of contenders that decode


@click.command("bench-lengths")
@click.option("--rows", type=names(*ROWS), default=",".join(ROWS), show_default=True, help="What is measured.")
@click.option("--peers", type=names(*PEERS, "none"), default=",".join(PEERS), help="By default all that are installed.")
@click.option("--rounds", type=click.IntRange(1), default=EFFORT.rounds, show_default=True, help="Turns in a cell.")
@click.option("--seconds", type=bench.SECONDS, default=EFFORT.seconds, show_default=True, help="GPU time of a contender.")
@click.option("--graphs", is_flag=True, help="Launch the rest from CUDA graphs as well, without the time of a host.")
@click.option("--json", "json_path", type=OUTPUT, metavar="FILE", help="Write what was found, again after each cell.")
@click.pass_context
def bench_lengths(
    context: click.Context,
    rows: tuple[str, ...],
    peers: tuple[str, ...],
    rounds: int,
    seconds: float,
    graphs: bool,
    json_path: Path | None,
) -> None:
    """Measure sequences of several lengths.

    In bfloat16, in one process: documents one behind the other, forward and backward; caches in shuffled pages of several sizes;
    decoding, in microseconds, in bytes of keys and values per second, and as a share of what this card copies; the step of a
    layer, with how many kernels it has. Decoding is timed as one of 20 calls in a graph, which read keys from memory. A call with
    lengths is batch-invariant; what that costs is its share of the rate of the call without, 'dense', which need not be. Results
    are judged before they are timed. Exits with 1 if a kernel of this project fails.

    \b
    Examples:
      cupy-flash bench-lengths --json found.json
      cupy-flash bench-lengths --rows decode,step --peers none
    """
    machine, effort = _machine(), Effort(rounds, seconds, graphs)
    chosen = cells(rows)
    try:
        copy_rate, missing = machine.copy_rate(), ()
    except Exception as error:  # the rest is worth measuring all the same
        copy_rate, missing = None, (Failure("copy", reason(error)),)
    report = LengthsReport(machine.device, machine.versions, copy_rate, effort, missing)
    found = echo_progress(_reports(report, chosen, peers, machine, json_path), len(chosen), "measuring")
    print_report(found[-1])
    failures = [failure for r in found[-1].results for failure in r.failures]
    context.exit(1 if any(failure.contender in found[-1].ours for failure in failures) else 0)


def _machine() -> Any:
    machine = bench.machine_of()
    from ..measure.lengths_machine import LengthsBench

    return LengthsBench(machine)


def _reports(
    report: LengthsReport, chosen: tuple[LengthsCell, ...], peers: tuple[str, ...], machine: Any, path: Path | None
) -> Iterator[LengthsReport]:
    """The report after each cell; it is in the file before the next one is measured."""
    asked = [peer for peer in peers if peer != "none"]
    for cell in chosen:
        graphs: dict[tuple[LengthsCell, str], Graph] = {}

        def told(name: str, graph: Graph, cell: LengthsCell = cell, graphs: dict[Any, Graph] = graphs) -> None:
            graphs[cell, name] = graph

        there, missing = contenders(cell, asked, told)
        # One that decodes is launched from a graph of several calls already.
        [result] = measure([cell], there, machine, replace(report.effort, graphs=report.effort.graphs and not cell.decodes))
        report = replace(
            report,
            versions=machine.versions,
            missing=tuple(dict.fromkeys((*report.missing, *missing))),
            results=(*report.results, result),
            ours=report.ours | {c.name for c in there if c.ours},
            graphs=report.graphs | graphs,
        )
        if path is not None:
            _write(report, path)
        yield report


def _write(report: LengthsReport, path: Path) -> None:
    try:
        path.write_text(json.dumps(record_of(report), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"--json: {error}") from error


def record_of(report: LengthsReport) -> dict[str, Any]:
    """A report as JSON has it."""
    return {
        "cupy_flash": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": report.device,
        "versions": report.versions,
        "copy_gb_per_s": report.copy_rate and report.copy_rate / 1e9,
        "effort": asdict(report.effort),
        "missing": [asdict(failure) for failure in report.missing],
        "cells": [
            {
                **asdict(r.cell),
                "pairs": r.cell.pairs,
                "flops": r.cell.flops,
                "key_bytes": r.cell.key_bytes,
                "measurements": [asdict(m) | figures(r, m, report) for m in r.measurements],
                "failures": [asdict(failure) for failure in r.failures],
            }
            for r in report.results
        ],
    }


def figures(result: CellResult, found: Measurement, report: LengthsReport) -> dict[str, Any]:
    """What follows from a time: rates, shares of what the card copies and of the call without lengths; and what was in a graph."""
    cell, ours, graph = result.cell, found.contender in report.ours, report.graphs.get((result.cell, found.contender))
    rate = cell.key_bytes / found.seconds
    return {
        "ours": ours,
        "batch_invariant": batch_invariant(cell, found.contender) if ours else None,
        "share_of_dense": result.speedup(found.contender, DENSE) if ours else None,
        "tflops": cell.flops / found.seconds / 1e12,
        "key_gb_per_s": rate / 1e9,
        "share_of_copy": rate / report.copy_rate if report.copy_rate else None,
        "kernels": graph and graph.kernels,  # of one call
        "calls": graph.calls if graph else 1,  # in a launch
        "caches": graph.caches if graph else 1,  # that these have in turn
    }


def print_report(report: LengthsReport) -> None:
    """Print a table for each row, and what failed."""
    copies = f"; copies {report.copy_rate / 1e9:.0f} GB/s, read and written" if report.copy_rate else ""
    click.echo(report.device + copies)
    for row in ROWS:
        results = [r for r in report.results if r.cell.row == row]
        lines = [line for r in results for line in _lines(r, report)]
        if lines:
            click.echo(f"\n{row}: {TITLES[row]}\n")
            header = ("", "dim", "", "", "µs", "as fast", "of dense", "TFLOP/s", "GB/s", "of copy", "kernels", "caches")
            for line in table(header, lines, "<><<>>>>>>>>", terminal_width()):
                click.echo(line)
    notes = [f"{failure.contender}: {failure.message}" for failure in report.missing]
    notes += [f"{f.contender}: {r.cell}: failed: {f.message}" for r in report.results for f in r.failures]
    notes += [f"! {m.contender}: {r.cell}: {m.note}" for r in report.results for m in r.measurements if m.note]
    if notes:
        click.echo()
    for line in notes:
        click.secho(line, fg="red" if line.partition(":")[0] in report.ours else "yellow")


def _lines(result: CellResult, report: LengthsReport) -> Iterator[tuple[str, ...]]:
    """A line for each contender: 'as fast' as the first of them, and of this project, its share 'of dense'."""
    cell, first = result.cell, result.measurements[0].contender if result.measurements else ""
    for found in result.measurements:
        of = figures(result, found, report)
        share = "" if of["share_of_copy"] is None or not cell.decodes else f"{of['share_of_copy']:.0%}"
        yield (
            cell.name,
            str(cell.dim),
            cell.direction,
            found.contender + ("!" if found.note else ""),
            f"{found.seconds * 1e6:.1f}",
            f"{result.speedup(found.contender, first):.2f}",
            "" if of["share_of_dense"] is None or found.contender == DENSE else f"{of['share_of_dense']:.0%}",
            "" if cell.decodes else tflops(of["tflops"] * 1e12),
            f"{of['key_gb_per_s']:.0f}" if cell.decodes else "",
            share,
            "" if of["kernels"] is None else str(of["kernels"]),
            str(of["caches"]) if cell.decodes else "",
        )
