"""How far gradients may be from the truth: the bound of `compare`, carried through the backward.

The truth is `oracle_gradients.oracle_gradients`, in float64. NaN and infinity have to be where it has them. Besides, in every row
of dq, dk and dv,

    max |gradient - oracle|  <=  3 * max |naive - oracle|  +  floor.

The factor is 3, where results have 2: the kernel is handed `out` and `lse` with the errors of its own forward, computes the
scores a second time, and multiplies once more. The floor is built as in `compare`, whose names it uses. A gradient is a
product W X, and from the errors of W follow those of the gradient. Errors that the terms of a sum share move it by as much as
all of them together, independent ones by TAIL times their 2-norm:

    moved = |E(TAIL) X| + TAIL * sqrt((E(1) o E(1)) (X o X)).

E(t) is the error of W, with t in front of errors that are sums themselves. Shared by the terms of another sum, they have to
be bounded by their own TAIL; independent, they count like any other error there.

Probabilities. P is exp(S - lse). An error of the score or of lse is a relative error of P; difference and exponential add
4 u. That of lse is a sum, its floor in `compare` being TAIL * random + lse_steady:

    relative(t) = random + steady + t * random + lse_steady + 4 u + factor

Differences dP - delta, in which large numbers may cancel. Products of dout and v err like those of q and k, and neither
dP nor the sum in delta exceeds |dout|_2 |v|_2. Four roundings follow, those of dlse included:

    dp_error = product * |dout|_4 |v|_4 + (sum(dim_v) + 4 u) * |dout|_2 |v|_2 + 2 u |dlse|

delta is the sum of dout o out, less dlse. What the forward did to P moves out, and so delta, by that share of P o dP, whose
sum this is as well; rounding out to its format moves the terms of dout o out, which are added without tensor cores:

    delta_error(t) = (random + steady + factor + sum(len_kv)) * (|dout . out| + t * |P o dP|_2)
                   + output * (|dout . out| + t * |dout o out|_2) + (sqrt(dim_v) + 2) u * |dout|_2 |out|_2

Softcap. 1 - tanh^2 has a derivative of at most twice itself, so it errs by 2 (random + steady) / softcap of itself. The tanh
is bent / softcap and errs by BENT u as in `compare`, and by u each for the inverse of the softcap and the product with it. The
square doubles these and rounds, so that tanh^2 = 1 - slope errs by (2 BENT + 5) u of itself, and the difference rounds as well.

Formats end. A number below their range is off by `tiny`: half the smallest subnormal number of the format of P, dS and the
gradients, or, where sums are kept, the smallest normal number, because kernels may flush what is smaller to zero.

Gradients. P is rounded before dS (`output`), P and dS enter products (`factor`), and n terms are added, where n counts query
heads that share a key head and batch elements that share an input. At last the sum is rounded:

    dv:      moved + output * |dv| + tiny,  X = dout,  E(t) = (relative(t) + sum(n)) * P^T + tiny
    dq, dk:  |scale| * moved + output * |dq or dk| + tiny,  X = k or q,  E(t) the sum of
             (relative(t) + output + 2 (random + steady) / softcap + sum(n)) * dS,
             slope * (P * (dp_error + delta_error(t)) + tiny * |dP - delta|) + tiny,  slope = 1 - tanh^2 or 1,
             ((2 BENT + 5) (1 - slope) + slope) u * P o (dP - delta), with a softcap only.

Masked pairs have none of this: a row that sees nothing, and a key that nobody sees, must have gradients of exactly 0.

None of these numbers was fitted to a result.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy

from ..problem.backward import Gradients
from . import cases
from .compare import BENT, TAIL, Arithmetic, arithmetic_of, closest, describe, distance, finite, norms, score_errors
from .oracle import Array, accumulator, namespace, sees
from .oracle_gradients import Pairs, gradients_of, naive_gradients, pairs_of, summed_to


@dataclass(frozen=True)
class Judgement:
    """The judgement on one gradient, at the row that comes closest to failing or fails most.

    Attributes
    ----------
    error, allowed
        Of that row. The error is infinite where NaN or infinity is out of place.
    ratio
        The largest error of any row over the largest of naive; 0 if both are 0.
    """

    error: float
    allowed: float
    ratio: float


@dataclass(frozen=True)
class GradientComparison:
    """The judgement on three gradients; without one, where shapes or dtypes are wrong, `message` says so."""

    ok: bool
    message: str
    dq: Judgement | None = None
    dk: Judgement | None = None
    dv: Judgement | None = None


def compare_gradients(
    grads: Gradients,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    precision: str = "ieee",
    **scores: Any,
) -> GradientComparison:
    """Judge gradients, together only those that meet in a sum: memory in use is O(len_q * len_kv) for each of them.

    Parameters
    ----------
    grads
        The gradients, in the shapes of `q`, `k` and `v` and in their dtype.
    dout, dlse
        The gradients with respect to the result and its log-sum-exp, `(*batch, heads_q, len_q, dim_v)` and
        `(*batch, heads_q, len_q)`; None for no gradient with respect to the latter.
    q, k, v
        The inputs, `(*batch, heads, seq, dim)`; leading axes broadcast.
    precision
        "ieee" or "tf32".
    **scores
        `scale`, `first_key`, `last_key` and `softcap`, as in `oracle`; `Case.scores` has them.

    Examples
    --------
    >>> from cupy_flash.judge import cases
    >>> from cupy_flash.judge.compare_gradients import compare_gradients, make_cotangents
    >>> from cupy_flash.problem.backward import Gradients
    >>> from cupy_flash.judge.oracle_gradients import naive_gradients
    >>> case = cases.Case("float16", 20, 30, causal=True)
    >>> q, k, v = cases.make_inputs(case)
    >>> dout, dlse = make_cotangents(case)
    >>> dq, dk, dv = naive_gradients(dout, q, k, v, dlse=dlse, **case.scores)
    >>> compare_gradients(Gradients(dq, dk, dv), dout, q, k, v, dlse=dlse, **case.scores).ok
    True
    >>> compare_gradients(Gradients(2 * dq, dk, dv), dout, q, k, v, dlse=dlse, **case.scores).ok
    False
    """
    for name, gradient, x in zip(Gradients._fields, grads, (q, k, v)):
        if gradient.shape != x.shape or gradient.dtype != x.dtype:
            return GradientComparison(False, f"{name} is {gradient.dtype} {gradient.shape}, expected {x.dtype} {x.shape}")

    batch, heads_kv = dout.shape[:-3], k.shape[-3]
    group = q.shape[-3] // max(heads_kv, 1)
    q, k, v, *grads = (x[(None,) * (dout.ndim - x.ndim)] for x in (q, k, v, *grads))
    apart = [n if all(x.shape[i] == n for x in (q, k, v)) else 1 for i, n in enumerate(batch)]
    found: dict[str, list[_Worst]] = {name: [_Worst()] for name in Gradients._fields}
    for *element, head in numpy.ndindex(*apart, heads_kv):
        index = [slice(i, i + 1) if n > 1 else slice(None) for i, n in zip(element, apart)]
        of_q, of_kv = (*index, slice(head * group, (head + 1) * group)), (*index, slice(head, head + 1))
        inputs = dout[of_q], q[of_q], k[of_kv], v[of_kv], None if dlse is None else dlse[of_q]
        for name, gradient, at, *bound in zip(found, grads, (of_q, of_kv, of_kv), *_bounds(*inputs, precision, scores)):
            if gradient[at].size:
                found[name].append(_worst(gradient[at], *bound, (*element, at[-1].start, 0)))

    ok, messages, judgements = True, [], []
    for name, worsts in found.items():
        worst = max(worsts)
        error, naive = max(x.largest for x in worsts), max(x.naive for x in worsts)
        ratio = error / naive if naive > 0 else math.inf if error > 0 else 0.0
        ok &= worst.share <= 1
        messages.append(describe(name, worst.share, worst.error, worst.allowed, worst.row))
        judgements.append(Judgement(worst.error, worst.allowed, ratio))
    return GradientComparison(ok, "; ".join(messages), *judgements)


class _Worst(NamedTuple):
    share: float = 0.0  # of what is allowed, in the row where it is largest; so are the next three
    error: float = 0.0
    allowed: float = 0.0
    row: tuple[int, ...] = ()
    largest: float = 0.0  # error of any row
    naive: float = 0.0  # largest error of naive


@numpy.errstate(all="ignore")
def _worst(gradient: Array, truth: Array, plain: Array, floor: Array, start: tuple[int, ...]) -> _Worst:
    """Return the judgement on a part of a gradient that begins at index `start`."""
    error, naive = distance(gradient, truth).max(axis=-1), finite(plain - truth).max(axis=-1)
    share, worst, allowed, (row,) = closest(error, 3 * naive + floor, ())
    place = tuple(int(i) + first for i, first in zip(numpy.unravel_index(row, error.shape), start))
    return _Worst(share, worst, allowed, place, float(error.max()), float(naive.max()))


@numpy.errstate(all="ignore")
def _bounds(
    dout: Array, q: Array, k: Array, v: Array, dlse: Array | None, precision: str, scores: dict[str, Any]
) -> tuple[Gradients, Gradients, Gradients]:
    """Return the true gradients, those of naive, and for each row the floor."""
    plain = naive_gradients(dout, q, k, v, dlse=dlse, precision=precision, **scores)
    arithmetic, tiny = arithmetic_of(q.dtype, precision), _smallest(q.dtype)
    dout, q, k, v = (x.astype(numpy.float64) for x in (dout, q, k, v))
    pairs = pairs_of(dout, q, k, v, dlse, scores)
    truth = gradients_of(pairs, dout, q, k, v, scores)
    return truth, plain, _floors(truth, pairs, dout, q, k, v, dlse, arithmetic, tiny, scores)


def _smallest(dtype: numpy.dtype) -> float:
    """Return `tiny`: below it a number, or half of it, may be lost."""
    return max(float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2, float(numpy.finfo(accumulator(dtype)).smallest_normal))


def _floors(
    truth: Gradients,
    pairs: Pairs,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    dlse: Array | None,
    arithmetic: Arithmetic,
    tiny: float,
    scores: dict[str, Any],
) -> Gradients:
    """Return the floor for each row of each gradient, `(*batch, heads, rows)`, from float64 arrays."""
    xp, u, softcap, scale = namespace(q), arithmetic.sum, scores.get("softcap"), abs(scores["scale"])
    len_kv, dim_v = v.shape[-2:]
    seen = sees(*pairs.p.shape[-2:], scores.get("first_key"), scores.get("last_key"), xp)
    random, steady, lse_steady = score_errors(q, k, pairs.lse, arithmetic, scores)
    dout, q, k, v, p, out, dp, delta, ds = (
        xp.where(xp.isfinite(x), x, 0) for x in (dout, q, k, v, pairs.p, pairs.out, pairs.dp, pairs.delta, pairs.ds)
    )
    slope, difference = 1.0 if pairs.slope is None else finite(pairs.slope), dp - delta[..., None]

    def size(x: Array) -> Array:
        return (x**2).sum(axis=-1) ** 0.5

    total, terms_size, p_dp_size = abs((dout * out).sum(axis=-1)), size(dout * out), size(p * dp)
    dp_error = arithmetic.product * norms(4, dout, v) + (arithmetic.summation(dim_v) + 4 * u) * norms(2, dout, v)
    dp_error = dp_error + (0 if dlse is None else 2 * u * finite(dlse))

    def relative(t: float) -> Array:
        return random + steady + t * random + lse_steady + 4 * u + arithmetic.factor

    def delta_error(t: float) -> Array:
        of_p = (random + steady + arithmetic.factor + arithmetic.summation(len_kv)) * (total + t * p_dp_size)
        return of_p + arithmetic.output * (total + t * terms_size) + (math.sqrt(dim_v) + 2) * u * size(dout) * size(out)

    def errors_of_p(n: int, t: float) -> list[Array]:
        return [(relative(t) + arithmetic.summation(n))[..., None] * p, seen * tiny]

    def errors_of_ds(n: int, t: float) -> list[Array]:
        share = relative(t) + arithmetic.output + arithmetic.summation(n)
        if softcap is not None:
            share = share + 2 * (random + steady) / softcap
        errors = [
            share[..., None] * ds,
            slope * (p * (dp_error + delta_error(t))[..., None] + tiny * abs(difference)) + seen * tiny,
        ]
        return errors if softcap is None else [*errors, ((2 * BENT + 5) * (1 - slope) + slope) * u * p * difference]

    def floor(dx: Array, factor: float, errors: Callable[[int, float], list[Array]], x: Array, by_key: bool) -> Array:
        n = x.shape[-2] * math.prod(dout.shape[:-2]) // max(1, math.prod(dx.shape[:-2]))
        shared, independent = ([error.swapaxes(-1, -2) if by_key else error for error in errors(n, t)] for t in (TAIL, 1.0))
        together = summed_to(dx.shape, sum(abs(error @ x) for error in shared))
        squares = summed_to(dx.shape, sum(abs(error) for error in independent) ** 2 @ x**2)
        moved = factor * (together + TAIL * squares**0.5) + arithmetic.output * finite(dx)
        return moved.max(axis=-1) + tiny * seen.any(axis=0 if by_key else 1)

    return Gradients(
        floor(truth.dq, scale, errors_of_ds, k, by_key=False),
        floor(truth.dk, scale, errors_of_ds, q, by_key=True),
        floor(truth.dv, 1.0, errors_of_p, dout, by_key=True),
    )


def make_cotangents(case: cases.Case, xp: ModuleType = numpy, seed: int = 0) -> tuple[Any, Any]:
    """Return `(dout, dlse)` for `case` as arrays of `xp`, standard normal, the same for the same case and seed.

    `dout` is `(*batch, heads_q, len_q, dim_v)`, has dtype and layout of the case, and lies in a larger buffer full of NaN.
    `dlse` is `(*batch, heads_q, len_q)`, contiguous, float32 or for float64 cases float64.

    Examples
    --------
    >>> from cupy_flash.judge.cases import Case
    >>> from cupy_flash.judge.compare_gradients import make_cotangents
    >>> dout, dlse = make_cotangents(Case("float16", 5, 7, dim=4))
    >>> dout.shape, dout.dtype.name, dlse.shape, dlse.dtype.name
    ((1, 1, 5, 4), 'float16', (1, 1, 5), 'float32')
    """
    rng = numpy.random.default_rng([seed, zlib.crc32(case.name.encode()), 1])  # 1: other numbers than those of the inputs
    dtype = numpy.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    rows = (*case.batch, case.heads_q, case.len_q)
    dout = cases.place(rng.standard_normal((*rows, case.dim_v)).astype(dtype), case.layout, xp)
    return dout, xp.asarray(rng.standard_normal(rows).astype(accumulator(dtype)))
