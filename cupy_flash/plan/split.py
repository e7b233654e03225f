"""Few queries with many keys: blocks of fwd_v2 share a query tile, as ``kernels_cu/tile/split.cuh`` deals its keys out."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem.forward import Problem
from .kernel import KernelPlan
from .packing import FEW

SPLIT_KEYS = 512  # of a split, at least
MOST_SPLITS = 64  # of a query tile, as the header has it
LEAST_SPLITS = 2  # where all sequences are alike
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
    # Sequences have the splits of their own lengths, whatever else may be as long: of one split nothing is joined.
    enough = problem.len_kv > SPLIT_KEYS if lengths else problem.len_kv >= LEAST_SPLITS * SPLIT_KEYS
    if kernel != "fwd_v2" or not few or not enough:
        return False, ""
    return True, f"split keys: few queries, and {SPLIT_KEYS} keys a block or more, by the length of a sequence alone"


@dataclass(frozen=True, slots=True)
class KeySplits:
    """What a kernel is told of the splits of query tiles.

    Parameters
    ----------
    keys : int
        Of a split, at least.
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
    return KeySplits(split_size(plan.config.TILE_KV), most_splits(plan, problem), tiles, partial_rows(plan, problem.len_q))


def split_size(tile: int) -> int:
    """Keys of a split, at least: whole tiles."""
    return -(-SPLIT_KEYS // tile) * tile


def partial_rows(plan: KernelPlan, len_q: int) -> int:
    """Rows of a part of a query tile that are kept: those that exist, rounded up to what a warp stores."""
    c = plan.config
    own = max(WARP_ROWS, c.TILE_Q // c.WARPS)  # all of its rows, of which fwd_v2 has 16 or 32
    return min(c.TILE_Q, -(-len_q // own) * own)


def combining_blocks(plan: KernelPlan, tiles: int, len_q: int) -> int:
    """Blocks that combine so many query tiles."""
    c = plan.config
    return -(-tiles * (partial_rows(plan, len_q) // WARP_ROWS) * (c.WIDTH_V // COMBINED_COLUMNS) // c.WARPS)


def most_splits(plan: KernelPlan, problem: Problem) -> int:
    """Blocks of a query tile: what the sequence with most splits needs."""
    return min(-(-problem.len_kv // split_size(plan.config.TILE_KV)), MOST_SPLITS)
