"""The contenders of the benchmark and its judge: with NumPy in CuPy's place, and on a GPU with whatever is installed."""

import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy
import pytest

from cupy_flash import plan_attention
from cupy_flash.judge.compare import compare
from cupy_flash.measure import peers
from cupy_flash.measure.cells import Cell
from cupy_flash.measure.stopwatch import FLUSH_BYTES, GpuBench
from cupy_flash.measure.sweep import candidates
from cupy_flash.plan.architecture import ARCHITECTURES

FREE = 1 << 30
DTYPES = {"float16": numpy.float16, "bfloat16": ml_dtypes.bfloat16, "float32": numpy.float32}


@pytest.fixture
def numpy_as_cupy(monkeypatch):
    """A module `cupy` with NumPy's functions and as much of a device as is asked for here."""
    module = ModuleType("cupy")
    module.__dict__.update({name: getattr(numpy, name) for name in dir(numpy) if not name.startswith("_")})
    module.ndarray = type("ndarray", (), {})  # no array here is in device memory
    memory = SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {}))
    module.cuda = SimpleNamespace(memory=memory, runtime=SimpleNamespace(memGetInfo=lambda: (FREE, FREE)))
    module.random = SimpleNamespace(RandomState=lambda seed: SimpleNamespace(standard_normal=_normal(seed)))
    module.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", module)


def _normal(seed):
    rng = numpy.random.default_rng(seed)
    return lambda shape, dtype: rng.standard_normal(shape, dtype)


def cell_of(direction, dtype="float32", causal=False, seq=150, batch=2, heads=2):
    return Cell(direction, dtype, 24, causal, seq, batch, heads)


def results_of(contender, cell, inputs):
    run = contender.prepare(cell, inputs)
    return run.arrays(run.launch())


CELLS = [cell_of(direction, dtype, causal) for direction in ("forward", "backward") for dtype in DTYPES for causal in (False, True)]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_textbook_formula_is_right(numpy_as_cupy, cell):
    bench = GpuBench()
    inputs = bench.make_inputs(cell)
    [naive], _ = peers.contenders((), ["naive"])
    results = results_of(naive, cell, inputs)
    assert len(inputs) == (3 if cell.direction == "forward" else 4)
    assert bench.judge(cell, inputs, results).ok


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_judge_finds_what_is_wrong(numpy_as_cupy, direction, causal):
    bench, cell = GpuBench(), cell_of(direction, causal=causal, seq=300)
    inputs = bench.make_inputs(cell)
    [naive], _ = peers.contenders((), ["naive"])
    right = results_of(naive, cell, inputs)
    for number in range(len(right)):
        for change in (
            lambda x: x * 1.001,
            lambda x: x[..., ::-1],
            lambda x: numpy.where(numpy.arange(300)[:, None] == 299, 0, x).astype(x.dtype),  # the last row was not written
            lambda x: numpy.where(numpy.arange(300)[:, None] == 200, numpy.nan, x).astype(x.dtype),
            lambda x: x[..., 1:, :],
            lambda x: x.astype(numpy.float64),
        ):
            wrong = [change(x) if i == number else x for i, x in enumerate(right)]
            verdict = bench.judge(cell, inputs, tuple(wrong))
            assert not verdict.ok and verdict.note
    # The other mask.
    other = results_of(naive, cell_of(direction, causal=not causal, seq=300), inputs)
    assert not bench.judge(cell, inputs, other).ok


def test_what_memory_does_not_suffice_for_is_not_judged(numpy_as_cupy, monkeypatch):
    import cupy

    def refuse(*_, **__):
        raise cupy.cuda.memory.OutOfMemoryError("out of memory allocating 1 byte")

    monkeypatch.setattr("cupy_flash.measure.stopwatch.compare_gradients", refuse)
    bench, cell = GpuBench(), cell_of("backward")
    inputs = bench.make_inputs(cell)
    verdict = bench.judge(cell, inputs, inputs[:3])
    assert verdict.ok and verdict.note == "not judged: out of memory allocating 1 byte"


def test_scores_that_take_more_than_half_of_the_memory_are_refused(numpy_as_cupy):
    [naive], _ = peers.contenders((), ["naive"])
    cell = cell_of("forward", seq=1 << 14, batch=1, heads=1)  # 2^28 scores of 4 bytes
    with pytest.raises(MemoryError, match=r"its scores take 1\.1 GB, more than half of the 1\.1 GB that are free"):
        naive.prepare(cell, ())


def test_peers_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    there, missing = peers.contenders()
    assert [c.name for c in there] == ["v1", "v2", "naive"]
    assert {f.contender: f.message for f in missing} == {
        "torch-cudnn": "there is no module torch",
        "torch-flash2": "there is no module torch",
        "torch-efficient": "there is no module torch",
        "fa4": "there is no module flash_attn.cute",
    }


def test_only_kernels_that_exist_compute_a_direction():
    there, _ = peers.contenders(("v1", "v2"), ())
    assert [(c.name, c.ours, c.directions) for c in there] == [
        ("v1", True, ("forward",)),
        ("v2", True, ("forward", "backward")),
    ]


FORWARDS, BACKWARDS = ("fwd_v2", "fwd_hopper"), ("bwd_v2", "bwd_hopper")
BY_NAME = {kernel: {peers.KERNELS[kernel]: kernel} for kernel in (*FORWARDS, *BACKWARDS)}


@pytest.mark.parametrize(
    "kernels, found",
    [
        ((), {"v2": {"forward": None, "backward": None}}),
        (("fwd_v2",), {"v2": {"forward": "fwd_v2", "backward": None}}),
        (("bwd_hopper",), {"v2": {"forward": None, "backward": "bwd_hopper"}}),
        (("bwd_v2", "fwd_hopper"), {"v2": {"forward": "fwd_hopper", "backward": "bwd_v2"}}),
        (FORWARDS, {kernel: BY_NAME[kernel] for kernel in FORWARDS} | {"v2": {"backward": None}}),
        (BACKWARDS, {kernel: BY_NAME[kernel] for kernel in BACKWARDS} | {"v2": {"forward": None}}),
        (("bwd_v2", *FORWARDS), {kernel: BY_NAME[kernel] for kernel in FORWARDS} | {"v2": {"backward": "bwd_v2"}}),
        ((*FORWARDS, *BACKWARDS), BY_NAME),
    ],
    ids=str,
)
def test_v2_computes_with_the_kernels_asked_for(kernels, found, numpy_as_cupy, monkeypatch):
    """The planner of a direction is asked for them; of several each is a contender, and v2 has what is left."""
    asked = []

    class Asked(Exception):
        pass

    def refuse(*_, kernel=None, **__):
        asked.append(kernel)
        raise Asked

    for planner in ("plan_attention", "plan_attention_backward"):
        monkeypatch.setattr(peers, planner, refuse)
    monkeypatch.setattr(peers, "unwritten", lambda like: like)
    ours, _ = peers.contenders(("v1", "v2"), (), kernels=kernels)
    v1, *others = ours
    assert (v1.name, v1.directions) == ("v1", ("forward",)) and all(c.ours for c in ours)
    assert {c.name: c.directions for c in others} == {name: tuple(directions) for name, directions in found.items()}
    for contender in others:
        for direction, kernel in found[contender.name].items():
            cell = cell_of(direction, seq=5)
            with pytest.raises(Asked):
                contender.prepare(cell, GpuBench().make_inputs(cell))
            assert asked.pop() == kernel


def test_a_plan_of_no_table_is_the_one_that_runs(monkeypatch):
    """On the host, in place of a device: the tile of a row that the planner would not take."""
    cell = Cell("forward", "float16", 64, True, 150, 1, 2)
    [plan, *_] = [c.plan for c in candidates(cell, ARCHITECTURES["80"]) if not c.chosen]
    monkeypatch.setattr(peers, "plan_attention", partial(plan_attention, backend="host", arch="80"))
    monkeypatch.setattr(peers, "unwritten", lambda like: numpy.full_like(like, numpy.nan))
    normal = _normal(0)
    inputs = tuple(normal(cell.shape, numpy.float32).astype(numpy.float16) for _ in range(3))
    run = peers.planned_run(plan, cell, inputs)
    assert run.launch.func.kernel == plan
    [out] = run.arrays(run.launch())
    judged = compare(out, None, *inputs, scale=64**-0.5, last_key=0)
    assert judged.ok, judged.message


# On a GPU


def on_gpu(direction, dtype, causal, algorithms=(), names=(), **options):
    bench, cell = GpuBench(), cell_of(direction, dtype, causal, seq=1000)
    inputs = bench.make_inputs(cell)
    there, _ = peers.contenders(algorithms, names, **options)
    return bench, cell, inputs, there


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_our_kernels_are_right(direction, dtype, causal, deterministic):
    bench, cell, inputs, there = on_gpu(direction, dtype, causal, ("v1", "v2"), ["naive"], deterministic=deterministic)
    for contender in there:
        if direction in contender.directions:
            verdict = bench.judge(cell, inputs, results_of(contender, cell, inputs))
            assert verdict.ok and not verdict.note, (contender.name, verdict.note)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["torch-cudnn", "torch-flash2", "torch-efficient", "fa4"])
def test_peers_compute_the_same(name, direction, causal):
    pytest.importorskip(peers.NEEDS[name])
    [contender], _ = peers.contenders((), [name])
    bench = GpuBench()
    cell = Cell(direction, "bfloat16", 64, causal, 1024, 2, 2)  # a dim and a length that all of them serve
    inputs = bench.make_inputs(cell)
    verdict = bench.judge(cell, inputs, results_of(contender, cell, inputs))
    assert verdict.ok, verdict.note


@pytest.mark.gpu
def test_the_flush_is_larger_than_the_cache():
    import cupy

    assert cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"] * 2 < FLUSH_BYTES
