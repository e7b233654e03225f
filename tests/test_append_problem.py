"""What append_kv is asked: arguments that are refused, and what a problem becomes for the kernel."""

import dataclasses

import numpy
import pytest

from cupy_flash import UnsupportedError, append_kv
from cupy_flash.call import append as call
from cupy_flash.plan.append import append_launches, append_plan, make_append_plan
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.rotation_params import append_params
from cupy_flash.problem.append import APPEND_ARRAYS, make_append_problem
from cupy_flash.problem.layout import dense_layout


def laid(*shape, dtype="float16", device=None, strides=None):
    """A C-contiguous layout, unless strides are given."""
    dense = dense_layout(shape, reversed(range(len(shape))), dtype, device)
    return dataclasses.replace(dense, strides=strides or dense.strides)


OK = {"k": (4, 2, 3, 16), "v": (4, 2, 3, 8), "k_cache": (4, 2, 10, 16), "v_cache": (4, 2, 10, 8)}
SHAPES = {name: laid(*shape) for name, shape in OK.items()}
LENGTHS, TABLES = laid(4, dtype="int32"), laid(4, 3, dtype="int32")
ANGLES = laid(20, 8, dtype="float32")
REFUSALS = [
    ({"k": laid(2, 3, 16)}, ValueError, "k: expected at least 4 axes, (..., heads, seq, dim), got shape (2, 3, 16)"),
    ({"v": laid(1, 4, 2, 3, 8)}, ValueError, "v: expected 4 axes, (batch, heads, seq, dim), got shape (1, 4, 2, 3, 8)"),
    ({"k_cache": laid(1, 4, 2, 10, 16), "pages": TABLES}, ValueError, "k_cache: expected 4 axes, (pages, heads, seq, dim), got"),
    ({"k": laid(4, 2, 3, 16, dtype="int8")}, TypeError, "k: expected float16, bfloat16, float32 or float64, got int8"),
    ({"v": laid(4, 2, 3, 8, dtype="float32")}, TypeError, "v: expected float16, got float32"),
    ({"v": laid(4, 2, 4, 8)}, ValueError, "v: expected shape (4, 2, 3, 8), got (4, 2, 4, 8)"),
    ({"k_cache": laid(4, 2, 10, 16, dtype="bfloat16")}, TypeError, "k_cache: expected float16, got bfloat16"),
    ({"k_cache": laid(4, 2, 10, 12)}, ValueError, "k_cache: expected shape (4, 2, 10, 16), got (4, 2, 10, 12)"),
    ({"k_cache": laid(5, 2, 10, 16)}, ValueError, "k_cache: expected shape (4, 2, 10, 16), got (5, 2, 10, 16)"),
    ({"k_cache": laid(4, 2, 10, 16, device=0)}, ValueError, "k_cache: expected an array in host memory (like k), got one"),
    (
        {"k_cache": laid(4, 2, 10, 16, strides=(320, 160, 0, 1))},
        ValueError,
        "k_cache: expected elements apart from each other, got",
    ),
    ({"v_cache": laid(4, 2, 11, 8)}, ValueError, "v_cache: expected shape (4, 2, 10, 8), got (4, 2, 11, 8)"),
    ({"seqlens": laid(4, dtype="float32")}, TypeError, "seqlens: expected int32 or int64, got float32"),
    ({"seqlens": laid(5, dtype="int32")}, ValueError, "seqlens: expected shape (4,), got (5,)"),
    ({"seqlens_new": laid(4, 1, dtype="int32")}, ValueError, "seqlens_new: expected shape (4,), got (4, 1)"),
    ({"cache_batch_idx": laid(4, dtype="uint8")}, TypeError, "cache_batch_idx: expected int32 or int64, got uint8"),
    ({"cache_batch_idx": LENGTHS, "pages": TABLES}, ValueError, "cache_batch_idx: expected None with pages, which"),
    ({"pages": LENGTHS}, ValueError, "pages: expected 2 axes, (batch, pages of a sequence), got shape (4,)"),
    ({"pages": laid(3, 3, dtype="int32")}, ValueError, "pages: expected shape (4, 3), got (3, 3)"),
    ({"pages": laid(4, 3, dtype="int32", device=0)}, ValueError, "pages: expected an array in host memory (like k), got one"),
    (
        {"pages": TABLES, "k_cache": laid(9, 2, 0, 16), "v_cache": laid(9, 2, 0, 8)},
        ValueError,
        "k_cache: expected pages of at least",
    ),
    ({"cos": ANGLES}, ValueError, "sin: expected an array with cos, got None"),
    ({"sin": ANGLES}, ValueError, "sin: expected None without cos, got an array"),
    ({"positions": LENGTHS}, ValueError, "positions: expected None without cos, got an array"),
    ({"interleaved": True}, ValueError, "interleaved: expected False without cos, got True"),
    ({"interleaved": "yes"}, TypeError, "interleaved: expected True or False, got 'yes'"),
    ({"cos": laid(20, 9), "sin": laid(20, 9)}, ValueError, "cos: expected at most 8 columns, one for two elements of a row of k"),
    ({"cos": ANGLES, "sin": ANGLES, "positions": laid(3, dtype="int32")}, ValueError, "positions: expected shape (4,) for first"),
    ({"layout": "sbhd"}, ValueError, "layout: expected one of ('bhsd', 'bshd'), got 'sbhd'"),
    ({"backend": "cuda"}, ValueError, "backend: expected 'host' or 'numpy' for arrays in host memory, got 'cuda'"),
]


@pytest.mark.parametrize("arguments, exception, message", REFUSALS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_refusals_name_argument_expected_and_got(arguments, exception, message):
    options = {"interleaved": False, "layout": "bhsd", "backend": "auto"}
    options |= {name: arguments[name] for name in options if name in arguments}
    given = dict.fromkeys(APPEND_ARRAYS) | SHAPES | {"seqlens": LENGTHS}
    given |= {name: layout for name, layout in arguments.items() if name not in options}
    with pytest.raises(exception) as raised:
        make_append_problem(given, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "v", "seqlens"])
@pytest.mark.parametrize("wrong", [None, [1, 2]], ids=str)
def test_no_array_can_be_left_out(name, wrong):
    given = {name: numpy.zeros(shape, numpy.float16) for name, shape in OK.items()} | {"seqlens": 0}
    with pytest.raises(TypeError, match=rf"^{name}: expected a NumPy or CuPy array or one with .* got "):
        append_kv(**given | {name: wrong})


@pytest.mark.parametrize("seqlens", [True, 1.5], ids=str)
def test_what_is_no_length(seqlens):
    given = {name: numpy.zeros(shape, numpy.float16) for name, shape in OK.items()}
    with pytest.raises(TypeError, match=r"^seqlens: expected an integer or an array of integers, got "):
        append_kv(**given, seqlens=seqlens)


def test_a_cache_has_to_be_writable():
    given = {name: numpy.zeros(shape, numpy.float16) for name, shape in OK.items()}
    given["v_cache"].flags.writeable = False
    with pytest.raises(ValueError, match=r"^v_cache: expected a writable array"):
        append_kv(**given, seqlens=0)


def test_what_turing_lacks_is_refused():
    with pytest.raises(UnsupportedError, match="k: expected float16 or float32 on sm_75"):
        append_plan(ARCHITECTURES["75"], "bfloat16")


def problem_of(**given):
    return make_append_problem(
        dict.fromkeys(APPEND_ARRAYS) | SHAPES | {"seqlens": LENGTHS} | given, interleaved=False, layout="bhsd", backend="host"
    )


def test_a_problem_becomes_numbers():
    pages = laid(4, 3, dtype="int64", strides=(0, -1))
    problem = problem_of(pages=pages, k_cache=laid(9, 2, 4, 16), v_cache=laid(9, 2, 4, 8), cos=ANGLES, sin=ANGLES)
    plan = make_append_plan(problem, ARCHITECTURES["90a"])
    assert plan.config.COPY_BYTES == 16 and [launch.blocks for launch in append_launches(plan, problem)] == [4]
    params = append_params(plan, problem)[0]
    assert params["k_cache"]["batch_stride"].tolist() == [0, 0, 0, 128] and params["v_cache"]["head_stride"] == 32
    assert params["k"]["batch_stride"].tolist() == [0, 0, 0, 96] and params["batch"].tolist() == [1, 1, 1, 4]
    found = params["pages"]
    assert (found["batch_stride"].tolist(), found["row_stride"], found["wide"]) == ([0, 0, 0, 0], -1, 1)
    assert (params["seqlens"]["batch_stride"].tolist(), params["seqlens"]["wide"]) == ([0, 0, 0, 1], 0)
    numbers = ("rows", "dim", "dim_v", "page_count", "capacity", "pairs", "in_fours")
    assert [int(params[name]) for name in numbers] == [6, 16, 8, 9, 12, 8, 1]
    divisors = ("len_divmod", "page_divmod", "k_chunks_divmod", "v_chunks_divmod")
    assert [params[name].tolist()[0] for name in divisors] == [3, 4, 1, 1]


def test_a_capacity_beyond_what_the_kernel_counts():
    problem = problem_of(pages=laid(4, 2**25, dtype="int32"), k_cache=laid(9, 2, 32, 16), v_cache=laid(9, 2, 32, 8))
    with pytest.raises(UnsupportedError, match="k_cache: expected fewer than 1073741824 rows of a sequence, got 1073741824"):
        append_params(make_append_plan(problem, ARCHITECTURES["80"]), problem)


def test_a_plan_says_what_it_is():
    plan = call.AppendPlan(problem_of(), append_plan(ARCHITECTURES["80"], "float16"))
    assert str(plan) == "append of 3 rows of float16 to 4 sequences of 10 rows, on backend 'host'"
    paged = problem_of(pages=TABLES, k_cache=laid(9, 2, 4, 16), v_cache=laid(9, 2, 4, 8))
    plan = call.AppendPlan(paged, append_plan(ARCHITECTURES["80"], "float16"))
    assert str(plan).startswith("append of 3 rows of float16 to 4 sequences of 12 rows in 9 pages of 4, on")
