"""Bits of a mask that kernels for sm_90a read in place of asking: what they are, and how much memory they may take."""

import math

import numpy
import pytest
from thinned import thinned
from tile_masks import LEN_KV, LEN_Q, NAMES, TILE_MASKS, bits_of, classified, inputs, operands_of, visible

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.plan.classify import rows_of_list


def pairs_of_bits(words, rows, cols, tile):
    """Which pairs take part, from words of so many tiles of columns: (..., rows, cols), and beyond the ends of both."""
    parts, tiles = -(-rows // 16), -(-cols // tile)
    words = words.view(f"u{4 if tile <= 64 else 8}").reshape(-1, parts, tiles, 32)
    lane, reg = numpy.ogrid[:32, : tile // 2]
    pairs = numpy.zeros((len(words), parts, 16, tiles, tile), bool)
    bits = (words[..., None] >> reg.astype(words.dtype) & 1).astype(bool)  # (matrices, parts, tiles, lanes, registers)
    row, col = lane // 4 + reg // 2 % 2 * 8, reg // 4 * 8 + lane % 4 * 2 + reg % 2
    pairs.transpose(0, 1, 3, 2, 4)[..., row, col] = bits
    return pairs.reshape(len(words), parts * 16, tiles * tile)


@pytest.mark.parametrize("name", thinned(NAMES, keep=4))
@pytest.mark.parametrize("dim", thinned([40, 160, 120], keep=3))
def test_bits_are_those_of_the_mask(name, dim, share_of_bits):
    """Of the tiles in which some pairs take part and others do not, and what lists say of all of them, in both directions."""
    share_of_bits(math.inf)
    options, hand = TILE_MASKS[name]()
    q, k, v, dout = inputs("float16", dim=dim)
    both, _ = visible(hand)
    where = {"backend": "host", "arch": "90a"}
    forward = plan_attention(q, k, v, **where, **options)
    backward = plan_attention_backward(dout, q, k, v, q, numpy.zeros(q.shape[:-1], numpy.float32), **where, **options)
    for plan, arguments in ((forward, (q, k, v)), (backward, (dout, q, k, v, q, numpy.zeros(q.shape[:-1], numpy.float32)))):
        c, by_keys = plan.kernel.config, plan is backward
        assert c.PAIR_BITS and "hopper" in plan.kernel.file
        words = classified(plan, arguments, operands_of(options))["tile_lists"]
        told = plan._execution._params[0]["scores"]["tiles"]
        apart = int(told["batches"]), int(told["heads"])
        pairs = both[: apart[0], : apart[1]].reshape(-1, LEN_Q, LEN_KV)
        rows, cols = rows_of_list(plan.kernel), c.TILE_KV
        if by_keys:
            pairs, rows, cols = pairs.swapaxes(-1, -2), c.TILE_KV, c.TILE_Q
        (_, height, width), lists, others = pairs.shape, -(-pairs.shape[1] // rows), -(-pairs.shape[2] // cols)
        full = numpy.zeros((len(pairs), lists * rows, others * cols), bool)
        full[:, :height, :width] = pairs
        tiles = full.reshape(len(pairs), lists, rows, others, cols)
        some, every = tiles.any((2, 4)), tiles.all((2, 4))
        size = 2 * len(pairs) * lists * -(-others // 32)
        found = bits_of(words[:size].reshape(len(pairs), lists, 2, -1), others)
        assert (found[..., 0, :] == some).all() and (found[..., 1, :] == every).all()
        of_pairs = pairs_of_bits(words[-(-size // 32) * 32 :], lists * rows, width, cols)
        asked = (some & ~every).repeat(rows, 1).repeat(cols, 2)[:, : of_pairs.shape[1]]
        assert (of_pairs == full[:, : of_pairs.shape[1]])[asked].all()


@pytest.mark.parametrize("heads, rows, dim", [(1, 2048, 64), (3, 6144, 64), (1, 4608, 192)])
def test_bits_take_at_most_half_of_what_the_arrays_do(heads, rows, dim):
    for more, bits in ((0, True), (1, False)):
        q = numpy.zeros((heads, rows + more, dim), numpy.float16)
        lse, mask = numpy.zeros(q.shape[:-1], numpy.float32), {"mask": "kv_idx % 100 <= q_idx % 100"}
        where = {"backend": "host", "arch": "90a"}
        for plan in (plan_attention(q, q, q, **where, **mask), plan_attention_backward(q, q, q, q, q, lse, **where, **mask)):
            assert bits == plan.kernel.config.PAIR_BITS
            size, c = dict(plan.workspace.parts)["tile_lists"], plan.kernel.config
            side = c.TILE_Q if "bwd" in plan.kernel.file else c.TILE_KV
            of_bits = rows**2 / 8 * bits * (1 if side % 64 == 0 else 64 / 48)
            assert of_bits <= size <= min(of_bits, 4 * q.nbytes / 2) + rows**2 / 4000
            assert ("a bit for each" if bits else "more than half of what q, k, v and out do") in str(plan)


def test_bits_of_few_queries_take_little_as_well():
    """A row of pairs takes the words of 16, and in the backward of a tile. The kernel of the forward is asked for by name."""
    where = {"backend": "host", "arch": "90a", "mask": "kv_idx % 7 < h + b"}
    for heads, bits in ((4, True), (16, False)):
        q, k, lse = (numpy.zeros((3, *shape), "f2") for shape in ((heads, 1, 64), (1, 5000, 64), (heads, 1)))
        lse = lse.astype("f4")
        forward = plan_attention(q, k, k, kernel="fwd_hopper", **where)
        for plan in (forward, plan_attention_backward(q, q, k, k, q, lse, **where)):
            assert bits == plan.kernel.config.PAIR_BITS
            assert dict(plan.workspace.parts)["tile_lists"] <= 0.52 * 2 * (q.nbytes + k.nbytes)


@pytest.mark.parametrize("dim", thinned([40, 160]))
def test_keys_that_do_not_exist_give_nothing_however_low_scores_are(dim, share_of_bits):
    """Their scores are 0, and 2 to the power of that less the log-sum-exp would be infinite. Warps have no key that exists."""
    share_of_bits(math.inf)
    rng = numpy.random.default_rng(0)
    len_q, len_kv = 100, 144
    k = (5 + rng.standard_normal((1, 2, len_kv, dim)) / 9).astype("f2")
    q, v, dout = -k[..., :len_q, :], *(rng.standard_normal((1, 2, n, dim)).astype("f2") for n in (len_kv, len_q))
    options = {"mask": "kv_idx < n", "arrays": {"n": len_kv}}
    out, lse = plan_attention(q, k, v, backend="numpy", return_lse=True, **options)(q, k, v, arrays=options["arrays"])
    assert lse.max() < -100
    plan = plan_attention_backward(dout, q, k, v, out, lse, backend="host", arch="90a", **options)
    assert plan.kernel.config.PAIR_BITS
    given = plan_attention_backward(dout, q, k, v, out, lse, backend="numpy", **options)
    for got, right in zip(*(x(dout, q, k, v, out, lse, arrays=options["arrays"]) for x in (plan, given))):
        assert numpy.isfinite(got).all() and abs(got.astype("f4") - right.astype("f4")).max() <= 2**-6 * max(1, abs(right).max())
