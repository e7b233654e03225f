"""Derivatives of expressions, as expressions."""

from __future__ import annotations

import math

from .simplify import simplified, simplify
from .tree import SCORE, Apply, Literal, Name, Node, Read, fold, walk

ZERO, ONE, HALF, LN_2 = (Literal(value) for value in (0.0, 1.0, 0.5, math.log(2)))


def derivative(tree: Node, of: Name | Read) -> Node:
    """How fast an expression changes with the score or with what a read gives, simplified as `simplify` says.

    Where two arguments of min or max are equal, the first is taken; abs does not change at 0, and floor, int and comparisons
    nowhere.

    Parameters
    ----------
    tree : Node
        Of kind float.
    of : Name or Read
        `SCORE`, or a read of a float.
    """

    def slope(node: Node, slopes: list[Node]) -> Node:
        if not isinstance(node, Apply):
            return ONE if node == of else ZERO
        if node.kind != "float" or all(slope == ZERO for slope in slopes):
            return ZERO
        return _slope(node, *slopes)

    return fold(simplify(tree), slope)


def slope_kind(tree: Node) -> str:
    """How the derivative with respect to the score is: 'one', 'free' of the score, or with a 'score' in it."""
    slope = derivative(tree, SCORE)
    return "one" if slope == ONE else "score" if SCORE in walk(slope) else "free"


def _slope(node: Apply, dx: Node, dy: Node = ZERO, dz: Node = ZERO) -> Node:
    """The slope of an operation by those of its arguments, each of which is used once so that slopes grow no faster than depth."""
    x, y, *_ = (*node.args, ZERO)
    match node.op:
        case "+" | "-":
            return simplified(node.op, dx, dy)
        case "neg":
            return simplified("neg", dx)
        case "*":
            return _add(_mul(dx, y), _mul(x, dy))
        case "/":
            return _div(_sub(dx, _mul(node, dy)), y)
        case "%":
            return _sub(dx, _mul(simplified("//", x, y), dy))
        case "**":
            return _slope_of_power(node, x, y, dx, dy)
        case "min":
            return simplified("where", simplified("<=", x, y), dx, dy)
        case "max":
            return simplified("where", simplified("<=", y, x), dx, dy)
        case "where":
            return simplified("where", x, dy, dz)
        case "abs":
            minus = simplified("where", simplified("<", x, ZERO), Literal(-1.0), ZERO)
            return _mul(simplified("where", simplified("<", ZERO, x), ONE, minus), dx)
        case "exp":
            return _mul(node, dx)
        case "exp2":
            return _mul(_mul(node, LN_2), dx)
        case "log":
            return _div(dx, x)
        case "log2":
            return _div(dx, _mul(x, LN_2))
        case "sqrt":
            return _div(_mul(HALF, dx), node)
        case "rsqrt":
            return _mul(_div(_mul(Literal(-0.5), node), x), dx)
        case "tanh":
            return _mul(_sub(ONE, simplified("**", node, Literal(2))), dx)
        case "sigmoid":
            return _mul(_mul(node, _sub(ONE, node)), dx)
        case "sin":
            return _mul(simplified("cos", x), dx)
        case "cos":
            return _mul(simplified("neg", simplified("sin", x)), dx)
    return ZERO  # floor, and // of floats


def _slope_of_power(node: Apply, x: Node, y: Node, dx: Node, dy: Node) -> Node:
    if y.kind == "int":
        return _mul(_mul(y, simplified("**", x, simplified("-", y, Literal(1)))), dx)
    of_base = _mul(_mul(y, simplified("**", x, _sub(y, ONE))), dx)
    return _add(of_base, _mul(_mul(node, simplified("log", x)), dy))


def _add(x: Node, y: Node) -> Node:
    return simplified("+", x, y)


def _sub(x: Node, y: Node) -> Node:
    return simplified("-", x, y)


def _mul(x: Node, y: Node) -> Node:
    return simplified("*", x, y)


def _div(x: Node, y: Node) -> Node:
    return simplified("/", x, y)
