"""Plans without arrays: made from descriptions, and launched on memory that is known by its address alone.

That is how a runtime of another language hands memory over, such as XLA's. It has checked what lies there when it compiled, so that
nothing is looked at here but numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from ..machine.execution import cached
from ..problem.backward import BACKWARD_ARRAYS
from ..problem.forward import FORWARD_ARRAYS
from ..problem.lengths import LENGTHS
from ..problem.scores import OPERANDS
from . import backward, forward
from .backward import BackwardPlan
from .forward import AttentionPlan
from .score_gradients import argument_of, overwritten

Description = tuple[Any, ...]  # of an array, as `arrays.describe` has it


class Memory:
    """Memory of a device at an address, as far as a launch asks a CuPy array for it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    @property
    def data(self) -> Memory:
        """What CuPy's arrays have their address in."""
        return self


def described(
    shape: tuple[int, ...], dtype: numpy.dtype, device: int | None, seen_as: tuple[int, ...] | None = None, phase: int = 0
) -> Description:
    """What `arrays.describe` says of a C-contiguous array.

    Parameters
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    device : int or None
        CUDA ordinal, or None for host memory.
    seen_as : tuple of int, optional
        A shape of as many axes, that the array is broadcast to.
    phase : int
        Its address modulo 16.
    """
    strides, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    if seen_as is not None and seen_as != shape:
        strides = [step if size == wanted else 0 for size, wanted, step in zip(shape, seen_as, strides)]
        shape = seen_as
    return shape, tuple(strides), dtype, phase, device


def forward_plan(given: Mapping[str, Description], read: Mapping[str, Description], options: dict[str, Any]) -> AttentionPlan:
    """The plan of `attention` of arrays by their descriptions.

    Parameters
    ----------
    given : mapping of str to tuple
        By the names of `attention`; results among them.
    read : mapping of str to tuple
        What expressions read.
    options : dict
        Those of `attention`, and fields of `Options`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`.
    """
    return cached(forward._prepared, *_named(FORWARD_ARRAYS, given, read, options))


def backward_plan(given: Mapping[str, Description], read: Mapping[str, Description], options: dict[str, Any]) -> BackwardPlan:
    """The same of `attention_backward`, with `wrt` and `deterministic` among the options."""
    return cached(backward._prepared, *_named(BACKWARD_ARRAYS, given, read, options))


def launch_forward(plan: AttentionPlan, addresses: Sequence[int], workspace: int, stream: int) -> None:
    """Queue the kernels of a plan on a stream of the current device.

    Parameters
    ----------
    plan : AttentionPlan
        For a device.
    addresses : sequence of int
        In the order of `FORWARD_ARRAYS` and of what the problem is `given` besides; 0 for what there is none of.
    workspace : int
        Address of `workspace_bytes` bytes.
    stream : int
    """
    at_q, at_k, at_v, *others = addresses
    more_k, more_v = plan._skipped_bytes
    plan._execution.launch([at_q, at_k + more_k, at_v + more_v, *others], Memory(workspace), None, stream)


def launch_backward(
    plan: BackwardPlan, addresses: Sequence[int], of_scores: Mapping[str, int], workspace: int, stream: int
) -> None:
    """The same of a plan of gradients.

    Parameters
    ----------
    plan : BackwardPlan
    addresses : sequence of int
        In the order of `BACKWARD_ARRAYS` and of what the problem is `given` besides.
    of_scores : mapping of str to int
        Where the gradients go that `wrt` names.
    workspace, stream : int
    """
    import cupy  # late: planning does not need it

    arguments, unset = argument_of(plan.problem), overwritten(plan.problem, plan.kernel)
    zeros = [(at, plan.problem.layout_of(arguments[name]).nbytes) for name, at in of_scores.items() if name not in unset]
    if plan.problem.zero:
        of_inputs = zip(BACKWARD_ARRAYS[backward.FIRST_RESULT :], addresses[backward.FIRST_RESULT :])
        zeros += [(at, plan.problem.layout_of(name).nbytes) for name, at in of_inputs if at]
    for at, nbytes in zeros:
        if nbytes:
            cupy.cuda.runtime.memsetAsync(at, 0, nbytes, stream)
    plan._launch(list(addresses), of_scores, Memory(workspace), None, stream)


def load(plan: AttentionPlan | BackwardPlan) -> None:
    """Compile the kernels of a plan and load them on the current device, which must not wait for a launch in a CUDA graph."""
    executions = plan._executions if isinstance(plan, BackwardPlan) else (plan._execution,)
    for execution in executions:
        execution.on_device  # noqa: B018, a cached property
        if execution.classification is not None:
            execution._classify_on_device  # noqa: B018


def _named(
    names: tuple[str, ...], given: Mapping[str, Description], read: Mapping[str, Description], options: dict[str, Any]
) -> tuple[tuple[Description | None, ...], dict[str, Any]]:
    """Descriptions in the order of a call, and the options with the names of those behind `names`."""
    operands = tuple(name for name in (*LENGTHS, *OPERANDS) if name in given)
    of_reads = tuple(sorted(read))
    descriptions = (*map(given.get, names), *(given[name] for name in operands), *(read[name] for name in of_reads))
    return descriptions, {**options, "operands": operands, "arrays": of_reads}
