"""Which pairs of a query and a key dropout keeps, in array code: the definition that every kernel follows.

A pair has 15 random bits, which follow from seed, offset, batch element, head, query and key, and from nothing else, by Philox
(Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3") and pcg4d (Jarzynski and Olano, 2020, "Hash functions for GPU
rendering"). 128 pairs share the first round that one evaluation makes: of queries those that differ by multiples of 8, of keys as
well, and two neighbours, among 64 x 64. 32 of them share the second one too, and its 128 bits.

    a, b, c, d             the words of Philox4x32-7, whose key is the seed and whose counter is (offset, 0, 0, 0)
    x, y, z, w             what pcg4d makes of (b + query // 64 * 8 + query % 2 * 4 + query % 8 // 2,
                           c + key // 64 * 4 + key % 8 // 2, a + batch * heads + head, d), but between its two rounds  y = y ^ f
    f                      0, ^ 0x9e3779b9 if query // 16 is odd, ^ 0x85ebca6b if query // 32 is
    m                      0x7feb352d, times 0x27d4eb2d if key // 16 is odd, times 0xc2b2ae3b if key // 32 is
    words                  p = x + m y, y + m z, z + m w, and w + m p
    word of a pair         2 * (query // 8 % 2) + key // 8 % 2
    bits of a pair         the lower 15 of the word's lower half if the key is even, or of its upper half

A pair is dropped if its bits are below the threshold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from ...problem.arrays import Array

MULTIPLIERS = numpy.uint64(0xD2511F53), numpy.uint64(0xCD9E8D57)
WEYL = 0x9E3779B9, 0xBB67AE85  # what the key grows by: the golden ratio and the square root of 3
ROUNDS = 7
FACTOR, ADDEND = numpy.uint32(1664525), numpy.uint32(1013904223)  # of pcg4d
OF_ALL, OF_QUERIES, OF_KEYS = 0x7FEB352D, (0x9E3779B9, 0x85EBCA6B), (0x27D4EB2D, 0xC2B2AE3B)
LOW = 0xFFFFFFFF
BITS, HALF = numpy.uint64(32), numpy.uint32(16)
BITS_OF_A_PAIR = numpy.uint32(0x7FFF)
# Evaluations at a time. A processor keeps so many in a core's own cache; a GPU needs more of them to be busy.
AT_A_TIME, AT_A_TIME_ON_A_GPU = 1 << 15, 1 << 22


def philox4x32_7(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Return the four words of random bits that belong to each counter.

    Parameters
    ----------
    counter
        Its four words, arrays or scalars of uint32 whose shapes broadcast. The first rounds cost little where a word is that of a
        row or a column alone.
    key
        Its two words, below 2**32.

    Examples
    --------
    >>> import numpy
    >>> from cupy_flash.machine.numpy_path.dropout import philox4x32_7
    >>> [f"{word:08x}" for word in philox4x32_7((numpy.uint32(0),) * 4, (0, 0))]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    x0, x1, x2, x3 = counter
    for number in range(ROUNDS):
        key0, key1 = (numpy.uint32(word + number * weyl & LOW) for word, weyl in zip(key, WEYL))
        (high0, low0), (high1, low1) = (_product(x, multiplier) for x, multiplier in zip((x0, x2), MULTIPLIERS))
        x0, x1, x2, x3 = high1 ^ (x1 ^ key0), low1, high0 ^ (x3 ^ key1), low0
    return x0, x1, x2, x3


def pcg4d(x: Array, y: Array, z: Array, w: Array, f: int = 0) -> tuple[Array, Array, Array, Array]:
    """Return the four words of random bits that belong to four words, arrays of uint32 whose shapes broadcast.

    Parameters
    ----------
    x, y, z, w
    f
        How the second word changes between the two rounds: these bits of it, below 2**32.

    Examples
    --------
    >>> import numpy
    >>> from cupy_flash.machine.numpy_path.dropout import pcg4d
    >>> [f"{word[0]:08x}" for word in pcg4d(*numpy.zeros((4, 1), numpy.uint32))]
    ['0f02f829', '2d568769', '32b0c43b', 'd32548ea']
    """
    return _second_round(_first_round(x, y, z, w), f)


def keeps(threshold: int, seed: int, offset: int, batch_head: int, queries: Array, keys: Array) -> Array:
    """Return which pairs are kept, `(len(queries), len(keys))`, of bool.

    Parameters
    ----------
    threshold
        Bits below it drop a pair.
    seed, offset
        Below 2**64 and 2**32.
    batch_head
        Number of the head, counted over all batch elements.
    queries, keys
        Positions in their sequences, 1-D arrays of integers of at least 0, in any order. CuPy arrays give a CuPy array.
    """
    of_seed = philox4x32_7((numpy.uint32(offset), *[numpy.uint32(0)] * 3), (seed & LOW, seed >> 32))
    first_head, first_query, first_kv, rest = (int(word) for word in of_seed)
    rows, row_of = _places(queries // 64 * 8 + queries % 2 * 4 + queries % 8 // 2 + first_query, 8, queries // 8 % 8)
    cols, col_of = _places(keys // 64 * 4 + keys % 8 // 2 + first_kv, 16, keys // 8 % 8 * 2 + keys % 2)
    head, rest = (numpy.full_like(cols, word) for word in (first_head + batch_head & LOW, rest))
    threshold = numpy.uint32(threshold)
    kept = numpy.empty((len(rows), 8, len(cols), 16), bool, like=queries)
    at_a_time = AT_A_TIME if isinstance(queries, numpy.ndarray) else AT_A_TIME_ON_A_GPU
    step = max(1, at_a_time // max(1, len(cols)))
    for row in range(0, len(rows), step):
        first = _first_round(rows[row : row + step, None], cols, head, rest)
        for of_query in range(4):
            second = _second_round(first, (of_query & 1) * OF_QUERIES[0] ^ (of_query >> 1) * OF_QUERIES[1])
            for of_key in range(4):
                for number, word in enumerate(_words(second, of_key)):
                    for half in range(2):
                        bits = word >> numpy.uint32(16 * half) & BITS_OF_A_PAIR
                        into = of_query * 2 + number // 2, slice(None), of_key * 4 + number % 2 * 2 + half
                        kept[(slice(row, row + step), *into)] = bits >= threshold
    return kept.reshape(8 * len(rows), 16 * len(cols)).take(row_of, axis=0).take(col_of, axis=1)


def _first_round(*words: Array) -> tuple[Array, ...]:
    return tuple(word ^ word >> HALF for word in _round(*(word * FACTOR + ADDEND for word in words)))


def _second_round(words: tuple[Array, ...], f: int) -> tuple[Array, ...]:
    x, y, z, w = words
    return _round(x, y ^ numpy.uint32(f), z, w)


def _round(x: Array, y: Array, z: Array, w: Array) -> tuple[Array, ...]:
    x = x + y * w
    y = y + z * x
    z = z + x * y
    return x, y, z, w + y * z


def _words(drawn: tuple[Array, ...], of_key: int) -> tuple[Array, ...]:
    """The words of the pairs of sixteen of 64 keys."""
    m = numpy.uint32(OF_ALL * OF_KEYS[0] ** (of_key & 1) * OF_KEYS[1] ** (of_key >> 1) & LOW)
    x, y, z, w = drawn
    p = x + m * y
    return p, y + m * z, z + m * w, w + m * p


def _product(x: Array, multiplier: numpy.uint64) -> tuple[Array, Array]:
    """The high and the low half of products of 32 bits."""
    product = x.astype(numpy.uint64) * multiplier
    return (product >> BITS).astype(numpy.uint32), product.astype(numpy.uint32)


def _places(words: Array, pairs: int, numbers: Array) -> tuple[Array, Array]:
    """The words of counters, each once, and of each position its index in what these make, where each has so many pairs."""
    distinct, index = numpy.unique(words, return_inverse=True)
    return (distinct & LOW).astype(numpy.uint32), pairs * index + numbers
