"""Rows rotated by the angles of their positions: `rotate` from arguments to launch."""

from __future__ import annotations

import functools
from typing import Any

import numpy

from ..errors import shown
from ..machine.execution import Execution
from ..machine.operands import Operands
from ..machine.prepared import Prepared, architecture_for, cached
from ..plan.kernel import KernelPlan
from ..plan.rotate import make_rotate_plan, rotate_launches
from ..plan.rotation_params import rotate_params
from ..plan.workspace import Workspace
from ..problem import arrays
from ..problem.rotate import ROTATE_ARRAYS, RotateProblem, make_rotate_problem
from .indices import by_value, check_range, of_positions, read_by_host

FIRST = "first_position"  # the kernel's name for a position that is told by its value


class RotatePlan(Prepared):
    """A rotation with everything decided.

    Attributes
    ----------
    problem : RotateProblem
    """

    def __init__(self, problem: RotateProblem, kernel: KernelPlan | None) -> None:
        self.problem = problem
        device = problem.x.device
        execution = None
        if kernel is not None:
            names = (*ROTATE_ARRAYS, FIRST)
            launches, params = rotate_launches(kernel, problem), rotate_params(kernel, problem)
            execution = Execution(kernel, launches, params, names, Workspace(), device)
        super().__init__(dict(zip(ROTATE_ARRAYS, problem.seen)), ("out",), problem.backend, device, execution)

    def __str__(self) -> str:
        x, rotation = self.problem.seen[0], self.problem.rotation
        pairs = f"{rotation.pairs} pairs of {'neighbours' if rotation.interleaved else 'halves'}"
        return f"rotation of {x.dtype}, shape {x.shape}, {pairs}, on backend {self._backend!r}"

    def run(self, given: Operands, first: int | None, known: dict[str, numpy.ndarray]) -> Any:
        """Rotate arrays that are known to have the layouts planned for.

        Parameters
        ----------
        given : Operands
        first : int or None
            Position of the first row, where there is no array of them.
        known : dict of str to numpy.ndarray
            Positions in host memory.
        """
        self._check_values(first, known.get("positions"))
        out = given.views[-1]
        if out is not None:
            addresses = list(given.addresses)
            if addresses[0] == addresses[-1] and self.problem.seen[0] == self.problem.seen[-1]:
                addresses[0] = 0  # in place
            self._check_apart(addresses, None)
        computed = self._where_planned(self._compute, given, first or 0)
        return arrays.give_back(computed, given.arrays[0], "x") if out is None else given.arrays[-1]

    def _check_values(self, first: int | None, positions: numpy.ndarray | None) -> None:
        """Refuse positions without angles, of those that the host can read."""
        p = self.problem
        seq, ends = p.x.shape[-2], p.rotation.ends
        if 0 in p.x.shape:
            return
        if positions is not None and p.rotation.of_each:
            check_range("positions", positions, 0, ends, of_positions(ends))
        elif positions is not None:
            check_range("positions", positions, 0, ends - seq + 1, of_positions(ends, seq))
        elif first is not None and not 0 <= first <= ends - seq:
            raise ValueError(f"positions: expected {of_positions(ends, seq)}, got {shown(first)}")
        elif p.rotation.positions is None and seq + (first or 0) > ends:
            raise ValueError(f"cos: expected at least {seq} rows, for as many rows of x without positions, got {ends}")

    def _compute(self, given: Operands, first: int) -> Any:
        x, cos, sin, positions, out = given.views
        *addresses, at_out = given.addresses
        if out is None:
            out = arrays.empty(self.problem.seen[-1])
            at_out = arrays.pointer(out)
        if self._backend == "cuda":
            self._execution.on_device.launch([*addresses, at_out, first])
        elif self._backend == "host":
            self._execution.run_on_host([x, cos, sin, positions, out, first], None)
        else:
            from ..machine.numpy_path.rotate import rotated  # late: a GPU does not need it

            p = self.problem
            x, to_out = (arrays.in_order(a if a.ndim > 2 else a[None], p.layout) for a in (x, out))
            rows = numpy.arange(x.shape[-2])
            of_rows = rows + first if positions is None else positions if p.rotation.of_each else positions[..., None] + rows
            to_out[...] = rotated(x, cos, sin, of_rows, p.rotation.interleaved)
        return out


def rotate(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool, layout: str, backend: str, out: Any) -> Any:
    """What the public function of this name returns; a plan once made for equal layouts is found again."""
    first, positions = by_value("positions", positions)
    given = Operands(ROTATE_ARRAYS, (x, cos, sin, positions, out), required=3, results=1)
    *_, device = given.descriptions[0]
    known = read_by_host(ROTATE_ARRAYS, given, device)
    options = {"interleaved": interleaved, "layout": layout, "backend": backend}
    return cached(_prepared, tuple(given.descriptions), options).run(given, first, known)


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], named: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> RotatePlan:
    layouts = [d and arrays.layout_of(d, name) for d, name in zip(descriptions, ROTATE_ARRAYS)]
    problem = make_rotate_problem(*layouts, **dict(named))
    architecture = architecture_for(problem.backend, problem.x.device)
    return RotatePlan(problem, None if architecture is None else make_rotate_plan(problem, architecture))
