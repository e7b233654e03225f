"""Tiles of fwd_hopper where a problem has few of them: narrow ones, if the last block ends sooner; as measured on an H200.

A row of the table is the fastest one for many tiles. Of few, the longest decides: one head of 16,384 queries under a causal mask
has 64 tiles of 256 for 132 multiprocessors, and the last of them sees all keys. A narrow tile computes less in a step, which takes
less time, though not as much less. That is so whatever is asked of scores, which takes registers: fewer warps have more of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..problem.forward import Problem
from .columns import PANEL
from .expression_text import ExpressionText, Pressure
from .hopper_splits import GROUP_ROWS, hopper_splits
from .makespan import makespan
from .schedule import BLOCKS, COMBINING, STEPS_BESIDES, costs_of_tiles, make_splits
from .tuning import HOPPER, MASKS, ONE, SHORT, TWO, TileConfig

MOST = 2 * BLOCKS  # query tiles of the table's row: of more, how the last ones end is a small part of what they take
WIDEST = 256  # queries of a tile
PACE = {1: 0.74, 2: 1.0, 3: 1.45, 4: 1.63}  # what a key takes, by groups of 64 rows, in what it takes two of them
NARROW_KEYS, NARROW_PACE = 64, 1.15  # of a tile of one or two groups up to WIDE, and times what it takes with twice as many
WIDE = 128  # head dims
CAPPED_PACE = 1.1  # times what one group takes: a softcap has no products of another one to hide beneath
WORTH = 0.97  # of the time of the table's row, at most
WHY = "few query tiles: of narrow ones the last block ends sooner"
OF_TABLE = {(64, 64), (64, 192), (128, 128), (128, 64), (256, 64)}  # widths and queries of its rows that serve any mask
ROWS = (
    *(replace(row, why=WHY) for row in HOPPER if row.masks == MASKS and (row.width, row.tile_q) in OF_TABLE),
    TileConfig(64, 128, 128, WHY, **TWO, pingpong=True),
)
LIGHT = (Pressure.NOTHING, Pressure.LOOKUPS, Pressure.EXPRESSION, Pressure.MASK, Pressure.READING_MASK, Pressure.LONG_MASK)
FEW_GROUPS = {1: ONE, 2: TWO}


def row_of_few_tiles(problem: Problem, row: TileConfig, others: tuple[TileConfig, ...]) -> TileConfig:
    """The row with which the last block ends first, if that is much sooner than with the table's.

    Parameters
    ----------
    problem : Problem
        As the kernel is told it.
    row : TileConfig
        That of the table.
    others : tuple of TileConfig
        Its `narrower` ones.

    Returns
    -------
    TileConfig
    """
    if not others:
        return row
    heads = problem.heads_q * math.prod(problem.batch)
    return min((row, *others), key=lambda other: _until_all_end(problem, other, heads) * (WORTH if other is row else 1))


def narrower(
    problem: Problem, tile_q: int, table: tuple[TileConfig, ...], expressions: ExpressionText, explicit: bool, parts: int
) -> tuple[TileConfig, ...]:
    """The rows of fewer queries than a tile of the table, or none: where these are many, or sequences have lengths of their own.

    Nor beside results in float32, for which the one of wide heads would spill.

    Parameters
    ----------
    problem : Problem
        As the kernel is told it.
    tile_q : int
    table : tuple of TileConfig
        The rows for what is asked.
    expressions : ExpressionText
    explicit : bool
        Whether scores are scaled one by one.
    parts : int
        Numbers of float16 in place of each element, or 0.
    """
    tiles = problem.heads_q * math.prod(problem.batch) * -(-problem.len_q // tile_q)
    wider_results = problem.has_wider_results and not parts
    if problem.lengths is not None or wider_results or problem.shares_device or problem.mask.queries is not None:
        return ()
    masked = problem.scores.masks_pairs  # which leaves tiles nobody knows here how little
    if not 0 < tiles <= (MOST // 2 if masked else MOST) or not problem.len_kv or problem.len_q <= SHORT:
        return ()
    width = max(problem.dim, problem.dim_v)
    rows = tuple(other for other in rows_that_hold(problem, table, expressions, parts) if other.serves(width, problem.dim_v))
    fit = min((other.width for other in rows), default=0)
    return tuple(
        other
        for other in rows
        if other.width == fit and (2 * GROUP_ROWS if masked else GROUP_ROWS) <= other.tile_q < tile_q
        if problem.mask.shape in other.masks
        if not (explicit and other.plain_scores) and not (problem.sinks and other.without_sinks)
    )


def rows_that_hold(
    problem: Problem, table: tuple[TileConfig, ...], expressions: ExpressionText, parts: int
) -> tuple[TileConfig, ...]:
    """Rows of all widths, whose registers and shared memory hold what is asked of scores.

    Wide heads leave one group of rows no registers for more than a term. Of 96 or 112 keys one group would spill as well, and two
    are not faster. Of numbers in parts above a panel it holds no softcap either, nor what pairs read but for a bias by TMA.
    """
    pressure, alone = expressions.pressure, not parts and problem.scores.dropout is None
    if alone and not problem.scores:
        return ROWS
    if alone and (pressure in LIGHT or expressions.kind == "SCALED"):
        narrow = pressure is Pressure.EXPRESSION
        return tuple(row for row in ROWS if row.tile_q <= 2 * GROUP_ROWS and not (narrow and row.width > WIDE))
    own = tuple(replace(row, why=WHY) for row in table if parts or row.tile_kv % GROUP_ROWS == 0)
    if alone and pressure is Pressure.TERM:
        return ROWS[-1], *own
    reads = pressure not in (Pressure.NOTHING, Pressure.TERM) and not any(row.staged_bias for row in own)
    widest = PANEL if parts and (reads or problem.softcap is not None) else WIDE
    few = ((row, groups) for row in own for groups in FEW_GROUPS if row.width <= widest)
    return *own, *(_of_groups(row, groups) for row, groups in few if groups * GROUP_ROWS < row.tile_q)


def _of_groups(row: TileConfig, groups: int) -> TileConfig:
    """The same of fewer groups of rows, each of which has as many registers or more, and less in shared memory."""
    knobs = FEW_GROUPS[groups]
    stages_q = min(row.stages_q, knobs["stages_q"])
    pingpong = row.pingpong and groups > 1
    return replace(
        row, tile_q=groups * GROUP_ROWS, why=WHY, warps=knobs["warps"], stages_q=stages_q, pingpong=pingpong, max_len_q=None
    )


def _until_all_end(problem: Problem, row: TileConfig, heads: int) -> float:
    """When the last block ends, in what two groups take for a key."""
    costs = costs_of_tiles(problem.mask, row.tile_q, row.tile_kv)
    pace, combining = PACE[row.tile_q // GROUP_ROWS] * row.tile_kv, 0
    if row.tile_kv <= NARROW_KEYS and row.tile_q <= 2 * GROUP_ROWS and row.width <= WIDE:
        pace *= NARROW_PACE
    if row.tile_q == GROUP_ROWS and problem.softcap is not None:
        pace *= CAPPED_PACE
    splits = make_splits(heads * len(costs), problem.len_kv, row.tile_kv, BLOCKS) if hopper_splits(problem, row)[0] else None
    if splits is None:
        steps = makespan(sorted(costs.tolist() * heads, reverse=True), BLOCKS)
    else:
        steps, combining = splits.by_formula * float(costs.max()) + splits.key_tiles + STEPS_BESIDES, COMBINING
    return pace * steps + combining
