"""The bound on gradients: what it accepts, and each kind of wrong gradient it must not."""

import math

import ml_dtypes
import numpy
import pytest
from banded import blocked, blocked_gradients
from judged_gradients import from_pairs, inputs_of, judge, kernel, right, share
from thinned import thinned

from cupy_flash.judge import oracle_gradients
from cupy_flash.judge.cases import GUARD, Case, full_cases, make_inputs, quick_cases
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.judge.oracle import sees
from cupy_flash.judge.oracle_gradients import naive_gradients
from cupy_flash.problem.backward import Gradients

pytestmark = pytest.mark.filterwarnings("error")

VICTIMS = [
    Case("float16", 100, 200, heads_q=2, causal=True),
    Case("bfloat16", 90, 700, dim=96),
    Case("bfloat16", 110, 110, heads_q=6, heads_kv=2, causal=True),
    Case("float16", 100, 200, softcap=2.0),
    Case("float32", 100, 200, heads_q=2, causal=True),
    Case("float32", 100, 200, precision="tf32"),
    Case("float64", 90, 120, causal=True),
]
victims = pytest.mark.parametrize("case", thinned(VICTIMS), ids=str)
causal_victims = pytest.mark.parametrize("case", [case for case in VICTIMS if case.causal], ids=str)
ON_CPU = [case for case in full_cases() if not case.heavy and not case.of_pairs]
EMPTY = quick_cases()[-3:]


# Accepted


@pytest.mark.parametrize("case", thinned(case for case in quick_cases() if not case.of_pairs), ids=str)
def test_naive_is_accepted(case):
    for seed in range(2):
        inputs, dlse = inputs_of(case, seed)
        scores = case.meaning()
        verdict = judge(case, naive_gradients(*inputs, dlse=dlse, precision=case.precision, **scores), inputs, dlse)
        assert verdict.ok, verdict.message


MANY = dict.fromkeys((*(c for c in quick_cases() if not c.of_pairs), *ON_CPU[::5]))


@pytest.mark.parametrize("case", thinned(MANY, keep=6), ids=str)
def test_blocked_is_accepted(case):
    (dout, q, k, v), dlse = inputs_of(case)
    blocks = {"block_q": 48, "block_kv": 40}
    scores = case.meaning()
    out, lse = blocked(q, k, v, **scores, **blocks)
    for cotangent in (dlse, None):
        grads = blocked_gradients(dout, q, k, v, out, lse, dlse=cotangent, **scores, **blocks)
        verdict = judge(case, grads, (dout, q, k, v), cotangent)
        assert verdict.ok, verdict.message


ON_TENSOR_CORES = [c for c in ON_CPU if c.dtype != "float64" and c.len_q and c.len_kv and 0 not in c.batch and c.heads_q]


@pytest.mark.parametrize("case", thinned(ON_TENSOR_CORES[::6], keep=4), ids=str)
def test_a_kernel_is_accepted_with_room(case):
    inputs, dlse = inputs_of(case)
    verdict = judge(case, kernel(case, inputs, dlse, **case.arrays()), inputs, dlse)
    assert verdict.ok, verdict.message
    assert max(map(share, filter(None, (verdict.dq, verdict.dk, verdict.dv, verdict.dsinks)))) < 0.5


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty_gradients_are_accepted(case):
    verdict = judge(case, right(case))
    assert verdict.ok
    assert verdict.dq.error == verdict.dq.ratio == verdict.dk.error == verdict.dv.error == 0


def test_nan_and_infinity_are_right_where_the_oracle_has_them():
    case = Case("float16", 40, 50, causal=True, window=(8, None))
    (dout, q, k, v), dlse = inputs_of(case)
    k, dout = k.copy(), dout.copy()
    k[..., 45, 0], dout[..., 5, 3] = numpy.nan, numpy.inf
    grads = blocked_gradients(dout, q, k, v, *blocked(q, k, v, **case.scores), dlse=dlse, **case.scores)
    assert all(numpy.isnan(x).any() and numpy.isfinite(x).any() for x in grads)
    assert judge(case, grads, (dout, q, k, v), dlse).ok
    for i in range(3):
        repaired = [numpy.nan_to_num(x) if i == j else x for j, x in enumerate(grads)]
        assert not judge(case, Gradients(*repaired), (dout, q, k, v), dlse).ok


def test_ratio_is_that_of_the_largest_errors():
    case = VICTIMS[0]
    inputs, dlse = inputs_of(case)
    exact = oracle_gradients.oracle_gradients(*inputs, dlse=dlse, **case.scores)
    plain = naive_gradients(*inputs, dlse=dlse, **case.scores)
    twice = Gradients(*((a + 2 * (b - a)).astype(b.dtype) for a, b in zip(exact, plain, strict=True)))
    for grads, ratio in ((plain, 1), (twice, 2)):
        verdict = judge(case, grads, inputs, dlse)
        for judgement in (verdict.dq, verdict.dk, verdict.dv):
            assert judgement.ratio == pytest.approx(ratio, rel=0.3 if ratio == 2 else 1e-12)
    assert "dq: error" in verdict.message and "dv: error" in verdict.message


# Rejected


@victims
def test_shape_and_dtype(case):
    grads = right(case)
    for i, name in enumerate(Gradients._fields):
        for wrong in (grads[i][..., :-1], grads[i][None], grads[i].astype("int8")):
            verdict = judge(case, grads._replace(**{name: wrong}))
            assert not verdict.ok and verdict.message.startswith(f"{name} is") and "expected" in verdict.message
            assert verdict.dq is verdict.dk is verdict.dv is None


@victims
@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf])
@pytest.mark.parametrize("name", Gradients._fields)
def test_one_nan_or_infinity(case, bad, name):
    grads = right(case)
    getattr(grads, name)[..., -1, 7, 5] = bad
    verdict = judge(case, grads)
    assert not verdict.ok and getattr(verdict, name).error == math.inf
    head = (case.heads_q if name == "dq" else case.heads_kv) - 1
    assert f"{name}: NaN or infinity out of place, FAILS in row (0, {head}, 7)" in verdict.message


def test_what_nobody_sees_must_be_exactly_zero():
    case = Case("float16", 10, 5, causal=True)  # the first five rows see nothing
    grads = right(case)
    assert judge(case, grads).ok
    grads.dq[..., 0, 0] = 6e-8
    assert not judge(case, grads).ok
    case = Case("float16", 5, 10, causal="top_left")  # the last five keys are not seen
    grads = right(case)
    assert judge(case, grads).ok
    grads.dv[..., 9, 0] = 6e-8
    assert not judge(case, grads).ok


@victims
def test_two_rows_swapped(case):
    for name in Gradients._fields:
        grads = right(case)
        x = getattr(grads, name)
        x[..., [80, 81], :] = x[..., [81, 80], :]
        assert not judge(case, grads).ok


@victims
def test_delta_dropped(case):
    verdict = judge(case, right(case, forward=lambda handed: handed | {"out": numpy.zeros_like(handed["out"])}))
    assert share(verdict.dq) > 2 and share(verdict.dk) > 2 and share(verdict.dv) < 1


@victims
def test_dlse_dropped(case):
    verdict = judge(case, right(case, forward=lambda handed: handed | {"dlse": None}))
    assert share(verdict.dq) > 2 and share(verdict.dk) > 2 and share(verdict.dv) < 1


@victims
def test_scale_missing(case):
    scale = case.scores["scale"]
    for name in ("dq", "dk"):
        grads = right(case)
        wrong = (getattr(grads, name) / scale).astype(grads.dq.dtype)
        assert not judge(case, grads._replace(**{name: wrong})).ok


@victims
def test_lse_in_base_two(case):
    verdict = judge(case, right(case, forward=lambda handed: handed | {"lse": handed["lse"] / numpy.float32(math.log(2))}))
    assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 2


@victims
@pytest.mark.parametrize("change", [{"scale": 0.13}, {"softcap": 20.0}, {"first_key": 3}])
def test_another_question(case, change):
    assert not judge(case, right(case, **change)).ok


@causal_victims
@pytest.mark.parametrize("off", [-1, 1])
def test_a_diagonal_off_by_one(case, off):
    verdict = judge(case, right(case, last_key=case.scores["last_key"] + off))
    assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 2


@causal_victims
def test_one_masked_pair_unmasked(case, monkeypatch):
    row = case.len_q // 2
    key = row + case.scores["last_key"] + 1

    def with_one_more(*lengths, **mask):
        seen = sees(*lengths, **mask)
        seen[row, key] = True
        return seen

    with monkeypatch.context() as patch:
        patch.setattr("cupy_flash.judge.oracle.sees", with_one_more)
        grads = from_pairs(case, lambda pairs: None)
    assert judge(case, from_pairs(case, lambda pairs: None)).ok
    verdict = judge(case, grads)
    assert share(verdict.dk) > 2 and share(verdict.dv) > 2


@victims
def test_a_tile_of_keys_skipped_by_some_rows(case):
    def skip(pairs):
        pairs.p[..., -16:, 32:64] = pairs.ds[..., -16:, 32:64] = 0

    verdict = judge(case, from_pairs(case, skip))
    assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 2


@victims
def test_a_tile_of_keys_whose_part_of_dq_is_lost(case):
    def lose(pairs):
        pairs.ds[..., 32:64] = 0

    assert share(judge(case, from_pairs(case, lose)).dq) > 2


def test_a_query_head_missing_in_the_sum_of_its_group():
    case = VICTIMS[2]

    def skip(pairs):
        pairs.p[..., 4, :, :] = pairs.ds[..., 4, :, :] = 0

    whole, missing = from_pairs(case, lambda pairs: None), from_pairs(case, skip)
    assert judge(case, whole).ok
    verdict = judge(case, whole._replace(dk=missing.dk, dv=missing.dv))
    assert share(verdict.dk) > 2 and share(verdict.dv) > 2
    assert "FAILS in row (0, 1," in verdict.message


def test_a_batch_element_missing_in_the_sum_of_a_broadcast_input():
    case = Case("float16", 60, 70, heads_q=2, batch=(2, 3))
    (dout, q, k, v), dlse = inputs_of(case)
    k, v = k[:1], v[0, 0]
    inputs = dout, q, k, v
    out, lse = blocked(q, k, v, **case.scores)
    grads = blocked_gradients(dout, q, k, v, out, lse, dlse=dlse, **case.scores)
    assert judge(case, grads, inputs, dlse).ok
    others = numpy.ones((2, 3, 1, 1), "float32")
    others[1, 2] = 0
    spoilt = (dout * others[..., None]).astype(dout.dtype)
    less = blocked_gradients(spoilt, q, k, v, out, lse, dlse=dlse * others, **case.scores)
    verdict = judge(case, grads._replace(dk=less.dk, dv=less.dv), inputs, dlse)
    assert share(verdict.dq) < 1 and share(verdict.dk) > 2 and share(verdict.dv) > 2


def test_the_slope_of_the_softcap_missing():
    case = VICTIMS[3]
    grads = from_pairs(case, lambda pairs: pairs._replace(ds=pairs.p * (pairs.dp - pairs.delta[..., None])))
    verdict = judge(case, grads)
    assert share(verdict.dq) > 2 and share(verdict.dk) > 2


@pytest.mark.parametrize("case", [VICTIMS[0], VICTIMS[1], VICTIMS[3]], ids=str)
@pytest.mark.parametrize("float8", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_factors_in_eight_bits(case, float8):
    def rounded(pairs):
        return pairs._replace(p=pairs.p.astype(float8).astype("f8"), ds=pairs.ds.astype(float8).astype("f8"))

    verdict = judge(case, from_pairs(case, rounded))
    assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 1


def test_tf32_where_float32_was_asked_for():
    case = VICTIMS[4]
    inputs, dlse = inputs_of(case)
    verdict = judge(case, naive_gradients(*inputs, dlse=dlse, precision="tf32", **case.scores))
    assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 1


# Cotangents


@pytest.mark.parametrize("case", [case for case in quick_cases() if not case.of_pairs], ids=str)
def test_cotangents_lie_as_the_case_says(case):
    dout, dlse = make_cotangents(case)
    q, *_ = make_inputs(case)
    assert dout.shape == (*case.batch, case.heads_q, case.len_q, case.dim_v) and dout.dtype == q.dtype
    assert dlse.shape == dout.shape[:-1] and dlse.flags.c_contiguous
    assert dlse.dtype == ("float64" if case.dtype == "float64" else "float32")
    assert numpy.isfinite(dout).all() and numpy.isfinite(dlse).all()
    buffer = dout
    while buffer.base is not None:
        buffer = buffer.base
    assert numpy.isnan(buffer).sum() == buffer.size - dout.size >= 2 * GUARD


def test_cotangents_depend_on_case_and_seed_only():
    case, other = quick_cases()[:2]
    (dout, dlse), again, seeded = make_cotangents(case), make_cotangents(case), make_cotangents(case, seed=1)
    assert numpy.array_equal(dout, again[0]) and numpy.array_equal(dlse, again[1])
    assert not numpy.array_equal(dout, seeded[0]) and not numpy.array_equal(dlse, seeded[1])
    assert not numpy.array_equal(dout, make_inputs(case)[0])
    assert make_cotangents(other)[0].shape != dout.shape
