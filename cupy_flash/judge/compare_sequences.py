"""Gradients that are sums over sequences of their own lengths: of sinks, and of what scores read; judged as in `compare_gradients`.

Each sequence is a problem by itself, and what its rows give is added up as that of batch elements is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from .compare import arithmetic_of, describe, part_of
from .compare_gradients import _bounds
from .compare_sums import PairSums, add_part, bounds_of, zeros_like
from .gradient_errors import SinkSums, sink_bounds, worst_of
from .oracle import Array


@dataclass(frozen=True)
class Part:
    """A sequence: its arrays have no batch axis, ``(heads, rows, dim)``.

    Parameters
    ----------
    dout, q, k, v : array
    dlse : array or None
    scores : dict
        As for the functions of `oracle`.
    places : dict of str to tuple
        Where its gradients are in those of all, of those that are not as large: an index.
    """

    dout: Array
    q: Array
    k: Array
    v: Array
    dlse: Array | None
    scores: dict[str, Any]
    places: Mapping[str, Any]


def wrong_sum(
    parts: Sequence[Part], sinks: Array | None, dsinks: Array | None, wrt: Mapping[str, tuple[Array, Array]], precision: str
) -> str | None:
    """Judge the gradients of sinks and of others: what is wrong, in words, or None.

    Parameters
    ----------
    parts
        All sequences.
    sinks, dsinks
        Or None.
    wrt
        By the names that `compare_gradients` has for them, what else has a gradient, and that.
    precision
        "ieee" or "tf32".
    """
    sums = None if sinks is None else SinkSums(*(numpy.zeros(sinks.shape) for _ in SinkSums._fields))
    pair_wise = {name: zeros_like(x) for name, (x, _) in wrt.items()}
    dtype, rows, terms = parts[0].q.dtype, 0, 0
    for part in parts:
        heads_kv = part.k.shape[0]
        group = part.q.shape[0] // heads_kv
        rows, terms = rows + part.q.shape[1], terms + part.q.shape[0] * part.q.shape[1] * part.k.shape[1]
        own = {name: PairSums(*(x[part.places.get(name, ...)] for x in whole)) for name, whole in pair_wise.items()}
        for head in range(heads_kv) if part.q.size else ():
            of_q, of_kv = (slice(head * group, (head + 1) * group),), (slice(head, head + 1),)
            inputs = part.dout[of_q], part.q[of_q], part.k[of_kv], part.v[of_kv], None if part.dlse is None else part.dlse[of_q]
            *_, of_sinks, others = _bounds(*inputs, precision, part_of(part.scores, of_q), tuple(wrt))
            add_part(own, others, of_q)
            for whole, added in zip(sums or (), of_sinks or ()):
                whole[..., of_q[-1]] += added
    judged = {}
    if sums is not None and sinks.size:
        judged["dsinks"] = dsinks, sink_bounds(sums, sinks, rows, dtype)
    for name, (x, gradient) in wrt.items():
        shape, u = x.shape or (1,), arithmetic_of(dtype, "ieee").sum  # of a scalar one, with a place
        bound = bounds_of(PairSums(*(y.reshape(shape) for y in pair_wise[name])), x.dtype, terms, u)
        judged[name] = gradient.reshape(shape), bound
    for name, (gradient, bound) in judged.items():
        worst = worst_of(gradient[..., None], *bound, (0,) * gradient.ndim)
        if worst.share > 1:
            return describe(name, worst.share, worst.error, worst.allowed, worst.row)
    return None
