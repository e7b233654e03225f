"""The bound: what it accepts, and each kind of wrong result it must not."""

import math

import ml_dtypes
import numpy
import pytest
from banded import blocked
from thinned import thinned

from cupy_flash.judge.cases import Case, full_cases, make_inputs, quick_cases
from cupy_flash.judge.compare import ARITHMETIC, SPLIT_TF32, compare
from cupy_flash.judge.oracle import naive, sees

pytestmark = pytest.mark.filterwarnings("error")

VICTIMS = [
    Case("float16", 150, 300, heads_q=2, causal=True),
    Case("bfloat16", 130, 1000, dim=128),
    Case("float32", 150, 300, heads_q=2, causal=True),
    Case("float32", 150, 300, heads_q=2, precision="tf32"),
    Case("float64", 90, 120, causal=True),
]
victims = pytest.mark.parametrize("case", VICTIMS, ids=str)


def judge(case, out, lse, inputs=None):
    return compare(out, lse, *(inputs or make_inputs(case)), precision=case.precision, **case.meaning())


def right(case, **changes):
    """A correct result, or a correct result of another question."""
    return blocked(*make_inputs(case), **(case.scores | case.arrays() | changes))


def kernel(q, k, v, *, scale, first_key, last_key, prefix, softcap, factor, sinks=None, first=False, tile=32, tanh=numpy.tanh):
    """Online softmax as a kernel does it: in base 2, tile after tile of keys, P rounded before it is divided.

    Sinks join before the first tile or, unless `first`, behind the last one.
    """
    group = q.shape[-3] // max(k.shape[-3], 1)
    q, k, v = q.astype("f4"), *(numpy.repeat(x, group, axis=-3).astype("f4") for x in (k, v))
    seen = sees(q.shape[-2], k.shape[-2], first_key, last_key, prefix)
    top = numpy.full((*numpy.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2]), -numpy.inf, "f4")
    total, out = numpy.zeros_like(top), numpy.zeros((*top.shape, v.shape[-1]), "f4")

    def with_sinks(top, total, out):
        logits = sinks.astype("f4").reshape(-1, sinks.shape[-1]).T[:, None] * numpy.float32(math.log2(math.e))
        new_top = numpy.maximum(top, logits.max(axis=-1))
        rescale = numpy.exp2(top - new_top)
        return new_top, total * rescale + numpy.exp2(logits - new_top[..., None]).sum(axis=-1), out * rescale[..., None]

    if sinks is not None and first:
        top, total, out = with_sinks(top, total, out)
    for j in range(0, k.shape[-2], tile):
        s = q @ k[..., j : j + tile, :].swapaxes(-1, -2) * numpy.float32(scale)
        s = s if softcap is None else softcap * tanh(s / softcap)
        s = numpy.where(seen[:, j : j + tile], s * numpy.float32(math.log2(math.e)), -numpy.inf)
        new_top = numpy.maximum(top, s.max(axis=-1))
        shift = numpy.where(numpy.isinf(new_top), 0, new_top)
        p, rescale = numpy.exp2(s - shift[..., None]), numpy.exp2(top - shift)
        total = total * rescale + p.sum(axis=-1)
        out = out * rescale[..., None] + factor(p) @ factor(v[..., j : j + tile, :])
        top = new_top
    if sinks is not None and not first:
        top, total, out = with_sinks(top, total, out)
    with numpy.errstate(divide="ignore"):
        lse = top * numpy.float32(math.log(2)) + numpy.log(total)
    return out / numpy.where(total == 0, 1, total)[..., None], lse


def rounded_to(dtype):
    return lambda x: x.astype(dtype).astype("f4")


# Accepted


@pytest.mark.parametrize("case", thinned(quick_cases()), ids=str)
def test_naive_is_accepted(case):
    for seed in range(3):
        q, k, v = make_inputs(case, seed=seed)
        verdict = judge(case, *naive(q, k, v, precision=case.precision, **case.meaning()), (q, k, v))
        assert verdict.ok, verdict.message


PLAIN = [case for case in full_cases() if not case.of_pairs]
HALF = [c for c in PLAIN if c.dtype in ("float16", "bfloat16") and not c.heavy and c.len_kv and 0 not in c.batch]


@pytest.mark.parametrize("case", thinned(HALF[::3], keep=4), ids=str)
def test_a_kernel_of_half_precision_is_accepted_with_room(case):
    q, k, v = make_inputs(case)
    for first in (False, True) if case.sinks else (False,):
        out, lse = kernel(q, k, v, **case.scores, **case.arrays(), factor=rounded_to(q.dtype), first=first)
        verdict = judge(case, out.astype(q.dtype), lse, (q, k, v))
        assert verdict.ok, verdict.message
        assert 2 * verdict.error <= verdict.allowed and 2 * verdict.lse_error <= verdict.lse_allowed


WITH_SINKS = [
    Case("float16", 150, 300, heads_q=4, heads_kv=2, causal=True, sinks=1),
    Case("bfloat16", 130, 200, dim=128, heads_q=2, sinks=3, sinks_dtype="bfloat16"),
    Case("float32", 150, 100, heads_q=2, causal=True, sinks=2),
]
with_sinks = pytest.mark.parametrize("case", WITH_SINKS, ids=str)


def by_kernel(case, sinks, **others):
    q, k, v = make_inputs(case)
    out, lse = kernel(q, k, v, **case.scores, sinks=sinks, factor=rounded_to(q.dtype), **others)
    return out.astype(q.dtype), lse


@with_sinks
@pytest.mark.parametrize("first", [False, True], ids=["joined last", "joined first"])
@pytest.mark.parametrize("added", thinned([-1000, -20, 4, 10, 30, 80, 95, 120, 1000], keep=4, first=2))
def test_sinks_far_from_the_scores(case, added, first):
    """Sinks decide over P up to where it is lost, and lse stays near them."""
    sinks = case.arrays()["sinks"].astype("f4") + numpy.float32(added)
    out, lse = by_kernel(case, sinks, first=first)
    # Where the device flushes what is below the normal numbers of float32, so do results.
    flushed = numpy.where(abs(out.astype("f4")) < numpy.float32(2.0**-126), 0, out.astype("f4")).astype(out.dtype)
    for found in (out, flushed):
        verdict = compare(found, lse, *make_inputs(case), **case.scores, sinks=sinks)
        assert verdict.ok, verdict.message
    if added >= 120:  # all P are below the normal numbers of float32
        assert compare(numpy.zeros_like(out), lse, *make_inputs(case), **case.scores, sinks=sinks).ok
    if added in (4, 10):  # where results are not yet at the end of any format
        assert not compare((out * 1.05).astype(out.dtype), None, *make_inputs(case), **case.scores, sinks=sinks).ok
        assert not compare(numpy.zeros_like(out), None, *make_inputs(case), **case.scores, sinks=sinks).ok


def test_a_result_beside_a_large_sink_has_to_be_right_relative_to_itself():
    for case, slip in ((WITH_SINKS[1], 1.1), (WITH_SINKS[2], 1 + 1e-3)):
        sinks = numpy.full(case.heads_q, 60, "f4")
        out, lse = by_kernel(case, sinks)
        assert abs(out.astype("f4")).max() < 1e-20
        assert compare(out, lse, *make_inputs(case), **case.scores, sinks=sinks).ok
        assert not compare((out * slip).astype(out.dtype), lse, *make_inputs(case), **case.scores, sinks=sinks).ok


def test_a_row_of_sinks_alone():
    case = Case("float16", 10, 5, heads_q=2, causal=True, sinks=2)  # the first five rows see nothing
    out, lse = by_kernel(case, case.arrays()["sinks"])
    assert judge(case, out, lse).ok
    assert (out[..., :5, :] == 0).all() and numpy.allclose(lse[0, :, 0], numpy.logaddexp(*case.arrays()["sinks"]))
    for wrong in (6e-8, numpy.nan):
        out[..., 1, 4, 0] = wrong
        assert not judge(case, out, lse).ok
    out, lse = by_kernel(case, case.arrays()["sinks"])
    lse[..., :5] = -numpy.inf
    assert not judge(case, out, lse).ok


def test_sinks_of_minus_infinity_are_none():
    case = Case("float32", 30, 20, heads_q=2, causal=True, sinks=1)
    q, k, v = make_inputs(case)
    none = numpy.full((1, 2), -numpy.inf, "f4")
    assert compare(*naive(q, k, v, **case.scores), q, k, v, **case.scores, sinks=none).ok
    assert not judge(case, *naive(q, k, v, **case.scores)).ok

def tanh_right_absolutely(x):
    return 1 - 2 / (numpy.exp2(x * numpy.float32(2 * math.log2(math.e))) + 1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("len_kv", "softcap", "scale"), [(1, 50.0, 1e-3), (99, 1e3, 1e-3), (99, 1e5, None)])
def test_a_tanh_that_is_right_absolutely_only(dtype, len_kv, softcap, scale):
    case = Case(dtype, 75, len_kv, softcap=softcap, scale=scale)
    inputs = make_inputs(case)
    verdicts = []
    for tanh in (numpy.tanh, tanh_right_absolutely):
        out, lse = kernel(*inputs, **case.scores, factor=rounded_to(dtype), tanh=tanh)
        verdicts.append(judge(case, out.astype(dtype), lse))
    assert verdicts[0].ok and not verdicts[1].ok, [verdict.message for verdict in verdicts]


def test_split_unit_is_that_of_three_products():
    rng = numpy.random.default_rng(0)
    bits = rng.integers(1 << 23, 1 << 24, (2, 100_000))

    def tf32(x):
        return (x.astype("f4").view("u4") + 0x1000 & 0xFFFFE000).view("f4").astype(float)

    a, b = bits * 2.0**-23
    (a_high, b_high), (a_low, b_low) = (tf32(a), tf32(b)), (tf32(a - tf32(a)), tf32(b - tf32(b)))
    error = abs(a_high * b_high + a_high * b_low + a_low * b_high - a * b) / (a * b)
    assert SPLIT_TF32 / 4 < error.max() <= SPLIT_TF32


@pytest.mark.parametrize("case", quick_cases()[-3:], ids=str)
def test_empty_results_are_accepted(case):
    verdict = judge(case, *right(case))
    assert verdict.ok and verdict.error == 0


def test_lse_may_be_absent():
    case = VICTIMS[0]
    out, _ = right(case)
    assert judge(case, out, None).ok
    assert "nothing to judge" in judge(case, out, None).message
    assert not judge(case, -out, None).ok


def test_nan_and_infinity_are_right_where_the_oracle_has_them():
    case = Case("float16", 40, 50, causal=True)
    q, k, v = (x.copy() for x in make_inputs(case))
    q[..., 3, 0], k[..., 30, 0], v[..., 45, 0] = numpy.nan, numpy.nan, numpy.inf
    out, lse = blocked(q, k, v, **case.scores)
    assert numpy.isinf(out[..., 35:, 0]).sum() == 0 < numpy.isnan(out).sum()
    assert judge(case, out, lse, (q, k, v)).ok
    assert not judge(case, numpy.nan_to_num(out), lse, (q, k, v)).ok
    assert not judge(case, out, numpy.nan_to_num(lse), (q, k, v)).ok


# Rejected


@victims
def test_shape_and_dtype(case):
    out, lse = right(case)
    for wrong in ((out[..., :-1], lse), (out, lse[..., :-1]), (out.astype("int8"), lse), (out, lse.astype("float16"))):
        verdict = judge(case, *wrong)
        assert not verdict.ok and "expected" in verdict.message


@victims
@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf, -numpy.inf])
def test_one_nan_or_infinity(case, bad):
    out, lse = right(case)
    out[..., 0, 7, 5] = bad
    verdict = judge(case, out, lse)
    assert not verdict.ok and verdict.error == math.inf
    assert "out of place, FAILS in row (0, 0, 7)" in verdict.message
    out, lse = right(case)
    lse[..., 0, 3] = bad
    verdict = judge(case, out, lse)
    assert not verdict.ok and verdict.lse_error == math.inf


def test_infinity_of_the_wrong_sign():
    case = Case("float32", 10, 5, causal=True)  # the first five rows see nothing
    out, lse = right(case)
    assert judge(case, out, lse).ok
    lse[..., 0] = numpy.inf
    assert not judge(case, out, lse).ok


def test_a_row_that_sees_nothing_must_be_exactly_zero():
    case = Case("float16", 10, 5, causal=True)
    out, lse = right(case)
    out[..., 0, 0] = 6e-8
    assert not judge(case, out, lse).ok


@victims
def test_two_rows_swapped(case):
    out, lse = right(case)
    out[..., -1, [80, 81], :] = out[..., -1, [81, 80], :]
    assert not judge(case, out, lse).ok


@victims
@pytest.mark.parametrize("off", [-1, 1])
def test_a_diagonal_off_by_one(case, off):
    last_key = case.len_kv - case.len_q
    case = Case(case.dtype, case.len_q, case.len_kv, causal=True, precision=case.precision)
    assert not judge(case, *right(case, last_key=last_key + off)).ok


@victims
def test_a_dropped_tile_of_keys(case):
    q, k, v = make_inputs(case)
    out, lse = blocked(q, k[..., :-64, :], v[..., :-64, :], **case.scores)
    assert not judge(case, out, None).ok
    assert not judge(case, right(case)[0], lse).ok


def test_a_tile_dropped_for_the_last_row_of_a_long_causal_problem():
    case = Case("bfloat16", 1500, 1500, causal=True)
    q, k, v = make_inputs(case)
    out, lse = right(case)
    short, _ = blocked(q[..., -1:, :], k[..., :-32, :], v[..., :-32, :], scale=case.scores["scale"])
    out[..., -1:, :] = short
    verdict = judge(case, out, lse)
    assert not verdict.ok and "row (0, 0, 1499)" in verdict.message


@pytest.mark.parametrize(
    ("case", "slip"), [(case, 0.05 if case.precision == "tf32" else 1e-3) for case in VICTIMS], ids=str
)
def test_lse_off_by_a_little(case, slip):
    out, lse = right(case)
    lse[..., 0, 11] += slip
    verdict = judge(case, out, lse)
    assert not verdict.ok and verdict.error <= verdict.allowed
    assert verdict.lse_allowed < slip / 2


@victims
def test_lse_in_base_two(case):
    out, lse = right(case)
    assert not judge(case, out, (lse / math.log(2)).astype(lse.dtype)).ok


@pytest.mark.parametrize("case", VICTIMS[:2], ids=str)
@pytest.mark.parametrize("float8", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_probabilities_in_eight_bits(case, float8):
    q, k, v = make_inputs(case)
    good, lse = kernel(q, k, v, **case.scores, factor=rounded_to(q.dtype))
    bad, _ = kernel(q, k, v, **case.scores, factor=lambda x: rounded_to(float8 if x.shape[-1] == 32 else q.dtype)(x))
    assert judge(case, good.astype(q.dtype), lse).ok
    assert not judge(case, bad.astype(q.dtype), lse).ok


def test_tf32_where_float32_was_asked_for():
    case = VICTIMS[2]
    out, lse = naive(*make_inputs(case), precision="tf32", **case.scores)
    assert judge(VICTIMS[3], *naive(*make_inputs(VICTIMS[3]), precision="tf32", **VICTIMS[3].scores)).ok
    assert not judge(case, out, right(case)[1]).ok
    assert not judge(case, right(case)[0], lse).ok


@victims
@pytest.mark.parametrize("change", [{"scale": 0.13}, {"softcap": 20.0}, {"first_key": 3}])
def test_another_question(case, change):
    assert not judge(case, *right(case, **change)).ok


@with_sinks
def test_sinks_left_out(case):
    out, lse = by_kernel(case, case.arrays()["sinks"])
    assert judge(case, out, lse).ok
    without, without_lse = by_kernel(case, None)
    assert not judge(case, without, None).ok
    assert not judge(case, out, without_lse).ok


@with_sinks
def test_sinks_counted_twice(case):
    sinks = case.arrays()["sinks"]
    twice, twice_lse = by_kernel(case, numpy.concatenate([numpy.atleast_2d(sinks)] * 2))
    out, _ = by_kernel(case, sinks)
    assert not judge(case, twice, None).ok and not judge(case, out, twice_lse).ok


@with_sinks
def test_sinks_of_another_head(case):
    sinks = case.arrays()["sinks"]
    wrong, wrong_lse = by_kernel(case, numpy.roll(sinks, 1, axis=-1))
    assert not judge(case, wrong, None).ok and not judge(case, by_kernel(case, sinks)[0], wrong_lse).ok


@with_sinks
def test_sinks_in_base_two_or_scaled(case):
    sinks = case.arrays()["sinks"]
    for factor in (math.log(2), case.scores["scale"]):
        assert not judge(case, *by_kernel(case, sinks * numpy.array(factor, sinks.dtype))).ok


@pytest.mark.parametrize("case", WITH_SINKS[1::2], ids=str)
def test_one_of_several_sinks_left_out(case):
    sinks = case.arrays()["sinks"].copy()
    sinks[numpy.where(numpy.isfinite(sinks[0]), 0, 1), numpy.arange(case.heads_q)] = -numpy.inf
    assert not judge(case, *by_kernel(case, sinks)).ok


def test_every_dtype_has_its_arithmetic():
    for name, arithmetic in ARITHMETIC.items():
        if name != "tf32":
            dtype = numpy.dtype(name)
            assert arithmetic.output == float(ml_dtypes.finfo(dtype).eps) / 2
