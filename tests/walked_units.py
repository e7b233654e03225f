"""What arrays of scores are read by, where units have several pairs of tiles, and what may come besides."""

from itertools import product

import numpy
from hand_scores import SCORES, Grid
from score_kernels import DTYPES, given

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV = 2, 4, 2, 150, 270  # two tiles of queries and three of keys, off every edge
GRID = Grid.of((BATCH,), HEADS, HEADS_KV, LEN_Q, LEN_KV)
READ = [example for example in SCORES if given(example)[1].arrays]
SLOPES = numpy.random.default_rng(1).uniform(0.01, 0.2, (BATCH, HEADS)).astype(numpy.float32)
SEEN = numpy.random.default_rng(2).random((BATCH, 1, LEN_Q, LEN_KV)) < 0.7


def inputs(dtype, dim):
    rng = numpy.random.default_rng(0)
    shapes = (HEADS, LEN_Q), (HEADS_KV, LEN_KV), (HEADS_KV, LEN_KV), (HEADS, LEN_Q)
    return [rng.standard_normal((BATCH, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


BESIDES = {  # options, and what they mean
    "alone": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "mask": ({"mask": SEEN}, {"seen": SEEN}),
    "window, slopes": (
        {"window": (60, 20), "alibi_slopes": SLOPES},
        {"first_key": LEN_KV - LEN_Q - 60, "last_key": LEN_KV - LEN_Q + 20, "alibi_slopes": SLOPES},
    ),
}
ASKED = list(product(READ, BESIDES, (40, 64, 128, 256), ("float16", "bfloat16")))
