"""Terms that are linear on either side of a diagonal, by the kernels of a device."""

from itertools import product

import ml_dtypes
import numpy
import pytest
from score_kernels import DTYPES, judged

from cupy_flash import plan_attention

cupy = pytest.importorskip("cupy")
LEN_Q, LEN_KV = 700, 933  # off every tile edge
MORE = LEN_KV - LEN_Q
DIMS = {40: "float16", 64: "bfloat16", 128: "float16", 192: "bfloat16", 256: "float16"}
DOCUMENTS = numpy.arange(LEN_Q)[:, None] // 210 == numpy.arange(LEN_KV) // 210
BESIDE = {
    "nothing": ({}, {}),
    "window": ({"window": (300, 150)}, {"first_key": MORE - 300, "last_key": MORE + 150}),
    "documents": ({"mask": "q_idx // 210 == kv_idx // 210"}, {"seen": DOCUMENTS}),
}


def inputs(dim, dtype, len_q=LEN_Q, len_kv=LEN_KV):
    rng = numpy.random.default_rng(dim)
    shapes = (4, len_q), (2, len_kv), (2, len_kv), (4, len_q)
    return [rng.standard_normal((2, *rows, dim)).astype(DTYPES[dtype]) for rows in shapes]


@pytest.mark.parametrize("case", list(product(DIMS, BESIDE)), ids=str)
def test_alibi_where_queries_see_what_follows(case):
    dim, beside = case
    options, hand = BESIDE[beside]
    slopes = numpy.array([[1.0, 0.25, 0.5, 2.0**-8], [0.0, 2.0, 0.03, 0.1]], numpy.float32)
    options, hand = options | {"alibi_slopes": slopes}, hand | {"alibi_slopes": slopes}
    given = inputs(dim, DIMS[dim])
    judged(
        DIMS[dim],
        options,
        hand,
        {},
        cupy.asarray,
        cupy.asnumpy,
        "alibi_slopes" if beside != "documents" else (),
        inputs_given=given,
    )


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("slope", [3.0, 0.01])
def test_dropout_and_repeats(dim, slope):
    """The same bits each time; with slopes of 0 what there is without them."""
    q, k, v = map(cupy.asarray, inputs(dim, DIMS[dim])[:3])
    slopes = cupy.full(4, slope, numpy.float32)
    options = {"dropout": 0.25, "seed": 5}
    plan = plan_attention(q, k, v, alibi_slopes=slopes, **options)
    first = plan(q, k, v, alibi_slopes=slopes, seed=5)
    assert all((plan(q, k, v, alibi_slopes=slopes, seed=5).view(numpy.uint16) == first.view(numpy.uint16)).all() for _ in range(20))
    none = plan(q, k, v, alibi_slopes=0 * slopes, seed=5)
    without = plan_attention(q, k, v, **options)(q, k, v, seed=5)
    unit, largest = float(ml_dtypes.finfo(DTYPES[DIMS[dim]]).eps), abs(v.astype(numpy.float32)).max() / 0.75
    assert (
        abs(none.astype(numpy.float32) - without.astype(numpy.float32)).max() <= 2 * unit * largest
    )  # P and out are rounded, of each
