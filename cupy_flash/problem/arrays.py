"""Arrays of any library in, views out; results go back as the caller's own kind of array.

A view shares the caller's memory: CuPy and NumPy arrays are taken as they are, others come through DLPack (which
orders the streams of the two libraries) or, failing that, the CUDA array interface. The caller's library is never
imported: who made an array can be asked through `sys.modules`.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy

from .layout import HEADS, ITEMSIZE, Layout

if TYPE_CHECKING:
    import cupy

    Array: TypeAlias = numpy.ndarray | cupy.ndarray

BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
DTYPES = {name: BFLOAT16 if name == "bfloat16" else numpy.dtype(name) for name in ITEMSIZE}

# Device types of DLPack: host memory pageable and pinned, device memory plain and managed.
HOST_MEMORY = (1, 3)
CUDA_MEMORY = (2, 13)
TRACED = (
    "while JAX traces a function, its arrays have no memory; call cupy_flash.jax.attention there, "
    "or this one outside of jit, grad and vmap"
)


def kind_on_devices() -> type | None:
    """What arrays in device memory are that need no view: CuPy's. None where nobody has imported CuPy, and so nobody has one.

    While another thread imports it the module is there and lacks most of its names.
    """
    return getattr(sys.modules.get("cupy"), "ndarray", None)


def view(x: Any, name: str, *, writable: bool = False) -> Array:
    """An array of any library as a NumPy or CuPy array that shares its memory.

    Parameters
    ----------
    x : array
        NumPy, CuPy, or anything with DLPack, the CUDA array interface or ``__array__``. No autograd graph is ever
        recorded: a tensor that requires a gradient is accepted only where its library is not recording one either.
        A subclass is refused, because what it means besides its elements would be lost.
    name : str
        What error messages call the argument.
    writable : bool
        True if results will be written to `x`: refuses read-only and immutable arrays.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        NumPy for host memory, CuPy for device memory.

    Raises
    ------
    TypeError
        If `x` is no array, its memory cannot be shared, or it means more than its elements say.
    ValueError
        If the result would be detached from an autograd graph, or not be written where the caller looks, or if elements
        are masked.
    """
    if type(x) is kind_on_devices():
        return x
    if type(x) is numpy.ndarray:
        array = x
    else:
        known = issubclass(type(x), numpy.ndarray) or _is_cupy(x)
        array = _plain(x if known else _foreign_view(x, name), name)
    if writable and (_made_by(x, "jax") or (type(array) is numpy.ndarray and not array.flags.writeable)):
        raise ValueError(f"{name}: expected a writable array, got a read-only {type(x).__name__}")
    return array


def describe(array: Array) -> tuple[tuple[Any, ...], int]:
    """What tells layouts apart (shape, strides in bytes, dtype, address modulo 16, device), and the address; gathered fast."""
    if type(array) is numpy.ndarray:
        device, address = None, pointer(array)
    else:
        memory = array.data
        device, address = memory.device_id, memory.ptr
    return (array.shape, array.strides, array.dtype, address & 15, device), address


def layout(array: Array, name: str = "array") -> Layout:
    """The `Layout` of a NumPy or CuPy array; error messages call it `name`."""
    return layout_of(describe(array)[0], name)


@functools.lru_cache(maxsize=1024)  # making a Layout takes longer than finding it again, and a program has few
def layout_of(description: tuple[Any, ...], name: str) -> Layout:
    """The `Layout` of an array that `describe` describes so."""
    shape, strides, dtype, phase, device = description
    alignment = (phase | 16) & -(phase | 16)
    size = dtype.itemsize or 1  # a void type may have none; whoever reads the dtype's name refuses it
    if any(stride % size for stride in strides):
        raise ValueError(f"{name}: expected strides that are multiples of {size} bytes, got {strides}")
    # A foreign byte order is part of NumPy's dtype.str ('>f4') but not of its name.
    dtype_name = dtype.name if dtype.isnative else dtype.str
    return Layout(shape, tuple(stride // size for stride in strides), dtype_name, alignment, device)


def description_of(layout: Layout) -> tuple[Any, ...]:
    """What `describe` says of an array with this layout that is aligned to 16 bytes."""
    dtype = DTYPES[layout.dtype]
    strides = tuple([stride * dtype.itemsize for stride in layout.strides])
    return layout.shape, strides, dtype, 0, layout.device


def pointer(array: Array) -> int:
    """Address of the element whose indices are all 0."""
    return array.__array_interface__["data"][0] if isinstance(array, numpy.ndarray) else array.data.ptr


def empty(layout: Layout) -> Array:
    """A new array of a dense layout, uninitialised, in host memory or on the current device.

    Parameters
    ----------
    layout : Layout
        CuPy does not check strides against memory: with gaps between its elements, what is written would lie beyond the array.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
    """
    shape, dtype, strides, nbytes = _new(layout)
    if layout.device is None:
        return numpy.ndarray(shape, dtype, strides=strides)
    import cupy

    return cupy.ndarray(shape, dtype, cupy.cuda.alloc(nbytes), strides)


@functools.lru_cache(maxsize=1024)
def _new(layout: Layout) -> tuple[tuple[int, ...], numpy.dtype, tuple[int, ...], int]:
    """Shape, dtype, strides in bytes and bytes of a new array."""
    shape, strides, dtype, *_ = description_of(layout)
    return shape, dtype, strides, layout.nbytes


def zeros(shape: tuple[int, ...], dtype: str, device: int | None) -> Array:
    """A new array of zeros without gaps, in host memory or on the current device, where CuPy's stream writes them."""
    if device is None:
        return numpy.zeros(shape, DTYPES[dtype])
    import cupy

    return cupy.zeros(shape, DTYPES[dtype])


def in_order(array: Array | None, order: str, heads: int = HEADS) -> Array | None:
    """A view with the axes in the order of kernels, as `Layout.in_order` has it."""
    if array is None or order == "bhsd" or array.ndim < -heads:
        return array
    return array.swapaxes(heads, heads + 1)


def give_back(result: Array, like: Any, name: str) -> Any:
    """A result as the caller's own kind of array, sharing its memory where the caller's library can.

    Parameters
    ----------
    result : numpy.ndarray or cupy.ndarray
    like : array
        What the caller passed in: a PyTorch tensor, Numba device array, JAX or other array with
        ``__array_namespace__`` gets one of the same library. Anything else gets `result` itself.
    name : str
        What error messages call `like`.

    Returns
    -------
    array

    Raises
    ------
    TypeError
        If that library does not take the result.
    """
    if isinstance(like, numpy.ndarray) or _is_cupy(like):
        return result
    try:
        return _exported(result, like)
    except Exception as error:  # whatever the other library raises
        why = _said(error)
    raise TypeError(f"{name}: expected an array whose library takes results, got {type(like).__name__}: {why}")


def _exported(result: Array, like: Any) -> Any:
    # NumPy does not export bfloat16 by DLPack.
    exportable = not isinstance(result, numpy.ndarray) or result.dtype != BFLOAT16
    if _made_by(like, "torch"):
        torch = sys.modules["torch"]
        return torch.from_dlpack(result) if exportable else torch.from_dlpack(result.view("int16")).view(torch.bfloat16)
    if _made_by(like, "numba"):
        return sys.modules["numba"].cuda.as_cuda_array(result)
    if hasattr(like, "__array_namespace__"):
        library = like.__array_namespace__()
        if not exportable:
            return library.asarray(result, device=like.device)
        made = library.from_dlpack(result)
        # A library may have several devices in the memory of one, and finds the first of them.
        return made if getattr(made, "device", like.device) == like.device else made.to_device(like.device)
    return result


def _is_cupy(x: Any) -> bool:
    kind = kind_on_devices()
    return kind is not None and issubclass(type(x), kind)


def _made_by(x: Any, library: str) -> bool:
    """True if a class of x comes from the library; subclasses that users derive count as well."""
    return any(str(base.__module__).partition(".")[0] == library for base in type(x).__mro__)


def _plain(x: Array, name: str) -> Array:
    """An array of NumPy or CuPy itself; of a subclass only where nothing but its elements matters."""
    kind = type(x)
    if kind is numpy.ndarray:
        return x
    if not issubclass(kind, numpy.ndarray):
        if kind is sys.modules["cupy"].ndarray:
            return x
        whole, plain = "cupy.ndarray", f"{name}.view(cupy.ndarray)"
    elif kind is numpy.memmap or (kind is numpy.ma.MaskedArray and not numpy.ma.getmaskarray(x).any()):
        return numpy.ndarray.view(x, numpy.ndarray)
    elif kind is numpy.ma.MaskedArray:
        raise ValueError(
            f"{name}: expected no masked elements, got {numpy.ma.count_masked(x)}, and all elements would take part; "
            f"pass what {name}.filled() returns if they shall"
        )
    else:
        whole, plain = "numpy.ndarray", f"numpy.asarray({name})"
    raise TypeError(
        f"{name}: expected a {whole}, got its subclass {kind.__name__}, of which the elements alone would be seen; "
        f"pass {plain} if they say all"
    )


def _foreign_view(x: Any, name: str) -> Array:
    kind = type(x).__name__
    if _made_by(x, "torch"):
        x = _detached(x, name)
    if _made_by(x, "dask"):
        raise TypeError(
            f"{name}: expected an array in memory, got a Dask {kind}, which would be gathered; "
            "map attention over its blocks with dask.array.map_blocks, or pass what compute() returns"
        )
    try:
        array = _imported(x)
    except Exception as error:  # whatever the other library raises
        array, why = None, TRACED if _is_tracer(x) else _said(error)
    else:
        why = None
    if why is not None:
        raise TypeError(f"{name}: expected an array whose memory can be shared, got {kind}: {why}")
    if array is None:
        hint = "; numpy.asarray makes an array of one" if isinstance(x, (list, tuple)) else ""
        raise TypeError(
            f"{name}: expected a NumPy or CuPy array or one with DLPack or the CUDA array interface, got {kind}{hint}"
        )
    return array


def _is_tracer(x: Any) -> bool:
    return _made_by(x, "jax") and isinstance(x, sys.modules["jax"].core.Tracer)


def _said(error: Exception) -> str:
    """What an exception says, and of which kind it is unless that is one that arrays are commonly refused with."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the other library's own
        text = ""
    if text and isinstance(error, (BufferError, ImportError, TypeError, ValueError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _imported(x: Any) -> Array | None:
    """x through the best protocol that it has, or None if it has none."""
    if hasattr(x, "__dlpack_device__"):
        memory, ordinal = x.__dlpack_device__()
        if memory in CUDA_MEMORY:
            import cupy

            return cupy.from_dlpack(x)
        if memory not in HOST_MEMORY:
            raise TypeError(f"DLPack device ({int(memory)}, {ordinal}) is neither CUDA nor host memory")
        return _host_view(x)
    if hasattr(x, "__cuda_array_interface__"):
        import cupy

        array = cupy.asarray(x)
        # The interface has no word for bfloat16: what says so arrives as bytes without a type.
        if array.dtype.kind == "V":
            raise TypeError(f"the CUDA array interface says {array.dtype.str!r}; bfloat16 needs DLPack")
        return array
    if hasattr(x, "__array__"):
        return _host_copy_or_view(x)
    return None


def _host_view(x: Any) -> numpy.ndarray:
    if _made_by(x, "torch"):
        torch = sys.modules["torch"]
        # Not by DLPack: NumPy takes no bfloat16 from it, and all that old versions of PyTorch export as read-only.
        return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()
    try:
        return numpy.from_dlpack(x)
    except (BufferError, RuntimeError) as error:  # NumPy takes no bfloat16 from DLPack, but from __array__ it does
        if not hasattr(x, "__array__"):
            raise TypeError(str(error)) from error
        return _host_copy_or_view(x)


def _host_copy_or_view(x: Any) -> numpy.ndarray:
    array = numpy.asanyarray(x)[...]  # a subclass, such as one with a mask, stays one and is judged as such
    array.flags.writeable = False  # results written to it might never reach x
    return array


def _detached(tensor: Any, name: str) -> Any:
    """What PyTorch made, without its gradient; an error where PyTorch would have recorded one."""
    if not getattr(tensor, "requires_grad", False):
        return tensor
    if sys.modules["torch"].is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor that requires no gradient, got one that does, and no autograd graph is "
            f"recorded here; pass {name}.detach() or call under torch.no_grad()"
        )
    return tensor.detach()
