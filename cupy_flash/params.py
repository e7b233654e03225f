"""The parameter structs of ``kernels_cu/params.cuh`` as NumPy dtypes, and a problem in that form."""

from __future__ import annotations

import numpy

from .errors import UnsupportedError
from .layout import Layout
from .problem import Problem

BATCH_AXES = 4
UNBOUNDED = 1 << 30  # lengths stay below, so that a row plus a bound fits 32 bits

TENSOR = numpy.dtype(
    [
        ("data", "u8"),
        ("batch_stride", "i8", (BATCH_AXES,)),
        ("head_stride", "i8"),
        ("row_stride", "i8"),
        ("col_stride", "i8"),
    ],
    align=True,
)
FORWARD = numpy.dtype(
    [
        ("q", TENSOR),
        ("k", TENSOR),
        ("v", TENSOR),
        ("out", TENSOR),
        ("lse", TENSOR),
        ("first_key", "i4"),
        ("last_key", "i4"),
        ("batch", "i4", (BATCH_AXES,)),
        ("heads", "i4"),
        ("heads_per_kv", "i4"),
        ("len_q", "i4"),
        ("len_kv", "i4"),
        ("dim", "i4"),
        ("dim_v", "i4"),
        ("scale", "f4"),
        ("softcap", "f4"),
    ],
    align=True,
)
POINTERS = ("q", "k", "v", "out", "lse")


def forward_params(problem: Problem) -> numpy.ndarray:
    """A size-1 array of dtype `FORWARD` with everything but the addresses.

    Raises
    ------
    UnsupportedError
        If a length or the number of batch axes is beyond what the kernels count.
    """
    for name, length in (("q", problem.len_q), ("k", problem.len_kv)):
        if length >= UNBOUNDED:
            raise UnsupportedError(f"{name}: expected fewer than 2**30 rows, got {length}")
    layouts = {name: getattr(problem, name) for name in POINTERS if getattr(problem, name) is not None}
    batch, strides = merge_batch_axes(problem.batch, layouts)
    params = numpy.zeros(1, FORWARD)
    for name, layout in layouts.items():
        params[name]["batch_stride"] = strides[name]
        heads, rows, *cols = layout.strides[len(problem.batch) :]
        params[name]["head_stride"], params[name]["row_stride"] = heads, rows
        params[name]["col_stride"] = cols[0] if cols else 0
    params["first_key"] = -UNBOUNDED if problem.first_key is None else problem.first_key
    params["last_key"] = UNBOUNDED if problem.last_key is None else problem.last_key
    params["batch"] = batch
    params["heads"] = problem.heads_q
    params["heads_per_kv"] = problem.heads_q // max(problem.heads_kv, 1)
    for field in ("len_q", "len_kv", "dim", "dim_v", "scale"):
        params[field] = getattr(problem, field)
    params["softcap"] = problem.softcap or 0
    return params


def merge_batch_axes(
    batch: tuple[int, ...], layouts: dict[str, Layout]
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """The batch axes as exactly `BATCH_AXES`, neighbours merged where every array steps through both as through one.

    Parameters
    ----------
    batch : tuple of int
    layouts : dict of str to Layout
        Layouts whose first axes are those of `batch`.

    Returns
    -------
    sizes : tuple of int
    strides : dict of str to tuple of int
        In elements, for each layout.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []  # size, and the stride in each layout
    for axis, size in enumerate(batch):
        strides = tuple(layout.strides[axis] for layout in layouts.values())
        if size == 1:
            continue
        if merged and merged[-1][1] == tuple(size * stride for stride in strides):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if len(merged) > BATCH_AXES:
        raise UnsupportedError(
            f"q: expected batch axes that merge to at most {BATCH_AXES}, got {batch} with strides that leave {len(merged)}"
        )
    padding = [(1, (0,) * len(layouts))] * (BATCH_AXES - len(merged))
    sizes, strides = zip(*padding, *merged)
    return sizes, dict(zip(layouts, zip(*strides)))
