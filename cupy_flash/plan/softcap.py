"""A softcap in the numbers that kernels are told: itself, and as a polynomial of scores near 0."""

from __future__ import annotations

import math

import numpy

SMALLEST, LARGEST = float(numpy.finfo(numpy.float32).smallest_normal), float(numpy.finfo(numpy.float32).max)

# tanh x / x in powers of x**2 - reach**2 from the lowest on, minimax of the relative error for |x| <= reach: 2**-20.7, 2**-21.2 and
# 2**-24.6. The first one is for all softcaps but large ones, the highest factors of which float32 does not hold.
POLYNOMIALS = (
    (1.0, (0.76159370936, -0.170841609533, 0.0477854036781, -0.0153038183026, 0.00140781146924, -0.00306706126083)),
    (0.25, (0.979675037228, -0.317167065477, 0.128416134314)),
    (2.0**-11, (0.999999960264,)),
)
FACTORS = 6  # of the longest one, as in `CapPolynomial`
NONE = 0.0, (0.0,) * FACTORS  # near 0 lies no product then


def softcap_of_kernel(scale: float, softcap: float) -> float:
    """The softcap that a kernel is told.

    It multiplies scores by scale / softcap, and what they become by softcap in units of log 2; the backward divides by that. All
    have to be numbers of float32. The smallest normal one stands for a softcap below it, to which smaller scores are 0, and the
    largest one for a softcap that is infinite in units of log 2. scale / softcap may be below the normal numbers as well, where
    rounding moves it by far more than 2**-24 of itself: then the softcap is moved to where the quotient is exact, or to where it
    is 2**-140, if it is less. No score is bent by so little.
    """
    softcap = min(max(softcap, SMALLEST), LARGEST / math.log2(math.e))
    quotient = abs(scale) / softcap
    if not 0 < quotient < SMALLEST:
        return softcap
    return abs(scale) / max(math.ceil(quotient * 2**149) / 2**149, 2**-140)


def cap_polynomial(scale: float, softcap: float) -> tuple[float, tuple[float, ...]]:
    """The polynomial for ``softcap * tanh(scale * s / softcap) / s``, in units of log 2, of products s near 0.

    Parameters
    ----------
    scale, softcap : float
        Of the problem.

    Returns
    -------
    minus_square : float
        The polynomial is in ``s**2 + minus_square``, and for products for which that is below 0.
    factors : tuple of float
        From the highest power on, as many as `FACTORS`. `NONE` where float32 does not hold them.
    """
    steepness = abs(scale) / softcap
    if not 2.0**-200 < steepness < 2.0**50:
        return NONE
    for reach, ascending in POLYNOMIALS:
        square = (reach / steepness) ** 2
        factors = [factor * scale * math.log2(math.e) * steepness ** (2 * power) for power, factor in enumerate(ascending)]
        if len(factors) == 1:  # right for smaller products alone as well
            square = min(square, LARGEST)
        if all(SMALLEST <= abs(x) <= LARGEST for x in (square, *factors)):
            return -square, (*[0.0] * (FACTORS - len(factors)), *reversed(factors))
    return NONE
