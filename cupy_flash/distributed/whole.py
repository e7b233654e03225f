"""The whole computation that ranks share: a frozen `Whole`, equal on all of them but for the rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ..call.captured import Captured, layouts_of
from ..errors import UnsupportedError
from ..problem.forward import Problem, make_problem
from ..problem.key_ranges import START
from ..problem.layout import Layout, dense_layout
from ..problem.lengths import LENGTHS, check_values
from ..problem.options import Options
from ..problem.scores import check_wrt
from .blocks import Block, Interval, Span, blocks_of, seen_keys
from .sharding import Run, runs_of

PACKED = ("cu_seqlens_q", "cu_seqlens_kv")


@dataclass(frozen=True)
class Whole:
    """Attention of all rows of all ranks.

    Parameters
    ----------
    rank : int
    order : str
        How rows are divided, one of `sharding.ORDERS`.
    rows_q, rows_kv : tuple of int
        How many queries and keys each rank has.
    asked : Options
        As the user gave them.
    problem : Problem
        That of all rows on one device.
    spans : tuple of Span
        The sequences: one, unless they are packed.
    inputs : three Layouts
        Of all queries, keys and values.
    wrt : tuple of str
        What else gradients are asked for.
    has_dlse : bool
        Whether there is a gradient with respect to the log-sum-exp.
    """

    rank: int
    order: str
    rows_q: tuple[int, ...]
    rows_kv: tuple[int, ...]
    asked: Options
    problem: Problem
    spans: tuple[Span, ...]
    inputs: tuple[Layout, Layout, Layout]
    wrt: tuple[str, ...] = ()
    has_dlse: bool = False

    @property
    def of_q(self) -> Layout:
        """All queries, with an axis of heads."""
        return self.inputs[0]

    @property
    def of_k(self) -> Layout:
        """All keys."""
        return self.inputs[1]

    @property
    def of_v(self) -> Layout:
        """All values."""
        return self.inputs[2]

    @property
    def narrow(self) -> bool:
        """Whether results are of a narrower dtype than their parts, which are not rounded before they are together."""
        return self.problem.dtype != self.wide

    @property
    def movable(self) -> bool:
        """Whether nothing but masks asks where pairs are."""
        return not (self.problem.scores or self.wrt)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.rows_q)

    @functools.cached_property
    def q_runs(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of queries of every rank."""
        return runs_of(self.rows_q, self.order)

    @functools.cached_property
    def kv_runs(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of keys of every rank."""
        return runs_of(self.rows_kv, self.order)

    @property
    def packed(self) -> bool:
        """Whether there are several sequences, one behind the other."""
        return self.problem.lengths is not None

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch axes of results, of which packed sequences have none."""
        return () if self.packed else self.problem.batch

    @property
    def wide(self) -> str:
        """The dtype of partial results."""
        return "float64" if self.problem.dtype == "float64" else "float32"

    def blocks(self, kv_runs: Sequence[Run], rank: int | None = None) -> list[Block]:
        """The blocks of a rank's queries, by default of this one's, with keys that lie so."""
        return blocks_of(self.spans, self.q_runs[self.rank if rank is None else rank], kv_runs)

    @functools.cached_property
    def _reaches(self) -> dict[tuple[int, int], tuple[Interval, ...]]:
        return {}

    @functools.cached_property
    def known(self) -> dict[Any, Any]:
        """What modules of schemes have found out about it, by what and of whom."""
        return {}

    def reach(self, rank: int, source: int) -> tuple[Interval, ...]:
        """The positions of the keys of `source` that queries of `rank` see, one interval for each run of keys that has any."""
        known = self._reaches.get((rank, source))
        if known is None:
            seen = [(run, seen_keys(self.spans, self.q_runs[rank], run)) for run in self.kv_runs[source]]
            known = tuple((run.first + rows[0] - run.row, run.first + rows[1] - run.row) for run, rows in seen if rows)
            self._reaches[rank, source] = known
        return known


def make_whole(
    rank: int,
    order: str,
    rows: tuple[tuple[int, ...], tuple[int, ...]],
    inputs: tuple[Any, Any, Any],
    sinks: Any,
    given: Captured,
    options: dict[str, Any],
    wrt: Any = (),
    has_dlse: bool = False,
) -> Whole:
    """The whole, from what each rank has and from the arrays of this one.

    Parameters
    ----------
    rank : int
    order : str
    rows : two tuples of int
        Queries and keys of every rank.
    inputs : tuple of array
        q, k and v of this rank, `(..., heads, rows, dim)`.
    sinks : array or None
    given : Captured
        What scores read, and offsets of packed sequences.
    options : dict
        Fields of `Options`.
    wrt : str or tuple of str
    has_dlse : bool

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention` raises them, of all rows.
    """
    operands, arrays = layouts_of(given.descriptions, given.options["operands"], given.options["arrays"])
    _check_supported(operands, arrays)
    asked = Options(**{**options, **given.options}, return_lse=True)
    layouts = [_of_all_rows(x, sum(rows[name != "q"])) for name, x in zip("qkv", inputs)]
    of_sinks = None if sinks is None else _dense(sinks, sinks.shape)
    problem = make_problem(*layouts, asked, sinks=of_sinks, operands=operands, arrays=arrays)
    if problem.algorithm == "v1":
        raise UnsupportedError("algorithm: expected 'auto' or 'v2' on several ranks, got 'v1'")
    spans, wrt = _spans(problem, given), check_wrt(wrt, problem.scores)
    return Whole(rank, order, *rows, asked, problem, spans, tuple(layouts), wrt, has_dlse)


def _of_all_rows(x: Any, rows: int) -> Layout:
    return _dense(x, (*x.shape[:-2], rows, x.shape[-1]))


def _dense(x: Any, shape: tuple[int, ...]) -> Layout:
    device = None if isinstance(x, numpy.ndarray) else x.device.id
    return dense_layout(shape, reversed(range(len(shape))), x.dtype.name, device)


def _check_supported(operands: dict[str, Layout], arrays: dict[str, Layout]) -> None:
    for name in ("bias", "mask"):
        if name in operands:
            instead = "a score that reads it" if name == "bias" else "an expression"
            raise UnsupportedError(f"{name}: expected None on several ranks, or in its place {instead}, got an array of pairs")
    if START in arrays:
        raise UnsupportedError("mask: expected an expression on several ranks, got KeyRanges")
    for name in LENGTHS:
        if name in operands and name not in PACKED:
            raise UnsupportedError(f"{name}: expected None on several ranks, whose sequences are packed by cu_seqlens, got one")
    if any(name in operands for name in PACKED) and not all(name in operands for name in PACKED):
        raise UnsupportedError("cu_seqlens_q, cu_seqlens_kv: expected both or none on several ranks, got one")


def _spans(problem: Problem, given: Captured) -> tuple[Span, ...]:
    if problem.lengths is None:
        return (Span(0, (0, problem.len_q), (0, problem.len_kv), problem.mask),)
    numbers = {name: x for name, x in zip(given.names, given.views) if name in PACKED}
    for name, x in numbers.items():
        if not isinstance(x, numpy.ndarray):
            raise UnsupportedError(f"{name}: expected an array in host memory on several ranks, got one on a device")
    check_values(problem.lengths, numbers, (problem.len_q, problem.len_kv))
    spans = []
    for number in range(problem.lengths.sequences):
        (q0, q1), (k0, k1) = (tuple(int(end) for end in numbers[name][number : number + 2]) for name in PACKED)
        mask = problem.lengths.band_of(problem.mask, q1 - q0, k1 - k0)
        spans.append(Span(number, (q0, q1), (k0, k1), mask))
    return tuple(spans)


