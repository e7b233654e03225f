"""Scores, masks, biases, ALiBi and dropout by the kernels of a device."""

import masks_beside
import ml_dtypes
import numpy
import pytest
import sequences_with_bias
from dropout_beside import OF_BIAS, OF_MASK, with_bias, with_mask
from dropout_beside import inputs as inputs_beside
from hand_masks import MASKS
from hand_scores import SCORES
from score_calls import ends, seen_in_ranges
from score_kernels import BIASES, DIM, DTYPES, GRID, HEADS, HEADS_KV, LEN_KV, LEN_Q, PAIRS, everything, given, inputs, judged
from tile_masks import TILE_MASKS
from tile_masks import inputs as tile_inputs

from cupy_flash import (
    KeyRanges,
    TileMask,
    UnsupportedError,
    attention,
    attention_vjp,
    dropout_mask,
    plan_attention,
    plan_attention_backward,
)
from cupy_flash.judge.oracle import oracle

cupy = pytest.importorskip("cupy")

HALVES = ["float16", "bfloat16"]
DTYPE = pytest.mark.parametrize("dtype", [*HALVES, "float32"])


def capability():
    return int(cupy.cuda.Device().compute_capability)


def unless_refused(dtype, call):
    """What a call gives back; None where a device has no bfloat16, and says so."""
    if dtype == "bfloat16" and capability() < 80:
        with pytest.raises(UnsupportedError, match="which has no bfloat16"):
            call()
        return None
    return call()


def on_device(dtype, options, hand, wrt=(), inputs_given=None):
    return unless_refused(dtype, lambda: judged(dtype, options, hand, {}, cupy.asarray, cupy.asnumpy, wrt, inputs_given))


@DTYPE
@pytest.mark.parametrize("example", SCORES, ids=str)
def test_scores(example, dtype):
    arrays, score = given(example)
    on_device(dtype, {"score": example.text, "arrays": arrays}, {"score": score}, tuple(score.arrays))


@DTYPE
@pytest.mark.parametrize("example", MASKS, ids=str)
def test_masks(example, dtype):
    arrays, seen = given(example)
    on_device(dtype, {"mask": example.text, "arrays": arrays}, {"seen": seen})


@DTYPE
@pytest.mark.parametrize("shape", [(LEN_Q, 2), (2, HEADS, LEN_Q, 3), (1, 1)], ids=str)
def test_ranges(shape, dtype):
    start, stop = ends(*shape, keys=LEN_KV), ends(*shape, keys=LEN_KV, seed=1)
    hand = {"seen": seen_in_ranges(GRID, start, stop), "last_key": LEN_KV - LEN_Q}
    on_device(dtype, {"mask": KeyRanges(start, stop.astype(numpy.int32)), "causal": True}, hand)


@DTYPE
@pytest.mark.parametrize("shape", BIASES)
def test_biases(shape, dtype):
    bias = BIASES[shape](numpy.random.default_rng(2)).astype(DTYPES[dtype])
    on_device(dtype, {"bias": bias}, {"bias": bias}, "bias")


RNG = numpy.random.default_rng(6)
MANY_KEYS = 712  # more tiles than there are stages, the last one cut
OF_KEYS = RNG.standard_normal((2, MANY_KEYS)).astype(numpy.float32)
RISING = OF_KEYS + 40 * (numpy.arange(MANY_KEYS) >= 300).astype(numpy.float32)  # so that a tile is computed again
TERMS = {  # and what they amount to
    "rising": (RISING, RISING),
    "of 24 bits": (1000 * OF_KEYS, 1000 * OF_KEYS),
    "some -inf": [numpy.where(RNG.random(OF_KEYS.shape) < 0.3, numpy.float32("-inf"), OF_KEYS)] * 2,
    "tiles of -inf": [numpy.where(numpy.arange(MANY_KEYS) < [[300], [70]], numpy.float32("-inf"), OF_KEYS)] * 2,
    "padded": [numpy.where(numpy.arange(MANY_KEYS) < [[650], [64]], OF_KEYS, numpy.float32(x)) for x in (-1e9, -numpy.inf)],
    "padded from the left": [
        numpy.where(numpy.arange(MANY_KEYS) > [[650], [64]], OF_KEYS, numpy.float32(x)) for x in (-1e9, -numpy.inf)
    ],
}


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", TERMS)
def test_terms_of_keys(name, dtype, dim):
    """On sm_90a one more step of the product of queries and keys, which wgmma reads from shared memory by itself."""
    t, amount = TERMS[name]
    rng, shapes = numpy.random.default_rng(3), ((4, 150), (2, MANY_KEYS), (2, MANY_KEYS), (4, 150))
    given = [rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]
    options = {"score": "score + t[b, kv_idx]", "arrays": {"t": t}}
    hand = {"bias": amount.astype(float)[:, None, None]}
    plans = on_device(dtype, options, hand, inputs_given=given)
    assert plans is None or (plans[0].config.SCORES == "PLUS_COLUMN") is (capability() == 90)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES)
def test_large_terms_of_all_keys(dtype, dim):
    """On sm_90a as if nothing had been added. Elsewhere each score is rounded to multiples of 64, and all are alike."""
    rng, shapes = numpy.random.default_rng(3), ((4, 150), (2, MANY_KEYS), (2, MANY_KEYS))
    q, k, v = (rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes)
    t = numpy.full(MANY_KEYS, -1e9, numpy.float32)
    options = {"score": "score + t[kv_idx]", "arrays": {"t": cupy.asarray(t)}}
    out = unless_refused(dtype, lambda: attention(*map(cupy.asarray, (q, k, v)), **options))
    exact, _ = oracle(q if capability() == 90 else 0 * q, k, v, scale=dim**-0.5)
    bound = 2 * float(ml_dtypes.finfo(q.dtype).eps) * abs(exact).max()
    assert out is None or abs(cupy.asnumpy(out).astype(float) - exact).max() <= bound


READS = ("bias", "array")  # of each pair


def attend_with_terms(read, t, q, k, v):
    """Attention with these terms of pairs, in float64; None where a device has no bfloat16, whose range they need."""
    t = cupy.asarray(t.astype(q.dtype if read == "bias" else numpy.float32))
    options = {"bias": t} if read == "bias" else {"score": "score + t[q_idx, kv_idx]", "arrays": {"t": t}}
    out = unless_refused("bfloat16", lambda: attention(*map(cupy.asarray, (q, k, v)), **options))
    return None if out is None else cupy.asnumpy(out).astype(float)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("read", READS)
def test_large_terms_of_rows(read, dim):
    """In all of a row, which then has the result of others, and in its first keys, which then have no weight."""
    rng, shapes = numpy.random.default_rng(3), ((4, 150), (2, MANY_KEYS), (2, MANY_KEYS))
    q, k, v = (rng.standard_normal((2, *shape, dim)).astype(ml_dtypes.bfloat16) for shape in shapes)
    rounded, large, late = slice(20, 30), slice(70, 90), slice(120, 125)
    t = numpy.zeros((150, MANY_KEYS))
    t[rounded], t[large], t[late, :300] = -1e4, -1e9, -1e9
    out = attend_with_terms(read, t, q, k, v)
    exact, _ = oracle(q, k, v, scale=dim**-0.5)
    exact[..., large, :] = oracle(0 * q, k, v, scale=dim**-0.5)[0][..., large, :]  # rounded to multiples of 64, all are alike
    exact[..., late, :] = oracle(q[..., late, :], k[..., 300:, :], v[..., 300:, :], scale=dim**-0.5)[0]
    assert out is None or abs(out - exact).max() <= 2 * float(ml_dtypes.finfo(q.dtype).eps) * abs(exact).max()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("read", READS)
def test_a_product_does_not_start_from_large_terms(read, dim):
    """Each step of one that did would round the 0.3 that it adds to the score of every other key."""
    q = numpy.ones((2, 4, 150, dim), ml_dtypes.bfloat16)
    k, v = (numpy.zeros((2, 2, MANY_KEYS, dim), q.dtype) for _ in range(2))
    k[..., ::2, ::16] = 0.3
    v[..., ::2, :], v[..., 1::2, :] = 1, -1
    out = attend_with_terms(read, numpy.full((150, MANY_KEYS), -1e6), q, k, v)
    exact, _ = oracle(q, k, v, scale=dim**-0.5)
    rounding = float(numpy.spacing(numpy.float32(1e6 * dim**0.5))) * dim**-0.5  # of what two scores differ by, each rounded once
    assert out is None or abs(out - exact).max() <= rounding / 2 + float(ml_dtypes.finfo(q.dtype).eps) * abs(exact).max()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, len_q, len_kv", [(80, 210, 300), (4, 210, 2900)])
@pytest.mark.parametrize("dtype, dim", [("float16", 64), ("bfloat16", 128), ("float16", 192), ("bfloat16", 256)])
def test_linear_terms(dtype, heads, len_q, len_kv, causal, dim):
    """On sm_90a such a step too: distances, and what each head multiplies them by, of more query tiles than a device has blocks.

    Of fewer, blocks share tiles.
    """
    rng, heads_kv = numpy.random.default_rng(3), heads // 2
    shapes = (heads, len_q), (heads_kv, len_kv), (heads_kv, len_kv), (heads, len_q)
    given = [rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]
    slopes = rng.uniform(-1, 1, (2, heads)).astype(numpy.float32)  # of 24 bits, and of either sign
    far = numpy.arange(len_kv) - numpy.arange(len_q)[:, None]
    hand = {"bias": slopes.astype(float)[:, :, None, None] * far, "last_key": len_kv - len_q if causal else None}
    options = {"score": "score + slope[b, h] * (kv_idx - q_idx)", "arrays": {"slope": slopes}, "causal": causal}
    plans = on_device(dtype, options, hand, inputs_given=given)
    assert plans is None or (plans[0].config.SCORES == "PLUS_LINEAR") is (capability() == 90)
    assert plans is None or capability() != 90 or plans[0].config.SPLIT_KV is (heads == 4)


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_gradient_of_a_bias_that_pairs_do_not_share(dtype, causal, dim):
    """On sm_90a the backward stores it: in memory that was NaN, and the same bits each time."""
    capability = int(cupy.cuda.Device().compute_capability)
    if capability < 80 and dtype == "bfloat16":
        pytest.skip("a device without bfloat16 refuses it, as other tests here ask")
    rng, (len_q, len_kv) = numpy.random.default_rng(3), (333, 712)  # many tiles, the last ones cut
    shapes = (8, len_q), (2, len_kv), (2, len_kv), (8, len_q)
    q, k, v, dout = (rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes)
    bias = rng.standard_normal((2, 8, len_q, len_kv)).astype(DTYPES[dtype])
    options, hand = {"bias": bias, "causal": causal}, {"bias": bias, "last_key": len_kv - len_q if causal else None}
    _, kernel = judged(dtype, options, hand, {}, cupy.asarray, cupy.asnumpy, "bias", inputs_given=(q, k, v, dout))
    assert kernel.config.STORE_DBIAS is (capability == 90)
    _, vjp = attention_vjp(*map(cupy.asarray, (q, k, v)), bias=cupy.asarray(bias), causal=causal, wrt="bias")
    first = vjp(cupy.asarray(dout)).dbias.view(numpy.uint16)
    for _ in range(100):
        poison = cupy.full_like(first, 0xFFFF)
        del poison  # and the pool gives this memory to the next array of its size
        assert (vjp(cupy.asarray(dout)).dbias.view(numpy.uint16) == first).all()


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("shape", [(8, 333, 712), (333, 712)], ids=str)  # in one block each, and in parts
@pytest.mark.parametrize("bias_dtype", ["of q", "float32"])
def test_a_gradient_of_a_bias_that_pairs_share(bias_dtype, shape, dim):
    """On sm_90a by a kernel of its own: in memory that was NaN, and the same bits each time."""
    dtype = "bfloat16" if int(cupy.cuda.Device().compute_capability) >= 80 else "float16"
    rng, (len_q, len_kv) = numpy.random.default_rng(4), shape[-2:]
    shapes = (8, len_q), (2, len_kv), (2, len_kv), (8, len_q)
    q, k, v, dout = (rng.standard_normal((3, *own, dim)).astype(DTYPES[dtype]) for own in shapes)
    bias = rng.standard_normal(shape).astype(DTYPES[dtype if bias_dtype == "of q" else bias_dtype])
    hand = {"bias": bias, "last_key": len_kv - len_q}
    judged(dtype, {"bias": bias, "causal": True}, hand, {}, cupy.asarray, cupy.asnumpy, "bias", inputs_given=(q, k, v, dout))
    options = {"bias": cupy.asarray(bias)}
    given = [cupy.asarray(x) for x in (dout, q, k, v)]
    given += attention(*given[1:], **options, causal=True, return_lse=True)
    plan = plan_attention_backward(*given, **options, causal=True, wrt="bias")
    hopper = int(cupy.cuda.Device().compute_capability) == 90
    assert plan.kernels[1].file == ("bwd_scores_hopper" if hopper else "bwd_scores")
    first = plan(*given, **options).dbias.view(numpy.uint8)
    for _ in range(100):
        poison = cupy.full_like(first, 0xFF)
        del poison  # and the pool gives this memory to the next array of its size
        assert (plan(*given, **options).dbias.view(numpy.uint8) == first).all()


@pytest.mark.parametrize("case", OF_BIAS, ids=str)
def test_dropout_beside_a_bias(case):
    """On sm_90a the bias comes by TMA, in both directions to head dims of 192."""
    (dim, dtype), *_ = case
    options, hand = with_bias(case)
    plans = on_device(dtype, options, hand, "bias", inputs_given=inputs_beside(dim, dtype))
    assert plans is None or capability() != 90 or [plan.config.STAGED_BIAS for plan in plans] == [True, dim <= 192]


@pytest.mark.parametrize("case", OF_MASK, ids=str)
def test_dropout_of_what_a_mask_leaves(case):
    """On sm_90a bits say what that is."""
    (dim, dtype), *_ = case
    options, hand = with_mask(case)
    plans = on_device(dtype, options, hand, inputs_given=inputs_beside(dim, dtype))
    assert plans is None or capability() != 90 or all(plan.config.PAIR_BITS for plan in plans)


@pytest.mark.parametrize("case", masks_beside.CASES, ids=str)
def test_masks_and_dropout_beside_what_scores_become(case):
    """On sm_90a bits say what a mask leaves, whatever scores become."""
    (dim, dtype), _, _, mask, dropout = case
    plans = on_device(dtype, *masks_beside.problem(case), inputs_given=inputs_beside(dim, dtype))
    bits = capability() == 90 and mask != "none"
    assert {(plan.config.DROPOUT, plan.config.PAIR_BITS) for plan in plans or ()} <= {(dropout, bits)}


@pytest.mark.parametrize("case", masks_beside.TWO, ids=str)
def test_two_things_that_scores_go_through(case):
    (dim, dtype), _ = case
    plans = on_device(dtype, *masks_beside.two_things(case), inputs_given=inputs_beside(dim, dtype))
    assert plans is None or capability() != 90 or all(masks_beside.is_hopper(plan) for plan in plans)


@pytest.mark.parametrize("case", sequences_with_bias.CASES, ids=str)
def test_padded_sequences_with_a_bias(case):
    """On sm_90a it comes by TMA, in both directions to head dims of 192."""
    (dim, dtype), _, shape, _ = case
    plans = unless_refused(dtype, lambda: sequences_with_bias.judged(case, {}, cupy.asarray, cupy.asnumpy))
    if plans is not None and capability() == 90 and "float32" not in shape:
        forward, backward = plans
        assert forward.config.STAGED_BIAS and backward.kernel.config.STAGED_BIAS is (dim <= 192)


@DTYPE
def test_everything_at_once(dtype):
    on_device(dtype, *everything(dtype), ("bias", "alibi_slopes", "level"))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dropout_is_that_of_numpy(dtype):
    q, k, *_ = inputs(dtype)
    for first in range(0, LEN_KV, DIM):
        v = numpy.zeros((len(q), HEADS_KV, LEN_KV, DIM), q.dtype)
        keys = range(first, min(first + DIM, LEN_KV))
        for column, key in enumerate(keys):
            v[:, :, key, column] = 1
        out = attention(*map(cupy.asarray, (q, k, v)), dropout=0.4, seed=(5, 6))[..., : len(keys)]
        kept = dropout_mask(PAIRS, 0.4, (5, 6))[..., keys.start : keys.stop]
        numpy.testing.assert_array_equal(cupy.asnumpy(out != 0), kept)


def test_a_graph_draws_anew_with_another_seed():
    q, k, v, _ = (cupy.asarray(x) for x in inputs("float16"))
    seed, out = cupy.array([5, 6], cupy.uint64), cupy.empty_like(q)
    plan = plan_attention(q, k, v, dropout=0.4, seed=seed, out=out)
    plan(q, k, v, seed=seed, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        plan(q, k, v, seed=seed, out=out)
        graph = stream.end_capture()
        results = []
        for number in (5, 7):
            seed[0] = number
            graph.launch(stream)
            results.append(out.copy())
    stream.synchronize()
    for number, result in zip((5, 7), results):
        assert (result == attention(q, k, v, dropout=0.4, seed=(number, 6))).all()


def test_gradients_of_reads_repeat():
    q, k, v, dout = (cupy.asarray(x) for x in inputs("float16"))
    text = "score * t[h] + distance[kv_idx - q_idx + 60] + w[b, kv_idx] + number * score"
    rng = numpy.random.default_rng(0)
    shapes = {"t": PAIRS[1], "distance": 130, "w": (PAIRS[0], LEN_KV)}
    arrays = {name: cupy.asarray(rng.standard_normal(shape, numpy.float32)) for name, shape in shapes.items()} | {"number": 0.5}
    bias = cupy.asarray(rng.standard_normal(PAIRS[1:], numpy.float32))
    wrt = ("bias", *arrays)
    _, vjp = attention_vjp(q, k, v, score=text, arrays=arrays, bias=bias, wrt=wrt, deterministic=True)
    first = vjp(dout)
    assert isinstance(first.darrays["number"], cupy.ndarray) and first.darrays["number"].dtype == numpy.float64
    for _ in range(100):
        grads = vjp(dout)
        assert (grads.dbias == first.dbias).all()
        assert all((grads.darrays[name] == first.darrays[name]).all() for name in arrays)


def test_results_repeat():
    options, _ = everything("float16")
    options = {name: cupy.asarray(x) if isinstance(x, numpy.ndarray) else x for name, x in options.items()}
    options["arrays"] = {name: cupy.asarray(x) for name, x in options["arrays"].items()}
    q, k, v, _ = (cupy.asarray(x) for x in inputs("float16"))
    first = attention(q, k, v, **options)
    for _ in range(100):
        assert (attention(q, k, v, **options) == first).all()


# Lists of tiles


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", TILE_MASKS)
def test_tiles_that_are_left_out(name, deterministic):
    options, hand = TILE_MASKS[name]()
    judged("float16", options, hand, {}, cupy.asarray, cupy.asnumpy, inputs_given=tile_inputs(), deterministic=deterministic)


@pytest.mark.parametrize("name", ["documents", "blocks of heads", "causal, blocks"])
def test_what_a_tile_mask_keeps(name):
    """The bits of a call that finds the tiles itself, in every call, in order and again."""
    options, _ = TILE_MASKS[name]()
    q, k, v, dout = map(cupy.asarray, tile_inputs())
    options = {of: cupy.asarray(x) if isinstance(x, numpy.ndarray) else x for of, x in options.items()}
    arrays = {of: cupy.asarray(x) for of, x in options.pop("arrays", {}).items()}
    seen = options.pop("mask")
    mask = TileMask(seen, arrays)

    def computed(**of_mask):
        (out, lse), vjp = attention_vjp(q, k, v, return_lse=True, deterministic=True, **of_mask, **options)
        return [cupy.asnumpy(x) for x in (out, lse, *vjp(dout))]

    expected = computed(mask=seen, **({"arrays": arrays} if arrays else {}))
    for _ in range(20):
        for got, right in zip(computed(mask=mask), expected):
            numpy.testing.assert_array_equal(got, right)
        assert len(mask.found) == 2


def test_a_graph_finds_tiles_anew():
    """Of arrays that have changed; with a `TileMask`, it takes those that were found before."""
    q, k, v, dout = map(cupy.asarray, tile_inputs())
    doc = cupy.zeros(k.shape[-2], numpy.int32)
    asked = {"mask": "doc[kv_idx] == 0", "arrays": {"doc": doc}}
    forward = plan_attention(q, k, v, return_lse=True, **asked)
    out, lse = forward(q, k, v, arrays={"doc": doc})
    backward = plan_attention_backward(dout, q, k, v, out, lse, deterministic=True, **asked)
    gradients = backward(dout, q, k, v, out, lse, arrays={"doc": doc})
    spaces = [cupy.empty(plan.workspace_bytes, numpy.uint8) for plan in (forward, backward)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        forward(q, k, v, arrays={"doc": doc}, out=out, lse=lse, workspace=spaces[0])
        named = {f"d{name}": x for name, x in zip("qkv", gradients)}
        backward(dout, q, k, v, out, lse, arrays={"doc": doc}, **named, workspace=spaces[1])
        graph = stream.end_capture()
        for first in (0, 64, 130):
            doc[...] = cupy.arange(len(doc)) < first
            graph.launch(stream)
            anew = forward(q, k, v, arrays={"doc": doc})
            again = backward(dout, q, k, v, *anew, arrays={"doc": doc})
            for got, right in zip((out, lse, *gradients), (*anew, *again)):
                numpy.testing.assert_array_equal(cupy.asnumpy(got), cupy.asnumpy(right))
            assert not cupy.asnumpy(gradients.dk)[:, :, :first].any()
