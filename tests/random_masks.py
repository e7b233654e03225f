"""Masks of all that the language has, as texts: one operation each, and random ones. And arrays with what is hard about arrays."""

import re

import numpy
from tiles_of_masks import BATCH, HEADS, LEN_KV, LEN_Q

LARGEST = 2**31 - 1
RNG = numpy.random.default_rng(3)
LEVEL = (numpy.arange(LEN_Q) // 9 / 2 - 1).astype(numpy.float32)
LEVEL[[20, 45, 46]] = numpy.nan, numpy.inf, -numpy.inf
HUGE = numpy.repeat(numpy.array([LARGEST, -LARGEST - 1, 5, LARGEST - 3], numpy.int32), 20)[:LEN_KV]
# Steps, so that some tiles are of one value. A kernel reads six arrays at most.
FEW = {
    "doc": numpy.sort(RNG.integers(0, 4, LEN_Q)).astype(numpy.int32),
    "page": numpy.sort(RNG.integers(-2, 3, LEN_KV)).astype(numpy.int16)[::-1],
    "level": LEVEL,
    "weight": numpy.repeat(RNG.standard_normal(5).astype(numpy.float16), 15),
    "limit": RNG.integers(0, LEN_KV, (BATCH, 4)).repeat(14, axis=1)[:, :LEN_Q],
}
OTHERS = {
    "huge": HUGE,
    "flag": numpy.arange(LEN_Q) // 18 % 2 == 0,
    "pairs": RNG.random((LEN_Q, LEN_KV)) < 0.9,
    "width": numpy.arange(HEADS) * 9,
    "slope": numpy.linspace(-0.7, 0.9, HEADS, dtype=numpy.float32),
}
READS = {
    "int": ["doc[q_idx]", "page[kv_idx]", "huge[kv_idx]", "limit[b, q_idx]", "width[h]", "doc[{int}]", "limit[{int}, q_idx]"],
    "float": ["level[q_idx]", "weight[kv_idx]", "slope[h]", "weight[{int}]"],
    "bool": ["flag[q_idx]", "pairs[q_idx, kv_idx]", "flag[{int}]", "pairs[q_idx, {int}]"],
}
NAMES = ["q_idx", "kv_idx", "b", "h", "h_kv", "q_len", "kv_len"]
LEAVES = {
    "int": [*NAMES[:2] * 4, *NAMES, *map(str, (0, 1, 2, 3, 16, 31, -5, 46341, LARGEST, -LARGEST - 1))],
    "float": ["0.5", "-1.25", "0.1", "1e30", "inf", "-inf", "0.0"],
    "bool": ["True", "False"],
}
# No divisor is -1: of the least int this machine has no quotient.
NUMBERS = ["{0} + {0}", "{0} - {0}", "{0} * {0}", "{0} // max({0}, 0)", "{0} % max({0}, 0)", "min({0}, {0})", "max({0}, {0})"]
NUMBERS += ["abs({0})", "-{0}", "where({bool}, {0}, {0})", "clip({0}, {0}, {0})", "{0} ** 2"]
RULES = {kind: [rule.replace("{0}", f"{{{kind}}}") for rule in NUMBERS] for kind in ("int", "float")}
RULES["int"] += ["{int} // 8", "{int} % 16", "{int} >> 3", "{int} >> {int}", "{int} << 2", "{int} & {int}", "{int} | {int}"]
RULES["int"] += ["{int} ^ {int}", "~{int}", "int({float})", "int({bool})", "{int} * {bool}"]
RULES["float"] += ["float({int})", "{int} / {int}", "{float} / {float}", *["{int} * {float}"] * 3]
RULES["float"] += [f"{function}({{float}})" for function in ("floor", "exp", "sqrt", "log", "tanh", "sin")]
RULES["bool"] = [f"{{{kind}}} {op} {{{kind}}}" for kind in ("int", "int", "float") for op in ("<", "<=", ">", ">=", "==", "!=")]
RULES["bool"] += ["{bool} and {bool}", "{bool} or {bool}", "not {bool}", "{bool} ^ {bool}", "{bool} == {bool}"]
RULES["bool"] += ["{int} <= {int} < {int}", "where({bool}, {bool}, {bool})"]


# One operation each, of numbers below and above 0: I and F of a query, J and G of a key.
OPERANDS = {"I": "(q_idx - 26)", "J": "(kv_idx - 37)", "F": "level[q_idx]", "G": "(kv_idx * 0.5 - 20)"}
OF_NUMBERS = """
    I + J; I - J; I * J; I // J; I % J; I & J; I | J; I ^ J; I // 5; I % 5; J // -5; J % -5; J // 64; J % 64; I >> 2; J << 2; ~I; -I
    abs(J); I ** 2; int(G); int(J < 3); min(I, J); max(I, J); where(I < 4, J, -I); where(I < 4, 9, 1); I - J + 0.5
    F + G; F - G; F * G; F / G; G // 3.5; G % 3.5; G / 3.5; G * 3.5; -F; -G; abs(G); floor(G); G ** 3; float(I); min(F, G)
    max(F, G); F - F; where(J < 4, F, G); sqrt(abs(G)); exp(G); sin(F); weight[doc[q_idx] * 9]
"""
OF_BOOLS = """
    I < 4 and J < 4; I < 4 or J < 4; (I < 4) ^ (J < 4); (I < 4) == (J < 4); not I < 4; where(I < 4, J < 4, I < J)
    F - F <= inf; F * 0 == 0
"""
COMPARED = ("< 4", "<= -3", "== 2", "!= 2", ">= 7")


def each_operation():
    numbers, bools = (texts.strip().replace("\n", ";").split(";") for texts in (OF_NUMBERS, OF_BOOLS))
    masks = [f"{number.strip()} {than}" for number in numbers for than in COMPARED] + [text.strip() for text in bools]
    return [re.sub(r"\b[IJFG]\b", lambda found: OPERANDS[found[0]], mask) for mask in masks]


def random_mask(draw, arrays, kind="bool", depth=4):
    """A text of a kind that reads some of these arrays; `draw` is a `random.Random`."""
    reads = [read for read in READS[kind] if read.partition("[")[0] in arrays]
    if depth == 0 or (depth < 3 and draw.random() < 0.2):
        return draw.choice(LEAVES[kind] + [read for read in reads if "{" not in read])
    text = draw.choice(RULES[kind] + reads)
    for of in RULES:
        while f"{{{of}}}" in text:
            text = text.replace(f"{{{of}}}", f"({random_mask(draw, arrays, of, depth - 1)})", 1)
    return text
