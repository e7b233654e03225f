"""Expressions as the user gives them: a text, or a Python function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import shown

if TYPE_CHECKING:
    from .tree import Node
    from .vocabulary import Declaration


@dataclass(frozen=True, slots=True)
class Expression:
    """A score or a mask. Equal ones compile to the same; their `str` alone leaves open of what kinds their arrays are.

    Parameters
    ----------
    tree : Node
        A float for a score, a bool for a mask.
    declarations : tuple of Declaration
        The arrays that it reads, in the order in which it does.
    """

    tree: Node
    declarations: tuple[Declaration, ...]
    _hash: int = field(init=False, repr=False, compare=False)  # kept: a call looks for its plan by it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.tree, self.declarations)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return str(self.tree)


def score_expression(given: str | Callable[..., object], declarations: Iterable[Declaration]) -> Expression:
    """What the user gave as a score."""
    return _expression("score", given, declarations)


def mask_expression(given: str | Callable[..., object], declarations: Iterable[Declaration]) -> Expression:
    """What the user gave as a mask."""
    return _expression("mask", given, declarations)


def _expression(option: str, given: object, declarations: Iterable[Declaration]) -> Expression:
    from .parse import parse  # late: calls without expressions need none of the language
    from .reads import reads
    from .trace import trace

    declared = {declaration.name: declaration for declaration in declarations}
    if isinstance(given, str):
        tree = parse(given, declared.values(), option)
    elif callable(given):
        tree = trace(given, declared.values(), option)
    else:
        raise TypeError(f"{option}: expected an expression or a function, got {shown(given)}")
    return Expression(tree, tuple(dict.fromkeys(declared[read.name] for read in reads(tree))))
