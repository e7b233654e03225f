"""Query heads that share a tile: with one query each, the heads of a group become the rows of one head.

A kernel computes whole tiles of query rows. Of one query a head, as in decoding, it would fill one row of a tile, and read the keys
and values of a group once for each of its heads. These heads see the same keys, so what the kernel is told is another problem over
the same memory: as many heads as there are key-value heads, and as many queries as a group has heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .layout import Layout
from .problem import Problem


@dataclass(frozen=True, slots=True)
class Packing:
    """What a kernel is told in place of a problem.

    Parameters
    ----------
    problem : Problem
        Over the memory of the same arrays, but that its k and v begin at a later key. Shapes that the user sees stay as they were.
    first_key : int
        The key of the arrays that is its key 0.
    reason : str
        Why it is another problem, or '' if it is the same.
    """

    problem: Problem
    first_key: int = 0
    reason: str = ""

    @property
    def keys(self) -> slice:
        """The keys of the arrays that the kernel is told of."""
        return slice(self.first_key, self.first_key + self.problem.len_kv)

    @property
    def skipped_bytes(self) -> tuple[int, int]:
        """How far behind element 0 of k and of v the kernel's element 0 lies; below 0 where keys lie backwards in memory."""
        return _skipped_bytes(self.problem.k, self.first_key), _skipped_bytes(self.problem.v, self.first_key)


def packing_of(problem: Problem) -> Packing:
    """Let the heads of a group share a tile where each has one query.

    A band moves on by a key with each row, and these rows all see what the one query sees. So k and v are cut to that, and no band
    is left. A query that sees nothing is left as it is.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    Packing
    """
    group = problem.heads_per_kv
    # A bound that is there hides a key from the one query, so it lies within the keys.
    first = 0 if problem.first_key is None else problem.first_key
    stop = problem.len_kv if problem.last_key is None else problem.last_key + 1
    if problem.len_q != 1 or group <= 1 or first >= stop:
        return Packing(problem)
    told = replace(
        problem,
        heads_q=problem.heads_kv,
        len_q=group,
        len_kv=stop - first,
        q=_heads_as_rows(problem.q, len(problem.batch), group),
        k=_cut(problem.k, first, stop),
        v=_cut(problem.v, first, stop),
        out=_heads_as_rows(problem.out, len(problem.batch), group),
        lse=problem.lse and _heads_as_rows(problem.lse, len(problem.batch), group),
        first_key=None,
        last_key=None,
    )
    return Packing(told, first, f"{group} query heads of a group share a tile: one query each")


def _heads_as_rows(layout: Layout, heads: int, group: int) -> Layout:
    """A layout whose axis number `heads`, which an axis of one row follows, is split into groups and the rows of each."""
    shape, strides = list(layout.shape), list(layout.strides)
    step = strides[heads]
    shape[heads : heads + 2] = shape[heads] // group, group
    strides[heads : heads + 2] = group * step, step
    return replace(layout, shape=tuple(shape), strides=tuple(strides))


def _cut(layout: Layout, first: int, stop: int) -> Layout:
    """A layout of k or v from a key on, and before another."""
    *axes, _, dim = layout.shape
    alignment = math.gcd(layout.alignment, _skipped_bytes(layout, first))
    return replace(layout, shape=(*axes, stop - first, dim), alignment=alignment)


def _skipped_bytes(layout: Layout, keys: int) -> int:
    return keys * layout.strides[-2] * layout.itemsize
