"""Problems of few query tiles in fwd_hopper: the tile with which the last block ends first, and that what it computes is right."""

import math

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinned import quick, thinned

from cupy_flash import plan_attention
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.machine import host, nvrtc
from cupy_flash.measure.cells import Cell
from cupy_flash.measure.sweep import candidates
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.expression_text import NOTHING
from cupy_flash.plan.few_tiles import MOST, ROWS, WORTH, _until_all_end, narrower, row_of_few_tiles
from cupy_flash.plan.forward import make_forward_plan
from cupy_flash.plan.tuning import HOPPER
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.options import Options

pytestmark = pytest.mark.few_tiles


def planned(batch, heads, rows, dim, dim_v=None, keys=None, **options):
    """A forward of arrays that nobody touches."""
    q, k, v = ((batch, heads, n, columns) for n, columns in ((rows, dim), (keys or rows, dim), (keys or rows, dim_v or dim)))
    arrays = (numpy.empty(shape, ml_dtypes.bfloat16) for shape in (q, k, v))
    return plan_attention(*arrays, backend="host", arch="90a", **options)


def tile(*problem, **options):
    c = planned(*problem, **options).kernel.config
    return c.TILE_Q, c.TILE_KV


CAUSAL, WINDOW = {"causal": True}, {"window": (511, 0)}


@pytest.mark.parametrize(
    "problem, options, expected",
    [
        ((1, 1, 16384, 64), CAUSAL, (64, 128)),  # the last of 64 tiles of 256 would see all keys
        ((1, 8, 4096, 64), CAUSAL, (128, 128)),
        ((1, 32, 2048, 64), CAUSAL, (256, 64)),  # 256 tiles: many enough
        ((1, 1, 16384, 64), {}, (256, 64)),  # blocks share equal tiles
        ((1, 40, 1024, 64), {}, (192, 128)),  # 160 tiles of 256 would take two rounds
        ((1, 40, 1024, 64), {"softcap": 20.0}, (256, 64)),  # for which three groups have no registers
        ((1, 16, 512, 64), {}, (64, 128)),
        ((1, 1, 8192, 64), WINDOW, (64, 128)),
        ((1, 8, 4096, 64), WINDOW, (256, 64)),
        ((1, 1, 16384, 128), CAUSAL, (64, 128)),
        ((1, 4, 4096, 128), {}, (128, 128)),
        ((1, 12, 2048, 128), {}, (192, 64)),
        ((1, 1, 16384, 256), CAUSAL, (64, 64)),
        ((1, 8, 4096, 256), CAUSAL, (128, 64)),
        ((1, 8, 2048, 192, 128), CAUSAL, (64, 64)),
        ((4, 16, 4096, 128), CAUSAL, (128, 128)),
    ],
    ids=str,
)
def test_the_tile_with_which_the_last_block_ends_first(problem, options, expected):
    assert tile(*problem, **options) == expected


SLOPES, ARRAY = numpy.full(2, 0.1, numpy.float32), numpy.zeros(3000, numpy.float32)
RISING = {"alibi_slopes": SLOPES}
MASK = {"mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": ARRAY.astype(numpy.int32)}}
BIAS = {"bias": numpy.zeros((1, 2, 3000, 3000), ml_dtypes.bfloat16)}
COLUMN = {"score": "score + t[kv_idx]", "arrays": {"t": ARRAY}}
LOOKUP = {"score": "score + t[kv_idx - q_idx + 3000]", "arrays": {"t": numpy.zeros(6000, numpy.float32)}}
ODD_BIAS = {"bias": numpy.empty((1, 8, 3000, 3001), ml_dtypes.bfloat16)[..., :3000]}  # which TMA does not bring
BENT = {"score": "score + 0.1 * tanh(score)"}
DROPS = {"dropout": 0.1, "seed": 1}


@pytest.mark.parametrize(
    "dim, options, expected",
    [
        (64, {"softcap": 20.0}, (64, 128)),
        (64, {"sinks": SLOPES}, (64, 128)),
        (64, {"alibi_slopes": SLOPES}, (64, 128)),
        (128, {"alibi_slopes": SLOPES}, (64, 128)),
        (256, {"alibi_slopes": SLOPES}, (64, 64)),
        (128, COLUMN, (64, 128)),
        (64, LOOKUP, (64, 128)),
        (64, BENT, (64, 64)),
        (128, BENT, (64, 64)),
        (256, BENT, (128, 64)),
        (64, DROPS, (64, 128)),
        (128, DROPS, (64, 128)),
        (256, DROPS, (128, 64)),
        (64, BIAS, (64, 128)),
        (128, BIAS, (64, 64)),
        (64, MASK, (128, 128)),  # a narrower tile has more lists to go through
        (64, MASK | {"softcap": 20.0}, (128, 128)),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, dict) else str(x),
)
def test_what_is_asked_of_pairs_has_narrow_tiles_as_well(dim, options, expected):
    assert tile(1, 2, 3000, dim, causal=True, **options) == expected


@pytest.mark.parametrize(
    "problem, options, expected",
    [
        ((1, 11, 3000, 64), {}, (128, 128)),
        ((1, 12, 3000, 64), {}, (256, 64)),  # 144 tiles, more than there are multiprocessors: a mask may leave them little
        ((1, 8, 2048, 128), {"softcap": 20.0}, (64, 128)),
        ((1, 16, 1024, 128), {"softcap": 20.0}, (128, 128)),  # one group hides nothing of it
        ((1, 8, 2048, 64), BENT, (64, 64)),
        ((1, 16, 4096, 64), BENT, (192, 64)),
        ((1, 2, 3000, 256), {"score": "score * 0.5 + 0.01 * score * score"}, (128, 64)),  # one group would spill
        ((1, 8, 3000, 128), ODD_BIAS, (128, 64)),
    ],
    ids=str,
)
def test_what_a_step_takes_decides(problem, options, expected):
    options = options or {"mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": ARRAY.astype(numpy.int32)}}
    assert tile(*problem, **CAUSAL, **options) == expected


def test_two_groups_beside_terms_have_ping_pong():
    assert planned(1, 8, 2048, 64, score="score + t[kv_idx]", arrays={"t": ARRAY[:2048]}).kernel.config.PINGPONG


@pytest.mark.parametrize("dim, options, rows", [(64, {"softcap": 5.0}, 64), (128, {}, 64), (128, {"softcap": 5.0}, 128)])
def test_float32_has_one_group_where_it_does_not_spill(dim, options, rows):
    arrays = [numpy.empty((1, 2, 3000, dim), numpy.float32)] * 3
    config = plan_attention(*arrays, backend="host", arch="90a", causal=True, **options).kernel.config
    found = config.FP16_PARTS, config.TILE_Q, config.TILE_KV
    assert found == (2, rows, 96 if dim == 64 else 48)  # of keys, 128 with scores as they are


def test_windows_keep_the_tables():
    assert tile(*MANY_HEADS, 192, 64, window=(20, 20), alibi_slopes=numpy.ones(8, numpy.float32)) == (256, 64)
    assert tile(*MANY_HEADS, 384, 128, window=(20, 20), alibi_slopes=numpy.ones(8, numpy.float32)) == (128, 128)
    assert tile(*MANY_HEADS, 100, 64, window=(20, 20), score="score + 0.1 * tanh(score)") == (192, 64)


MANY_HEADS = 64, 8  # batch elements, and heads of each
FITTING = [
    (100, 64, RISING, (128, 128)),
    (100, 128, BENT, (128, 64)),
    (100, 64, MASK, (128, 128)),
    (192, 64, BIAS, (192, 64)),
    (192, 64, RISING, (256, 64)),  # key tiles of 128 would compute pairs that do not exist
    (192, 128, RISING, (192, 64)),
    (160, 64, DROPS, (256, 64)),
    (256, 64, BIAS, (256, 64)),
    (256, 64, BENT, (128, 64)),
    (256, 128, BIAS, (128, 64)),
    (256, 128, MASK, (128, 128)),
    (384, 64, RISING, (192, 128)),
    (384, 64, RISING | {"softcap": 5.0}, (192, 64)),
    (384, 64, BIAS, (192, 64)),
    (384, 64, BIAS | MASK, (192, 64)),
    (384, 64, MASK, (256, 64)),
    (384, 128, RISING, (192, 64)),
    (448, 64, BIAS, (256, 64)),
    (576, 64, COLUMN, (192, 128)),
    (577, 64, RISING, (256, 64)),
]


@pytest.mark.parametrize("rows, dim, options, expected", FITTING, ids=lambda x: "_".join(x) if isinstance(x, dict) else str(x))
def test_short_sequences_have_tiles_that_they_fill(rows, dim, options, expected):
    """However many there are."""
    batch, heads = MANY_HEADS
    given = dict(options)
    if "bias" in given:
        given["bias"] = numpy.zeros((1, heads, rows, rows), ml_dtypes.bfloat16)
    if "alibi_slopes" in given:
        given["alibi_slopes"] = numpy.ones(heads, numpy.float32)
    if "arrays" in given:
        given["arrays"] = {name: x[:rows] for name, x in given["arrays"].items()}
    assert tile(batch, heads, rows, dim, **given) == expected


ASKED = {}, {"softcap": 5.0}, RISING, COLUMN, LOOKUP, BENT, DROPS, BIAS, MASK, BIAS | MASK, RISING | DROPS, BIAS | COLUMN


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "_".join(asked))
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("rows", [100, 160, 250, 320, 2000])
def test_shared_memory_holds_them(rows, dim, asked):
    """Few or many of them, whatever is asked."""
    for batch, heads in ((1, 2), MANY_HEADS):
        given = dict(asked)
        if "bias" in given:
            given["bias"] = numpy.empty((1, heads, rows, -(-rows // 8) * 8), ml_dtypes.bfloat16)[..., :rows]
        if "alibi_slopes" in given:
            given["alibi_slopes"] = numpy.ones(heads, numpy.float32)
        if "arrays" in given and "kv_idx - q_idx" not in given.get("score", ""):
            given["arrays"] = {name: x[:rows] for name, x in given["arrays"].items()}
        for options in ({}, CAUSAL):
            kernel = planned(batch, heads, rows, dim, **options, **given).kernel
            assert max(kernel.entries.values()) <= kernel.architecture.shared_bytes


def test_sequences_of_their_own_lengths_keep_their_tiles(monkeypatch):
    """What one is computed with must not depend on the others."""
    before = []
    for scale in (0.1, 0.2):  # so that neither is found again
        for rows, score in ((8192, None), (250, "score + 0.1 * tanh(score)")):
            arrays, ends = [numpy.empty((1, rows, 64), ml_dtypes.bfloat16)] * 3, numpy.array([0, rows], numpy.int32)
            options = {"backend": "host", "arch": "90a", "causal": True, "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
            before.append(plan_attention(*arrays, **options, score=score, scale=scale).kernel)
        monkeypatch.setattr("cupy_flash.plan.few_tiles.MOST", 0)
        monkeypatch.setattr("cupy_flash.plan.rows_between.FITS", ())
    assert before[:2] == before[2:]


@given(
    st.integers(1, 20),
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.sampled_from([(64, 64), (40, 64), (96, 96), (128, 128), (192, 128), (256, 256)]),
    st.sampled_from([{}, CAUSAL, WINDOW]),
)
def test_never_one_that_ends_later_than_the_tables(heads, rows, keys, dims, options):
    problem = planned(1, heads, rows, *dims, keys=keys, **options).problem
    for row in (row for row in HOPPER if row.serves(max(dims), dims[1]) and row.max_len_q != 64):
        chosen = row_of_few_tiles(problem, row, narrower(problem, row.tile_q, HOPPER, NOTHING, False, 0))
        if chosen is row:
            continue
        assert chosen in ROWS and chosen.tile_q < row.tile_q and heads * math.ceil(rows / row.tile_q) <= MOST
        assert _until_all_end(problem, chosen, heads) <= WORTH * _until_all_end(problem, row, heads)


def test_a_sweep_has_the_one_that_no_row_of_the_table_is():
    found = [c.plan.config for c in candidates(Cell("forward", "bfloat16", 64, True, 4096, 1, 8), ARCHITECTURES["90a"]) if c.chosen]
    assert [(c.TILE_Q, c.TILE_KV, c.PINGPONG, c.TMA_STORE_OUT) for c in found] == [(128, 128, True, False)]


@pytest.mark.parametrize("rows, dim", [(1000, 256), (150, 128), (300, 128)])
def test_results_in_float32_keep_the_tables(rows, dim):
    """Other tiles would spill."""
    q = dense_layout((1, 2, rows, dim), range(3, -1, -1), "float16", None)
    plan = make_forward_plan(make_problem(q, q, q, Options(backend="host", float32_results=True)), ARCHITECTURES["90a"])
    assert plan.config.FLOAT32_RESULTS and (128, 64 if dim == 256 else 128) == (plan.config.TILE_Q, plan.config.TILE_KV)
    assert tile(1, 2, rows, dim) == (64, 64 if dim == 256 else 128)


PROBLEMS = {
    "one group": ((2, 330), (2, 330), 64, 64, CAUSAL),
    "one group, many blocks": ((3, 3, 700), (3, 1, 700), 128, 128, CAUSAL),
    "two groups": ((46, 200), (23, 230), 64, 64, CAUSAL),
    "two wider groups": ((28, 260), (14, 200), 128, 128, {}),
    "one group, shared by blocks": ((1, 100), (1, 1500), 64, 64, {}),
    "shared by blocks": ((7, 330), (7, 2000), 128, 128, {}),
    "window": ((2, 600), (2, 650), 64, 64, {"window": (90, 5)}),
    "wide": ((2, 270), (2, 300), 256, 256, CAUSAL),
    "narrow values": ((4, 300), (2, 300), 192, 128, CAUSAL),
    "half a panel": ((4, 300), (2, 300), 96, 80, CAUSAL),
    "sinks": ((2, 330), (2, 400), 64, 64, {**CAUSAL, "sinks": numpy.array([0.5, 3.0], numpy.float32)}),
    "prefix": ((2, 330), (2, 400), 128, 128, {**CAUSAL, "prefix": 130}),
}


@pytest.mark.parametrize("schedule", thinned(host.SCHEDULES, first=1))
@pytest.mark.parametrize("name", quick(PROBLEMS, "one group", "shared by blocks", "wide"))
def test_right(name, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    of_q, of_kv, dim, dim_v, options = PROBLEMS[name]
    rng = numpy.random.default_rng(4)
    q, k, v = (rng.standard_normal(shape).astype("float16") for shape in ((*of_q, dim), (*of_kv, dim), (*of_kv, dim_v)))
    plan = plan_attention(q, k, v, backend="host", arch="90a", kernel="fwd_hopper", return_lse=True, **options)
    assert any("few query tiles" in reason for reason in plan.kernel.reasons)
    p, told = plan.problem, {"prefix": options.get("prefix", 0), "sinks": options.get("sinks")}
    results = plan(q, k, v, **{name: x for name, x in options.items() if name == "sinks"})
    judged = compare(*results, q, k, v, scale=p.scale, first_key=p.mask.left, last_key=p.mask.right, **told)
    assert judged.ok, judged.message


SCORED = (
    Case("float16", 330, 330, heads_q=2, causal=True, softcap=5.0),
    Case("bfloat16", 200, 260, heads_q=46, heads_kv=23, softcap=5.0),
    Case("float16", 330, 400, heads_q=2, causal=True, alibi="heads"),
    Case("bfloat16", 300, 300, dim=128, heads_q=3, alibi="heads"),
    Case("float16", 270, 300, dim=256, heads_q=2, causal=True, alibi="heads"),
    Case("float16", 330, 330, heads_q=2, causal=True, score="relative"),
    Case("bfloat16", 330, 330, dim=128, heads_q=2, causal=True, score="temperature"),
    Case("float16", 330, 330, heads_q=2, causal=True, score="soft_clip"),
    Case("bfloat16", 330, 330, dim=128, heads_q=2, causal=True, score="soft_clip", sinks=1),
    Case("float16", 330, 400, heads_q=2, causal=True, bias="keys"),
    Case("float16", 330, 336, heads_q=2, causal=True, bias="heads"),
    Case("bfloat16", 300, 328, dim=128, heads_q=2, causal=True, bias="full"),
    Case("float16", 330, 330, heads_q=2, causal=True, dropout=0.2),
    Case("bfloat16", 300, 300, dim=128, heads_q=3, causal=True, dropout=0.2, alibi="heads"),
    Case("float16", 500, 500, heads_q=2, mask="documents"),
    Case("bfloat16", 500, 500, dim=40, heads_q=2, mask="documents", causal=True, softcap=5.0),
    Case("float32", 330, 330, heads_q=2, causal=True),
    Case("float32", 300, 400, dim=128, heads_q=2, causal=True, precision="tf32"),
    Case("float32", 330, 330, heads_q=2, causal=True, bias="heads"),
    Case("float32", 300, 300, dim=40, heads_q=3, causal=True, alibi="heads", dropout=0.2),
)


@pytest.mark.parametrize("case", quick(SCORED, SCORED[2], SCORED[11], SCORED[14], SCORED[16]), ids=str)
def test_right_where_something_is_asked_of_scores(case):
    inputs, arrays = make_inputs(case), case.arrays()
    plan = plan_attention(*inputs, backend="host", arch="90a", kernel="fwd_hopper", **case.options, **arrays)
    assert any("few query tiles" in reason for reason in plan.kernel.reasons)
    out, lse = plan(*inputs, **arrays)
    judged = compare(out, lse, *inputs, precision=case.precision, **case.meaning())
    assert judged.ok, judged.message


KINDS = [(40, 1, 8192, CAUSAL), (64, 8, 4096, CAUSAL), (96, 1, 2048, WINDOW), (128, 4, 4096, {}), (192, 1, 2048, CAUSAL)]


@pytest.mark.release
@pytest.mark.parametrize("dim, heads, rows, options", KINDS, ids=str)
def test_no_register_is_spilled(dim, heads, rows, options):
    kernel = planned(1, heads, rows, dim, **options).kernel
    assert any("few query tiles" in reason for reason in kernel.reasons)
    assert nvrtc.report(kernel).fault == ""
