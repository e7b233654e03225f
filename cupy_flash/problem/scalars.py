"""Numbers that a user gives, as Python's own."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from numbers import Integral, Real

import numpy

from ..errors import shown


def is_bool(value: object) -> bool:
    """True for True and False, NumPy's included: they are no numbers here."""
    return isinstance(value, (bool, numpy.bool_))


def integer(name: str, value: int, expected: str) -> int:
    """An integer, or a TypeError that names the argument and what was expected."""
    number = None
    if isinstance(value, Integral) and not is_bool(value):
        with suppress(Exception):  # whatever a class of the caller's raises
            number = operator.index(value)
    if number is None:
        raise TypeError(f"{name}: expected {expected}, got {shown(value)}")
    return number


def real(name: str, value: float, expected: str) -> float:
    """A real number, infinite where no float holds it, or a TypeError that names the argument and what was expected."""
    # An array of one element is not a number here: reading it from a device would wait for the device.
    number = None
    if isinstance(value, Real) and not is_bool(value):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        except Exception:  # whatever a class of the caller's raises
            number = None
    if number is None:
        raise TypeError(f"{name}: expected {expected}, got {shown(value)}")
    return number
