"""How many query heads of a group a block of a Hopper backward sums over, and which heads' rows all multiprocessors share."""

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash import plan_attention_backward
from cupy_flash.plan.grouping import LAST_BLOCKS, MOST_APART, RUNNING, heads_per_block, key_tiles, make_grouping
from cupy_flash.plan.makespan import makespan

LENGTHS = st.lists(st.floats(0, 9, allow_subnormal=False), max_size=40)


@given(LENGTHS, st.integers(1, 9))
def test_makespan_is_that_of_blocks_one_after_the_other(lengths, running):
    """Told by what each moment brings: whoever is free takes the next one."""
    left, at_work, now = list(lengths), [], 0.0
    while left or at_work:
        while left and len(at_work) < running:
            at_work.append(now + left.pop(0))
        now = min(at_work)
        at_work.remove(now)
    assert makespan(lengths, running) == max([now], default=0.0)


@given(LENGTHS, st.integers(1, 9))
def test_makespan_is_between_what_must_be_and_twice_that(lengths, running):
    """Graham's bound (1966): no order takes longer than the sum dealt out evenly and the longest block behind it."""
    even, longest = sum(lengths) / running, max(lengths, default=0.0)
    assert max(even, longest) * (1 - 1e-9) <= makespan(lengths, running) <= (even + longest) * (1 + 1e-9)


def planned(batch, heads, group, rows, dim, dim_v=None, packed=False, **options):
    """Gradients of so many query heads in groups, of arrays that nobody touches."""

    def array(heads, columns, dtype=ml_dtypes.bfloat16):
        shape = (heads, batch * rows) if packed else (batch, heads, rows)
        return numpy.empty((*shape, columns)[: len(shape) + bool(columns)], dtype)

    if packed:
        ends = numpy.arange(batch + 1, dtype=numpy.int32) * rows
        options |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    q, k, v = array(heads, dim), array(heads // group, dim), array(heads // group, dim_v or dim)
    out, lse = array(heads, dim_v or dim), array(heads, 0, numpy.float32)
    return plan_attention_backward(out, q, k, v, out, lse, backend="host", arch="90a", **options)


def heads_of(*problem, **options):
    made = planned(*problem, **options)
    return heads_per_block(made.kernel, made.problem)


@pytest.mark.parametrize(
    "problem, options, expected",
    [
        ((4, 16, 4, 4096, 128), {}, 4),  # all blocks as long: whole groups
        ((16, 16, 8, 1024, 128), {}, 8),  # 256 blocks, in two rounds
        ((1, 16, 8, 1024, 128), {}, 1),  # 16 blocks: the more, the sooner they end
        ((16, 16, 8, 4096, 128), {"causal": True}, MOST_APART),
        ((64, 16, 8, 1024, 128), {"causal": True}, 8),  # of few key tiles, blocks are not far apart
        ((16, 32, 8, 4096, 64), {"causal": True}, 8),  # narrow heads fit the cache
        ((4, 12, 4, 4096, 192, 128), {"causal": True}, 2),  # the last of 12 blocks of each key tile would begin late
        ((4, 16, 4, 4096, 128), {"causal": True, "deterministic": True}, 1),
        ((4, 8, 4, 1024, 256), {"causal": True, "deterministic": True}, 1),
        ((16, 32, 8, 4096, 64), {"causal": True, "deterministic": True}, MOST_APART),
        ((4, 16, 4, 4096, 128), {"deterministic": True}, 4),
        ((1, 16, 4, 16384, 128), {"window": (1023, 0)}, 4),
    ],
    ids=str,
)
def test_heads_of_a_block(problem, options, expected):
    assert heads_of(*problem, **options) == expected


@pytest.mark.parametrize(
    "group, dim, options, expected",
    [
        (8, 128, {}, 8),
        (8, 128, {"causal": True}, MOST_APART),
        (8, 128, {"window": (500, 0)}, MOST_APART),
        (6, 128, {"causal": True}, 3),
        (8, 64, {"causal": True}, 8),
        (8, 64, {"causal": True, "deterministic": True}, MOST_APART),
        (8, 128, {"causal": True, "deterministic": True}, 1),
    ],
    ids=str,
)
def test_of_sequences_no_other_decides(group, dim, options, expected):
    """However many there are in a batch, and however long the others are."""
    for batch, rows in ((1, 100), (3, 1000), (16, 4096)):
        assert heads_of(batch, 2 * group, group, rows, dim, packed=True, **options) == expected


def last_of(*problem, **options):
    """Query heads whose rows all multiprocessors share, of how many."""
    made = planned(*problem, **options)
    heads = made.problem.forward.heads_q * problem[0]
    return heads - make_grouping(made.kernel, made.problem).last_heads, heads


def test_rows_of_long_heads_under_a_window_are_shared():
    """Blocks of a window have few queries, so that they would end long before the block that makes all rows of a head."""
    assert last_of(1, 16, 4, 16384, 128, window=(1023, 0)) == (16, 16)
    assert last_of(1, 16, 4, 16384, 128, mask="kv_idx <= q_idx and kv_idx > q_idx - 1024") == (16, 16)
    shares = [shared * rows for rows in (1024, 4096, 16384) for shared, _ in [last_of(1, 64, 1, rows, 128, window=(255, 0))]]
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_otherwise_those_of_the_last_blocks_are(options):
    made = planned(4, 16, 1, 4096, 128, **options)
    of_head = key_tiles(made.kernel, made.problem)
    shared, heads = last_of(4, 16, 1, 4096, 128, **options)
    assert RUNNING < LAST_BLOCKS <= shared * of_head and shared < heads
