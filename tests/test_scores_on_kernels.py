"""Scores, masks, biases, ALiBi and dropout in kernels, executed on the host, against the oracle and against NumPy's dropout."""

import math

import ml_dtypes
import numpy
import pytest
from hand_scores import MASKS, SCORES, Grid
from thinned import thinned

from cupy_flash import UnsupportedError, attention_vjp, dropout_mask, plan_attention, plan_attention_backward
from cupy_flash.judge.oracle import naive, oracle
from cupy_flash.judge.oracle_gradients import naive_gradients, oracle_gradients
from cupy_flash.machine import host

DTYPES = {"float16": numpy.dtype("float16"), "bfloat16": numpy.dtype(ml_dtypes.bfloat16), "float32": numpy.dtype("float32")}
KINDS = [("75", "float16"), ("80", "bfloat16"), ("90a", "float16"), ("80", "float32"), ("75", "float32")]
BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV, DIM = 2, 4, 2, 75, 93, 40  # off every tile edge
SCALE = 1 / math.sqrt(DIM)
GRID = Grid.of((BATCH,), HEADS, HEADS_KV, LEN_Q, LEN_KV)
PAIRS = (BATCH, HEADS, LEN_Q, LEN_KV)


@pytest.fixture(params=host.SCHEDULES)
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def inputs(dtype, seed=0):
    rng = numpy.random.default_rng(seed)
    shapes = (HEADS, LEN_Q), (HEADS_KV, LEN_KV), (HEADS_KV, LEN_KV), (HEADS, LEN_Q)
    return [rng.standard_normal((BATCH, *shape, DIM)).astype(DTYPES[dtype]) for shape in shapes]


def judged(kind, options, hand):
    """Both directions by kernels, within the bounds of design: twice the error of the textbook's formula, and three times."""
    arch, dtype = kind
    q, k, v, dout = inputs(dtype)
    operands = {name: x for name, x in options.items() if name in ("arrays", "bias", "alibi_slopes", "seed", "sinks")}
    if isinstance(options.get("mask"), numpy.ndarray):
        operands["mask"] = options["mask"]
    plan = plan_attention(q, k, v, backend="host", arch=arch, return_lse=True, **options)
    assert plan.kernel.file == ("fwd_hopper" if arch == "90a" else "fwd_v2")
    out, lse = plan(q, k, v, **operands)
    exact, exact_lse = oracle(q, k, v, scale=SCALE, **hand)
    plain, _ = naive(q, k, v, scale=SCALE, **hand)
    unit = float(ml_dtypes.finfo(q.dtype).eps)
    largest = largest_score(q, k, hand)
    close(out, exact, plain, 2, unit, largest)
    assert (numpy.isneginf(lse) == numpy.isneginf(exact_lse)).all()
    seen = ~numpy.isneginf(exact_lse)
    assert abs(lse[seen] - exact_lse[seen]).max(initial=0) <= 8 * 2**-24 * largest

    # What was left is given to the backward, as users do.
    backward = plan_attention_backward(dout, q, k, v, out, lse, backend="host", arch=arch, **options)
    assert backward.kernel.file == ("bwd_hopper_wide" if arch == "90a" else "bwd_v2")
    gradients = backward(dout, q, k, v, out, lse, **operands)
    exacts, plains = oracle_gradients(dout, q, k, v, scale=SCALE, **hand), naive_gradients(dout, q, k, v, scale=SCALE, **hand)
    for got, right, plainly in zip(gradients, exacts, plains):
        close(got, right, plainly, 3, unit, largest)
    return plan, backward


def largest_score(q, k, hand):
    """A bound of scores in units of log 2, whose roundings the exponential turns into errors of probabilities."""
    s = numpy.repeat(k.astype(float), HEADS // HEADS_KV, axis=1)
    s = q.astype(float) @ s.swapaxes(-1, -2) * SCALE
    made = hand["score"].value(s) if "score" in hand else s
    added = sum(abs(hand[name]).max(initial=0, where=numpy.isfinite(hand[name])) for name in ("bias",) if name in hand)
    added += abs(hand["alibi_slopes"]).max() * max(LEN_Q, LEN_KV) if "alibi_slopes" in hand else 0
    return 2 + 1.45 * (abs(s).max() + abs(made).max() + added)


def close(got, exact, plain, times, unit, largest):
    """Elementwise within some times the largest error of `plain`, and roundings: of the result, and of scores in float32."""
    assert numpy.isfinite(got.astype(float)).all()
    room = times * abs(plain.astype(float) - exact).max() + (unit + 8 * 2**-24 * largest) * abs(exact).max()
    assert abs(got.astype(float) - exact).max() <= room


def given(example, grid=GRID):
    declared = example.arrays(grid)
    arrays = {name: array for name, (_, array) in declared.items()}
    return arrays, example.hand(grid, arrays)


@pytest.mark.parametrize("kind", KINDS[1:3], ids="-".join)
@pytest.mark.parametrize("example", thinned(SCORES, keep=4), ids=str)
def test_scores(example, kind, schedule):
    arrays, score = given(example)
    judged(kind, {"score": example.text, "arrays": arrays}, {"score": score})


@pytest.mark.parametrize("kind", KINDS[1:3], ids="-".join)
@pytest.mark.parametrize("example", thinned(MASKS, keep=4), ids=str)
def test_masks(example, kind, schedule):
    arrays, seen = given(example)
    judged(kind, {"mask": example.text, "arrays": arrays}, {"seen": seen})


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


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_everything_at_once(kind, schedule):
    plan, _ = judged(kind, *everything(kind[1]))
    config = plan.kernel.config
    assert config.SCORES and config.MASKED_PAIRS and config.DROPOUT and config.EXPLICIT_SCORES


BIASES = {
    "of all pairs": lambda rng: rng.standard_normal((BATCH, HEADS, LEN_Q, LEN_KV)),
    "of heads": lambda rng: rng.standard_normal((HEADS, LEN_Q, LEN_KV)),
    "of keys": lambda rng: rng.standard_normal((BATCH, 1, 1, LEN_KV)),
    "of pairs, backwards": lambda rng: rng.standard_normal((LEN_KV, LEN_Q))[::-1, ::-1].T,
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", thinned(BIASES))
def test_biases(shape, dtype):
    bias = BIASES[shape](numpy.random.default_rng(2)).astype(dtype)
    judged(("90a", "float16"), {"bias": bias}, {"bias": bias})


def test_alibi_with_a_window():
    slopes = numpy.array([0.5, 0.25, 0.125, 0.0625], numpy.float32)
    shift = LEN_KV - LEN_Q
    options = {"alibi_slopes": slopes, "window": (20, 9)}
    judged(("80", "float16"), options, {"alibi_slopes": slopes, "first_key": shift - 20, "last_key": shift + 9})


@pytest.mark.parametrize("kind", KINDS[:3], ids="-".join)
def test_dropout_is_that_of_numpy(kind):
    # With values that are 1 for one key each, out is P: what is dropped is 0, and nothing else is.
    q, k, *_ = inputs(kind[1])
    for first in range(0, LEN_KV, DIM):
        v = numpy.zeros((BATCH, HEADS_KV, LEN_KV, DIM), DTYPES[kind[1]])
        keys = range(first, min(first + DIM, LEN_KV))
        for column, key in enumerate(keys):
            v[:, :, key, column] = 1
        plan = plan_attention(q, k, v, backend="host", arch=kind[0], dropout=0.4, seed=(5, 6))
        out = plan(q, k, v, seed=(5, 6))[..., : len(keys)]
        assert ((out != 0) == dropout_mask(PAIRS, 0.4, (5, 6))[..., keys.start : keys.stop]).all()


def test_other_values_compile_nothing():
    q, k, v, _ = inputs("float16")
    arrays = {"slope": numpy.ones(HEADS, numpy.float32), "gain": 0.5, "shift": 3}
    options = {"score": "score * gain + slope[h] * (kv_idx - shift)", "dropout": 0.1}
    plan = plan_attention(q, k, v, backend="host", arrays=arrays, seed=1, **options)
    others = {"slope": numpy.full(HEADS, 2, numpy.float32), "gain": 0.25, "shift": 4}
    again = plan_attention(q[:, :, :70], k, v, backend="host", arrays=others, seed=(7, 8), **options)
    assert again.kernel == plan.kernel
    assert (plan(q, k, v, arrays=others, seed=1) != plan(q, k, v, arrays=arrays, seed=1)).any()
    assert (plan(q, k, v, arrays=arrays, seed=2) != plan(q, k, v, arrays=arrays, seed=1)).any()


def test_masked_pairs_keep_what_they_hold_to_themselves():
    q, k, v, dout = inputs("float16")
    mask = numpy.ones((LEN_Q, LEN_KV), bool)
    mask[:, 17] = False
    mask[40] = False
    plan = plan_attention(q, k, v, backend="host", mask=mask, return_lse=True)
    out, lse = plan(q, k, v, mask=mask)
    assert (out[:, :, 40] == 0).all() and numpy.isneginf(lse[:, :, 40]).all()
    k[:, :, 17] = numpy.nan
    poisoned, _ = plan(q, k, v, mask=mask)
    assert (poisoned == out).all()
    backward = plan_attention_backward(dout, q, k, v, out, lse, backend="host", mask=mask)
    dq, _, dv = backward(dout, q, numpy.nan_to_num(k), v, out, lse, mask=mask)
    assert (dq[:, :, 40] == 0).all() and (dv[:, :, 17] == 0).all()


def test_what_kernels_do_not_take_is_said():
    q, k, v, dout = inputs("float16")
    lse = numpy.zeros(PAIRS[:3], numpy.float32)
    with pytest.raises(UnsupportedError, match=r"^algorithm: expected 'auto' or 'v2' with score, mask, .* got 'v1'"):
        plan_attention(q, k, v, backend="host", algorithm="v1", alibi_slopes=numpy.ones(HEADS, numpy.float32))
    with pytest.raises(UnsupportedError, match=r"^wrt: expected \(\) on backend 'host', .* no gradients of bias yet"):
        bias = numpy.zeros(PAIRS, numpy.float16)
        plan_attention_backward(dout, q, k, v, q, lse, backend="host", bias=bias, wrt="bias")
    with pytest.raises(UnsupportedError, match=r"^wrt: expected \(\) on backend 'host', .* no gradients of bias yet"):
        attention_vjp(q, k, v, backend="host", bias=bias, wrt="bias")  # and not when its function is called
    with pytest.raises(UnsupportedError, match=r"^arrays: expected at most 6 of them for kernels, got 7"):
        names = [f"a{i}" for i in range(7)]
        arrays = {name: numpy.ones(HEADS, numpy.float32) for name in names}
        plan_attention(q, k, v, backend="host", score=" + ".join(["score", *(f"{name}[h]" for name in names)]), arrays=arrays)
    with pytest.raises(UnsupportedError, match=r"^arrays\['deep'\]: expected at most 4 axes for kernels, got shape"):
        arrays = {"deep": numpy.ones((1,) * 5, numpy.float32)}
        plan_attention(q, k, v, backend="host", score="score + deep[0, 0, 0, 0, 0]", arrays=arrays)
