"""All-gather: each rank gets all keys and values that its queries see, in the order of the sequence, and computes at once.

Gradients of keys and values go to their owners in rounds, in each to the rank one further, and are added up in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import ring
from .blocks import Interval
from .calls import Calls, Job
from .communicator import Communicator
from .growing import Growing, Results
from .ring import Home, gradients_of, runs_seen
from .rows import Keys, behind_each_other, common, joined, located, rows_of
from .sharding import Run
from .whole import Whole


def needs(whole: Whole, rank: int) -> tuple[Interval, ...]:
    """The positions of all keys that queries of a rank see."""
    found = whole.known.get(("needs", rank))
    if found is None:
        found = joined(interval for source in range(whole.size) for interval in whole.reach(rank, source))
        whole.known["needs", rank] = found
    return found


def held_runs(whole: Whole, rank: int) -> tuple[Run, ...]:
    """Where the keys lie that a rank has once all are there."""
    if whole.size == 1:
        return whole.kv_runs[rank]
    found = whole.known.get(("gathered", rank))
    if found is None:
        found = whole.known["gathered", rank] = behind_each_other(needs(whole, rank))
    return found


def jobs_of(calls: Calls) -> tuple[tuple[Job, ...], ...]:
    """What is computed, in one step."""
    return (calls.jobs("all_gather", held_runs(calls.whole, calls.whole.rank)),)


jobs_of_backward = jobs_of


@dataclass(frozen=True)
class Exchange:
    """What goes from where to where: rows of a rank's own keys, or of those that its queries see.

    Parameters
    ----------
    sends, receives : tuple of (int, rows)
        The other rank, and the rows that go to it, or come.
    from_own : bool
        Whether some of what is sent is not seen by this rank itself, so that it goes from its own keys.
    own, becomes : tuple of (int, int)
        Those of its own keys that its queries see, and where these lie then.
    """

    sends: tuple[tuple[int, tuple[Interval, ...]], ...]
    receives: tuple[tuple[int, tuple[Interval, ...]], ...]
    from_own: bool
    own: tuple[Interval, ...]
    becomes: tuple[Interval, ...]


def exchange_of(whole: Whole) -> Exchange:
    """The exchange of this rank."""
    found = whole.known.get("exchange")
    if found is None:
        found = whole.known["exchange"] = _exchange(whole)
    return found


def _exchange(whole: Whole) -> Exchange:
    rank, mine, held = whole.rank, needs(whole, whole.rank), held_runs(whole, whole.rank)
    runs = [[(run.first, run.stop) for run in runs] for runs in whole.kv_runs]
    # Of each pair of ranks, the next one first, so that not all send to the same one.
    others = [(rank + step) % whole.size for step in range(1, whole.size)]
    goes = [(other, common(runs[rank], needs(whole, other))) for other in others]
    from_own = any(common(intervals, mine) != intervals for _, intervals in goes)
    of = whole.kv_runs[rank] if from_own else held
    own = common(runs[rank], mine)
    return Exchange(
        tuple((other, tuple(located(of, intervals))) for other, intervals in goes),
        tuple((other, tuple(located(held, common(runs[other], mine)))) for other in reversed(others)),
        from_own,
        tuple(located(whole.kv_runs[rank], own)),
        tuple(located(held, own)),
    )


def gather(comm: Communicator, whole: Whole, own: Keys) -> Keys:
    """The keys that this rank's queries see, in order."""
    if whole.size == 1:
        return own
    exchange = exchange_of(whole)
    found = Keys.room(own, held_runs(whole, whole.rank))
    found.take(exchange.becomes, own, exchange.own)
    given = own if exchange.from_own else found
    sends = [(other, piece) for other, rows in exchange.sends for piece in given.pieces(rows)]
    receives = [(other, piece) for other, rows in exchange.receives for piece in found.pieces(rows)]
    comm.start(sends, receives).wait()
    return found


def forward(comm: Communicator, calls: Calls, q: Any, own: Keys, results: Results) -> None:
    """Attention of this rank's queries."""
    keys = gather(comm, calls.whole, own)
    for job in jobs_of(calls)[0]:
        of_keys = (rows_of(x, job.keys) for x in (keys.k, keys.v))
        results.take(calls.forward(job, rows_of(q, job.rows), *of_keys, results.room()))


def backward(comm: Communicator, calls: Calls, inputs: tuple[Any, ...], own: Keys, dq: Growing, dkv: tuple[Any, Any]) -> None:
    """Gradients of this rank's queries and keys; `inputs` are dout, q, out, lse and dlse of its rows."""
    whole, rank, size = calls.whole, calls.whole.rank, calls.whole.size
    if size == 1:  # whose gradients go nowhere
        ring.backward(comm, calls, inputs, own, dq, dkv)
        return
    keys = gather(comm, whole, own)
    found = []
    for job in jobs_of(calls)[0]:
        of_rows, *of_keys = gradients_of(calls, job, inputs, keys, (*dq.room(), None, None), (dq.adds, False, False))
        dq.take((of_rows,))
        found.append(of_keys)
    del keys
    mine = shares(calls, rank)
    others = [(rank + step) % size for step in range(1, size)]
    home = Home(comm, calls, "all_gather", own, dkv, (mine.rows, ()), others, direct=False)
    for step in range(1, size):
        owner, other = (rank - step) % size, (rank + step) % size
        part, theirs = Keys.room(own, runs_seen(whole, rank, owner), whole.wide), shares(calls, owner)
        order = calls.order(("part of", owner), theirs.rows, part.k.shape[-2], False, [False] * len(theirs.rows))
        _take(Growing((part.k, part.v), order, whole.wide), found, theirs)
        home.send(owner, part, other)
        if step == 1:  # beneath the first exchange, and before what comes in it
            _take(home.own, found, mine)
    home.end()


@dataclass(frozen=True)
class Shares:
    """What jobs give to the keys of one rank.

    Parameters
    ----------
    rows : tuple of (int, int)
        Of each share, among the rows of that rank that this one sees; of its own, among all.
    jobs : tuple of int
        Which job gives it.
    of : tuple of (int, int)
        The rows of that job's keys.
    """

    rows: tuple[Interval, ...]
    jobs: tuple[int, ...]
    of: tuple[Interval, ...]


def shares(calls: Calls, owner: int) -> Shares:
    """What this rank's jobs give to the keys of a rank."""
    whole = calls.whole
    found = whole.known.get(("shares", owner))
    if found is None:
        held, reach = held_runs(whole, whole.rank), whole.reach(whole.rank, owner)
        runs = whole.kv_runs[owner] if owner == whole.rank else runs_seen(whole, whole.rank, owner)
        places = list(zip(located(held, reach), located(runs, reach)))
        both = [
            ((row + max(first, job.keys[0]) - first, row + min(stop, job.keys[1]) - first), number,
             (max(first, job.keys[0]) - job.keys[0], min(stop, job.keys[1]) - job.keys[0]))
            for number, job in enumerate(jobs_of(calls)[0]) for (first, stop), (row, _) in places
            if max(first, job.keys[0]) < min(stop, job.keys[1])
        ]  # fmt: skip
        found = whole.known["shares", owner] = Shares(*map(tuple, zip(*both))) if both else Shares((), (), ())
    return found


def _take(total: Growing, found: Sequence[Sequence[Any]], of: Shares) -> None:
    for number, rows in zip(of.jobs, of.of):
        total.take(tuple([rows_of(x, rows) for x in found[number]]))
