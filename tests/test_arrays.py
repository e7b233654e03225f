"""Arrays of other libraries in and out, on a machine without a GPU.

Device arrays are CuPy arrays over memory that is never read. PyTorch and JAX are met in person where they are
installed, and otherwise by stand-ins that have just the protocol in question.
"""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy
import pytest

from cupy_flash import attention
from cupy_flash.problem import arrays
from cupy_flash.problem.layout import Layout

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def device_array(shape, dtype="float32", address=4096, device=0, strides=None):
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, device)
    return cupy.ndarray(shape, arrays.DTYPES.get(dtype, dtype), cupy.cuda.MemoryPointer(memory, 0), strides)


def foreign(library, **attributes):
    """An object whose class comes from a library of that name."""
    return type("Tensor", (), {"__module__": library, **attributes})()


def dlpack(memory):
    return {"__dlpack_device__": lambda self: (memory, 0), "__dlpack__": lambda self, **_: None}


def test_no_library_is_imported():
    program = "import sys, cupy_flash.problem.arrays; print({'cupy', 'torch', 'jax', 'numba'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


@pytest.mark.parametrize("module", [None, ModuleType("cupy")], ids=["not there", "half there"])
def test_arrays_of_numpy_need_no_cupy(monkeypatch, module):
    """The module is there and lacks its names while another thread imports it."""
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if module is not None:
        monkeypatch.setitem(sys.modules, "cupy", module)
    assert attention(*[numpy.zeros((1, 1, 2, 32), numpy.float32)] * 3).shape == (1, 1, 2, 32)


# view: NumPy and CuPy


def test_numpy_and_cupy_pass_through():
    for array in (numpy.zeros((2, 3)), device_array((2, 3))):
        assert arrays.view(array, "q") is array


def test_a_memory_map_and_an_array_without_masked_elements_become_plain(tmp_path):
    mapped = numpy.memmap(tmp_path / "elements", numpy.float32, "w+", shape=(2, 3))
    unmasked = numpy.ma.array(numpy.zeros((2, 3)), mask=numpy.zeros((2, 3), bool))
    for array in (mapped, unmasked, numpy.ma.array(numpy.zeros((2, 3)))):
        plain = arrays.view(array, "out", writable=True)
        assert type(plain) is numpy.ndarray and numpy.shares_memory(plain, array)


def test_masked_elements_are_refused():
    """They would take part like all others."""
    array = numpy.ma.array(numpy.zeros((2, 3)), mask=[[0, 0, 1], [0, 1, 0]])
    with pytest.raises(ValueError, match=r"^k: expected no masked elements, got 2, .*k\.filled\(\)"):
        arrays.view(array, "k")
    lender = foreign("other", __array__=lambda self, *_, **k: array)
    with pytest.raises(ValueError, match=r"^k: expected no masked elements, got 2"):
        arrays.view(lender, "k")


@pytest.mark.parametrize("kind", [numpy.matrix, type("Quantity", (numpy.ndarray,), {})], ids=str)
def test_subclasses_are_refused_with_the_way_out(kind):
    """A product of matrices, a unit: what a class means besides its elements would be lost without a word."""
    array = numpy.zeros((2, 3)).view(kind)
    message = rf"^q: expected a numpy\.ndarray, got its subclass {kind.__name__}, .*pass numpy\.asarray\(q\)"
    with pytest.raises(TypeError, match=message):
        arrays.view(array, "q")
    with pytest.raises(TypeError, match=message):
        arrays.view(foreign("other", __array__=lambda self, *_, **k: array), "q")
    assert arrays.view(numpy.asarray(array), "q").shape == (2, 3)


def test_subclasses_of_cupy_are_refused():
    cupy = pytest.importorskip("cupy")
    array = device_array((2, 3)).view(type("Mine", (cupy.ndarray,), {}))
    with pytest.raises(TypeError, match=r"^q: expected a cupy\.ndarray, got its subclass Mine, .*pass q\.view\(cupy\.ndarray\)"):
        arrays.view(array, "q")


def test_a_class_that_lies_about_itself_is_no_array():
    liar = type("Liar", (), {"__class__": property(lambda self: numpy.ndarray)})()
    with pytest.raises(TypeError, match=r"^q: expected a NumPy or CuPy array.*, got Liar$"):
        arrays.view(liar, "q")


def test_lazy_arrays_are_not_gathered():
    lazy = foreign("dask.array.core", __array__=lambda self, *_, **k: pytest.fail("gathered"))
    with pytest.raises(TypeError, match=r"^v: expected an array in memory, got a Dask Tensor, .*dask\.array\.map_blocks"):
        arrays.view(lazy, "v")


@pytest.mark.parametrize("value", [[[1.0, 2.0]], 1.0, None, "q", (1, 2)])
def test_what_is_no_array_is_named(value):
    hint = "; numpy.asarray makes an array of one" if isinstance(value, (list, tuple)) else ""
    with pytest.raises(TypeError, match=rf"^v: expected a NumPy or CuPy array.*, got {type(value).__name__}{hint}$"):
        arrays.view(value, "v")


def test_what_is_no_tensor_of_torch_is_named():
    with pytest.raises(TypeError, match=r"^v: expected a NumPy or CuPy array.*, got Tensor$"):
        arrays.view(foreign("torch"), "v")


def test_read_only_results_are_refused():
    array = numpy.zeros(3)
    assert arrays.view(array, "out", writable=True) is array
    array.flags.writeable = False
    assert arrays.view(array, "q") is array
    with pytest.raises(ValueError, match=r"^out: expected a writable array, got a read-only ndarray$"):
        arrays.view(array, "out", writable=True)


# view: protocols


@pytest.mark.parametrize("memory", [2, 13])
def test_device_memory_comes_by_dlpack_first(monkeypatch, memory):
    """The CUDA array interface would lose bfloat16."""
    cupy = pytest.importorskip("cupy")
    tensor, shared = foreign("other", **dlpack(memory), __cuda_array_interface__={}), device_array((2, 3), "bfloat16")
    monkeypatch.setattr(cupy, "from_dlpack", {tensor: shared}.__getitem__)
    assert arrays.view(tensor, "q") is shared


def test_cuda_array_interface_serves_what_has_no_dlpack(monkeypatch):
    cupy = pytest.importorskip("cupy")
    tensor, shared = foreign("numba.cuda", __cuda_array_interface__={}), device_array((2, 3))
    monkeypatch.setattr(cupy, "asarray", {tensor: shared}.__getitem__)
    assert arrays.view(tensor, "q") is shared


def test_cuda_array_interface_cannot_say_bfloat16(monkeypatch):
    cupy = pytest.importorskip("cupy")
    tensor, shared = foreign("other", __cuda_array_interface__={}), SimpleNamespace(dtype=numpy.dtype("V2"))
    monkeypatch.setattr(cupy, "asarray", {tensor: shared}.__getitem__)
    with pytest.raises(TypeError, match=r"^k: expected an array .* got Tensor: .*'|V2'; bfloat16 needs DLPack"):
        arrays.view(tensor, "k")


@pytest.mark.parametrize("error", [BufferError, TypeError, ValueError])
def test_a_refusing_library_is_quoted(error):
    def refuse(self):
        raise error("sparse tensors have no memory")

    tensor = foreign("other", __dlpack_device__=refuse)
    with pytest.raises(TypeError, match=r"^k: expected an array .* got Tensor: sparse tensors have no memory$"):
        arrays.view(tensor, "k")


@pytest.mark.parametrize("interface", [{}, {"shape": (2, 3)}, {"shape": 1, "data": None}, None, 7], ids=str)
def test_malformed_cuda_array_interfaces_are_named(interface):
    pytest.importorskip("cupy")
    with pytest.raises(TypeError, match=r"^q: expected an array whose memory can be shared, got Tensor: ") as caught:
        arrays.view(foreign("other", __cuda_array_interface__=interface), "q")
    assert caught.value.__context__ is None  # one traceback


class Silent(Exception):
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize("error", [KeyError, OSError, RuntimeError, Silent, ZeroDivisionError])
@pytest.mark.parametrize("protocol", ["__dlpack_device__", "__array__"])
def test_whatever_a_library_raises_is_a_refusal(protocol, error):
    def refuse(self, *_, **options):
        raise error("why")

    with pytest.raises(TypeError, match=rf"^k: expected an array .* got Tensor: {error.__name__}") as caught:
        arrays.view(foreign("other", **{protocol: refuse}), "k")
    assert caught.value.__context__ is None


def test_memory_of_other_devices_is_refused():
    with pytest.raises(TypeError, match=r"^q: .* got Tensor: DLPack device \(10, 0\) is neither CUDA nor host memory"):
        arrays.view(foreign("other", **dlpack(10)), "q")


def test_host_memory_by_dlpack_is_shared():
    source = numpy.zeros((2, 3), "float16")
    tensor = foreign(
        "other", __dlpack_device__=lambda self: (1, 0), __dlpack__=lambda self, **k: source.__dlpack__(**k)
    )
    seen = arrays.view(tensor, "out", writable=True)
    seen[1, 2] = 5
    assert source[1, 2] == 5


def test_bfloat16_in_host_memory_comes_by_array():
    """NumPy's own from_dlpack has no bfloat16."""
    source = numpy.ones((2, 3), ml_dtypes.bfloat16)

    def refuse(self, **_):
        raise BufferError("bfloat16")

    attributes = {"__dlpack_device__": lambda self: (1, 0), "__dlpack__": refuse}
    seen = arrays.view(foreign("other", **attributes, __array__=lambda self, *_, **k: source), "q")
    assert seen.dtype == ml_dtypes.bfloat16
    assert numpy.shares_memory(seen, source)
    assert source.flags.writeable
    with pytest.raises(TypeError, match=r"^q: .*: bfloat16$"):
        arrays.view(foreign("other", **attributes), "q")


def test_array_protocol_may_copy_so_takes_no_results():
    lender = foreign("other", __array__=lambda self, *_, **k: numpy.ones((2, 3)))
    assert arrays.view(lender, "q").shape == (2, 3)
    with pytest.raises(ValueError, match=r"^out: expected a writable array, got a read-only Tensor$"):
        arrays.view(lender, "out", writable=True)


def test_jax_arrays_on_a_device_are_immutable(monkeypatch):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy, "from_dlpack", lambda x: device_array((2, 3)))
    tensor = foreign("jax", **dlpack(2))
    assert arrays.view(tensor, "q").shape == (2, 3)
    with pytest.raises(ValueError, match=r"^out: expected a writable array"):
        arrays.view(tensor, "out", writable=True)


# layout, pointer, empty


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_of_numpy(dtype):
    array = numpy.zeros((2, 6, 5), arrays.DTYPES[dtype]).transpose(1, 0, 2)[::-2]
    layout = arrays.layout(array)
    assert (layout.shape, layout.strides) == ((3, 2, 5), (-10, 30, 1))
    assert (layout.dtype, layout.device, layout.itemsize) == (dtype, None, array.itemsize)
    assert arrays.pointer(array) == array.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_of_cupy(dtype):
    array = device_array((2, 6, 5), dtype, device=3).transpose(1, 0, 2)[::-2]
    assert arrays.layout(array) == Layout((3, 2, 5), (-10, 30, 1), dtype, arrays.layout(array).alignment, 3)
    assert arrays.pointer(array) == 4096 + 5 * 5 * array.itemsize  # [::-2] begins at row 5


@pytest.mark.parametrize("address, alignment", [(4096, 16), (4104, 8), (4100, 4), (4098, 2), (4099, 1), (0, 16)])
def test_alignment_of_the_address(address, alignment):
    assert arrays.layout(device_array((2, 3), address=address)).alignment == alignment


def test_equal_memory_has_one_layout_per_name():
    assert arrays.layout(device_array((2, 3)), "q") is arrays.layout(device_array((2, 3), address=8192), "q")


def test_foreign_byte_order_is_another_dtype():
    assert arrays.layout(numpy.zeros((2, 3), ">f4")).dtype == ">f4"


def test_a_type_without_size_has_a_layout():
    """What reads the dtype's name refuses it; there is nothing to divide by."""
    assert arrays.layout(numpy.zeros((2, 3), "V0")).dtype == "void"


def test_strides_between_elements_are_refused():
    packed = numpy.zeros(4, numpy.dtype([("flag", "u1"), ("value", "f4")]))["value"]
    with pytest.raises(ValueError, match=r"^v: expected strides that are multiples of 4 bytes, got \(5,\)$"):
        arrays.layout(packed, "v")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, strides", [((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (4, 8, 1)), ((3, 4), (1, 3))])
def test_empty_has_the_memory_order(dtype, shape, strides):
    layout = Layout(shape, strides, dtype, 16, None)
    array = arrays.empty(layout)
    assert layout.dense
    assert (array.dtype, arrays.layout(array)) == (arrays.DTYPES[dtype], layout)
    array[...] = 1  # within the allocation


def test_empty_on_a_device(monkeypatch):
    cupy = pytest.importorskip("cupy")
    allocated = []
    memory = cupy.cuda.UnownedMemory(4096, 1 << 20, None, 1)
    monkeypatch.setattr(cupy.cuda, "alloc", lambda n: allocated.append(n) or cupy.cuda.MemoryPointer(memory, 0))
    layout = Layout((2, 3, 4), (4, 8, 1), "bfloat16", 16, 1)
    assert arrays.layout(arrays.empty(layout)) == layout
    assert allocated == [48]


def test_empty_arrays_have_layouts():
    layout = arrays.layout(numpy.zeros((0, 3), "float32"))
    assert layout.dense and arrays.empty(layout).shape == (0, 3)


# give_back


def test_numpy_and_cupy_callers_get_the_result_itself():
    for result in (numpy.zeros(3), device_array((3,))):
        assert arrays.give_back(result, result, "q") is result


def test_an_unknown_caller_gets_the_result_itself():
    result = device_array((3,))
    assert arrays.give_back(result, foreign("rmm", __cuda_array_interface__={}), "q") is result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_callers_get_a_tensor(monkeypatch, dtype):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_dlpack=lambda array: ("tensor", array)))
    result, subclass = device_array((3,), dtype), type("Mine", (type(foreign("torch")),), {"__module__": "mine"})
    assert arrays.give_back(result, foreign("torch.nn.parameter"), "q") == ("tensor", result)
    assert arrays.give_back(result, subclass(), "q") == ("tensor", result)


def test_numba_callers_get_a_device_array(monkeypatch):
    numba = SimpleNamespace(cuda=SimpleNamespace(as_cuda_array=lambda array: ("numba", array)))
    monkeypatch.setitem(sys.modules, "numba", numba)
    result = device_array((3,))
    assert arrays.give_back(result, foreign("numba.cuda.cudadrv.devicearray"), "q") == ("numba", result)


def test_array_api_callers_get_an_array_of_their_library():
    library = SimpleNamespace(
        from_dlpack=lambda array: ("dlpack", array), asarray=lambda array, device: (device, array)
    )
    like = foreign("other", __array_namespace__=lambda self: library, device="cpu:0")
    on_device, plain, bfloat16 = device_array((3,), "bfloat16"), numpy.zeros(3), numpy.zeros(3, ml_dtypes.bfloat16)
    assert arrays.give_back(on_device, like, "q") == ("dlpack", on_device)
    assert arrays.give_back(plain, like, "q")[0] == "dlpack"
    assert arrays.give_back(bfloat16, like, "q")[0] == "cpu:0"  # NumPy does not export bfloat16 by DLPack


@pytest.mark.parametrize("module", ["torch", "numba.cuda", "jax"])
def test_a_library_that_takes_no_result_is_named(module):
    """Nobody has imported it, or what it says of itself is not so."""
    like = foreign(module, __array_namespace__=lambda self: None)
    missing = {module.partition(".")[0]: sys.modules.pop(module.partition(".")[0], None)}
    try:
        with pytest.raises(TypeError, match=r"^k: expected an array whose library takes results, got Tensor: ") as caught:
            arrays.give_back(numpy.zeros(3), like, "k")
        assert caught.value.__context__ is None
    finally:
        sys.modules.update({name: library for name, library in missing.items() if library})


# PyTorch and JAX in person, in host memory


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_round_trip_shares_memory(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)).T
    seen = arrays.view(tensor, "out", writable=True)
    assert (seen.dtype, seen.shape, seen.strides) == (arrays.DTYPES[dtype], (3, 2), (seen.itemsize, 3 * seen.itemsize))
    assert arrays.pointer(seen) == tensor.data_ptr()
    assert seen[2, 1] == 5
    back = arrays.give_back(seen, tensor, "q")
    assert torch.equal(back, tensor)
    assert (back.dtype, back.data_ptr()) == (tensor.dtype, tensor.data_ptr())


def test_torch_gradients_are_never_lost_silently():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"^q: expected a tensor that requires no gradient, .*q.detach()"):
        arrays.view(tensor, "q")
    with torch.no_grad():
        assert arrays.pointer(arrays.view(tensor, "q")) == tensor.data_ptr()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_round_trip(dtype):
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        array = jax.numpy.arange(6).reshape(2, 3).astype(dtype)
    seen = arrays.view(array, "q")
    assert (seen.dtype, seen.tolist()) == (arrays.DTYPES[dtype], [[0, 1, 2], [3, 4, 5]])
    back = arrays.give_back(numpy.asfortranarray(seen), array, "q")
    assert isinstance(back, jax.Array)
    assert (back.dtype, back.tolist(), back.device) == (array.dtype, seen.tolist(), array.device)
    with pytest.raises(ValueError, match=r"^out: expected a writable array"):
        arrays.view(array, "out", writable=True)


def test_jax_tracers_are_refused():
    jax = pytest.importorskip("jax")
    message = r"^q: expected an array whose memory can be shared, got .*Tracer: while JAX traces .*cupy_flash\.jax\.attention"
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda x: arrays.view(x, "q"))(jax.numpy.ones(3))
