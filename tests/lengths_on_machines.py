"""Sequences of several lengths on a machine, a device or NumPy in its place: what is called there, and how it is judged here."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy
from ragged import Ragged
from rotary import angles

import cupy_flash
from cupy_flash.judge.cases import Case
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.expressions import SCORES, Grid, Sizes
from cupy_flash.judge.fuzz import judging_lengths, lengths
from cupy_flash.judge.operands import draw_arrays, hand_score
from cupy_flash.problem.backward import Gradients
from cupy_flash.problem.key_ranges import KeyRanges


def again(step):
    """What a machine without graphs has for one: the same once, and then whenever it is launched."""
    step()
    return step


@dataclass(frozen=True)
class Machine:
    """Where calls are computed: `xp` makes arrays there, `get` brings them back, `capture(step)` calls it and returns its graph."""

    xp: ModuleType = numpy
    get: Callable[[Any], Any] = numpy.asarray
    capture: Callable[[Any], Any] = again
    options: dict[str, Any] = field(default_factory=dict)  # of every call, such as its backend

    def put(self, x):
        """An option with its arrays there; what is none stays."""
        if isinstance(x, dict):
            return {name: self.put(value) for name, value in x.items()}
        if isinstance(x, KeyRanges):
            return KeyRanges(self.put(x.start), self.put(x.stop))
        return self.xp.asarray(x) if isinstance(x, numpy.ndarray) else x


# Random problems


@functools.cache
def drawn(seed, start, count):
    """The numbers of those that a device computes: no float64, and of gradients only those that kernels have."""

    def serves(p):
        return p.dtype != "float64" and (p.direction == "forward" or p.backend == "host" or not p.asked)

    return [i for i in range(start, start + count) if serves(lengths.draw_problem_of_lengths(seed, i))]


def wrong(machine, seed, index):
    """Compute a random problem there: what is wrong, in words, or None."""
    problem = replace(lengths.draw_problem_of_lengths(seed, index), given=())
    found = judging_lengths.judge(problem, functools.partial(computed, machine))
    return found and f"{found}\n  {problem}"


def computed(machine, call):
    """The results of a problem's call, brought back."""
    p = call.problem
    options = call.options | machine.put(call.others) | machine.options
    names = ("q", "k", "v") if p.direction == "forward" else ("dout", "q", "k", "v", "out", "lse")
    operands = [machine.put(call.view(name)) for name in names]
    if p.direction == "forward":
        result = cupy_flash.attention(*operands, **options)
        return tuple(map(machine.get, result)) if p.options.get("return_lse") else (machine.get(result), None)
    options.pop("return_lse", None)
    options |= {"dlse": machine.put(call.view("dlse"))} if p.with_dlse else {}
    options |= {"wrt": call.wrt} if call.wrt else {}
    result = cupy_flash.attention_backward(*operands, **options, deterministic=p.deterministic)
    others = {name: getattr(result, name) for name in ("dbias", "dalibi_slopes", "dsinks")}
    others = {name: None if x is None else machine.get(x) for name, x in others.items()}
    return Gradients(*map(machine.get, result), **others, darrays={name: machine.get(x) for name, x in result.darrays.items()})


# Sequences that are given


def rooms_with(ragged, kind_q, kind_kv, wanted=lambda q_room, kv_room: True):
    """The first places of these kinds that are as wanted."""
    return next(rooms for rooms in (ragged.rooms(kind_q, kind_kv, turn) for turn in range(400)) if wanted(*rooms))


def asked(machine, ragged, rooms, **options):
    """What is called with: q, k and v, and all options."""
    q_room, kv_room = rooms
    inputs = [machine.put(ragged.array(room, name)) for room, name in ((q_room, "q"), (kv_room, "k"), (kv_room, "v"))]
    return inputs, machine.put(q_room.numbers | kv_room.numbers | options) | machine.options | {"return_lse": True}


def planned(machine, ragged, rooms, **options):
    """How that would be computed."""
    inputs, told = asked(machine, ragged, rooms, **options)
    return cupy_flash.plan_attention(*inputs, **told)


def forward(machine, ragged, rooms, **options):
    """Results of each sequence: out and lse."""
    q_room, _ = rooms
    inputs, told = asked(machine, ragged, rooms, **options)
    out, lse = map(machine.get, cupy_flash.attention(*inputs, **told))
    return list(zip(ragged.cut(q_room, out), ragged.cut(q_room, lse, -numpy.inf)))


def backward(machine, ragged, rooms, deterministic=True, **options):
    """Gradients of each sequence: dq, dk and dv, from the machine's own results."""
    q_room, kv_room = rooms
    given = ((q_room, "dout"), (q_room, "q"), (kv_room, "k"), (kv_room, "v"))
    dout, q, k, v = (machine.put(ragged.array(room, name)) for room, name in given)
    told = machine.put(q_room.numbers | kv_room.numbers | options) | machine.options
    out, lse = cupy_flash.attention(q, k, v, **told, return_lse=True)
    gradients = cupy_flash.attention_backward(dout, q, k, v, out, lse, **told, deterministic=deterministic)
    return list(zip(*(ragged.cut(room, machine.get(x)) for room, x in zip((q_room, kv_room, kv_room), gradients))))


def judge(ragged, results, **options):
    """Whether results, or gradients, of each sequence are right; options are those of the call, an expression by its name."""
    named, arrays = options.pop("score", None), options.pop("arrays", None)
    for number, (part, own) in enumerate(zip(ragged.parts, results, strict=True)):
        q, k, v, dout = (part[name] for name in ("q", "k", "v", "dout"))
        scores = Case(q.dtype.name, q.shape[-2], k.shape[-2], q.shape[-1], **options).scores
        if named:
            grid = Grid.of((), len(q), len(k), q.shape[-2], k.shape[-2])
            scores["score"] = hand_score(SCORES[named], replace(grid, b=grid.b + number), arrays)
        judged = compare(*own, q, k, v, **scores) if len(own) == 2 else compare_gradients(own, dout, q, k, v, **scores)
        assert judged.ok, f"sequence {number}: {judged.message}"


def expression(name, ragged):
    """An expression of scores for these sequences: its text, and the arrays that it reads."""
    longest = [max(n[side] for n in ragged.lens) for side in (0, 1)]
    sizes = Sizes(len(ragged.lens), *ragged.heads, *longest)
    arrays = draw_arrays([SCORES[name]], numpy.random.default_rng(1), sizes, numpy.float32)
    return SCORES[name].text, arrays


# Lengths that change while a graph stays


def replayed(machine, dtype, lens, rows, count):
    """A packed forward captured once, whose offsets change in place, beside fresh calls: pairs of results."""
    rng, xp = numpy.random.default_rng(0), machine.xp
    q, k, v = (machine.put(rng.standard_normal((heads, rows, 64)).astype(dtype)) for heads in (4, 2, 2))
    offsets = machine.put(padded_offsets(lens[0], count))
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    out, lse = xp.empty(q.shape, dtype), xp.empty(q.shape[:-1], numpy.float32)
    plan = cupy_flash.plan_attention(q, k, v, causal=True, return_lse=True, out=out, lse=lse, **given, **machine.options)
    workspace = workspace_of(machine, plan)
    launch = machine.capture(lambda: plan(q, k, v, out=out, lse=lse, workspace=workspace, **given))
    for new in lens:
        offsets[...] = machine.put(padded_offsets(new, count))
        launch()
        fresh = cupy_flash.attention(q, k, v, causal=True, return_lse=True, **given, **machine.options)
        yield [machine.get(x).copy() for x in (out, lse)], [machine.get(x) for x in fresh]


def padded_offsets(lens, count):
    """Offsets of sequences in a row, with room for so many of them: those behind the last one are empty."""
    return numpy.concatenate([[0], numpy.cumsum([*lens, *[0] * (count - len(lens))])]).astype(numpy.int32)


def workspace_of(machine, plan):
    """Memory for what kernels hand on to each other, if they do."""
    return machine.xp.empty(plan.workspace_bytes, numpy.uint8) if plan.workspace_bytes else None


class Decoding:
    """Steps of a decoder over pages: rotate and append, attend. Pages that are not in use are NaN."""

    def __init__(self, machine, dtype, starts, capacity=4096, page_size=16, heads=(8, 2), dim=64):
        rng, self.machine, self.heads, self.dim, self.dtype = numpy.random.default_rng(0), machine, heads, dim, dtype
        columns = capacity // page_size
        table = rng.permutation(len(starts) * columns).reshape(-1, columns).astype(numpy.int32)
        pool = numpy.full((2, table.size, heads[1], page_size, dim), numpy.nan, dtype)
        flat = pool.swapaxes(2, 3).reshape(2, -1, heads[1], dim)  # a copy
        for row, start in zip(table, starts):
            places = (row[:, None] * page_size + numpy.arange(page_size)).reshape(-1)[:start]
            flat[:, places] = rng.standard_normal((2, start, heads[1], dim)).astype(dtype)
        pool = numpy.ascontiguousarray(flat.reshape(2, table.size, page_size, heads[1], dim).swapaxes(2, 3))
        self.pool, self.table, self.lengths = map(machine.put, (pool, table, numpy.array(starts, numpy.int32)))
        self.cos, self.sin = map(machine.put, angles(capacity, dim // 4))
        self.rng, count = rng, len(starts)
        shapes = ((heads[0],), (heads[1],), (heads[1],))
        self.q, self.k, self.v = (machine.put(numpy.zeros((count, *n, 1, dim), dtype)) for n in shapes)
        self.rotated, self.out = (machine.xp.empty(self.q.shape, dtype) for _ in range(2))
        self.plan = cupy_flash.plan_attention(
            self.rotated, *self.pool, pages=self.table, seqlens_kv=self.lengths, out=self.out, **machine.options
        )
        self.workspace = workspace_of(machine, self.plan)

    def draw(self):
        """Give all sequences another token."""
        for x in (self.q, self.k, self.v):
            x[...] = self.machine.put(self.rng.standard_normal(x.shape).astype(self.dtype))

    def step(self):
        """What is captured: nothing is allocated, and lengths are counted where they are."""
        rows = {"pages": self.table, "cos": self.cos, "sin": self.sin, "q": self.q, "q_out": self.rotated}
        cupy_flash.append_kv(*self.pool, self.k, self.v, self.lengths, **rows, **self.machine.options)
        self.lengths += 1
        given = {"pages": self.table, "seqlens_kv": self.lengths}
        self.plan(self.rotated, *self.pool, out=self.out, workspace=self.workspace, **given)

    def judge(self):
        """Whether the last step's result follows from the rows that are in pages now."""
        pool, table, lengths, q, out = map(self.machine.get, (self.pool, self.table, self.lengths, self.rotated, self.out))
        flat = pool.swapaxes(2, 3)  # (2, pages, page size, heads, dim)
        for b, length in enumerate(lengths.tolist()):
            used = table[b, : -(-length // flat.shape[2])]
            k, v = flat[:, used].reshape(2, -1, self.heads[1], self.dim)[:, :length].swapaxes(1, 2)
            judged = compare(out[b], None, q[b], k, v, scale=self.dim**-0.5)
            assert judged.ok, f"sequence {b} of {length} keys: {judged.message}"


# Few queries with many keys, far apart


def few_queries(machine, dtype, lens, capacity, page_size=None, pages=None, dim=64, heads=(8, 2)):
    """Decode sequences of these lengths, contiguous or in pages of a pool of so many: the plan, and what has to be judged.

    The pool holds nothing but rows in use: the rest of it is as it was allocated, and what lies in pages beyond rows is NaN.
    """
    rng, xp = numpy.random.default_rng(0), machine.xp
    q = rng.standard_normal((len(lens), heads[0], 1, dim)).astype(dtype)
    kv = [rng.standard_normal((2, heads[1], n, dim)).astype(dtype) for n in lens]
    told = {"seqlens_kv": machine.put(numpy.array(lens, numpy.int32))}
    if page_size is None:
        caches = numpy.full((2, len(lens), heads[1], capacity, dim), numpy.nan, dtype)
        for b, rows in enumerate(kv):
            caches[:, b, :, : lens[b]] = rows
        k_cache, v_cache = map(machine.put, caches)
    else:
        used = [-(-n // page_size) for n in lens]
        ends = [pages - 1 - i // 2 if i % 2 else i // 2 for i in range(sum(used))]  # from both ends of the pool
        table = numpy.full((len(lens), -(-capacity // page_size)), 2**31 - 1, numpy.int32)  # absurd beyond each length
        pool = xp.empty((pages, 2, heads[1], page_size, dim), dtype)
        for b, rows in enumerate(kv):
            table[b, : used[b]], ends = ends[: used[b]], ends[used[b] :]
            padded = numpy.full((2, heads[1], used[b] * page_size, dim), numpy.nan, dtype)
            padded[:, :, : lens[b]] = rows
            in_pages = padded.reshape(2, heads[1], used[b], page_size, dim).transpose(2, 0, 1, 3, 4)
            for page, own in zip(table[b, : used[b]].tolist(), in_pages):
                pool[page] = machine.put(numpy.ascontiguousarray(own))
        k_cache, v_cache = pool[:, 0], pool[:, 1]
        told["pages"] = machine.put(table)
    plan = cupy_flash.plan_attention(machine.put(q), k_cache, v_cache, **told, return_lse=True, **machine.options)
    out, lse = map(machine.get, plan(machine.put(q), k_cache, v_cache, **told))
    for b, (k, v) in enumerate(kv):
        judged = compare(out[b], lse[b], q[b], k, v, scale=dim**-0.5)
        assert judged.ok, f"sequence {b} of {lens[b]} keys: {judged.message}"
    return plan, out, lse


def some_sequences(lens, dtype, heads=(4, 2), dim=64, seed=0):
    """As many keys as queries in each."""
    return Ragged([(n, n) for n in lens], heads, dim, dtype, seed)
