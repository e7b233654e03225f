"""Rotary embedding by complex numbers, in float64: what `rotate` and `append_kv` are held against."""

import mmap

import ml_dtypes
import numpy
import pytest

MAP_NORESERVE = 0x4000  # of Linux: nothing of it has to exist before it is touched
DTYPES = {"float16": numpy.float16, "bfloat16": ml_dtypes.bfloat16, "float32": numpy.float32, "float64": numpy.float64}
# Of random problems. Each dtype costs kernels of its own, and other tests have those of the first and the last.
HALVES_AND_SINGLES = ("float16", "bfloat16", "float32")
BACKENDS_AND_DTYPES = [("numpy", HALVES_AND_SINGLES), ("host", ("bfloat16",))]
BACKENDS_AND_DTYPES += [pytest.param("host", HALVES_AND_SINGLES, marks=pytest.mark.release)]
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def angles(rows, pairs, dtype="float32"):
    """cos and sin of angles as in the paper, of which no two are alike."""
    turns = numpy.outer(numpy.arange(rows), 100.0 ** -(numpy.arange(pairs) / max(pairs, 1)))
    return numpy.cos(turns).astype(DTYPES[dtype]), numpy.sin(turns).astype(DTYPES[dtype])


def rotated(x, cos, sin, positions, interleaved):
    """Rows `(..., heads, seq, dim)` times e^(i angle), where a pair of elements is a complex number."""
    pairs = cos.shape[1]
    turn = (cos.astype(float) + 1j * sin.astype(float))[positions][..., None, :, :]
    out = x.astype(float)
    rotary = out[..., : 2 * pairs]
    as_pairs = rotary.reshape(*x.shape[:-1], pairs, 2) if interleaved else rotary.reshape(*x.shape[:-1], 2, pairs).swapaxes(-1, -2)
    turned = (as_pairs[..., 0] + 1j * as_pairs[..., 1]) * turn
    both = numpy.stack([turned.real, turned.imag], -1 if interleaved else -2)
    out[..., : 2 * pairs] = both.reshape(rotary.shape)
    return out


def check(found, x, cos, sin, positions, interleaved):
    """Within the roundings of the result, of two products and of a sum; what has no pair is the same bits."""
    dtype = x.dtype.name
    expected = rotated(x, cos, sin, positions, interleaved)
    computed = 2.0**-53 if dtype == "float64" else 2.0**-24
    room = UNITS[dtype] * abs(expected) + 6 * computed * abs(x.astype(float)).max(initial=0) + 2.0**-25 * (dtype == "float16")
    assert found.dtype == x.dtype and found.shape == x.shape
    assert (abs(found.astype(float) - expected) <= room).all()
    behind = numpy.s_[..., 2 * cos.shape[1] :]
    assert bits(found[behind]) == bits(x[behind])


def bits(x):
    """All bytes of an array, in C order."""
    return numpy.ascontiguousarray(x).tobytes()


def noise(rng, *shape, dtype):
    """Any bits at all, NaN among them: what nobody may touch."""
    itemsize = numpy.dtype(DTYPES[dtype]).itemsize
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * itemsize), dtype=numpy.uint8).view(DTYPES[dtype])


def normal(rng, *shape, dtype):
    """Numbers of a normal distribution."""
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def untouched(nbytes):
    """So many bytes of addresses, of which only those take memory that are touched."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
