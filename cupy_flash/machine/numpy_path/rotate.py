"""Rows rotated in pairs of elements, in array code."""

from __future__ import annotations

import numpy

from .forward import accumulator


@numpy.errstate(all="ignore")
def rotated(x: numpy.ndarray, cos: numpy.ndarray, sin: numpy.ndarray, positions: numpy.ndarray, interleaved: bool) -> numpy.ndarray:
    """Return rows rotated by the angles of their positions, computed in float32, or in float64 for float64.

    Parameters
    ----------
    x
        `(*batch, heads, seq, dim)`.
    cos, sin
        `(positions, pairs)`, of which the first 2 pairs elements of a row are rotated.
    positions
        Of each row, `(*batch, seq)` or what broadcasts to that. The nearest that there is takes the place of others.
    interleaved
        Whether partners are neighbours, and not `pairs` apart.

    Examples
    --------
    >>> import numpy
    >>> from cupy_flash.machine.numpy_path.rotate import rotated
    >>> angles = numpy.arange(3.0)[:, None] * numpy.pi / 2
    >>> x = numpy.array([[[1.0, 2.0]]] * 3).reshape(1, 3, 2)
    >>> rotated(x, numpy.cos(angles), numpy.sin(angles), numpy.arange(3), False).round(3).tolist()
    [[[1.0, 2.0], [-2.0, 1.0], [-1.0, -2.0]]]
    """
    wide, pairs = accumulator(x.dtype), cos.shape[1]
    out = x.copy()
    if not x.size or not pairs:
        return out
    near = numpy.clip(positions, 0, len(cos) - 1)
    cos, sin = (angles.astype(wide)[near][..., None, :, :] for angles in (cos, sin))
    first = numpy.s_[..., 0 : 2 * pairs : 2] if interleaved else numpy.s_[..., :pairs]
    second = numpy.s_[..., 1 : 2 * pairs : 2] if interleaved else numpy.s_[..., pairs : 2 * pairs]
    a, b = x[first].astype(wide), x[second].astype(wide)
    out[first] = a * cos - b * sin
    out[second] = b * cos + a * sin
    return out
