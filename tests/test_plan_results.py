"""A plan writes by the strides it was made for: what it allocates by itself has them, or the call has to bring the array."""

import numpy
import pytest

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.problem import arrays
from cupy_flash.problem.layout import Layout

BACKENDS = ("numpy", "host")
X = numpy.random.default_rng(0).standard_normal((2, 8, 64)).astype(numpy.float16)

VIEWS = {
    "every other row": lambda x: numpy.repeat(x, 2, axis=1)[:, ::2],
    "backwards": lambda x: x[:, ::-1],
    "columns of more": lambda x: numpy.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_plan_for_an_out_with_gaps_demands_it(view, backend):
    """A new array of as many bytes as there are elements would be written beyond its end, or before its beginning."""
    out = view(numpy.zeros_like(X))
    plan = plan_attention(X, X, X, out=out, backend=backend)
    with pytest.raises(ValueError, match=rf"^out: expected an array with strides {strides(out)}, as planned, got None$"):
        plan(X, X, X)
    if backend == "host":
        with pytest.raises(ValueError, match=r"^out: expected an array with strides"):
            plan.counted(X, X, X)
    assert plan(X, X, X, out=out) is out
    numpy.testing.assert_array_equal(out, plan_attention(X, X, X, backend=backend)(X, X, X))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_for_an_lse_with_gaps_demands_it(backend):
    lse = numpy.zeros((2, 16), numpy.float32)[:, ::2]
    plan = plan_attention(X, X, X, lse=lse, return_lse=True, backend=backend)
    with pytest.raises(ValueError, match=r"^lse: expected an array with strides \(16, 2\), as planned, got None$"):
        plan(X, X, X)
    assert plan(X, X, X, lse=lse)[1] is lse


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_plan_for_a_gradient_with_gaps_demands_it(view, name, backend):
    out, lse = plan_attention(X, X, X, return_lse=True)(X, X, X)
    gradient = view(numpy.zeros_like(X))
    plan = plan_attention_backward(X, X, X, X, out, lse, **{name: gradient}, backend=backend)
    with pytest.raises(ValueError, match=rf"^{name}: expected an array with strides {strides(gradient)}, as planned, got None$"):
        plan(X, X, X, X, out, lse)
    assert getattr(plan(X, X, X, X, out, lse, **{name: gradient}), name) is gradient


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_without_gaps_are_made_in_their_order(backend):
    out = numpy.zeros((8, 2, 64), numpy.float16).swapaxes(0, 1)
    result = plan_attention(X, X, X, out=out, backend=backend)(X, X, X)
    assert result.strides == out.strides and result is not out


@pytest.mark.parametrize(
    "shape, strides, dense",
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 1, 3), (3, 99, 1), True),  # an axis of one element has no stride
        ((0, 3), (100, 7), True),
        ((), (), True),
        ((1,), (5,), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (3, 2), False),
        ((2, 3), (-3, 1), False),
        ((2, 3), (0, 1), False),
        ((2, 2), (1, 1), False),
    ],
)
def test_dense(shape, strides, dense):
    assert Layout(shape, strides, "float16", 16, None).dense is dense


def strides(x):
    """The strides of an array in elements, as a pattern."""
    return str(arrays.layout(x).strides).replace("(", r"\(").replace(")", r"\)")
