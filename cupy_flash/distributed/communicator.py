"""How ranks reach each other: the calls that every communicator has, and which adapter belongs to what a user gives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ..errors import shown

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


def as_communicator(comm: Any) -> Communicator:
    """The adapter of what a user gives as `comm`.

    Raises
    ------
    TypeError
    """
    if isinstance(comm, Communicator):
        return comm
    kind = type(comm)
    library = str(kind.__module__)
    if library.partition(".")[0] == "mpi4py":
        from .mpi import MpiCommunicator

        return MpiCommunicator(comm)
    if "cupy" in sys.modules and library.startswith(("cupy.cuda.nccl", "cupy_backends.cuda.libs.nccl")):
        from .nccl import NcclCommunicator

        return NcclCommunicator(comm)
    raise TypeError(
        "comm: expected a communicator of mpi4py, a cupy.cuda.nccl.NcclCommunicator, or an object with rank, size, on_devices, "
        f"gather and start, got {shown(comm)}"
    )


class Done:
    """An exchange with nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""
