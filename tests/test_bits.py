"""Which results have the same bits whatever else is computed with them: what docs/guide/results.md says of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_bits_where_numpy_multiplies_with_several_threads():
    """The tests of bits with NumPy, this one's neighbours and those of other files, which have one thread otherwise."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST")} | {"OPENBLAS_NUM_THREADS": "2"}
    files = [Path(__file__).with_name(f"test_{name}.py") for name in ("bits", "lengths_bits", "read_gradients")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "with_numpy or None or of_numpy_repeat"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, env=environment, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 9 and "skipped" not in done.stdout


@pytest.mark.parametrize("kernel", thinned(["fwd_v2", "fwd_v1", "fwd_hopper"]))
@pytest.mark.parametrize("case", thinned(CASES, keep=3), ids=str)
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


@pytest.mark.few_tiles
@pytest.mark.parametrize("batch, tile, says", [(1, 64, True), (40, 256, False)])
def test_a_plan_says_where_a_tile_depends_on_the_batch(batch, tile, says):
    q = numpy.empty((batch, 8, 1000, 64), numpy.float16)
    plan = plan_attention(q, q, q, backend="host", arch="90a", causal=True)
    assert tile == plan.kernel.config.TILE_Q
    assert ("few query tiles: " in str(plan)) is says
