"""merge_states: two results over different keys become the one over all, on NumPy and by the kernel."""

import dataclasses
import itertools

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import quick

from cupy_flash import UnsupportedError, attention, merge_states
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.merge import merge_plan
from cupy_flash.plan.params import merge_params
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.merge import MERGE_ARRAYS, make_merge_problem

backends = pytest.mark.parametrize("backend", ["host", "numpy"])


def laid(*shape, dtype="float16", device=None, strides=None):
    """A C-contiguous layout, unless strides are given."""
    dense = dense_layout(shape, reversed(range(len(shape))), dtype, device)
    return dataclasses.replace(dense, strides=strides or dense.strides)


def states(*shape, dtype=numpy.float16):
    """Two results of this shape, as if over different keys."""
    rng = numpy.random.default_rng(0)
    outs, lses = rng.standard_normal((2, *shape)).astype(dtype), rng.standard_normal((2, *shape[:-1])).astype(numpy.float32)
    return outs[0], lses[0], outs[1], lses[1]


def expected_of(out_a, lse_a, out_b, lse_b):
    """In float64; the states hold no infinity."""
    a, b = numpy.exp(lse_a.astype("f8"))[..., None], numpy.exp(lse_b.astype("f8"))[..., None]
    return (a * out_a.astype("f8") + b * out_b.astype("f8")) / (a + b), numpy.log(a + b)[..., 0]


@backends
@pytest.mark.parametrize("dtype, unit", [("float16", 2.0**-11), (ml_dtypes.bfloat16, 2.0**-8), ("float32", 2.0**-24)])
@pytest.mark.parametrize("shape", [(2, 3, 70, 64), (20, 33), (1, 17, 300), (2, 1, 3, 5, 1), (5, 0, 4), (0, 5, 4)])
def test_weights_are_those_of_the_sums(backend, dtype, unit, shape):
    given = states(*shape, dtype=dtype)
    out, lse = merge_states(*given, backend=backend)
    expected, expected_lse = expected_of(*given)
    assert out.dtype == given[0].dtype and out.shape == shape and lse.dtype == numpy.float32 and lse.shape == shape[:-1]
    # A weight has the rounding of the difference of two lse below 8 in size, of an exponential and of a division.
    largest = numpy.maximum(abs(given[0].astype("f8")), abs(given[2].astype("f8")))
    assert (abs(out.astype("f8") - expected) <= (unit + 16 * 2.0**-23) * largest).all()
    assert (abs(lse - expected_lse) <= 8 * 2.0**-23 * (1 + abs(expected_lse))).all()


@pytest.mark.parametrize("backend", quick(["host", "numpy"], "host"))
@settings(max_examples=50)
@given(st.integers(1, 100), st.integers(0, 150), st.integers(0, 150))
def test_keys_split_anywhere_merge_to_the_whole(backend, len_q, len_a, len_b):
    case = Case("float16", len_q, len_a + len_b, dim=32, heads_q=4, heads_kv=2)
    q, k, v = make_inputs(case)
    parts = [attention(q, k[..., keys, :], v[..., keys, :], return_lse=True) for keys in numpy.s_[:len_a, len_a:]]
    judged = compare(*merge_states(*parts[0], *parts[1], backend=backend), q, k, v, **case.scores)
    assert judged.ok, judged.message


@backends
def test_a_state_of_weight_0_may_hold_anything(backend):
    out_a, lse_a, out_b, lse_b = states(2, 40, 64)
    out_a[:, ::2], lse_a[:, ::2] = numpy.nan, -numpy.inf
    out_b[:, 1::4], lse_b[:, 1::4] = numpy.inf, -numpy.inf
    out_b[:, ::4], lse_b[:, ::4] = numpy.nan, -numpy.inf
    out, lse = merge_states(out_a, lse_a, out_b, lse_b, backend=backend)
    assert (out[:, ::4] == 0).all() and (lse[:, ::4] == -numpy.inf).all()  # neither saw a key
    assert numpy.array_equal(out[:, 2::4], out_b[:, 2::4]) and numpy.array_equal(out[:, 1::4], out_a[:, 1::4])
    assert abs(lse[:, 2::4] - lse_b[:, 2::4]).max() <= 2.0**-20 and abs(lse[:, 1::4] - lse_a[:, 1::4]).max() <= 2.0**-20


@backends
def test_views_are_read_in_place(backend):
    given = states(3, 20, 64)
    memory = [numpy.full((3, 40, 2 * x.shape[-1] if x.ndim == 3 else 40), numpy.nan, x.dtype) for x in given]
    views = [m[:, ::-2, ::2] if x.ndim == 3 else m[:, ::-2, 7] for m, x in zip(memory, given)]
    for view, x in zip(views, given):
        view[...] = x
    for found, expected in zip(merge_states(*views, backend=backend), merge_states(*given, backend=backend)):
        assert numpy.array_equal(found, expected)


@backends
def test_memory_order_is_that_of_the_first(backend):
    out_a, lse_a, out_b, lse_b = states(2, 3, 20, 64)
    swapped = out_a.swapaxes(1, 2).copy().swapaxes(1, 2)
    out, lse = merge_states(swapped, lse_a, out_b, lse_b, backend=backend)
    assert out.strides == swapped.strides and lse.flags.c_contiguous


def test_float64_stays_float64():
    out_a, lse_a, out_b, lse_b = states(2, 5, 8, dtype=numpy.float64)
    given = (out_a, lse_a.astype("f8"), out_b, lse_b.astype("f8"))
    out, lse = merge_states(*given)
    expected, expected_lse = expected_of(*given)
    numpy.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
    numpy.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-14)
    with pytest.raises(UnsupportedError, match="out_a: expected float16, bfloat16 or float32 on backend 'host', got float64"):
        merge_states(*given, backend="host")


# Any number of states


def many(count, *shape, dtype=numpy.float16):
    """So many results of this shape, as if over different keys."""
    rng = numpy.random.default_rng(1)
    wide = "float64" if dtype == "float64" else "float32"
    pairs = [(rng.standard_normal(shape), rng.standard_normal(shape[:-1])) for _ in range(count)]
    return [(out.astype(dtype), lse.astype(wide)) for out, lse in pairs]


@backends
@pytest.mark.parametrize("dtype, unit", [("float16", 2.0**-11), (ml_dtypes.bfloat16, 2.0**-8), ("float32", 2.0**-24)])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_many_are_rounded_once(backend, dtype, unit, count):
    """Whatever their number: rounded at each merge, halves would be off by several units."""
    given = many(count, 3, 20, 33, dtype=dtype)
    out, lse = merge_states(*given, backend=backend)
    weights = numpy.exp([lse.astype("f8") for _, lse in given])[..., None]
    outs = numpy.stack([out for out, _ in given]).astype("f8")
    expected, expected_lse = (weights * outs).sum(0) / weights.sum(0), numpy.log(weights.sum(0))[..., 0]
    assert out.dtype == dtype and out.shape == (3, 20, 33) and lse.dtype == numpy.float32 and lse.shape == (3, 20)
    merges = numpy.ceil(numpy.log2(count)) + 1  # that a state goes through; each has the roundings of two states above
    assert (abs(out.astype("f8") - expected) <= (unit + 16 * merges * 2.0**-23) * abs(outs).max(0)).all()
    assert (abs(lse - expected_lse) <= 8 * merges * 2.0**-23 * (1 + abs(expected_lse))).all()


@backends
def test_two_pairs_are_four_arrays(backend):
    pairs = many(2, 2, 20, 64)
    names = dict(zip(MERGE_ARRAYS, (*pairs[0], *pairs[1])))
    first, *others = (
        merge_states(*pairs, backend=backend),
        merge_states(*pairs[0], *pairs[1], backend=backend),
        merge_states(**names, backend=backend),
        merge_states(*pairs[0], out_b=pairs[1][0], lse_b=pairs[1][1], backend=backend),
        merge_states(*map(list, pairs), backend=backend),
    )
    assert all(numpy.array_equal(x, y) for other in others for x, y in zip(first, other))


@backends
def test_of_many_what_has_weight_0_may_be_anything(backend):
    given = many(5, 2, 40, 64)
    for i in (0, 3):
        given[i][0][...], given[i][1][...] = numpy.nan, -numpy.inf
    left = [given[i] for i in (1, 2, 4)]
    given[2][1][:, ::2] = -numpy.inf
    given[2][0][:, ::2] = numpy.inf
    for found, expected in zip(merge_states(*given, backend=backend), merge_states(*left, backend=backend)):
        assert numpy.isfinite(found).all() and abs(found.astype("f8") - expected).max() <= 2.0**-10
    out, lse = merge_states(given[0], backend=backend)  # one alone, too
    assert (out == 0).all() and (lse == -numpy.inf).all()
    out, lse = merge_states(given[1], backend=backend)
    assert out is not given[1][0] and numpy.array_equal(out, given[1][0]) and numpy.array_equal(lse, given[1][1])


@backends
def test_keys_in_many_parts_merge_to_the_whole(backend):
    case = Case("float16", 40, 300, dim=32, heads_q=4, heads_kv=2)
    q, k, v = make_inputs(case)
    ends = [0, 1, 70, 70, 150, 233, 300]
    parts = [attention(q, k[..., a:b, :], v[..., a:b, :], return_lse=True) for a, b in itertools.pairwise(ends)]
    judged = compare(*merge_states(*parts, backend=backend), q, k, v, **case.scores)
    assert judged.ok, judged.message


@backends
def test_of_many_the_first_says_memory_order(backend):
    given = [(out.swapaxes(1, 2).copy().swapaxes(1, 2), lse) for out, lse in many(3, 2, 3, 20, 64)]
    out, lse = merge_states(*given, backend=backend)
    assert out.strides == given[0][0].strides and lse.flags.c_contiguous
    swapped = [(out.swapaxes(1, 2), lse.swapaxes(1, 2)) for out, lse in given]
    other, other_lse = merge_states(*swapped, layout="bshd", backend=backend)
    assert numpy.array_equal(out.swapaxes(1, 2), other) and numpy.array_equal(lse.swapaxes(1, 2), other_lse)


def test_many_of_float64():
    given = many(4, 5, 8, dtype="float64")
    out, lse = merge_states(*given)
    weights = numpy.exp([lse for _, lse in given])[..., None]
    expected = (weights * [out for out, _ in given]).sum(0) / weights.sum(0)
    assert out.dtype == lse.dtype == numpy.float64
    numpy.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
    with pytest.raises(UnsupportedError, match=r"states\[0\]\[0\]: expected float16, .* on backend 'host', got float64"):
        merge_states(*given, backend="host")


A, B, C = many(3, 2, 5, 8)
STATES_REFUSED = [
    ((), {}, ValueError, r"states: expected at least one, got none"),
    ((A, B, C[0]), {}, TypeError, r"states\[2\]: expected a pair of arrays, \(out, lse\), got ndarray"),
    ((*A, *B, *C), {}, TypeError, r"states\[0\]: expected a pair of arrays, \(out, lse\), got ndarray"),
    ((A, (*B, *C)), {}, TypeError, r"states\[1\]: expected a pair of arrays, \(out, lse\), got 4 of them"),
    ((A, None), {}, TypeError, r"states\[1\]: expected a pair of arrays, \(out, lse\), got NoneType"),
    (A, {}, TypeError, r"states\[0\]: expected a pair of arrays, \(out, lse\), got ndarray"),
    ((A, (B[0], None)), {}, TypeError, r"states\[1\]\[1\]: expected a NumPy or CuPy array .* got NoneType"),
    ((A, B, (C[0][:1], C[1])), {}, ValueError, r"states\[2\]\[0\]: expected shape \(2, 5, 8\), got \(1, 5, 8\)"),
    ((A, (B[0], B[1][:1])), {}, ValueError, r"states\[1\]\[1\]: expected shape \(2, 5\), got \(1, 5\)"),
    ((A, B, (C[0], C[0][..., 0])), {}, TypeError, r"states\[2\]\[1\]: expected float32, got float16"),
    ((A, (B[0].astype("f4"), B[1]), C), {}, TypeError, r"states\[1\]\[0\]: expected float16, got float32"),
    ((A, B, C), {"layout": "sbhd"}, ValueError, r"layout: expected one of"),
    ((A, B, C), {"backend": "cuda"}, ValueError, r"backend: expected 'host' or 'numpy'"),
    ((A, B), {"out_b": C[0]}, TypeError, r"out_b: expected out_a, lse_a, out_b and lse_b and no other states"),
    ((*A, *B), {"out_a": C[0]}, TypeError, r"out_a: expected one array, got two"),
    ((), {"out_a": A[0], "lse_a": A[1]}, TypeError, r"out_b: expected a NumPy or CuPy array .* got NoneType"),
    (A, {"out_b": B[0], "lse_b": None}, TypeError, r"lse_b: expected a NumPy or CuPy array .* got NoneType"),
]


@pytest.mark.parametrize("given, named, exception, message", STATES_REFUSED)
def test_refusals_name_the_state(given, named, exception, message):
    with pytest.raises(exception, match=f"^{message}"):
        merge_states(*given, **named)


# Problems


OUT, LSE = laid(2, 5, 8), laid(2, 5, dtype="float32")
REFUSALS = [
    ({"out_a": laid(8)}, ValueError, "out_a: expected at least 2 axes, (..., heads, seq, dim), got shape (8,)"),
    ({"out_a": laid(2, 5, 8, dtype="int32")}, TypeError, "out_a: expected float16, bfloat16, float32 or float64, got int32"),
    ({"out_b": laid(1, 5, 8)}, ValueError, "out_b: expected shape (2, 5, 8), got (1, 5, 8)"),
    ({"out_b": laid(2, 5, 8, dtype="float32")}, TypeError, "out_b: expected float16, got float32"),
    ({"out_b": laid(2, 5, 8, device=1)}, ValueError, "out_b: expected an array in host memory (like out_a), got one on CUDA"),
    ({"lse_a": laid(2, 5)}, TypeError, "lse_a: expected float32, got float16"),
    ({"lse_b": laid(2, 4, dtype="float32")}, ValueError, "lse_b: expected shape (2, 5), got (2, 4)"),
    ({"layout": "sbhd"}, ValueError, "layout: expected one of ('bhsd', 'bshd'), got 'sbhd'"),
    ({"backend": "cuda"}, ValueError, "backend: expected 'host' or 'numpy' for arrays in host memory, got 'cuda'"),
    ({"backend": "gpu"}, ValueError, "backend: expected one of ('auto', 'cuda', 'host', 'numpy'), got 'gpu'"),
]


@pytest.mark.parametrize("arguments, exception, message", REFUSALS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_refusals_name_argument_expected_and_got(arguments, exception, message):
    given = {"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE, "layout": "bhsd", "backend": "auto"} | arguments
    with pytest.raises(exception) as raised:
        make_merge_problem(**given)
    assert message in str(raised.value)


def test_no_state_can_be_left_out():
    out_a, lse_a, out_b, _ = states(2, 5, 8)
    with pytest.raises(TypeError, match=r"^lse_b: expected a NumPy or CuPy array or one with .* got NoneType"):
        merge_states(out_a, lse_a, out_b, None)


def test_what_turing_lacks_is_refused():
    with pytest.raises(UnsupportedError, match="out_a: expected float16 or float32 on sm_75"):
        merge_plan(ARCHITECTURES["75"], "bfloat16")


def test_a_problem_becomes_numbers():
    out_b, lse_b = laid(4, 2, 5, 8, strides=(0, 9, -18, 1)), laid(4, 2, 5, dtype="float32", strides=(1, 20, 4))
    out_a, lse_a = laid(4, 2, 5, 8), laid(4, 2, 5, dtype="float32")
    params = merge_params(make_merge_problem(out_a, lse_a, out_b, lse_b, "bhsd", "host"))[0]
    axes = ("batch", "head", "row", "col")
    strides = {name: tuple(params[name][f"{axis}_stride"].tolist() for axis in axes) for name in MERGE_ARRAYS}
    assert strides == {
        "out_a": ([0, 0, 0, 80], 40, 8, 1),
        "lse_a": ([0, 0, 0, 10], 5, 1, 0),
        "out_b": ([0, 0, 0, 0], 9, -18, 1),
        "lse_b": ([0, 0, 0, 1], 20, 4, 0),
        "out": ([0, 0, 0, 80], 40, 8, 1),
        "lse": ([0, 0, 0, 10], 5, 1, 0),
    }
    assert {name: params[name].tolist() for name in params.dtype.names if name not in strides} == {
        "batch": [1, 1, 1, 4],
        "heads": 2,
        "len_q": 5,
        "dim_v": 8,
    }
