"""Masks that are ranges of keys, of sequences of their own lengths: each row has those of its own sequence."""

import numpy
import pytest
from ragged import Ragged, assert_same_bits
from thinned import quick, thinned

from cupy_flash import KeyRanges, TileMask, attention, attention_backward, attention_vjp, plan_attention, plan_attention_backward
from cupy_flash.call.captured import captured
from cupy_flash.judge.cases import Case
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.machine import host
from cupy_flash.problem.backward import Gradients
from cupy_flash.problem.key_ranges import FIRST

LENS = ((70, 150), (130, 3), (0, 9), (5, 0), (33, 170), (64, 20), (129, 65))
KINDS = [("packed", "packed"), ("roomy", "padded"), ("padded", "packed"), ("packed", "pages")]
WILD = 2**31 - 1  # behind the rows of a sequence


class Ranged(Ragged):
    """Sequences with random ranges of each row: some empty, some beyond the keys."""

    def __init__(self, lens=LENS, heads=(6, 2), dim=32, dtype="float16", own_heads=False, ranges=2):
        super().__init__(lens, heads, dim, dtype)
        rng = numpy.random.default_rng(1)
        for (len_q, _), part in zip(self.lens, self.parts):
            start = rng.integers(-5, 60, (heads[0] if own_heads else 1, len_q, ranges)).astype(numpy.int32)
            part["start"], part["stop"] = start, start + rng.integers(-3, 60, start.shape).astype(numpy.int32)

    def mask(self, room):
        """The ranges as a call takes them, in places of a room."""
        ends = []
        for name in ("start", "stop"):
            heads, _, ranges = self.parts[0][name].shape
            x = numpy.full((room.elements, heads, room.rows, ranges), WILD if name == "stop" else -WILD, numpy.int32)
            for (element, row), part in zip(room.places, self.parts):
                x[element, :, row] = part[name].swapaxes(0, 1)
            ends.append(x[0] if room.is_packed else x)
        return KeyRanges(*ends)

    def seen(self, number):
        """The same of a sequence as an array."""
        part, keys = self.parts[number], numpy.arange(self.lens[number][1])[:, None]
        start, stop = part["start"][..., None, :], part["stop"][..., None, :]
        return ((start <= keys) & (keys < stop)).any(-1)


def both(ragged, kinds, arch, turn=0, **options):
    """Results of each sequence, and its gradients unless keys are in pages."""
    rooms = ragged.rooms(*kinds, turn)
    q, dout, k, v = (ragged.array(room, name) for room, names in zip(rooms, (("q", "dout"), ("k", "v"))) for name in names)
    lengths, mask = rooms[0].numbers | rooms[1].numbers, ragged.mask(rooms[0])
    if arch is None:
        out, lse = attention(q, k, v, **lengths, **options, mask=mask, return_lse=True)
    else:
        options |= {"backend": "host", "arch": arch}
        plan = plan_attention(q, k, v, **lengths, **options, mask=mask, return_lse=True)
        assert plan.kernel.config.VARLEN and plan.kernel.config.MASKED_PAIRS
        out, lse = plan(q, k, v, **lengths, mask=mask)
    results = list(zip(ragged.cut(rooms[0], out), ragged.cut(rooms[0], lse, -numpy.inf)))
    if kinds[1] == "pages":
        return results, None
    given = dout, q, k, v, out, lse
    if arch is None:
        gradients = attention_backward(*given, **lengths, **options, mask=mask)
    else:
        plan = plan_attention_backward(*given, **lengths, **options, mask=mask, deterministic=True)
        gradients = plan(*given, **lengths, mask=mask)
    return results, list(zip(*(ragged.cut(room, x) for room, x in zip((rooms[0], rooms[1], rooms[1]), gradients))))


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_ranges_of_numpy_are_those_of_each_sequence(kinds, own_heads):
    """To the bit those of a call with the sequence alone."""
    ragged = Ranged(own_heads=own_heads)
    results, gradients = both(ragged, kinds, None, causal=True)
    for number, part in enumerate(ragged.parts):
        own = {"mask": KeyRanges(part["start"], part["stop"]), "causal": True}
        if part["q"].shape[1] == 0:
            continue
        out, vjp = attention_vjp(part["q"], part["k"], part["v"], **own)
        assert_same_bits([results[number][:1]], [(out,)])
        if gradients:
            assert_same_bits([gradients[number]], [tuple(vjp(part["dout"]))])


@pytest.mark.parametrize("schedule", host.SCHEDULES)
@pytest.mark.parametrize("group", [3, pytest.param(7, marks=pytest.mark.release)])
@pytest.mark.parametrize("kinds", thinned(KINDS, 3), ids=str)
@pytest.mark.parametrize("arch", quick(["75", "80", "90a"], "90a"))
def test_ranges_of_kernels_are_right(arch, kinds, group, schedule, monkeypatch):
    """Against the oracle, which is told of each sequence which pairs take part; no poison reaches a result."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    ragged = Ranged(heads=(group, 1), own_heads=group == 7, ranges=3 if arch == "80" else 2)  # of which more are asked in a loop
    results, gradients = both(ragged, kinds, arch, window=(90, 30))
    for number, part in enumerate(ragged.parts):
        scores = Case("float16", *ragged.lens[number], 32, window=(90, 30)).scores | {"seen": ragged.seen(number)}
        inputs = part["q"], part["k"], part["v"]
        judged = compare(*results[number], *inputs, **scores)
        assert judged.ok, judged.message
        if gradients:
            judged = compare_gradients(Gradients(*gradients[number]), part["dout"], *inputs, **scores)
            assert judged.ok, judged.message


@pytest.mark.release  # the last test has results of forms, and test_lengths_bits.py the bits of each
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_ranges_have_the_same_bits_in_every_form(arch):
    ragged, order = Ranged(), (5, 2, 6, 0, 3, 1, 4)
    expected = both(ragged, KINDS[0], arch, causal=True)
    other = Ranged()
    other.lens, other.parts = tuple(ragged.lens[i] for i in order), [ragged.parts[i] for i in order]
    for turn, kinds in enumerate(KINDS[1:3], 1):
        found = both(other, kinds, arch, turn, causal=True)
        for of, right in zip(found, expected):
            assert_same_bits(of, [right[i] for i in order])
    for number in (0, 4):
        alone = Ranged()
        alone.lens, alone.parts = ragged.lens[number : number + 1], ragged.parts[number : number + 1]
        for of, right in zip(both(alone, KINDS[0], arch, causal=True), expected):
            assert_same_bits(of, right[number : number + 1])


def test_a_plan_takes_other_offsets_and_ranges():
    """And a mask that is kept, of which there is nothing to keep."""
    rng = numpy.random.default_rng(0)
    q, offsets = rng.standard_normal((2, 100, 16)).astype(numpy.float32), numpy.array([0, 60, 100])
    start, stop = numpy.zeros((100, 1), numpy.int32), numpy.full((100, 1), 7, numpy.int32)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "mask": KeyRanges(start, stop)}
    plans = [plan_attention(q, q, q, **given, **where) for where in ({}, {"backend": "host", "arch": "80"})]
    kept = attention(q, q, q, **(given | {"mask": TileMask(given["mask"])}))
    assert "mask.first" in plans[0].problem.given
    numpy.testing.assert_array_equal(plans[0](q, q, q, **given), kept)
    offsets[1], start[20:40] = 20, 3
    for plan in plans:
        out = plan(q, q, q, **given)
        for i, j in ((0, 20), (20, 100)):
            rows = slice(i, j)
            expected = attention(q[:, rows], q[:, rows], q[:, rows], mask=KeyRanges(start[rows], stop[rows]))
            numpy.testing.assert_allclose(out[:, rows], expected, atol=1e-5)


def test_ranges_of_packed_rows_have_no_axis_of_a_batch():
    q, offsets = numpy.ones((2, 100, 16), numpy.float32), numpy.array([0, 60, 100])
    ends = numpy.zeros((2, 1, 100, 1), numpy.int32)
    expected = r"a number or a shape of at least 2 axes that broadcasts to .* with \(2, 100\) for all but the last"
    for shape, given in (((2, 1, 100, 1), ends), ((60, 1), ends[0, 0, :60])):
        message = rf"^mask.start: expected {expected}, got \({', '.join(map(str, shape))}\)"
        with pytest.raises(ValueError, match=message):
            attention(q, q, q, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, mask=KeyRanges(given, 3))
    padded = numpy.ones((2, 2, 50, 16), numpy.float32)
    attention(padded, q, q, cu_seqlens_kv=offsets, mask=KeyRanges(ends[:, :, :50], 3))


@pytest.mark.parametrize("seed", [None, 3])
def test_where_sequences_begin_is_told_twice(seed):
    """Of offsets in host memory a device has a copy, of which both are told."""
    offsets = numpy.array([0, 60, 100])
    ends = numpy.zeros((100, 1), numpy.int32)
    given = captured(mask=KeyRanges(ends, ends + 1), seed=seed, lengths={"cu_seqlens_q": offsets})
    place = given._place_of_word(FIRST)
    assert given.words[0] == given.words[place] == offsets.ctypes.data
    assert given.words[place + 1] == ends.ctypes.data  # that of `mask.start` comes next
