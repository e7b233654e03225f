"""The fuzzers: what they draw, that they find what is wrong, and that they find nothing here."""

import os
import re
import shlex
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner
from thinned import thinned

import cupy_flash
from cupy_flash.call import forward
from cupy_flash.judge.fuzz import __main__ as command
from cupy_flash.judge.fuzz import calls, judging, objects, outcomes, problems, verdict
from cupy_flash.judge.fuzz.draw import Draw
from cupy_flash.judge.fuzz.options import UNKNOWN, Value, draw_value, values_of
from cupy_flash.judge.fuzz.placement import Placed, draw_placement
from cupy_flash.judge.fuzz.recipes import recipes_of_pairs
from cupy_flash.judge.fuzz.supervise import Failure, supervise
from cupy_flash.machine.numpy_path import backward as numpy_backward
from cupy_flash.machine.numpy_path import forward as numpy_forward
from cupy_flash.problem import options

ROOT = Path(__file__).resolve().parent.parent
SEED = 12  # whose kernels are compiled sooner than those of most
MALFORMED, PROBLEMS = 7, 6  # at a time


def several_times(turns):
    return pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.release) for turn in range(1, turns))])


def fuzz(*arguments):
    command = [sys.executable, "-m", "cupy_flash.judge.fuzz", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


# The package


@several_times(400)
def test_malformed_calls_are_refused(turn):
    done = fuzz("calls", "--count", MALFORMED, "--seed", SEED, "--start", turn * MALFORMED)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr


@several_times(72)
def test_random_problems_are_computed_right(turn):
    """In this process, where kernels are built sooner than by the command."""
    drawn = range(turn * PROBLEMS, (turn + 1) * PROBLEMS)
    assert [wrong for i in drawn if (wrong := judging.run(SEED, i))] == []


@pytest.mark.release
@pytest.mark.parametrize("seed", [31, 32, 33, 34])
def test_random_pairs_are_computed_right(seed):
    """Scores, masks, biases, ALiBi and dropout: 2,000 problems on NumPy, 900 by kernels."""
    done = fuzz("pairs", "--count", 750, "--seed", seed)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr


def test_some_random_pairs_are_computed_right_on_numpy():
    drawn = [i for i in range(60) if problems.draw_problem_of_pairs(SEED, i).backend != "host"]
    assert len(drawn) > 30
    assert [wrong for i in drawn if (wrong := judging.run(SEED, i, "pairs"))] == []


# What is drawn

KINDS = """
    forward, backward, deterministic, with_dlse, own_workspace, entry call, entry plan, entry vjp,
    dtype float16, dtype bfloat16, dtype float32, dtype tf32, dtype float64,
    backend auto, backend numpy, backend host, arch 75, arch 80, arch 90a, schedule eager, schedule deferred,
    algorithm auto, algorithm v1, algorithm v2, kernel None, kernel fwd_v2, kernel fwd_hopper, kernel bwd_v2,
    group 0, group 1, group 2, group 3, group 5, group 7, group 8, axes 2, axes 3, axes 4, axes 5, axes 6,
    dim != dim_v, broadcast, missing axes, empty, window, causal False, causal True, causal top_left, causal bottom_right,
    scale, scale 0, scale < 0, scale tiny, scale large, softcap, softcap small, softcap large,
    values normal, values offset, values large, values one_hot, values constant, values hidden, values nan_key,
    given out, given lse, given dq, given dk, given dv,
    sinks normal, sinks above, sinks below, sinks one of -inf, sinks of 1 axes, sinks of 2 axes, sinks in the dtype,
    sinks forward, sinks backward, sinks on the host
"""
LAYOUTS = ("transposed", "dim not fastest", "negative stride", "strided", "strided dim", "sliced", "odd offset")


def test_every_kind_of_problem_is_drawn():
    wanted = {kind.strip() for kind in KINDS.split(",")}
    wanted |= {f"{name} {layout}" for name in ("q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv") for layout in LAYOUTS}
    wanted |= {f"sinks {layout}" for layout in LAYOUTS}
    wanted |= {f"{name} stride 0" for name in ("q", "k", "v", "dout", "dlse", "sinks")}
    wanted -= {"dq odd offset", "dk odd offset", "dv odd offset"}  # of NumPy alone, and rare
    found = Counter(kind for i in range(2000) for kind in problems.draw_problem(SEED, i).kinds)
    assert sorted(wanted - found.keys()) == []


PAIRS = """
    score relative, score temperature, score decay, score gate, score leaky, score soft_clip,
    mask documents, mask prefixes, mask windows, mask holes, mask array, mask ranges, alibi, dropout,
    kept documents, kept array, kept ranges,
    bias float16, bias bfloat16, bias float32, bias float64, bias of 2 axes, bias of 3 axes, bias of 4 axes, bias of 5 axes,
    mask of 2 axes, mask of 4 axes, alibi_slopes of 1 axes, alibi_slopes of 2 axes, bias stride 0, mask stride 0,
    bias transposed, bias negative stride, bias sliced, bias odd offset, mask transposed, mask negative stride,
    alibi_slopes strided, arch 75, arch 80, arch 90a, schedule eager, schedule deferred,
    forward, backward, dtype tf32, dtype float64, window, softcap,
    sinks forward, sinks backward, causal top_left, group 7, broadcast, empty, layout bshd, deterministic
"""


def test_every_kind_of_pairs_is_drawn():
    wanted = {kind.strip() for kind in PAIRS.split(",")}
    found = Counter(kind for i in range(1500) for kind in problems.draw_problem_of_pairs(SEED, i).kinds)
    assert sorted(wanted - found.keys()) == []


def test_masks_are_drawn_for_values_that_are_wider_and_no_wider_than_keys():
    """Where keys are narrow, the width of values decides whether each consumer of fwd_hopper has a list of its own."""
    drawn = [recipes_of_pairs(seed)[-1] for seed in range(16)]
    assert all(x.arch == "90a" and x.asked.mask and x.width <= 64 for x in drawn)
    assert {x.width_v > 64 for x in drawn} == {False, True}


def test_a_bias_off_by_one_percent_is_found(monkeypatch):
    original = judging.arguments

    def wrong(pairs, arrays):
        given = original(pairs, arrays)
        return given | ({"bias": (given["bias"] * 1.01).astype(given["bias"].dtype)} if "bias" in given else {})

    monkeypatch.setattr(judging, "arguments", wrong)
    drawn = ((i, problems.draw_problem_of_pairs(SEED, i)) for i in range(200))
    of_biases = [i for i, x in drawn if x.backend != "host" and "bias" in x.pairs.shapes and x.dtype in ("float32", "float64")]
    assert any("FAILS" in (judging.run(SEED, i, "pairs") or "") for i in of_biases[:12])


def test_every_argument_of_every_function_is_broken_and_some_calls_are_right():
    drawn = [calls.draw_call(SEED, i) for i in range(2000)]
    broken = {(call.function, name) for call in drawn for name in call.broken}
    wanted = {(function, name) for function in calls.FUNCTIONS for name in calls._parameters(function)}
    assert sorted(wanted - broken) == []
    found = Counter(call.ok for call in drawn)
    assert found[False] > 1000 and found[True] > 50 and found[None] > 50


OPTIONS = ("scale", "causal", "window", "softcap", "precision", "algorithm", "backend", "arch", "kernel", "deterministic")


@pytest.mark.parametrize("option", thinned(OPTIONS, keep=4))
def test_every_value_of_an_option_is_drawn(option):
    draw = Draw("values", 1, 0)
    found = {draw_value(draw, option, backward=False).label for _ in range(2000)}
    assert {value.label for value in values_of(option, backward=False)} - found == set()


def test_every_kind_of_object_is_drawn():
    draw, array = Draw("objects", 1, 0), numpy.zeros((2, 3))
    labels = " ".join(objects.draw_object(draw, array).label for _ in range(2000))
    for kind in ("an array interface", "a CUDA array interface", "DLPack", "__array__", "hostile", "ragged", "generator", "JAX"):
        assert kind in labels


def test_a_problem_and_a_call_follow_from_seed_and_number_alone():
    program = """if True:
        from cupy_flash.judge.fuzz import calls, judging, problems
        for i in (907, 3, 44):
            problem = problems.draw_problem(5, i)
            print(problem, calls.draw_call(5, i), judging._arrays(problem)["q"].array.ravel()[:3])
    """

    def text(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=ROOT, env=environment).stdout

    assert text("1") == text("2") != b""


def test_placements_hold_the_values_and_notice_what_is_written():
    for i in range(300):
        draw = Draw("placement", 1, i)
        values = draw.numbers().standard_normal((2, 3, 4)).astype("f4")
        placed = Placed(values, draw_placement(draw, 3, result=True))
        assert (placed.array == values).all() and placed.unchanged() and placed.unchanged_around()
        placed.array[...] = 0
        assert not placed.unchanged() and placed.unchanged_around()
        placed._buffer[draw.one((0, -1))] = 0
        assert not placed.unchanged_around()


# Planted faults are found: in problems


def found_by(seed, count, **wanted):
    """What is said of the first problems that are like this."""
    for i in range(count):
        problem = problems.draw_problem(seed, i)
        if problem.backend != "host" and all(getattr(problem, name) == value for name, value in wanted.items()):
            wrong = judging.run(seed, i)
            if wrong:
                yield wrong


def test_numpy_problems_without_a_planted_fault_pass():
    assert list(found_by(SEED, 120)) == []


def test_a_scale_off_by_one_percent_is_found(monkeypatch):
    original = numpy_forward.blocked
    monkeypatch.setattr(numpy_forward, "blocked", lambda *x, scale, **rest: original(*x, scale=1.01 * scale, **rest))
    assert any(re.match("out: error .* FAILS", wrong) for wrong in found_by(SEED, 100, direction="forward"))


def test_a_gradient_off_by_one_percent_is_found(monkeypatch):
    original = numpy_backward.blocked_gradients

    def wrong(*arrays, dk, **rest):
        original(*arrays, dk=dk, **rest)
        dk *= 1.01

    monkeypatch.setattr(numpy_backward, "blocked_gradients", wrong)
    assert any("dk: error" in wrong and "FAILS" in wrong for wrong in found_by(SEED, 200, direction="backward", dtype="float64"))


@pytest.mark.parametrize("message", ["out: written beside it", "q: written, although it is an input"])
def test_a_write_where_none_belongs_is_found(monkeypatch, message):
    original = numpy_forward.blocked

    def wrong(q, k, v, *, out, **rest):
        original(q, k, v, out=out, **rest)
        memory = out if message.startswith("out") else q
        while memory.base is not None:
            memory = memory.base
        memory.reshape(-1)[:1] = 0

    monkeypatch.setattr(numpy_forward, "blocked", wrong)
    assert any(found.startswith(message) for found in found_by(SEED, 200, direction="forward"))


def test_a_mask_that_is_off_by_one_is_found(monkeypatch):
    original = numpy_forward.blocked

    def wrong(*arrays, mask, **rest):
        original(*arrays, mask=mask if mask.right is None else replace(mask, right=mask.right + 1), **rest)

    monkeypatch.setattr(numpy_forward, "blocked", wrong)
    assert any("FAILS" in found for found in found_by(SEED, 100, direction="forward"))


# And in calls


def call_of(target, name="scale", value="x", arrays="q", ok=False, twin=UNKNOWN, means=UNKNOWN):
    """A call of which one option is broken."""
    valid = dict.fromkeys(arrays, numpy.ones((2, 3), "f4"))
    broken = {name: Value("broken", value, ok, means, twin)}
    return calls.Call("attention", target, valid | {name: value}, valid, broken, (), ok, frozenset((*arrays, name)))


def planted(error=None, before=None):
    def target(q, scale=None):
        if scale is not None:
            if before is not None:
                before(q)
            if error is not None:
                raise error

    return target


def chained(q):
    try:
        raise KeyError("first")
    except KeyError as first:
        raise ValueError("scale: expected a number, got 'x'") from first


RIGHT = ValueError("scale: expected a number, got 'x'")


@pytest.mark.parametrize(
    "target, wrong",
    [
        (planted(KeyError("scale: x")), "wrong kind of error: KeyError: 'scale: x'"),
        (planted(UnicodeError("scale: x")), "wrong kind of error: UnicodeError: scale: x"),
        (planted(ValueError("what is this")), "no argument named: ValueError: what is this"),
        (planted(before=chained), f"two tracebacks: ValueError: {RIGHT}; the other one: KeyError"),
        (planted(RIGHT, lambda q: q.fill(0)), f"q: written, and then ValueError: {RIGHT}"),
        (planted(RIGHT, lambda q: warnings.warn("odd", stacklevel=1)), "UserWarning: odd"),
        (planted(RIGHT, lambda q: numpy.ones(10**8, "u1").repeat(3)), f"400 MB allocated; ValueError: {RIGHT}"),
        (planted(), "accepted"),
        (lambda q: None, None),  # Python's own word about an argument that does not exist
        (planted(RIGHT), None),
    ],
)
def test_a_wrong_outcome_is_found(target, wrong):
    assert outcomes.judge(call_of(target)) == wrong


def test_a_refused_valid_call_is_found():
    assert outcomes.judge(call_of(planted(RIGHT), ok=True)) == f"a valid call was refused: ValueError: {RIGHT}"


def test_an_outcome_that_depends_on_earlier_calls_is_found():
    """What a cache that takes True for 1 does."""
    seen = set()

    def target(q, window=None):
        if window is not None and window not in seen:
            if window[0] is True:
                raise TypeError("window: got True")
            seen.add(window)

    wrong = outcomes.judge(call_of(target, "window", (True, 1), twin=(1, 1)))
    assert wrong == "after an equal call otherwise: accepted; at first: TypeError: window: got True"


def test_a_check_left_out_of_the_package_is_found(monkeypatch):
    monkeypatch.setattr(options.Options, "resolve_softcap", lambda self, dtype: None)
    forward._prepared.cache_clear()
    assert outcomes.judge(call_of(cupy_flash.attention, "softcap", -1.0, "qkv")) == "accepted"
    forward._prepared.cache_clear()


def test_a_wrong_result_of_a_valid_call_is_found():
    call = call_of(lambda q, k, v, scale=None: q + 1, "scale", numpy.float32(1), "qkv", ok=True, means=1.0)
    assert outcomes.judge(call).startswith("wrong result: out: error 1.00e+00, allowed ")


def test_verdicts_agree_with_the_documentation():
    q, k = numpy.ones((6, 4, 8), "f2"), numpy.ones((2, 5, 8), "f2")
    assert verdict.attention({"q": q, "k": k, "v": k}, {}) is True
    assert verdict.attention({"q": q, "k": k, "v": k[:, 1:]}, {}) is False
    assert verdict.attention({"q": q, "k": k, "v": k, "out": q}, {}) is False  # overlaps
    assert verdict.attention({"q": q, "k": k, "v": k}, {"precision": "tf32"}) is False
    given = {(6,): ("f2", True), (3, 6): ("f4", True), (2,): ("f2", False), (6, 1): ("f4", False), (1, 6): ("i4", False)}
    for shape, (dtype, ok) in given.items():
        assert verdict.attention({"q": q, "k": k, "v": k, "sinks": numpy.zeros(shape, dtype)}, {}) is ok
    assert verdict.result_shape(q[None], k, k[None]) == (1, 6, 4, 8)


# The process beside

WORKER = """if True:
    import json, os, sys, time
    start, count = map(int, sys.argv[3:])
    for i in range(start, start + count):
        print(json.dumps({"at": i}), flush=True)
        if i == 2:
            print(json.dumps({"failed": i, "what": "wrong"}), flush=True)
        if i == 4:
            os.abort()
        if i == 6:
            time.sleep(600)
        if i == 8:
            sys.exit("said")
"""


def test_crashes_and_hangs_are_reported_and_the_range_goes_on():
    happened = list(supervise("calls", 1, 0, 10, seconds=2, worker=(sys.executable, "-c", WORKER)))
    assert [x for x in happened if not isinstance(x, Failure)] == list(range(10))
    failures = {x.index: x.what for x in happened if isinstance(x, Failure)}
    assert list(failures) == [2, 4, 6, 8]
    assert failures[2] == "wrong"
    assert failures[4].startswith("the process ended with signal 6")
    assert failures[6].startswith("still running after 2 seconds")
    assert failures[8] == "the process ended with status 1\n  said"


def test_a_failure_is_printed_with_the_line_that_repeats_it(monkeypatch):
    def supervised(kind, seed, start, count, seconds):
        yield 4711
        yield Failure(4711, "accepted\n  attention(q=<a string>)")

    monkeypatch.setattr(command, "supervise", supervised)
    done = CliRunner().invoke(command.main, ["calls", "--seed", "1", "--start", "4711", "--count", "1"])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "python -m cupy_flash.judge.fuzz calls --seed 1 --start 4711 --count 1"
    assert lines[1:3] == ["  accepted", "  attention(q=<a string>)"]
    assert lines[-1] == "     1  accepted"


def test_nothing_found_is_said_so(monkeypatch):
    monkeypatch.setattr(command, "supervise", lambda *_: iter([0, 1]))
    done = CliRunner().invoke(command.main, ["problems", "--count", "2"])
    assert (done.exit_code, done.stdout) == (0, "2 problems of seed 1 in 0 s: all as it should be\n")


def test_commands_in_the_page_for_contributors_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.findall(r"python -m cupy_flash\.judge\.fuzz ([^\n`|]+)", page)
    assert len(lines) >= 3
    for line in lines:
        command.main.make_context("fuzz", shlex.split(line, comments=True)).close()
