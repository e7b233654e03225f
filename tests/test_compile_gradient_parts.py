"""What the compiler makes of float32 gradients in parts: nothing spills, and products run by themselves, whatever is asked."""

import functools
from dataclasses import replace
from itertools import product

import numpy
import pytest
from numpy.lib.stride_tricks import as_strided
from thinned import quick, thinned

from cupy_flash import UnsupportedError, plan_attention_backward
from cupy_flash.machine import machine_code, nvrtc

KERNEL, DIMS = "bwd_hopper_parts", (32, 64, 96, 128)
HEADS, MANY, LENGTH = 4, 800, 1500  # of the many some are later ones, whose sums others make zero
ASKED = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (70, 3)},
    "prefix": {"causal": True, "prefix": 9},
    "softcap": {"softcap": 9.0},
    "softcap, causal": {"softcap": 9.0, "causal": True, "prefix": 9},
    "scale": {"scale": -1.0},
    "large scale": {"scale": 5000.0, "causal": True},
    "sinks": {"sinks": 1, "causal": True},
    "several sinks": {"sinks": 3},
    "in order": {"deterministic": True},
    "in order, causal, softcap": {"deterministic": True, "causal": True, "softcap": 9.0},
    "group": {"heads_kv": 1, "causal": True},
    "group, in order": {"heads_kv": 2, "deterministic": True},
    "many heads": {"heads": MANY},
    "many heads, softcap, causal": {"heads": MANY, "softcap": 9.0, "causal": True, "prefix": 9, "sinks": 1},
    "many heads, in order": {"heads": MANY, "length": 4000, "deterministic": True},
    "many heads of a group": {"heads": MANY, "heads_kv": MANY // 4, "causal": True},
    "few keys": {"length": 4096, "length_kv": 77},
    "few keys, in order": {"length": 4096, "length_kv": 77, "deterministic": True},
}
ROWS = numpy.zeros(LENGTH, numpy.int32)
OF_SCORES = {
    "bias": {"bias": (HEADS, LENGTH, LENGTH), "causal": True, "prefix": 9, "sinks": 3},
    "bias of keys": {"bias": (1, 1, LENGTH)},
    "alibi": {"alibi_slopes": (HEADS,), "causal": True},
    "alibi in order": {"alibi_slopes": (HEADS,), "deterministic": True},
    "bias and alibi": {"bias": (HEADS, LENGTH, LENGTH), "alibi_slopes": (HEADS,)},
    "distances": {"score": "score - 0.1 * abs(q_idx - kv_idx)"},
    "a table": {"score": "score + t[kv_idx - q_idx + 1500]", "arrays": {"t": numpy.zeros(3000, numpy.float32)}},
    "documents": {"mask": "d[q_idx] == d[kv_idx]", "arrays": {"d": ROWS}, "causal": True},
    "documents, softcap": {"mask": "d[q_idx] == d[kv_idx]", "arrays": {"d": ROWS}, "softcap": 9.0},
    "documents, in order": {"mask": "d[q_idx] == d[kv_idx]", "arrays": {"d": ROWS}, "deterministic": True},
    "documents and bias": {"mask": "d[q_idx] == d[kv_idx]", "arrays": {"d": ROWS}, "bias": (HEADS, LENGTH, LENGTH)},
}
BESIDE = {"sequences": {"lengths": True}, "dropout": {"dropout": 0.1, "seed": 1}}
BESIDE["sequences and dropout"] = BESIDE["sequences"] | BESIDE["dropout"]
ASKED |= {f"{name}, {beside}": asked | more for name, asked in ASKED.items() for beside, more in BESIDE.items()}
OF_SCORES |= {f"{name}, {beside}": asked | more for name, asked in OF_SCORES.items() for beside, more in BESIDE.items()}


def array(*shape):
    """Of one number, which stands for all and is never read."""
    one = numpy.zeros(1, numpy.float32)
    return as_strided(one, shape, [4 * int(numpy.prod(shape[i + 1 :])) for i in range(len(shape))])


def planned(dim, dim_v, heads=HEADS, heads_kv=None, length=LENGTH, length_kv=None, sinks=0, lengths=False, **asked):
    heads_kv, length_kv = heads_kv or heads, length_kv or length
    q, dout, lse = array(1, heads, length, dim), array(1, heads, length, dim_v), array(1, heads, length)
    k, v = array(1, heads_kv, length_kv, dim), array(1, heads_kv, length_kv, dim_v)
    asked |= {"sinks": array(sinks, heads) if sinks > 1 else array(heads)} if sinks else {}
    asked |= {name: array(*asked[name]) for name in ("bias", "alibi_slopes") if name in asked}
    asked |= {name: numpy.zeros(1, numpy.int32) for name in ("seqlens_q", "seqlens_kv") if lengths}
    plan = plan_attention_backward(dout, q, k, v, dout, lse, **asked, kernel=KERNEL, backend="host", arch="90a").kernel
    assert plan.file == KERNEL and (1 if asked.get("precision") == "tf32" else 2) == plan.config.FP16_PARTS
    return plan


report_of = functools.cache(nvrtc.report)  # many of these are the same kernel


def check(plan):
    report = report_of(replace(plan, reasons=()))
    assert report.fault == "" and "C75" not in report.log
    entries = machine_code.read(report.code)
    assert set(plan.entries) <= set(entries) and not any(code.stack_bytes for code in entries.values())


@pytest.mark.release  # the next test compiles this kernel beside a bias, which takes registers
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("name, dim", [*product(ASKED, DIMS)])
def test_nothing_spills(name, dim, precision):
    plan = planned(dim, dim, **ASKED[name], precision=precision)
    found, explicit, lengths = plan.config, "softcap" in name or "scale" in name, "sequences" in name
    assert found.VARLEN is lengths and found.DROPOUT is ("dropout" in name)
    assert found.ZEROS_AHEAD is ("many heads" in name and not lengths) and found.EXPLICIT_SCORES is explicit
    check(plan)


@pytest.mark.parametrize("precision", thinned(["ieee", "tf32"], first=1))
@pytest.mark.parametrize("name, dim", quick([*product(OF_SCORES, DIMS)], ("bias", 128), spread=True))
def test_nothing_spills_of_scores(name, dim, precision):
    try:
        plan = planned(dim, dim, **OF_SCORES[name], precision=precision)
    except UnsupportedError as error:
        crowded = "registers" in str(error) and (("and alibi" in name and dim > 64) or "dropout" in name)
        assert crowded or ("mask" in str(error) and "documents" in name and "sequences" in name)
        return
    assert (plan.config.SCORES == "PLUS_TERM") is ("documents" not in name or "bias" in name)
    check(plan)


@pytest.mark.release
@pytest.mark.parametrize("dim, dim_v", [(63, 63), (95, 62), (62, 126), (126, 34), (128, 2)])
def test_nothing_spills_where_rows_are_not_multiples_of_16_bytes(dim, dim_v):
    plan = planned(dim, dim_v, causal=True)
    assert plan.config.COPY_BYTES < 16
    check(plan)
