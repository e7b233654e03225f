"""Batch elements that share a bias take turns, on the host; results are the same bits whoever comes first."""

from itertools import product

import ml_dtypes
import numpy
import pytest
from thinned import quick

from cupy_flash import plan_attention
from cupy_flash.plan import params, shared_bias
from cupy_flash.plan.heads_together import listed_heads_together
from cupy_flash.plan.schedule import L2_BYTES, MANY_KEYS, make_schedule
from cupy_flash.plan.shared_bias import elements_in_turn, listed_sharers_in_turn

WHERE = {"backend": "host", "arch": "90a"}
SHAPES = [((4,), 4, 64, False, 4), ((4,), 4, 64, True, 2), ((6,), 4, 128, True, 3), ((2, 3), 4, 64, False, 6)]


def planned(batch, heads, length, dim, bias, **options):
    q = numpy.empty((*batch, heads, length, dim), ml_dtypes.bfloat16)  # memory that nobody touches
    return plan_attention(q, q, q, bias=numpy.empty((*bias, length, length), ml_dtypes.bfloat16), **options, **WHERE)


@pytest.mark.parametrize(
    "batch, heads, length, dim, bias, expected",
    [
        ((4,), 16, 4096, 128, (16,), 4),
        ((4,), 16, 4096, 128, (4, 16), 1),  # each has its own
        ((2, 3), 16, 4096, 64, (1, 1, 16), 6),
        ((2, 3), 16, 4096, 64, (2, 1, 16), 1),  # some have their own
        ((24,), 16, 4096, 128, (16,), 8),  # of more, keys and values would not stay in the cache
        ((7,), 16, 4096, 128, (16,), 7),
        ((11,), 16, 4096, 128, (16,), 1),  # no number of them that does is fair
        ((3,), 2, 8192 - 64, 128, (2,), 3),
        ((3,), 1, 8192 - 64, 128, (), 1),  # 43 tiles of 192 rows
        ((3,), 1, 8192 - 256, 128, (), 3),
        ((256,), 4, 256, 32, (4,), 1),  # the bias stays in the cache
        ((4,), 16, 4096, 128, (), 1),  # so does that of one head
    ],
    ids=str,
)
def test_who_takes_turns(batch, heads, length, dim, bias, expected):
    plan = planned(batch, heads, length, dim, bias)
    tiles = -(-length // plan.kernel.config.TILE_Q) * heads * int(numpy.prod(batch))
    assert plan.kernel.config.STAGED_BIAS and elements_in_turn(plan.problem, tiles) == expected


@pytest.mark.parametrize("dtype, dim, in_turn", [("f2", 64, 4), ("f2", 72, 1), ("f4", 128, 4), ("f4", 136, 1)])
def test_elements_alternate_in_lists_where_the_bias_is_large_beside_a_head(dtype, dim, in_turn):
    """And then fewer heads do, so that keys and values of all of them stay in the cache."""
    q = numpy.empty((4, 16, 4096, dim), numpy.float16)
    problem = plan_attention(q, q, q, bias=numpy.empty((16, 4096, 4096), dtype), **WHERE).problem
    assert listed_sharers_in_turn(problem, 4) == in_turn and listed_sharers_in_turn(problem, 1) == 1
    heads = listed_heads_together(problem, in_turn)
    assert heads == max(n for n in (1, 2, 4, 8, 16) if n * in_turn * 4096 * 4 * dim <= L2_BYTES)


def test_two_tiles_in_a_row_are_of_one_element():
    """So no turns are taken where tiles of an element are an odd number."""
    problem = planned((3,), 1, 8192 - 64, 128, ()).problem
    assert [elements_in_turn(problem, tiles) for tiles in (3 * 63, 3 * 64)] == [1, 3]


MASK = "kv_idx < n[b]"
CASES = list(product(SHAPES, [None, MASK]))


@pytest.mark.parametrize("shape, mask", quick(CASES, (SHAPES[3], None), (SHAPES[0], MASK), spread=True), ids=str)
def test_results_are_those_of_elements_one_by_one(shape, mask, monkeypatch):
    """Also where a mask leaves query tiles of different lengths, which blocks take in turn."""
    batch, heads, dim, causal, in_turn = shape
    rng, length = numpy.random.default_rng(len(batch) + dim), 401
    q, k, v = (rng.standard_normal((*batch, heads, length, dim)).astype(ml_dtypes.bfloat16) for _ in range(3))
    bias = rng.standard_normal((heads, length, 408)).astype(ml_dtypes.bfloat16)[..., :length]
    options, given = {"causal": causal, "return_lse": True, "bias": bias, **WHERE}, {"bias": bias}
    if mask:
        given["arrays"] = {"n": rng.integers(100, length, batch).reshape(-1)}
        options |= {"mask": mask, **given}
    expected = plan_attention(q, k, v, **options)(q, k, v, **given)

    taken = []
    bytes_of_head = 2 * length * dim * 2
    monkeypatch.setattr(shared_bias, "L2_BYTES", 2 * in_turn * bytes_of_head)
    monkeypatch.setattr(params, "elements_in_turn", lambda *args: taken.append(elements_in_turn(*args)) or taken[-1])
    out, lse = (numpy.full_like(x, numpy.nan) for x in expected)
    plan = plan_attention(q, k, v, out=out, lse=lse, **options)
    plan(q, k, v, **given, out=out, lse=lse)
    assert plan.kernel.config.STAGED_BIAS and plan.kernel.config.IN_TURN is (mask is not None) and taken == [in_turn]
    assert all(a.tobytes() == b.tobytes() for a, b in zip((out, lse), expected))


@pytest.mark.parametrize("in_turn", [1, 2, 4])
def test_tiles_are_dealt_out_by_their_places(in_turn):
    """Counted as if elements came one after the other, blocks would end at different times."""
    costs, heads, blocks = numpy.arange(32) + 2, 16, 132
    made = make_schedule(costs, heads, MANY_KEYS, 1.0, blocks, in_turn)
    pair, odd = divmod(numpy.arange(heads * len(costs)), 2)  # as `tile_coord` of scheduler.cuh finds a tile by its number
    place = (pair // in_turn * 2 + odd) % len(costs)
    cost = costs[numpy.where(place % 2, place // 2, len(costs) - 1 - place // 2)]
    assert sorted(place) == sorted(numpy.tile(numpy.arange(len(costs)), heads))
    index = numpy.arange(made.by_formula)[:, None]
    loads = cost[(index // 2 * blocks + numpy.arange(blocks)) * 2 + index % 2].sum(0)
    loads = loads + [cost[made.by_formula * blocks + numpy.array(tiles, int)].sum() for tiles in made.table]
    assert made.run == 2 and loads.max() < 1.02 * loads.mean()
