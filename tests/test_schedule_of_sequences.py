"""Query tiles of sequences are found on the device, each once and the longest first, so that multiprocessors end together."""

import heapq
import itertools

import numpy as np
import pytest
from thinned import thinned

from cupy_flash import plan_attention
from cupy_flash.call import forward
from cupy_flash.machine import host
from cupy_flash.plan.forward_launches import WORK_ITEM_BYTES
from cupy_flash.plan.split import MOST_SPLITS, SPLIT_KEYS

MULTIPROCESSORS = 132
HEADS = 16


def scheduled(plan, **lengths):
    """The tiles that the first kernel of a plan finds, (sequence, row), by that kernel alone."""
    return items(plan, **lengths)[1:][:, :2]


def items(plan, **lengths):
    """All that it writes of each, behind how many there are."""
    execution = plan._execution
    work = np.full(plan.workspace_bytes // 4, -1, np.int32)
    operands = {f"sequences.{name}": array for name, array in zip(fields(plan), map(lengths.get, plan.problem.lengths.names))}
    operands |= execution.workspace.on_host(work.view(np.uint8))
    host.run(plan.kernel, plan.launches[:1], execution._params, operands, host.HostOptions())
    numbers = WORK_ITEM_BYTES[plan.kernel.file] // 4
    return work[: numbers * (1 + work[0])].reshape(-1, numbers)


def fields(plan):
    names = {"cu_seqlens_q": "offsets_q", "cu_seqlens_kv": "offsets_kv", "seqlens_q": "lengths_q", "seqlens_kv": "lengths_kv"}
    return [names[name] for name in plan.problem.lengths.names]


def idle(costs):
    """The share of time that multiprocessors wait for the last one, where each takes the next block when it has ended one."""
    ends = [0.0] * MULTIPROCESSORS
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return 1 - sum(ends) / (MULTIPROCESSORS * max(ends))


def documents(rng, total=16384):
    """Lengths like those of real documents: log-normal, cut to what a row holds."""
    lengths = []
    while sum(lengths) < total:
        lengths.append(int(np.clip(rng.lognormal(6.5, 1.0), 1, total)))
    lengths[-1] -= sum(lengths) - total
    return np.array(lengths)


def zeros(*shape):
    """An array of any size in two bytes of memory, which is never read here."""
    return np.broadcast_to(np.zeros((), np.float16), shape)


@pytest.mark.parametrize("causal", thinned([False, True]))
def test_each_tile_of_packed_sequences_once_and_the_longest_first(causal):
    rng = np.random.default_rng(1)
    for lengths in ([0, 1, 300, 0, 128, 129, 0], [5], rng.integers(0, 400, 200), [0, 0]):
        offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
        x = np.zeros((1, offsets[-1] + 50, 32), np.float16)
        plan = plan_attention(x, x, x, causal=causal, backend="host", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        c = plan.kernel.config
        found = scheduled(plan, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        rows_behind = [(len(lengths), row) for row in range(0, 50, c.TILE_Q)]
        expected = [(i, row) for i, n in enumerate(lengths) for row in range(0, n, c.TILE_Q)] + rows_behind
        assert sorted(map(tuple, found)) == sorted(expected)
        costs = [cost(c, row, (*lengths, 0)[i], causal) for i, row in found]
        # Within a bin, which spans a fifth, in any order.
        assert all(first * 1.34 >= second for first, second in itertools.pairwise(costs))


@pytest.mark.parametrize("arch", ["80", "90a"])
def test_tiles_of_few_long_sequences_are_dealt_out_by_lanes(arch):
    """What is behind those that a lane of each warp has: of 32 sequences at most, and of more."""
    for lengths in ([40_001, 300, 13_000], [30_000] + [100] * 40):
        offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
        x = zeros(2, offsets[-1], 64)
        plan = plan_attention(x, x, x, backend="host", arch=arch, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        found = scheduled(plan, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        tile_q = plan.kernel.config.TILE_Q
        assert sorted(map(tuple, found)) == [(i, row) for i, n in enumerate(lengths) for row in range(0, n, tile_q)]


def cost(c, row, length, causal):
    """Key tiles that a query tile visits."""
    return -(-min(length, row + c.TILE_Q if causal else length) // c.TILE_KV)


@pytest.mark.usefixtures("from_a_list")
@pytest.mark.parametrize("causal", thinned([False, True], first=1))
def test_tiles_of_fwd_hopper_know_where_their_sequence_lies(causal):
    """Those that have queries come first, and so many of them are counted; of the others, results are cleared."""
    lens_q, lens_kv = np.array([300, 0, 5, 129]), np.array([0, 70, 300, 1])
    q, k = np.zeros((4, 2, 400, 64), np.float16), np.zeros((4, 1, 300, 64), np.float16)
    plan = plan_attention(q, k, k, causal=causal, backend="host", arch="90a", seqlens_q=lens_q, seqlens_kv=lens_kv)
    tile_q = plan.kernel.config.TILE_Q
    assert [launch.entry for launch in plan.launches] == ["fwd_hopper_schedule", "fwd_hopper"]
    (count, with_queries, *_), *found = items(plan, seqlens_q=lens_q, seqlens_kv=lens_kv).tolist()
    heads = plan.kernel.config.INNER_HEADS  # rows of each query
    rows, places = range(0, 400 * heads, tile_q), sorted(tuple(item[:2]) for item in found)
    assert heads == 2 and places == [(i, row) for i in range(4) for row in rows] and count == len(found)
    assert with_queries == sum(row < heads * n for n in lens_q for row in rows)
    assert [row < heads * lens_q[i] for i, row, *_ in found] == [True] * with_queries + [False] * (count - with_queries)
    assert all(item[2:7] == [0, heads * lens_q[item[0]], heads * 400, 0, lens_kv[item[0]]] for item in found)


@pytest.mark.parametrize("causal", thinned([False, True], first=1))
def test_documents_leave_persistent_blocks_idle_for_four_percent_at_most(causal):
    """A block takes its next tile when it begins one; beginning one takes a step."""
    rng, found = np.random.default_rng(2), []
    for _ in range(10):
        lengths = documents(rng)
        offsets = np.r_[0, np.cumsum(lengths)]
        x = np.zeros((HEADS, offsets[-1], 128), np.float16)  # which TMA can move; nobody touches the memory
        plan = plan_attention(x, x, x, causal=causal, backend="host", arch="90a", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        assert plan.kernel.file == "fwd_hopper"
        tiles = scheduled(plan, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        costs = iter(np.repeat([1 + cost(plan.kernel.config, row, lengths[i], causal) for i, row in tiles], HEADS).tolist())
        blocks, ends = [(0, next(costs)) for _ in range(MULTIPROCESSORS)], []  # when each begins a tile, and which it has taken
        while blocks:
            begun, taken = heapq.heappop(blocks)
            if taken == 0:
                ends.append(begun)
            else:
                heapq.heappush(blocks, (begun + taken, next(costs, 0)))
        found.append(1 - sum(ends) / (MULTIPROCESSORS * max(ends)))
    assert max(found) <= 0.04, found


@pytest.mark.parametrize("causal", thinned([False, True], first=1))
def test_documents_leave_multiprocessors_idle_for_three_percent_at_most(causal):
    rng, found = np.random.default_rng(2), []
    for _ in range(10):
        lengths = documents(rng)
        offsets = np.r_[0, np.cumsum(lengths)]
        x = zeros(HEADS, offsets[-1], 128)
        plan = plan_attention(x, x, x, causal=causal, backend="host", arch="80", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        tiles = scheduled(plan, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        costs = [cost(plan.kernel.config, row, lengths[i], causal) for i, row in tiles]
        found.append(idle(np.repeat(costs, HEADS)))
    assert max(found) <= 0.03, found


def test_decoding_leaves_them_idle_for_five_percent_at_most():
    """64 sequences with 1 to 128k keys, 8 key-value heads: blocks are splits of these, equal but for the last of each."""
    rng, found = np.random.default_rng(3), []
    for _ in range(10):
        lengths = rng.integers(1, 1 << 17, 64)
        q, k = zeros(64, 32, 1, 128), zeros(64, 8, 1 << 17, 128)
        plan = plan_attention(q, k, k, causal=True, backend="host", arch="90a", seqlens_kv=lengths)
        c = plan.kernel.config
        assert c.SPLIT_KV and [launch.entry for launch in plan.launches] == ["fwd_v2"]
        costs = [part for length in lengths for part in splits(int(length), c.TILE_KV) * 8]  # in the order of blocks
        found.append(idle(costs))
    assert max(found) <= 0.05, found


def splits(length, tile):
    """Key tiles of each split of a sequence."""
    parts = min(max(length // SPLIT_KEYS, 1), MOST_SPLITS)
    even = -(-length // parts)
    keys = -(-even // tile) * tile
    return [-(-min(keys, length - first) // tile) for first in range(0, length, keys)]


@pytest.mark.parametrize("arch", ["90a", "80"])
def test_offsets_that_do_not_rise_lead_nowhere_else(arch, monkeypatch):
    """Rooms that overlap have more tiles than the list has places for. A device takes lengths as they are."""
    monkeypatch.setattr(forward, "check_values", lambda *_: None)
    offsets = np.tile(np.array([0, 400], np.int32), 20)
    q, k = np.zeros((4, 400, 64), np.float16), np.zeros((40, 2, 64, 64), np.float16)
    given = {"cu_seqlens_q": offsets, "seqlens_kv": np.full(39, 64, np.int32), "cache_batch_idx": np.arange(39)}
    plan = plan_attention(q, k, k, backend="host", arch=arch, **given)
    size = plan.workspace_bytes
    memory = np.full(size + 2**12, 77, np.uint8)
    out = plan(q, k, k, **given, workspace=memory[:size])
    assert (memory[size:] == 77).all() and np.isfinite(out).all()
