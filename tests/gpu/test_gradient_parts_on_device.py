"""Float32 gradients by products of float16, by the kernels of a device."""

import numpy
import pytest
from test_fp16_parts import of_a_call
from test_gradient_parts import BROADCAST, CASES, KERNEL, RESULTS, asked_of, judge, planned, rms, simple
from test_gradient_parts import drawn as numbers
from test_gradient_parts import operands as of_case
from test_gradient_parts_scores import SCORED, asked_for

from cupy_flash import KeyRanges, attention, plan_attention_backward
from cupy_flash.judge.compare_gradients import compare_gradients

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="bwd_hopper_parts is for sm_90"
)


def computed(plan, given):
    """The gradients, by a workspace full of NaN, in memory of NaN."""
    results = {f"d{name}": cupy.full(given[name].shape, numpy.nan, numpy.float32) for name in "qkv"}
    return plan(**given | results, workspace=cupy.full(plan.workspace_bytes, 0xFF, numpy.uint8))


def on_host(gradients):
    return gradients._replace(**{name: getattr(gradients, name).get() for name in RESULTS})


def drawn(heads, heads_kv, len_q, len_kv, dim, **asked):
    """What a backward takes, by a forward of the device."""
    q, k, v, dout = map(cupy.asarray, numbers(heads, heads_kv, len_q, len_kv, dim))
    out, lse = attention(q, k, v, **asked, return_lse=True)
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}


def same(found, expected):
    return all(bool((x.view(numpy.uint32) == y.view(numpy.uint32)).all()) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(case, deterministic):
    given = {name: x for name, x in of_case(case).items() if name not in RESULTS}
    placed = {name: cupy.asarray(x) for name, x in given.items()}
    contiguous = {f"d{name}": cupy.empty(given[name].shape, numpy.float32) for name in "qkv"}
    plan = planned(placed | contiguous, asked_of(case) | {"deterministic": deterministic}, {})
    found = on_host(computed(plan, placed))
    judge(case, given, found._replace(dsinks=found.dsinks.get()) if "sinks" in given else found)


@pytest.mark.parametrize("name", BROADCAST)
def test_gradients_of_what_is_broadcast_are_sums(name):
    rng = numpy.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape, numpy.float32) for shape in BROADCAST[name])
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dout = rng.standard_normal(out.shape, numpy.float32)
    given = {name: cupy.asarray(x) for name, x in zip(("dout", "q", "k", "v", "out", "lse"), (dout, q, k, v, out, lse))}
    found = on_host(computed(planned(given, {"causal": True}, {}), given))
    judged = compare_gradients(found, dout, q, k, v, scale=q.shape[-1] ** -0.5, last_key=k.shape[-2] - q.shape[-2])
    assert judged.ok, judged.message


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_those_of_bwd_v2(dim, causal):
    """Both with the results of one forward in float64, so that nothing else is off."""
    given, truth = simple(*numbers(2, 2, 3001, 3001, dim), causal=causal)
    given = {name: cupy.asarray(x) for name, x in given.items()}
    found = [plan_attention_backward(**given, causal=causal, kernel=kernel)(**given) for kernel in (KERNEL, "bwd_v2")]
    for own, other, exact in zip(*found, truth):
        own, other = (numpy.sqrt(numpy.mean((x.get() - exact) ** 2)) for x in (own, other))
        assert own < 2 * other


@pytest.mark.parametrize("dim", [64, 128])
def test_long_sums_of_one_sign_are_not_dragged_towards_zero(dim):
    """A tile takes 4 steps for the largest products, each of which cuts off less than 2^-23 of the sum so far."""
    q, k, v, dout = numbers(1, 1, 20000, 200, dim)
    given, truth = simple(q, k, abs(v) + 1, abs(dout) + 1)
    given = {name: cupy.asarray(x) for name, x in given.items()}
    found = plan_attention_backward(**given, kernel=KERNEL)(**given).dv.get()
    assert abs(numpy.mean(found / truth.dv - 1)) < 9 * 2**-23


REPEATED = {
    "causal, a group": ((4, 2, 1500, 1500, 64), {"causal": True}),
    "wide": ((2, 2, 900, 1700, 128), {}),
    "few keys": ((2, 2, 4096, 77, 64), {}),
    "later heads": ((400, 400, 300, 260, 64), {"window": (200, 9)}),
    "dims that TMA cannot move": ((3, 3, 500, 333, 36), {"softcap": 9.0}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_the_same_bits_in_every_run_in_order(name):
    shapes, asked = REPEATED[name]
    given = drawn(*shapes, **asked)
    plan = planned(given, asked | {"deterministic": True}, {})
    found = [computed(plan, given) for _ in range(20)]
    assert all(same(again, found[0]) for again in found[1:]) and not any(bool(cupy.isnan(x).any()) for x in found[0])


@pytest.mark.parametrize("name", REPEATED)
def test_any_order_is_as_near(name):
    """To those in order, which blocks add up as they do on any machine; a workspace holds anything, as what ran before left it."""
    shapes, asked = REPEATED[name]
    given = drawn(*shapes, **asked)
    expected = computed(planned(given, asked | {"deterministic": True}, {}), given)
    plan = planned(given, asked, {})
    for seed in range(5):
        workspace = cupy.random.default_rng(seed).integers(0, 256, plan.workspace_bytes).astype(numpy.uint8)
        for x, y in zip(plan(**given, workspace=workspace), expected):
            assert float(abs(x - y).max()) < 2**-18 * float(abs(y).max())


def test_the_same_bits_wherever_elements_lie():
    given = drawn(3, 3, 500, 333, 36, causal=True)
    contiguous = {f"d{name}": cupy.empty(given[name].shape, numpy.float32) for name in "qkv"}
    asked = {"causal": True, "deterministic": True}
    expected = computed(planned(given | contiguous, asked, {}), given)
    columns = {name: cupy.asfortranarray(x) for name, x in given.items()}
    backwards = {name: cupy.flip(cupy.flip(x).copy()) for name, x in given.items()}
    for seen in (columns, backwards):
        assert same(computed(planned(seen | contiguous, asked, {}), seen), expected)


def test_a_graph_computes_what_arrays_hold_then():
    """Of dout and v, each replay with other powers of two, whose results have the same bits but for these."""
    asked = {"causal": True}
    given = drawn(4, 2, 700, 700, 64, **asked)
    plan = planned(given, asked | {"deterministic": True}, {})
    expected = [x.copy() for x in plan(**given)]
    usual = {name: given[name].copy() for name in ("dout", "v", "out")}
    memory = {f"d{name}": cupy.empty_like(given[name]) for name in "qkv"}
    memory["workspace"] = cupy.empty(plan.workspace_bytes, cupy.uint8)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        plan(**given, **memory)
        graph = stream.end_capture()
        for of_dout, of_v in ((1, 1), (2.0**30, 2.0**-10), (2.0**-30, 2.0**20), (1, 1)):
            for name, factor in (("dout", of_dout), ("v", of_v), ("out", of_v)):
                given[name][...] = usual[name] * numpy.float32(factor)
            graph.launch()
            stream.synchronize()
            for name, x, factor in zip(RESULTS, expected, (of_dout * of_v, of_dout * of_v, of_dout)):
                assert (memory[name] == x * numpy.float32(factor)).all()


@pytest.mark.parametrize("dim", [64, 100])
@pytest.mark.parametrize("name", SCORED)
def test_scores_are_as_near_as_those_of_bwd_v2(name, dim):
    given, asked, truth = asked_for(name, dim)
    on_device = [cupy.asarray(x) for x in given]
    told = {name: {key: cupy.asarray(x) for key, x in told.items()} if name == "arrays" else told for name, told in asked.items()}
    told |= {name: cupy.asarray(x) for name, x in told.items() if isinstance(x, numpy.ndarray)}
    if isinstance(told.get("mask"), KeyRanges):
        told["mask"] = KeyRanges(cupy.asarray(told["mask"].start), cupy.asarray(told["mask"].stop))
    found = []
    for kernel in (KERNEL, "bwd_v2"):
        plan = plan_attention_backward(*on_device, **told, kernel=kernel)
        workspace = cupy.full(plan.workspace_bytes, 255, cupy.uint8)
        found.append([x.get() for x in plan(*on_device, **of_a_call(told), workspace=workspace)])
    for own, other, exact in zip(*found, truth):
        assert rms(own - exact) < 3 * rms(other - exact) + 2**-22 * rms(exact)


@pytest.mark.parametrize("dim", [64, 128])
def test_one_part_is_as_near_as_tf32(dim):
    given, truth = simple(*numbers(2, 1, 700, 900, dim), causal=True)
    on_device = {name: cupy.asarray(x) for name, x in given.items()}
    found = []
    for kernel in (KERNEL, "bwd_v2"):
        plan = plan_attention_backward(**on_device, causal=True, precision="tf32", kernel=kernel)
        assert (kernel == KERNEL) == plan.kernel.config.FP16_PARTS
        found.append([x.get() for x in plan(**on_device)])
    for own, other, exact in zip(*found, truth):
        assert rms(own - exact) < 2 * rms(other - exact)
