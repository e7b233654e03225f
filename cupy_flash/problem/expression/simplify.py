"""The same expression with less to compute."""

from __future__ import annotations

import math

import numpy

from .evaluate import evaluate
from .operations import LARGEST, apply, shifts_too_far
from .tree import Apply, Literal, Node, fold

ZEROS = {"float": Literal(0.0), "int": Literal(0)}  # a zero has no sign


def simplify(tree: Node) -> Node:
    """An expression of the same value, except that a product with a literal zero is zero, of NaN and infinity as well.

    The sign of a zero may differ. The indices of reads are left as they are, so that a read is still the same one.
    """
    return fold(tree, lambda node, args: simplified(node.op, *args) if isinstance(node, Apply) else node)


def simplified(op: str, *args: Node) -> Node:
    """The node of an operation of arguments that are simple already."""
    node = _less(op, *args)
    return ZEROS[node.kind] if isinstance(node, Literal) and node.value == 0 and node.kind in ZEROS else node


def _less(op: str, *args: Node) -> Node:
    if shifts_too_far(op, args):  # as the user could not write it, but make it of literals
        return Apply(op, args, "int")
    node = apply(op, *args)
    if not isinstance(node, Apply):
        return node
    if all(isinstance(arg, Literal) for arg in node.args):
        return _folded(node)
    match node.op, *node.args:
        case ("+", x, Literal(value=0)) | ("+", Literal(value=0), x) | ("-", x, Literal(value=0)):
            return x
        case "-", Literal(value=0), x:
            return simplified("neg", x)
        case ("*", Literal(value=0) as zero, _) | ("*", _, Literal(value=0) as zero) | ("/", Literal(value=0) as zero, _):
            return zero
        case ("*", x, Literal(value=1)) | ("*", Literal(value=1), x) | ("/", x, Literal(value=1)) | ("**", x, Literal(value=1)):
            return x
        case ("*", x, Literal(value=-1)) | ("*", Literal(value=-1), x):
            return simplified("neg", x)
        case ("neg" as outer, Apply(op=inner, args=(x,))) | ("not" as outer, Apply(op=inner, args=(x,))) if inner == outer:
            return x
        case "**", x, Literal(value=0):
            return Literal(1.0 if x.kind == "float" else 1)
        case ("where", Literal(value=True), x, _) | ("where", Literal(value=False), _, x):
            return x
        case "where", _, x, y if x == y:
            return x
        case ("and", Literal(value=True), x) | ("and", x, Literal(value=True)):
            return x
        case ("or", Literal(value=False), x) | ("or", x, Literal(value=False)):
            return x
        case ("and" | "or", Literal() as known, _) | ("and" | "or", _, Literal() as known):
            return known
    return node


def _folded(node: Apply) -> Node:
    """What an operation of literals makes, where that is the same in all floats and ints that it may be computed in."""
    if node.op in ("//", "%") and node.args[1].value == 0:
        return node
    low, high = (evaluate(node, {}, {}, dtype).item() for dtype in (numpy.float32, numpy.float64))
    fits = math.isfinite(high) if node.kind == "float" else -LARGEST - 1 <= high <= LARGEST
    return Literal(high) if fits and low == high else node
