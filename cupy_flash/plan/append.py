"""How rows are appended to caches: (`AppendProblem`, `Architecture`) -> kernel and grid; pure functions."""

from __future__ import annotations

from dataclasses import replace

from ..problem.append import AppendProblem
from .architecture import Architecture
from .kernel import KernelPlan
from .launch import Launch
from .rotate import chunk_size, launch_of, plan_of


def make_append_plan(problem: AppendProblem, architecture: Architecture) -> KernelPlan:
    """The kernel for a problem: of its sizes, only how many bytes may move at once."""
    rows = {name: getattr(problem, name) for name in ("k", "v", "k_cache", "v_cache", "q", "q_out")}
    size, why = chunk_size({name: layout for name, layout in rows.items() if layout is not None}, problem.rotation)
    return append_plan(architecture, problem.k.dtype, size, why, rotate_q=problem.q is not None)


def append_plan(
    architecture: Architecture, dtype: str, copy_bytes: int = 16, why: str = "", *, rotate_q: bool = False
) -> KernelPlan:
    """The kernel for a dtype, for copies of so many bytes, and with queries or without; nothing else is compiled into it."""
    plan = plan_of("append", "k", architecture, dtype, copy_bytes, why)
    return replace(plan, config=replace(plan.config, ROTATE_Q=rotate_q))


def query_rows(plan: KernelPlan, problem: AppendProblem) -> tuple[int, int]:
    """Where the rows of queries begin behind those of keys, at a block of their own, and how many there are."""
    _, heads, new, _ = problem.k.shape
    first = -(-heads * new // plan.config.TILE_Q) * plan.config.TILE_Q
    return (first, problem.q.shape[1] * new) if problem.q is not None else (heads * new, 0)


def append_launches(plan: KernelPlan, problem: AppendProblem) -> tuple[Launch, ...]:
    """The grid: so many rows a block, of all heads of each batch element; each block moves rows of k and of v, or of q."""
    widest, rows = max(problem.k.shape[-1], problem.v.shape[-1]), sum(query_rows(plan, problem))
    return (launch_of(plan, replace(problem.k, shape=(problem.batch, 1, rows, widest)), "k"),)
