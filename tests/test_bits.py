"""Which results have the same bits whatever else is computed with them: what docs/guide/results.md says of it."""

import numpy
import pytest
from thinned import thinned

from cupy_flash import attention, plan_attention
from cupy_flash.judge.cases import Case, make_inputs

CASES = [
    Case("float16", 70, 150, heads_q=6, heads_kv=2, batch=(3,), causal=True),
    Case("float16", 7, 150, heads_q=6, heads_kv=2, batch=(3,), window=(60, 0)),  # heads of a group share a tile
    Case("float16", 130, 300, heads_q=2, batch=(3,)),
]


def assert_same(found, expected):
    for x, y in zip(found, expected):
        numpy.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


def element_by_element(case, **options):
    """The results of a batch, and those of each of its elements computed alone, with all its heads."""
    q, k, v = make_inputs(case)
    options |= case.options
    alone = [attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], **options) for i in range(len(q))]
    return attention(q, k, v, **options), [numpy.concatenate(results) for results in zip(*alone)]


@pytest.mark.parametrize("case", [*CASES, Case("float32", 1, 2000, heads_q=8, heads_kv=2, batch=(3,))], ids=str)
def test_an_element_of_a_batch_with_numpy(case):
    assert_same(*element_by_element(case))


@pytest.mark.parametrize("kernel", ["fwd_v1", "fwd_v2", "fwd_hopper"])
@pytest.mark.parametrize("case", thinned(CASES), ids=str)
def test_an_element_of_a_batch_with_kernels(kernel, case):
    arch = "90a" if kernel == "fwd_hopper" else "75"
    q, k, v = make_inputs(case)
    options = case.options | {"backend": "host", "arch": arch, "kernel": kernel}
    plans = [plan_attention(*x, **options) for x in ((q, k, v), (q[:1], k[:1], v[:1]))]
    assert plans[0].kernel == plans[1].kernel and not plans[0].kernel.config.SPLIT_KV
    alone = [plans[1](q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(len(q))]
    assert_same(plans[0](q, k, v), [numpy.concatenate(results) for results in zip(*alone)])


def test_a_plan_says_where_shares_depend_on_the_batch():
    """How many keys a block takes of a query tile that blocks share follows from how many tiles there are."""
    q, k, v = make_inputs(Case("float16", 64, 2048, batch=(3,)))
    plan = plan_attention(q, k, v, backend="host", arch="90a")
    assert plan.kernel.config.SPLIT_KV and "split keys: " in str(plan)
