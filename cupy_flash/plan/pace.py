"""How fast a kernel is, as far as a choice between two has to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """As measured of a kernel on one device.

    Parameters
    ----------
    rate : float
        Of many blocks, in FLOP/s.
    step : float
        Of a block, in seconds for each row that it goes through and column of it.
    least : float
        In seconds, whatever there is to do.
    """

    rate: float
    step: float
    least: float = 0.0

    def seconds(self, flops: float, rows: float, columns: int) -> float:
        """What takes longer: all that is to be computed, or one block, which goes through so many rows one tile after another."""
        return self.least + max(flops / self.rate, rows * columns * self.step)
