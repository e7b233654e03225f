"""When the last of some blocks ends, which multiprocessors take one after the other: a pure function."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def makespan(lengths: Iterable[float], running: int) -> float:
    """How long blocks take that start in this order, `running` at a time, the next one whenever one ends.

    Parameters
    ----------
    lengths : iterable of float
        What each takes, in any unit.
    running : int

    Returns
    -------
    float
        In the same unit.

    Examples
    --------
    >>> makespan([3, 2, 1, 1], 2), makespan([1, 1, 2, 3], 2)
    (4.0, 4.0)
    >>> makespan([1, 1, 1, 3], 2)
    4.0
    """
    ends = [0.0] * running  # all alike: a heap
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)
