"""The tuning table of a forward kernel put to the test: in each cell every tile that can serve it beside the one the table chooses.

A `Candidate` is a plan of the kernel with the tile of another row. Whatever a row says of lengths, masks and copies is left aside,
because that is what a sweep finds out; what stays is that it is wide enough and that its shared memory is there. Candidates that
the compiler spoils, by spills or by serialised wgmma, are named and not timed. The others are contenders like all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

from ..errors import CompileError
from ..machine import nvrtc
from ..plan.architecture import Architecture
from ..plan.few_tiles import WIDEST, narrower
from ..plan.forward import make_forward_plan
from ..plan.fp16_parts import ALL_ROWS
from ..plan.kernel import Config, KernelPlan, configure
from ..plan.rows_between import rows_between
from ..plan.tuning import TileConfig, candidates_for
from ..problem.forward import make_problem
from ..problem.layout import dense_layout
from ..problem.options import Options
from .bench import Bench, CellResult, Contender, Effort, Failure, Measurement, measure
from .cells import Cell
from .peers import planned_run


@dataclass(frozen=True)
class Candidate:
    """A tile for a cell.

    Parameters
    ----------
    name : str
        The tile, with as many constants as tell it from the other candidates of the cell.
    plan : KernelPlan
    chosen : bool
        Whether it is what the planner takes.
    """

    name: str
    plan: KernelPlan
    chosen: bool


@dataclass(frozen=True)
class Swept(CellResult):
    """What came out of a cell in which the contenders are candidates.

    Parameters
    ----------
    cell, measurements, failures
        As in a `CellResult`.
    kernel : str
        Whose tiles the candidates are.
    chosen : str
        The candidate that the planner takes.
    faults : tuple of Failure
        Candidates that were not timed because of what the compiler made of them.
    """

    kernel: str = ""
    chosen: str = ""
    faults: tuple[Failure, ...] = ()

    @property
    def fastest(self) -> Measurement | None:
        """The measurement of the fastest candidate, or None where none was measured."""
        return min(self.measurements, key=lambda m: m.seconds, default=None)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the table's choice the fastest candidate is; None where the choice was not measured."""
        return self.speedup(self.fastest.contender, self.chosen) if self.fastest else None

    @property
    def spread(self) -> float | None:
        """The larger spread of the two that `ratio` compares."""
        return None if self.ratio is None else max(self.fastest.spread, self.of(self.chosen).spread)

    @property
    def beaten(self) -> bool:
        """Whether the table's choice is slower than another candidate by more than the spread."""
        return self.ratio is not None and self.ratio - 1 > self.spread


def candidates(cell: Cell, architecture: Architecture, kernel: str | None = None) -> tuple[Candidate, ...]:
    """The tiles that can serve a cell: those of the kernel's table in its order, then those that are in no row.

    Parameters
    ----------
    cell : Cell
        Of the forward.
    architecture : Architecture
    kernel : str, optional
        Out of `peers.KERNELS`; by default what the planner chooses for the cell.

    Raises
    ------
    UnsupportedError
        If the kernel cannot compute the cell.
    """
    q, v = (dense_layout(shape, reversed(range(len(shape))), cell.dtype, None) for shape in (cell.shape, cell.shape_v))
    problem = make_problem(q, q, v, Options(causal=cell.causal, backend="host", kernel=kernel))
    chosen = make_forward_plan(problem, architecture)
    dims = max(chosen.config.DIM, chosen.config.DIM_V), chosen.config.DIM_V
    parts, explicit = chosen.config.FP16_PARTS, chosen.config.EXPLICIT_SCORES
    table = ALL_ROWS if parts else candidates_for(chosen.file, architecture, cell.dtype)
    of_hopper = chosen.file == "fwd_hopper"
    between = rows_between(problem) if of_hopper and not parts else ()
    others = (*between, *narrower(problem, WIDEST, table, chosen.expressions, explicit, parts)) if of_hopper else ()
    plans = dict.fromkeys(_with_tile(chosen, row, cell.dtype, problem.precision) for row in (*others, *table) if row.serves(*dims))
    plans = [plan for plan in plans if plan.shared_bytes <= architecture.shared_bytes]
    return tuple(Candidate(name, plan, plan == chosen) for name, plan in zip(_names(plans), plans))


def _with_tile(plan: KernelPlan, row: TileConfig, dtype: str, precision: str) -> KernelPlan:
    c = plan.config
    given = c.WIDTH, c.WIDTH_V, c.COPY_BYTES, c.EXPLICIT_SCORES, c.SPLIT_KV, c.LAST_COMBINES, c.PACK_GQA
    config = configure(row, plan.architecture, "float16" if c.FP16_PARTS else dtype, precision, *given, columns=(c.DIM, c.DIM_V))
    config = replace(config, FP16_PARTS=c.FP16_PARTS, FLOAT32_RESULTS=c.FLOAT32_RESULTS)
    return replace(plan, config=config, reasons=(row.reason,))


def _names(plans: list[KernelPlan]) -> Iterator[str]:
    for own in (plan.config for plan in plans):
        name = f"{own.TILE_Q}x{own.TILE_KV}"
        alike = [plan.config for plan in plans if (plan.config.TILE_Q, plan.config.TILE_KV) == (own.TILE_Q, own.TILE_KV)]
        for knob in (knob.name for knob in fields(Config)):
            same = [config for config in alike if getattr(config, knob) == getattr(own, knob)]
            if len(same) < len(alike):
                alike, name = same, f"{name} {knob}={getattr(own, knob)}"
        yield name


def fault_of(plan: KernelPlan) -> str:
    """What the compiler spoils of a plan, or ''. One without a fault is in the cache of kernels afterwards."""
    try:
        fault = nvrtc.report(plan).fault
        if not fault:
            nvrtc.cubin(plan)
        return fault
    except CompileError:
        return "does not compile"


def sweep(
    cells: Iterable[tuple[Cell, tuple[Candidate, ...]]], faults: Mapping[KernelPlan, str], bench: Bench, effort: Effort
) -> Iterator[Swept]:
    """Measure the candidates of cells, one cell after another.

    Parameters
    ----------
    cells : iterable of (Cell, tuple of Candidate)
    faults : mapping of KernelPlan to str
        What `fault_of` says of the plan of each candidate.
    bench : Bench
    effort : Effort

    Yields
    ------
    Swept
    """
    for cell, there in cells:
        sound = [Contender(c.name, partial(planned_run, c.plan), True, ("forward",)) for c in there if not faults[c.plan]]
        [result] = measure([cell], sound, bench, effort)
        spoilt = tuple(Failure(c.name, faults[c.plan]) for c in there if faults[c.plan])
        [chosen] = (c for c in there if c.chosen)
        yield Swept(cell, result.measurements, result.failures, chosen.plan.file, chosen.name, spoilt)
