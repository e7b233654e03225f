"""Terms of scores that are linear in the places of a pair: how much they change from a key to the next, and from a query.

All that a kernel adds to each score of such a term is a multiple of the first; the rest is a number for each row of a tile. A term
of the distance between query and key is linear on either side of a diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..problem.expression.derivative import ONE, ZERO
from ..problem.expression.operations import apply, convert
from ..problem.expression.simplify import simplified, simplify
from ..problem.expression.tree import Apply, Literal, Name, Node, fold, walk, with_args
from ..problem.mask import Mask
from .hoisting import is_uniform


@dataclass(frozen=True, slots=True)
class Steps:
    """How much a term changes from a key to the next and from a query to the next: floats, the same for all pairs of a head."""

    per_key: Node
    per_query: Node

    def plus(self, other: Steps, op: str) -> Steps:
        return Steps(simplified(op, self.per_key, other.per_key), simplified(op, self.per_query, other.per_query))

    def times(self, factor: Node, op: str = "*") -> Steps:
        factor = convert(factor, "float")
        return Steps(simplified(op, self.per_key, factor), simplified(op, self.per_query, factor))


PLACES = {"kv_idx": Steps(ONE, ZERO), "q_idx": Steps(ZERO, ONE)}


def steps_of(tree: Node) -> Steps | None:
    """The steps of a term that is linear in places; None of any other, and of one that no key changes."""

    def visit(node: Node, args: list[Steps | None]) -> Steps | None:
        if isinstance(node, Name) and node.name in PLACES:
            return PLACES[node.name]
        if is_uniform(node):
            return Steps(ZERO, ZERO)
        if not isinstance(node, Apply) or None in args:
            return None
        match node.op, *node.args:
            case (("+" | "-"), _, _):
                return args[0].plus(args[1], node.op)
            case "neg", _:
                return args[0].times(Literal(-1.0))
            case "float", _:
                return args[0]
            case "*", _, factor if is_uniform(factor):
                return args[0].times(factor)
            case "*", factor, _ if is_uniform(factor):
                return args[1].times(factor)
            case "/", _, factor if is_uniform(factor):
                return args[0].times(factor, "/")
        return None

    found = fold(tree, visit)
    return None if found is None or found.per_key == ZERO else found


@dataclass(frozen=True, slots=True)
class Bent:
    """A term that is linear on either side of a diagonal.

    Parameters
    ----------
    before : Node
        The term of pairs whose key is at the diagonal or before it.
    steps : Steps
        Of that.
    bend : Node
        By how much more a key changes the term behind the diagonal.
    diagonal : Node
        The key that the first query meets, an int; the next query meets the next key.
    """

    before: Node
    steps: Steps
    bend: Node
    diagonal: Node


def bent_at(tree: Node) -> Bent | None:
    """The parts of a term with the absolute value of one distance of a query and a key; None of any other."""
    found = {node.args[0] for node in walk(tree) if isinstance(node, Apply) and node.op == "abs" and node.kind == "int"}
    distance = found.pop() if len(found) == 1 else None
    diagonal = None if distance is None else _diagonal(distance)
    if diagonal is None:
        return None
    before, behind = (simplify(_with_distance(tree, distance, sign)) for sign in (1, -1))
    steps, steps_behind = steps_of(before), steps_of(behind)
    if steps is None or steps_behind is None:
        return None
    return Bent(before, steps, simplified("-", steps_behind.per_key, steps.per_key), diagonal)


def _diagonal(distance: Node) -> Node | None:
    """The key whose distance to the first query is 0, if that is made of lengths and literals and changes by one a place."""
    if any(not isinstance(node, (Name, Literal, Apply)) for node in walk(distance)):
        return None
    if any(isinstance(node, Name) and node.name not in (*PLACES, "q_len", "kv_len") for node in walk(distance)):
        return None
    steps = steps_of(convert(distance, "float"))
    if steps is None or {steps.per_key, steps.per_query} != {ONE, Literal(-1.0)}:
        return None
    at_first = fold(
        distance, lambda node, args: Literal(0) if isinstance(node, Name) and node.name in PLACES else with_args(node, args)
    )
    return simplify(at_first if steps.per_query == ONE else apply("neg", at_first))


def _with_distance(tree: Node, distance: Node, sign: int) -> Node:
    """The tree with this times a sign in place of its absolute value, for keys before the query, or with -1 behind it."""
    positive = steps_of(convert(distance, "float")).per_query == ONE
    of_sign = distance if positive == (sign > 0) else apply("neg", distance)
    return fold(tree, lambda node, args: of_sign if node == apply("abs", distance) else with_args(node, args))


@dataclass(frozen=True, slots=True)
class Sum:
    """An integer made of places: ``q * q_idx + kv * kv_idx + rest``."""

    q: int
    kv: int
    rest: int


def without_abs(tree: Node, mask: Mask) -> Node:
    """The tree without the absolute value of a distance that has one sign for all pairs of a mask."""
    known = {"q_len": Sum(0, 0, mask.len_q), "kv_len": Sum(0, 0, mask.len_kv)}
    known |= {"q_idx": Sum(1, 0, 0), "kv_idx": Sum(0, 1, 0)}
    least, most = _distances(mask)

    def visit(node: Node, args: list[tuple[Node, Sum | None]]) -> tuple[Node, Sum | None]:
        same = with_args(node, [arg for arg, _ in args])
        match node:
            case Literal(value=int(value)) if not isinstance(value, bool):
                return same, Sum(0, 0, value)
            case Name(name=name) if name in known:
                return same, known[name]
        places = [of_arg for _, of_arg in args]
        if not isinstance(node, Apply) or node.kind != "int" or None in places or not places:
            return same, None
        x, *others = places
        match node.op:
            case "+" | "-":
                sign, y = 1 if node.op == "+" else -1, others[0]
                return same, Sum(x.q + sign * y.q, x.kv + sign * y.kv, x.rest + sign * y.rest)
            case "neg":
                return same, Sum(-x.q, -x.kv, -x.rest)
            case "abs" if x.q == -x.kv and abs(x.q) == 1:
                ends = [x.q * distance + x.rest for distance in (least, most)]
                if min(ends) >= 0:
                    return args[0][0], x
                if max(ends) <= 0:
                    return apply("neg", args[0][0]), Sum(-x.q, -x.kv, -x.rest)
        return same, None

    return fold(tree, visit)[0]


def _distances(mask: Mask) -> tuple[int, int]:
    """The least and the most of ``q_idx - kv_idx`` among pairs that may see each other."""
    least, most = -(mask.len_kv - 1), mask.len_q - 1
    if mask.right is not None:
        # All queries see a prefix, the first one among them.
        least = max(least, -max(mask.right, mask.prefix - 1) if mask.prefix else -mask.right)
    if mask.left is not None:
        most = min(most, -mask.left)
    return least, most
