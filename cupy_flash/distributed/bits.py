"""The bits of arrays, whatever they mean."""

from __future__ import annotations

from typing import Any

import numpy

from ..problem.arrays import BFLOAT16


def raw(x: Any) -> Any:
    """A view of the same bits that any library copies: CuPy has few operations for bfloat16."""
    return x if isinstance(x, numpy.ndarray) or x.dtype != BFLOAT16 else x.view("uint16")
