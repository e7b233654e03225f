"""Which backward a problem gets where there are kernels for one architecture: their tiles, grids and workspace."""

import math
from dataclasses import replace

import ml_dtypes
import numpy
import pytest

from cupy_flash import UnsupportedError, attention_backward, plan_attention_backward
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.backward import backward_launches
from cupy_flash.plan.grouping import FEWEST_BLOCKS, LAST_BLOCKS, heads_per_block, heads_together, make_grouping
from cupy_flash.plan.tuning import WIDTHS, table_for

SM_90A, NARROW, WIDE = ARCHITECTURES["90a"], "bwd_hopper", "bwd_hopper_wide"
MAPPED = ("q", "k", "v", "dout", "dq", "dk", "dv")


def array(*shape, dtype=numpy.float16):
    return numpy.zeros(shape, dtype)


def operands(q, k=None, v=None, dtype=numpy.float16):
    """Every array of a call for inputs of these shapes, by name, its results included."""
    k = k or q
    v = v or k
    rows = numpy.broadcast_shapes(q[:-3], k[:-3], v[:-3]) + q[-3:-1]
    shapes = {"dout": (*rows, v[-1]), "q": q, "k": k, "v": v, "out": (*rows, v[-1]), "dq": q, "dk": k, "dv": v}
    return {name: array(*shape, dtype=dtype) for name, shape in shapes.items()} | {"lse": array(*rows, dtype=numpy.float32)}


def planned(given, **options):
    return plan_attention_backward(**given, **{"backend": "host", "arch": "90a"} | options)


def plan_of(*shapes, dtype=numpy.float16, **options):
    return planned(operands(*shapes, dtype=dtype), **options)


def kernel_of(made):
    return made.kernel.file


# The kernel


@pytest.mark.parametrize("dtype", [numpy.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.3}, {"deterministic": True}, {"algorithm": "v2"}], ids=str)
@pytest.mark.parametrize("dim, kernel", [(8, NARROW), (64, NARROW), (128, NARROW), (136, WIDE), (256, WIDE)])
def test_sm_90a_has_kernels_for_16_bits(dim, kernel, options, dtype):
    made = plan_of((2, 3, 70, dim), dtype=dtype, **options)
    assert kernel_of(made) == kernel and "no TMA" not in str(made)


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"scale": 0.0}, {"scale": -1}], ids=str)
@pytest.mark.parametrize("dim, kernel", [(64, NARROW), (72, NARROW), (128, NARROW), (136, WIDE), (256, WIDE)])
def test_scores_scaled_one_by_one_leave_registers_for_64_queries(dim, kernel, options):
    for made in (plan_of((2, 3, length, dim), **options) for length in (70, 5000)):
        assert kernel_of(made) == kernel and made.kernel.config.EXPLICIT_SCORES and made.kernel.config.TILE_Q == 64
    if kernel == WIDE:
        with pytest.raises(UnsupportedError, match=f"kernel: expected .*'bwd_v2'.*, got '{NARROW}': .* head dims"):
            plan_of((2, 3, 70, dim), **options, kernel=NARROW)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dim, kernel", [(64, NARROW), (256, WIDE)])
def test_others_have_not(arch, dim, kernel):
    if arch != "90a":
        assert kernel_of(plan_of((2, 70, dim), arch=arch)) == "bwd_v2"
        with pytest.raises(UnsupportedError, match=rf"kernel: expected .*'bwd_v2'.*, got '{kernel}': .* float16 on sm_{arch}"):
            plan_of((2, 70, dim), arch=arch, kernel=kernel)
    else:
        assert kernel_of(plan_of((2, 70, dim))) == kernel


@pytest.mark.parametrize("options", [{}, {"precision": "tf32"}], ids=str)
def test_float32_has_none(options):
    assert kernel_of(plan_of((2, 70, 64), dtype=numpy.float32, **options)) == "bwd_v2"
    for kernel in (NARROW, WIDE):
        with pytest.raises(UnsupportedError, match=f"kernel: expected .*'bwd_v2'.*, got '{kernel}': .* float32 on sm_90a"):
            plan_of((2, 70, 64), dtype=numpy.float32, kernel=kernel, **options)


CANNOT_MOVE = {
    "rows 136 bytes apart": (lambda n: array(2, n, 68)[..., :64], "rows of {} start 136 bytes apart, not a multiple of 16"),
    "backwards": (lambda n: array(2, n, 64)[:, ::-1], "rows of {} start -128 bytes apart, backwards"),
    "off 16 bytes": (lambda n: array(2 * n * 64 + 4)[4:].reshape(2, n, 64), "{} starts at a multiple of 8 bytes only, not of 16"),
    "every second element": (lambda n: array(2, n, 128)[..., ::2], "elements of {} start 4 bytes apart, not 2"),
}


@pytest.mark.parametrize("how", CANNOT_MOVE)
@pytest.mark.parametrize("moved", MAPPED)
def test_without_a_map_of_every_array_the_plan_says_why(moved, how):
    make, why = CANNOT_MOVE[how]
    given = operands((2, 70, 64), (2, 90, 64))
    given[moved] = make(given[moved].shape[-2])
    made = planned(given)
    why = f"no TMA: {why.format(moved)}"
    assert kernel_of(made) == "bwd_v2" and why in made.kernel.reasons
    assert "no TMA" not in str(planned(given, arch="80"))  # where nothing would be moved by it
    with pytest.raises(UnsupportedError, match=f"kernel: expected .*'bwd_v2'.*, got '{NARROW}': {why}"):
        planned(given, kernel=NARROW)


@pytest.mark.parametrize("dim, dim_v, ragged", [(60, 64, "dq"), (64, 60, "dv")])
def test_rows_that_end_within_16_bytes_are_read_but_not_written_by_the_copy_engine(dim, dim_v, ragged):
    """It would write beyond their end, into rows of 128 bytes of which 120 are given."""
    dims = {name: dim_v if name in ("v", "dv", "out", "dout") else dim for name in operands((2, 70, 64)) if name != "lse"}
    given = {name: x[..., : dims[name]] if name in dims else x for name, x in operands((2, 70, 64)).items()}
    made = planned(given)
    assert kernel_of(made) == "bwd_v2" and f"no TMA: rows of {ragged} have 120 bytes, not a multiple of 16" in made.kernel.reasons


@pytest.mark.parametrize("how", CANNOT_MOVE)
def test_what_threads_read_needs_no_map(how):
    """Those of the first kernel read out, which needs smaller copies then, and lse."""
    given = operands((2, 70, 64)) | {"out": CANNOT_MOVE[how][0](70), "lse": array(2, 70, 3, dtype=numpy.float32)[..., 1]}
    made = planned(given, dlse=array(70, 2, dtype=numpy.float32).T)
    copies = {"rows 136 bytes apart": 8, "backwards": 16, "off 16 bytes": 8, "every second element": 0}[how]
    assert (kernel_of(made), made.kernel.config.COPY_BYTES) == (NARROW, copies)


@pytest.mark.parametrize("shapes", [((2, 5, 64), (2, 0, 64)), ((2, 0, 64), (2, 5, 64)), ((0, 5, 64), (0, 5, 64))], ids=str)
def test_empty_arrays_have_no_map(shapes):
    made = plan_of(*shapes)
    assert kernel_of(made) == "bwd_v2" and "has no elements" in str(made)


def test_two_batch_axes_are_left_at_most():
    given = {name: x[:, ::2, ::2] for name, x in operands((2, 3, 3, 2, 70, 64)).items()}
    two = {name: x[0] for name, x in given.items()}
    assert kernel_of(planned(two)) == NARROW
    made = planned(given)
    assert kernel_of(made) == "bwd_v2" and "no TMA: 3 batch axes are left after merging, more than 2" in made.kernel.reasons


# A kernel asked for


@pytest.mark.parametrize("dim, own", [(64, NARROW), (192, WIDE)])
def test_the_kernel_asked_for_is_planned(dim, own):
    given = operands((2, 70, dim))
    assert planned(given, kernel=own).kernel == planned(given).kernel
    generic = planned(given, kernel="bwd_v2")
    assert kernel_of(generic) == "bwd_v2" and "bwd_v2 was asked for" in str(generic)
    assert planned(given, kernel="bwd_v2", arch="80").kernel == planned(given, arch="80").kernel
    assert kernel_of(planned(given, kernel=WIDE)) == WIDE  # narrow heads are computed by it as well


def test_a_head_too_wide_is_refused():
    with pytest.raises(UnsupportedError, match=f"kernel: expected .*'bwd_v2'.*, got '{NARROW}': .* head dims"):
        plan_of((2, 70, 64), (2, 90, 64), (2, 90, 136), kernel=NARROW)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"kernel": "bwd_v3"}, ValueError, "kernel: expected one of .*'bwd_hopper'.*, got 'bwd_v3'"),
        ({"kernel": "fwd_hopper"}, ValueError, "kernel: expected one of .*'bwd_v2'.*, got 'fwd_hopper'"),
        ({"kernel": 2}, TypeError, "kernel: expected one of .*, got 2"),
        ({"kernel": ["bwd_v2"]}, TypeError, "kernel: expected one of .*, got"),
        ({"kernel": "bwd_v2", "backend": "numpy", "arch": None}, ValueError, "kernel: expected None on backend 'numpy'"),
        ({"kernel": "bwd_v2", "algorithm": "v1"}, UnsupportedError, "algorithm: expected 'auto' or 'v2' for a backward"),
    ],
)
def test_kernels_that_cannot_serve_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        plan_of((2, 70, 64), **options)


def test_attention_backward_takes_no_kernel():
    with pytest.raises(TypeError, match="kernel"):
        attention_backward(**operands((2, 70, 64)), kernel="bwd_v2")


# Its constants


@pytest.mark.parametrize("dim, dim_v", [(8, 8), (64, 40), (40, 72), (128, 1), (130, 192), (8, 200), (256, 256)])
def test_one_width_serves_all_arrays(dim, dim_v):
    """That of a row: it has a table for every width, and all panels of a tile are whole."""
    made = plan_of((2, 3, 70, (dim + 7) // 8 * 8), (2, 3, 90, (dim + 7) // 8 * 8), (2, 3, 90, (dim_v + 7) // 8 * 8))
    c = made.kernel.config
    widths = [row.width for row in table_for(kernel_of(made), SM_90A, "float16")]
    assert c.WIDTH == c.WIDTH_V == min(width for width in widths if width >= max(dim, dim_v)) and c.WIDTH % 64 == 0


@pytest.mark.parametrize("kernel", [NARROW, WIDE])
def test_rows_can_be_divided(kernel):
    rows = table_for(kernel, SM_90A, "float16")
    assert rows[-1].width in WIDTHS and [row.width for row in rows] == sorted(row.width for row in rows)
    for row in rows:
        groups = row.warps // 4 - 1  # one serves them
        assert row.warps % 4 == 0 and row.width % 64 == 0 and row.tile_q % 16 == 0 and row.stages & (row.stages - 1) == 0
        assert row.tile_q % 64 == 0 or row.tma_reduce_dq
        assert not row.tma_reduce_dq or (kernel == NARROW and row.width == 64 * groups)  # dq is dealt out by its columns
        assert row.tile_kv == (64 * groups if kernel == NARROW else 64)


@pytest.mark.parametrize("options, explicit", [({}, False), ({"softcap": 5.0}, True), ({"scale": 0}, True), ({"scale": -1}, True)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_are_scaled_one_by_one_only_where_they_must(dim, options, explicit):
    made = plan_of((1, 70, dim), **options)
    assert made.kernel.config.EXPLICIT_SCORES is explicit
    wide_enough = [row for row in table_for(kernel_of(made), SM_90A, "float16") if row.width >= dim]
    row = next(row for row in wide_enough if not (explicit and row.plain_scores))
    assert [row.tile_q, row.tile_kv] == [made.kernel.config.TILE_Q, made.kernel.config.TILE_KV]


@pytest.mark.parametrize("len_q, causal, tile", [(1536, False, 64), (1537, False, 80), (4096, True, 64), (4097, True, 80)])
def test_long_sequences_take_more_queries_a_step(len_q, causal, tile):
    c = plan_of((1, len_q, 128), (1, 4100, 128), causal=causal).kernel.config
    assert tile == c.TILE_Q and c.TMA_REDUCE_DQ is (tile == 80)
    assert plan_of((1, len_q, 64), (1, 4100, 64), causal=causal).kernel.config.TILE_Q == 128


# Its grids and its workspace


def launches(made):
    return {launch.entry.removeprefix(kernel_of(made)): launch.blocks for launch in made.launches}


def tiles_of(made):
    c, p = made.kernel.config, made.problem.forward
    return -(-p.len_q // c.TILE_Q), -(-p.len_kv // c.TILE_KV)


def finishing(made, heads):
    """Blocks that finish dq of so many heads: each of 12 warps has 16 rows."""
    return heads * -(-made.problem.forward.len_q // 192)


def last_of_300(made):
    """Heads of the last groups, of 300: of 38 groups, the last one has four."""
    _, keys = tiles_of(made)
    return 4 + (-(-LAST_BLOCKS // (8 * keys)) - 1) * 8


@pytest.mark.parametrize("dim, before", [(64, 29 * 8), (256, 300)])  # of dim 64 heads whose sums others use again
def test_the_last_block_of_a_head_finishes_its_queries(dim, before):
    """But those of the last heads, which blocks of their own finish; nothing is left to do after the loop."""
    made = plan_of((50, 6, 300, dim), (50, 6, 200, dim))
    queries, keys = tiles_of(made)
    in_loop = 300 * keys + finishing(made, last_of_300(made))
    assert launches(made) == {"_preprocess": before * queries, "": in_loop, "_postprocess": 0}
    assert {launch.entry: launch.shared_bytes for launch in made.launches} == made.kernel.entries
    assert all(launch.per_multiprocessor is None for launch in made.launches)


@pytest.mark.parametrize("last_blocks, groups", [(0, 0), (1, 1), (16, 1), (17, 2), (10_000, 625)])
@pytest.mark.parametrize("heads", [1, 8, 9, 27, 300])
def test_the_last_heads_are_those_of_the_last_groups(heads, last_blocks, groups, monkeypatch):
    made = plan_of((heads, 300, 64), (heads, 200, 64))
    monkeypatch.setattr("cupy_flash.plan.grouping.LAST_BLOCKS", last_blocks)
    grouping = make_grouping(made.kernel, made.problem)
    group_of = [head // 8 for head in range(heads)]
    last = [head for head in range(heads) if group_of[head] > group_of[-1] - groups]
    assert grouping.owners == 2 * heads
    assert (grouping.last_heads, grouping.finishing) == (heads - len(last), finishing(made, len(last)))


@pytest.mark.parametrize("heads, accum_heads", [(1, 1), (9, 9), (300, 29 * 8)])
def test_short_heads_use_sums_again(heads, accum_heads):
    """Two blocks a head: those of 13 groups start before others clear what the first group leaves, of 16 more before it is used."""
    made = plan_of((heads, 300, 64), (heads, 200, 64))
    grouping = make_grouping(made.kernel, made.problem)
    assert (grouping.accum_heads, grouping.reused, grouping.cleared_after) == (accum_heads, heads - accum_heads, 13 * 8)
    assert dict(made.workspace.parts)["dq_accum"] == 4 * accum_heads * 3 * 128 * 64


@pytest.mark.parametrize("seq, dim", [(2049, 64), (300, 256)])
def test_long_or_wide_heads_have_sums_of_their_own(seq, dim):
    made = plan_of((300, seq, dim), (300, 200, dim))
    grouping = make_grouping(made.kernel, made.problem)
    assert (grouping.accum_heads, grouping.reused) == (300, 0)


@pytest.mark.parametrize("seq", [1024, 1025, 2048, 2049])
@pytest.mark.parametrize("deterministic", [False, True])
def test_heads_whose_longest_blocks_come_last_have_sums_of_their_own_sooner(seq, deterministic):
    made = plan_of((300, seq, 64), causal=True, **({"mask": "kv_idx % 3 > 0", "deterministic": True} if deterministic else {}))
    assert (make_grouping(made.kernel, made.problem).reused > 0) == (seq <= (1024 if deterministic else 2048))


@pytest.mark.parametrize("dim, before", [(64, 29 * 8), (256, 300)])
def test_gradients_summed_over_a_batch_axis_are_finished_after_the_loop(dim, before):
    made = plan_of((1, 6, 300, dim), (50, 6, 200, dim))
    queries, keys = tiles_of(made)
    assert launches(made) == {"_preprocess": 300 * queries, "": 300 * keys, "_postprocess": 300 * queries}
    made = plan_of((50, 6, 300, dim), (1, 6, 200, dim))
    in_loop = 300 * keys + finishing(made, last_of_300(made))
    assert launches(made) == {"_preprocess": before * queries, "": in_loop, "_postprocess": 2 * 300 * keys}


@pytest.mark.parametrize("dim", [64, 256])
def test_heads_of_a_group_are_split_where_blocks_are_few(dim):
    made = plan_of((1, 12, 300, dim), (1, 2, 200, dim))
    queries, keys = tiles_of(made)
    assert heads_per_block(made.kernel, made.problem) == 1 and 12 * keys < FEWEST_BLOCKS
    assert launches(made) == {"_preprocess": 12 * queries, "": 12 * keys + finishing(made, 12), "_postprocess": 2 * 2 * keys}


def test_workspace_has_the_parts_that_are_needed():
    def names(*shapes, **options):
        made = plan_of(*shapes, **options)
        return kernel_of(made) == NARROW and made.workspace.names

    sums, parts = ("stats", "dq_accum"), ("dk_accum", "dv_accum")
    assert names((300, 2, 700, 64)) == (*sums, "dq_progress", "stats_progress")
    assert names((300, 2, 700, 64), deterministic=True) == (*sums, "dq_semaphore", "dq_progress", "stats_progress")
    assert names((300, 2, 700, 64), (1, 2, 700, 64)) == (*sums, *parts, "dq_progress", "stats_progress")
    assert names((2, 140, 64), (300, 2, 140, 64)) == sums
    assert names((2, 140, 64), (300, 2, 140, 64), deterministic=True) == (*sums, "dq_semaphore")
    assert names((12, 140, 64), (2, 140, 64)) == (*sums, *parts, "dq_progress")


@pytest.mark.parametrize("dim, width", [(40, 64), (200, 256)])
def test_workspace_sizes(dim, width):
    made = plan_of((2, 12, 100, dim), (2, 2, 200, dim), deterministic=True)
    c = made.kernel.config
    queries, keys = tiles_of(made)
    assert dict(made.workspace.parts) == {
        "stats": 4 * 2 * 12 * queries * 2 * c.TILE_Q,
        "dq_accum": 4 * 2 * 12 * queries * c.TILE_Q * width,
        "dk_accum": 4 * 2 * 2 * 6 * keys * c.TILE_KV * width,
        "dv_accum": 4 * 2 * 2 * 6 * keys * c.TILE_KV * width,
        "dq_semaphore": 4 * 2 * 12 * queries,
        "dq_progress": 4 * 2 * 12,
    }


def test_each_warpgroup_has_a_turn_where_sums_are_staged():
    made = plan_of((2, 3, 2100, 128), deterministic=True)
    queries, _ = tiles_of(made)
    assert made.kernel.config.TMA_REDUCE_DQ and dict(made.workspace.parts)["dq_semaphore"] == 4 * 2 * 3 * queries * 2


def together(seq, dim, **options):
    made = plan_of((1, 16, seq, dim), **options)
    return heads_together(made.kernel, made.problem)


@pytest.mark.parametrize(
    "dim, heads",
    [
        (64, {512: 8, 8192: 4, 16384: 4, 32768: 2}),
        (128, {4096: 8, 8192: 4, 16384: 2}),
        (256, {4096: 4, 8192: 2, 16384: 1, 65536: 1}),
    ],
)
def test_heads_in_turn_are_as_many_as_the_cache_holds(dim, heads):
    assert {seq: together(seq, dim) for seq in heads} == heads == {seq: together(seq, dim, causal=True) for seq in heads}


@pytest.mark.parametrize(
    "heads, options, backwards",
    [
        (27, {"causal": True, "deterministic": True}, 24),  # groups of 8
        (9, {"causal": True, "deterministic": True}, 8),
        (8, {"causal": True, "deterministic": True}, 8),  # one group, where nothing comes before that would hide the waiting
        (27, {"window": (50, 20), "deterministic": True}, 27),  # blocks of equal length
        (27, {"window": (50, None), "deterministic": True}, 0),
        (27, {"deterministic": True}, 0),
        (27, {"causal": True}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 256])
def test_heads_that_are_added_to_from_the_last_keys(dim, heads, options, backwards):
    made = plan_of((heads, 300, dim), (heads, 200, dim), **options)
    assert make_grouping(made.kernel, made.problem).backwards == backwards


def test_heads_in_turn_are_fewer_where_the_longest_blocks_come_last():
    in_order = {"deterministic": True, "causal": True}
    for dim, heads in ((128, {4096: 8, 8192: 4, 16384: 2, 32768: 2}), (256, {2048: 8, 4096: 4, 8192: 2, 16384: 1, 32768: 1})):
        assert {seq: together(seq, dim, **in_order) for seq in heads} == heads
        assert together(16384, dim, deterministic=True) == 4


def test_heads_in_turn_are_more_where_blocks_wait_for_each_other():
    assert {seq: together(seq, 64, deterministic=True) for seq in (512, 1024, 1025, 2048)} == {512: 16, 1024: 16, 1025: 8, 2048: 8}
    assert together(512, 64) == together(512, 64, causal=True, deterministic=True) == together(512, 256, deterministic=True) == 8


def test_a_plan_prints_what_it_decided():
    text = str(plan_of((2, 6, 100, 64), (2, 2, 150, 64), causal=True, deterministic=True))
    for part in ("bwd_hopper for sm_90a", "bwd_hopper_preprocess", "bwd_hopper_postprocess", "bitwise reproducible", "dq_progress"):
        assert part in text


def test_tiles_beyond_a_grid_are_refused():
    made = plan_of((2, 70, 64))
    huge = replace(made.problem, forward=replace(made.problem.forward, batch=(2**26,), heads_q=32, heads_kv=1, len_kv=1))
    with pytest.raises(UnsupportedError, match="fewer than 2147483648 blocks of bwd_hopper_preprocess"):
        backward_launches(made.kernel, huge)
    assert math.prod(huge.forward.batch) * 32 == 2**31
