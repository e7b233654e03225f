"""What becomes of the scores of a tile of pairs, in array code, and the gradients of what it reads.

A tile is `(group * rows, keys)`: the query heads that share a key head are rows of one tall tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy

from ...problem.dropout import Place
from ...problem.expression.derivative import derivative
from ...problem.expression.evaluate import evaluate
from ...problem.expression.reads import axes_of
from ...problem.expression.tree import SCORE, Node, Read
from ...problem.scores import Scores
from .dropout import keeps


@dataclass(frozen=True)
class BoundScores:
    """`Scores` with the arrays of a call.

    Parameters
    ----------
    scores : Scores
    arrays : mapping
        Those of options by the names of these, in the shapes of the user; those of expressions by theirs, in `captured`.
    captured : mapping
    seed : (int, int)
        Seed and offset of dropout.
    batch : tuple of int
    heads_per_kv, heads_q, len_q, len_kv : int
    room : (int, int)
        Queries and keys that arrays of pairs have: as many, unless a sequence has fewer.
    sequence : tuple of int
        The batch element that all tiles are of, where each is computed by itself.
    """

    scores: Scores
    arrays: Mapping[str, numpy.ndarray]
    captured: Mapping[str, numpy.ndarray]
    seed: tuple[int, int]
    batch: tuple[int, ...]
    heads_per_kv: int
    heads_q: int
    len_q: int
    len_kv: int
    room: tuple[int, int]
    sequence: tuple[int, ...] = ()

    def of_sequence(self, number: int, len_q: int, len_kv: int) -> BoundScores:
        """Those of one sequence, of a batch of them."""
        return replace(self, sequence=(number,), len_q=len_q, len_kv=len_kv)

    def tile(
        self, element: tuple[int, ...], heads: slice, row: int, rows: int, keys: slice, wide: type[numpy.floating]
    ) -> TileOfScores:
        """The scores of some pairs: of a batch element, of heads, and of queries from `row` on."""
        return TileOfScores(self, (*self.sequence, *element), heads, slice(row, row + rows), keys, wide)

    def sums(self, names: tuple[str, ...], wide: type[numpy.floating]) -> dict[str, numpy.ndarray]:
        """Zeros for the gradients of what has these names."""
        return {name: numpy.zeros(self.named(name).shape, wide) for name in names}

    def named(self, name: str) -> numpy.ndarray:
        """The array that a gradient with this name is of."""
        return numpy.asarray(self.captured[name] if name in self.captured else self.arrays[name])


class TileOfScores:
    """The same of one tile; see `BoundScores.tile`."""

    def __init__(
        self, of: BoundScores, element: tuple[int, ...], heads: slice, rows: slice, keys: slice, wide: type[numpy.floating]
    ) -> None:
        self._of, self._wide = of, wide
        self._element, self._at = element, (*element, heads, rows, keys)
        self._number = int(numpy.ravel_multi_index(element, of.batch)) if element else 0
        self.shape = heads.stop - heads.start, rows.stop - rows.start, keys.stop - keys.start
        h = numpy.arange(heads.start, heads.stop)[:, None, None]
        self._names = {
            "b": numpy.asarray(self._number),
            "h": h,
            "h_kv": h // of.heads_per_kv,
            "q_idx": numpy.arange(rows.start, rows.stop)[:, None],
            "kv_idx": numpy.arange(keys.start, keys.stop),
            "q_len": numpy.asarray(of.len_q),
            "kv_len": numpy.asarray(of.len_kv),
        }

    def value(self, s: numpy.ndarray) -> numpy.ndarray:
        """What scores become, masks apart: an array of the tile's own, which may be written to."""
        scores, made = self._of.scores, s.reshape(self.shape)
        if scores.score is not None:
            made = self._evaluated(scores.score.tree, made)
        if scores.bias is not None:
            made = made + self._pairs("bias").astype(self._wide)
        if scores.alibi_slopes is not None:
            made = made - self._slopes() * self._distances()
        made = made if made.shape == self.shape else numpy.broadcast_to(made, self.shape).copy()  # which is written to
        return made.reshape(s.shape)

    def seen(self, band: numpy.ndarray | None) -> numpy.ndarray | None:
        """Which pairs take part, of those in `band`, `(group * rows, keys)`; None is all, here and there."""
        scores, seen = self._of.scores, None if band is None else band.reshape(self.shape)
        if scores.mask is not None:
            of_mask = self._evaluated(scores.mask.tree, None)
            seen = of_mask if seen is None else seen & of_mask
        if scores.mask_array is not None:
            seen = self._pairs("mask") if seen is None else seen & self._pairs("mask")
        if seen is None:
            return None
        if seen.all():
            return None
        group, rows, keys = self.shape
        return numpy.broadcast_to(seen, self.shape).reshape(group * rows, keys)

    def kept(self) -> numpy.ndarray | None:
        """Factors of the probabilities: 0 of what is dropped; None without dropout."""
        dropout = self._of.scores.dropout
        if dropout is None:
            return None
        heads, queries, keys = self._names["h"].ravel(), self._names["q_idx"].ravel(), self._names["kv_idx"]
        place = self._of.scores.place or Place(0, 0, 0, self._of.heads_q)
        of_heads = [place.head + self._number * place.heads + int(head) for head in heads]
        queries, keys = queries + place.q, keys + place.kv
        kept = numpy.stack([keeps(dropout.threshold, *self._of.seed, head, queries, keys) for head in of_heads])
        group, rows, keys = self.shape
        return numpy.where(kept, self._wide(dropout.scale), self._wide(0)).reshape(group * rows, keys)

    def to_scores(self, s: numpy.ndarray, ds: numpy.ndarray) -> numpy.ndarray:
        """The gradient with respect to scores, from that with respect to what they became."""
        expression = self._of.scores.score
        if expression is None:
            return ds
        slope = numpy.broadcast_to(self._evaluated(derivative(expression.tree, SCORE), s.reshape(self.shape)), self.shape)
        return numpy.where(ds == 0, 0, ds * slope.reshape(ds.shape))  # a slope may be infinite where nothing comes from

    def add_to(self, sums: dict[str, numpy.ndarray], s: numpy.ndarray, ds: numpy.ndarray) -> None:
        """Add what the tile gives to gradients: `ds` is that with respect to what scores became, 0 of pairs that are not seen."""
        ds, s = ds.reshape(self.shape), s.reshape(self.shape)
        captured = self._of.captured
        for read in self._of.scores.differentiable:
            if read.name in sums and read.name in captured:
                partial = self._evaluated(derivative(self._of.scores.score.tree, read), s)
                self._scatter(sums[read.name], read, s, numpy.where(ds == 0, 0, ds * partial))
        if "bias" in sums and "bias" not in captured:
            _add_reduced(sums["bias"], self._at, ds)
        if "alibi_slopes" in sums and "alibi_slopes" not in captured:
            _add_reduced(sums["alibi_slopes"], self._at[:-2], -(ds * self._distances()).sum(axis=(1, 2)))

    def _evaluated(self, tree: Node, s: numpy.ndarray | None) -> numpy.ndarray:
        return evaluate(tree, self._names | {"score": s}, self._of.captured, self._wide)

    def _pairs(self, name: str) -> numpy.ndarray:
        """The part of an array that broadcasts to all pairs, `(group, rows, keys)`."""
        array = self._of.arrays[name]
        return numpy.broadcast_to(array, (*self._of.batch, self._of.heads_q, *self._of.room))[self._at]

    def _slopes(self) -> numpy.ndarray:
        array = self._of.arrays["alibi_slopes"]
        of_heads = numpy.broadcast_to(array, (*self._of.batch, self._of.heads_q))[self._at[:-2]]
        return of_heads.astype(self._wide)[:, None, None]

    def _distances(self) -> numpy.ndarray:
        shift = self._of.len_kv - self._of.len_q
        return abs(self._names["q_idx"] + shift - self._names["kv_idx"]).astype(self._wide)

    def _scatter(self, sums: numpy.ndarray, read: Read, s: numpy.ndarray, gradient: numpy.ndarray) -> None:
        """Add the gradient of each element that was read to its place."""
        if sums.size == 0:
            return
        if not read.args:  # a scalar
            sums[...] += numpy.broadcast_to(gradient, self.shape).sum()
            return
        indices = [self._evaluated(index, s) for index in read.args]
        indices = [numpy.clip(index, 0, size - 1) for index, size in zip(indices, sums.shape)]  # as it was read
        # Along what no index moves, the sum is one element's.
        indices = [numpy.broadcast_to(index, (1,) * (3 - index.ndim) + index.shape) for index in indices]
        shape = numpy.broadcast_shapes((1, 1, 1), *(index.shape for index in indices))
        still = tuple(axis for axis in range(3) if shape[axis] == 1 != self.shape[axis])
        gradient = numpy.broadcast_to(gradient, self.shape)
        gradient = (gradient.sum(axis=still, keepdims=True) if still else gradient).astype(sums.dtype)
        coordinates = set(axes_of(read))
        shared = {None, "h_kv", *self._of.scores.free_axes}  # a packed sequence may be longer than such an axis
        if not coordinates & shared and len(coordinates) == len(read.args):  # no element is reached twice
            sums[tuple(indices)] += gradient.reshape(shape)
        else:
            numpy.add.at(sums, tuple(indices), gradient.reshape(shape))


def _add_reduced(sums: numpy.ndarray, at: tuple[int | slice, ...], gradient: numpy.ndarray) -> None:
    """Add a gradient of full axes, its part `at` of them, to sums in which some have size 1 or are not there."""
    sliced = [place for place in at if isinstance(place, slice)]
    lacking = len(at) - sums.ndim
    place: list[int | slice] = []
    for index, size in zip(at[lacking:], sums.shape):
        place.append(index if size != 1 else slice(0, 1) if isinstance(index, slice) else 0)
    # Of the axes of the gradient, which are those of slices: sum over what has size 1, and over what is not there.
    first = len(at) - len(sliced)
    for axis in range(len(sliced)):
        own = first + axis - lacking
        if own < 0 or sums.shape[own] == 1:
            gradient = gradient.sum(axis=axis, keepdims=True)
    gone = max(lacking - first, 0)
    sums[tuple(place)] += gradient.reshape(gradient.shape[gone:])
