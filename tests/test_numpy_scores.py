"""Scores on NumPy where nothing is masked, so that nothing else makes a new array of them."""

import numpy
import pytest

import cupy_flash

TABLE = numpy.linspace(-1, 1, 5 * 6, dtype="float32").reshape(5, 6)
OPTIONS = {  # options, and what they make of scores `(heads, 5, 6)`
    "score": ({"score": "score * 2"}, lambda s: s * 2),
    "the score as it is": ({"score": "score"}, lambda s: s),
    "one number": ({"score": "x", "arrays": {"x": 3.0}}, numpy.ones_like),
    "no score in it": ({"score": "x[q_idx, kv_idx]", "arrays": {"x": TABLE}}, lambda s: s * 0 + TABLE),
    "bias": ({"bias": TABLE}, lambda s: s + TABLE),
    "alibi_slopes": (
        {"alibi_slopes": numpy.float32([0.5, 2])},
        lambda s: s - numpy.float32([0.5, 2])[:, None, None] * abs(numpy.arange(5)[:, None] + 1 - numpy.arange(6)),
    ),
}


@pytest.mark.parametrize("options, made", OPTIONS.values(), ids=OPTIONS)
def test_scores_without_a_mask(options, made):
    q, k, v = numpy.random.default_rng(0).standard_normal((3, 2, 6, 4), "float32")
    q = q[:, :5]
    weights = numpy.exp(made(q @ k.swapaxes(1, 2) / 2))
    out, vjp = cupy_flash.attention_vjp(q, k, v, **options)
    numpy.testing.assert_allclose(out, weights / weights.sum(-1, keepdims=True) @ v, atol=1e-6)
    # Adding one vector to all values adds it to each result, so the gradients of values sum to those of results.
    numpy.testing.assert_allclose(vjp(out).dv.sum(axis=1), out.sum(axis=1), atol=1e-5)
