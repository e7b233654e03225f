"""The problem of a backward: what is accepted, the layouts of the gradients, and what each refusal says."""

import copy
import dataclasses
import math
import pickle
from itertools import pairwise

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash import attention, attention_backward
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan.grouping import Grouping
from cupy_flash.plan.params import backward_params, fast_divmod
from cupy_flash.plan.softcap import cap_polynomial
from cupy_flash.problem.backward import BACKWARD_ARRAYS, Gradients, make_backward_problem
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.options import Options


def laid(*shape, dtype="float16", device=None, strides=None, alignment=16):
    """A C-contiguous layout, unless strides are given."""
    dense = dense_layout(shape, reversed(range(len(shape))), dtype, device)
    return dataclasses.replace(dense, strides=strides or dense.strides, alignment=alignment)


BESIDES = ("dlse", "dq", "dk", "dv", "deterministic")


def problem_of(q, k=None, v=None, out=None, lse=None, dout=None, **others):
    """The problem of these inputs; `out`, `lse` and `dout` have the shapes of a forward unless they are given."""
    k = k or q
    v = v or k
    heads = q.shape[-3:-2] or (1,) * (len(k.shape) > 2)
    shape = numpy.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))) + heads + q.shape[-2:-1] + v.shape[-1:]
    out = out or laid(*shape, dtype=q.dtype, device=q.device)
    lse = lse or laid(*shape[:-1], dtype="float64" if q.dtype == "float64" else "float32", device=q.device)
    given = {name: others.pop(name) for name in BESIDES if name in others}
    return make_backward_problem(dout or out, q, k, v, out, lse, Options(**others), **given)


# Gradients are laid out like their inputs


def test_gradients_have_shape_and_memory_order_of_their_inputs():
    q = laid(2, 6, 10, 64, strides=(3840, 64, 384, 1))  # (batch, seq, heads, dim) in memory
    k, v = laid(3, 20, 64, strides=(64, 192, 1)), laid(1, 3, 20, 48)
    problem = problem_of(q, k, v)
    assert (problem.dq, problem.dk, problem.dv) == (q, k, v)


def test_gradients_of_views_are_dense():
    q = laid(2, 3, 10, 64, strides=(0, -1280, 128, 2))
    problem = problem_of(q)
    assert problem.dq == problem.dk == laid(2, 3, 10, 64)


@pytest.mark.parametrize("k, sums", [((2, 3, 20, 64), False), ((1, 3, 20, 64), True), ((3, 20, 64), True)])
def test_a_gradient_is_summed_over_the_axes_its_input_lacks(k, sums):
    problem = problem_of(laid(2, 3, 10, 64), laid(*k))
    assert (problem.dk.shape, problem.sums_keys) == (k, sums)
    full = problem.layouts["dk"]
    assert full.shape == (2, 3, 20, 64) and (full.strides[0] == 0) == sums


def test_gradient_of_queries_may_be_a_sum_as_well():
    problem = problem_of(laid(10, 64), laid(4, 2, 1, 20, 64))
    assert problem.dq == laid(10, 64) and not problem.sums_keys
    assert problem.layouts["dq"] == laid(4, 2, 1, 10, 64, strides=(0, 0, 0, 64, 1))


def test_a_view_with_stride_0_is_an_input_of_its_full_shape():
    problem = problem_of(laid(2, 3, 10, 64), laid(2, 3, 20, 64, strides=(0, 1280, 64, 1)))
    assert problem.dk == laid(2, 3, 20, 64) and not problem.sums_keys


def test_two_axes_are_one_head():
    problem = problem_of(laid(10, 64), laid(20, 64), dlse=laid(10, dtype="float32"))
    assert [layout.shape for layout in problem.layouts.values() if layout] == [
        (1, 10, 64), (1, 10, 64), (1, 20, 64), (1, 20, 64), (1, 10, 64), (1, 10), (1, 10), (1, 10, 64), (1, 20, 64), (1, 20, 64)
    ]  # fmt: skip
    assert (problem.dq, problem.dk) == (laid(10, 64), laid(20, 64))


def test_given_gradients_are_used_where_they_are():
    dk = laid(1, 3, 20, 64, strides=(9999, -64, 192, 1))
    problem = problem_of(laid(2, 3, 10, 64), laid(1, 3, 20, 64), dk=dk)
    assert problem.dk == dk and problem.layouts["dk"].strides == (0, -64, 192, 1)


def test_inputs_may_be_views_of_any_kind():
    """What the forward returned may have been broadcast or reversed since."""
    out, lse = laid(2, 3, 10, 64, strides=(0, -640, 64, 1)), laid(2, 3, 10, dtype="float32", strides=(0, 0, 0))
    problem = problem_of(laid(2, 3, 10, 64), out=out, lse=lse, dlse=lse)
    assert (problem.forward.out, problem.forward.lse, problem.dlse) == (out, lse, lse)


def test_flops_count_five_products():
    problem = problem_of(laid(2, 6, 10, 64), laid(2, 3, 20, 64), laid(2, 3, 20, 48))
    assert problem.flops == 2 * (3 * 64 + 2 * 48) * 200 * 6 * 2
    assert problem_of(laid(4, 64), causal=True).flops == 2 * 5 * 64 * 10


@pytest.mark.parametrize(
    "q, k, zero", [((0, 2, 3, 8), (1, 2, 4, 8), True), ((0, 3, 8), (2, 4, 8), True), ((2, 0, 8), (2, 0, 8), False)]
)
def test_zero_means_that_no_query_head_contributes(q, k, zero):
    assert problem_of(laid(*q), laid(*k)).zero is zero


# The struct


def test_a_problem_becomes_numbers():
    """Each number differs from the others, so that none can take another's place."""
    q, out = (dense_layout((2, 6, 10, dim), (3, 1, 2, 0), "float16", None) for dim in (64, 48))
    k, v = laid(3, 20, 64), laid(1, 3, 20, 48)
    given = {"dout": laid(2, 6, 10, 48), "dlse": laid(2, 6, 10, dtype="float32", strides=(1, 20, 2))}
    problem = problem_of(q, k, v, out, scale=0.3, softcap=5.0, window=(4, 2), backend="host", **given)
    params = backward_params(problem, Grouping(heads_per_block=1, heads_together=7, blocks=7, owners=42, accum_heads=6), maps={})[0]
    tensors = [name for name in BACKWARD_ARRAYS if name != "dsinks"]
    strides = {name: tuple(params[name][f"{axis}_stride"] for axis in ("head", "row", "col")) for name in tensors}
    assert strides == {
        "dout": (480, 48, 1),
        "q": (64, 384, 1),
        "k": (1280, 64, 1),
        "v": (960, 48, 1),
        "out": (48, 288, 1),
        "lse": (10, 1, 0),
        "dlse": (20, 2, 0),
        "sinks": (0, 0, 0),
        "dq": (64, 384, 1),
        "dk": (1280, 64, 1),
        "dv": (960, 48, 1),
    }
    assert [params[name]["batch_stride"][-1] for name in tensors] == [2880, 3840, 0, 0, 2880, 60, 1, 0, 3840, 0, 0]
    minus_square, factors = cap_polynomial(0.3, 5.0)
    assert [params["cap"]["minus_square"], *params["cap"]["factors"]] == pytest.approx([minus_square, *factors])
    assert {name: params[name].tolist() for name in params.dtype.names if name not in (*strides, "scores", "sequences", "cap")} == {
        **dict.fromkeys(("stats", "dq_accum", "dk_accum", "dv_accum", "dq_semaphore", "dq_progress", "dsinks", "sinks_of_head"), 0),
        "mask": (6, 12, fast_divmod(1), 0),
        "batch": [1, 1, 1, 2],
        "heads": 6,
        "heads_per_kv": 2,
        "heads_per_block": 1,
        "heads_together": 7,
        "len_q": 10,
        "len_kv": 20,
        "dim": 64,
        "dim_v": 48,
        "scale": pytest.approx(0.3),
        "softcap": 5.0,
        "per_softcap": pytest.approx(math.log(2) / 5),
    }


@given(st.lists(st.booleans(), min_size=2, max_size=5))
def test_axes_that_one_gradient_sums_over_are_not_merged_with_others(summed):
    """Neighbours along which keys are summed, or are not, may become one axis; a sum and no sum may not."""
    batch = (2,) * len(summed)
    k = laid(*(1 if s else n for s, n in zip(summed, batch)), 1, 4, 8)
    q = laid(*batch, 1, 4, 8)
    changes = 1 + sum(a != b for a, b in pairwise(summed))
    if changes > 4:
        with pytest.raises(UnsupportedError, match="merge to at most 4"):
            backward_params(problem_of(q, k, backend="host"), Grouping(1, 1, 1, 1, 1), {})
        return
    params = backward_params(problem_of(q, k, backend="host"), Grouping(1, 1, 1, 1, 1), {})[0]
    sizes = [size for size in params["batch"].tolist() if size > 1]
    assert numpy.prod(sizes) == numpy.prod(batch) and len(sizes) == changes
    steps = params["dk"]["batch_stride"][-changes:]
    assert numpy.prod(numpy.array(sizes)[steps == 0]) == 2 ** sum(summed)


# Refusals: (arguments, exception, what the message must hold: argument, expected, got)

Q = laid(4, 10, 64)
GPU = laid(4, 10, 64, device=0)
STATE = laid(4, 10, dtype="float32")
REFUSALS = [
    ({"k": laid(4, 10, 80)}, ValueError, "k: expected head dim 64 (that of q)", "80"),
    ({"out": laid(4, 10, 65)}, ValueError, "out: expected shape (4, 10, 64)", "(4, 10, 65)"),
    ({"out": laid(1, 4, 10, 64)}, ValueError, "out: expected shape (4, 10, 64)", "(1, 4, 10, 64)"),
    ({"out": laid(4, 10, 64, dtype="float32")}, TypeError, "out: expected float16", "float32"),
    ({"out": GPU}, ValueError, "out: expected an array in host memory", "CUDA device 0"),
    ({"lse": laid(4, 10, dtype="float16")}, TypeError, "lse: expected float32", "float16"),
    ({"lse": laid(4, 9, dtype="float32")}, ValueError, "lse: expected shape (4, 10)", "(4, 9)"),
    ({"dout": laid(4, 10, 64, dtype="float32")}, TypeError, "dout: expected float16", "float32"),
    ({"dout": laid(4, 10, 1)}, ValueError, "dout: expected shape (4, 10, 64)", "(4, 10, 1)"),
    ({"dout": laid(4, 10, 64, alignment=1)}, ValueError, "dout: expected an address divisible by", "1 only"),
    ({"dlse": laid(4, 10)}, TypeError, "dlse: expected float32", "float16"),
    ({"dlse": laid(4, 1, dtype="float32")}, ValueError, "dlse: expected shape (4, 10)", "(4, 1)"),
    ({"dq": laid(4, 10, 64, dtype="float32")}, TypeError, "dq: expected float16", "float32"),
    ({"dq": laid(4, 10, 64, strides=(0, 64, 1))}, ValueError, "dq: expected elements apart", "(0, 64, 1)"),
    ({"k": laid(1, 10, 64), "dk": laid(4, 10, 64)}, ValueError, "dk: expected shape (1, 10, 64)", "(4, 10, 64)"),
    ({"dv": GPU}, ValueError, "dv: expected an array in host memory", "CUDA device 0"),
    ({"deterministic": 1}, TypeError, "deterministic: expected True or False", "got 1"),
    ({"algorithm": "v1"}, UnsupportedError, "algorithm: expected 'auto' or 'v2' for a backward", "'v1'"),
    ({"softcap": 0.0}, ValueError, "softcap: expected None or a number above 0", "0.0"),
    ({"v": laid(4, 10, 257), "backend": "host"}, UnsupportedError, "v: expected head dim of 1 to 256", "257"),
]


@pytest.mark.parametrize("arguments, exception, fragments", [(a, e, f) for a, e, *f in REFUSALS])
def test_refusals_name_argument_expected_and_got(arguments, exception, fragments):
    with pytest.raises(exception) as raised:
        problem_of(**{"q": Q} | arguments)
    assert type(raised.value) is exception
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_float64_has_its_own_lse():
    q = laid(2, 3, 8, dtype="float64")
    assert problem_of(q, dlse=laid(2, 3, dtype="float64")).dlse.dtype == "float64"
    with pytest.raises(TypeError, match="lse: expected float64, got float32"):
        problem_of(q, lse=laid(2, 3, dtype="float32"))


@pytest.mark.parametrize(
    "name, other", [(name, other) for name in ("dq", "dk", "dv") for other in BACKWARD_ARRAYS if name != other]
)
def test_gradients_share_no_memory(name, other):
    """With an input or with each other, and nothing has been written when that is found."""
    q, k, v, dout = numpy.random.default_rng(0).standard_normal((4, 2, 10, 64), numpy.float32)
    out, lse = attention(q, k, v, return_lse=True)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": lse.copy()}
    arrays |= {gradient: numpy.zeros_like(q) for gradient in ("dq", "dk", "dv")}
    arrays |= {"sinks": numpy.zeros(2, "f4"), "dsinks": numpy.zeros(2, "f4")}
    memory = numpy.concatenate([arrays[name].ravel(), arrays[other].ravel()])
    arrays[name] = memory[: q.size].reshape(q.shape)
    arrays[other] = memory[q.size :].reshape(arrays[other].shape)
    attention_backward(**arrays)  # side by side is apart
    arrays[other] = memory[q.size - 1 : -1].reshape(arrays[other].shape)
    before = {key: x.copy() for key, x in arrays.items()}
    with pytest.raises(ValueError, match=r"d[qkv]: expected memory apart from that of"):
        attention_backward(**arrays)
    assert all(numpy.array_equal(before[key], x) for key, x in arrays.items())


def test_gradients_keep_their_attributes():
    grads = Gradients(1, 2, 3, dsinks=4, dbias=5, dalibi_slopes=6, darrays={"t": 7})
    other = grads._replace(dk=8)
    assert tuple(other) == (1, 8, 3) and type(other) is Gradients and vars(other) == vars(grads)
    assert vars(grads._replace(dsinks=9)) == vars(grads) | {"dsinks": 9}
    assert vars(copy.deepcopy(grads)) == vars(pickle.loads(pickle.dumps(grads))) == vars(grads)
    with pytest.raises(ValueError, match="dx"):
        grads._replace(dx=1)
    for plain in (Gradients(1, 2, 3), Gradients._make([1, 2, 3])):
        assert vars(plain) == {"dsinks": None, "dbias": None, "dalibi_slopes": None, "darrays": {}}
    assert Gradients(1, 2, 3).darrays is not Gradients(1, 2, 3).darrays
