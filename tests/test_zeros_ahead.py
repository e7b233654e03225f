"""Sums that blocks of the Hopper backwards make zero for later heads: on the host those of the next but one group of heads."""

from contextlib import nullcontext

import ml_dtypes
import numpy
import pytest
from later_heads import HOST, backward_of, judged, plan_of, slow_down
from thinned import quick

from cupy_flash import plan_attention_backward
from cupy_flash.plan import backward as backward_plan
from cupy_flash.plan import grouping
from cupy_flash.plan.grouping import make_grouping


@pytest.fixture
def zeros_ahead(made_ahead, monkeypatch):
    """Blocks make zeros for later heads, however few heads and blocks there are, and of whatever lengths."""
    monkeypatch.setattr(grouping, "MOST_ROWS_REUSED", 0)
    monkeypatch.setattr(backward_plan, "MOST_ROWS_STORED", 0)


CASES = [
    ((3, 6, 300, 64), (3, 6, 260, 64), {"causal": True}),  # with statistics
    ((9, 1700, 128), (9, 150, 128), {}),  # where TMA adds dQ
    ((5, 4, 200, 192), (5, 2, 200, 192), {"with_dlse": True, "causal": True}),  # heads of a group in one block
    ((14, 70, 248), (14, 500, 248), {"window": (30, 5)}),  # key tiles that nobody sees, and more of them than parts of the sums
    ((3, 6, 130, 24), (3, 3, 150, 24), {"softcap": 3.0, "sinks": True}),
    ((14, 257, 256), (14, 129, 256), {"dtype": ml_dtypes.bfloat16}),
    ((18, 140, 96), (18, 300, 96), {"score": "score - 0.25 * (q_idx - kv_idx)"}),
    ((9, 1700, 128), (9, 300, 128), {"deterministic": True}),
    ((5, 4, 200, 192), (5, 2, 300, 192), {"deterministic": True}),
]
OFTEN = [(*CASES[0], "eager")]  # for wide heads see `test_zeros`


@pytest.mark.parametrize(
    "shape, shape_kv, options, schedule",
    quick([(*case, schedule) for case in CASES for schedule in ("eager", "deferred")], *OFTEN, spread=True),
)
def test_gradients(shape, shape_kv, options, schedule, zeros_ahead, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    plan, *others = backward_of(shape, shape_kv, **options)
    made, heads, c = make_grouping(plan.kernel, plan.problem), numpy.prod(shape[:-2]), plan.kernel.config
    assert c.ZEROS_AHEAD and 0 < made.heads_ahead < heads == made.accum_heads and "zeros_progress" in plan.workspace.names
    assert c.TMA_REDUCE_DQ is (shape[-2] == 1700) and c.STATS_AHEAD is (c.WIDTH <= 128 and not c.TMA_REDUCE_DQ)
    tiles = -(-shape[-2] // c.TILE_Q)
    assert plan.launches[0].blocks == tiles * (made.heads_ahead if c.STATS_AHEAD else heads)
    assert "an idle warp makes sums of later heads zero" in str(plan)
    judged(plan, *others)


def test_zeros(zeros_ahead):
    """Where nothing is added, all sums are zero, whoever made them."""
    plan, *_ = backward_of((14, 70, 256), (14, 150, 256), causal=True)
    zeros, zeros_kv = (numpy.zeros((14, rows, 256), "f2") for rows in (70, 150))
    memory = numpy.full(plan.workspace_bytes, 0x7F, numpy.uint8)
    plan(zeros, zeros, zeros_kv, zeros_kv, zeros, numpy.zeros((14, 70), "f4"), workspace=memory)
    offsets = dict(zip(plan.workspace.names, plan.workspace.offsets))
    size = 4 * 14 * 2 * plan.kernel.config.TILE_Q * 256
    assert not memory[offsets["dq_accum"] :][:size].any()


def test_where():
    """Where no sums are used again, up to 4,096 queries, if there are later heads."""
    assert plan_of(300, dim=256).kernel.config.ZEROS_AHEAD and not plan_of(10, dim=256).kernel.config.ZEROS_AHEAD
    for dim in (64, 128):
        few, some, many = (plan_of(40, len_q=length, len_kv=length, dim=dim).kernel.config for length in (2048, 4096, 4097))
        assert some.ZEROS_AHEAD and not few.ZEROS_AHEAD and not many.ZEROS_AHEAD
        assert few.STATS_AHEAD == some.STATS_AHEAD == (dim == 64)


def test_not_beside_lists_of_tiles():
    assert not plan_of(300, dim=256, mask="kv_idx <= q_idx + 3").kernel.config.ZEROS_AHEAD


def test_not_beside_a_staged_bias(zeros_ahead):
    """Which leaves no room at dim 64, and of whose gradient the warp has TMA store what there is."""
    q, bias = numpy.zeros((40, 4, 128, 64), "f2"), numpy.zeros((40, 4, 128, 128), "f2")
    given = (q, q, q, q, q, numpy.zeros(q.shape[:-1], "f4"))
    for wrt in ((), ("bias",)):
        c = plan_attention_backward(*given, bias=bias, wrt=wrt, **HOST).kernel.config
        assert c.STAGED_BIAS and c.STORE_DBIAS is bool(wrt) and not c.ZEROS_AHEAD


WAIT = "if (ZEROS_AHEAD && head_ahead(block) >= p.heads_ahead) "
WAIT += "wait_for_count(p.zeros_progress + head_ahead(block), VARLEN ? makers(p) : blocks);"


@pytest.mark.release
@pytest.mark.parametrize("left_out", quick([None, WAIT], None))
@pytest.mark.parametrize("dim", quick([128, 256], 256))
def test_a_head_waits_for_its_zeros(dim, left_out, zeros_ahead, monkeypatch):
    """All blocks at once, those that make them slow: what is added meanwhile is lost."""
    monkeypatch.setattr(grouping, "RUNNING", 0)  # of the next group of heads
    made = backward_of((8, 1700 if dim == 128 else 200, dim), (8, 130, dim))  # queries that are not dealt out in parts
    assert made[0].kernel.config.ZEROS_AHEAD and made[0].kernel.config.TMA_REDUCE_DQ is (dim == 128)
    slow_down(monkeypatch, made[0], "tile/dq_protocol.cuh", "  store_repeated<ZEROS>(", "tile/dq_protocol.cuh", left_out)
    with pytest.raises(AssertionError) if left_out else nullcontext():
        judged(*made)
