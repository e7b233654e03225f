"""The C++ compiler of backend ``host``: which it is, what identifies it, and what it makes.

A compiler's environment decides code as well. Compilers from conda, Nix or environment modules find their own headers by it, so
nothing is taken away: the variables that are known to change code are part of what identifies a compiler. It runs in the folder of
the sources, so that ``CPATH=.`` means that folder, wherever the caller is.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from ..errors import CompileError
from .scratch import in_scratch, with_copy

# As the manuals of GCC, Clang, ld, ccache, Nix and Zig have it.
INFLUENCES = re.compile(
    r"CPATH|(C|CPLUS|OBJC)_INCLUDE_PATH|LIBRARY_PATH|COMPILER_PATH|GCC_EXEC_PREFIX|LD_RUN_PATH|LDEMULATION|GNUTARGET|"
    r"SDKROOT|\w+_DEPLOYMENT_TARGET|CCC_OVERRIDE_OPTIONS|CCACHE_\w+|NIX_(CFLAGS|LDFLAGS)\w*|ZIG_\w+"
)
ROOM = 1 << 26  # bytes that a compiler has enough of; one that runs out of them says so in its own words
# Needs the C++ library when linked, which a C driver leaves out.
PROBE = """
#include <stdexcept>
#include <string>
#include <thread>
static_assert(__cplusplus >= 201703L);
extern "C" int probe(int number) {
  try {
    std::thread([] {}).join();
    throw std::runtime_error(std::to_string(number));
  } catch (const std::exception& error) {
    return std::stoi(error.what());
  }
}
"""


def compiler() -> tuple[str, ...]:
    """The command of the first C++ compiler found: ``$CXX``, c++, g++, clang++, or the one in the package ziglang."""
    named = _named()
    if named:
        whole = shutil.which(named)  # a path with spaces
        try:
            program, *options = [named] if whole else shlex.split(named)
        except ValueError as error:
            raise CompileError(_expected((named,), f"which cannot be split into words: {error}")) from None
        found = shutil.which(program)
        if not found:
            raise CompileError(_expected((named,), f"and found no program {program!r} that can be run"))
        return (os.path.abspath(found), *options)
    for found in filter(None, map(shutil.which, ("c++", "g++", "clang++"))):
        return (os.path.abspath(found),)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise CompileError(
        "backend 'host' needs a C++17 compiler, and none of $CXX, c++, g++, clang++ was found; "
        'install one with "apt install g++", "dnf install gcc-c++" or "xcode-select --install", or: pip install ziglang'
    )


def compiler_version() -> str:
    """What the compiler says of itself, on one line."""
    return identity()[1].splitlines()[0]


def identity() -> tuple[tuple[str, ...], str, tuple[tuple[str, str], ...]]:
    """What decides code besides sources and options: the command, all that it says of itself, and its part of the environment."""
    command, influences = compiler(), tuple(sorted(item for item in os.environ.items() if INFLUENCES.fullmatch(item[0])))
    return command, _version(command, influences), influences


def prove() -> None:
    """Raise CompileError unless the compiler makes C++17 that can be loaded and run."""
    command, _, influences = identity()
    _prove(command, influences)


def compiled(title: str, main: str, flags: list[str], sources: dict[str, str], objects: dict[str, bytes] | None = None) -> bytes:
    """The file that the compiler makes of these sources, linked with what it has made of others.

    Raises
    ------
    CompileError
        With the title and the compiler's output.
    """

    def in_folder(folder: Path) -> bytes:
        for name, text in sources.items():
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        for name, code in (objects or {}).items():
            (folder / name).write_bytes(code)
        output, linked = folder / "output", map(str, map(folder.joinpath, objects or ()))
        command = (*compiler(), *flags, f"-I{folder}", str(folder / main), *linked, "-o", str(output))
        done = _run(command, folder)
        if done.returncode or not output.is_file():
            how = "failed" if done.returncode else "made no file"
            message = f"{title}: {shlex.join(command)} {how}:\n{done.stdout}{done.stderr}"
            if shutil.disk_usage(folder).free < ROOM:
                raise OSError(message)  # perhaps there is more room elsewhere
            raise CompileError(message)
        return output.read_bytes()

    return in_scratch(in_folder)


def _named() -> str:
    return os.environ.get("CXX", "").strip()


def _expected(command: tuple[str, ...], what: str) -> str:
    argument, got = ("CXX", _named()) if _named() else ("backend 'host'", shlex.join(command))
    return f"{argument}: expected a command that compiles and links C++17, got {got!r}, {what}"


@functools.cache
def _version(command: tuple[str, ...], influences: tuple[tuple[str, str], ...]) -> str:
    done = _run((*command, "--version"))
    if done.returncode or not done.stdout.strip():
        said = (done.stderr + done.stdout).strip().partition("\n")[0]
        raise CompileError(_expected(command, f"whose --version ends with {done.returncode} and says {said!r}"))
    return done.stdout.strip()


@functools.cache
def _prove(command: tuple[str, ...], influences: tuple[tuple[str, str], ...]) -> None:
    def answer(path: Path) -> int:
        try:
            return ctypes.CDLL(str(path)).probe(17)
        except AttributeError as error:
            raise CompileError(str(error)) from None

    try:
        code = compiled("a small program", "probe.cpp", ["-std=c++17", "-pthread", "-shared", "-fPIC"], {"probe.cpp": PROBE})
        found = with_copy("probe.so", code, answer)
    except CompileError as error:
        raise CompileError(_expected(command, f"and {error}")) from None
    if found != 17:
        raise CompileError(_expected(command, f"and its code says {found} where 17 is right"))


def _run(command: tuple[str, ...], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    # In English, whatever the user's language: the version is part of a key. Temporaries of a killed compiler go with the folder.
    environment = os.environ | {"LC_ALL": "C"} | ({"TMPDIR": str(folder)} if folder else {})
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            cwd=folder,
            env=environment,
        )
    except OSError as error:
        raise CompileError(_expected(command, f"and running it failed: {error}")) from None
