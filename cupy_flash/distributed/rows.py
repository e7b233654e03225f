"""Rows of arrays: how they are packed to be sent, where received ones lie, and partial results that add up.

What travels has its rows outermost, `(rows, *batch, heads, dim)`, so that any rows that follow each other are one piece of memory,
which needs no copy to be sent or received. Kernels read it in place, by its strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from .bits import raw
from .blocks import Interval
from .sharding import Run


def library(x: Any) -> Any:
    """The module whose array this is, `numpy` or `cupy`."""
    if isinstance(x, numpy.ndarray):
        return numpy
    import cupy  # late: who has an array of it has it

    return cupy


def outermost(x: Any) -> Any:
    """A view with the rows, the last axis but one, outermost."""
    return x.swapaxes(0, -2) if x.ndim == 2 else library(x).moveaxis(x, -2, 0)


def innermost(x: Any) -> Any:
    """The opposite of `outermost`."""
    return x.swapaxes(0, -2) if x.ndim == 2 else library(x).moveaxis(x, 0, -2)


def rows_of(x: Any, rows: Interval) -> Any:
    """Some rows of an array `(..., rows, dim)`."""
    return x[..., rows[0] : rows[1], :]


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
    def room(cls, like: Keys, intervals: Sequence[Interval]) -> Keys:
        """Memory for rows of these positions."""
        return cls(*(empty_rows(x, length(intervals)) for x in (like.k, like.v)), behind_each_other(intervals))

    def pieces(self, intervals: Sequence[Interval]) -> list[Any]:
        """The memory of rows of these positions, in pieces without gaps; copies where rows of k or v are not outermost."""
        return [piece for x in (self.k, self.v) for piece in pieces(x, located(self.runs, intervals))]

    def take(self, other: Keys, intervals: Sequence[Interval]) -> None:
        """Copy rows of these positions from other keys."""
        for to, of in zip(located(self.runs, intervals), located(other.runs, intervals)):
            rows_of(raw(self.k), to)[...] = rows_of(raw(other.k), of)
            rows_of(raw(self.v), to)[...] = rows_of(raw(other.v), of)

    def some(self, intervals: Sequence[Interval]) -> Keys:
        """A copy of rows of these positions."""
        found = Keys.room(self, intervals)
        found.take(self, intervals)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of k and v."""
        return self.k.nbytes + self.v.nbytes


def empty_rows(like: Any, rows: int, dtype: Any = None) -> Any:
    """An array of so many rows in the shape of another, with its rows outermost in memory."""
    x = outermost(like)
    return innermost(library(like).empty((rows, *x.shape[1:]), x.dtype if dtype is None else dtype))


def pieces(x: Any, rows: Iterable[Interval]) -> list[Any]:
    """The memory of some rows, in pieces without gaps."""
    x, xp = outermost(raw(x)), library(x)
    return [xp.ascontiguousarray(x[start:stop]) for start, stop in rows]


def add(total: Any, part: Any) -> None:
    """Add to a sum in place, which may be wider than what is added."""
    if isinstance(total, numpy.ndarray):
        total += part
        return
    from .on_device import add as add_on_device  # late: who has arrays on a device has CuPy

    add_on_device(total, [part])


class RowSums:
    """Gradients of rows that several calls add to. On a device two of the same rows are added in one pass.

    Parameters
    ----------
    total : array, shape (..., rows, dim)
        The sums, of the dtype of partial results.
    """

    def __init__(self, total: Any) -> None:
        self.total = total
        self._waiting: tuple[Interval, Any] | None = None

    def add(self, rows: Interval, part: Any) -> None:
        """Add to some rows."""
        if isinstance(part, numpy.ndarray):
            rows_of(self.total, rows)[...] += part
            return
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            self._waiting = rows, part
        elif waiting[0] == rows:
            self._add_on_device(rows, [waiting[1], part])
        else:
            self._add_on_device(waiting[0], [waiting[1]])
            self._waiting = rows, part

    def end(self) -> None:
        """Add what waits for another one."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._add_on_device(waiting[0], [waiting[1]])

    def _add_on_device(self, rows: Interval, parts: list[Any]) -> None:
        from .on_device import add as add_on_device  # late, as in `add`

        add_on_device(rows_of(self.total, rows), parts)


class Partial:
    """A result and its log-sum-exp that grow by what is computed over other keys.

    On a device two results of the same rows are merged in one pass, so that the sum is read and written half as often.

    Parameters
    ----------
    out, lse : array, shape (..., rows, dim_v) and (..., rows)
        Of the dtype of partial results; `lse` is -inf and `out` is 0 where nothing is seen yet.
    once : bool
        Whether each row gets one result at most, which then is what it is, in whatever dtype.
    """

    def __init__(self, out: Any, lse: Any, once: bool = False) -> None:
        self.out, self.lse, self._once = out, lse, once
        self._waiting: tuple[Interval, Any, Any] | None = None
        out.fill(0)  # which CuPy does without arithmetic, and so in any dtype
        lse.fill(-numpy.inf)

    def add(self, rows: Interval, out: Any, lse: Any) -> None:
        """Merge a result over other keys into some rows."""
        if self._once:
            raw(self.out)[..., slice(*rows), :], self.lse[..., slice(*rows)] = raw(out.astype(self.out.dtype, copy=False)), lse
            return
        if isinstance(out, numpy.ndarray):
            self._merge(slice(*rows), out, lse)
            return
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            self._waiting = rows, out, lse
        elif waiting[0] == rows:
            self._merge_on_device(rows, [waiting[1:], (out, lse)])
        else:
            self._merge_on_device(waiting[0], [waiting[1:]])
            self._waiting = rows, out, lse

    def end(self) -> None:
        """Merge what waits for another one."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._merge_on_device(waiting[0], [waiting[1:]])

    def add_sinks(self, sinks: Any) -> None:
        """Merge logits that belong to no value, `(heads,)` or `(n, heads)`, at the end."""
        xp = library(self.out)
        logits = sinks.reshape(-1, sinks.shape[-1]).astype(self.lse.dtype)
        with numpy.errstate(all="ignore"):
            top = logits.max(axis=0)
            safe = xp.where(top == -numpy.inf, 0, top)
            of_sinks = (xp.log(xp.exp(logits - safe).sum(axis=0)) + safe)[:, None]
            top = xp.maximum(self.lse, of_sinks)
            top = xp.where(top == -numpy.inf, 0, top)
            lse = xp.log(xp.exp(self.lse - top) + xp.exp(of_sinks - top)) + top
            self.out *= xp.where(lse == -numpy.inf, 0, xp.exp(self.lse - lse))[..., None]
        self.lse[...] = lse

    def _merge(self, rows: slice, out: numpy.ndarray, lse: numpy.ndarray) -> None:
        with numpy.errstate(all="ignore"):
            old, old_lse = self.out[..., rows, :], self.lse[..., rows]
            top = numpy.maximum(old_lse, lse)
            top = numpy.where(top == -numpy.inf, 0, top)
            before, new = numpy.exp(old_lse - top), numpy.exp(lse - top)
            total = before + new
            keep, share = (numpy.where(weight == 0, 0, weight / total)[..., None] for weight in (before, new))
            for at in numpy.ndindex(out.shape[:-2]):  # a head at a time, so that little is copied
                part = numpy.where(share[at] == 0, 0, out[at] * share[at])  # what has weight 0 is left out, whatever it holds
                old[at] = numpy.where(keep[at] == 0, 0, old[at] * keep[at]) + part
            old_lse[...] = top + numpy.log(total)

    def _merge_on_device(self, rows: Interval, parts: list[tuple[Any, Any]]) -> None:
        from .on_device import merge  # late: who has arrays on a device has CuPy

        merge(self.out[..., slice(*rows), :], self.lse[..., slice(*rows)], parts)
