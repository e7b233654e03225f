"""Plan + arrays -> gradients: results allocated, the kernels launched, and what is cached between calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..machine.execution import Execution
from ..machine.operands import Operands
from ..machine.prepared import Prepared, architecture_for, cached
from ..plan.backward import make_backward_plan
from ..plan.kernel import KernelPlan
from ..plan.launch import Launch
from ..plan.query_parts import in_parts
from ..problem import arrays
from ..problem.backward import BACKWARD_ARRAYS, BackwardProblem, Gradients, make_backward_problem
from ..problem.layout import HEADS, HEADS_OF_LSE, dense_layout
from ..problem.lengths import check_gradients, check_values
from ..problem.options import Options, check_flag
from ..problem.read_gradients import check_sums
from ..problem.scores import check_wrt, label
from .captured import NOTHING, Captured, all_lengths, captured, layouts_of, taken_lengths
from .forward import ForwardOperands, bound_scores, prepared, seen_and_flops
from .score_gradients import argument_of, by_name, names_stored, new_results

if TYPE_CHECKING:
    from ..machine.host import Traffic

RESULTS = ("dq", "dk", "dv", "dsinks")
FIRST_RESULT, END_OF_RESULTS = BACKWARD_ARRAYS.index("dq"), len(BACKWARD_ARRAYS)


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

    def __init__(self, problem: BackwardProblem, kernel: KernelPlan | None, keeps_tiles: bool = False) -> None:
        self.problem = problem
        self._of_reads: tuple[tuple[str, Execution], ...] = ()  # behind the other kernels: of what, and how
        p = problem.forward
        execution = None
        if kernel is not None:
            from .planned_backward import backward_executions  # late: NumPy has no kernel

            execution, self._of_reads = backward_executions(problem, kernel, keeps_tiles)
        names = (*BACKWARD_ARRAYS, *p.given)
        super().__init__(dict(zip(names, problem.seen)), RESULTS, p.backend, p.device, execution, keeps_tiles, p.given)
        described = [x and arrays.description_of(x) for x in problem.seen]
        without_results = [*described[:FIRST_RESULT], *[None] * len(RESULTS), *described[END_OF_RESULTS:]]
        self._usual = () if self._demanded else (described, without_results)

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        """All kernels of a call, in order: that of `kernel`, and one for each read of `wrt` whose gradient it does not store."""
        return tuple(execution.kernel for execution in self._executions)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The grids of all of them, in order; none on backend 'numpy'."""
        return tuple(launch for execution in self._executions for launch in execution.launches)

    @property
    def _executions(self) -> tuple[Execution, ...]:
        return () if self._execution is None else (self._execution, *(execution for _, execution in self._of_reads))

    @property
    def result_bytes(self) -> int:
        """Bytes of the gradients: what a call allocates for those that are not given."""
        of_inputs = (layout.nbytes for name in RESULTS if (layout := self._layouts[name]) is not None)
        return sum(of_inputs) + sum(self.problem.layout_of(argument).nbytes for argument in argument_of(self.problem).values())

    def __str__(self) -> str:
        p = self.problem.forward
        ordered = ", bitwise reproducible" if self.problem.deterministic else ""
        lines = [
            f"gradients of attention of {p}, on backend {self._backend!r}{ordered}",
            f"  {seen_and_flops(p, self.problem.flops)}",
            *(f"  {line}" for line in str(p.scores).splitlines()),
            f"  results {self.result_bytes} bytes, {self.workspace}",
            "NumPy, tile by tile" if self._execution is None else str(self._execution),
            *(str(execution) for _, execution in self._of_reads),
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
        sinks: Any = None,
        mask: Any = None,
        arrays: Any = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        seed: Any = None,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        dsinks: Any = None,
        workspace: Any = None,
        **lengths: Any,
    ) -> Gradients:
        """Compute the gradients for arrays laid out like those the plan was made for.

        Parameters
        ----------
        dout, q, k, v, out, lse, dlse, sinks, arrays, bias, alibi_slopes, seed : array
            As in `attention_backward`, those that the plan was made with.
        mask : array
            Likewise; an expression is the plan's own, and not given again.
        **lengths : array
            `seqlens_q` and the other lengths of sequences that the plan was made with; what they hold may have changed.
        dq, dk, dv, dsinks : array, optional
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
        numbers = all_lengths(lengths)
        others = captured(mask=mask, arrays=arrays, bias=bias, alibi_slopes=alibi_slopes, seed=seed, lengths=numbers)
        self._check_captured(others, self.problem.forward)
        given = operands(dout, q, k, v, out, lse, dlse, sinks, dq, dk, dv, dsinks, others=others)
        if given.descriptions not in self._usual:
            self._check_layouts(given.descriptions)
        if workspace is not None:
            workspace = self.checked_workspace(workspace)
        return self.run(given, workspace)

    def check_lengths(self, **lengths: Any) -> None:
        """Look at lengths of sequences, which a call on a device takes as they are.

        Parameters
        ----------
        **lengths : array
            `seqlens_kv` and its like, as in a call of the plan; those that are left out are not looked at.

        Raises
        ------
        ValueError
            If one is impossible. The message names the array, the sequence and the number.

        Notes
        -----
        What is on a device is copied to host memory, which waits for it.
        """
        self._check_numbers(self.problem.forward, lengths)

    def counted(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, sinks: Any = None, **others: Any
    ) -> tuple[Gradients, Traffic | None]:
        """Compute on the host, and say what the kernels moved and computed.

        Parameters
        ----------
        dout, q, k, v, out, lse, dlse, sinks, **others : array
            As in a call of the plan, which has to be for backend 'host'.

        Returns
        -------
        gradients : Gradients
        traffic : Traffic or None
            Bytes read from and written to device memory, and operations of matrix products, of all kernels together. None with a
            sanitizer, which does not report them.
        """
        self._check_counts()
        more = captured(lengths=taken_lengths(others), **others)
        given = operands(dout, q, k, v, out, lse, dlse, sinks, None, None, None, None, others=more)
        self._check_captured(given.captured, self.problem.forward)
        self._check_layouts(given.descriptions)
        return self._compute(given, None)

    def run(self, given: Operands, workspace: arrays.Array | None = None) -> Gradients:
        """Compute on arrays that are known to have the layouts planned for."""
        if workspace is not None or any(given.addresses[FIRST_RESULT:END_OF_RESULTS]):
            self._check_apart(given.addresses, workspace)
        gradients, _ = self._where_planned(self._compute, given, workspace)
        inputs, asked = (*given.arrays[1:4], given.arrays[FIRST_RESULT - 1]), given.arrays[FIRST_RESULT:END_OF_RESULTS]
        given_back = zip((*gradients, gradients.dsinks), inputs, asked, ("q", "k", "v", "sinks"))
        *of_inputs, dsinks = [
            arrays.give_back(x, like, name) if to is None and x is not None else to for x, like, to, name in given_back
        ]
        of_scores = {name: self._given_back(name, x, given.captured) for name, x in self._of_scores(gradients).items()}
        return by_name(of_inputs, dsinks, of_scores, self.problem.forward.scores.captured)

    def _of_scores(self, gradients: Gradients) -> dict[str, Any]:
        """The gradients of what scores read, by its names."""
        own = {"bias": gradients.dbias, "alibi_slopes": gradients.dalibi_slopes}
        return {name: x for name, x in own.items() if x is not None} | gradients.darrays

    def _given_back(self, name: str, x: Any, given: Captured) -> Any:
        like = dict(zip(given.names, given.given))[label(name) if name in self.problem.forward.scores.captured else name]
        return arrays.give_back(x, like, name)

    def _compute(self, given: Operands, workspace: arrays.Array | None) -> tuple[Gradients, Traffic | None]:
        p = self.problem
        if given.captured.lengths_in_host_memory:
            check_values(p.forward.lengths, given.captured.lengths_in_host_memory, (p.forward.len_q, p.forward.len_kv))
        for i, layout in enumerate(p.seen):
            if given.views[i] is None and FIRST_RESULT <= i < END_OF_RESULTS and layout is not None:
                given.views[i] = arrays.empty(layout)
                given.addresses[i] = arrays.pointer(given.views[i])
        *of_inputs, dsinks = given.views[FIRST_RESULT:END_OF_RESULTS]
        of_scores = new_results(p, self.kernel)
        gradients = by_name(of_inputs, dsinks, of_scores, self.problem.forward.scores.captured)
        traffic = None
        if p.zero and not p.adds:
            for gradient in (*gradients, *([] if dsinks is None else [dsinks])):
                gradient.fill(0)
        if self._backend == "cuda":
            words, _copied = given.captured.on_device()
            at = {name: arrays.pointer(x) for name, x in of_scores.items()}
            self._launch(given.addresses[:END_OF_RESULTS] + words, at, workspace, given.captured.found)
        elif self._backend == "host":
            views = (*self._in_order(given.views[:END_OF_RESULTS]), *given.captured.on_host)
            traffic = self._run_on_host(views, of_scores, workspace, given.captured.found)
        elif not p.zero:
            self._compute_with_numpy(given.views[END_OF_RESULTS:], of_scores, *self._in_order(given.views[:END_OF_RESULTS]))
        return gradients, traffic

    def _launch(
        self,
        addresses: list[int],
        of_scores: Mapping[str, int],
        workspace: Any,
        found: dict[Any, Any] | None = None,
        stream: int | None = None,
    ) -> None:
        """Queue all kernels, with the words of a call and where the gradients go that `wrt` names."""
        if self._of_reads and workspace is None:  # all of them share it
            workspace = arrays.empty(dense_layout((self.workspace_bytes,), (0,), "uint8", self._device))
        stored = [of_scores[name] for name in names_stored(self.kernel)]
        self._execution.launch([*addresses, *stored], workspace, found, stream)
        for name, execution in self._of_reads:
            execution.on_device.launch([*addresses, of_scores[name]], workspace, stream)

    def _run_on_host(
        self, views: tuple[Any, ...], of_scores: dict[str, Any], workspace: Any, found: dict[Any, Any] | None
    ) -> Traffic | None:
        if self._of_reads and workspace is None:
            workspace = self.workspace.memory()
        stored = (of_scores[name] for name in names_stored(self.kernel))
        traffic = self._execution.run_on_host((*views, *stored), workspace, found)
        for name, execution in self._of_reads:
            more = execution.run_on_host((*views, of_scores[name]), workspace)
            traffic = traffic and traffic + more
        return traffic

    def _in_order(self, views: list[Any]) -> list[Any]:
        """The arrays of a call with their axes in the order of kernels."""
        order = self.problem.forward.layout
        heads = {"lse": HEADS_OF_LSE, "dlse": HEADS_OF_LSE}
        return [
            x if name in ("sinks", "dsinks") else arrays.in_order(x, order, heads.get(name, HEADS))
            for x, name in zip(views, BACKWARD_ARRAYS)
        ]

    def _compute_with_numpy(self, others: list[Any], of_scores: dict[str, Any], *arrays_in_order: Any) -> None:
        from ..machine.numpy_path.backward import blocked_gradients  # late: a GPU does not need it
        from ..machine.numpy_path.forward import accumulator

        p = self.problem.forward
        dout, q, k, v, out, lse, dlse, sinks, *results, dsinks = arrays_in_order
        scores = bound_scores(p, others)
        sums = scores.sums(tuple(of_scores), accumulator(dout.dtype)) if scores else {}
        dout, q, k, v, out, *results = (x if x.ndim > 2 else x[None] for x in (dout, q, k, v, out, *results))
        sinks, dsinks = (x if x is None or x.ndim == 2 else x[None] for x in (sinks, dsinks))
        lse, dlse = (x if x is None or x.ndim > 1 else x[None] for x in (lse, dlse))
        options = {"scale": p.scale, "softcap": p.softcap, "sinks": sinks, "sums_of_scores": sums}
        before = [x.copy() for x in results] if self.problem.adds else []
        gradients = dict(zip(RESULTS, (*results, dsinks)))
        inputs = dout, q, k, v, out, lse, dlse
        if p.lengths is None:
            blocked_gradients(*inputs[:-1], dlse=dlse, **options, mask=p.mask, scores=scores, **gradients)
        else:
            from ..machine.numpy_path import sequences

            numbers = dict(zip(p.lengths.names, others))
            sequences.backward(p.lengths, numbers, p.mask, inputs, options, scores, gradients)
        for x, sum_before in zip(results, before):
            x += sum_before
        for name, x in sums.items():
            of_scores[name][...] = x


class BackwardOperands(Operands):
    """The arrays of a call in the order of `BACKWARD_ARRAYS`, and those that scores read."""

    __slots__ = ("captured",)

    def __init__(self, given: tuple[Any, ...], others: Captured) -> None:
        super().__init__(BACKWARD_ARRAYS, given, required=6, results=len(RESULTS))
        self.captured = others
        self.views += others.views
        self.descriptions += others.descriptions
        self.addresses += others.addresses


def operands(*given: Any, others: Captured = NOTHING) -> BackwardOperands:
    """The arrays of a call in the order of `BACKWARD_ARRAYS`, and those that scores read."""
    return BackwardOperands(given, others)


def prepared_backward(given: Operands, options: dict[str, Any]) -> BackwardPlan:
    """The plan for these arrays; a plan once made for equal layouts and options is found again.

    Parameters
    ----------
    given : Operands
    options : dict
        Fields of `Options`, `deterministic`, and `arch`, the architecture's name; those left out have their defaults.
    """
    if given.captured is not NOTHING:
        options = {**options, **given.captured.options}
    return cached(_prepared, tuple(given.descriptions), options)


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], named: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> BackwardPlan:
    layouts = {name: d and arrays.layout_of(d, name) for name, d in zip(BACKWARD_ARRAYS, descriptions)}
    options = dict(named)
    keeps_tiles = options.pop("keeps_tiles", False)
    arch, deterministic, wrt = options.pop("arch", None), options.pop("deterministic", False), options.pop("wrt", ())
    asked = Options(**options)
    others = layouts_of(descriptions[END_OF_RESULTS:], asked.operands, asked.arrays)
    problem = make_backward_problem(
        **layouts, options=asked, deterministic=deterministic, operands=others[0], arrays=others[1], wrt=wrt
    )
    architecture = architecture_for(problem.forward.backend, problem.forward.device, arch)
    return BackwardPlan(problem, None if architecture is None else make_backward_plan(in_parts(problem), architecture), keeps_tiles)


def attention_and_vjp(
    q: Any, k: Any, v: Any, sinks: Any, others: Captured, options: dict[str, Any], return_lse: bool, of_backward: dict[str, Any]
) -> tuple[Any, Callable[..., Gradients]]:
    """What `attention_vjp` returns."""
    return_lse = check_flag("return_lse", return_lse)
    check_flag("deterministic", of_backward["deterministic"])
    given = ForwardOperands(q, k, v, None, None, sinks, others)
    plan = prepared(given, {**options, "return_lse": True})
    wrt = check_wrt(of_backward["wrt"], plan.problem.scores)
    if plan.kernel is not None:  # before the forward, of which nothing would be left
        check_sums(plan.problem.scores, wrt, of_backward["deterministic"])
    if plan.problem.lengths is not None:
        check_gradients(plan.problem.lengths)
    out, lse = plan.run(given)
    backward_options = {**options, "algorithm": "auto", **of_backward}

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        """The gradients with respect to q, k and v from those with respect to the results."""
        given = operands(dout, q, k, v, out, lse, dlse, sinks, None, None, None, None, others=others)
        return prepared_backward(given, backward_options).run(given)

    return ((out, lse) if return_lse else out), vjp
