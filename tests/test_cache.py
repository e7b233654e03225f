"""The kernel cache: private, whole or absent, shared by processes that race, and never in the way of a result."""

import errno
import pwd
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from cupy_flash import attention, cache, host, nvrtc, source
from cupy_flash.architecture import ARCHITECTURES
from cupy_flash.host import HostOptions
from cupy_flash.matrix import every_plan

PLAN = next(every_plan([ARCHITECTURES["80"]], ["float16"]))
NAME = f"kernel-{32 * 'a'}.so"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """An empty cache of the test's own, not yet made, and no fallback left by another test."""
    folder = tmp_path / "not" / "yet" / "there"
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_temporary", [])
    return folder


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows with each kernel compiled; what comes out is not executable."""
    made = []

    def compile_nothing(plan, *_):
        made.append(plan)
        return b"machine code"

    monkeypatch.setattr(host, "_compile", compile_nothing)
    return made


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# What is kept


def test_what_is_written_can_be_read():
    path = cache.write(NAME, b"payload")
    assert cache.read(NAME) == b"payload"
    assert cache.path_of(NAME) == path
    assert path.read_bytes().startswith(b"payload")  # loaders of shared objects ignore what follows


def test_what_was_not_written_is_absent(own_folder):
    assert cache.read(NAME) is None
    assert cache.path_of(NAME) is None


def test_nobody_else_may_look(own_folder):
    path = cache.write(NAME, b"payload")
    assert (mode(own_folder), mode(path)) == (0o700, 0o700)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 38])
def test_truncated_file_is_absent(length):
    path = cache.write(NAME, b"payload")
    path.write_bytes(path.read_bytes()[:length])
    assert cache.read(NAME) is None
    assert cache.path_of(NAME) is None


def test_truncated_kernel_is_built_again(compilations):
    path = host.build(PLAN, HostOptions())
    assert host.build(PLAN, HostOptions()) == path
    assert len(compilations) == 1
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert host.build(PLAN, HostOptions()) == path
    assert len(compilations) == 2
    assert path.read_bytes() == whole


def test_failed_write_leaves_nothing_behind(own_folder, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    own_folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(cache.os, "replace", fail)
    with pytest.raises(OSError, match="No space"), pytest.warns(match="cannot be written"):
        cache.write(NAME, b"payload")
    assert list(own_folder.iterdir()) == []


# What a name stands for


@pytest.fixture
def change_file(monkeypatch):
    def change(file):
        changed = source.files() | {file: source.files()[file] + " "}
        for module in (source, host):
            monkeypatch.setattr(module, "files", lambda: changed)

    return change


def plan_with(file):
    """A plan that compiles this file: its own if it is a kernel, any if it is a header."""
    return replace(PLAN, kernel=file.removesuffix(".cu")) if file.endswith(".cu") else PLAN


@pytest.mark.parametrize("file", [file for file in source.files() if not file.startswith("host") and file != "tile/host.cuh"])
def test_gpu_key_changes_with_a_blank_in_a_source(file, change_file, monkeypatch):
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 9))
    before = nvrtc.key(plan_with(file))
    change_file(file)
    assert nvrtc.key(plan_with(file)) != before


@pytest.mark.parametrize("file", source.files())
def test_host_build_changes_with_a_blank_in_a_source(file, change_file, compilations):
    before = host.build(plan_with(file), HostOptions())
    change_file(file)
    assert host.build(plan_with(file), HostOptions()) != before


def test_gpu_key_changes_with_compiler_and_architecture(monkeypatch):
    keys = set()
    for version in ((12, 9), (13, 0)):
        monkeypatch.setattr(nvrtc, "version", lambda version=version: version)
        keys |= {nvrtc.key(plan) for plan in every_plan([ARCHITECTURES["86"], ARCHITECTURES["89"]], ["float16"])}
    assert len(keys) == 2 * 2 * len({plan.config for plan in every_plan([ARCHITECTURES["86"]], ["float16"])})


def test_host_build_changes_with_sanitizer_and_compiler(compilations, monkeypatch):
    paths = {host.build(PLAN, HostOptions(sanitize)) for sanitize in ("", *host.SANITIZERS)}
    monkeypatch.setattr(host, "compiler_version", lambda: "another")
    paths.add(host.build(PLAN, HostOptions()))
    assert len(paths) == 4


# Folders that cannot be used


def assert_falls_back(folder, match):
    """Without the folder, a payload is kept as long as the process; the user is told once."""
    with pytest.warns(RuntimeWarning, match=match) as caught:
        path = cache.write(NAME, b"payload")
        assert cache.read(NAME) == b"payload"
        assert cache.path_of(NAME) == path
    assert len(caught) == 1
    assert folder not in path.parents
    assert mode(path.parent) == 0o700


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777])
def test_folder_that_others_can_write_to_is_refused(bits, own_folder):
    planted = own_folder / NAME
    cache.write(NAME, b"planted")
    own_folder.chmod(bits)
    with pytest.warns(RuntimeWarning, match=f"chmod 700 {own_folder}"):
        assert cache.read(NAME) is None
    assert cache.write(NAME, b"payload") != planted
    assert cache.read(NAME) == b"payload"


def test_folder_of_another_user_is_refused(own_folder, monkeypatch):
    cache.write(NAME, b"planted")
    monkeypatch.setattr(cache.os, "getuid", lambda: own_folder.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="refused"):
        assert cache.read(NAME) is None


def test_refused_folder_costs_one_build_and_no_result(own_folder, monkeypatch):
    builds = []
    compile_as_ever = host._compile
    monkeypatch.setattr(host, "_compile", lambda *rest: builds.append(rest) or compile_as_ever(*rest))
    monkeypatch.setattr(host, "OPTIONS", (*host.OPTIONS, "-O0"))  # in half the time
    own_folder.mkdir(parents=True)
    own_folder.chmod(0o777)
    q = numpy.ones((1, 5, 32), "f2")
    with pytest.warns(RuntimeWarning, match="chmod 700"):
        for _ in range(2):
            numpy.testing.assert_array_equal(attention(q, q, q, backend="host"), q)
    assert len(builds) == 1


def test_folder_that_cannot_be_written_is_still_read(own_folder, monkeypatch):
    """As on a read-only file system, which permissions cannot imitate for root."""
    cache.write("known", b"known")
    make = tempfile.mkstemp

    def refuse(dir, **rest):
        if Path(dir) == own_folder:
            raise OSError(errno.EROFS, "Read-only file system")
        return make(dir=dir, **rest)

    monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    assert_falls_back(own_folder, "cannot be written.*Read-only file system")
    assert cache.read("known") == b"known"


def test_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    assert_falls_back(tmp_path, "cannot be made")


def test_user_without_a_home(tmp_path, monkeypatch):
    """As in containers that run under a number no user has."""

    def unknown(number):
        raise KeyError(number)

    for name in ("CUPY_FLASH_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert_falls_back(tmp_path / "nowhere", "home")


def test_folder_is_in_the_home_unless_named_otherwise(monkeypatch):
    monkeypatch.delenv("CUPY_FLASH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.folder() == Path("/home/somebody/.cache/cupy_flash")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.folder() == Path("/elsewhere/cupy_flash")


# Many processes at once

AT_ONCE = """
import multiprocessing, sys
import numpy
from cupy_flash import attention, cache, host

def payload():
    expected = bytes(range(256)) * 4096
    cache.read("name") or cache.write("name", expected)
    assert cache.read("name") == expected

def kernel():
    host.OPTIONS = (*host.OPTIONS, "-O0")
    q = numpy.ones((1, 5, 32), "f2")
    assert (attention(q, q, q, backend="host") == q).all()

def work(start):
    start.wait()
    globals()[sys.argv[1]]()

fork = multiprocessing.get_context("fork")
start = fork.Barrier(int(sys.argv[2]))
processes = [fork.Process(target=work, args=(start,)) for _ in range(start.parties)]
for process in processes: process.start()
for process in processes: process.join()
sys.exit(any(process.exitcode for process in processes))
"""


@pytest.mark.parametrize("work, processes", [("payload", 64), ("kernel", 4)])
def test_processes_that_start_at_once(work, processes, own_folder):
    """All find an empty cache, none reads half a file, and one file is left."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE, work, str(processes)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(own_folder.iterdir())) == 1
