"""What is computed on the device before a kernel: a `Preparation`, such as the tiles that it visits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from .kernel import KernelPlan
from .launch import Launch
from .workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """A kernel that is launched before another one, which reads its results.

    Parameters
    ----------
    kernel : KernelPlan
    launches : tuple of Launch
    params : numpy.ndarray
        Its parameter struct without addresses.
    names : tuple of str
        The words that it is told, and where its results go, by the names that `params.places_of` knows.
    taken : tuple of str
        What the other kernel calls the same.
    results : Workspace
        What it writes.
    """

    kernel: KernelPlan
    launches: tuple[Launch, ...]
    params: numpy.ndarray
    names: tuple[str, ...]
    taken: tuple[str, ...]
    results: Workspace

    @property
    def key(self) -> tuple[KernelPlan, bytes, Workspace]:
        """What its results depend on besides what arrays hold."""
        return self.kernel, self.params.tobytes(), self.results
