"""Scores, biases, masks and dropout on NumPy, forward and backward, against the oracle."""

import itertools
import re

import ml_dtypes
import numpy
import pytest
from hand_scores import MASKS, SCORES, Grid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from score_calls import NAMED, Call, blocks

from cupy_flash import attention, attention_backward, attention_vjp, plan_attention, plan_attention_backward
from cupy_flash.call import backward as backward_call
from cupy_flash.call import forward as forward_call
from cupy_flash.problem.expression import trace

pytestmark = pytest.mark.filterwarnings("error")

BFLOAT16 = ml_dtypes.bfloat16
GRID = Grid.of((2,), 6, 2, 13, 21)
TALL = Grid.of((2, 3), 3, 1, 21, 13)
SMALL = Grid.of((2,), 4, 2, 4, 5)
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32", "float16", BFLOAT16], ids=lambda x: numpy.dtype(x).name)


def normal(*shape, seed=0, dtype="float64"):
    return numpy.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def truths(*shape, rate=0.6, seed=0):
    return numpy.random.default_rng([seed, *shape]).random(shape) < rate


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# Expressions


@DTYPES
@pytest.mark.parametrize("name", NAMED)
def test_expressions(name, dtype):
    Call(GRID, dtype).expression(name).check()


@pytest.mark.parametrize("name", NAMED)
def test_expressions_with_two_batch_axes_more_queries_than_keys_and_small_blocks(name):
    """No input has both axes, and b counts the elements of both."""
    with blocks(8, 4):
        Call(TALL, broadcast=True).expression(name).check()


@pytest.mark.parametrize("score, mask", [*zip(SCORES, itertools.cycle(MASKS)), *zip(SCORES, MASKS[::-1])], ids=str)
def test_a_score_and_a_mask(score, mask):
    Call(GRID).expression(score.name).expression(mask.name).check()


@pytest.mark.parametrize("name", ["pairs", "decay", "tree", "limits"])
def test_expressions_on_several_tiles_of_the_usual_size(name):
    Call(Grid.of((), 2, 1, 260, 530)).expression(name).check()


def test_everything_on_several_tiles_of_the_usual_size():
    call = Call(Grid.of((), 3, 1, 260, 530), options={"layout": "bshd"}).expression("gate").expression("windows").dropout(0.2, 9)
    call.both(bias=normal(3, 1, 530), alibi_slopes=normal(3) / 100, sinks=normal(2, 3), softcap=7.0).check()


PYTHON = {
    **{name: getattr(trace, name) for name in ("where", "exp", "tanh", "sigmoid")},
    **{"abs": abs, "min": trace.minimum, "max": trace.maximum},
}
BY_HAND = {  # what a text says by `and`, `or`, `not` and chains
    "prefixes": lambda q_idx, kv_idx, kv_len, q_len, b, prefix: (kv_idx <= q_idx + kv_len - q_len) | (kv_idx < prefix[b]),
    "sinks_and_window": lambda q_idx, kv_idx, kv_len, q_len, width: (
        (kv_idx < 2) | ((0 <= q_idx + kv_len - q_len - kv_idx) & (q_idx + kv_len - q_len - kv_idx < width))  # noqa: SIM300
    ),
    "holes": lambda kv_idx, first, last, b: ~((first[b] <= kv_idx) & (kv_idx < last[b])),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_function_gives_the_bits_of_its_text(name):
    example = NAMED[name]
    names = dict.fromkeys(word for word in re.findall(r"[a-z_]\w*", example.text) if word not in PYTHON)
    function = BY_HAND.get(name) or eval(f"lambda {', '.join(names)}: {example.text}", PYTHON)
    of_text, of_function = (Call(GRID, "float32").expression(name, text).run() for text in (None, function))
    for a, b in zip((*of_text[:2], *of_text[2]), (*of_function[:2], *of_function[2])):
        same_bits(a, b)
    assert of_text[2].darrays.keys() == of_function[2].darrays.keys()
    for array, gradient in of_text[2].darrays.items():
        same_bits(gradient, of_function[2].darrays[array])


def test_arrays_may_be_read_at_several_places():
    """Each element's gradient is the sum of those of all reads; the oracle knows it as two arrays."""
    x = normal(21, dtype="float32")
    once = Call(GRID).expression("columns")
    q, k, v = once.inputs()
    (dout, _), text = once.cotangents(), "score * w[kv_idx] + w[kv_idx] + w[q_idx + 3] * w[0]"
    _, vjp = attention_vjp(q, k, v, score=text, arrays={"w": x}, wrt="w")
    apart = "score * a[kv_idx] + e[kv_idx] + c[q_idx + 3] * d[0]"
    _, vjp_apart = attention_vjp(q, k, v, score=apart, arrays=dict.fromkeys("aecd", x), wrt=tuple("aecd"))
    whole, parts = vjp(dout), vjp_apart(dout)
    numpy.testing.assert_allclose(whole.darrays["w"], sum(parts.darrays[name] for name in "aecd"), rtol=1e-5)
    assert all(parts.darrays[name].any() for name in "aecd")
    for a, b in zip(whole, parts):
        same_bits(a, b)

    def loss(w):
        return (attention(q, k, v, score=text, arrays={"w": w}) * dout).sum()

    wide, (_, vjp) = x.astype("float64"), attention_vjp(q, k, v, score=text, arrays={"w": x.astype("float64")}, wrt="w")
    exact = vjp(dout).darrays["w"]
    for i in (0, 3, 15, 20):
        step = 1e-6 * (numpy.arange(21) == i)
        assert abs((loss(wide + step) - loss(wide - step)) / 2e-6 - exact[i]) < 1e-7


def test_an_index_may_depend_on_the_score():
    """Its own derivative is 0; the element that is read has one."""
    call, w = Call(GRID), normal(4)
    (q, k, v), (dout, _) = call.inputs(), call.cotangents()
    s = numpy.einsum("bhqd,bhkd->bhqk", q, k.repeat(3, axis=1)) / 5**0.5
    index = numpy.minimum(abs(3 * s).astype(int), 3).reshape(12, 13, 21)
    assert set(index.ravel()) == set(range(4))
    _, vjp = attention_vjp(q, k, v, score="score * w[int(abs(score) * 3)]", arrays={"w": w}, wrt="w")
    # The same with the index given.
    _, apart = attention_vjp(q, k, v, score="score * w[i[b * 6 + h, q_idx, kv_idx]]", arrays={"w": w, "i": index}, wrt="w")
    for a, b in zip((*vjp(dout), vjp(dout).darrays["w"]), (*apart(dout), apart(dout).darrays["w"])):
        same_bits(a, b)


@pytest.mark.parametrize("kind", ["float16", BFLOAT16, "float32", "float64"], ids=lambda x: numpy.dtype(x).name)
@DTYPES
def test_arrays_of_floats_of_any_dtype(dtype, kind):
    call = Call(GRID, dtype)
    call.options |= {"score": "score * t[h]", "arrays": {"t": normal(6).astype(kind)}}
    call.told["score"] = NAMED["temperature"].hand(GRID, call.options["arrays"])
    call.check()


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"])
def test_arrays_of_integers_and_bools(kind):
    call, doc = Call(GRID), (numpy.arange(21) // 7).astype(kind)
    call.options |= {"mask": "doc[q_idx] == doc_kv[kv_idx]", "arrays": {"doc": doc[:13], "doc_kv": doc}}
    call.told["seen"] = NAMED["documents"].hand(GRID, call.options["arrays"])
    call.check()
    values = attention(*call.inputs(), score="doc_kv[kv_idx]", arrays={"doc_kv": doc}, return_lse=True)
    expected = attention(*call.inputs(), score="w[kv_idx]", arrays={"w": doc.astype("float64")}, return_lse=True)
    for a, b in zip(values, expected):
        same_bits(a, b)


def strided(x):
    """The same elements at strides that are negative, exchanged or have gaps."""
    place = numpy.full([2 * n for n in x.shape[::-1]], 99).astype(x.dtype)
    view = place.T[tuple(slice(None, None, -2) for _ in x.shape)]
    view[...] = x
    return view


@pytest.mark.parametrize("name", ["pairs", "shared_heads", "per_batch", "special_keys", "buckets", "tree", "limits"])
def test_arrays_of_any_strides(name):
    call = Call(GRID).expression(name)
    call.options["arrays"] = {of: strided(x) for of, x in call.options["arrays"].items()}
    call.check()


@pytest.mark.parametrize("scalar", [0.75, numpy.float32(0.75), numpy.array(0.75), numpy.array(0.75, "f2"), 3, True, numpy.int8(3)])
def test_scalars(scalar):
    """A number of Python or NumPy, or an array without axes."""
    call = Call(GRID)
    text = "where(c, score * 2, score)" if scalar is True else "score * c"
    call.options |= {"score": text, "arrays": {"c": scalar}}
    factor = 2.0 if scalar is True else float(scalar)
    q, k, v = call.inputs()
    out, lse, grads = call.run(("c",) if numpy.asarray(scalar).dtype.kind == "f" else ())
    expected = attention(q, k, v, scale=factor / 5**0.5, return_lse=True)
    numpy.testing.assert_allclose(out, expected[0], rtol=1e-12)
    numpy.testing.assert_allclose(lse, expected[1], rtol=1e-12)
    if grads.darrays:
        (dout, dlse), gradient = call.cotangents(), grads.darrays["c"]
        _, vjp = attention_vjp(q, k, v, scale=factor / 5**0.5)
        by_scores = (vjp(dout, dlse).dq * q).sum() / factor  # q . dq is the sum of all scores times their gradients
        assert gradient.shape == () and gradient.dtype == numpy.asarray(scalar).dtype
        numpy.testing.assert_allclose(gradient, by_scores, rtol=2e-3 if gradient.dtype == "f2" else 1e-6)


def test_a_scalar_beyond_float32_is_itself_in_float64_and_infinite_in_float32():
    q, k, v = Call(GRID).inputs()
    for factor in (1e300, 1e-300):
        text = "score + c * 1e-300" if factor > 1 else "score + c * 1e300"
        same_bits(attention(q, k, v, score=text, arrays={"c": factor}), attention(q, k, v, score="score + 1"))
    q, k, v = Call(GRID, "float32").inputs()
    same_bits(attention(q, k, v, score="where(c < inf, score, 0)", arrays={"c": 1e300}), attention(q, k, v, score="0"))


def test_an_index_beyond_the_ends_is_that_of_the_end():
    q, k, v = Call(GRID).inputs()
    w = normal(4)
    clipped = w[numpy.clip(numpy.arange(21) * 3 - 9, 0, 3)]
    out = attention(q, k, v, score="score + w[kv_idx * 3 - 9]", arrays={"w": w})
    numpy.testing.assert_allclose(out, attention(q, k, v, bias=clipped[None]), rtol=1e-12)


def test_a_score_that_is_a_constant_for_a_row_or_for_all():
    """And so has fewer axes than a tile, with or without a mask."""
    q, k, v = Call(GRID).inputs()
    mean = numpy.broadcast_to(numpy.repeat(v, 3, axis=1).mean(axis=2, keepdims=True), (2, 6, 13, 3))
    gain = numpy.array(2.0)
    for text, arrays in (("1", {}), ("gain", {"gain": gain}), ("h * 0.5", {}), ("q_idx", {}), ("b + q_idx / 2", {})):
        out, vjp = attention_vjp(q, k, v, score=text, arrays=arrays, wrt=tuple(arrays))
        numpy.testing.assert_allclose(out, mean, rtol=1e-11)
        grads = vjp(out)
        assert not grads.dq.any() and not grads.dk.any() and abs(grads.darrays.get("gain", 0)) < 1e-12
        numpy.testing.assert_allclose(attention(q, k, v, score=text, arrays=arrays, window=(99, 99), mask="True"), mean, rtol=1e-11)
    assert gain == 2.0  # nothing was computed in the caller's memory


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


@pytest.mark.parametrize("spoilt", [numpy.nan, numpy.inf, -numpy.inf], ids=str)
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


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.999, 1 - 2**-33])
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
    same_bits(attention(q, k, v, seed=5), expected)


def test_dropout_changes_neither_lse_nor_the_mean():
    """Over many seeds the results have that of the softmax: within six standard deviations of their mean."""
    q, k, v = (x[:1, :1] for x in Call(Grid.of((1,), 1, 1, 4, 8)).inputs())
    expected, lse = attention(q, k, v, return_lse=True)
    results = [attention(q, k, v, dropout=0.4, seed=seed, return_lse=True) for seed in range(400)]
    for _, other in results:
        same_bits(other, lse)
    outs = numpy.stack([out for out, _ in results])
    assert (abs(outs.mean(axis=0) - expected) < 6 * outs.std(axis=0) / 20 + 1e-12).all() and outs.std() > 0.05


# Together


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@DTYPES
def test_everything_at_once(dtype, layout):
    call = Call(GRID, dtype, dim=8, dim_v=4).expression("shared_heads").expression("windows").dropout(0.2, (1, 2))
    call.band(True, (7, None)).both(bias=normal(2, 1, 13, 21, dtype="float32"), sinks=normal(2, 6, dtype="float32"), softcap=4.0)
    if dtype == "float64":
        call.both(bias=call.options["bias"].astype("float64"), sinks=call.options["sinks"].astype("float64"))
    call.both(alibi_slopes=normal(2, 6).astype(dtype) / 8)
    call.options["layout"] = layout
    call.check()


BANDS = [(True, None, 0), ("top_left", None, 0), (False, (3, 2), 0), (True, (4, None), 0)]
BANDS += [("top_left", None, 6), (False, (-1, 1), 5)]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bands(band):
    for grid in (GRID, TALL):
        with blocks(8, 4):
            Call(grid).band(*band).expression("gate").both(softcap=2.0, sinks=normal(grid.shape[-3])).check()
            Call(grid).band(*band).mask(truths(*grid.shape[-2:])).expression("columns").check()


@pytest.mark.parametrize("batch", [(), (1,), (2, 1, 2)], ids=str)
def test_numbers_of_batch_axes(batch):
    grid = Grid.of(batch, 3, 3, 5, 4)
    Call(grid).expression("per_batch").expression("only_prefixes").dropout(0.3, 1).both(bias=normal(5, 4)).check()


def test_inputs_without_an_axis_of_heads():
    call = Call(Grid.of((), 1, 1, 5, 4), flat=True).expression("temperature").mask(truths(5, 4)).dropout(0.3, 1)
    call.both(bias=normal(5, 4), alibi_slopes=normal(1), sinks=normal(1)).check()
    out, _, _ = call.run()
    same_bits(attention(*call.inputs(), layout="bshd", **call.options), out)  # there is nothing to exchange


@pytest.mark.parametrize("shape", [((0,), 2, 1, 5, 4), ((2,), 2, 1, 0, 4), ((2,), 2, 1, 5, 0), ((2,), 0, 0, 5, 4)], ids=str)
def test_empty_axes(shape):
    batch, heads, heads_kv, len_q, len_kv = shape
    pairs = (*batch, heads, len_q, len_kv)
    q, k, v = (normal(*batch, *of, 4) for of in ((heads, len_q), (heads_kv, len_kv), (heads_kv, len_kv)))
    arrays = {"t": normal(heads), "w": normal(len_kv), "doc": numpy.zeros(len_q, int)}
    out, vjp = attention_vjp(
        *(q, k, v),
        **dict(score="score * t[h] + w[kv_idx]", mask="doc[q_idx] == 0", arrays=arrays, bias=normal(*pairs), dropout=0.5, seed=1),
        wrt=("t", "w", "bias"),
    )
    grads = vjp(out)
    assert out.shape == (*batch, heads, len_q, 4) and not out.any()
    for gradient, of in ((grads.dbias, pairs), (grads.darrays["t"], (heads,)), (grads.darrays["w"], (len_kv,))):
        assert gradient.shape == of and not gradient.any()


def test_only_what_wrt_names_is_computed():
    call = Call(GRID).expression("shared_heads").both(bias=normal(13, 21), alibi_slopes=normal(6))
    whole = call.run()[2]
    for wrt in ((), "shift", ("bias",), ["gain", "alibi_slopes"], ("shift", "shift")):
        grads = call.run(wrt)[2]
        names = {wrt} if isinstance(wrt, str) else set(wrt)
        assert grads.darrays.keys() == names & {"gain", "shift"}
        assert (grads.dbias is not None) == ("bias" in names) and (grads.dalibi_slopes is not None) == ("alibi_slopes" in names)
        for a, b in zip(whole, grads):
            same_bits(a, b)
        for name, gradient in grads.darrays.items():
            same_bits(gradient, whole.darrays[name])


def test_the_backward_given_results_is_the_vjp():
    call = Call(GRID).expression("gate").expression("allowed").dropout(0.2, 3).both(bias=normal(6, 13, 21))
    out, lse, grads = call.run()
    dout, dlse = call.cotangents()
    again = attention_backward(dout, *call.inputs(), out, lse, dlse=dlse, wrt=call.wrt, **call.options)
    for a, b in zip((*grads, grads.dbias, *grads.darrays.values()), (*again, again.dbias, *again.darrays.values())):
        same_bits(a, b)


# Plans


def options_of_a_plan(call, value):
    """Options, of which the arrays hold other numbers for other values; shapes and dtypes are the same."""
    arrays = {"t": normal(6) + value, "c": 0.5 + value, "doc": numpy.arange(21) // (value + 4)}
    own = {"bias": normal(13, 21) * value, "alibi_slopes": normal(6) + value, "seed": (value, value), "arrays": arrays}
    return {"score": "score * t[h] + c", "mask": "doc[kv_idx] == doc[q_idx + 8]", "dropout": 0.25, **own}


def test_what_arrays_hold_makes_no_other_plan():
    call = Call(GRID)
    q, k, v = call.inputs()
    dout, _ = call.cotangents()
    for module in (forward_call, backward_call):
        module._prepared.cache_clear()
    plans = {id(plan_attention(q, k, v, **options_of_a_plan(call, value))) for value in range(3)}
    assert len(plans) == 1
    results = []
    for value in range(3):
        out, vjp = attention_vjp(q, k, v, **options_of_a_plan(call, value), wrt=("t", "c", "bias"))
        results.append((out, vjp(dout)))
    assert forward_call._prepared.cache_info().currsize == 2  # one of them with lse
    assert backward_call._prepared.cache_info().currsize == 1
    assert len({out.tobytes() for out, _ in results}) == len({grads.darrays["t"].tobytes() for _, grads in results}) == 3


def test_functions_are_traced_anew_and_planned_once():
    q, k, v = Call(GRID).inputs()

    def scaled(factor):
        return lambda score: score * factor

    plans = [plan_attention(q, k, v, score=scaled(factor)) for factor in (2.0, 2.0, 3.0)]
    assert plans[0] is plans[1] is not plans[2]
    outs = [attention(q, k, v, score=scaled(factor)) for factor in (2.0, 3.0)]
    assert abs(outs[0] - outs[1]).max() > 1e-3


def test_equal_texts_have_equal_problems():
    q, k, v = Call(GRID).inputs()
    texts = "score * 2 + h", " score*2.0+h ", "(score * 2) + h", lambda score, h: score * 2 + h
    problems = {plan_attention(q, k, v, score=text).problem for text in texts}
    assert len(problems) == 1
    assert plan_attention(q, k, v, score="h + score * 2").problem not in problems


def test_the_order_of_a_dict_is_nothing():
    q, k, v = Call(GRID).inputs()
    arrays = {"t": normal(6), "c": 0.5}
    backwards = dict(reversed(arrays.items()))
    assert plan_attention(q, k, v, score="t[h] + c", arrays=arrays) is plan_attention(q, k, v, score="t[h] + c", arrays=backwards)
    same_bits(*(attention(q, k, v, score="score * t[h] + c", arrays=x) for x in (arrays, backwards)))


def test_plans_compute_what_the_functions_do():
    call = Call(GRID)
    q, k, v = call.inputs()
    dout, _ = call.cotangents()
    plan = plan_attention(q, k, v, **options_of_a_plan(call, 0), return_lse=True)
    wrt = ("t", "bias", "alibi_slopes")
    for value in range(2):
        options = options_of_a_plan(call, value)
        given = {name: options[name] for name in ("bias", "alibi_slopes", "seed", "arrays")}
        out, lse = attention(q, k, v, **options, return_lse=True)
        for a, b in zip(plan(q, k, v, **given), (out, lse)):
            same_bits(a, b)
        backward = plan_attention_backward(dout, q, k, v, out, lse, **options_of_a_plan(call, 5), wrt=wrt)
        grads = attention_backward(dout, q, k, v, out, lse, **options, wrt=wrt)
        again = backward(dout, q, k, v, out, lse, **given)
        for a, b in zip((*grads, grads.dbias, *grads.darrays.values()), (*again, again.dbias, *again.darrays.values())):
            same_bits(a, b)


def test_where_a_scalar_or_a_seed_lies_makes_no_other_plan():
    """They are told by their values: any address will do, and any stride."""
    q, k, v = Call(GRID).inputs()
    memory, seeds = numpy.frombuffer(bytearray(64), numpy.uint8).copy(), numpy.arange(8, dtype=numpy.uint64)
    scalars = [numpy.array(0.0), *(memory[at : at + 8].view("f8").reshape(()) for at in (0, 1, 8))]
    options = [
        {"arrays": {"c": c}, "seed": seed}
        for c in scalars
        for seed in (5, seeds[:2], seeds[1:3], seeds[::3][:2], memory[3:19].view("u8"))
    ]
    plans = {id(plan_attention(q, k, v, score="score + c", dropout=0.5, **other)) for other in options}
    assert len(plans) == 1
    plan = plan_attention(q, k, v, score="score + c", dropout=0.5, **options[0])
    for other in options:
        same_bits(plan(q, k, v, **other), attention(q, k, v, score="score + c", dropout=0.5, **other))


def test_plans_print_what_becomes_of_scores():
    q, k, v = Call(GRID).inputs()
    text = str(plan_attention(q, k, v, **options_of_a_plan(None, 1)))
    for part in ("score: score * t[h] + c", "its derivative: t[h]", "with respect to t[h]: score", "mask: doc[kv_idx] == doc["):
        assert part in text
    assert "bias: float64, shape (2, 6, 13, 21), strides (0, 0, 21, 1)" in text and "dropout: leaves out 0." in text


def test_plans_say_that_a_mask_hides_more():
    q, k, v = (numpy.ones((2, 5, 4)) for _ in range(3))
    out, lse = attention(q, k, v, return_lse=True)
    for mask in ("q_idx >= kv_idx", numpy.tri(5, dtype=bool)):
        for plan in (plan_attention(q, k, v, mask=mask), plan_attention_backward(q, q, k, v, out, lse, mask=mask)):
            assert ", unless mask hides them; scale 0.5; " in str(plan) and " FLOPs without mask\n" in str(plan)
    assert "query i sees keys 0 ... 4; scale 0.5; " in str(plan_attention(q, k, v)) and " FLOPs\n" in str(plan_attention(q, k, v))


# Random combinations


@st.composite
def calls(draw):
    """Any options with any others, on lengths around the edges of small tiles."""
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2), (1, 3)]))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    len_q, len_kv = (draw(st.sampled_from((1, 2, 3, 7, 8, 9, 15, 16, 17, 23))) for _ in range(2))
    grid = Grid.of(batch, heads_kv * group, heads_kv, len_q, len_kv)
    heads = heads_kv * group
    dims = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    flat = batch == () and heads == 1 and draw(st.booleans())
    told = {"scale": draw(st.sampled_from((-1.5, 0.0, 0.25, 1.0, 2.0)))} if draw(st.booleans()) else {}
    call = Call(grid, "float64", *dims, draw(st.integers(0, 10**6)), dict(told), dict(told), draw(st.booleans()), flat)

    def maybe():
        return draw(st.integers(0, 2)) == 0

    def shape_of(*axes, least):
        kept = [n if draw(st.booleans()) else 1 for n in axes]
        return tuple(kept[draw(st.integers(0, len(kept) - least)) :])

    def placed(x):
        return draw(st.sampled_from((lambda x: x, strided, lambda x: x[..., ::-1])))(x)

    if maybe():
        call.options["layout"] = draw(st.sampled_from(("bhsd", "bshd")))
        flat = call.flat = False
    if draw(st.booleans()):
        call.expression(draw(st.sampled_from(SCORES)).name)
    kind = draw(st.sampled_from(("none", "text", "array")))
    if kind == "text":
        call.expression(draw(st.sampled_from(MASKS)).name)
    if kind == "array":
        shape = shape_of(*grid.shape, least=2)
        call.mask(placed(truths(*shape, rate=draw(st.sampled_from((0.1, 0.6, 0.95))), seed=call.seed)))
    if maybe():
        bias = call.normal(*shape_of(*grid.shape, least=2))
        bias = numpy.where(call.normal(*bias.shape) > 1.2, -numpy.inf, bias) if draw(st.booleans()) else bias
        call.both(bias=placed(bias))
    if maybe():
        call.both(alibi_slopes=placed(call.normal(*shape_of(*batch, heads, least=1))))
    if maybe():
        call.both(sinks=call.normal(*(draw(st.sampled_from(([], [1], [3])))), heads))
    if maybe():
        call.both(softcap=draw(st.sampled_from((0.5, 3.0, 30.0))))
    if draw(st.booleans()):
        ends = st.none() | st.integers(-1, 9)
        left, right = (None if end == -1 else end for end in (draw(ends), draw(ends)))
        prefix = draw(st.integers(0, 9)) if left is None else 0
        call.band(draw(st.sampled_from((False, True, "top_left"))), (left, right), prefix)
    if maybe():
        seed = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1))
        form = draw(st.sampled_from((tuple, list, lambda pair: numpy.array(pair, numpy.uint64))))
        call.dropout(draw(st.sampled_from((1e-3, 0.25, 0.7))), form(seed), seed)
    wrt = tuple(name for name in call.wrt if draw(st.booleans()))
    return call, wrt, draw(st.sampled_from(((8, 8), (16, 8), (3, 5), (256, 512))))


def check_random(drawn):
    call, wrt, sizes = drawn
    with blocks(*sizes):
        call.check(wrt)


no_health_check = settings(suppress_health_check=list(HealthCheck), database=None, derandomize=True)


@settings(no_health_check, max_examples=150)
@given(calls())
def test_random_combinations(drawn):
    check_random(drawn)


@pytest.mark.release
@settings(no_health_check, max_examples=2500)
@given(calls())
def test_many_random_combinations(drawn):
    check_random(drawn)
