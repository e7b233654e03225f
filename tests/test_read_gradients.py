"""Gradients of what scores read by kernels, executed on the host: who shares an element, the order of sums, and what is refused."""

import numpy
import pytest
from score_kernels import BATCH, HEADS, HEADS_KV, LEN_KV, LEN_Q, inputs, of_name
from thinned import quick, thinned

from cupy_flash import UnsupportedError, attention, attention_backward, attention_vjp, plan_attention_backward
from cupy_flash.machine import host
from cupy_flash.plan import read_gradients
from cupy_flash.plan.kernel import ADDED_OF_PAIRS
from cupy_flash.problem import read_gradients as problem_read_gradients

# Every way to share an element, of arrays that are read in one order and in any.
ORDERED = {
    "score": "score * g + u[b, q_idx] * score + w[kv_idx, h_kv] + x[kv_idx, q_idx] + y[h, h_kv] + score * z[h, 1] + z[h, 7]",
    "arrays": {
        "g": 0.75,
        "u": (BATCH, LEN_Q),
        "w": (LEN_KV, HEADS_KV),
        "x": (LEN_KV, LEN_Q),
        "y": (HEADS, HEADS_KV),
        "z": (HEADS, 3),
    },
}
COMPUTED = {
    "score": "score + d[abs(kv_idx + 3 - q_idx), h_kv] + r[place[q_idx] + b] * score + c[kv_idx // 9]"
    " + p[q_idx * kv_idx // 50] + s[int(score * 3) + 4, h]",
    "arrays": {
        "d": (40, HEADS_KV),
        "r": (9,),
        "c": (11,),
        "p": (99,),
        "s": (8, HEADS),
        "place": numpy.arange(-3, LEN_Q - 3) % 13 - 2,  # some beyond the ends
    },
}


def normal(*shape, dtype=numpy.float32):
    return numpy.random.default_rng(shape).standard_normal(shape).astype(dtype)


def made(options):
    """Options in which shapes have become arrays."""
    arrays = {name: normal(*x) if isinstance(x, tuple) else x for name, x in options["arrays"].items()}
    return options | {"arrays": arrays}


def planned(given, wrt, arch="80", deterministic=False, **options):
    """A plan for the host, and what it is called with; `given` are q, k, v and dout."""
    q, k, v, dout = given
    out, lse = attention(q, k, v, return_lse=True, **options)
    where = {"backend": "host", "arch": arch, "deterministic": deterministic}
    plan = plan_attention_backward(dout, q, k, v, out, lse, wrt=wrt, **where, **options)
    operands = {name: x for name, x in options.items() if name in ("arrays", "bias", "alibi_slopes", "seed", "sinks")}
    if isinstance(options.get("mask"), numpy.ndarray):
        operands["mask"] = options["mask"]
    return plan, (dout, q, k, v, out, lse), operands


def by_both(given, wrt, arch="80", **options):
    """Gradients on the host and on NumPy by name, and the plan for the host."""
    plan, arrays, operands = planned(given, wrt, arch, **options)
    got, expected = plan(*arrays, **operands), attention_backward(*arrays, wrt=wrt, **options)
    return {name: [of_name(name, x, options)[0] for x in (got, expected)] for name in plan.problem.wrt}, plan


def agree(pairs):
    """Within what float32 makes of sums of thousands of terms of about 1, in another order."""
    for name, (got, expected) in pairs.items():
        assert got.shape == expected.shape and got.dtype == expected.dtype, name
        assert numpy.isfinite(got).all() and abs(expected).max(initial=0) > 0, name
        assert abs(got - expected).max(initial=0) <= 2**-15 * max(abs(expected).max(initial=0), 1), name


@pytest.mark.parametrize("wrt", thinned(["yz", "gwyz", "guwxyz"], keep=3))
def test_sums_in_one_order_are_those_of_numpy(wrt):
    options = made(ORDERED) | {"window": (30, 25)}
    pairs, plan = by_both(inputs("float32"), tuple(wrt), **options)
    agree(pairs)
    assert [kernel.file for kernel in plan.kernels] == ["bwd_v2"] + ["bwd_scores"] * (len(wrt) + 1)
    assert "in any order" not in str(plan) and "gradient of z[h, 7]: sums in one order" in str(plan)
    zeros = pairs["y"][0][:2, 1], pairs["y"][0][2:, 0], pairs["z"][0][:, 0]
    assert not any(x.any() for x in zeros)  # of elements that nobody reads


@pytest.mark.release
def test_sums_of_computed_indices_are_those_of_numpy():
    pairs, plan = by_both(inputs("float32"), tuple("drcps"), **made(COMPUTED), causal=True)
    agree(pairs)
    assert str(plan).count("from which each element gathers its own") == 3
    assert str(plan).count("added to whichever element a pair reads, in any order") == 2


@pytest.mark.parametrize("wrt, read", [("p", "p[q_idx * kv_idx // 50]"), ("s", "s[int(score * 3.0) + 4, h]")])
def test_computed_indices_have_no_order(wrt, read):
    q, k, v, dout = inputs("float32")
    options = made(COMPUTED)
    with pytest.raises(UnsupportedError) as caught:
        planned((q, k, v, dout), wrt, deterministic=True, **options)
    expected = f"deterministic: expected False with wrt {wrt!r}, which the score reads as {read}: "
    assert str(caught.value).startswith(expected) and str(caught.value).endswith("backend='numpy'")
    with pytest.raises(UnsupportedError, match=r"^deterministic: expected False with wrt"):
        attention_vjp(q, k, v, backend="host", wrt=wrt, deterministic=True, **options)  # and not when its function is called
    attention_vjp(q, k, v, wrt=wrt, deterministic=True, **options)  # NumPy adds in one order
    planned((q, k, v, dout), tuple("drc"), deterministic=True, **options)  # and so do kernels here


@pytest.mark.release
@pytest.mark.parametrize("schedule", thinned(host.SCHEDULES))
@pytest.mark.parametrize("arch", thinned(["75", "90a"]))  # of which the first has two key tiles to a query tile
def test_tables_of_distances(arch, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    text = "score + t[where(kv_idx > q_idx, 0, 30) + min(abs(kv_idx - q_idx), 29), h]"
    options = {"score": text, "arrays": {"t": normal(60, HEADS)}}
    pairs, plan = by_both(inputs("float32"), "t", arch, window=(50, 40), **options)
    agree(pairs)
    tiles = plan.kernels[1].config
    assert (2 if arch == "75" else 1) == tiles.TILE_Q // tiles.TILE_KV and "places" in plan.workspace.names
    assert plan.workspace_bytes < 4 * HEADS * 2**20


@pytest.mark.release
def test_large_tables_of_many_places_are_added_to(monkeypatch):
    """Where finding what belongs to an element would take too long, unless one order is asked for."""
    monkeypatch.setattr(problem_read_gradients, "MOST_LOOKED_AT", 0)
    arrays = {"t": normal(61, HEADS), "r": normal(38)}
    options = {"score": "score + t[kv_idx - q_idx + 30, h] + r[q_idx // 2]", "arrays": arrays}
    pairs, plan = by_both(inputs("float32"), ("t", "r"), **options)
    agree(pairs)
    assert str(plan).count("added to whichever element a pair reads, in any order") == 2 and "places" not in plan.workspace.names
    assert "places" in planned(inputs("float32"), ("t", "r"), deterministic=True, **options)[0].workspace.names


DISTANCES = [
    "kv_idx - q_idx",
    "3 - q_idx + kv_idx",
    "abs(q_idx - kv_idx) // 2",
    "int(q_idx <= kv_idx) * q_len",
    "place[q_idx - kv_idx]",
]
NONE = ["q_idx + kv_idx", "q_idx * kv_idx", "2 * kv_idx - q_idx", "kv_idx - abs(q_idx)", "int(q_idx + kv_idx < 3)"]


@pytest.mark.parametrize("index", DISTANCES + NONE)
def test_what_is_seen_to_be_a_distance(index):
    q, k, v, dout = inputs("float32")
    arrays = {"t": normal(20)} | ({"place": numpy.arange(9)} if "place" in index else {})
    options = {"score": f"score + t[{index}]", "arrays": arrays}
    if index in NONE:
        with pytest.raises(UnsupportedError, match=r"^deterministic: expected False"):
            planned((q, k, v, dout), "t", deterministic=True, **options)
    else:
        plan, _, _ = planned((q, k, v, dout), "t", deterministic=True, **options)
        assert ("OF_DISTANCE", "true") in plan.kernels[1].expressions.constants


BIASES = {
    "of heads": (HEADS, LEN_Q, LEN_KV),
    "of batch elements": (2, 1, 1, LEN_Q, LEN_KV),
    "of keys": (3, 1, 1, LEN_KV),
    "of queries, of one batch axis": (2, 1, HEADS, LEN_Q, 1),
    "of everything": (2, 3, HEADS, LEN_Q, LEN_KV),
    "of nothing": (1, 1),
}


def of_two_batch_axes():
    """Inputs of which each lacks a batch axis of the others, at strides of all kinds."""
    q, k, v = (
        normal(2, 1, LEN_Q, HEADS, 24).swapaxes(2, 3),
        normal(1, 3, HEADS_KV, LEN_KV, 24)[..., ::-1, :],
        normal(HEADS_KV, LEN_KV, 24),
    )
    return q, k, v, normal(2, 3, HEADS, LEN_Q, 24)


@pytest.mark.release
@pytest.mark.parametrize("name", quick(BIASES, "of keys"))
def test_biases_of_some_axes(name):
    shape = BIASES[name]
    bias = normal(*shape[::-1], dtype=numpy.float32).T[..., ::-1]
    ((got, expected),) = by_both(of_two_batch_axes(), "bias", bias=bias, causal=True)[0].values()
    assert got.shape == expected.shape == shape and got.dtype == expected.dtype == bias.dtype
    room = 2**-15 + float(numpy.finfo(bias.dtype).eps)
    assert abs(got.astype(float) - expected).max() <= room * max(abs(expected).max(), 1)
    if name == "of nothing":  # one number for all pairs changes nothing
        assert abs(got).max() <= 2**-12


@pytest.mark.release
def test_slopes_of_some_axes():
    for shape in ((HEADS,), (2, 1, HEADS), (3, 1)):
        pairs, _ = by_both(of_two_batch_axes(), "alibi_slopes", alibi_slopes=abs(normal(*shape)) / 20)
        ((got, expected),) = pairs.values()
        assert got.shape == shape and abs(got - expected).max() <= 2**-15 * abs(expected).max()


BEHIND = [("bwd_hopper", 40), ("bwd_v2", 40), ("bwd_hopper_wide", 128), ("bwd_hopper", 128)]


@pytest.mark.release
@pytest.mark.parametrize("behind", thinned(BEHIND, keep=4, first=2), ids=str)
def test_behind_every_backward(behind):
    """Whose statistics of the queries differ: in tiles, and in sign."""
    kernel, dim = behind
    q, k, v, dout = (normal(*x.shape[:-1], dim, dtype=numpy.float16) for x in inputs("float16"))
    options = {"alibi_slopes": abs(normal(HEADS)) / 20}
    out, lse = attention(q, k, v, return_lse=True, **options)
    given = (dout, q, k, v, out, lse)
    plan = plan_attention_backward(*given, wrt="alibi_slopes", backend="host", arch="90a", kernel=kernel, **options)
    assert [made.file for made in plan.kernels] == [kernel, "bwd_scores_hopper"]
    got, expected = plan(*given, **options), attention_backward(*given, wrt="alibi_slopes", **options)
    assert abs(got.dalibi_slopes - expected.dalibi_slopes).max() <= 2**-12 * abs(expected.dalibi_slopes).max()


def repeated():
    """Options with everything that has a gradient besides q, k and v, what to ask for, and a function that gives its bytes."""
    arrays = {"w": normal(LEN_KV, HEADS_KV), "t": normal(40)}
    options = {"score": "score + w[kv_idx, h_kv] + t[abs(kv_idx - q_idx)] * score", "arrays": arrays, "causal": True}
    options |= {"bias": normal(HEADS, LEN_Q, LEN_KV), "alibi_slopes": abs(normal(HEADS)), "sinks": normal(2, HEADS)}

    def bits(grads):
        found = grads.dbias, grads.dalibi_slopes, grads.dsinks, grads.darrays["w"], grads.darrays["t"]
        assert all(x.any() for x in found)
        return [x.tobytes() for x in found]

    return options, ("bias", "alibi_slopes", "w", "t"), bits


@pytest.mark.release  # test_lengths_read_gradients.py asks it of sequences, and test_read_hopper.py of bwd_scores_hopper
@pytest.mark.parametrize("schedule", host.SCHEDULES)
@pytest.mark.parametrize("arch", ["90a", "80"])
def test_sums_repeat(arch, schedule, monkeypatch):
    """Bit by bit, however many blocks run at the same time, and whatever was in the workspace."""
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    options, wrt, bits = repeated()
    plan, given, operands = planned(inputs("float16"), wrt, arch, deterministic=True, **options)
    results = []
    for blocks, poison in ((1, 255), (3, 0), (3, 255)):
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _, blocks=blocks: range(blocks * 12))
        memory = numpy.full(plan.workspace_bytes + 4096, poison, numpy.uint8)
        grads = plan(*given, **operands, workspace=memory[: plan.workspace_bytes])
        assert (memory[plan.workspace_bytes :] == poison).all()
        results.append(bits(grads))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("arch", ["80", pytest.param("90a", marks=pytest.mark.release)])
@pytest.mark.parametrize("causal", thinned([True, False]))
def test_a_block_takes_one_unit_after_the_other(arch, causal, monkeypatch):
    """The bits of as many blocks as units, of which a causal mask leaves some nothing, in memory that was NaN."""
    q, k, v, dout = inputs("float16")
    bias = numpy.random.default_rng(0).standard_normal((BATCH, HEADS, LEN_Q, LEN_KV), numpy.float32)
    out, lse = attention(q, k, v, bias=bias, causal=causal, return_lse=True)
    given, options = (dout, q, k, v, out, lse), {"bias": bias, "causal": causal, "wrt": "bias", "backend": "host", "arch": arch}
    found, blocks = [], []
    for multiprocessors in (10**6, 1):
        monkeypatch.setattr(host, "MULTIPROCESSORS", multiprocessors)
        plan = plan_attention_backward(*given, **options)
        found.append(plan(*given, bias=bias).dbias)
        (launch,) = (launch.on(multiprocessors) for launch in plan.launches if launch.entry == plan.kernels[1].file)
        blocks.append(launch.blocks)
    assert plan.kernels[1].file == ("bwd_scores" if arch == "80" else "bwd_scores_hopper")
    assert blocks[1] == (read_gradients.AT_A_TIME if arch == "80" else read_gradients.OF_HOPPER) < blocks[0]
    numpy.testing.assert_array_equal(*found)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_of_numpy_repeat(dtype):
    options, wrt, bits = repeated()
    q, k, v, dout = inputs(dtype)
    out, lse = attention(q, k, v, return_lse=True, **options)
    results = [bits(attention_backward(dout, q, k, v, out, lse, wrt=wrt, deterministic=True, **options)) for _ in range(2)]
    assert results[0] == results[1]


def test_a_workspace_is_as_large_as_sums_that_blocks_share():
    """And not as a number for each pair, however many batch elements share the bias."""
    q, dout = normal(300, 4, 64, 32), normal(300, 4, 64, 32)
    lse = numpy.zeros((300, 4, 64), numpy.float32)
    plan = plan_attention_backward(dout, q, q, q, q, lse, backend="host", bias=normal(4, 64, 64), wrt="bias")
    sizes = dict(plan.workspace.parts)
    assert sizes["partials"] == 4 * 4 * 64 * 64 * (read_gradients.MOST_BLOCKS // 4)
    blocks = {launch.entry: launch.blocks for launch in plan.launches}
    assert blocks["bwd_scores"] == read_gradients.MOST_BLOCKS and blocks["bwd_scores_add"] == 4 * 64 * 64 // ADDED_OF_PAIRS
    alone = plan_attention_backward(dout, q, q, q, q, lse, backend="host", bias=normal(300, 4, 64, 64), wrt="bias")
    assert "partials" not in alone.workspace.names  # each sum is of one block


@pytest.mark.parametrize("arch, dtype", quick([("90a", "float16"), ("80", "float32")], ("90a", "float16"), spread=True))
def test_few_parts_are_added_up_by_a_warp_and_many_by_a_block(arch, dtype):
    """The gradient of a bias that all batch elements and heads share is the sum of what it would be if each had its own."""
    for batch in (read_gradients.FEW_PARTS // 2, read_gradients.FEW_PARTS // 2 + 1):  # two heads each have a part of the one unit
        q, k, dout = (normal(batch, 2, rows, 16, dtype=dtype) for rows in (20, 27, 20))
        bias, parts = normal(20, 27), 2 * batch
        plan, given, operands = planned((q, k, k, dout), "bias", arch, bias=bias)
        (adding,) = (launch.blocks for launch in plan.launches if launch.entry == f"{plan.kernels[1].file}_add")
        sums, warps = dict(plan.workspace.parts)["partials"] // 4 // parts, plan.kernels[1].config.WARPS
        by_warps = sums // ADDED_OF_PAIRS
        assert adding == (by_warps if parts > read_gradients.FEW_PARTS else -(-by_warps // warps))
        own = attention_backward(*given, bias=numpy.broadcast_to(bias, (batch, 2, 20, 27)), wrt="bias").dbias
        agree({"bias": (plan(*given, **operands).dbias, own.sum((0, 1)))})


@pytest.mark.release
def test_pairs_that_take_no_part_give_nothing():
    q, k, v, dout = inputs("float32")
    bias, mask = normal(HEADS, LEN_Q, LEN_KV), numpy.ones((LEN_Q, LEN_KV), bool)
    mask[:, 17] = mask[40] = False
    plan, given, operands = planned((q, k, v, dout), "bias", bias=bias, mask=mask, causal=True)
    expected = plan(*given, **operands).dbias
    hidden = ~mask | (numpy.arange(LEN_KV) > numpy.arange(LEN_Q)[:, None] + LEN_KV - LEN_Q)
    assert (expected[:, hidden] == 0).all() and expected[:, ~hidden].all()
    k, v, bias = k.copy(), v.copy(), bias.copy()
    v[:, :, 17] = k[:, :, 17] = numpy.nan
    bias[:, hidden] = numpy.nan
    dout, q, _, _, out, lse = given
    grads = plan(dout, q, numpy.nan_to_num(k), v, out, lse, **operands | {"bias": bias})
    assert (grads.dbias[:, mask] == expected[:, mask]).all() and (grads.dbias[:, hidden] == 0).all()


def test_masked_scores_reach_no_sum():
    """Not where elements are shared either: by what is beyond the ends of tiles, or by NaN that the score makes of masked pairs."""
    options = {"score": "score + w[kv_idx] * log(q_idx - kv_idx + 3)", "arrays": {"w": normal(LEN_KV)}, "causal": "top_left"}
    pairs, _ = by_both(inputs("float32"), "w", **options)
    ((got, expected),) = pairs.values()
    assert numpy.isfinite(got).all() and abs(got - expected).max() <= 2**-15 * abs(expected).max()


@pytest.mark.parametrize("axis", thinned(["batch", "heads", "queries", "keys", "elements"], keep=3))
def test_empty_axes(axis):
    batch, heads, len_q, len_kv, size = (
        0 if axis == name else n for name, n in zip(("batch", "heads", "queries", "keys", "elements"), (2, 2, 5, 6, 3))
    )
    q, k, dout = normal(batch, heads, len_q, 8), normal(batch, heads, len_kv, 8), normal(batch, heads, len_q, 8)
    options = {
        "score": "score + t[kv_idx - q_idx] * n",
        "arrays": {"t": normal(size), "n": 2.0},
        "bias": normal(heads, len_q, len_kv),
    }
    plan, given, operands = planned((q, k, k, dout), ("t", "n", "bias"), **options)
    grads = plan(*given, **operands)
    assert grads.dbias.shape == (heads, len_q, len_kv) and grads.darrays["t"].shape == (size,) and grads.darrays["n"].shape == ()
    if axis != "elements":
        assert not grads.dbias.any() and not grads.darrays["t"].any() and grads.darrays["n"] == 0
        assert all(launch.blocks == 0 for launch in plan.launches if launch.entry.startswith("bwd_scores"))


def test_only_what_is_asked_for_is_compiled():
    q, k, v, dout = inputs("float16")
    options = made(ORDERED)
    plans = [planned((q, k, v, dout), wrt, **options)[0] for wrt in ((), "w", ("w", "g"))]
    assert [len(plan.kernels) for plan in plans] == [1, 2, 3]
    assert plans[0].kernel == plans[1].kernel and plans[1].kernels[1] == plans[2].kernels[1]
    others = {name: x + 1 for name, x in options["arrays"].items()}
    shorter = others | {"u": others["u"][:, :70], "x": others["x"][:, :70]}
    again, _, _ = planned((q[:, :, :70], k, v, dout[:, :, :70]), "g", score=options["score"], arrays=shorter)
    assert again.kernels[1] == plans[2].kernels[2]  # other values and lengths compile nothing


def test_traffic_counts_all_kernels():
    options = {"bias": normal(HEADS, LEN_Q, LEN_KV)}
    plan, given, operands = planned(inputs("float16"), "bias", **options)
    without, _, _ = planned(inputs("float16"), (), **options)
    _, traffic = plan.counted(*given, **operands)
    _, least = without.counted(*given, **operands)
    two_products = 2 * 2 * BATCH * HEADS * 128 * 128 * 64  # of whole tiles
    assert traffic.flops == least.flops + two_products and traffic.written_bytes > least.written_bytes + options["bias"].nbytes
