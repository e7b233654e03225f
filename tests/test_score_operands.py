"""Biases, slopes, masks of booleans and dropout on NumPy, forward and backward, against the oracle."""

import itertools

import numpy
import pytest
from hand_scores import Grid
from score_calls import DTYPES, GRID, SMALL, TALL, Call, blocks, normal, same_bits, strided, truths
from thinned import quick, thinned

from cupy_flash import attention, attention_vjp

pytestmark = pytest.mark.filterwarnings("error")


# Bias and slopes

SHAPES = [
    *itertools.product((1, 2), (1, 6), (1, 13), (1, 21)),
    *itertools.product((1, 6), (1, 13), (1, 21)),
    *itertools.product((1, 13), (1, 21)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_of_every_shape(shape):
    with blocks(8, 16):
        Call(GRID).both(bias=normal(*shape)).check()


@pytest.mark.parametrize("shape", [(2, 3, 1, 1, 13), (3, 3, 21, 1), (2, 1, 3, 1, 1), (1, 3, 1, 21, 13), (3, 21, 13)], ids=str)
def test_bias_with_two_batch_axes(shape):
    with blocks(8, 4):
        Call(TALL, broadcast=True).both(bias=normal(*shape)).check()


@pytest.mark.parametrize("own", ["float32", "dtype"])
@DTYPES
def test_bias_and_slopes_in_the_dtype_of_q_or_in_float32(dtype, own):
    own = dtype if dtype == "float64" or own == "dtype" else "float32"
    Call(GRID, dtype).both(bias=normal(6, 13, 21).astype(own), alibi_slopes=normal(2, 6).astype(own) / 8).check()


STRIDES = {
    "0 along keys": lambda: numpy.broadcast_to(normal(6, 13, 1), (6, 13, 21)),
    "0 along heads and batch": lambda: numpy.broadcast_to(normal(13, 21), (2, 6, 13, 21)),
    "negative": lambda: normal(6, 13, 21)[::-1, ::-1, ::-1],
    "transposed": lambda: normal(21, 13, 6).T,
    "with gaps": lambda: strided(normal(2, 6, 13, 21)),
    "diagonal": lambda: numpy.lib.stride_tricks.as_strided(normal(40), (13, 21), (8, 8)),
}


@pytest.mark.parametrize("of", STRIDES)
def test_bias_of_any_strides(of):
    Call(GRID).both(bias=STRIDES[of]()).check()


@pytest.mark.parametrize("name", [None, "decay"])
def test_bias_of_minus_infinity(name):
    bias = normal(2, 6, 13, 21)
    bias[truths(2, 6, 13, 21, rate=0.5)] = -numpy.inf
    bias[0, 1, 2] = -numpy.inf  # a row that has nothing else
    call = Call(GRID).both(bias=bias)
    call = call if name is None else call.expression(name)
    call.check()
    out, lse, grads = call.run()
    assert not out[0, 1, 2].any() and lse[0, 1, 2] == -numpy.inf and not grads.dbias[numpy.isinf(bias)].any()


@pytest.mark.parametrize("shape", [(6,), (2, 6), (1, 6), (1,), (2, 1)], ids=str)
def test_slopes(shape):
    Call(GRID).both(alibi_slopes=normal(*shape)).check()
    Call(Grid.of((2,), 6, 2, 21, 13)).both(alibi_slopes=strided(normal(*shape))).check()


@pytest.mark.parametrize("shape", [(3,), (2, 3, 3), (2, 1, 3), (3, 3), (3, 1)], ids=str)
def test_slopes_with_two_batch_axes(shape):
    Call(TALL, broadcast=True).both(alibi_slopes=normal(*shape)).check()


def test_nan_in_slopes_and_bias_is_data():
    """It reaches the rows that see it and no others."""
    slopes, bias = normal(6), normal(2, 6, 13, 21)
    slopes[2], bias[0, 1, 3, 5] = numpy.nan, numpy.nan
    call = Call(GRID).both(alibi_slopes=slopes, bias=bias)
    out, lse, grads = call.run()
    expected = numpy.zeros(out.shape[:-1], bool)
    expected[:, 2] = expected[0, 1, 3] = True
    assert (numpy.isnan(out).any(axis=-1) == expected).all() and (numpy.isnan(lse) == expected).all()
    assert (numpy.isnan(grads.dq).any(axis=-1) == expected).all()
    seen = numpy.ones((2, 6, 13, 21), bool)
    seen[0, 1, 3, 5] = False
    slopes[2] = 0.5
    Call(GRID).both(alibi_slopes=slopes, bias=numpy.where(seen, bias, 0)).mask(seen).check()
    a, b = (Call(GRID).both(alibi_slopes=slopes, bias=x).mask(seen).run() for x in (bias, numpy.where(seen, bias, 0)))
    for x, y in zip((*a[:2], *a[2], a[2].dbias, a[2].dalibi_slopes), (*b[:2], *b[2], b[2].dbias, b[2].dalibi_slopes)):
        same_bits(x, y)


def test_an_array_of_the_name_of_an_option():
    """As it is the score's, its gradient is among those of arrays; that of the option has no name left."""
    q, k, v = Call(GRID).inputs()
    dout, _ = Call(GRID).cotangents()
    own, of_option = normal(6), normal(13, 21)
    out, vjp = attention_vjp(q, k, v, score="score + bias[h]", arrays={"bias": own}, bias=of_option, wrt="bias")
    grads = vjp(dout)
    numpy.testing.assert_allclose(out, attention(q, k, v, bias=own[:, None, None] + of_option), rtol=1e-12)
    assert grads.dbias is None and grads.darrays["bias"].shape == (6,)
    with pytest.raises(ValueError, match=r"^wrt: expected .*, got 'bias'"):
        attention_vjp(q, k, v, mask="bias[h] > 0", arrays={"bias": own}, bias=of_option, wrt="bias")


# Masks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_booleans_that_broadcast(shape):
    with blocks(8, 16):
        Call(GRID).mask(truths(*shape)).check()


@pytest.mark.parametrize("of", ["broadcast", "strided", "transposed"])
def test_booleans_of_any_strides(of):
    seen = {"broadcast": numpy.broadcast_to(truths(13, 21), (2, 6, 13, 21)), "strided": strided(truths(2, 1, 13, 21))}
    Call(GRID).mask(seen.get(of, truths(21, 13).T)).check()


def test_booleans_with_two_batch_axes():
    for shape in ((2, 3, 1, 1, 13), (3, 3, 21, 1), (2, 1, 3, 21, 13)):
        Call(TALL, broadcast=True).mask(truths(*shape)).check()


def test_rows_that_see_nothing():
    seen = truths(2, 6, 13, 21)
    seen[0, 1] = seen[1, 2, 4] = seen[:, :, -1] = False
    nothing = ~seen.any(axis=-1)
    for call in (Call(GRID), Call(GRID).expression("gate"), Call(GRID).dropout(0.4, 1), Call(GRID).both(bias=normal(13, 21))):
        call.mask(seen).check()
        out, lse, grads = call.run()
        assert not out[nothing].any() and (lse[nothing] == -numpy.inf).all() and not grads.dq[nothing].any()
    Call(GRID).mask(seen).both(sinks=normal(6)).check()
    nobody = Call(GRID).mask(numpy.zeros((1, 1), bool)).both(bias=normal(6, 1, 1))
    nobody.check()
    assert not any(x.any() for x in (*nobody.run()[2], nobody.run()[2].dbias))


@pytest.mark.parametrize("spoilt", thinned([numpy.nan, numpy.inf, -numpy.inf]), ids=str)
@pytest.mark.parametrize("name", [None, "gate", "decay", "bounded", "square"])
def test_what_is_masked_reaches_nobody(name, spoilt):
    """Whatever keys, values, rows and biases of hidden pairs hold: all bits are those of a call without it."""
    seen = truths(2, 6, 13, 21)
    seen[..., 2] = seen[..., 20] = seen[0, 3:6, 4] = False
    nothing = ~seen.any(axis=-1)
    bias = normal(2, 6, 13, 21)

    def call(value):
        made = Call(GRID).mask(seen).both(bias=numpy.where(seen, bias, value), softcap=5.0).dropout(0.3, 4)
        made = made if name is None else made.expression(name)
        for x in (made.k, made.v):
            x[..., 2, :] = x[..., 20, :] = value
        made.q[nothing] = value
        return made

    usual, poisoned = call(0).run(), call(spoilt).run()
    for a, b in zip((*usual[:2], *usual[2], usual[2].dbias), (*poisoned[:2], *poisoned[2], poisoned[2].dbias)):
        same_bits(a, b)
    for array, gradient in usual[2].darrays.items():
        same_bits(gradient, poisoned[2].darrays[array])


@pytest.mark.parametrize("spoilt", [numpy.nan, numpy.inf], ids=str)
def test_a_spoilt_array_reaches_those_who_read_it(spoilt):
    """Through a branch that a condition hides as well: it is evaluated, and not taken."""
    q, k, v = Call(GRID).inputs()
    w = numpy.full(21, spoilt)
    w[:13] = 1.0
    seen = numpy.arange(21) < 13
    out = attention(q, k, v, score="score + w[kv_idx]", arrays={"w": w}, mask=seen[None])
    numpy.testing.assert_allclose(out, attention(q, k, v, mask=seen[None]), rtol=1e-12)
    out, vjp = attention_vjp(q, k, v, score="where(kv_idx < 13, score + w[kv_idx], score + 1)", arrays={"w": w}, wrt="w")
    numpy.testing.assert_allclose(out, attention(q, k, v), rtol=1e-12)
    assert numpy.isfinite(vjp(out).darrays["w"]).all() and not vjp(out).darrays["w"][13:].any()


# Dropout


@pytest.mark.parametrize("p", quick([1e-6, 0.1, 0.5, 0.999, 1 - 2**-33], 1e-6, 1 - 2**-33))
def test_dropout(p):
    with blocks(8, 4):
        Call(GRID).dropout(p, 123).check()
        Call(TALL, broadcast=True).dropout(p, (123, 7)).both(sinks=normal(3)).check()


@DTYPES
def test_dropout_in_every_dtype(dtype):
    Call(GRID, dtype).dropout(0.3, 5).expression("temperature").check()


SEEDS = [
    (7, (7, 0)),
    (numpy.int32(7), (7, 0)),
    (numpy.uint64(2**64 - 1), (2**64 - 1, 0)),
    (2**64 - 1, (2**64 - 1, 0)),
    ((7, 3), (7, 3)),
    ([7, 3], (7, 3)),
    ((numpy.uint64(7), numpy.uint32(3)), (7, 3)),
    (numpy.array([7, 3], numpy.uint64), (7, 3)),
    (numpy.array([[7, 9], [3, 9]], numpy.uint64)[:, 0], (7, 3)),
    (numpy.array([7, 2**32 - 1], numpy.uint64), (7, 2**32 - 1)),
]


@pytest.mark.parametrize("seed, number", SEEDS, ids=lambda x: str(x).replace(" ", ""))
def test_forms_of_a_seed(seed, number):
    Call(SMALL).dropout(0.5, seed, number).check()


def test_dropout_of_0_and_a_seed_that_nothing_needs():
    q, k, v = Call(GRID).inputs()
    expected = attention(q, k, v)
    same_bits(attention(q, k, v, dropout=0.0), expected)
    same_bits(attention(q, k, v, dropout=1e-12), expected)  # which rounds to 0 of 2**32 words
    same_bits(attention(q, k, v, dropout=0.0, seed=5), expected)


def test_dropout_changes_neither_lse_nor_the_mean():
    """Over many seeds the results have that of the softmax: within six standard deviations of their mean."""
    q, k, v = (x[:1, :1] for x in Call(Grid.of((1,), 1, 1, 4, 8)).inputs())
    expected, lse = attention(q, k, v, return_lse=True)
    results = [attention(q, k, v, dropout=0.4, seed=seed, return_lse=True) for seed in range(400)]
    for _, other in results:
        same_bits(other, lse)
    outs = numpy.stack([out for out, _ in results])
    assert (abs(outs.mean(axis=0) - expected) < 6 * outs.std(axis=0) / 20 + 1e-12).all() and outs.std() > 0.05
