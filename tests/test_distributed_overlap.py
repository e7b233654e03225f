"""What ranks do while an exchange is under way: copies and half the heads in Ulysses, in a ring own gradients."""

import threading
from collections import defaultdict
from dataclasses import replace
from itertools import groupby

import numpy
import pytest
from ranks import ORDERS, check, run, same_bits

from cupy_flash import distributed
from cupy_flash.distributed import bits, gathered, heads, threads
from cupy_flash.distributed.calls import Calls
from cupy_flash.distributed.ring import own_blocks
from cupy_flash.distributed.sharding import Run, halves
from cupy_flash.distributed.traffic import steps_of
from cupy_flash.judge.cases import Case

CASE = Case("bfloat16", 45, 45, dim=16, heads_q=8, heads_kv=4, batch=(2,), causal=True)


@pytest.fixture
def in_halves(monkeypatch):
    monkeypatch.setattr(heads, "LEAST", 0)
    monkeypatch.setattr(heads, "LEAST_FLOPS", 0)


CASES = {
    "portions": CASE,  # on 2 ranks 2 key heads each
    "odd": replace(CASE, heads_q=12, heads_kv=6, dropout=0.25),
    "one-key-head": replace(CASE, heads_kv=2),
    "shared": replace(CASE, heads_kv=1, dtype="float16"),
    "uneven": replace(CASE, heads_q=9, heads_kv=3, alibi="heads"),
    "expressions": replace(CASE, score="relative", mask="documents"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("divided", ["even", "uneven"])
@pytest.mark.parametrize("name", CASES)
def test_exchanges_in_halves_give_the_same_bits(name, order, divided, monkeypatch):
    ranks = 3 if divided == "uneven" else 2
    whole = run(CASES[name], ranks, "ulysses", order, divided)
    monkeypatch.setattr(heads, "LEAST", 0)
    monkeypatch.setattr(heads, "LEAST_FLOPS", 0)
    found = run(CASES[name], ranks, "ulysses", order, divided)
    check(CASES[name], found)
    # Half the query heads of one key head are half the rows of NumPy's products: on some processors a row has other bits then.
    if (name, divided) != ("one-key-head", "even"):
        assert same_bits(whole, found)
    assert [comm.sent for comm in found.counted] == [comm.sent for comm in whole.counted]


@pytest.fixture
def order(monkeypatch):
    """What each rank does, one behind the other, copies that follow each other as one."""
    found = defaultdict(list)

    def logged(owner, name, what):
        does = getattr(owner, name)

        def logging(*args, **kwargs):
            own = found[threading.current_thread().name]
            if what != "copies" or own[-1:] != ["copies"]:
                own.append(what)
            return does(*args, **kwargs)

        monkeypatch.setattr(owner, name, logging)

    logged(threads.ThreadCommunicator, "start", "starts")
    logged(threads._Receiving, "wait", "waits")
    logged(bits, "widest", "copies")
    for name in ("forward_of_heads", "backward_of_heads", "backward"):
        logged(Calls, name, "computes")
    return found


def test_copies_are_beneath_exchanges(in_halves, order):
    """While half of the rows is under way, the other one is packed, or brought to its place; own rows are copied beneath both."""
    run(replace(CASE, heads_q=2, heads_kv=2), 2, "ulysses", "zigzag", gradients=False)
    there = ["copies", "starts", "copies", "starts", "copies", "waits", "waits"]
    back = ["starts", "starts", "copies", "waits", "copies", "waits", "copies"]
    assert len(order) == 2
    assert all(own == [*there, "computes", *back] for own in order.values())


def test_heads_are_computed_while_others_travel(in_halves, order):
    """The second half of heads is on its way before the first is computed, and the first goes back before the second is."""
    run(CASE, 2, "ulysses", "zigzag")  # forward, then gradients
    there = ["starts", "copies", "starts", "copies", "waits", "computes"]
    between = ["starts", "copies", "waits", "computes", "starts", "copies"]
    back = ["waits", "copies", "waits", "copies"]
    assert len(order) == 2
    for own in order.values():
        assert own[0] == "copies"  # what is packed for the first half; that of the gradients follows the last of the forward
        assert own[1:] == [*there, *between, *back] * 2


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_knows_what_travels_beneath(backward, monkeypatch):
    """The half of heads that comes second is beneath the first, and the half that goes back first beneath the second."""
    q, k = (numpy.broadcast_to(numpy.float16(0), (n, 64, 16)) for n in (8, 4))
    plan = distributed.plan_attention(q, k, k, ranks=2, scheme="ulysses", order="zigzag", causal=True)
    at_once = steps_of(plan.whole, "ulysses", 0, backward)
    assert [(step.overlaps, step.exchange.sent > 0, len(step.blocks)) for step in at_once] == [
        (False, True, 0), (True, False, 1), (False, True, 0),
    ]  # fmt: skip
    monkeypatch.setattr(heads, "LEAST", 0)
    if not backward:
        assert len(steps_of(plan.whole, "ulysses", 0)) == 3  # a short one
    monkeypatch.setattr(heads, "LEAST_FLOPS", 0)
    there, first, second, back = steps_of(plan.whole, "ulysses", 0, backward)
    assert [step.exchange.sent for step in (there, second)] == [step.exchange.sent // 2 for step in (at_once[0], at_once[2])]
    assert (first.exchange, back.exchange) == (there.exchange, second.exchange)
    assert first.overlaps and second.overlaps
    assert first.blocks == second.blocks == tuple((block, number // 2) for block, number in at_once[1].blocks)


def test_one_key_head_is_halved_by_its_queries(in_halves, order):
    """In the forward, for which its keys travel once. Its gradient would be the sum of both: that exchange has rounds of rows."""
    case = replace(CASE, heads_kv=2)
    run(case, 2, "ulysses", "zigzag", gradients=False)
    for own in order.values():
        assert (own.count("computes"), own.count("starts")) == (2, 4)
    order.clear()
    run(case, 2, "ulysses", "zigzag")
    for own in order.values():
        assert (own.count("computes"), own.count("starts")) == (3, 8)


def test_what_is_small_is_sent_at_once(order):
    run(CASE, 2, "ulysses", "zigzag")
    for own in order.values():
        assert own.count("starts") == 4  # there and back, forward and gradients
        assert own.count("computes") == 2


RING = {  # the forward, of which calls are not logged; then a step of own keys, those of others, and own keys again
    2: "starts waits; starts computes waits; computes starts; computes waits",
    3: "starts waits starts waits; starts computes waits; starts computes starts waits; computes waits starts; computes waits",
}


@pytest.mark.parametrize("ranks", RING)
def test_gradients_of_own_keys_are_first_and_last(ranks, order):
    """Beneath the first are the keys that come, beneath the last the gradients that others have: on each rank of a causal ring."""
    check(CASE, run(CASE, ranks, "ring", "zigzag"))
    assert len(order) == ranks
    for own in order.values():
        found = [what for what in own if what != "copies"]
        assert [what for what, _ in groupby(found)] == RING[ranks].replace(";", "").split()


def test_own_gradients_are_added_up_beneath_an_exchange(order, monkeypatch):
    """With all keys at hand, those for another rank are put together first and sent, and then a rank's own."""
    take = gathered._take

    def logging(total, found, of):
        own = threading.current_thread().name
        order[own].append("own" if total._outs[0].dtype == CASE.dtype else "part")
        take(total, found, of)

    monkeypatch.setattr(gathered, "_take", logging)
    check(CASE, run(CASE, 3, "all_gather", "zigzag"))
    for own in order.values():
        assert own[-8:] == ["computes", "part", "starts", "own", "part", "waits", "starts", "waits"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_forward_of_a_ring_leaves_room_for_messages(ranks, monkeypatch):
    """While keys are on their way; with the last ones there is nothing else to run."""
    found, forward = defaultdict(list), Calls.forward

    def logging(self, job, *args):
        found[self.whole.rank].append(job.options.get("shares_device", False))
        return forward(self, job, *args)

    monkeypatch.setattr(Calls, "forward", logging)
    check(CASE, run(CASE, ranks, "ring", "zigzag", gradients=False))
    assert len(found) == ranks
    for own in found.values():  # a rank's own keys take two calls in zigzag order, which is contiguous order of one
        assert (own[0], own[-1]) == (ranks > 1, False) and own == sorted(own, reverse=True)


@pytest.mark.parametrize("ranks, portions", [(2, 2), (3, 1)])
def test_more_ranks_compute_a_forward_at_once(ranks, portions, in_halves):
    q = numpy.broadcast_to(numpy.float16(0), (12, 48, 16))
    whole = distributed.plan_attention(q, q, q, ranks=ranks, scheme="ulysses", causal=True).whole
    assert (len(heads.portions_of(whole, False)), len(heads.portions_of(whole, True))) == (portions, 2)


def blocks_of_own(order, ranks, rank, **options):
    q = numpy.broadcast_to(numpy.float16(0), (4, 45, 16))
    plan = distributed.plan_attention(q, q, q, ranks=ranks, scheme="ring", order=order, **options)
    first, last = own_blocks(plan.whole, rank)
    whole = plan.whole.blocks(plan.whole.kv_runs[rank], rank)
    assert sum(block.pairs for block in (*first, *last)) == sum(block.pairs for block in whole)
    return first, last


@pytest.mark.parametrize("order_of_rows", ORDERS)
def test_a_causal_rank_has_two_parts(order_of_rows):
    """The last rank has neighbouring rows in zigzag order as well, and they are cut in the middle."""
    for rank in range(3):
        first, last = blocks_of_own(order_of_rows, 3, rank, causal=True)
        assert [block.rows for block in (*first, *last)] == [(0, 23), (23, 45)]


def test_what_would_take_more_calls_is_not_cut():
    for options in ({}, {"causal": True, "window": (30, None)}, {"causal": True, "score": "score * 2.0"}):
        first, last = blocks_of_own("contiguous", 3, 1, **options)
        assert (len(first), len(last)) == (1, 0)
    first, last = blocks_of_own("contiguous", 1, 0, causal=True)
    assert (len(first), len(last)) == (1, 0)


def test_halves_of_a_run():
    assert halves((Run(7, 12, 3),)) == (Run(7, 10, 3), Run(10, 12, 6))
    for runs in ((), (Run(7, 8, 0),), (Run(0, 4, 0), Run(9, 13, 4))):
        assert halves(runs) == runs


def test_a_plan_knows_what_is_beneath_the_last_gradients():
    q = numpy.broadcast_to(numpy.float16(0), (4, 45, 16))
    plan = distributed.plan_attention(q, q, q, ranks=3, scheme="ring", order="zigzag", causal=True)
    *steps, last = steps_of(plan.whole, "ring", 0, backward=True)
    assert len(steps) == len(steps_of(plan.whole, "ring", 0)) == 3
    row = 2 * 4 * 16  # elements of k and v, of which others see the first half of what this rank has
    assert [step.exchange.received for step in (*steps, last)] == [45 * row * 2, 45 * row * 2, 23 * row * 4, 23 * row * 4]
    assert last.overlaps and len(last.blocks) == 1
