"""Which query tiles each block takes: each tile once, long ones early, all blocks equally long, and keys of few heads at a time."""

from dataclasses import replace

import numpy
import pytest

from cupy_flash import plan_attention
from cupy_flash.plan import schedule
from cupy_flash.plan.architecture import architecture_named
from cupy_flash.plan.forward import make_forward_plan
from cupy_flash.plan.forward_launches import forward_launches
from cupy_flash.plan.forward_maps import forward_maps
from cupy_flash.plan.launch import Launch
from cupy_flash.plan.packing import packing_of
from cupy_flash.plan.params import forward_params, hopper_forward_params
from cupy_flash.plan.schedule import (
    BLOCKS,
    BUSY,
    COMBINING,
    L2_BYTES,
    LEAST_SPLIT,
    MANY_KEYS,
    NONE,
    STEPS_BESIDES,
    TABLE_BLOCKS,
    TABLE_TILES,
    costs_of_tiles,
    least_split,
    listed_costs,
    make_schedule,
    make_splits,
    splits_pay,
)
from cupy_flash.plan.schedule_params import combining_blocks, scheduled
from cupy_flash.plan.structs import struct as struct_named
from cupy_flash.problem.mask import UNBOUNDED, Mask

FITS = 1.0  # bytes of a head: so few that all heads stay in the cache


def work_tiles(made, blocks, tiles):
    """For each block its tiles in order, as `work_tile_number` and `has_work_tile` of scheduler.cuh number them."""
    for block in range(blocks):
        taken = []
        for index in range(made.by_formula):
            tile = (index // 2 * blocks + block) * 2 + index % 2 if made.run == 2 else index * blocks + block
            if tile >= tiles:
                break
            taken.append(tile)
        rest = made.table[block] if made.table else ()
        yield taken + [made.by_formula * blocks + tile for tile in rest]


def cost_of(tile, costs):
    """`tile_coord` takes the tiles of a head from both ends, the last one first."""
    place = tile % len(costs)
    return costs[place // 2 if place % 2 else len(costs) - 1 - place // 2]


@pytest.mark.parametrize("tiles_of_head", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("heads", [1, 5, 16, 300])
@pytest.mark.parametrize("blocks", [1, 2, 7, 132, TABLE_BLOCKS, TABLE_BLOCKS + 1])
@pytest.mark.parametrize("bytes_of_head", [FITS, L2_BYTES + 1.0])
def test_each_tile_is_taken_once(tiles_of_head, heads, blocks, bytes_of_head):
    tiles = tiles_of_head * heads
    made = make_schedule(numpy.arange(tiles_of_head) + 2, heads, 1000, bytes_of_head, min(blocks, tiles))
    taken = list(work_tiles(made, min(blocks, tiles), tiles))
    assert sorted(tile for block in taken for tile in block) == list(range(tiles))
    assert max(map(len, made.table), default=0) < TABLE_TILES


@pytest.mark.parametrize("tiles_of_head, heads", [(16, 64), (32, 32), (64, 32), (128, 16), (128, 8)])
def test_blocks_end_together(tiles_of_head, heads):
    costs = 2 * numpy.arange(tiles_of_head) + 3
    made = make_schedule(costs, heads, MANY_KEYS, FITS, 132)
    loads = [sum(cost_of(tile, costs) for tile in block) for block in work_tiles(made, 132, tiles_of_head * heads)]
    plain = [
        sum(cost_of(tile, costs) for tile in block) for block in work_tiles(schedule.Schedule(run=2), 132, tiles_of_head * heads)
    ]
    mean = numpy.mean(loads)
    assert max(loads) < max(plain) and max(loads) < 1.02 * mean


@pytest.mark.parametrize("left, right", [(1023, 0), (512, 511), (4095, 0), (0, 1023), (255, 0)])
@pytest.mark.parametrize("length, tile_q, tile_kv", [(2048, 256, 64), (8192, 192, 64), (8192, 128, 64), (16384, 192, 128)])
def test_the_ends_of_windows_leave_no_block_with_much_more(length, tile_q, tile_kv, left, right):
    """The first rows of a head see the fewest keys, or the last: by number alone, those come to the same blocks again and again."""
    costs = costs_of_tiles(Mask(length, length, -left, right), tile_q, tile_kv)
    heads = 32 * 8192 // length
    mean = costs.sum() * heads / 132
    made = make_schedule(costs, heads, MANY_KEYS, FITS, 132)
    longest, plain = (
        max(sum(cost_of(tile, costs) for tile in block) for block in work_tiles(order, 132, heads * len(costs)))
        for order in (made, schedule.Schedule())
    )
    assert longest <= plain and longest < mean + costs.max()


@pytest.mark.parametrize("length, heads", [(8192, 32), (4096, 64), (2048, 100), (16384, 8)])
def test_lists_that_nobody_knows_before_are_dealt_out_evenly(length, heads):
    """Each block gets as many tiles, give or take one; and if later queries see more, as behind a prefix, about as many keys."""
    tiles = length // 128
    made = make_schedule(listed_costs(tiles), heads, length, FITS, 132)
    taken = list(work_tiles(made, 132, tiles * heads))
    counts = [len(block) for block in taken]
    assert max(counts) - min(counts) <= 1
    later = numpy.maximum(numpy.arange(tiles) + 1, 8)
    loads, plain = (
        [sum(cost_of(tile, later) for tile in block) for block in order]
        for order in (taken, work_tiles(schedule.Schedule(), 132, tiles * heads))
    )
    assert max(loads) < max(plain) and max(loads) <= numpy.mean(loads) + later.max()


def test_of_the_table_long_tiles_come_first():
    costs = numpy.arange(16) ** 2 + 1
    made = make_schedule(costs, 40, MANY_KEYS, FITS, 9)
    for block in work_tiles(made, 9, 16 * 40):
        table = [cost_of(tile, costs) for tile in block[made.by_formula :]]
        assert table and table == sorted(table, reverse=True)


def test_heads_of_the_table_fit_the_cache():
    """Of 1,100 tiles, 100 are left after whole rounds of two for each of 100 blocks; a round more makes 300, which is 30 heads."""
    costs = numpy.arange(10) + 1
    tables = {
        share: make_schedule(costs, 110, keys, L2_BYTES * share, 100).by_formula
        for share, keys in ((1 / 31, 100), (1 / 29, 100), (1 / 10, 100), (1 / 9, 100), (1 / 8, MANY_KEYS))
    }
    assert tables == {1 / 31: 8, 1 / 29: 10, 1 / 10: 10, 1 / 9: schedule.ALL_TILES, 1 / 8: 6}


ANY = -UNBOUNDED


@pytest.mark.parametrize("length, heads, tile_q, rounds", [(8192, 64, 256, 1), (8192, 32, 192, 2), (16384, 16, 192, 3)])
def test_the_table_holds_as_many_rounds_as_make_blocks_even(length, heads, tile_q, rounds):
    """Causal; with one round, 0.993, 0.983 and 0.973 of the time would be used."""
    costs = costs_of_tiles(Mask(length, length, ANY, 0), tile_q, 64)
    made = make_schedule(costs, heads, length, FITS, 132)
    loads = [sum(cost_of(tile, costs) for tile in block) for block in work_tiles(made, 132, heads * len(costs))]
    assert heads * len(costs) // 264 - made.by_formula // 2 == rounds and BUSY * 132 * max(loads) <= sum(loads)


@pytest.mark.parametrize("left, right", [(1023, 0), (512, 511), (255, 0)])
@pytest.mark.parametrize("length, tile_q", [(1024, 256), (8192, 192), (8192, 128)])
def test_where_blocks_do_not_become_even_the_best_of_all_rounds_is_taken(length, tile_q, left, right, monkeypatch):
    costs, heads = costs_of_tiles(Mask(length, length, -left, right), tile_q, 64), 32 * 8192 // length

    def longest():
        made = make_schedule(costs, heads, length, FITS, 132)
        return max(sum(cost_of(tile, costs) for tile in block) for block in work_tiles(made, 132, heads * len(costs)))

    chosen, rest = longest(), []
    for rounds in schedule.ROUNDS_BY_TABLE:
        monkeypatch.setattr(schedule, "ROUNDS_BY_TABLE", (rounds,))
        rest.append(longest())
    assert chosen == min(rest) or BUSY * 132 * chosen <= heads * costs.sum()


def test_costs_count_key_tiles():
    """300 rows in tiles of 100, 350 keys in tiles of 50; the first row sees the first, the last the last, and nothing is a step."""
    causal = {(ANY, 50): [3, 5, 7], (ANY, 0): [2, 4, 6], (ANY, 1): [3, 5, 7], (ANY, -150): [1, 1, 3], (ANY, 200): [6, 7, 7]}
    windows = {(-50, 0): [2, 3, 3], (-51, 1): [3, 5, 5], (0, 0): [2, 2, 2], (200, UNBOUNDED): [3, 1, 1], (-900, -800): [1, 1, 1]}
    for (first_key, last_key), steps in (causal | windows | {(ANY, UNBOUNDED): [7, 7, 7]}).items():
        assert (costs_of_tiles(Mask(300, 350, first_key, last_key), 100, 50) - STEPS_BESIDES).tolist() == steps


def told(blocks, len_kv=1000, shares_device=False, **options):
    """Plan, parameters and launches on a device of so many blocks, which something else may need as well."""
    q, k = numpy.zeros((2, 3, 1000, 64), numpy.float16), numpy.zeros((2, 3, len_kv, 64), numpy.float16)
    problem = plan_attention(q, k, k, backend="host", arch="90a", **options).problem
    problem = replace(problem, shares_device=shares_device)
    plan = make_forward_plan(problem, architecture_named("90a"))
    params = hopper_forward_params(problem, forward_maps(plan, problem), plan.config.TILE_Q, plan.config.TILE_KV)
    launches = tuple(launch.on(blocks) for launch in forward_launches(plan, problem))
    return plan, *scheduled(plan, params, launches, problem.mask)


def struct(blocks, **options):
    _, params, launches = told(blocks, **options)
    assert len(launches) == 1
    return params[0]


@pytest.mark.parametrize("options", [{}, {"window": (0, 0)}, {"window": (63, 0), "len_kv": 2000}], ids=str)
def test_tiles_that_are_equally_long_are_taken_by_number(options):
    params = struct(5, **options)
    assert (params["run"], params["by_formula"]) == (1, schedule.ALL_TILES) and (params["table"] == NONE).all()


def test_tiles_of_several_heads_are_taken_by_number():
    """Each tile has rows of several heads, which see the same keys; as rows of one head, later ones would see later keys."""
    q, k = numpy.zeros((9, 12, 40, 64), numpy.float16), numpy.zeros((9, 1, 600, 64), numpy.float16)
    problem = packing_of(plan_attention(q, k, k, backend="host", arch="90a", window=(100, 0)).problem).problem
    plan = make_forward_plan(problem, architecture_named("90a"))
    params = hopper_forward_params(problem, forward_maps(plan, problem), plan.config.TILE_Q, plan.config.TILE_KV)
    launches = tuple(launch.on(5) for launch in forward_launches(plan, problem))
    params, _ = scheduled(plan, params, launches, problem.mask)
    assert plan.config.PACK_GQA and not plan.config.SPLIT_KV and params[0]["tiles"] > 5
    assert (params[0]["run"], params[0]["by_formula"]) == (1, schedule.ALL_TILES)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 0)}, {"window": (10, 10)}], ids=str)
def test_tiles_that_differ_are_dealt_out(options):
    params = struct(5, **options)
    assert params["run"] == 2 and sorted(params["table"][params["table"] != NONE]) == list(range(24 - 5 * params["by_formula"]))
    assert (params["table"][:, -1] == NONE).all() and (params["table"][5:] == NONE).all()


def test_tiles_of_lists_are_dealt_out():
    """A device alone knows how long they are."""
    plan, params, _ = told(5, mask="kv_idx % 7 > 0")
    assert plan.config.TILE_LIST and params[0]["run"] == 2
    left = params[0]["table"][params[0]["table"] != NONE]
    assert sorted(left) == list(range(int(params[0]["tiles"]) - 5 * int(params[0]["by_formula"]))) and len(left)


def test_one_tile_for_each_block_needs_no_order():
    params = struct(24, causal=True)
    assert (params["run"], params["by_formula"]) == (1, schedule.ALL_TILES)


def test_other_kernels_have_no_schedule():
    q = numpy.zeros((2, 3, 1000, 64), numpy.float16)
    plan = plan_attention(q, q, q, backend="host", arch="90a", kernel="fwd_v2", causal=True)
    params = forward_params(plan.problem)
    launches = (Launch("fwd_v2", 5, 0),)
    assert params.dtype == struct_named("ForwardParams")
    assert scheduled(plan.kernel, params, launches, plan.problem.mask) == (params, launches)


# Tiles that blocks share


def splits_of(splits, key_tiles, blocks):
    """For each block its splits, as `split_of_block` has them: number, tile, first key tile, the one behind the last."""
    every = splits.tiles * key_tiles
    for block in range(blocks):
        first, end = block * splits.key_tiles, min((block + 1) * splits.key_tiles, every)
        parts, tile = [], first // key_tiles
        while max(first, tile * key_tiles) < min(end, (tile + 1) * key_tiles):
            start = tile * key_tiles
            parts.append((tile + block, tile, max(first, start) - start, min(end, start + key_tiles) - start))
            tile += 1
        yield parts


@pytest.mark.parametrize("tiles", [1, 8, 100, 131, 133, 1024, 2048])
@pytest.mark.parametrize("len_kv", [1408, 2000, 4096, 65536])
@pytest.mark.parametrize("tile_kv", [64, 80, 128])
@pytest.mark.parametrize("blocks", [2, 7, 132, TABLE_BLOCKS])
def test_each_key_of_a_shared_tile_is_in_one_part(tiles, len_kv, tile_kv, blocks):
    splits = make_splits(tiles, len_kv, tile_kv, blocks)
    if splits is None:
        return
    assert splits.by_formula * blocks == splits.first and splits.first + splits.tiles == tiles and splits.tiles < blocks
    key_tiles = -(-len_kv // tile_kv)
    of_blocks = list(splits_of(splits, key_tiles, blocks))
    parts = [part for of_block in of_blocks for part in of_block]
    keys = [(tile, key) for _, tile, begin, end in parts for key in range(begin, end)]
    assert keys == [(tile, key) for tile in range(splits.tiles) for key in range(key_tiles)]
    numbers = [number for number, *_ in parts]
    assert numbers == sorted(set(numbers)) and numbers[-1] < min(tiles, TABLE_BLOCKS - 1) + TABLE_BLOCKS  # as in the workspace
    for tile in range(splits.tiles):  # as `splits_of_tile` numbers them
        first, last = (tile + key // splits.key_tiles for key in (tile * key_tiles, (tile + 1) * key_tiles - 1))
        assert [number for number, of, *_ in parts if of == tile] == list(range(first, last + 1))


def test_blocks_share_what_is_left_evenly():
    """1,024 tiles on 132 blocks are seven rounds and 100 tiles, three quarters of one for each block."""
    splits = make_splits(1024, 16384, 128, 132)
    assert (splits.by_formula, splits.tiles, splits.key_tiles) == (7, 100, 97)
    loads = [sum(end - begin for *_, begin, end in parts) for parts in splits_of(splits, 128, 132)]
    assert set(loads[:-1]) == {97} and sum(loads) == 100 * 128


@pytest.mark.parametrize(
    "tiles, len_kv, tile_kv, blocks",
    [
        (264, 65536, 128, 132),  # whole rounds
        (131, 65536, 128, 132),  # hardly less than a round
        (1, LEAST_SPLIT + COMBINING - 128, 128, 132),  # few keys
        (1, 65536, 128, TABLE_BLOCKS + 1),
        (130, 2**30 - 1, 64, 132),  # more key tiles than a kernel counts
    ],
)
def test_tiles_are_not_shared_where_that_would_not_pay(tiles, len_kv, tile_kv, blocks):
    assert make_splits(tiles, len_kv, tile_kv, blocks) is None


def test_a_part_is_worth_its_while():
    """A tile of 4,096 keys for 132 blocks: eight of them take a part, no more."""
    splits = make_splits(1, 4096, 128, 132)
    assert splits.key_tiles == least_split(128) == 4
    assert [len(parts) for parts in splits_of(splits, 32, 132)] == [1] * 8 + [0] * 124
    assert (least_split(64), least_split(80)) == (8, 7)


def test_what_blocks_are_told_of_shares():
    """24 tiles on 5 blocks are four rounds and four tiles, of 6,000 keys in tiles of 64: 376 for all, 76 for a block."""
    plan, params, (computing, combining) = told(5, len_kv=6000)
    p = params[0]
    assert (plan.config.TILE_Q, plan.config.TILE_KV, plan.config.SPLIT_KV) == (256, 64, True)
    assert (p["by_formula"], p["first_split_tile"], p["split_tiles"], p["key_tiles_per_block"], p["partial_rows"]) == (
        4,
        20,
        4,
        76,
        256,
    )
    assert p["key_tiles_divmod"]["divisor"] == 94 and (p["table"] == NONE).all()
    assert (computing.blocks, combining.blocks) == (5, combining_blocks(plan, 4, 1000)) and combining.blocks == -(-4 * 16 * 2 // 20)


def test_nothing_is_merged_where_nothing_is_shared():
    _, params, launches = told(6, len_kv=2000)
    assert params[0]["by_formula"] == schedule.ALL_TILES and [launch.entry for launch in launches] == ["fwd_hopper"]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"len_kv": 6000}], ids=str)
def test_on_a_shared_device_each_tile_has_a_block(options):
    """Of blocks that stay, one that finds no multiprocessor would begin when all others have done their tiles."""
    assert told(5, **options)[2][0].blocks == 5
    plan, params, [computing] = told(5, shares_device=True, **options)
    assert computing.blocks == 2 * 3 * -(-1000 // plan.config.TILE_Q) and not plan.config.SPLIT_KV
    assert (params[0]["run"], params[0]["by_formula"], (params[0]["table"] == NONE).all()) == (1, schedule.ALL_TILES, True)
    assert any("something else has to run" in reason for reason in plan.reasons)


def test_blocks_of_sequences_stay_on_a_shared_device():
    """They take tiles as they go: who begins late finds fewer left."""
    q = numpy.zeros((2, 300, 64), numpy.float16)
    offsets = numpy.array([0, 100, 300])
    plan = plan_attention(q, q, q, backend="host", arch="90a", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    shared = replace(plan.problem, shares_device=True)
    made = make_forward_plan(shared, architecture_named("90a"))
    assert made == plan.kernel and made.config.VARLEN and made.reasons == plan.kernel.reasons
    assert forward_launches(made, shared) == plan.launches


@pytest.mark.parametrize(
    "batch, len_q, len_kv, tile_q, tile_kv, pays",
    [
        (8, 2048, 8192, 192, 64, False),  # 21 rounds of unequal tiles, of which a block has longer ones than another
        (8, 2048, 8192, 128, 128, False),
        (1, 128, 8192, 128, 128, True),  # fewer tiles than blocks
        (1, 300, 8192, 128, 128, True),
        (4, 1024, 16384, 128, 128, True),  # hardly unequal
    ],
)
def test_unequal_tiles_are_split_where_that_is_sooner_done(batch, len_q, len_kv, tile_q, tile_kv, pays):
    heads = 32 * batch
    costs = costs_of_tiles(Mask(len_q, len_kv, None, len_kv - len_q), tile_q, tile_kv)
    assert splits_pay(costs, heads, len_kv, tile_kv) is pays
    # By hand: blocks take tiles one after the other by number; what rounds leave over is split, or goes to who has least to do.
    tiles = len(costs)
    numbered = [costs[tiles - 1 - i // 2 if i % 2 == 0 else i // 2] for i in range(tiles)] * heads
    rounds = len(numbered) // BLOCKS
    loads = [sum(numbered[block + BLOCKS * r] for r in range(rounds)) for block in range(BLOCKS)]
    left = numbered[rounds * BLOCKS :]
    shared = max(loads) + sum(left) / BLOCKS + COMBINING / tile_kv
    dealt_out = [0.0] * BLOCKS
    for cost in sorted(numbered, reverse=True):
        dealt_out[dealt_out.index(min(dealt_out))] += cost
    assert bool(shared < max(dealt_out)) is pays
