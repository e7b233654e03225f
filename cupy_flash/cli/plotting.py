"""The option --plot, refused before the work starts where it could not be served after it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click


def _checked(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is None or context.resilient_parsing:
        return path
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException('--plot needs matplotlib: pip install "cupy-flash[plot]"')
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise click.BadParameter(f"expected a name that ends in .png, .pdf or .svg, got {str(path)!r}", context, parameter)
    return path


plot_option = click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_checked,
    metavar="FILE",
    help="Draw it as well, into a .png, .pdf or .svg; needs the extra plot.",
)
