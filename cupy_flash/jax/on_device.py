"""A call on arrays of a GPU: a plan that is held, launched with addresses on XLA's stream."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass

import cupy

from ..call.addresses import (
    Description,
    Memory,
    backward_plan,
    described,
    forward_launcher,
    forward_plan,
    launch_backward,
    load,
    zeroed,
)
from ..call.backward import BackwardPlan
from ..call.forward import AttentionPlan
from .call import READ, Call, Typed, read_call, read_types
from .frame import DTYPES, Frame

ALIGNED = 15  # bits of an address that are 0 of what XLA allocates; plans are made for that
current_device: Callable[[], int] = cupy.cuda.runtime.getDevice
OF_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class DeviceSite:
    """A place in a program where attention is called, with everything decided.

    Parameters
    ----------
    plan : AttentionPlan or BackwardPlan
    arguments : callable
        Takes from the addresses of a frame, behind which there is a 0, those of the arguments of the plan in its order.
    workspace : int
        Which of the addresses is the memory for the plan.
    forward : callable or None
        What launches a forward.
    of_scores : tuple of (str, int)
        Of each gradient that `wrt` names, which address it has.
    zeros : tuple of (int, int)
        Of each result that has to be zeros before, the same, and how many bytes it has.
    """

    plan: AttentionPlan | BackwardPlan
    arguments: Callable[[list[int]], tuple[int, ...]]
    workspace: int
    forward: Callable[[list[int], Memory, int], None] | None = None
    of_scores: tuple[tuple[str, int], ...] = ()
    zeros: tuple[tuple[int, int], ...] = ()

    def launch(self, addresses: list[int], stream: int) -> None:
        """Queue the kernels on a stream of the current device."""
        arguments, workspace = list(self.arguments([*addresses, 0])), Memory(addresses[self.workspace])
        if self.forward is not None:
            return self.forward(arguments, workspace, stream)
        for i, nbytes in self.zeros:
            cupy.cuda.runtime.memsetAsync(addresses[i], 0, nbytes, stream)
        return launch_backward(self.plan, arguments, {name: addresses[i] for name, i in self.of_scores}, workspace, stream)


def run(frame: Frame) -> None:
    """Queue what a frame asks for, on the device that is the current one, as XLA leaves it to its functions.

    Types are those that the program was compiled with, in its text: of the arrays of a frame nothing is read but where they are.
    """
    low = functools.reduce(operator.or_, frame.addresses)
    phases = tuple([address & ALIGNED for address in frame.addresses]) if low & ALIGNED else ()
    _site(frame.text, current_device(), phases).launch(frame.addresses, frame.stream)


@functools.lru_cache(maxsize=1024)
def plan_of(call: Call, types: tuple[Typed, ...], device: int, phases: tuple[int, ...] = ()) -> AttentionPlan | BackwardPlan:
    """The plan of a call for a device.

    Parameters
    ----------
    call : Call
    types : tuple of ((int, ...), str)
        Of its operands, and behind them of its results.
    device : int
        CUDA ordinal.
    phases : tuple of int, optional
        Addresses of the same modulo 16, by default 0.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `plan_attention`.
    """
    results = ("dq", "dk", "dv") if call.backward else ("out", "lse")
    seen = {name: shape for name, (shape, _) in zip(call.sources, types[len(call.operands) :])}  # as its gradient is
    given: dict[str, Description] = {}
    reads: dict[str, Description] = {}
    for name, (shape, dtype), phase in zip((*call.operands, *results), types, phases or (0,) * len(types)):
        if name == "seed":
            shape, dtype = (2,), "uint64"
        description = described(shape, OF_NAME[dtype], device, seen.get(name), phase)
        if name.startswith(READ):
            reads[name.removeprefix(READ)] = description
        else:
            given[name] = description
    return (backward_plan if call.backward else forward_plan)(given, reads, call.of_plan)


def prepare(call: Call, types: tuple[Typed, ...], device: int) -> int:
    """Plan a call and load its kernels, ahead of its first launch; returns how many bytes of memory a launch is to be given."""
    plan = plan_of(call, types, device)
    with cupy.cuda.Device(device):
        load(plan)
    return plan.workspace_bytes


@functools.lru_cache(maxsize=1024)
def _site(text: bytes, device: int, phases: tuple[int, ...]) -> DeviceSite:
    call, types = read_call(text.decode()), read_types(text.decode())
    places = {name: i for i, name in enumerate(call.operands)}
    first = len(call.operands)
    results = ("dq", "dk", "dv") if call.backward else ("out", "lse")
    places |= {name: first + i for i, name in enumerate(results)}
    plan = plan_of(call, types[:-1], device, phases[:-1])
    given = types[-1][0][0]
    if plan.workspace_bytes > given:
        raise RuntimeError(
            f"expected {plan.workspace_bytes} bytes of workspace for device {device}, got {given}; "
            "the program was compiled for a GPU of another architecture"
        )
    arguments, workspace = operator.itemgetter(*(places.get(name, -1) for name in call.arguments)), len(types) - 1
    if not isinstance(plan, BackwardPlan):
        return DeviceSite(plan, arguments, workspace, forward_launcher(plan))
    of_scores = tuple((name, first + len(results) + i) for i, name in enumerate(call.wrt))
    of_inputs, of_reads = zeroed(plan)
    zeros = [(places[name], nbytes) for name, nbytes in of_inputs.items() if name in places]
    zeros += [(place, of_reads[name]) for name, place in of_scores if name in of_reads]
    written = tuple((place, nbytes) for place, nbytes in zeros if nbytes)
    return DeviceSite(plan, arguments, workspace, None, of_scores, written)
