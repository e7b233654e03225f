"""Expressions to test with: typed trees, texts, and values of what they use."""

import numpy
from hypothesis import settings
from hypothesis import strategies as st

from cupy_flash.problem.expression.entry import score_expression
from cupy_flash.problem.expression.operations import apply, convert
from cupy_flash.problem.expression.tree import SCORE, Literal, Name, Read
from cupy_flash.problem.expression.vocabulary import Declaration

DECLARED = (
    Declaration("slope", "float", 1),
    Declaration("table", "int", 2),
    Declaration("seen", "bool", 1),
    Declaration("gain", "float", 0),
)
ARRAYS = {
    "slope": numpy.array([0.5, -1.25, 2.0, 0.75]),
    "table": numpy.array([[3, -1, 4], [1, -5, 9]]),
    "seen": numpy.array([True, False, True]),
    "gain": numpy.float64(0.625),
}
VALUES = {"score": 0.875, "b": 1, "h": 2, "h_kv": 0, "q_idx": 5, "kv_idx": 3, "q_len": 7, "kv_len": 6}
SMOOTH = ("tanh", "sigmoid", "sin", "cos")
many = settings(max_examples=60, deadline=None)


@st.composite
def trees(draw, kind="float", depth=4, exact=False, smooth=False):
    """Typed trees. Exact: Python and NumPy round alike, so that nothing jumps; smooth: differentiable near these values."""

    def below(kind, exact=exact, smooth=smooth):
        return draw(trees(kind, depth - 1, exact, smooth))

    if depth == 0 or draw(st.integers(0, 7)) == 0:
        return draw(leaves(kind))
    if kind == "bool":
        op = draw(st.sampled_from(("<", "<=", "==", "!=", "and", "or", "not", "where", ">")))
        if op in ("and", "or", "not"):
            return apply(op, *(below("bool") for _ in range(1 + (op != "not"))))
        if op == "where":
            return apply(op, below("bool"), below("bool"), below("bool"))
        of = "int" if smooth else draw(st.sampled_from(("int", "float")))
        return apply(op, below(of, exact=True), below(of, exact=True))
    if kind == "int":
        ops = (
            "+",
            "-",
            "*",
            "//",
            "%",
            "min",
            "max",
            "neg",
            "abs",
            "&",
            "|",
            "^",
            "~",
            "<<",
            ">>",
            "**",
            "where",
            "float",
            "bool",
            "read",
        )
        op = draw(st.sampled_from(ops))
        if op == "**":
            return apply(op, draw(leaves("int")), Literal(draw(st.integers(0, 2))))
        if op in ("<<", ">>"):
            return apply(op, below("int"), Literal(draw(st.integers(0, 3))))
        if op == "float":
            return convert(below("float", exact=True) if not smooth else Name("h"), "int")
        if op == "bool":
            return convert(below("bool"), "int")
        if op == "read":
            return Read("table", (below("int"), below("int")), "int")
        if op == "where":
            return apply(op, below("bool"), below("int"), below("int"))
        return apply(op, *(below("int") for _ in range(1 if op in ("neg", "abs", "~") else 2)))
    op = draw(
        st.sampled_from(
            ("+", "-", "*", "neg", "where", "int", "read", "**", "/", *SMOOTH, "exp", "sqrt", "log", "min", "max", "abs", "//")
        )
    )
    if exact and op in (*SMOOTH, "exp", "sqrt", "log", "**"):
        op = "*"
    if smooth and op in ("min", "max", "abs", "//"):
        op = "+"
    if op == "where":
        return apply(op, below("bool"), below("float"), below("float"))
    if op == "int":
        return convert(below("int"), "float")
    if op == "read":
        return Read("slope", (below("int"),), "float")
    if op == "**":
        return apply(op, below("float"), Literal(draw(st.integers(0, 3))))
    if op == "exp":
        return apply(op, apply("tanh", below("float")))
    if op in ("sqrt", "log"):
        return apply(op, apply("+", Literal(1.5), apply("sin", below("float"))))
    if op == "/":
        return apply(op, below("float"), apply("+", Literal(2.0), apply("min", Literal(8.0), Name("q_idx"))))
    return apply(op, *(below("float") for _ in range(1 if op in ("neg", "abs", *SMOOTH) else 2)))


def leaves(kind):
    if kind == "bool":
        return st.builds(Literal, st.booleans()) | st.builds(lambda i: Read("seen", (Literal(i),), "bool"), st.integers(-1, 3))
    if kind == "int":
        return st.builds(Literal, st.integers(-7, 7)) | st.sampled_from([Name(name) for name in VALUES if name != "score"])
    floats = [SCORE, SCORE, SCORE, Read("gain", (), "float"), Read("slope", (Name("h"),), "float")]
    return st.builds(Literal, st.integers(-16, 16).map(lambda n: n / 8)) | st.sampled_from(floats)


def text_of(tree):
    if tree.kind == "float":
        return score_expression(str(tree), DECLARED).tree
    return score_expression(f"where({tree}, 1.0, 0.0)", DECLARED).tree.args[0]  # a mask has no score


def same(got, expected, tolerance=1e-9):
    return got == expected or abs(got - expected) <= tolerance * max(1, abs(expected))


TEXTS = [
    "score + slope[h] * (kv_idx - q_idx)",
    "score if q_idx >= kv_idx else -inf",
    "where(0 <= q_idx - kv_idx < 3, score, gain) * 2",
    "1 if not (h < 1 and b < 1 or kv_idx < q_idx) else 2.5",
    "1 if (h < 1) & (b < 1) | (kv_idx < q_idx) ^ (h == b) else 2.5",
    "-h // 3 + -h % 3 + -7.5 // 2 + -7.5 % 2 + score // -0.25 + score % -0.25",
    "-score ** 2 + 2 ** -1.5 + 2.0 ** 3 ** 2 + score ** 2.5",
    "(-score) ** 3 - h ** 4 - -h ** 3",
    "h << 2 | ~b & 7 ^ kv_idx >> 1",
    "min(h, score, 3) + max(b, 2, q_idx) + clip(score, -0.5, 0.5) + clip(h, 1, 2)",
    "abs(-3) + abs(-score) + int(-score * 3) + int(score * 3) + float(h) / 4 + floor(-score)",
    "exp(score) + exp2(score) + log(2 + score) + log2(2 + score) + sqrt(2 + score) + rsqrt(2 + score)",
    "tanh(score) + sigmoid(score) + sin(score) + cos(score)",
    "slope[h + 100] + slope[-1] + table[b, kv_idx - 3] + seen[kv_idx] * (h < b) + True",
    "h / 3 - h // 3 + (h < 2) / 2 + min(h, 2) // 2",
]
