"""Terms that are linear on either side of a diagonal, as that of a distance is, executed on the host against the oracle."""

from itertools import product

import numpy
import pytest
import ragged
from expressions import DECLARED
from ragged import Ragged
from score_kernels import DTYPES, close, judged
from thinned import quick, thinned

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.judge.oracle import naive, oracle
from cupy_flash.machine import host
from cupy_flash.plan import backward as backward_plan
from cupy_flash.plan.linear import bent_at
from cupy_flash.problem.expression.entry import score_expression

HEADS, HEADS_KV = 4, 2
SLOPES = numpy.array([[1.0, 0.25, -0.5, 2.0**-8], [0.0, 1.0, 0.03, 3.0]], numpy.float32)  # of each head of two batch elements
WHERE = {"backend": "host", "arch": "90a"}
SINKS = numpy.array([0.5, -1.0, 3.0, 0.0], numpy.float32)
FAR = "slope[h] * abs(q_idx - kv_idx)"


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def term(text):
    return score_expression(f"{text} + 0 * score", DECLARED).tree.args[0]


@pytest.mark.parametrize(
    "text, before, per_key, bend, diagonal",
    [
        (f"-{FAR}", "-slope[h] * float(q_idx - kv_idx)", "slope[h]", "-slope[h] - slope[h]", "0"),
        ("3 * abs(kv_idx - q_idx)", "float(3 * -(kv_idx - q_idx))", "-3.0", "6.0", "0"),
        ("abs(kv_idx - q_idx + 7) / 2.0", "float(-(kv_idx - q_idx + 7)) / 2.0", "-0.5", "1.0", "-7"),
        ("abs(q_idx + kv_len - q_len - kv_idx) + 5.0 * kv_idx", None, "4.0", "2.0", "kv_len - q_len"),
        ("abs(q_idx - kv_idx) - (q_idx - kv_idx)", "float(q_idx - kv_idx - (q_idx - kv_idx))", None, None, None),
    ],
)
def test_parts(text, before, per_key, bend, diagonal):
    found = bent_at(term(text))
    if per_key is None:  # before the diagonal no key changes it
        assert found is None
        return
    assert before is None or str(found.before) == before
    assert tuple(map(str, (found.steps.per_key, found.bend, found.diagonal))) == (per_key, bend, diagonal)


@pytest.mark.parametrize(
    "text",
    [
        "slope[h] * (q_idx - kv_idx)",
        "abs(q_idx - kv_idx) + abs(q_idx - kv_idx + 1)",
        "abs(2 * q_idx - kv_idx)",
        "abs(q_idx + kv_idx)",
        "abs(q_idx - kv_idx) * kv_idx",
        "abs(q_idx - kv_idx) * abs(q_idx - kv_idx)",
        "abs(q_idx - kv_idx + h)",
        "abs(slope[h] * (q_idx - kv_idx))",
        "abs(q_idx)",
    ],
)
def test_what_does_not_bend_at_a_diagonal_alone(text):
    assert bent_at(term(text)) is None


@pytest.fixture
def bent(planned_anew, monkeypatch):
    """Gradients are computed so however few queries there are, and whatever it costs."""
    monkeypatch.setattr(backward_plan, "LEAST_BENT", 0)
    monkeypatch.setattr(backward_plan, "WIDEST_BENT", 256)


TEXTS = {  # and what is added, by the places of a pair
    "score - slope[b, h] * abs(q_idx + kv_len - q_len - kv_idx)": lambda q, k, more: -abs(q + more - k),
    "score + slope[b, h] * (abs(kv_idx - q_idx - 70) + 2 * q_idx)": lambda q, k, more: abs(k - q - 70) + 2 * q,
    "score + (3 * kv_idx - abs(q_idx - kv_idx)) * slope[b, h] / 4": lambda q, k, more: (3 * k - abs(q - k)) / 4,
}
MASKS = {"full": ({}, {}), "window": ({"window": (150, 190)}, {"first_key": -150, "last_key": 190})}
SHAPES = [("bfloat16", 40, 300, 417), ("float16", 128, 200, 330), ("bfloat16", 160, 250, 140), ("float16", 256, 130, 200)]
CASES = list(product(SHAPES, TEXTS, MASKS))


def normal(dtype, len_q, len_kv, dim):
    rng = numpy.random.default_rng(dim)
    shapes = (HEADS, len_q), (HEADS_KV, len_kv), (HEADS_KV, len_kv), (HEADS, len_q)
    return [rng.standard_normal((2, *rows, dim)).astype(DTYPES[dtype]) for rows in shapes]


@pytest.mark.release  # ALiBi, which is one of them, and sequences ask it as well
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expressions(case, schedule, bent):
    (dtype, dim, len_q, len_kv), text, mask = case
    options, hand = MASKS[mask]
    hand = {name: key + len_kv - len_q for name, key in hand.items()}
    far = TEXTS[text](numpy.arange(len_q)[:, None], numpy.arange(len_kv), len_kv - len_q)
    hand |= {"bias": SLOPES.astype(float)[:, :, None, None] * far, "sinks": SINKS}
    options = options | {"score": text, "arrays": {"slope": SLOPES}, "sinks": SINKS}
    kernels = judged(dtype, options, hand, WHERE, inputs_given=normal(dtype, len_q, len_kv, dim))
    taken = [mask == "full" or dim > 64, mask == "full"]
    assert [kernel.config.SCORES for kernel in kernels] == ["PLUS_LINEAR" if so else "PLUS_TERM" for so in taken]
    assert [kernel.expressions.bends for kernel in kernels] == taken
    assert (mask == "full") == kernels[0].config.FROM_LAST


BESIDE = {
    "nothing": ({}, {}),
    "documents": ({"mask": "q_idx // 90 == kv_idx // 90"}, {"seen": numpy.arange(300)[:, None] // 90 == numpy.arange(331) // 90}),
    "prefix": ({"window": (None, 40), "prefix": 60}, {"last_key": 40 + 31, "prefix": 60}),
}


@pytest.mark.parametrize("beside", quick(BESIDE, "nothing"))
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.release)])
def test_alibi(beside, dim, schedule, bent):
    options, hand = BESIDE[beside]
    slopes = abs(SLOPES)
    forward, backward = judged(
        "bfloat16", options | {"alibi_slopes": slopes}, hand | {"alibi_slopes": slopes}, WHERE, wrt="alibi_slopes",
        inputs_given=normal("bfloat16", 300, 331, dim), deterministic=True,
    )  # fmt: skip
    assert forward.expressions.bends == (dim > 64 or beside != "prefix") and backward.expressions.bends == (beside == "nothing")


@pytest.mark.release  # test_hopper_backward.py has this tile, and others here have such terms
def test_queries_whose_gradients_go_through_shared_memory(staged, schedule, bent):
    slopes, given = abs(SLOPES), normal("bfloat16", 300, 331, 64)  # whose forward is that of `test_alibi`
    _, backward = judged("bfloat16", {"alibi_slopes": slopes}, {"alibi_slopes": slopes}, WHERE, inputs_given=given)
    assert backward.expressions.bends and backward.config.TMA_REDUCE_DQ


LENS = [(300, 300), (1, 200), (150, 40), (0, 7), (64, 64), (90, 0), (257, 700)]


@pytest.mark.release  # other terms of sequences are quick, as slopes in test_hopper_gradients_of_lengths.py
@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sequences(kind, dim, schedule):
    sequences, slopes = Ragged(LENS, (HEADS, HEADS_KV), dim), numpy.arange(1, HEADS + 1) / 8
    text = "score - (h + 1) / 8 * abs(q_idx + kv_len - q_len - kv_idx)"
    found = ragged.forward(sequences, kind, kind, "90a", score=text)
    for part, (out, lse) in zip(sequences.parts, found):
        q, k, v = part["q"], part["k"], part["v"]
        if q.size and k.size:
            hand = {"scale": dim**-0.5, "alibi_slopes": slopes}
            (exact, exact_lse), (plain, _) = oracle(q, k, v, **hand), naive(q, k, v, **hand)
            largest = abs(q.astype(float)).sum(-1).max() + slopes.max() * max(q.shape[1], k.shape[1])
            close(out, exact, plain, 2, float(numpy.finfo(q.dtype).eps), largest)
            assert abs(lse - exact_lse).max() <= 8 * 2**-24 * largest
    order = [6, 0, 3]
    alone = ragged.forward(sequences.some(*order), kind, kind, "90a", turn=1, score=text)
    ragged.assert_same_bits(alone, [found[i] for i in order])


@pytest.mark.release  # test_linear_terms.py asks it of a term with one slope
def test_tiles_are_computed_once(schedule):
    """The tile at the diagonal comes first: of others no score is larger by as much as P may be before its maximum is found."""
    q, k, v, _ = normal("float16", 700, 700, 64)
    flops = []
    for rate in (0.05, 2.0**-30):  # the second one raises nothing
        options = {"score": "score - rate * abs(q_idx - kv_idx)", "arrays": {"rate": numpy.float32(rate)}}
        plan = plan_attention(q, k, v, **WHERE, **options)
        assert plan.kernel.config.FROM_LAST and "the keys at the diagonal first" in " ".join(plan.kernel.reasons)
        flops.append(plan.counted(q, k, v, arrays=options["arrays"])[1].flops)
    assert flops[0] == flops[1]


@pytest.mark.release  # test_linear_terms.py asks it of a term with one slope
@pytest.mark.parametrize("slope", thinned([1.0, 0.01]))
def test_blocks_that_share_a_query_tile(slope, schedule):
    """Of three query tiles two blocks share the last; a split begins with its first keys."""
    rng = numpy.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, heads, rows, 64)).astype(numpy.float16) for heads, rows in ((3, 100), (1, 2600), (1, 2600)))
    slopes = numpy.float32(slope) * numpy.array([1, 0.5, 0.25], numpy.float32)
    plan = plan_attention(q, k, v, return_lse=True, alibi_slopes=slopes, **WHERE)
    assert plan.kernel.config.SPLIT_KV and plan.kernel.config.FROM_LAST and plan.kernel.expressions.bends
    out, lse = plan(q, k, v, alibi_slopes=slopes)
    hand = {"scale": 1 / 8, "alibi_slopes": slopes}
    (exact, exact_lse), (plain, _) = oracle(q, k, v, **hand), naive(q, k, v, **hand)
    largest = abs(q.astype(float)).sum(-1).max() + slopes.max() * 2600
    close(out, exact, plain, 2, float(numpy.finfo(q.dtype).eps), largest)
    assert abs(lse - exact_lse).max() <= 8 * 2**-24 * largest


ANOTHER = {"softcap": {"softcap": 5.0}, "bias": {"bias": numpy.zeros((HEADS, 200, 200), numpy.float16)}}


@pytest.mark.parametrize("options", ANOTHER.values(), ids=ANOTHER)
def test_where_each_score_takes_its_term(options):
    q, k, *_ = normal("float16", 200, 200, 64)
    plan = plan_attention(q, k, k, alibi_slopes=SLOPES, kernel="fwd_hopper", **WHERE, **options)
    assert plan.kernel.config.SCORES in ("PLUS_TERM", "EXPRESSION")


def test_where_gradients_gain(planned_anew):
    """Elsewhere, in the backward, each score takes its term."""

    def bends(dim, len_q, **options):
        q, lse = numpy.zeros((4, len_q, dim), numpy.float16), numpy.zeros((4, len_q), numpy.float32)
        plan = plan_attention_backward(q, q, q, q, q, lse, alibi_slopes=SINKS, **WHERE, **options)
        return plan.kernel.expressions.bends

    assert bends(64, 200) and bends(128, 2048)
    assert not bends(128, 1024) and not bends(160, 4096)
    assert not bends(64, 200, window=(9, 9)) and not bends(64, 200, dropout=0.1, seed=0)
    assert not bends(64, 200, mask="kv_idx % 3 == 0")
