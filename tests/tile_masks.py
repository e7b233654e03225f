"""Masks of pairs with tiles in which nothing is seen, and in which all is, and what they mean."""

import numpy
import pytest
from hand_masks import MASKS
from hand_scores import Grid
from score_kernels import DTYPES

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV, DIM = 2, 4, 2, 141, 203, 40  # off every tile edge, and several tiles of every kernel
GRID = Grid.of((BATCH,), HEADS, HEADS_KV, LEN_Q, LEN_KV)


def inputs(dtype="float16", seed=0, len_q=LEN_Q, len_kv=LEN_KV, batch=BATCH, heads=HEADS, heads_kv=HEADS_KV, dim=DIM):
    """q, k, v and dout."""
    rng = numpy.random.default_rng(seed)
    shapes = (heads, len_q), (heads_kv, len_kv), (heads_kv, len_kv), (heads, len_q)
    return [rng.standard_normal((batch, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


def expression(name):
    example = next(example for example in MASKS if example.name == name)
    arrays = {of: array for of, (_, array) in example.arrays(GRID).items()}
    return {"mask": example.text, "arrays": arrays}, {"seen": example.hand(GRID, arrays)}


def array(seen, **others):
    """A mask as an array, and what else is told to both."""
    return {"mask": seen}, {"seen": seen} | others


def random_blocks(*leading, rate=0.35, size=16):
    """Blocks of pairs that are seen or not, so that tiles are of all three kinds."""
    rng = numpy.random.default_rng([len(leading), size])
    blocks = rng.random((*leading, -(-LEN_Q // size), -(-LEN_KV // size))) < rate
    return blocks.repeat(size, axis=-2).repeat(size, axis=-1)[..., :LEN_Q, :LEN_KV]


def with_holes():
    """Queries and keys in whole tiles that see nothing and that nothing sees, and one pair in a tile of its own."""
    seen = numpy.ones((LEN_Q, LEN_KV), bool)
    seen[:70] = False
    seen[:, 60:150] = False
    seen[3, 199] = True
    return seen


def causal(given):
    options, hand = given
    return options | {"causal": True}, hand | {"last_key": LEN_KV - LEN_Q}


def windowed(given, left, right):
    options, hand = given
    shift = LEN_KV - LEN_Q
    return options | {"window": (left, right)}, hand | {"first_key": shift - left, "last_key": shift + right}


TILE_MASKS = {
    "documents": lambda: expression("documents"),
    "windows of heads": lambda: expression("windows"),
    "limits of batch elements": lambda: expression("limits"),
    "stripes": lambda: expression("strided"),
    "blocks": lambda: array(random_blocks()),
    "blocks of heads": lambda: array(random_blocks(HEADS)),
    "blocks of batch elements": lambda: array(random_blocks(BATCH, 1)),
    "blocks of all": lambda: array(random_blocks(BATCH, HEADS, size=48)),
    "holes": lambda: array(with_holes()),
    "all": lambda: array(numpy.ones((LEN_Q, LEN_KV), bool)),
    "nothing": lambda: array(numpy.zeros((1, LEN_KV), bool)),
    "causal, documents": lambda: causal(expression("documents")),
    "causal, blocks": lambda: causal(array(random_blocks(HEADS))),
    "window, blocks": lambda: windowed(array(random_blocks()), 40, 9),
}

# Texts that cost a kernel of their own; arrays share one.
OF_A_RELEASE = ("windows of heads", "limits of batch elements", "stripes")
NAMES = [pytest.param(name, marks=pytest.mark.release) if name in OF_A_RELEASE else name for name in TILE_MASKS]


def bits_of(words, tiles):
    """The first bits of rows of words."""
    return numpy.unpackbits(words.view(numpy.uint8), axis=-1, bitorder="little")[..., :tiles].astype(bool)


def kept(mask, number):
    """What a `TileMask` has found, for one kind of tile after the other."""
    return list(mask.found.values())[number]


def visible(hand):
    """Which pairs are seen by both masks, and by that of pairs alone."""
    ahead = numpy.arange(LEN_KV) - numpy.arange(LEN_Q)[:, None]
    band = (ahead <= hand.get("last_key", LEN_KV)) & (ahead >= hand.get("first_key", -LEN_Q))
    alone = numpy.broadcast_to(hand["seen"], (BATCH, HEADS, LEN_Q, LEN_KV))
    return alone & band, alone


def classified(plan, arguments, operands):
    """The parts of workspace that name tiles, after a call, as words."""
    memory = numpy.zeros(plan.workspace_bytes, numpy.uint8)
    plan(*arguments, workspace=memory, **operands)
    return {name: x.view(numpy.uint32) for name, x in plan.workspace.on_host(memory).items() if name.startswith("tile_")}


def operands_of(options):
    return {name: x for name, x in options.items() if name == "arrays" or (name == "mask" and isinstance(x, numpy.ndarray))}
