"""Plan + arrays -> gradients: results allocated, the kernels launched, and what is cached between calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..machine.execution import Execution, Operands, Prepared, architecture_for, cached
from ..machine.numpy_path.backward import blocked_gradients
from ..plan.backward import backward_launches, backward_maps, backward_workspace, make_backward_plan, make_grouping
from ..plan.kernel import KernelPlan
from ..plan.params import backward_params
from ..problem import arrays
from ..problem.backward import BACKWARD_ARRAYS, BackwardProblem, Gradients, make_backward_problem
from ..problem.layout import HEADS, HEADS_OF_LSE
from ..problem.options import Options, check_flag
from .forward import ForwardOperands, prepared

if TYPE_CHECKING:
    from ..machine.host import Traffic

RESULTS = ("dq", "dk", "dv")
FIRST_RESULT = BACKWARD_ARRAYS.index("dq")


class BackwardPlan(Prepared):
    """Gradients with everything decided: called with arrays of the same layouts it only launches. Prints itself.

    Made by `plan_attention_backward`. It holds no array, and several threads may call it.

    Attributes
    ----------
    problem : BackwardProblem
        What is computed.
    kernel : KernelPlan or None
        How. None on backend 'numpy', which has no kernel.
    """

    def __init__(self, problem: BackwardProblem, kernel: KernelPlan | None) -> None:
        self.problem = problem
        p = problem.forward
        execution = None
        if kernel is not None:
            launches, workspace = backward_launches(kernel, problem), backward_workspace(kernel, problem)
            maps = backward_maps(kernel, problem)
            params = backward_params(problem, make_grouping(kernel, problem), maps)
            execution = Execution(kernel, launches, params, BACKWARD_ARRAYS, workspace, p.device, maps)
        super().__init__(dict(zip(BACKWARD_ARRAYS, problem.seen)), RESULTS, p.backend, p.device, execution)
        described = [x and arrays.description_of(x) for x in problem.seen]
        self._usual = () if self._demanded else (described, [*described[:-3], None, None, None])  # with and without results

    @property
    def result_bytes(self) -> int:
        """Bytes of the gradients: what a call allocates for those that are not given."""
        return sum(self._layouts[name].nbytes for name in RESULTS)

    def __str__(self) -> str:
        p = self.problem.forward
        ordered = ", bitwise reproducible" if self.problem.deterministic else ""
        lines = [
            f"gradients of attention of {p}, on backend {self._backend!r}{ordered}",
            f"  {p.mask_and_scale}; {self.problem.flops:.4g} FLOPs",
            f"  results {self.result_bytes} bytes, {self.workspace}",
            "NumPy, tile by tile" if self._execution is None else str(self._execution),
        ]
        return "\n".join(lines)

    def __call__(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        dlse: Any = None,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        workspace: Any = None,
    ) -> Gradients:
        """Compute the gradients for arrays laid out like those the plan was made for.

        Parameters
        ----------
        dout, q, k, v, out, lse, dlse : array
            As in `attention_backward`.
        dq, dk, dv : array, optional
            Where to write. By default new arrays.
        workspace : array of uint8, optional
            At least `workspace_bytes` in the memory of the arrays, for the kernels. By default it is allocated; a call that
            allocates nothing can be captured in a CUDA graph.

        Returns
        -------
        Gradients

        Raises
        ------
        TypeError, ValueError
            If an array is not laid out as planned.
        """
        given = operands(dout, q, k, v, out, lse, dlse, dq, dk, dv)
        if given.descriptions not in self._usual:
            self._check_layouts(given.descriptions)
        if workspace is not None:
            workspace = self.checked_workspace(workspace)
        return self.run(given, workspace)

    def counted(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None
    ) -> tuple[Gradients, Traffic | None]:
        """Compute on the host, and say what the kernels moved and computed.

        Parameters
        ----------
        dout, q, k, v, out, lse, dlse : array
            As in a call of the plan, which has to be for backend 'host'.

        Returns
        -------
        gradients : Gradients
        traffic : Traffic or None
            Bytes read from and written to device memory, and operations of matrix products, of all kernels together. None with a
            sanitizer, which does not report them.
        """
        self._check_counts()
        given = operands(dout, q, k, v, out, lse, dlse, None, None, None)
        self._check_layouts(given.descriptions)
        return self._compute(given, None)

    def run(self, given: Operands, workspace: arrays.Array | None = None) -> Gradients:
        """Compute on arrays that are known to have the layouts planned for."""
        if workspace is not None or any(given.addresses[FIRST_RESULT:]):
            self._check_apart(given.addresses, workspace)
        gradients, _ = self._where_planned(self._compute, given, workspace)
        inputs, asked = given.arrays[1:4], given.arrays[FIRST_RESULT:]
        given_back = zip(gradients, inputs, asked, ("q", "k", "v"))
        return Gradients(*[arrays.give_back(x, like, name) if to is None else to for x, like, to, name in given_back])

    def _compute(self, given: Operands, workspace: arrays.Array | None) -> tuple[Gradients, Traffic | None]:
        p = self.problem
        for i, layout in enumerate(p.seen):
            if given.views[i] is None and i >= FIRST_RESULT:
                given.views[i] = arrays.empty(layout)
                given.addresses[i] = arrays.pointer(given.views[i])
        gradients = Gradients(*given.views[FIRST_RESULT:])
        traffic = None
        if p.zero:
            for gradient in gradients:
                gradient.fill(0)
        if self._backend == "cuda":
            self._execution.on_device.launch(given.addresses, workspace)
        elif self._backend == "host":
            traffic = self._execution.run_on_host(self._in_order(given.views), workspace)
        elif not p.zero:
            self._compute_with_numpy(*self._in_order(given.views))
        return gradients, traffic

    def _in_order(self, views: list[Any]) -> list[Any]:
        """The arrays of a call with their axes in the order of kernels."""
        heads = [HEADS_OF_LSE if name in ("lse", "dlse") else HEADS for name in BACKWARD_ARRAYS]
        return [arrays.in_order(x, self.problem.forward.layout, axis) for x, axis in zip(views, heads)]

    def _compute_with_numpy(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *results: Any) -> None:
        p = self.problem.forward
        dout, q, k, v, out, *results = (x if x.ndim > 2 else x[None] for x in (dout, q, k, v, out, *results))
        lse, dlse = (x if x is None or x.ndim > 1 else x[None] for x in (lse, dlse))
        blocked_gradients(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dlse=dlse,
            scale=p.scale,
            first_key=p.first_key,
            last_key=p.last_key,
            softcap=p.softcap,
            **dict(zip(RESULTS, results)),
        )


def operands(*given: Any) -> Operands:
    """The arrays of a call in the order of `BACKWARD_ARRAYS`."""
    return Operands(BACKWARD_ARRAYS, given, required=6, results=3)


def prepared_backward(
    given: Operands, options: tuple[Any, ...], deterministic: bool, arch: str | None, kernel: str | None = None
) -> BackwardPlan:
    """The plan for these arrays; a plan once made for equal layouts and options is found again.

    Parameters
    ----------
    given : Operands
    options : tuple
        The fields of `Options` but the last, in order.
    deterministic : bool
    arch : str or None
    kernel : str or None
    """
    return cached(_prepared, tuple(given.descriptions), (*options, deterministic, arch, kernel))


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], options: tuple[Any, ...], _types: tuple[type, ...]) -> BackwardPlan:
    layouts = {name: d and arrays.layout_of(d, name) for name, d in zip(BACKWARD_ARRAYS, descriptions)}
    *asked, deterministic, arch, kernel = options
    problem = make_backward_problem(**layouts, options=Options(*asked, kernel=kernel), deterministic=deterministic)
    architecture = architecture_for(problem.forward.backend, problem.forward.device, arch)
    return BackwardPlan(problem, None if architecture is None else make_backward_plan(problem, architecture))


def attention_and_vjp(
    q: Any, k: Any, v: Any, shared: tuple[Any, ...], algorithm: str, backend: str, return_lse: bool, deterministic: bool
) -> tuple[Any, Callable[..., Gradients]]:
    """What `attention_vjp` returns; `shared` are the options from `layout` to `precision`."""
    return_lse = check_flag("return_lse", return_lse)
    deterministic = check_flag("deterministic", deterministic)
    given = ForwardOperands(q, k, v, None, None)
    out, lse = prepared(given, (None, *shared, algorithm, backend, True)).run(given)

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        """The gradients with respect to q, k and v from those with respect to the results."""
        given = operands(dout, q, k, v, out, lse, dlse, None, None, None)
        return prepared_backward(given, (*shared, "auto", backend), deterministic, None).run(given)

    return ((out, lse) if return_lse else out), vjp
