"""Which pairs dropout keeps, from the definition: what is judged has its own.

A pair's 15 bits are of a word of Philox4x32-7 (Salmon et al., 2011), keyed by the seed. Its counter has the key, the query, the
number of the head and the offset, the key without its bits 0 and 3, the query without its bit 3. Bit 3 of the query and bit 3
of the key choose the word, the former being the higher one, and bit 0 of the key the half of it, whose highest bit is left out.
Below the threshold, p 2^15, a pair is dropped. Those that are kept count for as much more as they are fewer.
"""

from __future__ import annotations

import numpy


def threshold_of(p: float) -> int:
    """Return how many of 2^15 numbers drop a pair."""
    return min(round(p * 2**15), 2**15 - 1)


def keep_scale_of(p: float) -> float:
    """Return what kept pairs are multiplied by."""
    return 2**15 / (2**15 - threshold_of(p))


def kept_pairs(shape: tuple[int, ...], p: float, seed: int, offset: int = 0) -> numpy.ndarray:
    """Return which pairs are kept, booleans `(*batch, heads, len_q, len_kv)`.

    Examples
    --------
    >>> from cupy_flash.judge.dropout import kept_pairs
    >>> kept_pairs((2, 3), 0.5, seed=7).tolist()
    [[True, True, True], [False, False, True]]
    """
    *heads, len_q, len_kv = shape
    query, key = numpy.arange(len_q)[:, None], numpy.arange(len_kv)
    head = numpy.arange(int(numpy.prod(heads, dtype=int))).reshape(*heads, 1, 1)

    def without_bit_3(x: numpy.ndarray) -> numpy.ndarray:
        return x >> 4 << 3 | x & 7

    counter = numpy.broadcast_arrays(without_bit_3(key) >> 1, without_bit_3(query), head, offset)
    words = philox([word.astype(numpy.uint64) for word in counter], (seed & 0xFFFFFFFF, seed >> 32))
    word = numpy.choose((query >> 3 & 1) * 2 + (key >> 3 & 1), words)
    half = word >> (16 * (key & 1)).astype(numpy.uint64)
    return (half & numpy.uint64(2**15 - 1)).reshape(shape) >= threshold_of(p)


def philox(counter: list[numpy.ndarray], key: tuple[int, int]) -> list[numpy.ndarray]:
    """Return the words of Philox4x32-7, 32 bits each in arrays of uint64."""
    a, b, c, d = counter
    low = numpy.uint64(0xFFFFFFFF)
    for turn in range(7):
        first, second = a * numpy.uint64(0xD2511F53), c * numpy.uint64(0xCD9E8D57)
        k, m = (numpy.uint64((x + turn * step) % 2**32) for x, step in zip(key, (0x9E3779B9, 0xBB67AE85)))
        a, b, c, d = second >> numpy.uint64(32) ^ b ^ k, second & low, first >> numpy.uint64(32) ^ d ^ m, first & low
    return [a, b, c, d]
