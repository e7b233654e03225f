"""Heads that take turns with the tiles of sequences, on the host: how many, that each tile is computed once, and what is read."""

from itertools import product

import ml_dtypes
import numpy
import pytest
from ragged import Ragged, assert_same_bits, forward
from thinned import quick

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.call import forward as calls
from cupy_flash.plan import heads_together
from cupy_flash.plan.grouping import make_grouping
from cupy_flash.plan.heads_together import query_heads_together

WHERE = {"backend": "host", "arch": "90a"}
LENS = ((300, 300), (0, 20), (1, 65), (130, 3), (64, 200))


def planned(tokens, heads, heads_kv, dim, sequences=3):
    """Packed queries and keys: memory that nobody touches."""
    q, k = (numpy.empty((n, tokens, dim), ml_dtypes.bfloat16) for n in (heads, heads_kv))
    offsets = numpy.linspace(0, tokens, sequences + 1).astype(numpy.int32)
    return plan_attention(q, k, k, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, causal=True, **WHERE)


@pytest.mark.parametrize(
    "tokens, heads, heads_kv, dim, tile_q, expected",
    [
        (32768, 16, 16, 128, 128, 2),  # 16 MB each, and 256 tiles
        (32768, 16, 16, 128, 192, 4),  # 171 tiles: of two heads, fewer than four for each block
        (32768, 32, 32, 64, 256, 4),
        (32768, 15, 15, 128, 192, 3),
        (32768, 13, 13, 128, 192, 13),
        (16384, 32, 32, 64, 128, 8),
        (131072, 16, 16, 128, 128, 1),  # 67 MB, so that one is too many already
        (131072, 16, 4, 128, 128, 4),  # that share these
        (131072, 16, 1, 128, 128, 16),
        (16384, 32, 8, 128, 128, 16),  # four times four
        (1000, 16, 16, 128, 128, 16),  # too few tiles for any group
        (1000, 6, 1, 64, 128, 6),
    ],
)
def test_how_many_take_turns(tokens, heads, heads_kv, dim, tile_q, expected):
    assert query_heads_together(planned(tokens, heads, heads_kv, dim).problem, tile_q) == expected


@pytest.mark.parametrize(
    "tokens, sequences, dim, causal, expected",
    [
        (32768, 17, 64, True, 8),
        (32768, 17, 128, True, 4),
        (32768, 17, 256, True, 2),
        (32768, 8, 256, True, 2),  # of 4,096 rows two are better than one, though they are more bytes
        (32768, 2, 256, True, 1),
        (32768, 1, 128, True, 1),
        (32768, 72, 64, True, 8),
        (32768, 17, 64, False, 16),
        (32768, 17, 128, False, 8),
        (32768, 72, 256, False, 16),
    ],
)
def test_how_many_take_turns_where_sums_have_an_order(tokens, sequences, dim, causal, expected):
    heads = 2048 // dim
    q, lse = numpy.empty((heads, tokens, dim), ml_dtypes.bfloat16), numpy.empty((heads, tokens), numpy.float32)
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), numpy.linspace(0, tokens, sequences + 1).astype(numpy.int32))
    plan = plan_attention_backward(q, q, q, q, q, lse, causal=causal, deterministic=True, **given, **WHERE)
    assert make_grouping(plan.kernel, plan.problem).heads_together == expected


def test_rooms_of_sequences_count():
    """Padded ones have a batch element each, and a cache in pages what its table has room for."""
    q, k = numpy.empty((4, 16, 2048, 128), ml_dtypes.bfloat16), numpy.empty((9, 16, 64, 128), ml_dtypes.bfloat16)
    lens, table = numpy.zeros(4, numpy.int32), numpy.zeros((4, 128), numpy.int32)
    plan = plan_attention(q, k, k, seqlens_q=lens, seqlens_kv=lens, pages=table, **WHERE)
    assert plan.problem.len_kv == 8192 and query_heads_together(plan.problem, 128) == 8  # 16 MB each, of which 64 tiles
    assert query_heads_together(plan.problem, 32) == 2


@pytest.fixture
def groups(monkeypatch):
    """Has so few heads take turns as share keys, and plans made anew."""

    def few(is_few):
        monkeypatch.setattr(heads_together, "LEAST_TILES", 1 if is_few else 1 << 30)
        monkeypatch.setattr(heads_together, "L2_BYTES", 0)
        calls._prepared.cache_clear()

    yield few
    monkeypatch.undo()
    calls._prepared.cache_clear()


CASES = list(product([(3, 3), (6, 3)], [("packed", "packed"), ("padded", "roomy")]))


@pytest.mark.parametrize("heads, kinds", quick(CASES, *CASES[::3], spread=True), ids=str)
def test_bits_are_the_same_whoever_takes_turns(heads, kinds, groups, poisoned_results):
    """Poison is beyond all lengths, and where no result has been stored."""
    ragged, found = Ragged(LENS, heads), []
    for few in (False, True):
        groups(few)
        together = query_heads_together(planned(640, *heads, 64).problem, 256)
        assert together == (heads[0] // heads[1] if few else heads[0])
        found.append(forward(ragged, *kinds, "90a", causal=True))
    assert_same_bits(*found)
    for (out, lse), (right, right_lse) in zip(found[1], forward(ragged, *kinds, causal=True), strict=True):
        numpy.testing.assert_allclose(out.astype(float), right.astype(float), atol=4e-3)
        numpy.testing.assert_allclose(lse, right_lse, atol=2e-3)
