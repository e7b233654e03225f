"""Head dims and lengths between those that tables of fwd_hopper are for: how many columns products take, and which tile serves."""

from itertools import product

import numpy
import pytest
from thinned import quick, thinned

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.machine import host, nvrtc
from cupy_flash.machine.machine_code import read
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.columns import COLUMNS, columns
from cupy_flash.plan.forward import make_forward_plan
from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.options import Options

release = pytest.mark.release


def layout_of(length, dim, pitch=None, heads=4, batch=2):
    pitch = pitch or dim
    return Layout((batch, heads, length, dim), (heads * length * pitch, length * pitch, pitch, 1), "bfloat16", 16, None)


def plan_of(length, dim, dim_v=None, pitch=None, len_kv=None, **options):
    q, k, v = layout_of(length, dim), layout_of(len_kv or length, dim, pitch), layout_of(len_kv or length, dim_v or dim, pitch)
    return make_forward_plan(make_problem(q, k, v, Options(backend="host", **options)), ARCHITECTURES["90a"])


# How many columns


@pytest.mark.parametrize("kernel, all_columns", COLUMNS.items())
def test_products_take_multiples_of_16_columns_and_no_panel_less(kernel, all_columns):
    """Tiles in memory are of whole panels of 64 columns, whose number must be that of the width they are counted with."""
    widest = 128 if kernel in ("bwd_hopper", "bwd_hopper_parts") else 256
    assert all(n % 16 == 0 for n in all_columns) and all_columns[-1] == widest
    narrowest = 129 if kernel == "bwd_hopper_wide" else 1  # below, tiles of its 128 columns serve
    for dim in range(narrowest, widest + 1):
        assert -(-next(n for n in all_columns if n >= dim) // 64) == -(-dim // 64)


@pytest.mark.parametrize(
    "dim, dim_v, expected",
    [(8, 8, (32, 32)), (33, 64, (48, 64)), (72, 24, (80, 32)), (100, 128, (112, 128)), (129, 8, (160, 32)), (193, 256, (224, 256))],
)
def test_columns_of_a_forward(dim, dim_v, expected):
    q = numpy.zeros((2, 70, -(-dim // 8) * 8), numpy.float16)[..., :dim]
    v = numpy.zeros((2, 70, -(-dim_v // 8) * 8), numpy.float16)[..., :dim_v]
    plan = plan_attention(q, q, v, backend="host", arch="90a", kernel="fwd_hopper")
    assert expected == (plan.kernel.config.DIM, plan.kernel.config.DIM_V)
    assert plan_attention(q, q, v, backend="host", arch="90a", kernel="fwd_v2").kernel.config.DIM % 32 == 0


BACKWARDS = {24: 32, 40: 64, 72: 80, 88: 96, 104: 128, 136: 160, 168: 192, 200: 224, 232: 256}


@pytest.mark.parametrize("dim, taken", BACKWARDS.items())
def test_columns_of_a_backward(dim, taken):
    q, lse = numpy.zeros((2, 300, dim), numpy.float16), numpy.zeros((2, 300), numpy.float32)
    c = plan_attention_backward(q, q, q, q, q, lse, backend="host", arch="90a").kernel.config
    assert c.DIM == c.DIM_V == taken and (64 if dim <= 64 else 128 if dim <= 128 else -(-dim // 64) * 64) == c.WIDTH


def test_a_wide_tile_of_narrow_heads_is_multiplied_in_all_its_panels():
    """Where only rows of wider heads hold what is asked; otherwise tiles would lie elsewhere than the kernel counts on."""
    assert [columns("bwd_hopper", dim, 128) for dim in (8, 64, 72, 128)] == [80, 80, 80, 128]
    assert [columns("fwd_hopper", 40, width) for width in (64, 128, 192, 256)] == [48, 80, 160, 224]
    assert [columns("fwd_v2", 40, width) for width in (64, 96)] == [64, 96]


# Which tile


TILES = [  # length, dim, options, (tile, ping-pong)
    (65, 64, {}, (128, 128, True)),
    (128, 40, {"causal": True}, (128, 128, True)),
    (129, 64, {}, (256, 64, True)),
    (128, 96, {}, (128, 128, True)),
    (129, 96, {}, (192, 64, True)),
    (192, 128, {"causal": True}, (192, 64, False)),
    (193, 128, {}, (128, 128, True)),
    (256, 64, {}, (256, 64, True)),
    (257, 64, {}, (192, 128, True)),
    (384, 40, {"causal": True}, (192, 128, True)),
    (385, 64, {}, (256, 64, True)),
    (513, 64, {}, (192, 128, True)),
    (577, 64, {}, (256, 64, True)),
    (300, 64, {"window": (99, 0)}, (256, 64, False)),
    (300, 64, {"softcap": 30.0}, (256, 64, True)),
    (256, 72, {}, (128, 128, True)),
    (729, 72, {}, (192, 64, True)),
    (9000, 88, {"causal": True}, (192, 64, True)),
    (729, 80, {}, (192, 64, True)),
    (2049, 80, {}, (192, 96, True)),
    (1024, 96, {}, (128, 128, True)),
    (1025, 96, {"causal": True}, (192, 96, True)),
    (300, 96, {}, (192, 64, True)),
    (300, 128, {}, (192, 64, False)),
    (729, 128, {}, (128, 128, True)),
    (729, 104, {}, (192, 64, False)),
    (1024, 112, {"causal": True}, (128, 128, True)),
    (1025, 112, {"causal": True}, (192, 64, False)),
    (1025, 128, {"causal": True}, (128, 128, True)),
    (729, 136, {}, (128, 96, True)),
]


@pytest.mark.parametrize("length, dim, options, tile", TILES, ids=str)
def test_the_tile_of_a_length_and_a_head_dim(length, dim, options, tile):
    plan = plan_of(length, dim, **options)
    c = plan.config
    assert plan.file == "fwd_hopper" and tile == (c.TILE_Q, c.TILE_KV, c.PINGPONG)


def test_rows_of_keys_that_straddle_sectors_share_wider_tiles():
    """What counts is where rows of keys begin in memory, not the head dim; of keys or of values."""
    assert plan_of(900, 88).config.TILE_Q == plan_of(900, 96, 88).config.TILE_Q == 192
    assert plan_of(900, 88, pitch=96).config.TILE_Q == 128 and plan_of(900, 96, pitch=104).config.TILE_Q == 192
    assert plan_of(900, 120).config.TILE_Q == 192 and plan_of(900, 120, pitch=128).config.TILE_Q == 128


def test_other_problems_keep_the_rows_of_their_tables():
    """Sequences of their own lengths, heads that share tiles, and scores, whose registers other rows hold."""
    q = numpy.zeros((4, 8, 300, 88), numpy.float16)
    plans = [
        plan_attention(q, q, q, backend="host", arch="90a", seqlens_kv=numpy.full(4, 300)),
        plan_attention(q, q, q, backend="host", arch="90a", dropout=0.1, seed=1),
        plan_attention(q[:, :, :50].copy(), q[:, :1], q[:, :1], backend="host", arch="90a", kernel="fwd_hopper", causal=True),
    ]
    assert [plan.kernel.config.PACK_GQA for plan in plans] == [False, False, True]
    assert [(plan.kernel.config.TILE_Q, plan.kernel.config.TILE_KV) for plan in plans] == [(192, 80), (128, 128), (128, 128)]


# What they compute


CASES = [  # of each number of columns one, in a length whose tile has a row of its own where there is one
    ("float16", 24, 24, 270, {"causal": True}),
    ("bfloat16", 40, 40, 270, {}),
    ("float16", 72, 72, 270, {"causal": True}),
    ("bfloat16", 96, 80, 1030, {}),
    ("bfloat16", 104, 88, 270, {"causal": True}),
    ("float16", 136, 152, 140, {"causal": True}),
    ("bfloat16", 200, 216, 140, {}),
]


@pytest.mark.parametrize("schedule", thinned(host.SCHEDULES, first=1))
@pytest.mark.parametrize("dtype, dim, dim_v, length, options", quick(CASES, CASES[2], CASES[5], spread=True), ids=str)
def test_dims_between(dtype, dim, dim_v, length, options, schedule, monkeypatch):
    """Forward and gradients; what lies behind the columns of q, k and v in memory is poison, and results begin as such."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    rng = numpy.random.default_rng(dim)

    def room(rows, width):
        x = numpy.full((2, rows, width + 16), numpy.nan, DTYPES[dtype])[..., :width]
        x[:] = rng.standard_normal(x.shape).astype(DTYPES[dtype])
        return x

    q, k, v, dout = room(length, dim), room(190, dim), room(190, dim_v), room(length, dim_v)
    plan = plan_attention(q, k, v, backend="host", arch="90a", return_lse=True, **options)
    out, lse = plan(q, k, v)
    p = plan.problem
    meant = {"scale": p.scale, "first_key": p.mask.left, "last_key": p.mask.right}
    comparison = compare(out, lse, q, k, v, **meant)
    assert plan.kernel.file == "fwd_hopper" and comparison.ok, comparison.message
    back = plan_attention_backward(dout, q, k, v, out, lse, backend="host", arch="90a", **options)
    gradients = back(dout, q, k, v, out, lse, workspace=numpy.full(back.workspace_bytes, 255, numpy.uint8))
    judged = compare_gradients(gradients, dout, q, k, v, **meant)
    assert back.kernel.file.startswith("bwd_hopper") and judged.ok, judged.message


# What they cost


LENGTH, SLOPES = 300, numpy.ones(2, numpy.float32)
ASKED = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 9)},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": SLOPES},
    "lengths": {"seqlens_kv": numpy.array([LENGTH])},
    "cache": {"seqlens_kv": numpy.array([LENGTH]), "cache_batch_idx": numpy.array([0])},
    "dropout": {"dropout": 0.1, "seed": 1},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "bends": {"alibi_slopes": SLOPES},
    "key": {"score": "score + t[kv_idx]", "arrays": {"t": numpy.ones(LENGTH, numpy.float32)}},
    "bias": {},
    "gate": {"score": "score * sigmoid(score)"},
}


DIRECTIONS = [*product(["forward"], ASKED), *(("backward", asked) for asked in ASKED if asked != "cache")]  # which has none


@release
@pytest.mark.parametrize("direction, asked", DIRECTIONS)
@pytest.mark.parametrize("dim", [24, 40, 72, 88, 104, 136, 200])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_registers_hold_them(dtype, dim, direction, asked):
    options = ASKED[asked] | ({"bias": numpy.zeros((2, LENGTH, LENGTH), DTYPES[dtype])} if asked == "bias" else {})
    q, lse = numpy.zeros((1, 2, LENGTH, dim), DTYPES[dtype]), numpy.zeros((1, 2, LENGTH), numpy.float32)
    if direction == "forward":
        kernel = plan_attention(q, q, q, backend="host", arch="90a", **options).kernel
    else:
        kernel = plan_attention_backward(q, q, q, q, q, lse, backend="host", arch="90a", **options).kernel
    code, log = nvrtc.compile_plan(kernel)
    assert "hopper" in kernel.file and read(code)[kernel.file].stack_bytes == 0 and "serialized" not in log
