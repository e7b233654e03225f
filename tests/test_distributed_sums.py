"""Partial results that are merged: in array code, and by the text of what a device runs, compiled as C++ here."""

import ctypes
import math
import subprocess

import ml_dtypes
import numpy
import pytest

from cupy_flash import attention, merge_states
from cupy_flash.distributed import on_device
from cupy_flash.distributed.growing import Results
from cupy_flash.distributed.merging import order_of
from cupy_flash.machine.toolchain import compiler

PROGRAM = """
#include <cmath>
#include <cstring>
using std::max; using std::isinf; using std::isnan;
static float __uint_as_float(unsigned int bits) {{ float x; std::memcpy(&x, &bits, 4); return x; }}
static unsigned int __float_as_uint(float x) {{ unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }}
extern "C" void merged(int rows, int dim, const float* as, const float* bs, const float* cs, const float* a_, const {kind}* b_,
                       const {kind}* c_, float* lses, {into}* outs) {{
  for (int i = 0; i < rows; ++i) {{
    const float lse_a = as[i], lse_b = bs[i], lse_c = cs[i];
    {{ float& lse = lses[i]; {weights} lse = top + logf(total); }}
    for (int j = 0; j < dim; ++j) {{
      const float a = a_[i * dim + j];
      const {kind} b = b_[i * dim + j], c = c_[i * dim + j];
      {into}& out = outs[i * dim + j];
      {merged}
    }}
  }}
}}
extern "C" void added(int elements, const {kind}* a_, const float* b_, {into}* outs) {{
  for (int i = 0; i < elements; ++i) {{
    const {kind} a = a_[i];
    const float b = b_[i];
    {into}& out = outs[i];
    {added}
  }}
}}
"""
KINDS = {"bfloat16": "unsigned short", "float32": "float"}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": numpy.float32}


def built(dtype, into, folder):
    """The loops around the texts of `on_device`, as CuPy makes them around an element."""
    names = tuple("abc")
    text = PROGRAM.format(
        kind=KINDS[dtype],
        into=KINDS[into],
        weights=on_device.weights(names),
        merged=on_device.merged(names, ("float32", dtype, dtype), into),
        added=on_device.added(names[:2], (dtype, "float32"), into),
    )
    (folder / "sums.cpp").write_text(text)
    library = folder / f"sums-{dtype}.so"
    subprocess.run([*compiler(), "-shared", "-fPIC", "-O1", "-o", library, folder / "sums.cpp"], check=True)
    return ctypes.CDLL(str(library))


def whole(parts):
    """An order in which all parts have all rows, and none is written where the result goes."""
    return order_of([(0, 40)] * parts, 40, [False] * parts, narrow=False)


@pytest.mark.parametrize("into", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_text_for_devices_merges_as_array_code_does(dtype, into, tmp_path):
    kind = DTYPES[dtype]
    rng = numpy.random.default_rng(0)
    olds, ones, twos = rng.uniform(-30, 30, (3, 40)).astype(numpy.float32)
    ends = [-numpy.inf, 0.0]
    for i in range(8):  # every one of the three may have seen nothing
        olds[i], ones[i], twos[i] = ends[i & 1], ends[i >> 1 & 1], ends[i >> 2]
    old = rng.standard_normal((40, 8)).astype(numpy.float32)
    a, b = rng.standard_normal((2, 40, 8)).astype(kind)
    for lse, x in ((olds, old), (ones, a), (twos, b)):
        x[numpy.isneginf(lse)] = numpy.nan  # is left out, whatever it holds
    results = Results(numpy.empty((40, 8), numpy.float32), numpy.empty(40, numpy.float32), whole(3), "float32")
    for part in ((old, olds), (a, ones), (b, twos)):
        results.take(part)
    found, lses = numpy.empty((40, 8), DTYPES[into]), numpy.empty(40, numpy.float32)
    library = built(dtype, into, tmp_path)
    library.merged(40, 8, *[ctypes.c_void_p(x.ctypes.data) for x in (olds, ones, twos, old, a, b, lses, found)])
    # Each rounds a few times, of terms that are no larger than the largest of what is merged.
    rounding = 2.0**-9 * 4 if into == "bfloat16" else 0
    numpy.testing.assert_allclose(found.astype("f4"), results.out, rtol=0, atol=16 * 2.0**-24 * 4 + rounding)
    numpy.testing.assert_allclose(lses, results.lse, rtol=4 * 2.0**-24, atol=0)
    assert (found[0] == 0).all()
    assert lses[0] == -numpy.inf
    a, b, total = a[8:].copy(), old[8:].copy(), numpy.empty((32, 8), DTYPES[into])
    a[0, 0], a[1, :2], b[1, :2] = numpy.nan, 1, (numpy.inf, numpy.finfo(numpy.float32).max)
    library.added(a.size, *[ctypes.c_void_p(x.ctypes.data) for x in (a, b, total)])
    wanted = (a.astype("f4") + b).astype(DTYPES[into])
    numpy.testing.assert_array_equal(total.astype("f4"), wanted.astype("f4"))


def test_partial_results_merge_as_merge_states_does():
    q, k, v = numpy.random.default_rng(0).standard_normal((3, 2, 50, 8), dtype=numpy.float32)
    states = [attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(20), slice(20, 21), slice(21, 50))]
    order = order_of([(0, 50)] * 3, 50, [True] * 3, narrow=False)
    partial = Results(numpy.empty_like(q), numpy.empty(q.shape[:-1], numpy.float32), order, "float32")
    for out, lse in states:
        for place, x in zip(partial.room(), (out, lse)):
            if place is not None:
                place[...] = x if x.ndim == place.ndim else x[..., None]
        partial.take((out, lse))
    out, lse = merge_states(*states)
    numpy.testing.assert_allclose(partial.out, out, atol=8 * 2.0**-24 * abs(v).max())
    numpy.testing.assert_allclose(partial.lse, lse, atol=8 * 2.0**-24 * abs(lse).max())


def test_a_sum_that_is_complete_becomes_the_result_in_one_pass(monkeypatch):
    """On a device as well, where no part is left to be merged with it."""
    passes = []

    def adding(names, dtypes, into, sums, four):
        return lambda *arrays: passes.append((names, [dtype.name for dtype in dtypes], into.name, sums, four, len(arrays)))

    monkeypatch.setattr(on_device, "_adding", adding)
    total, out, lse = numpy.ones((2, 4), numpy.float32), numpy.empty((2, 4), numpy.float16), numpy.zeros(2, numpy.float32)
    on_device.add([out], [total], [])
    on_device.merge(out, total, lse, [])
    assert passes == [(("a",), ["float32"], "float16", 1, True, 2)] * 2


def test_sinks_take_their_share():
    order = order_of([(0, 2)], 3, [False], narrow=False)
    partial = Results(numpy.empty((2, 3, 4), numpy.float32), numpy.empty((2, 3), numpy.float32), order, "float32")
    partial.take((numpy.ones((2, 2, 4), numpy.float32), numpy.zeros((2, 2), numpy.float32)))
    partial.add_sinks(numpy.array([[0, -numpy.inf], [0, -numpy.inf]], numpy.float32))
    assert partial.out[0, 0] == pytest.approx(1 / 3)
    assert partial.lse[0].tolist() == pytest.approx([math.log(3), math.log(3), math.log(2)])
    assert (partial.out[1, :2] == 1).all()
    assert (partial.out[1, 2] == 0).all()
    assert partial.lse[1].tolist() == [0, 0, -math.inf]
