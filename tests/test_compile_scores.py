"""What is asked for each pair of a query and a key compiles for every architecture without spills."""

import contextlib
import math
from itertools import product

import numpy
import pytest
from thinned import quick, thinned

pytest.importorskip("cupy")

from cupy_flash import UnsupportedError, plan_attention, plan_attention_backward
from cupy_flash.machine import nvrtc
from cupy_flash.machine.machine_code import read
from cupy_flash.plan import grouping
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.grouping import HOPPER_KERNELS
from cupy_flash.plan.tuning import WIDTHS
from cupy_flash.problem.arrays import DTYPES

LENGTH, SHORT = 4352, 256  # tiles of short sequences are others
SLOPES = numpy.ones(2, numpy.float32)
SEEN = numpy.ones((LENGTH, LENGTH), bool)
DOCUMENTS = {"mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": numpy.ones(LENGTH, numpy.int32)}}
CLIP = {"score": "c * tanh(score / c)", "arrays": {"c": 5.0}}
TABLE = {"score": "score + table[kv_idx - q_idx + 256]", "arrays": {"table": numpy.ones(600, numpy.float32)}}


PREFIX = {"mask": "kv_idx <= q_idx or kv_idx < n", "arrays": {"n": 100}}


def bias(dtype, length=LENGTH):
    return {"bias": numpy.zeros((2, length, length), DTYPES[dtype])}


ASKED = {
    "alibi": lambda dtype: {"alibi_slopes": SLOPES},
    "clip": lambda dtype: CLIP,
    "table": lambda dtype: TABLE,
    "bias": bias,
    "short bias": lambda dtype: bias(dtype, SHORT),
    "float32 bias": lambda dtype: bias("float32"),
    "documents": lambda dtype: DOCUMENTS,
    "prefix": lambda dtype: PREFIX,
    "mask": lambda dtype: {"mask": SEEN},
    "dropout": lambda dtype: {"dropout": 0.1, "seed": 1},
    "bias, dropout": lambda dtype: bias(dtype) | {"dropout": 0.1, "seed": 1},
    "documents, alibi": lambda dtype: DOCUMENTS | {"alibi_slopes": SLOPES},
    "clip, mask": lambda dtype: CLIP | {"mask": SEEN},
    "all": lambda dtype: CLIP | bias(dtype) | {"alibi_slopes": SLOPES, "mask": SEEN, "dropout": 0.1, "seed": 1},
}
# A few bytes where no tile that was tried has the registers: direction, dtype, and architectures, all of head dims above 192.
SPILLS = {
    ("forward", "float32"): ("80", "86", "89", "90a"),
    ("backward", "float32"): ("86", "89"),
    ("backward", "float16"): ("120",),
    ("backward", "bfloat16"): ("120",),
}


def settings():
    for architecture in ARCHITECTURES:
        for dtype in ("float16", "bfloat16", "float32"):
            for dim in WIDTHS:
                for asked in ASKED:
                    for way in ("forward", "backward"):
                        if dtype == "bfloat16" and architecture == "75":
                            continue
                        quick = (architecture, dtype, dim, asked, way) == ("80", "float16", 64, "all", "backward")
                        yield pytest.param(architecture, dtype, dim, asked, way, marks=() if quick else pytest.mark.release)


@pytest.mark.parametrize("architecture", quick(ARCHITECTURES, "75", "90a"))
def test_shared_memory_holds_every_tile(architecture):
    """Of a wide bias tile it has to hold two besides keys, values and queries; nothing but a device says so otherwise."""
    for dtype in ("float16", "float32"):
        for dim in WIDTHS:
            for name, asked in ASKED.items():
                length, options = SHORT if "short" in name else LENGTH, asked(dtype)
                q, lse = numpy.zeros((2, length, dim), DTYPES[dtype]), numpy.zeros((2, length), numpy.float32)
                where = {"backend": "host", "arch": architecture, **options}
                kernels = [plan_attention(q, q, q, **where).kernel]
                with contextlib.suppress(UnsupportedError):  # where it holds no tile at all
                    kernels += plan_attention_backward(q, q, q, q, q, lse, **where).kernels
                for kernel in kernels:
                    assert max(kernel.entries.values()) <= ARCHITECTURES[architecture].shared_bytes, str(kernel)


GATE = {"score": "score * sigmoid(score - level[h])", "arrays": {"level": numpy.ones(2, numpy.float32)}}
PLACES = {"score": "score + table[q_idx * kv_idx]", "arrays": {"table": numpy.ones(600, numpy.float32)}}
BY_SCORE = {"score": "score + table[int(score)]", "arrays": {"table": numpy.ones(9, numpy.float32)}}
READ = {  # what gradients are asked for, of what
    "bias": lambda dtype: bias(dtype) | {"wrt": "bias"},
    "alibi_slopes": lambda dtype: {"alibi_slopes": SLOPES, "wrt": "alibi_slopes"},
    "level": lambda dtype: GATE | bias(dtype) | {"mask": SEEN, "dropout": 0.1, "seed": 1, "wrt": "level"},
    "level of many": lambda dtype: GATE | bias(dtype) | {"alibi_slopes": SLOPES, "mask": SEEN, "wrt": "level"},
    "table": lambda dtype: TABLE | {"wrt": "table"},
    "table of places": lambda dtype: PLACES | {"wrt": "table"},
    "table by score": lambda dtype: BY_SCORE | {"wrt": "table"},
    "bias of all": lambda dtype: ASKED["all"](dtype) | {"wrt": "bias"},
}


def settings_of_reads():
    for architecture in ARCHITECTURES:
        for dtype in ("float16", "bfloat16", "float32"):
            for dim in WIDTHS:
                for asked in READ:
                    if dtype == "bfloat16" and architecture == "75":
                        continue
                    # One of warpgroups, and one of blocks of two warps.
                    quick = (architecture, dtype, dim, asked) in (("90a", "bfloat16", 32, "bias"), ("75", "float32", 128, "bias"))
                    yield pytest.param(architecture, dtype, dim, asked, marks=() if quick else pytest.mark.release)


@pytest.mark.parametrize("architecture, dtype, dim, asked", list(settings_of_reads()))
def test_no_spill_of_sums(architecture, dtype, dim, asked):
    q = numpy.zeros((3, 2, LENGTH, dim), DTYPES[dtype])  # three batch elements, which share a bias and are no cluster
    given = (q, q, q, q, q, numpy.zeros((3, 2, LENGTH), numpy.float32))
    try:
        plan = plan_attention_backward(*given, backend="host", arch=architecture, **READ[asked](dtype))
    except UnsupportedError as error:
        assert "shared memory" in str(error) and (architecture, dtype, dim) == ("75", "float32", 256)
        return
    kernel = plan.kernels[1]
    code, _ = nvrtc.compile_plan(kernel)
    assert {entry: read(code)[entry].stack_bytes for entry in kernel.entries} == dict.fromkeys(kernel.entries, 0)
    assert max(kernel.entries.values()) <= ARCHITECTURES[architecture].shared_bytes


@pytest.mark.release
@pytest.mark.parametrize("dim", thinned([dim for dim in WIDTHS if dim <= 192], keep=5, first=1))
@pytest.mark.parametrize("deterministic", thinned([False, True]))
@pytest.mark.parametrize("dtype", thinned(["bfloat16", "float16"]))
def test_a_gradient_that_is_stored_takes_no_registers(dtype, deterministic, dim):
    q = numpy.zeros((2, LENGTH, dim), DTYPES[dtype])
    given = (q, q, q, q, q, numpy.zeros((2, LENGTH), numpy.float32))
    options = {"backend": "host", "arch": "90a", "deterministic": deterministic, **bias(dtype)}
    codes = []
    for wrt in ((), "bias"):
        (kernel,) = plan_attention_backward(*given, wrt=wrt, **options).kernels
        assert kernel.config.STORE_DBIAS is (wrt == "bias")
        codes.append(read(nvrtc.compile_plan(kernel)[0])[kernel.file])
    assert codes[1].stack_bytes == 0 and codes[0].rounds == codes[1].rounds


MASKS = ({}, {"causal": True}, {"window": (40, 0)})
LENGTHS = (64, 512, 2048, 8192)  # of queries and keys: those that rows differ by


TERMS = {  # that are a step of the product of queries and keys
    "PLUS_COLUMN": lambda length: {"score": "score + t[kv_idx]", "arrays": {"t": numpy.ones(length, numpy.float32)}},
    "PLUS_LINEAR": lambda length: {"score": "score + slope[h] * (kv_idx - q_idx)", "arrays": {"slope": SLOPES}},
}


def plan_of_terms(kind, dtype, dims, length, **options):
    q, k, v = (numpy.zeros((1, 2, length, dim), DTYPES[dtype]) for dim in (dims[0], *dims))
    kernel = plan_attention(q, k, v, backend="host", arch="90a", **TERMS[kind](length), **options).kernel
    assert (kernel.file, kernel.config.SCORES) == ("fwd_hopper", kind)
    return kernel


@pytest.mark.parametrize("kind", thinned(TERMS))
def test_shared_memory_holds_terms_in_products(kind):
    for dims, length, mask in product([*((dim, dim) for dim in WIDTHS), (192, 128)], LENGTHS, MASKS):
        for more in ({}, {"seqlens_q": numpy.array([length]), "seqlens_kv": numpy.array([length])}):
            kernel = plan_of_terms(kind, "float16", dims, length, **mask, **more)
            assert kernel.shared_bytes <= ARCHITECTURES["90a"].shared_bytes, str(kernel)


CASES = list(product(["bfloat16", "float16"], WIDTHS, LENGTHS, MASKS))


@pytest.mark.release  # in test_packed_scores_hopper.py heads share a tile where there is a linear term
@pytest.mark.parametrize("case", thinned(CASES, keep=192, first=97), ids=str)
@pytest.mark.parametrize("kind", thinned(TERMS))
def test_terms_in_products_take_no_registers(kind, case):
    dtype, dim, length, mask = case
    assert nvrtc.report(plan_of_terms(kind, dtype, (dim, dim), length, **mask)).fault == ""


@pytest.mark.parametrize("architecture, dtype, dim, asked, way", list(settings()))
def test_no_spill(architecture, dtype, dim, asked, way, share_of_bits):
    share_of_bits(0)
    length = SHORT if "short" in asked else LENGTH
    q = numpy.zeros((2, length, dim), DTYPES[dtype])
    options = {"backend": "host", "arch": architecture, **ASKED[asked](dtype)}
    try:
        if way == "forward":
            plan = plan_attention(q, q, q, **options)
        else:
            plan = plan_attention_backward(q, q, q, q, q, numpy.zeros((2, length), numpy.float32), **options)
    except UnsupportedError as error:
        assert "shared memory" in str(error)
        return
    kernel = plan.kernel
    assert kernel.config.SCORES != "UNCHANGED" or kernel.config.MASKED_PAIRS or kernel.config.DROPOUT
    code, log = nvrtc.compile_plan(kernel)
    spilt = read(code)[kernel.file].stack_bytes
    assert "C75" not in log
    most = 32 * (dim > 192 and architecture in SPILLS.get((way, dtype), ()))
    most += 8 * ((way, architecture, dtype, asked) == ("backward", "90a", "float16", "float32 bias") and 64 < dim <= 128)
    assert spilt <= most
    assert max(kernel.entries.values()) <= ARCHITECTURES[architecture].shared_bytes


# Of up to 16 operations, which four groups of rows compute at dims up to 64. Some spill numbers of a query tile, and are faster
# all the same, by 1.14 to 1.36.
SHORT_SCORES = (
    "score * (1 + 0.01 * abs(q_idx - kv_idx) / q_len)",
    "max(score, -10) * 0.5",
    "score * score",
    "where(q_idx > kv_idx, score * 2, score)",
    "score / (1 + abs(score))",
    "min(max(score, -3), 3) + 0.1 * (q_idx - kv_idx)",
)


@pytest.mark.release  # as others of more operations, which may spill nothing
@pytest.mark.parametrize("causal", quick([False, True], False))
@pytest.mark.parametrize("score", quick(SHORT_SCORES, SHORT_SCORES[0]))
@pytest.mark.parametrize("dtype", quick(["float16", "bfloat16"], "bfloat16"))
def test_short_expressions_spill_little(dtype, score, causal):
    q = numpy.zeros((2, 8192, 64), DTYPES[dtype])
    kernel = plan_attention(q, q, q, score=score, causal=causal, backend="host", arch="90a").kernel
    assert (kernel.file, kernel.config.TILE_Q, kernel.config.TILE_KV) == ("fwd_hopper", 256, 64)
    code, log = nvrtc.compile_plan(kernel)
    assert "C75" not in log and read(code)[kernel.file].stack_bytes <= 24


# Kernels of all masks: where bits say which pairs take part, no text is asked.
OF_BITS = {
    "": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 20.0},
    "dropout": {"dropout": 0.1, "seed": 1},
    "sinks": {"sinks": numpy.zeros(2, numpy.float32)},
    "dropout, softcap": {"dropout": 0.1, "seed": 1, "softcap": 20.0},
}


@pytest.mark.parametrize("asked", quick(OF_BITS, ""))
@pytest.mark.parametrize("len_q", quick([LENGTH, 64], LENGTH))
@pytest.mark.parametrize("dim", quick(WIDTHS, 64))
@pytest.mark.parametrize("dtype", quick(["float16", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("way", quick(["forward", "backward"], "forward"))
def test_no_spill_where_bits_mask_pairs(way, dtype, dim, len_q, asked, share_of_bits):
    share_of_bits(math.inf)
    q, k = (numpy.zeros((2, length, dim), DTYPES[dtype]) for length in (len_q, LENGTH))
    options = {"backend": "host", "arch": "90a", "mask": SEEN[:len_q]} | OF_BITS[asked]
    if way == "forward":
        kernel = plan_attention(q, k, k, **options).kernel
    else:
        kernel = plan_attention_backward(q, q, k, k, q, q[..., 0].astype("f4"), **options).kernel
    if "hopper" not in kernel.file:
        return
    assert kernel.config.PAIR_BITS
    code, log = nvrtc.compile_plan(kernel)
    assert "C75" not in log and read(code)[kernel.file].stack_bytes == 0
    assert max(kernel.entries.values()) <= ARCHITECTURES["90a"].shared_bytes


@pytest.mark.release  # test_key_tiles_in_turn.py has results of such blocks, and the last test compiles what reads bits
@pytest.mark.parametrize("asked", OF_BITS)
@pytest.mark.parametrize("len_q", [LENGTH, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_spill_where_blocks_take_key_tiles(dtype, len_q, asked, share_of_bits, key_tiles_in_turn):
    share_of_bits(math.inf)
    q, k = (numpy.zeros((2, length, 64), DTYPES[dtype]) for length in (len_q, LENGTH))
    options = {"backend": "host", "arch": "90a", "mask": SEEN[:len_q]} | OF_BITS[asked]
    kernel = plan_attention_backward(q, q, k, k, q, q[..., 0].astype("f4"), **options).kernel
    assert kernel.config.PERSISTENT
    code, log = nvrtc.compile_plan(kernel)
    assert "C75" not in log and read(code)[kernel.file].stack_bytes == 0
    assert max(kernel.entries.values()) <= ARCHITECTURES["90a"].shared_bytes


ROWS_AHEAD = 1000
AHEAD = {name: asked for name, asked in OF_BITS.items() if "softcap" not in name} | {
    "softcap": {"softcap": 20.0, "causal": True},
    "linear": {"score": "score - 0.25 * (q_idx - kv_idx)"},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "column": {"score": "score + t[kv_idx]", "arrays": {"t": numpy.zeros(ROWS_AHEAD, numpy.float32)}},
    "scaled": {"score": "score * t[h]", "arrays": {"t": SLOPES}},
    "expression": CLIP,
    "bias": {},
}
MADE_AHEAD = [(dim, 1000, zeros) for dim in (32, 64, 128) for zeros in (False, True)] + [(128, 1600, True), (256, 1000, True)]


@pytest.mark.parametrize("asked", quick(AHEAD, ""))
@pytest.mark.parametrize("dim, len_q, zeros", quick(MADE_AHEAD, (64, 1000, True), spread=True))
@pytest.mark.parametrize("dtype", quick(["float16", "bfloat16"], "bfloat16"))
def test_no_spill_where_blocks_make_what_later_heads_need(dtype, dim, len_q, zeros, asked, made_ahead, monkeypatch):
    """Statistics, with zeros and without, and zeros where TMA adds dQ, or for wide heads."""
    monkeypatch.setattr(grouping, "MOST_ROWS_REUSED", 0 if zeros else 2048)
    q, k = (numpy.zeros((9, 2, rows, dim), DTYPES[dtype]) for rows in (len_q, ROWS_AHEAD))
    options = {"backend": "host", "arch": "90a"} | AHEAD[asked]
    options |= {"bias": numpy.zeros((2, len_q, ROWS_AHEAD), DTYPES[dtype])} if asked == "bias" else {}
    kernel = plan_attention_backward(q, q, k, k, q, q[..., 0].astype("f4"), **options).kernel
    c = kernel.config
    assert kernel.file in HOPPER_KERNELS
    assert c.ZEROS_AHEAD is (not c.STAGED_BIAS and (zeros or kernel.file == "bwd_hopper_wide"))
    assert c.STATS_AHEAD is (kernel.file == "bwd_hopper" and not c.TMA_REDUCE_DQ and not c.STAGED_BIAS)
    code, log = nvrtc.compile_plan(kernel)
    of_both_gradients = 8 * (asked == "softcap" and c.WIDTH == 128)  # 1.4 to 1.5 times as fast as one gradient a warpgroup
    assert "C75" not in log and read(code)[kernel.file].stack_bytes <= of_both_gradients
    assert kernel.shared_bytes <= ARCHITECTURES["90a"].shared_bytes
