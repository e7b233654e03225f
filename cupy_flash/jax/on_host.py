"""A call on arrays in host memory: views of XLA's own memory, and the NumPy path."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy

from ..call.backward import operands as backward_operands
from ..call.backward import prepared_backward
from ..call.captured import captured
from ..call.forward import ForwardOperands, prepared
from ..problem.backward import BACKWARD_ARRAYS
from ..problem.key_ranges import START, STOP, KeyRanges
from ..problem.lengths import LENGTHS
from ..problem.scores import OPERANDS
from .call import READ, Call, read_call
from .frame import Frame, Shape, array_at, shape_of

Typed = tuple[tuple[int, ...], numpy.dtype]


@dataclass(frozen=True, slots=True)
class HostSite:
    """A place in a program where attention is called: what, and of which shapes.

    Parameters
    ----------
    call : Call
    types : tuple of ((int, ...), numpy.dtype)
        Of operands and, behind them, results.
    """

    call: Call
    types: tuple[Typed, ...]

    def run(self, addresses: list[int]) -> None:
        """Compute, with the arrays at these addresses."""
        views = [array_at(address, *typed) for address, typed in zip(addresses, self.types)]
        results = views[len(self.call.operands) :]
        given = dict(zip(self.call.operands, views))
        if "seed" in given:
            given["seed"] = given["seed"].view(numpy.uint64)
        if self.call.backward:
            self._differentiate(given, results)
        else:
            self._attend(given, results)

    def _attend(self, given: dict[str, Any], results: list[numpy.ndarray]) -> None:
        out, lse = results
        arrays = ForwardOperands(*map(given.get, "qkv"), out, lse, given.get("sinks"), self._captured(given))
        prepared(arrays, self._options).run(arrays)

    def _differentiate(self, given: dict[str, Any], results: list[numpy.ndarray]) -> None:
        for name, result in zip(self.call.sources, results):  # an operand is seen as its gradient is
            given[name] = numpy.broadcast_to(given[name], result.shape)
        inputs = [given.get(name) for name in BACKWARD_ARRAYS[:8]]
        arrays = backward_operands(*inputs, *results[:3], None, others=self._captured(given))
        gradients = prepared_backward(arrays, self._options).run(arrays)
        own = {"bias": gradients.dbias, "alibi_slopes": gradients.dalibi_slopes}
        for name, result in zip(self.call.wrt, results[3:]):
            result[...] = gradients.darrays[name] if name in self.call.reads else own[name]

    @property
    def _options(self) -> dict[str, Any]:
        return {name: x for name, x in self.call.of_plan.items() if name not in ("score", "mask")}

    def _captured(self, given: dict[str, Any]) -> Any:
        texts = {name: x for name, x in self.call.options if name in ("score", "mask")}
        operands = {name: given[name] for name in OPERANDS if name in given}
        lengths = {name: given[name] for name in LENGTHS if name in given}
        reads = {name: given[READ + name] for name in self.call.reads}
        if START in reads:
            operands["mask"] = KeyRanges(reads.pop(START), reads.pop(STOP))
        return captured(**{**texts, **operands}, arrays=reads or None, lengths=lengths)


def run(frame: Frame) -> None:
    """Compute what a frame asks for."""
    _site(frame.text, frame.shapes).run(frame.addresses)


@functools.lru_cache(maxsize=1024)
def _site(text: bytes, shapes: tuple[Shape, ...]) -> HostSite:
    return HostSite(read_call(text.decode()), tuple(map(shape_of, shapes)))
