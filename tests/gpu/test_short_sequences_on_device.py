"""Gradients of short sequences of their own lengths by the kernels for sm_90a of a device."""

import pytest
from short_sequences import RIGHT, check

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_right_with_poison_beyond_every_length(case):
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("kernels for sm_90a")
    check(case, {}, cupy.asarray, cupy.asnumpy)
