"""Sequences of their own lengths on arrays in host memory: one after the other, each by itself.

So what a sequence gives does not depend on what else is in the batch, to the bit. Nothing beyond a length is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from ...problem.lengths import Lengths
from ...problem.mask import Mask
from .backward import blocked_gradients
from .forward import blocked

if TYPE_CHECKING:
    from .scores import BoundScores


@dataclass(frozen=True)
class _Rows:
    """The rows of a sequence in an array: in which batch element, if the array has any, and where."""

    element: int | None
    first: int
    len: int

    def of(self, x: numpy.ndarray | None, axis: int = -2) -> numpy.ndarray | None:
        """The part of an array, whose rows lie along an axis counted from the last one."""
        if x is None:
            return None
        x = x if self.element is None else x[self.element]
        return x[(..., slice(self.first, self.first + self.len), *[slice(None)] * (-1 - axis))]


def _sides(lengths: Lengths, numbers: dict[str, numpy.ndarray], rows: tuple[int, int]) -> Iterator[tuple[int, _Rows, _Rows]]:
    """Each sequence with its queries and its keys; of pages the keys are counted from the first one."""
    for number in range(lengths.sequences):
        sides = []
        for side, most in zip(("q", "kv"), rows):
            offsets, own = numbers.get(f"cu_seqlens_{side}"), numbers.get(f"seqlens_{side}")
            first, end = (0, most) if offsets is None else (int(offsets[number]), int(offsets[number + 1]))
            element = None if offsets is not None else number
            sides.append(_Rows(element, first, end - first if own is None else int(own[number])))
        yield number, *sides


def _keys(lengths: Lengths, numbers: dict[str, numpy.ndarray], number: int, rows: _Rows, x: numpy.ndarray) -> numpy.ndarray:
    """Keys or values of a sequence, ``(heads, keys, dim)``; those in pages are copied."""
    if lengths.paged:
        pages = numbers["pages"][number, : -(-rows.len // lengths.page_size)]
        gathered = x[pages].swapaxes(0, 1)  # (heads, pages, page_size, dim)
        return gathered.reshape(x.shape[1], -1, x.shape[-1])[:, : rows.len]
    if lengths.has("cache_batch_idx"):
        return x[int(numbers["cache_batch_idx"][number]), :, : rows.len]
    return rows.of(_with_batch(x, rows))


def _with_batch(x: numpy.ndarray, rows: _Rows) -> numpy.ndarray:
    """An array with a batch axis where rows are of one element; one that all share is broadcast."""
    if rows.element is None or (x.ndim > 3 and x.shape[0] != 1):
        return x
    shared = x if x.ndim == 3 else x[0]
    return numpy.broadcast_to(shared, (rows.element + 1, *shared.shape))


def forward(
    lengths: Lengths,
    numbers: dict[str, numpy.ndarray],
    mask: Mask,
    q: numpy.ndarray,
    k: numpy.ndarray,
    v: numpy.ndarray,
    options: dict[str, Any],
    scores: BoundScores | None,
    out: numpy.ndarray,
    lse: numpy.ndarray | None,
) -> None:
    """Attention of each sequence into its rows of `out` and `lse`; others get 0 and -inf.

    Parameters
    ----------
    lengths : Lengths
    numbers : dict of str to numpy.ndarray
        What its arrays hold.
    mask : Mask
        That of as many queries as keys.
    q, k, v : numpy.ndarray
        As the user gave them, in the order of kernels.
    options : dict
        Further arguments of `forward.blocked`.
    scores : BoundScores or None
    out, lse : numpy.ndarray
    """
    out[...] = 0
    if lse is not None:
        lse[...] = -numpy.inf
    for number, queries, keys in _sides(lengths, numbers, (mask.len_q, mask.len_kv)):
        own = _with_batch(q, queries)
        blocked(
            queries.of(own),
            _keys(lengths, numbers, number, keys, k),
            _keys(lengths, numbers, number, keys, v),
            **options,
            mask=lengths.band_of(mask, queries.len, keys.len),
            scores=scores and scores.of_sequence(number, queries.len, keys.len),
            out=queries.of(out),
            lse=queries.of(lse, axis=-1),
        )


def backward(
    lengths: Lengths,
    numbers: dict[str, numpy.ndarray],
    mask: Mask,
    inputs: tuple[numpy.ndarray | None, ...],
    options: dict[str, Any],
    scores: BoundScores | None,
    gradients: dict[str, numpy.ndarray | None],
) -> None:
    """Gradients of each sequence into its rows; others get 0, and what sequences share is summed over them.

    Parameters
    ----------
    lengths, numbers, mask, scores
        As in `forward`.
    inputs : tuple of numpy.ndarray
        dout, q, k, v, out, lse and dlse, which may be None.
    options : dict
        Further arguments of `backward.blocked_gradients`.
    gradients : dict of str to numpy.ndarray
        Where they go, by name.
    """
    dout, q, k, v, out, lse, dlse = inputs
    there = {name: x for name, x in gradients.items() if x is not None}
    sums = {name: numpy.zeros(x.shape, numpy.promote_types(x.dtype, numpy.float32)) for name, x in there.items()}
    for number, queries, keys in _sides(lengths, numbers, (mask.len_q, mask.len_kv)):
        of_q, (of_k, of_v) = _with_batch(q, queries), (_with_batch(x, keys) for x in (k, v))
        found = blocked_gradients(
            queries.of(dout),
            queries.of(of_q),
            keys.of(of_k),
            keys.of(of_v),
            queries.of(out),
            queries.of(lse, axis=-1),
            dlse=queries.of(dlse, axis=-1),
            **options,
            mask=lengths.band_of(mask, queries.len, keys.len),
            scores=scores and scores.of_sequence(number, queries.len, keys.len),
            **_new_sums(queries, keys, sums, of_q, of_k, of_v),
        )
        for name, rows in (("dq", queries), ("dk", keys), ("dv", keys)):
            to = sums[name]
            if to.ndim == 3 or to.shape[0] == 1:  # packed, or shared by all
                to = to if to.ndim == 3 else to[0]
                rows = _Rows(None, rows.first, rows.len)
            rows.of(to)[...] += getattr(found, name)
        if "dsinks" in sums:
            sums["dsinks"] += found.dsinks
    for name, x in sums.items():
        gradients[name][...] = x


def _new_sums(
    queries: _Rows, keys: _Rows, sums: dict[str, numpy.ndarray], q: numpy.ndarray, k: numpy.ndarray, v: numpy.ndarray
) -> dict[str, numpy.ndarray]:
    """Arrays for the gradients of one sequence, in the dtype of sums: what is added up is rounded once."""
    parts = (("dq", queries, q), ("dk", keys, k), ("dv", keys, v))
    found = {name: numpy.empty(rows.of(x).shape, sums[name].dtype) for name, rows, x in parts}
    return found | ({"dsinks": numpy.empty_like(sums["dsinks"])} if "dsinks" in sums else {})
