"""Blocks of pairs of queries and keys: what one call on one device computes, of ranks that have parts of sequences.

A mask is an interval of keys for each query, in places of the sequence. Of a block it is again one, moved, and once the rows and
the keys that see nothing are cut off, it is a window anchored at the first query and the first key, which is an option of a call.
So masks need no positions in kernels. What else depends on positions is told by numbers, see `places`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..problem.mask import Mask
from .sharding import Run

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence within what is packed, or all there is.

    Parameters
    ----------
    number : int
    q, kv : (int, int)
        Its queries and keys, as positions in what is packed.
    mask : Mask
        In places of the sequence.
    """

    number: int
    q: Interval
    kv: Interval
    mask: Mask


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries and some keys of a sequence, and which see each other.

    Parameters
    ----------
    span : Span
    rows : (int, int)
        The queries, as rows of what this rank has.
    keys : (int, int)
        The keys, as rows of where they lie.
    q_from, kv_from : int
        The place in the sequence of the first of each.
    window : (int or None, int or None)
        How many keys before and behind its own row a query sees, both counted from the first of the block.
    prefix : int
        Keys of the block that all its queries see.
    """

    span: Span
    rows: Interval
    keys: Interval
    q_from: int
    kv_from: int
    window: tuple[int | None, int | None]
    prefix: int

    @property
    def whole(self) -> bool:
        """Whether all its queries see all its keys."""
        return self.window == (None, None)

    @property
    def mask(self) -> Mask:
        """The mask of the block, its rows and keys counted from 0."""
        left, right = self.window
        return Mask(self.rows[1] - self.rows[0], self.keys[1] - self.keys[0], None if left is None else -left, right, self.prefix)

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key see each other."""
        return self.mask.pairs


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of whole sequences that lie one behind the other, which one call for packed sequences computes.

    Parameters
    ----------
    blocks : tuple of Block
    """

    blocks: tuple[Block, ...]

    @property
    def span(self) -> Span:
        """The first sequence."""
        return self.blocks[0].span

    @property
    def kv_from(self) -> int:
        """The place of the first key in it."""
        return 0

    @property
    def rows(self) -> Interval:
        """All queries, as rows of what this rank has."""
        return self.blocks[0].rows[0], self.blocks[-1].rows[1]

    @property
    def keys(self) -> Interval:
        """All keys, as rows of where they lie."""
        return self.blocks[0].keys[0], self.blocks[-1].keys[1]

    @property
    def offsets(self) -> dict[str, list[int]]:
        """Where each sequence begins in these, and where the last one ends, by the options that say so."""
        sides = {"cu_seqlens_q": [block.rows for block in self.blocks], "cu_seqlens_kv": [block.keys for block in self.blocks]}
        return {name: [0, *(stop - ends[0][0] for _, stop in ends)] for name, ends in sides.items()}


def grouped(blocks: Iterable[Block]) -> list[Block | Group]:
    """The blocks, those of neighbouring whole sequences in groups: with many short ones, few calls."""
    found: list[list[Block]] = []
    for block in blocks:
        last = found[-1][-1] if found else None
        if last is not None and _whole_span(last) and _whole_span(block) and _follows(last, block):
            found[-1].append(block)
        else:
            found.append([block])
    return [Group(tuple(several)) if len(several) > 1 else several[0] for several in found]


def _whole_span(block: Block) -> bool:
    pairs = (block.rows, block.span.q), (block.keys, block.span.kv)
    return all(own[1] - own[0] == span[1] - span[0] for own, span in pairs)


def _follows(a: Block, b: Block) -> bool:
    return a.span.number + 1 == b.span.number and a.rows[1] == b.rows[0] and a.keys[1] == b.keys[0]


def blocks_of(spans: Iterable[Span], q_runs: Sequence[Run], kv_runs: Sequence[Run]) -> list[Block]:
    """The blocks of all pairs that see each other, in a fixed order: by query runs, sequences, then keys."""
    spans = tuple(spans)
    return [
        block
        for q_run in q_runs
        for span in _within(spans, q_run)
        for kv_run in kv_runs
        for block in _blocks(span, q_run, kv_run)
    ]


def fused(blocks: Sequence[Block], movable: bool) -> list[Block]:
    """The blocks, neighbours that one call can compute made one.

    These are blocks of the same rows, of which the first one's keys lie before those of the other one and are seen whole; and
    blocks of the same keys, seen whole by neighbouring rows. Rows and keys of one may then be apart in the sequence, so it is only
    done where nothing asks for places.
    """
    if not movable:
        return list(blocks)
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and last.span == block.span and last.whole and _meets(last, block):
            found[-1] = _joined(last, block)
        else:
            found.append(block)
    # Rows of which the keys are one by now.
    rows: list[Block] = []
    for block in found:
        last = rows[-1] if rows else None
        same = last is not None and last.span == block.span and last.keys == block.keys and last.rows[1] == block.rows[0]
        if same and last.whole and block.whole:
            rows[-1] = replace(last, rows=(last.rows[0], block.rows[1]))
        else:
            rows.append(block)
    return rows


def _meets(a: Block, b: Block) -> bool:
    return a.rows == b.rows and a.keys[1] == b.keys[0] and b.window[0] is None and not b.prefix


def _joined(a: Block, b: Block) -> Block:
    right = b.window[1]
    window = None, None if right is None else right + a.keys[1] - a.keys[0]
    return replace(a, keys=(a.keys[0], b.keys[1]), window=window)


def seen_keys(spans: Iterable[Span], q_runs: Sequence[Run], kv_run: Run) -> Interval | None:
    """The rows of a run of keys that some of the queries see: from the first to behind the last; None if they see none."""
    keys = [block.keys for block in blocks_of(spans, q_runs, [kv_run])]
    return (min(start for start, _ in keys), max(stop for _, stop in keys)) if keys else None


def _within(spans: Sequence[Span], q_run: Run) -> Iterator[Span]:
    return (span for span in spans if span.q[0] < q_run.stop and q_run.first < span.q[1])


def _blocks(span: Span, q_run: Run, kv_run: Run) -> Iterator[Block]:
    q0, q1 = max(q_run.first, span.q[0]), min(q_run.stop, span.q[1])
    k0, k1 = max(kv_run.first, span.kv[0]), min(kv_run.stop, span.kv[1])
    if q0 >= q1 or k0 >= k1:
        return
    q_from, kv_from = q0 - span.q[0], k0 - span.kv[0]
    row, key = q_run.row + q0 - q_run.first, kv_run.row + k0 - kv_run.first
    for rows, keys, window, prefix in _cut(span.mask, q_from, q1 - q0, kv_from, k1 - k0):
        yield Block(
            span,
            (row + rows[0], row + rows[1]),
            (key + keys[0], key + keys[1]),
            q_from + rows[0],
            kv_from + keys[0],
            window,
            prefix,
        )


Cut = tuple[Interval, Interval, tuple[int | None, int | None], int]


def _cut(mask: Mask, q_from: int, rows: int, kv_from: int, keys: int) -> Iterator[Cut]:
    """What is seen of a block, without rows and keys that see nothing: one part, or two if a prefix lies before a gap."""
    by = q_from - kv_from
    left, right = (None if end is None else end + by for end in (mask.left, mask.right))
    prefix = min(max(mask.prefix - kv_from, 0), keys)
    first = 0
    if prefix and right is not None and right < 0:  # the first rows see nothing but the prefix, and are cut off from the rest
        yield (0, rows), (0, prefix), (None, None), 0
        first, prefix = prefix, 0
    row0 = max(0, -right + first) if right is not None else 0
    row1 = min(rows, keys - left) if left is not None else rows
    if row0 >= row1:
        return
    key0 = max(first, left + row0) if left is not None else first
    key1 = min(keys, max(row1 + right, prefix)) if right is not None else keys
    if key0 >= key1:
        return
    by = row0 - key0
    before = None if left is None or left + by <= 1 - (row1 - row0) else -(left + by)
    behind = None if right is None or right + by >= key1 - key0 - 1 else right + by
    yield (row0, row1), (key0, key1), (before, behind), prefix if behind is not None and prefix > behind + 1 else 0
