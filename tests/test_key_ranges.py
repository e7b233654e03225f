"""Masks that are ranges of keys: what they mean on NumPy and in kernels, and what they are refused with."""

import numpy
import pytest
from hand_scores import Grid
from score_calls import GRID, TALL, Call, blocks, ends, normal, same_bits, seen_in_ranges, strided, truths
from score_kernels import GRID as WHOLE
from score_kernels import HEADS, LEN_KV, LEN_Q, inputs, judged
from thinned import thinned

from cupy_flash import KeyRanges, UnsupportedError, attention, attention_vjp, plan_attention, plan_attention_backward
from cupy_flash.machine import host

pytestmark = pytest.mark.filterwarnings("error")

# Of GRID: (2,), 6 heads, 13 queries, 21 keys.
SHAPES = [
    *((), (1, 1), (13, 1), (1, 3), (13, 3), (6, 1, 2), (6, 13, 1), (1, 13, 8), (2, 1, 1, 2), (2, 1, 13, 2), (2, 6, 13, 2)),
    *((1, 1, 1, 1), (1, 6, 13, 1)),
]


# What they mean


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranges_of_every_shape(shape):
    call = Call(GRID).ranges(ends(*shape, keys=21), ends(*shape, keys=21, seed=1))
    assert call.options["mask"].start.shape == shape
    with blocks(8, 16):
        call.check()


@pytest.mark.parametrize("start, stop", [((13, 1), (2, 1, 1, 3)), ((), (13, 2)), ((6, 1, 2), (1, 1)), ((13, 1), ())], ids=str)
def test_start_and_stop_of_different_shapes(start, stop):
    Call(GRID).ranges(ends(*start, keys=21), ends(*stop, keys=21, seed=1)).check()


@pytest.mark.parametrize("batch", [(2, 3), (2, 1), (1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("given", ["last", "all"])
def test_two_batch_axes(batch, given):
    shape = (*(batch if given == "all" else batch[1:]), 1, 21, 2)
    Call(TALL, broadcast=True).ranges(ends(*shape, keys=13), ends(*shape, keys=13, seed=1)).check()


def test_three_batch_axes():
    grid = Grid.of((2, 3, 2), 1, 1, 5, 7)
    Call(grid).ranges(ends(2, 3, 2, 1, 5, 2, keys=7), ends(2, 3, 2, 1, 5, 2, keys=7, seed=1)).check()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_every_size(dtype):
    start, stop = (abs(ends(6, 13, 2, keys=21, seed=seed)).astype(dtype) for seed in (0, 1))
    Call(GRID).ranges(strided(start), strided(stop)).check()


def test_numbers_are_a_range_of_all_queries():
    q, k, v = Call(GRID).inputs()
    expected = attention(q, k[..., 3:17, :], v[..., 3:17, :])
    for start, stop in ((3, 17), (numpy.int64(3), numpy.array(17)), (numpy.array([[3]]), 17), (numpy.full((1,) * 4, 3), 17)):
        assert abs(attention(q, k, v, mask=KeyRanges(start, stop)) - expected).max() < 1e-14
    same_bits(attention(q, k, v, mask=KeyRanges(-(2**31), 2**31 - 1)), attention(q, k, v, mask=numpy.ones((1, 1), bool)))


@pytest.mark.parametrize("start, stop", [(5, 5), (9, 3), (21, 40), (-7, 0), (2**31 - 1, -(2**31))])
def test_empty_ranges(start, stop):
    q, k, v = Call(GRID).inputs()
    out, lse = attention(q, k, v, mask=KeyRanges(start, stop), return_lse=True)
    assert (out == 0).all() and numpy.isneginf(lse).all()
    both = KeyRanges(numpy.array([[start, 2]]), numpy.array([[stop, 4]]))
    same_bits(attention(q, k, v, mask=both), attention(q, k, v, mask=KeyRanges(2, 4)))


def test_overlapping_ranges_count_once():
    q, k, v = Call(GRID).inputs()
    thrice = KeyRanges(numpy.array([[4, 2, 4]]), numpy.array([[9, 6, 9]]))
    same_bits(attention(q, k, v, mask=thrice), attention(q, k, v, mask=KeyRanges(2, 9)))


def test_with_everything_else():
    call = Call(GRID, "float32").ranges(ends(2, 1, 13, 3, keys=21), ends(2, 1, 13, 3, keys=21, seed=1))
    call.expression("shared_heads").band(True, (9, None)).both(bias=normal(13, 21, dtype="float32")).dropout(0.2, 3)
    call.check()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_axes_have_one_order(layout):
    call = Call(GRID).ranges(ends(2, 6, 13, 2, keys=21), ends(2, 6, 13, 2, keys=21, seed=1))
    call.options["layout"] = layout
    call.check()


def test_no_queries_no_keys_no_batch():
    x = numpy.ones((3, 4, 0, 8))
    assert attention(x, x, x, mask=KeyRanges(numpy.zeros((0, 2), int), numpy.zeros((3, 1, 0, 2), int))).shape == (3, 4, 0, 8)
    q = numpy.ones((0, 4, 5, 8))
    assert attention(q, q, q, mask=KeyRanges(0, numpy.zeros((0, 1, 5, 2), int))).shape == q.shape
    out = attention(numpy.ones((2, 8)), numpy.ones((0, 8)), numpy.ones((0, 8)), mask=KeyRanges(0, numpy.ones((2, 1), int)))
    assert (out == 0).all()


class Foreign:
    """An array of a library that this package does not know."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def test_arrays_of_other_libraries():
    q, k, v = Call(GRID).inputs()
    start, stop = ends(13, 2, keys=21), ends(13, 2, keys=21, seed=1)
    same_bits(attention(q, k, v, mask=KeyRanges(Foreign(start), Foreign(stop))), attention(q, k, v, mask=KeyRanges(start, stop)))


# In kernels


@pytest.fixture(params=thinned(host.SCHEDULES, first=1))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


KINDS = {("75", "float16"): ("fwd_v2", "bwd_v2"), ("90a", "bfloat16"): ("fwd_hopper", "bwd_hopper")}


@pytest.mark.parametrize("kind", thinned(KINDS), ids="-".join)
@pytest.mark.parametrize("shape", thinned([(2, HEADS, LEN_Q, 3), (LEN_Q, 2)]), ids=str)
def test_on_kernels(kind, shape, schedule):
    arch, dtype = kind
    start, stop = ends(*shape, keys=LEN_KV), ends(*shape, keys=LEN_KV, seed=1)
    hand = {"seen": seen_in_ranges(WHOLE, start, stop), "last_key": LEN_KV - LEN_Q}
    options = {"mask": KeyRanges(start.astype(numpy.int32), strided(stop)), "causal": True}
    forward, backward = judged(dtype, options, hand, {"backend": "host", "arch": arch})
    assert (forward.file, backward.file) == KINDS[kind] and forward.config.MASKED_PAIRS


def test_other_ranges_compile_nothing():
    q, k, v, _ = inputs("float16")
    start, stop = ends(LEN_Q, 2, keys=LEN_KV), ends(LEN_Q, 2, keys=LEN_KV, seed=1)
    plan = plan_attention(q, k, v, backend="host", mask=KeyRanges(start, stop))
    shorter = plan_attention(q[:, :, 1:], k, v, backend="host", mask=KeyRanges(start[1:], stop[1:]))
    assert shorter.kernel == plan.kernel
    out = plan(q, k, v, mask=KeyRanges(start, stop))
    assert (plan(q, k, v, mask=KeyRanges(start - 9, stop)) != out).any()
    same_bits(plan(q, k, v, mask=KeyRanges(start, stop)), out)
    numbers = plan_attention(q, k, v, backend="host", mask=KeyRanges(0, 9))
    assert (numbers(q, k, v, mask=KeyRanges(0, 9)) != numbers(q, k, v, mask=KeyRanges(2, 90))).any()
    assert numbers.kernel == plan_attention(q, k, v, backend="host", mask=KeyRanges(4, 7)).kernel != plan.kernel


def test_kernels_take_four_axes():
    q = numpy.ones((2, 3, 4, 8, 16), numpy.float16)
    ranges = numpy.ones((2, 3, 1, 8, 2), numpy.int32)  # the axis of heads is no axis
    assert plan_attention(q, q, q, backend="host", mask=KeyRanges(0, ranges)).kernel.config.MASKED_PAIRS
    with pytest.raises(UnsupportedError, match=r"^mask.stop: expected at most 4 axes for kernels, got shape \(2, 3, 4, 8, 2\)$"):
        plan_attention(q, q, q, backend="host", mask=KeyRanges(0, numpy.ones((2, 3, 4, 8, 2), numpy.int32)))


def test_they_are_two_of_the_arrays_of_kernels():
    q = numpy.ones((4, 8, 16), numpy.float16)
    arrays = {f"a{i}": numpy.ones(4, numpy.float32) for i in range(5)}
    text = " + ".join(f"{name}[h]" for name in arrays)
    with pytest.raises(UnsupportedError, match=r"^arrays: expected at most 6 of them for kernels, got 7"):
        plan_attention(q, q, q, backend="host", mask=KeyRanges(0, 3), score=text, arrays=arrays)


# Plans


def test_plans_take_other_ranges():
    call = Call(GRID)
    q, k, v = call.inputs()
    start, stop = ends(2, 1, 13, 2, keys=21), ends(2, 1, 13, 2, keys=21, seed=1)
    mask = KeyRanges(start, stop)
    plan = plan_attention(q, k, v, mask=mask, score=lambda score, t: score * t, arrays={"t": 2.0})
    first, second = (f"mask.start[b, q_idx, {r}] <= kv_idx and kv_idx < mask.stop[b, q_idx, {r}]" for r in (0, 1))
    assert f"  mask: {first} or {second}\n" in str(plan) and "unless mask hides them" in str(plan)
    again = KeyRanges(start - 1, stop + 1)
    options = {"score": "score * t", "arrays": {"t": 2.0}}
    same_bits(plan(q, k, v, mask=again, arrays={"t": 2.0}), attention(q, k, v, mask=again, **options))
    with pytest.raises(ValueError, match=r"^mask.start: expected an array, as planned, got None$"):
        plan(q, k, v, arrays={"t": 2.0})
    with pytest.raises(ValueError, match=r"^mask.stop: expected .*\(2, 1, 13, 2\).* got .*\(2, 1, 13, 1\)"):
        plan(q, k, v, mask=KeyRanges(start, stop[..., :1]), arrays={"t": 2.0})
    with pytest.raises(ValueError, match=r"^mask.start: expected None, the plan was made without it, got an array$"):
        plan_attention(q, k, v)(q, k, v, mask=mask)


def test_backward_plans_take_ranges():
    call = Call(GRID).ranges(ends(13, 1, keys=21), ends(13, 1, keys=21, seed=1))
    out, lse, grads = call.run()
    dout, dlse = call.cotangents()
    backward = plan_attention_backward(dout, *call.inputs(), out, lse, dlse=dlse, **call.options)
    for a, b in zip(backward(dout, *call.inputs(), out, lse, dlse=dlse, mask=call.options["mask"]), grads):
        same_bits(a, b)


# What they are refused with

X, K = numpy.ones((2, 3, 8, 16), numpy.float32), numpy.ones((2, 3, 6, 16), numpy.float32)
ROWS = numpy.ones((8, 2), numpy.int32)
BROADCASTS = r"a number or a shape of at least 2 axes that broadcasts to \(..., heads, seq_q, ranges\)"
SHAPE = rf"{BROADCASTS} with \(2, 3, 8\) for all but the last"
COUNT = r"ranges, along the last axis,"
WRONG = [
    (KeyRanges(ROWS.astype(float), ROWS), TypeError, "mask.start: expected integers, got float64$"),
    (KeyRanges(ROWS, ROWS > 0), TypeError, "mask.stop: expected integers, got bool$"),
    (KeyRanges(0, 1.5), TypeError, "mask.stop: expected integers, got float64$"),
    (KeyRanges(0, True), TypeError, "mask.stop: expected integers, got bool$"),
    (KeyRanges(0, None), TypeError, "mask.stop: expected a NumPy or CuPy array or one with DLPack .*, got NoneType$"),
    (KeyRanges([0], ROWS), TypeError, "mask.start: expected .*, got list; numpy.asarray makes an array of one$"),
    (KeyRanges(ROWS[:, 0], ROWS), ValueError, rf"mask.start: expected {SHAPE}, got \(8,\); of one range .* is \(8, 1\)$"),
    (KeyRanges(ROWS, ROWS[0]), ValueError, rf"mask.stop: expected {SHAPE}, got \(2,\)$"),
    (KeyRanges(ROWS[:7], ROWS), ValueError, rf"mask.start: expected {SHAPE}, got \(7, 2\)$"),
    (KeyRanges(ROWS, ROWS[None, None, None]), ValueError, rf"mask.stop: expected {SHAPE}, got \(1, 1, 1, 8, 2\)$"),
    (KeyRanges(ROWS, ROWS.reshape(2, 1, 4, 2)), ValueError, rf"mask.stop: expected {SHAPE}, got \(2, 1, 4, 2\)$"),
    (KeyRanges(ROWS[:, :0], 3), ValueError, rf"mask.start: expected 1 to 8 {COUNT} got shape \(8, 0\)$"),
    (KeyRanges(numpy.ones((8, 9), int), 3), ValueError, rf"mask.start: expected 1 to 8 {COUNT} got shape \(8, 9\)$"),
    (KeyRanges(ROWS, numpy.ones((1, 3), int)), ValueError, f"mask.stop: expected 1 or 2 {COUNT} as mask.start has, got 3$"),
    (KeyRanges(0, 2**31), ValueError, "mask.stop: expected integers of 32 bits, got 2147483648$"),
    (KeyRanges(-(2**31) - 1, 0), ValueError, "mask.start: expected integers of 32 bits, got -2147483649$"),
    (KeyRanges(ROWS, ROWS.astype("i8") + 2**40), ValueError, "mask.stop: expected integers of 32 bits, got 1099511627777$"),
    (KeyRanges(ROWS, ROWS.astype("u4") + 2**31), ValueError, "mask.stop: expected integers of 32 bits, got 2147483649$"),
    (KeyRanges(0, 2**70), (TypeError, ValueError), "mask.stop: expected integers"),
    (KeyRanges(ROWS, ROWS.view("V8")), TypeError, "mask.stop: expected integers, got void"),
    (KeyRanges, ValueError, "mask: expected one of b, h, .* got 'start'"),
]


@pytest.mark.parametrize("mask, kind, message", WRONG)
def test_refusals(mask, kind, message):
    out, lse = numpy.full_like(X, 7), numpy.full(X.shape[:-1], 7, numpy.float32)
    calls = [
        lambda: attention(X, K, K, out=out, lse=lse, mask=mask),
        lambda: plan_attention(X, K, K, mask=mask),
        lambda: attention_vjp(X, K, K, mask=mask),
        lambda: plan_attention_backward(X, X, K, K, X, lse, mask=mask),
    ]
    for call in (calls[0], *calls):  # the second time as the first
        with pytest.raises(kind, match=f"^{message}"):
            call()
    assert (out == 7).all() and (lse == 7).all()


def test_names_of_ranges_are_nobody_elses():
    for name in ("mask.start", "mask.stop"):
        with pytest.raises(ValueError, match=f"^arrays: expected names that are identifiers, got '{name}'$"):
            attention(X, K, K, score="score", arrays={name: ROWS})
    with pytest.raises(ValueError, match=r"^wrt: expected no name, since no score reads a float, got 'mask.start'"):
        attention_vjp(X, K, K, mask=KeyRanges(0, ROWS), wrt="mask.start")


def test_results_lie_apart_from_ranges():
    memory = numpy.ones(1000, numpy.float32)
    out, start = memory[:768].reshape(X.shape), memory.view(numpy.int32)[:16].reshape(8, 2)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from that of mask.start "):
        attention(X, K, K, out=out, mask=KeyRanges(start, 3))


def test_gradients_of_what_no_range_holds_are_zero():
    q, k, v = Call(GRID).inputs()
    seen = truths(13, rate=0.5)
    out, vjp = attention_vjp(q, k, v, mask=KeyRanges(4, numpy.where(seen, 9, 0)[:, None]))
    dq, dk, dv = vjp(numpy.ones_like(out))
    assert (dq[..., ~seen, :] == 0).all() and (dq[..., seen, :] != 0).any()
    for gradient in (dk, dv):
        assert (gradient[..., :4, :] == 0).all() and (gradient[..., 9:, :] == 0).all() and (gradient[..., 4:9, :] != 0).any()
