"""Gradients of results to begin a backward with."""

from __future__ import annotations

import zlib
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy

from . import cases
from .oracle import accumulator


def make_cotangents(case: cases.Case, xp: ModuleType = numpy, seed: int = 0) -> tuple[Any, Any]:
    """Return `(dout, dlse)` for `case` as arrays of `xp`, standard normal, the same for the same case and seed.

    `dout` is `(*batch, heads_q, len_q, dim_v)`, has dtype and layout of the case, and lies in a larger buffer full of NaN.
    `dlse` is `(*batch, heads_q, len_q)`, contiguous, float32 or for float64 cases float64.

    Examples
    --------
    >>> from cupy_flash.judge.cases import Case
    >>> from cupy_flash.judge.cotangents import make_cotangents
    >>> dout, dlse = make_cotangents(Case("float16", 5, 7, dim=4))
    >>> dout.shape, dout.dtype.name, dlse.shape, dlse.dtype.name
    ((1, 1, 5, 4), 'float16', (1, 1, 5), 'float32')
    """
    rng = numpy.random.default_rng([seed, zlib.crc32(case.name.encode()), 1])  # 1: other numbers than those of the inputs
    dtype = numpy.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    rows = (*case.batch, case.heads_q, case.len_q)
    dout = cases.place(rng.standard_normal((*rows, case.dim_v)).astype(dtype), case.layout, xp)
    return dout, xp.asarray(rng.standard_normal(rows).astype(accumulator(dtype)))
