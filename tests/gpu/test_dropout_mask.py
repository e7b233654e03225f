"""dropout_mask on a device."""

import numpy
import pytest

from cupy_flash.api.dropout import dropout_mask

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("shape", [(2, 3, 70, 90), (1, 100), (3, 0, 7), (5000, 3000)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_mask_is_the_same_on_a_device(shape, dropout):
    mask = dropout_mask(shape, dropout, (2**64 - 5, 2**32 - 7), like=cupy.empty(0, "f2"))
    assert type(mask) is cupy.ndarray and mask.dtype == bool
    numpy.testing.assert_array_equal(mask.get(), dropout_mask(shape, dropout, (2**64 - 5, 2**32 - 7)))
