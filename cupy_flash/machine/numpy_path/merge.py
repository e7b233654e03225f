"""Two results over different keys merged, in array code."""

from __future__ import annotations

import numpy

from .forward import accumulator


@numpy.errstate(all="ignore")
def merged(
    out_a: numpy.ndarray, lse_a: numpy.ndarray, out_b: numpy.ndarray, lse_b: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return `(out, lse)` over two sets of keys together, from the results over each of them.

    The sum is float32, or float64 for float64 results. A result of weight 0 is selected away: over no keys at all,
    where `lse` is -inf, it may be anything. Where both have seen nothing, the result is 0 and -inf.

    Parameters
    ----------
    out_a, out_b
        `(..., heads, len_q, dim_v)`, of one shape and dtype; the merged result has this dtype.
    lse_a, lse_b
        `(..., heads, len_q)`, natural logarithms; the merged one has the dtype of `lse_a`.

    Examples
    --------
    >>> import numpy
    >>> from cupy_flash.machine.numpy_path.forward import blocked
    >>> from cupy_flash.machine.numpy_path.merge import merged
    >>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 2, 50, 8))
    >>> near = blocked(q, k[:, :20], v[:, :20], scale=0.3)
    >>> far = blocked(q, k[:, 20:], v[:, 20:], scale=0.3)
    >>> numpy.allclose(merged(*near, *far)[0], blocked(q, k, v, scale=0.3)[0])
    True
    """
    wide = accumulator(out_a.dtype)
    top = numpy.maximum(lse_a, lse_b)
    top = numpy.where(top == -numpy.inf, 0, top)  # nothing seen by either: exp(-inf - -inf) would be NaN
    weights = [numpy.exp(lse - top) for lse in (lse_a, lse_b)]
    total = weights[0] + weights[1]
    share_a, share_b = (numpy.where(weight == 0, 0, weight / total)[..., None] for weight in weights)
    out = numpy.where(share_a == 0, 0, share_a * out_a.astype(wide)) + numpy.where(share_b == 0, 0, share_b * out_b.astype(wide))
    return out.astype(out_a.dtype), (top + numpy.log(total)).astype(lse_a.dtype)
