"""Gradients under windows by Hopper kernels: how few queries see a key decides as the length of a sequence does elsewhere."""

import numpy
import pytest

from cupy_flash import plan_attention_backward
from cupy_flash.plan.backward import MOST_ROWS_AHEAD, MOST_SEEING
from cupy_flash.plan.grouping import LENGTH_OF_MANY, queries_seeing

HOST = {"backend": "host", "arch": "90a"}
FEW = 1536  # queries, up to which heads of 65 to 128 columns have tiles of 64


def plan_of(length, dim, batch=(2,), **options):
    q = numpy.empty((*batch, 16, length, dim), numpy.float16)
    return plan_attention_backward(q, q, q, q, q, numpy.empty(q.shape[:-1], numpy.float32), **HOST, **options)


def counted(length, left, right):
    """Queries that see a key, counted one by one and on average."""
    keys = numpy.arange(length)
    return (numpy.minimum(keys + left, length - 1) - numpy.maximum(keys - right, 0) + 1).mean()


@pytest.mark.parametrize("length, window", [(1000, (99, 0)), (1000, (0, 250)), (777, (300, 200)), (64, (63, 0))])
def test_queries_that_see_a_key_are_counted(length, window):
    problem = plan_of(length, 64, window=window).problem.forward
    assert queries_seeing(problem) == numpy.ceil(counted(length, *window))


@pytest.mark.parametrize("dim", [72, 128])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("length", [4096, 16384])
def test_few_of_them_have_the_tile_of_short_sequences(length, deterministic, dim):
    most = max(left for left in range(FEW, length - 1) if (left + 1) * (2 * length - left) <= 2 * length * FEW)
    assert counted(length, most, 0) <= FEW < counted(length, most + 1, 0)
    for left, tile in ((most, 64), (most + 1, 80)):
        c = plan_of(length, dim, window=(left, 0), deterministic=deterministic).kernel.config
        assert tile == c.TILE_Q and c.TMA_REDUCE_DQ is (tile == 80)


def test_narrow_heads_have_one_tile_anyway():
    for left in (300, 5000):
        assert plan_of(8192, 64, window=(left, 0)).kernel.config.TILE_Q == 128


@pytest.mark.parametrize("window, tile", [((FEW - 1, 0), 64), ((FEW, 0), 80), ((700, FEW - 701), 64), ((700, FEW - 700), 80)])
def test_of_sequences_their_own_lengths_decide_nothing(window, tile):
    """As bits follow from it, the window alone does, in a batch of any length."""
    for length in (2000, 30_000):
        ends = numpy.array([0, 300, length], numpy.int32)
        made = plan_of(length, 128, (), window=window, cu_seqlens_q=ends, cu_seqlens_kv=ends)
        assert tile == made.kernel.config.TILE_Q and queries_seeing(made.problem.forward) == sum(window) + 1
    ends = numpy.array([0, 30_000], numpy.int32)
    wide = plan_of(30_000, 128, (), window=(9000, 0), cu_seqlens_q=ends, cu_seqlens_kv=ends)
    assert queries_seeing(wide.problem.forward) == LENGTH_OF_MANY


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_zeros_are_made_ahead_where_few_queries_see_a_key(dim):
    length = 4 * MOST_ROWS_AHEAD
    few, many = MOST_SEEING, 2 * MOST_SEEING
    assert counted(length, few, 0) <= MOST_SEEING < counted(length, many, 0)
    assert plan_of(length, dim, window=(few, 0)).kernel.config.ZEROS_AHEAD
    assert not plan_of(length, dim, window=(many, 0)).kernel.config.ZEROS_AHEAD
    assert not plan_of(length, dim, causal=True).kernel.config.ZEROS_AHEAD


def test_no_other_kernel_asks():
    """bwd_v2 has tiles for long sums in order, however few queries see a key."""
    tiles = {plan_of(4096, 64, window=w, deterministic=True, kernel="bwd_v2").kernel.config.TILE_Q for w in ((10, 0), None)}
    assert tiles == {128}
