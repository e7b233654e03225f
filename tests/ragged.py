"""Sequences of their own lengths in any of the forms that a call takes, for tests: numbers that are the same in all of them."""

import numpy

from cupy_flash import attention, attention_backward, plan_attention, plan_attention_backward
from cupy_flash.judge.fuzz.draw import Draw
from cupy_flash.judge.fuzz.rooms import draw_room

POISON = numpy.nan


class Ragged:
    """Random sequences.

    Parameters
    ----------
    lens : sequence of (int, int)
        Queries and keys of each.
    """

    def __init__(self, lens, heads=(4, 2), dim=64, dtype="float16", seed=0):
        self.lens, self.heads = tuple(lens), heads
        rng = numpy.random.default_rng(seed)
        sizes = {"q": (0, 0), "k": (1, 1), "v": (1, 1), "dout": (0, 0)}
        self.parts = [
            {name: rng.standard_normal((heads[h], n[side], dim)).astype(dtype) for name, (side, h) in sizes.items()}
            for n in self.lens
        ]

    def some(self, *numbers):
        """Those with these numbers, in this order."""
        chosen = Ragged([], self.heads)
        chosen.lens, chosen.parts = tuple(self.lens[i] for i in numbers), [self.parts[i] for i in numbers]
        return chosen

    def rooms(self, kind_q, kind_kv, turn=0):
        """Places for both sides; another turn has other capacities, gaps, pages and dtypes of lengths."""
        return [
            draw_room(Draw(f"{side} of a test", turn, len(self.lens)), side, kind, tuple(n[i] for n in self.lens), apart=True)
            for i, (side, kind) in enumerate((("q", kind_q), ("kv", kind_kv)))
        ]

    def array(self, room, name):
        """An array of a call: poison where no sequence is."""
        heads, _, dim = self.parts[0][name].shape
        x = numpy.full((room.elements, heads, room.rows, dim), POISON, self.parts[0][name].dtype)
        for (element, row), part in zip(room.places, self.parts):
            x[element, :, row] = part[name].swapaxes(0, 1)
        return x[0] if room.is_packed else x

    def cut(self, room, x, outside=0):
        """The rows of each sequence in an array of results; in all others there has to be that number."""
        x = x[None] if room.is_packed else x
        assert (x.swapaxes(1, 2)[room.outside()] == outside).all()
        return [room.gathered(x, i) for i in range(len(self.lens))]


def forward(ragged, kind_q, kind_kv, arch=None, turn=0, **options):
    """Results of each sequence: out and lse. Kernels if there is an architecture."""
    q_room, kv_room = ragged.rooms(kind_q, kind_kv, turn)
    inputs = [ragged.array(room, name) for room, name in ((q_room, "q"), (kv_room, "k"), (kv_room, "v"))]
    lengths = q_room.numbers | kv_room.numbers
    if arch is None:
        out, lse = attention(*inputs, **lengths, **options, return_lse=True)
    else:
        plan = plan_attention(*inputs, **lengths, **options, return_lse=True, backend="host", arch=arch)
        out, lse = plan(*inputs, **lengths)
    return list(zip(ragged.cut(q_room, out), ragged.cut(q_room, lse, -numpy.inf)))


def backward(ragged, kind_q, kind_kv, arch=None, turn=0, kernel=None, **options):
    """Gradients of each sequence: dq, dk and dv, from results of NumPy."""
    q_room, kv_room = ragged.rooms(kind_q, kind_kv, turn)
    q, k, v, dout = (ragged.array(room, n) for room, n in ((q_room, "q"), (kv_room, "k"), (kv_room, "v"), (q_room, "dout")))
    lengths = q_room.numbers | kv_room.numbers
    out, lse = attention(q, k, v, **lengths, **options, return_lse=True)
    given = dout, q, k, v, out, lse
    if arch is None:
        gradients = attention_backward(*given, **lengths, **options)
    else:
        options |= {"backend": "host", "arch": arch, "deterministic": True, "kernel": kernel}
        gradients = plan_attention_backward(*given, **lengths, **options)(*given, **lengths)
    return list(zip(*(ragged.cut(room, x) for room, x in zip((q_room, kv_room, kv_room), gradients))))


def assert_same_bits(found, expected):
    """Whether results of sequences are equal to the bit."""
    for number, (results, others) in enumerate(zip(found, expected, strict=True)):
        for x, y in zip(results, others, strict=True):
            numpy.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"), f"sequence {number}")
