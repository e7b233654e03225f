"""The public functions that compute. No logic: each hands its arguments on. `planning` has those that only decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

from .absent import answers_absent
from .backward import attention_and_vjp, operands, prepared_backward
from .gradients import Gradients
from .launch import Arguments, prepared
from .merge import merge

A = TypeVar("A")  # results are of the kind of array that q is


@overload
def attention(
    q: A, k: Any, v: Any, *, layout: str = ..., scale: float | None = ..., causal: bool | str = ...,
    window: tuple[int | None, int | None] | None = ..., softcap: float | None = ..., precision: str | None = ...,
    algorithm: str = ..., backend: str = ..., return_lse: Literal[False] = ..., out: Any = ..., lse: Any = ...,
) -> A: ...  # fmt: skip
@overload
def attention(
    q: A, k: Any, v: Any, *, layout: str = ..., scale: float | None = ..., causal: bool | str = ...,
    window: tuple[int | None, int | None] | None = ..., softcap: float | None = ..., precision: str | None = ...,
    algorithm: str = ..., backend: str = ..., return_lse: Literal[True], out: Any = ..., lse: Any = ...,
) -> tuple[A, A]: ...  # fmt: skip
@overload
def attention(
    q: A, k: Any, v: Any, *, layout: str = ..., scale: float | None = ..., causal: bool | str = ...,
    window: tuple[int | None, int | None] | None = ..., softcap: float | None = ..., precision: str | None = ...,
    algorithm: str = ..., backend: str = ..., return_lse: bool, out: Any = ..., lse: Any = ...,
) -> A | tuple[A, A]: ...  # fmt: skip
@answers_absent
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bhsd",
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    precision: str | None = None,
    algorithm: str = "auto",
    backend: str = "auto",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
) -> Any:
    """Exact attention, ``softmax(q @ k.T * scale) @ v``, in memory linear in the sequence length.

    Parameters
    ----------
    q : array, shape (..., heads, seq_q, dim)
        Queries: float16, bfloat16 (`ml_dtypes.bfloat16`), float32 or float64. CuPy, NumPy, or any array with DLPack or the CUDA
        array interface. 2-D is one head, 3-D is heads without batch. Any strides are read in place.
    k : array, shape (..., heads_kv, seq_kv, dim)
        Keys. `heads` is a multiple of `heads_kv`: each key-value head serves that many neighbouring query heads (GQA, MQA). The
        axes before heads broadcast as in `numpy.matmul`, without copies.
    v : array, shape (..., heads_kv, seq_kv, dim_v)
        Values; `dim_v` may differ from `dim`.
    layout : {'bhsd', 'bshd'}
        Order of the last axes of all arrays, results included: (..., heads, seq, dim), or (..., seq, heads, dim) as in JAX and
        FlashAttention. Nothing is copied. Shapes below are those of 'bhsd'; with 'bshd', `lse` has shape (..., seq_q, heads).
    scale : float, optional
        Factor of the scores, by default ``1 / sqrt(dim)``. May be negative or zero.
    causal : {False, True, 'bottom_right', 'top_left'}
        True means 'bottom_right': the last query sees the last key, query i the keys up to ``i + seq_kv - seq_q``. With 'top_left'
        the first query sees the first key only.
    window : (int or None, int or None), optional
        Query i sees at most `left` keys before and `right` keys behind its own place, both ends included, anchored like `causal`.
        None or -1 is unbounded.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    precision : {None, 'ieee', 'tf32'}
        For float32 on tensor cores: None and 'ieee' keep float32 accuracy by three TF32 products, 'tf32' makes do with one.
    algorithm : {'auto', 'v1', 'v2'}
        Of the kernels: 'v2', which 'auto' means, is FlashAttention-2's loop order. 'v1' is FlashAttention's: its outer loop is over
        keys, so that all results pass through device memory at each step.
    backend : {'auto', 'cuda', 'host', 'numpy'}
        'auto' is 'cuda' for device arrays and 'numpy' for arrays in host memory. 'host' executes the CUDA source on the CPU, which
        needs a C++ compiler.
    return_lse : bool
        Return the log-sum-exp of the scores as well.
    out : array, shape (..., heads, seq_q, dim_v), optional
        Where to write the result.
    lse : array, shape (..., heads, seq_q), optional
        Where to write the log-sum-exp: float32, or float64 for float64.

    Returns
    -------
    out : array, shape (..., heads, seq_q, dim_v)
        In q's dtype, memory order and kind of array. Rows of queries that see no key are 0.
    lse : array, shape (..., heads, seq_q)
        Only with ``return_lse=True``. Natural logarithm; -inf for queries that see no key.

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
    Work is queued on CuPy's current stream and not waited for. Memory beyond the results is not used, but by 'v1', and on sm_90a
    where multiprocessors share query tiles, at most 38 MB whatever the lengths. The first call with a new combination of dtype,
    head dim and alignment compiles a kernel (about a second, kept on disk); after it, calls can be captured in a CUDA graph if
    `out` is given, and where there is such memory, if a plan is given it as `workspace`. Results are bitwise reproducible.

    A query and a key that may not see each other do not influence each other, whatever they hold. A NaN or infinity in a row of
    `v`, however, reaches every query whose tile of keys contains that row, as ``0 * nan``.

    References
    ----------
    T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> cupy_flash.attention(q, k, v, causal=True).shape
    (8, 100, 64)
    """
    given = Arguments(q, k, v, out, lse)
    options = (None, layout, scale, causal, window, softcap, precision, algorithm, backend, return_lse)
    return prepared(given, options).run(given)


@answers_absent
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    layout: str = "bhsd",
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    precision: str | None = None,
    algorithm: str = "auto",
    backend: str = "auto",
    dlse: Any = None,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
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
    layout, scale, causal, window, softcap, precision, backend
        As in `attention`, and with the values given there.
    algorithm : {'auto', 'v2'}
        'v2' is FlashAttention-2's backward. There is none for 'v1', whose results it takes just as well.
    dlse : array, shape (..., heads, seq_q), optional
        Gradient with respect to `lse`, in its dtype; None is zero.
    deterministic : bool
        True adds the gradient of q in a fixed order, so that repeats are bitwise equal. Costs speed on a GPU.
    dq : array of the shape of q, optional
        Where to write the gradient of q.
    dk : array of the shape of k, optional
        Where to write the gradient of k.
    dv : array of the shape of v, optional
        Where to write the gradient of v.

    Returns
    -------
    Gradients
        The tuple ``(dq, dk, dv)``. Each has shape, dtype, memory order and kind of array of its own input. Where an input was
        broadcast along an axis, because it lacks it or has size 1 there, its gradient is summed over the axis; so it is over the
        query heads that share a key-value head. Queries that see no key have gradient 0.

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
    given = operands(dout, q, k, v, out, lse, dlse, dq, dk, dv)
    options = (layout, scale, causal, window, softcap, precision, algorithm, backend)
    return prepared_backward(given, options, deterministic, None).run(given)


@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, layout: str = ..., scale: float | None = ..., causal: bool | str = ...,
    window: tuple[int | None, int | None] | None = ..., softcap: float | None = ..., precision: str | None = ...,
    algorithm: str = ..., backend: str = ..., return_lse: Literal[False] = ..., deterministic: bool = ...,
) -> tuple[A, Callable[..., Gradients]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, layout: str = ..., scale: float | None = ..., causal: bool | str = ...,
    window: tuple[int | None, int | None] | None = ..., softcap: float | None = ..., precision: str | None = ...,
    algorithm: str = ..., backend: str = ..., return_lse: Literal[True], deterministic: bool = ...,
) -> tuple[tuple[A, A], Callable[..., Gradients]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, layout: str = ..., scale: float | None = ..., causal: bool | str = ...,
    window: tuple[int | None, int | None] | None = ..., softcap: float | None = ..., precision: str | None = ...,
    algorithm: str = ..., backend: str = ..., return_lse: bool, deterministic: bool = ...,
) -> tuple[A | tuple[A, A], Callable[..., Gradients]]: ...  # fmt: skip
@answers_absent
def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bhsd",
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    precision: str | None = None,
    algorithm: str = "auto",
    backend: str = "auto",
    return_lse: bool = False,
    deterministic: bool = False,
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention, and the function that takes a gradient of its result to those of q, k and v.

    Parameters
    ----------
    q, k, v, layout, scale, causal, window, softcap, precision, algorithm, backend, return_lse
        As in `attention`.
    deterministic : bool
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
    shared = (layout, scale, causal, window, softcap, precision)
    return attention_and_vjp(q, k, v, shared, algorithm, backend, return_lse, deterministic)


@answers_absent
def merge_states(
    out_a: A, lse_a: Any, out_b: Any, lse_b: Any, *, layout: str = "bhsd", backend: str = "auto"
) -> tuple[A, A]:
    """Attention over two sets of keys together, from the results over each of them.

    Parameters
    ----------
    out_a : array, shape (..., heads, seq_q, dim_v)
        Result over the first keys: float16, bfloat16, float32 or float64.
    lse_a : array, shape (..., heads, seq_q)
        Log-sum-exp over the first keys: float32, or float64 for float64.
    out_b : array, shape (..., heads, seq_q, dim_v)
        Result over the other keys, in the dtype of `out_a`.
    lse_b : array, shape (..., heads, seq_q)
        Log-sum-exp over the other keys.
    layout : {'bhsd', 'bshd'}
        As in `attention`.
    backend : {'auto', 'cuda', 'host', 'numpy'}
        As in `attention`.

    Returns
    -------
    out : array, shape (..., heads, seq_q, dim_v)
        In the dtype, memory order and kind of array of `out_a`.
    lse : array, shape (..., heads, seq_q)
        In the dtype of `lse_a`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `attention`.

    Notes
    -----
    A result of weight 0 is left out, whatever it holds: over no keys at all, `lse` is -inf and `out` may be anything.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> states = [cupy_flash.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 30), slice(30, None))]
    >>> out, lse = cupy_flash.merge_states(*states[0], *states[1])
    >>> bool(np.allclose(out, cupy_flash.attention(q, k, v), atol=1e-6))
    True
    """
    return merge(out_a, lse_a, out_b, lse_b, layout, backend)
