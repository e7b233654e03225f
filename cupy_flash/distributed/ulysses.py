"""Ulysses: heads and sequence change places. Each rank gets all rows of some heads, computes them as one device would, and gives
the rows back to those that have them. (Jacobs et al., 2023, "DeepSpeed Ulysses", arXiv:2309.14509.)

Heads are computed in two portions where there are enough of them: what the second one needs and what the first one gives travels
meanwhile. Where there are not, exchanges are before and after the computation, and beneath them are their own copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .bits import library
from .blocks import Interval
from .calls import Calls
from .change import Change, heads_in
from .communicator import Communicator
from .heads import Portion, comes_again, groups_of, halves, portions_of, side_of
from .rows import empty_rows
from .whole import Whole


def forward(comm: Communicator, calls: Calls, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any) -> None:
    """Attention of this rank's queries, written into a result."""
    given = [(q, False), (k, True), (v, True)]
    results = [(out, False), (lse[..., None], False)]
    _in_portions(comm, calls.whole, given, lambda portion, arrays: _attention(calls, portion, *arrays, sinks), results)


def backward(comm: Communicator, calls: Calls, inputs: tuple[Any, ...], k: Any, v: Any, results: tuple[Any, Any, Any]) -> None:
    """Gradients of this rank's queries and keys; `inputs` are dout, q, out, lse and dlse of its rows."""
    dout, q, out, lse, dlse = inputs
    given = [(dout, False), (q, False), (k, True), (v, True), (out, False), (lse[..., None], False)]
    given += [] if dlse is None else [(dlse[..., None], False)]
    results = list(zip(results, (False, True, True)))
    _in_portions(comm, calls.whole, given, lambda portion, arrays: _gradients(calls, portion, *arrays), results, True)


def _in_portions(
    comm: Communicator,
    whole: Whole,
    given: list[tuple[Any, bool]],
    compute: Callable[[Portion, list[Any]], list[Any]],
    results: list[tuple[Any, bool]],
    backward: bool = False,
) -> None:
    """Compute with all rows of this rank's heads, and give the rows back.

    Parameters
    ----------
    comm : Communicator
    whole : Whole
    given : list of (array, bool)
        This rank's rows of all heads, and whether they are of keys.
    compute : callable
        From the same as all rows of a portion of its heads to the same of the results.
    results : list of (array, bool)
        What is written.
    backward : bool
        Whether it is gradients that are computed.
    """
    portions = portions_of(whole, backward)
    rounds = halves(whole) if len(portions) == 1 else 1
    coming, going = [], []
    for portion in portions:
        change, arrays = Change(whole, comm, rounds, portion), []
        for i, (x, of_keys) in enumerate(given):
            again = comes_again(whole, of_keys, portion)
            arrays.append(coming[0][2][i] if again else change.to_heads(x, of_keys))
        coming.append((portion, change, arrays))
        change.begin()
    while coming:
        portion, change, arrays = coming.pop(0)
        change.end()
        found = compute(portion, arrays)
        del arrays  # no longer needed, as what has been computed is not once it is packed
        back = Change(whole, comm, rounds, portion)
        for x, (to, of_keys) in zip(found, results):
            back.to_rows(x, to, of_keys)
        del found
        back.begin()
        going.append(back)
    for back in going:
        back.end()


def _attention(calls: Calls, portion: Portion, q: Any, k: Any, v: Any, sinks: Any) -> list[Any]:
    """Result and log-sum-exp of all rows of a portion of this rank's heads."""
    whole = calls.whole
    (first, _), (first_key, _) = (side_of(whole, of_keys, portion).heads[whole.rank] for of_keys in (False, True))
    *_, heads, rows, _ = q.shape
    like = library(q).broadcast_to(q[..., :1, :1], (*whole.batch, heads, rows, v.shape[-1]))
    out, lse = empty_rows(like, rows, q.dtype), empty_rows(like[..., :1], rows, whole.wide)
    for heads, key_heads in groups_of(whole, portion, whole.rank):
        own, keys = _from(first, heads), _from(first_key, key_heads)
        of_sinks = None if sinks is None else sinks[..., slice(*heads)]
        inputs = (heads_in(q, own), heads_in(k, keys), heads_in(v, keys))
        calls.forward_of_heads((heads[0], key_heads[0]), *inputs, of_sinks, heads_in(out, own), heads_in(lse, own)[..., 0])
    return [out, lse]


def _gradients(
    calls: Calls, portion: Portion, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any = None
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
