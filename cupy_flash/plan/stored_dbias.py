"""Where the gradient of a bias is dS as the Hopper backwards have it in shared memory, from where TMA stores it (`STORE_DBIAS`)."""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Literal

from ..problem.backward import BackwardProblem
from ..problem.layout import Layout
from ..problem.read_gradients import ReadGradient, read_gradients
from .tensor_map import layouts_of, obstacle

CLUSTERS = (2, 4, 8)  # blocks: each sums up as many rows of a step, of multiples of 8


def dbias_of_pairs(problem: BackwardProblem) -> Layout | None:
    """The gradient of the bias as ``(*batch, heads, len_q, len_kv)``, or None where it is not asked for or TMA cannot store it.

    No two pairs may share an element, which is stored once. With a softcap dS is the gradient of what is capped, and the bias is
    added behind that.
    """
    gradient = _as_pairs(problem)
    return None if gradient is None or any(_shared(gradient)) else gradient


def dbias_of_cluster(problem: BackwardProblem) -> tuple[Layout, int] | tuple[None, Literal[1]]:
    """The same where batch elements share the bias, and how many: blocks of a cluster sum up what they have of it.

    They go through the same steps, so nothing of these may depend on the element; and in some order they would wait for each other
    twice. Only the innermost batch elements have neighbouring blocks.
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
