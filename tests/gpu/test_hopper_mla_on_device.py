"""`bwd_hopper_mla` on a device: gradients of keys that are wider than values."""

import numpy
import pytest
from test_gradient_parts import RESULTS, asked_of, judge, operands
from test_hopper_mla import CASES, KERNEL

from cupy_flash import attention, plan_attention_backward

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="bwd_hopper_mla is for sm_90"
)


def computed(plan, given, told):
    """The gradients, by a workspace full of NaN."""
    return plan(**given, **told, workspace=cupy.full(plan.workspace_bytes, 0xFF, numpy.uint8))


def same(found, expected):
    return all(bool((x.view(numpy.uint16) == y.view(numpy.uint16)).all()) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(case, deterministic):
    given = operands(case)
    placed = {name: cupy.asarray(x) for name, x in given.items() if name not in RESULTS}
    plan = plan_attention_backward(**placed, **asked_of(case), deterministic=deterministic, kernel=KERNEL)
    found = computed(plan, placed, {})
    names = (*RESULTS, "dsinks") if case.sinks else RESULTS
    judge(case, given, found._replace(**{name: getattr(found, name).get() for name in names}))


def drawn(heads, heads_kv, len_q, len_kv, dtype="float16", **asked):
    rng = numpy.random.default_rng(0)
    shapes = (heads, len_q, 128), (heads, len_q, 192), (heads_kv, len_kv, 192), (heads_kv, len_kv, 128)
    dout, q, k, v = (cupy.asarray(rng.standard_normal(shape, numpy.float32).astype(dtype)) for shape in shapes)
    return dict(zip(("dout", "q", "k", "v", "out", "lse"), (dout, q, k, v, *attention(q, k, v, **asked, return_lse=True))))


ENDS = numpy.array([0, 700, 700, 1300, 1500], numpy.int32)
ASKED = {
    "causal, a group": ((8, 2, 1500, 1500), {"causal": True}),
    "many keys": ((3, 3, 900, 4000), {}),
    "later heads": ((300, 300, 300, 260), {"window": (200, 9)}),
    "few keys": ((300, 300, 500, 77), {}),
    "packed": ((4, 4, 1510, 1510), {"causal": True, "cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS}),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_same_bits_in_every_run_in_order_and_as_near_in_any(name):
    shapes, asked = ASKED[name]
    asked = {option: cupy.asarray(x) if isinstance(x, numpy.ndarray) else x for option, x in asked.items()}
    told = {option: x for option, x in asked.items() if isinstance(x, cupy.ndarray)}
    given = drawn(*shapes, **asked)
    in_order = plan_attention_backward(**given, **asked, deterministic=True)
    assert in_order.kernel.file == KERNEL
    expected = computed(in_order, given, told)
    assert all(same(computed(in_order, given, told), expected) for _ in range(50))
    plan = plan_attention_backward(**given, **asked)
    assert plan.kernel.file == KERNEL
    first = computed(plan, given, told)  # gradients of keys and values, whose blocks in order may take queries the other way round
    for _ in range(20):
        found = computed(plan, given, told)
        assert same(found[1:3], first[1:3])
        most = float(abs(expected.dq).max())
        assert float(abs(found.dq.astype(numpy.float32) - expected.dq.astype(numpy.float32)).max()) <= 2**-10 * most


@pytest.mark.parametrize("causal", [False, True])
def test_as_near_as_bwd_hopper_wide(causal):
    """Root of the mean square of the difference from bwd_v2 in float32, of the same numbers."""
    given = drawn(4, 4, 2049, 2049, "bfloat16", causal=causal)
    exact = plan_attention_backward(**{name: x.astype(numpy.float32) for name, x in given.items()}, causal=causal, kernel="bwd_v2")
    truth = exact(**{name: x.astype(numpy.float32) for name, x in given.items()})
    off = {}
    for kernel in (KERNEL, "bwd_hopper_wide"):
        found = plan_attention_backward(**given, causal=causal, kernel=kernel)(**given)
        off[kernel] = [float(((x.astype(numpy.float32) - y) ** 2).mean() ** 0.5) for x, y in zip(found, truth)]
    assert all(mine < 1.1 * other for mine, other in zip(off[KERNEL], off["bwd_hopper_wide"]))
