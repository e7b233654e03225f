"""Functions as expressions."""

import math

import numpy
import pytest
from test_expression import mask, score

from cupy_flash.problem.expression.trace import clip, exp, float_, int_, maximum, minimum, rsqrt, sigmoid, where

OUTSIDE = numpy.arange(4.0)
TRACED = [
    ("score + slope[h] * (kv_idx - q_idx)", lambda score, q_idx, kv_idx, slope, h: score + slope[h] * (kv_idx - q_idx)),
    ("bias[h, q_idx - 1, 2] / gain - 1", lambda bias, h, q_idx, gain: bias[h, q_idx - 1, 2] / gain - 1),
    ("1 - 2 * score // 3 % 2.5 ** gain", lambda gain, score: 1 - 2 * score // 3 % 2.5**gain),
    ("where(h < 2, score, -inf)", lambda score, h: where(h < 2, score, -numpy.inf)),
    ("where(3 > h, score, 0)", lambda score, h: numpy.where(3 > h, score, 0)),  # noqa: SIM300
    ("min(score, 1, h) + max(h, b)", lambda score, h, b: minimum(score, 1, h) + maximum(h, b)),
    ("min(score, 1) + max(h, b)", lambda score, h, b: numpy.minimum(score, 1) + numpy.maximum(h, b)),
    ("clip(score, -1, 1) * clip(h, 0, b)", lambda score, h, b: clip(score, -1, 1) * numpy.clip(h, 0, b)),
    ("tanh(score / 30) * 30", lambda score: numpy.tanh(score / 30) * 30),
    ("exp(h) + rsqrt(score) + sigmoid(h)", lambda score, h: exp(h) + rsqrt(score) + sigmoid(h)),
    ("abs(-score) + abs(+h)", lambda score, h: abs(-score) + numpy.abs(+h)),
    ("int(score) + float(h) + 1", lambda score, h: int_(score) + float_(h) + True),
    ("2 * score + 0.5", lambda score: numpy.float32(2) * score + numpy.array(0.5)),
    ("(h & 1 | b << 2) ^ ~h >> 1", lambda h, b: (h & 1 | b << 2) ^ ~h >> 1),
    ("3 & h | 4 << h ^ 9 >> b", lambda h, b: 3 & h | 4 << h ^ 9 >> b),
    ("1.5", lambda: 1.5),
    ("score * 2", lambda score, scale=2: score * scale),
    ("gain", lambda *, gain: gain),
]


@pytest.mark.parametrize("text, function", TRACED, ids=[text for text, _ in TRACED])
def test_a_function_is_its_text(text, function):
    assert score(function) == score(text)


def test_a_function_is_its_text_as_a_mask():
    assert mask(lambda doc, q_idx, kv_idx: doc[q_idx] == doc[kv_idx]) == mask("doc[q_idx] == doc[kv_idx]")
    assert mask(lambda h, seen: (h > 1) & ~seen[h, 0] | (h >= 0) ^ (h != 3)) == mask(
        "h > 1 and not seen[h, 0] or (h >= 0) ^ (h != 3)"
    )
    assert mask(lambda h: numpy.bool_(True)) == mask("True")


def squares(score):
    for _ in range(60):
        score = score * score
    return score


@pytest.mark.parametrize(
    "function, error, said",
    [
        (lambda score: 1 if score > 0 else 2, TypeError, "expected numpy.where.c, a, b. for 'if', & | ~ for .*, got bool"),
        (lambda h: 0 < h < 2, TypeError, "a <= b. & .b < c. for a <= b < c, got bool"),
        (lambda score, h: min(score, h), TypeError, "numpy.minimum and numpy.maximum for min.. and max.., .* got bool"),
        (lambda h, b: h < 1 and b < 1, TypeError, "& | ~ for 'and', 'or', 'not', .* got bool"),
        (lambda h, b: not h < 1, TypeError, "& | ~ for 'and', 'or', 'not', .* got bool"),
        (lambda score: None, TypeError, "expected a function that returns an expression, got one that returns None"),
        (lambda slope: slope, TypeError, "got one that returns slope"),
        (lambda score: score + "1", TypeError, "expected numbers, parameters and what is made of them, got '1'"),
        (lambda score: score + numpy.ones(3), TypeError, r"got array\(\[1., 1., 1.\]\)"),
        (lambda score: numpy.arctan(score), TypeError, "expected one of the functions of the language, got numpy.arctan"),
        (lambda score: numpy.add.reduce(score), TypeError, "got numpy.add"),
        (lambda score: numpy.mean(score), TypeError, "got numpy.mean"),
        (lambda score, h: score * OUTSIDE[h], TypeError, "arrays={'t': t}, got an array or a list from outside"),
        (lambda score, h: score * [1, 2][h], TypeError, "arrays={'t': t}, got an array or a list from outside"),
        (lambda score, h, t=OUTSIDE: score * t[h], TypeError, "arrays={'t': t}, got an array or a list from outside"),
        (lambda score: math.exp(score), TypeError, "expected numpy.exp for math.exp, .* got float.. of an expression"),
        (lambda score: int(score) * 1.0, TypeError, "expected int_.. for int.., got int.. of an expression"),
        (min, TypeError, "expected a function whose parameters have names, got <built-in function min>"),
        (lambda *names: 1, ValueError, r"expected a function whose parameters have names, got '\*names'"),
        (lambda slop: 1, ValueError, r"got 'slop' \(did you mean 'slope'\?\)"),
        (lambda score, slope: score + slope, ValueError, "expected 1 index of 'slope', got none"),
        (lambda slope, h: slope[h, 1], ValueError, "expected 1 index of 'slope', got 2"),
        (lambda slope, score: slope[score], ValueError, "expected an int as an index of 'slope', got a float"),
        (lambda score: score & 1, ValueError, "expected an int for '&', got a float"),
        (lambda h: h >> 32, ValueError, "expected 0 to 31 bits for '>>', got 32"),
        (lambda h: h << -1, ValueError, "31 bits for '<<', got -1"),
        (lambda score: score + 2**40, ValueError, "expected an int of 32 bits"),
        (lambda score: score * float("nan"), ValueError, "expected a number, got NaN"),
        (squares, ValueError, "expected at most 1000 nodes, got 1023"),
    ],
)
def test_refused_functions(function, error, said):
    with pytest.raises(error, match=f"score: .*({said})"):
        score(function)


@pytest.mark.parametrize("use", [iter, len, list, hash, int, float, range, lambda x: x[0], lambda x: x.real])
def test_what_a_value_cannot_do_is_pythons_to_say(use):
    with pytest.raises((TypeError, AttributeError)):
        score(lambda score: use(score))
    with pytest.raises(TypeError):
        score(lambda slope: iter(slope))


def test_what_a_function_raises_propagates():
    def wrong(score):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        score(wrong)
