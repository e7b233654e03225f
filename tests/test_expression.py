"""Texts and functions as trees: what they mean, and what is said of those that mean nothing."""

import random

import pytest

from cupy_flash.problem.expression.entry import Expression, mask_expression, score_expression
from cupy_flash.problem.expression.operations import FUNCTIONS
from cupy_flash.problem.expression.parse import LONGEST
from cupy_flash.problem.expression.reads import axes_of, reads
from cupy_flash.problem.expression.tree import NAMES
from cupy_flash.problem.expression.vocabulary import Declaration

DECLARED = (
    Declaration("slope", "float", 1),
    Declaration("bias", "float", 3),
    Declaration("doc", "int", 1),
    Declaration("seen", "bool", 2),
    Declaration("gain", "float", 0),
    Declaration("reach", "int", 0),
)
KNOWN = "b, h, h_kv, q_idx, kv_idx, q_len, kv_len"


def score(given):
    return score_expression(given, DECLARED)


def mask(given):
    return mask_expression(given, DECLARED)


# What a text is: its canonical one shows the conversions.
SCORES = {
    "score + slope[h] * (kv_idx - q_idx)": "score + slope[h] * float(kv_idx - q_idx)",
    "1": "1.0",
    "True": "1.0",
    "-2": "-2.0",
    "-inf": "-inf",
    "+ score": "score",
    "- -score": "--score",
    "h / 2": "float(h) / 2.0",
    "h // 2": "float(h // 2)",
    "h % 2 + 0.5": "float(h % 2) + 0.5",
    "score % 2": "score % 2.0",
    "(h < 2) + 1": "float(int(h < 2) + 1)",
    "True + True": "float(1 + 1)",
    "(h < 2) * score": "float(h < 2) * score",
    "score ** 2": "score ** 2",
    "h ** 2 * score": "float(h ** 2) * score",
    "score ** 9": "score ** 9.0",
    "score ** -1": "score ** (-1.0)",
    "2 ** -(h + 1.0)": "2.0 ** (-(float(h) + 1.0))",
    "-score ** 2": "-score ** 2",
    "(-score) ** 2": "(-score) ** 2",
    "-2147483648": "-2147483648.0",
    "int(-2147483648)": "-2147483648.0",
    "score - (gain - reach)": "score - (gain - float(reach))",
    "where(h < 2, score, 0)": "where(h < 2, score, 0.0)",
    "score if 2 > h else True": "where(h < 2, score, 1.0)",
    "min(h, 2, score)": "min(float(min(h, 2)), score)",
    "clip(score, -1, 1)": "min(max(score, -1.0), 1.0)",
    "abs(h < 2)": "float(abs(int(h < 2)))",
    "exp(h)": "exp(float(h))",
    "float(int(score))": "float(int(score))",
    "int(h) + int(True)": "float(h + 1)",
    "h << 31 >> 0 >> True": "float(h << 31 >> 0 >> 1)",
    "h << 2 | 1 & ~h ^ 3": "float(h << 2 | 1 & ~h ^ 3)",
    "doc[seen[0, 1]]": "float(doc[int(seen[0, 1])])",
    "bias[ h , q_idx, kv_idx - 1 ]  # a comment": "bias[h, q_idx, kv_idx - 1]",
    "bias[(h, q_idx, kv_idx)]": "bias[h, q_idx, kv_idx]",
    "\n  (score\n   + 1)\n": "score + 1.0",
    "ｓｃｏｒｅ": "score",  # noqa: RUF001  # what Python's parser makes of it
}
MASKS = {
    "doc[q_idx] == doc[kv_idx]": "doc[q_idx] == doc[kv_idx]",
    "True": "True",
    "seen[q_idx, kv_idx]": "seen[q_idx, kv_idx]",
    "0 <= q_idx - kv_idx < 5": "0 <= q_idx - kv_idx and q_idx - kv_idx < 5",
    "q_idx > kv_idx >= 1 != 2": "kv_idx < q_idx and 1 <= kv_idx and 1 != 2",
    "(h == 1) == (b == 2)": "(h == 1) == (b == 2)",
    "(h == 1) == 1": "int(h == 1) == 1",
    "(h < 1) < (b < 2)": "int(h < 1) < int(b < 2)",
    "h < 1.5": "float(h) < 1.5",
    "not h < 1 and (b < 1 or not (b < 2 or True))": "not h < 1 and (b < 1 or not (b < 2 or True))",
    "h < 1 and b < 1 and True": "h < 1 and b < 1 and True",
    "h < 1 and (b < 1 and True)": "h < 1 and (b < 1 and True)",
    "(h < 1) & (b < 1) | ~(b == h)": "h < 1 and b < 1 or not b == h",
    "(h < 1) ^ (b < 1)": "(h < 1) != (b < 1)",
    "(h & 1) == (b | 2)": "h & 1 == b | 2",
}


@pytest.mark.parametrize("read, texts", [(score, SCORES), (mask, MASKS)], ids=["score", "mask"])
def test_texts_and_their_canonical_ones(read, texts):
    for text, canonical in texts.items():
        made = read(text)
        assert str(made) == canonical
        assert read(canonical) == made and hash(read(canonical)) == hash(made)


def test_expressions_differ_by_what_they_compute():
    assert (
        len({score(text) for text in ("score", "score + 0", "score + 0.0", "score - 0", "0 + score", "score * -1", "-1 * score")})
        == 6
    )
    assert score("slope[h]") == score("slope[ h ]") != score_expression("slope[h]", [Declaration("slope", "int", 1)])
    assert score("gain") != score("reach") and score("gain") != "gain"
    assert score("doc[b] + bias[h, doc[b], 0] + gain").declarations == (DECLARED[2], DECLARED[1], DECLARED[4])


def test_reads():
    found = reads(score("bias[h, doc[q_idx], kv_idx + 0] * gain + doc[q_idx] + bias[h_kv, 1, b]").tree)
    assert list(map(str, found)) == ["bias[h, doc[q_idx], kv_idx + 0]", "doc[q_idx]", "gain", "bias[h_kv, 1, b]"]
    assert list(map(axes_of, found)) == [("h", None, None), ("q_idx",), (), ("h_kv", None, "b")]


# Refusals: the text, where the caret stands, and what is said.
NOT_PYTHON = "an expression in Python's syntax"
REFUSALS = [
    (
        "score + slop[h]",
        8,
        f"one of {KNOWN}, score, inf, slope, bias, doc, seen, gain, reach, got 'slop' at column 9 (did you mean 'slope'?)",
    ),
    ("score * np.exp(slope[h])", 8, "expected the name of a function, got an attribute at column 9 (write 'exp' alone)\n"),
    ("score * np.erf(slope[h])", 8, "expected the name of a function, got an attribute at column 9\n"),
    ("score + zzz", 8, "got 'zzz' at column 9 (what else it reads is given as arrays={'zzz': ...})\n"),
    ("score[h]", 0, "expected the name of an array before '[', got 'score' at column 1\n"),
    ("score + scope[h]", 8, "got 'scope' at column 9 (did you mean 'slope'?)\n"),  # which is an array, as score is not
    ("score + scor[h]", 8, "got 'scor' at column 9 (what else it reads is given as arrays={'scor': ...})\n"),
    ("exp + 1", 0, "got 'exp' at column 1"),
    ("score + foo(1)", 8, f"one of {', '.join(FUNCTIONS)}, got 'foo'"),
    ("slope[h](1)", 0, "the name of a function, got another expression"),
    ("score.sin()", 0, "the name of a function, got an attribute"),
    ("1 + score.x", 4, "names, numbers, operators and functions, got an attribute"),
    ("1 + (lambda: 1)", 5, "got a lambda"),
    ("[1]", 0, "got a list"),
    ("1, 2", 0, "got a tuple"),
    ("()", 0, "got a tuple"),
    ("{1: 2}", 0, "got a dict"),
    ("{1}", 0, "got a set"),
    ("min([i for i in 1])", 4, "got a comprehension"),
    ("(x := 1)", 1, "got an assignment"),
    ("min(*slope)", 4, "got a starred expression"),
    ("f'{score}'", 0, "got a string"),
    ("1 + 'é'", 4, "a number, got a string"),
    ("1 + b'x'", 4, "a number, got bytes"),
    ("1 + 2j", 4, "a number, got a complex number"),
    ("1 + ...", 4, "a number, got an ellipsis"),
    ("1 + None", 4, "a number, got None"),
    ("slope[1:2]", 6, "got a slice"),
    ("slope[...]", 6, "got an ellipsis"),
    ("slope[()]", 6, "got a tuple"),
    ("clip(score, lo=1, hi=2)", 12, "arguments of 'clip' without keywords, got a keyword"),
    ("1 + min(1)", 4, "2 or more arguments of 'min', got 1"),
    ("1 + exp(1, 2)", 4, "1 argument of 'exp', got 2"),
    ("clip(1)", 0, "3 arguments of 'clip', got 1"),
    ("1 + slope", 4, "1 index of 'slope', got none"),
    ("1 + bias[h, 1]", 4, "3 indices of 'bias', got 2"),
    ("1 + gain[h]", 4, "the name of an array before '[', got 'gain' at column 5 (it is a number: write 'gain')"),
    ("score[h]", 0, "the name of an array before '[', got 'score'"),
    ("(1 + 2)[h]", 0, "the name of an array before '[', got another expression"),
    ("bias[h, score, 1]", 8, "an int as an index of 'bias', got a float at column 9 (int() makes one)"),
    ("1 + (score & 1)", 5, "an int for '&', got a float at column 6 (int() makes one)"),
    ("1 << 2.0", 5, "an int for '<<', got a float"),
    ("1 + (h << 32)", 10, "0 to 31 bits for '<<', got 32 at column 11"),
    ("h >> -1", 5, "0 to 31 bits for '>>', got -1"),
    ("~score", 1, "an int for '~', got a float"),
    ("h < 1 and b and h", 10, "a bool for 'and', got an int at column 11 ('and' is of bools; a comparison makes one)"),
    ("h or b < 1", 0, "a bool for 'or', got an int"),
    ("not score", 4, "a bool for 'not', got a float"),
    ("score if h else 1", 9, "a bool as a condition, got an int at column 10 (a comparison makes one)"),
    ("where(score, 1, 2)", 6, "a bool as a condition, got a float"),
    ("1 + 2 ** h", 9, "a literal from 0 to 8 as a power of an int, got another expression"),
    ("h ** -1", 5, "a literal from 0 to 8 as a power of an int, got -1"),
    ("score @ 1", 0, "an operator of numbers, got '@'"),
    ("h in doc", 0, "an operator of numbers, got 'in'"),
    ("h < 1 is b", 0, "an operator of numbers, got 'is'"),
    ("1 + 2147483648", 4, "an int of 32 bits, got a larger one at column 5 (write a float, such as 1e10, for a larger number)"),
    ("-2147483649", 0, "an int of 32 bits"),
    ("1 + 1e999", 4, "a number that a float holds, got a larger one at column 5 (inf is a constant)"),
    ("h < 1 && b < 1", 6, "'and', got '&&' at column 7 (write 'and' for '&&')"),
    ("h < 1 || b < 1 && h", 6, "'or', got '||'"),
    ("score + ", 8, NOT_PYTHON),
    ("score + (1", 8, f"{NOT_PYTHON}, got an error at column 9 ('(' was never closed)"),
    ("score = 1", 6, NOT_PYTHON),
    ("score; b", 5, NOT_PYTHON),
    ("a\0b", 1, f"{NOT_PYTHON}, got the character '\\x00'"),
    ("1 + \ud800", 4, f"{NOT_PYTHON}, got the character '\\ud800'"),
    ("1 + '\\", 4, NOT_PYTHON),
    # columns count characters
    ("größe", 0, "got 'größe'"),  # codespell:ignore
    ("'äöü' + zzz", 0, "got a string"),
    ("min(größe, 1)", 4, "got 'größe'"),
    ("\t min(1, '𝒳é', zzz)", 9, "got a string at column 10"),
    ("min(slope[seen['é']], zzz)", 15, "got a string"),
    # limits
    ("score" + " + 1" * 100, 0, "nesting of at most 100, got 101 at column 1 (conversions count as well)"),
    ("1 + 1" + " + 1" * 5000, 0, f"at most {LONGEST} characters, got 20005"),
    ("-" * 9000 + "1", 0, "nesting of at most 100, got more"),
    ("max(" + "1," * 3000 + "1)", None, "at most 1000 nodes, got more"),
    ("max(" + ",".join(["min(" + "1," * 9 + "score)"] * 60) + ")", 0, "at most 1000 nodes, got 12"),
    ("0<(" * 40 + "h" + "<1)" * 40, None, "at most 1000 nodes, got more"),  # each is read twice by the next
    ("(" * 4000 + "1" + ")" * 4000, None, NOT_PYTHON),
    ("1" * 5000, None, NOT_PYTHON),
    ("", 0, NOT_PYTHON),
    (" \n ", None, NOT_PYTHON),
]


@pytest.mark.parametrize("text, column, said", REFUSALS, ids=[ascii(text)[:40] for text, _, _ in REFUSALS])
def test_refusals(text, column, said):
    with pytest.raises(ValueError) as caught:
        score(text)
    message = str(caught.value)
    assert message.startswith("score: expected ") and said in message + "\n"
    if len(text) <= LONGEST:
        _, line, caret = message.split("\n")
        assert caret.strip() == "^" and len(caret) <= 103 and len(line) <= 102
    if column is not None and len(text) <= 100:
        assert caret == " " * (column + 2) + "^"
        assert line == "  " + "".join(c if c.isprintable() else " " for c in text).rstrip()


def test_refusals_show_the_line():
    with pytest.raises(ValueError) as caught:
        score("\n (score\r\n  + 'é' if zzz\n  else 1)")
    message = str(caught.value)
    assert "got 'zzz' at line 3, column 12 (what else" in message and message.endswith("\n    + 'é' if zzz\n             ^")
    with pytest.raises(ValueError) as caught:
        score(f"score + {'1 + ' * 80}zzz{' + 1' * 10}")
    _, line, caret = str(caught.value).split("\n")
    assert "at column 329" in str(caught.value) and line[caret.index("^") :].startswith("zzz + 1")


def test_the_message_as_a_whole():
    expected = "one of b, h, h_kv, q_idx, kv_idx, q_len, kv_len, score, inf, slope"
    with pytest.raises(ValueError) as caught:
        score_expression("score + slop[h]", DECLARED[:1])
    assert str(caught.value) == (
        f"score: expected {expected}, got 'slop' at column 9 (did you mean 'slope'?)\n  score + slop[h]\n          ^"
    )


@pytest.mark.parametrize("text, got", [("h", "an int"), ("h + 0.5", "a float")])
def test_a_mask_is_a_bool(text, got):
    with pytest.raises(ValueError, match=f"mask: expected a bool, which says .*, got {got} at column 1"):
        mask(text)


def test_a_mask_has_no_score():
    with pytest.raises(ValueError, match=f"mask: expected one of {KNOWN}, inf, slope, .*, got 'score' at column 1"):
        mask("score < 1")


@pytest.mark.parametrize("given", [None, 1, b"score", ["score"]], ids=str)
def test_neither_text_nor_function(given):
    with pytest.raises(TypeError, match="mask: expected an expression or a function, got "):
        mask(given)


@pytest.mark.parametrize("name", ["", "1a", "a b", "if", "score", "kv_len", "exp", "where", "inf", "float", "a.b", "\ufb01"])
def test_names_of_arrays(name):
    with pytest.raises(ValueError, match="arrays: expected names that "):
        Declaration(name, "float", 0)
    with pytest.raises(TypeError, match="arrays: expected names that are strings, got 1"):
        Declaration(1, "float", 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", ["1if h < 2 else 3", "h if h < 1else 2", "h < 1or h > 2"])
def test_what_python_warns_of_is_not_the_users(text):
    assert str(score(text)) == str(score(text.replace("1", "1 ")))


@pytest.mark.filterwarnings("error")
def test_random_texts():
    """A tree or a ValueError, whatever the text."""
    draw = random.Random(0)
    pieces = [
        *NAMES,
        *FUNCTIONS,
        *"()[]{}+-*/%~^&|<>=,.:;@!#'\"\\ \n\r\t\f\0é\U0001d4b3\u2028\u00a0\ufeff\ud800\u0301",
        "0",
        "1",
        "2.5",
        "1e9",
    ]
    pieces += [
        "slope[h]",
        "doc",
        "not ",
        " and ",
        " if ",
        " else ",
        "lambda",
        ":=",
        "**",
        "//",
        "0x",
        "1_0",
        "f'{",
        "if",
        "\\\n",
        "1j",
        "yield ",
    ]
    valid = [*SCORES, *MASKS]
    parsed = 0
    for _ in range(3000):
        if draw.random() < 0.3:
            text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        else:
            text = draw.choice(valid)
            for _ in range(draw.choice((1, 1, 2))):
                at, cut = draw.randrange(len(text) + 1), draw.choice((0, 0, 1, 3))
                text = text[:at] + draw.choice(pieces) + text[at + cut :]
        try:
            parsed += isinstance(draw.choice((score, mask))(text), Expression)
        except ValueError as error:
            assert str(error).startswith(("score: expected", "mask: expected"))
    assert parsed > 50
