"""`bwd_hopper_mla`: gradients of keys that are wider than values, as in multi-head latent attention, by blocks of 128 keys."""

from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gradient_parts import judge, operands
from test_hopper_backward import (
    RESULTS,
    both,
    computed,
    in_both_modes,
    planned,
    planning,  # noqa: F401, a fixture
    schedule_as,  # noqa: F401, a fixture
    unsplit,  # noqa: F401, a fixture
)
from thinned import quick, thinned

from cupy_flash import UnsupportedError, attention, plan_attention_backward
from cupy_flash.judge.cases import Case
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.machine import host, nvrtc
from cupy_flash.machine.machine_code import read

KERNEL, DIMS = "bwd_hopper_mla", {"dim": 192, "dim_v": 128}
CASES = (
    Case("float16", 130, 150, **DIMS, heads_q=4, heads_kv=2, causal=True),  # parts of dk and dv are added up
    Case("bfloat16", 100, 300, dim=136, dim_v=72, heads_q=2, batch=(2,), causal=True, layout="bshd"),
    Case("float16", 200, 300, **DIMS, heads_q=2, causal="top_left"),  # the last block of keys is seen by nobody
    Case("float16", 261, 131, **DIMS, window=(50, 20), heads_q=2),
    Case("float16", 70, 170, dim=160, dim_v=128, layout="broadcast", heads_q=2, batch=(2,)),
    Case("bfloat16", 75, 140, dim=144, dim_v=8, layout="sliced", values="one_hot", causal=True),
    Case("float16", 129, 97, **DIMS, causal=True, values="large"),  # the first 32 rows see nothing
    Case("float16", 90, 257, **DIMS, heads_q=7, heads_kv=1, sinks=2),
    Case("float16", 1, 257, **DIMS, heads_q=2, batch=(3,)),
    Case("float16", 257, 1, **DIMS, heads_q=2),
)
# Sequences with less, as much and more than a tile, without queries or without keys, and rows behind them.
LENS_Q, LENS_KV, BEHIND = (70, 0, 150, 33), (70, 5, 290, 0), 21
MODES = ("eager", "deferred")


@both
@pytest.mark.parametrize("case", thinned(CASES, keep=4), ids=str)
def test_right(case, schedule, deterministic, schedule_as):  # noqa: F811, as above
    schedule_as(schedule)
    given = operands(case)
    plan = planned(case, given, deterministic, KERNEL)
    assert (plan.kernel.config.TILE_Q, plan.kernel.config.TILE_KV) == (48, 128)
    judge(case, given, computed(plan, given))


@both
@pytest.mark.parametrize("last_blocks", [0, 1])
def test_a_block_has_all_heads_of_a_group(last_blocks, schedule, deterministic, schedule_as, planning, unsplit):  # noqa: F811, as above
    """So that gradients of keys are complete at once, and dq is finished by the last block of a head, or by later ones."""
    schedule_as(schedule)
    planning("LAST_BLOCKS", last_blocks)
    case = Case("float16", 110, 200, **DIMS, heads_q=4, heads_kv=2, causal=True)
    given = operands(case)
    plan = planned(case, given, deterministic, KERNEL)
    assert "dk_accum" not in plan.workspace.names
    judge(case, given, computed(plan, given))


def test_gradients_add_up_to_what_they_must():
    """A vector that all keys share moves no probability, and one that all values share moves the results by itself."""
    case = Case("float16", 150, 200, **DIMS)
    given = operands(case) | {"dlse": None}
    found = computed(planned(case, given, kernel=KERNEL), given)
    off = abs(found.dk.astype(float).sum(-2)).max() / abs(found.dk.astype(float)).sum(-2).max()
    assert off < 2**-9  # P, dS and each key's gradient are rounded to 11 bits
    off = found.dv.astype(float).sum(-2) - given["dout"].astype(float).sum(-2)
    assert abs(off).max() < 2**-9 * abs(found.dv.astype(float)).sum(-2).max()


@st.composite
def problems(draw):
    """A case of any lengths, heads, head dims and mask."""
    end = st.none() | st.integers(0, 200)
    return Case(
        draw(st.sampled_from(["float16", "bfloat16"])),
        draw(st.integers(1, 300)),
        draw(st.integers(1, 400)),
        dim=draw(st.sampled_from([136, 160, 192])),
        dim_v=draw(st.sampled_from([8, 64, 104, 128])),
        heads_q=draw(st.integers(1, 3)),
        heads_kv=1,
        batch=draw(st.sampled_from([(), (2,)])),
        layout=draw(st.sampled_from(["contiguous", "bshd"])),
        causal=draw(st.sampled_from([False, True, "top_left"])),
        window=draw(st.none() | st.tuples(end, end)),
        values=draw(st.sampled_from(["normal", "large"])),
    )


@settings(max_examples=10)
@given(problems(), st.booleans())
def test_any_problem(case, deterministic):
    given = operands(case)
    judge(case, given, computed(planned(case, given, deterministic, KERNEL), given))


BROADCAST = {
    "queries": ((1, 2, 70, 136), (3, 2, 140, 136), (3, 2, 140, 40)),
    "keys": ((3, 2, 70, 136), (1, 2, 140, 136), (1, 2, 140, 40)),
    "values, not keys": ((3, 2, 70, 136), (3, 2, 140, 136), (1, 2, 140, 40)),
}


@in_both_modes
@pytest.mark.parametrize("what", BROADCAST)
def test_broadcast_inputs_get_sums(what, deterministic):
    rng = numpy.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(numpy.float16) for shape in BROADCAST[what])
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dout = rng.standard_normal(out.shape).astype(numpy.float16)
    given = dict(zip(("dout", "q", "k", "v", "out", "lse"), (dout, q, k, v, out, lse)))
    plan = plan_attention_backward(**given, causal=True, deterministic=deterministic, kernel=KERNEL, backend="host", arch="90a")
    judged = compare_gradients(computed(plan, given), dout, q, k, v, scale=136**-0.5, last_key=70)
    assert judged.ok, judged.message


@pytest.mark.parametrize("causal", [False, True])
def test_in_order_the_same_bits_by_any_number_of_blocks(causal, monkeypatch):
    case = Case("float16", 150, 400, **DIMS, heads_q=2, causal=causal)
    given = operands(case)
    plan = planned(case, given, True, KERNEL)
    found = []
    for blocks in (1, 2, 4):
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _, blocks=blocks: range(blocks * plan.kernel.config.WARPS))
        found.append([x.copy() for x in computed(plan, given)])
    for gradients in zip(*found):
        for again in gradients[1:]:
            numpy.testing.assert_array_equal(again.view("u2"), gradients[0].view("u2"))
    judge(case, given, found[0])


def rows(rng, heads, lens, dim, is_packed):
    """Rows of sequences, one behind the other or each in a batch element of its own, NaN where there are none."""
    most = max(lens) + BEHIND
    shape = (heads, sum(lens) + BEHIND, dim) if is_packed else (len(lens), heads, most, dim)
    x = numpy.full(shape, numpy.nan, numpy.float16)
    for i, n in enumerate(lens):
        of_sequence(x, lens, i, is_packed)[:] = rng.standard_normal((heads, n, dim))
    return x


def of_sequence(x, lens, i, is_packed):
    return x[:, sum(lens[:i]) : sum(lens[:i]) + lens[i]] if is_packed else x[i, :, : lens[i]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "is_packed, schedule, deterministic",
    quick(list(product([False, True], MODES, [False, True])), (True, "deferred", False), (False, "eager", True), spread=True),
)
def test_sequences_of_their_own_lengths(is_packed, schedule, deterministic, causal, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    rng, heads = numpy.random.default_rng(5), 2
    given = [rows(rng, heads, lens, dim, is_packed) for lens, dim in ((LENS_Q, 128), (LENS_Q, 192), (LENS_KV, 192), (LENS_KV, 128))]
    ends = [numpy.cumsum((0, *lens)).astype(numpy.int32) for lens in (LENS_Q, LENS_KV)]
    lens = [numpy.array(lens, numpy.int32) for lens in (LENS_Q, LENS_KV)]
    told = dict(zip(("cu_seqlens_q", "cu_seqlens_kv") if is_packed else ("seqlens_q", "seqlens_kv"), ends if is_packed else lens))
    arrays = (*given, *attention(*given[1:], causal=causal, return_lse=True, backend="numpy", **told))
    plan = plan_attention_backward(*arrays, causal=causal, deterministic=deterministic, backend="host", arch="90a", **told)
    assert plan.kernel.file == KERNEL and plan.kernel.config.VARLEN
    found = plan(*arrays, workspace=numpy.full(plan.workspace_bytes, 255, numpy.uint8), **told)
    sides = (LENS_Q, LENS_KV, LENS_KV)
    for i, (queries, keys) in enumerate(zip(LENS_Q, LENS_KV)):
        own = [of_sequence(x, lens, i, is_packed) for x, lens in zip(found, sides)]
        if not queries or not keys:
            assert not any(x.any() for x in own)
            continue
        alone = [of_sequence(x, lens, i, is_packed) for x, lens in zip(given, (LENS_Q, LENS_Q, LENS_KV, LENS_KV))]
        judged = compare_gradients(own, *alone, scale=192**-0.5, **{"last_key": keys - queries} if causal else {})
        assert judged.ok, judged.message
    for x, lens in zip(found, sides):
        behind = [x[:, sum(lens) :]] if is_packed else [x[i, :, n:] for i, n in enumerate(lens)]
        assert not any(x.any() for x in behind)


def plan_of(dim, dim_v, len_q=300, len_kv=300, heads=100, arch="90a", dtype="float16", **asked):
    shapes = (heads, len_q, dim_v), (heads, len_q, dim), (heads, len_kv, dim), (heads, len_kv, dim_v)
    dout, q, k, v = (numpy.empty(shape, dtype) for shape in shapes)
    return plan_attention_backward(dout, q, k, v, dout, dout[..., 0].astype("f4"), backend="host", arch=arch, **asked)


@pytest.mark.parametrize(
    "dims, asked, expected",
    [
        ((192, 128), {}, KERNEL),
        ((192, 128), {"causal": True, "deterministic": True}, KERNEL),
        ((136, 128), {"window": (200, 0)}, KERNEL),
        ((192, 64), {"sinks": numpy.zeros(100, numpy.float16)}, KERNEL),
        ((192, 128), {"heads": 27}, KERNEL),  # 135 blocks of 64 keys, more than run at once
        ((192, 128), {"heads": 26}, "bwd_hopper_wide"),
        ((192, 128), {"heads": 2, "len_q": 4096, "len_kv": 4096, "causal": True}, "bwd_hopper_wide"),
        ((192, 128), {"heads": 3, "len_q": 4096, "len_kv": 4096, "causal": True}, KERNEL),
        ((128, 64), {}, "bwd_hopper"),
        ((192, 136), {}, "bwd_hopper_wide"),
        ((200, 128), {}, "bwd_hopper_wide"),
        ((128, 192), {}, "bwd_hopper_wide"),
        ((192, 128), {"softcap": 20.0}, "bwd_hopper_wide"),
        ((192, 128), {"scale": -0.1}, "bwd_hopper_wide"),
        ((192, 128), {"score": "score + 1.5 * (kv_idx - q_idx)"}, "bwd_hopper_wide"),
        ((192, 128), {"mask": "kv_idx % 3 < 2"}, "bwd_hopper_wide"),
        ((192, 128), {"dropout": 0.1, "seed": 3}, "bwd_hopper_wide"),
        ((192, 128), {"causal": True, "prefix": 9}, "bwd_hopper_wide"),
        ((192, 128), {"len_kv": 64}, "bwd_hopper_wide"),
        ((192, 128), {"heads": 300, "len_kv": 96}, KERNEL),
        ((192, 128), {"heads": 300, "len_q": 64}, "bwd_hopper_wide"),
        ((192, 128), {"window": (100, 27)}, "bwd_hopper_wide"),
        ((192, 128), {"window": (100, 28)}, KERNEL),
        ((192, 128), {"arch": "80"}, "bwd_v2"),
        ((190, 128), {}, "bwd_v2"),
    ],
    ids=str,
)
def test_the_kernel_that_is_chosen(dims, asked, expected):
    assert plan_of(*dims, **asked).kernel.file == expected


@pytest.mark.parametrize(
    "dims, asked, reason",
    [
        ((128, 128), {}, "129 to 192 columns"),
        ((192, 136), {}, "values at most 128"),
        ((192, 128), {"softcap": 20.0}, "no registers"),
        ((192, 128), {"dropout": 0.1, "seed": 3}, "no registers"),
        ((192, 128), {"causal": True, "prefix": 9}, "prefix"),
        ((190, 128), {}, "no TMA"),
        ((192, 128), {"dtype": "float32"}, "there is no other one for float32"),
        ((192, 128), {"arch": "80"}, "there is no other one for float16"),
    ],
    ids=str,
)
def test_a_plan_says_why_not(dims, asked, reason):
    with pytest.raises(UnsupportedError, match=f"kernel: expected .*, got '{KERNEL}': .*{reason}"):
        plan_of(*dims, **asked, kernel=KERNEL)


def test_values_have_tiles_of_their_own_width():
    plan = plan_of(192, 96, len_q=400, len_kv=300)
    c = plan.kernel.config
    assert (c.WIDTH, c.WIDTH_V, c.DIM, c.DIM_V, c.WARPS, c.STAGES) == (192, 128, 192, 128, 16, 3)
    assert plan.kernel.shared_bytes <= 227 * 1024


ASKED = {
    "plain": {},
    "in order": {"deterministic": True, "causal": True, "len_q": 4096, "len_kv": 4096, "heads": 3},
    "first stores": {"deterministic": True},
    "sinks": {"sinks": numpy.zeros(100, numpy.float32)},
    "window": {"window": (200, 50)},
    "packed": dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), numpy.array([0, 100, 300], numpy.int32)),
}


@pytest.mark.parametrize("name, dtype", list(product(ASKED, ["float16", "bfloat16"])))
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.release  # test_compile.py compiles a row of this kernel
def test_no_spill(name, dtype, in_order):
    plan = plan_of(192, 128, dtype=dtype, **{"deterministic": in_order} | ASKED[name])
    assert plan.kernel.file == KERNEL
    report = nvrtc.report(plan.kernel)
    assert not report.warnings and {code.stack_bytes for code in read(report.code).values()} == {0}


@pytest.mark.release  # as those of the other kernels; test_host.py has a quick program with this sanitizer
@pytest.mark.parametrize("deterministic", [False, True])
def test_address_sanitizer_finds_nothing(deterministic, monkeypatch):
    """Each array has memory of exactly its size."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "address")
    case = Case("float16", 70, 150, dim=136, dim_v=72, causal=True)
    given = operands(case)
    judge(case, given, computed(planned(case, given, deterministic, KERNEL), given))


def test_results_may_be_given_in_any_layout():
    """As (batch, seq, heads, dim), and with gaps between rows."""
    case = Case("float16", 100, 150, **DIMS, heads_q=2, batch=(2,), layout="bshd", causal=True)
    given = operands(case)
    for name, source in zip(RESULTS, "qkv"):
        shape = given[source].shape
        given[name] = numpy.full((*shape[:-1], shape[-1] + 8), numpy.nan, numpy.float16)[..., : shape[-1]]
    judge(case, given, computed(planned(case, given, kernel=KERNEL), given))
