"""What the compilers made, kept on disk: private, checked, and safe to lose.

A file is its payload followed by the payload's SHA-256, so that a truncated file is noticed; loaders of shared objects ignore
what follows. Files are written under a temporary name and published by a rename, so a reader sees a whole file or none, and
processes that race write the same bytes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

DIGEST_BYTES = 32
_temporary: list[Path] = []  # this process's own folder, once the cache could not be used


def folder() -> Path:
    """Where compiled kernels are kept: ``$CUPY_FLASH_CACHE_DIR``, or ``cupy_flash`` in the user's cache folder."""
    named = os.environ.get("CUPY_FLASH_CACHE_DIR")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~").expanduser() / ".cache") / "cupy_flash"


def read(name: str) -> bytes | None:
    """The payload stored under this name, or None if there is none that is whole."""
    path = path_of(name)
    return None if path is None else path.read_bytes()[:-DIGEST_BYTES]


def path_of(name: str) -> Path | None:
    """The path of a whole file of this name, or None."""
    homes = [usable_folder(), *_temporary]
    for home in filter(None, homes):
        try:
            stored = (home / name).read_bytes()
        except OSError:
            continue
        if hashlib.sha256(stored[:-DIGEST_BYTES]).digest() == stored[-DIGEST_BYTES:]:
            return home / name
    return None


def write(name: str, payload: bytes) -> Path:
    """Store a payload and return its path: in the cache, or where that is impossible in a private temporary folder."""
    contents = payload + hashlib.sha256(payload).digest()
    home = usable_folder()
    if home is not None:
        try:
            return _publish(home, name, contents)
        except OSError as error:
            _warn_once(f"the kernel cache {home} cannot be written ({error}); compiled kernels last as long as this process")
    return _publish(_temporary_folder(), name, contents)


def entries() -> list[Path]:
    """The files in the cache, oldest first."""
    home = folder()
    # The folder may be one that the user shares with other things: only names that end as ours do.
    files = [file for file in home.iterdir() if re.search(r"-[0-9a-f]{32}\.(cubin|so|exe)$", file.name)] if home.is_dir() else []
    return sorted(files, key=lambda file: file.stat().st_mtime)


def usable_folder() -> Path | None:
    """The cache folder, made private to the user if it is new; None, with a warning, if code must not be loaded from it."""
    try:
        home = folder()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = home.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _warn_once(f"the kernel cache cannot be made ({error}); compiled kernels last as long as this process")
        return None
    if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        _warn_once(
            f"the kernel cache {home} is refused: code is loaded from it, and others can write to it; "
            f"chmod 700 {home}, or set CUPY_FLASH_CACHE_DIR"
        )
        return None
    return home


def _publish(home: Path, name: str, contents: bytes) -> Path:
    descriptor, temporary = tempfile.mkstemp(dir=home, prefix=name + ".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(contents)
        os.chmod(temporary, 0o700)
        os.replace(temporary, home / name)
    except OSError:
        os.unlink(temporary)
        raise
    return home / name


def _temporary_folder() -> Path:
    if not _temporary:
        _temporary.append(Path(tempfile.mkdtemp(prefix="cupy_flash-")))
        atexit.register(shutil.rmtree, _temporary[0], ignore_errors=True)
    return _temporary[0]


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
