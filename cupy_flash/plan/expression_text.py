"""The text of what becomes of scores: what takes the place of the functions in ``kernels_cu/expression.cuh``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpressionText:
    """The text of what becomes of scores; the default is that of nothing.

    Parameters
    ----------
    score, slope, takes_part : str
        What the functions return, or '' for what the file says.
    constants : tuple of (str, str)
        The names of its constants and types that have another value.
    """

    score: str = ""
    slope: str = ""
    takes_part: str = ""
    constants: tuple[tuple[str, str], ...] = ()


NOTHING = ExpressionText()
