"""Random valid problems: shapes, options, values and how the arrays lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ...plan.tuning import WIDTHS
from ...problem.arrays import DTYPES
from ...problem.layout import FLOATS
from ..cases import Case
from .draw import Draw
from .pairs import Pairs, draw_asked, draw_pairs
from .placement import Placement, draw_placement
from .recipes import Recipe, recipes, recipes_of_pairs

HOST_SHARE, HOST_SHARE_OF_PAIRS = 0.6, 0.3
LARGEST_SCALE = 1e20  # of a forward
LARGEST_SCALE_OF_PAIRS = 1e3
MOST_FLOPS = 6e6  # a CPU executes kernels at about 1 GFLOP/s
LENGTHS = (1, 1, 2, 3, 5, 15, 16, 17, 31, 33, 47, 63, 64, 65, 79, 100, 127, 129, 191, 193, 257, 300)
VALUES = ("normal", "normal", "normal", "offset", "large", "one_hot", "constant", "hidden", "nan_key")
SINKS = ("normal", "normal", "above", "below", "one of -inf")  # above all scores, or below
LIKE = {"dout": "out", "dlse": "lse", "dq": "q", "dk": "k", "dv": "v"}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """One computation, with all that it depends on.

    Shapes and places are those of arrays (..., heads, seq, dim), whatever `layout` the options ask for.

    `options` are those of `attention` that say what is computed. `entry` is 'call', 'plan', or 'vjp'. `given` names the results
    that the caller brings, each laid out as `places` says. Where there are sinks, shapes and places have those as well. `pairs` is
    what is asked for each pair of a query and a key.
    """

    seed: int
    index: int
    direction: str
    dtype: str
    shapes: dict[str, Shape]
    options: dict[str, Any]
    values: str
    backend: str
    entry: str
    arch: str | None = None
    algorithm: str = "auto"
    kernel: str | None = None
    schedule: str = "eager"
    deterministic: bool = False
    with_dlse: bool = False
    own_workspace: bool = False
    given: tuple[str, ...] = ()
    places: dict[str, Placement] = field(default_factory=dict)
    sinks: str | None = None
    sinks_dtype: str | None = None
    pairs: Pairs | None = None

    def shape_of(self, name: str) -> Shape:
        """The shape of any array of the call, as the caller sees it."""
        return self.shapes[LIKE.get(name, name)]

    @property
    def scores(self) -> dict[str, Any]:
        """The keyword arguments for the functions of `oracle` that are no arrays."""
        o = self.options
        window = o.get("window") and tuple(None if end == -1 else end for end in o["window"])
        (len_q, dim), (len_kv, _) = self.shapes["q"][-2:], self.shapes["k"][-2:]
        same = {name: o[name] for name in ("causal", "prefix", "softcap", "scale") if name in o}
        return Case(self.dtype, len_q, len_kv, dim, window=window, **same).scores

    @property
    def kinds(self) -> set[str]:
        """What is of note about it: a test requires that each kind is drawn."""
        q, k, v = (self.shapes[name] for name in "qkv")
        group = (q[-3] if len(q) > 2 else 1) // max(1, k[-3] if len(k) > 2 else 1)
        o = self.options
        found = {
            self.direction,
            f"dtype {'tf32' if o.get('precision') == 'tf32' else self.dtype}",
            f"backend {self.backend}",
            f"values {self.values}",
            f"entry {self.entry}",
            f"group {group}",
            f"causal {o.get('causal', False)}",
            f"axes {len(q)}",
            *(f"given {name}" for name in self.given),
            *(f"{name} {kind}" for name, place in self.places.items() for kind in place.kinds),
        }
        if self.backend == "host":
            found |= {f"arch {self.arch}", f"schedule {self.schedule}", f"algorithm {self.algorithm}", f"kernel {self.kernel}"}
        batches = {x[:-3] for x in (q, k, v)}
        found |= {"dim != dim_v"} if q[-1] != v[-1] else set()
        found |= {"broadcast"} if len(batches) > 1 else set()
        found |= {"missing axes"} if len({len(x) for x in batches}) > 1 else set()
        found |= {"empty"} if 0 in q + k + v else set()
        found |= {name for name in ("deterministic", "with_dlse", "own_workspace") if getattr(self, name)}
        scale, softcap = o.get("scale"), o.get("softcap")
        if scale is not None:
            found.add("scale 0" if scale == 0 else "scale < 0" if scale < 0 else "scale tiny" if scale < 1e-3 else "scale")
            found |= {"scale large"} if abs(scale) > 100 else set()
        if softcap is not None:
            found.add("softcap small" if softcap < 1 else "softcap large" if softcap > 1e3 else "softcap")
        found |= {"window"} if o.get("window") else set()
        found.add(f"layout {o.get('layout')}")
        if self.sinks:
            found |= {f"sinks {self.sinks}", f"sinks of {len(self.shapes['sinks'])} axes", f"sinks {self.direction}"}
            found |= {"sinks in the dtype"} if self.sinks_dtype == self.dtype else set()
            found |= {"sinks on the host"} if self.backend == "host" else set()
        return found | (self.pairs.kinds if self.pairs else set())

    def __str__(self) -> str:
        shapes = " ".join(f"{name}{shape}".replace(" ", "") for name, shape in self.shapes.items())
        how = [self.backend] + [f"sm_{self.arch} {self.algorithm} {self.kernel or ''} {self.schedule}"] * (self.backend == "host")
        places = [f"{name} {kind}" for name, place in self.places.items() for kind in sorted(place.kinds)]
        words = [self.direction, *how, self.dtype, shapes, str(self.options), self.values, self.entry, *places]
        words += [str(self.pairs)] * (self.pairs is not None)
        words += [f"given {name}" for name in self.given] + [f"sinks {self.sinks} {self.sinks_dtype}"] * (self.sinks is not None)
        words += [name for name in ("deterministic", "with_dlse", "own_workspace") if getattr(self, name)]
        return ", ".join(words)


def draw_problem(seed: int, index: int) -> Problem:
    """Problem `index` of a seed."""
    draw = Draw("problem", seed, index)
    return _draw(draw, seed, index, draw.one(recipes(seed)) if draw.chance(HOST_SHARE) else None)


def draw_problem_of_pairs(seed: int, index: int) -> Problem:
    """Likewise of the problems that ask something for each pair."""
    draw = Draw("pairs", seed, index)
    recipe = draw.one(recipes_of_pairs(seed)) if draw.chance(HOST_SHARE_OF_PAIRS) else None
    problem = _draw(draw, seed, index, recipe)
    pairs = draw_pairs(draw, recipe.asked if recipe else draw_asked(draw, problem.dtype), problem.shapes)
    # A score of 2^28 is off by more than all others differ from it: kernels may overflow there.
    scale = problem.options.get("scale")
    if scale is not None and abs(scale) > LARGEST_SCALE_OF_PAIRS:
        problem = replace(problem, options=problem.options | {"scale": math.copysign(LARGEST_SCALE_OF_PAIRS, scale)})
    # Of a row of NaN whose pairs are all dropped, it is no matter whether it is NaN or 0.
    values = "normal" if problem.values == "nan_key" and pairs.asked.dropout else problem.values
    return replace(problem, pairs=pairs, options=problem.options | pairs.options, values=values)


def _draw(draw: Draw, seed: int, index: int, recipe: Recipe | None) -> Problem:
    direction = recipe.direction if recipe else draw.one(("forward", "forward", "backward"))
    dtype, precision = (recipe.dtype, recipe.precision) if recipe else _kind(draw)
    shapes = _shapes(draw, recipe)
    options = _options(draw, shapes, direction, recipe)
    if precision == "tf32":
        options["precision"] = "tf32"
    elif draw.chance(0.1):
        options["precision"] = "ieee"
    if direction == "forward" and draw.chance(0.6):
        options["return_lse"] = True

    asks = recipe is not None and (recipe.arch != "80" or recipe.kernel is not None)  # for what only a plan can be asked for
    backend = "host" if recipe else draw.one(("auto", "numpy"))
    results = ("dq", "dk", "dv") if direction == "backward" else ("out", "lse")
    entry = "plan" if asks else draw.one(("call", "plan", "vjp") if direction == "backward" and not recipe else ("call", "plan"))
    given = tuple(name for name in results if entry != "vjp" and draw.chance(0.3))
    inputs = ("q", "k", "v") + (("dout", "out", "lse", "dlse") if direction == "backward" else ())
    problem = Problem(
        seed,
        index,
        direction,
        dtype,
        shapes,
        options,
        values=_values(draw, direction, dtype, options),
        backend=backend,
        entry=entry,
        arch=recipe and recipe.arch,
        algorithm=recipe.algorithm if recipe else draw.one(("auto", "v2")),
        kernel=recipe and recipe.kernel,
        schedule=draw.one(("eager", "deferred")),
        deterministic=direction == "backward" and draw.chance(0.4),
        with_dlse=direction == "backward" and draw.chance(0.5),
        own_workspace=entry == "plan" and draw.chance(0.3),
        given=given,
        places={name: _place(draw, name, len(shapes[LIKE.get(name, name)]), recipe) for name in (*inputs, *given)},
    )
    return _with_sinks(draw, problem) if (recipe.sinks if recipe else draw.chance(0.3)) else problem


def _with_sinks(draw: Draw, problem: Problem) -> Problem:
    heads = (1, *problem.shapes["q"])[-3]
    shape = draw.one(((heads,), (heads,), (1, heads), (2, heads), (3, heads), (7, heads)))
    dtypes = ("float64",) if problem.dtype == "float64" else ("float32", problem.dtype)
    return replace(
        problem,
        shapes=problem.shapes | {"sinks": shape},
        places=problem.places | {"sinks": draw_placement(draw, len(shape))},
        sinks=draw.one(SINKS),
        sinks_dtype=draw.one(dtypes),
    )


def _kind(draw: Draw) -> tuple[str, str]:
    kind = draw.one((*FLOATS, "tf32"))
    return ("float32", "tf32") if kind == "tf32" else (kind, "ieee")


def _shapes(draw: Draw, recipe: Recipe | None) -> dict[str, Shape]:
    """Shapes of q, k, v, out and lse: as the caller sees them."""
    dim, dim_v = _dims(draw, recipe)
    batch = draw.one(((), (), (1,), (2,), (3,), (2, 2), (1, 3), (2, 1, 2)))
    batch = tuple(0 if draw.chance(0.01) else size for size in batch)
    grouped = recipe.grouped if recipe else draw.chance(0.5)
    group, heads_kv = draw.one((2, 3, 5, 7, 8)) if grouped else 1, draw.one((1, 1, 1, 2, 3))
    few = recipe.few if recipe else draw.chance(0.3)
    len_q, len_kv = draw.one([n for n in LENGTHS if recipe is None or (n <= 64) == few]), draw.one(LENGTHS)
    if draw.chance(0.02):
        len_q, len_kv = draw.one(((0, 5), (5, 0), (0, 0)))
    if draw.chance(0.01):
        heads_kv = 0
    if recipe and recipe.keys == "many":  # and no axis is empty
        batch, heads_kv, len_q, len_kv = (), draw.one((1, 2)), max(len_q, 1), draw.integer(1500, 2600)
    if recipe and recipe.keys == "in parts":  # the same
        batch, heads_kv, len_q, len_kv = tuple(max(size, 1) for size in batch), max(heads_kv, 1), max(len_q, 65), max(len_kv, 1)
    budget = MOST_FLOPS * (10 if recipe and recipe.keys == "many" else 1)

    def flops() -> float:
        return 2 * (dim + dim_v) * len_q * len_kv * group * heads_kv * math.prod(batch)

    while flops() > budget and (batch or heads_kv > 1):
        batch, heads_kv = (batch[1:], heads_kv) if batch else ((), heads_kv - 1)
    while flops() > budget and group > 2:
        group -= 1

    heads_q = group * heads_kv
    full = {"q": (heads_q, len_q, dim), "k": (heads_kv, len_kv, dim), "v": (heads_kv, len_kv, dim_v)}
    shapes = {name: _batch(draw, batch) + shape for name, shape in full.items()}
    if heads_q == heads_kv == 1 and not batch and draw.chance(0.5):
        shapes = {name: shape[-2:] for name, shape in shapes.items()}
    out = (len_q, dim_v)
    if any(len(shape) > 2 for shape in shapes.values()):
        seen = [shape[:-3] for shape in shapes.values()]
        out = (*_broadcast(*seen), heads_q, len_q, dim_v)
    return shapes | {"out": out, "lse": out[:-1]}


def _dims(draw: Draw, recipe: Recipe | None) -> tuple[int, int]:
    """Head dims of keys and of values, off the edges of tiles rather than on them."""
    if recipe is None:
        dim = draw.one((draw.integer(1, 256), draw.integer(0, 31) * 2 + 1, draw.integer(1, 8)))
        return dim, dim if draw.chance(0.5) else draw.one((draw.integer(1, 256), draw.integer(1, 40)))

    def within(width: int) -> int:
        low = (0, *WIDTHS)[WIDTHS.index(width)]
        return recipe.unit * draw.integer(low // recipe.unit + 1, width // recipe.unit)

    dim, dim_v = within(recipe.width), within(recipe.width_v)
    return dim, dim if recipe.width == recipe.width_v and draw.chance(0.4) else dim_v


def _batch(draw: Draw, batch: Shape) -> Shape:
    """The batch axes that one input has: the first ones may be missing, others have size 1."""
    own = tuple(1 if draw.chance(0.2) else size for size in batch)
    return own[draw.integer(0, len(own)) :] if draw.chance(0.2) else own


def _broadcast(*shapes: Shape) -> Shape:
    """The batch axes of the result; NumPy's own rule, for sizes of 0 as well."""
    longest = max(map(len, shapes))
    columns = zip(*((1,) * (longest - len(shape)) + shape for shape in shapes))
    return tuple(next((size for size in column if size != 1), 1) for column in columns)


def _options(draw: Draw, shapes: dict[str, Shape], direction: str, recipe: Recipe | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    len_q, len_kv = shapes["q"][-2], shapes["k"][-2]
    causal = draw.one((False, False, True, "bottom_right", "top_left"))
    if causal is not False or draw.chance(0.2):
        options["causal"] = causal
    if draw.chance(0.3):
        options["layout"] = draw.one(("bhsd", "bshd", "bshd"))
    if draw.chance(0.3):
        longest = max(len_q, len_kv, 1)
        options["window"] = tuple(draw.one((None, -1, 0, draw.integer(0, longest), draw.integer(0, 40))) for _ in range(2))
    if draw.chance(0.2) and options.get("window", (None, None))[0] in (None, -1):
        options["prefix"] = draw.one((0, 1, draw.integer(0, len_kv + 2)))
    explicit = recipe.explicit if recipe else draw.chance(0.4)
    if explicit and draw.chance(0.6):
        options["softcap"] = draw.log_uniform(1e-3, 1e30)
    usual = draw.log_uniform(0.01, 2)
    sizes = [usual, usual, usual, draw.log_uniform(1e-30, 1e-3), draw.log_uniform(10, LARGEST_SCALE)]
    if direction == "backward":  # gradients grow with it, and float16 ends at 65,504
        sizes = [usual, usual, draw.log_uniform(1e-6, 1e-3), draw.log_uniform(2, 20)]
    if explicit and ("softcap" not in options or draw.chance(0.3)):
        options["scale"] = draw.one((0.0, 0, -draw.one(sizes), -draw.one(sizes)))
    elif draw.chance(0.4):
        options["scale"] = draw.one(sizes)
    return options


def _values(draw: Draw, direction: str, dtype: str, options: dict[str, Any]) -> str:
    """Which numbers: those that are made for a scale only where it is an ordinary one, NaN in the forward only."""
    values = draw.one(VALUES)
    if values == "constant" and dtype == "float64":  # equal terms round the same way each time, which its bound has no room for
        return "normal"
    scale = options.get("scale")
    made_for_scale = values in ("large", "one_hot") and not (scale is None or 0.02 <= abs(scale) <= 2)
    return "normal" if made_for_scale or (values in ("hidden", "nan_key") and direction == "backward") else values


def _place(draw: Draw, name: str, axes: int, recipe: Recipe | None) -> Placement:
    result = name not in ("q", "k", "v", "dout", "dlse")  # what was computed, or is to be: each element by itself
    if name in ("lse", "dlse") or recipe is None:
        return draw_placement(draw, axes, result=result)
    place = draw_placement(draw, axes, recipe.unit, result=result)
    if recipe.kernel == "fwd_hopper":  # TMA steps forwards only
        place = replace(place, steps=tuple(map(abs, place.steps)))
    if name != "q" or recipe.copy_bytes == 16:
        return place
    if recipe.copy_bytes == 0 and DTYPES[recipe.dtype].itemsize == 4:  # an address alone cannot ask for single elements
        return replace(place, steps=(*place.steps[:-1], 2))
    return replace(place, offset=recipe.unit * (2 * draw.integer(0, 4) + 1))
