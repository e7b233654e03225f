"""The public functions of its gradients: two that compute, and `plan_attention_backward`, which only decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from ..call.captured import captured, taken_lengths
from .absent import answers_absent
from .forward import A
from .signature import takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..call.backward import BackwardPlan
    from ..problem.backward import Gradients
    from ..problem.options import CommonOptions


@answers_absent
@takes_options
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    score: Any = None,
    mask: Any = None,
    arrays: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seed: Any = None,
    wrt: str | tuple[str, ...] = (),
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    **options: Unpack[CommonOptions],
) -> Gradients:
    """The gradients of `attention` with respect to q, k and v, in memory linear in the sequence length.

    Parameters
    ----------
    dout : array, shape (..., heads, seq_q, dim_v)
        Gradient with respect to `out`, in the dtype of q.
    q : array, shape (..., heads, seq_q, dim)
        Queries, as they were given to `attention`.
    k : array, shape (..., heads_kv, seq_kv, dim)
        Keys, likewise.
    v : array, shape (..., heads_kv, seq_kv, dim_v)
        Values, likewise.
    out : array, shape (..., heads, seq_q, dim_v)
        What `attention` returned.
    lse : array, shape (..., heads, seq_q)
        What `attention` returned with ``return_lse=True``: float32, or float64 for float64.
    dlse : array, shape (..., heads, seq_q), optional
        Gradient with respect to `lse`, in its dtype; None is zero.
    score, mask, arrays, bias, alibi_slopes, sinks, seed
        As they were given to `attention`.
    wrt : str or tuple of str
        Names of what else gradients are asked for: 'bias', 'alibi_slopes', or arrays of floats that `score` reads. That of a Python
        float is a float64 array of shape (), where the others are.
    deterministic : bool
        True adds the gradient of q in a fixed order, so that repeats are bitwise equal, and so are what `wrt` names. Costs speed on
        a GPU.
    dq : array of the shape of q, optional
        Where to write the gradient of q.
    dk : array of the shape of k, optional
        Where to write the gradient of k.
    dv : array of the shape of v, optional
        Where to write the gradient of v.
    dsinks : array of the shape of sinks, optional
        Where to write the gradient of sinks, C-contiguous.
    **options
        As in `attention`, and with the values given there. But `algorithm` is 'auto' or 'v2', FlashAttention-2's backward; there is
        none for 'v1', whose results it takes just as well. There are no gradients of keys in `pages`, or by `cache_batch_idx`.

    Returns
    -------
    Gradients
        The tuple ``(dq, dk, dv)``, with others as attributes: `dsinks`, and what `wrt` names, as `dbias`, `dalibi_slopes` and
        ``darrays[name]``. Each has shape, dtype and kind of array of its own input, those of the tuple its memory order as well.
        Where an input was broadcast along an axis, because it lacks it or has size 1 there, its gradient is summed over it; so it
        is over the query heads that share a key-value head. Queries that see no key have gradient 0.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it, what was expected and what came. Nothing has been written then.
    UnsupportedError
        If an argument has a meaning that is not implemented for this device.
    CompileError
        If the kernel cannot be compiled; with the compiler's log.

    Notes
    -----
    Work is queued on CuPy's current stream and not waited for. Scores are computed again from q, k and lse. The kernels use device
    memory beyond the results, mainly a float32 gradient of q; `plan_attention_backward` says how much, and its plan can be given
    that memory.

    References
    ----------
    T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 8, 100, 64), dtype=np.float32)
    >>> out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cupy_flash.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> dq.shape
    (8, 100, 64)
    """
    from ..call.backward import operands, prepared_backward  # late: who infers needs no gradients

    lengths = taken_lengths(options)
    others = captured(
        score=score, mask=mask, arrays=arrays, bias=bias, alibi_slopes=alibi_slopes, seed=seed, lengths=lengths
    )
    given = operands(dout, q, k, v, out, lse, dlse, sinks, dq, dk, dv, dsinks, others=others)
    return prepared_backward(given, {**options, "wrt": wrt, "deterministic": deterministic}).run(given)


@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, score: Any = ..., mask: Any = ..., arrays: Any = ..., bias: Any = ..., alibi_slopes: Any = ...,
    sinks: Any = ..., seed: Any = ..., wrt: str | tuple[str, ...] = ...,
    return_lse: Literal[False] = ..., deterministic: bool = ...,
    **options: Unpack[CommonOptions],
) -> tuple[A, Callable[..., Gradients]]: ...  # fmt: skip


@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, score: Any = ..., mask: Any = ..., arrays: Any = ..., bias: Any = ..., alibi_slopes: Any = ...,
    sinks: Any = ..., seed: Any = ..., wrt: str | tuple[str, ...] = ...,
    return_lse: Literal[True], deterministic: bool = ...,
    **options: Unpack[CommonOptions],
) -> tuple[tuple[A, A], Callable[..., Gradients]]: ...  # fmt: skip


@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, score: Any = ..., mask: Any = ..., arrays: Any = ..., bias: Any = ..., alibi_slopes: Any = ...,
    sinks: Any = ..., seed: Any = ..., wrt: str | tuple[str, ...] = ...,
    return_lse: bool, deterministic: bool = ...,
    **options: Unpack[CommonOptions],
) -> tuple[A | tuple[A, A], Callable[..., Gradients]]: ...  # fmt: skip


@answers_absent
@takes_options
def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Any = None,
    mask: Any = None,
    arrays: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seed: Any = None,
    wrt: str | tuple[str, ...] = (),
    return_lse: bool = False,
    deterministic: bool = False,
    **options: Unpack[CommonOptions],
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention, and the function that takes a gradient of its result to those of q, k and v.

    Parameters
    ----------
    q, k, v, score, mask, arrays, bias, alibi_slopes, sinks, seed, return_lse, **options
        As in `attention`.
    wrt, deterministic
        As in `attention_backward`.

    Returns
    -------
    result : array or (array, array)
        What `attention` returns: `out`, or ``(out, lse)`` with ``return_lse=True``.
    vjp : callable
        ``vjp(dout)`` or ``vjp(dout, dlse)`` returns `Gradients`. It holds the inputs and results, which must not change before
        its last call.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `attention` and, when `vjp` is called, `attention_backward`.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> out, vjp = cupy_flash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(np.ones_like(out))
    >>> bool(np.allclose(dv.sum(axis=1), 100, rtol=1e-4))  # the weights of each of the 100 queries add up to 1
    True
    """
    from ..call.backward import attention_and_vjp  # late, likewise

    lengths = taken_lengths(options)
    others = captured(
        score=score, mask=mask, arrays=arrays, bias=bias, alibi_slopes=alibi_slopes, seed=seed, lengths=lengths
    )
    return attention_and_vjp(q, k, v, sinks, others, options, return_lse, {"deterministic": deterministic, "wrt": wrt})


@answers_absent
@takes_options
def plan_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    score: Any = None,
    mask: Any = None,
    arrays: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seed: Any = None,
    wrt: str | tuple[str, ...] = (),
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    arch: str | None = None,
    kernel: str | None = None,
    **options: Unpack[CommonOptions],
) -> BackwardPlan:
    """Decide how `attention_backward` would compute, without computing.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse, score, mask, arrays, bias, alibi_slopes, sinks, seed, wrt, deterministic, dq, dk, dv, dsinks,
    **options
        As in `attention_backward`. Only the layouts of the arrays matter.
    arch : str, optional
        As in `plan_attention`.
    kernel : {None, 'bwd_v2', 'bwd_hopper', 'bwd_hopper_wide', 'bwd_hopper_mla', 'bwd_hopper_parts'}
        Kernel file to compute with, such as to compare two; None leaves the choice to the planner. 'bwd_v2' is for everything, the
        others are for sm_90a: 'bwd_hopper' and 'bwd_hopper_wide' for 16-bit dtypes and arrays whose strides are multiples of 16
        bytes, the former for head dims of at most 128; 'bwd_hopper_mla' likewise for those of 129 to 192 and values of at most
        128; 'bwd_hopper_parts' for float32 and head dims of at most 128.

    Returns
    -------
    BackwardPlan
        Prints itself, knows its `workspace_bytes`, and computes when called as
        ``plan(dout, q, k, v, out, lse, dlse=..., sinks=..., dq=..., dk=..., dv=..., workspace=...)`` with arrays of the same
        layouts.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention_backward`; also if the kernel asked for cannot compute this.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> x, lse = np.ones((4, 256, 64), np.float16), np.ones((4, 256), np.float32)
    >>> plan = cupy_flash.plan_attention_backward(x, x, x, x, x, lse, backend="host")
    >>> plan.workspace.names
    ('stats', 'dq_accum')
    """
    from ..call.backward import operands, prepared_backward  # late, likewise

    lengths = taken_lengths(options)
    others = captured(
        score=score, mask=mask, arrays=arrays, bias=bias, alibi_slopes=alibi_slopes, seed=seed, lengths=lengths
    )
    given = operands(dout, q, k, v, out, lse, dlse, sinks, dq, dk, dv, dsinks, others=others)
    return prepared_backward(given, {**options, "wrt": wrt, "deterministic": deterministic, "arch": arch, "kernel": kernel})
