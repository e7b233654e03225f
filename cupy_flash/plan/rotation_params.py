"""What kernels are told that rotate and append rows: `RotateParams` and `AppendParams` of ``kernels_cu/params.cuh``."""

from __future__ import annotations

import numpy

from ..errors import UnsupportedError
from ..problem.append import AppendProblem
from ..problem.layout import Layout, merge_batch_axes
from ..problem.mask import UNBOUNDED
from ..problem.rotate import RotateProblem
from ..problem.rotation import Rotation
from .append import query_rows
from .kernel import KernelPlan
from .params import fast_divmod
from .structs import struct

MAX_ROWS = 2**31  # of all heads of a batch element, which a kernel counts together
MAX_DIM = 2**24  # so that the elements of a block's rows can be counted
MAX_PAGES = 2**31


def rotate_params(plan: KernelPlan, problem: RotateProblem) -> numpy.ndarray:
    """A size-1 array of `RotateParams` with everything but the addresses and the first position.

    Raises
    ------
    UnsupportedError
        If a length or the number of batch axes is beyond what the kernel counts.
    """
    params = numpy.zeros(1, struct("RotateParams"))
    _add_rows(params, problem.x, "x", {"x": problem.x, "out": problem.out}, {"positions": problem.rotation.positions})
    _add_rotation(params, plan, problem.rotation)
    params["dim"] = problem.x.shape[-1]
    params["chunks_divmod"] = _chunks(plan, problem.x.shape[-1], problem.rotation.pairs, "x")
    return params


def append_params(plan: KernelPlan, problem: AppendProblem) -> numpy.ndarray:
    """A size-1 array of `AppendParams` with everything but the addresses and the length of all.

    Raises
    ------
    UnsupportedError
        As `rotate_params`.
    """
    params = numpy.zeros(1, struct("AppendParams"))
    indices = {name: getattr(problem, name) for name in ("seqlens", "seqlens_new", "pages", "cache_batch_idx")}
    rotation, rows = problem.rotation, {"k": problem.k, "v": problem.v}
    if problem.q is not None:
        rows |= {"q": problem.q, "q_out": problem.q_out}
    _add_rows(params, problem.k, "k", rows, indices | {"positions": rotation and rotation.positions})
    first, count = query_rows(plan, problem)
    _check("q", "rows of all heads, with those of k", first + count, MAX_ROWS)
    params["q_first"], params["q_rows"] = first, count
    if rotation is not None:
        _add_rotation(params, plan, rotation)
    for name in ("k_cache", "v_cache"):
        _add_tensor(params[name], getattr(problem, name), (0, 0, 0, getattr(problem, name).strides[0]))
    _check("k_cache", "pages", problem.page_count, MAX_PAGES)
    _check("k_cache", "rows of a sequence", problem.capacity, UNBOUNDED)
    params["page_count"], params["capacity"] = problem.page_count, problem.capacity
    params["page_divmod"] = fast_divmod(max(problem.page_size, 1))
    for side, dim, rows in (("k", "dim", problem.k), ("v", "dim_v", problem.v)):
        pairs = rotation.pairs if rotation is not None and side == "k" else 0
        params[dim] = rows.shape[-1]
        params[f"{side}_chunks_divmod"] = _chunks(plan, rows.shape[-1], pairs, side)
    return params


def _add_rows(
    params: numpy.ndarray, rows: Layout, name: str, tensors: dict[str, Layout], indices: dict[str, Layout | None]
) -> None:
    """Sizes of the rows that are moved, and strides of all that have their batch axes."""
    *batch, heads, seq, _ = rows.shape
    indices = {label: layout for label, layout in indices.items() if layout is not None}
    sizes, strides = merge_batch_axes(tuple(batch), tensors | indices, name)
    _check(name, "batch elements", max(sizes), MAX_PAGES)
    _check(name, "rows of a head", seq, UNBOUNDED)
    _check(name, "rows of all heads", heads * seq, MAX_ROWS)
    params["batch"], params["rows"] = sizes, heads * seq
    params["len_divmod"] = fast_divmod(max(seq, 1))
    for label, layout in tensors.items():
        _add_tensor(params[label], layout, strides[label])
    for label, layout in indices.items():
        params[label]["batch_stride"] = strides[label]
        params[label]["row_stride"] = layout.strides[len(batch)] if len(layout.shape) > len(batch) else 0
        params[label]["wide"] = layout.itemsize == 8


def _add_rotation(params: numpy.ndarray, plan: KernelPlan, rotation: Rotation) -> None:
    for name in ("cos", "sin"):
        _add_tensor(params[name], getattr(rotation, name), (0, 0, 0, 0))
    _check("cos", "rows", rotation.ends, MAX_ROWS)
    params["position_of_each"], params["pairs"] = rotation.of_each, rotation.pairs
    params["positions_end"], params["interleaved"] = rotation.ends, rotation.interleaved
    params["float32_angles"] = rotation.cos.dtype == "float32"
    granule = max(plan.config.COPY_BYTES // (4 if plan.config.DTYPE == "FLOAT32" else 2), 1)
    params["in_fours"] = granule % 4 == 0 and all(map(_in_fours, (rotation.cos, rotation.sin)))


def _in_fours(angles: Layout) -> bool:
    """Whether any fourth number of float32 of each row is at an address divisible by 16."""
    (rows, pairs), (row_stride, stride) = angles.shape, angles.strides
    beside = angles.dtype == "float32" and (stride == 1 or pairs == 1)
    return beside and angles.alignment >= 16 and (row_stride % 4 == 0 or rows == 1)


def _add_tensor(into: numpy.ndarray, layout: Layout, batch_stride: tuple[int, ...]) -> None:
    into["batch_stride"] = batch_stride
    *_, into["head_stride"], into["row_stride"], into["col_stride"] = (0, *layout.strides)[-3:]


def _chunks(plan: KernelPlan, dim: int, pairs: int, name: str) -> tuple[int, int, int]:
    """How many chunks a row has, as the divisor of a kernel."""
    if dim >= MAX_DIM:
        raise UnsupportedError(f"{name}: expected head dim below {MAX_DIM}, got {dim}")
    granule = max(plan.config.COPY_BYTES // (4 if plan.config.DTYPE == "FLOAT32" else 2), 1)
    return fast_divmod((dim - pairs) // granule) if dim > pairs else (0, 0, 0)


def _check(name: str, things: str, count: int, end: int) -> None:
    if count >= end:
        raise UnsupportedError(f"{name}: expected fewer than {end} {things}, got {count}")
