"""Padded sequences with a bias, which comes by TMA, in the kernels for sm_90a, on the host."""

import numpy
import pytest
from sequences_with_bias import CASES, QUICK, judged
from thinned import quick, thinned

from cupy_flash import attention, attention_backward, plan_attention_backward
from cupy_flash.machine import host

pytestmark = pytest.mark.usefixtures("poisoned_results")
TILES = {  # of the forward and of the backward: kernel, queries and keys of a tile
    40: ("fwd_hopper", 256, 64, "bwd_hopper", 128, 128),
    128: ("fwd_hopper", 192, 64, "bwd_hopper", 64, 128),
    160: ("fwd_hopper", 128, 64, "bwd_hopper_wide", 64, 64),
    256: ("fwd_hopper", 128, 64, "bwd_hopper_wide", 64, 64),
}
TILES_FLOAT32 = TILES | {40: ("fwd_hopper", 192, 64, "bwd_hopper", 64, 128)}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


@pytest.mark.parametrize("case", quick(CASES, *QUICK), ids=str)
def test_sequences_with_a_bias(case, schedule):
    (dim, _), _, shape, dropout = case
    forward, backward = judged(case, {"backend": "host", "arch": "90a"})
    assert forward.config.VARLEN and forward.config.DROPOUT is dropout
    stored = backward.kernel.config.STORE_DBIAS
    assert [kernel.file for kernel in backward.kernels[1:]] == ([] if stored else ["bwd_scores_hopper"])
    tiles = ((kernel.file, kernel.config.TILE_Q, kernel.config.TILE_KV) for kernel in (forward, backward.kernel))
    assert tuple(x for tile in tiles for x in tile) == (TILES_FLOAT32 if "float32" in shape else TILES)[dim]
    assert forward.config.STAGED_BIAS
    staged = dim <= 192  # beyond, shared memory of the backward is full
    assert backward.kernel.config.STAGED_BIAS is staged
    assert stored is (staged and shape == "of pairs")


@pytest.mark.release  # test_read_hopper.py has gradients of a bias that ask a mask, of a batch
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_mask_that_tells_sequences_apart(dtype):
    """Beside a bias that they share, whose gradient asks the mask of each of them."""
    rng = numpy.random.default_rng(6)
    q, dout = (rng.standard_normal((3, 2, 150, 64)).astype(numpy.float16) for _ in range(2))
    k, v = (rng.standard_normal((3, 2, 200, 64)).astype(numpy.float16) for _ in range(2))
    operands = {"bias": rng.standard_normal((2, 150, 200)).astype(dtype), "seqlens_q": numpy.array([150, 0, 77])}
    operands |= {"seqlens_kv": numpy.array([33, 200, 170]), "seed": 5}
    options = {**operands, "mask": "(q_idx + b) % 3 != kv_idx % 3", "dropout": 0.3, "wrt": "bias"}
    results = attention(q, k, v, return_lse=True, **{name: x for name, x in options.items() if name != "wrt"})
    expected = attention_backward(dout, q, k, v, *results, **options)
    plan = plan_attention_backward(dout, q, k, v, *results, **options, backend="host", arch="90a")
    found = plan(dout, q, k, v, *results, **operands)
    assert plan.kernels[1].file == "bwd_scores_hopper" and plan.kernels[1].config.MASKED_PAIRS
    for x, y in zip((*found, found.dbias), (*expected, expected.dbias)):
        assert abs(x.astype(float) - y.astype(float)).max() <= 2**-7 * abs(y.astype(float)).max()
