"""What the compilers made, kept on disk: private, checked, and safe to lose.

A file is a payload and then the SHA-256 of its name, a zero byte and the payload. The name holds the key, a hash of all that
decides the code. So a file that is truncated, of an older format, or another kernel's under this name is noticed, and made anew.

A file is trusted for its owner, its mode and the folders above it (see `trust`), not for its digest, which anybody can compute.
What is read once and checked is what is loaded; nothing is loaded from the cache by its path.

Files are written under a temporary name and published by a rename: a reader sees a whole file or none, and processes that race
write the same bytes. What cannot be stored is kept in memory as long as the process. Anything may be deleted at any time: a writer
whose temporary is gone has lost what a clear would have deleted a moment later.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import trust

DIGEST_BYTES = 32
MAX_BYTES = 1 << 26  # of a file. A kernel has less than a hundredth of it, with a sanitizer a tenth
SCRATCH = "cupy_flash-"  # begins the name of a folder that somebody compiles in
ABANDONED = 3600.0  # seconds after which nobody does: a compiler takes at most minutes
KERNEL = r"\w+-[\w-]*[0-9a-f]{32}\.(cubin|so|exe|o)"
TEMPORARY = KERNEL + r"\.[a-z0-9_]{8}"

_kept: dict[str, bytes] = {}  # what could not be stored
_locks: dict[tuple[int, str], threading.Lock] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache's: where, how long, and when written in seconds since 1970."""

    path: Path
    size: int
    written: float


def folder() -> Path:
    """Where compiled kernels are kept, absolute: ``$CUPY_FLASH_CACHE_DIR``, or ``cupy_flash`` in the user's cache folder.

    Raises
    ------
    OSError
        If the user has no home.
    """
    named = os.environ.get("CUPY_FLASH_CACHE_DIR")
    if named:
        return Path(named).absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # which the XDG specification says to ignore
        try:
            base = Path.home().absolute() / ".cache"
        except RuntimeError as error:
            raise FileNotFoundError("this user has no home, and neither CUPY_FLASH_CACHE_DIR nor XDG_CACHE_HOME is set") from error
    return base / "cupy_flash"


def key_of(sources: dict[str, str], *others: object) -> str:
    """A hash of everything that decides code: the text of each file, and whatever `repr` tells apart."""
    digests = [(name, hashlib.sha256(text.encode()).digest()) for name, text in sorted(sources.items())]  # repr of texts is slow
    return hashlib.sha256(repr((digests, others)).encode()).hexdigest()[:32]


def obtain(name: str, make: Callable[[], bytes]) -> bytes:
    """The payload of a name: the one that is kept, or what `make` returns, which is then kept.

    Threads that need the same one wait for the first of them; others are not held up.
    """
    payload = read(name)
    if payload is None:
        # A forked child has locks of its own: a thread that holds one of its parent's does not exist there.
        with _locks.setdefault((os.getpid(), name), threading.Lock()):
            payload = read(name)
            if payload is None:
                payload = make()
                write(name, payload)
    return payload


def read(name: str) -> bytes | None:
    """The payload kept under this name, or None if there is none that is whole and the user's own."""
    home = usable_folder()
    contents = home and trust.read(home / name, MAX_BYTES)
    if contents and len(contents) > DIGEST_BYTES:
        payload = contents[:-DIGEST_BYTES]
        if contents[-DIGEST_BYTES:] == _digest(name, payload):
            return payload
    return _kept.get(name)


def write(name: str, payload: bytes) -> None:
    """Keep a payload: in the cache, or where that is impossible in memory."""
    home = usable_folder()
    if home is not None:
        try:
            _publish(home, name, payload + _digest(name, payload))
            return
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # which it is where somebody clears the cache at this moment
                _warn_once(f"the kernel cache {home} cannot be written ({error}); compiled kernels last as long as this process")
    _kept[name] = payload


def entries() -> list[Entry]:
    """The kernels in the cache, oldest first."""
    found = [Entry(Path(file.path), status.st_size, status.st_mtime) for file, status in _files(KERNEL)]
    return sorted(found, key=lambda entry: entry.written)


def clear() -> int:
    """Delete the kernels in the cache and what killed processes left; returns how many files.

    The folder may hold other things as well. Deleted are regular files of the user's with names like ours, and folders of compilers
    that have not been written to for an hour.
    """
    deleted = 0
    for file, _ in _files(f"{KERNEL}|{TEMPORARY}"):
        with suppress(FileNotFoundError):
            os.unlink(file.path)
            deleted += 1
    for place in _listed():
        with suppress(FileNotFoundError):
            status = place.stat(follow_symlinks=False)
            mine = os.name != "posix" or status.st_uid == os.geteuid()
            abandoned = status.st_mtime < time.time() - ABANDONED
            if re.fullmatch(SCRATCH + r"[a-z0-9_]{8}", place.name) and place.is_dir(follow_symlinks=False) and mine and abandoned:
                shutil.rmtree(place.path, ignore_errors=True)
    return deleted


def trusted_folder() -> Path:
    """The cache folder, made private to the user if it is new.

    Raises
    ------
    OSError
        If it cannot be made, or code must not be loaded from it.
    """
    home = folder()
    _make(home)
    fault = trust.fault_of(home)
    if fault:
        raise PermissionError(f"{home} is refused, because code is loaded from it: {fault}")
    return home


def usable_folder() -> Path | None:
    """The cache folder; None, with a warning, if there is none to be trusted."""
    try:
        return trusted_folder()
    except OSError as error:
        _warn_once(f"no kernel cache: {error}; compiled kernels last as long as this process, or set CUPY_FLASH_CACHE_DIR")
        return None


def _make(path: Path) -> None:
    """Make a folder and those above it, all private: with the umask's modes the next look might refuse them."""
    if not path.is_dir():
        _make(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def _publish(home: Path, name: str, contents: bytes) -> None:
    if len(contents) > MAX_BYTES:
        raise OSError(f"{name} has {len(contents)} bytes, of at most {MAX_BYTES}")
    descriptor, temporary = tempfile.mkstemp(dir=home, prefix=name + ".")
    try:
        with open(descriptor, "wb") as file:
            file.write(contents)
        os.replace(temporary, home / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _digest(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + payload).digest()


def _files(pattern: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """The regular files of the user's in the cache whose names match."""
    for file in _listed():
        with suppress(FileNotFoundError):
            status = file.stat(follow_symlinks=False)
            if re.fullmatch(pattern, file.name) and trust.is_own_file(status):
                yield file, status


def _listed() -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder()))
    except (FileNotFoundError, NotADirectoryError):
        return []


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
