"""Two attention results over different keys, made into the one over all of them: `merge_states` from arguments to launch."""

from __future__ import annotations

import functools
from typing import Any

from ..machine.execution import Execution, Operands, Prepared, architecture_for, cached
from ..plan.kernel import KernelPlan
from ..plan.merge import merge_launches, merge_plan
from ..plan.params import merge_params
from ..plan.workspace import Workspace
from ..problem import arrays
from ..problem.merge import MERGE_ARRAYS, MergeProblem, make_merge_problem


class MergePlan(Prepared):
    """A merge with everything decided.

    Attributes
    ----------
    problem : MergeProblem
    """

    def __init__(self, problem: MergeProblem, kernel: KernelPlan | None) -> None:
        self.problem = problem
        device = problem.out.device
        execution = None
        if kernel is not None:
            launches = merge_launches(kernel, problem)
            execution = Execution(kernel, launches, merge_params(problem), MERGE_ARRAYS, Workspace(), device)
        layouts = {name: getattr(problem, name) for name in MERGE_ARRAYS}
        super().__init__(layouts, ("out", "lse"), problem.backend, device, execution)

    def __str__(self) -> str:
        out = self.problem.out
        return f"merge of two results of {out.dtype}, shape {out.shape}, on backend {self._backend!r}"

    def run(self, given: Operands) -> tuple[Any, Any]:
        """Merge arrays that are known to have the layouts planned for."""
        out, lse = self._where_planned(self._compute, given)
        like = given.arrays[0]
        return arrays.give_back(out, like, "out_a"), arrays.give_back(lse, like, "out_a")

    def _compute(self, given: Operands) -> tuple[Any, Any]:
        results = [arrays.empty(layout) for layout in (self.problem.out, self.problem.lse)]
        if self._backend == "cuda":
            self._execution.on_device.launch([*given.addresses, *map(arrays.pointer, results)])
        elif self._backend == "host":
            self._execution.run_on_host([*given.views, *results], None)
        else:
            from ..machine.numpy_path import merge as numpy_merge  # late: a GPU does not need it

            for result, merged in zip(results, numpy_merge.merged(*given.views)):
                result[...] = merged
        return tuple(results)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, layout: str, backend: str) -> tuple[Any, Any]:
    """What `merge_states` returns; a plan once made for equal layouts is found again."""
    given = Operands(MERGE_ARRAYS, (out_a, lse_a, out_b, lse_b), required=4, results=0)
    return cached(_prepared, tuple(given.descriptions), {"layout": layout, "backend": backend}).run(given)


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], named: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> MergePlan:
    layouts = [arrays.layout_of(d, name) for d, name in zip(descriptions, MERGE_ARRAYS)]
    problem = make_merge_problem(*layouts, **dict(named))
    architecture = architecture_for(problem.backend, problem.out.device)
    return MergePlan(problem, None if architecture is None else merge_plan(architecture, problem.out.dtype))
