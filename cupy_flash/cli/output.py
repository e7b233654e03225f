"""How commands speak: tables and JSON on standard output, progress on standard error, errors on one line."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

GAP = "  "
NARROWEST = 8  # what a shortened column keeps
PAUSE = 5  # seconds between two lines of progress


class UserError(click.ClickException):
    """A request that cannot be served: one line, exit code 2."""

    exit_code = 2


def echo_json(data: Any) -> None:
    """Print `data` as JSON. Infinity and NaN, which JSON has no word for, become null."""
    click.echo(json.dumps(_finite(data), indent=2))


def echo_progress(items: Iterable[Any], length: int, label: str) -> list[Any]:
    """Exhaust `items` and return them; how many there are is on standard error: a bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty() or is_dumb():
        return list(_counted(items, length, label.strip()))
    with click.progressbar(items, length=length, label=label, file=sys.stderr) as bar:
        return list(bar)


def _counted(items: Iterable[Any], length: int, label: str) -> Iterator[Any]:
    click.echo(f"{label}: 0 of {length}", err=True)
    shown = time.monotonic()
    for number, item in enumerate(items, 1):
        if number == length or time.monotonic() - shown >= PAUSE:
            click.echo(f"{label}: {number} of {length}", err=True)
            shown = time.monotonic()
        yield item


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor, and understands no colours."""
    return os.environ.get("TERM") == "dumb"


def wants_no_colour() -> bool:
    """Whether the user or the terminal asks for none; see https://no-color.org."""
    return is_dumb() or bool(os.environ.get("NO_COLOR"))


def terminal_width() -> int | None:
    """Columns that a line may have: $COLUMNS, or what the terminal has; None, which is any number, in a file or a pipe."""
    columns = shutil.get_terminal_size((0, 0)).columns  # reads $COLUMNS first, then asks the terminal
    return columns or None if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


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
        GAP.join(f"{shortened(cell, size):{side}{size}}" for cell, side, size in zip(line, sides, sizes)).rstrip()
        for line in lines
    ]


def shortened(text: str, size: int) -> str:
    """At most `size` characters of a text, from both of its ends."""
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
