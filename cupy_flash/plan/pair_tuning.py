"""Which tile serves where something is asked for each pair of a query and a key: scores, masks of pairs, dropout.

What a pair reads and computes takes registers that the rows of `tuning` have for wider tiles. So most of these are narrower: of the
tiles tried, the widest of which no kernel spills. The Hopper kernels have rows for each `Pressure`, which are here; those of the
others are in `pair_tuning_v2`. Where head dims are above 192, some still spill a few bytes; `tests/test_compile_scores.py` names
them.
"""

from __future__ import annotations

from dataclasses import replace

from ..problem.forward import Problem
from .expression_text import Pressure
from .pair_tuning_v2 import NARROWER, PAIR_TABLES, REGISTERS
from .tuning import (
    CAPPED_64,
    CAUSAL,
    FOUR,
    FOUR_GROUPS,
    HOPPER,
    NARROW,
    ONE,
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
    Rows,
    TileConfig,
)
from .tuning import HOPPER_BACKWARD as PLAIN_BACKWARD
from .tuning import HOPPER_BACKWARD_WIDE as PLAIN_BACKWARD_WIDE

PLAIN_HOPPER = tuple(row for row in HOPPER if row != CAPPED_64)  # whose registers a softcap has
SPILLING = ((64, 192, 128), (128, 128, 128), (192, 128, 112))  # and where another of as wide heads serves

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
ROOM_OF_TWO = {**ROOM_FOR_BIAS, "warps": 12}
HOPPER_STAGED = (
    replace(HOPPER_FEW, why=HOPPER_FEW.why + "; " + STAGED, staged_bias=True),
    TileConfig(64, 128, 128, STAGED_SHORT, **TWO, stages=3, tma_store_out=True, max_len_q=128, staged_bias=True),
    TileConfig(64, 256, 64, STAGED_FOUR, **{**FOUR, "stages": 3, "stages_v": 3, "stages_q": 4}, pingpong=True, staged_bias=True),
    TileConfig(64, 192, 64, STAGED + PINGPONG, **{**THREE, "tma_store_out": False}, pingpong=True, staged_bias=True),
    TileConfig(128, 128, 64, STAGED + PINGPONG, **ROOM_OF_TWO, pingpong=True, max_len_q=1024, masks=CAUSAL, staged_bias=True),
    TileConfig(128, 192, 64, STAGED + PINGPONG, **ROOM_FOR_BIAS, pingpong=True, staged_bias=True),
    TileConfig(192, 128, 64, STAGED + PINGPONG, **WIDE, stages=3, pingpong=True, staged_bias=True),
    TileConfig(256, 128, 64, STAGED + PINGPONG, **WIDE, pingpong=True, staged_bias=True),
)
# One of float32 takes twice as much of it.
HOPPER_STAGED_FLOAT32 = (
    HOPPER_STAGED[0],
    TileConfig(64, 128, 64, STAGED_SHORT + PINGPONG, **TWO_PINGPONG, stages=3, max_len_q=256, staged_bias=True),
    TileConfig(64, 192, 64, STAGED + PINGPONG, **{**ROOM_FOR_BIAS, "stages_v": 4}, pingpong=True, staged_bias=True),
    TileConfig(128, 192, 64, STAGED + PINGPONG, **{**ROOM_FOR_BIAS, "stages": 2}, pingpong=True, staged_bias=True),
    TileConfig(192, 128, 64, STAGED + PINGPONG, **WIDE, pingpong=True, staged_bias=True),
    TileConfig(256, 128, 64, STAGED + PINGPONG, **WIDE, stages_v=1, pingpong=True, staged_bias=True),
)
FLOAT16_INFINITY = 0x7C00  # its bits
DRAWS = "bits are drawn beneath the products and exponentials of the other group"
DRAWS_FOUR = "four groups of 64 rows draw beneath each other's products; they have registers for the masks of 64 keys"
HOPPER_DROPOUT = (
    HOPPER_FEW,
    TileConfig(64, 128, 128, DRAWS, **TWO_PINGPONG, stages=4, stages_v=4, max_len_q=128),
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
# Rows of a tile belong to several heads, and a lane has what two of them have: slopes, numbers, where elements of a bias begin.
PACKED_ROWS = (
    TileConfig(64, 64, 128, ONE_GROUP, **ONE, stages=4, stages_v=4),
    TileConfig(64, 128, 128, TWO_GROUPS + PINGPONG, **TWO_PINGPONG, stages=4, stages_v=4, max_len_q=128),  # or see packed_rows
    TileConfig(64, 256, 64, FOUR_NARROW, **{**FOUR, "plain_scores": False}, pingpong=True),
    TileConfig(128, 64, 128, ONE_GROUP, **ONE, stages=3),
    TileConfig(128, 128, 128, TWO_GROUPS + PINGPONG, **TWO_PINGPONG),
    TileConfig(256, 64, 64, ONE_GROUP, **ONE, stages=3),
    TileConfig(256, 128, 64, REGISTERS, **SHARED, pingpong=True),
)
PACKED_64_KEYS = TileConfig(128, 128, 64, REGISTERS, **TWO_PINGPONG)
PACKED_LONG_ROWS = (*PACKED_ROWS[:4], PACKED_64_KEYS, *PACKED_ROWS[5:])
PACKED_BIAS_ROWS = (
    PACKED_ROWS[0],
    replace(PACKED_ROWS[1], max_len_q=None),
    TileConfig(128, 128, 96, REGISTERS, **TWO_PINGPONG),
    PACKED_ROWS[-1],
)
PACKED_FLOAT32_ROWS = (PACKED_64_KEYS, PACKED_ROWS[-1])
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
# Terms of keys take room in shared memory, at dims above 64 that of a stage of queries.
HOPPER_TERM_AND_DROPOUT = (*HOPPER_DROPOUT[:4], replace(HOPPER_DROPOUT[4], stages_q=3), HOPPER_SEVERAL[-1], HOPPER_DROPOUT[-1])
HOPPER_EXPRESSION_AND_DROPOUT = (*HOPPER_SEVERAL[:2], *HOPPER_DROPOUT[4:-1], replace(HOPPER_DROPOUT[-1], stages_q=3))
THREE_DRAW = "three groups of 64 rows: four have no registers for what is read besides" + PINGPONG
HOPPER_LOOKUPS_AND_DROPOUT = (
    HOPPER_FEW,
    TileConfig(64, 192, 64, THREE_DRAW, **THREE, pingpong=True),
    *HOPPER_TERM_AND_DROPOUT[4:],
)
HOPPER_BITS_AND_EXPRESSION = (*HOPPER_EXPRESSION[:3], HOPPER_SEVERAL[-1], HOPPER_EXPRESSION[-1])
HOPPER_BITS_AND_LONG_EXPRESSION = (*HOPPER_READS[:2], *HOPPER_BITS_AND_EXPRESSION[2:])
HOPPER_BITS_AND_LOOKUPS = (*HOPPER_READS[:2], *HOPPER_LOOKUPS[3:])
HOPPER_BITS_AND_DROPOUT = (*HOPPER_DROPOUT[:5], HOPPER_SEVERAL[-1], HOPPER_DROPOUT[-1])  # 96 keys were not timed

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
    TileConfig(192, 64, 64, ONE_GRADIENT, warps=12, min_blocks=1),  # of more, wider ones would spill, and are for bwd_v2
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
STAGED_FLOAT32_ROWS = STAGED_ROWS | {"fwd_hopper": HOPPER_STAGED_FLOAT32, "bwd_hopper": BACKWARD_STAGED[1:]}

# Of the Hopper kernels, for 16-bit dtypes: beside bits of a mask or not, and dropout or not. See `pair_rows` for what is missing.
ALONE, BITS, DROPOUT, BITS_AND_DROPOUT = (False, False), (True, False), (False, True), (True, True)
WIDE_DROPOUT = (*BACKWARD_HOPPER_WIDE, PLAIN_BACKWARD_WIDE[-1])
OF_DROPOUT = Pressure.NOTHING, Pressure.TERM, Pressure.LOOKUPS, Pressure.EXPRESSION, Pressure.LONG_EXPRESSION
HOPPER_TABLES: dict[str, dict[tuple[bool, bool], dict[Pressure, Rows]]] = {
    "fwd_hopper": {
        ALONE: {
            Pressure.TERM: HOPPER_TERM + HOPPER_LENGTHS[1:],
            Pressure.BIAS: HOPPER_READS + HOPPER_LENGTHS,
            Pressure.ARRAY_MASK: HOPPER_ARRAY_MASK + HOPPER_LENGTHS,
            Pressure.MASK: HOPPER_MASK,
            Pressure.READING_MASK: HOPPER_READING_MASK,
            Pressure.LONG_MASK: HOPPER_LONG_MASK,
            Pressure.LOOKUPS: HOPPER_LOOKUPS + HOPPER_LENGTHS[1:],
            Pressure.EXPRESSION: HOPPER_EXPRESSION,
            Pressure.LONG_EXPRESSION: HOPPER_LONG_EXPRESSION,
            Pressure.SEVERAL: (*HOPPER_SEVERAL, TileConfig(256, 128, 64, REGISTERS, **WIDE, without_lengths=True)),
            Pressure.MANY: HOPPER_SEVERAL,
        },
        BITS: {
            Pressure.NOTHING: HOPPER_READING_MASK,
            Pressure.LOOKUPS: HOPPER_BITS_AND_LOOKUPS,
            Pressure.EXPRESSION: HOPPER_BITS_AND_EXPRESSION,
            Pressure.LONG_EXPRESSION: HOPPER_BITS_AND_LONG_EXPRESSION,
        },
        DROPOUT: {
            Pressure.NOTHING: HOPPER_DROPOUT,
            Pressure.TERM: HOPPER_TERM_AND_DROPOUT,
            Pressure.LOOKUPS: HOPPER_LOOKUPS_AND_DROPOUT,
            Pressure.EXPRESSION: HOPPER_EXPRESSION_AND_DROPOUT,
            Pressure.LONG_EXPRESSION: HOPPER_EXPRESSION_AND_DROPOUT,
        },
        BITS_AND_DROPOUT: {
            Pressure.NOTHING: HOPPER_BITS_AND_DROPOUT,
            Pressure.TERM: HOPPER_LOOKUPS_AND_DROPOUT,
            Pressure.LOOKUPS: HOPPER_LOOKUPS_AND_DROPOUT,
            Pressure.EXPRESSION: HOPPER_EXPRESSION_AND_DROPOUT,
            Pressure.LONG_EXPRESSION: HOPPER_EXPRESSION_AND_DROPOUT,
        },
    },
    "bwd_hopper": {
        ALONE: {
            Pressure.TERM: PLAIN_BACKWARD,
            Pressure.BIAS: BACKWARD_HOPPER_READS,
            Pressure.ARRAY_MASK: BACKWARD_HOPPER_MASK[:2],
            Pressure.MASK: BACKWARD_HOPPER_MASK,
            Pressure.READING_MASK: BACKWARD_HOPPER_MASK,
            Pressure.LONG_MASK: BACKWARD_HOPPER_MASK,
            Pressure.LOOKUPS: BACKWARD_HOPPER_READS[:1],
        },
        BITS: dict.fromkeys((Pressure.NOTHING, Pressure.TERM), BACKWARD_HOPPER_MASK),
        DROPOUT: {
            Pressure.NOTHING: BACKWARD_HOPPER_DROPOUT,
            Pressure.TERM: (replace(BACKWARD_HOPPER_DROPOUT[0], without_lengths=True), *BACKWARD_HOPPER_DROPOUT[1:]),
            Pressure.LOOKUPS: BACKWARD_HOPPER_DROPOUT[1:],
        },
        BITS_AND_DROPOUT: dict.fromkeys(OF_DROPOUT[:3], BACKWARD_HOPPER_DROPOUT[1:]),
    },
    "bwd_hopper_wide": {
        ALONE: {
            **dict.fromkeys(Pressure, PLAIN_BACKWARD_WIDE),
            Pressure.SEVERAL: (*BACKWARD_HOPPER_WIDE, replace(PLAIN_BACKWARD_WIDE[-1], without_lengths=True)),
            Pressure.MANY: (),
        },
        BITS: {},
        DROPOUT: dict.fromkeys(OF_DROPOUT, WIDE_DROPOUT),
        BITS_AND_DROPOUT: dict.fromkeys(OF_DROPOUT, WIDE_DROPOUT),
    },
}
# What comes of one thing more.
ONE_MORE = {Pressure.NOTHING: Pressure.NOTHING, Pressure.SEVERAL: Pressure.MANY, Pressure.MANY: Pressure.MANY}


def drops_most(problem: Problem) -> bool:
    """Whether dropout leaves fewer than 1 of 32 pairs: Hopper kernels compare its numbers as float16, in ``tile/dropout.cuh``."""
    dropout = problem.scores.dropout
    return dropout is not None and dropout.threshold > FLOAT16_INFINITY


def packed_rows(problem: Problem, pressure: Pressure) -> Rows:
    """The rows of fwd_hopper where heads that share a tile have scores of their own."""
    bias = problem.scores.bias
    if bias is None:
        few, half, *others = PACKED_LONG_ROWS if pressure is Pressure.LONG_EXPRESSION else PACKED_ROWS
        is_half = 0 < problem.len_q % others[0].tile_q <= half.tile_q  # the last tile of twice as many
        return few, replace(half, max_len_q=None) if is_half else half, *others
    return PACKED_FLOAT32_ROWS if bias.dtype == "float32" else PACKED_BIAS_ROWS


def pair_rows(kernel: str, architecture: str, dtype: str, pressure: Pressure, bits: bool, dropout: bool) -> Rows:
    """The rows of a kernel for what is asked for each pair; none where it has no registers for it, or does not exist.

    What has no rows of its own beside `bits` of a mask has those that it has alone, and beside `dropout` those of one thing more.
    """
    more = ONE_MORE.get(pressure, Pressure.SEVERAL) if dropout else pressure
    if kernel in HOPPER_TABLES:
        if architecture != "90a" or dtype == "float32":
            return ()
        tables = HOPPER_TABLES[kernel]
        own = tables[bits, dropout].get(pressure)
        return tables[ALONE].get(more, ()) if own is None else own
    kind = "float32" if dtype == "float32" else "half"
    narrower = NARROWER.get((kernel, architecture, kind, more), ())
    widest = max((row.width for row in narrower), default=0)
    rows = PAIR_TABLES.get(kernel, {}).get(architecture, {}).get(kind, ())
    return (*narrower, *(row for row in rows if row.width > widest))
