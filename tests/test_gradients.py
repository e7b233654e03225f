"""The gradients against finite differences, against each other, and against what gradients of attention must satisfy."""

import tracemalloc

import numpy
import pytest
from banded import blocked, blocked_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_flash.judge.oracle import oracle, sees
from cupy_flash.judge.oracle_gradients import naive_gradients, oracle_gradients
from cupy_flash.problem.backward import Gradients

pytestmark = pytest.mark.filterwarnings("error")


def normal(*shape, seed=0, dtype="float64"):
    return numpy.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def by_blocks(dout, q, k, v, *, dlse=None, block_q=256, block_kv=512, **scores):
    """`blocked_gradients` with the results of `blocked`, called like the others."""
    blocks = {"block_q": block_q, "block_kv": block_kv}
    return blocked_gradients(dout, q, k, v, *blocked(q, k, v, **scores, **blocks), dlse=dlse, **scores, **blocks)


every_way = pytest.mark.parametrize("gradients", [oracle_gradients, naive_gradients, by_blocks])


def all_close(got, expected, atol=1e-12):
    for name, a, b in zip(Gradients._fields, got, expected, strict=True):
        numpy.testing.assert_allclose(a, b, rtol=1e-12, atol=atol, err_msg=name)


# The definition


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": -0.7},
        {"scale": 0.0},
        {"last_key": 2},
        {"last_key": 0},
        {"last_key": -2},
        {"first_key": -1, "last_key": 1},
        {"first_key": 3},
        {"softcap": 0.8},
        {"softcap": 0.8, "scale": -0.7, "first_key": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_dlse", [False, True], ids=["dout", "dout_dlse"])
@pytest.mark.parametrize(("batches", "heads"), [(((), (), ()), (2, 2)), (((2, 1), (3,), (1, 1)), (3, 1))], ids=str)
def test_finite_differences_of_the_oracle(options, with_dlse, batches, heads):
    scores = {"scale": 0.6} | options
    inputs = [
        normal(*batch, n, *rows)
        for batch, n, rows in zip(batches, (heads[0], heads[1], heads[1]), ((4, 3), (6, 3), (6, 2)), strict=True)
    ]
    out, lse = oracle(*inputs, **scores)
    dout, dlse = normal(*out.shape, seed=1), normal(*lse.shape, seed=2) if with_dlse else None
    seen = numpy.isfinite(lse)

    def loss(*qkv):
        out, lse = oracle(*qkv, **scores)
        return (dout * out).sum() + (0 if dlse is None else (dlse * lse)[seen].sum())

    analytic = oracle_gradients(dout, *inputs, dlse=dlse, **scores)
    for i, gradient in enumerate(analytic):
        assert gradient.shape == inputs[i].shape
        for at in list(numpy.ndindex(gradient.shape))[::3]:
            step = numpy.zeros_like(inputs[i])
            step[at] = 1e-5
            above, below = (loss(*inputs[:i], inputs[i] + sign * step, *inputs[i + 1 :]) for sign in (1, -1))
            assert abs((above - below) / 2e-5 - gradient[at]) < 3e-8


sizes = st.integers(1, 30)
bands = st.tuples(st.none() | st.integers(-20, 8), st.none() | st.integers(-8, 20))
few = settings(max_examples=30, deadline=None)


@st.composite
def problems(draw, dtype="float64"):
    """`(dout, q, k, v)`, the options of `oracle` with or without `dlse`, and block sizes."""
    group, heads_kv = draw(st.sampled_from([(1, 1), (3, 1), (1, 2), (7, 2)]))
    len_q, len_kv, dim, dim_v = draw(sizes), draw(sizes), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    batch_q, batch_k, batch_v = draw(st.sampled_from([((), (), ()), ((2,), (2,), (2,)), ((2,), (), (1,)), ((1, 2), (2,), (3, 1))]))
    batch = numpy.broadcast_shapes(batch_q, batch_k, batch_v)
    q = normal(*batch_q, group * heads_kv, len_q, dim, seed=1, dtype=dtype)
    k = normal(*batch_k, heads_kv, len_kv, dim, seed=2, dtype=dtype)
    v = normal(*batch_v, heads_kv, len_kv, dim_v, seed=3, dtype=dtype)
    dout = normal(*batch, group * heads_kv, len_q, dim_v, seed=4, dtype=dtype)
    first_key, last_key = draw(bands)
    options = {
        "scale": draw(st.sampled_from([0.4, -0.7])),
        "first_key": first_key,
        "last_key": last_key,
        "softcap": draw(st.none() | st.just(1.5)),
        "dlse": draw(st.sampled_from([None, normal(*dout.shape[:-1], seed=5, dtype=dtype)])),
    }
    return (dout, q, k, v), options, {"block_q": draw(st.integers(1, 40)), "block_kv": draw(st.integers(1, 40))}


def seen_by(options, len_q, len_kv):
    return sees(len_q, len_kv, options["first_key"], options["last_key"])


@few
@given(problems())
def test_blocks_of_any_size_give_the_oracle(problem):
    inputs, options, blocks = problem
    all_close(by_blocks(*inputs, **options, **blocks), oracle_gradients(*inputs, **options))


@pytest.mark.parametrize("band", [(None, None), (None, 300), (-100, 50), (200, None)])
def test_default_blocks_give_the_oracle(band):
    inputs = normal(2, 600, 4), normal(2, 600, 3), normal(1, 1100, 3), normal(1, 1100, 4)
    options = {"scale": 0.5, "first_key": band[0], "last_key": band[1]}
    all_close(by_blocks(*inputs, **options), oracle_gradients(*inputs, **options))


def test_naive_in_float64_is_the_oracle():
    inputs = normal(4, 5, 3), normal(4, 5, 2), normal(2, 7, 2), normal(2, 7, 3)
    options = {"scale": 0.5, "last_key": 1, "softcap": 2.0, "dlse": normal(4, 5)}
    all_close(naive_gradients(*inputs, **options), oracle_gradients(*inputs, **options))


# Precision of the baseline


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_naive_rounds_out_and_p_and_ds(dtype):
    """Five equal queries see seven keys of equal score, so that all can be followed by hand."""

    def rounded(x):
        return numpy.asarray(x, "float32").astype(dtype).astype("float32")

    squares = numpy.arange(7) ** 2
    q, k, v = numpy.ones((1, 5, 1), dtype), numpy.ones((1, 7, 1), dtype), squares.astype(dtype).reshape(1, 7, 1)
    dq, dk, dv = naive_gradients(q, q, k, v, scale=1.0)
    p = rounded(1 / 7)
    ds = rounded(p * (squares - rounded(p * 91)))
    assert dq.dtype == dk.dtype == dv.dtype == dtype
    for got, expected, unrounded in (
        (dq, [ds.sum()] * 5, [0] * 5),
        (dk, 5 * ds, 5 / 7 * (squares - 13)),
        (dv, [5 * p] * 7, [5 / 7] * 7),
    ):
        assert numpy.array_equal(got[0, :, 0], rounded(expected))
        assert not numpy.array_equal(got[0, :, 0], rounded(unrounded))


def test_tf32_rounds_every_factor():
    fine = numpy.float32(1 + 2**-12)  # TF32 makes it 1
    one, two_keys = numpy.ones((1, 1, 1), "float32"), numpy.array([[[1], [-1]]], "float32")

    def gradients(dout=1.0, q=1.0, k=1.0, v=1.0):
        inputs = one * numpy.float32(dout), one * numpy.float32(q), two_keys * numpy.float32(k), two_keys * numpy.float32(v)
        return naive_gradients(*inputs, scale=0.0, precision="tf32"), naive_gradients(*inputs, scale=0.5, precision="tf32")

    base_flat, base = gradients()
    for name in ("q", "k", "v"):
        flat, changed = gradients(**{name: fine})
        assert all(map(numpy.array_equal, (*flat, *changed), (*base_flat, *base)))
    flat, changed = gradients(dout=fine)
    assert numpy.array_equal(flat.dv, base_flat.dv)
    assert naive_gradients(fine * one, one, one, one, scale=0.0).dv == fine


# What gradients satisfy


@few
@given(problems())
def test_gradients_of_keys_add_up_to_zero(problem):
    inputs, options, blocks = problem
    dk = by_blocks(*inputs, **(options | {"softcap": None, "dlse": None}), **blocks).dk
    numpy.testing.assert_allclose(dk.sum(axis=-2), 0, atol=1e-11)


@few
@given(problems())
def test_gradients_of_values_add_up_to_those_of_the_result(problem):
    (dout, q, k, v), options, blocks = problem
    dv = by_blocks(dout, q, k, v, **options, **blocks).dv
    sees_any = seen_by(options, q.shape[-2], k.shape[-2]).any(axis=1)
    total = (dout * sees_any[:, None]).sum(axis=tuple(range(dout.ndim - 1)))
    numpy.testing.assert_allclose(dv.sum(axis=tuple(range(dv.ndim - 1))), total, atol=1e-11)


@few
@given(problems())
def test_the_log_sum_exp_adds_its_own_gradient(problem):
    """With dout = 0, dq is the mean of the keys that a row sees, times scale, times dlse."""
    (dout, q, k, v), options, blocks = problem
    options |= {"softcap": None, "dlse": normal(*dout.shape[:-1], seed=6)}
    dq, _, dv = by_blocks(0 * dout, q, k, v, **options, **blocks)
    dlse, scores = options["dlse"], {key: value for key, value in options.items() if key != "dlse"}
    mean_key, _ = oracle(q, k, k, **scores)
    dq_full = numpy.broadcast_to(scores["scale"] * mean_key, (*dlse.shape, q.shape[-1])) * dlse[..., None]
    lead = dq_full.ndim - q.ndim
    axes = (*range(lead), *(lead + i for i in range(q.ndim - 3) if q.shape[i] == 1))
    numpy.testing.assert_allclose(dq, dq_full.sum(axis=axes).reshape(q.shape), atol=1e-12)
    assert not dv.any()


@few
@given(problems())
def test_a_broadcast_input_has_the_sum_of_the_gradients(problem):
    (dout, q, k, v), options, blocks = problem
    q_full, k_full, v_full = (numpy.broadcast_to(x, dout.shape[:-3] + x.shape[-3:]) for x in (q, k, v))
    each = by_blocks(dout, q_full, k_full, v_full, **options, **blocks)
    together = by_blocks(dout, q, k, v, **options, **blocks)
    for gradient, part, x, full in zip(together, each, (q, k, v), (q_full, k_full, v_full), strict=True):
        assert gradient.shape == x.shape and part.shape == full.shape
        lead = full.ndim - x.ndim
        axes = (*range(lead), *(lead + i for i in range(x.ndim - 3) if x.shape[i] == 1))
        numpy.testing.assert_allclose(gradient, part.sum(axis=axes).reshape(x.shape), atol=1e-12)


@few
@given(problems())
def test_a_shared_key_head_has_the_sum_over_its_query_heads(problem):
    (dout, q, k, v), options, blocks = problem
    group = q.shape[-3] // k.shape[-3]
    repeated = by_blocks(dout, q, numpy.repeat(k, group, axis=-3), numpy.repeat(v, group, axis=-3), **options, **blocks)
    dq, dk, dv = by_blocks(dout, q, k, v, **options, **blocks)
    numpy.testing.assert_allclose(dq, repeated.dq, atol=1e-12)
    for gradient, full in ((dk, repeated.dk), (dv, repeated.dv)):
        summed = full.reshape(*full.shape[:-3], -1, group, *full.shape[-2:]).sum(axis=-3)
        numpy.testing.assert_allclose(gradient, summed, atol=1e-12)


def test_batch_of_one_is_the_element_of_a_batch():
    inputs = [normal(3, 4, 50, 8, seed=i, dtype="float32") for i in range(4)]
    options = {"scale": 0.3, "last_key": 3, "block_q": 16, "block_kv": 16}
    whole, one = by_blocks(*inputs, **options), by_blocks(*(x[1:2] for x in inputs), **options)
    assert all(numpy.array_equal(a[1:2], b) for a, b in zip(whole, one, strict=True))


# Rows that see nothing, empty axes


@every_way
def test_a_row_that_sees_nothing_has_and_gives_no_gradient(gradients):
    dout, q, k = normal(2, 6, 3), normal(2, 6, 4), normal(2, 4, 4)
    v = normal(2, 4, 3)
    dlse = normal(2, 6)
    dq, dk, dv = gradients(dout, q, k, v, dlse=dlse, scale=0.5, last_key=-2)
    assert not dq[:, :2].any() and dq[:, 2:].any()
    later = gradients(dout[:, 2:], q[:, 2:], k, v, dlse=dlse[:, 2:], scale=0.5, last_key=0)
    all_close((dq[:, 2:], dk, dv), later)


@every_way
@pytest.mark.parametrize("band", [{"last_key": -9}, {"first_key": 9}, {"first_key": 2, "last_key": 1}])
def test_nobody_sees_anything(gradients, band):
    dout, q, k, v = normal(2, 3, 6), normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 6)
    for gradient, x in zip(gradients(dout, q, k, v, scale=1.0, **band), (q, k, v), strict=True):
        assert numpy.array_equal(gradient, numpy.zeros_like(x))


@every_way
@pytest.mark.parametrize(("len_q", "len_kv"), [(3, 0), (0, 5), (0, 0)])
def test_empty_sequences(gradients, len_q, len_kv):
    dout, q, k, v = normal(2, len_q, 6), normal(2, len_q, 4), normal(2, len_kv, 4), normal(2, len_kv, 6)
    for gradient, x in zip(gradients(dout, q, k, v, scale=1.0, last_key=0), (q, k, v), strict=True):
        assert numpy.array_equal(gradient, numpy.zeros_like(x))


@every_way
@pytest.mark.parametrize(
    ("batch", "batch_kv", "heads"), [((0,), (0,), (2, 2)), ((2, 0), (1,), (2, 1)), ((3,), (3,), (0, 0)), ((3,), (3,), (0, 2))]
)
def test_empty_batch_and_heads(gradients, batch, batch_kv, heads):
    q, k = normal(*batch, heads[0], 3, 4), normal(*batch_kv, heads[1], 5, 4)
    for gradient, x in zip(gradients(q, q, k, k, scale=1.0), (q, k, k), strict=True):
        assert numpy.array_equal(gradient, numpy.zeros_like(x))


# NaN and infinity


@few
@given(problems(), st.data())
def test_what_is_masked_does_not_reach_a_gradient(problem, data):
    (dout, q, k, v), options, blocks = problem
    name = data.draw(st.sampled_from(["dout", "q", "k", "v"]))
    inputs = {"dout": dout, "q": q, "k": k, "v": v}
    bad_row = data.draw(st.integers(0, inputs[name].shape[-2] - 1))
    poison = data.draw(st.sampled_from([numpy.nan, numpy.inf]))
    inputs[name] = inputs[name].copy()
    inputs[name][..., bad_row, 0] = poison

    seen = seen_by(options, q.shape[-2], k.shape[-2])
    if name in ("k", "v"):
        queries = seen[:, bad_row]
        keys = seen[queries].any(axis=0)  # reached through a query that sees the bad key
    else:
        queries, keys = numpy.arange(len(seen)) == bad_row, seen[bad_row]
    for gradients in (oracle_gradients, naive_gradients, lambda *x, **o: by_blocks(*x, **o, **blocks)):
        clean, got = gradients(dout, q, k, v, **options), gradients(*inputs.values(), **options)
        assert numpy.array_equal(got.dq[..., ~queries, :], clean.dq[..., ~queries, :])
        assert numpy.array_equal(got.dk[..., ~keys, :], clean.dk[..., ~keys, :])
        assert numpy.array_equal(got.dv[..., ~keys, :], clean.dv[..., ~keys, :])
        if numpy.isnan(poison) and keys.any():
            assert numpy.isnan(got.dk[..., keys, :]).all()
            assert numpy.isnan(got.dq[..., queries & seen.any(axis=1), :]).all()
            assert numpy.isnan(got.dv[..., keys, 0]).all() == (name != "v")


def test_a_result_of_no_weight_may_be_anything_where_nothing_is_seen():
    dout, q, k, v = normal(1, 6, 3), normal(1, 6, 4), normal(1, 4, 4), normal(1, 4, 3)
    out, lse = blocked(q, k, v, scale=0.5, last_key=-2)
    expected = blocked_gradients(dout, q, k, v, out, lse, scale=0.5, last_key=-2)
    out[:, :2] = dout[:, :2] = numpy.nan
    got = blocked_gradients(dout, q, k, v, out, lse, scale=0.5, last_key=-2)
    assert all(map(numpy.array_equal, got, expected))


@every_way
def test_scores_of_minus_infinity_have_no_weight(gradients):
    dout, q, k, v = normal(1, 3, 2), abs(normal(1, 3, 4)), normal(1, 5, 4), normal(1, 5, 2)
    k[..., 0] = -numpy.inf
    assert not gradients(dout, q, k, v, scale=0.5).dv.any()


# How blocked_gradients reads and writes


def test_it_writes_in_place_whatever_the_strides():
    q, dout = normal(2, 6, 50, 8, dtype="float16"), normal(2, 6, 50, 5, dtype="float16")
    k, v = normal(2, 3, 70, 8, dtype="float16"), normal(2, 3, 70, 5, dtype="float16")
    given = {
        "dq": numpy.full((2, 50, 6, 16), numpy.nan, "float16")[..., ::2].swapaxes(1, 2),
        "dk": numpy.full((2, 3, 8, 70), numpy.nan, "float16").swapaxes(2, 3)[:, :, ::-1],
        "dv": numpy.full((2, 3, 70, 5), numpy.nan, "float16")[::-1],
    }
    out, lse = blocked(q, k, v, scale=0.3, last_key=20)
    result = blocked_gradients(dout, q, k, v, out, lse, scale=0.3, last_key=20, **given)
    assert all(a is b for a, b in zip(result, given.values(), strict=True))
    assert all(map(numpy.array_equal, result, blocked_gradients(dout, q, k, v, out, lse, scale=0.3, last_key=20)))
    assert numpy.isnan(given["dq"].base[..., 1::2]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_new_gradients_have_dtype_and_memory_order_of_their_inputs(dtype):
    q = normal(2, 20, 4, 8, dtype=dtype).swapaxes(1, 2)
    k, v = normal(2, 4, 8, 30, dtype=dtype).swapaxes(2, 3), normal(2, 4, 30, 8, dtype=dtype)
    for gradient, x in zip(by_blocks(q, q, k, v, scale=0.3), (q, k, v), strict=True):
        assert gradient.dtype == x.dtype and gradient.strides == x.strides


def test_it_reads_any_strides():
    contiguous = [normal(2, 4, 30, 8, seed=i, dtype="float32") for i in range(4)]
    strided = [numpy.repeat(x, 2, axis=-1).swapaxes(1, 2).copy().swapaxes(1, 2)[..., ::2] for x in contiguous]
    scores = {"scale": 0.3, "last_key": 3}
    out, lse = blocked(*contiguous[1:], **scores)
    dlse = normal(2, 4, 30, dtype="float32")
    expected = blocked_gradients(*contiguous, out, lse, dlse=dlse, **scores)
    out, lse, dlse = numpy.asfortranarray(out), lse[..., ::-1].copy()[..., ::-1], numpy.asfortranarray(dlse)
    for got, wanted in zip(blocked_gradients(*strided, out, lse, dlse=dlse, **scores), expected, strict=True):
        assert numpy.array_equal(got, wanted)


@pytest.mark.parametrize("band", [(None, 0), (-8, 8), (None, None), (30, None)])
def test_tiles_out_of_sight_are_not_read(band):
    """Keys that nobody sees hold NaN, and tiles that hold only such keys are not in the way of anything."""
    q, k = normal(1, 40, 4), normal(1, 100, 4)
    hidden = ~sees(40, 100, *band).any(axis=0)
    k[:, hidden] = numpy.nan
    options = {"scale": 0.5, "first_key": band[0], "last_key": band[1]}
    dq, dk, dv = by_blocks(q, q, k, k, **options, block_q=8, block_kv=8)
    assert all(numpy.isfinite(x).all() for x in (dq, dk, dv))
    assert not dk[:, hidden].any() and not dv[:, hidden].any()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_it_needs_memory_for_tiles_and_sums_only(dtype):
    n, dim, block_q, block_kv = 1536, 8, 64, 128
    q, k, v = (normal(1, n, dim, seed=i, dtype=dtype) for i in range(3))
    out, lse = blocked(q, k, v, scale=0.25, last_key=0)
    given = {name: numpy.empty_like(q) for name in Gradients._fields}
    tracemalloc.start()
    try:
        blocked_gradients(q, q, k, v, out, lse, scale=0.25, last_key=0, **given, block_q=block_q, block_kv=block_kv)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sums = 3 * 4 * q.size
    assert peak < sums + 12 * (4 * block_q * block_kv) < 4 * n * n / 8
