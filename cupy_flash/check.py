"""Does it compute right, on this machine? The shared cases, run on a backend and judged against the float64 oracle.

Compiling costs far more than computing, so the kernels of all cases are built first, in parallel, and the cases then run one
after another: what a failure of the device leaves behind is blamed on the case that caused it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy

from . import host, nvrtc
from .api import plan_attention
from .architecture import Architecture
from .cases import Case, full_cases, make_inputs, quick_cases
from .compare import Comparison, compare
from .errors import CompileError
from .launch import AttentionPlan
from .matrix import has
from .plan import Plan

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class CaseResult:
    """What became of a case.

    Parameters
    ----------
    case : Case
    plan : str
        Name of the kernel's plan, 'numpy', or 'nothing to launch'; empty if planning failed.
    comparison : Comparison or None
        None if an exception came first.
    seconds : float
        From making the inputs to the judgement.
    error : str
        The exception, or ''.
    """

    case: Case
    plan: str
    comparison: Comparison | None
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


def kind_of(case: Case) -> str:
    """The dtype of a case, or 'tf32'."""
    return "tf32" if case.precision == "tf32" else case.dtype


def select_cases(suite: str, dtype: str | None = None, dim: int | None = None) -> tuple[Case, ...]:
    """The cases of suite 'quick' or 'full', of one dtype ('tf32' counts as one) and one head dim if given."""
    cases = {"quick": quick_cases, "full": full_cases}[suite]()
    return tuple(case for case in cases if dtype in (None, kind_of(case)) and dim in (None, case.dim))


def why_skipped(case: Case, backend: str, architecture: Architecture | None = None) -> str:
    """Why a suite leaves this case out on a backend and, for kernels, an architecture; '' if it does not.

    Not asked of the planner: a planner that refuses what it should compute must fail the check.
    """
    if backend == "numpy":
        return ""
    if case.dtype == "float64":
        return "only backend 'numpy' computes float64"
    if backend == "host" and case.heavy:
        return "too heavy for a CPU that executes kernels"
    if architecture is not None and not has(architecture, kind_of(case)):
        return f"{architecture} has no {kind_of(case)}"
    return ""


def run_case(case: Case, backend: str, *, arch: str | None = None, seed: int = 0) -> CaseResult:
    """Compute a case and judge the result.

    Parameters
    ----------
    case : Case
    backend : {'cuda', 'host', 'numpy'}
    arch : str, optional
        Architecture for backend 'host', as in `plan_attention`.
    seed : int
        Of the inputs.

    Returns
    -------
    CaseResult
        An exception is a result as well.
    """
    start = time.perf_counter()
    name, comparison, error = "", None, ""
    try:
        inputs, plan = _planned(case, backend, arch, seed)
        name = _name(plan)
        result = plan(*inputs)
        out, lse = result if case.return_lse else (result, None)
        comparison = compare(out, lse, *inputs, precision=case.precision, **case.scores)
    except Exception as raised:  # whatever it is, it is what became of this case, and the others are still to run
        error = f"{type(raised).__name__}: {raised}"
    return CaseResult(case, name, comparison, time.perf_counter() - start, error)


def kernels_of(cases: Iterable[Case], backend: str, arch: str | None = None) -> list[Plan]:
    """The kernels that the cases launch, each once."""
    kernels = {}
    for case in cases:
        try:
            _, plan = _planned(case, backend, arch)
        except Exception:  # the case will say so itself when it runs
            continue
        if plan.kernel is not None and not plan.problem.empty:
            kernel = plan.kernel
            kernels.setdefault((kernel.kernel, kernel.architecture, kernel.config), kernel)
    return list(kernels.values())


def build_kernels(kernels: Iterable[Plan], backend: str, jobs: int | None = None) -> Iterator[Plan]:
    """Compile kernels into the cache, several at a time; yields each one that is done."""
    options = host.HostOptions.from_environment()

    def build(kernel: Plan) -> Plan:
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
    with ThreadPoolExecutor(jobs or _cores()) as pool:
        yield from pool.map(function, items)


def _planned(case: Case, backend: str, arch: str | None, seed: int = 0) -> tuple[tuple[Any, ...], AttentionPlan]:
    inputs = make_inputs(case, _namespace(backend), seed)
    return inputs, plan_attention(*inputs, **case.options, backend=backend, arch=arch)


def _namespace(backend: str) -> ModuleType:
    if backend != "cuda":
        return numpy
    import cupy

    return cupy


def _name(plan: AttentionPlan) -> str:
    if plan.problem.empty:
        return "nothing to launch"
    return "numpy" if plan.kernel is None else plan.kernel.name


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
