"""What a mask leaves, and dropout, beside what scores become, in the kernels for sm_90a, on the host."""

import math

import numpy
import pytest
from dropout_beside import inputs
from masks_beside import BIASES, CASES, QUICK, TWO, is_hopper, problem, two_things
from score_kernels import judged
from thinned import quick, thinned

from cupy_flash import plan_attention, plan_attention_backward
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
    of_pairs = term == "bias of pairs" and dim <= 192  # beyond, its shared memory is full
    assert kernels[1].config.STORE_DBIAS is (of_pairs or (term == "bias of heads" and mask == "none" and dim <= 128))
    for kernel in kernels:
        assert is_hopper(kernel)
        assert kernel.config.PAIR_BITS is (mask != "none") and kernel.config.DROPOUT is dropout
        assert not kernel.expressions.takes_part


@pytest.mark.release  # test_read_hopper_walks.py has a bias beside slopes as well
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_things_that_scores_go_through(case, schedule):
    (dim, dtype), _ = case
    options, hand = two_things(case)
    kernels = judged(dtype, options, hand, WHERE, inputs_given=inputs(dim, dtype))
    assert [kernel.file for kernel in kernels] == ["fwd_hopper", "bwd_hopper_wide"]


# Bytes that were found to be spilled where no tile that was tried has the registers: outside the loops, or little of it within.
OF_STAGED_BIAS, OF_THREE = 16, 8


@pytest.mark.release
@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_registers_are_spilled(case, share_of_bits):
    pytest.importorskip("cupy")
    from cupy_flash.machine import nvrtc
    from cupy_flash.machine.machine_code import read

    (dim, dtype), _, term, mask, dropout = case
    share_of_bits(math.inf)
    options, *_ = problem(case)
    q, k, v, dout = inputs(dim, dtype)
    lse = numpy.zeros(q.shape[:-1], numpy.float32)
    kernels = [
        plan_attention(q, k, v, **WHERE, **options).kernel,
        plan_attention_backward(dout, q, k, v, q, lse, **WHERE, **options).kernel,
    ]
    found = [read(nvrtc.compile_plan(kernel)[0])[kernel.file].stack_bytes for kernel in kernels]
    assert found[0] <= (OF_THREE if term in ("gate", "alibi") and dim > 128 and mask != "none" and dropout else 0)
    assert found[1] <= (OF_STAGED_BIAS if term in BIASES and mask != "none" else 0)
