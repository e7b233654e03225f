"""Does it compute right, on this machine? The shared cases, run on a backend and judged against the float64 oracle.

Of each case there is a forward by either algorithm, and a backward with and without a fixed order; where the planner has kernels
made for one architecture, the same also by those that serve all. Compiling costs far more than computing, so the kernels of all
cases are built first, in parallel, and the cases then run one after another: what a failure of the device leaves behind is blamed
on the case that caused it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy

from ..api.backward import plan_attention_backward
from ..api.forward import plan_attention
from ..call.backward import BackwardPlan
from ..call.forward import AttentionPlan
from ..errors import CompileError
from ..machine import host, nvrtc
from ..plan.architecture import Architecture
from ..plan.kernel import KernelPlan
from ..plan.matrix import has
from ..plan.tuning import table_for
from ..problem import arrays
from .cases import Case, full_cases, make_inputs, quick_cases
from .compare import Comparison, compare
from .compare_gradients import GradientComparison, compare_gradients
from .compare_sums import names_of
from .cotangents import make_cotangents

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Computation:
    """What is computed of a case.

    Parameters
    ----------
    direction : {'forward', 'backward'}
        A backward takes the results of a forward by the same algorithm on the same backend.
    algorithm : {'v1', 'v2'}
    deterministic : bool
        Of a backward, as in `attention_backward`.
    kernel : str, optional
        Of this direction, as in `plan_attention` and `plan_attention_backward`.
    """

    direction: str
    algorithm: str
    deterministic: bool = False
    kernel: str | None = None

    def __str__(self) -> str:
        words = [self.direction, self.algorithm] + ["deterministic"] * self.deterministic
        return " ".join(words + [f"by {self.kernel}"] * (self.kernel is not None))


FORWARD, FORWARD_V1 = Computation("forward", "v2"), Computation("forward", "v1")
BACKWARD, DETERMINISTIC = Computation("backward", "v2"), Computation("backward", "v2", deterministic=True)
THREADS = "cupy_flash compiler"  # how the names of the threads of `in_parallel` begin
COMPUTATIONS = (FORWARD, FORWARD_V1, BACKWARD, DETERMINISTIC)
BETTER = {"fwd_v2": "fwd_hopper", "bwd_v2": "bwd_hopper"}  # what the planner takes for most arrays, where it exists
GENERIC = (
    Computation("forward", "v2", kernel="fwd_v2"),
    Computation("backward", "v2", kernel="bwd_v2"),
    Computation("backward", "v2", deterministic=True, kernel="bwd_v2"),
)


@dataclass(frozen=True)
class CaseResult:
    """What became of one computation of a case.

    Parameters
    ----------
    case : Case
    computation : Computation
    plan : str
        Name of the kernel's plan, 'numpy', or 'nothing to launch'; empty if an exception came before there was one.
    comparison : Comparison, GradientComparison or None
        None if an exception came first.
    seconds : float
        From its start to the judgement. Inputs are made by the first computation of a case that needs them.
    error : str
        The exception, or ''.
    """

    case: Case
    computation: Computation
    plan: str
    comparison: Comparison | GradientComparison | None
    seconds: float
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the result is right."""
        return self.comparison is not None and self.comparison.ok

    @property
    def message(self) -> str:
        """The judgement or the exception in words."""
        return self.error or self.comparison.message

    @property
    def figures(self) -> tuple[float, float] | None:
        """Error and what was allowed: of gradients, for the one that comes closest to failing. None if nothing was judged."""
        judged = self.comparison
        if isinstance(judged, GradientComparison):
            judged = max(judged.judged, default=None, key=lambda x: x.error / max(x.allowed, sys.float_info.min))
        return judged and (judged.error, judged.allowed)


def kind_of(case: Case) -> str:
    """The dtype of a case, or 'tf32'."""
    return "tf32" if case.precision == "tf32" else case.dtype


def select_cases(suite: str, dtype: str | None = None, dim: int | None = None) -> tuple[Case, ...]:
    """The cases of suite 'quick' or 'full', of one dtype ('tf32' counts as one) and one head dim if given."""
    cases = {"quick": quick_cases, "full": full_cases}[suite]()
    return tuple(case for case in cases if dtype in (None, kind_of(case)) and dim in (None, case.dim))


def select_computations(
    backend: str, direction: str = "both", algorithm: str = "all", architecture: Architecture | None = None
) -> tuple[Computation, ...]:
    """What a backend computes in direction 'forward', 'backward' or 'both' by algorithm 'v1', 'v2' or 'all'.

    NumPy has one algorithm, called v2 here, which adds in one order. `GENERIC` is for kernels of an architecture that has others.
    """
    offered = (FORWARD, BACKWARD) if backend == "numpy" else COMPUTATIONS
    if architecture is not None:
        offered += tuple(x for x in GENERIC if table_for(BETTER[x.kernel], architecture, "float16"))
    return tuple(x for x in offered if direction in ("both", x.direction) and algorithm in ("all", x.algorithm))


def why_skipped(case: Case, computation: Computation, backend: str, architecture: Architecture | None = None) -> str:
    """Why a suite leaves this out on a backend and, for kernels, an architecture; '' if it does not.

    Not asked of the planner: a planner that refuses what it should compute must fail the check.
    """
    if backend == "numpy":
        return ""
    if case.dtype == "float64":
        return "only backend 'numpy' computes float64"
    if backend == "host" and case.heavy:
        return "too heavy for a CPU that executes kernels"
    if case.of_pairs and computation.algorithm == "v1":
        return "v1 has no scores, masks, biases and dropout"
    if architecture is None:
        return ""
    if not has(architecture, kind_of(case)):
        return f"{architecture} has no {kind_of(case)}"
    if computation in GENERIC and not table_for(BETTER[computation.kernel], architecture, case.dtype):
        return f"{computation.direction} v2 of {case.dtype} is by {computation.kernel} anyway"
    wide = case.dtype == "float32" and max(case.dim, case.dim_v) > 192
    if computation.direction == "backward" and architecture.number < 80 and wide:
        return f"{architecture} has no backward of float32 wider than 192"  # its 64 KB of shared memory do not hold the tiles
    return ""


def beyond_main_kernel(cases: Iterable[Case], computation: Computation, backend: str, arch: str | None = None) -> list[Case]:
    """The cases that need another kernel for this computation than most of them do."""
    kernels = {case: tuple(kernels_of({case: (computation,)}, backend, arch)) for case in cases}
    shared = Counter(filter(None, kernels.values()))
    main = max(shared, key=shared.get, default=None)
    return [case for case, own in kernels.items() if own and own != main]


def run_case(
    case: Case, computations: Iterable[Computation], backend: str, *, arch: str | None = None, seed: int = 0
) -> list[CaseResult]:
    """Compute a case and judge the results.

    Parameters
    ----------
    case : Case
    computations : iterable of Computation
    backend : {'cuda', 'host', 'numpy'}
    arch : str, optional
        Architecture for backend 'host', as in `plan_attention`.
    seed : int
        Of the inputs.

    Returns
    -------
    list of CaseResult
        One for each computation. An exception is a result as well.
    """
    given = _Given(case, backend, arch, seed)
    return [_run(given, computation) for computation in computations]


def kernels_of(tasks: Mapping[Case, Iterable[Computation]], backend: str, arch: str | None = None) -> list[KernelPlan]:
    """The kernels that these computations launch, each once."""
    kernels = {}
    for case, computations in tasks.items():
        given = _Given(case, backend, arch)
        for computation in computations:
            with suppress(Exception):  # the case will say so itself when it runs
                kernels |= dict.fromkeys(given.kernels(computation))
    return list(kernels)


def build_kernels(kernels: Iterable[KernelPlan], backend: str, jobs: int | None = None) -> Iterator[KernelPlan]:
    """Compile kernels into the cache, several at a time; yields each one that is done."""
    options = host.HostOptions.from_environment()

    def build(kernel: KernelPlan) -> KernelPlan:
        with suppress(CompileError):  # the cases that need it will say so themselves
            if backend == "cuda":
                nvrtc.cubin(kernel)
            else:
                host.build(kernel, options)
        return kernel

    return in_parallel(build, kernels, jobs)


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], jobs: int | None = None) -> Iterator[Result]:
    """The results in the order of the items, from `jobs` threads: as many as there are cores unless given.

    Threads are enough: both compilers run without Python's lock.
    """
    pool = ThreadPoolExecutor(jobs or _cores(), THREADS)
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C nobody waits for a compiler


def _run(given: _Given, computation: Computation) -> CaseResult:
    start = time.perf_counter()
    name, comparison, error = "", None, ""
    case = given.case
    try:
        judge = {"precision": case.precision, **given.meaning}
        forward = given.forward(computation)
        if computation.direction == "forward":
            name = _name(forward)
            result = forward(*given.inputs, **given.arrays)
            out, lse = result if case.return_lse else (result, None)
            comparison = compare(out, lse, *given.inputs, **judge)
        else:
            state = forward(*given.inputs, **given.arrays)
            backward = given.backward(computation, *state)
            judge["wrt"] = given.wrt
            name = _name(backward)
            dout, dlse = given.cotangents
            gradients = backward(dout, *given.inputs, *state, dlse=dlse, **given.arrays)
            comparison = compare_gradients(gradients, dout, *given.inputs, dlse=dlse, **judge)
    except Exception as raised:  # whatever it is, it is what became of this case, and the others are still to run
        error = f"{type(raised).__name__}: {raised}"
    return CaseResult(case, computation, name, comparison, time.perf_counter() - start, error)


class _Given:
    """A case with its arrays, which are made when first asked for and shared by all that is computed of it."""

    def __init__(self, case: Case, backend: str, arch: str | None, seed: int = 0) -> None:
        self.case = case
        self._backend = backend
        self._seed = seed
        self._options = case.options | {"backend": backend, "arch": arch}

    @functools.cached_property
    def inputs(self) -> tuple[Any, Any, Any]:
        return make_inputs(self.case, _namespace(self._backend), self._seed)

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        return self.case.arrays(_namespace(self._backend), self._seed)

    @functools.cached_property
    def meaning(self) -> dict[str, Any]:
        return self.case.meaning(_namespace(self._backend), self._seed)

    @property
    def wrt(self) -> dict[str, Any]:
        """What has a gradient besides: kernels have none of these."""
        captured = self.arrays.get("arrays", {})
        names = names_of(self.meaning) if self._backend == "numpy" else ()
        return {name: captured[name] if name in captured else self.arrays[name] for name in names}

    @functools.cached_property
    def cotangents(self) -> tuple[Any, Any]:
        return make_cotangents(self.case, _namespace(self._backend), self._seed)

    def forward(self, computation: Computation) -> AttentionPlan:
        own = {"kernel": computation.kernel} if computation.direction == "forward" else {"return_lse": True}
        return plan_attention(*self.inputs, **self._options | self.arrays | own, algorithm=computation.algorithm)

    def backward(self, computation: Computation, out: Any, lse: Any) -> BackwardPlan:
        options = {name: value for name, value in self._options.items() if name != "return_lse"}
        dout, dlse = self.cotangents
        options |= {"wrt": tuple(self.wrt)} if self.wrt else {}
        options |= self.arrays | {"dlse": dlse, "deterministic": computation.deterministic, "kernel": computation.kernel}
        return plan_attention_backward(dout, *self.inputs, out, lse, **options)

    def kernels(self, computation: Computation) -> list[KernelPlan]:
        """What is launched for a computation; for a backward with its forward, whose results need not be there yet."""
        plans = [self.forward(computation)]
        if computation.direction == "backward":
            p = plans[0].problem
            plans.append(self.backward(computation, arrays.empty(p.seen_out), arrays.empty(p.seen_lse)))
        return [plan.kernel for plan in plans if _launches(plan)]


def _namespace(backend: str) -> ModuleType:
    if backend != "cuda":
        return numpy
    import cupy

    return cupy


def _launches(plan: AttentionPlan | BackwardPlan) -> bool:
    return any(launch.blocks for launch in plan.launches)


def _name(plan: AttentionPlan | BackwardPlan) -> str:
    if plan.kernel is None:
        return "numpy"
    return plan.kernel.name if _launches(plan) else "nothing to launch"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
