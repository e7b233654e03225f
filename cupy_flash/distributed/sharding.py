"""Which rows of a sequence each rank has: one part behind the other, or two for each rank, so that causal work is even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ..errors import shown
from ..problem.scalars import integer

ORDERS = ("contiguous", "zigzag")


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a part that follow each other in the sequence.

    Parameters
    ----------
    first, stop : int
        Their positions in the sequence: the first, and the one behind the last.
    row : int
        Where in the part the first of them is.
    """

    first: int
    stop: int
    row: int

    def __len__(self) -> int:
        return self.stop - self.first


def check_order(order: str) -> str:
    """The name of an order of rows, or an error."""
    if not isinstance(order, str):
        raise TypeError(f"order: expected one of {ORDERS}, got {shown(order)}")
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {ORDERS}, got {shown(order)}")
    return order


def part_lengths(total: int, ranks: int) -> tuple[int, ...]:
    """How many rows each rank has, as even as they can be: the first ranks have one more.

    Examples
    --------
    >>> from cupy_flash.distributed import part_lengths
    >>> part_lengths(10, 4)
    (3, 3, 2, 2)
    """
    total, ranks = integer("total", total, "an integer"), integer("ranks", ranks, "an integer")
    if total < 0 or ranks < 1:
        raise ValueError(f"total, ranks: expected at least 0 rows and 1 rank, got {total} and {ranks}")
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def runs_of(lengths: Sequence[int], order: str) -> tuple[tuple[Run, ...], ...]:
    """The runs of every rank, from how many rows each has.

    In zigzag order a rank has its first rows, half of them and one more if they are odd, in the order of ranks; its others come
    behind those of all ranks, in the opposite order. So with a causal mask the sum of what its queries see is the same for all.
    """
    if order == "contiguous":
        stops = numpy.cumsum([0, *lengths]).tolist()
        return tuple((Run(stops[r], stops[r + 1], 0),) if lengths[r] else () for r in range(len(lengths)))
    heads = [(n + 1) // 2 for n in lengths]
    firsts = numpy.cumsum([0, *heads]).tolist()
    found: list[tuple[Run, ...]] = [()] * len(lengths)
    place = firsts[-1]
    for rank in reversed(range(len(lengths))):
        front = Run(firsts[rank], firsts[rank + 1], 0)
        back = Run(place, place + lengths[rank] - heads[rank], heads[rank])
        place = back.stop
        # Two that meet, as those of the last rank do, are one.
        joined = (Run(front.first, back.stop, 0),) if front.stop == back.first else (front, back)
        found[rank] = tuple(run for run in joined if len(run))
    return tuple(found)


def halves(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs, or if there is one, its two halves."""
    if len(runs) != 1 or len(runs[0]) < 2:
        return tuple(runs)
    [run] = runs
    half = (len(run) + 1) // 2
    return Run(run.first, run.first + half, run.row), Run(run.first + half, run.stop, run.row + half)


def positions(lengths: Sequence[int], rank: int, *, order: str = "contiguous") -> numpy.ndarray:
    """The positions in the sequence of the rows that a rank has, in the order in which it has them.

    Parameters
    ----------
    lengths : sequence of int
        How many rows each rank has; `part_lengths` says how `shard` divides them.
    rank : int
    order : {'contiguous', 'zigzag'}

    Returns
    -------
    numpy.ndarray of int64

    Examples
    --------
    >>> from cupy_flash.distributed import part_lengths, positions
    >>> [positions(part_lengths(8, 2), rank, order="zigzag").tolist() for rank in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    runs = runs_of(_checked(lengths), check_order(order))
    if not 0 <= integer("rank", rank, "an integer") < len(runs):
        raise ValueError(f"rank: expected 0 to {len(runs) - 1}, got {rank}")
    return numpy.concatenate([numpy.arange(0), *(numpy.arange(run.first, run.stop) for run in runs[rank])])


def shard(
    x: Any, rank: int, ranks: int, *, order: str = "contiguous", axis: int = -2, lengths: Sequence[int] | None = None
) -> Any:
    """The rows of an array that a rank has.

    Parameters
    ----------
    x : array
        All rows. Of NumPy, CuPy, or what slices and concatenates like them.
    rank, ranks : int
    order : {'contiguous', 'zigzag'}
        One part behind the other; or two parts for each rank, from both ends, with which causal attention takes all ranks equally
        long.
    axis : int
        Along which the rows lie.
    lengths : sequence of int, optional
        How many rows each rank has, by default as even as can be.

    Returns
    -------
    array
        A view where the rows are neighbours, otherwise new.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash.distributed import shard, unshard
    >>> x = np.arange(12).reshape(6, 2)
    >>> parts = [shard(x, rank, 2, order="zigzag") for rank in range(2)]
    >>> parts[0][:, 0].tolist()
    [0, 2, 10]
    >>> bool((unshard(parts, order="zigzag") == x).all())
    True
    """
    if lengths is None:
        lengths = part_lengths(x.shape[axis], ranks)
    elif len(lengths) != ranks or sum(_checked(lengths)) != x.shape[axis]:
        raise ValueError(f"lengths: expected {ranks} numbers that add up to {x.shape[axis]}, got {shown(tuple(lengths))}")
    if not 0 <= integer("rank", rank, "an integer") < ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1}, got {rank}")
    slices = [x[_along(x, axis, slice(run.first, run.stop))] for run in runs_of(lengths, check_order(order))[rank]]
    if not slices:
        return x[_along(x, axis, slice(0, 0))]
    return slices[0] if len(slices) == 1 else _concatenated(slices, axis)


def unshard(parts: Sequence[Any], *, order: str = "contiguous", axis: int = -2) -> Any:
    """All rows in the order of the sequence, from the parts of all ranks; the opposite of `shard`.

    Parameters
    ----------
    parts : sequence of array
        Those of rank 0, 1, ...
    order, axis
        As in `shard`.

    Returns
    -------
    array

    Examples
    --------
    >>> from cupy_flash.distributed import unshard
    >>> import numpy as np
    >>> unshard([np.array([0, 3]), np.array([1, 2])], order="zigzag", axis=0).tolist()
    [0, 1, 2, 3]
    """
    runs = runs_of([part.shape[axis] for part in parts], check_order(order))
    found = []
    for part, own in zip(parts, runs):
        found += [(run.first, part[_along(part, axis, slice(run.row, run.row + len(run)))]) for run in own]
    ordered = [piece for _, piece in sorted(found, key=lambda item: item[0])]
    return _concatenated(ordered or list(parts), axis)


def _along(x: Any, axis: int, part: slice) -> tuple[slice, ...]:
    index = [slice(None)] * x.ndim
    index[axis] = part
    return tuple(index)


def _concatenated(pieces: list[Any], axis: int) -> Any:
    if isinstance(pieces[0], numpy.ndarray):
        return numpy.concatenate(pieces, axis=axis)
    import cupy  # late: who has arrays of it has it

    return cupy.concatenate(pieces, axis=axis)


def _checked(lengths: Sequence[int]) -> tuple[int, ...]:
    numbers = tuple(integer("lengths", n, "integers") for n in lengths)
    if not numbers or min(numbers) < 0:
        raise ValueError(f"lengths: expected numbers of at least 0, one for each rank, got {shown(numbers)}")
    return numbers
