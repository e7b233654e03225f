"""Kernels for sequences of their own lengths compile for every architecture without spills."""

import numpy
import pytest

pytest.importorskip("cupy")

from cupy_flash import KeyRanges, UnsupportedError, plan_attention, plan_attention_backward
from cupy_flash.machine import nvrtc
from cupy_flash.machine.machine_code import read
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.tuning import WIDTHS
from cupy_flash.problem.arrays import DTYPES

LENS, OFFSETS = numpy.array([100, 7]), numpy.array([0, 100, 128])
WAYS = ("packed", "paged", "few queries", "few queries, paged", "backward")  # few: heads of a group together, in splits
QUICK = {("90a", "float16", 128, "few queries, paged")}  # of bwd_hopper a backward is quick


def plan_for(architecture, dtype, dim, way):
    """The plan of a problem that takes this kernel."""
    options = {"backend": "host", "arch": architecture, "causal": True}
    packed, pages = numpy.zeros((4, 128, dim), DTYPES[dtype]), numpy.zeros((9, 2, 16, dim), DTYPES[dtype])
    if way == "backward":
        lse = numpy.zeros((4, 128), numpy.float32)
        options |= {"cu_seqlens_q": OFFSETS, "cu_seqlens_kv": OFFSETS}
        return plan_attention_backward(packed, packed, packed[:2], packed[:2], packed, lse, **options)
    few = "few queries" in way
    q = numpy.zeros((2, 4, 3, dim), DTYPES[dtype]) if few else packed
    options |= {} if few else {"cu_seqlens_q": OFFSETS}
    if "paged" in way:
        options |= {"seqlens_kv": LENS, "pages": numpy.zeros((2, 140 if few else 7), numpy.int32)}
        return plan_attention(q, pages, pages, **options)
    k = numpy.zeros((2, 2, 2200 if few else 128, dim), DTYPES[dtype])
    return plan_attention(q, k, k, seqlens_kv=LENS, **options)


READ = {  # what gradients are asked for, of what
    "slopes": {"alibi_slopes": numpy.ones(4, numpy.float32), "wrt": "alibi_slopes"},
    "pairs": {"score": "score + w[h, q_idx, kv_idx]", "arrays": {"w": numpy.ones((4, 100, 100), numpy.float32)}, "wrt": "w"},
    "table": {"score": "score + t[kv_idx - q_idx + 128, h]", "arrays": {"t": numpy.ones((300, 4), numpy.float32)}, "wrt": "t"},
    "level": {"score": "score * sigmoid(score - t[h])", "arrays": {"t": numpy.ones(4, numpy.float32)}, "wrt": "t"},
    "by score": {"score": "score + t[int(score)]", "arrays": {"t": numpy.ones(9, numpy.float32)}, "wrt": "t"},
}
READ["level of many"] = READ["level"] | {"alibi_slopes": numpy.ones(4, numpy.float32), "dropout": 0.1, "seed": 1}


def settings_of_reads():
    for architecture in ARCHITECTURES:
        for dtype in ("float16", "float32"):
            for dim in WIDTHS:
                for asked in READ:
                    yield architecture, dtype, dim, asked


@pytest.mark.release  # test_compile_scores.py asks it of a batch without lengths
@pytest.mark.parametrize("architecture, dtype, dim, asked", list(settings_of_reads()))
def test_no_spill_of_sums(architecture, dtype, dim, asked):
    """Of gradients of what scores read."""
    q, lse = numpy.zeros((4, 128, dim), DTYPES[dtype]), numpy.zeros((4, 128), numpy.float32)
    options = {"cu_seqlens_q": OFFSETS, "cu_seqlens_kv": OFFSETS, "backend": "host", "arch": architecture, **READ[asked]}
    try:
        plan = plan_attention_backward(q, q, q[:2], q[:2], q, lse, **options)
    except UnsupportedError as error:
        assert "shared memory" in str(error) and (architecture, dtype, dim) == ("75", "float32", 256)
        return
    kernel = plan.kernels[1]
    code, log = nvrtc.compile_plan(kernel)
    assert kernel.config.VARLEN and kernel.file == "bwd_scores" and "C75" not in log
    assert {entry: read(code)[entry].stack_bytes for entry in kernel.entries} == dict.fromkeys(kernel.entries, 0)


LENGTHS_OF_PAIRS = {"seqlens_q": LENS, "seqlens_kv": LENS}
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (100, 0)}, "prefix": {"causal": True, "prefix": 20}}
GROUPS = {"group": numpy.zeros(128, numpy.int32), "first": OFFSETS[:-1]}
ASKED = MASKS | {
    "softcap": {"softcap": 5.0, "causal": True},
    "sinks": {"sinks": numpy.zeros(4, numpy.float32), "causal": True},
    "alibi": {"alibi_slopes": numpy.ones(4, numpy.float32), "causal": True},
    "linear": {"score": "score + 0.1 * (kv_idx - q_idx)", "causal": True},
    "gate": {"score": "score * t[h]", "arrays": {"t": numpy.ones(4, numpy.float32)}},
    "lookup": {"score": "score + t[kv_idx - q_idx + 128, h]", "arrays": {"t": numpy.ones((300, 4), numpy.float32)}},
    "documents": {"mask": "group[first[b] + q_idx] == group[first[b] + kv_idx]", "arrays": GROUPS},
    "ranges": {"mask": KeyRanges(numpy.zeros((4, 128, 2), numpy.int32), 100), "causal": True},
    "dropout": {"dropout": 0.1, "seed": 3, "causal": True},
    "bias": {"bias": numpy.zeros((2, 4, 128, 128), numpy.float32), **LENGTHS_OF_PAIRS},
    "mask": {"mask": numpy.ones((2, 1, 128, 128), bool), **LENGTHS_OF_PAIRS},
    "bias, mask": {"bias": numpy.zeros((4, 128, 128), numpy.float32), "mask": numpy.ones((128, 128), bool), **LENGTHS_OF_PAIRS},
}
# fwd_hopper is compiled with pages below, and bwd_hopper without lengths in test_compile.py; the rest is for a release.
QUICK_HOPPER = {(64, "causal", "backward")}


def settings_of_hopper():
    for dtype in ("float16", "bfloat16"):
        for dim in WIDTHS:
            for asked in ASKED:
                for way in ("forward", "backward"):
                    quick = dtype == "bfloat16" and (dim, asked, way) in QUICK_HOPPER
                    yield pytest.param(dtype, dim, asked, way, marks=() if quick else pytest.mark.release)


BY_BWD_V2 = {(192, "ranges"), (256, "ranges"), (256, "bias, mask")}

# Bytes that uniform registers lack: the tile that a block has, read again before and behind its query tiles, not for each of them.
OF_A_WORK_TILE = {(96, "bias", "backward"): 16, (128, "bias", "backward"): 8, (192, "bias, mask", "backward"): 8}


@pytest.mark.parametrize("dtype, dim, asked, way", list(settings_of_hopper()))
def test_no_spill_in_hopper_kernels(dtype, dim, asked, way):
    """What is asked for each pair of wide heads may be for fwd_v2, and some of it for bwd_v2, and only that."""
    options = {"backend": "host", "arch": "90a", **ASKED[asked]}
    padded = "seqlens_q" in options
    q = numpy.zeros((2, 4, 128, dim) if padded else (4, 128, dim), DTYPES[dtype])
    kv = q[..., :2, :, :]
    options |= {} if padded else {"cu_seqlens_q": OFFSETS, "cu_seqlens_kv": OFFSETS}
    if way == "forward":
        kernel = plan_attention(q, kv, kv, **options).kernel
    else:
        kernel = plan_attention_backward(q, q, kv, kv, q, numpy.zeros(q.shape[:-1], numpy.float32), **options).kernel
    if "hopper" not in kernel.file:
        if way == "backward":
            assert (dim, asked) in BY_BWD_V2 and "no Hopper kernel has the registers" in kernel.reasons[0]
        else:
            assert dim > 128 and asked not in (*MASKS, "softcap", "sinks") and "no registers" in kernel.reasons[0]
        return
    code, log = nvrtc.compile_plan(kernel)
    assert kernel.config.VARLEN and "C75" not in log
    both_gradients = kernel.file == "bwd_hopper" and kernel.config.WIDTH == 128 and dtype == "float16"
    allowed = 8 * (asked == "softcap" and both_gradients)  # as in test_compile_scores.py
    allowed += OF_A_WORK_TILE.get((dim, asked, way), 0)
    assert all(read(code)[entry].stack_bytes <= allowed for entry in kernel.entries)


def settings_of_pages():
    for dtype in ("float16", "bfloat16"):
        for dim in WIDTHS:
            for asked in (*MASKS, "softcap", "sinks"):
                for size in (16, 3):
                    quick = (dtype, dim, asked, size) == ("bfloat16", 128, "causal", 16)
                    yield pytest.param(dtype, dim, asked, size, marks=() if quick else pytest.mark.release)


@pytest.mark.parametrize("dtype, dim, asked, size", list(settings_of_pages()))
def test_no_spill_in_fwd_hopper_with_pages(dtype, dim, asked, size):
    q, pages = numpy.zeros((2, 4, 128, dim), DTYPES[dtype]), numpy.zeros((40, 2, size, dim), DTYPES[dtype])
    table = numpy.zeros((2, 40), numpy.int32)
    options = {"seqlens_kv": LENS, "pages": table, "backend": "host", "arch": "90a", **ASKED[asked]}
    kernel = plan_attention(q, pages, pages, **options).kernel
    if kernel.file == "fwd_v2":
        without = {256: ("prefix", "softcap"), 64: ("full", "softcap") if size == 3 else ()}  # registers
        crowded = asked in without.get(dim, ())
        assert ("no registers for pages" if crowded else "no TMA") in kernel.reasons[0] and (crowded or (size == 3 and dim % 64))
        return
    code, log = nvrtc.compile_plan(kernel)
    assert kernel.file == "fwd_hopper" and kernel.config.PAGED and (size == 3) == (kernel.config.PIECE == 0) and "C75" not in log
    assert {entry: read(code)[entry].stack_bytes for entry in kernel.entries} == dict.fromkeys(kernel.entries, 0)


SHARING = {"blocks": (4, 2, 130), "blocks and heads": (16, 2, 60), "few rows": (16, 2, 3)}
SHARING |= {"2": (4, 2, 0), "4": (8, 2, 0), "8": (16, 2, 0)}


def settings_of_shared_tiles():
    for dim in WIDTHS:
        for asked in (*MASKS, "softcap", "sinks"):
            for way in SHARING:
                for size in (16, 3, None):
                    yield dim, asked, way, size


@pytest.mark.release  # blocks that share: see QUICK
@pytest.mark.parametrize("dim, asked, way, size", list(settings_of_shared_tiles()))
def test_no_spill_where_blocks_or_heads_share_tiles(dim, asked, way, size):
    """Of a sequence with few query tiles, and of heads with one query."""
    (heads, heads_kv, queries), dtype = SHARING[way], DTYPES["bfloat16"]
    k = numpy.zeros((2, heads_kv, 2200, dim) if size is None else (800, heads_kv, size, dim), dtype)
    options = {"seqlens_kv": LENS, "backend": "host", "arch": "90a", **ASKED[asked]}
    options |= {} if size is None else {"pages": numpy.zeros((2, -(-2200 // size)), numpy.int32)}
    options |= {"sinks": numpy.zeros(heads, numpy.float32)} if asked == "sinks" else {}
    options |= {"kernel": "fwd_hopper"} if way == "few rows" and (size != 3 or dim % 64 == 0) and asked != "window" else {}
    q = numpy.zeros((2, heads, queries, dim), dtype) if queries else numpy.zeros((heads, 128, dim), dtype)
    options |= {} if queries else {"cu_seqlens_q": OFFSETS}
    try:
        kernel = plan_attention(q, k, k, **options).kernel
    except UnsupportedError as error:
        assert way == "few rows" and "no registers for pages" in str(error)
        return
    c = kernel.config
    if kernel.file == "fwd_v2":
        assert (way in ("few rows", "blocks and heads") and asked == "window") or size is not None
        return
    assert (1 if queries else int(way)) == c.INNER_HEADS and c.SPLIT_KV is (queries > 0 and asked != "window")
    code, log = nvrtc.compile_plan(kernel)
    assert "C75" not in log and not any(read(code)[entry].stack_bytes for entry in kernel.entries)


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
    few = "few queries" in way
    assert c.VARLEN and ("paged" in way) == c.PAGED and few == c.SPLIT_KV and (c.PACK_GQA or not few)
    code, log = nvrtc.compile_plan(kernel)
    allowed = 8 * ((architecture, dtype, dim, way) == ("120", "float32", 256, "few queries"))  # no tile that was tried has fewer
    assert "C75" not in log and all(read(code)[entry].stack_bytes <= allowed for entry in kernel.entries)
