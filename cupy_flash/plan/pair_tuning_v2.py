"""Tiles of fwd_v2 and bwd_v2 where something is asked for each pair of a query and a key, see `pair_tuning`.

One table serves all that may be asked, but for those of `NARROWER`.
"""

from __future__ import annotations

from .expression_text import Pressure
from .tuning import SHORT, TileConfig

REGISTERS = "what is asked for each pair takes registers of wider tiles"
ONE_BLOCK = {"min_blocks": 1}
EIGHT = {"warps": 8, "min_blocks": 1}

HALVES_80 = (
    TileConfig(96, 64, 48, REGISTERS),
    TileConfig(128, 64, 32, REGISTERS),
    TileConfig(256, 64, 32, REGISTERS, **ONE_BLOCK),
)
WIDE_KEYS = "few query rows: wide key tiles share the reads of a tile of queries; measured 342 us where 32 keys took 410"
HALVES_90 = (HALVES_80[0], TileConfig(128, 64, 64, WIDE_KEYS, max_len_q=SHORT, min_copy=16), *HALVES_80[1:])
HALVES_86 = (
    TileConfig(64, 64, 48, REGISTERS),
    TileConfig(128, 64, 32, REGISTERS),
    TileConfig(192, 64, 16, REGISTERS, **ONE_BLOCK),
    TileConfig(256, 64, 32, REGISTERS, **ONE_BLOCK),
)
HALVES_100 = (TileConfig(32, 64, 32, REGISTERS), *HALVES_80)
HALVES_75 = (
    TileConfig(96, 64, 64, REGISTERS, **ONE_BLOCK),
    TileConfig(128, 64, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(256, 64, 16, REGISTERS, **ONE_BLOCK),
)
FLOAT32_80 = (
    TileConfig(64, 64, 48, REGISTERS),
    TileConfig(128, 64, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(192, 64, 16, REGISTERS, stages=1, **ONE_BLOCK),
    TileConfig(256, 64, 16, REGISTERS, **ONE_BLOCK),
)
FLOAT32_86 = (
    TileConfig(32, 64, 48, REGISTERS),
    TileConfig(128, 64, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(192, 64, 16, REGISTERS, **ONE_BLOCK),
    TileConfig(256, 64, 16, REGISTERS, stages=1, **ONE_BLOCK),
)
FLOAT32_120 = (
    TileConfig(32, 64, 48, REGISTERS),
    TileConfig(96, 64, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(192, 64, 16, REGISTERS, **ONE_BLOCK),
    TileConfig(256, 32, 16, REGISTERS, warps=2, **ONE_BLOCK),
)
FLOAT32_75 = (
    TileConfig(32, 64, 48, REGISTERS, **ONE_BLOCK),
    TileConfig(64, 64, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(128, 64, 16, REGISTERS, **ONE_BLOCK),
    TileConfig(256, 32, 16, REGISTERS, warps=2, stages=1, **ONE_BLOCK),
)
BACKWARD_HALVES_80 = (
    TileConfig(96, 64, 64, REGISTERS, **EIGHT),
    TileConfig(128, 32, 64, REGISTERS, **EIGHT),
    TileConfig(192, 32, 32, REGISTERS, stages=1, **ONE_BLOCK),
    TileConfig(256, 32, 64, REGISTERS, **EIGHT),
)
BACKWARD_HALVES_90 = (TileConfig(128, 64, 64, REGISTERS, **EIGHT), TileConfig(256, 32, 64, REGISTERS, **EIGHT))
BACKWARD_HALVES_100 = (
    *BACKWARD_HALVES_80[:2],
    TileConfig(192, 32, 64, REGISTERS, **EIGHT),
    TileConfig(256, 16, 32, REGISTERS, **ONE_BLOCK),
)
BACKWARD_HALVES_86 = (*BACKWARD_HALVES_80[:3], TileConfig(256, 32, 32, REGISTERS, **ONE_BLOCK))
BACKWARD_HALVES_75 = (
    TileConfig(32, 64, 64, REGISTERS, **EIGHT),
    TileConfig(128, 32, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(192, 32, 32, REGISTERS, stages=1, **ONE_BLOCK),
    TileConfig(256, 16, 16, REGISTERS, warps=2, **ONE_BLOCK),
)
BACKWARD_FLOAT32_80 = (
    TileConfig(96, 64, 64, REGISTERS, **EIGHT),
    TileConfig(128, 32, 64, REGISTERS, **EIGHT),
    TileConfig(256, 16, 32, REGISTERS, **ONE_BLOCK),
)
BACKWARD_FLOAT32_86 = (
    TileConfig(32, 64, 64, REGISTERS, **EIGHT),
    TileConfig(64, 32, 64, REGISTERS, **ONE_BLOCK),
    TileConfig(96, 32, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(192, 16, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(256, 16, 16, REGISTERS, warps=2, **ONE_BLOCK),
)
BACKWARD_FLOAT32_120 = (
    TileConfig(32, 64, 64, REGISTERS, **EIGHT),
    TileConfig(64, 32, 64, REGISTERS, **EIGHT),
    *BACKWARD_FLOAT32_86[2:-1],
    TileConfig(256, 16, 32, REGISTERS, stages=1, **ONE_BLOCK),
)
BACKWARD_FLOAT32_75 = (
    TileConfig(32, 32, 64, REGISTERS, **ONE_BLOCK),
    TileConfig(64, 32, 32, REGISTERS, **ONE_BLOCK),
    TileConfig(96, 32, 32, REGISTERS, stages=1, **ONE_BLOCK),
    TileConfig(128, 16, 32, REGISTERS, stages=1, **ONE_BLOCK),
    TileConfig(192, 16, 16, REGISTERS, warps=2, stages=1, **ONE_BLOCK),
)

PAIR_TABLES: dict[str, dict[str, dict[str, tuple[TileConfig, ...]]]] = {
    "fwd_v2": {
        "75": {"half": HALVES_75, "float32": FLOAT32_75},
        "80": {"half": HALVES_80, "float32": FLOAT32_80},
        "86": {"half": HALVES_86, "float32": FLOAT32_86},
        "89": {"half": HALVES_86, "float32": FLOAT32_86},
        "90a": {"half": HALVES_90, "float32": FLOAT32_80},
        "100": {"half": HALVES_100, "float32": FLOAT32_80},
        "120": {"half": HALVES_86, "float32": FLOAT32_120},
    },
    "bwd_v2": {
        "75": {"half": BACKWARD_HALVES_75, "float32": BACKWARD_FLOAT32_75},
        "80": {"half": BACKWARD_HALVES_80, "float32": BACKWARD_FLOAT32_80},
        "86": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_86},
        "89": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_86},
        "90a": {"half": BACKWARD_HALVES_90, "float32": BACKWARD_FLOAT32_80},
        "100": {"half": BACKWARD_HALVES_100, "float32": BACKWARD_FLOAT32_80},
        "120": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_120},
    },
}
# In place of rows as wide, where several things are asked of a pair: of kernels that have one table for all else.
MANY_32, MANY_64 = TileConfig(32, 32, 32, REGISTERS, **ONE_BLOCK), TileConfig(64, 64, 64, REGISTERS, **EIGHT)
MANY_80 = (MANY_64, TileConfig(96, 32, 32, REGISTERS, **ONE_BLOCK))
MANY_100 = (MANY_32, *MANY_80, *BACKWARD_HALVES_100[1:3], TileConfig(256, 16, 32, REGISTERS, stages=1, **ONE_BLOCK))
SEVERAL_100 = (MANY_64, TileConfig(96, 64, 64, REGISTERS, stages=1, **EIGHT))
CROWDED_FLOAT32_100 = (FLOAT32_80[0], TileConfig(128, 64, 32, REGISTERS, **ONE_BLOCK, stages=1))
MASKED_100 = (*BACKWARD_FLOAT32_80[:2], TileConfig(192, 16, 32, REGISTERS, stages=1, **ONE_BLOCK))
NARROWER: dict[tuple[str, str, str, Pressure], tuple[TileConfig, ...]] = {
    ("fwd_v2", "75", "half", Pressure.MANY): (*HALVES_75[:2], TileConfig(256, 64, 16, REGISTERS, stages=1, **ONE_BLOCK)),
    **{("fwd_v2", "100", "float32", pressure): CROWDED_FLOAT32_100 for pressure in (Pressure.SEVERAL, Pressure.MANY)},
    **{("bwd_v2", architecture, "half", Pressure.MANY): MANY_80 for architecture in ("80", "86", "89", "90a")},
    ("bwd_v2", "100", "half", Pressure.MANY): MANY_100,
    ("bwd_v2", "120", "half", Pressure.MANY): (MANY_32, *MANY_80),
    ("bwd_v2", "100", "float32", Pressure.SEVERAL): SEVERAL_100,
    ("bwd_v2", "100", "float32", Pressure.ARRAY_MASK): MASKED_100,
}
