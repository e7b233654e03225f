"""How results of kernels with scores, masks, biases, ALiBi and dropout are judged, on the host and on a device."""

import math

import ml_dtypes
import numpy
from hand_scores import SCORES, Grid

from cupy_flash import KeyRanges, dropout_mask, plan_attention, plan_attention_backward
from cupy_flash.judge.compare import TAIL
from cupy_flash.judge.oracle import capped_scores, naive, oracle
from cupy_flash.judge.oracle_gradients import naive_gradients, oracle_gradients, pairs_of

DTYPES = {"float16": numpy.dtype("float16"), "bfloat16": numpy.dtype(ml_dtypes.bfloat16), "float32": numpy.dtype("float32")}
BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV, DIM = 2, 4, 2, 75, 93, 40  # off every tile edge
SCALE = 1 / math.sqrt(DIM)
GRID = Grid.of((BATCH,), HEADS, HEADS_KV, LEN_Q, LEN_KV)
PAIRS = (BATCH, HEADS, LEN_Q, LEN_KV)


def inputs(dtype, seed=0):
    rng = numpy.random.default_rng(seed)
    shapes = (HEADS, LEN_Q), (HEADS_KV, LEN_KV), (HEADS_KV, LEN_KV), (HEADS, LEN_Q)
    return [rng.standard_normal((BATCH, *shape, DIM)).astype(DTYPES[dtype]) for shape in shapes]


def judged(
    dtype, options, hand, where, place=lambda x: x, fetch=lambda x: x, wrt=(), inputs_given=None, deterministic=False
):
    """Both directions by kernels, within twice the error of the textbook's formula, and three times; the plans of both kernels.

    `where` are the options that say where: backend and architecture. `place` brings arrays there, and `fetch` back. `wrt` names
    what else the backward is asked for. `inputs_given` are other inputs.
    """
    given, wrt = options, (wrt,) if isinstance(wrt, str) else wrt
    q, k, v, dout = inputs(dtype) if inputs_given is None else inputs_given
    scale = 1 / math.sqrt(q.shape[-1])
    options = {name: placed(x, place) for name, x in options.items()}
    operands = {name: x for name, x in options.items() if name in ("arrays", "bias", "alibi_slopes", "seed", "sinks")}
    if "mask" in options and not isinstance(options["mask"], str):
        operands["mask"] = options["mask"]
    there = [place(x) for x in (q, k, v)]
    plan = plan_attention(*there, return_lse=True, **where, **options)
    results = plan(*there, **operands)
    out, lse = map(fetch, results)
    exact, exact_lse = oracle(q, k, v, scale=scale, **hand)
    plain, _ = naive(q, k, v, scale=scale, **hand)
    unit = float(ml_dtypes.finfo(q.dtype).eps)
    largest = largest_score(q, k, hand)
    close(out, exact, plain, 2, unit, largest)
    assert (numpy.isneginf(lse) == numpy.isneginf(exact_lse)).all()
    seen = ~numpy.isneginf(exact_lse)
    assert abs(lse[seen] - exact_lse[seen]).max(initial=0) <= 8 * 2**-24 * largest

    # What was left is given to the backward, as users do.
    backward = plan_attention_backward(place(dout), *there, *results, deterministic=deterministic, **where, **options, wrt=wrt)
    gradients = backward(place(dout), *there, *results, **operands)
    exacts, plains = oracle_gradients(dout, q, k, v, scale=scale, **hand), naive_gradients(dout, q, k, v, scale=scale, **hand)
    for got, right, plainly in zip(map(fetch, gradients), exacts, plains):
        close(got, right, plainly, 3, unit, largest)
    behind = len(wrt) - (backward.kernel.config.STORE_DBIAS and "bias" in wrt)  # what the first kernel does not store
    assert backward.kernels[0] == backward.kernel and len(backward.kernels) >= 1 + behind
    assert len(backward.kernels) > 1 if behind else len(backward.kernels) == 1
    assert {kernel.file for kernel in backward.kernels[1:]} <= {"bwd_scores", "bwd_scores_hopper"}
    for name in wrt:
        (got, like), right, plainly = of_name(name, gradients, given), *(of_name(name, x, given)[0] for x in (exacts, plains))
        got = fetch(got)
        assert got.shape == right.shape == numpy.shape(like) and got.dtype == numpy.asarray(like).dtype
        told = hand | {"scale": scale}
        handed = got.astype(float) + of_rounded_results(name, out, dout, q, k, v, told)
        close(handed, right, plainly, 3, unit, largest, norm_of_terms(name, dout, q, k, v, told))
    return plan.kernel, backward.kernel


def of_name(name, gradients, options):
    """The gradient of what `wrt` calls so, and what it is of."""
    if name in options.get("arrays", ()):
        return gradients.darrays[name], options["arrays"][name]
    return getattr(gradients, f"d{name}"), options[name]


def placed(x, place):
    """An option with its arrays where kernels are executed; numbers stay."""
    if isinstance(x, dict):
        return {name: placed(value, place) for name, value in x.items()}
    if isinstance(x, KeyRanges):
        return KeyRanges(placed(x.start, place), placed(x.stop, place))
    return place(x) if isinstance(x, numpy.ndarray) else x


def largest_score(q, k, hand):
    """A bound of scores in units of log 2, whose roundings the exponential turns into errors of probabilities."""
    s = numpy.repeat(k.astype(float), q.shape[-3] // k.shape[-3], axis=-3)
    s = q.astype(float) @ s.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    made = hand["score"].value(s) if "score" in hand else s
    added = sum(abs(hand[name]).max(initial=0, where=numpy.isfinite(hand[name])) for name in ("bias",) if name in hand)
    added += abs(hand["alibi_slopes"]).max() * max(q.shape[-2], k.shape[-2]) if "alibi_slopes" in hand else 0
    return 2 + 1.45 * (abs(s).max() + abs(made).max() + added)


def norm_of_terms(name, dout, q, k, v, told):
    """Of what pairs add to one element of an array of the score; 0 for anything else, of which little cancels."""
    score = told.get("score")
    if score is None or name not in score.arrays:
        return 0.0
    partial, summed = score.arrays[name]
    wide = [x.astype(float) for x in (dout, q, k, v)]
    terms = partial(capped_scores(*wide[1:3], told["scale"])) * pairs_of(*wide, None, told).dlogits
    return float(numpy.max(summed(terms**2)) ** 0.5)


def of_rounded_results(name, out, dout, q, k, v, told):
    """What an element of an array of the score lacks because the backward was handed a result that has been rounded.

    Of a sum that cancels it can be many times what is rounded in the backward, and by chance as little as in `naive_gradients`.
    """
    score = told.get("score")
    if score is None or name not in score.arrays:
        return 0.0
    partial, summed = score.arrays[name]
    wide = [x.astype(float) for x in (dout, q, k, v)]
    pairs = pairs_of(*wide, None, told)
    more = ((out.astype(float) - pairs.out) * wide[0]).sum(axis=-1)
    return summed(partial(pairs.s) * pairs.p * more[..., None])


def close(got, exact, plain, times, unit, largest, norm=0.0):
    """Elementwise within some times the largest error of `plain`, and roundings: of the result, and of scores in float32.

    Of a sum of terms that cancel, roundings of scores, which are independent, are a share of the 2-norm of its terms, `TAIL` times.
    """
    assert numpy.isfinite(got.astype(float)).all()
    size = abs(exact).max()
    room = times * abs(plain.astype(float) - exact).max() + unit * size + 2**-24 * largest * max(8 * size, TAIL * norm)
    assert abs(got.astype(float) - exact).max() <= room


def given(example, grid=GRID):
    declared = example.arrays(grid)
    arrays = {name: array for name, (_, array) in declared.items()}
    return arrays, example.hand(grid, arrays)


def everything(dtype):
    """All that there is at once, and what it means."""
    rng = numpy.random.default_rng(1)
    arrays, score = given(next(example for example in SCORES if example.name == "gate"))
    bias = rng.standard_normal((HEADS, LEN_KV, LEN_Q)).astype(DTYPES[dtype]).swapaxes(-1, -2)[:, ::-1]
    bias[..., 5:7] = -numpy.inf
    seen = rng.random((BATCH, 1, LEN_Q, LEN_KV)) < 0.7
    slopes = rng.uniform(0.01, 0.2, (BATCH, HEADS)).astype(numpy.float32)
    keep = dropout_mask(PAIRS, 0.25, (1 << 40, 3))
    options = {"score": "score * sigmoid(score - level[h])", "arrays": arrays, "bias": bias, "alibi_slopes": slopes, "mask": seen}
    hand = {"score": score, "bias": bias, "alibi_slopes": slopes, "seen": seen, "keep": keep, "keep_scale": 4 / 3}
    options |= {"dropout": 0.25, "seed": (1 << 40, 3), "causal": True, "softcap": 5.0}
    return options, hand | {"last_key": LEN_KV - LEN_Q, "softcap": 5.0}


BIASES = {
    "of all pairs": lambda rng: rng.standard_normal((BATCH, HEADS, LEN_Q, LEN_KV)),
    "of heads": lambda rng: rng.standard_normal((HEADS, LEN_Q, LEN_KV)),
    "of keys": lambda rng: rng.standard_normal((BATCH, 1, 1, LEN_KV)),
    "of pairs, backwards": lambda rng: rng.standard_normal((LEN_KV, LEN_Q))[::-1, ::-1].T,
}
