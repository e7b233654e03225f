"""What random problems ask for each pair of a query and a key: expressions, masks, ranges of keys, biases, ALiBi and dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from cupy_flash import KeyRanges, TileMask

from ...problem.arrays import DTYPES
from ...problem.forward import lse_dtype_of
from ..dropout import keep_scale_of, kept_pairs
from ..expressions import MASKS, SCORES, Expression, Grid, Sizes
from ..operands import draw_arrays, hand_score
from .draw import Draw
from .placement import Placed, Placement, draw_placement

OPERANDS = ("bias", "mask", "alibi_slopes")
RANGES = ("start", "stop")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """What the text of a kernel follows from.

    Parameters
    ----------
    score, mask : str, optional
        Names of expressions; a mask may be "array" or "ranges".
    bias_dtype : str, optional
    alibi, dropout : bool
    ranges : int
        How many ranges of keys a query has, if the mask is these.
    ranges_of_heads : bool
        Whether each head has its own.
    """

    score: str | None
    mask: str | None
    bias_dtype: str | None
    alibi: bool
    dropout: bool
    ranges: int = 1
    ranges_of_heads: bool = False


def draw_asked(
    draw: Draw, dtype: str, masks: tuple[str, ...] = (*MASKS, "array", "array", "ranges"), scores: tuple[str, ...] = tuple(SCORES)
) -> Asked:
    """At least one of all, with one of these masks and scores if any."""
    while True:
        bias_dtype = draw.one((dtype, dtype if dtype == "float64" else "float32"))
        asked = Asked(
            score=draw.one(scores) if draw.chance(0.5) else None,
            mask=draw.one(masks) if draw.chance(0.5) else None,
            bias_dtype=bias_dtype if draw.chance(0.4) else None,
            alibi=draw.chance(0.3),
            dropout=draw.chance(0.3),
            ranges=draw.one((1, 2, 3)),
            ranges_of_heads=draw.chance(0.5),
        )
        if asked.score or asked.mask or asked.bias_dtype or asked.alibi or asked.dropout:
            return asked


@dataclass(frozen=True)
class Pairs:
    """What is asked in one problem.

    Parameters
    ----------
    asked : Asked
    batch, heads_q, heads_kv, len_q, len_kv
        Of the problem, in which 2-D inputs have one head.
    shapes : dict of str to Shape
        Of those of `OPERANDS` that there are; axes that others broadcast along are missing or 1.
    places : dict of str to Placement
    probability : float
        Of dropout.
    seed : tuple of int
        And offset.
    kept : bool
        Whether the mask is given as a `TileMask`.
    """

    asked: Asked
    batch: Shape
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    shapes: dict[str, Shape]
    places: dict[str, Placement]
    probability: float
    seed: tuple[int, int]
    kept: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `attention` that are neither arrays nor a seed."""
        asked, found = self.asked, {}
        found |= {"score": SCORES[asked.score].text} if asked.score else {}
        found |= {"mask": MASKS[asked.mask].text} if asked.mask in MASKS and not self.kept else {}
        return found | ({"dropout": self.probability} if asked.dropout else {})

    @property
    def kinds(self) -> set[str]:
        """What is of note about it."""
        asked = self.asked
        found = {f"score {asked.score}", f"mask {asked.mask}", f"{asked.alibi and 'alibi'}", f"{asked.dropout and 'dropout'}"}
        found |= {f"bias {asked.bias_dtype}"} if asked.bias_dtype else set()
        found |= {f"kept {asked.mask}"} if self.kept else set()
        found |= {f"{name} {kind}" for name, place in self.places.items() for kind in place.kinds}
        found |= {f"{name} of {len(shape)} axes" for name, shape in self.shapes.items()}
        return found - {"score None", "mask None", "False"}

    def __str__(self) -> str:
        shapes = [f"{name}{shape}".replace(" ", "") for name, shape in self.shapes.items()]
        places = [f"{name} {kind}" for name, place in self.places.items() for kind in sorted(place.kinds)]
        kept = [f"kept mask {self.asked.mask}"] if self.kept else []
        return " ".join([str(self.options), str(self.asked.bias_dtype or ""), *shapes, *places, *kept, f"seed {self.seed}"])


def draw_pairs(draw: Draw, asked: Asked, shapes: dict[str, Shape]) -> Pairs:
    """What is asked of a problem with q, k and v of these shapes."""
    full = shapes["out"] if len(shapes["out"]) > 2 else (1, *shapes["out"])
    *batch, heads_q, len_q, _ = full
    (len_kv, _), heads_kv = shapes["k"][-2:], (1, *shapes["k"])[-3]
    pairs, own = (*batch, heads_q, len_q, len_kv), {}

    def broadcast(shape: Shape, least: int) -> Shape:
        kept = tuple(1 if draw.chance(0.25) else n for n in shape)
        return kept[draw.integer(0, len(shape) - least) :] if draw.chance(0.4) else kept

    if asked.bias_dtype:
        own["bias"] = broadcast(pairs, 2)
    if asked.mask == "array":
        own["mask"] = broadcast(pairs, 2)
    if asked.alibi:
        own["alibi_slopes"] = draw.one(((heads_q,), (*batch, heads_q)))
    if asked.mask == "ranges":
        of_heads = (heads_q,) if asked.ranges_of_heads else ()
        own |= dict.fromkeys(RANGES, (*of_heads, len_q, asked.ranges))
    places = {name: draw_placement(draw, len(shape)) for name, shape in own.items()}
    probability = draw.one((0.1, 0.5, 0.9, draw.log_uniform(1e-3, 0.99)))
    seed = (draw.integer(0, 2**64 - 1), draw.one((0, 1, 2**32 - 1)))
    kept = asked.mask is not None and draw.chance(0.4)
    return Pairs(asked, tuple(batch), heads_q, heads_kv, len_q, len_kv, own, places, probability, seed, kept)


def make_operands(pairs: Pairs, dtype: str, numbers: numpy.random.Generator) -> dict[str, Any]:
    """The arrays of a call, in guarded memory; those of expressions are under their own names."""
    asked, wide, made = pairs.asked, DTYPES[lse_dtype_of(dtype)], {}
    if asked.bias_dtype:
        bias = numbers.standard_normal(pairs.shapes["bias"])
        bias[numbers.random(bias.shape) < numbers.choice([0, 0.1, 0.9])] = -numpy.inf
        made["bias"] = bias.astype(DTYPES[asked.bias_dtype])
    if asked.mask == "array":
        made["mask"] = numbers.random(pairs.shapes["mask"]) < numbers.choice([0.02, 0.5, 0.9, 1])
    if asked.mask == "ranges":  # some are empty, and some reach beyond the keys
        shape, most = pairs.shapes["start"], pairs.len_kv + 5
        made["start"] = numbers.integers(-5, most, shape).astype(numbers.choice([numpy.int32, numpy.int64]))
        made["stop"] = (made["start"] + numbers.integers(-3, most, shape)).astype(numpy.int32)
    if asked.alibi:
        made["alibi_slopes"] = numbers.uniform(0, 0.3, pairs.shapes["alibi_slopes"]).astype(wide)
    sizes = Sizes(int(numpy.prod(pairs.batch, dtype=int)), pairs.heads_q, pairs.heads_kv, pairs.len_q, pairs.len_kv)
    expressions = [SCORES[asked.score]] if asked.score else []
    expressions += [MASKS[asked.mask]] if asked.mask in MASKS else []
    captured = draw_arrays(expressions, numbers, sizes, wide)
    places = pairs.places | {name: plain(x) for name, x in captured.items()}
    return {name: Placed(x, places[name]) for name, x in (made | captured).items()}


def plain(x: numpy.ndarray) -> Placement:
    """Without gaps."""
    return Placement(tuple(range(x.ndim)), (1,) * x.ndim, (0,) * x.ndim)


def arguments(pairs: Pairs, arrays: dict[str, Placed]) -> dict[str, Any]:
    """The keyword arguments of a call that are arrays or a seed."""
    asked, values = pairs.asked, {name: placed.array for name, placed in arrays.items()}
    found = {name: values[name] for name in OPERANDS if name in pairs.shapes}
    found |= {"mask": KeyRanges(values["start"], values["stop"])} if asked.mask == "ranges" else {}
    of_score, of_mask = _read_by(SCORES, asked.score), _read_by(MASKS, asked.mask)
    if pairs.kept:
        own = {name: values[name] for name in of_mask}
        found["mask"] = TileMask(found.get("mask") if asked.mask not in MASKS else MASKS[asked.mask].text, own or None)
        of_mask = ()
    captured = {name: values[name] for name in (*of_score, *of_mask)}
    found |= {"arrays": captured} if captured else {}
    return found | ({"seed": pairs.seed} if asked.dropout else {})


def meaning(pairs: Pairs, arrays: dict[str, Placed]) -> dict[str, Any]:
    """The keyword arguments for the functions of `oracle`."""
    asked, values = pairs.asked, {name: placed.array for name, placed in arrays.items()}
    grid = Grid.of(pairs.batch, pairs.heads_q, pairs.heads_kv, pairs.len_q, pairs.len_kv)
    told = {name: values[name] for name in ("bias", "alibi_slopes") if name in pairs.shapes}
    told |= {"score": hand_score(SCORES[asked.score], grid, values)} if asked.score else {}
    if asked.mask == "array":
        told["seen"] = values["mask"]
    elif asked.mask == "ranges":
        start, stop = (values[name][..., None, :] for name in RANGES)
        keys = grid.kv_idx[:, None]
        told["seen"] = ((start <= keys) & (keys < stop)).any(-1)
    elif asked.mask:
        told["seen"] = MASKS[asked.mask].hand(grid, values)
    if asked.dropout:
        keep = kept_pairs((*pairs.batch, pairs.heads_q, pairs.len_q, pairs.len_kv), pairs.probability, *pairs.seed)
        told |= {"keep": keep, "keep_scale": keep_scale_of(pairs.probability)}
    return told


def differentiable(pairs: Pairs) -> tuple[str, ...]:
    """The names of what has a gradient besides q, k, v and sinks."""
    return (*(name for name in ("bias", "alibi_slopes") if name in pairs.shapes), *_read_by(SCORES, pairs.asked.score))


def _read_by(expressions: dict[str, Expression], name: str | None) -> tuple[str, ...]:
    """The names of the arrays that an expression reads, if there is one of this name."""
    if name not in expressions:
        return ()
    return tuple(expressions[name].draw(numpy.random.default_rng(0), Sizes(1, 1, 1, 1, 1)))
