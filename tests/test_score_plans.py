"""All that comes to scores together on NumPy, the plans of it, and random combinations."""


import numpy
import pytest
from hand_masks import MASKS
from hand_scores import SCORES, Grid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from score_calls import DTYPES, GRID, TALL, Call, blocks, ends, normal, same_bits, strided, truths
from thinned import thinned

from cupy_flash import KeyRanges, attention, attention_backward, attention_vjp, plan_attention, plan_attention_backward
from cupy_flash.call import backward as backward_call
from cupy_flash.call import forward as forward_call

pytestmark = pytest.mark.filterwarnings("error")


# Together


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@DTYPES
def test_everything_at_once(dtype, layout):
    call = Call(GRID, dtype, dim=8, dim_v=4).expression("shared_heads").expression("windows").dropout(0.2, (1, 2))
    call.band(True, (7, None)).both(bias=normal(2, 1, 13, 21, dtype="float32"), sinks=normal(2, 6, dtype="float32"), softcap=4.0)
    if dtype == "float64":
        call.both(bias=call.options["bias"].astype("float64"), sinks=call.options["sinks"].astype("float64"))
    call.both(alibi_slopes=normal(2, 6).astype(dtype) / 8)
    call.options["layout"] = layout
    call.check()


BANDS = [(True, None, 0), ("top_left", None, 0), (False, (3, 2), 0), (True, (4, None), 0)]
BANDS += [("top_left", None, 6), (False, (-1, 1), 5)]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bands(band):
    for grid in (GRID, TALL):
        with blocks(8, 4):
            Call(grid).band(*band).expression("gate").both(softcap=2.0, sinks=normal(grid.shape[-3])).check()
            Call(grid).band(*band).mask(truths(*grid.shape[-2:])).expression("columns").check()


@pytest.mark.parametrize("batch", [(), (1,), (2, 1, 2)], ids=str)
def test_numbers_of_batch_axes(batch):
    grid = Grid.of(batch, 3, 3, 5, 4)
    Call(grid).expression("per_batch").expression("only_prefixes").dropout(0.3, 1).both(bias=normal(5, 4)).check()


def test_inputs_without_an_axis_of_heads():
    call = Call(Grid.of((), 1, 1, 5, 4), flat=True).expression("temperature").mask(truths(5, 4)).dropout(0.3, 1)
    call.both(bias=normal(5, 4), alibi_slopes=normal(1), sinks=normal(1)).check()
    out, _, _ = call.run()
    same_bits(attention(*call.inputs(), layout="bshd", **call.options), out)  # there is nothing to exchange


@pytest.mark.parametrize("shape", [((0,), 2, 1, 5, 4), ((2,), 2, 1, 0, 4), ((2,), 2, 1, 5, 0), ((2,), 0, 0, 5, 4)], ids=str)
def test_empty_axes(shape):
    batch, heads, heads_kv, len_q, len_kv = shape
    pairs = (*batch, heads, len_q, len_kv)
    q, k, v = (normal(*batch, *of, 4) for of in ((heads, len_q), (heads_kv, len_kv), (heads_kv, len_kv)))
    arrays = {"t": normal(heads), "w": normal(len_kv), "doc": numpy.zeros(len_q, int)}
    out, vjp = attention_vjp(
        *(q, k, v),
        **dict(score="score * t[h] + w[kv_idx]", mask="doc[q_idx] == 0", arrays=arrays, bias=normal(*pairs), dropout=0.5, seed=1),
        wrt=("t", "w", "bias"),
    )
    grads = vjp(out)
    assert out.shape == (*batch, heads, len_q, 4) and not out.any()
    for gradient, of in ((grads.dbias, pairs), (grads.darrays["t"], (heads,)), (grads.darrays["w"], (len_kv,))):
        assert gradient.shape == of and not gradient.any()


def test_only_what_wrt_names_is_computed():
    call = Call(GRID).expression("shared_heads").both(bias=normal(13, 21), alibi_slopes=normal(6))
    whole = call.run()[2]
    for wrt in ((), "shift", ("bias",), ["gain", "alibi_slopes"], ("shift", "shift")):
        grads = call.run(wrt)[2]
        names = {wrt} if isinstance(wrt, str) else set(wrt)
        assert grads.darrays.keys() == names & {"gain", "shift"}
        assert (grads.dbias is not None) == ("bias" in names) and (grads.dalibi_slopes is not None) == ("alibi_slopes" in names)
        for a, b in zip(whole, grads):
            same_bits(a, b)
        for name, gradient in grads.darrays.items():
            same_bits(gradient, whole.darrays[name])


def test_the_backward_given_results_is_the_vjp():
    call = Call(GRID).expression("gate").expression("allowed").dropout(0.2, 3).both(bias=normal(6, 13, 21))
    out, lse, grads = call.run()
    dout, dlse = call.cotangents()
    again = attention_backward(dout, *call.inputs(), out, lse, dlse=dlse, wrt=call.wrt, **call.options)
    for a, b in zip((*grads, grads.dbias, *grads.darrays.values()), (*again, again.dbias, *again.darrays.values())):
        same_bits(a, b)


# Plans


def options_of_a_plan(call, value):
    """Options, of which the arrays hold other numbers for other values; shapes and dtypes are the same."""
    arrays = {"t": normal(6) + value, "c": 0.5 + value, "doc": numpy.arange(21) // (value + 4)}
    own = {"bias": normal(13, 21) * value, "alibi_slopes": normal(6) + value, "seed": (value, value), "arrays": arrays}
    return {"score": "score * t[h] + c", "mask": "doc[kv_idx] == doc[q_idx + 8]", "dropout": 0.25, **own}


def test_what_arrays_hold_makes_no_other_plan():
    call = Call(GRID)
    q, k, v = call.inputs()
    dout, _ = call.cotangents()
    for module in (forward_call, backward_call):
        module._prepared.cache_clear()
    plans = {id(plan_attention(q, k, v, **options_of_a_plan(call, value))) for value in range(3)}
    assert len(plans) == 1
    results = []
    for value in range(3):
        out, vjp = attention_vjp(q, k, v, **options_of_a_plan(call, value), wrt=("t", "c", "bias"))
        results.append((out, vjp(dout)))
    assert forward_call._prepared.cache_info().currsize == 2  # one of them with lse
    assert backward_call._prepared.cache_info().currsize == 1
    assert len({out.tobytes() for out, _ in results}) == len({grads.darrays["t"].tobytes() for _, grads in results}) == 3


def test_functions_are_traced_anew_and_planned_once():
    q, k, v = Call(GRID).inputs()

    def scaled(factor):
        return lambda score: score * factor

    plans = [plan_attention(q, k, v, score=scaled(factor)) for factor in (2.0, 2.0, 3.0)]
    assert plans[0] is plans[1] is not plans[2]
    outs = [attention(q, k, v, score=scaled(factor)) for factor in (2.0, 3.0)]
    assert abs(outs[0] - outs[1]).max() > 1e-3


def test_equal_texts_have_equal_problems():
    q, k, v = Call(GRID).inputs()
    texts = "score * 2 + h", " score*2.0+h ", "(score * 2) + h", lambda score, h: score * 2 + h
    problems = {plan_attention(q, k, v, score=text).problem for text in texts}
    assert len(problems) == 1
    assert plan_attention(q, k, v, score="h + score * 2").problem not in problems


def test_the_order_of_a_dict_is_nothing():
    q, k, v = Call(GRID).inputs()
    arrays = {"t": normal(6), "c": 0.5}
    backwards = dict(reversed(arrays.items()))
    assert plan_attention(q, k, v, score="t[h] + c", arrays=arrays) is plan_attention(q, k, v, score="t[h] + c", arrays=backwards)
    same_bits(*(attention(q, k, v, score="score * t[h] + c", arrays=x) for x in (arrays, backwards)))


def test_plans_compute_what_the_functions_do():
    call = Call(GRID)
    q, k, v = call.inputs()
    dout, _ = call.cotangents()
    plan = plan_attention(q, k, v, **options_of_a_plan(call, 0), return_lse=True)
    wrt = ("t", "bias", "alibi_slopes")
    for value in range(2):
        options = options_of_a_plan(call, value)
        given = {name: options[name] for name in ("bias", "alibi_slopes", "seed", "arrays")}
        out, lse = attention(q, k, v, **options, return_lse=True)
        for a, b in zip(plan(q, k, v, **given), (out, lse)):
            same_bits(a, b)
        backward = plan_attention_backward(dout, q, k, v, out, lse, **options_of_a_plan(call, 5), wrt=wrt)
        grads = attention_backward(dout, q, k, v, out, lse, **options, wrt=wrt)
        again = backward(dout, q, k, v, out, lse, **given)
        for a, b in zip((*grads, grads.dbias, *grads.darrays.values()), (*again, again.dbias, *again.darrays.values())):
            same_bits(a, b)


def test_where_a_scalar_or_a_seed_lies_makes_no_other_plan():
    """They are told by their values: any address will do, and any stride."""
    q, k, v = Call(GRID).inputs()
    memory, seeds = numpy.frombuffer(bytearray(64), numpy.uint8).copy(), numpy.arange(8, dtype=numpy.uint64)
    scalars = [numpy.array(0.0), *(memory[at : at + 8].view("f8").reshape(()) for at in (0, 1, 8))]
    options = [
        {"arrays": {"c": c}, "seed": seed}
        for c in scalars
        for seed in (5, seeds[:2], seeds[1:3], seeds[::3][:2], memory[3:19].view("u8"))
    ]
    plans = {id(plan_attention(q, k, v, score="score + c", dropout=0.5, **other)) for other in options}
    assert len(plans) == 1
    plan = plan_attention(q, k, v, score="score + c", dropout=0.5, **options[0])
    for other in options:
        same_bits(plan(q, k, v, **other), attention(q, k, v, score="score + c", dropout=0.5, **other))


def test_plans_print_what_becomes_of_scores():
    q, k, v = Call(GRID).inputs()
    text = str(plan_attention(q, k, v, **options_of_a_plan(None, 1)))
    for part in ("score: score * t[h] + c", "its derivative: t[h]", "with respect to t[h]: score", "mask: doc[kv_idx] == doc["):
        assert part in text
    assert "bias: float64, shape (2, 6, 13, 21), strides (0, 0, 21, 1)" in text and "dropout: leaves out 0." in text


def test_plans_say_that_a_mask_hides_more():
    q, k, v = (numpy.ones((2, 5, 4)) for _ in range(3))
    out, lse = attention(q, k, v, return_lse=True)
    for mask in ("q_idx >= kv_idx", numpy.tri(5, dtype=bool)):
        for plan in (plan_attention(q, k, v, mask=mask), plan_attention_backward(q, q, k, v, out, lse, mask=mask)):
            assert ", unless mask hides them; scale 0.5; " in str(plan) and " FLOPs without mask\n" in str(plan)
    assert "query i sees keys 0 ... 4; scale 0.5; " in str(plan_attention(q, k, v)) and " FLOPs\n" in str(plan_attention(q, k, v))


# Random combinations


@st.composite
def calls(draw):
    """Any options with any others, on lengths around the edges of small tiles."""
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2), (1, 3)]))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    len_q, len_kv = (draw(st.sampled_from((1, 2, 3, 7, 8, 9, 15, 16, 17, 23))) for _ in range(2))
    grid = Grid.of(batch, heads_kv * group, heads_kv, len_q, len_kv)
    heads = heads_kv * group
    dims = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    flat = batch == () and heads == 1 and draw(st.booleans())
    told = {"scale": draw(st.sampled_from((-1.5, 0.0, 0.25, 1.0, 2.0)))} if draw(st.booleans()) else {}
    call = Call(grid, "float64", *dims, draw(st.integers(0, 10**6)), dict(told), dict(told), draw(st.booleans()), flat)

    def maybe():
        return draw(st.integers(0, 2)) == 0

    def shape_of(*axes, least):
        kept = [n if draw(st.booleans()) else 1 for n in axes]
        return tuple(kept[draw(st.integers(0, len(kept) - least)) :])

    def placed(x):
        return draw(st.sampled_from((lambda x: x, strided, lambda x: x[..., ::-1])))(x)

    if maybe():
        call.options["layout"] = draw(st.sampled_from(("bhsd", "bshd")))
        flat = call.flat = False
    if draw(st.booleans()):
        call.expression(draw(st.sampled_from(SCORES)).name)
    kind = draw(st.sampled_from(("none", "text", "array", "ranges")))
    if kind == "text":
        call.expression(draw(st.sampled_from(MASKS)).name)
    if kind == "array":
        shape = shape_of(*grid.shape, least=2)
        call.mask(placed(truths(*shape, rate=draw(st.sampled_from((0.1, 0.6, 0.95))), seed=call.seed)))
    if kind == "ranges":
        ranges = draw(st.integers(1, 3))
        shapes = [(*shape_of(*grid.shape[:-1], least=1), draw(st.sampled_from((1, ranges)))) for _ in range(2)]
        call.ranges(*(placed(ends(*shape, keys=len_kv, seed=call.seed + i)) for i, shape in enumerate(shapes)))
    if maybe():
        bias = call.normal(*shape_of(*grid.shape, least=2))
        bias = numpy.where(call.normal(*bias.shape) > 1.2, -numpy.inf, bias) if draw(st.booleans()) else bias
        call.both(bias=placed(bias))
    if maybe():
        call.both(alibi_slopes=placed(call.normal(*shape_of(*batch, heads, least=1))))
    if maybe():
        call.both(sinks=call.normal(*(draw(st.sampled_from(([], [1], [3])))), heads))
    if maybe():
        call.both(softcap=draw(st.sampled_from((0.5, 3.0, 30.0))))
    if draw(st.booleans()):
        end_of_window = st.none() | st.integers(-1, 9)
        left, right = (None if end == -1 else end for end in (draw(end_of_window), draw(end_of_window)))
        prefix = draw(st.integers(0, 9)) if left is None else 0
        call.band(draw(st.sampled_from((False, True, "top_left"))), (left, right), prefix)
    if maybe():
        seed = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1))
        form = draw(st.sampled_from((tuple, list, lambda pair: numpy.array(pair, numpy.uint64))))
        call.dropout(draw(st.sampled_from((1e-3, 0.25, 0.7))), form(seed), seed)
    wrt = tuple(name for name in call.wrt if draw(st.booleans()))
    return call, wrt, draw(st.sampled_from(((8, 8), (16, 8), (3, 5), (256, 512))))


def check_random(drawn):
    call, wrt, sizes = drawn
    with blocks(*sizes):
        call.check(wrt)


no_health_check = settings(suppress_health_check=list(HealthCheck), database=None, derandomize=True)


@pytest.mark.release
@settings(no_health_check, max_examples=150)
@given(calls())
def test_random_combinations(drawn):
    check_random(drawn)


@pytest.mark.release
@settings(no_health_check, max_examples=2500)
@given(calls())
def test_many_random_combinations(drawn):
    check_random(drawn)


@pytest.mark.parametrize("stride, offset", [(1, "int"), (-1, "int"), (2**28 - 1, "int"), (2**28, "i64"), (-(2**28), "i64")])
def test_places_in_small_arrays_are_computed_in_32_bits(stride, offset):
    q, t = numpy.zeros((1, 9, 16), numpy.float16), numpy.zeros(1, numpy.float32)
    apart = numpy.lib.stride_tricks.as_strided(t, (9,), (4 * stride,))  # eight steps from its first element to its last
    plan = plan_attention(q, q, q, score="score * t[kv_idx]", arrays={"t": apart}, backend="host", arch="80")
    assert f"captured_within<float, float, {offset}, {stride if stride == 1 else 0}>" in plan.kernel.expressions.score


def test_short_strides_are_in_the_text_and_others_are_read():
    """A compiler that knows how far elements are apart needs one address for all; 0 stands for what the kernel is told."""
    q, length = numpy.zeros((1, 9, 16), numpy.float16), 9
    for apart, stated in ((2, 2), (8, 8), (9, 0)):
        start = numpy.zeros((length, apart), numpy.int32)[:, :2]
        plan = plan_attention(q, q, q, mask=KeyRanges(start, start), backend="host", arch="80")
        assert f"captured_within<int, int, int, {stated}, 1>(x, 0, at.element_q(x.q_len), 1)" in plan.kernel.expressions.takes_part


@pytest.mark.parametrize("asked", thinned(["least[kv_idx] % minus[kv_idx] == 0", "least[kv_idx] // minus[kv_idx] != 7"]))
def test_the_least_int_is_divided_by_minus_one(asked):
    """Which ends a process on many CPUs: the quotient has no place in 32 bits."""
    q = numpy.ones((1, 9, 16), numpy.float16)
    arrays = {"least": numpy.full(9, -(2**31), numpy.int32), "minus": numpy.full(9, -1, numpy.int32)}
    plan = plan_attention(q, q, q, mask=asked, arrays=arrays, backend="host", arch="80")
    assert (plan(q, q, q, arrays=arrays) == 1).all()
