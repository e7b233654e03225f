"""Gradients of keys that are wider than values, as in multi-head latent attention (MLA): which of them are for bwd_hopper_mla."""

from __future__ import annotations

from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from .tuning import SHORT

WIDEST, WIDEST_V = 192, 128  # columns of keys and of values in ``kernels_cu/bwd_hopper_mla.cu``
NARROW = 128  # those of keys for which bwd_hopper has both gradients in one warpgroup


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
    """Whether a block of so many keys takes less time than two of bwd_hopper_wide, of half as many each."""
    return problem.forward.len_kv > SHORT
