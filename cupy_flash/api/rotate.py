"""The public function that rotates rows by the angles of their positions."""

from __future__ import annotations

from typing import Any

from .absent import answers_absent
from .forward import A


@answers_absent
def rotate(
    x: A,
    cos: Any,
    sin: Any,
    *,
    positions: Any = None,
    interleaved: bool = False,
    layout: str = "bhsd",
    backend: str = "auto",
    out: A | None = None,
) -> A:
    """Rotary position embedding: pairs of elements of each row, rotated by the angles of its position.

    Of a pair (a, b), number i, in a row at position t, ::

        a, b = a cos[t, i] - b sin[t, i],  b cos[t, i] + a sin[t, i]

    Scores of queries and keys that were both rotated depend on how far apart their positions are.

    Parameters
    ----------
    x : array, shape (..., heads, seq, dim)
        Queries or keys: float16, bfloat16, float32 or float64.
    cos, sin : array, shape (rows, rotary_dim / 2)
        Cosine and sine of the angle of each position and pair, in float32 or in the dtype of `x`. The first `rotary_dim` elements
        of a row of `x`, at most `dim`, are rotated, and the others are copied.
    positions : int or array of int32 or int64, optional
        By default those of the rows: 0 to `seq` - 1. A number is the position of the first row, and the others follow it. An array
        of the shape of the batch axes has the position of the first row of each batch element; one with an axis more, (..., seq),
        that of each row. Axes of size 1 are broadcast. In device memory they are read when the kernel runs.
    interleaved : bool
        Which elements are a pair: i and i + `rotary_dim` / 2 (halves, as in GPT-NeoX and Llama), or with True 2 i and 2 i + 1 (as
        in GPT-J).
    layout : {'bhsd', 'bshd'}
        As in `attention`.
    backend : {'auto', 'cuda', 'host', 'numpy'}
        As in `attention`.
    out : array, shape (..., heads, seq, dim), optional
        Where to write, of any strides that leave elements apart. It may be `x` itself. By default a new array.

    Returns
    -------
    array, shape (..., heads, seq, dim)
        In the dtype, memory order and kind of array of `x`; `out` itself if it is given.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `attention`; for a position that is not one of a row of `cos`, if it is in host memory.

    Notes
    -----
    Positions in device memory cannot be checked without waiting for them. A row at one that `cos` does not have is rotated by the
    angles of the nearest that it has.

    Positions in host memory for an `x` on a device are copied there by the call, which then cannot be captured in a CUDA graph. A
    number can.

    Products and sums are float32, and the result is rounded once (float64 for float64).

    The inverse of a rotation is the rotation by `-sin`, and so is its gradient: that of `x` is ``rotate(dout, cos, -sin, ...)``.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> x = np.random.default_rng(0).standard_normal((2, 8, 100, 64), dtype=np.float32)
    >>> angles = np.outer(np.arange(100), 10000.0 ** (-np.arange(32) / 32)).astype(np.float32)
    >>> cos, sin = np.cos(angles), np.sin(angles)
    >>> rotated = cupy_flash.rotate(x, cos, sin)
    >>> bool(np.allclose(cupy_flash.rotate(rotated, cos, -sin), x, atol=1e-5))
    True
    >>> last = cupy_flash.rotate(x[:, :, -1:], cos, sin, positions=99)
    >>> bool(np.array_equal(last, rotated[:, :, -1:]))
    True
    """
    from ..call import rotate as call  # late: many models do not rotate

    return call.rotate(x, cos, sin, positions, interleaved, layout, backend, out)
