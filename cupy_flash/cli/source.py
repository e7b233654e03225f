"""``source``: the text that is compiled."""

from __future__ import annotations

import click

from ..call.backward import BackwardPlan
from ..call.forward import AttentionPlan
from ..machine.source import source_of
from .arguments import takes_problem


@click.command()
@takes_problem
@click.option("--file", "name", help="Print this file only, such as config.cuh, byte for byte.")
def source(planned: AttentionPlan | BackwardPlan, name: str | None) -> None:
    """Print exactly the text that is compiled.

    The kernel comes first, then its headers, each file behind a line with its name; config.cuh holds the values of the plan.
    SHAPE and options are those of the command plan.

    \b
    Examples:
      cupy-flash source 2x16x1024x64 --causal
      cupy-flash source 2x16x1024x64 --file config.cuh
    """
    files = source_of(planned.kernel)
    if name is None:
        for file, text in files.items():
            click.echo(f"// ---- {file} ----\n{text}".encode())
    elif name in files:
        click.echo(files[name].encode(), nl=False)
    else:
        raise click.BadParameter(f"expected one of {', '.join(files)}, got {name!r}", param_hint="--file")
