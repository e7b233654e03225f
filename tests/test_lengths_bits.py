"""The bits of a sequence with a length of its own, and of its gradients: nothing else in a batch changes one, nor how it lies."""

import numpy as np
import pytest

from cupy_flash import append_kv, attention, attention_vjp

LENGTHS = np.array([130, 40, 1, 77])
OFFSETS = np.concatenate([[0], LENGTHS.cumsum()])
backends = pytest.mark.parametrize("backend", ["numpy", pytest.param("host", marks=pytest.mark.release)])


def padded(x):
    rows = np.full((len(LENGTHS), x.shape[0], LENGTHS.max(), x.shape[2]), np.nan, x.dtype)
    for b, length in enumerate(LENGTHS):
        rows[b, :, :length] = x[:, OFFSETS[b] : OFFSETS[b + 1]]
    return rows


@backends
def test_results_and_gradients(backend):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 4, 248, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 2, 248, 64)).astype(np.float16)

    def computed(arrays, **lengths):
        *inputs, cotangent = arrays
        out, vjp = attention_vjp(*inputs, causal=True, backend=backend, deterministic=True, **lengths)
        return (out, *vjp(cotangent))

    def packed(arrays, offsets):
        return computed(arrays, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)

    arrays, second = (q, k, v, dout), slice(130, 170)
    every = packed(arrays, OFFSETS)
    alone = packed([x[:, second] for x in arrays], np.array([0, 40]))
    with_room = packed(arrays, OFFSETS[:3])
    apart = computed(map(padded, arrays), seqlens_q=LENGTHS, seqlens_kv=LENGTHS)
    for x, one, roomy, rows in zip(every, alone, with_room, apart):
        assert np.array_equal(x[:, second], one)
        assert np.array_equal(x[:, :170], roomy[:, :170]) and not roomy[:, 170:].any()
        assert all(np.array_equal(x[:, OFFSETS[b] : OFFSETS[b + 1]], rows[b, :, :n]) for b, n in enumerate(LENGTHS))


@backends
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_few_queries_on_caches(backend, dtype):
    """One split, two and three: in a batch and alone, in caches of other capacities, packed, and in pages."""
    rng, lengths = np.random.default_rng(0), np.array([37, 700, 1100])
    q = rng.standard_normal((3, 4, 1, 64)).astype(dtype)
    k, v = rng.standard_normal((2, 3, 2, 1104, 64)).astype(dtype)

    def computed(q, k, v, **options):
        return attention(q, k, v, backend=backend, **options)

    expected = computed(q, k, v, seqlens_kv=lengths)
    found = [computed(q[b : b + 1], k[b : b + 1], v[b : b + 1], seqlens_kv=lengths[b : b + 1]) for b in range(3)]
    assert np.array_equal(expected, np.concatenate(found))
    assert np.array_equal(expected[:2], computed(q[:2], k[:2, :, :704], v[:2, :, :704], seqlens_kv=lengths[:2]))
    assert np.array_equal(expected[:1], computed(q[:1], k[:1, :, :64], v[:1, :, :64], seqlens_kv=lengths[:1]))
    which = np.array([2, 0])
    assert np.array_equal(expected[which], computed(q[which], k, v, cache_batch_idx=which, seqlens_kv=lengths[which]))
    packed = [np.concatenate([x[b, :, :length] for b, length in enumerate(lengths)], axis=1) for x in (k, v)]
    assert np.array_equal(expected, computed(q, *packed, cu_seqlens_kv=np.concatenate([[0], lengths.cumsum()])))
    for page_size in (16, 48):
        most = -(-1104 // page_size)
        pages = rng.permutation(3 * most).reshape(3, most)
        pool = np.full((2, 3 * most, 2, page_size, 64), np.nan, dtype)
        append_kv(*pool, k, v, 0, seqlens_new=lengths, pages=pages)
        assert np.array_equal(expected, computed(q, *pool, pages=pages, seqlens_kv=lengths))
