"""Problems of few query tiles on a device, by the tiles planned for them; and gradients of few, grouped heads and long windows."""

import pytest

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.plan.grouping import heads_per_block, make_grouping

cupy = pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.few_tiles,
    pytest.mark.skipif(cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="tiles of sm_90"),
]

FORWARDS = (
    Case("bfloat16", 5001, 5001, causal=True),
    Case("float16", 2049, 2049, heads_q=8, heads_kv=2, causal=True),
    Case("bfloat16", 1777, 1777, heads_q=5, batch=(3,), causal=True),
    Case("float16", 1000, 1000, heads_q=18),
    Case("float16", 300, 400, dim=40, heads_q=4, window=(90, 5)),
    Case("bfloat16", 3000, 3000, dim=128, causal=True),
    Case("float16", 4090, 4099, dim=128, heads_q=4),
    Case("bfloat16", 700, 800, dim=96, heads_q=6, sinks=1, causal=True),
    Case("float16", 1500, 1500, dim=192, dim_v=128, heads_q=5, causal=True),
    Case("bfloat16", 2500, 2600, dim=256, heads_q=2, causal=True),
    Case("float16", 2000, 2000, heads_q=4, causal=True, softcap=5.0),
    Case("bfloat16", 2000, 2000, dim=128, heads_q=4, causal=True, alibi="heads"),
    Case("float16", 1500, 1500, dim=256, heads_q=2, causal=True, alibi="heads"),
    Case("bfloat16", 1500, 1504, heads_q=4, causal=True, bias="heads"),
    Case("float16", 1500, 1504, dim=128, heads_q=4, causal=True, bias="full"),
    Case("bfloat16", 1500, 1500, heads_q=4, causal=True, dropout=0.2),
    Case("float16", 1500, 1500, dim=128, heads_q=4, causal=True, dropout=0.2, alibi="heads"),
    Case("bfloat16", 1500, 1500, dim=128, heads_q=4, causal=True, score="soft_clip"),
    Case("float16", 1500, 1500, heads_q=4, causal=True, score="relative"),
    Case("bfloat16", 2000, 2000, heads_q=4, mask="documents"),
    Case("float32", 2000, 2000, heads_q=4, causal=True),
    Case("float32", 1500, 1500, dim=128, heads_q=4, causal=True, precision="tf32"),
    Case("float32", 1500, 1500, heads_q=4, causal=True, bias="heads"),
    Case("float32", 1500, 1500, dim=40, heads_q=4, causal=True, alibi="heads", dropout=0.2),
)
FITTING = (
    Case("bfloat16", 185, 192, heads_q=8, batch=(40,), bias="heads"),
    Case("float16", 150, 152, dim=32, heads_q=8, batch=(40,), bias="heads", mask="documents"),
    Case("bfloat16", 100, 100, heads_q=8, batch=(40,), alibi="heads", causal=True),
    Case("float16", 380, 380, heads_q=8, batch=(20,), alibi="heads"),
    Case("bfloat16", 190, 190, dim=128, heads_q=8, batch=(40,), alibi="heads", causal=True),
    Case("float16", 250, 256, dim=128, heads_q=8, batch=(40,), bias="heads", causal=True),
    Case("bfloat16", 250, 250, heads_q=8, batch=(40,), score="soft_clip"),
    Case("float16", 120, 130, heads_q=8, batch=(40,), mask="documents"),
)
GRADIENTS = (
    Case("bfloat16", 2100, 2100, dim=128, heads_q=16, heads_kv=2, causal=True),
    Case("float16", 1300, 1300, dim=192, dim_v=128, heads_q=12, heads_kv=3, batch=(2,), causal=True),
    Case("bfloat16", 1100, 1200, dim=256, heads_q=8, heads_kv=1, causal=True),
    Case("float16", 6000, 6000, dim=128, heads_q=8, heads_kv=2, window=(200, 0)),
    Case("bfloat16", 5000, 5000, heads_q=8, heads_kv=2, window=(300, 20)),
    Case("float16", 5000, 5000, dim=256, heads_q=4, window=(150, 0)),
)
FEW_BLOCKS = (
    Case("bfloat16", 2100, 2100, dim=128, heads_q=2, causal=True),
    Case("float16", 1500, 1600, dim=96, heads_q=4, heads_kv=2, causal=True),
    Case("bfloat16", 2000, 2000, dim=72, heads_q=3, causal=True, softcap=5.0),
    Case("float16", 2000, 2000, dim=128, heads_q=2, causal=True, sinks=1),
)
ONE_TILE = (
    Case("bfloat16", 5000, 77, heads_q=8, heads_kv=4, batch=(2,)),
    Case("float16", 2300, 128, dim=128, heads_q=3, causal=True),
    Case("bfloat16", 900, 50, dim=256, heads_q=150),
    Case("float16", 1000, 60, dim=192, dim_v=128, heads_q=4),
)


@pytest.mark.parametrize(
    "case, why",
    [(case, "few query tiles") for case in FORWARDS] + [(case, "fewer rows of its last tile") for case in FITTING],
    ids=str,
)
def test_forward(case, why):
    inputs, arrays = make_inputs(case, cupy), case.arrays(cupy)
    plan = plan_attention(*inputs, **case.options, **arrays)
    assert any(why in reason for reason in plan.kernel.reasons)
    out, lse = plan(*inputs, **arrays)
    judged = compare(out, lse, *inputs, precision=case.precision, **case.meaning(cupy))
    assert judged.ok, judged.message


def gradients_of(case, **asked):
    """A plan of gradients, which are right."""
    inputs, (dout, _) = make_inputs(case, cupy), make_cotangents(case, cupy)
    options = {name: value for name, value in case.options.items() if name != "return_lse"}
    arrays = case.arrays(cupy)
    given = (dout, *inputs, *plan_attention(*inputs, **options, **arrays, return_lse=True)(*inputs, **arrays))
    plan = plan_attention_backward(*given, **options, **arrays, **asked)
    workspace = cupy.full(plan.workspace_bytes, 0xFF, "uint8")
    judged = compare_gradients(plan(*given, **arrays, workspace=workspace), dout, *inputs, **case.meaning(cupy))
    assert judged.ok, judged.message
    return plan


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients(case, deterministic):
    """Of fewer heads to a block than share its keys, and of windows whose rows all multiprocessors share."""
    plan = gradients_of(case, deterministic=deterministic)
    split = heads_per_block(plan.kernel, plan.problem) < case.heads_q // case.heads_kv
    assert split or make_grouping(plan.kernel, plan.problem).last_heads == 0


@pytest.mark.parametrize("case", FEW_BLOCKS, ids=str)
def test_gradients_of_few_blocks_under_a_causal_mask(case):
    assert gradients_of(case).kernel.file == "bwd_hopper_wide"


@pytest.mark.parametrize("case", ONE_TILE, ids=str)
def test_gradients_of_one_tile_of_keys(case, monkeypatch):
    monkeypatch.setattr("cupy_flash.plan.short_gradients.MOST_BLOCKS", 0)  # or else there are two
    config = gradients_of(case).kernel.config
    assert config.WHOLE_HEADS is (case.dim <= 128) and config.FIRST_STORES is (case.dim > 128)
