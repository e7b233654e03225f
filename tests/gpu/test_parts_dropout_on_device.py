"""Dropout of float32 in parts of float16, by the kernels of a device: the pairs of `dropout_mask`, and right."""

import numpy
import pytest
from test_parts_dropout import ASKED, DIMS, computed, drawn, judge

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="parts are for sm_90"
)


def on_device(operands, asked, *others, **options):
    placed = {name: cupy.asarray(x) if isinstance(x, numpy.ndarray) else x for name, x in asked.items()}
    out, lse, gradients = computed([cupy.asarray(x) for x in operands], placed, *others, options={}, **options)
    dsinks = gradients.dsinks.get() if "sinks" in asked else None
    found = {name: getattr(gradients, name).get() for name in ("dq", "dk", "dv")}
    return out.get(), lse.get(), gradients._replace(**found, dsinks=dsinks)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ASKED)
def test_right(name, dim, precision):
    operands = drawn(dim)
    judge(operands, on_device(operands, ASKED[name], 0.3, precision), ASKED[name], 0.3, precision)


@pytest.mark.parametrize("dim", [64, 128])
def test_in_order_the_same_bits_in_every_run(dim):
    operands = drawn(dim, 5)
    first, *others = (on_device(operands, ASKED["causal"], 0.2, deterministic=True) for _ in range(5))
    for found in others:
        for x, y in zip((*found[:2], *found[2][:3]), (*first[:2], *first[2][:3])):
            numpy.testing.assert_array_equal(x, y)
