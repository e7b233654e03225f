"""Tensor maps: which arrays have one, that a map reaches the elements of its array, and what the driver is asked for."""

import ctypes
import re
import subprocess
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.machine import driver_map, toolchain
from cupy_flash.machine.driver_map import DriverMap
from cupy_flash.plan.tensor_map import BOX_COLUMNS, MAP_BYTES, TENSOR_MAP, TensorMap, obstacle, tensor_maps
from cupy_flash.problem import arrays


def full(x):
    """The array with a heads axis at least."""
    return x if x.ndim > 2 else x[None]


def why_not(x, **changes):
    layout = replace(arrays.layout(full(x)), alignment=16)
    return obstacle(full(x).shape[:-3], {"k": replace(layout, **changes)}, ["k"])


def map_of(x, box_rows=64):
    x = full(x)
    [found] = tensor_maps(x.shape[:-3], {"k": arrays.layout(x)}, {"k": box_rows}).values()
    return found


def zeros(*shape):
    return numpy.zeros(shape, numpy.float16)


# Which arrays have a map


@pytest.mark.parametrize(
    "x",
    [
        zeros(2, 3, 50, 64),
        zeros(50, 40),
        zeros(2, 50, 3, 40).swapaxes(1, 2),  # (batch, seq, heads, dim) in memory
        zeros(50, 3, 40).swapaxes(0, 1),
        zeros(3, 50, 72)[..., :41],  # 144 bytes a row
        zeros(3, 50, 64)[:, ::3],
        numpy.broadcast_to(zeros(1, 3, 50, 64), (5, 3, 50, 64)),
        numpy.broadcast_to(zeros(3, 1, 64), (3, 50, 64)),
        zeros(5, 2, 3, 50, 64)[::2, :, 1:],  # two batch axes that do not merge
        zeros(1, 1, 33),  # strides of an axis of size 1 say nothing
        zeros(1, 64, 1).swapaxes(-1, -2)[:, :, :1],
    ],
    ids=lambda x: f"{x.shape} {x.strides}",
)
def test_arrays_that_have_a_map(x):
    assert why_not(x) == ""


@pytest.mark.parametrize(
    "x, why",
    [
        (zeros(3, 50, 12), "rows of k start 24 bytes apart, not a multiple of 16"),
        (zeros(50, 33), "rows of k start 66 bytes apart, not a multiple of 16"),
        (zeros(3, 50 * 40 + 4)[:, : 50 * 40].reshape(3, 50, 40), "heads of k start 4008 bytes apart, not a multiple of 16"),
        (zeros(3, 50, 64)[:, ::-1], "rows of k start -128 bytes apart, backwards"),
        (zeros(4, 3, 50, 64)[::-1], "batch elements of k start -19200 bytes apart, backwards"),
        (zeros(3, 50, 64)[..., ::2], "elements of k start 4 bytes apart, not 2"),
        (zeros(3, 64, 50).swapaxes(1, 2), "elements of k start 100 bytes apart, not 2"),
        (numpy.broadcast_to(zeros(3, 50, 1), (3, 50, 64)), "elements of k start 0 bytes apart, not 2"),
        (zeros(2, 5, 6, 3, 50, 64)[:, ::2, ::2], "3 batch axes are left after merging, more than 2"),
        (zeros(3, 0, 64), "k has no elements"),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.shape} {x.strides}",
)
def test_what_keeps_an_array_from_having_one(x, why):
    assert why_not(x) == why


@pytest.mark.parametrize("alignment", [2, 8])
def test_an_address_off_16_bytes(alignment):
    assert why_not(zeros(3, 50, 64), alignment=alignment) == f"k starts at a multiple of {alignment} bytes only, not of 16"


@pytest.mark.parametrize(
    "shape, strides, why",
    [
        ((3, 50, 64), (1 << 39, 64, 1), f"heads of k start {1 << 40} bytes apart, not below {1 << 40}"),
        ((3, 50, 64), ((1 << 39) - 8, 64, 1), ""),
        ((1 << 32, 1, 64), (64, 64, 1), f"k has {1 << 32} heads, expected fewer than {1 << 32}"),
        (((1 << 32) - 1, 1, 64), (64, 64, 1), ""),
    ],
)
def test_sizes_and_strides_that_a_map_does_not_hold(shape, strides, why):
    assert why_not(zeros(3, 50, 64), shape=shape, strides=strides) == why


def test_an_axis_merges_only_where_every_array_allows_it():
    dense = arrays.layout(zeros(2, 3, 4, 3, 50, 64))
    shared = arrays.layout(numpy.broadcast_to(zeros(1, 3, 1, 3, 50, 64), (2, 3, 4, 3, 50, 64)))
    assert obstacle((2, 3, 4), {"q": dense}, ["q"]) == ""
    assert obstacle((2, 3, 4), {"q": dense, "lse": shared}, ["q"]) == "3 batch axes are left after merging, more than 2"


# What a map says


@st.composite
def views(draw):
    """A view of five axes, or fewer: axes before the last in any order, sliced, reversed, broadcast."""
    shape = (*draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)), draw(st.integers(1, 5)), draw(st.integers(1, 20)))
    order = [*draw(st.permutations(range(len(shape) - 1))), len(shape) - 1]
    room = [*(size + draw(st.integers(0, 1)) for size in shape[:-1]), draw(st.integers(shape[-1], 24))]
    whole = numpy.arange(numpy.prod(room)).astype(numpy.int16).view(numpy.float16)
    x = whole.reshape([room[axis] for axis in order]).transpose(numpy.argsort(order))[(..., *map(slice, shape))]
    for axis in range(len(shape) - 1):
        change = draw(st.sampled_from(("none", "none", "none", "none", "reverse", "broadcast")))
        if change == "reverse":
            x = numpy.flip(x, axis)
        elif change == "broadcast":
            x = numpy.broadcast_to(x.take([0], axis), shape)
    return x


@given(views())
def test_a_map_reaches_the_elements_of_its_array_or_there_is_none(x):
    steps = [stride for size, stride in zip(x.shape[:-1], x.strides) if size > 1]
    if why_not(x):
        # The last reason is that batch axes do not merge, which test_params.py looks into.
        assert x.strides[-1] != 2 or any(step < 0 or step % 16 for step in steps) or sum(n > 1 for n in x.shape[:-3]) > 2
        return
    clear = map_of(x).in_the_clear()
    sizes, strides = clear["size"].tolist(), clear["stride"].tolist()
    assert all(step >= 0 and step % 16 == 0 for step in strides)
    seen = numpy.lib.stride_tricks.as_strided(x, sizes[::-1], [*strides[::-1], x.itemsize])
    numpy.testing.assert_array_equal(seen.ravel().view("i2"), x.ravel().view("i2"))


def test_numbers_of_a_map():
    """Each differs from the others, so that none can take another's place."""
    x = zeros(9, 7, 50, 5, 72)[::2, :, :, :3].swapaxes(2, 3)[..., :40]
    found = map_of(x, 80)
    row, batch = 5 * 72 * 2, 50 * 5 * 72 * 2
    assert found == TensorMap("float16", (40, 50, 3, 7, 5), (row, 144, batch, 14 * batch), 80)
    clear = found.in_the_clear()
    assert (clear.dtype, clear.nbytes) == (TENSOR_MAP, MAP_BYTES)
    numbers = [*clear["stride"].tolist(), *clear["size"].tolist(), int(clear["box_rows"]), int(clear["box_cols"])]
    assert [*numbers, int(clear["box_heads"])] == [row, 144, batch, 14 * batch, 40, 50, 3, 7, 5, 80, BOX_COLUMNS, 1]
    # Byte for byte what the kernels read: an address, 4 strides, 5 sizes, rows, columns and heads of a box, nothing.
    words = numpy.frombuffer(clear.tobytes(), "i8")
    assert words[:5].tolist() == [0, row, 144, batch, 14 * batch]
    assert words[5:].view("i4").tolist() == [40, 50, 3, 7, 5, 80, BOX_COLUMNS, 1] + [0] * 14


# The driver, in whose place a program stands that remembers what it was told

DRIVER = """
#include <cstdint>
#include <cstring>
#include <initializer_list>
extern "C" {
uint64_t told[64];
int calls, status;
int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  ++calls;
  int n = 0;
  told[n++] = type;
  told[n++] = rank;
  for (uint32_t i = 0; i < rank; ++i) told[n++] = sizes[i];
  for (uint32_t i = 0; i + 1 < rank; ++i) told[n++] = strides[i];
  for (uint32_t i = 0; i < rank; ++i) told[n++] = box[i];
  for (uint32_t i = 0; i < rank; ++i) told[n++] = steps[i];
  for (int enumerated : {interleave, swizzle, promotion, fill}) told[n++] = enumerated;
  std::memset(map, 0xAB, 128);
  map[0] = (uint64_t)address;
  return status;
}
int cuTensorMapReplaceAddress(uint64_t* map, void* address) {
  ++calls;
  map[0] = (uint64_t)address;
  return status;
}
}
"""
DESCRIBED = TensorMap("bfloat16", (40, 50, 3, 7, 5), (720, 144, 36000, 504000), 80)


@pytest.fixture(scope="module")
def driver_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    command = [*toolchain.compiler(), "-std=c++17", "-shared", "-fPIC", "driver.cpp", "-o", "driver.so"]
    subprocess.run(command, check=True, cwd=folder)
    return str(folder / "driver.so")


@pytest.fixture
def use_driver(monkeypatch):
    """A function that names the library to load in the driver's place; the one loaded is forgotten before the test and after."""

    def use(file):
        monkeypatch.setattr(driver_map, "DRIVER", file)
        driver_map._driver.cache_clear()

    yield use
    driver_map._driver.cache_clear()


@pytest.fixture
def driver(driver_file, use_driver):
    use_driver(driver_file)
    library = ctypes.CDLL(driver_file)
    library.number = lambda name: ctypes.c_int.in_dll(library, name)
    library.number("calls").value = library.number("status").value = 0
    return library


@pytest.fixture
def memory():
    """Words of which the first is at a multiple of 64 bytes."""
    words = numpy.zeros(32, numpy.uint64)
    return words[-(words.ctypes.data // 8) % 8 :]


def test_the_driver_is_told_of_the_whole_map(driver, memory):
    DriverMap("k", DESCRIBED, memory.ctypes.data).point_to(0x7000_0000_1230)
    told = (ctypes.c_uint64 * 64).in_dll(driver, "told")
    bfloat16, none, swizzle_128b, promotion_256b, zeros = 9, 0, 3, 3, 0  # of the enumerations in cuda.h
    options = [none, swizzle_128b, promotion_256b, zeros]
    boxes, steps = [64, 80, 1, 1, 1], [1] * 5
    assert told[:25] == [bfloat16, 5, *DESCRIBED.sizes, *DESCRIBED.strides, *boxes, *steps, *options]
    assert memory[0] == 0x7000_0000_1230 and (memory[1:16] == 0xABABABABABABABAB).all() and not memory[16:].any()


@pytest.mark.parametrize("dtype, number, columns", [("float16", 6, 64), ("float32", 7, 32)])
def test_other_types_have_boxes_of_as_many_bytes(dtype, number, columns, driver, memory):
    described = replace(DESCRIBED, dtype=dtype)
    DriverMap("k", described, memory.ctypes.data).point_to(1 << 20)
    told = (ctypes.c_uint64 * 64).in_dll(driver, "told")
    assert (told[0], told[11]) == (number, columns)  # behind the rank, five sizes and four strides
    assert described.in_the_clear()["box_cols"] == columns


def test_only_an_address_that_has_changed_is_replaced(driver, memory):
    found = DriverMap("k", DESCRIBED, memory.ctypes.data)
    calls = driver.number("calls")
    for address, so_far in ((1 << 20, 1), (1 << 20, 1), (1 << 21, 2), (1 << 21, 2), (1 << 20, 3)):
        found.point_to(address)
        assert (calls.value, memory[0]) == (so_far, address)
    assert (memory[1:16] == 0xABABABABABABABAB).all()  # what the driver made of the rest stays


def test_a_refusal_of_the_driver_names_array_and_status(driver, memory):
    found = DriverMap("k", DESCRIBED, memory.ctypes.data)
    status = driver.number("status")
    status.value = 1
    with pytest.raises(RuntimeError, match=r"k: cuTensorMapEncodeTiled refused TensorMap\(.*\) at 0x100000 with CUDA error 1"):
        found.point_to(1 << 20)
    status.value = 0
    found.point_to(1 << 20)
    status.value = 400
    with pytest.raises(RuntimeError, match="k: cuTensorMapReplaceAddress refused 0x200000 with CUDA error 400"):
        found.point_to(1 << 21)
    status.value = 0
    found.point_to(1 << 20)  # whatever the refusal has left behind
    assert memory[0] == 1 << 20


@pytest.mark.parametrize("library", ["no_such_driver.so", None])
def test_a_driver_without_tensor_maps_is_named(library, use_driver, memory):
    use_driver(library)  # None is this process, which has no such function
    with pytest.raises(RuntimeError, match=re.escape("tensor maps need a CUDA driver of version 12.0 or newer")):
        DriverMap("k", DESCRIBED, memory.ctypes.data)


def test_a_map_off_64_bytes_is_refused(driver, memory):
    with pytest.raises(ValueError, match="place: expected an address divisible by 64"):
        DriverMap("k", DESCRIBED, memory.ctypes.data + 16)
