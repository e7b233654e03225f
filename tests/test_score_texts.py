"""Random texts as scores and masks of attention: a refusal of ours, or what Python makes of the same text."""

import random
import re

import numpy
import pytest
from expressions import TEXTS
from hand_masks import MASKS
from hand_scores import SCORES
from test_expression_values import PYTHON, Clipped

from cupy_flash import attention, attention_backward, plan_attention

BATCH, HEADS, HEADS_KV, LENGTH = 2, 4, 2, 3
ARRAYS = {
    "slope": numpy.array([0.5, -1.25, 2.0, 0.75]),
    "doc": numpy.array([3, -1, 1]),
    "table": numpy.array([[0.25, -2.0, 1.0], [4.0, -0.5, 0.0]]),
    "seen": numpy.array([[True, False, True], [False, True, True], [True, True, False]]),
    "gain": numpy.array(0.625),
    "reach": numpy.array(2),
}
# One dimension and keys of one: a score is the number in q. It is different in each row, and exact in float64.
Q = numpy.arange(-12.0, 12.0).reshape(BATCH, HEADS, LENGTH, 1) / 8
K = numpy.ones((BATCH, HEADS_KV, LENGTH, 1))
# Of a row that sees these keys the sum of all exp says which, since each has another power of two.
POWERS = numpy.log(2.0) * numpy.arange(LENGTH)[None]
NAMES = {**PYTHON, "floor": lambda x: float(x // 1), "inf": float("inf")}
NAMES |= {name: Clipped(x) if x.ndim else x.item() for name, x in ARRAYS.items()}


# Texts


# Rules: `K` stands for a part of the kind itself, `X` for a number, `I`, `F` and `B` for an int, a float and a bool.
NUMBERS = (
    "K + X",
    "K - X",
    "K * X",
    "(K) // (X)",
    "K % (X)",
    "min(K, X)",
    "max(X, K, K)",
    "abs(K)",
    "-K",
    "+K",
    "(K) ** 2",
    "(K) ** 3",
)
NUMBERS += ("where(B, K, X)", "K if B else K", "(K if B else X) * K")
RULES = {
    "int": (
        *NUMBERS,
        "(I) & (I)",
        "(I) | I",
        "(I) ^ (I)",
        "~(I)",
        "(I) << 2",
        "(I) >> 1",
        "int(F)",
        "doc[I]",
        "int(B)",
        "clip(I, -1, I)",
    ),
    "float": (
        *NUMBERS,
        *("tanh(X)", "sigmoid(X)", "sin(F)", "cos(X)", "floor(F)", "float(I)", "exp(tanh(X))", "exp2(sin(X))", "rsqrt(2 + abs(X))"),
        *(
            "sqrt(abs(X))",
            "log(abs(X))",
            "log2(1 + abs(X))",
            "K / (X)",
            "slope[I]",
            "table[I, I]",
            "clip(K, -1, X)",
            "2.0 ** tanh(X)",
        ),
    ),
    "bool": (
        *("I < I", "I <= I", "I > I", "I >= I", "I == I", "(I) != (I)", "I < I <= F", "0 <= I != I", "F < I", "(B) == (B)"),
        *(
            "(B) and B",
            "(B) or (B)",
            "(B) & (B)",
            "(B) | (B)",
            "(B) ^ (B)",
            "not (B)",
            "B and (B) or B",
            "seen[I, I]",
            "B if B else (B)",
        ),
    ),
}
LEAVES = {
    "int": ("b", "h", "h_kv", "q_idx", "kv_idx", "q_len", "kv_len", "reach", "doc[kv_idx]", "0", "1", "-2", "3", "7", "True"),
    "float": ("score", "score", "score", "gain", "slope[h]", "table[b, kv_idx]", "0.5", "-1.75", "2.", ".125", "1e1", "3"),
    "bool": ("True", "False", "q_idx >= kv_idx", "h == 1", "seen[q_idx, kv_idx]"),
}


class Grammar:
    """Texts of the language by its rules. One part in some tens breaks one, since it is of another kind than the rest expects."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, option: str) -> str:
        kind = "bool" if option == "mask" else self.random.choice(("float", "float", "int"))
        return self.of(kind, self.random.randrange(1, 5), option)

    def of(self, kind: str, depth: int, option: str) -> str:
        draw = self.random
        kind = draw.choice(("bool", "int", "float")) if draw.random() < 0.02 else kind
        if depth == 0 or draw.random() < 0.1:
            leaf = draw.choice(LEAVES[kind])
            return "gain" if leaf == "score" and option == "mask" else leaf
        numbers = draw.choice(("int", "float")) if kind == "float" else "int"
        kinds = {"K": kind, "X": numbers, "I": "int", "F": "float", "B": "bool"}

        def part(found: re.Match) -> str:
            return draw.choice(("{}", "({})", "({})", " ( {} ) ")).format(self.of(kinds[found[0]], depth - 1, option))

        return re.sub(r"\b[KXIFB]\b", part, draw.choice(RULES[kind]))


PIECES = [
    *"()[]{}+-*/%~^&|<>=,.:;@!#'\"\\ \n\r\t\f\0é",
    "\U0001d4b3",
    "\ud800",
    "\ufeff",
    "0",
    "1",
    "2.5",
    "1e999",
    "0x1f",
    "1_0",
    "9" * 20,
]
PIECES += [
    "score",
    "slope[h]",
    "doc",
    "gain",
    "kv_idx",
    "b",
    "not ",
    " and ",
    " or ",
    " if ",
    " else ",
    "lambda ",
    ":=",
    "**",
    "//",
    "<<",
]
PIECES += [
    "exp(",
    "where(",
    "min(",
    "int(",
    "inf",
    "-inf",
    "f'{",
    "1j",
    "yield ",
    "None",
    "__import__('os')",
    "().__class__",
    "\\\n",
]


def random_text(draw: random.Random, grammar: Grammar, option: str) -> str:
    """One in two by the grammar, three in eight of these or of known ones with mistakes, the rest pieces in any order."""
    kind = draw.randrange(8)
    if kind == 7:
        return "".join(draw.choices(PIECES, k=draw.randrange(14)))
    if kind < 4:
        return grammar.text(option)
    known = [x.text for x in (MASKS if option == "mask" else SCORES)] + TEXTS
    text = grammar.text(option) if draw.random() < 0.5 else draw.choice(known)
    for _ in range(draw.choice((1, 1, 2, 3))):
        at, cut = draw.randrange(len(text) + 1), draw.choice((0, 0, 1, 4))
        piece = draw.choice(("", *PIECES, text[: draw.randrange(9)]))
        text = text[:at] + piece + text[at + cut :]
    return text


# What they are worth


def of_scores(text: str) -> numpy.ndarray:
    """What the score becomes at key i for query i, which is all that it sees: the log-sum-exp. There are gradients as well."""
    options = {"scale": 1.0, "window": (0, 0), "score": text, "arrays": read_by(text)}
    out, lse = attention(Q, K, K, return_lse=True, **options)
    wrt = plan_attention(Q, K, K, **options).problem.scores.gradients
    grads = attention_backward(K.repeat(2, axis=1), Q, K, K, out, lse, dlse=numpy.ones_like(lse), wrt=wrt, **options)
    assert {name: x.shape for name, x in grads.darrays.items()} == {name: ARRAYS[name].shape for name in wrt}
    return lse


def of_masks(text: str) -> numpy.ndarray:
    _, lse = attention(Q, K, K, scale=0.0, bias=POWERS, return_lse=True, mask=text, arrays=read_by(text))
    bits = numpy.rint(numpy.exp(lse)).astype(int)
    return bits[..., None] >> numpy.arange(LENGTH) & 1 == 1


def read_by(text: str) -> dict[str, numpy.ndarray]:
    """The arrays whose names are in a text. All that are given have to be read."""
    return {name: x for name, x in ARRAYS.items() if name in text}


def pythons(text: str, option: str) -> list:
    """What Python makes of a text for each pair that is looked at; nothing where it counts in another way.

    Complex numbers, an error instead of infinity or NaN, and `~` of a bool, which Python takes for -1 or -2.
    """
    code, values = compile(text.lstrip() + "\n", "text", "eval"), []
    for b, h, q_idx in numpy.ndindex(BATCH, HEADS, LENGTH):
        for kv_idx in [q_idx] if option == "score" else range(LENGTH):
            names = {"b": b, "h": h, "h_kv": h // 2, "q_idx": q_idx, "kv_idx": kv_idx, "q_len": LENGTH, "kv_len": LENGTH}
            names["score"] = Q[b, h, q_idx, 0].item()
            try:
                value = eval(code, {**NAMES, **names})
            except (ArithmeticError, ValueError):
                return []
            except TypeError as error:
                assert "complex" in str(error), error
                return []
            if isinstance(value, complex) or not abs(value) < 1e15:
                return []
            values.append(value)
    return values


def check(text: str, option: str) -> str:
    """What became of a text: it was refused, it is Python's, or Python is no judge of it."""
    try:
        got = {"score": of_scores, "mask": of_masks}[option](text)
    except (TypeError, ValueError) as error:
        expected = ("score: expected ", "mask: expected ", "arrays['")
        assert str(error).startswith(expected) and type(error) in (TypeError, ValueError), f"{text!r}: {error!r}"
        if str(error).startswith("arrays"):
            assert "expected an array that is read by" in str(error) or "along axis" in str(error), f"{text!r}: {error}"
        return "refused"
    expected = [] if "~" in text else pythons(text, option)
    if not expected:
        return "alone"
    if option == "mask":
        assert got.ravel().tolist() == [bool(x) for x in expected], text
    else:
        numpy.testing.assert_allclose(got.ravel(), numpy.array(expected, float), rtol=1e-9, atol=1e-9, err_msg=text)
    return "equal"


def check_texts(start: int, count: int) -> None:
    """Each text has a number that it can be made again from."""
    fates = {"refused": 0, "equal": 0, "alone": 0}
    for number in range(start, start + count):
        draw = random.Random(number)
        option = draw.choice(("score", "mask"))
        text = random_text(draw, Grammar(number), option)
        try:
            fates[check(text, option)] += 1
        except Exception as error:
            raise AssertionError(f"text {number}, as {option}: {text!r}") from error
    assert min(fates["refused"], fates["equal"]) > count / 5, fates


@pytest.mark.filterwarnings("error", "ignore::SyntaxWarning", "ignore::DeprecationWarning")  # Python's, of texts such as 1if
@pytest.mark.parametrize(
    "start, count", [(0, 500), *(pytest.param(start, 500, marks=pytest.mark.release) for start in range(500, 10_000, 500))]
)
def test_random_texts(start, count):
    check_texts(start, count)
