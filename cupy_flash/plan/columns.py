"""How wide tiles are in memory, and how many of their columns products take: on sm_90a as many as a head dim fills."""

from __future__ import annotations

from .tuning import WIDTHS

PANEL = 64  # columns: TMA brings no narrower width
COLUMNS = {  # that products of a warpgroup take, by kernel
    "fwd_hopper": (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    "bwd_hopper": (32, 64, 80, 96, 128),  # of 112, tiles of 80 queries spill; 48 is slower than 64 in long sequences
    "bwd_hopper_parts": (32, 64, 96, 128),
    "bwd_hopper_wide": (128, 160, 192, 224, 256),
}


def padded(dim: int) -> int:
    """The compiled width that serves a head dim."""
    return next(width for width in WIDTHS if width >= dim)


def widths(kernel: str, dim: int) -> tuple[int, int]:
    """The width of tiles in memory for a head dim in a forward, and how many columns products take."""
    width = max(padded(dim), PANEL) if kernel == "fwd_hopper" else padded(dim)
    return width, columns(kernel, dim, width)


def columns(kernel: str, dim: int, width: int) -> int:
    """How many columns products of a kernel take for a head dim, of tiles that are so wide: some of each of their panels."""
    least = max(dim, width - PANEL + 1)
    return next((columns for columns in COLUMNS.get(kernel, ()) if columns >= least), width)
