"""Few rows and short sequences: which of them are for fwd_v2 and bwd_v2 where there are kernels for sm_90a as well."""

import numpy
import pytest

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.call.backward import operands, prepared_backward
from cupy_flash.call.forward import ForwardOperands, prepared

SHORT, FEW = "short sequences", "few rows"


def forward(heads, heads_kv, batch, queries, keys, dim, dim_v=None, dtype=numpy.float16, **options):
    q, k = (numpy.empty((batch, h, rows, dim), dtype) for h, rows in ((heads, queries), (heads_kv, keys)))
    v = numpy.empty((batch, heads_kv, keys, dim_v or dim), dtype)
    return plan_attention(q, k, v, **{"backend": "host", "arch": "90a"} | options).kernel


def backward(heads, heads_kv, batch, queries, keys, dim, wrt=(), deterministic=False, **options):
    q, k = (numpy.empty((batch, h, rows, dim), numpy.float16) for h, rows in ((heads, queries), (heads_kv, keys)))
    lse = numpy.empty(q.shape[:-1], numpy.float32)
    options = {"backend": "host", "arch": "90a", "wrt": wrt, "deterministic": deterministic} | options
    return plan_attention_backward(q, q, k, k, q, lse, **options).kernel


def is_of(kernel, file, why=""):
    """Whether it is that kernel, and for that reason."""
    reasons = [reason for reason in kernel.reasons if reason.startswith((SHORT, FEW))]
    return kernel.file == file and len(reasons) == bool(why) and all(reason.startswith(why) for reason in reasons)


SLOPES = {"alibi_slopes": numpy.ones(8, numpy.float32)}
LONG = {"score": "score * sigmoid(score)"}
FACTOR = {"score": "score * t[h]", "arrays": {"t": numpy.ones(8, numpy.float32)}}
V2 = [  # heads, heads of keys, batch, queries, keys, dim
    ((8, 8, 1, 64, 64, 64), {}, SHORT),
    ((8, 8, 1, 49, 33, 40), {"causal": True}, SHORT),
    ((8, 8, 1, 64, 64, 64), {"softcap": 5.0}, SHORT),
    ((8, 8, 1, 64, 64, 64), {"sinks": numpy.zeros(8, numpy.float32)}, SHORT),
    ((8, 8, 1, 17, 64, 96), {}, SHORT),
    ((8, 8, 17, 64, 512, 64), {"softcap": 5.0}, SHORT),
    ((8, 8, 1, 100, 128, 32), {"softcap": 5.0}, SHORT),
    ((8, 8, 1, 49, 64, 64), {"mask": "kv_idx < 40", "causal": True}, SHORT),
    ((8, 8, 1, 65, 128, 64), {"softcap": 5.0}, SHORT),
    ((8, 8, 1, 64, 256, 96), {"softcap": 5.0}, SHORT),
    ((8, 8, 1, 5, 64, 128), {"softcap": 5.0}, SHORT),
    ((8, 8, 1, 64, 512, 32), {"softcap": 5.0}, SHORT),
    ((8, 8, 1, 64, 65, 64), LONG, SHORT),
    ((8, 8, 1, 17, 256, 96), LONG, SHORT),
    ((8, 8, 1, 64, 256, 32), {"window": (8, 0)}, SHORT),
    ((8, 8, 1, 100, 128, 16), {}, SHORT),
    ((32, 8, 1, 16, 64, 64), {"causal": True}, SHORT),
    ((8, 8, 1, 32, 64, 64), SLOPES, SHORT),
    ((8, 8, 1, 32, 64, 64), LONG, SHORT),
    ((8, 2, 1, 16, 64, 64), LONG, SHORT),
    ((8, 2, 1, 16, 64, 64), SLOPES, SHORT),
    ((32, 8, 1, 1, 2048, 128), {}, FEW),
    ((32, 8, 2, 2, 8192, 64), {"causal": True}, FEW),
    ((32, 8, 1, 4, 8192, 64), {"causal": True}, FEW),
    ((32, 8, 1, 1, 4096, 256), {}, FEW),
    ((32, 8, 16, 1, 65536, 256), {}, FEW),
    ((12, 12, 64, 1, 4096, 64), {}, FEW),
    ((32, 8, 64, 1, 4096, 128), {}, FEW),
    ((32, 8, 64, 1, 4096, 104), {}, FEW),
    ((8, 8, 64, 8, 700, 32), {"causal": True}, FEW),
    ((32, 8, 16, 1, 3000, 64), {"softcap": 5.0}, FEW),
    ((8, 8, 64, 16, 3000, 64), LONG, FEW),
    ((8, 8, 1, 1, 4096, 64), FACTOR, FEW),
    ((8, 8, 1, 1, 4096, 128), {"bias": numpy.zeros((1, 8, 1, 4096), numpy.float16)}, FEW),
    ((8, 8, 16, 16, 1500, 64), {"softcap": 5.0}, FEW),
    ((8, 8, 64, 16, 2000, 64), {"softcap": 5.0}, FEW),
    ((8, 8, 16, 16, 2000, 32), {"softcap": 5.0}, FEW),
    ((32, 8, 4, 1, 2047, 128), {}, FEW),  # 65,504 keys of all heads
    ((8, 8, 1, 8, 1000, 96), {"causal": True}, FEW),
    ((8, 8, 64, 4, 512, 128), {}, FEW),
    ((8, 8, 64, 4, 512, 64), {}, FEW),
    ((8, 8, 64, 8, 64, 104), {}, FEW),
    ((8, 8, 64, 4, 64, 96), {}, FEW),
    ((8, 8, 64, 16, 64, 104), {}, FEW),
    ((8, 8, 64, 16, 512, 104), {"softcap": 5.0}, FEW),
    ((8, 8, 64, 8, 512, 96), {"softcap": 5.0}, FEW),
    ((8, 8, 1, 16, 1024, 96), {"softcap": 5.0}, FEW),
    ((8, 8, 16, 4, 512, 192), {}, FEW),
    ((8, 8, 17, 4, 128, 192), {}, FEW),
    ((8, 8, 16, 16, 512, 192), {"softcap": 5.0}, FEW),
    ((8, 8, 64, 4, 512, 192), {"softcap": 5.0}, FEW),
    ((8, 8, 1, 4, 4000, 256), {"causal": True}, FEW),
    ((32, 8, 1, 1, 4095, 256), {}, FEW),
    ((32, 8, 1, 1, 70000, 64), {"window": (5000, 0)}, FEW),  # of one query, the window is all that a kernel is told of
]


@pytest.mark.parametrize("shape, options, why", V2, ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else "")
def test_what_is_for_fwd_v2(shape, options, why):
    assert is_of(forward(*shape, **options), "fwd_v2", why)
    assert is_of(forward(*shape, **options, kernel="fwd_hopper"), "fwd_hopper")
    assert is_of(forward(*shape, **options, arch="80"), "fwd_v2")


def test_float32_has_but_one_kernel():
    assert is_of(forward(8, 8, 1, 64, 64, 64, dtype=numpy.float32), "fwd_v2")


@pytest.mark.parametrize("batch, heads, queries, keys", [(0, 8, 5, 5), (1, 0, 5, 5), (1, 8, 0, 5), (1, 8, 5, 0)], ids=str)
def test_of_nothing_another_reason_is_told(batch, heads, queries, keys):
    for kernel in (forward(heads, heads, batch, queries, keys, 64), backward(heads, heads, batch, queries, keys, 32)):
        assert kernel.file in ("fwd_v2", "bwd_v2") and any("has no elements" in reason for reason in kernel.reasons)
        assert is_of(kernel, kernel.file)


HOPPER = [
    ((8, 8, 1, 65, 64, 64), {}),
    ((8, 8, 1, 64, 65, 64), {}),
    ((8, 8, 1, 16, 64, 96), {}),
    ((8, 8, 1, 64, 64, 104), {}),
    ((8, 8, 1, 64, 64, 64), {"dim_v": 104}),
    ((8, 8, 1, 64, 257, 32), {}),
    ((8, 8, 1, 128, 100, 32), {}),
    ((8, 8, 1, 129, 129, 32), {}),
    ((8, 8, 1, 64, 513, 64), {"softcap": 5.0}),
    ((8, 8, 1, 129, 129, 64), {"softcap": 5.0}),
    ((8, 8, 1, 65, 128, 72), {"softcap": 5.0}),
    ((8, 8, 1, 64, 257, 96), {"softcap": 5.0}),
    ((8, 8, 1, 64, 65, 128), {"softcap": 5.0}),
    ((8, 8, 1, 64, 513, 32), {"softcap": 5.0}),
    ((8, 8, 1, 64, 64, 64), LONG),
    ((8, 8, 1, 64, 257, 64), LONG),
    ((8, 8, 1, 17, 256, 104), LONG),
    ((8, 8, 1, 64, 65, 64), FACTOR),
    ((8, 8, 1, 33, 64, 64), SLOPES),
    ((8, 8, 1, 32, 32, 64), {"bias": numpy.zeros((1, 8, 32, 32), numpy.float16)}),
    ((8, 8, 1, 32, 65, 64), {"mask": "kv_idx != 3"}),
    ((8, 8, 1, 32, 32, 64), {"mask": "kv_idx != 3", "softcap": 5.0}),
    ((8, 8, 1, 32, 32, 72), {"mask": "kv_idx != 3"}),
    ((8, 8, 1, 32, 32, 64), {"mask": "kv_idx != 3", "sinks": numpy.zeros(8, numpy.float32)}),
    ((8, 8, 1, 32, 32, 64), {"dropout": 0.1, "seed": 1}),
    ((8, 2, 1, 17, 64, 64), LONG),
    ((8, 8, 16, 64, 512, 64), {"softcap": 5.0}),
    ((8, 8, 1, 100, 257, 32), {"softcap": 5.0}),
    ((8, 8, 16, 16, 2000, 64), {"softcap": 5.0}),
    ((32, 8, 5, 1, 1700, 128), {}),
    ((8, 8, 1, 9, 1000, 96), {"causal": True}),
    ((8, 8, 64, 4, 513, 128), {}),
    ((8, 8, 64, 5, 512, 128), {}),
    ((8, 8, 64, 4, 512, 96), {}),
    ((8, 8, 64, 16, 65, 104), {}),
    ((8, 8, 64, 16, 513, 104), {"softcap": 5.0}),
    ((8, 8, 1, 16, 1023, 96), {"softcap": 5.0}),
    ((8, 8, 1, 5, 512, 192), {}),
    ((8, 8, 17, 4, 129, 192), {}),
    ((8, 8, 64, 5, 512, 192), {"softcap": 5.0}),
    ((8, 8, 1, 5, 512, 256), {}),
    ((8, 8, 17, 1, 64, 256), {}),
    ((40, 8, 3, 1, 4095, 256), {}),
    ((8, 8, 1, 1, 512, 128), FACTOR),
    ((8, 8, 1, 2, 600, 128), {"window": (100, 0)}),
    ((32, 8, 7, 1, 4096, 64), {}),
    ((32, 8, 64, 1, 4095, 128), {}),
    ((40, 8, 64, 1, 4096, 128), {}),
    ((32, 8, 1, 4, 8191, 128), {"causal": True}),
    ((32, 8, 2, 4, 8192, 128), {"causal": True}),
    ((32, 8, 16, 1, 65535, 64), {}),
    ((12, 12, 64, 1, 4095, 64), {}),
    ((8, 8, 64, 9, 700, 32), {"causal": True}),
    ((8, 8, 1, 17, 70000, 64), {}),
    ((8, 8, 1, 2, 70000, 64), {"window": (69000, 0)}),
    ((32, 8, 16, 1, 3000, 128), {"softcap": 5.0}),
    ((8, 8, 1, 1, 4096, 64), {"bias": numpy.zeros((1, 8, 1, 4096), numpy.float16)}),
    ((8, 8, 1, 1, 4096, 64), {"dropout": 0.1, "seed": 1}),
]


@pytest.mark.parametrize("shape, options", HOPPER, ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else "")
def test_what_is_for_fwd_hopper(shape, options):
    assert is_of(forward(*shape, **options), "fwd_hopper")


def test_v1_stays_v1():
    assert is_of(forward(8, 8, 1, 64, 64, 64, algorithm="v1"), "fwd_v1")


GRADIENTS_V2 = [
    ((8, 8, 33, 64, 64, 64), {}),
    ((8, 8, 32, 64, 256, 64), {"causal": True}),
    ((8, 8, 8, 1, 8192, 64), {}),
    ((8, 8, 1, 64, 70000, 32), {}),
    ((8, 8, 32, 192, 192, 32), {}),
    ((8, 8, 32, 8192, 64, 32), {"softcap": 5.0}),  # without, blocks of bwd_hopper take whole heads, see test_whole_heads.py
    ((8, 8, 32, 64, 256, 32), {"softcap": 5.0}),
    ((8, 8, 33, 64, 64, 64), {"softcap": 5.0}),
    ((8, 8, 33, 64, 64, 64), {"deterministic": True}),
    ((8, 2, 33, 7, 200, 48), {"sinks": numpy.zeros(8, numpy.float32)}),
    ((8, 8, 1, 64, 256, 32), {}),
    ((8, 8, 64, 160, 160, 32), {"window": (160, 0)}),
    ((8, 8, 32, 192, 150, 32), {}),
    ((8, 8, 32, 64, 64, 64), {"mask": "kv_idx != 3"}),
    ((8, 8, 1, 49, 49, 32), {"mask": "kv_idx != 3", "causal": True}),
    ((8, 8, 32, 192, 192, 32), {"mask": "kv_idx != 3"}),
    ((8, 8, 33, 64, 64, 32), SLOPES),
    ((8, 8, 33, 64, 64, 32), FACTOR),
    ((8, 8, 33, 64, 64, 32), {"bias": numpy.zeros((1, 8, 64, 64), numpy.float16), "wrt": "bias"}),
]


@pytest.mark.parametrize("shape, options", GRADIENTS_V2, ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else "")
def test_what_is_for_bwd_v2(shape, options):
    assert is_of(backward(*shape, **options), "bwd_v2", SHORT)
    assert is_of(backward(*shape, **options, kernel="bwd_hopper"), "bwd_hopper")
    assert is_of(backward(*shape, **options, arch="80"), "bwd_v2")


WINDOWS = [
    ((8, 8, 43, 300, 300, 64), {"window": (63, 0)}, "bwd_v2"),
    ((8, 2, 22, 300, 700, 40), {"window": (20, 43), "sinks": numpy.zeros(8, numpy.float32)}, "bwd_v2"),
    ((8, 8, 42, 300, 300, 64), {"window": (63, 0)}, "bwd_hopper"),  # 1,008 blocks
    ((8, 8, 43, 300, 300, 64), {"window": (64, 0)}, "bwd_hopper"),
    ((8, 8, 1, 16384, 16384, 64), {"window": (127, 0)}, "bwd_v2"),
    ((8, 8, 1, 16383, 16383, 64), {"window": (127, 0)}, "bwd_hopper"),
    ((8, 8, 1, 16384, 16384, 64), {"window": (128, 0)}, "bwd_hopper"),
    ((8, 8, 4, 2048, 2048, 64), {"window": (64, 64)}, "bwd_v2"),
    ((8, 8, 4, 2048, 2048, 64), {"window": (64, 65)}, "bwd_hopper"),
    ((8, 8, 5, 2047, 2047, 64), {"window": (64, 64)}, "bwd_hopper"),
    ((8, 8, 3, 2048, 2048, 64), {"window": (64, 64)}, "bwd_hopper"),  # 384 blocks
    ((8, 8, 32, 200, 200, 32), {"window": (64, 64)}, "bwd_v2"),
    ((8, 8, 32, 200, 200, 32), {"window": (127, 0)}, "bwd_v2"),
    ((8, 8, 31, 200, 200, 32), {"window": (127, 0)}, "bwd_hopper"),  # 496 blocks
    ((8, 8, 43, 300, 300, 72), {"window": (31, 0)}, "bwd_hopper"),
    ((8, 8, 43, 300, 300, 64), {"window": (9, None)}, "bwd_hopper"),
    ((8, 8, 43, 300, 300, 64), {"window": (9, 0), "softcap": 5.0}, "bwd_hopper"),
    ((8, 8, 43, 300, 300, 64), {"window": (9, 0), "deterministic": True}, "bwd_hopper"),
    ((8, 8, 43, 300, 300, 64), {"window": (9, 0)} | FACTOR, "bwd_hopper"),
    ((8, 8, 43, 300, 300, 64), {"window": (9, 0), "seqlens_kv": numpy.full(43, 290)}, "bwd_hopper"),
]


@pytest.mark.parametrize("shape, options, file", WINDOWS, ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else "")
def test_narrow_windows_have_smaller_blocks(shape, options, file):
    kernel = backward(*shape, **options)
    assert kernel.file == file and any("narrow window" in reason for reason in kernel.reasons) is (file != "bwd_hopper")


CAUSAL = {"causal": True}
FEW_BLOCKS = [
    ((4, 4, 1, 4096, 4096, 128), CAUSAL, "bwd_hopper_wide"),
    ((1, 1, 1, 16384, 16384, 72), CAUSAL, "bwd_hopper_wide"),  # 128 blocks of 128 keys, all at once
    ((4, 1, 1, 2048, 2048, 128), CAUSAL, "bwd_hopper_wide"),
    ((4, 4, 1, 3001, 3000, 128), CAUSAL | {"softcap": 5.0}, "bwd_hopper_wide"),
    ((4, 4, 1, 4096, 4096, 128), CAUSAL | {"alibi_slopes": numpy.ones(4, numpy.float32)}, "bwd_hopper_wide"),
    ((4, 4, 1, 4096, 4096, 128), CAUSAL | {"dropout": 0.1, "seed": 1}, "bwd_hopper_wide"),
    ((8, 8, 1, 2048, 2048, 128), CAUSAL, "bwd_hopper_wide"),
    ((11, 11, 1, 2048, 2048, 128), CAUSAL, "bwd_hopper"),
    ((1, 1, 1, 32768, 32768, 128), CAUSAL, "bwd_hopper"),  # 256 of them: two rounds, as long as each other
    ((16, 16, 1, 2048, 2048, 128), CAUSAL, "bwd_hopper"),
    ((4, 4, 1, 4096, 4096, 64), CAUSAL, "bwd_hopper"),
    ((4, 4, 1, 4096, 4096, 128), {}, "bwd_hopper"),
    ((4, 4, 1, 4096, 4096, 128), {"window": (300, 0)}, "bwd_hopper"),
    ((4, 4, 1, 4096, 4096, 128), CAUSAL | {"deterministic": True}, "bwd_hopper"),
    ((4, 4, 1, 4096, 4096, 128), CAUSAL | {"mask": "kv_idx < 4000"}, "bwd_hopper"),
    ((4, 4, 1, 4096, 4096, 128), CAUSAL | {"seqlens_kv": numpy.array([4000])}, "bwd_hopper"),
    ((2, 2, 1, 2048, 2048, 128), CAUSAL | {"bias": numpy.zeros((1, 2, 2048, 2048), numpy.float16), "wrt": "bias"}, "bwd_hopper"),
]


@pytest.mark.few_tiles
@pytest.mark.parametrize("shape, options, file", FEW_BLOCKS, ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else "")
def test_few_blocks_under_a_causal_mask_are_small(shape, options, file):
    kernel = backward(*shape, **options)
    assert kernel.file == file and any("few blocks" in reason for reason in kernel.reasons) is (file != "bwd_hopper")


GRADIENTS_HOPPER = [
    ((8, 8, 1, 64, 256, 32), {"softcap": 5.0}),
    ((8, 8, 64, 128, 128, 32), {"softcap": 5.0}),
    ((8, 8, 63, 64, 65, 64), {}),  # 504 heads, of which a multiprocessor has fewer than four
    ((8, 8, 33, 65, 64, 64), {}),
    ((8, 8, 31, 64, 256, 64), {}),
    ((8, 8, 1, 64, 8000, 64), {}),
    ((8, 8, 1, 64, 257, 32), {"softcap": 5.0}),
    ((8, 8, 31, 8192, 64, 32), {}),
    ((8, 8, 32, 8192, 64, 64), {}),
    ((8, 8, 33, 64, 65, 64), {"softcap": 5.0}),
    ((8, 8, 33, 64, 65, 72), {}),
    ((8, 8, 1, 64, 64, 40), {"softcap": 5.0}),
    ((8, 8, 64, 193, 128, 32), {}),
    ((8, 8, 64, 65, 193, 32), {}),
    ((8, 8, 31, 64, 64, 64), {"mask": "kv_idx != 3"}),
    ((8, 8, 64, 100, 100, 32), {"mask": "kv_idx != 3"}),
    ((8, 8, 64, 193, 193, 32), {"mask": "kv_idx != 3"}),
    ((8, 8, 64, 64, 64, 32), {"mask": "kv_idx != 3", "dropout": 0.1, "seed": 1}),
    ((8, 8, 63, 65, 65, 32), {}),
    ((8, 8, 33, 64, 64, 64), SLOPES),
    ((8, 8, 33, 64, 65, 32), SLOPES),
    ((8, 8, 33, 64, 64, 32), {"bias": numpy.zeros((33, 8, 64, 64), numpy.float16), "wrt": "bias"}),  # which TMA stores
    ((8, 8, 33, 64, 64, 32), {"dropout": 0.1, "seed": 1} | SLOPES),
    ((8, 8, 33, 64, 64, 32), {"mask": "kv_idx != 3"} | SLOPES),
]


@pytest.mark.parametrize("shape, options", GRADIENTS_HOPPER, ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else "")
def test_what_is_for_bwd_hopper(shape, options):
    assert is_of(backward(*shape, **options), "bwd_hopper")


WIDE = [
    ((8, 8, 31, 64, 64, 64), {}),
    ((8, 8, 1, 1, 1, 128), {}),
    ((8, 2, 33, 64, 64, 72), {"causal": True, "sinks": numpy.zeros(8, numpy.float32)}),
    ((8, 8, 33, 40, 64, 128), {"deterministic": True}),
]


@pytest.mark.parametrize("shape, options", WIDE, ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else "")
def test_what_is_for_bwd_hopper_wide(shape, options):
    assert is_of(backward(*shape, **options), "bwd_hopper_wide", SHORT)
    assert is_of(backward(*shape, **options, kernel="bwd_hopper"), "bwd_hopper")


def test_expressions_are_for_bwd_hopper_wide():
    assert is_of(backward(8, 8, 33, 64, 64, 32, **LONG), "bwd_hopper_wide")


def test_float32_results_are_of_the_same_kernel():
    """Which round to the bit to what they are otherwise."""
    q, lse = numpy.empty((64, 8, 64, 64), numpy.float16), numpy.empty((64, 8, 64), numpy.float32)
    for wide in (False, True):
        options = {"backend": "host", "arch": "90a", "float32_results": wide}
        assert prepared(ForwardOperands(q, q, q, None, None), {**options, "return_lse": True}).kernel.file == "fwd_v2"
        given = operands(q, q, q, q, q, lse, None, None, None, None, None, None)
        assert prepared_backward(given, {**options, "deterministic": True}).kernel.file == "bwd_v2"
