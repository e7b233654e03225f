"""What XLA hands over is read where its header says that it is; frames are made by hand here, and by XLA itself."""

import ctypes
import importlib
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
frame = importlib.import_module("cupy_flash.jax.frame")
handler = importlib.import_module("cupy_flash.jax.handler")

WORD, INT = ctypes.c_uint64, ctypes.c_int32
OWN = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
TEXT = b'["q"]'


# By hand, as ctypes lays structs out


class Api(ctypes.Structure):
    _fields_ = [("size", WORD), ("extension", WORD), ("version_size", WORD), ("version_extension", WORD)]
    _fields_ += [("major", INT), ("minor", INT), ("internal", WORD), ("functions", WORD * 18)]


class List(ctypes.Structure):
    _fields_ = [("size", WORD), ("extension", WORD), ("number", WORD), ("types", WORD), ("values", WORD)]


class Attributes(ctypes.Structure):
    _fields_ = [("size", WORD), ("extension", WORD), ("number", WORD), ("types", WORD), ("names", WORD), ("values", WORD)]


class CallFrame(ctypes.Structure):
    _fields_ = [("size", WORD), ("extension", WORD), ("api", WORD), ("context", WORD), ("stage", INT)]
    _fields_ += [("args", List), ("rets", List), ("attrs", Attributes), ("future", WORD)]


class Buffer(ctypes.Structure):
    _fields_ = [("size", WORD), ("extension", WORD), ("dtype", INT), ("data", WORD), ("rank", WORD), ("dims", WORD)]


class Extension(ctypes.Structure):
    _fields_ = [("size", WORD), ("type", INT), ("next", WORD), ("metadata", WORD)]


class Metadata(ctypes.Structure):
    _fields_ = [("size", WORD), ("version_size", WORD), ("version_extension", WORD), ("major", INT), ("minor", INT)]
    _fields_ += [("traits", ctypes.c_uint32), ("behind", ctypes.c_uint32)]


def at(thing):
    return ctypes.addressof(thing)


@pytest.fixture
def xla():
    """The functions of XLA's that are called, and what they were told."""
    told = {}

    @OWN
    def error_create(address):
        told["message"] = ctypes.string_at(WORD.from_address(address + 16).value).decode()
        told["code"], told["size"] = INT.from_address(address + 24).value, WORD.from_address(address).value
        return 4321

    @OWN
    def stream_get(address):
        told["size"], told["context"] = WORD.from_address(address).value, WORD.from_address(address + 16).value
        WORD.from_address(address + 24).value = 1234
        return None

    api = Api(size=192, major=0, minor=2)
    api.functions[0], api.functions[4] = (ctypes.cast(f, ctypes.c_void_p).value for f in (error_create, stream_get))
    told["keep"] = error_create, stream_get
    return api, told


@pytest.fixture
def by_hand(xla):
    """A frame with two arguments and a result, and what it points to."""
    dims = (WORD * 3)(2, 3, 5)
    memory = np.arange(60, dtype=np.int8)
    kinds = ((16, memory.ctypes.data, 3), (1, memory.ctypes.data + 8, 0), (12, 0, 1))
    buffers = [Buffer(48, 0, dtype, data, rank, at(dims)) for dtype, data, rank in kinds]
    arguments, results = (WORD * 2)(*map(at, buffers[:2])), (WORD * 1)(at(buffers[2]))
    text = ctypes.create_string_buffer(TEXT)
    span = (WORD * 2)(at(text), len(TEXT))
    kinds_of_attributes, values = (INT * 1)(4), (WORD * 1)(at(span))
    made = CallFrame(168, 0, at(xla[0]), 77, 3)
    made.args, made.rets = List(40, 0, 2, 0, at(arguments)), List(40, 0, 1, 0, at(results))
    made.attrs = Attributes(48, 0, 1, at(kinds_of_attributes), 0, at(values))
    made.keep = dims, memory, buffers, arguments, results, text, span, kinds_of_attributes, values
    return made


def test_a_frame_is_read(by_hand, xla):
    found = frame.read(at(by_hand))
    data = by_hand.keep[1].ctypes.data
    assert found.text == TEXT and found.addresses == [data, data + 8, 0]
    shapes = [((2, 3, 5), np.dtype(ml_dtypes.bfloat16)), ((), np.dtype(bool)), ((2,), np.dtype(np.float64))]
    assert [frame.shape_of(shape) for shape in found.shapes] == shapes
    assert found.stream == 1234 and xla[1]["context"] == 77 and xla[1]["size"] == 32
    assert np.array_equal(frame.array_at(data, (2, 3), np.dtype(np.int16)), by_hand.keep[1][:12].view(np.int16).reshape(2, 3))


def test_the_same_shapes_are_the_same_key(by_hand):
    assert frame.read(at(by_hand))[2:] == frame.read(at(by_hand))[2:]
    before = frame.read(at(by_hand)).shapes
    by_hand.keep[0][2] = 6
    assert frame.read(at(by_hand)).shapes != before


@pytest.mark.parametrize("api_is_there, version", [(True, (0, 2)), (False, (0, 1))])
def test_metadata_are_written(xla, api_is_there, version):
    """XLA asks before it calls; old versions without their own functions at hand."""
    metadata = Metadata(36, 24, 0, -1, -1, 0, 99)
    extension = Extension(32, 1, 0, at(metadata))
    assert frame.read(at(CallFrame(168, at(extension), at(xla[0]) if api_is_there else 0, 0, 3))) is None
    assert (metadata.major, metadata.minor) == version
    assert metadata.traits == 1 and metadata.behind == 99


@pytest.mark.parametrize("error, code", [(ValueError, 3), (TypeError, 3), (RuntimeError, 13), (KeyboardInterrupt, 13)])
def test_what_is_wrong_is_an_error_of_xla(by_hand, xla, error, code):
    def run(found):
        raise error("q: expected é")

    assert handler.answer(run, at(by_hand)) == 4321
    assert xla[1]["message"] == f"cupy_flash: {error.__name__}: q: expected é"
    assert (xla[1]["code"], xla[1]["size"]) == (code, 28)
    assert handler.answer(lambda found: None, at(by_hand)) is None


def test_a_frame_of_another_kind_is_an_error(by_hand, xla):
    by_hand.stage = 1
    assert handler.answer(lambda found: None, at(by_hand)) == 4321
    assert "expected stage 3 and one text as attribute, got stage 1" in xla[1]["message"]


def test_layouts_are_those_of_the_header(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    fields = {"XLA_FFI_CallFrame": CallFrame, "XLA_FFI_Buffer": Buffer}
    asked = ["api", "ctx", "stage", "args", "rets", "attrs"], ["dtype", "data", "rank", "dims"]
    ours = [[16, 24, 32, 40, 80, 120], [16, 24, 32, 40]]
    lines = [f"offsetof({struct}, {field})" for struct, names in zip(fields, asked) for field in names]
    lines += ["sizeof(XLA_FFI_Extension_Base)", "offsetof(XLA_FFI_Metadata, api_version)", "offsetof(XLA_FFI_Metadata, traits)"]
    lines += [f"offsetof(XLA_FFI_Api, {name})" for name in ("api_version", "XLA_FFI_Error_Create", "XLA_FFI_Stream_Get")]
    lines += ["offsetof(XLA_FFI_Api_Version, major_version)", "XLA_FFI_DataType_BF16", "XLA_FFI_DataType_PRED"]
    lines += ["XLA_FFI_Error_Create_Args_STRUCT_SIZE", "XLA_FFI_Stream_Get_Args_STRUCT_SIZE"]
    body = "".join(f'printf("%d ", int({line}));' for line in lines)
    source = tmp_path / "layout.cpp"
    source.write_text(f'#include <cstdio>\n#include "xla/ffi/api/c_api.h"\nint main() {{ {body} }}\n', encoding="utf-8")
    subprocess.run([compiler, "-I", jax.ffi.include_dir(), str(source), "-o", str(tmp_path / "layout")], check=True)
    found = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout.split()
    version = frame.VERSION_IN_METADATA - 16  # where the struct begins that it is in
    expected = [*ours[0], *ours[1], 24, version, frame.TRAITS_IN_METADATA]
    expected += [frame.VERSION_IN_API - 16, frame.ERROR_CREATE_IN_API, frame.STREAM_GET_IN_API, 16, 16, 1, 28, 32]
    assert list(map(int, found)) == expected
    assert frame.CALL_FRAME.size == 168 and frame.BUFFER.size == 48 and ctypes.sizeof(CallFrame) == 176


# By XLA


def register(name, run):
    """Let XLA call a function with frames; it is kept, as XLA keeps its address."""
    function = handler.Handler(lambda address: handler.answer(run, address))
    KEPT.append(function)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.cast(function, ctypes.c_void_p).value), platform="cpu")


KEPT = []


def test_xla_hands_over_what_is_read():
    seen = []

    def run(found):
        types = list(map(frame.shape_of, found.shapes))
        views = [frame.array_at(address, *typed) for address, typed in zip(found.addresses, types)]
        seen.append((found.text.decode(), types, [x.copy() for x in views[:-1]]))
        views[-1][...] = 7

    register("cupy_flash.test.seen", run)
    given = [jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jnp.array([True, False]), jnp.uint32(5), jnp.zeros((0, 4), jnp.int8)]
    call = jax.ffi.ffi_call("cupy_flash.test.seen", jax.ShapeDtypeStruct((3, 2), jnp.float16))
    out = jax.jit(lambda *x: call(*x, call="zwölf"))(*given)
    assert out.shape == (3, 2) and bool((out == 7).all())
    (text, types, arrays), = seen
    assert text == "zwölf" and types == [*((x.shape, x.dtype) for x in given), ((3, 2), np.dtype(np.float16))]
    assert all(np.array_equal(x, np.asarray(y)) for x, y in zip(arrays, given))


def test_xla_raises_what_is_wrong():
    def run(found):
        raise ValueError("k: expected something else")

    register("cupy_flash.test.wrong", run)
    call = jax.ffi.ffi_call("cupy_flash.test.wrong", jax.ShapeDtypeStruct((1,), jnp.float32))
    with pytest.raises(Exception, match="cupy_flash: ValueError: k: expected something else") as caught:
        jax.block_until_ready(jax.jit(lambda x: call(x, call=""))(jnp.ones(1)))
    assert "INVALID_ARGUMENT" in str(caught.value)
