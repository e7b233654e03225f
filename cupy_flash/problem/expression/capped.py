"""An expression that is a softcap: kernels compute it as they do `softcap=`."""

from __future__ import annotations

from .tree import SCORE, Apply, Literal, Node

LEAST, MOST = 2.0**-64, 2.0**64  # others are left as they are written: `softcap=` would refuse some


def softcap_of(tree: Node) -> float | None:
    """The number c of ``c * tanh(score / c)``; None of anything else.

    Examples
    --------
    >>> from cupy_flash.problem.expression.parse import parse
    >>> softcap_of(parse("30 * tanh(score / 30)", (), "score"))
    30.0
    """
    match tree:
        case Apply(op="*", args=(Literal(value=cap), Apply(op="tanh", args=(Apply(op="/", args=(x, Literal(value=by))),)))):
            pass
        case Apply(op="*", args=(Apply(op="tanh", args=(Apply(op="/", args=(x, Literal(value=by))),)), Literal(value=cap))):
            pass
        case _:
            return None
    return float(cap) if x == SCORE and float(cap) == float(by) and LEAST <= cap <= MOST else None
