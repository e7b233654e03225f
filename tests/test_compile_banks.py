"""Registers that an exponent of the forwards for sm_90a reads: docs/tuning-hopper-forward.md says what two of one bank cost."""

from itertools import product

import numpy
import pytest
from thinned import quick

from cupy_flash import plan_attention
from cupy_flash.machine import nvrtc
from cupy_flash.machine.machine_code import read

ZERO = 255  # the register that is always 0: what becomes of a bias adds it
BESIDES = {
    "": lambda length: {},
    "causal": lambda length: {"causal": True},
    "alibi": lambda length: {"alibi_slopes": numpy.ones(2, numpy.float32), "causal": True},
    "linear": lambda length: {"score": "score + s[h] * (kv_idx - q_idx)", "arrays": {"s": numpy.ones(2, numpy.float32)}},
    "key": lambda length: {"score": "score + t[kv_idx]", "arrays": {"t": numpy.zeros(length, numpy.float32)}},
    "bias": lambda length: {"bias": numpy.zeros((2, length, length), numpy.float16)},
    "dropout": lambda length: {"dropout": 0.1, "seed": 1},
    "documents": lambda length: {"mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": numpy.zeros(length, numpy.int32)}},
    "lengths": lambda length: {"seqlens_kv": numpy.array([length])},
}
CASES = [
    case for case in product((64, 128, 192, 256), (64, 512, 4096), BESIDES) if case[1:] != (64, "lengths")
]  # which fwd_v2 takes


@pytest.mark.parametrize("dim, length, besides", quick(CASES, (64, 512, "alibi"), spread=True))
def test_what_both_rows_of_a_lane_add_lies_in_neighbouring_registers(dim, length, besides):
    """Each of a lane's exponents of a row adds one register, and those of its other row the register beside it."""
    q = numpy.zeros((1, 2, length, dim), numpy.float16)
    kernel = plan_attention(q, q, q, backend="host", arch="90a", kernel="fwd_hopper", **BESIDES[besides](length)).kernel
    code = read(nvrtc.compile_plan(kernel)[0])["fwd_hopper"]
    a_row = kernel.config.TILE_KV // 4  # scores of it that a lane has
    often = {register for register, times in code.addends.items() if times >= a_row} - {ZERO}
    assert often
    assert often == {register ^ 1 for register in often}
