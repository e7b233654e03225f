"""A program that mpiexec starts several times: `python mpi_program.py TASK [ARGUMENT]`. Each rank that is content says `well`."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy
from mpi4py import MPI

from cupy_flash import CommunicationError, attention, attention_vjp, distributed

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
BOUND = 64 * 2.0**-24  # sums of a hundred products of numbers of the order of 1, in another order


def inputs(dtype=numpy.float32):
    rng = numpy.random.default_rng(0)
    q, dout = rng.standard_normal((2, 8, 101, 16)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 101, 16)).astype(dtype)
    return q, k, v, dout


def right(scheme):
    """Results and gradients of one process, and the same bits in a repeat."""
    *qkv, dout = inputs()
    lengths = distributed.part_lengths(101 - 7, SIZE)
    lengths = (lengths[0] + 7, *lengths[1:])
    sinks = numpy.ones(8, numpy.float32)
    for order, options in (("zigzag", {"causal": True}), ("contiguous", {"window": (20, 4), "sinks": sinks})):
        (out, lse), vjp = attention_vjp(*qkv, return_lse=True, **options)
        wanted = (out, lse[..., None], *vjp(dout))

        def own(x, order=order):
            return distributed.shard(x, RANK, SIZE, order=order, lengths=lengths)

        def once(order=order, options=options, own=own):
            shared = {"comm": WORLD, "scheme": scheme, "order": order, **options}
            (out, lse), vjp = distributed.attention_vjp(*map(own, qkv), return_lse=True, **shared)
            return out, lse[..., None], *vjp(own(dout))

        first, second = once(), once()
        for got, again, want in zip(first, second, map(own, wanted)):
            assert numpy.array_equal(got, again)
            assert abs(got - want).max() <= BOUND * max(1, abs(want).max()), (order, abs(got - want).max())


def narrow(scheme):
    """bfloat16 travels as bytes."""
    import ml_dtypes

    q, k, v, _ = inputs(ml_dtypes.bfloat16)
    own = [distributed.shard(x, RANK, SIZE) for x in (q, k, v)]
    out = distributed.attention(*own, comm=WORLD, scheme=scheme).astype(numpy.float32)
    want = distributed.shard(attention(q, k, v).astype(numpy.float32), RANK, SIZE)
    assert abs(out - want).max() <= 2.0**-7 * abs(want).max()


def refused(scheme):
    """What differs is an error on every rank, and the next call works."""
    q, k, v, _ = inputs()
    comm = distributed.mpi(WORLD, timeout=20)
    last, is_last = SIZE - 1, RANK == SIZE - 1
    own = [distributed.shard(x, RANK, SIZE) for x in (q, k, v)]
    narrower = [x[..., :8] for x in own] if is_last else own
    mistakes = {
        "q": lambda: distributed.attention(*narrower, comm=comm, scheme=scheme),
        "causal": lambda: distributed.attention(*own, comm=comm, scheme=scheme, causal=not is_last),
        "scheme": lambda: distributed.attention(*own, comm=comm, scheme="auto" if is_last else scheme),
        "v": lambda: distributed.attention(*own[:2], None if is_last else own[2], comm=comm, scheme=scheme),
    }
    for name, call in mistakes.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            assert f"{name}:" in str(error), error
            assert is_last or f"rank {last}" in str(error), error
        else:
            raise AssertionError(f"{name} was not refused on rank {RANK}")
    distributed.attention(*own, comm=comm, scheme=scheme)


def stay_until_noticed(folder):
    """Until all others have left word, or much later."""
    end = time.monotonic() + 15
    while len(list(Path(folder).iterdir())) < SIZE - 1 and time.monotonic() < end:
        time.sleep(0.05)


def noticed(folder, error):
    """Leave word, and stay until the others have: mpiexec ends all, and forgets what they say, once one has failed."""
    (Path(folder) / str(RANK)).write_text(str(error))
    stay_until_noticed(folder)
    os._exit(3)  # MPI's own end would wait for the rank that is gone


def killed(scheme, folder):
    """The last rank is gone between two calls; the others notice by their time limit."""
    q, k, v, _ = inputs()
    own = [distributed.shard(x, RANK, SIZE) for x in (q, k, v)]
    comm = distributed.mpi(WORLD, timeout=3)
    distributed.attention(*own, comm=comm, scheme=scheme)
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        for _ in range(3):  # some may still be answered by what was underway
            distributed.attention(*own, comm=comm, scheme=scheme)
    except CommunicationError as error:
        assert time.monotonic() - begun < 20
        noticed(folder, error)
    raise AssertionError("nobody noticed")


def late(scheme, folder):
    """The last rank never comes: the others end by their time limit."""
    q, k, v, _ = inputs()
    own = [distributed.shard(x, RANK, SIZE) for x in (q, k, v)]
    if RANK == SIZE - 1:
        stay_until_noticed(folder)
        os._exit(0)
    try:
        distributed.attention(*own, comm=distributed.mpi(WORLD, timeout=2), scheme=scheme)
    except CommunicationError as error:
        noticed(folder, error)
    raise AssertionError("nobody noticed")


def say(text):
    os.write(1, f"{text}\n".encode())  # at once, and lines of several ranks apart


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    {"right": right, "narrow": narrow, "refused": refused, "killed": killed, "late": late}[task](*arguments)
    say("well")
