"""What fwd_hopper does that the shared cases do not reach: maxima that rise late or from far below zero, and two batch axes."""

import math

import numpy
import pytest

from cupy_flash import host, plan_attention
from cupy_flash.arrays import DTYPES
from cupy_flash.compare import compare


def judged(q, k, v, **options):
    plan = plan_attention(q, k, v, backend="host", arch="90a", return_lse=True, **options)
    assert plan.kernel.kernel == "fwd_hopper"
    p = plan.problem
    comparison = compare(*plan(q, k, v), q, k, v, scale=p.scale, first_key=p.first_key, last_key=p.last_key)
    assert comparison.ok, comparison.message
    return plan


@pytest.mark.parametrize("later", [-1.0, -60.0, 60.0])
def test_scores_that_rise_from_far_below_zero(later):
    """The first tile of keys has scores near -1000, later ones much larger scores, which may be negative as well."""
    rng = numpy.random.default_rng(0)
    q = numpy.ones((1, 20, 64), numpy.float16)
    k = numpy.full((1, 200, 64), later / 8, numpy.float16)
    k[:, :64] = -1000 / 8
    k += rng.uniform(-0.01, 0.01, k.shape).astype(numpy.float16)
    judged(q, k, rng.standard_normal((1, 200, 64)).astype(numpy.float16))


# In powers of two; the first tile has scores up to 1. P is too large from about 16 on, infinite in float16 from 17 on.
@pytest.mark.parametrize("rise", [7.0, 15.0, 16.5, 17.5, 100.0, 130.0, 1000.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_maximum_that_rises_late_in_few_rows(rise, dtype):
    """Two rows of two warps meet a score far above all others in the last tile but one, one of them another in the last."""
    rng = numpy.random.default_rng(2)
    q, k, v = (rng.uniform(-1, 1, (1, 700, 64)).astype(numpy.float32) for _ in range(3))
    q[..., -2:] = k[..., -2:] = 0
    q[0, 5, -1] = q[0, 21, -2] = 8
    k[0, 630, -2:] = rise
    k[0, 699, -1] = rise + 20
    plan = judged(*(x.astype(DTYPES[dtype]) for x in (q, k, v)), scale=math.log(2) / 8)
    assert plan.kernel.config.TILE_KV in (64, 128)  # 630 and 699 are in two tiles


@pytest.mark.parametrize("window", [1, 40, 200])
def test_rows_that_see_nothing_of_the_first_tile(window):
    """With a window, the last rows of a block see keys only from a later tile on; their scores are negative there."""
    rng = numpy.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 700, 64)).astype(numpy.float16) for _ in range(3))
    q[..., 0], k[..., 0] = 20, -20
    judged(q, k, v, window=(window, 0))


def test_a_warp_that_looks_for_the_maximum_when_another_one_has_to():
    """Rows 288 to 291 see four keys and fewer of one tile, their neighbours none, and in the next tile row 256 meets a leap."""
    rng = numpy.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 512, 64)).astype(numpy.float16) for _ in range(3))
    q[..., 0] = k[..., 0] = 0
    q[0, 256, 0], k[0, 200, 0] = 30, 30
    plan = judged(q, k, v, window=(100, 0))
    assert (plan.kernel.config.TILE_Q, plan.kernel.config.TILE_KV) == (256, 64)


def test_blocks_take_causal_tiles_by_formula_and_by_table():
    rng = numpy.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, 4, 600, 64)).astype(numpy.float16) for _ in range(3))
    plan = judged(q, k, v, causal=True)
    tiles = -(-600 // plan.kernel.config.TILE_Q) * 4 * 2
    assert tiles > 2 * 2 * host.MULTIPROCESSORS * plan.kernel.config.MIN_BLOCKS


def test_two_batch_axes_that_do_not_merge():
    rng = numpy.random.default_rng(1)
    q, k, v = (rng.standard_normal((3, 5, 1, 40, 64)).astype(numpy.float16)[:, ::2] for _ in range(3))
    judged(q, k, v)
