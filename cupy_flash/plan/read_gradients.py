"""How kernels compute gradients of what scores read: a `KernelPlan` for each read, its grids and its workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy

from ..problem.backward import BackwardProblem
from ..problem.expression.derivative import derivative
from ..problem.expression.operations import apply
from ..problem.expression.tree import Literal, Node
from ..problem.read_gradients import ReadGradient, read_gradients
from .backward import delta_sign
from .columns import padded
from .copies import copy_size
from .explicit_scores import explicit_scores
from .expression_text import ExpressionText, Pressure
from .expressions import ELEMENTS, distance_tree, written
from .hoisting import EXACT, places_as_floats
from .kernel import ADDED_OF_PAIRS, KernelPlan, configure, kind_of_sinks, taken_apart, text_of
from .launch import Launch, checked
from .params import read_gradient_params
from .read_hopper import FILE as HOPPER
from .read_hopper import PRODUCERS, beside_bias, chosen_row, is_one_bias, maps_of, splits_of_units
from .read_tuning import read_rows
from .sequences import is_packed, tiles_of
from .stored_dbias import is_of_bias
from .tensor_map import TensorMap
from .tuning import row_for
from .workspace import Workspace

FILE = "bwd_scores"
MOVED = ("q", "k", "v", "dout")
MOST_BLOCKS = 2 * 132  # of units that blocks share: two for each multiprocessor of an H200
# Blocks a multiprocessor, that take one unit after the other: more than run at once, so that none is waited for long. Of
# bwd_scores_hopper one runs, and loads what the next unit takes beneath the last.
AT_A_TIME, OF_HOPPER = 8, 1
FEW_PARTS = 32  # of sums of pairs, of which a warp adds up all, as the header has it
ONE = Literal(1.0)
FLAGS = ("of_query", "of_key", "of_distance", "gathered", "scattered", "by_score", "clamped")  # of a part, which its text states


@dataclass(frozen=True, slots=True)
class ReadGradientPlan:
    """What computes the part that one read has in the gradient of an array.

    Parameters
    ----------
    part : ReadGradient
    kernel : KernelPlan
    launches : tuple of Launch
    workspace : Workspace
        What the launches need beside what the backward leaves.
    params : numpy.ndarray
        A size-1 array of `ScoreGradientParams`, or of `HopperScoreGradientParams`, with everything but the addresses.
    maps : dict of str to TensorMap
        The fields of the latter that are maps.
    """

    part: ReadGradient
    kernel: KernelPlan
    launches: tuple[Launch, ...]
    workspace: Workspace
    params: numpy.ndarray
    maps: dict[str, TensorMap]


def read_gradient_plans(problem: BackwardProblem, backward: KernelPlan) -> tuple[ReadGradientPlan, ...]:
    """A plan for each part of the gradients that a problem asks for and the backward does not store, in the order of execution.

    Parameters
    ----------
    problem : BackwardProblem
    backward : KernelPlan
        That of the other gradients, whose statistics of the queries these read.

    Raises
    ------
    UnsupportedError
        If no tile of the architecture is wide enough.
    """
    parts = [part for part in read_gradients(problem) if not (backward.config.STORE_DBIAS and is_of_bias(part))]
    return tuple(_plan(problem, part, backward) for part in parts)


def _plan(problem: BackwardProblem, part: ReadGradient, backward: KernelPlan) -> ReadGradientPlan:
    p, architecture, expressions = problem.forward, backward.architecture, _text(problem, part, backward)
    row, why_kernel = chosen_row(problem, part, architecture, expressions)
    if row is not None:
        file = HOPPER
        if is_one_bias(problem, part):  # of which a softcap, which comes before, asks nothing: so scores are only something more
            of_pair = _text(replace(problem, forward=replace(p, softcap=None)), part, backward, beside_bias(p))
            expressions = replace(of_pair, constants=(*of_pair.constants, ("ONE_BIAS", "true")))
        copy_bytes, why_copy = copy_size({"its gradient": part.of_pairs})  # the rest is moved by TMA
    else:
        file, (copy_bytes, why_copy) = FILE, copy_size({name: problem.layouts[name] for name in MOVED})
        crowded = expressions.pressure in (Pressure.SEVERAL, Pressure.MANY) or p.scores.dropout is not None
        rows, width = read_rows(architecture.name, p.dtype, crowded), padded(max(p.dim, p.dim_v))
        row = replace(row_for(FILE, architecture, p.dtype, width, p.len_q, copy_bytes, rows=rows), width=width)
    explicit, _ = explicit_scores(p, expressions, unless_large=file == HOPPER)
    kernel = KernelPlan(
        file=file,
        architecture=architecture,
        config=configure(
            row,
            architecture,
            p.dtype,
            p.precision,
            row.width,
            row.width,
            copy_bytes=copy_bytes,
            explicit=explicit,
            mask=p.mask.kind,
            sinks=kind_of_sinks(p),
            problem=p,
            expressions=expressions,
        ),
        expressions=expressions,
        reasons=tuple(filter(None, (_share(part), why_kernel, row.reason, why_copy))),
    )
    units, splits = _units(problem, part, kernel)
    launches = _launches(problem, part, kernel, units, splits)
    workspace = _workspace(part, kernel, units, splits)
    maps = maps_of(problem, part, kernel)
    params = read_gradient_params(problem, part, units, splits, backward.config.TILE_Q, delta_sign(backward), maps)
    return ReadGradientPlan(part, kernel, launches, workspace, params, maps)


def _share(part: ReadGradient) -> str:
    what = part.name if part.read is None else str(part.read)
    if part.scattered:
        return f"gradient of {what}: added to whichever element a pair reads, in any order"
    return f"gradient of {what}: sums in one order" + ", from which each element gathers its own" * part.gathered


def _text(
    problem: BackwardProblem, part: ReadGradient, backward: KernelPlan, apart: ExpressionText | None = None
) -> ExpressionText:
    """The text of the scores, or these taken apart, and of what a pair adds to which element."""
    scores = problem.forward.scores
    arrays = dict(scores.arrays)
    factor, longest = _factor(problem, part), max(problem.forward.len_q, problem.forward.len_kv)
    flags = {name: getattr(part, name) for name in FLAGS}
    stated = {name.upper(): "true" for name, is_so in (flags | {"has_factor": factor != ONE}).items() if is_so}
    text = apart or text_of(problem.forward)
    if backward.config.SCORES == "PLUS_LINEAR":  # whose statistics are taken apart as well
        text = taken_apart(problem.forward, text, backward.expressions.bends)
    element = ""

    def text_in_place(tree: Node) -> str:
        return written(tree, arrays, scores.free_axes)

    if part.scattered or part.gathered:
        number = scores.captured.index(part.name)
        element = f"place_in({', '.join(['x', str(number), *(text_in_place(index) for index in part.read.args)])})"
    return replace(
        text,
        slope="",  # which is the backward's to ask
        factor="" if factor == ONE else text_in_place(factor if longest >= EXACT else places_as_floats(factor)),
        element=element,
        constants=(*text.constants, *stated.items(), ("GradientElement", ELEMENTS[part.array.dtype])),
    )


def _factor(problem: BackwardProblem, part: ReadGradient) -> Node:
    """How fast what scores become changes with what is read."""
    if part.read is not None:
        return derivative(problem.forward.scores.score.tree, part.read)
    return ONE if part.name == "bias" else apply("neg", apply("float", distance_tree()))


def _units(problem: BackwardProblem, part: ReadGradient, kernel: KernelPlan) -> tuple[int, int]:
    """How many units the elements are cut into, and how many blocks share one."""
    p, c = problem.forward, kernel.config
    batch = math.prod(size for size, stride in zip(p.batch, part.of_pairs.strides) if stride != 0)
    summed = math.prod(p.batch) // max(batch, 1)
    units = batch * (p.heads_q // max(part.heads_summed, 1))
    query_tiles, key_tiles = (-(-n // tile) for n, tile in zip(part.elements_of, (c.TILE_Q, c.TILE_KV)))
    if part.of_distance:
        units *= key_tiles + c.TILE_Q // c.TILE_KV * (query_tiles - 1)
    units *= (query_tiles if part.of_query else 1) * (key_tiles if part.of_key else 1)
    if p.lengths is None:
        walked = summed * (1 if part.of_query else query_tiles) * (1 if part.of_key or part.of_distance else key_tiles)
    elif part.of_query:
        walked = summed
    else:  # blocks share out query tiles, and each takes the key tiles that one sees
        walked = tiles_of(p, c.TILE_Q, "q") if is_packed(p, "q") and summed > 1 else summed * query_tiles
    walked *= part.heads_summed
    if kernel.file == HOPPER:
        return units, splits_of_units(units, walked)
    return units, max(1, min(walked, MOST_BLOCKS // max(units, 1)))


def _launches(problem: BackwardProblem, part: ReadGradient, kernel: KernelPlan, units: int, splits: int) -> tuple[Launch, ...]:
    sweep = -(-part.elements // kernel.threads)
    adding = _blocks_that_add(part, kernel, units, splits)
    if part.of_distance:
        distances = problem.forward.len_q + problem.forward.len_kv - 1
        adding = part.places // max(distances, 1) * -(-distances // 32)
    blocks = {
        "bwd_scores_clear": sweep * (part.through_sums and part.first),
        "bwd_scores": units * splits,
        "bwd_scores_add": adding,
        "bwd_scores_gather": part.elements * part.gathered,
        "bwd_scores_store": sweep * (part.through_sums and part.last),
    }
    if problem.zero or not (problem.forward.len_q and problem.forward.len_kv and part.elements):
        blocks = dict.fromkeys(blocks, 0)  # the gradient is what it is allocated as, 0
    if kernel.file == HOPPER:
        blocks = {entry: blocks[entry.replace(HOPPER, FILE)] for entry in kernel.entries}
    in_turn = {FILE: AT_A_TIME, HOPPER: OF_HOPPER}
    return tuple(checked(Launch(entry, blocks[entry], shared, in_turn.get(entry))) for entry, shared in kernel.entries.items())


def _blocks_that_add(part: ReadGradient, kernel: KernelPlan, units: int, splits: int) -> int:
    """Blocks that add up partial sums: of the sums that a warp has, or of pairs with few parts, of those of all its warps."""
    if not _parts(part, kernel, splits):
        return 0
    of_pairs = part.of_query and part.of_key
    warps = units * -(-_sums_of_unit(part, kernel) // (ADDED_OF_PAIRS if of_pairs else 32))
    return -(-warps // kernel.config.WARPS) if of_pairs and splits <= FEW_PARTS else warps


def _parts(part: ReadGradient, kernel: KernelPlan, splits: int) -> int:
    """How many partial sums each element of a unit has, as ``kernels_cu/tile/element_sums.cuh`` makes them; 0 is none."""
    if part.scattered or (part.of_query and part.of_key and splits == 1):
        return 0
    return splits if part.of_query or part.of_distance else splits * (kernel.config.WARPS - PRODUCERS * (kernel.file == HOPPER))


def _sums_of_unit(part: ReadGradient, kernel: KernelPlan) -> int:
    rows, cols = (own or part.of_distance for own in (part.of_query, part.of_key))
    return (kernel.config.TILE_Q if rows else 1) * (kernel.config.TILE_KV if cols else 1)


def _workspace(part: ReadGradient, kernel: KernelPlan, units: int, splits: int) -> Workspace:
    partials = units * _parts(part, kernel, splits) * _sums_of_unit(part, kernel)
    parts = {"partials": 4 * partials, "places": 4 * part.places, "sums": 4 * part.elements * part.through_sums}
    return Workspace(tuple((name, size) for name, size in parts.items() if size))
