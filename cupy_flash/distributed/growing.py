"""Results and gradients that grow by parts, in the order that `merging` has found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from .bits import library, raw
from .blocks import Interval
from .merging import Merge, Order
from .rows import rows_of
from .timeline import noted


class Growing:
    """Arrays of the same rows that grow by parts of some rows.

    Parameters
    ----------
    outs : tuple of array, each of shape (..., rows, dim)
        Where the results go; written as a whole in the end.
    order : Order
    wide : str
        The dtype of sums.
    """

    def __init__(self, outs: tuple[Any, ...], order: Order, wide: str) -> None:
        self._outs, self._order, self._number = outs, order, 0
        self._waiting: dict[int, tuple[Any, ...]] = {}
        self._sums = tuple(library(x).empty(x.shape, wide) for x in outs) if order.sums else outs
        for rows in order.nothing:
            self._clear(rows)

    def room(self) -> tuple[Any, ...]:
        """Where the next part is to be written; None where it is to be in memory of its own."""
        place, rows = self._order.places[self._number], self._order.rows[self._number]
        if not place:
            return (None,) * len(self._outs)
        targets = self._outs if place == "out" else self._sums
        for nothing in self._order.cleared[self._number]:
            for x in targets:
                rows_of(x, nothing).fill(0)
        return tuple([rows_of(x, rows) for x in targets])

    @property
    def adds(self) -> bool:
        """Whether the next part is to be added to what is there."""
        return self._order.added[self._number]

    def take(self, part: tuple[Any, ...]) -> None:
        """Take the next part, of the rows that the order says, and merge what is due. It is kept until then."""
        number, order = self._number, self._order
        self._number += 1
        if not order.places[number]:
            self._waiting[number] = part
        merges = order.after[number]
        for merge in merges:
            with noted("merge"):
                self._merge(merge, [self._part(i, merge.rows) for i in merge.parts])
        if any(merge.parts for merge in merges):  # which are all that wait
            self._waiting.clear()

    def _part(self, number: int, rows: Interval) -> tuple[Any, ...]:
        first, stop = self._order.rows[number]
        part = self._waiting[number]
        return part if (first, stop) == rows else tuple([rows_of(x, (rows[0] - first, rows[1] - first)) for x in part])

    def _clear(self, rows: Interval) -> None:
        for x in self._outs:
            raw(rows_of(x, rows)).fill(0)

    def _merge(self, merge: Merge, parts: list[tuple[Any, ...]]) -> None:
        intos, bases = zip(*[_places(merge, out, total) for out, total in zip(self._outs, self._sums)])
        if not isinstance(self._outs[0], numpy.ndarray):
            from .on_device import add  # late: who has arrays on a device has CuPy

            add(intos, bases, parts)
            return
        for into, base, *own in zip(intos, bases, *parts):
            _add(into, base, own)


class Results(Growing):
    """A result and its log-sum-exp, whose parts are those of other keys.

    Parameters
    ----------
    out, lse : array, shape (..., rows, dim_v) and (..., rows)
    order, wide
        As those of `Growing`.
    """

    def __init__(self, out: Any, lse: Any, order: Order, wide: str) -> None:
        self.out, self.lse = out, lse
        super().__init__((out,), order, wide)

    def room(self) -> tuple[Any, ...]:
        """Where the next part is to be written; None where it is to be in memory of its own."""
        [out] = super().room()
        return out, None if out is None else _some_of_lse(self.lse, self._order.rows[self._number])

    def _part(self, number: int, rows: Interval) -> tuple[Any, ...]:
        first, stop = self._order.rows[number]
        out, lse = self._waiting[number]
        own = rows[0] - first, rows[1] - first
        return (out, lse) if (first, stop) == rows else (rows_of(out, own), _some_of_lse(lse, own))

    def _clear(self, rows: Interval) -> None:
        super()._clear(rows)
        _some_of_lse(self.lse, rows).fill(-numpy.inf)

    def _merge(self, merge: Merge, parts: list[tuple[Any, ...]]) -> None:
        [total] = self._sums
        into, base = _places(merge, self.out, total)
        lse = _some_of_lse(self.lse, merge.rows)
        if isinstance(self.out, numpy.ndarray):
            _merge(into, base, lse, parts)
        else:
            from .on_device import merge as merge_on_device  # late, as above

            merge_on_device(into, base, lse, parts)

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


def store(into: Any, part: Any) -> None:
    """Write what may be of another dtype."""
    with noted("merge"):
        if isinstance(into, numpy.ndarray):
            into[...] = part
            return
        from .on_device import add  # late, as above

        add([into], [None], [[part]])


def _places(merge: Merge, out: Any, total: Any) -> tuple[Any, Any]:
    """Where a merge goes, and what it begins with."""
    found = {"out": out, "sum": total}
    return rows_of(found[merge.into], merge.rows), rows_of(found[merge.base], merge.rows) if merge.base else None


def _some_of_lse(x: Any, rows: Interval) -> Any:
    return x if rows == (0, x.shape[-1]) else x[..., rows[0] : rows[1]]


def _begun(into: numpy.ndarray, base: numpy.ndarray | None, wide: Any) -> numpy.ndarray:
    """Where a sum is added up: in place where that is wide enough, of what it begins with."""
    total = into if into.dtype.itemsize >= 4 else numpy.empty(into.shape, wide)
    if base is None:
        total[...] = 0
    elif base is not total and not numpy.shares_memory(base, total):
        total[...] = base
    return total


def _add(into: numpy.ndarray, base: numpy.ndarray | None, parts: Sequence[numpy.ndarray]) -> None:
    total = _begun(into, base, numpy.float32)
    for part in parts:
        total += part
    if total is not into:
        into[...] = total


def _merge(into: numpy.ndarray, base: numpy.ndarray | None, lse: numpy.ndarray, parts: Sequence[tuple[Any, Any]]) -> None:
    total = _begun(into, base, numpy.float32)
    if base is None:
        lse.fill(-numpy.inf)
    for out, other in parts:
        _merge_one(total, lse, out, other)
    if total is not into:
        into[...] = total


def _merge_one(old: numpy.ndarray, old_lse: numpy.ndarray, out: numpy.ndarray, lse: numpy.ndarray) -> None:
    with numpy.errstate(all="ignore"):
        top = numpy.maximum(old_lse, lse)
        top = numpy.where(top == -numpy.inf, 0, top)
        before, new = numpy.exp(old_lse - top), numpy.exp(lse - top)
        total = before + new
        keep, share = (numpy.where(weight == 0, 0, weight / total)[..., None] for weight in (before, new))
        for at in numpy.ndindex(out.shape[:-2]):  # a head at a time, so that little is copied
            part = numpy.where(share[at] == 0, 0, out[at] * share[at])  # what has weight 0 is left out, whatever it holds
            old[at] = numpy.where(keep[at] == 0, 0, old[at] * keep[at]) + part
        old_lse[...] = top + numpy.log(total)
