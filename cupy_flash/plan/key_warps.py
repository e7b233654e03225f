"""Few query rows: the warps of a block of fwd_v2 share the keys of each tile, as ``kernels_cu/tile/key_warps.cuh`` has it.

A warp multiplies 16 rows at least. Where a query tile has no more, as in decoding, one warp would compute all of it while the
others only load. So each has all rows, and 16 keys of each key tile; they never wait for each other before the end, where O and
the softmax of all become one.
"""

from __future__ import annotations

from dataclasses import replace

from ..problem.forward import Problem
from .architecture import Architecture
from .tuning import TileConfig

ROWS = 16  # of a query tile: what a warp multiplies at least
KEYS = 16  # of a key tile that a warp has
WHY = "no more rows than one warp computes: each warp has all of them, and keys of its own"
WARPS = (4, 2)  # of a block, as many as shared memory has room for
WIDEST_Q = 128  # head dim up to which queries stay in registers
WIDEST_FLOAT32 = 128  # above which a warp would spill, as compiled for each


def with_key_warps(
    row: TileConfig, architecture: Architecture, itemsize: int, width: int, width_v: int, problem: Problem
) -> TileConfig:
    """The row with warps that have keys of their own; as it is, where there are more rows than one warp has.

    Where pairs are dropped, warps share whole tiles. Nothing here depends on how many keys
    there is room for, so that a sequence has the same bits in any cache.

    Parameters
    ----------
    row : TileConfig
    architecture : Architecture
    itemsize, width, width_v : int
    problem : Problem
        As the kernel is told it.
    """
    scores, lengths = problem.scores, problem.lengths
    if not 1 <= problem.len_q <= ROWS or (lengths is not None and lengths.of_queries):
        return row
    wide = itemsize == 4 and max(width, width_v) > WIDEST_FLOAT32
    if wide or scores.dropout is not None:
        return row
    stages = max(row.stages, 2)
    for warps in WARPS:
        queries, stage = warps * ROWS * max(width, width_v), warps * KEYS * (width + width_v)
        if itemsize * (queries + stages * stage) <= architecture.shared_bytes:
            return replace(
                row,
                tile_q=ROWS,
                tile_kv=warps * KEYS,
                why=WHY,
                warps=warps,
                warps_kv=warps,
                stages=stages,
                q_in_registers=max(width, width_v) <= WIDEST_Q and itemsize == 2,
            )
    return row
