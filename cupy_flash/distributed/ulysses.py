"""Ulysses: heads and sequence change places. Each rank gets all rows of some heads, computes them as one device would, and gives
the rows back to those that have them. (Jacobs et al., 2023, "DeepSpeed Ulysses", arXiv:2309.14509.)

A key head goes to each rank that has one of its query heads: where there are fewer key heads than ranks, to several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..problem.backward import Gradients
from .bits import raw
from .blocks import Interval
from .calls import Calls
from .communicator import Communicator, Pending
from .rows import Partial, add, empty_rows, library, outermost
from .sharding import Run
from .whole import Whole


def heads_of(whole: Whole, rank: int) -> Interval:
    """The query heads that a rank computes: whole groups that share a key head, where there are enough of them."""
    heads, groups = whole.problem.heads_q, whole.problem.heads_kv
    units, unit = (groups, heads // groups) if groups and groups % whole.size == 0 else (heads, 1)
    ends = [unit * (units * r // whole.size) for r in (rank, rank + 1)]
    return ends[0], ends[1]


def key_heads_of(whole: Whole, rank: int) -> Interval:
    """The key heads of these."""
    (first, stop), group = heads_of(whole, rank), max(whole.problem.heads_per_kv, 1)
    return (first // group, -(-stop // group)) if first < stop else (first // group, first // group)


def even_groups(whole: Whole, rank: int) -> Iterator[tuple[Interval, Interval]]:
    """The query heads and key heads of a rank, in parts in which each key head has equally many of them."""
    (first, stop), group = heads_of(whole, rank), max(whole.problem.heads_per_kv, 1)
    while first < stop:
        if first % group == 0 and first + group <= stop:
            end = first + (stop - first) // group * group
            yield (first, end), (first // group, end // group)
        else:
            end = min(stop, first - first % group + group)
            yield (first, end), (first // group, first // group + 1)
        first = end


class Change:
    """Arrays that change from rows of all heads to heads of all rows, and back.

    Parameters
    ----------
    whole : Whole
    comm : Communicator
    """

    def __init__(self, whole: Whole, comm: Communicator) -> None:
        self._whole, self._comm = whole, comm
        self._others = [(whole.rank + step) % whole.size for step in range(1, whole.size)]

    def to_heads(self, x: Any, of_keys: bool) -> tuple[Any, Pending]:
        """All rows of this rank's heads, `(..., heads, rows, dim)`, in the order of the sequence, once the exchange has ended."""
        heads, runs, rank = self._sides(of_keys)
        own = heads(rank)
        all_rows = sum(len(run) for theirs in runs for run in theirs)
        made = empty_rows(_of_heads(x, own), all_rows)
        found, rows = outermost(raw(made)), outermost(raw(x))
        self._copy(found, rows[..., slice(*own), :], runs[rank])
        sends = [
            (other, _dense(rows[run.row : run.row + len(run), ..., slice(*heads(other)), :]))
            for other in self._others for run in runs[rank]
        ]  # fmt: skip
        receives = [(other, found[run.first : run.stop]) for other in reversed(self._others) for run in runs[other]]
        return made, self._comm.start(_some(sends), _some(receives))

    def to_rows(self, x: Any, to: Any, of_keys: bool, adds: bool = False) -> None:
        """Give back all rows of this rank's heads, and write its own rows of all heads, or add them where a head is on several."""
        heads, runs, rank = self._sides(of_keys)
        rows, target = outermost(x), outermost(to)
        if not adds:
            rows, target = raw(rows), raw(target)
        sends = [(other, _dense(rows[run.first : run.stop])) for other in self._others for run in runs[other]]
        # In the order of ranks, so that sums do not depend on which rank computes them.
        parts: list[tuple[Run, Interval, Any]] = []
        receives = []
        for other in range(self._whole.size):
            theirs = heads(other)
            for run in runs[rank]:
                if other == rank:
                    part = rows[run.first : run.stop]
                else:
                    part = library(x).empty((len(run), *rows.shape[1:-2], theirs[1] - theirs[0], rows.shape[-1]), rows.dtype)
                    receives.append((other, part))
                parts.append((run, theirs, part))
        self._comm.start(_some(sends), _some(receives)).wait()
        for run, theirs, part in parts:
            place = target[run.row : run.row + len(run), ..., slice(*theirs), :]
            if adds:
                place += part
            else:
                place[...] = part

    def _sides(self, of_keys: bool) -> tuple[Any, tuple[tuple[Run, ...], ...], int]:
        whole = self._whole
        heads = key_heads_of if of_keys else heads_of
        return lambda rank: heads(whole, rank), whole.kv_runs if of_keys else whole.q_runs, whole.rank

    @staticmethod
    def _copy(found: Any, rows: Any, runs: tuple[Run, ...]) -> None:
        for run in runs:
            found[run.first : run.stop] = rows[run.row : run.row + len(run)]


def forward(comm: Communicator, calls: Calls, q: Any, k: Any, v: Any, sinks: Any, partial: Partial) -> None:
    """Attention of this rank's queries, written into a result that has nothing yet."""
    whole, change = calls.whole, Change(calls.whole, comm)
    (q, first), (k, second), (v, third) = (change.to_heads(x, of_keys) for x, of_keys in ((q, False), (k, True), (v, True)))
    for pending in (first, second, third):
        pending.wait()
    shape = (*whole.batch, *q.shape[-3:-1], v.shape[-1])
    out = empty_rows(library(q).broadcast_to(q[..., :1, :1], shape), shape[-2], q.dtype)
    lse = library(q).empty(out.shape[:-1], whole.wide)
    for heads, key_heads in even_groups(whole, whole.rank):
        own, keys = _counted_from(heads, heads_of(whole, whole.rank)), _counted_from(key_heads, key_heads_of(whole, whole.rank))
        of_sinks = None if sinks is None else sinks[..., slice(*heads)]
        results = (_of_heads(out, own), lse[..., slice(*own), :])
        inputs = (_of_heads(q, own), _of_heads(k, keys), _of_heads(v, keys))
        calls.forward_of_heads((heads[0], key_heads[0]), *inputs, of_sinks, *results)
    change.to_rows(out, partial.out, False)
    change.to_rows(lse[..., None], partial.lse[..., None], False)


def backward(comm: Communicator, calls: Calls, inputs: tuple[Any, ...], k: Any, v: Any, sums: Gradients) -> None:
    """Gradients of this rank's queries and keys, added to sums; `inputs` are dout, q, out, lse and dlse of its rows."""
    whole, change = calls.whole, Change(calls.whole, comm)
    dout, q, out, lse, dlse = inputs
    given = ((dout, False), (q, False), (k, True), (v, True), (out, False), (lse[..., None], False))
    begun = [change.to_heads(x, of_keys) for x, of_keys in (*given, *(() if dlse is None else ((dlse[..., None], False),)))]
    for _, pending in begun:
        pending.wait()
    dout, q, k, v, out, lse, *dlses = (x for x, _ in begun)
    found = [empty_rows(x, x.shape[-2], whole.wide) for x in (q, k, v)]
    for x in found:
        x[...] = 0
    for heads, key_heads in even_groups(whole, whole.rank):
        own, keys = _counted_from(heads, heads_of(whole, whole.rank)), _counted_from(key_heads, key_heads_of(whole, whole.rank))
        of_rows = [_of_heads(x, own) for x in (dout, q, out, lse, *dlses)]
        of_lse = [x[..., 0] for x in of_rows[3:]] + [None] * (not dlses)
        gradients = calls.backward_of_heads(
            (heads[0], key_heads[0]), (*of_rows[:2], _of_heads(k, keys), _of_heads(v, keys), of_rows[2], *of_lse)
        )
        for total, part, of in zip(found, gradients, (own, keys, keys)):
            add(_of_heads(total, of), part)
    for total, x, of_keys in zip(sums, found, (False, True, True)):
        change.to_rows(x, total, of_keys, adds=True)


def _of_heads(x: Any, heads: Interval) -> Any:
    return x[..., slice(*heads), :, :]


def _counted_from(heads: Interval, own: Interval) -> Interval:
    return heads[0] - own[0], heads[1] - own[0]


def _dense(x: Any) -> Any:
    return library(x).ascontiguousarray(x)


def _some(messages: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Those that have any bytes."""
    return [message for message in messages if message[1].size]
