"""In order, the first block to add to a query tile stores: where that is so, and that nothing has to be zero before."""

import numpy
import pytest
from later_heads import HOST, backward_of, judged, plan_of
from thinned import quick

from cupy_flash import attention, plan_attention_backward
from cupy_flash.call import backward
from cupy_flash.plan import backward as backward_plan
from cupy_flash.plan.grouping import make_grouping


@pytest.mark.parametrize(
    "seq, dim, options, stores",
    [
        (1024, 64, {}, True),
        (1025, 64, {}, False),
        (2048, 64, {"causal": True}, True),
        (2049, 128, {"causal": True}, False),
        (1500, 256, {"window": (400, 0)}, False),
        (1024, 256, {}, True),
        (1024, 64, {"mask": "kv_idx % 3 > 0"}, False),  # a list says who comes first, and of which tiles there is none
    ],
)
def test_where(seq, dim, options, stores):
    made = plan_of(300, seq, seq, dim, deterministic=True, **options)
    assert made.kernel.config.FIRST_STORES is stores and not (stores and make_grouping(made.kernel, made.problem).reused)
    assert ("the first block stores what others add to" in str(made)) is stores
    assert not plan_of(300, seq, seq, dim, **options).kernel.config.FIRST_STORES


@pytest.mark.parametrize(
    "keys, dim, options, stores",
    [
        (77, 64, {}, False),  # a block takes all keys of a head, and has no sums
        (129, 128, {}, False),
        (64, 256, {}, True),
        (77, 256, {}, False),
        (77, 64, {"softcap": 5.0}, False),
        (77, 64, {"bias": numpy.zeros((300, 1, 77), numpy.float16)}, False),
    ],
    ids=str,
)
def test_one_tile_of_keys_is_in_order(keys, dim, options, stores):
    """Of wide heads, whatever was asked for: nobody adds to what its block stores."""
    made = plan_of(300, 3000, keys, dim, **options)
    assert not made.problem.deterministic and made.kernel.config.FIRST_STORES is stores
    assert ("dq_semaphore" in made.workspace.names) is stores


@pytest.mark.parametrize("rows, stores", [(1024, True), (1025, False)])
def test_where_of_sequences(rows, stores):
    """By the rows that there are for one, on average."""
    offsets = numpy.linspace(0, 5 * rows, 6).astype(numpy.int32)
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), offsets)
    made = plan_of(300, 5 * rows, 5 * rows, deterministic=True, causal=True, **given)
    assert made.kernel.config.FIRST_STORES is stores


SHAPES = [
    ((4, 300, 64), (2, 300, 64)),
    ((1, 1700, 128), (1, 150, 128)),
    ((2, 200, 248), (1, 330, 248)),
    ((3, 330, 64), (3, 190, 64)),
]
MASKS = [{"causal": True}, {"window": (50, 10)}, {}, {"causal": True, "prefix": 40}]
CASES = [(*shape, mask) for shape in SHAPES for mask in MASKS]
OFTEN = [(*SHAPES[3], MASKS[0], "eager")]  # queries that see nothing
OFTEN += [(*SHAPES[1], MASKS[2], "deferred"), (*SHAPES[2], MASKS[1], "eager")]


@pytest.mark.parametrize(
    "shape, shape_kv, options, schedule",
    quick([(*case, schedule) for case in CASES for schedule in ("eager", "deferred")], *OFTEN, spread=True),
)
def test_gradients(shape, shape_kv, options, schedule, monkeypatch):
    """In memory that holds anything, and with the bits of sums that are zero before: nothing is added to the first."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    found = []
    for rows in (4096, 0):
        monkeypatch.setattr(backward_plan, "MOST_ROWS_STORED", rows)
        backward._prepared.cache_clear()
        plan, formula, given, named = backward_of(shape, shape_kv, deterministic=True, **options)
        assert plan.kernel.file.startswith("bwd_hopper") and plan.kernel.config.FIRST_STORES is (rows > 0)
        judged(plan, formula, given, named)
        found.append(plan(*given, **named))
    for one, other in zip(*found):
        numpy.testing.assert_array_equal(one, other)


@pytest.mark.release
@pytest.mark.parametrize("schedule", ["eager", "deferred"])
def test_gradients_of_one_tile_of_keys(schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    plan, formula, given, named = backward_of((3, 300, 256), (3, 50, 256), **MASKS[1])
    assert plan.kernel.config.FIRST_STORES
    judged(plan, formula, given, named)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dim", quick([64, 256], 64))  # test_hopper_gradients_of_lengths.py has sequences of wide heads
def test_rows_that_are_no_queries(dim, packed):
    """Of sequences with fewer queries than rows, and with queries that see no key: 0, whatever lies in memory."""
    rng, heads, rooms, used, keys = numpy.random.default_rng(0), 3, (300, 290, 40), (100, 290, 0), (60, 130, 30)
    shape = (heads, sum(rooms), dim) if packed else (len(rooms), heads, max(rooms), dim)
    q, k, v, dout = (rng.standard_normal(shape, numpy.float32).astype("f2") for _ in range(4))
    offsets = numpy.cumsum((0, *rooms)).astype(numpy.int32)
    given = {"seqlens_q": numpy.array(used, numpy.int32), "seqlens_kv": numpy.array(keys, numpy.int32)}
    given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), offsets) if packed else {}
    arrays = dout, q, k, v, *attention(q, k, v, causal=True, return_lse=True, backend="numpy", **given)
    plan, formula = (
        plan_attention_backward(*arrays, causal=True, deterministic=True, **where, **given)
        for where in (HOST, {"backend": "numpy"})
    )
    assert plan.kernel.config.FIRST_STORES
    judged(plan, formula, arrays, given)


@pytest.mark.parametrize("dim, rows", quick([(64, 300), (128, 1700), (256, 140)], (64, 300), (256, 140), spread=True))
def test_zeros_are_neither_written_nor_read(dim, rows, monkeypatch):
    x, lse = numpy.zeros((2, rows, dim), "f2"), numpy.zeros((2, rows), "f4")
    moved = []
    for most in (4096, 0):
        monkeypatch.setattr(backward_plan, "MOST_ROWS_STORED", most)
        monkeypatch.setattr(backward_plan, "MOST_ROWS_AHEAD", 0)
        backward._prepared.cache_clear()
        plan = plan_attention_backward(x, x, x, x, x, lse, deterministic=True, **HOST)
        assert plan.kernel.config.FIRST_STORES is (most > 0) and plan.kernel.config.TMA_REDUCE_DQ is (rows == 1700)
        moved.append(plan.counted(x, x, x, x, x, lse)[1])
    sums = dict(plan.workspace.parts)["dq_accum"]
    assert moved[1].written_bytes - moved[0].written_bytes == sums == moved[1].read_bytes - moved[0].read_bytes
