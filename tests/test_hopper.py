"""What fwd_hopper does that the shared cases do not reach: a maximum far below zero, and two batch axes."""

import numpy
import pytest

from cupy_flash import plan_attention
from cupy_flash.compare import compare


def judged(q, k, v):
    plan = plan_attention(q, k, v, backend="host", arch="90a", return_lse=True)
    assert plan.kernel.kernel == "fwd_hopper"
    comparison = compare(*plan(q, k, v), q, k, v, scale=plan.problem.scale)
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


def test_two_batch_axes_that_do_not_merge():
    rng = numpy.random.default_rng(1)
    q, k, v = (rng.standard_normal((3, 5, 1, 40, 64)).astype(numpy.float16)[:, ::2] for _ in range(3))
    judged(q, k, v)
