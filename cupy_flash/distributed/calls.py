"""The calls of one device: attention of a block of pairs, and its gradients, told where the block lies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from ..call.backward import operands, prepared_backward
from ..call.captured import NOTHING, Captured, captured
from ..call.forward import ForwardOperands, prepared
from ..problem.dropout import Place, check_place_in_kernels
from .blocks import Block, Group, Interval, fused, grouped
from .growing import store
from .merging import Order, order_of
from .places import Placed, placed
from .rows import zeros_like
from .sharding import Run
from .timeline import noted
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


@dataclass(frozen=True)
class Job:
    """One call, with all that it is told but arrays: made once for a whole, and found again.

    Parameters
    ----------
    rows, keys : (int, int)
        Its queries, as rows of what this rank has, and its keys, as rows of where they lie.
    key_at : int
        The position in the sequence of the first key.
    options : dict
    of : Placed
        The expressions.
    at : dict of str to int
        Where it is.
    lengths : dict of str to array
        Offsets of packed sequences.
    """

    rows: Interval
    keys: Interval
    key_at: int
    options: dict[str, Any]
    of: Placed
    at: Mapping[str, int]
    lengths: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def options_of_part(self) -> dict[str, Any]:
        """The options where results are parts, which are float32 where inputs have 16 bits."""
        return {**self.options, "float32_results": True}


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
        self._reads = bool(self._arrays) or self._slopes is not None or self._seed is not None

    def jobs(self, name: Any, kv_runs: Sequence[Run], beside_messages: bool = False) -> tuple[Job, ...]:
        """What is computed with keys that lie so, in as few calls as can be; found again by a name."""
        return self.jobs_of(name, lambda: fused(self.whole.blocks(kv_runs), self.whole.movable), beside_messages)

    def jobs_of(self, name: Any, blocks: Callable[[], Sequence[Block]], beside_messages: bool = False) -> tuple[Job, ...]:
        """The calls that compute blocks, perhaps while messages are under way; found again by a name."""
        known = self.whole.known
        found = known.get(("jobs", name))
        if found is None:
            found = known["jobs", name] = tuple(self._job(block, beside_messages) for block in calls_of(self.whole, blocks()))
        return found

    def order(
        self, name: Any, parts: Sequence[Interval], total: int, narrow: bool, direct: Sequence[bool] | None = None,
        adds: bool = False,
    ) -> Order:  # fmt: skip
        """How parts of these rows become one result; found again by a name. Gradients that are parts can be added."""
        known = self.whole.known
        found = known.get(("order", name, narrow))
        if found is None:
            direct = [True] * len(parts) if direct is None else direct
            found = known["order", name, narrow] = order_of(parts, total, direct, narrow, adds and self.whole.narrow)
        return found

    def forward(self, job: Job, q: Any, k: Any, v: Any, room: tuple[Any, Any]) -> tuple[Any, Any]:
        """Result and log-sum-exp of a job, from its own rows and keys, without sinks; where there is room for them, if there is.

        Without room for it, or if that is float32, the result is a part, and not rounded.
        """
        given = ForwardOperands(q, k, v, *room, None, self._captured(job))
        plan = prepared(given, job.options_of_part if self._is_part(room[0]) else job.options)
        with noted("attention"):
            return plan.run(given)

    def backward(
        self, job: Job, inputs: tuple[Any, ...], room: tuple[Any, Any, Any], adds: tuple[bool, bool, bool] = (False, False, False)
    ) -> tuple[Any, Any, Any]:
        """Gradients of a job, from dout, q, k, v, out, lse and dlse of its rows of the whole and of its keys.

        Those for which `adds` says so are added to what is where there is room for them.
        """
        return self._gradients(job, inputs, room, adds=adds)

    def forward_of_heads(self, heads: tuple[int, int], q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any) -> None:
        """Attention of all rows for some heads: the first query head and the first key head are given, results are written."""
        job = self._job_of_heads(heads)
        given = ForwardOperands(q, k, v, out, lse, sinks, self._captured(job, self._lengths))
        plan = prepared(given, job.options)
        with noted("attention"):
            plan.run(given)

    def backward_of_heads(
        self, heads: tuple[int, int], inputs: tuple[Any, ...], room: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """Gradients of all rows for some heads, from dout, q, k, v, out, lse and dlse."""
        return self._gradients(self._job_of_heads(heads), inputs, room, self._lengths)

    def _gradients(
        self, job: Job, inputs: tuple[Any, ...], room: tuple[Any, Any, Any], lengths: Mapping[str, Any] | None = None,
        adds: Sequence[bool] = (),
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        dout, q, k, v, out, lse, dlse = inputs
        others = self._captured(job, lengths)
        # All are parts, or none: what is none among them is written from one.
        are_parts = any(map(self._is_part, room))
        places = [x if self._is_part(x) == are_parts else None for x in room]
        if any(adds):  # so are the others, to zeros
            places = [zeros_like(x, self.whole.wide) if place is None else place for place, x in zip(places, (q, k, v))]
            for place, to, is_added in zip(places, room, adds):
                if place is to and not is_added:
                    place.fill(0)
        given = operands(dout, q, k, v, out, lse, dlse, None, *places, None, others=others)
        own = {name: job.of.slopes if name == "alibi_slopes" and name not in self._arrays else name for name in self.whole.wrt}
        options = {**(job.options_of_part if are_parts else job.options), "adds_results": any(adds)}
        options = {name: value for name, value in options.items() if name != "return_lse"}
        plan = prepared_backward(given, {**options, "wrt": tuple(own.values()), "deterministic": self.deterministic})
        with noted("attention"):
            found = plan.run(given)
        for name, theirs in own.items():
            part = found.darrays[theirs].astype(self.whole.wide)
            self.sums[name] = self.sums[name] + part if name in self.sums else part
        for x, to, place in zip(found, room, places):
            if to is not None and place is not to:
                store(to, x)
        return found.dq, found.dk, found.dv

    def _is_part(self, room: Any) -> bool:
        """Whether what goes there, or where there is no room, is not to be rounded yet."""
        return self.whole.narrow and (room is None or room.dtype == self.whole.wide)

    def _job(self, block: Block | Group, beside_messages: bool) -> Job:
        whole, shares = self.whole, {"shares_device": True} if beside_messages else {}
        if isinstance(block, Group):
            offsets = {name: numpy.array(ends) for name, ends in block.offsets.items()}
            options = {**self._options_of_whole(), **self._place(0, 0, block.span.number), **shares}
            told = (options, self._placed("groups", OF_GROUPS), {"b": block.span.number}, offsets)
        else:
            place = self._place(block.q_from, block.kv_from, block.span.number)
            options = {**self._options(block.window, block.prefix), **place, **shares}
            of_blocks = (*OF_BLOCKS, "b") if whole.packed else OF_BLOCKS
            told = (options, self._placed("blocks", of_blocks), self._at(block), {})
        return Job(block.rows, block.keys, block.span.kv[0] + block.kv_from, *told)

    def _job_of_heads(self, heads: tuple[int, int]) -> Job:
        known = self.whole.known
        found = known.get(("job of heads", heads))
        if found is None:
            place = {"place": Place(0, 0, heads[0], self.whole.problem.heads_q)} if self.whole.problem.scores.dropout else {}
            options = self._options_of_whole() | place
            found = Job((0, 0), (0, 0), 0, options, self._placed("heads", OF_HEADS), dict(zip(OF_HEADS, heads)))
            known["job of heads", heads] = found
        return found

    def _placed(self, name: str, moving: tuple[str, ...]) -> Placed:
        known = self.whole.known
        if ("placed", name) not in known:
            shape = () if self._slopes is None else self._slopes.shape
            known["placed", name] = placed(self.whole.problem.scores, shape, moving)
        return known["placed", name]

    def _captured(self, job: Job, lengths: Mapping[str, Any] | None = None) -> Captured:
        lengths = job.lengths if lengths is None else lengths
        if not self._reads and job.of.is_nothing and not lengths:
            return NOTHING
        arrays = job.of.arrays(self._arrays, self._slopes, job.at)
        return captured(score=job.of.score, mask=job.of.mask, arrays=arrays or None, seed=self._seed, lengths=dict(lengths))

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
            "return_lse": True,
        }

    def _options_of_whole(self) -> dict[str, Any]:
        asked = self.whole.asked
        return {**self._options(asked.window, asked.prefix), "causal": asked.causal, "top_left": asked.top_left}

    def _place(self, q: int, kv: int, sequence: int) -> dict[str, Any]:
        """Where dropout numbers pairs from, if not from 0 on, as kernels do."""
        p, head = self.whole.problem, sequence * self.whole.problem.heads_q
        return {"place": Place(q, kv, head, p.heads_q)} if p.scores.dropout and (q or kv or head) else {}


def calls_of(whole: Whole, blocks: Sequence[Block]) -> list[Block | Group]:
    """What blocks are computed at once, so that there are as few calls as can be."""
    if not whole.packed or (whole.wrt and whole.problem.backend != "numpy"):
        return list(blocks)  # of packed sequences kernels have no gradients of what scores read
    return grouped(blocks)
