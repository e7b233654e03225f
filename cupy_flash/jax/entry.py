"""The public function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy

from ..errors import UnsupportedError, shown
from ..problem.expression.entry import Expression, mask_expression, score_expression
from ..problem.key_ranges import KeyRanges
from ..problem.layout import dense_layout
from ..problem.options import check_flag
from ..problem.scalars import integer, is_bool
from ..problem.scores import declared
from . import operands
from .call import READ, Call, problem_of
from .gradient import attend
from .primitive import types_of

# What the library calls what has another name here.
NAMES = {
    "query_seq_lengths": "seqlens_q",
    "key_value_seq_lengths": "seqlens_kv",
    "local_window_size": "window",
    "is_causal": "causal",
}


def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool | str = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    prefix: int = 0,
    softcap: float | None = None,
    score: Any = None,
    arrays: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float | None = None,
    seed: Any = None,
    precision: str | None = None,
    algorithm: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
) -> Any:
    """Exact attention, ``softmax(q @ k.T * scale + bias) @ v``, called as `jax.nn.dot_product_attention`.

    It can be compiled by `jax.jit`, differentiated in reverse by `jax.grad` and `jax.vjp`, mapped by `jax.vmap`, recomputed by
    `jax.checkpoint`, and divided over batch and heads by `jax.shard_map`. On GPUs the kernels run on XLA's own stream, on its own
    memory; on CPUs NumPy computes, on XLA's own memory as well.

    Parameters
    ----------
    q : array, shape (batch, seq_q, heads, dim) or (seq_q, heads, dim)
        Queries: float16, bfloat16, float32, and on CPUs float64.
    k : array, shape (batch, seq_kv, heads_kv, dim) or (seq_kv, heads_kv, dim)
        Keys, in the dtype of q. `heads` is a multiple of `heads_kv`.
    v : array, shape (batch, seq_kv, heads_kv, dim_v) or (seq_kv, heads_kv, dim_v)
        Values, likewise; `dim_v` may differ from `dim`.
    bias : array, optional
        What is added to scores: broadcasts to (batch, heads, seq_q, seq_kv).
    mask : array of bool, str, callable or KeyRanges, optional
        Which pairs take part: an array that broadcasts likewise, True where a query sees a key; or as in `cupy_flash.attention` an
        expression, or ranges of keys.
    scale : float, optional
        Factor of the scores, by default ``1 / sqrt(dim)``.
    is_causal : bool or {'top_left', 'bottom_right'}
        True means 'top_left': query i sees the keys up to i, as in `jax.nn`. With 'bottom_right' the last query sees the last key.
    query_seq_lengths, key_value_seq_lengths : array of integers, shape (batch,), optional
        How many of its rows are queries of each sequence, or keys and values. Results of other rows are 0.
    local_window_size : int or (int, int), optional
        Query i sees at most so many keys before and behind key i, both ends included; a number is both. None at an end is
        unbounded. With ``is_causal='bottom_right'`` it is anchored there.
    implementation : {None, 'xla', 'cudnn'}
        None is this library. The others hand over to `jax.nn.dot_product_attention`, which has no options but those up to here.
    return_residual : bool
        Return the log-sum-exp of the scores as well.
    prefix, softcap, score, arrays, alibi_slopes, sinks, precision, algorithm, backend
        As in `cupy_flash.attention`.
    dropout : float, optional
        The probability with which a weight is dropped. Others are scaled up, so that results stay what they are in the mean.
    seed : int, (int, int) or key of `jax.random`
        For `dropout`, and only with it. An array, which may be traced, so that each step has another one without compiling anew.
    deterministic : bool
        True makes gradients bitwise reproducible on a GPU, at a cost.

    Returns
    -------
    out : array, shape (batch, seq_q, heads, dim_v) or (seq_q, heads, dim_v)
        In the dtype of q.
    residual : array, shape (batch, seq_q, heads) or (seq_q, heads)
        Only with ``return_residual=True``. Natural logarithm, in float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it, what was expected and what came. While JAX traces, so before anything runs.
    UnsupportedError
        If an argument has a meaning that is not implemented.

    Notes
    -----
    What differs from `jax.nn.dot_product_attention`: a query that sees no key has the result 0 and the residual -inf, where that
    function returns the mean of all values. The residual is not rounded to the dtype of q, and has a gradient. `scale` and sizes of
    windows are numbers, which are not traced. `v` may be wider or narrower than `k`.

    There are gradients of q, k, v, bias, alibi_slopes, sinks and of the floats that `score` reads. Those that nobody asks for are
    not computed. Forward-mode differentiation and second derivatives are not there.

    `jax.vmap` makes one call with a batch axis more. It computes one element after the other if it maps over `sinks` or `arrays`,
    or asks for gradients of `arrays` or, with lengths, of a bias; if an expression depends on `b`; or if it does not map over a
    `seed`. A batch axis of q itself serves all of these in one call.
    With a mapped `seed` the first one serves all elements, which drop others each.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cupy_flash.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 8, 64))
    >>> jax.jit(lambda q: attention(q, k, v, is_causal=True))(q).shape
    (2, 100, 8, 64)
    >>> jax.grad(lambda q: attention(q, k, v, local_window_size=(16, 0)).sum())(q).shape
    (2, 100, 8, 64)
    """
    own = {
        "prefix": (prefix, 0), "softcap": (softcap, None), "score": (score, None), "arrays": (arrays, None),
        "alibi_slopes": (alibi_slopes, None), "sinks": (sinks, None), "dropout": (dropout, None), "seed": (seed, None),
        "precision": (precision, None), "algorithm": (algorithm, "auto"), "backend": (backend, "auto"),
        "deterministic": (deterministic, False),
    }  # fmt: skip
    if not is_bool(return_residual):
        raise TypeError(f"return_residual: expected True or False, got {shown(return_residual)}")
    of_lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    if implementation is not None:
        shared = {"scale": scale, "is_causal": is_causal, "local_window_size": local_window_size, **of_lengths}
        return _of_jax(implementation, (q, k, v, bias, mask), shared, own, return_residual)

    of_batch = operands.of_batch(q, k, v)
    q4, k4, _ = of_batch.values()
    is_expression = mask is None or isinstance(mask, (str, Expression, KeyRanges)) or callable(mask)
    given = of_batch | operands.of_heads(alibi_slopes, sinks, q4.dtype)
    given |= operands.of_seed(seed) | operands.of_reads(arrays, mask)
    given |= operands.of_pairs(bias, None if is_expression else mask, q4.dtype)
    if any(x is not None for x in of_lengths.values()):
        rows = {"query_seq_lengths": q4.shape[1], "key_value_seq_lengths": k4.shape[1]}
        sequences = max(x.shape[0] for x in of_batch.values())
        given |= operands.of_lengths(of_lengths, NAMES, rows, sequences)
        given |= {name: _of_each_sequence(given[name], sequences) for name in ("q", "k", "v")}
    expressions = _expressions(score, mask if isinstance(mask, (str, Expression)) or callable(mask) else None, given)
    call = Call(
        tuple(given),
        (
            ("layout", "bshd"),
            ("scale", _number("scale", scale)),
            ("causal", "top_left" if is_bool(is_causal) and is_causal else _plain(is_causal)),
            ("window", _window(local_window_size)),
            ("top_left", True),
            ("prefix", _plain(prefix)),
            ("softcap", _number("softcap", softcap)),
            ("dropout", _number("dropout", dropout)),
            ("precision", precision),
            ("algorithm", algorithm),
            ("backend", backend),
            ("deterministic", check_flag("deterministic", deterministic)),
            *expressions.items(),
        ),
    )
    _check(call, given)
    out, lse = attend(call, operands.varying_alike(given))
    if jnp.ndim(q) == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _check(call: Call, given: dict[str, jax.Array]) -> None:
    """Raise what is wrong with the arguments of a call, under the names that they have here."""
    here = {theirs: name for name, theirs in NAMES.items()}
    try:
        problem_of.__wrapped__(call, types_of(given.values()))  # options may be anything yet, that is no key of a cache
    except (TypeError, ValueError, UnsupportedError) as error:
        name, colon, said = str(error).partition(":")
        raised = type(error)(here.get(name, name) + colon + said)
    else:
        return
    raise raised


def _of_each_sequence(x: jax.Array, sequences: int) -> jax.Array:
    """An array with an element of the batch for each sequence, since lengths are of one batch axis; a shared one is copied."""
    return jnp.broadcast_to(x, (sequences, *x.shape[1:])) if x.shape[0] == 1 else x


def _expressions(score: Any, mask: Any, given: dict[str, jax.Array]) -> dict[str, str]:
    """The texts of expressions, which may be given as functions."""
    reads = {name.removeprefix(READ): x for name, x in given.items() if name.startswith(READ)}
    layouts = {name: dense_layout(x.shape, range(x.ndim)[::-1], numpy.dtype(x.dtype).name, None) for name, x in reads.items()}
    both = ("score", score, score_expression), ("mask", mask, mask_expression)
    return {
        name: str(x if isinstance(x, Expression) else make(x, declared(layouts))) for name, x, make in both if x is not None
    }


def _window(size: Any) -> tuple[int | None, int | None]:
    """How many keys before and behind, from what `jax.nn` takes."""
    ends = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(ends) != 2:
        raise ValueError(f"local_window_size: expected None, a number or a pair (left, right), got {shown(size)}")
    numbers = [end if end is None else integer("local_window_size", end, "None, an integer or a pair of these") for end in ends]
    for number in numbers:
        if number is not None and number < 0:
            raise ValueError(f"local_window_size: expected ends of at least 0, or None for unbounded, got {shown(size)}")
    left, right = numbers
    return left, right


def _number(name: str, x: Any) -> Any:
    """A number that is compiled in. Whether it is one is checked with the other options."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name}: expected None or a number, got one that JAX traces; a factor of q may be traced")
    return float(x) if isinstance(x, (jax.Array, numpy.generic)) and not jnp.ndim(x) else x


def _plain(x: Any) -> Any:
    return x.item() if isinstance(x, numpy.generic) else x


def _of_jax(
    implementation: str, arrays: tuple[Any, ...], shared: dict[str, Any], own: dict[str, tuple[Any, Any]], return_residual: bool
) -> Any:
    """What JAX's own function returns."""
    if implementation not in ("xla", "cudnn"):
        raise ValueError(f"implementation: expected None, 'xla' or 'cudnn', got {shown(implementation)}")
    for name, (value, default) in own.items():
        if value is not default and value != default:
            raise ValueError(f"{name}: expected {default} with implementation={implementation!r}, which has no such option")
    more = {"return_residual": True} if return_residual else {}  # which older versions do not have
    return jax.nn.dot_product_attention(*arrays, **shared, implementation=implementation, **more)
