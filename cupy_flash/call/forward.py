"""Plan + arrays -> attention: results allocated, the kernel launched, and what is cached between calls."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..machine.prepared import NO_OPTIONS, Prepared, architecture_for, cached
from ..problem import arrays
from ..problem.forward import FORWARD_ARRAYS, Problem, make_problem
from ..problem.key_ranges import START, STOP
from ..problem.layout import HEADS_OF_LSE
from ..problem.lengths import check_values
from ..problem.options import Options
from .captured import NOTHING, Captured, all_lengths, captured, layouts_of, taken_lengths

if TYPE_CHECKING:
    from ..machine.host import Traffic
    from ..machine.numpy_path.scores import BoundScores
    from ..plan.kernel import KernelPlan
    from ..plan.preparation import Preparation

FIRST_OTHER = FORWARD_ARRAYS.index("sinks")  # of the arrays of a call, behind those of most


class AttentionPlan(Prepared):
    """A problem with everything decided: called with arrays of the same layouts it only launches. Prints itself.

    Made by `plan_attention`. It holds no array, and several threads may call it.

    Attributes
    ----------
    problem : Problem
        What is computed.
    kernel : KernelPlan or None
        How. None on backend 'numpy', which has no kernel.
    """

    def __init__(self, problem: Problem, kernel: KernelPlan | None, returns_lse: bool, keeps_tiles: bool = False) -> None:
        self.problem = problem
        self._returns_lse = returns_lse
        execution = None
        if kernel is not None:
            from .planned import forward_execution, packing_of  # late: planning is half of an import, and NumPy needs none

            packing = packing_of(problem)
            self._keys, self._skipped_bytes = packing.keys, packing.skipped_bytes
            self._skips = any(packing.skipped_bytes)
            execution = forward_execution(problem, packing.problem, kernel, classified(kernel, problem), keeps_tiles)
        given = problem.given
        layouts = dict(zip((*FORWARD_ARRAYS, *given), problem.seen))
        super().__init__(layouts, ("out", "lse"), problem.backend, problem.device, execution, keeps_tiles, given)
        q, k, v, out, _, *others = (x and arrays.description_of(x) for x in problem.seen)
        self._few_arrays = not given and problem.sinks is None
        self._usual_spans, self._other_spans = self._spans[:FIRST_OTHER], self._spans[FIRST_OTHER:]
        self._only_launches = execution is not None and execution.only_launches
        # Without `out`, and with it.
        self._usual = () if self._demanded else ((q, k, v, None, None, *others), (q, k, v, out, None, *others))

    @property
    def result_bytes(self) -> int:
        """Bytes of the results: what a call allocates for those that are not given."""
        p = self.problem
        return p.seen_out.nbytes + (p.seen_lse.nbytes if p.seen_lse is not None else 0)

    def __str__(self) -> str:
        lines = [
            f"attention of {self.problem}, on backend {self._backend!r}",
            f"  {seen_and_flops(self.problem, self.problem.flops)}",
            *(f"  {line}" for line in str(self.problem.scores).splitlines()),
            f"  results {self.result_bytes} bytes, {self.workspace}",
            "NumPy, online softmax over blocks of keys" if self._execution is None else str(self._execution),
        ]
        return "\n".join(lines)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        sinks: Any = None,
        mask: Any = None,
        arrays: Any = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        seed: Any = None,
        out: Any = None,
        lse: Any = None,
        workspace: Any = None,
        **lengths: Any,
    ) -> Any:
        """Compute attention of arrays laid out like those the plan was made for.

        Parameters
        ----------
        q, k, v, sinks, arrays, bias, alibi_slopes, seed : array
            As in `attention`, those that the plan was made with.
        mask : array
            Likewise; an expression is the plan's own, and not given again.
        **lengths : array
            `seqlens_q` and the other lengths of sequences that the plan was made with; what they hold may have changed.
        out, lse : array, optional
            Where to write. By default new arrays.
        workspace : array of uint8, optional
            At least `workspace_bytes` in the memory of the arrays, for the kernel. By default it is allocated; a call that
            allocates nothing can be captured in a CUDA graph.

        Returns
        -------
        out : array
        lse : array
            Only if the plan was made with ``return_lse=True``.

        Raises
        ------
        TypeError, ValueError
            If an array is not laid out as planned.
        """
        others = NOTHING
        if lengths or not mask is arrays is bias is alibi_slopes is seed is None:
            lengths = all_lengths(lengths)
            others = captured(mask=mask, arrays=arrays, bias=bias, alibi_slopes=alibi_slopes, seed=seed, lengths=lengths)
        if others is not NOTHING or self._given or self._keeps_tiles:
            self._check_captured(others, self.problem)
        given = ForwardOperands(q, k, v, out, lse, sinks, others)
        if not self._usual or given.descriptions != self._usual[out is not None]:
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
        What is on a device is copied to host memory, which waits for it: it is for finding a mistake, not for each call.
        """
        self._check_numbers(self.problem, lengths)

    def counted(self, q: Any, k: Any, v: Any, *, sinks: Any = None, **others: Any) -> tuple[Any, Traffic | None]:
        """Compute on the host, and say what the kernel moved and computed.

        Parameters
        ----------
        q, k, v, sinks, **others : array
            As in a call of the plan, which has to be for backend 'host'.

        Returns
        -------
        result : array or tuple of array
            What a call of the plan returns.
        traffic : Traffic or None
            Bytes read from and written to device memory, and operations of matrix products. None with a sanitizer, which does not
            report them.
        """
        self._check_counts()
        lengths = taken_lengths(others)
        given = ForwardOperands(q, k, v, None, None, sinks, captured(**others, lengths=lengths))
        self._check_captured(given.captured, self.problem)
        self._check_layouts(given.descriptions)
        out, lse, traffic = self._compute(given, None)
        return (out, lse) if self._returns_lse else out, traffic

    def run(self, given: ForwardOperands, workspace: arrays.Array | None = None) -> Any:
        """Compute on arrays that are known to have the layouts planned for."""
        if workspace is not None:
            self._check_apart(given.addresses, workspace)
        elif given.out is not None or given.lse is not None:
            self._check_results_apart(given)
        if self._backend == "cuda" and self._current_device() == self._device:
            out, lse = self._launch(given, workspace)
        else:
            out, lse, _ = self._where_planned(self._compute, given, workspace)
        if given.out is not None:
            out = given.out
        elif type(given.q) is not type(out):
            out = arrays.give_back(out, given.q, "q")
        if not self._returns_lse:
            return out
        return out, arrays.give_back(lse, given.q, "q") if given.lse is None else given.lse

    def _launch(self, given: ForwardOperands, workspace: arrays.Array | None) -> tuple[Any, Any]:
        """Queue the kernel on the current device, with results that are there then."""
        p, views, words, others = self.problem, given.views, given.addresses, given.captured
        out, lse = views[3], views[4]
        if others is not NOTHING:
            words = words[: len(FORWARD_ARRAYS)]
            if others.lengths_in_host_memory:
                check_values(p.lengths, others.lengths_in_host_memory, (p.len_q, p.len_kv))
        if out is None:
            out = arrays.empty(p.seen[3])
            words[3] = out.data.ptr
        if lse is None and p.lse is not None:
            lse = arrays.empty(p.seen[4])
            words[4] = lse.data.ptr
        if self._skips:
            words[1] += self._skipped_bytes[0]
            words[2] += self._skipped_bytes[1]
        if others is not NOTHING:
            more_words, _copied = others.on_device()
            words += more_words
        if self._only_launches:
            self._execution.on_device.launch(words, workspace)
        else:
            self._execution.launch(words, workspace, others.found)
        return out, lse

    def _compute(self, given: ForwardOperands, workspace: arrays.Array | None) -> tuple[Any, Any, Traffic | None]:
        if self._backend == "cuda":
            return *self._launch(given, workspace), None
        p = self.problem
        q, k, v, out, lse, sinks, *others = given.views
        if given.captured.lengths_in_host_memory:
            check_values(p.lengths, given.captured.lengths_in_host_memory, (p.len_q, p.len_kv))
        out = arrays.empty(p.seen_out) if out is None else out
        lse = arrays.empty(p.seen_lse) if lse is None and p.lse is not None else lse
        if self._backend == "host" or not p.empty:
            q, k, v, to_out = (arrays.in_order(x, p.layout) for x in (q, k, v, out))
            to_lse = arrays.in_order(lse, p.layout, HEADS_OF_LSE)
            if self._backend == "host":
                if p.lengths is None:
                    k, v = k[..., self._keys, :], v[..., self._keys, :]
                operands = (q, k, v, to_out, to_lse, sinks, *given.captured.on_host)
                return out, lse, self._execution.run_on_host(operands, workspace, given.captured.found)
            self._compute_with_numpy(q, k, v, to_out, to_lse, sinks, others)
        return out, lse, None

    def _compute_with_numpy(self, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, others: list[Any]) -> None:
        from ..machine.numpy_path import forward as numpy_forward  # late: a GPU does not need it

        p = self.problem
        q, k, v, out = (x if x.ndim > 2 else x[None] for x in (q, k, v, out))
        lse = lse if lse is None or lse.ndim > 1 else lse[None]
        options = {"scale": p.scale, "softcap": p.softcap, "sinks": sinks if sinks is None or sinks.ndim == 2 else sinks[None]}
        scores = bound_scores(p, others)
        if p.lengths is None:
            numpy_forward.blocked(q, k, v, **options, mask=p.mask, scores=scores, out=out, lse=lse)
            return
        from ..machine.numpy_path import sequences

        numbers = dict(zip(p.lengths.names, others))
        sequences.forward(p.lengths, numbers, p.mask, q, k, v, options, scores, out, lse)

    def _check_results_apart(self, given: ForwardOperands) -> None:
        """What `_check_apart` does, spelled out: as loops it would take a tenth of a call."""
        if self._few_arrays:
            q, k, v, out, lse, _ = given.addresses
        else:
            q, k, v, out, lse, *others = given.addresses
        (q0, q1), (k0, k1), (v0, v1), (out0, out1), (lse0, lse1) = self._usual_spans
        q0, q1, k0, k1, v0, v1 = q + q0, q + q1, k + k0, k + k1, v + v0, v + v1
        if out:
            out0, out1 = out + out0, out + out1
            if (out0 < q1 and q0 < out1) or (out0 < k1 and k0 < out1) or (out0 < v1 and v0 < out1):
                self._check_apart(given.addresses, None)
        if lse:
            lse0, lse1 = lse + lse0, lse + lse1
            if (lse0 < q1 and q0 < lse1) or (lse0 < k1 and k0 < lse1) or (lse0 < v1 and v0 < lse1):
                self._check_apart(given.addresses, None)
            if out and lse0 < out1 and out0 < lse1:
                self._check_apart(given.addresses, None)
        if self._few_arrays:
            return
        for address, (low, high) in zip(others, self._other_spans):
            if address:
                low, high = address + low, address + high
                if (out and out0 < high and low < out1) or (lse and lse0 < high and low < lse1):
                    self._check_apart(given.addresses, None)


class ForwardOperands:
    """What `Operands` does for a forward, spelled out: as a loop it would take a microsecond longer, and a call takes few."""

    __slots__ = ("addresses", "captured", "descriptions", "lse", "out", "q", "views")

    def __init__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any = None, others: Captured = NOTHING) -> None:
        self.q, self.out, self.lse, self.captured = q, out, lse, others
        view, describe, kind = arrays.view, arrays.describe, arrays.kind_on_devices()
        if type(q) is type(k) is type(v) is kind:
            of_q, of_k, of_v = q.data, k.data, v.data
            at_q, at_k, at_v = of_q.ptr, of_k.ptr, of_v.ptr
            about_q = (q.shape, q.strides, q.dtype, at_q & 15, of_q.device_id)
            about_k = (k.shape, k.strides, k.dtype, at_k & 15, of_k.device_id)
            about_v = (v.shape, v.strides, v.dtype, at_v & 15, of_v.device_id)
        else:
            q, k, v = view(q, "q"), view(k, "k"), view(v, "v")
            (about_q, at_q), (about_k, at_k), (about_v, at_v) = describe(q), describe(k), describe(v)
        about_out = about_lse = about_sinks = None
        at_out = at_lse = at_sinks = 0
        if out is not None:
            if type(out) is not kind:
                out = view(out, "out", writable=True)
            about_out, at_out = describe(out)
        if lse is not None:
            if type(lse) is not kind:
                lse = view(lse, "lse", writable=True)
            about_lse, at_lse = describe(lse)
        if sinks is not None:
            sinks = view(sinks, "sinks")
            about_sinks, at_sinks = describe(sinks)
        self.views = (q, k, v, out, lse, sinks)
        self.descriptions = (about_q, about_k, about_v, about_out, about_lse, about_sinks)
        self.addresses = [at_q, at_k, at_v, at_out, at_lse, at_sinks]
        if others is not NOTHING:
            self.views += others.views
            self.descriptions += others.descriptions
            self.addresses += others.addresses


def prepared(given: ForwardOperands, options: dict[str, Any]) -> AttentionPlan:
    """The plan for these arrays; a plan once made for equal layouts and options is found again.

    Parameters
    ----------
    given : ForwardOperands
    options : dict
        Fields of `Options`, and `arch`, the architecture's name; those left out have their defaults.
    """
    found = NO_OPTIONS if given.captured is NOTHING else given.captured.options
    return cached(_prepared, given.descriptions, options, found)


def classified(kernel: KernelPlan, problem: Problem, **of_backward: bool) -> Preparation | None:
    """What finds the tiles that a kernel visits, if it does not visit all."""
    if not kernel.config.TILE_LIST:
        return None
    from ..plan.classify import classification_of  # late: most calls mask no pairs

    return classification_of(kernel, problem, **of_backward)


def seen_and_flops(problem: Problem, flops: int) -> str:
    """What a plan prints of the keys that queries see, and of the work, both of which know nothing of pairs masked one by one."""
    scaled = f"scale {problem.scale:.6g}" + ("" if problem.softcap is None else f"; softcap {problem.softcap:.6g}")
    if problem.lengths is not None:
        moves = ", and by how many keys more than queries a sequence has" if problem.lengths.moves else ""
        return f"{problem.mask}{moves if problem.mask.shape != 'full' else ''}, of its sequence; {scaled}"
    hidden, without = (", unless mask hides them", " without mask") if problem.scores.masks_pairs else ("", "")
    return f"{problem.mask}{hidden}; {scaled}; {flops:.4g} FLOPs{without}"


def bound_scores(problem: Problem, views: list[Any]) -> BoundScores | None:
    """What becomes of scores, with the arrays of a call, in array code."""
    if not problem.scores:
        return None
    from ..machine.numpy_path.scores import BoundScores  # late: it takes the language of expressions

    if problem.lengths is not None:
        views = views[len(problem.lengths.names) :]
    operands = problem.scores.operands
    by_name = dict(zip(operands, views))
    seed, offset = (int(number) for number in by_name.get("seed", (0, 0)))
    captured_views = dict(zip(problem.scores.captured, views[len(operands) :]))
    return BoundScores(
        problem.scores,
        by_name,
        {name: view.squeeze() if name in (START, STOP) else view for name, view in captured_views.items()},
        (seed, offset),
        problem.batch,
        problem.heads_per_kv,
        problem.heads_q,
        problem.len_q,
        problem.len_kv,
        room=(problem.len_q, problem.len_kv),
    )


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], named: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> AttentionPlan:
    layouts = [d and arrays.layout_of(d, name) for d, name in zip(descriptions, FORWARD_ARRAYS)]
    options = dict(named)
    arch, keeps_tiles = options.pop("arch", None), options.pop("keeps_tiles", False)
    asked = Options(**options)
    others = layouts_of(descriptions[len(FORWARD_ARRAYS) :], asked.operands, asked.arrays)
    problem = make_problem(*layouts[:3], asked, *layouts[3:], *others)
    architecture = architecture_for(problem.backend, problem.device, arch)
    if architecture is None:
        kernel = None
    else:
        from ..plan.forward import make_forward_plan  # late, as above

        kernel = make_forward_plan(problem, architecture)
    return AttentionPlan(problem, kernel, bool(asked.return_lse), keeps_tiles)
