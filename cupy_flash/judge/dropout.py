"""Which pairs dropout keeps, from the definition: what is judged has its own.

Philox (Salmon et al., 2011) makes 64 bits for the 32 pairs that differ in bits 3 and 4 of the query and in bits 0, 3 and 4 of the
key. Philox4x32-7, keyed by the seed, makes of the offset what the key of Philox2x32-7 begins with, and the two words of its
counter. The head is added to the former; to the latter the query, whose bit 0 stands above bits 1 and 2, and the key, without
those bits. Of x and y that come out, bit 4 of the query adds multiples of each to the other, and so does bit 4 of the key. Then
bit 3 of the query and of the key choose one of four words, the former being the higher bit, and bit 0 of the key its half, whose
highest bit is left out. Below the threshold, p 2^15, a pair is dropped. Those that are kept count for as much more as they are
fewer.
"""

from __future__ import annotations

import numpy

LOW = 0xFFFFFFFF  # a word


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
    [[False, True, False], [True, True, False]]
    """
    *heads, len_q, len_kv = shape
    query, key = numpy.arange(len_q)[:, None], numpy.arange(len_kv)
    head = numpy.arange(int(numpy.prod(heads, dtype=int))).reshape(*heads, 1, 1)
    start = philox([offset, 0, 0, 0], [seed & LOW, seed >> 32], (0xD2511F53, 0xCD9E8D57))
    of_query = start[1] + (query >> 5 << 3 | (query & 1) << 2 | query >> 1 & 3)
    of_key = start[2] + (key >> 5 << 2 | key >> 1 & 3)
    x, y = philox([of_query & LOW, of_key & LOW], [start[0] + head & LOW], (0xD256D193,))
    for odd, factor in ((query >> 4 & 1, 0x165667B1), (key >> 4 & 1, 0x85EBCA6B)):
        x = x + y * (odd * factor) & LOW
        y = y + x * (odd * factor) & LOW
    z = x + y * 0xC2B2AE35 & LOW
    word = numpy.choose((query >> 3 & 1) * 2 + (key >> 3 & 1), numpy.broadcast_arrays(x, y, z, y + z * 0xC2B2AE35 & LOW))
    return (word >> 16 * (key & 1) & 2**15 - 1).reshape(shape) >= threshold_of(p)


def philox(counter: list, key: list, multipliers: tuple[int, ...]) -> list:
    """Return the words of seven rounds, of 32 bits each, for a counter of two words for each multiplier and a key of one."""
    words = [numpy.asarray(word, numpy.uint64) for word in counter]
    for turn in range(7):
        into = []
        for i, (k, step) in enumerate(zip(key, (0x9E3779B9, 0xBB67AE85))):
            # of two multipliers, each product goes to the other half
            product = words[-2 - 2 * i] * numpy.uint64(multipliers[-1 - i])
            k = numpy.asarray(k, numpy.uint64) + numpy.uint64(turn * step)
            into += [product >> numpy.uint64(32) ^ words[2 * i + 1] ^ (k & numpy.uint64(LOW)), product & numpy.uint64(LOW)]
        words = into
    return [word.astype(numpy.int64) for word in words]
