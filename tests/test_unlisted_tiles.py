"""Few query tiles of sequences in fwd_hopper: each has a block of its own, in place of a list that a launch before makes."""

import numpy
import pytest
from ragged import Ragged, assert_same_bits
from ragged import forward as forward_of
from thinned import quick, thinned

from cupy_flash import plan_attention
from cupy_flash.call import forward
from cupy_flash.call.forward import AttentionPlan
from cupy_flash.judge.compare import compare
from cupy_flash.machine import source
from cupy_flash.machine.host import SCHEDULES
from cupy_flash.plan import hopper_splits

# Queries that a sequence has, and keys: rows of no tile, of some, of all; no keys; fewer keys than queries.
LENS = (300, 400), (0, 90), (5, 0), (129, 33), (64, 400)
ROOM_Q, ROOM_KV = 300, 400
SINKS = numpy.array([0.5, -2.0, 3.0, 0.0], numpy.float32)
# Query heads on key heads, dim, what is asked, and the size of pages, if there are any.
ASKED = {
    "alone": ((2, 2), 64, {}, None),
    "heads together": ((4, 2), 64, {"causal": True}, None),
    "a window": ((2, 2), 128, {"causal": True, "window": (90, 0)}, None),
    "sinks": ((4, 1), 64, {"causal": True, "sinks": SINKS}, None),
    "softcap": ((2, 1), 128, {"softcap": 5.0}, None),
    "wide": ((2, 1), 256, {"causal": True}, None),
    "pages": ((4, 2), 128, {"causal": True}, 16),  # whose four warps load
    "large pages": ((2, 1), 64, {}, 80),
    "ALiBi": ((4, 2), 64, {"causal": True, "alibi_slopes": numpy.array([0.5, 0.1, 0.02, 0.3], numpy.float32)}, None),
    "float32": ((2, 1), 64, {"causal": True}, None),
}


def drawn(name):
    """q, k and v with poison behind each length, what is asked, and lengths; keys in pages if asked."""
    (heads, heads_kv), dim, asked, page = ASKED[name]
    rng, dtype = numpy.random.default_rng(4), numpy.float32 if name == "float32" else numpy.float16
    shapes = (heads, ROOM_Q), (heads_kv, ROOM_KV), (heads_kv, ROOM_KV)
    q, k, v = (rng.standard_normal((len(LENS), *shape, dim)).astype(dtype) for shape in shapes)
    for b, (queries, keys) in enumerate(LENS):
        q[b, :, queries:] = k[b, :, keys:] = v[b, :, keys:] = numpy.nan
    numbers = numpy.array(LENS, numpy.int32).T
    lengths = {"seqlens_q": numbers[0].copy(), "seqlens_kv": numbers[1].copy()}
    stored = k, v
    if page:
        of_each = ROOM_KV // page
        lengths["pages"] = rng.permutation(len(LENS) * of_each).astype(numpy.int32).reshape(len(LENS), of_each)
        stored = [numpy.empty((len(LENS) * of_each, heads_kv, page, dim), dtype) for _ in range(2)]
        for pool, x in zip(stored, (k, v)):
            pool[lengths["pages"]] = x.reshape(len(LENS), heads_kv, of_each, page, dim).swapaxes(1, 2)
    return (q, k, v), stored, asked, lengths


def computed(q, stored, asked, lengths, unlisted, monkeypatch, where, put=lambda x: x, get=lambda x: x):
    """Into results that held something else before; a plan of its own."""
    arrays, given = list(map(put, (q, *stored))), {name: put(x) for name, x in lengths.items()}
    options = {name: put(x) if isinstance(x, numpy.ndarray) else x for name, x in asked.items()}
    out, lse = put(numpy.full_like(q, 7)), put(numpy.full(q.shape[:-1], 7, numpy.float32))
    forward._prepared.cache_clear()
    with monkeypatch.context() as rounds:
        rounds.setattr(hopper_splits, "ROUNDS", 2 * unlisted)
        plan = plan_attention(*arrays, return_lse=True, out=out, lse=lse, **options, **given, **where)
    config = plan.kernel.config
    assert plan.kernel.file == "fwd_hopper" and config.VARLEN and not config.SPLIT_KV and config.UNLISTED is unlisted
    schedules = [launch.entry for launch in plan.launches if launch.entry.endswith("schedule")]
    assert bool(schedules) is not unlisted and ("work" in plan.workspace.names) is not unlisted
    operands = {name: options[name] for name in ("sinks", "alibi_slopes") if name in options}
    plan(*arrays, out=out, lse=lse, **given, **operands)
    return get(out), get(lse)


def check(name, monkeypatch, where, put=lambda x: x, get=lambda x: x):
    """The bits of both ways, and that they are attention; what is no query is zero."""
    (q, k, v), stored, asked, lengths = drawn(name)
    there = monkeypatch, where, put, get
    out, lse = found = computed(q, stored, asked, lengths, True, *there)
    for x, y in zip(found, computed(q, stored, asked, lengths, False, *there), strict=True):
        numpy.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))
    for b, (queries, keys) in enumerate(LENS):
        assert not out[b, :, queries:].any() and numpy.isneginf(lse[b, :, queries:]).all()
        told = {name: x for name, x in asked.items() if name in ("softcap", "sinks", "alibi_slopes")}
        told |= {"last_key": keys - queries} if "causal" in asked else {}
        told |= {"first_key": keys - queries - asked["window"][0]} if "window" in asked else {}
        if queries:
            alone = q[b, :, :queries], k[b, :, :keys], v[b, :, :keys]
            comparison = compare(out[b, :, :queries], lse[b, :, :queries], *alone, scale=q.shape[-1] ** -0.5, **told)
            assert comparison.ok, (b, comparison.message)


@pytest.fixture
def planned_anew():
    forward._prepared.cache_clear()
    yield
    forward._prepared.cache_clear()


HOST = {"backend": "host", "arch": "90a"}


@pytest.mark.usefixtures("planned_anew")
@pytest.mark.parametrize("schedule", thinned(SCHEDULES, first=1))
@pytest.mark.parametrize("name", quick(ASKED, "heads together", "pages"))
def test_each_tile_is_computed_as_from_a_list(name, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    check(name, monkeypatch, HOST)


@pytest.mark.parametrize("batch, unlisted", [(44, True), (45, False)])
def test_of_more_tiles_than_two_rounds_of_blocks_there_is_a_list(batch, unlisted):
    q = numpy.zeros((batch, 3, 300, 64), numpy.float16)  # of two tiles each
    plan = plan_attention(q, q, q, seqlens_q=numpy.zeros(batch, numpy.int32), **HOST)
    assert plan.kernel.config.UNLISTED is unlisted and plan.launches[-1].blocks == 6 * batch
    assert plan.launches[-1].per_multiprocessor == (None if unlisted else 1) and len(plan.launches) == 2 - unlisted
    assert ("each has a block of its own" in str(plan)) is unlisted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("keys, unlisted", [(512, True), (513, False)])
def test_of_many_keys_one_round_of_blocks_has_a_tile_each(keys, unlisted, packed):
    """Of packed keys as many as a sequence has on average."""
    q, k = numpy.zeros((2, 70, 150, 64), numpy.float16), numpy.zeros((2, 70, keys, 64), numpy.float16)
    lengths = {"seqlens_q": numpy.zeros(2, numpy.int32)}
    if packed:
        k, lengths["cu_seqlens_kv"] = k.swapaxes(0, 1).reshape(70, 2 * keys, 64), numpy.zeros(3, numpy.int32)
    plan = plan_attention(q, k, k, **lengths, **HOST)
    assert plan.launches[-1].blocks == 140 and plan.kernel.config.UNLISTED is unlisted


PACKED_LENS = ((70, 150), (1, 65), (130, 3), (0, 17), (64, 64), (5, 0), (200, 300))
KINDS = ("packed", "packed"), ("packed", "cache"), ("roomy", "packed")
FORMS = [(heads, kinds) for heads in ((4, 2), (2, 2), (8, 1)) for kinds in KINDS]


@pytest.mark.usefixtures("planned_anew")
@pytest.mark.parametrize("heads, kinds", quick(FORMS, FORMS[0], spread=True))
def test_packed_queries_have_the_bits_that_they_have_from_a_list(heads, kinds, monkeypatch):
    """A block looks for the sequence that has its tile; some have none, and rows behind the last sequence belong to none."""
    called, original = [], AttentionPlan.__call__

    def call(plan, *arrays, **others):
        called.append(plan.kernel.config)
        return original(plan, *arrays, **others)

    monkeypatch.setattr(AttentionPlan, "__call__", call)
    ragged = Ragged(PACKED_LENS, heads)
    found = forward_of(ragged, *kinds, "90a", causal=True)
    with monkeypatch.context() as rounds:
        rounds.setattr(hopper_splits, "ROUNDS", 0)
        forward._prepared.cache_clear()
        assert_same_bits(forward_of(ragged, *kinds, "90a", causal=True), found)
    assert [config.UNLISTED for config in called] == [True, False]
    assert {config.INNER_HEADS for config in called} == {heads[0] // heads[1]}


CHANGES = {  # what breaks if a block has another's tile, or leaves what is no query as it was
    "tile": ("tile/own_tiles.cuh", "block_coord<QUERIES>(p, p.heads)", "block_coord<QUERIES>(p, p.heads, block_id() / 2)"),
    "row": ("tile/work.cuh", "number = UNLISTED ? warp :", "number = UNLISTED ? warp + 1 :"),
}


@pytest.mark.usefixtures("planned_anew")
@pytest.mark.parametrize("change", quick(CHANGES, "tile"))
def test_what_is_wrong_is_noticed(change, monkeypatch, change_kernel):
    file, old, new = CHANGES[change]
    text = source.files()[file]
    assert text.count(old) == 1
    change_kernel(file, text.replace(old, new))
    with pytest.raises(AssertionError):
        check("alone", monkeypatch, HOST)
