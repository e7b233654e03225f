"""Partial results that are merged: in array code, and by the text of what a device runs, compiled as C++ here."""

import ctypes
import math
import subprocess

import ml_dtypes
import numpy
import pytest

from cupy_flash import attention, merge_states
from cupy_flash.distributed import on_device
from cupy_flash.distributed.rows import Partial
from cupy_flash.machine.toolchain import compiler

PROGRAM = """
#include <cmath>
#include <cstring>
using std::max; using std::isinf;
static float __uint_as_float(unsigned int bits) {{ float x; std::memcpy(&x, &bits, 4); return x; }}
extern "C" void run(int rows, int dim, const float* olds, const float* as, const float* bs, const {kind}* a_, const {kind}* b_,
                    float* lses, float* sums) {{
  for (int i = 0; i < rows; ++i) {{
    const float old = olds[i], a = as[i], b = bs[i];
    float lse, keep, share_a, share_b;
    {{ {weights} }}
    lses[i] = lse;
    for (int j = 0; j < dim; ++j) {{
      const {kind} a = a_[i * dim + j], b = b_[i * dim + j];
      float& sum = sums[i * dim + j];
      {sum};
    }}
  }}
}}
extern "C" void gradients(int elements, const {kind}* a_, const {kind}* b_, float* sums) {{
  for (int i = 0; i < elements; ++i) {{
    const {kind} a = a_[i], b = b_[i];
    float& sum = sums[i];
    {one};
    {two};
  }}
}}
"""


def built(dtype, folder):
    """The loops around the texts of `on_device`, as CuPy makes them around an element."""
    kind = {"bfloat16": "unsigned short", "float32": "float"}[dtype]
    convert = {name: on_device.AS_FLOAT.get(dtype, "(float){name}").format(name=name) for name in "ab"}
    texts = {"one": on_device.GRADIENT[1].format(**convert), "two": on_device.GRADIENT[2].format(**convert)}
    text = PROGRAM.format(kind=kind, weights=on_device.WEIGHTS, sum=on_device.SUM.format(**convert), **texts)
    (folder / "sums.cpp").write_text(text)
    library = folder / f"sums-{dtype}.so"
    subprocess.run([*compiler(), "-shared", "-fPIC", "-O1", "-o", library, folder / "sums.cpp"], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_text_for_devices_merges_as_array_code_does(dtype, tmp_path):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else numpy.float32
    rng = numpy.random.default_rng(0)
    olds, ones, twos = rng.uniform(-30, 30, (3, 40)).astype(numpy.float32)
    ends = [-numpy.inf, 0.0]
    for i in range(8):  # every one of the three may have seen nothing
        olds[i], ones[i], twos[i] = ends[i & 1], ends[i >> 1 & 1], ends[i >> 2]
    old = rng.standard_normal((40, 8)).astype(numpy.float32)
    a, b = rng.standard_normal((2, 40, 8)).astype(kind)
    for lse, x in ((olds, old), (ones, a), (twos, b)):
        x[numpy.isneginf(lse)] = numpy.nan  # is left out, whatever it holds
    partial = Partial(numpy.empty((40, 8), numpy.float32), numpy.empty(40, numpy.float32))
    partial.out[...], partial.lse[...] = old, olds
    partial.add((0, 40), a, ones)
    partial.add((0, 40), b, twos)
    found, lses = old.copy(), numpy.empty(40, numpy.float32)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (olds, ones, twos, a, b, lses, found)]
    library = built(dtype, tmp_path)
    library.run(40, 8, *pointers)
    # Each rounds a few times, of terms that are no larger than the largest of what is merged.
    numpy.testing.assert_allclose(found, partial.out, rtol=0, atol=16 * 2.0**-24 * 4)
    numpy.testing.assert_allclose(lses, partial.lse, rtol=4 * 2.0**-24, atol=0)
    assert (found[0] == 0).all()
    assert lses[0] == -numpy.inf
    a, b, total = (x[8:].copy() for x in (a, b, old))
    wanted = total + a.astype("f4") + a.astype("f4") + b.astype("f4")
    library.gradients(a.size, *[ctypes.c_void_p(x.ctypes.data) for x in (a, b, total)])
    assert numpy.array_equal(total, wanted)


def test_partial_results_merge_as_merge_states_does():
    q, k, v = numpy.random.default_rng(0).standard_normal((3, 2, 50, 8), dtype=numpy.float32)
    states = [attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(20), slice(20, 21), slice(21, 50))]
    partial = Partial(numpy.empty_like(q), numpy.empty(q.shape[:-1], numpy.float32))
    for out, lse in states:
        partial.add((0, 50), out, lse)
    out, lse = merge_states(*states)
    numpy.testing.assert_allclose(partial.out, out, atol=8 * 2.0**-24 * abs(v).max())
    numpy.testing.assert_allclose(partial.lse, lse, atol=8 * 2.0**-24 * abs(lse).max())


def test_sinks_take_their_share():
    partial = Partial(numpy.empty((2, 3, 4), numpy.float32), numpy.empty((2, 3), numpy.float32))
    partial.add((0, 2), numpy.ones((2, 2, 4), numpy.float32), numpy.zeros((2, 2), numpy.float32))
    partial.add_sinks(numpy.array([[0, -numpy.inf], [0, -numpy.inf]], numpy.float32))
    assert partial.out[0, 0] == pytest.approx(1 / 3)
    assert partial.lse[0].tolist() == pytest.approx([math.log(3), math.log(3), math.log(2)])
    assert (partial.out[1, :2] == 1).all()
    assert (partial.out[1, 2] == 0).all()
    assert partial.lse[1].tolist() == [0, 0, -math.inf]
