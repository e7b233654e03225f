"""Scores of heads that share a tile of fwd_hopper, on a device."""

from itertools import product

import pytest
from hand_scores import SCORES
from packed_rows import CASES, KINDS, expression, judged

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
