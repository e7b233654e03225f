"""Which pairs share the elements of an array that scores read, for the gradients of such arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import UnsupportedError
from .layout import Layout, dense_layout
from .scores import Scores, label

AXES = ("b", "h", "h_kv", "q_idx", "kv_idx")  # as in `expression.reads`
SCORE = "score"
MOST_LOOKED_AT = 2**31  # so many pairs of an element and a sum that may belong to it take a GPU a few milliseconds

if TYPE_CHECKING:
    from .backward import BackwardProblem
    from .expression.tree import Node, Read
    from .forward import Problem


@dataclass(frozen=True, slots=True)
class ReadGradient:
    """What the gradient of an array gets from the pairs by one of the places where scores read it.

    Parameters
    ----------
    name : str
        Of the array, as `wrt` has it.
    read : Read or None
        Of the score; None of an option, bias or alibi_slopes.
    array : Layout
        The gradient itself, without gaps.
    of_pairs : Layout
        The same seen as `(*batch, heads, len_q, len_kv)`. A stride of 0 is an axis along which pairs share elements. With
        `gathered`, what is seen so are sums of each query, key or distance instead, and with `scattered`, no stride but 0 counts.
    head_kv_stride : int
        The stride of key-value heads, where an index is one.
    first_element : int
        What indices that are numbers add to the offset of an element.
    heads_summed : int
        How many heads share elements, neighbours.
    of_query, of_key, of_distance : bool
        Whether which element a pair reads depends on its query, on its key, or on how far these are apart alone.
    elements_of : (int, int)
        How many queries and keys elements may belong to. With `clamped` a sequence may have more: an index is a place in a packed
        sequence, and pairs beyond the end of its axis read the last element.
    gathered, scattered : bool
        Whether an index is computed, so that any pairs may share an element. Each element is then added up from those sums that
        belong to it, or, where there are too many of them, what pairs give is added to whichever element they read, in any order.
    by_score : bool
        Whether an index is computed from the score.
    first, last : bool
        Whether it is the first or the last of its array.
    """

    name: str
    read: Read | None
    array: Layout
    of_pairs: Layout
    elements_of: tuple[int, int]
    clamped: bool = False
    head_kv_stride: int = 0
    first_element: int = 0
    heads_summed: int = 1
    of_query: bool = False
    of_key: bool = False
    of_distance: bool = False
    gathered: bool = False
    scattered: bool = False
    by_score: bool = False
    first: bool = True
    last: bool = True
    reaches_all: bool = True  # whether no element of the array is left out
    places: int = 0  # sums that elements are gathered from

    @property
    def elements(self) -> int:
        """How many elements the array has."""
        return math.prod(self.array.shape)

    @property
    def through_sums(self) -> bool:
        """Whether more than one sum goes to an element, or none goes to some."""
        return self.scattered or not (self.first and self.last and self.reaches_all)


def check_sums(scores: Scores, wrt: Iterable[str], deterministic: bool) -> None:
    """Refuse gradients that kernels add up in any order where they are to be added in one.

    Raises
    ------
    UnsupportedError
    """
    if not deterministic:
        return
    for name in wrt:
        for read in _reads_of(scores, name):
            if read is not None and _is_computed(read, scores) and not _has_places(read):
                raise UnsupportedError(
                    f"deterministic: expected False with wrt {name!r}, which the score reads as {read}: kernels add up in any "
                    "order where an index is computed from the score, or from query and key other than by how far they are apart; "
                    "make it a bias, or take backend='numpy'"
                )


def read_gradients(problem: BackwardProblem) -> tuple[ReadGradient, ...]:
    """All parts of the gradients that `wrt` names, those of one array one after the other."""
    found = []
    for name in problem.wrt:
        parts = [_of_read(problem, name, read) for read in _reads_of(problem.forward.scores, name)]
        found += [replace(part, first=i == 0, last=i == len(parts) - 1) for i, part in enumerate(parts)]
    return tuple(found)


def _reads_of(scores: Scores, name: str) -> tuple[Read | None, ...]:
    if name in scores.captured:
        return tuple(read for read in scores.differentiable if read.name == name)
    return (None,)


def _is_computed(read: Read, scores: Scores) -> bool:
    """Whether an index is neither a coordinate nor a number, or a coordinate reaches beyond one axis before another."""
    from .expression.reads import axes_of  # late: it takes the language of expressions
    from .expression.tree import Literal

    axes, shape = axes_of(read), dict(scores.arrays)[read.name].shape
    if any(axis is None and not isinstance(index, Literal) for axis, index in zip(axes, read.args)):
        return True
    return any(len({size for size, of in zip(shape, axes) if of == name}) > 1 for name in scores.free_axes)


def _of_read(problem: BackwardProblem, name: str, read: Read | None) -> ReadGradient:
    p = problem.forward
    own = problem.layout_of(label(name) if name in p.scores.captured else name)
    array = dense_layout(own.shape, reversed(range(len(own.shape))), own.dtype, p.device)
    pairs = (*p.batch, p.heads_q, p.len_q, p.len_kv)
    if read is not None:
        return _of_expression(problem, name, read, array, pairs)
    behind = 0 if name == "bias" else 2  # alibi_slopes have no axes of queries and keys
    lacking = len(pairs) - behind - len(own.shape)
    sizes = (*[1] * lacking, *own.shape, *[1] * behind)
    strides = (*[0] * lacking, *array.strides, *[0] * behind)
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(sizes, strides))
    of_head, of_query, of_key = (stride != 0 for stride in strides[-3:])
    return ReadGradient(
        name,
        None,
        array,
        replace(array, shape=pairs, strides=strides),
        (p.len_q, p.len_kv),
        heads_summed=1 if of_head else p.heads_q,
        of_query=of_query,
        of_key=of_key,
    )


def _of_expression(problem: BackwardProblem, name: str, read: Read, array: Layout, pairs: tuple[int, ...]) -> ReadGradient:
    p = problem.forward
    if _is_computed(read, p.scores):
        return _of_computed(problem, name, read, array, pairs)
    from .expression.reads import axes_of
    from .expression.tree import Literal

    strides = dict.fromkeys(AXES, 0)
    first_element, elements_of = 0, {"q_idx": p.len_q, "kv_idx": p.len_kv}
    for axis, index, size, stride in zip(axes_of(read), read.args, array.shape, array.strides):
        if isinstance(index, Literal):
            first_element += min(max(index.value, 0), size - 1) * stride
        else:
            strides[axis] += stride
            elements_of |= {axis: min(size, elements_of[axis])} if axis in elements_of else {}
    return ReadGradient(
        name,
        read,
        array,
        _of_pairs(array, p.batch, pairs, strides),
        tuple(elements_of.values()),
        clamped=bool({*axes_of(read)} & {*p.scores.free_axes}),
        head_kv_stride=strides["h_kv"],
        first_element=first_element,
        heads_summed=_heads_summed(p, strides),
        of_query=strides["q_idx"] != 0,
        of_key=strides["kv_idx"] != 0,
        reaches_all=len({*axes_of(read)} - {None}) == len(read.args),
    )


def _of_computed(problem: BackwardProblem, name: str, read: Read, array: Layout, pairs: tuple[int, ...]) -> ReadGradient:
    p = problem.forward
    names = _names_in(read)
    if SCORE in names:
        nothing = _of_pairs(array, p.batch, pairs, dict.fromkeys(AXES, 0))
        lens = p.len_q, p.len_kv
        return ReadGradient(name, read, array, nothing, lens, heads_summed=p.heads_q, scattered=True, by_score=True)
    of_query, of_key = "q_idx" in names, "kv_idx" in names
    of_distance = of_query and of_key and _has_places(read)
    places = p.len_q + p.len_kv - 1 if of_distance else p.len_q if of_query else p.len_kv if of_key else 1
    heads = p.heads_q if "h" in names else p.heads_kv if "h_kv" in names else 1
    of_batch = "b" in names or (p.lengths is not None and bool({"q_len", "kv_len"} & names))
    strides = dict.fromkeys(AXES, 0)
    strides["b"] = heads * places * of_batch
    strides |= {"h": places} if "h" in names else {"h_kv": places} if "h_kv" in names else {}
    owners = heads * (math.prod(p.batch) if of_batch else 1)
    few = math.prod(array.shape) * owners * places <= MOST_LOOKED_AT
    if of_batch and of_distance and p.lengths is not None and p.lengths.packed_q:
        few = False  # each sequence would have as many distances as all rows together
    gathered = _has_places(read) and (problem.deterministic or few)
    if gathered:
        strides |= {"q_idx": int(of_query and not of_distance), "kv_idx": int(of_key and not of_distance)}
    return ReadGradient(
        name,
        read,
        array,
        _of_pairs(array, p.batch, pairs, strides),
        (p.len_q, p.len_kv),
        head_kv_stride=strides["h_kv"],
        heads_summed=_heads_summed(p, strides),
        of_query=of_query and not (gathered and of_distance),
        of_key=of_key and not (gathered and of_distance),
        of_distance=gathered and of_distance,
        gathered=gathered,
        scattered=not gathered,
        places=owners * places * gathered,
    )


def _of_pairs(array: Layout, batch: tuple[int, ...], pairs: tuple[int, ...], strides: dict[str, int]) -> Layout:
    of_batch = (strides["b"] * math.prod(batch[axis + 1 :]) for axis in range(len(batch)))
    return replace(array, shape=pairs, strides=(*of_batch, strides["h"], strides["q_idx"], strides["kv_idx"]))


def _heads_summed(problem: Problem, strides: dict[str, int]) -> int:
    return 1 if strides["h"] else problem.heads_per_kv if strides["h_kv"] else problem.heads_q


def _names_in(read: Read) -> set[str]:
    """What its indices depend on."""
    from .expression.tree import Name, walk

    return {node.name for index in read.args for node in walk(index) if isinstance(node, Name)}


def _has_places(read: Read) -> bool:
    """Whether computed indices depend on the query, the key or the distance of both, but on no more of a pair than one of these."""
    names = _names_in(read)
    if SCORE in names:
        return False
    return not {"q_idx", "kv_idx"} <= names or all(_distance_alone(index) for index in read.args)


def _distance_alone(index: Node) -> bool:
    """Whether an expression is one of kv_idx - q_idx, as far as is easily seen."""
    from .expression.tree import Apply, Name, fold

    def slopes(node: Node, below: list[tuple[int, int] | None]) -> tuple[int, int] | None:
        """How fast it changes with the query and with the key; (0, 0) as well if it is any function of their distance."""
        if isinstance(node, Name):
            return int(node.name == "q_idx"), int(node.name == "kv_idx")
        if None in below:
            return None
        if isinstance(node, Apply) and node.op in ("+", "-", "neg", "<", "<=", "==", "!="):
            signs = {"+": (1, 1), "neg": (-1,)}.get(node.op, (1, -1))
            of_query, of_key = (sum(sign * x for sign, x in zip(signs, slope)) for slope in zip(*below))
            return (of_query, of_key) if node.kind != "bool" else (0, 0) if of_query == -of_key else None
        return (0, 0) if all(of_query == -of_key for of_query, of_key in below) else None

    found = fold(index, slopes)
    return found is not None and found[0] == -found[1]
