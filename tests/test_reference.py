"""The references against a triple loop, against each other, and against what attention must satisfy."""

import itertools
import math
import subprocess
import sys
import tracemalloc
import types

import numpy
import pytest
from banded import blocked
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import thinned

from cupy_flash.judge.cases import Case, full_cases, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.oracle import naive, namespace, oracle, sees
from cupy_flash.machine.numpy_path import forward as numpy_forward
from cupy_flash.machine.numpy_path.merge import merged
from cupy_flash.problem.mask import Mask

pytestmark = pytest.mark.filterwarnings("error")

ON_CPU = [case for case in full_cases() if not case.heavy and not case.of_pairs]
BANDS = [(None, None), (None, 2), (None, -3), (-2, 1), (0, 0), (4, None), (-100, 100), (50, 60), (2, 1)]


def normal(*shape, seed=0, dtype="float64"):
    return numpy.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def brute_force(q, k, v, scale, first_key, last_key, softcap):
    """One number at a time, from the definition."""
    batch = numpy.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (numpy.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    out = numpy.zeros((*q.shape[:-1], v.shape[-1]))
    lse = numpy.full(q.shape[:-1], -math.inf)
    for at in numpy.ndindex(q.shape[:-1]):
        *element, head, i = at
        source = (*element, head // (q.shape[-3] // k.shape[-3]))
        weights = {}
        for j, key in enumerate(k[source]):
            if (first_key is None or i + first_key <= j) and (last_key is None or j <= i + last_key):
                s = scale * sum(a * b for a, b in zip(q[at], key, strict=True))
                weights[j] = math.exp(s if softcap is None else softcap * math.tanh(s / softcap))
        if weights:
            total = sum(weights.values())
            lse[at] = math.log(total)
            out[at] = sum(w / total * v[source][j] for j, w in weights.items())
    return out, lse


# The definition


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(
    ("batches", "heads", "softcap"), [(((), (), ()), (2, 2), None), (((2, 1), (3,), (1, 1)), (6, 2), 0.7)]
)
def test_oracle_is_the_definition(band, batches, heads, softcap):
    q = normal(*batches[0], heads[0], 5, 4)
    k = normal(*batches[1], heads[1], 7, 4)
    v = normal(*batches[2], heads[1], 7, 3)
    expected = brute_force(q, k, v, 0.6, *band, softcap)
    got = oracle(q, k, v, scale=0.6, first_key=band[0], last_key=band[1], softcap=softcap)
    numpy.testing.assert_allclose(got[0], expected[0], atol=1e-13)
    numpy.testing.assert_allclose(got[1], expected[1], atol=1e-13)


@pytest.mark.parametrize("case", thinned(ON_CPU, keep=3), ids=str)
def test_blocked_is_within_the_bound(case):
    q, k, v = make_inputs(case)
    scores = case.scores | case.arrays()
    out, lse = blocked(q, k, v, **scores, block_q=48, block_kv=40)
    verdict = compare(out, lse, q, k, v, precision=case.precision, **scores)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("band", BANDS)
def test_default_blocks_give_the_same(band):
    q, k, v = normal(1, 600, 4), normal(1, 1100, 4), normal(1, 1100, 4)
    scores = {"scale": 0.5, "first_key": band[0], "last_key": band[1]}
    for got, expected in zip(blocked(q, k, v, **scores), oracle(q, k, v, **scores), strict=True):
        numpy.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("attention", [oracle, naive, blocked])
@pytest.mark.parametrize(("len_q", "len_kv", "last_key"), [(3, 0, None), (3, 5, -9), (0, 5, None), (0, 0, None)])
def test_a_row_that_sees_nothing(attention, len_q, len_kv, last_key):
    out, lse = attention(normal(2, len_q, 4), normal(2, len_kv, 4), normal(2, len_kv, 6), scale=1.0, last_key=last_key)
    assert numpy.array_equal(out, numpy.zeros((2, len_q, 6)))
    assert numpy.array_equal(lse, numpy.full((2, len_q), -numpy.inf))


@pytest.mark.parametrize("attention", [oracle, naive, blocked])
@pytest.mark.parametrize(("batch", "heads"), [((0,), (2, 2)), ((2, 0), (2, 2)), ((3,), (0, 0)), ((3,), (0, 2))])
def test_empty_batch_and_heads(attention, batch, heads):
    q, k = normal(*batch, heads[0], 3, 4), normal(*batch, heads[1], 5, 4)
    out, lse = attention(q, k, k, scale=1.0)
    assert (out.shape, lse.shape) == ((*batch, heads[0], 3, 4), (*batch, heads[0], 3))


# Precision of the baseline


def test_tf32_rounds_every_factor_to_ten_bits_nearest():
    given = numpy.array([1 + 2**-12, 1 + 2**-11, 1 + 2**-10, -1 - 2**-11, 0, numpy.inf], dtype="float32")
    rounded = numpy.array([1, 1 + 2**-10, 1 + 2**-10, -1 - 2**-10, 0, numpy.inf], dtype="float32")
    one = numpy.ones((1, 1, 1), dtype="float32")
    out, _ = naive(one, one, given.reshape(1, 1, 6), scale=1.0, precision="tf32")
    assert numpy.array_equal(out[0, 0], rounded)
    for q, k in ((given[:5], one), (one, given[:5])):
        _, lse = naive(q.reshape(1, -1, 1), k.reshape(1, -1, 1)[:, :1], one, scale=1.0, precision="tf32")
        assert numpy.array_equal(lse[0], rounded[: lse.size])
    # P = 1/3 loses two bits of what float32 keeps of it
    three = numpy.ones((1, 3, 1), dtype="float32")
    assert naive(one, three, three, scale=1.0, precision="tf32")[0] == 1 - 2**-12
    assert naive(one, three, three, scale=1.0)[0] == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_naive_rounds_p_to_the_dtype_of_the_inputs(dtype):
    rounded = numpy.dtype(dtype).type
    v = (numpy.arange(7) < 5).astype(dtype).reshape(1, 7, 1)
    out, lse = naive(v[:, :1], numpy.ones_like(v), v, scale=1.0)
    assert out.dtype == dtype and lse.dtype == "float32"
    assert out == rounded(5 * float(rounded(1 / 7))) != rounded(5 / 7)


def test_half_precision_products_are_exact_and_sums_are_float32():
    q = numpy.array([[[2048.0, 1.0]]], dtype="float16")
    k = numpy.array([[[2048.0, 1.0]]], dtype="float16")
    for attention in (naive, blocked):
        assert attention(q, k, k, scale=1.0)[1] == 2048**2 + 1  # float16 holds neither


# What attention satisfies

sizes = st.integers(1, 40)
bands = st.tuples(st.none() | st.integers(-25, 10), st.none() | st.integers(-10, 25))
few = settings(max_examples=30, deadline=None)


@st.composite
def problems(draw, dtype="float64"):
    """Inputs, the options of `oracle`, and block sizes."""
    group, heads_kv = draw(st.sampled_from([(1, 1), (3, 1), (1, 2), (7, 2)]))
    len_q, len_kv, dim, dim_v = draw(sizes), draw(sizes), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    q = normal(2, group * heads_kv, len_q, dim, seed=1, dtype=dtype)
    k = normal(2, heads_kv, len_kv, dim, seed=2, dtype=dtype)
    v = normal(2, heads_kv, len_kv, dim_v, seed=3, dtype=dtype)
    first_key, last_key = draw(bands)
    softcap = draw(st.none() | st.just(1.5))
    scores = {
        "scale": draw(st.sampled_from([0.4, -0.7])),
        "first_key": first_key,
        "last_key": last_key,
        "softcap": softcap,
    }
    return (q, k, v), scores, {"block_q": draw(st.integers(1, 50)), "block_kv": draw(st.integers(1, 50))}


@few
@given(problems())
def test_blocks_of_any_size_give_the_oracle(problem):
    qkv, scores, blocks = problem
    for got, expected in zip(blocked(*qkv, **scores, **blocks), oracle(*qkv, **scores), strict=True):
        numpy.testing.assert_allclose(got, expected, atol=1e-12)


@few
@given(problems(), st.data())
def test_split_anywhere_and_merge(problem, data):
    (q, k, v), scores, blocks = problem
    cut = data.draw(st.integers(0, k.shape[-2]))
    later = {bound: None if scores[bound] is None else scores[bound] - cut for bound in ("first_key", "last_key")}
    a, lse_a = blocked(q, k[..., :cut, :], v[..., :cut, :], **scores, **blocks)
    b, lse_b = blocked(q, k[..., cut:, :], v[..., cut:, :], **(scores | later), **blocks)
    whole, lse = blocked(q, k, v, **scores, **blocks)
    for got, expected in zip(merged(a, lse_a, b, lse_b), (whole, lse), strict=True):
        numpy.testing.assert_allclose(got, expected, atol=1e-12)


def test_merged_has_the_dtype_of_its_parts_and_is_rounded_once():
    shape = (2, 5, 4)
    a, b = normal(*shape, seed=1, dtype="float16"), normal(*shape, seed=2, dtype="float16")
    lse_a, lse_b = normal(*shape[:-1], seed=3, dtype="float32"), normal(*shape[:-1], seed=4, dtype="float32")
    out, lse = merged(a, lse_a, b, lse_b)
    exact, exact_lse = merged(*(x.astype("float64") for x in (a, lse_a, b, lse_b)))
    assert (out.dtype, lse.dtype, exact.dtype) == ("float16", "float32", "float64")
    numpy.testing.assert_allclose(exact_lse, numpy.logaddexp(lse_a.astype("float64"), lse_b), rtol=1e-15)
    near = numpy.nextafter(exact.astype("float16"), numpy.sign(exact - exact.astype("float16")).astype("float16") * numpy.inf)
    assert ((out == exact.astype("float16")) | (out == near)).all()  # the nearest, or where float32 cannot tell, the next
    numpy.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-6)
    for got, expected in zip(merged(b, lse_b, a, lse_a), (out, lse), strict=True):
        assert numpy.array_equal(got, expected)


@pytest.mark.parametrize("nothing", [numpy.nan, numpy.inf, 7.0])
def test_merged_leaves_out_what_has_no_weight(nothing):
    a, lse_a = normal(3, 4), numpy.array([0.5, 1e3, -numpy.inf])
    b, lse_b = numpy.full((3, 4), nothing), numpy.full(3, -numpy.inf)
    for out, lse in (merged(a, lse_a, b, lse_b), merged(b, lse_b, a, lse_a)):
        assert numpy.array_equal(out, [*a[:2], numpy.zeros(4)]) and numpy.array_equal(lse, lse_a)
    out, lse = merged(a, lse_a, b, lse_a - 1e4)  # weights of exp(-10,000), which is 0 too
    assert numpy.array_equal(out[:2], a[:2]) and numpy.array_equal(lse[:2], lse_a[:2])


def test_merged_of_scores_that_exp_cannot_hold():
    out, lse = merged(numpy.zeros((2, 1)), numpy.array([1000.0, -1000]), numpy.ones((2, 1)), numpy.array([1000.0, -1000]))
    assert numpy.array_equal(out, [[0.5], [0.5]])
    numpy.testing.assert_allclose(lse, [1000 + math.log(2), -1000 + math.log(2)], rtol=1e-15)


@few
@given(problems())
def test_one_vector_added_to_every_key_moves_only_the_lse(problem):
    (q, k, v), scores, blocks = problem
    scores["softcap"] = None
    shift = normal(k.shape[-1], seed=4)
    out, lse = blocked(q, k, v, **scores, **blocks)
    moved, moved_lse = blocked(q, k + shift, v, **scores, **blocks)
    numpy.testing.assert_allclose(moved, out, atol=1e-12)
    numpy.testing.assert_allclose(moved_lse, lse + scores["scale"] * (q @ shift), atol=1e-12)


@few
@given(problems())
def test_values_of_one_give_ones(problem):
    (q, k, v), scores, blocks = problem
    out, lse = blocked(q, k, numpy.ones_like(v), **scores, **blocks)
    numpy.testing.assert_allclose(out, numpy.broadcast_to(numpy.isfinite(lse)[..., None], out.shape), atol=1e-13)


@few
@given(problems(), st.randoms())
def test_order_of_keys_does_not_matter(problem, random):
    (q, k, v), scores, blocks = problem
    scores |= {"first_key": None, "last_key": None}
    order = random.sample(range(k.shape[-2]), k.shape[-2])
    permuted = blocked(q, k[..., order, :], v[..., order, :], **scores, **blocks)
    for got, expected in zip(permuted, blocked(q, k, v, **scores, **blocks), strict=True):
        numpy.testing.assert_allclose(got, expected, atol=1e-12)


@few
@given(problems())
def test_a_band_is_each_row_with_the_keys_it_sees(problem):
    (q, k, v), scores, blocks = problem
    out, lse = blocked(q, k, v, **scores, **blocks)
    seen = sees(q.shape[-2], k.shape[-2], scores["first_key"], scores["last_key"])
    unmasked = scores | {"first_key": None, "last_key": None}
    for i in range(0, q.shape[-2], 3):
        row, row_lse = blocked(q[..., i : i + 1, :], k[..., seen[i], :], v[..., seen[i], :], **unmasked)
        numpy.testing.assert_allclose(out[..., i : i + 1, :], row, atol=1e-12)
        numpy.testing.assert_allclose(lse[..., i : i + 1], row_lse, atol=1e-12)


@pytest.mark.parametrize("anchor", ["bottom_right", "top_left"])
@pytest.mark.parametrize("lengths", [(30, 50), (50, 30)])
def test_causal_is_an_explicit_window(anchor, lengths):
    causal = Case("float32", *lengths, causal=anchor)
    band = {"first_key": None, "last_key": 0 if anchor == "top_left" else lengths[1] - lengths[0]}
    q, k, v = make_inputs(causal)
    for got, expected in zip(blocked(q, k, v, **causal.scores), blocked(q, k, v, scale=64**-0.5, **band), strict=True):
        assert numpy.array_equal(got, expected)


@few
@given(problems(dtype="float32"))
def test_batch_of_one_is_the_element_of_a_batch(problem):
    qkv, scores, blocks = problem
    out, lse = blocked(*qkv, **scores, **blocks)
    one, one_lse = blocked(*(x[1:] for x in qkv), **scores, **blocks)
    assert numpy.array_equal(one, out[1:]) and numpy.array_equal(one_lse, lse[1:])


# NaN and infinity


@few
@given(problems(), st.data())
def test_what_a_row_may_not_see_does_not_reach_it(problem, data):
    (q, k, v), scores, blocks = problem
    key = data.draw(st.integers(0, k.shape[-2] - 1))
    poison = data.draw(st.sampled_from([numpy.nan, numpy.inf]))
    where = data.draw(st.sampled_from(["k", "v"]))
    seen = sees(q.shape[-2], k.shape[-2], scores["first_key"], scores["last_key"])[:, key]
    bad = {"k": k.copy(), "v": v.copy()}
    bad[where][..., key, 0] = poison
    for attention in (oracle, naive, lambda *x, **options: blocked(*x, **options, **blocks)):
        clean, clean_lse = attention(q, k, v, **scores)
        out, lse = attention(q, bad["k"], bad["v"], **scores)
        assert numpy.array_equal(out[..., ~seen, :], clean[..., ~seen, :])
        assert numpy.array_equal(lse[..., ~seen], clean_lse[..., ~seen])
        if where == "v":
            assert numpy.array_equal(lse, clean_lse)
            assert not numpy.isfinite(out[..., seen, 0]).any()
            assert numpy.isfinite(out[..., 1:]).all()
        elif numpy.isnan(poison):
            assert numpy.isnan(out[..., seen, :]).all() and numpy.isnan(lse[..., seen]).all()


def test_a_bad_value_in_one_batch_element_stays_there():
    q, v = normal(2, 1, 4, 3), normal(2, 1, 5, 3)
    clean, _ = oracle(q, v, v, scale=1.0)
    bad = v.copy()
    bad[1, 0, 2] = numpy.nan
    out, _ = oracle(q, v, bad, scale=1.0)
    numpy.testing.assert_allclose(out[0], clean[0], atol=1e-15)
    assert numpy.isnan(out[1]).all()


# How blocked reads and writes


def test_blocked_writes_in_place_whatever_the_strides():
    q, k, v = (
        normal(2, 3, 50, 8, dtype="float16"),
        normal(2, 3, 70, 8, dtype="float16"),
        normal(2, 3, 70, 5, dtype="float16"),
    )
    out = numpy.full((2, 50, 3, 10), numpy.nan, "float16")[..., ::2].swapaxes(1, 2)
    lse = numpy.full((50, 3, 2), numpy.nan, "float32").T
    result = blocked(q, k, v, scale=0.3, last_key=20, out=out, lse=lse, block_q=16, block_kv=16)
    assert result[0] is out and result[1] is lse
    for got, expected in zip(result, blocked(q, k, v, scale=0.3, last_key=20, block_q=16, block_kv=16), strict=True):
        assert numpy.array_equal(got, expected)
    assert numpy.isnan(out.base[..., 1::2]).all()


def test_blocked_reads_each_key_in_sight_once_and_masks_only_the_edge(monkeypatch):
    len_q, len_kv, block_q = 12, 13, 4
    q, kv = normal(2, len_q, 3), normal(1, len_kv, 3)  # two query heads share the keys
    masked, read = [], []

    class Counting(types.ModuleType):
        def __getattr__(self, name):
            return getattr(numpy, name)

        def ascontiguousarray(self, x, dtype):
            read.append(len(x))
            return numpy.ascontiguousarray(x, dtype)

    right = Mask.visible

    def counting_visible(*args):
        masked.append(right(*args))
        return masked[-1]

    bounds = [None, *range(-8, 9)]
    for band in itertools.product(bounds, bounds):
        scores = {"scale": 0.5, "first_key": band[0], "last_key": band[1]}
        expected, _ = oracle(q, kv, kv, **scores)
        masked.clear(), read.clear()
        with monkeypatch.context() as patch:
            patch.setattr(numpy_forward, "numpy", Counting("numpy"))
            patch.setattr(Mask, "visible", counting_visible)
            out, _ = blocked(q, kv, kv, **scores, block_q=block_q, block_kv=5)
        numpy.testing.assert_allclose(out, expected, atol=1e-13)
        seen = sees(len_q, len_kv, *band)
        in_sight = [rows.any(axis=0).sum() for rows in seen.reshape(-1, block_q, len_kv)]
        if None in band or band[0] <= band[1]:
            assert sum(read) == 2 * sum(in_sight)  # once as keys, once as values
            assert not any(tile.all() for tile in masked)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_blocked_needs_memory_for_a_tile_only(dtype):
    n, dim, batch, block_q, block_kv = 1024, 16, 16, 64, 128
    q, kv = (numpy.broadcast_to(normal(1, n, dim, dtype=dtype)[:, ::-1], (batch, 1, n, dim)) for _ in range(2))
    out, lse = numpy.empty(q.shape, dtype), numpy.empty(q.shape[:-1], "float32")
    tracemalloc.start()
    try:
        blocked(q, kv, kv, scale=0.25, last_key=0, out=out, lse=lse, block_q=block_q, block_kv=block_kv)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * (4 * block_q * block_kv) < out.nbytes


# CuPy


def test_cupy_is_found_by_the_array_and_not_imported_otherwise(monkeypatch):
    program = (
        "import sys, numpy, cupy_flash.judge.oracle as o; o.namespace(numpy.ones(1)); sys.exit('cupy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    cupy = types.ModuleType("cupy")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    array = type("ndarray", (), {"__module__": "cupy._core.core"})()
    assert namespace(array) is cupy
    assert namespace(numpy.ones(1)) is numpy
