"""What the compiler makes of float32 in parts: nothing spills, and products run by themselves, whatever is asked of scores."""

from dataclasses import replace
from itertools import product

import numpy
import pytest
from thinned import quick, thinned

from cupy_flash import UnsupportedError, plan_attention
from cupy_flash.judge.expressions import MASKS, SCORES_OF_LENGTHS, Sizes
from cupy_flash.machine import nvrtc
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.fp16_parts import parts_plan

HEADS, LENGTH = 2, 1500
SIZES = Sizes(b=2, h=HEADS, h_kv=HEADS, q_idx=LENGTH, kv_idx=LENGTH)
DIMS = (32, 48, 64, 80, 96, 112, 128)


def drawn(expression):
    rng = numpy.random.default_rng(0)
    arrays = {name: numpy.asarray(x) for name, x in expression.draw(rng, SIZES).items()}
    return {name: x.astype(numpy.float32) if x.dtype.kind == "f" else x for name, x in arrays.items() if x.ndim} | {
        name: x.item() for name, x in arrays.items() if not x.ndim
    }


def of_scores():
    """What may be asked, by name."""
    zeros = numpy.zeros(HEADS, numpy.float32)
    bias = numpy.lib.stride_tricks.as_strided(zeros, (HEADS, LENGTH, LENGTH), (LENGTH * LENGTH * 4, LENGTH * 4, 4))  # never read
    found = {
        "nothing": {},
        "causal, prefix": {"causal": True, "prefix": 9},
        "window": {"window": (70, 3)},
        "sinks": {"sinks": zeros},
        "several sinks": {"sinks": numpy.zeros((3, HEADS), numpy.float32), "causal": True},
        "softcap": {"softcap": 9.0, "causal": True, "prefix": 9},
        "scale": {"scale": -1.0},
        "large scale": {"scale": 5000.0},
        "alibi": {"alibi_slopes": zeros, "causal": True},
        "bias": {"bias": bias, "causal": True, "prefix": 9, "sinks": numpy.zeros((3, HEADS), numpy.float32)},
        "bias of keys": {"bias": numpy.zeros((2, 1, 1, LENGTH), numpy.float32)},
        "bias, alibi": {"bias": bias, "alibi_slopes": zeros},
        "bias, softcap": {"bias": bias, "softcap": 9.0},
        "bias, array": {"bias": bias, "mask": numpy.ones((1, 1, LENGTH, LENGTH), bool)},
    }
    documents = {"mask": MASKS["documents"].text, "arrays": drawn(MASKS["documents"])}
    for name, mask in MASKS.items():
        found[f"mask {name}"] = {"mask": mask.text, "arrays": drawn(mask)}
        found[f"mask {name}, softcap"] = found[f"mask {name}"] | {"causal": True, "softcap": 9.0}
    for name, score in SCORES_OF_LENGTHS.items():
        found[name] = {"score": score.text, "arrays": drawn(score)}
        found[f"{name}, softcap"] = found[name] | {"softcap": 9.0}
        found[f"{name}, alibi"] = found[name] | {"alibi_slopes": zeros}
        found[f"{name}, documents"] = documents | {"score": score.text, "arrays": drawn(score) | documents["arrays"]}
    return found


ASKED = of_scores()
LENGTHS = {name: numpy.zeros(2, numpy.int32) for name in ("seqlens_q", "seqlens_kv")}
DROPOUT = {"dropout": 0.1, "seed": 1}
BESIDE = {"sequences": LENGTHS, "dropout": DROPOUT, "sequences and dropout": LENGTHS | DROPOUT}
DIMS_BESIDE = (64, 96, 128)


@pytest.mark.release  # the next test compiles a softcap
@pytest.mark.parametrize("precision, dim", [*product(("ieee", "tf32"), DIMS)])
@pytest.mark.parametrize("name", [*ASKED])
def test_nothing_spills(name, dim, precision):
    for split in (False, True):
        check(ASKED[name], dim, precision, split)


OF_BESIDE = [*product(ASKED, BESIDE, DIMS_BESIDE)]
QUICK = [("softcap", "sequences and dropout", 64)]


@pytest.mark.parametrize("precision", thinned(["ieee", "tf32"]))
@pytest.mark.parametrize("name, beside, dim", quick(OF_BESIDE, *QUICK, spread=True))
def test_nothing_spills_beside_lengths_and_dropout(name, beside, dim, precision):
    check(ASKED[name] | BESIDE[beside], dim, precision, split=False)


def check(asked, dim, precision, split):
    q = numpy.lib.stride_tricks.as_strided(
        numpy.zeros(1, numpy.float32), (2, HEADS, LENGTH, dim), [4 * n for n in (HEADS * LENGTH * dim, LENGTH * dim, dim, 1)]
    )
    try:
        plan = plan_attention(q, q, q, **asked, precision=precision, kernel="fwd_hopper", backend="host", arch="90a").kernel
    except UnsupportedError as error:  # for fwd_v2
        assert ("registers" in str(error) and (dim > 64 or "dropout" in asked)) or ("mask" in str(error) and "seqlens_q" in asked)
        return
    if split and plan.config.IN_TURN:
        return
    report = nvrtc.report(replace(plan, config=replace(plan.config, SPLIT_KV=split)))
    assert report.spill_bytes == 0 and not report.warnings


@pytest.mark.release
@pytest.mark.parametrize("precision, dim", [("ieee", 64), ("ieee", 128), ("tf32", 64), ("tf32", 192)])
def test_nothing_spills_where_rows_of_out_are_not_multiples_of_16_bytes(dim, precision):
    q = numpy.zeros((1, 1, 300, dim), numpy.float32)
    for dim_v in (dim - 1, dim - 2):
        plan = plan_attention(q, q, q[..., :dim_v], precision=precision, kernel="fwd_hopper", backend="host", arch="90a").kernel
        assert plan.config.COPY_BYTES in (4, 8)
        report = nvrtc.report(plan)
        assert report.spill_bytes == 0 and not report.warnings


@pytest.mark.parametrize("parts", [1, 2])
def test_what_makes_parts(parts):
    report = nvrtc.report(parts_plan(ARCHITECTURES["90a"], parts))
    assert report.spill_bytes == 0 and not report.warnings
