"""Sinks in the registers of the forwards for sm_90a, beside what else a call asks for."""

from itertools import product

import numpy
import pytest
from thinned import quick

from cupy_flash import plan_attention
from cupy_flash.machine import nvrtc
from cupy_flash.machine.machine_code import read

LENGTHS = (64, 512, 1024, 2048, 4096)  # of queries and keys: those that rows differ by
BESIDES = {
    "": lambda length: {},
    "causal": lambda length: {"causal": True},
    "alibi": lambda length: {"alibi_slopes": numpy.ones(2, numpy.float32)},
    "key": lambda length: {"score": "score + t[kv_idx]", "arrays": {"t": numpy.zeros(length, numpy.float32)}},
    "lengths": lambda length: {"seqlens_kv": numpy.array([length])},
    "documents": lambda length: {"mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": numpy.zeros(length, numpy.int32)}},
}
CASES = list(product((32, 64, 96, 128, 192, 256), LENGTHS, BESIDES))


@pytest.mark.parametrize("dim, length, besides", quick(CASES, (64, 1024, "causal"), spread=True))
@pytest.mark.parametrize("heads_kv", [2, pytest.param(1, marks=pytest.mark.release)])  # of 2: rows of both may share a tile
@pytest.mark.parametrize("numbers", [1, pytest.param(2, marks=pytest.mark.release)])
def test_no_spill(dim, length, besides, heads_kv, numbers):
    q, k = (numpy.zeros((1, heads, length, dim), numpy.float16) for heads in (2, heads_kv))
    sinks = numpy.zeros((numbers, 2), numpy.float32)
    asked = None if besides in ("lengths", "documents") else "fwd_hopper"  # of those, the shortest are for fwd_v2
    kernel = plan_attention(q, k, k, sinks=sinks, backend="host", arch="90a", kernel=asked, **BESIDES[besides](length)).kernel
    code, log = nvrtc.compile_plan(kernel)
    of_packed = 8 * (kernel.config.PACK_GQA and kernel.config.WIDTH == 64)  # which head a row is of
    assert "C75" not in log and read(code)[kernel.file].stack_bytes <= of_packed, str(kernel)
