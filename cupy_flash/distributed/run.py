"""From the arguments of a call to its results: checked, agreed on, computed by a scheme."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy

from ..call.captured import Captured, taken_lengths
from ..call.captured import captured as captured_of
from ..errors import shown
from ..problem import arrays
from ..problem.backward import Gradients
from ..problem.layout import HEADS_OF_LSE
from ..problem.lengths import LENGTHS
from ..problem.options import Options, check_flag
from ..problem.scalars import integer
from . import gathered, ring, ulysses
from .adapters import as_communicator
from .agreement import Said, agree, contents, said_of
from .bits import library
from .calls import Calls, Job, check_dropout
from .communicator import Communicator
from .growing import Growing, Results
from .known import Known, key_of
from .merging import Order
from .rows import Keys
from .sharding import check_order
from .whole import Whole, make_whole

SCHEMES = ("auto", "ulysses", "all_gather", "ring")


@dataclass(frozen=True)
class Call:
    """The arguments of one call on this rank, as views with axes in the order of kernels, and the whole it is a part of."""

    comm: Communicator
    whole: Whole
    scheme: str
    inputs: dict[str, Any]
    sinks: Any
    given: Captured
    like: Any
    layout: str
    axes: int

    @property
    def own(self) -> Keys:
        """This rank's keys and values."""
        return Keys(self.inputs["k"], self.inputs["v"], self.whole.kv_runs[self.whole.rank])

    def calls(self, deterministic: bool = False) -> Calls:
        """What computes parts of it."""
        return Calls(self.whole, self.given, deterministic)

    def give_back(self, x: Any, heads: int = -3, like: Any = None) -> Any:
        """A result in the order of axes, with the axes, and of the kind of array, of the caller.

        Of a log-sum-exp `heads` is -2. A gradient has the axes of its input, `like`.
        """
        axes = self.axes if like is None else like.ndim
        x = x[0] if axes == 2 else x
        return arrays.give_back(arrays.in_order(x, self.layout if axes > 2 else "bhsd", heads), self.like, "q")


def begin(
    kind: str,
    comm: Any,
    inputs: dict[str, Any],
    sinks: Any,
    of_scores: dict[str, Any],
    options: dict[str, Any],
    scheme: str,
    order: str,
    memory: int | None,
    wrt: Any = (),
    flags: dict[str, Any] | None = None,
) -> Call:
    """Check the arguments of a call, and agree on it with all ranks."""
    comm = as_communicator(comm)
    said = error = given = None
    views, layout, axes, of_sinks = {}, "bhsd", 3, sinks
    try:
        layout = Options(layout=options.get("layout", "bhsd")).resolve_layout()
        given = captured_of(**of_scores, lengths=taken_lengths(options))
        of_sinks = None if sinks is None else arrays.view(sinks, "sinks")
        views = {name: None if x is None and name == "dlse" else arrays.view(x, name) for name, x in inputs.items()}
        axes = max(views["q"].ndim, views["k"].ndim, views["v"].ndim)
        named = {"scheme": scheme, "order": order, "memory": memory, "wrt": wrt, **(flags or {}), **options}
        key = (kind, layout, comm.size, comm.on_devices, *map(_about, (*views.values(), of_sinks, *given.views)), given.names)

        def say() -> Said:
            for name, x in views.items():
                _check_axes(name, x, comm)
            _check_choices(scheme, order, memory)
            _check_names(options)
            for name, value in (flags or {}).items():
                check_flag(name, value)
            all_of = {name: _in_order(name, x, layout) for name, x in views.items()}
            named.pop("layout", None)  # memory order, which ranks may choose for themselves
            about_sinks = "None" if of_sinks is None else f"{of_sinks.dtype} of shape {of_sinks.shape}"
            return said_of(kind, all_of, given, {**named, "sinks": about_sinks})

        of_expressions = given.options["score"], given.options["mask"]
        said = _SAID.found((*key, *key_of(named), *of_expressions), say)
        views = {name: _in_order(name, x, layout) for name, x in views.items()}
    except Exception as problem:  # told to the others first
        error = problem
    rows = (0, 0) if error is not None else (views["q"].shape[-2], views["k"].shape[-2])
    of_all = agree(comm, None if error is not None else said.and_of(given), rows, error)

    def make() -> tuple[Whole, str]:
        own = {name: value for name, value in options.items() if name != "layout"}
        has_dlse = views.get("dlse") is not None
        whole = make_whole(comm.rank, order, of_all, tuple(views[name] for name in "qkv"), of_sinks, given, own, wrt, has_dlse)
        if scheme != "auto":
            check_dropout(whole, scheme)
            return whole, scheme
        from .choice import chosen  # late: calls that name a scheme need no model

        found = chosen(whole, kind == "attention_backward", memory).scheme
        check_dropout(whole, found)
        return whole, found

    # Another seed in each step of training decides nothing here.
    devices = tuple([_device(x) for x in views.values() if x is not None])
    whole, scheme = _KNOWN.found((comm.rank, *of_all, devices, said.text, *contents(given, LENGTHS)), make)
    return Call(comm, whole, scheme, views, of_sinks, given, inputs["q"], layout, axes)


_SAID: Known[Said] = Known(most=256)
_KNOWN: Known[tuple[Whole, str]] = Known(most=256)  # which hold no array but offsets of packed sequences


def _about(x: Any) -> tuple[Any, ...] | None:
    """What is said of an array depends on this."""
    return None if x is None else (x.shape, x.dtype, isinstance(x, numpy.ndarray))


def _device(x: Any) -> int | None:
    return None if isinstance(x, numpy.ndarray) else x.data.device_id


def run_forward(call: Call) -> tuple[Any, Any]:
    """Result and log-sum-exp of this rank's rows, with axes in the order of kernels."""
    whole, q = call.whole, call.inputs["q"]
    xp, rows, p = library(q), q.shape[-2], whole.problem
    calls = call.calls()
    shape = (*whole.batch, p.heads_q, rows, p.dim_v)
    sinks = call.sinks is not None and call.scheme != "ulysses"  # which come last, and until then nothing is rounded
    out, lse = xp.empty(shape, whole.wide if sinks else q.dtype), xp.empty(shape[:-1], whole.wide)
    if call.scheme == "ulysses":
        ulysses.forward(call.comm, calls, q, *(call.inputs[name] for name in "kv"), call.sinks, out, lse)
        return out, lse
    scheme = ring if call.scheme == "ring" else gathered
    results = Results(out, lse, _order(calls, call.scheme, scheme.jobs_of(calls), rows, out.dtype), whole.wide)
    scheme.forward(call.comm, calls, q, call.own, results)
    if sinks:
        results.add_sinks(call.sinks)
    return out.astype(q.dtype, copy=False), lse


def run_backward(call: Call, deterministic: bool) -> Gradients:
    """Gradients of this rank's rows, with axes in the order of kernels, and of what all ranks share."""
    whole, inputs = call.whole, call.inputs
    q, k, v = (inputs[name] for name in "qkv")
    xp = library(q)
    calls = call.calls(deterministic)
    dq, dk, dv = (xp.empty(x.shape, x.dtype) for x in (q, k, v))
    lse = inputs["lse"][..., 0]
    dlse = None if inputs["dlse"] is None else inputs["dlse"][..., 0]
    of_rows = (inputs["dout"], q, inputs["out"], lse, dlse)
    if call.scheme == "ulysses":
        ulysses.backward(call.comm, calls, of_rows, k, v, (dq, dk, dv))
    else:
        scheme = ring if call.scheme == "ring" else gathered
        order = _order(calls, call.scheme, scheme.jobs_of_backward(calls), q.shape[-2], q.dtype, call.scheme == "ring")
        scheme.backward(call.comm, calls, of_rows, call.own, Growing((dq,), order, whole.wide), (dk, dv))
    shared = _of_all_ranks(call, calls, of_rows)
    names = call.whole.problem.scores.captured
    options = {f"d{name}": shared.get(name) for name in ("alibi_slopes",) if name not in names}
    darrays = {name: x for name, x in shared.items() if name in names}
    return Gradients(dq, dk, dv, dsinks=shared.get("sinks "), **options, darrays=darrays)


def _order(calls: Calls, scheme: str, jobs: tuple[tuple[Job, ...], ...], rows: int, dtype: Any, adds: bool = False) -> Order:
    """In which order the jobs' results become one of a dtype."""
    parts = [job.rows for step in jobs for job in step]
    return calls.order((scheme, str(dtype), adds), parts, rows, dtype != calls.whole.wide, adds=adds)


def _of_all_ranks(call: Call, calls: Calls, of_rows: tuple[Any, ...]) -> dict[str, Any]:
    """Gradients of what is the same on all ranks, each of which has a part of the sum: added in the order of ranks."""
    views = dict(zip(call.given.names, call.given.views))
    xp, parts = library(call.inputs["q"]), {}
    for name in call.whole.wrt:
        x = views[name if name in views else f"arrays[{name!r}]"]
        if name in call.whole.problem.scores.captured:
            x = views[f"arrays[{name!r}]"]
        parts[name] = calls.sums.get(name, xp.zeros(x.shape, call.whole.wide)), x.dtype
    if call.sinks is not None:
        parts["sinks "] = _of_sinks(call.sinks, of_rows, call.whole.wide), call.sinks.dtype
    return {name: _summed(call.comm, part).astype(dtype, copy=False) for name, (part, dtype) in parts.items()}


def _of_sinks(sinks: Any, of_rows: tuple[Any, ...], wide: str) -> Any:
    """What this rank's rows give to the gradient of sinks: each has a share of a row's softmax and, without a value, a dP of 0."""
    dout, _, out, lse, dlse = of_rows
    xp = library(out)
    delta = (dout.astype(wide) * out.astype(wide)).sum(axis=-1)
    delta = delta if dlse is None else delta - dlse
    logits = sinks.reshape(-1, sinks.shape[-1], 1).astype(wide)
    found = xp.zeros(logits.shape[:-1], wide)
    for element in numpy.ndindex(lse.shape[:-2]):
        shares = xp.exp(logits - xp.where(lse[element] == -numpy.inf, numpy.inf, lse[element]))
        found -= (shares * delta[element]).sum(axis=-1)
    return found.reshape(sinks.shape)


def _summed(comm: Communicator, part: Any) -> Any:
    """The sum over ranks, in their order, on all of them."""
    if comm.size == 1:
        return part
    xp = library(part)
    part = xp.ascontiguousarray(part)
    parts = {rank: part if rank == comm.rank else xp.empty_like(part) for rank in range(comm.size)}
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.start([(rank, part) for rank in others], [(rank, parts[rank]) for rank in others]).wait()
    total = parts[0].copy()
    for rank in range(1, comm.size):
        total += parts[rank]
    return total


def _check_axes(name: str, x: Any, comm: Communicator) -> None:
    if x is None:
        return
    if x.ndim < 2 - (name in ("lse", "dlse")):
        raise ValueError(f"{name}: expected at least 2 axes, got shape {x.shape}")
    on_device = not isinstance(x, numpy.ndarray)
    if comm.size > 1 and comm.on_devices is not None and on_device != comm.on_devices:
        places = "in device memory" if comm.on_devices else "in host memory"
        raise ValueError(f"{name}: expected an array {places}, which is what comm sends, got one that is not")


def _in_order(name: str, x: Any, layout: str) -> Any:
    """A view with axes of heads, rows and dim; that of a log-sum-exp has a dim of 1."""
    if x is None:
        return None
    if name in ("lse", "dlse"):
        x = arrays.in_order(x, layout, HEADS_OF_LSE)[..., None]
        return x if x.ndim > 2 else x[None]
    x = arrays.in_order(x, layout)
    return x if x.ndim > 2 else x[None]


def _check_choices(scheme: str, order: str, memory: int | None) -> None:
    if not isinstance(scheme, str):
        raise TypeError(f"scheme: expected one of {SCHEMES}, got {shown(scheme)}")
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: expected one of {SCHEMES}, got {shown(scheme)}")
    check_order(order)
    if memory is not None and integer("memory", memory, "None or a number of bytes") < 0:
        raise ValueError(f"memory: expected None or at least 0 bytes, got {shown(memory)}")


def _check_names(options: dict[str, Any]) -> None:
    known = {field.name for field in fields(Options)}
    for name in options:
        if name not in known:
            raise TypeError(f"{name}: expected an option of attention, got one that there is not")
