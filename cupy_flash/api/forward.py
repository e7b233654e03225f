"""The public functions of attention: `attention` computes, `plan_attention` only decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ..call.captured import captured, taken_lengths
from ..call.forward import AttentionPlan, ForwardOperands, prepared
from .absent import answers_absent
from .signature import takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.options import CommonOptions

A = TypeVar("A")  # results are of the kind of array that q is


@overload
def attention(
    q: A, k: Any, v: Any, *, score: Any = ..., mask: Any = ..., arrays: Any = ..., bias: Any = ..., alibi_slopes: Any = ...,
    sinks: Any = ..., seed: Any = ..., return_lse: Literal[False] = ..., out: Any = ..., lse: Any = ...,
    **options: Unpack[CommonOptions],
) -> A: ...  # fmt: skip


@overload
def attention(
    q: A, k: Any, v: Any, *, score: Any = ..., mask: Any = ..., arrays: Any = ..., bias: Any = ..., alibi_slopes: Any = ...,
    sinks: Any = ..., seed: Any = ..., return_lse: Literal[True], out: Any = ..., lse: Any = ...,
    **options: Unpack[CommonOptions],
) -> tuple[A, A]: ...  # fmt: skip


@overload
def attention(
    q: A, k: Any, v: Any, *, score: Any = ..., mask: Any = ..., arrays: Any = ..., bias: Any = ..., alibi_slopes: Any = ...,
    sinks: Any = ..., seed: Any = ..., return_lse: bool, out: Any = ..., lse: Any = ...,
    **options: Unpack[CommonOptions],
) -> A | tuple[A, A]: ...  # fmt: skip


@answers_absent
@takes_options
def attention(
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
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    **options: Unpack[CommonOptions],
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
    prefix : int
        Every query sees the first `prefix` keys, whatever `causal` or the right end of `window` hides: a prefix of both directions,
        as language models have it. With a left end of `window` there is none yet.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    precision : {None, 'ieee', 'tf32'}
        For float32 on tensor cores: None and 'ieee' keep its accuracy by three products of fewer bits, 'tf32' makes do with one.
    algorithm : {'auto', 'v1', 'v2'}
        Of the kernels: 'v2', which 'auto' means, is FlashAttention-2's loop order. 'v1' is FlashAttention's: its outer loop is over
        keys, so that all results pass through device memory at each step.
    backend : {'auto', 'cuda', 'host', 'numpy'}
        'auto' is 'cuda' for device arrays and 'numpy' for arrays in host memory. 'host' executes the CUDA source on the CPU, which
        needs a C++ compiler.
    dropout : float, optional
        Probability that a pair of a query and a key is left out after the softmax; at least 0 and below 1. The others are
        multiplied by what keeps their mean. `dropout_mask` says which are kept. It takes a `seed`.
    score : str or callable, optional
        What scores become, an expression in ``score`` (after scale and softcap), ``b, h, h_kv, q_idx, kv_idx, q_len, kv_len`` and
        the names of `arrays`, such as ``"score + slope[h] * (kv_idx - q_idx)"``; or a function of some of these names, as
        ``lambda score, h, slope: score * slope[h]``. See the guide.
    mask : array of bool, str, callable, KeyRanges or TileMask, optional
        Which pairs take part, beside `causal`, `window` and `prefix`: an array that broadcasts to (..., heads, seq_q, seq_kv), True
        where a query sees a key; an expression of type bool, such as ``"doc[q_idx] == doc[kv_idx]"``; or ranges of keys for each
        query, `KeyRanges`. A `TileMask` of any of these is for many calls.
    arrays : dict of str to array or number, optional
        What the expressions read. Their contents do not matter to what is compiled. An index beyond an axis is taken for the
        nearest one. In kernels integers have 32 bits, of wider ones the low 32, and floats are float32.
    bias : array, optional
        What is added to scores: broadcasts to (..., heads, seq_q, seq_kv), in the dtype of q or in float32. May be -inf.
    alibi_slopes : array, shape (heads,) or (..., heads), optional
        ``slope * abs(i + seq_kv - seq_q - j)`` is subtracted from the score of query i and key j (ALiBi). In the dtype of q, or in
        float32.
    sinks : array, shape (heads,) or (n, heads), optional
        Logits of each query of a head besides those of its keys, which belong to no value: the softmax is over keys and sinks. In
        the dtype of q, or in float32.
    seed : int, (int, int), or array of uint64 and shape (2,)
        For `dropout`, and only with it: a seed below 2**64, and an offset below 2**32, which is 0 if it is not given.
    seqlens_q, seqlens_kv : array of int32 or int64, shape (batch,), optional
        How many of its rows are queries of each sequence, or keys and values; q, k and v have one batch axis, or none if all
        sequences share them. What other rows hold is not read. Results there are 0, and the log-sum-exp is -inf.
    cu_seqlens_q, cu_seqlens_kv : array of int32 or int64, shape (batch + 1,), optional
        Packed sequences: sequence `b` has the rows ``cu_seqlens_q[b]`` to before ``cu_seqlens_q[b + 1]`` of q, of shape
        (heads, rows, dim), and of results; likewise of k and v. The first offset is 0. Rows behind the last one belong to none.
    pages : array of int32 or int64, shape (batch, most_pages), optional
        Keys in pages: k is (pages, heads_kv, page_size, dim), v likewise, and ``pages[b]`` says in which of them sequence `b` has
        its keys, of which there are ``seqlens_kv[b]``. Entries beyond these are not read.
    cache_batch_idx : array of int32 or int64, shape (batch,), optional
        Which batch element of k and v belongs to each sequence, where it is not that of its number.
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
    where multiprocessors share query tiles, at most 38 MB whatever the lengths; elsewhere where blocks share the keys of few
    queries; 8 bytes for each query tile of sequences with lengths, and on sm_90a of masks that read arrays; and the bits that say
    which tiles a mask leaves. The first call with a new combination of dtype, head dim and alignment compiles a kernel (about a
    second, kept on disk); after it, calls can be captured in a CUDA graph if `out` is given, and where there is such memory, if a
    plan is given it as `workspace`. Results are bitwise reproducible.

    A query and a key that may not see each other do not influence each other, whatever they hold. A NaN or infinity in a row of
    `v`, however, reaches every query whose tile of keys contains that row, as ``0 * nan``.

    Lengths of sequences are arrays where q is, or in host memory, from where they are copied in each call. On a device they are
    read when the kernel runs, so that a captured graph serves other lengths; they are not checked there. `causal` and `window` are
    anchored in each sequence, and expressions and dropout count places from its beginning. What a sequence gives does not depend
    on what else is in the batch, to the bit. Shapes bound what lengths may be, and grids and memory; nothing else depends on them.

    With sinks, `lse` includes them, and so they count once when results over different keys are merged by `merge_states`: give them
    to one of the calls only.

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
    lengths = taken_lengths(options)
    others = captured(
        score=score, mask=mask, arrays=arrays, bias=bias, alibi_slopes=alibi_slopes, seed=seed, lengths=lengths
    )
    given = ForwardOperands(q, k, v, out, lse, sinks, others)
    return prepared(given, {**options, "return_lse": return_lse}).run(given)


@answers_absent
@takes_options
def plan_attention(
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
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    arch: str | None = None,
    kernel: str | None = None,
    **options: Unpack[CommonOptions],
) -> AttentionPlan:
    """Decide how `attention` would compute, without computing.

    Parameters
    ----------
    q, k, v, score, mask, arrays, bias, alibi_slopes, sinks, seed, return_lse, out, lse, **options
        As in `attention`. Only the layouts of the arrays matter.
    arch : str, optional
        Architecture to plan for on backend 'host', such as '75' or '90a'; by default '80'. On a GPU it is the device's own.
    kernel : {None, 'fwd_v1', 'fwd_v2', 'fwd_hopper'}
        Kernel file to compute with, such as to compare two; None leaves the choice to the planner. Of 'v2' there are 'fwd_v2', for
        everything, and 'fwd_hopper', for sm_90a, 16-bit dtypes and arrays whose strides are multiples of 16 bytes.

    Returns
    -------
    AttentionPlan
        Prints itself, and computes when called as ``plan(q, k, v, out=..., lse=...)`` with arrays of the same layouts.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`; also if the kernel asked for cannot compute this.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = np.ones((1, 4, 256, 64), np.float16)
    >>> plan = cupy_flash.plan_attention(q, q, q, causal=True, backend="host")
    >>> plan.kernel.config.TILE_Q
    128
    """
    lengths = taken_lengths(options)
    others = captured(
        score=score, mask=mask, arrays=arrays, bias=bias, alibi_slopes=alibi_slopes, seed=seed, lengths=lengths
    )
    given = ForwardOperands(q, k, v, out, lse, sinks, others)
    return prepared(given, {**options, "return_lse": return_lse, "arch": arch, "kernel": kernel})
