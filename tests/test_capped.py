"""Expressions that are a softcap: they are computed as `softcap=` is."""

import numpy
import pytest
from expressions import DECLARED

from cupy_flash import attention, attention_backward, plan_attention, plan_attention_backward
from cupy_flash.problem.expression.capped import softcap_of
from cupy_flash.problem.expression.entry import score_expression

HOST = {"backend": "host", "arch": "90a"}


@pytest.mark.parametrize(
    "text, cap", [("30 * tanh(score / 30)", 30.0), ("tanh(score / 2.5) * 2.5", 2.5), ("30.0 * tanh(score / 30)", 30.0)]
)
def test_a_softcap(text, cap):
    assert softcap_of(score_expression(text, DECLARED).tree) == cap


@pytest.mark.parametrize(
    "text",
    [
        "score",
        "tanh(score)",
        "30 * tanh(score / 31)",
        "30 * tanh(score / 30) + score",
        "2 * (30 * tanh(score / 30))",
        "-3 * tanh(score / -3)",
        "0 * tanh(score / 0)",
        "slope[h] * tanh(score / slope[h])",
        "30 * tanh(2 * score / 30)",
        "1e-30 * tanh(score / 1e-30)",
    ],
)
def test_other_expressions(text):
    assert softcap_of(score_expression(text, DECLARED).tree) is None


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_the_same_bits_as_the_option_has(dtype):
    """A text and a function, forward and backward."""
    rng = numpy.random.default_rng(2)
    q, k, v, dout = (rng.standard_normal((2, 3, 40, 24)).astype(dtype) for _ in range(4))
    more = {"causal": True, "mask": "kv_idx % 3 < 2"}
    expected = attention(q, k, v, softcap=1.5, return_lse=True, **more)
    gradients = attention_backward(dout, q, k, v, *expected, softcap=1.5, **more)
    for score in ("1.5 * tanh(score / 1.5)", lambda score: numpy.tanh(score / 1.5) * 1.5):
        found = attention(q, k, v, score=score, return_lse=True, **more)
        assert all((x == y).all() for x, y in zip(found, expected))
        assert all((x == y).all() for x, y in zip(attention_backward(dout, q, k, v, *found, score=score, **more), gradients))


def test_kernels_are_those_of_the_option():
    q, lse = numpy.zeros((4, 300, 64), numpy.float16), numpy.zeros((4, 300), numpy.float32)
    asked, same = {"score": "30 * tanh(score / 30)"}, {"softcap": 30.0}
    plans = [plan_attention(q, q, q, **options, **HOST) for options in (asked, same)]
    backwards = [plan_attention_backward(q, q, q, q, q, lse, **options, **HOST) for options in (asked, same)]
    assert plans[0].kernel == plans[1].kernel and str(plans[0]) == str(plans[1]) and "; softcap 30;" in str(plans[0])
    assert backwards[0].kernels == backwards[1].kernels


@pytest.mark.parametrize("more", [{"softcap": 5.0}, {"bias": numpy.zeros((4, 300, 300), numpy.float16)}], ids=["softcap", "bias"])
def test_beside_others_it_is_an_expression(more):
    q = numpy.zeros((4, 300, 64), numpy.float16)
    plan = plan_attention(q, q, q, score="30 * tanh(score / 30)", **more, **HOST)
    assert plan.problem.softcap == more.get("softcap") and plan.kernel.config.SCORES == "EXPRESSION"
