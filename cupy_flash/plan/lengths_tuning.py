"""Which tile serves sequences of their own lengths in fwd_hopper, and how many warps bring their keys where these lie in pages.

Rows are the same wherever keys lie, because the tile decides the bits of a result.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..problem.forward import Problem
from .hopper_splits import shares_tiles_of_sequence
from .tuning import CAUSAL, HOPPER, THREE_NARROW, TileConfig

LEAST_PIECE = 8  # keys of a page that TMA brings at a time: rows of shared memory are swizzled in eights
SMALL_PIECE = 32  # keys: of smaller pieces two warps start the copies more slowly than consumers read what they bring
THREE_80 = {"warps": 16, "stages": 3, "stages_v": 3, "stages_q": 6, "min_blocks": 1, "plain_scores": True}
# Windows are faster in 64 keys, which cover fewer pairs beside them.
WIDE_128 = TileConfig(
    128, 192, 80, THREE_NARROW + "; measured 1.015 of 64 keys a tile in documents", **THREE_80, masks=("full", *CAUSAL)
)
LENGTHS_HOPPER = tuple(
    own for row in HOPPER for own in ((WIDE_128, row) if (row.width, row.tile_q, row.tile_kv) == (128, 192, 64) else (row,))
)


def rows_of_sequences(problem: Problem, parts: int) -> tuple[TileConfig, ...]:
    """The rows to choose from: 80 keys would spill registers at dim 128 in parts, or if blocks share tiles of rows with sinks."""
    crowded = parts or (problem.sinks is not None and shares_tiles_of_sequence(problem))
    return HOPPER if crowded else LENGTHS_HOPPER


def shape_of(problem: Problem) -> str:
    """The shape of mask that a row is chosen by.

    Of sequences with a prefix, or whose tiles heads or blocks share, it is never 'causal', for which four groups would spill.
    """
    if problem.lengths is None or problem.scores or problem.mask.shape != "causal":
        return problem.mask.shape
    is_shared = problem.mask.queries is not None or shares_tiles_of_sequence(problem)
    return "full" if is_shared or problem.mask.kind == "PREFIX" else "causal"


def in_pages(row: TileConfig, page_size: int) -> TileConfig:
    """The row where keys lie in pages: what is brought of them at a time, and by how many warps, half of which bring values."""
    piece = math.gcd(row.tile_kv, page_size)
    return replace(row, piece=piece * (piece % LEAST_PIECE == 0), producer_warps=4 if piece < SMALL_PIECE else 2)
