"""Gradients of keys that are wider than values, as in multi-head latent attention (MLA): which of them are for bwd_hopper_mla."""

from __future__ import annotations

import math

from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from .tuning import SHORT

WIDEST, WIDEST_V = 192, 128  # columns of keys and of values in ``kernels_cu/bwd_hopper_mla.cu``
NARROW = 128  # those of keys for which bwd_hopper has both gradients in one warpgroup
KEYS, WIDE_KEYS = 128, 64  # of a block, and of one of bwd_hopper_wide,
AS_LONG = 1.46  # times which it takes, as measured on an H200
RUNNING = 132  # blocks at once, one for each multiprocessor of an H200
FEW = 2  # rounds of these


def why_not_mla(problem: Problem, explicit: bool) -> str:
    """Why bwd_hopper_mla cannot compute gradients, or ''.

    Parameters
    ----------
    problem : Problem
    explicit : bool
        Whether scores are scaled one by one.
    """
    if not (NARROW < problem.dim <= WIDEST and problem.dim_v <= WIDEST_V):
        return f"its keys have {NARROW + 1} to {WIDEST} columns, and its values at most {WIDEST_V}"
    if problem.scores or explicit or problem.mask.kind != "BAND":
        return "gradients of 128 keys leave no registers for what becomes of scores, or for a prefix"
    return ""


def pays(problem: BackwardProblem) -> bool:
    """Whether blocks of so many keys take less time than twice as many of bwd_hopper_wide, as measured on an H200.

    Not where these run all at once, where queries see few keys or are few, or are dealt out in parts. With lengths of sequences
    always: what one is computed with must not depend on the others.
    """
    p = problem.forward
    if p.lengths is not None:
        return True
    if p.len_q <= SHORT or problem.parts > 1 or _sees_few(p):
        return False
    heads = p.heads_q * math.prod(p.batch)
    rounds, rounds_wide = (_rounds(-(-p.len_kv // keys) * heads) for keys in (KEYS, WIDE_KEYS))
    return rounds * AS_LONG < rounds_wide


def _rounds(blocks: int) -> float:
    """How often as many blocks follow each other as run at once: of few, each has to end, and of many, they end at any time."""
    rounds = blocks / RUNNING
    return math.ceil(rounds) if rounds <= FEW else rounds


def _sees_few(problem: Problem) -> bool:
    """Whether no query sees more keys than a block has."""
    left, right = problem.mask.left, problem.mask.right
    return left is not None and right is not None and right - left < KEYS
