"""Integers that a call is given: lengths, positions, numbers of pages. Those in host memory are checked before anything is written.

Nothing waits for a device: numbers in its memory are read when a kernel runs, and what they should not be is left out there.
"""

from __future__ import annotations

from numbers import Number
from typing import Any

import numpy

from ..machine.operands import Operands
from ..problem import arrays
from ..problem.rotation import INDEX_DTYPES
from ..problem.scalars import integer

INDICES = ("positions", "seqlens", "seqlens_new", "pages", "cache_batch_idx")


def read_by_host(names: tuple[str, ...], given: Operands, device: int | None) -> dict[str, numpy.ndarray]:
    """The integers of a call that are in host memory, by name. In `given`, copies take their place on the device of the others."""
    found = {}
    for i, (name, view) in enumerate(zip(names, given.views)):
        if name not in INDICES or not isinstance(view, numpy.ndarray) or view.dtype.name not in INDEX_DTYPES:
            continue  # what is of another dtype is refused when it is planned
        found[name] = view
        if device is not None:
            import cupy

            with cupy.cuda.Device(device):
                given.views[i] = cupy.asarray(view)
            given.descriptions[i], given.addresses[i] = arrays.describe(given.views[i])
    return found


def by_value(name: str, given: Any) -> tuple[int | None, Any]:
    """A number that holds for all batch elements, or what is given in place of one."""
    if isinstance(given, Number):
        return integer(name, given, "an integer or an array of integers"), None
    return None, given


def check_range(
    name: str, numbers: numpy.ndarray, lowest: int, end: numpy.ndarray | int, expected: str, asked: numpy.ndarray | bool = True
) -> None:
    """Refuse numbers below `lowest`, or of `end` and more, where they are asked for."""
    wrong = ((numbers < lowest) | (numbers >= end)) & asked
    if not wrong.any():
        return
    where = tuple(map(int, numpy.argwhere(wrong)[0]))
    number = int(numpy.broadcast_to(numbers, wrong.shape)[where])
    at = f" at {where[0] if len(where) == 1 else where}" if where else ""
    raise ValueError(f"{name}: expected {expected}, got {number}{at}")


def of_positions(ends: int, rows: int | None = None) -> str:
    """What messages say of positions: of each row, or of the first of so many."""
    behind = f", for each of {rows} rows" if rows is not None else ""
    return f"positions of at least 0 and below {ends}, the rows of cos{behind}"
