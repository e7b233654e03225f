"""What all plans check of the arrays they are called with, and how they are found again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

from ..errors import shown
from ..plan.architecture import HOST, Architecture, architecture_named, architecture_of
from ..plan.workspace import Workspace
from ..problem import arrays
from ..problem.forward import Problem
from ..problem.layout import Layout
from ..problem.lengths import check_values
from ..problem.overlap import are_apart, check_overlap

if TYPE_CHECKING:
    from ..plan.kernel import KernelPlan
    from ..plan.launch import Launch
    from .execution import Execution

Result = TypeVar("Result")
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Prepared:
    """What every plan can do: compare arrays with the layouts it was made for, and execute on its device.

    Parameters
    ----------
    layouts : dict of str to Layout or None
        As users see the arguments; None for one left out.
    results : tuple of str
        Which of them are written.
    backend : str
    device : int or None
    execution : Execution or None
        None on backend 'numpy', which has no kernel.
    keeps_tiles : bool
        Whether the mask of a call is one that keeps what is found of its tiles.
    given : tuple of str
        Which of the arguments are lengths, or what scores and masks read.
    """

    def __init__(
        self,
        layouts: dict[str, Layout | None],
        results: tuple[str, ...],
        backend: str,
        device: int | None,
        execution: Execution | None,
        keeps_tiles: bool = False,
        given: tuple[str, ...] = (),
    ) -> None:
        self._layouts = layouts
        self._given = given
        self._keeps_tiles = keeps_tiles
        self._results = results
        self._places_of_results = [i for i, name in enumerate(layouts) if name in results]
        self._backend = backend
        self._device = device
        self._execution = execution
        # A new array has no gaps; one in place of a result that is planned with them would be written beyond its end.
        self._demanded = tuple(name for name in results if layouts[name] is not None and not layouts[name].dense)
        self._spans = [(0, 0) if x is None else tuple(end * x.itemsize for end in x.extent) for x in layouts.values()]

    @functools.cached_property
    def _current_device(self) -> Callable[[], int]:
        from .device import current_device  # needs CuPy, which a plan that is only printed does not

        return current_device

    def __repr__(self) -> str:
        how = self._backend if self.kernel is None else self.kernel.name
        return f"<{type(self).__name__} by {how}: {str(self).splitlines()[0]}>"

    def _repr_html_(self) -> str:
        """What notebooks show: the first line, and all of it when it is opened."""
        import html  # late: most programs show no plan

        first, *others = html.escape(str(self)).splitlines()
        return f"<details><summary>{first}</summary><pre>" + "\n".join(others) + "</pre></details>"

    @property
    def kernel(self) -> KernelPlan | None:
        """The kernel and its constants; None on backend 'numpy', which has no kernel."""
        return self._execution and self._execution.kernel

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The grids of a call, in order; none on backend 'numpy'."""
        return self._execution.launches if self._execution else ()

    @property
    def workspace(self) -> Workspace:
        """Device memory beyond inputs and results, by part."""
        return self._execution.workspace if self._execution else Workspace()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory beyond inputs and results: what `workspace` has to hold if it is given."""
        return self.workspace.nbytes

    def _check_layouts(self, descriptions: tuple[Any, ...]) -> None:
        for (name, planned), found in zip(self._layouts.items(), descriptions):
            if found is not None:
                _check_layout(name, arrays.layout_of(found, name), planned)
            elif name in self._demanded:
                raise ValueError(f"{name}: expected an array with strides {planned.strides}, as planned, got None")
            elif planned is not None and name not in (*self._results, "dlse"):  # None of which is zero
                raise ValueError(f"{name}: expected an array of shape {planned.shape}, as planned, got None")

    def _check_captured(self, others: Any, problem: Problem) -> None:
        """Refuse arrays by other names than those planned, and an expression as mask, which is the plan's own."""
        planned = problem.scores
        mask, found = others.mask, others.found
        if self._keeps_tiles != (found is not None) and (mask is not None or "mask" in others.names or self._keeps_tiles):
            expected = "a TileMask" if self._keeps_tiles else "no TileMask"
            raise ValueError(f"mask: expected {expected}, as planned, got {'one' if found is not None else 'none'}")
        if found is not None and mask is not None and mask != planned.mask:
            raise ValueError(f"mask: expected a TileMask of {str(planned.mask)!r}, as planned, got one of {str(mask)!r}")
        if mask is not None and found is None:
            raise ValueError(f"mask: expected None or an array, since a plan keeps its expression, got {shown(mask)}")
        if others.names == self._given:
            return
        for name in self._given:
            if name not in others.names:
                raise ValueError(f"{name}: expected an array, as planned, got None")
        for name in others.names:
            if name not in self._given:
                raise ValueError(f"{name}: expected None, the plan was made without it, got an array")

    def _check_numbers(self, problem: Problem, lengths: dict[str, Any]) -> None:
        """Refuse lengths of sequences that are impossible, wherever they are."""
        if problem.lengths is None:
            raise ValueError("lengths: expected a plan with lengths of sequences, got one without")
        for name in lengths:
            if name not in problem.lengths.names:
                raise ValueError(f"{name}: expected one of {', '.join(problem.lengths.names)}, as planned")
        views = {name: arrays.view(x, name) for name, x in lengths.items()}
        numbers = {name: x if isinstance(x, numpy.ndarray) else x.get() for name, x in views.items()}
        for name, x in numbers.items():
            _check_layout(name, arrays.layout(x, name), replace(dict(problem.lengths.arrays)[name], device=None))
        check_values(problem.lengths, numbers, (problem.len_q, problem.len_kv))

    def checked_workspace(self, x: Any) -> arrays.Array:
        """The caller's memory for the workspace, checked."""
        memory = arrays.view(x, "workspace", writable=True)
        (shape, strides, dtype, phase, where), _ = arrays.describe(memory)
        if dtype != numpy.uint8:
            raise TypeError(f"workspace: expected uint8, got {dtype}")
        if len(shape) != 1 or (strides != (1,) and shape[0] > 1) or shape[0] < self.workspace_bytes:
            raise ValueError(
                f"workspace: expected one axis of at least {self.workspace_bytes} bytes without gaps, got shape {shape}"
            )
        if where != self._device:
            places = ["in host memory" if place is None else f"on CUDA device {place}" for place in (self._device, where)]
            raise ValueError(f"workspace: expected an array {places[0]}, got one {places[1]}")
        if phase:
            raise ValueError(f"workspace: expected an address divisible by 16, got remainder {phase}")
        return memory

    def _check_apart(self, addresses: list[int], workspace: arrays.Array | None) -> None:
        """Refuse results that overlap an input or each other."""
        if workspace is None and are_apart(addresses, self._spans, self._places_of_results):
            return
        given = zip(self._layouts, addresses, self._spans)
        spans = {name: (address + low, address + high) for name, address, (low, high) in given if address}
        results = self._results
        if workspace is not None:
            address = arrays.pointer(workspace)
            spans["workspace"] = (address, address + self.workspace_bytes)
            results = (*results, "workspace")
        check_overlap(spans, results)

    def _check_counts(self) -> None:
        if self._backend != "host":
            raise ValueError(f"backend: expected a plan for 'host', the only one that counts, got one for {self._backend!r}")

    def _where_planned(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function that runs with the plan's device as the current one."""
        if self._device is None or self._current_device() == self._device:
            return compute(*arguments)
        import cupy

        with cupy.cuda.Device(self._device):
            return compute(*arguments)


def cached(
    prepare: Callable[..., Result], descriptions: tuple[Any, ...], options: dict[str, Any], found: Mapping[str, Any] = NO_OPTIONS
) -> Result:
    """What a function with an `lru_cache` makes of descriptions and options by name, from the cache where they can be its key.

    Besides options that a user gave there are those that have been found to be of the one type that they may have.
    """
    named = (*options.items(), *found.items())
    try:
        # The types tell True from 1, which are equal as keys but not as options; inside of a pair as well.
        types = [*map(type, options.values())]
        if tuple in types:
            types += [tuple(map(type, option)) for option in options.values() if type(option) is tuple]
        return prepare(descriptions, named, tuple(types))
    except Exception:  # an option that cannot be a key, such as a list as window; or what is wrong, and is found wrong once more
        pass
    return prepare.__wrapped__(descriptions, named, ())


def architecture_for(backend: str, device: int | None, arch: str | None = None) -> Architecture | None:
    """The architecture to plan for: on the host the one asked for, on a device its own; None with NumPy, which has no kernels."""
    if backend == "numpy":
        if arch is not None:
            raise ValueError(f"arch: expected None on backend 'numpy', which has no kernels, got {shown(arch)}")
        return None
    if backend == "host":
        return HOST if arch is None else architecture_named(arch)
    from .device import compute_capability

    own = architecture_of(compute_capability(device))
    if arch is not None and architecture_named(arch) != own:
        raise ValueError(f"arch: expected None or {own.name!r}, what device {device} executes, got {arch!r}")
    return own


def _check_layout(name: str, found: Layout, planned: Layout | None) -> None:
    if found == planned:
        return
    if planned is None:
        raise ValueError(f"{name}: expected None, the plan was made without it, got an array")
    for field in ("shape", "strides", "dtype", "device"):
        if getattr(found, field) != getattr(planned, field):
            raise ValueError(f"{name}: expected {field} {getattr(planned, field)}, as planned, got {getattr(found, field)}")
    if found.alignment < planned.alignment:
        raise ValueError(
            f"{name}: expected an address divisible by {planned.alignment}, as planned, got one divisible by {found.alignment}"
        )
