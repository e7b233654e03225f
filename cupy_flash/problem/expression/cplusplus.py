"""An expression as C++ of float, int and bool."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy

from .operations import LARGEST
from .tree import Apply, Literal, Name, Node, Read, fold

# The functions that C++ is to have. Those of two kinds are overloaded; `power` is a template of the exponent.
FUNCTIONS = {
    **{("float", op): f"{op}f" for op in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor")},
    ("float", "tanh"): "tanh_by_sinh",
    ("float", "abs"): "fabsf",
    ("float", "min"): "fminf",
    ("float", "max"): "fmaxf",
    ("int", "abs"): "abs",
    ("int", "min"): "min",
    ("int", "max"): "max",
    ("float", "sigmoid"): "sigmoid",
    ("float", "**"): "powf",
    **{(kind, "//"): "floor_div" for kind in ("int", "float")},
    **{(kind, "%"): "floor_mod" for kind in ("int", "float")},
    ("float", "float"): "float",
    ("int", "int"): "int",
}
POWER = "power"
INFINITY = "infinity()"
# Which C++ spells otherwise. Both sides of "and" are computed: nothing depends on the first, and branches take registers and time.
OPERATORS = {"and": "&", "or": "|", "not": "!", "neg": "-"}


def cplusplus(tree: Node, names: Mapping[str, str], read: Callable[[str, list[str]], str]) -> str:
    """The C++ text of a tree, which holds nothing of the user's but what `read` makes of the name of an array.

    Parameters
    ----------
    tree : Node
        What to write.
    names : mapping
        The C++ text of each name that it uses, which binds as tightly as a name.
    read : callable
        Makes the text of an element, of the kind of the array, from the name and the texts of the indices.
    """

    return fold(tree, lambda node, args: node_text(node, args, names, read))


def node_text(node: Node, args: list[str], names: Mapping[str, str], read: Callable[[str, list[str]], str]) -> str:
    """The text of a node from those of its arguments; all else is as in `cplusplus`."""
    match node:
        case Literal():
            return _literal(node.value)
        case Name():
            return names[node.name]
        case Read():
            return read(node.name, args)
        case Apply(op="where"):
            return f"({args[0]} ? {args[1]} : {args[2]})"
        case Apply(op="**", args=(_, Literal(value=int(power)))):
            return f"{POWER}<{power}>({args[0]})"
    function = FUNCTIONS.get((node.kind, node.op))
    return f"{function}({', '.join(args)})" if function is not None else operator_text(node.op, args)


def operator_text(op: str, args: list[str]) -> str:
    """An operator of one argument or of two, in parentheses."""
    operator = OPERATORS.get(op, op)
    return f"({operator}{args[0]})" if len(args) == 1 else f"({args[0]} {operator} {args[1]})"


def _literal(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if value == -LARGEST - 1:
            return f"(-{LARGEST} - 1)"  # C++ has no negative literals, and no int for the magnitude of this one
        return str(value) if value >= 0 else f"({value})"
    with numpy.errstate(over="ignore"):
        stored = numpy.float32(value)
    number = float(abs(stored))
    # In decimal only what decimal is exact for, so that no compiler has anything to round.
    text = INFINITY if math.isinf(number) else f"{number!r}f" if float(str(abs(stored))) == number else f"{number.hex()}f"
    return f"(-{text})" if math.copysign(1, value) < 0 else text
