"""Ranks that are devices, by NCCL through CuPy.

Messages travel on a stream of their own, beneath the work that the caller's stream has: that stream waits for what it reads only,
and the other one for what it sends only, by events, and no process waits for either.

What ranks say of a call before it goes through a communicator of processes, if one is given. Without one it goes through NCCL
itself, once for each different call, because the process has to wait for the device then. A thread looks after exchanges that take
too long: it aborts the communicator, which ends the kernels of NCCL that wait and the calls that connect ranks, and every later use
raises an error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy

from ..errors import CommunicationError
from .communicator import Communicator, Message
from .timeline import noted

PAUSE = 0.05  # seconds between looks, at most
LINGERS = 20  # looks without anything to look after before the thread ends
FIRST = -5  # the priority of messages: their blocks go to a device before those of a kernel that has many of them left
ROOM = 512  # bytes of what a rank says, where it goes through NCCL


class NcclCommunicator:
    """A `Communicator` of NCCL; made by `nccl`."""

    on_devices = True

    def __init__(self, comm: Any, host: Communicator | None, timeout: float) -> None:
        import cupy
        from cupy.cuda import nccl as library

        self.rank, self.size, self.timeout = comm.rank_id(), comm.size(), timeout
        self._comm, self._library, self._cupy = comm, library, cupy
        self._host: Communicator | None = host
        if self._host is not None and (self._host.rank, self._host.size) != (self.rank, self.size):
            expected, got = f"rank {self.rank} of {self.size}", f"rank {self._host.rank} of {self._host.size}"
            raise ValueError(f"host: expected {expected}, as comm has it, got {got}")
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=FIRST)
        self._before = self._event()
        self._said: dict[bytes, list[bytes]] = {}
        self._watch = Watch(timeout, lambda event: event.done, comm.abort)

    def close(self) -> None:
        """End the thread that looks after time."""
        self._watch.close()

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives."""
        if self._host is not None:
            return self._host.gather(data)
        if data not in self._said:
            self._said[data] = self._gathered(data)
        return self._said[data]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Exchange:
        """Queue an exchange on the stream of messages, behind what the current stream has so far."""
        self._watch.check()
        library, comm, stream = self._library, self._comm, self._stream
        stream.wait_event(self._cupy.cuda.get_current_stream().record(self._before))
        with self._looked_after() as begun, noted("exchange", stream):
            library.groupStart()
            try:
                for rank, array in sends:
                    comm.send(array.data.ptr, array.nbytes, library.NCCL_UINT8, rank, stream.ptr)
                for rank, array in receives:
                    comm.recv(array.data.ptr, array.nbytes, library.NCCL_UINT8, rank, stream.ptr)
            finally:
                library.groupEnd()
        # The arrays are kept until the current stream waits for the exchange: a pool would give their memory to others before.
        return _Exchange(self, begun.event, (sends, receives))

    @contextmanager
    def _looked_after(self) -> Iterator[Begun]:
        """Queue something on the stream of messages, within the time limit.

        It holds already here: the first messages between two ranks connect them, and the call itself waits for that.
        """
        begun = self._watch.add()
        try:
            yield begun
        except BaseException as error:
            self._watch.remove(begun)
            if not isinstance(error, self._library.NcclError):
                raise
            self._watch.check()  # what was aborted meanwhile has another reason
            raise CommunicationError(f"comm: expected an exchange with other ranks, got an error of NCCL: {error}") from error
        begun.event = self._stream.record(self._event())

    def _event(self) -> Any:
        return self._cupy.cuda.Event(disable_timing=True)  # with times it takes longer

    def _gathered(self, data: bytes) -> list[bytes]:
        if len(data) > ROOM - 8:
            data = data[: ROOM - 8]  # the text of a mismatch, of which the beginning tells
        cupy, library = self._cupy, self._library
        said = len(data).to_bytes(8, "little") + data.ljust(ROOM - 8, b"\0")
        own = cupy.asarray(numpy.frombuffer(said, numpy.uint8))
        found = cupy.empty((self.size, ROOM), cupy.uint8)
        self._stream.wait_event(cupy.cuda.get_current_stream().record(self._before))
        with self._looked_after() as begun:
            self._comm.allGather(own.data.ptr, found.data.ptr, ROOM, library.NCCL_UINT8, self._stream.ptr)
        while not begun.event.done:
            self._watch.check()
            time.sleep(1e-4)
        self._watch.check()
        texts = [row.tobytes() for row in found.get()]
        return [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]


class _Exchange:
    def __init__(self, comm: NcclCommunicator, ended: Any, kept: Any) -> None:
        self._comm, self._ended, self._kept = comm, ended, kept

    def wait(self) -> None:
        """Let the current stream wait for the exchange."""
        if self._kept is not None:
            self._comm._watch.check()
            self._comm._cupy.cuda.get_current_stream().wait_event(self._ended)
            self._kept = None


class Begun:
    """Something that has begun, and when it has to have ended; what tells whether it has may be known later."""

    __slots__ = ("end", "event")

    def __init__(self, end: float, event: Any) -> None:
        self.end, self.event = end, event


class Watch:
    """A thread that looks whether what was begun has ended in time, and calls for an end of all if not.

    It is there while there is something to look after, and a little longer. A program that ends waits for it: so no communicator is
    destroyed whose kernels still wait, which would never return.

    Parameters
    ----------
    timeout : float
        Seconds.
    done : callable
        Whether one of the things that were added has ended.
    abort : callable
        Called once, if one has not.
    """

    def __init__(self, timeout: float, done: Any, abort: Any) -> None:
        self._timeout, self._done, self._abort = timeout, done, abort
        self._begun: deque[Begun] = deque()
        self._changed = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failed, self._aborted, self._closed = "", threading.Event(), False

    def add(self, event: Any = None) -> Begun:
        """Look after something that has just begun. They end in the order in which they begin.

        Without an event it is a call that may not return: one is then set in what is returned, or it is taken back by `remove`.
        """
        begun = Begun(time.monotonic() + self._timeout, event)
        with self._changed:
            self._begun.append(begun)
            # No other thread is waked: it looks from time to time, and each waking would take Python's lock from who computes.
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="cupy_flash: time limit of NCCL")
                self._thread.start()
        return begun

    def remove(self, begun: Begun) -> None:
        """Look no longer after something that has failed by itself."""
        with self._changed:
            if begun in self._begun:
                self._begun.remove(begun)

    def check(self) -> None:
        """Raise what was found.

        An abort is over by then, as it is after `close`: the caller may destroy the communicator next, and NCCL does not bear two
        threads that free it.
        """
        if self._failed:
            self._aborted.wait()
            raise CommunicationError(self._failed)

    def close(self) -> None:
        """End the thread, soon."""
        with self._changed:
            self._closed = True
        if self._failed:
            self._aborted.wait()

    def _run(self) -> None:
        pause, idle = min(self._timeout / 100, PAUSE), 0
        while True:
            begun = self._oldest()
            if begun is not None and time.monotonic() > begun.end:
                with self._changed:
                    if self._closed:
                        return
                    self._failed = f"comm: expected an exchange to end within {self._timeout:g} s, got none; NCCL was aborted"
                try:
                    self._abort()
                finally:
                    self._aborted.set()
                return
            idle = 0 if begun is not None else idle + 1
            with self._changed:
                lingers = idle < LINGERS and threading.main_thread().is_alive()
                if self._closed or not (self._begun or lingers):
                    self._thread = None
                    return
            time.sleep(pause)

    def _oldest(self) -> Begun | None:
        """The first of those that have not ended."""
        while True:
            with self._changed:
                begun = self._begun[0] if self._begun else None
            if begun is None or begun.event is None or not self._done(begun.event):
                return begun
            self.remove(begun)
