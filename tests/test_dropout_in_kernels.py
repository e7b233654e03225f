"""Which pairs kernels drop, told from their results one by one: those of `dropout_mask`, in each kernel and on each path."""

from itertools import product

import numpy
import pytest
from score_kernels import DTYPES
from thinned import quick, thinned

from cupy_flash import UnsupportedError, dropout_mask, plan_attention, plan_attention_backward

SEED, P = ((1 << 63) + 12345, 2**32 - 7), 0.4
DIM, LENGTH = 40, 75
BACKWARDS = [("80", "bfloat16", "bwd_v2"), ("75", "float16", "bwd_v2"), ("90a", "float16", "bwd_hopper_wide")]
BACKWARDS += [("90a", "float16", "bwd_v2"), ("90a", "float16", "bwd_hopper")]


def one_hot(length, first, heads, dtype):
    """Rows `first` ... of which each has a 1 in a column of its own, in each head; the others are 0."""
    x = numpy.zeros((heads, length, DIM), DTYPES[dtype])
    rows = numpy.arange(first, min(first + DIM, length))
    x[:, rows, rows - first] = 1
    return x, rows


@pytest.mark.parametrize("kind", thinned(BACKWARDS, keep=5, first=4), ids="-".join)
def test_each_gradient_has_the_pairs_of_the_forward(kind):
    """P and dP are 1 everywhere, so that each gradient holds the mask: dv of one-hot dout, dq of one-hot k, dk of one-hot q."""
    arch, dtype, kernel = kind
    kept = dropout_mask((4, LENGTH, LENGTH), P, SEED)
    ones = numpy.ones((4, LENGTH, DIM), DTYPES[dtype])
    lse, zeros = numpy.zeros((4, LENGTH), numpy.float32), 0 * ones
    asked = {} if kernel == "bwd_hopper" else {"bias": numpy.zeros((4, LENGTH, LENGTH), numpy.float32)}  # it takes one of two

    def gradients(dout, q, k, v, heads_kv=4):
        given = (dout, q, k[:heads_kv], v[:heads_kv], zeros, lse)  # of out 0, so that nothing is taken from dP
        options = {"dropout": P, "seed": SEED, "scale": 1.0, "wrt": tuple(asked), **asked}
        plan = plan_attention_backward(*given, backend="host", arch=arch, kernel=kernel, **options)
        assert plan.kernel.file == kernel and plan.kernel.config.DROPOUT
        return plan(*given, seed=SEED, **asked)

    for first in range(0, LENGTH, DIM):
        hot, rows = one_hot(LENGTH, first, 4, dtype)
        columns = rows - first
        dout = hot.copy()
        dout[[0, 1, 3]] = 0  # of the heads that share a key head, one at a time
        dv = gradients(dout, zeros, zeros, ones, heads_kv=2).dv
        assert ((dv[1][:, columns] != 0) == kept[2][rows].T).all()
        grads = gradients(ones, zeros, hot, ones)
        assert ((grads.dq[..., columns] != 0) == kept[:, :, rows]).all()
        if asked:
            assert ((grads.dbias != 0) == kept).all()
        assert ((gradients(ones, hot, zeros, ones).dk[..., columns] != 0) == kept[:, rows].swapaxes(1, 2)).all()


@pytest.mark.parametrize("dropped", thinned([1, 0x4000, 0x7C00, 0x7C01, 0x7FFF]))
def test_as_many_as_are_asked_for(dropped):
    """Hopper kernels compare numbers as float16, up to what is infinity there. Beyond that others compute, and say so."""
    p, version = dropped / 2**15, "v2" if dropped > 0x7C00 else "hopper"
    kept = dropout_mask((4, LENGTH, LENGTH), p, SEED)
    q = numpy.zeros((4, LENGTH, DIM), numpy.float16)
    v, keys = one_hot(LENGTH, 0, 4, "float16")
    options = {"backend": "host", "arch": "90a", "dropout": p, "seed": SEED}
    plan = plan_attention(q, q, v, **options)
    assert plan.kernel.file == f"fwd_{version}"
    assert ((plan(q, q, v, seed=SEED)[..., : len(keys)] != 0) == kept[..., keys]).all()
    given = (v, q, q, q, q, numpy.zeros((4, LENGTH), numpy.float32))  # of lse 0, so that P is 1
    backward = plan_attention_backward(*given, **options)
    assert backward.kernel.file == f"bwd_{version}"
    assert ((backward(*given, seed=SEED).dv[..., : len(keys)] != 0) == kept[:, keys].swapaxes(1, 2)).all()
    if version == "v2":
        with pytest.raises(UnsupportedError, match="fwd_hopper drops at most 31 of 32 pairs"):
            plan_attention(q, q, v, kernel="fwd_hopper", **options)
        for kernel in ("bwd_hopper", "bwd_hopper_wide"):
            with pytest.raises(UnsupportedError, match="Hopper kernels drop at most 31 of 32 pairs"):
                plan_attention_backward(*given, kernel=kernel, **options)


WIDER = [(128, (128, 128), (64, 128)), (192, (128, 96), (64, 64)), (256, (128, 64), (64, 64))]


@pytest.mark.parametrize("dim, tile, backward_tile", quick(WIDER, WIDER[2], spread=True))
def test_tiles_of_wider_heads(dim, tile, backward_tile):
    """As many blocks of 16 x 16 pairs as a warp may draw."""
    length = 150
    kept = dropout_mask((1, length, length), P, SEED)
    zeros, hot = numpy.zeros((1, length, dim), numpy.float16), numpy.eye(length, dim, dtype=numpy.float16)[None]
    options = {"backend": "host", "arch": "90a", "dropout": P, "seed": SEED}
    keys = min(dim, length)

    def tile_of(plan):
        return plan.kernel.config.TILE_Q, plan.kernel.config.TILE_KV

    plan = plan_attention(zeros, zeros, hot, **options)
    assert plan.kernel.file == "fwd_hopper" and tile_of(plan) == tile
    assert ((plan(zeros, zeros, hot, seed=SEED)[..., :keys] != 0) == kept[..., :keys]).all()
    given = (hot, zeros, zeros, zeros, zeros, numpy.zeros((1, length), numpy.float32))
    backward = plan_attention_backward(*given, **options)
    assert backward.kernel.file.startswith("bwd_hopper") and tile_of(backward) == backward_tile
    assert ((backward(*given, seed=SEED).dv[..., :keys] != 0) == kept[:, :keys].swapaxes(1, 2)).all()


def test_a_tile_of_five_blocks():
    """Of 80 keys, as sequences have them: every other one begins in the middle of 32, so that each block is drawn for alone."""
    length, dim = 150, 192
    zeros, hot = numpy.zeros((1, length, dim), numpy.float16), numpy.eye(length, dim, dtype=numpy.float16)[None]
    lengths = {"cu_seqlens_q": numpy.array([0, length]), "cu_seqlens_kv": numpy.array([0, length])}
    plan = plan_attention(zeros, zeros, hot, backend="host", arch="90a", dropout=P, seed=SEED, **lengths)
    assert plan.kernel.file == "fwd_hopper" and plan.kernel.config.TILE_KV == 80
    kept = dropout_mask((1, length, length), P, SEED)
    assert ((plan(zeros, zeros, hot, seed=SEED, **lengths)[..., :length] != 0) == kept).all()


FEW = list(product([("80", "bfloat16"), ("90a", "float16")], [(1, 75, 1), (9, 75, 2), (4, 1500, 1)]))


@pytest.mark.parametrize("kind, shape", quick(FEW, FEW[0], FEW[1], FEW[5], spread=True), ids=str)
def test_few_queries_and_split_keys(kind, shape):
    """Where heads of a group could share a tile, and blocks their query tiles, a pair is still known by its head and its key."""
    len_q, len_kv, heads_kv = shape
    arch, dtype = kind
    kept = dropout_mask((2, 4, len_q, len_kv), P, SEED)
    q, k = (numpy.zeros((2, heads, n, DIM), DTYPES[dtype]) for heads, n in ((4, len_q), (heads_kv, len_kv)))
    for first in (0, len_kv - DIM):
        v, keys = one_hot(len_kv, first, heads_kv, dtype)
        v = numpy.broadcast_to(v, (2, *v.shape))
        plan = plan_attention(q, k, v, backend="host", arch=arch, dropout=P, seed=SEED)
        assert plan.kernel.config.SPLIT_KV is (len_kv > 1000)
        assert ((plan(q, k, v, seed=SEED) != 0) == kept[..., keys]).all()
