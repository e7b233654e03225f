"""Few queries with many keys in fwd_v2: what blocks that share a query tile hand on has the room that they take."""

import numpy as np
import pytest

from cupy_flash import plan_attention
from cupy_flash.judge.compare import compare


@pytest.mark.parametrize(
    "dtype, group, queries", [("float32", 2, 1), ("float32", 1, 17), ("float16", 1, 3), ("float16", 5, 16)], ids=str
)
def test_splits_stay_in_their_workspace(dtype, group, queries):
    """Warps store all of their rows, 16 or 32, whichever of these exist."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, group, queries, 40)).astype(dtype)
    k, v = rng.standard_normal((2, 1, 1, 1100, 40)).astype(dtype)
    plan = plan_attention(q, k, v, backend="host", kernel="fwd_v2", return_lse=True)
    assert plan.kernel.config.SPLIT_KV
    size = plan.workspace_bytes
    memory = np.full(size + 2**16, 77, np.uint8)
    out, lse = plan(q, k, v, workspace=memory[:size])
    assert (memory[size:] == 77).all()
    comparison = compare(out, lse, q, k, v, scale=40**-0.5)
    assert comparison.ok, comparison.message
