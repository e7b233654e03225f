"""What is to be computed: a frozen `Problem` made from shapes, dtypes, strides and options.

Every error that a user can cause is raised by `make_problem`, before anything is allocated, compiled or written, and
names the argument, what was expected and what came. No array is touched: `arrays.layout` describes one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import zip_longest

from ..errors import UnsupportedError
from .dropout import check_place_in_kernels
from .key_ranges import FIRST
from .layout import AXES, FLOATS, HEADS_OF_LSE, Layout, dense_layout, in_order, result_layout
from .lengths import LENGTHS, Lengths, resolved
from .mask import Mask
from .options import Options
from .scores import Scores, check_dtype, make_scores

# The arrays of a call, in the order in which it hands them on.
FORWARD_ARRAYS = ("q", "k", "v", "out", "lse", "sinks")
MAX_KERNEL_DIM = 256
MAX_NUMPY_AXES = 32  # of `numpy.broadcast`; arrays may have 64


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention computation, checked and with every default resolved.

    The layouts have their full axes, `(*batch, heads, seq, dim)`; `lse` has no `dim`, and `sinks` is `(*batch, heads, n)`. A
    missing heads axis is put in, and broadcast axes have stride 0. `seen` has the arrays of a call as the user sees them: with
    axes in the order `layout`, one of `AXES`, and where nobody gave an axis of heads without one.

    With `lengths`, the one batch axis counts sequences. What is packed has stride 0 there and as many rows as there are of all
    sequences; `len_q` and `len_kv` are the most that one can have, and `mask` is that of as many queries as keys.

    `dtype_of_results` is that of `out`, and of gradients: another one than `dtype` if they are parts of what is put together later.

    `shares_device` says that something else has to run on the device before a forward ends.

    `kernel` is the kernel file asked for, or None. `scale` and `softcap` are numbers of the float type that scores are computed in.
    """

    dtype: str
    dtype_of_results: str
    batch: tuple[int, ...]
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    dim: int
    dim_v: int
    q: Layout
    k: Layout
    v: Layout
    out: Layout
    lse: Layout | None
    sinks: Layout | None
    seen: tuple[Layout | None, ...]
    layout: str
    scale: float
    mask: Mask
    softcap: float | None
    scores: Scores
    precision: str
    algorithm: str
    kernel: str | None
    backend: str
    device: int | None
    lengths: Lengths | None = None
    shares_device: bool = False

    def __str__(self) -> str:
        of_lengths = "" if self.lengths is None else f"; {self.lengths}"
        return (
            f"{self.dtype}, batch {self.batch}, {self.heads_q} heads on {self.heads_kv}, "
            f"{self.len_q} queries on {self.len_kv} keys, dim {self.dim}, dim_v {self.dim_v}{of_lengths}"
        )

    @property
    def seen_out(self) -> Layout:
        """The result as the user sees it."""
        return self.seen[3]

    @property
    def seen_lse(self) -> Layout | None:
        """The log-sum-exp as the user sees it; None if nobody asks for it."""
        return self.seen[4]

    @property
    def given(self) -> tuple[str, ...]:
        """What messages call the arrays of a call behind those that every attention has, in order."""
        return (*(() if self.lengths is None else self.lengths.names), *self.scores.names)

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads_q // max(self.heads_kv, 1)

    @property
    def has_wider_results(self) -> bool:
        """True if results are not of the dtype of the inputs: they are parts of what is put together later."""
        return self.dtype_of_results != self.dtype

    @property
    def empty(self) -> bool:
        """True if there is no element to compute, neither of the output nor of a requested lse."""
        return 0 in self.out.shape and (self.lse is None or 0 in self.lse.shape)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products, masked pairs not counted."""
        return 2 * (self.dim + self.dim_v) * self.mask.pairs * self.heads_q * math.prod(self.batch)


def make_problem(
    q: Layout,
    k: Layout,
    v: Layout,
    options: Options,
    out: Layout | None = None,
    lse: Layout | None = None,
    sinks: Layout | None = None,
    operands: dict[str, Layout] | None = None,
    arrays: dict[str, Layout] | None = None,
) -> Problem:
    """Check the arguments of `attention` and resolve its defaults.

    Parameters
    ----------
    q, k, v : Layout
        The inputs as the user gave them.
    options : Options
    out, lse : Layout, optional
        Where results go. By default `out` gets q's memory order, and `lse`, if requested, is C-contiguous.
    sinks : Layout, optional
        Logits of each row besides those of its keys, (heads,) or (n, heads).
    operands, arrays : dict of str to Layout, optional
        What scores and masks read, see `scores.make_scores`; among the operands lengths of sequences, see `lengths`.

    Returns
    -------
    Problem

    Raises
    ------
    TypeError, ValueError
        For arguments that no implementation could accept.
    UnsupportedError
        For arguments that have a meaning but no implementation.
    """
    order = options.resolve_layout()
    _check_inputs(q, k, v, AXES[order])
    if len(q.shape) == len(k.shape) == len(v.shape) == 2:
        order, seen_axes = "bhsd", 2  # nobody gave an axis of heads, and results have none
    else:
        seen_axes = max(3, len(q.shape), len(k.shape), len(v.shape))
    backend = options.resolve_backend(q.device)
    seen, (q, k, v) = (q, k, v), (x.in_order(order) for x in (q, k, v))
    _check_sizes(q, k, v, backend, order)
    operands, arrays = operands or {}, arrays or {}
    # Of lengths the address matters to no plan.
    given_lengths = {name: replace(x, alignment=min(x.alignment, 4)) for name in LENGTHS if (x := operands.get(name))}
    lengths = mask = None
    if given_lengths:
        operands = {name: layout for name, layout in operands.items() if name not in given_lengths}
        lengths, (q, k, v) = resolved(q, k, v, given_lengths)
        mask, moves = options.resolve_moving_mask(q.shape[-2], k.shape[-2])
        lengths = replace(lengths, moves=moves)
        seen_axes = 3 if lengths.packed_q else 4
        arrays = arrays | ({FIRST: given_lengths["cu_seqlens_q"]} if FIRST in arrays else {})
    heads_q, len_q, dim = _matrices(q)
    heads_kv, len_kv, _ = _matrices(k)
    dim_v = v.shape[-1]
    batch = _batch(q, k, v)
    if backend == "numpy" and len(batch) + 3 > MAX_NUMPY_AXES:
        name, _ = max((("q", q), ("k", k), ("v", v)), key=lambda given: len(given[1].shape))
        raise UnsupportedError(
            f"{name}: expected at most {MAX_NUMPY_AXES} axes on backend 'numpy', which broadcasts no more, got {len(batch) + 3}"
        )

    out_shape = (*batch, heads_q, len_q, dim_v)
    full_q = q.broadcast_to((*batch, heads_q, len_q, dim))
    # As the user sees them, whose order of axes decides where memory order leaves a choice.
    dtype_of_results = options.resolve_dtype_of_results(q.dtype)
    seen_out = result_layout(full_q.in_order(order), in_order(out_shape, order), dtype_of_results).last_axes(seen_axes)
    if out is not None:
        check_result("out", out, seen_out.shape, dtype_of_results, q.device)
        seen_out = out

    if options.adds_results:
        raise UnsupportedError("adds_results: expected False for a result, which is no sum, got True")
    return_lse = options.resolve_return_lse()
    lse_dtype = lse_dtype_of(q.dtype)
    if lse is not None:
        check_result("lse", lse, seen_out.shape[:-1], lse_dtype, q.device)
    elif return_lse:
        full_lse = dense_layout(out_shape[:-1], reversed(range(len(out_shape) - 1)), lse_dtype, q.device)
        lse = full_lse.in_order(order, HEADS_OF_LSE).last_axes(seen_axes - 1)

    dropout = options.resolve_dropout()
    if dropout and "seed" not in operands:
        raise ValueError("seed: expected an integer, or a pair of seed and offset, with dropout, got None")
    if options.dropout is None and "seed" in operands:
        raise ValueError("seed: expected None without dropout, got one; with dropout=0.0, which drops nothing, it may be given")
    place = options.place if dropout else None
    if place is not None and backend != "numpy":
        check_place_in_kernels(place, batch, heads_q)
    scores = make_scores(
        score=options.score,
        mask=options.mask,
        operands=operands,
        arrays=arrays,
        dropout=dropout,
        dtype=q.dtype,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        len_q=len_q,
        len_kv=len_kv,
        device=q.device,
        lengths=lengths,
        place=place,
    )
    if options.softcap is None:
        softcap, scores = scores.with_softcap_apart()
        options = replace(options, softcap=softcap)
    full_sinks = None if sinks is None else _of_heads(sinks, heads_q, q)
    return Problem(
        dtype=q.dtype,
        dtype_of_results=dtype_of_results,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        len_q=len_q,
        len_kv=len_kv,
        dim=dim,
        dim_v=dim_v,
        q=full_q,
        k=k.broadcast_to((*batch, heads_kv, len_kv, dim)),
        v=v.broadcast_to((*batch, heads_kv, len_kv, dim_v)),
        out=seen_out.in_order(order).broadcast_to(out_shape),
        lse=lse and lse.in_order(order, HEADS_OF_LSE).broadcast_to(out_shape[:-1]),
        sinks=full_sinks and full_sinks.broadcast_to((*batch, *full_sinks.shape)),
        seen=(*seen, seen_out, lse, sinks, *given_lengths.values(), *operands.values(), *arrays.values()),
        layout=order,
        scale=options.resolve_scale(dim, q.dtype),
        mask=mask or options.resolve_mask(len_q, len_kv),
        softcap=options.resolve_softcap(q.dtype),
        scores=scores,
        precision=options.resolve_precision(q.dtype),
        kernel=options.resolve_kernel(backend),
        shares_device=options.resolve_shares_device(),
        algorithm=options.resolve_algorithm(),
        backend=backend,
        device=q.device,
        lengths=lengths,
    )


def _of_heads(sinks: Layout, heads: int, q: Layout) -> Layout:
    """Sinks as (heads, n), checked."""
    check_dtype("sinks", sinks, tuple(dict.fromkeys((q.dtype, lse_dtype_of(q.dtype)))))
    if len(sinks.shape) not in (1, 2) or sinks.shape[-1] != heads:
        raise ValueError(f"sinks: expected shape ({heads},) or (n, {heads}), one for each head of q, got {sinks.shape}")
    check_place("sinks", sinks, q.device)
    numbers, steps = (1, *sinks.shape)[-2:], (0, *sinks.strides)[-2:]
    return replace(sinks, shape=numbers[::-1], strides=steps[::-1])


def lse_dtype_of(dtype: str) -> str:
    """The dtype of the log-sum-exp of inputs of a dtype."""
    return "float64" if dtype == "float64" else "float32"


def check_operand(
    name: str, layout: Layout, shape: tuple[int, ...], dtype: str, device: int | None, like: str = "q"
) -> None:
    """Refuse an array that is not of this shape and dtype in this memory."""
    if layout.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {layout.dtype}")
    if layout.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {layout.shape}")
    check_place(name, layout, device, like)


def check_result(name: str, layout: Layout, shape: tuple[int, ...], dtype: str, device: int | None) -> None:
    """The same for an array that is written: two of its indices must not reach one element."""
    check_operand(name, layout, shape, dtype, device)
    if layout.overlaps_itself:
        raise ValueError(f"{name}: expected elements apart from each other, got strides {layout.strides} for {shape}")


def check_place(name: str, layout: Layout, device: int | None, like: str = "q") -> None:
    """Refuse an array in other memory than that of the argument `like`, or at an odd address."""
    if layout.device != device:
        raise ValueError(f"{name}: expected an array {_where(device)} (like {like}), got one {_where(layout.device)}")
    if layout.alignment < layout.itemsize:
        raise ValueError(
            f"{name}: expected an address divisible by its item size {layout.itemsize}, "
            f"got one divisible by {layout.alignment} only"
        )


def _matrices(layout: Layout) -> tuple[int, int, int]:
    """Heads, seq and dim; a missing heads axis is one head."""
    heads, seq, dim = (1, *layout.shape)[-3:]
    return heads, seq, dim


def _batch(q: Layout, k: Layout, v: Layout) -> tuple[int, ...]:
    """The axes before heads, broadcast together."""
    batch = q.shape[:-3]
    for name, layout in (("k", k), ("v", v)):
        axes = []
        for size, other in zip_longest(reversed(batch), reversed(layout.shape[:-3]), fillvalue=1):
            if size != other and 1 not in (size, other):
                raise ValueError(f"{name}: expected batch axes that broadcast with {batch}, got {layout.shape[:-3]}")
            axes.append(other if size == 1 else size)
        batch = tuple(reversed(axes))
    return batch


def _check_inputs(q: Layout, k: Layout, v: Layout, axes: str) -> None:
    for name, layout in (("q", q), ("k", k), ("v", v)):
        if layout.dtype not in FLOATS:
            raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {layout.dtype}")
        if layout.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype} (that of q), got {layout.dtype}")
        if len(layout.shape) < 2:
            raise ValueError(f"{name}: expected at least 2 axes, {axes}, got shape {layout.shape}")
        check_place(name, layout, q.device)


def _where(device: int | None) -> str:
    return "in host memory" if device is None else f"on CUDA device {device}"


def _check_sizes(q: Layout, k: Layout, v: Layout, backend: str, order: str) -> None:
    heads_q, _, dim = _matrices(q)
    heads_kv, len_kv, dim_k = _matrices(k)
    heads_v, len_v, dim_v = _matrices(v)
    if dim == 0:
        raise ValueError("q: expected head dim of at least 1, got 0")
    if dim_k != dim:
        raise ValueError(f"k: expected head dim {dim} (that of q), got {dim_k}")
    if heads_v != heads_kv:
        raise ValueError(f"v: expected {heads_kv} heads (those of k), got {heads_v}")
    if len_v != len_kv:
        raise ValueError(f"v: expected {len_kv} keys (those of k), got {len_v}")
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        hint = "" if order == "bshd" else "; arrays (..., seq, heads, dim) need layout='bshd'"
        raise ValueError(f"q: expected a multiple of {heads_kv} heads (those of k), got {heads_q}{hint}")
    if backend == "numpy":
        return
    if q.dtype == "float64":
        raise UnsupportedError(
            f"q: expected float16, bfloat16 or float32 on backend {backend!r}, got float64, "
            "which only backend 'numpy' computes, from arrays in host memory"
        )
    for name, size in (("q", dim), ("v", dim_v)):
        if not 1 <= size <= MAX_KERNEL_DIM:
            raise UnsupportedError(
                f"{name}: expected head dim of 1 to {MAX_KERNEL_DIM} on backend {backend!r}, got {size}"
            )
