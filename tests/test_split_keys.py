"""Few queries with many keys in fwd_v2: what blocks that share a query tile hand on has the room that they take."""

import numpy as np
import pytest

from cupy_flash import append_kv, attention, plan_attention
from cupy_flash.judge.compare import compare


@pytest.mark.parametrize(
    "dtype, group, queries", [("float32", 2, 1), ("float32", 1, 17), ("float16", 1, 3), ("float16", 5, 16)], ids=str
)
def test_splits_stay_in_their_workspace(dtype, group, queries):
    """Warps store all of their rows, 16 or 32, whichever of these exist."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, group, queries, 40)).astype(dtype)
    k, v = rng.standard_normal((2, 1, 1, 2100, 40)).astype(dtype)
    plan = plan_attention(q, k, v, backend="host", kernel="fwd_v2", return_lse=True)
    assert plan.kernel.config.SPLIT_KV
    size = plan.workspace_bytes
    memory = np.full(size + 2**16, 77, np.uint8)
    out, lse = plan(q, k, v, workspace=memory[:size])
    assert (memory[size:] == 77).all()
    comparison = compare(out, lse, q, k, v, scale=40**-0.5)
    assert comparison.ok, comparison.message


@pytest.mark.parametrize("backend", ["numpy", pytest.param("host", marks=pytest.mark.release)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_few_queries_on_caches(backend, dtype):
    """One split, two and three: in a batch and alone, in caches of other capacities, packed, and in pages."""
    rng, lengths = np.random.default_rng(0), np.array([37, 2500, 3100])
    q = rng.standard_normal((3, 4, 1, 64)).astype(dtype)
    k, v = rng.standard_normal((2, 3, 2, 3104, 64)).astype(dtype)

    def computed(q, k, v, **options):
        return attention(q, k, v, backend=backend, **options)

    expected = computed(q, k, v, seqlens_kv=lengths)
    found = [computed(q[b : b + 1], k[b : b + 1], v[b : b + 1], seqlens_kv=lengths[b : b + 1]) for b in range(3)]
    assert np.array_equal(expected, np.concatenate(found))
    assert np.array_equal(expected[:2], computed(q[:2], k[:2, :, :2504], v[:2, :, :2504], seqlens_kv=lengths[:2]))
    assert np.array_equal(expected[:1], computed(q[:1], k[:1, :, :64], v[:1, :, :64], seqlens_kv=lengths[:1]))
    which = np.array([2, 0])
    assert np.array_equal(expected[which], computed(q[which], k, v, cache_batch_idx=which, seqlens_kv=lengths[which]))
    packed = [np.concatenate([x[b, :, :length] for b, length in enumerate(lengths)], axis=1) for x in (k, v)]
    assert np.array_equal(expected, computed(q, *packed, cu_seqlens_kv=np.concatenate([[0], lengths.cumsum()])))
    for page_size in (16, 48):
        most = -(-3104 // page_size)
        pages = rng.permutation(3 * most).reshape(3, most)
        pool = np.full((2, 3 * most, 2, page_size, 64), np.nan, dtype)
        append_kv(*pool, k, v, 0, seqlens_new=lengths, pages=pages)
        assert np.array_equal(expected, computed(q, *pool, pages=pages, seqlens_kv=lengths))
