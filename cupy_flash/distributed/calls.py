"""The calls of one device: attention of a block of pairs, and its gradients, told where the block lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from ..call.backward import operands, prepared_backward
from ..call.captured import Captured, captured
from ..call.forward import ForwardOperands, prepared
from ..problem.backward import Gradients
from ..problem.dropout import Place, check_place_in_kernels
from .blocks import Block, Group, fused, grouped
from .places import Placed, placed
from .sharding import Run
from .whole import Whole

OF_BLOCKS = ("q_idx", "kv_idx", "q_len", "kv_len")
OF_GROUPS = ("b",)  # counted from the first sequence of a group
OF_HEADS = ("h", "h_kv")


def check_dropout(whole: Whole, scheme: str) -> None:
    """Refuse dropout that kernels cannot number on some rank; all ranks find the same.

    Raises
    ------
    UnsupportedError
    """
    p = whole.problem
    if not p.scores.dropout or p.backend == "numpy" or whole.size == 1:
        return
    if scheme == "ulysses":
        check_place_in_kernels(Place(0, 0, 0, p.heads_q), p.batch, p.heads_q // whole.size)
        return
    for rank in range(whole.size):
        for runs in whole.kv_runs:
            for block in whole.blocks(runs, rank):
                check_place_in_kernels(Place(block.q_from, block.kv_from, 0, p.heads_q), p.batch, p.heads_q)


@dataclass
class Calls:
    """What computes parts of a whole on this rank.

    Parameters
    ----------
    whole : Whole
    given : Captured
        The arrays of the user's call, of which a gradient with a name of `wrt` is added up in `sums`.
    deterministic : bool
        For gradients.
    """

    whole: Whole
    given: Captured
    deterministic: bool = False
    sums: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        views = dict(zip(self.given.names, self.given.views))
        scores = self.whole.problem.scores
        self._arrays = {name: views[label] for name, label in zip(scores.captured, scores.names[len(scores.operands) :])}
        self._slopes, self._seed = views.get("alibi_slopes"), views.get("seed")
        self._lengths = {name: views[name] for name in ("cu_seqlens_q", "cu_seqlens_kv") if name in views}
        shape = () if self._slopes is None else self._slopes.shape
        of_blocks = (*OF_BLOCKS, "b") if self.whole.packed else OF_BLOCKS
        moving = of_blocks, OF_GROUPS, OF_HEADS
        self._of_blocks, self._of_groups, self._of_heads = (placed(scores, shape, names) for names in moving)

    def blocks(self, kv_runs: Sequence[Run]) -> list[Block | Group]:
        """What is computed with keys that lie so, in as few calls as can be."""
        blocks = fused(self.whole.blocks(kv_runs), self.whole.movable)
        if not self.whole.packed or (self.whole.wrt and self.whole.problem.backend != "numpy"):
            return blocks  # of packed sequences kernels have no gradients of what scores read
        return grouped(blocks)

    def forward(self, block: Block | Group, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Result and log-sum-exp of a block, from its own rows and keys, without sinks."""
        if self.whole.widens:
            q, k, v = (x.astype(numpy.float32) for x in (q, k, v))
        others, options, _ = self._told(block)
        given = ForwardOperands(q, k, v, None, None, None, others)
        return prepared(given, {**options, "return_lse": True}).run(given)

    def backward(self, block: Block | Group, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any) -> Gradients:
        """Gradients of a block, from its rows of the results of the whole."""
        if self.whole.widens:
            dout, q, k, v, out = (x.astype(numpy.float32) for x in (dout, q, k, v, out))
        return self._gradients((dout, q, k, v, out, lse, dlse), *self._told(block))

    def forward_of_heads(self, heads: tuple[int, int], q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any) -> None:
        """Attention of all rows for some heads: the first query head and the first key head are given, results are written."""
        others = self._captured(self._of_heads, dict(zip(OF_HEADS, heads)), self._lengths)
        given = ForwardOperands(q, k, v, out, lse, sinks, others)
        prepared(given, {**self._options_of_heads(heads), "return_lse": True}).run(given)

    def backward_of_heads(self, heads: tuple[int, int], inputs: tuple[Any, ...]) -> Gradients:
        """Gradients of all rows for some heads, from dout, q, k, v, out, lse and dlse."""
        if self.whole.widens:  # a key head may be on several ranks, each of which has a part of its gradient
            inputs = (*(x.astype(numpy.float32) for x in inputs[:5]), *inputs[5:])
        others = self._captured(self._of_heads, dict(zip(OF_HEADS, heads)), self._lengths)
        return self._gradients(inputs, others, self._options_of_heads(heads), self._of_heads)

    def _gradients(self, inputs: tuple[Any, ...], others: Captured, options: dict[str, Any], of: Placed) -> Gradients:
        given = operands(*inputs, None, None, None, None, None, others=others)
        own = {name: of.slopes if name == "alibi_slopes" and name not in self._arrays else name for name in self.whole.wrt}
        options = {**options, "wrt": tuple(own.values()), "deterministic": self.deterministic}
        found = prepared_backward(given, options).run(given)
        for name, theirs in own.items():
            part = found.darrays[theirs].astype(self.whole.wide)
            self.sums[name] = self.sums[name] + part if name in self.sums else part
        return found

    def _told(self, block: Block | Group) -> tuple[Captured, dict[str, Any], Placed]:
        """What a call of a block is told: arrays, options, and which expressions these are for."""
        if isinstance(block, Group):
            offsets = {name: numpy.array(ends) for name, ends in block.offsets.items()}
            others = self._captured(self._of_groups, {"b": block.span.number}, offsets)
            return others, {**self._options_of_whole(), **self._place(0, 0, block.span.number)}, self._of_groups
        others = self._captured(self._of_blocks, self._at(block))
        place = self._place(block.q_from, block.kv_from, block.span.number)
        return others, {**self._options(block.window, block.prefix), **place}, self._of_blocks

    def _captured(self, of: Placed, at: Mapping[str, int], lengths: Mapping[str, Any] | None = None) -> Captured:
        arrays = of.arrays(self._arrays, self._slopes, at)
        return captured(score=of.score, mask=of.mask, arrays=arrays or None, seed=self._seed, lengths=dict(lengths or {}))

    def _at(self, block: Block) -> dict[str, int]:
        span = block.span
        lengths = span.q[1] - span.q[0], span.kv[1] - span.kv[0]
        return dict(zip(OF_BLOCKS, (block.q_from, block.kv_from, *lengths))) | {"b": span.number}

    def _options(self, window: tuple[int | None, int | None] | None, prefix: int) -> dict[str, Any]:
        p = self.whole.problem
        return {
            "scale": p.scale,
            "window": window,
            "prefix": prefix,
            "softcap": p.softcap,
            "dropout": self.whole.asked.dropout,
            "precision": p.precision,
            "backend": p.backend,
            "top_left": True,
        }

    def _options_of_heads(self, heads: tuple[int, int]) -> dict[str, Any]:
        p = self.whole.problem
        return self._options_of_whole() | ({"place": Place(0, 0, heads[0], p.heads_q)} if p.scores.dropout else {})

    def _options_of_whole(self) -> dict[str, Any]:
        asked = self.whole.asked
        return {**self._options(asked.window, asked.prefix), "causal": asked.causal, "top_left": asked.top_left}

    def _place(self, q: int, kv: int, sequence: int) -> dict[str, Any]:
        """Where dropout numbers pairs from, if not from 0 on, as kernels do."""
        p, head = self.whole.problem, sequence * self.whole.problem.heads_q
        return {"place": Place(q, kv, head, p.heads_q)} if p.scores.dropout and (q or kv or head) else {}
