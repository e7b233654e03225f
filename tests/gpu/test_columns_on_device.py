"""Head dims and lengths between those of the tables on a device, narrow windows, queries in parts: right, and again and again."""

import numpy
import pytest

from cupy_flash import attention, attention_backward, plan_attention, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.plan.query_parts import in_parts

cupy = pytest.importorskip("cupy")

CASES = (
    Case("bfloat16", 700, 1700, dim=24, heads_q=4, causal=True),
    Case("float16", 300, 300, dim=40, heads_q=4, heads_kv=2),
    Case("bfloat16", 577, 577, dim=64, heads_q=4, causal=True),
    Case("float16", 729, 729, dim=72, heads_q=4),
    Case("bfloat16", 1500, 1500, dim=72, heads_q=4, causal=True),
    Case("float16", 2100, 2100, dim=80, heads_q=2, causal=True),
    Case("bfloat16", 729, 1000, dim=88, heads_q=4, sinks=1),
    Case("float16", 1100, 1100, dim=96, heads_q=4, causal=True),
    Case("bfloat16", 700, 1700, dim=104, heads_q=4, causal=True),
    Case("float16", 1200, 1200, dim=112, heads_q=2, causal=True),
    Case("bfloat16", 300, 300, dim=128, heads_q=4),
    Case("float16", 700, 1700, dim=144, heads_q=4, causal=True),
    Case("bfloat16", 700, 700, dim=200, heads_q=2, window=(300, 0)),
    Case("float16", 4096, 77, dim=64, heads_q=4),  # in parts
    Case("bfloat16", 1536, 200, dim=72, heads_q=4, heads_kv=2, batch=(2,)),
    Case("float16", 4096, 77, dim=160, heads_q=2),
    Case("bfloat16", 900, 900, dim=64, heads_q=4, window=(63, 0)),  # narrow windows
    Case("float16", 900, 900, dim=128, heads_q=4, heads_kv=2, window=(100, 20)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(case):
    inputs, arrays, (dout, dlse) = make_inputs(case, cupy), case.arrays(cupy), make_cotangents(case, cupy)
    options = {name: value for name, value in (case.options | arrays).items() if name != "return_lse"}
    out, lse = attention(*inputs, **options, return_lse=True)
    judged = compare(out, lse, *inputs, precision=case.precision, **case.scores, **arrays)
    assert judged.ok, judged.message
    gradients = attention_backward(dout, *inputs, out, lse, dlse=dlse, **options)
    judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, precision=case.precision, **case.scores, **arrays)
    assert judged.ok, judged.message


@pytest.mark.parametrize("dim, columns", [(32, 32), (72, 80), (96, 96), (160, 160), (224, 224)])
def test_other_memory_than_the_head_dim_fills_takes_no_part(dim, columns):
    """Rows with poison behind them; the same bits in 20 runs."""
    rng = numpy.random.default_rng(dim)
    room = [cupy.full((2, 4, 1100, dim + 16), numpy.nan, "f2") for _ in range(4)]
    for x in room:
        x[..., :dim] = cupy.asarray(rng.standard_normal((2, 4, 1100, dim)).astype("f2"))
    q, k, v, dout = (x[..., :dim] for x in room)
    plan = plan_attention(q, k, v, causal=True, return_lse=True)
    out, lse = plan(q, k, v)
    back = plan_attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
    assert {x.kernel.config.DIM for x in (plan, back)} == {columns}
    first = [x.view(numpy.uint16) for x in (out, *back(dout, q, k, v, out, lse))]
    dense = [cupy.ascontiguousarray(x) for x in (q, k, v)]
    assert (attention(*dense, causal=True).view(numpy.uint16) == first[0]).all()
    for _ in range(20):
        again = (plan(q, k, v)[0], *back(dout, q, k, v, out, lse))
        assert all((x.view(numpy.uint16) == y).all() for x, y in zip(again, first, strict=True))


def test_parts_in_a_graph():
    """With memory of the caller, captured once; the same bits of dk and dv in each run."""
    rng = numpy.random.default_rng(1)
    q, dout = (cupy.asarray(rng.standard_normal((1, 4, 4096, 64)).astype("f2")) for _ in range(2))
    k, v = (cupy.asarray(rng.standard_normal((1, 4, 77, 64)).astype("f2")) for _ in range(2))
    out, lse = attention(q, k, v, return_lse=True)
    plan = plan_attention_backward(dout, q, k, v, out, lse)
    assert in_parts(plan.problem).parts == 8 and plan.kernel.file == "bwd_hopper"
    results = {name: cupy.full(x.shape, numpy.nan, "f2") for name, x in (("dq", q), ("dk", k), ("dv", v))}
    workspace = cupy.full(plan.workspace_bytes, 255, numpy.uint8)
    expected = plan(dout, q, k, v, out, lse)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        plan(dout, q, k, v, out, lse, **results, workspace=workspace)
        graph = stream.end_capture()
        for _ in range(20):
            graph.launch(stream)
    stream.synchronize()
    for name in ("dk", "dv"):
        assert (results[name].view(numpy.uint16) == getattr(expected, name).view(numpy.uint16)).all()
    assert cupy.allclose(results["dq"], expected.dq, atol=1e-3)
