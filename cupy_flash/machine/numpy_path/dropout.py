"""Which pairs of a query and a key dropout keeps, in array code: the definition that every kernel follows.

A pair has 15 random bits, which follow from seed, offset, batch element, head, query and key, and from nothing else, by Philox
(Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"). 32 pairs share the 64 bits that one evaluation makes: of
queries those 8, 16 and 24 apart, of keys as well, and two neighbours. Any two of their words are independent, but for at most the
four lowest bits.

    a, b, c                the first three words of Philox4x32-7, whose key is the seed and whose counter is (offset, 0, 0, 0)
    x, y                   of Philox2x32-7, whose key is a + batch * heads + head and whose counter is
                           (b + query // 32 * 8 + query % 2 * 4 + query % 8 // 2, c + key // 32 * 4 + key % 8 // 2)
    if query // 16 is odd  x += 0x165667b1 y, then y += 0x165667b1 x
    if key // 16 is odd    x += 0x85ebca6b y, then y += 0x85ebca6b x
    words                  x, y, z = x + 0xc2b2ae35 y, and y + 0xc2b2ae35 z
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
MULTIPLIER = numpy.uint64(0xD256D193)
WEYL = 0x9E3779B9, 0xBB67AE85  # what the key grows by: the golden ratio and the square root of 3
ROUNDS = 7
OF_ODD_QUERIES, OF_ODD_KEYS, OF_WORDS = (numpy.uint32(x) for x in (0x165667B1, 0x85EBCA6B, 0xC2B2AE35))
LOW = 0xFFFFFFFF
BITS = numpy.uint64(32)
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


def philox2x32_7(counter: tuple[Array, Array], key: int) -> tuple[Array, Array]:
    """Return the two words of random bits that belong to each counter.

    Parameters
    ----------
    counter
        Its two words, arrays of uint32 whose shapes broadcast. The first round costs little where the first is that of a row alone.
    key
        A word, below 2**32.

    Examples
    --------
    >>> import numpy
    >>> from cupy_flash.machine.numpy_path.dropout import philox2x32_7
    >>> x, y = philox2x32_7((numpy.zeros(1, numpy.uint32), numpy.zeros(1, numpy.uint32)), 0)
    >>> f"{x[0]:08x} {y[0]:08x}"
    '257a3673 cd26be2a'
    """
    x0, x1 = counter
    for number in range(ROUNDS):
        high, low = _product(x0, MULTIPLIER)
        x0, x1 = high ^ (x1 ^ numpy.uint32(key + number * WEYL[0] & LOW)), low
    return x0, x1


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
    first_key, first_query, first_kv = (int(word) for word in of_seed[:3])
    rows, row_of = _places(queries // 32 * 8 + queries % 2 * 4 + queries % 8 // 2 + first_query, 4, queries // 8 % 4)
    cols, col_of = _places(keys // 32 * 4 + keys % 8 // 2 + first_kv, 8, keys // 8 % 4 * 2 + keys % 2)
    key, threshold = first_key + batch_head & LOW, numpy.uint32(threshold)
    kept = numpy.empty((len(rows), 4, len(cols), 8), bool, like=queries)
    at_a_time = AT_A_TIME if isinstance(queries, numpy.ndarray) else AT_A_TIME_ON_A_GPU
    step = max(1, at_a_time // max(1, len(cols)))
    for row in range(0, len(rows), step):
        drawn = philox2x32_7((rows[row : row + step, None], cols), key)
        for odd_query in range(2):
            for odd_key in range(2):
                for number, word in enumerate(_words(*drawn, odd_query, odd_key)):
                    for half in range(2):
                        bits = word >> numpy.uint32(16 * half) & BITS_OF_A_PAIR
                        into = odd_query * 2 + number // 2, slice(None), odd_key * 4 + number % 2 * 2 + half
                        kept[(slice(row, row + step), *into)] = bits >= threshold
    return kept.reshape(4 * len(rows), 8 * len(cols)).take(row_of, axis=0).take(col_of, axis=1)


def _words(x: Array, y: Array, odd_query: int, odd_key: int) -> tuple[Array, Array, Array, Array]:
    """The words of pairs whose queries and keys are in odd or even sixteens."""
    for odd, factor in ((odd_query, OF_ODD_QUERIES), (odd_key, OF_ODD_KEYS)):
        if odd:
            x = x + factor * y
            y = y + factor * x
    z = x + OF_WORDS * y
    return x, y, z, y + OF_WORDS * z


def _product(x: Array, multiplier: numpy.uint64) -> tuple[Array, Array]:
    """The high and the low half of products of 32 bits."""
    product = x.astype(numpy.uint64) * multiplier
    return (product >> BITS).astype(numpy.uint32), product.astype(numpy.uint32)


def _places(words: Array, pairs: int, numbers: Array) -> tuple[Array, Array]:
    """The words of counters, each once, and of each position its index in what these make, where each has so many pairs."""
    distinct, index = numpy.unique(words, return_inverse=True)
    return (distinct & LOW).astype(numpy.uint32), pairs * index + numbers
