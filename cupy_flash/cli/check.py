"""``check``: results and gradients of the shared cases on one backend, judged against the float64 oracle."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from dataclasses import asdict
from itertools import chain
from typing import TypeAlias

import click

from ..errors import CompileError
from ..judge import check as checks
from ..judge.cases import Case, case_named, full_cases
from ..judge.check import FORWARD_V1, CaseResult, Computation
from ..machine import toolchain
from ..plan.architecture import HOST, Architecture
from ..plan.matrix import KINDS
from .arguments import ARCHITECTURE, json_option
from .devices import INSTALL_CUPY, cupy_installed, own_architecture
from .output import echo_json, echo_progress, table, terminal_width

Tasks: TypeAlias = dict[Case, list[Computation]]
Skipped: TypeAlias = dict[tuple[Case, Computation], str]  # with the reason


@click.command()
@click.option(
    "--backend", type=click.Choice(("auto", "cuda", "host", "numpy")), default="auto", help="auto: cuda, or host without a GPU."
)
@click.option("--quick/--full", "quick", default=None, help="Which suite. By default full on a GPU, quick elsewhere.")
@click.option("--dtype", type=click.Choice((*KINDS, "float64")), help="Only cases of this dtype; tf32 counts as one.")
@click.option("--dim", type=click.IntRange(min=1), help="Only cases with this head dim.")
@click.option("--case", "names", multiple=True, metavar="NAME", help="This case instead of a suite; may be repeated.")
@click.option("--direction", type=click.Choice(("forward", "backward", "both")), default="both", help="Results, gradients or both.")
@click.option("--algorithm", type=click.Choice(("v1", "v2", "all")), default="all", help="Of the kernels; v1 has no backward.")
@click.option("--arch", type=ARCHITECTURE, help=f"What backend host executes; by default {HOST.name}.")
@json_option
@click.pass_context
def check(
    context: click.Context,
    backend: str,
    quick: bool | None,
    dtype: str | None,
    dim: int | None,
    names: tuple[str, ...],
    direction: str,
    algorithm: str,
    arch: Architecture | None,
    as_json: bool,
) -> None:
    """Compute the shared cases and judge the results.

    Results and gradients, against attention in float64, with a bound that follows from the arithmetic. A suite leaves out what its
    backend does not compute, and the quick one what would take a CPU too long, and says so; a case asked for by name always runs.
    Exits with 1 if a case fails.

    \b
    Examples:
      cupy-flash check
      cupy-flash check --backend host --arch 90a --dim 64
      cupy-flash check --case float16-h7x1-q61-k97-d40-top_left
    """
    start = time.perf_counter()
    backend, architecture = _resolved(backend, arch)
    computations = checks.select_computations(backend, direction, algorithm, architecture)
    if not computations:
        asked = "forward or backward" if direction == "both" else direction
        raise click.UsageError(f"nothing to run: on backend {backend} there is no {asked} by {algorithm}")
    if names and (dtype or dim or quick is not None):
        raise click.UsageError("--case names the cases, so --quick, --full, --dtype and --dim have nothing to select")
    if names:
        tasks, skipped = {_case(name): list(computations) for name in names}, {}
    else:
        suite = "quick" if (backend != "cuda" if quick is None else quick) else "full"
        tasks, skipped = _selected(suite, dtype, dim, computations, backend, architecture)

    results = _run(tasks, backend, arch and arch.name)
    seconds = time.perf_counter() - start
    if as_json:
        _print_json(results, skipped, backend, architecture, seconds)
    else:
        _print_table(results, skipped)
        _print_failures(results, f"{context.command_path} --backend {backend}" + (f" --arch {arch.name}" if arch else ""))
        click.echo(f"\n{_summary(results, skipped)} on {_place(backend, architecture)} in {seconds:.1f} s")
    context.exit(0 if all(result.ok for result in results) else 1)


def _resolved(backend: str, arch: Architecture | None) -> tuple[str, Architecture | None]:
    """The backend meant and the architecture that it executes: None on NumPy. An error if it cannot run here at all."""
    own = own_architecture() if backend in ("auto", "cuda") else None
    if backend == "auto":
        backend = "host" if own is None else "cuda"
    if arch is not None and backend != "host":
        raise click.UsageError(f"--arch is for backend host, which executes any architecture, and this is backend {backend}")
    if backend == "numpy":
        return backend, None
    if backend == "cuda":
        if own is None and not cupy_installed():
            raise click.ClickException(f"backend cuda needs CuPy: {INSTALL_CUPY}")
        if own is None:
            raise click.ClickException("there is no CUDA device that kernels could run on; the command doctor says why")
        return backend, own
    try:
        toolchain.prove()
    except CompileError as error:
        raise click.ClickException(str(error)) from error
    return backend, arch or HOST


def _case(name: str) -> Case:
    try:
        return case_named(name)
    except ValueError:
        near = difflib.get_close_matches(name, [case.name for case in full_cases()], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; --full prints all names"
        raise click.BadParameter(f"no case is named {name!r}{hint}", param_hint="--case") from None


def _selected(
    suite: str,
    dtype: str | None,
    dim: int | None,
    computations: tuple[Computation, ...],
    backend: str,
    architecture: Architecture | None,
) -> tuple[Tasks, Skipped]:
    """What to compute of which case, and what to skip with the reason."""
    cases = checks.select_cases(suite, dtype, dim)
    reasons = {(case, x): checks.why_skipped(case, x, backend, architecture) for case in cases for x in computations}
    if suite == "quick" and backend == "host" and FORWARD_V1 in computations:
        served = [case for case in cases if not reasons[case, FORWARD_V1]]
        for case in checks.beyond_main_kernel(served, FORWARD_V1, backend, architecture.name):
            reasons[case, FORWARD_V1] = "another kernel of v1: only in --full"
    skipped = {task: reason for task, reason in reasons.items() if reason}
    tasks: Tasks = {}
    for (case, computation), reason in reasons.items():
        if not reason:
            tasks.setdefault(case, []).append(computation)
    if not tasks:
        why = ", ".join(dict.fromkeys(skipped.values())) or f"no {suite} case has this dtype and head dim"
        raise click.UsageError(f"nothing to run: {why}")
    return tasks, skipped


def _run(tasks: Tasks, backend: str, arch: str | None) -> list[CaseResult]:
    kernels = checks.kernels_of(tasks, backend, arch)
    if kernels:
        echo_progress(checks.build_kernels(kernels, backend), len(kernels), "building kernels")
    results = (checks.run_case(case, computations, backend, arch=arch) for case, computations in tasks.items())
    return list(chain.from_iterable(echo_progress(results, len(tasks), "running cases   ")))


def _print_table(results: list[CaseResult], skipped: Skipped) -> None:
    rows, colours = [], [None]
    for result in results:
        figures = [f"{x:.1e}" for x in result.figures] if result.figures else ("", "")
        verdict = "ok" if result.ok else "FAILED"
        rows.append((result.case.name, str(result.computation), result.plan, *figures, verdict))
        colours.append(None if result.ok else "red")
    for (case, computation), reason in skipped.items():
        rows.append((case.name, str(computation), reason, "", "", "skipped"))
        colours.append("yellow")
    lines = table(("case", "computed", "plan", "max error", "allowed", "verdict"), rows, "<<<>><", terminal_width())
    for line, colour in zip(lines, colours):
        click.secho(line, fg=colour)


def _print_failures(results: list[CaseResult], command: str) -> None:
    """What is wrong with each case, and the command that repeats it."""
    for result in results:
        if not result.ok:
            # With one case, which is what the command printed here runs, there is room for a compiler's whole log.
            message = result.message if len(results) == 1 else _headline(result.message)
            computation = result.computation
            again = f"--direction {computation.direction} --algorithm {computation.algorithm} --case {result.case.name}"
            click.echo(f"\n{computation} of {result.case.name}: {message}\n  {command} {again}")


def _headline(message: str) -> str:
    """The line of a message that says most: of a compiler's log the first error, of anything else the first line."""
    lines = message.splitlines()
    return next((line.strip() for line in lines if "error:" in line), lines[0])


def _summary(results: list[CaseResult], skipped: Skipped) -> str:
    passed = sum(result.ok for result in results)
    words = [f"{passed} passed", f"{len(results) - passed} failed"]
    words += [f"{number} skipped ({reason})" for reason, number in Counter(skipped.values()).items()]
    return ", ".join(words)


def _place(backend: str, architecture: Architecture | None) -> str:
    return f"backend {backend}" + (f" ({architecture})" if architecture else "")


def _print_json(
    results: list[CaseResult], skipped: Skipped, backend: str, architecture: Architecture | None, seconds: float
) -> None:
    passed = sum(result.ok for result in results)
    echo_json(
        {
            "backend": backend,
            "architecture": architecture and architecture.name,
            "seconds": seconds,
            "passed": passed,
            "failed": len(results) - passed,
            "results": list(map(_record, results)),
            "skipped": [
                {"case": case.name, "computation": str(computation), "reason": reason}
                for (case, computation), reason in skipped.items()
            ],
        }
    )


def _record(result: CaseResult) -> dict[str, object]:
    return {
        "case": result.case.name,
        "computation": str(result.computation),
        "plan": result.plan,
        "ok": result.ok,
        "seconds": result.seconds,
        "error": result.error,
        "comparison": result.comparison and asdict(result.comparison),
    }
