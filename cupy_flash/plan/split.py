"""Few queries with many keys: blocks of fwd_v2 share a query tile, as ``kernels_cu/tile/split.cuh`` deals its keys out.

Splits of a query tile have to be combined. A kernel of its own has a warp for each row, but begins when all of the first one has
ended, and reads once more where sequences are: that is `LAUNCH`. The block of a query tile that ends last is there already, but its
warps take rows one after the other, and each asks device memory anew: that is `TRIP`. So it combines where there are few rows.

Of sequences with lengths of their own a block finds its query tile by its number, and its split by the length of the sequence,
without a list that a launch before would have to make. So what has few queries there is told of splits always, also of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..problem.forward import Problem
from ..problem.mask import UNBOUNDED
from .architecture import Architecture
from .hopper_splits import keys_of_split, splits_of_sequence
from .kernel import KernelPlan
from .packing import FEW
from .tuning import TileConfig

SPLIT_KEYS = 512  # of a split, at least: what it hands on is a 32nd of what it reads, or less
MOST_STAGES = 4  # of keys and values
RESERVED_BYTES = 1024  # of shared memory that the system takes of each block
MOST_SPLITS = 64  # of a query tile, as the header has it
COMBINED_AT_ONCE = 16  # splits that a warp has on their way at a time when it combines, as the header has it
WIDEST, WIDEST_FLOAT32, WIDEST_DROPOUT = 256, 128, 192  # dims up to which a block has registers left, as compiled for each
LAUNCH, TRIP = 4.0, 0.8  # µs: from the end of a kernel to where the next one combines, and from asking device memory to an answer
WARP_ROWS, COMBINED_COLUMNS = 16, 32  # of a query tile of fwd_hopper: rows that a warp combines, and with so many columns
WHY = "split keys: few queries, and {keys} keys a block or more, by the length of a sequence alone"
WHY_ONE = "one split: few queries, which see few keys"


def splits_keys(kernel: str, problem: Problem, len_kv: int) -> tuple[bool, str]:
    """Whether blocks share the keys of a query tile, and why.

    Parameters
    ----------
    kernel : str
    problem : Problem
        As the user states it: few queries of several heads may be many rows.
    len_kv : int
        Keys that the kernel is told of: of one window, fewer.
    """
    if kernel != "fwd_v2" or not has_few_queries(problem):
        return False, ""
    several = _seen_keys(problem, len_kv) >= 2 * SPLIT_KEYS
    if several or problem.lengths is not None:
        return True, WHY.format(keys=SPLIT_KEYS) if several else WHY_ONE
    return False, ""


def few_of_sequences(problem: Problem) -> bool:
    """Whether sequences have so few queries that fwd_v2 may be faster; of each its own number, only beside many keys."""
    return has_few_queries(problem) and (not problem.lengths.of_queries or problem.len_kv >= 2 * SPLIT_KEYS)


def has_few_queries(problem: Problem) -> bool:
    """Whether each head has so few queries that blocks may share the keys of a tile, or rather heads of a group a tile."""
    lengths = problem.lengths
    return not (lengths and lengths.packed_q) and 1 <= problem.len_q <= FEW


@dataclass(frozen=True, slots=True)
class KeySplits:
    """What a kernel is told of the splits of query tiles.

    Parameters
    ----------
    keys : int
        Of a split, at least, where there is more than one.
    most : int
        Blocks of a query tile.
    tiles_of_head, tiles : int
        Query tiles, of a head and of all heads and batch elements.
    partial_rows : int
        Rows of a tile that there is room for.
    """

    keys: int
    most: int
    tiles_of_head: int
    tiles: int
    partial_rows: int


def key_splits(plan: KernelPlan, problem: Problem, tiles: int) -> KeySplits | None:
    """The splits of a problem as the kernel is told it, of so many query tiles; None without, or where a table deals them out."""
    c = plan.config
    if not c.SPLIT_KV or not (plan.file == "fwd_v2" or c.VARLEN):
        return None
    hopper = plan.file == "fwd_hopper"
    rows = partial_rows(plan, problem.len_q) if hopper else min(c.TILE_Q, problem.len_q)
    most = most_splits(plan, problem)
    keys = keys_of_split(problem) if hopper else SPLIT_KEYS if most > 1 else UNBOUNDED
    return KeySplits(keys, most, -(-problem.len_q // c.TILE_Q), tiles, rows)


def last_combines(row: TileConfig, width: int, width_v: int, problem: Problem) -> tuple[bool, str]:
    """Whether the block of a query tile that ends last combines its splits, and why.

    Parameters
    ----------
    row : TileConfig
    width, width_v : int
    problem : Problem
        As the kernel is told it, whose keys are split.
    """
    widest = WIDEST if problem.scores.dropout is None else WIDEST_DROPOUT
    widest = WIDEST_FLOAT32 if problem.dtype == "float32" else widest
    if max(width, width_v) > widest:
        return False, f"a kernel combines splits: above dims of {widest} a block has no registers for it"
    if _most_splits(problem) == 1:
        return True, ""
    rows = min(row.tile_q, problem.len_q)
    rounds = -(-rows * _across(width_v) // row.warps)  # of which a kernel of its own takes one
    trips = -(-_most_splits(problem) // COMBINED_AT_ONCE)
    if (rounds - 1) * trips * TRIP > LAUNCH:
        return False, f"a kernel combines splits: a block would take {rounds} rounds over {rows} rows"
    return True, f"the last block of a query tile combines its splits: {rows} rows, which take it less than a launch"


def deeper(row: TileConfig, architecture: Architecture, itemsize: int, width: int, width_v: int) -> TileConfig:
    """The row with as many stages as leave room for a second block: what splits wait for is memory alone."""
    if not architecture.copies_ahead:
        return row
    queries, stage = itemsize * row.warps_kv * row.tile_q * max(width, width_v), itemsize * row.tile_kv * (width + width_v)
    room = architecture.shared_bytes // 2 - RESERVED_BYTES
    return replace(row, stages=max(row.stages, min((room - queries) // stage, MOST_STAGES)))


def partial_rows(plan: KernelPlan, len_q: int) -> int:
    """Rows of a part of a query tile that fwd_hopper keeps: those that exist, rounded up to what a warp stores."""
    return min(plan.config.TILE_Q, -(-len_q // WARP_ROWS) * WARP_ROWS)


def combining_blocks(plan: KernelPlan, tiles: int, len_q: int) -> int:
    """Blocks that combine so many query tiles."""
    c = plan.config
    if plan.file == "fwd_v2":
        return -(-tiles * min(c.TILE_Q, len_q) * _across(c.WIDTH_V) // c.WARPS)
    return -(-tiles * (partial_rows(plan, len_q) // WARP_ROWS) * (c.WIDTH_V // COMBINED_COLUMNS) // c.WARPS)


def _across(width_v: int) -> int:
    """Warps that a row of fwd_v2 is combined by: each has 32 columns, or as many twos or fours as there are."""
    return width_v // math.gcd(width_v, 128)


def most_splits(plan: KernelPlan, problem: Problem) -> int:
    """Blocks of a query tile: what the longest sequence needs. Those of a table are counted there."""
    if not plan.config.SPLIT_KV:
        return 1
    return splits_of_sequence(problem) if plan.file == "fwd_hopper" else _most_splits(problem)


def _most_splits(problem: Problem) -> int:
    """As many as what a query tile sees lies in, wherever it begins: numbers of splits are counted from the first of these."""
    seen = _seen_keys(problem, problem.len_kv)
    if seen < 2 * SPLIT_KEYS:
        return 1
    return min(problem.len_kv // SPLIT_KEYS, MOST_SPLITS, (seen - 2) // SPLIT_KEYS + 2)


def _seen_keys(problem: Problem, len_kv: int) -> int:
    """Keys from the first to the last that any query of a head sees, of so many at most."""
    mask, lengths = problem.mask, problem.lengths
    if lengths is None:
        first, stop = mask.some(0, problem.len_q)
        return max(stop - first, 0)
    if mask.left is None or (mask.right is None and not lengths.moves):
        return len_kv
    queries = problem.len_q if mask.queries is None else mask.queries
    return min(len_kv, queries - mask.left + (mask.right or 0))
