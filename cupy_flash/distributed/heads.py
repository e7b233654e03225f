"""Which heads each rank computes in Ulysses, in portions that follow each other.

A key head goes to each rank that has one of its query heads: where there are fewer key heads than ranks, to several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..problem.layout import ITEMSIZE
from .blocks import Interval
from .sharding import Run
from .whole import Whole

Portion = tuple[int, int]  # the number of a portion of each rank's heads, and how many portions there are
WHOLE: Portion = (0, 1)
LEAST = 16 << 20  # bytes that a rank sends of queries in half an exchange: of fewer, starting it takes longer than is saved
LEAST_FLOPS = 4e12  # of a rank's forward: with fewer, a device has done one portion before its host has queued the other
MOST_BESIDE = 2  # ranks whose messages are beneath a forward, whose blocks stay on their multiprocessors


def heads_of(whole: Whole, rank: int) -> Interval:
    """The query heads that a rank computes: whole groups that share a key head, where there are enough of them."""
    heads, groups = whole.problem.heads_q, whole.problem.heads_kv
    units, unit = (groups, heads // groups) if groups and groups % whole.size == 0 else (heads, 1)
    ends = [unit * (units * r // whole.size) for r in (rank, rank + 1)]
    return ends[0], ends[1]


def key_heads_of(whole: Whole, rank: int) -> Interval:
    """The key heads of these."""
    (first, stop), group = heads_of(whole, rank), max(whole.problem.heads_per_kv, 1)
    return (first // group, -(-stop // group)) if first < stop else (first // group, first // group)


def even_groups(whole: Whole, rank: int) -> Iterator[tuple[Interval, Interval]]:
    """The query heads and key heads of a rank, in parts in which each key head has equally many of them."""
    (first, stop), group = heads_of(whole, rank), max(whole.problem.heads_per_kv, 1)
    while first < stop:
        if first % group == 0 and first + group <= stop:
            end = first + (stop - first) // group * group
            yield (first, end), (first // group, end // group)
        else:
            end = min(stop, first - first % group + group)
            yield (first, end), (first // group, first // group + 1)
        first = end


@dataclass(frozen=True)
class Side:
    """Where rows and heads are, of queries or of keys.

    Parameters
    ----------
    heads : tuple of (int, int)
        Those of each rank.
    runs : tuple of tuple of Run
        The rows of each rank.
    even : int
        How many heads each rank has in all portions, if all have as many and none is on several; otherwise 0.
    shared : bool
        Whether a head is on several ranks, each of which then has a part of its gradient.
    """

    heads: tuple[Interval, ...]
    runs: tuple[tuple[Run, ...], ...]
    even: int
    shared: bool

    def rows(self, rank: int, number: int, rounds: int) -> tuple[Run, ...]:
        """The rows of a rank that go in a round, of so many."""
        total = sum(map(len, self.runs[rank]))
        first, stop = (total * i // rounds for i in (number, number + 1))
        cut = [(run, max(run.row, first), min(run.row + len(run), stop)) for run in self.runs[rank]]
        return tuple(Run(run.first + a - run.row, run.first + b - run.row, a) for run, a, b in cut if a < b)


def side_of(whole: Whole, of_keys: bool, portion: Portion = WHOLE) -> Side:
    """The side of queries or of keys, with a portion of each rank's heads, which are even if there are several portions."""
    found = whole.known.get(("side", of_keys, portion))
    if found is None:
        heads = tuple((key_heads_of if of_keys else heads_of)(whole, rank) for rank in range(whole.size))
        n = heads[0][1]
        even = n if heads == tuple((n * rank, n * (rank + 1)) for rank in range(whole.size)) else 0
        shared = any(a[1] > b[0] for a, b in pairwise([own for own in heads if own[0] < own[1]]))
        if portion != WHOLE and not (of_keys and n == 1):
            units = n if of_keys or side_of(whole, True).even == 1 else side_of(whole, True).even
            first, stop = (units * i // portion[1] * (n // units) for i in (portion[0], portion[0] + 1))
            heads = tuple((n * rank + first, n * rank + stop) for rank in range(whole.size))
        found = Side(heads, whole.kv_runs if of_keys else whole.q_runs, even, shared)
        whole.known["side", of_keys, portion] = found
    return found


def halves(whole: Whole) -> int:
    """In how many parts an exchange is done, so that there is something to do beneath it: 1 or 2, on all ranks the same."""
    p = whole.problem
    queries = math.prod(whole.batch) * p.heads_q * p.dim * ITEMSIZE[p.dtype] * sum(whole.rows_q) // whole.size
    return 2 if queries * (whole.size - 1) // whole.size >= 2 * LEAST else 1


def portions_of(whole: Whole, backward: bool) -> tuple[Portion, ...]:
    """The portions of heads that are computed one after the other, while others are under way.

    Each has whole key heads, so that each gradient is complete in one of them. A forward halves the queries of a single key head,
    and has no portions where it is short: on two H100s of 8,192 tokens each its host took 5.1 ms for two, and 2.8 ms for one. Nor
    with more than two ranks: a message has multiprocessors on the ranks where it has begun until it has on all, and where blocks
    that stay were there first it begins when they end. On eight H200s of 65,536 tokens each two portions took 1,119 ms and one 794.
    """
    keys, queries = side_of(whole, True).even, side_of(whole, False).even
    if backward:
        several = queries and keys > 1
    else:
        long = whole.problem.flops >= LEAST_FLOPS * whole.size
        several = queries and (keys > 1 or (keys == 1 and queries > 1)) and long and whole.size <= MOST_BESIDE
    return ((0, 2), (1, 2)) if several and halves(whole) > 1 else (WHOLE,)


def comes_again(whole: Whole, of_keys: bool, portion: Portion) -> bool:
    """Whether a portion has the same heads as the one before: the single key head of each rank."""
    return of_keys and portion[0] > 0 and side_of(whole, True).even == 1


def groups_of(whole: Whole, portion: Portion, rank: int) -> list[tuple[Interval, Interval]]:
    """The query heads and key heads of a portion of a rank's, as `even_groups`."""
    if portion == WHOLE:
        return list(even_groups(whole, rank))
    return [(side_of(whole, False, portion).heads[rank], side_of(whole, True, portion).heads[rank])]
