"""A private folder for a moment: to compile in, and to load from what has been checked.

Code cannot be loaded from memory on every system, so it is copied into a folder that nobody else can reach, loaded, and the copy
deleted. No two copies ever have the same path: a loader takes a path that it has seen for the library that it has loaded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import CompileError
from . import cache, trust

Result = TypeVar("Result")


def in_scratch(use: Callable[[Path], Result]) -> Result:
    """What `use` returns, called with a private folder that is deleted afterwards.

    The folder is in ``$TMPDIR``, or in the cache where that is full, mounted noexec, or open to others: `use` is called again if it
    ends in an OSError.

    Raises
    ------
    CompileError
        If neither can be used.
    """
    faults = []
    for find in (_temporary, cache.trusted_folder):
        try:
            # No TemporaryDirectory: a forked child that exits would delete its parent's.
            folder = tempfile.mkdtemp(prefix=cache.SCRATCH, dir=find())
            try:
                return use(Path(folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            faults.append(str(error))
    raise CompileError(
        f"code can be compiled in and loaded from neither TMPDIR nor the kernel cache: {'; '.join(faults)}; "
        "if it is for lack of a folder, set TMPDIR to one of your own, with room and not mounted noexec"
    )


def with_copy(name: str, code: bytes, use: Callable[[Path], Result]) -> Result:
    """What `use` returns, called with the path of a private copy of some code: to load or to run it before it is deleted."""

    def copied(folder: Path) -> Result:
        path = folder / name
        path.write_bytes(code)
        path.chmod(0o700)
        return use(path)

    return in_scratch(copied)


def _temporary() -> Path:
    folder = Path(tempfile.gettempdir())
    fault = trust.fault_of(folder, shared=True)
    if fault:
        raise PermissionError(fault)
    return folder
