"""Which blocks of a backward own which keys, in which order they start, and who makes dq of their sums: pure functions."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.mask import Mask
from .kernel import Config, KernelPlan
from .makespan import makespan
from .schedule import L2_BYTES
from .sequences import elements_of, is_packed, mean_room, tiles_of

HALF_KERNELS = ("bwd_hopper", "bwd_hopper_wide")  # for sm_90a, of 16 bits
MLA = "bwd_hopper_mla"  # of these, for keys wider than values
HOPPER_KERNELS = (*HALF_KERNELS, MLA, "bwd_hopper_parts")  # and of float32 in parts of these
WARP_ROWS = 16  # of dq, that a warp stores at once
FEWEST_BLOCKS = 2 * 132  # of bwd_v2, two for each multiprocessor of an H200, see heads_per_block
BEGINNING, ADDING = 3, 4  # steps that a block takes to begin and to end, and that gradients take which are added up afterwards
MANY = 8  # blocks for each multiprocessor, see _fastest
MOST_APART = 4  # query heads, see _most_heads
NARROW, LONG_IN_ORDER = 64, 1 << 18  # columns, and elements of a head's queries, see _most_heads
HOPPER_BLOCKS_TOGETHER = 256  # about as many, see heads_together
LAST_BLOCKS = 256  # the same, see _last_blocks
ROW = 36  # keys of a query whose products take a block as long as one row of dq, as measured on an H200
FEW_TILES = 8  # of keys: blocks that add in order are apart only if more heads alternate, see heads_together
CLEARING_BLOCKS = 200  # that start between those of a head and those that clear what it leaves
MOST_ROWS_REUSED = 2048  # of dq, whose sums are used again
MOST_HEADS_COUNTED = 32  # by one warp, see count_block
ROWS_WORTH_SHARING = 2048  # of dq, of a sequence, see make_grouping
LENGTH_OF_MANY = 4096  # of sequences of their own lengths: they have the tiles, and heads together, of so many rows
IN_ORDER_BYTES = L2_BYTES // 4  # see _heads_in_order
MOST_TOGETHER = 16  # heads, of few tiles, and half as many of more
RUNNING = 132  # blocks of a Hopper kernel at once, one for each multiprocessor of an H200
BLOCKS_TOGETHER = 1024  # a few times as many as run at once, see heads_together


@dataclass(frozen=True, slots=True)
class Grouping:
    """What the blocks of the second grid are for, in the order in which they start.

    Heads are taken in turn in groups, counted by the query heads of a block.
    """

    heads_per_block: int  # query heads whose gradients of keys a block sums up
    heads_together: int  # of a group, see `heads_together`
    blocks: int  # of a group
    owners: int  # blocks that own keys
    accum_heads: int  # query heads that have sums at a time; the next ones use them again
    finishing: int = 0  # blocks behind those that work at them, which turn the sums of the last heads into dq
    last_heads: int = 0  # the first query head of those, counted over all batch elements
    reused: int = 0  # query heads before this one leave their sums to others
    cleared_after: int = 0  # which blocks of so many heads later clear
    backwards: int = 0  # query heads before this one are added to from the last keys to the first
    first_tiles: int = 0  # blocks that come before all others, and have the first keys of each head
    heads_ahead: int = 0  # STATS_AHEAD, ZEROS_AHEAD: blocks of a head make statistics, or zeros, of the head so many later
    makers: int = 0  # of packed sequences, the key tiles of a head whose blocks do


def make_grouping(plan: KernelPlan, problem: BackwardProblem) -> Grouping:
    """Deal out the keys of all heads, and what is left to do for dq.

    When all keys of a head have been worked at, its last block finishes dq, and others go on with the next heads. Behind the last
    heads there is nothing to go on with, so that all multiprocessors share that work. So it is with sequences of their own lengths,
    each of which has sums of its own, if blocks go through heads in the order in which queries lie: both sides packed, or none.
    Of short sequences there are many, and few rows that a last block makes: other blocks at the end would take longer than these.

    Short heads leave their sums to others that are some groups behind, so that they stay in the L2 cache; half way between them,
    blocks of a third head clear them. Of long heads, the last block takes so long that others would wait for it, and so would they
    for shorter ones whose longest blocks come last. bwd_hopper_wide was slower with it, and has no code for it.

    Of masks with lists of tiles, many show the first keys to all queries and others to few. A head's block of first keys is then
    longer than all others, and the last heads' would begin near the end: so they come first, wherever no block waits for others.
    """
    p = problem.forward
    per_block, together, tiles = heads_per_block(plan, problem), heads_together(plan, problem), key_tiles(plan, problem)
    together = max(together // plan.config.CLUSTER, 1)
    heads = p.heads_q * elements_of(p, "q")
    group, blocks = together * per_block, together * tiles
    owners = p.heads_kv * splits(plan, problem) * elements_of(p, "kv") * tiles
    groups, last_groups = -(-heads // max(group, 1)), -(-_last_blocks(plan, problem, per_block) // max(blocks, 1))
    last_heads = 0 if plan.config.PERSISTENT else min(max(groups - last_groups, 0) * group, heads)
    if p.lengths is not None:  # all sums are there at once, and an order of sums that is the same for all sequences
        counted = p.heads_q * (math.prod(p.batch) + 1)
        in_order = elements_of(p, "kv") == elements_of(p, "q") and finishes_queries(plan, problem)
        if not in_order or mean_room(p, "q") < ROWS_WORTH_SHARING:
            last_heads = counted  # none
        warps = max(heads - last_heads, 0) * query_tiles(plan, problem) * (plan.config.TILE_Q // WARP_ROWS)
        return Grouping(
            per_block, together, blocks, owners, max(counted, 1), -(-warps // plan.config.WARPS), last_heads,
            backwards=_backwards(problem, counted, 0), heads_ahead=heads_ahead(plan, problem) * plan.config.STATS_AHEAD,
            makers=makers(plan, problem) * plan.config.STATS_AHEAD,
        )  # fmt: skip
    if plan.config.WHOLE_HEADS:  # sums are of blocks, and of one key tile there are none
        with_sums = per_block * blocks_in_turn(plan, problem) if tiles > 1 else 0
        return Grouping(per_block, together, blocks, owners, max(with_sums, 1), last_heads=heads)
    backwards = _backwards(problem, heads, group)
    if not finishes_queries(plan, problem) or not owners:
        return Grouping(per_block, together, blocks, owners, max(heads, 1), backwards=backwards)
    if plan.config.CLUSTER > 1:
        return Grouping(per_block, together, blocks, owners, heads, last_heads=heads)
    clearing, accum_heads = -(-CLEARING_BLOCKS // blocks), heads
    own = plan.file != "bwd_hopper" or plan.config.PERSISTENT or plan.config.FIRST_STORES
    if not own and p.len_q <= MOST_ROWS_REUSED // (2 if backwards else 1):
        accum_heads = min((clearing + max(last_groups, 1)) * group, heads)
    finishing = (heads - last_heads) * -(-p.len_q // (WARP_ROWS * plan.config.WARPS))
    first_tiles = 0
    if plan.config.TILE_LIST and not problem.deterministic and accum_heads == heads and tiles > 1:
        first_tiles, blocks = owners // tiles, together * (tiles - 1)
    return Grouping(
        per_block, together, blocks, owners, accum_heads, finishing, last_heads, heads - accum_heads, clearing * group, backwards,
        first_tiles, heads_ahead(plan, problem) if plan.config.STATS_AHEAD or plan.config.ZEROS_AHEAD else 0,
    )  # fmt: skip


def blocks_in_turn(plan: KernelPlan, problem: BackwardProblem) -> int:
    """At most how many blocks take key tiles in turn, or all of a head; there is one for each multiprocessor."""
    p = problem.forward
    heads = p.heads_kv * splits(plan, problem) * elements_of(p, "kv")
    return min(heads, RUNNING) if plan.config.WHOLE_HEADS else heads * key_tiles(plan, problem)


def _last_blocks(plan: KernelPlan, problem: BackwardProblem, of_block: int) -> int:
    """How many blocks at least come behind heads whose last block finishes dq by itself.

    They should not end before it. Under a window, blocks have few queries each, and a head has as many rows as ever: of 16,384 with
    a window of 1,024 keys, four heads to a block, gradients took 0.55 (dim 128) and 0.47 (dim 256) of the time on an H200 when all
    multiprocessors shared the rows of all heads. Of a mask with lists of tiles nobody knows here how few queries see a key. Packed
    sequences of a head end one after the other.
    """
    c, p = plan.config, problem.forward
    if p.lengths is not None or not p.len_kv:
        return LAST_BLOCKS
    tiles = 0.0 if c.TILE_LIST else float(p.mask.tiles_of_queries(c.TILE_KV, c.TILE_Q).mean())
    block = (tiles * of_block + BEGINNING) * c.TILE_Q * c.TILE_KV
    return int(LAST_BLOCKS * max(1.0, p.len_q * of_block * ROW / block))


def has_idle_warps(config: Config) -> bool:
    """Whether two warps of a block of bwd_hopper, or in order one, have no work, and there is room for rows of a later head."""
    return not (config.TMA_REDUCE_DQ or config.TILE_LIST or config.STAGED_BIAS)


def heads_ahead(plan: KernelPlan, problem: BackwardProblem) -> int:
    """How many query heads later those are whose statistics of queries, or zeros, a block makes.

    Whole groups of heads, and one more than have as many blocks as run at once: when the first block of a head begins, all that
    make what it needs have ended, or are about to. Of packed sequences it is one group, of which the last blocks make nothing.
    """
    together = heads_together(plan, problem)
    blocks = max(together * key_tiles(plan, problem), 1)
    groups = 1 if problem.forward.lengths is not None else 1 + -(-RUNNING // blocks)
    return groups * together * heads_per_block(plan, problem)


def makers(plan: KernelPlan, problem: BackwardProblem) -> int:
    """How many key tiles of a head of packed sequences have blocks that make something for a later head.

    All but the last: behind them as many blocks begin as run at once, so that they have ended, or are about to, when that head
    begins. 0 if the sequences are not packed, or that leaves less than half of them.
    """
    tiles = key_tiles(plan, problem)
    most = tiles - -(-RUNNING // heads_together(plan, problem))
    packed = all(is_packed(problem.forward, side) for side in ("q", "kv"))
    return most if packed and 2 * most >= tiles else 0


def _backwards(problem: BackwardProblem, heads: int, group: int) -> int:
    """How many query heads take the last keys first, see `semaphore_value` in ``kernels_cu``.

    All whose rows see keys up to a diagonal, where order matters; but not those of the last group of heads, which would leave their
    longest blocks for the end. That group takes the longest first: what its blocks wait for is less than what the end would cost.
    """
    p = problem.forward
    if not problem.deterministic or not p.mask.hides_last:
        return 0
    if p.mask.hides_first or heads <= group or not group:
        return heads
    return (heads - 1) // group * group


def heads_per_block(plan: KernelPlan, problem: BackwardProblem) -> int:
    """How many query heads one block sums over, of those that share its keys.

    Of all of them, gradients of keys are complete when a block ends. With fewer there are more blocks, and their sums are added up
    afterwards. bwd_v2 has all unless that leaves too few blocks. Of the Hopper kernels fewer blocks run at once, and when the last
    of them ends decides: under a causal mask the longest blocks of the last heads begin late. With lengths of sequences nothing
    decides that depends on the others in the batch, since bits depend on how sums are made.
    """
    p, c = problem.forward, plan.config
    if c.WHOLE_HEADS:
        return p.heads_per_kv
    fit = tuple(heads for heads in range(1, p.heads_per_kv + 1) if p.heads_per_kv % heads == 0)
    if plan.file in HOPPER_KERNELS:
        most = min(_most_heads(plan, problem), MOST_HEADS_COUNTED)
        fit = tuple(heads for heads in fit if heads <= most)
    if p.lengths is not None or len(fit) == 1:
        return fit[-1]
    if plan.file in HOPPER_KERNELS:
        heads, together = p.heads_q * math.prod(p.batch), heads_together(plan, problem)
        return _fastest(fit, p.heads_per_kv, heads, together, p.mask, c.TILE_Q, c.TILE_KV, RUNNING)
    blocks = key_tiles(plan, problem) * p.heads_kv * math.prod(p.batch)
    return max((heads for heads in fit if blocks * (p.heads_per_kv // heads) >= FEWEST_BLOCKS), default=1)


def _most_heads(plan: KernelPlan, problem: BackwardProblem) -> int:
    """How many query heads a block of a Hopper kernel may sum over.

    Where blocks have different lengths, they are apart after the first of several heads: what all of these heads read and add to
    is in use at once. On an H200 eight of dim 128 take 1.0 to 1.4 times as long as four, of dim 256 1.1 to 1.5 times. Few blocks
    are not far apart. In order they also wait for each other, and of 4,096 tokens under a causal mask one head a block takes 0.8
    (dim 128) and 0.6 (dim 256) of the time of four. Narrow heads fit the cache.
    """
    p, c = problem.forward, plan.config
    narrow, shape = c.WIDTH <= NARROW, p.mask.shape
    dense = p.lengths is None
    if shape == "full" or (dense and shape == "window") or (narrow and not problem.deterministic):
        return p.heads_per_kv
    long = not dense or p.len_q * c.WIDTH >= LONG_IN_ORDER
    if problem.deterministic and shape == "causal" and long and not narrow:
        return 1
    return p.heads_per_kv if dense and key_tiles(plan, problem) <= FEW_TILES else MOST_APART


@functools.lru_cache(maxsize=1024)
def _fastest(
    fit: tuple[int, ...], group: int, heads: int, together: int, mask: Mask, tile_q: int, tile_kv: int, running: int
) -> int:
    """Of how many query heads of a group one block sums over, the number with which the last block ends first: the largest such."""
    steps = mask.tiles_of_queries(tile_kv, tile_q)

    def until_all_end(of_block: int) -> float:
        blocks = (steps * of_block + BEGINNING + ADDING * (of_block < group)).tolist()
        groups = heads // of_block
        if groups * len(blocks) > MANY * running:  # how they end is a small part of what they take
            return groups * sum(blocks) / running + max(blocks) / 2
        alternating = (min(together, groups - first) for first in range(0, groups, together))
        return makespan((block for count in alternating for block in blocks for _ in range(count)), running)

    return min(fit, key=lambda of_block: (until_all_end(of_block), -of_block))


def heads_together(plan: KernelPlan, problem: BackwardProblem) -> int:
    """How many heads neighbouring blocks take in turn.

    With many, few blocks add to the same rows of dq at a time; too many would not share q and dout in the L2 cache. On an
    H200 bwd_v2 runs up to 400 blocks at once; of 1,024, 4,096 and 16,384 keys, the heads of about 1,024 blocks were fastest. The
    Hopper kernels run 132, and 4 to 8 heads were within 3 % of the fastest from 512 keys to 16,384, as long as what they add to
    and read stays in the cache: at 16,384 and dim 128 four heads move 3.5 GB through device memory, four times as much as
    FlashAttention-4, which takes one at a time; two were up to 3 % faster. In order under a causal mask the longest blocks of a
    head come last (`semaphore_value`), and it matters more: at 16,384 and dim 256 one head at a time runs at 0.97 of
    the rate in any order, two at 0.77, four at 0.55. In order without a mask, each block waits for the one before: of 512 and
    1,024 keys, 16 heads run 1.02 to 1.09 times as fast as 8, of 2,048 keys 1.04 times at dim 64, 0.95 at dim 128.
    """
    if plan.config.WHOLE_HEADS:  # a block takes neighbouring numbers
        return 1
    tiles, rows = max(key_tiles(plan, problem), 1), max(problem.forward.len_q, 1)
    if problem.forward.lengths is not None:
        tiles, rows = -(-LENGTH_OF_MANY // plan.config.TILE_KV), LENGTH_OF_MANY
    if plan.file not in HOPPER_KERNELS:
        return max(1, BLOCKS_TOGETHER // tiles)
    least = 4
    causal = problem.forward.mask.shape == "causal"
    bytes_of_row = (4 + 2) * plan.config.WIDTH + 2 * plan.config.WIDTH_V  # sums, q and dout
    if problem.deterministic and problem.forward.lengths is not None and problem.forward.mask.shape != "window":
        return _heads_in_order(problem.forward, bytes_of_row)
    if problem.deterministic and causal:
        least = 2 if plan.file == "bwd_hopper" else 1
    many = problem.deterministic and not causal and plan.file == "bwd_hopper" and tiles <= FEW_TILES
    most = MOST_TOGETHER if many else MOST_TOGETHER // 2
    together = min(max(HOPPER_BLOCKS_TOGETHER // tiles, least), most)
    if problem.deterministic:
        return together
    return max(1, min(together, L2_BYTES // (rows * bytes_of_row)))


def _heads_in_order(problem: Problem, bytes_of_row: int) -> int:
    """The same of sequences of their own lengths whose blocks add in order: as many as a part of the cache holds of mean length.

    The longest of documents are about four times as long. Of few heads in turn, blocks of a head are close behind each other, and
    wait; what many of them read and add to, the cache does not hold.
    """
    room = max(mean_room(problem, "q"), 1)
    fit = IN_ORDER_BYTES // (room * bytes_of_row)
    if problem.mask.shape == "full":
        return MOST_TOGETHER if fit >= MOST_TOGETHER // 2 else MOST_TOGETHER // 2
    return min(max(fit, 1 + (room <= LENGTH_OF_MANY)), MOST_TOGETHER // 2)


def splits(plan: KernelPlan, problem: BackwardProblem) -> int:
    return problem.forward.heads_per_kv // max(heads_per_block(plan, problem), 1)


def finishes_queries(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether the second grid turns sums into dq, which is not summed over a batch axis then."""
    return plan.file in HOPPER_KERNELS and not problem.sums_queries and problem.forward.len_kv > 0


def queries_seeing(p: Problem) -> int:
    """How many queries see a key, on average; with lengths, as bits follow from it, the width of the window or `LENGTH_OF_MANY`."""
    if p.lengths is None:
        return -(-p.mask.pairs // max(p.len_kv, 1))
    left, right = p.mask.left, p.mask.right
    return LENGTH_OF_MANY if left is None or right is None else min(LENGTH_OF_MANY, right - left + 1)


def query_tiles(plan: KernelPlan, problem: BackwardProblem) -> int:
    return tiles_of(problem.forward, plan.config.TILE_Q, "q")


def key_tiles(plan: KernelPlan, problem: BackwardProblem) -> int:
    return tiles_of(problem.forward, plan.config.TILE_KV, "kv")
