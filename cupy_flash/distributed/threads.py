"""Ranks that are threads of one process: for tests, and to try things out without MPI."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy

from ..errors import CommunicationError
from .communicator import Message
from .timeline import noted

Result = TypeVar("Result")


class _Shared:
    """What the threads have in common: letter boxes, and whether one of them has failed."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int], deque[numpy.ndarray]] = {(a, b): deque() for a in range(size) for b in range(size)}
        self.rounds: dict[int, dict[int, bytes]] = {}  # what every rank said, by the number of the round
        self.heard: dict[int, int] = {}  # how many ranks know it; what all of them know is forgotten
        self.failed: int | None = None


class ThreadCommunicator:
    """One of several threads as a rank; made by `on_threads`.

    Parameters
    ----------
    shared : object
        What the ranks share.
    rank, size : int
    timeout : float
        Seconds after which waiting for another rank is an error.
    """

    on_devices = False

    def __init__(self, shared: _Shared, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._shared, self._round = shared, 0

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives."""
        shared, number = self._shared, self._round
        self._round += 1
        with shared.changed:
            said = shared.rounds.setdefault(number, {})
            said[self.rank] = bytes(data)
            if len(said) == self.size:
                shared.changed.notify_all()
            self._wait(lambda: len(said) == self.size, "for what all ranks say of a call")
            shared.heard[number] = shared.heard.get(number, 0) + 1
            if shared.heard[number] == self.size:
                del shared.rounds[number], shared.heard[number]
            return [said[rank] for rank in range(self.size)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Receiving:
        """Put copies of what is sent into letter boxes."""
        with self._shared.changed:
            for rank, array in sends:
                self._shared.boxes[self.rank, rank].append(numpy.array(array, copy=True))
            self._shared.changed.notify_all()
        return _Receiving(self, receives)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        shared, end = self._shared, time.monotonic() + self.timeout
        while not ready():
            if shared.failed is not None:
                raise CommunicationError(f"comm: expected rank {shared.failed} to go on, got an error there")
            left = end - time.monotonic()
            if left <= 0:
                waits = f"rank {self.rank} waits {what}"
                raise CommunicationError(f"comm: expected an answer within {self.timeout:g} s, got none; {waits}")
            shared.changed.wait(left)


class _Receiving:
    def __init__(self, comm: ThreadCommunicator, receives: Sequence[Message]) -> None:
        self._comm, self._receives = comm, receives

    def wait(self) -> None:
        """Take what came out of letter boxes."""
        shared = self._comm._shared
        with noted("exchange"), shared.changed:
            for rank, array in self._receives:
                box = shared.boxes[rank, self._comm.rank]
                self._comm._wait(lambda box=box: bool(box), f"for rank {rank}")
                array[...] = box.popleft().reshape(array.shape)
        self._receives = ()


def on_threads(ranks: int, function: Callable[[ThreadCommunicator], Result], *, timeout: float = 60.0) -> list[Result]:
    """Call a function in several threads, each with a communicator of its own, and return what each returned.

    Parameters
    ----------
    ranks : int
    function : callable
        Called with a `ThreadCommunicator`.
    timeout : float
        Seconds after which waiting for another rank is an error.

    Returns
    -------
    list
        The results of rank 0, 1, ...

    Raises
    ------
    Exception
        What the first rank that failed raised; the others end as well.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention, distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 100, 16), dtype=np.float32)
    >>> def part(comm):
    ...     own = [distributed.shard(x, comm.rank, comm.size) for x in (q, k, v)]
    ...     return distributed.attention(*own, comm=comm, causal=True)
    >>> whole = distributed.unshard(distributed.on_threads(2, part))
    >>> bool(np.allclose(whole, attention(q, k, v, causal=True), atol=1e-6))
    True
    """
    shared = _Shared(ranks)
    results: list[Any] = [None] * ranks
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(shared, rank, ranks, timeout))
        except BaseException as error:
            with shared.changed:
                errors.append((rank, error))
                if shared.failed is None:
                    shared.failed = rank
                shared.changed.notify_all()

    # One that a device keeps for ever is left behind when another one has failed: it must not keep the program as well.
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and shared.failed is None:
            thread.join(0.1)
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0) if errors else None)
    if errors:
        raise errors[0][1]
    return results
