"""What merges and adds up parts on a device, an element or four in a lane: executed on a CPU, and compiled for a GPU."""

import ctypes
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy
import pytest
from thinned import thinned

from cupy_flash.distributed import on_device
from cupy_flash.machine import toolchain

BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
NAMES = ("a", "b", "c")
ROWS, DIM = 37, 12
# What CuPy and CUDA have, as far as these texts ask for it.
CUDA = """
#include <cmath>
#include <cstring>
using std::isinf; using std::isnan; using std::max;
typedef unsigned short uint16; typedef float float32; typedef unsigned long long uint64; typedef _Complex double complex128;
static float __uint_as_float(unsigned int x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned int __float_as_uint(float x) { unsigned int y; memcpy(&y, &x, 4); return y; }
"""


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """A stand-in for `ElementwiseKernel`: executes its text on NumPy arrays, element after element."""
    made = []

    def kernel(inputs, outs, text, name, preamble=""):
        declared = [line.split() for line in f"{inputs}, {outs}".split(", ")]
        count = len(outs.split(", "))
        arguments = ", ".join(f"{kind}* {own}_all" for kind, own in declared)
        own = "".join(f"{kind}& {own} = {own}_all[n];\n" for kind, own in declared)
        preamble = preamble.replace("#include <cupy/float16.cuh>", "")
        loop = f"for (long n = 0; n < all; ++n) {{ {own}{text}; }}"
        source = f'{CUDA}{preamble}\nextern "C" void run(long all, {arguments}) {{ {loop} }}'
        file, library = tmp_path / f"{len(made)}.cpp", tmp_path / f"{len(made)}.so"
        file.write_text(source)
        flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        subprocess.run([*toolchain.compiler(), *flags, str(file), "-o", str(library)], check=True)
        run = ctypes.CDLL(str(library)).run
        made.append(name)

        def launch(*arrays):
            shape, results = arrays[-1].shape, arrays[-count:]
            given = [numpy.ascontiguousarray(numpy.broadcast_to(x, shape)) for x in arrays[:-count]]
            room = [numpy.empty(shape, x.dtype) for x in results]
            run(ctypes.c_long(arrays[-1].size), *(ctypes.c_void_p(x.ctypes.data) for x in (*given, *room)))
            for result, x in zip(results, room):
                result[...] = x

        return launch

    cupy = type("cupy", (), {"ElementwiseKernel": staticmethod(kernel)})
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    monkeypatch.setattr(on_device, "raw", lambda x: x.view("uint16") if x.dtype == BFLOAT16 else x)
    caches = on_device._merging, on_device._adding, on_device._of_lse
    for cache in caches:
        cache.cache_clear()
    yield made
    for cache in caches:
        cache.cache_clear()


def parts_of(count, dtypes, dim=DIM):
    """Results and log-sum-exps, of which some saw nothing and hold what nobody may read."""
    rng = numpy.random.default_rng(0)
    outs = [rng.standard_normal((2, ROWS, dim), numpy.float32).astype(dtype) for dtype in dtypes]
    lses = [rng.standard_normal((2, ROWS), numpy.float32) * 4 for _ in range(count)]
    for i, (out, lse) in enumerate(zip(outs, lses)):
        lse[:, i::5], lse[:, :2] = -numpy.inf, -numpy.inf
        out[lse == -numpy.inf] = numpy.nan
    return outs, lses


def wanted(outs, lses):
    """Merged in float64."""
    with numpy.errstate(all="ignore"):
        top = numpy.logaddexp.reduce([x.astype(numpy.float64) for x in lses])
        shares = [numpy.where(x == -numpy.inf, 0, numpy.exp(x - top)) for x in lses]
    return sum(numpy.where(s[..., None] == 0, 0, s[..., None] * x.astype(numpy.float64)) for s, x in zip(shares, outs)), top


@pytest.mark.parametrize("dtypes, into", [
    ((numpy.float32,), BFLOAT16), ((BFLOAT16, numpy.float32), numpy.float32), ((numpy.float32,) * 3, BFLOAT16),
])  # fmt: skip
@pytest.mark.parametrize("begins", thinned([0, 1]), ids=["four", "one"])
def test_parts_are_merged(begins, dtypes, into, executed):
    """To a rounding of the result, beside those of float32: three weights, each exp of a number that is right to 2**-24 of 20."""
    outs, lses = parts_of(len(dtypes), dtypes)
    exact, top = wanted(outs, lses)
    base, lse = (outs[0], lses[0].copy()) if len(dtypes) > 1 else (None, lses[0].copy())
    parts = list(zip(outs, lses))[len(dtypes) > 1 :]
    memory = numpy.empty(exact.size + 9, into)
    first = -memory.ctypes.data % 16 // memory.itemsize + begins  # another element further, no four of them begin there
    found = memory[first : first + exact.size].reshape(exact.shape)
    on_device.merge(found, base, lse, parts)
    assert executed[0].endswith("_four") == (not begins)
    unit = 2.0**-8 if into == BFLOAT16 else 2.0**-24
    largest = max(numpy.nanmax(abs(x.astype(numpy.float32))) for x in outs)
    assert (abs(found.astype(numpy.float64) - exact) <= unit * abs(exact) + 64 * 2.0**-24 * largest).all()
    if base is not None:
        seen = top > -numpy.inf
        assert (lse[~seen] == -numpy.inf).all()
        assert (abs(lse[seen] - top[seen]) <= 32 * 2.0**-24 * 20).all()


@pytest.mark.parametrize("into", [numpy.float32, BFLOAT16])
@pytest.mark.parametrize("dims, names", [((DIM, DIM), ["added_2_float32_float32_float32_float32_{0}_{0}_four"]),
                                         ((DIM, 8), ["added_1_float32_float32_{0}_four"]),
                                         ((6, 6), ["added_2_float32_float32_float32_float32_{0}_{0}"])])  # fmt: skip
def test_parts_are_added_up(dims, names, into, executed):
    """Two sums in one pass if they are of one shape. Of integers there is nothing to be rounded."""
    rng = numpy.random.default_rng(0)
    parts = [[rng.integers(-40, 40, (2, ROWS, dim)).astype(numpy.float32) for dim in dims] for _ in range(2)]
    founds = [numpy.empty((2, ROWS, dim), into) for dim in dims]
    on_device.add(founds, [None, None], parts)
    assert executed == [f"cupy_flash_{name}".format(numpy.dtype(into).name) for name in names]
    for found, a, b in zip(founds, *parts):
        assert (found.astype(numpy.float32) == a + b).all()


def test_four_in_a_lane_are_the_bits_of_one(executed):
    outs, lses = parts_of(2, (numpy.float32, numpy.float32))
    found = [numpy.empty((2, ROWS, DIM), BFLOAT16) for _ in range(2)]
    on_device.merge(found[0], None, lses[0].copy(), list(zip(outs, lses)))
    odd = [numpy.empty((2, ROWS, DIM + 1), numpy.float32)[..., 1:] for _ in outs]
    for x, out in zip(odd, outs):
        x[...] = out
    on_device.merge(found[1], None, lses[0].copy(), list(zip(odd, lses)))
    assert [name.endswith("_four") for name in executed if "merged" in name] == [True, False]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("dtype, into", [("float32", "bfloat16"), ("float32", "float16"), ("float16", "float16"), ("float32",) * 2])
def test_a_device_loads_four_at_once(dtype, into):
    """As NVRTC compiles it: a load for each part, one store, and one exponential for each weight of all four."""
    cupy = pytest.importorskip("cupy")
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    folder = Path(cupy.__file__).parent / "_core/include"
    folders = [folder, *(folder / "cupy/_cccl" / name for name in ("libcudacxx", "cub", "thrust"))]
    folders.append(Path(pytest.importorskip("nvidia.cuda_runtime").__path__[0]) / "include")
    kinds = {"complex128": "complex<double>", "uint64": "unsigned long long"}
    given, made = (kinds[on_device.FOUR[own]] for own in (dtype, into))
    text = on_device.in_fours({"a": dtype, "b": dtype}, {"out": into}, on_device.merged(("a", "b"), (dtype, dtype), into))
    source = f"""
        #include <cupy/complex.cuh>
        #include <cupy/carray.cuh>
        {on_device.PREAMBLE}
        extern "C" __global__ void merge(const CArray<{given}, 3, 0, 1> as, const CArray<{given}, 3, 0, 1> bs,
                                         CArray<{made}, 3, 0, 1> outs, float lse_a, float lse_b, CIndexer<3, 1> index) {{
          index.set(blockIdx.x);
          const {given}& a = as[index.get()];
          const {given}& b = bs[index.get()];
          {made}& out = outs[index.get()];
          {text}
        }}"""
    program = nvrtc.createProgram(source, "merge.cu", (), ())
    nvrtc.compileProgram(program, ["--std=c++17", "-arch=sm_90", *(f"-I{own}" for own in folders)])
    ptx = nvrtc.getPTX(program).decode()
    sizes = {"v4.f32": 16, "v4.u32": 16, "v2.u64": 16, "v2.f32": 8, "v2.u32": 8, "u64": 8, "v4.u16": 8}
    loads, stores = ([sizes[kind] for kind in re.findall(rf"{op}\.global\.(\S+)", ptx)] for op in ("ld", "st"))
    bytes_of_four = {"float32": 16, "float16": 8, "bfloat16": 8}
    assert (loads, stores) == ([bytes_of_four[dtype]] * 2, [bytes_of_four[into]])
    assert ptx.count("ex2.approx") == 2


def test_rows_decide_how_many_are_in_a_lane():
    """Of all arrays together, and of one row as of many."""
    x = numpy.zeros((4, 24), numpy.float32)
    assert x.ctypes.data % 16 == 0
    for given, four in (
        ([x, x.astype(BFLOAT16)], True),
        ([x[:1, :6]], False),
        ([x, x[:, 1:]], False),
        ([x[:, ::2]], False),
        ([x[:0]], False),
    ):
        assert on_device._elements(given)[1] == four
