"""The gradients of attention on arrays in host memory, tile by tile, as `forward` has attention itself.

`blocked_gradients` computes P again from `lse`, O(n) memory: what users get on backend 'numpy'.
The formulas are in `judge.oracle_gradients`.

A gradient has the shape of its input: it is summed over query heads that share a key head, and over batch axes along which
the input was broadcast. A row that sees nothing has gradient 0 and gives none. What belongs to masked pairs is selected away.
"""

from __future__ import annotations

import math

import numpy

from ...problem.backward import Gradients
from .forward import accumulator, tiles_in_sight, weighted_sum


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
        As in `forward`.
    dq, dk, dv
        Where to write, in the shapes of `q`, `k` and `v`, of any strides. New arrays in the dtype and the memory order of the
        inputs by default.
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
