"""How fast attention is, beside its peers: what is measured, in which order, and what follows from it.

A `Cell` is a problem; a `Contender` is a way to compute it. In a cell, every contender's result is judged first. Then all of them
take turns, a few launches each, for several rounds, in orders in which each follows every other one as often: a kernel that made
the GPU hot makes the next one slow. The first round does not count: whoever comes first in a cell finds the GPU cool. A contender
that raises is a `Failure`, and so is a kernel of this project whose result is wrong: neither stops the cell or the others. A peer
whose error is beyond the bound is measured, with a note that says so.

Nothing here touches a GPU: `stopwatch` does, through the `Bench` that is handed in.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol, TypeAlias

from .cells import DIRECTIONS, Cell

Array: TypeAlias = Any  # cupy.ndarray; CuPy may be absent, so it cannot be named here

WARM_UP = 3  # launches that are timed to learn how long one takes
FEWEST, MOST = 3, 100  # launches in a contender's turn


@dataclass(frozen=True)
class Run:
    """A contender made ready for one cell.

    Parameters
    ----------
    launch : callable
        Queues the work once, and returns whatever holds its results.
    arrays : callable
        From that, the results as CuPy arrays (batch, heads, seq, dim): `out`, or `dq`, `dk` and `dv`.
    library : {'cupy', 'torch'}
        On whose current stream the work is queued: its events measure it.
    differentiates : bool
        Whether PyTorch finds out in each launch what there is to compute.
    calls : int
        How often a launch does the work, one call behind the other. Times are of one.
    """

    launch: Callable[[], Any]
    arrays: Callable[[Any], tuple[Array, ...]]
    library: str = "cupy"
    differentiates: bool = False
    calls: int = 1


@dataclass(frozen=True)
class Contender:
    """A way to compute attention.

    Parameters
    ----------
    name : str
    prepare : callable
        From a cell and its inputs, a `Run`. Whatever it raises is why the contender is left out.
    ours : bool
        Whether it is a kernel of this project.
    directions : tuple of str
    solves : callable
        From a cell, the problem that its results are judged as: another one for what a cell is compared with, None for results that
        cannot be judged, because they are random.
    """

    name: str
    prepare: Callable[[Cell, tuple[Array, ...]], Run]
    ours: bool = False
    directions: tuple[str, ...] = DIRECTIONS
    solves: Callable[[Cell], Cell | None] = lambda cell: cell


@dataclass(frozen=True)
class Verdict:
    """Whether results are right, as far as they could be judged.

    Parameters
    ----------
    ok : bool
    note : str
        What is wrong, or why they were not judged; '' for results that are right.
    """

    ok: bool = True
    note: str = ""


class Bench(Protocol):
    """The machine that measures; `stopwatch.GpuBench` is one."""

    def make_inputs(self, cell: Cell) -> tuple[Array, ...]:
        """q, k, v, and for the backward dout."""

    def judge(self, cell: Cell, inputs: tuple[Array, ...], results: tuple[Array, ...]) -> Verdict:
        """Whether the results are right."""

    def captured(self, run: Run) -> Run:
        """The same work, launched from a CUDA graph, which leaves its host out of what is measured."""

    def time(self, run: Run, launches: int) -> list[float]:
        """Seconds of each of so many launches, divided by the calls in it."""

    def matmul_rate(self, dtype: str) -> float:
        """Operations per second of cuBLAS."""

    def clear(self) -> None:
        """Give back the memory of a cell that is done."""


@dataclass(frozen=True)
class Measurement:
    """How long one launch of a contender takes, or one call of those in it.

    Parameters
    ----------
    contender : str
    seconds : float
        The median over the rounds of the median of each.
    low, high : float
        Seconds that 20 and 80 per cent of all launches stay below.
    launches : int
    note : str
        What is wrong with the result of a peer, or why a result was not judged; '' for one that is right.
    """

    contender: str
    seconds: float
    low: float
    high: float
    launches: int
    note: str = ""

    @property
    def spread(self) -> float:
        """From `low` to `high`, as a share of the median."""
        return (self.high - self.low) / self.seconds


@dataclass(frozen=True)
class Failure:
    """Why a contender was not measured."""

    contender: str
    message: str


@dataclass(frozen=True)
class CellResult:
    """What came out of a cell."""

    cell: Cell
    measurements: tuple[Measurement, ...] = ()
    failures: tuple[Failure, ...] = ()

    def of(self, contender: str) -> Measurement | None:
        """The measurement of a contender, or None."""
        return next((m for m in self.measurements if m.contender == contender), None)

    def rate(self, contender: str) -> float | None:
        """Operations per second of a contender, or None."""
        found = self.of(contender)
        return found and self.cell.flops / found.seconds

    def speedup(self, contender: str, peer: str) -> float | None:
        """How many times as fast as a peer a contender is; None where either was not measured."""
        one, other = self.of(contender), self.of(peer)
        return other.seconds / one.seconds if one and other else None


@dataclass(frozen=True)
class Comparison:
    """A contender beside a peer, over all cells of a direction in which both were measured.

    Parameters
    ----------
    direction, contender, peer : str
    cells : int
    mean : float
        Geometric mean of how many times as fast the contender is.
    least, most : float
    """

    direction: str
    contender: str
    peer: str
    cells: int
    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Parameters
    ----------
    rounds : int
        Turns that each contender has in a cell, besides one that does not count. See `order_of` for how many are fair.
    seconds : float
        Device time of a contender in a cell, over all rounds; a turn has `FEWEST` to `MOST` launches whatever they take.
    graphs : bool
        Whether launches come from CUDA graphs, for those contenders that can be captured. Others have a note that says why not.
    """

    rounds: int = 6
    seconds: float = 0.25
    graphs: bool = False

    def launches(self, seconds_each: float) -> int:
        """Launches of a turn, for a contender of which one takes so long."""
        return min(max(round(self.seconds / self.rounds / seconds_each), FEWEST), MOST)


@dataclass
class _Turns:
    """A contender's turns in a cell so far."""

    run: Run
    note: str
    launches: int
    rounds: list[list[float]] = field(default_factory=list)


def measure(cells: Iterable[Cell], contenders: Sequence[Contender], bench: Bench, effort: Effort) -> Iterator[CellResult]:
    """Measure cells, one after another.

    Parameters
    ----------
    cells : iterable of Cell
    contenders : sequence of Contender
        Those that do not serve a cell's direction are left out there.
    bench : Bench
    effort : Effort

    Yields
    ------
    CellResult
    """
    for cell in cells:
        yield _measure(cell, [c for c in contenders if cell.direction in c.directions], bench, effort)
        bench.clear()


def _measure(cell: Cell, contenders: list[Contender], bench: Bench, effort: Effort) -> CellResult:
    turns: dict[str, _Turns] = {}
    failures: list[Failure] = []
    try:
        inputs = bench.make_inputs(cell)
    except Exception as error:  # most likely a kernel of an earlier cell has broken the context
        return CellResult(cell, failures=tuple(Failure(c.name, reason(error)) for c in contenders))
    for contender in contenders:
        with warnings.catch_warnings(record=True) as notes:  # PyTorch says in warnings why a backend does not serve
            warnings.simplefilter("always")
            try:
                run = contender.prepare(cell, inputs)
                verdict = _judged(contender, cell, inputs, run, bench)
                if contender.ours and not verdict.ok:
                    raise ArithmeticError(verdict.note)
                if effort.graphs:
                    run, verdict = _captured(run, verdict, bench)
                launches = effort.launches(run.calls * statistics.median(bench.time(run, WARM_UP)))
                turns[contender.name] = _Turns(run, verdict.note, launches)
            except Exception as error:  # whatever it is, it is what became of this contender, and the others are still to run
                failures.append(Failure(contender.name, reason(error, *(str(note.message) for note in notes))))
    for number in range(effort.rounds + 1):
        for name in order_of(list(turns), number):
            turn = turns[name]
            try:
                seconds = bench.time(turn.run, turn.launches)
                if number > 0:
                    turn.rounds.append(seconds)
            except Exception as error:
                failures.append(Failure(name, reason(error)))
                del turns[name]
    return CellResult(cell, tuple(_summed_up(name, turn) for name, turn in turns.items()), tuple(failures))


def _judged(contender: Contender, cell: Cell, inputs: tuple[Array, ...], run: Run, bench: Bench) -> Verdict:
    results, problem = run.arrays(run.launch()), contender.solves(cell)
    return Verdict(note="not judged: its numbers are random") if problem is None else bench.judge(problem, inputs, results)


def _captured(run: Run, verdict: Verdict, bench: Bench) -> tuple[Run, Verdict]:
    """The run from a graph; where it cannot be captured, itself, with a note."""
    try:
        return bench.captured(run), verdict
    except Exception as error:
        notes = "; ".join(filter(None, (verdict.note, f"not captured: {reason(error)}")))
        return run, Verdict(verdict.ok, notes)


def order_of(names: list[str], number: int) -> list[str]:
    """The order of names in a round, so that over the rounds each follows every other one as often.

    Two or an odd number of names are walked round in steps of 1, 2, 3 ..., which takes one round less than there are names; an
    even number is walked to and fro from another one each time (Williams, 1949), where some follow once more, from one round to
    the next. Of nine names, those three apart never meet.
    """
    count = len(names)
    if count % 2 == 0 and count > 2:
        return [names[(number + (i + 1) // 2 * (-1) ** i) % count] for i in range(count)]
    steps = [step for step in range(1, count + 1) if math.gcd(step, count) == 1]
    return [names[i * steps[number % len(steps)] % count] for i in range(count)]


def _summed_up(name: str, turn: _Turns) -> Measurement:
    every = sorted(seconds for one in turn.rounds for seconds in one)
    low, high = (every[round(share * (len(every) - 1))] for share in (0.2, 0.8))
    return Measurement(name, statistics.median(map(statistics.median, turn.rounds)), low, high, len(every), turn.note)


def reason(error: Exception, *notes: str) -> str:
    """An exception and the warnings before it on one line, each at its first line."""
    texts = [f"{type(error).__name__}: {error}", *notes]
    return "; ".join(dict.fromkeys(text.strip().splitlines()[0] for text in texts if text.strip()))


def compare_all(results: Sequence[CellResult], contenders: Sequence[Contender]) -> tuple[Comparison, ...]:
    """Each kernel of this project beside each other contender, by direction."""
    comparisons = []
    for direction, own, peer in product(DIRECTIONS, contenders, contenders):
        ratios = [r.speedup(own.name, peer.name) for r in results if r.cell.direction == direction]
        ratios = [ratio for ratio in ratios if ratio is not None]
        if own.ours and peer is not own and ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            numbers = (len(ratios), mean, min(ratios), max(ratios))
            comparisons.append(Comparison(direction, own.name, peer.name, *numbers))
    return tuple(comparisons)
