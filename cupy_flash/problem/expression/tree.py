"""What an expression is: a tree of frozen nodes, each of a kind, and its text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

KINDS = ("bool", "int", "float")  # each holds those before it
NAMES = {name: "int" for name in ("b", "h", "h_kv", "q_idx", "kv_idx", "q_len", "kv_len")} | {"score": "float"}

# Operators from the loosest to the tightest, as in Python; what is none of them is a function.
LEVELS = (
    ("or",),
    ("and",),
    ("not",),
    ("<", "<=", "==", "!="),
    ("|",),
    ("^",),
    ("&",),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "//", "%"),
    ("neg", "~"),
    ("**",),
)
BINDING = {op: level for level, ops in enumerate(LEVELS) for op in ops}
PREFIX = {"not": "not ", "neg": "-", "~": "~"}
UNCHAINED = ("<", "<=", "==", "!=", "**")  # operators whose left operand is in parentheses if it is of their level

T = TypeVar("T")


class Node:
    """A part of an expression. Nodes are equal if their trees are; their `str` is the text that parses to an equal tree.

    Neither equality nor text recurses, since derivatives are deeper than what they are of.
    """

    __slots__ = ()

    kind: str  # one of `KINDS`
    args: tuple[Node, ...]  # the nodes below
    head: tuple[object, ...]  # what it is besides these

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and (self is other or _heads(self) == _heads(other))

    def __hash__(self) -> int:
        return hash(_heads(self))

    def __str__(self) -> str:
        return fold(self, _written)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Literal(Node):
    """A number or a truth value. It may be negative or infinite, never NaN."""

    value: bool | int | float

    @property
    def kind(self) -> str:
        return type(self.value).__name__

    @property
    def args(self) -> tuple[Node, ...]:
        return ()

    @property
    def head(self) -> tuple[object, ...]:
        return ("literal", repr(self.value))  # 1, 1.0 and True differ, and so do 0.0 and -0.0


@dataclass(frozen=True, slots=True, eq=False)
class Name(Node):
    """One of `NAMES`."""

    name: str

    @property
    def kind(self) -> str:
        return NAMES[self.name]

    @property
    def args(self) -> tuple[Node, ...]:
        return ()

    @property
    def head(self) -> tuple[object, ...]:
        return ("name", self.name)


@dataclass(frozen=True, slots=True, eq=False)
class Read(Node):
    """An element of a declared array, `args` are its indices; or a declared scalar, which has none."""

    name: str
    args: tuple[Node, ...]
    kind: str

    @property
    def head(self) -> tuple[object, ...]:
        return ("read", self.name, self.kind, len(self.args))


@dataclass(frozen=True, slots=True, eq=False)
class Apply(Node):
    """An operator or a function of arguments, which `apply` has converted to the kinds that it takes."""

    op: str
    args: tuple[Node, ...]
    kind: str

    @property
    def head(self) -> tuple[object, ...]:
        return ("apply", self.op)


SCORE = Name("score")


def walk(tree: Node) -> Iterator[Node]:
    """All nodes, each before those below it, in the order of the text."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(node.args))


def with_args(node: Node, args: Iterable[Node]) -> Node:
    """The node with these below it, or itself if it has none."""
    return replace(node, args=tuple(args)) if isinstance(node, (Read, Apply)) else node


def fold(tree: Node, visit: Callable[[Node, list[T]], T]) -> T:
    """What `visit` makes of a node and of what it made of those below, for the root."""
    pending, made = [(tree, False)], []
    while pending:
        node, is_below_done = pending.pop()
        if is_below_done:
            below = len(made) - len(node.args)
            made[below:] = [visit(node, made[below:])]
        else:
            pending.append((node, True))
            pending.extend((arg, False) for arg in reversed(node.args))
    return made.pop()


def extent(tree: Node) -> tuple[int, int]:
    """How many nodes a tree has, and how many of them lie on its longest path."""
    return fold(tree, lambda _, below: (1 + sum(n for n, _ in below), 1 + max((depth for _, depth in below), default=0)))


def _heads(tree: Node) -> tuple[tuple[object, ...], ...]:
    return tuple(node.head for node in walk(tree))


def _written(node: Node, args: list[tuple[str, int]]) -> tuple[str, int]:
    """The text of a node, and how tightly it binds."""
    atom = len(LEVELS)
    if isinstance(node, Literal):
        text = repr(node.value)
        return text, BINDING["neg"] if text.startswith("-") else atom
    if isinstance(node, Name):
        return node.name, atom
    listed = ", ".join(text for text, _ in args)
    if isinstance(node, Read):
        return f"{node.name}[{listed}]" if args else node.name, atom
    if node.op not in BINDING:
        return f"{node.op}({listed})", atom
    level = BINDING[node.op]
    if node.op in PREFIX:
        return PREFIX[node.op] + _inside(args[0], level), level
    left, right = _inside(args[0], level + (node.op in UNCHAINED)), _inside(args[1], level + 1)
    return f"{left} {node.op} {right}", level


def _inside(written: tuple[str, int], level: int) -> str:
    text, binding = written
    return text if binding >= level else f"({text})"
