"""How gradients are computed: (`BackwardProblem`, `Architecture`) -> `KernelPlan`, its grids and its workspace; pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.layout import Layout
from ..problem.read_gradients import check_sums
from .architecture import Architecture
from .copies import copy_size
from .expression_text import ExpressionText
from .kernel import KernelPlan, check_kind, configure, explicit_scores, kind_of_sinks, padded, rows_of, taken_apart, text_of
from .launch import Launch, checked
from .pair_bits import why_bits, with_bits
from .schedule import L2_BYTES
from .sequences import elements_of, mean_room, tiles_of
from .stored_dbias import dbias_of_pairs
from .structs import struct
from .tensor_map import TensorMap, obstacle, tensor_maps
from .tuning import TileConfig, row_for, table_for
from .workspace import Workspace

HOPPER_KERNELS = ("bwd_hopper", "bwd_hopper_wide")
MOVED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")  # what threads of bwd_v2 move
LISTED = ("bwd_v2", "bwd_hopper", "bwd_hopper_wide")  # kernels that visit the tiles of a list where pairs are masked
BY_THREADS = MOVED[3:]  # and those of the other two, before and after the loop
GRADIENTS = MOVED[5:]
IN_MAPS = ("q", "k", "v", "dout", *GRADIENTS)  # where TMA moves these
WARP_ROWS = 16  # what a warp of these two stores
FEWEST_BLOCKS = 2 * 132  # two for each multiprocessor of an H200: with fewer, the query heads of a group are split among blocks
HOPPER_BLOCKS_TOGETHER = 256  # about as many, see heads_together
LAST_BLOCKS = 256  # the same, see make_grouping
FEW_TILES = 8  # of keys: blocks that add in order are apart only if more heads alternate, see heads_together
CLEARING_BLOCKS = 200  # that start between those of a head and those that clear what it leaves
MOST_ROWS_REUSED = 2048  # of dq, whose sums are used again
MOST_HEADS_COUNTED = 32  # by one warp, see count_block
WIDEST_TAKEN = 64  # columns of key tiles that blocks of bwd_hopper take in turn; with wider ones a call takes as long either way
FEWEST_TAKEN = 4 * 132  # such key tiles, a few for each multiprocessor: the first one of a block is not beneath any other
ROWS_WORTH_SHARING = 2048  # of dq, of a sequence, see make_grouping
LENGTH_OF_MANY = 4096  # of sequences of their own lengths: they have the tiles, and heads together, of so many rows
BLOCKS_TOGETHER = 1024  # a few times as many as run at once, see heads_together


def make_backward_plan(problem: BackwardProblem, architecture: Architecture) -> KernelPlan:
    """Choose the kernel for a problem.

    Parameters
    ----------
    problem : BackwardProblem
        With backend 'cuda' or 'host'.
    architecture : Architecture

    Returns
    -------
    KernelPlan

    Raises
    ------
    UnsupportedError
        If no kernel for this architecture computes the problem.
    """
    p = problem.forward
    check_kind(architecture, "q", p.dtype, p.precision)
    expressions = text_of(p)
    # Gradients of sinks tell no sequences apart.
    apart = expressions if p.lengths and p.sinks else with_bits(p, taken_apart(p, expressions))
    kernel, why_kernel = _backward_kernel(problem, architecture, apart)
    expressions = apart if kernel in HOPPER_KERNELS else expressions
    explicit, why_scores = _explicit(p, expressions)
    moved = BY_THREADS if kernel in HOPPER_KERNELS else MOVED
    copy_bytes, why_copy = copy_size({name: problem.layouts[name] for name in moved})
    row = _row_for(kernel, problem, architecture, copy_bytes, explicit, expressions)
    store_dbias = row.staged_bias and dbias_of_pairs(problem) is not None
    persistent = kernel == "bwd_hopper" and _takes_key_tiles(problem, row, expressions)
    why_taken = "blocks take key tiles in turn" if persistent else ""
    why_stored = "gradient of the bias: dS of each pair, which TMA stores" if store_dbias else ""
    width = row.width if kernel in HOPPER_KERNELS else _width(p)
    why_pairs = why_bits(expressions) if kernel in HOPPER_KERNELS and p.lengths is None else ""
    return KernelPlan(
        file=kernel,
        architecture=architecture,
        config=configure(
            row,
            architecture,
            p.dtype,
            p.precision,
            width,
            width,
            copy_bytes=copy_bytes,
            explicit=explicit,
            mask=p.mask.kind,
            sinks=kind_of_sinks(p),
            problem=p,
            expressions=expressions,
            tile_list=bool(expressions.takes_part or expressions.pair_bits) and kernel in LISTED and p.lengths is None,
            adds=problem.adds,
            store_dbias=store_dbias,
            persistent=persistent,
        ),
        expressions=expressions,
        reasons=tuple(filter(None, (why_kernel, row.reason, why_copy, why_scores, why_stored, why_pairs, why_taken))),
    )


def _takes_key_tiles(problem: BackwardProblem, row: TileConfig, expressions: ExpressionText) -> bool:
    """Whether blocks of bwd_hopper take key tiles in turn: where a mask leaves each few queries, and none waits for another."""
    p = problem.forward
    tiles = p.heads_kv * elements_of(p, "kv") * -(-p.len_kv // row.tile_kv)
    return expressions.pair_bits and row.width <= WIDEST_TAKEN and tiles >= FEWEST_TAKEN and not problem.deterministic


def _explicit(problem: Problem, expressions: ExpressionText) -> tuple[bool, str]:
    return explicit_scores(problem, expressions, unless_large=problem.dtype != "float32")


def _width(problem: Problem) -> int:
    return padded(max(problem.dim, problem.dim_v))  # one for all: warps that own either gradient run the same code


def _row_for(
    kernel: str,
    problem: BackwardProblem,
    architecture: Architecture,
    copy_bytes: int,
    explicit: bool,
    expressions: ExpressionText,
) -> TileConfig:
    p = problem.forward
    rows = rows_of(kernel, architecture, p, expressions)
    kinds = (explicit, problem.deterministic, p.mask.shape)
    lengths = p.lengths is not None
    len_q = LENGTH_OF_MANY if lengths else p.len_q
    return row_for(kernel, architecture, p.dtype, _width(p), len_q, copy_bytes, *kinds, lengths=lengths, rows=rows)


def _in_maps(problem: Problem) -> tuple[str, ...]:
    """The arrays that TMA moves: what is stored in float32, lanes store."""
    return IN_MAPS[: -len(GRADIENTS)] if problem.has_wider_results else IN_MAPS


def _layouts(problem: BackwardProblem) -> dict[str, Layout]:
    """All arrays that have the batch axes: these are merged where all step through them as through one."""
    return {name: layout for name, layout in problem.layouts.items() if layout is not None} | problem.forward.scores.layouts


def _backward_kernel(problem: BackwardProblem, architecture: Architecture, expressions: ExpressionText) -> tuple[str, str]:
    """The kernel file, and why it is not the one that the architecture is best at, or ''."""
    p = problem.forward
    asked, (explicit, _) = problem.kernel, _explicit(p, expressions)
    if p.scores:
        check_sums(p.scores, problem.wrt, problem.deterministic)
    tables = {kernel: rows_of(kernel, architecture, p, expressions) for kernel in HOPPER_KERNELS}
    if p.lengths is not None:
        tables = {kernel: tuple(row for row in rows if not row.without_lengths) for kernel, rows in tables.items()}
    exists = bool(table_for("bwd_hopper", architecture, p.dtype))
    if asked == "bwd_hopper" and exists and not tables[asked]:
        expected = "None, 'bwd_v2' or 'bwd_hopper_wide' with these scores, masks or dropout"
        raise UnsupportedError(f"kernel: expected {expected}, got {asked!r}: its registers hold both gradients")
    if asked == "bwd_v2":
        return asked, f"{asked} was asked for"
    kernels = HOPPER_KERNELS if asked is None else (asked,)
    if not exists:
        why_not = f"there is no other one for {p.dtype} on {architecture}"
    else:
        why_not = obstacle(p.batch, _layouts(problem), _in_maps(p), () if p.has_wider_results else GRADIENTS)
        why_not = why_not and f"no TMA: {why_not}"
        from .pair_tuning import drops_most  # late, as in `rows_of`

        if drops_most(p):
            why_not = "Hopper kernels drop at most 31 of 32 pairs"
    for kernel in kernels:
        if not why_not and any(row.width >= _width(p) and not (explicit and row.plain_scores) for row in tables[kernel]):
            return kernel, ""
    if asked is not None:
        why_not = why_not or "it has no tile for such head dims and scores"
        raise UnsupportedError(f"kernel: expected None or 'bwd_v2', got {asked!r}: {why_not}")
    return "bwd_v2", (why_not or "no Hopper kernel has the registers for these scores") if exists else ""


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
    per_block, together, tiles = heads_per_block(plan, problem), heads_together(plan, problem), _key_tiles(plan, problem)
    heads = p.heads_q * elements_of(p, "q")
    group, blocks = together * per_block, together * tiles
    owners = p.heads_kv * _splits(plan, problem) * elements_of(p, "kv") * tiles
    groups, last_groups = -(-heads // max(group, 1)), -(-LAST_BLOCKS // max(blocks, 1))
    last_heads = 0 if plan.config.PERSISTENT else min(max(groups - last_groups, 0) * group, heads)
    if p.lengths is not None:  # all sums are there at once, and an order of sums that is the same for all sequences
        counted = p.heads_q * (math.prod(p.batch) + 1)
        in_order = elements_of(p, "kv") == elements_of(p, "q") and _finishes_queries(plan, problem)
        if not in_order or mean_room(p, "q") < ROWS_WORTH_SHARING:
            last_heads = counted  # none
        warps = max(heads - last_heads, 0) * _query_tiles(plan, problem) * (plan.config.TILE_Q // WARP_ROWS)
        return Grouping(
            per_block, together, blocks, owners, max(counted, 1), -(-warps // plan.config.WARPS), last_heads,
            backwards=_backwards(problem, counted, 0),
        )  # fmt: skip
    backwards = _backwards(problem, heads, group)
    if not _finishes_queries(plan, problem) or not owners:
        return Grouping(per_block, together, blocks, owners, max(heads, 1), backwards=backwards)
    clearing, accum_heads = -(-CLEARING_BLOCKS // blocks), heads
    if plan.file == "bwd_hopper" and not plan.config.PERSISTENT and p.len_q <= MOST_ROWS_REUSED // (2 if backwards else 1):
        accum_heads = min((clearing + max(last_groups, 1)) * group, heads)
    finishing = (heads - last_heads) * -(-p.len_q // (WARP_ROWS * plan.config.WARPS))
    first_tiles = 0
    if plan.config.TILE_LIST and not problem.deterministic and accum_heads == heads and tiles > 1:
        first_tiles, blocks = owners // tiles, together * (tiles - 1)
    return Grouping(
        per_block, together, blocks, owners, accum_heads, finishing, last_heads, heads - accum_heads, clearing * group, backwards,
        first_tiles,
    )  # fmt: skip


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


def backward_launches(plan: KernelPlan, problem: BackwardProblem) -> tuple[Launch, ...]:
    """The grids: before, over keys, and after, and one for gradients of sinks. None has a block if there is no query head."""
    p, grouping = problem.forward, make_grouping(plan, problem)
    query_blocks = _query_tiles(plan, problem) * p.heads_q * elements_of(p, "q")
    key_blocks = _key_tiles(plan, problem) * p.heads_kv * elements_of(p, "kv")
    blocks = (
        query_blocks + -(-_key_places(plan, problem) // plan.config.WARPS),
        grouping.owners + grouping.finishing,
        query_blocks * (not _finishes_queries(plan, problem)) + 2 * key_blocks * _stores_parts(plan, problem),
        *(() if p.sinks is None else (math.prod(p.sinks.shape[-2:]),)),
    )
    entries = plan.entries.items()
    if problem.zero:
        blocks = (0,) * len(entries)
    launches = [Launch(entry, number, shared) for (entry, shared), number in zip(entries, blocks)]
    if plan.config.PERSISTENT:
        taken = 0 if problem.zero else grouping.owners
        launches[1] = replace(launches[1], blocks=taken, per_multiprocessor=1, behind=min(taken, 1) * grouping.finishing)
    return tuple(map(checked, launches))


def backward_workspace(plan: KernelPlan, problem: BackwardProblem) -> Workspace:
    """What the three kernels hand on to each other in device memory."""
    c, p = plan.config, problem.forward
    query_tiles = _query_tiles(plan, problem) * p.heads_q * elements_of(p, "q")
    key_tiles = _key_tiles(plan, problem) * p.heads_kv * _splits(plan, problem) * elements_of(p, "kv")
    sum_tiles = query_tiles if p.lengths is not None else _query_tiles(plan, problem) * make_grouping(plan, problem).accum_heads
    parts = [("stats", 4 * query_tiles * 2 * c.TILE_Q), ("dq_accum", 4 * sum_tiles * c.TILE_Q * c.WIDTH)]
    if _stores_parts(plan, problem):
        parts += [(name, 4 * key_tiles * c.TILE_KV * c.WIDTH) for name in ("dk_accum", "dv_accum")]
    if problem.deterministic:
        parts.append(("dq_semaphore", 4 * query_tiles * (c.TILE_KV // 64 if c.TMA_REDUCE_DQ else 1)))  # of each warpgroup, or all
    if _finishes_queries(plan, problem):
        parts.append(("dq_progress", 4 * p.heads_q * (math.prod(p.batch) + (p.lengths is not None))))  # and of rows behind all
    if c.PERSISTENT:
        parts.append(("next_tile", 4))
    if places := _key_places(plan, problem):
        parts.append(("key_places", struct("KeyPlace").itemsize * places))
    return Workspace(tuple(parts))


def delta_sign(plan: KernelPlan) -> int:
    """What delta is multiplied by in the statistics: -1 where products start from it, as bwd_hopper states it."""
    return -1 if plan.file == "bwd_hopper" and plan.config.WIDTH <= 64 else 1


def backward_maps(plan: KernelPlan, problem: BackwardProblem) -> dict[str, TensorMap]:
    """The tensor maps that a kernel is given besides the arrays, by field."""
    if plan.file not in HOPPER_KERNELS:
        return {}
    keys, queries = plan.config.TILE_KV, plan.config.TILE_Q
    boxes = dict(zip(IN_MAPS, (queries, keys, keys, queries, WARP_ROWS, WARP_ROWS, WARP_ROWS)))
    boxes = {name: boxes[name] for name in _in_maps(problem.forward)}
    boxes |= {"bias": queries} if plan.config.STAGED_BIAS else {}
    layouts = _layouts(problem)
    if plan.config.STORE_DBIAS:
        boxes, layouts = boxes | {"dbias": queries}, layouts | {"dbias": dbias_of_pairs(problem)}
    return {f"{name}_map": described for name, described in tensor_maps(problem.forward.batch, layouts, boxes).items()}


def heads_per_block(plan: KernelPlan, problem: BackwardProblem) -> int:
    """How many query heads one block sums over.

    All that share its keys, so that gradients of keys are complete when a block ends, unless that leaves too few blocks, or
    they are more than one warp counts: then fewer.
    """
    p = problem.forward
    blocks = _key_tiles(plan, problem) * p.heads_kv * math.prod(p.batch)
    if p.lengths is not None:  # the same whatever else is in the batch: how sums are made decides their bits
        blocks = FEWEST_BLOCKS
    most = MOST_HEADS_COUNTED if plan.file in HOPPER_KERNELS else p.heads_per_kv
    together = p.heads_per_kv
    while together > 1 and (together > most or blocks * (p.heads_per_kv // together) < FEWEST_BLOCKS):
        together = max(divisor for divisor in range(1, together) if p.heads_per_kv % divisor == 0)
    return together


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
    tiles, rows = max(_key_tiles(plan, problem), 1), max(problem.forward.len_q, 1)
    if problem.forward.lengths is not None:
        tiles, rows = -(-LENGTH_OF_MANY // plan.config.TILE_KV), LENGTH_OF_MANY
    if plan.file not in HOPPER_KERNELS:
        return max(1, BLOCKS_TOGETHER // tiles)
    least = 4
    causal = problem.forward.mask.shape == "causal"
    if problem.deterministic and causal:
        least = 2 if plan.file == "bwd_hopper" else 1
    most = 16 if problem.deterministic and not causal and plan.file == "bwd_hopper" and tiles <= FEW_TILES else 8
    together = min(max(HOPPER_BLOCKS_TOGETHER // tiles, least), most)
    if problem.deterministic:
        return together
    bytes_of_head = (4 + 2 + 2) * rows * plan.config.WIDTH  # sums, q and dout
    return max(1, min(together, L2_BYTES // bytes_of_head))


def _splits(plan: KernelPlan, problem: BackwardProblem) -> int:
    return problem.forward.heads_per_kv // max(heads_per_block(plan, problem), 1)


def _stores_parts(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether gradients of keys and values are added up from parts after all blocks have ended."""
    return _splits(plan, problem) > 1 or problem.sums_keys


def _finishes_queries(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether the second grid turns sums into dq, which is not summed over a batch axis then."""
    return plan.file in HOPPER_KERNELS and not problem.sums_queries and problem.forward.len_kv > 0


def _key_places(plan: KernelPlan, problem: BackwardProblem) -> int:
    """How many key tiles the first grid finds the place of, for the blocks of the second."""
    found = problem.forward.lengths is not None and plan.file in HOPPER_KERNELS
    return _key_tiles(plan, problem) * elements_of(problem.forward, "kv") * found


def _query_tiles(plan: KernelPlan, problem: BackwardProblem) -> int:
    return tiles_of(problem.forward, plan.config.TILE_Q, "q")


def _key_tiles(plan: KernelPlan, problem: BackwardProblem) -> int:
    return tiles_of(problem.forward, plan.config.TILE_KV, "kv")
