"""Exceptions that have no built-in equivalent, and how a value reads in a message."""

from __future__ import annotations

LONGEST = 80  # characters of a value in a message


def shown(value: object) -> str:
    """A value as an error message shows it: its `repr` on one line, cut where it is long; its type where it has none."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # integers of thousands of digits, and whatever a class of the caller's raises
        text = f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


class UnsupportedError(NotImplementedError):
    """A meaningful request that no kernel serves yet. Nothing was computed instead."""


class CompileError(RuntimeError):
    """A kernel did not compile. The message carries the compiler's log."""


class FaultError(RuntimeError):
    """A kernel run on the host used a barrier, TMA or a warpgroup against their rules. The message says where."""


class DeadlockError(FaultError):
    """A kernel run on the host came to a state in which every warp waits. The message says who waits on what."""


class SanitizerError(RuntimeError):
    """A sanitizer found a fault while a kernel ran on the host. The message carries its report."""


class CommunicationError(RuntimeError):
    """A rank did not answer in time, or is gone. What other ranks have computed is not complete."""
