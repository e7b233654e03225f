"""What scores and masks are told of where a block lies: in their texts places of a block become places of the whole.

A coordinate becomes itself plus a number that a call is told, so that one kernel serves all blocks, on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from ..errors import UnsupportedError
from ..problem.scores import Scores

if TYPE_CHECKING:
    from ..problem.expression.entry import Expression
    from ..problem.expression.tree import Node

MOVED = ("b", "q_idx", "kv_idx", "h", "h_kv")  # coordinates that a number is added to; the others, lengths, are replaced by one
SLOPES = "alibi_slopes"


@dataclass(frozen=True)
class Placed:
    """Score and mask of a call on a part, as expressions that read where it is.

    Parameters
    ----------
    score, mask : Expression or None
    numbers : dict of str to str
        What each array that tells a place is called, by the coordinate that it is of.
    slopes : str or None
        What the slopes of ALiBi are called, which are a part of the score.
    """

    score: Expression | None
    mask: Expression | None
    numbers: dict[str, str]
    slopes: str | None

    @property
    def is_nothing(self) -> bool:
        """Whether there are no expressions."""
        return self.score is None and self.mask is None

    def arrays(self, given: Mapping[str, Any], slopes: Any, at: Mapping[str, int]) -> dict[str, Any]:
        """What the expressions read: the user's arrays, and numbers for where a part is."""
        found = dict(given)
        if self.slopes is not None:
            found[self.slopes] = slopes
        return found | {name: numpy.asarray(at[coordinate], numpy.int64) for coordinate, name in self.numbers.items()}


def placed(scores: Scores, slopes_shape: tuple[int, ...], moving: tuple[str, ...]) -> Placed:
    """The expressions of a whole, for calls in which these coordinates count from elsewhere."""
    if scores.score is None and scores.mask is None and scores.alibi_slopes is None:
        return Placed(None, None, {}, None)
    from ..problem.expression.entry import Expression  # late: calls without expressions need none of the language
    from ..problem.expression.operations import apply
    from ..problem.expression.reads import reads
    from ..problem.expression.replaced import replaced
    from ..problem.expression.tree import SCORE, Name, Read, walk
    from ..problem.expression.vocabulary import Declaration

    taken = {*scores.captured}

    def free(name: str) -> str:
        while name in taken:
            name += "_"
        return name

    names = {coordinate: free(f"{coordinate}_from") for coordinate in moving}
    by: dict[str, Node] = {}
    for coordinate, name in names.items():
        number = Read(name, (), "int")
        by[coordinate] = apply("+", Name(coordinate), number) if coordinate in MOVED else number
    slopes = None if scores.alibi_slopes is None else free(SLOPES)
    score = None if scores.score is None else scores.score.tree
    declarations = [*(scores.score.declarations if scores.score else ()), *(scores.mask.declarations if scores.mask else ())]
    if slopes is not None:
        slope = _slope(slopes, slopes_shape)
        last = apply("-", apply("+", Name("q_idx"), Name("kv_len")), Name("q_len"))
        score = apply("-", SCORE if score is None else score, apply("*", slope, apply("abs", apply("-", last, Name("kv_idx")))))
        declarations.append(Declaration(slopes, "float", len(slopes_shape)))
    declarations += [Declaration(name, "int", 0) for name in names.values()]
    declared, made, used = {declaration.name: declaration for declaration in declarations}, [], set()
    for tree in (score, None if scores.mask is None else scores.mask.tree):
        if tree is None:
            made.append(None)
            continue
        used |= {node.name for node in walk(tree) if isinstance(node, Name)}
        tree = replaced(tree, by)
        made.append(Expression(tree, tuple(dict.fromkeys(declared[read.name] for read in reads(tree)))))
    return Placed(*made, {coordinate: name for coordinate, name in names.items() if coordinate in used}, slopes)


def _slope(name: str, shape: tuple[int, ...]) -> Node:
    """The slope of a head, from an array of this shape."""
    from ..problem.expression.tree import Literal, Name, Read

    if len(shape) > 2:
        raise UnsupportedError(f"alibi_slopes: expected shape (heads,) or (batch, heads) on several ranks, got {shape}")
    indices = (Name("b"), Name("h"))[-len(shape) :]
    return Read(name, tuple(Literal(0) if size == 1 else index for index, size in zip(indices, shape)), "float")
