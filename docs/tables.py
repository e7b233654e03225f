"""The tables of `benchmarks.md`, from the measurements in `docs/data`. Standard library only.

A page says where a table belongs: between ``<!-- table NAME -->`` and ``<!-- /table -->``.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OURS = "cupy_flash"
Cell = tuple[str, str, str, str]  # dtype, dim, mask, sequence length


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file of measurements."""
    with open(FOLDER / "data" / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def rates(run: str) -> dict[Cell, dict[str, int]]:
    """TFLOP/s of each contender in each cell of a run, in the order of the file."""
    cells: dict[Cell, dict[str, int]] = {}
    for row in read("rates"):
        if row["run"] == run:
            cells.setdefault((row["dtype"], row["dim"], row["mask"], row["seq"]), {})[row["contender"]] = int(row["tflops"])
    return cells


def filled(page: str, tables: Mapping[str, Callable[[], str]] | None = None) -> str:
    """A page with its tables made anew, by default those from measurements."""
    makers = TABLES if tables is None else tables
    return re.sub(
        r"(<!-- table ([\w-]+) -->\n).*?(<!-- /table -->)",
        lambda found: found[1] + makers[found[2]]() + "\n" + found[3],
        page,
        flags=re.DOTALL,
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in line) + "|" for line in lines)


def _pivot(run: str) -> str:
    """A row for each dtype, dim and mask, a column for each sequence length; in a cell the rates of all contenders."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for (*kind, seq), contenders in rates(run).items():
        peers = [name for name in contenders if name != OURS]
        text = " / ".join([f"**{contenders[OURS]}**", *(str(contenders[name]) for name in peers)])
        lines.setdefault((*kind, ", ".join(peers)), {})[seq] = text
    one_dtype, one_peer = (len({line[i] for line in lines}) == 1 for i in (0, -1))
    first, last = int(one_dtype), -1 if one_peer else None
    seqs = list(next(iter(lines.values())))
    head = ["dtype", "dim", "mask"][first:] + [f"{int(seq):,}" for seq in seqs] + ([] if one_peer else ["peer"])
    return markdown(head, [[*line[first:3], *cells.values(), *line[3:last]] for line, cells in lines.items()])


def _ratios(run: str) -> str:
    """How many times as fast as each peer, and as the better of them in each cell."""
    cells = rates(run).values()
    peers = [name for name in next(iter(cells)) if name != OURS]
    rows = []
    for name, chosen in [*((peer, [peer]) for peer in peers), *[("the better of them in each cell", peers)] * (len(peers) > 1)]:
        times = [cell[OURS] / max(cell[peer] for peer in chosen) for cell in cells]
        mean = math.exp(sum(map(math.log, times)) / len(times))
        ahead = sum(ratio > 1 for ratio in times)
        rows.append([name, f"{mean:.2f}", f"{min(times):.2f}", f"{max(times):.2f}", f"{ahead} of {len(times)}"])
    return markdown(["times as fast as", "geometric mean", "least", "most", "cells ahead"], rows)


def _run(run: str) -> str:
    """What is known of a run."""
    row = next(row for row in read("runs") if row["run"] == run)
    return markdown(["run", row.pop("run")], [[name, value] for name, value in row.items()])


def _as_is(name: str) -> str:
    rows = read(name)
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def _others(table: str) -> str:
    rows = [list(row.values())[1:] for row in read("other") if row["table"] == table]
    head = ["", OURS, "beside", "date"]
    if not any(row[2] for row in rows):
        head, rows = [*head[:2], head[3]], [[*row[:2], row[3]] for row in rows]
    return markdown(head, rows)


RUNS = ("forward", "backward", "forward-h100", "backward-h100", "forward-float32", "backward-float32", "forward-v2", "backward-v2")
TABLES = (
    {f"rates-{run}": lambda run=run: _pivot(run) for run in RUNS}
    | {f"ratios-{run}": lambda run=run: _ratios(run) for run in RUNS[:6]}
    | {f"run-{run}": lambda run=run: _run(run) for run in RUNS}
    | {name: lambda name=name: _as_is(name) for name in ("few-queries", "training", "scores", "lengths", "caches", "ranks")}
    | {f"other-{table}": lambda table=table: _others(table) for table in ("shapes", "v2", "order", "host", "float32")}
)
