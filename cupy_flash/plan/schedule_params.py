"""What the blocks of a device do one after the other: `schedule`, told to fwd_hopper once it is known how many blocks there are."""

from __future__ import annotations

from dataclasses import replace

import numpy

from ..problem.mask import Mask
from .kernel import KernelPlan
from .launch import Launch
from .params import fast_divmod
from .schedule import NONE, Schedule, costs_of_tiles, listed_costs, make_schedule, make_splits
from .split import combining_blocks, partial_rows


def scheduled(
    plan: KernelPlan, params: numpy.ndarray, launches: tuple[Launch, ...], mask: Mask | None
) -> tuple[numpy.ndarray, tuple[Launch, ...]]:
    """Parameters and launches of fwd_hopper on a device; those of other kernels, and where blocks take tiles in turn, as they are.

    Parameters
    ----------
    plan : KernelPlan
    params : numpy.ndarray
        From `hopper_forward_params`.
    launches : tuple of Launch
        With as many blocks as the device holds.
    mask : Mask or None
        None only of a kernel that is not fwd_hopper.

    Returns
    -------
    params : numpy.ndarray
        They say as well which query tiles, and which parts of those that are shared, each block takes.
    launches : tuple of Launch
        Merging as many tiles as are shared, and left out if none is.
    """
    c = plan.config
    if plan.file != "fwd_hopper" or c.VARLEN or c.IN_TURN or mask is None or not launches:
        return params, launches
    params = params.copy()
    p = params[0]
    computing, combining = launches if c.SPLIT_KV else (*launches, None)
    len_q, len_kv = mask.len_q, mask.len_kv
    schedule, splits = Schedule(), None
    if c.SPLIT_KV:
        splits = make_splits(int(p["tiles"]), len_kv, c.TILE_KV, computing.blocks)
    elif not c.PACK_GQA:  # tiles of several heads are equally long
        costs = costs_of_tiles(mask, c.TILE_Q, c.TILE_KV)
        bytes_of_head = 2 * len_kv * (int(p["dim"]) + int(p["dim_v"])) / int(p["heads_per_kv"])
        if c.TILE_LIST and costs.min() == costs.max():
            costs = costs * listed_costs(len(costs))
        if costs.min() < costs.max():
            heads, in_turn = int(p["tiles"]) // len(costs), int(p["in_turn_divmod"]["divisor"])
            schedule = make_schedule(costs, heads, len_kv, bytes_of_head, computing.blocks, in_turn)
    p["run"], p["by_formula"], p["table"] = schedule.run, schedule.by_formula, NONE
    for block, tiles in enumerate(schedule.table):
        p["table"][block, : len(tiles)] = tiles
    if splits is None:
        return params, (computing,)
    p["by_formula"], p["first_split_tile"], p["split_tiles"] = splits.by_formula, splits.first, splits.tiles
    p["key_tiles_per_block"], p["partial_rows"] = splits.key_tiles, partial_rows(plan, len_q)
    p["key_tiles_divmod"] = fast_divmod(-(-len_kv // c.TILE_KV))
    return params, (computing, replace(combining, blocks=combining_blocks(plan, splits.tiles, len_q)))
