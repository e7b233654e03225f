"""What scores become, written as C++."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..problem.expression.cplusplus import cplusplus
from ..problem.expression.derivative import derivative
from ..problem.expression.operations import apply
from ..problem.expression.reads import AXES
from ..problem.expression.tree import SCORE, Name, Node, Read
from ..problem.layout import Layout
from ..problem.scores import Scores, kind_of, label
from .expression_text import ExpressionText
from .structs import constants

NAMES = {
    "score": "score",
    "b": "x.b",
    "h": "x.h",
    "h_kv": "x.h_kv",
    "q_idx": "q_idx",
    "kv_idx": "kv_idx",
    "q_len": "x.q_len",
    "kv_len": "x.kv_len",
}
# What expression.cuh calls elements in memory.
ELEMENTS = {
    **{"float16": "half_t", "bfloat16": "bfloat_t", "float32": "float", "float64": "double", "bool": "unsigned char"},
    **{"int8": "signed char", "int16": "short", "int32": "int", "int64": "i64"},
    **{"uint8": "unsigned char", "uint16": "u16", "uint32": "u32", "uint64": "u64"},
}
# The operands of attention that its scores read, as reads of names that no user can give.
BIAS, PAIR_MASK, SLOPE = (Read(f"@{name}", (), kind) for name, kind in (("bias", "float"), ("mask", "bool"), ("slope", "float")))
OWN = {
    BIAS.name: "of_pair<float, BiasElement>(x.bias, q_idx, kv_idx)",
    PAIR_MASK.name: "of_pair<bool, unsigned char>(x.pair_mask, q_idx, kv_idx)",
    SLOPE.name: "x.alibi_slope",
}


def expression_text(scores: Scores) -> ExpressionText:
    """The text of scores.

    Raises
    ------
    UnsupportedError
        If they read more than a kernel is told of.
    """
    arrays = dict(scores.arrays)
    limits = constants()
    if len(arrays) > limits["CAPTURED"]:
        raise UnsupportedError(f"arrays: expected at most {limits['CAPTURED']} of them for kernels, got {len(arrays)}")
    for name, layout in arrays.items():
        if len(layout.shape) > limits["CAPTURED_AXES"]:
            expected = f"at most {limits['CAPTURED_AXES']} axes for kernels"
            raise UnsupportedError(f"{label(name)}: expected {expected}, got shape {layout.shape}")
    value, mask = value_tree(scores), mask_tree(scores)

    def written(tree: Node) -> str:
        return cplusplus(tree, NAMES, lambda name, indices: _read(name, indices, arrays))

    stated = {}
    if scores.bias is not None:
        stated |= {"HAS_BIAS": "true", "BiasElement": ELEMENTS[scores.bias.dtype]}
    if scores.mask_array is not None:
        stated |= {"HAS_PAIR_MASK": "true"}
    if scores.alibi_slopes is not None:
        stated |= {"HAS_ALIBI": "true", "AlibiSlope": ELEMENTS[scores.alibi_slopes.dtype]}
    return ExpressionText(
        "" if value is SCORE else written(value),
        "" if value is SCORE else written(derivative(value, SCORE)),
        "" if mask is None else written(mask),
        tuple(stated.items()),
    )


def value_tree(scores: Scores) -> Node:
    """What scores become."""
    tree: Node = SCORE if scores.score is None else scores.score.tree
    if scores.bias is not None:
        tree = apply("+", tree, BIAS)
    if scores.alibi_slopes is not None:
        # Bottom right: the last query is at the last key.
        place = apply("+", Name("q_idx"), apply("-", Name("kv_len"), Name("q_len")))
        distance = apply("abs", apply("-", place, Name("kv_idx")))
        tree = apply("-", tree, apply("*", SLOPE, distance))
    return tree


def mask_tree(scores: Scores) -> Node | None:
    """Which pairs take part; None is all."""
    tree = None if scores.mask is None else scores.mask.tree
    if scores.mask_array is None:
        return tree
    return PAIR_MASK if tree is None else apply("and", tree, PAIR_MASK)


def _read(name: str, indices: list[str], arrays: dict[str, Layout]) -> str:
    if name in OWN:
        return OWN[name]
    number, layout = list(arrays).index(name), arrays[name]
    kind = kind_of(name, layout.dtype)
    if layout.shape == () and layout.device is None:
        return f"scalar<{kind}>(x, {number})"
    if 0 in layout.shape:  # of an array without elements 0 is read
        return f"{kind}(0)"
    coordinates = {NAMES[axis] for axis in AXES}
    # An index that is a coordinate is within its axis, which was checked.
    function = "captured_within" if set(indices) <= coordinates else "captured"
    return f"{function}<{kind}, {ELEMENTS[layout.dtype]}>({', '.join(['x', str(number), *indices])})"


