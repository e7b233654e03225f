"""What several commands take: architectures, shapes, and an attention problem spelt out on the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import click

from ..call.backward import BackwardPlan
from ..call.forward import AttentionPlan
from ..errors import UnsupportedError
from ..plan.architecture import ARCHITECTURES, HOST, Architecture, architecture_named
from ..plan.backward import make_backward_plan
from ..plan.forward import make_forward_plan
from ..plan.query_parts import in_parts
from ..problem.backward import make_backward_problem
from ..problem.forward import make_problem
from ..problem.layout import FLOATS, Layout, dense_layout
from ..problem.options import Options
from .devices import own_architecture
from .lists import size_of
from .output import UserError, echo_json
from .score_options import GivenScores, takes_scores


class ArchitectureType(click.ParamType):
    """The name of an architecture."""

    name = "arch"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(ARCHITECTURES)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Architecture:
        if isinstance(value, Architecture):
            return value
        try:
            return architecture_named(value)
        except UnsupportedError as error:
            self.fail(str(error), param, ctx)


class ShapeType(click.ParamType):
    """Sizes with an x between them, such as 2x16x1024x64."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(map(size_of, value.split("x")))
        except ValueError:
            self.fail(f"expected sizes below 2^63 with an x between them, such as 2x16x1024x64, got {value!r}", param, ctx)


class WindowType(click.ParamType):
    """Both ends of a window, L:R; an end left out is unbounded."""

    name = "L:R"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | None, int | None]:
        if isinstance(value, tuple):
            return value
        try:
            left, right = (int(end) if end else None for end in value.split(":"))
        except ValueError:
            self.fail(f"expected two integers L:R, either of which may be left out, got {value!r}", param, ctx)
        return left, right


ARCHITECTURE = ArchitectureType()
SHAPE = ShapeType()
WINDOW = WindowType()


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option --json, with which an error is an object on standard output as well."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def wrapper(*arguments: Any, as_json: bool, **others: Any) -> None:
        try:
            command(*arguments, as_json=as_json, **others)
        except click.ClickException as error:
            if as_json:
                echo_json({"error": error.format_message()})
            raise

    return wrapper


def takes_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the arguments that describe a problem; it is called with the plan that they lead to."""

    @click.argument("shapes", type=SHAPE, nargs=-1, required=True, metavar="SHAPE...")
    @click.option("--dtype", type=click.Choice(FLOATS), default="float16", show_default=True, help="Of the arrays.")
    @click.option("--causal", "causal", flag_value="bottom_right", help="The last query sees the last key.")
    @click.option("--top-left", "causal", flag_value="top_left", help="Causal, and the first query sees the first key only.")
    @click.option("--window", type=WINDOW, help="Keys seen before and behind a query's own place, such as 128:0 or 128:.")
    @click.option("--prefix", type=int, default=0, help="So many keys at the beginning are seen by all queries.")
    @click.option("--softcap", type=float, help="Scores go through softcap * tanh(score / softcap).")
    @click.option("--scale", type=float, help="By default 1 / sqrt(dim).")
    @click.option("--precision", type=click.Choice(("ieee", "tf32")), help="Of float32 products on tensor cores.")
    @click.option("--algorithm", type=click.Choice(("auto", "v1", "v2")), default="auto", show_default=True, help="Loop order.")
    @takes_scores
    @click.option("--backward", is_flag=True, help="The gradients instead of the attention.")
    @click.option("--deterministic", is_flag=True, help="Of --backward: the same bits each time.")
    @click.option("--arch", type=ARCHITECTURE, help=f"By default that of the first GPU, or {HOST.name} without one.")
    @functools.wraps(command)
    def wrapper(
        shapes: tuple[tuple[int, ...], ...],
        dtype: str,
        causal: str | None,
        backward: bool,
        deterministic: bool,
        arch: Architecture | None,
        **others: Any,
    ) -> None:
        if deterministic and not backward:
            raise click.UsageError("--deterministic is an option of --backward; attention itself always is")
        given = {name: others.pop(name) for name in ("window", "prefix", "softcap", "scale", "precision", "algorithm")}
        scores = GivenScores(**{field.name: others.pop(field.name) for field in fields(GivenScores)})
        if scores.mask is not None and scores.ranges is not None:
            raise click.UsageError("--mask and --ranges exclude each other")
        options = Options(causal=causal or False, backend="cuda", **given)
        options = replace(options, score=scores.score, mask=scores.mask, dropout=scores.dropout)
        if len(shapes) not in (1, 3):
            raise click.UsageError(f"expected one shape for all of q, k, v, or three, got {len(shapes)}")
        layouts = tuple(_dense(shape, dtype) for shape in shapes * (3 // len(shapes)))
        architecture = arch or own_architecture() or HOST
        try:
            if backward:
                planned = _planned_backward(layouts, options, scores, architecture, deterministic)
            else:
                planned = _planned(layouts, options, scores, architecture)
        except (TypeError, ValueError, UnsupportedError) as error:
            raise UserError(str(error)) from error
        command(planned, **others)

    return wrapper


def _dense(shape: tuple[int, ...], dtype: str) -> Layout:
    """The layout of a C-contiguous array on a device. No array is made and no device is touched."""
    return dense_layout(shape, reversed(range(len(shape))), dtype, device=0)


def _planned(layouts: tuple[Layout, ...], options: Options, scores: GivenScores, architecture: Architecture) -> AttentionPlan:
    problem = make_problem(*layouts, options, **_of_scores(layouts, scores))
    return AttentionPlan(problem, make_forward_plan(problem, architecture), returns_lse=False)


def _planned_backward(
    layouts: tuple[Layout, ...], options: Options, scores: GivenScores, architecture: Architecture, deterministic: bool
) -> BackwardPlan:
    of_scores = _of_scores(layouts, scores)
    forward = make_problem(*layouts, replace(options, return_lse=True), **of_scores)
    out, lse = (_dense(x.shape, x.dtype) for x in (forward.seen_out, forward.seen_lse))
    problem = make_backward_problem(out, *layouts, out, lse, options, deterministic=deterministic, **of_scores)
    return BackwardPlan(problem, make_backward_plan(in_parts(problem), architecture))


def _of_scores(layouts: tuple[Layout, ...], scores: GivenScores) -> dict[str, Any]:
    """What comes to scores, with axes as long as those of the plain problem."""
    plain = make_problem(*layouts, Options(backend="cuda"))
    return {"operands": scores.operands(plain), "arrays": scores.arrays(plain), "sinks": scores.layout_of_sinks(plain)}
