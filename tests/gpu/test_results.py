"""Where results of a call are written on a device: by the strides that were planned for, in memory that has them."""

import numpy
import pytest

from cupy_flash import attention, attention_backward, attention_vjp, plan_attention
from cupy_flash.judge.cases import Case, make_inputs

cupy = pytest.importorskip("cupy")

CASE = Case("bfloat16", 300, 500, heads_q=6, heads_kv=2, dim=128, batch=(2,), causal=True)


@pytest.mark.parametrize("kernel", [None, "fwd_v2"])
def test_a_plan_for_an_out_with_gaps_demands_it(kernel):
    """Dense memory, written by the planned strides, would be written beyond its end: compute-sanitizer sees that nothing is."""
    q, k, v = make_inputs(CASE, cupy)
    room = cupy.full((2, 6, 600, 128), numpy.nan, q.dtype)
    out = room[:, :, ::2]
    plan = plan_attention(q, k, v, causal=True, out=out, kernel=kernel)
    with pytest.raises(ValueError, match=r"^out: expected an array with strides .*, as planned, got None$"):
        plan(q, k, v)
    assert plan(q, k, v, out=out) is out
    cupy.testing.assert_array_equal(out, plan_attention(q, k, v, causal=True, kernel=kernel)(q, k, v))
    assert cupy.isnan(room[:, :, 1::2]).all()


def test_axes_in_the_other_order():
    q, k, v = (x.swapaxes(1, 2) for x in make_inputs(CASE, cupy))
    (out, lse), vjp = attention_vjp(q, k, v, layout="bshd", causal=True, return_lse=True, deterministic=True)
    expected, expected_lse = attention(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=True, return_lse=True)
    cupy.testing.assert_array_equal(out.swapaxes(1, 2), expected)
    cupy.testing.assert_array_equal(lse.swapaxes(1, 2), expected_lse)
    given = (x.swapaxes(1, 2) for x in (out, q, k, v, out, lse))
    for gradient, same in zip(vjp(out), attention_backward(*given, causal=True, deterministic=True)):
        cupy.testing.assert_array_equal(gradient.swapaxes(1, 2), same)
