"""Problem and options: what is accepted, what it resolves to, and what each refusal says."""

import dataclasses
import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_flash.errors import UnsupportedError
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.options import Options
from cupy_flash.problem.overlap import are_apart, check_overlap


def laid(*shape, dtype="float16", device=None, strides=None, alignment=16):
    """A C-contiguous layout, unless strides are given."""
    dense = dense_layout(shape, reversed(range(len(shape))), dtype, device)
    return dataclasses.replace(dense, strides=strides or dense.strides, alignment=alignment)


def problem_of(q, k=None, v=None, out=None, lse=None, **options):
    k = k or q
    return make_problem(q, k, v or k, Options(**options), out, lse)


# Memory order of the result


def test_result_keeps_batch_seq_heads_dim_memory():
    q = laid(2, 3, 5, 8, strides=(120, 8, 24, 1))  # (batch, seq, heads, dim) with its inner axes swapped
    assert problem_of(q).out.strides == (120, 8, 24, 1)


def test_axes_that_q_lacks_are_outermost():
    q = laid(3, 5, 8, strides=(8, 24, 1))
    problem = problem_of(q, laid(7, 3, 5, 8))
    assert problem.out == laid(7, 3, 5, 8, strides=(120, 8, 24, 1))


@pytest.mark.parametrize("strides", [(0, 8, 1), (8, 0, 1), (0, 0, 1), (40, 1, 0), (0, 0, 0)])
def test_a_broadcast_q_leaves_dim_fastest(strides):
    assert problem_of(laid(3, 5, 8, strides=strides)).out.strides[-1] == 1


def test_axes_of_equal_stride_keep_their_order():
    assert problem_of(laid(3, 5, 8, strides=(8, 8, 1))).out.strides == (40, 8, 1)


def test_result_of_dim_1_can_have_a_wider_dim_v():
    q = laid(3, 5, 1, strides=(1, 3, 100))  # the stride of an axis of size 1 says nothing
    assert problem_of(q, laid(3, 5, 1), laid(3, 5, 4)).out == laid(3, 5, 4, strides=(4, 12, 1))


# Normalisation


def test_defaults_of_a_plain_problem():
    q, k, v = laid(2, 6, 10, 64), laid(2, 3, 20, 64), laid(2, 3, 20, 48)
    problem = problem_of(q, k, v)
    assert (problem.q, problem.k, problem.v, problem.out) == (q, k, v, laid(2, 6, 10, 48))
    assert (problem.batch, problem.heads_q, problem.heads_kv) == ((2,), 6, 3)
    assert (problem.len_q, problem.len_kv, problem.dim, problem.dim_v) == (10, 20, 64, 48)
    assert (problem.dtype, problem.device, problem.backend) == ("float16", None, "numpy")
    assert (problem.scale, problem.mask.left, problem.mask.right, problem.softcap) == (1 / 8, None, None, None)
    assert (problem.precision, problem.algorithm) == ("ieee", "v2")
    assert problem.lse is None
    assert problem.seen == (q, k, v, laid(2, 6, 10, 48), None, None)
    assert problem.mask.pairs == 200
    assert problem.flops == 2 * (64 + 48) * 200 * 6 * 2
    assert hash(problem) == hash(problem_of(q, k, v))


def test_two_axes_are_one_head():
    problem = problem_of(laid(10, 64), laid(20, 64), return_lse=True)
    assert problem.q == laid(1, 10, 64, strides=(0, 64, 1))
    assert (problem.batch, problem.heads_q, problem.heads_kv) == ((), 1, 1)
    assert (problem.out.shape, problem.lse.shape) == ((1, 10, 64), (1, 10))
    assert problem.seen_out.shape == (10, 64)


def test_two_axes_among_three_are_seen_with_three():
    problem = problem_of(laid(10, 64), laid(1, 20, 64))
    assert problem.seen_out.shape == (1, 10, 64)


def test_batch_axes_broadcast_with_stride_0():
    problem = problem_of(laid(4, 1, 2, 5, 8), laid(3, 2, 7, 8), laid(2, 7, 8))
    assert problem.batch == (4, 3)
    assert problem.q.strides == (80, 0, 40, 8, 1)
    assert problem.k.strides == (0, 112, 56, 8, 1)
    assert problem.v.strides == (0, 0, 56, 8, 1)
    assert problem.out.shape == (4, 3, 2, 5, 8)


def test_given_results_are_used_where_they_are():
    out, lse = laid(10, 64, strides=(-128, 2)), laid(10, dtype="float32", strides=(3,))
    problem = problem_of(laid(10, 64), out=out, lse=lse)
    assert problem.out == laid(1, 10, 64, strides=(0, -128, 2))
    assert problem.lse == laid(1, 10, dtype="float32", strides=(0, 3))


def test_lse_is_float64_for_float64_only():
    assert problem_of(laid(2, 3, 8), return_lse=True).lse == laid(2, 3, dtype="float32")
    assert problem_of(laid(2, 3, 8, dtype="float64"), return_lse=True).lse == laid(2, 3, dtype="float64")


@pytest.mark.parametrize(
    "device, backend, resolved", [(None, "auto", "numpy"), (1, "auto", "cuda"), (1, "cuda", "cuda")]
)
def test_backend_follows_the_arrays(device, backend, resolved):
    problem = problem_of(laid(2, 3, 8, device=device), backend=backend, return_lse=True)
    assert (problem.backend, problem.device) == (resolved, device)
    assert (problem.out.device, problem.lse.device) == (device, device)


def test_host_backend_takes_host_arrays():
    assert problem_of(laid(2, 3, 256), backend="host").backend == "host"


def test_numpy_backend_takes_any_dim():
    assert problem_of(laid(2, 3, 300), laid(2, 3, 300), laid(2, 3, 0)).dim == 300


def test_numpy_scalars_are_numbers():
    problem = problem_of(
        laid(9, 8),
        scale=numpy.float32(0.5),
        softcap=numpy.int64(30),
        window=(numpy.int32(2), numpy.int64(1)),
        causal=numpy.False_,
    )
    assert (problem.scale, problem.softcap, problem.mask.left, problem.mask.right) == (0.5, 30.0, -2, 1)
    assert {type(problem.scale), type(problem.softcap)} == {float}
    assert {type(problem.mask.left), type(problem.mask.right)} == {int}


def test_scale_may_be_zero_or_negative():
    assert [problem_of(laid(2, 8), scale=scale).scale for scale in (0, -1.5)] == [0.0, -1.5]


def test_tf32_is_for_float32():
    assert problem_of(laid(2, 8, dtype="float32"), precision="tf32").precision == "tf32"


@pytest.mark.parametrize(
    "q, k, lse, empty",
    [
        ((0, 2, 3, 8), (1, 2, 4, 8), True, True),
        ((0, 3, 8), (0, 4, 8), True, True),
        ((0, 3, 8), (5, 4, 8), True, True),
        ((2, 0, 8), (2, 4, 8), True, True),
        ((2, 3, 8), (2, 0, 8), False, False),  # rows that see nothing are results too
    ],
)
def test_empty_means_nothing_to_compute(q, k, lse, empty):
    assert problem_of(laid(*q), laid(*k), return_lse=lse).empty is empty


@pytest.mark.parametrize("return_lse", [False, True])
def test_lse_of_an_empty_dim_v_is_still_computed(return_lse):
    problem = problem_of(laid(2, 3, 8), laid(2, 4, 8), laid(2, 4, 0), return_lse=return_lse)
    assert problem.empty is not return_lse


# Which keys a row sees

WINDOW_ENDS = st.none() | st.integers(-1, 12)


@settings(max_examples=150)
@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([False, True, "bottom_right", "top_left"]),
    st.none() | st.tuples(WINDOW_ENDS, WINDOW_ENDS),
)
def test_key_range_and_pairs(len_q, len_kv, causal, window):
    problem = problem_of(laid(len_q, 8), laid(len_kv, 8), causal=causal, window=window)
    row, key = numpy.mgrid[:len_q, :len_kv]
    distance = key - row - (0 if causal == "top_left" else len_kv - len_q)
    left, right = window or (None, None)
    seen = numpy.ones((len_q, len_kv), bool)
    if left not in (None, -1):
        seen &= distance >= -left
    if right not in (None, -1):
        seen &= distance <= right
    if causal:
        seen &= distance <= 0
    above = True if problem.mask.left is None else key >= row + problem.mask.left
    below = True if problem.mask.right is None else key <= row + problem.mask.right
    assert numpy.array_equal(seen, numpy.broadcast_to(above & below, seen.shape))
    assert problem.mask.pairs == seen.sum()


@pytest.mark.parametrize(
    "len_q, len_kv, options, expected",
    [
        (4, 4, {"causal": True}, (None, 0)),
        (4, 6, {"causal": True}, (None, 2)),
        (4, 6, {"causal": "top_left"}, (None, 0)),
        (1, 6, {"causal": True}, (None, None)),  # one new token sees all: no mask
        (4, 6, {"window": (10**30, 10**30)}, (None, None)),
        (4, 6, {"window": (5, 3)}, (None, None)),
        (4, 6, {"window": (4, 2)}, (-2, 4)),
        (4, 6, {"window": (1, 1), "causal": "top_left"}, (-1, 0)),
    ],
)
def test_bounds_that_exclude_nothing_are_dropped(len_q, len_kv, options, expected):
    problem = problem_of(laid(len_q, 8), laid(len_kv, 8), **options)
    assert (problem.mask.left, problem.mask.right) == expected


# Refusals: (arguments, exception, what the message must hold: argument, expected, got)

Q = laid(4, 10, 64)
GPU = laid(4, 10, 64, device=0)
REFUSALS = [
    ({"q": laid(64)}, ValueError, "q: expected at least 2 axes", "(64,)"),
    ({"k": laid()}, ValueError, "k: expected at least 2 axes", "()"),
    ({"q": laid(4, 10, 64, dtype="int32", alignment=16)}, TypeError, "q: expected float16", "int32"),
    ({"v": laid(4, 10, 64, dtype="float32")}, TypeError, "v: expected float16 (that of q)", "float32"),
    ({"k": GPU}, ValueError, "k: expected an array in host memory", "CUDA device 0"),
    ({"q": GPU, "v": laid(4, 10, 64, device=1)}, ValueError, "v: expected an array on CUDA device 0", "device 1"),
    ({"k": laid(4, 10, 64, alignment=1)}, ValueError, "k: expected an address divisible by", "2", "1 only"),
    ({"k": laid(4, 10, 80)}, ValueError, "k: expected head dim 64 (that of q)", "80"),
    ({"v": laid(4, 9, 64)}, ValueError, "v: expected 10 keys (those of k)", "9"),
    ({"v": laid(2, 10, 64)}, ValueError, "v: expected 4 heads (those of k)", "2"),
    ({"v": laid(10, 64)}, ValueError, "v: expected 4 heads (those of k)", "1"),
    ({"k": laid(3, 10, 64), "v": laid(3, 10, 64)}, ValueError, "q: expected a multiple of 3 heads", "4"),
    ({"k": laid(0, 10, 64), "v": laid(0, 10, 64)}, ValueError, "q: expected a multiple of 0 heads", "4"),
    ({"q": laid(2, 4, 10, 64), "k": laid(3, 4, 10, 64)}, ValueError, "k: expected batch axes", "(2,)", "(3,)"),
    ({"k": laid(2, 4, 10, 64), "v": laid(3, 4, 10, 64)}, ValueError, "v: expected batch axes", "(2,)", "(3,)"),
    ({"q": laid(4, 10, 0), "k": laid(4, 10, 0)}, ValueError, "q: expected head dim of at least 1", "got 0"),
    ({"q": laid(4, 1, 257, device=0)}, UnsupportedError, "q: expected head dim of 1 to 256", "'cuda'", "257"),
    ({"v": laid(4, 10, 257), "backend": "host"}, UnsupportedError, "v: expected head dim of 1 to 256", "'host'", "257"),
    ({"v": laid(4, 10, 0), "backend": "host"}, UnsupportedError, "v: expected head dim of 1 to 256", "got 0"),
    ({"q": laid(2, 8, dtype="float64", device=0)}, UnsupportedError, "q: expected float16", "'cuda'", "float64"),
    ({"q": laid(2, 8, dtype="float64"), "backend": "host"}, UnsupportedError, "q:", "'host'", "float64"),
    ({"scale": "1"}, TypeError, "scale: expected None or a real number", "'1'"),
    ({"scale": True}, TypeError, "scale: expected None or a real number", "True"),
    ({"scale": numpy.ones(1)}, TypeError, "scale: expected None or a real number", "array"),
    ({"scale": math.inf}, ValueError, "scale: expected a finite number", "inf"),
    ({"scale": math.nan}, ValueError, "scale: expected a finite number", "nan"),
    ({"causal": 1}, TypeError, "causal: expected one of (False, True, 'bottom_right', 'top_left')", "got 1"),
    ({"causal": "left"}, ValueError, "causal: expected one of (False, True, 'bottom_right', 'top_left')", "'left'"),
    ({"window": 4}, TypeError, "window: expected None or a pair (left, right)", "got 4"),
    ({"window": (4,)}, ValueError, "window: expected a pair (left, right)", "(4,)"),
    ({"window": (4, 1.5)}, TypeError, "window: expected integers or None", "1.5"),
    ({"window": (True, 0)}, TypeError, "window: expected integers or None", "True"),
    ({"window": (0, -2)}, ValueError, "window: expected ends of at least 0", "-2"),
    ({"softcap": 0.0}, ValueError, "softcap: expected None or a number above 0", "0.0"),
    ({"softcap": -math.inf}, ValueError, "softcap: expected a finite number", "-inf"),
    ({"softcap": "30"}, TypeError, "softcap: expected None or a real number", "'30'"),
    ({"precision": "fast"}, ValueError, "precision: expected one of (None, 'ieee', 'tf32')", "'fast'"),
    ({"precision": 32}, TypeError, "precision: expected one of (None, 'ieee', 'tf32')", "32"),
    ({"precision": "tf32"}, ValueError, "precision: expected None or 'ieee' for float16", "'tf32'"),
    ({"algorithm": "v3"}, ValueError, "algorithm: expected one of", "'v2'", "'v3'"),
    ({"algorithm": None}, TypeError, "algorithm: expected one of", "None"),
    ({"backend": "gpu"}, ValueError, "backend: expected one of", "'cuda'", "'gpu'"),
    ({"backend": None}, TypeError, "backend: expected one of", "None"),
    ({"backend": "cuda"}, ValueError, "backend: expected 'host' or 'numpy'", "'cuda'", "cupy.asarray"),
    ({"q": GPU, "backend": "host"}, ValueError, "backend: expected 'cuda'", "'host'", "cupy.asnumpy"),
    ({"q": GPU, "backend": "numpy"}, ValueError, "backend: expected 'cuda'", "'numpy'", "cupy.asnumpy"),
    ({"return_lse": 1}, TypeError, "return_lse: expected True or False", "got 1"),
    ({"out": laid(4, 10, 65)}, ValueError, "out: expected shape (4, 10, 64)", "(4, 10, 65)"),
    ({"out": laid(4, 10, 64, dtype="float32")}, TypeError, "out: expected float16", "float32"),
    ({"out": GPU}, ValueError, "out: expected an array in host memory", "CUDA device 0"),
    ({"out": laid(4, 10, 64, alignment=1)}, ValueError, "out: expected an address divisible by", "1 only"),
    ({"out": laid(4, 10, 64, strides=(0, 64, 1))}, ValueError, "out: expected elements apart", "(0, 64, 1)"),
    ({"out": laid(4, 10, 64, strides=(640, 63, 1))}, ValueError, "out: expected elements apart", "(640, 63, 1)"),
    ({"lse": laid(4, 10, dtype="float16")}, TypeError, "lse: expected float32", "float16"),
    ({"lse": laid(4, 9, dtype="float32")}, ValueError, "lse: expected shape (4, 10)", "(4, 9)"),
    ({"lse": laid(4, 10, dtype="float32", device=1)}, ValueError, "lse: expected an array in host memory", "device 1"),
    ({"lse": laid(4, 10, dtype="float32", strides=(1, 0))}, ValueError, "lse: expected elements apart", "(1, 0)"),
]


@pytest.mark.parametrize("arguments, exception, fragments", [(a, e, f) for a, e, *f in REFUSALS])
def test_refusals_name_argument_expected_and_got(arguments, exception, fragments):
    arguments = {"q": Q} | arguments
    with pytest.raises(exception) as raised:
        problem_of(**arguments)
    assert type(raised.value) is exception
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_zero_heads_need_no_divisor():
    assert problem_of(laid(0, 10, 64), laid(0, 10, 64)).seen_out.shape == (0, 10, 64)


# Memory shared between arguments


@pytest.mark.parametrize(
    "out, lse, refused",
    [
        (1128, 2000, None),  # q, of 64 float16 elements, ends where out begins
        (1127, 2000, "out: expected memory apart from that of q"),
        (872, 2000, None),
        (873, 2000, "out: expected memory apart from that of q"),
        (4000, 1100, "lse: expected memory apart from that of q"),
        (4000, 4100, "out: expected memory apart from that of lse"),
    ],
)
def test_results_share_no_memory(out, lse, refused):
    spans = {"q": (1000, 1128), "out": (out, out + 128), "lse": (lse, lse + 32)}
    if refused is None:
        check_overlap(spans, ("out", "lse"))
        return
    with pytest.raises(ValueError) as raised:
        check_overlap(spans, ("out", "lse"))
    assert refused in str(raised.value)


def test_inputs_may_overlap_and_empty_results_never_do():
    check_overlap({"q": (1000, 1128), "k": (1000, 1128), "out": (1010, 1010)}, ("out",))


def test_arrays_are_apart_where_nothing_is_refused():
    """What is asked without names says so of no overlap; it may ask for a closer look where there is none."""
    rng, names, closer = numpy.random.default_rng(6), ("q", "k", "out", "lse"), 0
    for _ in range(2000):
        addresses = (rng.integers(1000, 1040, 4) * (rng.random(4) < 0.9)).tolist()
        spans = [(low, low + size) for low, size in zip((-rng.integers(0, 3, 4)).tolist(), rng.integers(0, 5, 4).tolist())]
        given = {name: (at + low, at + high) for name, at, (low, high) in zip(names, addresses, spans) if at}
        try:
            check_overlap(given, ("out", "lse"))
            refused = False
        except ValueError:
            refused = True
        apart = are_apart(addresses, spans, [2, 3])
        assert not (apart and refused)
        closer += not apart and not refused
    assert closer < 200
