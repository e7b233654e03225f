"""A tree with other nodes in place of names."""

from __future__ import annotations

from collections.abc import Mapping

from .tree import Apply, Name, Node, Read, fold


def replaced(tree: Node, by: Mapping[str, Node]) -> Node:
    """The tree with nodes in place of some of its names, of the same kinds.

    Examples
    --------
    >>> from cupy_flash.problem.expression.parse import parse
    >>> from cupy_flash.problem.expression.replaced import replaced
    >>> tree = parse("score + abs(q_idx - kv_idx)", (), "score")
    >>> str(replaced(tree, {"q_idx": parse("2 * q_len", (), "score").args[0]}))
    'score + float(abs(2 * q_len - kv_idx))'
    """

    def visit(node: Node, args: list[Node]) -> Node:
        if isinstance(node, Name):
            return by.get(node.name, node)
        if isinstance(node, Read):
            return Read(node.name, tuple(args), node.kind)
        return Apply(node.op, tuple(args), node.kind) if isinstance(node, Apply) else node

    return fold(tree, visit)
