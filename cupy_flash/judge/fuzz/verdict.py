"""Which calls are valid: the rules of the documentation, written a second time and independently of the package.

A verdict is True (has to be accepted), False (has to be refused) or None (either is right: nothing documented decides).
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy

DTYPES = tuple(map(numpy.dtype, ("f2", "f4", "f8", ml_dtypes.bfloat16)))
TOO_LARGE = 10**7  # elements of a result that nobody should make in a test


def is_plain(x: Any) -> bool:
    """Whether it is an array of NumPy's own class."""
    return type(x) is numpy.ndarray


def merged(*verdicts: bool | None) -> bool | None:
    """One verdict from several that all count."""
    return False if False in verdicts else None if None in verdicts else True


def attention(arrays: dict[str, Any], options: dict[str, Any], computes: bool = True) -> bool | None:
    """The verdict on q, k, v and, where they are given, out and lse. Where nothing is computed, results may overlap inputs."""
    q, k, v = (arrays[name] for name in "qkv")
    if not all(map(is_plain, (q, k, v))) or not _inputs_fit(q, k, v):
        return False
    shape = result_shape(q, k, v)
    expected = {"out": (shape, q.dtype), "lse": (shape[:-1], lse_dtype(q.dtype))}
    return merged(_results_fit(arrays, expected, computes), _sinks_fit(q, arrays.get("sinks")), _options_fit(q, k, v, options))


def attention_backward(arrays: dict[str, Any], options: dict[str, Any], computes: bool = True) -> bool | None:
    """The verdict on the operands of a backward and, where they are given, dlse, sinks, dq, dk, dv and dsinks."""
    q, k, v = (arrays[name] for name in "qkv")
    if not all(map(is_plain, (q, k, v))) or not _inputs_fit(q, k, v) or options.get("algorithm") == "v1":
        return False
    shape, wide = result_shape(q, k, v), lse_dtype(q.dtype)
    operands = {"dout": (shape, q.dtype), "out": (shape, q.dtype), "lse": (shape[:-1], wide), "dlse": (shape[:-1], wide)}
    for name, (expected, dtype) in operands.items():
        x = arrays.get(name)
        if not (x is None and name == "dlse") and not (is_plain(x) and _fits(x, expected, dtype)):
            return False
    expected = {f"d{name}": (arrays[name].shape, q.dtype) for name in "qkv"}
    verdict = None if v.shape[-1] == 0 else True  # an empty dim_v has no gradients to speak of
    sinks, dsinks = arrays.get("sinks"), arrays.get("dsinks")
    if dsinks is not None and (sinks is None or not is_plain(sinks) or not is_plain(dsinks) or not dsinks.flags.c_contiguous):
        return False
    expected |= {} if dsinks is None else {"dsinks": (sinks.shape, sinks.dtype)}
    fit = _results_fit(arrays, expected, computes), _sinks_fit(q, arrays.get("sinks")), _options_fit(q, k, v, options)
    return merged(verdict, *fit)


def merge_states(arrays: dict[str, Any], options: dict[str, Any]) -> bool | None:
    """The verdict on two results to merge."""
    a = arrays["out_a"]
    if not is_plain(a) or a.dtype not in DTYPES or a.ndim < 2:
        return False
    wide = lse_dtype(a.dtype)
    of_out, of_lse = (a.shape, a.dtype), (a.shape[:-1], wide)
    expected = {"out_a": of_out, "out_b": of_out, "lse_a": of_lse, "lse_b": of_lse}
    if not all(is_plain(arrays[name]) and _fits(arrays[name], *like) for name, like in expected.items()):
        return False
    return merged(True if a.ndim < 32 else None, None if options.get("backend") == "host" else True)


def planned(arrays: dict[str, Any], made_with: dict[str, Any], results: tuple[str, ...]) -> bool | None:
    """The verdict on the arrays of a call of a plan, which was made with others."""
    if arrays.get("dsinks") is not None and made_with.get("sinks") is None:
        return False
    for name, x in arrays.items():
        like = made_with.get(name)
        if x is None:
            if like is not None and name not in results:
                return None if name == "dlse" else False
            continue
        if not is_plain(x):
            return False
        if name in results and not x.flags.writeable:
            return False
        if like is None:
            if name not in results:
                return False
            continue
        if (x.shape, x.strides, x.dtype) != (like.shape, like.strides, like.dtype) or not _aligned(x):
            return False
    return None if _overlap(arrays, results) is None else False


def result_shape(q: numpy.ndarray, k: numpy.ndarray, v: numpy.ndarray) -> tuple[int, ...]:
    """The shape of out, as the caller sees it. The inputs have to fit."""
    if q.ndim == k.ndim == v.ndim == 2:
        return (len(q), v.shape[-1])
    return (*_batch(q, k, v), *_matrices(q)[:2], v.shape[-1])


def too_large(arrays: dict[str, Any]) -> bool:
    """Whether a call that were to succeed would make large results."""
    sizes = [x.size for x in arrays.values() if is_plain(x)]
    return max(sizes, default=0) > TOO_LARGE


def lse_dtype(dtype: numpy.dtype) -> numpy.dtype:
    """The dtype of the log-sum-exp."""
    return numpy.dtype("f8" if dtype == numpy.dtype("f8") else "f4")


def _matrices(x: numpy.ndarray) -> tuple[int, int, int]:
    return (1, *x.shape)[-3:]


def _batch(*arrays: numpy.ndarray) -> tuple[int, ...]:
    """NumPy's rule, which `numpy.broadcast_shapes` keeps for 64 axes at most."""
    longest = max(max(x.ndim - 3, 0) for x in arrays)
    batch = []
    for axis in range(longest):
        sizes = {(1,) * (longest - len(x.shape[:-3])) + x.shape[:-3] for x in arrays}
        size = {shape[axis] for shape in sizes} - {1}
        if len(size) > 1:
            raise ValueError("batch axes that do not broadcast")
        batch.append(size.pop() if size else 1)
    return tuple(batch)


def _inputs_fit(q: numpy.ndarray, k: numpy.ndarray, v: numpy.ndarray) -> bool:
    if any(x.dtype not in DTYPES or x.dtype != q.dtype or x.ndim < 2 or not _aligned(x) for x in (q, k, v)):
        return False
    (heads_q, _, dim), (heads_kv, len_kv, dim_k), (heads_v, len_v, _) = map(_matrices, (q, k, v))
    if dim == 0 or dim != dim_k or heads_kv != heads_v or len_kv != len_v:
        return False
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        return False
    try:
        _batch(q, k, v)
    except ValueError:
        return False
    return True


def _aligned(x: numpy.ndarray) -> bool:
    itemsize = x.dtype.itemsize
    return itemsize > 0 and x.ctypes.data % itemsize == 0 and all(stride % itemsize == 0 for stride in x.strides)


def _fits(x: numpy.ndarray, shape: tuple[int, ...], dtype: numpy.dtype) -> bool:
    return x.shape == shape and x.dtype == dtype and _aligned(x)


def _sinks_fit(q: numpy.ndarray, sinks: Any) -> bool | None:
    """(heads,) or (n, heads), in the dtype of q or of lse. Undecided: another dtype of inputs, and n of 0 or of many."""
    if sinks is None:
        return True
    if not is_plain(sinks) or sinks.ndim not in (1, 2) or sinks.shape[-1] != _matrices(q)[0] or not _aligned(sinks):
        return False
    if sinks.dtype not in (q.dtype, lse_dtype(q.dtype)):
        return None if sinks.dtype in DTYPES else False
    return True if 0 < len(sinks) <= 8 else None


def _results_fit(arrays: dict[str, Any], expected: dict[str, tuple[Any, Any]], computes: bool) -> bool | None:
    """Results are writable, do not overlap, and no two of their indices reach one element."""
    for name, like in expected.items():
        x = arrays.get(name)
        if x is None:
            continue
        if not is_plain(x) or not _fits(x, *like) or not x.flags.writeable:
            return False
        if x.size and any(stride == 0 and size > 1 for stride, size in zip(x.strides, x.shape)):
            return False
    return not computes or _overlap(arrays, tuple(expected)) is None


def _overlap(arrays: dict[str, Any], results: tuple[str, ...]) -> str | None:
    """The first result that shares a stretch of memory with another argument, or None."""
    spans = {name: numpy.lib.array_utils.byte_bounds(x) for name, x in arrays.items() if is_plain(x) and x.size}
    for name in results:
        for other in spans.keys() - {name} if name in spans else ():
            (low, high), (start, stop) = spans[name], spans[other]
            if low < stop and start < high:
                return name
    return None


def _options_fit(q: numpy.ndarray, k: numpy.ndarray, v: numpy.ndarray, options: dict[str, Any]) -> bool | None:
    """What options and arrays have to do with each other; each by itself is judged where it is drawn."""
    if options.get("precision") == "tf32" and q.dtype != numpy.dtype("f4"):
        return False
    if options.get("backend", "auto") != "host":
        if options.get("kernel") is not None:
            return False
        return True if max(q.ndim, k.ndim, v.ndim) <= 32 and math.prod(q.shape) < TOO_LARGE else None
    return False if q.dtype == numpy.dtype("f8") else None
