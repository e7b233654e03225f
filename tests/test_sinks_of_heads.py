"""Sinks in blocks of fwd_hopper that take tiles of several heads: of the one that ends, when the next one has begun."""

from itertools import product

import numpy
import pytest
from thinned import quick

from cupy_flash import attention, plan_attention

CASES = list(product((1, 2, 0), ((True, 2), (False, 3))))


@pytest.mark.parametrize("numbers, kind", quick(CASES, (2, (False, 3)), spread=True))
@pytest.mark.parametrize("schedule", ["eager", pytest.param("deferred", marks=pytest.mark.release)])
def test_each_head_has_its_own(schedule, kind, numbers, monkeypatch):
    causal, groups = kind
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    rng = numpy.random.default_rng(0)
    len_q = 250 if causal else 1100  # more than 256 have three groups
    q, k, v = (rng.standard_normal((3, length, 72)).astype(numpy.float16) for length in (len_q, 150, 150))
    sinks = rng.uniform(-3, 6, (numbers, 3)).astype(numpy.float32)
    plan = plan_attention(q, k, v, sinks=sinks, causal=causal, backend="host", arch="90a", return_lse=True)
    assert (plan.kernel.file, plan.kernel.config.WARPS // 4 - 1) == ("fwd_hopper", groups)
    assert plan.kernel.config.SEVERAL_SINKS is (numbers != 1)
    (out, lse), expected = (
        plan(q, k, v, sinks=sinks),
        attention(*(x.astype(numpy.float32) for x in (q, k, v)), sinks=sinks, causal=causal, return_lse=True),
    )
    numpy.testing.assert_allclose(out, expected[0], atol=2**-9 * abs(expected[0]).max())  # weights are rounded to float16
    numpy.testing.assert_allclose(lse, expected[1], atol=2**-12)
