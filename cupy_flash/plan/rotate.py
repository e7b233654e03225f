"""How rows are rotated: (`RotateProblem`, `Architecture`) -> kernel and grid; pure functions."""

from __future__ import annotations

import math

from ..problem.layout import ITEMSIZE, Layout
from ..problem.rotate import RotateProblem
from ..problem.rotation import Rotation
from .architecture import Architecture
from .copies import copy_size
from .kernel import KernelPlan, check_kind, configure
from .launch import Launch, checked
from .tuning import TileConfig

TILE = TileConfig(32, 32, 16, "lanes take chunks of rows, of any width", stages=1, min_blocks=1)
COPY_SIZES = (16, 8, 4)


def make_rotate_plan(problem: RotateProblem, architecture: Architecture) -> KernelPlan:
    """The kernel for a problem: of its sizes, only how many bytes may move at once."""
    size, why = chunk_size({"x": problem.x, "out": problem.out}, problem.rotation)
    return rotate_plan(architecture, problem.x.dtype, size, why)


def rotate_plan(architecture: Architecture, dtype: str, copy_bytes: int = 16, why: str = "") -> KernelPlan:
    """The kernel for a dtype and copies of so many bytes; nothing else is compiled into it."""
    return plan_of("rotate", "x", architecture, dtype, copy_bytes, why)


def plan_of(file: str, name: str, architecture: Architecture, dtype: str, copy_bytes: int, why: str) -> KernelPlan:
    """A plan of a kernel file that moves rows in chunks; `name` is what messages call the array that has the dtype."""
    check_kind(architecture, name, dtype)
    config = configure(TILE, architecture, dtype, "ieee", TILE.width, TILE.width, copy_bytes)
    return KernelPlan(file, architecture, config, (f"{TILE.tile_q} rows a block: {TILE.why}", *filter(None, [why])))


def chunk_size(rows: dict[str, Layout], rotation: Rotation | None) -> tuple[int, str]:
    """The most bytes that may move at once, and what keeps them below 16: 16, 8, 4, or 0 for single elements."""
    size, why = copy_size(rows)
    if rotation is None:
        return size, why
    nbytes = rotation.pairs * ITEMSIZE[next(iter(rows.values())).dtype]
    fitting = next((s for s in COPY_SIZES if s <= size and nbytes % s == 0), 0)
    if fitting == size:
        return size, why
    moved = f"copies of {fitting} bytes" if fitting else "copies of single elements"
    return fitting, f"{moved}: {rotation.pairs} pairs of a row have {nbytes} bytes on either side"


def rotate_launches(plan: KernelPlan, problem: RotateProblem) -> tuple[Launch, ...]:
    """The grid: so many rows a block, of all heads of each batch element."""
    return (launch_of(plan, problem.x, "x"),)


def launch_of(plan: KernelPlan, rows: Layout, name: str) -> Launch:
    """The grid of a kernel that moves rows; none where there are no elements."""
    *batch, heads, seq, dim = rows.shape
    [(entry, shared_bytes)] = plan.entries.items()
    blocks = -(-heads * seq // plan.config.TILE_Q) * math.prod(batch) if dim else 0
    return checked(Launch(entry, blocks, shared_bytes), name)
