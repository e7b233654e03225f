"""The operators and functions of the language: what kinds they take, and the nodes that they make.

Conversions are nodes as well: all arguments of a node are of the kind that its operation computes in. What can be said in several
ways makes one tree: ``a > b`` is ``b < a``, ``a if c else b`` is ``where(c, a, b)``, ``clip`` is a ``min`` of a ``max``, ``min`` of
three is one of two twice, and ``& | ^ ~`` of bools are ``and``, ``or``, ``!=`` and ``not``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

from .tree import KINDS, Apply, Literal, Node, extent

MOST_NODES, DEEPEST = 1000, 100
BITS = 32  # of an int where it is compiled
LARGEST = 2 ** (BITS - 1) - 1
HIGHEST_POWER = 8  # that is made of multiplications
SHIFTS = ("<<", ">>")

ARTICLE = {"bool": "a bool", "int": "an int", "float": "a float"}

# Of each operation: how many arguments it has, the lowest and the highest kind that it computes in, and the kind of its value, None
# if that is the kind that it computes in.
OF_NUMBERS, OF_FLOATS, OF_INTS, OF_BOOLS = ("int", "float"), ("float", "float"), ("int", "int"), ("bool", "bool")
SIGNATURES: dict[str, tuple[int, str, str, str | None]] = {
    **{op: (2, *OF_NUMBERS, None) for op in ("+", "-", "*", "//", "%", "min", "max")},
    **{op: (1, *OF_NUMBERS, None) for op in ("neg", "pos", "abs")},
    **{op: (2, *OF_NUMBERS, "bool") for op in ("<", "<=")},
    **{op: (2, "bool", "float", "bool") for op in ("==", "!=")},
    "/": (2, *OF_FLOATS, None),
    **{op: (1, *OF_FLOATS, None) for op in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt")},
    **{op: (1, *OF_FLOATS, None) for op in ("tanh", "sigmoid", "sin", "cos", "floor")},
    **{op: (2, *OF_INTS, None) for op in ("&", "|", "^", "<<", ">>")},
    "~": (1, *OF_INTS, None),
    **{op: (2, *OF_BOOLS, None) for op in ("and", "or")},
    "not": (1, *OF_BOOLS, None),
}
BITWISE_OF_BOOLS = {"&": "and", "|": "or", "^": "!=", "~": "not"}
SWAPPED = {">": "<", ">=": "<="}

# How many arguments each function has; None is any number from 2.
FUNCTIONS: dict[str, int | None] = {"where": 3, "min": None, "max": None, "clip": 3, "abs": 1}
FUNCTIONS |= {op: 1 for op, (_, low, _, _) in SIGNATURES.items() if low == "float" and op != "/"}
FUNCTIONS |= {"float": 1, "int": 1}


class Mistake(ValueError):
    """What was expected of a part of an expression and what came; `arg` is the place of the argument at fault, if it is one."""

    def __init__(self, expected: str, got: str, hint: str = "", arg: int | None = None):
        hint = f" ({hint})" if hint else ""
        super().__init__(f"expected {expected}, got {got}{hint}")
        self.expected, self.got, self.hint, self.arg = expected, got, hint, arg


def literal(value: bool | int | float) -> Literal:
    """A number as a node."""
    if isinstance(value, float) and math.isnan(value):
        raise Mistake("a number", "NaN")
    if isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        raise Mistake("an int of 32 bits", "a larger one", "write a float, such as 1e10, for a larger number")
    return Literal(value)


def convert(node: Node, kind: str) -> Node:
    """A node as one of another kind: float of an int, an int of a bool, or an int of a float, which is towards zero."""
    if node.kind == kind:
        return node
    if isinstance(node, Literal) and KINDS.index(node.kind) < KINDS.index(kind):
        return Literal(float(node.value) if kind == "float" else int(node.value))
    return Apply(kind, (node,), kind)


def apply(op: str, *args: Node) -> Node:
    """The node of an operator or of a function of the language."""
    count = FUNCTIONS.get(op, len(args))
    if len(args) < 2 if count is None else len(args) != count:
        raise Mistake(f"{count or '2 or more'} argument{'s' * (count != 1)} of '{op}'", str(len(args)))
    if op in SWAPPED:
        return apply(SWAPPED[op], *reversed(args))
    if op in ("min", "max"):
        return reduce(lambda left, right: _typed(op, left, right), args)
    if op == "clip":
        return apply("min", apply("max", args[0], args[1]), args[2])
    if op in ("float", "int"):
        return convert(args[0], op)
    if op == "where":
        return _where(*args)
    if op == "**":
        return _power(*args)
    if op in BITWISE_OF_BOOLS and all(arg.kind == "bool" for arg in args):
        return _typed(BITWISE_OF_BOOLS[op], *args)
    return _typed(op, *args)


def limited(tree: Node) -> Node:
    """The tree, unless it is too large."""
    size, depth = extent(tree)
    if size > MOST_NODES:
        raise Mistake(f"at most {MOST_NODES} nodes", str(size), "conversions count as well")
    if depth > DEEPEST:
        raise Mistake(f"nesting of at most {DEEPEST}", str(depth), "conversions count as well")
    return tree


def _typed(op: str, *args: Node) -> Node:
    _, low, high, value = SIGNATURES[op]
    for place, arg in enumerate(args):
        if KINDS.index(arg.kind) > KINDS.index(high):
            hint = f"'{op}' is of bools; a comparison makes one" if high == "bool" else "int() makes one"
            raise Mistake(f"{ARTICLE[high]} for '{op}'", ARTICLE[arg.kind], hint, place)
    kind = _joined(low, *args)
    args = tuple(convert(arg, kind) for arg in args)
    if shifts_too_far(op, args):
        raise Mistake(f"0 to {BITS - 1} bits for '{op}'", str(args[1]), arg=1)
    if op == "pos":
        return args[0]
    if op == "neg" and isinstance(args[0], Literal) and args[0].value != -LARGEST - 1:
        return Literal(-args[0].value)
    return Apply(op, args, value or kind)


def shifts_too_far(op: str, args: Sequence[Node]) -> bool:
    """Whether an operation shifts by a literal that C++ leaves undefined."""
    return op in SHIFTS and isinstance(args[1], Literal) and not 0 <= args[1].value < BITS


def _where(condition: Node, then: Node, otherwise: Node) -> Node:
    if condition.kind != "bool":
        raise Mistake("a bool as a condition", ARTICLE[condition.kind], "a comparison makes one", 0)
    kind = _joined("bool", then, otherwise)
    return Apply("where", (condition, convert(then, kind), convert(otherwise, kind)), kind)


def _power(base: Node, exponent: Node) -> Node:
    """A power of a small literal int is made of multiplications, and of the kind of its base; any other is one of floats."""
    base = convert(base, _joined("int", base))
    if isinstance(exponent, Literal) and exponent.kind == "int" and 0 <= exponent.value <= HIGHEST_POWER:
        return Apply("**", (base, exponent), base.kind)
    if base.kind == "int" and exponent.kind != "float":
        expected = f"a literal from 0 to {HIGHEST_POWER} as a power of an int"
        got = str(exponent) if isinstance(exponent, Literal) else "another expression"
        raise Mistake(expected, got, "float() of either makes a power of floats", 1)
    return Apply("**", (convert(base, "float"), convert(exponent, "float")), "float")


def _joined(low: str, *args: Node) -> str:
    """The lowest kind that holds all of these."""
    return max(low, *(arg.kind for arg in args), key=KINDS.index)
