"""Terms that are linear in the places of a pair, which kernels for sm_90a take apart, executed on the host against the oracle."""

from itertools import product

import numpy
import pytest
from expressions import DECLARED
from score_kernels import DTYPES, judged
from thinned import thinned

from cupy_flash import plan_attention
from cupy_flash.judge.oracle import oracle
from cupy_flash.machine import host
from cupy_flash.plan.linear import steps_of, without_abs
from cupy_flash.problem.expression.entry import score_expression
from cupy_flash.problem.mask import Mask

HEADS, HEADS_KV, DIM = 4, 2, 40
SLOPES = numpy.array([[1.0, 0.25, -0.5, 2.0**-8], [0.0, 1.0, 0.03, 3.0]], numpy.float32)  # of each head of two batch elements
WHERE = {"backend": "host", "arch": "90a"}
TEXTS = {  # and how far each is, by the places of a pair
    "score + slope[b, h] * kv_idx": lambda q, k, more: k,
    "score + slope[b, h] * (kv_idx - q_idx)": lambda q, k, more: k - q,
    "score - (2 * q_idx - kv_idx + 7) * slope[b, h] / 4": lambda q, k, more: (k - 2 * q - 7) / 4,
    "score - slope[b, h] * abs(q_idx + kv_len - q_len - kv_idx)": lambda q, k, more: -abs(q + more - k),
}
MASKS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": 0}),
    "window": ({"window": (40, 0)}, {"first_key": -40, "last_key": 0}),
    "to the right": ({"window": (9, 20)}, {"first_key": -9, "last_key": 20}),
}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def inputs(dtype, len_q, len_kv, dim=DIM):
    rng = numpy.random.default_rng(3)
    shapes = (HEADS, len_q), (HEADS_KV, len_kv), (HEADS_KV, len_kv), (HEADS, len_q)
    return [rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


def masked(mask, len_q, len_kv):
    """What the mask is called, and what it means."""
    options, hand = MASKS[mask]
    return dict(options), {name: key + len_kv - len_q for name, key in hand.items()}


def check(dtype, options, hand, len_q, len_kv, dim=DIM, linear=True, **more):
    options = {"sinks": numpy.array([0.5, -1.0, 3.0, 0.0], numpy.float32)} | options
    hand = {"sinks": options["sinks"]} | hand
    kernels = judged(dtype, options, hand, WHERE, inputs_given=inputs(dtype, len_q, len_kv, dim), **more)
    assert kernels[0].file == "fwd_hopper" and kernels[1].file in ("bwd_hopper", "bwd_hopper_wide")
    assert [kernel.config.SCORES for kernel in kernels] == ["PLUS_LINEAR" if linear else "PLUS_TERM"] * 2
    return kernels


@pytest.mark.release  # ALiBi, which is one of them, and splits ask it as well
@pytest.mark.parametrize("asked", list(product(TEXTS, MASKS)), ids=", ".join)
def test_expressions(asked, schedule):
    text, mask = asked
    options, hand = masked(mask, 141, 203)
    q, k = numpy.arange(141.0)[:, None], numpy.arange(203.0)
    term = SLOPES.astype(float)[:, :, None, None] * TEXTS[text](q, k, 203 - 141)
    options |= {"score": text, "arrays": {"slope": SLOPES}}
    check("float16", options, hand | {"bias": term}, 141, 203, linear="abs" not in text or mask != "to the right")


SHAPES = [("float16", DIM, 150, 90), ("bfloat16", 64, 75, 300), ("float16", 128, 150, 90), ("bfloat16", 160, 130, 130)]


@pytest.mark.parametrize("shape", thinned(SHAPES, keep=4), ids=str)
def test_alibi(shape, schedule):
    dtype, dim, len_q, len_kv = shape
    options, hand = masked("causal", len_q, len_kv)  # with more queries than keys, the first ones see nothing
    slopes = abs(SLOPES)
    options, hand = options | {"alibi_slopes": slopes}, hand | {"alibi_slopes": slopes}
    check(dtype, options, hand, len_q, len_kv, dim, wrt="alibi_slopes", deterministic=True)


@pytest.mark.release
def test_places_far_apart(schedule):
    # Near the last key of 20,000, slopes of 1 make terms that float32 holds to 2^-10 only; distances stay small.
    q, k, v = (x[:1] for x in inputs("float16", 70, 20_000)[:3])
    slopes = numpy.ones(HEADS, numpy.float32)
    plan = plan_attention(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True, **WHERE)
    out, lse = plan(q, k, v, alibi_slopes=slopes)
    near = slice(20_000 - 256, None)
    exact, exact_lse = oracle(q, k[:, :, near], v[:, :, near], scale=DIM**-0.5, alibi_slopes=slopes, last_key=256 - 70)
    assert plan.kernel.config.SCORES == "PLUS_LINEAR" and plan.kernel.config.SPLIT_KV and plan.kernel.config.FROM_LAST
    assert abs(lse - exact_lse).max() <= 2e-5 and abs(out - exact).max() <= 2e-3


@pytest.mark.parametrize(
    "options",
    [{"scale": -0.5}, {"scale": 2.0**-30}, {"bias": numpy.zeros((HEADS, 64, 64), numpy.float16)}],
    ids=str,
)
def test_where_each_score_takes_its_term(options):
    q, k, *_ = inputs("float16", 64, 64)
    plan = plan_attention(q, k, k, causal=True, alibi_slopes=SLOPES, **WHERE, **options)
    assert plan.kernel.config.SCORES == "PLUS_TERM"


@pytest.mark.parametrize(
    "text, mask, expected",
    [
        ("score - slope[h] * abs(q_idx - kv_idx)", Mask(9, 9, right=0), "score - slope[h] * (q_idx - kv_idx)"),
        ("score - slope[h] * abs(kv_idx - q_idx)", Mask(9, 9, right=0), "score - slope[h] * -(kv_idx - q_idx)"),
        ("score - abs(q_idx - kv_idx)", Mask(9, 9, right=1), "score - float(abs(q_idx - kv_idx))"),
        ("score - abs(q_idx + kv_len - q_len - kv_idx)", Mask(9, 5, right=-4), "score - float(q_idx + kv_len - q_len - kv_idx)"),
        ("score - abs(q_idx - kv_idx)", Mask(9, 9, right=0, prefix=2), "score - float(abs(q_idx - kv_idx))"),
        ("score - abs(q_idx - kv_idx)", Mask(9, 9, left=2), "score - float(-(q_idx - kv_idx))"),
    ],
)
def test_a_distance_of_one_sign_has_no_abs(text, mask, expected):
    assert without_abs(score_expression(text, DECLARED).tree, mask) == score_expression(expected, DECLARED).tree


@pytest.mark.parametrize(
    "text, steps",
    [
        ("slope[h] * (kv_idx - q_idx) / 2", ("slope[h] / 2.0", "-slope[h] / 2.0")),
        ("3 * kv_idx - 5.0", ("3.0", "0.0")),
        ("slope[h] * q_idx", None),
        ("slope[h] + q_len", None),
        ("slope[kv_idx % 2] * kv_idx", None),
        ("kv_idx * kv_idx", None),
        ("kv_idx // 2", None),
    ],
)
def test_steps(text, steps):
    found = steps_of(score_expression(f"{text} + 0 * score", DECLARED).tree.args[0])
    assert (found and (str(found.per_key), str(found.per_query))) == steps


LENGTHS = [(150, 417), pytest.param(300, 131, marks=pytest.mark.release)]


@pytest.mark.parametrize("len_q, len_kv", LENGTHS)
def test_keys_that_alibi_makes_larger_come_first(schedule, len_q, len_kv):
    options, hand = masked("causal", len_q, len_kv)
    options |= {"alibi_slopes": SLOPES}  # of either sign
    forward, backward = check("float16", options, hand | {"alibi_slopes": SLOPES}, len_q, len_kv)
    assert forward.config.FROM_LAST and not backward.config.FROM_LAST
    assert "the last keys first where a linear term makes scores larger towards them" in forward.reasons


BANDS = [{"causal": True}, {"window": (150, 60)}, {"causal": True, "prefix": 33}]


@pytest.mark.release  # the next asks it of splits as well
@pytest.mark.parametrize("len_q, len_kv", LENGTHS)
@pytest.mark.parametrize("options", thinned(BANDS, keep=3, first=1), ids=str)
def test_no_tile_is_computed_twice_whichever_way_a_term_rises(options, len_q, len_kv):
    """From one key tile to the next it rises by more than P may become before its maximum is found."""
    q, k, v, _ = inputs("float16", len_q, len_kv)
    for sign in (1, -1):
        products = []
        for slope in (2.0 * sign, 2.0**-30 * sign):  # the second one raises nothing, and keys come in the same order
            plan = plan_attention(q, k, v, **WHERE, score="score + slope * (kv_idx - q_idx)", arrays={"slope": slope}, **options)
            assert plan.kernel.file == "fwd_hopper" and plan.kernel.config.FROM_LAST
            products.append(plan.counted(q, k, v, arrays={"slope": slope})[1].flops)
        assert products[0] == products[1]


@pytest.mark.parametrize("head", [0, pytest.param(2, marks=pytest.mark.release)])
@pytest.mark.parametrize("options", thinned([{}, {"causal": True}], first=1), ids=str)
def test_a_split_begins_with_the_keys_that_are_larger_as_well(schedule, options, head):
    """Of three query tiles two blocks share the last, whose head has the slope that is named."""
    q, k, v = (x[:1, :heads] for x, heads in zip(inputs("float16", 100, 2600), (3, 1, 1)))
    far = numpy.arange(2600.0) - numpy.arange(100.0)[:, None]
    hand = {"last_key": 2500} if options else {}
    products = []
    for rate in (1.0, 2.0**-30):
        slopes = rate * SLOPES[0, [1, 2 - head, head]]
        asked = {"score": "score + slope[h] * (kv_idx - q_idx)", "arrays": {"slope": slopes}}
        plan = plan_attention(q, k, v, return_lse=True, **WHERE, **asked, **options)
        assert plan.kernel.config.SPLIT_KV and plan.kernel.config.FROM_LAST
        (out, lse), moved = plan.counted(q, k, v, arrays={"slope": slopes})
        exact, exact_lse = oracle(q, k, v, scale=DIM**-0.5, bias=slopes[:, None, None] * far, **hand)
        assert abs(lse - exact_lse).max() <= 2**-22 * max(abs(exact_lse).max(), 1) and abs(out - exact).max() <= 2e-3
        products.append(moved.flops)
    assert products[0] == products[1]


@pytest.mark.parametrize("options", [{"mask": "kv_idx % 3 == 0"}, {"score": "score + kv_idx % 3", "arrays": {}}], ids=str)
def test_keys_come_in_order_in_lists_and_where_no_term_is_linear(options):
    q, k, v, _ = inputs("float16", 90, 100)
    kernel = plan_attention(q, k, v, causal=True, alibi_slopes=SLOPES, **options, **WHERE).kernel
    assert kernel.file == "fwd_hopper" and not kernel.config.FROM_LAST
