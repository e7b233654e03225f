"""What only a device can show of a backward with tensor maps: a launch has its own arrays, and nothing around them is touched."""

import numpy
import pytest

from cupy_flash import attention, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.plan.grouping import make_grouping

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="needs the TMA of sm_90"
)

RESULTS = ("dq", "dk", "dv")


def operands(case, seed=0):
    """What a backward takes of a case, by name, with inputs as the case lays them out."""
    q, k, v = make_inputs(case, cupy, seed)
    dout, dlse = make_cotangents(case, cupy, seed)
    out, lse = attention(q, k, v, **case.options | {"return_lse": True})
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}


def planned(case, given, deterministic=True, **options):
    """A plan that has to be of a kernel with maps, by default in a fixed order."""
    options |= {name: value for name, value in case.options.items() if name != "return_lse"}
    plan = plan_attention_backward(**given, **options, deterministic=deterministic)
    assert plan.kernel.file.startswith("bwd_hopper")
    return plan


def judge(case, given, gradients):
    judged = compare_gradients(gradients, **{name: given[name] for name in ("dout", "q", "k", "v", "dlse")}, **case.scores)
    assert judged.ok, judged.message


def same(one, other):
    return all(bool((x.view(numpy.uint8) == y.view(numpy.uint8)).all()) for x, y in zip(one, other))


@pytest.mark.parametrize("dim", [64, 256])
def test_each_launch_reads_and_writes_its_own_arrays(dim):
    """One plan on several sets of arrays, some of them shared, without a wait between launches."""
    case = Case("float16", 200, 300, dim=dim, heads_q=4, heads_kv=2, batch=(2,), causal=True)
    sets = [{name: cupy.ascontiguousarray(x) for name, x in operands(case, seed).items()} for seed in range(3)]
    plan = planned(case, sets[0])
    order = [0, 1, 2, 1, 0, 2, 2, 0]
    results = [plan(**sets[i]) for i in order]
    for i, gradients in zip(order, results):
        judge(case, sets[i], gradients)
        assert same(gradients, results[order.index(i)])
    mixed = sets[0] | {"dout": sets[1]["dout"], "dlse": sets[2]["dlse"]}
    judge(case, mixed, plan(**mixed))


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize(
    "case",
    [
        Case("bfloat16", 150, 200, heads_q=40, batch=(8,), causal=True),
        Case("bfloat16", 1600, 1600, dim=128, heads_q=12, batch=(8,)),
        Case("bfloat16", 2100, 2100, dim=128, heads_q=20),
        Case("bfloat16", 150, 200, dim=256, heads_q=80, heads_kv=20, batch=(8,)),
    ],
    ids=str,
)
def test_first_heads_are_finished_by_their_last_blocks_and_last_heads_by_others(case, deterministic):
    given = operands(case)
    plan = planned(case, given, deterministic=deterministic)
    assert (case.dim == 128) == plan.kernel.config.TMA_REDUCE_DQ
    grouping = make_grouping(plan.kernel, plan.problem)
    assert 0 < grouping.last_heads < given["q"].size // (case.len_q * case.dim)
    own = case.dim > 128 or case.len_q > 2048 or plan.kernel.config.FIRST_STORES
    assert (grouping.reused > 0) == (not own)
    judge(case, given, plan(**given))


@pytest.mark.parametrize("dim, dim_v", [(8, 8), (40, 72), (104, 128), (136, 64), (200, 256)])
def test_what_lies_around_the_arrays_is_neither_read_nor_written(dim, dim_v):
    """Behind the rows and columns of inputs comes NaN, around those of results what they held."""
    case = Case("bfloat16", 130, 190, dim=dim, dim_v=dim_v, heads_q=4, heads_kv=2, batch=(2,), causal=True, layout="sliced")
    given = operands(case)
    shapes = {name: given[name[1:]].shape for name in RESULTS}
    memory = {name: cupy.full((*shape[:2], shape[2] + 70, shape[3] + 16), 77, given["q"].dtype) for name, shape in shapes.items()}
    results = {name: x[..., 1:-69, 8:-8] for name, x in memory.items()}
    judge(case, given, planned(case, given, **results)(**given, **results))
    for name, x in results.items():
        x[...] = 77
        assert bool((memory[name].astype("f") == 77).all()), name


def test_rows_that_end_within_16_bytes_are_not_written_beyond_their_end():
    """TMA would: it writes whole chunks. It reads them, here of rows of 128 bytes of which 120 are given."""
    case = Case("bfloat16", 130, 190, dim=60, heads_q=2)
    given = operands(case)
    memory = {name: cupy.full((*x.shape[:3], 64), 77, x.dtype) for name, x in given.items() if x.ndim == 4}
    memory |= {name: memory[name[1:]].copy() for name in RESULTS}
    for name in set(memory) - set(RESULTS):
        memory[name][..., :60] = given[name]
        given[name] = memory[name][..., :60]
    results = {name: memory[name][..., :60] for name in RESULTS}
    plan = plan_attention_backward(**given, **results)
    assert plan.kernel.file == "bwd_v2" and "rows of dq have 120 bytes" in str(plan)
    judge(case, given, plan(**given, **results))
    for name, x in memory.items():
        assert bool((x[..., 60:].astype("f") == 77).all()), name


VIEWS = {
    "one batch element for all": lambda x: cupy.broadcast_to(x[:1], x.shape),
    "one row for all": lambda x: cupy.broadcast_to(x[:, :, :1], x.shape),
    "every second row": lambda x: x.repeat(2, axis=2)[:, :, ::2],
    "heads inside": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "batch inside": lambda x: x.transpose(1, 2, 0, 3).copy().transpose(2, 0, 1, 3),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("moved", ["dout", "q", "k", "v", "out"])
def test_views_are_read_in_place(moved, view):
    """With the bits of a contiguous copy."""
    case = Case("float16", 150, 150, heads_q=4, batch=(3,), causal=True)
    given = {name: cupy.ascontiguousarray(x) for name, x in operands(case).items()}
    given |= {name: cupy.empty_like(given["q"]) for name in RESULTS}
    given[moved] = VIEWS[view](given[moved])
    copies = {name: cupy.ascontiguousarray(x) for name, x in given.items()}
    found, expected = planned(case, given)(**given), planned(case, copies)(**copies)
    assert same(map(cupy.ascontiguousarray, found), map(cupy.ascontiguousarray, expected))


def test_two_batch_axes_that_do_not_merge():
    case = Case("float16", 70, 90, heads_q=2, batch=(2, 3))
    given = operands(case)
    given |= {name: cupy.broadcast_to(given[name][:, :1], given[name].shape) for name in ("k", "v")}
    given |= dict(zip(("out", "lse"), attention(given["q"], given["k"], given["v"], return_lse=True)))
    results = {name: cupy.empty((2, 3, 2, rows, 64), numpy.float16) for name, rows in zip(RESULTS, (70, 90, 90))}
    judge(case, given, planned(case, given, **results)(**given, **results))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dim, heads_kv, len_q, len_kv",
    [(64, 32, 600, 520), (64, 8, 520, 1000), (64, 32, 2200, 2300), (128, 32, 600, 520), (96, 8, 520, 1000)],
)
def test_statistics_that_earlier_heads_make(dim, heads_kv, len_q, len_kv, causal):
    """Those of the last heads, again and again in memory that holds anything: dk and dv have the same bits each time."""
    case = Case("bfloat16", len_q, len_kv, dim=dim, heads_q=32, heads_kv=heads_kv, batch=(5,), causal=causal)
    given = operands(case)
    plan = planned(case, given, deterministic=False)
    made = make_grouping(plan.kernel, plan.problem)
    assert plan.kernel.config.STATS_AHEAD and made.heads_ahead < 160 and (made.reused > 0) == (len_q == 600)
    memory = cupy.full(plan.workspace_bytes, 0x7F, numpy.uint8)
    first = plan(**given, workspace=memory)
    judge(case, given, first)
    for _ in range(20):
        memory[:] = 0x7F
        assert same(first[1:3], plan(**given, workspace=memory)[1:3])
