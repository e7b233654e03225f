"""Sums of dq in order on a device: the first block stores, statistics by one warp, and sequences in another order than they lie."""

import ml_dtypes
import numpy
import pytest

from cupy_flash import attention, attention_backward, plan_attention_backward
from cupy_flash.call import backward
from cupy_flash.plan import backward as backward_plan

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="the Hopper backwards are for sm_90a"
)

SHAPES = [(8, 1024, 1024, 64), (6, 1000, 700, 128), (5, 900, 1100, 200), (4, 1700, 260, 96)]  # the last: TMA adds
MASKS = [{"causal": True}, {}, {"window": (200, 30)}]


def bits(x):
    return cupy.ascontiguousarray(x).view(numpy.uint16)


def operands(shapes, options, dtype=ml_dtypes.bfloat16):
    rng = cupy.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(shape, numpy.float32).astype(dtype) for shape in shapes)
    return dout, q, k, v, *attention(q, k, v, return_lse=True, **options)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("heads, len_q, len_kv, dim", SHAPES)
def test_the_first_block_stores(heads, len_q, len_kv, dim, options, monkeypatch):
    """In memory that holds NaN; the same bits each time, and as if all had been added to zeros."""
    given = operands([(2, heads, n, dim) for n in (len_q, len_kv, len_kv, len_q)], options)
    found = []
    for rows in (4096, 0):
        monkeypatch.setattr(backward_plan, "MOST_ROWS_STORED", rows)
        backward._prepared.cache_clear()
        plan = plan_attention_backward(*given, deterministic=True, **options)
        assert plan.kernel.file.startswith("bwd_hopper") and plan.kernel.config.FIRST_STORES is (rows > 0)
        found += [plan(*given, workspace=cupy.full(plan.workspace_bytes, 0xFF, numpy.uint8)) for _ in range(20)]
    backward._prepared.cache_clear()
    for other in found[1:]:
        for one, same in zip(found[0], other):
            assert bool((bits(one) == bits(same)).all())


@pytest.mark.parametrize("len_q", [1024, 4096], ids=["first stores", "zeros ahead"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_statistics_of_later_heads(dim, causal, len_q):
    given = operands([(4, 32, len_q, dim)] * 4, {"causal": causal})
    plan = plan_attention_backward(*given, causal=causal, deterministic=True)
    assert plan.kernel.config.IN_ORDER is not plan.kernel.config.TMA_REDUCE_DQ  # which leaves no warp
    found = [plan(*given, workspace=cupy.full(plan.workspace_bytes, 0xFF, numpy.uint8)) for _ in range(5)]
    expected = attention_backward(*given, causal=causal)
    for i, right in enumerate(expected[:3]):
        assert all(bool((bits(x[i]) == bits(found[0][i])).all()) for x in found)
        error = abs(found[0][i].astype("f4") - right.astype("f4")).max()
        assert float(error) <= 4 * 2**-8 * float(abs(right.astype("f4")).max())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_sequences_in_whichever_place(options, dim):
    """Each with the bits that it has alone, wherever it comes among others, with fewer of them or more."""
    rng, lens = numpy.random.default_rng(1), (700, 5, 1300, 64, 0, 300, 2100, 90)
    offsets = numpy.cumsum((0, *lens)).astype(numpy.int32)
    given = {"cu_seqlens_q": cupy.asarray(offsets), "cu_seqlens_kv": cupy.asarray(offsets)}
    arrays = operands([(16, int(offsets[-1]), dim)] * 4, options | given)
    together = attention_backward(*arrays, deterministic=True, **options, **given)
    for number in rng.permutation(len(lens))[:4]:
        rows = slice(offsets[number], offsets[number + 1])
        if rows.start == rows.stop:
            continue
        ends = cupy.asarray([0, rows.stop - rows.start], numpy.int32)
        alone = attention_backward(
            *(cupy.ascontiguousarray(x[:, rows]) for x in arrays),
            deterministic=True,
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            **options,
        )
        for one, other in zip(together[:3], alone[:3]):
            assert bool((bits(one[:, rows]) == bits(other)).all())
