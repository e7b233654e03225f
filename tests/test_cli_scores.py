"""What comes to scores, spelt out on the command line: plans and sources are those of the same calls in Python."""

import json
import re

import numpy
import pytest
from click.testing import CliRunner

from cupy_flash import KeyRanges, plan_attention, plan_attention_backward
from cupy_flash.cli import main
from cupy_flash.machine.source import source_of

SHAPE = "2x6x50x64"
Q, LSE = numpy.zeros((2, 6, 50, 64), numpy.float16), numpy.zeros((2, 6, 50), numpy.float32)
SCORE = "score + t[h] * (kv_idx - q_idx) * gain + table[abs(q_idx - kv_idx) % 32, h]"
TEXTS = ("--score", SCORE, "--array", "t:float32:h", "--array", "gain:float32", "--array", "table:float16:32,h")
ARRAYS = {"t": numpy.zeros(6, numpy.float32), "gain": 0.5, "table": numpy.zeros((32, 6), numpy.float16)}
MASK = "doc[b, q_idx] == doc[b, kv_idx]"
SLOPES = numpy.zeros(6, numpy.float32)
SAME = {
    "score": (TEXTS, {"score": SCORE, "arrays": ARRAYS}),
    "mask": (("--mask", MASK, "--array", "doc:int8:b,q_idx"), {"mask": MASK, "arrays": {"doc": numpy.zeros((2, 50), numpy.int8)}}),
    "ranges": (("--ranges", 3, "--causal"), {"mask": KeyRanges(*numpy.zeros((2, 50, 3), numpy.int32)), "causal": True}),
    "bias": (("--bias", "h,1,kv_idx"), {"bias": numpy.zeros((6, 1, 50), numpy.float16)}),
    "others": (("--alibi", "--sinks", "--dropout", 0.25), {"alibi_slopes": SLOPES, "sinks": SLOPES, "dropout": 0.25, "seed": 1}),
}


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("given, options", SAME.values(), ids=SAME)
def test_it_is_what_the_functions_plan(given, options, arch):
    plan = plan_attention(Q, Q, Q, backend="host", arch=arch, **options)
    backward = plan_attention_backward(Q, Q, Q, Q, Q, LSE, backend="host", arch=arch, **options)
    for planned, direction in ((plan, ()), (backward, ("--backward",))):
        text = "".join(f"// ---- {name} ----\n{file}\n" for name, file in source_of(planned.kernel).items())
        assert run("source", SHAPE, *given, *direction, "--arch", arch).stdout == text
        printed = run("plan", SHAPE, *given, *direction, "--arch", arch).stdout
        problem = planned.problem if planned is plan else planned.problem.forward
        assert problem.scores and all(f"  {line}\n" in printed for line in str(problem.scores).splitlines())


def test_json_has_expressions_in_words():
    for direction in ((), ("--backward",)):
        result = run("plan", SHAPE, *TEXTS, *direction, "--arch", "80", "--json")
        problem = json.loads(result.stdout)["problem"]
        lines = problem["forward"]["scores"] if direction else problem["scores"]
        assert lines[0].startswith("score: score + t[h] * float(kv_idx - q_idx)") and lines[1] == "  its derivative: 1.0"
    assert json.loads(run("plan", SHAPE, "--arch", "80", "--json").stdout)["problem"]["scores"] == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--score", "scor"), "score: expected one of b, h, h_kv, .* got 'scor' at column 1"),
        (("--mask", "h"), "mask: expected a bool, which says whether a query sees a key, got an int"),
        (("--score", "t[h]", "--array", "t:float32:q_idx"), r"arrays\['t'\]: expected 6 elements along axis 0"),
        (("--array", "t:float32:h"), r"arrays\['t'\]: expected an array that is read by a score or a mask"),
        (("--score", "t", "--array", "t:float32", "--array", "t:int8"), "--array: expected a name once, got 't' twice"),
        (("--score", "t", "--array", "t:float"), "expected a name, a dtype and axes, .* got 't:float'"),
        (("--score", "t", "--array", "t"), "expected a name, a dtype and axes, .* got 't'"),
        (("--score", "t", "--array", "t:int8:h:1"), "expected a name, a dtype and axes, .* got 't:int8:h:1'"),
        (("--score", "t[h]", "--array", "t:int8:heads"), "expected axes .* b, h, h_kv, q_idx, kv_idx or sizes, got 'heads'"),
        (("--score", "t[h]", "--array", "t:int8:h,"), "expected axes .*, got 'h,'"),
        (("--score", "h", "--array", "h:int8"), "arrays: expected names that mean nothing else in an expression, got 'h'"),
        (("--bias", "b,h"), "bias: expected a shape of at least 2 axes that broadcasts to"),
        (("--ranges", "9"), "mask.start: expected 1 to 8 ranges"),
        (("--ranges", "0"), "0 is not in the range"),
        (("--ranges", "1", "--mask", "h < 1"), "--mask and --ranges exclude each other"),
        (("--dropout", "1"), "dropout: expected a number of at least 0 and below 1, got 1.0"),
        (("--alibi", "--algorithm", "v1"), "algorithm: expected 'auto' or 'v2' with score, mask"),
    ],
)
def test_mistakes_end_with_2_and_say_what_was_wrong(arguments, message):
    result = run("plan", SHAPE, *arguments)
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert re.search(message, result.stderr.replace("\n", " "))
