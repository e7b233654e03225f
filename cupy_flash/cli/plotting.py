"""Files that a command writes after its work, refused before the work starts where they could not be written after it."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import click


class OutputPath(click.Path):
    """A file that can be written: one that exists, or a new one in a folder that exists."""

    name = "file"

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        try:
            _try(path)
        except OSError as error:
            self.fail(f"expected a file that can be written, got {str(path)!r}: {error.strerror}", param, ctx)
        return path


def _try(path: Path) -> None:
    """Write to the folder of a file that is not there yet: that tells more than permissions do. Leaves no trace."""
    try:
        path.stat()
    except FileNotFoundError:
        tempfile.TemporaryFile(dir=path.resolve().parent).close()


def _checked(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is None or context.resilient_parsing:
        return path
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs Matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise click.BadParameter(f"expected a name that ends in .png, .pdf or .svg, got {str(path)!r}", context, parameter)
    return path


OUTPUT = OutputPath()
plot_option = click.option(
    "--plot",
    type=OUTPUT,
    callback=_checked,
    metavar="FILE",
    help="Draw it as well, into a .png, .pdf or .svg; needs Matplotlib.",
)
