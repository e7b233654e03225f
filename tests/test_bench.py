"""The benchmark without a GPU: its cells, the order of measuring, what follows from times, and what the command writes."""

import importlib.util
import json
import math
import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy
import pytest
from click.testing import CliRunner

from cupy_flash.bench import (
    DIRECTIONS,
    FEWEST,
    MOST,
    SUITES,
    WARM_UP,
    Cell,
    CellResult,
    Contender,
    Effort,
    Failure,
    Measurement,
    Run,
    Suite,
    Verdict,
    compare_all,
    measure,
    order_of,
)
from cupy_flash.cases import Case
from cupy_flash.cli import bench as command
from cupy_flash.cli import main
from cupy_flash.peers import ALGORITHMS, KERNELS
from cupy_flash.plots import plot_bench
from cupy_flash.reference import visible

CELLS = Suite(("float16",), (64,), (512, 1024)).cells(DIRECTIONS)
FORWARD = CELLS[0]


@dataclass
class FakeBench:
    """A machine on which a launch of each contender takes a time that is known."""

    seconds: dict
    wrong: tuple = ()
    breaks: tuple = ()  # whose turns raise, though their warm-up does not
    turns: list = field(default_factory=list)
    cleared: int = 0
    device = "a fake"
    versions = {"cupy": "0"}  # noqa: RUF012

    def make_inputs(self, cell):
        return (cell,)

    def judge(self, cell, inputs, results):
        assert inputs == (cell,)
        return Verdict(results[0] not in self.wrong, "off by 1" if results[0] in self.wrong else "")

    def time(self, run, launches):
        name = run.launch()
        self.turns.append((name, launches))
        if name in self.breaks and launches != WARM_UP:
            raise RuntimeError("the clock stopped")
        return [self.seconds[name]] * launches

    def matmul_rate(self, dtype):
        return 1e15

    def clear(self):
        self.cleared += 1


def contender(name, ours=False, directions=DIRECTIONS):
    return Contender(name, lambda cell, inputs: Run(lambda: name, lambda result: (result,)), ours, directions)


def refusing(error):
    def prepare(cell, inputs):
        raise error

    return Contender("refusing", prepare)


def result_of(cell=FORWARD, **seconds):
    return CellResult(cell, tuple(Measurement(name, s, s, s, 1) for name, s in seconds.items()))


# Cells


def test_the_paper_suite_is_that_of_the_papers():
    cells = SUITES["paper"].cells(DIRECTIONS)
    assert len(cells) == len(set(cells)) == 2 * 3 * 2 * 6
    assert all(c.batch * c.seq == 16_384 and c.heads * c.dim == 2048 and c.dtype == "bfloat16" for c in cells)
    assert {c.seq for c in cells} == {512, 1024, 2048, 4096, 8192, 16_384} and {c.dim for c in cells} == {64, 128, 256}


def test_the_quick_suite_has_both_halves():
    cells = SUITES["quick"].cells(["forward"])
    assert {(c.dtype, c.dim, c.seq) for c in cells} == {
        (dtype, dim, seq) for dtype in ("float16", "bfloat16") for dim in (64, 128) for seq in (1024, 4096, 16_384)
    }


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_visible_pairs(causal):
    cell = Cell("forward", "float16", 24, causal, 37, 2, 3)
    case = Case("float16", 37, 37, dim=24, heads_q=3, batch=(2,), causal=causal)
    assert cell.flops == case.flops
    pairs = int(visible(37, 37, last_key=0 if causal else None).sum())
    # Q K^T again, dO V^T, dS K, dS^T Q and P^T dO: three products of dim and two of dim_v.
    assert Cell("backward", *tuple(vars(cell).values())[1:]).flops == 2 * 5 * 24 * pairs * 3 * 2


def test_a_length_that_does_not_divide_the_tokens():
    [cell] = Suite(("float16",), (96,), (20_000,), (False,)).cells(["forward"])
    assert (cell.batch, cell.heads) == (1, 21)


# Measuring


def test_contenders_take_turns_and_none_always_follows_the_same():
    bench = FakeBench({"a": 0.01, "b": 0.02, "c": 10.0})
    [result] = measure([FORWARD], [contender(name) for name in "abc"], bench, Effort(rounds=3, seconds=0.3))
    launches = {"a": 10, "b": 5, "c": FEWEST}
    assert bench.turns == [(n, WARM_UP) for n in "abc"] + [(n, launches[n]) for n in "abc" + "acb" + "abc" + "acb"]
    assert [(m.contender, m.seconds, m.launches) for m in result.measurements] == [("a", 0.01, 30), ("b", 0.02, 15), ("c", 10.0, 9)]
    assert bench.cleared == 1


@pytest.mark.parametrize("count, rounds", [(2, 1), (3, 2), (4, 4), (5, 4), (6, 6), (7, 6), (8, 8)])
def test_each_contender_follows_every_other_one_as_often(count, rounds):
    names = "abcdefgh"[:count]
    orders = [order_of(list(names), number) for number in range(rounds + 1)]
    assert all(sorted(order) == sorted(names) for order in orders)
    turns = [name for order in orders for name in order][: count * rounds + 1]
    pairs = Counter(pair for pair in pairwise(turns))
    within = {pair: n for pair, n in pairs.items() if pair[0] != pair[1]}
    assert len(within) == count * (count - 1) and max(within.values()) - min(within.values()) <= (count % 2 == 0)
    assert order_of(["a"], 3) == ["a"]


def test_launches_of_a_turn_are_bounded():
    effort = Effort(rounds=4, seconds=0.4)
    assert [effort.launches(seconds) for seconds in (1e-9, 0.01, 0.005, 100)] == [MOST, 10, 20, FEWEST]


def test_the_median_is_of_rounds_and_the_spread_of_launches():
    rounds = iter([[9.0] * WARM_UP, [8.0] * 3, [1.0, 2.0, 3.0], [4.0, 5.0, 60.0], [2.0, 2.0, 2.0]])
    bench = FakeBench({})
    bench.time = lambda run, launches: next(rounds)
    [result] = measure([FORWARD], [contender("a")], bench, Effort(rounds=3))
    [found] = result.measurements
    assert (found.seconds, found.low, found.high, found.launches) == (2.0, 2.0, 4.0, 9)


def test_a_contender_that_fails_stops_nothing():
    bench = FakeBench({"a": 1.0, "b": 0.01, "c": 1.0}, breaks=("b",))
    refused = refusing(TypeError("no float16\nand more"))
    found = list(measure(CELLS[:2], [contender("a"), refused, contender("b"), contender("c")], bench, Effort()))
    assert len(found) == 2
    for result in found:
        assert [m.contender for m in result.measurements] == ["a", "c"]
        assert result.failures == (
            Failure("refusing", "TypeError: no float16"),
            Failure("b", "RuntimeError: the clock stopped"),
        )


def test_warnings_of_a_contender_that_fails_are_part_of_its_reason():
    def prepare(cell, inputs):
        warnings.warn("Expected query to be half", stacklevel=1)
        raise RuntimeError("No available kernel.")

    [result] = measure([FORWARD], [Contender("torch", prepare)], FakeBench({}), Effort())
    assert result.failures == (Failure("torch", "RuntimeError: No available kernel.; Expected query to be half"),)


def test_a_wrong_result_fails_ours_and_marks_a_peer():
    bench = FakeBench({"ours": 1.0, "peer": 1.0}, wrong=("ours", "peer"))
    [result] = measure([FORWARD], [contender("ours", ours=True), contender("peer")], bench, Effort())
    assert result.failures == (Failure("ours", "ArithmeticError: off by 1"),)
    assert [(m.contender, m.note) for m in result.measurements] == [("peer", "off by 1")]


def test_a_broken_device_is_why_every_contender_fails():
    bench = FakeBench({})

    def make_inputs(cell):
        raise RuntimeError("illegal address")

    bench.make_inputs = make_inputs
    [result] = measure([FORWARD], [contender("a"), contender("b")], bench, Effort())
    assert result.measurements == ()
    assert result.failures == (Failure("a", "RuntimeError: illegal address"), Failure("b", "RuntimeError: illegal address"))


def test_a_direction_that_a_contender_does_not_serve():
    bench = FakeBench({"a": 1.0, "b": 1.0})
    found = list(measure(CELLS, [contender("a"), contender("b", directions=("forward",))], bench, Effort()))
    names = {r.cell.direction: [m.contender for m in r.measurements] for r in found}
    assert names == {"forward": ["a", "b"], "backward": ["a"]} and not any(r.failures for r in found)


# What follows


def test_rates_and_speedups():
    result = result_of(ours=2.0, peer=3.0)
    assert result.rate("ours") == FORWARD.flops / 2 and result.speedup("ours", "peer") == 1.5
    assert result.rate("other") is None and result.speedup("ours", "other") is None


def test_comparisons_are_geometric_means_by_direction():
    contenders = [contender("ours", ours=True), contender("peer"), contender("other")]
    results = [result_of(CELLS[0], ours=1.0, peer=2.0), result_of(CELLS[1], ours=1.0, peer=8.0, other=0.5)]
    results += [result_of(CELLS[-1], peer=1.0)]
    found = {(c.direction, c.peer): c for c in compare_all(results, contenders)}
    assert found.keys() == {("forward", "peer"), ("forward", "other")}
    c = found["forward", "peer"]
    assert (c.contender, c.cells, c.least, c.most) == ("ours", 2, 2.0, 8.0) and math.isclose(c.mean, 4.0)


def test_a_plot_for_each_direction_and_dtype(tmp_path):
    results = [result_of(cell, ours=1.0, peer=2.0) for cell in CELLS] + [result_of(CELLS[1], ours=1.0)]
    paths = plot_bench(results, ("ours",), "a fake", tmp_path / "rates.png")
    assert [path.name for path in paths] == ["rates-forward-float16.png", "rates-backward-float16.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert plot_bench(results[:1], ("ours",), "a fake", tmp_path / "one.png") == [tmp_path / "one.png"]


# The command


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture
def fake(monkeypatch):
    """A machine and contenders for the command: v2 takes half of the time that the peer takes."""
    bench = FakeBench({"v2": 1e-3, "peer": 2e-3})
    there, missing = (contender("v2", ours=True), contender("peer")), (Failure("fa4", "there is no module flash_attn.cute"),)
    monkeypatch.setattr(command, "_machine", lambda: bench)
    monkeypatch.setattr(command, "contenders", lambda *_: (there, missing))
    return bench


def test_the_command_prints_rates_and_comparisons(fake):
    result = run("forward", "--seq", "1024,4096", "--dim", 64, "--dtype", "float16", "--mask", "full", "--rounds", 2)
    assert result.exit_code == 0, result.output
    rate = 4 * 64 * 1024**2 * 32 * 16 / 1e-3 / 1e12
    [row] = [line for line in result.stdout.splitlines() if line.split()[:4] == ["float16", "64", "full", "1024"]]
    assert row.split()[4:] == [f"{rate:.0f}", f"{rate / 2:.1f}", "(2.00)", f"{rate / 1000:.0%}", "0.0%"]
    assert "1000 TFLOP/s in float16" in result.stdout
    assert "forward  v2  peer              2.00   2.00  2.00      2" in result.stdout
    assert "fa4: there is no module flash_attn.cute" in result.stdout


def test_the_command_hands_kernels_on(fake, monkeypatch):
    asked = []
    contenders = command.contenders
    monkeypatch.setattr(command, "contenders", lambda *arguments: asked.append(arguments) or contenders(*arguments))
    cell = ("--seq", 1024, "--dim", 64, "--dtype", "float16", "--mask", "full", "--peers", "none")
    for direction, *kernels in (
        ("forward",),
        ("forward", "fwd_hopper"),
        ("forward", "fwd_v2", "fwd_hopper"),
        ("backward", "bwd_v2", "bwd_hopper"),
        ("both", "bwd_hopper", "fwd_v2"),
    ):
        option = ("--kernel", ",".join(kernels)) if kernels else ()
        assert run(direction, *cell, *option).exit_code == 0
        assert asked.pop() == (ALGORITHMS, [], False, tuple(kernels))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("forward", "--kernel", "fwd_v1"), f"expected names out of {', '.join(KERNELS)}, with commas between them, got 'fwd_v1'"),
        (("forward", "--kernel", "fwd_v2", "--algorithm", "v1"), "--kernel is for v2, and --algorithm leaves v1 only"),
        (("forward", "--kernel", "fwd_v2,bwd_v2"), "--kernel: bwd_v2 computes the backward, which is not measured"),
        (("backward", "--kernel", "fwd_hopper"), "--kernel: fwd_hopper computes the forward, which is not measured"),
    ],
)
def test_kernels_that_compute_nothing_are_refused(fake, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]


def test_the_command_writes_json_and_a_figure(fake, tmp_path):
    path = tmp_path / "found.json"
    result = run("both", "--seq", 1024, "--dim", 128, "--dtype", "bfloat16", "--json", path, "--plot", tmp_path / "found.png")
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["device"] == "a fake" and report["matmul_tflops"] == {"bfloat16": 1000.0}
    assert report["contenders"] == [{"name": "v2", "ours": True}, {"name": "peer", "ours": False}]
    assert [(c["direction"], c["causal"]) for c in report["cells"]] == [(d, m) for d in DIRECTIONS for m in (False, True)]
    for cell in report["cells"]:
        assert cell["failures"] == [] and (cell["batch"], cell["heads"], cell["seq"], cell["dim"]) == (16, 16, 1024, 128)
        for measured in cell["measurements"]:
            assert math.isclose(measured["tflops"], cell["flops"] / measured["seconds"] / 1e12)
    assert [(c["direction"], c["mean"]) for c in report["comparisons"]] == [(d, pytest.approx(2)) for d in DIRECTIONS]
    assert {file.name for file in tmp_path.glob("*.png")} == {"found-forward-bfloat16.png", "found-backward-bfloat16.png"}


def test_the_file_has_each_cell_before_the_next_is_measured(fake, tmp_path):
    path = tmp_path / "found.json"
    lengths = []

    def clear():
        lengths.append(len(json.loads(path.read_text())["cells"]))

    fake.clear = clear
    assert run("forward", "--seq", "512,1024", "--dim", 64, "--dtype", "float16", "--mask", "full", "--json", path).exit_code == 0
    assert lengths == [1, 2]


def test_a_kernel_of_ours_that_fails_ends_the_command_with_1(fake):
    fake.wrong = ("v2",)
    result = run("backward", "--seq", 1024, "--dim", 64, "--dtype", "float16")
    assert result.exit_code == 1 and "v2: failed in 2 cells: ArithmeticError: off by 1" in result.stdout


def test_a_product_that_cupy_does_not_have_is_reported(fake):
    def refuse(dtype):
        raise TypeError(f"no {dtype} here")

    fake.matmul_rate = refuse
    result = run("forward", "--seq", 1024, "--dim", 64, "--dtype", "bfloat16", "--mask", "full")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("a fake\n") and "cuBLAS in bfloat16: TypeError: no bfloat16 here" in result.stdout
    assert "(2.00)" in result.stdout


def test_a_peer_that_is_wrong_is_marked(fake):
    fake.wrong = ("peer",)
    result = run("forward", "--seq", 1024, "--dim", 64, "--dtype", "float16", "--mask", "full")
    assert result.exit_code == 0
    assert "(2.00)!" in result.stdout and "! peer: forward float16 16x32x1024x64 full: off by 1" in result.stdout


def test_without_a_gpu_the_command_says_so(monkeypatch):
    def none():
        raise ImportError("no CuPy")

    for devices in (none, list):
        monkeypatch.setattr(command, "devices", devices)
        result = run()
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1] == "Error: bench needs a CUDA device; the command doctor says what is missing"


def test_a_figure_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("--plot", tmp_path / "found.png")
    assert result.exit_code == 1 and 'pip install "cupy-flash[plot]"' in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sideways"], "sideways"),
        (["--suite", "long"], "long"),
        (["--peers", "fa4,fa5"], "expected names out of naive,"),
        (["--seq", "0"], "expected sizes, with commas between them, got '0'"),
        (["--plot", "found.txt"], "expected a name that ends in .png, .pdf or .svg, got 'found.txt'"),
        (["--json", "nowhere/found.json"], "--json: "),
    ],
)
def test_user_errors_end_with_2(fake, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    path = tmp_path / "found.json"
    effort = ("--rounds", 2, "--seconds", 0.01, "--json", path)
    result = run("both", "--seq", "512,1000", "--dim", 64, "--dtype", "float16", *effort)
    assert result.exit_code == 0, result.output
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 8
    for cell in cells:
        seconds = {m["contender"]: m["seconds"] for m in cell["measurements"]}
        assert seconds["v2"] < seconds["naive"]
        assert all(m["low"] <= m["seconds"] <= m["high"] for m in cell["measurements"])


@pytest.mark.gpu
def test_times_on_a_gpu_grow_with_the_work():
    from cupy_flash.stopwatch import GpuBench

    bench = GpuBench()
    rng = numpy.random.default_rng(0)
    import cupy

    squares = [cupy.asarray(rng.standard_normal((n, n), numpy.float32)) for n in (1024, 2048, 4096)]
    times = [sorted(bench.time(Run(lambda a=a: a @ a, lambda b: (b,)), 20))[10] for a in squares]
    assert all(less * 4 < more for less, more in pairwise(times))  # eight times the work
