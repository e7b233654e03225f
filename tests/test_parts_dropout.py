"""Dropout of float32 in parts of float16: the pairs of `dropout_mask`, and results as near as those of the v2 kernels."""

from dataclasses import replace

import numpy
import pytest
from thinned import quick

from cupy_flash import UnsupportedError, dropout_mask, plan_attention, plan_attention_backward
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.dropout import keep_scale_of, kept_pairs
from cupy_flash.plan.fp16_parts import why_not_parts
from cupy_flash.plan.gradient_parts import why_not_gradient_parts
from cupy_flash.problem.dropout import Place

HOST, SEED = {"backend": "host", "arch": "90a"}, (1 << 40) + 12345
LEN_Q, LEN_KV = 150, 210
DIMS = (64, 128, 32, 100)
ASKED = {
    "nothing": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi_slopes": numpy.array([0.3, 0.7], numpy.float32)},
    "sinks": {"sinks": numpy.array([0.5, 2.0], numpy.float32)},
}
OF_CALLS = ("alibi_slopes", "sinks", "bias")


def drawn(dim, seed=0):
    rng = numpy.random.default_rng(seed)
    q, dout = rng.standard_normal((2, 2, 2, LEN_Q, dim), numpy.float32)
    k, v = rng.standard_normal((2, 2, 1, LEN_KV, dim), numpy.float32)
    return q, k, v, dout


def computed(operands, asked, p, precision="ieee", options=HOST, kernels=("fwd_hopper", "bwd_hopper_parts"), **others):
    """Results of the forward, and of the backward of these."""
    q, k, v, dout = operands
    told = {**asked, "dropout": p, "seed": SEED, "precision": precision, **options}
    of_a_call = {name: asked[name] for name in OF_CALLS if name in asked} | {"seed": SEED}
    plan = plan_attention(q, k, v, return_lse=True, kernel=kernels[0], **told)
    out, lse = plan(q, k, v, **of_a_call)
    given = dout, q, k, v, out, lse
    backwards = plan_attention_backward(*given, kernel=kernels[1], **told, **others)
    for c in (plan.kernel.config, backwards.kernel.config):
        assert (True, 1 if precision == "tf32" else 2) == (c.DROPOUT, c.FP16_PARTS)
    return out, lse, backwards(*given, **of_a_call)


def meaning(asked, p, dim):
    told = {"scale": dim**-0.5, "keep": kept_pairs((2, 2, LEN_Q, LEN_KV), p, SEED), "keep_scale": keep_scale_of(p)}
    told |= {"last_key": LEN_KV - LEN_Q} if "causal" in asked else {}
    return told | {name: asked[name] for name in ("softcap", "alibi_slopes", "sinks") if name in asked}


def judge(operands, results, asked, p, precision="ieee"):
    q, k, v, dout = operands
    told = meaning(asked, p, q.shape[-1])
    judged = compare(*results[:2], q, k, v, precision=precision, **told)
    assert judged.ok, judged.message
    judged = compare_gradients(results[2], dout=dout, q=q, k=k, v=v, precision=precision, **told)
    assert judged.ok, judged.message


CASES = [(name, dim) for name in ASKED for dim in DIMS]


@pytest.mark.parametrize("name, dim", quick(CASES, ("softcap", 100), spread=True))
def test_right(name, dim):
    operands = drawn(dim)
    judge(operands, computed(operands, ASKED[name], 0.3), ASKED[name], 0.3)


@pytest.mark.release  # one part is quick without dropout, and dropout of two parts
@pytest.mark.parametrize("dim", [64, 128])
def test_tf32(dim):
    operands = drawn(dim, 1)
    judge(operands, computed(operands, ASKED["causal"], 0.1, "tf32"), ASKED["causal"], 0.1, "tf32")


@pytest.mark.parametrize("p", [2.0**-15, 0.5, 0x7C00 / 2**15])
def test_pairs_are_those_of_the_mask(p):
    """One by one: of values, and of dout, that are one-hot, results and gradients of values hold the mask."""
    q = numpy.zeros((2, 2, LEN_Q, 64), numpy.float32)
    k, hot = numpy.zeros((2, 2, 2, LEN_KV, 64), numpy.float32)
    columns = numpy.arange(64)
    kept = dropout_mask((2, 2, LEN_Q, LEN_KV), p, SEED)
    for first in (0, 128):
        hot[...], dout = 0, numpy.zeros_like(q)
        hot[:, :, first + columns, columns] = 1
        dout[:, :, columns, columns] = 1
        out, _, (_, _, dv, *_) = computed((q, k, hot, dout), {}, p)
        numpy.testing.assert_array_equal(out != 0, kept[..., first : first + 64])
        numpy.testing.assert_array_equal(dv != 0, kept[:, :, :64].swapaxes(2, 3))


@pytest.mark.release  # a mask is quick without dropout, and dropout without a mask
def test_a_mask_beside():
    operands = drawn(64, 2)
    rng = numpy.random.default_rng(3)
    docs = {"d": numpy.sort(rng.integers(0, 4, LEN_Q)), "d_kv": numpy.sort(rng.integers(0, 4, LEN_KV))}
    asked = {"mask": "d[q_idx] == d_kv[kv_idx]", "arrays": docs}
    told = meaning({}, 0.3, 64) | {"seen": docs["d"][:, None] == docs["d_kv"]}
    q, k, v, dout = operands
    options = {**asked, "dropout": 0.3, "seed": SEED, **HOST}
    plan = plan_attention(q, k, v, return_lse=True, **options, kernel="fwd_hopper")
    out, lse = plan(q, k, v, arrays=docs, seed=SEED)
    judged = compare(out, lse, q, k, v, **told)
    assert judged.ok, judged.message
    given = dout, q, k, v, out, lse
    gradients = plan_attention_backward(*given, **options, kernel="bwd_hopper_parts")(*given, arrays=docs, seed=SEED)
    judged = compare_gradients(gradients, dout=dout, q=q, k=k, v=v, **told)
    assert judged.ok, judged.message


def test_in_order_bits_are_the_same_in_every_schedule(monkeypatch):
    operands, found = drawn(128, 4), []
    for schedule in ("eager", "deferred"):
        monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
        found.append(computed(operands, {"causal": True}, 0.2, deterministic=True))
    for (out, lse, gradients), (of_out, of_lse, others) in [found]:
        for one, other in zip((out, lse, *gradients[:3]), (of_out, of_lse, *others[:3])):
            numpy.testing.assert_array_equal(one, other)


REFUSED = {
    "most pairs": ({"dropout": 0.99}, 64, "at most 31 of 32 pairs"),
    "a bias of wide heads": ({"bias": numpy.zeros((2, LEN_Q, LEN_KV), numpy.float32)}, 65, "no registers"),
    "a long expression": ({"score": "score * sigmoid(score)"}, 64, "beside dropout|an expression"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_v2(name):
    asked, dim, reason = REFUSED[name]
    q, k, v, dout = drawn(dim)
    options = {"dropout": 0.1, "seed": 1, **asked, **HOST}
    given = dout, q, k, v, dout, numpy.zeros(q.shape[:-1], numpy.float32)
    assert plan_attention(q, k, v, **options).kernel.file == "fwd_v2"
    assert plan_attention_backward(*given, **options).kernel.file == "bwd_v2"
    with pytest.raises(UnsupportedError, match=f"got 'fwd_hopper': .*({reason})"):
        plan_attention(q, k, v, **options, kernel="fwd_hopper")
    with pytest.raises(UnsupportedError, match=f"got 'bwd_hopper_parts': .*({reason})"):
        plan_attention_backward(*given, **options, kernel="bwd_hopper_parts")


def test_pairs_that_are_numbered_from_elsewhere_are_for_v2():
    """As of one of several devices: where they are numbered from has the place of the factors of parts."""
    q, k, v, dout = drawn(64)
    told = {"dropout": 0.1, "seed": 1, **HOST}
    problem = plan_attention(q, k, v, **told).problem
    moved = replace(problem, scores=replace(problem.scores, place=Place(64, 0, 0, 2)))
    assert why_not_parts(problem) == "" and "numbered from 0 on" in why_not_parts(moved)
    backwards = plan_attention_backward(dout, q, k, v, dout, numpy.zeros(q.shape[:-1], numpy.float32), **told).problem
    assert why_not_gradient_parts(backwards) == ""
    assert "numbered from 0 on" in why_not_gradient_parts(replace(backwards, forward=moved))
