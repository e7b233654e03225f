"""What a call is refused with: one error of ours that names the argument, whatever was called before."""

import traceback
from numbers import Integral

import numpy
import pytest

from cupy_flash import UnsupportedError, attention, attention_vjp, plan_attention
from cupy_flash.judge.oracle_gradients import oracle_gradients

X = numpy.zeros((2, 8, 16), numpy.float32)


class Nameless:
    def __repr__(self):
        raise RuntimeError("no")


class Unlike:
    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = object.__hash__


WRONG = [
    ({"window": (10**5000, -(10**5000))}, ValueError, "window: expected ends of at least 0, .*type int that cannot be shown"),
    ({"window": (True, 1)}, TypeError, "window: expected integers or None at its ends, got True"),
    ({"window": Nameless()}, TypeError, "window: expected None or a pair .*a value of type Nameless that cannot be shown"),
    ({"window": tuple(range(10**4))}, ValueError, r"window: expected a pair \(left, right\), got \(0, 1, 2, .{,80}$"),
    ({"causal": Nameless()}, TypeError, "causal: expected one of .*a value of type Nameless"),
    ({"causal": Unlike()}, TypeError, "causal: expected one of "),
    ({"causal": [True]}, TypeError, "causal: expected one of "),
    ({"causal": 1}, TypeError, "causal: expected one of .* got 1"),
    ({"return_lse": numpy.ones(2)}, TypeError, "return_lse: expected True or False, got array"),
    ({"precision": 32}, TypeError, "precision: expected one of .* got 32"),
    ({"backend": "a" * 10**4}, ValueError, "backend: expected one of .{,200}$"),
]


@pytest.mark.parametrize("arch", ["80", "81", "", 80, ["80"]], ids=str)
def test_numpy_has_no_architecture(arch):
    with pytest.raises(ValueError, match=r"^arch: expected None on backend 'numpy', which has no kernels, got "):
        plan_attention(X, X, X, arch=arch)


@pytest.mark.parametrize("arch, kind", [("81", UnsupportedError), (80, TypeError), (b"80", TypeError), (["80"], TypeError)])
def test_architectures_are_named_by_words(arch, kind):
    with pytest.raises(kind, match=r"^arch: expected one of 75, 80, .* got "):
        plan_attention(X, X, X, arch=arch, backend="host")


@pytest.mark.parametrize("options, kind, message", WRONG, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_options(options, kind, message):
    for _ in range(2):
        with pytest.raises(kind, match=f"^{message}") as caught:
            attention(X, X, X, **options)
        assert type(caught.value) is kind
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("Traceback") == 1


@pytest.mark.parametrize("right, wrong", [((1, 1), (True, 1)), ((1, 0), (1, False)), ((0, 1), [False, 1])])
def test_what_was_called_before_does_not_matter(right, wrong):
    """Equal numbers of another type are equal as keys of a cache."""
    for window, accepted in ((right, True), (wrong, False), (right, True)):
        if accepted:
            plan_attention(X, X, X, window=window)
        else:
            with pytest.raises(TypeError, match=r"^window: expected integers"):
                plan_attention(X, X, X, window=window)


class Index(int):
    pass


@pytest.mark.parametrize("end", [numpy.int8(3), numpy.uint64(3), Index(3)], ids=lambda x: type(x).__name__)
def test_all_integers_are_ends_of_a_window(end):
    assert isinstance(end, Integral)
    numpy.testing.assert_array_equal(attention(X, X, X, window=(end, end)), attention(X, X, X, window=(3, 3)))


@pytest.mark.parametrize("end", [10**30, 10**5000], ids=["long", "longer"])
def test_a_window_wider_than_all_keys_hides_nothing(end):
    plan = plan_attention(X, X, X, window=(end, end))
    assert (plan.problem.mask.left, plan.problem.mask.right) == (None, None)


@pytest.mark.parametrize("dtype", ["V0", "V4", "int32", "complex64", "O", "U3", "S1", "M8[s]", "?", ">f4", "g", "f4,f4"])
def test_dtypes(dtype):
    given = numpy.zeros((2, 8, 16), dtype)
    with pytest.raises(TypeError, match=r"^q: expected float16, bfloat16, float32 or float64, got "):
        attention(given, X, X)
    with pytest.raises(TypeError, match=r"^v: expected float16, bfloat16, float32 or float64, got "):
        attention(X, X, given)


def test_more_axes_than_numpy_broadcasts():
    many = X[(None,) * 30]
    for backend in ("numpy", "auto"):
        with pytest.raises(UnsupportedError, match=r"^k: expected at most 32 axes on backend 'numpy', .* got 33$"):
            attention(X, many, X, backend=backend)
    assert attention(many[0], many[0], X).shape == many[0].shape
    assert attention(many, many, many, backend="host").shape == many.shape


def test_gradients_without_values():
    """The log-sum-exp has a gradient even where there is no value to average."""
    q, k = numpy.random.default_rng(0).standard_normal((2, 2, 8, 16)).astype(numpy.float32)
    v, dlse = numpy.zeros((2, 8, 0), numpy.float32), numpy.ones((2, 8), numpy.float32)
    (out, lse), vjp = attention_vjp(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 8, 0), (2, 8))
    gradients = vjp(out, dlse)
    assert gradients.dv.shape == v.shape
    expected = oracle_gradients(out, q, k, v, dlse=dlse, scale=0.25)
    for gradient, exact in zip(gradients[:2], expected):
        numpy.testing.assert_allclose(gradient, exact, atol=1e-6)
    assert abs(expected.dq).max() > 0.01
