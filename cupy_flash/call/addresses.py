"""Plans without arrays: made from descriptions, and launched on memory that is known by its address alone.

That is how a runtime of another language hands memory over, such as XLA's. It has checked what lies there when it compiled, so that
nothing is looked at here but numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from ..machine.prepared import cached
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


def forward_launcher(plan: AttentionPlan) -> Callable[[list[int], Memory, int], None]:
    """What queues the kernels of a plan on a stream of the current device: found once, since each step to it takes time.

    Parameters
    ----------
    plan : AttentionPlan
        For the current device, where its kernels are loaded now.

    Returns
    -------
    callable
        Takes addresses in the order of `FORWARD_ARRAYS` and of what the problem is `given` besides, 0 for what there is none of;
        memory of `workspace_bytes` bytes; and the stream.
    """
    execution, (more_k, more_v) = plan._execution, plan._skipped_bytes

    def launch(addresses: list[int], workspace: Memory, stream: int) -> None:
        addresses[1] += more_k
        addresses[2] += more_v
        execution.launch(addresses, workspace, None, stream)

    return launch if not execution.only_launches or more_k or more_v else execution.on_device.launch


def launch_backward(plan: BackwardPlan, addresses: list[int], of_scores: Mapping[str, int], workspace: Memory, stream: int) -> None:
    """Queue the kernels of a plan of gradients on a stream of the current device.

    Parameters
    ----------
    plan : BackwardPlan
    addresses : list of int
        In the order of `BACKWARD_ARRAYS` and of what the problem is `given` besides.
    of_scores : mapping of str to int
        Where the gradients go that `wrt` names.
    workspace : Memory
        Of `workspace_bytes` bytes.
    stream : int

    Notes
    -----
    What `zeroed` names has to be zeros by then.
    """
    plan._launch(addresses, of_scores, workspace, None, stream)


def zeroed(plan: BackwardPlan) -> tuple[dict[str, int], dict[str, int]]:
    """What has to be zeros before a launch, and how many bytes that are: of the gradients among `BACKWARD_ARRAYS`, and in `wrt`."""
    problem, unset = plan.problem, overwritten(plan.problem, plan.kernel)
    of_inputs = BACKWARD_ARRAYS[backward.FIRST_RESULT : backward.END_OF_RESULTS] if problem.zero else ()
    of_scores = {name: problem.layout_of(x).nbytes for name, x in argument_of(problem).items() if name not in unset}
    return {name: layout.nbytes for name in of_inputs if (layout := problem.layout_of(name))}, of_scores


def load(plan: AttentionPlan | BackwardPlan) -> None:
    """Compile the kernels of a plan and load them on the current device, which must not wait for a launch in a CUDA graph."""
    executions = plan._executions if isinstance(plan, BackwardPlan) else (plan._execution,)
    for execution in executions:
        execution.load()


def _named(
    names: tuple[str, ...], given: Mapping[str, Description], read: Mapping[str, Description], options: dict[str, Any]
) -> tuple[tuple[Description | None, ...], dict[str, Any]]:
    """Descriptions in the order of a call, and the options with the names of those behind `names`."""
    operands = tuple(name for name in (*LENGTHS, *OPERANDS) if name in given)
    of_reads = tuple(sorted(read))
    descriptions = (*map(given.get, names), *(given[name] for name in operands), *(read[name] for name in of_reads))
    return descriptions, {**options, "operands": operands, "arrays": of_reads}
