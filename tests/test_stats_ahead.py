"""Statistics of queries that blocks of bwd_hopper make for later heads: on the host those of the next but one group of heads."""

from contextlib import nullcontext

import ml_dtypes
import numpy
import pytest
from later_heads import HOST, backward_of, judged, plan_of, slow_down
from thinned import quick

from cupy_flash import plan_attention_backward
from cupy_flash.plan import backward as backward_plan
from cupy_flash.plan import grouping
from cupy_flash.plan.grouping import RUNNING, make_grouping

LOG2E = 1.4426950408889634


CASES = [
    ((3, 6, 300, 64), (3, 6, 260, 64), {"causal": True}),
    ((5, 4, 500, 40), (5, 2, 260, 40), {"with_dlse": True}),  # heads of a group in one block; a share of two query tiles
    ((14, 200, 64), (14, 900, 64), {"window": (90, 5)}),  # key tiles that nobody sees; shares without a query tile
    ((5, 4, 300, 72), (5, 2, 260, 72), {"causal": True}),  # wider than a panel of 64 columns
    ((18, 330, 128), (18, 140, 128), {"dtype": ml_dtypes.bfloat16}),
    ((3, 6, 130, 24), (3, 3, 150, 24), {"softcap": 3.0, "sinks": True}),
    ((2, 9, 257, 64), (2, 9, 129, 64), {"dtype": ml_dtypes.bfloat16, "causal": True}),
    ((18, 140, 64), (18, 300, 64), {"score": "score - 0.25 * (q_idx - kv_idx)"}),
    ((18, 300, 64), (18, 390, 64), {"score": "score - 0.25 * abs(q_idx - kv_idx)"}),  # lse for either side of the diagonal
    ((14, 300, 64), (14, 390, 64), {"causal": True, "deterministic": True}),
    ((5, 4, 330, 72), (5, 2, 260, 72), {"deterministic": True, "with_dlse": True}),
]
WAYS = [("eager", True), ("deferred", False)]
OFTEN = [(*CASES[-1], *WAYS[0])]  # in any order see below, and test_packed_ahead.py


@pytest.mark.parametrize(
    "shape, shape_kv, options, schedule, again",
    quick([(*case, *way) for case in CASES for way in WAYS], *OFTEN, spread=True),
)
def test_gradients(shape, shape_kv, options, schedule, again, made_ahead, monkeypatch):
    """With sums that later heads use again, and with sums of each head, all of which the first launch makes zero."""
    monkeypatch.setattr(grouping, "MOST_ROWS_REUSED", 1000 if again else 0)
    monkeypatch.setattr(backward_plan, "MOST_ROWS_AHEAD", 0)
    monkeypatch.setattr(backward_plan, "MOST_ROWS_STORED", 0 if again else 1000)
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    plan, *others = backward_of(shape, shape_kv, **options)
    made, heads = make_grouping(plan.kernel, plan.problem), numpy.prod(shape[:-2])
    assert plan.kernel.config.STATS_AHEAD and 0 < made.heads_ahead < heads and (made.reused > 0) == again
    tiles = -(-shape[-2] // plan.kernel.config.TILE_Q)
    assert plan.launches[0].blocks == tiles * max(made.heads_ahead, made.accum_heads) and (made.accum_heads < heads) == again
    assert plan.kernel.config.IN_ORDER is options.get("deterministic", False)
    assert plan.kernel.config.FIRST_STORES is (plan.kernel.config.IN_ORDER and not again)
    who = "an idle warp makes" if plan.kernel.config.IN_ORDER else "idle warps make"
    assert f"{who} statistics of queries of later heads" in str(plan)
    judged(plan, *others)


@pytest.mark.parametrize("dim, sign", quick([(64, -1), (120, 1)], (64, -1), spread=True))  # at dim 64 products start from -delta
def test_statistics(dim, sign, made_ahead):
    """Those of all heads, whoever made them: lse bit by bit, and of rows beyond the last one what leaves no trace."""
    plan, _, given, named = backward_of((3, 6, 300, dim), (3, 6, 260, dim), with_dlse=True)
    assert plan.kernel.config.STATS_AHEAD
    memory = numpy.full(plan.workspace_bytes, 0x7F, numpy.uint8)
    plan(*given, workspace=memory, **named)
    [start] = (offset for name, offset in zip(plan.workspace.names, plan.workspace.offsets) if name == "stats")
    rows = plan.kernel.config.TILE_Q
    tiles = -(-300 // rows)
    stats = memory[start : start + 18 * tiles * 2 * rows * 4].view("f4").reshape(18, tiles, 2, rows)
    made_lse, made_delta = (stats[:, :, i].reshape(18, tiles * rows) for i in range(2))
    dout, *_, out, lse = given
    terms, dlse = (dout.astype("f8") * out.astype("f8")).reshape(18, 300, dim), named["dlse"].reshape(18, 300)
    delta = sign * (terms.sum(-1) - dlse)
    numpy.testing.assert_array_equal(made_lse[:, :300], lse.reshape(18, 300) * numpy.float32(LOG2E))
    assert numpy.isposinf(made_lse[:, 300:]).all() and not made_delta[:, 300:].any()
    # Products of halves are exact: sums, and a difference, round.
    assert (abs(made_delta[:, :300] - delta) <= (dim + 1) * 2**-24 * (abs(terms).sum(-1) + abs(dlse))).all()


def test_of_rows_that_see_nothing(made_ahead):
    """Their lse is minus infinity, for whatever head it is."""
    plan, formula, given, named = backward_of((14, 300, 64), (14, 140, 64), causal=True)  # the first 160 queries see no key
    assert plan.kernel.config.STATS_AHEAD and numpy.isneginf(given[-1][:, :160]).all()
    judged(plan, formula, given, named)
    assert not plan(*given, **named).dq[:, :160].any()


def test_where():
    """From one group of heads more on than have as many blocks as run at once; the first launch makes what no block makes."""
    ahead = 8 * (1 + -(-RUNNING // (8 * 4)))  # groups of 8 heads with 4 blocks each
    few, many = plan_of(ahead), plan_of(3 * ahead)
    assert not few.kernel.config.STATS_AHEAD and "stats_progress" not in few.workspace.names
    assert many.kernel.config.STATS_AHEAD and "stats_progress" in many.workspace.names
    made = make_grouping(many.kernel, many.problem)
    assert made.heads_ahead == ahead and few.launches[0].blocks == ahead * 4
    assert many.launches[0].blocks == max(ahead, made.accum_heads) * 4 < 3 * ahead * 4


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 128, "len_q": 1600, "len_kv": 1600},  # TMA adds dQ: there is no room, and one warp without work
        {"len_q": 1100},  # a share takes longer than a block
        {"len_kv": 1100},  # there is little to win
        {"order": "F"},  # TMA does not move out, nor anything else
        {"mask": "kv_idx <= q_idx + 3"},
    ],
)
def test_where_not(options):
    assert plan_of(300, dim=options.get("dim", 64)).kernel.config.STATS_AHEAD
    assert not plan_of(300, **options).kernel.config.STATS_AHEAD


def test_an_out_that_tma_does_not_move(made_ahead):
    """Every other row of a larger array of rows that are no multiples of 16 bytes apart."""
    plan, _, given, named = backward_of((14, 200, 64), (14, 260, 64))
    wide = numpy.zeros((14, 200, 67), "f2")
    wide[..., :64] = given[4]
    given = (*given[:4], wide[..., :64], given[5])
    other, formula = (plan_attention_backward(*given, **where) for where in (HOST, {"backend": "numpy"}))
    assert plan.kernel.config.STATS_AHEAD and other.kernel.file == "bwd_hopper" and not other.kernel.config.STATS_AHEAD
    judged(other, formula, given, named)


WAIT = "wait_for_count(p.stats_progress + head_ahead(block), STATS_WARPS * makers(p));"


@pytest.mark.release
@pytest.mark.parametrize("left_out", quick([None, WAIT], None))
def test_a_head_waits_for_its_statistics(left_out, made_ahead, monkeypatch):
    """All blocks at once, those that make them slow."""
    monkeypatch.setattr(grouping, "RUNNING", 0)  # of the next group of heads
    made = backward_of((8, 200, 64), (8, 130, 64))
    assert made[0].kernel.config.STATS_AHEAD
    file = "tile/stats_ahead.cuh"
    slow_down(monkeypatch, made[0], file, "  semaphore_release(p.stats_progress + block.head", file, left_out)
    with pytest.raises(AssertionError) if left_out else nullcontext():
        judged(*made)
