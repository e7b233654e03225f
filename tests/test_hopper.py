"""What fwd_hopper does that the shared cases do not reach: late maxima, two batch axes, query tiles that blocks share."""

import math
from dataclasses import replace
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import quick, thinned

from cupy_flash import attention, plan_attention
from cupy_flash.call.forward import AttentionPlan
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.machine import host, source
from cupy_flash.plan import schedule, schedule_params
from cupy_flash.plan.tuning import HOPPER, HOPPER_CANDIDATES
from cupy_flash.problem.arrays import DTYPES


def judged(q, k, v, **options):
    plan = plan_attention(q, k, v, backend="host", arch="90a", kernel="fwd_hopper", return_lse=True, **options)
    p = plan.problem
    comparison = compare(*plan(q, k, v), q, k, v, scale=p.scale, first_key=p.mask.left, last_key=p.mask.right, softcap=p.softcap)
    assert comparison.ok, comparison.message
    return plan


@pytest.mark.parametrize("later", [-1.0, -60.0, 60.0])
def test_scores_that_rise_from_far_below_zero(later):
    """The first tile of keys has scores near -1000, later ones much larger scores, which may be negative as well."""
    rng = numpy.random.default_rng(0)
    q = numpy.ones((1, 20, 64), numpy.float16)
    k = numpy.full((1, 200, 64), later / 8, numpy.float16)
    k[:, :64] = -1000 / 8
    k += rng.uniform(-0.01, 0.01, k.shape).astype(numpy.float16)
    judged(q, k, rng.standard_normal((1, 200, 64)).astype(numpy.float16))


# In powers of two; the first tile has scores up to 1. P is too large from about 16 on, infinite in float16 from 17 on.
RISES = [*product(["float16", "bfloat16"], [7.0, 15.0, 16.5, 17.5, 100.0, 130.0, 1000.0])]


@pytest.mark.parametrize("dtype, rise", quick(RISES, *RISES[:7], *RISES[7::3], spread=True))
def test_a_maximum_that_rises_late_in_few_rows(dtype, rise):
    """Two rows of two warps meet a score far above all others in the last tile but one, one of them another in the last."""
    rng = numpy.random.default_rng(2)
    q, k, v = (rng.uniform(-1, 1, (1, 700, 64)).astype(numpy.float32) for _ in range(3))
    q[..., -2:] = k[..., -2:] = 0
    q[0, 5, -1] = q[0, 21, -2] = 8
    k[0, 630, -2:] = rise
    k[0, 699, -1] = rise + 20
    plan = judged(*(x.astype(DTYPES[dtype]) for x in (q, k, v)), scale=math.log(2) / 8)
    assert plan.kernel.config.TILE_KV in (64, 128)  # 630 and 699 are in two tiles


@pytest.mark.parametrize("window", [1, 40, 200])
def test_rows_that_see_nothing_of_the_first_tile(window):
    """With a window, the last rows of a block see keys only from a later tile on; their scores are negative there."""
    rng = numpy.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 700, 64)).astype(numpy.float16) for _ in range(3))
    q[..., 0], k[..., 0] = 20, -20
    judged(q, k, v, window=(window, 0))


@pytest.mark.parametrize(
    "row",
    thinned(HOPPER, keep=20),
    ids=lambda row: f"{row.width}-{row.tile_q}x{row.tile_kv}-{row.stages}k" + "-pingpong" * row.pingpong,
)
def test_every_tile_of_the_table(row, only_row):
    """Several tiles for each block, warpgroups that see nothing of some key tiles, and out in rows with room between them."""
    only_row("fwd_hopper", row)
    rng = numpy.random.default_rng(15)
    dim = (row.width_v or row.width) - 4
    q, k, v = (rng.standard_normal((2, length, dim + 4)).astype(numpy.float16)[..., :dim] for length in (520, 700, 700))
    room = numpy.full((2, 520, dim + 4), numpy.nan, numpy.float16)
    plan = plan_attention(q, k, v, backend="host", arch="90a", out=room[..., :dim], window=(150, 70))
    c = plan.kernel.config
    knobs = ("tile_q", "tile_kv", "stages_q", "stages", "stages_v", "pingpong")
    assert all(getattr(c, knob.upper()) == getattr(row, knob) for knob in knobs)
    assert c.COPY_BYTES == 8 and not c.TMA_STORE_OUT
    p = plan.problem
    out = plan(q, k, v, out=room[..., :dim])
    comparison = compare(out, None, q, k, v, scale=p.scale, first_key=p.mask.left, last_key=p.mask.right)
    assert comparison.ok, comparison.message
    assert numpy.isnan(room[..., dim:]).all()


@pytest.mark.release  # the test before has 8 bytes
@pytest.mark.parametrize("copied", [0, 4, 8, 16])
def test_lanes_store_as_many_bytes_at_once_as_rows_have_multiples_of(copied):
    rng = numpy.random.default_rng(16)
    dim = 64 - max(1, copied // 2)
    q, k, v = (rng.standard_normal((2, length, 64)).astype(numpy.float16)[..., :dim] for length in (130, 200, 200))
    room = numpy.full((2, 130, 64), numpy.nan, numpy.float16)
    plan = plan_attention(q, k, v, backend="host", arch="90a", out=room[..., :dim])
    assert plan.kernel.file == "fwd_hopper" and copied == plan.kernel.config.COPY_BYTES
    comparison = compare(plan(q, k, v, out=room[..., :dim]), None, q, k, v, scale=plan.problem.scale)
    assert comparison.ok, comparison.message
    assert numpy.isnan(room[..., dim:]).all()


DEPTHS = {"two stages": (2, 1, 1), "three stages": (3, 1, 2), "four stages": (4, 2, 2), "two key tiles, one of values": (4, 2, 1)}
ORDERS = {False: "apart", True: "ping-pong"}


def judged_with(knobs, q, k, v, **options):
    """The same with other constants."""
    plan = plan_attention(q, k, v, backend="host", arch="90a", kernel="fwd_hopper", return_lse=True, **options)
    changed = replace(plan.kernel, config=replace(plan.kernel.config, **knobs))
    out, lse = AttentionPlan(plan.problem, changed, True)(q, k, v)
    p = plan.problem
    comparison = compare(out, lse, q, k, v, scale=p.scale, first_key=p.mask.left, last_key=p.mask.right)
    assert comparison.ok, comparison.message


@pytest.mark.parametrize("order", host.SCHEDULES)
@pytest.mark.parametrize("pingpong", thinned(ORDERS, first=1), ids=ORDERS.get)
@pytest.mark.parametrize("depth", thinned(DEPTHS, keep=4))
@pytest.mark.parametrize("keys", thinned([16, 64]))
def test_windows_of_narrow_key_tiles(keys, depth, pingpong, order, monkeypatch):
    """A warpgroup sees nothing of up to four tiles at either end of what its block sees, more than there are stages for."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", order)
    stages_q, stages, stages_v = DEPTHS[depth]
    rng = numpy.random.default_rng(16)
    q, k, v = (rng.standard_normal((3, 300, 64)).astype(numpy.float16) for _ in range(3))
    knobs = {"TILE_Q": 128, "TILE_KV": keys, "WARPS": 12, "TMA_STORE_OUT": False, "PINGPONG": pingpong}
    knobs |= {"STAGES": stages, "STAGES_V": stages_v, "STAGES_Q": stages_q}
    judged_with(knobs, q, k, v, window=(37, 20))


# One row for each way in which warpgroups share stages and wait for each other.
WAYS = {(row.warps, row.stages_q, row.stages_v, row.pingpong): row for row in HOPPER}
LENGTHS = st.integers(1, 200) | st.integers(200, 900)
SEEN = st.none() | st.just(0) | st.integers(0, 100) | st.integers(100, 700)


@pytest.mark.parametrize("order", thinned(host.SCHEDULES, first=1))
@pytest.mark.parametrize("way", thinned(WAYS, keep=16, first=8), ids=lambda way: "{}w-{}q-{}v".format(*way) + "-pingpong" * way[-1])
def test_any_lengths_and_any_window(way, order):
    """In whichever way warpgroups wait for each other, none waits for ever. Dims are small, or it would take long."""
    row = WAYS[way]
    names = ("TILE_Q", "TILE_KV", "WARPS", "STAGES", "STAGES_V", "STAGES_Q", "TMA_STORE_OUT", "PINGPONG")
    knobs = {name: getattr(row, name.lower()) for name in names} | {"SPLIT_KV": False}

    @settings(max_examples=15)
    @given(LENGTHS, LENGTHS, st.tuples(SEEN, SEEN))
    def judge(len_q, len_kv, window):
        case = Case("float16", len_q, len_kv, dim=32, heads_q=3, window=window)
        judged_with(knobs, *make_inputs(case), window=case.window)

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUPY_FLASH_HOST_SCHEDULE", order)
        judge()


@pytest.mark.parametrize("window", [(63, 0), (100, 100)], ids=str)
@pytest.mark.parametrize("dim", thinned([128, 192]))
def test_warpgroups_in_line_of_which_one_sees_nothing(dim, window):
    """Queries beyond all keys: a warpgroup leaves a tile of its work to the others, and begins the next one late."""
    rng = numpy.random.default_rng(18)
    q, k, v = (rng.standard_normal((2, length, dim)).astype(numpy.float16) for length in (900, 300, 300))
    assert judged(q, k, v, window=window).kernel.config.PINGPONG


def test_rows_in_line_have_places_for_warpgroups_that_are_apart():
    """With a window they begin and end tiles apart, and with ping-pong and fewer stages of V would wait for each other."""
    rows = [row for row in (*HOPPER, *HOPPER_CANDIDATES) if row.pingpong and "window" in row.masks]
    apart = [-(-(row.tile_q - 64) // row.tile_kv) for row in rows]
    assert rows and all(row.stages_v >= 2 * tiles for row, tiles in zip(rows, apart))


@pytest.mark.parametrize("slow", thinned([0, 1]))
def test_warpgroups_far_apart_share_slots(slow, monkeypatch, change_kernel):
    """One of them is slow to begin a query tile, which has few keys, so that the other could be work tiles ahead."""
    line = "    if (SHARED_STAGES) skip(queries, others);"
    text = source.files()["fwd_hopper.cu"]
    assert text.count(line) == 1
    wait = f"    if (group == {slow}) std::this_thread::sleep_for(std::chrono::milliseconds(5));\n"
    change_kernel("fwd_hopper.cu", text.replace(line, wait + line))
    rng = numpy.random.default_rng(17)
    q, k, v = (rng.standard_normal((9, 260, 192)).astype(numpy.float16) for _ in range(3))
    assert judged(q, k, v, window=(3, 0)).kernel.config.STAGES_Q == 3


def test_a_warp_that_looks_for_the_maximum_when_another_one_has_to():
    """Rows 288 to 291 see four keys and fewer of one tile, their neighbours none, and in the next tile row 256 meets a leap."""
    rng = numpy.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 512, 64)).astype(numpy.float16) for _ in range(3))
    q[..., 0] = k[..., 0] = 0
    q[0, 256, 0], k[0, 200, 0] = 30, 30
    plan = judged(q, k, v, window=(100, 0))
    assert (plan.kernel.config.TILE_Q, plan.kernel.config.TILE_KV) == (256, 64)


def test_blocks_take_causal_tiles_by_formula_and_by_table():
    rng = numpy.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, 4, 600, 64)).astype(numpy.float16) for _ in range(3))
    plan = judged(q, k, v, causal=True)
    tiles = -(-600 // plan.kernel.config.TILE_Q) * 4 * 2
    assert tiles > 2 * 2 * host.MULTIPROCESSORS * plan.kernel.config.MIN_BLOCKS


def test_two_batch_axes_that_do_not_merge():
    rng = numpy.random.default_rng(1)
    q, k, v = (rng.standard_normal((3, 5, 1, 40, 64)).astype(numpy.float16)[:, ::2] for _ in range(3))
    judged(q, k, v)


# Query tiles that blocks share: the host has two, and each problem here an odd number of tiles.

FORMS = {
    "a tile for two blocks": ((1, 1, 50), (1, 1, 2000), 64, 64, {}),
    "the last of three": ((3, 1, 100), (3, 1, 2000), 128, 128, {}),
    "the last, of few rows": ((1, 556), (1, 2000), 128, 128, {}),
    "a group of heads": ((3, 6, 1), (3, 3, 2000), 64, 64, {}),
    "a group of heads in one tile": ((1, 7, 1), (1, 1, 2000), 64, 64, {}),
    "narrow": ((1, 30), (1, 2000), 32, 32, {}),
    "wide": ((1, 100), (1, 2000), 256, 256, {}),
    "half a panel": ((3, 40), (3, 2000), 96, 96, {}),
    "narrow values": ((1, 40), (1, 2000), 192, 128, {}),
    "wide values": ((1, 40), (1, 2000), 64, 96, {}),
    "causal": ((1, 200), (1, 2000), 64, 64, {"causal": True}),
    "softcap": ((1, 40), (1, 2000), 64, 64, {"softcap": 2.0}),
}


@pytest.mark.parametrize("order", thinned(host.SCHEDULES))
@pytest.mark.parametrize("form", thinned(FORMS, keep=12))
def test_tiles_that_blocks_share(form, order, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", order)
    of_q, of_kv, dim, dim_v, options = FORMS[form]
    rng = numpy.random.default_rng(6)
    q, k, v = (rng.standard_normal(shape).astype(numpy.float16) for shape in ((*of_q, dim), (*of_kv, dim), (*of_kv, dim_v)))
    plan = judged(q, k, v, **options)
    assert plan.kernel.config.SPLIT_KV and combined(plan)


def combined(plan):
    """How many blocks combine on the host."""
    launches = tuple(launch.on(host.MULTIPROCESSORS) for launch in plan.launches)
    execution = plan._execution
    _, launches = schedule_params.scheduled(plan.kernel, execution._params, launches, execution._mask)
    return sum(launch.blocks for launch in launches if launch.entry == "fwd_hopper_combine")


def test_a_part_of_which_a_row_sees_nothing_is_left_out(monkeypatch):
    """Of eight parts of 256 keys the first 48 rows see nothing of the last, which their neighbours see, and where V is NaN."""
    monkeypatch.setattr(host, "MULTIPROCESSORS", 8)
    monkeypatch.setattr(schedule, "LEAST_SPLIT", 64)
    rng = numpy.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, length, 64)).astype(numpy.float16) for length in (256, 2000, 2000))
    v[:, 7 * 256 :] = numpy.nan
    plan = plan_attention(q, k, v, backend="host", arch="90a", causal=True, return_lse=True)
    assert combined(plan) and plan.kernel.config.TILE_KV == 64
    out, lse = plan(q, k, v)
    assert numpy.isfinite(lse).all() and numpy.isfinite(out[:, :48]).all() and numpy.isnan(out[:, 48:]).all()
    expected = attention(q[:, :48], k[:, : 7 * 256], v[:, : 7 * 256], causal=True, backend="numpy")
    numpy.testing.assert_allclose(out[:, :48].astype(float), expected, atol=2e-3)


def test_parts_with_maxima_far_apart():
    """The first half of the keys has scores near -1000, the second near 1000: parts of the first weigh nothing."""
    rng = numpy.random.default_rng(8)
    q = numpy.ones((1, 20, 64), numpy.float16)
    k = numpy.full((1, 2000, 64), 1000 / 8, numpy.float16)
    k[:, :1000] *= -1
    k += rng.uniform(-0.01, 0.01, k.shape).astype(numpy.float16)
    assert combined(judged(q, k, rng.standard_normal((1, 2000, 64)).astype(numpy.float16)))


@pytest.mark.parametrize("changes", [*({"layout": x} for x in ("bshd", "sliced", "broadcast")), {"return_lse": False}], ids=str)
def test_shared_tiles_anywhere_in_memory(changes, shared):
    """Three tiles for two blocks; without an lse, parts have one all the same."""
    case = replace(Case("bfloat16", 40, 150, heads_q=3, batch=(1,), causal=True), **changes)
    inputs = make_inputs(case)
    plan = plan_attention(*inputs, backend="host", arch="90a", **case.options)
    assert plan.kernel.file == "fwd_hopper" and combined(plan)
    out, lse = plan(*inputs) if case.return_lse else (plan(*inputs), None)
    comparison = compare(out, lse, *inputs, **case.scores)
    assert comparison.ok, comparison.message


def test_given_results_with_strides_are_filled_from_parts(shared):
    rng = numpy.random.default_rng(11)
    q, k, v = (rng.standard_normal((3, length, 64)).astype(numpy.float16) for length in (40, 150, 150))
    room, lse = numpy.full((40, 3, 72), numpy.nan, numpy.float16), numpy.full((3, 80), numpy.nan, numpy.float32)
    out = room.transpose(1, 0, 2)[..., :64]
    plan = plan_attention(q, k, v, backend="host", arch="90a", out=out, lse=lse[:, ::2], return_lse=True)
    assert combined(plan)
    plan(q, k, v, out=out, lse=lse[:, ::2])
    comparison = compare(out, lse[:, ::2], q, k, v, scale=plan.problem.scale)
    assert comparison.ok, comparison.message
    assert numpy.isnan(room[..., 64:]).all() and numpy.isnan(lse[:, 1::2]).all()


@pytest.mark.parametrize("blocks", [5, 32])
def test_blocks_with_two_parts_and_groups_that_see_nothing_of_one(blocks, shared, monkeypatch):
    """Three tiles on five blocks, and on 32, each of which has a few key tiles: the first rows see none of the last ones."""
    monkeypatch.setattr(host, "MULTIPROCESSORS", blocks)
    rng = numpy.random.default_rng(12)
    q, k, v = (rng.standard_normal((3, length, 64)).astype(numpy.float16) for length in (256, 700, 700))
    assert combined(judged(q, k, v, causal=True))


def test_parts_stay_within_their_rows(shared):
    """Of two parts of 48 rows each, what lies behind the second is as it was: rows that do not exist are not kept."""
    rng = numpy.random.default_rng(13)
    q, k, v = (rng.standard_normal((1, length, 64)).astype(numpy.float16) for length in (40, 300, 300))
    plan = plan_attention(q, k, v, backend="host", arch="90a")
    assert combined(plan)
    workspace = numpy.full(plan.workspace_bytes, 255, numpy.uint8)
    plan(q, k, v, workspace=workspace)
    for part, (name, per_row) in zip(plan.workspace.on_host(workspace).values(), (("out_partials", 64 * 4), ("lse_partials", 4))):
        used = 2 * 48 * per_row
        assert (part[used:] == 255).all() and not (part[:used].view(numpy.uint32) == 2**32 - 1).any(), name


@pytest.mark.parametrize("dim", thinned([64, 256]))
def test_hidden_keys_of_the_first_tile_may_hold_anything(dim):
    """Also where a query tile begins above a product that counts for nothing, in which such keys take part."""
    rng = numpy.random.default_rng(14)
    q, k, v = (rng.standard_normal((1, 40, dim)).astype(numpy.float16) for _ in range(3))
    k[:, 5:] = numpy.nan
    out = plan_attention(q, k, v, backend="host", arch="90a", kernel="fwd_hopper", causal=True)(q, k, v)
    assert numpy.isfinite(out[:, :5]).all() and numpy.isnan(out[:, 5:]).all()


def test_whole_rounds_are_not_merged():
    rng = numpy.random.default_rng(9)
    q, k, v = (rng.standard_normal((2, length, 64)).astype(numpy.float16) for length in (40, 2000, 2000))
    plan = judged(q, k, v)
    assert plan.kernel.config.SPLIT_KV and not combined(plan)


@pytest.mark.release
@pytest.mark.parametrize("sanitizer", thinned(host.SANITIZERS, first=1))
def test_sanitizers_have_nothing_to_say_of_shared_tiles(sanitizer, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", sanitizer)
    rng = numpy.random.default_rng(10)
    q, k, v = (rng.standard_normal((1, length, 96)).astype(numpy.float16) for length in (150, 2000, 2000))
    judged(q, k, v)
