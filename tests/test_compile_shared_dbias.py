"""bwd_hopper whose blocks of a cluster sum up the gradient of a bias compiles without spills, whatever is asked for each pair."""

import numpy
import pytest

pytest.importorskip("cupy")

from cupy_flash import plan_attention_backward
from cupy_flash.machine import nvrtc
from cupy_flash.machine.machine_code import read
from cupy_flash.problem.arrays import DTYPES

HEADS, ROWS = 4, 1024
ASKED = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (80, 40)},
    "scale": {"scale": -0.2},
    "sinks": {"sinks": numpy.ones(HEADS, "f4")},
    "dropout": {"dropout": 0.1, "seed": 3},
    "a term of the key": {"score": "score + t[kv_idx]", "arrays": {"t": numpy.ones(ROWS, "f4")}},
}
QUICK = ("bfloat16", 4, 128, "full")


@pytest.mark.parametrize(
    "dtype, elements, dim, asked",
    [
        pytest.param(dtype, elements, dim, asked, marks=() if (dtype, elements, dim, asked) == QUICK else pytest.mark.release)
        for dtype in ("float16", "bfloat16")
        for elements in (2, 4, 8)
        for dim in (32, 64, 96, 128)
        for asked in ASKED
    ],
)
def test_no_spill(dtype, elements, dim, asked):
    q, lse = numpy.zeros((elements, HEADS, ROWS, dim), DTYPES[dtype]), numpy.zeros((elements, HEADS, ROWS), "f4")
    bias = numpy.zeros((HEADS, ROWS, ROWS), DTYPES[dtype])
    options = {"backend": "host", "arch": "90a", "bias": bias, "wrt": "bias", **ASKED[asked]}
    kernel = plan_attention_backward(q, q, q, q, q, lse, **options).kernel
    assert f"cluster{elements}" in kernel.name
    code, log = nvrtc.compile_plan(kernel)
    assert "C75" not in log and all(entry.stack_bytes == 0 for entry in read(code).values())
