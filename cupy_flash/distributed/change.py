"""The exchange of Ulysses, in which arrays change from rows of all heads to heads of all rows, or back.

It has rounds, each of some rows of each rank. What goes in a round is packed while the one before is under way, and what came in it
is brought to its place beneath the next one. What stays on a rank is copied beneath all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .bits import copy, dense, library, raw
from .blocks import Interval
from .communicator import Communicator, Message, Pending
from .heads import WHOLE, Portion, Side, side_of
from .rows import empty_rows, outermost
from .sharding import Run
from .whole import Whole


class Change:
    """One exchange of some arrays: all are named first, and are complete between `end` and the next `begin`.

    Parameters
    ----------
    whole : Whole
    comm : Communicator
    rounds : int
    portion : (int, int)
        Of each rank's heads, of which it is an exchange.
    """

    def __init__(self, whole: Whole, comm: Communicator, rounds: int, portion: Portion = WHOLE) -> None:
        self._whole, self._comm, self._rounds, self._portion = whole, comm, rounds, portion
        self._moves: list[_ToHeads | _ToRows] = []
        self._pending: list[Pending] = []

    def to_heads(self, x: Any, of_keys: bool) -> Any:
        """All rows of this rank's heads, `(..., heads, rows, dim)`, in the order of the sequence, once the exchange has ended."""
        side = side_of(self._whole, of_keys, self._portion)
        made = empty_rows(heads_in(x, side.heads[self._whole.rank]), sum(len(run) for theirs in side.runs for run in theirs))
        self._moves.append(_ToHeads(self._whole, side, self._rounds, x, made))
        return made

    def to_rows(self, x: Any, to: Any, of_keys: bool) -> None:
        """Give back all rows of this rank's heads, and write its own rows of all heads: they are there once the exchange has ended.

        Where a head is on several ranks, what they have is added up.
        """
        self._moves.append(_ToRows(self._whole, side_of(self._whole, of_keys, self._portion), self._rounds, x, to))

    def begin(self) -> None:
        """Send and receive."""
        for number in range(self._rounds):
            sends = [message for move in self._moves for message in move.gives(number)]
            receives = [message for move in self._moves for message in move.takes(number)]
            self._pending.append(self._comm.start(_some(sends), _some(receives)))
        for move in self._moves:
            move.keeps()

    def end(self) -> None:
        """Wait until everything is where it belongs."""
        for number, pending in enumerate(self._pending):
            pending.wait()
            for move in self._moves:
                move.ends(number)
        self._moves, self._pending = [], []


class _Move:
    """How one array changes: it gives and takes messages of a round, keeps what stays, and brings to its place what came."""

    def __init__(self, whole: Whole, side: Side, rounds: int) -> None:
        self.side, self.rounds, self.rank, self.size = side, rounds, whole.rank, whole.size
        self.others = [(whole.rank + step) % whole.size for step in range(1, whole.size)]
        self.even = bool(side.even and self.others)

    def own(self, number: int) -> tuple[Run, ...]:
        """This rank's rows of a round."""
        return self.side.rows(self.rank, number, self.rounds)

    def packed(self, rows: int, like: Any) -> Any:
        """Room for so many rows of as many heads of each other rank as this one has, in the order of ranks."""
        first, stop = self.side.heads[self.rank]
        return library(like).empty((len(self.others), rows, *like.shape[1:-2], stop - first, like.shape[-1]), like.dtype)

    def place(self, other: int) -> int:
        """Where another rank is among all but this one."""
        return other - (other > self.rank)

    def by_ranks(self, rows: Any) -> Any:
        """A view `(ranks, rows, ..., heads of one, dim)` of `(rows, ..., all heads, dim)`."""
        *lead, every, dim = rows.shape
        n, even = len(lead), self.side.even
        view = rows.reshape(*lead, every // even, even, dim).transpose(n, *range(n), n + 1, n + 2)
        return view[..., slice(*self.side.heads[0]), :]

    def beside_own(self, packed: Any, every: Any) -> Iterator[tuple[Any, Any]]:
        """Pairs of parts of what has no entry for this rank and of what has one, `(all but this one, ...)` and `(ranks, ...)`."""
        for less, more in ((slice(0, self.rank),) * 2, (slice(self.rank, self.size - 1), slice(self.rank + 1, self.size))):
            if less.start < less.stop:
                yield packed[less], every[more]


class _ToHeads(_Move):
    def __init__(self, whole: Whole, side: Side, rounds: int, x: Any, made: Any) -> None:
        super().__init__(whole, side, rounds)
        self._rows, self._found = outermost(raw(x)), outermost(raw(made))
        self._packed = self.packed(self._rows.shape[0], self._rows) if self.even else None

    def gives(self, number: int) -> list[Message]:
        runs, rows = self.own(number), self._rows
        if not self.even:
            return [(other, dense(_heads(rows[_own(run)], self.side.heads[other]))) for other in self.others for run in runs]
        for to, of in self.beside_own(self._packed[:, _all(runs)], self.by_ranks(rows)[:, _all(runs)]):
            copy(to, of)
        return [(other, self._packed[self.place(other), _own(run)]) for other in self.others for run in runs]

    def takes(self, number: int) -> list[Message]:
        runs = ((other, run) for other in reversed(self.others) for run in self.side.rows(other, number, self.rounds))
        return [(other, self._found[run.first : run.stop]) for other, run in runs]

    def keeps(self) -> None:
        for run in self.side.runs[self.rank]:
            copy(self._found[run.first : run.stop], _heads(self._rows[_own(run)], self.side.heads[self.rank]))

    def ends(self, number: int) -> None:
        """What comes is received where it belongs."""


class _ToRows(_Move):
    def __init__(self, whole: Whole, side: Side, rounds: int, x: Any, to: Any) -> None:
        super().__init__(whole, side, rounds)
        self._rows, self._target = (outermost(x if side.shared else raw(x)) for x in (x, to))
        rows, like = self._target.shape[0], self._rows
        if self.even:
            self._packed = self.packed(rows, like)
            self._parts = {other: self._packed[self.place(other)] for other in self.others}
        else:
            widths = {other: side.heads[other][1] - side.heads[other][0] for other in self.others}
            shapes = {other: (rows, *like.shape[1:-2], width, like.shape[-1]) for other, width in widths.items()}
            self._parts = {other: library(like).empty(shape, like.dtype) for other, shape in shapes.items()}

    def gives(self, number: int) -> list[Message]:
        runs = ((other, run) for other in self.others for run in self.side.rows(other, number, self.rounds))
        return [(other, dense(self._rows[run.first : run.stop])) for other, run in runs]

    def takes(self, number: int) -> list[Message]:
        return [(other, self._parts[other][_own(run)]) for other in reversed(self.others) for run in self.own(number)]

    def keeps(self) -> None:
        for run in () if self.side.shared else self.side.runs[self.rank]:
            copy(_heads(self._target[_own(run)], self.side.heads[self.rank]), self._rows[run.first : run.stop])

    def ends(self, number: int) -> None:
        if self.side.shared:
            if number == self.rounds - 1:
                self._add()
            return
        rows = _all(self.own(number))
        if self.even:
            for part, place in self.beside_own(self._packed[:, rows], self.by_ranks(self._target)[:, rows]):
                copy(place, part)
            return
        for other, part in self._parts.items():
            copy(_heads(self._target[rows], self.side.heads[other]), part[rows])

    def _add(self) -> None:
        """Add up what ranks have of each head, in their order, so that sums do not depend on which rank computes them."""
        total = library(self._rows).zeros(self._target.shape, self._rows.dtype)
        for other in range(self.size):
            for run in self.side.runs[self.rank]:
                part = self._rows[run.first : run.stop] if other == self.rank else self._parts[other][_own(run)]
                of_heads = _heads(total[_own(run)], self.side.heads[other])
                of_heads += part
        copy(raw(self._target), raw(total.astype(self._target.dtype, copy=False)))


def heads_in(x: Any, heads: Interval) -> Any:
    """Some heads of an array `(..., heads, rows, dim)`."""
    return x[..., slice(*heads), :, :]


def _heads(rows: Any, heads: Interval) -> Any:
    """Some heads of an array `(rows, ..., heads, dim)`."""
    return rows[..., slice(*heads), :]


def _own(run: Run) -> slice:
    """The rows of a run in what its rank has."""
    return slice(run.row, run.row + len(run))


def _all(runs: Sequence[Run]) -> slice:
    """The rows of runs in what their rank has, where they follow each other."""
    return slice(runs[0].row, runs[-1].row + len(runs[-1])) if runs else slice(0, 0)


def _some(messages: list[Message]) -> list[Message]:
    """Those that have any bytes."""
    return [message for message in messages if message[1].size]
