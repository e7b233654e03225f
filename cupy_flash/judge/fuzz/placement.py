"""Arrays in guarded memory, with any strides that slicing, transposing and broadcasting can make."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from ..cases import GUARD
from .draw import Draw


@dataclass(frozen=True)
class Placement:
    """How an array lies in its buffer.

    Parameters
    ----------
    order : tuple of int
        The axes, the slowest first.
    steps : tuple of int
        Of each axis: every how many-th element is taken; below 0 backwards.
    slack : tuple of int
        Of each axis: elements between its last one and the end of the row.
    offset : int
        Elements between the guard and the array.
    stretched : tuple of int
        Axes seen with stride 0.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    slack: tuple[int, ...]
    offset: int = 0
    stretched: tuple[int, ...] = ()

    @property
    def kinds(self) -> set[str]:
        """What is unusual about it, for statistics."""
        found = {
            "transposed": self.order != tuple(range(len(self.order))),
            "dim not fastest": self.order[-1] != len(self.order) - 1,
            "negative stride": min(self.steps) < 0,
            "strided": max(map(abs, self.steps)) > 1,
            "strided dim": abs(self.steps[-1]) > 1,
            "sliced": max(self.slack) > 0,
            "odd offset": self.offset > 0,
            "stride 0": bool(self.stretched),
        }
        return {kind for kind, is_so in found.items() if is_so}


def draw_placement(draw: Draw, axes: int, unit: int | None = None, *, result: bool = False) -> Placement:
    """A placement of an array with so many axes.

    Parameters
    ----------
    draw : Draw
    axes : int
    unit : int, optional
        Keep the last axis the fastest without gaps, and all strides multiples of so many elements.
    result : bool
        Two indices never reach one element.
    """
    order, steps, slack, stretched = list(range(axes)), [1] * axes, [0] * axes, ()
    free = axes if unit is None else axes - 1
    if draw.chance(0.4):
        order[:free] = draw.several(order[:free], free)
    for axis in range(free):
        if draw.chance(0.15):
            steps[axis] = draw.one((-1, -1, 2, -2, 3))
    for axis in draw.several(range(axes), axes):
        if draw.chance(0.15) and sum(map(bool, slack)) < 2:  # of all six axes it would make buffers of gigabytes
            slack[axis] = draw.integer(1, 5) * (unit or 1)
    if draw.chance(0.1) and not result:
        stretched = (draw.integer(0, free - 1),)
    offset = draw.integer(1, 9) if unit is None and draw.chance(0.3) else 0
    return Placement(tuple(order), tuple(steps), tuple(slack), offset, stretched)


class Placed:
    """An array in a buffer of its own, all else of which is NaN.

    Parameters
    ----------
    values : numpy.ndarray
    placement : Placement

    Attributes
    ----------
    array : numpy.ndarray
        The view; along stretched axes all elements are the first one.
    """

    def __init__(self, values: numpy.ndarray, placement: Placement) -> None:
        taken = tuple(slice(0, 1) if axis in placement.stretched else slice(None) for axis in range(values.ndim))
        stored = values[taken]
        sizes = [stored.shape[axis] for axis in placement.order]
        steps = [placement.steps[axis] for axis in placement.order]
        room = [size * abs(step) + placement.slack[axis] for size, step, axis in zip(sizes, steps, placement.order)]
        start = GUARD + placement.offset
        stop = start + math.prod(room)
        cut = tuple(slice(0, n * s, s) if s > 0 or n == 0 else slice(n * -s - 1, None, s) for n, s in zip(sizes, steps))

        def view(buffer: numpy.ndarray) -> numpy.ndarray:
            return buffer[start:stop].reshape(room)[(*cut, ...)].transpose(numpy.argsort(placement.order))

        self._buffer = numpy.full(stop + GUARD, _poison(values.dtype), values.dtype)
        array = view(self._buffer)
        array[...] = stored
        self.array = numpy.broadcast_to(array, values.shape) if placement.stretched else array
        self._outside = numpy.ones(self._buffer.shape, bool)
        view(self._outside)[...] = False
        self._before = self._bytes().copy()

    def unchanged(self) -> bool:
        """Whether the buffer is what it was, bit by bit."""
        return bool((self._bytes() == self._before).all())

    def unchanged_around(self) -> bool:
        """Whether it is but for the array itself."""
        return bool((self._bytes() == self._before)[self._outside].all())

    def _bytes(self) -> numpy.ndarray:
        return self._buffer.view(numpy.uint8).reshape(len(self._buffer), self._buffer.itemsize)


def _poison(dtype: numpy.dtype) -> float | int:
    """NaN, or a number that shows as an index and as a truth."""
    return numpy.iinfo(dtype).max if dtype.kind in "iu" else True if dtype.kind == "b" else numpy.nan
