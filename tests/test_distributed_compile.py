"""Kernels that drop the pairs of a part, as NVRTC compiles them: no more registers than others have room for."""

from itertools import product

import numpy
import pytest
from thinned import quick

from cupy_flash.call.backward import operands, prepared_backward
from cupy_flash.call.captured import captured
from cupy_flash.call.forward import ForwardOperands, prepared
from cupy_flash.machine import machine_code, nvrtc
from cupy_flash.problem.dropout import Place

X, LSE = numpy.zeros((1, 4, 4096, 128), numpy.float16), numpy.zeros((1, 4, 4096), numpy.float32)


def kernel_of(arch, backward, place):
    """The kernel of one head dim, of pairs that are numbered from elsewhere or not."""
    others = captured(seed=1)
    options = {"backend": "host", "arch": arch, "dropout": 0.1, "causal": True} | ({"place": place} if place else {})
    if backward:
        given = operands(X, X, X, X, X, LSE, None, None, None, None, None, None, others=others)
        return prepared_backward(given, options)._execution.kernel
    return prepared(ForwardOperands(X, X, X, None, None, None, others), options).kernel


KINDS = list(product(["80", "90a"], [False, True]))


@pytest.mark.parametrize("arch, backward", quick(KINDS, ("80", False), spread=True))
def test_placed_kernels_do_not_spill(arch, backward):
    plain, placed = (kernel_of(arch, backward, place) for place in (None, Place(64, 128, 5, 64)))
    assert placed.config.PLACED and not plain.config.PLACED
    assert placed.name == f"{plain.name}-placed"
    code, _ = nvrtc.compile_plan(placed)
    assert all(kernel.stack_bytes == 0 for kernel in machine_code.read(code).values())
