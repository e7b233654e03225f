"""Tiles of fwd_hopper where a problem has few of them: narrow ones, if the last block ends sooner; as measured on an H200.

A row of the table is the fastest one for many tiles. Of few, the longest decides: one head of 16,384 queries under a causal mask
has 64 tiles of 256 for 132 multiprocessors, and the last of them sees all keys. A narrow tile computes less in a step, which takes
less time, though not as much less.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..problem.forward import Problem
from .hopper_splits import GROUP_ROWS, hopper_splits
from .makespan import makespan
from .schedule import BLOCKS, COMBINING, STEPS_BESIDES, costs_of_tiles, make_splits
from .tuning import HOPPER, MASKS, SHORT, TWO, TileConfig

MOST = 2 * BLOCKS  # query tiles of the table's row: of more, how the last ones end is a small part of what they take
WIDEST = 256  # queries of a tile
PACE = {1: 0.74, 2: 1.0, 3: 1.45, 4: 1.63}  # what a key takes, by groups of 64 rows, in what it takes two of them
WORTH = 0.97  # of the time of the table's row, at most
WHY = "few query tiles: of narrow ones the last block ends sooner"
OF_TABLE = {(64, 192), (64, 64), (128, 128), (128, 64), (256, 64)}  # widths and queries of its rows that serve any mask
ROWS = (
    *(replace(row, why=WHY) for row in HOPPER if row.masks == MASKS and (row.width, row.tile_q) in OF_TABLE),
    TileConfig(64, 128, 128, WHY, **TWO, pingpong=True),
)


def row_of_few_tiles(problem: Problem, row: TileConfig, explicit: bool) -> TileConfig:
    """The row with which the last block ends first, if that is much sooner than with the table's.

    Parameters
    ----------
    problem : Problem
        As the kernel is told it.
    row : TileConfig
        That of the table.
    explicit : bool
        Whether scores are scaled one by one, or numbers are in parts: such rows are others.

    Returns
    -------
    TileConfig
    """
    heads = problem.heads_q * math.prod(problem.batch)
    others = () if explicit else narrower(problem, row.tile_q)
    if not others:
        return row
    return min((row, *others), key=lambda other: _until_all_end(problem, other, heads) * (WORTH if other is row else 1))


def narrower(problem: Problem, tile_q: int) -> tuple[TileConfig, ...]:
    """The rows of fewer queries than a tile of the table, or none: where tiles are many, or something is asked of pairs.

    Nor beside results in float32, for which the one of wide heads would spill.
    """
    tiles = problem.heads_q * math.prod(problem.batch) * -(-problem.len_q // tile_q)
    asked = problem.scores or problem.softcap is not None or problem.lengths is not None
    if asked or problem.has_wider_results or problem.shares_device or problem.mask.queries is not None or problem.len_q <= SHORT:
        return ()
    if not 0 < tiles <= MOST or not problem.len_kv:
        return ()
    width = max(problem.dim, problem.dim_v)
    fit = min(row.width for row in ROWS if row.width >= width)
    return tuple(row for row in ROWS if row.width == fit and row.tile_q < tile_q)


def _until_all_end(problem: Problem, row: TileConfig, heads: int) -> float:
    """When the last block ends, in what two groups take for a key."""
    costs = costs_of_tiles(problem.mask, row.tile_q, row.tile_kv)
    pace, combining = PACE[row.tile_q // GROUP_ROWS] * row.tile_kv, 0
    splits = make_splits(heads * len(costs), problem.len_kv, row.tile_kv, BLOCKS) if hopper_splits(problem, row)[0] else None
    if splits is None:
        steps = makespan(sorted(costs.tolist() * heads, reverse=True), BLOCKS)
    else:
        steps, combining = splits.by_formula * float(costs.max()) + splits.key_tiles + STEPS_BESIDES, COMBINING
    return pace * steps + combining
