"""Dropout beside a bias that comes by TMA, or of what bits of a mask leave, in the kernels for sm_90a, on the host."""

import math

import pytest
from dropout_beside import (
    OF_BIAS,
    OF_MASK,
    QUICK_BIAS,
    QUICK_MASK,
    WITH_BIAS,
    WITH_BIAS_CAUSAL,
    WITH_MASK,
    inputs,
    kernels_of,
    with_bias,
    with_mask,
)
from score_kernels import judged
from thinned import quick, thinned

from cupy_flash.machine import host

pytestmark = pytest.mark.usefixtures("poisoned_results")
WHERE = {"backend": "host", "arch": "90a"}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


@pytest.mark.release  # the quick case of test_sequences_with_bias.py has both
@pytest.mark.parametrize("case", quick(OF_BIAS, *QUICK_BIAS), ids=str)
def test_a_bias(case, schedule):
    (dim, dtype), ends, shape = case
    options, hand = with_bias(case)
    forward, backward = judged(dtype, options, hand, WHERE, wrt="bias", inputs_given=inputs(dim, dtype))
    summed = shape == "of heads" and dim <= 128  # by blocks of a cluster, in steps of 64 queries
    *tiles, queries, keys = (WITH_BIAS_CAUSAL if ends == "causal" else WITH_BIAS)[dim]
    assert kernels_of(forward, backward) == (*tiles, 64 if summed else queries, keys)
    assert forward.config.STAGED_BIAS and forward.config.DROPOUT and backward.config.DROPOUT
    staged = dim <= 192  # beyond, shared memory of the backward is full
    assert backward.config.STAGED_BIAS is staged and backward.config.STORE_DBIAS is (staged and (summed or shape == "of pairs"))


@pytest.mark.release  # test_masks_beside.py has it beside a score as well
@pytest.mark.parametrize("case", quick(OF_MASK, *QUICK_MASK), ids=str)
def test_what_a_mask_leaves(case, schedule, share_of_bits):
    (dim, dtype), *_ = case
    share_of_bits(math.inf)
    options, hand = with_mask(case)
    forward, backward = judged(dtype, options, hand, WHERE, inputs_given=inputs(dim, dtype))
    assert kernels_of(forward, backward) == WITH_MASK[dim]
    for kernel in (forward, backward):
        assert kernel.config.DROPOUT and kernel.config.PAIR_BITS and not kernel.config.OWN_LISTS
