"""What a forward is launched with: its grids, its workspace, and how blocks share query tiles. Pure functions of plan and problem.

The problem is what the kernel is told, see `packing`.
"""

from __future__ import annotations

import math

from ..problem.forward import Problem
from .kernel import KernelPlan
from .launch import Launch, checked
from .schedule import TABLE_BLOCKS, least_split
from .sequences import elements_of, tiles_of
from .split import KeySplits, combining_blocks, key_splits, most_splits, partial_rows
from .workspace import Workspace

LISTED_ITEM_BYTES = 8  # the first row of a query tile, and a count
WORK_ITEM_BYTES = {"fwd_v2": 8, "fwd_hopper": 32}  # sequence and row of a query tile, and for a persistent block, where that lies


def forward_launches(plan: KernelPlan, problem: Problem) -> tuple[Launch, ...]:
    """The grid of a forward: so many query tiles a block, for each head and batch element.

    The problem is what the kernel is told, see `packing`. In fwd_hopper it is the most that there can be: blocks stay, and
    how many tiles they share depends on how many of them a device holds, see `schedule_params`. Where something else has to run
    meanwhile, each has one tile: messages keep multiprocessors on the ranks where they have begun until they have on all, and
    of blocks that stay, those that find none would begin when the others have done all their tiles. With sequences of their
    own lengths they stay all the same: they take tiles as they go, and one that begins late finds fewer left. But of few tiles
    each has one.
    """
    c, entries = plan.config, plan.entries
    tiles = _tiles(plan, problem) * problem.heads_q
    if plan.file == "fwd_v2":
        return _launches_v2(plan, problem, tiles)
    (entry, shared_bytes), *others = entries.items()
    if plan.file != "fwd_hopper":
        blocks = -(-tiles_of(problem, c.TILE_Q, "q") // c.Q_TILES) * elements_of(problem, "q") * problem.heads_q
        return (checked(Launch(entry, blocks, shared_bytes)),)
    if c.VARLEN or c.IN_TURN:
        most, launches = most_splits(plan, problem), []
        if not c.UNLISTED:
            launches = [Launch(entry, (1 if c.VARLEN else math.prod(problem.batch)) * (tiles > 0), shared_bytes)]
            (entry, shared_bytes), *others = others
        launches.append(Launch(entry, tiles * most, shared_bytes, None if c.UNLISTED else c.MIN_BLOCKS))
        blocks = combining_blocks(plan, tiles, problem.len_q) * (most > 1)
        return tuple(map(checked, (*launches, *(Launch(name, blocks, of_block) for name, of_block in others))))
    if not c.SPLIT_KV:
        return (checked(Launch(entry, tiles, shared_bytes, None if problem.shares_device else c.MIN_BLOCKS)),)
    splits = -(-problem.len_kv // (c.TILE_KV * least_split(c.TILE_KV)))
    [(combine, combine_bytes)] = others
    combining = combining_blocks(plan, min(tiles, TABLE_BLOCKS - 1), problem.len_q)
    return checked(Launch(entry, tiles * splits, shared_bytes, c.MIN_BLOCKS)), Launch(combine, combining, combine_bytes)


def _launches_v2(plan: KernelPlan, problem: Problem, tiles: int) -> tuple[Launch, ...]:
    most = most_splits(plan, problem)
    blocks = {
        "fwd_v2_schedule": int(tiles > 0),
        "fwd_v2": tiles * most,
        "fwd_v2_combine": combining_blocks(plan, tiles, problem.len_q) * (most > 1),
    }
    return tuple(checked(Launch(entry, blocks[entry], shared)) for entry, shared in plan.entries.items())


def forward_workspace(plan: KernelPlan, problem: Problem) -> Workspace:
    """What a forward keeps in device memory: of v1 O, l and m of every row; of fwd_hopper out and lse of splits to be combined."""
    c = plan.config
    tiles = _tiles(plan, problem) * problem.heads_q
    if plan.file == "fwd_v1":
        return Workspace((("state", 4 * (c.TILE_Q * c.WIDTH_V + 2 * c.TILE_Q) * tiles),))
    most, work, counters = most_splits(plan, problem), [], []
    if c.VARLEN and not c.UNLISTED and (plan.file == "fwd_hopper" or not c.SPLIT_KV):
        work = [("work", WORK_ITEM_BYTES[plan.file] * (1 + _tiles(plan, problem) * most))]
    if c.IN_TURN:
        work = [("work", LISTED_ITEM_BYTES * (math.prod(problem.batch) + _tiles(plan, problem)))]
    if not c.SPLIT_KV or (plan.file == "fwd_v2" and most == 1):
        return Workspace(tuple(work))
    # In fwd_hopper each part but the first has its own tile or its own block, and fewer tiles are shared than there are blocks.
    if plan.file == "fwd_v2":
        rows = tiles * most * min(c.TILE_Q, problem.len_q)
    else:
        parts = tiles * most * (most > 1) if c.VARLEN else min(tiles, TABLE_BLOCKS - 1) + TABLE_BLOCKS
        rows = parts * partial_rows(plan, problem.len_q)
    counters = [("arrivals", 8 * tiles)] if c.LAST_COMBINES else []
    return Workspace((*work, ("out_partials", 4 * rows * c.WIDTH_V), ("lse_partials", 4 * rows), *counters))


def forward_splits(plan: KernelPlan, problem: Problem) -> KeySplits | None:
    """How blocks share query tiles, if that follows from one sequence alone."""
    return key_splits(plan, problem, _tiles(plan, problem) * problem.heads_q)


def _tiles(plan: KernelPlan, problem: Problem) -> int:
    """Query tiles of a head, of all batch elements."""
    return tiles_of(problem, plan.config.TILE_Q, "q") * elements_of(problem, "q")
