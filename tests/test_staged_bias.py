"""A bias that comes by TMA in the kernels for sm_90a, and terms so large that scores are scaled one by one, on the host."""

from itertools import product

import numpy
import pytest
from score_kernels import DTYPES, judged
from thinned import quick, thinned

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.machine import host, machine_code, nvrtc

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV = 2, 4, 2, 141, 203  # off every tile edge, and an odd number of keys
WHERE = {"backend": "host", "arch": "90a"}
SHAPES = {"float16, 40": ("float16", 40), "bfloat16, 128": ("bfloat16", 128), "float16, 160": ("float16", 160)}
SHAPES["bfloat16, 256"] = ("bfloat16", 256)
BIASES = {"all": (BATCH, HEADS), "heads": (1, HEADS), "batch": (BATCH, 1), "one": (1, 1)}
MASKS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "window": ({"window": (40, 0)}, {"first_key": LEN_KV - LEN_Q - 40, "last_key": LEN_KV - LEN_Q}),
    "pairs": ({"mask": "(q_idx + kv_idx) % 3 > 0"}, {"seen": (numpy.arange(LEN_Q)[:, None] + numpy.arange(LEN_KV)) % 3 > 0}),
}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def inputs(dtype, dim):
    rng = numpy.random.default_rng(3)
    shapes = (HEADS, LEN_Q), (HEADS_KV, LEN_KV), (HEADS_KV, LEN_KV), (HEADS, LEN_Q)
    return [rng.standard_normal((BATCH, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


def attend(q, k, v, return_lse=False, **options):
    operands = {name: x for name, x in options.items() if name in ("arrays", "bias")}
    return plan_attention(q, k, v, return_lse=return_lse, **options, **WHERE)(q, k, v, **operands)


def rows_apart(shape, dtype, multiple):
    """A bias whose rows begin at a multiple of so many elements; what lies between them is NaN."""
    rng = numpy.random.default_rng(5)
    whole = numpy.full((*shape, LEN_Q, -(-LEN_KV // multiple) * multiple), numpy.nan).astype(DTYPES[dtype])
    bias = whole[..., :LEN_KV]
    values = rng.standard_normal(bias.shape) * 3
    bias[...] = numpy.where(rng.random(bias.shape) < 0.05, -numpy.inf, values).astype(bias.dtype)
    return bias


CASES = list(product(SHAPES, MASKS, BIASES))
FLOAT32 = [(*case, "float32") for case in CASES]
TESTED = thinned([(*case, "") for case in CASES], keep=64, first=14) + thinned(FLOAT32, keep=64, first=9)


@pytest.mark.parametrize("case", TESTED, ids=", ".join)
def test_a_bias_that_comes_with_a_tile(case, schedule):
    """Of the dtype of queries by ldmatrix; of float32 two pairs at a time."""
    (dtype, dim), (of_mask, hand_mask), shape, of_bias = SHAPES[case[0]], MASKS[case[1]], BIASES[case[2]], case[3]
    bias = rows_apart(shape, of_bias or dtype, 4 if of_bias else 8)
    hand = {"bias": bias.astype(numpy.float64), **hand_mask}
    kernel, backward = judged(dtype, {"bias": bias, **of_mask}, hand, WHERE, inputs_given=inputs(dtype, dim))
    assert ("BiasElement", "float") in kernel.expressions.constants or not of_bias
    assert backward.file == ("bwd_hopper" if dim <= 128 else "bwd_hopper_wide")
    assert backward.config.STAGED_BIAS is (dim <= 192)  # of wider heads, tiles fill the shared memory
    assert kernel.file == "fwd_hopper" and kernel.config.STAGED_BIAS and not kernel.config.EXPLICIT_SCORES


NOT_FOUND = [("float16", 1, False), ("float16", 2, False), ("float16", 8, True), ("float32", 1, False), ("float32", 4, True)]


@pytest.mark.parametrize("dtype, multiple, staged", quick(NOT_FOUND, *NOT_FOUND[2:], spread=True))
def test_lanes_read_a_bias_whose_rows_tma_cannot_find(dtype, multiple, staged):
    bias = rows_apart((1, HEADS), dtype, multiple)
    q, k, v, _ = inputs("float16", 64)
    plan = plan_attention(q, k, v, bias=bias, **WHERE)
    assert (plan.kernel.file, plan.kernel.config.STAGED_BIAS) == ("fwd_hopper", staged)
    staged_one = attend(q, k, v, bias=rows_apart((1, HEADS), dtype, 8))
    assert abs(plan(q, k, v, bias=bias).astype("f4") - staged_one.astype("f4")).max() <= 2**-10 * abs(staged_one).max()


BESIDE = {"nothing": {}, "causal": {"causal": True}, "dropout": {"dropout": 0.1, "seed": 1}, "mask": {"mask": "kv_idx < n[b]"}}
BESIDE["mask and dropout"] = BESIDE["mask"] | BESIDE["dropout"]
BESIDE["lengths"] = {f"seqlens_{side}": numpy.full(BATCH, 500) for side in ("q", "kv")}
# Bytes of the forward and of the backward, as found.
SPILLED = {(128, beside): (0, 8) for beside in BESIDE} | {(128, "mask and dropout"): (32, 8), (128, "lengths"): (0, 16)}


@pytest.mark.release
@pytest.mark.parametrize("dim, beside", list(product((64, 128, 192), BESIDE)))
def test_few_registers_are_spilled_for_a_bias_of_float32(dim, beside):
    pytest.importorskip("cupy")
    q, lse = numpy.empty((BATCH, HEADS, 1000, dim), numpy.float16), numpy.zeros((BATCH, HEADS, 1000), numpy.float32)
    options = {"bias": numpy.empty((HEADS, 1000, 1000), numpy.float32), **BESIDE[beside], **WHERE}
    options |= {"arrays": {"n": numpy.array([700, 900])}} if "mask" in options else {}
    kernels = plan_attention(q, q, q, **options).kernel, plan_attention_backward(q, q, q, q, q, lse, **options).kernel
    assert all(kernel.config.STAGED_BIAS for kernel in kernels)
    found = [machine_code.read(nvrtc.compile_plan(kernel)[0])[kernel.file].stack_bytes for kernel in kernels]
    assert all(bytes <= most for bytes, most in zip(found, SPILLED.get((dim, beside), (0, 0)), strict=True)), found


LARGE = {"in a row": -1e9, "in all rows": -1e9, "above": 3e7, "beyond all": -3e38}


@pytest.mark.parametrize("where", LARGE)
@pytest.mark.parametrize("dtype", thinned(["float16", "bfloat16"]))
def test_large_terms_are_added_exactly(dtype, where):
    """A term that all keys of a row have changes its lse alone, however large it is. What scores differ by is lost in it."""
    q, k, v, _ = inputs(dtype, 64)
    rows = slice(70, 90) if where == "in a row" else slice(None)
    t = numpy.zeros((LEN_Q, LEN_KV), numpy.float32)
    t[rows] = LARGE[where]
    options = {"score": "score + t[q_idx, kv_idx]", "arrays": {"t": t}, **WHERE}
    plan = plan_attention(q, k, v, return_lse=True, **options)
    assert plan.kernel.file == "fwd_hopper" and plan.kernel.config.SCORES == "PLUS_TERM"
    out, lse = plan(q, k, v, arrays={"t": t})
    mean = v.astype("f4").mean(axis=-2, keepdims=True).repeat(HEADS // HEADS_KV, axis=-3)
    largest = abs(v.astype("f4")).max()
    unit = float(numpy.finfo(numpy.float16).eps if dtype == "float16" else 2**-7)
    if where == "beyond all":  # in units of products it is -inf
        assert (out == 0).all() and numpy.isneginf(lse).all()
        return
    assert abs(lse[..., rows] - LARGE[where]).max() <= 2**-23 * abs(LARGE[where]) + 8
    if abs(LARGE[where]) >= 1e9:  # a unit in the last place is 64, so that all scores are the same
        assert abs(out[..., rows, :].astype("f4") - mean).max() <= 2 * unit * largest
    else:
        assert numpy.isfinite(out.astype("f4")).all()
    plain = attend(q, k, v)
    others = numpy.delete(numpy.arange(LEN_Q), rows)
    difference = out[..., others, :].astype("f4") - plain[..., others, :].astype("f4")
    assert abs(difference).max(initial=0) <= unit * largest


def test_a_maximum_may_become_large_and_ordinary_again():
    """Some keys at -1e9 come first, and last; in between others are seen."""
    q, k, v, _ = inputs("float16", 64)
    t = numpy.zeros((LEN_Q, LEN_KV), numpy.float32)
    t[:, :80] = t[:, 150:] = -1e9
    options = {"score": "score + t[q_idx, kv_idx]", "arrays": {"t": t}}
    got, lse = attend(q, k, v, return_lse=True, **options)
    want, want_lse = attend(q, k[..., 80:150, :], v[..., 80:150, :], return_lse=True)
    assert abs(got.astype("f4") - want.astype("f4")).max() <= 2**-10 * abs(v).max()
    assert abs(lse - want_lse).max() <= 1e-5
