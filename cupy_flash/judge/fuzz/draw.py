"""Random choices that depend on a name, a seed and a number alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import numpy

Item = TypeVar("Item")


class Draw:
    """A stream of choices, the same for the same name, seed and number on every machine.

    Parameters
    ----------
    name : str
        What is drawn, so that streams of different things differ.
    seed, index : int
    """

    def __init__(self, name: str, seed: int, index: int) -> None:
        self._random = random.Random(f"{name} {seed} {index}")

    def one(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return self._random.choice(items)

    def several(self, items: Sequence[Item], count: int) -> list[Item]:
        """So many of the items, each once."""
        return self._random.sample(items, count)

    def chance(self, probability: float) -> bool:
        """True as often as that."""
        return self._random.random() < probability

    def integer(self, low: int, high: int) -> int:
        """One of the integers from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def log_uniform(self, low: float, high: float) -> float:
        """A number between the two, each order of magnitude as often."""
        return low * (high / low) ** self._random.random()

    def numbers(self) -> numpy.random.Generator:
        """A source of many numbers, for arrays."""
        return numpy.random.default_rng(self._random.getrandbits(64))
