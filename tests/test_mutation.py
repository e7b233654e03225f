"""Each barrier and each wait of each kernel is needed, and a run on the host shows it.

They are left out one at a time. A wrong result, a deadlock or a report of ThreadSanitizer must follow, where memory not yet
written holds NaN and asynchronous copies happen at once or as late as the remaining waits allow.
"""

import re
from dataclasses import replace
from itertools import count, product

import pytest

from cupy_flash import FaultError, SanitizerError, arrays, attention, host, plan_attention, plan_attention_backward, source
from cupy_flash.backward import BackwardPlan
from cupy_flash.cases import Case, make_inputs
from cupy_flash.compare import compare
from cupy_flash.compare_gradients import compare_gradients, make_cotangents
from cupy_flash.host import SCHEDULES
from cupy_flash.launch import AttentionPlan

KERNELS = sorted(file for file in source.files() if re.fullmatch(r"(fwd|bwd)_\w+\.cu", file))
CALL = re.compile(r"//.*|\b(?:sync|arrive|wait|commit)_\w+(?:<[^;]*>)?\([^;]*\);")  # or a comment, which may speak of one

# Many small tiles of keys, and a causal mask, so that the warps of a block see different ones and drift apart.
CASE = Case("float16", 40, 75, dim=32, heads_q=2, causal=True)
TWO_STAGES = {"TILE_Q": 32, "TILE_KV": 16, "WARPS": 2, "STAGES": 2, "Q_IN_REGISTERS": True}
# More tiles than blocks, so that a block takes several in turn, and two warpgroups besides the one that loads.
HOPPER_CASE = Case("float16", 150, 75, dim=32, heads_q=3, causal=True)
TWO_GROUPS = {"TILE_Q": 128, "TILE_KV": 16, "WARPS": 12, "STAGES": 2, "STAGES_V": 2, "STAGES_Q": 2}
TWO_PAIRS = {"TILE_Q": 32, "TILE_KV": 32, "WARPS": 4, "STAGES": 2}


def configurations(file):
    """Constants that between them reach every call of a kernel."""
    if file == "fwd_hopper.cu":
        return {"two stages": TWO_GROUPS, "one stage": TWO_GROUPS | {"STAGES": 1, "STAGES_V": 1, "STAGES_Q": 1}}
    constants = TWO_PAIRS if file.startswith("bwd") else TWO_STAGES
    return {
        "two stages": constants,
        "one stage": constants | {"STAGES": 1},
        "stores": constants | {"COPY_BYTES": 0},  # in place of copies: lanes see each other's after a barrier
    }


# The call with this number is left out. Decided when the kernel runs, so that it is built once for all of them.
LEFT_OUT = """\
#include <cstdlib>
static const int left_out = std::atoi(std::getenv("LEFT_OUT"));
"""


def calls_of(file):
    return [call for call in CALL.finditer(source.files()[file]) if not call[0].startswith("//")]


def with_choice(file):
    """The text of a kernel in which each call is made unless its number is that of the environment variable LEFT_OUT."""
    numbers = count()

    def choose(call):
        return call[0] if call[0].startswith("//") else f"{{ if (left_out != {next(numbers)}) {call[0]} }}"

    return LEFT_OUT + CALL.sub(choose, source.files()[file])


def results(kernel, constants):
    """The judgement on what a forward computes with these constants."""
    case, arch = (HOPPER_CASE, "90a") if kernel == "fwd_hopper" else (CASE, "80")
    inputs = make_inputs(case)
    plan = plan_attention(*inputs, backend="host", arch=arch, kernel=kernel, **case.options)
    changed = replace(plan.kernel, config=replace(plan.kernel.config, **constants))
    computed = AttentionPlan(plan.problem, changed, tuple(map(arrays.layout, inputs)), True)(*inputs)
    return compare(*computed, *inputs, **case.scores)


def gradients(kernel, constants):
    """The judgement on what a backward computes with these constants."""
    inputs, (dout, dlse) = make_inputs(CASE), make_cotangents(CASE)
    given = (dout, *inputs, *attention(*inputs, **CASE.options))
    options = {name: value for name, value in CASE.options.items() if name != "return_lse"}
    plan = plan_attention_backward(*given, dlse=dlse, backend="host", **options)
    changed = replace(plan.kernel, config=replace(plan.kernel.config, **constants))
    computed = BackwardPlan(plan.problem, changed, tuple(map(arrays.layout, (*given, dlse))))(*given, dlse=dlse)
    return compare_gradients(computed, dout, *inputs, dlse=dlse, **CASE.scores)


@pytest.fixture
def faults_without(monkeypatch, change_kernel):
    """A function that leaves one call out of a kernel and yields what is noticed in each configuration and schedule."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "thread")
    monkeypatch.setattr(host, "OPTIONS", (*host.OPTIONS, "-O0"))  # built in half the time

    def run(file, number):
        monkeypatch.setenv("LEFT_OUT", "-1" if number is None else str(number))
        change_kernel(file, with_choice(file))
        compute = gradients if file.startswith("bwd") else results
        for (name, constants), schedule in product(configurations(file).items(), SCHEDULES):
            monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
            try:
                comparison = compute(file.removesuffix(".cu"), constants)
                if not comparison.ok:
                    yield f"{name}, {schedule}: {comparison.message}"
            except (FaultError, SanitizerError) as error:
                yield f"{name}, {schedule}: {error}"

    return run


@pytest.mark.parametrize("file", KERNELS)
def test_kernel_as_it_is(file, faults_without):
    assert list(faults_without(file, None)) == []


def every_call():
    for file in KERNELS:
        for number, call in enumerate(calls_of(file)):
            line = call.string.count("\n", 0, call.start()) + 1
            yield pytest.param(file, number, id=f"{file}:{line}:{call[0]}")


@pytest.mark.parametrize("file, number", list(every_call()))
def test_left_out_call_is_noticed(file, number, faults_without):
    assert any(faults_without(file, number))
