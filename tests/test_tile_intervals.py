"""Tiles that are classified by intervals of what an expression computes: as pairs say, and mostly without asking these."""

import contextlib
import random
from dataclasses import replace

import numpy
import pytest
from random_masks import FEW, OTHERS, each_operation, random_mask
from thinned import quick, thinned
from tiles_of_masks import BATCH, HEADS, LEN_KV, LEN_Q, by_pairs, expected, plan_of, run

from cupy_flash import KeyRanges
from cupy_flash.plan.expressions import of_places, written
from cupy_flash.plan.tile_text import tile_text
from cupy_flash.problem.expression.entry import mask_expression
from cupy_flash.problem.expression.evaluate import evaluate
from cupy_flash.problem.scores import declared

TILES = [(16, 16), (7, 40), (64, 1), (1, 128)]


# Many masks in one kernel, which is told the number of the one that it asks


def every_read(arrays):
    """A mask that reads all of them, and tells heads and batch elements apart."""
    return " or ".join(f"{name}[{', '.join('0' * x.ndim)}] > h + b" for name, x in arrays.items())


def masks_in_one(texts, arrays):
    """A classification of all of these masks, what it is told, and the name of the word that says which one is asked.

    That is `i` for number `i`, and `i + len(texts)` for the same without intervals.
    """
    found, told, layouts = plan_of(f"{every_read(arrays)} or number > 0", arrays | {"number": 0})
    number = f"scalar<int>(x, {list(layouts).index('number')})"
    of_pairs, of_tiles = "", ""
    for i, text in enumerate(texts):
        (tree,) = of_places((mask_expression(text, declared(layouts)).tree,), LEN_KV)
        of_pairs += f"{number} % {len(texts)} == {i} ? {written(tree, layouts)} : "
        of_tiles += f"{number} == {i} ? {tile_text(tree, (), layouts, ())} : "
    text = replace(found.kernel.expressions, takes_part=f"{of_pairs} false", takes_part_in=f"{of_tiles} anything<bool>()")
    text = replace(text, uniforms=(), constants=())
    name = next(of for of, x in told.items() if isinstance(x, int))
    return replace(found, kernel=replace(found.kernel, expressions=text)), told, name


@numpy.errstate(all="ignore")
@pytest.mark.parametrize("first", thinned(range(8), keep=8))
def test_each_operation(first):
    texts, at = each_operation()[first::8], numpy.ogrid[:BATCH, :HEADS, :LEN_Q, :LEN_KV]
    values = dict(zip(("b", "h", "q_idx", "kv_idx"), at)) | {"q_len": LEN_Q, "kv_len": LEN_KV}
    (found, told, name), (*_, layouts) = masks_in_one(texts, FEW), plan_of(every_read(FEW), FEW)
    for i, text in enumerate(texts):
        pairs = evaluate(mask_expression(text, declared(layouts)).tree, values, FEW, "float32")
        for tile in TILES if "inf" in text else [TILES[i % len(TILES)]]:
            lists, _ = run(found, told | {name: i}, tile)
            assert (lists == expected(numpy.broadcast_to(pairs, (BATCH, HEADS, LEN_Q, LEN_KV)), True, tile)).all(), text


NONE_SPARED = (2, 14)  # draws with the other arrays, of whose 30 masks none is


def random_masks(seed, arrays, count):
    """Texts that are accepted, from short ones to long ones."""
    texts = []
    for number in range(20 * count):
        text = random_mask(random.Random(20 * count * seed + number), arrays, depth=2 + number % 3)
        if "_idx" not in text:
            continue
        with contextlib.suppress(ValueError):  # bits that C++ cannot shift by, and an array of another axis
            plan_of(text, {name: x for name, x in arrays.items() if f"{name}[" in text} or None)
            texts.append(text)
        if len(texts) == count:
            return texts
    raise AssertionError("too few masks")


@pytest.mark.release
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.release) for seed in range(1, 20))])
@pytest.mark.parametrize("arrays", thinned([FEW, OTHERS]), ids=" ".join)
def test_random_masks(arrays, seed):
    """The lists are those of pairs that are asked one by one, and some masks are spared that."""
    count, spared = 30, 0
    texts = random_masks(seed, arrays, count)
    found, told, name = masks_in_one(texts, arrays)
    for i, text in enumerate(texts):
        (lists, moved), (right, alone) = (run(found, told | {name: at}, TILES[i % len(TILES)], i % 3 == 0) for at in (i, i + count))
        assert (lists == right).all(), text
        spared += moved.read_bytes < alone.read_bytes / 2
    assert spared > 0 or (arrays == OTHERS and seed in NONE_SPARED)


# Masks by hand, and what tiles they have


def seen(of_pair, causal=False, window=(None, None), prefix=0):
    """The pairs that take part by a function of (b, h, q_idx, kv_idx), and those that the other masks show."""
    at = numpy.ogrid[:BATCH, :HEADS, :LEN_Q, :LEN_KV]
    alone = numpy.broadcast_to(of_pair(*at), (BATCH, HEADS, LEN_Q, LEN_KV))
    behind = numpy.arange(LEN_Q)[:, None] + LEN_KV - LEN_Q - numpy.arange(LEN_KV)
    band = (behind >= 0) | (not causal)
    left, right = window
    band = band & ((behind <= (LEN_KV if left is None else left)) & (behind >= (-LEN_Q if right is None else -right)))
    return alone, numpy.broadcast_to(band | (numpy.arange(LEN_KV) < prefix), (LEN_Q, LEN_KV))


def judge(mask, arrays, of_pair, bands=({},), **options):
    for band in bands:
        found, told, _ = plan_of(mask, arrays, **band, **options)
        alone, shown = seen(of_pair, **band)
        for tile in TILES:
            wanted = expected(alone, shown, tile)
            lists, _ = run(found, told, tile)
            by_keys, _ = run(found, told, tile, by_keys=True)
            assert (lists == wanted).all() and (by_keys == wanted).all()


BANDS = [{}, {"window": (0, 0), "causal": True}]
RARER = [{"causal": True}, {"window": (12, 5)}]
of_bands = pytest.mark.parametrize("bands", quick([BANDS, RARER], BANDS), ids=str)


@of_bands
def test_documents(bands):
    doc, page = numpy.arange(LEN_Q, dtype=numpy.int32) // 20, numpy.arange(LEN_KV, dtype=numpy.uint8)[::-1] // 21
    mask = "doc[q_idx] == page[kv_idx]"
    judge(mask, {"doc": doc, "page": page}, lambda b, h, i, j: doc[i] == page[j], bands)
    doc[::7] = 2**31 - 1  # not sorted, and as far apart as can be
    doc[1::7] = -(2**31)
    judge(mask, {"doc": doc, "page": page}, lambda b, h, i, j: doc[i] == page[j], bands)


@pytest.mark.parametrize("apart", quick([9, 18], 18))
def test_floats_of_which_some_are_none(apart):
    """No comparison with NaN is true, but for !=, wherever in a tile it is."""
    level, weight = numpy.zeros(LEN_Q, numpy.float32), numpy.ones(LEN_KV)
    for at in range(0, LEN_Q, apart):
        level[:] = -0.0
        level[at] = numpy.nan
        weight[at] = numpy.nan
        judge("level[q_idx] < weight[kv_idx]", {"level": level, "weight": weight}, lambda b, h, i, j: level[i] < weight[j])
    level[:] = weight[:] = numpy.nan
    judge("level[q_idx] < weight[kv_idx]", {"level": level, "weight": weight}, lambda b, h, i, j: level[i] < weight[j])


@of_bands
@pytest.mark.parametrize("ranges, arch", quick([(1, "75"), (3, "80")], (1, "75"), spread=True))
def test_ranges(ranges, arch, bands):
    """Empty ones, and ends as far away as can be; of batch elements, heads and queries. On sm_75 lanes exchange what they found."""
    rng = numpy.random.default_rng(ranges)
    start = rng.integers(-9, LEN_KV, (BATCH, HEADS, 4, ranges)).repeat(14, axis=2)[:, :, :LEN_Q]
    stop = start + rng.integers(-3, 40, start.shape)
    start[..., 11, 0], stop[..., 11, 0] = -(2**31), 2**31 - 1
    start[..., 12, 0], stop[..., 12, 0] = 2**31 - 1, -(2**31)

    def of_pair(b, h, i, j):
        return ((start[b, h, i] <= j[..., None]) & (j[..., None] < stop[b, h, i])).any(-1)

    judge(KeyRanges(start.astype(numpy.int32), stop.astype(numpy.int32)), None, of_pair, bands, arch=arch)


def test_what_a_head_has_in_common():
    """A product of it may be computed in one operation with a sum, so that bounds have to be wider; at these places it decides."""
    share = numpy.array([0, 1 / 3, 32 / LEN_KV, 1.0], numpy.float32)[:HEADS]
    judge("kv_idx + 0.0 < share[h] * kv_len", {"share": share}, lambda b, h, i, j: j < (share[h] * numpy.float32(LEN_KV)))


PRODUCTS = [("kv_idx * 1.5 < limit", 24.0), ("kv_idx < share[h] * limit", 16.0)]


@pytest.mark.parametrize("product, limit", quick(PRODUCTS, PRODUCTS[0], spread=True))
def test_a_product_that_decides_by_its_last_bit(product, limit):
    """Some computers round it before a sum, and others do not: so pairs are asked, which they are not a little further on."""
    arrays = {"flag": numpy.zeros(LEN_Q, bool), "share": numpy.ones(HEADS, numpy.float32)}
    mask = f"{product} or flag[q_idx]"
    arrays = {name: x for name, x in arrays.items() if name in mask}
    moved = [run(*plan_of(mask, arrays | {"limit": x})[:2], (16, 16))[1].read_bytes for x in (limit, limit * 0.99)]
    assert moved[0] - moved[1] >= -(-LEN_Q // 16) * 8 * 16  # what lanes ask first, of a tile each


def test_blocks_of_queries_and_keys_with_a_prefix():
    bands = [{"causal": True, "prefix": 20}, {"causal": True, "prefix": LEN_KV}]
    judge("q_idx // 16 == kv_idx // 16 or kv_idx % 64 < 3", None, lambda b, h, i, j: (i // 16 == j // 16) | (j % 64 < 3), bands)


def test_batches_of_two_axes_and_a_table_of_tiles():
    """An index that is computed reads the elements between its ends."""
    length = numpy.array([[10], [60]])
    table = numpy.arange(8) % 3 > 0

    def of_pair(b, h, i, j):
        return (j < length[b, 0]) & table[i // 8]

    judge("kv_idx < length[b // 1 % 2, 0] and table[q_idx // 8]", {"length": length, "table": table}, of_pair, batch=(2, 1))


# What it costs


def documents(length, size):
    return "doc[q_idx] == doc[kv_idx]", {"doc": (numpy.arange(length) // size).astype(numpy.int32)}


def prefixes(length, size):
    return "kv_idx < prefix[b]", {"prefix": numpy.array([size, 3 * size], numpy.int32)}


def ranges(length, size):
    """The first keys, and a window."""
    i = numpy.arange(length, dtype=numpy.int32)[:, None]
    return KeyRanges(numpy.concatenate([0 * i, i - size], 1), numpy.concatenate([0 * i + 4, i + 1], 1)), None


MOST = [(documents, 1 / 20), (prefixes, 1 / 20), (ranges, 1 / 4)]


@pytest.mark.parametrize("make, most", quick(MOST, MOST[0], spread=True))
def test_most_tiles_are_classified_without_their_pairs(make, most):
    length, tile = 1024, (128, 128)
    found, told, _ = plan_of(*make(length, 200), len_q=length, len_kv=length)
    (lists, moved), (right, alone) = run(found, told, tile), run(by_pairs(found), told, tile)
    assert (lists == right).all()
    assert moved.read_bytes <= most * alone.read_bytes
