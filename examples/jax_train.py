"""Train a small language model in JAX, byte by byte, on the sources of cupy_flash: a jitted step, an optimizer of optax.

    python examples/jax_train.py
    python examples/jax_train.py --attention jax

Of attention, one import is another than it would be without cupy_flash.
"""

import time
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax

from cupy_flash.jax import attention  # in place of: from jax.nn import dot_product_attention as attention

SOURCES = Path(__file__).resolve().parent.parent / "cupy_flash"
ATTENTIONS = {"flash": attention, "jax": jax.nn.dot_product_attention}


def made(key, layers=2, dim=64, heads=4):
    """Weights of a decoder whose output shares the embedding of bytes."""
    def matrix(key, *shape):
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    one, *keys = jax.random.split(key, 1 + layers)
    blocks = []
    for key in keys:
        a, b, c, d = jax.random.split(key, 4)
        qkv = matrix(a, dim, 3 * dim).reshape(dim, 3, heads, dim // heads)
        blocks.append({"qkv": qkv, "out": matrix(b, dim, dim), "up": matrix(c, dim, 4 * dim), "down": matrix(d, 4 * dim, dim)})
    return {"bytes": 0.02 * jax.random.normal(one, (256, dim)), "blocks": blocks}


def logits(weights, text, attend):
    """Of the next byte at each place of each text, (batch, seq) to (batch, seq, 256)."""
    def normal(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    x = weights["bytes"][text]
    for block in weights["blocks"]:
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dthc->bsthc", normal(x), block["qkv"]), 2, 0)
        slopes = 2.0 ** -jnp.arange(1, 1 + q.shape[2])  # ALiBi as a bias, which any attention takes
        distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
        x += attend(q, k, v, -slopes[:, None, None] * distance, is_causal=True).reshape(x.shape) @ block["out"]
        x += jax.nn.gelu(normal(x) @ block["up"]) @ block["down"]
    return normal(x) @ weights["bytes"].T


def train(steps, batch=8, seq=64, attend=attention, rate=3e-3, seed=0):
    """The loss of each step, in nats per byte."""
    text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("problem/*.py"))), np.uint8)
    weights, optimizer = made(jax.random.key(seed)), optax.adamw(rate)

    def loss(weights, rows):
        return optax.softmax_cross_entropy_with_integer_labels(logits(weights, rows[:, :-1], attend), rows[:, 1:]).mean()

    @jax.jit
    def step(weights, state, rows):
        value, gradient = jax.value_and_grad(loss)(weights, rows)
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, value

    state, draw = optimizer.init(weights), np.random.default_rng(seed)
    for _ in range(steps):
        starts = draw.integers(0, text.size - seq, batch)
        weights, state, value = step(weights, state, text[starts[:, None] + np.arange(seq + 1)].astype(np.int32))
        yield float(value)


@click.command()
@click.option("--steps", default=200, show_default=True)
@click.option("--attention", "name", type=click.Choice(list(ATTENTIONS)), default="flash", show_default=True)
def main(steps, name):
    """Train a small language model, and say how its loss falls."""
    start = time.perf_counter()
    for i, value in enumerate(train(steps, attend=ATTENTIONS[name])):
        if i % 20 == 0 or i == steps - 1:
            click.echo(f"step {i:4}  loss {value:.3f}  {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
