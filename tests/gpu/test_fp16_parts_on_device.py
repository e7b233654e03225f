"""Float32 attention by products of float16, by the kernels of a device."""

from itertools import product

import numpy
import pytest
from test_fp16_parts import CASES, NARROW, SCORED, drawn, errors_of_scores, judged, planned, scored

from cupy_flash import attention, plan_attention

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="fwd_hopper is for sm_90"
)


def exact(q, k, v, asked):
    return attention(*(cupy.asnumpy(x).astype(numpy.float64) for x in (q, k, v)), **asked)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("name", CASES)
def test_right(name, precision):
    operands, asked = drawn(name)
    on_device = [cupy.asarray(x) for x in operands]
    given = {"sinks": cupy.asarray(asked["sinks"])} if "sinks" in asked else {}
    plan = planned(on_device, asked | given, precision, {})
    parts = plan.kernel.config.FP16_PARTS
    assert parts == (1 if precision == "tf32" else 2)
    comparison = judged(name, [x.get() for x in plan(*on_device, **given)], operands, asked, precision)
    assert comparison.ok, comparison.message


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_those_of_fwd_v2(dim, causal):
    """On a device the bound of a judge leaves room for sums that tensor cores cut off; these are as near as those of fwd_v2."""
    q, k, v = cupy.random.default_rng(1).standard_normal((3, 1, 2, 3001, dim), cupy.float32)
    truth = exact(q, k, v, {"causal": causal})
    found = [plan_attention(q, k, v, causal=causal, kernel=kernel)(q, k, v).get() for kernel in ("fwd_hopper", "fwd_v2")]
    own, other = (numpy.sqrt(numpy.mean((x - truth) ** 2)) for x in found)
    assert own < 1.5 * other


@pytest.mark.parametrize("dim", [64, 128])
def test_long_sums_of_one_sign_are_not_dragged_towards_zero(dim):
    """A key tile takes 8 steps at most, each of which cuts off less than 2^-23 of the sum so far, and as much of what is added."""
    q, k = cupy.random.default_rng(2).standard_normal((2, 1, 1, 30000, dim), cupy.float32)
    v = cupy.random.default_rng(3).random((1, 1, 30000, dim), cupy.float32) + 1
    found = plan_attention(q, k, v, kernel="fwd_hopper")(q, k, v)[:, :, :200].get()
    truth = exact(q[:, :, :200], k, v, {})
    assert abs(numpy.mean(found / truth - 1)) < 9 * 2**-23


def test_the_same_bits_in_every_run_and_wherever_elements_lie():
    operands, asked = drawn("dims that TMA cannot move")
    on_device = [cupy.asarray(x) for x in operands]
    out, lse = planned(on_device, asked, options={})(*on_device)
    for seen in (on_device, [cupy.asfortranarray(x) for x in on_device], [x[..., ::-1, :].copy()[..., ::-1, :] for x in on_device]):
        for _ in range(3):
            for found, expected in zip(planned(seen, asked, options={})(*seen), (out, lse)):
                assert (found == expected).all()


def test_a_graph_computes_what_arrays_hold_then():
    operands, asked = drawn("dim 64, causal")
    on_device = [cupy.asarray(x) for x in operands]
    plan = planned(on_device, asked, options={})
    out, lse = plan(*on_device)
    given = {"out": cupy.empty_like(out), "lse": cupy.empty_like(lse), "workspace": cupy.empty(plan.workspace_bytes, cupy.uint8)}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        plan(*on_device, **given)
        graph = stream.end_capture()
        for factor in (1, 2.0**30, 2.0**-30):
            on_device[2][...] = cupy.asarray(operands[2] * numpy.float32(factor))
            graph.launch()
            stream.synchronize()
            assert (given["out"] == out * numpy.float32(factor)).all() and (given["lse"] == lse).all()


def test_batches_without_their_axes_merged():
    rng = cupy.random.default_rng(5)
    q = rng.standard_normal((3, 2, 4, 150, 64), cupy.float32)
    k, v = rng.standard_normal((2, 1, 2, 4, 130, 64), cupy.float32)
    found = plan_attention(q, k, v, kernel="fwd_hopper")(q, k, v).get()
    assert numpy.abs(found - exact(q, k, v, {})).max() < 2**-18


@pytest.mark.parametrize("precision, allowed", [("ieee", 2**-24), ("tf32", 2**-13)])
@pytest.mark.parametrize("name, dim", [*product(SCORED, (64, 100)), *((name, 40) for name in NARROW)])
def test_scores_are_as_near_as_those_of_fwd_v2(name, dim, precision, allowed):
    own, other, size = errors_of_scores(*scored(name, dim), precision, {}, cupy.asarray, cupy.asnumpy)
    assert own < 3 * other + allowed * size
