"""Scores and masks where heads of a group share a tile, as in decoding: each row has its own. On the host, against the oracle."""

from itertools import product

import numpy
import pytest
from few_queries import BATCH, HEADS, HEADS_KV, LENGTHS, MASKS, WITH, inputs, masked
from hand_scores import SCORES, Grid
from packed_rows import is_packed
from score_kernels import DTYPES, given, judged
from thinned import quick, thinned

from cupy_flash import attention, plan_attention
from cupy_flash.machine import host
from cupy_flash.machine.machine_code import read
from cupy_flash.plan.split import SPLIT_KEYS

KINDS = [("75", "float16"), ("80", "bfloat16"), ("90a", "float16"), ("80", "float32")]


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def on_host(kind, lengths, options, hand):
    arch, dtype = kind
    kernel, _ = judged(dtype, options, hand, {"backend": "host", "arch": arch}, inputs_given=inputs(dtype, *lengths))
    more = arch == "90a" and lengths[0] * HEADS // HEADS_KV > 16 and "mask" not in options  # rows: see test_packed_scores_hopper
    assert kernel.file == "fwd_v2" or (more and is_packed(kernel))
    assert kernel.config.PACK_GQA and (kernel.config.SCORES != "UNCHANGED" or kernel.config.TILE_LIST)
    sees_many = lengths[1] >= 2 * SPLIT_KEYS and "window" not in options
    assert kernel.config.SPLIT_KV is sees_many and kernel.config.TILE_LIST is ("mask" in options)


def named(asked):
    *what, kind = asked
    return "-".join([*map(str, what), *kind])


@pytest.mark.parametrize("asked", thinned(list(product(SCORES, LENGTHS, KINDS)), keep=200, first=3), ids=named)
def test_scores(asked, schedule):
    example, lengths, kind = asked
    arrays, score = given(example, Grid.of((BATCH,), HEADS, HEADS_KV, *lengths))
    on_host(kind, lengths, {"score": example.text, "arrays": arrays}, {"score": score})


@pytest.mark.release  # test_packed_scores_hopper.py has each alone, and the next test masks
@pytest.mark.parametrize("asked", thinned(list(product(LENGTHS, KINDS)), keep=12, first=6), ids=named)
def test_bias_alibi_and_a_causal_mask(asked, schedule):
    (len_q, len_kv), kind = asked
    rng = numpy.random.default_rng(1)
    bias = rng.standard_normal((BATCH, HEADS, len_q, len_kv)).astype(DTYPES[kind[1]])
    bias[..., 5:7] = -numpy.inf
    slopes = rng.uniform(0.01, 0.2, (BATCH, HEADS)).astype(numpy.float32)
    sinks = rng.standard_normal(HEADS).astype(numpy.float32)
    hand = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks, "last_key": len_kv - len_q, "first_key": len_kv - len_q - 50}
    options = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks, "window": (50, 0)}
    on_host(kind, (len_q, len_kv), options, hand)


MASKED = list(product(MASKS, WITH, LENGTHS, KINDS))


@pytest.mark.parametrize("asked", quick(MASKED, MASKED[82]), ids=named)  # split keys
def test_masks(asked, schedule):
    name, besides, lengths, kind = asked
    on_host(kind, lengths, *masked(name, besides, *lengths))


@pytest.mark.release  # the test before asks it of fewer rows
@pytest.mark.parametrize("name", thinned(WITH, keep=5, first=2))
@pytest.mark.parametrize("dtype", thinned(["float16", "bfloat16"]))
def test_masks_of_more_rows_than_a_warp_has(dtype, name):
    """On sm_90a in wide tiles of keys, of which lists name some; of more than one tile of rows all have the same list."""
    lengths = 30, LENGTHS[2][1]
    options, hand = masked("of batch elements", name, *lengths)
    given_ = inputs(dtype, *lengths, dim=128)
    kernel, _ = judged(dtype, options, hand, {"backend": "host", "arch": "90a"}, inputs_given=given_)
    tiles = kernel.config.TILE_Q, kernel.config.TILE_KV, kernel.config.WARPS_KV
    assert kernel.file == "fwd_v2" and kernel.config.PACK_GQA and kernel.config.TILE_LIST and tiles == (64, 64, 1)


@pytest.mark.parametrize("heads", thinned([HEADS_KV, HEADS], first=1))
def test_what_a_mask_hides_of_a_cache_is_not_read(heads):
    """Of tiles that no query sees, keys may be anything, and what is read is what as long a cache has."""
    length, room = 448, 1600
    q, k, v, _ = inputs("float16", 1, room, heads)
    k[..., length:, :] = v[..., length:, :] = numpy.nan
    options = {"mask": "kv_idx < n[b]", "arrays": {"n": numpy.full(BATCH, length, numpy.int32)}}
    plan = plan_attention(q, k, v, backend="host", arch="90a", **options)
    assert plan.kernel.file == "fwd_v2" and plan.kernel.config.TILE_LIST and length % plan.kernel.config.TILE_KV == 0
    assert plan.kernel.config.PACK_GQA is (heads > HEADS_KV) and plan.kernel.config.WARPS_KV == 4
    got, moved = plan.counted(q, k, v, arrays=options["arrays"])
    expected = attention(q, k[..., :length, :], v[..., :length, :])
    numpy.testing.assert_allclose(got.astype("f4"), expected.astype("f4"), rtol=0, atol=2**-9)
    keys = BATCH * HEADS_KV * length * (k.shape[-1] + v.shape[-1]) * 2
    assert keys <= moved.read_bytes <= 1.1 * keys


@pytest.mark.parametrize(
    "arch, len_q, dtype", quick([*product(("80", "90a"), (1, 7), ("float16", "float32"))], ("90a", 7, "float16"), spread=True)
)
def test_a_bias_of_caches_that_end_between_two_elements(arch, len_q, dtype):
    """Two are read at once: of the last one of an odd number what is beside it counts for nothing."""
    lengths, room = numpy.array([33, 1]), 94
    q, k, v, _ = inputs("float16", len_q, room)
    bias = numpy.random.default_rng(3).standard_normal((BATCH, HEADS, len_q, room)).astype(DTYPES[dtype])
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = bias[b, ..., length:] = numpy.nan
    plan = plan_attention(q, k, v, bias=bias, seqlens_kv=lengths, backend="host", arch=arch)
    c, constants = plan.kernel.config, dict(plan.kernel.expressions.constants)
    assert plan.kernel.file == "fwd_v2" and c.PACK_GQA and c.VARLEN and constants["BIAS_BY_TWO"] == "true"
    out = plan(q, k, v, bias=bias, seqlens_kv=lengths)
    for got, *of_one, of_bias, length in zip(out, q, k, v, bias, lengths):
        of_q, of_k, of_v = (x.astype(float) for x in of_one)
        right = attention(of_q, of_k[:, :length], of_v[:, :length], bias=of_bias[..., :length].astype(float))
        assert abs(got - right).max() <= 2**-9 * abs(of_v[:, :length]).max()  # P and the result are rounded


def test_more_queries_have_the_kernel_of_many():
    """From a tile's rows on, fwd_hopper is faster where heads share nothing."""
    for len_q, file in ((16, "fwd_v2"), (17, "fwd_hopper")):
        q, k, v, _ = inputs("float16", len_q, 1600, HEADS_KV)
        assert plan_attention(q, k, v, backend="host", arch="90a", mask="kv_idx % 3 > 0").kernel.file == file


@pytest.mark.parametrize(
    "options",
    [
        {"mask": "(kv_idx + h) % 3 > 0"},
        {"mask": numpy.ones((HEADS, 3, 93), bool)},
        {"dropout": 0.1, "seed": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_asks_for_one_head_a_tile(options):
    q, k, v, _ = inputs("float16", 3, 93)
    arguments = {"alibi_slopes": numpy.ones(HEADS, numpy.float32), "backend": "host", "arch": "90a"}
    assert not plan_attention(q, k, v, **arguments, **options).kernel.config.PACK_GQA


@pytest.mark.release
def test_keys_are_read_once_for_a_group():
    """What eight heads on two read is what two heads on two do, and of ALiBi the other slopes for each key tile."""
    read = []
    for heads in (8, HEADS_KV):
        q, k, v, _ = inputs("float16", 1, 3000, heads)
        slopes = {"alibi_slopes": numpy.ones(heads, numpy.float32)}
        read.append(plan_attention(q, k, v, backend="host", arch="90a", **slopes).counted(q, k, v, **slopes)[1].read_bytes)
    assert read[0] <= 1.05 * read[1]


ARCHITECTURES = ("75", "80", "86", "90a", "100", "120")
COMPILED = list(product(ARCHITECTURES, ("float16", "float32"), (64, 128, 192, 256), ("alibi", "bias", "all", "mask", "all, mask")))


@pytest.mark.parametrize("asked", thinned(COMPILED, keep=98, first=53), ids=lambda asked: "-".join(map(str, asked)))
def test_they_compile_without_spills(asked):
    arch, dtype, dim, what = asked
    nvrtc = pytest.importorskip("cupy_flash.machine.nvrtc")
    pytest.importorskip("cupy")
    q, k = (numpy.zeros((heads, rows, dim), DTYPES[dtype]) for heads, rows in ((8, 4), (2, 2048)))
    slopes = {"alibi_slopes": numpy.ones(8, numpy.float32)}
    bias = {"bias": numpy.zeros((8, 4, 2048), DTYPES[dtype])}
    level = {"score": "score * sigmoid(score - level[h])", "arrays": {"level": numpy.ones(8, numpy.float32)}}
    every = slopes | bias | level | {"softcap": 9.0, "causal": True}
    mask = {"mask": numpy.ones((4, 2048), bool)}
    options = {"alibi": slopes, "bias": bias, "all": every, "mask": mask, "all, mask": every | mask}[what]
    kernel = plan_attention(q, k, k, backend="host", arch=arch, **options).kernel
    assert kernel.file == "fwd_v2" and kernel.config.PACK_GQA is not (dtype == "float32" and dim > 128)
    if kernel.config.PACK_GQA:
        of_all = 8 * (asked == ("75", "float16", 256, "all, mask"))  # scores, a bias by two, slopes and an array that masks
        assert read(nvrtc.compile_plan(kernel)[0])["fwd_v2"].stack_bytes <= of_all
