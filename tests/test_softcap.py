"""Scale and softcap over the whole range of float32: what problems hold, what kernels are told, and how right results are."""

import math

import numpy
import pytest
from thinned import quick, thinned

from cupy_flash import attention, attention_backward, plan_attention, plan_attention_backward
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.oracle import naive, oracle
from cupy_flash.judge.oracle_gradients import naive_gradients, oracle_gradients
from cupy_flash.plan.explicit_scores import LARGEST_SCALE
from cupy_flash.plan.softcap import NONE, cap_polynomial, softcap_of_kernel

MAX, SMALLEST = (float(x) for x in (numpy.finfo("f4").max, numpy.finfo("f4").smallest_normal))
LEN_Q, LEN_KV, DIM = 70, 90, 64
KINDS = [("75", "float32"), ("80", "float32"), ("80", "float16"), ("90a", "float16")]
EVERYWHERE = [("numpy", "float32"), *KINDS]
kinds = pytest.mark.parametrize(("arch", "dtype"), quick(KINDS, *KINDS[1:], spread=True))


def inputs(dtype, size=1.0):
    rng = numpy.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 2, n, DIM)) for n in (LEN_Q, LEN_KV, LEN_KV, LEN_Q))
    return [x.astype(dtype) for x in (q * size, k * size, v, dout)]


def scores_of(options):
    """The scale and the softcap that `options` stand for, and the band of a causal mask."""
    given = {name: float(numpy.float32(number)) for name, number in options.items()}
    return {"scale": 1 / math.sqrt(DIM), "softcap": None, "first_key": None, "last_key": LEN_KV - LEN_Q, **given}


def forward(arch, q, k, v, **options):
    if arch == "numpy":
        return attention(q, k, v, causal=True, return_lse=True, **options)
    options |= {"kernel": "fwd_hopper" if arch == "90a" else None}  # so few queries and keys would be for fwd_v2 everywhere
    return plan_attention(q, k, v, causal=True, return_lse=True, arch=arch, backend="host", **options)(q, k, v)


def backward(arch, *arrays, **options):
    if arch == "numpy":
        return attention_backward(*arrays, causal=True, **options)
    return plan_attention_backward(*arrays, causal=True, arch=arch, backend="host", **options)(*arrays)


def largest(result, truth):
    assert (numpy.isfinite(result) == numpy.isfinite(truth)).all()
    return numpy.nanmax(abs(numpy.where(numpy.isfinite(truth), result.astype("f8") - truth, 0)))


# What a problem makes of them


def problem_of(dtype="float32", **options):
    return plan_attention(*inputs(dtype)[:3], **options).problem


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_problem_holds_what_a_kernel_is_told(dtype):
    assert problem_of(dtype, scale=0.1, softcap=0.3).scale == float(numpy.float32(0.1))
    assert problem_of(dtype, scale=0.1, softcap=0.3).softcap == float(numpy.float32(0.3))
    assert problem_of(dtype, scale=1e-46).scale == 0
    assert problem_of("float64", scale=1e-46, softcap=1e-50).scale == 1e-46
    assert problem_of("float64", scale=1e99, softcap=1e-50).softcap == 1e-50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 1e-50}, "softcap: expected a number whose float32 is above 0, got 1e-50"),
        ({"softcap": 1e39}, "softcap: expected a number whose float32 is finite, got 1e+39"),
        ({"scale": 1e39}, "scale: expected a number whose float32 is finite, got 1e+39"),
        ({"scale": -1e39}, "scale: expected a number whose float32 is finite, got -1e+39"),
        ({"scale": 10**400}, "scale: expected a finite number that a float holds, got 1000"),
        ({"softcap": 10**5000}, "softcap: expected a finite number that a float holds, got a value of type int"),
        ({"softcap": -1e-50}, "softcap: expected None or a number above 0, got -1e-50"),
    ],
)
def test_what_float32_does_not_hold_is_refused(options, message):
    with pytest.raises(ValueError) as caught:
        problem_of(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("scale", [0.125, -3e38, 1e-45, 1e-10, 2.0**-11 * 0.9, 0.0])
@pytest.mark.parametrize("softcap", [1e-45, 1e-38, 50.0, 1e30, 3e38, MAX])
def test_what_kernels_compute_from_them_is_finite(scale, softcap):
    scale, log2e = numpy.float32(scale), numpy.float32(math.log2(math.e))
    told = numpy.float32(softcap_of_kernel(float(scale), float(numpy.float32(softcap))))
    with numpy.errstate(over="ignore", under="ignore"):
        quotient = scale / told
    assert told >= SMALLEST and numpy.isfinite(told * log2e) and numpy.isfinite(numpy.float32(math.log(2)) / told)
    if numpy.isfinite(quotient):  # a score that is not bent is scaled right, to a few roundings
        assert float(quotient) * float(told) == pytest.approx(float(scale), rel=2.0**-22, abs=0)
    if softcap == 50 and scale > 1e-30:
        assert told == 50


def fma(a, b, c):
    """Rounded once, to float32: a product of two of these is exact in float64, and the sum errs by 2^-53."""
    return (a.astype("f8") * b.astype("f8") + numpy.float64(numpy.float32(c))).astype("f4")


@pytest.mark.parametrize(
    ("scale", "softcap"),
    [(0.125, 50.0), (-0.0884, 30.0), (0.0625, 2000.0), (1.0, 1e6), (0.125, 1e11), (1e-30, 5.0), (0.25, 1e-6), (2.0, 0.5)],
)
def test_the_polynomial_near_0_is_right_relatively(scale, softcap):
    minus_square, factors = (numpy.array(x, "f4") for x in cap_polynomial(scale, softcap))
    product = (numpy.linspace(-1, 1, 100_001) * math.sqrt(-minus_square)).astype("f4")
    square = fma(product, product, minus_square)
    product, square = product[square < 0], square[square < 0]
    assert len(product) >= 99_998  # all but the ends, and 0 if its square is that
    factor = numpy.full_like(product, factors[0])
    for x in factors[1:]:
        factor = fma(factor, square, x)
    found = product.astype("f8") * factor
    truth = softcap * numpy.tanh(scale * product.astype("f8") / softcap) / math.log(2)
    assert abs(found - truth).max() > 0 and (abs(found - truth) <= 2.0**-20.3 * abs(truth)).all()


def test_what_float32_does_not_hold_is_near_nowhere():
    assert cap_polynomial(0.0, 5.0) == cap_polynomial(1e-30, 1e38) == cap_polynomial(1.0, 1e-30) == NONE


def test_a_usual_softcap_is_near_within_itself():
    minus_square, factors = cap_polynomial(0.125, 50.0)
    assert minus_square == -((50 / 0.125) ** 2) and all(factors)


def test_scores_are_scaled_one_by_one_where_the_scale_is_large():
    scales = LARGEST_SCALE, LARGEST_SCALE + 1
    kernels = [plan_attention(*inputs("float16")[:3], scale=scale, backend="host").kernel for scale in scales]
    assert [kernel.config.EXPLICIT_SCORES for kernel in kernels] == [False, True]
    assert any(f"scale > {LARGEST_SCALE}" in reason for reason in kernels[1].reasons)


# How right results are


@kinds
@pytest.mark.parametrize("softcap", thinned([1e-3, 0.1, 50.0, 1e3, 1e5, 1e8, 1e20, 1e30], keep=8))
def test_softcap_is_right_relatively(arch, dtype, softcap):
    q, k, v, dout = inputs(dtype)
    for options in ({"softcap": softcap}, {"softcap": softcap, "scale": 1e-3}):
        scores = scores_of(options)
        out, lse = forward(arch, q, k, v, **options)
        (truth, _), (plain, _) = oracle(q, k, v, **scores), naive(q, k, v, **scores)
        assert largest(out, truth) <= 2 * largest(plain, truth)
        verdict = compare(out, lse, q, k, v, **scores)
        assert verdict.ok, verdict.message
        verdict = compare_gradients(backward(arch, dout, q, k, v, out, lse, **options), dout, q, k, v, **scores)
        assert verdict.ok, verdict.message


EDGES = [
    {"softcap": 1e-45},
    {"softcap": 1e-38},
    {"softcap": 3e38},
    {"softcap": MAX},
    {"scale": 1e-46},
    {"scale": 1e-45},
    {"scale": 1e-40},
    {"scale": 1e-45, "softcap": MAX},
    {"scale": 1e-10, "softcap": 1e38},
    {"scale": -1.0, "softcap": 1e-45},
    {"scale": 1e-40, "softcap": 1e-40},
    {"scale": 1e38, "softcap": 1e-3},
    {"scale": MAX, "softcap": 50.0},
]


@pytest.mark.parametrize("schedule", thinned(["eager", "deferred"]))
@pytest.mark.parametrize(("arch", "dtype"), quick(EVERYWHERE, EVERYWHERE[0], EVERYWHERE[4], spread=True))
def test_edges_of_float32_are_right(arch, dtype, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    q, k, v, dout = inputs(dtype)
    for options in EDGES:
        scores = scores_of(options)
        out, lse = forward(arch, q, k, v, **options)
        verdict = compare(out, lse, q, k, v, **scores)
        assert verdict.ok, (options, verdict.message)
        verdict = compare_gradients(backward(arch, dout, q, k, v, out, lse, **options), dout, q, k, v, **scores)
        assert verdict.ok, (options, verdict.message)


@pytest.mark.parametrize(("arch", "dtype"), quick(EVERYWHERE, *EVERYWHERE[::2], spread=True))
@pytest.mark.parametrize("scale", quick([1e10, 1e38, MAX, -MAX], 1e38, -MAX))
def test_a_score_of_any_size_is_not_lost(arch, dtype, scale):
    """A row that picks one key: its scores are so far apart that nothing else is left, and the value of that key is the result."""
    q, k, v, dout = inputs(dtype, size=0.05)
    scores = scores_of({"scale": scale})
    out, lse = forward(arch, q, k, v, scale=scale)
    truth, true_lse = oracle(q, k, v, **scores)
    assert abs(out - truth).max() <= 1e-5 and (abs(lse / true_lse - 1) < 1e-5).all()
    truth, plain = (gradients(dout, q, k, v, **scores).dv for gradients in (oracle_gradients, naive_gradients))
    assert largest(backward(arch, dout, q, k, v, out, lse, scale=scale).dv, truth) <= 2 * largest(plain, truth) + 1e-5


def test_numpy_scales_scores_and_not_queries():
    """A query times the scale is beyond float32, a score is not."""
    q, k, v, dout = inputs("float32")
    q, k, scale = q * numpy.float32(1e3), k * numpy.float32(3e-38), 1e36
    scores = scores_of({"scale": scale})
    out, lse = forward("numpy", q, k, v, scale=scale)
    assert compare(out, lse, q, k, v, **scores).ok
    truth, plain = (gradients(dout, q, k, v, **scores).dq for gradients in (oracle_gradients, naive_gradients))
    assert largest(backward("numpy", dout, q, k, v, out, lse, scale=scale).dq, truth) <= 3 * largest(plain, truth)


# Scores within the softcap, and beyond


def counted(q, k, v, **options):
    plan = plan_attention(q, k, v, arch="90a", backend="host", kernel="fwd_hopper", return_lse=True, **options)
    assert plan.kernel.config.SOFTCAP and plan.kernel.config.EXPLICIT_SCORES
    (out, lse), traffic = plan.counted(q, k, v)
    return out, lse, traffic.flops


@pytest.mark.parametrize("schedule", thinned(["eager", "deferred"]))
@pytest.mark.parametrize("kind", quick([(64, "float16"), (128, "bfloat16"), (256, "float16")], (64, "float16")))
def test_a_tile_with_scores_beyond_the_softcap_is_computed_again(kind, schedule, monkeypatch):
    """Once: behind it all are computed as those are, until a tile has none."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    rng, (dim, dtype) = numpy.random.default_rng(1), kind
    q, k, v = (rng.standard_normal((1, 1, n, dim)).astype("f4") for n in (150, 1100, 1100))
    dtype = numpy.dtype(dtype) if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16
    q[..., 0] = 4
    q, v = q.astype(dtype), v.astype(dtype)
    scores = {"scale": 1 / math.sqrt(dim), "softcap": 8.0, "first_key": None, "last_key": None}
    flops = {}
    for beyond in ((), (700,), (700, 701), (500, 900)):
        larger = k.copy()
        larger[..., 0] = 0
        larger[..., list(beyond), 0] = 60 * math.sqrt(dim) / 4  # the same score of 60 in all rows: too small a P tells nothing
        keys = larger.astype(dtype)
        out, lse, flops[beyond] = counted(q, keys, v, softcap=8.0)
        verdict = compare(out, lse, q, keys, v, **scores)
        assert verdict.ok, verdict.message
    again = flops[700,] - flops[()]
    assert again > 0 and flops[700, 701] == flops[700,] and flops[500, 900] == flops[()] + 2 * again


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.release)])
def test_scores_of_another_sequence_do_not_decide_which_way_a_softcap_is_computed(dim):
    rng = numpy.random.default_rng(2)
    ends = numpy.array([0, 130, 730, 800])
    q, k, v = (rng.standard_normal((2, 800, dim)).astype("f2") for _ in range(3))
    found = []
    for size in (1, 60):
        others = [x.copy() for x in (q, k)]
        for x in others:
            x[:, :130] *= size
            x[:, 730:] *= size
        offsets = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        plan = plan_attention(*others, v, softcap=20.0, arch="90a", backend="host", kernel="fwd_hopper", return_lse=True, **offsets)
        assert plan.kernel.config.VARLEN
        found.append([x[:, 130:730] for x in plan(*others, v, **offsets)])
    for x, y in zip(*found):
        numpy.testing.assert_array_equal(x, y)


HIDDEN = [("80", 64), ("90a", 64), ("90a", 128), ("90a", 256)]


@pytest.mark.parametrize(("arch", "dim"), quick(HIDDEN, *HIDDEN[:2], spread=True))
def test_what_is_hidden_does_not_decide_how_a_softcap_is_computed(arch, dim):
    """Rows whose window does not reach a key, in tiles with it: its scores are beyond the softcap, or within."""
    rng = numpy.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((1, 1, 150, dim)).astype("f2") for _ in range(4))
    q *= 10  # so that a softcap computed in the other way has another log-sum-exp
    options = {"arch": arch, "backend": "host", "softcap": 60.0, "window": (10, 10)}
    found = []
    for size in (1, 60):
        keys = k.copy()
        keys[:, :, 100] *= size
        plan = plan_attention(q, keys, v, return_lse=True, kernel="fwd_hopper" if arch == "90a" else None, **options)
        out, lse = plan(q, keys, v)
        plan = plan_attention_backward(dout, q, keys, v, out, lse, deterministic=True, **options)
        dq, dk, dv = plan(dout, q, keys, v, out, lse)
        assert plan.kernel.file == {"80": "bwd_v2"}.get(arch, "bwd_hopper_wide" if dim > 128 else "bwd_hopper")
        rows, seen = abs(numpy.arange(150) - 100) > 10, abs(numpy.arange(150) - 100) > 20
        found.append([*(x[:, :, rows] for x in (out, lse, dq)), *(x[:, :, seen] for x in (dk, dv))])
    for x, y in zip(*found):
        numpy.testing.assert_array_equal(x, y)
