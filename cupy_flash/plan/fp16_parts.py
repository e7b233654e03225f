"""Float32 attention by products of float16 on sm_90a: each element of q, k and v in one or two parts, made on the device before.

`fwd_hopper` multiplies what 16 bits hold. A float32 is two such numbers, high and low, and a product three (3xFP16), which is as
accurate as three of TF32 and takes half their time; see ``kernels_cu/tile/fp16_parts.cuh``. With ``precision="tf32"`` it is one
number, of as many bits as TF32 has. Where q, k and v lie matters to the kernel before alone, so that any strides and head dims do.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy

from ..problem.forward import Problem
from ..problem.layout import Layout, dense_layout
from .architecture import Architecture
from .columns import PANEL
from .explicit_scores import LARGEST_SCALE, explicit_scores
from .expression_text import ExpressionText, Pressure
from .kernel import KernelPlan, configure, text_of
from .launch import Launch, checked
from .pace import Pace
from .pair_bits import with_bits
from .params import ROWS, add_lengths, captured_name
from .preparation import Preparation
from .sequences import is_packed, names_of_lengths, row_length, steps_of_batch, tiles_of
from .structs import constants, struct
from .tensor_map import layouts_of, obstacle
from .tuning import SHORT, TWO, WIDE, TileConfig
from .workspace import Workspace

OPERANDS = ("q", "k", "v")
MOST_PARTS = 2
FACTORS = 2  # of a query head, as HeadFactors of ``kernels_cu``
ONE_PART = "float32 in float16, with a scale for each head: as many bits as TF32 has"
TWO_PARTS = "float32 as two numbers of float16, with a scale for each head: three products in place of each"
WHY_PARTS = {1: ONE_PART, MOST_PARTS: TWO_PARTS}
# Head dims of keys and of values, beyond which registers do not hold sums of a key tile, or what becomes of scores besides.
MOST_DIMS, MOST_DIMS_ASKED = {"ieee": (192, 128), "tf32": (192, 192)}, (128, 128)
THREE_PRODUCTS = "three products of float16 in place of one, and sums of each key tile, since tensor cores cut long ones off"
WIDE_PRODUCTS, FOUR_STAGES = {**WIDE, "stages": 3, "stages_v": 3}, {**WIDE, "stages": 4, "stages_v": 4}
PARTS_ROWS = (
    TileConfig(64, 128, 128, THREE_PRODUCTS + "; measured 250, 241 causal", **TWO, pingpong=True, plain_scores=True),
    TileConfig(64, 128, 96, THREE_PRODUCTS, **TWO, stages=3, pingpong=True),
    TileConfig(128, 128, 48, THREE_PRODUCTS + "; measured 252, 243 causal", **WIDE_PRODUCTS),
    TileConfig(192, 128, 48, THREE_PRODUCTS + "; narrow values", **WIDE, width_v=128),
)
SEQUENCE_ROWS = (*PARTS_ROWS[:2], replace(PARTS_ROWS[2], width=96), TileConfig(128, 128, 32, THREE_PRODUCTS, **FOUR_STAGES))
OF_TERMS = "; narrower, since what becomes of scores takes registers"
TERM_ROWS = (
    TileConfig(64, 128, 96, THREE_PRODUCTS + OF_TERMS, **TWO, stages=3, pingpong=True),
    TileConfig(128, 128, 32, THREE_PRODUCTS + OF_TERMS, **FOUR_STAGES),
)
READING_ROWS = (TileConfig(64, 128, 64, THREE_PRODUCTS + OF_TERMS, **TWO, stages=4, stages_v=3, pingpong=True), TERM_ROWS[1])
DROPPING = "one product of float16, and registers for pairs that are dropped"
ONE_PART_ROWS = tuple(TileConfig(width, 128, 128, DROPPING, **TWO, pingpong=True) for width in (64, 128))
OF_BIAS = "; TMA brings a bias with the keys"
STAGED_ROWS = (
    TileConfig(64, 128, 64, THREE_PRODUCTS + OF_BIAS, **TWO, pingpong=True, staged_bias=True),
    TileConfig(128, 128, 32, THREE_PRODUCTS + OF_BIAS, **{**WIDE, "stages": 3, "stages_v": 3, "staged_bias": True}),
)
ALL_ROWS = (*PARTS_ROWS, *TERM_ROWS, *READING_ROWS)
LIGHT = (Pressure.TERM, Pressure.EXPRESSION)  # what leaves registers for TERM_ROWS
HEAVY = (Pressure.LONG_EXPRESSION, Pressure.SEVERAL, Pressure.MANY)  # and what leaves none for head dims above 64
NARROW = 64
TILE = TileConfig(32, 32, 16, "a block takes some rows of a head", warps=8, stages=1, min_blocks=4)
OF_SEQUENCES = replace(TILE, tile_q=256, tile_kv=256)
ROWS_AT_ONCE = 32  # of a block of fp16_parts.cu
LEAST_ROWS, MOST_BLOCKS = 128, 16  # of a block, and of a head
BANDWIDTH, LAUNCHES = 2.6e12, 15e-6  # of making parts, in bytes/s, and what its two launches take with their host, in s; on an H200
HALF_TILE = 64  # keys that a query tile computes besides those that its rows see, where a mask has an edge


PACES = {  # on an H200; and of fwd_v2
    "ieee": (Pace(220e12, 0.22e-9), Pace(55e12, 1.35e-9)),
    "tf32": (Pace(500e12, 0.18e-9), Pace(95e12, 0.85e-9)),
}


def fp16_parts(problem: Problem, architecture: Architecture) -> tuple[int, str]:
    """How many numbers of float16 stand for each element of q, k and v, 0 where they are multiplied as they are; and why.

    Parameters
    ----------
    problem : Problem
        As a kernel is told it.
    architecture : Architecture
    """
    asked = problem.kernel == "fwd_hopper"
    if problem.dtype != "float32" or architecture.name != "90a" or why_not_parts(problem) or not (asked or _pays(problem)):
        return 0, ""
    parts = parts_of(problem.precision)
    return parts, WHY_PARTS[parts]


def why_not_parts(problem: Problem) -> str:
    """Why products of float16 cannot compute a float32 problem, or ''."""
    if problem.kernel not in (None, "fwd_hopper") or problem.algorithm != "v2":
        return "another kernel was asked for"
    if why_not := why_not_scores(problem) or why_not_sequences(problem, {x: getattr(problem, x) for x in OPERANDS}):
        return why_not
    if problem.mask.queries is not None or row_length(problem) <= SHORT:
        return f"at most {SHORT} queries"
    crowded = asks_in_parts(problem) or (problem.lengths is not None and problem.precision == "ieee")
    dim, dim_v = MOST_DIMS_ASKED if crowded else MOST_DIMS[problem.precision]
    if problem.dim > dim or problem.dim_v > dim_v:
        return f"head dims above {dim}, or of values above {dim_v}, for which there are no registers"
    apart = problem.dim_v > 1 and problem.out.strides[-1] != 1
    if apart and (problem.precision == "tf32" or problem.scores):
        return "elements of a row of out are apart, for which there are no registers"
    told = in_fp16_parts(problem, MOST_PARTS)
    return _crowded(told) or obstacle(problem.batch, layouts_of(told), OPERANDS)


def why_not_scores(problem: Problem) -> str:
    """Why kernels of parts are not told what scores are, or drop no pairs, or ''."""
    scores, most = problem.scores, constants()["CAPTURED"] - 1
    if len(scores.arrays) > most or scores.place is not None:
        return f"factors have the place of the last array: at most {most} are read, and pairs are numbered from 0 on"
    if scores.dropout is None:
        return ""
    from .pair_tuning import drops_most  # late, as in `kernel.rows_of`

    return "at most 31 of 32 pairs are dropped" if drops_most(problem) else ""


def why_not_sequences(problem: Problem, operands: dict[str, Layout]) -> str:
    """Why no parts are made of sequences of their own lengths, or ''."""
    if problem.lengths is None:
        return ""
    if problem.lengths.cache is not None:
        return "of a cache, of which a call reads some rows, all would have to be in parts"
    for name, layout in operands.items():
        side = "kv" if name in ("k", "v") else "q"
        if problem.lengths.sequences > 1 and layout.strides[0] == 0 and not is_packed(problem, side):
            return "padded sequences of other lengths in the same rows have other scales"
    return ""


def _crowded(told: Problem) -> str:
    """Why there are no registers for what is asked for each pair, or ''."""
    text = expressions_in_parts(told)
    if text.takes_part and not text.pair_bits:
        return "a mask is asked of pairs"
    wide, drops = max(told.dim, told.dim_v) > NARROW, told.scores.dropout is not None
    of_bias = text.pressure is Pressure.BIAS and (text.pair_bits or told.lengths is not None or drops)
    if wide and (text.pressure in HEAVY or of_bias or (drops and (text.kind == "EXPRESSION" or told.lengths is not None))):
        return f"head dims above {NARROW}, where what becomes of scores leaves no registers"
    if drops and text.pressure in HEAVY:
        return "what becomes of scores leaves no registers beside dropout"
    return ""


def expressions_in_parts(told: Problem) -> ExpressionText:
    """The text of what becomes of scores, with bits in place of a mask."""
    return with_bits(told, text_of(told), apart=False)


def explicit_in_parts(problem: Problem, expressions: ExpressionText) -> tuple[bool, str]:
    """Whether each score is scaled by itself, and why: as in `explicit_scores`, and where anything becomes of scores."""
    if expressions.kind != "UNCHANGED" and problem.softcap is None:
        return True, "scores scaled one by one, as the parts of a head are, before anything becomes of them"
    return explicit_scores(problem, expressions)


def asks_in_parts(problem: Problem) -> bool:
    """Whether something is asked for which tiles of one part have no registers, unless they are those of two."""
    scaled = problem.softcap is not None or not 0 < problem.scale <= LARGEST_SCALE
    return bool(problem.scores) or problem.sinks is not None or scaled


def rows_in_parts(told: Problem, expressions: ExpressionText, parts: int) -> tuple[TileConfig, ...]:
    """The tiles for a problem in two parts, or in one with something that is asked of scores."""
    of_bias = expressions.pressure is Pressure.BIAS and expressions.kind == "PLUS_TERM" and not expressions.pair_bits
    if told.scores.dropout is not None:
        alone = expressions.pressure is Pressure.NOTHING and not expressions.pair_bits and told.sinks is None
        return ONE_PART_ROWS if parts == 1 and alone else READING_ROWS
    if of_bias and not obstacle(told.batch, layouts_of(told), ("bias",)):
        return STAGED_ROWS
    if expressions.pressure is Pressure.NOTHING:
        return PARTS_ROWS if told.lengths is None else SEQUENCE_ROWS
    return TERM_ROWS if expressions.pressure in LIGHT else READING_ROWS


def _pays(problem: Problem) -> bool:
    """Whether making parts takes less time than products of parts save. Of sequences always: none has other bits among others."""
    if problem.lengths is not None:
        return True
    moved = sum(_bytes_moved(getattr(problem, name), parts_of(problem.precision)) for name in OPERANDS)
    of_parts, of_v2 = (_seconds(problem, pace) for pace in PACES[problem.precision])
    return of_parts + moved / BANDWIDTH + LAUNCHES < of_v2


def _seconds(problem: Problem, pace: Pace) -> float:
    keys = min(problem.mask.pairs / problem.len_q + HALF_TILE, problem.len_kv)
    flops = 2 * (problem.dim + problem.dim_v) * keys * problem.len_q * problem.heads_q * math.prod(problem.batch)
    return pace.seconds(flops, keys, max(problem.dim, problem.dim_v))


def _bytes_moved(layout: Layout, parts: int) -> int:
    """What is read of an array, and written of so many parts."""
    return layout.itemsize * _distinct(layout) + 2 * _distinct(layout_in_parts(layout, parts))


def parts_of(precision: str) -> int:
    return 1 if precision == "tf32" else MOST_PARTS


def in_fp16_parts(problem: Problem, parts: int) -> Problem:
    """The problem that fwd_hopper is told: of float16, with high parts, and behind them low parts, in each row of q, k and v."""
    if not parts:
        return problem
    layouts = {name: layout_in_parts(getattr(problem, name), parts) for name in OPERANDS}
    return replace(problem, dtype="float16", precision="ieee", **layouts)


def layout_in_parts(layout: Layout, parts: int, columns: int | None = None) -> Layout:
    """Of an array ``(*batch, heads, rows, dim)``, of so many columns or more: dense but for axes along which it is the same."""
    *outer, rows, dim = layout.shape
    own = [1 if stride == 0 else size for size, stride in zip(outer, layout.strides)]
    shape = (*own, rows, parts * _columns(columns or dim))
    dense = dense_layout(shape, reversed(range(len(shape))), "float16", layout.device)
    return dense.broadcast_to((*outer, *shape[-2:]))


def _columns(dim: int) -> int:
    return -(-dim // PANEL) * PANEL


def _distinct(layout: Layout) -> int:
    """Elements of an array, those of axes along which it is the same counted once."""
    return math.prod(size for size, stride in zip(layout.shape, layout.strides) if stride != 0)


def given_name(name: str) -> str:
    """What a plan calls an array of a call where a kernel is told of its parts by the array's name."""
    return ROWS + name if name in (*OPERANDS, "dout") else name


def making_of_parts(kernel: KernelPlan, problem: Problem) -> Preparation | None:
    """What makes the parts; None for a kernel that is told of the arrays themselves.

    Parameters
    ----------
    kernel : KernelPlan
        Of attention.
    problem : Problem
        As a kernel would be told it without parts.
    """
    return preparation_of_parts(kernel, problem, {name: getattr(problem, name) for name in OPERANDS})


def preparation_of_parts(
    kernel: KernelPlan, problem: Problem, rows: dict[str, Layout], columns: int | None = None, factors: int = FACTORS
) -> Preparation | None:
    """What makes the parts of some operands, at least so many columns wide, and so many factors of each query head."""
    parts = kernel.config.FP16_PARTS
    if not parts:
        return None
    plan = parts_plan(kernel.architecture, parts, kernel.config.VARLEN)
    params, blocks, heads = _params(problem, rows, columns)
    params["factors_of_head"] = factors
    all_heads = int(params["all_heads"][0])
    (make, shared), (again, _) = plan.entries.items()
    launches = checked(Launch(make, blocks, shared)), checked(Launch(again, blocks + -(-all_heads // plan.config.WARPS), 0))
    sizes = {f"{name}_map": 2 * _distinct(layout_in_parts(x, parts, columns)) for name, x in rows.items()}
    last = captured_name(constants()["CAPTURED"] - 1)  # which no expression reads then
    found = ("largest", 4 * blocks * plan.config.WARPS), ("exponents", 4 * heads)
    results = Workspace((*sizes.items(), *found, (last, 4 * factors * all_heads)))
    lengths = names_of_lengths(problem)
    own = (*rows, *lengths, *(f"{name}_parts" for name in rows), "largest", "exponents", "factors")
    return Preparation(plan, launches, params, own, (*map(given_name, rows), *lengths, *results.names), results)


def parts_plan(architecture: Architecture, parts: int, lengths: bool = False) -> KernelPlan:
    """The kernel that makes so many parts, or that of sequences of their own lengths."""
    config = configure(OF_SEQUENCES if lengths else TILE, architecture, "float16", "ieee", TILE.width, TILE.width)
    return KernelPlan("fp16_parts", architecture, replace(config, FP16_PARTS=parts, VARLEN=lengths), (TILE.why,))


def _params(problem: Problem, layouts: dict[str, Layout], columns: int | None) -> tuple[numpy.ndarray, int, int]:
    """A size-1 array of `Fp16PartsParams` without addresses, how many blocks have rows, and how many heads all arrays have."""
    params = numpy.zeros(1, struct("Fp16PartsParams"))
    # Merged as the arrays of fwd_hopper are, or fewer: the numbers of batch elements are the same.
    sizes, strides = steps_of_batch(problem.batch, layouts, problem.lengths)
    params["batch"], params["heads"], params["heads_per_kv"] = sizes, problem.heads_q, problem.heads_per_kv
    params["all_heads"] = _elements(problem) * problem.heads_q
    params["len_q"], params["len_kv"] = problem.len_q, problem.len_kv
    add_lengths(params, problem.lengths)
    blocks = all_heads = 0
    for number, (name, layout) in enumerate(layouts.items()):
        heads, rows, dim = layout.shape[-3:]
        tensor, of = params[name], params["of"]
        tensor["batch_stride"] = strides[name]
        tensor["head_stride"], tensor["row_stride"], tensor["col_stride"] = layout.strides[-3:]
        own = [1 if stride == 0 else size for size, stride in zip((*sizes, heads), (*strides[name], layout.strides[-3]))]
        of_block, of_head, times = _blocks_of(problem, name, rows)
        told = {"batch": own[:-1], "heads": own[-1], "rows": rows, "dim": dim, "columns": _columns(columns or dim)}
        told |= {"rows_of_block": of_block, "blocks_of_head": of_head, "first_block": blocks, "first_head": all_heads}
        for field, value in told.items():
            of[field][:, number] = value
        blocks, all_heads = blocks + of_head * math.prod(own), all_heads + times * math.prod(own)
    params["of"]["first_block"][:, len(layouts) :] = params["first_of_factors"] = blocks
    return params, blocks, all_heads


def _elements(problem: Problem) -> int:
    """Batch elements that have factors: of sequences, also rows behind all of them."""
    return math.prod(problem.batch) + (problem.lengths is not None)


def _blocks_of(problem: Problem, name: str, rows: int) -> tuple[int, int, int]:
    """Rows of a block, blocks of a head of an array, and how many scales a head has there: of packed rows one for each sequence."""
    if problem.lengths is None:
        of_block = max(LEAST_ROWS, -(-rows // (MOST_BLOCKS * ROWS_AT_ONCE)) * ROWS_AT_ONCE)
        return of_block, -(-rows // of_block), 1
    side = "kv" if name in ("k", "v") else "q"
    scales = problem.lengths.sequences + 1 if is_packed(problem, side) else 1
    return OF_SEQUENCES.tile_q, tiles_of(problem, OF_SEQUENCES.tile_q, side), scales
