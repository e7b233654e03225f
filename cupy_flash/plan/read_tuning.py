"""Which tile of bwd_scores serves for gradients of what scores read: of the tiles tried, the widest that fits and spills nowhere.

S, dP and what is summed up are in registers, and Q, dO, K and V of each stage in shared memory. None is measured.
"""

from __future__ import annotations

from dataclasses import replace

from .tuning import TileConfig

ONE_BLOCK = {"min_blocks": 1}
THREE_SUMS = "the sums of a tile stay in registers beside S and dP"
EIGHT = "eight warps share the keys of a block that fills a multiprocessor"
ONE_STAGE = {"stages": 1}
SCORES_HALVES_80 = (
    TileConfig(64, 64, 64, THREE_SUMS),
    TileConfig(128, 64, 64, THREE_SUMS, **ONE_BLOCK),
    TileConfig(256, 64, 64, THREE_SUMS, **ONE_STAGE, **ONE_BLOCK),
)
SCORES_HALVES_90 = (
    TileConfig(64, 64, 64, THREE_SUMS),
    TileConfig(128, 128, 64, EIGHT, warps=8, **ONE_BLOCK),
    *SCORES_HALVES_80[2:],
)
SCORES_HALVES_86 = (
    TileConfig(64, 64, 64, THREE_SUMS),
    TileConfig(128, 64, 64, THREE_SUMS, **ONE_STAGE, **ONE_BLOCK),
    TileConfig(256, 32, 32, THREE_SUMS, warps=2, **ONE_STAGE, **ONE_BLOCK),
)
SCORES_HALVES_75 = (
    TileConfig(32, 64, 64, THREE_SUMS),
    TileConfig(64, 64, 32, THREE_SUMS),
    TileConfig(128, 64, 32, THREE_SUMS, **ONE_STAGE),
    TileConfig(192, 32, 32, THREE_SUMS, warps=2, **ONE_STAGE, **ONE_BLOCK),
    TileConfig(256, 32, 16, THREE_SUMS, warps=2, **ONE_STAGE, **ONE_BLOCK),
)
SCORES_FLOAT32_80 = (
    TileConfig(32, 64, 64, THREE_SUMS),
    TileConfig(64, 64, 64, THREE_SUMS, **ONE_BLOCK),
    TileConfig(128, 64, 64, THREE_SUMS, **ONE_STAGE, **ONE_BLOCK),
    TileConfig(256, 32, 32, THREE_SUMS, warps=2, **ONE_STAGE, **ONE_BLOCK),
)
SCORES_FLOAT32_86 = (
    TileConfig(32, 64, 64, THREE_SUMS),
    TileConfig(64, 64, 64, THREE_SUMS, **ONE_STAGE, **ONE_BLOCK),
    TileConfig(128, 32, 32, THREE_SUMS, warps=2, **ONE_STAGE, **ONE_BLOCK),
    TileConfig(256, 32, 16, THREE_SUMS, warps=2, **ONE_STAGE, **ONE_BLOCK),
)
SCORES_FLOAT32_75 = (
    TileConfig(32, 64, 32, THREE_SUMS, **ONE_BLOCK),
    TileConfig(64, 64, 32, THREE_SUMS, **ONE_STAGE, **ONE_BLOCK),
    TileConfig(128, 32, 16, THREE_SUMS, warps=2, **ONE_STAGE, **ONE_BLOCK),
    TileConfig(192, 16, 16, THREE_SUMS, warps=1, **ONE_STAGE, **ONE_BLOCK),
)
READ_GRADIENTS: dict[str, dict[str, tuple[TileConfig, ...]]] = {
    "75": {"half": SCORES_HALVES_75, "float32": SCORES_FLOAT32_75},
    "80": {"half": SCORES_HALVES_80, "float32": SCORES_FLOAT32_80},
    "86": {"half": SCORES_HALVES_86, "float32": SCORES_FLOAT32_86},
    "89": {"half": SCORES_HALVES_86, "float32": SCORES_FLOAT32_86},
    "90a": {"half": SCORES_HALVES_90, "float32": SCORES_FLOAT32_80},
    "100": {"half": SCORES_HALVES_80, "float32": SCORES_FLOAT32_80},
    "120": {"half": SCORES_HALVES_86, "float32": SCORES_FLOAT32_86},
}
NARROWEST = 16  # key tile


def read_rows(architecture: str, dtype: str, crowded: bool) -> tuple[TileConfig, ...]:
    """The rows for an architecture: where several things are asked for each pair, with half the keys."""
    rows = READ_GRADIENTS[architecture]["float32" if dtype == "float32" else "half"]
    return tuple(replace(row, tile_kv=max(row.tile_kv // 2, NARROWEST)) for row in rows) if crowded else rows
