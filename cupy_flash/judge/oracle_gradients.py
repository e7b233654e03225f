"""The gradients of attention as they are defined, as `oracle` has attention itself.

With S the scores, L the logits that bias and masks make of them, and `o` the elementwise product,

    P  = exp(L - lse)              delta_i = sum_c dout_ic out_ic - dlse_i
    dP = dout V^T                  dL = P o (dP - delta)              dS = dL o slope
    dV = P^T dout                  dQ = scale * dS K                  dK = scale * dS^T Q

The slope is 1. With a softcap it has 1 - (S / softcap)^2 as a factor, and with `score` the slope of that. `bias` has dL as its
gradient, `alibi_slopes` minus the distances times dL, and an array of `score` the derivative by its elements times dL, summed over
the pairs that read them. With dropout, dP and the P of dV are multiplied by `keep_scale` where `keep` is true, and 0 elsewhere.

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
from .oracle import (
    Array,
    HandScore,
    accumulator,
    capped_scores,
    distances,
    dropped,
    namespace,
    probabilities,
    repeat_heads,
    round_to_tf32,
    seen_pairs,
    sink_logits,
    weighted_sum,
)


class Pairs(NamedTuple):
    """What the gradients are made of: for each pair of a query and a key, 0 where it is masked, and for each query."""

    p: Array  # (*batch, heads_q, len_q, len_kv), before dropout
    lse: Array  # (*batch, heads_q, len_q)
    out: Array  # (*batch, heads_q, len_q, dim_v)
    dp: Array  # of the shape of p, after dropout
    delta: Array  # of the shape of lse
    slope: Array | None  # of the shape of p: the derivative of softcap and `score`, of masked pairs as well; None without either
    ds: Array  # of the shape of p
    dlogits: Array  # of the shape of p
    s: Array | None  # of the shape of p: what `score` is given, of masked pairs as well; None without one


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
        What a score becomes, the masks, sinks and dropout, as in `oracle`.
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
    Gradients of the arrays of `score` are not rounded: it alone knows their dtypes.
    """
    dtype = q.dtype
    wide = accumulator(dtype)

    def stored(x: Array) -> Array:
        return x.astype(dtype).astype(wide)

    def factor(x: Array) -> Array:
        return round_to_tf32(x) if precision == "tf32" else stored(x)

    pairs = pairs_of(dout, q, k, v, dlse, scores, stored, factor)
    exact = gradients_of(pairs, dout, q, k, v, scores, factor)
    others = {"dsinks": "sinks", "dbias": "bias", "dalibi_slopes": "alibi_slopes"}
    given = {name: scores[of] for name, of in others.items() if scores.get(of) is not None}
    rounded = {name: getattr(exact, name).astype(x.dtype) for name, x in given.items()}
    return Gradients(*(x.astype(dtype) for x in exact), **rounded, darrays=exact.darrays)


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
    out = stored(weighted_sum(factor(dropped(p, scores)), v, seen))
    p = stored(p)
    dp = xp.where(seen, dropped(factor(dout) @ v.swapaxes(-1, -2), scores), 0)
    delta = (stored(dout) * out).sum(axis=-1)
    if dlse is not None:
        delta = delta - dlse
    dlogits = ds = p * (dp - delta[..., None])
    s, slope, softcap, score = None, None, scores.get("softcap"), scores.get("score")
    if score is not None:
        s = capped_scores(q, k, scores["scale"], softcap)
        slope = score.slope(s).astype(s.dtype)
        ds = ds * slope
    if softcap is not None:
        of_cap = 1 - xp.tanh(q @ k.swapaxes(-1, -2) * scores["scale"] / softcap) ** 2
        slope = of_cap if slope is None else slope * of_cap
        ds = ds * of_cap
    dlogits = xp.where(seen, dlogits, 0)
    return Pairs(p, lse, out, dp, delta, slope, dlogits if slope is None else xp.where(seen, ds, 0), dlogits, s)


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
    ds, scale = factor(pairs.ds), scores["scale"]
    seen = seen_pairs(pairs.p, scores)
    by_key = seen.swapaxes(-1, -2)
    dq = scale * weighted_sum(ds, factor(repeat_heads(k, q)), seen)
    dk = scale * weighted_sum(ds.swapaxes(-1, -2), factor(q), by_key)
    dv = weighted_sum(factor(dropped(pairs.p, scores)).swapaxes(-1, -2), factor(dout), by_key)
    gradients = (summed_to(x.shape, dx) for x, dx in ((q, dq), (k, dk), (v, dv)))
    bias, slopes, score = (scores.get(name) for name in ("bias", "alibi_slopes", "score"))
    return Gradients(
        *gradients,
        dsinks=_of_sinks(pairs, scores.get("sinks")),
        dbias=None if bias is None else unbroadcast(bias.shape, pairs.dlogits),
        dalibi_slopes=None if slopes is None else _of_alibi(pairs, slopes),
        darrays=None if score is None else _of_arrays(pairs, score, seen),
    )


def _of_alibi(pairs: Pairs, slopes: Array) -> Array:
    """Return the gradient of slopes in their shape."""
    dlogits = pairs.dlogits
    far = distances(*dlogits.shape[-2:], namespace(dlogits)).astype(dlogits.dtype)
    return unbroadcast(slopes.shape, -(dlogits * far).sum(axis=(-2, -1)))


def _of_arrays(pairs: Pairs, score: HandScore, seen: Array) -> dict[str, Array]:
    """Return the gradients of the arrays of a score: what it says of masked pairs is selected away."""
    xp, dlogits = namespace(pairs.dlogits), pairs.dlogits
    by_element = {name: partial(pairs.s).astype(dlogits.dtype) for name, (partial, _) in score.arrays.items()}
    return {name: score.arrays[name][1](xp.where(seen, dlogits * x, 0)) for name, x in by_element.items()}


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
    return unbroadcast(shape, x.reshape(*x.shape[:-3], heads, x.shape[-3] // max(heads, 1), *x.shape[-2:]).sum(axis=-3))


def unbroadcast(shape: tuple[int, ...], x: Array) -> Array:
    """Return `x` summed over the axes along which something of this shape was broadcast to that of `x`."""
    extra = x.ndim - len(shape)
    broadcast = [extra + i for i, n in enumerate(shape) if n == 1 != x.shape[extra + i]]
    axes = (*range(extra), *broadcast)
    return (x.sum(axis=axes) if axes else x).reshape(shape)
