"""Factors of heads that have keys of their own, by the backwards of a device."""

from itertools import product

import numpy
import pytest
from score_kernels import DTYPES, judged

from cupy_flash.judge.oracle import HandScore

cupy = pytest.importorskip("cupy")
LEN_Q, LEN_KV, HEADS = 700, 933, 3  # off every tile edge
DIMS = {40: "float16", 64: "bfloat16", 128: "float16", 192: "bfloat16", 256: "float16"}
FACTORS = numpy.array([[1.5, -0.5, 0.0], [2.0**-8, 1.0, 3.0]], numpy.float32)
DOCUMENTS = numpy.arange(LEN_Q)[:, None] // 210 == numpy.arange(LEN_KV) // 210
BESIDE = {
    "nothing": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "documents": ({"mask": "q_idx // 210 == kv_idx // 210"}, {"seen": DOCUMENTS}),
}


@pytest.mark.parametrize("case", list(product(DIMS, BESIDE)), ids=str)
def test_gradients(case):
    dim, beside = case
    rng, factor = numpy.random.default_rng(dim), FACTORS.astype(float)[..., None, None]
    given = [rng.standard_normal((2, HEADS, rows, dim)).astype(DTYPES[DIMS[dim]]) for rows in (LEN_Q, LEN_KV, LEN_KV, LEN_Q)]
    options, hand = BESIDE[beside]
    hand = hand | {"score": HandScore(lambda s: s * factor, lambda s: s * 0 + factor)}
    options = options | {"score": "score * t[b, h]", "arrays": {"t": FACTORS}}
    _, backward = judged(DIMS[dim], options, hand, {}, cupy.asarray, cupy.asnumpy, inputs_given=given, deterministic=dim == 64)
    assert backward.config.SCALE_SUMS or backward.file == "bwd_v2"  # of a device without TMA
