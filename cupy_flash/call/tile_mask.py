"""A mask of pairs that is used more than once: what is found of its tiles is kept."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy

from ..errors import shown
from ..problem import arrays as array_views
from ..problem.expression.entry import Expression, mask_expression
from ..problem.key_ranges import KeyRanges
from ..problem.scores import declared, label


def operand(x: Any, name: str) -> array_views.Array:
    """An array of a call as a view. A number is a scalar, and so is one of NumPy's."""
    return numpy.asarray(x) if _is_number(type(x)) else array_views.view(x, name)


@functools.lru_cache(maxsize=64)  # of abstract classes it takes longer than of others to be asked
def _is_number(kind: type) -> bool:
    return issubclass(kind, (Number, numpy.generic))


class TileMask:
    """A mask for many calls: which tiles of pairs it shows is found once, and not anew in each call.

    Given as `mask` to any function of attention, in every layer and in the backward, it means what the mask that it was made of
    means. Kernels visit only tiles in which something is seen, and a small kernel finds these before. With a `TileMask` it does
    so in the first call of each kind of tile, direction and band of keys; later calls with the same lengths read what it has found.

    What is found stays in memory as long as the object does: two bits for each tile, and where kernels read which pairs take part,
    a bit for each pair, for as many heads and batch elements as the mask tells apart. That is at most half of what q, k, v and out
    take; `print` of a plan says how many bytes. It is computed on the current stream of the call that needs it first; a call on
    another stream has to come after that one. To capture calls in a CUDA graph, call once before, keep the object as long as the
    graph, and give plans their `workspace`, in which blocks count the tiles that they have taken.

    Parameters
    ----------
    mask : array of bool, str, callable or KeyRanges
        As in `attention`.
    arrays : dict of str to array or number, optional
        What the expression reads. They need not be given again with each call; `arrays` there are for a score.

    Raises
    ------
    TypeError, ValueError
        If it is no mask.

    Notes
    -----
    It must not be used any more once what `mask` or `arrays` hold has changed: what was found before would be taken for true, and
    results would be wrong. Make another one.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> doc = np.repeat(np.arange(4), 64)
    >>> documents = cupy_flash.TileMask("doc[q_idx] == doc[kv_idx]", {"doc": doc})
    >>> q = np.ones((2, 256, 64), np.float16)
    >>> for layer in range(3):
    ...     q = cupy_flash.attention(q, q, q, mask=documents)
    """

    __slots__ = ("arrays", "found", "mask")

    def __init__(self, mask: Any, arrays: Mapping[str, Any] | None = None) -> None:
        if isinstance(mask, TileMask) or mask is None:
            raise TypeError(f"mask: expected an array of bool, an expression or a function, got {shown(mask)}")
        if arrays is not None and not isinstance(arrays, Mapping):
            raise TypeError(f"arrays: expected None or a dict of arrays by their names, got {shown(arrays)}")
        self.arrays = dict(arrays or {})
        self.found: dict[Any, Any] = {}
        unread = next(iter(self.arrays), None)
        if isinstance(mask, (str, Expression)) or callable(mask):
            layouts = {}
            for name, x in self.arrays.items():
                if not isinstance(name, str):
                    raise TypeError(f"arrays: expected names that are strings, got {shown(name)}")
                layouts[name] = array_views.layout_of(array_views.describe(operand(x, label(name)))[0], label(name))
            mask = mask if isinstance(mask, Expression) else mask_expression(mask, declared(layouts))
            read = {declaration.name for declaration in mask.declarations}
            unread = next((name for name in self.arrays if name not in read), None)
        elif not isinstance(mask, KeyRanges):
            found = array_views.layout_of(array_views.describe(array_views.view(mask, "mask"))[0], "mask")
            if found.dtype != "bool":
                raise TypeError(f"mask: expected bool, got {found.dtype}")
        if unread is not None:
            raise ValueError(f"{label(unread)}: expected an array that is read by the mask, which does not")
        self.mask = mask

    def __repr__(self) -> str:
        if isinstance(self.mask, KeyRanges):
            what = "of ranges"
        else:
            what = f"{str(self.mask)!r}" if isinstance(self.mask, Expression) else f"array of shape {self.mask.shape}"
        return f"<TileMask {what}, found for {len(self.found)} kinds of tiles>"
