"""The public function that merges results over different keys."""

from __future__ import annotations

from typing import Any, overload

from .absent import answers_absent
from .forward import A


@overload
def merge_states(*states: tuple[A, Any], layout: str = "bhsd", backend: str = "auto") -> tuple[A, A]: ...


@overload
def merge_states(out_a: A, lse_a: Any, out_b: A, lse_b: Any, *, layout: str = "bhsd", backend: str = "auto") -> tuple[A, A]: ...


@answers_absent
def merge_states(
    *states: Any,
    out_a: Any = None,
    lse_a: Any = None,
    out_b: Any = None,
    lse_b: Any = None,
    layout: str = "bhsd",
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Attention over several sets of keys together, from the results over each of them.

    Parameters
    ----------
    *states : pairs of array
        Each is `(out, lse)` over some of the keys, as ``attention(..., return_lse=True)`` returns them; one or more.
        `out` has shape (..., heads, seq_q, dim_v), of float16, bfloat16, float32 or float64, and `lse` has shape
        (..., heads, seq_q), of float32, or float64 for float64. All have the same shapes and dtypes.
    out_a, lse_a, out_b, lse_b : array
        Two states can be given without pairs as well, by position or by these names.
    layout : {'bhsd', 'bshd'}
        As in `attention`.
    backend : {'auto', 'cuda', 'host', 'numpy'}
        As in `attention`.

    Returns
    -------
    out : array, shape (..., heads, seq_q, dim_v)
        In the dtype, memory order and kind of array of the first `out`.
    lse : array, shape (..., heads, seq_q)
        In the dtype of the first `lse`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `attention`. States are counted from 0: ``states[1][0]`` is the second `out`.

    Notes
    -----
    A result of weight 0 is left out, whatever it holds: over no keys at all, `lse` is -inf and `out` may be anything.

    Two states are merged by one kernel. More are merged two at a time, neighbours first and by halves, always in the same
    order. Between the merges `out` is float32, or float64 for float64, and is rounded to the dtype of the states once, at the
    end; this takes memory of about log2(number of states) results in float32.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> parts = [slice(0, 30), slice(30, 60), slice(60, None)]
    >>> states = [cupy_flash.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in parts]
    >>> out, lse = cupy_flash.merge_states(*states)
    >>> bool(np.allclose(out, cupy_flash.attention(q, k, v), atol=1e-6))
    True
    """
    from ..call.merge import merge  # late: most results are over all keys

    pair = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    return merge(states, {name: x for name, x in pair.items() if x is not None}, layout, backend)
