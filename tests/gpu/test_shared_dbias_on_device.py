"""The gradient of a bias that batch elements share, which blocks of a cluster sum up, on a device."""

import pytest

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents

cupy = pytest.importorskip("cupy")
OTHER = cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90"
pytestmark = pytest.mark.skipif(OTHER, reason="a kernel of sm_90")

CASES = (
    Case("bfloat16", 150, 200, heads_q=4, batch=(2,), bias="heads"),
    Case("float16", 150, 200, heads_q=4, batch=(4,), bias="heads", dim=40, causal=True),
    Case("bfloat16", 300, 136, heads_q=2, batch=(8,), bias="heads", dim=128),
    Case("float16", 700, 520, heads_q=6, heads_kv=2, batch=(2,), bias="heads", dim=96, window=(100, 40)),
    Case("bfloat16", 1030, 1032, heads_q=3, batch=(4,), bias="heads", causal=True),
    Case("float16", 1, 8, heads_q=4, batch=(8,), bias="heads"),
    Case("bfloat16", 1200, 1000, heads_q=5, batch=(8,), bias="heads", dim=32),
    Case("float16", 520, 640, heads_q=20, batch=(2, 2), bias="heads", dim=128, causal=True),
    Case("bfloat16", 300, 400, heads_q=4, batch=(2,), bias="heads", sinks=1),
    Case("float16", 300, 400, heads_q=4, batch=(4,), bias="heads", dropout=0.2),
    Case("bfloat16", 2050, 2048, heads_q=9, batch=(2,), bias="heads", scale=-0.1, layout="bshd"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case):
    """Right, ten times and from a graph with the same bits of that of the bias, whatever was in the workspace."""
    inputs, (dout, dlse) = make_inputs(case, cupy), make_cotangents(case, cupy)
    options = {name: value for name, value in case.options.items() if name != "return_lse"}
    arrays = case.arrays(cupy)
    given = (dout, *inputs, *plan_attention(*inputs, **options, **arrays, return_lse=True)(*inputs, **arrays))
    plan = plan_attention_backward(*given, dlse=dlse, **options, **arrays, wrt="bias")
    elements = given[0].shape[0] if len(case.batch) == 1 else 4
    assert f"cluster{elements}" in plan.kernel.name and plan.kernels == (plan.kernel,)
    first = plan(*given, dlse=dlse, **arrays, workspace=cupy.full(plan.workspace_bytes, 0xFF, "uint8"))
    judged = compare_gradients(first, dout, *inputs, dlse=dlse, wrt={"bias": arrays["bias"]}, **case.meaning(cupy))
    assert judged.ok, judged.message
    for poison in range(10):
        again = plan(*given, dlse=dlse, **arrays, workspace=cupy.full(plan.workspace_bytes, 25 * poison, "uint8"))
        assert (first.dbias.view("u1") == again.dbias.view("u1")).all()
    stream = cupy.cuda.Stream(non_blocking=True)
    memory = cupy.empty(plan.workspace_bytes, "uint8")
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        captured = plan(*given, dlse=dlse, **arrays, workspace=memory)
        graph = stream.end_capture()
    for _ in range(2):
        captured.dbias.fill(0)
        memory.fill(0xFF)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert (first.dbias.view("u1") == captured.dbias.view("u1")).all()
