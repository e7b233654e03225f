"""Attention as it is defined, in array code: what every result is judged against.

- `oracle`: float64 throughout;
- `naive`: the textbook formula in the caller's own precision, the error a result is allowed to be compared with.

Both are for NumPy and CuPy arrays shaped `(*batch, heads, seq, dim)`. This is what a score goes through, in this order. All but
`scale` may be absent:

- `scale`, then `softcap`;
- `score`, a `HandScore`;
- `bias` is added, and `-|i + len_kv - len_q - j|` times `alibi_slopes`, `(heads,)` or `(*batch, heads)`;
- a pair is masked unless all masks show it. One is `first_key`, `last_key` and `prefix`: query row i sees the keys j with
  `i + first_key <= j <= i + last_key`, where `None` leaves that side open, and the first `prefix` keys. Causal masks and sliding
  windows are such bands. The other is `seen`, booleans;
- the softmax. `sinks`, `(heads,)` or `(n, heads)`, are logits of each row besides those of its keys, without a value;
- dropout: P is multiplied by `keep_scale` where `keep`, booleans, is true, and 0 elsewhere. The log-sum-exp knows nothing of it.

`bias`, `seen` and `keep` broadcast to `(*batch, heads, len_q, len_kv)`. A row that sees nothing has result 0 and log-sum-exp -inf,
or that of its sinks. NaN and infinity are data: they travel to the rows that see them, without a warning. A pair is seen even if
its bias is -inf or it was dropped: its P is 0, and 0 times NaN is NaN.

Keys and values may have fewer heads than queries: query head h reads key head `h // (heads_q // heads_kv)`. Gradients are in
`oracle_gradients`. Nothing here is shared with code that is judged, lest a fault judge itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import numpy

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray; CuPy may be absent, so it cannot be named here
BAND = ("first_key", "last_key", "prefix")


@dataclass(frozen=True)
class HandScore:
    """What a score becomes, and its derivatives, written by hand: what an expression is judged against.

    It holds its own coordinates. `s` are the scores after scale and softcap, `(*batch, heads, len_q, len_kv)`, and what is made of
    them broadcasts with them. Masked pairs are among them: whatever becomes of these is selected away later.

    Attributes
    ----------
    value
        `value(s)`, the scores that bias and masks meet.
    slope
        `slope(s)`, the derivative of that by `s`.
    arrays
        Of each array that has a gradient `(partial, summed)`. `partial(s)` is the derivative of the value by the element that it
        reads, and `summed(x)` adds `x`, a number for each pair, to the elements that the pairs read.
    size, slope_size, partial_sizes
        Of what, pair by pair, roundings of the value, of the slope and of a `partial` are a share: the magnitudes of all that is
        added up, and what the same share of an exponent moves. Absent where that is the magnitude of the number itself.
    part
        `part(index)`, the same score for some batch elements and heads: a slice for each of these axes.
    """

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    arrays: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = field(default_factory=dict)
    size: Callable[[Array], Array] | None = None
    slope_size: Callable[[Array], Array] | None = None
    partial_sizes: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    part: Callable[[tuple[slice, ...]], HandScore] | None = None


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


def distances(len_q: int, len_kv: int, xp: ModuleType = numpy) -> Array:
    """Return how far each key is from each query, `(len_q, len_kv)`, if the last of both are at one position."""
    return abs(xp.arange(len_q)[:, None] + (len_kv - len_q) - xp.arange(len_kv))


def seen_pairs(p: Array, scores: dict[str, Any]) -> Array:
    """Return which pairs of `p`, `(..., len_q, len_kv)`, take part, by the masks among the options of the scores.

    The result is `(len_q, len_kv)`, or has the leading axes of `seen` as well.
    """
    band = {name: scores[name] for name in BAND if name in scores}
    shown, seen = sees(*p.shape[-2:], **band, xp=namespace(p)), scores.get("seen")
    return shown if seen is None else shown & seen


@numpy.errstate(all="ignore")
def capped_scores(q: Array, k: Array, scale: float, softcap: float | None = None) -> Array:
    """Return the scores after scale and softcap, in the dtype of `q` and `k`."""
    s = q @ repeat_heads(k, q).swapaxes(-1, -2) * scale
    return s if softcap is None else softcap * namespace(q).tanh(s / softcap)


@numpy.errstate(all="ignore")
def probabilities(
    q: Array,
    k: Array,
    *,
    scale: float,
    softcap: float | None = None,
    score: HandScore | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    keep: Array | None = None,
    keep_scale: float = 1.0,
    **masks: Any,
) -> tuple[Array, Array]:
    """Return the softmax `(*batch, heads_q, len_q, len_kv)` and its log-sum-exp, in the dtype of `q` and `k`.

    Dropout comes later, in `dropped`: `keep` and `keep_scale` change nothing here.
    """
    xp = namespace(q)
    s = capped_scores(q, k, scale, softcap)
    dtype = s.dtype
    if score is not None:
        made = score.value(s).astype(dtype)
        s = xp.broadcast_to(made, numpy.broadcast_shapes(made.shape, s.shape))
    if bias is not None:
        s = s + bias.astype(dtype)
    if alibi_slopes is not None:
        s = s - alibi_slopes[..., None, None].astype(dtype) * distances(*s.shape[-2:], xp).astype(dtype)
    s = xp.where(seen_pairs(s, masks), s, -xp.inf)
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
def dropped(x: Array, scores: dict[str, Any]) -> Array:
    """Return what dropout makes of P or of its gradient: 0 where a pair is dropped, whatever was there."""
    keep = scores.get("keep")
    return x if keep is None else namespace(x).where(keep, x * scores.get("keep_scale", 1.0), 0)


@numpy.errstate(all="ignore")
def weighted_sum(p: Array, v: Array, seen: Array) -> Array:
    """Return `p @ v` over the pairs in `seen` only: a zero that the mask put into `p` must not meet NaN or infinity.

    `seen` is `(len_q, len_kv)`, or has leading axes that broadcast to those of `p`.
    """
    xp = namespace(v)
    finite = xp.isfinite(v).all(axis=-1)
    out = p @ xp.where(finite[..., None], v, 0)
    for j in map(int, xp.flatnonzero(~finite.all(axis=tuple(range(finite.ndim - 1))))):  # usually none
        takes_part = seen[..., j, None] & ~finite[..., j, None, None]
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
    return weighted_sum(factor(dropped(p, scores)), repeat_heads(v, q), seen), lse


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
