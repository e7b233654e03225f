"""Where the gradient of a bias is dS as the Hopper backwards have it in shared memory, from where TMA stores it (`STORE_DBIAS`)."""

from __future__ import annotations

from ..problem.backward import BackwardProblem
from ..problem.layout import Layout
from ..problem.read_gradients import ReadGradient, read_gradients
from .tensor_map import layouts_of, obstacle


def dbias_of_pairs(problem: BackwardProblem) -> Layout | None:
    """The gradient of the bias as ``(*batch, heads, len_q, len_kv)``, or None where it is not asked for or TMA cannot store it.

    No two pairs may share an element, which is stored once. With a softcap dS is the gradient of what is capped, and the bias is
    added behind that.
    """
    p = problem.forward
    found = [part.of_pairs for part in read_gradients(problem) if is_of_bias(part)]
    if not found or p.softcap is not None:
        return None
    (gradient,) = found
    if gradient.dtype != p.dtype or any(stride == 0 for size, stride in zip(gradient.shape, gradient.strides) if size > 1):
        return None
    layouts = layouts_of(p) | {"dbias": gradient}
    return None if obstacle(p.batch, layouts, ("dbias",), ("dbias",)) else gradient


def is_of_bias(part: ReadGradient) -> bool:
    """Whether it is of the option, and not of an array that a score calls so."""
    return part.name == "bias" and part.read is None


def visits_all_pairs(problem: BackwardProblem) -> bool:
    """Whether each element is stored; if not, there have to be zeros before."""
    p = problem.forward
    return p.mask.shape == "full" and not p.scores.masks_pairs and p.lengths is None
