"""In which order the parts of a result become one: so that little is read and written besides.

Parts are as wide as sums, so that nothing is rounded but the result, once. The first part of a row is written where the sum is,
which is where the result goes if that is as wide. Gradients that follow are added there by what computes them. Other parts wait,
two of them at most, and are then merged in one pass into the sum; the last of a row are merged into the result. A part that is
alone is the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .blocks import Interval

WAITING = 2  # parts that are merged in one pass, at most: each takes memory until then


@dataclass(frozen=True, slots=True)
class Merge:
    """One pass over some rows.

    Parameters
    ----------
    rows : (int, int)
    parts : tuple of int
        The numbers of the parts; none if what there is only moves.
    base : str
        What they are merged with: 'out', 'sum', or '' if they are the first.
    into : str
        Where to: 'out' or 'sum'.
    """

    rows: Interval
    parts: tuple[int, ...]
    base: str
    into: str


@dataclass(frozen=True)
class Order:
    """What becomes of parts, each of which has some rows.

    Parameters
    ----------
    rows : tuple of (int, int)
        Those of each part, in the order in which parts come.
    places : tuple of str
        Where each is written: 'out' or 'sum', or '' for memory of its own, where it waits.
    added : tuple of bool
        Which are added to what is there.
    cleared : tuple of tuple of (int, int)
        Of these, the rows where nothing is yet.
    after : tuple of tuple of Merge
        What is merged once each part is there.
    nothing : tuple of (int, int)
        Rows that no part has.
    """

    rows: tuple[Interval, ...]
    places: tuple[str, ...]
    added: tuple[bool, ...]
    cleared: tuple[tuple[Interval, ...], ...]
    after: tuple[tuple[Merge, ...], ...]
    nothing: tuple[Interval, ...]

    @property
    def sums(self) -> bool:
        """Whether memory for sums is needed."""
        return "sum" in self.places or any(merge.into == "sum" for merges in self.after for merge in merges)

    @property
    def waiting(self) -> int:
        """Rows of parts that are in memory of their own at the same time, at most."""
        most = held = 0
        for (first, stop), place, merges in zip(self.rows, self.places, self.after):
            held += 0 if place else stop - first
            most = max(most, held)
            held = 0 if any(merge.parts for merge in merges) else held
        return most

    @property
    def alone(self) -> int:
        """Rows of the largest part that is written where the result goes."""
        return max((stop - first for (first, stop), place in zip(self.rows, self.places) if place == "out"), default=0)


def order_of(rows: Sequence[Interval], total: int, direct: Sequence[bool], narrow: bool, adds: bool = False) -> Order:
    """The order for parts with these rows.

    Parameters
    ----------
    rows : sequence of (int, int)
    total : int
        Rows of the result.
    direct : sequence of bool
        Which parts can be written where others are added to them.
    narrow : bool
        Whether the result is of a narrower dtype than sums and parts. Sums then need memory of their own, and only a part that is
        alone is written where the result goes.
    adds : bool
        Whether what computes these parts can also add them to what is there, so that none of them has to wait.
    """
    ends = sorted({0, total, *(end for part in rows for end in part)})
    having = {(a, b): [i for i, part in enumerate(rows) if part[0] <= a and b <= part[1]] for a, b in pairwise(ends)}
    there, waiting, after = dict.fromkeys(having, ""), [], []
    places, added, cleared = [], [], []
    for i in range(len(rows)):
        own = [atom for atom, parts in having.items() if i in parts]
        is_first = all(having[atom][0] == i for atom in own)
        alone = all(len(having[atom]) == 1 for atom in own)
        places.append(("sum" if narrow and not alone else "out") if direct[i] and (is_first or adds) else "")
        added.append(bool(places[i]) and any(there[atom] for atom in own))
        cleared.append(tuple(atom for atom in own if added[i] and not there[atom]))
        if places[i]:
            there |= dict.fromkeys(own, places[i])
        else:
            waiting.append(i)
        merges: list[Merge] = []
        is_last = i == len(rows) - 1
        ends_waiting = len(waiting) == WAITING or is_last
        for atom, parts in having.items():
            due = tuple(part for part in waiting if part in parts)
            if (due and ends_waiting) or (is_last and there[atom] == "sum"):
                into = "sum" if narrow and parts[-1] > i else "out"
                _append(merges, Merge(atom, due, there[atom], into))
                there[atom] = into
        if ends_waiting:
            waiting = []
        after.append(tuple(merges))
    nothing = tuple(atom for atom, parts in having.items() if not parts)
    return Order(tuple(rows), tuple(places), tuple(added), tuple(cleared), tuple(after), nothing)


def _append(merges: list[Merge], merge: Merge) -> None:
    last = merges[-1] if merges else None
    if last is not None and last.rows[1] == merge.rows[0] and (last.parts, last.base, last.into) == (
        merge.parts, merge.base, merge.into,
    ):  # fmt: skip
        merges[-1] = Merge((last.rows[0], merge.rows[1]), merge.parts, merge.base, merge.into)
    else:
        merges.append(merge)
