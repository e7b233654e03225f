"""The gradient of a bias: TMA stores it where the backwards for sm_90a have dS, or another kernel computes it. On the host."""

from itertools import product

import numpy
import pytest
from score_kernels import DTYPES, judged
from thinned import quick, thinned
from whole_groups import never_split

from cupy_flash import attention, attention_backward, plan_attention_backward
from cupy_flash.machine import host
from cupy_flash.plan import grouping
from cupy_flash.plan.grouping import make_grouping

pytestmark = pytest.mark.usefixtures("poisoned_results")

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV = 2, 4, 2, 141, 208  # off every tile edge, and whole chunks of 16 bytes
WHERE = {"backend": "host", "arch": "90a"}
SHAPES = {"float16, 40": ("float16", 40), "bfloat16, 128": ("bfloat16", 128), "float16, 160": ("float16", 160)}
MASKS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "window": ({"window": (20, 10)}, {"first_key": LEN_KV - LEN_Q - 20, "last_key": LEN_KV - LEN_Q + 10}),
}


@pytest.fixture(params=thinned(host.SCHEDULES, first=1))  # of the deferred one no store is done early
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def normal(*shape, dtype, seed=0):
    return numpy.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def inputs(dtype, dim, len_q=LEN_Q, len_kv=LEN_KV, batch=BATCH):
    shapes = (HEADS, len_q), (HEADS_KV, len_kv), (HEADS_KV, len_kv), (HEADS, len_q)
    return [normal(batch, *shape, dim, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def with_hidden(bias):
    """The same with pairs that a bias hides."""
    return numpy.where(numpy.random.default_rng(5).random(bias.shape) < 0.05, -numpy.inf, bias).astype(bias.dtype)


@pytest.mark.parametrize("case", thinned(list(product(SHAPES, MASKS)), keep=9), ids=", ".join)
def test_tma_stores_what_is_a_pair_s_own(case, schedule):
    (dtype, dim), (options, hand) = SHAPES[case[0]], MASKS[case[1]]
    bias = with_hidden(normal(BATCH, HEADS, LEN_Q, LEN_KV, dtype=dtype, seed=4))
    given, hand = inputs(dtype, dim), {"bias": bias.astype(numpy.float64), **hand}
    _, kernel = judged(dtype, {"bias": bias, **options}, hand, WHERE, wrt="bias", inputs_given=given)
    assert kernel.file == ("bwd_hopper" if dim <= 128 else "bwd_hopper_wide") and kernel.config.STORE_DBIAS


def gradients_of(backend, given, options, arch=None, dlse=None):
    """All gradients of a call, and the plan of them."""
    q, k, v, dout = given
    of_forward = {name: x for name, x in options.items() if name not in ("deterministic", "wrt")}
    left = attention(q, k, v, **of_forward, backend="numpy", return_lse=True)
    asked = {"wrt": "bias", **options}
    if backend == "numpy":
        return attention_backward(dout, q, k, v, *left, dlse=dlse, backend="numpy", **asked), None
    plan = plan_attention_backward(dout, q, k, v, *left, dlse=dlse, backend=backend, arch=arch, **asked)
    operands = {name: x for name, x in options.items() if name in ("bias", "sinks")}
    return plan(dout, q, k, v, *left, dlse=dlse, **operands), plan


def agree(given, options, dlse=None, unit=2**-10):
    """The plan of kernels for sm_90a, whose gradients are those of NumPy within some roundings."""
    got, plan = gradients_of("host", given, options, arch="90a", dlse=dlse)
    expected, _ = gradients_of("numpy", given, options, dlse=dlse)
    for x, right in zip((*got, got.dbias), (*expected, expected.dbias)):
        x, right = x.astype(numpy.float32), right.astype(numpy.float32)
        assert x.shape == right.shape and abs(x - right).max() <= 4 * unit * abs(right).max()
    return plan


LEFT = {
    "deterministic": {"deterministic": True},
    "deterministic, causal": {"deterministic": True, "causal": True},
    "sinks": {"sinks": numpy.linspace(-1, 3, HEADS, dtype=numpy.float32)},
    "scaled one by one": {"scale": -0.2},
    "keys that nobody sees": {"window": (0, 0), "causal": "top_left"},
}


@pytest.mark.parametrize("asked", quick(LEFT, *(name for name in LEFT if name not in ("sinks", "scaled one by one"))))
def test_whatever_else_is_asked_for(asked, schedule):
    bias, dlse = normal(BATCH, HEADS, LEN_Q, LEN_KV, dtype="float16", seed=4), normal(BATCH, HEADS, LEN_Q, dtype="float32")
    plan = agree(inputs("float16", 64), {"bias": bias, **LEFT[asked]}, dlse=dlse)
    assert plan.kernel.config.STORE_DBIAS and plan.kernels == (plan.kernel,)


@pytest.mark.parametrize("len_q, len_kv", [(1, 8), (128, 256), (65, 72), (300, 136)])
def test_tiles_that_an_edge_cuts(len_q, len_kv):
    bias = normal(BATCH, HEADS, len_q, len_kv, dtype="float16", seed=4)
    assert agree(inputs("float16", 64, len_q, len_kv), {"bias": bias}).kernel.config.STORE_DBIAS


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_several_batch_axes(layout):
    """One of them of size 1, and two that a bias steps through in another order than its gradient."""
    shape, bias = (3, 1, 2), normal(2, 1, 3, HEADS, 70, 72, dtype="float16", seed=4).swapaxes(0, 2)
    order = [0, 1, 2, 4, 3, 5] if layout == "bshd" else range(6)
    heads = (HEADS, 70), (HEADS_KV, 72), (HEADS_KV, 72), (HEADS, 70)
    given = [normal(*shape, *own, 64, dtype="float16", seed=i).transpose(order) for i, own in enumerate(heads)]
    assert agree(given, {"bias": bias, "layout": layout}).kernel.config.STORE_DBIAS


def test_one_element_of_a_batch_has_no_batch_axis():
    given = [x[0] for x in inputs("float16", 64)]
    plan = agree(given, {"bias": normal(HEADS, LEN_Q, LEN_KV, dtype="float16", seed=4)})
    assert plan.kernel.config.STORE_DBIAS


@pytest.mark.parametrize("heads_per_block", [1, 2])
def test_a_block_clears_sums_of_other_heads_behind_its_own_steps(heads_per_block, monkeypatch):
    """By the warp that stores. Of three groups of blocks, all at once, the last has sums of the first, cleared by the second."""
    for name in ("CLEARING_BLOCKS", "LAST_BLOCKS"):
        monkeypatch.setattr(grouping, name, 1)
    never_split(monkeypatch)
    heads = 17 * heads_per_block
    given = [normal(n, 64, 64, dtype="float16", seed=i) for i, n in enumerate((heads, 17, 17, heads))]
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(20 * 12))
    plan = agree(given, {"bias": normal(heads, 64, 64, dtype="float16", seed=4)})
    assert make_grouping(plan.kernel, plan.problem).reused > 0 and plan.kernel.config.STORE_DBIAS


PAIRS = (BATCH, HEADS, LEN_Q, LEN_KV)
NOT_STORED = {
    "shared by three elements": ((1, HEADS, LEN_Q, LEN_KV), "float16", {}),
    "without a batch axis": ((HEADS, LEN_Q, LEN_KV), "float16", {}),
    "shared by heads": ((BATCH, 1, LEN_Q, LEN_KV), "float16", {}),
    "in float32": (PAIRS, "float32", {}),
    "behind a softcap": (PAIRS, "float16", {"softcap": 3.0}),
}


@pytest.mark.parametrize("asked", thinned(NOT_STORED, keep=4, first=2))
def test_another_kernel_sums_up_what_pairs_share(asked):
    shape, dtype, options = NOT_STORED[asked]
    batch = BATCH if shape[0] == BATCH else 3  # elements, which are no cluster
    plan = agree(inputs("float16", 64, batch=batch), {"bias": normal(*shape, dtype=dtype, seed=4), **options})
    assert [kernel.file for kernel in plan.kernels[1:]] == ["bwd_scores_hopper"] and not plan.kernel.config.STORE_DBIAS


@pytest.mark.release
def test_rows_that_end_within_a_chunk_are_not_stored():
    """TMA finds rows of the bias, which has gaps between them; of the gradient, which has none, it would write to the next ones."""
    whole = normal(BATCH, HEADS, LEN_Q, LEN_KV, dtype="float16", seed=4)
    plan = agree(inputs("float16", 64, len_kv=LEN_KV - 5), {"bias": whole[..., : LEN_KV - 5]})
    assert plan.kernel.config.STAGED_BIAS and not plan.kernel.config.STORE_DBIAS
    behind = plan.kernels[1]
    assert behind.file == "bwd_scores_hopper" and behind.config.STAGED_BIAS and behind.config.COPY_BYTES == 0


def test_nothing_is_stored_that_is_not_asked_for():
    bias = normal(*PAIRS, dtype="float16", seed=4)
    q, k, v, dout = inputs("float16", 64)
    left = attention(q, k, v, bias=bias, return_lse=True)
    plan = plan_attention_backward(dout, q, k, v, *left, bias=bias, **WHERE)
    assert plan.kernel.config.STAGED_BIAS and not plan.kernel.config.STORE_DBIAS


def test_what_is_moved_is_counted():
    """The gradient is written once, and nothing is read for it."""
    bias = normal(BATCH, HEADS, 128, 256, dtype="float16", seed=4)
    q, k, v, dout = inputs("float16", 64, 128, 256)
    given = (dout, q, k, v, *attention(q, k, v, bias=bias, return_lse=True))
    plans = [plan_attention_backward(*given, bias=bias, wrt=wrt, **WHERE) for wrt in ((), "bias")]
    alone, both = (plan.counted(*given, bias=bias)[1] for plan in plans)
    assert (both.read_bytes, both.flops) == (alone.read_bytes, alone.flops)
    assert both.written_bytes - alone.written_bytes == bias.nbytes == plans[1].result_bytes - plans[0].result_bytes
    assert plans[0].workspace_bytes == plans[1].workspace_bytes
