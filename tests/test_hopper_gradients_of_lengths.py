"""Packed gradients by the backwards for sm_90a, and keys in pages by its forward: which kernel, and poison behind every end."""

import numpy
import pytest

from cupy_flash import attention, plan_attention, plan_attention_backward
from cupy_flash.machine import source

LENS_Q, LENS_KV = (70, 0, 130, 33), (70, 5, 90, 0)
ROWS_BEHIND = 21


def packed(rng, heads, lens, dim):
    """Rows of all sequences, NaN behind the last one, and where each begins."""
    x = rng.standard_normal((heads, sum(lens) + ROWS_BEHIND, dim)).astype(numpy.float16)
    x[:, sum(lens) :] = numpy.nan
    return x, numpy.cumsum((0, *lens)).astype(numpy.int32)


@pytest.mark.parametrize("schedule", ["eager", "deferred"])
@pytest.mark.parametrize(
    "dim, deterministic, file",
    [(64, False, "bwd_hopper"), pytest.param(128, True, "bwd_hopper", marks=pytest.mark.release), (192, True, "bwd_hopper_wide")],
)
def test_gradients_of_packed_sequences(dim, deterministic, file, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    rng = numpy.random.default_rng(5)
    (q, of_q), (dout, _) = (packed(rng, 4, LENS_Q, dim) for _ in range(2))
    (k, of_kv), (v, _) = (packed(rng, 2, LENS_KV, dim) for _ in range(2))
    given = {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv}
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend="numpy", **given)
    arrays = dout, q, k, v, out, lse
    plan = plan_attention_backward(*arrays, causal=True, deterministic=deterministic, backend="host", arch="90a", **given)
    assert plan.kernel.file == file and plan.kernel.config.VARLEN
    found = plan(*arrays, **given)
    for i, (rows, keys) in enumerate(zip(LENS_Q, LENS_KV)):
        of, at = slice(of_q[i], of_q[i] + rows), slice(of_kv[i], of_kv[i] + keys)
        if rows == 0 or keys == 0:
            assert not any(x.any() for x in (found.dq[:, of], found.dk[:, at], found.dv[:, at]))
            continue
        alone = [x[:, of] for x in (dout, q)] + [x[:, at] for x in (k, v)] + [out[:, of], lse[:, of]]
        expected = plan_attention_backward(*alone, causal=True, backend="numpy")(*alone)
        for mine, right in zip((found.dq[:, of], found.dk[:, at], found.dv[:, at]), expected):
            numpy.testing.assert_allclose(mine.astype(float), right.astype(float), atol=2e-2, rtol=2e-2)
    assert not any(x[:, sum(lens) :].any() for x, lens in zip(found, (LENS_Q, LENS_KV, LENS_KV)))


def test_blocks_write_their_own_sequence(change_kernel, poisoned_results):
    """The last sequence's blocks come first, so that nobody writes over what another leaves there. Each has its own slopes."""
    text, forwards = source.files()["tile/scheduler.cuh"], "p.first_tiles : block_id(); }"
    assert text.count(forwards) == 1
    change_kernel("tile/scheduler.cuh", text.replace(forwards, "p.first_tiles : p.owners - 1 - block_id(); }"))
    rng, dim, lens, heads = numpy.random.default_rng(7), 64, (70, 5, 90, 33), 3  # none a multiple of the rows that leave at once
    (q, of), (k, _), (v, _), (dout, _) = (packed(rng, heads, lens, dim) for _ in range(4))
    given = {"cu_seqlens_q": of, "cu_seqlens_kv": of}
    slopes = rng.uniform(0, 0.5, (len(lens), heads)).astype(numpy.float32)
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend="numpy", alibi_slopes=slopes, **given)
    arrays = dout, q, k, v, out, lse
    plan = plan_attention_backward(*arrays, causal=True, backend="host", arch="90a", alibi_slopes=slopes, **given)
    assert plan.kernel.file == "bwd_hopper" and plan.kernel.config.VARLEN
    found = plan(*arrays, alibi_slopes=slopes, **given)
    for i, rows in enumerate(lens):
        own, told = slice(of[i], of[i] + rows), {"alibi_slopes": slopes[i]}
        alone = [x[:, own] for x in arrays]
        expected = plan_attention_backward(*alone, causal=True, backend="numpy", **told)(*alone, **told)
        for mine, right in zip(found, expected):
            numpy.testing.assert_allclose(mine[:, own].astype(float), right.astype(float), atol=2e-2, rtol=2e-2)
    assert not any(x[:, sum(lens) :].any() for x in found)


@pytest.mark.parametrize("page, copied", [(16, False), (48, False), (3, True), (1, True)])
def test_keys_in_pages(page, copied):
    """Entries that no key needs are absurd, and what no key fills is NaN."""
    rng, dim, lens = numpy.random.default_rng(6), 64, numpy.array([150, 0, 77], numpy.int32)
    used = -(-lens // page)
    table = numpy.full((len(lens), used.max() + 1), 2**31 - 1, numpy.int32)
    numbers = iter(rng.permutation(used.sum()).tolist())
    pools = [numpy.full((used.sum(), 2, page, dim), numpy.nan, numpy.float16) for _ in "kv"]
    rows = [[rng.standard_normal((2, n, dim)).astype(numpy.float16) for n in lens] for _ in "kv"]
    for i, n in enumerate(lens):
        table[i, : used[i]] = [next(numbers) for _ in range(used[i])]
        for pool, of in zip(pools, rows):
            for key in range(n):
                pool[table[i, key // page], :, key % page] = of[i][:, key]
    q = rng.standard_normal((len(lens), 4, 70, dim)).astype(numpy.float16)
    given = {"seqlens_kv": lens, "pages": table}
    plan = plan_attention(q, *pools, causal=True, backend="host", arch="90a", **given)
    config = plan.kernel.config
    assert (plan.kernel.file, config.PAGED, config.PIECE == 0) == ("fwd_hopper", True, copied)
    out = plan(q, *pools, **given)
    for i in range(len(lens)):
        expected = attention(q[i], rows[0][i], rows[1][i], causal=True, backend="numpy")
        numpy.testing.assert_allclose(out[i].astype(float), expected.astype(float), atol=4e-3, rtol=4e-3)
