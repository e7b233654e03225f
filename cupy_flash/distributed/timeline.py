"""When a rank computes, copies, merges and exchanges: noted while somebody asks for it, which `bench-distributed` does.

Nobody asking, a note is the look at an attribute of the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

KINDS = ("attention", "merge", "copy", "exchange")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank did, and the seconds at which it began and ended, counted from a moment that ranks share."""

    kind: str
    begin: float
    end: float


class Clock(Protocol):
    """What tells the time where work is done."""

    def now(self, stream: Any = None) -> Any:
        """A moment: of a device the one at which a stream, by default the current one, has done what it has so far."""

    def seconds(self, first: Any, later: Any) -> float:
        """Between two moments."""


class HostClock:
    """The time of this process, which computes itself."""

    def now(self, stream: Any = None) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, first: float, later: float) -> float:
        """Their difference."""
        return later - first


class DeviceClock:
    """The time of the current device, by events."""

    def __init__(self) -> None:
        import cupy  # late: who has a device has it

        self._cuda = cupy.cuda

    def now(self, stream: Any = None) -> Any:
        """An event."""
        stream = self._cuda.get_current_stream() if stream is None else stream
        return stream.record(self._cuda.Event())

    def seconds(self, first: Any, later: Any) -> float:
        """Waits until both have been."""
        first.synchronize()
        later.synchronize()
        return self._cuda.get_elapsed_time(first, later) / 1e3


class Timeline:
    """What a rank does, made by `noting`."""

    def __init__(self, clock: Clock, zero: Any) -> None:
        self._clock, self._zero = clock, zero
        self._noted: list[tuple[str, Any, Any]] = []

    @contextmanager
    def span(self, kind: str, stream: Any) -> Iterator[None]:
        """Note what is done, or queued, until the end of the block."""
        first = self._clock.now(stream)
        yield
        self._noted.append((kind, first, self._clock.now(stream)))

    @property
    def spans(self) -> tuple[Span, ...]:
        """What has been noted, once all of it has been done."""
        seconds = self._clock.seconds
        return tuple(Span(kind, seconds(self._zero, first), seconds(self._zero, later)) for kind, first, later in self._noted)


_OF_THREAD = threading.local()
_NOTHING = nullcontext()


@contextmanager
def noting(clock: Clock, zero: Any = None) -> Iterator[Timeline]:
    """Note what this thread does within the block, from a moment of the clock on, by default from now on."""
    timeline = _OF_THREAD.timeline = Timeline(clock, clock.now() if zero is None else zero)
    try:
        yield timeline
    finally:
        del _OF_THREAD.timeline


def noted(kind: str, stream: Any = None) -> AbstractContextManager[None]:
    """What is done within the block is of this kind, if somebody asks."""
    timeline = getattr(_OF_THREAD, "timeline", None)
    return _NOTHING if timeline is None else timeline.span(kind, stream)
