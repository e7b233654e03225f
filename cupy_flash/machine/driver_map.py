"""Tensor maps in the form of the CUDA driver.

The driver encodes a map once, and a launch with other arrays changes its address only.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from ..plan.tensor_map import MAP_BYTES, TensorMap

RANK = 5
# Of CUtensorMapDataType and its like in cuda.h.
DATA_TYPE = {"float16": 6, "float32": 7, "bfloat16": 9}
INTERLEAVE_NONE = 0
SWIZZLE_128B = 3
L2_PROMOTION_256B = 3
OUT_OF_BOUNDS_ZEROS = 0
DRIVER = "libcuda.so.1"


class DriverMap:
    """A map in the form of the driver, at a place in memory, that points to one array after another.

    Parameters
    ----------
    name : str
        Of the array, for error messages.
    described : TensorMap
    place : int
        Address of the `MAP_BYTES` bytes in host memory that belong to the map, a multiple of 64.
    """

    __slots__ = ("_address", "_described", "_name", "_place", "_replace")

    def __init__(self, name: str, described: TensorMap, place: int) -> None:
        if place % (MAP_BYTES // 2):
            raise ValueError(f"place: expected an address divisible by {MAP_BYTES // 2}, got {place:#x}")
        self._name, self._described, self._place = name, described, ctypes.c_void_p(place)
        self._address: int | None = None
        _, self._replace = _driver()

    def point_to(self, address: int) -> None:
        """Make the map that of the array at this address.

        Raises
        ------
        RuntimeError
            If the driver refuses the map or the address.
        """
        if address == self._address:
            return
        if self._address is None:
            self._encode(address)
        else:
            status = self._replace(self._place, address)
            if status:
                self._address = None  # the map may be anything now
                raise RuntimeError(f"{self._name}: cuTensorMapReplaceAddress refused {address:#x} with CUDA error {status}")
        self._address = address

    def _encode(self, address: int) -> None:
        encode, _ = _driver()
        m = self._described
        status = encode(
            self._place,
            DATA_TYPE[m.dtype],
            RANK,
            address,
            (ctypes.c_uint64 * RANK)(*m.sizes),
            (ctypes.c_uint64 * (RANK - 1))(*m.strides),
            (ctypes.c_uint32 * RANK)(m.box_columns, m.box_rows // m.box_heads, m.box_heads, 1, 1),
            (ctypes.c_uint32 * RANK)(1, 1, 1, 1, 1),
            INTERLEAVE_NONE,
            SWIZZLE_128B,
            L2_PROMOTION_256B,
            OUT_OF_BOUNDS_ZEROS,
        )
        if status:
            raise RuntimeError(f"{self._name}: cuTensorMapEncodeTiled refused {m} at {address:#x} with CUDA error {status}")


@functools.cache
def _driver() -> tuple[Callable[..., int], Callable[..., int]]:
    """cuTensorMapEncodeTiled and cuTensorMapReplaceAddress. Neither blocks, so Python's lock is kept, which takes less time."""
    try:
        library = ctypes.PyDLL(DRIVER)
        encode, replace = library.cuTensorMapEncodeTiled, library.cuTensorMapReplaceAddress
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"tensor maps need a CUDA driver of version 12.0 or newer, and loading it failed: {error}") from error
    words, numbers = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    kinds = [ctypes.c_int] * 4  # enumerations
    encode.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, words, words, numbers, numbers, *kinds]
    replace.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return encode, replace
