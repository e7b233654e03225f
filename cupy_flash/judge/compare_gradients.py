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
             slope * P * (dp_error + delta_error(t)) + max(slope, 1) * tiny * |dP - delta| + tiny,  slope = 1 - tanh^2 or 1: P may
             be kept times the slope,
             of_slope * P o (dP - delta), of_slope = ((2 BENT + 5) (1 - slope) + slope) u, with a softcap only,
             of_slope * (P * (dp_error + delta_error(t)) + tiny * |dP - delta|), with a softcap only: where a slope is all but 0
             and a row sees one key, there is no difference, and all that is left is one error times the other.

Sinks. `steady` has `of_sinks` and the forward may have lost P and digits of out where its formats end, all as in `compare`. So

    delta_error(t) has besides: lost o |dP| 1 + t * tiny * |dout|_2

P = exp(S - lse) still is off by no more than relative(t): `of_sinks` is in it twice, once of the forward and once for the change of
base of lse and the difference, in which lse may now be far from S. The gradient of a sink is a sum over rows and batch elements:

    dsinks = -share . delta,  share = exp(sink - lse)

share errs by lse's error, two roundings of the sink's change of base and two of that of lse, the difference, whose size is
|sink| + |lse| at most, and 4 u for the exponential, the difference dout . out - dlse and the product. The sum has no tensor cores:

    share_error(t) = t * random + lse_steady + 3 u (|sink| + |lse|) + 4 u

Rows err apart from each other, so by TAIL times their 2-norm, but for what is the same share of all of them: of a share, or of
out, and so of dout . out. A share below the range of sums is lost whichever way delta has it, and the sum rounds to the format of
the sinks, whose `output` and `tiny` these are:

    |(share_error(TAIL) share) . delta| + |share . (forward dout . out)| + smallest normal number * |delta|_1
        + TAIL * |share o (share_error(1) |delta| + delta_error(1) + 2 u |dlse|)|_2
        + sqrt(batch * len_q) u * (|dsinks| + TAIL * |share o delta|_2) + output * |dsinks| + tiny
    forward = random + steady + factor + sum(len_kv) + output, of the inputs' dtype

A sink of -inf, which has no share, must have a gradient of exactly 0.

Pairs. `random` and `steady` are what an expression, a bias and ALiBi make of them in `compare`, but for the softcap, which comes
before, and whose 2 (random + steady) / softcap is of the scores themselves. An expression f has a slope of its own, f'(s), which is
a factor of `slope`. Taken of a score that is off by up to d = TAIL * random + steady, it is another one, and it rounds like f:

    of_f = max(|f'(s + d) - f'(s)|, |f'(s - d) - f'(s)|) + EXPRESSION u * slope_size(s)

`of_slope` then is of_f * slope of the softcap, and |f'(s)| times that of the softcap. With dropout, P of dv is what is kept and
multiplied, dP and `dp_error` likewise, and 2 u are added to `steady`. What else has gradients is in `compare_sums`.

Masked pairs have none of this: a row that sees nothing, and a key that nobody sees, must have gradients of exactly 0.
None of these numbers was fitted to a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy

from ..problem.backward import Gradients
from .compare import (
    TAIL,
    arithmetic_of,
    describe,
    finite,
    formats_end,
    lost,
    norms,
    part_of,
    score_errors,
    shares_of,
    smallest,
)
from .compare_sums import PairSums, add_part, bounds_of, gradient_of, names_of, pair_sums, zeros_like
from .gradient_errors import SinkSums, Worst, sink_bounds, slope_errors, worst_of
from .oracle import Array, accumulator, dropped, namespace, seen_pairs, sink_logits
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
    """The judgement on three gradients, if any that of sinks, and `others` by the names that `wrt` has for them.

    Where shapes or dtypes are wrong, `message` says so.
    """

    ok: bool
    message: str
    dq: Judgement | None = None
    dk: Judgement | None = None
    dv: Judgement | None = None
    dsinks: Judgement | None = None
    others: Mapping[str, Judgement] = field(default_factory=dict)

    @property
    def judged(self) -> tuple[Judgement, ...]:
        """All judgements."""
        return (*filter(None, (self.dq, self.dk, self.dv, self.dsinks)), *self.others.values())


def compare_gradients(
    grads: Gradients,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    precision: str = "ieee",
    wrt: Mapping[str, Array] | None = None,
    **scores: Any,
) -> GradientComparison:
    """Judge gradients, together only those that meet in a sum: memory in use is O(len_q * len_kv) for each of them.

    Parameters
    ----------
    grads
        The gradients, in the shapes of `q`, `k` and `v` and in their dtype; `dsinks` in shape and dtype of the sinks.
    dout, dlse
        The gradients with respect to the result and its log-sum-exp, `(*batch, heads_q, len_q, dim_v)` and
        `(*batch, heads_q, len_q)`; None for no gradient with respect to the latter.
    q, k, v
        The inputs, `(*batch, heads, seq, dim)`; leading axes broadcast.
    precision
        "ieee" or "tf32".
    wrt
        What else has to have a gradient: "bias", "alibi_slopes" or an array of the score, with the array itself, whose shape and
        dtype its gradient has.
    **scores
        What a score becomes, the masks, sinks and dropout, as in `oracle`; `Case.meaning` has them. A `HandScore` has `part`.

    Examples
    --------
    >>> from cupy_flash.judge import cases
    >>> from cupy_flash.judge.compare_gradients import compare_gradients
    >>> from cupy_flash.judge.cotangents import make_cotangents
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
    sinks, dsinks = scores.get("sinks"), getattr(grads, "dsinks", None)
    if _kind(dsinks) != _kind(sinks):
        return GradientComparison(False, f"dsinks is {_kind(dsinks)}, expected {_kind(sinks)}")
    wrt = dict(wrt or {})
    others = {name: gradient_of(grads, name) for name in names_of(scores)} if isinstance(grads, Gradients) else {}
    for name, gradient in others.items():
        if _kind(gradient) != _kind(wrt.get(name)):
            return GradientComparison(False, f"the gradient of {name} is {_kind(gradient)}, expected {_kind(wrt.get(name))}")

    batch, heads_kv = dout.shape[:-3], k.shape[-3]
    group = q.shape[-3] // max(heads_kv, 1)
    q, k, v, *grads = (x[(None,) * (dout.ndim - x.ndim)] for x in (q, k, v, *grads))
    apart = [n if all(x.shape[i] == n for x in (q, k, v)) else 1 for i, n in enumerate(batch)]
    found: dict[str, list[Worst]] = {name: [Worst()] for name in Gradients._fields}
    sums = None if sinks is None else SinkSums(*(namespace(sinks).zeros(sinks.shape) for _ in SinkSums._fields))
    pair_wise = {name: zeros_like(others[name]) for name in wrt}
    for *element, head in numpy.ndindex(*apart, heads_kv):
        index = [slice(i, i + 1) if n > 1 else slice(None) for i, n in zip(element, apart)]
        of_q, of_kv = (*index, slice(head * group, (head + 1) * group)), (*index, slice(head, head + 1))
        inputs = dout[of_q], q[of_q], k[of_kv], v[of_kv], None if dlse is None else dlse[of_q]
        *bounds, part, of_others = _bounds(*inputs, precision, part_of(scores, of_q), tuple(wrt))
        add_part(pair_wise, of_others, of_q)
        for name, gradient, at, *bound in zip(found, grads, (of_q, of_kv, of_kv), *bounds):
            if gradient[at].size:
                found[name].append(worst_of(gradient[at], *bound, (*element, at[-1].start, 0)))
        for whole, added in zip(sums or (), part or ()):
            whole[..., of_q[-1]] += added
    if sums is not None:
        bound = sink_bounds(sums, sinks, math.prod(dout.shape[:-3]) * dout.shape[-2], q.dtype)
        found["dsinks"] = [Worst(), *([worst_of(dsinks[..., None], *bound, (0,) * sinks.ndim)] if sinks.size else [])]

    u, terms = arithmetic_of(q.dtype, "ieee").sum, math.prod(dout.shape[:-1]) * k.shape[-2]
    for name, gradient in wrt.items():
        elements = others[name].reshape(gradient.shape or (1,))  # of a scalar one, with a place
        bound = bounds_of(PairSums(*(x.reshape(elements.shape) for x in pair_wise[name])), gradient.dtype, terms, u)
        found[name] = [Worst(), *([worst_of(elements[..., None], *bound, (0,) * elements.ndim)] if elements.size else [])]

    ok, messages, judgements = True, [], {}
    for name, worsts in found.items():
        worst = max(worsts)
        error, naive = max(x.largest for x in worsts), max(x.naive for x in worsts)
        ratio = error / naive if naive > 0 else math.inf if error > 0 else 0.0
        ok &= worst.share <= 1
        messages.append(describe(name, worst.share, worst.error, worst.allowed, worst.row))
        judgements[name] = Judgement(worst.error, worst.allowed, ratio)
    named = {name: judgements.pop(name) for name in ("dq", "dk", "dv", "dsinks") if name in judgements}
    return GradientComparison(ok, "; ".join(messages), **named, others=judgements)


def _kind(array: Array | None) -> str:
    return "None" if array is None else f"{array.dtype} {array.shape}"


def _bounds(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    dlse: Array | None,
    precision: str,
    scores: dict[str, Any],
    wrt: tuple[str, ...],
) -> tuple[Gradients, Gradients, Gradients, SinkSums | None, dict[str, PairSums]]:
    """Return the true gradients, those of naive, for each row the floor, and what the gradients of sinks and others are made of."""
    dtype = q.dtype
    # In the format of sums, in which they are exact, so that each part of a sum is not rounded to their own.
    given = {name: scores[name] for name in ("sinks", "bias", "alibi_slopes") if scores.get(name) is not None}
    wide = scores | {name: x.astype(accumulator(dtype)) for name, x in given.items()}
    plain = naive_gradients(dout, q, k, v, dlse=dlse, precision=precision, **wide)
    dout, q, k, v = (x.astype(numpy.float64) for x in (dout, q, k, v))
    pairs = pairs_of(dout, q, k, v, dlse, scores)
    truth = gradients_of(pairs, dout, q, k, v, scores)
    floors, of_sinks, others = _floors(truth, plain, pairs, dout, q, k, v, dlse, dtype, precision, scores, wrt)
    return truth, plain, floors, of_sinks, others


def _floors(
    truth: Gradients,
    plain: Gradients,
    pairs: Pairs,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    dlse: Array | None,
    dtype: numpy.dtype,
    precision: str,
    scores: dict[str, Any],
    wrt: tuple[str, ...],
) -> tuple[Gradients, SinkSums | None, dict[str, PairSums]]:
    """Return the floor for each row of each gradient, `(*batch, heads, rows)`, and parts of the others, from float64 arrays."""
    arithmetic, tiny, sinks = arithmetic_of(dtype, precision), smallest(dtype), scores.get("sinks")
    xp, u, scale = namespace(q), arithmetic.sum, abs(scores["scale"])
    len_kv, dim_v = v.shape[-2:]
    seen = seen_pairs(pairs.p, scores)
    random, steady, lse_steady = score_errors(q, k, pairs.p, pairs.lse, arithmetic, scores)
    steady = steady + (0 if scores.get("keep") is None else 2 * u)
    of_slope, of_cap, away = slope_errors(q, k, arithmetic, scores)
    dout, q, k, v, p, out, dp, delta, ds, dlogits = (
        xp.where(xp.isfinite(x), x, 0)
        for x in (dout, q, k, v, pairs.p, pairs.out, pairs.dp, pairs.delta, pairs.ds, pairs.dlogits)
    )
    slope, difference = 1.0 if pairs.slope is None else finite(pairs.slope), dp - delta[..., None]
    kept = dropped(p, scores)

    def size(x: Array) -> Array:
        return (x**2).sum(axis=-1) ** 0.5

    signed, terms_size, p_dp_size = (dout * out).sum(axis=-1), size(dout * out), size(p * dp)
    total, of_forward = abs(signed), random + steady + arithmetic.factor + arithmetic.summation(len_kv)
    ends = formats_end(scores)
    lost_p = lost(p, pairs.lse, dtype, scores) if ends else 0
    dp_error = arithmetic.product * norms(4, dout, v) + (arithmetic.summation(dim_v) + 4 * u) * norms(2, dout, v)
    dp_error = dp_error * scores.get("keep_scale", 1.0) + (0 if dlse is None else 2 * u * finite(dlse))

    def relative(t: float) -> Array:
        return random + steady + t * random + lse_steady + 4 * u + arithmetic.factor

    def delta_error(t: float) -> Array:
        of_p = of_forward * (total + t * p_dp_size)
        error = of_p + arithmetic.output * (total + t * terms_size) + (math.sqrt(dim_v) + 2) * u * size(dout) * size(out)
        return error if not ends else error + (lost_p * abs(dp)).sum(axis=-1) + t * tiny * size(dout)

    def errors_of_p(n: int, t: float) -> list[Array]:
        return [(relative(t) + arithmetic.summation(n))[..., None] * kept, seen * tiny]

    def of_difference(t: float) -> Array:
        return p * (dp_error + delta_error(t))[..., None] + tiny * abs(difference)

    def errors_of_ds(n: int, t: float) -> list[Array]:
        share = relative(t) + arithmetic.output + arithmetic.summation(n) + of_cap
        of_ends = tiny * (xp.maximum(slope, 1) - slope) * abs(difference) + seen * tiny
        errors = [share[..., None] * ds, slope * of_difference(t) + of_ends]
        if of_slope is None:
            return errors
        # Where a slope is all but 0 and a row sees one key, there is no difference: what is left is an error times the other.
        return [*errors, of_slope * p * difference, of_slope * of_difference(t)]

    def errors_of_dlogits(t: float) -> tuple[Array, Array]:
        return (relative(t) + arithmetic.output)[..., None] * dlogits, of_difference(t) + seen * tiny

    def floor(dx: Array, factor: float, errors: Callable[[int, float], list[Array]], x: Array, by_key: bool) -> Array:
        n = x.shape[-2] * math.prod(dout.shape[:-2]) // max(1, math.prod(dx.shape[:-2]))
        shared, independent = ([error.swapaxes(-1, -2) if by_key else error for error in errors(n, t)] for t in (TAIL, 1.0))
        together = summed_to(dx.shape, sum(abs(error @ x) for error in shared))
        squares = summed_to(dx.shape, sum(abs(error) for error in independent) ** 2 @ x**2)
        moved = factor * (together + TAIL * squares**0.5) + arithmetic.output * finite(dx)
        takes_part = xp.broadcast_to(seen, (*dout.shape[:-1], len_kv)).any(axis=-2 if by_key else -1)
        takes_part = summed_to((*dx.shape[:-1], 1), takes_part[..., None].astype(numpy.float64))[..., 0] > 0
        return moved.max(axis=-1) + tiny * takes_part

    floors = Gradients(
        floor(truth.dq, scale, errors_of_ds, k, by_key=False),
        floor(truth.dk, scale, errors_of_ds, q, by_key=True),
        floor(truth.dv, 1.0, errors_of_p, dout, by_key=True),
    )
    of_others = pair_sums(wrt, pairs, plain, truth, errors_of_dlogits, away, u, scores) if wrt else {}
    if sinks is None:
        return floors, None, of_others

    # All of these are (*batch, heads, len_q, n) or become so.
    share, others = shares_of(sinks, pairs.lse), finite(sink_logits(sinks, pairs.lse))
    share = xp.where(xp.isfinite(share), share, 0)
    delta, signed, own_error = delta[..., None], signed[..., None], delta_error(1.0)[..., None]
    own_error = own_error + (0 if dlse is None else 2 * u * finite(dlse)[..., None])

    def share_error(t: float) -> Array:
        return (t * random + lse_steady + 3 * u * finite(pairs.lse) + 4 * u)[..., None] + 3 * u * others

    def summed(x: Array) -> Array:
        """Over batch and rows, in the shape of the sinks."""
        x = xp.broadcast_to(x, (*dout.shape[:-1], share.shape[-1]))
        return x.sum(axis=(*range(x.ndim - 3), -2)).T.reshape(sinks.shape)

    return floors, SinkSums(
        truth.dsinks,
        plain.dsinks.astype(numpy.float64),
        of_shares=summed(share_error(TAIL) * share * delta),
        of_out=summed(share * (of_forward + arithmetic.output)[..., None] * signed),
        squares=summed((share * (share_error(1.0) * abs(delta) + own_error)) ** 2),
        terms=summed((share * delta) ** 2),
        size=summed(abs(delta)),
    ), of_others
