"""How gradients are computed: (`BackwardProblem`, `Architecture`) -> `KernelPlan`, its grids and its workspace; pure functions."""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import UnsupportedError
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.layout import Layout
from ..problem.read_gradients import check_sums
from .architecture import Architecture
from .columns import columns, padded
from .copies import copy_size
from .explicit_scores import explicit_scores
from .expression_text import ExpressionText
from .fp16_parts import expressions_in_parts
from .gradient_parts import GRADIENT_ROWS, gradient_parts, in_gradient_parts, layouts_in_parts, why_not_gradient_parts
from .grouping import (
    HALF_KERNELS,
    HOPPER_KERNELS,
    LENGTH_OF_MANY,
    MLA,
    WARP_ROWS,
    blocks_in_turn,
    finishes_queries,
    has_idle_warps,
    heads_ahead,
    key_tiles,
    make_grouping,
    makers,
    queries_seeing,
    query_tiles,
    splits,
)
from .kernel import KernelPlan, check_kind, configure, kind_of_sinks, rows_of, taken_apart, text_of
from .launch import Launch, checked
from .mla import pays, why_not_mla
from .pair_bits import why_bits, with_bits
from .sequences import elements_of, mean_room
from .short_gradients import stores_sooner, why_bwd_v2, why_wide
from .stored_dbias import rows_beside_slices, stored_dbias
from .structs import struct
from .tensor_map import TensorMap, obstacle, tensor_maps
from .tuning import TileConfig, row_for, table_for
from .whole_heads import WHY as WHY_WHOLE
from .whole_heads import takes_whole_heads
from .workspace import Workspace

MOVED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")  # what threads of bwd_v2 move
LISTED = ("bwd_v2", *HOPPER_KERNELS)  # kernels that visit the tiles of a list where pairs are masked
BY_THREADS = MOVED[3:]  # and those of the other two, before and after the loop
GRADIENTS = MOVED[5:]
IN_MAPS = ("q", "k", "v", "dout", *GRADIENTS)  # where TMA moves these
WIDEST_TAKEN = 64  # columns of key tiles that blocks of bwd_hopper take in turn; with wider ones a call takes as long either way
WIDEST_BENT = 128  # columns: wider heads take as long either way, and so do those of more than 64 with fewer queries than
LEAST_BENT = 2048
FEWEST_TAKEN = 4 * 132  # such key tiles, a few for each multiprocessor: the first one of a block is not beneath any other
MOST_AHEAD = 2  # times as many queries as keys a head may have, or keys as queries, rounded up to tiles, see _makes_stats_ahead
SHORT_IN_ORDER = 512  # queries, up to which a causal mask leaves many blocks few steps, over before one warp's statistics
MOST_ROWS_STORED = 1024  # of dq, see _first_stores; under a causal mask twice as many
MOST_ROWS_AHEAD = 4096  # of dq, whose sums earlier heads make zero; with more of them a call takes as long either way
MOST_SEEING = 2048  # queries that see a key in a window, up to which zeros are made ahead for longer sequences as well


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
    check_kind(architecture, "q", problem.forward.dtype, problem.forward.precision)
    parts, why_parts = gradient_parts(problem, architecture)
    problem = in_gradient_parts(problem, parts)
    p = problem.forward
    expressions = text_of(p)
    # Gradients of sinks tell no sequences apart.
    apart = expressions if p.lengths and p.sinks else with_bits(p, taken_apart(p, expressions, _bends(p)), _width(p) > WIDEST_TAKEN)
    apart = expressions_in_parts(p) if parts else apart
    kernel, why_kernel = ("bwd_hopper_parts", why_parts) if parts else _backward_kernel(problem, architecture, apart)
    expressions = apart if kernel in HOPPER_KERNELS else expressions
    explicit, why_scores = _explicit(p, expressions)
    moved = GRADIENTS if parts else BY_THREADS if kernel in HOPPER_KERNELS else MOVED
    copy_bytes, why_copy = copy_size({name: problem.layouts[name] for name in moved})
    row = _row_for(kernel, problem, architecture, copy_bytes, explicit, expressions, parts)
    dbias, cluster, why_stored = stored_dbias(problem, kernel) if row.staged_bias else (None, 1, "")
    persistent = kernel == "bwd_hopper" and dbias is None and _takes_key_tiles(problem, row, expressions)
    why_taken = "blocks take key tiles in turn" if persistent else ""
    width = row.width if kernel in HOPPER_KERNELS else _width(p)
    width_v = row.width_v or width
    why_pairs = why_bits(expressions) if kernel in HOPPER_KERNELS and p.lengths is None else ""
    plan = KernelPlan(
        file=kernel,
        architecture=architecture,
        config=configure(
            row,
            architecture,
            p.dtype,
            p.precision,
            width,
            width_v,
            copy_bytes=copy_bytes,
            explicit=explicit,
            mask=p.mask.kind,
            sinks=kind_of_sinks(p),
            problem=p,
            expressions=expressions,
            tile_list=bool(expressions.takes_part or expressions.pair_bits) and kernel in LISTED and p.lengths is None,
            adds=problem.adds,
            store_dbias=dbias is not None,
            cluster=cluster,
            persistent=persistent,
            columns=_columns(kernel, p, width, width_v),
        ),
        expressions=expressions,
        reasons=tuple(filter(None, (why_kernel, row.reason, why_copy, why_scores, why_stored, why_pairs, why_taken))),
    )
    if takes_whole_heads(plan, problem):
        plan = _with(plan, WHY_WHOLE, PERSISTENT=True, WHOLE_HEADS=True)
    if apart.kind == "SCALED" and kernel in HOPPER_KERNELS and splits(plan, problem) == p.heads_per_kv:  # one head a block
        plan = _with(plan, "what scores of a head are multiplied by multiplies its sums of dq and dk", SCALE_SUMS=True)
    if parts:
        plan = replace(plan, config=replace(plan.config, FP16_PARTS=parts))
    if _first_stores(plan, problem):
        problem = replace(problem, deterministic=True)  # nor is it in any other order where nobody asked for one
        plan = _with(plan, "in order the first block stores what others add to: no sums have to be zero before", FIRST_STORES=True)
    if _makes_stats_ahead(plan, problem):
        who = "an idle warp makes" if problem.deterministic else "idle warps make"
        plan = _with(plan, f"{who} statistics of queries of later heads", STATS_AHEAD=True, IN_ORDER=problem.deterministic)
    if _makes_zeros_ahead(plan, problem):
        plan = _with(plan, "an idle warp makes sums of later heads zero", ZEROS_AHEAD=True)
    if problem.parts > 1:
        plan = _with(plan, f"queries in {problem.parts} parts: their few keys have fewer blocks than run at once")
    return plan


def _with(plan: KernelPlan, reason: str, **knobs: int) -> KernelPlan:
    return replace(plan, config=replace(plan.config, **knobs), reasons=(*plan.reasons, reason))


def _takes_key_tiles(problem: BackwardProblem, row: TileConfig, expressions: ExpressionText) -> bool:
    """Whether blocks of bwd_hopper take key tiles in turn: where a mask leaves each few queries, and none waits for another."""
    p = problem.forward
    tiles = p.heads_kv * elements_of(p, "kv") * -(-p.len_kv // row.tile_kv)
    return expressions.pair_bits and row.width <= WIDEST_TAKEN and tiles >= FEWEST_TAKEN and not problem.deterministic


def _has_later_heads(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether there are heads for which blocks of a Hopper kernel could make something."""
    p = problem.forward
    if plan.file not in HOPPER_KERNELS or plan.config.PERSISTENT or not finishes_queries(plan, problem):
        return False
    if p.lengths is not None and not makers(plan, problem):
        return False
    return heads_ahead(plan, problem) < p.heads_q * elements_of(p, "q")


def _first_stores(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether the first of the blocks of a Hopper kernel that add in order stores, which costs the others a question in each step.

    Of short heads that is less than to make sums zero before, or to use those of other heads again. Where a head has one tile of
    keys, nobody adds to what it stores, and there is no other order. Of sequences of their own lengths see `stores_sooner`.
    """
    p = problem.forward
    if plan.file not in HOPPER_KERNELS or plan.config.TILE_LIST or plan.config.WHOLE_HEADS:
        return False
    if p.lengths is not None:  # beside which bwd_hopper_mla has no registers for the question
        in_order = problem.deterministic or stores_sooner(problem, key_tiles(plan, problem))
        return plan.file != MLA and in_order and mean_room(p, "q") <= MOST_ROWS_STORED
    if key_tiles(plan, problem) == 1 and not p.scores and p.softcap is None:
        return True
    if not problem.deterministic:
        return False
    return p.len_q <= MOST_ROWS_STORED * (2 if p.mask.shape == "causal" else 1)


def _makes_stats_ahead(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether blocks of bwd_hopper make the statistics of queries of later heads.

    There are such heads, and two warps without work, or in order one. TMA can move out. A block's share takes less time than its
    own steps, and saves more than it costs later blocks to ask whether it has been made: in order it does not where many blocks
    have few steps, and beside a softcap there are no registers for wide heads. For packed sequences terms of queries are not
    made, and of wider heads the producer has no registers.
    """
    p, c = problem.forward, plan.config
    if plan.file != "bwd_hopper" or not has_idle_warps(c) or not _has_later_heads(plan, problem):
        return False
    if p.lengths is not None and (c.SCORES == "PLUS_LINEAR" or c.WIDTH > WIDEST_TAKEN or problem.deterministic):
        return False
    if problem.deterministic and (c.EXPLICIT_SCORES or (p.mask.shape != "full" and p.len_q <= SHORT_IN_ORDER)):
        return False
    queries, keys = query_tiles(plan, problem) * c.TILE_Q, key_tiles(plan, problem) * c.TILE_KV
    return queries / MOST_AHEAD <= keys <= queries * MOST_AHEAD and not obstacle(p.batch, _layouts(problem), ("out",))


def _makes_zeros_ahead(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether a block makes its share of the sums of later heads zero.

    All heads have sums of their own, there is room for zeros beside the tiles, and a warp has no work until the block has ended. Of
    longer sequences the first launch makes sums zero in a hundredth of the time of all, unless queries see few keys. Of packed ones
    it has no blocks for heads whose statistics others make.
    """
    p, c = problem.forward, plan.config
    if c.TILE_LIST or c.STAGED_BIAS or c.FIRST_STORES or not _has_later_heads(plan, problem):
        return False
    if p.lengths is not None:
        return c.STATS_AHEAD
    in_window = p.mask.shape == "window" and queries_seeing(p) <= MOST_SEEING
    return (p.len_q <= MOST_ROWS_AHEAD or in_window) and not make_grouping(plan, problem).reused


def _explicit(problem: Problem, expressions: ExpressionText) -> tuple[bool, str]:
    return explicit_scores(problem, expressions, unless_large=problem.dtype != "float32")


def _bends(problem: Problem) -> bool:
    """Whether a term that bends at a diagonal is taken apart; elsewhere that costs registers, or gains nothing."""
    alone = problem.scores.dropout is None and problem.lengths is None and not problem.scores.masks_pairs
    gains = _width(problem) <= WIDEST_TAKEN or (_width(problem) <= WIDEST_BENT and problem.len_q >= LEAST_BENT)
    return alone and problem.mask.shape == "full" and gains


def _width(problem: Problem) -> int:
    return padded(max(problem.dim, problem.dim_v))  # one for all: warps that own either gradient run the same code


def _columns(kernel: str, problem: Problem, width: int, width_v: int) -> tuple[int, int]:
    """How many columns products take of tiles of q and k, and of v: as many of both where one width serves all."""
    if width != width_v:
        return columns(kernel, problem.dim, width), columns(kernel, problem.dim_v, width_v)
    return (columns(kernel, max(problem.dim, problem.dim_v), width),) * 2


def _row_for(
    kernel: str,
    problem: BackwardProblem,
    architecture: Architecture,
    copy_bytes: int,
    explicit: bool,
    expressions: ExpressionText,
    parts: int,
) -> TileConfig:
    p = problem.forward
    rows = GRADIENT_ROWS[parts] if parts else rows_of(kernel, architecture, p, expressions)
    rows = rows_beside_slices(rows) if stored_dbias(problem, kernel)[1] > 1 else rows
    kinds = (explicit, problem.deterministic, p.mask.shape)
    lengths = p.lengths is not None
    len_q = LENGTH_OF_MANY if lengths else p.len_q
    if kernel in HALF_KERNELS and p.mask.shape == "window":  # a block has as many steps as of a sequence so long without a mask
        len_q = queries_seeing(p)
    width_v = padded(p.dim_v) if kernel == MLA else None
    return row_for(kernel, architecture, p.dtype, _width(p), len_q, copy_bytes, *kinds, width_v, lengths=lengths, rows=rows)


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
    tables = {kernel: rows_of(kernel, architecture, p, expressions) for kernel in HALF_KERNELS}
    if p.lengths is not None:
        tables = {kernel: tuple(row for row in rows if not row.without_lengths) for kernel, rows in tables.items()}
    exists = bool(table_for("bwd_hopper", architecture, p.dtype))
    if asked == "bwd_hopper" and exists and not tables[asked]:
        expected = "None, 'bwd_v2' or 'bwd_hopper_wide' with these scores, masks or dropout"
        raise UnsupportedError(f"kernel: expected {expected}, got {asked!r}: its registers hold both gradients")
    if asked == "bwd_v2":
        return asked, f"{asked} was asked for"
    if asked == "bwd_hopper_parts":
        why_not = why_not_gradient_parts(problem) if architecture.name == "90a" else f"it is not for {architecture}"
        raise UnsupportedError(f"kernel: expected None or another one, got {asked!r}: {why_not}")
    kernels = (asked,) if asked in HALF_KERNELS else HALF_KERNELS
    if not exists:
        why_not = f"there is no other one for {p.dtype} on {architecture}"
    else:
        why_not = obstacle(p.batch, _layouts(problem), _in_maps(p), () if p.has_wider_results else GRADIENTS)
        why_not = why_not and f"no TMA: {why_not}"
        from .pair_tuning import drops_most  # late, as in `rows_of`

        if drops_most(p):
            why_not = "Hopper kernels drop at most 31 of 32 pairs"
    if exists and asked is None and (why_v2 := why_bwd_v2(problem, expressions.pressure)):
        return "bwd_v2", why_v2
    why_short = why_wide(problem) if asked is None else ""
    why_not_keys = why_not or why_not_mla(p, explicit)
    if not why_not_keys and (asked == MLA or (asked is None and pays(problem))):
        return MLA, ""
    if asked == MLA:
        raise UnsupportedError(f"kernel: expected None or another one, got {asked!r}: {why_not_keys}")
    for kernel in kernels[::-1] if why_short else kernels:
        if not why_not and any(row.width >= _width(p) and not (explicit and row.plain_scores) for row in tables[kernel]):
            return kernel, why_short
    if asked is not None:
        why_not = why_not or "it has no tile for such head dims and scores"
        raise UnsupportedError(f"kernel: expected None or 'bwd_v2', got {asked!r}: {why_not}")
    return "bwd_v2", (why_not or "no Hopper kernel has the registers for these scores") if exists else ""


def backward_launches(plan: KernelPlan, problem: BackwardProblem) -> tuple[Launch, ...]:
    """The grids: before, over keys, and after, and one for gradients of sinks. None has a block if there is no query head."""
    p, grouping = problem.forward, make_grouping(plan, problem)
    query_blocks = query_tiles(plan, problem) * p.heads_q * elements_of(p, "q")
    key_blocks = key_tiles(plan, problem) * p.heads_kv * elements_of(p, "kv")
    before = query_blocks
    if plan.config.STATS_AHEAD:  # heads whose statistics, or whose zeros, no others make
        zeros = grouping.heads_ahead if plan.config.ZEROS_AHEAD else grouping.accum_heads
        before = min(before, query_tiles(plan, problem) * max(grouping.heads_ahead, zeros))
    blocks = (
        before + -(-_key_places(plan, problem) // plan.config.WARPS),
        grouping.owners + grouping.finishing,
        query_blocks * (not finishes_queries(plan, problem)) + 2 * key_blocks * _stores_parts(plan, problem),
        *(() if p.sinks is None else (math.prod(p.sinks.shape[-2:]),)),
    )
    of_entries = zip(plan.entries.items(), blocks)
    launches = [Launch(entry, 0 if problem.zero else number, shared) for (entry, shared), number in of_entries]
    launches[1] = replace(launches[1], cluster=plan.config.CLUSTER)
    if plan.config.PERSISTENT:
        taken = 0 if problem.zero else blocks_in_turn(plan, problem)
        launches[1] = replace(launches[1], blocks=taken, per_multiprocessor=1, behind=min(taken, 1) * grouping.finishing)
    return tuple(map(checked, launches))


def backward_workspace(plan: KernelPlan, problem: BackwardProblem) -> Workspace:
    """What the three kernels hand on to each other in device memory."""
    c, p = plan.config, problem.forward
    tiles_q = query_tiles(plan, problem) * p.heads_q * elements_of(p, "q")
    tiles_kv = key_tiles(plan, problem) * p.heads_kv * splits(plan, problem) * elements_of(p, "kv")
    sum_tiles = tiles_q if p.lengths is not None else query_tiles(plan, problem) * make_grouping(plan, problem).accum_heads
    parts = [("stats", 4 * tiles_q * (2 + plan.expressions.bends) * c.TILE_Q), ("dq_accum", 4 * sum_tiles * c.TILE_Q * c.WIDTH)]
    if _stores_parts(plan, problem):
        parts += [(name, 4 * tiles_kv * c.TILE_KV * wide) for name, wide in (("dk_accum", c.WIDTH), ("dv_accum", c.WIDTH_V))]
    if problem.deterministic and not c.WHOLE_HEADS:
        parts.append(("dq_semaphore", 4 * tiles_q * (c.TILE_KV // 64 if c.TMA_REDUCE_DQ else 1)))  # of each warpgroup, or all
    if finishes_queries(plan, problem) and not c.WHOLE_HEADS:
        parts.append(("dq_progress", 4 * p.heads_q * (math.prod(p.batch) + (p.lengths is not None))))  # and of rows behind all
    if c.STATS_AHEAD:
        parts.append(("stats_progress", 4 * p.heads_q * elements_of(p, "q")))
    if c.ZEROS_AHEAD:
        parts.append(("zeros_progress", 4 * p.heads_q * elements_of(p, "q")))
    if c.PERSISTENT:
        parts.append(("next_tile", 4))
    if places := _key_places(plan, problem):
        parts.append(("key_places", struct("KeyPlace").itemsize * places))
    return Workspace(tuple(parts))


def delta_sign(plan: KernelPlan) -> int:
    """What delta is multiplied by in the statistics: -1 where products start from it, as bwd_hopper states it."""
    return -1 if plan.file == "bwd_hopper" and plan.config.WIDTH <= 64 and not plan.config.DROPOUT else 1


def backward_maps(plan: KernelPlan, problem: BackwardProblem) -> dict[str, TensorMap]:
    """The tensor maps that a kernel is given besides the arrays, by field."""
    if plan.file not in HOPPER_KERNELS:
        return {}
    keys, queries = plan.config.TILE_KV, plan.config.TILE_Q
    boxes = dict(zip(IN_MAPS, (queries, keys, keys, queries, WARP_ROWS, WARP_ROWS, WARP_ROWS)))
    boxes = {name: boxes[name] for name in _in_maps(problem.forward)}
    boxes |= {"bias": queries} if plan.config.STAGED_BIAS else {}
    parts = plan.config.FP16_PARTS
    layouts = layouts_in_parts(problem, parts) if parts else _layouts(problem)
    boxes |= {"out": queries} if plan.config.STATS_AHEAD else {}
    if plan.config.STORE_DBIAS:
        boxes, layouts = boxes | {"dbias": queries // plan.config.CLUSTER}, layouts | {"dbias": stored_dbias(problem, plan.file)[0]}
    return {f"{name}_map": described for name, described in tensor_maps(problem.forward.batch, layouts, boxes).items()}


def _stores_parts(plan: KernelPlan, problem: BackwardProblem) -> bool:
    """Whether gradients of keys and values are added up from parts after all blocks have ended."""
    return splits(plan, problem) > 1 or problem.sums_keys


def _key_places(plan: KernelPlan, problem: BackwardProblem) -> int:
    """How many key tiles the first grid finds the place of, for the blocks of the second."""
    found = problem.forward.lengths is not None and plan.file in HOPPER_KERNELS
    return key_tiles(plan, problem) * elements_of(problem.forward, "kv") * found
