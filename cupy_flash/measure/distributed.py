"""Attention on several GPUs of a host, measured: a thread or a process for each device, and NCCL between them.

What one device does is measured beside, in the same rounds, on all devices at the same time, each with a problem of its own: so it
has the clocks, the power and the neighbours that devices have together. What is forecast comes from the model and needs no GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy

from .. import attention, attention_vjp, distributed
from ..distributed.timeline import DeviceClock, Span
from ..problem.arrays import DTYPES
from .spans import spans_of, together

SCHEMES = ("ulysses", "all_gather", "ring")
MOST_ALONE = 1 << 16  # rows of the problem of one device, which has memory for no more
CLOSE = 2.0**-5  # of the largest element: a few roundings of bfloat16, for a look before times are taken


@dataclass(frozen=True)
class Setting:
    """What each device has: bfloat16, causal, in zigzag order."""

    rows: int
    heads: int = 64
    heads_kv: int = 8
    dim: int = 128

    def flops(self, ranks: int, backward: bool) -> float:
        """Operations of all devices, without what the mask hides."""
        total = self.rows * ranks
        return (10 if backward else 4) * self.dim * self.heads * total * (total + 1) / 2


@dataclass(frozen=True)
class Measured:
    """One scheme on so many devices. Rates are of each device, in FLOP/s; shares are of what each does alone.

    `host` is how long a call takes until it returns, before the device has done what it queued.
    """

    scheme: str
    ranks: int
    rows: int
    direction: str
    seconds: float | None
    rate: float | None
    alone: float | None
    share: float | None
    host: float | None
    forecast: float
    sent_bytes: int
    memory_bytes: int
    error: str = ""
    spans: tuple[tuple[Span, ...], ...] = ()  # of each rank, in one call, if they were asked for


@dataclass(frozen=True)
class Times:
    """Seconds of a call: of the device, and of the host until it returns."""

    device: float
    host: float

    def __sub__(self, other: Times) -> Times:
        return Times(self.device - other.device, self.host - other.host)


@dataclass(frozen=True)
class OfRank:
    """What one rank has measured: forward and backward, of the scheme and alone; how far results are off; and where time goes."""

    off: float
    scheme: tuple[Times, Times]
    alone: tuple[Times, Times]
    spans: tuple[tuple[Span, ...], tuple[Span, ...]] = ((), ())


Rank = Callable[[Any, Any], OfRank]  # of a communicator of NCCL and one of the host


def forecasts(setting: Setting, ranks: int, schemes: tuple[str, ...] = SCHEMES) -> Iterator[Measured]:
    """What the model says."""
    for scheme in schemes:
        for direction in ("forward", "backward"):
            yield _row(setting, ranks, scheme, direction)


def measured(
    setting: Setting,
    devices: int,
    schemes: tuple[str, ...] = SCHEMES,
    rounds: int = 5,
    calls: int = 4,
    timeout: float = 120.0,
    world: Any = None,
    timeline: bool = False,
) -> Iterator[Measured]:
    """What devices do, once the results of a smaller problem have been held against one device's.

    Parameters
    ----------
    setting : Setting
    devices : int
    schemes : tuple of str
    rounds : int
        Times of which the median is taken.
    calls : int
        In a round, one behind the other, and behind one that does not count.
    timeout : float
        Seconds.
    world : mpi4py.MPI.Comm, optional
        Of as many processes, each of which calls this. By default ranks are threads.
    timeline : bool
        Whether to note what ranks do in one more call, and when.
    """
    on_ranks = _on_threads(devices, timeout) if world is None else _on_processes(world, timeout)
    for scheme in schemes:
        try:
            found = on_ranks(lambda comm, host, scheme=scheme: _of_rank(comm, host, setting, scheme, rounds, calls, timeline))
        except Exception as error:  # whatever fails in one scheme leaves the others to be measured
            text = f"{type(error).__name__}: {error}"
            yield from (_row(setting, devices, scheme, way, error=text) for way in ("forward", "backward"))
            continue
        off = max(of.off for of in found)
        for i, way in enumerate(("forward", "backward")):
            times = Times(max(of.scheme[i].device for of in found), max(of.scheme[i].host for of in found))
            flops = _alone(setting, devices).flops(1, bool(i))
            alone = statistics.mean(flops / of.alone[i].device for of in found)
            error = "" if off <= CLOSE else f"results are off by {off:.3g}"
            yield _row(setting, devices, scheme, way, times, alone, error, together(of.spans[i] for of in found))


def read(rows: Iterable[dict[str, Any]]) -> Iterator[Measured]:
    """What was measured, from what JSON has of it; `asdict` makes the opposite."""
    for row in rows:
        spans = tuple(tuple(Span(**span) for span in of_rank) for of_rank in row.get("spans", ()))
        yield Measured(**{**row, "spans": spans})


def machine() -> str:
    """The name of the device, and its highest clock."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return f"{properties['name'].decode()}, {cupy.cuda.Device().attributes['ClockRate'] // 1000} MHz at most"


def _on_threads(devices: int, timeout: float) -> Callable[[Rank], list[OfRank]]:
    from cupy.cuda import nccl

    comms = nccl.NcclCommunicator.initAll(list(range(devices)))

    def run(rank: Rank) -> list[OfRank]:
        def on_device(host: Any) -> OfRank:
            return _with_nccl(rank, comms[host.rank], host, host.rank, timeout)

        return distributed.on_threads(devices, on_device, timeout=timeout)

    return run


def _on_processes(world: Any, timeout: float) -> Callable[[Rank], list[OfRank]]:
    import cupy
    from cupy.cuda import nccl

    device = world.rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(device).use()
    name = world.bcast(nccl.get_unique_id() if world.rank == 0 else None)
    comm, host = nccl.NcclCommunicator(world.size, name, world.rank), distributed.mpi(world, timeout=timeout)

    def run(rank: Rank) -> list[OfRank]:
        try:
            found = _with_nccl(rank, comm, host, device, timeout)
        except Exception as error:  # told to the others, which have failed as well
            found = error
        all_of = world.allgather(found)
        for of in all_of:
            if isinstance(of, Exception):
                raise of
        return all_of

    return run


def _with_nccl(rank: Rank, comm: Any, host: Any, device: int, timeout: float) -> OfRank:
    import cupy

    with cupy.cuda.Device(device):
        adapter = distributed.nccl(comm, host=host, timeout=timeout)
        try:
            return rank(adapter, host)
        finally:
            adapter.close()


def _row(
    setting: Setting, ranks: int, scheme: str, direction: str,
    times: Times | None = None, alone: float | None = None, error: str = "", spans: tuple[tuple[Span, ...], ...] = (),
) -> Measured:  # fmt: skip
    zero, sizes = numpy.zeros((), DTYPES["bfloat16"]), (setting.heads, setting.heads_kv)
    heads, keys = (numpy.broadcast_to(zero, (n, setting.rows, setting.dim)) for n in sizes)  # which take no memory
    plan = distributed.plan_attention(heads, keys, keys, ranks=ranks, scheme=scheme, order="zigzag", causal=True, backend="host")
    backward = direction == "backward"
    forecast = plan.backward if backward else plan.forward
    rate = None if times is None else setting.flops(ranks, backward) / ranks / times.device
    return Measured(
        scheme, ranks, setting.rows, direction, times and times.device, rate, alone, rate and alone and rate / alone,
        times and times.host, forecast.efficiency, plan.sent(backward=backward), plan.memory(backward=backward).total, error, spans,
    )  # fmt: skip


def _alone(setting: Setting, devices: int) -> Setting:
    """What each device computes alone: all rows, as many as it has memory for."""
    return replace(setting, rows=min(setting.rows * devices, MOST_ALONE))


def _inputs(setting: Setting, rows: int, seed: int) -> tuple[Any, ...]:
    import cupy

    cupy.random.seed(seed)
    heads = (setting.heads, setting.heads_kv, setting.heads_kv, setting.heads)
    return tuple(cupy.random.standard_normal((n, rows, setting.dim), numpy.float32).astype(DTYPES["bfloat16"]) for n in heads)


def _judged(comm: Any, scheme: str) -> float:
    """How far results and gradients of a small problem are from those of one device, as a share of the largest element."""
    import cupy

    small, most = Setting(256, heads=8, heads_kv=2), 0.0
    whole = _inputs(small, small.rows * comm.size, seed=0)
    out, vjp = attention_vjp(*whole[:3], causal=True)
    own = [distributed.shard(x, comm.rank, comm.size, order="zigzag") for x in whole]
    part, part_vjp = distributed.attention_vjp(*own[:3], comm=comm, scheme=scheme, order="zigzag", causal=True)
    for got, want in zip((part, *part_vjp(own[3])), (out, *vjp(whole[3]))):
        want = distributed.shard(want, comm.rank, comm.size, order="zigzag").astype(numpy.float32)
        most = max(most, float(abs(got.astype(numpy.float32) - want).max() / abs(want).max()))
    cupy.cuda.get_current_stream().synchronize()
    return most


def _of_rank(comm: Any, host: Any, setting: Setting, scheme: str, rounds: int, calls: int, timeline: bool) -> OfRank:
    """Times of a rank: in each round some calls of each kind, which all ranks begin together."""
    off = _judged(comm, scheme)
    alone = _alone(setting, comm.size)
    q, k, v, dout = _inputs(setting, setting.rows, seed=comm.rank)
    whole_q, whole_k, whole_v, whole_dout = _inputs(alone, alone.rows, seed=comm.rank)
    options = {"comm": comm, "scheme": scheme, "order": "zigzag", "causal": True}
    kinds = (
        lambda: distributed.attention(q, k, v, **options),
        lambda: distributed.attention_vjp(q, k, v, **options)[1](dout),
        lambda: attention(whole_q, whole_k, whole_v, causal=True),
        lambda: attention_vjp(whole_q, whole_k, whole_v, causal=True)[1](whole_dout),
    )
    found = [[_timed(call, host, calls) for call in kinds] for _ in range(rounds + 1)][1:]  # kernels are loaded in the first round
    forward, both, forward_alone, both_alone = (
        Times(statistics.median(times.device for times in of), statistics.median(times.host for times in of)) for of in zip(*found)
    )
    spans = spans_of(q, k, v, dout, options, host.gather, DeviceClock()) if timeline else ((), ())
    return OfRank(off, (forward, both - forward), (forward_alone, both_alone - forward_alone), spans)


def _timed(call: Callable[[], Any], host: Any, calls: int) -> Times:
    """Of one of so many calls, one behind the other, as layers of a model are: the host is ahead of the device then.

    One goes before them, for otherwise the device would wait for what the host does of the first.
    """
    import cupy

    cupy.cuda.get_current_stream().synchronize()
    host.gather(b"begin")
    begun, ended = cupy.cuda.Event(), cupy.cuda.Event()
    call()
    begun.record()
    before = time.perf_counter()
    for _ in range(calls):
        call()
    after = time.perf_counter()
    ended.record()
    ended.synchronize()
    return Times(cupy.cuda.get_elapsed_time(begun, ended) / 1e3 / calls, (after - before) / calls)
