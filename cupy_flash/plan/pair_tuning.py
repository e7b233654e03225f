"""Which tile serves where something is asked for each pair of a query and a key: scores, masks of pairs, dropout.

What a pair reads and computes takes registers that the rows of `tuning` have for wider tiles. So most of these are narrower: of the
tiles tried, the widest of which no kernel spills. The Hopper kernels have rows for each `Pressure`, all others the same for all
but those of `NARROWER`. Where head dims are above 192, some still spill a few bytes; `tests/test_compile_scores.py` names them.
"""

from __future__ import annotations

from dataclasses import replace

from ..problem.forward import Problem
from .expression_text import Pressure
from .tuning import (
    CAUSAL,
    FOUR,
    FOUR_GROUPS,
    NARROW,
    ONE_GRADIENT,
    ONE_GROUP,
    PINGPONG,
    SHARED,
    SHORT,
    THREE,
    THREE_NARROW,
    TWO,
    TWO_GROUPS,
    TWO_PINGPONG,
    WIDE,
    WIDE_STEPS,
    WINDOW,
    TileConfig,
)
from .tuning import HOPPER as PLAIN_HOPPER
from .tuning import HOPPER_BACKWARD as PLAIN_BACKWARD
from .tuning import HOPPER_BACKWARD_WIDE as PLAIN_BACKWARD_WIDE

REGISTERS = "what is asked for each pair takes registers of wider tiles"
ONE_BLOCK = {"min_blocks": 1}
EIGHT = {"warps": 8, "min_blocks": 1}

SPILLING = ((64, 192, 128), (128, 128, 128), (192, 128, 112))  # and where another of as wide heads serves

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
# Those of the plain table whose registers hold a term besides.
HOPPER_TERM = tuple(
    replace(row, without_lengths=row.width > 128, without_sinks=(row.width, row.tile_q) == (128, 64))
    for row in PLAIN_HOPPER
    if (row.width, row.tile_q, row.tile_kv) not in SPILLING
)
HOPPER_FEW = TileConfig(64, 64, 64, ONE_GROUP, warps=8, stages=4, stages_v=4, min_blocks=1, max_len_q=SHORT)
HOPPER_READS = (
    HOPPER_FEW,
    TileConfig(64, 192, 64, THREE_NARROW, warps=16, stages=4, stages_v=4, stages_q=6, tma_store_out=True, min_blocks=1),
    TileConfig(128, 192, 64, THREE_NARROW, **NARROW, without_lengths=True),
    TileConfig(192, 128, 80, REGISTERS, **SHARED),
    TileConfig(256, 128, 64, REGISTERS, **SHARED, without_lengths=True),
)
# A bias that comes with the keys takes no registers for addresses, but shared memory in each stage of theirs.
STAGED = "the bias of a key tile comes with its keys"
STAGED_FOUR = STAGED + "; four groups of 64 rows hide each other's waits" + PINGPONG
STAGED_SHORT = STAGED + "; two groups leave fewer rows that do not exist"
STAGED_QUERIES = "the bias of a query tile comes with its queries"
ROOM_FOR_BIAS = {**NARROW, "stages": 3, "stages_q": 3, "tma_store_out": False}
HOPPER_STAGED = (
    replace(HOPPER_FEW, why=HOPPER_FEW.why + "; " + STAGED, staged_bias=True),
    TileConfig(64, 128, 128, STAGED_SHORT, **TWO, stages=3, tma_store_out=True, max_len_q=256, staged_bias=True),
    TileConfig(64, 256, 64, STAGED_FOUR, **{**FOUR, "stages": 3, "stages_v": 3, "stages_q": 4}, pingpong=True, staged_bias=True),
    TileConfig(64, 192, 64, STAGED + PINGPONG, **{**THREE, "tma_store_out": False}, pingpong=True, staged_bias=True),
    TileConfig(128, 128, 112, STAGED + PINGPONG, **SHARED, pingpong=True, max_len_q=1024, masks=CAUSAL, staged_bias=True),
    TileConfig(128, 192, 64, STAGED + PINGPONG, **ROOM_FOR_BIAS, pingpong=True, staged_bias=True),
    TileConfig(192, 128, 64, STAGED + PINGPONG, **WIDE, stages=3, pingpong=True, staged_bias=True),
    TileConfig(256, 128, 64, STAGED + PINGPONG, **WIDE, pingpong=True, staged_bias=True),
)
FLOAT16_INFINITY = 0x7C00  # its bits
DRAWS = "bits are drawn beneath the products and exponentials of the other group"
DRAWS_FOUR = "four groups of 64 rows draw beneath each other's products; they have registers for the masks of 64 keys"
HOPPER_DROPOUT = (
    HOPPER_FEW,
    TileConfig(64, 128, 128, DRAWS, **TWO_PINGPONG, stages=4, stages_v=4, max_len_q=192),
    TileConfig(64, 256, 64, DRAWS_FOUR, **FOUR, pingpong=True),
    TileConfig(64, 128, 128, DRAWS, **TWO_PINGPONG, stages=4, stages_v=4),
    TileConfig(128, 128, 128, DRAWS, **TWO_PINGPONG),
    TileConfig(192, 128, 96, DRAWS, **SHARED, pingpong=True, without_lengths=True),
    replace(HOPPER_READS[3], without_lengths=False),
    TileConfig(256, 128, 64, DRAWS, **WIDE, pingpong=True),
)
# Those of the plain table, since few pairs are asked, but for tiles of 192 queries: more of them are seen in part.
HOPPER_ARRAY_MASK = (
    *HOPPER_READS[:2],
    TileConfig(128, 128, 128, TWO_GROUPS + PINGPONG, **TWO_PINGPONG, without_lengths=True),
    *(replace(row, without_lengths=True) for row in PLAIN_HOPPER if row.width > 128),
)
FOUR_LISTS = "four groups of 64 rows, each with its own list: pairs are asked by the group that a document ends in" + PINGPONG
HOPPER_MASK = (
    HOPPER_FEW,
    TileConfig(64, 256, 64, FOUR_LISTS, **FOUR, pingpong=True, without_lengths=True),
    *HOPPER_ARRAY_MASK[1:],
)
THREE_LISTS = "three groups of 64 rows, each with its own list: few pairs are asked"
HOPPER_LONG_MASK = (
    HOPPER_FEW,
    TileConfig(64, 192, 64, THREE_NARROW + PINGPONG, **THREE, pingpong=True, without_lengths=True),
    TileConfig(128, 192, 64, THREE_LISTS, **NARROW, without_lengths=True, plain_scores=True),
    *HOPPER_MASK[2:],
)
HOPPER_READING_MASK = (*HOPPER_MASK[:2], *HOPPER_LONG_MASK[2:])
FOUR_NARROW = "four groups of 64 rows hide each other's waits, and narrow key tiles fit their registers" + PINGPONG
HOPPER_LOOKUPS = (
    HOPPER_FEW,
    TileConfig(64, 256, 64, FOUR_NARROW, **FOUR, pingpong=True, without_lengths=True),
    HOPPER_READS[1],
    TileConfig(128, 128, 128, TWO_GROUPS + PINGPONG, **TWO_PINGPONG, without_lengths=True),
    TileConfig(128, 128, 96, REGISTERS, **TWO_PINGPONG),
    *HOPPER_READS[3:],
)
# Behind all of these: where sequences have lengths of their own as well.
HOPPER_LENGTHS = (
    TileConfig(128, 128, 96, REGISTERS, **TWO_PINGPONG),
    TileConfig(192, 128, 80, REGISTERS, **SHARED),  # wider ones would spill, and are for fwd_v2
)
HOPPER_EXPRESSION = (
    HOPPER_FEW,
    TileConfig(64, 256, 64, FOUR_NARROW, **{**FOUR, "plain_scores": False}, pingpong=True),
    TileConfig(128, 192, 64, THREE_NARROW + PINGPONG, **NARROW, pingpong=True),
    TileConfig(192, 128, 96, REGISTERS, **SHARED, pingpong=True),
    replace(HOPPER_READS[-1], without_lengths=False),
)
HOPPER_LONG_EXPRESSION = (*HOPPER_READS[:2], *HOPPER_EXPRESSION[2:])
HOPPER_SEVERAL = (
    HOPPER_FEW,
    TileConfig(64, 128, 64, REGISTERS, **TWO, tma_store_out=True),
    TileConfig(128, 128, 64, REGISTERS, **TWO_PINGPONG),
    TileConfig(192, 128, 64, REGISTERS, **SHARED, pingpong=True, without_lengths=True),
)
HOPPER_BITS_AND_DROPOUT = (*HOPPER_DROPOUT[:5], HOPPER_SEVERAL[-1], HOPPER_DROPOUT[-1])  # 96 keys were not timed

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

BACKWARD_HOPPER_READS = (
    TileConfig(64, 64, 128, REGISTERS, warps=12, min_blocks=1),
    TileConfig(128, 64, 128, REGISTERS, warps=12, min_blocks=1, without_lengths=True),
)
BACKWARD_HOPPER_MASK = (
    TileConfig(64, 128, 128, WIDE_STEPS, warps=12, min_blocks=1, without_lengths=True, plain_scores=True),
    BACKWARD_HOPPER_READS[0],
    replace(BACKWARD_HOPPER_READS[1], plain_scores=True),
)
BACKWARD_HOPPER_DROPOUT = (
    TileConfig(64, 128, 128, "wide query tiles halve what is done once a tile", warps=12, min_blocks=1, plain_scores=True),
    TileConfig(64, 64, 128, REGISTERS, warps=12, min_blocks=1),
    TileConfig(128, 64, 128, REGISTERS, warps=12, min_blocks=1, plain_scores=True),
)
BACKWARD_HOPPER_WIDE = (
    TileConfig(128, 64, 64, ONE_GRADIENT, warps=12, min_blocks=1),
    TileConfig(192, 64, 64, ONE_GRADIENT, warps=12, min_blocks=1),  # wider ones would spill, and are for bwd_v2
)

# Terms that are a step of the product, see `apart`, lie in shared memory, beside keys and values that fill it. Where there is none,
# rows that leave make room, or a stage. Wide key tiles come half as often. Measured: 16,384 tokens, sequences of 4,096.
BESIDE = "; terms have the room of a stage, or of rows that leave"
KEYS_MEASURED = "; measured 405 us causal, 758 not, and with 192 x 64 446 and 791"
KEYS_128 = TileConfig(128, 128, 128, TWO_GROUPS + PINGPONG + BESIDE + KEYS_MEASURED, **TWO, pingpong=True, without_lengths=True)
UP_TO_4096 = {"stages_q": 3, "tma_store_out": True, "max_len_q": 4096}  # 1 % of the rate more up to there, up to 3 full at 1,024
LINEAR_64 = {"stages": 3, "stages_v": 3, "without_lengths": True}
LENGTHS_64 = TileConfig(64, 256, 64, FOUR_GROUPS + PINGPONG, **FOUR, pingpong=True)  # 192 x 128 would spill


def beside_keys(row: TileConfig) -> tuple[TileConfig, ...]:
    """The rows in place of one where keys have terms. Of sequences with lengths no rows leave by TMA: they have the room."""
    match row.width, row.tile_q, row.tile_kv:
        case 64, 256, 64:  # measured 564 us causal, 1,054 full at 4,096, and with 192 x 128 582 and 1,032
            return _up_to(row, 4096 if row.masks == CAUSAL else 1024)
        case 128, 128 | 192, 64 | 128:
            return replace(KEYS_128, **UP_TO_4096), KEYS_128, row
        case 256, 64, 64:
            return (replace(row, stages=2, why=row.why + BESIDE),)
    return (row,)


def beside_steps(row: TileConfig) -> tuple[TileConfig, ...]:
    """The same of linear terms, whose steps take registers that sequences of their own lengths have not."""
    match row.width, row.tile_q, row.tile_kv:
        case 64, 256, 64:  # measured 540 us causal at 4,096, 1,056 at 8,192, 278 full at 1,024; 192 x 128 has 552, 1,020, 304
            return _up_to(row, 4096 if row.masks == CAUSAL else 1024)
        case 64, 192, 128:
            return replace(row, **LINEAR_64), LENGTHS_64
        case 128, 128, 128:
            return (replace(row, tma_store_out=False, why=row.why + BESIDE),)  # 394 us causal, and 402 with such room
    return (row,)


def _up_to(row: TileConfig, longest: int) -> tuple[TileConfig, ...]:
    """A row for so many queries at most, without lengths; none of those for windows only, which nobody has measured."""
    return () if row.masks == WINDOW else (replace(row, max_len_q=longest, without_lengths=True),)


# Of what is taken apart, see `apart`, where a plain row has no registers for it: for 80 queries and a factor, or lengths and terms
# of keys or linear ones; or no shared memory.
APART_ROWS = {
    ("fwd_hopper", "PLUS_COLUMN"): tuple(dict.fromkeys(own for row in PLAIN_HOPPER for own in beside_keys(row))),
    ("fwd_hopper", "PLUS_LINEAR"): tuple(own for row in PLAIN_HOPPER for own in beside_steps(row)),
    ("bwd_hopper", "SCALED"): (*PLAIN_BACKWARD[:2], replace(PLAIN_BACKWARD[2], max_len_q=None)),
    ("bwd_hopper", "PLUS_COLUMN"): tuple(replace(row, without_lengths=row.masks == ("causal",)) for row in PLAIN_BACKWARD),
}

# In place of those for Pressure.BIAS on sm_90a, where TMA can bring the bias.
BACKWARD_STAGED = (
    TileConfig(64, 128, 128, f"{WIDE_STEPS}; {STAGED_QUERIES}", warps=12, min_blocks=1, plain_scores=True, staged_bias=True),
    TileConfig(64, 64, 128, STAGED_QUERIES, warps=12, min_blocks=1, staged_bias=True),
    TileConfig(128, 64, 128, STAGED_QUERIES, warps=12, min_blocks=1, staged_bias=True),
)
BACKWARD_WIDE_STAGED = tuple(  # at 256 the shared memory is full
    row if row.width > 192 else replace(row, why=f"{row.why}; {STAGED_QUERIES}", staged_bias=True) for row in PLAIN_BACKWARD_WIDE
)
STAGED_ROWS = {"fwd_hopper": HOPPER_STAGED, "bwd_hopper": BACKWARD_STAGED, "bwd_hopper_wide": BACKWARD_WIDE_STAGED}

# Of the Hopper kernels, for 16-bit dtypes. One that is missing has no registers for it.
HOPPER_TABLES: dict[str, dict[Pressure, tuple[TileConfig, ...]]] = {
    "fwd_hopper": {
        Pressure.TERM: HOPPER_TERM + HOPPER_LENGTHS[1:],
        Pressure.BIAS: HOPPER_READS + HOPPER_LENGTHS,
        Pressure.ARRAY_MASK: HOPPER_ARRAY_MASK + HOPPER_LENGTHS,
        Pressure.BITS: HOPPER_READING_MASK,
        Pressure.MASK: HOPPER_MASK,
        Pressure.READING_MASK: HOPPER_READING_MASK,
        Pressure.LONG_MASK: HOPPER_LONG_MASK,
        Pressure.LOOKUPS: HOPPER_LOOKUPS + HOPPER_LENGTHS[1:],
        Pressure.EXPRESSION: HOPPER_EXPRESSION,
        Pressure.LONG_EXPRESSION: HOPPER_LONG_EXPRESSION,
        Pressure.DROPOUT: HOPPER_DROPOUT,
        Pressure.BITS_AND_DROPOUT: HOPPER_BITS_AND_DROPOUT,
        Pressure.SEVERAL: HOPPER_SEVERAL,
        Pressure.MANY: HOPPER_SEVERAL,
    },
    "bwd_hopper": {
        Pressure.TERM: PLAIN_BACKWARD,
        Pressure.BIAS: BACKWARD_HOPPER_READS,
        Pressure.ARRAY_MASK: BACKWARD_HOPPER_MASK[:2],
        Pressure.BITS: BACKWARD_HOPPER_MASK,
        Pressure.MASK: BACKWARD_HOPPER_MASK,
        Pressure.READING_MASK: BACKWARD_HOPPER_MASK,
        Pressure.LONG_MASK: BACKWARD_HOPPER_MASK,
        Pressure.LOOKUPS: BACKWARD_HOPPER_READS[:1],
        Pressure.DROPOUT: BACKWARD_HOPPER_DROPOUT,
        Pressure.BITS_AND_DROPOUT: BACKWARD_HOPPER_DROPOUT[1:],
    },
    "bwd_hopper_wide": {
        Pressure.TERM: PLAIN_BACKWARD_WIDE,
        Pressure.BIAS: PLAIN_BACKWARD_WIDE,
        Pressure.ARRAY_MASK: PLAIN_BACKWARD_WIDE,
        Pressure.BITS: PLAIN_BACKWARD_WIDE,
        Pressure.MASK: PLAIN_BACKWARD_WIDE,
        Pressure.READING_MASK: PLAIN_BACKWARD_WIDE,
        Pressure.LONG_MASK: PLAIN_BACKWARD_WIDE,
        Pressure.LOOKUPS: PLAIN_BACKWARD_WIDE,
        Pressure.EXPRESSION: PLAIN_BACKWARD_WIDE,
        Pressure.LONG_EXPRESSION: PLAIN_BACKWARD_WIDE,
        Pressure.DROPOUT: (*BACKWARD_HOPPER_WIDE, PLAIN_BACKWARD_WIDE[-1]),
        Pressure.BITS_AND_DROPOUT: (*BACKWARD_HOPPER_WIDE, PLAIN_BACKWARD_WIDE[-1]),
        Pressure.SEVERAL: BACKWARD_HOPPER_WIDE,
    },
}
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


def drops_most(problem: Problem) -> bool:
    """Whether dropout leaves fewer than 1 of 32 pairs: Hopper kernels compare its numbers as float16, in ``tile/dropout.cuh``."""
    dropout = problem.scores.dropout
    return dropout is not None and dropout.threshold > FLOAT16_INFINITY


def pair_rows(kernel: str, architecture: str, dtype: str, pressure: Pressure) -> tuple[TileConfig, ...]:
    """The rows of a kernel for what is asked for each pair; none where it has no registers for it, or does not exist."""
    if kernel in HOPPER_TABLES:
        there = architecture == "90a" and dtype != "float32"
        return HOPPER_TABLES[kernel].get(pressure, ()) if there else ()
    kind = "float32" if dtype == "float32" else "half"
    narrower = NARROWER.get((kernel, architecture, kind, pressure), ())
    widest = max((row.width for row in narrower), default=0)
    rows = PAIR_TABLES.get(kernel, {}).get(architecture, {}).get(kind, ())
    return (*narrower, *(row for row in rows if row.width > widest))
