"""Whisper, a model that hears speech and writes it down, in array code for NumPy and CuPy.

Read ``Model.heard`` and ``Model.logits``: they are the encoder and the decoder. ``flash_attention`` is where
`cupy_flash.attention` does all three kinds of attention: of sounds to sounds, of words to the words before, which are in a
cache that `cupy_flash.append_kv` writes, and of words to sounds. `transcribe.py` makes sounds out of a file and text out of words.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from sentence_embeddings import gelu

import cupy_flash

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray
Weights: TypeAlias = dict[str, Array]
Attention: TypeAlias = Callable[[Array, Array, Array, "Array | None"], Array]


@dataclass(frozen=True)
class Config:
    """The sizes of a model: `width` is that of its rows, `hidden` that inside of its feed-forward blocks."""

    layers: int
    heads: int
    width: int
    hidden: int
    vocabulary: int
    context: int = 448  # most words
    sounds: int = 1500  # most rows of sound, each of two frames
    mels: int = 80
    epsilon: float = 1e-5

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights by their names in CTranslate2's files; matrices are (outputs, inputs)."""
        width, hidden = self.width, self.hidden

        def linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
            return {f"{name}/weight": (outputs, inputs), f"{name}/bias": (outputs,)}

        def norm(name: str) -> dict[str, tuple[int, ...]]:
            return {f"{name}/gamma": (width,), f"{name}/beta": (width,)}

        shapes = {"encoder/conv1/weight": (width, self.mels, 3), "encoder/conv1/bias": (width,)}
        shapes |= {"encoder/conv2/weight": (width, width, 3), "encoder/conv2/bias": (width,)}
        shapes |= {"decoder/embeddings/weight": (self.vocabulary, width)}
        for part, rows in (("encoder", self.sounds), ("decoder", self.context)):
            shapes |= {f"{part}/position_encodings/encodings": (rows, width), **norm(f"{part}/layer_norm")}
            for layer in (f"{part}/layer_{i}" for i in range(self.layers)):
                own, across, ffn = (f"{layer}/{name}" for name in ("self_attention", "attention", "ffn"))
                shapes |= norm(f"{own}/layer_norm") | norm(f"{ffn}/layer_norm")
                shapes |= linear(f"{own}/linear_0", 3 * width, width) | linear(f"{own}/linear_1", width, width)
                shapes |= linear(f"{ffn}/linear_0", hidden, width) | linear(f"{ffn}/linear_1", width, hidden)
                if part == "decoder":
                    shapes |= norm(f"{across}/layer_norm") | linear(f"{across}/linear_0", width, width)
                    shapes |= linear(f"{across}/linear_1", 2 * width, width) | linear(f"{across}/linear_2", width, width)
        return shapes


BASE = Config(6, heads=8, width=512, hidden=2048, vocabulary=51_865)


class Cache:
    """What the decoder keeps of some recordings: keys and values of the words so far, and of all sounds.

    Parameters
    ----------
    config : Config
    of_sounds : list of (array, array)
        The keys and values of each layer, which `Model.heard` makes.
    xp : module
    """

    def __init__(self, config: Config, of_sounds: list[tuple[Array, Array]], xp: ModuleType) -> None:
        self.of_sounds = of_sounds
        self.words = 0
        shape = (2, config.layers, len(of_sounds[0][0]), config.context, config.heads, config.width // config.heads)
        self.k, self.v = xp.zeros(shape, np.float32)


def flash_attention(q: Array, k: Array, v: Array, lengths: Array | None = None, backend: str = "auto") -> Array:
    """Let each row of `q` (batch, rows, heads, dim) see all keys; with lengths, those of a cache up to its own word."""
    if lengths is None:
        return cupy_flash.attention(q, k, v, layout="bshd", backend=backend)
    return cupy_flash.attention(q, k, v, seqlens_kv=lengths, causal=True, layout="bshd", backend=backend)


def naive_attention(q: Array, k: Array, v: Array, lengths: Array | None = None) -> Array:
    """Compute the same by the textbook, with all scores in memory."""
    xp = np if isinstance(q, np.ndarray) else sys.modules["cupy"]
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    if lengths is not None:
        rows = lengths[:, None, None, None] - q.shape[2] + xp.arange(q.shape[2])[:, None]
        scores = xp.where(xp.arange(k.shape[2]) > rows, -math.inf, scores)
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


@dataclass(frozen=True)
class Model:
    """Whisper with weights in arrays of ``xp`` (``numpy`` or ``cupy``), float32; see `make_model`."""

    xp: ModuleType
    config: Config
    weights: Weights
    backend: str = "auto"

    def heard(self, frames: Array, attention: Attention) -> Cache:
        """Run the encoder, and start a cache with what the decoder's layers will look up in it.

        Parameters
        ----------
        frames : array, shape (batch, frames, mels), float32
            What `transcribe.log_mel` makes: two frames for each of ``config.sounds``.
        attention : function
            `flash_attention` or `naive_attention`.
        """
        x = gelu(self.convolved(self.xp.asarray(frames), "encoder/conv1", stride=1), self.xp)
        x = gelu(self.convolved(x, "encoder/conv2", stride=2), self.xp)
        x = x + self.weights["encoder/position_encodings/encodings"][: x.shape[1]]
        for layer in (f"encoder/layer_{i}" for i in range(self.config.layers)):
            q, k, v = self.heads(self.linear(self.normalised(x, f"{layer}/self_attention"), f"{layer}/self_attention/linear_0"), 3)
            x = x + self.linear(attention(q, k, v, None).reshape(x.shape), f"{layer}/self_attention/linear_1")
            x = x + self.fed_forward(x, layer)
        x = self.normalised(x, "encoder")
        of_layers = (f"decoder/layer_{i}/attention/linear_1" for i in range(self.config.layers))
        return Cache(self.config, [self.heads(self.linear(x, name), 2) for name in of_layers], self.xp)

    def logits(self, tokens: Array, cache: Cache, attention: Attention) -> Array:
        """Run the decoder on the next words of each recording, and return what follows the last ones.

        Parameters
        ----------
        tokens : array, shape (batch, new), int
        cache : Cache
            Gets the keys and values of the new words.
        attention : function
            `flash_attention` or `naive_attention`.

        Returns
        -------
        array, shape (batch, vocabulary), float32
        """
        batch, new = tokens.shape
        before, cache.words = cache.words, cache.words + new
        lengths = self.xp.full(batch, cache.words, np.int32)
        table = self.weights["decoder/embeddings/weight"]
        x = table[tokens] + self.weights["decoder/position_encodings/encodings"][before : cache.words]
        for i, (k_cache, v_cache, of_sounds) in enumerate(zip(cache.k, cache.v, cache.of_sounds)):
            own, across = f"decoder/layer_{i}/self_attention", f"decoder/layer_{i}/attention"
            q, k, v = self.heads(self.linear(self.normalised(x, own), f"{own}/linear_0"), 3)
            cupy_flash.append_kv(k_cache, v_cache, k, v, before, layout="bshd", backend=self.backend)
            x = x + self.linear(attention(q, k_cache, v_cache, lengths).reshape(x.shape), f"{own}/linear_1")
            [q] = self.heads(self.linear(self.normalised(x, across), f"{across}/linear_0"), 1)
            x = x + self.linear(attention(q, *of_sounds, None).reshape(x.shape), f"{across}/linear_2")
            x = x + self.fed_forward(x, f"decoder/layer_{i}")
        return self.normalised(x[:, -1], "decoder") @ table.T

    def heads(self, x: Array, parts: int) -> Array:
        """Cut rows into `parts`, and these into heads: (parts, batch, rows, heads, dim), which is a view."""
        return self.xp.moveaxis(x.reshape(*x.shape[:2], parts, self.config.heads, -1), 2, 0)

    def fed_forward(self, x: Array, layer: str) -> Array:
        y = self.linear(self.normalised(x, f"{layer}/ffn"), f"{layer}/ffn/linear_0")
        return self.linear(gelu(y, self.xp), f"{layer}/ffn/linear_1")

    def convolved(self, x: Array, name: str, stride: int) -> Array:
        """Convolve the rows of x (batch, rows, channels) with windows of three, as one matrix product."""
        padded = self.xp.pad(x, ((0, 0), (1, 1), (0, 0)))
        windows = self.xp.concatenate([padded[:, i : i + x.shape[1] : stride] for i in range(3)], axis=-1)
        kernel = self.weights[f"{name}/weight"].transpose(2, 1, 0)  # (3, channels, width)
        return windows @ kernel.reshape(-1, kernel.shape[-1]) + self.weights[f"{name}/bias"]

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}/weight"].T + self.weights[f"{name}/bias"]

    def normalised(self, x: Array, name: str) -> Array:
        """Normalise rows to mean 0 and variance 1, then apply the learned gain and offset."""
        x = x - x.mean(-1, keepdims=True)
        x = x / self.xp.sqrt((x * x).mean(-1, keepdims=True) + self.config.epsilon)
        return x * self.weights[f"{name}/layer_norm/gamma"] + self.weights[f"{name}/layer_norm/beta"]


def make_model(config: Config, weights: Iterable[tuple[str, np.ndarray]], xp: ModuleType = np, backend: str = "auto") -> Model:
    """Put weights where the work will be; what is not of `config` is left out."""
    shapes = config.shapes
    there = {name: xp.asarray(x, np.float32) for name, x in weights if shapes.get(name) == x.shape}
    missing = shapes.keys() - there.keys()
    if missing:
        raise ValueError(f"weights: expected those of config.shapes, got none of this shape for {', '.join(sorted(missing))}")
    return Model(xp, config, there, backend)


TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def read_weights(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """Read the arrays of a model file of CTranslate2, version 6: names, shapes and elements one behind the other."""
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        at += struct.calcsize(kind)
        return struct.unpack_from(f"<{kind}", data, at - struct.calcsize(kind))[0]

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return data[at - size : at - 1].decode()  # ends in a zero

    version, _name, _revision, count = number("I"), text(), number("I"), number("I")
    if version != 6:
        raise ValueError(f"data: expected a file of version 6, got {version}")
    for _ in range(count):
        name, shape = text(), tuple(number("I") for _ in range(number("B")))
        kind, size = TYPES[number("B")], number("I")
        yield name, np.frombuffer(data, kind, math.prod(shape), at).reshape(shape)
        at += size


def config_of(weights: Weights) -> Config:
    """The sizes of a model, by its weights."""
    mels = weights["encoder/conv1/weight"].shape[1]
    hidden, width = weights["encoder/layer_0/ffn/linear_0/weight"].shape
    layers = sum(name.startswith("decoder/layer_") and name.endswith("/ffn/linear_0/weight") for name in weights)
    rows = {part: len(weights[f"{part}/position_encodings/encodings"]) for part in ("encoder", "decoder")}
    vocabulary = len(weights["decoder/embeddings/weight"])
    heads = int(weights["decoder/num_heads"])
    return Config(layers, heads, width, hidden, vocabulary, rows["decoder"], rows["encoder"], mels)
