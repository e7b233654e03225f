"""Real arrays of the wrong kind: what NumPy lets one make, in place of the array that is expected."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import ml_dtypes
import numpy

from .draw import Draw
from .options import UNKNOWN, Value

HUGE = 1 << 40  # elements along an axis of stride 0: no memory, until somebody makes some
DTYPES = (
    "?", "i1", "i4", "u8", "f2", "f4", "f8", "g", "F", "D", ">f2", ">f4", ">f8", ">c8", "M8[s]", "m8[ns]", "U3", "S4", "O", "V4",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, numpy.dtype([("x", "f4")]), numpy.dtype([]),
    numpy.dtype(ml_dtypes.bfloat16).newbyteorder(">"),
)  # fmt: skip


class Plain(numpy.ndarray):
    """A subclass that changes nothing."""


class Lying(numpy.ndarray):
    """A subclass whose `view` returns something else."""

    lie = None

    def view(self, *_: object) -> object:
        if isinstance(self.lie, type):
            raise self.lie("odd")
        return self.lie


class Odd(numpy.ndarray):
    """A subclass whose shape and strides are not what they are."""

    shape = property(lambda self: ("x",))
    strides = property(lambda self: None)


def draw_array(draw: Draw, array: numpy.ndarray, others: list[numpy.ndarray]) -> Value:
    """Another array in place of this one. What `ok` of it is None is judged by its shape and dtype, like any array.

    Parameters
    ----------
    draw : Draw
    array : numpy.ndarray
    others : list of numpy.ndarray
        The other arrays of the call.
    """
    return draw.one((_shape, _shape, _shape, _dtype, _dtype, _strides, _strides, _subclass, _other(others)))(draw, array)


def _axis(draw: Draw, array: numpy.ndarray) -> int:
    return draw.integer(0, array.ndim - 1)


def _shape(draw: Draw, array: numpy.ndarray) -> Value:
    if array.ndim == 0:
        return Value("one axis", array.reshape(1), None)
    axis = _axis(draw, array)
    first, rest = array[:1] if len(array) else array, (1,) * (draw.one((33, 40, 64)) - array.ndim)
    huge = list(array.shape)
    huge[axis] = HUGE + draw.integer(1, 1000)
    at = (slice(None),) * axis
    makers: tuple[tuple[str, Callable[[], numpy.ndarray]], ...] = (
        ("no axes", lambda: array.reshape(-1)[:1].reshape(()) if array.size else numpy.zeros((), array.dtype)),
        ("one axis", lambda: array.reshape(-1)),
        (f"{array.ndim + len(rest)} axes", lambda: array.reshape(rest + array.shape)),
        (f"{array.ndim + len(rest)} axes of 2", lambda: numpy.broadcast_to(array, (2,) * min(len(rest), 33) + array.shape)),
        ("an axis less", lambda: array[0] if len(array) else array),
        ("an axis more", lambda: array[None]),
        ("an axis more at the end", lambda: array[..., None]),
        (f"axis {axis} one longer", lambda: numpy.concatenate([array, array[(*at, slice(0, 1))]], axis)),
        (f"axis {axis} one shorter", lambda: array[(*at, slice(1, None))]),
        (f"axis {axis} empty", lambda: array[(*at, slice(0, 0))]),
        ("axes swapped", lambda: array.swapaxes(axis, 0)),
        ("transposed", lambda: array.T),
        (f"axis {axis} huge", lambda: numpy.broadcast_to(array[(*at, slice(0, 1))], huge)),
        ("first of an axis", lambda: first),
    )
    label, make = draw.one(makers)
    try:
        return Value(label, make(), None)
    except ValueError:  # an array cannot have so many axes, or elements
        return Value("an axis more", array[None] if array.ndim < 60 else array[0], None)


def _dtype(draw: Draw, array: numpy.ndarray) -> Value:
    dtype = numpy.dtype(draw.one(DTYPES))
    return Value(f"dtype {dtype.str}", numpy.zeros(array.shape, dtype), None)


def _strides(draw: Draw, array: numpy.ndarray) -> Value:
    itemsize, size = array.dtype.itemsize, array.size * array.dtype.itemsize
    if array.ndim == 0:
        return Value("read-only", _read_only(array), None)
    axis = _axis(draw, array)
    backwards = (slice(None),) * axis + (slice(None, None, -1),)

    def misaligned() -> numpy.ndarray:
        return numpy.zeros(size + 1, numpy.uint8)[1:].view(array.dtype).reshape(array.shape)

    def field() -> numpy.ndarray:
        record = numpy.dtype({"names": ["x"], "formats": [array.dtype], "offsets": [0], "itemsize": itemsize + 1})
        return numpy.zeros(array.shape, record)["x"]

    makers = (
        ("misaligned", misaligned),
        ("a field of records", field),
        (f"axis {axis} backwards", lambda: array[backwards]),
        (f"axis {axis} repeated", lambda: numpy.repeat(array, 2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]),
        (f"axis {axis} of stride 0", lambda: _stretched(array, axis)),
        ("Fortran order", lambda: numpy.asfortranarray(array)),
        ("read-only", lambda: _read_only(array)),
        ("a copy", array.copy),
    )
    label, make = draw.one(makers)
    return Value(label, make(), None)


def _read_only(array: numpy.ndarray) -> numpy.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def _stretched(array: numpy.ndarray, axis: int) -> numpy.ndarray:
    """Along the axis all is the first element; writeable, though."""
    strides = list(array.strides)
    strides[axis] = 0
    return numpy.lib.stride_tricks.as_strided(array.copy(), array.shape, strides)


def _subclass(draw: Draw, array: numpy.ndarray) -> Value:
    lying = array.view(Lying)
    lying.lie = draw.one((None, 5, [1.0], "x", numpy.zeros(3), RuntimeError, KeyError, numpy.array("x")))
    masked = numpy.ma.masked_array(array, mask=numpy.ones(array.shape, bool))
    values = [
        Value("a masked array", masked, False if array.size else None),
        Value("a masked array without a mask", numpy.ma.masked_array(array), None, UNKNOWN),
        Value("a subclass", array.view(Plain), None, UNKNOWN),
        Value(f"a subclass whose view lies: {type(lying.lie).__name__}", lying, None, UNKNOWN),
        Value("a subclass whose shape lies", array.view(Odd), None, UNKNOWN),
        Value("a record array", numpy.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")])),
        Value("an array of characters", numpy.char.array(["a", "b"])),
        Value("a memory map", _mapped(array), None, UNKNOWN),
    ]
    if array.ndim == 2:
        values += 3 * [Value("a matrix", array.view(numpy.matrix))]
    return draw.one(values)


def _mapped(array: numpy.ndarray) -> numpy.ndarray:
    if not array.size or array.dtype.kind not in "f":
        return array.view(Plain)
    with tempfile.TemporaryFile() as file:
        mapped = numpy.memmap(file, array.dtype, "w+", shape=array.shape)
        mapped[...] = array
        return mapped


def _other(others: list[numpy.ndarray]) -> Callable[[Draw, numpy.ndarray], Value]:
    """Another array of the call, or memory of it."""

    def choose(draw: Draw, array: numpy.ndarray) -> Value:
        if not others:
            return Value("itself", array, None)
        other = draw.one(others)
        if draw.chance(0.5) and other.size >= array.size and other.dtype == array.dtype and other.flags.c_contiguous:
            return Value("memory of another argument", other.reshape(-1)[other.size - array.size :].reshape(array.shape), None)
        return Value("another argument", other, None)

    return choose
