"""Scores, masks, biases, ALiBi and dropout by the kernels of a device."""

import numpy
import pytest
from hand_masks import MASKS
from hand_scores import SCORES
from score_kernels import BIASES, DIM, DTYPES, HEADS_KV, LEN_KV, PAIRS, everything, given, inputs, judged

from cupy_flash import UnsupportedError, attention, dropout_mask, plan_attention

cupy = pytest.importorskip("cupy")

HALVES = ["float16", "bfloat16"]
DTYPE = pytest.mark.parametrize("dtype", [*HALVES, "float32"])


def on_device(dtype, options, hand, **where):
    if dtype == "bfloat16" and int(cupy.cuda.Device().compute_capability) < 80:
        with pytest.raises(UnsupportedError, match="which has no bfloat16"):
            judged(dtype, options, hand, where, cupy.asarray, cupy.asnumpy)
    else:
        judged(dtype, options, hand, where, cupy.asarray, cupy.asnumpy)


@DTYPE
@pytest.mark.parametrize("example", SCORES, ids=str)
def test_scores(example, dtype):
    arrays, score = given(example)
    on_device(dtype, {"score": example.text, "arrays": arrays}, {"score": score})


@DTYPE
@pytest.mark.parametrize("example", MASKS, ids=str)
def test_masks(example, dtype):
    arrays, seen = given(example)
    on_device(dtype, {"mask": example.text, "arrays": arrays}, {"seen": seen})


@DTYPE
@pytest.mark.parametrize("shape", BIASES)
def test_biases(shape, dtype):
    bias = BIASES[shape](numpy.random.default_rng(2)).astype(DTYPES[dtype])
    on_device(dtype, {"bias": bias}, {"bias": bias})


@DTYPE
def test_everything_at_once(dtype):
    on_device(dtype, *everything(dtype))


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


def test_results_repeat():
    options, _ = everything("float16")
    options = {name: cupy.asarray(x) if isinstance(x, numpy.ndarray) else x for name, x in options.items()}
    options["arrays"] = {name: cupy.asarray(x) for name, x in options["arrays"].items()}
    q, k, v, _ = (cupy.asarray(x) for x in inputs("float16"))
    first = attention(q, k, v, **options)
    for _ in range(100):
        assert (attention(q, k, v, **options) == first).all()
