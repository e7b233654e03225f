"""Where the elements of an array lie: shape, strides and place, without the array."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UnsupportedError

BATCH_AXES = 4
FLOATS = ("float16", "bfloat16", "float32", "float64")  # of q, k and v, and of results
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))  # of arrays that scores and masks read
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1}
ITEMSIZE |= {name: int(name.strip("uint")) // 8 for name in INTEGERS}
# The orders of the last axes that callers may have, by the value of their option `layout`.
AXES = {"bhsd": "(..., heads, seq, dim)", "bshd": "(..., seq, heads, dim)"}
HEADS, HEADS_OF_LSE = -3, -2  # the axis of heads in the first of them, and without `dim`


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of an array lie, without the array.

    Parameters
    ----------
    shape : tuple of int
    strides : tuple of int
        In elements; zero and negative strides are legal.
    dtype : str
        Name of the element type. Only those in `ITEMSIZE` have a size.
    alignment : int
        Largest power of two, at most 16, that divides the address of element 0.
    device : int or None
        CUDA ordinal, or None for host memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int
    device: int | None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of a dense array of this shape."""
        return math.prod(self.shape) * self.itemsize

    @property
    def extent(self) -> tuple[int, int]:
        """Lowest element offset touched, and one more than the highest; (0, 0) for an empty array."""
        if 0 in self.shape:
            return 0, 0
        reach = [(size - 1) * stride for size, stride in zip(self.shape, self.strides)]
        return sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + 1

    @property
    def dense(self) -> bool:
        """True if the elements lie without gaps behind element 0, in any order of the axes: what a new array can have."""
        step = 1
        for stride, size in sorted((stride, size) for stride, size in zip(self.strides, self.shape) if size > 1):
            if stride != step:
                return 0 in self.shape
            step *= size
        return True

    @property
    def overlaps_itself(self) -> bool:
        """True if two indices may reach one element.

        Exact for every view that slicing, transposing and broadcasting can make of a dense array. Of the layouts that
        only `as_strided` makes, some that do not overlap are reported as well.
        """
        if 0 in self.shape:
            return False
        # From the fastest axis out, each must step over all that the faster ones reach.
        reach = 0
        for stride, size in sorted((abs(stride), size) for stride, size in zip(self.strides, self.shape) if size > 1):
            if stride <= reach:
                return True
            reach += (size - 1) * stride
        return False

    def in_order(self, order: str, heads: int = HEADS) -> Layout:
        """From a caller's order of the axes, one of `AXES`, to that of kernels, or back. Without an axis of heads it stays."""
        if order == "bhsd" or len(self.shape) < -heads:
            return self
        shape, strides = (in_order(axes, order, heads) for axes in (self.shape, self.strides))
        return Layout(shape, strides, self.dtype, self.alignment, self.device)

    def last_axes(self, count: int) -> Layout:
        """This layout without its first axes, which have size 1."""
        if count == len(self.shape):
            return self
        return Layout(self.shape[-count:], self.strides[-count:], self.dtype, self.alignment, self.device)

    def broadcast_to(self, shape: tuple[int, ...]) -> Layout:
        """This layout seen with a larger shape, as `numpy.broadcast_to` sees an array. The shape must fit."""
        if self.shape == shape:
            return self
        lacking = len(shape) - len(self.shape)
        own = (
            stride if size == wanted else 0 for size, wanted, stride in zip(self.shape, shape[lacking:], self.strides)
        )
        return Layout(shape, (*[0] * lacking, *own), self.dtype, self.alignment, self.device)


def in_order(axes: tuple[int, ...], order: str, heads: int = HEADS) -> tuple[int, ...]:
    """What `Layout.in_order` does to a shape or to strides."""
    if order == "bhsd" or len(axes) < -heads:
        return axes
    exchanged = list(axes)
    exchanged[heads], exchanged[heads + 1] = axes[heads + 1], axes[heads]
    return tuple(exchanged)


def dense_layout(shape: tuple[int, ...], fastest_first: Iterable[int], dtype: str, device: int | None) -> Layout:
    """Layout without gaps whose axes lie in the given order."""
    strides = [0] * len(shape)
    step = 1
    for axis in fastest_first:
        strides[axis] = step
        step *= shape[axis]
    return Layout(shape, tuple(strides), dtype, 16, device)


def result_layout(q: Layout, shape: tuple[int, ...], dtype: str | None = None) -> Layout:
    """Dense layout of a result in q's memory order, as NumPy's ``order='K'`` has it.

    Axes are ordered by the magnitude of q's strides. An axis of size 1 or stride 0 has no order of its own and keeps
    its C position among the others, so broadcasting an axis of q never moves `dim` away from where it is fastest.

    Parameters
    ----------
    q : Layout
        With as many axes as `shape`: axes that q lacks have been broadcast.
    shape : tuple of int
    dtype : str, optional
        By default that of q.

    Returns
    -------
    Layout
    """
    # An insertion sort, because "may be ordered either way" is not transitive and no sorting key expresses it.
    fastest_first: list[int] = []
    for axis in reversed(range(len(shape))):
        place = len(fastest_first)
        if _is_ordered(q, axis):
            for position, faster in reversed([*enumerate(fastest_first)]):
                if _is_ordered(q, faster):
                    if abs(q.strides[faster]) <= abs(q.strides[axis]):
                        break
                    place = position
        fastest_first.insert(place, axis)
    return dense_layout(shape, fastest_first, dtype or q.dtype, q.device)


def _is_ordered(q: Layout, axis: int) -> bool:
    return q.shape[axis] > 1 and q.strides[axis] != 0


def merge_batch_axes(
    batch: tuple[int, ...], layouts: dict[str, Layout], name: str = "q"
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """The batch axes as exactly `BATCH_AXES`, neighbours merged where every array steps through both as through one.

    Parameters
    ----------
    batch : tuple of int
    layouts : dict of str to Layout
        Layouts whose first axes are those of `batch`.
    name : str
        What messages call the array that has them.

    Returns
    -------
    sizes : tuple of int
    strides : dict of str to tuple of int
        In elements, for each layout.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []  # size, and the stride in each layout
    for axis, size in enumerate(batch):
        strides = tuple(layout.strides[axis] for layout in layouts.values())
        if size == 1:
            continue
        if merged and merged[-1][1] == tuple(size * stride for stride in strides):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if len(merged) > BATCH_AXES:
        raise UnsupportedError(
            f"{name}: expected batch axes that merge to at most {BATCH_AXES}, got {batch} with strides that leave {len(merged)}"
        )
    padding = [(1, (0,) * len(layouts))] * (BATCH_AXES - len(merged))
    sizes, strides = zip(*padding, *merged)
    return sizes, dict(zip(layouts, zip(*strides)))
