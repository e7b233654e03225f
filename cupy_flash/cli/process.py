"""How the process ends: quietly when its reader has gone or Ctrl-C was pressed, with one line when it could not do its work."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from ..judge.check import THREADS
from .output import shortened

INTERRUPTED = 130  # 128 + SIGINT
READER_GONE = 141  # 128 + SIGPIPE
LONGEST = 1000  # characters of a line of an error message; what was typed may be longer
PATIENCE = 0.5  # seconds in which threads may remove their temporary files


class ReaderGone(Exception):
    """A pipe that nobody reads any more."""


class Program(click.Group):
    """The group of all commands. ``help COMMAND`` is ``COMMAND --help``, and every ending has a status and no traceback.

    The status is 0 for success, 1 for a failure, 2 for a request that cannot be served, 130 after Ctrl-C and 141 where the reader
    of the output has gone. Only a fault of this program itself shows a traceback.
    """

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        with _click_kept_out():
            return super().parse_args(context, arguments)

    def invoke(self, context: click.Context) -> Any:
        with _click_kept_out():
            return super().invoke(context)

    def main(self, *arguments: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*arguments, standalone_mode=False, **extra)
        _prepare_streams()
        try:
            status = self._status(*arguments, **extra)
        except (ReaderGone, BrokenPipeError):
            _discard_output()
            status = READER_GONE
        except OSError:  # nor can standard error be written
            _discard_output()
            status = 1
        _leave(status)

    def _status(self, *arguments: Any, **extra: Any) -> int:
        """Run the command and say what went wrong."""
        try:
            status = super().main(*arguments, standalone_mode=False, **extra)
            sys.stdout.flush()
            return status or 0
        except click.ClickException as error:
            error.message = "\n".join(shortened(line, LONGEST) for line in error.message.splitlines())
            error.show()
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("Aborted!", err=True)
            return INTERRUPTED
        except BrokenPipeError:
            raise
        except (MemoryError, OSError) as error:
            _discard_output()
            click.echo(f"Error: {_line(error)}", err=True)
            return 1


@contextmanager
def _click_kept_out() -> Iterator[None]:
    """A pipe that breaks here is left to `Program.main`; click would end with 1, as if the command had failed."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


def _line(error: MemoryError | OSError) -> str:
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _prepare_streams() -> None:
    """Whatever the encoding of the output lacks is escaped; a stream that the caller has closed is the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Give up what cannot be written, by way of the null device: Python would try again at its end, and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _leave(status: int) -> NoReturn:
    """End with this status. Python waits for its threads, but a compiler in one of them can take a minute and cannot be stopped."""
    deadline = time.monotonic() + PATIENCE
    compiling = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    for thread in compiling:
        with suppress(RuntimeError):  # one that an interrupt has kept from starting
            thread.join(max(0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in compiling):
        os._exit(status)
    sys.exit(status)
