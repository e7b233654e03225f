"""Sequences of their own lengths: random ones against the oracle, plans whose lengths change, what kernels move and touch."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy
import pytest
from ragged import Ragged, assert_same_bits, backward, forward
from thinned import thinned

from cupy_flash import attention, attention_backward, plan_attention, plan_attention_backward
from cupy_flash.call import forward as call_forward
from cupy_flash.judge.fuzz import judging_lengths, lengths, running_lengths
from cupy_flash.machine import host
from cupy_flash.machine.numpy_path import sequences
from cupy_flash.plan.split import SPLIT_KEYS

ROOT = Path(__file__).resolve().parent.parent
SEED = 1
HOST = {"backend": "host", "arch": "80"}
HOST_ONLY = {"backend": "host"}  # of the architecture that it has by default

# Random problems


def drawn(count, backend):
    found = ((i, lengths.draw_problem_of_lengths(SEED, i)) for i in range(count))
    return [i for i, problem in found if (problem.backend == "host") == (backend == "host")]


def test_random_lengths_are_computed_right_on_numpy():
    numbers = drawn(32, "numpy")
    assert len(numbers) > 15
    assert [wrong for i in numbers if (wrong := running_lengths.run(SEED, i))] == []


@pytest.mark.release
@pytest.mark.parametrize("seed", range(1, 7))
def test_random_lengths_are_computed_right(seed):
    """On NumPy 1,200 problems, and as many by kernels."""
    command = [sys.executable, "-m", "cupy_flash.judge.fuzz", "lengths", "--count", "400", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr


KINDS = """
    forward, backward, deterministic, with_dlse, entry call, entry plan, entry vjp, given out, given lse, given dq, given dv,
    dtype float16, dtype bfloat16, dtype float32, dtype float64, backend host, backend numpy, backend auto,
    arch 75, arch 80, arch 90a, schedule eager, schedule deferred, group 1, group 2, group 3, group 5, group 7,
    q all, q padded, q shared, q packed, q roomy, kv all, kv padded, kv shared, kv packed, kv roomy, kv pages,
    kv cache, kv cache of all,
    cu_seqlens_q int32, cu_seqlens_q int64, cu_seqlens_kv int32, seqlens_q int64, seqlens_kv int32, pages int32, pages int64,
    cache_batch_idx int32, cache_batch_idx int64, layout bshd, many, one, long,
    window, prefix, softcap, scale, sinks, alibi, dropout,
    page size 1, page size 3, page size 8, page size 16, page size 48, page size 64, page size 128, page size 256,
    causal False, causal True, causal top_left, causal bottom_right, score relative, score gate, score temperature, score decay,
    score places, packed score places, mask ranges, packed mask ranges, sums on host, sums on numpy,
    mask array, mask documents, mask prefixes, mask holes, mask windows, bias float16, bias float32
"""


def test_every_kind_of_lengths_is_drawn():
    wanted = {kind.strip() for kind in KINDS.split(",")}
    found = Counter(kind for i in range(1500) for kind in lengths.draw_problem_of_lengths(SEED, i).kinds)
    assert sorted(wanted - found.keys()) == []


def some_wrong(count=80):
    return any(running_lengths.run(SEED, i) for i in drawn(count, "numpy"))


def test_a_key_beyond_a_length_is_found(monkeypatch):
    original = sequences._keys

    def wrong(lengths, numbers, number, rows, x):
        return original(lengths, numbers, number, sequences._Rows(rows.element, rows.first, max(rows.len - 1, 0)), x)

    monkeypatch.setattr(sequences, "_keys", wrong)
    assert some_wrong()


@pytest.mark.parametrize("name", thinned(["dsinks", "dbias", "dalibi_slopes"], keep=3))
def test_a_sum_that_lacks_a_percent_is_found(monkeypatch, name):
    original = running_lengths.compute

    def wrong(call):
        results = original(call)
        if getattr(results, name, None) is not None:
            getattr(results, name)[...] *= 0.99
        return results

    monkeypatch.setattr(running_lengths, "compute", wrong)
    numbers = [i for i in drawn(900, "numpy") if has(lengths.draw_problem_of_lengths(SEED, i), name)]
    assert numbers
    assert any("FAILS" in (running_lengths.run(SEED, i) or "") for i in numbers[:8])


def has(problem, name):
    asked = problem.asked
    there = {"dsinks": problem.sinks, "dbias": asked and asked.bias_dtype, "dalibi_slopes": asked and asked.alibi}
    return problem.direction == "backward" and problem.dtype in ("float32", "float64") and there[name]


def test_each_array_lies_in_poison():
    """What a call reads beside its sequences shows: nothing else is finite there."""
    for i in drawn(60, "numpy"):
        problem = lengths.draw_problem_of_lengths(SEED, i)
        call = judging_lengths.make_call(problem)
        for name, room in (("q", problem.q), ("k", problem.kv), ("v", problem.kv)):
            x = call.arrays[name].array
            outside = x.reshape(room.elements, *x.shape[-3:]).swapaxes(1, 2)[room.outside()]
            assert not numpy.isfinite(outside.astype(numpy.float32)).any()


MASKS = ({"causal": True}, {"causal": "top_left", "window": (40, 9)}, {"causal": True, "prefix": 40})


@pytest.mark.parametrize("options", thinned(MASKS), ids=str)
def test_masks_are_those_of_each_sequence(options):
    """Of kernels and of NumPy: anchored at the ends of a sequence or at its beginning; a prefix ends where keys do."""
    ragged = Ragged(((70, 150), (130, 3), (5, 0), (33, 170), (64, 20)))
    results = (forward(ragged, "packed", "padded", arch, **options) for arch in ("80", None))
    for found, expected in zip(*results):
        numpy.testing.assert_allclose(found[0].astype(float), expected[0].astype(float), atol=4e-3)
        numpy.testing.assert_allclose(found[1], expected[1], atol=2e-3)


def test_heads_that_share_a_tile_see_what_each_query_sees():
    ragged = Ragged([(2, n) for n in (300, 1, 170)], heads=(12, 2))
    results = (forward(ragged, "all", "pages", arch, causal=True) for arch in ("80", None))
    for found, expected in zip(*results):
        numpy.testing.assert_allclose(found[0].astype(float), expected[0].astype(float), atol=4e-3)


def test_kernels_take_wrong_lengths_for_the_nearest(monkeypatch):
    """On a device nobody checks them: whatever they are, no row beyond an array is read or written."""
    rng = numpy.random.default_rng(0)
    q, k = (rng.standard_normal((3, heads, 70, 64)).astype(numpy.float16) for heads in (4, 2))
    wrong, nearest = numpy.array([-5, 2**40, 71]), numpy.array([0, 70, 70])
    offsets, rows = numpy.array([-9, 20, 2**33, 2**35]), numpy.array([0, 20, 70, 70])
    expected = attention(q, k, k, seqlens_q=nearest, seqlens_kv=nearest, **HOST_ONLY)
    packed = attention(q[0], k, k, cu_seqlens_q=rows, seqlens_kv=nearest, **HOST_ONLY)
    of_cache = attention(q, k, k, seqlens_kv=nearest, cache_batch_idx=numpy.array([0, 2, 2]), **HOST_ONLY)
    monkeypatch.setattr(call_forward, "check_values", lambda *_: None)
    numpy.testing.assert_array_equal(attention(q, k, k, seqlens_q=wrong, seqlens_kv=wrong, **HOST_ONLY), expected)
    numpy.testing.assert_array_equal(attention(q[0], k, k, cu_seqlens_q=offsets, seqlens_kv=wrong, **HOST_ONLY), packed)
    found = attention(q, k, k, seqlens_kv=wrong, cache_batch_idx=numpy.array([-1, 3, 2**33]), **HOST_ONLY)
    numpy.testing.assert_array_equal(found, of_cache)


# Plans whose lengths change in place


@pytest.mark.parametrize("arch", [None, "80"])
def test_one_plan_serves_all_lengths(arch, monkeypatch):
    options = {"causal": True, **(HOST if arch else {})}
    rng = numpy.random.default_rng(0)
    q, k = (rng.standard_normal((heads, 200, 64)).astype(numpy.float16) for heads in (4, 2))
    offsets, keys = numpy.array([0, 70, 135, 200]), numpy.array([0, 10, 110, 111])
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": keys}
    plan = plan_attention(q, k, k, return_lse=True, **given, **options)
    out, lse = plan(q, k, k, **given)
    of_gradients = plan_attention_backward(out, q, k, k, out, lse, deterministic=True, **given, **options)
    of_gradients(out, q, k, k, out, lse, **given)
    monkeypatch.setattr(host, "_compile", lambda *_: pytest.fail("compiled again"))
    for new_q, new_kv in (([0, 0, 1, 65], [0, 64, 65, 200]), ([0, 199, 199, 200], [0, 0, 3, 200]), ([0, 0, 0, 0], [0, 0, 0, 0])):
        offsets[:], keys[:] = new_q, new_kv
        out, lse = plan(q, k, k, **given)
        gradients = of_gradients(out, q, k, k, out, lse, **given)
        for i in range(3):
            rows, cols = slice(*offsets[i : i + 2]), slice(*keys[i : i + 2])
            parts = [numpy.ascontiguousarray(x[:, at]) for x, at in ((q, rows), (k, cols), (k, cols))]
            expected = attention(*parts, causal=True, return_lse=True)
            numpy.testing.assert_allclose(out[:, rows].astype(float), expected[0].astype(float), atol=2e-3)
            numpy.testing.assert_allclose(lse[:, rows], expected[1], atol=1e-3)
        for x, end in ((out, offsets[-1]), (gradients.dq, offsets[-1]), (gradients.dk, keys[-1]), (gradients.dv, keys[-1])):
            assert not x[:, end:].any()
        assert (lse[:, offsets[-1] :] == -numpy.inf).all()


@pytest.mark.parametrize("arch", thinned(["80", "90a"]))
def test_gradients_of_sinks_know_only_rows_of_sequences(arch):
    """Tiles that no sequence has add nothing to them, whatever is in memory."""
    rng = numpy.random.default_rng(0)
    q, k = (rng.standard_normal((heads, 200, 64)).astype(numpy.float16) for heads in (4, 2))
    q[:, 135:] = k[:, 111:] = numpy.nan
    given = {"cu_seqlens_q": numpy.array([0, 70, 70, 135]), "cu_seqlens_kv": numpy.array([0, 10, 110, 111])}
    sinks = rng.standard_normal((2, 4)).astype(numpy.float32)
    out, lse = attention(q, k, k, sinks=sinks, return_lse=True, **given)
    out[:, 135:] = lse[:, 135:] = numpy.nan
    plan = plan_attention_backward(q, q, k, k, out, lse, sinks=sinks, **given, backend="host", arch=arch)
    workspace = numpy.full(plan.workspace_bytes + 16, 0xFF, numpy.uint8)  # NaN
    memory = workspace[-workspace.ctypes.data % 16 :]
    found = plan(q, q, k, k, out, lse, sinks=sinks, workspace=memory, **given).dsinks
    expected = attention_backward(q, q, k, k, out, lse, sinks=sinks, **given).dsinks
    numpy.testing.assert_allclose(found, expected, atol=1e-2 * abs(expected).max())


def test_two_calls_with_equal_layouts_share_a_plan():
    q = numpy.ones((2, 10, 8), numpy.float32)
    first = plan_attention(q, q, q, cu_seqlens_q=numpy.array([0, 3, 10]), cu_seqlens_kv=numpy.array([0, 3, 10]))
    assert plan_attention(q, q, q, cu_seqlens_q=numpy.array([0, 9, 9]), cu_seqlens_kv=numpy.array([0, 1, 2])) is first


# What kernels move


def traffic_of(ragged, kind_q, kind_kv, **options):
    """Bytes of a forward, and of the arrays of lengths."""
    q_room, kv_room = ragged.rooms(kind_q, kind_kv)
    inputs = [ragged.array(room, name) for room, name in ((q_room, "q"), (kv_room, "k"), (kv_room, "v"))]
    given = q_room.numbers | kv_room.numbers
    plan = plan_attention(*inputs, return_lse=True, **given, **HOST, **options)
    _, found = plan.counted(*inputs, **given)
    return found.read_bytes, found.written_bytes, plan


LONG = ((400, 400), (130, 700), (256, 256), (100, 900))


@pytest.mark.parametrize("causal", thinned([False, True], first=1))
def test_a_packed_batch_moves_what_its_sequences_move_one_by_one(causal):
    ragged = Ragged(LONG)
    alone = [traffic_of(ragged.some(i), "packed", "packed", causal=causal)[:2] for i in range(len(LONG))]
    read, _, _ = traffic_of(ragged, "packed", "packed", causal=causal)
    assert read <= 1.05 * sum(one for one, _ in alone)
    whole = 0
    for part in ragged.parts:
        plan = plan_attention(part["q"], part["k"], part["v"], return_lse=True, causal=causal, **HOST)
        whole += plan.counted(part["q"], part["k"], part["v"])[1].read_bytes
    assert read <= 1.05 * whole  # than calls that know no lengths


def test_padding_is_not_read():
    ragged = Ragged(LONG)
    packed, padded = (traffic_of(ragged, kind, kind)[0] for kind in ("packed", "padded"))
    assert padded <= 1.05 * packed


DECODING = [("padded", 1), ("pages", 2), ("cache", 1), ("pages", 1), ("padded", 2)]


def test_padding_is_not_read_by_a_backward():
    ragged, read = Ragged(((130, 70), (64, 190))), {}
    for kind in ("packed", "padded"):
        q_room, kv_room = ragged.rooms(kind, kind, turn=3)
        assert kind == "packed" or kv_room.rows >= 190
        q, k, v = (ragged.array(room, name) for room, name in ((q_room, "q"), (kv_room, "k"), (kv_room, "v")))
        given = q_room.numbers | kv_room.numbers
        operands = q, q, k, v, *attention(q, k, v, return_lse=True, **given)
        read[kind] = plan_attention_backward(*operands, **given, **HOST).counted(*operands, **given)[1].read_bytes
    assert read["padded"] <= 1.05 * read["packed"]


@pytest.mark.parametrize("kind, queries", [*DECODING[:3], *(pytest.param(*x, marks=pytest.mark.release) for x in DECODING[3:])])
def test_decoding_reads_each_key_once_for_all_heads_of_a_group(kind, queries):
    """The heads of a group share a tile, whose queries each split reads, and what two splits leave is read once.

    Pages cost their table besides: an entry for each 16 bytes that are copied, at most.
    """
    ragged = Ragged([(queries, n) for n in (900, 411, 1300)], heads=(12, 2))
    read, _, plan = traffic_of(ragged, "all", kind, causal=True)
    splits = [max(n // SPLIT_KEYS, 1) for n in (900, 411, 1300)]
    keys = sum(part[name].nbytes for part in ragged.parts for name in "kv")
    queries_bytes = plan.kernel.config.WARPS_KV * sum(n * part["q"].nbytes for n, part in zip(splits, ragged.parts))
    left = sum(n * 12 * queries * (64 + 1) * 4 for n in splits if n > 1)
    granules = keys // 16
    table = granules * 8 if kind == "pages" else 0
    assert (kind == "pages") == plan.kernel.config.PAGED
    assert keys <= read - queries_bytes - left <= 1.02 * keys + table


# Memory


@pytest.mark.parametrize("tool", ["address", pytest.param("thread", marks=pytest.mark.release)])
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.release) for way in ("packed", "pages", "cache", "backward")])
def test_sanitizers_find_nothing_in_lengths(way, tool, monkeypatch):
    ragged = Ragged([(70, 90), (0, 3), (1, 0), (65, 64)], (2, 1), 32)
    kind, compute = ("packed", backward) if way == "backward" else (way, forward)
    # With rows behind the last sequence.
    turn = next(turn for turn in range(99) if ragged.rooms("packed", kind, turn)[0].rows > 136)
    expected = compute(ragged, "packed", kind, "80", turn, causal=True)
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", tool)
    assert_same_bits(compute(ragged, "packed", kind, "80", turn, causal=True), expected)
