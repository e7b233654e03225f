"""The bits of arrays, whatever they mean, and how they are copied: in elements as wide as a device moves at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy

from ..problem.arrays import BFLOAT16
from .timeline import noted

MOVE = "reinterpret_cast<ulonglong2&>(y) = reinterpret_cast<const ulonglong2&>(x);"
WIDE = ((16, "complex128"), (8, "uint64"), (4, "uint32"))  # bytes, and what both libraries have of so many


def library(x: Any) -> Any:
    """The module whose array this is, `numpy` or `cupy`."""
    if isinstance(x, numpy.ndarray):
        return numpy
    import cupy  # late: who has an array of it has it

    return cupy


def raw(x: Any) -> Any:
    """A view of the same bits that any library copies: CuPy has few operations for bfloat16."""
    return x if isinstance(x, numpy.ndarray) or x.dtype != BFLOAT16 else x.view("uint16")


def copy(to: Any, of: Any) -> None:
    """Copy an array of any strides into another one of its shape and dtype, in the widest elements.

    CuPy copies arrays that have gaps an element a lane, which with 16 bits is half the rate of device memory, and complex numbers
    in two steps.
    """
    assert (to.shape, to.dtype) == (of.shape, of.dtype), (to.shape, to.dtype, of.shape, of.dtype)
    with noted("copy"):
        to, of = widest(to, of)
        if to.dtype.itemsize == WIDE[0][0] and not isinstance(to, numpy.ndarray):
            _copying()(of, to)
        else:
            to[...] = of


@functools.cache
def _copying() -> Any:
    """A kernel in which each lane loads and stores 16 bytes at once."""
    import cupy

    return cupy.ElementwiseKernel("complex128 x", "complex128 y", MOVE, "cupy_flash_copy_16")


def dense(x: Any) -> Any:
    """The array, or a copy of it whose elements lie without gaps in C order."""
    if x.flags.c_contiguous:
        return x
    made = library(x).empty(x.shape, x.dtype)
    copy(made, x)
    return made


def widest(*arrays: Any) -> tuple[Any, ...]:
    """Views of the same bits of arrays of one shape and dtype, in the widest elements that all have room for: of 16 bytes at most.

    The last axis is then that much shorter. It has to be a multiple of such an element, without gaps, and each row of it has to
    begin at a multiple of its size in memory. Where that is not so, elements are narrower, and at last those of the arrays.
    """
    first = arrays[0]
    item = first.dtype.itemsize
    width = first.shape[-1] * item if first.ndim and first.size else 0
    for size, name in WIDE:
        if width and size > item and width % size == 0 and all(begins_at(x, size) for x in arrays):
            return tuple([x.view(name) for x in arrays])
    return tuple([raw(x) for x in arrays])


def begins_at(x: Any, size: int) -> bool:
    """Whether the last axis has no gaps, and all rows of it begin at multiples of so many bytes."""
    address = x.ctypes.data if isinstance(x, numpy.ndarray) else x.data.ptr
    steps = [step for n, step in zip(x.shape[:-1], x.strides) if n > 1]
    return x.strides[-1] == x.dtype.itemsize and not any(place % size for place in (address, *steps))
