"""A list of key tiles for each consumer of fwd_hopper: what it names, and that what a consumer does not see is passed by."""

import math

import numpy
import pytest
from thinned import quick, thinned
from tile_masks import bits_of, kept

from cupy_flash import KeyRanges, TileMask, plan_attention
from cupy_flash.machine import host
from cupy_flash.plan.classify import CONSUMER_ROWS, rows_of_list


@pytest.fixture(params=thinned(host.SCHEDULES, first=1))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)
    return request.param


QUICK = [(128, 64, True)]
RARER = [(40, 160, False), (64, 64, False), (64, 128, True), (40, 96, False), (128, 128, False), (256, 256, False)]
DIMS = quick([*QUICK, *RARER], *QUICK, spread=True)


@pytest.mark.parametrize("dim, dim_v, long", DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bits", thinned([True, False]))
def test_consumers_of_a_query_tile_see_other_key_tiles(causal, dim, dim_v, long, bits, schedule, share_of_bits):
    """Documents that mostly begin within a query tile: in one key tile a consumer sees all pairs, another some and another none.

    There are four or three up to 128; the two of wider heads, or values, have one list together.
    """
    lens = (70, 200, 64, 130, 1, 171)
    doc = numpy.repeat(numpy.arange(len(lens)), lens).astype(numpy.int32)
    alone = doc[:, None] == doc
    pairs = alone & numpy.tri(len(doc), dtype=bool) if causal else alone
    rng = numpy.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, len(doc), width)).astype(numpy.float16) for width in (dim, dim, dim_v))
    ends = (numpy.stack([numpy.searchsorted(doc, doc, side), 0 * doc], -1) for side in ("left", "right"))
    share_of_bits(math.inf if bits else 0)
    mask = TileMask(KeyRanges(*ends)) if long else TileMask("doc[q_idx] == doc[kv_idx]", {"doc": doc})
    plan = plan_attention(q, k, v, backend="host", arch="90a", mask=mask, causal=causal)
    c, out = plan.kernel.config, plan(q, k, v, mask=mask)
    assert plan.kernel.file == "fwd_hopper" and c.TILE_LIST and bits == c.PAIR_BITS
    rows = rows_of_list(plan.kernel)
    apart = max(dim, dim_v) <= 128
    assert apart == c.OWN_LISTS and rows == (CONSUMER_ROWS if apart else c.TILE_Q)
    words, tile = -(-len(doc) // c.TILE_KV // 32), (rows, c.TILE_KV)
    steps = [range(0, len(doc), size) for size in tile]
    lists = kept(mask, 0)["tile_lists"].view(numpy.uint32)[: len(steps[0]) * 2 * words].reshape(-1, 2, words)
    some, every = (reduce.reduceat(reduce.reduceat(x, steps[0], axis=0), steps[1], axis=1)
                   for reduce, x in ((numpy.logical_or, pairs), (numpy.logical_and, pairs if bits else alone)))  # fmt: skip
    if bits:  # of all masks, and of pairs that exist
        for axis, size in enumerate(tile):
            every.swapaxes(0, axis)[len(doc) // size :] = False
    bits = bits_of(numpy.ascontiguousarray(lists), len(steps[1]))
    assert (bits[:, 0] == some).all() and (bits[:, 1] == every).all()
    consumers = c.TILE_Q // rows
    other = [some[first : first + consumers].any(0) & ~(some | every)[first : first + consumers].all(0)
             for first in range(0, len(some), consumers)]  # fmt: skip
    assert numpy.any(other) == apart  # a key tile that one consumer needs and another one does not
    scores = numpy.where(pairs, q.astype("f8") @ k.astype("f8").swapaxes(-1, -2) / dim**0.5, -numpy.inf)
    p = numpy.exp(scores - scores.max(-1, keepdims=True))
    expected = p @ v.astype("f8") / p.sum(-1, keepdims=True)
    numpy.testing.assert_allclose(out.astype("f8"), expected, rtol=0, atol=2**-8)


# Which key tiles each of four consumers sees. The first one and those that it sees have two products; behind those that it passes
# by there is one, of zeros and values.
SEEN_BY = {
    "own quarter": ((1, 0, 0, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0, 0, 0), (0, 0, 1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 1)),
    "others": ((1, 1, 1, 1, 1, 1, 1, 1), (1, 0, 1, 0, 1, 0, 1, 0), (0, 0, 0, 1, 1, 0, 0, 0), (1, 1, 1, 1, 0, 0, 0, 1)),
    "causal": ((1,) * 8,) * 4,
    "all of a word and more": ((1,) * 40, (0,) * 33 + (1,) * 7, (1,) * 31 + (0,) * 9, (1,) * 32 + (0,) * 4 + (1,) * 4),
}


@pytest.mark.parametrize("name", SEEN_BY)
@pytest.mark.parametrize("heads", [1, pytest.param(5, marks=pytest.mark.release)])
def test_key_tiles_that_a_consumer_does_not_see_are_passed_by(name, heads, schedule):
    shown = by_tile = numpy.array(SEEN_BY[name], bool)
    causal = name == "causal"  # no pair is masked one by one, and of the last key tiles most consumers see none
    if causal:
        by_tile = numpy.tri(4, 8, 4, dtype=bool)
    listed = by_tile[:, by_tile.any(0)]
    passed = numpy.where(numpy.arange(listed.shape[1]) > 0, ~listed, False)
    runs = (numpy.diff(passed.astype(int), axis=1) > 0).sum()
    products = 2 * (~passed).sum() + runs
    pairs = shown.repeat(64, 0).repeat(64, 1)
    if causal:
        pairs = pairs & numpy.tri(256, 512, 256, dtype=bool)
    rng = numpy.random.default_rng(7)
    q, k, v = (rng.standard_normal((heads, rows, 64)).astype(numpy.float16) for rows in (256, pairs.shape[1], pairs.shape[1]))
    arrays = {"of_query": (numpy.arange(256) // 64).astype(numpy.int32), "seen": shown.astype(numpy.int32)}
    mask = TileMask("seen[of_query[q_idx], kv_idx // 64] > 0", arrays)
    plan = plan_attention(q, k, v, backend="host", arch="90a", mask=mask, causal=causal)
    c = plan.kernel.config
    assert c.OWN_LISTS and (c.TILE_Q, c.TILE_KV) == (256, 64)
    plan(q, k, v, mask=mask)
    out, moved = plan.counted(q, k, v, mask=mask)
    begun = 4 * plan.launches[-1].on(host.MULTIPROCESSORS).blocks  # a block's first step multiplies values of nothing
    assert moved.flops == (heads * products + begun) * 2 * 64**3
    scores = numpy.where(pairs, q.astype("f8") @ k.astype("f8").swapaxes(-1, -2) / 8, -numpy.inf)
    p = numpy.exp(scores - scores.max(-1, keepdims=True))
    numpy.testing.assert_allclose(out.astype("f8"), p @ v.astype("f8") / p.sum(-1, keepdims=True), rtol=0, atol=2**-8)


def test_long_masks_have_tiles_of_fewer_groups(share_of_bits):
    """Four warpgroups have no registers for two ranges of keys, nor for many operations, if they ask."""
    share_of_bits(0)
    x = numpy.zeros((1, 2, 512, 64), numpy.float16)
    ends = numpy.zeros((512, 2), int), numpy.ones((512, 2), int)
    long = "(kv_idx - q_idx) % 7 == 0 or kv_idx < 100 and (q_idx > 5 or kv_idx // 16 != q_idx // 16)"
    one = KeyRanges(*(x[:, :1] for x in ends))
    for mask, groups in (("kv_idx <= q_idx or kv_idx < 100", 4), (one, 4), (KeyRanges(*ends), 3), (long, 3)):
        config = plan_attention(x, x, x, backend="host", arch="90a", mask=mask).kernel.config
        assert config.TILE_LIST and (64 * groups, 4 + 4 * groups) == (config.TILE_Q, config.WARPS)
    share_of_bits(math.inf)
    for mask in (one, KeyRanges(*ends), long, numpy.ones((512, 512), bool)):
        config = plan_attention(x, x, x, backend="host", arch="90a", mask=mask).kernel.config
        assert config.PAIR_BITS and config.TILE_Q == 256
