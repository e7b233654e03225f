"""Which query tile of a sequence is not full in fwd_hopper, and what its rows that are no queries do to others."""

from itertools import product

import ml_dtypes
import numpy
import pytest
from thinned import quick

from cupy_flash import plan_attention

WHERE = {"backend": "host", "arch": "90a"}

OF_SCORES = [*product((64, 128), ({}, {"score": "score + 0.1 * (kv_idx - q_len)"}))]
MASKED = [(dim, options) for options in ({}, {"window": (100, 0)}, {"dropout": 0.2, "seed": 3}) for dim in (64, 128)]


def planned(lens, dim, heads=1, **options):
    """A plan of packed sequences, normal numbers for it, and what it is told of lengths."""
    rng = numpy.random.default_rng(0)
    offsets = numpy.cumsum((0, *lens)).astype(numpy.int32)
    q, k, v = (rng.standard_normal((heads, offsets[-1], dim), numpy.float32).astype(ml_dtypes.bfloat16) for _ in range(3))
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    return plan_attention(q, k, v, **options, **given, **WHERE), (q, k, v), given


@pytest.mark.parametrize("length", [70, 256, 320, 900])
@pytest.mark.parametrize("dim, options", quick(OF_SCORES, *OF_SCORES[:2], spread=True), ids=str)
def test_keys_that_are_read(dim, length, options):
    """Under a causal mask the first tile has what is left over of whole groups of 64 queries: a score may ask where they lie."""
    plan, arrays, given = planned((length,), dim, causal=True, **options)
    c = plan.kernel.config
    assert plan.kernel.file == "fwd_hopper"
    tiles = -(-length // c.TILE_Q)
    missing = 0 if options else tiles * c.TILE_Q - -(-length // 64) * 64
    starts = [max(tile * c.TILE_Q - missing, 0) for tile in range(tiles)]
    ends = [min((tile + 1) * c.TILE_Q - missing, length) for tile in range(tiles)]
    keys = sum(min(-(-end // c.TILE_KV) * c.TILE_KV, length) for end in ends)
    queries = sum(min(start + c.TILE_Q, length) - start for start in starts)  # TMA brings those of the next tile as well
    _, traffic = plan.counted(*arrays, **given)
    rest = traffic.read_bytes - 2 * dim * (2 * keys + queries)  # offsets, and the list of tiles
    assert 0 <= rest < 2 * dim * c.TILE_KV


@pytest.mark.parametrize("follows", [numpy.nan, numpy.inf, 3e4, 0.0])
@pytest.mark.parametrize("dim, options", quick(MASKED, MASKED[0], *MASKED[3:5], spread=True), ids=str)
def test_rows_behind_a_sequence_change_no_bit(dim, options, follows):
    """Whatever they are: whether a step looks for a maximum anew decides bits."""
    plan, (q, k, v), given = planned((300, 90), dim, heads=2, **({"causal": True} | options))
    assert plan.kernel.file == "fwd_hopper"
    seed = {"seed": options["seed"]} if "seed" in options else {}
    expected = plan(q, k, v, **seed, **given)[:, :300].copy()
    q[:, 300:] = k[:, 300:] = follows
    v[:, 300:] = 1 if numpy.isfinite(follows) else follows
    numpy.testing.assert_array_equal(plan(q, k, v, **seed, **given)[:, :300].view("u2"), expected.view("u2"))
