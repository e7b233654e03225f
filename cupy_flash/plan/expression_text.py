"""The text of what becomes of scores: what takes the place of the functions in ``kernels_cu/expression.cuh``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Pressure(Enum):
    """How much of its registers a kernel spends on what is asked for each pair, besides bits of a mask and dropout."""

    NOTHING = "nothing"
    TERM = "a term that reads nothing"
    BIAS = "a bias"
    ARRAY_MASK = "an array that masks pairs"
    MASK = "a mask, which tiles that are seen wholly are not asked"
    READING_MASK = "a mask that reads what keys have, likewise"
    LONG_MASK = "a mask of many reads or operations, likewise"
    LOOKUPS = "a term that reads other arrays for each pair, or a mask that is asked everywhere"
    EXPRESSION = "an expression of the score"
    LONG_EXPRESSION = "the same of functions or many operations"
    SEVERAL = "two things"
    MANY = "more"


@dataclass(frozen=True, slots=True)
class ExpressionText:
    """The text of what becomes of scores; the default is that of nothing.

    Parameters
    ----------
    kind : str
        One of `ScoreKind` in ``kernels_cu/config.cuh``.
    term, key_term, score, slope, takes_part, takes_part_in, factor, element, per_key, per_query, bend, diagonal : str
        What the functions return, or '' for what the file says.
    uniforms : tuple of str
        What all pairs of a head have in common.
    constants : tuple of (str, str)
        The names of its constants and types that have another value.
    pressure : Pressure
    pair_bits : bool
        Whether pairs are masked by bits, and `takes_part` is not asked.
    """

    kind: str = "UNCHANGED"
    term: str = ""
    score: str = ""
    slope: str = ""
    takes_part: str = ""
    uniforms: tuple[str, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()
    pressure: Pressure = Pressure.NOTHING
    factor: str = ""
    element: str = ""
    per_key: str = ""
    per_query: str = ""
    bend: str = ""
    diagonal: str = ""
    takes_part_in: str = ""
    key_term: str = ""
    pair_bits: bool = False

    @property
    def bends(self) -> bool:
        """Whether a linear term changes by another step behind the key that a query meets."""
        return bool(self.bend)

    @property
    def of_pairs(self) -> bool:
        """Whether what a gradient is of has elements of a query and a key."""
        return {("OF_QUERY", "true"), ("OF_KEY", "true")} <= set(self.constants)

    @property
    def has_key_term(self) -> bool:
        """Whether a term of the key alone is added beside a bias."""
        return bool(self.key_term)


NOTHING = ExpressionText()
