"""What kernels compute of an expression is the same number: places as floats, common factors and parts of a head."""

import numpy
import pytest
from expressions import ARRAYS, DECLARED, VALUES, many, trees
from hypothesis import given

from cupy_flash.plan.hoisting import DISTANCE, KV_FLOAT, Q_FLOAT, UNIT, factors_gathered, hoisted, places_as_floats, times_unit
from cupy_flash.problem.expression.entry import score_expression
from cupy_flash.problem.expression.evaluate import evaluate
from cupy_flash.problem.expression.operations import apply, convert
from cupy_flash.problem.expression.tree import Name, Node, Read, fold

OWN = {Q_FLOAT.name: convert(Name("q_idx"), "float"), KV_FLOAT.name: convert(Name("kv_idx"), "float"), UNIT.name: None}


def meant(tree, uniforms=()):
    """The tree with what only kernels have replaced by what it stands for."""

    def visit(node: Node, args):
        if not isinstance(node, Read) or not node.name.startswith("@"):
            return type(node)(node.op, tuple(args), node.kind) if hasattr(node, "op") else _read(node, args)
        if node.name == DISTANCE:
            return apply("+", apply("-", OWN[Q_FLOAT.name], OWN[KV_FLOAT.name]), args[0])
        if node.name.startswith("@uniform"):
            return meant(uniforms[int(node.name.removeprefix("@uniform"))])
        return OWN[node.name]

    return fold(tree, visit)


def _read(node, args):
    return Read(node.name, tuple(args), node.kind) if isinstance(node, Read) else node


def value(tree):
    with numpy.errstate(all="ignore"):
        return evaluate(tree, VALUES, ARRAYS, numpy.float64)


@many
@given(trees("float"))
def test_the_value_stays(tree):
    expected = value(tree)
    (made,), uniforms = hoisted((factors_gathered(places_as_floats(tree)),))
    got = value(meant(made, uniforms))
    there = numpy.isfinite(expected) & numpy.isfinite(got)  # products in another order may overflow where these do not
    numpy.testing.assert_allclose(got[there], expected[there], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("score + slope[h] * (kv_idx - q_idx)", "score + slope[h] * -@distance[0.0]"),
        ("score - abs(q_idx + kv_len - q_len - kv_idx)", "score - abs(@distance[0.0 + float(kv_len) - float(q_len)])"),
        ("score + (kv_idx + 1)", "score + (1.0 + @kv_float)"),
        ("score + slope[q_idx % 2]", "score + slope[q_idx % 2]"),
    ],
)
def test_places(text, expected):
    assert str(places_as_floats(score_expression(text, DECLARED).tree)).replace("0.0 + ", "") == expected.replace("0.0 + ", "")


def test_a_factor_goes_to_what_a_head_has_in_common():
    tree = score_expression("slope[h] * kv_idx + 0 * score", DECLARED).tree.args[0]
    assert str(times_unit(tree)) == "@unit * slope[h] * float(kv_idx)"
