"""How commands speak: tables and JSON on standard output, progress on standard error, errors on one line."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

GAP = "  "
NARROWEST = 8  # what a shortened column keeps


class UserError(click.ClickException):
    """A request that cannot be served: one line, exit code 2."""

    exit_code = 2


def echo_json(data: Any) -> None:
    """Print `data` as JSON. Infinity and NaN, which JSON has no word for, become null."""
    click.echo(json.dumps(_finite(data), indent=2))


def echo_progress(items: Iterable[Any], length: int, label: str) -> list[Any]:
    """Exhaust `items` behind a progress bar on standard error, and return them."""
    with click.progressbar(items, length=length, label=label, file=sys.stderr) as bar:
        return list(bar)


def terminal_width() -> int | None:
    """Columns of the terminal; None where standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def tflops(rate: float) -> str:
    """Operations per second in TFLOP/s, with three digits or more."""
    return f"{rate / 1e12:.{0 if rate >= 1e14 else 1}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], sides: str, width: int | None = None) -> list[str]:
    """The lines of a table with aligned columns.

    Parameters
    ----------
    header : sequence of str
    rows : iterable of sequence of str
    sides : str
        For each column '<' or '>': the side that it is aligned to.
    width : int, optional
        Characters that a line may have. The widest columns are shortened, in the middle, until it fits.
    """
    lines = [header, *rows]
    sizes = [max(map(len, column)) for column in zip(*lines)]
    while width is not None and sum(sizes) + len(GAP) * (len(sizes) - 1) > width and max(sizes) > NARROWEST:
        sizes[sizes.index(max(sizes))] -= 1
    return [
        GAP.join(f"{_shortened(cell, size):{side}{size}}" for cell, side, size in zip(line, sides, sizes)).rstrip()
        for line in lines
    ]


def _shortened(text: str, size: int) -> str:
    if len(text) <= size:
        return text
    head = size // 2
    return f"{text[:head]}…{text[head + 1 - size :]}"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
