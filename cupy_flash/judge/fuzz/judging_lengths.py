"""Computing a random problem of lengths, and judging each of its sequences by itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy

import cupy_flash

from ...problem.arrays import DTYPES
from ...problem.backward import Gradients
from ...problem.forward import lse_dtype_of
from ..compare import compare
from ..compare_gradients import compare_gradients
from ..compare_sequences import Part, wrong_sum
from ..dropout import keep_scale_of, kept_pairs
from ..expressions import MASKS, SCORES_OF_LENGTHS, Grid, Sizes
from ..operands import draw_arrays, hand_score
from ..oracle import sees
from ..oracle_gradients import oracle_gradients
from .draw import Draw
from .lengths import LengthsProblem, place_of
from .pairs import RANGES, plain
from .placement import Placed
from .rooms import SHARED

SEED = (0x9E3779B97F4A7C15, 3)  # of dropout, and its offset


@dataclass
class Call:
    """The arrays of a problem: `arrays` by name, as `Placed`; `read` those that expressions read; `numbers` say where rows are."""

    problem: LengthsProblem
    arrays: dict[str, Placed]
    read: dict[str, numpy.ndarray]
    numbers: dict[str, Placed]
    given: dict[str, numpy.ndarray] = field(default_factory=dict)

    @property
    def others(self) -> dict[str, Any]:
        """The keyword arguments of any call that are arrays, and a seed."""
        found = {name: x.array for name, x in self.numbers.items()}
        found |= {name: self.arrays[name].array for name in ("sinks", "bias", "mask", "alibi_slopes") if name in self.arrays}
        found |= {"arrays": self.read} if self.read else {}
        asked = self.problem.asked
        if asked and asked.mask == "ranges":
            found["mask"] = cupy_flash.KeyRanges(*(self.arrays[name].array for name in RANGES))
        return found | ({"seed": SEED} if asked and asked.dropout else {})

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are none, for `attention`."""
        p, asked = self.problem, self.problem.asked
        found = dict(p.options)
        if asked:
            found |= {"score": SCORES_OF_LENGTHS[asked.score].text} if asked.score else {}
            found |= {"mask": MASKS[asked.mask].text} if asked.mask in MASKS else {}
            found |= {"dropout": p.probability} if asked.dropout else {}
        return found

    def view(self, name: str) -> numpy.ndarray:
        """An array as the caller sees it."""
        return exchanged(self.problem, name, self.arrays[name].array)

    @property
    def wrt(self) -> tuple[str, ...]:
        """What else has a gradient."""
        p = self.problem
        if p.direction == "forward" or not p.asked:
            return ()
        own = tuple(name for name in ("bias", "alibi_slopes") if name in self.arrays)
        return (*own, *(name for name in self.read if p.asked.score and name in _reads(SCORES_OF_LENGTHS[p.asked.score])))


def exchanged(problem: LengthsProblem, name: str, x: numpy.ndarray | None) -> numpy.ndarray | None:
    """An array with its axes in the order that the problem asks for, or back."""
    if x is None or problem.options.get("layout") != "bshd":
        return x
    heads = -2 if name in ("lse", "dlse") else -3
    return numpy.swapaxes(x, heads, heads + 1)


def make_call(problem: LengthsProblem) -> Call:
    """All arrays of a call, each in guarded memory. A backward gets the results of NumPy's forward."""
    p, numbers = problem, Draw("values of lengths", problem.seed, problem.index).numbers()
    dtype, wide = DTYPES[p.dtype], DTYPES[lse_dtype_of(p.dtype)]
    results = p.q.of_results()
    made = {"q": p.q.filled((p.heads[0], p.dims[0]), numbers, dtype, p.poison)}
    made["k"], made["v"] = (p.kv.filled((p.heads[1], dim), numbers, dtype, p.poison) for dim in p.dims)
    values = {name: _seen_by_user(p, name, x) for name, x in made.items()}
    read = {}
    if p.sinks:
        sinks = 2 * numbers.standard_normal((p.sinks, p.heads[0]))
        values["sinks"] = (sinks if p.sinks > 1 else sinks[0]).astype(DTYPES[p.sinks_dtype])
    if p.asked:
        read = _make_operands(p, values, numbers, wide)
    arrays = {name: Placed(x, place_of(p, name, x.ndim)) for name, x in values.items()}
    told = p.q.numbers | p.kv.numbers
    call = Call(p, arrays, read, {name: Placed(x, plain(x)) for name, x in told.items()})
    if p.direction == "backward":
        options = {name: x for name, x in call.options.items() if name not in ("precision", "layout", "return_lse")}
        inputs = [arrays[name].array for name in "qkv"]
        out, lse = cupy_flash.attention(*inputs, **options, **call.others, return_lse=True, backend="numpy")
        more = {"out": out.copy(), "lse": lse.copy(), "dout": results.filled((p.heads[0], p.dims[1]), numbers, dtype, p.poison)}
        more["dout"] = more["dout"].reshape(out.shape)
        dlse = results.filled((p.heads[0], 1), numbers, wide, p.poison)[..., 0]
        more["dlse"] = dlse.reshape(lse.shape)
        free = results.outside()
        more["out"].reshape(results.elements, p.heads[0], results.rows, p.dims[1]).swapaxes(1, 2)[free] = p.poison
        more["lse"].reshape(results.elements, p.heads[0], results.rows).swapaxes(1, 2)[free] = p.poison
        arrays |= {name: Placed(x, place_of(p, name, x.ndim)) for name, x in more.items() if name != "dlse" or p.with_dlse}
    for name in p.given:
        shape = _shape_of(call, name)
        arrays[name] = Placed(numpy.full(shape, numpy.nan, wide if name == "lse" else dtype), place_of(p, name, len(shape)))
    return call


def judge(problem: LengthsProblem, compute: Any) -> str | None:
    """Compute a problem: what is wrong, in words, or None."""
    p, call = problem, make_call(problem)
    results = compute(call)
    named = dict(zip(("dq", "dk", "dv") if p.direction == "backward" else ("out", "lse"), results))
    for name, placed in (call.arrays | call.numbers).items():
        if name not in p.given and not placed.unchanged():
            return f"{name}: written, although it is an input"
        if not placed.unchanged_around():
            return f"{name}: written beside it"
    for name, result in named.items():
        if name in p.given and result is not None and result is not call.given[name]:
            return f"{name}: the caller's array was not returned"
        named[name] = result = exchanged(p, name, result)
        if result is not None and result.shape != _shape_of(call, name):
            return f"{name}: expected shape {_shape_of(call, name)}, got {result.shape}"
    if p.direction == "forward" and "lse" in p.given:
        named["lse"] = call.arrays["lse"].array  # written even where it is not returned
    wrong = _wrong_outside(p, named)
    if wrong:
        return wrong
    return (_judge_forward if p.direction == "forward" else _judge_backward)(call, named, results)


def _wrong_outside(p: LengthsProblem, named: dict[str, numpy.ndarray | None]) -> str | None:
    """Whether rows of no sequence are 0, and of the log-sum-exp -inf."""
    results = p.q.of_results()
    rooms = {"out": results, "lse": results, "dq": p.q, "dk": p.kv, "dv": p.kv}
    for name, x in named.items():
        if x is None:
            continue
        room = rooms[name]
        heads = p.heads[name in ("dk", "dv")]
        rows = x.reshape(room.elements, heads, room.rows, *x.shape[-1:] * (name != "lse")).swapaxes(1, 2)[room.outside()]
        expected = -numpy.inf if name == "lse" else 0
        if not (rows == expected).all():
            return f"{name}: expected {expected} in rows of no sequence, got {rows[rows != expected][0]}"
    return None


def _judge_forward(call: Call, named: dict[str, Any], _: Any) -> str | None:
    p, results = call.problem, call.problem.q.of_results()
    out, lse = named["out"], named["lse"]
    out = out.reshape(results.elements, *out.shape[-3:])
    lse = None if lse is None else lse.reshape(results.elements, *lse.shape[-2:])
    for number in range(len(p.q.lens)):
        own = results.gathered(out, number), None if lse is None else results.gathered(lse, number)
        judged = compare(*own, *_inputs(call, number), **_scores(call, number))
        if not judged.ok:
            return f"sequence {number}: {judged.message}"
    return None


def _judge_backward(call: Call, named: dict[str, Any], results: Gradients) -> str | None:
    p = call.problem
    if p.q.kind == "shared" or p.kv.kind in SHARED:
        return _judge_shared(call, named)
    rooms, parts = {"dq": p.q, "dk": p.kv, "dv": p.kv}, []
    whole = {name: x.reshape(rooms[name].elements, *x.shape[-3:]) for name, x in named.items()}
    for number in range(len(p.q.lens)):
        inputs, scores = _inputs(call, number), _scores(call, number)
        dout, dlse = _cotangents(call, number)
        gradients = _OfInputs(rooms[name].gathered(x, number) for name, x in whole.items())
        if p.sinks:  # of all sequences together, and judged below
            exact = oracle_gradients(dout, *inputs, dlse=dlse, **{name: x for name, x in scores.items() if name != "precision"})
            gradients.dsinks = exact.dsinks.astype(scores["sinks"].dtype)
        judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, **scores)
        if not judged.ok:
            return f"sequence {number}: {judged.message}"
        places = {name: _place_in(call, name, number) for name in ("bias", "alibi_slopes") if name in call.arrays}
        parts.append(Part(dout, *inputs, dlse, {k: v for k, v in scores.items() if k != "precision"}, places))
    wrt = {"bias": results.dbias, "alibi_slopes": results.dalibi_slopes} | results.darrays
    arrays = {name: x.array for name, x in call.arrays.items()} | call.read
    pairs = {name: (numpy.asarray(arrays[name]), wrt[name]) for name in call.wrt}
    sinks = call.arrays["sinks"].array if p.sinks else None
    if (results.dsinks is None) != (sinks is None):
        return "dsinks: expected a gradient of sinks, and none without"
    return wrong_sum(parts, sinks, results.dsinks, pairs, p.options.get("precision", "ieee"))


class _OfInputs(tuple):
    """Gradients of q, k and v of one sequence, and perhaps of sinks."""

    dsinks: Any = None


def _judge_shared(call: Call, named: dict[str, Any]) -> str | None:
    """Gradients that are sums over sequences: all in one problem, in which a mask says who sees whom."""
    p, results = call.problem, call.problem.q.of_results()
    count, arrays = len(p.q.lens), {name: x.array for name, x in call.arrays.items()}
    q_rows, kv_rows = max(*p.q.lens, 1), max(*p.kv.lens, 1)
    seen = numpy.zeros((count, 1, q_rows, kv_rows), bool)
    for number, (len_q, len_kv) in enumerate(zip(p.q.lens, p.kv.lens)):
        scores = p.scores_of(number)
        seen[number, 0, :len_q, :len_kv] = sees(len_q, len_kv, *(scores[name] for name in ("first_key", "last_key", "prefix")))

    def padded(x: numpy.ndarray, room: Any, rows: int, alike: bool) -> numpy.ndarray:
        x = x.reshape(room.elements, x.shape[-3], room.rows, x.shape[-1])
        lens = [max(room.lens)] if alike else room.lens
        made = numpy.zeros((len(lens), x.shape[1], rows, x.shape[-1]), x.dtype)
        for number, n in enumerate(lens):
            longest = int(numpy.argmax(room.lens)) if alike else number
            made[number, :, :n] = room.gathered(x, longest)
        return made

    of_inputs = (("q", p.q, q_rows), ("k", p.kv, kv_rows), ("v", p.kv, kv_rows))
    q, k, v = (padded(arrays[name], room, rows, room.kind == "shared") for name, room, rows in of_inputs)
    dout = padded(arrays["dout"], results, q_rows, False)
    dlse = padded(arrays["dlse"][..., None], results, q_rows, False)[..., 0] if p.with_dlse else None
    rooms = {"dq": (p.q, q_rows), "dk": (p.kv, kv_rows), "dv": (p.kv, kv_rows)}
    gradients = [padded(x, *rooms[name], rooms[name][0].kind == "shared") for name, x in named.items()]
    scores = {name: x for name, x in p.scores_of(0).items() if name in ("scale", "softcap")}
    precision = p.options.get("precision", "ieee")
    judged = compare_gradients(Gradients(*gradients), dout, q, k, v, dlse=dlse, precision=precision, seen=seen, **scores)
    return None if judged.ok else judged.message


def _inputs(call: Call, number: int) -> list[numpy.ndarray]:
    rooms = {"q": call.problem.q, "k": call.problem.kv, "v": call.problem.kv}
    found = []
    for name, room in rooms.items():
        x = call.arrays[name].array
        found.append(room.gathered(x.reshape(room.elements, *x.shape[-3:]), number))
    return found


def _cotangents(call: Call, number: int) -> tuple[numpy.ndarray, numpy.ndarray | None]:
    results, dout = call.problem.q.of_results(), call.arrays["dout"].array
    own = results.gathered(dout.reshape(results.elements, *dout.shape[-3:]), number)
    if not call.problem.with_dlse:
        return own, None
    dlse = call.arrays["dlse"].array
    return own, results.gathered(dlse.reshape(results.elements, *dlse.shape[-2:]), number)


def _scores(call: Call, number: int) -> dict[str, Any]:
    """The keyword arguments for the functions of `oracle`, of a sequence."""
    p, asked = call.problem, call.problem.asked
    told = p.scores_of(number) | {"precision": p.options.get("precision", "ieee")}
    told |= {"sinks": call.arrays["sinks"].array} if p.sinks else {}
    if not asked:
        return told
    (heads_q, heads_kv), len_q, len_kv = p.heads, p.q.lens[number], p.kv.lens[number]
    grid = Grid.of((), heads_q, heads_kv, len_q, len_kv)
    grid = replace(grid, b=grid.b + number)
    there = [name for name in ("bias", "mask", "alibi_slopes") if name in call.arrays]
    own = {name: call.arrays[name].array[_place_in(call, name, number)] for name in there}
    told |= {name: x for name, x in own.items() if name != "mask"}
    told |= {"score": hand_score(SCORES_OF_LENGTHS[asked.score], grid, call.read)} if asked.score else {}
    if asked.mask == "ranges":
        results, ends = p.q.of_results(), (call.arrays[name].array for name in RANGES)
        start, stop = (results.gathered(x.reshape(results.elements, *x.shape[-3:]), number)[..., None, :] for x in ends)
        keys = numpy.arange(len_kv)[:, None]
        told["seen"] = ((start <= keys) & (keys < stop)).any(-1)
    elif asked.mask:
        told["seen"] = own["mask"] if asked.mask == "array" else MASKS[asked.mask].hand(grid, call.read)
    if asked.dropout:
        keep = kept_pairs((len(p.q.lens), heads_q, len_q, len_kv), p.probability, *SEED)[number]
        told |= {"keep": keep, "keep_scale": keep_scale_of(p.probability)}
    return told


def _place_in(call: Call, name: str, number: int) -> tuple[Any, ...]:
    """Which part of an array of pairs or of heads belongs to a sequence."""
    p, shape = call.problem, call.arrays[name].array.shape
    if name == "alibi_slopes":
        return (number,) if len(shape) == 2 else ()
    rows = tuple(slice(n) if m > 1 else slice(None) for n, m in zip((p.q.lens[number], p.kv.lens[number]), shape[-2:]))
    element = (number if shape[0] > 1 else 0,) if len(shape) == 4 else ()
    return (*element, ..., *rows)


def _make_operands(
    p: LengthsProblem, values: dict[str, numpy.ndarray], numbers: numpy.random.Generator, wide: Any
) -> dict[str, numpy.ndarray]:
    """Add bias, mask and slopes to the arrays of a call; what expressions read is returned."""
    asked, count, room = p.asked, len(p.q.lens), (p.q.capacity, p.kv.capacity)
    draw = Draw("operands of lengths", p.seed, p.index)
    for name, there in (("bias", asked.bias_dtype), ("mask", asked.mask == "array")):
        if not there:
            continue
        axes = [1 if draw.chance(0.25) else n for n in (count, p.heads[0], *room)]
        shape = tuple(axes[draw.integer(0, 2) :] if draw.chance(0.4) else axes)
        x = numbers.standard_normal(shape) if name == "bias" else numbers.random(shape) < numbers.choice([0.3, 0.9])
        if name == "bias":
            x[numbers.random(shape) < 0.05] = -numpy.inf
        if len(shape) == 4 and shape[0] == count:  # what lies beyond each length is not read, or does not matter
            for number in range(count):
                for axis, n in ((-2, p.q.lens[number]), (-1, p.kv.lens[number])):
                    if shape[axis] > 1:
                        numpy.moveaxis(x[number], axis, 0)[n:] = numpy.nan if name == "bias" else True
        values[name] = x.astype(DTYPES[asked.bias_dtype]) if name == "bias" else x
    if asked.alibi:
        values["alibi_slopes"] = numbers.uniform(0, 0.3, draw.one(((p.heads[0],), (count, p.heads[0])))).astype(wide)
    if asked.mask == "ranges":
        values |= _ranges(p, numbers)
    if asked.mask != "documents":  # places in a packed sequence may lie beyond an array
        room = tuple(draw.integer(1, of.capacity) if of.is_packed and draw.chance(0.5) else of.capacity for of in (p.q, p.kv))
    sizes = Sizes(count, *p.heads, *room)
    expressions = [SCORES_OF_LENGTHS[asked.score]] if asked.score else []
    expressions += [MASKS[asked.mask]] if asked.mask in MASKS else []
    return draw_arrays(expressions, numbers, sizes, wide)


def _ranges(p: LengthsProblem, numbers: numpy.random.Generator) -> dict[str, numpy.ndarray]:
    """The ends of ranges of keys of each row: some are empty, some reach beyond the keys; those of no sequence see all keys."""
    results, most = p.q.of_results(), p.kv.capacity + 5
    heads = p.heads[0] if p.asked.ranges_of_heads else 1
    shape = results.elements, heads, results.rows, p.asked.ranges
    start, stop = numpy.full(shape, -(2**31), numpy.int64), numpy.full(shape, 2**31 - 1, numpy.int32)
    for element, row in results.places:
        start[element, :, row] = numbers.integers(-5, most, (len(row), heads, p.asked.ranges))
        stop[element, :, row] = start[element, :, row] + numbers.integers(-3, most, (len(row), heads, p.asked.ranges))
    start = start.astype(numbers.choice([numpy.int32, numpy.int64]))
    return dict(zip(RANGES, (start[0], stop[0]) if results.is_packed else (start, stop)))


def _reads(expression: Any) -> tuple[str, ...]:
    return tuple(expression.draw(numpy.random.default_rng(0), Sizes(1, 1, 1, 1, 1)))


def _seen_by_user(p: LengthsProblem, name: str, x: numpy.ndarray) -> numpy.ndarray:
    """With a batch axis, unless it is packed, or shared and given without."""
    room = p.q if name in ("q", "dq") else p.kv
    return x[0] if room.is_packed or (room.kind == "shared" and not p.with_batch) else x


def _shape_of(call: Call, name: str) -> tuple[int, ...]:
    p, results = call.problem, call.problem.q.of_results()
    if name in ("dq", "dk", "dv"):
        return call.arrays[name[1]].array.shape
    shape = (results.elements, p.heads[0], results.rows, p.dims[1])
    shape = shape[1:] if results.is_packed else shape
    return shape[:-1] if name == "lse" else shape
