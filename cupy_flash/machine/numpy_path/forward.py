"""Attention on arrays in host memory, tile by tile: what users get on backend 'numpy'.

`blocked` is online softmax over tiles of keys, O(n) memory, for NumPy arrays shaped `(*batch, heads, seq, dim)`. It takes `scale`,
`softcap`, a `Mask`, and by `scores` what else becomes of scores, in the order that `problem.scores` states. A row that sees nothing
has result 0 and log-sum-exp -inf. NaN and infinity are data: they travel to the rows that see them, without a warning.

Keys and values may have fewer heads than queries: query head h reads key head `h // (heads_q // heads_kv)`.
Gradients are in `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy

from ...problem.mask import Mask

if TYPE_CHECKING:
    from .scores import BoundScores, TileOfScores


@numpy.errstate(all="ignore")
def weighted_sum(p: numpy.ndarray, v: numpy.ndarray, seen: numpy.ndarray) -> numpy.ndarray:
    """Return `p @ v` over the pairs in `seen` only: a zero that the mask put into `p` must not meet NaN or infinity."""
    finite = numpy.isfinite(v).all(axis=-1)
    out = p @ numpy.where(finite[..., None], v, 0)
    for j in map(int, numpy.flatnonzero(~finite.all(axis=tuple(range(finite.ndim - 1))))):  # usually none
        takes_part = seen[:, j, None] & ~finite[..., j, None, None]
        out += numpy.where(takes_part, p[..., j, None] * v[..., j, None, :], 0)
    return out


@numpy.errstate(all="ignore")
def blocked(
    q: numpy.ndarray,
    k: numpy.ndarray,
    v: numpy.ndarray,
    *,
    scale: float,
    mask: Mask | None = None,
    softcap: float | None = None,
    sinks: numpy.ndarray | None = None,
    scores: BoundScores | None = None,
    out: numpy.ndarray | None = None,
    lse: numpy.ndarray | None = None,
    block_q: int = 256,
    block_kv: int = 512,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return `(out, lse)` in O(n) memory, for NumPy arrays of any strides.

    Softmax and accumulation are float32, or float64 for float64 inputs. Tiles that no row sees are never read, tiles
    that every row sees whole are not masked.

    Parameters
    ----------
    q, k, v
        Arrays `(*batch, heads, seq, dim)`. They are read in place, a tile at a time.
    scale, softcap
        As in the head of this module.
    mask
        Which keys a query sees; all by default.
    sinks
        Logits of each row besides those of its keys, `(n, heads_q)`, which belong to no value.
    scores
        What else becomes of scores.
    out, lse
        Where to write, of any strides: `(*batch, heads_q, len_q, dim_v)` and `(*batch, heads_q, len_q)`. New arrays by
        default, `out` in the dtype of `q`.
    block_q, block_kv
        Tile sizes. The defaults keep a tile of scores in a core's own cache.
    """
    wide = accumulator(q.dtype)
    mask = mask or Mask(q.shape[-2], k.shape[-2])
    batch = numpy.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    q, k, v = (numpy.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    (heads_q, len_q), heads_kv, dim_v = q.shape[-3:-1], k.shape[-3], v.shape[-1]
    group = heads_q // max(heads_kv, 1)
    out = numpy.empty((*batch, heads_q, len_q, dim_v), q.dtype) if out is None else out
    lse = numpy.empty((*batch, heads_q, len_q), wide) if lse is None else lse

    for *element, head in numpy.ndindex(*batch, heads_kv):
        for row in range(0, len_q, block_q):
            # The query heads that share a key head are rows of one tall tile: each key is read once for all of them.
            tile = (*element, slice(head * group, (head + 1) * group), slice(row, row + block_q))
            q_tile = q[tile].astype(wide)
            source, in_sight = (*element, head), tiles_in_sight(mask, row, q_tile, block_kv)
            of_heads = None if sinks is None else sinks[:, tile[-2]].T.astype(wide)
            of_keys = _tiles_of_scores(scores, tile, len_q, wide)
            out[tile], lse[tile] = _attend(q_tile, k[source], v[source], scale, softcap, of_heads, in_sight, of_keys)
    return out, lse


def _attend(
    q: numpy.ndarray,  # (group, rows, dim), in the dtype to compute in
    k: numpy.ndarray,  # (len_kv, dim)
    v: numpy.ndarray,  # (len_kv, dim_v)
    scale: float,
    softcap: float | None,
    sinks: numpy.ndarray | None,  # (group, n)
    in_sight: Iterable[tuple[slice, numpy.ndarray | None]],
    of_keys: Callable[[slice], TileOfScores | None],
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return result and log-sum-exp of one tile of queries against all the keys it sees."""
    group, rows, dim = q.shape
    dim_v = v.shape[-1]
    q = q.reshape(group * rows, dim)
    top = numpy.full(group * rows, -numpy.inf, q.dtype)
    total = numpy.zeros(group * rows, q.dtype)
    acc = numpy.zeros((group * rows, dim_v), q.dtype)

    for keys, seen in in_sight:
        tile = of_keys(keys)
        if tile is not None:
            seen = tile.seen(seen)
            if seen is not None and not seen.any():
                continue
        # BLAS wants unit strides; this copies a tile at most, and nothing where the keys already are what it wants.
        k_tile = numpy.ascontiguousarray(k[keys], q.dtype)
        v_tile = numpy.ascontiguousarray(v[keys], q.dtype)
        s = q @ k_tile.T
        s *= scale  # not q: what scores hold, q times a scale at the end of the float range may not
        if softcap is not None:
            s = softcap * numpy.tanh(s / softcap)
        kept = None
        if tile is not None:
            s, kept = tile.value(s), tile.kept()
        if seen is not None:
            s = numpy.where(seen, s, -numpy.inf)

        new_top = numpy.maximum(top, s.max(axis=1))
        shift = numpy.where(new_top == -numpy.inf, 0, new_top)  # nothing seen yet: exp(-inf - -inf) would be NaN
        s -= shift[:, None]
        p = numpy.exp(s, out=s)
        rescale = numpy.exp(top - shift)
        top = new_top
        total = total * rescale + p.sum(axis=1)
        if kept is not None:
            p *= kept
        acc *= rescale[:, None]
        acc += p @ v_tile if seen is None else weighted_sum(p, v_tile, seen)

    if sinks is not None:
        sinks = numpy.repeat(sinks, rows, axis=0)
        new_top = numpy.maximum(top, sinks.max(axis=1, initial=-numpy.inf))
        shift = numpy.where(new_top == -numpy.inf, 0, new_top)
        rescale = numpy.exp(top - shift)
        top = new_top
        total = total * rescale + numpy.exp(sinks - shift[:, None]).sum(axis=1)
        acc *= rescale[:, None]

    acc /= numpy.where(total == 0, 1, total)[:, None]
    return acc.reshape(group, rows, dim_v), (top + numpy.log(total)).reshape(group, rows)


def tiles_in_sight(
    mask: Mask, row: int, q: numpy.ndarray, block_kv: int
) -> Iterator[tuple[slice, numpy.ndarray | None]]:
    """Yield the tiles of keys that the rows of a tile of queries `(group, rows, dim)` see, the first of which is `row`.

    With each comes the mask `(group * rows, keys)` of its pairs, or None where every row sees every key.
    """
    group, rows = q.shape[:2]
    begin, end = mask.some(row, rows)
    seen_by_all = mask.all(row, rows)
    for col in range(begin, end, block_kv):
        stop = min(col + block_kv, end)
        whole = seen_by_all[0] <= col and stop <= seen_by_all[1]
        yield slice(col, stop), None if whole else numpy.tile(mask.visible(row, rows, col, stop - col), (group, 1))


def _tiles_of_scores(
    scores: BoundScores | None, tile: tuple[int | slice, ...], len_q: int, wide: type[numpy.floating]
) -> Callable[[slice], TileOfScores | None]:
    """What becomes of the scores of a tile of queries, by the keys."""
    if scores is None:
        return lambda keys: None
    *element, heads, queries = tile
    row, stop, _ = queries.indices(len_q)
    return lambda keys: scores.tile(tuple(element), heads, row, stop - row, keys, wide)


def accumulator(dtype: numpy.dtype) -> type[numpy.floating]:
    """Return the type to compute in: float64 for float64, float32 for all others."""
    return numpy.float64 if dtype == numpy.float64 else numpy.float32
