"""Plan + arrays -> a running kernel: the parameter struct, the grid, and what is kept between calls."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from . import arrays, reference
from .architecture import HOST, Architecture, architecture_named, architecture_of
from .errors import UnsupportedError
from .layout import Layout
from .options import Options
from .params import POINTERS, forward_params
from .plan import Plan, make_plan
from .problem import Problem, check_overlap, make_problem

if TYPE_CHECKING:
    from .device import DeviceKernel

MAX_BLOCKS = 2**31  # of a grid's first dimension, CUDA C++ Programming Guide


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
        *inputs, out, _ = (x and arrays.description_of(x) for x in self._layouts.values())
        self._usual = ((*inputs, out, None), (*inputs, None, None))  # with and without `out`
        self._spans = [(0, 0) if x is None else [end * x.itemsize for end in x.extent] for x in self._layouts.values()]
        if kernel is not None:
            self._params = forward_params(problem)
            self._blocks = 0 if problem.empty else kernel.blocks(problem)
            if self._blocks >= MAX_BLOCKS:
                raise UnsupportedError(f"q: expected fewer than {MAX_BLOCKS} tiles of rows over all heads, got {self._blocks}")
        if problem.backend == "cuda":
            from .device import current_device

            self._current_device = current_device

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
            lines += [str(self.kernel), f"  {self._blocks} blocks"]
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
        given = Arguments(q, k, v, out, lse)
        if given.descriptions not in self._usual:
            for name, found in zip(POINTERS, given.descriptions):
                if found is not None:
                    _check_layout(name, arrays.layout_of(found, name), self._layouts[name])
        return self.run(given)

    def run(self, given: Arguments) -> Any:
        """Compute on arrays that are known to have the layouts planned for."""
        if given.out is not None or given.lse is not None:
            self._check_apart(given.addresses)
        device = self.problem.device
        if device is None or self._current_device() == device:
            out, lse = self._compute(given)
        else:
            import cupy

            with cupy.cuda.Device(device):
                out, lse = self._compute(given)
        out = arrays.give_back(out, given.q) if given.out is None else given.out
        if not self._returns_lse:
            return out
        return out, arrays.give_back(lse, given.q) if given.lse is None else given.lse

    def _compute(self, given: Arguments) -> tuple[Any, Any]:
        p = self.problem
        q, k, v, out, lse = given.views
        addresses = given.addresses
        if out is None:
            out = arrays.empty(p.out, p.out_shape)
            addresses[3] = arrays.pointer(out)
        if lse is None and p.lse is not None:
            lse = arrays.empty(p.lse, p.lse_shape)
            addresses[4] = arrays.pointer(lse)
        if p.empty:
            return out, lse
        if p.backend == "numpy":
            self._compute_with_numpy(q, k, v, out, lse)
            return out, lse
        if p.backend == "cuda":
            self._on_device.launch(addresses)
        else:
            from . import host  # brings subprocess and its like, which a GPU does not need

            params = self._params.copy()
            operands = {name: x for name, x in zip(POINTERS, (q, k, v, out, lse)) if x is not None}
            for name in operands:
                params[name]["data"] = arrays.pointer(operands[name])
            host.run(self.kernel, self._blocks, params, operands, host.HostOptions.from_environment())
        return out, lse

    @functools.cached_property
    def _on_device(self) -> DeviceKernel:
        from .device import DeviceKernel

        places = tuple(self._params.dtype.fields[name][1] // 8 for name in POINTERS)
        return DeviceKernel(self.kernel, self.problem.device, self._params.tobytes(), places, self._blocks)

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

    def _check_apart(self, addresses: list[int]) -> None:
        """Refuse results that overlap an input or each other. Spelled out: as loops it would take a tenth of a call."""
        a = addresses
        q, k, v, out, lse = self._spans
        results = [(a[3] + out[0], a[3] + out[1])] if a[3] else []
        if a[4]:
            results.append((a[4] + lse[0], a[4] + lse[1]))
        for start, stop in results:
            if (
                (start < a[0] + q[1] and a[0] + q[0] < stop)
                or (start < a[1] + k[1] and a[1] + k[0] < stop)
                or (start < a[2] + v[1] and a[2] + v[0] < stop)
                or (len(results) == 2 and results[0][0] < results[1][1] and results[1][0] < results[0][1])
            ):
                given = {name: address for name, address in zip(POINTERS, addresses) if address}
                check_overlap(given, {name: self._layouts[name] for name in given})


class Arguments:
    """The arrays of a call: as given, as NumPy or CuPy views, their descriptions and addresses; None and 0 for those left out."""

    __slots__ = ("addresses", "descriptions", "lse", "out", "q", "views")

    def __init__(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        self.q, self.out, self.lse = q, out, lse
        view, describe = arrays.view, arrays.describe
        q, k, v = view(q, "q"), view(k, "k"), view(v, "v")
        (about_q, at_q), (about_k, at_k), (about_v, at_v) = describe(q), describe(k), describe(v)
        about_out = about_lse = None
        at_out = at_lse = 0
        if out is not None:
            out = view(out, "out", writable=True)
            about_out, at_out = describe(out)
        if lse is not None:
            lse = view(lse, "lse", writable=True)
            about_lse, at_lse = describe(lse)
        self.views = (q, k, v, out, lse)
        self.descriptions = (about_q, about_k, about_v, about_out, about_lse)
        self.addresses = [at_q, at_k, at_v, at_out, at_lse]


def prepared(given: Arguments, options: tuple[Any, ...]) -> AttentionPlan:
    """The plan for these arrays; a plan once made for equal layouts and options is found again.

    Parameters
    ----------
    given : Arguments
    options : tuple
        The fields of `Options`, in order, then the architecture's name or None.
    """
    try:
        # The types tell True from 1, which are equal as keys but not as options.
        return _prepared(given.descriptions, options, tuple([type(option) for option in options]))
    except TypeError:  # an option that cannot be a key: a list as window, say, or one that is wrong in itself
        return _prepared.__wrapped__(given.descriptions, options, ())


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], options: tuple[Any, ...], _types: tuple[type, ...]) -> AttentionPlan:
    layouts = [d and arrays.layout_of(d, name) for d, name in zip(descriptions, POINTERS)]
    *given, arch = options
    asked = Options(*given)
    problem = make_problem(*layouts[:3], asked, *layouts[3:])
    kernel = None if problem.backend == "numpy" else make_plan(problem, _architecture(problem, arch))
    return AttentionPlan(problem, kernel, tuple(layouts[:3]), bool(asked.return_lse))


def _architecture(problem: Problem, arch: str | None) -> Architecture:
    if problem.backend == "host":
        return HOST if arch is None else architecture_named(arch)
    from .device import compute_capability

    own = architecture_of(compute_capability(problem.device))
    if arch is not None and architecture_named(arch) != own:
        raise ValueError(f"arch: expected None or {own.name!r}, what device {problem.device} executes, got {arch!r}")
    return own


def _seen(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """A result's layout with the axes that the user sees."""
    return Layout(shape, layout.strides[len(layout.shape) - len(shape) :], layout.dtype, layout.alignment, layout.device)


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
