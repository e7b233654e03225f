"""Arrays of the array API standard in and out: of a library that has nothing else, and of one with two devices."""

import os
import subprocess
import sys

import numpy
import pytest

import cupy_flash


@pytest.mark.parametrize("device", ["CPU_DEVICE", "device1"])
def test_arrays_of_the_standard_and_nothing_else(device):
    """The strict namespace refuses all that the standard does not promise, and arrays of two devices in one operation."""
    xp = pytest.importorskip("array_api_strict")
    plain = numpy.random.default_rng(0).standard_normal((3, 2, 30, 16), numpy.float32)
    q, k, v = (xp.asarray(x, device=xp.Device(device)) for x in plain)
    out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    merged = cupy_flash.merge_states((out, lse), (out, lse), (out, lse))
    gradients = cupy_flash.attention_vjp(q, k, v, causal=True)[1](out)
    for x in (out, lse, *merged, *gradients):
        assert type(x) is type(q) and x.device == q.device
    assert bool(xp.all(xp.isfinite(q + out + gradients.dq)))
    assert numpy.array_equal(out.to_device(xp.Device("CPU_DEVICE")), cupy_flash.attention(*plain, causal=True))
    written = xp.zeros_like(q)
    assert cupy_flash.attention(q, k, v, causal=True, out=written) is written and bool(xp.all(written == out))


def test_results_are_on_the_device_of_q():
    """Two devices of JAX that share the memory of the host."""
    pytest.importorskip("jax")
    program = (
        "import jax, numpy, cupy_flash\n"
        "for device in jax.devices():\n"
        "    q = jax.device_put(numpy.ones((2, 30, 16), numpy.float32), device)\n"
        "    assert (cupy_flash.attention(q, q, q) + q).devices() == {device}\n"
        "print(len(jax.devices()))"
    )
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "2\n", done.stderr
