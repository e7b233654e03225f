"""A problem and its kernel -> what a forward executes. Loaded with the first plan that has a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..machine.execution import Execution
from ..plan.forward_launches import forward_launches, forward_splits, forward_workspace
from ..plan.forward_maps import forward_maps
from ..plan.fp16_parts import given_name, in_fp16_parts, making_of_parts
from ..plan.packing import packing_of, with_inner_heads
from ..plan.params import forward_params, hopper_forward_params, names_of_given
from ..problem.forward import FORWARD_ARRAYS, Problem

if TYPE_CHECKING:
    from ..plan.kernel import KernelPlan
    from ..plan.preparation import Preparation

__all__ = ["forward_execution", "packing_of"]


def forward_execution(
    problem: Problem, packed: Problem, kernel: KernelPlan, tiles: Preparation | None, keeps_tiles: bool
) -> Execution:
    """The kernel with its launches, parameters and memory.

    Parameters
    ----------
    problem : Problem
    packed : Problem
        The same as the kernel sees it, where heads of a group share tiles.
    kernel : KernelPlan
    tiles : Preparation or None
        What finds the tiles that it visits, if it does not visit all.
    keeps_tiles : bool
        Whether a call is given what that found.
    """
    told = with_inner_heads(in_fp16_parts(packed, kernel.config.FP16_PARTS), kernel.config.INNER_HEADS)
    launches, workspace = forward_launches(kernel, told), forward_workspace(kernel, told)  # they refuse what is too large
    maps = forward_maps(kernel, told)
    splits = forward_splits(kernel, told)
    if maps:
        params = hopper_forward_params(told, maps, kernel.config.TILE_Q, kernel.config.TILE_KV, splits)
    else:
        params = forward_params(told, splits)
    parts = making_of_parts(kernel, packed)
    arrays = map(given_name, FORWARD_ARRAYS) if parts else FORWARD_ARRAYS
    names = (*arrays, *names_of_given(problem))
    return Execution(kernel, launches, params, names, workspace, problem.device, maps, told.mask, tiles, keeps_tiles, parts)
