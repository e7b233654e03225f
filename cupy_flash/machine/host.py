"""Executing a kernel's source on this machine's processor: find a C++ compiler, build, run.

A plain build is a shared object called in this process. A sanitized build is a program of its own, because a sanitizer has to be
there before Python is: it receives copies of the arrays, each in an allocation of its own, and its report becomes an exception.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy

from ..errors import DeadlockError, FaultError, SanitizerError
from ..plan.kernel import KernelPlan
from ..plan.launch import Launch
from ..plan.params import places_of
from ..plan.schedule_params import scheduled
from ..plan.sources import files
from ..problem.mask import Mask
from . import cache
from .scratch import with_copy
from .source import source_of
from .toolchain import compiled, identity, prove

SANITIZERS = {"address": "address,undefined", "thread": "thread"}
SCHEDULES = ("eager", "deferred")
OPTIONS = ("-std=c++17", "-O2", "-pthread", "-Wno-unknown-pragmas")
MESSAGE_BYTES = 4096
SIGNALS_MS = 50  # how long a run keeps Python from handling signals
FAULT_STATUS = 3  # of host_main.cpp
MULTIPROCESSORS = 2  # as many as the host pretends to be: few, so that blocks which take tiles in turn take several


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How the host executes a kernel.

    Parameters
    ----------
    sanitize : {'', 'address', 'thread'}
        AddressSanitizer with UndefinedBehaviorSanitizer, or ThreadSanitizer. From ``CUPY_FLASH_HOST_SANITIZE``.
    schedule : {'eager', 'deferred'}
        Asynchronous operations happen when issued, or as late as the waits allow. From ``CUPY_FLASH_HOST_SCHEDULE``.
    """

    sanitize: str = ""
    schedule: str = "eager"

    def __post_init__(self) -> None:
        for name, value, choices in (("SANITIZE", self.sanitize, ("", *SANITIZERS)), ("SCHEDULE", self.schedule, SCHEDULES)):
            if value not in choices:
                raise ValueError(f"CUPY_FLASH_HOST_{name}: expected one of {choices}, got {value!r}")

    @classmethod
    def from_environment(cls) -> HostOptions:
        """The options that the environment variables name."""
        return cls(os.environ.get("CUPY_FLASH_HOST_SANITIZE", ""), os.environ.get("CUPY_FLASH_HOST_SCHEDULE", "eager"))


def build(plan: KernelPlan, options: HostOptions) -> bytes:
    """The shared object, or with a sanitizer the program, that executes a plan: from the cache, or built now.

    Raises
    ------
    CompileError
        With the compiler's output, or if there is no compiler.
    """
    return cache.obtain(name_of(plan, options), lambda: _compile(plan, options))


def name_of(plan: KernelPlan, options: HostOptions) -> str:
    """The name in the cache of what `build` makes, with a hash of everything that decides it."""
    _, flags, sources = _task(plan, options)
    digest = cache.key_of(sources, identity(), platform.machine(), flags)
    return f"{plan.file}-host{options.sanitize and '-' + options.sanitize}-{digest}.{'exe' if options.sanitize else 'so'}"


def _task(plan: KernelPlan, options: HostOptions) -> tuple[str, list[str], dict[str, str]]:
    """The file to compile, flags, and the text of each file."""
    flags = [*_flags(options), f'-DKERNEL_FILE="{plan.file}.cu"', f"-DPARAMS={plan.params}"]
    flags.append("-rdynamic" if options.sanitize else "-shared")  # a program finds the entries of its kernel by name
    return "host.cpp", flags, source_of(plan) | {name: text for name, text in files().items() if name.endswith(".cpp")}


def _flags(options: HostOptions) -> list[str]:
    """What everything that runs in one process is compiled with."""
    if not options.sanitize:
        return [*OPTIONS, "-fPIC"]
    return [*OPTIONS, f"-fsanitize={SANITIZERS[options.sanitize]}", "-fno-sanitize-recover=all", "-g1"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a kernel moved between device memory and its registers or shared memory, and computed in matrix products.

    Parameters
    ----------
    read_bytes, written_bytes, flops : int
    """

    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes, self.flops + other.flops)


def run(
    plan: KernelPlan,
    launches: tuple[Launch, ...],
    params: numpy.ndarray,
    arrays: dict[str, numpy.ndarray | int],
    options: HostOptions,
    mask: Mask | None = None,
) -> Traffic | None:
    """Execute a kernel file's entries, one after the other.

    Parameters
    ----------
    plan : KernelPlan
    launches : tuple of Launch
    params : numpy.ndarray
        Size-1 parameter struct; addresses are filled in here.
    arrays : dict of str to numpy.ndarray
        The arrays and parts of workspace, by the field that points to them or maps them; numbers by the word that they are.
    options : HostOptions
    mask : Mask, optional
        Of fwd_hopper, whose blocks share the tiles out by it.

    Returns
    -------
    Traffic or None
        Summed over the entries; None from a sanitized build, which does not report it.

    Raises
    ------
    DeadlockError
        If no warp can move, because they wait for each other in a circle or for what nobody does; says who waits for what.
    FaultError
        If a warp breaks a rule of the machine; says which and where.
    SanitizerError
        With the sanitizer's report.
    KeyboardInterrupt
        Or what else a signal handler raises: all threads have ended then, and results are partly written.
    """
    launches = tuple(launch.on(MULTIPROCESSORS) for launch in launches if launch.blocks)
    if not launches:
        return Traffic()
    code = build(plan, options)
    params, launches = scheduled(plan, params, launches, mask)
    params = params.copy()
    words = params.view(numpy.uint64)
    for name, array in arrays.items():
        for place in places_of(params, name).values():
            words[place] = array if isinstance(array, int) else array.ctypes.data
    arrays = {name: array for name, array in arrays.items() if not isinstance(array, int)}
    deferred = SCHEDULES.index(options.schedule)
    fields = {8 * place: name for name in arrays for place in places_of(params, name).values()}
    library = None if options.sanitize else _load(code)
    teams = max(1, len(os.sched_getaffinity(0)) // plan.config.WARPS) if hasattr(os, "sched_getaffinity") else 1
    counts = (ctypes.c_uint64 * 3)()
    for launch in launches:
        if library:
            failure = _run_here(library, launch, params, deferred, teams, counts)
        else:
            use = functools.partial(_run_program, launch=launch, params=params, arrays=arrays, deferred=deferred)
            failure = with_copy(plan.name, code, use)
        if failure:
            raise _fault(f"{plan.name}: {failure}", fields)
    return Traffic(*counts) if library else None


@functools.cache
def _load(code: bytes) -> ctypes.CDLL:
    return with_copy("kernel.so", code, lambda path: ctypes.CDLL(str(path)))


def _compile(plan: KernelPlan, options: HostOptions) -> bytes:
    prove()  # first, so that a command that is no compiler is not taken for a fault in the kernel
    main, flags, sources = _task(plan, options)
    return compiled(plan.name, main, flags, sources, {"machine.o": _machine(sources, options)})


def _machine(sources: dict[str, str], options: HostOptions) -> bytes:
    """What executes any kernel, compiled once and ready to be linked."""
    main = "host_main.cpp" if options.sanitize else "host_run.cpp"
    flags, texts = [*_flags(options), "-c"], {name: sources[name] for name in included(sources, main)}
    digest = cache.key_of(texts, identity(), platform.machine(), flags)
    name = f"machine-host{options.sanitize and '-' + options.sanitize}-{digest}.o"
    return cache.obtain(name, lambda: compiled("the host's machine", main, flags, texts))


def included(sources: dict[str, str], main: str) -> list[str]:
    """A file and all that it includes of the others."""
    names = [main]
    for name in names:
        names += [found for found in re.findall(r'^#include "(.+)"', sources[name], re.MULTILINE) if found not in names]
    return names


def _run_here(library: ctypes.CDLL, launch: Launch, params: numpy.ndarray, deferred: int, teams: int, counts: ctypes.Array) -> str:
    """Run one entry in threads of this process. Returns what was wrong, or ''.

    Python handles signals only between calls of the library, so it waits in short ones. Whatever is raised meanwhile, no thread is
    left behind that writes to the arrays.
    """
    kernel = ctypes.cast(getattr(library, launch.entry), ctypes.c_void_p)
    numbers = (ctypes.c_int64(launch.blocks), launch.cluster, launch.shared_bytes, deferred, teams)
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    run = ctypes.c_void_p()
    try:
        library.launch(ctypes.byref(run), kernel, ctypes.c_void_p(params.ctypes.data), *numbers)
        while not library.ended(run, SIGNALS_MS):
            pass
    finally:
        if run:
            library.finish(run, counts, message, MESSAGE_BYTES)
    return message.value.decode()


def _run_program(path: Path, launch: Launch, params: numpy.ndarray, arrays: dict[str, numpy.ndarray], deferred: int) -> str:
    """Run one entry in a sanitized program on copies of the arrays, and copy back what it changed. Returns what was wrong, or ''.

    The job file holds int64 numbers and bytes: length of the entry's name, name, blocks, blocks of a cluster, bytes of shared
    memory, schedule, size of params, params, number of arrays, then for each array how often its address is in params, the offsets
    of that, the offset of element 0 in its memory, the size of that memory, and the memory.
    """
    with tempfile.TemporaryDirectory(prefix="cupy_flash-") as folder:
        job = Path(folder, "job")
        memories = []  # start and end of each, and where in the file
        name, numbers = launch.entry.encode(), (launch.blocks, launch.cluster, launch.shared_bytes, deferred, params.nbytes)
        with job.open("wb") as file:
            file.write(_int64(len(name)) + name + _int64(*numbers) + params.tobytes() + _int64(len(arrays)))
            for field, array in arrays.items():
                places, (low, high) = places_of(params, field).values(), _span(array)
                file.write(_int64(len(places), *(8 * place for place in places), array.ctypes.data - low, high - low))
                memories.append((low, high, file.tell()))
                file.write(ctypes.string_at(low, high - low))
        done = subprocess.run([str(path), str(job)], capture_output=True, text=True, preexec_fn=_fixed_addresses)
        if done.returncode == FAULT_STATUS:
            return done.stdout.strip()
        if done.returncode:
            raise SanitizerError(done.stderr or f"{path.name} ended with status {done.returncode}")
        contents = job.read_bytes()
        for low, high, place in memories:
            memory = contents[place : place + high - low]
            if memory != ctypes.string_at(low, high - low):  # inputs may be read-only, and are left alone
                ctypes.memmove(low, memory, high - low)
    return ""


def _fault(message: str, fields: dict[int, str]) -> FaultError:
    """The exception for a report, where {104}[5] is a counter: number 5 of the field at byte 104 of the parameters."""
    message = re.sub(r"\{(\d+)\}(?=\[)", lambda found: fields.get(int(found[1]), found[0]), message)
    return (DeadlockError if "deadlock in block" in message else FaultError)(message)


def _span(array: numpy.ndarray) -> tuple[int, int]:
    return numpy.lib.array_utils.byte_bounds(array)


def _int64(*numbers: int) -> bytes:
    return numpy.array(numbers, numpy.int64).tobytes()


def _fixed_addresses() -> None:
    """Switch address randomisation off: where Linux randomises widely, ThreadSanitizer's memory map does not fit in."""
    if sys.platform == "linux":
        ctypes.CDLL(None).personality(0x0040000)
