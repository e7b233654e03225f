"""The tensor maps of a forward for sm_90a: which boxes of its arrays TMA moves."""

from __future__ import annotations

import math

from ..problem.forward import Problem
from .hopper_splits import GROUP_ROWS
from .kernel import KernelPlan
from .split import WARP_ROWS
from .tensor_map import TensorMap, layouts_of, map_of_groups, tensor_maps


def forward_maps(plan: KernelPlan, problem: Problem) -> dict[str, TensorMap]:
    """The tensor maps that a kernel is given in place of arrays."""
    if plan.file != "fwd_hopper":
        return {}
    cached = {} if problem.lengths is None else problem.lengths.caches
    rows = {"q": GROUP_ROWS} | dict.fromkeys("kv", keys_of_box(plan, problem))
    rows |= {"out": WARP_ROWS} if plan.config.TMA_STORE_OUT else {}
    rows |= {"bias": plan.config.TILE_Q} if plan.config.STAGED_BIAS else {}
    layouts = {name: x for name, x in layouts_of(problem).items() if name not in cached}
    maps = tensor_maps(problem.batch, layouts, {name: rows[name] for name in rows if name not in cached})
    if plan.config.INNER_HEADS > 1:
        maps["q"] = map_of_groups(problem.q, plan.config.INNER_HEADS, rows["q"])
    if cached:
        maps |= tensor_maps(problem.lengths.cache.shape[:1], cached, {name: rows[name] for name in cached})
    return {f"{name}_map": described for name, described in maps.items()}


def keys_of_box(plan: KernelPlan, problem: Problem) -> int:
    """Keys that fwd_hopper has brought at a time: a tile, or of pages so many that they divide a tile and a page."""
    tile = plan.config.TILE_KV
    return math.gcd(tile, problem.lengths.page_size) if plan.config.PAGED else tile
