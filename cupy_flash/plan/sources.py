"""The kernel sources, as text."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@functools.cache
def shelf() -> Path:
    """The folder ``kernels_cu``: inside the installed package, beside it in a checkout."""
    from pathlib import Path  # late: it takes longer than the rest of this file

    here = Path(__file__).resolve().parents[1]
    installed = here / "kernels_cu"
    return installed if installed.is_dir() else here.parent / "kernels_cu"


@functools.cache
def files() -> dict[str, str]:
    """Every source file by its path on the shelf, as included."""
    paths = sorted(path for path in shelf().rglob("*") if path.suffix in (".cu", ".cuh", ".cpp"))
    return {path.relative_to(shelf()).as_posix(): path.read_text(encoding="utf-8") for path in paths}
