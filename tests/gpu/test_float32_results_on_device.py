"""Results in float32 of inputs of 16 bits on a device: to the bit what is rounded otherwise, and added to what is there once."""

import numpy
import pytest

from cupy_flash.call.backward import operands, prepared_backward
from cupy_flash.call.forward import ForwardOperands, prepared
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.cotangents import make_cotangents

cupy = pytest.importorskip("cupy")

CASES = {
    "groups": Case("bfloat16", 250, 500, heads_q=6, heads_kv=2, dim=128, batch=(2,), causal=True),
    "wide": Case("float16", 300, 500, heads_q=2, heads_kv=2, dim=256, causal=True),
    "elements": Case("float16", 130, 200, heads_q=2, heads_kv=2, dim=37),
    "split": Case("bfloat16", 3, 9000, heads_q=8, heads_kv=2, dim=64),
}


def forward(case, wide, kernel=None):
    given = ForwardOperands(*make_inputs(case, cupy), None, None)
    options = {"causal": case.causal, "kernel": kernel, "return_lse": True, "float32_results": wide}
    return prepared(given, options).run(given)


def backward(case, wide, kernel=None, room=(None, None, None), **options):
    out, lse = forward(case, False)
    dout, _ = make_cotangents(case, cupy)
    given = operands(dout, *make_inputs(case, cupy), out, lse, None, None, *room, None)
    options = {"causal": case.causal, "kernel": kernel, "deterministic": True, "float32_results": wide, **options}
    return prepared_backward(given, options).run(given)


def check_rounded(wide, narrow):
    wide, narrow = cupy.asnumpy(wide), cupy.asnumpy(narrow)
    assert wide.dtype == numpy.float32
    numpy.testing.assert_array_equal(wide.astype(narrow.dtype).view(numpy.uint16), narrow.view(numpy.uint16))


@pytest.mark.parametrize("kernel", [None, "fwd_v2"])
@pytest.mark.parametrize("name", CASES)
def test_out(name, kernel):
    check_rounded(*(forward(CASES[name], wide, kernel)[0] for wide in (True, False)))


@pytest.mark.parametrize("kernel", [None, "bwd_v2"])
@pytest.mark.parametrize("name", ["groups", "wide", "elements"])
def test_gradients(name, kernel):
    for x, y in zip(*(backward(CASES[name], wide, kernel) for wide in (True, False))):
        check_rounded(x, y)


@pytest.mark.parametrize("kernel", [None, "bwd_v2"])
@pytest.mark.parametrize("name", ["groups", "wide", "elements"])
def test_gradients_are_added(name, kernel):
    case = CASES[name]
    room = tuple(cupy.random.standard_normal(x.shape, dtype=numpy.float32) for x in make_inputs(case, cupy))
    before = [cupy.asnumpy(x) for x in room]
    backward(case, True, kernel, room, adds_results=True)
    for x, old, new in zip(room, before, backward(case, True, kernel)):
        numpy.testing.assert_array_equal(cupy.asnumpy(x), old + cupy.asnumpy(new))
