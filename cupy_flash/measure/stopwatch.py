"""Measuring on a GPU: events around launches, a cache without the last launch's data, results judged where they are.

Everything is queued on the default stream, CuPy's and PyTorch's alike, so that what one library writes the other reads.
"""

from __future__ import annotations

import gc
import statistics
import sys
from dataclasses import replace
from typing import Any

import numpy

from ..judge.compare import compare
from ..judge.compare_gradients import compare_gradients
from ..machine.prepared import architecture_for
from ..plan.architecture import Architecture
from ..problem.arrays import DTYPES
from .bench import Array, Run, Verdict
from .cells import Cell

FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU yet
MATMUL_SIZE = 8192
MATMUL_LAUNCHES = 20
JUDGED_ROWS = 128  # of a result: at its beginning, in its middle and at its end


class GpuBench:
    """The current CUDA device as the `Bench` of `bench.measure`. Raises what CuPy raises if there is none."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._flush = cupy.empty(FLUSH_BYTES, numpy.uint8)

    @property
    def device(self) -> str:
        """Name of the GPU."""
        device = self._cupy.cuda.Device()
        return self._cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()

    @property
    def architecture(self) -> Architecture:
        """What is compiled for the GPU."""
        return architecture_for("cuda", self._cupy.cuda.Device().id)

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that take part: CuPy, its CUDA runtime, and PyTorch with its cuDNN once it has been imported."""
        versions = {"cupy": self._cupy.__version__, "cuda": str(self._cupy.cuda.runtime.runtimeGetVersion())}
        torch = sys.modules.get("torch")
        if torch is not None:
            versions |= {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
        return versions

    def make_inputs(self, cell: Cell) -> tuple[Array, ...]:
        """q, k, v, and for the backward dout: standard normal, dense (batch, heads, seq, dim)."""
        rng = self._cupy.random.RandomState(0)
        shapes = (cell.shape, cell.shape, cell.shape_v, *[cell.shape_v] * (cell.direction == "backward"))
        return tuple(rng.standard_normal(shape, numpy.float32).astype(DTYPES[cell.dtype]) for shape in shapes)

    def judge(self, cell: Cell, inputs: tuple[Array, ...], results: tuple[Array, ...]) -> Verdict:
        """Whether results are right.

        All of them have to be finite. The first and the last head are judged against float64 by the bounds of `compare`: of a
        result, rows at its beginning, in its middle and at its end; gradients whole, because each key's has a part of every
        query, which takes memory for several arrays of scores.
        """
        shapes = (cell.shape_v,) if cell.direction == "forward" else (cell.shape, cell.shape, cell.shape_v)
        for result, shape in zip(results, shapes, strict=True):
            if result.shape != shape or result.dtype != DTYPES[cell.dtype]:
                return Verdict(False, f"a result is {result.dtype} {result.shape}, expected {cell.dtype} {shape}")
            if not self._cupy.isfinite(result.astype(numpy.float32)).all():
                return Verdict(False, "a result is not finite")
        wrong_in = _wrong_rows if cell.direction == "forward" else _wrong_gradients
        try:
            for head in (slice(0, 1), slice(-1, None)):
                wrong = wrong_in(cell, *(x[head, head] for x in (*inputs, *results)))
                if wrong:
                    return Verdict(False, wrong)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            return Verdict(True, f"not judged: {error}")
        finally:  # what judging took is more than what most contenders take, and not all of them ask CuPy's pool
            self._cupy.get_default_memory_pool().free_all_blocks()
        return Verdict()

    def captured(self, run: Run) -> Run:
        """The same work from a CUDA graph.

        It keeps what it was captured from, which has the arrays that the graph knows by their addresses alone. Raises what the
        library of the run raises when it cannot be captured. A backward of PyTorch's is not tried: where one had
        failed, kernels that came later read memory that was no more.
        """
        if run.differentiates:
            raise NotImplementedError("a backward of PyTorch's")
        self._cupy.cuda.runtime.deviceSynchronize()
        if run.library == "torch":
            torch = sys.modules["torch"]
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                run.launch()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                results = run.launch()
            return replace(run, launch=lambda queues=run.launch: (graph.replay(), results)[1])
        stream = self._cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                results = run.launch()
            finally:
                graph = stream.end_capture()
        return replace(run, launch=lambda queues=run.launch: (graph.launch(), results)[1])

    def time(self, run: Run, launches: int) -> list[float]:
        """Seconds of each of so many launches, each behind a write of `FLUSH_BYTES` that leaves nothing useful in the cache.

        Of a launch of several calls, seconds of one. Nothing is waited for before all are queued: while the GPU is writing, the
        host prepares what comes next.
        """
        new_event, milliseconds = self._events(run.library)
        pairs = [(new_event(), new_event()) for _ in range(launches)]
        for start, stop in pairs:
            self._flush.data.memset_async(0, FLUSH_BYTES)
            start.record()
            run.launch()
            stop.record()
        self._cupy.cuda.runtime.deviceSynchronize()
        return [milliseconds(start, stop) / 1000 / run.calls for start, stop in pairs]

    def matmul_rate(self, dtype: str) -> float:
        """Operations per second of cuBLAS on a product of two square matrices of `MATMUL_SIZE` rows: the median."""
        rng = self._cupy.random.RandomState(0)
        a, b = (rng.standard_normal((MATMUL_SIZE,) * 2, numpy.float32).astype(DTYPES[dtype]) for _ in range(2))
        run = Run(lambda: a @ b, lambda c: (c,))
        self.time(run, MATMUL_LAUNCHES)  # cuBLAS is loaded, and clocks rise
        return 2 * MATMUL_SIZE**3 / statistics.median(self.time(run, MATMUL_LAUNCHES))

    def clear(self) -> None:
        """Give back the memory of arrays that are gone, CuPy's and PyTorch's."""
        gc.collect()
        self._cupy.get_default_memory_pool().free_all_blocks()
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.cuda.empty_cache()

    def _events(self, library: str) -> tuple[Any, Any]:
        """How the library of a run makes an event, and the milliseconds between two."""
        if library == "cupy":
            return self._cupy.cuda.Event, self._cupy.cuda.get_elapsed_time
        torch = sys.modules["torch"]
        return lambda: torch.cuda.Event(enable_timing=True), lambda start, stop: start.elapsed_time(stop)


def _wrong_rows(cell: Cell, q: Array, k: Array, v: Array, out: Array) -> str:
    middle = cell.seq // 2
    for first in sorted({0, middle, max(0, cell.seq - JUDGED_ROWS)}):
        rows = (..., slice(first, first + JUDGED_ROWS), slice(None))
        scores = {"scale": cell.dim**-0.5, "last_key": first if cell.causal else None}
        judged = compare(out[rows], None, q[rows], k, v, **scores)
        if not judged.ok:
            return f"wrong result, from row {first} on: {judged.message}"
    return ""


def _wrong_gradients(cell: Cell, q: Array, k: Array, v: Array, dout: Array, *gradients: Array) -> str:
    judged = compare_gradients(gradients, dout, q, k, v, scale=cell.dim**-0.5, last_key=0 if cell.causal else None)
    return "" if judged.ok else f"wrong gradient: {judged.message}"
