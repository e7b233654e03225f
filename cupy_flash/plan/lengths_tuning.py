"""Which tile serves sequences of their own lengths in fwd_hopper, and how many warps bring their keys where these lie in pages.

Rows are the same wherever keys lie, because the tile decides the bits of a result.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..problem.forward import Problem
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


def shape_of(problem: Problem) -> str:
    """The shape of mask that a row is chosen by: of sequences with a prefix never 'causal', for which four groups would spill."""
    prefix = problem.lengths is not None and problem.mask.kind == "PREFIX" and not problem.scores
    return "full" if prefix and problem.mask.shape == "causal" else problem.mask.shape


def in_pages(row: TileConfig, page_size: int) -> TileConfig:
    """The row where keys lie in pages: what is brought of them at a time, and by how many warps, half of which bring values."""
    piece = math.gcd(row.tile_kv, page_size)
    return replace(row, piece=piece * (piece % LEAST_PIECE == 0), producer_warps=4 if piece < SMALL_PIECE else 2)
