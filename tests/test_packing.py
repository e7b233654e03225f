"""Heads of a group that share a tile, where each has few queries: what the kernel is told, its plan, and what it computes."""

import math
from itertools import product

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from thinned import quick, thinned

from cupy_flash import UnsupportedError, plan_attention
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.oracle import sees
from cupy_flash.machine.host import SCHEDULES
from cupy_flash.plan.packing import packing_of
from cupy_flash.plan.tuning import SHORT
from cupy_flash.problem import arrays
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.options import Options

KERNELS = {"fwd_v1": "80", "fwd_v2": "80", "fwd_hopper": "90a"}  # and an architecture to execute each for
MASKS = ({}, {"causal": True}, {"causal": "top_left"}, *({"window": w} for w in ((0, 0), (5, 0), (40, 9), (None, 3), (300, 300))))
MASKS += ({"causal": True, "window": (17, 3)}, {"causal": "top_left", "window": (3, None)})
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def zeros(*shape):
    return numpy.zeros(shape, numpy.float16)


def planned(q, k, v=None, kernel="fwd_v2", **options):
    return plan_attention(q, k, k if v is None else v, backend="host", arch=KERNELS[kernel], kernel=kernel, **options)


def judged(plan, q, k, v, **results):
    """The results of a plan, once they have been compared with attention in float64."""
    p = plan.problem
    out, lse = plan(q, k, v, **results)
    comparison = compare(out, lse, q, k, v, scale=p.scale, first_key=p.mask.left, last_key=p.mask.right, softcap=p.softcap)
    assert comparison.ok, comparison.message
    return out, lse


def blocks_of(plan):
    [launch] = plan.launches
    return launch.blocks


# What the kernel is told


def view(array, layout, skipped_bytes=0):
    """What a kernel sees that is told of this layout."""
    memory = numpy.frombuffer(array.base if array.base is not None else array, array.dtype)
    start = (array.ctypes.data + skipped_bytes - memory.ctypes.data) // array.itemsize
    strides = [stride * array.itemsize for stride in layout.strides]
    return as_strided(memory[start:], layout.shape, strides)


def numbered(shape, order, backwards):
    """An array of which each element differs, its axes in some order in memory, and some of them backwards."""
    stored = numpy.arange(math.prod(shape), dtype=numpy.float32).reshape([shape[axis] for axis in order])
    x = stored.transpose(numpy.argsort(order))
    return x[tuple(slice(None, None, -1 if b else 1) for b in backwards)]


@st.composite
def problems(draw):
    """Arrays of few queries to a head, and options."""
    group, heads_kv, batch, len_kv, queries = (draw(st.integers(1, n)) for n in (8, 3, 2, 70, 5))
    of_q, of_k = (batch, group * heads_kv, queries, 8), (batch, heads_kv, len_kv, 8)
    plain = draw(st.booleans())
    laid = []
    for shape in (of_q, of_k, of_k, of_q, of_q[:-1]):
        axes = range(len(shape))
        order, backwards = draw(st.permutations(axes)), [draw(st.booleans()) for _ in axes]
        laid.append(numbered(shape, axes if plain else order, [False] * len(axes) if plain else backwards))
    return laid, draw(st.sampled_from(MASKS))


@given(problems())
def test_the_kernel_sees_the_same_elements(drawn):
    (q, k, v, out, lse), options = drawn
    layouts = [arrays.layout(x) for x in (q, k, v)]
    problem = make_problem(*layouts, Options(backend="host", return_lse=True, **options), arrays.layout(out), arrays.layout(lse))
    packing = packing_of(problem)
    packed, group, queries = packing.problem, problem.heads_per_kv, problem.len_q
    seen = sees(queries, problem.len_kv, problem.mask.left, problem.mask.right)
    even = queries == 1 or all(x.strides[1] == queries * x.strides[2] for x in (q, out, lse))
    if group == 1 or not even or not seen.any():
        assert packed is problem and not packing.reason
        return
    each = "one query" if queries == 1 else f"{queries} queries"
    assert packing.reason == f"{group} query heads of a group share a tile: {each} each"
    assert (packed.heads_q, packed.heads_kv, packed.heads_per_kv, packed.len_q) == (
        problem.heads_kv,
        problem.heads_kv,
        1,
        group * queries,
    )
    assert packed.mask.pairs * problem.heads_kv == problem.mask.pairs * problem.heads_q
    for array, layout in ((q, packed.q), (out, packed.out), (lse, packed.lse)):
        rows = array.reshape(len(array), packed.heads_q, group * queries, *array.shape[3:])  # head after head
        assert numpy.array_equal(view(array, layout), rows)
    keys = numpy.flatnonzero(seen.any(0))
    for array, layout, skipped in zip((k, v), (packed.k, packed.v), packing.skipped_bytes):
        assert numpy.array_equal(view(array, layout, skipped), array[:, :, keys])
        assert numpy.array_equal(array[:, :, packing.keys], array[:, :, keys])
        assert (array.ctypes.data + skipped) % layout.alignment == 0
    assert numpy.array_equal(sees(queries, packed.len_kv, packed.mask.left, packed.mask.right), seen[:, keys])
    assert packed.mask.queries == (None if seen[:, keys].all() else queries)
    assert packing_of(packed).problem is packed


@pytest.mark.parametrize(
    "q, k",
    [
        ((2, 6, 65, 64), (2, 3, 50, 64)),
        ((2, 6, 0, 64), (2, 3, 50, 64)),
        ((3, 1, 64), (3, 50, 64)),
        ((6, 1, 64), (3, 0, 64)),
        ((0, 1, 8), (0, 5, 8)),
    ],
    ids=str,
)
def test_others_stay_as_they_are(q, k):
    """Many queries or none, heads of their own, no keys, no heads."""
    plan = planned(zeros(*q), zeros(*k))
    assert packing_of(plan.problem).problem is plan.problem and "share a tile" not in str(plan)


# The plan


@every_kernel
def test_a_plan_has_fewer_blocks_and_says_why(kernel):
    plan = planned(zeros(2, 21, 1, 64), zeros(2, 3, 100, 64), kernel=kernel)
    assert plan.kernel.file == kernel and blocks_of(plan) == 2 * 3
    assert "7 query heads of a group share a tile: one query each" in plan.kernel.reasons
    few = planned(zeros(2, 21, 2, 64), zeros(2, 3, 100, 64), kernel=kernel)
    assert blocks_of(few) == 2 * 3 and "7 query heads of a group share a tile: 2 queries each" in few.kernel.reasons
    apart = zeros(2, 21, 3, 64)[:, :, :2]
    assert blocks_of(planned(apart, zeros(2, 3, 100, 64), kernel=kernel)) == 2 * 21
    alone = planned(zeros(2, 3, 1, 64), zeros(2, 3, 100, 64), kernel=kernel)
    assert plan.workspace_bytes == alone.workspace_bytes and plan.kernel == alone.kernel


def test_a_group_beyond_a_tile_has_several():
    plan = planned(zeros(1, 390, 1, 64), zeros(1, 3, 20, 64))
    assert blocks_of(plan) == 3 * -(-130 // plan.kernel.config.TILE_Q) > 3


def test_the_plan_shows_what_was_asked_for():
    plan = planned(zeros(2, 6, 1, 64), zeros(2, 3, 100, 64), window=(9, 0))
    assert "6 heads on 3, 1 queries on 100 keys" in str(plan) and "keys i+90 ... " in str(plan)
    assert plan.problem.flops == 2 * 128 * 10 * 6 * 2 and plan.result_bytes == 2 * 6 * 64 * 2


@pytest.mark.parametrize("kernel", ["fwd_v2", "fwd_hopper"])
def test_keys_and_values_are_read_once(kernel):
    case = Case("float16", 1, 150, heads_q=12, heads_kv=2, batch=(2,))
    inputs = make_inputs(case)
    plan = planned(*inputs, kernel=kernel)
    _, traffic = plan.counted(*inputs)
    q, k, v = (x.nbytes for x in inputs)
    assert traffic.read_bytes == plan.kernel.config.WARPS_KV * q + k + v


def test_one_key_left_decides_how_it_is_copied():
    """Rows 130 bytes apart are no obstacle where there is one row, but then it starts anywhere."""
    k = zeros(1, 100, 72)[..., :65][..., :64]
    assert planned(zeros(1, 2, 1, 64), k, window=(0, 0)).kernel.config.COPY_BYTES == 16
    k = zeros(1, 100, 65)[..., :64]
    plan = planned(zeros(1, 2, 1, 64), k, window=(0, 0))
    assert "k starts at a multiple of 2 bytes only" in str(plan) and plan.kernel.config.COPY_BYTES == 0
    with pytest.raises(UnsupportedError, match=r"kernel: .* k starts at a multiple of 2 bytes only, not of 16"):
        planned(zeros(1, 2, 1, 64), k, kernel="fwd_hopper", window=(0, 0))


def test_heads_without_a_map_are_packed_all_the_same():
    q, kv = zeros(64, 6, 1, 68)[..., :64], zeros(64, 3, 600, 64)
    plan = plan_attention(q, kv, kv, backend="host", arch="90a")
    assert plan.kernel.file == "fwd_v2" and "no TMA: rows of q start 136 bytes apart" in str(plan) and blocks_of(plan) == 64 * 3


# What it computes


@every_kernel
@settings(max_examples=15)
@given(
    group=st.sampled_from([2, 3, 8]),
    heads_kv=st.integers(1, 3),
    len_kv=st.integers(1, 200),
    mask=st.sampled_from(MASKS),
    layout=st.sampled_from(["contiguous", "bshd", "sliced", "negative", "broadcast"]),
)
@example(group=8, heads_kv=3, len_kv=200, mask={"window": (40, 9)}, layout="bshd")
@example(group=3, heads_kv=2, len_kv=131, mask={"causal": "top_left"}, layout="contiguous")
def test_it_is_attention(kernel, group, heads_kv, len_kv, mask, layout):
    if (kernel, layout) == ("fwd_hopper", "negative"):
        layout = "contiguous"
    case = Case("float16", 1, len_kv, dim=40, heads_q=group * heads_kv, heads_kv=heads_kv, batch=(2,), layout=layout, **mask)
    inputs = make_inputs(case)
    plan = planned(*inputs, kernel=kernel, **case.options)
    assert blocks_of(plan) == 2 * heads_kv
    judged(plan, *inputs)


@pytest.mark.parametrize("order", thinned(SCHEDULES))
@pytest.mark.parametrize("kernel", thinned(["fwd_v2", "fwd_hopper"]))
def test_few_queries_are_attention(kernel, order):
    """Several of a head in a tile, each with its own keys, and heads that begin in the middle of a warp's rows."""

    @settings(max_examples=15)
    @given(st.sampled_from([2, 3, 8]), st.integers(2, 64), st.integers(1, 200), st.sampled_from(MASKS))
    @example(8, 17, 200, {"window": (40, 9)})
    @example(3, 50, 20, {"causal": True})  # some of which see nothing
    @example(3, 40, 148, {"causal": True})  # a warp's first rows see keys 64 ... 127, its last ones few
    @example(2, 64, 200, {"window": (5, 0)})  # and other keys in each tile
    def judge(group, queries, len_kv, mask):
        case = Case("float16", queries, len_kv, dim=40, heads_q=2 * group, heads_kv=2, batch=(2,), **mask)
        inputs = make_inputs(case)
        plan = planned(*inputs, kernel=kernel, **case.options)
        packed = packing_of(plan.problem).problem
        c = plan.kernel.config
        assert packed.len_q == group * queries and c.PACK_GQA is (packed.mask.queries is not None)
        few = 16 if packed.len_q <= 16 else SHORT  # rows: others of the table would spill
        assert kernel != "fwd_v2" or not c.PACK_GQA or few == c.TILE_Q
        assert blocks_of(plan) == 4 * -(-packed.len_q // c.TILE_Q)
        judged(plan, *inputs)

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUPY_FLASH_HOST_SCHEDULE", order)
        judge()


def test_a_warp_with_the_end_of_one_head_and_the_beginning_of_the_next():
    """Rows 32 to 63 of a group are queries 32 to 59, none of which sees the first 32 keys, and 0 to 3, which do."""
    case = Case("float32", 60, 65, dim=64, heads_q=2, heads_kv=1, window=(5, 0))
    inputs = make_inputs(case)
    plan = planned(*inputs, **case.options)
    c = plan.kernel.config
    assert c.PACK_GQA and c.TILE_KV == 32 and c.TILE_Q // c.WARPS == 32
    judged(plan, *inputs)


@pytest.mark.parametrize("mask", thinned([{}, {"causal": True}, {"window": (1600, 0)}], keep=3, first=1), ids=str)
def test_few_queries_on_many_keys_are_shared_by_blocks(mask):
    case = Case("float16", 7, 2000, dim=40, heads_q=6, heads_kv=3, **mask)
    inputs = make_inputs(case)
    plan = planned(*inputs, kernel="fwd_hopper", **case.options)
    c = plan.kernel.config
    assert (
        c.SPLIT_KV and c.PACK_GQA is bool(mask) and "2 query heads of a group share a tile: 7 queries each" in plan.kernel.reasons
    )
    judged(plan, *inputs)


def test_the_first_order_of_loops_packs_only_what_has_no_band():
    for options, blocks in (({}, 3), ({"causal": True}, 6)):
        plan = planned(zeros(1, 6, 2, 64), zeros(1, 3, 50, 64), kernel="fwd_v1", **options)
        assert blocks_of(plan) == blocks and not plan.kernel.config.PACK_GQA


OTHERS = [
    Case("bfloat16", 1, 90, dim=72, heads_q=6, heads_kv=3, softcap=30.0, values="large"),
    Case("float16", 1, 90, dim=72, dim_v=40, heads_q=16, heads_kv=2, batch=(2,), window=(30, 0), layout="bshd"),
]
WITH_KERNELS = list(product(OTHERS, KERNELS))


@pytest.mark.parametrize("case, kernel", quick(WITH_KERNELS, *WITH_KERNELS[::2], spread=True), ids=str)
def test_other_scores_and_widths(case, kernel):
    inputs = make_inputs(case)
    plan = planned(*inputs, kernel=kernel, **case.options)
    assert blocks_of(plan) == math.prod(case.batch) * case.heads_kv
    judged(plan, *inputs)


@pytest.mark.parametrize("kernel", ["fwd_v2", "fwd_hopper"])
def test_without_an_lse(kernel):
    case = Case("float16", 1, 90, dim=40, heads_q=6, heads_kv=2, return_lse=False)
    inputs = make_inputs(case)
    comparison = compare(planned(*inputs, kernel=kernel)(*inputs), None, *inputs, **case.scores)
    assert comparison.ok, comparison.message


@pytest.mark.parametrize("kernel, heads", [("fwd_v1", -1), ("fwd_v2", -1), ("fwd_v2", 3), ("fwd_hopper", 3)])
def test_results_into_arrays_given(kernel, heads):
    """Every third head of larger memory, or heads backwards; what lies between keeps what it held."""
    q, k, v = make_inputs(Case("float16", 1, 77, dim=40, heads_q=6, heads_kv=2, batch=(2,)))
    taken = numpy.s_[:, ::heads, 1:2] if heads < 0 else numpy.s_[:, 2::heads, 1:2]
    out_memory, lse_memory = numpy.full((2, 6 * abs(heads), 3, 48), 77, "f2"), numpy.full((2, 6 * abs(heads), 3), 77, "f4")
    out, lse = out_memory[taken][..., :40], lse_memory[taken]
    plan = planned(q, k, v, kernel=kernel, window=(30, 0), out=out, lse=lse, return_lse=True)
    assert blocks_of(plan) == 2 * 2
    judged(plan, q, k, v, out=out, lse=lse)
    out[...], lse[...] = 77, 77
    assert (out_memory == 77).all() and (lse_memory == 77).all()


@pytest.mark.parametrize("kernel", ["fwd_v2", "fwd_hopper"])
def test_heads_seen_with_stride_0(kernel):
    """All heads have one query, so that their results are equal in a group and differ from those of another."""
    q, k, v = make_inputs(Case("float16", 1, 77, dim=40, heads_q=3, heads_kv=3))
    q = numpy.broadcast_to(q[:, :1], (1, 6, 1, 40))
    plan = planned(q, k, v, kernel=kernel, return_lse=True)
    assert blocks_of(plan) == 3
    out, _ = judged(plan, q, k, v)
    assert numpy.array_equal(out[:, ::2], out[:, 1::2]) and not numpy.array_equal(out[:, 0], out[:, 2])


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_a_query_that_sees_nothing(causal):
    q, k = numpy.ones((2, 6, 1, 40), numpy.float16), zeros(2, 3, 0, 40)
    out, lse = plan_attention(q, k, k, backend="host", causal=causal, return_lse=True)(q, k, k)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("kernel", ["fwd_v2", "fwd_hopper"])
def test_keys_outside_the_window_are_not_read(kernel):
    """NaN in a key that the query does not see, also next to one that it does."""
    q, k, v = make_inputs(Case("float16", 1, 140, dim=40, heads_q=4, heads_kv=2))
    k[:, :, :120] = v[:, :, :120] = numpy.nan
    out, lse = planned(q, k, v, kernel=kernel, window=(19, 0), return_lse=True)(q, k, v)
    comparison = compare(out, lse, q, k[:, :, 120:], v[:, :, 120:], scale=40**-0.5)
    assert comparison.ok, comparison.message
