"""``bench-scores``: what features of scores cost on this machine's GPU, beside dense attention and beside peers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy

from .. import __version__
from ..api.backward import plan_attention_backward
from ..api.forward import plan_attention
from ..measure.bench import CellResult, Effort, measure
from ..measure.cells import DIRECTIONS, Cell
from ..measure.features import FEATURES, FLEXIBLE, FeatureCell
from ..plan.classify import CONSUMER_ROWS, rows_of_list
from ..problem.arrays import DTYPES
from .bench import SECONDS, machine_of
from .lists import names
from .output import echo_progress, table, terminal_width, tflops
from .plotting import OUTPUT

NAMES = tuple(feature.name for feature in FEATURES)


@click.command("bench-scores")
@click.argument("direction", type=click.Choice((*DIRECTIONS, "both")), default="both")
@click.option("--feature", "chosen", multiple=True, type=click.Choice(NAMES), help="Only this; may be given several times.")
@click.option("--dim", "dims", type=names("32", "64", "128", "256"), help="Only these head dims.")
@click.option("--flex", type=names(*FLEXIBLE, "none"), default=",".join(FLEXIBLE), help="Where FlexAttention takes part.")
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Turns in a cell.")
@click.option("--seconds", type=SECONDS, default=0.1, show_default=True, help="GPU time of a contender in a cell.")
@click.option("--json", "json_path", type=OUTPUT, metavar="FILE", help="Write what was found, again after each cell.")
@click.pass_context
def bench_scores(
    context: click.Context,
    direction: str,
    chosen: tuple[str, ...],
    dims: tuple[str, ...] | None,
    flex: tuple[str, ...],
    rounds: int,
    seconds: float,
    json_path: Path | None,
) -> None:
    """Measure ALiBi, sinks, softcaps, expressions, biases, masks, windows and dropout.

    In each cell dense attention of the same shape takes turns with the feature. The share of its rate is for each pair in a tile
    that has to be computed. Results are judged before they are timed. Exits with 1 if a kernel of this project fails.

    \b
    Examples:
      cupy-flash bench-scores --json scores.json
      cupy-flash bench-scores forward --feature alibi --feature dropout --flex none
    """
    from ..measure.feature_runs import FeatureBench, contenders

    machine = machine_of(FeatureBench)
    directions = DIRECTIONS if direction == "both" else (direction,)
    cells = [cell for feature in FEATURES if feature.name in (chosen or NAMES) for cell in feature.cells(directions)]
    cells = [cell for cell in cells if dims is None or str(cell.dim) in dims]
    effort = Effort(rounds, seconds)
    measured = (next(measure([cell], contenders(cell, flex), machine, effort)) for cell in cells)
    records: list[dict[str, Any]] = []
    list(echo_progress(_recorded(measured, records, machine, effort, json_path), len(cells), "measuring"))
    click.echo(machine.device)
    print_records(records)
    context.exit(1 if any(failure["contender"] in ("v2", "kept", "dense") for r in records for failure in r["failures"]) else 0)


def _recorded(
    results: Iterable[CellResult], records: list[dict[str, Any]], machine: Any, effort: Effort, path: Path | None
) -> Iterator[CellResult]:
    """The results as they come; all of them so far are among the records, and in the file, before the next is measured."""
    for result in results:
        records.append(record_of(result, machine.architecture.name))
        if path is not None:
            report = {"cupy_flash": __version__, "device": machine.device, "versions": machine.versions, "effort": asdict(effort)}
            path.write_text(json.dumps(report | {"cells": records}, indent=2) + "\n", encoding="utf-8")
        yield result


def record_of(result: CellResult, architecture: str) -> dict[str, Any]:
    """A cell as JSON has it; rates are in TFLOP/s, `share` is of dense attention's, for each pair in tiles that are computed."""
    cell = result.cell
    computed, of_dense = computed_pairs(cell, architecture), computed_pairs(cell.plain, architecture)
    share, dense = {}, result.of("dense")
    for name in ("v2", "kept"):
        found = result.of(name)
        if found and dense:
            share[name] = dense.seconds / found.seconds * computed / of_dense
    return {
        "feature": cell.feature.name,
        **{name: getattr(cell, name) for name in ("direction", "dtype", "dim", "causal", "seq", "batch", "heads", "pairs")},
        "computed_pairs": computed,
        "computed_pairs_dense": of_dense,
        "gate": cell.feature.gate(cell.direction),
        "share": share,
        "measurements": [asdict(m) | {"tflops": cell.flops / m.seconds / 1e12} for m in result.measurements],
        "failures": [asdict(failure) for failure in result.failures],
    }


def computed_pairs(cell: Cell, architecture: str) -> int:
    """The pairs, of each head, in tiles that the kernel of an architecture, or each of its consumers by itself, computes."""
    q = numpy.empty(cell.shape, DTYPES[cell.dtype])  # whose memory nothing touches
    options = cell.feature.options(cell, numpy.random.default_rng(0)) if isinstance(cell, FeatureCell) and cell.feature.seen else {}
    asked = {"causal": cell.causal, "backend": "host", "arch": architecture, **options}
    if cell.direction == "forward":
        plan = plan_attention(q, q, q, **asked)
    else:
        plan = plan_attention_backward(q, q, q, q, q, numpy.empty(cell.shape[:-1], numpy.float32), **asked)
    config = plan.kernel.config
    feature = cell.feature if isinstance(cell, FeatureCell) else None
    seen = feature and feature.seen
    if not seen and not cell.causal:
        return cell.seq**2
    shown = seen(cell) if seen else numpy.tri(cell.seq, dtype=bool)
    in_window = plan.kernel.file == "fwd_hopper" and seen and not config.TILE_LIST
    rows = CONSUMER_ROWS if in_window else rows_of_list(plan.kernel)
    for axis, step in enumerate((rows, config.TILE_KV)):
        shown = numpy.logical_or.reduceat(shown, range(0, cell.seq, step), axis=axis)
    return int(numpy.count_nonzero(shown)) * rows * config.TILE_KV


def print_records(records: list[dict[str, Any]]) -> None:
    """Print times, shares and failures."""
    rows = []
    for r in records:
        times = {m["contender"]: m for m in r["measurements"]}
        shares = " ".join(f"{name} {share:.2f}" for name, share in r["share"].items())
        peers = ", ".join(
            f"{name} {m['seconds'] * 1e6:.0f}{'!' if m['note'] else ''}" for name, m in times.items() if name not in ("v2", "dense")
        )
        micro, rate = ((f"{times['v2']['seconds'] * 1e6:.0f}", tflops(times["v2"]["tflops"] * 1e12)) if "v2" in times else ("", ""))
        dense = f"{times['dense']['seconds'] * 1e6:.0f}" if "dense" in times else ""
        gate = f"{r['gate']:.2f}" if r["gate"] else ""
        rows.append((r["feature"], r["direction"], str(r["dim"]), str(r["seq"]), micro, rate, dense, shares, gate, peers))
    header = ("feature", "", "dim", "seq", "µs", "TFLOP/s", "dense µs", "share", "gate", "others µs")
    for line in table(header, rows, "<<>>>>><><", terminal_width()):
        click.echo(line)
    notes = {(f["contender"], r["feature"], f["message"]) for r in records for f in r["failures"]}
    notes |= {(m["contender"], r["feature"], m["note"]) for r in records for m in r["measurements"] if m["note"]}
    for contender, feature, message in sorted(notes):
        click.echo(f"{contender}, {feature}: {message}")
