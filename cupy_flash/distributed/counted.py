"""A communicator that counts what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .adapters import as_communicator
from .communicator import Communicator, Message, Pending


class Counted:
    """A communicator around another one, which counts.

    Parameters
    ----------
    comm : communicator
        What `attention` takes.

    Attributes
    ----------
    sent, received : int
        Bytes of arrays that this rank has sent and received so far.
    messages : int
        How many arrays it has sent.
    held, most_held : int
        Bytes of what is being received now, and of the most there was at a time.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import distributed
    >>> def part(comm):
    ...     comm, x = distributed.Counted(comm), np.ones((4, 25, 16), np.float32)
    ...     distributed.attention(x, x, x, comm=comm, scheme="ring")
    ...     return comm.sent // x.nbytes
    >>> distributed.on_threads(4, part)  # k and v three times on
    [6, 6, 6, 6]
    """

    def __init__(self, comm: Any) -> None:
        self._comm: Communicator = as_communicator(comm)
        self.rank, self.size, self.on_devices = self._comm.rank, self._comm.size, self._comm.on_devices
        self.sent = self.received = self.messages = self.held = self.most_held = 0

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives; not counted, for it is a hundred bytes."""
        return self._comm.gather(data)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin an exchange, and count it."""
        coming = sum(array.nbytes for _, array in receives)
        self.sent += sum(array.nbytes for _, array in sends)
        self.received += coming
        self.messages += len(sends)
        self.held += coming
        self.most_held = max(self.most_held, self.held)
        return _Counting(self, self._comm.start(sends, receives), coming)


class _Counting:
    def __init__(self, of: Counted, pending: Pending, coming: int) -> None:
        self._of, self._pending, self._coming = of, pending, coming

    def wait(self) -> None:
        self._pending.wait()
        self._of.held -= self._coming
        self._coming = 0
