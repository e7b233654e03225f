"""Whether blocks of fwd_hopper share query tiles, each with some of the keys.

Where all sequences are alike, it is those tiles that whole rounds leave over, see `schedule`. With lengths of their own, it is all
of a sequence that has few: a prompt of a hundred tokens goes on behind thousands of keys, and its query tiles are fewer than a
device has multiprocessors. How many blocks share one of these follows from the heads and the queries of one sequence, and how many
keys each has from how many the sequence has (``kernels_cu/tile/key_splits.cuh``): neither other sequences nor the size of a cache
decide the bits of a result.
"""

from __future__ import annotations

import math

from ..problem.forward import Problem
from ..problem.layout import in_order
from .packing import FEW
from .schedule import BLOCKS, COMBINING, LEAST_SPLIT, costs_of_tiles, splits_pay
from .sequences import elements_of, mean_room, tiles_of
from .tuning import TileConfig

GROUP_ROWS = 64  # of queries: what the four warps of a group multiply together
EVEN = 0.75  # of the longest query tile that the shortest has to have
SPLIT_KEYS = 1024  # of a split of a sequence, at least: of fewer, what it leaves to be combined counts
MORE_KEYS = 8192  # the same of more queries of a head, of which batches have tiles for all blocks: there it only costs, and little
WIDE = 128  # head dim, above which a block computes as many scores of several groups in twice the time, and leaves twice as much
MOST_OF_TILE = 32  # splits of a query tile
TILE_ROWS = 192  # of queries, about: what a block has at most head dims
# Head dims up to which fwd_v2 multiplies so many rows of a key head as fast as it reads keys.
MOST_OF_V2 = ((32, 64), (64, 32), (192, 16), (256, 32))
MOST_OF_V2_FLOAT32 = 127
ROUNDS = 2  # of blocks with a split each, or a tile of few keys, which take no longer than a list of these would before
SHORT_KEYS = 512
WHY = "split keys: blocks share the query tiles that whole rounds leave over"
WHY_SEQUENCE = "split keys: a sequence has fewer query tiles than there are blocks; {keys} keys each or more, by its length alone"


def hopper_splits(problem: Problem, row: TileConfig) -> tuple[bool, str]:
    """Whether blocks of fwd_hopper may share query tiles, and why.

    Parameters
    ----------
    problem : Problem
        As the kernel is told it.
    row : TileConfig
    """
    if problem.shares_device:
        return False, ""
    if problem.lengths is not None:
        shares = shares_tiles_of_sequence(problem)
        return shares, WHY_SEQUENCE.format(keys=keys_of_split(problem)) * shares
    shares = _shares_tiles(problem, row)
    return shares, WHY * shares


def _shares_tiles(problem: Problem, row: TileConfig) -> bool:
    """Whether tiles are long, and about equally so."""
    mask, shortest, longest = problem.mask, problem.len_kv, problem.len_kv
    if mask.queries is None:  # or else every tile has rows of several heads, and all are alike
        shortest, longest = (mask.some(row, 1)[1] for row in (0, problem.len_q - 1))
    if problem.scores.masks_pairs and problem.len_q > GROUP_ROWS:  # of many queries, each tile may see other keys, and few
        return False
    window = mask.queries is None and mask.hides_first
    if window or problem.len_kv < LEAST_SPLIT + COMBINING or shortest < EVEN * longest:
        return False
    if shortest < longest:
        costs, heads = costs_of_tiles(mask, row.tile_q, row.tile_kv), problem.heads_q * math.prod(problem.batch)
        return bool(costs.min() == costs.max()) or splits_pay(costs, heads, problem.len_kv, row.tile_kv)
    return True


def shares_tiles_of_sequence(problem: Problem) -> bool:
    """Whether a sequence has so few query tiles that blocks share them. In windows a tile sees few keys.

    Parameters
    ----------
    problem : Problem
        As the kernel is told it, with lengths.
    """
    plain = not problem.scores and problem.mask.left is None
    return plain and not problem.lengths.of_queries and _blocks_of_tile(problem) > 1


def fills_tiles(problem: Problem) -> bool:
    """Whether the rows of a key head are enough for tiles of fwd_hopper, of few queries that fwd_v2 computes as well.

    A block of fwd_hopper takes longer to begin and to combine, which is all that counts where a sequence alone has few rows and
    keys, and reads keys at the rate of memory where fwd_v2 multiplies longer. Nobody knows yet how many sequences there will be.
    """
    most = next((rows for dim, rows in MOST_OF_V2 if max(problem.dim, problem.dim_v) <= dim), 0)
    most = MOST_OF_V2_FLOAT32 if problem.dtype == "float32" else most
    return problem.len_q > most and shares_tiles_of_sequence(problem)


def keys_of_split(problem: Problem) -> int:
    """Keys of a split of a sequence, at least."""
    if in_order(problem.seen_out.shape, problem.layout)[-2] > FEW:
        return MORE_KEYS
    return SPLIT_KEYS * (2 if max(problem.dim, problem.dim_v) > WIDE and problem.len_q > GROUP_ROWS else 1)


def each_has_own(problem: Problem, tile_q: int, split: bool) -> bool:
    """Whether sequences have so few query tiles all together, or splits of these, that each has a block of its own.

    Blocks of those that are not there end at once; a launch before, which would put all in order, takes 4 µs. But blocks that stay
    begin a tile beneath the end of another one, which counts where tiles are long and some blocks have two.
    """
    tiles = tiles_of(problem, tile_q, "q") * elements_of(problem, "q") * problem.heads_q
    most = splits_of_sequence(problem) if split else 1
    long = not split and mean_room(problem, "kv") > SHORT_KEYS
    rounds = min(ROUNDS, 1) if long else ROUNDS
    return tiles * most <= rounds * BLOCKS


def splits_of_sequence(problem: Problem) -> int:
    """How many splits a query tile has at most, in the cache at hand."""
    return max(min(problem.len_kv // keys_of_split(problem), _blocks_of_tile(problem)), 1)


def _blocks_of_tile(problem: Problem) -> int:
    """So many that a sequence alone keeps all multiprocessors busy."""
    tiles = problem.heads_q * -(-problem.len_q // TILE_ROWS)
    return min(BLOCKS // tiles, MOST_OF_TILE) if tiles else 1
