"""What comes to scores, spelt out on the command line: expressions, and arrays by their dtypes and axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from ..problem.forward import Problem
from ..problem.key_ranges import START, STOP
from ..problem.layout import FLOATS, INTEGERS, Layout, dense_layout
from .lists import size_of

DTYPES = (*FLOATS, *INTEGERS, "bool")
COORDINATES = ("b", "h", "h_kv", "q_idx", "kv_idx")
Axes = tuple[str, ...]


@dataclass(frozen=True)
class GivenScores:
    """The values of the options.

    Parameters
    ----------
    score, mask : str or None
    array : tuple of (str, str, Axes)
        Name, dtype and axes of each.
    ranges : int or None
        How many ranges of keys each query has.
    bias : Axes or None
    alibi, sinks : bool
    dropout : float or None
    """

    score: str | None
    mask: str | None
    array: tuple[tuple[str, str, Axes], ...]
    ranges: int | None
    bias: Axes | None
    alibi: bool
    sinks: bool
    dropout: float | None

    def operands(self, problem: Problem) -> dict[str, Layout]:
        """The arrays that have an option of their own, of a problem that has nothing of this yet."""
        found: dict[str, Layout] = {}
        if self.bias is not None:
            found["bias"] = _layout(self.bias, problem.dtype, problem)
        if self.alibi:
            found["alibi_slopes"] = _layout(("h",), "float32", problem)
        if self.dropout is not None:
            found["seed"] = dense_layout((2,), (0,), "uint64", None)
        return found

    def arrays(self, problem: Problem) -> dict[str, Layout]:
        """What expressions read."""
        found: dict[str, Layout] = {}
        for name, dtype, axes in self.array:
            if name in found:
                raise click.UsageError(f"--array: expected a name once, got {name!r} twice")
            found[name] = _layout(axes, dtype, problem)
        if self.ranges is not None:
            found |= {name: _layout(("q_idx", str(self.ranges)), "int32", problem) for name in (START, STOP)}
        return dict(sorted(found.items()))  # in the order in which a call gives them

    def layout_of_sinks(self, problem: Problem) -> Layout | None:
        """One logit for each head, if there are sinks."""
        return _layout(("h",), "float32", problem) if self.sinks else None


class AxesType(click.ParamType):
    """Axes of an array with commas between them: coordinates of a pair, or sizes."""

    name = "axes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Axes:
        if isinstance(value, tuple):
            return value
        axes = tuple(value.split(",")) if value else ()
        for axis in axes:
            try:
                _ = axis in COORDINATES or size_of(axis)
            except ValueError:
                self.fail(f"expected axes with commas between them, {', '.join(COORDINATES)} or sizes, got {value!r}", param, ctx)
        return axes


class ArrayType(click.ParamType):
    """An array that expressions read, as name:dtype:axes; without axes it is a number."""

    name = "name:dtype:axes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str, Axes]:
        if isinstance(value, tuple):
            return value
        name, dtype, axes = (*value.split(":"), "")[:3] if value.count(":") in (1, 2) else ("", "", "")
        if not name.isidentifier() or dtype not in DTYPES:
            expected = "a name, a dtype and axes, such as slope:float32:h, table:float32:32,h or gain:float32 for a number"
            self.fail(f"expected {expected}, got {value!r}", param, ctx)
        return name, dtype, AXES.convert(axes, param, ctx)


AXES = AxesType()


def takes_scores(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options; it is called with their values by the names that `GivenScores` has."""
    for option in reversed(
        (
            click.option("--score", metavar="TEXT", help="What scores become, such as 'score * t[h]'."),
            click.option("--mask", metavar="TEXT", help="Which pairs take part, such as 'doc[q_idx] == doc[kv_idx]'."),
            click.option(
                *("--array", "array"),
                type=ArrayType(),
                multiple=True,
                help="What the texts read, such as t:float32:h, doc:int32:q_idx, table:float32:32,h or gain:float32, a number.",
            ),
            click.option("--ranges", type=click.IntRange(min=1), help="A mask of so many ranges of keys for each query."),
            click.option("--bias", type=AXES, help="A bias with such axes, for example h,q_idx,kv_idx."),
            click.option("--alibi", is_flag=True, help="ALiBi, with a slope for each head."),
            click.option("--sinks", is_flag=True, help="A sink for each head."),
            click.option("--dropout", type=float, help="Probability of a pair to be left out."),
        )
    ):
        command = option(command)
    return command


def _layout(axes: Axes, dtype: str, problem: Problem) -> Layout:
    """That of a C-contiguous array on a device, or of a number in host memory."""
    sizes = dict(zip(COORDINATES, (math.prod(problem.batch), problem.heads_q, problem.heads_kv, problem.len_q, problem.len_kv)))
    shape = tuple(sizes[axis] if axis in sizes else size_of(axis) for axis in axes)
    return dense_layout(shape, reversed(range(len(shape))), dtype, device=0 if shape else None)
