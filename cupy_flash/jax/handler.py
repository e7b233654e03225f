"""The functions that XLA calls, and how it learns of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import jax

from ..errors import UnsupportedError
from . import frame
from .frame import Frame

TARGET = "cupy_flash.attention"  # what compiled programs call it
ATTRIBUTE = "call"
Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # takes Python's lock, on whichever thread it is called


@functools.cache
def register() -> tuple[Any, ...]:
    """Tell XLA of the functions for CPUs and for GPUs. Programs that `attention` is traced in do so themselves.

    A process that runs one from `jax.export`, which was traced elsewhere, calls this before.

    Notes
    -----
    It is done once in a process, since XLA refuses a second function of a name, and keeps the addresses of those it has: so they
    are kept here for as long as the process lives, the only state that there is. CuPy is imported when one runs on a GPU.
    """
    handlers = Handler(functools.partial(answer, _on_host)), Handler(functools.partial(answer, _on_device))
    for handler, platform in zip(handlers, ("cpu", "CUDA")):
        capsule = jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p).value)
        jax.ffi.register_ffi_target(TARGET, capsule, platform=platform, api_version=1)
    return handlers


def answer(run: Callable[[Frame], None], address: int) -> int | None:
    """Compute what the frame at an address asks for. What is wrong is handed to XLA, which raises it where the result is used."""
    try:
        found = frame.read(address)
        if found is not None:
            run(found)
    except BaseException as error:  # nothing may leave a function that C++ calls
        code = frame.INVALID_ARGUMENT if isinstance(error, (TypeError, ValueError, UnsupportedError)) else frame.INTERNAL
        return frame.error(address, f"cupy_flash: {type(error).__name__}: {error}", code)
    return None


def _on_host(found: Frame) -> None:
    _run_on_host()(found)


def _on_device(found: Frame) -> None:
    _run_on_device()(found)


@functools.cache  # an import takes a microsecond, also of what is there
def _run_on_host() -> Callable[[Frame], None]:
    from . import on_host

    return on_host.run


@functools.cache
def _run_on_device() -> Callable[[Frame], None]:
    from . import on_device  # late, because it needs CuPy

    return on_device.run
