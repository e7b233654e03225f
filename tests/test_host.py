"""Kernels executed on the host: the shared cases, properties of attention, and the faults that only such a run shows."""

import re
import threading
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import quick, thinned

from cupy_flash import CompileError, DeadlockError, SanitizerError, attention, plan_attention
from cupy_flash.judge import check
from cupy_flash.judge.cases import Case, make_inputs, quick_cases
from cupy_flash.judge.compare import compare
from cupy_flash.machine import host, source
from cupy_flash.machine.host import SCHEDULES, HostOptions
from cupy_flash.plan.params import forward_params

schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture
def schedule_as(monkeypatch):
    """A function that chooses when asynchronous operations happen."""
    return lambda schedule: monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)


def judge(case, inputs, result):
    out, lse = result if case.return_lse else (result, None)
    comparison = compare(out, lse, *inputs, precision=case.precision, **case.meaning())
    assert comparison.ok, comparison.message


# The shared cases


QUICK = [case for case in quick_cases() if case.dtype != "float64"]
OFTEN = [*QUICK[1::12], next(case for case in QUICK if case.precision == "tf32")]


@schedules
@pytest.mark.parametrize("case", quick(QUICK, *OFTEN), ids=str)
def test_quick_case(case, schedule, schedule_as):
    schedule_as(schedule)
    inputs = make_inputs(case)
    judge(case, inputs, attention(*inputs, backend="host", **case.options, **case.arrays()))


ELSEWHERE = (
    ("75", Case("float16", 70, 90, heads_q=2, causal=True)),
    ("75", Case("float32", 40, 50, causal=True)),
    ("75", Case("float32", 20, 40, dim=256)),  # one stage
    ("90a", Case("float16", 130, 150, heads_q=2, causal=True)),
    ("90a", Case("bfloat16", 70, 90, dim=128, window=(20, 20))),
)
HOPPER = (
    Case("float16", 130, 150, heads_q=4, heads_kv=2, causal=True),  # six tiles for two blocks
    Case("bfloat16", 70, 90, dim=128, window=(20, 20)),
    Case("bfloat16", 150, 300, dim=40, heads_q=3, softcap=30.0, values="large"),
    Case("float16", 1, 257, dim=96, dim_v=80, heads_q=2, batch=(3,)),
    Case("float16", 100, 70, dim=72, heads_q=2, batch=(2,), layout="bshd"),
    Case("float16", 70, 150, dim=64, heads_q=2, batch=(2,), layout="broadcast"),
    Case("float16", 140, 90, dim=256, causal=True, return_lse=False),
)


@schedules
@pytest.mark.parametrize("arch, case", quick(ELSEWHERE, *ELSEWHERE[:3], ELSEWHERE[4], spread=True), ids=str)
def test_other_architecture(arch, case, schedule, schedule_as):
    schedule_as(schedule)
    inputs = make_inputs(case)
    plan = plan_attention(*inputs, backend="host", arch=arch, kernel="fwd_v2", **case.options)
    judge(case, inputs, plan(*inputs))


@schedules
@pytest.mark.parametrize("case", quick(HOPPER, HOPPER[0], HOPPER[3]), ids=str)
def test_hopper(case, schedule, schedule_as):
    schedule_as(schedule)
    inputs = make_inputs(case)
    plan = plan_attention(*inputs, backend="host", arch="90a", kernel="fwd_hopper", **case.options)
    judge(case, inputs, plan(*inputs))


PATHS = {
    "fwd_v2-sm_80-float16-d64-128x64-w4-copy16": Case("float16", 100, 100),
    "fwd_v2-sm_80-float16-d64-64x64-w4-copy16": Case("float16", 17, 100),
    "fwd_v2-sm_80-float16-d64-16x64-w4-kv4-copy16": Case("float16", 1, 100),
    "fwd_v2-sm_80-float16-d64-128x64-w4-copyelements": Case("float16", 100, 100, dim=33),
    "fwd_v2-sm_80-bfloat16-d128-128x32-w4-copy4-explicit": Case("bfloat16", 100, 100, dim=98, softcap=10.0),
    "fwd_v2-sm_80-float32-d192-v128-tf32-64x16-w4-copy16": Case("float32", 9, 9, dim=160, dim_v=128, precision="tf32"),
}


@pytest.mark.parametrize("name", PATHS)
def test_path_taken(name):
    case = PATHS[name]
    assert plan_attention(*make_inputs(case), backend="host", **case.options).kernel.name == name


# Memory around the results

PLACES = {
    "whole rows": numpy.s_[:, :, 1:-1, :40],
    "every second row": numpy.s_[:, :, ::2, :40],
    "rows backwards": numpy.s_[:, :, ::-1, :40],
    "every third element": numpy.s_[:, :, :, 1::3],
}


@pytest.mark.parametrize("place", PLACES)
def test_results_are_written_and_nothing_else(place, schedule_as):
    """`out` and `lse` are views into larger memory: each element is overwritten, padding and gaps keep what they held."""
    schedule_as("deferred")
    out_memory, lse_memory = numpy.full((2, 3, 141, 120), 77, "f2"), numpy.full((2, 3, 141, 120), 77, "f4")
    out, lse = out_memory[PLACES[place]], lse_memory[PLACES[place]][..., 7]
    case = Case("float16", out.shape[-2], 131, dim=40, heads_q=3, batch=(2,), causal=True)
    inputs = make_inputs(case)
    out[...] = lse[...] = numpy.nan
    attention(*inputs, backend="host", out=out, lse=lse, **case.options)
    judge(case, inputs, (out, lse))
    out[...] = lse[...] = 77
    assert (out_memory == 77).all() and (lse_memory == 77).all()


# Properties, on float16 of head dim 64

lengths = st.integers(1, 200)
properties = settings(max_examples=12)


@st.composite
def problems(draw):
    """A case of any lengths, heads and mask."""
    heads_kv = draw(st.integers(1, 2))
    end = st.none() | st.integers(0, 100)
    return Case(
        "float16",
        draw(lengths),
        draw(lengths),
        heads_q=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        batch=(draw(st.integers(1, 2)),),
        causal=draw(st.sampled_from((False, True, "top_left"))),
        window=draw(st.none() | st.tuples(end, end)),
    )


def on_host(*inputs, **options):
    return attention(*inputs, backend="host", **{"return_lse": True} | options)


def assert_same(result, expected):
    """Equal bit for bit, NaN included."""
    for name, x, y in zip(("out", "lse"), result, expected):
        numpy.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"), err_msg=name)


@properties
@given(problems())
def test_any_problem(case):
    inputs = make_inputs(case)
    judge(case, inputs, on_host(*inputs, **case.options))


@properties
@given(problems())
def test_repeat_is_bitwise_equal(case):
    inputs = make_inputs(case)
    assert_same(on_host(*inputs, **case.options), on_host(*inputs, **case.options))


@properties
@given(lengths, lengths, st.data())
def test_keys_split_anywhere_merge_to_the_whole(len_q, len_kv, data):
    """What lse is for: two results over parts of the keys, weighted by e^lse, give the result over all of them."""
    behind = data.draw(st.none() | st.integers(0, 100), "keys seen behind the own place")
    split = data.draw(st.integers(0, len_kv), "split")
    case = Case("float16", len_q, len_kv, heads_q=2, window=(None, behind))
    q, k, v = make_inputs(case)
    # A window is anchored at the last key, which for the front part lies len_kv - split further ahead.
    front = (None, None if behind is None else behind + len_kv - split)
    out_a, lse_a = on_host(q, k[..., :split, :], v[..., :split, :], window=front)
    out_b, lse_b = on_host(q, k[..., split:, :], v[..., split:, :], window=(None, behind))
    lse = numpy.logaddexp(lse_a, lse_b)
    top = numpy.where(numpy.isinf(lse), 0, lse)
    out = sum(x.astype("f4") * numpy.exp(part - top)[..., None] for x, part in ((out_a, lse_a), (out_b, lse_b)))
    judge(case, (q, k, v), (out.astype("f2"), lse))


@properties
@given(problems())
def test_a_vector_added_to_every_key_moves_only_lse(case):
    q, k, v = make_inputs(case)
    k = (k * 8).round() / 8  # eighths: float16 holds the sums exactly
    added = numpy.random.default_rng(0).integers(-8, 9, 64).astype("f2") / 8
    out, lse = on_host(q, k + added, v, **case.options)
    moved = q.astype("f4") @ added.astype("f4") * numpy.float32(case.scores["scale"])
    judge(case, (q, k, v), (out, lse - moved))


@pytest.mark.release  # test_bits.py asks it of some problems, and of fwd_hopper
@properties
@given(problems(), st.integers(2, 4))
def test_batch_of_one_is_the_element_of_a_batch(case, batch):
    inputs = make_inputs(case)
    inputs = [numpy.concatenate([x] * batch) + numpy.arange(batch * len(x), dtype="f2")[:, None, None, None] for x in inputs]
    out, lse = on_host(*inputs, **case.options)
    for i in range(len(out)):
        alone = on_host(*(x[i : i + 1] for x in inputs), **case.options)
        assert_same(alone, (out[i : i + 1], lse[i : i + 1]))


@properties
@given(lengths, lengths)
def test_causal_is_the_window_without_keys_behind(len_q, len_kv):
    inputs = make_inputs(Case("float16", len_q, len_kv))
    assert_same(on_host(*inputs, causal=True), on_host(*inputs, window=(None, 0)))


@properties
@given(problems(), st.integers(0))
def test_nan_in_a_masked_key_stays_there(case, number):
    """NaN in one key reaches the rows that see it, and no bit of the others moves."""
    q, k, v = make_inputs(case)
    out, lse = on_host(q, k, v, **case.options)
    key = number % case.len_kv
    rows = numpy.arange(case.len_q)
    first, last = case.scores["first_key"], case.scores["last_key"]
    sees = ((first is None) | (key >= rows + (first or 0))) & ((last is None) | (key <= rows + (last or 0)))
    k[..., key, :] = numpy.nan
    out[..., sees, :], lse[..., sees] = numpy.nan, numpy.nan
    found, found_lse = on_host(q, k, v, **case.options)
    assert numpy.isnan(found[..., sees, :]).all() and numpy.isnan(found_lse[..., sees]).all()
    assert_same((found[..., ~sees, :], found_lse[..., ~sees]), (out[..., ~sees, :], lse[..., ~sees]))


@properties
@given(problems())
def test_nan_beyond_the_lengths_is_not_read(case):
    """Memory goes on behind the last query, key and value of a head, with NaN or with zeros."""
    inputs = make_inputs(case)
    results = []
    for behind in (numpy.nan, 0):
        longer = [numpy.concatenate([x, numpy.full_like(x, behind)], axis=-2) for x in inputs]
        results.append(on_host(*(x[..., : x.shape[-2] // 2, :] for x in longer), **case.options))
    assert_same(*results)
    judge(case, inputs, results[0])


@properties
@given(problems())
def test_weights_sum_to_one(case):
    """Values of 1 give 1, but for the rounding of each weight to float16; a row that sees nothing gives 0."""
    q, k, v = make_inputs(case)
    out, lse = on_host(q, k, numpy.ones_like(v), **case.options)
    numpy.testing.assert_allclose(out, numpy.isfinite(lse)[..., None] * numpy.ones_like(out), rtol=0, atol=2.0**-10)


STRIDES = {
    "rows backwards": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "dim backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "heads backwards": lambda x: x[:, ::-1].copy()[:, ::-1],
    "transposed": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "heads inside": lambda x: x.swapaxes(-3, -2).copy().swapaxes(-3, -2),
    "one batch element for all": lambda x: numpy.broadcast_to(x[:1], x.shape),
    "one row for all": lambda x: numpy.broadcast_to(x[..., :1, :], x.shape),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("moved", ["q", "k", "v"])
def test_strides_do_not_change_a_bit(moved, strides):
    """Any view is read in place, with the result of its contiguous copy."""
    inputs = dict(zip("qkv", make_inputs(Case("float16", 90, 110, heads_q=2, batch=(2,)))))
    inputs[moved] = STRIDES[strides](inputs[moved])
    result = on_host(*inputs.values(), causal=True)
    assert_same(result, on_host(*(x.copy(order="C") for x in inputs.values()), causal=True))


# Faults in kernels


@pytest.mark.release
@pytest.mark.parametrize("asked", thinned(product(host.SANITIZERS, ("fwd_hopper", "fwd_v2")), keep=3), ids="-".join)
def test_sanitizers_find_nothing(asked, monkeypatch):
    tool, kernel = asked
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", tool)
    case = Case("float16", 50, 90, dim=32, heads_q=3, causal=True)
    inputs = make_inputs(case)
    plan = plan_attention(*inputs, backend="host", arch="80" if kernel == "fwd_v2" else "90a", kernel=kernel, **case.options)
    judge(case, inputs, plan(*inputs))


@pytest.mark.release
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("tool", host.SANITIZERS)
def test_sanitizers_find_nothing_in_what_is_asked_of_pairs(tool, arch, monkeypatch):
    """An expression, a mask of booleans, a bias, ALiBi, sinks and dropout, in both directions."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", tool)
    case = Case(
        *("float16", 50, 90, 32), heads_q=2, score="gate", mask="array", bias="heads", alibi="heads", sinks=1, dropout=0.2
    )  # fmt: skip
    computations = (check.FORWARD, check.BACKWARD)
    for result in check.run_case(case, computations, "host", arch=arch):
        assert result.ok, result.message


@pytest.mark.parametrize("field, access", quick([("len_kv", "READ"), ("len_q", "WRITE")], ("len_q", "WRITE"), spread=True))
def test_address_sanitizer_sees_a_row_too_many(field, access):
    """Arrays of a sanitized run end where the caller's do: here the kernel is told of one row more than there is."""
    q, k, v = make_inputs(Case("float16", 50, 90, dim=32))
    arrays = {"q": numpy.empty((1, 1, 51, 32), "f2"), "k": k, "v": v, "out": numpy.empty_like(q)}
    plan = plan_attention(q, k, v, backend="host")
    params = forward_params(plan.problem)
    host.run(plan.kernel, plan.launches, params, arrays, HostOptions(sanitize="address"))  # as it is, there is nothing to say
    params[field] += 1
    with pytest.raises(SanitizerError, match=f"heap-buffer-overflow(.|\\n)*{access} of size 16"):
        host.run(plan.kernel, plan.launches, params, arrays, HostOptions(sanitize="address"))


def finish_within(seconds, work):
    """What `work` returns or raises; fails, and leaves it behind, if that takes too long."""
    results = []

    def catch():
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=catch, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"still running after {seconds} s"
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


@schedules
def test_deadlock_says_who_waits_for_what(schedule, schedule_as, change_kernel):
    schedule_as(schedule)
    text = source.files()["fwd_v2.cu"]
    before, barrier, after = text.partition("sync_block();")
    change_kernel("fwd_v2.cu", f"{before}if (warp_id() != 1) {barrier}{after}")
    inputs = make_inputs(Case("float16", 30, 150, dim=32, heads_q=3))
    plan = plan_attention(*inputs, backend="host")
    host.build(plan.kernel, HostOptions())
    with pytest.raises(DeadlockError) as caught:
        finish_within(10, lambda: plan(*inputs))
    waits = re.findall(r"warp (\d) waits for (?:nothing: it has|the block barrier at .*/)(.*)", str(caught.value))
    barrier = f"fwd_v2.cu:{before.count(chr(10)) + 1}"
    assert waits == [("0", barrier), ("1", " finished"), ("2", barrier), ("3", barrier)]


def test_error_in_a_kernel_is_reported_with_file_and_line(change_kernel):
    change_kernel("tile/mask.cuh", source.files()["tile/mask.cuh"] + "\nnonsense here;\n")
    line = source.files()["tile/mask.cuh"].count("\n") + 2
    inputs = make_inputs(Case("float16", 5, 5))
    with pytest.raises(CompileError, match=rf"tile/mask.cuh:{line}:.*nonsense"):
        on_host(*inputs)
