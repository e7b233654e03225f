"""The command line: one module per command. Nothing here imports CuPy before a command needs it."""

from __future__ import annotations

import click

from .. import __version__
from . import bench, cache, check, compile, doctor, plan, source, trace, traffic


@click.group(name="cupy-flash", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cupy-flash")
def main() -> None:
    """Exact attention for CuPy, NumPy and everything else that is not PyTorch."""


for command in (
    check.check,
    doctor.doctor,
    plan.plan,
    compile.compile_,
    source.source,
    cache.cache,
    bench.bench,
    traffic.traffic,
    trace.trace,
):
    main.add_command(command)
