"""What is no array, or says that it is one: things to pass where an array is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from .draw import Draw
from .options import EqualToAll, Hostile, Unreadable, Value

ERRORS = (
    RuntimeError,
    KeyError,
    IndexError,
    OSError,
    ZeroDivisionError,
    AttributeError,
    AssertionError,
    BufferError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OverflowError,
    RecursionError,
    StopIteration,
    SystemError,
    TypeError,
    ValueError,
    type("OddError", (Exception,), {}),
)


def draw_object(draw: Draw, array: numpy.ndarray) -> Value:
    """Something in place of this array."""
    kind = draw.one((_plain, _plain, _interface, _cuda_interface, _dlpack, _array_method, _wrapper, _odd_class))
    return kind(draw, array)


def _plain(draw: Draw, array: numpy.ndarray) -> Value:
    return draw.one(
        (
            Value("a string", "x"),
            Value("bytes", b"\0" * 64),
            Value("a bytearray", bytearray(64)),
            Value("a memoryview", memoryview(b"\0" * 64)),
            Value("a number", 1.0),
            Value("a NumPy scalar", numpy.float32(1), None),
            Value("True", True),
            Value("a nested list", array.tolist() if array.size < 100 and array.dtype.kind == "f" else [[1.0]]),
            Value("a ragged list", [[1.0, 2.0], [3.0]]),
            Value("a tuple of arrays", (array, array)),
            Value("a dict", {"data": array}),
            Value("a set", {1, 2}),
            Value("a generator", (row for row in [1.0])),
            Value("a class", numpy.ndarray),
            Value("a class of ours", Hostile),
            Value("a function", len),
            Value("a module", numpy),
            Value("a dtype", array.dtype),
            Value("Ellipsis", ...),
            Value("a slice", slice(None)),
            Value("a range", range(10)),
            Value("an exception", ValueError("x")),
            Value("a hostile object", Hostile()),
            Value("an unreadable object", Unreadable()),
            Value("an object equal to all", EqualToAll()),
            Value("a flat iterator", numpy.ones(3).flat),
        )
    )


def _thing(name: str, **members: Any) -> Any:
    return type(name, (), members)()


def _raiser(error: type[Exception]) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error("odd")

    return raises


def _interface(draw: Draw, array: numpy.ndarray) -> Value:
    """The array interface, broken in one place; the address is a true one."""
    usual = {"version": 3, "shape": array.shape, "typestr": "<f4", "data": (numpy.zeros(4096).ctypes.data, False)}
    label, interface = _broken(draw, usual)
    return Value(f"an array interface with {label}", _thing("Liar", __array_interface__=interface))


def _cuda_interface(draw: Draw, array: numpy.ndarray) -> Value:
    usual = {"version": 3, "shape": array.shape, "typestr": "<f4", "data": (0x7F0000000000, False), "strides": None}
    if draw.chance(0.2):
        error = draw.one(ERRORS)
        value = type("Liar", (), {"__cuda_array_interface__": property(_raiser(error))})()
        return Value(f"a CUDA array interface that raises {error.__name__}", value)
    label, interface = _broken(draw, usual)
    return Value(f"a CUDA array interface with {label}", _thing("CudaLiar", __cuda_array_interface__=interface))


def _broken(draw: Draw, usual: dict[str, Any]) -> tuple[str, Any]:
    """An interface that is none, lacks a key, or has nonsense under one."""
    if draw.chance(0.3):
        return draw.one((("no dict", 5), ("None", None), ("nothing in it", {}), ("a list", [1]), ("a string", "shape")))
    key = draw.one(list(usual))
    if draw.chance(0.3):
        return f"no {key}", {name: x for name, x in usual.items() if name != key}
    nonsense = {
        "version": (-1, "3", None, 99),
        "shape": (None, 5, "ab", (-1, 4), (2.5,), (1 << 62, 1 << 62), [], ("x",)),
        "typestr": ("f4", "<f5", "", None, 4, "<V2", "|O8", ">f4", "<U4", b"<f4"),
        "data": (None, 5, (None, False), ("x", False), (-1, False), (1,), ()),
        "strides": (5, "x", (1,), (-1,) * len(usual["shape"]), (2.5,)),
    }[key]
    value = draw.one(nonsense)
    return f"{key} {value!r}", usual | {key: value}


def _dlpack(draw: Draw, array: numpy.ndarray) -> Value:
    """DLPack that raises or returns nonsense."""
    error = draw.one(ERRORS)
    nonsense = draw.one((None, 5, "x", b"dltensor", [], (), array, object()))
    few_or_many, odd = (None, 1, (), (1,), (1, 0, 0), "12"), (("cpu", 0), (-1, -1), (1.0, 0), (2**70, 0))
    place = draw.one((*few_or_many, *odd, (99, 0), (2, 0), (2, 99), (4, 0)))
    raises, returns = _raiser(error), (lambda self, **_: nonsense)
    at_home, elsewhere = (lambda self: (1, 0)), (lambda self: place)
    label, members = draw.one(
        (
            (f"whose device raises {error.__name__}", {"__dlpack_device__": raises, "__dlpack__": returns}),
            (f"that raises {error.__name__}", {"__dlpack_device__": at_home, "__dlpack__": raises}),
            (f"that returns {type(nonsense).__name__}", {"__dlpack_device__": at_home, "__dlpack__": returns}),
            (f"on device {place!r}", {"__dlpack_device__": elsewhere, "__dlpack__": returns}),
            ("without a method", {"__dlpack_device__": at_home}),
            ("whose device is no method", {"__dlpack_device__": (1, 0), "__dlpack__": returns}),
        )
    )
    return Value(f"DLPack {label}", _thing("Pack", **members))


def _array_method(draw: Draw, array: numpy.ndarray) -> Value:
    """`__array__` that raises or returns nonsense."""
    if draw.chance(0.5):
        error = draw.one(ERRORS)
        return Value(f"an __array__ that raises {error.__name__}", _thing("Arrayish", __array__=_raiser(error)))
    result = draw.one((None, 5, "x", [1.0], object(), {}, numpy.array("x"), numpy.array([None]), numpy.float32(1)))
    arrayish = _thing("Arrayish", __array__=lambda self, dtype=None, copy=None: result)
    return Value(f"an __array__ that returns {type(result).__name__}", arrayish)


def _wrapper(draw: Draw, array: numpy.ndarray) -> Value:
    """The array itself behind a protocol, which may be accepted."""
    read = {"__array__": lambda self, dtype=None, copy=None: array}
    methods = {
        "__array__": read,
        "DLPack": {"__dlpack__": lambda self, **options: array.__dlpack__(**options), "__dlpack_device__": lambda self: (1, 0)},
        "an array namespace": read | {"__array_namespace__": lambda self: None},
        "a lazy array namespace": read | {"__array_namespace__": _raiser(KeyError)},
    }
    label = draw.one(list(methods))
    return Value(f"the array behind {label}", _thing("Wrapper", **methods[label]), None)


def _odd_class(draw: Draw, array: numpy.ndarray) -> Value:
    """Objects whose class or attributes misbehave."""
    error = draw.one(ERRORS)
    nobody = type("Nobody", (), {"__module__": 5})
    lacking = type("Lacking", (), {"__module__": None})
    return draw.one(
        (
            Value(f"an object whose attributes raise {error.__name__}", _thing("Closed", __getattr__=_raiser(error))),
            Value(f"an object all of which raises {error.__name__}", type("Shut", (), {"__getattribute__": _raiser(error)})()),
            Value("an object of a module called 5", nobody()),
            Value("an object of a module called None", lacking()),
            Value("an object that says it is an array", type("Fake", (), {"__class__": property(lambda self: numpy.ndarray)})()),
            Value("a fake tensor", type("Tensor", (), {"__module__": "torch"})()),
            Value("a fake JAX array", type("Array", (), {"__module__": "jax"})()),
            Value("a fake Numba array", type("DeviceNDArray", (), {"__module__": "numba.cuda"})()),
            Value("a fake CuPy array", type("ndarray", (), {"__module__": "cupy"})()),
            Value("a fake tensor with __array__", _fake_with_array("torch", array), None),
            Value("a fake Numba array with __array__", _fake_with_array("numba.cuda", array), None),
        )
    )


def _fake_with_array(module: str, array: numpy.ndarray) -> Any:
    members = {"__module__": module, "__array__": lambda self, dtype=None, copy=None: array}
    return type("Fake", (), members)()
