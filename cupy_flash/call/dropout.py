"""Which pairs dropout keeps, from arguments to an array."""

from __future__ import annotations

import math
from typing import Any

import numpy

from ..problem import arrays
from ..problem.dropout import Dropout, make_dropout, make_mask_shape, make_seed


def dropout_mask(shape: tuple[int, ...], dropout: float, seed: int | tuple[int, int], like: Any) -> Any:
    """What the public function of this name returns."""
    shape, resolved, (number, offset) = make_mask_shape(shape), make_dropout(dropout), make_seed(seed)
    if like is None:
        return _mask(shape, resolved, number, offset, None)
    view = arrays.view(like, "like")
    if isinstance(view, numpy.ndarray):
        mask = _mask(shape, resolved, number, offset, view)
    else:
        with view.device:
            mask = _mask(shape, resolved, number, offset, view)
    return arrays.give_back(mask, like, "like")


def _mask(shape: tuple[int, ...], dropout: Dropout | None, seed: int, offset: int, like: arrays.Array | None) -> arrays.Array:
    """A mask of NumPy, or of CuPy on the current device, as `like` is."""
    if dropout is None or 0 in shape:
        mask = numpy.empty(shape, bool, like=like)  # `numpy.ones` asks for what CuPy's does not take
        mask.fill(True)
        return mask
    from ..machine.numpy_path.dropout import keeps  # late, as all array code

    mask = numpy.empty((math.prod(shape[:-2]), *shape[-2:]), bool, like=like)
    queries, keys = (numpy.arange(size, like=like) for size in shape[-2:])
    for head in range(len(mask)):
        mask[head] = keeps(dropout.threshold, seed, offset, head, queries, keys)
    return mask.reshape(shape)
