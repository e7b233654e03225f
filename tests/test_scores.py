"""Scores and masks as expressions on NumPy, forward and backward, against the oracle."""

import itertools
import re

import numpy
import pytest
from hand_masks import MASKS
from hand_scores import SCORES, Grid
from score_calls import BFLOAT16, DTYPES, GRID, NAMED, TALL, Call, blocks, normal, same_bits, strided

from cupy_flash import attention, attention_vjp
from cupy_flash.problem.expression import trace

pytestmark = pytest.mark.filterwarnings("error")


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
