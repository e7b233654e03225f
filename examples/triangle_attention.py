"""Triangle attention, as AlphaFold has it, and what it is for: filling in distances of a protein that were hidden.

    python examples/triangle_attention.py

Every pair (i, j) of residues holds a vector. In triangle attention around the starting node the pair (i, j) looks at the pairs
(i, k), and how much it does is biased by the pair (j, k), which closes the triangle. So attention has the rows i as its batch, and
all of them share one bias, whose gradient is the sum over the rows. A gate decides how much of the result each pair takes.
This is algorithm 13 of the supplement to Jumper et al., "Highly accurate protein structure prediction with AlphaFold", Nature 596,
583, 2021. ``triangle_attention_vjp`` is the block; the model below it is a small one around two of them.

It learns from the distances of one small protein, crambin, whose coordinates are beside this file. Each step hides half of the
pairs; some pairs are hidden in all steps, and the model is judged by those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from char_lm import namespace
from train_char_lm import AdamW, array_module

import cupy_flash

Array = Any  # numpy.ndarray or cupy.ndarray
Weights = dict[str, Array]

LENGTH = 10.0  # angstroms: the unit of distances in the model
EDGES = np.arange(4, 22, 2) / LENGTH  # between the bins in which it is told a distance
FAR = 8  # separations along the chain that are told apart


def triangle_attention_vjp(z: Array, w: Weights, heads: int) -> tuple[Array, Callable[[Array], tuple[Array, Weights]]]:
    """Return what each pair takes from the pairs that start where it does, and the function for the gradients.

    Parameters
    ----------
    z : array, shape (n, n, dim)
        A vector for each pair.
    w : dict
        Weights as in `block_shapes`.
    heads : int
        A divisor of `dim`.

    Returns
    -------
    update : array, shape (n, n, dim)
        To be added to `z`.
    vjp : callable
        ``vjp(dupdate)`` returns the gradient of `z`, and those of the weights by their names.
    """
    xp = namespace(z)
    n, _, dim = z.shape
    y, norm_vjp = layer_norm_vjp(z.reshape(n * n, dim), w["gain"], w["offset"])
    split = (n, n, heads, dim // heads)  # a batch of rows, of which each has n queries and keys
    q, k, v = ((y @ w[name]).reshape(split) for name in ("query", "key", "value"))
    bias = xp.moveaxis((y @ w["bias"]).reshape(n, n, heads), -1, 0)  # (heads, j, k): the same for every row i
    gate = sigmoid(y @ w["gate"] + w["gate_offset"])
    out, attention_vjp = cupy_flash.attention_vjp(q, k, v, layout="bshd", bias=bias, wrt="bias")
    out = out.reshape(n * n, dim)
    gated = gate * out

    def vjp(dupdate: Array) -> tuple[Array, Weights]:
        dupdate = dupdate.reshape(n * n, dim)
        dgated = dupdate @ w["out"].T
        grads = attention_vjp((dgated * gate).reshape(split))
        dparts = {name: part.reshape(n * n, dim) for name, part in zip(("query", "key", "value"), grads)}
        dparts["bias"] = xp.moveaxis(grads.dbias, 0, -1).reshape(n * n, heads)  # already summed over the rows
        dparts["gate"] = dgated * out * gate * (1 - gate)
        dw = {name: y.T @ part for name, part in dparts.items()}
        dw |= {"gate_offset": dparts["gate"].sum(0), "out": gated.T @ dupdate, "out_offset": dupdate.sum(0)}
        dz, dw["gain"], dw["offset"] = norm_vjp(sum(part @ w[name].T for name, part in dparts.items()))
        return dz.reshape(z.shape), dw

    return (gated @ w["out"] + w["out_offset"]).reshape(z.shape), vjp


def block_shapes(dim: int, heads: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a block; matrices are ``(inputs, outputs)``."""
    square = {name: (dim, dim) for name in ("query", "key", "value", "gate", "out")}
    return {**square, "bias": (dim, heads), **{name: (dim,) for name in ("gain", "offset", "gate_offset", "out_offset")}}


def layer_norm_vjp(x: Array, gain: Array, offset: Array) -> tuple[Array, Callable]:
    """Return the rows of `x` with mean 0 and variance 1, times a gain, plus an offset."""
    x = x - x.mean(-1, keepdims=True)
    inverse = (namespace(x).square(x).mean(-1, keepdims=True) + 1e-5) ** -0.5
    normal = x * inverse

    def vjp(dy: Array) -> tuple[Array, Array, Array]:
        dx = dy * gain
        dx = (dx - dx.mean(-1, keepdims=True) - normal * (dx * normal).mean(-1, keepdims=True)) * inverse
        return dx, (dy * normal).sum(0), dy.sum(0)

    return normal * gain + offset, vjp


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``, which overflows nowhere as a tanh."""
    return (namespace(x).tanh(x / 2) + 1) / 2


# The model and what it learns


@dataclass(frozen=True)
class Model:
    """The sizes of a model: `layers` blocks over pairs of `dim` numbers."""

    layers: int = 2
    heads: int = 4
    dim: int = 32

    def initial_weights(self, seed: int, xp: Any = np) -> list[Weights]:
        """Return the weights: those of the first and last layer, then those of each block."""
        rng = np.random.default_rng(seed)
        inputs = len(EDGES) + 2 + 2 * FAR + 1
        ends = {"embed": (inputs, self.dim), "head": (self.dim, 1), "gain": (self.dim,), "offset": (self.dim,)}
        groups = [ends, *([block_shapes(self.dim, self.heads)] * self.layers)]
        made = [{name: rng.standard_normal(shape) * shape[0] ** -0.5 for name, shape in shapes.items()} for shapes in groups]
        for weights in made:
            for name in weights:
                if weights[name].ndim == 1:
                    weights[name] = np.full(weights[name].shape, float(name == "gain"))
        return [{name: xp.asarray(x, np.float32) for name, x in weights.items()} for weights in made]


def distances_vjp(model: Model, weights: list[Weights], features: Array) -> tuple[Array, Callable[[Array], list[Weights]]]:
    """Return the distances that the model expects, ``(n, n)``, from what it is told of each pair, ``(n, n, inputs)``."""
    ends, *blocks = weights
    z, vjps = features @ ends["embed"], []
    for w in blocks:
        update, vjp = triangle_attention_vjp(z, w, model.heads)
        z = z + update
        vjps.append(vjp)
    n, _, dim = z.shape
    y, norm_vjp = layer_norm_vjp(z.reshape(n * n, dim), ends["gain"], ends["offset"])

    def vjp(ddistances: Array) -> list[Weights]:
        dy = ddistances.reshape(n * n, 1)
        dends = {"head": y.T @ dy}
        dz, dends["gain"], dends["offset"] = norm_vjp(dy @ ends["head"].T)
        dz, dblocks = dz.reshape(z.shape), []
        for block_vjp in reversed(vjps):
            dz_block, dw = block_vjp(dz)
            dz = dz + dz_block
            dblocks.insert(0, dw)
        dends["embed"] = features.reshape(n * n, -1).T @ dz.reshape(n * n, dim)
        return [dends, *dblocks]

    return (y @ ends["head"]).reshape(n, n), vjp


def read_distances() -> np.ndarray:
    """Return the distances between the C-alpha atoms of crambin, in units of `LENGTH`: entry 1CRN of the Protein Data Bank."""
    places = np.loadtxt(Path(__file__).with_name("crambin.csv"), delimiter=",", skiprows=2, usecols=(2, 3, 4))
    return np.linalg.norm(places[:, None] - places, axis=-1).astype(np.float32) / LENGTH


def features_of(distances: Array, hidden: Array) -> Array:
    """Return what the model is told of each pair: a bin of the distance unless it is hidden, and the separation in the chain."""
    xp = namespace(distances)
    n = len(distances)
    bins = xp.where(hidden, len(EDGES) + 1, (distances[..., None] > xp.asarray(EDGES)).sum(-1))
    apart = xp.clip(xp.arange(n) - xp.arange(n)[:, None], -FAR, FAR) + FAR
    one_hot = [xp.eye(size, dtype=np.float32)[index] for size, index in ((len(EDGES) + 2, bins), (2 * FAR + 1, apart))]
    return xp.concatenate(one_hot, axis=-1)


def some_pairs(rng: np.random.Generator, n: int, share: float) -> np.ndarray:
    """Return which pairs are chosen, (i, j) whenever (j, i) is, of those that are no neighbours in the chain."""
    chosen = np.triu(rng.random((n, n)) < share, 2)
    return chosen | chosen.T


def error_by_separation(distances: np.ndarray, judged: np.ndarray) -> float:
    """Return the mean error of the guess that knows how far apart pairs are in the chain: the mean of the others of these."""
    n = len(distances)
    apart = abs(np.arange(n) - np.arange(n)[:, None])
    means = np.array([distances[(apart == d) & ~judged].mean() if ((apart == d) & ~judged).any() else 0 for d in range(n)])
    return float(abs(distances - means[apart])[judged].mean())


def train(
    model: Model, steps: int, rate: float, seed: int = 0, xp: Any = np, report: Callable[[int], None] = lambda step: None
) -> tuple[float, float, float]:
    """Train a model; return its mean error at first and at last, and that of the guess by separation, in angstroms."""
    rng = np.random.default_rng(seed)
    distances = read_distances()
    n = len(distances)
    judged = some_pairs(rng, n, 0.1)
    weights = model.initial_weights(seed, xp)
    optimizers = [{name: AdamW(x, decay=0) for name, x in group.items()} for group in weights]
    target = xp.asarray(distances)

    def error() -> float:
        found, _ = distances_vjp(model, weights, features_of(target, xp.asarray(judged)))
        return LENGTH * float(abs(found - target)[xp.asarray(judged)].mean())

    at_first = error()
    for step in range(steps):
        hidden = some_pairs(rng, n, 0.5)
        found, vjp = distances_vjp(model, weights, features_of(target, xp.asarray(hidden | judged)))
        asked = xp.asarray(hidden & ~judged)
        gradient = vjp(xp.where(asked, found - target, 0) / asked.sum(dtype=target.dtype))
        for optimizer, group in zip(optimizers, gradient):
            for name, dw in group.items():
                optimizer[name].step(dw, rate * (1 - step / steps))
        report(step)
    return at_first, error(), LENGTH * error_by_separation(distances, judged)


@click.command(help="Fill in distances of a small protein by triangle attention.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=1e-2, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(device: str, steps: int, rate: float, seed: int) -> None:
    with click.progressbar(length=steps, label="training") as bar:
        at_first, at_last, by_separation = train(Model(), steps, rate, seed, array_module(device), lambda step: bar.update(1))
    click.echo("mean error in the distances of pairs of crambin that were always hidden, in angstroms")
    click.echo(f"  {by_separation:.2f}  the mean distance at the same separation in the chain")
    click.echo(f"  {at_first:.2f}  the model before training")
    click.echo(f"  {at_last:.2f}  the model after {steps} steps")


if __name__ == "__main__":
    main()
