"""Rules of barriers, of counters, of TMA and of warpgroups, on the host: small kernels that break one.

What a GPU would answer with a hang, with garbage or with nothing at all is a `FaultError` here, in both schedules.
"""

import re
import time
from dataclasses import replace

import numpy
import pytest
from thinned import thinned

from cupy_flash import DeadlockError, FaultError, plan_attention
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.machine import host
from cupy_flash.machine.host import SCHEDULES

# A small kernel in the place of a large one, with a few things at hand.
SMALL_KERNEL = """\
#include <cstdlib>
#include "tile/cluster.cuh"
#include "tile/accum.cuh"
#include "tile/wgmma.cuh"
KERNEL(32 * WARPS, 1) fwd_hopper(GRID_CONSTANT HopperForwardParams p) {
  const Mbarrier barrier{shared_memory()};
  const PanelTile<64, 64> tile{shared_memory() + 1024};
  const int first[BATCH_AXES] = {};
  Acc<16, 64> acc, other;
  float out = 1.f;
  u32* const counters = static_cast<u32*>(p.lse.data);
  const int chosen = std::atoi(std::getenv("CHOSEN"));
  BODY
  if (warp_id() == 0 && block_id() == 0) *static_cast<float*>(p.lse.data) = out;
}
"""
BODY_LINE = SMALL_KERNEL[: SMALL_KERNEL.index("BODY")].count("\n") + 1


@pytest.fixture(params=SCHEDULES)
def run(request, monkeypatch, change_kernel):
    """A function that executes a kernel with this body, in each schedule, and returns the number it leaves in `out`.

    Bodies of tables are in one kernel, which is built once and chooses when it runs.
    """
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)

    def run_body(body, blocks=1, at_a_time=1, cluster=1):
        bodies = TOGETHER if body in TOGETHER else [body]
        monkeypatch.setenv("CHOSEN", str(bodies.index(body)))
        choices = " ".join(f"if (chosen == {number}) {{ {body} }}" for number, body in enumerate(bodies))
        change_kernel("fwd_hopper.cu", SMALL_KERNEL.replace("BODY", choices))
        inputs = make_inputs(Case("float16", 129, 64))  # of 128 queries out would leave from registers, without a map
        plan = plan_attention(*inputs, backend="host", arch="90a", kernel="fwd_hopper", return_lse=True)
        grid = {"blocks": blocks, "cluster": cluster}
        monkeypatch.setattr(host, "scheduled", lambda _, params, launches, mask: (params, (replace(launches[0], **grid),)))
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(at_a_time * plan.kernel.config.WARPS))
        _, lse = plan(*inputs, lse=numpy.zeros((1, 1, 129), "f4"))  # where counters start
        return lse[0, 0, 0]

    return run_body


# Who breaks which rule, and what is said of it: {W} stands for "warp 0 of block 0", {B} for the barrier.
BARRIERS = {
    "used and never started": ("if (warp_id() == 1) arrive_at(barrier);", "warp 1 of block 0 uses {B}, which nobody has started"),
    "started for oneself": (
        "if (warp_id() == 0) init_mbarrier(barrier, 1); if (warp_id() == 2) while (true) arrive_at(barrier);",
        "warp 2 of block 0 uses {B}, which nobody has started before the last sync_block",
    ),
    "started twice": (
        "if (warp_id() == 0) init_mbarrier(barrier, 1); sync_block(); if (warp_id() == 3) init_mbarrier(barrier, 1);",
        "warp 3 of block 0 starts {B} again",
    ),
    "too many arrivals": (
        "if (warp_id() == 0) { init_mbarrier(barrier, 1); arrive_expect_tx(barrier, 8); arrive_at(barrier); }",
        "{W} arrives at {B}, where all have arrived and bytes are still to come",
    ),
    "bytes that never come": (
        "if (warp_id() == 0) { init_mbarrier(barrier, 1); arrive_expect_tx(barrier, 8); }",
        "block 0 ends, and {B} lacks 0 of 1 warps and 8 bytes",
    ),
}
BARRIERS["a phase that a warp misses"] = (
    "if (warp_id() == 0) init_mbarrier(barrier, 1); sync_block(); if (warp_id() == 0) arrive_at(barrier); sync_block();"
    "if (warp_id() == 1) wait_for(barrier, 0); sync_block(); if (warp_id() == 0) { arrive_at(barrier); arrive_at(barrier); }",
    "a barrier in block 0 opens a second time before warp 1 has noticed the first",
)
BARRIERS["an arrival that is left over"] = (
    "if (warp_id() == 1) arrive_pair(4);",
    "block 0 ends, and in named barrier 4 a warp has arrived for which none has waited",
)
COPIES = {
    "rows not shown": (
        "store(tile, acc, 0); store_async(p.out_map, first, 0, 0, tile, 0);",
        "{W} has TMA read what lanes have stored, without fence_proxy_async in between",
    ),
    "rows shown to lanes only": (
        "store(tile, acc, 0); sync_warp(); store_async(p.out_map, first, 0, 0, tile, 0);",
        "{W} has TMA read what lanes have stored",
    ),
    "sums not shown": (
        "store(tile, acc, 0); add_async(static_cast<float*>(p.lse.data), tile.base, 8);",
        "{W} has TMA add what lanes have stored, without fence_proxy_async in between",
    ),
    "sums read, not waited for": (
        "add_async(static_cast<float*>(p.lse.data), tile.base, 8); wait_for_stores();",
        "{W} ends while TMA may still add to sums",
    ),
    "no wait at the end": ("store_async(p.out_map, first, 0, 0, tile, 0);", "{W} ends while TMA may still read"),
    "another box": ("store_async(p.q_map, first, 0, 0, tile, 0);", "{W} moves 16 x 64 elements with a map of boxes of 64 x 64"),
    "rows that end within 16 bytes": (
        "ClearMap map; std::memcpy(&map, &p.out_map, sizeof map); map.size[0] = 60;"
        "TensorMap ragged; std::memcpy(&ragged, &map, sizeof map); store_async(ragged, first, 0, 0, tile, 0);",
        "{W} has TMA store rows that end within 16 bytes, all of which it writes",
    ),
    "off the swizzle": (
        "store_async(p.out_map, first, 0, 0, tile, 4);",
        "{W} moves a box at an address that is no multiple of 1024",
    ),
}
COPIES["a store where a copy arrives"] = (
    "cp_async<16>(tile.base + 64, p.lse.data, false); commit_copies();"
    "for_lane(l) if (l < 4) store_shared(tile.base + 80 - 4 * l, 1);",
    "{W} stores to byte 1100 of shared memory, where a copy that it has not waited for may still arrive",
)
PRODUCTS = {
    "another one waited for": (
        "start_product_transposed(acc, tile, 0, tile); wait_for_products<1>(acc);",
        "warp .* of block 0 waits for a product that may still run",
    ),
    "no wait at the end": ("start_product_transposed(acc, tile, 0, tile);", "warp .* of block 0 ends while a product runs"),
    "no wait before the next": (
        "start_product_transposed(acc, tile, 0, tile); start_product_transposed(acc, tile, 0, tile);",
        "warp .* of block 0 starts a product in place of one that nobody has waited for",
    ),
    "operand not shown": (
        "if (warp_id() == 0) store(tile, acc, 0);"
        "sync_block(); start_product_transposed(acc, tile, 0, tile); wait_for_products<0>(acc);",
        "warp .* of block 0 multiplies what lanes have stored, without fence_proxy_async in between",
    ),
    "three warps of four": (
        "if (warp_id() != 5) warpgroup_reg_alloc<24>();",
        "warps 4 and 5 of block 0 have not done the same with their warpgroup",
    ),
    "beyond shared memory": ("store_shared(shared_memory() + 300000, 1);", "uses shared memory from byte 300000 on, of"),
}
SOME_LANES = "warp .* of block 0 has {} of 32 lanes ask for what all of them do together at .*fwd_hopper.cu"
A_LANE = "warp .* of block 0 has a lane do what all lanes do together at "
SUM = "quad_reduce(flags, [](float a, float b) { return a + b; });"
LANES = {
    "a shuffle by one": ("for_lane(l) if (l == 0) out = float(warp_id());", SOME_LANES.format(1)),
    "a shuffle in a function": ("auto own = [] { return warp_id(); }; for_lane(l) if (l > 1) out = own();", SOME_LANES.format(30)),
    "a barrier by some": ("for_lane(l) if (l < 7) sync_warp();", SOME_LANES.format(7)),
    "one value by some": ("for_lane(l) { if (l == 3) continue; out = float(uniform(u32(5))); }", SOME_LANES.format(31)),
    "one leaves first": ("[&] { for_lane(l) if (warp_id() < 99) return; }();", SOME_LANES.format(1)),
    "a sum by one": (f"Regs<float, 1> flags; for_lane(l) flags.at(l, 0) = 1.f; for_lane(l) if (l == 0) {SUM}", A_LANE),
}


def by_one_warp(body):
    return f"if (warp_id() == 0) {{ {body} }}"


def assert_fault(run, body, message):
    expected = message.format(W="warp 0 of block 0", B="the barrier at byte 0 of shared memory")
    with pytest.raises(FaultError, match=expected):
        run(body)


@pytest.mark.parametrize("body, message", BARRIERS.values(), ids=BARRIERS)
def test_rules_of_barriers(body, message, run):
    assert_fault(run, body, message)


@pytest.mark.parametrize("body, message", COPIES.values(), ids=COPIES)
def test_rules_of_copies(body, message, run):
    assert_fault(run, by_one_warp(body), message)


@pytest.mark.parametrize("body, message", PRODUCTS.values(), ids=PRODUCTS)
def test_rules_of_products(body, message, run):
    assert_fault(run, body, message)


@pytest.mark.parametrize("body, message", LANES.values(), ids=LANES)
def test_rules_of_lanes(body, message, run):
    """On a GPU the other lanes are waited for, for ever."""
    assert_fault(run, body, message)


def test_all_lanes_may_ask(run):
    assert run("Regs<float, 1> ones; for_lane(l) ones.at(l, 0) = float(warp_id() + 1); for_lane(l) out += ones.at(l, 0);") == 33


def test_deadlock_says_which_barrier_lacks_what(run):
    with pytest.raises(DeadlockError) as caught:
        run("if (warp_id() == 0) { init_mbarrier(barrier, 2); arrive_at(barrier); wait_for(barrier, 0); }")
    [place] = re.findall(r"warp 0 waits for the barrier at byte 0 of shared memory at .*/(fwd_hopper.*)", str(caught.value))
    assert place == f"fwd_hopper.cu:{BODY_LINE}: 1 of 2 warps and 0 bytes"


def test_each_opening_counts_anew(run):
    """Two warps arrive, three times; the phase bit that is waited for alternates."""
    arrivals = "for (u32 i = 0; i < 3; ++i) { arrive_at(barrier); wait_for(barrier, i % 2); out += 1.f; sync_block(); }"
    others = "for (int i = 0; i < 3; ++i) sync_block();"
    start = "if (warp_id() == 0) init_mbarrier(barrier, 2); sync_block();"
    assert run(f"{start} if (warp_id() < 2) {arrivals} else {others}") == 4


# How many blocks, how many at a time, what warp 0 of each does, and what the first of them then waits for.
STUCK = {
    "nobody counts": (1, 1, "semaphore_wait(counters + 7, 5);", "lse[7], which is 0, to become 5"),
    "counted beyond": (1, 1, "semaphore_release(counters); semaphore_wait(counters, 0);", "lse[0], which is 1, to become 0"),
    "a later block counts": (
        *(2, 1, "if (block_id() == 0) wait_for_count(counters + 1, 1); else semaphore_release(counters + 1);"),
        "lse[1], which is 0, to become 1 or more",
    ),
    "each counts too few": (
        *(3, 3, "semaphore_release(counters + 2); wait_for_count(counters + 2, 4 + block_id());"),
        "lse[2], which is 3, to become 4 or more",
    ),
    "others count and end": (
        *(4, 2, "if (block_id() == 0) semaphore_wait(counters, 4); else semaphore_release(counters);"),
        "lse[0], which is 3, to become 4",
    ),
}


@pytest.mark.parametrize("blocks, at_a_time, body, awaited", STUCK.values(), ids=STUCK)
def test_deadlock_says_which_counter_is_what(blocks, at_a_time, body, awaited, run):
    with pytest.raises(DeadlockError) as caught:
        run(by_one_warp(body), blocks, at_a_time)
    report = re.sub(r"(?<= at )\S*/", "", str(caught.value)).partition("deadlock")[2].splitlines()
    assert report[:2] == [" in block 0:", f"  warp 0 waits for {awaited} at fwd_hopper.cu:{BODY_LINE}"]
    assert set(report[2:]) == {f"  warp {warp} waits for nothing: it has finished" for warp in range(1, len(report) - 1)}


START = "if (warp_id() == 0) init_mbarrier(barrier, 2); sync_cluster<2>();"
# What a warp of each of two blocks that are a cluster does, and what it leaves: both arrive in both; each gets what both send.
MEETINGS = {
    "arrivals": ("if (warp_id() == 0) { arrive_in_cluster<2>(barrier); wait_for(barrier, 0); out = 2.f; }", 2),
    "copies": (
        "if (warp_id() == 0) {"
        "  for_lane(l) store_shared(tile.base + l * 4, float(10 * block_id() + l));"
        "  fence_proxy_async(); arrive_expect_tx(barrier, 2 * 64); arrive_at(barrier);"
        "  const auto for_block = [&](int rank, int) { return tile.base + rank * 64; };"
        "  send_async<2, 1>(tile.base + 1024 + block_id() * 64, 0, for_block, 64, barrier);"
        "  wait_for(barrier, 0);"
        "  out = load_shared<float>(tile.base + 1024 + 64 + 3 * 4) + load_shared<float>(tile.base + 1024 + 2 * 4);"
        "}",
        13 + 2,
    ),
}
# What blocks do that break a rule of clusters, and what is said of it.
PARTINGS = {
    "where a block has ended": (
        f"{START} if (block_id() == 0 && warp_id() == 0) {{"
        "  std::this_thread::sleep_for(std::chrono::milliseconds(100)); arrive_in_cluster<2>(barrier); }",
        "{W} arrives in block 1 of its cluster, which has not begun or has ended,",
    ),
    "what is not shown": (
        f"{START} if (warp_id() == 0) {{ for_lane(l) store_shared(tile.base + l * 4, 1.f);"
        "  send_async<2, 1>(tile.base + 1024, 0, [&](int, int) { return tile.base; }, 64, barrier); } sync_cluster<2>();",
        "warp 0 of block . has TMA read what lanes have stored, without fence_proxy_async in between",
    ),
    "over what is not shown": (
        f"{START} if (warp_id() == 0) {{ for_lane(l) store_shared(tile.base + 1024 + l * 4, 1.f); }} sync_cluster<2>();"
        "if (warp_id() == 0) send_async<2, 1>(tile.base + 1024, 0, [&](int, int) { return tile.base; }, 64, barrier);"
        "sync_cluster<2>();",
        "warp 0 of block . has TMA overwrite what lanes have stored, without fence_proxy_async in between",
    ),
}


@pytest.mark.parametrize("body, left", MEETINGS.values(), ids=MEETINGS)
def test_blocks_of_a_cluster_reach_each_other(body, left, run):
    """Four clusters, of which two are in progress at a time."""
    assert run(f"{START} {body} sync_cluster<2>();", 8, 4, cluster=2) == left


@pytest.mark.parametrize("body, message", PARTINGS.values(), ids=PARTINGS)
def test_rules_of_clusters(body, message, run):
    with pytest.raises(FaultError, match=message.format(W="warp 0 of block 0")):
        run(body, 2, cluster=2)


def test_deadlock_says_what_a_cluster_waits_for(run):
    where = r"deadlock in block {}:.*\n  warp 0 waits for the barrier {} at .*fwd_hopper.cu:\d+"
    with pytest.raises(DeadlockError, match=where.format(0, "of its cluster")):
        run("if (block_id() == 0) sync_cluster<2>();", 2, cluster=2)
    alone = "if (block_id() == 1 && warp_id() == 0) { arrive_at(barrier); wait_for(barrier, 0); }"
    with pytest.raises(DeadlockError, match=where.format(1, "at byte 0 of shared memory") + ": 1 of 2 warps and 0 bytes"):
        run(f"{START} {alone}", 2, cluster=2)


@pytest.mark.release  # the test before asks it without a sanitizer
@pytest.mark.parametrize("tool", thinned(host.SANITIZERS))
def test_a_sanitized_program_names_the_counter_as_well(tool, run, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", tool)
    with pytest.raises(DeadlockError, match=r"warp 0 waits for lse\[7\], which is 0, to become 5 at "):
        run("if (warp_id() == 0) semaphore_wait(counters + 7, 5);")


def test_blocks_that_take_turns_are_no_deadlock(run):
    """All but one wait nearly always, and that one is sometimes slow. What they do in turn is done 600 times."""
    sleep = "if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));"
    turn = f"semaphore_wait(counters + 1, 3 * i + block_id()); {sleep} ++counters[2]; semaphore_release(counters + 1);"
    last = "if (block_id() == 0) { semaphore_wait(counters + 1, 600); out = float(counters[2]); }"
    assert run(f"if (warp_id() == 0) {{ for (u32 i = 0; i < 200; ++i) {{ {turn} }} {last} }}", 3, 3) == 600


def test_a_fault_ends_the_blocks_that_wait_for_its_own(run):
    """Block 1 waits when block 0 fails: who waits for whom is not what is reported."""
    wait = "semaphore_release(counters); semaphore_wait(counters + 1, 1);"
    fault = "semaphore_wait(counters, 1); arrive_at(barrier);"
    body = f"if (warp_id() == 0) {{ if (block_id() == 1) {{ {wait} }} else {{ {fault} }} }}"
    message = "warp 0 of block 0 uses the barrier at byte 0 of shared memory, which nobody has started"
    begun = time.monotonic()
    with pytest.raises(FaultError, match=message):
        run(body, 2, 2)
    assert time.monotonic() - begun < 45  # most of it for the compiler


@pytest.mark.parametrize("group, answers", [(0, 4), (1, 2)])
def test_a_warpgroup_votes(group, answers, run):
    """In rounds 0 ... 5 a lane of warp 0 ... 5 raises its flag; the first group hears of its own four, the second of two."""
    rounds = "for (int i = 0; i < 6; ++i) { Regs<bool, 1> flag; for_lane(l) flag.at(l, 0) = warp_id() == i && l == 9;"
    count = "if (warp_id() < 8) out += warpgroup_any(1 + warp_id() / 4, flag); }"
    store = f"if (warp_id() == {4 * group}) store_shared(shared_memory(), out);"
    tell = f"{store} sync_block(); out = load_shared<float>(shared_memory());"
    assert run(f"{rounds} {count} {tell}") == 1 + answers


NAMED = {
    "read before the wait": ("out = acc.at(0, 0); wait_for_products<0>(acc);", numpy.nan),
    "another one named": ("wait_for_products<0>(other); out = acc.at(0, 0);", numpy.nan),
    "named": ("wait_for_products<0>(acc); out = acc.at(0, 0);", 0),
    "named later": ("wait_for_products<0>(other); wait_for_products<0>(acc); out = acc.at(0, 0);", 0),
}


def of_zeros(body):
    zeros = "if (warp_id() == 0) std::memset(tile.base, 0, tile.bytes); sync_block();"
    return f"{zeros} start_product_transposed(acc, tile, 0, tile); {body}"


@pytest.mark.parametrize("body, expected", NAMED.values(), ids=NAMED)
def test_product_is_in_its_registers_when_a_wait_names_it(body, expected, run):
    numpy.testing.assert_equal(run(of_zeros(body)), numpy.float32(expected))


TOGETHER = [body for table in (BARRIERS, PRODUCTS, LANES) for body, _ in table.values()]
TOGETHER += [by_one_warp(body) for body in (*(body for body, _ in COPIES.values()), *(stuck[2] for stuck in STUCK.values()))]
TOGETHER += [of_zeros(body) for body, _ in NAMED.values()]


def test_products_for_the_same_registers_add_up(run):
    """o + p v + p v, of ones, waited for once."""
    ones = "if (warp_id() == 0) { for_lane(l) for (int i = l; i < 4096; i += 32) store_shared(tile.base + 2 * i, u16(0x3c00));"
    shown = "fence_proxy_async(); } sync_block();"
    factor = "OperandA<16> p_reg[4]; for (auto& a : p_reg) for_lane(l) for (int r = 0; r < 4; ++r) a.at(l, r) = 0x3c003c00;"
    twice = "fill(acc, 3.f); start_product(acc, p_reg, tile); start_product(acc, p_reg, tile); wait_for_products<0>(acc);"
    assert run(f"{ones} {shown} {factor} {twice} out = acc.at(7, 9);") == 3 + 2 * 64
