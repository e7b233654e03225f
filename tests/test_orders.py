"""Axes as (..., seq, heads, dim): the same numbers as swapped views of (..., heads, seq, dim), and nothing copied."""

import numpy
import pytest

from cupy_flash import (
    Gradients,
    attention,
    attention_backward,
    attention_vjp,
    merge_states,
    plan_attention,
    plan_attention_backward,
)

BACKENDS = ("numpy", "host")
Q, KV = (2, 70, 6, 40), (2, 90, 3, 40)  # batch, seq, heads, dim


def made(*shapes, dtype=numpy.float16):
    rng = numpy.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def swapped(x):
    """An array of either order in the other; a log-sum-exp is known by its float32."""
    return x.swapaxes(-1, -2) if x.dtype == numpy.float32 and x.ndim == 3 else x.swapaxes(-3, -2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_those_of_swapped_views(backend):
    q, k, v = made(Q, KV, KV)
    options = {"causal": True, "window": (50, None), "backend": backend, "return_lse": True}
    out, lse = attention(q, k, v, layout="bshd", **options)
    expected, expected_lse = attention(*map(swapped, (q, k, v)), **options)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert out.flags.c_contiguous  # q's own memory order
    assert swapped(lse).flags.c_contiguous  # rows of a head together, as kernels write them
    numpy.testing.assert_array_equal(swapped(out), expected)
    numpy.testing.assert_array_equal(swapped(lse), expected_lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_swapped_views(backend):
    q, k, v, dout, dlse = *made(Q, KV, KV, Q), *made(Q[:-1], dtype=numpy.float32)
    options = {"causal": True, "backend": backend}
    out, lse = attention(q, k, v, layout="bshd", return_lse=True, **options)
    gradients = attention_backward(dout, q, k, v, out, lse, layout="bshd", dlse=dlse, deterministic=True, **options)
    given = map(swapped, (dout, q, k, v, out, lse))
    expected = attention_backward(*given, dlse=swapped(dlse), deterministic=True, **options)
    for gradient, same, of in zip(gradients, expected, (q, k, v)):
        assert gradient.shape == of.shape and gradient.flags.c_contiguous
        numpy.testing.assert_array_equal(swapped(gradient), same)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vjp_and_given_results(backend):
    q, k, v, dout = made(Q, KV, KV, Q)
    out, vjp = attention_vjp(q, k, v, layout="bshd", backend=backend, deterministic=True)
    results = [numpy.repeat(numpy.full_like(x, numpy.nan), 2, axis=-2)[..., ::2, :] for x in (q, k, v)]  # other strides
    plain, lse = attention(q, k, v, layout="bshd", backend=backend, return_lse=True)
    numpy.testing.assert_array_equal(out, plain)
    given = {"layout": "bshd", "backend": backend, "deterministic": True} | dict(zip(("dq", "dk", "dv"), results))
    returned = attention_backward(dout, q, k, v, out, lse, **given)
    for result, same, gradient in zip(results, returned, vjp(dout)):
        assert result is same
        numpy.testing.assert_array_equal(result, gradient)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_head_may_lack_its_axis(backend):
    q, k = made((70, 40), (90, 1, 40))
    out, lse = attention(q, k[:, 0], k[:, 0], layout="bshd", backend=backend, return_lse=True)
    assert (out.shape, lse.shape) == ((70, 40), (70,))
    full, full_lse = attention(q, k, k, layout="bshd", backend=backend, return_lse=True)
    assert (full.shape, full_lse.shape) == ((70, 1, 40), (70, 1))
    numpy.testing.assert_array_equal(full[:, 0], out)
    numpy.testing.assert_array_equal(full_lse[:, 0], lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_take_the_order(backend):
    q, k, v = made(Q, KV, KV)
    plan = plan_attention(q, k, v, layout="bshd", backend=backend, return_lse=True)
    out, lse = plan(q, k, v)
    numpy.testing.assert_array_equal(out, attention(q, k, v, layout="bshd", backend=backend))
    backward = plan_attention_backward(out, q, k, v, out, lse, layout="bshd", backend=backend, deterministic=True)
    gradients = backward(out, q, k, v, out, lse)
    assert isinstance(gradients, Gradients) and gradients.dk.shape == k.shape
    with pytest.raises(ValueError, match=r"^q: expected shape \(2, 70, 6, 40\), as planned, got \(2, 6, 70, 40\)"):
        plan(*map(swapped, (q, k, v)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_are_merged(backend):
    q, k, v = made(Q, KV, KV)
    parts = [slice(0, 30), slice(30, None)]
    states = [attention(q, k[:, keys], v[:, keys], layout="bshd", backend=backend, return_lse=True) for keys in parts]
    out, lse = merge_states(*states[0], *states[1], layout="bshd", backend=backend)
    expected, expected_lse = merge_states(*map(swapped, (*states[0], *states[1])), backend=backend)
    numpy.testing.assert_array_equal(swapped(out), expected)
    numpy.testing.assert_array_equal(swapped(lse), expected_lse)
    assert swapped(lse).flags.c_contiguous


def test_batch_axes_broadcast_and_gradients_sum():
    q, k = made((4, 1, 70, 6, 40), (2, 90, 3, 40))
    out, vjp = attention_vjp(q, k, k, layout="bshd")
    assert out.shape == (4, 2, 70, 6, 40)
    assert [x.shape for x in vjp(out)] == [q.shape, k.shape, k.shape]


def test_the_wrong_order_is_hinted_at():
    q, k = made((2, 70, 6, 40), (2, 90, 3, 40))
    with pytest.raises(ValueError, match=r"^q: expected a multiple of 90 heads .*\(\.\.\., seq, heads, dim\) need layout='bshd'"):
        attention(q, k, k)
    with pytest.raises(ValueError, match=r"^q: expected a multiple of 3 heads \(those of k\), got 2$"):
        attention(q[:, :, :2], k, k, layout="bshd")
    with pytest.raises(ValueError, match=r"^out: expected shape \(2, 70, 6, 40\), got \(2, 6, 70, 40\)"):
        attention(q, k, k, layout="bshd", out=numpy.empty((2, 6, 70, 40), numpy.float16))


@pytest.mark.parametrize("wrong, kind", [("sbhd", ValueError), (None, TypeError), (1, TypeError)])
def test_other_orders_are_refused(wrong, kind):
    [q] = made(Q)
    with pytest.raises(kind, match=r"^layout: expected one of \('bhsd', 'bshd'\), got "):
        attention(q, q, q, layout=wrong)
