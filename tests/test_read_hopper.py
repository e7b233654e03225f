"""The gradient of a bias with an axis of queries and one of keys, which bwd_scores_hopper adds up, on the host."""

import re
from dataclasses import replace

import numpy
import pytest
from thinned import thinned

from cupy_flash import attention, plan_attention_backward
from cupy_flash.call.backward import BackwardPlan
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.machine import host
from cupy_flash.plan import read_hopper
from cupy_flash.plan.read_hopper import MULTIPROCESSORS, splits_of_units

pytestmark = pytest.mark.usefixtures("poisoned_results")

SHAPE = {"len_q": 150, "len_kv": 200, "heads_q": 4, "heads_kv": 2, "batch": (3,), "bias": "heads"}  # off every tile edge


def case(dtype="float16", **changes):
    return Case(dtype, **SHAPE | changes)


def planned(case, **more):
    """A plan for the host, and what it is called with."""
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    operands = case.arrays()
    given = (dout, *inputs, *attention(*inputs, **operands, **case.options))
    options = {name: x for name, x in case.options.items() if name != "return_lse"} | more
    plan = plan_attention_backward(*given, dlse=dlse, **operands, backend="host", arch="90a", wrt="bias", **options)
    return BackwardPlan(plan.problem, plan.kernel), given, {"dlse": dlse, **operands}  # no plan of another number of blocks


def judged(case, **more):
    """The plan, whose gradients are right."""
    plan, given, operands = planned(case, **more)
    dout, *inputs, _, _ = given
    told = {"dlse": operands["dlse"], "wrt": {"bias": operands["bias"]}, **case.meaning()}
    comparison = compare_gradients(plan(*given, **operands), dout, *inputs, **told)
    assert comparison.ok, comparison.message
    return plan


def kernel_of(plan):
    (kernel,) = plan.kernels[1:]
    assert kernel.file == "bwd_scores_hopper" and kernel.config.SCORES == "PLUS_TERM"
    return kernel


STAGED = [
    case(),
    case("bfloat16", dim=128, causal=True),
    case(bias="full", softcap=3.0, dim=96),  # of which the backward stores no gradient
    case("bfloat16", dim=256, window=(60, 10)),
    case(dim=32, causal="top_left", prefix=20),
    case(dim=64, scale=-0.2, layout="bshd"),  # scores scaled one by one
    case(dim=128, layout="broadcast", batch=(5,)),
    case(dim=192, dim_v=40, len_q=257, sinks=1),
    case("bfloat16", bias="pairs", causal=True, dim=128),  # units that blocks share, and of which a mask leaves some nothing
    case(bias="batch", batch=(2, 1, 2), window=(40, 10)),
    case(mask="prefixes", dim=80),  # of the batch element at hand, not of the first one
    case("bfloat16", bias="pairs", mask="array", causal=True, dim=128),
    case("bfloat16", dropout=0.25, dim=96),  # of the pairs of the batch element at hand, likewise
    case(bias="pairs", mask="prefixes", dropout=0.5, window=(90, 20), dim=192),
]


@pytest.mark.parametrize("schedule", thinned(host.SCHEDULES))
@pytest.mark.parametrize("case", thinned(STAGED, keep=14, first=11), ids=str)
def test_a_bias_that_stays_in_shared_memory(case, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    plan = judged(case)
    config = kernel_of(plan).config
    assert config.STAGED_BIAS and config.COPY_BYTES == 16
    assert ("partials" in plan.workspace.names) is (case.bias in ("pairs", "batch"))
    assert config.EXPLICIT_SCORES is (case.softcap is not None or case.scale is not None)


OTHERS = [
    case(bias_dtype="float32", causal=True),  # of which ldmatrix moves no element
    case("bfloat16", bias_dtype="float32", bias="batch", dim=200),
    case(len_kv=203, dim=128),  # rows that TMA does not find
    case(len_kv=202, softcap=5.0),
    case("bfloat16", bias_dtype="float32", mask="prefixes", dim=128),
]


@pytest.mark.parametrize("schedule", thinned(host.SCHEDULES, first=1))
@pytest.mark.parametrize("case", thinned(OTHERS, keep=5), ids=str)
def test_a_bias_that_lanes_read(case, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    monkeypatch.setattr(read_hopper, "MULTIPROCESSORS", 3)  # so that blocks take several units, and none shares one
    plan = judged(case)
    config = kernel_of(plan).config
    assert not config.STAGED_BIAS and "partials" not in plan.workspace.names
    assert case.len_kv % 2 == 0 or config.COPY_BYTES == 0


WHY_NOT = {
    "no TMA: rows of q start -128 bytes apart, backwards": case(layout="negative"),
    "no TMA: rows of q start 40 bytes apart, not a multiple of 16": case(dim=20),
}


@pytest.mark.parametrize("why_not", WHY_NOT)
def test_a_plan_says_why_another_kernel_computes_it(why_not):
    plan, *_ = planned(WHY_NOT[why_not])
    assert plan.kernels[1].file == "bwd_scores" and f"\n  not bwd_scores_hopper: {why_not}\n" in str(plan)


def test_padded_sequences_have_it_too():
    q, lse = numpy.zeros((2, 2, 80, 64), numpy.float16), numpy.zeros((2, 2, 80), numpy.float32)
    options = {"bias": numpy.zeros((2, 80, 80), numpy.float16), "seqlens_kv": numpy.array([30, 80], numpy.int32)}
    options |= {"wrt": "bias", "backend": "host", "arch": "90a"}
    plan = plan_attention_backward(q, q, q, q, q, lse, **options)
    assert plan.kernels[1].file == "bwd_scores_hopper" and plan.kernels[1].config.VARLEN


@pytest.mark.parametrize("arch, dtype", [("80", "float16"), ("90a", "float32")])
def test_there_is_no_other_kernel_elsewhere(arch, dtype):
    q, lse = numpy.zeros((2, 2, 64, 64), dtype), numpy.zeros((2, 2, 64), numpy.float32)
    bias = numpy.zeros((2, 64, 64), dtype)
    plan = plan_attention_backward(q, q, q, q, q, lse, bias=bias, wrt="bias", backend="host", arch=arch)
    assert plan.kernels[1].file == "bwd_scores" and "bwd_scores_hopper" not in str(plan)


@pytest.mark.release
def test_sums_have_the_bits_of_their_order():
    """However many blocks run, and whatever was in the workspace; here units are split."""
    plan, given, operands = planned(case(bias="pairs"), deterministic=True)
    assert "partials" in plan.workspace.names and kernel_of(plan)
    found = set()
    for poison in (0, 255):
        memory = numpy.full(plan.workspace_bytes + 4096, poison, numpy.uint8)
        found.add(plan(*given, **operands, workspace=memory[: plan.workspace_bytes]).dbias.tobytes())
        assert (memory[plan.workspace_bytes :] == poison).all()
    assert len(found) == 1


@pytest.mark.release
def test_masked_pairs_give_nothing_whatever_their_keys_hold():
    plan, given, operands = planned(case(causal=True))
    dout, q, k, v, out, lse = given
    hidden = numpy.arange(200) > numpy.arange(150)[:, None] + 50
    expected = plan(*given, **operands).dbias
    assert (expected[..., hidden] == 0).all() and expected[..., ~hidden].any()
    k, v = k.copy(), v.copy()
    k[..., -1, :] = v[..., -1, :] = numpy.nan  # which the last query alone sees
    got = plan(dout, q, k, v, out, lse, **operands).dbias
    numpy.testing.assert_array_equal(got[..., :-1, :], expected[..., :-1, :])


def test_what_is_moved_is_counted(monkeypatch):
    """Of each batch element and head, Q, dO, K and V for each pair of tiles; the bias once, whatever shares it; and statistics."""
    monkeypatch.setattr(read_hopper, "MULTIPROCESSORS", 1)
    whole = case(len_q=256, len_kv=384, dim=64, heads_q=2, batch=(3,))
    plan, given, operands = planned(whole)
    alone = plan_attention_backward(*given, **operands, backend="host", arch="90a")
    both, without = (made.counted(*given, **operands)[1] for made in (plan, alone))
    tile, elements, bias = 128, 3 * 2, operands["bias"]
    pairs = elements * (256 // tile) * (384 // tile)
    assert kernel_of(plan).config.STAGED_BIAS and "partials" not in plan.workspace.names
    assert both.read_bytes - without.read_bytes == pairs * 4 * tile * 64 * 2 + bias.nbytes + pairs * 2 * tile * 4
    assert both.written_bytes - without.written_bytes == bias.nbytes
    assert both.flops - without.flops == elements * 256 * 384 * 64 * 2 * 2


def test_units_are_split_so_that_all_blocks_end_together():
    def idle(units, walked):
        splits = splits_of_units(units, walked)
        parts = units * splits
        return splits, -(-parts // MULTIPROCESSORS) * MULTIPROCESSORS / parts - 1

    assert splits_of_units(16 * 32 * 32, 4) == 1  # rounds enough
    assert splits_of_units(1, 1000) <= MULTIPROCESSORS and splits_of_units(1, 30) <= 30  # no more parts than there are steps
    for side in (256, 384, 512, 640, 768, 1024):  # pairs of residues, with 4 heads
        splits, rest = idle(4 * (side // 128) ** 2, side)
        assert rest <= 0.15 and splits * 4 * (side // 128) ** 2 <= read_hopper.MOST_ROUNDS * MULTIPROCESSORS


def test_no_row_holds_more_than_a_multiprocessor_does():
    plan, *_ = planned(case())
    kernel = kernel_of(plan)
    for row in (*read_hopper.ROWS, *read_hopper.WALKING_ROWS, *read_hopper.CROWDED_ROWS):
        knobs = {name.upper(): getattr(row, name) for name in ("width", "tile_q", "tile_kv", "stages", "staged_bias")}
        assert replace(kernel, config=replace(kernel.config, **knobs)).shared_bytes <= kernel.architecture.shared_bytes
    assert re.search(r"\n  bwd_scores_hopper \d+ blocks, at most 1 a multiprocessor, one tile after the other, ", str(plan))
