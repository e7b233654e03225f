"""The shared cases on a device: every forward and every backward, by all kernels that serve it."""

import math

import pytest

from cupy_flash import attention, plan_attention, plan_attention_backward
from cupy_flash.judge import check
from cupy_flash.judge.cases import full_cases, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.plan.architecture import architecture_of
from cupy_flash.plan.packing import packing_of

cupy = pytest.importorskip("cupy")


ALL = [case for case in full_cases() if case.dtype != "float64"]
CASES = [case for case in ALL if not case.of_pairs]


@pytest.fixture(scope="module", autouse=True)
def kernels(compiling):
    """Compiled in parallel, as `check` does: one after another they take longer than all the rest. Heavy cases need few others."""
    computations = check.select_computations("cuda", architecture=own_architecture())
    tasks = {case: computations for case in CASES if not case.heavy}
    with compiling():
        list(check.build_kernels(check.kernels_of(tasks, "cuda"), "cuda"))


@pytest.fixture(scope="module", params=CASES, ids=str)
def given(request):
    """A case, its inputs, dout and dlse, and other arrays by name: made once for all tests of it, which come one after another."""
    case = request.param
    return case, make_inputs(case, cupy), make_cotangents(case, cupy), case.arrays(cupy)


def own_architecture():
    return architecture_of(cupy.cuda.Device().compute_capability)


def check_kernel(plan, name):
    assert plan.kernel.file == name
    assert plan.kernel.architecture == own_architecture()


def tma_can_move(x):
    """Whether TMA can: rows without gaps between elements, all else 16 bytes or multiples of them apart."""
    *steps, step = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.strides)]
    return x.size > 0 and step in (0, x.itemsize) and all(n >= 0 and n % 16 == 0 for n in (*steps, x.data.ptr))


def best_kernel(case, inputs, others):
    """What the planner should choose for v2."""
    moved = (*inputs, attention(*inputs, algorithm="v1", **others))
    served = own_architecture().name == "90a" and case.dtype != "float32" and all(map(tma_can_move, moved))
    return "fwd_hopper" if served else "fwd_v2"


def left_to_v2(plan):
    """Whether few rows, short sequences or narrow windows are for a kernel of smaller blocks, though there is another one."""
    return any(reason.startswith(("short sequences", "few rows: a warpgroup", "a narrow window")) for reason in plan.kernel.reasons)


def in_parts(case, plan):
    """Whether float32 is in numbers of float16, as it is where that takes less time, see test_fp16_parts.py."""
    parts = (1 if case.precision == "tf32" else 2) if case.dtype == "float32" else 0
    assert plan.kernel.config.FP16_PARTS in (0, parts)
    return plan.kernel.config.FP16_PARTS > 0


def plan_of_best(case, inputs, others):
    """The planner's choice, or where it leaves a small case to fwd_v2, which is tested by itself, the other kernel."""
    plan = plan_attention(*inputs, **case.options, **others)
    best = "fwd_hopper" if in_parts(case, plan) else best_kernel(case, inputs, others)
    if left_to_v2(plan):
        plan = plan_attention(*inputs, kernel=best, **case.options, **others)
    check_kernel(plan, best)
    return plan


@pytest.mark.parametrize("kernel", [None, "fwd_v2", "fwd_v1"])
def test_forward(given, kernel):
    case, inputs, _, others = given
    if kernel is None:
        plan = plan_of_best(case, inputs, others)
    else:
        plan = plan_attention(*inputs, kernel=kernel, **case.options, **others)
        check_kernel(plan, kernel)
    result = plan(*inputs, **others)
    out, lse = result if case.return_lse else (result, None)
    judged = compare(out, lse, *inputs, precision=case.precision, **case.scores, **others)
    assert judged.ok, judged.message


def test_forward_whose_blocks_share_tiles(given, shared):
    case, inputs, _, others = given
    plan = plan_of_best(case, inputs, others)
    p = packing_of(plan.problem).problem
    alike = p.mask.left is None or p.mask.queries is not None
    assert plan.kernel.config.SPLIT_KV is (plan.kernel.file == "fwd_hopper" and alike and p.len_kv > 0)
    result = plan(*inputs, **others)
    out, lse = result if case.return_lse else (result, None)
    judged = compare(out, lse, *inputs, precision=case.precision, **case.scores, **others)
    assert judged.ok, judged.message


def explicit_scores(case):
    """Whether scores are scaled one by one."""
    return case.softcap is not None or case.scores["scale"] <= 0


def best_backward(case, moved):
    """What the planner should choose for a backward that moves these arrays tile by tile."""
    if own_architecture().name != "90a" or case.dtype == "float32" or not all(map(tma_can_move, moved)):
        return "bwd_v2"
    blocks = -(-case.len_kv // 64) * case.heads_q * math.prod(case.batch)
    narrow_values = 128 < case.dim <= 192 and case.dim_v <= 128 and not (explicit_scores(case) or case.prefix or case.of_pairs)
    if narrow_values and blocks > 132:  # more of 64 keys than run at once
        return "bwd_hopper_mla"
    return "bwd_hopper" if max(case.dim, case.dim_v) <= 128 else "bwd_hopper_wide"


def backward_plan_of_best(case, inputs, state, dout, dlse, **options):
    """Likewise of gradients."""
    given = dout, *inputs, *state
    plan = plan_attention_backward(*given, dlse=dlse, **options)
    other = left_to_v2(plan) and all(map(tma_can_move, (dout, *inputs)))
    return plan_attention_backward(*given, dlse=dlse, **options | {"kernel": "bwd_hopper"}) if other else plan


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("kernel", [None, "bwd_v2"])
def test_backward(given, kernel, deterministic):
    case, inputs, (dout, dlse), others = given
    state = attention(*inputs, **case.options | others | {"return_lse": True})
    options = {name: value for name, value in (case.options | others).items() if name != "return_lse"}
    options |= {"deterministic": deterministic, "kernel": kernel}
    plan = backward_plan_of_best(case, inputs, state, dout, dlse, **options)
    gradients = plan(dout, *inputs, *state, dlse=dlse, **others)
    best = "bwd_hopper_parts" if in_parts(case, plan) else best_backward(case, (dout, *inputs, *gradients))
    check_kernel(plan, kernel or best)
    judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, precision=case.precision, **case.scores, **others)
    assert judged.ok, judged.message


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
def test_backward_with_the_tile_of_long_sequences(given, deterministic, staged):
    """In place of the other tiles of `bwd_hopper`, which most cases would get; what it cannot serve, the next kernel does."""
    case, inputs, (dout, dlse), others = given
    state = attention(*inputs, **case.options | others | {"return_lse": True})
    options = {name: value for name, value in (case.options | others).items() if name != "return_lse"}
    plan = backward_plan_of_best(case, inputs, state, dout, dlse, deterministic=deterministic, **options)
    gradients = plan(dout, *inputs, *state, dlse=dlse, **others)
    best = "bwd_hopper_parts" if in_parts(case, plan) else best_backward(case, (dout, *inputs, *gradients))
    served = best == "bwd_hopper" and not explicit_scores(case)
    check_kernel(plan, "bwd_hopper_wide" if best == "bwd_hopper" and not served else best)
    assert plan.kernel.config.TMA_REDUCE_DQ is served
    judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, precision=case.precision, **case.scores, **others)
    assert judged.ok, judged.message


@pytest.mark.parametrize("case", [case for case in ALL if case.of_pairs], ids=str)
def test_scores_and_masks_of_pairs(case):
    computations = check.select_computations("cuda", algorithm="v2", architecture=own_architecture())
    computations = [x for x in computations if not check.why_skipped(case, x, "cuda", own_architecture())]
    for result in check.run_case(case, computations, "cuda"):
        assert result.ok, f"{result.computation} by {result.plan}: {result.message}"
        kernel = result.computation.kernel or {"forward": "fwd_", "backward": "bwd_"}[result.computation.direction]
        assert result.plan == "nothing to launch" or result.plan.startswith(kernel)
