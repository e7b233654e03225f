"""The contenders of `bench`: this project's kernels, the textbook formula in CuPy, and what PyTorch and FlashAttention-4 have.

All of them get the same numbers. PyTorch's tensors share the memory of CuPy's arrays; FlashAttention-4 gets them in its own
order of axes. Libraries are imported when a contender of theirs is prepared.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy

from ..api.backward import plan_attention_backward
from ..api.forward import attention, plan_attention
from ..call.forward import AttentionPlan
from ..plan.kernel import KernelPlan
from ..problem.options import BACKWARD_KERNELS, FORWARD_KERNELS
from .bench import Array, Contender, Failure, Run
from .cells import DIRECTIONS, Cell

ALGORITHMS = ("v1", "v2")
KERNELS = {  # of v2, and the direction of each
    **{kernel: "forward" for kernel, algorithm in FORWARD_KERNELS.items() if algorithm == "v2"},
    **dict.fromkeys(BACKWARD_KERNELS, "backward"),
}
SDPA = {
    "torch-cudnn": "CUDNN_ATTENTION",
    "torch-flash2": "FLASH_ATTENTION",
    "torch-efficient": "EFFICIENT_ATTENTION",
}
PEERS = ("naive", *SDPA, "fa4")
NEEDS = dict.fromkeys(SDPA, "torch") | {"fa4": "flash_attn.cute"}  # modules


def contenders(
    algorithms: Iterable[str] = ALGORITHMS,
    peers: Iterable[str] = PEERS,
    deterministic: bool = False,
    kernels: Sequence[str] = (),
) -> tuple[tuple[Contender, ...], tuple[Failure, ...]]:
    """Those that there are, and why the others are not.

    Parameters
    ----------
    algorithms : iterable of str
        Of this project. The backward has only 'v2'.
    peers : iterable of str
        Out of `PEERS`.
    deterministic : bool
        Of this project's backward; peers compute theirs as they do by default.
    kernels : sequence of str
        Out of `KERNELS`: what 'v2' computes the direction of each with, in place of the planner's choice. Several of one direction
        are contenders of their own names, and 'v2' is left with the other.

    Returns
    -------
    there : tuple of Contender
    missing : tuple of Failure
        Peers whose library is not installed.
    """
    there = [contender for name in algorithms for contender in _ours(name, kernels, deterministic)]
    missing = []
    for name in peers:
        module = NEEDS.get(name)
        if module and not is_installed(module):
            missing.append(Failure(name, f"there is no module {module}"))
        else:
            prepare = {"naive": _naive, "fa4": fa4_run}.get(name) or partial(_sdpa, SDPA[name])
            there.append(Contender(name, prepare))
    return tuple(there), tuple(missing)


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that it would be in
        return False


def _ours(algorithm: str, kernels: Sequence[str], deterministic: bool) -> list[Contender]:
    if algorithm == "v1":
        return [Contender("v1", partial(_own, "v1", {}, deterministic), True, ("forward",))]
    asked = {direction: [kernel for kernel in kernels if KERNELS[kernel] == direction] for direction in DIRECTIONS}
    there = [
        Contender(kernel, partial(_own, "v2", {direction: kernel}, deterministic), True, (direction,))
        for direction, several in asked.items()
        for kernel in several
        if len(several) > 1
    ]
    left = {direction: next(iter(few), None) for direction, few in asked.items() if len(few) < 2}
    return there + [Contender("v2", partial(_own, "v2", left, deterministic), True, tuple(left))] * bool(left)


def _own(algorithm: str, kernels: dict[str, str | None], deterministic: bool, cell: Cell, inputs: tuple[Array, ...]) -> Run:
    """This project's kernel of a cell's direction: the one asked for, or the planner's choice."""
    q, k, v, *dout = inputs
    kernel = kernels.get(cell.direction)
    if not dout:
        out = unwritten(v)
        plan = plan_attention(q, k, v, causal=cell.causal, algorithm=algorithm, out=out, kernel=kernel)
        return _forward_run(plan, inputs, out)
    arguments = (*dout, q, k, v, *attention(q, k, v, causal=cell.causal, algorithm=algorithm, return_lse=True))
    results = dict(zip(("dq", "dk", "dv"), map(unwritten, (q, k, v))))
    options = {"causal": cell.causal, "algorithm": algorithm, "deterministic": deterministic, "kernel": kernel}
    plan = plan_attention_backward(*arguments, **options, **results)
    return Run(partial(plan, *arguments, workspace=workspace_of(plan), **results), tuple)


def planned_run(kernel: KernelPlan, cell: Cell, inputs: tuple[Array, ...]) -> Run:
    """The forward of a cell by the very plan given, such as one that no table has.

    Parameters
    ----------
    kernel : KernelPlan
        For the device of the inputs.
    cell : Cell
    inputs : tuple of array
        q, k and v.
    """
    out = unwritten(inputs[2])
    problem = plan_attention(*inputs, causal=cell.causal, out=out, kernel=kernel.file).problem
    return _forward_run(AttentionPlan(problem, kernel, False), inputs, out)


def _forward_run(plan: AttentionPlan, inputs: tuple[Array, ...], out: Array) -> Run:
    return Run(partial(plan, *inputs, out=out, workspace=workspace_of(plan)), lambda out: (out,))


def unwritten(like: Array) -> Array:
    """A new array full of NaN, so that a kernel that writes nothing is not judged by what an earlier one left behind."""
    import cupy

    array = cupy.empty_like(like)
    array.data.memset(0xFF, array.nbytes)
    return array


def workspace_of(plan: Any) -> Array | None:
    import cupy

    return cupy.empty(plan.workspace_bytes, numpy.uint8) if plan.workspace_bytes else None


def _naive(cell: Cell, inputs: tuple[Array, ...]) -> Run:
    """The textbook formula in float32, in which CuPy multiplies stacks of matrices whatever their dtype.

    The backward has the probabilities of its forward, as any library has that differentiates the formula.
    """
    import cupy

    arrays = 3 if cell.direction == "backward" else 1  # of scores at a time: P, dP and their product
    needed = arrays * 4 * cell.batch * cell.heads * cell.seq**2
    free = cupy.cuda.runtime.memGetInfo()[0]
    if needed > free // 2:
        raise MemoryError(f"its scores take {needed / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB that are free")
    q, k, v, *dout = inputs
    scale = cell.dim**-0.5
    # Added to scores: 0 where a query sees a key and -inf where it does not.
    hidden = cupy.triu(cupy.full((cell.seq, cell.seq), -numpy.inf, numpy.float32), 1) if cell.causal else None

    def probabilities(q: Array, k: Array) -> Array:
        s = q @ k.swapaxes(-1, -2)
        s *= scale
        if hidden is not None:
            s += hidden
        s -= s.max(axis=-1, keepdims=True)
        cupy.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        return s

    def wide(*arrays: Array) -> list[Array]:
        return [x.astype(numpy.float32) for x in arrays]

    def forward() -> Array:
        wide_q, wide_k, wide_v = wide(q, k, v)
        return (probabilities(wide_q, wide_k) @ wide_v).astype(q.dtype)

    if not dout:
        return Run(forward, lambda out: (out,))
    p = probabilities(*wide(q, k))

    def backward() -> tuple[Array, ...]:
        wide_dout, wide_q, wide_k, wide_v = wide(*dout, q, k, v)
        ds = wide_dout @ wide_v.swapaxes(-1, -2)
        ds -= (p * ds).sum(axis=-1, keepdims=True)
        ds *= p
        ds *= scale
        # From the left, because CuPy copies a transposed factor, which here is the small one.
        dv = (wide_dout.swapaxes(-1, -2) @ p).swapaxes(-1, -2)
        dk = (wide_q.swapaxes(-1, -2) @ ds).swapaxes(-1, -2)
        return tuple(x.astype(q.dtype) for x in (ds @ wide_k, dk, dv))

    return Run(backward, tuple)


def _sdpa(backend: str, cell: Cell, inputs: tuple[Array, ...]) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=cell.causal)

    return torch_run(forward, inputs)


def fa4_run(cell: Cell, inputs: tuple[Array, ...], **options: Any) -> Run:
    """FlashAttention-4, with options of its own."""
    from flash_attn.cute.interface import flash_attn_func

    def forward(q: Any, k: Any, v: Any) -> Any:
        result = flash_attn_func(q, k, v, causal=cell.causal, **options)
        return result[0] if isinstance(result, tuple) else result  # some versions return the log-sum-exp as well

    return torch_run(forward, inputs, lambda x: x.transpose(1, 2))


def torch_run(
    forward: Callable[..., Any], inputs: tuple[Array, ...], axes: Callable[[Any], Any] = lambda x: x, more: tuple[Any, ...] = ()
) -> Run:
    """A function of q, k and v that PyTorch differentiates.

    Parameters
    ----------
    forward : callable
    inputs : tuple of array
        q, k and v, and for the backward dout.
    axes : callable
        From (batch, heads, seq, dim) to the axes of the function, and back.
    more : tuple of torch.Tensor
        Of which the function is as well, and the backward has gradients, which are not among the arrays of the run.
    """
    import cupy
    import torch

    def arrays(tensors: tuple[Any, ...]) -> tuple[Array, ...]:
        return tuple(cupy.from_dlpack(axes(x.detach())) for x in tensors[:3])

    q, k, v, *dout = (axes(torch.from_dlpack(x)).contiguous() for x in inputs)
    if not dout:

        def launch() -> tuple[Any, ...]:
            with torch.no_grad():
                return (forward(q, k, v, *more),)

        return Run(launch, arrays, "torch")
    leaves = [x.requires_grad_() for x in (q, k, v, *more)]
    out = forward(*leaves)
    dout = torch.empty_like(out).copy_(*dout)  # laid out like the result, as the gradient of a following layer would be
    return Run(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), arrays, "torch", differentiates=True)
