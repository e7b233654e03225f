"""Which tile serves where something is asked for each pair of a query and a key: scores, masks of pairs, dropout.

What a pair reads and computes takes registers that the rows of `tuning` have for wider tiles. So these are narrower: of the tiles
tried, the widest of which no kernel spills, whether it has one of these or all at once. Where head dims are above 192, some still
spill a few bytes; `tests/test_compile_scores.py` names them. None is measured.
"""

from __future__ import annotations

from .tuning import ONE_GRADIENT, ONE_GROUP, SHARED, SHORT, TWO, TWO_PINGPONG, TileConfig

REGISTERS = "what is asked for each pair takes registers of wider tiles"
ONE_BLOCK = {"min_blocks": 1}
EIGHT = {"warps": 8, "min_blocks": 1}

HALVES_80 = (
    TileConfig(96, 64, 48, REGISTERS),
    TileConfig(128, 64, 32, REGISTERS),
    TileConfig(256, 64, 32, REGISTERS, **ONE_BLOCK),
)
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
HOPPER = (
    TileConfig(64, 64, 64, ONE_GROUP, warps=8, stages=4, stages_v=4, min_blocks=1, max_len_q=SHORT),
    TileConfig(64, 128, 64, REGISTERS, **TWO, tma_store_out=True),
    TileConfig(128, 128, 64, REGISTERS, **TWO_PINGPONG),
    TileConfig(192, 128, 64, REGISTERS, **SHARED, pingpong=True),
    TileConfig(256, 128, 64, REGISTERS, **SHARED),
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

BACKWARD_HOPPER_WIDE = (
    TileConfig(128, 64, 64, ONE_GRADIENT, warps=12, min_blocks=1),
    TileConfig(192, 64, 64, ONE_GRADIENT, warps=12, min_blocks=1),  # wider ones would spill, and are for bwd_v2
)

PAIR_TABLES: dict[str, dict[str, dict[str, tuple[TileConfig, ...]]]] = {
    "fwd_v2": {
        "75": {"half": HALVES_75, "float32": FLOAT32_75},
        "80": {"half": HALVES_80, "float32": FLOAT32_80},
        "86": {"half": HALVES_86, "float32": FLOAT32_86},
        "89": {"half": HALVES_86, "float32": FLOAT32_86},
        "90a": {"half": HALVES_80, "float32": FLOAT32_80},
        "100": {"half": HALVES_100, "float32": FLOAT32_80},
        "120": {"half": HALVES_86, "float32": FLOAT32_120},
    },
    "fwd_hopper": {"90a": {"half": HOPPER}},
    "bwd_v2": {
        "75": {"half": BACKWARD_HALVES_75, "float32": BACKWARD_FLOAT32_75},
        "80": {"half": BACKWARD_HALVES_80, "float32": BACKWARD_FLOAT32_80},
        "86": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_86},
        "89": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_86},
        "90a": {"half": BACKWARD_HALVES_90, "float32": BACKWARD_FLOAT32_80},
        "100": {"half": BACKWARD_HALVES_100, "float32": BACKWARD_FLOAT32_80},
        "120": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_120},
    },
    "bwd_hopper_wide": {"90a": {"half": BACKWARD_HOPPER_WIDE}},
}
