"""Attention results over different keys, made into the one over all of them: `merge_states` from arguments to launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from ..errors import shown
from ..machine.execution import Execution
from ..machine.operands import Operands
from ..machine.prepared import Prepared, architecture_for, cached
from ..plan.kernel import KernelPlan
from ..plan.merge import merge_launches, merge_plan
from ..plan.params import merge_params
from ..plan.workspace import Workspace
from ..problem import arrays
from ..problem.merge import MERGE_ARRAYS, MergeProblem, check_states, make_merge_problem

State: TypeAlias = tuple[Any, Any]  # a result and its log-sum-exp, of some keys


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

    def run(self, given: Operands) -> State:
        """Merge arrays that are known to have the layouts planned for, into NumPy or CuPy arrays."""
        return self._where_planned(self._compute, given)

    def where_planned(self, compute: Callable[[], State]) -> State:
        """What a function returns that runs with the plan's device as the current one."""
        return self._where_planned(compute)

    def _compute(self, given: Operands) -> State:
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


def merge(states: tuple[Any, ...], named: dict[str, Any], layout: str, backend: str) -> State:
    """What `merge_states` returns; a plan once made for equal layouts is found again."""
    names, given = _listed(states, named)
    operands = Operands(names, given, required=len(given), results=0)
    options = {"layout": layout, "backend": backend}
    if len(given) == 4:
        results = cached(_prepared, tuple(operands.descriptions), {**options, "names": names}).run(operands)
    else:
        layouts = [arrays.layout_of(description, name) for description, name in zip(operands.descriptions, names)]
        check_states(layouts, names, **options)
        results = _many(list(zip(operands.views[::2], operands.views[1::2])), options)
    out, lse = (arrays.give_back(result, given[0], names[0]) for result in results)
    return out, lse


def _listed(states: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The out and the lse of each state, behind what error messages call them."""
    pairs = [isinstance(state, (tuple, list)) for state in states]
    if not any(pairs) and (len(states) == 4 or (named and len(states) < 4)):
        flat = dict(zip(MERGE_ARRAYS, states))
        twice = flat.keys() & named.keys()
        if twice:
            raise TypeError(f"{min(twice)}: expected one array, got two, of which one by position")
        flat |= named
        return MERGE_ARRAYS[:4], tuple(flat.get(name) for name in MERGE_ARRAYS[:4])  # None is refused by name
    if named:
        raise TypeError(f"{min(named)}: expected out_a, lse_a, out_b and lse_b and no other states")
    if not states:
        raise ValueError("states: expected at least one, got none")
    for i, (state, is_pair) in enumerate(zip(states, pairs)):
        if not is_pair or len(state) != 2:
            got = f"{len(state)} of them" if is_pair else shown(state) if isinstance(state, str) else type(state).__name__
            raise TypeError(f"states[{i}]: expected a pair of arrays, (out, lse), got {got}")
    return tuple(f"states[{i}][{j}]" for i in range(len(states)) for j in (0, 1)), tuple(x for pair in states for x in pair)


def _many(states: list[State], options: dict[str, str]) -> State:
    """Any number of checked states merged: neighbours first, by halves, and float32 at least in between."""
    (out, lse), last = states[0], states[-1]
    plan, _ = _planned(states[0], last, options)

    def tree(states: list[State]) -> State:
        if len(states) == 1:
            [(out, lse)] = states
            return (out if out.dtype.itemsize > 2 else out.astype("float32")), lse
        half = (len(states) + 1) // 2
        return _pair(tree(states[:half]), tree(states[half:]), options)

    def compute() -> State:
        if len(states) == 1:  # beside one that saw no key, so that here too what has weight 0 is left out
            nothing = lse.copy()
            nothing[...] = float("-inf")
            return _pair(last, (out, nothing), options)
        wide, merged = tree(states)
        if wide.dtype == out.dtype:
            return wide, merged
        rounded = arrays.empty(plan.problem.out)
        rounded[...] = wide
        return rounded, merged

    return plan.where_planned(compute)


def _pair(a: State, b: State, options: dict[str, str]) -> State:
    plan, given = _planned(a, b, options)
    return plan.run(given)


def _planned(a: State, b: State, options: dict[str, str]) -> tuple[MergePlan, Operands]:
    given = Operands(MERGE_ARRAYS, (*a, *b), required=4, results=0)
    return cached(_prepared, tuple(given.descriptions), options), given


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], named: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> MergePlan:
    layouts = [arrays.layout_of(d, name) for d, name in zip(descriptions, MERGE_ARRAYS)]
    problem = make_merge_problem(*layouts, **dict(named))
    architecture = architecture_for(problem.backend, problem.out.device)
    return MergePlan(problem, None if architecture is None else merge_plan(architecture, problem.out.dtype))
