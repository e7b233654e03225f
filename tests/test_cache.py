"""The kernel cache: private, whole or absent, shared by processes that race, and never in the way of a result."""

import errno
import hashlib
import os
import pwd
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner

from cupy_flash import attention
from cupy_flash.cli import doctor, main
from cupy_flash.machine import cache, host, nvrtc, source
from cupy_flash.machine.host import HostOptions
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.matrix import every_plan

PLAN = next(every_plan([ARCHITECTURES["80"]], ["float16"]))
NAME = f"kernel-{32 * 'a'}.so"
OTHER = f"kernel-{32 * 'b'}.so"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """An empty cache of the test's own, not yet made, and nothing kept in memory by another test."""
    folder = tmp_path / "not" / "yet" / "there"
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_kept", {})
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


def test_what_is_written_can_be_read(own_folder):
    cache.write(NAME, b"payload")
    assert cache.read(NAME) == b"payload"
    assert (own_folder / NAME).read_bytes() == b"payload" + hashlib.sha256(NAME.encode() + b"\0payload").digest()


def test_what_was_not_written_is_absent():
    assert cache.read(NAME) is None


def test_nobody_else_may_look(own_folder):
    """Whatever the umask; or folders that are made on the way would be refused later."""
    umask = os.umask(0)
    try:
        cache.write(NAME, b"payload")
    finally:
        os.umask(umask)
    assert (mode(own_folder.parent), mode(own_folder), mode(own_folder / NAME)) == (0o700, 0o700, 0o600)
    assert cache.read(NAME) == b"payload"


@pytest.mark.parametrize("length", [0, 1, 31, 32, 38])
def test_truncated_file_is_absent(length, own_folder):
    cache.write(NAME, b"payload")
    os.truncate(own_folder / NAME, length)
    assert cache.read(NAME) is None


def test_empty_payload_is_absent(own_folder):
    """No compiler makes one."""
    cache.write(NAME, b"")
    assert (own_folder / NAME).stat().st_size == cache.DIGEST_BYTES
    assert cache.read(NAME) is None


def test_file_under_another_name_is_absent_and_written_anew(own_folder):
    """A kernel for float16 under the name of one for float32 computes, and something else."""
    cache.write(NAME, b"payload")
    os.rename(own_folder / NAME, own_folder / OTHER)
    assert cache.read(OTHER) is None
    assert cache.obtain(OTHER, lambda: b"the right one") == b"the right one"
    assert cache.read(OTHER) == b"the right one"


def test_file_of_the_format_before_is_absent(own_folder):
    """Its digest did not cover its name."""
    cache.write(NAME, b"")
    (own_folder / NAME).write_bytes(b"payload" + hashlib.sha256(b"payload").digest())
    assert cache.read(NAME) is None


def test_truncated_kernel_is_built_again(compilations, own_folder):
    host.build(PLAN, HostOptions())
    assert host.build(PLAN, HostOptions()) == b"machine code"
    assert len(compilations) == 1
    [file] = own_folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert host.build(PLAN, HostOptions()) == b"machine code"
    assert len(compilations) == 2
    assert file.read_bytes() == whole


def refuse(error):
    def fail(*_, **__):
        raise error

    return fail


def test_full_disk_leaves_nothing_behind(own_folder, monkeypatch):
    own_folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(cache.os, "replace", refuse(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.warns(match="cannot be written.*No space"):
        cache.write(NAME, b"payload")
    assert cache.read(NAME) == b"payload"
    assert list(own_folder.iterdir()) == []


def test_interrupted_write_leaves_nothing_behind(own_folder, monkeypatch):
    monkeypatch.setattr(cache.os, "replace", refuse(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        cache.write(NAME, b"payload")
    assert list(own_folder.iterdir()) == []


def test_file_that_is_too_long_stays_in_memory(own_folder, monkeypatch):
    """It would be refused when read."""
    monkeypatch.setattr(cache, "MAX_BYTES", 100)
    with pytest.warns(match="101 bytes, of at most 100"):
        cache.write(NAME, bytes(101 - cache.DIGEST_BYTES))
    assert cache.read(NAME) == bytes(101 - cache.DIGEST_BYTES)
    assert list(own_folder.iterdir()) == []


def directory(place):
    place.mkdir()
    (place / "file").touch()


OBSTACLES = {"directory": directory, "dangling link": lambda place: place.symlink_to("nowhere"), "fifo": os.mkfifo}


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.filterwarnings("ignore:the kernel cache .* cannot be written")
def test_what_is_in_the_way_costs_one_compilation(obstacle, own_folder, compilations):
    own_folder.mkdir(parents=True, mode=0o700)
    OBSTACLES[obstacle](own_folder / host.name_of(PLAN, HostOptions()))
    for _ in range(2):
        assert host.build(PLAN, HostOptions()) == b"machine code"
    assert len(compilations) == 1


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
    return replace(PLAN, file=file.removesuffix(".cu")) if file.endswith(".cu") else PLAN


@pytest.mark.parametrize("file", [file for file in source.files() if not file.startswith("host") and file != "tile/host.cuh"])
def test_gpu_key_changes_with_a_blank_in_a_source(file, change_file, monkeypatch):
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 9))
    before = nvrtc.key(plan_with(file))
    change_file(file)
    assert nvrtc.key(plan_with(file)) != before


@pytest.mark.parametrize("file", source.files())
def test_host_name_changes_with_a_blank_in_a_source(file, change_file):
    before = host.name_of(plan_with(file), HostOptions())
    change_file(file)
    assert host.name_of(plan_with(file), HostOptions()) != before


def test_gpu_key_changes_with_compiler_and_architecture(monkeypatch):
    keys = set()
    for version in ((12, 9), (13, 0)):
        monkeypatch.setattr(nvrtc, "version", lambda version=version: version)
        keys |= {nvrtc.key(plan) for plan in every_plan([ARCHITECTURES["86"], ARCHITECTURES["89"]], ["float16"])}
    kernels = {(plan.file, plan.config) for plan in every_plan([ARCHITECTURES["86"]], ["float16"])}
    assert len(keys) == 2 * 2 * len(kernels)


def test_host_name_changes_with_sanitizer_and_compiler(monkeypatch):
    names = {host.name_of(PLAN, HostOptions(sanitize)) for sanitize in ("", *host.SANITIZERS)}
    monkeypatch.setattr(host, "identity", lambda: "another")
    names.add(host.name_of(PLAN, HostOptions()))
    assert len(names) == 4


def test_folder_in_the_way_of_a_loader_is_named_in_full(monkeypatch, tmp_path):
    """A library named without a slash would be looked up in LD_LIBRARY_PATH."""
    monkeypatch.chdir(tmp_path)
    for relative in (".", "kernels", "../" + tmp_path.name):
        monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", relative)
        assert cache.folder().is_absolute() and cache.folder().resolve() == (tmp_path / relative).resolve()


# Folders that cannot be used


def assert_kept_in_memory(match):
    """Without the folder, a payload is kept as long as the process; the user is told once."""
    with pytest.warns(RuntimeWarning, match=match) as caught:
        cache.write(NAME, b"payload")
        assert cache.read(NAME) == b"payload"
    assert len(caught) == 1


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("above", [0, 1])
def test_folder_that_others_can_write_to_is_refused(bits, above, own_folder):
    cache.write(NAME, b"planted")
    opened = [own_folder, *own_folder.parents][above]
    opened.chmod(bits)
    with pytest.warns(RuntimeWarning, match=f"{own_folder} is refused.* others can write to {opened},.*chmod go-w {opened};"):
        assert cache.read(NAME) is None
    cache.write(NAME, b"payload")
    assert cache.read(NAME) == b"payload"
    assert (own_folder / NAME).read_bytes().startswith(b"planted")


@as_root
@pytest.mark.filterwarnings("ignore:no kernel cache")
def test_closing_an_open_folder_makes_nothing_in_it_trusted(own_folder):
    """What is planted is valid in all but its owner: anybody can compute a digest."""
    cache.write(NAME, b"planted")
    cache.write(OTHER, b"planted")
    own_folder.chmod(0o777)
    os.chown(own_folder / NAME, NOBODY, -1)
    os.chmod(own_folder / OTHER, 0o606)
    assert cache.read(NAME) is None
    own_folder.chmod(0o700)
    for name in (NAME, OTHER):
        assert cache.read(name) is None
        assert cache.obtain(name, lambda: b"payload") == b"payload"
        assert cache.read(name) == b"payload"


@as_root
def test_folder_of_another_user_is_refused(own_folder):
    cache.write(NAME, b"planted")
    os.chown(own_folder, NOBODY, -1)
    with pytest.warns(RuntimeWarning, match=f"refused.*{own_folder} belongs to user {NOBODY}"):
        assert cache.read(NAME) is None


def test_refused_folder_costs_one_build_and_no_result(own_folder, monkeypatch, known_machine):
    builds = []
    compile_as_ever = host._compile
    monkeypatch.setattr(host, "_compile", lambda *rest: builds.append(rest) or compile_as_ever(*rest))
    own_folder.mkdir(parents=True)
    own_folder.chmod(0o777)
    q = numpy.ones((1, 5, 32), "f2")
    with pytest.warns(RuntimeWarning, match="others can write to"):
        for _ in range(2):
            numpy.testing.assert_array_equal(attention(q, q, q, backend="host"), q)
    assert len(builds) == 1


def test_folder_that_cannot_be_written_is_still_read(monkeypatch):
    """As on a read-only file system, which permissions cannot imitate for root."""
    cache.write(OTHER, b"known")
    monkeypatch.setattr(tempfile, "mkstemp", refuse(OSError(errno.EROFS, "Read-only file system")))
    assert_kept_in_memory("cannot be written.*Read-only file system")
    assert cache.read(OTHER) == b"known"


@pytest.mark.parametrize("below", [".", "kernels"])
def test_folder_that_cannot_be_made(below, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "file" / below))
    assert_kept_in_memory("no kernel cache: .*File exists")


def test_folder_below_one_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", "kernels")
    assert_kept_in_memory("no kernel cache: .*No such file or directory")


@pytest.fixture
def without_a_home(monkeypatch):
    """As in containers that run under a number no user has."""
    for name in ("CUPY_FLASH_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", refuse(KeyError(12345)))


NO_HOME = "this user has no home, and neither CUPY_FLASH_CACHE_DIR nor XDG_CACHE_HOME is set"


def test_user_without_a_home(without_a_home):
    assert_kept_in_memory(NO_HOME)


@pytest.mark.parametrize("command", ["dir", "list", "clear"])
def test_commands_without_a_home_end_in_one_error(command, without_a_home):
    result = CliRunner().invoke(main, ["cache", command])
    assert (result.exit_code, result.output) == (1, f"Error: {NO_HOME}\n")


def test_doctor_without_a_home_says_so(without_a_home):
    [finding] = [finding for finding in doctor.examine() if finding.name == "cache"]
    assert (finding.works, finding.value) == (False, NO_HOME)


def test_folder_is_in_the_home_unless_named_otherwise(monkeypatch):
    monkeypatch.delenv("CUPY_FLASH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.folder() == Path("/home/somebody/.cache/cupy_flash")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.folder() == Path("/elsewhere/cupy_flash")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification says to ignore
    assert cache.folder() == Path("/home/somebody/.cache/cupy_flash")
