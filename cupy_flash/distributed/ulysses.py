"""Ulysses: heads and sequence change places. Each rank gets all rows of some heads, computes them as one device would, and gives
the rows back to those that have them. (Jacobs et al., 2023, "DeepSpeed Ulysses", arXiv:2309.14509.)

In the forward exchanges are before and after the computation: beneath them are their own copies. In the backward heads are computed
in two portions where there are enough of them, and what the second one needs and what the first one gives travels meanwhile.
"""

from __future__ import annotations

from typing import Any

from .bits import library
from .blocks import Interval
from .calls import Calls
from .change import Change, heads_in
from .communicator import Communicator
from .heads import WHOLE, groups_of, halves, portions_of, side_of
from .rows import empty_rows


def forward(comm: Communicator, calls: Calls, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any) -> None:
    """Attention of this rank's queries, written into a result."""
    whole = calls.whole
    rounds, (first, _), (first_key, _) = halves(whole), *(side_of(whole, of_keys).heads[whole.rank] for of_keys in (False, True))
    change = Change(whole, comm, rounds)
    q, k, v = (change.to_heads(x, of_keys) for x, of_keys in ((q, False), (k, True), (v, True)))
    change.begin()
    change.end()
    *_, heads, rows, _ = q.shape
    like = library(q).broadcast_to(q[..., :1, :1], (*whole.batch, heads, rows, v.shape[-1]))
    of_heads, of_lse = empty_rows(like, rows, q.dtype), empty_rows(like[..., :1], rows, whole.wide)
    for heads, key_heads in groups_of(whole, WHOLE, whole.rank):
        own, keys = _from(first, heads), _from(first_key, key_heads)
        of_sinks = None if sinks is None else sinks[..., slice(*heads)]
        inputs = (heads_in(q, own), heads_in(k, keys), heads_in(v, keys))
        results = (heads_in(of_heads, own), heads_in(of_lse, own)[..., 0])
        calls.forward_of_heads((heads[0], key_heads[0]), *inputs, of_sinks, *results)
    del q, k, v
    back = Change(whole, comm, rounds)
    back.to_rows(of_heads, out, False)
    back.to_rows(of_lse, lse[..., None], False)
    back.begin()
    back.end()


def backward(comm: Communicator, calls: Calls, inputs: tuple[Any, ...], k: Any, v: Any, results: tuple[Any, Any, Any]) -> None:
    """Gradients of this rank's queries and keys; `inputs` are dout, q, out, lse and dlse of its rows."""
    whole, portions = calls.whole, portions_of(calls.whole)
    rounds = halves(whole) if len(portions) == 1 else 1
    dout, q, out, lse, dlse = inputs
    given = [(dout, False), (q, False), (k, True), (v, True), (out, False), (lse[..., None], False)]
    given += [] if dlse is None else [(dlse[..., None], False)]
    coming, going = [], []
    for portion in portions:
        change = Change(whole, comm, rounds, portion)
        coming.append((portion, change, [change.to_heads(x, of_keys) for x, of_keys in given]))
        change.begin()
    while coming:
        portion, change, arrays = coming.pop(0)
        change.end()
        found, arrays = _gradients(calls, portion, *arrays), []
        back = Change(whole, comm, rounds, portion)
        for x, to, of_keys in zip(found, results, (False, True, True)):
            back.to_rows(x, to, of_keys)
        del found
        back.begin()
        going.append(back)
    for back in going:
        back.end()


def _gradients(
    calls: Calls, portion: tuple[int, int], dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any = None
) -> list[Any]:
    """Those of all rows of q, k and v of a portion of this rank's heads."""
    whole = calls.whole
    (first, _), (first_key, _) = (side_of(whole, of_keys, portion).heads[whole.rank] for of_keys in (False, True))
    shared = side_of(whole, True).shared
    found = [empty_rows(x, x.shape[-2], whole.wide if shared and x is not q else x.dtype) for x in (q, k, v)]
    for heads, key_heads in groups_of(whole, portion, whole.rank):
        own, keys = _from(first, heads), _from(first_key, key_heads)
        room = tuple(heads_in(x, of) for x, of in zip(found, (own, keys, keys)))
        given = [heads_in(x, of) for x, of in ((dout, own), (q, own), (k, keys), (v, keys), (out, own))]
        given += [None if x is None else heads_in(x, own)[..., 0] for x in (lse, dlse)]
        calls.backward_of_heads((heads[0], key_heads[0]), tuple(given), room)
    return found


def _from(first: int, heads: Interval) -> Interval:
    """Heads counted from the first of a rank's."""
    return heads[0] - first, heads[1] - first
