"""The bench of sequences of several lengths without a GPU: its arithmetic, its contenders on NumPy, and what the command says."""

import json
import math
import statistics
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
from click.testing import CliRunner
from fake_bench import FakeBench, contender
from test_peers import numpy_as_cupy  # noqa: F401  a fixture

from cupy_flash.cli import bench_lengths as command
from cupy_flash.cli import main
from cupy_flash.judge.oracle import sees
from cupy_flash.measure import lengths_machine, lengths_peers
from cupy_flash.measure.bench import Effort, Failure, Run, measure
from cupy_flash.measure.lengths import (
    CALLS,
    DENSE,
    HIDDEN,
    PAGE_SIZES,
    ROWS,
    TIMES_L2,
    TOKENS,
    LengthsCell,
    caches_of,
    cells,
    documents,
    log_uniform,
    offsets_of,
    pairs_of,
)
from cupy_flash.measure.lengths_machine import Graph, LengthsBench, captured, judged_sequences, kernels_in
from cupy_flash.measure.stopwatch import GpuBench

LENS = (5, 70, 1, 33)
PACKED = LengthsCell("packed", "some", "forward", 16, 2, 2, LENS, LENS, causal=True)
CACHES = LengthsCell("pages", "some", "forward", 16, 4, 2, (3,) * 4, (5, 70, 3, 33), True, (16, 1))
ALIKE = LengthsCell("decode", "alike", "forward", 16, 4, 2, (1,) * 3, (40,) * 3, page_sizes=(16, 3))
RAGGED = replace(ALIKE, name="ragged", lens_kv=(40, 1, 7))
CELLS = [
    *(replace(PACKED, direction=way, lens_q=n, lens_kv=n) for way in ("forward", "backward") for n in (LENS, (20,) * 3)),
    CACHES, replace(CACHES, lens_kv=(33,) * 4), ALIKE, RAGGED, replace(ALIKE, row="step"), replace(RAGGED, row="step"),
]  # fmt: skip

# Arithmetic


@pytest.mark.parametrize("len_q, len_kv", [(5, 5), (3, 9), (9, 3), (1, 7), (7, 1), (1, 1), (4, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_are_those_that_are_seen(len_q, len_kv, causal):
    expected = sees(len_q, len_kv, last_key=len_kv - len_q if causal else None).sum() if len_kv else 0
    assert pairs_of(len_q, len_kv, causal) == expected


def test_work_and_bytes_of_a_cell():
    assert PACKED.pairs == sum(n * (n + 1) // 2 for n in LENS)
    assert PACKED.flops == 4 * 16 * PACKED.pairs * 2 and replace(PACKED, direction="backward").flops == 10 * 16 * PACKED.pairs * 2
    assert ALIKE.key_bytes == 2 * 3 * 40 * 2 * 16 * 2
    assert (PACKED.alike, PACKED.decodes, ALIKE.alike, ALIKE.decodes, RAGGED.alike) == (False, False, True, True, False)


def test_lengths_are_drawn_as_they_are_said_to_be():
    lens = documents(TOKENS, 1500, 1, 16, 16_384, 0)
    assert lens == documents(TOKENS, 1500, 1, 16, 16_384, 0)
    assert sum(lens) == TOKENS and min(lens[:-1]) >= 16 and max(lens) <= 16_384
    many = documents(3_000_000, 1500, 1, 16, 16_384, 1)
    assert 1300 < statistics.median(many) < 1700 and 0.9 < statistics.stdev(map(math.log, many)) < 1.1
    lens = log_uniform(2000, 1, 131_072, 0)
    assert min(lens) >= 1 and max(lens) <= 131_072 and 250 < statistics.median(lens) < 550
    assert offsets_of((3, 0, 5)) == [0, 3, 3, 8]


def test_what_is_measured():
    found = cells()
    assert [row for row in ROWS if row in {c.row for c in found}] == list(ROWS) and len(set(map(str, found))) == len(found)
    packed = [c for c in found if c.row == "packed"]
    assert {(c.direction, c.dim) for c in packed} == {(d, dim) for d in ("forward", "backward") for dim in (64, 128)}
    assert all(sum(c.lens_q) == TOKENS and c.heads * c.dim == HIDDEN and c.causal for c in packed)
    assert {c.lens_q for c in packed if c.alike} == {(DENSE,) * (TOKENS // DENSE)}
    assert {c.page_sizes for c in found if c.row == "pages"} == {PAGE_SIZES}
    assert all(c.decodes for c in found if c.row in ("decode", "step"))
    assert [c.row for c in cells(("step", "pages"))] == ["pages", "pages", "step"]


@pytest.mark.parametrize("l2_bytes", [40 << 20, 50 << 20, 126 << 20])
def test_caches_are_as_many_as_keep_keys_out_of_the_l2_cache(l2_bytes):
    for cell in cells(("decode", "step")):
        count = caches_of(cell, l2_bytes)
        assert count * cell.key_bytes >= TIMES_L2 * l2_bytes > (count - 1) * cell.key_bytes or count == 1
    assert caches_of(cells(("decode",))[0], 50 << 20) == 7  # of 8,192 keys
    assert caches_of(ALIKE, 50 << 20) == CALLS and caches_of(ALIKE, 1) == 1


def test_sequences_that_are_judged():
    assert judged_sequences(PACKED) == [0, 1, 2, 3]
    assert judged_sequences(replace(ALIKE, lens_kv=(0, 5, 0))) == [1] and judged_sequences(replace(ALIKE, lens_kv=(0,) * 3)) == []
    long = replace(PACKED, direction="backward", lens_q=(9, 5000, 3), lens_kv=(9, 5000, 3))
    assert judged_sequences(long) == [0, 2]


# Contenders and their judge


class FakeStream:
    """One that computes what it is given at once, so that launching the graph has nothing left to do."""

    ptr, captures = 0, False

    def __init__(self, non_blocking):
        assert non_blocking

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert not self.captures

    def begin_capture(self):
        self.captures = True

    def end_capture(self):
        self.captures = False
        return SimpleNamespace(launch=lambda: None)


@pytest.fixture
def machine(numpy_as_cupy, monkeypatch):  # noqa: F811
    import cupy

    cupy.cuda.Stream = FakeStream
    cupy.cuda.Device = lambda: SimpleNamespace(synchronize=lambda: None, attributes={"L2CacheSize": 10_000})
    monkeypatch.setattr(lengths_peers, "unwritten", lambda like: numpy.full_like(like, numpy.nan))
    monkeypatch.setattr(lengths_machine, "kernels_in", lambda stream: 7)
    return LengthsBench(SimpleNamespace(time=None, clear=None, matmul_rate=None, captured=None, device="a fake", versions={}))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_contenders_are_right_and_their_judge_finds_faults(machine, cell):
    inputs, graphs = machine.make_inputs(cell), {}
    there, missing = lengths_peers.contenders(cell, (), graphs.__setitem__)
    caches = caches_of(cell, 10_000) if cell.decodes else 1
    assert missing == () and all(c.ours for c in there)
    for one in there:
        run = one.prepare(cell, inputs)
        results = run.arrays(run.launch())
        assert run.calls == (CALLS if cell.decodes else 1) and len(results) == caches * (1 if cell.direction == "forward" else 3)
        assert len({x.ctypes.data for x in results}) == len(results)
        verdict = machine.judge(cell, inputs, results)
        assert verdict.ok, f"{one.name}: {verdict.note}"
        for result in results:
            for wrong in (numpy.nan, 9):
                kept = result[0].copy()
                result[0] = wrong
                assert not machine.judge(cell, inputs, results).ok
                result[0] = kept
        assert not machine.judge(cell, inputs, (results[0][:-1], *results[1:])).ok
    assert graphs == ({c.name: Graph(CALLS, caches, 7) for c in there} if cell.decodes else {})


def test_calls_of_a_graph_have_caches_in_turn(machine, monkeypatch):
    """Each contender's: keys and values are at other addresses, and hold the same."""
    read = []

    def planned(cell, inputs, given, rows, deterministic=False):
        _, k, v = inputs
        return Run(lambda: read.append((k.ctypes.data, v.ctypes.data, k.tobytes(), v.tobytes())), lambda _: ())

    monkeypatch.setattr(lengths_peers, "_planned", planned)
    for one in lengths_peers.contenders(ALIKE, ())[0]:
        read.clear()
        run = one.prepare(ALIKE, machine.make_inputs(ALIKE))
        addresses = [(k, v) for k, v, *_ in read]
        assert caches_of(ALIKE, 10_000) == 3 and len({*addresses}) == 3 and len({x for pair in addresses for x in pair}) == 6
        assert addresses == addresses[:3] + [addresses[i % 3] for i in range(CALLS)]  # once each before the graph
        assert len({bytes(k) + bytes(v) for *_, k, v in read}) == 1
        run.launch()
        assert len(read) == 3 + CALLS


def test_calls_of_a_peer_are_captured_alike(monkeypatch):
    """By a stand-in for PyTorch, whose graph computes again what was captured."""
    log, graph = [], SimpleNamespace(replay=lambda: log.append("replay"))
    cuda = SimpleNamespace(CUDAGraph=lambda: graph, synchronize=lambda: log.append("synchronized"))
    cuda.graph = lambda given: nullcontext(log.append("captured" if given is graph else "another graph"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    runs = [Run(lambda n=n: log.append(n) or f"{n} {len(log)}", lambda result: (result,), "torch") for n in "ab"]
    told = []
    run = captured(runs, told.append)
    assert log == ["a", "b", "synchronized", "captured", *"ab" * (CALLS // 2)] and told == [Graph(CALLS, 2, None)]
    assert run.arrays(run.launch()) == (f"a {CALLS + 3}", f"b {CALLS + 4}")  # of the last call on each
    assert log[-1] == "replay" and (run.library, run.calls) == ("torch", CALLS)


def test_turns_are_as_long_however_many_calls_a_launch_has():
    bench, effort = FakeBench({"one": 1e-4, "many": 1e-4}), Effort(rounds=1, seconds=0.02)
    many = replace(contender("many"), prepare=lambda cell, inputs: Run(lambda: "many", lambda result: (result,), calls=20))
    [result] = measure([ALIKE], [contender("one"), many], bench, effort)
    assert {m.contender: (m.seconds, m.launches) for m in result.measurements} == {"one": (1e-4, 100), "many": (1e-4, 10)}


def test_seconds_are_of_one_call():
    bench = object.__new__(GpuBench)  # without a device
    runtime = SimpleNamespace(deviceSynchronize=lambda: None)
    events = {"Event": lambda: SimpleNamespace(record=lambda: None), "get_elapsed_time": lambda start, stop: 40}
    bench._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, **events))
    bench._flush = SimpleNamespace(data=SimpleNamespace(memset_async=lambda value, size: None))
    for calls, seconds in ((1, 0.04), (20, 0.002)):
        assert bench.time(Run(lambda: None, lambda _: (), calls=calls), 3) == [seconds] * 3


def test_who_is_batch_invariant():
    backward = replace(PACKED, direction="backward", lens_q=(20,) * 3, lens_kv=(20,) * 3)
    names = [c.name for c in lengths_peers.contenders(backward, ())[0]]
    assert names == ["packed", "packed, in order", "dense"]
    assert [n for n in names if lengths_peers.batch_invariant(backward, n)] == ["packed, in order"]
    names = [c.name for c in lengths_peers.contenders(ALIKE, ())[0]]
    assert [n for n in names if not lengths_peers.batch_invariant(ALIKE, n)] == ["dense"]


def test_who_takes_part():
    names = {(c.row, c.direction, c.alike): [x.name for x in lengths_peers.contenders(c, ())[0]] for c in cells()}
    pages = ["contiguous", *(f"pages of {size}" for size in PAGE_SIZES)]
    assert names == {
        ("packed", "forward", False): ["packed"],
        ("packed", "forward", True): ["packed", "dense"],
        ("packed", "backward", False): ["packed", "packed, in order"],
        ("packed", "backward", True): ["packed", "packed, in order", "dense"],
        ("pages", "forward", True): pages,
        ("decode", "forward", False): ["contiguous", "pages of 64"],
        ("decode", "forward", True): ["contiguous", "pages of 64", "dense"],
        ("step", "forward", True): ["pages of 64", "append, attend"],
    }


def test_peers_are_asked_for_where_they_compute_the_same(monkeypatch):
    monkeypatch.setattr(lengths_peers, "is_installed", lambda module: module == "torch")
    for cell in cells():
        there, missing = lengths_peers.contenders(cell)
        compared = cell.row == "decode" or (cell.row == "packed" and not cell.alike)
        assert [c.name for c in there if not c.ours] == ["torch-flash2", "torch-cudnn"] * compared
        assert missing == (Failure("fa4", "there is no module flash_attn.cute"),) * compared


def test_pages_have_each_row_once():
    table, places = lengths_peers.pages_of((5, 0, 70, 16), 16)
    assert table.shape == (4, 5) and len(set(places.tolist())) == 91 == len(places)
    assert sorted({*table[0, :1], *table[2], *table[3, :1]}) == list(range(7))
    assert places[5:75].tolist() == [table[2, i // 16] * 16 + i % 16 for i in range(70)]


def test_a_driver_that_is_not_there_counts_nothing(monkeypatch):
    monkeypatch.setattr(lengths_machine, "DRIVER", "libno-such-driver.so")
    assert kernels_in(0) is None


@pytest.mark.gpu
def test_kernels_of_a_graph_are_counted():
    import cupy

    x, told = cupy.zeros(10), []

    def launch():
        x.__iadd__(1)
        x.__imul__(2)

    launch()
    run = captured([Run(launch, lambda _: (x,))], told.append)
    assert told == [Graph(CALLS, 1, 2)]
    kept = weakref.ref(launch)
    del launch
    x.fill(0)
    run.launch()
    cupy.cuda.Device().synchronize()
    assert (x == 2**CALLS * 2 - 2).all() and kept() is not None  # whose arrays the graph writes


# The command


def run(*arguments):
    return CliRunner().invoke(main, ["bench-lengths", *map(str, arguments)])


@pytest.fixture
def fake(monkeypatch):
    bench = FakeBench({"ours": 1e-3, "dense": 9e-4, "peer": 2e-3})
    bench.copy_rate = lambda: 4e12

    def contenders(cell, peers, told):
        if cell.decodes:
            told("ours", Graph(20, 7, 3))
        there = (contender("ours", ours=True), contender("dense", ours=True), *(contender("peer") for _ in peers))
        return there, (Failure("fa4", "there is no module flash_attn.cute"),)

    monkeypatch.setattr(command, "_machine", lambda: bench)
    monkeypatch.setattr(command, "contenders", contenders)
    return bench


def test_the_command_prints_and_writes_what_it_found(fake, tmp_path):
    path = tmp_path / "found.json"
    result = run("--peers", "torch-cudnn", "--json", path)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["device"] == "a fake" and report["copy_gb_per_s"] == 4000 and report["date"] and report["versions"]
    assert report["missing"] == [{"contender": "fa4", "message": "there is no module flash_attn.cute"}]
    for cell, expected in zip(report["cells"], cells(), strict=True):
        ours, dense, peer = cell["measurements"]
        assert (cell["name"], cell["flops"], cell["key_bytes"]) == (expected.name, expected.flops, expected.key_bytes)
        keys = ("ours", "batch_invariant", "share_of_dense", "kernels", "calls", "caches")
        graph = (3, 20, 7) if expected.decodes else (None, 1, 1)
        assert [ours[key] for key in keys] == [True, expected.direction == "forward", pytest.approx(0.9), *graph]
        assert [dense[key] for key in keys] == [True, False, 1, None, 1, 1]
        assert [peer[key] for key in keys] == [False, None, None, None, 1, 1]
        assert math.isclose(ours["tflops"], expected.flops / 1e-3 / 1e12) and math.isclose(peer["tflops"], ours["tflops"] / 2)
        assert math.isclose(ours["key_gb_per_s"], expected.key_bytes / 1e6) and cell["failures"] == []
        assert math.isclose(ours["share_of_copy"], ours["key_gb_per_s"] / 4000)
    [line] = [line for line in result.stdout.splitlines() if line.startswith("64 x 8k") and "ours" in line]
    rate = 2 * 64 * 8192 * 8 * 128 * 2 / 1e-3
    assert line.split()[4:] == ["forward", "ours", "1000.0", "1.00", "90%", f"{rate / 1e9:.0f}", f"{rate / 4e12:.0%}", "3", "7"]
    assert "fa4: there is no module flash_attn.cute" in result.stdout


def test_the_rest_from_graphs_as_well(fake, tmp_path):
    path, launched = tmp_path / "found.json", {}
    fake.captured = lambda run: replace(run, launch=lambda: launched.setdefault(run.launch(), run.launch()))
    assert run("--rows", "packed", "--peers", "none", "--graphs", "--json", path).exit_code == 0
    assert {*launched} == {"ours", "dense"} and json.loads(path.read_text())["effort"]["graphs"]
    launched.clear()
    assert run("--rows", "decode,step", "--peers", "none", "--graphs").exit_code == 0 and not launched


def test_what_fails_stops_nothing_and_shows(fake):
    fake.wrong = ("ours", "peer")

    def refuse():
        raise MemoryError("no room")

    fake.copy_rate = refuse
    result = run("--rows", "decode", "--peers", "torch-cudnn")
    assert result.exit_code == 1
    assert "copy: MemoryError: no room" in result.stdout and result.stdout.count("failed: ArithmeticError: off by 1") == 5
    assert result.stdout.count("! peer: decode") == 5


def test_user_errors_end_with_2(fake):
    for arguments in (("--rows", "packd"), ("--peers", "fa5"), ("--json", "nowhere/found.json"), ("--rounds", 0)):
        assert run(*arguments).exit_code == 2
    assert fake.turns == []


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    path = tmp_path / "found.json"
    result = run("--rows", "step", "--peers", "none", "--rounds", 1, "--seconds", 0.01, "--json", path)
    assert result.exit_code == 0, result.output
    [cell] = json.loads(path.read_text())["cells"]
    kernels = {m["contender"]: m["kernels"] for m in cell["measurements"]}
    assert kernels["append, attend"] == kernels["pages of 64"] + 1 <= 3
