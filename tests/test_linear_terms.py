"""Terms that are linear in the places of a pair, which kernels for sm_90a take apart, executed on the host against the oracle."""

import numpy
import pytest
from score_kernels import DTYPES, judged

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.machine import host
from cupy_flash.plan.linear import steps_of, without_abs
from cupy_flash.problem.expression.entry import score_expression
from cupy_flash.problem.mask import Mask

HEADS, HEADS_KV, DIM = 4, 2, 40
SLOPES = numpy.array([[1.0, 0.25, -0.5, 2.0**-8], [0.0, 1.0, 0.03, 3.0]], numpy.float32)  # of each head of two batch elements
WHERE = {"backend": "host", "arch": "90a"}
TEXTS = {  # and how far each is, by the places of a pair
    "score + slope[b, h] * kv_idx": lambda q, k, more: k,
    "score + slope[b, h] * (kv_idx - q_idx)": lambda q, k, more: k - q,
    "score - (2 * q_idx - kv_idx + 7) * slope[b, h] / 4": lambda q, k, more: (k - 2 * q - 7) / 4,
    "score - slope[b, h] * abs(q_idx + kv_len - q_len - kv_idx)": lambda q, k, more: -abs(q + more - k),
}
MASKS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": 0}),
    "window": ({"window": (40, 0)}, {"first_key": -40, "last_key": 0}),
    "to the right": ({"window": (9, 20)}, {"first_key": -9, "last_key": 20}),
}


@pytest.fixture(params=host.SCHEDULES)
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def inputs(dtype, len_q, len_kv, dim=DIM):
    rng = numpy.random.default_rng(3)
    shapes = (HEADS, len_q), (HEADS_KV, len_kv), (HEADS_KV, len_kv), (HEADS, len_q)
    return [rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


def masked(mask, len_q, len_kv):
    """What the mask is called, and what it means."""
    options, hand = MASKS[mask]
    return options, {name: key + len_kv - len_q for name, key in hand.items()}


def check(dtype, options, hand, len_q, len_kv, dim=DIM, linear=True, **more):
    options = {"sinks": numpy.array([0.5, -1.0, 3.0, 0.0], numpy.float32)} | options
    hand = {"sinks": options["sinks"]} | hand
    kernels = judged(dtype, options, hand, WHERE, inputs_given=inputs(dtype, len_q, len_kv, dim), **more)
    assert kernels[0].file == "fwd_hopper" and kernels[1].file in ("bwd_hopper", "bwd_hopper_wide")
    assert [kernel.config.SCORES for kernel in kernels] == ["PLUS_LINEAR" if linear else "PLUS_TERM"] * 2
    return kernels


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("text", TEXTS)
def test_expressions(text, mask, schedule):
    options, hand = masked(mask, 141, 203)
    q, k = numpy.arange(141.0)[:, None], numpy.arange(203.0)
    term = SLOPES.astype(float)[:, :, None, None] * TEXTS[text](q, k, 203 - 141)
    options |= {"score": text, "arrays": {"slope": SLOPES}}
    check("float16", options, hand | {"bias": term}, 141, 203, linear="abs" not in text or mask in ("causal", "window"))


@pytest.mark.parametrize("dtype, dim, len_q, len_kv", [("bfloat16", 64, 75, 300), ("float16", 128, 150, 90), ("bfloat16", 160, 130, 130)])
def test_alibi(dtype, dim, len_q, len_kv, schedule):
    options, hand = masked("causal", len_q, len_kv)  # with more queries than keys, the first ones see nothing
    slopes = abs(SLOPES)
    check(dtype, options | {"alibi_slopes": slopes}, hand | {"alibi_slopes": slopes}, len_q, len_kv, dim, wrt="alibi_slopes", deterministic=True)
