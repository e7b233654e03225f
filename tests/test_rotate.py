"""rotate: rotary position embedding against complex numbers, on NumPy and by the kernel."""

import dataclasses
import math
from itertools import product

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary import BACKENDS_AND_DTYPES, DTYPES, angles, bits, check, noise, normal, untouched
from thinned import thinned

from cupy_flash import UnsupportedError, rotate
from cupy_flash.call import rotate as call
from cupy_flash.machine import prepared
from cupy_flash.machine.operands import Operands
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.rotate import make_rotate_plan, rotate_launches, rotate_plan
from cupy_flash.plan.rotation_params import rotate_params
from cupy_flash.problem import arrays
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.rotate import ROTATE_ARRAYS, make_rotate_problem

backends = pytest.mark.parametrize("backend", ["host", "numpy"])


def laid(*shape, dtype="float16", device=None, strides=None):
    """A C-contiguous layout, unless strides are given."""
    dense = dense_layout(shape, reversed(range(len(shape))), dtype, device)
    return dataclasses.replace(dense, strides=strides or dense.strides)


def positions_of(kind, rng, batch, seq, rows):
    """What a call is given as positions, and the position of each row."""
    if kind == "none":
        return None, numpy.arange(seq)
    if kind == "number":
        return rows - seq, numpy.arange(rows - seq, rows)
    if kind == "first":
        first = rng.integers(0, rows - seq + 1, batch)
        return first, first[..., None] + numpy.arange(seq)
    each = rng.integers(0, rows, (*((1,) * len(batch) if kind == "shared" else batch), seq))
    return each, each


@pytest.mark.parametrize("backend, dtypes", BACKENDS_AND_DTYPES)
@settings(max_examples=30)
@given(data=st.data())
def test_rows_are_rotated_by_the_angles_of_their_positions(backend, dtypes, data):
    dtype = data.draw(st.sampled_from(dtypes))
    dim = data.draw(st.sampled_from([1, 2, 7, 8, 30, 64, 80, 128, 300]))
    pairs = data.draw(st.integers(0, dim // 2) | st.sampled_from([dim // 2, dim // 4]))
    batch = data.draw(st.sampled_from([(), (1,), (3,), (2, 3)]))
    heads, seq = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 5, 31, 33, 70]))
    rows = seq + data.draw(st.integers(0, 50))
    interleaved = data.draw(st.booleans())
    rng = numpy.random.default_rng(0)
    cos, sin = angles(rows, pairs, data.draw(st.sampled_from(["float32", dtype])))
    given, of_rows = positions_of(data.draw(st.sampled_from(["none", "number", "first", "each", "shared"])), rng, batch, seq, rows)
    if isinstance(given, numpy.ndarray):
        given = given.astype(data.draw(st.sampled_from(["int32", "int64"])))
    x = normal(rng, *batch, heads, seq, dim, dtype=dtype)
    layout = data.draw(st.sampled_from(["bhsd", "bshd"]))
    as_seen = x if layout == "bhsd" else x.swapaxes(-2, -3).copy()
    found = rotate(as_seen, cos, sin, positions=given, interleaved=interleaved, layout=layout, backend=backend)
    assert found.strides == as_seen.strides
    check(found if layout == "bhsd" else found.swapaxes(-2, -3), x, cos, sin, of_rows, interleaved)


@pytest.mark.parametrize("schedule", ["eager", "deferred"])
@pytest.mark.parametrize("kind", thinned(product(("float16", "float32"), ("75", "80", "90a"))), ids="-".join)
def test_every_architecture_rotates(kind, schedule, monkeypatch):
    dtype, arch = kind
    monkeypatch.setattr(prepared, "HOST", ARCHITECTURES[arch])
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    call._prepared.cache_clear()
    rng = numpy.random.default_rng(0)
    x, (cos, sin) = normal(rng, 2, 3, 40, 64, dtype=dtype), angles(50, 24)
    for interleaved in (False, True):
        found = rotate(x, cos, sin, positions=10, interleaved=interleaved, backend="host")
        check(found, x, cos, sin, numpy.arange(10, 50), interleaved)
    call._prepared.cache_clear()


@backends
def test_axes_that_are_left_out_and_orders_of_axes(backend):
    rng, (cos, sin) = numpy.random.default_rng(0), angles(20, 4)
    x = normal(rng, 1, 1, 20, 10, dtype="float32")
    whole = rotate(x, cos, sin, backend=backend)
    assert numpy.array_equal(rotate(x[0], cos, sin, backend=backend), whole[0])
    for layout in ("bhsd", "bshd"):  # two axes are one head in both
        assert numpy.array_equal(rotate(x[0, 0], cos, sin, layout=layout, backend=backend), whole[0, 0])
    first = rotate(x[0, 0, 3:], cos, sin, positions=numpy.array(3), backend=backend)
    assert numpy.array_equal(first, rotate(x[0, 0, 3:], cos, sin, positions=numpy.arange(3, 20), backend=backend))


@backends
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_views_are_read_and_written_in_place(backend, dtype):
    rng, (cos, sin) = numpy.random.default_rng(0), angles(60, 12)
    x = normal(rng, 2, 3, 20, 30, dtype=dtype)
    memory = noise(rng, 2, 20, 6, 90, dtype=dtype)
    view = memory[::-1, :, ::-2, 1::3].swapaxes(1, 2)
    view[...] = x
    tables = [numpy.repeat(t, 2, 1)[::-1, ::-2][::-1, ::-1] for t in (cos, sin)]
    positions = numpy.broadcast_to(numpy.int32(7), (2,))
    out = noise(rng, 3, 40, 2, 31, dtype=dtype)
    expected = out.copy()
    into = out[:, ::-2, :, :30].transpose(2, 0, 1, 3)
    assert rotate(view, *tables, positions=positions, out=into, backend=backend) is into
    check(into, x, cos, sin, numpy.arange(7, 27), False)
    expected[:, ::-2, :, :30] = out[:, ::-2, :, :30]
    assert bits(out) == bits(expected)
    shared = numpy.broadcast_to(x[:, :1], x.shape)
    assert numpy.array_equal(rotate(shared, cos, sin, backend=backend)[:, 2], rotate(x[:, 0:1], cos, sin, backend=backend)[:, 0])


@backends
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim, pairs", [(64, 32), (64, 8), (33, 5)])
def test_in_place(backend, dim, pairs, interleaved):
    rng, (cos, sin) = numpy.random.default_rng(0), angles(70, pairs)
    x = normal(rng, 2, 3, 70, dim, dtype="float16")
    expected = rotate(x, cos, sin, interleaved=interleaved, backend=backend)
    assert rotate(x, cos, sin, interleaved=interleaved, backend=backend, out=x) is x
    assert bits(x) == bits(expected)
    memory = normal(rng, 2, 80, dim, dtype="float16")
    with pytest.raises(ValueError, match=r"^out: expected memory apart from that of x \("):
        rotate(memory[:, :70], cos, sin, interleaved=interleaved, backend=backend, out=memory[:, 1:71])


@backends
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_inverse_gives_the_rows_back_and_is_the_gradient(backend, interleaved):
    rng, (cos, sin) = numpy.random.default_rng(0), angles(200, 20)
    x, dout = normal(rng, 2, 4, 100, 48, dtype="float32"), normal(rng, 2, 4, 100, 48, dtype="float32")
    options = {"positions": rng.integers(0, 200, (2, 100)), "interleaved": interleaved, "backend": backend}
    assert abs(rotate(rotate(x, cos, sin, **options), cos, -sin, **options) - x).max() <= 2.0**-20
    change = normal(rng, *x.shape, dtype="float32")
    by_gradient = (rotate(dout, cos, -sin, **options).astype(float) * change).sum()
    assert math.isclose(by_gradient, (dout.astype(float) * rotate(change, cos, sin, **options)).sum(), rel_tol=1e-4)


@backends
@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_of_positions(backend, interleaved):
    rng, (cos, sin) = numpy.random.default_rng(0), angles(3000, 32)
    q, k = normal(rng, 2, 1, 1, 64, dtype="float32")
    options = {"interleaved": interleaved, "backend": backend}
    scores = [
        (rotate(q, cos, sin, positions=at + 37, **options) * rotate(k, cos, sin, positions=at, **options)).sum()
        for at in (0, 1, 500, 2900)
    ]
    assert max(scores) - min(scores) <= 2.0**-10 and abs(scores[0] - (q * k).sum()) > 0.1


def test_float64_stays_float64():
    rng, (cos, sin) = numpy.random.default_rng(0), angles(40, 6, "float64")
    x = normal(rng, 2, 40, 16, dtype="float64")
    check(rotate(x, cos, sin), x, cos, sin, numpy.arange(40), False)
    check(rotate(x, cos.astype("f4"), sin.astype("f4")), x, cos.astype("f4"), sin.astype("f4"), numpy.arange(40), False)
    with pytest.raises(UnsupportedError, match="x: expected float16, bfloat16 or float32 on backend 'host', got float64"):
        rotate(x, cos, sin, backend="host")


@pytest.mark.parametrize("wide", ["int32", "int64"])
def test_positions_that_only_a_device_reads_are_taken_for_the_nearest(wide):
    """As if the host could not read them: the kernel sees whatever there is."""
    rng, (cos, sin) = numpy.random.default_rng(0), angles(30, 8)
    x = normal(rng, 4, 2, 5, 16, dtype="float32")
    for first in ([0, 28, -3, numpy.iinfo(wide).max], [-(2**31), 30, 25, 2**31 - 1]):
        each = numpy.clip(numpy.array(first)[:, None].astype(object) + numpy.arange(5), 0, 29).astype(int)
        rows = numpy.clip(numpy.array(first)[:, None].astype(object) - 2 * numpy.arange(5), numpy.iinfo(wide).min, None)
        for positions, expected in ((first, each), (rows, numpy.clip(rows, 0, 29).astype(int))):
            given = Operands(ROTATE_ARRAYS, (x, cos, sin, numpy.array(positions, wide), None), required=3, results=1)
            options = (("interleaved", False), ("layout", "bhsd"), ("backend", "host"))
            check(call._prepared(tuple(given.descriptions), options, ()).run(given, None, {}), x, cos, sin, expected, False)


@backends
@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8), (2, 2, 5, 0)])
def test_nothing_to_rotate(backend, shape):
    x = numpy.zeros(shape, numpy.float16)
    cos, sin = angles(0 if 0 in shape[:3] else 5, min(2, shape[3] // 2))
    assert rotate(x, cos, sin, backend=backend).shape == shape


def test_offsets_beyond_two_to_the_31_elements():
    """Rows and batch elements so far apart in memory of which only what is touched exists."""
    strides = 2 * (2**33 + 128), 2 * 2**32, 2 * (2**30 + 64), 2
    x = numpy.ndarray((2, 2, 3, 64), numpy.float16, untouched(32 << 30), strides=strides)
    values = normal(numpy.random.default_rng(0), *x.shape, dtype="float16")
    x[...] = values
    cos, sin = angles(3, 32)
    rotate(x, cos, sin, out=x, backend="host")
    check(x.copy(), values, cos, sin, numpy.arange(3), False)


X, ANGLES = laid(2, 4, 10, 32), laid(20, 8, dtype="float32")
FIRST, EACH = laid(2, dtype="int32"), laid(2, 10, dtype="int64")
REFUSALS = [
    ({"x": laid(8)}, ValueError, "x: expected at least 2 axes, (..., heads, seq, dim), got shape (8,)"),
    ({"x": laid(2, 5, 8, dtype="int32")}, TypeError, "x: expected float16, bfloat16, float32 or float64, got int32"),
    ({"cos": laid(20, 8, dtype="bfloat16")}, TypeError, "cos: expected float32 or float16, got bfloat16"),
    ({"cos": laid(8, dtype="float32")}, ValueError, "cos: expected 2 axes, (positions, rotary_dim / 2), got shape (8,)"),
    ({"cos": laid(20, 8, dtype="float32", device=0)}, ValueError, "cos: expected an array in host memory (like x), got one"),
    ({"cos": laid(20, 17, dtype="float32"), "sin": laid(20, 17, dtype="float32")}, ValueError, "cos: expected at most 16 columns"),
    ({"cos": laid(0, 8, dtype="float32"), "sin": laid(0, 8, dtype="float32")}, ValueError, "cos: expected at least 1 row, got 0"),
    ({"sin": laid(20, 8)}, TypeError, "sin: expected float32 (that of cos), got float16"),
    ({"sin": laid(20, 7, dtype="float32")}, ValueError, "sin: expected shape (20, 8) (that of cos), got (20, 7)"),
    ({"positions": laid(2, dtype="float32")}, TypeError, "positions: expected int32 or int64, got float32"),
    ({"positions": laid(3, dtype="int32")}, ValueError, "positions: expected shape (2,) for first rows or (2, 10) for each row"),
    ({"positions": laid(10, dtype="int32")}, ValueError, "got (10,); positions[None] are those of every batch element"),
    (
        {"positions": laid(2, 9, dtype="int32")},
        ValueError,
        "expected shape (2,) for first rows or (2, 10) for each row, got (2, 9)",
    ),
    ({"positions": laid(2, dtype="int32", device=1)}, ValueError, "positions: expected an array in host memory (like x), got"),
    ({"out": laid(2, 4, 10, 16)}, ValueError, "out: expected shape (2, 4, 10, 32), got (2, 4, 10, 16)"),
    ({"out": laid(2, 4, 10, 32, dtype="float32")}, TypeError, "out: expected float16, got float32"),
    ({"out": laid(2, 4, 10, 32, strides=(0, 320, 32, 1))}, ValueError, "out: expected elements apart from each other, got strides"),
    ({"interleaved": 1}, TypeError, "interleaved: expected True or False, got 1"),
    ({"layout": "sbhd"}, ValueError, "layout: expected one of ('bhsd', 'bshd'), got 'sbhd'"),
    ({"backend": "cuda"}, ValueError, "backend: expected 'host' or 'numpy' for arrays in host memory, got 'cuda'"),
]


@pytest.mark.parametrize("arguments, exception, message", REFUSALS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_refusals_name_argument_expected_and_got(arguments, exception, message):
    given = {"x": X, "cos": ANGLES, "sin": ANGLES, "positions": None, "out": None}
    given |= {"interleaved": False, "layout": "bhsd", "backend": "auto"} | arguments
    with pytest.raises(exception) as raised:
        make_rotate_problem(**given)
    assert message in str(raised.value)


@backends
@pytest.mark.parametrize(
    "positions, said",
    [
        (None, "cos: expected at least 10 rows, for as many rows of x without positions, got 9"),
        (0, "positions: expected positions of at least 0 and below 9, the rows of cos, for each of 10 rows, got 0"),
        (-1, "for each of 10 rows, got -1"),
        (2**70, f"for each of 10 rows, got {2**70}"),
        (numpy.array([0, 1]), "for each of 10 rows, got 0 at 0"),
        (numpy.tile(numpy.arange(10), (2, 1)), "positions of at least 0 and below 9, the rows of cos, got 9 at (0, 9)"),
        (numpy.full((1, 10), -1, numpy.int32), "got -1 at (0, 0)"),
    ],
    ids=str,
)
def test_positions_without_angles_are_refused_and_nothing_is_written(backend, positions, said):
    x, out = normal(numpy.random.default_rng(0), 2, 2, 4, 10, 32, dtype="float16")
    before = bits(out)
    with pytest.raises(ValueError, match=r"^(positions|cos): ") as raised:
        rotate(x, *angles(9, 8), positions=positions, out=out, backend=backend)
    assert said in str(raised.value) and bits(out) == before


@pytest.mark.parametrize("positions", [True, 1.5, [0, 1], "0"], ids=str)
def test_what_are_no_positions(positions):
    with pytest.raises(TypeError, match=r"^positions: expected "):
        rotate(numpy.zeros((2, 4, 10, 32), numpy.float32), *angles(20, 8), positions=positions)


def test_what_turing_lacks_is_refused():
    with pytest.raises(UnsupportedError, match="x: expected float16 or float32 on sm_75"):
        rotate_plan(ARCHITECTURES["75"], "bfloat16")


@pytest.mark.parametrize(
    "shape, pairs, copy_bytes, said",
    [
        ((2, 4, 10, 64), 32, 16, None),
        ((2, 4, 10, 64), 16, 16, None),
        ((2, 4, 10, 64), 12, 8, "copies of 8 bytes: 12 pairs of a row have 24 bytes on either side"),
        ((2, 4, 10, 64), 5, 0, "copies of single elements: 5 pairs of a row have 10 bytes on either side"),
        ((2, 4, 10, 66), 32, 4, "copies of 4 bytes: rows of x have 132 bytes"),
    ],
)
def test_the_most_bytes_that_may_move_at_once(shape, pairs, copy_bytes, said):
    tables = laid(20, pairs, dtype="float32")
    problem = make_rotate_problem(laid(*shape), tables, tables, None, None, interleaved=False, layout="bhsd", backend="host")
    plan = make_rotate_plan(problem, ARCHITECTURES["80"])
    assert copy_bytes == plan.config.COPY_BYTES and list(plan.reasons[1:]) == ([said] if said else [])
    assert rotate_launches(plan, problem)[0].blocks == 2 * 2  # of 4 times 10 rows, 32 each
    assert rotate_params(plan, problem)["in_fours"] == (copy_bytes in (8, 16) and pairs % 4 == 0)


def test_a_problem_becomes_numbers():
    x, positions = laid(3, 4, 10, 64, strides=(0, 640, -64, 1)), laid(3, 1, dtype="int64", strides=(-2, 7))
    tables = laid(20, 16, dtype="float32", strides=(32, 2))
    problem = make_rotate_problem(x, tables, tables, positions, None, interleaved=True, layout="bhsd", backend="host")
    params = rotate_params(make_rotate_plan(problem, ARCHITECTURES["90a"]), problem)[0]
    axes = ("batch", "head", "row", "col")
    strides = {name: tuple(params[name][f"{axis}_stride"].tolist() for axis in axes) for name in ("x", "out", "cos", "sin")}
    assert strides == {
        "x": ([0, 0, 0, 0], 640, -64, 1),
        "out": ([0, 0, 0, 2560], 640, 64, 1),
        "cos": ([0, 0, 0, 0], 0, 32, 2),
        "sin": ([0, 0, 0, 0], 0, 32, 2),
    }
    found = params["positions"]
    assert (found["batch_stride"].tolist(), found["row_stride"], found["wide"]) == ([0, 0, 0, -2], 0, 1)
    numbers = ("position_of_each", "pairs", "positions_end", "interleaved", "float32_angles", "in_fours", "rows", "dim")
    assert [int(params[name]) for name in numbers] == [1, 16, 20, 1, 1, 0, 40, 64]
    assert params["batch"].tolist() == [1, 1, 1, 3] and params["chunks_divmod"].tolist()[0] == 6  # 2 of pairs, and 4 behind them


@pytest.mark.parametrize(
    "x, said",
    [
        (laid(1, 2**20, 2**12, 0), "x: expected fewer than 2147483648 rows of all heads, got 4294967296"),
        (laid(1, 1, 2**30, 0), "x: expected fewer than 1073741824 rows of a head, got 1073741824"),
        (laid(1, 1, 1, 2**24), "x: expected head dim below 16777216, got 16777216"),
    ],
)
def test_sizes_beyond_what_the_kernel_counts(x, said):
    tables = laid(1, 0, dtype="float32")
    problem = make_rotate_problem(x, tables, tables, None, None, interleaved=False, layout="bhsd", backend="host")
    with pytest.raises(UnsupportedError, match=said):
        rotate_params(make_rotate_plan(problem, ARCHITECTURES["80"]), problem)


def test_a_plan_says_what_it_is():
    x, (cos, sin) = numpy.zeros((2, 4, 10, 64), ml_dtypes.bfloat16), angles(20, 16)
    given = Operands(ROTATE_ARRAYS, (x, cos, sin, None, None), required=3, results=1)
    options = (("interleaved", True), ("layout", "bhsd"), ("backend", "host"))
    plan = call._prepared(tuple(given.descriptions), options, ())
    assert str(plan) == "rotation of bfloat16, shape (2, 4, 10, 64), 16 pairs of neighbours, on backend 'host'"
    assert repr(plan).startswith("<RotatePlan by rotate-sm_80-bfloat16-d32-32x16-w4-copy16: rotation of ")
    assert arrays.description_of(plan.problem.seen[0]) == given.descriptions[0] and DTYPES["bfloat16"] == x.dtype
