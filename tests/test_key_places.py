"""Where key tiles of sequences of their own lengths lie: what the launch before the backwards for sm_90a leaves for them."""

from itertools import product

import numpy
import pytest
from thinned import quick, thinned

from cupy_flash import attention, plan_attention_backward
from cupy_flash.machine import host, source
from cupy_flash.plan.structs import struct

FILES = {64: "bwd_hopper", 192: "bwd_hopper_wide"}
LENS_Q, LENS_KV = (150, 0, 300, 33, 70), (70, 5, 290, 0, 128)
BEHIND = 200  # rows that are no sequence's


def packed(rng, heads, lens, dim, dtype=numpy.float16):
    """Rows of all sequences, NaN behind the last one, and where each begins."""
    x = rng.standard_normal((heads, sum(lens) + BEHIND, dim)).astype(dtype)
    x[:, sum(lens) :] = numpy.nan
    return x, numpy.cumsum((0, *lens)).astype(numpy.int32)


def expected_tiles(begin, room, kept, tile):
    """(sequence, tile of it or -1) for each tile of packed rows; the last sequence is those behind all."""
    firsts = [start // tile + i for i, start in enumerate(begin)]
    found = []
    for number in range((begin[-1] + room[-1]) // tile + len(begin)):
        sequence = max(i for i, first in enumerate(firsts) if first <= number)
        own, count = number - firsts[sequence], -(-kept[sequence] // tile)
        found.append((sequence, -1 if own * tile >= room[sequence] else own, count))
    return found


def seen(tile, len_q, len_kv, tile_q, tile_kv, causal):
    """The first query tile that sees a key of the tile, and how many do."""
    last_key = min((tile + 1) * tile_kv, len_kv) - 1
    first = max(tile * tile_kv - (len_kv - len_q), 0) if causal else 0
    if tile < 0 or tile * tile_kv > last_key or first >= len_q:
        return None, 0
    return first // tile_q, (len_q - 1) // tile_q + 1 - first // tile_q


def places_of(plan, *arrays, **lengths):
    memory = plan.workspace.memory()
    found = plan(*arrays, workspace=memory, **lengths)
    return found, plan.workspace.on_host(memory)["key_places"].view(struct("KeyPlace"))


@pytest.mark.parametrize(
    "dim, causal, deterministic",
    quick(list(product(FILES, [True, False], [False, True])), (64, True, True), (192, False, False), spread=True),
)
def test_each_tile_of_packed_keys_has_its_place(dim, causal, deterministic):
    """Also of a sequence without keys or without queries, of tiles that no sequence has, and of rows behind all of them."""
    rng = numpy.random.default_rng(9)
    (q, of_q), (dout, _) = (packed(rng, 2, LENS_Q, dim) for _ in range(2))
    (k, of_kv), (v, _) = (packed(rng, 1, LENS_KV, dim) for _ in range(2))
    given = {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv}
    out, lse = attention(q, k, v, causal=causal, return_lse=True, backend="numpy", **given)
    arrays = dout, q, k, v, out, lse
    plan = plan_attention_backward(*arrays, causal=causal, deterministic=deterministic, backend="host", arch="90a", **given)
    assert plan.kernel.file == FILES[dim]
    tile_q, tile_kv = plan.kernel.config.TILE_Q, plan.kernel.config.TILE_KV
    _, places = places_of(plan, *arrays, **given)
    rooms = [(*lens, BEHIND) for lens in (LENS_Q, LENS_KV)]
    kept_q, kept_kv = (*LENS_Q, 0), (*LENS_KV, 0)
    tiles = expected_tiles(of_kv.tolist(), rooms[1], kept_kv, tile_kv)
    assert len(places) == len(tiles) and any(tile < 0 for _, tile, _ in tiles)
    tiles.sort(key=lambda of: (of[0] == len(LENS_Q), -kept_q[of[0]], of[0]))  # those with most queries first
    for place, (sequence, tile, count) in zip(places, tiles):
        if deterministic and causal and 0 <= tile < count:  # the last keys come first
            tile = count - 1 - tile
        assert (place["batch_number"], place["tile"]) == (sequence, tile)
        if tile < 0:
            continue
        own = {name: int(place[name]) for name in ("len_q", "len_kv", "begin_q", "room_q", "begin_kv", "room_kv")}
        assert own == {
            "len_q": kept_q[sequence],
            "len_kv": kept_kv[sequence],
            "begin_q": of_q[sequence],
            "room_q": rooms[0][sequence],
            "begin_kv": of_kv[sequence],
            "room_kv": rooms[1][sequence],
        }
        assert place["first_number"] == of_q[sequence] // tile_q + sequence
        assert place["batch"].tolist() == [0, sequence % len(LENS_Q)]
        first, number = seen(tile, kept_q[sequence], kept_kv[sequence], tile_q, tile_kv, causal)
        assert place["count"] == number and (number == 0 or place["first"] == first)
        if causal:
            assert (place["left"], place["right"] >= 1 << 30) == (kept_q[sequence] - kept_kv[sequence], True)


def order_of(offsets):
    """In which order tiles of packed sequences come: of each place the sequence, which sees its own keys."""
    x = numpy.zeros((1, max(offsets), 64), numpy.float16)
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), numpy.array(offsets, numpy.int32))
    arrays = x, x, x, x, x, numpy.zeros(x.shape[:2], numpy.float32)
    plan = plan_attention_backward(*arrays, backend="host", arch="90a", **given)
    assert plan.kernel.config.TILE_KV == 128
    return places_of(plan, *arrays, **given)[1]["batch_number"].tolist()


def test_longest_sequences_come_first(monkeypatch):
    """But of too many for one warp to ask. Tiles behind the last one stay where they are."""
    lens = (5, 300, 5, 700, 0)
    offsets = numpy.cumsum((0, *lens))
    found = order_of(offsets)
    assert found[:9] == 6 * [3] + 3 * [1] and found[9:] == [0, 2, 4, 5]
    few = {"tile/key_places.cuh": source.files()["tile/key_places.cuh"].replace("MOST_SORTED = 1024", "MOST_SORTED = 4")}
    assert few["tile/key_places.cuh"] != source.files()["tile/key_places.cuh"]
    monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | few)
    in_order = order_of(offsets)
    assert sorted(in_order) == sorted(found) and in_order == sorted(in_order)


def test_each_tile_has_a_place_whatever_offsets_are(monkeypatch):
    """Nobody sees on a device that they fall, or that the first is not 0: where they fall, tiles stay where they are."""
    monkeypatch.setattr("cupy_flash.call.backward.check_values", lambda *_: None)
    found = order_of((0, 300, 40, 700))
    assert len(found) == 700 // 128 + 4 and found == sorted(found) and set(found) <= set(range(4))
    assert order_of((256, 261, 561, 566)) == [0, 0, 1, 1, 1, 0, 2, 3]


@pytest.mark.parametrize("causal", [True, False])
def test_each_tile_of_padded_keys_has_its_place(causal):
    """Also tiles behind the last key, which no query sees. Sequences with most queries come first, with all of their tiles."""
    rng, number_of = numpy.random.default_rng(10), 5
    lens_q, lens_kv = numpy.array((130, 0, 90, 140, 1), numpy.int32), numpy.array((300, 260, 0, 70, 128), numpy.int32)
    q, dout = (rng.standard_normal((number_of, 2, 140, 64)).astype(numpy.float16) for _ in range(2))
    k, v = (rng.standard_normal((number_of, 1, 300, 64)).astype(numpy.float16) for _ in range(2))
    given = {"seqlens_q": lens_q, "seqlens_kv": lens_kv}
    out, lse = attention(q, k, v, causal=causal, return_lse=True, backend="numpy", **given)
    arrays = dout, q, k, v, out, lse
    plan = plan_attention_backward(*arrays, causal=causal, backend="host", arch="90a", **given)
    assert plan.kernel.config.FIRST_STORES is causal
    found, places = places_of(plan, *arrays, **given)
    tile_q, tile_kv = plan.kernel.config.TILE_Q, plan.kernel.config.TILE_KV
    tiles = -(-300 // tile_kv)
    assert len(places) == number_of * tiles
    order = (3, 0, 2, 4, 1)
    for number, place in enumerate(places):
        i, tile = order[number // tiles], number % tiles
        len_q, len_kv = lens_q[i], lens_kv[i]
        if causal and tile < (own := -(-len_kv // tile_kv)):  # in order, since the first to add stores, and from the last keys on
            tile = own - 1 - tile
        assert (place["batch_number"], place["tile"], place["batch"].tolist()) == (i, tile, [0, i])
        assert (place["begin_q"], place["room_q"], place["begin_kv"], place["room_kv"]) == (0, 140, 0, 300)
        assert (place["len_q"], place["len_kv"], place["first_number"]) == (len_q, len_kv, i * 2 * -(-140 // tile_q))
        first, count = seen(tile, len_q, len_kv, tile_q, tile_kv, causal)
        assert place["count"] == count and (count == 0 or place["first"] == first)
    for mine, right in zip(found, plan_attention_backward(*arrays, causal=causal, backend="numpy", **given)(*arrays, **given)):
        numpy.testing.assert_allclose(mine.astype(float), right.astype(float), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dim", FILES)
def test_more_key_tiles_than_query_blocks_have_warps(dim):
    rng = numpy.random.default_rng(11)
    (q, of_q), (dout, _) = (packed(rng, 1, (1,), dim) for _ in range(2))
    (k, of_kv), (v, _) = (packed(rng, 1, (3000,), dim) for _ in range(2))
    q, dout = q[:, :1], dout[:, :1]
    given = {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv}
    out, lse = attention(q, k, v, return_lse=True, backend="numpy", **given)
    arrays = dout, q, k, v, out, lse
    plan = plan_attention_backward(*arrays, backend="host", arch="90a", **given)
    found, places = places_of(plan, *arrays, **given)
    assert plan.kernel.file == FILES[dim] and len(places) > 2 * plan.kernel.config.WARPS
    for mine, right in zip(found, plan_attention_backward(*arrays, backend="numpy", **given)(*arrays, **given)):
        numpy.testing.assert_allclose(mine.astype(float), right.astype(float), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("side", thinned(["cu_seqlens", "seqlens"]))
def test_sums_of_several_blocks_have_places_of_their_own(side):
    """More query heads than one block counts share a head of keys, so that two blocks sum over the same keys."""
    rng, heads, dim, lens = numpy.random.default_rng(13), 34, 64, (70, 0, 140)
    if side == "cu_seqlens":
        (q, offsets), (dout, _) = (packed(rng, heads, lens, dim) for _ in range(2))
        (k, _), (v, _) = (packed(rng, 1, lens, dim) for _ in range(2))
    else:
        q, dout = (rng.standard_normal((len(lens), heads, 150, dim)).astype(numpy.float16) for _ in range(2))
        k, v = (rng.standard_normal((len(lens), 1, 150, dim)).astype(numpy.float16) for _ in range(2))
        offsets = numpy.array(lens, numpy.int32)
    given = {f"{side}_q": offsets, f"{side}_kv": offsets}
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend="numpy", **given)
    arrays = dout, q, k, v, out, lse
    plan = plan_attention_backward(*arrays, causal=True, backend="host", arch="90a", **given)
    assert plan.kernel.file == "bwd_hopper" and "dk_accum" in plan.workspace.names
    found = plan(*arrays, **given)
    for mine, right in zip(found, plan_attention_backward(*arrays, causal=True, backend="numpy", **given)(*arrays, **given)):
        numpy.testing.assert_allclose(mine.astype(float), right.astype(float), atol=5e-2, rtol=2e-2)


def test_a_block_of_the_launch_before_finds_as_many_places_as_it_has_warps():
    rng = numpy.random.default_rng(12)
    x, offsets = packed(rng, 1, (3,) * 30, 64)
    lse = numpy.zeros(x.shape[:2], numpy.float32)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    made = [
        plan_attention_backward(*(x,) * 5, lse, backend="host", arch=arch, **lengths)
        for arch, lengths in (("90a", given), ("90a", {}), ("80", given))
    ]
    blocks = [plan.launches[0].blocks for plan in made]
    c = made[0].kernel.config
    tiles = [x.shape[1] // tile + 31 for tile in (c.TILE_Q, c.TILE_KV)]
    assert blocks[0] == tiles[0] + -(-tiles[1] // c.WARPS)
    assert blocks[1] == -(-x.shape[1] // made[1].kernel.config.TILE_Q)
    assert blocks[2] == x.shape[1] // made[2].kernel.config.TILE_Q + 31
    assert dict(made[0].workspace.parts)["key_places"] == tiles[1] * struct("KeyPlace").itemsize == tiles[1] * 64
    assert not any("key_places" in plan.workspace.names for plan in made[1:])


def test_places_are_counted_where_they_are_written_and_read():
    """Keys are no sequence's here: with more of them there are more places, what finds these, and zeros as gradients."""

    def counted(heads, len_kv):
        q, k = (numpy.zeros((heads, n, 64), numpy.float16) for n in (1, len_kv))
        given = {"cu_seqlens_q": numpy.zeros(2, numpy.int32), "cu_seqlens_kv": numpy.zeros(2, numpy.int32)}
        arrays = q, q, k, k, q, numpy.zeros(q.shape[:2], numpy.float32)
        plan = plan_attention_backward(*arrays, backend="host", arch="90a", **given)
        return plan.counted(*arrays, **given)[1], dict(plan.workspace.parts)["key_places"], plan.kernel.config.WARPS

    traffic, places, warps = {}, {}, 0
    for heads in (1, 3):
        for len_kv in (1000, 2000):
            traffic[heads, len_kv], places[len_kv], warps = counted(heads, len_kv)
    more = places[2000] - places[1000]
    read = {h: traffic[h, 2000].read_bytes - traffic[h, 1000].read_bytes for h in (1, 3)}
    written = {h: traffic[h, 2000].written_bytes - traffic[h, 1000].written_bytes for h in (1, 3)}
    assert written == {h: more + h * 1000 * 64 * 2 * 2 for h in (1, 3)}  # places once for all heads, and dk and dv
    assert read[3] - read[1] == 2 * warps * more  # by each warp of a block
