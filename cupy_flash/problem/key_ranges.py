"""Masks as ranges of keys: what the user gives, and the expression that it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .layout import INTEGERS, Layout

if TYPE_CHECKING:
    from .expression.entry import Expression
    from .expression.tree import Node

START, STOP = "mask.start", "mask.stop"  # what messages and plans call the arrays; no expression of a user's has such names
FIRST = "mask.first"  # and that of the rows at which packed sequences of queries begin, which are the offsets of the call
OWN_NAMES = (START, STOP, FIRST)
MOST_RANGES = 8
AXES = "(..., heads, seq_q, ranges)"


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """A mask of some ranges of keys for each query, in memory linear in the sequence length.

    Query i sees key j if ``start[..., i, r] <= j < stop[..., i, r]`` for one of the ranges r at least. Ranges may overlap, come in
    any order, reach beyond the keys, and be empty: one is where `stop` is not above `start`.

    Parameters
    ----------
    start, stop : array of integers, or int
        The first key of each range, and the first one behind it, as of Python's `range`. Numbers, or arrays that broadcast to
        (..., heads, seq_q, ranges), of at least two axes and at most 8 ranges, in the memory of q. The order of the axes is the
        same with every `layout`.

    Notes
    -----
    With packed queries (`cu_seqlens_q`) the axis seq_q has all rows, as q has, and there is no axis of a batch. Keys are counted
    from the first one of the row's sequence.

    `causal`, `window` and `prefix` hold beside the ranges: a pair takes part if both let it. Kernels take arrays with at most four
    axes that are longer than 1. Of sequences of their own lengths they compute tiles in which no pair takes part as well. Of
    integers that 32 bits do not hold, those on a device count by their low 32 bits; in host memory they are refused.

    Examples
    --------
    Sinks and a window: the first 4 keys, and the last 64.

    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 300, 64), dtype=np.float32)
    >>> i = np.arange(300)
    >>> start, stop = np.stack([0 * i, i - 63], axis=-1), np.stack([0 * i + 4, i + 1], axis=-1)
    >>> cupy_flash.attention(q, k, v, causal=True, mask=cupy_flash.KeyRanges(start, stop)).shape
    (8, 300, 64)
    """

    start: Any
    stop: Any


def check_ranges(layouts: dict[str, Layout], batch: tuple[int, ...], heads: int, len_q: int) -> None:
    """Refuse ranges that do not fit a problem.

    Raises
    ------
    TypeError, ValueError
    """
    whole, most = (*batch, heads, len_q), 1
    for name, layout in layouts.items():
        if layout.dtype not in INTEGERS:
            raise TypeError(f"{name}: expected integers, got {layout.dtype}")
        if layout.shape == ():
            continue
        *own, ranges = layout.shape
        fits = 1 <= len(own) <= len(whole) and all(size in (1, full) for size, full in zip(own, whole[len(whole) - len(own) :]))
        if not fits:
            expected = f"a number or a shape of at least 2 axes that broadcasts to {AXES} with {whole} for all but the last"
            hint = f"; of one range for each query the shape is ({len_q}, 1)" if layout.shape == (len_q,) else ""
            raise ValueError(f"{name}: expected {expected}, got {layout.shape}{hint}")
        if not 1 <= ranges <= MOST_RANGES:
            raise ValueError(f"{name}: expected 1 to {MOST_RANGES} ranges, along the last axis, got shape {layout.shape}")
        if ranges != 1 != most != ranges:
            raise ValueError(f"{name}: expected 1 or {most} ranges, along the last axis, as {START} has, got {ranges}")
        most = max(most, ranges)


def squeezed(layout: Layout) -> Layout:
    """The layout without axes of size 1, which nothing indexes."""
    kept = [axis for axis, size in enumerate(layout.shape) if size != 1]
    shape, strides = (tuple([sizes[axis] for axis in kept]) for sizes in (layout.shape, layout.strides))
    return replace(layout, shape=shape, strides=strides)


def expression_of(layouts: dict[str, Layout], batch: tuple[int, ...], packed: bool = False) -> Expression:
    """The mask that ranges are, of arrays as `squeezed` leaves them, from the layouts as they were given.

    Those of `packed` queries have an element for each row of all sequences, which begin at the rows that `FIRST` has.
    """
    from .expression.entry import Expression  # late, as in `scores`
    from .expression.operations import apply
    from .expression.tree import Name, Read

    row: Node = Name("q_idx")
    if packed:
        row = apply("+", Read(FIRST, (Name("b"),), "int"), row)
    ranges = max([layout.shape[-1] for layout in layouts.values() if layout.shape], default=1)
    kv_idx, tree = Name("kv_idx"), None
    for number in range(ranges):
        start, stop = (_read(name, layouts[name].shape, number, batch, row) for name in (START, STOP))
        one = apply("and", apply("<=", start, kv_idx), apply("<", kv_idx, stop))
        tree = one if tree is None else apply("or", tree, one)
    return Expression(tree, ())  # nothing is declared: no user gave names


def _read(name: str, shape: tuple[int, ...], number: int, batch: tuple[int, ...], row: Node) -> Node:
    """What an array has for a range of the query at hand, which is in this row."""
    from .expression.tree import Literal, Name, Read

    indices = [*_batch_indices(batch), Name("h"), row, Literal(number)][-len(shape) :]
    return Read(name, tuple(index for index, size in zip(indices, shape) if size != 1), "int")


def _batch_indices(batch: tuple[int, ...]) -> list[Node]:
    """The place along each batch axis: `b` counts through all of them in C order."""
    from .expression.operations import apply
    from .expression.tree import Literal, Name

    indices: list[Node] = []
    for axis, size in enumerate(batch):
        outer, inner = math.prod(batch[:axis]), math.prod(batch[axis + 1 :])
        index = Name("b") if inner == 1 else apply("//", Name("b"), Literal(inner))
        indices.append(index if outer == 1 else apply("%", index, Literal(size)))
    return indices
