"""Gradients of few keys: when queries are dealt out in parts, that all arrays are cut alike, and what comes out."""

from dataclasses import replace

import numpy
import pytest
from thinned import quick, thinned

from cupy_flash import attention, plan_attention_backward
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.plan.query_parts import in_parts
from cupy_flash.problem.arrays import DTYPES

RNG = numpy.random.default_rng(0)


def planned(q, k, arch="90a", layout="bhsd", dtype="float16", transform=lambda x: x, **options):
    """A plan for zeros of these shapes; `options` of plan_attention_backward."""
    q, k = (transform(numpy.zeros(shape, DTYPES[dtype])) for shape in (q, k))
    axes = (0, 1, 2) if layout == "bhsd" else (0, 2, 1)
    batch = numpy.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    out = numpy.zeros((*batch, *q.shape[-3:]), q.dtype)
    lse = numpy.zeros((*batch, *(q.shape[axis - 3] for axis in axes[:2])) if layout == "bhsd" else out.shape[:-1], numpy.float32)
    return plan_attention_backward(out, q, k, k, out, lse, backend="host", arch=arch, layout=layout, **options)


PARTS = [  # q, k, options, parts
    ((2, 10, 4096, 64), (2, 10, 77, 64), {}, 4),  # an image's queries on a text: 20 blocks
    ((1, 4, 4096, 64), (1, 4, 77, 64), {}, 8),  # as many as are added up quickly
    ((1, 8, 65536, 64), (1, 8, 256, 64), {}, 8),  # points on latents
    ((1, 4, 1024, 64), (1, 4, 77, 64), {}, 4),  # 256 queries each at least
    ((2, 40, 4096, 64), (2, 40, 77, 64), {}, 1),  # 80 blocks: two rounds would take as long
    ((9, 15, 4096, 64), (9, 15, 77, 64), {}, 1),  # more than run at once
    ((1, 4, 16384, 64), (1, 4, 77, 64), {"dtype": "bfloat16"}, 16),
    ((1, 4, 4097, 64), (1, 4, 77, 64), {}, 1),  # which nothing divides
    ((1, 4, 4160, 64), (1, 4, 77, 64), {}, 5),  # of 832 queries
    ((1, 4, 448, 64), (1, 4, 77, 64), {}, 1),
    ((1, 2, 4096, 256), (1, 2, 77, 256), {}, 8),
    ((1, 40, 4096, 256), (1, 40, 77, 256), {}, 1),  # 80 blocks of 64 keys
    ((1, 40, 4096, 128), (1, 40, 77, 128), {}, 2),
    ((1, 8, 4096, 64), (1, 1, 77, 64), {}, 8),  # heads of a group are dealt out among blocks anyway
    ((1, 4, 4096, 64), (1, 4, 4, 64), {"causal": "top_left", "window": (None, None)}, 1),
    ((1, 4, 4096, 64), (1, 4, 77, 64), {"causal": True}, 1),
    ((1, 4, 4096, 64), (1, 4, 77, 64), {"softcap": 9.0, "scale": -0.1}, 8),
    ((1, 4, 4096, 64), (1, 4, 77, 64), {"deterministic": True}, 8),
    ((1, 4, 4096, 64), (1, 4, 77, 64), {"dropout": 0.1, "seed": 1}, 1),
    ((1, 4, 4096, 64), (1, 4, 77, 64), {"bias": numpy.zeros((4, 1, 77), numpy.float16)}, 1),
    ((1, 4, 4096, 64), (1, 4, 77, 64), {"sinks": numpy.zeros(4, numpy.float32)}, 1),
    ((1, 4, 4096, 64), (1, 4, 77, 64), {"seqlens_kv": numpy.array([70])}, 1),
    ((1, 4, 4096, 64), (1, 4, 77, 64), {"mask": "q_idx >= kv_idx"}, 1),
    ((4, 4096, 64), (2, 4, 77, 64), {}, 1),  # whose gradient is a sum over the batch
    ((2, 4, 4096, 64), (4, 77, 64), {}, 8),
    ((1, 4, 0, 64), (1, 4, 77, 64), {}, 1),
    ((1, 4, 4096, 64), (1, 4, 0, 64), {}, 1),
]


@pytest.mark.parametrize("q, k, options, parts", PARTS, ids=str)
def test_queries_are_in_parts_where_that_pays_and_every_key_is_seen(q, k, options, parts):
    plan = planned(q, k, **options)
    told = in_parts(plan.problem)
    assert told.parts == parts and (told is plan.problem) is (parts == 1)
    assert any("queries in" in reason for reason in plan.kernel.reasons) is (parts > 1)
    if parts > 1:
        p, before = told.forward, plan.problem.forward
        assert p.batch == (*before.batch, parts) and p.len_q * parts == before.len_q == before.mask.len_q
        assert p.mask.len_q == p.len_q and p.flops == before.flops and told.sums_keys and not told.sums_queries
        tiles = -(-p.len_kv // plan.kernel.config.TILE_KV)
        assert plan.launches[1].blocks >= parts * tiles * p.heads_kv * before.batch[0]


def test_arrays_are_cut_alike_in_both_layouts():
    for layout, shape in (("bhsd", (3, 4, 1024, 72)), ("bshd", (3, 1024, 4, 72))):
        keys = tuple(77 if n == 1024 else n for n in shape)
        plan = planned(shape, keys, layout=layout)
        told = in_parts(plan.problem)
        element = numpy.arange(3 * 4 * 1024 * 72).reshape(shape)
        element = element if layout == "bhsd" else element.swapaxes(1, 2)
        for x in (told.forward.q, told.dout, told.dq, told.forward.out):
            seen = numpy.lib.stride_tricks.as_strided(numpy.arange(element.size), x.shape, [8 * s for s in x.strides])
            assert (seen == element.reshape(3, 4, 4, 256, 72).swapaxes(1, 2)).all()
        lse = told.forward.lse
        rows = numpy.arange(3 * 4 * 1024).reshape(shape[:-1])
        rows = rows if layout == "bhsd" else rows.swapaxes(1, 2)
        seen = numpy.lib.stride_tricks.as_strided(numpy.arange(rows.size), lse.shape, [8 * s for s in lse.strides])
        assert (seen == rows.reshape(3, 4, 4, 256).swapaxes(1, 2)).all()
        assert {x.strides[1] for x in (told.forward.k, told.forward.v, told.layouts["dk"], told.layouts["dv"])} == {0}


def test_gradients_that_are_added_to_what_is_there_are_of_whole_queries():
    problem = planned((1, 4, 4096, 64), (1, 4, 77, 64)).problem
    assert in_parts(problem).parts > 1 and in_parts(replace(problem, adds=True)).parts == 1


def test_two_batch_axes_that_cannot_be_merged_leave_tma_no_axis():
    def apart(x):
        return numpy.zeros((2, 3, *x.shape[1:]), x.dtype).swapaxes(0, 1)

    plan = planned((1, 2, 1024, 64), (1, 2, 77, 64), transform=apart)
    assert plan.problem.forward.batch == (3, 2) and in_parts(plan.problem).parts == 1 and plan.kernel.file == "bwd_hopper"
    assert in_parts(planned((3, 2, 2, 1024, 64), (3, 2, 2, 77, 64)).problem).parts > 1


SHAPES = {  # q, k, v
    "few heads": ((1, 2, 1024, 64), (1, 2, 77, 64), (1, 2, 77, 64)),
    "rows of a layer": ((2, 768, 2, 64), (2, 70, 2, 64), (2, 70, 2, 64)),
    "keys of all": ((2, 2, 512, 40), (2, 130, 40), (2, 2, 130, 24)),
    "a group": ((1, 4, 1024, 128), (1, 2, 33, 128), (1, 2, 33, 128)),
    "wide": ((1, 1, 768, 200), (1, 1, 70, 200), (1, 1, 70, 200)),
}
WAYS = [("eager", False, "90a"), ("deferred", True, "90a"), ("eager", False, "80")]


@pytest.mark.parametrize("schedule, deterministic, arch", WAYS)
@pytest.mark.parametrize("name", quick(SHAPES, "few heads", "rows of a layer"))
@pytest.mark.parametrize("dtype", thinned(["float16", "bfloat16"]))
def test_gradients_of_parts(dtype, name, schedule, deterministic, arch, monkeypatch):
    """Also of lse, by a workspace of NaN, into memory of NaN."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    layout = "bshd" if name == "rows of a layer" else "bhsd"
    q, k, v = (RNG.standard_normal(shape).astype(DTYPES[dtype]) for shape in SHAPES[name])
    out, lse = attention(q, k, v, return_lse=True, layout=layout)
    dout, dlse = RNG.standard_normal(out.shape).astype(out.dtype), RNG.standard_normal(lse.shape).astype(lse.dtype)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    given |= {f"d{x}": numpy.full_like(given[x], numpy.nan) for x in "qkv"}
    plan = plan_attention_backward(**given, backend="host", arch=arch, layout=layout, deterministic=deterministic)
    kernel = "bwd_v2" if arch == "80" else "bwd_hopper_wide" if name == "wide" else "bwd_hopper"
    assert in_parts(plan.problem).parts > 1 and plan.kernel.file == kernel
    gradients = plan(**given, workspace=numpy.full(plan.workspace_bytes, 255, numpy.uint8))
    of_heads = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in (*gradients, dout, q, k, v)]
    dlse = dlse if layout == "bhsd" else dlse.swapaxes(1, 2)
    judged = compare_gradients(tuple(of_heads[:3]), *of_heads[3:], dlse=dlse, scale=plan.problem.forward.scale)
    assert judged.ok, judged.message
