"""The gradients of attention as they are defined, as `oracle` has attention itself.

With S the scores after scale and softcap, and `o` the elementwise product,

    P  = exp(S - lse)              delta_i = sum_c dout_ic out_ic - dlse_i
    dP = dout V^T                  dS = P o (dP - delta), with a softcap also o (1 - (S / softcap)^2)
    dV = P^T dout                  dQ = scale * dS K                  dK = scale * dS^T Q

- `oracle_gradients`: float64 throughout;
- `naive_gradients`: the textbook formulas in the caller's own precision.

A gradient has the shape of its input: it is summed over query heads that share a key head, and over batch axes along which
the input was broadcast. A row that sees nothing has gradient 0 and gives none. What belongs to masked pairs is selected away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from ..problem.backward import Gradients
from .oracle import Array, accumulator, namespace, probabilities, repeat_heads, round_to_tf32, seen_pairs, sink_logits, weighted_sum


class Pairs(NamedTuple):
    """What the gradients are made of: for each pair of a query and a key, 0 where it is masked, and for each query."""

    p: Array  # (*batch, heads_q, len_q, len_kv)
    lse: Array  # (*batch, heads_q, len_q)
    out: Array  # (*batch, heads_q, len_q, dim_v)
    dp: Array  # of the shape of p
    delta: Array  # of the shape of lse
    slope: Array | None  # of the shape of p: the derivative of the softcap, of masked pairs as well; None without one
    ds: Array  # of the shape of p


def oracle_gradients(dout: Array, q: Array, k: Array, v: Array, *, dlse: Array | None = None, **scores: Any) -> Gradients:
    """Return the gradients in float64, from the inputs as they are; the forward is computed anew in float64.

    Parameters
    ----------
    dout
        The gradient with respect to the result, `(*batch, heads_q, len_q, dim_v)`.
    q, k, v
        `(*batch, heads, seq, dim)`; leading axes broadcast.
    dlse
        The gradient with respect to the log-sum-exp, `(*batch, heads_q, len_q)`; None for zero.
    **scores
        Scale, softcap, mask and sinks, as in `oracle`.
    """
    exact = [x.astype(numpy.float64) for x in (dout, q, k, v)]
    return gradients_of(pairs_of(*exact, dlse, scores), *exact, scores)


@numpy.errstate(all="ignore")
def naive_gradients(
    dout: Array, q: Array, k: Array, v: Array, *, dlse: Array | None = None, precision: str = "ieee", **scores: Any
) -> Gradients:
    """Return the gradients as the textbook formulas give them in the precision of the inputs.

    Products accumulate in float32 and the softmax is float32. Rounded to the inputs' dtype are `out` before delta, P, dS
    and the gradients. With `precision="tf32"` both factors of every product are rounded to TF32. float64 stays float64.
    """
    dtype = q.dtype
    wide = accumulator(dtype)

    def stored(x: Array) -> Array:
        return x.astype(dtype).astype(wide)

    def factor(x: Array) -> Array:
        return round_to_tf32(x) if precision == "tf32" else stored(x)

    pairs = pairs_of(dout, q, k, v, dlse, scores, stored, factor)
    exact = gradients_of(pairs, dout, q, k, v, scores, factor)
    dsinks = None if exact.dsinks is None else exact.dsinks.astype(scores["sinks"].dtype)
    return Gradients(*(x.astype(dtype) for x in exact), dsinks=dsinks)


@numpy.errstate(all="ignore")
def pairs_of(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    dlse: Array | None,
    scores: dict[str, Any],
    stored: Callable[[Array], Array] = lambda x: x,
    factor: Callable[[Array], Array] = lambda x: x,
) -> Pairs:
    """Return P, dS and what is between them. `stored` rounds what is kept in memory, `factor` what enters a product."""
    xp = namespace(q)
    q, k, v = factor(q), factor(repeat_heads(k, q)), factor(repeat_heads(v, q))
    p, lse = probabilities(q, k, **scores)
    seen = seen_pairs(p, scores)
    p = xp.where(seen, p, 0)  # in a row of NaN, the masked pairs too are NaN
    out = stored(weighted_sum(factor(p), v, seen))
    p = stored(p)
    dp = xp.where(seen, factor(dout) @ v.swapaxes(-1, -2), 0)
    delta = (stored(dout) * out).sum(axis=-1)
    if dlse is not None:
        delta = delta - dlse
    ds = p * (dp - delta[..., None])
    slope, softcap = None, scores.get("softcap")
    if softcap is not None:
        slope = 1 - xp.tanh(q @ k.swapaxes(-1, -2) * scores["scale"] / softcap) ** 2
        ds = ds * slope
    return Pairs(p, lse, out, dp, delta, slope, xp.where(seen, ds, 0))


@numpy.errstate(all="ignore")
def gradients_of(
    pairs: Pairs,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    scores: dict[str, Any],
    factor: Callable[[Array], Array] = lambda x: x,
) -> Gradients:
    """Return the gradients in the dtype of `pairs`. `factor` rounds what enters a product."""
    p, ds, scale = factor(pairs.p), factor(pairs.ds), scores["scale"]
    seen = seen_pairs(p, scores)
    dq = scale * weighted_sum(ds, factor(repeat_heads(k, q)), seen)
    dk = scale * weighted_sum(ds.swapaxes(-1, -2), factor(q), seen.T)
    dv = weighted_sum(p.swapaxes(-1, -2), factor(dout), seen.T)
    gradients = (summed_to(x.shape, dx) for x, dx in ((q, dq), (k, dk), (v, dv)))
    return Gradients(*gradients, dsinks=_of_sinks(pairs, scores.get("sinks")))


def _of_sinks(pairs: Pairs, sinks: Array | None) -> Array | None:
    """Return the gradient of sinks in their shape: each has a share of every row's softmax and no value, so a dP of 0."""
    if sinks is None:
        return None
    xp = namespace(pairs.lse)
    lse = xp.where(pairs.lse == -xp.inf, xp.inf, pairs.lse)
    share = xp.exp(sink_logits(sinks, pairs.lse) - lse[..., None])
    of_rows = -share * pairs.delta[..., None]
    return of_rows.sum(axis=(*range(of_rows.ndim - 3), -2)).T.reshape(sinks.shape)


def summed_to(shape: tuple[int, ...], x: Array) -> Array:
    """Return `x`, which is per query head and batch element, summed to the shape of the input it belongs to."""
    heads = shape[-3]
    x = x.reshape(*x.shape[:-3], heads, x.shape[-3] // max(heads, 1), *x.shape[-2:]).sum(axis=-3)
    extra = x.ndim - len(shape)
    broadcast = [extra + i for i, n in enumerate(shape) if n == 1 != x.shape[extra + i]]
    axes = (*range(extra), *broadcast)
    return (x.sum(axis=axes) if axes else x).reshape(shape)
