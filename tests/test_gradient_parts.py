"""Float32 gradients on sm_90a by products of float16: q, k, v and dout, then P and dS, are two numbers each."""

import numpy
import pytest
from later_heads import slow_down
from test_fp16_parts import six_arrays
from thinned import quick, thinned
from whole_groups import never_split

from cupy_flash import UnsupportedError, attention, attention_vjp, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs, make_sinks
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.machine import host
from cupy_flash.machine.host import SCHEDULES
from cupy_flash.plan import grouping
from cupy_flash.plan.gradient_parts import MOST_DIMS

HOST = {"backend": "host", "arch": "90a"}
KERNEL, RESULTS = "bwd_hopper_parts", ("dq", "dk", "dv")
CAUSAL = Case("float32", 257, 257, heads_q=4, heads_kv=2, causal=True)
CASES = (
    CAUSAL,
    Case("float32", 200, 330, heads_q=2, heads_kv=1, batch=(2,)),
    Case("float32", 129, 260, dim=128, heads_q=2, heads_kv=2, causal=True),
    Case("float32", 193, 131, dim=128, causal=True),  # the first rows see nothing
    Case("float32", 140, 210, dim=32, heads_q=2, causal="top_left"),  # nobody sees the last keys
    Case("float32", 300, 300, heads_q=2, heads_kv=1, window=(70, 9)),
    Case("float32", 190, 260, dim=128, causal=True, prefix=50),
    Case("float32", 101, 147, dim=36, dim_v=100, batch=(3,), causal=True, layout="sliced"),
    Case("float32", 101, 70, dim=100, heads_q=4, heads_kv=1),
    Case("float32", 90, 150, dim=40, dim_v=96, heads_q=2, layout="bshd"),
    Case("float32", 90, 150, dim=96, dim_v=40, heads_q=2, causal=True),
    Case("float32", 130, 200, dim=18, dim_v=128, layout="odd_offset"),
    Case("float32", 130, 90, dim=17, dim_v=95, layout="odd_offset"),
    Case("float32", 70, 65, dim=1, dim_v=3),
    Case("float32", 90, 70, batch=(2, 3)),
    Case("float32", 200, 5, heads_q=3, batch=()),
    Case("float32", 1, 140, heads_q=2, causal=True),
    Case("float32", 65, 129, dim=128, heads_q=2, causal=True),
    Case("float32", 100, 100, scale=3.0, layout="transposed"),
    Case("float32", 100, 130, dim=128, scale=-0.25, causal=True),
    Case("float32", 70, 90, scale=2000.0),
    Case("float32", 150, 140, dim=40, heads_q=2, softcap=3.0, causal=True, values="large"),
    Case("float32", 100, 140, dim=128, softcap=30.0),
    Case("float32", 150, 150, heads_q=2, causal=True, sinks=1),
    Case("float32", 90, 130, dim=128, heads_q=2, heads_kv=1, batch=(2,), sinks=3),
)
OFTEN, GROUPS = [CASES[i] for i in (0, 12, 16, 22, 24)], [(CASES[i], way) for i in (0, 8) for way in (False, True)]


def operands(case, of_lse=True):
    """All that a backward takes of a case, by name; its results go into memory full of NaN."""
    q, k, v = make_inputs(case)
    dout, dlse = make_cotangents(case)
    sinks = {} if case.sinks == 0 else {"sinks": make_sinks(case)}
    out, lse = attention(q, k, v, **asked_of(case), **sinks, return_lse=True)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse} | sinks | fresh(q, k, v)
    return given | {"dlse": dlse} if of_lse else given


def fresh(*inputs):
    return {name: numpy.full(x.shape, numpy.nan, x.dtype) for name, x in zip(RESULTS, inputs)}


def asked_of(case):
    return {name: value for name, value in case.options.items() if name != "return_lse"}


def planned(given, asked, options=HOST, kernel=KERNEL):
    plan = plan_attention_backward(**given, **asked, **options, kernel=kernel)
    c = plan.kernel.config
    if kernel == KERNEL:
        assert (plan.kernel.file, c.FP16_PARTS, c.DTYPE, c.FLOAT32_RESULTS) == (KERNEL, 2, "FLOAT16", True)
    return plan


def computed(given, asked, **options):
    """The gradients, by a workspace full of NaN, in memory of their own."""
    plan = planned(given, asked, HOST | options)
    results = fresh(*(given[name] for name in "qkv"))
    return plan(**given | results, workspace=numpy.full(plan.workspace_bytes, 255, numpy.uint8))


def judge(case, given, gradients):
    told = {name: given.get(name) for name in ("dout", "q", "k", "v", "dlse")}
    judged = compare_gradients(gradients, **told, precision=case.precision, **case.meaning())
    assert judged.ok, judged.message


def simple(q, k, v, dout, **asked):
    """What a backward takes, with results of a forward in float64 that are rounded once; and the true gradients."""
    (out, lse), vjp = attention_vjp(*(x.astype(numpy.float64) for x in (q, k, v)), **asked, return_lse=True)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out.astype(numpy.float32), "lse": lse.astype(numpy.float32)}
    return given, vjp(dout.astype(numpy.float64))


def drawn(heads, heads_kv, len_q, len_kv, dim, dim_v=None, seed=0):
    rng, dim_v = numpy.random.default_rng(seed), dim_v or dim
    shapes = (heads, len_q, dim), (heads_kv, len_kv, dim), (heads_kv, len_kv, dim_v), (heads, len_q, dim_v)
    return [rng.standard_normal((1, *shape), numpy.float32) for shape in shapes]


def rms(x):
    return numpy.sqrt(numpy.mean(numpy.square(x, dtype=numpy.float64)))


def same_bits(found, expected):
    for x, y in zip(found, expected, strict=True):
        numpy.testing.assert_array_equal(x, y)


@pytest.fixture
def one_block_for_a_group(planned_anew, monkeypatch):
    never_split(monkeypatch)


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, first=1))
@pytest.mark.parametrize("case", quick(CASES, *OFTEN), ids=str)
def test_as_right_as_float32(case, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    given = operands(case)
    plan = planned(given, asked_of(case))
    judge(case, given, plan(**given, workspace=numpy.full(plan.workspace_bytes, 255, numpy.uint8)))


@pytest.mark.parametrize("case, deterministic", quick(GROUPS, GROUPS[1], spread=True), ids=str)
def test_one_block_sums_over_the_heads_of_a_group(case, deterministic, one_block_for_a_group):
    given = operands(case)
    plan = planned(given, asked_of(case) | {"deterministic": deterministic})
    assert "dk_accum" not in plan.workspace.names
    judge(case, given, computed(given, asked_of(case), deterministic=deterministic))


@pytest.mark.parametrize("dim", thinned([40, 128]))
def test_an_idle_warp_makes_sums_of_later_heads_zero(dim, made_ahead, monkeypatch):
    """All blocks at once, and it takes long: what is added before that is lost."""
    monkeypatch.setattr(grouping, "RUNNING", 0)  # of the next group of heads
    case = Case("float32", 100, 90, dim=dim, heads_q=8, causal=True)
    given = operands(case)
    plan = planned(given, asked_of(case))
    assert plan.kernel.config.ZEROS_AHEAD
    slow_down(monkeypatch, plan, "tile/dq_protocol.cuh", "  store_repeated<ZEROS>(", "")
    judge(case, given, computed(given, asked_of(case)))


ERRORS = [((2, 1, 257, 257, 64), {"causal": True}), ((1, 1, 150, 300, 128), {}), ((2, 2, 130, 200, 36, 100), {"window": (70, 9)})]
ERRORS, POWERS = [*ERRORS, ((1, 1, 130, 200, 64), {"scale": 1.0})], [(40, -60, 90), (-60, 90, -100), (20, -30, -50), (-50, 40, -60)]


@pytest.mark.parametrize("shapes, asked", quick(ERRORS, ERRORS[0], ERRORS[3], spread=True), ids=str)
def test_errors_are_those_of_three_products_of_tf32(shapes, asked):
    """A product leaves out what both low parts make, 2^-22 of it at most, where one product of 11 bits leaves out 2^-11."""
    given, truth = simple(*drawn(*shapes), **asked)
    plans = planned(given, asked), planned(given, asked, kernel="bwd_v2")
    for own, other, exact in zip(*(plan(**given) for plan in plans), truth):
        assert rms(own - exact) < 3 * rms(other - exact) + 2**-22 * rms(exact)


@pytest.mark.parametrize("e, f, g", quick(POWERS, POWERS[1], spread=True))
def test_powers_of_two_are_the_scale_s_alone(e, f, g):
    """A head takes the exponent of its largest element, a tile that of its largest dS: bits are the same wherever they lie."""
    asked = {"causal": True}
    given, _ = simple(*drawn(4, 2, 257, 257, 64), **asked)
    dq, dk, dv = computed(given, asked, deterministic=True)
    exponents = {"q": e, "k": -e, "v": f, "dout": g, "out": f, "lse": 0}
    moved = computed({name: numpy.ldexp(x, exponents[name]) for name, x in given.items()}, asked, deterministic=True)
    same_bits(moved, (numpy.ldexp(dq, f + g - e), numpy.ldexp(dk, f + g + e), numpy.ldexp(dv, g)))


def test_heads_have_scales_of_their_own():
    """A head whose numbers are large takes no bits from others."""
    asked = {"causal": True}
    q, k, v, dout = drawn(4, 2, 130, 257, 64)
    before = computed(simple(q, k, v, dout, **asked)[0], asked, deterministic=True)
    dout[:, 2:] *= 2.0**50
    v[:, 1] *= 2.0**30
    k[:, 1] *= 2.0**-40
    changed, truth = simple(q, k, v, dout, **asked)
    found = computed(changed, asked, deterministic=True)
    for x, y, exact, heads in zip(found, before, truth, (2, 1, 1)):
        numpy.testing.assert_array_equal(x[:, :heads], y[:, :heads])
        assert rms(x[:, heads:] - exact[:, heads:]) < 2**-20 * rms(exact[:, heads:])


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_an_outlier_takes_no_bits_from_its_head(name):
    """In a row that nobody has looked at when the exponent of the head was guessed."""
    arrays = dict(zip(("q", "k", "v", "dout"), drawn(2, 2, 200, 200, 64)))
    arrays |= {"q": arrays["q"] / 16, "k": arrays["k"] / 16}
    arrays[name][0, 0, 5, 3] = 50.0 if name in ("q", "k") else 2.0**12
    given, truth = simple(**arrays)
    for x, exact in zip(computed(given, {}), truth):
        assert rms((x - exact)[:, :, 6:]) < 2**-19 * rms(exact[:, :, 6:])


@pytest.mark.parametrize("together", [False, True])
def test_heads_of_a_group_have_scales_of_their_own(together, request):
    """Gradients of keys are sums of products, each with the factors of its own query head."""
    if together:
        request.getfixturevalue("one_block_for_a_group")
    q, k, v, dout = drawn(4, 1, 130, 200, 64)
    e = numpy.array([0, -10, -3, -6])[:, None, None]
    given, truth = simple(numpy.ldexp(q, e), k, v, numpy.ldexp(dout, -e))
    dq, dk, dv = computed(given, {})
    for head in range(4):
        assert rms(dq[:, head] - truth[0][:, head]) < 2**-20 * rms(truth[0][:, head])
    assert rms(dk - truth[1]) < 2**-20 * rms(truth[1]) and rms(dv - truth[2]) < 2**-20 * rms(truth[2])


@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_of_ds_have_exponents_of_their_own(dim):
    """Query tiles with dout 2^-20 of others have the bits they have beside equals, if parts so small hold it: it has 4 bits."""
    q, k, v, _ = drawn(1, 1, 256, 200, dim)
    dout = numpy.random.default_rng(1).integers(-8, 9, (1, 1, 256, dim)).astype(numpy.float32)
    alone = computed(simple(q, k, v, dout)[0], {}, deterministic=True)
    for tile in (slice(0, 64), slice(128, 192)):
        some = dout.copy()
        some[..., tile, :] *= 2.0**-20
        given, truth = simple(q, k, v, some)
        dq, dk, dv = computed(given, {}, deterministic=True)
        expected = alone[0].copy()
        expected[..., tile, :] *= 2.0**-20
        numpy.testing.assert_array_equal(dq, expected)
        assert rms(dk - truth[1]) < 2**-20 * rms(truth[1]) and rms(dv - truth[2]) < 2**-20 * rms(truth[2])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("of_q, of_k", [(0, 1), (1, 0), (0, 2.0**-12), (0, 0), (2.0**-70, 2.0**-70)])
def test_heads_of_zeros(of_q, of_k, causal):
    """As those of layers that begin with zeros: every query has the mean of what it sees, and dv is that of dout."""
    q, k, v, dout = drawn(2, 1, 100, 100, 64)
    given, truth = simple(q * numpy.float32(of_q), k * numpy.float32(of_k), v, dout, causal=causal)
    for x, exact in zip(computed(given, {"causal": causal}), truth):
        assert rms(x - exact) <= 2**-20 * rms(exact)


def strange(name, place, value):
    """What a backward takes where one element is not finite, with what a forward makes of it."""
    arrays = dict(zip(("q", "k", "v", "dout"), drawn(4, 2, 200, 200, 64)))
    arrays[name][place] = value
    out, lse = attention(*(arrays[x] for x in "qkv"), causal=True, return_lse=True)
    return {**arrays, "out": out, "lse": lse}


STRANGE = {"q": (0, 2, 70, 3), "k": (0, 1, 100, 3), "v": (0, 1, 100, 5), "dout": (0, 2, 70, 5)}
NOT_FINITE = [(name, numpy.nan) for name in STRANGE] + [(name, numpy.inf) for name in ("v", "dout")]


@pytest.mark.parametrize("name, value", quick(NOT_FINITE, *NOT_FINITE[1:5:2], NOT_FINITE[4], spread=True))
def test_what_is_not_finite_stays_where_it_is(name, value):
    """As by bwd_v2: in no other head, and in no row of dq that does not see it. Finite rows of its tile keep their accuracy."""
    asked = {"causal": True}
    usual = computed(strange(name, STRANGE[name], 0.5), asked, deterministic=True)
    given = strange(name, STRANGE[name], value)
    found = computed(given, asked, deterministic=True)
    by_v2 = planned(given, asked, kernel="bwd_v2")(**given)
    for own, other, before, heads in zip(found, by_v2, usual, (2, 1, 1)):
        numpy.testing.assert_array_equal(numpy.isfinite(own), numpy.isfinite(other))
        numpy.testing.assert_array_equal(own[:, :heads], before[:, :heads])
        finite = numpy.isfinite(own)
        numpy.testing.assert_allclose(own[finite], other[finite], rtol=0, atol=2.0**-16)
    rows = numpy.isfinite(found[0]).all(-1)
    seen_from = 64 if name == "k" else STRANGE[name][2]  # keys that are not numbers are multiplied by the zeros of their tile
    assert rows[0, 2:, :seen_from].all() and not rows[0, 2, STRANGE[name][2]]


@pytest.mark.parametrize("case", thinned([CASES[0], CASES[7]], first=1), ids=str)
def test_any_strides(case):
    """Where elements of inputs lie matters to what makes the parts alone: the bits are the same."""
    given = {name: x for name, x in operands(case).items() if name not in RESULTS}
    asked = asked_of(case)
    expected = computed(given | fresh(*(given[name] for name in "qkv")), asked, deterministic=True)
    backwards, gaps = {}, {}
    for name, x in given.items():
        backwards[name] = numpy.flip(numpy.flip(x).copy())
        room = numpy.full((*x.shape[:-1], 2 * x.shape[-1] + 1), numpy.nan, numpy.float32)
        room[..., 1::2] = x
        gaps[name] = room[..., 1::2]
    for seen in ({name: numpy.asfortranarray(x) for name, x in given.items()}, backwards, gaps):
        same_bits(computed(seen | fresh(*(given[name] for name in "qkv")), asked, deterministic=True), expected)


def test_results_are_written_and_nothing_else():
    given = operands(CAUSAL)
    expected = computed(given, {"causal": True}, deterministic=True)
    rooms = [numpy.full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 5), 77, numpy.float32) for x in expected]
    results = {name: room[..., 1:-2, 2:-3] for name, room in zip(RESULTS, rooms)}
    plan = planned(given | results, {"causal": True, "deterministic": True})
    same_bits(plan(**given | results), expected)
    for room, x in zip(rooms, results.values()):
        x[...] = 77
        assert (room == 77).all()


@pytest.mark.parametrize("name", RESULTS)
def test_gradients_whose_elements_are_apart_are_bwd_v2(name):
    given = operands(Case("float32", 512, 512, heads_q=16))
    assert plan_attention_backward(**given, **HOST).kernel.file == KERNEL
    given[name] = numpy.empty((*given[name].shape[:-1], 128), numpy.float32)[..., ::2]
    assert plan_attention_backward(**given, **HOST).kernel.file == "bwd_v2"
    with pytest.raises(UnsupportedError, match=f"got '{KERNEL}': elements of a row of a gradient are apart"):
        planned(given, {})


BROADCAST = {  # q, k, v
    "keys": ((3, 2, 100, 64), (1, 1, 90, 64), (1, 1, 90, 64)),
    "keys, not values": ((3, 2, 100, 64), (1, 2, 90, 64), (3, 2, 90, 64)),
    "queries": ((1, 2, 100, 128), (3, 2, 90, 128), (3, 2, 90, 128)),
    "queries along one axis, keys along the other": ((2, 1, 2, 70, 64), (3, 1, 140, 64), (2, 1, 1, 140, 64)),
}
SUMS = [(name, in_order) for name in BROADCAST for in_order in (False, True)]


@pytest.mark.parametrize("name, deterministic", quick(SUMS, *SUMS[3::3], spread=True))
def test_what_is_broadcast_has_parts_once_and_gradients_that_are_sums(name, deterministic):
    rng = numpy.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape, numpy.float32) for shape in BROADCAST[name])
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dout, dlse = rng.standard_normal(out.shape, numpy.float32), rng.standard_normal(lse.shape, numpy.float32)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse} | fresh(q, k, v)
    asked = {"causal": True, "deterministic": deterministic}
    plan = planned(given, asked)
    parts = dict(plan.workspace.parts)
    assert all(parts[f"{x}_map"] == given[x].nbytes for x in ("q", "k", "v", "dout")) and "fp16_parts" in str(plan)
    told = {"scale": q.shape[-1] ** -0.5, "last_key": k.shape[-2] - q.shape[-2]}
    judged = compare_gradients(computed(given, asked), dout, q, k, v, dlse=dlse, **told)
    assert judged.ok, judged.message


def test_one_row_of_dout_for_all():
    q, k, v, dout = drawn(2, 2, 130, 90, 64)
    given, _ = simple(q, k, v, numpy.ones_like(dout))
    expected = computed(given, {}, deterministic=True)
    same_bits(computed(given | {"dout": numpy.broadcast_to(numpy.float32(1), dout.shape)}, {}, deterministic=True), expected)


@pytest.mark.parametrize("case", quick([CASES[0], CASES[1], CASES[3], CASES[8]], CASES[0], CASES[3]), ids=str)
def test_in_order_bits_are_the_same_however_blocks_run(case, monkeypatch, planned_anew):
    """Without a gradient of lse."""
    given, results = operands(case, of_lse=False), []
    for schedule, blocks in (("eager", 1), ("deferred", 1), ("eager", 3), ("deferred", 3)):
        monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _, blocks=blocks: range(12 * blocks))
        results.append(computed(given, asked_of(case), deterministic=True))
        same_bits(results[-1], results[0])
    judge(case, given, results[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_in_parts(deterministic):
    """Of many on few keys, gradients of which are sums over parts of queries."""
    case = Case("float32", 1024, 77, heads_q=2)
    given = operands(case)
    assert "queries in 4 parts" in str(planned(given, {"deterministic": deterministic}))
    judge(case, given, computed(given, {}, deterministic=deterministic))


NARROW, TWO = (64, 64), {"bias": numpy.zeros((2, 512, 512), "f4"), "alibi_slopes": numpy.ones(2, "f4")}
REFUSED = {
    "six arrays": (six_arrays(512), NARROW, "at most 5 are read"),
    "an expression": ({"score": "score * sigmoid(score)"}, NARROW, "an expression of scores"),
    "two things of wide heads": (TWO, (65, 65), "no registers"),
    "dims of values": ({}, (64, MOST_DIMS + 1), "head dims above 128, for which there are no registers"),
    "head dims": ({}, (MOST_DIMS + 1, 64), "head dims above 128, for which there are no registers"),
    "odd rows of wide heads": ({}, (64, 97), "element by element"),
    "another architecture": ({"arch": "80"}, NARROW, "it is not for sm_80"),
    "16 bits": ({}, NARROW, "only float32 is in parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_bwd_v2(name):
    asked, dims, reason = REFUSED[name]
    q, v = (numpy.ones((1, 2, 512, dim), numpy.float16 if name == "16 bits" else numpy.float32) for dim in dims)
    given, options = (v, q, q, v, v, numpy.zeros(q.shape[:-1], numpy.float32)), HOST | asked
    if name != "16 bits":
        assert plan_attention_backward(*given, **options).kernel.file == "bwd_v2"
    with pytest.raises(UnsupportedError, match=f"got '{KERNEL}': .*{reason}"):
        plan_attention_backward(*given, **options, kernel=KERNEL)


# Measured on an H200, in graphs: microseconds of bwd_v2 and of bwd_hopper_parts, of heads, tokens and dims.
MEASURED = {
    (256, 128, 64): (82, 85), (16, 256, 64): (49, 36), (1, 512, 64): (50, 39), (64, 1024, 64): (860, 345), (64, 64, 64): (25, 28),
    (16, 128, 128): (45, 37), (256, 64, 128): (64, 74), (1, 2048, 128): (137, 68),
    (16, 512, 32): (49, 54), (64, 512, 32): (151, 112),
}  # fmt: skip


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_taken_where_it_takes_less_time(sizes):
    (heads, length, dim), (of_v2, of_parts) = sizes, MEASURED[sizes]
    shape, size = (1, heads, length, dim), 4 * length * dim
    one = numpy.zeros(1, numpy.float32)  # which stands for all, and is never read
    x = numpy.lib.stride_tricks.as_strided(one, shape, (heads * size, size, 4 * dim, 4))
    lse = numpy.lib.stride_tricks.as_strided(one, shape[:-1], (4 * heads * length, 4 * length, 4))
    taken = plan_attention_backward(x, x, x, x, x, lse, **HOST).kernel.file
    assert taken == (KERNEL if of_parts < of_v2 else "bwd_v2")
    assert plan_attention_backward(x, x, x, x, x, lse, backend="host", arch="80").kernel.file == "bwd_v2"
