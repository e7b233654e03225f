"""Gradients and their kernel -> what a backward executes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..machine.execution import Execution
from ..plan.backward import backward_launches, backward_maps, backward_workspace
from ..plan.fp16_parts import given_name
from ..plan.gradient_parts import in_gradient_parts, making_of_gradient_parts
from ..plan.grouping import make_grouping
from ..plan.params import backward_params, names_of_given
from ..plan.query_parts import in_parts
from ..plan.workspace import joined
from ..problem.backward import BACKWARD_ARRAYS, BackwardProblem
from .forward import classified
from .score_gradients import names_stored

if TYPE_CHECKING:
    from ..plan.kernel import KernelPlan
    from ..plan.read_gradients import ReadGradientPlan


def backward_executions(
    problem: BackwardProblem, kernel: KernelPlan, keeps_tiles: bool
) -> tuple[Execution, tuple[tuple[str, Execution], ...]]:
    """The kernel with its launches, parameters and memory, and behind it what computes the gradients of each read, by its name.

    Parameters
    ----------
    problem : BackwardProblem
    kernel : KernelPlan
    keeps_tiles : bool
        Whether a call is given what has been found of the tiles of its mask.
    """
    p, split = problem.forward, in_parts(problem)
    if kernel.config.FIRST_STORES:  # where a head has one tile of keys, also without being asked for an order
        split = replace(split, deterministic=True)
    told, making = in_gradient_parts(split, kernel.config.FP16_PARTS), making_of_gradient_parts(kernel, split)
    launches, maps = backward_launches(kernel, told), backward_maps(kernel, told)
    params = backward_params(told, make_grouping(kernel, told), maps)
    names = (*BACKWARD_ARRAYS, *names_of_given(p))
    stored = tuple(f"d{name}" for name in names_stored(kernel))
    plans: tuple[ReadGradientPlan, ...] = ()
    if problem.wrt:
        from ..plan.read_gradients import read_gradient_plans  # late: it takes the language of expressions

        plans = read_gradient_plans(problem, kernel)
    workspace = joined((backward_workspace(kernel, told), *(plan.workspace for plan in plans)))
    found = classified(kernel, p, by_keys=True, in_order=problem.deterministic)
    of_kernel = (*(map(given_name, names) if making else names), *stored)
    execution = Execution(kernel, launches, params, of_kernel, workspace, p.device, maps, None, found, keeps_tiles, making)
    of_reads = (
        (plan.part.name, Execution(plan.kernel, plan.launches, plan.params, (*names, "gradient"), workspace, p.device, plan.maps))
        for plan in plans
    )
    return execution, tuple(of_reads)
