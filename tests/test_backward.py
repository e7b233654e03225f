"""Calls for gradients on NumPy and on the host: results, memory, workspace, counts, and the function of attention_vjp."""

from functools import partial

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import thinned

from cupy_flash import Gradients, attention, attention_backward, attention_vjp, plan_attention, plan_attention_backward
from cupy_flash.call.backward import _prepared
from cupy_flash.judge.cases import Case, make_inputs, quick_cases
from cupy_flash.judge.compare import ARITHMETIC, TAIL, norms, score_errors
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.judge.oracle_gradients import pairs_of

backends = pytest.mark.parametrize("backend", ["host", "numpy"])


def arguments(q, k=None, v=None, dtype=numpy.float16, **forward):
    """Everything that a backward takes, for inputs of these shapes: dout, q, k, v, out, lse."""
    rng = numpy.random.default_rng(0)
    k = k or q
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in (q, k, v or k))
    out, lse = attention(q, k, v, return_lse=True, **forward)
    return rng.standard_normal(out.shape).astype(dtype), q, k, v, out, lse


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse"])
def test_no_input_can_be_left_out(name):
    given = dict(zip(("dout", "q", "k", "v", "out", "lse"), arguments((2, 9, 16)))) | {name: None}
    with pytest.raises(TypeError, match=f"^{name}: expected a NumPy or CuPy array or one with .* got NoneType"):
        attention_backward(**given)


# Results

def test_keys_that_do_not_exist_take_no_part():
    """Scores near -256 have a log-sum-exp beside which the score 0 of a row of zeros would be e^256."""
    rng = numpy.random.default_rng(0)
    q, k = (numpy.full((1, length, 64), number, numpy.float16) for length, number in ((50, 2.0), (70, -2.0)))
    v, dout = (rng.standard_normal((1, length, 64)).astype(numpy.float16) for length in (70, 50))
    state = attention(q, k, v, scale=1.0, return_lse=True)
    gradients = attention_backward(dout, q, k, v, *state, scale=1.0, backend="host")
    judged = compare_gradients(gradients, dout, q, k, v, scale=1.0)
    assert judged.ok, judged.message


@pytest.mark.parametrize("together", [1, 3, 4, 100])
def test_heads_that_take_turns_leave_none_out(together, monkeypatch):
    """Of 8 shares of query heads: one at a time, 3 and at last 2, 4, and more than there are."""
    monkeypatch.setattr("cupy_flash.plan.grouping.heads_together", lambda kernel, problem: together)
    _prepared.cache_clear()
    case = Case("float16", 70, 150, heads_q=4, heads_kv=2, batch=(2,), causal=True)
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    state = attention(*inputs, **case.options)
    for deterministic in (False, True):
        gradients = attention_backward(
            dout, *inputs, *state, causal=True, dlse=dlse, deterministic=deterministic, backend="host"
        )
        judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, **case.scores)
        assert judged.ok, judged.message


def judge(case, inputs, cotangents, gradients):
    dout, dlse = cotangents
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, precision=case.precision, **case.meaning())
    assert judged.ok, judged.message


@pytest.mark.parametrize("case", quick_cases(), ids=str)
def test_case_on_numpy(case):
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    _, vjp = attention_vjp(*inputs, **case.options, **case.arrays())
    judge(case, inputs, cotangents, vjp(*cotangents))


@pytest.mark.parametrize("schedule, deterministic", [("eager", False), ("deferred", True)], ids=["eager", "deferred in order"])
@pytest.mark.parametrize("case", thinned((case for case in quick_cases() if case.dtype != "float64"), keep=32), ids=str)
def test_case_on_the_host(case, schedule, deterministic, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    _, vjp = attention_vjp(*inputs, backend="host", deterministic=deterministic, **case.options, **case.arrays())
    judge(case, inputs, cotangents, vjp(*cotangents))


@st.composite
def problems(draw):
    """A case of any lengths, heads and mask."""
    return Case(
        "float16",
        draw(st.integers(1, 150)),
        draw(st.integers(1, 150)),
        heads_q=draw(st.integers(1, 3)),
        heads_kv=1,
        causal=draw(st.sampled_from((False, True, "top_left"))),
        window=draw(st.none() | st.tuples(st.integers(0, 60), st.integers(0, 60))),
    )


def squares(x):
    return (x**2).sum(axis=-1)


@settings(max_examples=25)
@given(problems())
def test_gradients_of_all_keys_add_up(case):
    """The weights of a query add up to 1 whatever the keys are: sum dK = 0, and sum dV = sum dO over the queries that see a key.

    What may be missing follows from the roundings that `compare_gradients` lists. Those to float16, of P, out, dS and gradients,
    are independent of each other: TAIL times their 2-norm. Those to float32 are small enough to be counted as if all went one way.
    """
    inputs, (dout, _) = make_inputs(case), make_cotangents(case)
    (_, lse), vjp = attention_vjp(*inputs, backend="host", **case.options)
    _, dk, dv = (x[0].astype("f8") for x in vjp(dout))
    q, k, v, dout = (x[0].astype("f8") for x in (*inputs, dout))
    pairs = pairs_of(dout, q, k, v, None, case.scores)
    half, lost, arithmetic = 2.0**-11, 2.0**-25, ARITHMETIC["float16"]
    _, of_score, of_lse = score_errors(q, k, pairs.p, pairs.lse, arithmetic, case.scores)
    of_p = of_score + of_lse + 4 * arithmetic.sum + arithmetic.summation(case.heads_q * case.len_q)
    seen = (pairs.p > 0).sum(axis=-1)

    def allowed(gradient, x, of_halves, of_singles):
        """From a gradient of keys, which sums rows of x with weights of these errors: squares, and magnitudes."""
        independent = (x**2 * of_halves[..., None]).sum(axis=(0, 1)) + (gradient**2).sum(axis=(0, 1))
        return TAIL * half * independent**0.5 + (abs(x) * of_singles[..., None]).sum(axis=(0, 1)) + lost * gradient.shape[1]

    taking_part = dout * numpy.isfinite(lse[0])[..., None]
    missing = abs(dv.sum(axis=(0, 1)) - taking_part.sum(axis=(0, 1)))
    assert (missing <= allowed(dv, taking_part, squares(pairs.p), of_p + lost * seen)).all()

    difference = abs(pairs.dp - pairs.delta[..., None])
    of_difference = (2 * arithmetic.summation(case.dim_v) + 4 * arithmetic.sum) * norms(2, dout, v)  # of dP and delta
    of_difference += (of_p + arithmetic.summation(case.len_kv)) * (pairs.p * abs(pairs.dp)).sum(axis=-1)  # of out, and so of delta
    of_singles = of_p * abs(pairs.ds).sum(axis=-1) + of_difference + lost * (seen + ((pairs.p > 0) * difference).sum(axis=-1))
    of_halves = 2 * squares(pairs.ds) + squares(pairs.p * pairs.dp) + squares(dout * pairs.out)
    assert (abs(dk.sum(axis=(0, 1))) <= allowed(dk, case.scores["scale"] * q, of_halves, of_singles)).all()


def test_memory_order_and_kind_are_those_of_the_inputs():
    q, k, v = make_inputs(Case("float32", 9, 7, heads_q=2, batch=(3,), layout="bshd"))
    out, vjp = attention_vjp(q, k, v)
    for gradient, like in zip(vjp(numpy.ones_like(out)), (q, k, v)):
        assert gradient.dtype == like.dtype and numpy.argsort(gradient.strides).tolist() == numpy.argsort(like.strides).tolist()


@backends
def test_broadcast_inputs_get_sums(backend):
    """What broadcasting adds to an input, its gradient sums up: the gradient of a full copy, added along the axis."""
    dout, q, k, v, out, lse = arguments((2, 1, 4, 30, 64), (3, 2, 40, 64), (2, 40, 64), dtype=numpy.float32)
    sums = attention_backward(dout, q, k, v, out, lse, backend=backend)
    copies = [numpy.broadcast_to(x, (2, 3, *x.shape[-3:])).copy() for x in (q, k, v)]
    whole = attention_backward(dout, *copies, out, lse, backend=backend)
    assert [x.shape for x in sums] == [q.shape, k.shape, v.shape]
    for found, terms, axes in zip(sums, whole, ((1,), (0,), (0, 1))):
        expected = terms.astype("f8").sum(axis=axes, keepdims=True).reshape(found.shape)
        # Six terms at most, each with float32's rounding of a result of this size.
        assert numpy.abs(found - expected).max() <= 6 * 2.0**-20 * numpy.abs(terms).max()


@backends
@pytest.mark.parametrize(
    "q, k",
    [
        ((0, 2, 5, 64), (1, 2, 7, 64)),
        ((2, 0, 64), (2, 9, 64)),
        ((2, 9, 64), (2, 0, 64)),
        ((0, 5, 64), (2, 7, 64)),
    ],
)
def test_without_pairs_gradients_are_zero(backend, q, k):
    given = arguments(q, k)
    memory = {name: numpy.full_like(x, numpy.nan) for name, x in zip(Gradients._fields, given[1:4])}
    gradients = attention_backward(*given, backend=backend, **memory)
    assert [x.shape for x in gradients] == [x.shape for x in given[1:4]]
    assert all((x == 0).all() for x in gradients)


@backends
def test_two_axes_are_enough(backend):
    given = arguments((20, 64), (30, 64), (30, 32), dtype=numpy.float32)
    flat = attention_backward(*given, dlse=given[-1], backend=backend)
    full = attention_backward(*(x[None] for x in given), dlse=given[-1][None], backend=backend)
    for x, y, like in zip(flat, full, given[1:4]):
        assert x.shape == like.shape and numpy.array_equal(x, y[0])


def test_results_go_where_they_are_asked_to():
    given = arguments((2, 20, 64), dtype=numpy.float32)
    memory = numpy.full((3, 2, 40, 64), 7, numpy.float32)
    places = dict(zip(Gradients._fields, memory[:, :, ::2]))
    gradients = attention_backward(*given, backend="host", **places)
    assert all(found is place for found, place in zip(gradients, places.values()))
    assert (memory[:, :, 1::2] == 7).all()
    for found, expected in zip(gradients, attention_backward(*given, backend="host")):
        assert numpy.array_equal(found, expected)


def test_a_held_plan_computes_and_refuses_other_layouts():
    given = arguments((2, 70, 64), (2, 90, 64))
    held = plan_attention_backward(*given, backend="host")
    expected = attention_backward(*given, backend="host")
    assert all(map(numpy.array_equal, held(*given), expected))
    names = ("dout", "q", "k", "v", "out", "lse")
    for i, name in enumerate(names):
        wrong = list(given)
        wrong[i] = given[i][:, ::-1]
        with pytest.raises(ValueError, match=rf"^{name}: expected strides .*, as planned"):
            held(*wrong)
    with pytest.raises(ValueError, match="dlse: expected None"):
        held(*given, dlse=given[-1])
    with pytest.raises(ValueError, match="dk: expected shape"):
        held(*given, dk=numpy.zeros_like(given[1]))
    with pytest.raises(ValueError, match="dq: expected memory apart from that of q"):
        held(*given, dq=given[1])


def test_a_plan_made_with_dlse_takes_none_for_zero():
    given = arguments((2, 70, 64))
    held = plan_attention_backward(*given, dlse=given[-1], backend="host")
    assert all(map(numpy.array_equal, held(*given), held(*given, dlse=numpy.zeros_like(given[-1]))))
    assert not numpy.array_equal(held(*given).dq, held(*given, dlse=given[-1]).dq)


@pytest.mark.parametrize("make", ["forward", "backward"])
def test_a_given_workspace_is_used_and_checked(make):
    given = arguments((2, 70, 64), dtype=numpy.float32)
    if make == "forward":
        given = given[1:4]
        held = plan_attention(*given, backend="host", algorithm="v1")
    else:
        held = plan_attention_backward(*given, backend="host")
    memory = numpy.full(held.workspace_bytes + 5, 255, numpy.uint8)
    expected, found = held(*given), held(*given, workspace=memory)
    assert all(map(numpy.array_equal, expected, found))
    assert (memory[:-5] != 255).any() and (memory[-5:] == 255).all()
    refused = partial(pytest.raises, match="^workspace: expected")
    for wrong in (memory[: held.workspace_bytes - 1], memory[1:], numpy.repeat(memory, 2)[::2], memory[None]):
        with refused(ValueError):
            held(*given, workspace=wrong)
    with refused(TypeError):
        held(*given, workspace=memory.view(numpy.int8))
    with pytest.raises(ValueError, match="workspace: expected memory apart from that of q"):
        q = memory[: given[0].nbytes].view(numpy.float32).reshape(given[0].shape)
        held(*(q if x is given[-3 if make == "forward" else 1] else x for x in given), workspace=memory)


def test_counts_of_a_backward():
    """Products are over whole tiles; every input is read at least once and every result written."""
    given = arguments((2, 128, 64))
    held = plan_attention_backward(*given, backend="host")
    gradients, traffic = held.counted(*given)
    assert all(map(numpy.array_equal, gradients, held(*given)))
    assert traffic.flops == held.problem.flops == 2 * 5 * 64 * 128 * 128 * 2
    assert traffic.read_bytes >= sum(x.nbytes for x in given) and traffic.written_bytes >= held.result_bytes


def test_counts_of_a_forward():
    _, q, k, v, _, _ = arguments((2, 128, 64))
    counted = {}
    for algorithm in ("v1", "v2"):
        held = plan_attention(q, k, v, backend="host", algorithm=algorithm)
        out, counted[algorithm] = held.counted(q, k, v)
        assert numpy.array_equal(out, held(q, k, v))
        assert counted[algorithm].flops == held.problem.flops
    assert counted["v2"].written_bytes == q.nbytes < counted["v1"].written_bytes
    with pytest.raises(ValueError, match=r"backend: expected a plan for 'host'.*'numpy'"):
        plan_attention(q, k, v).counted(q, k, v)


@pytest.mark.release
def test_sanitized_runs_count_nothing(monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "address")
    given = arguments((1, 40, 32))
    gradients, traffic = plan_attention_backward(*given, backend="host").counted(*given)
    assert traffic is None and all(numpy.isfinite(x).all() for x in gradients)


# The function that attention_vjp returns


def test_vjp_is_the_backward_with_the_same_options():
    dout, q, k, v, _, _ = arguments((2, 30, 64), dtype=numpy.float32)
    options = {"scale": 0.2, "causal": True, "window": [5, None], "softcap": 3.0}
    (out, lse), vjp = attention_vjp(q, k, v, return_lse=True, **options)
    expected_out, expected_lse = attention(q, k, v, return_lse=True, **options)
    assert numpy.array_equal(out, expected_out) and numpy.array_equal(lse, expected_lse)
    for dlse in (None, lse):
        expected = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
        assert all(map(numpy.array_equal, vjp(dout, dlse), expected))
    alone, vjp = attention_vjp(q, k, v, **options)
    assert numpy.array_equal(alone, out)
    assert all(map(numpy.array_equal, vjp(dout), attention_backward(dout, q, k, v, out, lse, **options)))


def test_vjp_of_v1_is_that_of_v2():
    """They compute one function, and only a forward knows of v1."""
    case = Case("float16", 30, 40, causal=True)
    inputs, (dout, _) = make_inputs(case), make_cotangents(case)
    _, vjp = attention_vjp(*inputs, algorithm="v1", backend="host", causal=True)
    judged = compare_gradients(vjp(dout), dout, *inputs, **case.scores)
    assert judged.ok, judged.message


@pytest.mark.parametrize("option", ["return_lse", "deterministic"])
def test_vjp_refuses_flags_that_are_none(option):
    _, q, k, v, _, _ = arguments((1, 3, 8))
    with pytest.raises(TypeError, match=f"{option}: expected True or False, got 1"):
        attention_vjp(q, k, v, **{option: 1})


def test_gradients_come_back_as_the_kind_of_their_inputs():
    torch = pytest.importorskip("torch")
    dout, q, k, v, out, lse = arguments((2, 9, 16), dtype=numpy.float32)
    gradients = attention_backward(dout, torch.from_numpy(q), k, torch.from_numpy(v), out, lse)
    assert [type(x) for x in gradients] == [torch.Tensor, numpy.ndarray, torch.Tensor]
    for found, expected in zip(gradients, attention_backward(dout, q, k, v, out, lse)):
        assert numpy.array_equal(numpy.asarray(found), expected)
