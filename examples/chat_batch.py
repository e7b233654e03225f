"""Prompts that a model continues together: one that ends gives its pages back, and the next one takes them.

That is continuous batching. Read ``Batch.step`` first. `chat.py` is the command, and `chat_model.py` has the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
from chat_graph import Decoder
from chat_model import Array, Attention, Model, PagedCache, Step, flash_attention


@dataclass(frozen=True)
class Prompt:
    """What is to be continued, by how many tokens at most, and before which token."""

    tokens: list[int]
    most: int
    stop: int | None = None


@dataclass(frozen=True)
class Token:
    """A token that a batch has found: for which prompt, from which logits, and whether it is the prompt's last one."""

    prompt: int
    token: int
    logits: Array
    last: bool


@dataclass(eq=False)
class _Running:
    """A prompt that has pages."""

    number: int
    prompt: Prompt
    pages: np.ndarray
    choose: Callable[[Array], int]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # how many of them have keys and values in the cache

    @property
    def reads_prompt(self) -> bool:
        return self.cached < len(self.prompt.tokens)


class Batch:
    """Prompts that are continued together; one that ends makes room for the next.

    Parameters
    ----------
    model : Model
    cache : PagedCache
        Any number of pages that the longest prompt and its continuation fit into. How many prompts run together follows from it.
    prompts : sequence of Prompt
    attention : Attention
    chooser : function
        From the number of a prompt to a function from logits to a token. By default the likeliest one is taken.
    most : int
        How many prompts run together.
    chunk : int
        How many tokens of prompts are read in one step. So a long prompt does not keep the others waiting for long.
    replay : bool
        Whether further tokens are found by a `Decoder`, on a GPU from one graph. What `attention` computes has to allow that.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        prompts: Sequence[Prompt],
        attention: Attention = flash_attention,
        chooser: Callable[[int], Callable[[Array], int]] = lambda number: greedy,
        most: int = 8,
        chunk: int = 256,
        replay: bool = False,
    ) -> None:
        self.model, self.cache, self.attention, self.chooser = model, cache, attention, chooser
        self.most, self.chunk = most, chunk
        self.running: list[_Running] = []
        self.waiting = deque(enumerate(prompts))
        for number, prompt in self.waiting:
            _check(number, prompt, model.config.context, len(cache.free) * cache.page_size)
        # Tables of pages have one width, so that all steps of as many rows are alike.
        self.width = max((cache.pages_for(rows_of(prompt)) for prompt in prompts), default=1)
        self.decoder = Decoder(model, cache, attention, min(most, len(prompts)), self.width) if replay and prompts else None
        self.placed: list[_Running] = []  # whose tokens and lengths the decoder has

    def __iter__(self) -> Iterator[Token]:
        while self.waiting or self.running:
            yield from self.step()

    def step(self) -> list[Token]:
        """One token more for each prompt that has been read, and a part of those that have not been, in one call for all each."""
        self._admit()
        found = []
        decoding = [one for one in self.running if not one.reads_prompt]
        if decoding:
            found += self._compute(decoding, [1] * len(decoding)) if self.decoder is None else self._decode(decoding)
        counts, left = [], self.chunk
        reading = [one for one in self.running if one.reads_prompt]
        for one in reading:
            counts.append(min(len(one.tokens) - one.cached, left))
            left -= counts[-1]
        reading, counts = reading[: np.count_nonzero(counts)], [count for count in counts if count]
        if reading:
            found += self._compute(reading, counts)
        return found

    def _admit(self) -> None:
        """Give waiting prompts the pages that they will need at most, as long as there are enough."""
        while self.waiting and len(self.running) < self.most:
            number, prompt = self.waiting[0]
            pages = self.cache.take(self.cache.pages_for(rows_of(prompt)))
            if pages is None:
                return
            self.waiting.popleft()
            table = np.zeros(self.width, np.int32)  # entries behind a sequence's pages are not read
            table[: len(pages)] = pages
            self.running.append(_Running(number, prompt, table, self.chooser(number), list(prompt.tokens)))

    def _compute(self, sequences: list[_Running], counts: list[int]) -> list[Token]:
        """Read so many further tokens of each sequence, and choose one more for those that have none left."""
        tokens = [one.tokens[one.cached : one.cached + count] for one, count in zip(sequences, counts)]
        step = Step(self.model.xp, tokens, [one.cached for one in sequences], np.stack([one.pages for one in sequences]))
        return self._choose(sequences, counts, self.model.logits(self.cache, step, self.attention))

    def _decode(self, sequences: list[_Running]) -> list[Token]:
        """The same of one token each, by the decoder, which need not be told what it has found out itself."""
        decoder, count = self.decoder, len(sequences)
        if sequences != self.placed:
            pages = np.stack([one.pages for one in sequences])
            decoder.place([one.tokens[-1] for one in sequences], [one.cached for one in sequences], pages)
        decoder.advance()
        likeliest = decoder.tokens[:count].tolist()  # all that the host reads, and waits for
        found = self._choose(sequences, [1] * count, decoder.logits[:count].copy(), likeliest)
        self.placed = [one for one, token in zip(sequences, likeliest) if one.tokens[-1] == token]  # others were drawn otherwise
        return found

    def _choose(
        self, sequences: list[_Running], counts: list[int], logits: Array, likeliest: Sequence[int] | None = None
    ) -> list[Token]:
        """The next token of each sequence of which no rows are left to compute."""
        found = []
        for i, (one, count, row) in enumerate(zip(sequences, counts, logits)):
            one.cached += count
            if one.cached < len(one.tokens):
                continue
            one.tokens.append(likeliest[i] if likeliest and one.choose is greedy else one.choose(row))
            last = one.tokens[-1] == one.prompt.stop or len(one.tokens) == len(one.prompt.tokens) + one.prompt.most
            found.append(Token(one.number, one.tokens[-1], row, last))
            if last:
                self.running.remove(one)
                self.cache.give_back(one.pages[: self.cache.pages_for(rows_of(one.prompt))].tolist())
        return found


def rows_of(prompt: Prompt) -> int:
    """How many rows of a cache a prompt and its continuation take at most: the last token is not read any more."""
    return len(prompt.tokens) + prompt.most - 1


def _check(number: int, prompt: Prompt, context: int, capacity: int) -> None:
    if not prompt.tokens or prompt.most < 1:
        raise ValueError(f"prompts: expected tokens, and at least one more to find, got {prompt} for prompt {number}")
    for rows, what in ((context, "positions that the model knows"), (capacity, "rows of the cache")):
        if rows_of(prompt) > rows:
            raise ValueError(f"prompts: expected at most {rows} tokens, the {what}, got {rows_of(prompt)} for prompt {number}")


def greedy(logits: Array) -> int:
    """Choose the likeliest token."""
    return int(logits.argmax())


def drawing(xp: ModuleType, temperature: float, seed: int, number: int) -> Callable[[Array], int]:
    """Return what draws the tokens of a prompt: the same ones whatever else is in the batch, as far as roundings allow."""
    rng = np.random.default_rng([seed, number])
    # The largest sum of logits and Gumbel noise is a draw from their softmax.
    return lambda logits: int((logits / temperature + xp.asarray(rng.gumbel(size=logits.shape))).argmax())
