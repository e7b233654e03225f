"""Few query rows in fwd_v2: warps that have keys of their own of each tile, and what they leave becomes one."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from thinned import quick, thinned

from cupy_flash import append_kv, plan_attention
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.machine import nvrtc, source
from cupy_flash.machine.host import SCHEDULES

SM_80 = {"backend": "host", "arch": "80", "kernel": "fwd_v2", "return_lse": True}


@pytest.fixture(params=thinned(SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def planned(*arrays, **options):
    plan = plan_attention(*arrays, **SM_80 | options)
    c = plan.kernel.config
    assert c.WARPS_KV == c.WARPS > 1 and c.TILE_KV // c.WARPS_KV == c.TILE_Q == 16
    return plan


# No warp but the first has a key, then some have; the last tile has one; splits, of which the last one has as little.
KEYS = (1, 16, 17, 63, 65, 192, 1030, 1601)
CASES = {
    "one query": Case("float16", 1, 0, heads_q=8, heads_kv=2),
    "large scores": Case("bfloat16", 2, 0, dim=128, heads_q=6, heads_kv=2, values="large"),
    "causal": Case("float16", 5, 0, dim=40, heads_q=3, heads_kv=1, causal=True),
    "a window": Case("float16", 16, 0, heads_q=2, window=(40, 0), causal=True),
    "softcap": Case("float16", 3, 0, dim=96, heads_q=10, heads_kv=2, softcap=5.0),
    "wide": Case("float16", 1, 0, dim=200, heads_q=8, heads_kv=1),
    "narrow values": Case("float16", 2, 0, dim=128, dim_v=32, heads_q=4, heads_kv=1),
    "float32": Case("float32", 2, 0, dim=64, heads_q=8, heads_kv=2),
    "elements": Case("float16", 1, 0, dim=33, heads_q=4, heads_kv=1, layout="odd_offset"),
}


@pytest.mark.parametrize("keys", thinned(KEYS))
@pytest.mark.parametrize("name", quick(CASES, "one query"))
def test_it_is_attention(name, keys, schedule):
    case = replace(CASES[name], len_kv=keys)
    inputs = make_inputs(case)
    plan = planned(*inputs, **case.options)
    assert plan.kernel.config.SPLIT_KV is (keys >= 1024 and case.window is None)
    comparison = compare(*plan(*inputs), *inputs, **case.scores)
    assert comparison.ok, comparison.message


@pytest.mark.parametrize("keys", [5, 1030])
def test_sinks_count_once(keys, schedule):
    """Not once for each warp, and also where a warp, or a row, has no key."""
    rng = np.random.default_rng(0)
    q, (k, v) = rng.standard_normal((4, 3, 64)).astype("float16"), rng.standard_normal((2, 1, keys, 64)).astype("float16")
    sinks = np.array([[0.5] * 4, [2.0] * 4], np.float32)
    for mask, ends in (({}, {}), ({"window": (1, 0), "causal": "top_left"}, {"first_key": -1, "last_key": 0})):
        out, lse = planned(q, k, v, sinks=sinks, **mask)(q, k, v, sinks=sinks)
        comparison = compare(out, lse, q, k, v, scale=1 / 8, sinks=sinks, **ends)
        assert comparison.ok, comparison.message


def test_a_row_that_sees_nothing_is_zero():
    q, kv = np.ones((4, 9, 64), np.float16), np.ones((2, 3, 64), np.float16)
    q = q[:, :8]
    out, lse = planned(q, kv, kv, causal=True)(q, kv, kv)
    assert not out[:, :5].any() and np.isneginf(lse[:, :5]).all() and (out[:, 5:] == 1).all()


NOT_IN_REGISTERS = [("float32", 64, 64), ("float32", 64, 16), ("float16", 256, 32)]


@pytest.mark.parametrize("dtype, dim, dim_v", quick(NOT_IN_REGISTERS, ("float32", 64, 16), spread=True))
def test_queries_of_a_sequence_without_keys_arrive_before_its_result_takes_their_place(dtype, dim, dim_v, schedule):
    """They are on their way before it is known that no key asks for them, and not in registers."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 2, dim)).astype(dtype)
    k, v = (rng.standard_normal((2, 2, 40, n)).astype(dtype) for n in (dim, dim_v))
    lengths, sinks = {"seqlens_kv": np.array([0, 40])}, rng.standard_normal(4).astype("f4")
    for more in ({}, {"sinks": sinks}):
        plan = planned(q, k, v, **lengths, **more)
        assert not plan.kernel.config.Q_IN_REGISTERS
        out, lse = plan(q, k, v, **lengths, **more)
        assert not out[0].any()
        expected = more.get("sinks", np.full(4, -np.inf))
        np.testing.assert_allclose(lse[0], np.stack([expected, expected], -1), rtol=1e-6)
        comparison = compare(out[1], lse[1], q[1], k[1], v[1], scale=dim**-0.5, **more)
        assert comparison.ok, comparison.message


# Caches

LENGTHS = np.array([1, 16, 250, 2100])
PAGE_SIZES = (64, 16, 48, 8, 1)  # of the last two, no page has all keys that a warp has of a tile


@pytest.mark.parametrize("page_size", thinned(PAGE_SIZES))
@pytest.mark.parametrize("queries", [1, pytest.param(4, marks=pytest.mark.release)])
def test_a_sequence_has_the_same_bits_wherever_its_keys_lie(page_size, queries, schedule):
    """Alone, in a cache with room, and in pages; whatever lies beside and behind. More tiles than a lane has asked for pages of."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((4, 8, queries, 64)).astype("float16")
    k, v = rng.standard_normal((2, 4, 2, 2112, 64)).astype("float16")
    for x in (k, v):
        for cache, length in zip(x, LENGTHS):
            cache[:, length:] = np.nan
    options = {"causal": queries > 1}
    expected = []
    for b, length in enumerate(LENGTHS):
        own = q[b : b + 1], k[b : b + 1, :, :length].copy(), v[b : b + 1, :, :length].copy()
        told = {"seqlens_kv": LENGTHS[b : b + 1]}
        expected.append(planned(*own, **told, **options)(*own, **told))
        comparison = compare(*expected[-1], *own, scale=1 / 8, last_key=length - queries if queries > 1 else None)
        assert comparison.ok, comparison.message
    expected = [np.concatenate(x) for x in zip(*expected)]
    most = -(-2112 // page_size)
    pages = rng.permutation(4 * most).reshape(4, most)
    pool = np.full((2, 4 * most, 2, page_size, 64), np.nan, "float16")
    append_kv(*pool, k, v, 0, seqlens_new=LENGTHS, pages=pages)
    for b, length in enumerate(LENGTHS):
        pages[b, -(-length // page_size) :] = 2**30  # is no page, and nobody asks for it
    for given, told in (((q, k, v), {}), ((q, *pool), {"pages": pages})):
        told["seqlens_kv"] = LENGTHS
        found = planned(*given, **told, **options)(*given, **told)
        assert all(np.array_equal(x, y) for x, y in zip(found, expected))


@pytest.mark.release
def test_pages_of_more_tiles_than_lanes(schedule):
    """A block of a long split asks for pages more than once."""
    rng = np.random.default_rng(0)
    q, keys = rng.standard_normal((1, 2, 1, 32)).astype("float16"), 64 * 35 * 64 + 9  # 64 splits of 35 tiles and a bit
    k, v = rng.standard_normal((2, 1, 1, keys, 32)).astype("float16")
    pages = rng.permutation(-(-keys // 64))[None]
    pool = np.full((2, pages.size, 1, 64, 32), np.nan, "float16")
    append_kv(*pool, k, v, 0, pages=pages)
    told = {"seqlens_kv": np.array([keys])}
    expected = planned(q, k, v, **told)(q, k, v, **told)
    found = planned(q, *pool, pages=pages, **told)(q, *pool, pages=pages, **told)
    assert all(np.array_equal(x, y) for x, y in zip(found, expected))
    comparison = compare(*expected, q, k, v, scale=32**-0.5)
    assert comparison.ok, comparison.message


@pytest.mark.release  # whose build takes eight seconds
def test_no_entry_beyond_a_table_is_read(monkeypatch):
    """A lane asks for the page of a tile ahead, but not of one that the sequence has not."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "address")
    q, pool = np.ones((1, 4, 1, 64), np.float16), np.ones((3, 2, 16, 64), np.float16)
    told = {"seqlens_kv": np.array([41]), "pages": np.array([[2, 0, 1]])}
    out, _ = planned(q, pool, pool, **told)(q, pool, pool, **told)
    assert (out == 1).all()


# Which warps are planned


def config_of(q=(4, 1, 64), kv=(2, 100, 64), dtype="float16", arch="80", **options):
    q, kv = np.zeros(q, dtype), np.zeros(kv, dtype)
    return plan_attention(q, kv, kv, **SM_80 | {"arch": arch}, **options).kernel.config


@pytest.mark.parametrize(
    "options, warps",
    [
        ({}, 4),
        ({"q": (32, 1, 64)}, 4),  # 16 rows
        ({"q": (34, 1, 64)}, 1),
        ({"q": (2, 17, 64)}, 1),
        ({"q": (4, 1, 256), "kv": (2, 100, 256)}, 4),
        ({"q": (4, 1, 256), "kv": (2, 100, 256), "arch": "86"}, 2),  # 99 KB of shared memory
        ({"dtype": "float32"}, 4),
        ({"dtype": "float32", "q": (4, 1, 160), "kv": (2, 100, 160)}, 1),  # which would spill
        ({"arch": "75"}, 4),
        ({"arch": "75", "q": (4, 1, 256), "kv": (2, 100, 256)}, 1),  # 64 KB of it
        ({"alibi_slopes": np.zeros(4, np.float32)}, 4),
        ({"mask": np.ones((4, 1, 100), bool)}, 4),
        ({"dropout": 0.5, "seed": 0}, 1),
        ({"q": (1, 4, 1, 64), "kv": (1, 2, 100, 64), "seqlens_kv": np.array([7])}, 4),
        ({"q": (1, 4, 1, 64), "kv": (1, 2, 100, 64), "seqlens_q": np.array([1])}, 1),
    ],
    ids=str,
)
def test_rows_of_one_warp_are_shared_by_several(options, warps):
    config = config_of(**options)
    assert warps == config.WARPS_KV and (warps == 1 or (warps, 16, 16 * warps) == (config.WARPS, config.TILE_Q, config.TILE_KV))


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": np.zeros(4, np.float32)}], ids=str)
def test_it_does_not_depend_on_how_many_keys_there_is_room_for(options):
    shapes = [{"kv": (1, 2, keys, 64)} for keys in (5, 100, 5000)]
    told = {"q": (1, 4, 1, 64), "seqlens_kv": np.array([3]), **options}
    assert {(c.WARPS_KV, c.TILE_KV) for c in (config_of(**told, **kv) for kv in shapes)} == {(4, 64)}


def compiled():
    """What decoding is compiled to: at each width, of a batch with lengths and in pages."""
    for arch, dtype, dim, in_pages in product(("90a", "80", "120", "75"), ("float16", "float32"), (64, 128, 256), (False, True)):
        q, kv, told = np.zeros((1, 8, 2, dim), dtype), np.zeros((40, 2, 64, dim), dtype), {"seqlens_kv": np.array([9])}
        if in_pages:
            told["pages"] = np.zeros((1, 40), np.int32)
        else:
            kv = np.zeros((1, 2, 2560, dim), dtype)
        plan = plan_attention(q, kv, kv, causal=True, **SM_80 | {"arch": arch}, **told).kernel
        if plan.config.WARPS_KV > 1:
            yield plan


@pytest.mark.parametrize("plan", thinned(list(compiled()), keep=52), ids=lambda plan: plan.name)
def test_nothing_is_spilled(plan):
    assert plan.config.SPLIT_KV and plan.config.PACK_GQA
    report = nvrtc.report(plan)
    assert (report.spill_bytes, report.warnings) == (0, ())


# What would be noticed


LOOPS = {name: f"warp < WARPS_KV; ++warp) {{\n        const {name}" for name in ("SharedAddress state", "float weight")}


@pytest.mark.parametrize("loop", thinned(LOOPS))
def test_a_warp_that_is_left_out_is_noticed(loop, change_kernel):
    """The last one, whose keys are as good as others."""
    file, case = "tile/key_warps.cuh", Case("float16", 1, 130, heads_q=4, heads_kv=1)
    text = source.files()[file]
    assert text.count(LOOPS[loop]) == 1
    change_kernel(file, text.replace(LOOPS[loop], LOOPS[loop].replace("WARPS_KV", "WARPS_KV - 1")))
    inputs = make_inputs(case)
    assert not compare(*planned(*inputs, **case.options)(*inputs), *inputs, **case.scores).ok
