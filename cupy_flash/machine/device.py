"""A kernel on a GPU: loaded once per device, launched on CuPy's current stream or one that is told."""

from __future__ import annotations

import ctypes
import functools
import threading

import cupy
import numpy
from cupy_backends.cuda.api import driver

from ..plan.kernel import KernelPlan
from ..plan.launch import Launch
from ..plan.params import places_of
from ..plan.schedule_params import scheduled
from ..plan.tensor_map import TensorMap
from ..plan.workspace import Workspace
from ..problem.mask import Mask
from . import nvrtc
from .driver_map import DriverMap

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute in cuda.h
WORDS_ALIGNED = 8  # 64 bytes, at a multiple of which the driver expects a tensor map

current_device = cupy.cuda.runtime.getDevice


class DeviceKernel(threading.local):
    """A loaded kernel file and its parameters, to be launched with the addresses of a call.

    CuPy's own launch converts its arguments anew each time; here the parameters stay in place as 64-bit words and a launch writes
    the addresses among them, if they are others than those of the launch before. Each thread has words of its own, and the driver
    copies them before a launch returns.

    Parameters
    ----------
    kernel : KernelPlan
    device : int
        CUDA ordinal; it is the current device when a kernel is loaded and launched.
    params : numpy.ndarray
        The parameter struct.
    names : tuple of str
        The arrays whose addresses a launch is given, in order.
    workspace : Workspace
        Memory that a launch allocates unless it is given.
    launches : tuple of Launch
        Queued one after the other; those without a block are left out.
    maps : dict of str to TensorMap
        The fields of the struct that are maps, in the clear.
    mask : Mask or None
        Of fwd_hopper, whose blocks share the tiles out by it.
    """

    def __init__(
        self,
        kernel: KernelPlan,
        device: int,
        params: numpy.ndarray,
        names: tuple[str, ...],
        workspace: Workspace,
        launches: tuple[Launch, ...],
        maps: dict[str, TensorMap],
        mask: Mask | None,
    ) -> None:
        cupy.cuda.runtime.free(0)  # makes the device's context current, which in a new thread it is not
        launches = tuple(launch.on(_multiprocessors(device)) for launch in launches if launch.blocks)
        params, launches = scheduled(kernel, params, launches, mask)
        self._functions = [_module(kernel, device).get_function(launch.entry) for launch in launches]  # keeps them loaded
        for function, launch in zip(self._functions, launches):
            driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes)
        # The driver takes an array of pointers to arguments: here of one, in the word before the argument, which is aligned.
        self._words = (ctypes.c_uint64 * (WORDS_ALIGNED + params.nbytes // 8))()
        memory = ctypes.addressof(self._words)
        first = WORDS_ALIGNED - memory // 8 % WORDS_ALIGNED
        arguments = memory + 8 * (first - 1)
        self._words[first - 1] = memory + 8 * first
        ctypes.memmove(memory + 8 * first, params.ctypes.data, params.nbytes)
        places = [
            (i, field, first + place)
            for i, name in enumerate((*names, *workspace.names))
            for field, place in places_of(params, name).items()
        ]
        in_words = [(i, place) for i, field, place in places if field not in maps]
        in_maps = [(i, DriverMap(field, maps[field], memory + 8 * place)) for i, field, place in places if field in maps]
        point_to = [(i, driver_map.point_to) for i, driver_map in in_maps]
        before_stream = [
            (function.ptr, launch.blocks, 1, 1, kernel.threads, 1, 1, launch.shared_bytes)
            for function, launch in zip(self._functions, launches)
        ]
        written: list[int] = []  # the addresses that are among the words
        # All at once: what belongs to a thread takes longer to find.
        self._of_launch = (workspace, self._words, in_words, point_to, written, before_stream, (arguments, 0))

    def launch(self, addresses: list[int], workspace: cupy.ndarray | None = None, stream: int | None = None) -> None:
        """Queue the kernel on a stream of its device, by default the current one."""
        planned, words, in_words, in_maps, written, before_stream, after_stream = self._of_launch
        if planned.parts:
            memory = cupy.cuda.alloc(planned.nbytes) if workspace is None else workspace.data
            addresses = addresses + [memory.ptr + offset for offset in planned.offsets]
        if addresses != written:
            written.clear()  # until all are: the driver may refuse one
            for i, place in in_words:
                words[place] = addresses[i]
            for i, point_to in in_maps:
                point_to(addresses[i])
            written += addresses
        if stream is None:
            stream = cupy.cuda.get_current_stream().ptr
        for before in before_stream:
            driver.launchKernel(*before, stream, *after_stream)


def allocated(workspace: Workspace) -> cupy.ndarray:
    """New memory for a workspace."""
    return cupy.empty(workspace.nbytes, numpy.uint8)


@functools.cache
def _multiprocessors(device: int) -> int:
    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


@functools.cache
def _module(kernel: KernelPlan, device: int) -> cupy.cuda.Module:
    module = cupy.cuda.Module()
    module.load(nvrtc.cubin(kernel))
    return module


def compute_capability(device: int) -> str:
    """Compute capability of a device without the dot, such as '90'."""
    return cupy.cuda.Device(device).compute_capability
