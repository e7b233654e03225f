"""Packed gradients by the backwards for sm_90a, and keys in pages by its forward: which kernel, and poison behind every end."""

from itertools import product

import numpy
import pytest
from thinned import quick

from cupy_flash import attention, attention_backward, plan_attention, plan_attention_backward
from cupy_flash.call.backward import _prepared
from cupy_flash.machine import source
from cupy_flash.plan.grouping import make_grouping

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
    text, forwards = source.files()["tile/scheduler.cuh"], "number() - p.first_tiles : number();"
    assert text.count(forwards) == 1
    change_kernel("tile/scheduler.cuh", text.replace(forwards, "number() - p.first_tiles : p.owners - 1 - number();"))
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


def by_other_ends(x, lens, is_packed):
    """The sequences of packed rows behind each other, or each in a batch element of its own, NaN behind it."""
    if is_packed:
        return x
    found = numpy.full((len(lens), x.shape[0], max(lens) + ROWS_BEHIND, *x.shape[2:]), numpy.nan, x.dtype)
    for i, rows in enumerate(lens):
        found[i, :, :rows] = x[:, sum(lens[:i]) : sum(lens[:i]) + rows]
    return found


ASKED = list(product([64, 128, 192], [True, False], [True, False], ["eager", "deferred"]))
QUICK = [(64, True, True, "deferred"), (64, True, False, "eager")]


@pytest.mark.parametrize("dim, q_packed, kv_packed, schedule", quick(ASKED, *QUICK, spread=True))
def test_last_heads_are_finished_by_blocks_of_their_own(dim, q_packed, kv_packed, schedule, monkeypatch, poisoned_results):
    """Of no head, of those of the last group and of all: the same bits. If one side alone is packed, heads end in another order."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    monkeypatch.setattr("cupy_flash.plan.grouping.IN_ORDER_BYTES", 1)  # so that there are several groups
    monkeypatch.setattr("cupy_flash.plan.grouping.ROWS_WORTH_SHARING", 0)
    rng, heads, heads_kv = numpy.random.default_rng(8), 10, 5
    lens_q, lens_kv = LENS_Q[::-1], LENS_KV[::-1]  # the last sequence has keys
    (q, of_q), (dout, _) = (packed(rng, heads, lens_q, dim) for _ in range(2))
    (k, of_kv), (v, _) = (packed(rng, heads_kv, lens_kv, dim) for _ in range(2))
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend="numpy", cu_seqlens_q=of_q, cu_seqlens_kv=of_kv)
    given = {"cu_seqlens_q": of_q} if q_packed else {"seqlens_q": numpy.array(lens_q, numpy.int32)}
    given |= {"cu_seqlens_kv": of_kv} if kv_packed else {"seqlens_kv": numpy.array(lens_kv, numpy.int32)}
    arrays = [by_other_ends(x, lens_q, q_packed) for x in (dout, q)] + [by_other_ends(x, lens_kv, kv_packed) for x in (k, v)]
    arrays += [by_other_ends(x, lens_q, q_packed) for x in (out, lse)]
    all_heads, found, written = heads * (len(lens_q) if not q_packed else 1), [], set()
    for last_blocks in (0, 1, 10**6):
        monkeypatch.setattr("cupy_flash.plan.grouping.LAST_BLOCKS", last_blocks)
        _prepared.cache_clear()
        plan = plan_attention_backward(*arrays, causal=True, deterministic=True, backend="host", arch="90a", **given)
        grouping, c = make_grouping(plan.kernel, plan.problem), plan.kernel.config
        others = max(all_heads - grouping.last_heads, 0)
        if q_packed != kv_packed or last_blocks == 0:
            assert others == 0
        else:
            assert others == all_heads if last_blocks > 1 else 0 < others < all_heads
        rows = arrays[1].shape[-2]
        tiles = rows // c.TILE_Q + len(lens_q) + 1 if q_packed else -(-rows // c.TILE_Q)
        assert plan.launches[1].blocks == grouping.owners + -(-others * tiles * (c.TILE_Q // 16) // c.WARPS)
        gradients, traffic = plan.counted(*arrays, **given)
        found.append(gradients)
        written.add(traffic.written_bytes)
    _prepared.cache_clear()
    assert len(written) == 1  # by one of them, not both
    for other in found[1:]:
        assert all(numpy.array_equal(a, b) for a, b in zip(found[0], other))
    judged = attention_backward(*(x[:, of_q[1] : of_q[2]] for x in (dout, q)), *(x[:, of_kv[1] : of_kv[2]] for x in (k, v)),
                                *(x[:, of_q[1] : of_q[2]] for x in (out, lse)), causal=True, backend="numpy")  # fmt: skip
    dq = found[0].dq[:, of_q[1] : of_q[2]] if q_packed else found[0].dq[1, :, : lens_q[1]]
    numpy.testing.assert_allclose(dq.astype(float), judged.dq.astype(float), atol=2e-2, rtol=2e-2)


PAGES = [(16, False), (48, False), (3, True), (1, True)]


@pytest.mark.parametrize("page, copied", quick(PAGES, (1, True), spread=True))
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


@pytest.mark.parametrize("sequences, rows, is_packed, shared", [
    (4, 8192, True, True), (4, 8191, True, False), (5, 8192, True, False), (2, 2048, False, True), (2, 2047, False, False),
])  # fmt: skip
def test_only_long_sequences_leave_dq_to_blocks_at_the_end(sequences, rows, is_packed, shared):
    """A last block has few rows of a short one, and of these there are many: it is the mean that a plan knows."""
    shape = (8, rows, 64) if is_packed else (sequences, 8, rows, 64)
    x, lse = numpy.empty(shape, numpy.float16), numpy.empty(shape[:-1], numpy.float32)
    names = ("cu_seqlens_q", "cu_seqlens_kv") if is_packed else ("seqlens_q", "seqlens_kv")
    given = dict.fromkeys(names, numpy.zeros(sequences + is_packed, numpy.int32))
    plan = plan_attention_backward(x, x, x, x, x, lse, causal=True, backend="host", arch="90a", **given)
    grouping = make_grouping(plan.kernel, plan.problem)
    assert plan.kernel.file == "bwd_hopper" and plan.launches[1].blocks == grouping.owners + grouping.finishing
    assert (grouping.finishing > 0) == shared
