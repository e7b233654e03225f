"""Which gradients are to be computed: a frozen `BackwardProblem` made from shapes, dtypes, strides and options.

As in `forward`, every error that a user can cause is raised here, before anything is allocated, compiled or written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from .forward import Problem, check_operand, check_result, lse_dtype_of, make_problem
from .layout import HEADS_OF_LSE, Layout, dense_layout, result_layout
from .lengths import check_gradients
from .options import Options, check_flag
from .scores import check_wrt

BACKWARD_ARRAYS = ("dout", "q", "k", "v", "out", "lse", "dlse", "sinks", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True, slots=True)
class BackwardProblem:
    """The gradients of one attention computation, checked and with every default resolved.

    `forward` is the attention that is differentiated; its `out` and `lse` are the arrays that it left. `dout` and `dlse` have their
    full axes as well. `dq`, `dk` and `dv` have the axes of their inputs, in the order of kernels: a gradient is summed over the
    batch axes along which its input was broadcast. `seen` has the arrays of a call, in order, as the user sees them. `wrt` are the
    names of what else gradients are asked for. With `adds`, gradients are added to what there is. The last batch axis may be one of
    `parts` of the queries, which share their keys.
    """

    forward: Problem
    dout: Layout
    dlse: Layout | None
    dq: Layout
    dk: Layout
    dv: Layout
    dsinks: Layout | None
    seen: tuple[Layout | None, ...]
    deterministic: bool
    kernel: str | None
    wrt: tuple[str, ...] = ()
    adds: bool = False
    parts: int = 1

    @property
    def layouts(self) -> dict[str, Layout | None]:
        """The arrays of a call with their full axes, in order. A stride of 0 along a batch axis of a gradient means: summed."""
        p = self.forward
        given = (self.dout, p.q, p.k, p.v, p.out, p.lse, self.dlse, p.sinks)
        results = (x.broadcast_to((*like.shape[:-1], x.shape[-1])) for x, like in ((self.dq, p.q), (self.dk, p.k), (self.dv, p.v)))
        return dict(zip(BACKWARD_ARRAYS, (*given, *results)))  # but `dsinks`, which has no axes of a batch

    def layout_of(self, name: str) -> Layout | None:
        """An array of a call as the user sees it, by its name in messages."""
        return dict(zip((*BACKWARD_ARRAYS, *self.forward.given), self.seen))[name]

    @property
    def sums_keys(self) -> bool:
        """True if the gradient of keys or of values is a sum over a batch axis."""
        lengths, batch = self.forward.lengths, math.prod(self.forward.batch)
        return not (lengths and lengths.packed_kv) and any(math.prod(x.shape[:-3]) != batch for x in (self.dk, self.dv))

    @property
    def sums_queries(self) -> bool:
        """True if the gradient of queries is a sum over a batch axis."""
        lengths = self.forward.lengths
        return not (lengths and lengths.packed_q) and math.prod(self.dq.shape[:-3]) != math.prod(self.forward.batch)

    @property
    def zero(self) -> bool:
        """True if there is no query head of a batch element that a gradient could come from."""
        return 0 in self.forward.batch or self.forward.heads_q == 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the five matrix products, masked pairs not counted."""
        p = self.forward
        return p.flops // (p.dim + p.dim_v) * (3 * p.dim + 2 * p.dim_v)


def make_backward_problem(
    dout: Layout,
    q: Layout,
    k: Layout,
    v: Layout,
    out: Layout,
    lse: Layout,
    options: Options,
    *,
    dlse: Layout | None = None,
    sinks: Layout | None = None,
    dq: Layout | None = None,
    dk: Layout | None = None,
    dv: Layout | None = None,
    dsinks: Layout | None = None,
    deterministic: bool = False,
    operands: dict[str, Layout] | None = None,
    arrays: dict[str, Layout] | None = None,
    wrt: str | tuple[str, ...] = (),
) -> BackwardProblem:
    """Check the arguments of `attention_backward` and resolve its defaults.

    Parameters
    ----------
    dout, q, k, v, out, lse : Layout
        The inputs as the user gave them.
    options : Options
    dlse, sinks : Layout, optional
    dq, dk, dv, dsinks : Layout, optional
        Where results go. By default each gets the memory order of its input, and `dsinks` is C-contiguous, as it has to be.
    deterministic : bool
    operands, arrays : dict of str to Layout, optional
        What scores and masks read, see `scores.make_scores`.
    wrt : str or tuple of str
        Names among them of what gradients are asked for.

    Returns
    -------
    BackwardProblem

    Raises
    ------
    TypeError, ValueError
        For arguments that no implementation could accept.
    UnsupportedError
        For arguments that have a meaning but no implementation.
    """
    adds, of_forward = check_flag("adds_results", options.adds_results), replace(options, kernel=None, adds_results=False)
    forward = make_problem(q, k, v, of_forward, sinks=sinks, operands=operands, arrays=arrays)
    if forward.algorithm == "v1":
        raise UnsupportedError("algorithm: expected 'auto' or 'v2' for a backward, got 'v1', which is a forward only")
    wrt = check_wrt(wrt, forward.scores)
    if forward.lengths is not None:
        check_gradients(forward.lengths)
    lse_dtype, seen_shape = lse_dtype_of(q.dtype), forward.seen_out.shape
    check_operand("out", out, seen_shape, q.dtype, q.device)
    check_operand("lse", lse, seen_shape[:-1], lse_dtype, q.device)
    check_operand("dout", dout, seen_shape, q.dtype, q.device)
    if dlse is not None:
        check_operand("dlse", dlse, seen_shape[:-1], lse_dtype, q.device)

    gradients = {}
    for name, source, result in (("dq", q, dq), ("dk", k, dk), ("dv", v, dv)):
        if result is not None:
            check_result(name, result, source.shape, forward.dtype_of_results, q.device)
        gradients[name] = result or result_layout(source, source.shape, forward.dtype_of_results)

    if adds and not (forward.has_wider_results and sinks is None and None not in (dq, dk, dv)):
        raise UnsupportedError("adds_results: expected gradients in float32 of inputs of 16 bits without sinks, all of them given")

    if sinks is not None:
        dense = dense_layout(sinks.shape, reversed(range(len(sinks.shape))), sinks.dtype, sinks.device)
        if dsinks is not None:
            check_result("dsinks", dsinks, sinks.shape, sinks.dtype, q.device)
            if dsinks.strides != dense.strides and 0 not in dsinks.shape:
                raise ValueError(f"dsinks: expected strides {dense.strides}, got {dsinks.strides}")
        gradients["dsinks"] = dsinks or dense
    elif dsinks is not None:
        raise ValueError("dsinks: expected None without sinks, got an array")
    order, shape = forward.layout, forward.out.shape
    full_out, full_dout = (x.in_order(order).broadcast_to(shape) for x in (out, dout))
    full_lse, full_dlse = (x and x.in_order(order, HEADS_OF_LSE).broadcast_to(shape[:-1]) for x in (lse, dlse))
    return BackwardProblem(
        forward=replace(forward, out=full_out, lse=full_lse, seen=(*forward.seen[:3], out, lse, sinks)),
        dout=full_dout,
        dlse=full_dlse,
        **{name: gradients[name].in_order(order) for name in ("dq", "dk", "dv")},
        dsinks=gradients.get("dsinks"),
        seen=(
            *(dout, q, k, v, out, lse, dlse, sinks),
            *(gradients.get(name) for name in BACKWARD_ARRAYS[-4:]),
            *(operands or {}).values(),
            *(arrays or {}).values(),
        ),
        deterministic=check_flag("deterministic", deterministic),
        kernel=options.resolve_backward_kernel(forward.backend),
        wrt=wrt,
        adds=adds,
    )


class _OfInputs(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


class Gradients(_OfInputs):
    """The gradients with respect to `q`, `k` and `v`, and as attributes those of what else there was.

    Each has shape, dtype and memory order of its input, and is summed over axes along which the input was broadcast.

    Attributes
    ----------
    dq, dk, dv : array
        Which are the elements of the tuple.
    dsinks, dbias, dalibi_slopes : array or None
        None without `sinks`, `bias` and `alibi_slopes`.
    darrays : dict
        Those of the floating-point arrays that the score reads, by name.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    >>> out, vjp = cupy_flash.attention_vjp(q, k, v)
    >>> grads = vjp(np.ones_like(out))
    >>> grads._fields, grads.dk.shape
    (('dq', 'dk', 'dv'), (2, 5, 4))
    """

    dsinks: Any
    dbias: Any
    dalibi_slopes: Any
    darrays: dict[str, Any]

    def __new__(
        cls,
        dq: Any,
        dk: Any,
        dv: Any,
        *,
        dsinks: Any = None,
        dbias: Any = None,
        dalibi_slopes: Any = None,
        darrays: dict[str, Any] | None = None,
    ) -> Gradients:
        self = super().__new__(cls, dq, dk, dv)
        self.dsinks, self.dbias, self.dalibi_slopes = dsinks, dbias, dalibi_slopes
        self.darrays = {} if darrays is None else darrays
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Gradients:
        return cls(*iterable)

    def _replace(self, **changed: Any) -> Gradients:
        # That of a tuple knows its elements only, and would leave the attributes behind.
        attributes = {name: changed.pop(name, value) for name, value in vars(self).items()}
        return type(self)(*super()._replace(**changed), **attributes)
