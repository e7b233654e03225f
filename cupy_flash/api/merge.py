"""The public function that merges results over different keys."""

from __future__ import annotations

from typing import Any

from ..call.merge import merge
from .absent import answers_absent
from .forward import A


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
