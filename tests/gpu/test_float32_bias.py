"""A bias of float32 beside queries of 16 bits, by the kernels of a device: on sm_90a TMA brings it."""

from itertools import product

import numpy
import pytest
from score_kernels import DTYPES, judged

cupy = pytest.importorskip("cupy")
LEN_Q, LEN_KV = 333, 500  # off every tile edge, and rows of a multiple of 16 bytes
DIMS = {64: "bfloat16", 104: "float16", 128: "bfloat16", 192: "float16", 256: "bfloat16"}
SHAPES = {"of pairs": (2, 4), "of heads": (4,), "of batch elements": (2, 1)}
ENDS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "window": ({"window": (90, 9)}, {"first_key": LEN_KV - LEN_Q - 90, "last_key": LEN_KV - LEN_Q + 9}),
}


@pytest.mark.parametrize("case", list(product(DIMS, SHAPES, ENDS)), ids=str)
def test_a_bias_of_float32(case):
    """Also where a head dim leaves no room for it in shared memory, and lanes read it."""
    dim, shape, ends = case
    dtype = DIMS[dim]
    rng = numpy.random.default_rng(3)
    q, dout = (rng.standard_normal((2, 4, LEN_Q, dim)).astype(DTYPES[dtype]) for _ in range(2))
    k, v = (rng.standard_normal((2, 2, LEN_KV, dim)).astype(DTYPES[dtype]) for _ in range(2))
    bias = (3 * rng.standard_normal((*SHAPES[shape], LEN_Q, LEN_KV))).astype(numpy.float32)
    bias[rng.random(bias.shape) < 0.05] = -numpy.inf
    options, hand = ENDS[ends]
    given = {"bias": bias} | options
    judged(dtype, given, {"bias": bias} | hand, {}, cupy.asarray, cupy.asnumpy, "bias", inputs_given=(q, k, v, dout))
