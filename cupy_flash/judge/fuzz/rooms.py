"""Where random sequences lie: rows of their own, one behind the other, in pages, or rows that several share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from .draw import Draw

LENGTHS = (0, 0, 1, 1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 32, 33, 47, 61, 63, 64, 65, 97, 127, 128, 129, 193)
PAGE_SIZES = (1, 3, 8, 16, 48, 64, 128, 256)
DTYPES = ("int32", "int64")
OF_QUERIES = ("all", "padded", "padded", "shared", "packed", "packed", "packed", "roomy")
OF_KEYS = (*OF_QUERIES, "cache", "cache of all")
SHARED = ("shared", "cache", "cache of all", "pages")  # rows may be those of several sequences
PACKED = ("packed", "roomy")


@dataclass(frozen=True)
class Room:
    """Where the rows of each sequence lie in an array ``(elements, heads, rows, dim)``.

    Parameters
    ----------
    side : {'q', 'kv'}
    kind : str
        "all": each has an element, all rows of it. "padded": the first ones. "shared": all have the same element. "packed": one
        behind the other; "roomy" with gaps. "pages": elements are pages. "cache": of other elements, "cache of all" all their rows.
    lens : tuple of int
        Rows of each.
    elements, rows : int
    places : tuple of (numpy.ndarray, numpy.ndarray)
        Of each sequence the element of each row, and which one of it.
    numbers : dict of str to numpy.ndarray
        What a call is told, by the names of its arguments.
    capacity : int
        The most rows that a sequence may have, as expressions and masks have them.
    """

    side: str
    kind: str
    lens: tuple[int, ...]
    elements: int
    rows: int
    places: tuple[tuple[numpy.ndarray, numpy.ndarray], ...]
    numbers: dict[str, numpy.ndarray]
    capacity: int

    @property
    def is_packed(self) -> bool:
        """Whether arrays have no batch axis because of offsets."""
        return self.kind in PACKED

    def __str__(self) -> str:
        told = " ".join(f"{name}:{x.dtype}{x.tolist() if x.ndim == 1 else x.shape}" for name, x in self.numbers.items())
        return f"{self.side} {self.kind} {self.elements}x{self.rows} {told}".replace(" ", "")

    def of_results(self) -> Room:
        """Where results are: of shared rows each sequence has its own."""
        if self.kind != "shared":
            return self
        places = tuple((numpy.full(n, i), numpy.arange(n)) for i, n in enumerate(self.lens))
        return Room(self.side, "padded", self.lens, len(self.lens), self.rows, places, {}, self.capacity)

    def gathered(self, x: numpy.ndarray, number: int) -> numpy.ndarray:
        """The rows of a sequence, ``(heads, rows, ...)``."""
        element, row = self.places[number]
        return x[element, :, row].swapaxes(0, 1)

    def filled(self, shape: tuple[int, int], numbers: numpy.random.Generator, dtype: Any, poison: float) -> numpy.ndarray:
        """An array of normal numbers where rows belong to a sequence, ``(elements, heads, rows, dim)``, and poison elsewhere."""
        heads, dim = shape
        x = numpy.full((self.elements, heads, self.rows, dim), poison, dtype)
        for element, row in self.places:
            x[element, :, row] = numbers.standard_normal((len(row), heads, dim)).astype(dtype)
        return x

    def outside(self) -> numpy.ndarray:
        """Which rows belong to no sequence, ``(elements, rows)``."""
        free = numpy.ones((self.elements, self.rows), bool)
        for element, row in self.places:
            free[element, row] = False
        return free


def draw_lengths(draw: Draw, count: int) -> tuple[int, ...]:
    """Lengths of so many sequences: usually any, sometimes one long one among short ones, or all very short."""
    lens = [draw.one(LENGTHS if count <= 20 else (0, 1, 1, 2, 3)) for _ in range(count)]
    if draw.chance(0.15):
        lens = [min(n, 9) for n in lens]
        lens[draw.integer(0, count - 1)] = draw.integer(300, 700)
    return tuple(lens)


def draw_room(draw: Draw, side: str, kind: str, lens: tuple[int, ...], apart: bool = False) -> Room:
    """A place for sequences of these lengths; for kinds of equal lengths all have that of the longest.

    Those of a cache or in pages may share rows, unless they have to be `apart`.
    """
    count = len(lens)
    if kind in ("all", "cache of all"):
        lens = (max(lens),) * count
    if kind in PACKED:
        return _packed(draw, side, kind, lens)
    if kind == "pages":
        return _pages(draw, lens, apart)
    rows = max(max(lens), 1) + (0 if kind in ("all", "cache of all") or draw.chance(0.3) else draw.integer(1, 70))
    elements = list(range(count))
    told = {}
    if kind == "shared":
        elements, total = [0] * count, 1
    elif kind in ("cache", "cache of all"):
        total = count + draw.integer(0, 3) if apart else draw.integer(1, count + 3)
        elements = draw.several(range(total), count) if apart else [draw.integer(0, total - 1) for _ in range(count)]
        told["cache_batch_idx"] = _array(draw, elements)
    else:
        total = count
    if kind in ("padded", "shared", "cache"):
        told[f"seqlens_{side}"] = _array(draw, lens)
    if kind == "all":
        rows = lens[0]
    if kind == "cache of all":
        rows = lens[0]
    places = tuple((numpy.full(n, element), numpy.arange(n)) for n, element in zip(lens, elements))
    return Room(side, kind, lens, total, rows, places, told, rows)


def _packed(draw: Draw, side: str, kind: str, lens: tuple[int, ...]) -> Room:
    gaps = [draw.one((0, 0, 1, 5, 64)) if kind == "roomy" else 0 for _ in lens]
    offsets = numpy.cumsum([0, *(n + gap for n, gap in zip(lens, gaps))])
    behind = draw.one((0, 0, 1, 3, 63, 64, 130))
    told = {f"cu_seqlens_{side}": _array(draw, offsets)}
    told |= {f"seqlens_{side}": _array(draw, lens)} if kind == "roomy" else {}
    places = tuple((numpy.zeros(n, int), start + numpy.arange(n)) for n, start in zip(lens, offsets))
    return Room(side, kind, lens, 1, int(offsets[-1]) + behind, places, told, max(*lens, 1))


def _pages(draw: Draw, lens: tuple[int, ...], apart: bool) -> Room:
    """Pages in any order. Sequences may begin with the same ones; entries that are not in use are wild."""
    size = draw.one(PAGE_SIZES)
    used = [-(-n // size) for n in lens]
    columns = max(max(used) + draw.one((0, 0, 1, 4)), 1)
    total = max(sum(used) + draw.one((0, 1, 5)), 1)
    free = draw.several(range(total), total)
    dtype = draw.one(DTYPES)
    table = numpy.full((len(lens), columns), draw.one((-1, numpy.iinfo(dtype).max, numpy.iinfo(dtype).min)), dtype)
    for i, n in enumerate(used):
        same = draw.integer(0, min(n, used[i - 1])) if i and not apart and draw.chance(0.3) else 0
        table[i, :same] = table[i - 1, :same]
        table[i, same:n] = [free.pop() for _ in range(n - same)]
    places = []
    for number, n in enumerate(lens):
        key = numpy.arange(n)
        places.append((table[number, key // size].astype(int), key % size))
    told = {"seqlens_kv": _array(draw, lens), "pages": table}
    return Room("kv", "pages", lens, total, size, tuple(places), told, columns * size)


def _array(draw: Draw, values: Any) -> numpy.ndarray:
    return numpy.array(values, draw.one(DTYPES))
