"""Which tiles of pairs take part, written as C++ of intervals, which ``kernels_cu/tile/interval.cuh`` has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..problem.expression.cplusplus import node_text, operator_text
from ..problem.expression.tree import Apply, Name, Node, Read, fold, walk
from ..problem.layout import Layout
from ..problem.scores import Scores, kind_of
from .expression_text import ExpressionText
from .expressions import ELEMENTS, NAMES, OWN, kernel_trees, read_text
from .hoisting import DISTANCE, KV_FLOAT, Q_FLOAT, hoisted, is_uniform, uniform

# What intervals have of operations, by the kind of the first argument. What comes of any other may be anything.
OPERATORS = {
    "int": ("+", "-", "*", "neg", ">>", "<", "<=", "==", "!="),
    "float": ("+", "-", "*", "neg", "<", "<=", "==", "!="),
    "bool": ("and", "or", "not", "==", "!="),
}
OF_BOTH = {"min": "min", "max": "max", "abs": "abs"}
FUNCTIONS = {
    "int": {**OF_BOTH, "//": "floor_div", "%": "floor_mod", "float": "as_float"},
    "float": {**OF_BOTH, "floor": "floor", "int": "as_int"},
    "bool": {"where": "where", "int": "as_int", "float": "as_float"},
}
# What is the same wherever a compiler computes it: it neither overflows, nor has a product, which a sum may leave unrounded.
SAME_ANYWHERE = {
    "int": ("&", "|", "^", "~", "min", "max", "where"),
    "float": ("float", "+", "-", "/", "neg", "abs", "min", "max", "where"),
}


def with_tiles(text: ExpressionText, scores: Scores, longest: int) -> ExpressionText:
    """The text of masks, and of tiles besides pairs. What pairs compute lies in the intervals of their tile.

    Parameters
    ----------
    text : ExpressionText
        `expression_text` of these scores.
    scores : Scores
        Which mask pairs and do nothing else.
    longest : int
        As of `expression_text`.
    """
    (*_, mask), uniforms = hoisted(kernel_trees(scores, False, longest))
    return replace(text, takes_part_in=tile_text(mask, uniforms, dict(scores.arrays), scores.free_axes))


def tile_text(mask: Node, uniforms: Sequence[Node], arrays: dict[str, Layout], free_axes: tuple[str, ...]) -> str:
    """The interval of a mask. What all pairs have in common is computed as they do, if it is the same wherever that is."""
    # A product that is computed before may be one with a sum for some, and for others not.
    inexact = {uniform(number).name for number, tree in enumerate(uniforms) if not all(map(_is_common, walk(tree)))}

    def read(name: str, indices: list[str]) -> str:
        return read_text(name, indices, arrays, free_axes)

    def visit(node: Node, args: list[tuple[str, bool]]) -> tuple[str, bool]:
        """The text of a node, and whether it is that of a number."""
        if isinstance(node, Read) and node.name in inexact:
            return f"widened(exactly<float>({OWN[node.name]}))", False
        if _is_common(node) and all(is_number for _, is_number in args):
            return node_text(node, [of_arg for of_arg, _ in args], NAMES, read), True
        intervals = [f"exactly<{arg.kind}>({of})" if is_number else of for arg, (of, is_number) in zip(node.args, args)]
        return _of_interval(node, intervals, arrays), False

    text, is_number = fold(mask, visit)
    return f"exactly<bool>({text})" if is_number else text


def _is_common(node: Node) -> bool:
    """Whether a node is the same number for all pairs of a head if its arguments are."""
    if isinstance(node, Apply):
        return node.kind == "bool" or node.op in SAME_ANYWHERE[node.kind]
    return is_uniform(replace(node, args=()) if isinstance(node, Read) else node)


def _of_interval(node: Node, args: list[str], arrays: dict[str, Layout]) -> str:
    match node:
        case Name():
            return NAMES[node.name]
        case Read() if node in (Q_FLOAT, KV_FLOAT):
            return OWN[node.name]
        case Read(name=name) if name == DISTANCE:
            return f"at.distance({args[0]})"
        case Read(name=name) if name in arrays:
            return _elements(name, args, arrays)
        case Apply():
            of = node.args[0].kind
            if node.op in FUNCTIONS[of]:
                return f"{FUNCTIONS[of][node.op]}({', '.join(args)})"
            if node.op in OPERATORS[of]:
                return operator_text(node.op, args)
    return f"anything<{node.kind}>()"


def _elements(name: str, indices: list[str], arrays: dict[str, Layout]) -> str:
    layout = arrays[name]
    kind = kind_of(name, layout.dtype)
    if 0 in layout.shape:
        return f"exactly<{kind}>(0)"
    return f"captured_in<{kind}, {ELEMENTS[layout.dtype]}>({', '.join(['x', str(list(arrays).index(name)), *indices])})"
