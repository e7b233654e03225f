"""Scores that kernels for sm_90a take apart: terms of the key alone and factors of a head, on the host against the oracle."""

from itertools import product

import numpy
import pytest
from score_kernels import DTYPES, SCALE, judged
from thinned import thinned

from cupy_flash import FaultError, SanitizerError, plan_attention, plan_attention_backward
from cupy_flash.judge.oracle import HandScore, oracle
from cupy_flash.machine import host
from cupy_flash.plan.sources import files

HEADS, HEADS_KV, LEN_Q, LEN_KV = 4, 2, 141, 203
WHERE = {"backend": "host", "arch": "90a"}
RNG = numpy.random.default_rng(5)
OF_KEYS = RNG.standard_normal((2, LEN_KV)).astype(numpy.float32) * 3
FACTORS = numpy.array([[1.5, -0.5, 0.0, 2.0**-8], [-1.0, 1.0, 0.03, 3.0]], numpy.float32)
HIDDEN = numpy.where(RNG.random((2, LEN_KV)) < 0.3, numpy.float32("-inf"), OF_KEYS)
PADDED = numpy.where(numpy.arange(LEN_KV) < [[150], [64]], OF_KEYS, numpy.float32(-1e9))
FROM_LEFT = PADDED[:, ::-1].copy()
MASKS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "window": ({"window": (40, 0)}, {"first_key": LEN_KV - LEN_Q - 40, "last_key": LEN_KV - LEN_Q}),
    "pairs": ({"mask": "(q_idx + kv_idx) % 3 > 0"}, {"seen": (numpy.arange(LEN_Q)[:, None] + numpy.arange(LEN_KV)) % 3 > 0}),
}
SHAPES = {"float16, 40": ("float16", 40), "bfloat16, 128": ("bfloat16", 128), "float16, 160": ("float16", 160)}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def inputs(dtype, dim, len_q=LEN_Q, len_kv=LEN_KV):
    rng = numpy.random.default_rng(3)
    shapes = (HEADS, len_q), (HEADS_KV, len_kv), (HEADS_KV, len_kv), (HEADS, len_q)
    return [rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


def check(kind, shape, mask, options, hand, **more):
    """Both directions, and that neither kernel computes it pair by pair."""
    (dtype, dim), (of_mask, hand_mask) = SHAPES[shape], MASKS[mask]
    sinks = {"sinks": numpy.array([0.5, -1.0, 3.0, 0.0], numpy.float32)}
    kernels = judged(
        dtype, {**sinks, **of_mask, **options}, {**sinks, **hand_mask, **hand}, WHERE, inputs_given=inputs(dtype, dim), **more
    )
    assert kernels[0].file == "fwd_hopper" and kernels[1].file in ("bwd_hopper", "bwd_hopper_wide")
    assert [kernel.config.SCORES for kernel in kernels] == [kind] * 2


TERMS_HELD = 1
TERMS = {"any": OF_KEYS, "some masked": HIDDEN, "padded": PADDED, "padded from the left": FROM_LEFT}


@pytest.mark.release  # terms that rise, a bias of keys and gradients of terms ask it as well
@pytest.mark.parametrize("case", list(product(SHAPES, MASKS, TERMS)), ids=", ".join)
def test_terms_of_keys(case, schedule):
    t = TERMS[case[2]]
    options = {"score": "score + 2 * t[b, kv_idx] - 1", "arrays": {"t": t}}
    check("PLUS_COLUMN", *case[:2], options, {"bias": (2.0 * t - 1)[:, None, None]})


@pytest.mark.parametrize("shape", thinned(SHAPES, keep=3))
def test_terms_that_rise(shape, schedule):
    """By so much, in the middle of a key tile, that it is computed again, with its terms."""
    t = OF_KEYS + 40 * (numpy.arange(LEN_KV) >= 130).astype(numpy.float32)
    options = {"score": "score + t[b, kv_idx]", "arrays": {"t": t}}
    check("PLUS_COLUMN", shape, "full", options, {"bias": t.astype(float)[:, None, None]})


@pytest.mark.parametrize("held", thinned([numpy.inf, numpy.nan, 1e30, 1e9, -numpy.inf], keep=3, first=1))
def test_what_masked_keys_hold_reaches_nothing(held):
    q, k, v, dout = inputs("float16", 40)
    t = OF_KEYS[0].copy()
    t[100:] = held  # in a tile with keys that are seen
    results = []
    for terms in (OF_KEYS[0], t):
        asked = {"score": "score + t[kv_idx]", "arrays": {"t": terms}, "mask": "kv_idx < 100", **WHERE}
        plan = plan_attention(q, k, v, return_lse=True, **asked)
        out, lse = plan(q, k, v, arrays=asked["arrays"])
        backward = plan_attention_backward(dout, q, k, v, out, lse, **asked)
        results.append((out, lse, *backward(dout, q, k, v, out, lse, arrays=asked["arrays"])))
        assert plan.kernel.config.SCORES == backward.kernel.config.SCORES == "PLUS_COLUMN"
    assert all(numpy.array_equal(a, b) for a, b in zip(*results))


@pytest.mark.release
@pytest.mark.parametrize("dtype", thinned(["float16", "float32"]))
def test_a_bias_of_keys(dtype, schedule):
    bias = numpy.maximum(PADDED, -60_000 if dtype == "float16" else -1e9)[:, None, None].astype(dtype)
    check("PLUS_COLUMN", "float16, 40", "causal", {"bias": bias}, {"bias": bias.astype(float)})


def test_gradients_of_terms_of_keys(schedule):
    def of_keys(x):
        return x.sum(axis=(1, 2))

    hand = HandScore(lambda s: s + OF_KEYS[:, None, None], numpy.ones_like, {"t": (numpy.ones_like, of_keys)})
    options = {"score": "score + t[b, kv_idx]", "arrays": {"t": OF_KEYS}}
    check("PLUS_COLUMN", "float16, 40", "causal", options, {"score": hand}, wrt="t", deterministic=True)


@pytest.mark.release  # the next test has the results of factors as well
@pytest.mark.parametrize("case", list(product(SHAPES, MASKS)), ids=", ".join)
def test_factors_of_heads(case, schedule):
    factor = FACTORS.astype(float)[..., None, None]
    hand = HandScore(lambda s: -s * factor / 2, lambda s: s * 0 - factor / 2)
    check("SCALED", *case, {"score": "-score * t[b, h] / 2", "arrays": {"t": FACTORS}}, {"score": hand})


@pytest.mark.release
def test_gradients_of_factors(schedule):
    factor = FACTORS.astype(float)[..., None, None]
    hand = HandScore(lambda s: s * factor, lambda s: s * 0 + factor, {"t": (lambda s: s, lambda x: x.sum(axis=(-1, -2)))})
    check("SCALED", "bfloat16, 128", "causal", {"score": "score * t[b, h]", "arrays": {"t": FACTORS}}, {"score": hand}, wrt="t")


@pytest.mark.release  # test_staged_bias.py has terms as large in a row and in all
def test_a_term_of_a_whole_row_that_is_large(schedule):
    # No float32 holds -1e9 and a score, but a row of such is as if nothing had been added.
    q, k, v, _ = inputs("float16", 40, len_q=70)
    q[..., 0], k[..., 0] = 0, 0
    large = numpy.full(LEN_KV, -1e9, numpy.float32)
    plan = plan_attention(q, k, v, score="score + t[kv_idx]", arrays={"t": large}, return_lse=True, **WHERE)
    assert plan.kernel.config.SCORES == "PLUS_COLUMN"
    out, lse = plan(q, k, v, arrays={"t": large})
    exact, _ = oracle(q, k, v, scale=SCALE)
    assert abs(out - exact).max() <= 2**-9 and (abs(lse + 1e9) <= 64).all()


@pytest.mark.parametrize(
    "score, options",
    [
        ("score + t[kv_idx] * q_idx", {}),
        ("score + t[kv_idx]", {"softcap": 9.0}),
        ("score + t[kv_idx]", {"scale": -0.5}),
        ("floor(score) * t[0]", {}),
        ("score * t[kv_idx]", {}),
        ("score * t[0] + 1.0", {}),
        ("where(score > 0, score, 2 * score)", {}),
    ],
)
def test_what_each_pair_computes(score, options):
    x = inputs("float16", 64)[0]
    arrays = {"t": numpy.ones(LEN_KV, numpy.float32)} if "t[" in score else None
    k = x[:, :2, :LEN_KV] if x.shape[-2] >= LEN_KV else inputs("float16", 64)[1]
    lse = numpy.zeros(x.shape[:-1], numpy.float32)
    asked = {"score": score, "arrays": arrays, **options, **WHERE}
    plans = plan_attention(x, k, k, **asked), plan_attention_backward(x, x, k, k, x, lse, **asked)
    assert {plan.kernel.config.SCORES for plan in plans} <= {"PLUS_TERM", "EXPRESSION"}


@pytest.mark.release  # terms of keys above and splits of linear terms ask it as well
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.release)])
def test_terms_of_keys_of_splits(causal, schedule):
    """Of which a block has some key tiles, and brings the terms of these. Of three query tiles two blocks share the last."""
    q, k, v = (x[:1, :heads] for x, heads in zip(inputs("float16", 40, 100, 2600), (3, 1, 1)))
    t = numpy.random.default_rng(8).standard_normal(2600).astype(numpy.float32)
    plan = plan_attention(q, k, v, score="score + t[kv_idx]", arrays={"t": t}, causal=causal, return_lse=True, **WHERE)
    assert plan.kernel.config.SCORES == "PLUS_COLUMN" and plan.kernel.config.SPLIT_KV
    out, lse = plan(q, k, v, arrays={"t": t})
    hand = {"last_key": 2500} if causal else {}
    exact, exact_lse = oracle(q, k, v, scale=40**-0.5, bias=t.astype(float)[None, None, None], **hand)
    assert abs(lse - exact_lse).max() <= 2**-20 * abs(exact_lse).max() and abs(out - exact).max() <= 2e-3


SYNCHRONISE = {  # warps that bring terms with others: what is left out, and where it is the first of its kind
    "stage": "producer_acquire(keys);",
    "arrival": "arrive_at(keys.full());",
    "fence": "fence_proxy_async();",
    "ones": "if constexpr (TERMS_IN_PRODUCT) fence_proxy_async();",
}


@pytest.mark.release  # calls of kernels without terms are left out in test_mutation.py as well
@pytest.mark.parametrize("left_out", thinned([None, *SYNCHRONISE], keep=5, first=1))
def test_warps_that_bring_terms_wait_and_arrive(left_out, change_kernel, monkeypatch):
    """More key tiles than there are stages, of several query tiles a block."""
    if left_out is not None:
        file = "tile/linear_terms.cuh" if left_out == "ones" else "tile/column_terms.cuh"
        before, call, after = files()[file].partition(SYNCHRONISE[left_out])
        assert call
        change_kernel(file, before + after)
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "thread")
    q, k, v, _ = inputs("float16", 40)
    t = numpy.array([0.5, -1.0], numpy.float32)[:, None] * OF_KEYS
    exact, _ = oracle(q, k, v, scale=40**-0.5, bias=t.astype(float)[:, None, None])
    noticed = []
    for order in host.SCHEDULES:
        monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", order)
        plan = plan_attention(q, k, v, score="score + t[b, kv_idx]", arrays={"t": t}, scale=40**-0.5, **WHERE)
        assert plan.kernel.config.SCORES == "PLUS_COLUMN" and plan.kernel.config.TILE_KV * plan.kernel.config.STAGES < 4 * LEN_KV
        try:
            noticed.append(bool(abs(plan(q, k, v, arrays={"t": t}) - exact).max() > 2e-3))
        except (FaultError, SanitizerError):
            noticed.append(True)
    assert any(noticed) is (left_out is not None)
