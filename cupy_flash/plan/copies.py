"""How many bytes of an array may move at once."""

from __future__ import annotations

from ..problem.layout import Layout


def copy_size(layouts: dict[str, Layout]) -> tuple[int, str]:
    """The most bytes that may move at once: 16, 8, 4, or 0 for single elements; and what keeps it below 16."""
    why = ""
    for size in (16, 8, 4):
        obstacle = next(filter(None, (_obstacle(name, layout, size) for name, layout in layouts.items())), None)
        if obstacle is None:
            return size, why and f"copies of {size} bytes: {why}"
        why = why or obstacle
    return 0, f"copies of single elements: {obstacle}"


def _obstacle(name: str, layout: Layout, size: int) -> str | None:
    """Why an array cannot be moved `size` bytes at a time, or None."""
    if 0 in layout.shape:
        return None
    *axes, (dim, step) = zip(layout.shape, layout.strides)
    if dim > 1 and step != 1:
        return f"elements of {name} are {step * layout.itemsize} bytes apart"
    if layout.alignment % size:
        return f"{name} starts at a multiple of {layout.alignment} bytes only"
    if dim * layout.itemsize % size:
        return f"rows of {name} have {dim * layout.itemsize} bytes"
    for axis_size, stride in axes:
        if axis_size > 1 and stride * layout.itemsize % size:
            return f"an axis of {name} has a stride of {stride * layout.itemsize} bytes"
    return None
