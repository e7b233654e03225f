"""Derivatives of expressions, against differences and where those say nothing."""

import math

import numpy
import pytest
from expressions import ARRAYS, DECLARED, VALUES, many, same, trees
from hypothesis import assume, given

from cupy_flash.problem.expression.derivative import ONE, ZERO, derivative, slope_kind
from cupy_flash.problem.expression.entry import score_expression
from cupy_flash.problem.expression.evaluate import evaluate
from cupy_flash.problem.expression.reads import reads
from cupy_flash.problem.expression.tree import SCORE, Name, Read, walk


@many
@given(trees(smooth=True))
def test_derivatives_are_differences(tree):
    values = {name: numpy.float64(value) if name == "score" else value for name, value in VALUES.items()}
    arrays = {name: array.copy() for name, array in ARRAYS.items()}

    def worth(change):
        change(1e-5)
        above = evaluate(tree, values, arrays, "float64").item()
        change(-2e-5)
        below = evaluate(tree, values, arrays, "float64").item()
        change(1e-5)
        assume(abs(above) < 1e6)
        return (above - below) / 2e-5

    def slope(of):
        return evaluate(derivative(tree, of), values, arrays, "float64").item()

    def check(got, difference):
        assume(abs(difference) < 1e4)
        assert abs(got - difference) <= 1e-4 * max(1, abs(difference))

    check(slope(SCORE), worth(lambda step: values.update(score=values["score"] + step)))
    by_element = {"gain": 0.0} | {i: 0.0 for i in range(4)}
    for read in reads(tree):  # reads of one element change together
        if read.name == "gain":
            by_element["gain"] += slope(read)
        if read.name == "slope":
            by_element[evaluate(read.args[0], values, arrays, "float64").clip(0, 3).item()] += slope(read)
    check(by_element.pop("gain"), worth(lambda step: arrays.update(gain=arrays["gain"] + step)))
    for element, got in by_element.items():

        def change(step, element=element):
            arrays["slope"][element] += step

        check(got, worth(change))


SLOPES = [
    ("score", 2.0, 1),
    ("score * score", 3.0, 6),
    ("max(score, 1)", 1.0, 1),
    ("max(1, score)", 1.0, 0),
    ("min(score, 1)", 1.0, 1),
    ("min(1, score)", 1.0, 0),
    ("clip(score, 0, 1)", 0.0, 1),
    ("clip(score, 0, 1)", 2.0, 0),
    ("abs(score)", 0.0, 0),
    ("abs(score)", -2.0, -1),
    ("abs(-score * 3)", -2.0, -3),
    ("floor(score) + int(score) + (score < 1) + score // 1", 2.5, 0),
    ("score % 2", 3.5, 1),
    ("7 % score", 3.0, -2),
    ("score / (1 + score)", 1.0, 0.25),
    ("where(score < 1, score, 2 * score)", 1.0, 2),
    ("score ** 3", -2.0, 12),
    ("score ** 0", 2.0, 0),
    ("score ** 2.5", 4.0, 20),
    ("2 ** score", 1.0, 2 * math.log(2)),
    ("exp2(score) + log2(score)", 1.0, 2 * math.log(2) + 1 / math.log(2)),
    ("rsqrt(score)", 4.0, -1 / 16),
    ("where(score > 0, sqrt(score), 0)", 0.0, 0),  # and no NaN of what is hidden
]


@pytest.mark.parametrize("text, at, slope", SLOPES)
def test_derivatives_at_a_point(text, at, slope):
    got = evaluate(derivative(score_expression(text, DECLARED).tree, SCORE), {"score": at}, {}, "float64")
    assert same(got, slope)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("score", "one"),
        ("score + slope[h] * (kv_idx - q_idx)", "one"),
        ("gain ** 2.5 - -score - exp(gain) + max(gain, 1)", "one"),
        ("where(h < 1, score, score + 1)", "one"),
        ("score * (1 + 0)", "one"),
        ("slope[h]", "free"),
        ("score * 2", "free"),
        ("where(kv_idx <= q_idx, score, -inf)", "free"),
        ("floor(score)", "free"),
        ("tanh(score / 30) * 30", "score"),
        ("max(score, 0)", "score"),
        ("score ** 2", "score"),
    ],
)
def test_kinds_of_slopes(text, kind):
    tree = score_expression(text, DECLARED).tree
    assert slope_kind(tree) == kind
    assert (derivative(tree, SCORE) == ONE) is (kind == "one")


def test_derivatives_of_reads():
    tree = score_expression("score * slope[h] + slope[h] + slope[b] ** 2 + gain", DECLARED).tree
    assert [str(derivative(tree, read)) for read in reads(tree)] == ["score + 1.0", "2.0 * slope[b]", "1.0"]
    assert derivative(tree, Read("slope", (Name("q_idx"),), "float")) == ZERO


@pytest.mark.parametrize("step", ["tanh(x) * score", "score / (1 + exp(x))", "max(x, score) * 2", "abs(x) + 1", "score % (x + 1)"])
def test_derivatives_of_the_deepest_expressions(step):
    """Neither their size nor their depth is too much."""
    text = "score"
    for _ in range(24):
        text = step.replace("(x", f"({text}")
    tree = score_expression(text, DECLARED).tree
    slope = derivative(tree, SCORE)
    assert sum(1 for _ in walk(slope)) < 20_000 and hash(slope) == hash(derivative(tree, SCORE))
    assert numpy.isfinite(evaluate(slope, VALUES, {}, "float64"))
