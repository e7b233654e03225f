"""Whose code is loaded: files that the user alone can have written, in folders where nobody else can replace them.

A path is walked from the root down. Each folder and each link on it must belong to the user or to root, and nobody else may be able
to write to a folder: then nobody else can replace the next step, and what has passed stays as it was. That is why looking at one
after the other is no race. A sticky folder such as /tmp may be open to others, since it lets them replace only what is theirs.

A file must be regular, the user's own, writable by nobody else, and have no second name. Files cannot be given away, so the user
wrote it, whoever could write to the folder when it came there: closing a folder that was open makes nothing in it trusted. What
others can still do in an open folder is to give a file of the user's another name. A link has two names, or is symbolic, and both
are refused; who stores code has to notice a file that was moved, by a digest that covers its name.

A file is opened once, without following or waiting for anything; the descriptor is what is checked and read.

Where there is no POSIX, owners and modes say nothing, and nothing is refused for them.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path

MAX_LINKS = 40  # followed on a path, as many as Linux follows
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# O_NONBLOCK: opening a FIFO would wait for a writer. A system lacks those flags that mean nothing there.
_READ = sum(getattr(os, flag, 0) for flag in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))


def fault_of(folder: Path, shared: bool = False) -> str:
    """Why code in a folder cannot be trusted, and what mends it, or ''.

    Parameters
    ----------
    folder : Path
        Absolute.
    shared : bool
        Whether it may be root's or sticky, like /tmp, because only a folder of one's own in it matters.

    Raises
    ------
    OSError
        If there is no such folder, or no way to look.
    """
    if os.name != "posix":
        return ""
    user = os.geteuid()
    steps = list(_steps(folder))
    for number, (path, status) in enumerate(steps, start=1):
        between = shared or number < len(steps)
        if status.st_uid != user and not (between and status.st_uid == 0):
            return f"{path} belongs to user {status.st_uid}"
        sticky = between and status.st_mode & stat.S_ISVTX
        if status.st_mode & _OTHERS_WRITE and not sticky and not stat.S_ISLNK(status.st_mode):
            return f"others can write to {path}, which is mended by: chmod go-w {shlex.quote(str(path))}"
    return ""


def read(path: Path, limit: int) -> bytes | None:
    """The contents of a file that the user alone can have written, or None: also if it is longer than `limit` bytes."""
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        # It has no name any more where another process has replaced it since, by what is the same.
        if not is_own_file(status) or status.st_nlink > 1 or status.st_mode & _OTHERS_WRITE or status.st_size > limit:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def is_own_file(status: os.stat_result) -> bool:
    """Whether this is a regular file of the user's."""
    return stat.S_ISREG(status.st_mode) and (os.name != "posix" or status.st_uid == os.geteuid())


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder and each link on the way to a path, from the root down."""
    here, way, links = Path(path.anchor), deque(path.parts[1:]), 0
    yield here, os.lstat(here)
    while way:
        name = way.popleft()
        here = here.parent if name == ".." else here / name
        status = os.lstat(here)
        yield here, status
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(f"{path}: more than {MAX_LINKS} links on the way")
            target = here.parent / os.readlink(here)
            here = Path(target.anchor)
            way.extendleft(reversed(target.parts[1:]))
