"""Private folders to compile in and to load from: where they are, and what is left of them."""

import ctypes
import os
import subprocess
import sys
import tempfile

import pytest

from cupy_flash import CompileError
from cupy_flash.machine import cache, scratch, toolchain


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """TMPDIR and a cache of the test's own."""
    temporary, kernels = tmp_path / "temporary", tmp_path / "kernels"
    temporary.mkdir()
    temporary.chmod(0o700)
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(kernels))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary, kernels


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a file system in memory at a folder until the test ends."""
    places = []

    def mount(place, options):
        command = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"nothing can be mounted: {error}")
        if done.returncode:
            pytest.skip(f"nothing can be mounted: {done.stderr}")
        places.append(place)

    yield mount
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return toolchain.compiled("number", "number.cpp", ["-shared", "-fPIC"], {"number.cpp": 'extern "C" int number() { return 7; }'})


def load(code):
    return scratch.with_copy("number.so", code, lambda path: ctypes.CDLL(str(path)))


def test_folder_is_private_and_deleted(folders):
    temporary, _ = folders

    def look(folder):
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
        return folder

    assert not scratch.in_scratch(look).exists()
    with pytest.raises(ZeroDivisionError):
        scratch.in_scratch(lambda folder: 1 // 0)
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_temporary_folder_that_others_can_write_to_is_not_used(folders):
    temporary, kernels = folders
    temporary.chmod(0o777)
    assert scratch.in_scratch(lambda folder: folder.parent) == kernels
    temporary.chmod(0o1777)
    assert scratch.in_scratch(lambda folder: folder.parent) == temporary


def test_temporary_folder_without_executables_is_not_loaded_from(folders, mounted, library):
    temporary, kernels = folders
    mounted(temporary, "noexec")
    assert load(library).number() == 7
    assert list(temporary.iterdir()) == list(kernels.iterdir()) == []


def test_cache_without_executables_is_no_matter(folders, mounted, library):
    _, kernels = folders
    kernels.mkdir()
    mounted(kernels, "noexec")
    name = f"number-host-{32 * '0'}.so"
    cache.write(name, library)
    assert load(cache.read(name)).number() == 7


def test_full_temporary_folder_is_not_compiled_in(folders, mounted):
    temporary, kernels = folders
    mounted(temporary, "size=8k")
    found = []

    def fill(folder):
        (folder / "source").write_bytes(bytes(1 << 20))
        found.append(folder.parent)

    scratch.in_scratch(fill)
    assert found == [kernels]
    assert list(temporary.iterdir()) == list(kernels.iterdir()) == []


def test_compiler_that_runs_out_of_room_gets_another_folder(folders, mounted):
    """Its sources have room, what it makes of them has none."""
    temporary, _ = folders
    mounted(temporary, "size=16k")
    code = toolchain.compiled("numbers", "numbers.cpp", ["-c"], {"numbers.cpp": "int numbers[100000] = {1};"})
    assert len(code) > 400000


def test_without_any_folder_there_is_one_named_error(folders, mounted, library):
    folders[1].mkdir()
    for place in folders:
        mounted(place, "noexec")
    with pytest.raises(CompileError, match=r"neither TMPDIR nor the kernel cache: .*; .*set TMPDIR to one of your own"):
        load(library)


def test_copies_never_share_a_path(library):
    """A loader takes a path that it knows for what it has loaded from there."""
    assert len({scratch.with_copy("number.so", library, str) for _ in range(10)}) == 10


FORK = """
import os, sys, threading
from cupy_flash.machine import scratch

inside, finish = threading.Event(), threading.Event()

def use(folder):
    (folder / "file").touch()
    inside.set()
    finish.wait()
    return (folder / "file").exists()

kept = []
thread = threading.Thread(target=lambda: kept.append(scratch.in_scratch(use)))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    sys.exit()  # runs what is registered to run at the end
os.waitpid(child, 0)
finish.set()
thread.join()
print(kept)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_that_ends_leaves_its_parents_folder_alone():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[True]\n", 0), done.stderr
