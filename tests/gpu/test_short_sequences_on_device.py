"""Gradients of short sequences of their own lengths by the kernels for sm_90a of a device."""

import pytest
from short_sequences import RIGHT, check

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="the choice among kernels is that of sm_90a"
)


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_right_with_poison_beyond_every_length(case):
    check(case, {}, cupy.asarray, cupy.asnumpy)
