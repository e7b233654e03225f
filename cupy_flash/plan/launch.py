"""How many blocks execute an entry of a kernel file: a `Launch`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedError

MAX_BLOCKS = 2**31  # of a grid's first dimension, CUDA C++ Programming Guide


@dataclass(frozen=True, slots=True)
class Launch:
    """One entry of a kernel file, executed by so many blocks.

    Parameters
    ----------
    entry : str
    blocks : int
        As many as can have something to do.
    shared_bytes : int
    per_multiprocessor : int, optional
        No more blocks than so many for each multiprocessor: those that there are take one tile after the other.
    behind : int
        More blocks on any device, which begin when those end.
    cluster : int
        So many neighbouring blocks run at the same time, and reach each other's shared memory. The kernel says so too.
    """

    entry: str
    blocks: int
    shared_bytes: int
    per_multiprocessor: int | None = None
    behind: int = 0
    cluster: int = 1

    def __str__(self) -> str:
        if self.per_multiprocessor is None:
            return f"{self.blocks} blocks" + f" in clusters of {self.cluster}" * (self.cluster > 1)
        behind = f", and {self.behind} behind them" if self.behind else ""
        return f"{self.blocks} blocks, at most {self.per_multiprocessor} a multiprocessor, one tile after the other{behind}"

    def on(self, multiprocessors: int) -> Launch:
        """The launch with the number of blocks that it has on a device of so many multiprocessors."""
        if self.per_multiprocessor is None:
            return self
        blocks = min(self.blocks, multiprocessors * self.per_multiprocessor) + self.behind
        return replace(self, blocks=blocks, per_multiprocessor=None, behind=0)


def checked(launch: Launch, name: str = "q") -> Launch:
    """The launch, if a grid holds its blocks; messages call the array that decides it by its name."""
    blocks = launch.blocks + launch.behind
    if blocks >= MAX_BLOCKS:
        raise UnsupportedError(f"{name}: expected fewer than {MAX_BLOCKS} blocks of {launch.entry}, got {blocks}")
    return launch
