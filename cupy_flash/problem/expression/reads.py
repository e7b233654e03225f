"""What an expression reads of the user's arrays."""

from __future__ import annotations

from .tree import Name, Node, Read, walk

AXES = ("b", "h", "h_kv", "q_idx", "kv_idx")


def reads(tree: Node) -> tuple[Read, ...]:
    """The distinct reads in the order of the text, those in indices after what they are indices of."""
    return tuple(dict.fromkeys(node for node in walk(tree) if isinstance(node, Read)))


def axes_of(read: Read) -> tuple[str | None, ...]:
    """Of each index, which of `AXES` it is, or None if it is anything else."""
    return tuple(index.name if isinstance(index, Name) and index.name in AXES else None for index in read.args)
