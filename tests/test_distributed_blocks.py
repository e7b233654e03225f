"""Which rows ranks have, and how a mask is cut into blocks: each pair that sees each other is in exactly one, and no other is."""

import random
from itertools import pairwise

import numpy
import pytest

from cupy_flash import distributed
from cupy_flash.distributed.blocks import Group, Span, blocks_of, fused, grouped, seen_keys
from cupy_flash.distributed.sharding import ORDERS, Run, runs_of
from cupy_flash.problem.mask import band

DRAWN = 600


def drawn(number):
    """Lengths, a mask, and parts of ranks, by a number."""
    rng = random.Random(number)
    len_q, len_kv = rng.randint(0, 24), rng.randint(0, 24)
    prefix = rng.choice([0, 0, rng.randint(0, 8)])
    window = None if prefix else rng.choice([None, rng.randint(0, 9)]), rng.choice([None, rng.randint(0, 9)])
    mask = band(len_q, len_kv, rng.choice([False, True, "top_left"]), window, prefix)
    ranks, order = rng.randint(1, 5), rng.choice(ORDERS)

    def parts(total):
        ends = [0, *sorted(rng.randint(0, total) for _ in range(ranks - 1)), total]
        return [b - a for a, b in pairwise(ends)]

    return mask, runs_of(parts(len_q), order), runs_of(parts(len_kv), order)


def counted(blocks, mask, q_runs, kv_runs):
    """How many blocks each pair is in."""
    found = numpy.zeros((mask.len_q, mask.len_kv), int)
    rows = numpy.concatenate([numpy.arange(0), *(numpy.arange(run.first, run.stop) for run in q_runs)])
    keys = numpy.concatenate([numpy.arange(0), *(numpy.arange(run.first, run.stop) for run in kv_runs)])
    for block in blocks:
        seen = block.mask.visible(0, block.rows[1] - block.rows[0], 0, block.keys[1] - block.keys[0])
        found[numpy.ix_(rows[slice(*block.rows)], keys[slice(*block.keys)])] += seen
        assert block.pairs == seen.sum() > 0
        assert all(end is None or end >= 0 for end in block.window)
    return found


@pytest.mark.parametrize("joins", [False, True])
def test_blocks_are_the_mask(joins):
    for number in range(DRAWN):
        mask, q_runs, kv_runs = drawn(number)
        span = Span(0, (0, mask.len_q), (0, mask.len_kv), mask)
        found = numpy.zeros((mask.len_q, mask.len_kv), int)
        for of_q in q_runs:
            for of_kv in kv_runs:
                found += counted(fused(blocks_of([span], of_q, of_kv), joins), mask, of_q, of_kv)
        assert numpy.array_equal(found, mask.visible(0, mask.len_q, 0, mask.len_kv)), number


def test_of_keys_that_are_sent_the_first_and_the_last_are_seen():
    for number in range(DRAWN):
        mask, q_runs, kv_runs = drawn(number)
        span = Span(0, (0, mask.len_q), (0, mask.len_kv), mask)
        seen = mask.visible(0, mask.len_q, 0, mask.len_kv)
        for of_q in q_runs:
            rows = numpy.concatenate([numpy.arange(0), *(numpy.arange(run.first, run.stop) for run in of_q)])
            for run in (run for runs in kv_runs for run in runs):
                keys = numpy.flatnonzero(seen[rows][:, run.first : run.stop].any(axis=0))
                wanted = (run.row + keys[0], run.row + keys[-1] + 1) if keys.size else None
                assert seen_keys([span], of_q, run) == wanted


def test_neighbours_that_see_all_are_one_call():
    """In zigzag order a rank needs one call for the keys of another, and two for its own."""
    mask = band(64, 64, True, (None, None))
    span, runs = Span(0, (0, 64), (0, 64), mask), runs_of([16] * 4, "zigzag")
    for rank in range(4):
        for source in range(4):
            blocks = fused(blocks_of([span], runs[rank], runs[source]), True)
            assert len(blocks) == (1 if source != rank or rank == 3 else 2)


def test_short_sequences_are_computed_together():
    """Those that one rank has whole are one call; of those that are cut each has its own."""
    ends = [0, 5, 9, 9, 20, 26, 31, 40]
    spans = [Span(i, own, own, band(own[1] - own[0], own[1] - own[0], True, (None, None))) for i, own in enumerate(pairwise(ends))]
    q_runs, kv_runs = (runs_of([24, 16], "contiguous") for _ in range(2))
    own = grouped(blocks_of(spans, q_runs[0], kv_runs[0]))
    assert [(block.span.number, block.rows) for block in own] == [(0, (0, 9)), (3, (9, 20)), (4, (20, 24))]
    assert isinstance(own[0], Group)
    assert own[0].offsets == {"cu_seqlens_q": [0, 5, 9], "cu_seqlens_kv": [0, 5, 9]}
    behind = grouped(blocks_of(spans, q_runs[1], [Run(0, 40, 0)]))
    assert [(block.span.number, block.rows, block.keys) for block in behind] == [(4, (0, 2), (20, 26)), (5, (2, 16), (26, 40))]


@pytest.mark.parametrize("order", ORDERS)
def test_shard_and_unshard(order):
    x = numpy.arange(2 * 13 * 3).reshape(2, 13, 3)
    for lengths in ((13,), (5, 8), (0, 7, 0, 6), (4, 4, 3, 2)):
        ranks = len(lengths)
        parts = [distributed.shard(x, rank, ranks, order=order, lengths=lengths) for rank in range(ranks)]
        assert [part.shape[1] for part in parts] == list(lengths)
        assert numpy.array_equal(distributed.unshard(parts, order=order), x)
        for rank, part in enumerate(parts):
            assert numpy.array_equal(part, x[:, distributed.positions(lengths, rank, order=order)])


def test_zigzag_parts_have_equal_work():
    lengths = distributed.part_lengths(8 * 64, 8)
    work = [int((distributed.positions(lengths, rank, order="zigzag") + 1).sum()) for rank in range(8)]
    assert len(set(work)) == 1
    work = [int((distributed.positions(lengths, rank) + 1).sum()) for rank in range(8)]
    assert max(work) > 10 * min(work)


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda x: distributed.shard(x, 2, 2), "rank"),
        (lambda x: distributed.shard(x, 0, 2, lengths=(3, 3)), "lengths"),
        (lambda x: distributed.shard(x, 0, 2, order="striped"), "order"),
        (lambda x: distributed.shard(x, 0, 2, order=1), "order"),
        (lambda x: distributed.positions((3, -1), 0), "lengths"),
        (lambda x: distributed.positions((3, 1), 2), "rank"),
        (lambda x: distributed.part_lengths(3, 0), "total, ranks"),
        (lambda x: distributed.unshard([x], order="other"), "order"),
    ],
)
def test_wrong_arguments_are_named(call, named):
    with pytest.raises((TypeError, ValueError), match=f"^{named}: expected "):
        call(numpy.zeros((4, 2)))
