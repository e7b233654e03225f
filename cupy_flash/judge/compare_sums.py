"""How far gradients may be from the truth that are sums over pairs: of a bias, of the slopes of ALiBi and of arrays of a score.

With dL the gradient of what meets the softmax, each of their elements is a sum of w dL over the pairs that read it. w is 1 for a
bias, minus the distance for ALiBi, and the derivative of the expression by the element for an array. dL errs like dS in
`compare_gradients`, without a slope: by a share E of itself, and by F, that of the difference in it. A derivative errs like a slope
there: it is taken of a score that is off, and rounds. Shares that all pairs have in common move the sum by as much as all of them
together, independent ones by TAIL times their 2-norm. Pairs of a row have a delta in common, and rows err apart from each other, as
with sinks: TAIL times the 2-norm of what each row adds up to, and no more than all F together. Sums of n terms round as there:

    |sum of w E(TAIL) dL| + sum of of_w |dL| + TAIL * |w E(1) dL|_2 + min(sum of |w| F(TAIL), TAIL * |sums over rows of |w| F(1)|_2)
        + sqrt(n) u (|gradient| + TAIL * |w dL|_2) + output * |gradient| + tiny

Of a row, what the pairs add to one element is at most what they add to all.

The last two terms are of the format of the gradient, which is that of the array. An element that no pair reads has a gradient
of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy

from .compare import EXPRESSION, TAIL, finite, part_index, smallest
from .oracle import Array, distances, namespace
from .oracle_gradients import Pairs, unbroadcast

Errors = Callable[[float], tuple[Array, Array]]


class PairSums(NamedTuple):
    """Sums over pairs, each in float64 and in the shape of what the gradient belongs to."""

    truth: Array
    plain: Array  # that of naive
    signed: Array  # of errors that are the same share of all terms
    weights: Array  # of what the derivatives are off by
    squares: Array  # of the shares that each term errs by for itself
    others: Array  # of the errors of differences
    by_row: Array  # their squares, of each row together
    terms: Array  # squares of what is summed


def names_of(scores: dict[str, Any]) -> tuple[str, ...]:
    """Return what has a gradient of this kind, by the names that `wrt` has for them."""
    score = scores.get("score")
    own = [name for name in ("bias", "alibi_slopes") if scores.get(name) is not None]
    return (*own, *(score.arrays if score is not None else ()))


def gradient_of(grads: Any, name: str) -> Array | None:
    """Return the gradient of this name, or None."""
    return getattr(grads, f"d{name}") if name in ("bias", "alibi_slopes") else grads.darrays.get(name)


@numpy.errstate(all="ignore")
def pair_sums(
    wrt: tuple[str, ...], pairs: Pairs, plain: Any, truth: Any, errors: Errors, away: Array, u: float, scores: dict[str, Any]
) -> dict[str, PairSums]:
    """Return a part of what each gradient is judged by; `errors(t)` are those of dL, `away` how far a score may be off."""
    found, dlogits = {}, pairs.dlogits
    xp = namespace(dlogits)
    (of_share, other), (own_share, own_other) = errors(TAIL), errors(1.0)
    taken = pairs.p > 0
    for name in wrt:
        weight, of_weight, summed = _reader(name, pairs, away, u, scores)
        weight, of_weight = (xp.where(taken & xp.isfinite(x), x, 0) for x in (weight, of_weight))
        of_row = own_other * abs(weight)
        found[name] = PairSums(
            gradient_of(truth, name),
            gradient_of(plain, name).astype(numpy.float64),
            summed(of_share * weight),
            summed(of_weight * abs(dlogits)),
            summed((own_share * weight) ** 2),
            summed(other * abs(weight)),
            summed(of_row * of_row.sum(axis=-1, keepdims=True)),
            summed((weight * dlogits) ** 2),
        )
    return found


def _reader(
    name: str, pairs: Pairs, away: Array, u: float, scores: dict[str, Any]
) -> tuple[Array, Array, Callable[[Array], Array]]:
    """Return the weights of the pairs, the errors of these, and what adds up numbers of pairs in the shape of the gradient."""
    xp, shape = namespace(pairs.dlogits), pairs.dlogits.shape
    if name == "bias":
        ones = xp.ones(shape)
        return ones, 0 * ones, lambda x: unbroadcast(scores["bias"].shape, x)
    if name == "alibi_slopes":
        far = xp.broadcast_to(-distances(*shape[-2:], xp).astype(numpy.float64), shape)
        return far, u * abs(far), lambda x: unbroadcast(scores["alibi_slopes"].shape, x.sum(axis=(-2, -1)))
    partial, summed = scores["score"].arrays[name]
    weight = xp.broadcast_to(partial(pairs.s), shape).astype(numpy.float64)
    moved = xp.maximum(*(abs(partial(pairs.s + sign * away[..., None]) - weight) for sign in (1, -1)))
    size = scores["score"].partial_sizes.get(name, partial)(pairs.s)
    return weight, xp.broadcast_to(moved + EXPRESSION * u * abs(size), shape), lambda x: summed(xp.broadcast_to(x, shape))


def zeros_like(gradient: Array) -> PairSums:
    """Return sums to which those of parts can be added."""
    return PairSums(*(namespace(gradient).zeros(gradient.shape) for _ in PairSums._fields))


def add_part(whole: dict[str, PairSums], part: dict[str, PairSums], index: tuple[slice, ...]) -> None:
    """Add the sums of some batch elements and heads to those of all."""
    for name, sums in part.items():
        trailing = {"bias": 2, "alibi_slopes": 0}.get(name)
        for to, x in zip(whole[name], sums):
            to[... if trailing is None else part_index(to, trailing, index)] += x


@numpy.errstate(all="ignore")
def bounds_of(sums: PairSums, dtype: numpy.dtype, terms: int, u: float) -> tuple[Array, Array, Array]:
    """Return the true gradient and that of naive, with a last axis of 1, and for each element the floor."""
    output = float(ml_dtypes.finfo(dtype).eps) / 2
    xp, floor = namespace(sums.truth), finite(sums.signed) + finite(sums.weights) + TAIL * finite(sums.squares) ** 0.5
    floor = floor + xp.minimum(finite(sums.others), TAIL * finite(sums.by_row) ** 0.5) + output * finite(sums.truth)
    floor = floor + math.sqrt(terms) * u * (finite(sums.truth) + TAIL * finite(sums.terms) ** 0.5)
    floor = floor + (sums.others > 0) * smallest(dtype)
    plain = sums.plain.astype(dtype).astype(numpy.float64)
    return sums.truth[..., None], plain[..., None], floor
