"""How ranks reach each other: the calls that every communicator has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ..problem.scalars import integer

Message = tuple[int, Any]  # the other rank, and an array whose elements lie without gaps in C order


class Pending(Protocol):
    """An exchange that has begun."""

    def wait(self) -> None:
        """Return when what was received may be used and what was sent may change: by work queued on the current stream."""


@runtime_checkable
class Communicator(Protocol):
    """What `attention` needs of a communicator. Write these five for an engine that has no adapter here.

    Attributes
    ----------
    rank, size : int
        The number of this process, from 0, and how many there are.
    on_devices : bool
        Whether arrays to be sent are in device memory, or in host memory.

    Notes
    -----
    All ranks make the same calls in the same order. Between two ranks messages arrive in the order in which they were sent, also
    within one `start`. Whatever a rank waits for must end in a `CommunicationError` after a limit that the communicator has.

    Examples
    --------
    >>> from cupy_flash.distributed import Communicator, on_threads
    >>> on_threads(2, lambda comm: isinstance(comm, Communicator))
    [True, True]
    """

    rank: int
    size: int
    on_devices: bool

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives, from rank 0 on. Few bytes, of any number; blocks."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin to send arrays to ranks and to fill arrays by what ranks send; none is this rank itself."""


class Alone:
    """Ranks that are only planned for: each says what this one says, and nothing is sent.

    Parameters
    ----------
    ranks : int
    """

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.size = integer("ranks", ranks, "an integer")
        if self.size < 1:
            raise ValueError(f"ranks: expected at least 1, got {ranks}")
        self.on_devices = None  # arrays of either kind may be planned for

    def gather(self, data: bytes) -> list[bytes]:
        """The same from each."""
        return [data] * self.size

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Refuse."""
        raise RuntimeError("comm: expected a communicator that sends, got one for plans")
