"""Tensor maps: how the TMA of sm_90 finds boxes of an array in device memory.

A map has five axes, here those of an attention operand: columns, rows, heads and two batch axes. Boxes are so many rows of
`PANEL_BYTES`; what of a box lies outside the array reads as zeros and is not written. On the host a kernel reads the map in
the clear. For a GPU `machine.driver_map` has it encoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy

from ..problem.forward import FORWARD_ARRAYS, Problem
from ..problem.layout import ITEMSIZE, Layout, merge_batch_axes

MAP_BYTES = 128  # of a tensor map, which is aligned to half of that
# A tensor map in the clear, as the host executes it. In its place a GPU gets what the driver makes of it.
TENSOR_MAP = numpy.dtype(
    [
        ("data", "u8"),
        ("stride", "i8", (4,)),  # in bytes, of all axes but the fastest
        ("size", "i4", (5,)),  # the fastest axis first
        ("box_rows", "i4"),
        ("box_cols", "i4"),
        ("box_heads", "i4"),
        ("unused", "u1", (56,)),
    ],
    align=True,
)
BATCH_AXES_OF_A_MAP = 2
PANEL_BYTES = 128  # that one row of a swizzled panel has, and so of a box
BOX_COLUMNS = PANEL_BYTES // 2  # of 16-bit elements
ALIGNMENT = 16  # bytes that divide the address and every stride (CUDA driver API, cuTensorMapEncodeTiled)
MOST_BYTES = 1 << 40  # strides stay below
MOST_ELEMENTS = 1 << 32  # sizes stay below


@dataclass(frozen=True, slots=True)
class TensorMap:
    """An array as TMA sees it, without its address.

    Parameters
    ----------
    dtype : {'float16', 'bfloat16', 'float32'}
    sizes : tuple of int
        Of the five axes, the fastest first: columns, rows, heads, and the two innermost batch axes.
    strides : tuple of int
        In bytes, of all axes but the fastest.
    box_rows : int
        Rows of a box, which has one batch element.
    box_heads : int
        Heads of a box, each with as many of these rows.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box_rows: int
    box_heads: int = 1

    @property
    def box_columns(self) -> int:
        """Columns of a box: as many as a row of a panel has room for."""
        return PANEL_BYTES // ITEMSIZE[self.dtype]

    def in_the_clear(self) -> numpy.ndarray:
        """The map as the host reads it: a 0-dimensional array of dtype `TENSOR_MAP` without an address."""
        clear = numpy.zeros((), TENSOR_MAP)
        clear["stride"], clear["size"] = self.strides, self.sizes
        clear["box_rows"], clear["box_cols"], clear["box_heads"] = self.box_rows, self.box_columns, self.box_heads
        return clear


def tensor_maps(batch: tuple[int, ...], layouts: dict[str, Layout], box_rows: dict[str, int]) -> dict[str, TensorMap]:
    """Maps of arrays, by name.

    Parameters
    ----------
    batch : tuple of int
    layouts : dict of str to Layout
        All arrays of a problem with all their axes, because batch axes merge only where all of them allow it.
    box_rows : dict of str to int
        Rows of a box, for each array that gets a map.

    Returns
    -------
    dict of str to TensorMap
        Only to be used if `obstacle` finds none.
    """
    sizes, strides = merge_batch_axes(batch, layouts)
    maps = {}
    for name, rows in box_rows.items():
        axes = _axes(layouts[name], len(batch), sizes, strides[name])
        steps = [step * layouts[name].itemsize if size > 1 else ALIGNMENT for size, step in axes.values()]
        shape = tuple(size for size, _ in axes.values())
        maps[name] = TensorMap(layouts[name].dtype, shape, tuple(steps[1:]), rows)
    return maps


def map_of_groups(layout: Layout, heads: int, box_rows: int) -> TensorMap:
    """The map of an array with one batch axis whose boxes have so many neighbouring heads of each row.

    Its rows are these heads, its heads the rows of the array, and of its batch axes one counts the groups of such heads.

    Parameters
    ----------
    layout : Layout
        With axes batch elements, heads, rows and columns.
    heads : int
        Of a group; it divides `box_rows`.
    box_rows : int
        Of a box.
    """
    (batch, of_array, rows, columns), (of_batch, of_head, of_row, _) = layout.shape, layout.strides
    axes = (heads, of_head), (rows, of_row), (of_array // heads, heads * of_head), (batch, of_batch)
    steps = tuple(step * layout.itemsize if size > 1 else ALIGNMENT for size, step in axes)
    return TensorMap(layout.dtype, (columns, *(size for size, _ in axes)), steps, box_rows, box_rows // heads)


def obstacle(batch: tuple[int, ...], layouts: dict[str, Layout], names: Iterable[str], written: Iterable[str] = ()) -> str:
    """Why one of these arrays cannot be expressed as a map, or ''.

    Parameters
    ----------
    batch, layouts
        As in `tensor_maps`.
    names : iterable of str
        The arrays that would get a map.
    written : iterable of str, optional
        Those of them that TMA writes. It writes whole chunks of 16 bytes, also where a row ends within one: measured on
        an H200, whereas what it reads ends with the row.
    """
    sizes, strides = merge_batch_axes(batch, layouts)
    left = sum(size > 1 for size in sizes)
    if left > BATCH_AXES_OF_A_MAP:
        return f"{left} batch axes are left after merging, more than {BATCH_AXES_OF_A_MAP}"
    reasons = [_obstacle(name, layouts[name], _axes(layouts[name], len(batch), sizes, strides[name])) for name in names]
    reasons += [_ragged(name, layouts[name]) for name in written]
    return next(filter(None, reasons), "")


def _axes(layout: Layout, batch_axes: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Size and stride in elements of the five axes, the fastest first, by what they count."""
    own = zip(layout.shape[batch_axes:], layout.strides[batch_axes:])
    merged = zip(sizes[-BATCH_AXES_OF_A_MAP:], strides[-BATCH_AXES_OF_A_MAP:])
    names = ("elements", "rows", "heads", "batch elements", "groups of batch elements")
    return dict(zip(names, reversed([*merged, *own])))


def _obstacle(name: str, layout: Layout, axes: dict[str, tuple[int, int]]) -> str:
    if 0 in layout.shape:
        return f"{name} has no elements"
    for counted, (size, stride) in axes.items():
        step = stride * layout.itemsize
        apart = f"{counted} of {name} start {step} bytes apart"
        if size >= MOST_ELEMENTS:
            return f"{name} has {size} {counted}, expected fewer than {MOST_ELEMENTS}"
        if size == 1:
            continue
        if counted == "elements":
            if stride != 1:
                return f"{apart}, not {layout.itemsize}"
        elif step < 0:
            return f"{apart}, backwards"
        elif step % ALIGNMENT:
            return f"{apart}, not a multiple of {ALIGNMENT}"
        elif step >= MOST_BYTES:
            return f"{apart}, not below {MOST_BYTES}"
    if layout.alignment % ALIGNMENT:
        return f"{name} starts at a multiple of {layout.alignment} bytes only, not of {ALIGNMENT}"
    return ""


def _ragged(name: str, layout: Layout) -> str:
    row = layout.shape[-1] * layout.itemsize
    return f"rows of {name} have {row} bytes, not a multiple of {ALIGNMENT}" if row % ALIGNMENT else ""


def layouts_of(problem: Problem) -> dict[str, Layout]:
    """All arrays whose batch axes are merged, where each of them steps through them as through one."""
    layouts = {name: getattr(problem, name) for name in FORWARD_ARRAYS if name != "sinks"}  # which no kernel moves in tiles
    return {name: layout for name, layout in layouts.items() if layout is not None} | problem.scores.layouts
