"""How ranks copy what they send: in elements as wide as memory allows."""

import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy
import pytest
from ranks import check, run

from cupy_flash.distributed import bits
from cupy_flash.judge.cases import Case

BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
CASE = Case("bfloat16", 45, 45, dim=16, heads_q=8, heads_kv=4, batch=(2,), causal=True)


def bytes_of(shape, dtype, begins=0):
    """An array of random bits at an address so far from a multiple of 16."""
    size = int(numpy.prod(shape)) * numpy.dtype(dtype).itemsize
    memory = numpy.random.default_rng(0).integers(0, 256, size + 32, numpy.uint8)
    first = -memory.ctypes.data % 16 + begins
    return memory[first : first + size].view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype, shape, begins, width", [
    (BFLOAT16, (5, 3, 8), 0, 16),
    (BFLOAT16, (5, 3, 12), 0, 8),
    (BFLOAT16, (5, 3, 6), 0, 4),
    (BFLOAT16, (5, 3, 7), 0, 2),
    (BFLOAT16, (5, 3, 8), 8, 8),
    (BFLOAT16, (5, 3, 8), 4, 4),
    (BFLOAT16, (5, 3, 8), 2, 2),
    (BFLOAT16, (5, 3, 0), 0, 2),
    (BFLOAT16, (0, 3, 8), 0, 2),
    (numpy.float16, (1, 1, 8), 0, 16),
    (numpy.float32, (5, 3, 4), 0, 16),
    (numpy.float32, (5, 3, 1), 0, 4),
    (numpy.float64, (5, 3, 2), 0, 16),
    (numpy.float64, (5, 3, 3), 0, 8),
    (numpy.float32, (), 0, 4),
])  # fmt: skip
def test_elements_are_as_wide_as_rows_allow(dtype, shape, begins, width):
    """Their bits arrive, NaNs and all, with the rows of one of the two in another order."""
    of = bytes_of(shape, dtype, begins)
    to = numpy.zeros_like(of)
    wide = bits.widest(to, of)
    assert [x.dtype.itemsize for x in wide] == [width] * 2
    assert all(numpy.shares_memory(x, y) or not y.size for x, y in zip(wide, (to, of)))
    bits.copy(to, of)
    assert to.tobytes() == of.tobytes()
    if of.ndim and of.size:
        turned = numpy.zeros_like(of.swapaxes(0, 1), order="C")
        bits.copy(turned.swapaxes(0, 1), of)
        assert turned.tobytes() == of.swapaxes(0, 1).tobytes()


def test_strides_decide_as_well():
    x = bytes_of((4, 6, 20), BFLOAT16)
    assert bits.widest(x[..., :16])[0].dtype.itemsize == 8  # rows are 40 bytes apart
    assert bits.widest(x[:, :1, :16])[0].dtype.itemsize == 16  # 240 bytes: of one row alone its distance says nothing
    assert bits.widest(x[:, ::2, :16])[0].dtype.itemsize == 16
    assert bits.widest(x[..., ::2])[0].dtype.itemsize == 2
    assert bits.widest(x[::-1, -2::-2, :16])[0].dtype.itemsize == 16
    assert bits.widest(x.swapaxes(1, 2))[0].dtype.itemsize == 2
    assert bits.widest(numpy.broadcast_to(x[:1, :1, :16], (4, 6, 16)))[0].dtype.itemsize == 16
    assert bits.widest(numpy.broadcast_to(x[..., :1], (4, 6, 16)))[0].dtype.itemsize == 2
    narrow = bytes_of((4, 6, 16), BFLOAT16, 8)
    assert [y.dtype.itemsize for y in bits.widest(bytes_of((4, 6, 16), BFLOAT16), narrow)] == [8, 8]


def test_what_has_no_gaps_is_not_copied():
    x = bytes_of((4, 6, 16), BFLOAT16)
    assert bits.dense(x) is x
    made = bits.dense(x[:, ::2])
    assert made.flags.c_contiguous and made.tobytes() == x[:, ::2].tobytes()


def test_other_shapes_and_dtypes_are_no_copies():
    x = numpy.zeros((2, 8), numpy.float32)
    for other in (x.view(numpy.int32), x[:1]):
        with pytest.raises(AssertionError):
            bits.copy(x, other)


def test_a_view_of_cupy_is_one_of_the_same_bits():
    """No copy, whatever is between its rows: as on a device, of memory that nothing reads."""
    cupy = pytest.importorskip("cupy")
    host = numpy.zeros(4096 + 16, numpy.uint8)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, device_id=0)
    x = cupy.ndarray((4, 8, 16), BFLOAT16, memptr=cupy.cuda.MemoryPointer(memory, -host.ctypes.data % 16))
    for part, width in ((x.swapaxes(0, 1)[2:5], 16), (x[..., 8:], 16), (x[..., 4:], 8), (x[..., 1:], 2), (x[:0], 2)):
        [wide] = bits.widest(part)
        assert (wide.dtype.itemsize, wide.data.ptr) == (width, part.data.ptr)
        assert wide.shape == (*part.shape[:-1], part.shape[-1] * 2 // width)
        assert wide.dtype != BFLOAT16


def test_a_device_moves_16_bytes_at_once():
    """As NVRTC compiles what a lane does with an element of CuPy's arrays; of complex numbers alone it makes two loads."""
    cupy = pytest.importorskip("cupy")
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    folder = Path(cupy.__file__).parent / "_core/include"
    folders = [folder, *(folder / "cupy/_cccl" / name for name in ("libcudacxx", "cub", "thrust"))]

    def accesses(operation):
        source = f"""
            #include <cupy/complex.cuh>
            #include <cupy/carray.cuh>
            typedef CArray<complex<double>, 3, 0, 1> Array;
            extern "C" __global__ void copy(const Array from, Array into, CIndexer<3, 1> index) {{
              index.set(blockIdx.x);
              const complex<double>& x = from[index.get()];
              complex<double>& y = into[index.get()];
              {operation}
            }}"""
        program = nvrtc.createProgram(source, "copy.cu", (), ())
        nvrtc.compileProgram(program, ["--std=c++17", "-arch=sm_90", *(f"-I{folder}" for folder in folders)])
        return re.findall(r"(?:ld|st)\.global\.(\S+)", nvrtc.getPTX(program).decode())

    assert accesses("y = x;") == ["f64"] * 4
    found = accesses(bits.MOVE)
    assert len(found) == 2 and {*found} <= {"v4.u32", "v2.u64"}


def test_a_copy_on_a_device_is_that_kernel(monkeypatch):
    """Where elements are of 16 bytes."""
    cupy = pytest.importorskip("cupy")
    host = numpy.zeros(4096 + 16, numpy.uint8)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, device_id=0)
    x = cupy.ndarray((2, 8, 16), BFLOAT16, memptr=cupy.cuda.MemoryPointer(memory, -host.ctypes.data % 16))
    given = []
    monkeypatch.setattr(bits, "_copying", lambda: lambda of, to: given.append((of, to)))
    bits.copy(x[0], x[1])
    [(of, to)] = given
    assert (of.data.ptr, to.data.ptr) == (x[1].data.ptr, x[0].data.ptr)
    assert of.shape == to.shape == (8, 2)
    assert of.dtype == to.dtype == "complex128"


@pytest.fixture
def widths(monkeypatch):
    """How wide the elements are of what has dims, of each copy."""
    found, widest = [], bits.widest

    def seen(*arrays):
        views = widest(*arrays)
        if arrays[0].size and arrays[0].shape[-1] > 1:
            found.append(views[0].dtype.itemsize)
        return views

    monkeypatch.setattr(bits, "widest", seen)
    return found


@pytest.mark.parametrize("scheme", ["ulysses", "all_gather", "ring"])
@pytest.mark.parametrize("dim, width", [(16, 16), (12, 8), (7, 2)])
def test_what_ranks_send_is_copied_in_wide_elements(scheme, dim, width, widths):
    """Down to the last copy. In a ring, and where all keys go to all, keys are all there is to be copied."""
    case = replace(CASE, dim=dim, dtype="float16")
    check(case, run(case, 2, scheme, "zigzag"))
    assert len(widths) >= 4 and {*widths} <= {width, 16}  # float32 has twice the width
    assert width in widths
