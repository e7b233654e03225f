"""The ring: keys and values go from rank to rank, beneath the computation, and each rank computes with those that are there.

    for step = 0, 1, ...:                                     on rank r
      begin: send the keys at hand to rank r + 1, receive others from rank r - 1
      compute with the keys at hand, which are those of rank r - step
      end:   what was received is at hand

Two blocks of keys and values are in use beside those that a rank has itself: one is read while the other one arrives. A block goes
no further than to the last rank that sees any of it, and only those of its rows that ranks ahead see.

Gradients of keys and values go straight to their owner, one step behind: they are sent while the next ones are computed. The owner
adds them up in the order of steps, so that repeats give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..problem.backward import Gradients
from .blocks import Interval
from .calls import Calls
from .communicator import Communicator, Pending
from .rows import Keys, Partial, RowSums, add, hull, located, rows_of
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
        goes = parcel(whole, (rank - step) % size, step + 1)
        comes = parcel(whole, (rank - step - 1) % size, step + 1)
        coming = Keys.room(self._own, comes)
        sends = [((rank + 1) % size, piece) for piece in self.held.pieces(goes)]
        return self._comm.start(sends, [((rank - 1) % size, piece) for piece in coming.pieces(comes)]), coming


def forward(comm: Communicator, calls: Calls, q: Any, own: Keys, partial: Partial) -> None:
    """Attention of this rank's queries, merged into a partial result."""
    ring = Ring(calls.whole, comm, own)
    for _ in ring:
        for block in calls.blocks(ring.held.runs):
            of_keys = (rows_of(x, block.keys) for x in (ring.held.k, ring.held.v))
            partial.add(block.rows, *calls.forward(block, rows_of(q, block.rows), *of_keys))


def backward(comm: Communicator, calls: Calls, inputs: tuple[Any, ...], own: Keys, sums: Gradients) -> None:
    """Gradients of this rank's queries and keys, added to sums; `inputs` are dout, q, out, lse and dlse of its rows."""
    whole, rank, size = calls.whole, calls.whole.rank, calls.whole.size
    home, ring, dq = Home(comm, calls, own, sums), Ring(whole, comm, own), RowSums(sums.dq)
    for step, source in enumerate(ring):
        if source == rank:
            add_gradients(calls, inputs, ring.held, dq, sums.dk, sums.dv)
            continue
        part = Keys.room(home.like, whole.reach(rank, source))
        part.k[...], part.v[...] = 0, 0
        add_gradients(calls, inputs, ring.held, dq, part.k, part.v, part)
        home.send(source, part, (rank + step) % size)
    home.end()
    dq.end()


def add_gradients(
    calls: Calls, inputs: tuple[Any, ...], held: Keys, dq: RowSums, dk: Any, dv: Any, part: Keys | None = None
) -> None:
    """Add what all blocks with these keys give; `part` says where the rows of `dk` and `dv` lie, if not as the keys do."""
    dout, q, out, lse, dlse = inputs
    for block in calls.blocks(held.runs):
        rows = slice(*block.rows)
        of_rows = (rows_of(dout, block.rows), rows_of(q, block.rows), rows_of(out, block.rows))
        of_lse = [None if x is None else x[..., rows] for x in (lse, dlse)]
        found = calls.backward(block, *of_rows[:2], *(rows_of(x, block.keys) for x in (held.k, held.v)), of_rows[2], *of_lse)
        keys = block.keys
        if part is not None:
            first = block.span.kv[0] + block.kv_from
            [(start, _)] = located(part.runs, [(first, first + 1)])  # keys of two runs that one call reads are neighbours there too
            keys = start, start + keys[1] - keys[0]
        dq.add(block.rows, found.dq)
        for total, gradient in ((dk, found.dk), (dv, found.dv)):
            add(rows_of(total, keys), gradient)


class Home:
    """Gradients of keys on their way to the ranks that have these."""

    def __init__(self, comm: Communicator, calls: Calls, own: Keys, sums: Gradients) -> None:
        self._comm, self._whole, self._sums = comm, calls.whole, sums
        self.like = Keys(sums.dk, sums.dv, own.runs)
        self._pending = self._part = self._coming = None

    def send(self, owner: int, part: Keys, other: int) -> None:
        """Send a part to the owner of its keys, receive what `other` has of this rank's, and add what was sent before."""
        self.end()
        whole = self._whole
        comes = whole.reach(other, whole.rank)
        coming = Keys.room(self.like, comes)
        sends = [(owner, piece) for piece in part.pieces([(run.first, run.stop) for run in part.runs])]
        receives = [(other, piece) for piece in coming.pieces(comes)]
        self._pending, self._part, self._coming = self._comm.start(sends, receives), part, coming

    def end(self) -> None:
        """Add what has arrived."""
        if self._pending is None:
            return
        self._pending.wait()
        for run in self._coming.runs:
            [own] = located(self.like.runs, [(run.first, run.stop)])
            for total, part in ((self._sums.dk, self._coming.k), (self._sums.dv, self._coming.v)):
                total[..., own[0] : own[1], :] += part[..., run.row : run.row + len(run), :]
        self._pending = self._part = self._coming = None


