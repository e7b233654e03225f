"""Gradients of short sequences of their own lengths: which kernel computes them, in which order, and that they are right."""

import ml_dtypes
import numpy
import pytest
from short_sequences import CAUSAL, RIGHT, V2, check
from thinned import quick

from cupy_flash import attention, plan_attention_backward
from cupy_flash.machine import host, nvrtc

ON_90A = {"backend": "host", "arch": "90a"}
HOPPER, WIDE = "bwd_hopper", "bwd_hopper_wide"


def planned(rows, dim, heads=8, elements=64, packed=False, dtype="f2", **options):
    """For so many elements with room for so many rows, or packed ones of so many on average; no array is read."""
    shape = (heads, rows * elements, dim) if packed else (elements, heads, rows, dim)
    x, lse = numpy.empty(shape, dtype), numpy.empty(shape[:-1], "f4")
    lens = rows * numpy.arange(elements + 1) if packed else numpy.full(elements, rows)
    names = ("cu_seqlens_q", "cu_seqlens_kv") if packed else ("seqlens_q", "seqlens_kv")
    return plan_attention_backward(x, x, x, x, x, lse, **ON_90A, **dict.fromkeys(names, lens.astype("i4")), **options).kernel


CHOSEN = [
    (64, 64, {}, V2, False),
    (64, 96, {}, V2, False),
    (64, 128, {}, WIDE, True),
    (64, 64, {"elements": 32}, HOPPER, True),  # 256 heads in all, which were not faster
    (65, 64, {}, V2, False),
    (128, 32, CAUSAL, V2, False),
    (128, 72, {}, HOPPER, True),
    (128, 128, {}, HOPPER, True),
    (128, 256, {}, WIDE, True),  # two tiles of keys
    (256, 64, {}, HOPPER, True),
    (256, 128, {}, HOPPER, False),
    (256, 128, CAUSAL, HOPPER, True),
    (257, 64, {}, HOPPER, False),
    (1024, 64, CAUSAL, HOPPER, True),
    (1025, 64, CAUSAL, HOPPER, False),
    (200, 64, {"window": (9, 0)}, HOPPER, False),
    (64, 64, {"packed": True}, V2, False),
    (64, 96, {"packed": True}, HOPPER, False),
    (65, 64, {"packed": True, **CAUSAL}, HOPPER, False),
    (256, 96, {"packed": True, **CAUSAL}, HOPPER, True),
    (257, 96, {"packed": True, **CAUSAL}, HOPPER, False),
    (256, 96, {"packed": True}, HOPPER, False),
    (64, 64, {"softcap": 5.0}, HOPPER, False),
    (64, 64, {"score": "2 * score"}, HOPPER, False),
    (64, 64, {"deterministic": True}, HOPPER, True),  # whose bits follow from the sequence alone
]


@pytest.mark.parametrize("rows, dim, options, file, stores", CHOSEN, ids=str)
def test_the_kernel(rows, dim, options, file, stores):
    kernel = planned(rows, dim, **options)
    assert (kernel.file, kernel.config.FIRST_STORES) == (file, stores)


def test_sequences_that_lie_otherwise_on_the_other_side_keep_theirs():
    x, y = numpy.empty((1, 8, 4096, 64), "f2"), numpy.empty((64, 8, 64, 64), "f2")
    lengths = {"cu_seqlens_q": 64 * numpy.arange(65, dtype="i4"), "seqlens_kv": numpy.full(64, 64, "i4")}
    plan = plan_attention_backward(x[0], x[0], y, y, x[0], numpy.empty((8, 4096), "f4"), **ON_90A, **lengths)
    assert plan.kernel.file == HOPPER and not plan.kernel.config.FIRST_STORES


@pytest.mark.parametrize("schedule", host.SCHEDULES)
@pytest.mark.parametrize("case", quick(RIGHT, RIGHT[2], RIGHT[4]), ids=str)
def test_right_with_poison_beyond_every_length(case, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    check(case, ON_90A)


@pytest.mark.parametrize("asked, dim", [("sinks", 40), ("bias", 160)])
def test_who_reads_statistics_of_all_rows_finds_those_of_padding(asked, dim):
    """Memory between kernels is NaN before; a tile of queries has padding alone, and one of twice as many rows half of it."""
    rng = numpy.random.default_rng(8)
    lens = {"seqlens_q": numpy.array((300, 20, 0), "i4"), "seqlens_kv": numpy.array((300, 150, 40), "i4")}
    q, k, v, dout = (rng.standard_normal((3, 2, 300, dim)).astype("f2") for _ in range(4))
    sinks, bias = rng.standard_normal(2).astype("f4"), rng.standard_normal((2, 300, 304)).astype("f2")[..., :300]
    operands, wrt = ({"sinks": sinks}, {}) if asked == "sinks" else ({"bias": bias}, {"wrt": "bias"})
    out, lse = attention(q, k, v, return_lse=True, backend="numpy", **operands, **lens)
    arrays = dout, q, k, v, out, lse
    plan = plan_attention_backward(*arrays, **ON_90A, **operands, **lens, **wrt)
    assert plan.kernel.file == (HOPPER if dim < 128 else WIDE)
    memory = numpy.full(plan.workspace_bytes, 255, numpy.uint8)
    got = plan(*arrays, **operands, **lens, workspace=memory)
    right = plan_attention_backward(*arrays, backend="numpy", **operands, **lens, **wrt)(*arrays, **operands, **lens)
    name = f"d{asked}"
    mine, expected = (getattr(x, name).astype(float) for x in (got, right))
    assert abs(mine - expected).max() <= 2**-8 * abs(expected).max()


@pytest.mark.release
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("chosen", [chosen for chosen in CHOSEN if chosen[3] != V2], ids=str)
def test_nothing_spills(chosen, dtype):
    pytest.importorskip("cupy")
    rows, dim, options, *_ = chosen
    assert nvrtc.report(planned(rows, dim, dtype=dtype, **options)).fault == ""
