"""Plan -> machine code for a GPU, by NVRTC. Needs CuPy and the NVRTC library, but no GPU.

CuPy's own compilation is not used: it appends an architecture of its own choice and leaves included files out of its cache key.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import CompileError
from ..plan.kernel import KernelPlan
from . import cache
from .source import source_of

OPTIONS = ("--std=c++17",)
# Entries of a file are optimised at the same time, on all processors. Alone, nothing is gained by it.
SEVERAL_ENTRIES = ("--split-compile=0",)
# From here on NVRTC 12.9 makes one of two machine codes by it, whichever a process happens to get, up to 29 registers apart.
FIRST_BY_CHANCE = 100
# From this version on NVRTC keeps what it compiles, where there is a driver, and has no log of what it finds again.
CACHING = (12, 9)

# A pair has no time for divisions and roots rounded to the last bit: these are off by two units of it. In float32 that counts.
QUICK_DIVISION = ("--prec-div=false", "--prec-sqrt=false")


@dataclass(frozen=True, slots=True)
class Report:
    """What the assembler said of a kernel file: registers of the entry that has most, spills of all; and the cubin."""

    registers: int
    spill_bytes: int
    warnings: tuple[str, ...]
    log: str = ""
    code: bytes = field(default=b"", repr=False)

    @property
    def fault(self) -> str:
        """What a shipped plan must not have, or ''."""
        if self.spill_bytes:
            return "spills registers"
        return "serialises wgmma" if any("C75" in warning for warning in self.warnings) else ""


@functools.cache
def _binding() -> Any:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise CompileError(
            f"compiling for a GPU needs CuPy and NVRTC, and loading them failed: {error}; "
            'install them with: pip install "cupy-cuda12x[ctk]" (or cupy-cuda13x)'
        ) from error
    return nvrtc


def version() -> tuple[int, int]:
    """The version of NVRTC."""
    return _binding().getVersion()


@functools.cache
def build() -> str:
    """The version of NVRTC to its last number, such as 12.9.86, as it writes it into everything that it compiles to PTX."""
    nvrtc = _binding()
    program = nvrtc.createProgram("", "empty.cu", [], [])
    try:
        nvrtc.compileProgram(program, ())
        return re.search(rb"release .*, V([\d.]+)", nvrtc.getPTX(program))[1].decode()
    finally:
        nvrtc.destroyProgram(program)


def options_for(plan: KernelPlan) -> tuple[str, ...]:
    """What NVRTC is told besides the architecture."""
    quick = QUICK_DIVISION if plan.config.SCORES != "UNCHANGED" and plan.config.DTYPE != "FLOAT32" else ()
    return OPTIONS + quick + SEVERAL_ENTRIES * (len(plan.entries) > 1 and plan.architecture.number < FIRST_BY_CHANCE)


def key(plan: KernelPlan) -> str:
    """A hash of everything that decides the machine code: sources, options, architecture and compiler."""
    return cache.key_of(source_of(plan), version(), options_for(plan), plan.architecture.name)


def cubin(plan: KernelPlan) -> bytes:
    """The machine code of a plan, from the cache or compiled now.

    Raises
    ------
    CompileError
        With the compiler's log.
    """
    name = f"{plan.file}-{plan.architecture}-{key(plan)}.cubin"
    return cache.obtain(name, lambda: compile_plan(plan)[0])


def compile_plan(plan: KernelPlan, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile a plan, past the cache.

    Returns
    -------
    code : bytes
    log : str
        What compiler and assembler printed.
    """
    nvrtc = _binding()
    (main, text), *headers = source_of(plan).items()
    program = nvrtc.createProgram(text, main, [body.encode() for _, body in headers], [name.encode() for name, _ in headers])
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={plan.architecture}", *options_for(plan), *options))
        except nvrtc.NVRTCError as error:
            raise CompileError(f"{plan.name}: {error}\n{_log(nvrtc, program)}") from error
        # CuPy takes the result for a C string and drops its last byte, which the driver does not miss but other tools do.
        return nvrtc.getCUBIN(program) + b"\0", _log(nvrtc, program)
    finally:
        nvrtc.destroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    """What was printed, without the zero byte that ends it as a C string."""
    return nvrtc.getProgramLog(program).rstrip("\0")


def report(plan: KernelPlan) -> Report:
    """Compile a plan and read registers, spills and warnings from the assembler's log."""
    code, log = compile_plan(plan, ("--ptxas-options=-v", *["--no-cache"] * (version() >= CACHING)))
    return Report(
        registers=max(map(int, re.findall(r"Used (\d+) registers", log))),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        warnings=tuple(line for line in log.splitlines() if "warning #" in line or "warning :" in line or "C75" in line),
        log=log,
        code=code,
    )
