"""A kernel on a GPU: loaded once per device, launched on CuPy's current stream."""

from __future__ import annotations

import ctypes
import functools
import threading

import cupy
from cupy_backends.cuda.api import driver

from . import nvrtc
from .plan import Plan

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute in cuda.h

current_device = cupy.cuda.runtime.getDevice


class DeviceKernel(threading.local):
    """A loaded kernel and its parameters, to be launched with the addresses of a call.

    CuPy's own launch converts its arguments anew each time; here the parameters stay in place as 64-bit words and a launch writes
    the addresses among them. Each thread has words of its own, and the driver copies them before a launch returns.

    Parameters
    ----------
    kernel : Plan
    device : int
        CUDA ordinal; it is the current device when a kernel is loaded and launched.
    params : bytes
        The parameter struct.
    places : tuple of int
        Which 64-bit words of the struct are addresses.
    blocks : int
    """

    def __init__(self, kernel: Plan, device: int, params: bytes, places: tuple[int, ...], blocks: int) -> None:
        cupy.cuda.runtime.free(0)  # makes the device's context current, which in a new thread it is not
        module = _module(kernel, device)
        self._function = module.get_function(kernel.kernel)
        driver.funcSetAttribute(self._function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes)
        # The driver takes an array of pointers to arguments: word 0 is that array, the one argument follows it.
        self._words = (ctypes.c_uint64 * (1 + len(params) // 8)).from_buffer_copy(bytes(8) + params)
        arguments = ctypes.addressof(self._words)
        self._words[0] = arguments + 8
        self._places = [1 + place for place in places]
        grid_and_block = (blocks, 1, 1, kernel.threads, 1, 1)
        self._before_stream = (self._function.ptr, *grid_and_block, kernel.shared_bytes)
        self._after_stream = (arguments, 0)

    def launch(self, addresses: list[int]) -> None:
        """Queue the kernel on the current stream."""
        for place, address in zip(self._places, addresses):
            self._words[place] = address
        driver.launchKernel(*self._before_stream, cupy.cuda.get_current_stream().ptr, *self._after_stream)


@functools.cache
def _module(kernel: Plan, device: int) -> cupy.cuda.Module:
    module = cupy.cuda.Module()
    module.load(nvrtc.cubin(kernel))
    return module


def compute_capability(device: int) -> str:
    """Compute capability of a device without the dot, such as '90'."""
    return cupy.cuda.Device(device).compute_capability
