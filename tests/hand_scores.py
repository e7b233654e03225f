"""Expressions and what they mean written by hand: texts for what is tested, array code for the oracle that judges it.

The two of a pair share nothing. `SCORES` are for the option `score`; masks are in `hand_masks`. Arrays come with the names of their
axes: None is that of one that is indexed by anything but a coordinate.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy

from cupy_flash.judge.oracle import HandScore

Arrays = dict[str, numpy.ndarray]
Declared = dict[str, tuple[tuple[str | None, ...], numpy.ndarray]]


@dataclass(frozen=True, eq=False)
class Grid:
    """The coordinates of the pairs of a problem, as integers that broadcast to `(*batch, heads, len_q, len_kv)`."""

    b: numpy.ndarray
    h: numpy.ndarray
    h_kv: numpy.ndarray
    q_idx: numpy.ndarray
    kv_idx: numpy.ndarray
    q_len: int
    kv_len: int

    @classmethod
    def of(cls, batch: tuple[int, ...], heads_q: int, heads_kv: int, len_q: int, len_kv: int) -> "Grid":
        """That of a whole problem; `b` counts the elements of several batch axes as one."""
        b = numpy.arange(numpy.prod(batch, dtype=int)).reshape(*batch, 1, 1, 1)
        h = numpy.arange(heads_q)[:, None, None]
        return cls(b, h, h // (heads_q // heads_kv), numpy.arange(len_q)[:, None], numpy.arange(len_kv), len_q, len_kv)

    def at(self, *index: slice) -> "Grid":
        """Those of some batch elements and heads, by a slice for each of these axes."""
        return replace(self, b=self.b[index[:-1]], h=self.h[index[-1]], h_kv=self.h_kv[index[-1]])

    @property
    def shape(self) -> tuple[int, ...]:
        """`(*batch, heads, len_q, len_kv)`."""
        return numpy.broadcast_shapes(self.b.shape, self.h.shape, (self.q_len, self.kv_len))

    @property
    def sizes(self) -> dict[str, int]:
        """How long an axis of an array is that a coordinate counts."""
        names = ("b", "h", "h_kv", "q_idx", "kv_idx")
        return {name: int(getattr(self, name).max(initial=-1)) + 1 for name in names}

    @property
    def names(self) -> dict[str, Any]:
        """The values of the names that an expression may use."""
        return dict(vars(self))


@dataclass(frozen=True)
class Example:
    """One expression.

    Attributes
    ----------
    name, text
    hand
        `hand(grid, arrays)`: a `HandScore`, or booleans that broadcast to `grid.shape`.
    declared
        The axes and the kind of each array, as in "b h: float"; "_" for None.
    slope
        Of a score, what `slope_kind` has to say: 'one', 'free' or 'score'.
    values
        Of arrays that are not standard normal: `values[name](rng, shape, grid)`.
    free
        How long an axis is whose name is None.
    """

    name: str
    text: str
    hand: Callable[[Grid, Arrays], Any]
    declared: dict[str, str]
    slope: str = ""
    values: dict[str, Callable[[numpy.random.Generator, tuple[int, ...], Grid], numpy.ndarray]] | None = None
    free: Callable[[Grid], int] = lambda grid: 17

    def __str__(self) -> str:
        return self.name

    def arrays(self, grid: Grid, seed: int = 0) -> Declared:
        """Random arrays with the names of their axes: float32, int32 and bool."""
        rng = numpy.random.default_rng([seed, *self.name.encode()])
        made = {}
        for name, declaration in self.declared.items():
            of_axes, kind = declaration.split(":")
            axes = tuple(None if axis == "_" else axis for axis in of_axes.split())
            shape = tuple(self.free(grid) if axis is None else grid.sizes[axis] for axis in axes)
            draw = (self.values or {}).get(name, lambda rng, shape, grid: rng.standard_normal(shape))
            dtype = {"float": "float32", "int": "int32", "bool": "bool"}[kind.strip()]
            made[name] = axes, numpy.asarray(draw(rng, shape, grid)).astype(dtype)
        return made


# Parts of scores


def read(array, s, *indices):
    """The elements of an array that pairs read, in the dtype of `s`. An index beyond the ends is that of the end."""
    return array[clipped(array, indices)].astype(s.dtype)


def clipped(array, indices):
    return tuple(numpy.clip(index, 0, n - 1) for index, n in zip(indices, array.shape, strict=True))


def summed(array, *indices):
    """The function that adds a number for each pair to the element that the pair reads."""

    def add(x):
        total = numpy.zeros(array.shape, x.dtype)
        if not indices:
            return total + x.sum()
        numpy.add.at(total, tuple(numpy.broadcast_to(index, x.shape) for index in clipped(array, indices)), x)
        return total

    return add


def plus(array, *indices):
    """`score + array[indices]`, where that is all."""
    by_element = {"": (numpy.ones_like, summed(array, *indices))}
    return HandScore(lambda s: s + read(array, s, *indices), numpy.ones_like, by_element)


def named(name, score):
    """The same score, its only array under a name."""
    return HandScore(score.value, score.slope, {name: score.arrays[""]})


def sigmoid(x):
    return 1 / (1 + numpy.exp(-x))


# Scores


def relative(at, arrays):
    return named("table", plus(arrays["table"], at.kv_idx - at.q_idx + 8))


def columns(at, arrays):
    return named("col", plus(arrays["col"], at.kv_idx))


def pairs(at, arrays):
    return named("pair", plus(arrays["pair"], at.q_idx, at.kv_idx))


def buckets(at, arrays):
    bucket = arrays["bucket"]
    return named("weight", plus(arrays["weight"], bucket[clipped(bucket, (abs(at.q_idx - at.kv_idx),))], at.h))


def temperature(at, arrays):
    t = arrays["t"]
    return HandScore(
        lambda s: s * read(t, s, at.h),
        lambda s: numpy.broadcast_to(read(t, s, at.h), s.shape),
        {"t": (lambda s: s, summed(t, at.h))},
    )


def shared_heads(at, arrays):
    gain, shift = arrays["gain"], arrays["shift"]
    return HandScore(
        lambda s: s * read(gain, s, at.h_kv) + read(shift, s, at.h_kv),
        lambda s: numpy.broadcast_to(read(gain, s, at.h_kv), s.shape),
        {"gain": (lambda s: s, summed(gain, at.h_kv)), "shift": (numpy.ones_like, summed(shift, at.h_kv))},
    )


def per_batch(at, arrays):
    t, shift = arrays["t"], arrays["shift"]
    return HandScore(
        lambda s: s * read(t, s, at.b) + read(shift, s, at.b, at.h),
        lambda s: numpy.broadcast_to(read(t, s, at.b), s.shape),
        {"t": (lambda s: s, summed(t, at.b)), "shift": (numpy.ones_like, summed(shift, at.b, at.h))},
    )


def distance(at, arrays):
    rate, far = arrays["rate"], at.q_idx + at.kv_len - at.q_len - at.kv_idx
    return HandScore(
        lambda s: s - read(rate, s) * far.astype(s.dtype),
        numpy.ones_like,
        {"rate": (lambda s: numpy.broadcast_to(-far.astype(s.dtype), s.shape), summed(rate))},
    )


def decay(at, arrays):
    rate, far = arrays["rate"], abs(at.q_idx - at.kv_idx)

    def weight(s):
        return numpy.broadcast_to(numpy.exp(-read(rate, s, at.h) * far.astype(s.dtype)), s.shape)

    return HandScore(
        lambda s: s * weight(s), weight, {"rate": (lambda s: -far.astype(s.dtype) * s * weight(s), summed(rate, at.h))}
    )


def special_keys(at, arrays):
    cost, special = arrays["cost"], arrays["special"][at.kv_idx]
    return HandScore(
        lambda s: numpy.where(special, s - read(cost, s, at.h), s),
        numpy.ones_like,
        {"cost": (lambda s: numpy.broadcast_to(numpy.where(special, s.dtype.type(-1), 0), s.shape), summed(cost, at.h))},
    )


def soft_clip(at, arrays):
    c = arrays["c"]

    def bent(s):
        return numpy.tanh(s / read(c, s))

    def by_c(s):
        return bent(s) - s / read(c, s) * (1 - bent(s) ** 2)

    return HandScore(lambda s: read(c, s) * bent(s), lambda s: 1 - bent(s) ** 2, {"c": (by_c, summed(c))})


def square(at, arrays):
    return HandScore(lambda s: s * s, lambda s: 2 * s)


def leaky(at, arrays):
    leak = arrays["leak"]
    return HandScore(
        lambda s: numpy.where(s > 0, s, read(leak, s) * s),
        lambda s: numpy.where(s > 0, 1, read(leak, s)),
        {"leak": (lambda s: numpy.where(s > 0, 0, s), summed(leak))},
    )


def gate(at, arrays):
    level = arrays["level"]

    def opened(s):
        return sigmoid(s - read(level, s, at.h))

    def steepness(s):
        return opened(s) * (1 - opened(s))

    return HandScore(
        lambda s: s * opened(s),
        lambda s: opened(s) + s * steepness(s),
        {"level": (lambda s: -s * steepness(s), summed(level, at.h))},
    )


def bounded(at, arrays):
    low, high = arrays["low"], arrays["high"]

    def below(s):
        return s < read(low, s, at.h)

    def above(s):
        return s > read(high, s, at.b)

    return HandScore(
        lambda s: numpy.where(below(s), read(low, s, at.h), numpy.where(above(s), read(high, s, at.b), s)),
        lambda s: (~below(s) & ~above(s)).astype(s.dtype),
        {
            "low": (lambda s: below(s).astype(s.dtype), summed(low, at.h)),
            "high": (lambda s: above(s).astype(s.dtype), summed(high, at.b)),
        },
    )


def positive(rng, shape, grid):
    return rng.uniform(0.5, 2, shape)


def bucket_of_distance(rng, shape, grid):
    return numpy.minimum(numpy.log2(1 + numpy.arange(shape[0])), 4)


SCORES = (
    # The slope is free of the score.
    Example("relative", "score + table[kv_idx - q_idx + 8]", relative, {"table": "_: float"}, "one"),
    Example("columns", "score + col[kv_idx]", columns, {"col": "kv_idx: float"}, "one"),
    Example("pairs", "score + pair[q_idx, kv_idx]", pairs, {"pair": "q_idx kv_idx: float"}, "one"),
    Example(
        "buckets",
        "score + weight[bucket[abs(q_idx - kv_idx)], h]",
        buckets,
        {"bucket": "_: int", "weight": "_ h: float"},
        "one",
        {"bucket": bucket_of_distance},
    ),
    Example("distance", "score - rate * (q_idx + kv_len - q_len - kv_idx)", distance, {"rate": ": float"}, "one"),
    Example("temperature", "score * t[h]", temperature, {"t": "h: float"}, "free"),
    Example(
        "shared_heads", "score * gain[h_kv] + shift[h_kv]", shared_heads, {"gain": "h_kv: float", "shift": "h_kv: float"}, "free"
    ),
    Example("per_batch", "score * t[b] + shift[b, h]", per_batch, {"t": "b: float", "shift": "b h: float"}, "free"),
    Example("decay", "score * exp(-rate[h] * abs(q_idx - kv_idx))", decay, {"rate": "h: float"}, "free", {"rate": positive}),
    Example(
        "special_keys",
        "where(special[kv_idx], score - cost[h], score)",
        special_keys,
        {"special": "kv_idx: bool", "cost": "h: float"},
        "one",
        {"special": lambda rng, shape, grid: rng.random(shape) < 0.3},
    ),
    # It depends on it.
    Example("soft_clip", "c * tanh(score / c)", soft_clip, {"c": ": float"}, "score", {"c": positive}),
    Example("square", "score**2", square, {}, "score"),
    Example("leaky", "where(score > 0, score, leak * score)", leaky, {"leak": ": float"}, "score"),
    Example("gate", "score * sigmoid(score - level[h])", gate, {"level": "h: float"}, "score"),
    Example(
        "bounded",
        "min(max(score, low[h]), high[b])",
        bounded,
        {"low": "h: float", "high": "b: float"},
        "score",
        {"low": lambda rng, shape, grid: -positive(rng, shape, grid), "high": positive},
    ),
)
