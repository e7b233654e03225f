"""What a call on several ranks would do: bytes, memory, steps, and time by the model, without computing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .choice import Choice
from .model import Forecast, Machine, forecast
from .traffic import Memory, memory_of, sent_bytes, steps_of
from .whole import Whole


@dataclass(frozen=True)
class DistributedPlan:
    """Attention on several ranks with everything decided. Prints itself. Made by `plan_attention`.

    Attributes
    ----------
    scheme : str
        The scheme.
    why : str
        Why it is this one.
    ranks : int
        How many ranks there are.
    """

    whole: Whole
    choice: Choice
    machine: Machine = field(default_factory=Machine)

    @property
    def scheme(self) -> str:
        """The scheme."""
        return self.choice.scheme

    @property
    def why(self) -> str:
        """Why it is this one."""
        return self.choice.why

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.whole.size

    def sent(self, rank: int | None = None, *, backward: bool = False) -> int:
        """Bytes that a rank sends, by default this one."""
        return sent_bytes(self.whole, self.scheme, self._rank(rank), backward)

    def memory(self, rank: int | None = None, *, backward: bool = False) -> Memory:
        """Most bytes that a rank has besides inputs and results, by default this one."""
        return memory_of(self.whole, self.scheme, self._rank(rank), backward)

    def steps(self, rank: int | None = None, *, backward: bool = False) -> int:
        """How many times a rank computes or waits for others, by default this one."""
        return len(steps_of(self.whole, self.scheme, self._rank(rank), backward))

    @property
    def forward(self) -> Forecast:
        """How long it takes, by the model."""
        return forecast(self.whole, self.scheme, False, self.machine)

    @property
    def backward(self) -> Forecast:
        """How long the gradients take, by the model."""
        return forecast(self.whole, self.scheme, True, self.machine)

    def _rank(self, rank: int | None) -> int:
        return self.whole.rank if rank is None else rank

    def __str__(self) -> str:
        whole = self.whole
        lines = [f"attention of {whole.problem}, on {self.ranks} ranks in {whole.order} order"]
        lines += [f"  on each by backend {whole.problem.backend!r}", f"  {self.scheme}: {self.why}"]
        for backward, name, found in ((False, "forward", self.forward), (True, "backward", self.backward)):
            sent, memory = self.sent(backward=backward), self.memory(backward=backward)
            lines.append(
                f"  {name}: rank {whole.rank} sends {sent} bytes in {self.steps(backward=backward)} steps, and has besides inputs "
                f"and results {memory.keys} bytes of keys and values and {memory.partial} of partial results"
            )
            lines.append(f"    by the model {found}")
        link, latency = self.machine.link / 1e9, self.machine.latency * 1e6
        lines.append(f"  the model: rates of one H200 in 16 bits, links of {link:g} GB/s and {latency:g} µs")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The same as numbers, of this rank."""
        found: dict[str, Any] = {"scheme": self.scheme, "why": self.why, "ranks": self.ranks, "order": self.whole.order}
        for backward, name, times in ((False, "forward", self.forward), (True, "backward", self.backward)):
            memory = self.memory(backward=backward)
            found[name] = {
                "sent_bytes": self.sent(backward=backward),
                "keys_bytes": memory.keys,
                "partial_bytes": memory.partial,
                "steps": self.steps(backward=backward),
                "seconds": times.seconds,
                "efficiency": times.efficiency,
                "shown_share": times.shown / times.seconds if times.seconds else 0.0,
            }
        return found
