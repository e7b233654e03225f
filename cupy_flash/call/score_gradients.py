"""Where gradients of what scores read go, and all gradients of a call by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.kernel import KernelPlan
from ..plan.stored_dbias import visits_all_pairs
from ..problem import arrays
from ..problem.backward import BackwardProblem, Gradients
from ..problem.layout import dense_layout
from ..problem.scores import label


def argument_of(problem: BackwardProblem) -> dict[str, str]:
    """What messages call that which gradients are asked for beside those of the inputs, by its name in `wrt`."""
    captured_names = problem.forward.scores.captured
    return {name: label(name) if name in captured_names else name for name in problem.wrt}


def new_results(problem: BackwardProblem, kernel: KernelPlan | None) -> dict[str, Any]:
    """Arrays for the gradients that were asked for beside those of the inputs, by the names of what they are of.

    They are zeros, unless they are overwritten. That of a number is an array of shape () where the others are, since reading it
    would wait for the device.
    """
    device, unset, results = problem.forward.device, overwritten(problem, kernel), {}
    for name, argument in argument_of(problem).items():
        layout = problem.layout_of(argument)
        if name in unset:
            results[name] = arrays.empty(dense_layout(layout.shape, reversed(range(len(layout.shape))), layout.dtype, device))
        else:
            results[name] = arrays.zeros(layout.shape, layout.dtype, device)
    return results


def names_stored(kernel: KernelPlan | None) -> tuple[str, ...]:
    """Of what the kernel of the other gradients stores the gradient as well."""
    return ("bias",) * (kernel is not None and kernel.config.STORE_DBIAS)


def overwritten(problem: BackwardProblem, kernel: KernelPlan | None) -> tuple[str, ...]:
    """Those of them of which it stores each element, so that there need not be zeros before."""
    return names_stored(kernel) * visits_all_pairs(problem)


def by_name(of_inputs: Sequence[Any], dsinks: Any, of_scores: dict[str, Any], captured_names: tuple[str, ...]) -> Gradients:
    """All gradients, of which those of what scores read have the names of that."""
    own = {name: of_scores.get(name) for name in ("bias", "alibi_slopes") if name not in captured_names}
    darrays = {name: x for name, x in of_scores.items() if name in captured_names}
    return Gradients(*of_inputs, dsinks=dsinks, dbias=own.get("bias"), dalibi_slopes=own.get("alibi_slopes"), darrays=darrays)
