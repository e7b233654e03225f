"""Which pairs of a query and a key dropout keeps, in array code: the definition that every kernel follows.

A pair has 15 random bits, which follow from seed, offset, batch element, head, query and key, and from nothing else, by
Philox4x32-7 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3", by whom seven rounds pass all tests of BigCrush).
Eight pairs share what one evaluation makes: two queries 8 apart, and of keys two neighbours and those 8 behind. Where queries are
the rows of a fragment, a lane of a GPU has all eight; where they are its columns, two lanes draw for each other.

    key of Philox   the low and the high half of the seed
    counter         (key // 16 * 4 + key % 8 // 2, query // 16 * 8 + query % 8, batch * heads + head, offset)
    word of a pair  2 * (query // 8 % 2) + key // 8 % 2
    bits of a pair  the lower 15 of the word's lower half if the key is even, or of its upper half

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
LOW = 0xFFFFFFFF
BITS = numpy.uint64(32)
# Evaluations at a time. A processor keeps so many in a core's own cache; a GPU needs more of them to be busy.
BITS_OF_A_PAIR = numpy.uint32(0x7FFF)
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
    rows, row_of = _places(queries // 16 * 8 + queries % 8, 2, queries // 8 % 2)
    cols, col_of = _places(keys // 16 * 4 + keys % 8 // 2, 4, keys // 8 % 2 * 2 + keys % 2)
    x2, x3, threshold = (numpy.uint32(number & LOW) for number in (batch_head, offset, threshold))
    kept = numpy.empty((len(rows), 2, len(cols), 4), bool, like=queries)
    at_a_time = AT_A_TIME if isinstance(queries, numpy.ndarray) else AT_A_TIME_ON_A_GPU
    step = max(1, at_a_time // max(1, len(cols)))
    for row in range(0, len(rows), step):
        words = philox4x32_7((cols, rows[row : row + step, None], x2, x3), (seed & LOW, seed >> 32))
        for number, word in enumerate(words):
            for half in range(2):
                bits = word >> numpy.uint32(16 * half) & BITS_OF_A_PAIR
                kept[row : row + step, number // 2, :, number % 2 * 2 + half] = bits >= threshold
    return kept.reshape(2 * len(rows), 4 * len(cols)).take(row_of, axis=0).take(col_of, axis=1)


def _product(x: Array, multiplier: numpy.uint64) -> tuple[Array, Array]:
    """The high and the low half of products of 32 bits."""
    product = x.astype(numpy.uint64) * multiplier
    return (product >> BITS).astype(numpy.uint32), product.astype(numpy.uint32)


def _places(words: Array, pairs: int, numbers: Array) -> tuple[Array, Array]:
    """The words of counters, each once, and of each position its index in what these make, where each has so many pairs."""
    distinct, index = numpy.unique(words, return_inverse=True)
    return distinct.astype(numpy.uint32), pairs * index + numbers
