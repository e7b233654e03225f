"""The kernel cache while others use it: clearing, threads, processes, forks."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from cupy_flash import CompileError
from cupy_flash.machine import cache, host, nvrtc
from cupy_flash.machine.host import HostOptions
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.matrix import every_plan

PLAN = next(every_plan([ARCHITECTURES["80"]], ["float16"]))
NAME = f"kernel-{32 * 'a'}.so"
OTHER = f"kernel-{32 * 'b'}.so"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """An empty cache of the test's own, not yet made, and nothing kept in memory by another test."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_kept", {})
    return folder


# Clearing


def test_clear_deletes_what_the_cache_wrote_and_nothing_else(own_folder):
    assert cache.clear() == 0
    ours = [f"fwd_v2-sm_80-{32 * '0'}.cubin", NAME, f"{NAME}.a8_bcdef", f"fwd_v2-host-address-{32 * '0'}.exe"]
    for name in ours:
        cache.write(name, b"code")
    theirs = ["libother.so", f"{NAME}.old", f"{32 * '0'}.so", f"kernel-{31 * '0'}.so", f"dir/{NAME}", f"dir-{32 * '0'}.so/file"]
    for name in theirs:
        (own_folder / name).parent.mkdir(exist_ok=True)
        (own_folder / name).touch()
    (own_folder / f"link-{32 * '0'}.so").symlink_to("libother.so")
    (own_folder / f"dangling-{32 * '0'}.so").symlink_to("nowhere")
    kept = sorted(own_folder.iterdir())
    assert [entry.path.name for entry in cache.entries()] == [name for name in ours if "a8_" not in name]
    assert cache.clear() == len(ours)
    assert sorted(own_folder.iterdir()) == [path for path in kept if path.name not in ours]
    assert all((own_folder / name).exists() for name in theirs)


@as_root
def test_clear_leaves_files_of_others_alone(own_folder):
    cache.write(NAME, b"code")
    os.chown(own_folder / NAME, 65534, -1)
    assert (cache.entries(), cache.clear()) == ([], 0)


def test_clear_deletes_folders_of_compilers_that_are_dead(own_folder):
    """Of those that live, which have written lately, none."""
    own_folder.mkdir(parents=True)
    for name in ("cupy_flash-abcdefgh", "cupy_flash-ijklmnop", "cupy_flash-of-mine"):
        (own_folder / name).mkdir()
        (own_folder / name / "file").touch()
    for name in ("cupy_flash-abcdefgh", "cupy_flash-of-mine"):
        os.utime(own_folder / name, (time.time() - 2 * cache.ABANDONED,) * 2)
    assert cache.clear() == 0
    assert sorted(path.name for path in own_folder.iterdir()) == ["cupy_flash-ijklmnop", "cupy_flash-of-mine"]


def test_what_vanishes_while_it_is_listed_is_no_error(own_folder, monkeypatch):
    for name in (NAME, OTHER):
        cache.write(name, b"code")
    listed = cache._listed()
    monkeypatch.setattr(cache, "_listed", lambda: listed)
    (own_folder / NAME).unlink()
    assert [entry.path.name for entry in cache.entries()] == [OTHER]
    assert (cache.clear(), cache.clear()) == (1, 0)


# Many threads at once


def at_once(count, work):
    """What `work` of each number returns, in a thread each, all started together."""
    start, results = threading.Barrier(count), [None] * count

    def run(number):
        start.wait()
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def slow_compilers(monkeypatch):
    """A list that grows with each kernel that somebody begins to compile, for a host or a GPU."""
    made = []

    def compile_slowly(plan, *_):
        made.append(plan)
        time.sleep(0.3)
        return b"machine code"

    monkeypatch.setattr(host, "_compile", compile_slowly)
    monkeypatch.setattr(nvrtc, "compile_plan", lambda plan: (compile_slowly(plan), ""))
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 9))
    return made


BUILDERS = {"host": lambda plan: host.build(plan, HostOptions()), "cuda": nvrtc.cubin}


@pytest.mark.parametrize("backend", BUILDERS)
@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.filterwarnings("ignore:no kernel cache")
def test_threads_that_need_a_kernel_compile_it_once(backend, usable, slow_compilers, own_folder):
    if not usable:
        own_folder.mkdir(parents=True)
        own_folder.chmod(0o777)
    assert at_once(16, lambda number: BUILDERS[backend](PLAN)) == 16 * [b"machine code"]
    assert len(slow_compilers) == 1


@pytest.mark.parametrize("backend", BUILDERS)
def test_threads_that_need_different_kernels_do_not_wait_for_each_other(backend, slow_compilers, monkeypatch):
    """No compiler ends before all have begun."""
    plans = [replace(PLAN, config=replace(PLAN.config, TILE_Q=16 * (number + 1))) for number in range(8)]
    all_begun = threading.Barrier(8, timeout=60)
    monkeypatch.setattr(time, "sleep", lambda seconds: all_begun.wait())
    assert at_once(8, lambda number: BUILDERS[backend](plans[number])) == 8 * [b"machine code"]
    assert len(slow_compilers) == 8


def test_thread_that_fails_to_compile_leaves_it_to_the_next(monkeypatch):
    tries = []

    def fail_at_first():
        tries.append(1)
        if len(tries) == 1:
            raise CompileError("nothing")
        return b"code"

    def work(number):
        try:
            return cache.obtain(NAME, fail_at_first)
        except CompileError:
            return b""

    assert sorted(at_once(4, work)) == [b"", b"code", b"code", b"code"]


FORK_WHILE_COMPILING = """
import os, sys, threading
from cupy_flash.machine import cache

name = "kernel-" + 32 * "0" + ".so"
begun, finish = threading.Event(), threading.Event()

def slowly():
    begun.set()
    finish.wait()
    return b"code"

thread = threading.Thread(target=cache.obtain, args=(name, slowly))
thread.start()
begun.wait()
child = os.fork()
if child == 0:
    os._exit(cache.obtain(name, lambda: b"code") != b"code")
print(os.waitpid(child, 0)[1])
finish.set()
thread.join()
"""


def test_child_forked_while_a_thread_compiles_does_not_wait_for_it():
    done = subprocess.run([sys.executable, "-c", FORK_WHILE_COMPILING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")


# Many processes at once

AT_ONCE = """
import multiprocessing, sys
import numpy
from cupy_flash import attention
from cupy_flash.machine import cache, host

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


@pytest.mark.parametrize(
    "work, processes, made", [("payload", 64, 1), pytest.param("kernel", 4, 2, marks=pytest.mark.release)]
)
def test_processes_that_start_at_once(work, processes, made, own_folder):
    """All find an empty cache, none reads half a file, and one file is left; of a kernel, and one that executes kernels."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE, work, str(processes)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(own_folder.iterdir())) == made


CLEARING = """
import sys, time
from cupy_flash.machine import cache

names = [f"kernel-{number:032x}.so" for number in range(8)]
end = time.monotonic() + 1
while time.monotonic() < end:
    if sys.argv[1] == "clear":
        cache.clear()
    else:
        for name in names:
            assert cache.obtain(name, lambda: name.encode() * 1000) == name.encode() * 1000
            cache.entries()
"""


def test_clear_while_others_read_and_write():
    """Nobody sees an error or half a file."""
    command = [sys.executable, "-W", "error", "-c", CLEARING]
    works = ("clear", "read", "read", "read")
    processes = [subprocess.Popen([*command, work], stderr=subprocess.PIPE, text=True) for work in works]
    assert [(process.communicate()[1], process.returncode) for process in processes] == 4 * [("", 0)]
