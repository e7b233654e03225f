"""The gradient of a bias that batch elements share: blocks of a cluster sum up dS of the backward for sm_90a. On the host."""

from dataclasses import replace

import ml_dtypes
import numpy
import pytest
from score_kernels import DTYPES, judged
from thinned import quick, thinned

from cupy_flash import KeyRanges, attention, attention_backward, plan_attention_backward
from cupy_flash.machine import host
from cupy_flash.plan import stored_dbias
from cupy_flash.plan.backward import backward_maps
from cupy_flash.plan.read_hopper import FILE

pytestmark = pytest.mark.usefixtures("poisoned_results", "slices_of_any")

HEADS, HEADS_KV, LEN_Q, LEN_KV = 4, 2, 141, 208  # off every tile edge, and whole chunks of 16 bytes
WHERE = {"backend": "host", "arch": "90a"}


@pytest.fixture
def slices_of_any(planned_anew, monkeypatch):
    """However few queries a problem has."""
    monkeypatch.setattr(stored_dbias, "LEAST_NARROW", 0)


@pytest.fixture(params=thinned(host.SCHEDULES, first=1))  # of the deferred one no slice is there early
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def normal(*shape, dtype="float16", seed=0):
    return numpy.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def inputs(batch, dim=64, dtype="float16", len_q=LEN_Q, len_kv=LEN_KV, heads=(HEADS, HEADS_KV)):
    shapes = (heads[0], len_q), (heads[1], len_kv), (heads[1], len_kv), (heads[0], len_q)
    return [normal(*batch, *shape, dim, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def bias_of(*batch, dtype="float16", heads=HEADS, len_q=LEN_Q, len_kv=LEN_KV, hidden=0.0):
    """With pairs that it hides."""
    bias = normal(*batch, heads, len_q, len_kv, dtype=dtype, seed=4)
    return numpy.where(numpy.random.default_rng(5).random(bias.shape) < hidden, -numpy.inf, bias).astype(bias.dtype)


def planned(given, options):
    """The plan of a backward that is asked for the gradient of the bias, and what it is called with."""
    q, k, v, dout = given
    of_forward = {name: x for name, x in options.items() if name not in ("deterministic", "wrt")}
    left = attention(q, k, v, **of_forward, backend="numpy", return_lse=True)
    asked = {"wrt": "bias", "dlse": normal(*left[1].shape, dtype="float32", seed=7), **options}
    return plan_attention_backward(dout, q, k, v, *left, **WHERE, **asked), (dout, q, k, v, *left), asked


def agree(given, options, unit=2**-10):
    """The plan, whose gradients are those of NumPy within some roundings; that of the bias has the same bits each time."""
    plan, called, asked = planned(given, options)
    operands = {name: x for name, x in asked.items() if name in ("bias", "sinks", "alibi_slopes", "arrays", "mask", "dlse")}
    got, again = (plan(*called, **operands) for _ in range(2))
    expected = attention_backward(*called, backend="numpy", **asked)
    for x, right in zip((*got, got.dbias), (*expected, expected.dbias)):
        x, right = x.astype(numpy.float32), right.astype(numpy.float32)
        assert x.shape == right.shape and abs(x - right).max() <= 4 * unit * abs(right).max()
    numpy.testing.assert_array_equal(got.dbias, again.dbias)
    return plan


def sharers(plan):
    """How many blocks are a cluster of the one kernel, or 1."""
    return plan.kernel.config.CLUSTER


def assert_cluster(plan, blocks):
    assert plan.kernel.file == "bwd_hopper" and plan.kernels == (plan.kernel,)
    assert plan.kernel.config.STORE_DBIAS and sharers(plan) == blocks
    assert any(f"{blocks} batch elements, whose blocks are a cluster" in reason for reason in plan.kernel.reasons)
    assert [launch.cluster for launch in plan.launches] == [1, blocks, 1][: len(plan.launches)]
    assert f" blocks in clusters of {blocks}" in str(plan)


MASKS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"last_key": LEN_KV - LEN_Q}),
    "window": ({"window": (20, 10)}, {"first_key": LEN_KV - LEN_Q - 20, "last_key": LEN_KV - LEN_Q + 10}),
}
EXACT = [
    pytest.param("float16", 2, 40, "full"),
    pytest.param("bfloat16", 4, 64, "causal"),
    pytest.param("bfloat16", 8, 128, "window"),
    pytest.param("float16", 4, 96, "full", marks=pytest.mark.release),
    pytest.param("float16", 8, 32, "causal", marks=pytest.mark.release),
    pytest.param("bfloat16", 2, 128, "causal", marks=pytest.mark.release),
]


@pytest.mark.parametrize("dtype, elements, dim, mask", EXACT)
def test_elements_sum_up_their_slices(dtype, elements, dim, mask, schedule):
    options, hand = MASKS[mask]
    bias = bias_of(1, dtype=dtype, hidden=0.05)
    hand = {"bias": bias.astype(numpy.float64), **hand}
    given = inputs((elements,), dim, dtype)
    _, kernel = judged(dtype, {"bias": bias, **options}, hand, WHERE, wrt="bias", inputs_given=given)
    assert f"cluster{elements}" in kernel.name


BATCHES = {
    "all of several axes": ((2, 2), (1, 1), 4),
    "the inner ones of several axes": ((3, 2), (3, 1), 2),
    "with an axis of one": ((2, 1, 2), (1, 1, 1), 4),
    "without a batch axis": ((2,), (), 2),
    "of an axis of one": ((1, 2), (1, 1), 2),
}


@pytest.mark.parametrize("case", quick(BATCHES, "the inner ones of several axes", "without a batch axis"))
def test_elements_that_share_a_bias(case):
    batch, of_bias, blocks = BATCHES[case]
    assert_cluster(agree(inputs(batch), {"bias": bias_of(*of_bias)}), blocks)


@pytest.mark.parametrize("len_q, len_kv", quick([(1, 8), (128, 256), (65, 72), (300, 136)], (1, 8), (300, 136), spread=True))
def test_tiles_that_an_edge_cuts(len_q, len_kv, schedule):
    given, bias = inputs((4,), len_q=len_q, len_kv=len_kv), bias_of(len_q=len_q, len_kv=len_kv)
    assert_cluster(agree(given, {"bias": bias}), 4)


BESIDE = {
    "sinks": {"sinks": numpy.linspace(-1, 3, HEADS, dtype=numpy.float32)},
    "scaled one by one": {"scale": -0.2},
    "keys that nobody sees": {"window": (0, 0), "causal": "top_left"},
    "queries that see nothing": {"causal": True, "window": (3, 0)},
    "a term of the key": {"score": "score + t[b, kv_idx]", "arrays": {"t": normal(2, LEN_KV, dtype="float32", seed=6)}},
    "slopes": {"alibi_slopes": numpy.linspace(0.1, 0.5, HEADS, dtype=numpy.float32)},
    "rows of heads": {"layout": "bshd"},
}


@pytest.mark.parametrize("asked", quick(BESIDE, "sinks", "keys that nobody sees"))
def test_whatever_else_is_asked_for(asked):
    given = inputs((2,))
    if asked == "rows of heads":
        given = [x.swapaxes(-2, -3) for x in given]
    plan = agree(given, {"bias": bias_of(1), **BESIDE[asked]})
    assert sharers(plan) == (1 if asked == "slopes" else 2)  # beside which no TMA brings a bias


@pytest.mark.parametrize("heads", quick([(3, 1), (5, 5), (8, 2)], (3, 1)))
def test_heads_that_share_keys_and_those_that_are_left_over(heads):
    """A block has all heads of a group, or some; of clusters that alternate, the last may be fewer."""
    bias = bias_of(1, heads=heads[0])
    assert_cluster(agree(inputs((2,), heads=heads), {"bias": bias}), 2)


PAIRS = (2, HEADS, LEN_Q, LEN_KV)
APART = {
    "three elements": ((3,), (1, HEADS, LEN_Q, LEN_KV), {}),
    "sixteen elements": ((16,), (1, HEADS, LEN_Q, LEN_KV), {}),
    "the outer ones of several axes": ((2, 3), (1, 3, HEADS, LEN_Q, LEN_KV), {}),
    "heads as well": ((2,), (1, 1, LEN_Q, LEN_KV), {}),
    "in order": ((2,), (1, HEADS, LEN_Q, LEN_KV), {"deterministic": True}),
    "behind a softcap": ((2,), (1, HEADS, LEN_Q, LEN_KV), {"softcap": 3.0}),
    "beside a mask": ((2,), (1, HEADS, LEN_Q, LEN_KV), {"mask": KeyRanges(8, 100)}),
}


@pytest.mark.parametrize("asked", quick(APART, "three elements", "in order"))
def test_another_kernel_sums_up_the_rest(asked):
    batch, shape, options = APART[asked]
    plan = agree(inputs(batch), {"bias": normal(*shape, seed=4), **options})
    assert [kernel.file for kernel in plan.kernels[1:]] == [FILE] and not plan.kernel.config.STORE_DBIAS


def test_wider_heads_and_narrow_short_ones_are_left_to_another_kernel(monkeypatch):
    monkeypatch.setattr(stored_dbias, "LEAST_NARROW", LEN_Q)
    short = LEN_Q - 1
    taken = (4, 32, LEN_Q, 4), (2, 32, short, 2), (4, 40, short, 4)
    for elements, dim, len_q, blocks in ((2, 136, LEN_Q, 1), (4, 32, short, 1), *taken):
        plan, _, _ = planned(inputs((elements,), dim, len_q=len_q), {"bias": bias_of(1, len_q=len_q)})
        assert sharers(plan) == blocks and plan.kernel.config.STORE_DBIAS is (blocks > 1)


def test_slices_are_as_many_rows_as_boxes_of_the_gradient():
    for elements in stored_dbias.CLUSTERS:
        plan, _, _ = planned(inputs((elements,)), {"bias": bias_of(1)})
        described = backward_maps(plan.kernel, plan.problem)["dbias_map"]
        assert described.box_rows == plan.kernel.config.TILE_Q // elements and described.strides[-2] == 0


def test_what_is_moved_is_counted():
    """The gradient is written once for all elements, and nothing is read for it."""
    given, bias = inputs((4,), len_q=128, len_kv=256), bias_of(1, len_q=128, len_kv=256)
    q, k, v, dout = given
    called = (dout, q, k, v, *attention(q, k, v, bias=bias, return_lse=True))
    with_it, without = (plan_attention_backward(*called, bias=bias, wrt=wrt, **WHERE) for wrt in ("bias", ()))
    assert sharers(with_it) == 4
    (_, moved), (_, otherwise) = (plan.counted(*called, bias=bias) for plan in (with_it, without))
    assert moved.written_bytes - otherwise.written_bytes == HEADS * 128 * 256 * 2
    queries = replace(without.kernel.config, TILE_Q=64) == replace(with_it.kernel.config, CLUSTER=1, STORE_DBIAS=False)
    assert queries and moved.read_bytes == otherwise.read_bytes


@pytest.mark.parametrize("tool", thinned(host.SANITIZERS))
def test_sanitizers_find_nothing(tool, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", tool)
    unit = float(ml_dtypes.finfo("bfloat16").eps)
    plan = agree(inputs((2,), dtype="bfloat16", len_q=200), {"bias": bias_of(1, dtype="bfloat16", len_q=200)}, unit)
    assert_cluster(plan, 2)
