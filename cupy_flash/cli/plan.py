"""``plan``: how a problem would be computed."""

from __future__ import annotations

from dataclasses import asdict

import click

from ..launch import AttentionPlan
from .arguments import json_option, takes_problem
from .output import echo_json


@click.command()
@takes_problem
@json_option
def plan(attention: AttentionPlan, as_json: bool) -> None:
    """Show how attention would be computed.

    The kernel, its constants and the reasons for them. One SHAPE stands for q, k and v alike, three for one each: 2x16x1024x64
    is (batch, heads, seq, dim). Needs no GPU and no memory for the arrays.
    """
    if not as_json:
        click.echo(str(attention))
        return
    problem, kernel = attention.problem, attention.kernel
    echo_json(
        {
            "name": kernel.name,
            "kernel": kernel.kernel,
            "architecture": kernel.architecture.name,
            "config": asdict(kernel.config),
            "reasons": kernel.reasons,
            "threads": kernel.threads,
            "shared_bytes": kernel.shared_bytes,
            "blocks": kernel.blocks(problem),
            "result_bytes": attention.result_bytes,
            "workspace_bytes": attention.workspace_bytes,
            "flops": problem.flops,
            "problem": asdict(problem),
        }
    )
