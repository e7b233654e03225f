"""Each barrier and each wait of each kernel is needed, and a run on the host shows it.

They are deleted one at a time. A wrong result, a deadlock or a report of ThreadSanitizer must follow, where memory not yet
written holds NaN and asynchronous copies happen at once or as late as the remaining waits allow.
"""

import re
from dataclasses import replace

import pytest

from cupy_flash import DeadlockError, SanitizerError, arrays, host, plan_attention, source
from cupy_flash.cases import Case, make_inputs
from cupy_flash.compare import compare
from cupy_flash.host import SCHEDULES
from cupy_flash.launch import AttentionPlan

KERNELS = sorted(file for file in source.files() if re.fullmatch(r"fwd_\w+\.cu", file))
CALL = re.compile(r"\b(?:sync|wait|commit)_\w+(?:<[^;]*>)?\([^;]*\);")

# Many small tiles of keys, and a causal mask, so that the warps of a block see different ones and drift apart.
CASE = Case("float16", 40, 75, dim=32, heads_q=2, causal=True)
TWO_STAGES = {"TILE_Q": 32, "TILE_KV": 16, "WARPS": 2, "STAGES": 2, "Q_IN_REGISTERS": True}
CONFIGURATIONS = {  # between them they reach every call
    "two stages": TWO_STAGES,
    "one stage": TWO_STAGES | {"STAGES": 1},
    "stores": TWO_STAGES | {"COPY_BYTES": 0},  # in place of copies: lanes see each other's after a barrier
}


def calls():
    """A parameter for each call in each kernel: the file, and where in it the call begins and ends."""
    for file in KERNELS:
        text = re.sub("//.*", lambda comment: " " * len(comment[0]), source.files()[file])
        for call in CALL.finditer(text):
            line = text.count("\n", 0, call.start()) + 1
            yield pytest.param(file, *call.span(), id=f"{file}:{line}:{call[0]}")


@pytest.fixture
def fault_of(monkeypatch):
    """A function that runs a kernel and says what was noticed, or None."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "thread")
    monkeypatch.setattr(host, "OPTIONS", tuple("-O0" if option == "-O2" else option for option in host.OPTIONS))

    def run(file, configuration, schedule):
        monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
        inputs = make_inputs(CASE)
        problem, kernel = (plan := plan_attention(*inputs, backend="host", **CASE.options)).problem, plan.kernel
        kernel = replace(kernel, kernel=file.removesuffix(".cu"), config=replace(kernel.config, **configuration))
        plan = AttentionPlan(problem, kernel, tuple(map(arrays.layout, inputs)), returns_lse=True)
        try:
            comparison = compare(*plan(*inputs), *inputs, **CASE.scores)
        except (DeadlockError, SanitizerError) as error:
            return str(error)
        return None if comparison.ok else comparison.message

    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("file", KERNELS)
def test_kernel_as_it_is(file, configuration, schedule, fault_of):
    assert fault_of(file, CONFIGURATIONS[configuration], schedule) is None


@pytest.mark.parametrize("file, start, stop", calls())
def test_deleted_call_is_noticed(file, start, stop, fault_of, change_kernel):
    text = source.files()[file]
    change_kernel(file, f"{text[:start]};{text[stop:]}")
    runs = ((configuration, schedule) for configuration in CONFIGURATIONS.values() for schedule in SCHEDULES)
    assert any(fault_of(file, *run) for run in runs), f"{file} does without {text[start:stop]}"
