"""Packed or padded queries in fwd_hopper: heads of a group are neighbouring rows of a tile, query by query."""

import numpy
import pytest
from test_hopper_pages import in_pages
from thinned import quick, thinned

from cupy_flash import plan_attention
from cupy_flash.judge.compare import compare
from cupy_flash.machine import host, source
from cupy_flash.machine.host import SCHEDULES

# Queries and keys of sequences: beside tile edges, one of each, none of either, and several tiles.
LENS = ((70, 150), (1, 65), (1, 1), (0, 17), (64, 64), (5, 0), (130, 190), (3, 300))
SINKS = numpy.array([0.5, 7.0, -3.0, 0.0, 2.0, 1.0, -1.0, 0.3], numpy.float32)
HOST = {"backend": "host", "arch": "90a", "return_lse": True}
# Query heads on key heads, dim, what is asked, and how many heads are neighbours.
ASKED = {
    "causal": ((8, 2), 64, {"causal": True}, 4),
    "eight": ((8, 1), 128, {"causal": True}, 8),
    "more than rows have room for": ((16, 1), 64, {"causal": True}, 8),
    "a power of two of a group": ((6, 1), 64, {"causal": True}, 2),
    "no mask": ((4, 2), 128, {}, 2),
    "window": ((8, 2), 64, {"window": (40, 9), "causal": "top_left"}, 4),
    "prefix": ((4, 1), 64, {"causal": True, "prefix": 20}, 4),
    "softcap": ((4, 1), 128, {"causal": True, "softcap": 5.0}, 4),
    "sinks": ((8, 1), 64, {"causal": True, "sinks": SINKS}, 8),
    "wide": ((4, 1), 256, {"causal": True}, 4),
    "dims between": ((4, 2), 96, {"causal": True}, 2),
}
ROOM = 7  # rows behind those of all sequences, or of the longest


def on(told, put):
    """What a call is told, its arrays where they are computed with."""
    return {name: put(x) if isinstance(x, numpy.ndarray) else x for name, x in told.items()}


class Batch:
    """Sequences with poison wherever no query and no key is."""

    def __init__(self, name, lens=LENS):
        (self.heads, self.heads_kv), self.dim, self.asked, self.inner = ASKED[name]
        rng = numpy.random.default_rng(4)
        self.lens = numpy.array(lens)
        self.q, self.k, self.v = (
            [rng.standard_normal((heads, n, self.dim)).astype(numpy.float16) for n in self.lens[:, side]]
            for heads, side in ((self.heads, 0), (self.heads_kv, 1), (self.heads_kv, 1))
        )

    def some(self, *numbers):
        part = object.__new__(Batch)
        part.__dict__ |= self.__dict__ | {"lens": self.lens[list(numbers)]}
        part.q, part.k, part.v = ([x[i] for i in numbers] for x in (self.q, self.k, self.v))
        return part

    def rows(self, parts, kind, side):
        """The rows of a side, and what a call is told of them."""
        counts = self.lens[:, side].astype(numpy.int32)
        name = "kv" if side else "q"
        if kind == "packed":
            offsets = numpy.concatenate([[0], counts.cumsum()]).astype(numpy.int32)
            array = numpy.full((offsets[-1] + ROOM, *parts[0].shape[::2]), numpy.nan, numpy.float16)  # (rows, heads, dim) in memory
            for part, begin in zip(parts, offsets):
                array[begin : begin + part.shape[1]] = part.swapaxes(0, 1)
            return array.swapaxes(0, 1), {f"cu_seqlens_{name}": offsets}
        array = numpy.full((len(parts), parts[0].shape[0], counts.max() + ROOM, self.dim), numpy.nan, numpy.float16)
        for of, part in zip(array, parts):
            of[:, : part.shape[1]] = part
        return array, {f"seqlens_{name}": counts}

    def computed(self, kind_q="packed", kind_kv="padded", options=HOST, put=numpy.asarray, get=numpy.asarray):
        """out and lse of each sequence, without room; what lies beyond is 0."""
        q, told = self.rows(self.q, kind_q, 0)
        if kind_kv == "pages":
            (k, tables), (v, _) = (
                in_pages(self.rows(x, "padded", 1)[0], self.lens[:, 1], 16, numpy.random.default_rng(1)) for x in (self.k, self.v)
            )
            told |= {"pages": tables, "seqlens_kv": self.lens[:, 1].astype(numpy.int32)}
        else:
            (k, of_kv), (v, _) = self.rows(self.k, kind_kv, 1), self.rows(self.v, kind_kv, 1)
            told |= of_kv
        q, k, v, told, asked = *map(put, (q, k, v)), on(told, put), on(self.asked, put)
        plan = plan_attention(q, k, v, **told, **asked, **options)
        assert plan.kernel.file == "fwd_hopper" and self.inner == plan.kernel.config.INNER_HEADS
        out, lse = map(get, plan(q, k, v, **told, **{name: x for name, x in asked.items() if name == "sinks"}))
        found, counts = [], self.lens[:, 0]
        if kind_q == "packed":
            ends = counts.cumsum()
            assert not out[:, ends[-1] :].any() and (lse[:, ends[-1] :] == -numpy.inf).all()
            return [(out[:, end - n : end], lse[:, end - n : end]) for end, n in zip(ends, counts)]
        for of_out, of_lse, n in zip(out, lse, counts):
            assert not of_out[:, n:].any() and (of_lse[:, n:] == -numpy.inf).all()
            found.append((of_out[:, :n], of_lse[:, :n]))
        return found

    def assert_right(self, found):
        for (out, lse), q, k, v in zip(found, self.q, self.k, self.v, strict=True):
            queries, keys = q.shape[1], k.shape[1]
            moved = 0 if self.asked.get("causal") == "top_left" else keys - queries
            told = {"last_key": moved} if self.asked.get("causal") else {}
            if "window" in self.asked:
                told = {"first_key": moved - self.asked["window"][0], "last_key": moved}
            told |= {name: self.asked[name] for name in ("softcap", "prefix", "sinks") if name in self.asked}
            if "prefix" in told:
                told["prefix"] = min(told["prefix"], keys)
            comparison = compare(out, lse, q, k, v, scale=self.dim**-0.5, **told)
            assert comparison.ok, ((queries, keys), comparison.message)


def assert_same(found, expected):
    for pair, right in zip(found, expected, strict=True):
        for x, y in zip(pair, right):
            numpy.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, first=1))
@pytest.mark.parametrize("name", quick(ASKED, "a power of two of a group"))
def test_right_and_the_same_bits_in_every_form(name, schedule, monkeypatch):
    """Packed, padded, alone, and with keys packed, padded and in pages, which lie beside poison."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    batch = Batch(name)
    expected = batch.computed()
    batch.assert_right(expected)
    assert_same(batch.computed("padded", "packed"), expected)
    if batch.dim % 64 == 0 and "softcap" not in batch.asked:
        assert_same(batch.computed("packed", "pages"), expected)
    for number in (0, 1, 6):
        assert_same(batch.some(number).computed("padded", "padded"), expected[number : number + 1])


@pytest.mark.parametrize("sequences", [20, *(pytest.param(n, marks=pytest.mark.release) for n in (33, 700))])
def test_many_sequences_short_and_long(sequences):
    """Their tiles are found by one warp, by all together, and where a warp has more than it has lanes."""
    rng = numpy.random.default_rng(sequences)
    lens = rng.integers(0, 9, (sequences, 2))
    lens[sequences // 2], lens[-1] = (170, 300), (1100, 33)
    batch = Batch("causal", lens)
    found = batch.computed("packed", "packed")
    for part in (range(3), [sequences // 2], [sequences - 1]):
        batch.some(*part).assert_right([found[i] for i in part])
    assert_same(found[:20], batch.some(*range(20)).computed("packed", "packed"))


@pytest.mark.parametrize(
    "heads, options, inner",
    [
        ((8, 8), {}, 1),  # no group
        ((6, 2), {}, 1),  # of three
        ((24, 2), {}, 4),
        ((8, 1), {"alibi_slopes": numpy.ones(8, numpy.float32)}, 1),
        ((8, 1), {"dropout": 0.1, "seed": 1}, 1),
        ((8, 1), {"kernel": "fwd_v2"}, 1),
        ((8, 1), {"arch": "80"}, 1),
    ],
    ids=str,
)
def test_whose_heads_are_neighbours(heads, options, inner):
    offsets = numpy.array([0, 100, 128])
    q, k = (numpy.zeros((n, 128, 64), numpy.float16) for n in heads)
    plan = plan_attention(q, k, k, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, **HOST | options)
    assert inner == plan.kernel.config.INNER_HEADS and ("query by query" in str(plan)) is (inner > 1)


def test_results_and_queries_anywhere_in_memory():
    """Heads and rows that are far apart, also of the log-sum-exp; what lies between is left alone."""
    batch = Batch("causal")
    q, told = batch.rows(batch.q, "packed", 0)
    (k, of_kv), (v, _) = batch.rows(batch.k, "padded", 1), batch.rows(batch.v, "padded", 1)
    given = told | of_kv
    expected = plan_attention(q, k, v, **given, **batch.asked, **HOST)(q, k, v, **given)
    heads, rows, dim = q.shape
    apart = numpy.full((rows, 3, heads, 2 * dim), numpy.nan, numpy.float16)[:, 1, :, :dim].swapaxes(0, 1)
    apart[:] = q
    memory, sums = numpy.full((3 * heads, 2 * rows, dim), 7, numpy.float16), numpy.full((2 * rows, heads + 1), 7, numpy.float32)
    out, lse = memory[::3, ::2], sums[::2, 1:].T
    plan = plan_attention(apart, k, v, out=out, lse=lse, **given, **batch.asked, **HOST)
    assert plan.kernel.config.INNER_HEADS > 1
    plan(apart, k, v, out=out, lse=lse, **given)
    assert_same([(out, lse)], [expected])
    memory[::3, ::2] = sums[::2, 1:] = 7
    assert (memory == 7).all() and (sums == 7).all()


def test_keys_are_read_once_for_a_group():
    """Of single tokens, as in decoding: bytes of a call, beside those of heads that have keys of their own."""
    read = []
    for heads_kv in (8, 2):
        offsets, lens = numpy.arange(4, dtype=numpy.int32), numpy.array([600, 300, 500], numpy.int32)
        q, k = numpy.ones((8, 3, 64), numpy.float16), numpy.ones((3, heads_kv, 600, 64), numpy.float16)
        plan = plan_attention(q, k, k, cu_seqlens_q=offsets, seqlens_kv=lens, causal=True, **HOST)  # all keys are seen
        _, traffic = plan.counted(q, k, k, cu_seqlens_q=offsets, seqlens_kv=lens)
        read.append(traffic.read_bytes)
    keys = 2 * 2 * 64 * 2 * (600 + 300 + 500)
    assert keys < read[1] < 1.5 * keys and read[0] > 4 * keys


CHANGES = {  # what breaks if rows are told of others' queries, or leave for other heads
    "mask": ("tile/mask.cuh", "int(u32(row0) / INNER_HEADS);", "int(u32(row0) / INNER_HEADS) - 1;"),
    "heads": ("tile/copy.cuh", "u32(row) % HEADS * head_stride", "0 * head_stride"),
    "loads": ("tile/work.cuh", "of_group, row / INNER_HEADS, 0, at);", "of_group, 0, 0, at);"),
}


@pytest.mark.parametrize("change", quick(CHANGES, "heads"))
def test_a_wrong_row_is_noticed(change, monkeypatch):
    file, old, new = CHANGES[change]
    texts = dict(source.files())
    assert texts[file].count(old) == 1
    monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | {file: texts[file].replace(old, new)})
    batch = Batch("causal")
    with pytest.raises(AssertionError):
        batch.assert_right(batch.computed())
