"""bwd_hopper where blocks take whole heads compiles without spills, whatever is asked for each pair."""

import numpy
import pytest

pytest.importorskip("cupy")

from cupy_flash import plan_attention_backward
from cupy_flash.machine import nvrtc
from cupy_flash.machine.machine_code import read
from cupy_flash.problem.arrays import DTYPES

HEADS, ROWS = 4, 100
SLOPES, COLUMN = numpy.ones(HEADS, "f4"), numpy.ones(ROWS, "f4")
ASKED = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (80, 40)},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": -0.2},
    "sinks": {"sinks": SLOPES},
    "dropout": {"dropout": 0.1, "seed": 3},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi, causal": {"alibi_slopes": SLOPES, "causal": True},
    "factor": {"score": "score * t[h]", "arrays": {"t": SLOPES}},
    "column": {"score": "score + t[kv_idx]", "arrays": {"t": COLUMN}},
    "bias": {"bias": (HEADS, ROWS, 104)},
    "bias, dropout": {"bias": (HEADS, ROWS, 104), "dropout": 0.1, "seed": 3},
    "bias of keys": {"bias": (1, 1, 104)},
}
# Bytes that the warps that load lack, which are ahead of the others.
SPILLS = {(64, "alibi, causal"): 8, (64, "bias, dropout"): 8, (96, "bias"): 24, (128, "bias"): 24}
SPILLS |= {(128, "bias of keys"): 32, (128, "column"): 16}
FEW_REGISTERS = ("dropout", "alibi", "alibi, causal", "bias, dropout")  # of heads wider than 64: blocks own one key tile


@pytest.mark.parametrize(
    "dtype, dim, asked",
    [
        pytest.param(dtype, dim, asked, marks=() if (dtype, dim, asked) == ("bfloat16", 64, "bias") else pytest.mark.release)
        for dtype in ("float16", "bfloat16")
        for dim in (32, 64, 96, 128)
        for asked in ASKED
    ],
)
def test_no_spill(dtype, dim, asked):
    options = dict(ASKED[asked])
    if "bias" in options:  # rows that TMA finds
        options["bias"] = numpy.zeros(options["bias"], DTYPES[dtype])[..., :ROWS]
    q, lse = numpy.zeros((200, HEADS, ROWS, dim), DTYPES[dtype]), numpy.zeros((200, HEADS, ROWS), "f4")
    kernel = plan_attention_backward(q, q, q, q, q, lse, backend="host", arch="90a", **options).kernel
    if dim == 32 and "hopper" not in kernel.file:
        return  # short heads up to this width are for bwd_v2
    assert kernel.config.WHOLE_HEADS is not (dim > 64 and asked in FEW_REGISTERS)
    code, log = nvrtc.compile_plan(kernel)
    stacks = read(code)
    allowed = SPILLS.get((dim, asked), 0) if kernel.config.WHOLE_HEADS else 8
    assert "C75" not in log and all(stacks[entry].stack_bytes <= allowed for entry in kernel.entries)
