"""How far a result may be from the truth: the bound, written once.

The truth is `oracle.oracle`: float64, from the inputs as they are after rounding to their dtype. NaN and infinity
have to be where the oracle has them. Besides, in every row of the result and for every log-sum-exp,

    max |result - oracle|  <=  2 * max |naive - oracle|  +  floor.

`naive` is the textbook formula in the same precision, so the first term follows the problem: its length, its softcap,
the spread of its scores. The factor 2 is for what a tiled kernel does besides: rescale, merge, sum in another order.
Row by row, because the first rows of a causal problem are averages of few values, large and with large errors. One
maximum over all rows would hide behind them whatever goes wrong with the small results of the last rows.

The floor is for rows in which naive is exact by luck, such as those with a single key. It is what the roundings of a
kernel may amount to. u is half an ulp of 1 in the format that sums are kept in, `o` the elementwise product, |x|_p the
p-norm.

Sums. Relative to its largest partial sum, a sum of n products errs by no more than

    sum(n) = (sqrt(n) + passes * n / 8) * u:

sqrt(n) for roundings to nearest, a random walk; the rest because tensor cores truncate. That errs the same way every
time, by u on average at each instruction. An instruction takes 8 terms or more, and float32 needs three of them.

Independent errors. Terms that err by up to r of themselves, each on its own and evenly spread, move their sum by
r |terms|_2 / sqrt(3) as a standard deviation. TAIL takes 6.5 of these, which one sum in 10^10 exceeds.

Score. Products of q and k err independently by `product`, and |q o k|_2 <= |q|_4 |k|_4. Their sum, and scale, change
of base, subtraction of the maximum and exponential with u each, are relative to no more than |q|_2 |k|_2. A softcap
bends a score s to softcap * tanh(s / softcap), which errs relative to itself: tanh moves by no larger share than its
argument does, since x tanh'(x) <= tanh x for x > 0. So u for the quotient, 4 u for a tanh of a library, which is right
to two units in the last place, and u for the product add up to BENT u of the bent score, and neither |s| nor the
softcap is below that.

    random = |scale| * product * |q|_4 |k|_4
    steady = |scale| * (sum(dim) + 4 u) * |q|_2 |k|_2 + BENT u * min(|scale| |q|_2 |k|_2, softcap)

Result. An error of a score is a relative error of its P, and `factor` is another, from rounding P and V before they
meet. Summation adds sum(len_kv), and rounding to the format of the result `output`. Relative errors that all terms
share move a result by that much of |result|, independent ones as above:

    floor = (random + steady + factor + sum(len_kv) + output) * (|result| + TAIL * |P o V|_2)

Log-sum-exp. It is an average of scores and errs like one. Its denominator is summed without tensor cores, and
logarithm, change of base, addition of the maximum and rounding add u each:

    floor = TAIL * random + steady + sqrt(len_kv) u + 4 u (1 + |lse|)

Sinks. A sink t is a number given exactly. With n of them in a row, `steady` has besides, for a result and for lse,

    of_sinks = 3 u * (|lse| + log(len_kv + n)) + (n + 4) u.

The change of base multiplies t by a rounded constant, which is 2 u |t| of its exponential, and the denominator moves by the part
that the sink has in it, share = exp(t - lse). Because |t| <= |lse| + |log share| and all share |log share| of a row add up to no
more than log n + 1/e, this amounts to 2 u (|lse| + log n) and less than u. Where a sink is the maximum, all scores are subtracted
from it, or at last rescaled by the difference, which rounds by u of its size. That of a score is counted in `steady`, and a maximum
of len_kv + n logits is no further from lse than the logarithm of their number. n additions, and u each for an exponential, for
what it is subtracted from, and for the rescaling of out and of the denominator, are the rest. All of it is a relative error of P,
and so one of the result, however small a sink far above all scores has made it.

Pairs. An expression makes f(s) of a score s, a bias and ALiBi add to it. What s errs by moves f(s) by the slope of f as much, of
which the steepest pair of a row counts. An operation rounds by u of its result, and a function of a library by 2 u. EXPRESSION u is
for eight of them, of `size(s)`: what f adds up, in magnitudes, so that nothing is hidden by a difference of two large numbers. Two
additions, a product with a slope of ALiBi, and the change of base and the subtraction of the maximum, now of other numbers, add
ADDED u of all magnitudes together. So for a row, with maxima over the pairs whose P is not nothing beside the largest one,

    random becomes  max |f'(s)| * random
    steady becomes  max |f'(s)| * steady + EXPRESSION u * max size(s) + ADDED u * max (|f(s)| + |bias| + |slope| distance).

Dropout multiplies P, rounded, by a rounded number: `steady` of a result has 2 u more, |result| and |P o V|_2 are of what is kept.

Then the formats end, which shows beside sinks, and where dropout leaves out the largest P. P is kept relative to the maximum, sinks
included: as P / top, where top is the largest P or share of the row.
Where that is below the normal numbers of its format, it is off by itself or by `tiny`, whichever is less. `tiny` is half the
smallest subnormal number or, where sums are kept, the smallest normal one, because kernels may flush what is smaller to zero.
Flushed is always in one direction, so all of it counts. The result rounds to its format likewise, unless its row sees nothing:

    floor has besides: lost |V| + tiny,  lost = min(P, tiny * top) where P / top is below the normal numbers, else 0.

Of float64, the oracle has no more digits than the result, and errs by as much: the floor counts twice.

None of these numbers was fitted to a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy

from . import oracle
from .oracle import Array, namespace

TAIL = 6.5 / math.sqrt(3)
BENT = 6  # u: what bending a score adds to its error
EXPRESSION = 16  # u: eight operations, each off by as much as a function of a library
ADDED = 8  # u: two additions and a product before, in base 2 one rounded constant and three operations
NOTHING = float(numpy.finfo(numpy.float32).smallest_normal)  # beside the largest P of a row
TF32 = 2.0**-11  # half an ulp of 1
# x = high + low + rest, high rounded to TF32 and low cut to it: a product leaves out low * low, TF32**2 of it at most, and the
# two rests, twice that each.
SPLIT_TF32 = 5 * TF32**2


@dataclass(frozen=True)
class Arithmetic:
    """Relative errors of the operations behind one dtype: powers of two, read off the formats."""

    output: float  # rounding to the dtype of the result
    product: float  # one product of q and k
    factor: float  # one product of P and V
    sum: float  # rounding of one addition
    passes: int  # tensor-core instructions to one product; 0 without tensor cores

    def summation(self, n: int) -> float:
        """Return `sum(n)`: the error of a sum of n products, relative to its largest partial sum."""
        return (math.sqrt(n) + self.passes * n / 8) * self.sum


ARITHMETIC = {
    "float16": Arithmetic(output=2.0**-11, product=0, factor=2.0**-11, sum=2.0**-24, passes=1),
    "bfloat16": Arithmetic(output=2.0**-8, product=0, factor=2.0**-8, sum=2.0**-24, passes=1),
    "tf32": Arithmetic(output=2.0**-24, product=2 * TF32, factor=2 * TF32, sum=2.0**-24, passes=1),
    "float32": Arithmetic(output=2.0**-24, product=SPLIT_TF32, factor=SPLIT_TF32, sum=2.0**-24, passes=3),
    "float64": Arithmetic(output=2.0**-53, product=2.0**-53, factor=2.0**-53, sum=2.0**-53, passes=0),
}


@dataclass(frozen=True)
class Comparison:
    """The judgement on one result: errors and what was allowed, at the row that comes closest to failing or fails most.

    An error is infinite where NaN or infinity is out of place. Without a log-sum-exp to judge, its figures are 0.
    """

    ok: bool
    error: float
    allowed: float
    lse_error: float
    lse_allowed: float
    message: str


def compare(
    out: Array, lse: Array | None, q: Array, k: Array, v: Array, *, precision: str = "ieee", **scores: Any
) -> Comparison:
    """Judge a result, one head at a time: the memory in use is O(len_q * len_kv).

    Parameters
    ----------
    out, lse
        The result, `(*batch, heads_q, len_q, dim_v)` in the dtype of `q`, and its log-sum-exp in float32 (float64 for
        float64), or None where none was asked for.
    q, k, v
        The inputs, `(*batch, heads, seq, dim)`; leading axes broadcast.
    precision
        "ieee" or "tf32".
    **scores
        What a score becomes, the masks, sinks and dropout, as in `oracle`; `Case.meaning` has them. A `HandScore` has `part`.
    """
    batch = numpy.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    rows = (*batch, *q.shape[-3:-1])
    wide = numpy.dtype(numpy.float64 if q.dtype == numpy.float64 else numpy.float32)
    for name, array, shape, dtype in (("out", out, (*rows, v.shape[-1]), q.dtype), ("lse", lse, rows, wide)):
        if array is not None and (array.shape != shape or array.dtype != dtype):
            message = f"{name} is {array.dtype} {array.shape}, expected {dtype} {shape}"
            return Comparison(False, math.inf, 0.0, math.inf, 0.0, message)

    q, k, v = (namespace(x).broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    group = q.shape[-3] // max(k.shape[-3], 1)
    worst = worst_lse = (0.0, 0.0, 0.0, ())
    for *element, head in numpy.ndindex(rows[:-1]) if out.size else ():
        at = tuple(slice(i, i + 1) for i in (*element, head))  # slices, so that one head still has its axis
        source = (*at[:-1], slice(head // group, head // group + 1))
        inputs = q[at], k[source], v[source]
        truth, true_lse, allowed, lse_allowed = _bound(*inputs, precision, part_of(scores, at))
        worst = max(worst, closest(distance(out[at], truth).max(axis=-1), allowed, (*element, head)))
        if lse is not None:
            worst_lse = max(worst_lse, closest(distance(lse[at], true_lse), lse_allowed, (*element, head)))

    message = "; ".join(describe(name, *row) for name, row in (("out", worst), ("lse", worst_lse)))
    return Comparison(max(worst[0], worst_lse[0]) <= 1, *worst[1:3], *worst_lse[1:3], message)


@numpy.errstate(all="ignore")
def _bound(q: Array, k: Array, v: Array, precision: str, scores: dict[str, Any]) -> tuple[Array, Array, Array, Array]:
    """Return, for one head, the true result and log-sum-exp, and for each row what either may be off by."""
    plain, plain_lse = oracle.naive(q, k, v, precision=precision, **scores)
    arithmetic = arithmetic_of(q.dtype, precision)
    dtype, len_kv = q.dtype, k.shape[-2]
    q, k, v = (x.astype(numpy.float64) for x in (q, k, v))
    whole, lse = oracle.probabilities(q, k, **scores)
    seen, p = oracle.seen_pairs(whole, scores), oracle.dropped(whole, scores)
    out = oracle.weighted_sum(p, v, seen)

    random, steady, lse_steady = score_errors(q, k, whole, lse, arithmetic, scores)
    steady = steady + (0 if scores.get("keep") is None else 2 * arithmetic.sum)
    size = finite(out).max(axis=-1) + TAIL * finite(p**2 @ finite(v) ** 2).max(axis=-1) ** 0.5
    floor = (random + steady + arithmetic.factor + arithmetic.summation(len_kv) + arithmetic.output) * size
    if formats_end(scores):
        of_ends = oracle.dropped(lost(whole, lse, dtype, scores), scores)
        floor = floor + (of_ends @ finite(v)).max(axis=-1) + smallest(dtype) * seen.any(axis=-1)
    computed = 2 if dtype == numpy.float64 else 1  # results that err: the oracle as well, or the other alone
    allowed = 2 * finite(plain - out).max(axis=-1) + computed * floor
    return out, lse, allowed, 2 * finite(plain_lse - lse) + computed * (TAIL * random + lse_steady)


def part_of(scores: dict[str, Any], index: tuple[slice, ...]) -> dict[str, Any]:
    """Return the options of the scores for some batch elements and query heads, by a slice for each of these axes."""
    part = dict(scores)
    for name, trailing in (("bias", 2), ("seen", 2), ("keep", 2), ("alibi_slopes", 0)):
        if part.get(name) is not None:
            part[name] = part[name][part_index(part[name], trailing, index)]
    if part.get("sinks") is not None:
        part["sinks"] = part["sinks"][..., index[-1]]
    if part.get("score") is not None:
        part["score"] = part["score"].part(index)
    return part


def part_index(x: Array, trailing: int, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return where in `x` some batch elements and heads are: it has the last of these axes, 1 long where all read the same."""
    own = x.shape[: max(0, x.ndim - trailing)]
    return tuple(at if n > 1 else slice(None) for n, at in zip(own, index[len(index) - len(own) :]))


def arithmetic_of(dtype: numpy.dtype, precision: str) -> Arithmetic:
    """Return the arithmetic behind a dtype and a precision, "ieee" or "tf32"."""
    return ARITHMETIC["tf32" if precision == "tf32" else dtype.name]


@numpy.errstate(all="ignore")
def score_errors(
    q: Array, k: Array, p: Array, lse: Array, arithmetic: Arithmetic, scores: dict[str, Any]
) -> tuple[Array, Array, Array]:
    """Return, from float64 arrays, `random`, `steady`, and the floor of the log-sum-exp without its `TAIL * random`.

    `p` is the softmax before dropout.
    """
    u, len_kv = arithmetic.sum, k.shape[-2]
    random, steady = capped_errors(q, k, arithmetic, scores)
    if any(scores.get(name) is not None for name in ("score", "bias", "alibi_slopes")):
        steepest, of_expression, added = _of_pairs(q, k, p, scores)
        random, steady = random * steepest, steady * steepest + (EXPRESSION * of_expression + ADDED * added) * u
    sinks = scores.get("sinks")
    if sinks is not None:
        n = math.prod(sinks.shape[:-1])
        steady = steady + (3 * (finite(lse) + math.log(max(len_kv + n, 1))) + n + 4) * u
    return random, steady, steady + (math.sqrt(len_kv) + 4 * (1 + finite(lse))) * u


@numpy.errstate(all="ignore")
def capped_errors(q: Array, k: Array, arithmetic: Arithmetic, scores: dict[str, Any]) -> tuple[Array, Array]:
    """Return `random` and `steady` of scores after scale and softcap."""
    u, dim = arithmetic.sum, k.shape[-1]
    largest = abs(scores["scale"]) * norms(2, q, k)
    random = abs(scores["scale"]) * arithmetic.product * norms(4, q, k)
    steady = (arithmetic.summation(dim) + 4 * u) * largest
    if scores.get("softcap") is not None:
        steady = steady + BENT * u * namespace(q).minimum(largest, scores["softcap"])
    return random, steady


def _of_pairs(q: Array, k: Array, p: Array, scores: dict[str, Any]) -> tuple[Array | float, Array | float, Array]:
    """Return, for each row, the steepest slope, the largest size within the expression, and that of what is added up behind it."""
    xp, score = namespace(q), scores.get("score")
    s = oracle.capped_scores(q, k, scores["scale"], scores.get("softcap"))
    counts = finite(p) > NOTHING * (finite(p).max(axis=-1, keepdims=True) if p.shape[-1] else 0)

    def largest(x: Array) -> Array:
        return xp.where(counts, finite(x), 0).max(axis=-1) if s.shape[-1] else xp.zeros(s.shape[:-1])

    value = s if score is None else score.value(s)
    added = abs(value)
    if scores.get("bias") is not None:
        added = added + abs(scores["bias"].astype(numpy.float64))
    if scores.get("alibi_slopes") is not None:
        far = oracle.distances(*s.shape[-2:], xp)
        added = added + abs(scores["alibi_slopes"][..., None, None].astype(numpy.float64)) * far
    if score is None:
        return 1.0, 0.0, largest(added)
    return largest(score.slope(s)), largest((score.size or score.value)(s)), largest(added)


def formats_end(scores: dict[str, Any]) -> bool:
    """Whether a result may consist of P that are far below the largest logit: beside sinks, and where larger ones are dropped."""
    return any(scores.get(name) is not None for name in ("sinks", "keep"))


@numpy.errstate(all="ignore")
def lost(p: Array, lse: Array, dtype: numpy.dtype, scores: dict[str, Any]) -> Array:
    """Return what each P, `(..., len_q, len_kv)`, may lose beside sinks and larger P because its format ends."""
    xp, p, sinks = namespace(p), finite(p), scores.get("sinks")
    shares = xp.zeros((*lse.shape, 0)) if sinks is None else finite(shares_of(sinks, lse))
    top = shares.max(axis=-1, keepdims=True) if shares.shape[-1] else 0
    top = xp.maximum(top, p.max(axis=-1, keepdims=True)) if p.shape[-1] else top
    end = float(ml_dtypes.finfo(dtype).smallest_normal)
    return xp.where(p < end * top, xp.minimum(p, smallest(dtype) * top), 0)


def shares_of(sinks: Array, lse: Array) -> Array:
    """Return the part that each sink has in the softmax of each row, `(*lse.shape, n)`; 0 in a row without any logit."""
    xp = namespace(lse)
    return xp.exp(oracle.sink_logits(sinks, lse) - xp.where(lse == -xp.inf, xp.inf, lse)[..., None])


def smallest(dtype: numpy.dtype) -> float:
    """Return `tiny`: below it a number, or half of it, may be lost."""
    return max(float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2, float(numpy.finfo(oracle.accumulator(dtype)).smallest_normal))


def norms(order: int, rows: Array, keys: Array) -> Array:
    """Return |row|_p |key|_p for each row and the longest key."""
    of_rows, of_keys = ((abs(x) ** order).sum(axis=-1) ** (1 / order) for x in (rows, keys))
    return finite(of_rows) * (finite(of_keys).max() if of_keys.size else 0)


def finite(x: Array) -> Array:
    """Return the magnitudes, 0 for what is not finite."""
    xp = namespace(x)
    return xp.where(xp.isfinite(x), abs(x), 0)


@numpy.errstate(all="ignore")
def distance(result: Array, truth: Array) -> Array:
    """Return the differences: infinite where only one of the two is finite, or neither is and they differ."""
    xp = namespace(truth)
    result = result.astype(numpy.float64)
    same = (result == truth) | (xp.isnan(result) & xp.isnan(truth))
    difference = xp.where(same, 0, abs(result - truth))
    return xp.where(xp.isnan(difference), xp.inf, difference)


@numpy.errstate(all="ignore")
def closest(error: Array, allowed: Array, head: tuple[int, ...]) -> tuple[float, float, float, tuple[int, ...]]:
    """Return error/allowed, error, allowed and index of the row with the largest error/allowed."""
    error, allowed = error.ravel(), allowed.ravel()
    ratio = namespace(error).where(error > 0, error / allowed, 0)
    row = int(ratio.argmax())
    return float(ratio[row]), float(error[row]), float(allowed[row]), (*head, row)


def describe(name: str, ratio: float, error: float, allowed: float, row: tuple[int, ...]) -> str:
    if not row:
        return f"{name}: nothing to judge"
    what = "NaN or infinity out of place" if math.isinf(error) else f"error {error:.2e}, allowed {allowed:.2e}"
    return f"{name}: {what}, {'worst' if ratio <= 1 else 'FAILS'} in row {row}"
