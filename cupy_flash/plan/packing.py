"""Query heads that share a tile: with few queries each, the heads of a group become the rows of one head.

A kernel computes whole tiles of query rows. Of one query a head, as in decoding, it would fill one row of a tile, and read the keys
and values of a group once for each of its heads. These heads have keys and values in common, so what the kernel is told is another
problem over the same memory: as many heads as there are key-value heads, and as many queries as a group has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..problem.forward import Problem
from ..problem.layout import Layout
from ..problem.scores import told_apart

FEW = 64  # queries of a head: more fill a tile of their own
MOST_INNER = 8  # heads with one query that are neighbouring rows: of 16, narrow windows would spill registers


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
    """Let the heads of a group share a tile where each has few queries, and ends where the next one begins.

    So the rows of a group are equally far apart in memory. k and v are cut to what they see. A band moves on by a key with each
    query and begins anew with each head; of one query none is left, because every row sees all that is left then. Queries of which
    none sees anything are left as they are.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    Packing
    """
    scores = problem.scores
    if scores and not _tells_heads_apart(problem):
        return Packing(problem)
    group, queries, axis = problem.heads_per_kv, problem.len_q, len(problem.batch)
    if problem.lengths is not None and problem.lengths.of_queries:  # so that no head has the same rows in all sequences
        return Packing(problem)
    # Of sequences of their own lengths nobody knows yet which keys are seen.
    whole = problem.lengths is not None or bool(scores)  # and scores are told the numbers of keys
    first, stop = (0, problem.len_kv) if whole else problem.mask.some(0, queries)
    rows = {name: layout for name in ("q", "out", "lse") if (layout := getattr(problem, name)) is not None}
    even = all(queries == 1 or x.strides[axis] == queries * x.strides[axis + 1] for x in rows.values())
    if not 1 <= queries <= FEW or group <= 1 or first >= stop or not even:
        return Packing(problem)
    mask = problem.mask if whole else problem.mask.cut(first, stop)
    masked = any(end is not None for end in (mask.left, mask.right))
    tells_rows = masked or problem.sinks is not None or bool(scores)
    if masked and problem.algorithm == "v1":  # which has no register left to tell which query of its head a row is
        return Packing(problem)
    packed = replace(
        problem,
        heads_q=problem.heads_kv,
        len_q=group * queries,
        len_kv=stop - first,
        k=_cut(problem.k, first, stop),
        v=_cut(problem.v, first, stop),
        mask=replace(mask, len_q=group * queries, queries=queries if tells_rows else None),
        **{name: _heads_as_rows(layout, axis, group) for name, layout in rows.items()},
    )
    each = "one query" if queries == 1 else f"{queries} queries"
    return Packing(packed, first, f"{group} query heads of a group share a tile: {each} each")


def inner_heads(problem: Problem) -> int:
    """How many query heads of a group may be neighbouring rows of a tile, with one query, in fwd_hopper; 1 if none.

    Of sequences that tell how many queries each has, no head has as many rows as another sequence's, so they cannot follow each
    other head by head. Query by query they can, where a power of two of heads divides a group: a tile begins with a query then.

    Parameters
    ----------
    problem : Problem
    """
    lengths, group = problem.lengths, max(problem.heads_per_kv, 1)
    if lengths is None or not lengths.of_queries or problem.scores or problem.has_wider_results:
        return 1
    return min(group & -group, MOST_INNER)


def with_inner_heads(problem: Problem, heads: int) -> Problem:
    """The problem as fwd_hopper is told it where so many heads are neighbouring rows: over the same arrays, as they lie."""
    return replace(problem, heads_q=problem.heads_q // heads, len_q=problem.len_q * heads) if heads > 1 else problem


def has_packed_scores(problem: Problem) -> bool:
    """Whether heads that share a tile have scores of their own, which a kernel finds for each row."""
    return bool(problem.scores) and problem.mask.queries is not None


def _tells_heads_apart(problem: Problem) -> bool:
    """Whether a kernel finds the scores of each row's own head: not its dropout, nor tiles that others do not see."""
    if problem.scores.masks_pairs:
        _, heads = told_apart(problem.scores, math.prod(problem.batch), problem.heads_q)
        if heads > 1 or problem.kernel == "fwd_hopper":
            return False
    if problem.scores.dropout is not None:
        return False
    fits = problem.dtype != "float32" or max(problem.dim, problem.dim_v) <= 128  # wider ones would spill
    return fits and problem.algorithm != "v1" and problem.kernel != "fwd_v1"


def _heads_as_rows(layout: Layout, heads: int, group: int) -> Layout:
    """A layout whose axis number `heads`, which one of rows follows, is split into groups and the rows of each."""
    shape, strides = list(layout.shape), list(layout.strides)
    (size, rows), (of_head, of_row) = shape[heads : heads + 2], strides[heads : heads + 2]
    shape[heads : heads + 2] = size // group, group * rows
    strides[heads : heads + 2] = group * of_head, of_head if rows == 1 else of_row
    return replace(layout, shape=tuple(shape), strides=tuple(strides))


def _cut(layout: Layout, first: int, stop: int) -> Layout:
    """A layout of k or v from a key on, and before another."""
    *axes, _, dim = layout.shape
    alignment = math.gcd(layout.alignment, _skipped_bytes(layout, first))
    return replace(layout, shape=(*axes, stop - first, dim), alignment=alignment)


def _skipped_bytes(layout: Layout, keys: int) -> int:
    return keys * layout.strides[-2] * layout.itemsize
