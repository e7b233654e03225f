"""Expressions of scores and masks, and what they mean written by hand: texts for what is judged, array code for the oracle.

The two of a pair share nothing. An expression is a part of what compiles, so there are few, which cases and fuzzers share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy

from .oracle import Array, HandScore, namespace

Arrays = dict[str, Array]
Numbers = numpy.random.Generator
REACH = 40  # of a table of distances: farther keys read its ends


@dataclass(frozen=True, eq=False)
class Grid:
    """The coordinates of the pairs of a problem, integers that broadcast to `(*batch, heads, len_q, len_kv)`."""

    b: Array
    h: Array
    h_kv: Array
    q_idx: Array
    kv_idx: Array
    q_len: int
    kv_len: int

    @classmethod
    def of(
        cls, batch: tuple[int, ...], heads_q: int, heads_kv: int, len_q: int, len_kv: int, xp: ModuleType = numpy
    ) -> Grid:
        """Those of a whole problem; `b` counts the elements of several batch axes as one."""
        b = xp.arange(int(numpy.prod(batch, dtype=int))).reshape(*batch, 1, 1, 1)
        h = xp.arange(heads_q)[:, None, None]
        group = heads_q // max(heads_kv, 1)
        return cls(b, h, h // max(group, 1), xp.arange(len_q)[:, None], xp.arange(len_kv), len_q, len_kv)

    def at(self, index: tuple[slice, ...]) -> Grid:
        """Those of some batch elements and heads, by a slice for each of these axes."""
        return replace(self, b=self.b[index[:-1]], h=self.h[index[-1]], h_kv=self.h_kv[index[-1]])

    @property
    def distance(self) -> Array:
        """How far the query is behind the key, if the last of both are at one position."""
        return self.q_idx + (self.kv_len - self.q_len) - self.kv_idx


@dataclass(frozen=True)
class Sizes:
    """How long the axes are that arrays of expressions have."""

    b: int
    h: int
    h_kv: int
    q_idx: int
    kv_idx: int


@dataclass(frozen=True)
class Expression:
    """A text and its meaning.

    Attributes
    ----------
    text
    hand
        `hand(grid, arrays)`: a `HandScore`, or for a mask booleans that broadcast to the pairs.
    draw
        `draw(rng, sizes)`: the arrays that it reads; scalars have no axes.
    """

    text: str
    hand: Callable[[Grid, Arrays], Any]
    draw: Callable[[Numbers, Sizes], dict[str, numpy.ndarray]]


def _read(array: Array, s: Array, *indices: Array) -> Array:
    """The elements of an array that pairs read, in the dtype of `s`. An index beyond the ends is that of the end."""
    xp = namespace(array)
    return array[tuple(xp.clip(index, 0, n - 1) for index, n in zip(indices, array.shape, strict=True))].astype(s.dtype)


def _summed(array: Array, *indices: Array) -> Callable[[Array], Array]:
    """The function that adds a number for each pair to the element that the pair reads."""
    xp = namespace(array)

    def add(x: Array) -> Array:
        total = xp.zeros(array.shape, x.dtype)
        if not indices:
            return total + x.sum()
        clipped = (xp.clip(index, 0, n - 1) for index, n in zip(indices, array.shape, strict=True))
        xp.add.at(total, tuple(xp.broadcast_to(index, x.shape) for index in clipped), x)
        return total

    return add


# Scores. `size` and `slope_size` add up the magnitudes of what is added, and what roundings of an exponent come to.


def _relative(at: Grid, arrays: Arrays) -> HandScore:
    table, place = arrays["table"], at.kv_idx - at.q_idx + REACH
    return HandScore(
        lambda s: s + _read(table, s, place),
        numpy.ones_like,
        {"table": (numpy.ones_like, _summed(table, place))},
        size=lambda s: abs(s) + abs(_read(table, s, place)),
    )


def _temperature(at: Grid, arrays: Arrays) -> HandScore:
    t, shift = arrays["t"], arrays["shift"]
    return HandScore(
        lambda s: s * _read(t, s, at.h) + _read(shift, s, at.b),
        lambda s: numpy.broadcast_to(_read(t, s, at.h), s.shape),
        {"t": (lambda s: s, _summed(t, at.h)), "shift": (numpy.ones_like, _summed(shift, at.b))},
        size=lambda s: abs(s * _read(t, s, at.h)) + abs(_read(shift, s, at.b)),
    )


def _decay(at: Grid, arrays: Arrays) -> HandScore:
    rate, far = arrays["rate"], abs(at.q_idx - at.kv_idx)

    def exponent(s: Array) -> Array:
        return -_read(rate, s, at.h_kv) * far.astype(s.dtype)

    def weight(s: Array) -> Array:
        return numpy.broadcast_to(numpy.exp(exponent(s)), s.shape)

    return HandScore(
        lambda s: s * weight(s),
        weight,
        {"rate": (lambda s: -far.astype(s.dtype) * s * weight(s), _summed(rate, at.h_kv))},
        size=lambda s: abs(s) * weight(s) * (1 + abs(exponent(s))),
        slope_size=lambda s: weight(s) * (1 + abs(exponent(s))),
        partial_sizes={"rate": lambda s: far * s * weight(s) * (1 + abs(exponent(s)))},
    )


def _gate(at: Grid, arrays: Arrays) -> HandScore:
    level = arrays["level"]

    def opened(s: Array) -> Array:
        return 1 / (1 + numpy.exp(_read(level, s, at.h) - s))

    def steepness(s: Array) -> Array:
        return opened(s) * (1 - opened(s))

    def moved(s: Array) -> Array:  # by a rounding of the exponent
        return 1 + abs(s) + abs(_read(level, s, at.h))

    return HandScore(
        lambda s: s * opened(s),
        lambda s: opened(s) + s * steepness(s),
        {"level": (lambda s: -s * steepness(s), _summed(level, at.h))},
        size=lambda s: abs(s) * opened(s) * moved(s),
        slope_size=lambda s: (opened(s) + abs(s) * opened(s)) * moved(s),
        partial_sizes={"level": lambda s: s * opened(s) * moved(s)},
    )


def _leaky(at: Grid, arrays: Arrays) -> HandScore:
    leak = arrays["leak"]
    return HandScore(
        lambda s: numpy.where(s > 0, s, _read(leak, s) * s),
        lambda s: numpy.where(s > 0, s.dtype.type(1), _read(leak, s)),
        {"leak": (lambda s: numpy.where(s > 0, 0, s), _summed(leak))},
    )


def _soft_clip(at: Grid, arrays: Arrays) -> HandScore:
    c = arrays["c"]

    def bent(s: Array) -> Array:
        return numpy.tanh(s / _read(c, s))

    return HandScore(
        lambda s: _read(c, s) * bent(s),
        lambda s: 1 - bent(s) ** 2,
        {"c": (lambda s: bent(s) - s / _read(c, s) * (1 - bent(s) ** 2), _summed(c))},
        slope_size=numpy.ones_like,
        partial_sizes={"c": lambda s: abs(bent(s)) + abs(s / _read(c, s)) * (1 - bent(s) ** 2)},
    )


SCORES = {
    "relative": Expression(
        f"score + table[kv_idx - q_idx + {REACH}]",
        _relative,
        lambda rng, sizes: {"table": rng.standard_normal(2 * REACH + 1)},
    ),
    "temperature": Expression(
        "score * t[h] + shift[b]",
        _temperature,
        lambda rng, sizes: {"t": rng.uniform(0.5, 2, sizes.h), "shift": rng.standard_normal(sizes.b)},
    ),
    "decay": Expression(
        "score * exp(-rate[h_kv] * abs(q_idx - kv_idx))",
        _decay,
        lambda rng, sizes: {"rate": rng.uniform(0.01, 0.1, sizes.h_kv)},
    ),
    "gate": Expression("score * sigmoid(score - level[h])", _gate, lambda rng, sizes: {"level": rng.standard_normal(sizes.h)}),
    "leaky": Expression("where(score > 0, score, leak * score)", _leaky, lambda rng, sizes: {"leak": rng.uniform(0.1, 0.5)}),
    "soft_clip": Expression("c * tanh(score / c)", _soft_clip, lambda rng, sizes: {"c": rng.uniform(1, 3)}),
}


def _places(at: Grid, arrays: Arrays) -> HandScore:
    row, column, pair = arrays["row"], arrays["column"], arrays["pair"]
    of_row, of_column, of_pair = (at.q_idx, at.h_kv), (at.b, at.kv_idx), (at.h, at.q_idx, at.kv_idx)
    return HandScore(
        lambda s: s * _read(row, s, *of_row) + _read(column, s, *of_column) + _read(pair, s, *of_pair),
        lambda s: numpy.broadcast_to(_read(row, s, *of_row), s.shape),
        {
            "row": (lambda s: s, _summed(row, *of_row)),
            "column": (numpy.ones_like, _summed(column, *of_column)),
            "pair": (numpy.ones_like, _summed(pair, *of_pair)),
        },
        size=lambda s: abs(s * _read(row, s, *of_row)) + abs(_read(column, s, *of_column)) + abs(_read(pair, s, *of_pair)),
    )


# Of sequences that have their own lengths also what reads an element for each place in one.
SCORES_OF_LENGTHS = SCORES | {
    "places": Expression(
        "score * row[q_idx, h_kv] + column[b, kv_idx] + pair[h, q_idx, kv_idx]",
        _places,
        lambda rng, sizes: {
            "row": rng.uniform(0.5, 2, (sizes.q_idx, sizes.h_kv)),
            "column": rng.standard_normal((sizes.b, sizes.kv_idx)),
            "pair": rng.standard_normal((sizes.h, sizes.q_idx, sizes.kv_idx)),
        },
    )
}


# Masks


def _draw_documents(rng: Numbers, sizes: Sizes) -> dict[str, numpy.ndarray]:
    return {"doc": numpy.sort(rng.integers(0, 4, sizes.q_idx)), "doc_kv": numpy.sort(rng.integers(0, 4, sizes.kv_idx))}


def _draw_holes(rng: Numbers, sizes: Sizes) -> dict[str, numpy.ndarray]:
    """Intervals of keys, in the first batch element all of them."""
    ends = numpy.sort(rng.integers(0, sizes.kv_idx + 1, (2, sizes.b)), axis=0)
    ends[:, :1] = [[0], [sizes.kv_idx]]
    return {"first": ends[0], "last": ends[1]}


MASKS = {
    "documents": Expression(
        "doc[q_idx] == doc_kv[kv_idx]", lambda at, arrays: arrays["doc"][at.q_idx] == arrays["doc_kv"][at.kv_idx], _draw_documents
    ),
    "prefixes": Expression(
        "kv_idx <= q_idx + kv_len - q_len or kv_idx < prefix[b]",
        lambda at, arrays: (at.distance >= 0) | (at.kv_idx < arrays["prefix"][at.b]),
        lambda rng, sizes: {"prefix": rng.integers(0, sizes.kv_idx + 1, sizes.b)},
    ),
    "windows": Expression(
        "abs(q_idx - kv_idx) <= width[h]",
        lambda at, arrays: abs(at.q_idx - at.kv_idx) <= arrays["width"][at.h],
        lambda rng, sizes: {"width": rng.integers(0, 50, sizes.h)},
    ),
    "holes": Expression(
        "not first[b] <= kv_idx < last[b]",
        lambda at, arrays: (at.kv_idx < arrays["first"][at.b]) | (at.kv_idx >= arrays["last"][at.b]),
        _draw_holes,
    ),
}
