"""Arrays with an element for each pair where sequences end before their room: an odd number of keys in an even one.

Kernels read the elements of two keys at once, which lie at an even place. The last key of such a sequence is the first of two.
"""

import numpy
import pytest

from cupy_flash import attention, attention_backward, plan_attention, plan_attention_backward

LENGTHS = {"seqlens_q": numpy.array([7, 80]), "seqlens_kv": numpy.array([13, 91])}
WHERE = {"backend": "host", "arch": "80"}


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.release)])
def test_an_odd_number_of_keys_in_an_even_room(dtype):
    rng = numpy.random.default_rng(0)
    dout, q = rng.standard_normal((2, 2, 2, 80, 64)).astype("float16")
    k, v = rng.standard_normal((2, 2, 1, 96, 64)).astype("float16")
    options = {"bias": (3 * rng.standard_normal((2, 80, 96))).astype(dtype), "mask": rng.random((2, 1, 80, 96)) < 0.5}
    out, lse = attention(q, k, v, return_lse=True, **options, **LENGTHS)
    expected = attention_backward(dout, q, k, v, out, lse, wrt=(), **options, **LENGTHS)

    forward = plan_attention(q, k, v, return_lse=True, **options, **LENGTHS, **WHERE)
    given = (dout, q, k, v, out, lse)
    backward = plan_attention_backward(*given, wrt=(), **options, **LENGTHS, **WHERE)
    for plan in (forward, backward):
        constants = dict(plan.kernel.expressions.constants)
        assert constants["BIAS_BY_TWO"] == constants["MASK_BY_TWO"] == "true" and plan.kernel.config.VARLEN
    results = (*forward(q, k, v, **options, **LENGTHS), *backward(*given, **options, **LENGTHS))
    for got, right in zip(results, (out, lse, *expected), strict=True):
        finite = numpy.isfinite(right)
        assert (numpy.isfinite(got) == finite).all()
        assert abs(got[finite].astype(float) - right[finite]).max() <= 2**-8 * abs(right[finite].astype(float)).max()
