"""``compile``: every row of the tuning tables through NVRTC, which needs no GPU."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace

import click

from ..errors import CompileError
from ..judge.check import in_parallel
from ..machine import nvrtc, snapshot
from ..machine.nvrtc import Report
from ..machine.snapshot import Snapshot, differences, rows_of
from ..plan.architecture import ARCHITECTURES, Architecture
from ..plan.kernel import PARAMS, KernelPlan
from ..plan.matrix import KINDS, every_plan
from .arguments import ARCHITECTURE, json_option
from .output import echo_json, echo_progress, table, terminal_width


@dataclass(frozen=True)
class Compiled:
    """A plan and what the compiler made of it."""

    plan: KernelPlan
    seconds: float
    report: Report | None
    log: str

    @property
    def fault(self) -> str:
        """What a shipped plan must not have, or ''."""
        return "does not compile" if self.report is None else self.report.fault


@click.command("compile")
@click.option("--arch", "architectures", type=ARCHITECTURE, multiple=True, help="For this architecture; may be repeated.")
@click.option("--all", "everything", is_flag=True, help="For every architecture: the default.")
@click.option("--dtype", "kinds", type=click.Choice(tuple(KINDS)), multiple=True, help="Only this dtype; may be repeated.")
@click.option("--kernel", "kernels", type=click.Choice(tuple(PARAMS)), multiple=True, help="Only this file; may be repeated.")
@click.option("--ptxas", is_flag=True, help="Print the assembler's log.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilations at a time; by default one per core.")
@click.option("--snapshot", "renew", is_flag=True, help=f"Name every row that differs from {snapshot.FILE}, and renew that.")
@click.option("--check-snapshot", "compare", is_flag=True, help="Only name them; exits with 1 if there are any.")
@json_option
@click.pass_context
def compile_(
    context: click.Context,
    architectures: tuple[Architecture, ...],
    everything: bool,
    kinds: tuple[str, ...],
    kernels: tuple[str, ...],
    ptxas: bool,
    jobs: int | None,
    renew: bool,
    compare: bool,
    as_json: bool,
) -> None:
    """Compile every row of the tuning tables.

    Reports registers, shared memory and spills; neither reads nor fills the cache. Exits with 1 if a kernel does not compile,
    spills registers or has its wgmma serialised. With --snapshot, what the machine code of each row was and is instead.

    \b
    Examples:
      cupy-flash compile --arch 90a
      cupy-flash compile --arch 80 --dtype tf32 --kernel fwd_v2 --ptxas
    """
    if architectures and everything:
        raise click.UsageError("--arch and --all exclude each other")
    if renew + compare + as_json > 1:
        raise click.UsageError("--snapshot, --check-snapshot and --json exclude each other")
    plans = list(every_plan(architectures or ARCHITECTURES.values(), kinds or KINDS, kernels or PARAMS))
    if not plans:
        asked = ", ".join([*map(str, architectures), *kinds, *kernels])
        raise click.UsageError(f"nothing to compile: the tuning tables have no row for {asked}")
    try:
        version = nvrtc.version()
        before = snapshot.committed() if renew or compare else None
    except CompileError as error:
        raise click.ClickException(str(error)) from error

    compiled = in_parallel(lambda plan: _compiled(plan, ptxas), plans, jobs)
    results = echo_progress(compiled, len(plans), "compiling")
    faults = [result for result in results if result.fault]
    if before is not None:
        context.exit(0 if _compare(before, results, renew) else 1)
    if as_json:
        echo_json({"nvrtc": version, "kernels": list(map(_record, results))})
    else:
        _print(results)
        click.echo(f"\n{len(results)} kernels by NVRTC {version[0]}.{version[1]}, {len(faults)} with a fault")
    context.exit(1 if faults else 0)


def _compiled(plan: KernelPlan, with_log: bool) -> Compiled:
    start = time.perf_counter()
    try:
        report = nvrtc.report(plan)
        log = report.log if with_log else ""
    except CompileError as error:
        report, log = None, str(error)
    return Compiled(plan, time.perf_counter() - start, report, log)


def _print(results: list[Compiled]) -> None:
    rows = []
    for result in results:
        report = result.report
        figures = (f"{report.registers}", f"{result.plan.shared_bytes}", f"{report.spill_bytes}") if report else ("", "", "")
        rows.append((result.plan.name, *figures, f"{result.seconds:.1f}", result.fault or "ok"))
    header = ("plan", "registers", "shared bytes", "spilled bytes", "seconds", "verdict")
    heading, *lines = table(header, rows, "<>>>><", terminal_width())
    click.echo(heading)
    for line, result in zip(lines, results):
        click.secho(line, fg="red" if result.fault else None)
        for text in result.log.splitlines():
            click.echo(f"  {text}")
    warnings = Counter(text for result in results if result.report for text in set(result.report.warnings))
    for text, count in warnings.items():
        click.echo(f"{count} of {len(results)}: {text.strip()}")


def _compare(before: Snapshot, results: list[Compiled], renew: bool) -> bool:
    """Print what differs from a snapshot, put it in its place if told so, and say whether all is well.

    Rows stay as they are where nothing was compiled. What spills is in the rows, and no more of a fault than they say.
    """
    done = {result.plan: result.report.code for result in results if result.report}
    for plan in (result.plan for result in results if not result.report):
        click.secho(f"{plan.name}: does not compile", fg="red")
    rows = {key: code for plan, cubin in done.items() for key, code in rows_of(plan, cubin).items()}
    others = {plan.name for plan in every_plan() if plan not in done}
    after = {key: code for key, code in before.rows.items() if key[0] in others} | rows
    lines = differences(before.rows, after)
    for line in lines:
        click.echo(line)
    if renew:
        snapshot.path().write_text(str(replace(before, rows=after)), encoding="utf-8")
    click.echo(f"{len(rows)} rows by NVRTC {before.compiler}: {len(lines)} differ from {snapshot.FILE}" + ", now renewed" * renew)
    return len(done) == len(results) and (renew or not lines)


def _record(result: Compiled) -> dict[str, object]:
    return {
        "architecture": result.plan.architecture.name,
        "plan": result.plan.name,
        "shared_bytes": result.plan.shared_bytes,
        "seconds": result.seconds,
        "fault": result.fault,
        "report": result.report and {name: value for name, value in asdict(result.report).items() if name not in ("log", "code")},
        "log": result.log,
    }
