"""What a kernel is told at launch: the NumPy dtypes are the C structs, and batch axes merge without losing an element."""

import dataclasses
import re
import subprocess

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash import UnsupportedError
from cupy_flash.machine import source, toolchain
from cupy_flash.plan.params import fast_divmod, forward_params, names_of_scores, places_of
from cupy_flash.plan.softcap import cap_polynomial
from cupy_flash.plan.sources import shelf
from cupy_flash.plan.split import KeySplits
from cupy_flash.plan.structs import FILES, struct
from cupy_flash.plan.tensor_map import TENSOR_MAP
from cupy_flash.problem import arrays
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.layout import BATCH_AXES, dense_layout, merge_batch_axes
from cupy_flash.problem.mask import UNBOUNDED
from cupy_flash.problem.options import Options

FORWARD = struct("ForwardParams")

# The structs

PROGRAM = """
#include "row_params.cuh"
#include <cstddef>
#include <cstdio>
#include <type_traits>
template <typename T> char kind() {
  typedef std::remove_all_extents_t<T> Scalar;
  if (std::is_class_v<Scalar>) return 'V';
  if (std::is_floating_point_v<Scalar>) return 'f';
  return std::is_pointer_v<Scalar> || std::is_unsigned_v<Scalar> ? 'u' : 'i';
}
#define SHOW(S, F) std::printf(#S "." #F " %zu %zu %c\\n", offsetof(S, F), sizeof(S::F), kind<decltype(S::F)>());
#define WHOLE(S) std::printf(#S " %zu %zu\\n", sizeof(S), alignof(S));
"""


def test_dtypes_are_the_structs_of_the_kernels(tmp_path):
    """Name, offset, size and kind of each field; of a tensor map, whose content is the driver's, the size alone."""
    calls, expected = ["WHOLE(TensorMap)"], [f"TensorMap {TENSOR_MAP.itemsize} 64"]
    alignments = {"FastDivmod": 4, "WorkItem": 4, "ListedItem": 4, "CapPolynomial": 4, "OperandHeads": 4}
    scores = "DropoutParams", "CapturedArray", "TileLists", "ScoreParams", "SequenceParams", "ClassifyParams"
    alignments |= dict.fromkeys((*scores, "Tensor", "MaskParams", "ForwardParams", "BackwardParams", "MergeParams"), 8)
    alignments |= dict.fromkeys(("Indices", "RotationParams", "RotateParams", "AppendParams", "Fp16PartsParams"), 8)
    alignments |= dict.fromkeys(("HopperForwardCommon", "HopperVarlenParams"), 64) | {"PlacedWorkItem": 16, "KeyPlace": 16}
    alignments |= {"ScoreGradientParams": 8, "HopperScoreGradientParams": 64, "HopperForwardParams": 64}
    alignments |= {"BackwardMaps": 64, "HopperBackwardParams": 64}
    written = re.findall(r"^struct (?:alignas\(\d+\) )?(\w+)", "".join(source.files()[name] for name in FILES), re.MULTILINE)
    assert set(written) == {*alignments, "TensorMap"}
    for name, alignment in alignments.items():
        for field, (dtype, offset) in struct(name).fields.items():
            calls.append(f"SHOW({name}, {field})")
            expected.append(f"{name}.{field} {offset} {dtype.itemsize} {dtype.base.kind}")
        calls.append(f"WHOLE({name})")
        expected.append(f"{name} {struct(name).itemsize} {alignment}")
    (tmp_path / "structs.cpp").write_text(f"{PROGRAM}int main() {{ {' '.join(calls)} }}\n")
    command = [*toolchain.compiler(), "-std=c++17", "-pthread", "-w", f"-I{shelf()}", "structs.cpp", "-o", "structs"]
    subprocess.run(command, check=True, cwd=tmp_path)
    found = subprocess.run([tmp_path / "structs"], check=True, capture_output=True, text=True).stdout
    assert found.splitlines() == expected


def test_an_address_has_a_place_in_each_form_that_an_array_is_told_in():
    """Counted in words, as fields; a workspace part is a pointer, and lse has no map."""
    params = numpy.zeros(1, struct("HopperBackwardParams"))
    words = params.view(numpy.uint64)
    for name, fields in {"q": ["q", "q_map"], "lse": ["lse"], "dq_accum": ["dq_accum"], "dv": ["dv", "dv_map"]}.items():
        places = places_of(params, name)
        assert sorted(places) == fields
        for field, place in places.items():
            words[place] = 5
            found = params[0][field] if field == "dq_accum" else params[0][field]["data"]
            assert found == 5
            words[place] = 0
    assert places_of(numpy.zeros(1, FORWARD), "q") == {"q": 0}


def test_number_of_batch_axes_is_that_of_the_kernels():
    assert f"constexpr int BATCH_AXES = {BATCH_AXES};" in source.files()["params.cuh"]


# Their contents


def problem_of(*shape, **options):
    layout = dense_layout(shape, reversed(range(len(shape))), "float16", None)
    return make_problem(layout, layout, layout, Options(backend="host", **options))


def test_a_problem_becomes_numbers():
    """Each number differs from the others, so that none can take another's place."""
    q, out = (dense_layout((2, 6, 10, dim), (3, 1, 2, 0), "float16", None) for dim in (64, 48))
    k, v = (dense_layout((2, 3, 20, dim), (3, 2, 1, 0), "float16", None) for dim in (64, 48))
    asked = Options(scale=0.3, softcap=5.0, window=(4, 2), return_lse=True, backend="host")
    sinks = dense_layout((5, 6), (1, 0), "float32", None)
    params = forward_params(make_problem(q, k, v, asked, out, sinks=sinks), KeySplits(7, 11, 15, 13, 17))[0]
    arrays = ("q", "k", "v", "out", "lse", "sinks")
    strides = {name: tuple(params[name][f"{axis}_stride"] for axis in ("head", "row", "col")) for name in arrays}
    of_inputs = {"q": (64, 384, 1), "k": (1280, 64, 1), "v": (960, 48, 1), "sinks": (1, 6, 0)}
    assert strides == of_inputs | {"out": (48, 288, 1), "lse": (10, 1, 0)}
    assert [params[name]["batch_stride"][-1] for name in strides] == [3840, 3840, 2880, 2880, 60, 0]
    minus_square, factors = cap_polynomial(0.3, 5.0)
    assert [params["cap"]["minus_square"], *params["cap"]["factors"]] == pytest.approx([minus_square, *factors])
    assert {name: params[name].tolist() for name in FORWARD.names if name not in (*strides, "scores", "sequences", "cap")} == {
        "state": 0,
        "mask": (6, 12, fast_divmod(1), 0),
        "batch": [1, 1, 1, 2],
        "heads": 6,
        "heads_per_kv": 2,
        "len_q": 10,
        "len_kv": 20,
        "dim": 64,
        "dim_v": 48,
        "scale": pytest.approx(0.3),
        "softcap": 5.0,
        "sinks_of_head": 5,
        "out_partials": 0,
        "lse_partials": 0,
        "arrivals": 0,
        "work": 0,
        "split_keys_divmod": fast_divmod(7),
        "tiles_divmod": fast_divmod(15),
        "heads_divmod": fast_divmod(6),
        "splits_divmod": fast_divmod(11),
        "split_tiles": 13,
        "partial_rows": 17,
    }


def test_what_scores_read_becomes_numbers():
    """Arrays that broadcast have strides of 0, and batch axes that one of them steps through otherwise stay apart."""
    q, k = (dense_layout((2, 3, 6, rows, 64), (4, 3, 2, 1, 0), "float16", None) for rows in (10, 20))
    bias = dense_layout((2, 1, 6, 10, 20), (4, 3, 2, 1, 0), "float32", None)
    seen = dense_layout((10, 1), (1, 0), "bool", None)
    table, gain = dense_layout((7, 5), (0, 1), "float32", None), dense_layout((), (), "float64", None)
    operands = {"bias": bias, "mask": seen, "seed": dense_layout((2,), (0,), "uint64", None)}
    asked = Options(score="score * gain + table[h, q_idx - kv_idx]", dropout=0.25, backend="host")
    with pytest.raises(ValueError, match=r"^arrays\['table'\]: expected 6 elements along axis 0"):
        make_problem(q, k, k, asked, operands=operands, arrays={"gain": gain, "table": table})
    asked = dataclasses.replace(asked, score="score * gain + table[h + 0, q_idx - kv_idx]")
    problem = make_problem(q, k, k, asked, operands=operands, arrays={"gain": gain, "table": table})
    params = forward_params(problem)[0]
    assert params["batch"].tolist() == [1, 1, 2, 3]
    tensors = {name: params["scores"][name] for name in ("bias", "pair_mask", "alibi_slopes")}
    strides = {name: [*x["batch_stride"], x["head_stride"], x["row_stride"], x["col_stride"]] for name, x in tensors.items()}
    assert strides == {"bias": [0, 0, 1200, 0, 200, 20, 1], "pair_mask": [0] * 5 + [1, 0], "alibi_slopes": [0] * 7}
    captured = params["scores"]["captured"]
    assert captured["stride"].tolist() == [[0] * 4, [1, 7, 0, 0], *[[0] * 4] * 4]
    assert captured["extent"].tolist() == [[0] * 4, [7, 5, 0, 0], *[[0] * 4] * 4]
    dropout = params["scores"]["dropout"]
    assert dropout["threshold"] == 2**13 and dropout["scale"] == numpy.float32(4 / 3)
    names = names_of_scores(problem.scores)
    called = ("bias", "pair_mask", "seed_low", "offset", "captured 0", "captured 1")
    assert names == tuple(f"scores.{name}" for name in called)
    params = forward_params(problem)
    words = params.view(numpy.uint64)
    for number, name in enumerate(names, 1000):
        [place] = places_of(params, name).values()
        words[place] = number
    told = params[0]["scores"]
    assert (told["bias"]["data"], told["pair_mask"]["data"]) == (1000, 1001)
    assert (told["dropout"]["seed_low"], told["dropout"]["seed_high"], told["dropout"]["offset"]) == (1002, 0, 1003)
    assert told["captured"]["data"].tolist()[:3] == [1004, 1005, 0] and told["seed"] == 0


def test_no_mask_is_a_band_wider_than_any_length():
    params = forward_params(problem_of(3, 5, 8))[0]
    assert (params["mask"]["left"], params["mask"]["right"]) == (-UNBOUNDED, UNBOUNDED)
    assert 2 * UNBOUNDED < 2**31 + 1  # a row plus a bound stays below 2^31


@pytest.mark.parametrize("name", ["q", "k"])
def test_length_beyond_32_bits_is_refused(name):
    problem = dataclasses.replace(problem_of(3, 5, 8), **{{"q": "len_q", "k": "len_kv"}[name]: UNBOUNDED})
    with pytest.raises(UnsupportedError, match=rf"{name}: expected fewer than 2\*\*30 rows, got {UNBOUNDED}"):
        forward_params(problem)


# Batch axes


@st.composite
def views(draw):
    """Several views of one shape into memory of their own: axes in any order, sliced, reversed, broadcast."""
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=6)))

    def view():
        order = draw(st.permutations(range(len(shape))))
        room = [draw(st.sampled_from((size, size, size + 1))) for size in shape]
        stored = [room[axis] for axis in order]
        whole = numpy.arange(numpy.prod(stored, dtype=int)).reshape(stored).transpose(numpy.argsort(order))
        x = whole[(..., *map(slice, shape))]
        for axis in range(len(shape)):
            change = draw(st.sampled_from(("none", "none", "none", "reverse", "broadcast")))
            if change == "reverse":
                x = numpy.flip(x, axis)
            elif change == "broadcast":
                x = numpy.broadcast_to(x.take([0], axis), shape)
        return x

    return [view() for _ in range(draw(st.integers(1, 3)))]


@given(views())
def test_merged_axes_reach_the_same_elements_in_the_same_order(views):
    shape = views[0].shape
    layouts = {str(i): arrays.layout(x) for i, x in enumerate(views)}
    try:
        sizes, strides = merge_batch_axes(shape, layouts)
    except UnsupportedError:
        assert sum(size > 1 for size in shape) > BATCH_AXES
        return
    assert len(sizes) == BATCH_AXES
    for x, steps in zip(views, strides.values()):
        merged = numpy.lib.stride_tricks.as_strided(x, sizes, [step * x.itemsize for step in steps])
        numpy.testing.assert_array_equal(merged.ravel(), x.ravel())


@given(st.lists(st.integers(1, 3), max_size=7))
def test_contiguous_axes_merge_to_one(shape):
    layout = dense_layout(tuple(shape), reversed(range(len(shape))), "float32", None)
    sizes, strides = merge_batch_axes(tuple(shape), {"q": layout})
    assert sizes == (1, 1, 1, numpy.prod(shape, dtype=int))
    assert strides["q"][-1] in (0, 1)


def test_five_axes_that_do_not_merge_are_refused():
    layout = dense_layout((2,) * 5, range(5), "float16", None)  # the first axis is the fastest
    with pytest.raises(UnsupportedError, match=r"q: expected batch axes that merge to at most 4, got \(2, 2, 2, 2, 2\).* leave 5"):
        merge_batch_axes((2,) * 5, {"q": layout})


def test_an_axis_merges_only_where_every_array_allows_it():
    dense, swapped = (dense_layout((2, 3), order, "float16", None) for order in ((1, 0), (0, 1)))
    assert merge_batch_axes((2, 3), {"q": dense, "k": swapped}) == ((1, 1, 2, 3), {"q": (0, 0, 3, 1), "k": (0, 0, 1, 2)})
