"""Short heads: where blocks of bwd_hopper take all keys of a head, one tile after the other, and head after head."""

from __future__ import annotations

import math

from ..problem.backward import BackwardProblem
from .grouping import RUNNING, finishes_queries, key_tiles
from .kernel import KernelPlan

WHY = "a block takes all keys of a head, and has its sums of dq for itself"
# The time of a key tile beside that of one with a block of its own, measured on an H200 where blocks of both are busy to the end:
# by key tiles of a head, without a mask and with one that hides some pairs. Of heads up to NARROW, of wider ones, and of groups.
NARROW = 64
OF_NARROW = {1: (0.63, 0.65), 2: (0.85, 0.83), 3: (0.91, 0.86), 4: (0.98, 0.91), 5: (math.inf, 0.93)}
OF_WIDE = {1: (0.71, 0.78), 2: (0.92, 0.83), 3: (1.09, 0.93)}
OF_GROUPS = {1: (0.70, 0.79), 2: (0.93, 0.80), 3: (1.11, 0.90)}
WORTH = 0.98  # of the time, from which on a head has a block for each key tile


def takes_whole_heads(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether blocks take heads in turn, rather than that each key tile has a block of its own.

    Nobody else adds to the sums of dq then: they need not be zero before, are the same in any order, and are dq when the last key
    tile has been worked at; of one key tile there are none. What a block takes next is on its way beneath what it does. Of long
    heads, sums and queries of as many heads as run at once do not stay in the L2 cache; and few heads leave multiprocessors idle.

    Parameters
    ----------
    plan : KernelPlan
        As it would be otherwise.
    problem : BackwardProblem
    """
    p, c = problem.forward, plan.config
    crowded = c.TILE_LIST or c.STORE_DBIAS or c.TMA_REDUCE_DQ
    if plan.file != "bwd_hopper" or crowded or p.lengths is not None or not finishes_queries(plan, problem):
        return False
    by_lanes = c.SCORES == "PLUS_LINEAR" or (c.SCORES == "PLUS_TERM" and not c.STAGED_BIAS)
    if c.WIDTH > NARROW and (c.DROPOUT or by_lanes):  # there are no registers for what blocks keep from one key tile to the next
        return False
    tiles, heads = key_tiles(plan, problem), p.heads_kv * math.prod(p.batch)
    paces = OF_GROUPS if p.heads_per_kv > 1 else OF_NARROW if c.WIDTH <= NARROW else OF_WIDE
    if tiles not in paces:
        return False
    pace = paces[tiles][p.mask.shape != "full"]
    return -(-heads // RUNNING) * tiles * pace <= WORTH * -(-heads * tiles // RUNNING)
