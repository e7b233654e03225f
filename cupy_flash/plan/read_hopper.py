"""Where bwd_scores_hopper computes the gradient of what scores read: its tiles, its tensor maps, and blocks that share a unit."""

from __future__ import annotations

from dataclasses import replace

from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.layout import Layout
from ..problem.read_gradients import ReadGradient
from .architecture import Architecture
from .columns import padded
from .expression_text import ExpressionText, Pressure
from .kernel import KernelPlan, taken_apart, text_of
from .stored_dbias import is_of_bias
from .tensor_map import TensorMap, obstacle, tensor_maps
from .tuning import TileConfig

FILE = "bwd_scores_hopper"
IN_MAPS = ("q", "k", "v", "dout")
MULTIPROCESSORS = 132  # of an H200, each of which holds one block
ENDING = 2  # steps of the loop that the end of a unit takes about as long as
MOST_ROUNDS = 6  # of units that the blocks take one after the other, if these are split so that all end together
STAYS = "the bias of a unit stays in shared memory for all that share it; half a step is on its way beneath the other half"
IN_REGISTERS = "the bias of a unit, which TMA does not bring, stays in registers"
TWO_GROUPS = {"warps": 12, "min_blocks": 1}
STAGED_ROWS = (
    TileConfig(64, 128, 128, STAYS, **TWO_GROUPS, stages=4, staged_bias=True),
    TileConfig(128, 128, 128, STAYS, **TWO_GROUPS, stages=3, staged_bias=True),
    TileConfig(256, 128, 64, STAYS, **TWO_GROUPS, staged_bias=True),
)
OTHER_ROWS = (
    TileConfig(128, 128, 64, IN_REGISTERS, **TWO_GROUPS, stages=4),
    TileConfig(256, 128, 64, IN_REGISTERS, **TWO_GROUPS),
)
GO_THROUGH = "what a unit sums up stays in registers, for all tiles that share it"
WALKING_ROWS = (
    TileConfig(64, 128, 128, GO_THROUGH, **TWO_GROUPS, stages=4),
    TileConfig(128, 128, 128, GO_THROUGH, **TWO_GROUPS, stages=3),
    TileConfig(256, 128, 64, GO_THROUGH, **TWO_GROUPS),
)
CROWDED_ROWS = (
    TileConfig(128, 128, 64, GO_THROUGH, **TWO_GROUPS, stages=4),
    TileConfig(256, 128, 64, GO_THROUGH, **TWO_GROUPS),
)
ROWS = STAGED_ROWS + OTHER_ROWS
PRODUCERS = 4  # warps that load
MOST_HIDDEN = 8  # tiles for each that is seen: by an estimate, a block takes 1,500 cycles for that, and 100 for a hidden one
ELEMENTS = {"float16": "half_t", "bfloat16": "bfloat_t"}  # as ``kernels_cu/tile/element.cuh`` has them


def text_of_rows(dtype: str) -> ExpressionText:
    """What the rows of a dtype are compiled with to be looked at: a bias of that dtype, whose gradient has it too."""
    stated = {name: "true" for name in ("HAS_BIAS", "BIAS_BY_TWO", "OF_QUERY", "OF_KEY", "ONE_BIAS")}
    stated |= {name: ELEMENTS[dtype] for name in ("BiasElement", "GradientElement")}
    return ExpressionText("PLUS_TERM", "(at.bias * x.unit)", constants=tuple(stated.items()), pressure=Pressure.BIAS)


def rows_for(architecture: Architecture, dtype: str) -> tuple[TileConfig, ...]:
    """All rows of the kernel; none on an architecture and for a dtype that it does not exist for."""
    return ROWS if architecture.name == "90a" and dtype in ELEMENTS else ()


def is_one_bias(problem: BackwardProblem, part: ReadGradient) -> bool:
    """Whether a gradient is of a bias of queries and keys, and scores become nothing more."""
    return is_of_bias(part) and part.of_query and part.of_key and _adds_bias_alone(problem.forward)


def chosen_row(
    problem: BackwardProblem, part: ReadGradient, architecture: Architecture, expressions: ExpressionText
) -> tuple[TileConfig | None, str]:
    """The row for a gradient, or None and why bwd_scores computes it instead; '' where there is nothing to choose."""
    p = problem.forward
    if not rows_for(architecture, p.dtype):
        return None, ""
    one_bias = is_one_bias(problem, part)
    no_map = obstacle(p.batch, _layouts(problem, part), IN_MAPS)
    why_not = no_map and f"no TMA: {no_map}"
    if part.by_score:
        why_not = "which element a pair reads depends on its score"
    elif p.lengths is not None and not one_bias:
        why_not = "sequences have lengths of their own, and it is of no bias alone"
    elif not (part.of_query and part.of_key) and _hides_most(p):
        why_not = "a window hides most tiles of a unit, which its blocks would pass by one after the other"
    if why_not:
        return None, f"not {FILE}: {why_not}"
    width = padded(max(p.dim, p.dim_v))
    if not one_bias:
        whole = part.of_distance or (part.of_query and part.of_key)  # sums of all pairs of a tile, and not of its rows or columns
        crowded = (whole and expressions.kind == "EXPRESSION") or expressions.pressure in (Pressure.SEVERAL, Pressure.MANY)
        row = next(row for row in (CROWDED_ROWS if crowded else WALKING_ROWS) if row.width >= width)
        return replace(row, width=width), ""
    # The kernel gets the bias as the backward does, with the batch axes of all arrays merged, and ldmatrix moves 16 bits.
    staged = p.scores.bias.dtype in ELEMENTS and not obstacle(p.batch, _layouts(problem, part), ("bias",))
    row = next(row for row in (STAGED_ROWS if staged else OTHER_ROWS) if row.width >= width)
    return replace(row, width=width), ""


def _hides_most(problem: Problem) -> bool:
    """Whether the mask of one interval hides so many tiles that to pass them by takes about as long as to compute the others."""
    if problem.mask.shape != "window":
        return False
    rows = 128  # of the widest tiles
    seen = int(problem.mask.tiles_of_keys(rows, rows).sum())
    return -(-problem.len_q // rows) * -(-problem.len_kv // rows) > (1 + MOST_HIDDEN) * seen


def _adds_bias_alone(problem: Problem) -> bool:
    """Whether scores become nothing more. A softcap comes before, of which the gradient of a bias asks nothing."""
    text = text_of(replace(problem, softcap=None, scores=replace(problem.scores, mask=None, mask_array=None)))
    return (text.kind, text.pressure) == ("PLUS_TERM", Pressure.BIAS) or beside_bias(problem) is not None


def beside_bias(problem: Problem) -> ExpressionText | None:
    """The text of scores that become a bias and a term of the key more, taken apart; None of any other."""
    capped_before = replace(problem, softcap=None)
    found = taken_apart(capped_before, text_of(capped_before))
    return found if found.has_key_term else None


def maps_of(problem: BackwardProblem, part: ReadGradient, kernel: KernelPlan) -> dict[str, TensorMap]:
    """The tensor maps that a kernel is given besides the arrays, by field; none if it is another one."""
    if kernel.file != FILE:
        return {}
    queries, keys = kernel.config.TILE_Q, kernel.config.TILE_KV
    boxes = dict(zip(IN_MAPS, (queries, keys, keys, queries))) | ({"bias": queries} if kernel.config.STAGED_BIAS else {})
    found = tensor_maps(problem.forward.batch, _layouts(problem, part), boxes)
    return {f"{name}_map": described for name, described in found.items()}


def _layouts(problem: BackwardProblem, part: ReadGradient) -> dict[str, Layout]:
    """All arrays whose batch axes are merged, as `read_gradient_params` merges them."""
    given = {name: layout for name, layout in problem.layouts.items() if layout is not None}
    return given | problem.forward.scores.layouts | {"gradient": part.of_pairs}


def splits_of_units(units: int, walked: int) -> int:
    """How many blocks share a unit of so many steps: as many as make all blocks end soonest.

    Blocks take units, or parts of them, in rounds; the last round of few units leaves most blocks without one. The end of a unit
    takes time as well, and with more parts, so do partial sums.
    """
    most = max(1, min(walked, MOST_ROUNDS * MULTIPROCESSORS // max(units, 1)))

    def steps(splits: int) -> int:
        return -(-units * splits // MULTIPROCESSORS) * (-(-walked // splits) + ENDING * (1 + (splits > 1)))

    return min(range(1, most + 1), key=steps)
