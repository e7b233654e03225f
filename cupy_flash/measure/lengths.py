"""What `bench-lengths` measures: documents in a row, caches in pages, decoding. Problems and arithmetic only; no machine.

A `LengthsCell` is a problem of sequences of their own lengths, to be measured by `bench.measure` as any other cell. Its rows lie
one behind the other, (all rows, heads, dim), and each contender makes of them what it takes: a cache, pages, nested tensors.

Rates of documents count the pairs that see each other, as in `bench`. Rates of decoding count the keys and values that are read
once, in bytes: that is what a decoder waits for, so the limit is how fast the card copies. A decoder has a call for each layer, and
each layer's keys come from memory. So decoding is measured as `CALLS` calls in one graph, which have several caches in turn where
one would still lie in the L2 cache when it is read again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

TOKENS = 32_768  # of all documents
HIDDEN = 2048  # heads times dim of documents
DENSE = 4096  # length of documents that are all alike, which a call without lengths computes as well
PAGE_SIZES = (256, 64, 16, 1)
PAGE_SIZE = 64  # of decoding
CALLS = 20  # of a decoding contender in its graph, as of that many layers
TIMES_L2 = 4  # the L2 cache, as many bytes as are read between two readings of a key
ITEM_BYTES = 2  # of bfloat16, as which everything is measured
ROWS = ("packed", "pages", "decode", "step")


@dataclass(frozen=True)
class LengthsCell:
    """Sequences of their own lengths, in bfloat16.

    Parameters
    ----------
    row : str
        Out of `ROWS`: of which part of the table it is.
    name : str
    direction : {'forward', 'backward'}
    dim, heads, heads_kv : int
    lens_q, lens_kv : tuple of int
        Of each sequence.
    causal : bool
        Anchored at the last query and key of each.
    page_sizes : tuple of int
        With what pages it is measured.
    """

    row: str
    name: str
    direction: str
    dim: int
    heads: int
    heads_kv: int
    lens_q: tuple[int, ...]
    lens_kv: tuple[int, ...]
    causal: bool = False
    page_sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.row} {self.name} {self.direction} dim {self.dim}"

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one query: such steps are captured in a graph, as servers do."""
        return set(self.lens_q) == {1}

    @property
    def alike(self) -> bool:
        """Whether all lengths are the same."""
        return len(set(self.lens_q)) == len(set(self.lens_kv)) == 1

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that see each other, of one head."""
        return sum(pairs_of(*lens, self.causal) for lens in zip(self.lens_q, self.lens_kv))

    @property
    def flops(self) -> int:
        """Operations of the matrix products, masked pairs not counted."""
        return (4 if self.direction == "forward" else 10) * self.dim * self.pairs * self.heads

    @property
    def key_bytes(self) -> int:
        """Bytes of all keys and values, each read once."""
        return 2 * sum(self.lens_kv) * self.heads_kv * self.dim * ITEM_BYTES


def pairs_of(len_q: int, len_kv: int, causal: bool) -> int:
    """Pairs that see each other: query i sees keys up to i + len_kv - len_q, if it is causal."""
    if not causal:
        return len_q * len_kv
    first = len_kv - len_q + 1  # keys that the first query sees
    hidden = max(0, -first + 1)  # queries that see none
    seeing = len_q - hidden
    return seeing * (max(first, 1) + len_kv) // 2


def caches_of(cell: LengthsCell, l2_bytes: int) -> int:
    """How many caches the calls of a graph have in turn: together they have `TIMES_L2` times the bytes of the L2 cache.

    So keys come from memory, and little is left of them in the L2 cache when they are read again. One cache that is so large is
    enough, and no more than `CALLS` are made.
    """
    return min(CALLS, max(1, -(-TIMES_L2 * l2_bytes // cell.key_bytes)))


def offsets_of(lens: tuple[int, ...]) -> list[int]:
    """Where each sequence begins, and where the last one ends."""
    return [0, *accumulate(lens)]


def documents(tokens: int, median: float, sigma: float, least: int, most: int, seed: int) -> tuple[int, ...]:
    """Random lengths of documents that fill so many tokens: log-normal, cut off at both ends. The last one ends where they do.

    Parameters
    ----------
    tokens : int
    median, sigma : float
        Of the lengths; sigma is that of their logarithm.
    least, most : int
    seed : int
    """
    draw, lens = random.Random(seed), []
    while sum(lens) < tokens:
        length = round(median * 2.718281828459045 ** (sigma * draw.gauss(0, 1)))
        lens.append(min(max(length, least), most, tokens - sum(lens)))
    return tuple(lens)


def log_uniform(count: int, least: int, most: int, seed: int) -> tuple[int, ...]:
    """Random lengths of which each order of magnitude is as frequent."""
    draw = random.Random(seed)
    return tuple(round(least * (most / least) ** draw.random()) for _ in range(count))


def cells(rows: tuple[str, ...] = ROWS) -> tuple[LengthsCell, ...]:
    """What is measured, those that a table shows beside each other one after another."""
    found: list[LengthsCell] = []
    mixed, alike = documents(TOKENS, 1500, 1, 16, 16_384, 0), (DENSE,) * (TOKENS // DENSE)
    for direction in ("forward", "backward"):
        for dim in (64, 128):
            for name, lens in ((f"{len(mixed)} documents", mixed), (f"{len(alike)} of {DENSE}", alike)):
                heads = HIDDEN // dim
                found.append(LengthsCell("packed", name, direction, dim, heads, heads, lens, lens, causal=True))
    found.append(LengthsCell("pages", "8 x 2k of 8k", "forward", 128, 32, 8, (2048,) * 8, (8192,) * 8, True, PAGE_SIZES))
    found.append(_decoding("pages", "16 x 8k", (8192,) * 16, PAGE_SIZES))
    for count, length in ((1, 8), (1, 128), (16, 8), (64, 8)):
        found.append(_decoding("decode", f"{count} x {length}k", (1024 * length,) * count))
    found.append(_decoding("decode", "64 x 1..128k", log_uniform(64, 1, 131_072, 0)))
    found.append(_decoding("step", "16 x 8k", (8192,) * 16))
    return tuple(cell for cell in found if cell.row in rows)


def _decoding(row: str, name: str, lens: tuple[int, ...], sizes: tuple[int, ...] = (PAGE_SIZE,)) -> LengthsCell:
    return LengthsCell(row, name, "forward", 128, 32, 8, (1,) * len(lens), lens, page_sizes=sizes)
