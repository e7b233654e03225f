"""``plan``: how a problem would be computed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..call.backward import BackwardPlan
from ..call.forward import AttentionPlan
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from .arguments import json_option, takes_problem
from .output import echo_json


@click.command()
@json_option
@takes_problem
def plan(planned: AttentionPlan | BackwardPlan, as_json: bool) -> None:
    """Show how attention would be computed, or its gradients.

    The kernel, its constants and the reasons for them. One SHAPE stands for q, k and v alike, three for one each: 2x16x1024x64
    is (batch, heads, seq, dim). Needs no GPU and no memory for the arrays.

    \b
    Examples:
      cupy-flash plan 2x16x1024x64 --causal
      cupy-flash plan 32x1x128 8x4096x128 8x4096x128 --dtype bfloat16 --arch 90a
      cupy-flash plan 2x16x1024x64 --backward --json
      cupy-flash plan 2x16x1024x64 --score "score + t[h] * (kv_idx - q_idx)" --array t:float32:h
    """
    if not as_json:
        click.echo(str(planned))
        return
    kernel = planned.kernel
    echo_json(
        {
            "name": kernel.name,
            "kernel": kernel.file,
            "architecture": kernel.architecture.name,
            "config": asdict(kernel.config),
            "reasons": kernel.reasons,
            "threads": kernel.threads,
            "shared_bytes": kernel.shared_bytes,
            "launches": list(map(asdict, planned.launches)),
            "result_bytes": planned.result_bytes,
            "workspace_bytes": planned.workspace_bytes,
            "workspace": dict(planned.workspace.parts),
            "flops": planned.problem.flops,
            "problem": _described(planned.problem),
        }
    )


def _described(problem: Problem | BackwardProblem) -> dict[str, Any]:
    """A problem, in which what becomes of scores is said in words, as the plan prints it."""
    found, forward = asdict(problem), problem if isinstance(problem, Problem) else problem.forward
    of_forward = found if forward is problem else found["forward"]
    of_forward["scores"] = str(forward.scores).splitlines()
    return found
