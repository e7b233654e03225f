"""Figures of what commands that measure find. Matplotlib is imported when one is drawn; it is the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench import CellResult
from .spans import beneath
from .traffic import ALGORITHMS, Count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .distributed import Measured

# Okabe and Ito's colours, which people tell apart whatever they see of red and green.
OURS = ("#0072B2", "#56B4E9")  # of the last kernel and the one before it
PEERS = ("#999999", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#F0E442")
PANEL = (4.6, 3.4)  # inches
LANES = {"exchange": PEERS[1], "attention": OURS[0], "merge": PEERS[2], "copy": PEERS[4]}  # of a rank's time, what it goes to


def plot_bench(results: Sequence[CellResult], ours: Sequence[str], title: str, path: Path) -> list[Path]:
    """Draw rates as groups of bars: a row of panels for each mask, a column for each head dim, a group for each sequence length.

    Parameters
    ----------
    results : sequence of CellResult
    ours : sequence of str
        The contenders that are kernels of this project.
    title : str
        What was measured on; direction and dtype are added.
    path : Path
        A file is written for each direction and dtype; where there are several, their names get those of both.

    Returns
    -------
    list of Path
        The files.
    """
    kinds = list(dict.fromkeys((r.cell.direction, r.cell.dtype) for r in results))
    paths = []
    for direction, dtype in kinds:
        chosen = [r for r in results if (r.cell.direction, r.cell.dtype) == (direction, dtype)]
        figure = _bars(chosen, _colours(chosen, ours), ours)
        figure.suptitle(f"attention {direction}, {dtype}, {title}")
        paths.append(path if len(kinds) == 1 else path.with_stem(f"{path.stem}-{direction}-{dtype}"))
        figure.savefig(paths[-1], dpi=160)
    return paths


def plot_traffic(counts: Sequence[Count], path: Path) -> None:
    """Draw bytes moved and memory taken by sequence length.

    Parameters
    ----------
    counts : sequence of Count
    path : Path
        Of the file.
    """
    figure, [[moved, memory]] = _panels(1, 2)
    colours = dict(zip(ALGORITHMS, (PEERS[0], *reversed(OURS))))
    for name, colour in ((name, colours[name]) for name in counts[0].setting.algorithms):
        chosen = [c for c in counts if c.algorithm == name]
        seqs = [c.setting.seq for c in chosen]
        moved.plot(seqs, [c.moved_bytes for c in chosen], "o-", color=colour, label=name)
        memory.plot(seqs, [c.memory_bytes for c in chosen], "o-", color=colour, label=name)
    for axes, what in ((moved, "bytes read and written"), (memory, "bytes in use besides the inputs")):
        axes.set(xscale="log", yscale="log", xlabel="sequence length", title=what)
        seqs = sorted({c.setting.seq for c in counts})
        axes.set_xticks(seqs, [f"{seq:,}" for seq in seqs], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    moved.legend()
    s = counts[0].setting
    figure.suptitle(f"device memory, {s.dtype}, batch {s.batch}, heads {s.heads}, dim {s.dim}, {'causal' if s.causal else 'full'}")
    figure.savefig(path, dpi=160)


def plot_timelines(rows: Sequence[Measured], title: str, path: Path) -> list[Path]:
    """Draw what ranks do when: a panel for each scheme and direction, and in it for each rank what computes above what exchanges.

    Parameters
    ----------
    rows : sequence of Measured
        Those without spans are left out.
    title : str
        What was measured on; ranks and tokens are added.
    path : Path
        A file is written for each number of ranks and of tokens; where there are several, their names get both.

    Returns
    -------
    list of Path
        The files.
    """
    kinds = list(dict.fromkeys((r.ranks, r.rows) for r in rows if r.spans))
    paths = []
    for ranks, tokens in kinds:
        chosen = [r for r in rows if r.spans and (r.ranks, r.rows) == (ranks, tokens)]
        figure = _timelines(chosen)
        figure.suptitle(f"{ranks} ranks of {tokens:,} tokens, {title}")
        paths.append(path if len(kinds) == 1 else path.with_stem(f"{path.stem}-{ranks}-{tokens}"))
        figure.savefig(paths[-1], dpi=160)
    return paths


def _timelines(rows: Sequence[Measured]) -> Figure:
    from matplotlib.patches import Patch

    schemes, directions = (list(dict.fromkeys(getattr(r, name) for r in rows)) for name in ("scheme", "direction"))
    figure, panels = _panels(len(schemes), len(directions))
    of = {(r.scheme, r.direction): r for r in rows}
    for scheme, row in zip(schemes, panels):
        for direction, axes in zip(directions, row):
            if (scheme, direction) in of:
                _lanes(axes, of[scheme, direction])
            else:
                axes.axis("off")
    handles = [Patch(color=colour, label=name) for name, colour in LANES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _lanes(axes: Axes, row: Measured) -> None:
    """Of each rank a lane for what it computes, and one below it for exchanges."""
    for rank, spans in enumerate(row.spans):
        for kind, colour in LANES.items():
            bars = [(1e3 * span.begin, 1e3 * (span.end - span.begin)) for span in spans if span.kind == kind]
            axes.broken_barh(bars, (3 * rank + (kind == "exchange"), 0.9), facecolors=colour)
    hidden, every = (sum(seconds) for seconds in zip(*map(beneath, row.spans)))
    share = f", {hidden / every:.0%} of exchanges beneath attention" if every else ""
    axes.set(title=f"{row.scheme}, {row.direction}{share}", xlabel="ms")
    axes.title.set_fontsize("small")
    lanes = [(3 * rank + lane + 0.45, text) for rank in range(row.ranks) for lane, text in ((0, f"rank {rank}"), (1, "exchanges"))]
    axes.set_yticks(*zip(*lanes), fontsize="small")
    axes.invert_yaxis()


def _bars(results: Sequence[CellResult], colours: dict[str, str], ours: Sequence[str]) -> Figure:
    from matplotlib.patches import Patch

    masks = list(dict.fromkeys(r.cell.mask for r in results))
    dims = list(dict.fromkeys(r.cell.dim for r in results))
    seqs = sorted({r.cell.seq for r in results})
    figure, panels = _panels(len(masks), len(dims), sharey=True)
    for mask, row in zip(masks, panels):
        for dim, axes in zip(dims, row):
            chosen = {r.cell.seq: r for r in results if (r.cell.mask, r.cell.dim) == (mask, dim)}
            _group(axes, [chosen.get(seq) for seq in seqs], colours)
            axes.set_xticks(range(len(seqs)), [f"{seq:,}" for seq in seqs])
            axes.set(title=f"dim {dim}, {mask}", xlabel="sequence length")
        row[0].set_ylabel("TFLOP/s")
    labels = {name: f"cupy_flash {name}" if name in ours else name for name in colours}
    handles = [Patch(color=colour, label=labels[name]) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _group(axes: Axes, results: Sequence[CellResult | None], colours: dict[str, str]) -> None:
    """A bar for each contender in each cell, its lines from the 80th to the 20th percentile of the time."""
    width = 0.85 / len(colours)
    for number, (name, colour) in enumerate(colours.items()):
        found = [(i, r.cell.flops, r.of(name)) for i, r in enumerate(results) if r is not None and r.of(name)]
        rates = [flops / m.seconds / 1e12 for _, flops, m in found]
        below = [max(0, rate - flops / m.high / 1e12) for rate, (_, flops, m) in zip(rates, found)]
        above = [max(0, flops / m.low / 1e12 - rate) for rate, (_, flops, m) in zip(rates, found)]
        places = [i + (number - (len(colours) - 1) / 2) * width for i, _, _ in found]
        axes.bar(places, rates, width, yerr=(below, above), color=colour, error_kw={"linewidth": 0.8})
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _colours(results: Sequence[CellResult], ours: Sequence[str]) -> dict[str, str]:
    """Of all that were measured, in the order of the bars: this project's kernels last."""
    names = list(dict.fromkeys(m.contender for r in results for m in r.measurements))
    own = [name for name in ours if name in names]
    peers = [name for name in names if name not in own]
    return dict(zip(peers, PEERS)) | dict(zip(own, OURS[: len(own)][::-1]))


def _panels(rows: int, columns: int, sharey: bool = False) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * PANEL[0], rows * PANEL[1] + 0.8), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)
