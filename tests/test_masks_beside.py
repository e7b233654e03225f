"""What a mask leaves, and dropout, beside what scores become, in the kernels for sm_90a, on the host."""

import math

import pytest
from masks_beside import CASES, QUICK, inputs, is_hopper, problem
from score_kernels import judged
from thinned import quick, thinned

from cupy_flash.machine import host

pytestmark = pytest.mark.usefixtures("poisoned_results")
WHERE = {"backend": "host", "arch": "90a"}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


@pytest.mark.parametrize("case", quick(CASES, *QUICK), ids=str)
def test_bits_of_a_mask_beside_scores(case, schedule, share_of_bits):
    (dim, dtype), _, term, mask, dropout = case
    share_of_bits(math.inf)
    options, hand, wrt = problem(case)
    kernels = judged(dtype, options, hand, WHERE, wrt=wrt, inputs_given=inputs(dim, dtype))
    assert kernels[1].config.STORE_DBIAS is (term == "bias of pairs" and dim <= 192)  # beyond, its shared memory is full
    for kernel in kernels:
        assert is_hopper(kernel)
        assert kernel.config.PAIR_BITS is (mask != "none") and kernel.config.DROPOUT is dropout
        assert not kernel.expressions.takes_part
