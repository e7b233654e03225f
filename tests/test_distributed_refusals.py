"""What is refused, on every rank, by the name of the argument; and that nobody hangs."""

import time
from threading import Event, Timer

import numpy
import pytest

from cupy_flash import CommunicationError, KeyRanges, UnsupportedError, distributed
from cupy_flash.distributed.over_nccl import Watch

LIMIT = 30
X = numpy.random.default_rng(0).standard_normal((2, 4, 12, 8)).astype(numpy.float32)


def errors_of(ranks, call, timeout=20.0):
    """What each rank raised in a call of its own."""

    def part(comm):
        try:
            call(comm)
        except Exception as error:
            return error
        return None

    begun = time.monotonic()
    found = distributed.on_threads(ranks, part, timeout=timeout)
    assert time.monotonic() - begun < LIMIT
    return found


def attend(comm, q=X, k=X, v=X, **options):
    return distributed.attention(q, k, v, comm=comm, **options)


OF_ONE = {  # of rank 1: what it gives, and what the error names
    "dtype": ({"q": X.astype(numpy.float64), "k": X.astype(numpy.float64), "v": X.astype(numpy.float64)}, "q"),
    "heads": ({"k": X[:, :2], "v": X[:, :2]}, "k"),
    "causal": ({"causal": True}, "causal"),
    "window": ({"window": (3, 0)}, "window"),
    "scheme": ({"scheme": "ring"}, "scheme"),
    "order": ({"order": "zigzag"}, "order"),
    "score": ({"score": "2 * score"}, "score"),
    "seed": ({"dropout": 0.5, "seed": 1}, "seed"),
    "sinks": ({"sinks": numpy.zeros(4, numpy.float32)}, "sinks"),
    "mistake": ({"scale": "large"}, "scale"),
    "order of axes": ({"q": X[0, 0, 0]}, "q"),
    "unknown scheme": ({"scheme": "star"}, "scheme"),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_what_one_rank_does_differently_is_an_error_on_all(name):
    options, named = OF_ONE[name]
    found = errors_of(3, lambda comm: attend(comm, **(options if comm.rank == 1 else {})))
    for error in found:
        assert isinstance(error, (TypeError, ValueError)), error
        assert f"{named}: expected" in str(error), error


def test_another_function_is_an_error_on_all():
    lse = numpy.zeros(X.shape[:-1], numpy.float32)

    def call(comm):
        if comm.rank:
            return attend(comm)
        return distributed.attention_backward(X, X, X, X, X, lse, comm=comm)

    for error in errors_of(2, call):
        assert str(error).startswith("function: expected the same on all ranks"), error


def test_other_offsets_of_packed_sequences_are_an_error_on_all():
    def call(comm):
        ends = numpy.array([0, 10 + comm.rank, 24])
        attend(comm, X[0], X[0], X[0], cu_seqlens_q=ends, cu_seqlens_kv=ends)

    for error in errors_of(2, call):
        assert str(error).startswith("cu_seqlens_q: expected the same on all ranks"), error


def test_contents_are_compared_in_each_call():
    """Also once a call alike has been made, of which most is found again."""

    def call(comm):
        for last in (11, 9, 11):
            ends = numpy.array([0, last, 24])
            out = attend(comm, X[0], X[0], X[0], cu_seqlens_q=ends, cu_seqlens_kv=ends, dropout=0.5, seed=last)
            assert numpy.isfinite(out).all()
        attend(comm, X[0], X[0], X[0], cu_seqlens_q=ends, cu_seqlens_kv=ends, dropout=0.5, seed=11 + comm.rank)

    for error in errors_of(2, call):
        assert str(error).startswith("seed: expected the same on all ranks"), error
        assert "[11, 0] on rank 0 and" in str(error), error


OF_ALL = {
    "bias": ({"bias": numpy.zeros((24, 24), numpy.float32)}, TypeError),
    "mask": ({"mask": numpy.ones((24, 24), bool)}, UnsupportedError),
    "mask of ranges": ({"mask": KeyRanges(numpy.zeros((24, 1), int), 5)}, UnsupportedError),
    "seqlens_kv": ({"seqlens_kv": numpy.array([12, 3])}, UnsupportedError),
    "algorithm": ({"algorithm": "v1"}, UnsupportedError),
    "dropout": ({"dropout": 0.5, "seed": 1, "backend": "host", "scheme": "ring"}, UnsupportedError),  # of 12 rows each
    "causal": ({"causal": "left"}, ValueError),
    "scheme": ({"scheme": 3}, TypeError),
    "order": ({"order": "striped"}, ValueError),
    "memory": ({"memory": -1}, ValueError),
    "return_lse": ({"return_lse": 1}, TypeError),
    "is_causal": ({"is_causal": True}, TypeError),
    "arrays": ({"score": "score + t[kv_idx]", "arrays": {"t": numpy.zeros(12, numpy.float32)}}, ValueError),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_what_nothing_computes_is_refused_by_name(name):
    options, kind = OF_ALL[name]
    for error in errors_of(2, lambda comm: attend(comm, **options)):
        assert isinstance(error, kind), error
        assert str(error).startswith(name.partition(" ")[0]), error


def test_a_rank_that_fails_is_an_error_on_the_others():
    def call(comm):
        if comm.rank == 2:
            raise MemoryError("of a rank")
        attend(comm)

    with pytest.raises(MemoryError):
        distributed.on_threads(3, call)


def test_a_rank_that_never_calls_is_an_error_within_the_limit():
    over = Event()

    def call(comm):
        if comm.rank == 2:
            over.wait(LIMIT)
        else:
            try:
                attend(comm)
            finally:
                over.set()

    first, second, _ = errors_of(3, call, timeout=0.5)
    assert "comm: expected an answer within 0.5 s" in str(first)
    assert isinstance(second, CommunicationError)


def test_a_communicator_is_asked_for():
    for comm in (None, 3, "world", object()):
        with pytest.raises(TypeError, match=r"^comm: expected a communicator"):
            attend(comm)
    with pytest.raises(TypeError, match=r"^comm, ranks: expected one of them"):
        distributed.plan_attention(X, X, X)


def test_any_object_with_the_calls_is_a_communicator():
    """What the documentation says of a `Communicator` is enough."""

    class Own:
        def __init__(self, comm):
            self.rank, self.size, self.on_devices = comm.rank, comm.size, False
            self.gather, self.start = comm.gather, comm.start

    found = distributed.on_threads(2, lambda comm: attend(Own(comm)).shape)
    assert found == [X.shape, X.shape]


def test_what_takes_too_long_is_aborted():
    """The time limit of exchanges on devices, with events that are none."""
    aborted = Event()
    watch = Watch(0.2, lambda event: event.is_set(), aborted.set)
    ended, stuck = Event(), Event()
    ended.set()
    watch.add(ended)
    time.sleep(0.3)
    watch.check()
    assert not aborted.is_set()
    watch.add(stuck)
    assert aborted.wait(LIMIT)
    with pytest.raises(CommunicationError, match=r"^comm: expected an exchange to end within 0[.]2 s"):
        watch.check()
    closed = Watch(9.0, lambda event: False, aborted.set)
    closed.add(stuck)
    closed.close()


@pytest.mark.parametrize("left_by", ["check", "close"])
def test_the_abort_is_over_before_the_caller_goes_on(left_by):
    """Who hears of the error may destroy the communicator at once."""
    aborting, may_end, ended = Event(), Event(), Event()

    def abort():
        aborting.set()
        assert may_end.wait(LIMIT)
        ended.set()

    watch = Watch(0.1, lambda event: False, abort)
    watch.add(object())
    assert aborting.wait(LIMIT)
    Timer(0.3, may_end.set).start()
    if left_by == "check":
        with pytest.raises(CommunicationError):
            watch.check()
    else:
        watch.close()
    assert ended.is_set()
