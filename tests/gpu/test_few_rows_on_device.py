"""Few rows and short sequences on a device, by what the planner takes for them, and of forwards by the other kernel as well."""

import pytest

from cupy_flash import attention, plan_attention, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents

cupy = pytest.importorskip("cupy")

FORWARDS = (
    Case("float16", 49, 49, dim=32, heads_q=6, batch=(50,)),
    Case("bfloat16", 64, 64, heads_q=8, batch=(40,), causal=True),
    Case("bfloat16", 33, 57, dim=96, heads_q=3, batch=(100,), softcap=5.0),
    Case("float16", 16, 16, dim=40, heads_q=8, batch=(500,), sinks=1),
    Case("float16", 11, 60, heads_q=8, heads_kv=2, batch=(30,), causal=True),
    Case("bfloat16", 60, 201, dim=16, heads_q=4, batch=(20,), window=(30, 0)),
    Case("float16", 97, 121, dim=32, heads_q=4, batch=(20,), causal=True),
    Case("bfloat16", 60, 500, heads_q=4, batch=(40,), softcap=5.0, causal=True),
    Case("float16", 37, 61, dim=128, heads_q=4, batch=(20,), softcap=5.0),
    Case("float16", 1, 8200, dim=128, heads_q=32, heads_kv=8),
    Case("bfloat16", 1, 70001, heads_q=16, heads_kv=1),
    Case("bfloat16", 4, 9000, dim=128, heads_q=16, heads_kv=4, causal=True),
    Case("float16", 1, 5003, dim=256, heads_q=8, batch=(9,)),
    Case("float16", 7, 701, dim=24, heads_q=4, batch=(3,), causal=True),
    Case("bfloat16", 1, 4099, dim=128, heads_q=3, batch=(2,), alibi="heads"),
    Case("float16", 9, 1500, heads_q=3, batch=(2,), softcap=5.0, causal=True),
    Case("float16", 1, 700, dim=128, heads_q=32, heads_kv=8),
    Case("bfloat16", 3, 300, heads_q=8, batch=(70,), causal=True),
    Case("float16", 4, 900, dim=192, heads_q=8, causal=True),
    Case("bfloat16", 1, 2000, dim=256, heads_q=4, batch=(3,)),
    Case("float16", 14, 500, dim=104, heads_q=8, batch=(4,), softcap=5.0),
)
BACKWARDS = (
    Case("float16", 49, 49, dim=32, heads_q=6, batch=(50,)),
    Case("bfloat16", 64, 64, heads_q=8, batch=(40,), causal=True),
    Case("bfloat16", 20, 200, dim=48, heads_q=8, heads_kv=2, batch=(40,), sinks=1),
    Case("float16", 33, 57, heads_q=8, batch=(40,), softcap=5.0),
    Case("float16", 97, 121, dim=16, heads_q=8, batch=(70,), window=(30, 0)),
    Case("bfloat16", 37, 3001, dim=64, heads_q=8, batch=(3,), causal=True),
    Case("float16", 180, 150, dim=32, heads_q=16, batch=(20,)),
    Case("bfloat16", 49, 49, dim=32, heads_q=8, batch=(40,), alibi="heads"),
)


@pytest.mark.parametrize("other", [False, True], ids=["", "by the other kernel"])
@pytest.mark.parametrize("case", FORWARDS, ids=str)
def test_forward(case, other):
    inputs, arrays = make_inputs(case, cupy), case.arrays(cupy)

    def planned(**options):
        return plan_attention(*inputs, **case.options, **arrays, **options)

    plan = planned()
    assert plan.kernel.file == "fwd_v2"
    if other and plan.kernel.architecture.name == "90a":
        plan = planned(kernel="fwd_hopper")
    out, lse = plan(*inputs, **arrays)
    judged = compare(out, lse, *inputs, precision=case.precision, **case.scores, **arrays)
    assert judged.ok, judged.message


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("case", BACKWARDS, ids=str)
def test_backward(case, deterministic):
    inputs, arrays, (dout, dlse) = make_inputs(case, cupy), case.arrays(cupy), make_cotangents(case, cupy)
    options = {name: value for name, value in (case.options | arrays).items() if name != "return_lse"}
    state = attention(*inputs, **options, return_lse=True)
    plan = plan_attention_backward(dout, *inputs, *state, dlse=dlse, deterministic=deterministic, **options)
    assert plan.kernel.file == "bwd_v2"
    gradients = plan(dout, *inputs, *state, dlse=dlse, **arrays)
    judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, precision=case.precision, **case.scores, **arrays)
    assert judged.ok, judged.message
