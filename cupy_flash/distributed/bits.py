"""The bits of arrays, whatever they mean."""

from __future__ import annotations

from typing import Any

import numpy


def raw(x: Any) -> Any:
    """A view of the same bits that any library copies: CuPy has few operations for bfloat16."""
    return x if isinstance(x, numpy.ndarray) or x.dtype.name != "bfloat16" else x.view("uint16")
