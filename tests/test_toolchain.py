"""The C++ compiler: which one, what it is known by, and commands that are none."""

import os
import shutil
import sys

import numpy
import pytest
from thinned import thinned

from cupy_flash import CompileError, attention
from cupy_flash.machine import host, toolchain
from cupy_flash.machine.host import HostOptions
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.matrix import every_plan

PLAN = next(every_plan([ARCHITECTURES["80"]], ["float16"]))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "kernels"))


@pytest.fixture
def script(tmp_path):
    """A function that writes a program of some lines of shell and returns its path."""

    def write(text, name="stub"):
        path = tmp_path / name
        path.write_text(text if text.startswith("not") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        return str(path)

    return write


def on_host():
    q = numpy.ones((1, 5, 32), "f2")
    return attention(q, q, q, backend="host")


def test_without_a_compiler_the_error_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(CompileError, match=r"apt install g\+\+.*pip install ziglang"):
        on_host()


# Commands that are no compiler


def refused(monkeypatch, cxx, reason):
    """The error names CXX, what was expected, what came and why not; and is one error, not two."""
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(CompileError) as caught:
        on_host()
    assert str(caught.value).startswith(f"CXX: expected a command that compiles and links C++17, got {cxx!r}, ")
    assert reason in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("cxx", ["true", "false", "cat"])
def test_program_that_is_no_compiler(cxx, monkeypatch):
    refused(monkeypatch, cxx, "")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("echo version 1", "made no file"),
        ("exit 0", "whose --version ends with 0 and says ''"),
        ("echo what is this >&2; exit 3", "whose --version ends with 3 and says 'what is this'"),
    ],
)
def test_program_that_does_nothing(text, reason, monkeypatch, script):
    refused(monkeypatch, script(text), reason)


@pytest.mark.parametrize(
    "cxx, reason",
    [
        ("nowhere-to-be-found", "found no program 'nowhere-to-be-found' that can be run"),
        (os.devnull, f"found no program {os.devnull!r} that can be run"),
        (__file__, f"found no program {__file__!r} that can be run"),  # a text file
        (os.path.dirname(__file__), "that can be run"),
        ("g++ 'half", "which cannot be split into words: No closing quotation"),
        ("''", "found no program '' that can be run"),
    ],
)
def test_name_that_is_no_program(cxx, reason, monkeypatch):
    refused(monkeypatch, cxx, reason)


def test_text_file_that_says_it_can_be_run(monkeypatch, script):
    refused(monkeypatch, script("not a program\n"), "running it failed: [Errno 8] Exec format error")


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_driver_that_links_no_cpp_library(monkeypatch):
    """What it makes cannot be loaded, so it is not kept."""
    refused(monkeypatch, "gcc", "undefined symbol")


def test_compiler_that_prints_bytes(monkeypatch, script):
    program = script(r"printf '\377\376 version\n'; printf '\200' >&2; test $1 = --version")
    refused(monkeypatch, program, "failed:\n\ufffd\ufffd version\n\ufffd")


def test_compiler_that_asks_gets_no_answer(monkeypatch, script):
    """It would wait for one that nobody knows to give."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"answer\n")
    kept = os.dup(0)
    os.dup2(read_end, 0)
    try:
        refused(monkeypatch, script('read line; echo "got $line"; exit 1'), "whose --version ends with 1 and says 'got'")
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, read_end, write_end):
            os.close(descriptor)


def test_compiler_that_makes_something_else(monkeypatch, script):
    program = script('test "$1" = --version && echo 1 && exit; for last; do :; done; echo no library > "$last"')
    refused(monkeypatch, program, "probe.so: ")


def test_compiler_whose_code_is_wrong(monkeypatch, script):
    program = script('echo "int probe() { return 5; }" > wrong.c; for last; do :; done; c++ -xc -shared -fPIC wrong.c -o "$last"')
    wrong = f'test "$1" = --version && echo 1 && exit\nexec {program} "$@"'
    refused(monkeypatch, script(wrong, "wrong"), "and its code says 5 where 17 is right")


def test_mended_cxx_is_used_in_the_same_process(monkeypatch, known_machine):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CompileError):
        on_host()
    monkeypatch.delenv("CXX")
    assert (on_host() == 1).all()


def test_fault_in_a_kernel_is_not_the_compilers(monkeypatch, change_kernel, known_machine):
    change_kernel("config.cuh", "#error nonsense\n")
    monkeypatch.setenv("CXX", "c++")
    with pytest.raises(CompileError, match=r"(?s)^fwd_v2-sm_80-.*config.cuh:1:2: error.*nonsense") as caught:
        on_host()
    assert "CXX" not in str(caught.value)


# How it is called


def test_cxx_names_the_compiler_and_its_options(monkeypatch, script):
    monkeypatch.setenv("CXX", f"{script('exit 1')} -its-option 'and another'")
    assert toolchain.compiler() == (script("exit 1"), "-its-option", "and another")


@pytest.mark.parametrize("quote", thinned(["{}", "'{}'", "'{}' -O1", r"{}"], first=1))
def test_path_with_spaces(quote, monkeypatch, script):
    path = script('exec c++ "$@"', name="my own compiler")
    monkeypatch.setenv("CXX", quote.format(path))
    assert toolchain.compiler()[0] == path
    toolchain.prove()


def test_relative_path_is_that_of_the_caller(monkeypatch, script, tmp_path):
    path = script('exec c++ "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./stub")
    assert toolchain.compiler() == (path,)
    toolchain.prove()


@pytest.mark.parametrize("cxx", ["", "  "])
def test_blank_cxx_is_none(cxx, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    found = toolchain.compiler()
    monkeypatch.setenv("CXX", cxx)
    assert toolchain.compiler() == found


# What a kernel is known by


INFLUENCES = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "SDKROOT", "MACOSX_DEPLOYMENT_TARGET", "CCACHE_PREFIX")


@pytest.mark.parametrize("variable", INFLUENCES)
def test_variable_that_changes_code_is_in_the_name(variable, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    names = {host.name_of(PLAN, HostOptions())}
    for value in ("/one", "/another"):
        monkeypatch.setenv(variable, value)
        names.add(host.name_of(PLAN, HostOptions()))
    assert len(names) == 3


def test_other_variables_are_not(monkeypatch):
    before = host.name_of(PLAN, HostOptions())
    for variable in ("LANG", "LC_ALL", "TMPDIR", "COLUMNS", "MY_CPATH"):
        monkeypatch.setenv(variable, "other")
    assert host.name_of(PLAN, HostOptions()) == before


def test_version_and_command_are_in_the_name(monkeypatch, script):
    names = set()
    for name, version in (("one", "1"), ("two", "1"), ("three", "1\nTarget: another")):
        monkeypatch.setenv("CXX", script(f"echo '{version}'", name))
        names.add(host.name_of(PLAN, HostOptions()))
    assert len(names) == 3
    assert toolchain.compiler_version() == "1"


def test_version_is_the_same_in_every_language(monkeypatch, script):
    monkeypatch.setenv("CXX", script('echo "version in $LC_ALL"'))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert toolchain.compiler_version() == "version in C"


def test_headers_of_the_callers_folder_are_not_included(monkeypatch, tmp_path):
    """By CPATH=. a compiler looks where it is started."""
    (tmp_path / "thread").write_text("nonsense\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPATH", ".")
    toolchain.prove()
