"""Float32 attention on sm_90a: elements as two numbers of float16, three products in place of each."""

from itertools import product

import numpy
import pytest
from thinned import quick, thinned

from cupy_flash import KeyRanges, TileMask, UnsupportedError, attention, plan_attention
from cupy_flash.judge.compare import compare
from cupy_flash.machine.host import SCHEDULES
from cupy_flash.plan.fp16_parts import MOST_DIMS

HOST = {"backend": "host", "arch": "90a"}
# Batch axes, heads, key heads, queries, keys, dim, dim of values, and what is asked.
CASES = {
    "dim 64": ((2,), 2, 1, 200, 330, 64, 64, {}),
    "dim 64, causal": ((1,), 4, 2, 257, 257, 64, 64, {"causal": True}),
    "more keys, causal": ((1,), 2, 1, 129, 400, 128, 128, {"causal": True}),
    "more queries, causal": ((1,), 1, 1, 300, 131, 128, 128, {"causal": True}),
    "top left": ((1,), 2, 2, 140, 210, 32, 32, {"causal": "top_left"}),
    "window": ((1,), 2, 1, 333, 333, 64, 64, {"window": (70, 9)}),
    "prefix": ((1,), 1, 1, 190, 260, 128, 128, {"causal": True, "prefix": 50}),
    "dims that TMA cannot move": ((3,), 2, 1, 101, 147, 36, 100, {"causal": True}),
    "dim 1": ((1,), 1, 1, 70, 65, 1, 3, {}),
    "wide values": ((1,), 2, 1, 130, 200, 17, 128, {}),
    "wide keys": ((1,), 2, 1, 130, 200, 192, 128, {"causal": True}),
    "two batch axes": ((2, 3), 1, 1, 90, 70, 64, 64, {}),
    "few keys": ((1,), 3, 1, 500, 5, 64, 64, {}),
    "a scale": ((1,), 1, 1, 100, 100, 64, 64, {"scale": 3.0}),
    "sinks": ((1,), 2, 1, 150, 150, 64, 64, {"causal": True, "sinks": numpy.array([0.5, 7.0], numpy.float32)}),
    "several sinks": ((1,), 2, 1, 90, 200, 128, 128, {"sinks": numpy.array([[0.5, -7.0], [2.0, 1.0]], numpy.float32)}),
}
# Masks and edges of tiles that gradients in parts have quickly, and dims that the test of one part has.
RARELY = {"dim 64", "more queries, causal", "more keys, causal", "top left", "a scale", "wide values", "sinks"}


def drawn(name, seed=0):
    batch, heads, heads_kv, len_q, len_kv, dim, dim_v, asked = CASES[name]
    rng = numpy.random.default_rng(seed)
    shapes = (heads, len_q, dim), (heads_kv, len_kv, dim), (heads_kv, len_kv, dim_v)
    return [rng.standard_normal((*batch, *shape), numpy.float32) for shape in shapes], dict(asked)


def meaning(asked, len_q, len_kv, dim):
    """What the judge is told."""
    told, offset = {"scale": asked.get("scale", dim**-0.5)}, len_kv - len_q
    if "window" in asked:
        left, right = asked["window"]
        told |= {"first_key": offset - left, "last_key": offset + right}
    elif "causal" in asked:
        told["last_key"] = offset if asked["causal"] is True else 0
    return told | {name: asked[name] for name in ("prefix", "sinks") if name in asked}


def judged(name, result, operands, asked, precision="ieee"):
    _, _, _, len_q, len_kv, dim, _, _ = CASES[name]
    return compare(*result, *operands, precision=precision, **meaning(asked, len_q, len_kv, dim))


def planned(operands, asked, precision="ieee", options=HOST):
    return plan_attention(*operands, **asked, kernel="fwd_hopper", precision=precision, return_lse=True, **options)


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, first=1))
@pytest.mark.parametrize("name", quick(CASES, *(CASES.keys() - RARELY)))
def test_as_right_as_float32(name, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    operands, asked = drawn(name)
    plan = planned(operands, asked)
    assert (plan.kernel.file, plan.kernel.config.FP16_PARTS, plan.kernel.config.DTYPE) == ("fwd_hopper", 2, "FLOAT16")
    given = {name: asked[name] for name in ("sinks",) if name in asked}
    comparison = judged(name, plan(*operands, **given), operands, asked)
    assert comparison.ok, comparison.message


@pytest.mark.parametrize("name", quick(["dim 64, causal", "dims that TMA cannot move"], "dim 64, causal"))
def test_errors_are_those_of_three_products_of_tf32(name):
    """By what is left out of a product, 2^-22 of it, and not by what one product of 11 bits leaves out."""
    operands, asked = drawn(name)
    exact = attention(*(x.astype(numpy.float64) for x in operands), **asked)
    errors = [
        numpy.sqrt(numpy.mean((plan_attention(*operands, **asked, kernel=kernel, **HOST)(*operands) - exact) ** 2))
        for kernel in ("fwd_hopper", "fwd_v2")
    ]
    assert errors[0] < 3 * errors[1] and errors[0] < 2**-18 * numpy.sqrt(numpy.mean(exact**2))


@pytest.mark.parametrize("name", thinned(["dim 64, causal", "dims that TMA cannot move", "wide values"]))
def test_tf32_is_one_part(name):
    operands, asked = drawn(name)
    plan = planned(operands, asked, "tf32")
    assert plan.kernel.config.FP16_PARTS == 1
    comparison = judged(name, plan(*operands), operands, asked, "tf32")
    assert comparison.ok, comparison.message


@pytest.mark.parametrize("exponents", [(40, -40, 90), (-60, 60, -100), (100, -100, 0), (-90, 90, 60)])
def test_powers_of_two_are_the_scale_s_alone(exponents):
    """A head's scale takes the exponent of its largest element, so that the bits are the same wherever elements lie."""
    operands, asked = drawn("dim 64, causal")
    plan = planned(operands, asked)
    out, lse = plan(*operands)
    moved_out, moved_lse = plan(*(numpy.ldexp(x, e) for x, e in zip(operands, exponents)))
    numpy.testing.assert_array_equal(moved_out, numpy.ldexp(out, exponents[2]))
    numpy.testing.assert_array_equal(moved_lse, lse)


def test_heads_have_scales_of_their_own():
    """A head whose numbers are large takes no bits from others, nor one of zeros, nor an outlier from its head."""
    operands, asked = drawn("dim 64, causal")
    plan = planned(operands, asked)
    out, lse = plan(*operands)
    q, k, v = (x.copy() for x in operands)
    q[:, 3] *= 2.0**50
    k[:, 1] = 0
    v[:, 1] *= 2.0**70
    changed, changed_lse = plan(q, k, v)
    numpy.testing.assert_array_equal(changed[:, :2], out[:, :2])  # of the first key head
    numpy.testing.assert_array_equal(changed_lse[:, :2], lse[:, :2])
    means = numpy.cumsum(v[:, 1].astype(numpy.float64), axis=1) / numpy.arange(1, 258)[:, None]
    numpy.testing.assert_allclose(changed[:, 2:], numpy.stack([means] * 2, axis=1), rtol=1e-5, atol=2.0**50)
    q, k, v = (x.copy() for x in operands)
    v[0, 0, 256, 3] = 2.0**14  # which the last query alone sees
    changed, _ = plan(q, k, v)
    numpy.testing.assert_allclose(changed[:, :2, :256], out[:, :2, :256], rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("size", [0, 2.0**-70])
def test_heads_of_zeros(size):
    """Scores of a head whose numbers are so small that 2^-e of both is zero are 0, and -infinity where they are masked."""
    operands, asked = drawn("dim 64, causal")
    q, k, v = (x.copy() for x in operands)
    q[:, 2:] *= numpy.float32(size)
    k[:, 1] *= numpy.float32(size)
    out, lse = planned(operands, asked)(q, k, v)
    count = numpy.arange(1, 258)
    means = numpy.cumsum(v[:, 1].astype(numpy.float64), axis=1) / count[:, None]
    numpy.testing.assert_allclose(out[:, 2:], numpy.stack([means] * 2, axis=1), rtol=1e-5, atol=2**-20)
    numpy.testing.assert_allclose(lse[:, 2:], numpy.broadcast_to(numpy.log(count), (1, 2, 257)), rtol=0, atol=2**-20)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("scale", [-6e7, -1e7, 2e7, 1e9])
def test_scores_whose_neighbours_are_sixteen_apart(scale, precision):
    """Beside a maximum that lies eight below the largest score, and is rounded down, P would be beyond float16."""
    operands, _ = drawn("dim 64, causal")
    result = planned(operands, {"causal": True, "scale": scale}, precision)(*operands)
    comparison = compare(*result, *operands, precision=precision, scale=scale, last_key=0)
    assert numpy.isfinite(result[0]).all() and comparison.ok, comparison.message


def test_what_is_not_finite_stays_where_it_is():
    operands, asked = drawn("dim 64, causal")
    plan = planned(operands, asked)
    out, _ = plan(*operands)
    for strange in (numpy.nan, numpy.inf):
        v = operands[2].copy()
        v[0, 1, 100, 5] = strange  # of key head 1, so of query heads 2 and 3
        found, _ = plan(*operands[:2], v)
        assert not numpy.isfinite(found[0, 2:, 100:, 5]).any()
        expected, found = out.copy(), found.copy()
        expected[0, 2:, :, 5] = found[0, 2:, :, 5] = 0
        numpy.testing.assert_array_equal(found, expected)
        q = operands[0].copy()
        q[0, 0, 17, 0] = numpy.nan
        found, lse = plan(q, *operands[1:])
        assert numpy.isnan(found[0, 0, 17]).all() and numpy.isnan(lse[0, 0, 17])
        rest = numpy.ones(found.shape[:-1], bool)
        rest[0, 0, 17] = False
        numpy.testing.assert_array_equal(found[rest], out[rest])


@pytest.mark.parametrize("name", thinned(["dim 64, causal", "dims that TMA cannot move"], first=1))
def test_any_strides(name):
    """Where elements lie matters to what makes the parts alone: the bits are the same."""
    operands, asked = drawn(name)
    out, lse = planned(operands, asked)(*operands)
    columns = [numpy.asfortranarray(x) for x in operands]
    backwards = [x[..., ::-1, :].copy()[..., ::-1, :] for x in operands]
    gaps = []
    for x in operands:
        room = numpy.full((*x.shape[:-1], 2 * x.shape[-1] + 1), numpy.nan, numpy.float32)
        room[..., 1::2] = x
        gaps.append(room[..., 1::2])
    for seen in (columns, backwards, gaps):
        result = planned(seen, asked)(*seen)
        numpy.testing.assert_array_equal(result[0], out)
        numpy.testing.assert_array_equal(result[1], lse)


def test_what_is_broadcast_has_parts_once():
    rng = numpy.random.default_rng(3)
    q = rng.standard_normal((3, 2, 100, 64), numpy.float32)
    k, v = rng.standard_normal((2, 1, 1, 90, 64), numpy.float32)
    plan = planned((q, k, v), {})
    assert dict(plan.workspace.parts)["k_map"] == k.nbytes and dict(plan.workspace.parts)["q_map"] == q.nbytes
    whole = [numpy.ascontiguousarray(numpy.broadcast_to(x, (3, 1, 90, 64))) for x in (k, v)]
    for found, expected in zip(plan(q, k, v), planned((q, *whole), {})(q, *whole)):
        numpy.testing.assert_array_equal(found, expected)
    shared = [numpy.broadcast_to(x, (1, 2, 90, 64)) for x in (k, v)]  # by heads
    for found, expected in zip(planned((q, *shared), {})(q, *shared), plan(q, k, v)):
        numpy.testing.assert_array_equal(found, expected)


def test_memory_is_that_of_the_operands():
    operands, asked = drawn("dim 64, causal")
    plan = planned(operands, asked)
    assert sum(x.nbytes for x in operands) <= plan.workspace_bytes < 1.1 * sum(x.nbytes for x in operands)
    assert "fp16_parts" in str(plan)


def scored(name, dim, seed=0):
    """Queries, keys and values of two batch elements and heads, and what is asked of scores."""
    rng = numpy.random.default_rng(seed)
    len_q, len_kv = 150, 210
    q = rng.standard_normal((2, 2, len_q, dim), numpy.float32)
    k, v = rng.standard_normal((2, 2, 1, len_kv, dim), numpy.float32)
    docs = {"doc": numpy.sort(rng.integers(0, 4, len_q)), "doc_kv": numpy.sort(rng.integers(0, 4, len_kv))}
    of_docs = {"mask": "doc[q_idx] == doc_kv[kv_idx] or kv_idx == 0", "arrays": docs}
    t, bias = rng.uniform(0.5, 2, 2).astype(numpy.float32), rng.standard_normal((2, len_q, len_kv), numpy.float32)
    asked = {
        "softcap": {"softcap": 3.0, "causal": True},
        "a scale below zero": {"scale": -0.3},
        "a large scale": {"scale": 2000.0},
        "bias": {"bias": bias, "causal": True},
        "bias of keys": {"bias": bias[:1, :1] * 9, "sinks": t},
        "a bias that hides": {"bias": numpy.where(bias > 1, numpy.float32(-1e9), bias)},
        "alibi": {"alibi_slopes": t, "causal": True},
        "a factor": {"score": "score * t[h]", "arrays": {"t": t}},
        "an expression": {"score": "score * exp(-t[h] * abs(q_idx - kv_idx))", "arrays": {"t": t}},
        "a table": {"score": "score + table[kv_idx - q_idx + 200]", "arrays": {"table": bias[0, :3].ravel()}},
        "documents": of_docs,
        "documents, causal, softcap": of_docs | {"causal": True, "softcap": 4.0},
        "an array that masks": {"mask": rng.random((2, 1, len_q, len_kv)) < 0.7},
        "a factor and documents": {"score": "score * t[h]", "mask": of_docs["mask"], "arrays": {"t": t} | docs},
        "ranges": {"mask": KeyRanges(numpy.zeros((len_q, 1), int), rng.integers(1, len_kv, (len_q, 1)))},
        "bias and documents": of_docs | {"bias": bias},
        "bias and softcap": {"bias": bias, "softcap": 3.0},
    }
    return (q, k, v), asked[name]


SCORED = (
    "softcap", "a scale below zero", "a large scale", "bias", "bias of keys", "a bias that hides", "alibi", "a factor", "a table",
    "documents", "documents, causal, softcap", "an array that masks", "a factor and documents", "ranges",
)  # fmt: skip
NARROW = ("an expression", "bias and documents", "bias and softcap")  # of head dims to 64
OF_CALLS = ("sinks", "bias", "alibi_slopes", "arrays")  # what a plan is called with; an array as mask as well


def of_a_call(asked):
    mask = asked.get("mask")
    by_name = {name: asked[name] for name in OF_CALLS if name in asked}
    return by_name if mask is None or isinstance(mask, str) else by_name | {"mask": mask}


def errors_of_scores(operands, asked, precision="ieee", options=HOST, put=numpy.asarray, get=numpy.asarray):
    """Of fwd_hopper and of fwd_v2, and how large results are."""
    wide = {name: x.astype(numpy.float64) if name in ("bias", "alibi_slopes", "sinks") else x for name, x in asked.items()}
    exact = attention(*(x.astype(numpy.float64) for x in operands), **wide)
    placed, errors = [put(x) for x in operands], []
    asked = {name: {key: put(x) for key, x in told.items()} if name == "arrays" else told for name, told in asked.items()}
    asked |= {name: put(x) for name, x in asked.items() if isinstance(x, numpy.ndarray)}
    if isinstance(asked.get("mask"), KeyRanges):
        asked["mask"] = KeyRanges(put(asked["mask"].start), put(asked["mask"].stop))
    for kernel in ("fwd_hopper", "fwd_v2"):
        plan = plan_attention(*placed, **asked, kernel=kernel, precision=precision, **options)
        parts = plan.kernel.config.FP16_PARTS
        assert parts == (kernel == "fwd_hopper") * (1 if precision == "tf32" else 2)
        errors.append(get(plan(*placed, **of_a_call(asked))) - exact)
    return [numpy.sqrt(numpy.mean(x**2)) for x in (*errors, exact)]


def at_two_dims(names, narrow, *kept):
    """Those that are named with a dim, and for a release all at two dims, and the narrow ones at one."""
    return quick([*product(names, (64, 100)), *((name, 40) for name in narrow)], *kept, spread=True)


# Of one part, ALiBi is quick as well.
OFTEN = [("bias of keys", 64), ("documents, causal, softcap", 100), ("an expression", 40)]


@pytest.mark.parametrize("name, dim", at_two_dims(SCORED, NARROW, *OFTEN))
def test_scores_are_as_near_as_those_of_fwd_v2(name, dim):
    own, other, size = errors_of_scores(*scored(name, dim))
    assert own < 3 * other + 2**-24 * size


@pytest.mark.parametrize("name", quick(SCORED[:-1], "alibi"))
def test_scores_of_tf32_are_as_near_as_those_of_fwd_v2(name):
    own, other, size = errors_of_scores(*scored(name, 64), "tf32")
    assert own < 3 * other + 2**-13 * size


@pytest.mark.release  # as of gradients: see test_gradient_parts_scores.py
def test_a_mask_keeps_its_tiles():
    operands, asked = scored("documents", 64)
    mask = TileMask(asked["mask"], asked["arrays"])
    out, lse = planned(operands, asked)(*operands, arrays=asked["arrays"])
    plan = planned(operands, {"mask": mask})
    for _ in range(2):
        for found, expected in zip(plan(*operands, mask=mask), (out, lse)):
            numpy.testing.assert_array_equal(found, expected)


def six_arrays(rows):
    """A score that reads as many arrays as a kernel takes."""
    names = [f"t{i}" for i in range(6)]
    return {"score": "score + " + " + ".join(f"{name}[q_idx]" for name in names)} | {
        "arrays": {name: numpy.ones(rows, numpy.float32) for name in names}
    }


REFUSED = {
    "more than 64 queries": ({}, 64, "at most 64 queries"),
    "dims": ({}, (100, MOST_DIMS["ieee"][1] + 1), "of values above 128"),
    "dims of tf32": ({"precision": "tf32"}, (100, MOST_DIMS["tf32"][0] + 1), "head dims above 192"),
    "dims of tf32 with sinks": ({"precision": "tf32", "sinks": numpy.zeros(2, numpy.float32)}, (100, 129), "head dims above 128"),
    "six arrays": (six_arrays(100), 100, "at most 5 are read"),
    "a long expression of wide heads": ({"score": "score * sigmoid(score)"}, (100, 65), "no registers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_fwd_v2(name):
    asked, shape, reason = REFUSED[name]
    queries, dim = shape if isinstance(shape, tuple) else (shape, 64)
    q, k, v = numpy.ones((3, 1, 2, queries, dim), numpy.float32)
    assert plan_attention(q, k, v, **asked, **HOST).kernel.file == "fwd_v2"
    with pytest.raises(UnsupportedError, match=f"got 'fwd_hopper': .*{reason}"):
        plan_attention(q, k, v, **asked, kernel="fwd_hopper", **HOST)


# Measured on an H200, launches with their host: whether numbers of float16 take less time, of heads, queries, keys and dims.
FASTER = {
    (64, 1024, 1024, 64): True,
    (16, 512, 512, 128): True,
    (1, 256, 256, 64): True,
    (2048, 256, 256, 64): True,
    (2048, 256, 256, 128): True,
    (4096, 256, 256, 32): False,
    (64, 80, 80, 64): False,
    (4, 80, 80, 64): False,
    (1, 128, 128, 64): False,
}
FASTER_TF32 = {(2048, 256, 256, 64): True, (1024, 256, 256, 128): True, (4096, 256, 256, 32): False, (64, 256, 256, 64): False}


MEASURED = [(sizes, "ieee", faster) for sizes, faster in FASTER.items()]
MEASURED += [(sizes, "tf32", faster) for sizes, faster in FASTER_TF32.items()]


@pytest.mark.parametrize("sizes, precision, faster", MEASURED, ids=str)
def test_taken_where_it_takes_less_time(sizes, precision, faster):
    heads, len_q, len_kv, dim = sizes
    q = numpy.broadcast_to(numpy.float32(1), (1, heads, len_q, dim))
    k = numpy.broadcast_to(numpy.float32(1), (1, heads, len_kv, dim))
    q, k = (numpy.lib.stride_tricks.as_strided(x, x.shape, numpy.empty(x.shape, numpy.float32).strides) for x in (q, k))
    assert (plan_attention(q, k, k, precision=precision, **HOST).kernel.file == "fwd_hopper") == faster
    assert plan_attention(q, k, k, precision=precision, backend="host", arch="80").kernel.file == "fwd_v2"
