"""Sequences of their own lengths in fwd_hopper: how many heads take turns with the list of query tiles before the next ones do.

The list has the longest tiles first, of whichever sequence, so that blocks at work have tiles of many sequences. If all heads took
turns with each of them, few of these would be of the same head, and keys and values would come from device memory again and again.
Of a few heads they stay in the L2 cache. But the last heads need tiles enough for all blocks, or some would be idle at the end.
"""

from __future__ import annotations

from ..problem.forward import Problem
from ..problem.layout import ITEMSIZE
from .schedule import L2_BYTES
from .sequences import elements_of

LEAST_TILES = 512  # of those heads: about four for each block


def query_heads_together(problem: Problem, tile_q: int) -> int:
    """A divisor of the query heads, and if keys are shared, so many as share them, or several times as many.

    In a model of 132 blocks and 30 MB, with documents of 32,768 tokens and 16 heads of 128, keys and values are read from memory
    six times if all heads take turns, and once if two do; blocks are busy for 0.998 of the time in both, and for 0.95 with one.

    Parameters
    ----------
    problem : Problem
        With `lengths`, of which it is known how many rows there is room for.
    tile_q : int
    """
    heads, shared = problem.heads_q, max(problem.heads_per_kv, 1)
    tiles = -(-elements_of(problem, "q") * problem.len_q // tile_q)
    elements = problem.len_kv * sum(x.shape[-1] for x in (problem.k, problem.v))
    bytes_of_head = elements_of(problem, "kv") * elements * ITEMSIZE[problem.dtype] / shared
    divisors = [n for n in range(shared, heads + 1, shared) if heads % n == 0]
    least = next((n for n in divisors if n * tiles >= LEAST_TILES), heads)
    return max([n for n in divisors if n * bytes_of_head <= L2_BYTES or n <= least], default=1)


def listed_heads_together(problem: Problem, elements: int = 1) -> int:
    """The same of each batch element where query tiles have lists of key tiles: as many as stay in the L2 cache, or share keys.

    `elements` batch elements take turns as well, and their keys and values stay there too.

    More would be better dealt out, since a block takes a tile when it begins the one before; but keys would come from memory.
    """
    heads, shared = problem.heads_q, max(problem.heads_per_kv, 1)
    bytes_of_head = problem.len_kv * sum(x.shape[-1] for x in (problem.k, problem.v)) * ITEMSIZE[problem.dtype] / shared
    divisors = [n for n in range(shared, heads + 1, shared) if heads % n == 0]
    return max([n for n in divisors if n * elements * bytes_of_head <= L2_BYTES], default=shared)
