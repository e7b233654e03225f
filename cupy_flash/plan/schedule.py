"""Which query tiles each block of fwd_hopper takes: a pure function of the problem's lengths and the number of blocks.

There are no more blocks than a device holds at a time, and each takes one query tile after the other, by a formula of the kernel
(``kernels_cu/tile/scheduler.cuh``). Under a causal mask, and at the ends of a window, tiles differ in length, and a formula leaves
some blocks with two more than others. So the last ones are dealt out one by one, the longest first, each to the block that has
least to do (Graham, 1969), and the kernel is handed the outcome as a table.

Where tiles are equally long, what whole rounds leave over, or all tiles if there are fewer than blocks, would keep some blocks busy
and the others idle. Those tiles are split among all blocks: each computes some of their keys, and the partials are combined.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy

from ..problem.mask import Mask

BLOCKS = 132  # of an H100 or H200, by which a plan is made that does not know its device
TABLE_BLOCKS = 136  # more than an sm_90 has multiprocessors, which are 132 at most, each of which holds one block
TABLE_TILES = 9  # of a block; the last one is empty, so that every block finds its end
NONE = 0xFFFF  # an entry without a tile
ALL_TILES = 2**31 - 1
ROUNDS_BY_TABLE = (1, 2, 3)  # so many rounds, of two tiles for each block, and what is left over after the last whole one
BUSY = 0.99  # of the time in which the block that takes longest works, all blocks do: good enough
ROUNDS_COUNTED = 1024  # of those by the formula: what earlier ones leave uneven is little beside them
TILES_IN_A_ROW = 2  # of one head and batch element, a long and a short one, also where batch elements take turns
L2_BYTES = 32 << 20  # of what all blocks of an sm_90 read or add to, that stay in its L2 cache
STEPS_BESIDES = 1  # what beginning and ending a query tile takes, in steps of one key tile
LEAST_SPLIT = 512  # keys of a split: one of fewer takes longer to begin and to combine than to compute
COMBINING = 896  # what beginning, writing, reading and combining partials takes, in keys that a block computes meanwhile
COUNTED = 2**31  # key tiles that a kernel numbers: it divides no larger numbers, see `fast_divmod`
MANY_KEYS = 4096  # from which on a tile computes enough to hide that they come from device memory


@dataclass(frozen=True)
class Schedule:
    """The order of a block's tiles.

    Parameters
    ----------
    run : int
        Each block takes so many neighbouring tiles at a time, one after the other: 1, or 2, a long and a short one.
    by_formula : int
        So many work tiles of each block follow the formula, and the rest the table.
    table : tuple of tuple of int
        For each block the other tiles, by their distance from the first of them.
    """

    run: int = 1
    by_formula: int = ALL_TILES
    table: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Splits:
    """The query tiles that are split along their keys among the blocks.

    Parameters
    ----------
    by_formula : int
        So many work tiles of each block, whole ones, come before.
    first : int
        Number of the first shared tile.
    tiles : int
        How many are shared.
    key_tiles : int
        Of theirs, one query tile's after the other's, each block takes so many.
    """

    by_formula: int
    first: int
    tiles: int
    key_tiles: int


def least_split(tile_kv: int) -> int:
    """The fewest key tiles of a split."""
    return -(-LEAST_SPLIT // tile_kv)


def make_splits(tiles: int, len_kv: int, tile_kv: int, blocks: int) -> Splits | None:
    """Share out the query tiles that whole rounds leave over; None where that saves less than it costs.

    Parameters
    ----------
    tiles : int
        Query tiles of all heads and batch elements, equally long.
    len_kv, tile_kv : int
        Keys, and how many of them a tile has.
    blocks : int
    """
    rounds, left = divmod(tiles, blocks)
    key_tiles = -(-len_kv // tile_kv)
    split = max(-(-left * key_tiles // blocks), least_split(tile_kv))
    if not left or split * tile_kv + COMBINING > len_kv or blocks > TABLE_BLOCKS or split * blocks >= COUNTED:
        return None
    return Splits(rounds, rounds * blocks, left, split)


def splits_pay(costs: numpy.ndarray, heads: int, len_kv: int, tile_kv: int, blocks: int = BLOCKS) -> bool:
    """Whether blocks are done sooner where they share what whole rounds leave over than where all tiles are dealt out.

    Rounds of unequal tiles by formula give some blocks longer ones than others, which a schedule evens out.

    Parameters
    ----------
    costs, heads, len_kv, blocks
        As in `make_schedule`.
    tile_kv : int
    """
    splits = make_splits(heads * len(costs), len_kv, tile_kv, blocks)
    if splits is None:
        return False
    counted = min(splits.by_formula, ROUNDS_COUNTED)
    whole = _in_order(costs)[numpy.arange(splits.first - counted * blocks, splits.first) % len(costs)]
    longest = whole.reshape(counted, blocks).sum(0).max() if counted else 0.0
    shared = longest + splits.key_tiles + STEPS_BESIDES + COMBINING / tile_kv
    dealt_out = (counted + 1) * costs.mean() if counted else costs.max()
    return bool(shared <= dealt_out)


def _in_order(costs: numpy.ndarray) -> numpy.ndarray:
    """The tiles of a head as `tile_coord` numbers them."""
    place = numpy.arange(len(costs))
    return costs[numpy.where(place % 2, place // 2, len(costs) - 1 - place // 2)]


def costs_of_tiles(mask: Mask, tile_q: int, tile_kv: int) -> numpy.ndarray:
    """How long each query tile of a head takes, in steps of one key tile."""
    return mask.tiles_of_keys(tile_q, tile_kv) + STEPS_BESIDES


def listed_costs(tiles: int) -> numpy.ndarray:
    """What to deal out the query tiles of a head by where only a device will know how many key tiles each has (TILE_LIST).

    They count as nearly equal, so that each block gets as many, but are dealt out as if later ones were longer: masks of tokens in
    time mostly make them so, and what is in order at random may be dealt out in any order.
    """
    return 1 + numpy.arange(tiles) / (64 * tiles)


def make_schedule(costs: numpy.ndarray, heads: int, len_kv: int, bytes_of_head: float, blocks: int, in_turn: int = 1) -> Schedule:
    """Deal out the query tiles of all heads.

    Parameters
    ----------
    costs : numpy.ndarray, shape (tiles of a head,)
        How long each tile of a head takes, the first rows first, in any unit.
    heads : int
        Of all batch elements together.
    len_kv : int
    bytes_of_head : float
        Of keys and values, for each query head.
    blocks : int
    in_turn : int
        Batch elements whose tiles alternate, two at a time.
    """
    tiles_of_head = len(costs)
    tiles = heads * tiles_of_head
    if tiles <= blocks:
        return Schedule()
    if blocks > TABLE_BLOCKS:
        return Schedule(run=2)
    in_order = _in_order(costs)

    # Longest first means heads in turn, and keys of all heads in the table are read again and again.
    def stays_in_cache(rounds: int) -> bool:
        return len_kv >= MANY_KEYS or (tiles - rounds * 2 * blocks) / tiles_of_head * bytes_of_head <= L2_BYTES

    most = tiles // (2 * blocks)
    fewer = [max(most - by_table, 0) for by_table in ROUNDS_BY_TABLE]
    longest, best = math.inf, Schedule(run=2)
    for rounds in list(filter(stays_in_cache, fewer)) or filter(stays_in_cache, [most]):
        load, schedule = _deal_out(in_order, tiles, rounds, blocks, in_turn)
        if load < longest:
            longest, best = load, schedule
        if BUSY * longest * blocks <= heads * costs.sum():
            break
    return best


def place_in_order(number: numpy.ndarray, in_turn: int) -> numpy.ndarray:
    """Where these tiles are of a group of batch elements in turn, counting those of one element, as in `tile_coord`."""
    return number // (TILES_IN_A_ROW * in_turn) * TILES_IN_A_ROW + number % TILES_IN_A_ROW


def _deal_out(in_order: numpy.ndarray, tiles: int, rounds: int, blocks: int, in_turn: int) -> tuple[float, Schedule]:
    """What remains after so many rounds of two tiles, the longest first, and how long the block takes that takes longest."""
    tiles_of_head, first = len(in_order), rounds * 2 * blocks
    counted = min(rounds, ROUNDS_COUNTED)
    by_formula = in_order[place_in_order(numpy.arange(first - counted * 2 * blocks, first), in_turn) % tiles_of_head]
    loads = by_formula.reshape(counted, blocks, 2).sum((0, 2), dtype=float)
    left = in_order[place_in_order(numpy.arange(first, tiles), in_turn) % tiles_of_head]

    least = [(load, block) for block, load in enumerate(loads)]
    heapq.heapify(least)
    taken: list[list[int]] = [[] for _ in range(blocks)]
    for tile in numpy.argsort(-left, kind="stable").tolist():
        load, block = heapq.heappop(least)
        taken[block].append(tile)
        loads[block] = load + left[tile]
        if len(taken[block]) < TABLE_TILES - 1:
            heapq.heappush(least, (loads[block], block))
    return loads.max(), Schedule(2, 2 * rounds, tuple(map(tuple, taken)))
