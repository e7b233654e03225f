"""Factors of heads with keys of their own: gradients of whole heads are multiplied by them, not those of pairs, on the host."""

from itertools import product

import numpy
import pytest
import ragged
from later_heads import HOST, normal
from later_heads import judged as same_as_formula
from ragged import Ragged
from score_kernels import DTYPES, judged
from thinned import thinned

from cupy_flash import attention, dropout_mask, plan_attention_backward
from cupy_flash.call import backward
from cupy_flash.judge.oracle import HandScore
from cupy_flash.machine import host
from cupy_flash.plan import backward as backward_plan
from cupy_flash.plan import grouping, whole_heads

HEADS, LEN_Q, LEN_KV = 3, 141, 203
FACTORS = numpy.array([[1.5, -0.5, 0.0], [2.0**-8, 1.0, 3.0]], numpy.float32)  # of each head of two batch elements
SHAPES = [("bfloat16", 40), ("float16", 64), ("float16", 128), ("bfloat16", 160), ("float16", 256)]
MASKS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "window": ({"window": (40, 10)}, {"first_key": LEN_KV - LEN_Q - 40, "last_key": LEN_KV - LEN_Q + 10}),
    "pairs": ({"mask": "(q_idx + kv_idx) % 3 > 0"}, {"seen": (numpy.arange(LEN_Q)[:, None] + numpy.arange(LEN_KV)) % 3 > 0}),
    "dropout": ({"dropout": 0.25, "seed": 7}, {}),
}
CASES = list(product(SHAPES, MASKS))


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def check(dtype, dim, mask, wrt=(), deterministic=False):
    """Both directions against the oracle; the plan of the backward."""
    rng, factor = numpy.random.default_rng(dim), FACTORS.astype(float)[..., None, None]
    given = [rng.standard_normal((2, HEADS, rows, dim)).astype(DTYPES[dtype]) for rows in (LEN_Q, LEN_KV, LEN_KV, LEN_Q)]
    of_t = {"t": (lambda s: s, lambda x: x.sum(axis=(-1, -2)))}
    sinks = {"sinks": numpy.array([0.5, -1.0, 3.0], numpy.float32)}
    options, hand = MASKS[mask]
    hand = hand | sinks | {"score": HandScore(lambda s: s * factor, lambda s: s * 0 + factor, of_t)}
    if mask == "dropout":
        hand |= {"keep": dropout_mask((2, HEADS, LEN_Q, LEN_KV), **options), "keep_scale": 4 / 3}
    options = options | sinks | {"score": "score * t[b, h]", "arrays": {"t": FACTORS}}
    kernels = judged(dtype, options, hand, HOST, wrt=wrt, inputs_given=given, deterministic=deterministic)
    assert kernels[1].config.SCORES == "SCALED" and kernels[1].file == ("bwd_hopper" if dim <= 128 else "bwd_hopper_wide")
    return kernels[1]


@pytest.mark.release  # the next test has the same gradients beside those of factors
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, schedule):
    (dtype, dim), mask = case
    assert check(dtype, dim, mask, deterministic=dim == 64).config.SCALE_SUMS


def test_gradients_of_factors(schedule):
    assert check("float16", 64, "causal", wrt="t").config.SCALE_SUMS


@pytest.mark.release  # test_hopper_backward.py has this tile, and others here have factors
def test_queries_whose_gradients_go_through_shared_memory(staged, schedule):
    config = check("float16", 64, "causal").config  # whose forward is that of others
    assert config.SCALE_SUMS and config.TMA_REDUCE_DQ


LENS = [(300, 300), (1, 200), (150, 40), (0, 7), (64, 64), (90, 0), (257, 130)]


@pytest.mark.parametrize("kind", ["packed", pytest.param("padded", marks=pytest.mark.release)])
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.release), pytest.param(256, marks=pytest.mark.release)])
def test_sequences(kind, dim, planned_anew, monkeypatch, schedule):
    """The factor is that of each sequence, by its length and number, whether its blocks make sums dq or others without keys."""
    sequences, score = Ragged(LENS, (HEADS, HEADS), dim), "score * (log(kv_len + 2.0) * (b - 2) / (h + 1) / 4)"
    found = ragged.backward(sequences, kind, kind, "90a", score=score)
    made, make = [], grouping.make_grouping
    monkeypatch.setattr(backward_plan, "make_grouping", lambda *given: made.append(make(*given)) or made[-1])
    monkeypatch.setattr(grouping, "ROWS_WORTH_SHARING", 0)
    backward._prepared.cache_clear()
    ragged.assert_same_bits(ragged.backward(sequences, kind, kind, "90a", score=score), found)
    assert made[-1].finishing > 0
    for (len_q, len_kv), gradients, right in zip(LENS, found, ragged.backward(sequences, kind, kind, score=score)):
        for got, exact in zip(gradients, right):
            assert abs(got.astype(float) - exact.astype(float)).max(initial=0) <= 2**-8 * max(1, abs(exact).max(initial=0))
            assert exact.any() or 0 in (len_q, len_kv) or gradients is found[2]  # whose factor is 0


SHARED = {
    "queries of all batch elements": ((HEADS, 300, 64), (3, HEADS, 170, 64)),
    "keys of all batch elements": ((3, HEADS, 170, 64), (HEADS, 300, 64)),
    "neither, along another axis each": ((2, 1, HEADS, 90, 128), (1, 3, HEADS, 200, 128)),
}


@pytest.mark.release  # test_hopper_backward.py asks it of sums without factors, and others here have one of each batch element
@pytest.mark.parametrize("shared", thinned(SHARED, keep=3, first=2))
def test_what_batch_elements_share(shared, schedule):
    """Gradients are summed over batch elements, each of which has its own factor."""
    shape, shape_kv = SHARED[shared]
    rng, batch = numpy.random.default_rng(4), numpy.broadcast_shapes(shape[:-3], shape_kv[:-3])
    q, k, v = (normal(rng, x, "f2") for x in (shape, shape_kv, shape_kv))
    named = {"arrays": {"t": rng.uniform(-2, 2, (*batch, HEADS)).astype(numpy.float32)}}
    options = {"score": f"score * t[{'b, ' if len(batch) == 1 else 'b // 3, b % 3, '}h]", **named}
    out, lse = attention(q, k, v, return_lse=True, **options)
    given = (normal(rng, out.shape, "f2"), q, k, v, out, lse)
    plan, formula = (plan_attention_backward(*given, **where, **options) for where in (HOST, {"backend": "numpy"}))
    assert plan.kernel.config.SCALE_SUMS
    same_as_formula(plan, formula, given, named)


@pytest.mark.parametrize("last_blocks", [0, 1])
@pytest.mark.parametrize("dim", thinned([64, 256]))
def test_who_makes_sums_dq(dim, last_blocks, planned_anew, monkeypatch, schedule):
    """The last block of a head, or of the last heads blocks that own no keys; and later heads have the sums of earlier ones."""
    monkeypatch.setattr(grouping, "CLEARING_BLOCKS", 1)
    monkeypatch.setattr(grouping, "LAST_BLOCKS", last_blocks)
    monkeypatch.setattr(whole_heads, "OF_NARROW", {})  # or a head would be for one block, and nobody had its sums again
    rng, shape = numpy.random.default_rng(6), (2, 9, 70, dim)
    q, k, v, dout = (normal(rng, shape, "f2") for _ in range(4))
    named = {"arrays": {"t": rng.uniform(-2, 2, (2, 9)).astype(numpy.float32)}}
    options = {"score": "score * t[b, h]", **named}
    out, lse = attention(q, k, v, return_lse=True, **options)
    given = (dout, q, k, v, out, lse)
    plan, formula = (plan_attention_backward(*given, **where, **options) for where in (HOST, {"backend": "numpy"}))
    heads = grouping.make_grouping(plan.kernel, plan.problem)
    assert plan.kernel.config.SCALE_SUMS and heads.last_heads == (16 if last_blocks else 18) and (heads.reused > 0) is (dim == 64)
    same_as_formula(plan, formula, given, named)


@pytest.mark.release  # test_key_tiles_in_turn.py asks it of masks and dropout
def test_key_tiles_that_blocks_take_in_turn(key_tiles_in_turn, schedule):
    config = check("float16", 64, "pairs").config
    assert config.SCALE_SUMS and config.PERSISTENT


@pytest.mark.parametrize("rows, heads_kv, whole", [(40_000, 3, True), (264 * 128, 1, False), (700, 1, True)])
def test_which_blocks_multiply_sums(rows, heads_kv, whole):
    """Those of one query head; where few rows leave few blocks, each has one of a group, and parts of dk are added up."""
    q, k, lse = numpy.zeros((3, rows, 64), "f2"), numpy.zeros((heads_kv, rows, 64), "f2"), numpy.zeros((3, rows), "f4")
    plan = plan_attention_backward(q, q, k, k, q, lse, score="score * t[h]", arrays={"t": FACTORS[0]}, **HOST)
    assert plan.kernel.config.SCORES == "SCALED" and plan.kernel.config.SCALE_SUMS is whole
