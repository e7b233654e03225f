"""One row's softmax, taken a block of scores at a time: what every flash kernel does, small enough to be read.

A row is summed up by three numbers: the largest score so far, m in the papers; the sum of exp(score - m), their l; and the sum
of exp(score - m) * value. Where a block holds a larger score, the sums of the blocks before it are too large by
exp(m_new - m_old), and multiplying them by the correction exp(m_old - m_new) mends that. No exponential is of more than 0, so
none overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy


@dataclass(frozen=True)
class Step:
    """The state of a row behind one block of its scores.

    Attributes
    ----------
    scores : tuple of float
        The block.
    weights : tuple of float
        exp(score - top) of the block.
    correction : float
        What the sums of the blocks before were multiplied by, at most 1.
    top : float
        The largest score so far; -inf before any that is finite.
    total : float
        The sum of exp(score - top) so far.
    acc : float
        The sum of exp(score - top) * value so far.
    """

    scores: tuple[float, ...]
    weights: tuple[float, ...]
    correction: float
    top: float
    total: float
    acc: float

    @property
    def out(self) -> float:
        """The mean of the values so far, weighted by the softmax of the scores so far; 0 where no score is finite."""
        return self.acc / self.total if self.total else 0.0

    @property
    def lse(self) -> float:
        """The log-sum-exp of the scores so far."""
        return self.top + math.log(self.total) if self.total else -math.inf


def online_softmax(scores: Sequence[float], values: Sequence[float], block: int) -> Iterator[Step]:
    """Yield the state of one row after each block of scores, computed in float64.

    Parameters
    ----------
    scores : sequence of float
        One for each key: finite, or -inf for a masked key.
    values : sequence of float
        One for each key, finite.
    block : int
        Scores in a block, at least 1; the last block may have fewer.

    Raises
    ------
    ValueError
        If an argument is none of this; raised by the first step.

    Examples
    --------
    >>> for step in online_softmax([1000, 999, 998], [1, 2, 3], block=2):
    ...     print(f"{step.top:.0f} {step.correction:.3f} {step.total:.3f} {step.out:.3f}")
    1000 0.000 1.368 1.269
    1000 1.000 1.503 1.425
    """
    scores, values = _checked(scores, values)
    if block < 1:
        raise ValueError(f"block: expected at least 1, got {block}")
    top, total, acc = -math.inf, 0.0, 0.0
    for start in range(0, len(scores), block):
        s, v = scores[start : start + block], values[start : start + block]
        new_top = max(top, float(s.max()))
        shift = 0.0 if new_top == -math.inf else new_top  # nothing seen yet: exp(-inf - -inf) would be NaN
        correction = math.exp(top - shift)
        with numpy.errstate(over="ignore"):  # scores further apart than the largest number: exp(-inf) is 0 all the same
            p = numpy.exp(s - shift)
        top = new_top
        total = correction * total + float(p.sum())
        acc = correction * acc + float(p @ v)
        yield Step(tuple(s.tolist()), tuple(p.tolist()), correction, top, total, acc)


def exact_softmax(scores: Sequence[float], values: Sequence[float]) -> tuple[numpy.ndarray, float]:
    """The softmax of a row whose maximum is known beforehand, and the mean of the values weighted by it.

    Parameters
    ----------
    scores, values : sequence of float
        As in `online_softmax`.

    Returns
    -------
    weights : numpy.ndarray, shape (keys,)
        They sum to 1, or are all 0 where no score is finite.
    out : float

    Examples
    --------
    >>> weights, out = exact_softmax([1000, 999, 998], [1, 2, 3])
    >>> print(weights.round(3), round(out, 3))
    [0.665 0.245 0.09 ] 1.425
    """
    scores, values = _checked(scores, values)
    if not (scores > -math.inf).any():
        return numpy.zeros(len(scores)), 0.0
    with numpy.errstate(over="ignore"):
        weights = numpy.exp(scores - scores.max())
    weights /= weights.sum()
    return weights, float(weights @ values)


@numpy.errstate(over="ignore", invalid="ignore")
def naive_softmax(scores: Sequence[float], values: Sequence[float]) -> tuple[numpy.ndarray, float]:
    """The definition as it is written, exp(score) / sum of exp(score): infinity and NaN where exp overflows.

    Parameters
    ----------
    scores, values : sequence of float
        As in `online_softmax`.

    Returns
    -------
    exponentials : numpy.ndarray, shape (keys,)
        exp(score), before the division.
    out : float

    Examples
    --------
    >>> naive_softmax([1000, 999, 998], [1, 2, 3])
    (array([inf, inf, inf]), nan)
    """
    scores, values = _checked(scores, values)
    exponentials = numpy.exp(scores)
    return exponentials, float((exponentials / exponentials.sum()) @ values)


def _checked(scores: Sequence[float], values: Sequence[float]) -> tuple[numpy.ndarray, numpy.ndarray]:
    scores, values = numpy.asarray(scores, numpy.float64), numpy.asarray(values, numpy.float64)
    wrong = numpy.isnan(scores) | (scores == math.inf)
    if wrong.any():
        raise ValueError(f"scores: expected finite numbers or -inf, got {scores[wrong][0]}")
    if not numpy.isfinite(values).all():
        raise ValueError(f"values: expected finite numbers, got {values[~numpy.isfinite(values)][0]}")
    if len(values) != len(scores):
        raise ValueError(f"values: expected one for each of {len(scores)} scores, got {len(values)}")
    return scores, values
