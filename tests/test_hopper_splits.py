"""Sequences with few query tiles in fwd_hopper: blocks share these, and how they do follows from one sequence alone."""

from dataclasses import replace

import ml_dtypes
import numpy
import pytest
from test_hopper_pages import in_pages
from thinned import quick, thinned

from cupy_flash import plan_attention
from cupy_flash.judge.compare import compare
from cupy_flash.machine import host, source
from cupy_flash.machine.host import SCHEDULES
from cupy_flash.plan import hopper_splits

LENS = (2600, 0, 1023, 2049, 40)  # three splits, none, one, two of which the last has one key, and fewer keys than queries
ROOM = 2700
SINKS = numpy.array([0.5, 7.0, -3.0, 0.0, 2.0, 1.0, -1.0, 0.3], numpy.float32)
HOST = {"backend": "host", "arch": "90a", "return_lse": True}
# Query heads on key heads, queries, dim and what is asked; rows of a key head fill no tile, one, and one and a half.
ASKED = {
    "heads together": ((8, 2), 50, 64, {"causal": True}),
    "one group of rows": ((8, 2), 20, 64, {"causal": True, "kernel": "fwd_hopper"}),
    "more queries": ((3, 1), 130, 64, {"causal": True}),
    "no mask": ((6, 1), 50, 128, {}),
    "sinks": ((8, 1), 50, 128, {"causal": True, "sinks": SINKS}),
    "softcap": ((8, 2), 40, 64, {"causal": True, "softcap": 5.0}),
    "top left": ((2, 1), 200, 64, {"causal": "top_left"}),
    "prefix": ((4, 1), 60, 64, {"causal": True, "prefix": 2000}),
    "wide": ((4, 1), 40, 256, {"causal": True}),
    "dims between": ((8, 2), 40, 96, {"causal": True}),
}


def drawn(name, dtype="float16"):
    """q, and k and v with poison behind each length, and what a plan is asked for."""
    (heads, heads_kv), queries, dim, asked = ASKED[name]
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rng = numpy.random.default_rng(3)
    shapes = (len(LENS), heads, queries, dim), *[(len(LENS), heads_kv, ROOM, dim)] * 2
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    for b, length in enumerate(LENS):
        k[b, :, length:] = v[b, :, length:] = numpy.nan
    return (q, k, v), asked


def computed(q, k, v, asked, options=HOST, unlisted=True, **lengths):
    plan = plan_attention(q, k, v, **lengths, **asked, **options)
    c = plan.kernel.config
    assert plan.kernel.file == "fwd_hopper" and c.SPLIT_KV and c.VARLEN and c.UNLISTED is unlisted
    return plan(q, k, v, **lengths, **{name: x for name, x in asked.items() if name == "sinks"})


def lengths_of(lens):
    return {"seqlens_kv": numpy.array(lens, numpy.int32)}


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        numpy.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


def meaning(asked, queries, keys, dim):
    """What the judge is told of a sequence."""
    last = {True: keys - queries, "top_left": 0}.get(asked.get("causal"))
    told = {} if last is None else {"last_key": last}
    return told | {name: asked[name] for name in ("softcap", "prefix", "sinks") if name in asked} | {"scale": dim**-0.5}


@pytest.mark.usefixtures("shorter_splits")
@pytest.mark.parametrize("schedule", thinned(SCHEDULES, first=1))
@pytest.mark.parametrize("name", quick(ASKED, "sinks"))
def test_right_and_the_same_bits_alone(name, schedule, monkeypatch):
    """All of them from a list, and those of each by the numbers of blocks."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    (q, k, v), asked = drawn(name)
    with monkeypatch.context() as listed:
        listed.setattr(hopper_splits, "ROUNDS", 0)
        out, lse = computed(q, k, v, asked, unlisted=False, **lengths_of(LENS))
    for b, length in enumerate(LENS):
        told = meaning(asked, q.shape[2], length, q.shape[3])
        comparison = compare(out[b], lse[b], q[b], k[b, :, :length], v[b, :, :length], **told)
        assert comparison.ok, (length, comparison.message)
        alone = computed(q[b : b + 1], k[b : b + 1], v[b : b + 1], asked, **lengths_of([length]))
        assert_same(alone, (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.usefixtures("shorter_splits")
@pytest.mark.release  # the bits of test_right_and_the_same_bits_alone
@pytest.mark.parametrize("name", ASKED)
def test_bits_do_not_depend_on_where_keys_lie(name):
    """In pages of several sizes, in other capacities, and in a cache with more elements."""
    (q, k, v), asked = drawn(name)
    expected = computed(q, k, v, asked, **lengths_of(LENS))
    which = numpy.array([3, 0])
    found = computed(q[which], k, v, asked, cache_batch_idx=which, **lengths_of([LENS[i] for i in which]))
    assert_same(found, [x[which] for x in expected])
    found = computed(q[2:3], k[2:3, :, :1100], v[2:3, :, :1100], asked, **lengths_of(LENS[2:3]))
    assert_same(found, [x[2:3] for x in expected])
    more = [numpy.concatenate([x, numpy.full_like(x, numpy.nan)], axis=2) for x in (k, v)]
    assert_same(computed(q[:1], *(x[:1] for x in more), asked, **lengths_of(LENS[:1])), [x[:1] for x in expected])
    if "softcap" in asked or "prefix" in asked:  # which are for fwd_v2 beside some pages
        return
    for size in (16, 48 if q.shape[3] % 64 == 0 else 64):
        pools, tables = zip(*(in_pages(x, LENS, size, numpy.random.default_rng(1)) for x in (k, v)))
        assert_same(computed(q, *pools, asked, pages=tables[0], **lengths_of(LENS)), expected)


@pytest.mark.usefixtures("shorter_splits")
def test_what_is_shared_stays_in_its_workspace():
    """Rows of splits that are no queries are neither stored nor read."""
    (q, k, v), asked = drawn("more queries", "bfloat16")
    given = lengths_of(LENS)
    plan = plan_attention(q, k, v, **given, **asked, **HOST)
    expected = plan(q, k, v, **given)
    size = plan.workspace_bytes
    memory = numpy.full(size + 2**16, 0xFF, numpy.uint8)  # NaN
    assert_same(plan(q, k, v, **given, workspace=memory[:size]), expected)
    assert (memory[size:] == 0xFF).all()
    [offset] = [at for at, (name, _) in zip(plan.workspace.offsets, plan.workspace.parts) if name == "out_partials"]
    parts = memory[offset : offset + dict(plan.workspace.parts)["out_partials"]].view(numpy.float32)
    config = plan.kernel.config
    of_tile = parts.reshape(len(LENS) * 3, 2, -1, config.WIDTH_V)  # two splits at most, of 144 rows, the last 14 of which are none
    assert of_tile.shape[2] == 144 and numpy.isnan(of_tile).any() and not numpy.isnan(of_tile[0]).any()


# How a kernel is planned


def planned(queries, heads=(32, 8), dim=128, room=8192, batch=1, **asked):
    q, k = numpy.zeros((batch, heads[0], queries, dim), numpy.float16), numpy.zeros((batch, heads[1], room, dim), numpy.float16)
    given = {"seqlens_kv": numpy.zeros(batch, numpy.int32)} | {name: asked.pop(name) for name in list(asked) if name == "seqlens_q"}
    return plan_attention(q, k, k, **given, **{"causal": True} | asked, **HOST)


@pytest.mark.parametrize(
    "queries, options, file, splits",
    [
        (1, {}, "fwd_v2", True),
        (4, {}, "fwd_v2", True),  # 16 rows of a key head
        (5, {}, "fwd_hopper", True),
        (16, {"heads": (8, 8)}, "fwd_v2", True),
        (17, {"heads": (8, 8)}, "fwd_hopper", True),
        (16, {"dim": 32}, "fwd_v2", True),
        (17, {"dim": 32}, "fwd_hopper", True),
        (8, {"dim": 64}, "fwd_v2", True),
        (9, {"dim": 64}, "fwd_hopper", True),
        (8, {"dim": 256}, "fwd_v2", True),
        (9, {"dim": 256}, "fwd_hopper", True),
        (64, {}, "fwd_hopper", True),
        (128, {}, "fwd_hopper", True),
        (512, {}, "fwd_hopper", False),  # 96 tiles
        (65, {"heads": (8, 8)}, "fwd_hopper", True),
        (64, {"window": (500, 0)}, "fwd_v2", True),
        (128, {"window": (500, 0)}, "fwd_hopper", False),
        (64, {"alibi_slopes": numpy.ones(32, numpy.float32)}, "fwd_v2", True),
        (128, {"seqlens_q": numpy.array([7])}, "fwd_hopper", False),
        (3, {"kernel": "fwd_hopper"}, "fwd_hopper", True),
        (64, {"kernel": "fwd_v2"}, "fwd_v2", True),
    ],
    ids=str,
)
def test_who_computes_few_queries(queries, options, file, splits):
    plan = planned(queries, **options)
    assert (plan.kernel.file, plan.kernel.config.SPLIT_KV) == (file, splits)


def test_a_kernel_depends_on_neither_batch_nor_room():
    """But for who says which split a block has."""
    for queries in (32, 64, 128):
        for options in ({}, {"window": (100, None)}, {"causal": False}):
            kernels = {planned(queries, room=room, batch=n, **options).kernel for room in (90, 500, 8192) for n in (1, 64)}
            listed = {replace(kernel, config=replace(kernel.config, UNLISTED=False)) for kernel in kernels}
            [kernel] = listed
            in_v2 = "window" in options and queries < 128
            assert kernel.file == ("fwd_v2" if in_v2 else "fwd_hopper") and len(kernels) == (1 if in_v2 else 2)


def test_a_sequence_alone_keeps_the_device_busy():
    """By as many splits as there are multiprocessors for its tiles, each of enough keys; in a small cache nothing is combined."""
    few, more = ((32, 8192, 8), (32, 65536, 16), (64, 65536, 8), (64, 1000, 1)), ((128, 8192, 1), (128, 16384, 2), (128, 65536, 4))
    for queries, room, most in (*few, *more):
        plan = planned(queries, room=room)
        computing, combining = plan.launches
        tiles = 8 * (1 if queries == 32 else 2) if queries <= 64 else 32
        assert computing.blocks == tiles * most and (combining.blocks > 0) is (most > 1)
        assert (plan.workspace_bytes < 1000) is (most == 1)
    wide = planned(64, dim=256)
    assert wide.launches[0].blocks == 8 * 2 * 4  # of 2,048 keys
    wide = planned(16, dim=256)
    assert wide.launches[0].blocks == 8 * 8  # of 1,024, where one group has all rows


def test_more_splits_than_two_rounds_of_blocks_come_from_a_list():
    plans = [planned(32, batch=batch) for batch in (4, 5)]  # of 8 heads and 8 splits each
    assert [[launch.entry for launch in plan.launches] for plan in plans] == [ENTRIES[1:], ENTRIES]
    assert [launch.blocks for launch in plans[1].launches[:2]] == [1, 5 * 64] and plans[0].launches[0].blocks == 4 * 64
    assert [plan.workspace.names[0] for plan in plans] == ["out_partials", "work"]
    assert ["no list of query tiles" in str(plan) for plan in plans] == [True, False]


ENTRIES = ["fwd_hopper_schedule", "fwd_hopper", "fwd_hopper_combine"]
CHANGES = {  # what breaks if a split is told of other keys than its own, or a tile of other splits than there are
    "keys": ("tile/work.cuh", "(int(split) + 1) * tiles}", "(int(split) + 2) * tiles}"),
    "number": ("tile/work.cuh", "tile * p.most_splits + split,", "tile * p.most_splits,"),
    "own": ("tile/own_tiles.cuh", "block_id() / p.most_splits;", "(block_id() + 1) / p.most_splits;"),
    "order": ("tile/combine.cuh", "splits.first + splits.is_one()", "splits.first + 1"),
}


@pytest.mark.parametrize("change", quick(CHANGES, "own"))
def test_a_wrong_share_is_noticed(change, monkeypatch):
    file, old, new = CHANGES[change]
    texts = dict(source.files())
    assert texts[file].count(old) == 1
    monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | {file: texts[file].replace(old, new)})
    (q, k, v), asked = drawn("heads together")
    out, lse = computed(q, k, v, asked, **lengths_of(LENS))
    told = meaning(asked, q.shape[2], LENS[0], q.shape[3])
    assert not compare(out[0], lse[0], q[0], k[0, :, : LENS[0]], v[0, :, : LENS[0]], **told).ok
