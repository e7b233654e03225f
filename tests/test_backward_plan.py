"""How gradients are computed: tiles, grids and workspace of a plan, by the kernel that serves all architectures."""

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash import UnsupportedError, plan_attention_backward
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.backward import backward_launches
from cupy_flash.plan.grouping import BLOCKS_TOGETHER, FEWEST_BLOCKS, heads_per_block, heads_together
from cupy_flash.plan.matrix import every_plan
from cupy_flash.plan.tuning import BACKWARD_TABLES, WIDTHS, row_for
from cupy_flash.plan.workspace import ALIGNMENT, Workspace
from cupy_flash.problem.options import BACKWARD_KERNELS


def plan(*shapes, dtype=numpy.float16, **options):
    """The plan for arrays of these shapes, which hold nothing: only layouts matter."""
    q, k, v = (shapes * 3)[:3] if len(shapes) == 1 else (*shapes, *shapes[-1:])[:3]
    seen = numpy.broadcast_shapes(*(x[:-3] for x in (q, k, v))) + q[-3:-1]
    out, lse = numpy.zeros((*seen, v[-1]), dtype), numpy.zeros(seen, numpy.float32)
    return plan_attention_backward(out, *(numpy.zeros(x, dtype) for x in (q, k, v)), out, lse, backend="host", **options)


# Tiles


@pytest.mark.parametrize("name", BACKWARD_TABLES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_has_a_row_that_the_kernel_can_divide(name, dtype, width):
    """Half of the warps own each gradient, in 16, 32 or 64 rows; all share dQ, in 16 or 32 rows and steps of 16 columns."""
    if (name, dtype, width) == ("75", "float32", 256):
        with pytest.raises(UnsupportedError, match=r"at most 192 in float32 for bwd_v2 on sm_75, whose 64 KB .* up to 256"):
            row_for("bwd_v2", ARCHITECTURES[name], dtype, width, 1000)
        return
    for copy_bytes, explicit, in_order, len_q in product((16, 0), (False, True), (False, True), (100, 10_000)):
        row = row_for("bwd_v2", ARCHITECTURES[name], dtype, width, len_q, copy_bytes, explicit, in_order)
        assert row.width >= width and row.tile_q % 16 == 0
        assert row.warps % 2 == 0 and row.tile_kv / (row.warps / 2) in (16, 32, 64)
        parts = [(row.tile_q // height, row.warps // (row.tile_q // height)) for height in (16, 32) if row.tile_q >= height]
        assert any(down * across == row.warps and width % (16 * across) == 0 for down, across in parts)


def test_long_sums_in_order_have_a_tile_of_their_own():
    def tile(len_q, **options):
        config = plan((1, 5, len_q, 64), arch="90a", kernel="bwd_v2", **options).kernel.config
        return config.TILE_Q, config.TILE_KV

    assert tile(4096, deterministic=True) == (128, 128)
    assert tile(4096) == tile(4095, deterministic=True) == (64, 64)


def test_every_entry_fits_shared_memory():
    plans = list(every_plan(kernels=BACKWARD_KERNELS))
    assert len(plans) > 60
    for made in plans:
        assert max(made.entries.values()) == made.shared_bytes <= made.architecture.shared_bytes


@given(st.integers(1, 256), st.integers(1, 256))
def test_one_width_serves_all_arrays(dim, dim_v):
    made = plan((2, 5, dim), (2, 7, dim), (2, 7, dim_v))
    widest = min(width for width in WIDTHS if width >= max(dim, dim_v))
    assert made.kernel.config.WIDTH == made.kernel.config.WIDTH_V == widest


@pytest.mark.parametrize("moved", ["dout", "q", "k", "v", "out", "dq", "dk", "dv"])
def test_one_misaligned_array_decides_for_all(moved):
    arrays = dict(zip(("dout", "q", "k", "v", "out"), numpy.zeros((5, 2, 70, 64), numpy.float16)))
    given = dict(arrays, lse=numpy.zeros((2, 70), numpy.float32))
    given[moved] = numpy.zeros(2 * 70 * 64 + 2, numpy.float16)[2:].reshape(2, 70, 64)
    made = plan_attention_backward(**given, backend="host")
    assert made.kernel.config.COPY_BYTES == 4
    assert f"{moved} starts at a multiple of 4 bytes" in str(made)


def test_softcap_and_architecture_reach_the_kernel():
    assert plan((2, 70, 64), softcap=3.0).kernel.config.EXPLICIT_SCORES
    assert plan((2, 70, 64), arch="90").kernel.architecture.name == "90a"
    with pytest.raises(UnsupportedError, match="no bfloat16"):
        plan((2, 70, 64), dtype=ml_dtypes.bfloat16, arch="75")


def test_sizes_beyond_a_grid_are_refused():
    """Of blocks there are at most as many as a grid holds, in each of the three launches."""
    problem, kernel = plan((2, 70, 64)).problem, plan((2, 70, 64)).kernel
    huge = replace(problem, forward=replace(problem.forward, batch=(2**26,), heads_q=32, heads_kv=1, len_kv=1))
    with pytest.raises(UnsupportedError, match="fewer than 2147483648 blocks of bwd_v2_preprocess"):
        backward_launches(kernel, huge)


# Grids and workspace


def blocks(made):
    return {launch.entry.removeprefix("bwd_v2"): launch.blocks for launch in made.launches}


def test_one_block_for_each_tile_of_a_head():
    made = plan((5, 6, 1000, 64), (5, 6, 700, 64))
    tiles_q, tiles_kv = -(-1000 // made.kernel.config.TILE_Q), -(-700 // made.kernel.config.TILE_KV)
    assert blocks(made) == {"_preprocess": 30 * tiles_q, "": 30 * tiles_kv, "_postprocess": 30 * tiles_q}
    assert {launch.entry: launch.shared_bytes for launch in made.launches} == made.kernel.entries


@pytest.mark.parametrize("batch, together", [(1, 1), (50, 2), (80, 3), (131, 3), (132, 6), (200, 6)])
def test_heads_of_a_group_are_split_where_blocks_are_few(batch, together):
    """One tile of keys and two heads of them make ``2 * batch`` blocks, or more if the six heads of a group are split."""
    made = plan((batch, 12, 64, 64), (batch, 2, 64, 64))
    assert heads_per_block(made.kernel, made.problem) == together
    assert blocks(made)[""] == 2 * batch * 6 // together
    assert ("dk_accum" in made.workspace.names) == (together < 6) == (blocks(made)["_postprocess"] > blocks(made)["_preprocess"])


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 3))
def test_heads_per_block_is_the_largest_divisor_that_leaves_enough_blocks(group, batch, heads_kv):
    made = plan((2, 5, 64))
    forward = replace(made.problem.forward, batch=(batch,), heads_q=group * heads_kv, heads_kv=heads_kv, len_kv=1)
    together = heads_per_block(made.kernel, replace(made.problem, forward=forward))
    enough = [d for d in range(1, group + 1) if group % d == 0 and batch * heads_kv * (group // d) >= FEWEST_BLOCKS]
    assert together == max(enough, default=1)


@given(st.integers(0, 100_000))
def test_heads_take_turns_until_there_are_enough_blocks(len_kv):
    made = plan((2, 5, 64))
    problem = replace(made.problem, forward=replace(made.problem.forward, len_kv=len_kv))
    tiles, together = max(1, -(-len_kv // made.kernel.config.TILE_KV)), heads_together(made.kernel, problem)
    assert together == 1 or together * tiles <= BLOCKS_TOGETHER < (together + 1) * tiles


def test_workspace_has_the_parts_that_are_needed():
    def names(*shapes, **options):
        return plan(*shapes, **options).workspace.names

    assert names((300, 2, 70, 64)) == ("stats", "dq_accum")
    assert names((300, 2, 70, 64), deterministic=True) == ("stats", "dq_accum", "dq_semaphore")
    assert names((300, 2, 70, 64), (1, 2, 70, 64)) == ("stats", "dq_accum", "dk_accum", "dv_accum")
    assert names((2, 70, 64), (300, 2, 70, 64)) == ("stats", "dq_accum")
    assert names((4, 70, 64), (2, 70, 64)) == ("stats", "dq_accum", "dk_accum", "dv_accum")


def test_workspace_sizes():
    made = plan((3, 6, 100, 64), (3, 2, 200, 64), deterministic=True)
    c = made.kernel.config
    tiles_q, tiles_kv = -(-100 // c.TILE_Q), -(-200 // c.TILE_KV)
    assert heads_per_block(made.kernel, made.problem) == 1
    assert dict(made.workspace.parts) == {
        "stats": 4 * 3 * 6 * tiles_q * 2 * c.TILE_Q,
        "dq_accum": 4 * 3 * 6 * tiles_q * c.TILE_Q * 64,
        "dk_accum": 4 * 3 * 2 * 3 * tiles_kv * c.TILE_KV * 64,
        "dv_accum": 4 * 3 * 2 * 3 * tiles_kv * c.TILE_KV * 64,
        "dq_semaphore": 4 * 3 * 6 * tiles_q,
    }
    assert made.workspace_bytes >= sum(size for _, size in made.workspace.parts)


@given(st.lists(st.integers(0, 1000), max_size=5))
def test_parts_lie_apart_and_aligned(sizes):
    workspace = Workspace(tuple((str(i), size) for i, size in enumerate(sizes)))
    assert all(offset % ALIGNMENT == 0 for offset in workspace.offsets)
    ends = [offset + size for offset, size in zip(workspace.offsets, sizes)]
    assert all(end <= start for end, start in zip(ends, workspace.offsets[1:]))
    assert workspace.nbytes == (ends[-1] if sizes else 0)
    assert {name: len(part) for name, part in workspace.on_host().items()} == dict(workspace.parts)


def test_nothing_is_launched_without_a_query_head():
    for q, k in (((0, 2, 5, 64), (1, 2, 7, 64)), ((0, 5, 64), (2, 7, 64))):
        assert set(blocks(plan(q, k)).values()) == {0}


def test_keys_that_nobody_asks_for_still_get_their_zeros():
    assert blocks(plan((2, 0, 64), (2, 200, 64)))[""] > 0
    assert blocks(plan((2, 200, 64), (2, 0, 64)))["_postprocess"] > 0


def test_a_plan_prints_what_it_decided():
    text = str(plan((2, 6, 100, 64), (2, 2, 150, 64), causal=True, deterministic=True))
    for part in ("gradients of attention of float16", "6 heads on 2", "keys 0 ... i+50", "bitwise reproducible", "bwd_v2 for"):
        assert part in text
    made = plan((2, 6, 100, 64), (2, 2, 150, 64), causal=True)
    for part in (f"workspace {made.workspace_bytes} bytes: stats", "dk_accum", "bwd_v2_preprocess", "results", "FLOPs"):
        assert part in str(made)
    assert made.result_bytes == 2 * 2 * 64 * (6 * 100 + 2 * 2 * 150)
