"""Which pairs dropout keeps, from the definition: what is judged has its own.

A pair's 32 bits are a word of Philox4x32-10 (Salmon et al., 2011), keyed by the seed. Its counter has the key, the query, the
number of the head and the offset, the key and the query without their bit 3: those two bits choose the word. Below the threshold,
p 2^32, a pair is dropped. Those that are kept count for as much more as they are fewer.
"""

from __future__ import annotations

import numpy


def threshold_of(p: float) -> int:
    """Return how many of 2^32 words drop a pair."""
    return min(round(p * 2**32), 2**32 - 1)


def keep_scale_of(p: float) -> float:
    """Return what kept pairs are multiplied by."""
    return 2**32 / (2**32 - threshold_of(p))


def kept_pairs(shape: tuple[int, ...], p: float, seed: int, offset: int = 0) -> numpy.ndarray:
    """Return which pairs are kept, booleans `(*batch, heads, len_q, len_kv)`.

    Examples
    --------
    >>> from cupy_flash.judge.dropout import kept_pairs
    >>> kept_pairs((2, 3), 0.5, seed=7).tolist()
    [[True, False, False], [True, True, False]]
    """
    *heads, len_q, len_kv = shape
    query, key = numpy.arange(len_q)[:, None], numpy.arange(len_kv)
    head = numpy.arange(int(numpy.prod(heads, dtype=int))).reshape(*heads, 1, 1)

    def without_bit_3(x: numpy.ndarray) -> numpy.ndarray:
        return x >> 4 << 3 | x & 7

    counter = numpy.broadcast_arrays(without_bit_3(key), without_bit_3(query), head, offset)
    words = philox([word.astype(numpy.uint64) for word in counter], (seed & 0xFFFFFFFF, seed >> 32))
    number = (query >> 3 & 1) * 2 + (key >> 3 & 1)
    return numpy.choose(number, words).reshape(shape) >= threshold_of(p)


def philox(counter: list[numpy.ndarray], key: tuple[int, int]) -> list[numpy.ndarray]:
    """Return the words of Philox4x32-10, 32 bits each in arrays of uint64."""
    a, b, c, d = counter
    low = numpy.uint64(0xFFFFFFFF)
    for turn in range(10):
        first, second = a * numpy.uint64(0xD2511F53), c * numpy.uint64(0xCD9E8D57)
        k, m = (numpy.uint64((x + turn * step) % 2**32) for x, step in zip(key, (0x9E3779B9, 0xBB67AE85)))
        a, b, c, d = second >> numpy.uint64(32) ^ b ^ k, second & low, first >> numpy.uint64(32) ^ d ^ m, first & low
    return [a, b, c, d]
