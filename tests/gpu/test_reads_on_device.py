"""Gradients of what scores read, whose blocks go through the tiles of a unit, and masks of few queries, by kernels of a device."""

from itertools import product

import few_queries
import numpy
import pytest
import walked_units
from score_kernels import given, judged

from cupy_flash import attention, attention_backward, plan_attention, plan_attention_backward

cupy = pytest.importorskip("cupy")


def is_hopper():
    return int(cupy.cuda.Device().compute_capability) == 90


def on_device(dtype, options, hand, wrt, inputs):
    return judged(dtype, options, hand, {}, cupy.asarray, cupy.asnumpy, wrt, inputs)


@pytest.mark.parametrize("asked", walked_units.ASKED[::9], ids=lambda asked: "-".join(map(str, asked)))
def test_arrays_of_scores(asked):
    example, besides, dim, dtype = asked
    options, hand = walked_units.BESIDES[besides]
    arrays, score = given(example, walked_units.GRID)
    options = {"score": example.text, "arrays": arrays, **options}
    on_device(dtype, options, hand | {"score": score}, tuple(score.arrays), walked_units.inputs(dtype, dim))


KINDS = list(product(few_queries.MASKS, few_queries.WITH, few_queries.LENGTHS))[::2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [few_queries.DIM, 128])
@pytest.mark.parametrize("asked", KINDS, ids=lambda asked: "-".join(map(str, asked)))
def test_masks_of_few_queries(asked, dim, dtype):
    name, besides, lengths = asked
    options, hand = few_queries.masked(name, besides, *lengths)
    forward, _ = on_device(dtype, options, hand, (), few_queries.inputs(dtype, *lengths, dim=dim))
    assert forward.file == "fwd_v2" and forward.config.PACK_GQA and forward.config.TILE_LIST


@pytest.mark.parametrize("queries", [1, 30])  # of four heads: a part of a tile, or two tiles
def test_a_mask_of_a_long_cache(queries):
    """Blocks share the keys that it leaves, of which there are more than a word of a list names."""
    rng = numpy.random.default_rng(0)
    q, k, v = (
        cupy.asarray(rng.standard_normal((4, heads, rows, 128)).astype(numpy.float16))
        for heads, rows in ((16, queries), (4, 9000), (4, 9000))
    )
    n = cupy.asarray(numpy.array([9000, 5000, 1, 0], numpy.int32))
    k[1, :, 5056:], v[1, :, 5056:] = numpy.nan, numpy.nan  # tiles that nobody sees
    out = attention(q, k, v, mask="kv_idx < n[b]", arrays={"n": n})
    for i, length in enumerate(n.tolist()):
        expected = attention(q[i], k[i, :, :length], v[i, :, :length])
        assert abs(out[i] - expected).max() <= 2**-9


TABLES = {  # by what a score adds or multiplies
    "score * t[h]": (4,),
    "score + t[h, max(-40, min(40, kv_idx - q_idx)) + 40]": (4, 81),
    "score + t[h, kv_idx]": (4, 2100),
    "score + t[h, q_idx] * kv_idx / 999": (4, 2100),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", TABLES)
def test_sums_of_many_tiles(score, causal):
    """Thirty times the same bits, and the sums that kernels of mma.sync make of the same numbers in float32."""
    rng = numpy.random.default_rng(0)
    q, k, v, dout = (cupy.asarray(rng.standard_normal((2, 4, 2100, 64)), cupy.float16) for _ in range(4))
    arrays = {"t": cupy.asarray(rng.standard_normal(TABLES[score]), cupy.float32)}
    options = {"score": score, "arrays": arrays, "causal": causal}
    given_ = (dout, q, k, v, *attention(q, k, v, return_lse=True, **options))
    plan = plan_attention_backward(*given_, wrt="t", **options)
    assert plan.kernels[1].file == ("bwd_scores_hopper" if is_hopper() else "bwd_scores")
    found = [plan(*given_, arrays=arrays).darrays["t"] for _ in range(30)]
    assert len({x.get().tobytes() for x in found}) == 1 and found[0].any()
    wide = [x.astype(cupy.float32) for x in given_[:5]]
    expected = attention_backward(*wide, given_[5], wrt="t", **options).darrays["t"]
    assert abs(found[0] - expected).max() <= 2**-10 * abs(expected).max()


def test_a_plan_tells_what_few_queries_have():
    q, k = cupy.zeros((2, 8, 1, 64), cupy.float16), cupy.zeros((2, 8, 4096, 64), cupy.float16)
    plan = plan_attention(q, k, k, mask="kv_idx % 3 > 0")
    assert (plan.kernel.file == "fwd_v2" and "few queries of which pairs are masked" in str(plan)) or not is_hopper()
