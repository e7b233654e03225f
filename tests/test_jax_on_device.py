"""The way of a call on a GPU, of which all but that is here: XLA calls it on a CPU, and kernels are executed there."""

import contextlib
import ctypes
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
from thinned import thinned

jax = pytest.importorskip("jax")
cupy = pytest.importorskip("cupy")
jnp = jax.numpy
mlir = importlib.import_module("jax.interpreters.mlir")
attention = importlib.import_module("cupy_flash.jax").attention
frame, handler, on_device, primitive = (
    importlib.import_module(f"cupy_flash.jax.{name}") for name in ("frame", "handler", "on_device", "primitive")
)
Call, text_of = (getattr(importlib.import_module("cupy_flash.jax.call"), name) for name in ("Call", "text_of"))
backward, forward = (importlib.import_module(f"cupy_flash.call.{name}") for name in ("backward", "forward"))
device, host = (importlib.import_module(f"cupy_flash.machine.{name}") for name in ("device", "host"))
ARCHITECTURES, HOST = (getattr(importlib.import_module("cupy_flash.plan.architecture"), x) for x in ("ARCHITECTURES", "HOST"))

TARGET = "cupy_flash.test.on_device"
LAUNCHED = []  # the streams of what was launched, in order


class KernelOnHost:
    """In place of a kernel on a GPU: takes the same, and executes it here."""

    def __init__(self, kernel, ordinal, params, names, workspace, launches, maps, mask):
        self.run = lambda words: host.run(kernel, launches, params, words, host.HostOptions.from_environment(), mask)
        self.names, self.workspace = names, workspace

    def launch(self, addresses, workspace=None, stream=None):
        LAUNCHED.append(stream)
        offsets = self.workspace.offsets
        words = [*addresses, *(workspace.data.ptr + offset for offset in offsets)] if offsets else addresses
        assert len(words) == len(self.names) + len(offsets)
        self.run(dict(zip((*self.names, *self.workspace.names), map(int, words))))


@pytest.fixture(scope="module")
def handler_on_cpu():
    """XLA keeps the address of the function, and so does the module."""
    function = handler.Handler(lambda address: handler.answer(on_device.run, address))
    capsule = jax.ffi.pycapsule(ctypes.cast(function, ctypes.c_void_p).value)
    jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
    return function


@pytest.fixture
def as_on_device(monkeypatch, handler_on_cpu):
    LAUNCHED.clear()
    for module in (forward, backward):
        monkeypatch.setattr(module, "architecture_for", lambda backend, device, arch=None: HOST)
        module._prepared.cache_clear()
    monkeypatch.setattr(device, "DeviceKernel", KernelOnHost)
    monkeypatch.setattr(frame.Frame, "stream", 5)
    monkeypatch.setattr(on_device, "current_device", lambda: 0)
    on_host = SimpleNamespace(Device=contextlib.nullcontext, runtime=cupy.cuda.runtime)
    monkeypatch.setattr(on_device, "cupy", SimpleNamespace(cuda=on_host))
    monkeypatch.setattr(cupy.cuda.runtime, "memsetAsync", lambda at, value, size, stream: ctypes.memset(at, value, size))
    monkeypatch.setattr(primitive, "_ordinal", lambda: 0)
    monkeypatch.setattr(primitive, "TARGET", TARGET)
    mlir.register_lowering(primitive.attention_p, primitive._lowered_for_device, platform="cpu")
    for cache in (on_device.plan_of, on_device._site):
        cache.cache_clear()
    yield LAUNCHED
    mlir.register_lowering(primitive.attention_p, primitive._lowered_for_host, platform="cpu")
    for cache in (on_device.plan_of, on_device._site, forward._prepared, backward._prepared):
        cache.cache_clear()
    jax.clear_caches()


DRAWN = np.random.default_rng(2)  # by NumPy: JAX would compile for each shape, whenever tests are collected


def normal(*shape):
    return jnp.asarray(DRAWN.standard_normal(shape, np.float32))


Q = normal(2, 33, 4, 16)
K, V = normal(2, 2, 40, 2, 16)
SEEN = DRAWN.random((33, 40)) < 0.5
SEEN[:, 0] = True
CASES = {
    "causal": ({"is_causal": True}, {}),
    "lengths": ({"key_value_seq_lengths": jnp.array([40, 17], jnp.int32)}, {}),
    "bias": ({}, {"bias": normal(1, 4, 33, 40)}),
    "mask": ({"mask": jnp.asarray(SEEN)}, {}),
    "sinks, dropout, arrays": ({"dropout": 0.25, "seed": jnp.uint32(3)}, {"sinks": jnp.linspace(-1, 1, 4), "slope": jnp.ones(())}),
}
SLOW = ("bias", "mask", "causal", "sinks, dropout, arrays")  # kernels of their own, each a compilation of seconds


def computed(options, learned, inputs=(Q, K, V)):
    def loss(q, k, v, learned):
        reads = {"arrays": {"slope": learned["slope"]}, "score": "score * slope"} if "slope" in learned else {}
        others = {name: x for name, x in learned.items() if name != "slope"}
        return (attention(q, k, v, **options, **others, **reads) ** 2).sum()

    return jax.block_until_ready(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*inputs, learned))


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.release] * (case in SLOW)) for case in CASES])
def test_the_way_to_a_kernel(case, as_on_device):
    found = computed(*CASES[case])
    assert set(as_on_device) == {5} and len(as_on_device) > 1  # a forward and a backward, all on the stream of the frame
    mlir.register_lowering(primitive.attention_p, primitive._lowered_for_host, platform="cpu")
    primitive.TARGET = handler.TARGET
    jax.clear_caches()
    for x, y in zip(*map(jax.tree.leaves, (found, computed(*CASES[case])))):
        assert x.shape == y.shape and jnp.allclose(x, y, rtol=1e-4, atol=1e-3)  # float32 sums of tens, by TF32 products in three


def test_a_window_of_one_query(as_on_device):
    """Of which no key before the window is read: keys and values begin there."""
    options = {"is_causal": "bottom_right", "local_window_size": (7, 0)}
    found, again = (jax.jit(lambda *x: attention(*x, **options))(Q[:, :1], K[:, n:], V[:, n:]) for n in (0, 30))
    assert len(as_on_device) == 2 and jnp.allclose(found, again, rtol=1e-4, atol=1e-5)


@pytest.mark.release
def test_gradients_of_keys_that_no_batch_element_sees(as_on_device, monkeypatch):
    cleared = []
    monkeypatch.setattr(cupy.cuda.runtime, "memsetAsync", lambda at, value, size, stream: cleared.append(size))
    _, (dq, *_) = computed({}, {}, (Q[:0], K[:1], V[:1]))
    assert dq.shape == Q[:0].shape and cleared == [K[:1].nbytes] * 2


@pytest.mark.release
@pytest.mark.parametrize("causal", thinned([True, False]))
def test_a_gradient_that_the_backward_stores(causal, as_on_device, monkeypatch):
    """That of a bias whose elements are a pair's own each, on sm_90a: in memory that is zero before where tiles are left out."""
    inputs, bias = [x.astype(jnp.float16) for x in (Q, K, V)], normal(2, 4, 33, 40).astype(jnp.float16)
    asked = {"is_causal": causal}, {"bias": bias}, inputs
    of_sm_80 = computed(*asked)
    cleared, memset = [], cupy.cuda.runtime.memsetAsync
    monkeypatch.setattr(cupy.cuda.runtime, "memsetAsync", lambda at, *how: cleared.append(how[1]) or memset(at, *how))
    for module in (forward, backward):
        monkeypatch.setattr(module, "architecture_for", lambda backend, device, arch=None: ARCHITECTURES["90a"])
    for cache in (on_device.plan_of, on_device._site, forward._prepared, backward._prepared):
        cache.cache_clear()
    jax.clear_caches()
    of_sm_90 = computed(*asked)
    assert cleared == [bias.nbytes] * causal
    for x, y in zip(*map(jax.tree.leaves, (of_sm_80, of_sm_90))):
        assert x.shape == y.shape and jnp.allclose(x, y, rtol=2**-8, atol=2**-8)


def test_memory_that_is_too_small_is_an_error(as_on_device):
    """A program may have been compiled where a plan takes less, on another GPU."""
    call = Call(("q", "k", "v"), (("layout", "bshd"),)).of_backward((), False)
    shapes = {"q": Q.shape, "k": K.shape, "v": V.shape, "lse": Q.shape[:-1]}
    shapes = [shapes.get(name, Q.shape) for name in call.operands] + [Q.shape, K.shape, V.shape]
    floats = tuple((shape, "float32") for shape in shapes)
    plan = on_device.plan_of(call, floats, 0)
    enough, less = (text_of(call, (*floats, ((plan.workspace_bytes - by,), "uint8"))).encode() for by in (0, 1))
    site = on_device._site(enough, 0, ())
    assert site.plan is plan and site.arguments(list(range(11))) == (0, 3, 4, 5, 1, 2, 10, 10, 6, 7, 8, 10) and site.workspace == 9
    with pytest.raises(RuntimeError, match=f"expected {plan.workspace_bytes} bytes of workspace for device 0, got"):
        on_device._site(less, 0, ())
