"""What slopes of scores and gradients of sinks may be off by, and where a gradient is off most, for `compare_gradients`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy

from .compare import BENT, EXPRESSION, TAIL, Arithmetic, arithmetic_of, capped_errors, closest, distance, finite, smallest
from .oracle import Array, accumulator, capped_scores, namespace


class Worst(NamedTuple):
    share: float = 0.0  # of what is allowed, in the row where it is largest; so are the next three
    error: float = 0.0
    allowed: float = 0.0
    row: tuple[int, ...] = ()
    largest: float = 0.0  # error of any row
    naive: float = 0.0  # largest error of naive


@numpy.errstate(all="ignore")
def worst_of(gradient: Array, truth: Array, plain: Array, floor: Array, start: tuple[int, ...]) -> Worst:
    """Return the judgement on a part of a gradient that begins at index `start`."""
    error, naive = distance(gradient, truth).max(axis=-1), finite(plain - truth).max(axis=-1)
    share, worst, allowed, (row,) = closest(error, 3 * naive + floor, ())
    place = tuple(int(i) + first for i, first in zip(numpy.unravel_index(row, error.shape), start))
    return Worst(share, worst, allowed, place, float(error.max()), float(naive.max()))


@numpy.errstate(all="ignore")


@numpy.errstate(all="ignore")
def slope_errors(
    q: Array, k: Array, arithmetic: Arithmetic, scores: dict[str, Any]
) -> tuple[Array | None, Array | float, Array]:
    """Return what the slope of each pair is off by, None if it is always 1, its share that a softcap adds, and `d` of each row."""
    u, softcap, score = arithmetic.sum, scores.get("softcap"), scores.get("score")
    random, steady = capped_errors(q, k, arithmetic, scores)
    away = TAIL * random + steady
    of_cap = 0.0 if softcap is None else 2 * (random + steady) / softcap
    if softcap is None and score is None:
        return None, of_cap, away
    s = capped_scores(q, k, scores["scale"], softcap)
    cap = 1.0 if softcap is None else 1 - (s / softcap) ** 2
    of_slope = 0.0 if softcap is None else ((2 * BENT + 5) * (1 - cap) + cap) * u
    if score is not None:
        slope, xp = score.slope(s), namespace(s)
        moved = xp.maximum(*(abs(score.slope(s + sign * away[..., None]) - slope) for sign in (1, -1)))
        of_slope = (moved + EXPRESSION * u * abs((score.slope_size or score.slope)(s))) * abs(cap) + abs(slope) * of_slope
    return finite(of_slope), of_cap, away


class SinkSums(NamedTuple):
    """Sums over rows and batch elements, each in float64 and in the shape of the sinks."""

    truth: Array
    plain: Array  # that of naive
    of_shares: Array  # what an error that all shares have in common makes of the sum
    of_out: Array  # likewise of all results
    squares: Array  # of the errors that each row has for itself
    terms: Array  # squares of what is summed
    size: Array  # of delta


@numpy.errstate(all="ignore")
def sink_bounds(sums: SinkSums, sinks: Array, rows: int, dtype: numpy.dtype) -> tuple[Array, Array, Array]:
    """Return the true gradient and that of naive, with a last axis of 1, and for each sink the floor."""
    u, exact = arithmetic_of(dtype, "ieee").sum, sinks.astype(numpy.float64)
    output, range_ends = float(ml_dtypes.finfo(sinks.dtype).eps) / 2, float(numpy.finfo(accumulator(dtype)).smallest_normal)
    floor = finite(sums.of_shares) + finite(sums.of_out) + TAIL * finite(sums.squares) ** 0.5 + output * finite(sums.truth)
    floor = floor + math.sqrt(rows) * u * (finite(sums.truth) + TAIL * finite(sums.terms) ** 0.5)
    floor = floor + (exact > -math.inf) * (range_ends * finite(sums.size) + smallest(sinks.dtype))
    plain = sums.plain.astype(sinks.dtype).astype(numpy.float64)
    return sums.truth[..., None], plain[..., None], floor
