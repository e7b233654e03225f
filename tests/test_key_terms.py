"""A term of the key alone beside a bias that comes by TMA, on the host against the oracle: it is found once for a key tile."""

from itertools import product

import numpy
import pytest
from score_kernels import judged
from terms_beside_bias import BIASES, HEADS, LEN_KV, LEN_Q, MASKS, OF_KEYS, SHAPES, TERMS, bias_of, check, check_shared_bias, inputs
from thinned import quick, thinned

from cupy_flash import FaultError, SanitizerError, plan_attention, plan_attention_backward
from cupy_flash.judge.oracle import HandScore, oracle
from cupy_flash.machine import host
from cupy_flash.plan.sources import files

WHERE = {"backend": "host", "arch": "90a"}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


CASES = list(product(SHAPES, MASKS, BIASES, TERMS))


@pytest.mark.parametrize("case", thinned(CASES, keep=120, first=3), ids=", ".join)
def test_both_directions(case, schedule):
    check(*case[:3], TERMS[case[3]], WHERE)


@pytest.mark.few_tiles
@pytest.mark.parametrize("case", thinned(CASES, keep=240, first=5), ids=", ".join)
def test_one_group_of_rows(case, schedule):
    """Whose stages of keys are more than the warps that find terms, or as many."""
    kernels = check(*case[:3], TERMS[case[3]], WHERE)
    assert kernels[0].config.TILE_Q == 64 or SHAPES[case[0]][1] > 128


@pytest.mark.parametrize("shape, wide", quick(list(product(list(SHAPES), (False, True))), ("float16, 40", False), spread=True))
def test_the_gradient_of_a_bias_that_batch_elements_share(shape, wide, schedule):
    check_shared_bias(shape, bias_of((1, HEADS), "float32" if wide else SHAPES[shape][0]), TERMS["padded"], WHERE)


def test_the_gradient_of_the_term(schedule):
    """By the scores as they are."""
    bias = bias_of((1, HEADS), "float16")

    def add(s):
        return s + OF_KEYS[:, None, None] + bias.astype(float)

    hand = HandScore(add, numpy.ones_like, {"t": (numpy.ones_like, lambda x: x.sum(axis=(1, 2)))})
    options = {"bias": bias, "score": "score + t[b, kv_idx]", "arrays": {"t": OF_KEYS}}
    kernels = judged("float16", options, {"score": hand}, WHERE, inputs_given=inputs("float16", 40), wrt="t", deterministic=True)
    assert all(kernel.expressions.has_key_term for kernel in kernels)


def planned(score, bias=None, **options):
    q, k, _, _ = inputs("float16", 64)
    lse = numpy.zeros(q.shape[:-1], numpy.float32)
    names = {"t": numpy.ones((2, LEN_KV), numpy.float32), "h_": numpy.ones(HEADS, numpy.float32)}
    arrays = {name: x for name, x in names.items() if f"{name}[" in score}
    asked = {"score": score, "arrays": arrays, "bias": bias_of((1, HEADS), "float16") if bias is None else bias, **options, **WHERE}
    return plan_attention(q, k, k, **asked).kernel, plan_attention_backward(q, q, k, k, q, lse, **asked).kernel


APART = {
    "score + t[b, kv_idx]": "captured",
    "t[b, kv_idx] - 1 + score": "- 1",
    "score - 2 * t[1, kv_idx]": "2",
    "score + where(kv_idx < 9, h_[h], 0.0)": "kv_idx",
    "score + 0.25 * kv_idx": "0.25",
}


@pytest.mark.parametrize("score", APART)
def test_what_is_taken_apart(score):
    for kernel in planned(score):
        assert kernel.expressions.has_key_term and APART[score].split()[-1] in kernel.expressions.key_term
        assert kernel.expressions.term == "(x.unit * at.bias)"


@pytest.mark.parametrize(
    "score, options",
    [
        ("score + t[b, kv_idx] * q_idx", {}),
        ("score + 0.25 * (kv_idx - q_idx)", {}),
        ("2 * score + t[b, kv_idx]", {}),
        ("score + t[b, kv_idx]", {"softcap": 9.0}),
        ("score + t[b, kv_idx]", {"scale": -0.5}),
        ("score + t[b, kv_idx]", {"mask": "kv_idx != 7"}),
        ("score + t[b, kv_idx]", {"dropout": 0.1, "seed": 1}),
        ("score + t[b, kv_idx]", {"alibi_slopes": numpy.ones(HEADS, numpy.float32)}),
        ("score + t[b, kv_idx]", {"seqlens_q": numpy.array([100, 141]), "seqlens_kv": numpy.array([203, 7])}),
        ("score + t[b, kv_idx]", {"bias": numpy.ones((1, HEADS, LEN_Q, LEN_KV), numpy.float16)}),  # whose rows TMA cannot find
    ],
)
def test_what_each_pair_computes(score, options):
    assert not any(kernel.expressions.has_key_term for kernel in planned(score, **options))


ALONE = list(product(("90a", "80"), ("nothing", "a bias")))


@pytest.mark.parametrize("arch, beside", quick(ALONE, ("90a", "a bias"), ("80", "nothing"), spread=True))
def test_rows_that_see_padding_alone_have_no_gradients(arch, beside):
    """Of scores of -1e9 float32 holds no differences, and of their lse nothing that P could be computed from."""
    q, k, v, dout = inputs("float16", 64)
    t = numpy.zeros((2, LEN_KV), numpy.float32)
    t[1] = -1e9
    options = {"score": "score + t[b, kv_idx]", "arrays": {"t": t}, "backend": "host", "arch": arch}
    options |= {} if beside == "nothing" else {"bias": bias_of((1, HEADS), "float16")}
    operands = {name: options[name] for name in ("arrays", "bias") if name in options}
    out, lse = plan_attention(q, k, v, return_lse=True, **options)(q, k, v, **operands)
    found = plan_attention_backward(dout, q, k, v, out, lse, **options)(dout, q, k, v, out, lse, **operands)
    alone = plan_attention_backward(dout[:1], q[:1], k[:1], v[:1], out[:1], lse[:1], **options | {"arrays": {"t": t[:1]}})
    right = alone(dout[:1], q[:1], k[:1], v[:1], out[:1], lse[:1], **operands | {"arrays": {"t": t[:1]}})
    for x, own in zip(found[:3], right[:3]):
        assert not x[1].any() and abs(x[:1].astype(float) - own.astype(float)).max() <= 2**-10 * abs(own).max()


SYNCHRONISE = {  # warps that bring terms with others: what is left out, and where it is the first of its kind
    "stage": ("tile/column_terms.cuh", "producer_acquire(keys);"),
    "arrival": ("tile/column_terms.cuh", "arrive_at(keys.full());"),
}


@pytest.mark.release  # every program that has four stages of keys breaks a rule of the host where warps wait wrongly
@pytest.mark.parametrize("left_out, sanitizer", [(None, "address"), (None, "thread"), *((name, "thread") for name in SYNCHRONISE)])
def test_warps_that_bring_terms_wait_and_arrive(left_out, sanitizer, change_kernel, monkeypatch):
    """More key tiles than there are stages, of several query tiles a block."""
    if left_out is not None:
        file, call = SYNCHRONISE[left_out]
        before, found, after = files()[file].partition(call)
        assert found
        change_kernel(file, before + after)
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", sanitizer)
    q, k, v, _ = inputs("float16", 40, len_kv=400)
    t = numpy.array([0.5, -1.0], numpy.float32)[:, None] * numpy.random.default_rng(2).standard_normal(400).astype(numpy.float32)
    bias = bias_of((1, HEADS), "float16", len_kv=400)
    exact, _ = oracle(q, k, v, scale=40**-0.5, bias=bias.astype(float) + t.astype(float)[:, None, None])
    noticed = []
    for order in host.SCHEDULES:
        monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", order)
        plan = plan_attention(q, k, v, bias=bias, score="score + t[b, kv_idx]", arrays={"t": t}, **WHERE)
        assert plan.kernel.expressions.has_key_term and plan.kernel.config.TILE_KV * plan.kernel.config.STAGES < 400
        try:
            noticed.append(bool(abs(plan(q, k, v, bias=bias, arrays={"t": t}) - exact).max() > 2e-3))
        except (FaultError, SanitizerError):
            noticed.append(True)
    assert any(noticed) is (left_out is not None)
