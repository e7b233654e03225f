"""Softcaps on a device: tiles whose scores lie within, tiles with some beyond, and both in turn."""

import numpy
import pytest

from cupy_flash import attention, attention_backward, plan_attention
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents

cupy = pytest.importorskip("cupy")

CASES = (
    Case("float16", 700, 1700, heads_q=4, batch=(2,), softcap=6.0),
    Case("bfloat16", 700, 1700, heads_q=4, batch=(2,), softcap=6.0, window=(300, 0)),
    Case("float16", 1700, 1700, dim=32, heads_q=4, heads_kv=2, softcap=6.0, causal=True),
    Case("float16", 1700, 1700, dim=128, heads_q=4, softcap=6.0, causal=True),
    Case("bfloat16", 5000, 5000, dim=128, heads_q=2, softcap=6.0),
    Case("bfloat16", 700, 1700, dim=96, heads_q=4, softcap=6.0, sinks=1),
    Case("float16", 700, 1700, dim=256, heads_q=4, softcap=6.0, window=(300, 0)),
    Case("bfloat16", 30, 1700, dim=128, heads_q=8, heads_kv=2, batch=(2,), softcap=6.0),
    Case("float16", 60, 100, heads_q=8, batch=(6,), softcap=6.0),
    Case("float32", 150, 300, heads_q=2, softcap=6.0),
)


@pytest.mark.parametrize("larger", [(), (801,), (90, 91, 501)], ids=["within", "one key", "three keys"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_beyond(case, larger):
    """Keys whose scores are beyond the softcap in all rows that see them, of either sign."""
    inputs, arrays, (dout, dlse) = make_inputs(case, cupy), case.arrays(cupy), make_cotangents(case, cupy)
    q, k, _ = inputs
    q[..., 0], k[..., 0] = 3, 0
    for i, key in enumerate(larger):
        k[..., key % k.shape[-2], 0] = (-1) ** i * 20 * k.shape[-1] ** 0.5
    options = {name: value for name, value in (case.options | arrays).items() if name != "return_lse"}
    out, lse = attention(*inputs, **options, return_lse=True)
    judged = compare(out, lse, *inputs, precision=case.precision, **case.scores, **arrays)
    assert judged.ok, judged.message
    gradients = attention_backward(dout, *inputs, out, lse, dlse=dlse, **options)
    judged = compare_gradients(gradients, dout, *inputs, dlse=dlse, precision=case.precision, **case.scores, **arrays)
    assert judged.ok, judged.message


@pytest.mark.parametrize("dim", [64, 128])
def test_repeats_are_bitwise_equal(dim):
    """Warps that find a score beyond the softcap at other times."""
    rng = numpy.random.default_rng(dim)
    q, k, v = (cupy.asarray(rng.standard_normal((2, 4, 2100, dim)).astype("f2")) for _ in range(3))
    q *= 3
    plan = plan_attention(q, k, v, softcap=8.0, causal=True)
    first = plan(q, k, v)
    assert all((plan(q, k, v).view(numpy.uint16) == first.view(numpy.uint16)).all() for _ in range(50))
