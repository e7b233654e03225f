"""Running random problems of lengths: their kernels compiled, their functions called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cupy_flash

from ..check import build_kernels
from .judging import SCHEDULE, _environment
from .judging_lengths import Call, judge, make_call
from .lengths import draw_problem_of_lengths


def run(seed: int, index: int) -> str | None:
    """Compute problem `index` of a seed: what is wrong, in words, or None."""
    problem = draw_problem_of_lengths(seed, index)
    try:
        with _environment(SCHEDULE, problem.schedule):
            wrong = judge(problem, compute)
    except Exception as raised:  # whatever it is: a valid problem has to be computed
        wrong = f"{type(raised).__name__}: {raised}"
    return wrong and f"{wrong}\n  {problem}"


def prepare(seed: int, indices: Iterable[int]) -> None:
    """Compile the kernels of these problems, several at a time."""
    kernels: dict[Any, None] = {}
    for index in indices:
        problem = draw_problem_of_lengths(seed, index)
        if problem.backend == "host":
            try:
                plan = plan_of(make_call(problem))
            except Exception:  # the problem will say so itself when it runs
                continue
            if any(launch.blocks for launch in plan.launches):
                kernels |= dict.fromkeys(plan.kernels if problem.direction == "backward" else (plan.kernel,))
    for _ in build_kernels(kernels, "host"):
        pass


def plan_of(call: Call) -> Any:
    """The plan of a problem."""
    p = call.problem
    options = call.options | call.others | {"backend": p.backend, "arch": p.arch, "kernel": p.kernel}
    options |= {name: call.view(name) for name in p.given}
    if p.direction == "forward":
        return cupy_flash.plan_attention(*(call.view(name) for name in "qkv"), **options)
    options |= _dlse(call) | _wrt(call) | {"deterministic": p.deterministic}
    options.pop("return_lse", None)
    return cupy_flash.plan_attention_backward(*_operands(call), **options)


def compute(call: Call) -> Any:
    """The results: out and lse or None, or the gradients."""
    p = call.problem
    inputs = [call.view(name) for name in "qkv"]
    call.given = {name: call.view(name) for name in p.given}
    options = call.options | call.others | {"backend": p.backend}
    if p.entry == "plan":
        plan = plan_of(call)
        others = {name: x for name, x in call.others.items()}
        operands = inputs if p.direction == "forward" else _operands(call)
        result = plan(*operands, **others, **(_dlse(call) if p.direction == "backward" else {}), **call.given)
    elif p.direction == "forward":
        result = cupy_flash.attention(*inputs, **options, **call.given)
    else:
        options.pop("return_lse", None)
        options |= _wrt(call) | {"deterministic": p.deterministic}
        if p.entry == "vjp":
            _, vjp = cupy_flash.attention_vjp(*inputs, **options)
            return vjp(call.view("dout"), *_dlse(call).values())
        result = cupy_flash.attention_backward(*_operands(call), **options, **_dlse(call), **call.given)
    if p.direction == "backward":
        return result
    return result if p.options.get("return_lse") else (result, None)


def _operands(call: Call) -> list[Any]:
    return [call.view(name) for name in ("dout", "q", "k", "v", "out", "lse")]


def _dlse(call: Call) -> dict[str, Any]:
    return {"dlse": call.view("dlse")} if call.problem.with_dlse else {}


def _wrt(call: Call) -> dict[str, Any]:
    return {"wrt": call.wrt} if call.wrt else {}
