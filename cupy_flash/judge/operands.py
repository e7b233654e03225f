"""What a case has besides q, k and v: sinks, the arrays of expressions, mask, bias, slopes of ALiBi and a seed.

`operands_of` makes them as `attention` takes them. `meaning_of` says the same to the oracle, which knows no expressions and no
seed. All of it is the same for the same case and seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

import ml_dtypes
import numpy

from .dropout import keep_scale_of, kept_pairs
from .expressions import MASKS, SCORES, Expression, Grid, Sizes
from .layouts import place
from .oracle import HandScore

SEED = (0x0123456789ABCDEF, 5)  # of dropout, and its offset
# The axes that a bias has of (*batch, heads, len_q, len_kv).
BIASES = {"full": "bhqk", "heads": "hqk", "batch": "b1qk", "keys": "b11k", "pairs": "qk"}


class Case(Protocol):
    """What is asked of a `cases.Case`."""

    name: str
    dtype: str
    batch: tuple[int, ...]
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    layout: Any
    sinks: int
    sinks_dtype: str
    score: str | None
    mask: str | None
    bias: str | None
    bias_dtype: str
    alibi: str | None
    dropout: float


def operands_of(case: Case, xp: ModuleType = numpy, seed: int = 0) -> dict[str, Any]:
    """Return the keyword arguments of `attention` that are arrays of `xp` or belong to a call, as a seed does."""
    made = _made(case, seed)
    placed = {name: place(x, _layout_of(case), xp) for name, x in made.items() if name in ("sinks", "bias", "alibi_slopes")}
    if "mask" in made:
        placed["mask"] = xp.asarray(made["mask"])
    if "arrays" in made:
        placed["arrays"] = {name: xp.asarray(x) if x.ndim else x for name, x in made["arrays"].items()}
    return placed | ({"seed": SEED} if case.dropout else {})


def meaning_of(case: Case, xp: ModuleType = numpy, seed: int = 0) -> dict[str, Any]:
    """Return the keyword arguments for the functions of `oracle` that say what `operands_of` and the options do."""
    made = _made(case, seed)
    told = {name: xp.asarray(x) for name, x in made.items() if name in ("sinks", "bias", "alibi_slopes")}
    grid = Grid.of(case.batch, case.heads_q, case.heads_kv, case.len_q, case.len_kv, xp)
    arrays = {name: xp.asarray(x) for name, x in made.get("arrays", {}).items()}
    if case.score:
        told["score"] = hand_score(SCORES[case.score], grid, arrays)
    if case.mask:
        told["seen"] = xp.asarray(made["mask"]) if case.mask == "array" else MASKS[case.mask].hand(grid, arrays)
    if case.dropout:
        keep = kept_pairs((*case.batch, case.heads_q, case.len_q, case.len_kv), case.dropout, *SEED)
        told |= {"keep": xp.asarray(keep), "keep_scale": keep_scale_of(case.dropout)}
    return told


def hand_score(expression: Expression, grid: Grid, arrays: Mapping[str, Any]) -> HandScore:
    """Return what an expression means, of which parts can be taken."""
    return replace(expression.hand(grid, arrays), part=lambda index: expression.hand(grid.at(index), arrays))


def draw_arrays(expressions: list[Expression], rng: numpy.random.Generator, sizes: Sizes, dtype: Any) -> dict[str, numpy.ndarray]:
    """Return the arrays that expressions read: numbers in `dtype`, integers in int32."""
    drawn = {name: numpy.asarray(x) for expression in expressions for name, x in expression.draw(rng, sizes).items()}
    return {name: x.astype(dtype if x.dtype.kind == "f" else numpy.int32) for name, x in drawn.items()}


def _layout_of(case: Case) -> Any:
    return case.layout if case.layout in ("strided_dim", "odd_offset") else "contiguous"


def _made(case: Case, seed: int) -> dict[str, Any]:
    """The values, of NumPy."""
    return {name: make(case, _numbers(case, seed, name)) for name, make in MAKERS.items() if _has(case, name)}


def _has(case: Case, name: str) -> bool:
    has = {"sinks": case.sinks, "arrays": case.score or case.mask not in (None, "array"), "mask": case.mask == "array"}
    return bool(has[name] if name in has else getattr(case, {"alibi_slopes": "alibi"}.get(name, name)))


def _numbers(case: Case, seed: int, name: str) -> numpy.random.Generator:
    """Other numbers for each of them, and none of those of inputs (0) and cotangents (1)."""
    return numpy.random.default_rng([seed, zlib.crc32(case.name.encode()), 2 + list(MAKERS).index(name)])


def _wide(case: Case) -> str:
    return "float64" if case.dtype == "float64" else "float32"


def dtype_named(name: str) -> numpy.dtype:
    """Return the dtype of this name, which NumPy itself need not know."""
    return numpy.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _make_sinks(case: Case, rng: numpy.random.Generator) -> numpy.ndarray:
    """Normal with standard deviation 2. Of three or more each head has one of -inf, which has no share in anything."""
    sinks = 2 * rng.standard_normal((case.sinks, case.heads_q))
    if case.sinks >= 3:
        heads = numpy.arange(case.heads_q)
        sinks[heads % case.sinks, heads] = -numpy.inf
    return (sinks if case.sinks > 1 else sinks[0]).astype(dtype_named(case.sinks_dtype))


def _make_arrays(case: Case, rng: numpy.random.Generator) -> dict[str, numpy.ndarray]:
    sizes = Sizes(int(numpy.prod(case.batch, dtype=int)), case.heads_q, case.heads_kv, case.len_q, case.len_kv)
    expressions = [SCORES[case.score]] if case.score else []
    expressions += [MASKS[case.mask]] if case.mask in MASKS else []
    return draw_arrays(expressions, rng, sizes, _wide(case))


def _make_mask(case: Case, rng: numpy.random.Generator) -> numpy.ndarray:
    """Booleans `(*batch, 1, len_q, len_kv)`. One query in seven sees nothing."""
    seen = rng.random((*case.batch, 1, case.len_q, case.len_kv)) < 0.7
    seen[..., 3::7, :] = False
    return seen


def _make_bias(case: Case, rng: numpy.random.Generator) -> numpy.ndarray:
    """Normal, one in ten -inf."""
    sizes = {"h": (case.heads_q,), "q": (case.len_q,), "k": (case.len_kv,), "b": case.batch, "1": (1,)}
    shape = [n for axis in BIASES[case.bias] for n in sizes[axis]]
    bias = rng.standard_normal(shape)
    bias[rng.random(shape) < 0.1] = -numpy.inf
    return bias.astype(dtype_named(case.bias_dtype))


def _make_slopes(case: Case, rng: numpy.random.Generator) -> numpy.ndarray:
    batch = case.batch if case.alibi == "batch" else ()
    return rng.uniform(0.005, 0.1, (*batch, case.heads_q)).astype(_wide(case))


MAKERS = {
    "sinks": _make_sinks,  # first: its numbers are those of 2
    "arrays": _make_arrays,
    "mask": _make_mask,
    "bias": _make_bias,
    "alibi_slopes": _make_slopes,
}
