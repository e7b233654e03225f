"""The public functions of attention on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..api.absent import answers_absent
from ..api.signature import takes_options
from ..problem.backward import Gradients
from ..problem.options import check_flag
from .choice import Choice, chosen
from .communicator import Alone
from .model import Machine
from .plan import DistributedPlan
from .run import begin, run_backward, run_forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.options import CommonOptions


@answers_absent
@takes_options
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any,
    scheme: str = "auto",
    order: str = "contiguous",
    memory: int | None = None,
    score: Any = None,
    mask: Any = None,
    arrays: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seed: Any = None,
    return_lse: bool = False,
    **options: Unpack[CommonOptions],
) -> Any:
    """Attention of sequences whose rows are divided among ranks, each of which has a part of q, k and v.

    All ranks call it with the same options, and each gets the results of its own rows.

    Parameters
    ----------
    q, k, v : array
        The rows of this rank, as in `cupy_flash.attention`. Ranks may have different numbers of rows, and of queries others than of
        keys. `shard` makes them of whole arrays.
    comm : communicator
        Of mpi4py, for arrays in host memory; a `cupy.cuda.nccl.NcclCommunicator`, for arrays on devices; or a `Communicator`. See
        `mpi` and `nccl`, which say what they take besides.
    scheme : {'auto', 'ulysses', 'all_gather', 'ring'}
        How ranks share the work. 'ulysses': each computes all rows of some heads. 'all_gather': each gets all the keys that its
        rows see. 'ring': keys go from rank to rank beneath the computation. `plan_attention` says what 'auto' chooses, and why.
    order : {'contiguous', 'zigzag'}
        Which rows a rank has: one part behind the other, or two parts from both ends, with which causal attention takes all ranks
        equally long. See `positions`.
    memory : int, optional
        Most bytes that 'auto' may take of each rank besides inputs and results, if it can.
    score, mask, arrays
        As in `cupy_flash.attention`, expressions: `q_idx`, `kv_idx`, `q_len` and `kv_len` count through the whole sequence, and
        arrays are whole, the same on all ranks.
    alibi_slopes, sinks, seed
        As in `cupy_flash.attention`, the same on all ranks.
    return_lse : bool
        Return the log-sum-exp of this rank's rows as well.
    **options
        As in `cupy_flash.attention`. Masks are those of the whole sequence. Packed sequences lie one behind the other in the rows
        of all ranks: `cu_seqlens_q` and `cu_seqlens_kv` are offsets in these, in host memory, the same on all ranks.

    Returns
    -------
    out : array, shape (..., heads, rows, dim_v)
        The result of this rank's rows.
    lse : array, shape (..., heads, rows)
        Only with ``return_lse=True``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `cupy_flash.attention`, on all ranks: if one of them refuses its arguments, or has others than rank 0 where they have to
        be the same, no rank computes.
    CommunicationError
        If a rank does not answer within the time limit of the communicator.

    Notes
    -----
    Results over parts of the keys, and gradients that come in parts, are float32 until all parts are together, and are then rounded
    to the dtype of q, once. Sums that several ranks have a part in are added up in a fixed order, so that a repeat gives the same
    bits.

    `bias`, `mask` as an array, `KeyRanges`, padded sequences and pages are for one device. Dropout drops the same pairs as on one
    device, whichever scheme and order. Kernels take parts for it that begin at multiples of 64 rows, and with 'ulysses' one batch
    element.

    Examples
    --------
    Ranks that are threads; with MPI each process calls `part` with ``mpi4py.MPI.COMM_WORLD``.

    >>> import numpy as np, cupy_flash
    >>> from cupy_flash import distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 64), dtype=np.float32)
    >>> def part(comm):
    ...     own = [distributed.shard(x, comm.rank, comm.size, order="zigzag") for x in (q, k, v)]
    ...     return distributed.attention(*own, comm=comm, scheme="ring", order="zigzag", causal=True)
    >>> out = distributed.unshard(distributed.on_threads(4, part), order="zigzag")
    >>> bool(np.allclose(out, cupy_flash.attention(q, k, v, causal=True), atol=1e-6))
    True
    """
    of_scores = {"score": score, "mask": mask, "arrays": arrays, "alibi_slopes": alibi_slopes, "seed": seed}
    call = begin(
        "attention", comm, {"q": q, "k": k, "v": v}, sinks, of_scores, options, scheme, order, memory,
        flags={"return_lse": return_lse},
    )  # fmt: skip
    out, lse = run_forward(call)
    out = call.give_back(out)
    return (out, call.give_back(lse, -2)) if return_lse else out


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
    comm: Any,
    dlse: Any = None,
    scheme: str = "auto",
    order: str = "contiguous",
    memory: int | None = None,
    score: Any = None,
    mask: Any = None,
    arrays: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seed: Any = None,
    wrt: str | tuple[str, ...] = (),
    deterministic: bool = False,
    **options: Unpack[CommonOptions],
) -> Gradients:
    """The gradients of `attention`, each rank's of its own rows.

    Parameters
    ----------
    dout : array
        The gradient with respect to `out` of this rank's rows.
    q, k, v : array
        What the forward was called with.
    out, lse : array
        What it returned.
    dlse : array, optional
        The gradient with respect to `lse`; given by all ranks or by none.
    comm, scheme, order, memory, score, mask, arrays, alibi_slopes, sinks, seed, **options
        As in `attention`.
    wrt, deterministic
        As in `cupy_flash.attention_backward`. Sums over ranks are in a fixed order always.

    Returns
    -------
    Gradients
        Those of q, k and v are of this rank's rows. Those of what all ranks have the same, such as `sinks` and what `wrt` names,
        are of all rows, and the same on all ranks.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, CommunicationError
        As `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import distributed
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 100, 16), dtype=np.float32)
    >>> def part(comm):
    ...     *own, slope = [distributed.shard(x, comm.rank, comm.size) for x in (q, k, v, dout)]
    ...     results = distributed.attention(*own, comm=comm, return_lse=True)
    ...     return distributed.attention_backward(slope, *own, *results, comm=comm).dk
    >>> dk = distributed.unshard(distributed.on_threads(2, part))
    >>> bool(abs(dk.sum(axis=1)).max() < 1e-4)  # one vector added to all keys changes no result
    True
    """
    of_scores = {"score": score, "mask": mask, "arrays": arrays, "alibi_slopes": alibi_slopes, "seed": seed}
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
    call = begin(
        "attention_backward", comm, inputs, sinks, of_scores, options, scheme, order, memory, wrt,
        flags={"deterministic": deterministic},
    )  # fmt: skip
    found = run_backward(call, deterministic)
    own = zip(found, (q, k, v))
    return found._replace(**{name: call.give_back(x, like=like) for name, (x, like) in zip(found._fields, own)})


@answers_absent
@takes_options
def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any,
    sinks: Any = None,
    wrt: str | tuple[str, ...] = (),
    return_lse: bool = False,
    deterministic: bool = False,
    scheme: str = "auto",
    order: str = "contiguous",
    memory: int | None = None,
    score: Any = None,
    mask: Any = None,
    arrays: Any = None,
    alibi_slopes: Any = None,
    seed: Any = None,
    **options: Unpack[CommonOptions],
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention on several ranks, and the function that takes a gradient of its result to those of this rank's rows.

    Parameters
    ----------
    q, k, v, comm, scheme, order, memory, score, mask, arrays, alibi_slopes, sinks, seed, return_lse, **options
        As in `attention`.
    wrt, deterministic
        As in `attention_backward`.

    Returns
    -------
    result : array or (array, array)
        What `attention` returns.
    vjp : callable
        ``vjp(dout)`` or ``vjp(dout, dlse)`` returns `Gradients`. All ranks call it, in the same order.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, CommunicationError
        As `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import distributed
    >>> x = np.random.default_rng(0).standard_normal((2, 100, 16), dtype=np.float32)
    >>> def part(comm):
    ...     own = distributed.shard(x, comm.rank, comm.size)
    ...     out, vjp = distributed.attention_vjp(own, own, own, comm=comm, causal=True)
    ...     return vjp(np.ones_like(out)).dv
    >>> dv = distributed.unshard(distributed.on_threads(2, part))
    >>> bool(np.allclose(dv.sum(axis=1), 100, rtol=1e-4))  # the weights of each of the 100 queries add up to 1
    True
    """
    shared = {
        "comm": comm, "sinks": sinks, "scheme": scheme, "order": order, "memory": memory, "score": score, "mask": mask,
        "arrays": arrays, "alibi_slopes": alibi_slopes, "seed": seed, **options,
    }  # fmt: skip
    check_flag("return_lse", return_lse)
    out, lse = attention(q, k, v, return_lse=True, **shared)

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        """The gradients with respect to this rank's rows, from those with respect to its results."""
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, deterministic=deterministic, **shared)

    return ((out, lse) if return_lse else out), vjp


@answers_absent
@takes_options
def plan_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any = None,
    ranks: int | None = None,
    scheme: str = "auto",
    order: str = "contiguous",
    memory: int | None = None,
    machine: Machine | None = None,
    score: Any = None,
    mask: Any = None,
    arrays: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seed: Any = None,
    **options: Unpack[CommonOptions],
) -> DistributedPlan:
    """Decide how `attention` on several ranks would compute, without computing.

    Parameters
    ----------
    q, k, v : array
        The rows of this rank; only their layouts matter.
    comm : communicator, optional
        As in `attention`, called by all ranks.
    ranks : int, optional
        In place of `comm`: so many ranks, each of which has as many rows as these arrays. No other rank is asked.
    machine : Machine, optional
        What the model is told of devices and links. By default those of one host with H200s.
    scheme, order, memory, score, mask, arrays, alibi_slopes, sinks, seed, **options
        As in `attention`.

    Returns
    -------
    DistributedPlan
        Prints itself: the scheme and why, bytes sent, memory, steps, and times by the model.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CommunicationError
        As `attention`.

    Examples
    --------
    A million tokens on 8 devices, without any:

    >>> import numpy as np
    >>> from cupy_flash import distributed
    >>> rows = np.broadcast_to(np.float16(0), (64, 1 << 17, 128))
    >>> plan = distributed.plan_attention(rows, rows[:8], rows[:8], ranks=8, order="zigzag", causal=True)
    >>> plan.scheme in ("all_gather", "ulysses", "ring")
    True
    """
    if (comm is None) == (ranks is None):
        raise TypeError("comm, ranks: expected one of them, got both or none")
    of_scores = {"score": score, "mask": mask, "arrays": arrays, "alibi_slopes": alibi_slopes, "seed": seed}
    comm = Alone(ranks) if comm is None else comm
    call = begin("attention", comm, {"q": q, "k": k, "v": v}, sinks, of_scores, options, scheme, order, memory)
    choice = chosen(call.whole, False, memory, machine) if scheme == "auto" else Choice(scheme, "it was asked for")
    return DistributedPlan(call.whole, choice, machine or Machine())
