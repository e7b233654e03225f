"""Dropout beside a bias, or of what a mask leaves, and by which kernels for sm_90a: for tests on the host and on a device."""

from itertools import product

import numpy
from score_kernels import DTYPES

from cupy_flash import dropout_mask

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV = 2, 4, 2, 301, 424  # off every tile edge, and whole chunks of 16 bytes
P, SEED = 0.25, (1 << 40, 3)
DROPOUT = {"dropout": P, "seed": SEED}
ENDS = {  # of what each query sees
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "window": ({"window": (70, 10)}, {"first_key": LEN_KV - LEN_Q - 70, "last_key": LEN_KV - LEN_Q + 10}),
}
DIMS = ((40, "float16"), (128, "bfloat16"), (160, "float16"), (256, "bfloat16"))
BIASES = {"of pairs": (BATCH, HEADS), "of heads": (HEADS,)}
MASKS = ("padding", "array")
OF_BIAS, OF_MASK = list(product(DIMS, ENDS, BIASES)), list(product(DIMS, ENDS, MASKS))
QUICK_BIAS = [(DIMS[0], "causal", "of pairs")]
QUICK_MASK = [(DIMS[1], "window", "array")]
# Of the forward and of the backward: kernel, queries and keys of a tile.
WIDER = {160: ("fwd_hopper", 128, 64, "bwd_hopper_wide", 64, 64), 256: ("fwd_hopper", 128, 64, "bwd_hopper_wide", 64, 64)}
WITH_MASK = WIDER | {40: ("fwd_hopper", 256, 64, "bwd_hopper", 64, 128), 128: ("fwd_hopper", 128, 128, "bwd_hopper", 64, 128)}
WITH_BIAS = WIDER | {40: ("fwd_hopper", 256, 64, "bwd_hopper", 128, 128), 128: ("fwd_hopper", 192, 64, "bwd_hopper", 64, 128)}
WITH_BIAS_CAUSAL = WITH_BIAS | {128: ("fwd_hopper", 128, 64, "bwd_hopper", 64, 128)}


def inputs(dim, dtype):
    rng = numpy.random.default_rng(3)
    shapes = (HEADS, LEN_Q), (HEADS_KV, LEN_KV), (HEADS_KV, LEN_KV), (HEADS, LEN_Q)
    return [rng.standard_normal((BATCH, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


def with_bias(case):
    """Options, and what they mean, with a bias that hides some pairs."""
    (_, dtype), ends, shape = case
    rng = numpy.random.default_rng(4)
    bias = rng.standard_normal((*BIASES[shape], LEN_Q, LEN_KV))
    bias = numpy.where(rng.random(bias.shape) < 0.05, -numpy.inf, bias).astype(DTYPES[dtype])
    return _dropped(ends, {"bias": bias}, {"bias": bias.astype(numpy.float64)})


def with_mask(case):
    """The same with a mask: keys up to a length of the batch element, or any pairs."""
    _, ends, kind = case
    if kind == "padding":
        lens = numpy.array([LEN_KV - 7, 130], numpy.int32)
        seen = numpy.broadcast_to(numpy.arange(LEN_KV) < lens[:, None, None, None], (BATCH, HEADS, LEN_Q, LEN_KV))
        return _dropped(ends, {"mask": "kv_idx < n[b]", "arrays": {"n": lens}}, {"seen": seen})
    seen = numpy.random.default_rng(5).random((LEN_Q, LEN_KV)) < 0.7
    return _dropped(ends, {"mask": seen}, {"seen": seen})


def _dropped(ends, options, hand):
    of_ends, meant = ENDS[ends]
    keep = dropout_mask((BATCH, HEADS, LEN_Q, LEN_KV), P, SEED)
    return options | of_ends | DROPOUT, hand | meant | {"keep": keep, "keep_scale": 1 / (1 - P)}


def kernels_of(forward, backward):
    tiles = ((kernel.file, kernel.config.TILE_Q, kernel.config.TILE_KV) for kernel in (forward, backward))
    return tuple(x for tile in tiles for x in tile)
