"""What scores become, written as C++."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..problem.expression.cplusplus import cplusplus
from ..problem.expression.derivative import ONE, ZERO, derivative
from ..problem.expression.operations import SIGNATURES, apply
from ..problem.expression.reads import AXES
from ..problem.expression.simplify import simplify
from ..problem.expression.tree import SCORE, Apply, Name, Node, Read, fold, walk, with_args
from ..problem.layout import Layout
from ..problem.scores import Scores, kind_of, label
from .expression_text import ExpressionText, Pressure
from .hoisting import (
    DISTANCE,
    EXACT,
    KV_FLOAT,
    MOST_UNIFORMS,
    Q_FLOAT,
    UNIT,
    factors_gathered,
    hoisted,
    places_as_floats,
    times_unit,
    uniform,
)
from .structs import constants

NAMES = {
    "score": "score",
    "b": "x.b",
    "h": "x.h",
    "h_kv": "x.h_kv",
    "q_idx": "at.q_idx",
    "kv_idx": "at.kv_idx",
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
MOST_IN_REGISTERS = 2  # ranges of keys, whose ends are read once for a row
FEW_RANGES = 6  # of more, the ends take registers that kernels with lists of tiles do not have
MOST_STATED = 8  # a stride that compilers are told, as arrays of ranges have it: neighbours need no address of their own then
FEW_READS, SHORT_MASK = 3, 16  # reads and nodes of a mask that is not long
SHORT_SCORE = 16  # nodes of a score that is not long, in which there are none of these operations
LONG_OPERATIONS = {op for op, (_, least, _, _) in SIGNATURES.items() if least == "float" and op != "/"} | {"//", "%", "**"}
# Pairs beyond the ends read what the last query or the last key does.
LAST = {"q_idx": "at.element_q(x.q_len)", "kv_idx": "at.element_kv(x.kv_len)"}
OWN = {
    BIAS.name: "at.bias",
    PAIR_MASK.name: "at.seen",
    SLOPE.name: "x.alibi_slope",
    Q_FLOAT.name: "at.q_float()",
    KV_FLOAT.name: "at.kv_float()",
    UNIT.name: "x.unit",
    **{uniform(number).name: f"x.uniform[{number}]" for number in range(MOST_UNIFORMS)},
}
COORDINATES = {NAMES[axis]: LAST.get(axis, NAMES[axis]) for axis in AXES}


def expression_text(scores: Scores, softcap: bool, longest: int) -> ExpressionText:
    """The text of scores.

    Parameters
    ----------
    scores : Scores
    softcap : bool
        Whether scores are bent before.
    longest : int
        The length of the longer sequence.

    Raises
    ------
    UnsupportedError
        If they read more than a kernel is told of.
    """
    arrays = dict(scores.arrays)
    limits = constants()
    most = limits["CAPTURED"] - (scores.place is not None)  # a part of a problem is told in one where it is
    if len(arrays) > most:
        raise UnsupportedError(f"arrays: expected at most {most} of them for kernels, got {len(arrays)}")
    for name, layout in arrays.items():
        if len(layout.shape) > limits["CAPTURED_AXES"]:
            expected = f"at most {limits['CAPTURED_AXES']} axes for kernels"
            raise UnsupportedError(f"{label(name)}: expected {expected}, got shape {layout.shape}")
    trees, uniforms = hoisted(tuple(kernel_trees(scores, softcap, longest)))

    stated = {}
    if scores.bias is not None:
        stated |= {"HAS_BIAS": "true", "BiasElement": ELEMENTS[scores.bias.dtype]}
        stated |= {"BIAS_BY_TWO": "true"} if _by_two(scores.bias) else {}
    if scores.mask_array is not None:
        stated |= {"HAS_PAIR_MASK": "true"}
        stated |= {"MASK_BY_TWO": "true"} if _by_two(scores.mask_array) else {}
    if scores.ranges > MOST_IN_REGISTERS:
        stated |= {"MASK_IN_LOOP": "true"}
    if trees[3] is not None and any(isinstance(node, Read) and (node.args or node == PAIR_MASK) for node in walk(trees[3])):
        stated |= {"MASK_READS": "true"}
    if scores.alibi_slopes is not None:
        stated |= {"HAS_ALIBI": "true", "AlibiSlope": ELEMENTS[scores.alibi_slopes.dtype]}
    if uniforms:
        stated |= {"UNIFORMS": str(len(uniforms))}
    term, score, slope, mask = (written(tree, arrays, scores.free_axes) for tree in trees)
    kind = "PLUS_TERM" if term else "EXPRESSION" if score else "UNCHANGED"
    of_head = tuple(written(tree, arrays, scores.free_axes) for tree in uniforms)
    return ExpressionText(kind, term, score, slope, mask, of_head, tuple(stated.items()), _pressure(scores, trees, softcap))


def _pressure(scores: Scores, trees: tuple[Node | None, ...], softcap: bool) -> Pressure:
    """What the trees of `kernel_trees` take."""
    term, value, _, mask = trees
    reads = any(
        isinstance(node, Read) and (node.args or node in (BIAS, PAIR_MASK)) and node.name != DISTANCE
        for tree in (term, value, mask)
        if tree is not None
        for node in walk(tree)
    )
    asked = [scores.score, scores.bias, scores.alibi_slopes, scores.mask, scores.mask_array]
    things = sum(x is not None for x in asked)
    if things > 2:
        return Pressure.MANY
    if (things > 1 and (reads or mask is not None)) or (value is not None and reads):
        return Pressure.SEVERAL
    if value is not None:
        return Pressure.LONG_EXPRESSION if softcap or _is_long_score(value) else Pressure.EXPRESSION
    if scores.bias is not None:
        return Pressure.BIAS
    if scores.mask_array is not None:
        return Pressure.ARRAY_MASK
    if scores.ranges > FEW_RANGES:
        return Pressure.SEVERAL
    if mask is not None and _is_long(mask):
        return Pressure.LONG_MASK
    if mask is not None:
        return Pressure.READING_MASK if _reads_keys(mask) else Pressure.MASK
    return Pressure.LOOKUPS if reads else Pressure.TERM


def _is_long(mask: Node) -> bool:
    """Whether four warpgroups have no registers for what is asked of a pair: two ranges of keys are long, documents are not."""
    nodes = list(walk(mask))
    return len(nodes) > SHORT_MASK or sum(isinstance(node, Read) and bool(node.args) for node in nodes) > FEW_READS


def _is_long_score(value: Node) -> bool:
    """The same of what a score becomes: the factor of a distance is not long, a tanh is."""
    nodes = list(walk(value))
    return len(nodes) > SHORT_SCORE or any(isinstance(node, Apply) and node.op in LONG_OPERATIONS for node in nodes)


def _reads_keys(mask: Node) -> bool:
    """Whether it reads what a key has, as documents do."""
    reads = (node for node in walk(mask) if isinstance(node, Read) and node.args)
    return any(isinstance(node, Name) and node.name == "kv_idx" for read in reads for node in walk(read))


def _by_two(array: Layout) -> bool:
    """Whether the elements of two neighbouring keys can be read at once."""
    *shape, keys = array.shape
    *strides, step = array.strides
    apart = all(stride % 2 == 0 for size, stride in zip(shape, strides) if size > 1)
    return keys % 2 == 0 and step == 1 and apart and array.alignment % (2 * array.itemsize) == 0


def kernel_trees(scores: Scores, softcap: bool, longest: int) -> tuple[Node | None, ...]:
    """What is added to a score, what it becomes, its slope, and which pairs take part; None for what the file says."""
    value, mask = simplify(value_tree(scores)), mask_tree(scores)
    slope = simplify(derivative(value, SCORE))
    term = None
    if value == SCORE:
        value = slope = None
    elif slope == ONE and not softcap and _is_sum_with_score(value):
        term, value, slope = times_unit(simplify(without_score(value))), None, None
    return of_places((term, value, slope, mask), longest)


def of_places(trees: tuple[Node | None, ...], longest: int) -> tuple[Node | None, ...]:
    """Trees with places as floats, if these hold them exactly, and factors gathered."""
    if longest < EXACT:
        trees = tuple(tree and places_as_floats(tree) for tree in trees)
    return tuple(tree and factors_gathered(tree) for tree in trees)


def _is_sum_with_score(value: Node) -> bool:
    """Whether the score is an addend and nothing else is made of it: what is rounded, or a condition, has no slope either."""

    def only_added(node: Node, below: list[tuple[bool, bool]]) -> tuple[bool, bool]:
        """Whether the score is in it, and whether nowhere but as an addend."""
        inside = node == SCORE or any(is_in for is_in, _ in below)
        adds = isinstance(node, Apply) and (node.op in ("+", "-", "neg") or (node.op == "where" and not below[0][0]))
        return inside, not inside or node == SCORE or (adds and all(added for _, added in below))

    return fold(value, only_added)[1]


def without_score(value: Node) -> Node:
    """What a score of 0 becomes."""
    return fold(value, lambda node, args: ZERO if node == SCORE else with_args(node, args))


def written(tree: Node | None, arrays: dict[str, Layout], free_axes: tuple[str, ...] = ()) -> str:
    """A tree as C++ of what ``kernels_cu/tile/score.cuh`` has; '' for none."""
    return "" if tree is None else cplusplus(tree, NAMES, lambda name, indices: read_text(name, indices, arrays, free_axes))


def value_tree(scores: Scores) -> Node:
    """What scores become."""
    tree: Node = SCORE if scores.score is None else scores.score.tree
    if scores.bias is not None:
        tree = apply("+", tree, BIAS)
    if scores.alibi_slopes is not None:
        tree = apply("-", tree, apply("*", SLOPE, distance_tree()))
    return tree


def distance_tree() -> Node:
    """How far a key is from a query, bottom right: the last query is at the last key."""
    place = apply("+", Name("q_idx"), apply("-", Name("kv_len"), Name("q_len")))
    return apply("abs", apply("-", place, Name("kv_idx")))


def mask_tree(scores: Scores) -> Node | None:
    """Which pairs take part; None is all."""
    tree = None if scores.mask is None else scores.mask.tree
    if scores.mask_array is None:
        return tree
    return PAIR_MASK if tree is None else apply("and", tree, PAIR_MASK)


def read_text(name: str, indices: list[str], arrays: dict[str, Layout], free_axes: tuple[str, ...]) -> str:
    if name == DISTANCE:
        return f"at.distance({indices[0]})"
    if name in OWN:
        return OWN[name]
    number, layout = list(arrays).index(name), arrays[name]
    kind = kind_of(name, layout.dtype)
    if layout.shape == () and layout.device is None:
        return f"scalar<{kind}>(x, {number})"
    if 0 in layout.shape:  # of an array without elements 0 is read
        return f"{kind}(0)"
    # An index that is a coordinate is within its axis, which was checked; a literal is compared here.
    checked = COORDINATES.keys() - {NAMES[axis] for axis in free_axes}
    within = all(i in checked or (i.isdigit() and int(i) < size) for i, size in zip(indices, layout.shape))
    function = "captured_within" if within else "captured"
    if within:
        indices = [COORDINATES.get(index, index) for index in indices]
    reach = sum(abs(stride) * (size - 1) for size, stride in zip(layout.shape, layout.strides))
    offset = "int" if reach < 2**31 else "i64"  # that of 64 bits takes three times the instructions
    strides = [stride if 0 < stride <= MOST_STATED else 0 for stride in layout.strides] if within else []
    types = ", ".join([kind, ELEMENTS[layout.dtype], offset, *map(str, strides)])
    return f"{function}<{types}>({', '.join(['x', str(number), *indices])})"
