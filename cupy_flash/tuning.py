"""Which tile serves which head dim on which architecture: the tuning tables, a reason in each row.

A row applies to every head dim up to its width, the first that fits being taken. No row spills registers (a test compiles them
all). "Measured" is TFLOP/s of the forward on one H200 in bfloat16 (float32 in the float32 table), 16,384 tokens, hidden 2048,
sequence 16,384; rows for other architectures were compiled and run on the host only.
"""

from __future__ import annotations

from dataclasses import dataclass

from .architecture import Architecture

WIDTHS = (32, 64, 96, 128, 192, 256)
SHORT = 64  # query lengths served by the rows for short queries


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a tuning table; the fields are explained in ``kernels_cu/config.cuh``."""

    width: int
    tile_q: int
    tile_kv: int
    why: str
    warps: int = 4
    stages: int = 2
    min_blocks: int = 2
    q_in_registers: bool = False
    lazy_rescale: bool = True
    max_len_q: int | None = None  # for at most so many queries
    min_copy: int = 0  # for copies of at least so many bytes: smaller ones need registers for more addresses
    plain_scores: bool = False  # not where scores are scaled one by one, which needs registers as well


FEW_ROWS = "few query rows: a smaller tile computes fewer rows that do not exist"
ONE_BLOCK = "O alone takes half the registers: 16 rows a warp, one block an SM"

HALVES_90 = (
    Row(64, 64, 64, FEW_ROWS, max_len_q=SHORT),
    Row(128, 64, 64, FEW_ROWS, max_len_q=SHORT),
    Row(32, 128, 128, "S is the largest fragment and still fits", lazy_rescale=False),
    Row(64, 128, 128, "a wide key tile halves the barriers; measured 342, 330 causal", min_copy=16, plain_scores=True),
    Row(64, 128, 64, "128 keys a tile would spill"),
    Row(96, 128, 64, "32 rows a warp: each K and V fragment serves two products"),
    Row(
        128,
        128,
        64,
        "32 rows a warp; rescaling O only when a maximum moves frees registers; measured 376, 355 causal",
        min_copy=16,
        plain_scores=True,
    ),
    Row(128, 128, 32, "64 keys a tile would spill", min_copy=4),
    Row(128, 64, 64, "32 rows a warp would spill"),
    Row(192, 128, 64, ONE_BLOCK, warps=8, min_blocks=1),
    Row(256, 128, 64, ONE_BLOCK, warps=8, min_blocks=1),
)
HALVES_80 = (
    Row(64, 64, 64, FEW_ROWS, max_len_q=SHORT),
    Row(128, 64, 64, FEW_ROWS, max_len_q=SHORT),
    Row(32, 128, 128, "S is the largest fragment and still fits", lazy_rescale=False),
    Row(64, 128, 64, "Q in registers leaves shared memory to K and V", q_in_registers=True, lazy_rescale=False),
    Row(96, 128, 64, "32 rows a warp: each K and V fragment serves two products"),
    Row(128, 128, 32, "32 rows a warp; 64 keys a tile would spill"),
    Row(192, 128, 64, ONE_BLOCK, warps=8, min_blocks=1),
    Row(256, 128, 32, ONE_BLOCK, warps=8, min_blocks=1),
)
HALVES_86 = (
    *HALVES_80[:6],
    Row(192, 64, 32, "99 KB of shared memory: half the queries and keys of sm_80", min_blocks=1),
    Row(256, 64, 32, "99 KB of shared memory: half the queries of sm_80", min_blocks=1),
)
HALVES_100 = (
    Row(64, 64, 64, FEW_ROWS, max_len_q=SHORT),
    Row(128, 64, 64, FEW_ROWS, max_len_q=SHORT),
    Row(32, 128, 64, "128 keys a tile would spill", lazy_rescale=False),
    Row(64, 128, 64, "128 keys a tile would spill", lazy_rescale=False),
    Row(96, 128, 48, "64 keys a tile would spill"),
    Row(128, 128, 32, "64 keys a tile would spill"),
    *HALVES_90[-2:],
)
HALVES_75 = (
    Row(64, 64, 64, "16 rows a warp: m16n8k8 products need more registers for the same work"),
    Row(128, 64, 32, "64 KB of shared memory", min_blocks=1),
    Row(256, 64, 16, "64 KB of shared memory", min_blocks=1),
)
FLOAT32_80 = (
    Row(32, 128, 32, "32 rows a warp: each K and V fragment, once split, serves six products"),
    Row(64, 128, 32, "32 rows a warp; 64 keys a tile would leave one block an SM; measured 59, 58 causal", min_copy=8),
    Row(64, 64, 32, "32 rows a warp would spill"),
    Row(
        128,
        128,
        48,
        "16 rows a warp leave room for wide key tiles: queries are split less often; measured 55, 55 causal",
        warps=8,
        min_blocks=1,
    ),
    Row(192, 64, 16, ONE_BLOCK, min_blocks=1),
    Row(256, 64, 16, ONE_BLOCK, min_blocks=1),
)
FLOAT32_100 = (FLOAT32_80[0], *FLOAT32_80[2:])
FLOAT32_86 = (
    Row(32, 128, 32, "32 rows a warp: each K and V fragment, once split, serves six products"),
    Row(64, 64, 32, "32 rows a warp would spill on sm_120"),
    Row(192, 64, 16, "99 KB of shared memory: narrow key tiles", min_blocks=1),
    Row(256, 32, 16, "99 KB of shared memory: half the queries of sm_80", warps=2, min_blocks=1),
)
FLOAT32_75 = (
    Row(32, 64, 32, "every lane holds the factors its own sums need: registers decide", min_blocks=1),
    Row(64, 64, 16, "every lane holds the factors its own sums need: registers decide", min_blocks=1),
    Row(128, 32, 16, "64 KB of shared memory", warps=2, min_blocks=1),
    Row(256, 32, 16, "64 KB of shared memory, so one stage", warps=2, stages=1, min_blocks=1),
)

TABLES: dict[str, dict[str, tuple[Row, ...]]] = {
    "75": {"half": HALVES_75, "float32": FLOAT32_75},
    "80": {"half": HALVES_80, "float32": FLOAT32_80},
    "86": {"half": HALVES_86, "float32": FLOAT32_86},
    "89": {"half": HALVES_86, "float32": FLOAT32_86},
    "90a": {"half": HALVES_90, "float32": FLOAT32_80},
    "100": {"half": HALVES_100, "float32": FLOAT32_100},
    "120": {"half": HALVES_86, "float32": FLOAT32_86},
}


def table_for(architecture: Architecture, dtype: str) -> tuple[Row, ...]:
    """The rows for a dtype on an architecture."""
    return TABLES[architecture.name]["float32" if dtype == "float32" else "half"]


def row_for(
    architecture: Architecture, dtype: str, width: int, len_q: int, copy_bytes: int = 16, explicit: bool = False
) -> Row:
    """The first row that is wide enough and meant for this many queries, these copies and such scores."""
    return next(
        row
        for row in table_for(architecture, dtype)
        if row.width >= width
        and (row.max_len_q is None or len_q <= row.max_len_q)
        and copy_bytes >= row.min_copy
        and not (explicit and row.plain_scores)
    )
