"""The bound on gradients: what it accepts, and each kind of wrong gradient it must not."""

import math

import ml_dtypes
import numpy
import pytest
from banded import blocked, blocked_gradients

from cupy_flash.judge import oracle_gradients
from cupy_flash.judge.cases import GUARD, Case, full_cases, make_inputs, quick_cases
from cupy_flash.judge.compare_gradients import compare_gradients, make_cotangents
from cupy_flash.judge.oracle import repeat_heads, round_to_tf32, sees
from cupy_flash.judge.oracle_gradients import gradients_of, naive_gradients, pairs_of, summed_to
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
victims = pytest.mark.parametrize("case", VICTIMS, ids=str)
causal_victims = pytest.mark.parametrize("case", [case for case in VICTIMS if case.causal], ids=str)
ON_CPU = [case for case in full_cases() if not case.heavy]
EMPTY = quick_cases()[-3:]


def inputs_of(case, seed=0):
    """`dout, q, k, v`, and `dlse`."""
    dout, dlse = make_cotangents(case, seed=seed)
    return (dout, *make_inputs(case, seed=seed)), dlse


def judge(case, grads, inputs=None, dlse=None):
    if inputs is None:
        inputs, dlse = inputs_of(case)
    return compare_gradients(grads, *inputs, dlse=dlse, precision=case.precision, **case.scores, **case.arrays())


def share(judgement):
    if not judgement.error:
        return 0.0
    return judgement.error / judgement.allowed if judgement.allowed else math.inf


def right(case, *, forward=None, **changes):
    """Correct gradients, or of another question; `forward` changes what the forward hands over."""
    (dout, q, k, v), dlse = inputs_of(case)
    handed = dict(zip(("out", "lse"), blocked(q, k, v, **case.scores), strict=True)) | {"dlse": dlse}
    return blocked_gradients(dout, q, k, v, **(forward or (lambda x: x))(handed), **(case.scores | changes))


def from_pairs(case, change):
    """Gradients in the case's dtype from P and dS in float64, which `change` has spoilt."""
    (dout, q, k, v), dlse = inputs_of(case)
    exact = [x.astype("f8") for x in (dout, q, k, v)]
    pairs = pairs_of(*exact, dlse, case.scores)
    p, ds = pairs.p.copy(), pairs.ds.copy()
    changed = change(pairs._replace(p=p, ds=ds)) or pairs._replace(p=p, ds=ds)
    return Gradients(*(x.astype(q.dtype) for x in gradients_of(changed, *exact, case.scores)))


# A kernel, as tensor cores compute: sums of 8 products at a time, cut to float32


def cut(x):
    return (x.view("u8") & ~numpy.uint64((1 << 29) - 1)).view("f8")


def tensor_cores(a, b, passes, step=8):
    """a @ b in float32, each addition cut towards zero."""
    if passes == 3:
        (a, a_low), (b, b_low) = ((round_to_tf32(x), cut_tf32(x - round_to_tf32(x))) for x in (a, b))
        factors = [(a, b_low), (a_low, b), (a, b)]
    else:
        factors = [(a, b)]
    total = numpy.zeros((*numpy.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    for i in range(0, a.shape[-1], step):
        for left, right in factors:
            total = cut(total + left[..., i : i + step].astype("f8") @ right[..., i : i + step, :].astype("f8"))
    return total.astype("f4")


def cut_tf32(x):
    return (numpy.ascontiguousarray(x).view("u4") & numpy.uint32(0xFFFFE000)).view("f4")


def kernel(case, inputs, dlse, sinks=None, delta_of_sinks=lambda delta, dlse: delta):
    """Forward and backward as kernels do them: everything kept in memory in the dtype, sums in float32, base 2."""
    dtype = inputs[0].dtype
    passes = 3 if case.dtype == "float32" and case.precision == "ieee" else 1
    scale, softcap = numpy.float32(case.scores["scale"]), case.softcap

    def stored(x):
        return x.astype(dtype).astype("f4")

    def product(a, b):
        return tensor_cores(*(map(round_to_tf32, (a, b)) if case.precision == "tf32" else (a, b)), passes)

    dout, q, k, v = (x.astype("f4") for x in inputs)
    k_each, v_each = repeat_heads(k, q), repeat_heads(v, q)
    seen = sees(case.len_q, case.len_kv, *(case.scores[name] for name in ("first_key", "last_key", "prefix")))
    s = product(q, k_each.swapaxes(-1, -2)) * scale
    slope = 1
    if softcap:
        bent = numpy.tanh(s / numpy.float32(softcap))
        s, slope = numpy.float32(softcap) * bent, 1 - bent * bent
    s = numpy.where(seen, s * numpy.float32(math.log2(math.e)), -numpy.inf).astype("f4")
    top = s.max(axis=-1, keepdims=True)
    if sinks is not None:
        logits = sinks.astype("f4").reshape(-1, sinks.shape[-1]).T[:, None] * numpy.float32(math.log2(math.e))
        top = numpy.maximum(top, logits.max(axis=-1, keepdims=True))
    top = numpy.where(numpy.isinf(top), numpy.float32(0), top)
    p = numpy.exp2(s - top)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + numpy.exp2(logits - top).sum(axis=-1, keepdims=True)
    out = stored(product(stored(p), v_each) / numpy.where(total == 0, numpy.float32(1), total))
    with numpy.errstate(divide="ignore"):
        lse = ((top + numpy.log2(total)) * numpy.float32(math.log(2)))[..., 0]

    delta = (dout * out).sum(axis=-1) - dlse
    nothing = numpy.isinf(lse)
    shift = numpy.where(nothing, numpy.float32(0), lse * numpy.float32(math.log2(math.e)))[..., None]
    p = numpy.exp2(s - shift)
    ds = stored(stored(p * slope) * (product(dout, v_each.swapaxes(-1, -2)) - delta[..., None]))
    dq = sum(product(ds[..., j : j + 32], k_each[..., j : j + 32, :]) for j in range(0, case.len_kv, 32)) * scale
    dk = product(ds.swapaxes(-1, -2), q) * scale
    dv = product(stored(p).swapaxes(-1, -2), dout)
    dsinks = None
    if sinks is not None:
        of_rows = -numpy.exp2(logits - shift) * delta_of_sinks(delta, dlse)[..., None]
        assert of_rows.dtype == "f4"
        dsinks = of_rows.sum(axis=-2).sum(axis=tuple(range(of_rows.ndim - 3))).T.reshape(sinks.shape).astype(sinks.dtype)
    gradients = (summed_to(x.shape, dx).astype(dtype) for x, dx in zip(inputs[1:], (dq, dk, dv), strict=True))
    return Gradients(*gradients, dsinks=dsinks)


# Accepted


@pytest.mark.parametrize("case", quick_cases(), ids=str)
def test_naive_is_accepted(case):
    for seed in range(2):
        inputs, dlse = inputs_of(case, seed)
        scores = case.scores | case.arrays()
        verdict = judge(case, naive_gradients(*inputs, dlse=dlse, precision=case.precision, **scores), inputs, dlse)
        assert verdict.ok, verdict.message


@pytest.mark.parametrize("case", dict.fromkeys((*quick_cases(), *ON_CPU[::5])), ids=str)
def test_blocked_is_accepted(case):
    (dout, q, k, v), dlse = inputs_of(case)
    blocks = {"block_q": 48, "block_kv": 40}
    scores = case.scores | case.arrays()
    out, lse = blocked(q, k, v, **scores, **blocks)
    for cotangent in (dlse, None):
        grads = blocked_gradients(dout, q, k, v, out, lse, dlse=cotangent, **scores, **blocks)
        verdict = judge(case, grads, (dout, q, k, v), cotangent)
        assert verdict.ok, verdict.message


ON_TENSOR_CORES = [c for c in ON_CPU if c.dtype != "float64" and c.len_q and c.len_kv and 0 not in c.batch and c.heads_q]


@pytest.mark.parametrize("case", ON_TENSOR_CORES[::6], ids=str)
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


# Sinks

WITH_SINKS = [
    Case("float16", 100, 200, heads_q=4, heads_kv=2, batch=(2,), causal=True, sinks=1),
    Case("bfloat16", 90, 100, dim=128, heads_q=2, batch=(2, 2), sinks=3, sinks_dtype="bfloat16"),
    Case("float16", 40, 20, heads_q=2, causal=True, softcap=5.0, sinks=2, sinks_dtype="float16"),
    Case("float32", 100, 200, heads_q=2, batch=(3,), causal=True, sinks=2),
]
with_sinks = pytest.mark.parametrize("case", WITH_SINKS, ids=str)


def by_kernel(case, sinks, **others):
    inputs, dlse = inputs_of(case)
    return kernel(case, inputs, dlse, sinks, **others)


def with_dsinks(grads, dsinks):
    return Gradients(*grads, dsinks=dsinks)


@with_sinks
def test_a_kernel_with_sinks_is_accepted_with_room(case):
    verdict = judge(case, by_kernel(case, **case.arrays()))
    assert verdict.ok, verdict.message
    assert max(map(share, (verdict.dq, verdict.dk, verdict.dv, verdict.dsinks))) < 0.5
    assert "dsinks: error" in verdict.message


@with_sinks
@pytest.mark.parametrize("added", [-1000, 10, 40, 80, 95, 1000])
def test_gradients_beside_sinks_far_from_the_scores(case, added):
    inputs, dlse = inputs_of(case)
    sinks = case.arrays()["sinks"].astype("f4") + numpy.float32(added)
    verdict = compare_gradients(kernel(case, inputs, dlse, sinks), *inputs, dlse=dlse, **case.scores, sinks=sinks)
    assert verdict.ok, verdict.message


@with_sinks
def test_the_gradient_of_sinks_has_their_shape_and_dtype(case):
    grads, sinks = by_kernel(case, **case.arrays()), case.arrays()["sinks"]
    for wrong in (None, grads.dsinks[..., :-1], grads.dsinks[None], grads.dsinks.astype("int8"), grads.dsinks.astype("f8")):
        verdict = judge(case, with_dsinks(grads, wrong))
        assert not verdict.ok and verdict.message.startswith("dsinks is ")
        assert verdict.message.endswith(f", expected {sinks.dtype} {sinks.shape}")
    inputs, dlse = inputs_of(case)
    plain = naive_gradients(*inputs, dlse=dlse, **case.scores)
    assert compare_gradients(plain, *inputs, dlse=dlse, **case.scores).dsinks is None
    verdict = compare_gradients(with_dsinks(plain, grads.dsinks), *inputs, dlse=dlse, **case.scores)
    assert not verdict.ok and verdict.message == f"dsinks is {sinks.dtype} {sinks.shape}, expected None"


@with_sinks
def test_wrong_gradients_of_sinks(case):
    grads = by_kernel(case, **case.arrays())
    dsinks, last = grads.dsinks, (-1,) * grads.dsinks.ndim
    if case.sinks == 3:
        last = (1, -2)  # that one is finite
    spoilt = dsinks.copy()
    spoilt[last] = numpy.nan
    wrong = {
        "sign": -dsinks,
        "twice": dsinks + dsinks,
        "zero": numpy.zeros_like(dsinks),
        "another head's": numpy.roll(dsinks, 1, axis=-1),
        "nan": spoilt,
    }
    for name, found in wrong.items():
        verdict = judge(case, with_dsinks(grads, found))
        assert not verdict.ok and share(verdict.dsinks) > 2, name
        assert max(map(share, (verdict.dq, verdict.dk, verdict.dv))) < 1
        assert "dsinks" in verdict.message and "FAILS" in verdict.message


@with_sinks
def test_dlse_or_out_left_out_of_the_gradient_of_sinks(case):
    for delta in (lambda delta, dlse: delta + dlse, lambda delta, dlse: -dlse, lambda delta, dlse: delta + 2 * dlse):
        verdict = judge(case, by_kernel(case, **case.arrays(), delta_of_sinks=delta))
        assert share(verdict.dsinks) > 2 and max(map(share, (verdict.dq, verdict.dk, verdict.dv))) < 1


@pytest.mark.parametrize("case", [case for case in WITH_SINKS if case.batch != (1,)], ids=str)
def test_a_batch_element_or_a_row_missing_in_the_gradient_of_sinks(case):
    def without(place):
        def delta(delta, dlse):
            delta = delta.copy()
            delta[place] = 0
            return delta

        return delta

    for place in (numpy.s_[-1], numpy.s_[..., -16:]):
        verdict = judge(case, by_kernel(case, **case.arrays(), delta_of_sinks=without(place)))
        assert share(verdict.dsinks) > 1


@with_sinks
def test_gradients_with_the_sinks_of_another_head_or_none_or_twice(case):
    right = by_kernel(case, **case.arrays())
    sinks = case.arrays()["sinks"]
    for wrong in (numpy.roll(sinks, 1, axis=-1), numpy.concatenate([numpy.atleast_2d(sinks)] * 2)):
        verdict = judge(case, with_dsinks(by_kernel(case, wrong), right.dsinks))
        assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 2
    verdict = judge(case, with_dsinks(by_kernel(case, None), right.dsinks))
    assert min(map(share, (verdict.dq, verdict.dk, verdict.dv))) > 2


def test_a_sink_of_minus_infinity_has_a_gradient_of_exactly_zero():
    case = WITH_SINKS[1]
    grads = by_kernel(case, **case.arrays())
    assert (grads.dsinks[numpy.isinf(case.arrays()["sinks"])] == 0).all() and judge(case, grads).ok
    grads.dsinks[0, 0] = 1e-30  # of head 0 it is the first
    assert not judge(case, grads).ok


def test_sinks_of_broadcast_inputs():
    """Batch axes that are judged together and one after another."""
    case = Case("float32", 30, 40, heads_q=4, heads_kv=2, batch=(2, 3), sinks=2)
    (dout, q, k, v), dlse = inputs_of(case)
    for inputs in ((dout, q, k, v), (dout, q, k[:1], v[0, 0]), (dout, q[:, :1], k, v), (dout, q[:1], k[0], v)):
        grads = naive_gradients(*inputs, dlse=dlse, **case.scores, **case.arrays())
        assert judge(case, grads, inputs, dlse).ok
        assert not judge(case, with_dsinks(grads, grads.dsinks * numpy.float32(1.01)), inputs, dlse).ok


# Cotangents


@pytest.mark.parametrize("case", quick_cases(), ids=str)
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
