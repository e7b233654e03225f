"""The shared cases: names, layouts, poison, and that the quick ones touch every feature."""

import dataclasses
import math
from itertools import product
from typing import get_args

import numpy
import pytest

from cupy_flash.judge import oracle
from cupy_flash.judge.cases import GUARD, Case, Layout, Values, case_named, full_cases, make_inputs, make_sinks, quick_cases
from cupy_flash.problem import arrays
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.options import Options


def buffer_of(x):
    """Return the whole allocation that `x` is a view into."""
    while x.base is not None:
        x = x.base
    return x


def specialisation(case):
    """Return what decides which compiled kernel serves a case: a new value is a new compilation, about 3 s on a CPU."""
    granule = 16
    for x in make_inputs(case):
        steps = [x.ctypes.data, *(s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1)]
        fits = [g for g in (16, 4) if x.strides[-1] == x.itemsize and all(step % g == 0 for step in steps)]
        granule = min(granule, max(fits, default=x.itemsize))
    widths = tuple(next(w for w in (32, 64, 96, 128, 192, 256) if w >= d) for d in (case.dim, case.dim_v))
    plain = case.softcap is None and case.scores["scale"] > 0
    texts = case.score, case.mask, case.bias, case.bias_dtype if case.bias else None, case.alibi, case.dropout > 0
    return case.dtype, case.precision, widths, granule, plain, texts if case.of_pairs else None


def test_names_tell_cases_apart_and_find_them():
    cases = full_cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case_named(str(case)) is case
        assert not set(case.name) & set(" '\"()[]{}$*?")  # survives a shell and a pytest id
    plain = Case("float32", 3, 5, dim=8, heads_q=4, sinks=1, return_lse=False)
    words = {"dtype": "float16", "values": "large", "layout": "bshd", "precision": "tf32", "causal": "top_left"}
    words |= {"score": "gate", "mask": "array", "bias": "full", "alibi": "heads", "dropout": 0.5}
    plain = dataclasses.replace(plain, bias="pairs")
    changes = words | {"bias_dtype": "float16", "sinks_dtype": "float16", "batch": (), "window": (1, None), "return_lse": True}
    for field in dataclasses.fields(Case):
        changed = dataclasses.replace(plain, **{field.name: changes.get(field.name, 2)})
        assert changed.name != plain.name, field.name
    with pytest.raises(ValueError, match="no-such-case"):
        case_named("no-such-case")


def test_full_starts_with_quick():
    quick = quick_cases()
    assert full_cases()[: len(quick)] == quick
    assert not any(case.heavy for case in quick)
    assert any(case.heavy for case in full_cases())
    assert max(case.flops for case in full_cases()) < 1.1e9


def test_quick_needs_few_compilations():
    launched = [c for c in quick_cases() if c.len_q and c.len_kv and 0 not in c.batch and c.dtype != "float64"]
    assert len({specialisation(case) for case in launched}) <= 17




def seen_keys(case):
    """How many keys each row sees."""
    return oracle.sees(case.len_q, case.len_kv, *(case.scores[name] for name in ("first_key", "last_key", "prefix"))).sum(axis=1)


FEATURES = {
    "float16": lambda c: c.dtype == "float16",
    "bfloat16": lambda c: c.dtype == "bfloat16",
    "float32": lambda c: c.dtype == "float32" and c.precision == "ieee",
    "tf32": lambda c: c.precision == "tf32",
    "float64": lambda c: c.dtype == "float64",
    "whole tiles": lambda c: c.len_q % 128 == c.len_kv % 128 == 0 < c.len_kv * c.len_q,
    "one query": lambda c: c.len_q == 1,
    "one query, GQA": lambda c: c.len_q == 1 and c.heads_q > c.heads_kv > 1,
    "few queries, GQA": lambda c: 1 < c.len_q < 16 and c.heads_q > c.heads_kv > 1 and c.causal,
    "one key": lambda c: c.len_kv == 1,
    "prime lengths": lambda c: {c.len_q, c.len_kv} <= {59, 61, 67, 71, 97, 131},
    "one past a tile": lambda c: c.len_q % 64 == 1 or c.len_kv % 64 == 1,
    "more queries than keys": lambda c: c.causal and c.len_q > c.len_kv > 0,
    "GQA 3": lambda c: c.heads_q == 3 * c.heads_kv,
    "GQA 7": lambda c: c.heads_q == 7 * c.heads_kv,
    "GQA with several groups": lambda c: c.heads_q > c.heads_kv > 1,
    "MQA": lambda c: c.heads_q > c.heads_kv == 1,
    "causal": lambda c: c.causal is True,
    "top_left": lambda c: c.causal == "top_left" and c.len_q != c.len_kv,
    "window": lambda c: c.window and None not in c.window,
    "open window": lambda c: c.window and None in c.window,
    "causal window": lambda c: c.window and c.causal,
    "softcap": lambda c: c.softcap,
    "softcap far above the scores": lambda c: c.softcap and c.softcap >= 1e5 and c.values == "normal",
    "softcap of small scores": lambda c: c.softcap and c.dtype == "float32" and c.scale and c.scale < 0.01,
    "negative scale": lambda c: c.scale is not None and c.scale < 0,
    "lse asked": lambda c: c.return_lse,
    "lse not asked": lambda c: not c.return_lse,
    "dim_v below dim": lambda c: c.dim_v < c.dim,
    "sinks": lambda c: c.sinks == 1,
    "several sinks": lambda c: c.sinks > 1,
    "sinks in half precision": lambda c: c.sinks and c.sinks_dtype == c.dtype != "float32",
    "sinks, GQA": lambda c: c.sinks and c.heads_q > c.heads_kv > 1,
    "sinks of rows that see nothing": lambda c: c.sinks and 0 in seen_keys(c),
    "an expression": lambda c: c.score,
    "an expression of float64": lambda c: c.score and c.dtype == "float64",
    "an expression of a mask": lambda c: c.mask not in (None, "array"),
    "a mask of booleans": lambda c: c.mask == "array",
    "a bias in another dtype": lambda c: c.bias and c.bias_dtype != c.dtype,
    "a bias of all heads": lambda c: c.bias == "batch" and c.heads_q > 1 < math.prod(c.batch),
    "alibi": lambda c: c.alibi == "heads",
    "alibi of batch elements": lambda c: c.alibi == "batch",
    "dropout": lambda c: c.dropout,
    "dropout and a mask": lambda c: c.dropout and c.mask,
    "a mask and a band": lambda c: c.mask and c.window,
    "sinks and a score": lambda c: c.sinks and c.score,
    "no batch axis": lambda c: c.batch == (),
    "several batch axes": lambda c: len(c.batch) > 1,
    "empty batch": lambda c: 0 in c.batch,
    "no queries": lambda c: c.len_q == 0,
    "no keys": lambda c: c.len_kv == 0,
    **{f"dim {d}": lambda c, d=d: c.dim == d for d in (1, 33, 40, 64, 80, 96, 128, 192, 256)},
    **{f"values {v}": lambda c, v=v: c.values == v for v in get_args(Values)},
    **{f"layout {y}": lambda c, y=y: c.layout == y for y in get_args(Layout)},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_quick_touches(feature):
    assert any(FEATURES[feature](case) for case in quick_cases())


LAID_OUT = {y: Case("float16", 6, 5, dim=8, heads_q=4, heads_kv=2, batch=(3,), layout=y) for y in get_args(Layout)}
STRIDES_OF_Q = {  # in elements, for shape (3, 4, 6, 8)
    "contiguous": (192, 48, 8, 1),
    "bshd": (192, 8, 32, 1),
    "sliced": (4 * 9 * 16, 9 * 16, 16, 1),
    "strided_dim": (384, 96, 16, 2),
    "transposed": (192, 48, 1, 6),
    "negative": (192, 48, -8, 1),
    "broadcast": (192, 48, 8, 1),
    "odd_offset": (192, 48, 8, 1),
}


@pytest.mark.parametrize("layout", LAID_OUT)
def test_layouts_have_their_strides(layout):
    q, k, v = make_inputs(LAID_OUT[layout])
    assert tuple(s // 2 for s in q.strides) == STRIDES_OF_Q[layout]
    assert k.shape == v.shape == (3, 2, 5, 8)
    assert [x.strides[0] == 0 for x in (q, k, v)] == [False] + 2 * [layout == "broadcast"]
    for x in (q, k, v) if layout != "negative" else ():  # there, the pointer is at the last row
        assert x.ctypes.data % 16 == (2 if layout == "odd_offset" else 0)


@pytest.mark.parametrize("layout", LAID_OUT)
def test_poison_surrounds_every_buffer(layout):
    for x in make_inputs(LAID_OUT[layout]):
        buffer = buffer_of(x)
        finite = numpy.isfinite(buffer)
        assert numpy.isfinite(x).all()
        assert not finite[:GUARD].any() and not finite[-GUARD:].any()
        stored = x[:1] if layout == "broadcast" and x.strides[0] == 0 else x
        assert finite.sum() == stored.size  # nothing else in the buffer is a number


def test_inputs_follow_name_and_seed_only():
    case = quick_cases()[1]
    first, again = make_inputs(case), make_inputs(case)
    assert all(numpy.array_equal(a, b) for a, b in zip(first, again, strict=True))
    for other in make_inputs(case, seed=1), make_inputs(dataclasses.replace(case, layout="bshd")):
        assert not any(numpy.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert not numpy.array_equal(first[1], first[2])


def test_sinks_follow_name_and_seed_and_lie_as_the_case_says():
    plain = Case("bfloat16", 6, 5, dim=8, heads_q=4)
    assert make_sinks(plain) is None and plain.arrays() == {}
    for n, dtype, layout in product((1, 2, 3), ("float32", "bfloat16"), ("contiguous", "strided_dim", "odd_offset", "negative")):
        case = dataclasses.replace(plain, sinks=n, sinks_dtype=dtype, layout=layout)
        sinks = make_sinks(case)
        assert sinks.shape == ((4,) if n == 1 else (n, 4)) and sinks.dtype == dtype
        assert numpy.array_equal(sinks, case.arrays()["sinks"]) and not numpy.array_equal(sinks, make_sinks(case, seed=1))
        assert sinks.strides[-1] == sinks.itemsize * (2 if layout == "strided_dim" else 1)
        assert sinks.ctypes.data % 16 == (sinks.itemsize if layout == "odd_offset" else 0)
        assert (numpy.isneginf(sinks).sum(axis=0) == (n == 3)).all() and not numpy.isnan(sinks).any()
        buffer = buffer_of(sinks)
        assert numpy.isnan(buffer).sum() == buffer.size - sinks.size >= 2 * GUARD
    assert make_sinks(Case("float64", 6, 5, sinks=1)).dtype == "float64"


def test_sinks_decide_in_some_rows_and_not_in_others():
    parts = []
    for case in (case for case in full_cases() if case.sinks and not case.heavy and 0 not in (*case.batch, case.heads_q)):
        q, k, _ = (x.astype(float) for x in make_inputs(case))
        k = oracle.repeat_heads(k, q)
        parts.append(oracle.probabilities(q, k, **case.scores, **case.arrays())[0].sum(axis=-1).ravel())
    parts = numpy.concatenate(parts)
    assert parts.min() == 0 and (parts < 0.01).sum() > 100 < (parts > 0.99).sum()
    assert ((parts > 0.1) & (parts < 0.9)).sum() > 1000


def scores_of(case):
    q, k, _ = (x.astype(float) for x in make_inputs(case))
    return q @ k.swapaxes(-1, -2) * case.scores["scale"]


def test_values_are_what_they_claim():
    kind = {v: Case("float32", 80, 90, values=v) for v in get_args(Values)}
    assert 900 < abs(scores_of(kind["large"])).max() < 1600
    assert abs(numpy.mean(make_inputs(kind["offset"])[1]) - 0.5) < 0.05
    assert abs(numpy.mean(make_inputs(kind["normal"])[1])) < 0.05
    assert all(numpy.ptp(x) == 0 for x in make_inputs(kind["constant"]))
    one_hot = scores_of(kind["one_hot"])[0, 0]
    i, j = numpy.indices(one_hot.shape)
    assert numpy.allclose(one_hot, numpy.where(i % 64 == j % 64, 40, 0))


def test_options_are_those_of_attention():
    assert Case("float16", 3, 5, return_lse=False).options == {}
    case = Case("float32", 3, 5, causal="top_left", window=(2, None), softcap=5.0, scale=0.0, precision="tf32")
    assert case.options == {
        "causal": "top_left",
        "window": (2, None),
        "softcap": 5.0,
        "scale": 0.0,
        "return_lse": True,
        "precision": "tf32",
    }


@pytest.mark.parametrize("lengths", [(5, 8), (8, 5), (6, 6)])
@pytest.mark.parametrize("window", [None, (1, 2), (None, 1), (2, None), (0, 0)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_scores_state_the_mask_and_flops_count_it(causal, window, lengths):
    case = Case("float16", *lengths, dim=24, dim_v=8, heads_q=3, batch=(2,), causal=causal, window=window)
    seen = numpy.ones(lengths, dtype=bool)
    for i, j in numpy.ndindex(lengths):
        distance = j - i if causal == "top_left" else (j - case.len_kv) - (i - case.len_q)
        left, right = window or (None, None)
        seen[i, j] = (
            (left is None or distance >= -left)
            and (right is None or distance <= right)
            and (not causal or distance <= 0)
        )
    scores = case.scores
    assert numpy.array_equal(oracle.sees(*lengths, scores["first_key"], scores["last_key"]), seen)
    assert scores["scale"] == 1 / math.sqrt(24)
    assert case.flops == 2 * (24 + 8) * seen.sum() * 3 * 2


def test_attention_reads_every_case_the_same_way():
    for case in (case for case in full_cases() if not case.heavy and not case.of_pairs):
        problem = make_problem(*map(arrays.layout, make_inputs(case)), Options(**case.options, backend="numpy"))
        scores = case.scores
        computed_in = numpy.float64 if case.dtype == "float64" else numpy.float32
        asked = [number and float(computed_in(number)) for number in (scores["scale"], case.softcap)]
        assert [problem.scale, problem.softcap, problem.precision] == [*asked, case.precision]
        stated = oracle.sees(case.len_q, case.len_kv, scores["first_key"], scores["last_key"], scores["prefix"])
        assert numpy.array_equal(problem.mask.visible(0, case.len_q, 0, case.len_kv), stated), case
        assert problem.flops == case.flops
