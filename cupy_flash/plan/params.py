"""Problems in the form in which kernels are told them: the structs of ``kernels_cu/params.cuh``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy

from ..errors import UnsupportedError
from ..problem.forward import FORWARD_ARRAYS, Problem
from ..problem.layout import Layout
from ..problem.lengths import Lengths
from ..problem.mask import UNBOUNDED
from ..problem.scores import Scores, told_apart
from .heads_together import listed_heads_together, query_heads_together
from .sequences import SEQUENCES, names_of_lengths, steps_of_batch
from .shared_bias import elements_in_turn, listed_sharers_in_turn
from .softcap import cap_polynomial, softcap_of_kernel
from .split import KeySplits
from .structs import struct
from .tensor_map import TensorMap

if TYPE_CHECKING:
    from ..problem.backward import BackwardProblem
    from ..problem.merge import MergeProblem
    from ..problem.read_gradients import ReadGradient
    from .grouping import Grouping

SCORES = "scores."  # what the names of words in `ScoreParams` begin with
ROWS = "rows of "  # what those begin with that a kernel is told of beside a map of something else
TILES = "tile_"  # and those of parts of workspace in `TileLists`
_BACKWARD_DIVMODS = ("heads_together_divmod", "group_divmod", "units_divmod", "heads_per_kv_divmod", "accum_heads_divmod")
_UNIT_DIVMODS = ("splits_divmod", "key_tiles_divmod", "query_tiles_divmod", "owner_heads_divmod")
_GROUPING_NUMBERS = ("owners", "last_heads", "reused", "cleared_after", "backwards", "first_tiles", "finishing", "heads_ahead")
_GROUPING_NUMBERS += ("makers",)


def forward_params(problem: Problem, splits: KeySplits | None = None) -> numpy.ndarray:
    """A size-1 array of `ForwardParams` with everything but the addresses; `splits` where blocks share query tiles.

    Raises
    ------
    UnsupportedError
        If a length or the number of batch axes is beyond what the kernels count.
    """
    layouts = {name: getattr(problem, name) for name in FORWARD_ARRAYS}
    params = _with_strides("ForwardParams", problem.batch, layouts, problem.scores, problem.lengths)
    _add_scores(params, problem)
    _add_sinks(params, problem)
    _add_pairs(params, problem)
    add_lengths(params, problem.lengths)
    if splits is not None:
        numbers = splits.tiles_of_head, max(problem.heads_q, 1), splits.most, splits.keys  # without heads nothing is launched
        for name, number in zip(("tiles", "heads", "splits", "split_keys"), numbers):
            params[f"{name}_divmod"] = fast_divmod(number)
        params["split_tiles"], params["partial_rows"] = splits.tiles, splits.partial_rows
    return params


def hopper_forward_params(
    problem: Problem, maps: dict[str, TensorMap], tile_q: int, tile_kv: int, splits: KeySplits | None = None
) -> numpy.ndarray:
    """A size-1 array of `HopperForwardParams` with everything but the addresses, its maps in the clear.

    Which tiles a block takes is not in it yet, see `schedule_params`. Of sequences of their own lengths it is `HopperVarlenParams`:
    there a block finds its tiles on the device.

    Raises
    ------
    UnsupportedError
        As `forward_params`.
    """
    layouts = {name: getattr(problem, name) for name in FORWARD_ARRAYS}
    struct_name = "HopperForwardParams" if problem.lengths is None else "HopperVarlenParams"
    params = _with_strides(struct_name, problem.batch, layouts, problem.scores, problem.lengths)
    for name, described in maps.items():
        params[name] = described.in_the_clear()
    _add_scores(params, problem)
    _add_sinks(params, problem)
    _add_pairs(params, problem)
    with numpy.errstate(over="ignore"):  # where scores are scaled one by one, nobody reads it
        params["scale_log2"] = params["scale"] * numpy.float32(math.log2(math.e))
    add_lengths(params, problem.lengths)
    params["heads_divmod"] = fast_divmod(problem.heads_q)
    if problem.lengths is None:
        tiles_of_head = -(-problem.len_q // tile_q)
        params["tiles"] = tiles_of_head * problem.heads_q * math.prod(problem.batch)
        params["tiles_of_head_divmod"] = fast_divmod(tiles_of_head)
        in_turn = elements_in_turn(problem, int(params["tiles"][0])) if "bias_map" in maps else 1
        params["in_turn_divmod"] = fast_divmod(in_turn)
        params["heads_together_divmod"] = fast_divmod(listed_heads_together(problem, listed_sharers_in_turn(problem, in_turn)))
    else:
        params["heads_together_divmod"] = fast_divmod(query_heads_together(problem, tile_q))
        params["tiles_of_head_divmod"] = fast_divmod(max(-(-problem.len_q // tile_q), 1))
    if splits is not None:
        params["split_keys_divmod"] = fast_divmod(splits.keys)
        params["most_splits"], params["split_tiles"], params["partial_rows"] = splits.most, splits.tiles, splits.partial_rows
    return params


def fast_divmod(number: int) -> tuple[int, int, int]:
    """What a kernel needs to divide numbers below 2**31 by this one with a product and a shift.

    The multiplier is above 2**(32 + shift) / number by a part in 2**31 or less, which adds less than 1 / number to a quotient
    (Granlund and Montgomery, 1994). There is none for 1, and it is 0.
    """
    if number == 1:
        return 1, 0, 0
    shift = (number - 1).bit_length() - 1
    return number, (1 << (32 + shift)) // number + 1, shift


def backward_params(problem: BackwardProblem, grouping: Grouping, maps: dict[str, TensorMap]) -> numpy.ndarray:
    """A size-1 array of `BackwardParams`, or with maps `HopperBackwardParams`, with everything but the addresses.

    Raises
    ------
    UnsupportedError
        As `forward_params`.
    """
    name, scores = "HopperBackwardParams" if maps else "BackwardParams", problem.forward.scores
    params = _with_strides(name, problem.forward.batch, problem.layouts, scores, problem.forward.lengths)
    for name, described in maps.items():
        params[name] = described.in_the_clear()
    if maps:
        p, g = problem.forward, grouping
        numbers = g.heads_together, g.blocks, p.heads_q // g.heads_per_block, p.heads_per_kv, g.accum_heads
        for name, number in zip(_BACKWARD_DIVMODS, numbers):
            params[name] = fast_divmod(number)
        for name in _GROUPING_NUMBERS:
            params[name] = getattr(g, name)
    _add_scores(params, problem.forward)
    _add_sinks(params, problem.forward)
    _add_pairs(params, problem.forward)
    add_lengths(params, problem.forward.lengths)
    params["heads_per_block"], params["heads_together"] = grouping.heads_per_block, grouping.heads_together
    if problem.forward.softcap is not None:
        params["per_softcap"] = math.log(2) / params["softcap"]
    return params


def read_gradient_params(
    problem: BackwardProblem,
    part: ReadGradient,
    units: int,
    splits: int,
    stats_rows: int,
    delta_sign: int,
    maps: dict[str, TensorMap],
) -> numpy.ndarray:
    """A size-1 array of `ScoreGradientParams`, or with maps `HopperScoreGradientParams`, with everything but the addresses.

    Parameters
    ----------
    problem : BackwardProblem
    part : ReadGradient
    units, splits : int
        How many units the elements are cut into, and how many blocks share one.
    stats_rows, delta_sign : int
        Rows of the tiles that the backward has statistics of, and what its delta is multiplied by.
    maps : dict of str to TensorMap

    Raises
    ------
    UnsupportedError
        As `forward_params`.
    """
    layouts = problem.layouts | {"gradient": part.of_pairs}
    forward = problem.forward
    name = "HopperScoreGradientParams" if maps else "ScoreGradientParams"
    params = _with_strides(name, forward.batch, layouts, forward.scores, forward.lengths)
    for name, described in maps.items():
        params[name] = described.in_the_clear()
    _add_scores(params, forward)
    _add_pairs(params, forward)
    add_lengths(params, forward.lengths)
    params["elements_q"], params["elements_kv"] = part.elements_of
    params["head_kv_stride"], params["first_element"] = part.head_kv_stride, part.first_element
    params["elements"], params["through_sums"] = part.elements, part.through_sums
    params["batch_summed"] = numpy.where(params["gradient"]["batch_stride"] == 0, params["batch"], 1)
    params["heads_summed"], params["splits"], params["parts"] = part.heads_summed, splits, max(units * splits, 0)
    params["stats_rows_divmod"], params["delta_sign"] = fast_divmod(stats_rows), delta_sign
    if maps:
        tiles = (-(-length // maps[name].box_rows) for name, length in (("k_map", forward.len_kv), ("q_map", forward.len_q)))
        numbers = splits, *tiles, forward.heads_q // max(part.heads_summed, 1)
        for field, number in zip(_UNIT_DIVMODS, numbers):
            params[field] = fast_divmod(max(number, 1))
        params["walked"] = part.heads_summed * numpy.prod(params["batch_summed"], dtype=numpy.int64)
    return params


def classify_params(
    problem: Problem, asked: Scores, told_apart: tuple[int, int], tile: tuple[int, int], by_keys: bool
) -> numpy.ndarray:
    """A size-1 array of `ClassifyParams` with everything but the addresses.

    Parameters
    ----------
    problem : Problem
    asked : Scores
        What masks pairs, alone.
    told_apart : tuple of int
        Batch elements and heads that have tiles of their own.
    tile : tuple of int
        Its queries and keys.
    by_keys : bool
        Whether lists are of query tiles, for each key tile.

    Raises
    ------
    UnsupportedError
        As `forward_params`.
    """
    batches, heads = told_apart
    params = _with_strides("ClassifyParams", problem.batch, {}, asked)
    if batches != math.prod(problem.batch):
        params["batch"] = 1
    _add_mask(params, problem)
    _add_pairs(params, replace(problem, scores=asked))
    tiles = -(-problem.len_q // tile[0]), -(-problem.len_kv // tile[1])
    params["heads_per_kv"], params["tile_q"], params["tile_kv"] = problem.heads_per_kv, *tile
    params["by_keys"], params["others"] = by_keys, tiles[not by_keys]
    for field, number in (("words", -(-tiles[not by_keys] // 32)), ("tiles", tiles[by_keys]), ("heads", heads)):
        params[field + "_divmod"] = fast_divmod(max(number, 1))
    return params


def merge_params(problem: MergeProblem) -> numpy.ndarray:
    """A size-1 array of `MergeParams` with everything but the addresses.

    Raises
    ------
    UnsupportedError
        As `forward_params`.
    """
    *batch, heads, len_q, dim_v = problem.layouts["out"].shape
    _check_length("out_a", len_q)
    params = _with_strides("MergeParams", tuple(batch), problem.layouts)
    _check_count("out_a", "heads", heads)
    params["heads"], params["len_q"], params["dim_v"] = heads, len_q, dim_v
    return params


def places_of(params: numpy.ndarray, name: str) -> dict[str, int]:
    """Which 64-bit words of a struct are the address of the array or the part of workspace called `name`, by field."""
    fields = params.dtype.fields  # the address is the first field of a TENSOR and of a TENSOR_MAP
    if name.startswith(ROWS):
        return {field: fields[field][1] // 8 for field in (name.removeprefix(ROWS),) if field in fields}
    if "sequences" in fields and name.startswith(SEQUENCES):
        in_sequences = struct("SequenceParams").fields
        return {name: (fields["sequences"][1] + in_sequences[name.removeprefix(SEQUENCES)][1]) // 8}
    if "scores" in fields and name.startswith((SCORES, TILES)):
        short = name.removeprefix(SCORES)
        found = {name: (fields["scores"][1] + _place_in_scores(short)) // 8}
        return found | {f"{short}_map": fields[f"{short}_map"][1] // 8 for _ in range(f"{short}_map" in fields)}
    return {field: fields[field][1] // 8 for field in (name, f"{name}_map") if field in fields}


def names_of_given(problem: Problem) -> tuple[str, ...]:
    """What `places_of` calls all that a call gives behind the arrays that every attention has, in order."""
    return (*names_of_lengths(problem), *names_of_scores(problem.scores))


def names_of_scores(scores: Scores) -> tuple[str, ...]:
    """What `places_of` calls what a call gives to scores, in order; a seed that is no device array is two words."""
    own = {"bias": ("bias",), "mask": ("pair_mask",), "alibi_slopes": ("alibi_slopes",)}
    own["seed"] = ("seed",) if scores.seed_on_device else ("seed_low", "offset")
    names = [word for name in scores.operands for word in own[name]]
    return (*(SCORES + name for name in names), *map(captured_name, range(len(scores.arrays))))


def captured_name(number: int) -> str:
    """What `places_of` calls an array that expressions read."""
    return f"{SCORES}captured {number}"


def _place_in_scores(name: str) -> int:
    """How many bytes into `ScoreParams` a word lies."""
    fields = struct("ScoreParams").fields
    if name.startswith(TILES):
        return fields["tiles"][1] + struct("TileLists").fields[name.removeprefix(TILES)][1]
    if name in ("seed_low", "offset"):
        return fields["dropout"][1] + struct("DropoutParams").fields[name][1]
    if name.startswith("captured "):
        return fields["captured"][1] + int(name.split()[1]) * struct("CapturedArray").itemsize
    return fields[name][1]


def _add_pairs(params: numpy.ndarray, problem: Problem) -> None:
    """What kernels are told of arrays that scores read, but where they are."""
    scores, into = problem.scores, params["scores"]
    if not scores:
        return
    for number, (_, layout) in enumerate(scores.arrays):
        axes = len(layout.shape)
        into["captured"]["stride"][:, number, :axes] = layout.strides
        into["captured"]["extent"][:, number, :axes] = layout.shape
    if scores.masks_pairs:
        apart = told_apart(scores, math.prod(problem.batch), problem.heads_q)
        into["tiles"]["batches"], into["tiles"]["heads"] = apart
    if scores.dropout is not None:
        into["dropout"]["threshold"], into["dropout"]["scale"] = scores.dropout.threshold, scores.dropout.scale
    if scores.place is not None:  # in the last array, which no expression reads then
        last = into["captured"]
        last["data"][:, -1] = scores.place.q | scores.place.kv << 32
        last["extent"][:, -1, 0] = scores.place.head


def add_lengths(params: numpy.ndarray, lengths: Lengths | None) -> None:
    """What kernels are told of sequences of their own lengths, but where the arrays are."""
    if lengths is None:
        return
    into = params["sequences"]
    into["sequences"], into["wide"], into["moves"] = lengths.sequences, lengths.wide, lengths.moves
    into["page_divmod"] = fast_divmod(lengths.page_size)
    if lengths.cache is not None:
        into["rows_of_cache"] = lengths.cache.shape[0]
        into["k_page_stride"], into["v_page_stride"] = lengths.cache.strides[0], lengths.cache_v.strides[0]
    if lengths.paged:
        into["pages_of_sequence"] = dict(lengths.arrays)["pages"].shape[1]


def _add_sinks(params: numpy.ndarray, problem: Problem) -> None:
    if problem.sinks is not None:
        params["sinks_of_head"] = problem.sinks.shape[-1]


def _with_strides(
    name: str,
    batch: tuple[int, ...],
    layouts: dict[str, Layout | None],
    scores: Scores | None = None,
    lengths: Lengths | None = None,
) -> numpy.ndarray:
    """A struct of zeros but the sizes of the batch axes and the strides of each `Tensor`; None is an array left out."""
    if scores:
        layouts = layouts | {SCORES + name: layout for name, layout in scores.layouts.items()}
    layouts = {name: layout for name, layout in layouts.items() if layout is not None}
    sizes, strides = steps_of_batch(batch, layouts, lengths)
    params = numpy.zeros(1, struct(name))
    _check_count("q", "batch elements", max(sizes))
    params["batch"] = sizes
    for name, layout in layouts.items():
        of_scores = name.startswith(SCORES)
        struct_of, field = (params["scores"], name.removeprefix(SCORES)) if of_scores else (params, name)
        if field not in struct_of.dtype.names:  # told by a map alone
            continue
        tensor = struct_of[field]
        tensor["batch_stride"] = strides[name]
        tensor["head_stride"], tensor["row_stride"], tensor["col_stride"] = (*layout.strides[len(batch) :], 0, 0)[:3]
    return params


def _add_scores(params: numpy.ndarray, problem: Problem) -> None:
    """Sizes, mask and scale, which the forward and the backward are told alike."""
    _add_mask(params, problem)
    _check_count("q", "heads", problem.heads_q)
    params["heads"] = problem.heads_q
    params["heads_per_kv"] = problem.heads_per_kv
    for field in ("dim", "dim_v", "scale"):
        params[field] = getattr(problem, field)
    if problem.softcap is not None:
        params["softcap"] = softcap_of_kernel(problem.scale, problem.softcap)
        params["cap"] = cap_polynomial(problem.scale, problem.softcap)


def _add_mask(params: numpy.ndarray, problem: Problem) -> None:
    """Lengths, and which keys each query sees."""
    _check_length("q", problem.len_q)
    _check_length("k", problem.len_kv)
    params["len_q"], params["len_kv"] = problem.len_q, problem.len_kv
    for field, number in problem.mask.told.items():
        params["mask"][field] = number
    params["mask"]["queries_divmod"] = fast_divmod(problem.mask.queries or 1)


def _check_count(name: str, things: str, count: int) -> None:
    """Of arrays with elements the grid is refused before; an axis of this length beside one of 0 launches nothing."""
    if count >= 2**31:
        raise UnsupportedError(f"{name}: expected fewer than 2**31 {things}, got {count}")


def _check_length(name: str, length: int) -> None:
    if length >= UNBOUNDED:
        raise UnsupportedError(f"{name}: expected fewer than 2**30 rows, got {length}")
