"""Few queries with many keys in fwd_v2: what blocks that share a query tile hand on, and who combines it."""

import re

import numpy as np
import pytest
from combining import MARK, combined, counters
from thinned import quick, thinned

from cupy_flash import append_kv, attention, plan_attention
from cupy_flash.call.captured import captured
from cupy_flash.call.forward import ForwardOperands, prepared
from cupy_flash.judge.compare import compare
from cupy_flash.machine import host, source
from cupy_flash.machine.host import SCHEDULES

FEW = [("float32", 2, 1), ("float32", 1, 17), ("float16", 1, 3), ("float16", 5, 16)]


@pytest.mark.parametrize("dtype, group, queries", quick(FEW, *FEW[1:3], spread=True), ids=str)
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


# Who combines


def drawn(heads, queries, dim, keys, dtype="float16", heads_kv=2, batch=3):
    rng = np.random.default_rng(1)
    shapes = (batch, heads, queries, dim), *[(batch, heads_kv, keys, dim)] * 2
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


LENGTHS = {"seqlens_kv": np.array([37, 3100, 1030])}  # no split, several, and others that are empty
PAGES = {"pages": np.random.default_rng(2).permutation(3 * 195).reshape(3, 195)}
CALLED = {
    "one query": (drawn(4, 1, 64, 3104), LENGTHS),
    "without lengths": (drawn(2, 3, 40, 2050), {}),
    "a window": (drawn(4, 3, 128, 3104), LENGTHS | {"window": (1500, 0), "causal": True}),
    "sinks": (drawn(6, 2, 96, 3104), LENGTHS | {"sinks": np.array([[0.5] * 6, [7.0] * 6], np.float32), "causal": True}),
    "pages": (drawn(8, 1, 256, 3120), LENGTHS | PAGES),
    "ALiBi": (drawn(8, 1, 64, 3104, "float32"), LENGTHS | {"alibi_slopes": 2.0 ** -np.arange(8).astype(np.float32)}),
    "padded queries": (drawn(2, 9, 64, 3104), LENGTHS | {"seqlens_q": np.array([9, 0, 5])}),
    "two tiles": (drawn(4, 40, 192, 2050), {"causal": True}),
    "any strides": (drawn(4, 1, 64, 3104), LENGTHS | {"layout": "bshd"}),
}


def called(name):
    (q, k, v), options = CALLED[name]
    if "pages" in options:
        k, v = (x.reshape(2, 3 * 195, 16, -1).swapaxes(0, 1) for x in (k, v))
    if "layout" in options:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    plan = plan_attention(q, k, v, backend="host", kernel="fwd_v2", return_lse=True, **options)
    given = {n: x for n, x in options.items() if n.startswith(("seqlens", "pages", "sinks", "alibi"))}
    return plan, (q, k, v), given


@pytest.mark.parametrize("schedule", thinned(SCHEDULES))
@pytest.mark.parametrize("name", thinned(CALLED, keep=9, first=3))
def test_whoever_combines_leaves_the_same_bits(name, schedule, monkeypatch):
    """By a counter in memory that held anything, and again by what it was left as."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    plan, arrays, given = called(name)
    last, apart = combined(plan, True), combined(plan, False)
    assert [launch.entry for launch in last.launches] == ["fwd_v2"]
    assert [launch.entry for launch in apart.launches] == ["fwd_v2", "fwd_v2_combine"]
    expected = apart(*arrays, **given)
    size = last.workspace_bytes
    memory = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    before = counters(last, memory).copy()
    for _ in range(2):
        found = last(*arrays, **given, workspace=memory)
        assert all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(found, expected))
        after = counters(last, memory)
        assert ((after == MARK) | (after == before)).all() and (after == MARK).any()


# Blocks that arrive at counters, one counter after the other, and say what they find.
ARRIVING = """\
#include "config.cuh"
#include "params.cuh"
#include "tile/arrivals.cuh"
KERNEL(32 * WARPS, 1) fwd_v2(GRID_CONSTANT ForwardParams p) {
  u64* const counters = static_cast<u64*>(p.lse.data);
  for (int i = 0; i < 64; ++i) {
    sync_block();
    if (warp_id() == 0) count_arrival(counters + i, shared_memory());
    sync_block();
    if (warp_id() == 0) reinterpret_cast<u32*>(counters + 64)[i * 8 + block_id()] = load_shared<u32>(shared_memory());
  }
}
"""


@pytest.mark.parametrize("sanitize", ["", pytest.param("thread", marks=pytest.mark.release)])
def test_each_of_several_blocks_arrives_once(sanitize, monkeypatch):
    """Eight at a time, at memory that held anything, such as what becomes the mark by adding, and then at counters.

    Of those that find no mark each is slow to write it, so that others have added meanwhile, or written it.
    """
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", sanitize)
    texts, loop = {"fwd_v2.cu": ARRIVING, "tile/arrivals.cuh": source.files()["tile/arrivals.cuh"]}, "  for (++found;;) {"
    assert texts["tile/arrivals.cuh"].count(loop) == 1
    pause = "std::this_thread::sleep_for(std::chrono::milliseconds((block_id() * 3 + found) % 8));"
    texts["tile/arrivals.cuh"] = texts["tile/arrivals.cuh"].replace(loop, f"  {pause}\n{loop}")
    monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | texts)
    x = np.zeros((1024, 32), np.float16)
    plan = plan_attention(x, x, x, backend="host", kernel="fwd_v2", arch="80", return_lse=True)
    [launch] = plan.launches
    assert launch.blocks == 8
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(8 * plan.kernel.config.WARPS))
    lse = np.zeros(1024, np.float32)
    held, found = lse.view(np.uint64)[:64], lse.view(np.uint32)[128 : 128 + 64 * 8].reshape(64, 8)
    held[:] = np.random.default_rng(0).integers(0, 2**64, 64, np.uint64)
    held[:9] = [0, 2**64 - 1, 255, MARK, *(MARK - n for n in range(1, 6))]
    for _ in range(3):
        plan(x, x, x, lse=lse)
        assert (np.sort(found, axis=1) == np.arange(8)).all() and (held == MARK + 8).all()
        held[:] = MARK


@pytest.mark.parametrize("counts_early", thinned([False, True], first=1))
def test_splits_are_combined_when_all_rows_have_left(counts_early, monkeypatch):
    """Two blocks at a time: the second warp of a first split is late, when the other split has been left and counted."""
    q, kv = np.zeros((1, 60, 32), np.float16), np.ones((1, 1030, 32), np.float16)
    plan = combined(plan_attention(q, kv, kv, backend="host", arch="80", kernel="fwd_v2"), True)
    assert plan.kernel.config.TILE_Q == 64 and plan.kernel.config.WARPS == 4 and plan.launches[0].blocks == 2
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(2 * plan.kernel.config.WARPS))
    texts = {name: source.files()[name] for name in ("fwd_v2.cu", "tile/split.cuh")}
    storing, barrier = "    store_rows(", re.compile(r"sync_block\(\);(?=\s*// without it rows are missing)")
    assert texts["fwd_v2.cu"].count(storing) == len(barrier.findall(texts["tile/split.cuh"])) == 1
    late = "std::this_thread::sleep_for(std::chrono::milliseconds(split_of_block(p) ? 200 : 800 * (warp_id() == 1)));"
    texts["fwd_v2.cu"] = texts["fwd_v2.cu"].replace(storing, f"    {late}\n{storing}")
    if counts_early:
        texts["tile/split.cuh"] = barrier.sub("", texts["tile/split.cuh"])
    monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | texts)
    out, _ = plan(q, kv, kv)
    assert (out == 1).all() is not counts_early


# How a kernel is planned


@pytest.mark.parametrize("batch, heads", [(2, 0), (0, 2)])
def test_nothing_is_launched_for_nothing(batch, heads):
    q, kv = np.zeros((batch, heads, 1, 64), np.float16), np.zeros((batch, heads, 2000, 64), np.float16)
    plan = plan_attention(q, kv, kv, backend="host", kernel="fwd_v2")
    assert plan.kernel.config.SPLIT_KV and plan(q, kv, kv).shape == q.shape and [x.blocks for x in plan.launches] == [0]


@pytest.mark.parametrize("heads", [1, 4])
def test_a_window_is_split_by_the_keys_that_it_leaves(heads):
    """Where heads share a tile, a kernel is told of these alone; where not, splits are counted from the first that it leaves."""
    rng = np.random.default_rng(0)
    q, (k, v) = rng.standard_normal((heads, 2, 64)).astype("float16"), rng.standard_normal((2, 1, 3000, 64)).astype("float16")
    for left in (40, 2000):
        plan = plan_attention(q, k, v, backend="host", kernel="fwd_v2", window=(left, 0), return_lse=True)
        assert plan.kernel.config.SPLIT_KV is (left == 2000)
        comparison = compare(*plan(q, k, v), q, k, v, scale=1 / 8, first_key=2998 - left, last_key=2998)
        assert comparison.ok, comparison.message


# Queries, options, the first and the last key that a query sees, counted from its own place, and blocks of a query tile.
WINDOWS = {
    "narrow": (1, {"window": (300, 0)}, -300, 0, 1),
    "of several queries": (9, {"window": (300, 0)}, -300, 0, 1),
    "two splits long": (1, {"window": (1023, 0)}, -1023, 0, 3),
    "almost": (1, {"window": (1022, 0)}, -1022, 0, 1),
    "longer": (40, {"window": (1480, 20)}, -1480, 20, 5),
    "open at its end": (9, {"window": (1100, None)}, -1100, 8, 4),
    "from the first key": (9, {"window": (3, 0), "top_left": True}, -3, 0, 1),
    "from the first key, open": (9, {"window": (3, None), "top_left": True}, -3, 3104, 6),
}


@pytest.mark.parametrize("heads", thinned([1, 4], first=1))
@pytest.mark.parametrize("name", thinned(WINDOWS, keep=4, first=3))
def test_blocks_have_the_splits_that_a_window_lies_in(name, heads):
    """Of sequences with lengths of their own, which end anywhere."""
    queries, options, first, last, blocks = WINDOWS[name]
    rng, lengths = np.random.default_rng(0), np.array([7, 37, 1023, 1030, 2500, 3100])
    q = rng.standard_normal((len(lengths), heads, queries, 40)).astype("float16")
    k, v = rng.standard_normal((2, len(lengths), 1, 3104, 40)).astype("float16")
    for x, length in zip((*k, *v), (*lengths, *lengths)):
        x[:, length:] = np.nan
    given = ForwardOperands(q, k, v, None, None, None, captured(lengths={"seqlens_kv": lengths}))
    plan = prepared(given, {"backend": "host", "kernel": "fwd_v2", "return_lse": True, **options})  # by an option of its own
    tiles = -(-queries * heads // plan.kernel.config.TILE_Q)
    assert plan.kernel.config.SPLIT_KV and plan.launches[0].blocks == blocks * tiles * len(lengths)
    assert bool(plan.workspace_bytes) is (blocks > 1)
    found = plan.run(given)
    for b, length in enumerate(lengths):
        alone, shift = (q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]), length - queries
        shift = 0 if "top_left" in options else shift
        mask = {"first_key": shift + first, "last_key": shift + last}
        comparison = compare(*(x[b : b + 1] for x in found), *alone, scale=40**-0.5, **mask)
        assert comparison.ok, (length, comparison.message)


@pytest.mark.parametrize(
    "dtype, heads, queries, dim, keys, by_last",
    [
        ("float16", 4, 1, 128, 8192, True),
        ("float16", 8, 1, 128, 2**17, True),  # two rounds of four trips are less than a launch
        ("float16", 16, 1, 128, 8192, True),
        ("float16", 16, 1, 128, 2**17, False),
        ("float16", 2, 16, 64, 2048, False),
        ("float16", 2, 16, 256, 1024, False),
        ("float16", 1, 16, 64, 1024, True),
        ("float16", 1, 1, 256, 1024, True),
        ("float32", 1, 1, 128, 1024, True),
        ("float32", 1, 1, 160, 1024, False),  # there are no registers for it
    ],
)
def test_the_last_block_combines_few_rows(dtype, heads, queries, dim, keys, by_last):
    q, kv = np.zeros((heads, queries, dim), dtype), np.zeros((1, keys, dim), dtype)
    if dim == 256:
        options = {"backend": "host", "arch": "90a", "kernel": "fwd_v2"}
        assert not plan_attention(q, kv, kv, dropout=0.1, seed=0, **options).kernel.config.LAST_COMBINES
    plan = plan_attention(q, kv, kv, backend="host", arch="90a", kernel="fwd_v2")
    assert plan.kernel.config.SPLIT_KV and plan.kernel.config.LAST_COMBINES is by_last
    assert [launch.entry for launch in plan.launches] == ["fwd_v2"] + ["fwd_v2_combine"] * (not by_last)
    assert plan.workspace.names == ("out_partials", "lse_partials") + ("arrivals",) * by_last
    assert ("the last block of a query tile combines" in str(plan)) is by_last and ("a kernel combines" in str(plan)) is not by_last
