"""How attention is computed: (`Problem`, `Architecture`) -> `Plan`, its grids, workspace and tensor maps; pure functions."""

from __future__ import annotations

import math

from .architecture import Architecture
from .errors import UnsupportedError
from .layout import Layout
from .packing import packing_of
from .params import FORWARD_ARRAYS
from .plan import Launch, Plan, check_kind, checked, configure, copy_size, explicit_scores, padded
from .problem import Problem
from .tensor_map import TensorMap, obstacle, tensor_maps
from .tuning import row_for, table_for
from .workspace import Workspace

MOVED = ("q", "k", "v", "out")  # what goes between device and shared memory in tiles
NARROWEST_PANEL = 64  # columns: fwd_hopper has no narrower width
WARP_ROWS, GROUP_ROWS = 16, 64  # of queries: what a warp stores, and what the four warps of a group multiply together


def make_forward_plan(problem: Problem, architecture: Architecture) -> Plan:
    """Choose the kernel for a problem.

    Parameters
    ----------
    problem : Problem
        With backend 'cuda' or 'host'.
    architecture : Architecture

    Returns
    -------
    Plan

    Raises
    ------
    UnsupportedError
        If no kernel for this architecture computes the problem, or not the one that was asked for.
    """
    check_kind(architecture, "q", problem.dtype, problem.precision)
    packing = packing_of(problem)
    problem = packing.problem
    kernel, why_kernel = _kernel_for(problem, architecture)
    width, width_v = padded(problem.dim), padded(problem.dim_v)
    if kernel == "fwd_hopper":
        width, width_v = max(width, NARROWEST_PANEL), max(width_v, NARROWEST_PANEL)
        copy_bytes, why_copy = 16, ""
    else:
        copy_bytes, why_copy = copy_size({name: getattr(problem, name) for name in MOVED})
    explicit, why_scores = explicit_scores(problem)
    widest = max(width, width_v)
    row = row_for(
        kernel, architecture, problem.dtype, widest, problem.len_q, copy_bytes, explicit, causal=problem.causal, width_v=width_v
    )
    return Plan(
        kernel=kernel,
        architecture=architecture,
        config=configure(row, architecture, problem.dtype, problem.precision, width, width_v, copy_bytes, explicit),
        reasons=tuple(filter(None, (why_kernel, packing.reason, row.reason, why_copy, why_scores))),
    )


def _kernel_for(problem: Problem, architecture: Architecture) -> tuple[str, str]:
    """The kernel file, and why it is not the one that the architecture is best at, or ''."""
    asked = problem.kernel
    if asked in ("fwd_v1", "fwd_v2"):
        return asked, f"{asked} was asked for"
    exists = bool(table_for("fwd_hopper", architecture, problem.dtype))
    if asked is None and (problem.algorithm != "v2" or not exists):
        return f"fwd_{problem.algorithm}", ""
    if not exists:
        raise UnsupportedError(f"kernel: expected fwd_v1 or fwd_v2 for {problem.dtype} on {architecture}, got {asked!r}")
    why_not = obstacle(problem.batch, _layouts(problem), MOVED)
    if not why_not:
        return "fwd_hopper", ""
    if asked is None:
        return "fwd_v2", f"no TMA: {why_not}"
    raise UnsupportedError(f"kernel: expected None, fwd_v1 or fwd_v2 for arrays that TMA cannot move, got {asked!r}: {why_not}")


def forward_launches(plan: Plan, problem: Problem) -> tuple[Launch, ...]:
    """The grid of a forward: so many query tiles a block, for each head and batch element.

    The problem is what the kernel is told, see `packing`. In fwd_hopper it is the most that there can be: blocks take turns.
    """
    [(entry, shared_bytes)] = plan.entries.items()
    c = plan.config
    blocks = -(-_tiles(plan, problem) // c.Q_TILES) * problem.heads_q * math.prod(problem.batch)
    return (checked(Launch(entry, blocks, shared_bytes, c.MIN_BLOCKS if plan.kernel == "fwd_hopper" else None)),)


def forward_workspace(plan: Plan, problem: Problem) -> Workspace:
    """What a forward keeps in device memory between two steps: O, l and m of every row in v1, nothing in the others."""
    if plan.kernel != "fwd_v1":
        return Workspace()
    tile = plan.config.TILE_Q * plan.config.WIDTH_V + 2 * plan.config.TILE_Q
    return Workspace((("state", 4 * tile * _tiles(plan, problem) * problem.heads_q * math.prod(problem.batch)),))


def forward_maps(plan: Plan, problem: Problem) -> dict[str, TensorMap]:
    """The tensor maps that a kernel is given in place of arrays."""
    if plan.kernel != "fwd_hopper":
        return {}
    keys = plan.config.TILE_KV
    return tensor_maps(problem.batch, _layouts(problem), {"q": GROUP_ROWS, "k": keys, "v": keys, "out": WARP_ROWS})


def _tiles(plan: Plan, problem: Problem) -> int:
    return -(-problem.len_q // plan.config.TILE_Q)


def _layouts(problem: Problem) -> dict[str, Layout]:
    layouts = {name: getattr(problem, name) for name in FORWARD_ARRAYS}
    return {name: layout for name, layout in layouts.items() if layout is not None}
