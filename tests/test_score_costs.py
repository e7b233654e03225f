"""What a score costs in a step of the kernels for sm_90a, as instructions that are executed for a tile that all rows see wholly."""

from dataclasses import replace

import numpy
import pytest
from thinned import thinned

pytest.importorskip("cupy")

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.machine import nvrtc
from cupy_flash.machine.machine_code import read
from cupy_flash.plan.expression_text import NOTHING
from cupy_flash.problem.arrays import DTYPES

LENGTH = 256
SLOPES = numpy.ones(2, numpy.float32)
PLAIN = {"SCORES": "UNCHANGED", "EXPLICIT_SCORES": False, "SOFTCAP": True, "STAGED_BIAS": False, "SCALE_SUMS": False}
ASKED = {  # at most so many instructions a score: in the forward what a row of a tile takes, and none for a score
    "linear": ({"score": "score + slope[h] * kv_idx", "arrays": {"slope": SLOPES}}, 0.35, 1.9),
    "key": ({"score": "score + t[kv_idx]", "arrays": {"t": numpy.ones(LENGTH, numpy.float32)}}, 0.52, 1.7),
    "factor": ({"score": "score * t[h]", "arrays": {"t": SLOPES}}, 0.1, 0.3),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, 0.65, 2.0),
    "alibi unmasked": ({"alibi_slopes": SLOPES}, 0.65, 2.8),
    "bias": ({}, 3, 3),
}


@pytest.mark.release
@pytest.mark.parametrize("asked", thinned(ASKED, keep=6, first=1))
@pytest.mark.parametrize("dtype", thinned(["float16", "bfloat16"]))
@pytest.mark.parametrize("direction", thinned(["backward", "forward"]))
def test_instructions_of_a_score(direction, dtype, asked):
    options, *most = ASKED[asked]
    bar = most[direction == "backward"]
    if asked == "bias":
        options = {"bias": numpy.zeros((2, LENGTH, LENGTH), DTYPES[dtype])}
    q, lse = numpy.zeros((2, LENGTH, 128), DTYPES[dtype]), numpy.zeros((2, LENGTH), numpy.float32)
    if direction == "forward":
        kernel = plan_attention(q, q, q, backend="host", arch="90a", **options).kernel
        keys_or_queries = kernel.config.TILE_KV
    else:
        kernel = plan_attention_backward(q, q, q, q, q, lse, backend="host", arch="90a", **options).kernel
        keys_or_queries = kernel.config.TILE_Q
    plain = replace(kernel, config=replace(kernel.config, **PLAIN), expressions=NOTHING)
    rounds = [read(nvrtc.compile_plan(plan)[0])[plan.file].rounds[-1] for plan in (kernel, plain)]
    assert rounds[0] - rounds[1] <= bar * keys_or_queries / 2  # a warp has 16 rows: half as many scores a lane as columns
