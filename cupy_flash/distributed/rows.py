"""Rows of arrays: how they are packed to be sent, where received ones lie, and partial results that add up.

What travels has its rows outermost, `(rows, *batch, heads, dim)`, so that any rows that follow each other are one piece of memory,
which needs no copy to be sent or received. Kernels read it in place, by its strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .bits import copy, dense, library, raw
from .blocks import Interval
from .sharding import Run


def outermost(x: Any) -> Any:
    """A view with the rows, the last axis but one, outermost."""
    n = x.ndim
    return x.swapaxes(0, -2) if n <= 3 else x.transpose(n - 2, *range(n - 2), n - 1)


def innermost(x: Any) -> Any:
    """The opposite of `outermost`."""
    n = x.ndim
    return x.swapaxes(0, -2) if n <= 3 else x.transpose(*range(1, n - 1), 0, n - 1)


def rows_of(x: Any, rows: Interval) -> Any:
    """Some rows of an array `(..., rows, dim)`."""
    return x if rows == (0, x.shape[-2]) else x[..., rows[0] : rows[1], :]


def located(runs: Iterable[Run], intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Where the rows of intervals of positions lie, of which each is within a run."""
    for first, stop in intervals:
        run = next(run for run in runs if run.first <= first and stop <= run.stop)
        yield run.row + first - run.first, run.row + stop - run.first


def behind_each_other(intervals: Iterable[Interval]) -> tuple[Run, ...]:
    """The runs of an array that has the rows of these intervals one behind the other."""
    runs, row = [], 0
    for first, stop in intervals:
        runs.append(Run(first, stop, row))
        row += stop - first
    return tuple(runs)


def length(intervals: Iterable[Interval]) -> int:
    """How many rows there are."""
    return sum(stop - first for first, stop in intervals)


def common(a: Iterable[Interval], b: Sequence[Interval]) -> tuple[Interval, ...]:
    """What two sets of intervals have in common."""
    both = ((max(first, other), min(stop, end)) for first, stop in a for other, end in b)
    return tuple((first, stop) for first, stop in both if first < stop)


def joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Intervals in order, those that overlap or meet made one."""
    found: list[Interval] = []
    for first, stop in sorted(intervals):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((first, stop))
    return tuple(found)


def neighbours(pairs: Iterable[tuple[Interval, Interval]]) -> list[tuple[Interval, Interval]]:
    """Pairs of intervals, those of which both meet made one."""
    found: list[tuple[Interval, Interval]] = []
    for a, b in pairs:
        if found and (found[-1][0][1], found[-1][1][1]) == (a[0], b[0]):
            found[-1] = (found[-1][0][0], a[1]), (found[-1][1][0], b[1])
        else:
            found.append((a, b))
    return found


def hull(sets: Iterable[Sequence[Interval]], runs: Iterable[Run]) -> tuple[Interval, ...]:
    """Of each run the smallest interval that holds all that any of the sets has of it."""
    sets = list(sets)
    found = []
    for run in runs:
        inside = [interval for intervals in sets for interval in common(intervals, [(run.first, run.stop)])]
        if inside:
            found.append((min(first for first, _ in inside), max(stop for _, stop in inside)))
    return tuple(found)


@dataclass(frozen=True)
class Keys:
    """Keys and values, and the positions of their rows.

    Parameters
    ----------
    k, v : array, shape (..., rows, dim)
    runs : tuple of Run
    """

    k: Any
    v: Any
    runs: tuple[Run, ...]

    @classmethod
    def room(cls, like: Keys, runs: Sequence[Run], dtype: Any = None) -> Keys:
        """Memory for rows of these runs, which lie one behind the other."""
        rows = runs[-1].row + len(runs[-1]) if runs else 0
        return cls(empty_rows(like.k, rows, dtype), empty_rows(like.v, rows, dtype), tuple(runs))

    @property
    def all(self) -> list[Interval]:
        """All rows, if there are any."""
        return [(0, self.k.shape[-2])] if self.k.shape[-2] else []

    def pieces(self, rows: Sequence[Interval]) -> list[Any]:
        """The memory of some rows, in pieces without gaps; copies where rows of k or v are not outermost."""
        return [piece for x in (self.k, self.v) for piece in pieces(x, rows)]

    def take(self, rows: Sequence[Interval], other: Keys, others: Sequence[Interval]) -> None:
        """Copy rows of other keys to rows of these."""
        for own, of in ((self.k, other.k), (self.v, other.v)):
            for to, at in zip(rows, others):
                copy(rows_of(own, to), rows_of(of, at))


def zeros_like(like: Any, dtype: Any) -> Any:
    """Zeros of a dtype in the shape of another array, one row behind the other."""
    return library(like).zeros(like.shape, dtype)


def empty_rows(like: Any, rows: int, dtype: Any = None) -> Any:
    """An array of so many rows in the shape of another, with its rows outermost in memory."""
    *lead, _, dim = like.shape
    return innermost(library(like).empty((rows, *lead, dim), like.dtype if dtype is None else dtype))


def pieces(x: Any, rows: Sequence[Interval]) -> list[Any]:
    """The memory of some rows, in pieces without gaps."""
    x = outermost(raw(x))
    found = [x if own == (0, x.shape[0]) else x[own[0] : own[1]] for own in rows]
    return found if x.flags.c_contiguous else [dense(piece) for piece in found]
