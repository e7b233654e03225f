"""Plan + arrays -> a running kernel: the parameter struct, the grid, and what is kept between calls."""

from __future__ import annotations

import functools
from typing import Any

import numpy

from . import arrays, host, nvrtc, reference
from .architecture import HOST, Architecture, architecture_named, architecture_of
from .host import HostOptions
from .layout import Layout
from .options import Options
from .params import POINTERS, forward_params
from .plan import Plan, make_plan
from .problem import Problem, check_overlap, make_problem

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute in cuda.h


class AttentionPlan:
    """A problem with everything decided: called with arrays of the same layouts it only launches. Prints itself.

    Made by `plan_attention`. It holds no array, and several threads may call it.

    Attributes
    ----------
    problem : Problem
        What is computed.
    kernel : Plan or None
        How. None on backend 'numpy', which has no kernel.
    """

    def __init__(self, problem: Problem, kernel: Plan | None, inputs: tuple[Layout, ...], returns_lse: bool) -> None:
        self.problem = problem
        self.kernel = kernel
        self._returns_lse = returns_lse
        results = (_seen(problem.out, problem.out_shape), problem.lse and _seen(problem.lse, problem.lse_shape))
        self._layouts = dict(zip(POINTERS, (*inputs, *results)))
        self._spans = [layout and [end * layout.itemsize for end in layout.extent] for layout in self._layouts.values()]
        if kernel is not None:
            self._params = forward_params(problem)
            # Where the addresses lie among the 64-bit words of the struct.
            self._words = [self._params.dtype.fields[name][1] // 8 for name in POINTERS]
            self._grid = (0 if problem.empty else kernel.blocks(problem),)
            self._block = (kernel.threads,)

    @property
    def result_bytes(self) -> int:
        """Bytes of the results: what a call allocates for those that are not given."""
        p = self.problem
        return p.out.nbytes + (p.lse.nbytes if p.lse is not None else 0)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory beyond inputs and results. The forward needs none."""
        return 0

    def __str__(self) -> str:
        p = self.problem
        first = "0" if p.first_key is None else f"i{p.first_key:+d}"
        last = str(p.len_kv - 1) if p.last_key is None else f"i{p.last_key:+d}"
        lines = [
            f"attention of {p.dtype}, batch {p.batch}, {p.heads_q} heads on {p.heads_kv}, {p.len_q} queries on {p.len_kv} keys, "
            f"dim {p.dim}, dim_v {p.dim_v}, on backend {p.backend!r}",
            f"  query i sees keys {first} ... {last}; scale {p.scale:.6g}; {p.flops:.4g} FLOPs",
            f"  results {self.result_bytes} bytes, workspace {self.workspace_bytes} bytes",
        ]
        if self.kernel is None:
            lines.append("NumPy, online softmax over blocks of keys")
        else:
            lines += [str(self.kernel), f"  {self._grid[0]} blocks"]
        return "\n".join(lines)

    def __call__(self, q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None) -> Any:
        """Compute attention of arrays laid out like those the plan was made for.

        Parameters
        ----------
        q, k, v : array
            As in `attention`.
        out, lse : array, optional
            Where to write. By default new arrays.

        Returns
        -------
        out : array
        lse : array
            Only if the plan was made with ``return_lse=True``.

        Raises
        ------
        ValueError
            If an array is not laid out as planned.
        """
        views = as_views(q, k, v, out, lse)
        for array, (name, planned) in zip(views, self._layouts.items()):
            if array is not None:
                _check_layout(name, array, planned)
        return self.run(views, q, out, lse)

    def run(self, views: tuple[Any, ...], q: Any, out: Any, lse: Any) -> Any:
        """Compute on views whose layouts are known to be those planned; results in the kind of `q`, or `out` and `lse` as given."""
        if out is not None or lse is not None:
            self._check_apart(views)
        device = self.problem.device
        if device is None or _current_device() == device:
            out_view, lse_view = self._compute(*views)
        else:
            import cupy

            with cupy.cuda.Device(device):
                out_view, lse_view = self._compute(*views)
        out = arrays.give_back(out_view, q) if out is None else out
        if not self._returns_lse:
            return out
        return out, arrays.give_back(lse_view, q) if lse is None else lse

    def _compute(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, Any]:
        p = self.problem
        if out is None:
            out = arrays.empty(p.out, p.out_shape)
        if lse is None and p.lse is not None:
            lse = arrays.empty(p.lse, p.lse_shape)
        if p.empty:
            return out, lse
        if p.backend == "numpy":
            self._compute_with_numpy(q, k, v, out, lse)
            return out, lse
        operands = (q, k, v, out, lse)
        params = self._params.copy()  # of its own, so that threads may share the plan
        words = params.view(numpy.uint64)
        for word, array in zip(self._words, operands):
            if array is not None:
                words[word] = arrays.pointer(array)
        if p.backend == "cuda":
            self._function(self._grid, self._block, (params,), self.kernel.shared_bytes)
        else:
            given = {name: array for name, array in zip(POINTERS, operands) if array is not None}
            host.run(self.kernel, self._grid[0], params, given, HostOptions.from_environment())
        return out, lse

    @functools.cached_property
    def _function(self) -> Any:
        return loaded(self.kernel, self.problem.device)

    def _compute_with_numpy(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        p = self.problem
        q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
        reference.blocked(
            q,
            k,
            v,
            scale=p.scale,
            first_key=p.first_key,
            last_key=p.last_key,
            softcap=p.softcap,
            out=out if len(p.out_shape) > 2 else out[None],
            lse=lse if lse is None or len(p.out_shape) > 2 else lse[None],
        )

    def _check_apart(self, views: tuple[Any, ...]) -> None:
        """Refuse results that overlap an input or each other."""
        spans = []
        for array, span in zip(views, self._spans):
            if array is not None:
                address = arrays.pointer(array)
                spans.append((address + span[0], address + span[1]))
        for i, (start, stop) in enumerate(spans[3:], 3):
            for low, high in spans[:i]:
                if start < high and low < stop:
                    given = {name: array for name, array in zip(POINTERS, views) if array is not None}
                    check_overlap(
                        {name: arrays.pointer(array) for name, array in given.items()},
                        {name: self._layouts[name] for name in given},
                    )


def as_views(q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, ...]:
    """The arguments as NumPy or CuPy arrays; None stays None."""
    return (
        arrays.view(q, "q"),
        arrays.view(k, "k"),
        arrays.view(v, "v"),
        None if out is None else arrays.view(out, "out", writable=True),
        None if lse is None else arrays.view(lse, "lse", writable=True),
    )


def prepared(views: tuple[Any, ...], options: tuple[Any, ...]) -> AttentionPlan:
    """The plan for these views; a plan once made for equal layouts and options is found again.

    Parameters
    ----------
    views : tuple
        q, k, v, out, lse; the last two may be None.
    options : tuple
        The fields of `Options`, in order, then the architecture's name or None.
    """
    signatures = tuple([None if x is None else arrays.signature(x) for x in views])
    try:
        # The types tell True from 1, which are equal as keys but not as options.
        return _prepared(signatures, options, tuple([type(option) for option in options]))
    except TypeError:  # an option that cannot be a key: a list as window, say, or one that is wrong in itself
        return _prepared.__wrapped__(signatures, options, ())


@functools.lru_cache(maxsize=1024)
def _prepared(signatures: tuple[Any, ...], options: tuple[Any, ...], _types: tuple[type, ...]) -> AttentionPlan:
    layouts = [s and arrays.layout_of(s, name) for s, name in zip(signatures, POINTERS)]
    *given, arch = options
    asked = Options(*given)
    problem = make_problem(*layouts[:3], asked, *layouts[3:])
    kernel = None if problem.backend == "numpy" else make_plan(problem, _architecture(problem, arch))
    return AttentionPlan(problem, kernel, tuple(layouts[:3]), bool(asked.return_lse))


def _architecture(problem: Problem, arch: str | None) -> Architecture:
    if problem.backend == "host":
        return HOST if arch is None else architecture_named(arch)
    import cupy

    own = architecture_of(cupy.cuda.Device(problem.device).compute_capability)
    if arch is not None and architecture_named(arch) != own:
        raise ValueError(f"arch: expected None or {own.name!r}, what device {problem.device} executes, got {arch!r}")
    return own


@functools.cache
def loaded(kernel: Plan, device: int) -> Any:
    """The function of a kernel on a device, its dynamic shared memory allowed. The device must be current."""
    from cupy.cuda import Module
    from cupy_backends.cuda.api import driver

    module = Module()
    module.load(nvrtc.cubin(kernel))
    function = module.get_function(kernel.kernel)
    driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes)
    return function


def _current_device() -> int:
    from cupy.cuda import runtime

    return runtime.getDevice()


def _seen(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """A result's layout with the axes that the user sees."""
    return Layout(shape, layout.strides[len(layout.shape) - len(shape) :], layout.dtype, layout.alignment, layout.device)


def _check_layout(name: str, array: Any, planned: Layout | None) -> None:
    if planned is None:
        raise ValueError(f"{name}: expected None, the plan was made without it, got an array")
    found = arrays.layout(array, name)
    if found == planned:
        return
    for field in ("shape", "strides", "dtype", "device"):
        if getattr(found, field) != getattr(planned, field):
            raise ValueError(f"{name}: expected {field} {getattr(planned, field)}, as planned, got {getattr(found, field)}")
    if found.alignment < planned.alignment:
        raise ValueError(f"{name}: expected an address divisible by {planned.alignment}, as planned, got one divisible by {found.alignment}")
