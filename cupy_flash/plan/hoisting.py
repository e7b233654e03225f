"""Trees of expressions as kernels compute them: what a head's pairs have in common once, and places as floats.

All that is done here leaves the value as it is, but for the rounding of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce

from ..problem.expression.derivative import ONE, ZERO
from ..problem.expression.operations import apply, convert
from ..problem.expression.simplify import simplified
from ..problem.expression.tree import Apply, Literal, Name, Node, Read, fold, walk, with_args

# Names that no user can give: places as floats, what a score of 1 is in a fragment, and one of what is computed once for a head.
Q_FLOAT, KV_FLOAT, UNIT = (Read(f"@{name}", (), "float") for name in ("q_float", "kv_float", "unit"))
DISTANCE = "@distance"  # a read whose index is added: the query's place less the key's
OF_PAIRS = {"q_idx", "kv_idx", "score", Q_FLOAT.name, KV_FLOAT.name, DISTANCE, "@bias", "@mask"}
MOST_UNIFORMS = 4  # registers that they take for as long as a head lasts
EXACT = 1 << 22  # places below, and literals, of which a float holds sums of a few exactly
FEW = 4


def uniform(number: int) -> Read:
    """A part that is computed once for a head."""
    return Read(f"@uniform{number}", (), "float")


@dataclass(frozen=True, slots=True)
class Places:
    """An integer made of places: ``q * q_idx + kv * kv_idx + rest``."""

    q: int
    kv: int
    rest: Node  # of kind float
    leaves: int  # names and literals that it is made of

    @property
    def as_float(self) -> Node:
        if self.q == -self.kv and abs(self.q) == 1:
            rest = self.rest if self.q == 1 else simplified("neg", self.rest)
            distance = Read(DISTANCE, (rest,), "float")
            return distance if self.q == 1 else apply("neg", distance)
        counted = ((self.q, Q_FLOAT), (self.kv, KV_FLOAT))
        places = [simplified("*", Literal(float(times)), place) for times, place in counted if times]
        return reduce(partial(simplified, "+"), places, self.rest)

    def plus(self, other: Places, sign: int) -> Places:
        rest = simplified("+" if sign > 0 else "-", self.rest, other.rest)
        return Places(self.q + sign * other.q, self.kv + sign * other.kv, rest, self.leaves + other.leaves)


def places_as_floats(tree: Node) -> Node:
    """The tree with what is made of few places computed in floats wherever a float is wanted.

    An integer that each pair converts costs as much as four operations. Exact while lengths are below `EXACT`.
    """

    def visit(node: Node, args: list[tuple[Node, Places | None]]) -> tuple[Node, Places | None]:
        same = with_args(node, [arg for arg, _ in args])
        match node:
            case Literal(value=int(value)) if not isinstance(value, bool) and abs(value) < EXACT:
                return same, Places(0, 0, Literal(float(value)), 1)
            case Name(name="q_idx"):
                return same, Places(1, 0, ZERO, 1)
            case Name(name="kv_idx"):
                return same, Places(0, 1, ZERO, 1)
            case Name(name="q_len" | "kv_len"):
                return same, Places(0, 0, convert(node, "float"), 1)
        places = [of_arg for _, of_arg in args]
        if not isinstance(node, Apply) or None in places or not places or sum(of_arg.leaves for of_arg in places) > FEW:
            return same, None
        match node.op, node.kind:
            case "+" | "-", "int":
                return same, places[0].plus(places[1], 1 if node.op == "+" else -1)
            case "neg", "int":
                return same, Places(0, 0, ZERO, 0).plus(places[0], -1)
            case "abs" | "min" | "max", "int":
                leaves = sum(of_arg.leaves for of_arg in places)
                return same, Places(0, 0, apply(node.op, *(of_arg.as_float for of_arg in places)), leaves)
            case "float", _:
                return places[0].as_float, None
        return same, None

    return fold(tree, visit)[0]


def factors_gathered(tree: Node) -> Node:
    """The tree with one factor in a product for all that a head's pairs have in common; dividing by that is multiplying."""

    def visit(node: Node, args: list[Node]) -> Node:
        node = with_args(node, args)
        if not isinstance(node, Apply) or node.kind != "float" or node.op not in ("*", "/") or is_uniform(node):
            return node
        (x, of_x), (y, of_y) = map(_split, node.args)
        if node.op == "/":
            if not is_uniform(node.args[1]):
                return node
            y, of_y = None, apply("/", ONE, node.args[1])
        pairs, common = ([part for part in parts if part is not None] for parts in ((x, y), (of_x, of_y)))
        return reduce(partial(apply, "*"), [*pairs, *([reduce(partial(apply, "*"), common)] if common else [])])

    return fold(tree, visit)


def _split(factor: Node) -> tuple[Node | None, Node | None]:
    """What a factor has of pairs, and what all of them have in common."""
    if is_uniform(factor):
        return None, factor
    match factor:
        case Apply(op="*", args=(x, y)) if is_uniform(y):
            return x, y
    return factor, None


def times_unit(tree: Node) -> Node:
    """The tree times `UNIT`, which is multiplied by what a head's pairs have in common if the value allows for it."""
    if _takes_unit(tree):
        return _into(tree)
    return apply("*", UNIT, tree)


def hoisted(trees: tuple[Node | None, ...]) -> tuple[tuple[Node | None, ...], tuple[Node, ...]]:
    """The trees with what their pairs have in common replaced by `uniform(0)` and so on, and what that is."""
    found: dict[Node, Read] = {}

    def put(node: Node) -> Node:
        # Kept in a register for as long as a head lasts, if it takes a load; what does not is computed again for each tile.
        worth = node.kind == "float" and any(isinstance(part, Read) and (part.args or part.name == "@slope") for part in walk(node))
        if not worth or (node not in found and len(found) == MOST_UNIFORMS):
            return node
        return found.setdefault(node, uniform(len(found)))

    def visit(node: Node, args: list[tuple[Node, bool]]) -> tuple[Node, bool]:
        if _is_of_pair(node) or not all(common for _, common in args):
            # An index is left as it is: only what a float is made of is worth a register.
            return with_args(node, [put(arg) if common else arg for arg, common in args]), False
        return with_args(node, [arg for arg, _ in args]), True

    def one(tree: Node | None) -> Node | None:
        if tree is None:
            return None
        node, common = fold(tree, visit)
        return put(node) if common else node

    return tuple(map(one, trees)), tuple(found)


def is_uniform(tree: Node) -> bool:
    """Whether all pairs of a head have it in common."""
    return not any(_is_of_pair(node) for node in walk(tree))


def _takes_unit(tree: Node) -> bool:
    """Whether a factor costs no pair anything."""
    if is_uniform(tree):
        return tree.kind == "float"
    match tree:
        case Apply(op="*", args=(x, y)):
            return _takes_unit(x) or _takes_unit(y)
        case Apply(op="/", args=(x, _)) | Apply(op="neg", args=(x,)):
            return _takes_unit(x)
        case Apply(op="+" | "-", args=(x, y)) | Apply(op="where", args=(_, x, y)):
            return _takes_unit(x) and _takes_unit(y)
    return False


def _into(tree: Node) -> Node:
    if is_uniform(tree):
        return apply("*", UNIT, tree)
    first = tree.args[0]
    match tree:
        case Apply(op="*", args=(x, y)) if not _takes_unit(x):
            return apply("*", x, _into(y))
        case Apply(op="+" | "-" as op, args=(x, y)):
            return apply(op, _into(x), _into(y))
        case Apply(op="where", args=(condition, x, y)):
            return apply("where", condition, _into(x), _into(y))
    return with_args(tree, [_into(first), *tree.args[1:]])


def _is_of_pair(node: Node) -> bool:
    return isinstance(node, (Name, Read)) and node.name in OF_PAIRS
