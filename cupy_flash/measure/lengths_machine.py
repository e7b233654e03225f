"""Measuring sequences of several lengths on a GPU: their arrays, how results are judged, how fast the card copies, and graphs."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy

from ..judge.compare import compare
from ..judge.compare_gradients import compare_gradients
from .bench import Array, Run, Verdict
from .lengths import CALLS, LengthsCell, offsets_of
from .stopwatch import GpuBench

COPIED_BYTES = 2 << 30
COPIES = 20
JUDGED_ROWS = 128  # of a result: at the beginning and at the end of a sequence
JUDGED_PAIRS = 4096**2  # of gradients, which are judged whole: of a sequence that has no more
DRIVER = "libcuda.so.1"
KERNEL_NODE = 0  # of CUgraphNodeType in cuda.h


class LengthsBench:
    """A `GpuBench` for cells of sequences: the `Bench` of `bench.measure`.

    Parameters
    ----------
    machine : GpuBench
    """

    def __init__(self, machine: GpuBench) -> None:
        import cupy

        self._cupy = cupy
        self._machine = machine
        self.time, self.clear, self.matmul_rate = machine.time, machine.clear, machine.matmul_rate
        self.captured = machine.captured

    @property
    def device(self) -> str:
        """Name of the GPU."""
        return self._machine.device

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that take part."""
        return self._machine.versions

    def make_inputs(self, cell: LengthsCell) -> tuple[Array, ...]:
        """q, k, v, and for the backward dout: standard normal, (all rows, heads, dim)."""
        rng = self._cupy.random.RandomState(0)
        of_q, of_kv = (sum(cell.lens_q), cell.heads, cell.dim), (sum(cell.lens_kv), cell.heads_kv, cell.dim)
        shapes = (of_q, of_kv, of_kv) + (of_q,) * (cell.direction == "backward")
        return tuple(rng.standard_normal(shape, numpy.float32).astype(ml_dtypes.bfloat16) for shape in shapes)

    def judge(self, cell: LengthsCell, inputs: tuple[Array, ...], results: tuple[Array, ...]) -> Verdict:
        """Whether results, (all rows, heads, dim), are right.

        All have to be finite. Of the first, the last, the longest and the shortest sequence the first and the last head are judged
        against float64 by the bounds of `compare`: of a result its first and last rows, and gradients whole, of those sequences
        that have no more than `JUDGED_PAIRS`. Results of several caches, which hold the same, come one behind the other.
        """
        likes = inputs[:1] if cell.direction == "forward" else inputs[:3]
        try:
            for first in range(0, len(results), len(likes)):
                verdict = self._judge(cell, inputs, likes, results[first : first + len(likes)])
                if not verdict.ok:
                    return verdict
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            return Verdict(True, f"not judged: {error}")
        finally:
            self._cupy.get_default_memory_pool().free_all_blocks()
        return Verdict()

    def _judge(self, cell: LengthsCell, inputs: tuple[Array, ...], likes: tuple[Array, ...], results: tuple[Array, ...]) -> Verdict:
        for result, like in zip(results, likes, strict=True):
            if result.shape != like.shape or result.dtype != like.dtype:
                return Verdict(False, f"a result is {result.dtype} {result.shape}, expected {like.dtype} {like.shape}")
            if not self._cupy.isfinite(result.astype(numpy.float32)).all():
                return Verdict(False, "a result is not finite")
        wrong_in = _wrong_rows if cell.direction == "forward" else _wrong_gradients
        for number in judged_sequences(cell):
            for head in (0, cell.heads - 1):
                wrong = wrong_in(cell, number, head, inputs, results)
                if wrong:
                    return Verdict(False, f"sequence {number}: {wrong}")
        return Verdict()

    def copy_rate(self) -> float:
        """Bytes per second that are read and written in a copy within the card's memory: the median."""
        source, target = (self._cupy.empty(COPIED_BYTES, numpy.uint8) for _ in range(2))
        run = Run(lambda: target.data.copy_from_device_async(source.data, COPIED_BYTES), lambda _: ())
        self.time(run, 3)
        return 2 * COPIED_BYTES / statistics.median(self.time(run, COPIES))


def judged_sequences(cell: LengthsCell) -> list[int]:
    """The numbers of those that are judged: of those that are not empty or too long, the first, last, longest and shortest."""
    sizes = [a * b for a, b in zip(cell.lens_q, cell.lens_kv)]
    most = JUDGED_PAIRS if cell.direction == "backward" else max(sizes)
    there = [number for number, size in enumerate(sizes) if 0 < size <= most]
    by_size = sorted(there, key=lambda number: sizes[number])
    return sorted({there[0], there[-1], by_size[-1], by_size[0]}) if there else []


def _of_sequence(cell: LengthsCell, number: int, head: int, arrays: tuple[Array, ...], names: str) -> list[Array]:
    """One head of a sequence, (1, rows, dim), of arrays of queries and of keys: of each a letter."""
    found = []
    for x, name in zip(arrays, names, strict=True):
        lens = cell.lens_q if name == "q" else cell.lens_kv
        first = offsets_of(lens)[number]
        own = head if name == "q" else head // (cell.heads // cell.heads_kv)
        found.append(x[first : first + lens[number], own][None])
    return found


def _wrong_rows(cell: LengthsCell, number: int, head: int, inputs: tuple[Array, ...], results: tuple[Array, ...]) -> str:
    q, k, v, out = _of_sequence(cell, number, head, (*inputs[:3], *results), "qkkq")
    len_q, len_kv = q.shape[-2], k.shape[-2]
    for first in sorted({0, max(0, len_q - JUDGED_ROWS)}):
        rows = (..., slice(first, first + JUDGED_ROWS), slice(None))
        scores = {"scale": cell.dim**-0.5, "last_key": len_kv - len_q + first if cell.causal else None}
        judged = compare(out[rows], None, q[rows], k, v, **scores)
        if not judged.ok:
            return f"wrong result, from row {first} on: {judged.message}"
    return ""


def _wrong_gradients(cell: LengthsCell, number: int, head: int, inputs: tuple[Array, ...], results: tuple[Array, ...]) -> str:
    q, k, v, dout, *gradients = _of_sequence(cell, number, head, (*inputs, *results), "qkkqqkk")
    last_key = k.shape[-2] - q.shape[-2] if cell.causal else None
    judged = compare_gradients(gradients, dout, q, k, v, scale=cell.dim**-0.5, last_key=last_key)
    return "" if judged.ok else f"wrong gradient: {judged.message}"


# Graphs


@dataclass(frozen=True)
class Graph:
    """What was captured of a contender.

    Parameters
    ----------
    calls : int
    caches : int
        That the calls have in turn.
    kernels : int or None
        Of one call, where the driver says so: of CuPy's runs.
    """

    calls: int
    caches: int
    kernels: int | None


def captured(runs: Sequence[Run], report: Callable[[Graph], None] = lambda graph: None) -> Run:
    """A run that launches a graph of `CALLS` calls of others in turn; each of these is called once before, which compiles it.

    Parameters
    ----------
    runs : sequence of Run
        The same work on caches of their own, one library's. What they queue takes its time on the device alone: nothing is waited
        for. Their results come one behind the other.
    report : callable
        Is told what the graph has in it.
    """
    first, kernels = runs[0], None
    results = [run.launch() for run in runs]

    def queue(call: int) -> None:
        results[call % len(runs)] = runs[call % len(runs)].launch()

    if first.library == "torch":
        import torch

        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in range(CALLS):
                queue(call)
        launch = graph.replay
    else:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            try:
                queue(0)
                kernels = kernels_in(stream.ptr)
                for call in range(1, CALLS):
                    queue(call)
            finally:
                graph = stream.end_capture()
        launch = graph.launch
    report(Graph(CALLS, len(runs), kernels))

    def launched(queues: Any = tuple(runs)) -> Any:
        launch()  # which knows where arrays are that nothing but `queues` keeps
        return results

    def arrays(results: list[Any]) -> tuple[Array, ...]:
        return tuple(array for run, result in zip(runs, results, strict=True) for array in run.arrays(result))

    return replace(first, launch=launched, arrays=arrays, calls=CALLS)


def l2_bytes() -> int:
    """Of the current device's L2 cache."""
    import cupy

    return cupy.cuda.Device().attributes["L2CacheSize"]


def kernels_in(stream: int) -> int | None:
    """How many kernels a stream that is being captured has so far, asked of the driver; None where it does not say."""
    try:
        driver = ctypes.CDLL(DRIVER)
        status, graph, number, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
        told = [ctypes.byref(x) for x in (status, number, graph)]
        if driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *told, None, None) or not graph.value:
            return None
        if driver.cuGraphGetNodes(graph, None, ctypes.byref(count)):
            return None
        nodes = (ctypes.c_void_p * count.value)()
        if driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)):
            return None
        kinds = []
        for node in nodes:
            kind = ctypes.c_int(-1)
            driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
            kinds.append(kind.value)
        return kinds.count(KERNEL_NODE)
    except (OSError, AttributeError):  # no driver of this name, or without these functions
        return None
