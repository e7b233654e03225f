"""Gradients of many short heads on a device, of which each block takes several, one key tile after the other."""

import math

import pytest

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.plan import whole_heads

cupy = pytest.importorskip("cupy")
OTHER = cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90"
pytestmark = pytest.mark.skipif(OTHER, reason="a kernel of sm_90")

MANY = {"heads_q": 6, "batch": (70,)}  # 420 heads, three for each block and four for some
CASES = (
    Case("bfloat16", 128, 128, **MANY),
    Case("float16", 90, 100, **MANY, dim=40, causal=True),
    Case("bfloat16", 250, 230, **MANY),
    Case("float16", 300, 200, **MANY, causal=True),  # rows that see nothing
    Case("bfloat16", 200, 300, **MANY, causal="top_left"),  # keys that nobody sees
    Case("float16", 380, 380, **MANY, window=(100, 40)),
    Case("bfloat16", 500, 510, **MANY, causal=True),
    Case("float16", 610, 610, **MANY, causal=True, prefix=100),
    Case("bfloat16", 120, 110, **MANY, dim=128),
    Case("float16", 250, 250, **MANY, dim=96, causal=True),
    Case("bfloat16", 250, 250, **MANY, heads_kv=2, causal=True),
    Case("float16", 200, 200, heads_q=8, heads_kv=1, batch=(140,)),
    Case("bfloat16", 250, 256, **MANY, bias="heads"),
    Case("float16", 120, 120, **MANY, bias="full", dim=128),
    Case("bfloat16", 120, 120, **MANY, bias="keys", causal=True),
    Case("float16", 250, 250, **MANY, alibi="heads", causal=True),
    Case("bfloat16", 250, 250, **MANY, dropout=0.2),
    Case("float16", 250, 250, **MANY, softcap=5.0),
    Case("bfloat16", 120, 120, **MANY, sinks=1),
    Case("float16", 120, 120, **MANY, scale=-0.2, layout="bshd"),
    Case("float16", 700, 77, heads_q=4, batch=(8,)),  # queries in parts
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, planned_anew, monkeypatch):
    """Right, and ten times the same bits, whatever was in the workspace."""
    monkeypatch.setattr(whole_heads, "WORTH", math.inf)  # also where a last round of heads leaves most blocks none
    inputs, (dout, _) = make_inputs(case, cupy), make_cotangents(case, cupy)
    options = {name: value for name, value in case.options.items() if name != "return_lse"}
    arrays = case.arrays(cupy)
    given = (dout, *inputs, *plan_attention(*inputs, **options, **arrays, return_lse=True)(*inputs, **arrays))
    plan = plan_attention_backward(*given, **options, **arrays)
    assert plan.kernel.config.WHOLE_HEADS and whole_heads.WHY in plan.kernel.reasons
    first = plan(*given, **arrays, workspace=cupy.full(plan.workspace_bytes, 0xFF, "uint8"))
    judged = compare_gradients(first, dout, *inputs, **case.meaning(cupy))
    assert judged.ok, judged.message
    for poison in range(10):
        again = plan(*given, **arrays, workspace=cupy.full(plan.workspace_bytes, 25 * poison, "uint8"))
        for one, other in zip(first, again):
            assert one is None or (one.view("u1") == other.view("u1")).all()
