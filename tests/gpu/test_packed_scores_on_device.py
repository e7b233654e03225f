"""Scores of heads that share a tile of fwd_hopper, on a device."""

from itertools import product

import numpy
import pytest
from hand_scores import SCORES
from packed_rows import CASES, KINDS, expression, judged

from cupy_flash import attention

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="fwd_hopper is for sm_90a"
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_terms_and_biases(kind, case):
    judged(case, *KINDS[kind](case), {}, cupy.asarray, cupy.asnumpy)


@pytest.mark.parametrize("example, case", list(product(SCORES, CASES))[::5], ids=lambda x: getattr(x, "name", str(x)))
def test_expressions(example, case):
    judged(case, *expression(example, case), {}, cupy.asarray, cupy.asnumpy)


def test_a_head_alone():
    """By a kernel that knows of one head: what it gives among those that share its tile, but for roundings."""
    rng = numpy.random.default_rng(5)
    q, k, v = (cupy.asarray(rng.standard_normal((heads, rows, 128)).astype("f2")) for heads, rows in ((4, 9), (1, 700), (1, 700)))
    slopes = cupy.asarray(numpy.float32([0.1, 0.02, 0.3, 0.05]))
    together = attention(q, k, v, alibi_slopes=slopes, causal=True)
    for head in range(4):
        alone = attention(q[head : head + 1], k, v, alibi_slopes=slopes[head : head + 1], causal=True)
        assert float(abs(together[head] - alone[0]).max()) <= 2**-9
