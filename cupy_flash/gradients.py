"""The gradients of attention in array code, as `reference` has attention itself.

With S the scores after scale and softcap, and `o` the elementwise product,

    P  = exp(S - lse)              delta_i = sum_c dout_ic out_ic - dlse_i
    dP = dout V^T                  dS = P o (dP - delta), with a softcap also o (1 - (S / softcap)^2)
    dV = P^T dout                  dQ = scale * dS K                  dK = scale * dS^T Q

- `oracle_gradients`: float64 throughout;
- `naive_gradients`: the textbook formulas in the caller's own precision;
- `blocked_gradients`: P again from `lse`, tile by tile, O(n) memory, what users get for arrays on the host.

A gradient has the shape of its input: it is summed over query heads that share a key head, and over batch axes along which
the input was broadcast. A row that sees nothing has gradient 0 and gives none. What belongs to masked pairs is selected away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from .reference import (
    Array,
    accumulator,
    namespace,
    probabilities,
    repeat_heads,
    round_to_tf32,
    tiles_in_sight,
    visible,
    weighted_sum,
)


class Gradients(NamedTuple):
    """The gradients with respect to `q`, `k` and `v`.

    Each has shape, dtype and memory order of its input, and is summed over axes along which the input was broadcast.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    >>> out, vjp = cupy_flash.attention_vjp(q, k, v)
    >>> grads = vjp(np.ones_like(out))
    >>> grads._fields, grads.dk.shape
    (('dq', 'dk', 'dv'), (2, 5, 4))
    """

    dq: Array
    dk: Array
    dv: Array


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
        `scale`, `first_key`, `last_key` and `softcap`, as in `reference`.
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
    return Gradients(*(x.astype(dtype) for x in gradients_of(pairs, dout, q, k, v, scores, factor)))


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
    seen = visible(*p.shape[-2:], scores.get("first_key"), scores.get("last_key"), xp)
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
    seen = visible(*p.shape[-2:], scores.get("first_key"), scores.get("last_key"), namespace(q))
    dq = scale * weighted_sum(ds, factor(repeat_heads(k, q)), seen)
    dk = scale * weighted_sum(ds.swapaxes(-1, -2), factor(q), seen.T)
    dv = weighted_sum(p.swapaxes(-1, -2), factor(dout), seen.T)
    return Gradients(*(summed_to(x.shape, dx) for x, dx in ((q, dq), (k, dk), (v, dv))))


def summed_to(shape: tuple[int, ...], x: Array) -> Array:
    """Return `x`, which is per query head and batch element, summed to the shape of the input it belongs to."""
    heads = shape[-3]
    x = x.reshape(*x.shape[:-3], heads, x.shape[-3] // max(heads, 1), *x.shape[-2:]).sum(axis=-3)
    extra = x.ndim - len(shape)
    broadcast = [extra + i for i, n in enumerate(shape) if n == 1 != x.shape[extra + i]]
    axes = (*range(extra), *broadcast)
    return (x.sum(axis=axes) if axes else x).reshape(shape)


@numpy.errstate(all="ignore")
def blocked_gradients(
    dout: numpy.ndarray,
    q: numpy.ndarray,
    k: numpy.ndarray,
    v: numpy.ndarray,
    out: numpy.ndarray,
    lse: numpy.ndarray,
    *,
    dlse: numpy.ndarray | None = None,
    scale: float,
    first_key: int | None = None,
    last_key: int | None = None,
    softcap: float | None = None,
    dq: numpy.ndarray | None = None,
    dk: numpy.ndarray | None = None,
    dv: numpy.ndarray | None = None,
    block_q: int = 256,
    block_kv: int = 512,
) -> Gradients:
    """Return the gradients in O(n) memory, for NumPy arrays of any strides.

    P and the sums are float32, or float64 for float64 inputs. Tiles that no row sees are never read, tiles that every row
    sees whole are not masked.

    Parameters
    ----------
    dout
        The gradient with respect to `out`, `(*batch, heads_q, len_q, dim_v)`.
    q, k, v
        The inputs of the forward, `(*batch, heads, seq, dim)`; leading axes broadcast. They are read a tile at a time.
    out, lse
        The results of the forward, `(*batch, heads_q, len_q, dim_v)` and `(*batch, heads_q, len_q)`.
    dlse
        The gradient with respect to `lse`, of its shape; None for zero.
    scale, first_key, last_key, softcap
        As in `reference`.
    dq, dk, dv
        Where to write, in the shapes of `q`, `k` and `v`, of any strides. New arrays in the dtype and the memory order of the
        inputs by default.
    block_q, block_kv
        Tile sizes. The defaults keep a tile of scores in a core's own cache.

    Examples
    --------
    >>> import numpy
    >>> from cupy_flash.gradients import blocked_gradients, oracle_gradients
    >>> from cupy_flash.reference import blocked
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 2, 700, 8))
    >>> grads = blocked_gradients(q, q, k, v, *blocked(q, k, v, scale=0.3), scale=0.3)
    >>> all(map(numpy.allclose, grads, oracle_gradients(q, q, k, v, scale=0.3)))
    True
    """
    wide = accumulator(q.dtype)
    (heads_q, len_q), (heads_kv, len_kv) = q.shape[-3:-1], k.shape[-3:-1]
    group = heads_q // max(heads_kv, 1)
    sums = Gradients(*(numpy.zeros_like(x, wide) for x in (q, k, v)))

    for *element, head in numpy.ndindex(*dout.shape[:-3], heads_kv):
        source_k, source_v = _index(element, k, head), _index(element, v, head)
        for row in range(0, len_q, block_q):
            # The query heads that share a key head are rows of one tall tile: each key is read once for all of them.
            tile = slice(head * group, (head + 1) * group), slice(row, row + block_q)
            at, source_q = (*element, *tile), _index(element, q, *tile)
            q_tile = q[source_q].astype(wide)
            shape = q_tile.shape
            q_tile, dout_tile, out_tile = (_tall(x, wide) for x in (q_tile, dout[at], out[at]))
            lse_tile = lse[at].reshape(-1).astype(wide)
            delta = (dout_tile * out_tile).sum(axis=1)
            if dlse is not None:
                delta -= dlse[at].reshape(-1)
            dq_tile = numpy.zeros_like(q_tile)

            first = None if first_key is None else row + first_key
            last = None if last_key is None else row + last_key
            for keys, seen in tiles_in_sight(*shape[:2], len_kv, first, last, block_kv):
                k_tile = numpy.ascontiguousarray(k[source_k][keys], wide)
                v_tile = numpy.ascontiguousarray(v[source_v][keys], wide)
                p, ds = _pairs_of_tile(dout_tile, q_tile, k_tile, v_tile, lse_tile, delta, scale, softcap, seen)
                if seen is None:
                    dq_tile += ds @ k_tile
                    sums.dk[source_k][keys] += ds.T @ q_tile
                    sums.dv[source_v][keys] += p.T @ dout_tile
                else:
                    dq_tile += weighted_sum(ds, k_tile, seen)
                    sums.dk[source_k][keys] += weighted_sum(ds.T, q_tile, seen.T)
                    sums.dv[source_v][keys] += weighted_sum(p.T, dout_tile, seen.T)
            sums.dq[source_q] += dq_tile.reshape(shape)

    for of_scores in (sums.dq, sums.dk):
        of_scores *= scale
    return Gradients(*(_stored(x, q.dtype, given) for x, given in zip(sums, (dq, dk, dv))))


def _pairs_of_tile(
    dout: numpy.ndarray,  # (rows, dim_v)
    q: numpy.ndarray,  # (rows, dim)
    k: numpy.ndarray,  # (keys, dim)
    v: numpy.ndarray,  # (keys, dim_v)
    lse: numpy.ndarray,  # (rows,)
    delta: numpy.ndarray,  # (rows,)
    scale: float,
    softcap: float | None,
    seen: numpy.ndarray | None,  # (rows, keys), or None if all are seen
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return P and dS of one tile, 0 where a pair is not seen."""
    s = q @ k.T
    s *= scale
    if softcap is not None:
        bent = numpy.tanh(s / softcap)
        s = softcap * bent
    s -= numpy.where(lse == -numpy.inf, 0, lse)[:, None]  # a row whose scores are all -inf: exp(-inf - -inf) would be NaN
    p = numpy.exp(s, out=s)
    ds = dout @ v.T
    ds -= delta[:, None]
    ds *= p
    if softcap is not None:
        ds *= 1 - bent**2
    if seen is None:
        return p, ds
    return numpy.where(seen, p, 0), numpy.where(seen, ds, 0)


def _stored(sums: numpy.ndarray, dtype: numpy.dtype, given: numpy.ndarray | None) -> numpy.ndarray:
    if given is None:
        return sums.astype(dtype, copy=False)
    given[...] = sums
    return given


def _tall(x: numpy.ndarray, dtype: type[numpy.floating]) -> numpy.ndarray:
    """Return the rows of all heads of `x`, one head below the other, as BLAS wants them."""
    return numpy.ascontiguousarray(x, dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _index(element: list[int], x: numpy.ndarray, *tile: int | slice) -> tuple[int | slice, ...]:
    """Return the index of a tile of a batch element in `x`, whose leading axes broadcast."""
    own = element[len(element) - (x.ndim - 3) :]
    return (*(0 if n == 1 else i for i, n in zip(own, x.shape)), *tile)
