"""All-gather: each rank gets all keys and values that its queries see, in the order of the sequence, and computes at once.

Gradients of keys and values go to their owners in rounds, in each to the rank one further, and are added up in this order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ..problem.backward import Gradients
from .blocks import Interval, fused
from .calls import Calls
from .communicator import Communicator
from .ring import Home, add_gradients
from .rows import Keys, Partial, RowSums, behind_each_other, common, joined, located, rows_of
from .whole import Whole


def needs(whole: Whole, rank: int) -> tuple[Interval, ...]:
    """The positions of all keys that queries of a rank see."""
    found = whole.known.get(("needs", rank))
    if found is None:
        found = joined(interval for source in range(whole.size) for interval in whole.reach(rank, source))
        whole.known["needs", rank] = found
    return found


def once(whole: Whole, rank: int) -> bool:
    """Whether one call computes all that a row sees, for each row of a rank."""
    runs = behind_each_other(needs(whole, rank)) if whole.size > 1 else whole.kv_runs[rank]
    rows = sorted(block.rows for block in fused(whole.blocks(runs, rank), whole.movable))
    return all(before[1] <= after[0] for before, after in pairwise(rows))


def gather(comm: Communicator, whole: Whole, own: Keys) -> Keys:
    """The keys that this rank's queries see, in order."""
    rank = whole.rank
    if whole.size == 1:
        return own
    runs = [[(run.first, run.stop) for run in runs] for runs in whole.kv_runs]
    mine = needs(whole, rank)
    found = Keys.room(own, mine)
    # Of each pair of ranks, the next one first, so that not all send to the same one.
    others = [(rank + step) % whole.size for step in range(1, whole.size)]
    sends = [(other, piece) for other in others for piece in own.pieces(common(runs[rank], needs(whole, other)))]
    receives = [(other, piece) for other in reversed(others) for piece in found.pieces(common(runs[other], mine))]
    pending = comm.start(sends, receives)
    found.take(own, common(runs[rank], mine))
    pending.wait()
    return found


def forward(comm: Communicator, calls: Calls, q: Any, own: Keys, partial: Partial) -> None:
    """Attention of this rank's queries, merged into a partial result."""
    keys = gather(comm, calls.whole, own)
    for block in calls.blocks(keys.runs):
        of_keys = (rows_of(x, block.keys) for x in (keys.k, keys.v))
        partial.add(block.rows, *calls.forward(block, rows_of(q, block.rows), *of_keys))


def backward(comm: Communicator, calls: Calls, inputs: tuple[Any, ...], own: Keys, sums: Gradients) -> None:
    """Gradients of this rank's queries and keys, added to sums."""
    whole, rank, size = calls.whole, calls.whole.rank, calls.whole.size
    keys = gather(comm, whole, own)
    home = Home(comm, calls, own, sums)
    found = Keys.room(home.like, [(run.first, run.stop) for run in keys.runs])
    found.k[...], found.v[...] = 0, 0
    dq = RowSums(sums.dq)
    add_gradients(calls, inputs, keys, dq, found.k, found.v)
    dq.end()
    mine = whole.reach(rank, rank)
    for to, of in zip(located(own.runs, mine), located(found.runs, mine)):
        for total, part in ((sums.dk, found.k), (sums.dv, found.v)):
            rows_of(total, to)[...] += rows_of(part, of)
    for step in range(1, size):
        owner, other = (rank - step) % size, (rank + step) % size
        home.send(owner, found.some(whole.reach(rank, owner)), other)
    home.end()
