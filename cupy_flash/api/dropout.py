"""The public function that tells which pairs dropout keeps."""

from __future__ import annotations

from typing import Any

from ..call import dropout as call
from .absent import answers_absent


@answers_absent
def dropout_mask(shape: tuple[int, ...], dropout: float, seed: int | tuple[int, int], *, like: Any = None) -> Any:
    """Which pairs of a query and a key dropout keeps, as every kernel and backend draws them.

    Parameters
    ----------
    shape : tuple of int
        (..., heads, seq_q, seq_kv), of at least two axes; two are those of one head.
    dropout : float
        Probability that a pair is dropped, at least 0 and below 1.
    seed : int or (int, int)
        A seed of at least 0 and below 2**64, or a pair of one and an offset of at least 0 and below 2**32. The offset alone is 0.
    like : array, optional
        A CuPy array for a mask on its device; another library's for one of its kind. NumPy by default.

    Returns
    -------
    array of bool, shape (..., heads, seq_q, seq_kv)
        True where a pair is kept.

    Raises
    ------
    TypeError, ValueError
        For any argument that is not as described, with its name.

    Notes
    -----
    Whether a pair is dropped depends on seed, offset, batch element, head, query and key, and on nothing else: more queries or keys
    do not change it. Batch elements are numbered in C order over all batch axes.

    The seed and the offset go through Philox4x32-7 [1]_, and what that makes of them, the head, the query and the key through pcg4d
    [2]_, whose 128 bits are for 32 pairs. By counts, 16 pairs near each other are dropped as independently as chance has it. The
    probability p is rounded to a multiple of 2**-15, and what is kept counts 1 / (1 - p) times, with the p that was rounded.

    References
    ----------
    .. [1] Salmon, Moraes, Dror and Shaw, 2011, "Parallel random numbers: as easy as 1, 2, 3".
    .. [2] Jarzynski and Olano, 2020, "Hash functions for GPU rendering", Journal of Computer Graphics Techniques 9(3).

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> mask = cupy_flash.dropout_mask((2, 8, 100, 120), 0.25, seed=7)
    >>> mask.shape, bool(abs(mask.mean() - 0.75) < 0.01)
    ((2, 8, 100, 120), True)
    >>> bool(np.array_equal(mask[:, :, :50], cupy_flash.dropout_mask((2, 8, 50, 120), 0.25, seed=7)))
    True
    """
    return call.dropout_mask(shape, dropout, seed, like)
