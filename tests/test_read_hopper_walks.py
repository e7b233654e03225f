"""Gradients of what scores read by bwd_scores_hopper, whose blocks go through the pairs of tiles of a unit, on the host."""

import numpy
import pytest
from score_kernels import DTYPES, given, judged
from thinned import thinned
from walked_units import ASKED, BATCH, BESIDES, GRID, HEADS, HEADS_KV, LEN_KV, LEN_Q, SEEN, SLOPES, inputs

from cupy_flash import attention, attention_backward, plan_attention_backward
from cupy_flash.call.backward import BackwardPlan
from cupy_flash.machine import host
from cupy_flash.plan import read_hopper

pytestmark = pytest.mark.usefixtures("poisoned_results")


def name_of(asked):
    return "-".join(map(str, asked))


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def kernels_of_reads(dtype, dim, options, wrt):
    q, k, v, dout = inputs(dtype, dim)
    lse = numpy.zeros((BATCH, HEADS, LEN_Q), numpy.float32)
    return plan_attention_backward(dout, q, k, v, dout, lse, backend="host", arch="90a", wrt=wrt, **options).kernels[1:]


@pytest.mark.release  # tests below have a bias, slopes, factors and terms of queries, test_scores_on_kernels.py one of distances
@pytest.mark.parametrize("asked", thinned(ASKED, keep=len(ASKED), first=2), ids=name_of)
def test_arrays_of_scores(asked, schedule):
    example, besides, dim, dtype = asked
    options, hand = BESIDES[besides]
    arrays, score = given(example, GRID)
    options = {"score": example.text, "arrays": arrays, **options}
    judged(
        dtype,
        options,
        hand | {"score": score},
        {"backend": "host", "arch": "90a"},
        wrt=tuple(score.arrays),
        inputs_given=inputs(dtype, dim),
    )
    for kernel in kernels_of_reads(dtype, dim, options, tuple(score.arrays)):
        assert kernel.file == "bwd_scores_hopper" and ("ONE_BIAS", "true") not in kernel.expressions.constants


BIASES = {
    "of keys": (BATCH, 1, 1, LEN_KV),
    "of queries": (HEADS, LEN_Q, 1),
    "of pairs": (HEADS, LEN_Q, LEN_KV),
    "of heads": (HEADS, 1, 1),
}


@pytest.mark.parametrize("kind", thinned([("float16", 64), ("bfloat16", 128), ("float16", 192)], keep=3), ids=name_of)
@pytest.mark.parametrize("shape", thinned(BIASES, keep=4, first=2))
def test_a_bias_and_slopes(shape, kind, schedule):
    """Both at once, of which neither is asked for alone."""
    dtype, dim = kind
    bias = numpy.random.default_rng(3).standard_normal(BIASES[shape]).astype(DTYPES[dtype])
    options, hand = BESIDES["window, slopes"]
    where = {"backend": "host", "arch": "90a"}
    options, hand = options | {"bias": bias}, hand | {"bias": bias}
    judged(dtype, options, hand, where, wrt=("bias", "alibi_slopes"), inputs_given=inputs(dtype, dim))
    for kernel in kernels_of_reads(dtype, dim, options, ("bias", "alibi_slopes")):
        assert kernel.file == "bwd_scores_hopper" and ("ONE_BIAS", "true") not in kernel.expressions.constants


UNITS = {
    "a number": ("score * t", {"t": numpy.array(0.9, numpy.float32)}),
    "keys": ("score + t[h_kv, kv_idx]", {"t": numpy.ones((HEADS_KV, LEN_KV), numpy.float32)}),
    "queries": ("score + t[b, q_idx] * kv_idx / 90", {"t": numpy.ones((BATCH, LEN_Q), numpy.float32)}),
    "distances": ("score + t[h, max(kv_idx - q_idx, 0)]", {"t": numpy.ones((HEADS, LEN_KV), numpy.float32)}),
    "places": ("score + t[q_idx * kv_idx % 37]", {"t": numpy.ones(37, numpy.float32)}),
}


@pytest.mark.parametrize("causal", thinned([False, True]))
@pytest.mark.parametrize("name", thinned(UNITS, keep=5, first=2))
def test_however_many_blocks_there_are(name, causal, monkeypatch):
    """One block takes all units in turn, and several share one: sums are the same, but for what their order rounds."""
    score, arrays = UNITS[name]
    q, k, v, dout = inputs("float16", 64)
    options = {"score": score, "arrays": arrays, "causal": causal}
    given_ = (dout, q, k, v, *attention(q, k, v, return_lse=True, **options))
    found = []
    for multiprocessors in (1, 200):
        monkeypatch.setattr(read_hopper, "MULTIPROCESSORS", multiprocessors)
        monkeypatch.setattr(host, "MULTIPROCESSORS", multiprocessors)
        plan = plan_attention_backward(*given_, wrt="t", backend="host", arch="90a", **options)
        plan = BackwardPlan(plan.problem, plan.kernel)  # none of another number of blocks
        assert plan.kernels[1].file == "bwd_scores_hopper"
        memory = numpy.full(plan.workspace_bytes + 4096, 255, numpy.uint8)
        found.append(plan(*given_, arrays=arrays, workspace=memory[: plan.workspace_bytes]).darrays["t"])
        assert (memory[plan.workspace_bytes :] == 255).all()
    assert abs(found[0] - found[1]).max() <= 2**-15 * abs(found[0]).max() and found[0].any()


@pytest.mark.release  # test_read_hopper.py counts what is moved for a bias
@pytest.mark.parametrize("causal", thinned([False, True], first=1))
def test_what_is_moved_is_counted(causal, monkeypatch):
    """Of each pair of tiles that the mask shows Q, dO, K and V, and statistics; of the rest nothing."""
    monkeypatch.setattr(read_hopper, "MULTIPROCESSORS", 1)  # so that a block goes through all tiles of a unit
    shape, tile = (BATCH, HEADS, 384, 64), 128
    q, k, v, dout = (numpy.random.default_rng(i).standard_normal(shape).astype(numpy.float16) for i in range(4))
    options = {"alibi_slopes": SLOPES, "causal": causal}
    given_ = (dout, q, k, v, *attention(q, k, v, return_lse=True, **options))
    plan, alone = (plan_attention_backward(*given_, wrt=wrt, backend="host", arch="90a", **options) for wrt in ("alibi_slopes", ()))
    plan = BackwardPlan(plan.problem, plan.kernel)  # of so many blocks
    (gradients, both), (_, without) = (made.counted(*given_, alibi_slopes=SLOPES) for made in (plan, alone))
    expected = attention_backward(*given_, wrt="alibi_slopes", **options).dalibi_slopes
    assert abs(gradients.dalibi_slopes - expected).max() <= 2**-12 * abs(expected).max()
    pairs = BATCH * HEADS * (6 if causal else 9)
    moved = pairs * (4 * tile * 64 * 2 + 2 * tile * 4)
    assert moved <= both.read_bytes - without.read_bytes <= 1.2 * moved  # slopes and partial sums besides
    assert both.flops - without.flops == pairs * tile * tile * 64 * 2 * 2


READING = ["score * t[h]", "score + t[h] * (q_idx - kv_idx)", "score * sigmoid(score - t[h])"]


@pytest.mark.parametrize("score", thinned(READING, keep=3))
def test_what_keys_hold_that_are_masked_reaches_nothing(score):
    """Nor what queries hold whose pairs are all masked; of both a pair may be in the middle of a tile."""
    q, k, v, dout = inputs("float16", 64)
    seen = SEEN.copy()
    seen[..., 131], seen[..., 77, :] = False, False
    arrays = {"t": numpy.linspace(0.5, 1, HEADS, dtype=numpy.float32)}
    options = {"score": score, "mask": seen, "wrt": "t"}
    out, lse = attention(q, k, v, score=score, mask=seen, arrays=arrays, return_lse=True)
    expected = attention_backward(dout, q, k, v, out, lse, arrays=arrays, **options).darrays["t"]
    k[..., 131, :] = v[..., 131, :] = numpy.nan
    plan = plan_attention_backward(dout, q, k, v, out, lse, arrays=arrays, backend="host", arch="90a", **options)
    assert plan.kernels[1].file == "bwd_scores_hopper"
    got = plan(dout, q, k, v, out, lse, arrays=arrays, mask=seen).darrays["t"]
    assert abs(got - expected).max() <= 2**-9 * abs(expected).max()


WHY_NOT = {
    "which element a pair reads depends on its score": {
        "score": "score + t[int(score)]",
        "arrays": {"t": numpy.ones(9, numpy.float32)},
    },
    "sequences have lengths of their own, and it is of no bias alone": {
        "score": "score + t[h]",
        "arrays": {"t": numpy.ones(HEADS, numpy.float32)},
        "seqlens_kv": numpy.full(BATCH, 50, numpy.int32),
    },
}


@pytest.mark.parametrize("window, file", [((64, 0), "bwd_scores"), ((1024, 0), "bwd_scores_hopper"), (None, "bwd_scores_hopper")])
def test_tiles_that_a_window_hides_are_not_passed_by_one_after_the_other(window, file):
    q, lse = numpy.zeros((1, 1, 8192, 64), numpy.float16), numpy.zeros((1, 1, 8192), numpy.float32)
    options = {"window": window, "backend": "host", "arch": "90a"}
    slopes = {"alibi_slopes": SLOPES[:1, :1]}
    assert plan_attention_backward(q, q, q, q, q, lse, **slopes, wrt="alibi_slopes", **options).kernels[1].file == file
    bias = {"bias": numpy.zeros((8192, 1), numpy.float16)}  # of queries alone
    assert plan_attention_backward(q, q, q, q, q, lse, **bias, wrt="bias", **options).kernels[1].file == file


@pytest.mark.parametrize("why_not", WHY_NOT)
def test_a_plan_says_why_another_kernel_computes_it(why_not):
    q, k, v, dout = inputs("float16", 64)
    lse = numpy.zeros((BATCH, HEADS, LEN_Q), numpy.float32)
    plan = plan_attention_backward(dout, q, k, v, dout, lse, wrt="t", backend="host", arch="90a", **WHY_NOT[why_not])
    assert plan.kernels[1].file == "bwd_scores" and f"\n  not bwd_scores_hopper: {why_not}\n" in str(plan)
