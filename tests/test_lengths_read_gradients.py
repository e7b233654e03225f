"""Gradients of what scores read, of packed and padded sequences: by kernels on the host, in coordinates of each sequence."""

import numpy
import pytest
from ragged import Ragged
from thinned import thinned

from cupy_flash import UnsupportedError, attention, attention_backward, attention_vjp, plan_attention_backward
from cupy_flash.judge.cases import Case
from cupy_flash.judge.compare_sequences import Part, wrong_sum
from cupy_flash.judge.expressions import SCORES, Grid
from cupy_flash.judge.operands import hand_score
from cupy_flash.machine import host

LENS = ((70, 150), (130, 3), (0, 9), (5, 0), (33, 170), (64, 20), (129, 65))
COUNT, LONGEST_Q, LONGEST_KV = len(LENS), 130, 170
HEADS, HEADS_KV = 6, 2
KINDS = [("packed", "packed"), ("padded", "packed"), ("packed", "padded"), ("padded", "padded"), ("roomy", "roomy")]


def normal(*shape, seed=0):
    return numpy.random.default_rng((seed, *shape)).standard_normal(shape, numpy.float32)


def capacity(room, longest):
    """The axis of an array of places: for padded sequences it is known, and for packed ones the longest is enough."""
    return longest if room.is_packed else room.rows


def prepared(ragged, kinds, options, turn=0):
    """What a backward is called with, and its lengths; `options` may be made from rooms."""
    rooms = ragged.rooms(*kinds, turn)
    options = options(*rooms) if callable(options) else options
    q, dout, k, v = (ragged.array(room, name) for room, names in zip(rooms, (("q", "dout"), ("k", "v"))) for name in names)
    lengths = rooms[0].numbers | rooms[1].numbers
    out, lse = attention(q, k, v, **lengths, **options, return_lse=True)
    return (dout, q, k, v, out, lse), lengths, options


def by_kernels(given, lengths, options, wrt, arch, poison=255, **where):
    """Gradients by name, from a workspace that is full of NaN; and their plan."""
    plan = plan_attention_backward(*given, **lengths, **options, wrt=wrt, backend="host", arch=arch, **where)
    operands = {name: x for name, x in options.items() if name in ("arrays", "bias", "alibi_slopes", "seed")}
    memory = numpy.full(plan.workspace_bytes + 16, poison, numpy.uint8)
    gradients = plan(*given, **lengths, **operands, workspace=memory[-memory.ctypes.data % 16 :])
    return named(gradients, wrt), plan


def named(gradients, wrt):
    own = {"bias": gradients.dbias, "alibi_slopes": gradients.dalibi_slopes} | gradients.darrays
    return {name: own[name] for name in wrt}


def agree(found, expected):
    """Within what float32 makes of sums of thousands of terms of about 1, in another order."""
    for name, x in expected.items():
        assert found[name].shape == x.shape and found[name].dtype == x.dtype, name
        assert numpy.isfinite(found[name]).all() and abs(x).max() > 0, name
        assert abs(found[name] - x).max() <= 2**-15 * max(abs(x).max(), 1), name


def places(q_room, kv_room):
    """Each way to share an element where indices are coordinates and numbers."""
    rows, keys = capacity(q_room, LONGEST_Q), capacity(kv_room, LONGEST_KV)
    arrays = {"u": (COUNT, rows), "w": (keys, HEADS_KV), "x": (HEADS, rows, keys), "z": (HEADS, 3), "g": ()}
    score = "score * (g + u[b, q_idx] + z[h, 1]) + w[kv_idx, h_kv] + x[h, q_idx, kv_idx]"
    return {"score": score, "arrays": {name: normal(*shape) for name, shape in arrays.items()}, "causal": True}


COMPUTED = {
    "score": "score + t[kv_idx - q_idx + 60, h] + d[kv_len - 1 - kv_idx] + e[min(abs(kv_idx - q_idx) * 2 // max(q_len, 1), 5), b]",
    "arrays": {"t": normal(120, HEADS), "d": normal(50), "e": normal(6, COUNT)},
    "window": (100, 60),
}


@pytest.mark.release
@pytest.mark.parametrize("schedule", host.SCHEDULES)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("arch", ["80", "75", "90a"])
@pytest.mark.parametrize("wrt", ["ux", "uwxzg"])  # a kernel each
def test_arrays_of_places_are_those_of_each_sequence(wrt, arch, kinds, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    ragged, wrt = Ragged(LENS, (HEADS, HEADS_KV), 32, "float32"), tuple(wrt)
    given, lengths, options = prepared(ragged, kinds, places)
    found, plan = by_kernels(given, lengths, options, wrt, arch, deterministic=True)
    agree(found, named(attention_backward(*given, **lengths, **options, wrt=wrt), wrt))
    assert all(kernel.config.VARLEN for kernel in plan.kernels) and "in any order" not in str(plan)
    longest_keys = [max((kv for q, kv in LENS if q > i), default=0) for i in range(LONGEST_Q)]
    unread = numpy.arange(LONGEST_KV) >= numpy.array(longest_keys)[:, None]
    assert not found["x"][:, :LONGEST_Q, :LONGEST_KV][:, unread].any() and not found["u"][2:4].any()


@pytest.mark.release
@pytest.mark.parametrize("kinds", [KINDS[0], *(pytest.param(kinds, marks=pytest.mark.release) for kinds in KINDS[1:])], ids=str)
@pytest.mark.parametrize("arch", ["80", *(pytest.param(arch, marks=pytest.mark.release) for arch in ("75", "90a"))])
def test_tables_of_computed_places(arch, kinds):
    """A length that an index reads is that of the sequence."""
    ragged, wrt = Ragged(LENS, (HEADS, HEADS_KV), 32, "float32"), ("t", "d", "e")
    given, lengths, options = prepared(ragged, kinds, COMPUTED)
    expected = named(attention_backward(*given, **lengths, **options, wrt=wrt), wrt)
    found, plan = by_kernels(given, lengths, options, wrt, arch, deterministic=True)
    agree(found, expected)
    assert "in any order" not in str(plan)
    if kinds == KINDS[0]:
        agree(by_kernels(given, lengths, options, wrt, arch)[0], expected)


@pytest.mark.release
def test_elements_that_the_score_names():
    ragged = Ragged(LENS, (HEADS, HEADS_KV), 32, "float32")
    options = {"score": "score + p[q_idx * kv_idx % 7, int(score) + 2]", "arrays": {"p": normal(7, 5)}}
    given, lengths, options = prepared(ragged, KINDS[0], options)
    agree(by_kernels(given, lengths, options, "p", "80")[0], named(attention_backward(*given, **lengths, **options, wrt="p"), "p"))
    with pytest.raises(UnsupportedError, match=r"^deterministic: expected False with wrt 'p'"):
        by_kernels(given, lengths, options, "p", "80", deterministic=True)


SHORT = {"u": (COUNT, 67), "w": (64, HEADS_KV), "x": (HEADS, 1, 41), "y": (HEADS, 65, 129)}


@pytest.mark.release
@pytest.mark.parametrize("arch", ["80", "75", "90a"])
def test_places_beyond_an_axis_read_its_last_element(arch):
    """Nobody can know how long a packed sequence is, so that an axis of places may have any number of elements."""
    ragged, wrt = Ragged(LENS, (HEADS, HEADS_KV), 32, "float32"), tuple(SHORT)
    score = "score * u[b, q_idx] + w[kv_idx, h_kv] + x[h, q_idx, kv_idx] + y[h, q_idx, kv_idx]"
    options = {"score": score, "arrays": {name: normal(*shape) for name, shape in SHORT.items()}, "window": (60, 90)}
    given, lengths, options = prepared(ragged, KINDS[0], options)
    expected = named(attention_backward(*given, **lengths, **options, wrt=wrt), wrt)
    agree(by_kernels(given, lengths, options, wrt, arch, deterministic=True)[0], expected)
    longer = {name: extended(options["arrays"][name], name) for name in wrt}  # what they would have been
    whole = named(attention_backward(*given, **lengths, **(options | {"arrays": longer}), wrt=wrt), wrt)
    for name, x in expected.items():
        summed = whole[name].astype(float)
        for axis in range(x.ndim):
            n = x.shape[axis]
            if summed.shape[axis] > n:
                first, rest = numpy.split(summed, [n - 1], axis)
                summed = numpy.concatenate([first, rest.sum(axis, keepdims=True)], axis)
        assert abs(summed - x).max() <= 2**-15 * max(abs(x).max(), 1), name


def extended(x, name):
    """With the last element again, up to the longest sequence."""
    axes = {"u": (0, LONGEST_Q), "w": (LONGEST_KV, 0), "x": (0, LONGEST_Q, LONGEST_KV), "y": (0, LONGEST_Q, LONGEST_KV)}[name]
    return numpy.pad(x, [(0, max(n - size, 0)) for n, size in zip(axes, x.shape)], mode="edge")


BIAS_LENS = LENS[:3]


@pytest.mark.parametrize("shape", [(3, 6, 0, 0), *(pytest.param(s, marks=pytest.mark.release) for s in ((1, 0, 0), (3, 1, 1, 0)))])
@pytest.mark.parametrize("dtype", thinned(["float32", "float16"]))
def test_biases_of_padded_sequences(shape, dtype):
    """What a bias holds beyond a length reaches nothing, and its gradient there is 0."""
    ragged = Ragged(BIAS_LENS, (HEADS, HEADS_KV), 32, "float16")

    def with_bias(q_room, kv_room):
        full = tuple(n or size for n, size in zip(shape[::-1], (kv_room.rows, q_room.rows)))[::-1]
        x = normal(*shape[: len(shape) - 2], *full).astype(dtype)
        for number, (len_q, len_kv) in enumerate(BIAS_LENS if x.ndim == 4 and x.shape[0] > 1 else ()):
            x[number, ..., len_kv:] = numpy.nan
            x[number, :, len_q if x.shape[-2] > 1 else 1 :] = numpy.nan
        return {"bias": x, "causal": True}

    given, lengths, options = prepared(ragged, ("padded", "padded"), with_bias)
    expected = attention_backward(*given, **lengths, **options, wrt="bias").dbias
    found = by_kernels(given, lengths, options, ("bias",), "80", deterministic=True)[0]["bias"]
    assert found.shape == expected.shape and numpy.isfinite(found.astype(float)).all()
    room = 2**-11 + float(numpy.finfo(dtype).eps)  # of P from an lse that float16 results have left
    assert abs(found.astype(float) - expected).max() <= room * max(abs(expected).max(), 1)
    if len(shape) == 4 and shape[0] > 1:
        for number, (len_q, len_kv) in enumerate(BIAS_LENS):
            assert not found[number, ..., len_kv:].any() and (found.shape[-2] == 1 or not found[number, :, len_q:].any())


RARER = [pytest.param(*case, marks=pytest.mark.release) for case in (("75", None), ("90a", "bwd_v2"), ("80", None))]


@pytest.mark.release
@pytest.mark.parametrize("group", thinned([3, 7]))
@pytest.mark.parametrize("arch, kernel", [("90a", None), *RARER])
def test_sums_of_all_sequences_are_those_of_the_oracle(arch, kernel, group):
    """Of float16, behind each backward; slopes of a head and of a sequence, and what expressions read."""
    ragged = Ragged(LENS, (group, 1), 40)
    slopes = abs(normal(COUNT, group)) / 20
    expression = SCORES["temperature"]
    arrays = {"t": abs(normal(group)) + 0.5, "shift": normal(COUNT)}
    options = {"score": expression.text, "arrays": arrays, "alibi_slopes": slopes, "causal": True}
    given, lengths, options = prepared(ragged, ("packed", "roomy"), options)
    wrt = ("t", "shift", "alibi_slopes")
    found, plan = by_kernels(given, lengths, options, wrt, arch, kernel=kernel)
    assert ("hopper" in plan.kernel.file) == (arch == "90a" and kernel is None)
    parts = []
    for number, ((len_q, len_kv), x) in enumerate(zip(LENS, ragged.parts)):
        grid = Grid.of((), group, 1, len_q, len_kv)
        grid = Grid(grid.b + number, *(getattr(grid, name) for name in ("h", "h_kv", "q_idx", "kv_idx", "q_len", "kv_len")))
        told = Case("float16", len_q, len_kv, 40, causal=True).scores | {"score": hand_score(expression, grid, arrays)}
        told |= {"alibi_slopes": slopes[number]}
        parts.append(Part(x["dout"], x["q"], x["k"], x["v"], None, told, {"alibi_slopes": (number,)}))
    pairs = {name: (arrays.get(name, slopes), found[name]) for name in wrt}
    assert wrong_sum(parts, None, None, pairs, "ieee") is None


@pytest.mark.release
@pytest.mark.parametrize("schedule", host.SCHEDULES)
@pytest.mark.parametrize("arch", ["90a", "80"])
def test_sums_repeat(arch, schedule, monkeypatch):
    """Bit by bit, however many blocks run at the same time, and whatever was in the workspace."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    ragged, wrt = Ragged(LENS, (HEADS, HEADS_KV), 32), ("t", "w", "alibi_slopes")
    arrays = {"w": normal(100, HEADS_KV), "t": normal(40)}
    options = {"score": "score + w[kv_idx, h_kv] + t[abs(kv_idx - q_idx)] * score", "arrays": arrays, "causal": True}
    given, lengths, options = prepared(ragged, KINDS[0], options | {"alibi_slopes": abs(normal(HEADS))})
    results = []
    for blocks, poison in ((1, 255), (3, 0), (3, 255)):
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _, blocks=blocks: range(blocks * 12))
        found, _ = by_kernels(given, lengths, options, wrt, arch, poison, deterministic=True)
        results.append([found[name].tobytes() for name in wrt])
    assert results[0] == results[1] == results[2]


@pytest.mark.release  # test_lengths.py asks it of the other gradients
def test_one_plan_serves_all_lengths(monkeypatch):
    rng = numpy.random.default_rng(0)
    q, k, dout = (rng.standard_normal((heads, 200, 32)).astype(numpy.float32) for heads in (4, 2, 4))
    offsets = numpy.array([0, 70, 135, 200])
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    options = {"score": "score + w[h, q_idx, kv_idx]", "arrays": {"w": normal(4, 100, 100)}}
    out, lse = attention(q, k, k, **lengths, **options, return_lse=True)
    plan = plan_attention_backward(dout, q, k, k, out, lse, **lengths, **options, wrt="w", backend="host", arch="80")
    plan(dout, q, k, k, out, lse, **lengths, arrays=options["arrays"])
    monkeypatch.setattr(host, "_compile", lambda *_: pytest.fail("compiled again"))
    for new in ([0, 0, 1, 65], [0, 100, 199, 200], [0, 0, 0, 0]):
        offsets[:] = new
        out, lse = attention(q, k, k, **lengths, **options, return_lse=True)
        found = plan(dout, q, k, k, out, lse, **lengths, arrays=options["arrays"]).darrays["w"]
        expected = attention_backward(dout, q, k, k, out, lse, **lengths, **options, wrt="w").darrays["w"]
        assert abs(found - expected).max() <= 2**-15 * max(abs(expected).max(), 1)
        assert found.any() == (new[-1] > 0)


@pytest.mark.release
def test_a_vjp_of_padded_sequences_gives_what_that_of_packed_ones_does():
    ragged = Ragged(LENS[:3], (4, 2), 32, "float32")
    options = {"alibi_slopes": abs(normal(4)), "wrt": "alibi_slopes", "backend": "host"}
    sums = []
    for kinds in (("packed", "packed"), ("padded", "padded")):
        (dout, q, k, v, _, _), lengths, _ = prepared(ragged, kinds, {"alibi_slopes": options["alibi_slopes"]})
        _, vjp = attention_vjp(q, k, v, **lengths, **options)
        sums.append(vjp(numpy.where(numpy.isnan(dout), 0, dout)).dalibi_slopes)
    assert abs(sums[0] - sums[1]).max() <= 2**-15 * abs(sums[0]).max()


def test_memory_is_that_of_elements_and_of_what_blocks_share():
    """A pair bias of many packed sequences has no number for each of their pairs."""
    q, lse = normal(4, 16384, 32), numpy.zeros((4, 16384), numpy.float32)
    offsets = numpy.arange(0, 16385, 256)
    options = {"score": "score + w[h, q_idx, kv_idx]", "arrays": {"w": normal(4, 256, 256)}, "wrt": "w", "backend": "host"}
    plan = plan_attention_backward(q, q, q, q, q, lse, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, **options)
    assert dict(plan.workspace.parts)["partials"] <= 4 * 4 * 256 * 256 * 5
