"""A term of the key alone beside a bias, by the kernels for sm_90a of a device."""

from itertools import product

import pytest
from terms_beside_bias import BIASES, HEADS, MASKS, SHAPES, TERMS, bias_of, check, check_shared_bias

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="such terms are for sm_90a"
)

KEYS = 200  # off every tile edge, and a number whose rows TMA finds
CASES = [case for i, case in enumerate(product(SHAPES, MASKS, BIASES, TERMS)) if i % 3 == 0]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_both_directions(case):
    check(*case[:3], TERMS[case[3]][:, :KEYS], {}, cupy.asarray, cupy.asnumpy, len_kv=KEYS)


@pytest.mark.few_tiles
@pytest.mark.parametrize("case", CASES[::3], ids=", ".join)
def test_one_group_of_rows(case):
    check(*case[:3], TERMS[case[3]][:, :KEYS], {}, cupy.asarray, cupy.asnumpy, len_kv=KEYS)


@pytest.mark.parametrize("shape, wide", list(product(SHAPES, (False, True))))
def test_the_gradient_of_a_bias_that_batch_elements_share(shape, wide):
    bias = bias_of((1, HEADS), "float32" if wide else SHAPES[shape][0], len_kv=KEYS)
    blocks = 2 if SHAPES[shape][1] <= 128 and not wide else 1  # of a cluster that sums it up
    check_shared_bias(shape, bias, TERMS["padded"][:, :KEYS], {}, cupy.asarray, cupy.asnumpy, blocks)
