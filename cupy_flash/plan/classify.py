"""Which tiles blocks visit where pairs are masked one by one: found on the device before, by a small kernel of its own.

It asks the same expression of a tile, by intervals (`tile_text`), and where these do not tell, of each pair, for which it reads
the same array. What it leaves are bits, two for each tile: see ``kernels_cu/tile/tile_list.cuh``; and for kernels that ask no
pair, one for each pair, see `pair_bits`. Nothing is copied to the host.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..problem.forward import Problem
from ..problem.scores import Scores, told_apart
from .kernel import KernelPlan, configure, text_of
from .launch import Launch, checked
from .pair_bits import bytes_of_bits
from .params import captured_name, classify_params, names_of_scores
from .preparation import Preparation
from .tuning import TileConfig
from .workspace import Workspace

TILE = TileConfig(32, 16, 16, "a warp takes a tile, of any size", warps=8, stages=1, min_blocks=4)
MOST_BLOCKS = 6  # with bits, where most blocks have little to do: measured 11 to 18 % faster, though long masks spill
BITS = 32  # tiles of a word
BYTES = 4  # of a word, each of which a block finds
CONSUMER_ROWS = 64  # queries of a warpgroup of fwd_hopper
PER_TILE = 2  # bits: whether any pair takes part, and whether all do


def classification_of(kernel: KernelPlan, problem: Problem, by_keys: bool = False, in_order: bool = False) -> Preparation | None:
    """What finds the tiles for a kernel; None for one that visits all.

    Parameters
    ----------
    kernel : KernelPlan
        Of attention or of its gradients.
    problem : Problem
        As the user states it.
    by_keys : bool
        Whether its blocks own keys, so that lists are of query tiles.
    in_order : bool
        Whether they add to dq in order, for which they need the key tiles of a query tile as well.
    """
    c = kernel.config
    if not c.TILE_LIST:
        return None
    asked, found = _mask_alone(problem.scores), kernel.architecture
    text = text_of(replace(problem, scores=asked, softcap=None))
    if asked.mask is not None:
        from .tile_text import with_tiles  # late: it takes the language of expressions

        text = with_tiles(text, asked, max(problem.len_q, problem.len_kv))
    kinds = {"mask": problem.mask.kind, "expressions": text, "pair_bits": c.PAIR_BITS}
    tile = replace(TILE, min_blocks=MOST_BLOCKS) if c.PAIR_BITS else TILE
    config = configure(tile, found, "float16", "ieee", tile.width, tile.width, **kinds)
    classify = KernelPlan("classify", found, config, (TILE.why,), text)
    batches, heads = told_apart(problem.scores, math.prod(problem.batch), problem.heads_q)
    rows = problem.len_q if c.PACK_GQA else rows_of_list(kernel)  # a row is no query there
    query_tiles, key_tiles = -(-problem.len_q // rows), -(-problem.len_kv // c.TILE_KV)
    tiles, others = (key_tiles, query_tiles) if by_keys else (query_tiles, key_tiles)
    lists, words = batches * heads * tiles, -(-others // BITS)
    size = 4 * PER_TILE * lists * words
    if c.PAIR_BITS:  # behind them, from a multiple of 32 words on
        size = -(-size // 128) * 128 + bytes_of_bits(problem, *((c.TILE_KV, c.TILE_Q) if by_keys else (rows, c.TILE_KV)), by_keys)
    parts = [("tile_lists", size)]
    launches = [Launch("classify", lists * words * BYTES, classify.entries["classify"])]
    if in_order:
        parts.append(("tile_columns", 4 * batches * heads * query_tiles * -(-key_tiles // BITS)))
        launches.append(Launch("classify_columns", batches * heads * query_tiles, 0))
    results = Workspace(tuple(parts))
    names = names_of_scores(asked)
    # Another kernel counts all arrays that expressions read, and not only those of the mask.
    numbers = [problem.scores.captured.index(name) for name in asked.captured]
    taken = (*names[: len(asked.operands)], *(captured_name(number) for number in numbers))
    return Preparation(
        classify,
        tuple(map(checked, launches)),
        classify_params(problem, asked, (batches, heads), (rows, c.TILE_KV), by_keys),
        (*names, *results.names),
        (*taken, *results.names),
        results,
    )


def rows_of_list(kernel: KernelPlan) -> int:
    """Queries that have a list of key tiles together, or whose tile is named by lists of query tiles."""
    c = kernel.config
    return CONSUMER_ROWS if c.OWN_LISTS else c.TILE_Q


def _mask_alone(scores: Scores) -> Scores:
    """What classification is told of scores: what masks pairs, and no array that only something else reads."""
    read: set[str] = set()
    if scores.mask is not None:
        from ..problem.expression.reads import reads  # late: it takes the language of expressions

        read = {of.name for of in reads(scores.mask.tree)}
    return replace(
        scores,
        score=None,
        bias=None,
        alibi_slopes=None,
        dropout=None,
        arrays=tuple((name, layout) for name, layout in scores.arrays if name in read),
        operands=tuple(name for name in scores.operands if name == "mask"),
        seed_on_device=False,
    )
