"""Random masks of all that the language has, as texts, and arrays with what is hard about arrays."""

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
NUMBERS = ["{0} + {0}", "{0} - {0}", "{0} * {0}", "{0} // {0}", "{0} % {0}", "min({0}, {0})", "max({0}, {0})", "abs({0})", "-{0}"]
NUMBERS += ["where({bool}, {0}, {0})", "clip({0}, {0}, {0})", "{0} ** 2"]
RULES = {kind: [rule.replace("{0}", f"{{{kind}}}") for rule in NUMBERS] for kind in ("int", "float")}
RULES["int"] += ["{int} // 8", "{int} % 16", "{int} >> 3", "{int} >> {int}", "{int} << 2", "{int} & {int}", "{int} | {int}"]
RULES["int"] += ["{int} ^ {int}", "~{int}", "int({float})", "int({bool})", "{int} * {bool}"]
RULES["float"] += ["float({int})", "{int} / {int}", "{float} / {float}", *["{int} * {float}"] * 3]
RULES["float"] += [f"{function}({{float}})" for function in ("floor", "exp", "sqrt", "log", "tanh", "sin")]
RULES["bool"] = [f"{{{kind}}} {op} {{{kind}}}" for kind in ("int", "int", "float") for op in ("<", "<=", ">", ">=", "==", "!=")]
RULES["bool"] += ["{bool} and {bool}", "{bool} or {bool}", "not {bool}", "{bool} ^ {bool}", "{bool} == {bool}"]
RULES["bool"] += ["{int} <= {int} < {int}", "where({bool}, {bool}, {bool})"]


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
