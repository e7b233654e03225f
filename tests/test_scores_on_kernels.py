"""Scores, masks, biases, ALiBi and dropout in kernels, executed on the host, against the oracle and against NumPy's dropout."""

from itertools import product

import numpy
import pytest
from hand_masks import MASKS
from hand_scores import SCORES
from score_kernels import BATCH, BIASES, DIM, DTYPES, HEADS, HEADS_KV, LEN_KV, LEN_Q, PAIRS, everything, given, inputs, judged
from thinned import thinned

from cupy_flash import UnsupportedError, attention, dropout_mask, plan_attention, plan_attention_backward
from cupy_flash.machine import host

KINDS = [("75", "float16"), ("80", "bfloat16"), ("90a", "float16"), ("80", "float32"), ("75", "float32")]


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def on_host(kind, options, hand, wrt=()):
    """Judged on the host, by the kernels that are meant for the architecture."""
    arch, dtype = kind
    forward, backward = judged(dtype, options, hand, {"backend": "host", "arch": arch}, wrt=wrt)
    assert forward.file == ("fwd_hopper" if arch == "90a" else "fwd_v2")
    asked = {"score", "mask", "bias", "alibi_slopes", "dropout"} & options.keys()
    assert backward.file in (("bwd_hopper", "bwd_hopper_wide") if arch == "90a" and len(asked) < 3 else ("bwd_v2",))
    return forward


@pytest.mark.parametrize("asked", thinned(product(SCORES, KINDS[1:3]), keep=50), ids=lambda asked: f"{asked[0]}-{asked[1][0]}")
def test_scores(asked, schedule):
    example, kind = asked
    arrays, score = given(example)
    on_host(kind, {"score": example.text, "arrays": arrays}, {"score": score}, tuple(score.arrays))


@pytest.mark.parametrize("text", thinned(["where(score > 0, score + 1, score)", "score + floor(score * 3)"]))
def test_a_slope_of_one_is_no_sum(text):
    q, k, v, _ = inputs("float32")
    assert abs(attention(q, k, v, score=text, backend="host") - attention(q, k, v, score=text)).max() <= 2**-16


@pytest.mark.parametrize("asked", thinned(product(MASKS, KINDS[1:3]), keep=24), ids=lambda asked: f"{asked[0]}-{asked[1]}")
def test_masks(asked, schedule):
    example, kind = asked
    arrays, seen = given(example)
    on_host(kind, {"mask": example.text, "arrays": arrays}, {"seen": seen})


@pytest.mark.parametrize("kind", thinned(KINDS, keep=5, first=1), ids="-".join)
def test_everything_at_once(kind, schedule):
    config = on_host(kind, *everything(kind[1]), ("bias", "alibi_slopes", "level")).config
    assert config.SCORES == "EXPRESSION" and config.MASKED_PAIRS and config.DROPOUT and config.EXPLICIT_SCORES


TWO = {"alibi, dropout": ("alibi_slopes", "dropout", "seed"), "alibi, mask": ("alibi_slopes", "mask")}
MEANT = {"dropout": ("keep", "keep_scale"), "mask": ("seen",), "seed": ()}


@pytest.mark.release
@pytest.mark.parametrize("two", thinned(TWO))
def test_two_at_once_on_sm_90a(two, schedule):
    options, hand = everything("float16")
    meant = {name for option in TWO[two] for name in MEANT.get(option, (option,))} | {"last_key", "softcap"}
    options = {name: x for name, x in options.items() if name in (*TWO[two], "causal", "softcap")}
    kernel = on_host(("90a", "float16"), options, {name: x for name, x in hand.items() if name in meant})
    assert kernel.file == "fwd_hopper" and kernel.config.SCORES != "UNCHANGED"


@pytest.mark.release  # test_staged_bias.py and test_read_hopper.py have biases and their gradients
@pytest.mark.parametrize("asked", product(BIASES, ("float16", "float32")), ids="-".join)
def test_biases(asked):
    shape, dtype = asked
    bias = BIASES[shape](numpy.random.default_rng(2)).astype(dtype)
    on_host(("90a", "float16"), {"bias": bias}, {"bias": bias}, "bias")


@pytest.mark.release  # test_read_hopper_walks.py has slopes with a window
def test_alibi_with_a_window():
    slopes = numpy.array([0.5, 0.25, 0.125, 0.0625], numpy.float32)
    shift = LEN_KV - LEN_Q
    options = {"alibi_slopes": slopes, "window": (20, 9)}
    on_host(("80", "float16"), options, {"alibi_slopes": slopes, "first_key": shift - 20, "last_key": shift + 9})


@pytest.mark.parametrize("kind", thinned(KINDS[:3], keep=3), ids="-".join)  # others in test_dropout_in_kernels.py
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


@pytest.mark.parametrize("arch", ["75", "80", "90a"])
def test_other_lengths_and_contents_compile_nothing(arch):
    """No kernel of either direction: attention, its gradients, lists of tiles and sums of what scores read."""

    def kernels(len_q, len_kv, number):
        rng = numpy.random.default_rng(number)
        q, dout = (numpy.zeros((BATCH, HEADS, len_q, DIM), numpy.float16) for _ in range(2))
        k = numpy.zeros((BATCH, HEADS_KV, len_kv, DIM), numpy.float16)
        options = {"score": "score * t[h] + u[kv_idx - q_idx + 8] + c", "mask": "doc[q_idx] == doc_kv[kv_idx]"}
        arrays = {"t": rng.random(HEADS), "u": rng.random(16 + number), "c": number / 3}
        arrays |= {"doc": rng.integers(0, 4, len_q), "doc_kv": rng.integers(0, 4, len_kv)}
        bias = rng.random((HEADS, len_q, len_kv)).astype(numpy.float32)
        options |= {"dropout": number / 8, "seed": (number, number), "arrays": arrays, "bias": bias}
        lse, where = numpy.zeros(q.shape[:-1], numpy.float32), {"backend": "host", "arch": arch}
        plan = plan_attention(q, k, k, **where, **options)
        backward = plan_attention_backward(dout, q, k, k, q, lse, wrt=("t", "u", "bias"), **where, **options)
        found = [x._execution.preparation.kernel for x in (plan, backward)]
        return [plan.kernel, *backward.kernels, *found]

    assert kernels(1000, 1200, 1) == kernels(900, 3000, 2) == kernels(4096, 700, 3)


@pytest.mark.parametrize("arch", thinned(["80", "90a"]))
def test_masked_pairs_keep_what_they_hold_to_themselves(arch):
    q, k, v, dout = inputs("bfloat16")  # as those of test_tile_lists.py, whose kernels these are
    mask = numpy.ones((LEN_Q, LEN_KV), bool)
    mask[:, 17] = False
    mask[40] = False
    plan = plan_attention(q, k, v, backend="host", arch=arch, mask=mask, return_lse=True)
    out, lse = plan(q, k, v, mask=mask)
    assert (out[:, :, 40] == 0).all() and numpy.isneginf(lse[:, :, 40]).all()
    k[:, :, 17] = numpy.nan
    poisoned, _ = plan(q, k, v, mask=mask)
    assert (poisoned == out).all()
    backward = plan_attention_backward(dout, q, k, v, out, lse, backend="host", arch=arch, mask=mask)
    k[:, :, 17], v[:, :, 17] = 0, numpy.nan  # so dP of its pairs is NaN, and P is 0
    dq, dk, dv = backward(dout, q, k, v, out, lse, mask=mask)
    assert (dq[:, :, 40] == 0).all() and (dk[:, :, 17] == 0).all() and (dv[:, :, 17] == 0).all()
    assert numpy.isfinite(dq).all() and numpy.isfinite(dk).all()


def test_what_kernels_do_not_take_is_said():
    q, k, v, _ = inputs("float16")
    with pytest.raises(UnsupportedError, match=r"^algorithm: expected 'auto' or 'v2' with score, mask, .* got 'v1'"):
        plan_attention(q, k, v, backend="host", algorithm="v1", alibi_slopes=numpy.ones(HEADS, numpy.float32))
    with pytest.raises(UnsupportedError, match=r"^arrays: expected at most 6 of them for kernels, got 7"):
        names = [f"a{i}" for i in range(7)]
        arrays = {name: numpy.ones(HEADS, numpy.float32) for name in names}
        plan_attention(q, k, v, backend="host", score=" + ".join(["score", *(f"{name}[h]" for name in names)]), arrays=arrays)
    with pytest.raises(UnsupportedError, match=r"^arrays\['deep'\]: expected at most 4 axes for kernels, got shape"):
        arrays = {"deep": numpy.ones((1,) * 5, numpy.float32)}
        plan_attention(q, k, v, backend="host", score="score + deep[0, 0, 0, 0, 0]", arrays=arrays)
