"""Which forward a problem gets where there is a kernel for one architecture: fwd_hopper, its rows and its grid."""

from dataclasses import replace

import ml_dtypes
import numpy
import pytest
from hypothesis import example, given, strategies

from cupy_flash import UnsupportedError, attention, plan_attention
from cupy_flash.machine import host
from cupy_flash.plan import tuning
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.forward import make_forward_plan
from cupy_flash.plan.forward_maps import forward_maps
from cupy_flash.plan.launch import Launch
from cupy_flash.plan.params import fast_divmod
from cupy_flash.plan.schedule import COMBINING, LEAST_SPLIT
from cupy_flash.plan.tuning import HOPPER, TileConfig
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.options import Options

SM_90A = ARCHITECTURES["90a"]


def array(*shape, dtype=numpy.float16):
    return numpy.zeros(shape, dtype)


def planned(q, k=None, v=None, **options):
    k = q if k is None else k
    return plan_attention(q, k, k if v is None else v, **{"backend": "host", "arch": "90a"} | options)


def problem_of(q, k=None, v=None, **options):
    layouts = [dense_layout(shape, reversed(range(len(shape))), "float16", None) for shape in (q, k or q, v or k or q)]
    return make_problem(*layouts, Options(backend="host", **options))


# The kernel


@pytest.mark.parametrize("dtype", [numpy.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"algorithm": "v2"}, {"softcap": 5.0}], ids=str)
def test_sm_90a_has_a_kernel_for_16_bits(dtype, options):
    made = planned(array(2, 3, 140, 64, dtype=dtype), **options)
    assert made.kernel.file == "fwd_hopper" and "no TMA" not in str(made)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_others_have_not(arch):
    expected = "fwd_hopper" if arch == "90a" else "fwd_v2"
    assert planned(array(2, 70, 64), arch=arch).kernel.file == expected
    for made in (planned(array(2, 70, 64, dtype=numpy.float32), arch=arch), planned(array(2, 70, 60), arch=arch)):
        assert made.kernel.file == "fwd_v2"
    assert planned(array(2, 70, 64), arch=arch, algorithm="v1").kernel.file == "fwd_v1"


@pytest.mark.parametrize(
    "moved, x, why",
    [
        ("q", array(2, 70, 68)[..., :64], "no TMA: rows of q start 136 bytes apart, not a multiple of 16"),
        ("k", array(2, 70, 64)[:, ::-1], "no TMA: rows of k start -128 bytes apart, backwards"),
        ("v", array(2 * 70 * 64 + 4)[4:].reshape(2, 70, 64), "no TMA: v starts at a multiple of 8 bytes only, not of 16"),
        ("v", array(2, 70, 36), "no TMA: rows of v start 72 bytes apart, not a multiple of 16"),
        ("out", array(2, 64, 70).swapaxes(1, 2), "no TMA: elements of out start 140 bytes apart, not 2"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_without_a_map_of_every_array_the_plan_says_why(moved, x, why):
    arrays = {"q": array(2, 70, 64), "k": array(2, 70, 64), "v": array(2, 70, 64)} | {moved: x}
    made = planned(**arrays)
    assert made.kernel.file == "fwd_v2" and why in made.kernel.reasons
    assert "no TMA" not in str(planned(**arrays, arch="80"))  # where nothing would be moved by it
    with pytest.raises(UnsupportedError, match=f"kernel: .* arrays that TMA cannot move, got 'fwd_hopper': {why[8:]}"):
        planned(**arrays, kernel="fwd_hopper")


def test_lse_need_not_have_a_map():
    lse = array(2, 70, 3, dtype=numpy.float32)[..., 1]
    assert planned(array(2, 70, 64), lse=lse, return_lse=True).kernel.file == "fwd_hopper"


@pytest.mark.parametrize("shapes", [((2, 5, 64), (2, 0, 64)), ((2, 0, 64), (2, 5, 64)), ((0, 5, 64), (0, 5, 64))], ids=str)
def test_empty_arrays_have_no_map(shapes):
    made = planned(*map(lambda shape: array(*shape), shapes))
    assert made.kernel.file == "fwd_v2" and "has no elements" in str(made)


# A kernel asked for


@pytest.mark.parametrize("kernel", ["fwd_v1", "fwd_v2", "fwd_hopper"])
@pytest.mark.parametrize("algorithm", ["auto", "its own"])
def test_the_kernel_asked_for_is_planned(kernel, algorithm):
    algorithm = {"fwd_v1": "v1"}.get(kernel, "v2") if algorithm == "its own" else algorithm
    made = planned(array(2, 70, 64), kernel=kernel, algorithm=algorithm)
    assert made.kernel.file == kernel and made.problem.algorithm == ("v1" if kernel == "fwd_v1" else "v2")


def test_a_kernel_asked_for_is_the_one_that_is_found_without_asking():
    q = array(2, 70, 64)
    assert planned(q, arch="80", kernel="fwd_v2").kernel == planned(q, arch="80").kernel
    assert planned(q, kernel="fwd_hopper").kernel == planned(q).kernel
    assert planned(q, kernel="fwd_v1").kernel == planned(q, algorithm="v1").kernel
    assert planned(q, kernel="fwd_v2").kernel != planned(q).kernel


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"kernel": "fwd_v3"}, ValueError, "kernel: expected one of .*'fwd_hopper'.*, got 'fwd_v3'"),
        ({"kernel": "bwd_v2"}, ValueError, "kernel: expected one of .*, got 'bwd_v2'"),
        ({"kernel": 2}, TypeError, "kernel: expected one of .*, got 2"),
        ({"kernel": ["fwd_v2"]}, TypeError, "kernel: expected one of .*, got"),
        ({"kernel": "fwd_v1", "algorithm": "v2"}, ValueError, "algorithm: expected 'auto' or 'v1' with kernel 'fwd_v1', got 'v2'"),
        ({"kernel": "fwd_hopper", "algorithm": "v1"}, ValueError, "algorithm: expected 'auto' or 'v2' with kernel 'fwd_hopper'"),
        ({"kernel": "fwd_v2", "backend": "numpy", "arch": None}, ValueError, "kernel: expected None on backend 'numpy'"),
        ({"kernel": "fwd_hopper", "arch": "80"}, UnsupportedError, "kernel: expected fwd_v1 or fwd_v2 for float16 on sm_80, got"),
    ],
)
def test_kernels_that_cannot_serve_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        planned(array(2, 70, 64), **options)


def test_float32_has_no_such_kernel_on_others():
    with pytest.raises(UnsupportedError, match="kernel: expected fwd_v1 or fwd_v2 for float32 on sm_80, got 'fwd_hopper'"):
        planned(array(2, 70, 64, dtype=numpy.float32), kernel="fwd_hopper", arch="80")


def test_attention_takes_no_kernel():
    with pytest.raises(TypeError, match="kernel"):
        attention(*[array(2, 70, 64)] * 3, kernel="fwd_v2")


# Its constants


@pytest.mark.parametrize(
    "dim, dim_v, width, width_v",
    [(8, 8, 64, 64), (64, 64, 64, 64), (72, 64, 96, 64), (128, 128, 128, 128), (136, 40, 192, 64), (64, 200, 64, 256)],
)
def test_widths(dim, dim_v, width, width_v):
    made = planned(array(2, 200, dim), array(2, 90, dim), array(2, 90, dim_v), kernel="fwd_hopper").kernel
    c = made.config
    row = next(row for row in HOPPER if row.width >= max(width, width_v) and row.reason in made.reasons)
    assert [width, width_v] == [c.WIDTH, c.WIDTH_V]
    assert [row.tile_q, row.tile_kv, row.warps] == [c.TILE_Q, c.TILE_KV, c.WARPS]


def test_what_lanes_copy_decides_how_many_bytes_at_a_time():
    """Rows of 200 bytes: all are copied in fwd_v2, in fwd_hopper those of out, which then TMA may not store."""
    q, out = (array(2, 70, 104)[..., :100] for _ in range(2))
    assert planned(q, kernel="fwd_v2").kernel.config.COPY_BYTES == 8
    made = planned(q, out=out).kernel
    assert made.file == "fwd_hopper" and made.config.COPY_BYTES == 8 and "copies of 8 bytes: rows of out have 200" in str(made)
    q, out = (array(1, 1200, 104)[..., :100] for _ in range(2))
    ragged, usual = planned(q, out=out), planned(array(1, 1200, 104))
    assert usual.kernel.config.TMA_STORE_OUT and usual.kernel.config.COPY_BYTES == 16
    assert ragged.kernel.config == replace(usual.kernel.config, TMA_STORE_OUT=False, COPY_BYTES=8)
    mapped = [set(forward_maps(made.kernel, made.problem)) for made in (ragged, usual)]
    assert mapped == [{"q_map", "k_map", "v_map"}, {"q_map", "k_map", "v_map", "out_map"}]


@pytest.mark.parametrize("options, explicit", [({}, False), ({"softcap": 5.0}, True), ({"scale": 0}, True), ({"scale": -1}, True)])
def test_scores_are_scaled_one_by_one_only_where_they_must(options, explicit):
    assert planned(array(1, 140, 64), **options).kernel.config.EXPLICIT_SCORES is explicit


def test_rows_own_64_queries_a_group():
    assert {64, 128, 192, 256} == {row.width for row in HOPPER}
    for row in HOPPER:
        assert row.warps % 4 == 0 and row.tile_q == 64 * (row.warps // 4 - 1) and row.tile_kv % 16 == 0 and row.tile_kv <= 256


ROWS = (
    TileConfig(64, 64, 64, "few", warps=8, max_len_q=64),
    TileConfig(64, 128, 96, "causal", warps=12, masks=("causal",)),
    TileConfig(64, 128, 112, "full", warps=12, masks=("full",)),
    TileConfig(64, 128, 128, "not causal", warps=12, masks=("full", "window")),
    TileConfig(256, 128, 96, "narrow v", warps=12, width_v=64),
    TileConfig(256, 128, 80, "any", warps=12),
)


@pytest.mark.parametrize(
    "q, options, why",
    [
        ((2, 64, 64), {"causal": True}, "few"),
        ((2, 200, 64), {"causal": True}, "causal"),
        ((2, 200, 64), {"window": (None, 3)}, "causal"),
        ((2, 200, 64), {"window": (3, 0)}, "not causal"),
        ((2, 200, 64), {"window": (3, None)}, "not causal"),
        ((2, 200, 64), {}, "full"),
        ((2, 200, 64), {"window": (199, 199)}, "full"),  # hides nothing
        ((2, 200, 72), {"causal": True}, "any"),
        ((2, 200, 72), {}, "any"),
    ],
    ids=str,
)
def test_the_first_row_for_width_mask_and_length_is_taken(q, options, why, monkeypatch):
    monkeypatch.setitem(tuning.KERNEL_TABLES, "fwd_hopper", {"90a": {"half": ROWS}})
    made = make_forward_plan(problem_of(q, **options, kernel="fwd_hopper"), SM_90A)
    assert any(reason.endswith(f": {why}") for reason in made.reasons)


@pytest.mark.parametrize(
    "dim, len_q, options, pingpong",
    [
        (64, 512, {}, True),
        (64, 512, {"causal": True}, True),
        (64, 4096, {"window": (63, 0)}, False),  # groups that need fewer tiles would wait for the others
        (64, 4097, {"window": (63, 0)}, False),
        (64, 4097, {"causal": True}, True),
        (64, 4097, {}, True),
        (64, 512, {"softcap": 5.0}, True),
        (128, 1024, {"causal": True}, True),
        (128, 1025, {}, False),
        (128, 4096, {"causal": True}, True),
        (128, 4097, {"causal": True}, False),
        (128, 1025, {"window": (63, 0)}, False),
        (192, 1025, {}, True),
        (256, 512, {}, False),
    ],
    ids=str,
)
def test_warpgroups_stand_in_line_where_that_pays(dim, len_q, options, pingpong):
    made = make_forward_plan(problem_of((2, len_q, dim), **options), SM_90A)
    assert made.config.PINGPONG is pingpong
    assert any("ping-pong: none waits behind the products of others" in reason for reason in made.reasons) is pingpong


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads, len_q, groups", [(4, 64, 1), (4, 65, 2), (1, 1, 1), (32, 2, 1), (32, 3, 2)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}], ids=str)
def test_up_to_64_rows_have_one_warpgroup(dim, heads, len_q, groups, options):
    """Rows of all heads that share a tile: 4 heads on 4, one on one, 32 on one."""
    problem = problem_of((heads, len_q, dim), (4 if heads == 4 else 1, 500, dim), kernel="fwd_hopper", **options)
    made = make_forward_plan(problem, SM_90A)
    assert made.file == "fwd_hopper"
    assert (made.config.TILE_Q == 64) is (made.config.WARPS == 8) is (groups == 1)


# Its grid


def test_blocks_take_turns():
    made = planned(array(2, 3, 400, 64))
    tiles = -(-400 // made.kernel.config.TILE_Q) * 3 * 2
    assert made.launches == (Launch("fwd_hopper", tiles, made.kernel.shared_bytes, made.kernel.config.MIN_BLOCKS),)
    assert f"{tiles} blocks, at most 1 a multiprocessor, one tile after the other" in str(made)
    [generic] = planned(array(2, 3, 400, 64), kernel="fwd_v2").launches
    assert generic.per_multiprocessor is None


@pytest.mark.parametrize("blocks, each, on_ten", [(5, None, 5), (500, None, 500), (5, 1, 5), (10, 1, 10), (11, 1, 10), (35, 3, 30)])
def test_blocks_on_a_device(blocks, each, on_ten):
    assert Launch("entry", blocks, 7, each).on(10) == Launch("entry", on_ten, 7)


def test_the_host_has_few_multiprocessors(monkeypatch):
    """So that a block takes several tiles: here the entry is called with as many blocks as it would have."""
    found = []

    class Library:
        fwd_hopper = host.ctypes.pythonapi.Py_IsInitialized  # anything with an address

        def launch(self, run, kernel, params, blocks, *others):
            found.append(blocks.value)

        def ended(self, run, milliseconds):
            return True

    monkeypatch.setattr(host, "build", lambda plan, options: "a library")
    monkeypatch.setattr(host, "_load", lambda path: Library())
    for queries in (1, 1000):
        q = array(2, 3, queries, 64)
        planned(q, kernel="fwd_hopper")(q, q, q)
    assert found == [host.MULTIPROCESSORS] * 2
    one = array(1, 1, 1, 64)
    planned(one, kernel="fwd_hopper")(one, one, one)
    assert found[-1] == 1


def test_tiles_beyond_a_grid_are_refused():
    one = array(1, 1, 1, 64)
    with pytest.raises(UnsupportedError, match="q: expected fewer than 2147483648 blocks of fwd_hopper, got 2147483648"):
        planned(numpy.broadcast_to(one, (2**20, 2**11, 1, 64)), kernel="fwd_hopper")


@given(strategies.integers(1, 2**31 - 1), strategies.integers(0, 2**31 - 1))
@example(1, 2**31 - 1)
@example(2, 2**31 - 1)
@example(3, 2**31 - 2)
@example(2**30 + 1, 2**31 - 1)
@example(2**31 - 1, 2**31 - 1)
def test_a_product_divides(number, n):
    """As `divide` of scheduler.cuh does, which has 32 bits for each number."""
    same, multiplier, shift = fast_divmod(number)
    assert same == number and multiplier < 2**32
    for dividend in (n, n - n % number, max(n - n % number - 1, 0)):  # also where quotients change
        assert (dividend * multiplier >> 32 >> shift if multiplier else dividend) == dividend // number


# Query tiles that blocks share

KEYS = LEAST_SPLIT + COMBINING


@pytest.mark.parametrize(
    "len_q, len_kv, options, shared",
    [
        (70, KEYS, {}, True),
        (70, KEYS - 1, {}, False),
        (70, KEYS, {"softcap": 5.0}, True),
        (70, KEYS, {"causal": True}, True),  # bottom right: the first query sees nearly all keys
        (KEYS, KEYS, {"causal": True}, False),
        (KEYS // 4, KEYS, {"causal": True}, True),
        (KEYS // 4 + 2, KEYS, {"causal": True}, False),  # the first query sees less than three quarters of what the last one does
        (2 * KEYS, KEYS, {"causal": True}, False),  # the first queries see nothing
        (2000, 3000, {"causal": "top_left"}, False),
        (70, KEYS, {"window": (KEYS - 70, 0)}, False),
    ],
)
def test_tiles_are_shared_where_they_are_long_and_alike(len_q, len_kv, options, shared):
    made = planned(array(1, 2, len_q, 64), array(1, 2, len_kv, 64), **options)
    assert made.kernel.config.SPLIT_KV is shared and ("split keys" in str(made)) is shared
    assert [launch.entry for launch in made.launches] == ["fwd_hopper"] + ["fwd_hopper_combine"] * shared
    assert made.workspace.names == ("out_partials", "lse_partials") * shared


def test_other_kernels_share_nothing():
    for options in ({"arch": "80"}, {"kernel": "fwd_v2"}, {"algorithm": "v1"}):
        assert not planned(array(1, 2, 70, 64), array(1, 2, 9000, 64), **options).kernel.config.SPLIT_KV


def test_a_workspace_holds_every_part_whatever_the_lengths():
    """At most 135 shared tiles and a part more for all blocks but one; of a tile no more rows than there are."""
    most = 135 + 136
    for heads, len_q, len_kv, parts, rows in ((2, 70, 2000, 2 + 136, 80), (500, 300, 2000, most, 192), (500, 600, 9000, most, 128)):
        q, kv = (numpy.broadcast_to(array(1, 1, 128), (heads, length, 128)) for length in (len_q, len_kv))
        made = planned(q, kv, out=array(heads, len_q, 128))
        assert dict(made.workspace.parts) == {"out_partials": parts * rows * 128 * 4, "lse_partials": parts * rows * 4}


def test_a_few_tiles_are_launched_as_often_as_they_have_parts():
    """Two tiles of 70 queries and 2,000 keys: four parts of 512 keys at most, and 5 by 4 pieces of 16 x 32 to merge."""
    made = planned(array(2, 70, 128), array(2, 2000, 128))
    (computing, combining), c = made.launches, made.kernel.config
    assert (computing.blocks, computing.per_multiprocessor) == (2 * 4, 1)
    assert (combining.blocks, combining.per_multiprocessor) == (-(-2 * 5 * 4 // c.WARPS), None)


LONG_TILES = [(2048, 8192, (192, 64)), (4096, 4096, (128, 128)), (1000, 9000, (128, 128)), (8192, 8192, (192, 64))]


@pytest.mark.parametrize("len_q, len_kv, tile", LONG_TILES)
def test_a_causal_tile_is_chosen_by_how_long_it_is(len_q, len_kv, tile):
    config = planned(array(1, 2, len_q, 128), array(1, 2, len_kv, 128), causal=True).kernel.config
    assert tile == (config.TILE_Q, config.TILE_KV)
