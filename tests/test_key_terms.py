"""A term of the key alone beside a bias that comes by TMA, on the host against the oracle: what keys have in common is asked once for a tile."""

from itertools import product

import numpy
import pytest
from score_kernels import DTYPES, judged
from thinned import quick, thinned

from cupy_flash import FaultError, SanitizerError, plan_attention, plan_attention_backward
from cupy_flash.judge.oracle import HandScore, oracle
from cupy_flash.machine import host
from cupy_flash.plan.sources import files

HEADS, HEADS_KV, LEN_Q, LEN_KV = 4, 2, 141, 203  # off every tile edge, and an odd number of keys
WHERE = {"backend": "host", "arch": "90a"}
RNG = numpy.random.default_rng(5)
OF_KEYS = RNG.standard_normal((2, LEN_KV)).astype(numpy.float32) * 3
TERMS = {
    "any": OF_KEYS,
    "some masked": numpy.where(RNG.random((2, LEN_KV)) < 0.3, numpy.float32("-inf"), OF_KEYS),
    "padded": numpy.where(numpy.arange(LEN_KV) < [[150], [64]], OF_KEYS, numpy.float32(-1e9)),
    "rising": OF_KEYS + 40 * (numpy.arange(LEN_KV) >= 130).astype(numpy.float32),
}
TERMS["padded from the left"] = TERMS["padded"][:, ::-1].copy()
MASKS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "window": ({"window": (40, 0)}, {"first_key": LEN_KV - LEN_Q - 40, "last_key": LEN_KV - LEN_Q}),
}
SHAPES = {"float16, 40": ("float16", 40), "bfloat16, 64": ("bfloat16", 64), "bfloat16, 128": ("bfloat16", 128)}
SHAPES |= {"float16, 160": ("float16", 160), "bfloat16, 256": ("bfloat16", 256)}
BIASES = {"heads": ((1, HEADS), None), "all": ((2, HEADS), None), "float32": ((1, HEADS), "float32")}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def inputs(dtype, dim, len_q=LEN_Q, len_kv=LEN_KV):
    rng = numpy.random.default_rng(3)
    shapes = (HEADS, len_q), (HEADS_KV, len_kv), (HEADS_KV, len_kv), (HEADS, len_q)
    return [rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


def bias_of(shape, dtype, len_q=LEN_Q, len_kv=LEN_KV):
    """With rows that TMA finds; what lies between them is NaN."""
    whole = numpy.full((*shape, len_q, -(-len_kv // 8) * 8), numpy.nan).astype(DTYPES[dtype])
    bias = whole[..., :len_kv]
    bias[...] = numpy.random.default_rng(9).standard_normal(bias.shape).astype(bias.dtype)
    return bias


def check(shape, mask, bias, t, **more):
    """Both directions, and that both kernels have the term of a key apart."""
    (dtype, dim), (of_mask, hand_mask), (of_bias, wide) = SHAPES[shape], MASKS[mask], BIASES[bias]
    bias = bias_of(of_bias, wide or dtype)
    hand = {"bias": bias.astype(float) + t.astype(float)[:, None, None], **hand_mask}
    options = {"bias": bias, "score": "score + t[b, kv_idx]", "arrays": {"t": t}, **of_mask}
    kernels = judged(dtype, options, hand, WHERE, inputs_given=inputs(dtype, dim), **more)
    assert kernels[0].file == "fwd_hopper" and kernels[1].file in ("bwd_hopper", "bwd_hopper_wide")
    assert all(kernel.expressions.has_key_term and kernel.config.SCORES == "PLUS_TERM" for kernel in kernels)
    assert kernels[0].config.STAGED_BIAS
    return kernels


CASES = list(product(SHAPES, MASKS, BIASES, TERMS))


@pytest.mark.parametrize("case", thinned(CASES, keep=40, first=3), ids=", ".join)
def test_both_directions(case, schedule):
    check(*case[:3], TERMS[case[3]])


@pytest.mark.few_tiles
@pytest.mark.parametrize("case", thinned(CASES, keep=56, first=5), ids=", ".join)
def test_one_group_of_rows(case, schedule):
    """Whose stages of keys are more than the warps that find terms, or as many."""
    kernels = check(*case[:3], TERMS[case[3]])
    assert kernels[0].config.TILE_Q == 64 or SHAPES[case[0]][1] > 128


@pytest.mark.parametrize("shape, wide", quick(list(product(list(SHAPES), (False, True))), ("float16, 40", False), spread=True))
def test_the_gradient_of_a_bias_that_batch_elements_share(shape, wide, schedule):
    dtype, dim = SHAPES[shape]
    q, k, v, dout = inputs(dtype, dim)
    bias, t = bias_of((1, HEADS), "float32" if wide else dtype), TERMS["padded"]
    lse = numpy.zeros(q.shape[:-1], numpy.float32)
    options = {"bias": bias, "score": "score + t[b, kv_idx]", "arrays": {"t": t}}
    plan = plan_attention_backward(dout, q, k, v, q, lse, wrt="bias", **options, **WHERE)
    assert [kernel.file for kernel in plan.kernels[1:]] == ["bwd_scores_hopper"]
    assert all(kernel.expressions.has_key_term for kernel in plan.kernels)
    assert ("ONE_BIAS", "true") in plan.kernels[1].expressions.constants
    hand = {"bias": bias.astype(float) + t.astype(float)[:, None, None]}
    exact, _ = oracle(q, k, v, scale=dim**-0.5, **hand)
    forward = plan_attention(q, k, v, return_lse=True, **options, **WHERE)
    out, lse = forward(q, k, v, bias=bias, arrays={"t": t})
    got = plan(dout, q, k, v, out, lse, bias=bias, arrays={"t": t}).dbias
    # dS summed over batch elements, by hand
    wide_k, wide_v = (numpy.repeat(x.astype(float), HEADS // HEADS_KV, axis=1) for x in (k, v))
    s = q.astype(float) @ wide_k.swapaxes(-1, -2) * dim**-0.5 + hand["bias"]
    p = numpy.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = dout.astype(float) @ wide_v.swapaxes(-1, -2)
    right = (p * (dp - (dout.astype(float) * exact).sum(axis=-1, keepdims=True))).sum(axis=0, keepdims=True)
    assert got.shape == bias.shape and got.dtype == bias.dtype
    assert abs(got.astype(float) - right).max() <= (2**-6 if dtype == "bfloat16" else 2**-9) * abs(right).max()
    assert (got[..., 150:].astype(float)[..., right[0, 0, 0, 150:] == 0] == 0).all()


def test_the_gradient_of_the_term(schedule):
    """By the scores as they are."""
    bias = bias_of((1, HEADS), "float16")

    def add(s):
        return s + OF_KEYS[:, None, None] + bias.astype(float)

    hand = HandScore(add, numpy.ones_like, {"t": (numpy.ones_like, lambda x: x.sum(axis=(1, 2)))})
    options = {"bias": bias, "score": "score + t[b, kv_idx]", "arrays": {"t": OF_KEYS}}
    kernels = judged("float16", options, {"score": hand}, WHERE, inputs_given=inputs("float16", 40), wrt="t", deterministic=True)
    assert all(kernel.expressions.has_key_term for kernel in kernels)


def planned(score, bias=None, **options):
    q, k, _, _ = inputs("float16", 64)
    lse = numpy.zeros(q.shape[:-1], numpy.float32)
    names = {"t": numpy.ones((2, LEN_KV), numpy.float32), "h_": numpy.ones(HEADS, numpy.float32)}
    arrays = {name: x for name, x in names.items() if f"{name}[" in score}
    asked = {"score": score, "arrays": arrays, "bias": bias_of((1, HEADS), "float16") if bias is None else bias, **options, **WHERE}
    return plan_attention(q, k, k, **asked).kernel, plan_attention_backward(q, q, k, k, q, lse, **asked).kernel


APART = {
    "score + t[b, kv_idx]": "captured",
    "t[b, kv_idx] - 1 + score": "- 1",
    "score - 2 * t[1, kv_idx]": "2",
    "score + where(kv_idx < 9, h_[h], 0.0)": "kv_idx",
    "score + 0.25 * kv_idx": "0.25",
}


@pytest.mark.parametrize("score", APART)
def test_what_is_taken_apart(score):
    for kernel in planned(score):
        assert kernel.expressions.has_key_term and APART[score].split()[-1] in kernel.expressions.key_term
        assert kernel.expressions.term == "(x.unit * at.bias)"


@pytest.mark.parametrize(
    "score, options",
    [
        ("score + t[b, kv_idx] * q_idx", {}),
        ("score + 0.25 * (kv_idx - q_idx)", {}),
        ("2 * score + t[b, kv_idx]", {}),
        ("score + t[b, kv_idx]", {"softcap": 9.0}),
        ("score + t[b, kv_idx]", {"scale": -0.5}),
        ("score + t[b, kv_idx]", {"mask": "kv_idx != 7"}),
        ("score + t[b, kv_idx]", {"dropout": 0.1, "seed": 1}),
        ("score + t[b, kv_idx]", {"alibi_slopes": numpy.ones(HEADS, numpy.float32)}),
        ("score + t[b, kv_idx]", {"seqlens_q": numpy.array([100, 141]), "seqlens_kv": numpy.array([203, 7])}),
        ("score + t[b, kv_idx]", {"bias": numpy.ones((1, HEADS, LEN_Q, LEN_KV), numpy.float16)}),  # whose rows TMA cannot find
    ],
)
def test_what_each_pair_computes(score, options):
    assert not any(kernel.expressions.has_key_term for kernel in planned(score, **options))


SYNCHRONISE = {  # warps that bring terms with others: what is left out, and where it is the first of its kind
    "stage": ("tile/column_terms.cuh", "producer_acquire(keys);"),
    "arrival": ("tile/column_terms.cuh", "arrive_at(keys.full());"),
}


@pytest.mark.parametrize("left_out, sanitizer", [(None, "address"), (None, "thread"), *((name, "thread") for name in SYNCHRONISE)])
def test_warps_that_bring_terms_wait_and_arrive(left_out, sanitizer, change_kernel, monkeypatch):
    """More key tiles than there are stages, of several query tiles a block."""
    if left_out is not None:
        file, call = SYNCHRONISE[left_out]
        before, found, after = files()[file].partition(call)
        assert found
        change_kernel(file, before + after)
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", sanitizer)
    q, k, v, _ = inputs("float16", 40, len_kv=400)
    t = numpy.array([0.5, -1.0], numpy.float32)[:, None] * numpy.random.default_rng(2).standard_normal(400).astype(numpy.float32)
    bias = bias_of((1, HEADS), "float16", len_kv=400)
    exact, _ = oracle(q, k, v, scale=40**-0.5, bias=bias.astype(float) + t.astype(float)[:, None, None])
    noticed = []
    for order in host.SCHEDULES:
        monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", order)
        plan = plan_attention(q, k, v, bias=bias, score="score + t[b, kv_idx]", arrays={"t": t}, **WHERE)
        assert plan.kernel.expressions.has_key_term and plan.kernel.config.TILE_KV * plan.kernel.config.STAGES < 400
        try:
            noticed.append(bool(abs(plan(q, k, v, bias=bias, arrays={"t": t}) - exact).max() > 2e-3))
        except (FaultError, SanitizerError):
            noticed.append(True)
    assert any(noticed) is (left_out is not None)
