"""Where the gradient of a bias is dS as the Hopper backwards have it in shared memory, from where TMA stores it (`STORE_DBIAS`)."""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Literal

from ..problem.backward import BackwardProblem
from ..problem.layout import Layout
from ..problem.read_gradients import ReadGradient, read_gradients
from .tensor_map import layouts_of, obstacle
from .tuning import TileConfig

SLICED = 64  # queries of a step, of whose dS blocks of a cluster sum up slices
NARROW, LEAST_NARROW = 32, 1024  # head dims, and fewer queries, of which more than two elements take longer so, by up to a tenth
CLUSTERS = (2, 4, 8)  # blocks: each sums up as many rows of a step, of multiples of 8


def stored_dbias(problem: BackwardProblem, kernel: str) -> tuple[Layout | None, int, str]:
    """The gradient of the bias that a kernel stores if TMA brings the bias, how many blocks of a cluster sum it up, and why.

    None, 1 and '' where it stores none.
    """
    own = dbias_of_pairs(problem)
    if own is not None:
        return own, 1, "gradient of the bias: dS of each pair, which TMA stores"
    shared, elements = dbias_of_cluster(problem) if kernel == "bwd_hopper" else (None, 1)
    if shared is None:
        return None, 1, ""
    return shared, elements, f"gradient of the bias: dS of {elements} batch elements, whose blocks are a cluster and sum it up"


def rows_beside_slices(rows: tuple[TileConfig, ...]) -> tuple[TileConfig, ...]:
    """Those of bwd_hopper that a cluster has room for: beside 128 queries a step, slices of dS have none."""
    return tuple(row for row in rows if row.tile_q == SLICED or not row.staged_bias)


def dbias_of_pairs(problem: BackwardProblem) -> Layout | None:
    """The gradient of the bias as ``(*batch, heads, len_q, len_kv)``, or None where it is not asked for or TMA cannot store it.

    No two pairs may share an element, which is stored once. With a softcap dS is the gradient of what is capped, and the bias is
    added behind that.
    """
    gradient = _as_pairs(problem)
    return None if gradient is None or any(_shared(gradient)) else gradient


def dbias_of_cluster(problem: BackwardProblem) -> tuple[Layout, int] | tuple[None, Literal[1]]:
    """The same where batch elements share the bias, and how many: blocks of a cluster sum up what they have of it.

    They go through the same steps, so nothing of these may depend on the element. Where dQ is summed in order, two of the three
    warps that would do it have no time. Only the innermost batch elements have neighbouring blocks.
    """
    p, gradient = problem.forward, _as_pairs(problem)
    apart = problem.deterministic or p.lengths is not None or p.scores.masks_pairs or problem.sums_queries or problem.sums_keys
    if gradient is None or apart:
        return None, 1
    *of_elements, of_heads, of_queries, of_keys = _shared(gradient)
    together = list(takewhile(lambda axis: axis[0] or axis[1] == 1, reversed(list(zip(of_elements, p.batch)))))
    sharers = math.prod(size for _, size in together)
    if any((of_heads, of_queries, of_keys, *of_elements[: len(p.batch) - len(together)])) or sharers not in CLUSTERS:
        return None, 1
    if sharers > CLUSTERS[0] and max(p.dim, p.dim_v) <= NARROW and p.len_q < LEAST_NARROW:
        return None, 1
    return gradient, sharers


def _as_pairs(problem: BackwardProblem) -> Layout | None:
    p = problem.forward
    found = [part.of_pairs for part in read_gradients(problem) if is_of_bias(part)]
    if not found or p.softcap is not None or found[0].dtype != p.dtype:
        return None
    layouts = layouts_of(p) | {"dbias": found[0]}
    return None if obstacle(p.batch, layouts, ("dbias",), ("dbias",)) else found[0]


def _shared(gradient: Layout) -> tuple[bool, ...]:
    """Along which axes pairs share elements."""
    return tuple(size > 1 and stride == 0 for size, stride in zip(gradient.shape, gradient.strides))


def is_of_bias(part: ReadGradient) -> bool:
    """Whether it is of the option, and not of an array that a score calls so."""
    return part.name == "bias" and part.read is None


def visits_all_pairs(problem: BackwardProblem) -> bool:
    """Whether each element is stored; if not, there have to be zeros before."""
    p = problem.forward
    return p.mask.shape == "full" and not p.scores.masks_pairs and p.lengths is None
