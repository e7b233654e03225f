"""Which pairs dropout keeps, from the definition: what is judged has its own.

Philox4x32-7 (Salmon et al., 2011), keyed by the seed, makes four words of the offset. They begin what pcg4d (Jarzynski and Olano,
2020) is asked for, of a query, a key and a head: to the second the query is added, without bits 3 to 5 and with bit 0 above bits 1
and 2, to the third the key, without these and bit 0, to the first the number of the head; pcg4d takes them in this order, and last
the fourth. Between its rounds bits of the second word change, some for each of bits 4 and 5 of the query that is set. To each of
the four that come out something is added, times 0x7FEB352D and a factor for each of bits 4 and 5 of the key that is set: to the
first three the next word, to the fourth the first as it is by then. Then bit 3 of the query and of the key choose one of the four,
the former being the higher bit, and bit 0 of the key its half, whose highest bit is left out. Below the threshold, p 2^15, a pair
is dropped. Those that are kept count for as much more as they are fewer.
"""

from __future__ import annotations

from itertools import pairwise

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
    [[False, True, False], [False, False, False]]
    """
    *heads, len_q, len_kv = shape
    query, key = numpy.arange(len_q)[:, None], numpy.arange(len_kv)
    head = numpy.arange(int(numpy.prod(heads, dtype=int))).reshape(*heads, 1, 1)
    start = philox([offset, 0, 0, 0], [seed & LOW, seed >> 32])
    of_query = start[1] + (query >> 6 << 3 | (query & 1) << 2 | query >> 1 & 3)
    of_key = start[2] + (key >> 6 << 2 | key >> 1 & 3)
    change = (query >> 4 & 1) * 0x9E3779B9 ^ (query >> 5 & 1) * 0x85EBCA6B
    words = pcg4d([of_query & LOW, of_key & LOW, start[0] + head & LOW, start[3]], change)
    factor = 0x7FEB352D * numpy.where(key >> 4 & 1, 0x27D4EB2D, 1) & LOW
    factor = factor * numpy.where(key >> 5 & 1, 0xC2B2AE3B, 1) & LOW
    mixed = [word + factor * following & LOW for word, following in pairwise(words)]
    mixed.append(words[3] + factor * mixed[0] & LOW)
    word = numpy.choose((query >> 3 & 1) * 2 + (key >> 3 & 1), mixed)
    return (word >> 16 * (key & 1) & 2**15 - 1).reshape(shape) >= threshold_of(p)


def pcg4d(words: list, change: numpy.ndarray) -> list:
    """Return the four words that belong to four words, of the second of which bits change between the rounds."""
    words = [1664525 * word + 1013904223 & LOW for word in words]
    for turn in range(2):
        for number, (i, j) in enumerate(((1, 3), (2, 0), (0, 1), (1, 2))):
            words[number] = words[number] + words[i] * words[j] & LOW
        if turn == 0:
            words = [word ^ word >> 16 for word in words]
            words[1] = words[1] ^ change
    return words


def philox(counter: list, key: list) -> list:
    """Return the four words of seven rounds for a counter of four words and a key of two."""
    words = [numpy.asarray(word, numpy.uint64) for word in counter]
    for turn in range(7):
        into = []
        for k, step, moved, factor, kept in zip(key, (0x9E3779B9, 0xBB67AE85), (2, 0), (0xCD9E8D57, 0xD2511F53), (1, 3)):
            product = words[moved] * numpy.uint64(factor)  # of either half, which goes to the other one
            k = numpy.asarray(k, numpy.uint64) + numpy.uint64(turn * step)
            into += [product >> numpy.uint64(32) ^ words[kept] ^ (k & numpy.uint64(LOW)), product & numpy.uint64(LOW)]
        words = into
    return [word.astype(numpy.int64) for word in words]
