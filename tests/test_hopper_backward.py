"""The backward for sm_90a on the host: cases, groups of heads, sums over batch axes, views, and blocks that run together."""

from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import quick, thinned
from whole_groups import never_split

from cupy_flash import attention, plan_attention_backward
from cupy_flash.call.backward import _prepared
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.machine import host
from cupy_flash.plan import backward as backward_plan
from cupy_flash.plan import grouping

RESULTS = ("dq", "dk", "dv")

IN_ORDER = ["any order", "in order"]
in_both_modes = pytest.mark.parametrize("deterministic", [False, True], ids=IN_ORDER)
MODES, IN_MODES = [("eager", False), ("deferred", True)], ["eager", "deferred in order"]
both = pytest.mark.parametrize("schedule, deterministic", MODES, ids=IN_MODES)



@pytest.fixture
def planning(monkeypatch):
    """A function that changes a number by which backwards are planned."""

    def change(name, value):
        monkeypatch.setattr(grouping, name, value)
        _prepared.cache_clear()

    yield change
    _prepared.cache_clear()


@pytest.fixture
def schedule_as(monkeypatch, planning):
    """A function that chooses when asynchronous operations happen, and who finishes dq: later blocks, or the last one of a head."""

    def choose(schedule):
        monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
        if schedule == "deferred":
            planning("LAST_BLOCKS", 0)

    return choose


@pytest.fixture
def unsplit(planning, monkeypatch):
    """However few blocks there are, one sums over all query heads of a group."""
    never_split(monkeypatch)


def operands(case):
    """All that a backward takes of a case, by name; its results go into memory full of NaN."""
    q, k, v = make_inputs(case)
    dout, dlse = make_cotangents(case)
    out, lse = attention(q, k, v, **case.options | {"return_lse": True})
    results = {name: numpy.full(x.shape, numpy.nan, x.dtype) for name, x in zip(RESULTS, (q, k, v))}
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse} | results


def planned(case, given, deterministic=False, kernel=None):
    options = {name: value for name, value in case.options.items() if name != "return_lse"}
    plan = plan_attention_backward(**given, **options, deterministic=deterministic, kernel=kernel, backend="host", arch="90a")
    assert plan.kernel.file.startswith("bwd_hopper")
    return plan


def computed(plan, given):
    """The gradients, by a workspace full of NaN."""
    return plan(**given, workspace=numpy.full(plan.workspace_bytes, 255, numpy.uint8))


def judge(case, given, gradients):
    names = ("dout", "q", "k", "v", "dlse")
    judged = compare_gradients(gradients, **{name: given[name] for name in names}, precision=case.precision, **case.scores)
    assert judged.ok, judged.message


CASES = (
    Case("float16", 130, 150, heads_q=4, heads_kv=2, causal=True),  # parts of dk and dv are added up
    Case("float16", 129, 97, causal=True),  # the first 32 rows see nothing
    Case("float16", 150, 300, heads_q=2, batch=(2,), causal="top_left"),  # the last block of keys is seen by nobody
    Case("float16", 261, 131, window=(50, 20), heads_q=2),
    Case("float16", 90, 170, window=(None, 3), batch=(2, 3)),
    Case("float16", 1, 257, heads_q=2, batch=(3,)),
    Case("float16", 257, 1, heads_q=2),
    Case("float16", 70, 150, heads_q=2, batch=(2,), layout="broadcast", causal=True),
    Case("float16", 75, 140, dim=40, layout="sliced", values="one_hot", causal=True),
    Case("float16", 67, 83, scale=-0.25, causal=True),
    Case("float16", 150, 140, dim=40, heads_q=3, softcap=30.0, values="large"),
    Case("bfloat16", 70, 290, dim=128, window=(20, 20)),
    Case("bfloat16", 100, 70, dim=8, dim_v=128, heads_q=2, batch=(2,), layout="bshd"),
    Case("bfloat16", 61, 97, dim=96, dim_v=80, heads_q=7, heads_kv=1, causal="top_left"),
    Case("float16", 130, 150, dim=192, dim_v=128, heads_q=4, heads_kv=2, causal=True),
    Case("float16", 140, 70, dim=136, dim_v=176, heads_q=2, batch=(2,), causal="top_left", layout="bshd"),
    Case("bfloat16", 70, 90, dim=256, window=(20, 20), softcap=10.0),
)


NARROW = [case for case in CASES if max(case.dim, case.dim_v) <= 128 and not case.softcap and case.scale != -0.25]


OFTEN = [*product(CASES[::8][:2], MODES), (CASES[16], MODES[1])]  # for the last one takes long to build


@pytest.mark.parametrize("case, mode", quick([*product(CASES, MODES)], *OFTEN, spread=True), ids=str)
def test_case(case, mode, schedule_as):
    schedule, deterministic = mode
    schedule_as(schedule)
    given = operands(case)
    judge(case, given, computed(planned(case, given, deterministic), given))


@both
@pytest.mark.parametrize("case", thinned(NARROW, keep=6), ids=str)
def test_case_by_the_tile_of_long_sequences(case, schedule, deterministic, schedule_as, staged):
    schedule_as(schedule)
    given = operands(case)
    plan = planned(case, given, deterministic, "bwd_hopper")
    assert plan.kernel.config.TMA_REDUCE_DQ and plan.kernel.config.TILE_Q == 80
    judge(case, given, computed(plan, given))


@both
@pytest.mark.parametrize("group", [2, 3])
def test_groups_of_heads_in_one_block(group, schedule, deterministic, schedule_as, unsplit):
    """So that gradients of keys are complete at once, and a block finishes more than one head."""
    schedule_as(schedule)
    case = Case("float16", 150, 200, heads_q=2 * group, heads_kv=2, causal=True)
    given = operands(case)
    plan = planned(case, given, deterministic)
    assert "dk_accum" not in plan.workspace.names
    judge(case, given, computed(plan, given))


FINISHED = [*product([False, True], [0, 1])]  # in order or not, and by how many blocks of their own


@pytest.mark.parametrize("deterministic, last_blocks", quick(FINISHED, (True, 0), (False, 1), spread=True))
@pytest.mark.parametrize("dim", thinned([64, 128, 256], keep=3))
def test_heads_in_groups(dim, last_blocks, deterministic, planning, request, monkeypatch):
    """Three groups: the last one has the sums of the first, which the second clears, and its dq is finished by others, or not.

    Wide heads have sums of their own, and in order those where the first block to add stores.
    """
    monkeypatch.setattr(backward_plan, "MOST_ROWS_STORED", 0 if last_blocks else 1024)
    if dim == 128:
        request.getfixturevalue("staged")
    planning("LAST_BLOCKS", last_blocks)
    planning("CLEARING_BLOCKS", 1)
    case = Case("float16", 210, 170, dim=dim, heads_q=9, batch=(2,), causal=True)
    given = operands(case)
    plan = planned(case, given, deterministic)
    queries, keys = (-(-length // tile) for length, tile in ((210, plan.kernel.config.TILE_Q), (170, plan.kernel.config.TILE_KV)))
    assert plan.launches[1].blocks == 18 * keys + last_blocks * 2 * 2  # two heads, and 192 rows to a block
    own = dim == 256 or plan.kernel.config.FIRST_STORES
    sums = 4 * (18 if own else 16) * queries * plan.kernel.config.TILE_Q * plan.kernel.config.WIDTH
    assert plan.kernel.config.FIRST_STORES is (deterministic and not last_blocks)
    assert dict(plan.workspace.parts)["dq_accum"] == sums
    judge(case, given, computed(plan, given))


@pytest.mark.release  # the last test has sums that are used again, and test_stored_dbias.py those of two heads of a group
@pytest.mark.parametrize("schedule, deterministic", quick(MODES, MODES[1], spread=True), ids=IN_MODES)
def test_groups_of_query_heads_that_use_sums_again(schedule, deterministic, schedule_as, unsplit, planning, monkeypatch):
    monkeypatch.setattr(backward_plan, "MOST_ROWS_STORED", 0)  # or else in order all heads have sums of their own
    schedule_as(schedule)
    planning("CLEARING_BLOCKS", 1)
    planning("LAST_BLOCKS", 1)
    case = Case("float16", 256, 290, heads_q=2, heads_kv=1, batch=(17,), causal=True)  # three blocks clear 16,384 numbers a head
    given = operands(case)
    plan = planned(case, given, deterministic)
    assert dict(plan.workspace.parts)["dq_accum"] == 4 * 2 * 8 * 2 * 2 * 128 * 64  # two groups of eight pairs of heads
    judge(case, given, computed(plan, given))


@st.composite
def problems(draw):
    """A case of any lengths, heads and mask."""
    end = st.none() | st.integers(0, 100)
    return Case(
        "float16",
        draw(st.integers(1, 200)),
        draw(st.integers(1, 300)),
        heads_q=draw(st.integers(1, 3)),
        heads_kv=1,
        causal=draw(st.sampled_from((False, True, "top_left"))),
        window=draw(st.none() | st.tuples(end, end)),
    )


@settings(max_examples=10)
@given(problems(), st.booleans())
def test_any_problem(case, deterministic):
    given = operands(case)
    judge(case, given, computed(planned(case, given, deterministic, "bwd_hopper"), given))


# Sums over batch axes

BROADCAST = {
    "queries": ((1, 2, 70, 64), (3, 2, 140, 64), (3, 2, 140, 64)),
    "keys": ((3, 2, 70, 64), (1, 2, 140, 64), (1, 2, 140, 64)),
    "keys, not values": ((3, 2, 70, 64), (1, 2, 140, 64), (3, 2, 140, 64)),
    "queries along one axis, keys along the other": ((2, 1, 2, 70, 64), (3, 1, 140, 64), (2, 1, 1, 140, 64)),
}
OTHER_BROADCASTS = [pytest.param(*of, marks=pytest.mark.release) for of in zip(BROADCAST, ("staged", "tile") * 2)]


@both
@pytest.mark.parametrize("what, tile", [*zip(BROADCAST, ("tile", "staged") * 2), *OTHER_BROADCASTS])
def test_broadcast_inputs_get_sums(what, tile, schedule, deterministic, schedule_as, request):
    schedule_as(schedule)
    if tile == "staged":
        request.getfixturevalue(tile)
    rng = numpy.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(numpy.float16) for shape in BROADCAST[what])
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dout, dlse = rng.standard_normal(out.shape).astype(numpy.float16), rng.standard_normal(lse.shape).astype(numpy.float32)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    given |= {name: numpy.full_like(x, numpy.nan) for name, x in zip(RESULTS, (q, k, v))}
    options = {"causal": True, "deterministic": deterministic}
    plan = plan_attention_backward(**given, **options, backend="host", arch="90a")
    assert plan.kernel.file == "bwd_hopper"
    assert plan.problem.sums_queries == ("dq_progress" not in plan.workspace.names) == what.startswith("queries")
    gradients = computed(plan, given)
    judged = compare_gradients(gradients, dout, q, k, v, dlse=dlse, scale=0.125, last_key=70)
    assert judged.ok, judged.message


# Memory around the arrays

PLACES = {
    "whole rows": numpy.s_[:, :, 1:-1, 8:72],
    "every second row": numpy.s_[:, :, ::2, :64],
    "every second head": numpy.s_[:, ::2, 3:-2, 16:80],
}


@pytest.mark.parametrize("place", PLACES)
def test_results_are_written_and_nothing_else(place, schedule_as):
    """Each element of a view into larger memory is overwritten; padding and gaps keep what they held."""
    schedule_as("deferred")
    memory = numpy.full((3, 2, 2, 143, 88), 77, "f2")
    results = dict(zip(RESULTS, (x[PLACES[place]] for x in memory)))
    batch, heads, rows, dim = results["dq"].shape
    case = Case("float16", rows, rows, dim, heads_q=heads, batch=(batch,), causal=True)
    given = operands(case) | results
    for x in results.values():
        x[...] = numpy.nan
    judge(case, given, computed(planned(case, given), given))
    for x in results.values():
        x[...] = 77
    assert (memory == 77).all()


VIEWS = {
    "one batch element for all": lambda x: numpy.broadcast_to(x[:1], x.shape),
    "one row for all": lambda x: numpy.broadcast_to(x[..., :1, :], x.shape),
    "every second row": lambda x: x.repeat(2, axis=-2)[..., ::2, :],
    "heads inside": lambda x: x.swapaxes(-3, -2).copy().swapaxes(-3, -2),
    "batch inside": lambda x: x.transpose(1, 2, 0, 3).copy().transpose(2, 0, 1, 3),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_in_place(view):
    """With the bits of their contiguous copies: on few cores, the blocks run one after the other."""
    case = Case("float16", 70, 140, heads_q=2, batch=(2,), causal=True)
    given = operands(case)
    given |= {name: VIEWS[view](given[name]) for name in ("dout", "q", "k", "v", "out")}
    given |= {name: given[name][..., None].repeat(3, axis=-1)[..., 1] for name in ("lse", "dlse")}
    copies = {name: x.copy(order="C") for name, x in given.items()}
    in_place = [x.copy() for x in computed(planned(case, given, deterministic=True), given)]
    for found, expected in zip(in_place, computed(planned(case, copies, deterministic=True), copies)):
        numpy.testing.assert_array_equal(found.view("u2"), expected.view("u2"))


def test_two_batch_axes_that_do_not_merge():
    rng = numpy.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((3, 5, 2, 70, 64)).astype(numpy.float16)[:, ::2] for _ in range(4))
    given = {"dout": dout, "q": q, "k": k, "v": v} | dict(zip(("out", "lse"), attention(q, k, v, return_lse=True)))
    plan = plan_attention_backward(**given, backend="host", arch="90a")
    assert plan.kernel.file == "bwd_hopper" and tuple(plan.problem.forward.batch) == (3, 3)
    judged = compare_gradients(plan(**given), dout, q, k, v, scale=0.125)
    assert judged.ok, judged.message


# Blocks that run together, and tools


@pytest.mark.parametrize("deterministic", quick([False, True], True), ids=IN_ORDER)
@pytest.mark.parametrize("tile", ["tile", "staged"])
def test_blocks_together(deterministic, tile, monkeypatch, unsplit, request):
    """Three at a time, each for two heads: whichever is the last one of a head finishes it. In order, bits stay the same."""
    if tile == "staged":
        request.getfixturevalue(tile)
    case = Case("float16", 150, 600, heads_q=4, heads_kv=2, causal=True)
    given = operands(case)
    plan = planned(case, given, deterministic)
    assert (tile == "staged") == plan.kernel.config.TMA_REDUCE_DQ
    results = []
    for blocks in (1, 3, 3):
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _, blocks=blocks: range(blocks * plan.kernel.config.WARPS))
        results.append([x.copy() for x in computed(plan, given)])
        judge(case, given, results[-1])
    for gradients in zip(*results):
        if deterministic or gradients[0] is not results[0][0]:  # the order in which dq is summed is free
            for again in gradients[1:]:
                numpy.testing.assert_array_equal(again.view("u2"), gradients[0].view("u2"))


@pytest.mark.parametrize("kernel", thinned(["bwd_hopper", "staged", "bwd_hopper_wide"], keep=3))
def test_the_last_heads_in_order_begin_with_the_first_keys(kernel, planning, monkeypatch, request):
    """Sums have the same bits by one block at a time and by three; those of the last group others than backwards."""
    if kernel == "staged":
        request.getfixturevalue(kernel)
    planning("HOPPER_BLOCKS_TOGETHER", 1)
    planning("MOST_ROWS_REUSED", 0)
    case = Case("float16", 260, 600, dim=136 if kernel == "bwd_hopper_wide" else 40, heads_q=4, causal=True)
    given = operands(case)
    group = 1 if kernel == "bwd_hopper_wide" else 2

    def sums(blocks):
        """Of all heads."""
        plan = planned(case, given, deterministic=True)
        assert plan.problem.forward.heads_q == 4 and plan.workspace.names[1] == "dq_accum"
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(blocks * plan.kernel.config.WARPS))
        workspace = numpy.full(plan.workspace_bytes, 255, numpy.uint8)
        judge(case, given, plan(**given, workspace=workspace))
        return workspace[slice(*plan.workspace.offsets[1:3])].reshape(4, -1)

    one_at_a_time, three = sums(1), sums(3)
    numpy.testing.assert_array_equal(three, one_at_a_time)
    planning("_backwards", lambda problem, heads, group: heads)
    differs = (sums(1) != one_at_a_time).any(1)
    assert differs.tolist() == [head >= 4 - group for head in range(4)]


@pytest.mark.release
@pytest.mark.parametrize(
    "kernel, case",
    [
        ("bwd_hopper", Case("float16", 70, 150, dim=40, heads_q=2, heads_kv=1, causal=True)),
        ("bwd_hopper_wide", Case("bfloat16", 70, 90, dim=136, softcap=5.0)),
    ],
    ids=str,
)
def test_address_sanitizer_finds_nothing(kernel, case, monkeypatch):
    """In order, which needs more memory. Each array has memory of exactly its size. For ThreadSanitizer see test_mutation.py."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "address")
    given = operands(case)
    plan = planned(case, given, deterministic=True)
    assert plan.kernel.file == kernel
    judge(case, given, computed(plan, given))


@pytest.mark.release
def test_address_sanitizer_finds_nothing_in_the_tile_of_long_sequences(staged, monkeypatch):
    """In order, where each warpgroup has a turn of its own."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "address")
    case = Case("float16", 90, 150, dim=40, heads_q=2, heads_kv=1, causal=True)
    given = operands(case)
    plan = planned(case, given, deterministic=True)
    assert plan.kernel.config.TMA_REDUCE_DQ
    judge(case, given, computed(plan, given))
