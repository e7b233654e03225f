"""The public function that writes new keys and values into caches."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from .absent import answers_absent

K = TypeVar("K")
V = TypeVar("V")
Q = TypeVar("Q")


@overload
def append_kv(
    k_cache: K, v_cache: V, k: Any, v: Any, seqlens: Any, *, q: None = ..., seqlens_new: Any = ..., pages: Any = ...,
    cache_batch_idx: Any = ..., cos: Any = ..., sin: Any = ..., positions: Any = ..., interleaved: bool = ..., layout: str = ...,
    backend: str = ..., q_out: None = ...,
) -> tuple[K, V]: ...  # fmt: skip


@overload
def append_kv(
    k_cache: K, v_cache: V, k: Any, v: Any, seqlens: Any, *, q: Q, seqlens_new: Any = ..., pages: Any = ...,
    cache_batch_idx: Any = ..., cos: Any = ..., sin: Any = ..., positions: Any = ..., interleaved: bool = ..., layout: str = ...,
    backend: str = ..., q_out: Q | None = ...,
) -> tuple[K, V, Q]: ...  # fmt: skip


@answers_absent
def append_kv(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    seqlens: Any,
    *,
    q: Any = None,
    seqlens_new: Any = None,
    pages: Any = None,
    cache_batch_idx: Any = None,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    interleaved: bool = False,
    layout: str = "bhsd",
    backend: str = "auto",
    q_out: Any = None,
) -> Any:
    """New keys and values, written in place behind those that a cache has.

    Row i of batch element b becomes row ``seqlens[b] + i`` of its sequence. Nothing else of the caches is touched. Keys are rotated
    on their way if `cos` and `sin` are given, and in the same launch so are the queries of the new rows, `q`.

    Parameters
    ----------
    k_cache, v_cache : array, shape (batch, heads_kv, capacity, dim) and (batch, heads_kv, capacity, dim_v)
        The caches, in the dtype of `k`, of any strides that leave elements apart. With `cache_batch_idx` they may have any number
        of sequences. With `pages` they are (number of pages, heads_kv, page_size, dim), with pages of one row or more.
    k, v : array, shape (batch, heads_kv, new, dim) and (batch, heads_kv, new, dim_v)
        What is appended: float16, bfloat16, float32 or float64.
    seqlens : int or array of int32 or int64, shape (batch,)
        Rows that each sequence has, or all have. They are not advanced: that is the caller's to do.
    q : array, shape (batch, heads, new, dim), optional
        Queries of the new rows, in the dtype of `k`, of any number of heads, to be rotated as `k` is: each row by the angles of the
        row of `k` at its side. It takes `cos` and `sin`; nothing of it is written into a cache.
    seqlens_new : array of int32 or int64, shape (batch,), optional
        How many of the `new` rows are appended, the first ones; the others may hold anything. By default all.
    pages : array of int32 or int64, shape (batch, pages of a sequence), optional
        The page of each ``page_size`` rows of a sequence. Only entries of pages that rows are appended to are read.
    cache_batch_idx : array of int32 or int64, shape (batch,), optional
        The sequence of the cache that each batch element is. Those of a negative number are left out.
    cos, sin : array, shape (rows, rotary_dim / 2), optional
        As in `rotate`: with them `k` is rotated on its way, and so is `q`. `v` is not.
    positions : array of int32 or int64, shape (batch,) or (batch, new), optional
        As in `rotate`, of the first or of each new row. By default those in the sequence, ``seqlens[b] + i``.
    interleaved : bool
        As in `rotate`.
    layout : {'bhsd', 'bshd'}
        The order of axes of `k`, `v`, `q` and both caches: ``"bshd"`` has (batch, new, heads_kv, dim), (batch, capacity, heads_kv,
        dim) and (number of pages, page_size, heads_kv, dim).
    backend : {'auto', 'cuda', 'host', 'numpy'}
        As in `attention`.
    q_out : array, shape (batch, heads, new, dim), optional
        Where to write the rotated queries, of any strides that leave elements apart. It may be `q` itself. By default a new array.

    Returns
    -------
    k_cache, v_cache : array
        The arrays that were given.
    q : array, shape (batch, heads, new, dim)
        Only if `q` is given: the rotated queries, in its dtype, memory order and kind of array; `q_out` itself if that is given.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `attention`; for a row that has no place in the cache, and for a position that is not one of a row of `cos`, if what says
        so is in host memory. Nothing has been written then.

    Notes
    -----
    Nothing waits for a device: integers in its memory are read when the kernel runs, and the call can be captured in a CUDA graph.
    A row without a place, beyond the capacity or in a page that there is not, is left out there, without a word; a position that
    `cos` does not have is taken for the nearest that it has.

    Rows of `q` are all rotated, also where `seqlens_new` or `cache_batch_idx` leaves the row of `k` out. The bits are those that
    ``rotate(q, cos, sin, positions=seqlens)`` has.

    Integers in host memory for caches on a device are copied there by the call, which then cannot be captured. A number as
    `seqlens` can.

    Where two batch elements name the same row of a cache, it holds elements of either afterwards.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = np.zeros((2, 3, 8, 500, 64), np.float32)
    >>> k, v = rng.standard_normal((2, 3, 8, 1, 64), dtype=np.float32)
    >>> seqlens = np.array([10, 0, 499], np.int32)
    >>> cupy_flash.append_kv(k_cache, v_cache, k, v, seqlens)[0] is k_cache
    True
    >>> bool(np.array_equal(k_cache[2, :, 499], k[2, :, 0]))
    True

    Keys and queries of a decoder with rotary positions, 32 query heads on 8, ready for `attention`:

    >>> angles = np.outer(np.arange(500), 10000.0 ** (-np.arange(32) / 32)).astype(np.float32)
    >>> cos, sin = np.cos(angles), np.sin(angles)
    >>> q = rng.standard_normal((3, 32, 1, 64), dtype=np.float32)
    >>> k_cache, v_cache, rotated = cupy_flash.append_kv(k_cache, v_cache, k, v, seqlens, q=q, cos=cos, sin=sin)
    >>> bool(np.array_equal(rotated, cupy_flash.rotate(q, cos, sin, positions=seqlens)))
    True
    >>> cupy_flash.attention(rotated, k_cache, v_cache, seqlens_kv=seqlens + 1).shape
    (3, 32, 1, 64)
    """
    from ..call.append import append  # late: who has no cache does without

    others = {"seqlens_new": seqlens_new, "pages": pages, "cache_batch_idx": cache_batch_idx}
    others |= {"cos": cos, "sin": sin, "positions": positions, "interleaved": interleaved, "q": q, "q_out": q_out}
    return append(k_cache, v_cache, k, v, seqlens, layout=layout, backend=backend, **others)
