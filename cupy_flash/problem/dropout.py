"""Dropout as a kernel needs it: which numbers drawn at random drop a pair, and what keeps the mean of the others."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from ..errors import UnsupportedError, shown
from .scalars import integer, real

NUMBERS = 1 << 15  # that may be drawn for a pair, each as often as the others
SEEDS = 1 << 64
OFFSETS = 1 << 32
AXES = "(..., heads, seq_q, seq_kv)"
EITHER = "an integer or a pair (seed, offset)"


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which pairs of a query and a key are dropped: those whose number is below the threshold.

    Parameters
    ----------
    threshold : int
        At least 1 and below 2**15.
    """

    threshold: int

    def __str__(self) -> str:
        return f"dropout: leaves out {self.threshold / NUMBERS:.6g} of the pairs, multiplies the others by {self.scale:.6g}"

    @property
    def scale(self) -> float:
        """Factor of the pairs that are kept: 1 over the share of all numbers that keep one, which is not quite 1 - p."""
        return NUMBERS / (NUMBERS - self.threshold)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call's pairs lie among those that dropout numbers: on several devices each computes some of them.

    Parameters
    ----------
    q, kv : int
        The place in its sequence of the first query, and of the first key.
    head : int
        The number of the first head, counted over all batch elements.
    heads : int
        How many heads a batch element has.
    """

    q: int
    kv: int
    head: int
    heads: int


DRAWN_TOGETHER = 64  # queries, and keys, whose pairs share random bits


def check_place_in_kernels(place: Place, batch: tuple[int, ...], heads: int) -> None:
    """Refuse a place that no kernel numbers pairs from.

    Raises
    ------
    UnsupportedError
    """
    for what, first in (("query", place.q), ("key", place.kv)):
        if first % DRAWN_TOGETHER:
            expected = f"parts that begin at a multiple of {DRAWN_TOGETHER} rows in kernels"
            raise UnsupportedError(f"dropout: expected {expected}, got {what} {first} as the first")
    if place.heads != heads and math.prod(batch) != 1:
        raise UnsupportedError(
            f"dropout: expected one batch element in kernels that compute {heads} of {place.heads} heads, got {math.prod(batch)}"
        )


def make_dropout(probability: float) -> Dropout | None:
    """The `Dropout` of the probability that a pair is dropped; None where that rounds to 0 in units of 2**-15.

    Raises
    ------
    TypeError, ValueError
        For anything but a number of at least 0 and below 1.
    """
    expected = "a number of at least 0 and below 1"
    number = real("dropout", probability, expected)
    if not 0 <= number < 1:
        raise ValueError(f"dropout: expected {expected}, got {shown(probability)}")
    threshold = min(round(number * NUMBERS), NUMBERS - 1)
    return Dropout(threshold) if threshold else None


def make_seed(seed: int | tuple[int, int]) -> tuple[int, int]:
    """Seed and offset, from both of them or from a seed alone, whose offset is 0.

    Raises
    ------
    TypeError, ValueError
        For anything but integers of at least 0, below 2**64 and 2**32.
    """
    if isinstance(seed, (tuple, list)):
        parts = _parts(seed)
        if len(parts) != 2:
            raise ValueError(f"seed: expected {EITHER}, got {shown(seed)}")
        number, offset = (integer("seed", part, "integers in the pair (seed, offset)") for part in parts)
    else:
        number, offset = integer("seed", seed, EITHER), 0
    if not 0 <= number < SEEDS:
        raise ValueError(f"seed: expected a seed of at least 0 and below 2**64, got {shown(number)}")
    if not 0 <= offset < OFFSETS:
        raise ValueError(f"seed: expected an offset of at least 0 and below 2**32, got {shown(offset)}")
    return number, offset


def make_mask_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a mask of dropout, checked: heads, queries and keys behind any number of batch axes, or one head without them.

    Raises
    ------
    TypeError, ValueError
        For anything but two or more integers of at least 0.
    """
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"shape: expected a tuple of integers, {AXES}, got {shown(shape)}")
    sizes = tuple([integer("shape", size, "a tuple of integers") for size in _parts(shape)])
    if len(sizes) < 2:
        raise ValueError(f"shape: expected at least 2 axes, {AXES}, got {shown(shape)}")
    if min(sizes) < 0:
        raise ValueError(f"shape: expected sizes of at least 0, got {shown(sizes)}")
    return sizes


def _parts(values: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """What a tuple or a list holds; nothing if it does not say."""
    with suppress(Exception):  # whatever a class of the caller's raises
        return tuple(values)
    return ()
