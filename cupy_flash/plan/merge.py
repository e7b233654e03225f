"""How two results are merged: (`MergeProblem`, `Architecture`) -> kernel and grid; pure functions."""

from __future__ import annotations

import math

from ..problem.merge import MergeProblem
from .architecture import Architecture
from .kernel import KernelPlan, check_kind, configure
from .launch import Launch, checked
from .tuning import TileConfig

TILE = TileConfig(32, 16, 16, "a warp merges whole rows, of any width", stages=1, min_blocks=1)


def merge_plan(architecture: Architecture, dtype: str) -> KernelPlan:
    """The kernel for a dtype; nothing else is compiled into it."""
    check_kind(architecture, "out_a", dtype)
    config = configure(TILE, architecture, dtype, "ieee", TILE.width, TILE.width, copy_bytes=0)
    return KernelPlan("merge", architecture, config, (f"{TILE.tile_q} rows a block: {TILE.why}",))


def merge_launches(plan: KernelPlan, problem: MergeProblem) -> tuple[Launch, ...]:
    """The grid of a merge: so many rows a block, for each head and batch element."""
    *batch, heads, len_q, _ = problem.layouts["out"].shape
    [(entry, shared_bytes)] = plan.entries.items()
    return (checked(Launch(entry, -(-len_q // plan.config.TILE_Q) * heads * math.prod(batch), shared_bytes)),)
