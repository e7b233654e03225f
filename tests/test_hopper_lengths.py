"""Sequences of their own lengths in fwd_hopper: by which kernel, with poison beyond every length, and what decides the bits."""

import numpy
import pytest
from ragged import Ragged, assert_same_bits, forward
from thinned import thinned

from cupy_flash import attention, plan_attention
from cupy_flash.call.forward import AttentionPlan
from cupy_flash.machine import host
from cupy_flash.machine.host import SCHEDULES
from cupy_flash.problem.arrays import DTYPES

# Beside tile edges, without queries, without keys, and of several query tiles and key tiles.
LENS = ((70, 150), (1, 65), (130, 3), (0, 17), (64, 64), (5, 0), (200, 300))
KINDS = [("packed", "packed"), ("padded", "padded"), ("roomy", "packed")]
KINDS += [("padded", "roomy"), ("packed", "cache"), ("padded", "cache")]
CAUSAL = {"causal": True}
OPTIONS = ({}, CAUSAL, {"window": (40, 9), "causal": "top_left"}, {"causal": True, "prefix": 20, "softcap": 5.0})
NUMPY = {"atol": 4e-3}
release = pytest.mark.release


@pytest.fixture
def taken(monkeypatch):
    """The kernel files of all plans that are called."""
    found = []
    original = AttentionPlan.__call__

    def call(plan, *arrays, **others):
        found.append(plan.kernel and plan.kernel.file)
        return original(plan, *arrays, **others)

    monkeypatch.setattr(AttentionPlan, "__call__", call)
    return found


def assert_close(found, expected):
    for (out, lse), (right, right_lse) in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(out.astype(float), right.astype(float), **NUMPY)
        numpy.testing.assert_allclose(lse, right_lse, atol=2e-3)


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, first=1))
@pytest.mark.parametrize("options", [CAUSAL, *(pytest.param(o, marks=release) for o in OPTIONS if o != CAUSAL)], ids=str)
def test_poison_beyond_lengths_reaches_nothing_and_bits_are_those_of_any_form(options, schedule, taken, monkeypatch):
    """Packed, padded, with room behind, alone, in another order, and in other capacities."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    ragged = Ragged(LENS)
    expected = forward(ragged, "packed", "packed", "90a", **options)
    assert_close(expected, forward(ragged, "packed", "packed", **options))
    for turn, kinds in enumerate(KINDS):
        assert_same_bits(forward(ragged, *kinds, "90a", turn, **options), expected)
    order = (5, 2, 6, 0, 3, 1, 4)
    assert_same_bits(forward(ragged.some(*order), "roomy", "padded", "90a", 7, **options), [expected[i] for i in order])
    for i in (0, 1, 2, 4, 6):  # those with elements
        assert_same_bits(forward(ragged.some(i), "packed", "packed", "90a", i, **options), [expected[i]])
    assert set(taken) == {"fwd_hopper"}


WIDE = [("float16", 32, (4, 2)), ("bfloat16", 128, (2, 2)), ("float16", 192, (3, 1)), ("bfloat16", 256, (2, 1))]


@pytest.mark.parametrize("dtype, dim, heads", WIDE)
@release  # bits of any form have one width, and test_unlisted_tiles.py and test_last_query_tile.py another
@pytest.mark.parametrize("options", [{}, CAUSAL], ids=str)
def test_each_width(dtype, dim, heads, options, taken):
    ragged = Ragged(LENS, heads, dim, DTYPES[dtype])
    found = forward(ragged, "packed", "packed", "90a", **options)
    expected = forward(ragged, "packed", "packed", **options)
    for (out, lse), (right, right_lse) in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(out.astype(float), right.astype(float), atol=3e-2 if dtype == "bfloat16" else 4e-3)
        numpy.testing.assert_allclose(lse, right_lse, atol=2e-3)
    assert_same_bits(forward(ragged, "padded", "roomy", "90a", **options), found)
    assert taken == ["fwd_hopper"] * 2


RNG = numpy.random.default_rng(5)
OFFSETS, KEYS = numpy.array([0, 70, 70, 200, 265]), numpy.array([0, 150, 160, 163, 260])
BESIDE_DROPOUT = {
    "expression": {"score": "score + 0.2 * (kv_idx - q_idx) * (q_len > 100)", "causal": True},
    "linear": {"score": "score - 0.02 * (q_idx + kv_len - q_len - kv_idx)", "causal": True},
    "key": {"score": "score + t[h, kv_idx]", "arrays": {"t": RNG.standard_normal((2, 150)).astype(numpy.float32)}, "causal": True},
    "alibi": {"alibi_slopes": numpy.array([0.1, 0.02], numpy.float32), "causal": True},
}
ASKED = BESIDE_DROPOUT | {
    "documents": {"mask": "(q_idx + b) // 20 == kv_idx // 20"},
    "dropout": {"dropout": 0.2, "seed": 3, "causal": True},
    **{f"{name}, dropout": options | {"dropout": 0.2, "seed": 3} for name, options in BESIDE_DROPOUT.items()},
    "sinks": {"sinks": numpy.array([0.5, -1.0], numpy.float32), "causal": True},
}


@pytest.mark.parametrize("asked", [pytest.param(name, marks=() if name == "key" else release) for name in ASKED])
def test_what_is_asked_for_each_pair_is_asked_in_places_of_the_sequence(asked, taken):
    """Rows behind the last sequence are poison; a key of the sequence without queries is never asked for."""
    q, k, v = (RNG.standard_normal((heads, rows, 64)).astype(numpy.float16) for heads, rows in ((2, 280), (1, 270), (1, 270)))
    q[:, 265:] = k[:, 260:] = v[:, 260:] = numpy.nan
    options = {"cu_seqlens_q": OFFSETS, "cu_seqlens_kv": KEYS, "return_lse": True, **ASKED[asked]}
    expected = attention(q, k, v, **options)
    plan = plan_attention(q, k, v, backend="host", arch="90a", **options)
    kept = ("alibi_slopes", "sinks", "seed", "arrays")
    operands = {name: x for name, x in options.items() if name.startswith("cu_") or name in kept}
    found = plan(q, k, v, **operands)
    assert (plan.kernel.config.SCORES == "PLUS_COLUMN") is asked.startswith("key")
    assert taken == ["fwd_hopper"] and not found[0][:, 265:].any() and (found[1][:, 265:] == -numpy.inf).all()
    numpy.testing.assert_allclose(found[0].astype(float), expected[0].astype(float), **NUMPY)
    numpy.testing.assert_allclose(found[1], expected[1], atol=2e-3)


@pytest.mark.parametrize("arch, file", [("90a", "fwd_hopper"), pytest.param("80", "fwd_v2", marks=release)])
def test_arrays_of_padded_pairs(arch, file, taken):
    """A bias and a mask, with poison for pairs beyond a length. A sequence ends between two keys that are read at once."""
    q, k, v = (RNG.standard_normal((2, heads, rows, 64)).astype(numpy.float16) for heads, rows in ((2, 150), (1, 170), (1, 170)))
    lens_q, lens_kv = numpy.array([77, 150]), numpy.array([170, 33])
    bias, mask = RNG.standard_normal((2, 2, 150, 170)).astype(numpy.float32), RNG.random((2, 1, 150, 170)) < 0.7
    for i, (n, m) in enumerate(zip(lens_q, lens_kv)):
        q[i, :, n:] = k[i, :, m:] = v[i, :, m:] = bias[i, :, n:] = bias[i, :, :, m:] = numpy.nan
    given = {"seqlens_q": lens_q, "seqlens_kv": lens_kv, "bias": bias, "mask": mask}
    expected = attention(q, k, v, return_lse=True, **given)
    found = plan_attention(q, k, v, return_lse=True, backend="host", arch=arch, **given)(q, k, v, **given)
    assert taken == [file]
    for x, y in zip(found, expected):
        numpy.testing.assert_allclose(x.astype(float), y.astype(float), **NUMPY)


def test_queries_beyond_a_length_decide_no_bit():
    """Whatever they hold: also scores so large, or so far above what the first keys have, that a step would be done again."""
    ragged = Ragged([(40, 400), (90, 200)], (2, 1))
    expected = forward(ragged, "padded", "padded", "90a")
    q_room, kv_room = ragged.rooms("padded", "padded")
    q, k, v = (ragged.array(room, name) for room, name in ((q_room, "q"), (kv_room, "k"), (kv_room, "v")))
    lengths = q_room.numbers | kv_room.numbers
    plan = plan_attention(q, k, v, **lengths, return_lse=True, backend="host", arch="90a")
    outside = q_room.outside()
    for scale in (0.0, 1.0, 30.0, 1e4, numpy.inf, -numpy.inf):
        q.swapaxes(1, 2)[outside] = scale * (1 + numpy.arange(64) % 3) if scale else 0
        out, lse = plan(q, k, v, **lengths)
        assert_same_bits(list(zip(ragged.cut(q_room, out), ragged.cut(q_room, lse, -numpy.inf))), expected)


def test_one_plan_serves_all_lengths(monkeypatch):
    rng = numpy.random.default_rng(0)
    q, k = (rng.standard_normal((heads, 300, 64)).astype(numpy.float16) for heads in (4, 2))
    offsets, keys = numpy.array([0, 70, 135, 300]), numpy.array([0, 10, 110, 111])
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": keys}
    plan = plan_attention(q, k, k, return_lse=True, causal=True, backend="host", arch="90a", **given)
    assert plan.kernel.file == "fwd_hopper"
    plan(q, k, k, **given)
    monkeypatch.setattr(host, "_compile", lambda *_: pytest.fail("compiled again"))
    for new_q, new_kv in (([0, 0, 1, 165], [0, 64, 65, 300]), ([0, 299, 299, 300], [0, 0, 3, 300]), ([0, 0, 0, 0], [0, 0, 0, 0])):
        offsets[:], keys[:] = new_q, new_kv
        out, lse = plan(q, k, k, **given)
        expected = attention(q, k, k, return_lse=True, causal=True, **given)
        numpy.testing.assert_allclose(out.astype(float), expected[0].astype(float), **NUMPY)
        numpy.testing.assert_allclose(lse, expected[1], atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
def test_results_of_the_caller_are_written_whole_and_nothing_beside_them(options):
    """Rows of 36 elements, of which lanes store 8 bytes at once."""
    rng = numpy.random.default_rng(1)
    q, k = (rng.standard_normal((2, 2, rows, 48)).astype(numpy.float16)[..., :36] for rows in (150, 90))
    lengths = {"seqlens_q": numpy.array([20, 131]), "seqlens_kv": numpy.array([90, 0])}
    memory = numpy.full((2, 2, 160, 48), 7, numpy.float16)
    out = memory[:, :, 5:155, 8:44]
    plan = plan_attention(q, k, k, out=out, backend="host", arch="90a", **lengths, **options)
    plan(q, k, k, out=out, **lengths)
    expected = attention(q, k, k, **lengths)
    numpy.testing.assert_allclose(out.astype(float), expected.astype(float), **NUMPY)
    out[...] = 7
    assert plan.kernel.file == "fwd_hopper" and (memory == 7).all()


@pytest.mark.release  # test_host.py and test_mutation.py have one each, and the schedules here the order
@pytest.mark.parametrize("tool", host.SANITIZERS)
@pytest.mark.parametrize("kinds", thinned([("packed", "packed"), ("padded", "roomy")], first=1))
def test_sanitizers_find_nothing(kinds, tool, monkeypatch):
    ragged = Ragged([(70, 90), (0, 3), (1, 0), (65, 64)], (2, 1), 32)
    expected = forward(ragged, *kinds, "90a", **CAUSAL)
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", tool)
    assert_same_bits(forward(ragged, *kinds, "90a", **CAUSAL), expected)


@pytest.mark.release
def test_shared_memory_is_aligned_where_the_last_keys_come_first(monkeypatch):
    """Descriptors of sequences lie at multiples of 16, which a sanitized build requires as a GPU does."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "address")
    q, k, v = (numpy.random.default_rng(i).standard_normal((2, 220, 128)).astype("float16") for i in range(3))
    offsets = numpy.array([0, 70, 220])
    options = {"causal": True, "alibi_slopes": numpy.array([0.5, 0.01], numpy.float32)}
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    plan = plan_attention(q, k, v, **options, **lengths, backend="host", arch="90a")
    assert plan.kernel.config.FROM_LAST and plan.kernel.config.VARLEN
    got, right = plan(q, k, v, alibi_slopes=options["alibi_slopes"], **lengths), attention(q, k, v, **options, **lengths)
    assert abs(got.astype(float) - right).max() <= 2**-8
