"""The bound on gradients beside sinks, and on those of sinks: what it accepts, and what it must not."""

import numpy
import pytest
from judged_gradients import inputs_of, judge, kernel, share
from thinned import thinned

from cupy_flash.judge.cases import Case
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.oracle_gradients import naive_gradients
from cupy_flash.problem.backward import Gradients

pytestmark = pytest.mark.filterwarnings("error")

WITH_SINKS = [
    Case("float16", 100, 200, heads_q=4, heads_kv=2, batch=(2,), causal=True, sinks=1),
    Case("bfloat16", 90, 100, dim=128, heads_q=2, batch=(2, 2), sinks=3, sinks_dtype="bfloat16"),
    Case("float16", 40, 20, heads_q=2, causal=True, softcap=5.0, sinks=2, sinks_dtype="float16"),
    Case("float32", 100, 200, heads_q=2, batch=(3,), causal=True, sinks=2),
]
with_sinks = pytest.mark.parametrize("case", WITH_SINKS, ids=str)


def by_kernel(case, sinks, **others):
    inputs, dlse = inputs_of(case)
    return kernel(case, inputs, dlse, sinks, **others)


def with_dsinks(grads, dsinks):
    return Gradients(*grads, dsinks=dsinks)


@with_sinks
def test_a_kernel_with_sinks_is_accepted_with_room(case):
    verdict = judge(case, by_kernel(case, **case.arrays()))
    assert verdict.ok, verdict.message
    assert max(map(share, (verdict.dq, verdict.dk, verdict.dv, verdict.dsinks))) < 0.5
    assert "dsinks: error" in verdict.message


@with_sinks
@pytest.mark.parametrize("added", thinned([-1000, 10, 40, 80, 95, 1000], keep=3, first=1))
def test_gradients_beside_sinks_far_from_the_scores(case, added):
    inputs, dlse = inputs_of(case)
    sinks = case.arrays()["sinks"].astype("f4") + numpy.float32(added)
    verdict = compare_gradients(kernel(case, inputs, dlse, sinks), *inputs, dlse=dlse, **case.scores, sinks=sinks)
    assert verdict.ok, verdict.message


@with_sinks
def test_the_gradient_of_sinks_has_their_shape_and_dtype(case):
    grads, sinks = by_kernel(case, **case.arrays()), case.arrays()["sinks"]
    for wrong in (None, grads.dsinks[..., :-1], grads.dsinks[None], grads.dsinks.astype("int8"), grads.dsinks.astype("f8")):
        verdict = judge(case, with_dsinks(grads, wrong))
        assert not verdict.ok and verdict.message.startswith("dsinks is ")
        assert verdict.message.endswith(f", expected {sinks.dtype} {sinks.shape}")
    inputs, dlse = inputs_of(case)
    plain = naive_gradients(*inputs, dlse=dlse, **case.scores)
    assert compare_gradients(plain, *inputs, dlse=dlse, **case.scores).dsinks is None
    verdict = compare_gradients(with_dsinks(plain, grads.dsinks), *inputs, dlse=dlse, **case.scores)
    assert not verdict.ok and verdict.message == f"dsinks is {sinks.dtype} {sinks.shape}, expected None"


@with_sinks
def test_wrong_gradients_of_sinks(case):
    grads = by_kernel(case, **case.arrays())
    dsinks, last = grads.dsinks, (-1,) * grads.dsinks.ndim
    if case.sinks == 3:
        last = (1, -2)  # that one is finite
    spoilt = dsinks.copy()
    spoilt[last] = numpy.nan
    wrong = {
        "sign": -dsinks,
        "twice": dsinks + dsinks,
        "zero": numpy.zeros_like(dsinks),
        "another head's": numpy.roll(dsinks, 1, axis=-1),
        "nan": spoilt,
    }
    for name, found in wrong.items():
        verdict = judge(case, with_dsinks(grads, found))
        assert not verdict.ok and share(verdict.dsinks) > 2, name
        assert max(map(share, (verdict.dq, verdict.dk, verdict.dv))) < 1
        assert "dsinks" in verdict.message and "FAILS" in verdict.message


@with_sinks
def test_dlse_or_out_left_out_of_the_gradient_of_sinks(case):
    for delta in (lambda delta, dlse: delta + dlse, lambda delta, dlse: -dlse, lambda delta, dlse: delta + 2 * dlse):
        verdict = judge(case, by_kernel(case, **case.arrays(), delta_of_sinks=delta))
        assert share(verdict.dsinks) > 2 and max(map(share, (verdict.dq, verdict.dk, verdict.dv))) < 1


@pytest.mark.parametrize("case", [case for case in WITH_SINKS if case.batch != (1,)], ids=str)
def test_a_batch_element_or_a_row_missing_in_the_gradient_of_sinks(case):
    def without(place):
        def delta(delta, dlse):
            delta = delta.copy()
            delta[place] = 0
            return delta

        return delta

    for place in (numpy.s_[-1], numpy.s_[..., -16:]):
        verdict = judge(case, by_kernel(case, **case.arrays(), delta_of_sinks=without(place)))
        assert share(verdict.dsinks) > 1


@with_sinks
def test_gradients_with_the_sinks_of_another_head_or_none_or_twice(case):
    right = by_kernel(case, **case.arrays())
    sinks = case.arrays()["sinks"]
    for wrong in (numpy.roll(sinks, 1, axis=-1), numpy.concatenate([numpy.atleast_2d(sinks)] * 2)):
        verdict = judge(case, with_dsinks(by_kernel(case, wrong), right.dsinks))
        assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 2
    verdict = judge(case, with_dsinks(by_kernel(case, None), right.dsinks))
    assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 2


def test_a_sink_of_minus_infinity_has_a_gradient_of_exactly_zero():
    case = WITH_SINKS[1]
    grads = by_kernel(case, **case.arrays())
    assert (grads.dsinks[numpy.isinf(case.arrays()["sinks"])] == 0).all() and judge(case, grads).ok
    grads.dsinks[0, 0] = 1e-30  # of head 0 it is the first
    assert not judge(case, grads).ok


def test_sinks_of_broadcast_inputs():
    """Batch axes that are judged together and one after another."""
    case = Case("float32", 30, 40, heads_q=4, heads_kv=2, batch=(2, 3), sinks=2)
    (dout, q, k, v), dlse = inputs_of(case)
    for inputs in ((dout, q, k, v), (dout, q, k[:1], v[0, 0]), (dout, q[:, :1], k, v), (dout, q[:1], k[0], v)):
        grads = naive_gradients(*inputs, dlse=dlse, **case.scores, **case.arrays())
        assert judge(case, grads, inputs, dlse).ok
        assert not judge(case, with_dsinks(grads, grads.dsinks * numpy.float32(1.01)), inputs, dlse).ok
