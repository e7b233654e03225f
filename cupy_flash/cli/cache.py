"""``cache``: the compiled kernels on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ..machine import cache as kernel_cache
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
    with _named_errors():
        click.echo(kernel_cache.folder())


@cache.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List what is in it, oldest first."""
    now = time.time()
    with _named_errors():
        home, entries = kernel_cache.folder(), kernel_cache.entries()
    found = [(entry.path.name, entry.size, now - entry.written) for entry in entries]
    if as_json:
        echo_json([{"name": name, "bytes": size, "age_seconds": age} for name, size, age in found])
        return
    rows = [(name, _size(size), _age(age)) for name, size, age in found]
    if rows:
        click.echo("\n".join(table(("kernel", "size", "age"), rows, "<>>", terminal_width())))
    click.echo(f"{_files(len(found))}, {_size(sum(size for _, size, _ in found))}, in {home}")


@cache.command()
def clear() -> None:
    """Delete the compiled kernels in it and what killed processes left, and nothing else."""
    with _named_errors():
        click.echo(f"deleted {_files(kernel_cache.clear())} from {kernel_cache.folder()}")


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
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
