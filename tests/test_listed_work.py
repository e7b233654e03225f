"""Query tiles with lists of key tiles, which blocks of fwd_hopper take in turn: in which order, each once, and of which masks."""

import numpy
import pytest
from thinned import thinned

from cupy_flash import KeyRanges, TileMask, plan_attention
from cupy_flash.machine import host
from cupy_flash.plan.schedule import L2_BYTES

LENS = (700, 90, 3, 400, 64, 64, 250, 129)
DOC = numpy.repeat(numpy.arange(len(LENS)), LENS).astype(numpy.int32)
LONG = len(DOC)


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def made(heads, dim=64, batch=(), heads_kv=None, of_batch=None, **options):
    rng = numpy.random.default_rng(3)
    of_each = (heads, heads_kv or heads, heads_kv or heads)
    q, k, v = (rng.standard_normal((*batch, n, LONG, dim)).astype(numpy.float16) for n in of_each)
    if of_batch is None:
        mask, arrays = "doc[q_idx] == doc[kv_idx]", {"doc": DOC}
    else:
        mask, arrays = "doc[b, q_idx] == doc[b, kv_idx]", {"doc": of_batch}
    plan = plan_attention(q, k, v, backend="host", arch="90a", mask=mask, arrays=arrays, **options)
    return plan, (q, k, v), arrays


def listed(plan, operands, arrays, batches):
    """What is computed, and for each batch element the rows of its tiles in order; and how many tiles have been taken."""
    workspace = numpy.full(plan.workspace_bytes, 0x3C, numpy.uint8)  # -1 would be a counter that is nearly right
    out = plan(*operands, arrays=arrays, workspace=workspace)
    items = plan.workspace.on_host(workspace)["work"].view(numpy.int32).reshape(batches, -1, 2)
    return out, items[:, 1:, 0], items[0, 0, 1]


def bins(counts):
    """Counts of key tiles as bins have them: to a quarter of a power of two."""
    exponents = numpy.frexp(counts)[1] - 1
    return numpy.where(counts < 4, counts, counts >> numpy.maximum(exponents - 2, 0) << numpy.maximum(exponents - 2, 0))


def key_tiles(doc, tile_q, tile_kv):
    pairs = doc[:, None] == doc
    rows, cols = range(0, LONG, tile_q), range(0, LONG, tile_kv)
    return numpy.logical_or.reduceat(numpy.logical_or.reduceat(pairs, rows, axis=0), cols, axis=1).sum(1)


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.release), pytest.param(256, marks=pytest.mark.release)])
def test_tiles_with_most_keys_come_first_and_each_is_taken_once(dim, schedule):
    """With one list for consumers together, and with lists of their own; each batch element's by itself, as its documents lie."""
    of_batch = numpy.stack([DOC, DOC[::-1], 0 * DOC])
    plan, operands, arrays = made(1, dim, (3,), of_batch=of_batch)
    c = plan.kernel.config
    assert c.IN_TURN and [launch.entry for launch in plan.launches] == ["fwd_hopper_schedule", "fwd_hopper"]
    out, rows, taken = listed(plan, operands, arrays, 3)
    assert taken == rows.size
    for of_element, doc in zip(rows, of_batch):
        assert sorted(of_element) == [*range(0, LONG, c.TILE_Q)]
        counts = bins(key_tiles(doc, c.TILE_Q, c.TILE_KV))[of_element // c.TILE_Q]
        assert (numpy.diff(counts) <= 0).all() and (numpy.ptp(counts) > 0) == bool(numpy.ptp(doc))
    pairs = of_batch[:, None, :, None] == of_batch[:, None, None]
    q, k, v = (x.astype(numpy.float64) for x in operands)
    scores = numpy.where(pairs, q @ k.swapaxes(-1, -2) / dim**0.5, -numpy.inf)
    p = numpy.exp(scores - scores.max(-1, keepdims=True))
    numpy.testing.assert_allclose(out.astype(float), p @ v / p.sum(-1, keepdims=True), rtol=0, atol=2**-8)


@pytest.mark.parametrize("heads, heads_kv", [(4, 2), (1, 1)])
def test_heads_in_turn_leave_no_tile_out(heads, heads_kv, monkeypatch):
    """Some heads take turns with all tiles, and then the next ones: where the cache has keys of one head, those that share them."""
    monkeypatch.setattr("cupy_flash.plan.heads_together.L2_BYTES", 2 * 2 * LONG * 64 * 2 - 1)
    plan, operands, arrays = made(heads, heads_kv=heads_kv)
    told = plan._execution._params["heads_together_divmod"]["divisor"][0]
    assert told == heads // heads_kv
    out, rows, taken = listed(plan, operands, arrays, 1)
    assert taken == heads * rows.size and numpy.isfinite(out.astype(float)).all()
    monkeypatch.setattr("cupy_flash.plan.heads_together.L2_BYTES", L2_BYTES)
    whole, *_ = made(heads, heads_kv=heads_kv, scale=64**-0.5)
    assert whole(*operands, arrays=arrays).tobytes() == out.tobytes()


def test_a_kept_mask_leaves_the_order_to_each_call():
    """Blocks count the tiles that they take in the workspace: what is kept may be in use by another stream at the same time."""
    plan, operands, arrays = made(1)
    mask = TileMask("doc[q_idx] == doc[kv_idx]", arrays)
    q, k, v = operands
    kept = plan_attention(q, k, v, backend="host", arch="90a", mask=mask)
    assert dict(kept.workspace.parts)["work"] == dict(plan.workspace.parts)["work"]
    assert kept(q, k, v, mask=mask).tobytes() == kept(q, k, v, mask=mask).tobytes() == plan(q, k, v, arrays=arrays).tobytes()


def test_masks_that_read_nothing_are_dealt_out_before():
    q = numpy.zeros((2, LONG, 64), numpy.float16)
    plans = {
        name: plan_attention(q, q, q, backend="host", arch="90a", **options).kernel.config
        for name, options in {
            "prefix": {"mask": "kv_idx <= q_idx or kv_idx < n", "arrays": {"n": 100}},
            "numbers": {"mask": KeyRanges(0, 900)},
            "array": {"mask": numpy.ones((LONG, LONG), bool)},
            "ranges": {"mask": KeyRanges(numpy.zeros((LONG, 1), int), numpy.ones((LONG, 1), int))},
        }.items()
    }
    assert all(config.TILE_LIST for config in plans.values())
    assert {name for name, config in plans.items() if config.IN_TURN} == {"array", "ranges"}
