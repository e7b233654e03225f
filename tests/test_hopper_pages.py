"""Keys in pages in fwd_hopper: bits are those of keys in a row, whatever sizes pages and tiles have."""

import math

import numpy
import pytest

from cupy_flash import plan_attention

LENS_Q, LENS_KV = (70, 3, 200), (1100, 70, 0)
release = pytest.mark.release


def in_pages(x, lens, size, rng):
    """A pool of pages in any order, NaN where no key is, as in its first one, and their table; other entries lead nowhere."""
    used = [-(-n // size) for n in lens]
    table = numpy.full((len(lens), max(used) + 1), 2**31 - 1, numpy.int32)
    order, first = 1 + rng.permutation(sum(used)), 0
    pool = numpy.full((sum(used) + 1, x.shape[1], size, x.shape[3]), numpy.nan, x.dtype)
    for b, (n, count) in enumerate(zip(lens, used)):
        table[b, :count] = order[first : first + count]
        first += count
        for i, page in enumerate(table[b, :count]):
            rows = x[b, :, i * size : min(n, (i + 1) * size)]
            pool[page, :, : rows.shape[1]] = rows
    return pool, table


# Pages that a tile has one and several of, that have several tiles, and that no tile is a multiple of.
SIZES = (1, 3, 8, 16, 24, 48, 64, 256)
QUICK = {(64, 16, "window")}  # test_hopper_gradients_of_lengths.py has pages of one key as well
MASKS = {"causal": {"causal": True}, "window": {"window": (300, 0)}, "full": {}}
SETTINGS = [
    pytest.param(dim, size, mask, marks=() if (dim, size, mask) in QUICK else release)
    for dim in (64, 128, 192, 256)
    for size in SIZES
    for mask in MASKS
    if (dim, mask) != (64, "full") or size >= 8  # copied, they are for fwd_v2
]


@pytest.mark.parametrize("dim, size, mask", SETTINGS)
def test_bits_are_those_of_keys_in_a_row(dim, size, mask):
    rng = numpy.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, heads, n, dim)).astype(numpy.float16) for heads, n in ((2, 200), (1, 1100), (1, 1100)))
    lengths = {"seqlens_q": numpy.array(LENS_Q, numpy.int32), "seqlens_kv": numpy.array(LENS_KV, numpy.int32)}
    pools, tables = zip(*(in_pages(x, LENS_KV, size, numpy.random.default_rng(1)) for x in (k, v)))
    for x in (k, v):
        for b, n in enumerate(LENS_KV):
            x[b, :, n:] = numpy.nan
    options = {"backend": "host", "arch": "90a", "return_lse": True, **MASKS[mask]}
    results = []
    for keys, given in (((k, v), lengths), (pools, lengths | {"pages": tables[0]})):
        plan = plan_attention(q, *keys, **given, **options)
        assert plan.kernel.file == "fwd_hopper" and ("pages" in given) == plan.kernel.config.PAGED
        config = plan.kernel.config
        piece = math.gcd(config.TILE_KV, size)
        assert (piece if "pages" in given and size >= 8 else 0) == config.PIECE
        assert (1 if "pages" not in given else 4 if piece < 32 else 2) == config.PRODUCER_WARPS
        results.append(plan(q, *keys, **given))
    for x, y in zip(*results):
        assert numpy.isfinite(x[0, :, :70].astype(float)).all()
        numpy.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))
