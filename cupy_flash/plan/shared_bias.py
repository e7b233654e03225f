"""Batch elements that share a bias: fwd_hopper has them take turns, so that the bias is read from memory once for all of them.

Tiles are numbered head after head, and a bias that is larger than the L2 cache would be read again for each batch element. Where
the elements of a group alternate, blocks that run at the same time need the same tile of the bias. They are as many as leave room
in the cache for their keys and values, which other query tiles need.
"""

from __future__ import annotations

import math

from ..problem.forward import Problem
from ..problem.layout import ITEMSIZE
from .schedule import L2_BYTES, TILES_IN_A_ROW

HEADS_AT_WORK = 2  # of each batch element: blocks begin with the next one while others are still in the last


def elements_in_turn(problem: Problem, tiles: int) -> int:
    """How many batch elements alternate; 1 where none share a bias, or where it stays in the L2 cache.

    Parameters
    ----------
    problem : Problem
        With a bias that comes by TMA.
    tiles : int
        Query tiles of all heads and batch elements.
    """
    bias, elements = problem.scores.bias, math.prod(problem.batch)
    shared = all(size == 1 or stride == 0 for size, stride in zip(problem.batch, bias.strides))
    first, end = bias.extent
    if not shared or (end - first) * bias.itemsize <= L2_BYTES:
        return 1
    bytes_of_head = problem.len_kv * sum(x.shape[-1] for x in (problem.k, problem.v)) * ITEMSIZE[problem.dtype]
    most = min(elements, L2_BYTES // (HEADS_AT_WORK * bytes_of_head))
    fitting = (n for n in range(most, 1, -1) if elements % n == 0 and tiles % (n * TILES_IN_A_ROW) == 0)
    return next(fitting, 1)
