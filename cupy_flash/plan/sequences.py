"""Tiles of sequences of their own lengths: how many there may be, as ``kernels_cu/tile/sequence.cuh`` counts them."""

from __future__ import annotations

import math

from ..problem.forward import Problem
from ..problem.layout import BATCH_AXES, Layout, merge_batch_axes
from ..problem.lengths import FIELDS, Lengths
from ..problem.mask import UNBOUNDED
from .tuning import SHORT

SEQUENCES = "sequences."  # how names of words in `SequenceParams` begin
MANY = 1024  # of no more queries, rows that a wide tile would leave empty count for more than how long it is
LONG = 8192  # queries with as many keys, from which on wide tiles were measured to be faster; with 4,096 narrow ones are


def knobs_of(lengths: Lengths | None) -> dict[str, bool]:
    """The constants of a kernel that say in which ways sequences may lie in memory."""
    cached = lengths is not None and lengths.cache is not None
    paged = cached and lengths.paged
    return {"VARLEN": lengths is not None, "PAGED": paged, "CACHED": cached and not paged}


def names_of_lengths(problem: Problem) -> tuple[str, ...]:
    """What `params.places_of` calls the lengths that a call gives, in order."""
    lengths = () if problem.lengths is None else problem.lengths.names
    return tuple(SEQUENCES + FIELDS[name] for name in lengths)


def steps_of_batch(
    batch: tuple[int, ...], layouts: dict[str, Layout], lengths: Lengths | None
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """The sizes of the batch axes of kernels, and how far an array goes on along each."""
    if lengths is None:
        return merge_batch_axes(batch, layouts)
    # Of one axis, which stays the last one: a sequence may be another element of a cache.
    lacking = BATCH_AXES - len(batch)
    strides = {field: (0,) * lacking + layout.strides[: len(batch)] for field, layout in layouts.items()}
    return (1,) * lacking + batch, strides


def is_packed(problem: Problem, side: str) -> bool:
    """Whether the rows of all sequences lie one behind the other, of side 'q' or 'kv'."""
    lengths = problem.lengths
    return lengths is not None and lengths.has(f"cu_seqlens_{side}")


def tiles_of(problem: Problem, tile: int, side: str) -> int:
    """Tiles that a head of a batch element of an array has room for, of side 'q' or 'kv'.

    A packed sequence begins and ends anywhere, so that it takes at most one tile more than its rows fill. Rows behind all of
    them are a sequence more.
    """
    rows = problem.len_q if side == "q" else problem.len_kv
    return rows // tile + problem.lengths.sequences + 1 if is_packed(problem, side) else -(-rows // tile)


def elements_of(problem: Problem, side: str) -> int:
    """Batch elements that the arrays of a side have: of packed rows, one."""
    return 1 if is_packed(problem, side) else math.prod(problem.batch)


def mean_room(problem: Problem, side: str) -> int:
    """Rows that there are for a sequence, on average: how many it has, a call tells."""
    rows = problem.len_q if side == "q" else problem.len_kv
    return rows // max(problem.lengths.sequences, 1) if is_packed(problem, side) else rows


def row_length(problem: Problem) -> int:
    """The number of queries that a row of a tuning table is chosen by.

    Under a causal mask, tiles of many queries with more keys are as long as those of a problem with as many queries as keys, whose
    row is taken.
    Of sequences of their own lengths that of long ones, unless all have as few queries: what a sequence is computed with, and so
    its bits, must not depend on others.
    """
    if problem.lengths is None:
        square = 2 * problem.len_kv - problem.len_q if problem.mask.shape == "causal" and problem.len_q > MANY else 0
        return square if square >= LONG else problem.len_q
    return UNBOUNDED if problem.lengths.of_queries or problem.len_q > SHORT else problem.len_q
