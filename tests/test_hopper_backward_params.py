"""The numbers and tensor maps that a backward for sm_90a is told."""

import math

import pytest

from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.backward import backward_maps, make_backward_plan
from cupy_flash.plan.grouping import Grouping, make_grouping
from cupy_flash.plan.params import backward_params, fast_divmod
from cupy_flash.plan.softcap import cap_polynomial
from cupy_flash.plan.structs import struct
from cupy_flash.problem.backward import make_backward_problem
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.options import Options

SM_90A = ARCHITECTURES["90a"]
NARROW, WIDE = "bwd_hopper", "bwd_hopper_wide"
BACKWARD, HOPPER_BACKWARD = struct("BackwardParams"), struct("HopperBackwardParams")
MAPPED = ("q", "k", "v", "dout", "dq", "dk", "dv")


def problem_of(**options):
    """Each number that a kernel gets of it differs from the others, so that none can take another's place."""
    q, dq, out, dout = ((2, 6, 10, dim) for dim in (64, 64, 48, 48))
    k, dk, v, dv = ((2, 3, 20, dim) for dim in (64, 64, 48, 48))
    orders = {"q": (3, 1, 2, 0), "out": (3, 1, 2, 0), "dq": (3, 2, 1, 0), "dout": (3, 2, 1, 0)}
    orders |= {"k": (3, 2, 1, 0), "v": (3, 2, 1, 0), "dk": (3, 1, 2, 0), "dv": (3, 1, 2, 0)}
    shapes = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    layouts = {name: dense_layout(shape, orders[name], "float16", None) for name, shape in shapes.items()}
    lse, dlse = (dense_layout((2, 6, 10), order, "float32", None) for order in ((2, 1, 0), (1, 2, 0)))
    asked = Options(scale=0.3, softcap=5.0, window=(4, 2), backend="host", **options)
    return make_backward_problem(**layouts, lse=lse, dlse=dlse, options=asked)


@pytest.mark.parametrize("kernel", [NARROW, WIDE])
def test_a_problem_becomes_numbers(kernel):
    problem = problem_of(kernel=kernel)
    plan = make_backward_plan(problem, SM_90A)
    grouping = Grouping(
        1, 8, blocks=16, owners=30, accum_heads=11, finishing=5, last_heads=7, reused=9, cleared_after=13, backwards=3,
        first_tiles=4, heads_ahead=6, makers=12,
    )  # fmt: skip
    params = backward_params(problem, grouping, backward_maps(plan, problem))[0]
    assert params.dtype == HOPPER_BACKWARD
    queries, keys = plan.config.TILE_Q, plan.config.TILE_KV
    maps = {name: params[f"{name}_map"] for name in MAPPED}
    assert {name: clear["size"].tolist() for name, clear in maps.items()} == {
        "q": [64, 10, 6, 2, 1],
        "k": [64, 20, 3, 2, 1],
        "v": [48, 20, 3, 2, 1],
        "dout": [48, 10, 6, 2, 1],
        "dq": [64, 10, 6, 2, 1],
        "dk": [64, 20, 3, 2, 1],
        "dv": [48, 20, 3, 2, 1],
    }
    assert {name: clear["stride"].tolist()[:3] for name, clear in maps.items()} == {  # bytes between rows, heads, batch elements
        "q": [768, 128, 7680],
        "k": [128, 2560, 7680],
        "v": [96, 1920, 5760],
        "dout": [96, 960, 5760],
        "dq": [128, 1280, 7680],
        "dk": [384, 128, 7680],
        "dv": [288, 96, 5760],
    }
    boxes = {"q": queries, "k": keys, "v": keys, "dout": queries, "dq": 16, "dk": 16, "dv": 16}
    assert {name: int(clear["box_rows"]) for name, clear in maps.items()} == boxes
    assert {int(clear["box_cols"]) for clear in maps.values()} == {64}

    def steps(name):
        tensor = params[name]
        return (*(int(tensor[f"{axis}_stride"]) for axis in ("head", "row", "col")), int(tensor["batch_stride"][-1]))

    tensors = [name for name in BACKWARD.names if BACKWARD[name] == struct("Tensor")]
    assert {name: steps(name) for name in tensors} == {
        "q": (64, 384, 1, 3840),
        "k": (1280, 64, 1, 3840),
        "v": (960, 48, 1, 2880),
        "out": (48, 288, 1, 2880),
        "lse": (10, 1, 0, 60),
        "dout": (480, 48, 1, 2880),
        "dlse": (1, 6, 0, 60),
        "dq": (640, 64, 1, 3840),
        "dk": (64, 192, 1, 3840),
        "dv": (48, 144, 1, 2880),
        "sinks": (0, 0, 0, 0),
    }
    assert {int(params[name]["data"]) for name in tensors} | {int(clear["data"]) for clear in maps.values()} == {0}
    divisors = {
        "heads_together_divmod": 8,
        "group_divmod": 16,
        "units_divmod": 6,
        "heads_per_kv_divmod": 2,
        "accum_heads_divmod": 11,
    }
    assert {name: params[name].tolist() for name in divisors} == {name: fast_divmod(n) for name, n in divisors.items()}
    heads = {"owners": 30, "last_heads": 7, "reused": 9, "cleared_after": 13, "backwards": 3, "first_tiles": 4, "finishing": 5}
    heads |= {"heads_ahead": 6, "makers": 12}
    assert {name: params[name].tolist() for name in heads} == heads
    mapped = {f"{name}_map" for name in (*MAPPED, "out", "bias", "dbias")}
    memory = {"key_places", "next_tile", "stats_progress", "zeros_progress"}
    assert set(HOPPER_BACKWARD.names) - {"", *BACKWARD.names, *divisors, *heads, *mapped} == memory
    assert {int(params[name]) for name in memory} == {0}
    minus_square, factors = cap_polynomial(0.3, 5.0)
    assert [params["cap"]["minus_square"], *params["cap"]["factors"]] == pytest.approx([minus_square, *factors])
    assert {name: params[name].tolist() for name in BACKWARD.names if name not in (*tensors, "scores", "sequences", "cap")} == {
        **dict.fromkeys(("stats", "dq_accum", "dk_accum", "dv_accum", "dq_semaphore", "dq_progress", "dsinks", "sinks_of_head"), 0),
        "mask": (6, 12, fast_divmod(1), 0),
        "batch": [1, 1, 1, 2],
        "heads": 6,
        "heads_per_kv": 2,
        "heads_per_block": 1,
        "heads_together": 8,
        "len_q": 10,
        "len_kv": 20,
        "dim": 64,
        "dim_v": 48,
        "scale": pytest.approx(0.3),
        "softcap": 5.0,
        "per_softcap": pytest.approx(math.log(2) / 5),
    }


def test_the_generic_kernel_gets_no_maps():
    problem = problem_of(kernel="bwd_v2")
    plan = make_backward_plan(problem, SM_90A)
    assert backward_maps(plan, problem) == {}
    assert backward_params(problem, make_grouping(plan, problem), {}).dtype == BACKWARD
