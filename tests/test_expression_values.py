"""What expressions are worth, against Python, and what is left of them when simplified."""

import math

import numpy
import pytest
from expressions import ARRAYS, DECLARED, TEXTS, VALUES, many, same, text_of, trees
from hypothesis import assume, given
from hypothesis import strategies as st

from cupy_flash.problem.expression.entry import score_expression
from cupy_flash.problem.expression.evaluate import evaluate
from cupy_flash.problem.expression.simplify import simplify
from cupy_flash.problem.expression.tree import Literal, walk


@many
@given(st.sampled_from(("float", "bool")).flatmap(trees))
def test_the_text_of_a_tree_parses_to_it(tree):
    for form in (tree, simplify(tree)):
        assert text_of(form) == form and str(text_of(form)) == str(form)


# Values


class Clipped:
    """An array as the language reads it, for Python."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, indices):
        indices = indices if isinstance(indices, tuple) else (indices,)
        return self.array[tuple(min(max(int(i), 0), n - 1) for i, n in zip(indices, self.array.shape))].item()


PYTHON = {
    **{name: getattr(math, name) for name in ("exp", "log", "log2", "sqrt", "tanh", "sin", "cos", "inf")},
    **{"min": min, "max": max, "abs": abs, "int": int, "float": float},
    "exp2": lambda x: 2.0**x,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "floor": lambda x: float(math.floor(x)),
    "where": lambda c, a, b: a if c else b,
    "clip": lambda x, low, high: min(max(x, low), high),
    "__builtins__": {},
    **{name: Clipped(array) if array.ndim else array.item() for name, array in ARRAYS.items()},
}


@many
@given(st.sampled_from(("float", "bool")).flatmap(trees))
def test_values_are_pythons(tree):
    try:
        expected = eval(str(tree), {**PYTHON, **VALUES})
    except ZeroDivisionError:
        assume(False)
    assume(abs(expected) < 1e12)
    got = evaluate(tree, VALUES, ARRAYS, "float64")
    assert got.shape == () and got.dtype == ("float64" if tree.kind == "float" else "bool")
    assert same(got.item(), expected)
    assert same(evaluate(simplify(tree), VALUES, ARRAYS, "float64").item(), expected)


@pytest.mark.parametrize("text", TEXTS)
def test_values_of_texts_are_pythons(text):
    tree = score_expression(text, DECLARED).tree
    grid = {
        "score": [-0.8, 0.0, 1.7],
        "h": [0, 1, 3],
        "b": [0, 2],
        "q_idx": [5, 0],
        "kv_idx": [1, 6],
        "h_kv": [0],
        "q_len": [7],
        "kv_len": [7],
    }
    lanes = numpy.meshgrid(*grid.values(), indexing="ij", sparse=True)
    for form in (tree, simplify(tree)):
        got = evaluate(form, dict(zip(grid, lanes)), ARRAYS, "float64")
        got = numpy.broadcast_to(got, [len(values) for values in grid.values()])
        for lane in numpy.ndindex(got.shape):
            values = {name: grid[name][i] for name, i in zip(grid, lane)}
            if "score ** 2.5" in text and values["score"] < 0:  # complex to Python
                assert numpy.isnan(got[lane])
            else:
                assert same(got[lane], eval(text, {**PYTHON, **values})), values


def test_values_have_the_dtype_that_is_asked_for():
    tree = score_expression("0.1 * h + table[0, 0] ** 2 * slope[h] + (1 if h > 0 else score)", DECLARED).tree
    arrays = {"slope": numpy.ones(4, "float16"), "table": numpy.full((1, 1), 200, "uint8")}
    for dtype in ("float16", "float32", "float64"):
        got = evaluate(tree, {"h": numpy.arange(4)[:, None], "score": numpy.ones((1, 5))}, arrays, dtype)
        assert got.dtype == dtype and got.shape == (4, 5)
    assert got[3, 0] == 0.1 * 3 + 200**2 + 1


@pytest.mark.filterwarnings("error")
def test_nothing_is_raised_or_warned_of_where_a_condition_hides_it():
    tree = score_expression("slope[h] if 0 <= h < 4 else where(h < 0, log(score), score / 0) + h // 0 + exp(1e9)", DECLARED).tree
    got = evaluate(tree, {"h": numpy.array([-5, 3, 99]), "score": -1.0}, ARRAYS, "float32")
    assert numpy.array_equal(got, [numpy.nan, 0.75, numpy.nan], equal_nan=True)
    assert (
        evaluate(score_expression("slope[h]", DECLARED).tree, {"h": numpy.arange(3)}, {"slope": numpy.ones(0)}, "float32").tolist()
        == [0] * 3
    )
    assert evaluate(score_expression("max(score, 1)", DECLARED).tree, {"score": numpy.nan}, {}, "float32") == 1


# Simplification

SIMPLER = {
    "score * 0": "0.0",
    "0 / score + score * 1 + -0.0": "score",
    "--score - 0 + (0 - h)": "score + float(-h)",
    "score / 1 * -1": "-score",
    "score ** 1 + score ** 0": "score + 1.0",
    "2 * 3 + 0.5": "6.5",
    "score * (0.1 + 0.2)": "score * (0.1 + 0.2)",  # whose sum is another one in float32
    "score * int(2.7)": "score * 2.0",
    "1 // 0 + 1.0 / 0 + inf - inf": None,
    "2147483647 + 1": None,
    "1 << 20 * 2": None,
    "h + (1 >> -1 * 2)": "float(h + (1 >> -2))",
    "1e200 * 1e200": None,
    "where(h < 1, score, score * 1)": "score",
    "where(1 < 2 and not not (h < 1), score, 1)": "where(h < 1, score, 1.0)",
    "where(h < 1 and False, score, 1)": "1.0",
    "where(h < 1 or True, score, 1)": "score",
    "slope[h + 0]": "slope[h + 0]",  # is the read that it was
}


@pytest.mark.parametrize("text, simpler", SIMPLER.items())
def test_simplification(text, simpler):
    tree = score_expression(text, DECLARED).tree
    if simpler is None:
        assert not isinstance(simplify(tree), Literal)
    else:
        assert str(simplify(tree)) == simpler


@many
@given(trees())
def test_what_is_simple_stays(tree):
    simple = simplify(tree)
    assert simplify(simple) == simple and simple.kind == tree.kind
    assert sum(1 for _ in walk(simple)) <= sum(1 for _ in walk(tree))
