"""The bounds where something is asked for each pair: what they accept, and that what is wrong with it is found."""

from dataclasses import replace

import numpy
import pytest
from thinned import thinned

from cupy_flash import attention_vjp, dropout_mask
from cupy_flash.judge import check
from cupy_flash.judge.cases import Case, full_cases, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.compare_sums import names_of
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.judge.dropout import keep_scale_of, kept_pairs
from cupy_flash.judge.expressions import SCORES, Grid
from cupy_flash.judge.operands import BIASES, hand_score
from cupy_flash.judge.oracle import naive
from cupy_flash.judge.oracle_gradients import naive_gradients
from cupy_flash.problem.backward import Gradients

pytestmark = pytest.mark.filterwarnings("error")

SHAPE = {"len_q": 67, "len_kv": 90, "heads_q": 4, "heads_kv": 2, "batch": (2,)}
ALONE = ({"score": "gate"}, {"score": "temperature"}, {"mask": "array"}, {"bias": "batch"}, {"alibi": "batch"}, {"dropout": 0.25})
OF_PAIRS = [case for case in full_cases() if case.of_pairs]


def wrt_of(case):
    arrays = case.arrays()
    captured = arrays.get("arrays", {})
    return {name: captured[name] if name in captured else arrays[name] for name in names_of(case.meaning())}


def naive_results(case, **changes):
    """Those of the textbook's formulas, or of another question: result, log-sum-exp and gradients."""
    meaning, inputs, (dout, dlse) = case.meaning() | changes, make_inputs(case), make_cotangents(case)
    out, lse = naive(*inputs, precision=case.precision, **meaning)
    grads = naive_gradients(dout, *inputs, dlse=dlse, precision=case.precision, **meaning)
    captured = case.arrays().get("arrays", {})
    darrays = {name: x.astype(captured[name].dtype) for name, x in grads.darrays.items() if name in captured}
    others = {name: getattr(grads, name) for name in ("dsinks", "dbias", "dalibi_slopes")}
    return out, lse, Gradients(*grads, **others, darrays=darrays)


def judge(case, results, wrt=None):
    """The judgements on both directions."""
    out, lse, grads = results
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    given = {"precision": case.precision, **case.meaning()}
    wrt = wrt_of(case) if wrt is None else wrt
    return compare(out, lse, *inputs, **given), compare_gradients(grads, dout, *inputs, dlse=dlse, wrt=wrt, **given)


# Accepted


@pytest.mark.parametrize("dtype", thinned(["float16", "float64", "bfloat16", "float32"]))
@pytest.mark.parametrize("alone", ALONE, ids=str)
def test_naive_is_accepted(alone, dtype):
    case = Case(dtype, **SHAPE, **alone)
    forward, backward = judge(case, naive_results(case))
    assert forward.ok, forward.message
    assert backward.ok, backward.message
    assert len(backward.judged) == 3 + len(wrt_of(case))


@pytest.mark.parametrize("case", thinned(OF_PAIRS[::7], keep=4), ids=str)
def test_numpy_is_accepted_with_room(case):
    for result in check.run_case(case, check.select_computations("numpy"), "numpy"):
        assert result.ok, result.message
        error, allowed = result.figures
        assert 2 * error <= allowed


@pytest.mark.release
@pytest.mark.parametrize("case", OF_PAIRS, ids=str)
def test_numpy_is_accepted(case):
    for result in check.run_case(case, check.select_computations("numpy"), "numpy"):
        assert result.ok, result.message


# Found


def other_arrays(case, **changed):
    """A case whose expressions read other numbers: the meaning of it."""
    grid = Grid.of(case.batch, case.heads_q, case.heads_kv, case.len_q, case.len_kv)
    arrays = case.arrays()["arrays"]
    return {"score": hand_score(SCORES[case.score], grid, arrays | {name: f(arrays[name]) for name, f in changed.items()})}


def reads(name, change):
    return lambda case: other_arrays(case, **{name: change})


def changed(name, change):
    return lambda case: {name: change(case.meaning()[name])}


def slope_of_one(case):
    """The derivative of the score is forgotten."""
    return {"score": replace(case.meaning()["score"], slope=numpy.ones_like)}


def first_masked(seen):
    """One pair less, of a row that sees some."""
    seen = seen.copy()
    seen.reshape(-1)[numpy.flatnonzero(seen)[5]] = False
    return seen


FAULTS = {
    "a table of another distance": ({"score": "relative"}, reads("table", lambda x: numpy.roll(x, 1))),
    "temperatures of other heads": ({"score": "temperature"}, reads("t", lambda x: x[::-1])),
    "shifts of another batch element": ({"score": "temperature", "alibi": "heads"}, reads("t", lambda x: 1.01 * x)),
    "a level off by a hundredth": ({"score": "gate"}, reads("level", lambda x: x + 0.01)),
    "a rate off by two in a hundred": ({"score": "decay"}, reads("rate", lambda x: 1.02 * x)),
    "a pair that is masked": ({"mask": "array"}, changed("seen", first_masked)),
    "a mask of a row further": ({"mask": "documents"}, changed("seen", lambda x: numpy.roll(x, 1, axis=-2))),
    "no mask": ({"mask": "holes"}, changed("seen", lambda x: x | True)),
    "a bias of a row further": ({"bias": "batch"}, changed("bias", lambda x: numpy.roll(x, 1, axis=-2))),
    "a bias of another batch element": ({"bias": "keys"}, changed("bias", lambda x: x[::-1])),
    "a bias of other heads": ({"bias": "heads"}, changed("bias", lambda x: x[::-1])),
    "no -inf": ({"bias": "full"}, changed("bias", lambda x: numpy.maximum(x, -5))),
    "slopes off by two in a hundred": ({"alibi": "heads"}, changed("alibi_slopes", lambda x: 1.02 * x)),
    "slopes of other heads": ({"alibi": "heads"}, changed("alibi_slopes", lambda x: x[::-1])),
    "slopes of another batch element": ({"alibi": "batch"}, changed("alibi_slopes", lambda x: x[::-1])),
    "a pair that is not dropped": ({"dropout": 0.25}, changed("keep", lambda x: ~first_masked(~x))),
    "no factor of dropout": ({"dropout": 0.01}, changed("keep_scale", lambda x: 1.0)),
    "draws of another head": ({"dropout": 0.25}, changed("keep", lambda x: x[:, ::-1])),
}


@pytest.mark.parametrize("dtype", thinned(["float16", "float32"]))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_results_and_gradients(fault, dtype):
    options, change = FAULTS[fault]
    case = Case(dtype, **SHAPE, **options)
    forward, backward = judge(case, naive_results(case, **change(case)))
    assert not forward.ok and "FAILS" in forward.message
    assert not backward.ok and "FAILS" in backward.message


@pytest.mark.parametrize("score", ["gate", "temperature", "leaky", "soft_clip", "decay"])
def test_a_forgotten_derivative_is_found(score):
    case = Case("float16", **SHAPE, score=score)
    forward, backward = judge(case, naive_results(case, **slope_of_one(case)))
    assert forward.ok and not backward.ok
    assert "dq: error" in backward.message and backward.dv.error <= backward.dv.allowed


@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_of_each_shape_has_its_gradient(bias):
    case = Case("float16", **SHAPE, bias=bias)
    *results, grads = naive_results(case)
    _, backward = judge(case, (*results, grads))
    assert backward.ok and backward.others["bias"].error <= backward.others["bias"].allowed
    for wrong in (grads.dbias * numpy.float16(1.1), numpy.roll(grads.dbias, 1, axis=-1), 0 * grads.dbias):
        others = Gradients(*grads, dbias=wrong)
        assert not judge(case, (*results, others))[1].ok


WITH_ARRAYS = [*({"score": name} for name in SCORES), {"alibi": "batch"}]


@pytest.mark.parametrize("options", WITH_ARRAYS, ids=str)
def test_gradients_of_arrays_are_judged(options):
    case = Case("float16", **SHAPE, **options)
    *results, grads = naive_results(case)
    for name in wrt_of(case):
        own = grads.dalibi_slopes if name == "alibi_slopes" else grads.darrays[name]
        spoilt = (own * 1.08).astype(own.dtype)
        changed = {"dalibi_slopes": spoilt} if name == "alibi_slopes" else {"darrays": grads.darrays | {name: spoilt}}
        _, backward = judge(case, (*results, Gradients(*grads, **{"darrays": grads.darrays} | changed)))
        assert not backward.ok and f"{name}: error" in backward.message


def test_a_gradient_that_was_asked_for_has_to_be_there_and_no_other():
    case = Case("float16", **SHAPE, score="gate", bias="full")
    *results, grads = naive_results(case)
    assert judge(case, (*results, grads))[1].ok
    wrt = wrt_of(case)
    for missing in wrt:
        _, backward = judge(case, (*results, grads), {name: x for name, x in wrt.items() if name != missing})
        assert not backward.ok and backward.message.startswith(f"the gradient of {missing} is ")
    _, backward = judge(case, (*results, Gradients(*grads)))
    assert backward.message == "the gradient of bias is None, expected float16 (2, 4, 67, 90)"
    half = Gradients(*grads, dbias=grads.dbias.astype("f4"), darrays=grads.darrays)
    assert judge(case, (*results, half))[1].message.startswith("the gradient of bias is float32")


def test_gradients_of_what_no_pair_reads_are_exactly_zero():
    case = Case("float16", **SHAPE, score="relative", mask="array", bias="full")
    *results, grads = naive_results(case)
    assert (grads.dbias[:, :, 3] == 0).all()
    spoilt = grads.dbias.copy()
    spoilt[0, 0, 3, 5] = 1e-7
    assert not judge(case, (*results, Gradients(*grads, dbias=spoilt, darrays=grads.darrays)))[1].ok


def test_results_are_the_same_for_parts_and_for_all():
    """Heads and batch elements are judged one by one: each with its own part of what is asked for pairs."""
    case = Case("float64", 20, 30, heads_q=4, heads_kv=2, batch=(2, 3), score="gate", bias="batch", alibi="batch", dropout=0.2)
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    (out, lse), vjp = attention_vjp(*inputs, wrt=tuple(wrt_of(case)), **case.options | case.arrays())
    forward, backward = judge(case, (out, lse, vjp(dout, dlse)))
    assert forward.ok and backward.ok, (forward.message, backward.message)
    assert forward.error < 1e-14 and max(x.error for x in backward.judged) < 1e-12


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999])
def test_dropout_of_the_judge_is_that_of_the_package(p):
    for shape, seed in (((3, 20, 40), (7, 0)), ((2, 2, 33, 17), (1 << 63, 2**32 - 1)), ((5, 6), (1 << 33, 3))):
        numpy.testing.assert_array_equal(kept_pairs(shape, p, *seed), dropout_mask(shape, p, seed))
    assert keep_scale_of(0.5) == 2 and keep_scale_of(0.999) == 2**15 / (2**15 - 32735)  # 0.999 rounded
