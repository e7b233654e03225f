"""Which scheme computes a whole, and why: that which the model says is the fastest, of those for which there is memory."""

from __future__ import annotations

from dataclasses import dataclass

from .heads import heads_of
from .model import Forecast, Machine, forecast
from .traffic import SCHEMES, memory_of
from .whole import Whole

# A scheme is taken before a faster one that gains less than this: less is needed for it.
PREFERRED = ("all_gather", "ulysses", "ring")
GAIN = 0.02


@dataclass(frozen=True, slots=True)
class Choice:
    """A scheme, and the reasons in words."""

    scheme: str
    why: str


def chosen(whole: Whole, backward: bool, memory: int | None, machine: Machine | None = None) -> Choice:
    """The scheme that 'auto' means.

    Parameters
    ----------
    whole : Whole
    backward : bool
    memory : int or None
        Most bytes that a rank may take besides inputs and results.
    machine : Machine, optional

    Returns
    -------
    Choice
        The same on all ranks.
    """
    if whole.size == 1:
        return Choice("all_gather", "there is one rank, which computes as one device does")
    taken = {scheme: max(memory_of(whole, scheme, rank, backward).total for rank in range(whole.size)) for scheme in SCHEMES}
    reasons = []
    fitting = [scheme for scheme in PREFERRED if memory is None or taken[scheme] <= memory]
    if not fitting:
        least = min(PREFERRED, key=lambda scheme: taken[scheme])
        return Choice(least, f"none fits {memory} bytes, and {least} takes the least, {taken[least]}")
    left_out = [scheme for scheme in PREFERRED if scheme not in fitting]
    if left_out:
        reasons.append(f"{' and '.join(left_out)} would take more than {memory} bytes")
    if "ulysses" in fitting and any(first == stop for first, stop in (heads_of(whole, rank) for rank in range(whole.size))):
        if len(fitting) > 1:
            fitting.remove("ulysses")
        reasons.append(f"ulysses would leave ranks idle, of {whole.size} on {whole.problem.heads_q} heads")
    found: dict[str, Forecast] = {scheme: forecast(whole, scheme, backward, machine) for scheme in fitting}
    best = fitting[0]
    for scheme in fitting[1:]:
        if found[scheme].seconds < (1 - GAIN) * found[best].seconds:
            best = scheme
    times = ", ".join(f"{scheme} {found[scheme].seconds * 1e3:.4g} ms" for scheme in fitting)
    reasons.append(f"the model says {times}")
    return Choice(best, "; ".join(reasons))
