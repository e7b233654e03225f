"""Which kernels the problems of one seed are computed by: few, because each has to be compiled.

A kernel's constants follow from dtype, widths, what may be copied at once and the like. A `Recipe` fixes these and leaves all else
free, so problems of one recipe share a kernel or two. Another seed has other recipes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ...plan.fp16_parts import MOST_DIMS_ASKED
from ...plan.tuning import WIDTHS
from ...problem.arrays import DTYPES
from ..expressions import MASKS
from .draw import Draw
from .pairs import Asked, draw_asked

# Architecture, direction, algorithm, kernel file asked for, keys: what every seed has.
COMPUTATIONS = (
    ("75", "forward", "auto", None, "some"),
    ("80", "forward", "v2", None, "some"),
    ("80", "forward", "v1", None, "some"),
    ("90a", "forward", "auto", None, "some"),
    ("90a", "forward", "v2", "fwd_hopper", "many"),
    ("90a", "forward", "auto", "fwd_v2", "some"),
    ("75", "backward", "auto", None, "some"),
    ("80", "backward", "v2", None, "some"),
    ("90a", "backward", "auto", None, "some"),
    ("90a", "backward", "auto", "bwd_v2", "some"),
    ("90a", "forward", "v2", "fwd_hopper", "in parts"),
)
# Of problems that ask for pairs, which v1 does not compute.
COMPUTATIONS_OF_PAIRS = tuple(x for x in COMPUTATIONS if x[2] != "v1" and x[4] == "some")


@dataclass(frozen=True)
class Recipe:
    """What the constants of a kernel follow from.

    Parameters
    ----------
    arch, direction, algorithm, kernel
        As in `plan_attention` and `check.Computation`.
    keys : {'some', 'many', 'in parts'}
        Many are more than a block of sm_90a computes alone. Float32 is in parts there if that is asked for.
    dtype, precision : str
    width, width_v : int
        Compiled widths.
    copy_bytes : int
        The most that may be copied at once.
    explicit : bool
        Whether the scores are scaled one by one: a softcap, or a scale not above 0.
    grouped : bool
        Whether query heads share key-value heads.
    few : bool
        Whether there are at most 64 queries.
    sinks : bool
        Whether there are sinks.
    asked : Asked, optional
        What is asked for each pair.
    """

    arch: str
    direction: str
    algorithm: str
    kernel: str | None
    keys: str
    dtype: str
    precision: str
    width: int
    width_v: int
    copy_bytes: int
    explicit: bool
    grouped: bool
    few: bool
    sinks: bool
    asked: Asked | None = None

    @property
    def unit(self) -> int:
        """Elements that strides and dims are multiples of."""
        return max(1, self.copy_bytes // DTYPES[self.dtype].itemsize)


@functools.cache
def recipes(seed: int) -> tuple[Recipe, ...]:
    """The recipes of a seed, one for each computation."""
    return tuple(_recipe(Draw("recipe", seed, i), *computation) for i, computation in enumerate(COMPUTATIONS))


@functools.cache
def recipes_of_pairs(seed: int) -> tuple[Recipe, ...]:
    """The recipes of a seed for problems that ask for pairs."""
    found = []
    for i, computation in enumerate(COMPUTATIONS_OF_PAIRS):
        draw = Draw("recipe of pairs", seed, i)
        recipe = _recipe(draw, *computation)
        found.append(replace(recipe, asked=draw_asked(draw, recipe.dtype)))
    return *found, _recipe_of_a_mask(Draw("recipe of a mask", seed, 0))


def _recipe_of_a_mask(draw: Draw) -> Recipe:
    """A mask and nothing else for narrow keys, where fwd_hopper has lists of tiles of several kinds, and values of any width."""
    asked = Asked(None, draw.one((*MASKS, "ranges")), None, False, False, draw.one((1, 2, 3)), draw.chance(0.5))
    recipe = _recipe(draw, "90a", "forward", "auto", None, "some")
    return replace(recipe, width=draw.one((32, 64)), width_v=draw.one(WIDTHS[:4]), explicit=False, few=False, asked=asked)


def _recipe(draw: Draw, arch: str, direction: str, algorithm: str, kernel: str | None, keys: str) -> Recipe:
    hopper = arch == "90a" and kernel not in ("fwd_v2", "bwd_v2")
    kinds = ["float16"] if arch == "75" else ["float16", "bfloat16"]
    kinds += [] if hopper else ["float32"] if arch == "75" else ["float32", "tf32"]
    in_parts = keys == "in parts"
    kinds = ["float32", "tf32"] if in_parts else kinds
    kind = draw.one(kinds)
    dtype, precision = ("float32", "tf32") if kind == "tf32" else (kind, "ieee")
    widths = [width for width in WIDTHS for _ in range(1 + (width <= 128))]
    if (arch, direction, dtype) == ("75", "backward", "float32"):  # wider tiles do not fit its shared memory
        widths = [width for width in widths if width <= 192]
    if in_parts:
        widths = [width for width in widths if width <= MOST_DIMS_ASKED[0]]
    width = draw.one(widths)
    width_v = draw.one(widths) if draw.chance(0.3) else width
    itemsize = DTYPES[dtype].itemsize
    copies = (16, 8, 4) if in_parts else (16,) if hopper else (16, 16, 8, 4, 0)
    copy_bytes = draw.one([size for size in copies if size != 4 or itemsize <= 4])
    few = keys == "many" or (not in_parts and draw.chance(0.4))
    return Recipe(
        arch, direction, algorithm, kernel, keys, dtype, precision, width, width_v, copy_bytes,
        explicit=draw.chance(0.4), grouped=draw.chance(0.5), few=few, sinks=draw.chance(0.4),
    )  # fmt: skip
