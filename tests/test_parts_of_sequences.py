"""Float32 sequences of their own lengths by products of float16: each head of each sequence has a scale of its own."""

import numpy
import pytest
from ragged import Ragged, assert_same_bits, backward, forward
from thinned import quick, thinned

from cupy_flash import UnsupportedError, plan_attention, plan_attention_backward
from cupy_flash.call.backward import BackwardPlan
from cupy_flash.call.forward import AttentionPlan
from cupy_flash.machine.host import SCHEDULES

# Beside edges of tiles, without queries, without keys, and of several of the 256 rows that a block makes parts of.
LENS = ((70, 150), (1, 65), (130, 3), (0, 17), (64, 64), (5, 0), (270, 300))
KINDS = [("packed", "packed"), ("padded", "padded"), ("roomy", "packed"), ("padded", "roomy"), ("roomy", "padded")]
CAUSAL = {"causal": True}
OPTIONS = (
    {},
    CAUSAL,
    {"window": (40, 9), "causal": "top_left"},
    {"causal": True, "prefix": 20, "softcap": 5.0},
    {"scale": -0.3},
    {"precision": "tf32"},
)
SHAPES = {64: (4, 2), 32: (4, 1), 100: (3, 3), 128: (2, 1)}  # head dims, and query and key heads


@pytest.fixture
def taken(monkeypatch):
    """The kernel files of all plans that are called, and in how many parts."""
    found = set()
    for of in (AttentionPlan, BackwardPlan):

        def call(plan, *arrays, original=of.__call__, **others):
            if plan.kernel:
                found.add((plan.kernel.file, plan.kernel.config.FP16_PARTS))
            return original(plan, *arrays, **others)

        monkeypatch.setattr(of, "__call__", call)
    return found


def wide(ragged):
    """The same in float64."""
    found = ragged.some(*range(len(ragged.lens)))
    found.parts = [{name: x.astype(numpy.float64) for name, x in part.items()} for part in ragged.parts]
    return found


def ragged32(heads=(4, 2), dim=64, seed=0, lens=LENS):
    return Ragged(lens, heads, dim, "float32", seed)


def scaled(ragged, exponents):
    """Each sequence times powers of two: q of one and k of its inverse, so that scores stay, v of another, and dout of a third."""
    found = ragged.some(*range(len(ragged.lens)))
    signs = {"q": 1, "k": -1, "v": 2, "dout": -3}
    found.parts = [
        {name: numpy.ldexp(x, signs[name] * e) for name, x in part.items()} for part, e in zip(ragged.parts, exponents, strict=True)
    ]
    return found


def rms(x):
    return numpy.sqrt(numpy.mean(numpy.square(x, dtype=numpy.float64))) if x.size else 0.0


def joined(results):
    """One result of all sequences."""
    return numpy.concatenate([x.ravel() for x in results])


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, first=1))
@pytest.mark.parametrize("options", quick(OPTIONS, CAUSAL), ids=str)
def test_bits_are_those_of_any_form_with_poison_beyond_lengths(options, schedule, taken, monkeypatch):
    """Packed, padded, with room behind, alone and in another order."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    ragged = ragged32((2, 1))  # for more heads see their scales
    for compute in (forward, backward):
        expected = compute(ragged, "packed", "packed", "90a", **options)
        for turn, kinds in enumerate(KINDS):
            assert_same_bits(compute(ragged, *kinds, "90a", turn, **options), expected)
        order = (5, 2, 6, 0, 3, 1, 4)
        assert_same_bits(compute(ragged.some(*order), "roomy", "padded", "90a", 7, **options), [expected[i] for i in order])
        for i in (0, 1, 2, 4, 6) if "prefix" not in options else (0, 1, 4, 6):  # those with elements, and keys beyond a prefix
            assert_same_bits(compute(ragged.some(i), "packed", "packed", "90a", i, **options), [expected[i]])
    parts = 1 if "precision" in options else 2
    assert taken == {("fwd_hopper", parts), ("bwd_hopper_parts", parts)}


@pytest.mark.release  # test_fp16_parts.py and the bits above ask it as well
@pytest.mark.parametrize("dim, heads", list(SHAPES.items()))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_errors_are_those_of_v2(options, dim, heads, taken):
    ragged, allowed = ragged32(heads, dim, 3), 2**-13 if "precision" in options else 2**-24
    exact = {name: value for name, value in options.items() if name != "precision"}
    for compute, kernel in ((forward, "fwd_v2"), (backward, "bwd_v2")):
        truth = compute(wide(ragged), "packed", "packed", **exact)
        own = compute(ragged, "packed", "padded", "90a", 1, **options)
        other = compute(ragged, "packed", "padded", "90a", 1, kernel=kernel, **options)
        for results in zip(*(map(joined, zip(*x, strict=True)) for x in (own, other, truth)), strict=True):
            mine, theirs, right = results
            seen = numpy.isfinite(right)  # lse of rows that see nothing
            numpy.testing.assert_array_equal(mine[~seen], right[~seen])
            error, of_other = (rms(x[seen] - right[seen]) for x in (mine, theirs))
            assert error < 3 * of_other + allowed * rms(right[seen])
    assert {file for file, parts in taken if parts} == {"fwd_hopper", "bwd_hopper_parts"}


@pytest.mark.parametrize("precision", thinned(["ieee", "tf32"]))
def test_each_sequence_has_a_scale_of_its_own(precision):
    """Powers of two that are others in each come back as powers of two of its results: nobody loses bits to a neighbour."""
    ragged, exponents = ragged32(), (0, 25, -20, 3, -25, 8, 20)
    other = scaled(ragged, exponents)
    for kinds in KINDS[:2]:
        before, after = (forward(x, *kinds, "90a", precision=precision, causal=True) for x in (ragged, other))
        expected = [(numpy.ldexp(out, 2 * e), lse) for (out, lse), e in zip(before, exponents)]
        assert_same_bits(after, expected)
        before, after = (backward(x, *kinds, "90a", precision=precision, causal=True) for x in (ragged, other))
        powers = (-2, 0, -3)  # of dq, dk and dv: of dout and v, and of k, q or neither
        assert_same_bits(after, [[numpy.ldexp(x, by * e) for x, by in zip(of, powers)] for of, e in zip(before, exponents)])


@pytest.mark.release  # test_fp16_parts.py and test_gradient_parts_scores.py ask it of a batch, and bits are those of any form
@pytest.mark.parametrize("asked", ["alibi_slopes", "sinks"])
def test_what_is_asked_of_scores(asked):
    """Of packed sequences, beside v2."""
    rng, ends = numpy.random.default_rng(4), numpy.array([0, 70, 70, 200, 265], numpy.int64)
    q, dout = rng.standard_normal((2, 2, 270, 64), numpy.float32)
    k, v = rng.standard_normal((2, 1, 270, 64), numpy.float32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    others = {asked: rng.standard_normal(2, numpy.float32)}
    options = {**given, **others, "backend": "host", "arch": "90a", "causal": True}
    found = []
    for kernels in ((None, None), ("fwd_v2", "bwd_v2")):
        plan = plan_attention(q, k, v, return_lse=True, kernel=kernels[0], **options)
        out, lse = plan(q, k, v, **given, **others)
        arrays = dout, q, k, v, *(found[0][:2] if found else (out, lse))
        backwards = plan_attention_backward(*arrays, kernel=kernels[1], deterministic=True, **options)
        assert bool(plan.kernel.config.FP16_PARTS) == bool(backwards.kernel.config.FP16_PARTS) == (kernels[0] is None)
        found.append((out, lse, *backwards(*arrays, **given, **others)[:3]))
    for mine, right in zip(*found):
        numpy.testing.assert_allclose(mine, right, rtol=0, atol=2**-18 * rms(right[numpy.isfinite(right)]) * 16)


def test_lengths_that_change_take_no_other_plan():
    """Parts are made of the rows that there are when the kernel runs."""
    rng = numpy.random.default_rng(6)
    q, k, v = rng.standard_normal((3, 3, 2, 600, 64), numpy.float32)
    lengths = {"seqlens_q": numpy.array([600, 0, 77]), "seqlens_kv": numpy.array([300, 20, 600])}
    plan = plan_attention(q, k, v, **lengths, backend="host", arch="90a")
    assert plan.kernel.config.FP16_PARTS == 2 and "fp16_parts" in str(plan)
    for of_q, of_kv in (([600, 0, 77], [300, 20, 600]), ([3, 300, 600], [600, 600, 1])):
        told = {"seqlens_q": numpy.array(of_q), "seqlens_kv": numpy.array(of_kv)}
        found = plan(q, k, v, **told)
        poisoned = [x.copy() for x in (q, k, v)]
        for x, rows in zip(poisoned, (of_q, of_kv, of_kv)):
            for i, n in enumerate(rows):
                x[i, :, n:] = 2.0**100  # which would be the largest of the head
        numpy.testing.assert_array_equal(plan(*poisoned, **told), found)
        alone = q[:1, :, : of_q[0]], k[:1, :, : of_kv[0]], v[:1, :, : of_kv[0]]
        expected = plan_attention(*alone, backend="host", arch="90a", kernel="fwd_v2")(*alone)
        numpy.testing.assert_allclose(found[:1, :, : of_q[0]], expected, rtol=0, atol=2**-18)


def test_the_largest_of_a_sequence_counts_wherever_it_is():
    """In its third block of rows, and none of those that a block looks at before: it would be infinite in float16 if it did not."""
    ends = numpy.array([0, 300, 900])
    q, k, v = numpy.random.default_rng(7).standard_normal((3, 1, 900, 64), numpy.float32)
    v[0, 300 + 517, 3] = 2.0**14
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    plans = [plan_attention(q, k, v, **given, backend="host", arch="90a", kernel=kernel) for kernel in ("fwd_hopper", "fwd_v2")]
    found, expected = (plan(q, k, v, **given) for plan in plans)
    numpy.testing.assert_allclose(found[..., 3], expected[..., 3], rtol=2**-16, atol=2**-18)
    numpy.testing.assert_allclose(found[:, :300], expected[:, :300], rtol=0, atol=2**-18)


SHARED = {"seqlens_kv": numpy.array([40, 70])}
REFUSED = {
    "a cache": ({"cache_batch_idx": numpy.array([1, 0])}, 2, "of a cache"),
    "the same keys": (SHARED, 1, "in the same rows have other scales"),
    "a mask of pairs": (SHARED | {"mask": "kv_idx % 3 != 1"}, 2, "a mask is asked of pairs"),
    "wide heads that drop pairs": (SHARED | {"dropout": 0.1, "seed": 1}, 2, "no registers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_fwd_v2(name):
    asked, elements, reason = REFUSED[name]
    q = numpy.ones((2, 2, 100, 128), numpy.float32)
    k = numpy.ones((elements, 2, 70, 128), numpy.float32)
    assert plan_attention(q, k, k, **asked, backend="host", arch="90a").kernel.file == "fwd_v2"
    with pytest.raises(UnsupportedError, match=f"got 'fwd_hopper': .*{reason}"):
        plan_attention(q, k, k, **asked, kernel="fwd_hopper", backend="host", arch="90a")


GRADIENTS_REFUSED = {
    "the same keys": (SHARED, 1, "in the same rows have other scales"),
    "a bias that drops pairs": (SHARED | {"dropout": 0.1, "seed": 1, "bias": numpy.ones((2, 100, 70), "f4")}, 2, "beside dropout"),
}


@pytest.mark.parametrize("name", GRADIENTS_REFUSED)
def test_the_rest_is_bwd_v2(name):
    asked, elements, reason = GRADIENTS_REFUSED[name]
    q, lse = numpy.ones((2, 2, 100, 64), numpy.float32), numpy.zeros((2, 2, 100), numpy.float32)
    k = numpy.ones((elements, 2, 70, 64), numpy.float32)
    given = q, q, k, k, q, lse
    assert plan_attention_backward(*given, **asked, backend="host", arch="90a").kernel.file == "bwd_v2"
    with pytest.raises(UnsupportedError, match=f"got 'bwd_hopper_parts': .*{reason}"):
        plan_attention_backward(*given, **asked, kernel="bwd_hopper_parts", backend="host", arch="90a")
