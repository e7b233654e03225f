"""The command line: one module per command. Nothing here imports CuPy before a command needs it."""

from __future__ import annotations

import click

from .. import __version__
from . import bench, bench_distributed, bench_lengths, bench_scores, cache, check, compile, doctor, plan, source, trace, traffic
from .output import wants_no_colour
from .process import Program


@click.group(name="cupy-flash", cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cupy-flash")
@click.pass_context
def main(context: click.Context) -> None:
    """Exact attention for CuPy, NumPy and everything else that is not PyTorch.

    \b
    Examples:
      cupy-flash doctor
      cupy-flash check
      cupy-flash plan 2x16x1024x64 --causal
    """
    if wants_no_colour():
        context.color = False


for command in (
    check.check,
    doctor.doctor,
    plan.plan,
    compile.compile_,
    source.source,
    cache.cache,
    bench.bench,
    bench_scores.bench_scores,
    bench_lengths.bench_lengths,
    bench_distributed.bench_distributed,
    traffic.traffic,
    trace.trace,
):
    main.add_command(command)
