"""Ulysses: heads and sequence change places. Each rank gets all rows of some heads, computes them as one device would, and gives
the rows back to those that have them. (Jacobs et al., 2023, "DeepSpeed Ulysses", arXiv:2309.14509.)

A key head goes to each rank that has one of its query heads: where there are fewer key heads than ranks, to several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .bits import raw
from .blocks import Interval
from .calls import Calls
from .communicator import Communicator
from .rows import empty_rows, library, outermost
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


@dataclass(frozen=True)
class Side:
    """Where rows and heads are, of queries or of keys.

    Parameters
    ----------
    heads : tuple of (int, int)
        Those of each rank.
    runs : tuple of tuple of Run
        The rows of each rank.
    even : int
        How many heads each rank has, if all have as many and none is on several; otherwise 0.
    shared : bool
        Whether a head is on several ranks, each of which then has a part of its gradient.
    """

    heads: tuple[Interval, ...]
    runs: tuple[tuple[Run, ...], ...]
    even: int
    shared: bool


def side_of(whole: Whole, of_keys: bool) -> Side:
    """The side of queries or of keys."""
    found = whole.known.get(("side", of_keys))
    if found is None:
        heads = tuple((key_heads_of if of_keys else heads_of)(whole, rank) for rank in range(whole.size))
        n = heads[0][1]
        even = n if heads == tuple((n * rank, n * (rank + 1)) for rank in range(whole.size)) else 0
        shared = any(a[1] > b[0] for a, b in pairwise([own for own in heads if own[0] < own[1]]))
        found = whole.known["side", of_keys] = Side(heads, whole.kv_runs if of_keys else whole.q_runs, even, shared)
    return found


class Change:
    """One exchange in which arrays change from rows of all heads to heads of all rows, or back.

    Parameters
    ----------
    whole : Whole
    comm : Communicator
    """

    def __init__(self, whole: Whole, comm: Communicator) -> None:
        self._whole, self._comm, self._rank = whole, comm, whole.rank
        self._others = [(whole.rank + step) % whole.size for step in range(1, whole.size)]
        self._sends: list[tuple[int, Any]] = []
        self._receives: list[tuple[int, Any]] = []
        self._then: list[Callable[[], None]] = []

    def to_heads(self, x: Any, of_keys: bool) -> Any:
        """All rows of this rank's heads, `(..., heads, rows, dim)`, in the order of the sequence, once the exchange has ended."""
        side, rank = side_of(self._whole, of_keys), self._rank
        own = side.heads[rank]
        made = empty_rows(_of_heads(x, own), sum(len(run) for theirs in side.runs for run in theirs))
        found, rows = outermost(raw(made)), outermost(raw(x))
        for run in side.runs[rank]:
            found[run.first : run.stop] = rows[run.row : run.row + len(run), ..., slice(*own), :]
        if side.even and self._others:
            packed = library(x).empty((len(self._others), *rows.shape[:-2], side.even, rows.shape[-1]), rows.dtype)
            for to, of in _without(packed, _by_ranks(rows, side.even), rank):
                to[...] = of
            parts = {other: packed[other - (other > rank)] for other in self._others}
        else:
            parts = {other: rows[..., slice(*side.heads[other]), :] for other in self._others}
        for other in self._others:
            part = parts[other]
            self._sends += [(other, _dense(part[run.row : run.row + len(run)])) for run in side.runs[rank]]
        for other in reversed(self._others):
            self._receives += [(other, found[run.first : run.stop]) for run in side.runs[other]]
        return made

    def to_rows(self, x: Any, to: Any, of_keys: bool) -> None:
        """Give back all rows of this rank's heads, and write its own rows of all heads once the exchange has ended.

        Where a head is on several ranks, what they have is added up.
        """
        side, rank = side_of(self._whole, of_keys), self._rank
        rows, target = outermost(x), outermost(to)
        if not side.shared:
            rows, target = raw(rows), raw(target)
        xp, shape = library(x), (target.shape[0], *rows.shape[1:-2])
        for other in self._others:
            self._sends += [(other, _dense(rows[run.first : run.stop])) for run in side.runs[other]]
        if side.even and self._others:
            packed = xp.empty((len(self._others), *shape, side.even, rows.shape[-1]), rows.dtype)
            parts = {other: packed[other - (other > rank)] for other in self._others}
        else:
            widths = {other: side.heads[other][1] - side.heads[other][0] for other in self._others}
            parts = {other: xp.empty((*shape, width, rows.shape[-1]), rows.dtype) for other, width in widths.items()}
        for other in reversed(self._others):
            self._receives += [(other, parts[other][run.row : run.row + len(run)]) for run in side.runs[rank]]

        def then() -> None:
            if side.shared:
                self._add(target, rows, parts, side)
                return
            for run in side.runs[rank]:
                target[run.row : run.row + len(run), ..., slice(*side.heads[rank]), :] = rows[run.first : run.stop]
            if side.even and self._others:
                for place, part in _without(_by_ranks(target, side.even), packed, rank, reverse=True):
                    place[...] = part
                return
            for other, part in parts.items():
                target[..., slice(*side.heads[other]), :] = part

        self._then.append(then)

    def _add(self, target: Any, rows: Any, parts: dict[int, Any], side: Side) -> None:
        """Add up what ranks have of each head, in their order, so that sums do not depend on which rank computes them."""
        total = library(rows).zeros(target.shape, rows.dtype)
        for other in range(self._whole.size):
            heads = slice(*side.heads[other])
            for run in side.runs[self._rank]:
                own = slice(run.row, run.row + len(run))
                total[own, ..., heads, :] += rows[run.first : run.stop] if other == self._rank else parts[other][own]
        raw(target)[...] = raw(total.astype(target.dtype, copy=False))

    def run(self) -> None:
        """Send and receive, and wait."""
        self._comm.start(_some(self._sends), _some(self._receives)).wait()
        for then in self._then:
            then()
        self._sends, self._receives, self._then = [], [], []


def forward(comm: Communicator, calls: Calls, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any) -> None:
    """Attention of this rank's queries, written into a result."""
    whole, change = calls.whole, Change(calls.whole, comm)
    q, k, v = (change.to_heads(x, of_keys) for x, of_keys in ((q, False), (k, True), (v, True)))
    change.run()
    *_, heads, rows, _ = q.shape
    like = library(q).broadcast_to(q[..., :1, :1], (*whole.batch, heads, rows, v.shape[-1]))
    of_heads, of_lse = empty_rows(like, rows, q.dtype), library(q).empty(like.shape[:-1], whole.wide)
    for heads, key_heads in even_groups(whole, whole.rank):
        own, keys = _counted_from(heads, heads_of(whole, whole.rank)), _counted_from(key_heads, key_heads_of(whole, whole.rank))
        of_sinks = None if sinks is None else sinks[..., slice(*heads)]
        results = (_of_heads(of_heads, own), of_lse[..., slice(*own), :])
        inputs = (_of_heads(q, own), _of_heads(k, keys), _of_heads(v, keys))
        calls.forward_of_heads((heads[0], key_heads[0]), *inputs, of_sinks, *results)
    del q, k, v
    change.to_rows(of_heads, out, False)
    change.to_rows(of_lse[..., None], lse[..., None], False)
    change.run()


def backward(comm: Communicator, calls: Calls, inputs: tuple[Any, ...], k: Any, v: Any, results: tuple[Any, Any, Any]) -> None:
    """Gradients of this rank's queries and keys; `inputs` are dout, q, out, lse and dlse of its rows."""
    whole, change = calls.whole, Change(calls.whole, comm)
    dout, q, out, lse, dlse = inputs
    given = ((dout, False), (q, False), (k, True), (v, True), (out, False), (lse[..., None], False))
    dout, q, k, v, out, *of_lse = [
        change.to_heads(x, of_keys) for x, of_keys in (*given, *(() if dlse is None else ((dlse[..., None], False),)))
    ]
    change.run()
    of_lse = [*(x[..., 0] for x in of_lse), *[None] * (dlse is None)]
    shared = side_of(whole, True).shared
    found = [empty_rows(x, x.shape[-2], whole.wide if shared and x is not q else x.dtype) for x in (q, k, v)]
    for heads, key_heads in even_groups(whole, whole.rank):
        own, keys = _counted_from(heads, heads_of(whole, whole.rank)), _counted_from(key_heads, key_heads_of(whole, whole.rank))
        room = tuple(_of_heads(x, of) for x, of in zip(found, (own, keys, keys)))
        given = [_of_heads(x, of) for x, of in ((dout, own), (q, own), (k, keys), (v, keys), (out, own))]
        given += [x if x is None else x[..., slice(*own), :] for x in of_lse]
        calls.backward_of_heads((heads[0], key_heads[0]), tuple(given), room)
    del dout, q, k, v, out, of_lse
    for x, to, of_keys in zip(found, results, (False, True, True)):
        change.to_rows(x, to, of_keys)
    change.run()


def _by_ranks(rows: Any, heads: int) -> Any:
    """A view `(ranks, rows, ..., heads, dim)` of `(rows, ..., all heads, dim)`."""
    *lead, every, dim = rows.shape
    n = len(lead)
    return rows.reshape(*lead, every // heads, heads, dim).transpose(n, *range(n), n + 1, n + 2)


def _without(a: Any, b: Any, rank: int, reverse: bool = False) -> Iterator[tuple[Any, Any]]:
    """Pairs of parts of one that has no entry for a rank and one that has, `a` and `b` or the other way around."""
    n = (b if reverse else a).shape[0]
    for less, more in ((slice(0, rank), slice(0, rank)), (slice(rank, n), slice(rank + 1, n + 1))):
        if less.start < less.stop:
            yield (a[more], b[less]) if reverse else (a[less], b[more])


def _of_heads(x: Any, heads: Interval) -> Any:
    return x[..., slice(*heads), :, :]


def _counted_from(heads: Interval, own: Interval) -> Interval:
    return heads[0] - own[0], heads[1] - own[0]


def _dense(x: Any) -> Any:
    return x if x.flags.c_contiguous else library(x).ascontiguousarray(x)


def _some(messages: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Those that have any bytes."""
    return [message for message in messages if message[1].size]
