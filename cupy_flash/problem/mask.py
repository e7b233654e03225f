"""Which keys each query sees: a frozen `Mask`, which references, planner and kernels ask, and nothing else knows.

A query sees an interval of keys, whose ends do not fall from one query to the next. So what several rows see follows from the first
and the last of them, here and in ``kernels_cu/tile/mask.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy

UNBOUNDED = 1 << 30  # lengths stay below, so that a row plus a bound fits 32 bits
MANY_KEYS = 1 << 24  # more than a sequence usually has room for


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that each query sees.

    Query `i` sees the keys `j` with `i + left <= j <= i + right`, where None is unbounded: causality, window and anchor in one.
    The first `prefix` keys are seen by all. An end that hides no pair is None, and a prefix that shows none is 0, so that they cost
    nothing.

    Parameters
    ----------
    len_q, len_kv : int
        Rows and keys.
    left, right : int or None
        ``left <= right``: a query sees a key, unless its keys lie before the first one or behind the last.
    prefix : int
        0 unless `left` is None: a query would see two intervals.
    queries : int or None
        None if every row is a query. If heads share tiles, the queries of each: one head's rows follow another's, and row `i` sees
        what query ``i % queries`` does.
    """

    len_q: int
    len_kv: int
    left: int | None = None
    right: int | None = None
    prefix: int = 0
    queries: int | None = None

    def __str__(self) -> str:
        first = "0" if self.left is None else f"i{self.left:+d}"
        last = str(self.len_kv - 1) if self.right is None else f"i{self.right:+d}"
        last = f"max({last}, {self.prefix - 1})" if self.prefix else last
        return f"query i sees keys {first} ... {last}"

    @property
    def kind(self) -> str:
        """What a kernel is compiled for: one of `MaskKind` in ``kernels_cu/config.cuh``."""
        return "PREFIX" if self.prefix else "BAND"

    @property
    def told(self) -> dict[str, int]:
        """What a kernel is told when it runs: fields of `MaskParams` in ``kernels_cu/params.cuh``."""
        begin, end = self._edges
        return {"left": begin.shift, "right": end.shift - 1, "prefix": self.prefix}

    @property
    def _edges(self) -> tuple[Edge, Edge]:
        """The first key that a query sees, and the one behind the last: equal if it sees none."""
        begin = -UNBOUNDED if self.left is None else self.left
        end = UNBOUNDED if self.right is None else self.right
        return Edge(begin, 0, self.len_kv), Edge(end + 1, min(self.prefix, self.len_kv), self.len_kv)

    def cut(self, first: int, stop: int) -> Mask:
        """The same mask of the keys from `first` to before `stop`, which are counted from 0 then."""
        left, right = (None if end is None else end - first for end in (self.left, self.right))
        prefix = max(self.prefix - first, 0)
        return replace(self, len_kv=stop - first, left=left, right=right, prefix=prefix).simplified()

    def simplified(self) -> Mask:
        """The same mask without ends that hide nothing."""
        left, right = self.left if self.hides_first else None, self.right if self.hides_last else None
        prefix = self.prefix if right is not None and right + 1 < self.prefix else 0
        return replace(self, left=left, right=right, prefix=prefix)

    # What follows from these.

    def some(self, row: int, rows: int) -> tuple[int, int]:
        """The first key that any of some rows sees, and the one behind the last."""
        first, last = self._of_rows(row, rows)
        begin, end = self._edges
        return begin.of(first), end.of(last)

    def all(self, row: int, rows: int) -> tuple[int, int]:
        """The same of the keys that each of these rows sees."""
        first, last = self._of_rows(row, rows)
        begin, end = self._edges
        return begin.of(last), end.of(first)

    def visible(self, row: int, rows: int, col: int, cols: int) -> numpy.ndarray:
        """Which of some rows sees which of some keys, as booleans of shape ``(rows, cols)``."""
        queries = numpy.arange(row, row + rows)
        begin, end = (edge.of(queries if self.queries is None else queries % self.queries)[:, None] for edge in self._edges)
        keys = numpy.arange(col, col + cols)
        return (begin <= keys) & (keys < end)

    def tiles_of_keys(self, tile_q: int, tile_kv: int) -> numpy.ndarray:
        """How many tiles of `tile_kv` keys each tile of `tile_q` rows visits, at least one."""
        first_row = numpy.arange(0, self.len_q, tile_q)
        last_row = numpy.minimum(first_row + tile_q, self.len_q) - 1
        begin, end = self._edges
        first = begin.of(first_row).clip(max=self.len_kv - 1) // tile_kv
        last = (end.of(last_row) - 1).clip(min=0) // tile_kv
        return numpy.maximum(last - first + 1, 1)

    def tiles_of_queries(self, tile_kv: int, tile_q: int) -> numpy.ndarray:
        """How many tiles of `tile_q` queries each tile of `tile_kv` keys is seen by, at least one."""
        left, right = (None if end is None else -end for end in (self.right, self.left))
        tiles = Mask(self.len_kv, self.len_q, left, right).tiles_of_keys(tile_kv, tile_q)
        tiles[: -(-self.prefix // tile_kv)] = max(-(-self.len_q // tile_q), 1)
        return tiles

    @property
    def hides_first(self) -> bool:
        """Whether the first key is hidden from some query, and so from the last one."""
        queries = self._number_of_queries
        return queries > 0 and self._edges[0].of(queries - 1) > 0

    @property
    def hides_last(self) -> bool:
        """Whether the last key is hidden from some query, and so from the first one."""
        return self._number_of_queries > 0 and self._edges[1].of(0) < self.len_kv

    @property
    def shape(self) -> str:
        """'full': nothing is hidden; 'causal': later queries see more keys; 'window': some do not see the first key."""
        return "window" if self.hides_first else "causal" if self.hides_last else "full"

    @property
    def pairs(self) -> int:
        """How many pairs of a row and a key see each other."""
        queries = self._number_of_queries
        begin, end = (edge.total(queries) for edge in self._edges)
        return (end - begin) * (self.len_q // max(queries, 1))

    @property
    def _number_of_queries(self) -> int:
        return self.len_q if self.queries is None else self.queries

    def _of_rows(self, row: int, rows: int) -> tuple[int, int]:
        """The first and the last query that some rows may be."""
        if self.queries is None:
            return row, row + rows - 1
        return (row % self.queries,) * 2 if rows == 1 else (0, self.queries - 1)


@dataclass(frozen=True, slots=True)
class Edge:
    """A key for each query: ``query + shift``, but at least `low` and at most `high`."""

    shift: int
    low: int
    high: int

    def of(self, query: int | numpy.ndarray) -> int | numpy.ndarray:
        """The key of a query, or of several."""
        if isinstance(query, numpy.ndarray):
            return (query + self.shift).clip(self.low, self.high)
        return min(max(query + self.shift, self.low), self.high)

    def total(self, queries: int) -> int:
        """The sum over so many queries."""
        rising = range(max(self.low - self.shift, 0), min(max(self.high - self.shift, 0), queries))  # those it is not cut for
        if not rising:
            return queries * self.of(0)
        above = queries - rising.stop
        return rising.start * self.low + len(rising) * (2 * self.shift + rising.start + rising.stop - 1) // 2 + above * self.high


def band(
    len_q: int,
    len_kv: int,
    causal: bool | str,
    window: tuple[int | None, int | None],
    prefix: int = 0,
    top_left: bool = False,
) -> Mask:
    """The mask of these options: keys near a diagonal, which ends at the last key, or with 'top_left' begins at the first one.

    `top_left` is for a window alone, since `causal` says where it is anchored itself.
    """
    shift = 0 if _at_first(causal, top_left) else len_kv - len_q
    left, right = window
    if causal:
        right = 0
    left, right = None if left is None else shift - left, None if right is None else shift + right
    return Mask(len_q, len_kv, left, right, prefix).simplified()


def _at_first(causal: bool | str, top_left: bool) -> bool:
    """Whether a mask is anchored at the first query and the first key."""
    return causal == "top_left" or (top_left and not causal)


def moving_band(
    len_q: int,
    len_kv: int,
    causal: bool | str,
    window: tuple[int | None, int | None],
    prefix: int = 0,
    top_left: bool = False,
) -> tuple[Mask, bool]:
    """The mask of these options for sequences of at most these lengths, and whether it moves with them.

    Its ends are those of a sequence of as many queries as keys. In another one they lie ``len_kv - len_q`` further if it moves.
    """
    moves = not _at_first(causal, top_left)
    left, right = window
    if causal:
        right = 0
    # An end beyond all that any sequence has hides nothing. Of keys that is not how many there is room for here, because the
    # kernel, and with it the bits of results, would depend on it.
    keys = max(len_kv, MANY_KEYS)
    if left is not None and left >= (keys if moves else len_q) - 1:
        left = None
    if right is not None and right >= (len_q if moves else keys) - 1:
        right = None
    return Mask(len_q, len_kv, None if left is None else -left, right, prefix if right is not None else 0), moves
