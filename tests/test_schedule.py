"""Which query tiles each block takes: each tile once, long ones early, all blocks equally long, and keys of few heads at a time."""

import numpy
import pytest

from cupy_flash import plan_attention, schedule
from cupy_flash.architecture import architecture_named
from cupy_flash.forward_plan import forward_maps, make_forward_plan
from cupy_flash.params import HOPPER_FORWARD, forward_params, hopper_forward_params, with_schedule
from cupy_flash.schedule import L2_BYTES, MANY_KEYS, NONE, STEPS_BESIDES, TABLE_BLOCKS, TABLE_TURNS, causal_costs, make_schedule

FITS = 1.0  # bytes of a head: so few that all heads stay in the cache


def turns(made, blocks, tiles):
    """For each block its tiles in order, as `in_turn` and `has_turn` of place.cuh number them."""
    for block in range(blocks):
        taken = []
        for turn in range(made.by_formula):
            tile = (turn // 2 * blocks + block) * 2 + turn % 2 if made.run == 2 else turn * blocks + block
            if tile >= tiles:
                break
            taken.append(tile)
        rest = made.table[block] if made.table else ()
        yield taken + [made.by_formula * blocks + tile for tile in rest]


def cost_of(tile, costs):
    """`place_of_tile` takes the tiles of a head from both ends, the last one first."""
    place = tile % len(costs)
    return costs[place // 2 if place % 2 else len(costs) - 1 - place // 2]


@pytest.mark.parametrize("tiles_of_head", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("heads", [1, 5, 16, 300])
@pytest.mark.parametrize("blocks", [1, 2, 7, 132, TABLE_BLOCKS, TABLE_BLOCKS + 1])
@pytest.mark.parametrize("bytes_of_head", [FITS, L2_BYTES + 1.0])
def test_each_tile_is_taken_once(tiles_of_head, heads, blocks, bytes_of_head):
    tiles = tiles_of_head * heads
    made = make_schedule(numpy.arange(tiles_of_head) + 2, heads, 1000, bytes_of_head, min(blocks, tiles))
    taken = list(turns(made, min(blocks, tiles), tiles))
    assert sorted(tile for block in taken for tile in block) == list(range(tiles))
    assert max(map(len, made.table), default=0) < TABLE_TURNS


@pytest.mark.parametrize("tiles_of_head, heads", [(16, 64), (32, 32), (64, 32), (128, 16), (128, 8)])
def test_blocks_end_together(tiles_of_head, heads):
    costs = 2 * numpy.arange(tiles_of_head) + 3
    made = make_schedule(costs, heads, MANY_KEYS, FITS, 132)
    loads = [sum(cost_of(tile, costs) for tile in block) for block in turns(made, 132, tiles_of_head * heads)]
    plain = [sum(cost_of(tile, costs) for tile in block) for block in turns(schedule.Schedule(run=2), 132, tiles_of_head * heads)]
    mean = numpy.mean(loads)
    assert max(loads) < max(plain) and max(loads) < 1.02 * mean


def test_of_the_table_long_tiles_come_first():
    costs = numpy.arange(16) ** 2 + 1
    made = make_schedule(costs, 40, MANY_KEYS, FITS, 9)
    for block in turns(made, 9, 16 * 40):
        table = [cost_of(tile, costs) for tile in block[made.by_formula :]]
        assert table and table == sorted(table, reverse=True)


def test_heads_of_the_table_fit_the_cache():
    """Of 1,100 tiles, 100 are left after whole rounds of two for each of 100 blocks; a round more makes 300, which is 30 heads."""
    costs = numpy.arange(10) + 1
    tables = {
        share: make_schedule(costs, 110, keys, L2_BYTES * share, 100).by_formula
        for share, keys in ((1 / 31, 100), (1 / 29, 100), (1 / 10, 100), (1 / 9, 100), (1 / 8, MANY_KEYS))
    }
    assert tables == {1 / 31: 8, 1 / 29: 10, 1 / 10: 10, 1 / 9: schedule.ALL_TURNS, 1 / 8: 8}


def test_costs_count_key_tiles():
    """300 rows in tiles of 100, 350 keys in tiles of 50; the last row of a tile sees the most, and nothing is a step as well."""
    for last_key, steps in ((50, [3, 5, 7]), (0, [2, 4, 6]), (1, [3, 5, 7]), (-150, [1, 1, 3]), (200, [6, 7, 7])):
        assert (causal_costs(300, 350, last_key, 100, 50) - STEPS_BESIDES).tolist() == steps


def struct(blocks, **options):
    q = numpy.zeros((2, 3, 1000, 64), numpy.float16)
    problem = plan_attention(q, q, q, backend="host", arch="90a", **options).problem
    plan = make_forward_plan(problem, architecture_named("90a"))
    params = hopper_forward_params(problem, forward_maps(plan, problem), plan.config.TILE_Q)
    return with_schedule(params, plan, blocks)[0]


def test_only_causal_tiles_are_dealt_out():
    for options in ({}, {"window": (10, 0)}, {"window": (10, 10)}):
        params = struct(5, **options)
        assert (params["run"], params["by_formula"]) == (1, schedule.ALL_TURNS) and (params["table"] == NONE).all()
    params = struct(5, causal=True)
    assert params["run"] == 2 and sorted(params["table"][params["table"] != NONE]) == list(range(24 - 5 * params["by_formula"]))
    assert (params["table"][:, -1] == NONE).all() and (params["table"][5:] == NONE).all()


def test_one_tile_for_each_block_needs_no_order():
    params = struct(24, causal=True)
    assert (params["run"], params["by_formula"]) == (1, schedule.ALL_TURNS)


def test_other_kernels_have_no_schedule():
    q = numpy.zeros((2, 3, 1000, 64), numpy.float16)
    plan = plan_attention(q, q, q, backend="host", arch="90a", kernel="fwd_v2", causal=True)
    params = forward_params(plan.problem)
    assert params.dtype != HOPPER_FORWARD and with_schedule(params, plan.kernel, 5) is params
