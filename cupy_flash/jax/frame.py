"""What XLA hands to a function of another language: the structs of its FFI, read by number.

Their layouts are those of ``xla/ffi/api/c_api.h``, which comes with jaxlib (``jax.ffi.include_dir()``). What is read here has kept
its place from version 0.1 of that interface to 0.3; a frame says which one its XLA speaks, and is answered with the same. A call
should take microseconds, so that a struct is unpacked whole, and from where it lies: one view of all memory is made once, since to
make one for each struct, as `ctypes` does, takes longer than to read it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy

# Each struct begins with struct_size and extension_start. "4x" is what a C compiler leaves free behind an enum.
CALL_FRAME = struct.Struct(
    "=8xQ"  # extension_start
    "QQ i4x"  # api, ctx, stage
    "16xq8xQ"  # args: how many, pointers to buffers
    "16xq8xQ"  # rets: likewise
    "16xqQ8xQ"  # attrs: how many, types, values
)
BUFFER = struct.Struct("=16x i4x 8xqQ")  # dtype, rank, dims
DATA = struct.Struct("=24xQ")  # of the same
EXTENSION = struct.Struct("=Q i4x Q Q")  # struct_size, type, next, and of a query for metadata where to write them
SPAN = struct.Struct("=QQ")  # ptr, len
INT, WORD = struct.Struct("=i"), struct.Struct("=Q")
VERSION_IN_API, VERSION_IN_METADATA = 32, 24  # where major_version and minor_version lie: in XLA_FFI_Api, in XLA_FFI_Metadata
TRAITS_IN_METADATA = 32
ERROR_CREATE_IN_API, STREAM_GET_IN_API = 48, 80
FIRST_VERSION = 0, 1

EXECUTE = 3  # of XLA_FFI_ExecutionStage
METADATA = 1  # of XLA_FFI_Extension_Type
STRING = 4  # of XLA_FFI_AttrType
COMMAND_BUFFER_COMPATIBLE = 1  # of XLA_FFI_Handler_TraitsBits
INVALID_ARGUMENT, INTERNAL = 3, 13  # of XLA_FFI_Error_Code
NAMES = {1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64"}
NAMES |= {10: "float16", 11: "float32", 12: "float64", 16: "bfloat16"}  # of XLA_FFI_DataType
DTYPES = {code: numpy.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for code, name in NAMES.items()}

MEMORY = (ctypes.c_char * sys.maxsize).from_address(0)  # what is at an address, to be read only where something is
Told = ctypes.c_uint64 * 4  # what they take: two words about itself, and two more
Function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))  # of XLA's own, none of which waits for anything
Shape = tuple[int, bytes]  # code of the dtype, and the sizes of the axes as they lie in memory


class Frame(NamedTuple):
    """One call: where its arrays are, and what it shall do with them.

    Parameters
    ----------
    api, context : int
        Addresses of what XLA's own functions are found by, and told.
    buffers : tuple of int
        Addresses of what describes arguments, and behind them results.
    addresses : list of int
        Those of the same themselves.
    text : bytes
        The one attribute, a text.
    """

    api: int
    context: int
    buffers: tuple[int, ...]
    addresses: list[int]
    text: bytes

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Those of arguments and results, for as long as the call lasts; `shape_of` reads one."""
        memory, unpack = MEMORY, BUFFER.unpack_from
        found = [unpack(memory, at) for at in self.buffers]
        return tuple([(dtype, memory[dims : dims + 8 * rank]) for dtype, rank, dims in found])

    @property
    def stream(self) -> int:
        """The stream that XLA computes on, as an address."""
        told = Told(32, 0, self.context)  # XLA_FFI_Stream_Get_Args, which ends with what is asked for
        error = _function_at(*WORD.unpack_from(MEMORY, self.api + STREAM_GET_IN_API))(told)
        if error:
            raise RuntimeError("XLA has no stream for this call")
        return told[3]


def read(address: int) -> Frame | None:
    """The call that a frame is, or None if it asks for metadata, which have been written then.

    Raises
    ------
    RuntimeError
        If the frame is not one of a call with one text.
    """
    fields = CALL_FRAME.unpack_from(MEMORY, address)
    extension, api, context, stage, arguments, at_arguments, results, at_results, number, types, values = fields
    if extension and _answered(extension, api):
        return None
    if stage != EXECUTE or number != 1 or INT.unpack_from(MEMORY, types)[0] != STRING:
        raise RuntimeError(f"expected stage {EXECUTE} and one text as attribute, got stage {stage} and {number} attributes")
    memory, unpack = MEMORY, DATA.unpack_from
    buffers = _words(arguments).unpack_from(memory, at_arguments) + _words(results).unpack_from(memory, at_results)
    text, length = SPAN.unpack_from(memory, *WORD.unpack_from(memory, values))
    return Frame(api, context, buffers, [unpack(memory, at)[0] for at in buffers], memory[text : text + length])


def shape_of(shape: Shape) -> tuple[tuple[int, ...], numpy.dtype]:
    """Sizes of axes and dtype of an argument or a result."""
    dtype, sizes = shape
    if dtype not in DTYPES:
        raise RuntimeError(f"expected arrays of booleans, integers or floats, got XLA's type {dtype}")
    return struct.unpack(f"={len(sizes) // 8}q", sizes), DTYPES[dtype]


def array_at(address: int, shape: tuple[int, ...], dtype: numpy.dtype) -> numpy.ndarray:
    """The host memory at an address as an array, C-contiguous, for as long as whoever gave the address keeps it."""
    size = dtype.itemsize
    for axis in shape:
        size *= axis
    if not size:
        return numpy.empty(shape, dtype)  # of which the address may be 0
    return numpy.ndarray(shape, dtype, (ctypes.c_char * size).from_address(address))


def error(address: int, message: str, code: int) -> int:
    """An error of XLA's with this message, to be returned in answer to the frame at an address."""
    api = CALL_FRAME.unpack_from(MEMORY, address)[1]
    text = ctypes.create_string_buffer(message.encode("utf-8", "replace"))
    told = Told(28, 0, ctypes.addressof(text), code)  # XLA_FFI_Error_Create_Args
    return _function_at(*WORD.unpack_from(MEMORY, api + ERROR_CREATE_IN_API))(told)


def _answered(extension: int, api: int) -> bool:
    """Write metadata if an extension of the frame asks for them: the version of the interface, and that calls can be captured."""
    _, kind, _, metadata = EXTENSION.unpack_from(MEMORY, extension)
    if kind != METADATA:
        return False
    if api:
        ctypes.memmove(metadata + VERSION_IN_METADATA, api + VERSION_IN_API, 8)
    else:  # as XLA asked when it spoke this version
        ctypes.memmove(metadata + VERSION_IN_METADATA, struct.pack("=ii", *FIRST_VERSION), 8)
    ctypes.c_uint32.from_address(metadata + TRAITS_IN_METADATA).value = COMMAND_BUFFER_COMPATIBLE
    return True


@functools.lru_cache(maxsize=16)  # a process has one XLA, seldom two
def _function_at(address: int) -> Callable[[int], int]:
    return Function(address)


@functools.cache  # one for each number of arrays
def _words(number: int) -> struct.Struct:
    return struct.Struct(f"={number}Q")
