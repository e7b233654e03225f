"""Few queries with many keys: blocks of fwd_v2 share a query tile, as ``kernels_cu/tile/split.cuh`` deals its keys out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..problem.forward import Problem
from .architecture import Architecture
from .kernel import KernelPlan
from .packing import FEW
from .tuning import TileConfig

SPLIT_KEYS = 512  # of a split, at least: what it hands on is a 32nd of what it reads, or less
MOST_STAGES = 4  # of keys and values
RESERVED_BYTES = 1024  # of shared memory that the system takes of each block
MOST_SPLITS = 64  # of a query tile, as the header has it
WARP_ROWS, COMBINED_COLUMNS = 16, 32  # of a query tile: rows that a warp merges, and with so many columns


def splits_keys(kernel: str, problem: Problem) -> tuple[bool, str]:
    """Whether blocks share the keys of a query tile, and why.

    Parameters
    ----------
    kernel : str
    problem : Problem
        As the user states it: few queries of several heads may be many rows.
    """
    lengths = problem.lengths
    few = not (lengths and lengths.packed_q) and 1 <= problem.len_q <= FEW
    if kernel != "fwd_v2" or not few or problem.len_kv < 2 * SPLIT_KEYS:
        return False, ""
    return True, f"split keys: few queries, and {SPLIT_KEYS} keys a block or more, by the length of a sequence alone"


@dataclass(frozen=True, slots=True)
class KeySplits:
    """What a kernel is told of the splits of query tiles.

    Parameters
    ----------
    keys : int
        Of a split, at least, where there is more than one.
    most : int
        Blocks of a query tile.
    tiles : int
        Query tiles, of all heads and batch elements.
    partial_rows : int
        Rows of a tile that exist, rounded up to whole fragments.
    """

    keys: int
    most: int
    tiles: int
    partial_rows: int


def key_splits(plan: KernelPlan, problem: Problem, tiles: int) -> KeySplits | None:
    """The splits of a problem as the kernel is told it, of so many query tiles; None without."""
    if plan.file != "fwd_v2" or not plan.config.SPLIT_KV:
        return None
    return KeySplits(SPLIT_KEYS, most_splits(problem), tiles, partial_rows(plan, problem.len_q))


def deeper(row: TileConfig, architecture: Architecture, itemsize: int, width: int, width_v: int) -> TileConfig:
    """The row with as many stages as leave room for a second block: what splits wait for is memory alone."""
    if not architecture.copies_ahead:
        return row
    queries, stage = itemsize * row.tile_q * max(width, width_v), itemsize * row.tile_kv * (width + width_v)
    room = architecture.shared_bytes // 2 - RESERVED_BYTES
    return replace(row, stages=max(row.stages, min((room - queries) // stage, MOST_STAGES)))


def partial_rows(plan: KernelPlan, len_q: int) -> int:
    """Rows of a part of a query tile that are kept: those that exist, rounded up to what a warp stores."""
    c = plan.config
    own = max(WARP_ROWS, c.TILE_Q // c.WARPS)  # all of its rows, of which fwd_v2 has 16 or 32
    return min(c.TILE_Q, -(-len_q // own) * own)


def combining_blocks(plan: KernelPlan, tiles: int, len_q: int) -> int:
    """Blocks that combine so many query tiles."""
    c = plan.config
    return -(-tiles * (partial_rows(plan, len_q) // WARP_ROWS) * (c.WIDTH_V // COMBINED_COLUMNS) // c.WARPS)


def most_splits(problem: Problem) -> int:
    """Blocks of a query tile: what the longest sequence needs."""
    return min(problem.len_kv // SPLIT_KEYS, MOST_SPLITS)
