"""Ranks that are processes of MPI, by mpi4py: for arrays in host memory, and to start what NCCL then connects.

mpi4py is imported by whoever has made a communicator of it, never here before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy

from ..errors import CommunicationError
from .communicator import Message
from .timeline import noted

TAG = 23_117  # of our messages; below what MPI lets every implementation have
LARGEST = 1 << 30  # bytes of a message; MPI counts with 32 bits


class MpiCommunicator:
    """A `Communicator` of mpi4py; made by `mpi`."""

    on_devices = False

    def __init__(self, comm: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        self._comm = comm

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives."""
        lengths = numpy.zeros(self.size, numpy.int64)
        own = numpy.array([len(data)], numpy.int64)
        self._finish([self._comm.Iallgather(own, lengths)], (own, lengths), "what all ranks say of a call")
        found = numpy.empty(int(lengths.sum()), numpy.uint8)
        sent = numpy.frombuffer(data, numpy.uint8)
        self._finish([self._comm.Iallgatherv(sent, [found, lengths.tolist()])], (sent, found), "what all ranks say of a call")
        ends = numpy.cumsum(lengths)
        return [found[end - length : end].tobytes() for end, length in zip(ends, lengths)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Requests:
        """Begin to send and to receive."""
        ranks = sorted({rank for rank, _ in receives})
        requests = [self._comm.Irecv(part, rank, TAG) for rank, array in receives for part in _parts(array)]
        requests += [self._comm.Isend(part, rank, TAG) for rank, array in sends for part in _parts(array)]
        return _Requests(self, requests, (sends, receives), f"rank {', '.join(map(str, ranks))}")

    def _finish(self, requests: list[Any], kept: Any, what: str) -> None:
        """Wait for requests, by asking again and again: MPI has no waiting with an end."""
        from mpi4py import MPI

        end, turns = time.monotonic() + self.timeout, 0
        try:
            while not MPI.Request.Testall(requests):
                turns += 1
                if turns > 100:  # the first ones without a pause: most exchanges are short
                    time.sleep(min(1e-5 * (turns - 100), 1e-3))
                if time.monotonic() > end:
                    raise CommunicationError(
                        f"comm: expected an answer within {self.timeout:g} s, got none; rank {self.rank} waits for {what}"
                    )
        except MPI.Exception as error:
            raise CommunicationError(f"comm: expected {what} to answer rank {self.rank}, got an error of MPI: {error}") from error
        del kept


class _Requests:
    def __init__(self, comm: MpiCommunicator, requests: list[Any], kept: Any, what: str) -> None:
        self._comm, self._requests, self._kept, self._what = comm, requests, kept, what

    def wait(self) -> None:
        """Return when all is sent and received."""
        with noted("exchange"):
            self._comm._finish(self._requests, self._kept, self._what)
        self._requests, self._kept = [], None


def _parts(array: numpy.ndarray) -> list[numpy.ndarray]:
    """The bytes of an array without gaps, in parts that MPI can count: of any dtype, bfloat16 as well."""
    data = array.reshape(-1).view(numpy.uint8)
    return [data[start : start + LARGEST] for start in range(0, data.size, LARGEST)]
