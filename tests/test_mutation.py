"""Each barrier and each wait of each kernel is needed, and a run on the host shows it.

They are left out one at a time, also those in headers that are a part of several kernels. A wrong result, a deadlock or a report
of ThreadSanitizer must follow, where memory not yet written holds NaN and asynchronous copies happen at once or as late as the
remaining waits allow.
"""

import re
from dataclasses import asdict, dataclass, replace
from itertools import count, product
from unittest import mock

import numpy
import pytest
from mutation_settings import STAGED, diagonal, settings_of
from thinned import quick, thinned
from whole_groups import never_split

from cupy_flash import FaultError, SanitizerError, attention, attention_backward, plan_attention, plan_attention_backward
from cupy_flash.call.backward import BackwardPlan
from cupy_flash.call.forward import AttentionPlan
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.machine import host, source
from cupy_flash.machine.host import SCHEDULES
from cupy_flash.plan import grouping, read_gradients, read_hopper, schedule, whole_heads
from cupy_flash.plan.kernel import configure
from cupy_flash.problem.backward import Gradients

KERNELS = sorted(file.removesuffix(".cu") for file in source.files() if re.fullmatch(r"(fwd|bwd)_\w+\.cu|classify\.cu", file))
# Headers, and a kernel that each is a part of.
PARTS = {"tile/passes.cuh": "bwd_v2", "tile/key_block.cuh": "bwd_hopper", "tile/dq_protocol.cuh": "bwd_hopper"}
PARTS |= {"tile/key_loads.cuh": "bwd_hopper", "tile/stats_ahead.cuh": "bwd_hopper", "tile/dbias_sums.cuh": "bwd_hopper"}
PARTS |= {"tile/score_sums.cuh": "bwd_scores", "tile/element_sums.cuh": "bwd_scores", "tile/unit_tiles.cuh": "bwd_scores_hopper"}
PARTS |= {"tile/schedule.cuh": "fwd_v2", "tile/split.cuh": "fwd_v2", "tile/clipped.cuh": "fwd_hopper"}
OFTEN = ("fwd_hopper", "fwd_v2")  # kernels that are built for ThreadSanitizer in every check
# Or a comment, which may speak of one.
CALL = re.compile(r"//.*|\b(?:(?:sync|arrive|wait|commit|producer|consumer)_\w+|fence_proxy_async)(?:<[^;]*>)?\([^;]*\);")


# The call with this number is left out. Decided when the kernel runs, so that it is built once for all of them.
LEFT_OUT = """\
#ifndef LEFT_OUT
#define LEFT_OUT
#include <cstdlib>
#include <unistd.h>
static const int left_out = std::atoi(std::getenv("LEFT_OUT"));
#endif
"""


def texts_of(kernel):
    """The file of a kernel and the headers that are a part of it."""
    files = (f"{kernel}.cu", *(part for part, owner in PARTS.items() if owner == kernel))
    return {file: source.files()[file] for file in files}


def calls_of(kernel):
    """The calls with the files that they are in; the place in the list is the number of a call."""
    found = [(file, call) for file, text in texts_of(kernel).items() for call in CALL.finditer(text)]
    return [(file, call) for file, call in found if not call[0].startswith("//")]


def with_choice(kernel):
    """The texts of a kernel in which each call is made unless its number is that of the environment variable LEFT_OUT."""
    numbers = count()

    def choose(call):
        return call[0] if call[0].startswith("//") else f"{{ if (left_out != {next(numbers)}) {call[0]} }}"

    return {file: LEFT_OUT + slowed(file, CALL.sub(choose, text)) for file, text in texts_of(kernel).items()}


# Where little is done between two barriers, the other warps are slow, or the first would hardly ever come too early.
SLOW_WARPS = {
    "classify.cu": {
        "  const SharedAddress found_smem = shared_memory();": "warp_id() > 0",
        "        const int row0 = (int(tile) * parts + part) * 16;": "warp_id() > 0",
    },
    "tile/dbias_sums.cuh": {
        "  for (int step = 0; step < block.steps; ++step, block.advance(p)) {": "block_id() % 2 > 0 && !usleep(50000)",
    },
    "tile/schedule.cuh": {
        "  for_tiles([&](const ScheduledTile<Item>& tile) {": "tile.item.row / TILE_Q % WARPS > 0",
    },
}


def slowed(file, text):
    for line, is_slow in SLOW_WARPS.get(file, {}).items():
        assert line in text
        text = text.replace(line, f"{line} if ({is_slow}) usleep(2000);")
    return text


def results(kernel, setting):
    """The judgement on a forward."""
    case = setting.case
    inputs = make_inputs(case)
    kernel = setting.kernel or kernel
    masks = {} if setting.seen is None else {"mask": setting.seen}
    if setting.offsets is not None:
        return packed_results(kernel, setting, inputs)
    plan = plan_attention(*inputs, backend="host", arch=arch_of(kernel), kernel=kernel, **masks, **case.options)
    changed = replace(plan.kernel, config=replace(plan.kernel.config, **setting.constants))
    computed = AttentionPlan(plan.problem, changed, True)(*inputs, **masks)
    seen = {} if setting.seen is None else {"seen": setting.seen}
    return compare(*computed, *inputs, **seen, **case.scores)


def packed_results(kernel, setting, inputs):
    """The same of sequences; rows that belong to none are 0, and what lies there is no number."""
    q, k, v = (x.reshape(x.shape[-3:]) for x in inputs)
    for x, offsets in zip((q, k, v), (setting.offsets[0], *setting.offsets[1:] * 2)):
        x[:, offsets[-1] :] = numpy.nan
    lengths = {f"cu_seqlens_{side}": numpy.array(x, numpy.int32) for side, x in zip(("q", "kv"), setting.offsets)}
    plan = plan_attention(q, k, v, backend="host", arch=arch_of(kernel), return_lse=True, **lengths)
    changed = replace(plan.kernel, config=replace(plan.kernel.config, **setting.constants))
    out, lse = AttentionPlan(plan.problem, changed, True)(q, k, v, **lengths)
    (*_, end), (*_, end_kv) = setting.offsets
    if out[:, end:].any() or not numpy.isneginf(lse[:, end:]).all():
        return Agreement(False, "rows behind the sequences")
    seen, scale = diagonal(setting.offsets), q.shape[-1] ** -0.5
    return compare(out[:, :end], lse[:, :end], q[:, :end], k[:, :end_kv], v[:, :end_kv], seen=seen, scale=scale)


def gradients(kernel, setting):
    """The judgement on a backward."""
    case = setting.case
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    if setting.offsets is not None:
        return packed_gradients(kernel, setting, inputs, dout)
    masks, seen = ({} if setting.seen is None else {name: setting.seen} for name in ("mask", "seen"))
    arrays = case.arrays()
    given = (dout, *inputs, *attention(*inputs, **arrays, **masks, **case.options))
    options = {name: value for name, value in case.options.items() if name != "return_lse"}
    options |= {"deterministic": setting.deterministic, "arch": arch_of(kernel), "kernel": kernel}
    wrt = {"bias": arrays["bias"]} if case.bias else {}
    plan = plan_attention_backward(*given, dlse=dlse, **arrays, **masks, backend="host", wrt=tuple(wrt), **options)
    assert plan.kernels == (plan.kernel,)
    changed = replace(plan.kernel, config=replace(plan.kernel.config, **setting.constants))
    alone = {"RUNNING": 0, "heads_together": lambda plan, problem: 1} if setting.ahead else {}
    with mock.patch.multiple(grouping, LAST_BLOCKS=setting.last_blocks, **alone):
        computed = BackwardPlan(plan.problem, changed)(*given, dlse=dlse, **arrays, **masks)
    return compare_gradients(computed, dout, *inputs, dlse=dlse, wrt=wrt, **arrays, **seen, **case.scores)


def packed_gradients(kernel, setting, inputs, dout):
    """The same of sequences; what lies behind them is no number."""
    end, end_kv = (offsets[-1] for offsets in setting.offsets)
    q, k, v, dout = (x.reshape(x.shape[-3:]) for x in (*inputs, dout))
    for x, rows in zip((q, dout, k, v), (end, end, end_kv, end_kv)):
        x[:, rows:] = numpy.nan
    lengths = {f"cu_seqlens_{side}": numpy.array(x, numpy.int32) for side, x in zip(("q", "kv"), setting.offsets)}
    given = (dout, q, k, v, *attention(q, k, v, **lengths, return_lse=True))
    plan = plan_attention_backward(*given, backend="host", arch=arch_of(kernel), kernel=kernel, **lengths)
    changed = replace(plan.kernel, config=replace(plan.kernel.config, **setting.constants))
    dq, dk, dv = (x[:, :rows] for x, rows in zip(BackwardPlan(plan.problem, changed)(*given, **lengths)[:3], (end, end_kv, end_kv)))
    inputs = dout[:, :end], q[:, :end], k[:, :end_kv], v[:, :end_kv]
    return compare_gradients(Gradients(dq, dk, dv), *inputs, seen=diagonal(setting.offsets), scale=q.shape[-1] ** -0.5)


def sums_of_pairs(kernel, setting):
    """The judgement on the gradient of a bias that batch elements share, and of which a causal mask leaves some units nothing."""
    case = setting.case
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    arrays = case.arrays()
    given = (dout, *inputs, *attention(*inputs, **arrays, **case.options))

    def configured(*problem, **knobs):
        return replace(configure(*problem, **knobs), **setting.constants)

    with mock.patch.object(read_gradients, "configure", configured), mock.patch.object(read_hopper, "MULTIPROCESSORS", 4):
        plan = plan_attention_backward(*given, dlse=dlse, **arrays, backend="host", arch="90a", wrt="bias", causal=True)
        plan = BackwardPlan(plan.problem, plan.kernel)
    assert plan.kernels[1].file == kernel and setting.constants.items() <= asdict(plan.kernels[1].config).items()
    computed = plan(*given, dlse=dlse, **arrays)
    return compare_gradients(computed, dout, *inputs, dlse=dlse, wrt={"bias": arrays["bias"]}, **case.meaning())


@dataclass(frozen=True)
class Agreement:
    """Whether one gradient is that of NumPy."""

    ok: bool
    message: str


def sums_of_reads(kernel, setting):
    """The judgement on the gradient of a bias of keys, which heads and queries share: a block has several tiles to sum over."""
    case = setting.case
    inputs, (dout, _) = make_inputs(case), make_cotangents(case)
    options = {"bias": numpy.random.default_rng(0).standard_normal((1, case.len_kv), numpy.float32), "causal": True}
    out, lse = attention(*inputs, return_lse=True, **options)
    given = (dout, *inputs, out, lse)

    def configured(*problem, **knobs):
        return replace(configure(*problem, **knobs), **setting.constants)

    few = {"configure": configured, "MOST_BLOCKS": 1, "AT_A_TIME": 1}  # blocks, each of which takes several units
    with mock.patch.multiple(read_gradients, **few), mock.patch.object(read_hopper, "MULTIPROCESSORS", 1):
        plan = plan_attention_backward(*given, backend="host", arch=arch_of(kernel), wrt="bias", **options)
        plan = BackwardPlan(plan.problem, plan.kernel)
    assert plan.kernels[1].file == kernel and setting.constants.items() <= asdict(plan.kernels[1].config).items()
    with mock.patch.object(host, "MULTIPROCESSORS", 1):
        got = plan(*given, bias=options["bias"]).dbias
    expected = attention_backward(*given, wrt="bias", **options).dbias
    error, allowed = abs(got - expected).max(), 2**-12 * abs(expected).max()
    return Agreement(bool(error <= allowed), f"dbias: error {error}, allowed {allowed}")


def arch_of(kernel):
    return "90a" if "hopper" in kernel else "80"


@pytest.fixture(autouse=True)
def heads_are_shared(planned_anew, monkeypatch):
    """By blocks, but where a setting says that one has all of a head: of so few keys it would, and nobody would wait for others."""
    for paces in ("OF_NARROW", "OF_WIDE", "OF_GROUPS"):
        monkeypatch.setattr(whole_heads, paces, {})


@pytest.fixture
def faults_without(monkeypatch):
    """A function that leaves one call out of a kernel and yields what is noticed in each setting and schedule."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "thread")
    never_split(monkeypatch)
    monkeypatch.setattr(schedule, "LEAST_SPLIT", 32)  # so that blocks share even short tiles
    monkeypatch.setattr(schedule, "COMBINING", 0)

    def run(kernel, number, keep=1):
        monkeypatch.setenv("LEFT_OUT", "-1" if number is None else str(number))
        texts = with_choice(kernel)
        monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | texts)
        for (name, setting), order in product(list(settings_of(kernel).items())[::keep], SCHEDULES):
            sums = sums_of_pairs if setting.case.bias else sums_of_reads
            compute = sums if kernel.startswith("bwd_scores") else gradients if kernel.startswith("bwd") else results
            monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", order)
            try:
                comparison = compute(kernel, setting)
                if not comparison.ok:
                    yield f"{name}, {order}: {comparison.message}"
            except (FaultError, SanitizerError) as error:
                yield f"{name}, {order}: {error}"

    return run


@pytest.mark.parametrize("keep", [31, pytest.param(1, marks=pytest.mark.release)])  # of settings
@pytest.mark.parametrize("kernel", quick(KERNELS, *OFTEN))
def test_kernel_as_it_is(kernel, keep, faults_without):
    assert list(faults_without(kernel, None, keep)) == []


# Waits that only matter where blocks run at the same time, and one of them is slow.
BETWEEN_BLOCKS = {name: re.compile(rf"\bwait_for<LANES>\(\w+\.{name}, [^;]*\);") for name in ("acquired", "ended")}
BETWEEN_BLOCKS["reductions"] = re.compile(r"\bwait_for_reductions\(\);(?=\s*// without it others add)")
BETWEEN_BLOCKS["last"] = re.compile(r"\bsync_block\(\);(?=\s*// without it rows are finished)")
# The same of heads that use sums again: each has to be made by one that is slow to read them, or to clear them.
BEFORE_USE = {
    "read": re.compile(r"\bwait_for_count\([^;]*\.read\);"),
    "zeros": re.compile(r"\bwait_for_count\([^;]*\.cleared\);|\bwait_for_count\(p\.zeros_progress [^;]*;"),  # see test_zeros_ahead
    "calls": re.compile(r"\bwait_for_zeros\(p, block\);"),
    "lanes": re.compile(r"\bwait_for<LANES>\(block\.cleared, 0\);"),
    "splits": re.compile(r"\bsync_block\(\);(?=\s*// without it rows are missing)"),  # see test_split_keys
    "stats": re.compile(r"\bwait_for_stats\(p, block\);|\bwait_for_count\(p\.stats_progress [^;]*;"),  # see test_stats_ahead
}


# And two for the right time: without them a block takes its next key tile earlier, or loads for another head: no result changes.
FOR_TIME = re.compile(r"\bwait_for<LANES>\(block\.(loaded|values\.full\(\)), ")
# And one that a compiler needs, for registers.
FOR_ASSEMBLER = re.compile(r"\bconsumer_wait\(block\.queries\);(?=\s*// for the assembler)")


def every_call():
    for kernel in KERNELS:
        for number, (file, call) in enumerate(calls_of(kernel)):
            waits = *BETWEEN_BLOCKS.values(), *BEFORE_USE.values(), FOR_TIME, FOR_ASSEMBLER
            if not any(wait.match(call.string, call.start()) for wait in waits):
                line = call.string.count("\n", 0, call.start()) + 1
                marks = pytest.mark.release if number % 100 or kernel not in OFTEN else ()
                yield pytest.param(kernel, number, id=f"{file}:{line}:{call[0]}", marks=marks)


@pytest.mark.parametrize("kernel, number", list(every_call()))
def test_left_out_call_is_noticed(kernel, number, faults_without):
    assert any(faults_without(kernel, number))


# The lines that add to dq, by lanes and by TMA, which may add later than the semaphore is released.
BY_LANES, LATER = ("add_or_store(block, DqAccum{",), ("    add_async(", f"  wait_for_reductions();{'':38}// without it the block")


SLOW = [(True, "reductions"), (True, None), (False, None), (False, "acquired"), *product([False, True], ("ended", "last"))]


@pytest.mark.release  # without a fault, test_hopper_backward.py has blocks together as well
@pytest.mark.parametrize("staged, left_out", SLOW)
def test_blocks_wait_for_one_that_is_slow(staged, left_out, monkeypatch, change_kernel):
    """Three blocks at a time, the first the slowest to add: dq is right, and in order, sums have the bits of blocks in turn."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", "deferred" if staged else "eager")
    case = Case("float16", 60, 300, dim=32)
    inputs, (dout, _) = make_inputs(case), make_cotangents(case)
    given = (dout, *inputs, *attention(*inputs, return_lse=True))
    file = "tile/dq_protocol.cuh"
    text = source.files()[file]

    def computed(blocks, deterministic):
        """Whether gradients are right, and the sums that dq is made of."""
        plan = plan_attention_backward(*given, deterministic=deterministic, backend="host", arch="90a", kernel="bwd_hopper")
        assert plan.kernel.config.TILE_KV == 128 and plan.workspace.names[:2] == ("stats", "dq_accum")
        if staged:
            changed = replace(plan.kernel, config=replace(plan.kernel.config, **STAGED.constants))
            plan = BackwardPlan(plan.problem, changed)
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(blocks * plan.kernel.config.WARPS))
        workspace = numpy.full(plan.workspace_bytes, 255, numpy.uint8)
        gradients = plan(*given, workspace=workspace)
        return compare_gradients(gradients, dout, *inputs, **case.scores).ok, workspace[slice(*plan.workspace.offsets[1:3])]

    def sleep(milliseconds):
        return f"std::this_thread::sleep_for(std::chrono::milliseconds({milliseconds}));"

    _, expected = computed(1, True)
    for name, wait in BETWEEN_BLOCKS.items():
        assert len(wait.findall(text)) == 1
        if name == left_out:
            text = wait.sub(f"{{ {sleep('50 * block_id()')} }}", text)
    for line in LATER if staged else BY_LANES:
        assert text.count(line) == 1
        text = text.replace(line, sleep("200 * (2 - block_id())") + line)
    change_kernel(file, text)
    (right_in_order, sums), (right, _) = computed(3, True), computed(3, False)
    assert (right_in_order and right and numpy.array_equal(sums, expected)) == (left_out is None)


USED_AGAIN = [(False, "read")]  # without a fault, test_hopper_backward.py has sums used again as well
USED_AGAIN += [pytest.param(False, name, marks=pytest.mark.release) for name in (None, "lanes", "zeros", "calls")]
USED_AGAIN += [pytest.param(True, name, marks=pytest.mark.release) for name in (None, "read", "zeros", "calls")]


@pytest.mark.release
@pytest.mark.parametrize("heads_per_block", thinned([1, 2]))
@pytest.mark.parametrize("staged, left_out", USED_AGAIN)
def test_sums_are_used_again_when_they_are_zero(staged, left_out, heads_per_block, monkeypatch):
    """Blocks of a key head each, all at once, in three groups: the last one has the sums of the first, which the second clears."""
    monkeypatch.setattr(grouping, "CLEARING_BLOCKS", 1)
    monkeypatch.setattr(grouping, "LAST_BLOCKS", 1)
    never_split(monkeypatch)
    case = Case("float16", 60, 70, dim=32, heads_q=17 * heads_per_block, heads_kv=17)
    inputs, (dout, _) = make_inputs(case), make_cotangents(case)
    given = (dout, *inputs, *attention(*inputs, return_lse=True))
    plan = plan_attention_backward(*given, backend="host", arch="90a", kernel="bwd_hopper")
    constants = (STAGED.constants if staged else {}) | {"FIRST_STORES": False}  # or one tile of keys would ask for no zeros
    plan = BackwardPlan(plan.problem, replace(plan.kernel, config=replace(plan.kernel.config, **constants)))
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(20 * plan.kernel.config.WARPS))

    def slow(line, owner, milliseconds):
        """With the last head of a block, whose number both loops call i."""
        sleep = f"std::this_thread::sleep_for(std::chrono::milliseconds({milliseconds}));"
        slow_here = f"if (block_id() / 8 == {owner} && i == p.heads_per_block - 1) {sleep}\n"
        assert sum(text.count(line) for text in texts.values()) == 1
        return {file: text.replace(line, slow_here + line) for file, text in texts.items()}

    texts = texts_of("bwd_hopper")
    if left_out in (None, "read"):
        texts = slow("      load(sum_reg, Accum{", 0, 1500)
    if left_out != "read":
        texts = slow("    clear(sums, begin, end);", 1, 500)
    if left_out:
        assert any(BEFORE_USE[left_out].search(text) for text in texts.values())
        texts = {file: BEFORE_USE[left_out].sub("{}", text) for file, text in texts.items()}
    monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | texts)
    assert compare_gradients(plan(*given), dout, *inputs, **case.scores).ok == (left_out is None)
