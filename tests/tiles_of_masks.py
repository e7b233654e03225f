"""Classification alone: the lists of tiles that a mask has, for tiles of any size."""

import math
from dataclasses import replace

import numpy

from cupy_flash import plan_attention
from cupy_flash.call.captured import captured
from cupy_flash.machine import host
from cupy_flash.plan.params import fast_divmod

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV = 2, 4, 2, 53, 75


def plan_of(mask, arrays=None, len_q=LEN_Q, len_kv=LEN_KV, batch=BATCH, heads=HEADS, heads_kv=HEADS_KV, arch="80", **options):
    """The classification of a mask, what it is told of arrays, and their layouts."""
    batch = batch if isinstance(batch, tuple) else (batch,)
    q, k = (numpy.zeros((*batch, *shape, 8), numpy.float16) for shape in ((heads, len_q), (heads_kv, len_kv)))
    plan = plan_attention(q, k, k, mask=mask, arrays=arrays, backend="host", arch=arch, **options)
    found = plan._execution.preparation
    return found, dict(zip(found.names, captured(mask=mask, arrays=arrays).on_host)), dict(plan.problem.scores.arrays)


def by_pairs(found):
    """The same classification without intervals."""
    text = replace(found.kernel.expressions, takes_part_in="")
    return replace(found, kernel=replace(found.kernel, expressions=text))


def run(found, told, tile, by_keys=False):
    """In which tiles any pair takes part and in which all do, (batch, heads, 2, query tiles, key tiles), and what is moved."""
    params = found.params.copy()
    params["tile_q"], params["tile_kv"] = tile
    params["by_keys"] = by_keys
    tiles = [-(-int(params[side][0]) // int(size)) for side, size in zip(("len_q", "len_kv"), tile)]
    if by_keys:
        tiles.reverse()
    params["others"] = tiles[1]
    params["words_divmod"], params["tiles_divmod"] = fast_divmod(-(-tiles[1] // 32)), fast_divmod(tiles[0])
    apart = math.prod(params["batch"][0].tolist()), int(params["heads_divmod"]["divisor"][0])
    words = numpy.full((*apart, tiles[0], 2, -(-tiles[1] // 32)), 0xDEADBEEF, numpy.uint32)
    launch = replace(found.launches[0], blocks=words.size * 2)
    moved = host.run(found.kernel, (launch,), params, told | {"tile_lists": words}, host.HostOptions())
    bits = numpy.unpackbits(words.view(numpy.uint8), axis=-1, bitorder="little").astype(bool)
    assert not bits[..., 0, tiles[1] :].any()
    lists = bits[..., : tiles[1]].swapaxes(2, 3)
    return lists.swapaxes(-1, -2) if by_keys else lists, moved


def expected(alone, band, tile):
    """The same from the pairs that take part, (batch, heads, queries, keys), and those that the other masks show."""

    def of_tiles(pairs, reduce):
        for axis, size in zip((-2, -1), tile):
            pairs = reduce.reduceat(pairs, range(0, pairs.shape[axis], size), axis=axis)
        return pairs

    return numpy.stack([of_tiles(alone & band, numpy.logical_or), of_tiles(alone, numpy.logical_and)], axis=-3)
