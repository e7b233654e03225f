"""How long a scheme takes, by a model: rates that were measured on one device, and links of a given speed.

Ranks wait for each other at each exchange, so each step takes as long as on the slowest of them. In a ring, and between portions of
Ulysses, an exchange is beneath the computation, and shows only where it is longer. That it slows down what it is beneath,
is not in the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..problem.mask import Mask
from .blocks import Block
from .traffic import Exchange, Step, steps_of
from .whole import Whole

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# TFLOP/s in bfloat16 on one H200, as docs/benchmarks.md has them, by direction, head dim and mask, at these lengths.
H200: dict[tuple[str, int, str], tuple[int, ...]] = {
    ("forward", 64, "full"): (496, 534, 564, 570, 575, 580),
    ("forward", 64, "causal"): (323, 437, 495, 534, 553, 559),
    ("forward", 128, "full"): (589, 661, 704, 724, 756, 765),
    ("forward", 128, "causal"): (390, 529, 631, 687, 724, 746),
    ("forward", 256, "full"): (602, 681, 720, 743, 739, 766),
    ("forward", 256, "causal"): (356, 560, 664, 711, 736, 754),
    ("backward", 64, "full"): (353, 447, 523, 556, 579, 597),
    ("backward", 64, "causal"): (218, 332, 429, 503, 556, 578),
    ("backward", 128, "full"): (397, 490, 562, 596, 629, 640),
    ("backward", 128, "causal"): (248, 369, 478, 536, 603, 639),
    ("backward", 256, "full"): (312, 395, 439, 465, 497, 501),
    ("backward", 256, "causal"): (204, 304, 383, 445, 472, 494),
}


@dataclass(frozen=True)
class Machine:
    """What a device and its links do.

    Parameters
    ----------
    link : float
        Bytes a second that a device sends, and receives at the same time.
    latency : float
        Seconds until a message begins to arrive.
    memory : float
        Bytes a second of device memory, for what merges results.
    rates : mapping
        TFLOP/s by direction, head dim and mask, at `LENGTHS`.
    """

    link: float = 400e9
    latency: float = 3e-6
    memory: float = 4.3e12
    rates: Mapping[tuple[str, int, str], Sequence[float]] = field(default_factory=lambda: H200)

    def rate(self, backward: bool, dim: int, mask: Mask) -> float:
        """FLOP/s of a call: that of the square one with as many pairs; beyond what was measured, as at the end of it."""
        direction = "backward" if backward else "forward"
        known = sorted({width for way, width, _ in self.rates if way == direction})
        width = min(known, key=lambda own: abs(math.log(own / dim)))
        # A causal call hides half of its pairs. One that hides less goes through fewer tiles that the mask cuts, in proportion.
        hidden = 1 - mask.pairs / max(mask.len_q * mask.len_kv, 1)
        causal = min(2 * hidden, 1.0)
        full_rate, causal_rate = (self._measured(direction, width, shape, mask) for shape in ("full", "causal"))
        return 1 / ((1 - causal) / full_rate + causal / causal_rate)

    def _measured(self, direction: str, width: int, shape: str, mask: Mask) -> float:
        of_shape = self.rates[direction, width, shape]
        place = math.log2(math.sqrt(max(mask.len_q * mask.len_kv, 1)) / LENGTHS[0])
        if place <= 0:
            return of_shape[0] * 1e12 * 2**place  # a short call leaves the device idle
        lower = min(int(place), len(LENGTHS) - 1)
        upper = min(lower + 1, len(LENGTHS) - 1)
        share = min(place, upper) - lower if upper > lower else 0.0
        return (of_shape[lower] * (1 - share) + of_shape[upper] * share) * 1e12

    def exchange(self, exchange: Exchange) -> float:
        """Seconds of an exchange."""
        return exchange.peers * self.latency + max(exchange.sent, exchange.received) / self.link


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the model says.

    Parameters
    ----------
    seconds : float
        From the first to the last.
    computing : float
        Of these, on the slowest rank of each step, with results being merged.
    merging : float
        Of these, merging.
    shown : float
        Of the whole, exchanges that nothing is beneath.
    alone : float
        What one device would take for all of it, if it had the memory.
    ranks : int
    """

    seconds: float
    computing: float
    merging: float
    shown: float
    alone: float
    ranks: int

    @property
    def efficiency(self) -> float:
        """The share of one device's rate that each has."""
        return self.alone / (self.ranks * self.seconds) if self.seconds else 1.0

    def __str__(self) -> str:
        share = self.shown / self.seconds if self.seconds else 0.0
        return (
            f"{self.seconds * 1e3:.4g} ms, {self.efficiency:.3f} of one device's rate; "
            f"{share:.1%} of the time is communication that shows, {self.merging / max(self.seconds, 1e-30):.1%} merges results"
        )


def flops(whole: Whole, block: Block, heads: int, backward: bool) -> float:
    """Operations of the matrix products of a block."""
    p = whole.problem
    width = 3 * p.dim + 2 * p.dim_v if backward else p.dim + p.dim_v
    return 2.0 * width * block.pairs * heads * math.prod(whole.batch)


def forecast(whole: Whole, scheme: str, backward: bool = False, machine: Machine | None = None) -> Forecast:
    """How long a scheme takes.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import distributed
    >>> x = np.broadcast_to(np.float16(0), (64, 8192, 128))  # of one rank: no memory is needed
    >>> plan = distributed.plan_attention(x, x[:8], x[:8], ranks=8, causal=True, order="zigzag", scheme="ring")
    >>> 0.85 < plan.forward.efficiency < 1
    True
    """
    machine = machine or Machine()
    of_ranks = [steps_of(whole, scheme, rank, backward) for rank in range(whole.size)]
    seconds = computing = merging = shown = 0.0
    for steps in zip(*_even(of_ranks)):
        work = max((_compute(whole, step, backward, machine) for step in steps), key=sum)
        exchange = max(machine.exchange(step.exchange) for step in steps)
        overlaps = any(step.overlaps for step in steps)
        beside = max(0.0, exchange - sum(work)) if overlaps else exchange
        computing, merging, shown = computing + sum(work), merging + work[1], shown + beside
        seconds += sum(work) + beside
    return Forecast(seconds, computing, merging, shown, _alone(whole, backward, machine), whole.size)


def _compute(whole: Whole, step: Step, backward: bool, machine: Machine) -> tuple[float, float]:
    """Seconds that the calls of a step take, and that merging what they give does."""
    p, total = whole.problem, 0.0
    for block, heads in step.blocks:
        total += flops(whole, block, heads, backward) / machine.rate(backward, p.dim, block.mask)
    return total, step.merged / machine.memory


def _alone(whole: Whole, backward: bool, machine: Machine) -> float:
    """What one device takes for all rows."""
    p, total = whole.problem, 0.0
    for span in whole.spans:
        width = 3 * p.dim + 2 * p.dim_v if backward else p.dim + p.dim_v
        work = 2.0 * width * span.mask.pairs * p.heads_q * math.prod(whole.batch)
        total += work / machine.rate(backward, p.dim, span.mask) if work else 0.0
    return total


def _even(of_ranks: list[tuple[Step, ...]]) -> list[tuple[Step, ...]]:
    """As many steps for each rank: some have nothing to do in the last ones."""
    most = max(map(len, of_ranks))
    return [(*steps, *(Step(overlaps=True),) * (most - len(steps))) for steps in of_ranks]
