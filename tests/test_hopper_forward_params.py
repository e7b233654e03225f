"""The numbers and tensor maps that a forward for sm_90a is told."""

import math
from dataclasses import replace

import pytest

from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.forward import make_forward_plan
from cupy_flash.plan.forward_maps import forward_maps
from cupy_flash.plan.params import fast_divmod, hopper_forward_params
from cupy_flash.plan.schedule import TABLE_BLOCKS, TABLE_TILES
from cupy_flash.plan.softcap import cap_polynomial
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.options import Options

SM_90A = ARCHITECTURES["90a"]


def problem_of(shape):
    layout = dense_layout(shape, reversed(range(len(shape))), "float16", None)
    return make_problem(layout, layout, layout, Options(backend="host"))


def test_a_problem_becomes_numbers():
    """Each number differs from the others, so that none can take another's place."""
    q, out = (dense_layout((2, 6, 10, dim), (3, 1, 2, 0), "float16", None) for dim in (64, 48))
    k, v = (dense_layout((2, 3, 20, dim), (3, 2, 1, 0), "float16", None) for dim in (64, 48))
    asked = Options(scale=0.3, softcap=5.0, window=(4, 2), return_lse=True, backend="host", kernel="fwd_hopper")
    problem = make_problem(q, k, v, asked, out)
    plan = make_forward_plan(problem, SM_90A)
    plan = replace(plan, config=replace(plan.config, TMA_STORE_OUT=True))
    params = hopper_forward_params(problem, forward_maps(plan, problem), 3, 5)[0]
    in_maps = ("q_map", "k_map", "v_map", "out_map")
    assert {name: params[name]["size"].tolist() for name in in_maps} == {
        "q_map": [64, 10, 6, 2, 1],
        "k_map": [64, 20, 3, 2, 1],
        "v_map": [48, 20, 3, 2, 1],
        "out_map": [48, 10, 6, 2, 1],
    }
    assert {name: params[name]["stride"].tolist()[:3] for name in in_maps} == {  # bytes between rows, heads, batch elements
        "q_map": [768, 128, 7680],
        "k_map": [128, 2560, 7680],
        "v_map": [96, 1920, 5760],
        "out_map": [576, 96, 5760],
    }
    assert [params[name]["box_rows"] for name in in_maps] == [64, plan.config.TILE_KV, plan.config.TILE_KV, 16]
    assert {int(params[name]["box_cols"]) for name in in_maps} == {64}
    assert {int(params[name]["data"]) for name in (*in_maps, "lse", "out", "sinks")} == {0}
    out, lse = params["out"], params["lse"]
    assert [out["batch_stride"].tolist(), out["head_stride"], out["row_stride"], out["col_stride"]] == [[0, 0, 0, 2880], 48, 288, 1]
    assert [lse["batch_stride"].tolist(), lse["head_stride"], lse["row_stride"], lse["col_stride"]] == [[0, 0, 0, 60], 10, 1, 0]
    minus_square, factors = cap_polynomial(0.3, 5.0)
    assert [params["cap"]["minus_square"], *params["cap"]["factors"]] == pytest.approx([minus_square, *factors])
    arrays = (*in_maps, "bias_map", "lse", "out", "sinks", "scores", "cap")  # of a bias there is none
    assert {name: params[name].tolist() for name in params.dtype.names if name not in arrays} == {
        "mask": (6, 12, fast_divmod(1), 0),
        "batch": [1, 1, 1, 2],
        "heads": 6,
        "heads_per_kv": 2,
        "tiles": 2 * 6 * 4,
        "run": 0,  # which tiles a block takes is told later, with the number of blocks
        "by_formula": 0,
        "table": [[0] * TABLE_TILES] * TABLE_BLOCKS,
        "tiles_of_head_divmod": fast_divmod(4),
        "heads_divmod": fast_divmod(6),
        "heads_together_divmod": fast_divmod(6),
        "work": 0,
        "len_q": 10,
        "len_kv": 20,
        "dim": 64,
        "dim_v": 48,
        "scale": pytest.approx(0.3),
        "scale_log2": pytest.approx(0.3 / math.log(2)),
        "softcap": 5.0,
        "first_split_tile": 0,  # nor which are shared
        "split_tiles": 0,
        "key_tiles_per_block": 0,
        "key_tiles_divmod": (0, 0, 0),
        "partial_rows": 0,
        "out_partials": 0,
        "lse_partials": 0,
        "sinks_of_head": 0,
        "in_turn_divmod": (1, 0, 0),
    }


def test_an_lse_left_out_is_null():
    problem = problem_of((2, 3, 70, 64))
    params = hopper_forward_params(problem, forward_maps(make_forward_plan(problem, SM_90A), problem), 64, 128)
    assert params["lse"].tobytes() == bytes(params["lse"].nbytes)


def test_boxes_follow_the_tile():
    problem = problem_of((2, 3, 200, 64))
    plan = make_forward_plan(problem, SM_90A)
    narrow = replace(plan, config=replace(plan.config, TILE_KV=16))
    assert [m.box_rows for m in forward_maps(narrow, problem).values()] == [64, 16, 16, 16]
    assert forward_maps(make_forward_plan(problem, ARCHITECTURES["80"]), problem) == {}
