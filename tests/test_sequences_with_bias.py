"""Padded sequences with a bias, which comes by TMA, in the kernels for sm_90a, on the host."""

import pytest
from sequences_with_bias import CASES, QUICK, judged
from thinned import quick, thinned

from cupy_flash.machine import host

pytestmark = pytest.mark.usefixtures("poisoned_results")
TILES = {  # of the forward and of the backward: kernel, queries and keys of a tile
    40: ("fwd_hopper", 256, 64, "bwd_hopper", 128, 128),
    128: ("fwd_hopper", 192, 64, "bwd_hopper", 64, 128),
    160: ("fwd_hopper", 128, 64, "bwd_hopper_wide", 64, 64),
    256: ("fwd_hopper", 128, 64, "bwd_hopper_wide", 64, 64),
}


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
    if "float32" in shape:  # of which ldmatrix moves no element
        assert not forward.config.STAGED_BIAS and not backward.kernel.config.STAGED_BIAS
        return
    tiles = ((kernel.file, kernel.config.TILE_Q, kernel.config.TILE_KV) for kernel in (forward, backward.kernel))
    assert tuple(x for tile in tiles for x in tile) == TILES[dim]
    assert forward.config.STAGED_BIAS
    staged = dim <= 192  # beyond, shared memory of the backward is full
    assert backward.kernel.config.STAGED_BIAS is staged
    assert stored is (staged and shape == "of pairs")
