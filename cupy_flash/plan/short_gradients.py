"""Gradients of short sequences: which of them are for bwd_v2 or bwd_hopper_wide where there is bwd_hopper as well."""

from __future__ import annotations

import math

from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from .expression_text import Pressure
from .few_rows import NARROW, NARROWEST, WIDE
from .stored_dbias import dbias_of_pairs
from .tuning import SHORT

BLOCKS = 512  # of bwd_hopper: four for each multiprocessor of an H200
KEYS = 128  # of such a block
LONG_ROWS = 4096  # queries, from which on windows may be twice as wide


def why_bwd_v2(problem: BackwardProblem, pressure: Pressure) -> str:
    """Why gradients of few queries, or few keys, are for bwd_v2, or ''; as measured on an H200, where it is 1.0 to 3 times as fast.

    A block of bwd_hopper takes 7 microseconds whatever little it has to do, and a multiprocessor has one of them at a time.

    Parameters
    ----------
    problem : BackwardProblem
    pressure : Pressure
        What is asked for each of its pairs.
    """
    p = problem.forward
    rows, keys, widest = p.len_q, p.len_kv, max(p.dim, p.dim_v)
    heads = p.heads_q * math.prod(p.batch)
    if widest > NARROW or not rows or not keys or not heads or p.lengths is not None:
        return ""
    if _is_narrow_window(p, problem, SHORT if rows < LONG_ROWS else 2 * SHORT):
        return "a narrow window: a block of bwd_hopper takes longer to begin than to go through the few queries of its keys"
    many = heads * (-(-keys // KEYS) if keys > SHORT else 2) >= BLOCKS  # half a block takes as long as a whole one
    if p.scores:
        alone = not p.scores.masks_pairs and p.scores.dropout is None and dbias_of_pairs(problem) is None
        cheap = alone and pressure in (Pressure.TERM, Pressure.BIAS)
        faster = widest <= NARROWEST and rows <= SHORT and keys <= SHORT and many and cheap
    elif rows <= SHORT:
        most = keys if p.softcap is None else 4 * SHORT if widest <= NARROWEST else SHORT
        faster = keys <= most and (many or (widest <= NARROWEST and p.softcap is None))
    else:
        as_long = rows <= 2 * SHORT and keys <= 2 * SHORT and p.softcap is None
        faster = widest <= NARROWEST and many and (keys <= SHORT or as_long)
    return "short sequences, of queries or keys: a block of bwd_hopper takes longer to begin than to multiply" * faster


def why_wide(problem: BackwardProblem) -> str:
    """Why those of fewer heads, or of wider ones, are for bwd_hopper_wide, or ''; as measured, 1.04 to 1.13 times as fast there."""
    p = problem.forward
    short = 1 <= p.len_q <= SHORT and 1 <= p.len_kv <= SHORT and max(p.dim, p.dim_v) <= WIDE
    plain = not p.scores and p.softcap is None and p.lengths is None
    if NARROW < max(p.dim, p.dim_v) <= WIDE and plain and _is_narrow_window(p, problem, 2 * SHORT):
        return "a narrow window: a block of bwd_hopper owns 128 keys, of bwd_hopper_wide 64"
    return "short sequences: a block of bwd_hopper owns 128 keys, of bwd_hopper_wide 64" * (short and plain)


def _is_narrow_window(p: Problem, problem: BackwardProblem, widest: int) -> bool:
    """Whether queries see so few keys; as measured, 1.06 to 1.36 times as fast by bwd_v2, 1.03 to 1.30 by bwd_hopper_wide."""
    left, right = p.mask.left, p.mask.right
    asked = bool(p.scores) or p.softcap is not None or p.lengths is not None or problem.deterministic
    return not asked and left is not None and right is not None and right - left < widest
