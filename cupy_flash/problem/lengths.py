"""Sequences of their own lengths in one call: packed, padded or in pages.

`Lengths` says where the queries and keys of each sequence lie, without knowing how many there are: kernels read that when they run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy

from ..errors import UnsupportedError
from .layout import Layout
from .mask import Mask

# What a call may give, by the names of its options, and what kernels call each: fields of `SequenceParams` in
# ``kernels_cu/params.cuh``, in the order of the bits of its field `wide`.
FIELDS = {
    "cu_seqlens_q": "offsets_q",
    "cu_seqlens_kv": "offsets_kv",
    "seqlens_q": "lengths_q",
    "seqlens_kv": "lengths_kv",
    "cache_batch_idx": "cache_batch",
    "pages": "pages",
}
LENGTHS = tuple(FIELDS)
DTYPES = ("int32", "int64")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where the queries and keys of each sequence of a batch lie.

    Parameters
    ----------
    sequences : int
    arrays : tuple of (str, Layout)
        Those of `LENGTHS` that there are.
    moves : bool
        Whether the mask is anchored at the last query and the last key of each sequence; if not, at the first ones.
    cache : Layout or None
        k as it lies in memory, ``(pages, heads_kv, page_size, dim)`` or ``(rows, heads_kv, capacity, dim)``, where it is not one
        batch element for each sequence.
    cache_v : Layout or None
        The same of v.
    """

    sequences: int
    arrays: tuple[tuple[str, Layout], ...]
    moves: bool
    cache: Layout | None = None
    cache_v: Layout | None = None

    def __str__(self) -> str:
        sides = []
        for side, packed in (("queries", self.packed_q), ("keys", self.packed_kv)):
            own = "_q" if side == "queries" else "_kv"
            what = "packed" if packed else "in pages" if side == "keys" and self.paged else "padded"
            if packed or self.has(f"seqlens{own}") or (side == "keys" and self.paged):
                sides.append(f"{side} {what}")
        return f"{self.sequences} sequences of their own lengths: {', '.join(sides)}" if sides else f"{self.sequences} sequences"

    def has(self, name: str) -> bool:
        """Whether a call gives this."""
        return any(name == given for given, _ in self.arrays)

    @property
    def names(self) -> tuple[str, ...]:
        """What a call gives, in order."""
        return tuple(name for name, _ in self.arrays)

    @property
    def packed_q(self) -> bool:
        """Whether queries, and results, of all sequences lie one behind the other."""
        return self.has("cu_seqlens_q")

    @property
    def packed_kv(self) -> bool:
        """The same of keys and values."""
        return self.has("cu_seqlens_kv")

    @property
    def paged(self) -> bool:
        """Whether keys and values lie in pages."""
        return self.has("pages")

    @property
    def of_queries(self) -> bool:
        """Whether sequences differ in how many queries they have."""
        return self.packed_q or self.has("seqlens_q")

    @property
    def caches(self) -> dict[str, Layout]:
        """k and v as they lie in memory, where they are not one batch element for each sequence."""
        return {} if self.cache is None else {"k": self.cache, "v": self.cache_v}

    @property
    def page_size(self) -> int:
        """Keys of a page; 1 without pages."""
        return self.cache.shape[-2] if self.paged else 1

    @property
    def wide(self) -> int:
        """Which arrays have 64 bits, as `SequenceParams` says it."""
        layouts = dict(self.arrays)
        return sum(1 << bit for bit, name in enumerate(LENGTHS) if name in layouts and layouts[name].dtype == "int64")

    def band_of(self, mask: Mask, len_q: int, len_kv: int) -> Mask:
        """The mask of a sequence."""
        by = len_kv - len_q if self.moves else 0
        left, right = (None if end is None else end + by for end in (mask.left, mask.right))
        return Mask(len_q, len_kv, left, right, min(mask.prefix, len_kv)).simplified()


def resolved(
    q: Layout, k: Layout, v: Layout, given: dict[str, Layout]
) -> tuple[Lengths, tuple[Layout, Layout, Layout]]:
    """What a call says of lengths, checked, and its inputs with one batch element for each sequence.

    Parameters
    ----------
    q, k, v : Layout
        With axes in the order of kernels.
    given : dict of str to Layout
        Those of `LENGTHS` that there are.

    Returns
    -------
    Lengths
        Whose mask does not move.
    inputs : tuple of Layout
        q, k and v as ``(sequences, heads, rows, dim)``: of packed rows every sequence has all, and of pages all that its entries
        can name.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
    """
    _check_combination(given)
    for name, layout in given.items():
        if layout.dtype not in DTYPES:
            raise TypeError(f"{name}: expected int32 or int64, got {layout.dtype}")
        if layout.device not in (None, q.device):
            raise ValueError(f"{name}: expected an array where q is, or in host memory, got one on CUDA device {layout.device}")
        ndim = 2 if name == "pages" else 1
        if len(layout.shape) != ndim:
            what = "(sequences, pages of each)" if ndim == 2 else "one axis"
            raise ValueError(f"{name}: expected {what}, got shape {layout.shape}")
        step = 1
        for size, stride in zip(reversed(layout.shape), reversed(layout.strides)):
            if size > 1 and stride != step:
                raise ValueError(f"{name}: expected elements without gaps, got strides {layout.strides}")
            step *= size
    sequences = _sequences(q, k, given)
    for name, layout in given.items():
        wanted = sequences + 1 if name.startswith("cu_") else sequences
        if layout.shape[0] != wanted:
            raise ValueError(f"{name}: expected {wanted} elements, for {sequences} sequences, got shape {layout.shape}")
    for name, layout, packed in (
        ("q", q, "cu_seqlens_q" in given),
        ("k", k, "cu_seqlens_kv" in given),
        ("v", v, "cu_seqlens_kv" in given),
    ):
        in_cache = name != "q" and bool({"pages", "cache_batch_idx"} & given.keys())
        _check_axes(name, layout, packed, in_cache)
        if not in_cache and len(layout.shape) == 4 and layout.shape[0] not in (1, sequences):
            expected = f"{sequences} batch elements, the sequences that {' and '.join(given)} have, or one for all of them"
            raise ValueError(f"{name}: expected {expected}, got shape {layout.shape}")
        if in_cache and layout.shape[0] != k.shape[0]:
            raise ValueError(f"{name}: expected {k.shape[0]} elements along axis 0 (those of k), got shape {layout.shape}")
    if "pages" in given and k.shape[-2] == 0:
        raise ValueError(f"k: expected pages of at least one key, got shape {k.shape}")
    q = q.broadcast_to((sequences, *q.shape[-3:]))
    cache = cache_v = None
    if "pages" in given:
        cache, cache_v, pages = k, v, given["pages"].shape[1]
        k, v = (_all_pages(x, sequences, pages) for x in (k, v))
    elif "cache_batch_idx" in given:
        cache, cache_v = k, v
        k, v = (replace(x, shape=(sequences, *x.shape[1:])) for x in (k, v))
    else:
        k, v = (x.broadcast_to((sequences, *x.shape[-3:])) for x in (k, v))
    return Lengths(sequences, tuple(given.items()), False, cache, cache_v), (q, k, v)


def _all_pages(x: Layout, sequences: int, pages: int) -> Layout:
    """Keys or values as if a sequence had so many pages, one behind the other. It has as many keys, but they lie elsewhere."""
    _, heads, page_size, dim = x.shape
    return replace(x, shape=(sequences, heads, pages * page_size, dim), strides=(0, *x.strides[1:]))


def _check_combination(given: dict[str, Layout]) -> None:
    for name in ("pages", "cache_batch_idx"):
        if name in given and "cu_seqlens_kv" in given:
            raise ValueError(f"{name}: expected None with cu_seqlens_kv, which says where keys lie, got an array")
    if "pages" in given and "cache_batch_idx" in given:
        raise ValueError("cache_batch_idx: expected None with pages, which say where keys lie, got an array")
    if "pages" in given and "seqlens_kv" not in given:
        raise ValueError("seqlens_kv: expected how many keys each sequence has in its pages, got None")


def _sequences(q: Layout, k: Layout, given: dict[str, Layout]) -> int:
    for name, layout in given.items():
        if name.startswith("cu_"):
            if layout.shape[0] < 2:
                raise ValueError(f"{name}: expected at least 2 offsets, of where a sequence begins and ends, got {layout.shape[0]}")
            return layout.shape[0] - 1
    name, layout = next(iter(given.items()))
    if layout.shape[0] == 0:
        raise ValueError(f"{name}: expected at least one sequence, got shape {layout.shape}")
    return layout.shape[0]


def _check_axes(name: str, layout: Layout, packed: bool, in_cache: bool) -> None:
    axes = len(layout.shape)
    if packed and axes != 3:
        raise ValueError(f"{name}: expected 3 axes, heads, all rows and dim, with offsets of sequences, got shape {layout.shape}")
    if in_cache and axes != 4:
        raise ValueError(f"{name}: expected 4 axes with pages or cache_batch_idx, got shape {layout.shape}")
    if axes not in (3, 4):
        raise ValueError(f"{name}: expected 3 or 4 axes with lengths of sequences, got shape {layout.shape}")


def check_values(lengths: Lengths, values: dict[str, numpy.ndarray], rows: tuple[int, int]) -> None:
    """Refuse numbers that lie nowhere, of arrays in host memory.

    Parameters
    ----------
    lengths : Lengths
    values : dict of str to numpy.ndarray
        Those of its arrays that are in host memory.
    rows : (int, int)
        How many queries and keys a sequence may have at most, or all together if they are packed.

    Raises
    ------
    ValueError
    """
    for (side, most) in zip(("q", "kv"), rows):
        offsets = values.get(f"cu_seqlens_{side}")
        room = most
        if offsets is not None:
            _check_offsets(f"cu_seqlens_{side}", offsets, most)
            room = numpy.diff(offsets)
        own = values.get(f"seqlens_{side}")
        if own is not None and (offsets is not None or not lengths.has(f"cu_seqlens_{side}")):
            _check_each(f"seqlens_{side}", own, 0, numpy.broadcast_to(room, own.shape))
    cached = values.get("cache_batch_idx")
    if cached is not None:
        _check_each("cache_batch_idx", cached, 0, numpy.broadcast_to(lengths.cache.shape[0] - 1, cached.shape))
    pages, keys = values.get("pages"), values.get("seqlens_kv")
    if pages is not None and keys is not None:
        in_use = numpy.arange(pages.shape[1]) * lengths.page_size < keys[:, None]
        wrong = in_use & ((pages < 0) | (pages >= lengths.cache.shape[0]))
        if wrong.any():
            sequence, place = (int(i) for i in numpy.argwhere(wrong)[0])
            expected = f"pages from 0 to {lengths.cache.shape[0] - 1} where a sequence has keys"
            got = f"{int(pages[sequence, place])} for page {place} of sequence {sequence}"
            raise ValueError(f"pages: expected {expected}, got {got}")


def _check_offsets(name: str, offsets: numpy.ndarray, most: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"{name}: expected the first offset to be 0, got {int(offsets[0])}")
    falls = numpy.flatnonzero(offsets[1:] < offsets[:-1])  # a difference may be more than the dtype holds
    if falls.size:
        i = int(falls[0])
        got = f"{int(offsets[i])} and {int(offsets[i + 1])} for sequence {i}"
        raise ValueError(f"{name}: expected offsets that do not fall, got {got}")
    if offsets[-1] > most:
        raise ValueError(f"{name}: expected offsets up to {most}, the rows of the array, got {int(offsets[-1])}")


def _check_each(name: str, numbers: numpy.ndarray, least: int, most: numpy.ndarray) -> None:
    wrong = numpy.flatnonzero((numbers < least) | (numbers > most))
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(f"{name}: expected {least} to {int(most[i])} for sequence {i}, got {int(numbers[i])}")


def check_gradients(lengths: Lengths) -> None:
    """Refuse gradients that nothing computes.

    Raises
    ------
    UnsupportedError
    """
    for name in ("pages", "cache_batch_idx"):
        if lengths.has(name):
            raise UnsupportedError(f"{name}: expected None for gradients, which a cache has none of, got an array")
