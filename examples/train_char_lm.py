"""Train a small language model from scratch, byte by byte, on the source code of Python's standard library.

    python examples/train_char_lm.py --sample 400
    python examples/train_char_lm.py --attention flash --attention naive --plot loss.png

The model and its gradients are in `char_lm.py` beside this file. Here are the text, AdamW, the loop and the command.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
from char_lm import ATTENTION, BYTES, DTYPES, Array, Model, logits_vjp, loss_vjp, namespace

Text = tuple[np.ndarray, np.ndarray]  # uint8: for training, for validation


@dataclass(frozen=True)
class Training:
    """How a model is trained: `batch` sequences of `seq` bytes a step, until `steps` or `seconds` have passed."""

    seq: int
    batch: int
    steps: int
    rate: float
    seconds: float = math.inf
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """How a training went. Losses are in nats per byte."""

    losses: list[float]  # of each step
    seconds: list[float]  # of each step
    tokens_per_second: float  # in the median step, so that compiling kernels in the first does not count
    validation_loss: float
    weights: Array


# device: what it can train in a minute
MODELS = {"cpu": Model(layers=2, heads=2, dim=64), "cuda": Model(layers=6, heads=8, dim=512, dtype="bfloat16")}
TRAININGS = {"cpu": Training(seq=128, batch=16, steps=300, rate=1e-2), "cuda": Training(seq=8192, batch=4, steps=1000, rate=1e-3)}


class AdamW:
    """Adam with decoupled weight decay and gradients clipped to norm 1, on one vector of weights, changed in place."""

    def __init__(self, weights: Array, *, beta1: float = 0.9, beta2: float = 0.95, decay: float = 0.1) -> None:
        self.weights, self.beta1, self.beta2, self.decay = weights, beta1, beta2, decay
        self.mean, self.square, self.steps = weights * 0, weights * 0, 0

    def step(self, grad: Array, rate: float) -> None:
        xp = namespace(grad)
        self.steps += 1
        grad = grad / xp.maximum(1, xp.sqrt((grad * grad).sum()))
        self.mean += (1 - self.beta1) * (grad - self.mean)
        self.square += (1 - self.beta2) * (grad * grad - self.square)
        mean = self.mean / (1 - self.beta1**self.steps)
        square = self.square / (1 - self.beta2**self.steps)
        self.weights -= rate * (mean / (xp.sqrt(square) + 1e-8) + self.decay * self.weights)


def train(
    model: Model,
    training: Training,
    text: Text,
    xp: ModuleType = np,
    report: Callable[[float, float], None] = lambda progress, loss: None,
) -> Run:
    """Train `model`.

    Parameters
    ----------
    model, training
        The weights and AdamW's state are float32, or float64 if that is the model's dtype. The seed decides the initial
        weights and the order of the text, on every device alike.
    text : (numpy.ndarray, numpy.ndarray)
        Bytes for training and for validation, uint8, each longer than a sequence; see `read_text`.
    xp : module
        ``numpy`` or ``cupy``: where the work is done.
    report : function
        Called after every step with the progress, from 0 to 1, and the loss.
    """
    data, validation = (xp.asarray(part) for part in text)
    weights = xp.asarray(model.initial_weights(training.seed), np.promote_types(DTYPES[model.dtype], np.float32))
    optimizer = AdamW(weights)
    rng = np.random.default_rng(training.seed)
    losses: list[float] = []
    times = [time.perf_counter()]
    progress = 0.0
    while progress < 1:
        starts = rng.integers(0, len(data) - training.seq, training.batch)
        loss, vjp = loss_vjp(model, weights, *windows(data, starts, training.seq))
        # The rate rises for 20 steps, then falls along a cosine.
        warm = min(1, (len(losses) + 1) / 20)
        optimizer.step(vjp(), training.rate * warm * 0.5 * (1 + math.cos(math.pi * progress)))
        losses.append(float(loss))  # waits for the device: the step ends here
        times.append(time.perf_counter())
        progress = min(1, max(len(losses) / training.steps, (times[-1] - times[0]) / training.seconds))
        report(progress, losses[-1])

    seconds = np.diff(times).tolist()
    speed = training.batch * training.seq / statistics.median(seconds)
    return Run(losses, seconds, speed, mean_loss(model, weights, validation, training), weights)


def windows(text: Array, starts: np.ndarray, seq: int) -> tuple[Array, Array]:
    """Return the sequences of `text` at `starts`, and what comes next at each of their places."""
    xp = namespace(text)
    found = text[xp.asarray(starts)[:, None] + xp.arange(seq + 1)]
    return found[:, :-1], found[:, 1:]


def mean_loss(model: Model, weights: Array, text: Array, training: Training) -> float:
    """Return the mean loss over four batches of evenly spaced sequences."""
    starts = np.linspace(0, len(text) - training.seq - 1, 4 * training.batch).astype(int).reshape(4, -1)
    return statistics.mean(float(loss_vjp(model, weights, *windows(text, rows, training.seq))[0]) for rows in starts)


def generate(model: Model, weights: Array, prompt: bytes, length: int, seq: int, seed: int = 0) -> bytes:
    """Return the `length` bytes that continue `prompt`, each drawn from what the model expects after the last `seq` ones."""
    xp = namespace(weights)
    rng = np.random.default_rng(seed)
    text = bytearray(prompt)
    for _ in range(length):
        tokens = xp.asarray(np.frombuffer(text[-seq:], np.uint8)[None])
        logits = logits_vjp(model, weights, tokens)[0][-1]
        text.append(int((logits + xp.asarray(rng.gumbel(size=BYTES))).argmax()))  # adding Gumbel noise draws from the softmax
    return bytes(text[len(prompt) :])


def read_text() -> Text:
    """Return the bytes of the standard library's modules; every 16th file is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = sorted(path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts))
    if not files:
        raise FileNotFoundError(f"text: expected Python's own sources under {root}, got none")
    parts = ([path for i, path in enumerate(files) if (i % 16 == 0) == held_out] for held_out in (False, True))
    training, validation = (np.frombuffer(b"".join(path.read_bytes() for path in part), np.uint8) for part in parts)
    return training, validation


def counting_losses(text: Text) -> tuple[float, float]:
    """Return the validation loss of knowing how often each byte occurs, and of knowing how often it follows each other byte."""
    training, validation = text
    pairs = np.bincount(training[:-1] * np.int64(BYTES) + training[1:], minlength=BYTES**2).reshape(BYTES, BYTES) + 1 / BYTES
    single = pairs.sum(axis=0)
    unigram = -np.log(single / single.sum())[validation].mean()
    bigram = -np.log(pairs / pairs.sum(axis=1, keepdims=True))[validation[:-1], validation[1:]].mean()
    return float(unigram), float(bigram)


def plot(runs: dict[str, Run], unigram: float, bigram: float, path: str) -> None:
    """Draw the losses of `runs`, smoothed, against the seconds they took."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, run in runs.items():
        width = max(1, len(run.losses) // 50)
        axes.plot(np.cumsum(run.seconds)[width - 1 :], np.convolve(run.losses, np.full(width, 1 / width), "valid"), label=name)
    for name, loss in (("unigram", unigram), ("bigram", bigram)):
        axes.axhline(loss, color="gray", linewidth=0.8)
        axes.annotate(name, (0, loss), xytext=(2, 2), textcoords="offset points", color="gray")
    axes.set(xlabel="seconds", ylabel="nats per byte", ylim=(0, None))
    axes.legend(title="attention")
    figure.savefig(path)


def array_module(device: str) -> ModuleType:
    """Return ``cupy`` where `device` wants a GPU, or may use one that is there; ``numpy`` otherwise."""
    if device != "cpu":
        try:
            import cupy

            if cupy.cuda.is_available():
                return cupy
        except ImportError:
            pass
        if device == "cuda":
            raise click.UsageError("--device cuda needs CuPy and a CUDA GPU; --device cpu needs neither")
    return np


SIZE = click.IntRange(min=1)


HELP = """Train a language model on Python's standard library. What is not given depends on the device.

Without a GPU the 300 steps take half a minute, and what it writes then are letters in a likely order. With --steps 3000 they are
lines that look like Python, of words that mostly are. Matrices are small there, so set OPENBLAS_NUM_THREADS=1 before: with more
threads NumPy's multiplications wait for each other, which takes most of the time where another program has a processor.
"""


@click.command(help=HELP)
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--attention", type=click.Choice(list(ATTENTION)), multiple=True, default=["flash"], help="Twice to compare them.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of the activations.")
@click.option("--layers", type=SIZE)
@click.option("--heads", type=SIZE)
@click.option("--dim", type=SIZE, help="A multiple of twice the heads.")
@click.option("--seq", type=SIZE, help="Bytes in a sequence.")
@click.option("--batch", type=SIZE, help="Sequences in a step.")
@click.option("--steps", type=SIZE)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="The highest learning rate.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="End sooner than --steps, with the whole schedule.")
@click.option("--seed", type=click.IntRange(min=0))
@click.option("--sample", type=click.IntRange(min=0), default=0, help="Let the model continue held-out text by that many bytes.")
@click.option("--plot", "picture", type=click.Path(dir_okay=False), help="Draw the losses into this file; needs matplotlib.")
def main(device: str, attention: tuple[str, ...], sample: int, picture: str | None, **given: Any) -> None:
    xp = array_module(device)
    kind = "cpu" if xp is np else "cuda"
    if kind == "cpu" and given["dtype"] == "bfloat16":
        raise click.UsageError("--dtype bfloat16 needs a GPU: NumPy does not multiply bfloat16 matrices")
    given = {name: value for name, value in given.items() if value is not None}
    try:
        model = replace(MODELS[kind], **{name: given.pop(name) for name in ("layers", "heads", "dim", "dtype") if name in given})
    except ValueError as error:
        raise click.UsageError(f"--{error}") from error
    training = replace(TRAININGS[kind], **given)

    text = read_text()
    unigram, bigram = counting_losses(text)
    click.echo(f"{model}\n{training}\n{sum(map(math.prod, model.shapes.values())):,} weights, {len(text[0]):,} bytes of text")
    click.echo(f"validation loss of counts: {unigram:.3f} of bytes, {bigram:.3f} of pairs of bytes, in nats per byte")
    runs = {}
    for name in attention:
        with click.progressbar(length=1000, label=name, item_show_func=lambda loss: loss and f"loss {loss:.3f}") as bar:

            def report(progress: float, loss: float, bar: Any = bar) -> None:
                bar.update(round(1000 * progress) - bar.pos, loss)

            run = runs[name] = train(replace(model, attention=name), training, text, xp, report)
        click.echo(
            f"{name}: {run.tokens_per_second:,.0f} bytes/s, {sum(run.seconds):.1f} s for {len(run.losses)} steps, "
            f"loss {run.losses[0]:.3f} at first, {run.losses[-1]:.3f} at last, {run.validation_loss:.3f} in validation"
        )
    if picture:
        plot(runs, unigram, bigram, picture)
    if sample:
        prompt = text[1][: training.seq // 2].tobytes()
        written = generate(model, runs[attention[0]].weights, prompt, sample, training.seq, training.seed)
        before, after = (part.decode(errors="replace") for part in (prompt[-80:], written))
        click.echo(f"...{before} [from here on it is the model's] {after}")


if __name__ == "__main__":
    main()
