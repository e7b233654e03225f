"""Whose code is loaded: owners, modes, links, and files that are none."""

import os
import socket
import stat
from pathlib import Path

import pytest

from cupy_flash.machine import trust

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are those of POSIX")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
NOBODY = 65534


@pytest.fixture
def place(tmp_path):
    """A private folder with a private one in it."""
    place = tmp_path / "parent" / "place"
    place.mkdir(parents=True)
    for folder in (place.parent, place):
        folder.chmod(0o700)
    return place


@pytest.fixture
def file(place):
    file = place / "file"
    file.write_bytes(b"contents")
    file.chmod(0o600)
    return file


def test_own_files_in_own_folders_are_trusted(place, file):
    assert trust.fault_of(place) == ""
    assert trust.read(file, 100) == b"contents"


# Folders


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o722, 0o777])
@pytest.mark.parametrize("which", ["place", "parent"])
def test_folder_that_others_can_write_to_is_refused(bits, which, place):
    """And the advice mends it."""
    folder = {"place": place, "parent": place.parent}[which]
    folder.chmod(bits)
    assert trust.fault_of(place) == f"others can write to {folder}, which is mended by: chmod go-w {folder}"
    folder.chmod(bits & ~0o022)
    assert trust.fault_of(place) == ""


@as_root
@pytest.mark.parametrize("which", ["place", "parent"])
def test_folder_of_another_user_is_refused(which, place):
    folder = {"place": place, "parent": place.parent}[which]
    os.chown(folder, NOBODY, -1)
    assert trust.fault_of(place) == f"{folder} belongs to user {NOBODY}"


@as_root
def test_root_may_own_what_is_above_the_folder_but_not_the_folder(place, monkeypatch):
    os.chown(place, NOBODY, -1)
    monkeypatch.setattr(trust.os, "geteuid", lambda: NOBODY)
    assert trust.fault_of(place) == ""
    os.chown(place, 0, -1)
    assert trust.fault_of(place) == f"{place} belongs to user 0"
    assert trust.fault_of(place, shared=True) == ""


def test_sticky_folder_serves_above_a_folder_and_not_as_one(place):
    """As /tmp does: others can replace in it only what is theirs."""
    place.parent.chmod(0o1777)
    assert trust.fault_of(place) == ""
    assert trust.fault_of(place.parent, shared=True) == ""
    assert "others can write" in trust.fault_of(place.parent)
    place.chmod(0o777)
    assert "others can write" in trust.fault_of(place, shared=True)


@pytest.mark.parametrize("target", ["place", "../parent/place", "{parent}/place", "back/place"])
def test_own_links_are_followed(target, place):
    parent = place.parent
    (parent / "back").symlink_to(".")
    (parent / "link").symlink_to(target.format(parent=parent))
    assert trust.fault_of(parent / "link") == ""
    place.chmod(0o777)
    assert f"others can write to {place}," in trust.fault_of(parent / "link")


@as_root
def test_link_of_another_user_is_refused(place):
    """In a folder that was open once, to a folder that is as it should be."""
    link = place.parent / "link"
    link.symlink_to(place)
    os.lchown(link, NOBODY, -1)
    assert trust.fault_of(link) == f"{link} belongs to user {NOBODY}"


def test_what_a_link_passes_is_looked_at(place, tmp_path):
    """A link to a link in an open folder: neither the path as written nor the one it ends at shows that folder."""
    opened = tmp_path / "opened"
    opened.mkdir()
    (opened / "second").symlink_to(place)
    (place.parent / "first").symlink_to(opened / "second")
    assert trust.fault_of(place.parent / "first") == ""
    opened.chmod(0o777)
    assert f"others can write to {opened}," in trust.fault_of(place.parent / "first")


def test_links_in_a_circle_end(place):
    (place / "one").symlink_to("two")
    (place / "two").symlink_to("one")
    with pytest.raises(OSError, match="more than 40 links"):
        trust.fault_of(place / "one")


def test_way_up_is_that_of_the_folder_behind_a_link(place, tmp_path):
    """`link/..` is the folder above what the link names."""
    other = tmp_path / "other"
    (other / "inner").mkdir(parents=True)
    (place / "link").symlink_to(other / "inner")
    other.chmod(0o777)
    assert f"others can write to {other}," in trust.fault_of(Path(f"{place}/link/.."))


# Files


@pytest.mark.parametrize("bits", [0o620, 0o602, 0o666])
def test_file_that_others_can_write_to_is_refused(bits, file):
    file.chmod(bits)
    assert trust.read(file, 100) is None


@as_root
def test_file_of_another_user_is_refused(file):
    os.chown(file, NOBODY, -1)
    assert trust.read(file, 100) is None


def symbolic_link(file):
    file.rename(file.with_name("other"))
    file.symlink_to("other")


def dangling_link(file):
    file.unlink()
    file.symlink_to("nowhere")


def hard_link(file):
    os.link(file, file.with_name("other"))


def fifo(file):
    file.unlink()
    os.mkfifo(file, 0o600)


def directory(file):
    file.unlink()
    file.mkdir()


def listening_socket(file):
    file.unlink()
    here = os.getcwd()
    os.chdir(file.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
    finally:
        os.chdir(here)


def device(file):
    file.unlink()
    try:
        os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which has no end
    except OSError as error:
        pytest.skip(f"no device can be made: {error}")


def huge(file):
    os.truncate(file, 1 << 40)


def longer_than_the_limit(file):
    file.write_bytes(bytes(101))


def unreadable_folder_above(file):
    file.parent.rename(file.parent.with_name("elsewhere"))
    file.parent.write_bytes(b"")


ODD = (
    symbolic_link,
    dangling_link,
    hard_link,
    fifo,
    directory,
    listening_socket,
    device,
    huge,
    longer_than_the_limit,
    unreadable_folder_above,
)


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_what_is_no_plain_file_is_refused_at_once(make, file):
    make(file)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    assert trust.read(file, 100) is None
    assert before is None or len(os.listdir("/proc/self/fd")) == before


def test_file_is_read_through_the_descriptor_that_was_checked(file, monkeypatch):
    """Whoever swaps the file after the check has swapped another one."""
    check = trust.is_own_file

    def swapped(status):
        other = file.with_name("other")
        other.write_bytes(b"planted")
        other.replace(file)
        return check(status)

    monkeypatch.setattr(trust, "is_own_file", swapped)
    assert trust.read(file, 100) == b"contents"


def test_a_file_that_is_replaced_when_it_has_been_opened_is_read(file, monkeypatch):
    """As when several processes find an empty cache, and each stores the same: then none has to compile once more."""
    opened = os.open

    def replaced(path, flags):
        descriptor = opened(path, flags)
        other = file.with_name("other")
        other.write_bytes(b"the next")
        other.replace(file)
        return descriptor

    monkeypatch.setattr(os, "open", replaced)
    assert trust.read(file, 100) == b"contents"
