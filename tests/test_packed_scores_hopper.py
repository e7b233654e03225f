"""Scores of heads that share a tile of fwd_hopper: on the host, against the oracle, and which kernel serves where."""

from itertools import product

import numpy
import pytest
from hand_scores import SCORES
from packed_rows import CASES, KINDS, expression, is_packed, judged
from score_kernels import DTYPES
from thinned import quick, thinned

from cupy_flash import plan_attention
from cupy_flash.machine import host
from cupy_flash.machine.machine_code import read
from cupy_flash.plan.few_rows import FEW_KEYS

WHERE = {"backend": "host", "arch": "90a"}


@pytest.fixture(params=thinned(host.SCHEDULES))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def named(asked):
    what, case = asked
    return f"{getattr(what, 'name', what)}-{case}"


EXPRESSIONS = list(product(SCORES, CASES))
BESIDE = list(product(KINDS, CASES))
# Each kind, a softcap beside a bias; where a case has a bias of several shapes, one kernel serves them.
OFTEN = [("linear", 7), ("bias", 2), ("causal bias", 4), ("bias of float32", 3), ("bias of heads", 2)]
OFTEN += [("bias of elements", 2), ("large bias", 2), ("bias, capped", 6)]


@pytest.mark.parametrize("asked", thinned(EXPRESSIONS, keep=74, first=7), ids=named)
def test_expressions(asked, schedule):
    example, case = asked
    judged(case, *expression(example, case), WHERE)


@pytest.mark.parametrize("asked", quick(BESIDE, *((kind, CASES[i]) for kind, i in OFTEN)), ids=named)
def test_terms_and_biases(asked, schedule):
    kind, case = asked
    judged(case, *KINDS[kind](case), WHERE)


def plan_of(heads_kv=8, group=4, len_q=8, len_kv=4096, dim=128, batch=1, dtype="bfloat16", arch="90a", **options):
    """Of `group` heads on each of `heads_kv`; `bias` is a dtype."""
    q = numpy.zeros((batch, heads_kv * group, len_q, dim), DTYPES[dtype])
    k = numpy.zeros((batch, heads_kv, len_kv, dim), DTYPES[dtype])
    if "bias" in options:
        options["bias"] = numpy.zeros((heads_kv * group, len_q, len_kv), DTYPES[options["bias"]])
    if options.pop("slopes", False):
        options["alibi_slopes"] = numpy.ones(heads_kv * group, numpy.float32)
    return plan_attention(q, k, k, backend="host", arch=arch, **options).kernel


LONG, SHORT = "score * sigmoid(score)", "score - 0.5 * kv_idx"


@pytest.mark.parametrize(
    "options, file",
    [
        ({"len_q": 4, "slopes": True}, "fwd_v2"),  # 16 rows
        ({"len_q": 5, "slopes": True}, "fwd_hopper"),
        ({"len_q": 16, "slopes": True}, "fwd_hopper"),
        ({"len_q": 1, "group": 32, "score": SHORT}, "fwd_hopper"),
        ({"len_q": 5, "slopes": True, "arch": "80"}, "fwd_v2"),
        ({"len_q": 5, "slopes": True, "dtype": "float32"}, "fwd_v2"),
        ({"len_q": 5, "mask": "kv_idx % 3 > 0"}, "fwd_v2"),
        ({"len_q": 30, "mask": "kv_idx % 3 > 0"}, "fwd_v2"),
        ({"len_q": 16, "bias": "bfloat16"}, "fwd_v2"),
        ({"len_q": 17, "bias": "bfloat16"}, "fwd_hopper"),
        ({"len_q": 16, "bias": "bfloat16", "dim": 64}, "fwd_hopper"),
        ({"len_q": 16, "bias": "float32", "dim": 64}, "fwd_v2"),
        ({"len_q": 17, "bias": "float32", "dim": 64}, "fwd_hopper"),
        ({"len_q": 16, "bias": "float32", "dim": 256}, "fwd_hopper"),
        ({"len_q": 16, "score": LONG, "len_kv": FEW_KEYS // 8}, "fwd_v2"),
        ({"len_q": 16, "score": LONG, "len_kv": FEW_KEYS // 8 + 1}, "fwd_hopper"),
        ({"len_q": 16, "score": LONG, "len_kv": 500, "batch": 9}, "fwd_hopper"),  # as many tiles as multiprocessors
        ({"len_q": 17, "score": LONG}, "fwd_hopper"),
        ({"len_q": 16, "score": LONG, "dim": 192}, "fwd_hopper"),
        ({"len_q": 16, "score": LONG, "kernel": "fwd_hopper"}, "fwd_hopper"),
        ({"len_q": 17, "slopes": True, "kernel": "fwd_v2"}, "fwd_v2"),
    ],
    ids=str,
)
def test_where(options, file):
    kernel = plan_of(**options)
    assert kernel.file == file and kernel.config.PACK_GQA


def test_where_not():
    """Dropout, and masks that tell heads apart or are asked by fwd_hopper, are of one head a tile."""
    of_all = {"mask": "kv_idx % 3 > 0", "kernel": "fwd_hopper"}
    for options in ({"dropout": 0.1, "seed": 1}, {"mask": "(kv_idx + h) % 3 > 0"}, of_all):
        assert not plan_of(slopes=True, **options).config.PACK_GQA


def test_rows_that_leave_half_a_tile_empty_have_smaller_ones():
    assert [plan_of(len_q=n, slopes=True, dim=64).config.TILE_Q for n in (32, 33, 64)] == [128, 256, 256]
    assert [plan_of(group=8, len_q=n, slopes=True, dim=64).config.TILE_Q for n in (48, 49)] == [128, 256]


def test_a_plan_says_why():
    assert "few rows of few keys, of which each score takes long" in plan_of(score=LONG).reasons
    assert "few rows, each with a bias of its own" in plan_of(bias="bfloat16").reasons
    assert "4 query heads of a group share a tile: 8 queries each" in plan_of(slopes=True).reasons


ASKED = {
    "alibi": {"slopes": True},
    "factor": {"score": "score * (0.5 + 0.1 * h)"},
    "lookup": {"score": "score + table[h, max(0, min(63, kv_idx - q_idx))]"},
    "long": {"score": LONG},
    "softcap": {"slopes": True, "softcap": 9.0},
    "bias": {"bias": "bfloat16"},
    "bias of float32": {"bias": "float32"},
    "bias and softcap": {"bias": "bfloat16", "softcap": 9.0},
}
# As compiled by NVRTC 12.9: bytes of what has no room in registers.
SPILLS = {("softcap", 64, 256): 24, ("bias of float32", 256, 128): 8}
COMPILED = list(product(ASKED, (64, 128, 192, 256), (8, 33)))


@pytest.mark.release  # test_packed_scores.py compiles a kernel with scores of heads that share a tile
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("asked", COMPILED, ids=str)
def test_spills(asked, causal):
    kind, dim, len_q = asked
    nvrtc = pytest.importorskip("cupy_flash.machine.nvrtc")
    pytest.importorskip("cupy")
    options = dict(ASKED[kind])
    if "table" in options.get("score", ""):
        options["arrays"] = {"table": numpy.zeros((32, 64), numpy.float32)}
    kernel = plan_of(dim=dim, len_q=len_q, causal=causal, kernel="fwd_hopper", **options)
    code, log = nvrtc.compile_plan(kernel)
    assert is_packed(kernel) and "C75" not in log
    assert read(code)["fwd_hopper"].stack_bytes <= SPILLS.get((kind, dim, kernel.config.TILE_Q), 0), str(kernel)
