"""The online softmax of `trace`: equal to the exact one however a row is split, and what the command prints."""

import doctest
import json
import math
import warnings
from itertools import pairwise

import numpy
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.cli import main
from cupy_flash.cli import trace as command
from cupy_flash.measure import trace
from cupy_flash.measure.trace import exact_softmax, naive_softmax, online_softmax

SCORES = st.one_of(st.floats(-1e4, 1e4), st.just(-math.inf))
ROWS = st.lists(st.tuples(SCORES, st.floats(-10, 10)), min_size=1, max_size=12)


def run(*arguments):
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def rounding(count, largest):
    """What float64 may lose in a sum of `count` weights times values: a rounding for each operation on each of them.

    That is one for its exponential and one for each correction, product and addition: fewer than 4 for each block.
    """
    return 4 * (count + 2) * 2.0**-53 * max(largest, 1)


@given(ROWS, st.integers(1, 12))
def test_the_last_step_is_the_exact_softmax(row, block):
    scores, values = zip(*row)
    *_, last = online_softmax(scores, values, block)
    _, out = exact_softmax(scores, values)
    assert abs(last.out - out) <= rounding(len(row), max(map(abs, values)))
    assert last.top == max(scores)


@given(ROWS, st.integers(1, 12), st.integers(1, 12))
def test_the_blocks_do_not_matter(row, one, other):
    scores, values = zip(*row)
    *_, a = online_softmax(scores, values, one)
    *_, b = online_softmax(scores, values, other)
    assert a.top == b.top
    assert abs(a.total - b.total) <= rounding(len(row), a.total)
    assert abs(a.out - b.out) <= 2 * rounding(len(row), max(map(abs, values)))


@given(ROWS, st.integers(1, 12))
def test_nothing_overflows_and_maxima_only_grow(row, block):
    scores, values = zip(*row)
    steps = list(online_softmax(scores, values, block))
    assert [score for step in steps for score in step.scores] == list(scores)
    assert all(a.top <= b.top for a, b in pairwise(steps))
    assert all(0 <= step.correction <= 1 and 0 <= step.total <= len(row) for step in steps)
    assert all(0 <= weight <= 1 for step in steps for weight in step.weights)


@given(st.lists(st.floats(-300, 300), min_size=1, max_size=12), st.integers(1, 12))
def test_the_lse_is_the_logarithm_of_the_plain_sum(scores, block):
    *_, last = online_softmax(scores, scores, block)
    exponentials, _ = naive_softmax(scores, scores)
    assert last.lse == pytest.approx(math.log(exponentials.sum()), rel=1e-13, abs=1e-13)


def test_the_plain_exp_overflows_where_the_online_one_does_not():
    exponentials, out = naive_softmax([1000, 999, 998], [1, 2, 3])
    assert numpy.isinf(exponentials).all() and math.isnan(out)
    *_, last = online_softmax([1000, 999, 998], [1, 2, 3], 2)
    weights = [1, math.exp(-1), math.exp(-2)]
    assert last.out == pytest.approx((weights[0] + 2 * weights[1] + 3 * weights[2]) / sum(weights), rel=1e-15)


def test_a_row_that_sees_nothing():
    *_, last = online_softmax([-math.inf] * 3, [1, 2, 3], 2)
    assert (last.out, last.lse) == (0, -math.inf)
    assert exact_softmax([-math.inf] * 3, [1, 2, 3])[1] == 0


@pytest.mark.parametrize(
    "scores, values, block, message",
    [
        ([1, math.nan], [1, 2], 1, "scores: expected finite numbers or -inf, got"),
        ([1, math.inf], [1, 2], 1, "scores: expected finite numbers or -inf, got"),
        ([1, 2], [1, math.inf], 1, "values: expected finite numbers, got"),
        ([1, 2], [1], 1, "values: expected one for each of 2 scores, got 1"),
        ([1, 2], [1, 2], 0, "block: expected at least 1, got 0"),
    ],
)
def test_wrong_arguments(scores, values, block, message):
    with pytest.raises(ValueError, match=message):
        list(online_softmax(scores, values, block))


def test_examples_of_docstrings():
    results = doctest.testmod(trace)
    assert results.attempted >= 4 and results.failed == 0


def test_the_command_shows_formulas_steps_and_the_overflow():
    result = run()
    assert result.exit_code == 0
    assert "l' = correction * l + sum exp(s - m')" in result.stdout and "m  = max(m_a, m_b)" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(("1000, 999", "998"))]
    assert [row[-2:] for row in rows] == [["1.26894", "1.26894"], ["1.42479", "1.42479"]]
    assert "naive   output nan, exp(score) inf, inf, inf" in result.stdout


def test_the_command_prints_json():
    result = run("--scores", "1, 3,-inf", "--values", "2,0,5", "--block", 1, "--json")
    report = json.loads(result.stdout)
    assert [step["top"] for step in report["steps"]] == [1, 3, 3]
    assert [step["correction"] for step in report["steps"]] == [0, pytest.approx(math.exp(-2)), 1]
    assert report["steps"][-1]["out"] == pytest.approx(report["exact"]["out"], rel=1e-15)
    assert report["naive"]["out"] == pytest.approx(report["exact"]["out"], rel=1e-15)


def test_of_a_long_row_the_ends_are_printed_and_no_prefix_is_computed_twice(monkeypatch):
    computed = []
    exact = command.exact_softmax
    monkeypatch.setattr(command, "exact_softmax", lambda scores, values: computed.append(len(scores)) or exact(scores, values))
    scores = ",".join(map(str, range(1000)))
    result = run("--scores", scores, "--block", 1)
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith(tuple("0123456789")) and line[0].isdigit()]
    assert [int(row[0]) for row in rows] == [*range(8), *range(992, 1000)]
    assert "… 984 blocks, which --json prints as well" in result.stdout
    assert len(computed) == 17, "each printed block, and the row"
    assert "996, 997, 998, 999" in run("--scores", scores, "--block", 1000).stdout
    assert len(json.loads(run("--scores", scores, "--block", 1, "--json").stdout)["steps"]) == 1000


def test_scores_further_apart_than_the_largest_number():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        *_, last = online_softmax([-1e308, 1e308, -1e308], [1, 2, 3], 1)
        assert (last.out, exact_softmax([-1e308, 1e308], [1, 2])[1]) == (2, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--scores", "1,x"], "expected numbers, with commas between them, got 'x'"),
        (["--scores", "1,nan"], "scores: expected finite numbers or -inf"),
        (["--scores", "1,2", "--values", "1"], "values: expected one for each of 2 scores, got 1"),
        (["--block", 0], "0"),
    ],
)
def test_user_errors_end_with_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]
