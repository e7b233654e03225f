"""Where the time of a call on several ranks goes: what each does when, and how much of its exchanges lies beneath attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .. import distributed
from ..distributed.timeline import KINDS, Clock, Span, noting

BEFORE = 2  # calls before the one that is noted: a device is busy with them while that is queued, as within a model


def spans_of(
    q: Any, k: Any, v: Any, dout: Any, options: dict[str, Any], gather: Callable[[bytes], Any], clock: Clock
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """What this rank does in a forward and in a backward; all ranks call it.

    Seconds count from when a rank has heard that all have come, which differs among them by what it takes to hear that.

    Parameters
    ----------
    q, k, v, dout : array
        The rows of this rank.
    options : dict
        What `distributed.attention` is called with, its communicator as well.
    gather : callable
        That of a communicator among processes or threads, which waits for all.
    clock : Clock
    """
    _, vjp = distributed.attention_vjp(q, k, v, **options)
    kinds = (lambda: distributed.attention(q, k, v, **options)), (lambda: vjp(dout))
    found = []
    for call in kinds:
        call()  # kernels are loaded in the first one
        clock.seconds(clock.now(), clock.now())  # once the device has done all of it
        gather(b"begin")
        zero = clock.now()
        for _ in range(BEFORE):
            call()
        with noting(clock, zero) as timeline:
            call()
        found.append(timeline.spans)
    return found[0], found[1]


def together(of_ranks: Iterable[Sequence[Span]]) -> tuple[tuple[Span, ...], ...]:
    """The spans of ranks, counted from the first of all; nothing if no rank has any."""
    of_ranks = [tuple(spans) for spans in of_ranks]
    first = min((span.begin for spans in of_ranks for span in spans), default=None)
    if first is None:
        return ()
    return tuple(tuple(replace(span, begin=span.begin - first, end=span.end - first) for span in spans) for spans in of_ranks)


def beneath(spans: Sequence[Span]) -> tuple[float, float]:
    """Of a rank's exchanges the seconds that attention is computed meanwhile, and all."""
    exchanges, calls = ([span for span in spans if span.kind == kind] for kind in ("exchange", "attention"))
    shared = (min(a.end, b.end) - max(a.begin, b.begin) for a in exchanges for b in calls)  # neither kind overlaps itself
    return sum(max(0.0, seconds) for seconds in shared), sum(span.end - span.begin for span in exchanges)


def mean_of(of_ranks: Sequence[Sequence[Span]]) -> tuple[float, ...]:
    """The mean over ranks of the seconds from the first to the last, of those of each kind, and of exchanges beneath attention."""
    return tuple(statistics.mean(seconds) for seconds in zip(*map(_sums, of_ranks)))


def _sums(spans: Sequence[Span]) -> tuple[float, ...]:
    every = max((span.end for span in spans), default=0.0) - min((span.begin for span in spans), default=0.0)
    return every, *(sum(span.end - span.begin for span in spans if span.kind == kind) for kind in KINDS), beneath(spans)[0]
