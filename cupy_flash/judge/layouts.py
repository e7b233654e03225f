"""How arrays of the shared cases lie in memory: within a larger buffer, all else of which is NaN."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Literal

import numpy

Layout = Literal["contiguous", "bshd", "sliced", "strided_dim", "transposed", "negative", "broadcast", "odd_offset"]

GUARD = 64  # elements before and behind every buffer: a multiple of every alignment a kernel can ask for


def place(values: numpy.ndarray, layout: Layout, xp: ModuleType) -> Any:
    """Return an array of `xp` with these values in this layout, NaN before, between and behind them."""

    def swapped(x: Any) -> Any:  # its own inverse: from logical to memory order, and back
        axes = {"bshd": (-3, -2), "transposed": (-2, -1)}.get(layout)
        return x.swapaxes(*axes) if axes else x

    stored = swapped(values)
    room = list(stored.shape)
    taken = [slice(0, n) for n in stored.shape]
    if layout == "sliced":
        room[-2:] = room[-2] + 3, room[-1] + 8
    elif layout == "strided_dim":
        room[-1] *= 2
        taken[-1] = slice(None, None, 2)
    elif layout == "negative":
        taken[-2] = slice(None, None, -1)

    start = GUARD + (layout == "odd_offset")
    stop = start + math.prod(room)

    def view(buffer: Any) -> Any:
        return buffer[start:stop].reshape(room)[tuple(taken)]

    buffer = numpy.full(stop + GUARD, numpy.nan, values.dtype)
    view(buffer)[...] = stored
    return swapped(view(xp.asarray(buffer)))
