"""When ranks compute, copy, merge and exchange, as `bench-distributed --timeline` has noted it."""

import csv
import io
import json
import math
from collections.abc import Iterable

from tables import read

from cupy_flash.distributed.timeline import KINDS, Span
from cupy_flash.measure.distributed import read as measured
from cupy_flash.measure.spans import beneath

from .svg import Card

COLOURS = {"attention": "blue", "exchange": "amber", "merge": "green", "copy": "faint"}
NEAR = 5  # microseconds: spans of a kind that are nearer cannot be told apart in the picture
LEFT, TOP, PANEL, GAP = 88, 88, 368, 24
LANE, RANK, HEAD = 16, 44, 26  # of one lane, of both lanes of a rank with what is below them, of what is above the ranks
Panels = dict[tuple[str, str], list[list[Span]]]  # of a scheme and a direction: the spans of each rank, in microseconds


def data(report: str) -> str:
    """The lines of `docs/data/timeline.csv`, from the JSON that `bench-distributed --timeline --json` writes of one problem."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("scheme", "direction", "rank", "kind", "begin", "end"))
    rows = [row for row in measured(json.loads(report)["results"]) if row.spans]
    if not rows or len({(row.ranks, row.rows) for row in rows}) > 1:
        raise ValueError("expected timelines of one number of ranks and of tokens")
    for row in rows:
        for rank, spans in enumerate(row.spans):
            whole = [Span(span.kind, round(1e6 * span.begin), round(1e6 * span.end)) for span in spans]
            lines.writerows((row.scheme, row.direction, rank, span.kind, span.begin, span.end) for span in joined(whole))
    return text.getvalue()


def joined(spans: Iterable[Span]) -> list[Span]:
    """Spans of each kind, those that overlap, touch or nearly do as one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (KINDS.index(span.kind), span.begin)):
        if found and found[-1].kind == span.kind and span.begin - found[-1].end < NEAR:
            last = found.pop()
            span = Span(span.kind, last.begin, max(last.end, span.end))
        found.append(span)
    return found


def ranks() -> str:
    """Draw a row of panels for each scheme, a column for each direction: all panels of a column have the same scale."""
    panels = _panels()
    schemes, directions = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    count = max(map(len, panels.values()))
    tall = HEAD + count * RANK + 14
    width, height = LEFT + len(directions) * (PANEL + GAP), TOP + len(schemes) * tall + 26
    card = Card(width, height, f"When each of {count} ranks computes, copies, merges and exchanges in a call of each scheme")
    x = LEFT
    for kind, colour in COLOURS.items():
        card.rect(x, 20, 12, 12, colour, radius=2)
        card.text(x + 18, 31, kind, 13)
        x += 44 + 7.6 * len(kind)
    for column, direction in enumerate(directions):
        left = LEFT + column * (PANEL + GAP)
        last = max(_end(panels[key]) for key in panels if key[1] == direction)
        card.text(left, 66, direction.capitalize(), 15, also="bold")
        for row, scheme in enumerate(schemes):
            if (scheme, direction) in panels:
                _panel(card, left, TOP + row * tall, scheme, panels[scheme, direction], last, named=column == 0)
        base = TOP + len(schemes) * tall - 14
        for tick in _ticks(last):
            card.text(left + PANEL * tick * 1000 / last, base + 14, f"{tick:g}", 11, "faint", "middle")
        card.text(left + PANEL / 2, base + 30, "milliseconds", 11, "faint", "middle")
    return str(card)


def _panels() -> Panels:
    panels: Panels = {}
    for row in read("timeline"):
        of_ranks = panels.setdefault((row["scheme"], row["direction"]), [])
        while len(of_ranks) <= int(row["rank"]):
            of_ranks.append([])
        of_ranks[int(row["rank"])].append(Span(row["kind"], int(row["begin"]), int(row["end"])))
    return panels


def _end(of_ranks: list[list[Span]]) -> float:
    return max(span.end for spans in of_ranks for span in spans)


def _panel(card: Card, left: float, top: float, scheme: str, of_ranks: list[list[Span]], last: float, named: bool) -> None:
    """Of each rank a lane for what its device computes, and one below it for exchanges, as long as the call is."""
    hidden, every = (sum(times) for times in zip(*map(beneath, of_ranks)))
    card.text(left, top + 14, f'"{scheme}"', 13, also="mono")
    if every:
        share = f"{hidden / every:.0%} of exchanges beneath attention"
        card.text(left + PANEL, top + 14, share, 12, "faint", "end")
    top, scale = top + HEAD, PANEL / last
    for tick in _ticks(last):
        x = left + tick * 1000 * scale
        card.line(x, top - 2, x, top + len(of_ranks) * RANK)
    for rank, spans in enumerate(of_ranks):
        for lane, name in enumerate((f"rank {rank}", "exchanges")):
            y = top + rank * RANK + lane * (LANE + 2)
            if named:
                card.text(left - 8, y + 12, name, 12, "faint" if lane else "ink", "end")
            card.rect(left, y, _end(of_ranks) * scale, LANE, "empty")
        for span in spans:
            y = top + rank * RANK + (span.kind == "exchange") * (LANE + 2)
            long = max((span.end - span.begin) * scale, 0.7)  # else the shortest could not be seen
            card.rect(left + span.begin * scale, y, long, LANE, COLOURS[span.kind])


def _ticks(last: float) -> list[float]:
    """Milliseconds at which there is a rule, at most eight."""
    step = next(step for power in range(-3, 9) for step in (10**power, 2 * 10**power, 5 * 10**power) if last / 1000 / step < 8)
    return [step * i for i in range(math.floor(last / 1000 / step) + 1)]
