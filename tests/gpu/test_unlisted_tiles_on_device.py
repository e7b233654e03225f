"""Few query tiles of padded sequences, each with a block of its own and from a list, by fwd_hopper on a device."""

import pytest
from test_unlisted_tiles import ASKED, check

from cupy_flash.call import forward

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="fwd_hopper is for sm_90"
)


@pytest.mark.parametrize("name", ASKED)
def test_each_tile_is_computed_as_from_a_list(name, monkeypatch):
    check(name, monkeypatch, {}, cupy.asarray, cupy.asnumpy)
    forward._prepared.cache_clear()
