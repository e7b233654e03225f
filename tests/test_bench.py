"""The benchmark without a GPU: its cells, the order of measuring, and what follows from times."""

import math
import warnings
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy
import pytest
from fake_bench import CELLS, FORWARD, FakeBench, contender

from cupy_flash.judge.cases import Case
from cupy_flash.judge.oracle import sees
from cupy_flash.measure.bench import (
    FEWEST,
    MOST,
    WARM_UP,
    CellResult,
    Contender,
    Effort,
    Failure,
    Measurement,
    Run,
    Verdict,
    compare_all,
    measure,
    order_of,
)
from cupy_flash.measure.cells import DIRECTIONS, SUITES, Cell, Suite
from cupy_flash.measure.plots import plot_bench


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
    pairs = int(sees(37, 37, last_key=0 if causal else None).sum())
    # Q K^T again, dO V^T, dS K, dS^T Q and P^T dO: three products of dim and two of dim_v.
    assert replace(cell, direction="backward").flops == 2 * 5 * 24 * pairs * 3 * 2
    assert replace(cell, direction="backward", dim_v=8).flops == 2 * (3 * 24 + 2 * 8) * pairs * 3 * 2
    assert replace(cell, dim_v=8).flops == 2 * (24 + 8) * pairs * 3 * 2


def test_cells_of_values_that_are_narrower_than_keys():
    cells = replace(SUITES["paper"], dims=(192,), dim_v=128).cells(["backward"])
    assert {(c.heads, c.shape[-1], c.shape_v[-1], c.dims) for c in cells} == {(10, 192, 128, "192/128")}
    assert str(cells[0]) == "backward bfloat16 32x10x512x192/128 full" and str(replace(cells[0], dim_v=None)).endswith("x192 full")


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
    pairs = Counter(pairwise(turns))
    assert len(pairs) == count * (count - 1) and all(before != behind for before, behind in pairs)
    assert max(pairs.values()) - min(pairs.values()) == (count % 2 == 0 and count > 2)  # where one round meets the next


def test_the_order_of_few():
    assert order_of([], 2) == [] and order_of(["a"], 3) == ["a"]


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


@pytest.mark.gpu
def test_times_on_a_gpu_grow_with_the_work():
    from cupy_flash.measure.stopwatch import GpuBench

    bench = GpuBench()
    rng = numpy.random.default_rng(0)
    import cupy

    squares = [cupy.asarray(rng.standard_normal((n, n), numpy.float32)) for n in (1024, 2048, 4096)]
    times = [sorted(bench.time(Run(lambda a=a: a @ a, lambda b: (b,)), 20))[10] for a in squares]
    assert all(less * 4 < more for less, more in pairwise(times))  # eight times the work


def test_launches_from_graphs_leave_out_the_host():
    """Whoever cannot be captured is launched as before, and a note says why."""
    machine = FakeBench({"a": 2.0, "b": 3.0, "graph of a": 1.0}, refuses=("b",))
    there = [contender("a"), contender("b")]
    (found,) = measure([FORWARD], there, machine, Effort(2, 1e-3, graphs=True))
    assert [(m.contender, m.seconds, m.note) for m in found.measurements] == [
        ("a", 1.0, ""),
        ("b", 3.0, "not captured: RuntimeError: it waits for the device"),
    ]


def test_what_solves_another_problem_is_judged_by_that_one():
    judged = []
    machine = FakeBench({"a": 1.0, "b": 1.0})
    machine.judge = lambda cell, inputs, results: judged.append(cell) or Verdict()
    there = [replace(contender("a"), solves=lambda cell: CELLS[1]), replace(contender("b"), solves=lambda cell: None)]
    (found,) = measure([FORWARD], there, machine, Effort(1, 1e-3))
    assert judged == [CELLS[1]]
    assert [m.note for m in found.measurements] == ["", "not judged: its numbers are random"]
