"""Attention in JAX programs on a GPU: the bits of the library's own call, on XLA's stream, at a small cost of the host.

Needs JAX with CUDA beside CuPy of the same CUDA version: ``pip install "jax[cuda13]"``.
"""

import statistics
import time

import numpy as np
import pytest

import cupy_flash

cupy = pytest.importorskip("cupy")
jax = pytest.importorskip("jax")
jnp = jax.numpy
pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs JAX with CUDA")

if jax.default_backend() == "gpu":
    from cupy_flash.jax import attention, frame, on_device

KEYS = jax.random.split(jax.random.key(0), 6)


def arrays(dtype="bfloat16", batch=2, rows=300, keys=300, heads=8, heads_kv=2, dim=64):
    q, dout = jax.random.normal(KEYS[0], (2, batch, rows, heads, dim), dtype)
    k, v = jax.random.normal(KEYS[1], (2, batch, keys, heads_kv, dim), dtype)
    return q, k, v, dout


def same(found, expected):
    assert np.array_equal(np.asarray(found, np.float32), np.asarray(cupy.asnumpy(expected), np.float32))


def with_gradients(function, given, dout):
    @jax.jit
    def both(*given):
        out, vjp = jax.vjp(function, *given)
        return out, vjp(dout.astype(out.dtype))

    return both(*given)


@pytest.mark.parametrize("dtype, rows", [("float16", 300), ("bfloat16", 300), ("float32", 150), ("float32", 900)])
def test_the_bits_are_those_of_the_library(dtype, rows):
    q, k, v, dout = arrays(dtype, rows=rows, keys=rows)
    options = {"is_causal": True, "deterministic": True}
    out, gradients = with_gradients(lambda *x: attention(*x, **options), (q, k, v), dout)
    own = [cupy.from_dlpack(x) for x in (q, k, v, dout)]
    expected, vjp = cupy_flash.attention_vjp(*own[:3], layout="bshd", causal="top_left", deterministic=True)
    parts = cupy_flash.plan_attention(*own[:3], layout="bshd", causal="top_left").kernel.config.FP16_PARTS
    assert parts == 2 * ((dtype, rows) == ("float32", 900)) or cupy.cuda.Device().compute_capability != "90"
    same(out, expected)
    for x, y in zip(gradients, vjp(own[3])):
        same(x, y)


@pytest.mark.parametrize(
    "options",
    [
        {"local_window_size": (64, 0)},
        {"key_value_seq_lengths": jnp.array([300, 77], jnp.int32), "query_seq_lengths": jnp.array([300, 120], jnp.int32)},
        {"mask": jax.random.bernoulli(KEYS[2], 0.7, (1, 1, 300, 300)).at[..., 0].set(True)},
        {"softcap": 30.0},
        {"score": "score + 0.01 * (kv_idx - q_idx)"},
        {"mask": lambda q_idx, kv_idx: (q_idx - kv_idx) % 128 < 64},
    ],
    ids=["window", "lengths", "mask", "softcap", "score", "expression"],
)
def test_options(options):
    """On the CPU NumPy computes the same, whose results in float32 differ by roundings."""
    given = arrays("float32")
    on_gpu = with_gradients(lambda *x: attention(*x, **options), given[:3], given[3])
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        host = jax.device_put(given, cpu)
        there = {name: jax.device_put(x, cpu) if isinstance(x, jax.Array) else x for name, x in options.items()}
        on_cpu = with_gradients(lambda *x: attention(*x, **there), host[:3], host[3])
    for x, y in zip(*map(jax.tree.leaves, (on_gpu, on_cpu))):
        assert np.allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=2e-4)


def test_learned_bias_sinks_and_slopes():
    q, k, v, dout = arrays("float32")
    learned = {"sinks": jnp.linspace(-1, 1, 8), "alibi_slopes": jnp.ones(8) / 64}
    learned["bias"] = jax.random.normal(KEYS[3], (1, 8, 300, 300))

    def gradients(device):
        given = jax.device_put((q, k, v, dout, learned), device)
        with jax.default_device(device):
            return jax.jit(jax.grad(lambda x: (attention(*given[:3], **x) * given[3]).sum()))(given[4])

    for x, y in zip(*(jax.tree.leaves(gradients(jax.devices(kind)[0])) for kind in ("gpu", "cpu"))):
        assert np.allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-3)


def test_mapping_and_keys():
    q, k, v, _ = arrays(batch=3)
    same(jax.jit(jax.vmap(lambda *x: attention(*x, is_causal=True)))(q, k, v), cupy.from_dlpack(attention(q, k, v, is_causal=True)))
    dropped = jax.jit(lambda key: attention(q, k, v, dropout=0.1, seed=key))
    same(dropped(KEYS[4]), cupy.from_dlpack(dropped(KEYS[4])))
    assert not np.array_equal(np.asarray(dropped(KEYS[4]), np.float32), np.asarray(dropped(KEYS[5]), np.float32))


def test_a_program_waits_for_what_comes_before_it():
    """Its stream is XLA's own: results of long products are read after them, while CuPy's streams are busy with others."""
    n = 4096
    x = jax.random.normal(KEYS[3], (n, n), jnp.float32) / n**0.5

    @jax.jit
    def late(x, by):
        for _ in range(30):  # some milliseconds
            x = x @ by
        q = x[:1024, :512].reshape(1, 1024, 8, 64).astype(jnp.bfloat16)
        return q, attention(q, q, q, is_causal=True)

    late(x, x)
    busy = cupy.cuda.Stream(non_blocking=True)
    with busy:
        other = cupy.ones((n, n), cupy.float32)
        for _ in range(20):
            other = other @ other * (1 / n)
    for _ in range(20):
        q, out = late(x, x)
        same(out, cupy_flash.attention(*[cupy.from_dlpack(q)] * 3, layout="bshd", causal="top_left"))
    busy.synchronize()


def test_a_program_may_be_captured_in_a_graph_and_repeats():
    """Loops are what XLA turns into command buffers, with the calls that say that they may be."""
    q, k, v, _ = arrays(rows=64, keys=64)

    @jax.jit
    def steps(q):
        return jax.lax.fori_loop(0, 10, lambda _, q: attention(q, k, v) + q * 0.5, q)

    first = steps(q)
    for _ in range(5):
        same(steps(q), cupy.from_dlpack(first))


def test_cost_of_the_host(monkeypatch, capsys):
    """What a call takes until its kernel is queued, from the frame of XLA on. The goal is 20 µs."""
    spent = []
    run = on_device.run

    def timed(found):
        start = time.perf_counter()
        run(found)
        spent.append(time.perf_counter() - start)

    monkeypatch.setattr(on_device, "run", timed)
    read = frame.read
    reading = []

    def timed_read(address):
        start = time.perf_counter()
        found = read(address)
        reading.append(time.perf_counter() - start)
        return found

    monkeypatch.setattr(frame, "read", timed_read)
    q, k, v, dout = arrays(batch=1, rows=16, keys=16)
    forward = jax.jit(lambda q, k, v: attention(q, k, v, is_causal=True))
    backward = jax.jit(jax.grad(lambda q, k, v: (attention(q, k, v, is_causal=True) * dout).sum(), (0, 1, 2)))
    with capsys.disabled():
        for name, program in (("forward", forward), ("forward and backward", backward)):
            for _ in range(50):
                jax.block_until_ready(program(q, k, v))
            spent.clear(), reading.clear()
            start = time.perf_counter()
            for _ in range(300):
                result = program(q, k, v)
            jax.block_until_ready(result)
            whole = (time.perf_counter() - start) / 300 * 1e6
            calls, frames = (statistics.median(x) * 1e6 if x else float("nan") for x in (spent, reading))
            print(f"\n{name}: {frames:.1f} µs to read a frame, {calls:.1f} µs to launch, {whole:.1f} µs a program")
    assert not spent or statistics.median(spent) < 100e-6
