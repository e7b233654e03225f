"""A kernel with everything of a problem but the arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy

from ..plan.workspace import Workspace
from ..problem.mask import Mask

if TYPE_CHECKING:
    from ..plan.kernel import KernelPlan
    from ..plan.launch import Launch
    from ..plan.preparation import Preparation
    from ..plan.tensor_map import TensorMap
    from .device import DeviceKernel
    from .host import Traffic


class Execution:
    """A kernel on one problem, to be executed with the arrays of a call.

    Parameters
    ----------
    kernel : KernelPlan
    launches : tuple of Launch
    params : numpy.ndarray
        The parameter struct without addresses.
    names : tuple of str
        The arrays of a call, in order.
    workspace : Workspace
    device : int or None
        CUDA ordinal; None executes on the host.
    maps : dict of str to TensorMap, optional
        The fields of the struct that are maps, which are in the clear there.
    mask : Mask, optional
        Of a forward.
    preparation : Preparation, optional
        What finds the tiles that it visits. It is launched before, and its results are a part of the workspace.
    keeps_tiles : bool
        Whether its results are kept outside of a call instead, and it is launched only where they are not there yet.
    parts : Preparation, optional
        What makes the arrays that the kernel is told of from those of a call. Likewise launched before, in each call.
    """

    def __init__(
        self,
        kernel: KernelPlan,
        launches: tuple[Launch, ...],
        params: numpy.ndarray,
        names: tuple[str, ...],
        workspace: Workspace,
        device: int | None,
        maps: dict[str, TensorMap] | None = None,
        mask: Mask | None = None,
        preparation: Preparation | None = None,
        keeps_tiles: bool = False,
        parts: Preparation | None = None,
    ) -> None:
        self.kernel = kernel
        self.launches = launches
        self.preparation = preparation
        self.parts = parts
        self._keeps_tiles = keeps_tiles
        if preparation is not None and keeps_tiles:
            names = (*names, *preparation.results.names)
        elif preparation is not None:
            workspace = Workspace((*workspace.parts, *preparation.results.parts))
        if parts is not None:
            workspace = Workspace((*workspace.parts, *parts.results.parts))
        self.workspace = workspace
        self._params = params
        self._names = names
        self._device = device
        self._maps = maps or {}
        self._mask = mask

    def __str__(self) -> str:
        blocks = list(map(str, self.launches))
        if len(blocks) > 1:
            blocks = [f"{launch.entry} {number}" for launch, number in zip(self.launches, blocks)]
        before = ""
        if self.preparation:
            once = f", once for a TileMask, which keeps {self.preparation.results.nbytes} bytes" if self._keeps_tiles else ""
            before = f"\n  before: {_launched(self.preparation)}{once}"
        if self.parts:
            before += f"\n  before: {_launched(self.parts)}"
        return f"{self.kernel}{before}\n  {', '.join(blocks)}"

    @property
    def only_launches(self) -> bool:
        """Whether nothing is launched before the kernel."""
        return self.preparation is None and self.parts is None

    @functools.cached_property
    def on_device(self) -> DeviceKernel:
        """The kernel loaded on its device, to be launched with addresses in the order of the names."""
        from .device import DeviceKernel

        of_problem = self._params, self._names, self.workspace, self.launches, self._maps, self._mask
        return DeviceKernel(self.kernel, self._device, *of_problem)

    @functools.cached_property
    def _preparation_on_device(self) -> DeviceKernel:
        return self._loaded(self.preparation)

    @functools.cached_property
    def _in_each_call(self) -> tuple[tuple[DeviceKernel, list[int]], ...]:
        """What is launched before in each call, and where among its words and the parts of workspace those are that it takes."""
        there = (*self._names, *self.workspace.names)
        before = [(self.parts, self._loaded)] if self.parts else []
        if self.preparation and not self._keeps_tiles:
            before.append((self.preparation, lambda _: self._preparation_on_device))
        return tuple((load(of), [there.index(name) for name in of.taken]) for of, load in before)

    def _loaded(self, of: Preparation) -> DeviceKernel:
        from .device import DeviceKernel

        return DeviceKernel(of.kernel, self._device, of.params, of.names, Workspace(), of.launches, {}, None)

    def load(self) -> None:
        """Load all that a call launches: a capture must not."""
        self.on_device  # noqa: B018, a cached property
        self._in_each_call  # noqa: B018
        if self.preparation is not None:
            self._preparation_on_device  # noqa: B018

    def launch(
        self, words: list[int], workspace: Any, found: dict[Any, Any] | None = None, stream: int | None = None
    ) -> None:
        """Queue the kernels on a stream of the device, with words in the order of the names.

        Parameters
        ----------
        words : list of int
        workspace : cupy.ndarray or None
            Memory for the workspace; None allocates it.
        found : dict, optional
            What is kept of tiles.
        stream : int, optional
            By default the current one.
        """
        if self._keeps_tiles and self.preparation is not None:
            words = [*words, *self._kept_on_device(words, found, stream)]
        if self._in_each_call:
            from .device import allocated

            workspace = allocated(self.workspace) if workspace is None else workspace
            first = workspace.data.ptr
            there = [*words, *(first + offset for offset in self.workspace.offsets)]
            for kernel, places in self._in_each_call:
                kernel.launch([there[place] for place in places], None, stream)
        self.on_device.launch(words, workspace, stream)

    def _kept_on_device(self, words: list[int], found: dict[Any, Any], stream: int | None) -> list[int]:
        """Where what is kept of tiles lies, which is computed if it is not there."""
        from .device import allocated

        c = self.preparation
        key = (self._device, c.key)
        memory = found.get(key)
        if memory is None:
            memory = allocated(c.results)
        at = [memory.data.ptr + offset for offset in c.results.offsets]
        if key not in found:
            told = dict(zip(self._names, (*words, *at)))
            self._preparation_on_device.launch([told[name] for name in c.taken], None, stream)
            found[key] = memory
        return at

    def run_on_host(
        self, views: Iterable[Any], workspace: numpy.ndarray | None, found: dict[Any, Any] | None = None
    ) -> Traffic | None:
        """Execute the kernel on this machine's processor. `found` is what is kept of tiles."""
        from . import host  # brings subprocess and its like, which a GPU does not need

        operands = {name: x for name, x in zip(self._names, views) if x is not None}
        operands |= self.workspace.on_host(workspace)
        options, traffic, c = host.HostOptions.from_environment(), host.Traffic(), self.preparation
        kept = None if found is None or c is None else found.get((None, c.key))
        if found is not None and c is not None:
            operands |= c.results.on_host() if kept is None else kept
        for before in filter(None, (self.parts, c if kept is None else None)):
            told = {name: operands[taken] for name, taken in zip(before.names, before.taken)}
            of_it = host.run(before.kernel, before.launches, before.params, told, options)
            traffic = traffic and of_it and traffic + of_it
        if found is not None and c is not None and kept is None:
            found[None, c.key] = {name: operands[name] for name in c.results.names}
        of_kernel = host.run(self.kernel, self.launches, self._params, operands, options, self._mask)
        return of_kernel and traffic and of_kernel + traffic


def _launched(before: Preparation) -> str:
    return ", ".join(f"{launch.entry} {launch}" for launch in before.launches)
