"""Float32 gradients by products of float16 on sm_90a: `bwd_hopper_parts`, and what makes q, k, v and dout two numbers of float16.

As in `fp16_parts`. P and dS become such numbers in the kernel, which finds an exponent for each tile of dS.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.layout import Layout
from .architecture import Architecture
from .copies import copy_size
from .expression_text import Pressure
from .fp16_parts import (
    BANDWIDTH,
    HEAVY,
    MOST_PARTS,
    NARROW,
    OPERANDS,
    WHY_PARTS,
    expressions_in_parts,
    layout_in_parts,
    parts_of,
    preparation_of_parts,
    why_not_scores,
    why_not_sequences,
)
from .grouping import RUNNING
from .kernel import KernelPlan
from .pace import Pace
from .params import ROWS
from .preparation import Preparation
from .tensor_map import obstacle
from .tuning import TileConfig

KERNEL = "bwd_hopper_parts"
GRADIENT_OPERANDS = (*OPERANDS, "dout")
FACTORS = 5  # of a query head, as GradientFactors of ``kernels_cu``
MOST_DIMS = 128
STORED, PAIR, WIDEST_ODD = ("dq", "dk", "dv"), 8, 96  # what lanes store, and bytes of two elements
ONE_GRADIENT = "one gradient a warpgroup, with sums of each tile"
THREE_PRODUCTS = f"three products of float16 in place of one; {ONE_GRADIENT}; measured"
OF_KEYS = {"warps": 12, "min_blocks": 1}
GRADIENT_ROWS = {  # by parts
    1: (
        TileConfig(64, 64, 64, f"{ONE_GRADIENT}; measured 248, 220 causal", **OF_KEYS, stages=3),
        TileConfig(128, 64, 64, f"{ONE_GRADIENT}; measured 386, 335 causal", **OF_KEYS, stages=3),
    ),
    MOST_PARTS: (
        TileConfig(64, 64, 64, f"{THREE_PRODUCTS} 180, 163 causal", **OF_KEYS, stages=3),
        TileConfig(128, 64, 64, f"{THREE_PRODUCTS} 211, 192 causal", **OF_KEYS),
    ),
}


def gradient_parts(problem: BackwardProblem, architecture: Architecture) -> tuple[int, str]:
    """How many numbers of float16 stand for each element of q, k, v and dout, 0 where they are multiplied as they are; and why.

    Parameters
    ----------
    problem : BackwardProblem
        As a kernel is told it.
    architecture : Architecture
    """
    asked = problem.kernel == KERNEL
    if architecture.name != "90a" or why_not_gradient_parts(problem) or not (asked or _pays(problem)):
        return 0, ""
    parts = parts_of(problem.forward.precision)
    return parts, WHY_PARTS[parts]


def why_not_gradient_parts(problem: BackwardProblem) -> str:
    """Why products of float16 cannot compute float32 gradients, or ''."""
    p = problem.forward
    if problem.kernel not in (None, KERNEL):
        return "another kernel was asked for"
    if p.dtype != "float32":
        return "only float32 is in parts"
    operands = {name: getattr(p, name) for name in OPERANDS} | {"dout": problem.dout}
    if why_not := why_not_scores(p) or why_not_sequences(p, operands):
        return why_not
    if max(p.dim, p.dim_v) > MOST_DIMS:
        return f"head dims above {MOST_DIMS}, for which there are no registers"
    gradients = (problem.dq, problem.dk, problem.dv)
    if any(x.shape[-1] > 1 and x.strides[-1] != 1 for x in gradients):
        return "elements of a row of a gradient are apart"
    told = in_gradient_parts(problem, MOST_PARTS)
    if max(p.dim, p.dim_v) > WIDEST_ODD and copy_size({name: told.layouts[name] for name in STORED})[0] < PAIR:
        return f"head dims above {WIDEST_ODD} and gradients that lanes store element by element, for which there are no registers"
    text = expressions_in_parts(told.forward)
    if text.kind == "EXPRESSION" or (text.takes_part and not text.pair_bits):
        return "an expression of scores, or a mask that is asked of pairs"
    drops = p.scores.dropout is not None
    if drops and p.lengths is not None and text.kind != "UNCHANGED":
        return "what becomes of scores of sequences leaves no registers beside dropout"
    crowded = text.pressure in HEAVY or (drops and (text.pressure is Pressure.BIAS or text.pair_bits))
    if crowded and max(p.dim, p.dim_v) > NARROW:
        return f"head dims above {NARROW}, where what becomes of scores leaves no registers"
    return obstacle(p.batch, layouts_in_parts(told, MOST_PARTS), GRADIENT_OPERANDS)


# As measured on an H200, with all launches; and of bwd_v2.
PACES = {
    "ieee": (Pace(200e12, 0.5e-9, 23e-6), Pace(50e12, 1.9e-9, 14e-6)),
    "tf32": (Pace(300e12, 0.45e-9, 21e-6), Pace(70e12, 1.5e-9, 13e-6)),
}
MOST_IN_TURN = 256  # queries of a block, of which there are more where they would be few, see `query_parts`
KEYS, BEGINNING = 64, 7e-6 / RUNNING  # of a block, and seconds for each of many to begin
BYTES = {"ieee": 10, "tf32": 8}  # read and written of an element: parts of it, and a half for delta, which reads dout and out
GAIN = 1.15  # below which two more launches, which the host has to queue as well, are not worth it


def _pays(problem: BackwardProblem) -> bool:
    """Whether making parts takes less time than products of parts save; of sequences as in `fp16_parts`."""
    p = problem.forward
    if p.lengths is not None:
        return not problem.zero  # always: none has other bits among others
    if problem.zero or not p.len_kv or not p.len_q:
        return False
    elements = math.prod(p.batch) * (2 * p.heads_q * p.len_q + 2 * p.heads_kv * p.len_kv) * max(p.dim, p.dim_v)
    blocks = math.prod(p.batch) * p.heads_kv * -(-p.len_kv // KEYS)
    making = elements * BYTES[p.precision] / BANDWIDTH + max(blocks - RUNNING, 0) * BEGINNING
    of_parts, of_v2 = (_seconds(problem, pace) for pace in PACES[p.precision])
    return (of_parts + making) * GAIN < of_v2


def _seconds(problem: BackwardProblem, pace: Pace) -> float:
    p = problem.forward
    queries = min(p.mask.pairs / p.len_kv + KEYS / 2, p.len_q)  # that see a key, and those that its tile has besides
    flops = problem.flops * queries * p.len_kv / max(p.mask.pairs, 1)
    return pace.seconds(flops, min(queries, MOST_IN_TURN), max(p.dim, p.dim_v))


def in_gradient_parts(problem: BackwardProblem, parts: int) -> BackwardProblem:
    """The gradients that the kernel is told: of float16, in rows of high parts and behind them low parts."""
    if not parts:
        return problem
    p = problem.forward
    columns = max(p.dim, p.dim_v)  # one shape of tile serves all
    layouts = {name: layout_in_parts(getattr(p, name), parts, columns) for name in OPERANDS}
    forward: Problem = replace(p, dtype="float16", precision="ieee", **layouts)
    return replace(problem, forward=forward)


def layouts_in_parts(told: BackwardProblem, parts: int) -> dict[str, Layout]:
    """All arrays that have the batch axes: parts of dout, and dout itself, which the kernel is told of as well."""
    columns = max(told.forward.dim, told.forward.dim_v)
    layouts = {name: layout for name, layout in told.layouts.items() if layout is not None} | told.forward.scores.layouts
    return layouts | {ROWS + "dout": told.dout, "dout": layout_in_parts(told.dout, parts, columns)}


def making_of_gradient_parts(kernel: KernelPlan, problem: BackwardProblem) -> Preparation | None:
    """What makes the parts; None for a kernel that is told of the arrays themselves.

    Parameters
    ----------
    kernel : KernelPlan
        Of gradients.
    problem : BackwardProblem
        As a kernel would be told it without parts.
    """
    p = problem.forward
    rows = {name: getattr(p, name) for name in OPERANDS} | {"dout": problem.dout}
    return preparation_of_parts(kernel, p, rows, max(p.dim, p.dim_v), FACTORS)
