"""Computing a random problem and judging what came out: the numbers, the memory around them, and what was handed in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy

import cupy_flash

from ...problem.arrays import DTYPES
from ...problem.backward import Gradients
from ...problem.forward import lse_dtype_of
from ..check import build_kernels
from ..compare import compare
from ..compare_gradients import compare_gradients
from ..oracle import sees
from .draw import Draw
from .pairs import arguments, differentiable, make_operands, meaning
from .placement import Placed
from .problems import Problem, draw_problem, draw_problem_of_pairs

SCHEDULE = "CUPY_FLASH_HOST_SCHEDULE"
WORKSPACE_GUARD = 256


DRAWN = {"problems": draw_problem, "pairs": draw_problem_of_pairs}


def run(seed: int, index: int, kind: str = "problems") -> str | None:
    """Compute problem `index` of a seed: what is wrong, in words, or None."""
    problem = DRAWN[kind](seed, index)
    try:
        wrong = judge(problem)
    except Exception as raised:  # whatever it is: a valid problem has to be computed
        wrong = f"{type(raised).__name__}: {raised}"
    return wrong and f"{wrong}\n  {problem}"


def prepare(seed: int, indices: Iterable[int], kind: str = "problems") -> None:
    """Compile the kernels of these problems, several at a time."""
    kernels: dict[Any, None] = {}
    for index in indices:
        problem = DRAWN[kind](seed, index)
        if problem.backend == "host":
            try:
                arrays = _arrays(problem)
                plan = _plan(problem, _views(problem, arrays), _others(problem, arrays))
            except Exception:  # the problem will say so itself when it runs
                continue
            if any(launch.blocks for launch in plan.launches):
                kernels |= dict.fromkeys(plan.kernels if problem.direction == "backward" else [plan.kernel])
    for _ in build_kernels(kernels, "host"):
        pass


def judge(problem: Problem) -> str | None:
    """Compute a problem: what is wrong, in words, or None."""
    arrays = _arrays(problem)
    views = _views(problem, arrays)
    given = {name: views[name] for name in problem.given}
    with _environment(SCHEDULE, problem.schedule):
        results = _compute(problem, views, _others(problem, arrays))
    named = dict(zip(("dq", "dk", "dv") if problem.direction == "backward" else ("out", "lse"), results))
    for name, placed in arrays.items():
        if name not in given and not placed.unchanged():
            return f"{name}: written, although it is an input"
        if not placed.unchanged_around():
            return f"{name}: written beside it"
    for name, result in named.items():
        if name in given and result is not None and result is not given[name]:
            return f"{name}: the caller's array was not returned"
        named[name] = result = _exchanged(problem, name, result)
        if result is not None and result.shape != problem.shape_of(name):
            return f"{name}: expected shape {problem.shape_of(name)}, got {result.shape}"
    if problem.direction == "forward" and "lse" in given:
        named["lse"] = arrays["lse"].array  # written even where it is not returned
    inputs = [_with_heads(arrays[name].array) for name in "qkv"]
    scores = {"precision": problem.options.get("precision", "ieee")} | problem.scores
    scores |= {"sinks": arrays["sinks"].array} if problem.sinks else {}
    scores |= meaning(problem.pairs, arrays) if problem.pairs else {}
    if problem.direction == "forward":
        out, lse = named["out"], named["lse"]
        two = len(problem.shapes["out"]) == 2
        out, lse = (x[None] if two and x is not None else x for x in (out, lse))
        judged = compare(out, lse, *inputs, **scores)
    else:
        dout = _with_heads(arrays["dout"].array)
        dlse = arrays["dlse"].array.reshape(dout.shape[:-1]) if problem.with_dlse else None
        others = {name: getattr(results, name) for name in ("dsinks", "dbias", "dalibi_slopes", "darrays")}
        gradients = Gradients(*map(_with_heads, named.values()), **others)
        wrt = {name: arrays[name].array for name in _wrt(problem)}
        judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, wrt=wrt, **scores)
    return None if judged.ok else judged.message


def _views(problem: Problem, arrays: dict[str, Placed]) -> dict[str, numpy.ndarray]:
    """The arrays of a call, as the caller sees them."""
    return {name: _exchanged(problem, name, arrays[name].array) for name in problem.places}


def _exchanged(problem: Problem, name: str, x: numpy.ndarray | None) -> numpy.ndarray | None:
    """An array with its axes in the order that the problem asks for, or back."""
    heads = -2 if name in ("lse", "dlse") else -3
    if x is None or x.ndim < -heads or problem.options.get("layout") != "bshd":
        return x
    return numpy.swapaxes(x, heads, heads + 1)


def _compute(problem: Problem, views: dict[str, numpy.ndarray], others: dict[str, Any]) -> tuple[Any, ...]:
    """The results: out and lse or None, or the gradients."""
    wrt = {"wrt": _wrt(problem)} if _wrt(problem) else {}
    inputs = [views[name] for name in "qkv"]
    given = {name: views[name] for name in problem.given}
    options = problem.options | {"backend": problem.backend, "algorithm": problem.algorithm}
    if problem.entry == "plan":
        plan = _plan(problem, views, others)
        workspace = _Workspace(plan.workspace_bytes) if problem.own_workspace else None
        given |= {"workspace": workspace.array} if workspace else {}
        if problem.direction == "forward":
            result = plan(*inputs, **others, **given)
        else:
            result = plan(*_operands(views), **_dlse(problem, views), **others, **given)
        if workspace and not workspace.unchanged_around():
            raise AssertionError("workspace: written beside it")
    elif problem.direction == "forward":
        result = cupy_flash.attention(*inputs, **options, **others, **given)
    elif problem.entry == "vjp":
        _, vjp = cupy_flash.attention_vjp(*inputs, **options, **others, **wrt, deterministic=problem.deterministic)
        return vjp(views["dout"], *_dlse(problem, views).values())
    else:
        options |= _dlse(problem, views) | others | wrt | {"deterministic": problem.deterministic}
        result = cupy_flash.attention_backward(*_operands(views), **options, **given)
    if problem.direction == "backward":
        return result
    return result if problem.options.get("return_lse") else (result, None)


def _plan(problem: Problem, views: dict[str, numpy.ndarray], others: dict[str, Any]) -> Any:
    options = problem.options | {"backend": problem.backend, "algorithm": problem.algorithm}
    options |= {"arch": problem.arch, "kernel": problem.kernel} | {name: views[name] for name in problem.given}
    options |= others
    if problem.direction == "forward":
        return cupy_flash.plan_attention(*(views[name] for name in "qkv"), **options)
    options |= _dlse(problem, views) | {"deterministic": problem.deterministic}
    options |= {"wrt": _wrt(problem)} if _wrt(problem) else {}
    return cupy_flash.plan_attention_backward(*_operands(views), **options)


def _operands(views: dict[str, numpy.ndarray]) -> list[numpy.ndarray]:
    return [views[name] for name in ("dout", "q", "k", "v", "out", "lse")]


def _dlse(problem: Problem, views: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    return {"dlse": views["dlse"]} if problem.with_dlse else {}


def _others(problem: Problem, arrays: dict[str, Placed]) -> dict[str, Any]:
    """The arrays of a call that are not q, k and v or made of them, and a seed."""
    found = {"sinks": arrays["sinks"].array} if problem.sinks else {}
    return found | (arguments(problem.pairs, arrays) if problem.pairs else {})


def _wrt(problem: Problem) -> tuple[str, ...]:
    """What else has a gradient."""
    return () if problem.pairs is None or problem.direction == "forward" else differentiable(problem.pairs)


def _arrays(problem: Problem) -> dict[str, Placed]:
    """All arrays of a call, each in guarded memory. A backward gets the results of NumPy's forward."""
    numbers = Draw("values", problem.seed, problem.index).numbers()
    dtype, wide = DTYPES[problem.dtype], DTYPES[lse_dtype_of(problem.dtype)]
    arrays = {}
    for name, values in zip("qkv", _inputs(problem, numbers)):
        arrays[name] = Placed(values.astype(dtype), problem.places[name])
    if problem.sinks:
        arrays["sinks"] = Placed(_sink_values(problem).astype(DTYPES[problem.sinks_dtype]), problem.places["sinks"])
    if problem.pairs:
        arrays |= make_operands(problem.pairs, problem.dtype, numbers)
    if problem.direction == "backward":
        state = dict.fromkeys(("precision", "causal", "window", "prefix", "softcap", "scale"))
        state = {name: problem.options[name] for name in state if name in problem.options}
        state |= _others(problem, arrays) | (problem.pairs.options if problem.pairs else {})
        out, lse = cupy_flash.attention(*(arrays[name].array for name in "qkv"), **state, return_lse=True, backend="numpy")
        shape = problem.shapes["out"]
        values = {"dout": numbers.standard_normal(shape).astype(dtype), "out": out, "lse": lse}
        values["dlse"] = numbers.standard_normal(shape[:-1]).astype(wide)
        arrays |= {name: Placed(x, problem.places[name]) for name, x in values.items()}
    for name in problem.given:
        shape = problem.shape_of(name)
        arrays[name] = Placed(numpy.full(shape, numpy.nan, wide if name == "lse" else dtype), problem.places[name])
    return arrays


def _inputs(problem: Problem, numbers: numpy.random.Generator) -> list[numpy.ndarray]:
    """q, k and v in float64."""
    shapes = [problem.shapes[name] for name in "qkv"]
    if problem.values == "constant":
        return [numpy.full(shape, number) for shape, number in zip(shapes, (0.5, 0.75, 1.5))]
    q, k, v = (numbers.standard_normal(shape) for shape in shapes)
    scale, dim = problem.scores["scale"], shapes[0][-1]
    if problem.values == "offset":
        return [q + 0.5, k + 0.5, v + 0.5]
    if problem.values == "large":  # scores spread to about +-1000
        spread = (300 / (abs(scale) * dim**0.5)) ** 0.5
        return [q * spread, k * spread, v]
    if problem.values == "one_hot":
        q, k = (numpy.broadcast_to(numpy.eye(dim)[numpy.arange(x.shape[-2]) % dim], x.shape) for x in (q, k))
        return [q * (40 / scale), k, v]
    if problem.values in ("hidden", "nan_key") and q.shape[-2] and k.shape[-2]:
        bounds = [problem.scores[name] for name in ("first_key", "last_key", "prefix")]
        seen = sees(q.shape[-2], k.shape[-2], *bounds).any(axis=0)
        hidden = numpy.flatnonzero(~seen) if problem.values == "hidden" else numbers.integers(0, k.shape[-2], 1)
        k[..., hidden, :] = numbers.choice([numpy.nan, numpy.inf, -numpy.inf] if problem.values == "hidden" else [numpy.nan])
    return [q, k, v]


def _sink_values(problem: Problem) -> numpy.ndarray:
    """The sinks in float64. Scores of ordinary inputs lie within +-20, so that some are far from these and others not."""
    numbers = Draw("sinks", problem.seed, problem.index).numbers()
    sinks = 2 * numbers.standard_normal(problem.shapes["sinks"])
    if problem.sinks in ("above", "below"):
        return sinks + numbers.choice([5, 20, 60, 100, 1000]) * (1 if problem.sinks == "above" else -1)
    if problem.sinks == "one of -inf" and sinks.size:
        sinks.reshape(-1)[numbers.integers(sinks.size)] = -numpy.inf
    return sinks


def _with_heads(x: numpy.ndarray) -> numpy.ndarray:
    return x if x.ndim > 2 else x[None]


class _Workspace:
    """Memory for a plan, with a guard before and behind it."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = numpy.full(nbytes + 2 * WORKSPACE_GUARD, 0xA5, numpy.uint8)
        start = WORKSPACE_GUARD - self._buffer.ctypes.data % 16
        self.array = self._buffer[start : start + nbytes]
        self._ends = self._buffer[:start], self._buffer[start + nbytes :]

    def unchanged_around(self) -> bool:
        return all((end == 0xA5).all() for end in self._ends)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
