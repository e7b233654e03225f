"""Random problems of sequences that have their own lengths: packed, padded, mixed, in pages."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from ...problem.layout import FLOATS
from ..cases import Case
from ..expressions import SCORES_OF_LENGTHS
from .draw import Draw
from .pairs import MASKS, Asked, draw_asked
from .placement import Placement, draw_placement
from .recipes import Recipe, _recipe
from .rooms import OF_KEYS, OF_QUERIES, SHARED, Room, draw_lengths, draw_room

HOST_SHARE = 0.5
MOST_FLOPS = 5e6  # a CPU executes kernels at about 1 GFLOP/s
MASKED = (*MASKS, "array", "array", "ranges", "ranges")  # what is masked pair by pair
SCORED = (*SCORES_OF_LENGTHS, "places")
# Architecture, direction, kernel file asked for, whether keys are in pages: what every seed has.
COMPUTATIONS = (
    ("75", "forward", None, False),
    ("75", "forward", None, True),
    ("80", "forward", None, False),
    ("80", "forward", "fwd_v2", True),
    ("90a", "forward", None, False),
    ("90a", "forward", "fwd_v2", True),
    ("75", "backward", None, False),
    ("80", "backward", None, False),
    ("90a", "backward", None, False),
    ("90a", "backward", "bwd_v2", False),
)


@dataclass(frozen=True)
class LengthsProblem:
    """One computation, with all that it depends on.

    `q` and `kv` say where rows lie, and `place_of` how arrays do in memory. `options` are those of `attention` that are no arrays.
    `asked` is what there is for each pair; `poison` is what lies where no sequence is.
    """

    seed: int
    index: int
    direction: str
    dtype: str
    q: Room
    kv: Room
    heads: tuple[int, int]
    dims: tuple[int, int]
    options: dict[str, Any]
    asked: Asked | None
    poison: float
    backend: str
    entry: str
    arch: str | None = None
    kernel: str | None = None
    schedule: str = "eager"
    deterministic: bool = False
    with_dlse: bool = False
    with_batch: bool = True
    sinks: int = 0
    sinks_dtype: str = "float32"
    given: tuple[str, ...] = ()
    probability: float = 0.5

    def scores_of(self, number: int) -> dict[str, Any]:
        """The keyword arguments for the functions of `oracle` of a sequence, arrays apart."""
        o = self.options
        same = {name: o[name] for name in ("causal", "prefix", "softcap", "scale", "window") if name in o}
        return Case(self.dtype, self.q.lens[number], self.kv.lens[number], self.dims[0], **same).scores

    @property
    def kinds(self) -> set[str]:
        """What is of note about it: a test requires that each kind is drawn."""
        o, group = self.options, self.heads[0] // self.heads[1]
        found = {self.direction, f"dtype {self.dtype}", f"backend {self.backend}", f"entry {self.entry}", f"group {group}"}
        found |= {f"q {self.q.kind}", f"kv {self.kv.kind}", f"causal {o.get('causal', False)}", f"layout {o.get('layout')}"}
        found |= {f"{name} {x.dtype}" for name, x in (self.q.numbers | self.kv.numbers).items()}
        found |= {name for name in ("window", "prefix", "softcap", "scale") if name in o}
        found |= {name for name in ("deterministic", "with_dlse") if getattr(self, name)}
        found |= {f"given {name}" for name in self.given} | ({"sinks"} if self.sinks else set())
        found |= {f"arch {self.arch}", f"schedule {self.schedule}"} if self.backend == "host" else set()
        found |= {f"page size {self.kv.rows}"} if self.kv.kind == "pages" else set()
        found |= {"many"} if len(self.q.lens) > 32 else {"one"} if len(self.q.lens) == 1 else set()
        found |= {"long"} if max(*self.q.lens, *self.kv.lens) > 256 else set()
        if self.asked:
            a = self.asked
            found |= {f"score {a.score}", f"mask {a.mask}", f"bias {a.bias_dtype}"}
            packed = self.q.is_packed or self.kv.is_packed
            found |= {f"packed {name}" for name in (f"score {a.score}", f"mask {a.mask}") if packed}
            of_sums = self.direction == "backward" and (a.score or a.bias_dtype or a.alibi)
            found |= {f"sums on {self.backend}"} if of_sums else set()
            found |= {name for name in ("alibi", "dropout") if getattr(a, name)}
        return found

    def __str__(self) -> str:
        how = [self.backend] + [f"sm_{self.arch} {self.kernel or ''} {self.schedule}"] * (self.backend == "host")
        words = [self.direction, *how, self.dtype, str(self.q), str(self.kv), f"heads {self.heads} dims {self.dims}"]
        words += [f"lens {list(self.q.lens)} {list(self.kv.lens)}", str(self.options), self.entry, str(self.asked or "")]
        words += [f"sinks {self.sinks} {self.sinks_dtype}"] * (self.sinks > 0) + [f"given {name}" for name in self.given]
        return ", ".join(words + [name for name in ("deterministic", "with_dlse") if getattr(self, name)])


@dataclass(frozen=True)
class LengthsRecipe:
    """What the constants of a kernel follow from: a `Recipe`, pages, and whether a prefix is seen."""

    base: Recipe
    paged: bool
    prefix: bool


@functools.cache
def recipes(seed: int) -> tuple[LengthsRecipe, ...]:
    """The recipes of a seed, one for each computation."""
    found = []
    for i, (arch, direction, kernel, paged) in enumerate(COMPUTATIONS):
        draw = Draw("recipe of lengths", seed, i)
        base = _recipe(draw, arch, direction, "auto", "fwd_v2" if direction == "forward" else "bwd_v2", "some")
        few = direction == "forward" and draw.chance(0.4)
        asked = draw_asked(draw, base.dtype, MASKED, SCORED) if not few and draw.chance(0.4) else None
        base = replace(base, kernel=kernel, few=few, grouped=few or draw.chance(0.6), asked=asked)
        found.append(LengthsRecipe(base, paged, draw.chance(0.25)))
    return tuple(found)


def draw_problem_of_lengths(seed: int, index: int) -> LengthsProblem:
    """Problem `index` of a seed."""
    draw = Draw("lengths", seed, index)
    recipe = draw.one(recipes(seed)) if draw.chance(HOST_SHARE) else None
    base = recipe and recipe.base
    direction = base.direction if base else draw.one(("forward", "forward", "backward"))
    dtype, precision = (base.dtype, base.precision) if base else (draw.one(FLOATS), "ieee")
    asked = base.asked if base else draw_asked(draw, dtype, MASKED, SCORED) if draw.chance(0.5) else None
    dims = _dims(draw, base)
    paged = recipe.paged if recipe else direction == "forward" and draw.chance(0.3)
    q, kv, heads = _rooms(draw, direction, dims, paged, base, asked)
    options = _options(draw, q, kv, recipe)
    if precision == "tf32":
        options["precision"] = "tf32"
    results = ("dq", "dk", "dv") if direction == "backward" else ("out", "lse")
    asks = base is not None and (base.arch != "80" or base.kernel is not None)  # for what only a plan can be asked for
    entry = "plan" if asks else draw.one(("call", "plan", "vjp") if direction == "backward" and not base else ("call", "plan"))
    alone = q.kind == "shared" or kv.kind in SHARED  # whose gradients are sums over sequences, and judged without any of these
    sinks = base.sinks if base else draw.chance(0.3)
    return LengthsProblem(
        seed, index, direction, dtype, q, kv, heads, dims, options,
        asked=None if direction == "backward" and alone else asked,
        poison=draw.one((math.nan, math.nan, math.inf, -math.inf)),
        backend="host" if base else draw.one(("auto", "numpy")),
        entry=entry,
        arch=base and base.arch,
        kernel=base and base.kernel,
        schedule=draw.one(("eager", "deferred")),
        deterministic=direction == "backward" and draw.chance(0.5),
        with_dlse=direction == "backward" and draw.chance(0.5),
        with_batch=draw.chance(0.5),
        sinks=draw.one((1, 1, 3)) if sinks and not (direction == "backward" and alone) else 0,
        sinks_dtype="float64" if dtype == "float64" else draw.one(("float32", dtype)),
        given=tuple(name for name in results if entry != "vjp" and draw.chance(0.3)),
        probability=draw.one((0.1, 0.5, 0.9)),
    )  # fmt: skip


def place_of(problem: LengthsProblem, name: str, axes: int) -> Placement:
    """How an array of a problem lies in memory."""
    draw = Draw(f"place of {name}", problem.seed, problem.index)
    # Seen with stride 0, the sequences would have what lies beyond the first one's rows.
    result = name not in ("alibi_slopes", "sinks")
    if problem.backend != "host" or name not in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
        return draw_placement(draw, axes, result=result)
    base = next(r.base for r in recipes(problem.seed) if (r.base.arch, r.base.direction, r.base.kernel, r.paged) == _key(problem))
    heads_together = base.few and name in ("q", "out")  # rows of a head follow those of the one before
    plain = Placement(tuple(range(axes)), (1,) * axes, (0,) * axes)
    place = plain if heads_together else draw_placement(draw, axes, base.unit, result=result)
    if name != "q" or base.copy_bytes == 16:
        return place
    if base.copy_bytes == 0:
        return replace(place, steps=(*place.steps[:-1], 2))
    return replace(place, offset=base.unit * (2 * draw.integer(0, 4) + 1))


def _key(problem: LengthsProblem) -> tuple[Any, ...]:
    return problem.arch, problem.direction, problem.kernel, problem.kv.kind == "pages"


def _dims(draw: Draw, base: Recipe | None) -> tuple[int, int]:
    if base is None:
        dim = draw.one((8, 16, 33, 64, 80, 128, draw.integer(1, 256)))
        return dim, dim if draw.chance(0.7) else draw.one((8, 24, 64, draw.integer(1, 128)))

    def within(width: int) -> int:
        low = {32: 0, 64: 32, 96: 64, 128: 96, 192: 128, 256: 192}[width]
        return base.unit * draw.integer(low // base.unit + 1, width // base.unit)

    dim, dim_v = within(base.width), within(base.width_v)
    return dim, dim if base.width == base.width_v and draw.chance(0.6) else dim_v


def _rooms(
    draw: Draw, direction: str, dims: tuple[int, int], paged: bool, base: Recipe | None, asked: Asked | None
) -> tuple[Room, Room, tuple[int, int]]:
    backward = direction == "backward"
    of_pairs = asked is not None and (asked.bias_dtype or asked.mask == "array")  # whose arrays have no packed axes
    of_queries = [kind for kind in OF_QUERIES if not (of_pairs and kind in ("packed", "roomy"))]
    of_keys = ["pages"] if paged else [kind for kind in OF_KEYS if not (backward and kind.startswith("cache"))]
    of_keys = [kind for kind in of_keys if not (of_pairs and kind in ("packed", "roomy"))]
    if asked is not None and backward:
        of_queries, of_keys = ([kind for kind in kinds if kind != "shared"] for kinds in (of_queries, of_keys))
    few = base.few if base else not backward and draw.chance(0.2)
    kind_q, kind_kv = "all" if few else draw.one(of_queries), draw.one(of_keys)
    if kind_q == kind_kv == "all":
        kind_kv = "padded"
    count = draw.one((1, 2, 3, 4, 5, 7, 9, 33, 40, 70)) if asked is None or draw.chance(0.3) else draw.one((1, 2, 3, 4))
    lens_q, lens_kv = draw_lengths(draw, count), draw_lengths(draw, count)
    if few:
        lens_q = (draw.one((1, 1, 1, 2, 3, 5, 8)),) * count
    elif draw.chance(0.3):
        lens_kv = lens_q
    if kind_q == "all":
        lens_q = (max(lens_q[0], 1),) * count
    if kind_kv in ("all", "cache of all"):
        lens_kv = (max(lens_kv[0], 1),) * count
    grouped = base.grouped if base else draw.chance(0.5)
    group, heads_kv = draw.one((2, 3, 4, 5, 6, 7)) if grouped else 1, draw.one((1, 1, 2, 3))

    def flops() -> float:
        return 2 * sum(dims) * sum(a * b + a + b for a, b in zip(lens_q, lens_kv)) * group * heads_kv * (3 if backward else 1)

    while flops() > MOST_FLOPS and heads_kv > 1:
        heads_kv -= 1
    while flops() > MOST_FLOPS and group > 2:
        group -= 1
    while flops() > MOST_FLOPS:
        longest = max(*lens_q, *lens_kv)
        same = lens_q == lens_kv
        lens_q = tuple(n * 2 // 3 if n == longest else n for n in lens_q)
        lens_kv = lens_q if same else tuple(n * 2 // 3 if n == longest else n for n in lens_kv)
    q, kv = draw_room(draw, "q", kind_q, lens_q), draw_room(draw, "kv", kind_kv, lens_kv)
    return q, kv, (group * heads_kv, heads_kv)


def _options(draw: Draw, q: Room, kv: Room, recipe: LengthsRecipe | None) -> dict[str, Any]:
    longest = max(*q.lens, *kv.lens, 1)
    causal = draw.one((False, False, True, "bottom_right", "top_left"))
    options: dict[str, Any] = {"causal": causal} if causal is not False else {}
    if draw.chance(0.3):
        options["layout"] = draw.one(("bhsd", "bshd", "bshd"))
    prefix = recipe.prefix if recipe else draw.chance(0.2)
    if draw.chance(0.3):
        options["window"] = tuple(draw.one((None, 0, draw.integer(0, longest + 3), draw.integer(0, 40))) for _ in range(2))
        options["window"] = (None, options["window"][1]) if prefix else options["window"]
    if prefix:
        options["prefix"] = draw.one((1, 5, draw.integer(0, longest + 2)))
    explicit = recipe.base.explicit if recipe else draw.chance(0.3)
    if explicit and draw.chance(0.7):
        options["softcap"] = draw.log_uniform(0.5, 50)
    usual = draw.log_uniform(0.02, 1)
    if explicit and "softcap" not in options:
        options["scale"] = draw.one((0.0, -usual))
    elif draw.chance(0.4):
        options["scale"] = usual
    if draw.chance(0.6):
        options["return_lse"] = True
    return options
