"""What a scheme sends and holds, counted without sending: from the runs of all ranks and what sees what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..problem.layout import ITEMSIZE
from . import gathered, ring
from .blocks import Block, blocks_of, fused
from .heads import WHOLE, Portion, comes_again, groups_of, heads_of, portions_of, side_of
from .merging import Order, order_of
from .rows import common, length
from .sharding import Run
from .whole import Whole

SCHEMES = ("ulysses", "all_gather", "ring")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a rank sends and receives at once: bytes, and to and from how many ranks at most."""

    sent: int = 0
    received: int = 0
    peers: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank computes, and the exchange that is under way meanwhile, or before it.

    Parameters
    ----------
    blocks : tuple of (Block, int)
        What is computed, and for how many heads.
    exchange : Exchange
    overlaps : bool
        Whether the exchange is beneath the computation, or the computation waits for it.
    merged : int
        Bytes of results that are read and written to be merged.
    """

    blocks: tuple[tuple[Block, int], ...] = ()
    exchange: Exchange = Exchange()
    overlaps: bool = False
    merged: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Most bytes that a rank has besides inputs and results.

    Parameters
    ----------
    keys : int
        Of keys and values, and in a backward of their gradients, of other ranks, and of what is changed into heads.
    partial : int
        Of partial results.
    """

    keys: int
    partial: int

    @property
    def total(self) -> int:
        """Both."""
        return self.keys + self.partial


def steps_of(whole: Whole, scheme: str, rank: int, backward: bool = False) -> tuple[Step, ...]:
    """The steps of a rank."""
    return {"ring": _ring, "all_gather": _all_gather, "ulysses": _ulysses}[scheme](whole, rank, backward)


def sent_bytes(whole: Whole, scheme: str, rank: int, backward: bool = False) -> int:
    """Bytes of arrays that a rank sends."""
    return sum(step.exchange.sent for step in steps_of(whole, scheme, rank, backward))


def _row_bytes(whole: Whole, wide: bool = False) -> int:
    """Of a row of keys and values, or of their gradients, which are wider."""
    p = whole.problem
    batch_k, batch_v = (_product(x.shape[:-3]) for x in (whole.of_k, whole.of_v))
    size = ITEMSIZE[whole.wide if wide else p.dtype]
    return p.heads_kv * (batch_k * p.dim + batch_v * p.dim_v) * size


def _ring(whole: Whole, rank: int, backward: bool) -> tuple[Step, ...]:
    size, last = whole.size, ring.hops(whole)
    of_steps = [_fused(whole, ring.held_runs(whole, step, rank), rank) for step in range(last + 1)]
    if backward:
        first, kept = ring.own_blocks(whole, rank)
        of_steps = [first, *of_steps[1:], kept]
    steps = []
    for step, (blocks, merged) in enumerate(zip(of_steps, _merged(whole, of_steps, rank, backward, "ring"))):
        source = (rank - step) % size
        goes, comes = (), ()
        if step < last:
            goes, comes = ring.parcel(whole, source, step + 1), ring.parcel(whole, (rank - step - 1) % size, step + 1)
        sent, received = length(goes) * _row_bytes(whole), length(comes) * _row_bytes(whole)
        if backward and step > 1:  # gradients of the keys of the last step go home, and others come
            sent += length(whole.reach(rank, (source + 1) % size)) * _row_bytes(whole, wide=True)
            received += length(whole.reach((rank + step - 1) % size, rank)) * _row_bytes(whole, wide=True)
        exchange = Exchange(sent, received, ((step < last) + (backward and step > 1)) if sent or received else 0)
        steps.append(Step(tuple((block, whole.problem.heads_q) for block in blocks), exchange, True, merged))
    return tuple(steps)


def _all_gather(whole: Whole, rank: int, backward: bool) -> tuple[Step, ...]:
    row = _row_bytes(whole)
    runs = [[(run.first, run.stop) for run in runs] for runs in whole.kv_runs]
    others = [other for other in range(whole.size) if other != rank]
    mine = gathered.needs(whole, rank)
    goes = [length(common(runs[rank], gathered.needs(whole, other))) * row for other in others]
    comes = [length(common(runs[other], mine)) * row for other in others]
    blocks = _fused(whole, gathered.held_runs(whole, rank), rank)
    [merged] = _merged(whole, [blocks], rank, backward, "all_gather")
    steps = [Step((), Exchange(sum(goes), sum(comes), _some(goes, comes)))]
    steps.append(Step(tuple((block, whole.problem.heads_q) for block in blocks), merged=merged))
    if backward:
        wide = _row_bytes(whole, wide=True)
        for step in range(1, whole.size):
            owner, other = (rank - step) % whole.size, (rank + step) % whole.size
            sent, received = length(whole.reach(rank, owner)) * wide, length(whole.reach(other, rank)) * wide
            steps.append(Step((), Exchange(sent, received, int(bool(sent or received)))))
    return tuple(steps)


def _ulysses(whole: Whole, rank: int, backward: bool) -> tuple[Step, ...]:
    every = [Run(0, sum(rows), 0) for rows in (whole.rows_q, whole.rows_kv)]
    portions = portions_of(whole, backward)
    steps = [Step((), _changed(whole, rank, backward, portions[0])[0])]
    for i, portion in enumerate(portions):  # beneath each is what the next one needs, and what the last one gave
        coming = [_changed(whole, rank, backward, own)[0] for own in portions[i + 1 : i + 2]]
        going = [_changed(whole, rank, backward, own)[1] for own in portions[max(i - 1, 0) : i]]
        heads = [heads[1] - heads[0] for heads, _ in groups_of(whole, portion, rank)]
        blocks = tuple((block, number) for number in heads for block in _whole_blocks(whole, every))
        steps.append(Step(blocks, _together(coming + going), True))
    return *steps, Step((), _changed(whole, rank, backward, portions[-1])[1])


def _changed(whole: Whole, rank: int, backward: bool, portion: Portion) -> tuple[Exchange, Exchange]:
    """What a rank sends and receives so that rows become heads, and so that heads become rows again."""
    p, others = whole.problem, [other for other in range(whole.size) if other != rank]
    size, wide, batch = ITEMSIZE[p.dtype], ITEMSIZE[whole.wide], _product(whole.batch)
    batch_q, batch_k, batch_v = (_product(x.shape[:-3]) for x in (whole.of_q, whole.of_k, whole.of_v))
    inputs = [(batch_q * p.dim * size, False), (batch_k * p.dim * size, True), (batch_v * p.dim_v * size, True)]
    results = [(batch * p.dim_v * size, False), (batch * wide, False)]
    if backward:
        inputs += [*results, (batch * p.dim_v * size, False)] + [(batch * wide, False)] * whole.has_dlse
        of_keys = wide if side_of(whole, True).shared else size  # several ranks add to a head
        results = [(batch_q * p.dim * size, False), (batch_k * p.dim * of_keys, True), (batch_v * p.dim_v * of_keys, True)]

    def exchange(arrays: list[tuple[int, bool]]) -> tuple[int, int]:
        """What goes and comes where rows of arrays become heads: of each the bytes of a row of a head, and whether of keys."""
        sent = received = 0
        for elements, of_keys in arrays:
            if comes_again(whole, of_keys, portion):
                continue
            rows, heads = whole.rows_kv if of_keys else whole.rows_q, side_of(whole, of_keys, portion).heads
            sent += elements * rows[rank] * sum(heads[other][1] - heads[other][0] for other in others)
            received += elements * (heads[rank][1] - heads[rank][0]) * sum(rows[other] for other in others)
        return sent, received

    both = exchange(inputs), exchange(results)[::-1]
    there, back = (Exchange(*sizes, len(others) * any(sizes)) for sizes in both)
    return there, back


def _together(exchanges: list[Exchange]) -> Exchange:
    """Exchanges beneath the same computation, as one."""
    return Exchange(*(sum(getattr(own, name) for own in exchanges) for name in ("sent", "received", "peers")))


def _fused(whole: Whole, keys: Sequence[Run], rank: int) -> list[Block]:
    return fused(whole.blocks(keys, rank), whole.movable)


def _order(whole: Whole, of_steps: Sequence[Sequence[Block]], rank: int, backward: bool, scheme: str) -> Order:
    """In which order the results of blocks, or the gradients of their queries, become those of this rank."""
    parts = [block.rows for blocks in of_steps for block in blocks]
    sinks = not backward and whole.problem.sinks is not None
    adds = backward and scheme == "ring" and whole.narrow
    return order_of(parts, whole.rows_q[rank], [True] * len(parts), whole.narrow and not sinks, adds)


def _merged(whole: Whole, of_steps: Sequence[Sequence[Block]], rank: int, backward: bool, scheme: str) -> list[int]:
    """Bytes that merging reads and writes in each step, on a device."""
    p, order, found, after = whole.problem, _order(whole, of_steps, rank, backward, scheme), [], 0
    row = p.heads_q * _product(whole.batch) * (p.dim if backward else p.dim_v)
    size, wide = ITEMSIZE[p.dtype], ITEMSIZE[whole.wide]
    sinks = not backward and p.sinks is not None
    of = {"": 0, "out": wide if sinks else ITEMSIZE[p.dtype], "sum": wide}
    for blocks in of_steps:
        own = slice(after, after + len(blocks))
        after = own.stop
        each = [
            (merge.rows[1] - merge.rows[0]) * (of[merge.base] + len(merge.parts) * wide + of[merge.into])
            for merges in order.after[own] for merge in merges
        ]  # fmt: skip
        # Gradients that come with parts are float32 as well, if they are alone.
        rounded = [rows[1] - rows[0] for rows, place in zip(order.rows[own], order.places[own]) if place == "out"]
        added = [rows[1] - rows[0] for rows, is_added in zip(order.rows[own], order.added[own]) if is_added]
        found.append(row * (sum(each) + sum(added) * wide + _has_parts(whole, backward) * sum(rounded) * (wide + size)))
    if sinks:  # which are merged with all, which then is of the dtype of results
        found[-1] += row * whole.rows_q[rank] * (3 * wide + ITEMSIZE[p.dtype])
    return found


def _has_parts(whole: Whole, backward: bool) -> bool:
    """Whether gradients of keys come in parts, so that each call leaves float32."""
    return backward and whole.narrow and whole.size > 1


def _whole_blocks(whole: Whole, every: list[Run]) -> list[Block]:
    return blocks_of(whole.spans, every[:1], every[1:])


def memory_of(whole: Whole, scheme: str, rank: int, backward: bool = False) -> Memory:
    """What a rank holds besides inputs and results."""
    row, wide = _row_bytes(whole), _row_bytes(whole, wide=True)
    if scheme == "ulysses":
        there, back = _changed(whole, rank, backward, WHOLE)
        mine = there.received * whole.size // max(whole.size - 1, 1)
        results = back.sent * whole.size // max(whole.size - 1, 1)
        sums = 0
        if backward and side_of(whole, True).shared:
            # Gradients of queries are in float32 first, as those of keys are.
            (first, stop), p = heads_of(whole, rank), whole.problem
            of_queries = whole.narrow * (stop - first) * sum(whole.rows_q) * p.dim * _product(whole.of_q.shape[:-3])
            sums = whole.rows_kv[rank] * wide + of_queries * ITEMSIZE[whole.wide]
        return Memory(mine + there.sent, results + back.received + sums)
    of_steps = [[block for block, _ in step.blocks] for step in steps_of(whole, scheme, rank, backward)]
    partial = _partial(whole, of_steps, rank, backward, scheme)
    # Gradients of this rank's own keys, where results are narrower: of a call, and the sum of them.
    sums = backward * whole.narrow * whole.rows_kv[rank] * wide
    if scheme == "all_gather":
        keys = length(gathered.needs(whole, rank)) if whole.size > 1 else 0
        given = sum(block.keys[1] - block.keys[0] for blocks in of_steps for block in blocks) * wide
        home = max((length(whole.reach(rank, owner)) for owner in range(whole.size) if owner != rank), default=0)
        received = max((length(whole.reach(other, rank)) for other in range(whole.size) if other != rank), default=0)
        return Memory(max(keys * row, backward * (home + received) * wide) + backward * given, partial + sums)
    parcels = [length(ring.parcel(whole, (rank - step) % whole.size, step)) for step in range(1, ring.hops(whole) + 1)]
    pairs = [a + b for a, b in zip(parcels, [*parcels[1:], 0])]
    own = parcels[0] if parcels else 0
    home = max((length(whole.reach(rank, source)) for source in range(whole.size) if source != rank), default=0)
    # At first its own rows, copied where they do not lie so that they can be sent, and what comes.
    return Memory(max([2 * own, *pairs], default=0) * row + backward * 3 * home * wide, partial + sums)


def _partial(whole: Whole, of_steps: Sequence[Sequence[Block]], rank: int, backward: bool, scheme: str) -> int:
    """Bytes of results that wait to be merged, of a sum of them that is wider, and of a result that is wider than what is given."""
    p, order = whole.problem, _order(whole, of_steps, rank, backward, scheme)
    sinks = not backward and p.sinks is not None and whole.narrow
    # Gradients that are alone are in memory of their own first, if others of the same call are parts.
    rounded = _has_parts(whole, backward) * order.alone
    sums = (order.sums and whole.narrow) or sinks
    rows = order.waiting + rounded + sums * whole.rows_q[rank]
    return p.heads_q * _product(whole.batch) * (p.dim if backward else p.dim_v) * rows * ITEMSIZE[whole.wide]


def _some(*sides: list[int]) -> int:
    return max(sum(x > 0 for x in side) for side in sides)


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
