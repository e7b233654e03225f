"""The adapter of NCCL, with stand-ins for CuPy and NCCL: what is queued where, in which order. On devices: `gpu/test_nccl.py`."""

import ctypes
import sys
import threading
import types
from collections import defaultdict, deque

import numpy
import pytest

from cupy_flash import CommunicationError, distributed
from cupy_flash.distributed.over_nccl import Watch
from cupy_flash.distributed.timeline import noting

RANKS = 3


class Array:
    """What the adapter asks of an array on a device: an address, and how many bytes there are."""

    def __init__(self, x):
        self.x, self.nbytes = x, x.nbytes
        self.data = types.SimpleNamespace(ptr=x.ctypes.data)


class Event:
    done = True

    stream = None

    def __init__(self, disable_timing):
        assert disable_timing


class Stream:
    def __init__(self, name, log):
        self.name, self.log, self.ptr = name, log, id(self)

    def record(self, event):
        self.log.append(f"{self.name} records")
        event.stream = self.name
        return event

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.stream}")


class Nccl(types.ModuleType):
    """NCCL among threads: what is sent goes into boxes when a group ends."""

    NCCL_UINT8 = 1
    NcclError = type("NcclError", (RuntimeError,), {})

    def __init__(self):
        super().__init__("cupy.cuda.nccl")
        self.boxes, self.changed, self.own = defaultdict(deque), threading.Condition(), threading.local()

    def groupStart(self):
        self.own.queued = []

    def groupEnd(self):
        for kind, rank, other, pointer, count in self.own.queued:
            with self.changed:
                if kind == "send":
                    self.boxes[rank, other].append(ctypes.string_at(pointer, count))
                    self.changed.notify_all()
                else:
                    self.changed.wait_for(lambda other=other, rank=rank: self.boxes[other, rank], 20)
                    data = self.boxes[other, rank].popleft()
                    assert len(data) == count
                    ctypes.memmove(pointer, data, count)


class Comm:
    """A communicator with the methods of CuPy's."""

    def __init__(self, nccl, rank, broken=False):
        self.nccl, self.rank, self.broken = nccl, rank, broken

    def rank_id(self):
        return self.rank

    def size(self):
        return RANKS

    def send(self, pointer, count, dtype, peer, stream):
        if self.broken:
            raise self.nccl.NcclError("a rank is gone")
        self._queue("send", pointer, count, dtype, peer)

    def recv(self, pointer, count, dtype, peer, stream):
        self._queue("recv", pointer, count, dtype, peer)

    def _queue(self, kind, pointer, count, dtype, peer):
        assert dtype == Nccl.NCCL_UINT8
        self.nccl.own.queued.append((kind, self.rank, peer, pointer, count))

    def abort(self):
        raise AssertionError("nothing takes too long here")


@pytest.fixture
def nccl(monkeypatch):
    """CuPy as far as the adapter asks for it; each thread has its own streams, which write down what happens."""
    found, own = Nccl(), threading.local()
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")

    def log():
        if not hasattr(own, "log"):
            own.log = []
            own.current = Stream("current", own.log)
        return own.log

    def current():
        log()
        return own.current

    def stream(non_blocking, priority):
        assert non_blocking and priority < 0  # messages get to a device beside kernels that fill it
        return Stream("messages", log())

    cuda.Stream, cuda.get_current_stream = stream, current
    cuda.nccl, cuda.Event, cupy.cuda = found, Event, cuda
    found.log = log
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", found)):
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_messages_arrive_on_a_stream_of_their_own(nccl):
    def part(host):
        comm = distributed.nccl(Comm(nccl, host.rank), host=host, timeout=20)
        before, behind = (host.rank - 1) % RANKS, (host.rank + 1) % RANKS
        sent = [Array(numpy.full((4, 2), 10 * host.rank + i, numpy.float32)) for i in range(2)]
        received = [Array(numpy.empty((4, 2), numpy.float32)) for _ in range(2)]
        nccl.log().clear()
        pending = comm.start([(behind, x) for x in sent], [(before, x) for x in received])
        begun = list(nccl.log())
        pending.wait()
        pending.wait()  # has nothing more to wait for
        comm.close()
        assert comm.gather(b"%d" % host.rank) == [b"0", b"1", b"2"]
        return begun, nccl.log()[len(begun) :], [x.x[0, 0] for x in received]

    for rank, (begun, ended, numbers) in enumerate(distributed.on_threads(RANKS, part)):
        # What is sent is there before messages go; what is read has arrived; no process waits.
        assert begun == ["current records", "messages waits for current", "messages records"]
        assert ended == ["current waits for messages"]
        assert numbers == [10 * ((rank - 1) % RANKS) + i for i in range(2)]


def test_an_exchange_is_noted_where_it_is_queued(nccl):
    """On the stream of messages, once what it sends is there: until then it is not under way."""

    class Clock:
        def now(self, stream=None):
            nccl.log().append(f"now on {stream.name}" if stream is not None else "now")

        def seconds(self, first, later):
            return 0.0

    def part(host):
        comm = distributed.nccl(Comm(nccl, host.rank), host=host, timeout=20)
        before, behind = (host.rank - 1) % RANKS, (host.rank + 1) % RANKS
        nccl.log().clear()
        with noting(Clock()) as timeline:
            comm.start([(behind, Array(numpy.zeros(2)))], [(before, Array(numpy.zeros(2)))]).wait()
        comm.close()
        return nccl.log(), timeline.spans

    for log, spans in distributed.on_threads(RANKS, part):
        queued = ["now on messages", "now on messages", "messages records"]
        assert log == ["now", "current records", "messages waits for current", *queued, "current waits for messages"]
        assert [span.kind for span in spans] == ["exchange"]


def test_an_error_of_nccl_is_one_of_communication(nccl):
    def part(host):
        comm = distributed.nccl(Comm(nccl, host.rank, broken=True), host=host)
        with pytest.raises(CommunicationError, match=r"^comm: expected an exchange with other ranks"):
            comm.start([((host.rank + 1) % RANKS, Array(numpy.zeros(2)))], [])

    distributed.on_threads(RANKS, part)


def test_an_exchange_that_does_not_even_begin_is_aborted(nccl):
    """The first messages between two ranks connect them, and NCCL waits for that in the call itself."""
    aborted = threading.Event()

    class Waiting(Comm):
        def send(self, *args):
            assert aborted.wait(20)
            raise self.nccl.NcclError("aborted")

        def abort(self):
            aborted.set()

    def part(host):
        comm = distributed.nccl(Waiting(nccl, 0), timeout=0.2)
        for _ in range(2):  # the second time at once
            with pytest.raises(CommunicationError, match=r"^comm: expected an exchange to end within 0.2 s"):
                comm.start([(1, Array(numpy.zeros(2)))], [])

    distributed.on_threads(1, part)


def test_the_thread_that_looks_after_time_ends():
    """By itself, once there is nothing to look after; and it begins anew."""
    done, watch = set(), Watch(1.0, lambda event: event in done, pytest.fail)
    for number in range(2):
        watch.add(number)
        watch.remove(watch.add())
        thread = watch._thread
        assert thread.is_alive()
        assert not thread.daemon  # a program that ends waits for what is under way
        done.add(number)
        thread.join(20)
        assert not thread.is_alive()
        assert watch._thread is None


def test_a_host_of_other_ranks_is_refused(nccl):
    def part(host):
        with pytest.raises(ValueError, match=r"^host: expected rank 0 of 3"):
            distributed.nccl(Comm(nccl, 0), host=host)

    distributed.on_threads(2, part)
