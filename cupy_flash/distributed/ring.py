"""The ring: keys and values go from rank to rank, beneath the computation, and each rank computes with those that are there.

    for step = 0, 1, ...:                                     on rank r
      begin: send the keys at hand to rank r + 1, receive others from rank r - 1
      compute with the keys at hand, which are those of rank r - step
      end:   what was received is at hand

Two blocks of keys and values are in use beside those that a rank has itself: one is read while the other one arrives. A block goes
no further than to the last rank that sees any of it, and only those of its rows that ranks ahead see.

Gradients of keys and values go straight to their owner, one step behind: they are sent while the next ones are computed. For the
last ones to have something to be beneath, a part of what a rank's own keys give is computed in the end. The owner adds up in one
order, so that repeats give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from .blocks import Block, Interval, blocks_of, fused
from .calls import Calls, Job
from .communicator import Communicator, Pending
from .growing import Growing, Results
from .rows import Keys, behind_each_other, hull, located, neighbours, rows_of
from .sharding import Run, halves
from .whole import Whole


def parcel(whole: Whole, source: int, hop: int) -> tuple[Interval, ...]:
    """The positions of the keys of `source` that go on to the rank `hop` behind it, for that one and for those ahead."""
    found = whole.known.get(("parcels", source))
    if found is None:  # from the last rank back: each gets what it sees and what goes on
        found = [()]
        for h in range(whole.size - 1, 0, -1):
            found.append(hull((whole.reach((source + h) % whole.size, source), found[-1]), whole.kv_runs[source]))
        whole.known["parcels", source] = found
    return found[whole.size - hop]


def hops(whole: Whole) -> int:
    """How many steps there are beside the one with a rank's own keys."""
    found = whole.known.get("hops")
    if found is None:
        backwards = range(whole.size - 1, 0, -1)
        found = next((hop for hop in backwards if any(parcel(whole, source, hop) for source in range(whole.size))), 0)
        whole.known["hops"] = found
    return found


class Ring:
    """The steps of the ring.

    Attributes
    ----------
    held : Keys
        The keys at hand. Nothing else may keep them beyond a step, or there would be three blocks in memory.
    """

    def __init__(self, whole: Whole, comm: Communicator, own: Keys) -> None:
        self._whole, self._comm, self._own = whole, comm, own
        self.held = own

    def __iter__(self) -> Iterator[int]:
        """Yield the rank whose keys are at hand; the next ones are on their way meanwhile."""
        rank, size, last = self._whole.rank, self._whole.size, hops(self._whole)
        for step in range(last + 1):
            under_way = self._begin(step) if step < last else None
            yield (rank - step) % size
            if under_way is not None:
                pending, coming = under_way
                pending.wait()
                self.held = coming
                del under_way, pending, coming

    def _begin(self, step: int) -> tuple[Pending, Keys]:
        whole, rank, size = self._whole, self._whole.rank, self._whole.size
        coming = Keys.room(self._own, held_runs(whole, step + 1, rank))
        goes, comes = messages(whole, step, rank), messages(whole, step, (rank - 1) % size)
        sends = [((rank + 1) % size, piece) for piece in self.held.pieces([rows for rows, _ in goes])]
        return self._comm.start(sends, [((rank - 1) % size, piece) for piece in coming.pieces([rows for _, rows in comes])]), coming


def messages(whole: Whole, step: int, rank: int) -> list[tuple[Interval, Interval]]:
    """What a rank sends in a step: rows of what it has, and which of the next rank these become."""
    found = whole.known.get(("messages", step, rank))
    if found is None:
        goes = parcel(whole, (rank - step) % whole.size, step + 1)
        becomes = ((run.row, run.row + len(run)) for run in behind_each_other(goes))
        found = neighbours(zip(located(held_runs(whole, step, rank), goes), becomes))
        whole.known["messages", step, rank] = found
    return found


def held_runs(whole: Whole, step: int, rank: int) -> tuple[Run, ...]:
    """Where the keys lie that a rank has in a step."""
    if not step:
        return whole.kv_runs[rank]
    found = whole.known.get(("held", step, rank))
    if found is None:
        found = whole.known["held", step, rank] = behind_each_other(parcel(whole, (rank - step) % whole.size, step))
    return found


def runs_seen(whole: Whole, rank: int, source: int) -> tuple[Run, ...]:
    """Where the keys of a source lie that queries of a rank see, without others between them."""
    found = whole.known.get(("seen", rank, source))
    if found is None:
        found = whole.known["seen", rank, source] = behind_each_other(whole.reach(rank, source))
    return found


def jobs_of(calls: Calls) -> tuple[tuple[Job, ...], ...]:
    """What is computed in each step."""
    whole = calls.whole
    found = whole.known.get("jobs of ring")
    if found is None:
        last = hops(whole)
        found = tuple(calls.jobs(("ring", step), held_runs(whole, step, whole.rank), step < last) for step in range(last + 1))
        whole.known["jobs of ring"] = found
    return found


def own_blocks(whole: Whole, rank: int) -> tuple[list[Block], list[Block]]:
    """What a backward computes of a rank's own keys before those of others, and behind them.

    The first is beneath the first exchange, the other beneath the last one. Where one call would compute all of it, rows are cut in
    the middle, if that makes two of it.
    """
    sides = whole.q_runs[rank], whole.kv_runs[rank]
    blocks = fused(blocks_of(whole.spans, *sides), whole.movable)
    if not hops(whole):
        return blocks, []
    if len(blocks) == 1 and whole.movable:
        cut = fused(blocks_of(whole.spans, *map(halves, sides)), True)
        blocks = cut if len(cut) == 2 else blocks
    first = (len(blocks) + 1) // 2
    return blocks[:first], blocks[first:]


def jobs_of_backward(calls: Calls) -> tuple[tuple[Job, ...], ...]:
    """What is computed in each step of a backward, of which the first and the last have a rank's own keys."""
    whole = calls.whole
    first, last = (calls.jobs_of(("ring own", i), lambda i=i: own_blocks(whole, whole.rank)[i]) for i in (0, 1))
    return first, *jobs_of(calls)[1:], last


def forward(comm: Communicator, calls: Calls, q: Any, own: Keys, results: Results) -> None:
    """Attention of this rank's queries, merged into results."""
    ring = Ring(calls.whole, comm, own)
    for jobs, _ in zip(jobs_of(calls), ring):
        for job in jobs:
            of_keys = (rows_of(x, job.keys) for x in (ring.held.k, ring.held.v))
            results.take(calls.forward(job, rows_of(q, job.rows), *of_keys, results.room()))


def backward(comm: Communicator, calls: Calls, inputs: tuple[Any, ...], own: Keys, dq: Growing, dkv: tuple[Any, Any]) -> None:
    """Gradients of this rank's queries and keys; `inputs` are dout, q, out, lse and dlse of its rows."""
    whole, rank, size = calls.whole, calls.whole.rank, calls.whole.size
    *steps, last = jobs_of_backward(calls)
    others = [(rank + step) % size for step in range(1, len(steps))]
    parts = tuple([job.keys for job in jobs] for jobs in (steps[0], last))
    home = Home(comm, calls, "ring", own, dkv, parts, others, direct=True)
    ring = Ring(whole, comm, own)
    for step, source in enumerate(ring):
        if not step:
            _gradients(calls, steps[0], inputs, ring.held, dq, home.own)
            continue
        part = Keys.room(own, runs_seen(whole, rank, source), whole.wide)
        places = part_rows(whole, source, steps[step])
        order = calls.order(("part", step), places, part.k.shape[-2], False, adds=True)
        _gradients(calls, steps[step], inputs, ring.held, dq, Growing((part.k, part.v), order, whole.wide))
        home.send(source, part, others[step - 1])
    del ring  # and the keys that came last
    _gradients(calls, last, inputs, own, dq, home.own)
    home.end()


def part_rows(whole: Whole, source: int, jobs: Sequence[Job]) -> list[Interval]:
    """Where the keys of jobs lie in the rows of a source that this rank sees: as neighbours, where one call reads them as such."""
    runs = runs_seen(whole, whole.rank, source)
    firsts = [next(located(runs, [(job.key_at, job.key_at + 1)]))[0] for job in jobs]
    return [(first, first + job.keys[1] - job.keys[0]) for first, job in zip(firsts, jobs)]


def _gradients(calls: Calls, jobs: Sequence[Job], inputs: tuple[Any, ...], held: Keys, dq: Growing, dkv: Growing) -> None:
    for job in jobs:
        adds = dq.adds, dkv.adds, dkv.adds
        found = gradients_of(calls, job, inputs, held, (*dq.room(), *dkv.room()), adds)
        dq.take(found[:1])
        dkv.take(found[1:])


def gradients_of(
    calls: Calls, job: Job, inputs: tuple[Any, ...], held: Keys, room: tuple[Any, Any, Any], adds: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    """The gradients of one job, of its rows and of its keys; which of them are added to what is there."""
    dout, q, out, lse, dlse = inputs
    rows = slice(*job.rows)
    dout, q, out = (rows_of(x, job.rows) for x in (dout, q, out))
    lse, dlse = lse[..., rows], None if dlse is None else dlse[..., rows]
    return calls.backward(job, (dout, q, rows_of(held.k, job.keys), rows_of(held.v, job.keys), out, lse, dlse), room, adds)


class Home:
    """Gradients of keys on their way to the ranks that have these.

    Parameters
    ----------
    comm : Communicator
    calls : Calls
    name : str
        Of the scheme.
    keys : Keys
        This rank's.
    dkv : (array, array)
        Where this rank's own go.
    parts : two sequences of (int, int)
        The rows of parts that it computes itself: those that come first, and those that come before the last one from another rank.
    others : sequence of int
        The ranks whose parts it gets, in this order.
    direct : bool
        Whether its own parts can be written where gradients go.
    """

    def __init__(
        self, comm: Communicator, calls: Calls, name: str, keys: Keys, dkv: tuple[Any, Any],
        parts: tuple[Sequence[Interval], Sequence[Interval]], others: Sequence[int], direct: bool,
    ) -> None:  # fmt: skip
        self._comm, self._whole, self._keys = comm, calls.whole, keys
        wide = calls.whole.wide
        of_others = [[(own, False) for own, _ in self._places(other)] for other in others]
        first, last = ([(own, direct) for own in some] for some in parts)
        every = [*first, *chain(*of_others[:-1]), *last, *chain(*of_others[-1:])]
        rows, can = [own for own, _ in every], [is_direct for _, is_direct in every]
        narrow = dkv[0].dtype != wide
        self.own = Growing(dkv, calls.order(("home", name), rows, dkv[0].shape[-2], narrow, can, adds=True), wide)
        self._pending = self._part = self._coming = self._other = None

    def send(self, owner: int, part: Keys, other: int) -> None:
        """Send a part to the owner of its keys, receive what `other` has of this rank's, and add what was sent before."""
        self.end()
        whole = self._whole
        coming = Keys.room(self._keys, runs_seen(whole, other, whole.rank), whole.wide)
        sends, receives = ([(rank, x) for x in keys.pieces(keys.all)] for rank, keys in ((owner, part), (other, coming)))
        self._pending, self._part, self._coming, self._other = self._comm.start(sends, receives), part, coming, other

    def end(self) -> None:
        """Add what has arrived."""
        if self._pending is None:
            return
        self._pending.wait()
        for _, rows in self._places(self._other):
            self.own.take((rows_of(self._coming.k, rows), rows_of(self._coming.v, rows)))
        self._pending = self._part = self._coming = None

    def _places(self, other: int) -> tuple[tuple[Interval, Interval], ...]:
        """Where rows of a part from another rank go, and where they are in it."""
        whole = self._whole
        found = whole.known.get(("places", other))
        if found is None:
            comes = whole.reach(other, whole.rank)
            own = located(whole.kv_runs[whole.rank], comes)
            there = ((run.row, run.row + len(run)) for run in runs_seen(whole, other, whole.rank))
            found = tuple(neighbours(zip(own, there)))
            whole.known["places", other] = found
        return found


