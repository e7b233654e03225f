"""Blocks of bwd_hopper that take all keys of a head, one tile after the other: two blocks share all heads here."""

import numpy
import pytest
from later_heads import backward_of, slow_down
from later_heads import judged as judged_by
from thinned import quick, thinned

from cupy_flash import attention, plan_attention_backward
from cupy_flash.call.backward import operands, prepared_backward
from cupy_flash.call.captured import captured
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.machine import host
from cupy_flash.plan import grouping, whole_heads

pytestmark = pytest.mark.usefixtures("poisoned_results")

HOST = {"backend": "host", "arch": "90a"}


@pytest.fixture
def heads_in_turn(planned_anew, monkeypatch):
    """However many key tiles heads have, and with two blocks that run at once."""
    for paces in ("OF_NARROW", "OF_WIDE", "OF_GROUPS"):
        monkeypatch.setattr(whole_heads, paces, dict.fromkeys(range(1, 9), (0.0, 0.0)))
    monkeypatch.setattr(grouping, "RUNNING", 2)


def planned(case, **more):
    """A plan for the host, and what it is called with."""
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    named = case.arrays()
    given = (dout, *inputs, *attention(*inputs, **named, **case.options))
    options = {name: x for name, x in case.options.items() if name != "return_lse"} | more
    plan = plan_attention_backward(*given, dlse=dlse, **named, **HOST, **options)
    return plan, given, {"dlse": dlse, **named}


def judged(case, **more):
    """The plan, whose gradients are right in memory that held anything, twice with the same bits."""
    plan, given, named = planned(case, **more)
    assert plan.kernel.config.WHOLE_HEADS and plan.kernel.config.PERSISTENT and whole_heads.WHY in plan.kernel.reasons
    dout, *inputs, _, _ = given
    told = {"dlse": named["dlse"], **case.meaning()}
    found = []
    for poison in (0x7F, 0xFF):
        memory = numpy.full(plan.workspace_bytes, poison, numpy.uint8)
        found.append(plan(*given, **named, workspace=memory))
        comparison = compare_gradients(found[-1], dout, *inputs, **told)
        assert comparison.ok, comparison.message
    for one, other in zip(*found):
        numpy.testing.assert_array_equal(one, other)
    return plan


OFF_EDGES = {"len_q": 150, "len_kv": 330, "heads_q": 3, "batch": (2,)}
CASES = [
    Case("float16", 100, 70, heads_q=5),  # one tile of keys, whose sums nobody adds to
    Case("bfloat16", **OFF_EDGES),
    Case("bfloat16", **OFF_EDGES | {"len_q": 500}, causal=True),  # rows that see nothing, and a tile of them
    Case("float16", **OFF_EDGES | {"len_q": 400}, causal="top_left", dim=40),
    Case("float16", **OFF_EDGES, window=(60, 20)),  # the first key tile of a query tile is not that of the head, nor the last
    Case("float16", 300, 140, heads_q=3, window=(20, 10), dim=128),
    Case("bfloat16", **OFF_EDGES | {"heads_q": 4}, heads_kv=2, causal=True),  # heads of a group have sums of their own in a block
    Case("float16", **OFF_EDGES | {"heads_q": 4}, heads_kv=1, dim=96, prefix=50, causal=True),
    Case("float16", **OFF_EDGES, dim=128),
    Case("float16", **OFF_EDGES, dim=32, softcap=5.0),
    Case("float16", **OFF_EDGES, bias="heads", dim=56),
    Case("bfloat16", **OFF_EDGES | {"len_kv": 336}, bias="full"),
    Case("float16", **OFF_EDGES, bias="keys", causal=True),
    Case("float16", **OFF_EDGES, alibi="heads", causal=True),
    Case("bfloat16", **OFF_EDGES, alibi="batch", dim=48),
    Case("float16", **OFF_EDGES, dropout=0.25),
    Case("bfloat16", **OFF_EDGES | {"heads_q": 4, "len_kv": 336}, heads_kv=2, bias="pairs", dim=128),
    Case("float16", **OFF_EDGES, sinks=1, window=(200, 0)),
    Case("float16", **OFF_EDGES, scale=-0.2, layout="bshd"),
    Case("bfloat16", 150, 330, heads_q=2, batch=(2, 3)),
    Case("float16", **OFF_EDGES, layout="broadcast"),  # dk and dv are sums over batch elements
    Case("float16", 1, 200, heads_q=6),
    Case("float16", 200, 1, heads_q=6, dim_v=24),
]
OFTEN = [CASES[i] for i in (0, 2, 4, 6, 8)]


@pytest.mark.parametrize("schedule", thinned(host.SCHEDULES, first=1))
@pytest.mark.parametrize("case", quick(CASES, *OFTEN), ids=str)
def test_gradients(case, schedule, heads_in_turn, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    plan = judged(case)
    heads, tiles = case.heads_kv * int(numpy.prod(case.batch)), -(-case.len_kv // plan.kernel.config.TILE_KV)
    assert plan.launches[1].on(132).blocks == min(heads, 2) and plan.launches[1].behind == 0
    rows = -(-case.len_q // plan.kernel.config.TILE_Q) * plan.kernel.config.TILE_Q
    of_block = 4 * rows * plan.kernel.config.WIDTH * case.heads_q // case.heads_kv
    assert dict(plan.workspace.parts)["dq_accum"] == min(heads, 2) * of_block if tiles > 1 else True
    assert not {"dq_progress", "dq_semaphore", "stats_progress", "zeros_progress"} & set(plan.workspace.names)


@pytest.mark.release
def test_each_block_has_sums_of_its_own(heads_in_turn, monkeypatch):
    """Two at once, slow to take a key tile, so that each has a head."""
    plan, given, named = planned(case := Case("float16", 70, 300, heads_q=2))
    slow_down(monkeypatch, plan, "tile/dq_protocol.cuh", "    block.tell_keys();", "")
    memory = numpy.full(plan.workspace_bytes, 0x7F, numpy.uint8)
    found = plan(*given, **named, workspace=memory)
    comparison = compare_gradients(found, *given[:4], dlse=named["dlse"], **case.meaning())
    assert comparison.ok, comparison.message
    (sums,) = (memory[at:] for name, at in zip(plan.workspace.names, plan.workspace.offsets) if name == "dq_accum")
    blocks = sums[: dict(plan.workspace.parts)["dq_accum"]].reshape(2, -1)
    assert (blocks != 0x7F).any(1).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_order_is_not_asked_for(deterministic, heads_in_turn):
    """Nobody else adds, so that bits are the same either way."""
    case = Case("float16", **OFF_EDGES)
    plan, given, named = planned(case, deterministic=deterministic)
    other, *_ = planned(case, deterministic=not deterministic)
    assert plan.kernel == other.kernel
    for one, same in zip(plan(*given, **named), other(*given, **named)):
        numpy.testing.assert_array_equal(one, same)


@pytest.mark.parametrize("heads_kv", quick([4, 2], 4))
def test_scores_that_are_scaled(heads_kv, heads_in_turn):
    """Times a number of the head: of one head a block, that is for its sums, and of several for each score's gradient."""
    rng = numpy.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, heads, 150, 64), "f4").astype("f2") for heads in (4, heads_kv, heads_kv, 4))
    options = {"score": "score * t[h]", "arrays": {"t": numpy.array([0.5, -1.5, 2.0, 1.0], "f4")}}
    given = dout, q, k, v, *attention(q, k, v, return_lse=True, **options)
    plan, formula = (plan_attention_backward(*given, **where, **options) for where in (HOST, {"backend": "numpy"}))
    assert plan.kernel.config.WHOLE_HEADS and plan.kernel.config.SCALE_SUMS is (heads_kv == 4)
    judged_by(plan, formula, given, {"arrays": options["arrays"]})


@pytest.mark.parametrize(
    "shape, shape_kv, parts",
    quick(
        [((2, 1024, 64), (2, 77, 64), 4), ((3, 2, 150, 64), (1, 2, 300, 64), 1), ((1, 1, 2, 150, 128), (2, 3, 2, 100, 128), 1)],
        spread=True,
    ),
)
def test_keys_that_batch_elements_share(shape, shape_kv, parts, heads_in_turn, monkeypatch):
    """As parts of queries do: their gradients are sums, and where queries are shared, dq is for another kernel to make."""
    if parts > 1:
        monkeypatch.undo()
    plan, formula, given, named = backward_of(shape, shape_kv)
    assert plan.kernel.config.WHOLE_HEADS is (shape[0] >= shape_kv[0])
    assert (f"queries in {parts} parts" in str(plan)) is (parts > 1) and plan.launches[2].blocks > 0
    judged_by(plan, formula, given, named)


@pytest.mark.release
@pytest.mark.parametrize("adds", [False, True])
def test_results_in_float32(adds, heads_in_turn):
    """What is rounded otherwise, and added to what is there."""
    (q, k, v), (dout, _) = make_inputs(case := Case("bfloat16", **OFF_EDGES)), make_cotangents(case)
    out, lse = attention(q, k, v, return_lse=True)
    there = [numpy.full(x.shape, 3.0, numpy.float32) for x in (q, k, v)] if adds else [None] * 3
    found = []
    for options in ({}, {"float32_results": True, "adds_results": adds}):
        results = there if options else [None] * 3
        given = operands(dout, q, k, v, out, lse, None, None, *results, None, others=captured(lengths={}))
        plan = prepared_backward(given, HOST | options)
        assert plan.kernel.config.WHOLE_HEADS and plan.kernel.config.ADD_RESULTS is (adds and bool(options))
        found.append(plan.run(given)[:3])
    for half, wide in zip(*found):
        assert wide.dtype == numpy.float32
        own = wide - 3.0 * adds
        assert abs(own - half.astype("f4")).max() <= 2**-8 * abs(own).max() and (wide != half.astype("f4")).any()


def test_sums_are_neither_zero_before_nor_read_of_one_key_tile(planned_anew, monkeypatch):
    """What moves is what has to: each operand for each key tile, and gradients once."""
    monkeypatch.setattr(grouping, "RUNNING", 2)
    case = Case("float16", 128, 128, heads_q=8)
    plan, given, named = planned(case)
    assert plan.kernel.config.WHOLE_HEADS
    _, counts = plan.counted(*given, **named)
    tensor = 8 * 128 * 64 * 2
    stats = 2 * 8 * 128 * 4
    assert counts.written_bytes <= 3 * tensor + stats + 64  # dq, dk and dv
    assert counts.read_bytes <= 6 * tensor + 2 * stats + 64  # q, k, v, dout twice, out


PLANS = [
    ((512, 8, 8, 128, 64), {}, True),
    ((512, 8, 8, 128, 128), {"causal": True}, True),
    ((256, 4, 4, 256, 64), {}, True),
    ((128, 12, 12, 384, 64), {}, True),
    ((128, 12, 12, 384, 128), {}, False),  # of wide heads, three tiles do not pay
    ((32, 32, 32, 512, 64), {"causal": True}, True),
    ((32, 32, 32, 512, 64), {"window": (100, 100)}, True),
    ((32, 32, 32, 640, 64), {"causal": True}, True),
    ((32, 32, 32, 640, 64), {}, False),
    ((32, 32, 32, 768, 64), {"causal": True}, False),
    ((128, 16, 4, 256, 64), {}, True),
    ((128, 16, 4, 384, 64), {}, False),
    ((16, 4, 4, 256, 64), {}, False),  # 64 heads, half of the multiprocessors
    ((32, 4, 4, 256, 64), {}, True),  # 128 heads
    ((40, 4, 4, 256, 64), {}, False),  # 160, of which the second round has few
    ((512, 8, 8, 128, 256), {}, False),  # another kernel
    ((512, 8, 8, 80, 32), {}, True),
    ((512, 8, 8, 128, 32), {"causal": True}, True),
    ((512, 8, 8, 64, 32), {}, False),  # bwd_v2, as of 129 to 192 tokens of so narrow heads
    ((512, 8, 8, 160, 32), {}, False),
    ((512, 8, 8, 64, 64), {}, False),
    ((512, 8, 8, 128, 64), {"mask": "kv_idx % 3 > 0"}, False),  # lists of tiles
]


@pytest.mark.parametrize("shape, options, whole", PLANS)
def test_where(shape, options, whole):
    batch, heads, heads_kv, seq, dim = shape
    q, k = (numpy.zeros((batch, number, seq, dim), "f2") for number in (heads, heads_kv))
    plan = plan_attention_backward(q, q, k, k, q, numpy.zeros(q.shape[:-1], "f4"), **HOST, **options)
    assert plan.kernel.config.WHOLE_HEADS is whole


@pytest.mark.parametrize(
    "dim, queries, keys, file",
    [
        *((32, 64, 128, "bwd_v2"), (32, 64, 256, "bwd_v2"), (32, 256, 64, "bwd_hopper"), (64, 64, 128, "bwd_hopper")),
        *((64, 64, 129, "bwd_v2"), (64, 50, 64, "bwd_v2")),  # two key tiles of some numbers of heads are not taken whole
    ],
)
def test_few_queries_or_keys(dim, queries, keys, file):
    q, k = (numpy.zeros((512, 8, rows, dim), "f2") for rows in (queries, keys))
    plan = plan_attention_backward(q, q, k, k, q, numpy.zeros(q.shape[:-1], "f4"), **HOST)
    assert (plan.kernel.file, plan.kernel.config.WHOLE_HEADS) == (file, file == "bwd_hopper")
