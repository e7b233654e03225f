"""How attention is computed: (`Problem`, `Architecture`) -> `KernelPlan`; pure functions."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UnsupportedError
from ..problem.forward import Problem
from ..problem.scores import Scores
from .architecture import Architecture
from .columns import PANEL, widths
from .copies import copy_size
from .explicit_scores import explicit_scores
from .expression_text import ExpressionText
from .few_rows import why_fwd_v2
from .few_tiles import narrower, row_of_few_tiles
from .fp16_parts import (
    asks_in_parts,
    explicit_in_parts,
    expressions_in_parts,
    fp16_parts,
    in_fp16_parts,
    rows_in_parts,
    why_not_parts,
)
from .hopper_splits import each_has_own, fills_tiles, hopper_splits, shares_tiles_of_sequence
from .kernel import (
    KernelPlan,
    check_kind,
    configure,
    kind_of_sinks,
    rows_of,
    taken_apart,
    text_of,
)
from .key_warps import ROWS as FEWEST
from .key_warps import with_key_warps
from .lengths_tuning import LEAST_PIECE, in_pages, rows_of_sequences, shape_of
from .packing import has_packed_scores, inner_heads, packing_of, with_inner_heads
from .pair_bits import why_bits, with_bits
from .rows_between import rows_between
from .sequences import row_length
from .split import deeper, few_of_sequences, last_combines, splits_keys
from .tensor_map import BOX_COLUMNS, layouts_of, obstacle
from .tuning import SHORT, TWO, Rows, TileConfig, row_for, table_for

MOVED = ("q", "k", "v", "out")  # what goes between device and shared memory in tiles
LISTED = ("fwd_v2", "fwd_hopper")  # kernels that visit the tiles of a list where pairs are masked
LAST_FIRST = "the last keys first where a linear term makes scores larger towards them"
DIAGONAL_FIRST = "the keys at the diagonal first, where a term of the distance makes scores largest"


def make_forward_plan(problem: Problem, architecture: Architecture) -> KernelPlan:
    """Choose the kernel for a problem.

    Parameters
    ----------
    problem : Problem
        With backend 'cuda' or 'host'.
    architecture : Architecture

    Returns
    -------
    KernelPlan

    Raises
    ------
    UnsupportedError
        If no kernel for this architecture computes the problem, or not the one that was asked for.
    """
    check_kind(architecture, "q", problem.dtype, problem.precision)
    asked, packing = problem, packing_of(problem)
    parts, why_parts = fp16_parts(packing.problem, architecture)
    problem = in_fp16_parts(packing.problem, parts)
    expressions = text_of(problem)
    if parts:
        kernel, why_kernel = "fwd_hopper", why_parts
    elif problem.lengths is None:
        kernel, why_kernel = _forward_kernel(problem, architecture, expressions)
    else:
        kernel, why_kernel = _varlen_kernel(asked, problem, architecture, expressions)
    inner = inner_heads(problem) if kernel == "fwd_hopper" and not parts else 1
    problem = with_inner_heads(problem, inner)
    why_inner = f"{inner} query heads of a group share a tile, query by query" * (inner > 1)
    (width, dim), (width_v, dim_v) = widths(kernel, problem.dim), widths(kernel, problem.dim_v)
    if parts:
        expressions = expressions_in_parts(problem)
    elif kernel == "fwd_hopper" and not has_packed_scores(problem):
        expressions = with_bits(problem, taken_apart(problem, expressions, _bends(problem)), bends=_bends(problem))
    copied = ("out",) if kernel == "fwd_hopper" else MOVED  # by lanes, not by TMA
    in_memory = {} if problem.lengths is None else problem.lengths.caches  # pages are as far apart as these say
    copy_bytes, why_copy = copy_size({name: getattr(problem, name) for name in copied} | in_memory)
    if parts:
        explicit, why_scores = explicit_in_parts(problem, expressions)
    else:
        explicit, why_scores = explicit_scores(problem, expressions, unless_large=kernel == "fwd_hopper")
    split, why_split = (False, "") if kernel == "fwd_hopper" else splits_keys(kernel, asked, problem.len_kv)
    of_lengths = kernel == "fwd_hopper" and problem.lengths is not None
    # Rows for few queries leave registers to tell which query of its head a row is, and where results in float32 go.
    crowded = kernel == "fwd_v2" and (problem.mask.queries is not None or _crowded_by_results(problem, architecture, copy_bytes))
    if parts == 2 or (parts and asks_in_parts(problem)):
        table = rows_in_parts(problem, expressions, parts)
    elif of_lengths and not problem.scores:
        table = rows_of_sequences(problem, parts)
    else:
        table = _rows(kernel, architecture, problem, expressions, explicit)
    row = row_for(
        kernel,
        architecture,
        problem.dtype,
        max(dim, dim_v),
        min(problem.len_q, SHORT) if crowded else row_length(problem),
        copy_bytes,
        explicit,
        mask=shape_of(problem),
        width_v=dim_v,
        sinks=problem.sinks is not None,
        lengths=problem.lengths is not None or split,
        rows=table,
    )
    itemsize = 4 if problem.dtype == "float32" else 2
    unlisted = False
    if kernel == "fwd_hopper":
        row = row_of_few_tiles(problem, row, narrower(problem, row.tile_q, table, expressions, explicit, parts))
        split, why_split = hopper_splits(problem, row)
        unlisted = of_lengths and each_has_own(problem, row.tile_q, split)
    if kernel == "fwd_v2":
        row = with_key_warps(row, architecture, itemsize, width, width_v, problem)
    combines, why_combines = False, "a kernel combines splits: most tiles that blocks of fwd_hopper share have many rows" * split
    if split and kernel == "fwd_v2":
        row = deeper(row, architecture, itemsize, width, width_v)
        combines, why_combines = last_combines(row, width, width_v, problem)
    if copy_bytes < 16 or problem.lengths is not None or problem.has_wider_results:
        # TMA would write beyond a row's end, see `obstacle`, or that of a sequence; and shared memory has no room for float32.
        row = replace(row, tma_store_out=False)
    if of_lengths and problem.lengths.paged:
        row = in_pages(row, problem.lengths.page_size)
    listed = bool(expressions.takes_part or expressions.pair_bits) and kernel in LISTED and problem.lengths is None
    rises = kernel == "fwd_hopper" and expressions.kind == "PLUS_LINEAR" and not listed
    rises &= not (of_lengths and problem.lengths.paged) and not (expressions.bends and problem.mask.shape != "full")
    why_keys = (DIAGONAL_FIRST if expressions.bends else LAST_FIRST) * rises
    shares = problem.shares_device and kernel == "fwd_hopper" and problem.lengths is None
    why_blocks = "a block for each query tile: something else has to run meanwhile" * shares
    why_pairs = why_bits(expressions) if kernel == "fwd_hopper" and problem.lengths is None else ""
    reasons = (
        why_kernel,
        packing.reason,
        why_inner,
        row.reason,
        why_split,
        "no list of query tiles: they, or their splits, are so few that each has a block of its own" * unlisted,
        why_combines,
        why_copy,
        why_scores,
        why_keys,
        why_blocks,
        why_pairs,
    )
    plan = KernelPlan(
        file=kernel,
        architecture=architecture,
        config=configure(
            row,
            architecture,
            problem.dtype,
            problem.precision,
            width,
            width_v,
            copy_bytes=copy_bytes,
            explicit=explicit,
            split_kv=split,
            unlisted=unlisted,
            last_combines=combines,
            pack_gqa=problem.mask.queries is not None,
            mask=problem.mask.kind,
            sinks=kind_of_sinks(problem),
            several_sinks=problem.sinks is not None and (problem.sinks.shape[-1] != 1 or expressions.kind == "PLUS_TERM"),
            problem=problem,
            expressions=expressions,
            tile_list=listed,
            own_lists=listed and kernel == "fwd_hopper" and problem.scores.dropout is None and _has_own_lists(row),
            in_turn=listed and kernel == "fwd_hopper" and not split and _may_be_uneven(problem.scores),
            from_last=rises,
            columns=(dim, dim_v),
        ),
        expressions=expressions,
        reasons=tuple(filter(None, reasons)),
    )
    return replace(plan, config=replace(plan.config, INNER_HEADS=inner, FP16_PARTS=parts)) if inner > 1 or parts else plan


def _bends(problem: Problem) -> bool:
    """Whether a term that bends at a diagonal is taken apart: in windows, tiles of narrow heads that lie across it cost more."""
    return problem.mask.shape == "full" or max(problem.dim, problem.dim_v) > PANEL


def _has_own_lists(row: TileConfig) -> bool:
    """Whether each consumer of fwd_hopper has a list of its own: of two, that is not worth what it takes in each step."""
    return row.warps > TWO["warps"]


def _may_be_uneven(scores: Scores) -> bool:
    """Whether query tiles may see any number of keys each, which is not known before: what a mask reads may be anything."""
    return scores.mask_array is not None or any(layout.shape for _, layout in scores.arrays)


def _refuse_v1(problem: Problem) -> None:
    if problem.scores and problem.algorithm == "v1":
        expected = "'auto' or 'v2' with score, mask, bias, alibi_slopes or dropout"
        raise UnsupportedError(f"algorithm: expected {expected}, got 'v1'")
    if problem.has_wider_results and problem.algorithm == "v1":
        raise UnsupportedError("algorithm: expected 'auto' or 'v2' for results in float32, got 'v1'")


def _forward_kernel(problem: Problem, architecture: Architecture, expressions: ExpressionText) -> tuple[str, str]:
    """The kernel file, and why it is not the one that the architecture is best at, or ''."""
    asked = problem.kernel
    _refuse_v1(problem)
    if asked in ("fwd_v1", "fwd_v2"):
        return asked, f"{asked} was asked for"
    exists, packed = bool(table_for("fwd_hopper", architecture, problem.dtype)), has_packed_scores(problem)
    why_v2 = why_fwd_v2(problem, expressions.pressure) if exists else ""
    if asked is None and why_v2:
        return "fwd_v2", why_v2
    few = problem.len_q <= FEWEST and splits_keys("fwd_v2", problem, problem.len_kv)[0]
    if asked is None and few and problem.scores.masks_pairs:
        return "fwd_v2", "few queries of which pairs are masked: in fwd_hopper a tile with a list has more rows" * exists
    if asked is None and (problem.algorithm != "v2" or not exists):
        return f"fwd_{problem.algorithm}", ""
    if not exists:
        why_not = f": {why_not_parts(problem)}" if architecture.name == "90a" else ""
        raise UnsupportedError(f"kernel: expected fwd_v1 or fwd_v2 for {problem.dtype} on {architecture}, got {asked!r}{why_not}")
    text = expressions if packed else with_bits(problem, expressions, bends=_bends(problem))
    crowded = _crowded(problem, architecture, text)
    why_not = crowded or obstacle(problem.batch, layouts_of(problem), MOVED)
    if not why_not:
        return "fwd_hopper", ""
    if asked is None:
        return "fwd_v2", why_not if crowded else f"no TMA: {why_not}"
    expected = "None, fwd_v1 or fwd_v2 for " + ("these scores" if crowded else "arrays that TMA cannot move")
    raise UnsupportedError(f"kernel: expected {expected}, got {asked!r}: {why_not}")


def _varlen_kernel(problem: Problem, packed: Problem, architecture: Architecture, expressions: ExpressionText) -> tuple[str, str]:
    """The same of sequences of their own lengths, of which a kernel is told `packed`."""
    asked = problem.kernel
    _refuse_v1(problem)
    if asked not in (None, "fwd_v2", "fwd_hopper"):
        raise UnsupportedError(f"kernel: expected None, 'fwd_v2' or 'fwd_hopper' with lengths of sequences, got {asked!r}")
    if problem.algorithm == "v1":
        raise UnsupportedError("algorithm: expected 'auto' or 'v2' with lengths of sequences, got 'v1'")
    if asked == "fwd_v2":
        return asked, "fwd_v2 was asked for"
    if not table_for("fwd_hopper", architecture, problem.dtype):
        if asked is None:
            return "fwd_v2", ""
        why_not = f": {why_not_parts(packed)}" if architecture.name == "90a" else ""
        raise UnsupportedError(f"kernel: expected None or 'fwd_v2' for {problem.dtype} on {architecture}, got {asked!r}{why_not}")
    why_not = _why_not_varlen(problem, packed, architecture, expressions)
    if not why_not or asked is None:
        return ("fwd_v2" if why_not else "fwd_hopper"), why_not
    raise UnsupportedError(f"kernel: expected None or 'fwd_v2' for these sequences, got {asked!r}: {why_not}")


def _why_not_varlen(problem: Problem, packed: Problem, architecture: Architecture, expressions: ExpressionText) -> str:
    """Why sequences of their own lengths are not for fwd_hopper, or ''."""
    lengths = problem.lengths
    if lengths.cache is not None and not lengths.paged and problem.scores.bias is not None:
        return "fwd_hopper brings keys and their bias of one batch element, not keys of an element of a cache"
    if _copies_pages(problem) and (problem.dim % BOX_COLUMNS or problem.dim_v % BOX_COLUMNS):
        return f"no TMA: pages have {lengths.page_size} keys, which {LEAST_PIECE} do not divide, nor {BOX_COLUMNS} head dims"
    can_share = packed.kernel == "fwd_hopper" and shares_tiles_of_sequence(packed)
    if few_of_sequences(problem) and not (can_share or fills_tiles(packed)):
        return "few queries: heads of a group share a tile, or blocks its keys, in fwd_v2"
    crowded = _crowded(problem, architecture, taken_apart(problem, expressions, _bends(problem)))
    if lengths.paged and _crowded_by_pages(problem, expressions):
        crowded = "fwd_hopper has no registers for pages and what is asked besides"
    layouts, cached = layouts_of(packed), lengths.caches
    named = [name for name in MOVED if name not in cached]
    no_map = obstacle(packed.batch, {name: x for name, x in layouts.items() if name not in cached}, named)
    if cached:
        no_map = no_map or obstacle(lengths.cache.shape[:1], cached, cached)
    return crowded or (no_map and f"no TMA: {no_map}")


def _rows(kernel: str, architecture: Architecture, problem: Problem, expressions: ExpressionText, explicit: bool = False) -> Rows:
    if kernel == "fwd_hopper" and has_packed_scores(problem):
        from .pair_tuning import packed_rows  # late, as in `rows_of`

        return packed_rows(problem, expressions.pressure)
    table = rows_of(kernel, architecture, problem, expressions)
    return rows_between(problem, table, expressions, explicit) + table if kernel == "fwd_hopper" else table


def _crowded(problem: Problem, architecture: Architecture, expressions: ExpressionText) -> str:
    """Why fwd_hopper cannot do what is asked for each pair, or '': mostly since its registers do not hold it."""
    from .pair_tuning import drops_most  # late, as in `rows_of`

    if drops_most(problem):
        return "fwd_hopper drops at most 31 of 32 pairs"
    _, widest = widths("fwd_hopper", max(problem.dim, problem.dim_v))
    rows = _rows("fwd_hopper", architecture, problem, expressions)
    if any(row.width >= widest and not (problem.lengths and row.without_lengths) for row in rows):
        return ""
    return "fwd_hopper has no registers for what is asked for each pair"


def _crowded_by_results(problem: Problem, architecture: Architecture, copy_bytes: int) -> bool:
    """Whether fwd_v2 would spill registers where its results are float32, as compiled for each."""
    narrow = max(problem.dim, problem.dim_v) <= 64 and architecture.number >= 120
    return problem.has_wider_results and (copy_bytes == 0 or narrow)


def _copies_pages(problem: Problem) -> bool:
    """Whether lanes of fwd_hopper copy keys, since TMA brings more of them at a time than a page has."""
    return problem.lengths is not None and problem.lengths.paged and problem.lengths.page_size % LEAST_PIECE != 0


def _crowded_by_pages(problem: Problem, expressions: ExpressionText) -> bool:
    """Whether the registers that say where pages are would be missed elsewhere, as compiled for each."""
    asked, widest = problem.softcap is not None or problem.mask.kind != "BAND", max(problem.dim, problem.dim_v)
    many_rows = widest <= 64 and (problem.mask.shape == "full" or explicit_scores(problem, expressions, unless_large=True)[0])
    return bool(problem.scores) or (asked and widest > 192) or (many_rows and _copies_pages(problem))  # of 128 keys a tile
