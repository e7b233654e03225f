"""Two attention results over different keys, made into the one over all of them: `merge_states` from arguments to launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from . import arrays, reference
from .architecture import Architecture
from .errors import UnsupportedError
from .execution import Execution, Operands, Prepared, architecture_for, kept
from .layout import AXES, HEADS_OF_LSE, ITEMSIZE, Layout, dense_layout, in_order, result_layout
from .options import Options
from .params import MERGE_ARRAYS, merge_params
from .plan import Launch, Plan, check_kind, checked, configure
from .problem import check_operand, check_place, lse_dtype_of
from .tuning import TileConfig
from .workspace import Workspace

TILE = TileConfig(32, 16, 16, "a warp merges whole rows, of any width", stages=1, min_blocks=1)


@dataclass(frozen=True, slots=True)
class MergeProblem:
    """Two results to merge, checked. The layouts are as the user sees them."""

    out_a: Layout
    lse_a: Layout
    out_b: Layout
    lse_b: Layout
    out: Layout
    lse: Layout
    backend: str

    @property
    def layouts(self) -> dict[str, Layout]:
        """The arrays with all axes that the kernel counts, in order."""
        shape = (1,) * (3 - len(self.out.shape)) + self.out.shape
        return {name: getattr(self, name).broadcast_to(shape if name.startswith("out") else shape[:-1]) for name in MERGE_ARRAYS}


def make_merge_problem(out_a: Layout, lse_a: Layout, out_b: Layout, lse_b: Layout, layout: str, backend: str) -> MergeProblem:
    """Check the arguments of `merge_states`.

    Raises
    ------
    TypeError, ValueError
        For arguments that no implementation could accept.
    UnsupportedError
        For float64 where kernels compute.
    """
    if out_a.dtype not in ITEMSIZE:
        raise TypeError(f"out_a: expected float16, bfloat16, float32 or float64, got {out_a.dtype}")
    options = Options(layout=layout, backend=backend)
    order = options.resolve_layout()
    if len(out_a.shape) < 2:
        raise ValueError(f"out_a: expected at least 2 axes, {AXES[order]}, got shape {out_a.shape}")
    shape, device = out_a.shape, out_a.device
    check_place("out_a", out_a, device, "out_a")
    check_operand("out_b", out_b, shape, out_a.dtype, device, "out_a")
    lse_dtype = lse_dtype_of(out_a.dtype)
    for name, given in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_operand(name, given, shape[:-1], lse_dtype, device, "out_a")
    backend = options.resolve_backend(device)
    if out_a.dtype == "float64" and backend != "numpy":
        raise UnsupportedError(
            f"out_a: expected float16, bfloat16 or float32 on backend {backend!r}, got float64, "
            "which only backend 'numpy' computes, from arrays in host memory"
        )
    # In memory the rows of a head lie together, as `attention` leaves them.
    rows = in_order(shape[:-1], order, HEADS_OF_LSE)
    lse = dense_layout(rows, reversed(range(len(rows))), lse_dtype, device).in_order(order, HEADS_OF_LSE)
    return MergeProblem(out_a, lse_a, out_b, lse_b, result_layout(out_a, shape), lse, backend)


def merge_plan(architecture: Architecture, dtype: str) -> Plan:
    """The kernel for a dtype; nothing else is compiled into it."""
    check_kind(architecture, "out_a", dtype)
    config = configure(TILE, architecture, dtype, "ieee", TILE.width, TILE.width, copy_bytes=0)
    return Plan("merge", architecture, config, (f"{TILE.tile_q} rows a block: {TILE.why}",))


def merge_launches(plan: Plan, problem: MergeProblem) -> tuple[Launch, ...]:
    """The grid of a merge: so many rows a block, for each head and batch element."""
    *batch, heads, len_q, _ = problem.layouts["out"].shape
    [(entry, shared_bytes)] = plan.entries.items()
    return (checked(Launch(entry, -(-len_q // plan.config.TILE_Q) * heads * math.prod(batch), shared_bytes)),)


class MergePlan(Prepared):
    """A merge with everything decided.

    Attributes
    ----------
    problem : MergeProblem
    """

    def __init__(self, problem: MergeProblem, kernel: Plan | None) -> None:
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
            for result, merged in zip(results, reference.merged(*given.views)):
                result[...] = merged
        return tuple(results)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, layout: str, backend: str) -> tuple[Any, Any]:
    """What `merge_states` returns; a plan once made for equal layouts is found again."""
    given = Operands(MERGE_ARRAYS, (out_a, lse_a, out_b, lse_b), required=4, results=0)
    return kept(_prepared, tuple(given.descriptions), (layout, backend)).run(given)


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], options: tuple[Any, ...], _types: tuple[type, ...]) -> MergePlan:
    layouts = [arrays.layout_of(d, name) for d, name in zip(descriptions, MERGE_ARRAYS)]
    problem = make_merge_problem(*layouts, *options)
    architecture = architecture_for(problem.backend, problem.out.device)
    return MergePlan(problem, None if architecture is None else merge_plan(architecture, problem.out.dtype))
