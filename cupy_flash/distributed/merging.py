"""In which order the parts of a result become one: so that little is read and written besides.

The first part of a row is written where the result goes. Parts that follow wait, two of them at most, and are then merged in one
pass into a wider sum; the last of a row are merged into the result itself.
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
        The numbers of the parts.
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
    direct : tuple of bool
        Which of them are written where the result goes.
    after : tuple of tuple of Merge
        What is merged once each part is there.
    nothing : tuple of (int, int)
        Rows that no part has.
    """

    rows: tuple[Interval, ...]
    direct: tuple[bool, ...]
    after: tuple[tuple[Merge, ...], ...]
    nothing: tuple[Interval, ...]

    @property
    def sums(self) -> bool:
        """Whether memory for sums is needed."""
        return any(merge.into == "sum" for merges in self.after for merge in merges)

    @property
    def waiting(self) -> int:
        """Rows of parts that are in memory of their own at the same time, at most."""
        most = held = 0
        for (first, stop), direct, merges in zip(self.rows, self.direct, self.after):
            held += 0 if direct else stop - first
            most = max(most, held)
            held = 0 if merges else held
        return most


def order_of(rows: Sequence[Interval], total: int, direct: Sequence[bool], narrow: bool, rounds: bool = True) -> Order:
    """The order for parts with these rows.

    Parameters
    ----------
    rows : sequence of (int, int)
    total : int
        Rows of the result.
    direct : sequence of bool
        Which parts can be written where the result goes.
    narrow : bool
        Whether the result is of a narrower dtype than sums, which then need memory of their own.
    rounds : bool
        Whether parts are of the dtype of the result anyway. If not, only one that is alone is written there.
    """
    ends = sorted({0, total, *(end for part in rows for end in part)})
    having = {(a, b): [i for i, part in enumerate(rows) if part[0] <= a and b <= part[1]] for a, b in pairwise(ends)}

    def first(i: int) -> bool:
        own = [parts for (a, b), parts in having.items() if rows[i][0] <= a and b <= rows[i][1]]
        return all(parts[0] == i and (rounds or len(parts) == 1) for parts in own)

    at_once = tuple(can and first(i) for i, can in enumerate(direct))
    there, waiting, after = dict.fromkeys(having, ""), [], []
    for i in range(len(rows)):
        merges: list[Merge] = []
        if at_once[i]:
            there |= {atom: "out" for atom, parts in having.items() if i in parts}
        else:
            waiting.append(i)
        if len(waiting) == WAITING or i == len(rows) - 1:
            for atom, parts in having.items():
                own = tuple(part for part in waiting if part in parts)
                if own:
                    into = "sum" if narrow and parts[-1] > i else "out"
                    _append(merges, Merge(atom, own, there[atom], into))
                    there[atom] = into
            waiting = []
        after.append(tuple(merges))
    return Order(tuple(rows), at_once, tuple(after), tuple(atom for atom, parts in having.items() if not parts))


def _append(merges: list[Merge], merge: Merge) -> None:
    last = merges[-1] if merges else None
    if last is not None and last.rows[1] == merge.rows[0] and (last.parts, last.base, last.into) == (
        merge.parts, merge.base, merge.into,
    ):  # fmt: skip
        merges[-1] = Merge((last.rows[0], merge.rows[1]), merge.parts, merge.base, merge.into)
    else:
        merges.append(merge)
