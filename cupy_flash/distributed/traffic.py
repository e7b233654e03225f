"""What a scheme sends and holds, counted without sending: from the runs of all ranks and what sees what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..problem.layout import ITEMSIZE
from . import gathered, ring, ulysses
from .blocks import Block, blocks_of, fused
from .rows import behind_each_other, common, length
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
        Elements of results that are added to sums.
    stored : int
        Elements of sums that become results of a narrower dtype.
    """

    blocks: tuple[tuple[Block, int], ...] = ()
    exchange: Exchange = Exchange()
    overlaps: bool = False
    merged: int = 0
    stored: int = 0


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
    p, size, last = whole.problem, whole.size, ring.hops(whole)
    width = p.dim if backward else p.dim_v
    steps = []
    for step in range(last + 1):
        source = (rank - step) % size
        own = [(run.first, run.stop) for run in whole.kv_runs[rank]]
        blocks = fused(whole.blocks(behind_each_other(ring.parcel(whole, source, step) if step else own), rank), whole.movable)
        goes, comes = (), ()
        if step < last:
            goes, comes = ring.parcel(whole, source, step + 1), ring.parcel(whole, (rank - step - 1) % size, step + 1)
        sent, received = length(goes) * _row_bytes(whole), length(comes) * _row_bytes(whole)
        if backward and step:  # gradients of these keys go home, and others come
            sent += length(whole.reach(rank, source)) * _row_bytes(whole, wide=True)
            received += length(whole.reach((rank + step) % size, rank)) * _row_bytes(whole, wide=True)
        exchange = Exchange(sent, received, (1 + (backward and step > 0)) if sent or received else 0)
        rows = sum(block.rows[1] - block.rows[0] for block in blocks)
        merged = rows * p.heads_q * width * _product(whole.batch)
        stored = (step == last) * _stored(whole, rank, width)
        steps.append(Step(tuple((block, p.heads_q) for block in blocks), exchange, True, merged, stored))
    return tuple(steps)


def _all_gather(whole: Whole, rank: int, backward: bool) -> tuple[Step, ...]:
    p, row = whole.problem, _row_bytes(whole)
    runs = [[(run.first, run.stop) for run in runs] for runs in whole.kv_runs]
    others = [other for other in range(whole.size) if other != rank]
    mine = gathered.needs(whole, rank)
    goes = [length(common(runs[rank], gathered.needs(whole, other))) * row for other in others]
    comes = [length(common(runs[other], mine)) * row for other in others]
    keys = behind_each_other(mine) if whole.size > 1 else whole.kv_runs[rank]
    blocks = fused(whole.blocks(keys, rank), whole.movable)
    steps = [Step((), Exchange(sum(goes), sum(comes), _some(goes, comes)))]
    merged = stored = 0
    if backward or not _once(whole, rank):
        rows = sum(block.rows[1] - block.rows[0] for block in blocks)
        merged = rows * p.heads_q * (p.dim if backward else p.dim_v) * _product(whole.batch)
        stored = _stored(whole, rank, p.dim if backward else p.dim_v)
    steps.append(Step(tuple((block, p.heads_q) for block in blocks), merged=merged, stored=stored))
    if backward:
        wide = _row_bytes(whole, wide=True)
        for step in range(1, whole.size):
            owner, other = (rank - step) % whole.size, (rank + step) % whole.size
            sent, received = length(whole.reach(rank, owner)) * wide, length(whole.reach(other, rank)) * wide
            steps.append(Step((), Exchange(sent, received, int(bool(sent or received)))))
    return tuple(steps)


def _ulysses(whole: Whole, rank: int, backward: bool) -> tuple[Step, ...]:
    p, others = whole.problem, [other for other in range(whole.size) if other != rank]
    size, wide, batch = ITEMSIZE[p.dtype], ITEMSIZE[whole.wide], _product(whole.batch)
    batch_q, batch_k, batch_v = (_product(x.shape[:-3]) for x in (whole.of_q, whole.of_k, whole.of_v))

    def row(of: int, of_keys: bool, elements: int) -> int:
        first, stop = (ulysses.key_heads_of if of_keys else ulysses.heads_of)(whole, of)
        return (stop - first) * elements

    def to_heads(elements: int, of_keys: bool) -> tuple[int, int]:
        rows = whole.rows_kv if of_keys else whole.rows_q
        sent = sum(rows[rank] * row(other, of_keys, elements) for other in others)
        return sent, sum(rows[other] * row(rank, of_keys, elements) for other in others)

    inputs = [(batch_q * p.dim * size, False), (batch_k * p.dim * size, True), (batch_v * p.dim_v * size, True)]
    results = [(batch * p.dim_v * size, False), (batch * wide, False)]
    if backward:
        inputs += [*results, (batch * p.dim_v * size, False)] + [(batch * wide, False)] * whole.has_dlse
        results = [(batch_q * p.dim * wide, False), (batch_k * p.dim * wide, True), (batch_v * p.dim_v * wide, True)]
    goes, comes = zip(*(to_heads(*item) for item in inputs))
    back, home = zip(*(to_heads(*item)[::-1] for item in results))
    every = [Run(0, sum(rows), 0) for rows in (whole.rows_q, whole.rows_kv)]
    heads = [heads[1] - heads[0] for heads, _ in ulysses.even_groups(whole, rank)]
    blocks = tuple((block, number) for number in heads for block in _whole_blocks(whole, every))
    peers = len(others)
    return (
        Step((), Exchange(sum(goes), sum(comes), peers * bool(sum(goes) + sum(comes)))),
        Step(blocks),
        Step((), Exchange(sum(back), sum(home), peers * bool(sum(back) + sum(home)))),
    )


def _stored(whole: Whole, rank: int, width: int) -> int:
    narrower = ITEMSIZE[whole.problem.dtype] < ITEMSIZE[whole.wide]
    return narrower * whole.rows_q[rank] * whole.problem.heads_q * width * _product(whole.batch)


def _once(whole: Whole, rank: int) -> bool:
    return whole.problem.sinks is None and gathered.once(whole, rank)


def _whole_blocks(whole: Whole, every: list[Run]) -> list[Block]:
    return blocks_of(whole.spans, every[:1], every[1:])


def memory_of(whole: Whole, scheme: str, rank: int, backward: bool = False) -> Memory:
    """What a rank holds besides inputs and results."""
    p, row, wide = whole.problem, _row_bytes(whole), _row_bytes(whole, wide=True)
    rows_q, batch = whole.rows_q[rank], _product(whole.batch)
    narrow = ITEMSIZE[p.dtype] < ITEMSIZE[whole.wide]
    size = ITEMSIZE[whole.wide if whole.widens else p.dtype]
    sums = backward * narrow * whole.rows_kv[rank] * wide  # of gradients, where results are narrower
    if scheme == "ulysses":
        steps = _ulysses(whole, rank, backward)
        mine = steps[0].exchange.received * whole.size // max(whole.size - 1, 1)
        results = steps[-1].exchange.sent * whole.size // max(whole.size - 1, 1)
        return Memory(mine + steps[0].exchange.sent, results + steps[-1].exchange.received + sums)
    width = p.dim if backward else p.dim_v
    # A partial result of the tallest block, and the sum of them where it is wider than the result.
    tallest = max((block.rows[1] - block.rows[0] for block in _blocks(whole, scheme, rank)), default=0)
    alone = scheme == "all_gather" and not backward and _once(whole, rank)
    # On a device two results wait for each other, see `Partial`.
    held = 1 if alone or p.backend == "numpy" else 2
    sum_bytes = 0 if alone else rows_q * ITEMSIZE[whole.wide] * narrow
    partial = p.heads_q * batch * width * (held * tallest * size + sum_bytes) + sums
    if scheme == "all_gather":
        keys = length(gathered.needs(whole, rank)) if whole.size > 1 else 0
        home = max((length(whole.reach(rank, owner)) for owner in range(whole.size) if owner != rank), default=0)
        return Memory(keys * row + backward * (keys + 2 * home) * wide, partial)
    parcels = [length(ring.parcel(whole, (rank - step) % whole.size, step)) for step in range(1, ring.hops(whole) + 1)]
    pairs = [a + b for a, b in zip(parcels, [*parcels[1:], 0])]
    own = parcels[0] if parcels else 0
    home = max((length(whole.reach(rank, source)) for source in range(whole.size) if source != rank), default=0)
    # At first its own rows, copied where they do not lie so that they can be sent, and what comes.
    return Memory(max([2 * own, *pairs], default=0) * row + backward * 3 * home * wide, partial)


def _blocks(whole: Whole, scheme: str, rank: int) -> Iterable[Block]:
    return (block for step in steps_of(whole, scheme, rank) for block, _ in step.blocks)


def _some(*sides: list[int]) -> int:
    return max(sum(x > 0 for x in side) for side in sides)


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


