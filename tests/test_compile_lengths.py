"""Kernels for sequences of their own lengths compile for every architecture without spills."""

import numpy
import pytest

pytest.importorskip("cupy")

from cupy_flash import UnsupportedError, plan_attention, plan_attention_backward
from cupy_flash.machine import nvrtc
from cupy_flash.machine.machine_code import read
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.tuning import WIDTHS
from cupy_flash.problem.arrays import DTYPES

LENS, OFFSETS = numpy.array([100, 7]), numpy.array([0, 100, 128])
WAYS = ("packed", "paged", "heads together", "heads together, paged", "heads together, split", "split, paged", "backward")
QUICK = {("80", "float16", 64, "packed"), ("90a", "float16", 64, "paged"), ("80", "float16", 128, "backward")}
QUICK |= {("75", "float32", 64, "heads together, paged"), ("120", "float32", 64, "packed"), ("90a", "float16", 128, "split, paged")}
# Bytes where no tile that was tried has fewer.
SPILLS = dict.fromkeys([(architecture, "float32", 256, "heads together, split") for architecture in ("100", "120")], 8)


def plan_for(architecture, dtype, dim, way):
    """The plan of a problem that takes this kernel."""
    options = {"backend": "host", "arch": architecture, "causal": True}
    packed, pages = numpy.zeros((4, 128, dim), DTYPES[dtype]), numpy.zeros((9, 2, 16, dim), DTYPES[dtype])
    if way == "backward":
        lse = numpy.zeros((4, 128), numpy.float32)
        options |= {"cu_seqlens_q": OFFSETS, "cu_seqlens_kv": OFFSETS}
        return plan_attention_backward(packed, packed, packed[:2], packed[:2], packed, lse, **options)
    q = numpy.zeros((2, 4, 3, dim), DTYPES[dtype]) if "heads" in way else packed
    options |= {} if "heads" in way else {"cu_seqlens_q": OFFSETS}
    if "split" in way:
        q, options = numpy.zeros((2, 4, 3, dim), DTYPES[dtype]), {name: x for name, x in options.items() if "cu_" not in name}
    if "paged" in way:
        options |= {"seqlens_kv": LENS, "pages": numpy.zeros((2, 140 if "split" in way else 7), numpy.int32)}
        return plan_attention(q, pages, pages, **options)
    k = numpy.zeros((2, 2, 2200 if "split" in way else 128, dim), DTYPES[dtype])
    return plan_attention(q, k, k, seqlens_kv=LENS, **options)


def settings():
    for architecture in ARCHITECTURES:
        for dtype in ("float16", "float32"):
            for dim in WIDTHS:
                for way in WAYS:
                    quick = (architecture, dtype, dim, way) in QUICK
                    yield pytest.param(architecture, dtype, dim, way, marks=() if quick else pytest.mark.release)


@pytest.mark.parametrize("architecture, dtype, dim, way", list(settings()))
def test_no_spill(architecture, dtype, dim, way):
    try:
        kernel = plan_for(architecture, dtype, dim, way).kernel
    except UnsupportedError as error:
        assert "shared memory" in str(error) and (architecture, dtype, dim, way) == ("75", "float32", 256, "backward")
        return
    c = kernel.config
    assert c.VARLEN and ("paged" in way) == c.PAGED and ("split" in way) == c.SPLIT_KV and ("heads" not in way or c.PACK_GQA)
    code, log = nvrtc.compile_plan(kernel)
    found = {entry: read(code)[entry].stack_bytes for entry in kernel.entries}
    assert "C75" not in log
    assert found == dict.fromkeys(kernel.entries, 0) | {kernel.file: SPILLS.get((architecture, dtype, dim, way), 0)}
