"""Statistics of queries, and zeros, that blocks of bwd_hopper make for later heads of packed sequences."""

from contextlib import nullcontext

import ml_dtypes
import numpy
import pytest
from later_heads import HOST, judged, normal, slow_down
from thinned import quick

from cupy_flash import attention, plan_attention_backward
from cupy_flash.call import backward
from cupy_flash.machine.machine_code import read
from cupy_flash.plan import grouping
from cupy_flash.plan.grouping import RUNNING, make_grouping

BF16 = ml_dtypes.bfloat16


def packed(
    lens_q,
    lens_kv,
    heads=(6, 6),
    dim=64,
    dtype="f2",
    behind=(0, 0),
    used_q=None,
    used_kv=None,
    with_dlse=False,
    sinks=False,
    **options,
):
    """The plan, the formula, and what both are given; NaN in rows that are no sequence's, and more of them `behind` all."""
    rng = numpy.random.default_rng(0)
    offsets = [numpy.concatenate([[0], numpy.cumsum(lens)]).astype(numpy.int32) for lens in (lens_q, lens_kv)]
    rows = [offsets[side][-1] + behind[side] for side in range(2)]
    q, dout = (normal(rng, (heads[0], rows[0], dim), dtype) for _ in range(2))
    k, v = (normal(rng, (heads[1], rows[1], dim), dtype) for _ in range(2))
    lengths = {"cu_seqlens_q": offsets[0], "cu_seqlens_kv": offsets[1]}
    lengths |= {} if used_q is None else {"seqlens_q": numpy.array(used_q, numpy.int32)}
    lengths |= {} if used_kv is None else {"seqlens_kv": numpy.array(used_kv, numpy.int32)}
    named = {"sinks": normal(rng, heads[0], numpy.float32)} if sinks else {}
    out, lse = attention(q, k, v, return_lse=True, **options, **named, **lengths)
    dlse = normal(rng, lse.shape, numpy.float32)
    nobody = numpy.ones(rows[0], bool)
    for start, length in zip(offsets[0], lens_q if used_q is None else used_q):
        nobody[start : start + length] = False
    for x in (q, dout, out, lse, dlse):
        x[:, nobody] = numpy.nan
    given, named = (dout, q, k, v, out, lse), named | ({"dlse": dlse} if with_dlse else {})
    plans = (plan_attention_backward(*given, **named, **where, **options, **lengths) for where in (HOST, {"backend": "numpy"}))
    return *plans, given, named | lengths


CASES = [
    {"lens_q": (300, 1, 130, 64), "lens_kv": (300, 1, 130, 64), "causal": True},
    {"lens_q": (100, 0, 257), "lens_kv": (140, 70, 0), "with_dlse": True},  # queries without keys, keys without queries
    {
        "lens_q": (128, 256),
        "lens_kv": (256, 128),
        "heads": (12, 6),
        "dtype": BF16,
        "window": (60, 10),
    },  # heads of a group in one block
    {"lens_q": (90, 200), "lens_kv": (90, 200), "behind": (150, 70), "dim": 40, "causal": True, "sinks": True},
    {"lens_q": (150, 90, 128), "lens_kv": (200, 90, 128), "used_q": (70, 0, 128), "used_kv": (200, 5, 0), "softcap": 3.0},
    {"lens_q": (5, 7, 9, 3), "lens_kv": (500, 300, 2, 1), "dim": 8, "dtype": BF16, "score": "score * 0.5"},
]
WAYS = ["eager", "deferred"]


@pytest.mark.parametrize(
    "case, schedule", quick([(case, way) for case in CASES for way in WAYS], *zip(CASES[:2], WAYS), spread=True)
)
def test_gradients(case, schedule, made_ahead, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    plan, *others = packed(**case)
    made, c = make_grouping(plan.kernel, plan.problem), plan.kernel.config
    assert c.VARLEN and c.STATS_AHEAD and c.ZEROS_AHEAD
    heads, sequences = case.get("heads", (6, 6))[0], len(case["lens_q"])
    assert 0 < made.heads_ahead < heads and made.makers > 0
    behind = case.get("behind", (0, 0))
    tiles = [
        (sum(case[f"lens_{side}"]) + more) // tile + sequences + 1
        for side, more, tile in zip(("q", "kv"), behind, (c.TILE_Q, c.TILE_KV))
    ]
    assert plan.launches[0].blocks == tiles[0] * made.heads_ahead + -(-tiles[1] // c.WARPS)
    judged(plan, *others)


def test_statistics(made_ahead, monkeypatch):
    """Whoever makes them: those of lse bit by bit, and what leaves no trace of rows and tiles that no sequence has."""
    case = {"lens_q": (200, 0, 300), "lens_kv": (200, 10, 300), "behind": (200, 0), "used_q": (150, 0, 300), "with_dlse": True}
    found = []
    for running in (5, 10**6):  # with so many blocks at once, none makes anything for others
        monkeypatch.setattr(grouping, "RUNNING", running)
        backward._prepared.cache_clear()
        plan, _, given, named = packed(**case)
        memory = numpy.full(plan.workspace_bytes, 0x7F, numpy.uint8)
        plan(*given, workspace=memory, **named)
        [start] = (offset for name, offset in zip(plan.workspace.names, plan.workspace.offsets) if name == "stats")
        tiles = 700 // plan.kernel.config.TILE_Q + 3 + 1
        rows = plan.kernel.config.TILE_Q
        stats = memory[start : start + 6 * tiles * 2 * rows * 4].view("f4").reshape(6, tiles, 2, rows)
        found.append((plan, memory, stats, make_grouping(plan.kernel, plan.problem).makers))
    (ahead, memory, made, makers), (not_ahead, _, expected, _) = found
    assert ahead.kernel.config.STATS_AHEAD and not not_ahead.kernel.config.STATS_AHEAD
    tiles_kv = 510 // ahead.kernel.config.TILE_KV + 3 + 1
    assert 0 < makers < tiles_kv
    for name, warps in (("stats_progress", 2), ("zeros_progress", 1)):  # of whom each has told once, and nobody else
        [place] = (offset for part, offset in zip(ahead.workspace.names, ahead.workspace.offsets) if part == name)
        assert memory[place : place + 6 * 4].view("u4").tolist() == 4 * [0] + 2 * [makers * warps]
    padding = expected.view("u4") == 0x7F7F7F7F  # the last tile of rows behind all: the launch before leaves what nobody reads
    assert (padding.any(axis=(2, 3)) == (numpy.arange(tiles) == 7)).all() and padding.sum() == 6 * 2 * rows
    expected = numpy.where(padding, made, expected)
    numpy.testing.assert_array_equal(made[:, :, 0], expected[:, :, 0])
    assert (
        numpy.isposinf(made[:, :, 0]).sum() == 6 * (tiles * rows - 450) and not made[:, :, 1][numpy.isposinf(made[:, :, 0])].any()
    )
    dout, *_, out, _ = given
    live = [0 <= row < 150 or row >= 200 for row in range(500)]
    terms = abs(dout.astype("f8") * out.astype("f8")).sum(-1)[:, :500][:, live].max() + abs(named["dlse"][:, :500][:, live]).max()
    assert abs(made[:, :, 1] - expected[:, :, 1]).max() <= 2 * (64 + 1) * 2**-24 * terms  # sums of products that are exact


def plan_of(heads=32, rows=32768, sequences=16, dim=64, heads_kv=None, packed_q=True, packed_kv=True, dtype="f2", **options):
    q, k = (numpy.empty((h, rows, dim), dtype) for h in (heads, heads_kv or heads))
    offsets = numpy.linspace(0, rows, sequences + 1).astype(numpy.int32)
    lengths = {"cu_seqlens_q": offsets} if packed_q else {}
    lengths |= {"cu_seqlens_kv": offsets} if packed_kv else {}
    return plan_attention_backward(q, q, k, k, q, numpy.empty(q.shape[:-1], "f4"), **HOST, **lengths, **options)


def test_where():
    """One group of heads ahead: as many blocks as run at once come behind the last that make something for the next one."""
    plan = plan_of()
    made, c = make_grouping(plan.kernel, plan.problem), plan.kernel.config
    assert c.STATS_AHEAD and c.ZEROS_AHEAD and made.heads_ahead == made.heads_together == 8
    tiles = 32768 // c.TILE_KV + 17
    assert (tiles - made.makers - 1) * 8 < RUNNING <= (tiles - made.makers) * 8
    assert {"stats_progress", "zeros_progress"} < set(plan.workspace.names)
    assert "idle warps make statistics of queries of later heads" in str(plan)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 8},  # there is no later one
        {"rows": 2048, "sequences": 4},  # too few key tiles
        {"deterministic": True},  # many blocks have few steps, and one warp alone would take longer
        {"dim": 72, "causal": True},  # a producer of wider heads has no registers
        {"alibi_slopes": numpy.ones(32, numpy.float32), "causal": True},  # a term of queries
        {"packed_kv": False, "heads": 32, "rows": 1024},  # keys of their own for each batch element
    ],
    ids=str,
)
def test_where_not(options):
    kernel = plan_of(**options).kernel
    assert kernel.file == "bwd_hopper" and not kernel.config.STATS_AHEAD and not kernel.config.ZEROS_AHEAD


WAITS = {  # what comes late, and who waits for it
    "statistics": (
        "tile/stats_ahead.cuh",
        "semaphore_release(p.stats_progress + first_head",
        "wait_for_count(p.stats_progress + head_ahead(block), STATS_WARPS * makers(p));",
    ),
    "zeros": (
        "tile/dq_protocol.cuh",
        "store_repeated<ZEROS>(",
        "if (ZEROS_AHEAD && head_ahead(block) >= p.heads_ahead) "
        "wait_for_count(p.zeros_progress + head_ahead(block), VARLEN ? makers(p) : blocks);",
    ),
}


@pytest.mark.release
@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("what", WAITS)
def test_a_head_waits(what, left_out, made_ahead, monkeypatch):
    """All blocks at once, those that make them slow."""
    file, release, wait = WAITS[what]
    monkeypatch.setattr(grouping, "RUNNING", 0)  # of the next group of heads
    made = packed((200,), (130,), heads=(8, 8))
    assert made[0].kernel.config.STATS_AHEAD
    slow_down(monkeypatch, made[0], file, release, file, wait if left_out else None)
    with pytest.raises(AssertionError) if left_out else nullcontext():
        judged(*made)


T = numpy.ones(32, numpy.float32)
ASKED = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "softcap": {"softcap": 5.0, "causal": True},
    "sinks": {"sinks": T},
    "factor": {"score": "score * t[h]", "arrays": {"t": T}},
    "term": {"alibi_slopes": T},
    "lookup": {"score": "score + t[(kv_idx - q_idx) % 32]", "arrays": {"t": T}, "causal": True},
    "mask": {"mask": "kv_idx % 3 != q_idx % 2"},
    "reading mask": {"mask": "t[q_idx % 32] <= t[kv_idx % 32]", "arrays": {"t": T}},
    "dropout": {"dropout": 0.1, "seed": 1},
    "dropout, factor": {"dropout": 0.1, "seed": 1, "score": "score * t[h]", "arrays": {"t": T}},
}


@pytest.mark.release
@pytest.mark.parametrize("dtype", ["f2", BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("heads_kv", [32, 16])
@pytest.mark.parametrize("asked", ASKED)
def test_no_kernel_spills(asked, heads_kv, dtype):
    pytest.importorskip("cupy")
    from cupy_flash.machine import nvrtc

    kernel = plan_of(heads_kv=heads_kv, dtype=dtype, **ASKED[asked]).kernel
    assert kernel.config.STATS_AHEAD
    report = nvrtc.report(kernel)
    assert read(report.code)[kernel.file].stack_bytes == 0 and "C75" not in report.log
