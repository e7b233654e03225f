"""Attention under the transformations of JAX: mapped in one call, recomputed, divided over devices."""

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
from thinned import thinned

jax = pytest.importorskip("jax")
pytest.importorskip("jax.export")
jnp = jax.numpy
jax.config.update("jax_disable_most_optimizations", True)  # of what XLA compiles, which takes most of the time here
attention = importlib.import_module("cupy_flash.jax").attention
on_host = importlib.import_module("cupy_flash.jax.on_host")
naive = jax.nn.dot_product_attention

SHAPES = (3, 2, 9, 4, 8), (3, 2, 11, 2, 8), (3, 2, 11, 2, 8), (3, 1, 4, 9, 11)  # 3 to map over
# By NumPy: JAX would compile for each shape, whenever tests are collected.
Q, K, V, BIAS = (jnp.asarray(np.random.default_rng(i).standard_normal(shape, np.float32)) for i, shape in enumerate(SHAPES))
LENGTHS = jnp.array([[5, 11], [1, 2], [9, 10]], jnp.int32)
ROUNDING = 1e-4  # gradients of squares, sums of order 10 in float32


@pytest.fixture
def calls(monkeypatch):
    """What has been computed since, one entry a call."""
    made = []
    run = on_host.HostSite.run

    def counted(site, addresses):
        made.append("backward" if site.call.backward else "forward")
        run(site, addresses)

    monkeypatch.setattr(on_host.HostSite, "run", counted)
    return made


def mapped_gradients(function, axes, **options):
    """Of the squares of results, of each element."""

    def loss(q, k, v, *others):
        bias, lengths = (others if len(others) == 2 else (others[0], None)) if others else (None, None)
        return (function(q, k, v, bias, key_value_seq_lengths=lengths, **options) ** 2).sum()

    floats = tuple(i for i in range(len(axes)) if i < 4)
    return jax.jit(jax.vmap(jax.value_and_grad(loss, floats if len(axes) < 5 else (0, 1, 2)), axes))


def close(found, expected, tolerance=ROUNDING):
    found, expected = (jax.tree.leaves(x) for x in (found, expected))
    assert [x.shape for x in found] == [x.shape for x in expected]
    for x, y in zip(found, expected):
        assert np.allclose(x, y, rtol=tolerance / 10, atol=tolerance)


@pytest.mark.parametrize("axes", thinned([(0, None, None), (None, 1, 0)], first=1), ids=str)
def test_mapping_is_one_call(axes, calls):
    arrays = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip((Q, K, V), axes)]
    found = jax.block_until_ready(mapped_gradients(attention, axes, is_causal=True)(*arrays))
    assert calls == ["forward", "backward"]
    close(found, mapped_gradients(naive, axes, is_causal=True)(*arrays))


@pytest.mark.parametrize("axes", thinned([(0, 0, 0, None), (None, None, None, 0)], first=1), ids=str)
def test_mapping_with_a_bias_is_one_call(axes, calls):
    arrays = [x[0] if axis is None else x for x, axis in zip((Q, K, V, BIAS), axes)]
    found = jax.block_until_ready(mapped_gradients(attention, axes)(*arrays))
    assert calls == ["forward", "backward"]
    close(found, mapped_gradients(naive, axes)(*arrays))


@pytest.mark.parametrize("axes", thinned([(0, None, 0, 0, 0), (None, None, None, None, 0)]), ids=str)
def test_mapping_with_lengths_is_one_call(axes, calls):
    arrays = [x[0] if axis is None else x for x, axis in zip((Q, K, V, BIAS, LENGTHS), axes)]
    found = jax.block_until_ready(mapped_gradients(attention, axes)(*arrays))
    assert calls == ["forward", "backward"]
    close(found, mapped_gradients(naive, axes)(*arrays))


def test_mapping_twice_is_one_call(calls):
    v = jnp.stack([V, 2 * V])

    def twice(function):
        return jax.jit(jax.vmap(jax.vmap(function, (0, None, 0)), (None, 0, 0)))

    found = jax.block_until_ready(twice(attention)(Q, K[:2], v))
    assert calls == ["forward"]
    close(found, twice(naive)(Q, K[:2], v))


def test_all_derivatives_of_a_result():
    """`jax.jacrev` maps over the gradient of the result alone."""
    arrays = Q[0, 0, :2], K[0, 0, :3], V[0, 0, :3]
    close(*(jax.jit(jax.jacrev(function, (0, 1, 2)))(*arrays) for function in (attention, naive)))


def test_gradients_of_what_all_elements_share_are_summed(calls):
    def loss(function):
        def of(k, bias):
            return jax.vmap(lambda q, v: function(q, k, v, bias))(Q, V).sum()

        return jax.jit(jax.grad(of, (0, 1)))(K[0], BIAS[0])

    found = jax.block_until_ready(loss(attention))
    assert calls == ["forward", "backward"]
    close(found, loss(naive))


def test_sinks_that_all_elements_share_are_one_call(calls):
    sinks = jnp.linspace(-1, 1, 4)

    def loss(mapped):
        def of(sinks):
            many = jax.vmap(lambda q, k, v: attention(q, k, v, sinks=sinks)) if mapped else None
            if mapped:
                return (many(Q, K, V) ** 2).sum()
            q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (Q, K, V))
            return (attention(q, k, v, sinks=sinks) ** 2).sum()

        return jax.jit(jax.grad(of))(sinks)

    found = jax.block_until_ready(loss(True))
    assert calls == ["forward"]  # the gradient of sinks takes no kernel
    close(found, loss(False))


@pytest.mark.parametrize("what", ["sinks", "arrays", "b", "seed"])
def test_what_has_no_batch_axes_is_computed_one_by_one(what, calls):
    numbers = jnp.linspace(0, 1, 12).reshape(3, 4)
    options = {
        "sinks": lambda x: {"sinks": x},
        "arrays": lambda x: {"score": "score + a[h]", "arrays": {"a": x}},
        "b": lambda x: {"score": "score * b"},
        "seed": lambda x: {"dropout": 0.5, "seed": 3},
    }[what]

    def one(q, k, v, x):
        return attention(q, k, v, **options(x))

    found = jax.block_until_ready(jax.jit(jax.vmap(one))(Q, K, V, numbers))
    assert len(calls) == 3
    for i in range(3):
        close(found[i], one(Q[i], K[i], V[i], numbers[i]), 0)


def test_keys_of_each_element_are_one_call(calls):
    def dropped(q, key):
        return attention(q, K[0], V[0], dropout=0.5, seed=key)

    def loss(q, key):
        return (dropped(q, key) ** 2).sum()

    keys = jax.random.split(jax.random.key(0), 3)
    q = jnp.stack([Q[0]] * 3)
    found = jax.block_until_ready(jax.jit(jax.vmap(dropped))(q, keys))
    assert calls == ["forward"] and not np.allclose(found[0], found[1])  # elements drop others each
    step = 1e-2  # and the gradient is that of the result, whose probabilities are dropped alike
    direction = jnp.ones_like(q).at[:, 0].set(-1.0)
    slope = sum(sign * jax.vmap(loss)(q + sign * step * direction, keys) for sign in (1, -1)) / (2 * step)
    gradient = jax.jit(jax.vmap(jax.grad(loss)))(q, keys)
    assert np.allclose((gradient * direction).sum((1, 2, 3, 4)), slope, rtol=2e-2, atol=2e-2)


def test_recomputing(calls):
    def loss(q):
        return jax.checkpoint(lambda q: attention(q, K[0], V[0], is_causal=True))(q).sum()

    found = jax.block_until_ready(jax.jit(jax.grad(loss))(Q[0]))
    assert calls.count("backward") == 1
    close(found, jax.jit(jax.grad(lambda q: naive(q, K[0], V[0], is_causal=True).sum()))(Q[0]))


def test_in_a_loop_and_without_jit():
    def step(q, _):
        return attention(q, q, q), None

    close(jax.lax.scan(step, Q[0], None, length=3)[0], jax.lax.scan(lambda q, _: (naive(q, q, q), None), Q[0], None, length=3)[0])
    with jax.disable_jit():
        close(attention(Q[0], K[0], V[0]), naive(Q[0], K[0], V[0]))


def test_what_is_compiled_says_everything(tmp_path):
    """So that a program runs in a process that never traced it."""
    pytest.importorskip("flatbuffers")  # which JAX writes programs with
    text = "score + 0.1 * (kv_idx - q_idx)"
    traced = jax.jit(lambda q, k, v: attention(q, k, v, is_causal=True, score=text))
    allowed = [jax.export.DisabledSafetyCheck.custom_call("cupy_flash.attention")]
    (tmp_path / "program").write_bytes(jax.export.export(traced, disabled_checks=allowed)(Q[0], K[0], V[0]).serialize())
    np.savez(tmp_path / "arrays.npz", *map(np.asarray, (Q[0], K[0], V[0], traced(Q[0], K[0], V[0]))))
    program = """if True:
        import sys, numpy as np, jax, jax.export, cupy_flash.jax
        cupy_flash.jax.register()
        *given, expected = np.load(sys.argv[1] + "/arrays.npz").values()
        found = jax.export.deserialize(bytearray(open(sys.argv[1] + "/program", "rb").read())).call(*given)
        assert np.array_equal(found, expected)
    """
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_divided_over_devices():
    program = """if True:
        import jax, numpy as np
        from jax.sharding import Mesh, PartitionSpec as P
        from cupy_flash.jax import attention
        naive = jax.nn.dot_product_attention
        shard_map = jax.shard_map if hasattr(jax, "shard_map") else jax.experimental.shard_map.shard_map
        keys = jax.random.split(jax.random.key(0), 4)
        q = jax.random.normal(keys[0], (2, 5, 4, 8))
        k, v = jax.random.normal(keys[1], (2, 2, 7, 2, 8))
        bias = jax.random.normal(keys[2], (5, 7))
        def gradients(function):
            return jax.jit(jax.value_and_grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2, 3)))(q, k, v, bias)
        expected = gradients(naive)
        mesh = Mesh(np.array(jax.devices()), ("x",))
        for own in (P("x"), P(None, None, "x")):  # batch, then heads
            found = gradients(shard_map(attention, mesh=mesh, in_specs=(own, own, own, P()), out_specs=own))
            for x, y in zip(*map(jax.tree.leaves, (found, expected))):
                assert np.allclose(x, y, rtol=1e-5, atol=1e-4), abs(x - y).max()
        print(len(jax.devices()))
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "2\n", done.stderr
