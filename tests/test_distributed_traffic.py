"""What ranks send and hold: counted by a communicator, against formulas by hand and against what a plan says."""

import gc
import threading
import tracemalloc
import weakref
from dataclasses import replace

import pytest
from ranks import ORDERS, SCHEMES, lengths_of, options_of, run

from cupy_flash import distributed
from cupy_flash.distributed import rows
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.cotangents import make_cotangents

CASE = Case("float32", 96, 96, dim=16, heads_q=8, heads_kv=2)
KEYS = 2 * 2 * 96 * 16 * 4  # bytes of k and v of all ranks


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", ["all_gather", "ring"])
def test_each_rank_gets_the_keys_of_the_others_once(scheme, order, ranks):
    found = run(CASE, ranks, scheme, order, gradients=False)
    for comm in found.counted:
        assert comm.sent <= 1.01 * (ranks - 1) / ranks * KEYS
        assert comm.received == (ranks - 1) / ranks * KEYS


@pytest.mark.parametrize("scheme", ["all_gather", "ring"])
def test_a_window_leaves_the_keys_before_a_part(scheme):
    """Of 24 rows each, a window of 10 needs 10 keys of the rank before, and one of 30 those of two ranks."""
    row = KEYS / 96
    for window, keys in ((10, [0, 10, 10, 10]), (30, [0, 24, 30, 30])):
        found = run(replace(CASE, causal=True, window=(window, None)), 4, scheme, "contiguous", gradients=False)
        assert [comm.received / row for comm in found.counted] == keys


def test_causal_ranks_get_no_keys_behind_their_own():
    found = run(replace(CASE, causal=True), 4, "all_gather", "contiguous", gradients=False)
    assert [comm.received * 4 / KEYS for comm in found.counted] == [0, 1, 2, 3]


@pytest.mark.parametrize("ranks, key_heads", [(2, 1), (4, 1)])
def test_ulysses_sends_rows_of_the_heads_of_others(ranks, key_heads):
    """Each rank has 1 of `ranks` of the query heads; where key heads are fewer than ranks, several have the same."""
    found = run(CASE, ranks, "ulysses", "contiguous", gradients=False)
    part = 96 // ranks
    others = ranks - 1
    of_queries = part * 8 // ranks * 16 * 4 * others
    of_keys = 2 * part * key_heads * 16 * 4 * others
    of_lse = part * 8 // ranks * 4 * others
    for comm in found.counted:
        assert comm.sent == 2 * of_queries + of_keys + of_lse


@pytest.mark.parametrize("name", ["causal", "window", "full"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plan_knows_what_is_sent(scheme, order, name):
    """To the byte, on each rank, in uneven parts as well."""
    case = replace(CASE, **{"causal": {"causal": True}, "window": {"window": (17, 3)}, "full": {}}[name])
    lengths = lengths_of(case, 3, "uneven")
    q, k, v = make_inputs(case)
    dout, dlse = make_cotangents(case)
    options = options_of(case)
    options.pop("return_lse")

    def part(comm):
        comm = distributed.Counted(comm)
        shared = {"comm": comm, "scheme": scheme, "order": order, **options}
        own = [distributed.shard(x, comm.rank, 3, order=order, lengths=lengths["q"]) for x in (q, k, v, dout)]
        plan = distributed.plan_attention(*own[:3], **shared)
        out, lse = distributed.attention(*own[:3], return_lse=True, **shared)
        forward, comm.sent = comm.sent, 0
        distributed.attention_backward(own[3], *own[:3], out, lse, **shared)
        return (plan.sent(), plan.sent(backward=True)), (forward, comm.sent), comm.messages

    for planned, counted, _ in distributed.on_threads(3, part):
        assert planned == counted
    assert dlse is not None


def test_a_ring_holds_two_blocks_of_keys(monkeypatch):
    """Beside its own, at any time: one that is read, and one that arrives."""
    ranks, alive, most = 4, {}, {}
    made = rows.Keys.room.__func__

    def room(cls, like, intervals):
        found = made(cls, like, intervals)
        key = threading.current_thread().name
        alive.setdefault(key, []).append(weakref.ref(found.k.base if found.k.base is not None else found.k))
        living = sum(ref() is not None for ref in alive[key])
        most[key] = max(most.get(key, 0), living)
        return found

    monkeypatch.setattr(rows.Keys, "room", classmethod(room))
    run(CASE, ranks, "ring", "zigzag", gradients=False)
    assert len(most) == ranks
    assert all(n == 2 for n in most.values()), most


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_ring_takes_what_its_plan_says(dtype):
    """All ranks together, as threads: blocks of keys, partial results, and tiles that the computation itself is cut into."""
    ranks, case = 4, Case(dtype, 4096, 4096, dim=32, heads_q=2, heads_kv=2)
    q, k, v = make_inputs(case)
    parts = [[distributed.shard(x, rank, ranks).copy() for x in (q, k, v)] for rank in range(ranks)]
    peaks = {}

    def part(comm):
        shared = {"comm": comm, "scheme": "ring"}
        plan = distributed.plan_attention(*parts[comm.rank], **shared)
        out = distributed.attention(*parts[comm.rank], **shared)
        return plan.memory(), out.nbytes

    distributed.on_threads(ranks, part)  # what is imported and cached
    gc.collect()
    tracemalloc.start()
    try:
        found = distributed.on_threads(ranks, part)
        peaks["all"] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    planned = sum(memory.total + out for memory, out in found)
    tiles = ranks * 8 * 256 * 512 * 4  # of scores, and what they become, in the dtype that they are computed in
    blocks = sum(memory.keys for memory, _ in found)
    assert blocks == ranks * 2 * (k.nbytes + v.nbytes) // ranks
    assert peaks["all"] <= planned + tiles
