"""Whether scores are scaled one by one, before the maximum, instead of in the exponent."""

from __future__ import annotations

from ..problem.forward import Problem
from .expression_text import ExpressionText

# 2^(scale * score - max) in one instruction rounds the maximum alone. Beyond 2^31 that is by more than an exponent can be, and
# the largest score too may be lost. Up to this scale, scores are not so large unless their inputs are.
LARGEST_SCALE = 1024
LEAST_SCALE = 2.0**-20  # what is added to products is divided by the scale


def explicit_scores(problem: Problem, expressions: ExpressionText, unless_large: bool = False) -> tuple[bool, str]:
    """Whether each score is scaled by itself, and why.

    A term may be so large, such as a bias of -1e9 in a whole row, that only the difference to a maximum in the same units is exact.
    A kernel may scale one by one where a maximum is as large, or subtract a log-sum-exp, which is rounded already (`unless_large`);
    but in float32 every rounding matters.
    """
    if problem.softcap is not None:
        return True, "scores scaled one by one: softcap"
    if expressions.kind == "EXPRESSION":
        return True, "scores scaled one by one: what they become is an expression of them"
    if expressions.kind == "PLUS_TERM" and not (unless_large or problem.scores.only_alibi):
        return True, "scores scaled one by one: a term is added, which may be large"
    if expressions.kind == "PLUS_TERM" and abs(problem.scale) < LEAST_SCALE:
        return True, f"scores scaled one by one: a term is added, and the scale is below {LEAST_SCALE}"
    if problem.scale <= 0:
        return True, "scores scaled one by one: scale <= 0"
    if problem.scale > LARGEST_SCALE:
        return True, f"scores scaled one by one: scale > {LARGEST_SCALE}"
    return False, ""
