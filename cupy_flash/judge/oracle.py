"""Attention as it is defined, in array code: what every result is judged against.

- `oracle`: float64 throughout;
- `naive`: the textbook formula in the caller's own precision, the error a result is allowed to be compared with.

Both are for NumPy and CuPy arrays shaped `(*batch, heads, seq, dim)` and take `scale`, `softcap`, `sinks`, and a mask: `first_key`,
`last_key` and `prefix`. The order is: scale, softcap, mask, softmax. Query row i sees the keys j with
`i + first_key <= j <= i + last_key`, where `None` leaves that side open, and the first `prefix` keys. Causal masks and sliding
windows are such bands. `sinks`, `(heads,)` or `(n, heads)`, are logits of each row besides those of its keys, without a value. A
row that sees nothing has result 0 and log-sum-exp -inf, or that of its sinks. NaN and infinity are data: they travel to the rows
that see them, without a warning.

Keys and values may have fewer heads than queries: query head h reads key head `h // (heads_q // heads_kv)`. Gradients are in
`oracle_gradients`. Nothing here is shared with code that is judged, lest a fault judge itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import numpy

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray; CuPy may be absent, so it cannot be named here


def namespace(array: Array) -> ModuleType:
    """Return `cupy` for a CuPy array, which is the only case that imports it, and `numpy` for all others."""
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return cupy
    return numpy


def sees(
    len_q: int, len_kv: int, first_key: int | None = None, last_key: int | None = None, prefix: int = 0, xp: ModuleType = numpy
) -> Array:
    """Return which query sees which key, as booleans `(len_q, len_kv)`, from the definition."""
    i, j = xp.arange(len_q)[:, None], xp.arange(len_kv)
    before_all, behind_all = -len_q, len_kv  # bounds that hide no key
    begin = i + (before_all if first_key is None else first_key)
    end = i + (behind_all if last_key is None else last_key)
    return (begin <= j) & (j <= end) | (j < prefix)


def sink_logits(sinks: Array, like: Array) -> Array:
    """Return sinks, `(heads,)` or `(n, heads)`, as further logits of each row, `(heads, 1, n)`, in the dtype of others."""
    return (sinks if sinks.ndim == 2 else sinks[None]).T[:, None, :].astype(like.dtype)


def seen_pairs(p: Array, scores: dict[str, Any]) -> Array:
    """Return which pairs of `p`, `(..., len_q, len_kv)`, take part, by the mask among the options of the scores."""
    mask = {name: bound for name, bound in scores.items() if name not in ("scale", "softcap", "sinks")}
    return sees(*p.shape[-2:], **mask, xp=namespace(p))


@numpy.errstate(all="ignore")
def probabilities(
    q: Array,
    k: Array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    **mask: int | None,
) -> tuple[Array, Array]:
    """Return the softmax `(*batch, heads_q, len_q, len_kv)` and its log-sum-exp, in the dtype of `q` and `k`."""
    xp = namespace(q)
    s = q @ repeat_heads(k, q).swapaxes(-1, -2) * scale
    if softcap is not None:
        s = softcap * xp.tanh(s / softcap)
    s = xp.where(sees(*s.shape[-2:], **mask, xp=xp), s, -xp.inf)
    logits = s
    if sinks is not None:
        others = sink_logits(sinks, s)
        logits = xp.concatenate([s, xp.broadcast_to(others, (*s.shape[:-1], others.shape[-1]))], axis=-1)
    if logits.shape[-1] == 0:  # an empty axis has no maximum
        return s, xp.full(s.shape[:-1], -xp.inf, dtype=s.dtype)
    top = logits.max(axis=-1, keepdims=True)
    top = xp.where(top == -xp.inf, 0, top)  # for a row that sees nothing, exp(-inf - -inf) would be NaN
    p = xp.exp(s - top)
    total = xp.exp(logits - top).sum(axis=-1, keepdims=True)
    lse = (top + xp.log(total))[..., 0]
    return p / xp.where(total == 0, 1, total), lse


@numpy.errstate(all="ignore")
def weighted_sum(p: Array, v: Array, seen: Array) -> Array:
    """Return `p @ v` over the pairs in `seen` only: a zero that the mask put into `p` must not meet NaN or infinity."""
    xp = namespace(v)
    finite = xp.isfinite(v).all(axis=-1)
    out = p @ xp.where(finite[..., None], v, 0)
    for j in map(int, xp.flatnonzero(~finite.all(axis=tuple(range(finite.ndim - 1))))):  # usually none
        takes_part = seen[:, j, None] & ~finite[..., j, None, None]
        out += xp.where(takes_part, p[..., j, None] * v[..., j, None, :], 0)
    return out


def oracle(q: Array, k: Array, v: Array, **scores: Any) -> tuple[Array, Array]:
    """Return `(out, lse)` in float64, from the inputs as they are, already rounded to their dtype.

    Data of a masked pair is selected away, never multiplied by zero: a NaN in a key or a value reaches
    only the rows that see it. Memory is O(len_q * len_kv).
    """
    return _attention(*(x.astype(numpy.float64) for x in (q, k, v)), lambda x: x, scores)


def naive(q: Array, k: Array, v: Array, *, precision: str = "ieee", **scores: Any) -> tuple[Array, Array]:
    """Return `(out, lse)` as the textbook formula gives them in the precision of the inputs.

    Products of inputs accumulate in float32 and the softmax is float32; P is rounded to the inputs' dtype before P @ V,
    and so is the result. With `precision="tf32"` both factors of every product are rounded to TF32. float64 stays
    float64. On CuPy a float32 product is IEEE unless the process set `CUPY_TF32=1`: leave it unset.
    """
    dtype = q.dtype
    wide = accumulator(dtype)

    def factor(x: Array) -> Array:
        # Half-precision factors are widened before they meet: float32 holds the product of two of them exactly.
        return round_to_tf32(x) if precision == "tf32" else x.astype(dtype).astype(wide)

    out, lse = _attention(*(factor(x) for x in (q, k, v)), factor, scores)
    return out.astype(dtype), lse


def _attention(
    q: Array, k: Array, v: Array, factor: Callable[[Array], Array], scores: dict[str, Any]
) -> tuple[Array, Array]:
    """Return `(out, lse)` in the dtype of the arguments; `factor` rounds P before it meets V."""
    p, lse = probabilities(q, k, **scores)
    seen = seen_pairs(p, scores)
    return weighted_sum(factor(p), repeat_heads(v, q), seen), lse


def repeat_heads(kv: Array, q: Array) -> Array:
    """Return keys or values with a head for each head of `q`."""
    return namespace(kv).repeat(kv, q.shape[-3] // max(kv.shape[-3], 1), axis=-3)


def accumulator(dtype: numpy.dtype) -> type[numpy.floating]:
    """Return the type to compute in: float64 for float64, float32 for all others."""
    return numpy.float64 if dtype == numpy.float64 else numpy.float32


def round_to_tf32(x: Array) -> Array:
    """Round float32 to TF32, 10 explicit mantissa bits: to nearest, ties away from zero, as `cvt.rna.tf32.f32` does."""
    bits = namespace(x).ascontiguousarray(x).view(numpy.uint32)
    return ((bits + numpy.uint32(1 << 12)) & numpy.uint32(0xFFFF_E000)).view(numpy.float32)
