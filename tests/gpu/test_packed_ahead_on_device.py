"""Packed sequences whose later heads have statistics and zeros from blocks of earlier ones, on a device."""

import ml_dtypes
import numpy
import pytest

from cupy_flash import attention, plan_attention_backward
from cupy_flash.judge.compare_gradients import compare_gradients

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="bwd_hopper is for sm_90a"
)

LENS = ((700, 700), (0, 90), (1, 1), (333, 333), (130, 0), (900, 1300), (64, 64), (128, 128), (1500, 1500), (257, 400), (90, 90))
OPTIONS = {
    "causal": ({"causal": True}, lambda n: {"last_key": n[1] - n[0]}),
    "full": ({}, lambda n: {}),
    "window": ({"window": (200, 30)}, lambda n: {"first_key": n[1] - n[0] - 200, "last_key": n[1] - n[0] + 30}),
    "softcap": ({"softcap": 3.0}, lambda n: {"softcap": 3.0}),
}


def problem(heads, heads_kv, dim, dtype, options, seed=0):
    """The plan, what it is given, and where sequences begin; behind all of them are rows that are nobody's."""
    rng = cupy.random.default_rng(seed)
    starts = [numpy.concatenate([[0], numpy.cumsum([n[side] for n in LENS])]) for side in range(2)]
    rows = [starts[side][-1] + 200 for side in range(2)]
    shapes = (heads, rows[0]), (heads_kv, rows[1]), (heads_kv, rows[1]), (heads, rows[0])
    q, k, v, dout = (rng.standard_normal((*shape, dim), numpy.float32).astype(dtype) for shape in shapes)
    lengths = {f"cu_seqlens_{side}": cupy.asarray(x, numpy.int32) for side, x in zip(("q", "kv"), starts)}
    out, lse = attention(q, k, v, return_lse=True, **options, **lengths)
    for x in (q, dout, out, lse):
        x[:, starts[0][-1] :] = numpy.nan
    for x in (k, v):
        x[:, starts[1][-1] :] = numpy.nan
    given = (dout, q, k, v, out, lse)
    plan = plan_attention_backward(*given, **options, **lengths)
    assert plan.kernel.file == "bwd_hopper" and plan.kernel.config.STATS_AHEAD and plan.kernel.config.ZEROS_AHEAD
    return plan, given, lengths, starts


@pytest.mark.parametrize("heads, dim, dtype", [((32, 32), 64, ml_dtypes.bfloat16), ((48, 16), 40, numpy.float16)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name, heads, dim, dtype):
    options, meaning = OPTIONS[name]
    plan, given, lengths, (starts_q, starts_kv) = problem(*heads, dim, dtype, options)
    gradients = plan(*given, **lengths, workspace=cupy.full(plan.workspace_bytes, 0x7F, numpy.uint8))
    assert not gradients.dq[:, starts_q[-1] :].any() and not gradients.dk[:, starts_kv[-1] :].any()
    for i, n in enumerate(LENS):
        of_q, of_kv = slice(starts_q[i], starts_q[i + 1]), slice(starts_kv[i], starts_kv[i + 1])
        found = type(gradients)(gradients.dq[:, of_q], gradients.dk[:, of_kv], gradients.dv[:, of_kv])
        if 0 in n:
            assert not any(x.any() for x in found if x is not None)
            continue
        dout, q, k, v = (x[:, rows] for x, rows in zip(given, (of_q, of_q, of_kv, of_kv)))
        judged = compare_gradients(found, dout, q, k, v, scale=1 / dim**0.5, **meaning(n))
        assert judged.ok, f"sequence {i}: {judged.message}"


def test_repeats_are_bitwise_equal():
    """But for dq, to which blocks add in any order: what a head reads before it has been made would differ."""
    plan, given, lengths, _ = problem(32, 32, 64, ml_dtypes.bfloat16, {"causal": True})
    workspace = cupy.empty(plan.workspace_bytes, numpy.uint8)
    results, first, differences = plan(*given, **lengths), None, cupy.zeros((), numpy.int64)
    memory = dict(zip(("dq", "dk", "dv"), results))
    for _ in range(300):
        for x in (workspace, *(x.view(numpy.uint8) for x in memory.values())):
            x.fill(0xFF)
        plan(*given, **lengths, **memory, workspace=workspace)
        now = [memory[name].view(numpy.uint16).copy() for name in ("dk", "dv")]
        first = first or now
        differences += sum((x != y).sum() for x, y in zip(now, first))
    assert int(differences) == 0
