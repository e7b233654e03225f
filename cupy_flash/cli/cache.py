"""``cache``: the compiled kernels on disk."""

from __future__ import annotations

import time
from pathlib import Path

import click

from .. import cache as kernel_cache
from .arguments import json_option
from .output import echo_json, table, terminal_width


@click.group()
def cache() -> None:
    """Show or clear the compiled kernels on disk.

    CUPY_FLASH_CACHE_DIR chooses another folder for them.
    """


@cache.command("dir")
def dir_() -> None:
    """Print the folder."""
    click.echo(kernel_cache.folder())


@cache.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List what is in it, oldest first."""
    now = time.time()
    found = [(file.name, status.st_size, now - status.st_mtime) for file in _entries() for status in [file.stat()]]
    if as_json:
        echo_json([{"name": name, "bytes": size, "age_seconds": age} for name, size, age in found])
        return
    rows = [(name, _size(size), _age(age)) for name, size, age in found]
    if rows:
        click.echo("\n".join(table(("kernel", "size", "age"), rows, "<>>", terminal_width())))
    click.echo(f"{_files(len(found))}, {_size(sum(size for _, size, _ in found))}, in {kernel_cache.folder()}")


@cache.command()
def clear() -> None:
    """Delete the compiled kernels in it, and nothing else."""
    entries = _entries()
    try:
        for file in entries:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"deleted {_files(len(entries))} from {kernel_cache.folder()}")


def _entries() -> list[Path]:
    try:
        return kernel_cache.entries()
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _size(count: int) -> str:
    return f"{count / 1000:,.0f} kB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
