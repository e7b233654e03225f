"""How rows are appended to caches: (`AppendProblem`, `Architecture`) -> kernel and grid; pure functions."""

from __future__ import annotations

from dataclasses import replace

from ..problem.append import AppendProblem
from .architecture import Architecture
from .kernel import KernelPlan, Launch
from .rotate import chunk_size, launch_of, plan_of


def make_append_plan(problem: AppendProblem, architecture: Architecture) -> KernelPlan:
    """The kernel for a problem: of its sizes, only how many bytes may move at once."""
    rows = {name: getattr(problem, name) for name in ("k", "v", "k_cache", "v_cache")}
    size, why = chunk_size(rows, problem.rotation)
    return append_plan(architecture, problem.k.dtype, size, why)


def append_plan(architecture: Architecture, dtype: str, copy_bytes: int = 16, why: str = "") -> KernelPlan:
    """The kernel for a dtype and copies of so many bytes; nothing else is compiled into it."""
    return plan_of("append", "k", architecture, dtype, copy_bytes, why)


def append_launches(plan: KernelPlan, problem: AppendProblem) -> tuple[Launch, ...]:
    """The grid: so many rows a block, of all heads of each batch element; each block moves its rows of k and of v."""
    widest = max(problem.k.shape[-1], problem.v.shape[-1])
    return (launch_of(plan, replace(problem.k, shape=(*problem.k.shape[:-1], widest)), "k"),)
