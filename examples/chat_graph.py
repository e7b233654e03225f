"""The step that finds a further token of each sequence, over arrays that stay where they are: on a GPU one CUDA graph of all of it.

A graph knows addresses and no numbers. So how long sequences are, in which pages they lie, and which tokens come next are read from
arrays by the kernels that it launches, and written there by the last of them: one graph serves all lengths. Read ``Decoder.step``
first; it is the same on NumPy, where it is called again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from chat_model import Array, Attention, Model, PagedCache


class Decoder:
    """Some sequences that get a token each whenever `advance` is called. To the model it is the `Step` that it computes.

    Parameters
    ----------
    model : Model
    cache : PagedCache
    attention : Attention
        One that reads lengths where they are, as `flash_attention` does.
    rows : int
        How many sequences there can be. A graph computes rows that have none as well, from no keys; without one they are left out.
    width : int
        How many pages a sequence can have.
    """

    is_even, last = True, None  # each row is its sequence's last one

    def __init__(self, model: Model, cache: PagedCache, attention: Attention, rows: int, width: int) -> None:
        xp = model.xp
        model = model if xp is np else replace(model, product=recordable_product(xp))
        self.model, self.cache, self.attention = model, cache, attention
        self.tokens, self.cached, self.new, self.lengths = (xp.zeros(rows, np.int32) for _ in range(4))
        self.pages = xp.zeros((rows, width), np.int32)
        self.logits = xp.zeros((rows, model.config.vocabulary), np.float32)
        self.advance: Callable[[], Any] = self.step if xp is np else Graph(xp, self.step)
        self.computed = rows

    @property
    def of_rows(self) -> dict[str, Array]:
        arrays = {"tokens": self.tokens, "positions": self.cached, "pages": self.pages, "new": self.new}
        return {name: array[: self.computed] for name, array in arrays.items()}

    @property
    def of_sequences(self) -> dict[str, Array]:
        return {"pages": self.pages[: self.computed], "seqlens_kv": self.lengths[: self.computed]}

    def step(self) -> None:
        """Compute what follows the last token of each sequence. The likeliest token is the next one."""
        logits = self.model.logits(self.cache, self, self.attention)
        self.logits[: self.computed] = logits
        self.tokens[: self.computed] = logits.argmax(-1)
        self.cached += self.new  # 1 for a row with a sequence, and 0 for others
        self.lengths += self.new

    def place(self, tokens: Sequence[int], cached: Sequence[int], pages: np.ndarray) -> None:
        """Say which sequences there are: the last token of each, how many rows the cache has of it, and its pages."""
        if self.model.xp is np:
            self.computed = len(tokens)
        lengths = np.array(cached) + 1
        arrays = ((self.tokens, tokens), (self.cached, cached), (self.new, 1), (self.lengths, lengths), (self.pages, pages))
        for array, given in arrays:
            filled = np.zeros(array.shape, np.int32)
            filled[: len(tokens)] = given
            array[...] = self.model.xp.asarray(filled)


def recordable_product(xp: ModuleType) -> Callable[[Array, Array], Array]:
    """Return a product of a few rows by a matrix for CUDA graphs, which CuPy lets record no call of cuBLAS.

    It reads the matrix once for each row, most of them from the L2 cache.
    """
    sums = xp.ReductionKernel("T x, T w", "T y", "x * w", "a + b", "y = a", "0", "product_of_rows")
    return lambda x, w: sums(x[:, None], w, axis=-1)


class Graph:
    """What is computed when it is called first, recorded as a CUDA graph at the second time, and launched from then on.

    The first time compiles kernels, which cannot be recorded. Arrays that come and go inside lie in memory of its
    own: the graph writes there again in each launch, so nobody else may be given it.

    Parameters
    ----------
    xp : module
        ``cupy``.
    step : function
        Launches the same kernels on the same arrays each time, and reads nothing back. It has the arrays that the graph knows by
        their addresses alone, and is kept.
    """

    def __init__(self, xp: ModuleType, step: Callable[[], None]) -> None:
        self._xp, self._step = xp, step
        self._stream = xp.cuda.Stream(non_blocking=True)  # the default stream cannot be recorded
        self._memory = xp.cuda.MemoryPool()
        self._is_ready, self._graph = False, None

    def __call__(self) -> None:
        outside = self._xp.cuda.get_current_stream()
        self._stream.wait_event(outside.record())
        with self._stream, self._xp.cuda.using_allocator(self._memory.malloc):
            if self._is_ready and self._graph is None:
                self._stream.begin_capture()
                try:
                    self._step()
                finally:
                    graph = self._stream.end_capture()
                self._graph = graph
            if self._graph is None:
                self._step()
                self._is_ready = True
            else:
                self._graph.launch()
        outside.wait_event(self._stream.record())
