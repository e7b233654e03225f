"""How gradients are computed: (`BackwardProblem`, `Architecture`) -> `Plan`, its grids and its workspace; pure functions."""

from __future__ import annotations

import math

from .architecture import Architecture
from .backward_problem import BackwardProblem
from .plan import Launch, Plan, check_kind, checked, configure, copy_size, explicit_scores, padded
from .tuning import row_for
from .workspace import Workspace

FEWEST_BLOCKS = 2 * 132  # two for each multiprocessor of an H200: with fewer, the query heads of a group are split among blocks
BLOCKS_TOGETHER = 1024  # a few times as many as run at once, see heads_together


def make_backward_plan(problem: BackwardProblem, architecture: Architecture) -> Plan:
    """Choose the kernel for a problem.

    Parameters
    ----------
    problem : BackwardProblem
        With backend 'cuda' or 'host'.
    architecture : Architecture

    Returns
    -------
    Plan

    Raises
    ------
    UnsupportedError
        If no kernel for this architecture computes the problem.
    """
    p = problem.forward
    check_kind(architecture, "q", p.dtype, p.precision)
    width = padded(max(p.dim, p.dim_v))  # one for all: warps that own either gradient run the same code
    moved = {name: problem.layouts[name] for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    copy_bytes, why_copy = copy_size(moved)
    explicit, why_scores = explicit_scores(p)
    row = row_for("bwd_v2", architecture, p.dtype, width, p.len_q, copy_bytes, explicit, problem.deterministic)
    return Plan(
        kernel="bwd_v2",
        architecture=architecture,
        config=configure(row, architecture, p.dtype, p.precision, width, width, copy_bytes, explicit),
        reasons=tuple(filter(None, (row.reason, why_copy, why_scores))),
    )


def backward_launches(plan: Plan, problem: BackwardProblem) -> tuple[Launch, ...]:
    """The three grids: before, over keys, and after. None has a block if there is no query head."""
    p = problem.forward
    query_blocks = _query_tiles(plan, problem) * p.heads_q * math.prod(p.batch)
    key_blocks = _key_tiles(plan, problem) * p.heads_kv * math.prod(p.batch)
    blocks = (
        query_blocks,
        key_blocks * _splits(plan, problem),
        query_blocks + 2 * key_blocks * _stores_parts(plan, problem),
    )
    entries = plan.entries.items()
    if problem.zero:
        blocks = (0,) * len(entries)
    return tuple(checked(Launch(entry, number, shared)) for (entry, shared), number in zip(entries, blocks))


def backward_workspace(plan: Plan, problem: BackwardProblem) -> Workspace:
    """What the three kernels hand on to each other in device memory."""
    c, p = plan.config, problem.forward
    query_tiles = _query_tiles(plan, problem) * p.heads_q * math.prod(p.batch)
    key_tiles = _key_tiles(plan, problem) * p.heads_kv * _splits(plan, problem) * math.prod(p.batch)
    parts = [("stats", 4 * query_tiles * 2 * c.TILE_Q), ("dq_sums", 4 * query_tiles * c.TILE_Q * c.WIDTH)]
    if _stores_parts(plan, problem):
        parts += [(name, 4 * key_tiles * c.TILE_KV * c.WIDTH) for name in ("dk_parts", "dv_parts")]
    if problem.deterministic:
        parts.append(("turns", 4 * query_tiles))
    return Workspace(tuple(parts))


def heads_per_block(plan: Plan, problem: BackwardProblem) -> int:
    """How many query heads one block sums over.

    All that share its keys, so that gradients of keys are complete when a block ends, unless that leaves too few blocks: then as
    many as leave enough.
    """
    p = problem.forward
    blocks = _key_tiles(plan, problem) * p.heads_kv * math.prod(p.batch)
    together = p.heads_per_kv
    while together > 1 and blocks * (p.heads_per_kv // together) < FEWEST_BLOCKS:
        together = max(divisor for divisor in range(1, together) if p.heads_per_kv % divisor == 0)
    return together


def heads_together(plan: Plan, problem: BackwardProblem) -> int:
    """How many heads neighbouring blocks take in turn.

    With many, few blocks add to the same rows of dq at a time; too many would not share q and dout in the L2 cache. On an
    H200 up to 400 blocks run at once; of 1,024, 4,096 and 16,384 keys, the heads of about 1,024 blocks were fastest.
    """
    return max(1, BLOCKS_TOGETHER // max(_key_tiles(plan, problem), 1))


def _splits(plan: Plan, problem: BackwardProblem) -> int:
    return problem.forward.heads_per_kv // max(heads_per_block(plan, problem), 1)


def _stores_parts(plan: Plan, problem: BackwardProblem) -> bool:
    """Whether gradients of keys and values are added up from parts after all blocks have ended."""
    return _splits(plan, problem) > 1 or problem.sums_keys


def _query_tiles(plan: Plan, problem: BackwardProblem) -> int:
    return -(-problem.forward.len_q // plan.config.TILE_Q)


def _key_tiles(plan: Plan, problem: BackwardProblem) -> int:
    return -(-problem.forward.len_kv // plan.config.TILE_KV)
