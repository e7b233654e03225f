"""A decoder-only transformer over bytes, forward and backward, in array code for NumPy and CuPy.

It is of the usual kind: normalisation before each block, rotary positions, SwiGLU. Nothing differentiates it automatically.
A function whose name ends in ``_vjp`` returns a result and a function from the gradient of that result to the gradients of
the inputs, as `cupy_flash.attention_vjp` does. Read from top to bottom: ``loss_vjp`` is what training calls, ``logits_vjp``
is the model, and ``attention_block_vjp`` is where attention does its work. `train_char_lm.py` trains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

import cupy_flash

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray
Weights: TypeAlias = dict[str, Array]

BYTES = 256
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
BLOCK_WEIGHTS = ("query", "key", "value", "out", "gate", "up", "down")


@dataclass(frozen=True)
class Model:
    """The sizes of a model, and how it computes. `dtype` is that of the activations: a key of `DTYPES`."""

    layers: int
    heads: int
    dim: int
    dtype: str = "float32"
    attention: str = "flash"

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim: expected a multiple of 2 * heads = {2 * self.heads}, got {self.dim}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights' shapes, ``(inputs, outputs)``; those of the blocks have an axis of layers in front.

        The normalisations have no gain of their own: the matrices that follow them can hold it.
        """
        dim, hidden = self.dim, 2 * self.dim
        outputs = (dim, dim, dim, dim, hidden, hidden, dim)
        inputs = (dim, dim, dim, dim, dim, dim, hidden)
        blocks = {name: (self.layers, *sizes) for name, *sizes in zip(BLOCK_WEIGHTS, inputs, outputs)}
        return {"embed": (BYTES, dim), **blocks, "head": (dim, BYTES)}

    def initial_weights(self, seed: int) -> np.ndarray:
        """Return one float64 vector of normal numbers, scaled so that activations start at the order of 1."""
        rng = np.random.default_rng(seed)
        flat = rng.standard_normal(sum(math.prod(shape) for shape in self.shapes.values()))
        weights = self.views(flat)
        for name in (*BLOCK_WEIGHTS, "head"):
            weights[name] *= self.shapes[name][-2] ** -0.5
        for name in ("out", "down"):  # what is added to the residual sum, twice a layer
            weights[name] *= (2 * self.layers) ** -0.5
        return flat

    def views(self, flat: Array) -> Weights:
        """Cut a vector into the model's weights, which share its memory. One vector is what an optimizer wants to see."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()]).tolist()
        starts = [0, *ends[:-1]]
        return {name: flat[start:end].reshape(self.shapes[name]) for name, start, end in zip(self.shapes, starts, ends)}


def loss_vjp(
    model: Model, weights: Array, tokens: Array, targets: Array, positions: Array | None = None
) -> tuple[Array, Callable[[], Array]]:
    """Return the mean cross-entropy, in nats, of predicting `targets` from `tokens`, and what gives the weights' gradient."""
    logits, model_vjp = logits_vjp(model, weights, tokens, positions)
    loss, entropy_vjp = cross_entropy_vjp(logits, targets.ravel())
    return loss, lambda: model_vjp(entropy_vjp())


def logits_vjp(
    model: Model, weights: Array, tokens: Array, positions: Array | None = None
) -> tuple[Array, Callable[[Array], Array]]:
    """Return ``(batch * seq, 256)`` scores for the byte that follows each of `tokens`, uint8 ``(batch, seq)``.

    `positions` are those of the tokens in their text, ``(seq,)``, by default from 0 on.

    `weights` and their gradient are vectors in at least float32; see `Model.views`. So is `x`, the sum of what the blocks
    add, and its gradient. All activations are ``(batch * seq, features)``: CuPy multiplies bfloat16 matrices, but no stacks.
    """
    xp, dtype = namespace(tokens), DTYPES[model.dtype]
    full, narrow = model.views(weights), model.views(weights.astype(dtype))
    phases = rotary_phases(model, xp.arange(tokens.shape[1]) if positions is None else positions)
    vjps = []
    x = full["embed"][tokens.ravel()]
    for layer in range(model.layers):
        w = {name: narrow[name][layer] for name in BLOCK_WEIGHTS}
        y, attention_vjp = attention_block_vjp(x, w, phases, ATTENTION[model.attention])
        x = x + y
        y, mlp_vjp = mlp_block_vjp(x, w)
        x = x + y
        vjps += [(layer, attention_vjp), (layer, mlp_vjp)]
    y, norm_vjp = rms_norm_vjp(x, x.dtype)
    logits, head_vjp = linear_vjp(y, full["head"])

    def vjp(dlogits: Array) -> Array:
        gradient = xp.empty_like(weights)
        dw = model.views(gradient)
        dy, dw["head"][...] = head_vjp(dlogits)
        dx = norm_vjp(dy)
        for layer, block_vjp in reversed(vjps):
            dx_block, dw_block = block_vjp(dx.astype(dtype))
            dx = dx + dx_block
            for name in dw_block:
                dw[name][layer] = dw_block[name]
        one_hot = (xp.arange(BYTES)[:, None] == tokens.ravel()).astype(dtype)
        dw["embed"][...] = one_hot @ dx.astype(dtype)  # the sum over all places of a byte
        return gradient

    return logits, vjp


def attention_block_vjp(x: Array, w: Weights, phases: Array, attention: Callable) -> tuple[Array, Callable]:
    """Let every token look at itself and at those before it. `phases` is ``(seq, 1, head_dim / 2)``."""
    seq, _, pairs = phases.shape
    split = (-1, seq, x.shape[-1] // (2 * pairs), 2 * pairs)
    y, norm_vjp = rms_norm_vjp(x, w["query"].dtype)
    (q, query_vjp), (k, key_vjp), (v, value_vjp) = (linear_vjp(y, w[name]) for name in ("query", "key", "value"))
    q, k, v = rotate(q.reshape(split), phases), rotate(k.reshape(split), phases), v.reshape(split)
    # (batch, seq, heads, head_dim) -> (batch, heads, seq, head_dim) is a view: attention reads any strides in place.
    out, attention_vjp = attention(*(part.swapaxes(1, 2) for part in (q, k, v)))
    # The result has q's memory order, so undoing the swap leaves contiguous rows and reshape copies nothing.
    y, out_vjp = linear_vjp(out.swapaxes(1, 2).reshape(x.shape), w["out"])

    def vjp(dy: Array) -> tuple[Array, Weights]:
        dout, dw_out = out_vjp(dy)
        dq, dk, dv = (part.swapaxes(1, 2) for part in attention_vjp(dout.reshape(split).swapaxes(1, 2)))
        dq, dk = rotate(dq, phases.conj()), rotate(dk, phases.conj())  # the transpose of a rotation turns back
        dx_q, dw_q = query_vjp(dq.reshape(x.shape))
        dx_k, dw_k = key_vjp(dk.reshape(x.shape))
        dx_v, dw_v = value_vjp(dv.reshape(x.shape))
        return norm_vjp(dx_q + dx_k + dx_v), {"query": dw_q, "key": dw_k, "value": dw_v, "out": dw_out}

    return y, vjp


def mlp_block_vjp(x: Array, w: Weights) -> tuple[Array, Callable]:
    """Transform every token by itself: ``(silu(x @ gate) * (x @ up)) @ down``, known as SwiGLU."""
    xp = namespace(x)
    y, norm_vjp = rms_norm_vjp(x, w["gate"].dtype)
    gate, gate_vjp = linear_vjp(y, w["gate"])
    up, up_vjp = linear_vjp(y, w["up"])
    sigmoid = (xp.tanh(gate / 2) + 1) / 2  # whole numbers keep bfloat16 what it is, a Python float would not
    silu = gate * sigmoid
    y, down_vjp = linear_vjp(silu * up, w["down"])

    def vjp(dy: Array) -> tuple[Array, Weights]:
        dhidden, dw_down = down_vjp(dy)
        dx_up, dw_up = up_vjp(dhidden * silu)
        dx_gate, dw_gate = gate_vjp(dhidden * up * (sigmoid + silu * (1 - sigmoid)))
        return norm_vjp(dx_up + dx_gate), {"gate": dw_gate, "up": dw_up, "down": dw_down}

    return y, vjp


def linear_vjp(x: Array, w: Array) -> tuple[Array, Callable]:
    """Return ``x @ w``."""
    return x @ w, lambda dy: (dy @ w.T, x.T @ dy)


def rms_norm_vjp(x: Array, dtype: Any) -> tuple[Array, Callable]:
    """Return the rows of `x` with a mean square of 1, in `dtype`."""
    xp = namespace(x)
    inverse = math.sqrt(x.shape[-1]) / xp.linalg.norm(x, axis=-1, keepdims=True)
    y = xp.multiply(x, inverse, out=xp.empty(x.shape, dtype), casting="same_kind")  # rounded once, and no array in between

    def vjp(dy: Array) -> Array:
        dy = dy.astype(x.dtype, copy=False)
        return (dy - y * (dy * y).mean(axis=-1, keepdims=True)) * inverse

    return y, vjp


def cross_entropy_vjp(logits: Array, targets: Array) -> tuple[Array, Callable]:
    """Return the mean of ``-log softmax(logits)[target]`` over the rows."""
    xp = namespace(logits)
    rows = xp.arange(len(targets))
    logits = logits - logits.max(axis=-1, keepdims=True)
    p = xp.exp(logits)
    total = p.sum(axis=-1, keepdims=True)
    loss = (xp.log(total[:, 0]) - logits[rows, targets]).mean()

    def vjp() -> Array:
        dlogits = p / total
        dlogits[rows, targets] -= 1
        return dlogits / len(targets)

    return loss, vjp


def rotary_phases(model: Model, positions: Array) -> Array:
    """Return unit complex numbers ``(seq, 1, head_dim / 2)``: a pair of features turns with its place, each at its own pace."""
    xp, pairs = namespace(positions), model.dim // model.heads // 2
    angles = positions[:, None, None] * 10_000.0 ** -(xp.arange(pairs) / pairs)
    return xp.exp(1j * angles).astype(np.complex128 if model.dtype == "float64" else np.complex64)


def rotate(x: Array, phases: Array) -> Array:
    """Turn the pairs of neighbouring features of ``x (batch, seq, heads, head_dim)``, read as complex numbers, by `phases`."""
    turned = x.astype(phases.real.dtype, order="C").view(phases.dtype) * phases
    return turned.view(phases.real.dtype).astype(x.dtype)


def flash_attention_vjp(q: Array, k: Array, v: Array) -> tuple[Array, Callable]:
    """Return causal attention of ``(batch, heads, seq, head_dim)``, without ever holding the scores."""
    return cupy_flash.attention_vjp(q, k, v, causal=True)


def naive_attention_vjp(q: Array, k: Array, v: Array) -> tuple[Array, Callable]:
    """Return the same by the textbook, to compare with: all ``seq * seq`` probabilities of a head are kept for the gradient."""
    xp, scale = namespace(q), q.shape[-1] ** -0.5
    seen = xp.tri(q.shape[-2], dtype=bool)
    s = xp.where(seen, wide(product(q, k.swapaxes(-1, -2))) * scale, -xp.inf)
    p = xp.exp(s - s.max(axis=-1, keepdims=True))
    p = (p / p.sum(axis=-1, keepdims=True)).astype(q.dtype)

    def vjp(dout: Array) -> tuple[Array, Array, Array]:
        dp = wide(product(dout, v.swapaxes(-1, -2)))
        ds = (p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale).astype(q.dtype)
        return product(ds, k), product(ds.swapaxes(-1, -2), q), product(p.swapaxes(-1, -2), dout)

    return product(p, v), vjp


ATTENTION = {"flash": flash_attention_vjp, "naive": naive_attention_vjp}


def product(a: Array, b: Array) -> Array:
    """Return ``a @ b`` for stacks of matrices, one after another: CuPy 14 refuses stacks in bfloat16."""
    xp = namespace(a)
    out = xp.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    for index in np.ndindex(a.shape[:-2]):
        xp.dot(a[index], b[index], out=out[index])
    return out


def wide(x: Array) -> Array:
    """Return `x` in at least float32."""
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def namespace(x: Array) -> ModuleType:
    """Return the module that `x` belongs to, ``numpy`` or ``cupy``."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy
