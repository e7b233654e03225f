"""Attention on several GPUs of a host, measured: a thread for each device, NCCL between them, and one device beside.

What is forecast comes from the model alone and needs no GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from .. import attention, attention_vjp, distributed
from ..problem.arrays import DTYPES

SCHEMES = ("ulysses", "all_gather", "ring")
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
    """One scheme on so many devices. Rates are of each device, in FLOP/s; shares are of one device's rate."""

    scheme: str
    ranks: int
    rows: int
    direction: str
    seconds: float | None
    rate: float | None
    share: float | None
    forecast: float
    sent_bytes: int
    memory_bytes: int
    error: str = ""


def forecasts(setting: Setting, ranks: int, schemes: tuple[str, ...] = SCHEMES) -> Iterator[Measured]:
    """What the model says."""
    for scheme in schemes:
        for direction in ("forward", "backward"):
            yield _row(setting, ranks, scheme, direction, None, None)


def measured(
    setting: Setting, devices: int, schemes: tuple[str, ...] = SCHEMES, rounds: int = 5, timeout: float = 120.0
) -> Iterator[Measured]:
    """What devices do, once the results of a smaller problem have been held against one device's."""
    from cupy.cuda import nccl

    comms = nccl.NcclCommunicator.initAll(list(range(devices)))
    alone = _alone(setting, devices, rounds)
    for scheme in schemes:
        def rank(host: Any, scheme: str = scheme) -> tuple[float, float, float]:
            import cupy

            with cupy.cuda.Device(host.rank):
                comm = distributed.nccl(comms[host.rank], host=host, timeout=timeout)
                try:
                    off = _judged(comm, scheme)
                    return (*_timed(comm, host, setting, scheme, rounds), off)
                finally:
                    comm.close()

        try:
            found = distributed.on_threads(devices, rank, timeout=timeout)
        except Exception as error:  # whatever fails in one scheme leaves the others to be measured
            text = f"{type(error).__name__}: {error}"
            yield from (_row(setting, devices, scheme, way, None, None, text) for way in ("forward", "backward"))
            continue
        forward, both, off = (max(times) for times in zip(*found))
        text = "" if off <= CLOSE else f"results are off by {off:.3g}"
        for way, seconds, rate in (("forward", forward, alone[0]), ("backward", both - forward, alone[1])):
            yield _row(setting, devices, scheme, way, seconds, rate, text)


def _row(
    setting: Setting, ranks: int, scheme: str, direction: str, seconds: float | None, alone: float | None, error: str = ""
) -> Measured:
    zero, sizes = numpy.zeros((), DTYPES["bfloat16"]), (setting.heads, setting.heads_kv)
    heads, keys = (numpy.broadcast_to(zero, (n, setting.rows, setting.dim)) for n in sizes)  # which take no memory
    plan = distributed.plan_attention(heads, keys, keys, ranks=ranks, scheme=scheme, order="zigzag", causal=True, backend="host")
    backward = direction == "backward"
    times = plan.backward if backward else plan.forward
    rate = None if seconds is None else setting.flops(ranks, backward) / ranks / seconds
    return Measured(
        scheme, ranks, setting.rows, direction, seconds, rate, rate and alone and rate / alone, times.efficiency,
        plan.sent(backward=backward), plan.memory(backward=backward).total, error,
    )  # fmt: skip


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


def _timed(comm: Any, host: Any, setting: Setting, scheme: str, rounds: int) -> tuple[float, float]:
    """Seconds of a forward, and of a forward with its gradients: the medians of what events say."""
    q, k, v, dout = _inputs(setting, setting.rows, seed=comm.rank)
    options = {"comm": comm, "scheme": scheme, "order": "zigzag", "causal": True}

    def both() -> None:
        _, vjp = distributed.attention_vjp(q, k, v, **options)
        vjp(dout)

    return _median(lambda: distributed.attention(q, k, v, **options), rounds, host), _median(both, rounds, host)


def _alone(setting: Setting, devices: int, rounds: int) -> tuple[float, float]:
    """One device's rates, forward and backward, for all the rows that it has memory for, at most those of all devices."""
    import cupy

    with cupy.cuda.Device(0):
        rows = min(setting.rows * devices, 1 << 16)
        q, k, v, dout = _inputs(setting, rows, seed=0)
        whole = Setting(rows, setting.heads, setting.heads_kv, setting.dim)

        def both() -> None:
            _, vjp = attention_vjp(q, k, v, causal=True)
            vjp(dout)

        forward = _median(lambda: attention(q, k, v, causal=True), rounds)
        return whole.flops(1, False) / forward, whole.flops(1, True) / (_median(both, rounds) - forward)


def _median(run: Any, rounds: int, host: Any = None) -> float:
    import cupy

    run()
    times = []
    for _ in range(rounds):
        cupy.cuda.get_current_stream().synchronize()
        if host is not None:
            host.gather(b"begin")
        begun, ended = cupy.cuda.Event(), cupy.cuda.Event()
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begun, ended) / 1e3)
    return statistics.median(times)
