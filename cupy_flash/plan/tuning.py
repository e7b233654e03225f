"""Which tile serves which head dim on which architecture: the tuning tables, a reason in each row.

A row applies to every head dim up to its width, the first that fits being taken. No row spills registers (a test compiles
each, `cupy-flash compile` each for every architecture). "Measured" is TFLOP/s of the forward on one H200 in bfloat16 (float32
in the float32 table), 16,384 tokens, hidden 2048, sequence 16,384; rows for other architectures were compiled and run on the
host only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from .architecture import Architecture

WIDTHS = (32, 64, 96, 128, 192, 256)
SHORT = 64  # query lengths served by the rows for short queries
MASKS = ("full", "causal", "window")  # what `Problem.mask` may be


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One line of a tuning table; the fields are explained in ``kernels_cu/config.cuh``."""

    width: int
    tile_q: int
    tile_kv: int
    why: str
    warps: int = 4
    warps_kv: int = 1
    stages: int = 2
    stages_v: int = 2
    stages_q: int = 2
    tma_reduce_dq: bool = False
    tma_store_out: bool = False
    staged_bias: bool = False
    pingpong: bool = False
    producer_warps: int = 1  # of keys in pages, as the next, see `lengths_tuning.in_pages`
    piece: int = 0
    min_blocks: int = 2
    q_tiles: int = 1
    q_in_registers: bool = False
    lazy_rescale: bool = True
    max_len_q: int | None = None  # for at most so many queries
    min_copy: int = 0  # for copies of at least so many bytes: smaller ones need registers for more addresses
    plain_scores: bool = False  # not where scores are scaled one by one, which needs registers as well
    without_sinks: bool = False  # these need registers, too
    without_lengths: bool = False  # and so do sequences of their own lengths, and split keys
    in_order_from: int | None = None  # only where dq is summed in order, and for at least so many queries
    masks: tuple[str, ...] = MASKS  # only for problems with one of these
    width_v: int | None = None  # only for head dims of v up to this

    @property
    def reason(self) -> str:
        """The tile and why it was chosen."""
        return f"tile {self.tile_q}x{self.tile_kv}: {self.why}"

    def serves(self, width: int, width_v: int) -> bool:
        """Whether tiles of the row are wide enough for these head dims, the wider of all and that of v."""
        return self.width >= width and width_v <= (self.width_v or self.width)


Rows = tuple[TileConfig, ...]
FEW_ROWS = "few query rows: a smaller tile computes fewer rows that do not exist"
RARE_RESCALE = "32 rows a warp; rescaling O only when a maximum moves frees registers; measured 376, 355 causal"
TWO_BLOCKS = "32 rows a warp; 64 keys a tile would leave one block an SM; measured 59, 58 causal"
WIDE_KEY_TILES = "16 rows a warp leave room for wide key tiles: queries are split less often; measured 55, 55 causal"
ONE_BLOCK = "O alone takes half the registers: 16 rows a warp, one block an SM"

HALVES_90 = (
    TileConfig(64, 64, 64, FEW_ROWS, max_len_q=SHORT),
    TileConfig(128, 64, 64, FEW_ROWS, max_len_q=SHORT),
    TileConfig(32, 128, 128, "S is the largest fragment and still fits", lazy_rescale=False, plain_scores=True),
    TileConfig(64, 128, 128, "a wide key tile halves the barriers; measured 342, 330 causal", min_copy=16, plain_scores=True),
    TileConfig(64, 128, 64, "128 keys a tile would spill"),
    TileConfig(96, 128, 64, "32 rows a warp: each K and V fragment serves two products"),
    TileConfig(128, 128, 64, RARE_RESCALE, min_copy=16, plain_scores=True, without_lengths=True),
    TileConfig(128, 128, 32, "64 keys a tile would spill", min_copy=4),
    TileConfig(128, 64, 64, "32 rows a warp would spill"),
    TileConfig(192, 128, 64, ONE_BLOCK, warps=8, min_blocks=1),
    TileConfig(256, 128, 64, ONE_BLOCK, warps=8, min_blocks=1),
)
HALVES_80 = (
    TileConfig(64, 64, 64, FEW_ROWS, max_len_q=SHORT),
    TileConfig(128, 64, 64, FEW_ROWS, max_len_q=SHORT),
    TileConfig(32, 128, 128, "S is the largest fragment and still fits", lazy_rescale=False, plain_scores=True),
    TileConfig(
        64, 128, 64, "Q in registers leaves shared memory to K and V", q_in_registers=True, lazy_rescale=False, plain_scores=True
    ),
    TileConfig(96, 128, 64, "32 rows a warp: each K and V fragment serves two products", plain_scores=True),
    TileConfig(96, 128, 48, "scores scaled one by one need registers: wider key tiles, or Q in registers, would spill"),
    TileConfig(128, 128, 32, "32 rows a warp; 64 keys a tile would spill"),
    TileConfig(192, 128, 64, ONE_BLOCK, warps=8, min_blocks=1),
    TileConfig(256, 128, 32, ONE_BLOCK, warps=8, min_blocks=1),
)
HALVES_86 = (
    *HALVES_80[:7],
    TileConfig(192, 64, 32, "99 KB of shared memory: half the queries and keys of sm_80", min_blocks=1),
    TileConfig(256, 64, 32, "99 KB of shared memory: half the queries of sm_80", min_blocks=1),
)
HALVES_120 = tuple(replace(row, without_lengths=row.width in (64, 96, 128) and row.max_len_q is None) for row in HALVES_86)
HALVES_100 = (
    TileConfig(64, 64, 64, FEW_ROWS, max_len_q=SHORT),
    TileConfig(128, 64, 64, FEW_ROWS, max_len_q=SHORT),
    TileConfig(32, 128, 64, "128 keys a tile would spill", lazy_rescale=False),
    TileConfig(64, 128, 64, "128 keys a tile would spill", lazy_rescale=False),
    TileConfig(96, 128, 48, "64 keys a tile would spill"),
    TileConfig(128, 128, 32, "64 keys a tile would spill", without_lengths=True),
    *HALVES_90[-2:],
)
HALVES_75 = (
    TileConfig(64, 64, 64, "16 rows a warp: m16n8k8 products need more registers for the same work"),
    TileConfig(128, 64, 32, "64 KB of shared memory", min_blocks=1),
    TileConfig(256, 64, 16, "64 KB of shared memory", min_blocks=1),
)
FLOAT32_80 = (
    TileConfig(32, 128, 32, "32 rows a warp: each K and V fragment, once split, serves six products"),
    TileConfig(64, 128, 32, TWO_BLOCKS, min_copy=8, without_lengths=True),
    TileConfig(64, 64, 32, "32 rows a warp would spill"),
    TileConfig(128, 128, 48, WIDE_KEY_TILES, warps=8, min_blocks=1),
    TileConfig(192, 64, 16, ONE_BLOCK, min_blocks=1),
    TileConfig(256, 64, 16, ONE_BLOCK, min_blocks=1, without_sinks=True),
    TileConfig(256, 64, 16, "one stage: with sinks, two would spill", stages=1, min_blocks=1),
)
FLOAT32_100 = (
    *(FLOAT32_80[0], FLOAT32_80[2], replace(FLOAT32_80[3], without_lengths=True), FLOAT32_80[4]),
    replace(FLOAT32_80[5], without_sinks=False),
)
FLOAT32_86 = (
    TileConfig(32, 128, 32, "32 rows a warp: each K and V fragment, once split, serves six products"),
    TileConfig(64, 64, 32, "32 rows a warp would spill on sm_120"),
    TileConfig(192, 64, 16, "99 KB of shared memory: narrow key tiles", min_blocks=1),
    TileConfig(256, 32, 16, "99 KB of shared memory: half the queries of sm_80", warps=2, min_blocks=1, without_sinks=True),
    TileConfig(256, 32, 16, "one stage: with sinks, two would spill", warps=2, stages=1, min_blocks=1),
)
FLOAT32_120 = (*FLOAT32_86[:3], replace(FLOAT32_86[3], without_sinks=False))
FLOAT32_75 = (
    TileConfig(32, 64, 32, "every lane holds the operands its own sums need: registers decide", min_blocks=1),
    TileConfig(64, 64, 16, "every lane holds the operands its own sums need: registers decide", min_blocks=1),
    TileConfig(128, 32, 16, "64 KB of shared memory", warps=2, min_blocks=1),
    TileConfig(256, 32, 16, "64 KB of shared memory, so one stage", warps=2, stages=1, min_blocks=1),
)

TABLES: dict[str, dict[str, tuple[TileConfig, ...]]] = {
    "75": {"half": HALVES_75, "float32": FLOAT32_75},
    "80": {"half": HALVES_80, "float32": FLOAT32_80},
    "86": {"half": HALVES_86, "float32": FLOAT32_86},
    "89": {"half": HALVES_86, "float32": FLOAT32_86},
    "90a": {"half": HALVES_90, "float32": FLOAT32_80},
    "100": {"half": HALVES_100, "float32": FLOAT32_100},
    "120": {"half": HALVES_120, "float32": FLOAT32_120},
}

# The forward of FlashAttention 1. O and the softmax state of 16 rows a warp come from memory and go back in every step, which takes
# registers that v2 has for wider tiles.
KEYS_STAY = "as many keys as registers allow: O travels once for each tile of them"
V1_HALVES = (
    TileConfig(64, 64, 128, KEYS_STAY, stages=1, q_tiles=4, lazy_rescale=False),
    TileConfig(128, 64, 64, KEYS_STAY, stages=1, q_tiles=4, lazy_rescale=False),
    TileConfig(256, 64, 32, KEYS_STAY, stages=1, q_tiles=4, min_blocks=1, lazy_rescale=False),
)
V1_FLOAT32 = (
    TileConfig(64, 64, 32, KEYS_STAY, stages=1, q_tiles=4, lazy_rescale=False),
    TileConfig(128, 64, 16, KEYS_STAY, stages=1, q_tiles=4, min_blocks=1, lazy_rescale=False),
    TileConfig(256, 32, 16, KEYS_STAY, warps=2, stages=1, q_tiles=4, min_blocks=1, lazy_rescale=False),
)
V1_FLOAT32_120 = (
    *V1_FLOAT32[:-1],
    TileConfig(256, 32, 16, KEYS_STAY + "; rescaling O in every step would spill", warps=2, stages=1, q_tiles=4, min_blocks=1),
)
V1_HALVES_75 = (
    TileConfig(64, 64, 64, KEYS_STAY, stages=1, q_tiles=4, lazy_rescale=False),
    TileConfig(128, 64, 32, KEYS_STAY, stages=1, q_tiles=4, lazy_rescale=False),
    TileConfig(256, 64, 16, KEYS_STAY, stages=1, q_tiles=4, min_blocks=1, lazy_rescale=False),
)
V1_FLOAT32_75 = (
    TileConfig(64, 64, 16, KEYS_STAY, stages=1, q_tiles=4, min_blocks=1, lazy_rescale=False),
    TileConfig(256, 32, 16, KEYS_STAY, warps=2, stages=1, q_tiles=4, min_blocks=1, lazy_rescale=False),
)

# The forward for sm_90a by TMA and wgmma: one producer warpgroup; each consumer warpgroup owns 64 query rows, O and S in registers.
FOUR_GROUPS = "four groups of 64 rows hide each other's waits, narrow key tiles fit their registers and short sequences"
THREE_GROUPS = "three groups of 64 rows: wide key tiles halve what is done once a tile"
TWO_GROUPS = "two groups of 64 rows; the next query tile begins beneath the end of the last"
ONE_GROUP = "few query rows: one group of 64, none that waits for rows that do not exist"
THREE_STAGES = "two groups of 64 rows, which share three stages of queries: the next tile begins beneath the end of the last"
THREE_NARROW = "three groups of 64 rows hide each other's waits, and narrow key tiles fit their registers"
PINGPONG = "; ping-pong: none waits behind the products of others"
FOUR_CAUSAL = FOUR_GROUPS + PINGPONG + "; measured 435 at 1,024, 571"
CAUSAL, WINDOW = ("causal",), ("window",)
FOUR = {"warps": 20, "stages": 6, "stages_v": 6, "stages_q": 8, "tma_store_out": True, "min_blocks": 1, "plain_scores": True}
THREE = {"warps": 16, "stages": 4, "stages_v": 4, "stages_q": 6, "tma_store_out": True, "min_blocks": 1, "plain_scores": True}
NARROW = {"warps": 16, "stages": 4, "stages_v": 3, "stages_q": 4, "tma_store_out": True, "min_blocks": 1}
TWO, ONE = {"warps": 12, "stages_q": 4, "min_blocks": 1}, {"warps": 8, "stages_q": 2, "min_blocks": 1, "max_len_q": SHORT}
TWO_PINGPONG = {**TWO, "tma_store_out": True, "pingpong": True}
SHARED, WIDE = {"warps": 12, "stages_q": 3, "min_blocks": 1}, {"warps": 12, "stages_q": 2, "min_blocks": 1}
CAPPED = {**FOUR, "plain_scores": False, "pingpong": True, "without_lengths": True}
CAPPED_64 = TileConfig(64, 256, 64, FOUR_GROUPS + PINGPONG + "; measured 371 with a softcap", **CAPPED, without_sinks=True)
HOPPER = (
    TileConfig(64, 64, 128, ONE_GROUP + "; measured 53 us for one query on 65,536 keys of 8 heads", **ONE, stages=4, stages_v=4),
    TileConfig(64, 256, 64, FOUR_GROUPS + "; measured 457 with a window of 1,024 keys at 8,192", **FOUR, masks=WINDOW),
    TileConfig(64, 256, 64, FOUR_CAUSAL, **FOUR, pingpong=True, masks=CAUSAL),
    TileConfig(64, 256, 64, FOUR_GROUPS + PINGPONG + "; measured 590 at 16,384", **FOUR, pingpong=True, max_len_q=16384),
    TileConfig(64, 192, 128, THREE_GROUPS + PINGPONG + "; measured 590", **THREE, pingpong=True),
    CAPPED_64,
    TileConfig(64, 128, 128, TWO_GROUPS + "; three would spill", **TWO, tma_store_out=True),
    TileConfig(128, 64, 128, ONE_GROUP + "; measured 84 us for one query on 65,536 keys of 8 heads", **ONE, stages=3),
    TileConfig(128, 128, 128, TWO_GROUPS + PINGPONG + "; measured 578 at 512", **TWO_PINGPONG, max_len_q=1024),
    TileConfig(128, 128, 128, TWO_GROUPS + PINGPONG + "; measured 691 at 4,096", **TWO_PINGPONG, max_len_q=4096, masks=CAUSAL),
    TileConfig(128, 192, 64, THREE_NARROW + "; measured 777, 762 causal", **NARROW),
    TileConfig(192, 128, 112, THREE_STAGES + PINGPONG + "; measured 731 at 4,096, 760", **SHARED, pingpong=True, width_v=128),
    TileConfig(192, 128, 96, THREE_STAGES + PINGPONG + "; measured 744 at 4,096, 747, 741 causal", **SHARED, pingpong=True),
    TileConfig(256, 64, 64, ONE_GROUP + "; measured 150 us for one query on 65,536 keys of 8 heads", **ONE, stages=3),
    TileConfig(256, 128, 64, THREE_STAGES + "; measured 588 at 512, 776, 781 causal", **SHARED),
)
# Tiles that no row has now: what `bench --sweep` measures besides, since another card or compiler may like them better.
CANDIDATE = "no row of the table"
HOPPER_CANDIDATES = (
    TileConfig(64, 192, 128, CANDIDATE, **THREE),
    TileConfig(128, 128, 128, CANDIDATE, **TWO, tma_store_out=True),
    TileConfig(128, 128, 128, CANDIDATE, **TWO, stages=3, pingpong=True),
    TileConfig(192, 128, 96, CANDIDATE, **SHARED),
    TileConfig(256, 128, 64, CANDIDATE, **SHARED, pingpong=True),
    TileConfig(64, 192, 128, CANDIDATE, warps=16, stages_q=6, tma_store_out=True, min_blocks=1),
    TileConfig(64, 192, 96, CANDIDATE, **THREE),
    TileConfig(64, 128, 192, CANDIDATE, **TWO, tma_store_out=True),
    TileConfig(128, 192, 64, CANDIDATE, **{**NARROW, "stages": 3}),
    TileConfig(128, 192, 80, CANDIDATE, warps=16, stages=3, stages_v=3, stages_q=6, min_blocks=1),
    TileConfig(128, 128, 112, CANDIDATE, **TWO, tma_store_out=True),
    TileConfig(128, 128, 176, CANDIDATE, **WIDE),
    TileConfig(192, 128, 80, CANDIDATE, **WIDE),
    TileConfig(256, 128, 80, CANDIDATE, **WIDE),
)

# The backward. A block owns TILE_KV keys; half of its warps own the gradient of values, half that of keys, so that a warp has
# 2 TILE_KV / WARPS rows: 16, 32 or 64. K and V stay in shared memory, Q and dO pass through STAGES of TILE_Q rows each. All warps
# share the TILE_Q x WIDTH of dQ, in parts of 16 or 32 rows and whole steps of 16 columns, which not every width has for 8 warps.
# "Measured" is of the whole backward, otherwise as above.
THREE_BLOCKS = "32 rows a warp; three small blocks an SM wait for each other less than one large one; measured 302, 305 causal"
WAIT_LESS = "in order: fewer, larger blocks wait for the semaphore less often; measured 284, 281 causal"
WIDE_KEYS = "32 rows a warp: each fragment of Q and dO serves four products; measured 322, 320 causal"
WIDE_ROWS = "16 rows a warp leave room for a gradient of wide rows"
FEW_WARPS = "32 rows a warp, and no more warps than there are parts of dQ"
LITTLE_SHARED = "99 KB of shared memory: narrow tiles"
LEAST_SHARED = "64 KB of shared memory: narrow tiles"

BACKWARD_HALVES_90 = (
    TileConfig(64, 128, 128, WAIT_LESS, warps=8, min_blocks=1, in_order_from=4096, plain_scores=True),
    TileConfig(64, 64, 64, THREE_BLOCKS, min_blocks=3, min_copy=16, plain_scores=True, without_lengths=True),
    TileConfig(64, 64, 64, "32 rows a warp; three blocks an SM would spill"),
    TileConfig(128, 64, 128, WIDE_KEYS, warps=8, min_blocks=1, min_copy=16, plain_scores=True, without_lengths=True),
    TileConfig(128, 64, 64, WIDE_ROWS, warps=8, min_blocks=1),
    TileConfig(256, 32, 64, WIDE_ROWS, warps=8, min_blocks=1),
)
BACKWARD_HALVES_80 = (
    TileConfig(64, 64, 64, "32 rows a warp; two small blocks an SM wait for each other less than one large one"),
    TileConfig(128, 64, 64, WIDE_ROWS, warps=8, min_blocks=1),
    TileConfig(256, 32, 64, WIDE_ROWS, warps=8, min_blocks=1),
)
BACKWARD_HALVES_86 = (
    TileConfig(64, 64, 64, "32 rows a warp", min_blocks=1),
    TileConfig(96, 32, 64, FEW_WARPS, min_blocks=1),
    TileConfig(128, 32, 64, LITTLE_SHARED, warps=8, min_blocks=1),
    TileConfig(256, 32, 32, LITTLE_SHARED, min_blocks=1),
)
BACKWARD_HALVES_75 = (
    TileConfig(64, 32, 64, LEAST_SHARED, min_blocks=1),
    TileConfig(128, 32, 32, LEAST_SHARED, stages=1, min_blocks=1),
    TileConfig(256, 16, 32, LEAST_SHARED, stages=1, min_blocks=1),
)
BACKWARD_FLOAT32_80 = (
    TileConfig(64, 32, 64, FEW_WARPS + "; measured 54 at sequence 4,096", min_blocks=1),
    TileConfig(96, 32, 32, FEW_WARPS, min_blocks=1),
    TileConfig(128, 32, 64, "16 rows a warp; measured 48 at sequence 4,096", warps=8, min_blocks=1),
    TileConfig(256, 16, 32, WIDE_ROWS, min_blocks=1),
)
BACKWARD_FLOAT32_86 = (
    TileConfig(64, 32, 64, FEW_WARPS, min_blocks=1),
    TileConfig(96, 32, 32, FEW_WARPS, min_blocks=1),
    TileConfig(128, 16, 32, LITTLE_SHARED, min_blocks=1),
    TileConfig(192, 16, 32, LITTLE_SHARED, min_blocks=1),
    TileConfig(256, 16, 16, LITTLE_SHARED, warps=2, min_blocks=1),
)
BACKWARD_FLOAT32_120 = (
    *BACKWARD_FLOAT32_86[:-1],
    TileConfig(256, 16, 32, "99 KB of shared memory, so one stage; two stages of 16 keys would spill", stages=1, min_blocks=1),
)
BACKWARD_FLOAT32_75 = (  # at width 256 even a tile of 16 x 16 takes more than 64 KB
    TileConfig(32, 16, 32, FEW_WARPS, warps=2, stages=1, min_blocks=1),
    TileConfig(64, 16, 32, LEAST_SHARED, stages=1, min_blocks=1),
    TileConfig(96, 16, 32, FEW_WARPS, warps=2, stages=1, min_blocks=1),
    TileConfig(128, 16, 32, LEAST_SHARED, stages=1, min_blocks=1),
    TileConfig(192, 16, 16, LEAST_SHARED, warps=2, stages=1, min_blocks=1),
)

V1_TABLES = {name: {"half": V1_HALVES, "float32": V1_FLOAT32} for name in TABLES} | {
    "75": {"half": V1_HALVES_75, "float32": V1_FLOAT32_75},
    "120": {"half": V1_HALVES, "float32": V1_FLOAT32_120},
}
BACKWARD_TABLES: dict[str, dict[str, tuple[TileConfig, ...]]] = {
    "75": {"half": BACKWARD_HALVES_75, "float32": BACKWARD_FLOAT32_75},
    "80": {"half": BACKWARD_HALVES_80, "float32": BACKWARD_FLOAT32_80},
    "86": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_86},
    "89": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_86},
    "90a": {"half": BACKWARD_HALVES_90, "float32": BACKWARD_FLOAT32_80},
    "100": {"half": BACKWARD_HALVES_80, "float32": BACKWARD_FLOAT32_80},
    "120": {"half": BACKWARD_HALVES_86, "float32": BACKWARD_FLOAT32_120},
}
# The backward for sm_90a: a producer warpgroup and two consumers, each of both gradients of 64 keys, or in bwd_hopper_wide of
# one gradient of the same 64; or three in bwd_hopper_mla, one of dv of 128 keys and two of dk of 64.
NARROW_STEPS = "both gradients leave no registers for wider query tiles"
MORE_QUERIES = "long sequences: 80 queries read shared memory less often for each product, and TMA adds dQ"
ONE_GRADIENT = "one gradient a warpgroup; shared memory holds no more keys"
MORE_KEYS = "keys wider than values: 128 of them add half as often to dq; measured 565 at 4,096, 592 at 16,384 causal"
WIDE_STEPS = "wide query tiles halve what is done once a tile; measured 451 at 1,024, 590, 583 causal"
OF_KEYS = {"warps": 12, "min_blocks": 1, "plain_scores": True}
HOPPER_BACKWARD = (
    TileConfig(64, 128, 128, WIDE_STEPS, **OF_KEYS),
    TileConfig(64, 64, 128, "wider query tiles would spill", warps=12, min_blocks=1),
    TileConfig(128, 64, 128, NARROW_STEPS + "; measured 497 at 1,024", **OF_KEYS, max_len_q=1536),
    TileConfig(128, 64, 128, NARROW_STEPS + "; measured 468 at 2,048", **OF_KEYS, max_len_q=4096, masks=("causal",)),
    TileConfig(128, 80, 128, MORE_QUERIES + "; measured 567 at 2,048, 651, 637 causal", **OF_KEYS, tma_reduce_dq=True),
    TileConfig(128, 64, 128, NARROW_STEPS + "; measured 470 at 4,096 with a softcap", warps=12, min_blocks=1),
)
HOPPER_BACKWARD_WIDE = (
    TileConfig(128, 64, 64, "one gradient a warpgroup: both would spill", warps=12, min_blocks=1),
    TileConfig(192, 64, 64, ONE_GRADIENT, warps=12, min_blocks=1),
    TileConfig(256, 64, 64, ONE_GRADIENT + "; measured 391 at 1,024, 510, 496 causal", warps=12, min_blocks=1),
)
HOPPER_BACKWARD_MLA = (TileConfig(192, 48, 128, MORE_KEYS, width_v=128, stages=3, warps=16, min_blocks=1, plain_scores=True),)
KERNEL_TABLES = {
    "fwd_v2": TABLES,
    "fwd_v1": V1_TABLES,
    "fwd_hopper": {"90a": {"half": HOPPER}},
    "bwd_v2": BACKWARD_TABLES,
    "bwd_hopper": {"90a": {"half": HOPPER_BACKWARD}},
    "bwd_hopper_wide": {"90a": {"half": HOPPER_BACKWARD_WIDE}},
    "bwd_hopper_mla": {"90a": {"half": HOPPER_BACKWARD_MLA}},
}
CANDIDATE_TABLES = {"fwd_hopper": {"90a": {"half": HOPPER_CANDIDATES}}}


def table_for(kernel: str, architecture: Architecture, dtype: str) -> tuple[TileConfig, ...]:
    """The rows of a kernel for a dtype on an architecture; none where it does not exist."""
    return _rows(KERNEL_TABLES, kernel, architecture, dtype)


def candidates_for(kernel: str, architecture: Architecture, dtype: str) -> tuple[TileConfig, ...]:
    """The rows of a kernel's table, and those that are only measured."""
    return table_for(kernel, architecture, dtype) + _rows(CANDIDATE_TABLES, kernel, architecture, dtype)


def _rows(tables: dict[str, dict], kernel: str, architecture: Architecture, dtype: str) -> tuple[TileConfig, ...]:
    return tables.get(kernel, {}).get(architecture.name, {}).get("float32" if dtype == "float32" else "half", ())


def row_for(
    kernel: str,
    architecture: Architecture,
    dtype: str,
    width: int,
    len_q: int,
    copy_bytes: int = 16,
    explicit: bool = False,
    in_order: bool = False,
    mask: str = "full",
    width_v: int | None = None,
    sinks: bool = False,
    lengths: bool = False,
    rows: tuple[TileConfig, ...] | None = None,
) -> TileConfig:
    """The first row that is wide enough and meant for so many queries, such copies, scores and masks, and such an order of sums.

    `width` is that of q, k and v, or of the wider ones; `width_v`, if given, that of v. `rows` are those to choose from, in place
    of the kernel's table.

    Raises
    ------
    UnsupportedError
        If none is wide enough.
    """
    rows = table_for(kernel, architecture, dtype) if rows is None else rows
    for row in rows:
        if (
            (row.max_len_q is None or len_q <= row.max_len_q)
            and copy_bytes >= row.min_copy
            and not (explicit and row.plain_scores)
            and not (sinks and row.without_sinks)
            and not (lengths and row.without_lengths)
            and (row.in_order_from is None or (in_order and len_q >= row.in_order_from))
            and mask in row.masks
            and row.serves(width, width_v or width)
        ):
            return row
    raise UnsupportedError(
        f"q: expected head dims of at most {rows[-1].width} in {dtype} for {kernel} on {architecture}, whose "
        f"{architecture.shared_bytes >> 10} KB of shared memory hold no wider tile, got one of up to {width}"
    )
