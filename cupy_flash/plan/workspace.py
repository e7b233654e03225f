"""Device memory that a call needs beyond its arrays: parts of one allocation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy

ALIGNMENT = 256  # of each part within the allocation: what a memory transaction of any GPU divides
UNWRITTEN = 0xFF  # on the host: NaN in every dtype, so that a read before a write shows


@dataclass(frozen=True)
class Workspace:
    """The parts of a workspace, each under the name of the kernel's parameter that points to it.

    Parameters
    ----------
    parts : tuple of (str, int)
        Name and bytes.
    """

    parts: tuple[tuple[str, int], ...] = ()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, in order."""
        return tuple(name for name, _ in self.parts)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each part begins, in bytes from the beginning of the allocation."""
        sizes = [-(-size // ALIGNMENT) * ALIGNMENT for _, size in self.parts]
        return tuple(sum(sizes[:i]) for i in range(len(sizes)))

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.offsets[-1] + self.parts[-1][1] if self.parts else 0

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size}" for name, size in self.parts)
        return f"workspace {self.nbytes} bytes" + (f": {parts}" if parts else "")

    def memory(self) -> numpy.ndarray:
        """New memory in which a read before a write shows."""
        return numpy.full(self.nbytes, UNWRITTEN, numpy.uint8)

    def on_host(self, memory: numpy.ndarray | None = None) -> dict[str, numpy.ndarray]:
        """The parts as arrays of bytes, in the memory given or in new memory full of NaN."""
        memory = self.memory() if memory is None else memory
        return {name: memory[start : start + size] for (name, size), start in zip(self.parts, self.offsets)}


def joined(workspaces: Iterable[Workspace]) -> Workspace:
    """One for kernels that are executed one after the other: a part is as large as the largest of its name."""
    sizes: dict[str, int] = {}
    for workspace in workspaces:
        for name, size in workspace.parts:
            sizes[name] = max(size, sizes.get(name, 0))
    return Workspace(tuple(sizes.items()))
