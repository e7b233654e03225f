"""The gradients of attention on arrays in host memory, tile by tile, as `forward` has attention itself.

`blocked_gradients` computes P again from `lse`, O(n) memory: what users get on backend 'numpy'.
The formulas are in `judge.oracle_gradients`.

A gradient has the shape of its input: it is summed over query heads that share a key head, and over batch axes along which
the input was broadcast. A row that sees nothing has gradient 0 and gives none. What belongs to masked pairs is selected away.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy

from ...problem.backward import Gradients
from ...problem.mask import Mask
from .forward import accumulator, tiles_in_sight, weighted_sum

if TYPE_CHECKING:
    from .scores import BoundScores, TileOfScores


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
    mask: Mask | None = None,
    softcap: float | None = None,
    sinks: numpy.ndarray | None = None,
    scores: BoundScores | None = None,
    sums_of_scores: dict[str, numpy.ndarray] | None = None,
    dq: numpy.ndarray | None = None,
    dk: numpy.ndarray | None = None,
    dv: numpy.ndarray | None = None,
    dsinks: numpy.ndarray | None = None,
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
    scale, mask, softcap, sinks, scores
        As in `forward`.
    sums_of_scores
        What gradients of arrays that `scores` reads are added to, by name.
    dq, dk, dv, dsinks
        Where to write, in the shapes of `q`, `k`, `v` and `sinks`, of any strides. New arrays in the dtype and the memory order of
        the inputs by default.
    block_q, block_kv
        Tile sizes. The defaults keep a tile of scores in a core's own cache.

    Examples
    --------
    >>> import numpy
    >>> from cupy_flash.machine.numpy_path.backward import blocked_gradients
    >>> from cupy_flash.judge.oracle_gradients import oracle_gradients
    >>> from cupy_flash.machine.numpy_path.forward import blocked
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 2, 700, 8))
    >>> grads = blocked_gradients(q, q, k, v, *blocked(q, k, v, scale=0.3), scale=0.3)
    >>> all(map(numpy.allclose, grads, oracle_gradients(q, q, k, v, scale=0.3)))
    True
    """
    wide = accumulator(q.dtype)
    mask = mask or Mask(q.shape[-2], k.shape[-2])
    (heads_q, len_q), heads_kv = q.shape[-3:-1], k.shape[-3]
    group = heads_q // max(heads_kv, 1)
    sums = Gradients(*(numpy.zeros_like(x, wide) for x in (q, k, v)))
    of_sinks = None if sinks is None else numpy.zeros(sinks.shape, wide)

    for *element, head in numpy.ndindex(*dout.shape[:-3], heads_kv):
        source_k, source_v = _index(element, k, head), _index(element, v, head)
        for row in range(0, len_q, block_q):
            # The query heads that share a key head are rows of one tall tile: each key is read once for all of them.
            tile = slice(head * group, (head + 1) * group), slice(row, row + block_q)
            at, source_q = (*element, *tile), _index(element, q, *tile)
            q_tile = q[source_q].astype(wide)
            shape, in_sight = q_tile.shape, tiles_in_sight(mask, row, q_tile, block_kv)
            q_tile, dout_tile, out_tile = (_tall(x, wide) for x in (q_tile, dout[at], out[at]))
            lse_tile = lse[at].reshape(-1).astype(wide)
            delta = (dout_tile * out_tile).sum(axis=1)
            if dlse is not None:
                delta -= dlse[at].reshape(-1)
            dq_tile = numpy.zeros_like(q_tile)
            if sinks is not None:  # a sink has a share of each row's softmax, and since it belongs to no value, a dP of 0
                logits = numpy.repeat(sinks[:, tile[0]].astype(wide), shape[1], axis=1)
                share = numpy.exp(logits - numpy.where(lse_tile == -numpy.inf, numpy.inf, lse_tile))
                of_sinks[:, tile[0]] -= (share * delta).reshape(len(sinks), *shape[:2]).sum(axis=-1)

            for keys, seen in in_sight:
                of_keys = scores and scores.tile(tuple(element), tile[0], row, shape[1], keys, wide)
                seen = seen if of_keys is None else of_keys.seen(seen)
                if seen is not None and not seen.any():
                    continue
                k_tile = numpy.ascontiguousarray(k[source_k][keys], wide)
                v_tile = numpy.ascontiguousarray(v[source_v][keys], wide)
                p, ds = _pairs_of_tile(
                    dout_tile, q_tile, k_tile, v_tile, lse_tile, delta, scale, softcap, seen, of_keys, sums_of_scores or {}
                )
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
    stored = (_stored(x, q.dtype, given) for x, given in zip(sums, (dq, dk, dv)))
    return Gradients(*stored, dsinks=None if sinks is None else _stored(of_sinks, sinks.dtype, dsinks))


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
    of_keys: TileOfScores | None,
    sums: dict[str, numpy.ndarray],
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return P as it meets V, and dS, of one tile, 0 where a pair is not seen."""
    scores = q @ k.T
    scores *= scale
    if softcap is not None:
        bent = numpy.tanh(scores / softcap)
        scores = softcap * bent
    kept, s = None, scores
    if of_keys is not None:
        kept, s = of_keys.kept(), of_keys.value(scores)
    # Of a row whose scores are all -inf, exp(-inf - -inf) would be NaN.
    p = numpy.exp(s - numpy.where(lse == -numpy.inf, 0, lse)[:, None])
    ds = dout @ v.T
    if kept is not None:
        ds *= kept
    ds -= delta[:, None]
    ds *= p
    if seen is not None:
        ds = numpy.where(seen, ds, 0)
    if of_keys is not None:
        of_keys.add_to(sums, scores, ds)
        ds = of_keys.to_scores(scores, ds)
    if softcap is not None:
        ds *= 1 - bent**2
    if kept is not None:
        p *= kept
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
