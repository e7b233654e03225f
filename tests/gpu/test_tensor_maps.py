"""What only a device can show of tensor maps: that the driver takes them, and that each launch reads its own arrays."""

import threading
from itertools import product

import numpy
import pytest
from thinned import thinned

from cupy_flash import attention, plan_attention
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.plan.tuning import HOPPER

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="needs the TMA of sm_90"
)


def judge(case, inputs, result):
    out, lse = result if case.return_lse else (result, None)
    comparison = compare(out, lse, *inputs, **case.scores)
    assert comparison.ok, comparison.message


def planned(case, inputs, **options):
    """A plan that has to be of the kernel with maps."""
    return plan_attention(*inputs, kernel="fwd_hopper", **case.options, **options)


def same(one, other):
    return all(bool((x.view(numpy.uint8) == y.view(numpy.uint8)).all()) for x, y in zip(one, other))


def test_each_launch_reads_and_writes_its_own_arrays():
    """One plan on several sets of arrays, of which only some change from one launch to the next, without a wait between them."""
    case = Case("float16", 200, 300, heads_q=4, heads_kv=2, batch=(2,), causal=True)
    sets = [[cupy.ascontiguousarray(x) for x in make_inputs(case, cupy, seed)] for seed in range(3)]
    plan = planned(case, sets[0])
    mixed = [(sets[i][0], sets[j][1], sets[k][2]) for i, j, k in numpy.ndindex(3, 3, 3)]
    results = [plan(*inputs) for inputs in mixed + mixed[::-1]]
    for inputs, result, again in zip(mixed, results, results[::-1]):
        judge(case, inputs, result)
        assert same(result, again)


def test_an_address_given_again_is_read_again():
    case = Case("bfloat16", 130, 150, dim=128, heads_q=2)
    q, k, v = (cupy.ascontiguousarray(x) for x in make_inputs(case, cupy))
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], numpy.float32)
    plan = planned(case, (q, k, v), out=out, lse=lse)
    for seed in (1, 2):
        for new, old in zip(make_inputs(case, cupy, seed), (q, k, v)):
            old[...] = new
        judge(case, (q, k, v), plan(q, k, v, out=out, lse=lse))


def test_threads_have_maps_of_their_own():
    case = Case("float16", 200, 200, heads_q=2)
    inputs = [[cupy.ascontiguousarray(x) for x in make_inputs(case, cupy, seed)] for seed in range(8)]
    plan = planned(case, inputs[0])
    expected = [plan(*each) for each in inputs]
    wrong = [None] * len(inputs)

    def work(i):
        found = [plan(*inputs[i]) for _ in range(50)]
        cupy.cuda.get_current_stream().synchronize()
        wrong[i] = sum(not same(result, expected[i]) for result in found)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * len(inputs)


@pytest.mark.parametrize("dim, dim_v", [(8, 8), (16, 40), (40, 16), (72, 72), (104, 64), (136, 120), (200, 248), (256, 8)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_columns_beyond_the_dim_read_as_zeros_and_are_not_written(dim, dim_v, causal):
    """Rows go on behind the last column with NaN, in q, k and v, and with what they held, in out."""
    case = Case("float16", 130, 190, dim=dim, dim_v=dim_v, heads_q=2, batch=(2,), causal=causal, layout="sliced")
    inputs = make_inputs(case, cupy)
    memory = cupy.full((2, 2, 130, dim_v + 16), 77, numpy.float16)
    out = memory[..., 8 : 8 + dim_v]
    judge(case, inputs, planned(case, inputs, out=out)(*inputs, out=out))
    out[...] = 77
    assert bool((memory.astype("f") == 77).all())


@pytest.mark.parametrize("len_q, len_kv", [(1, 1), (1, 500), (63, 65), (127, 129), (193, 257), (500, 3)])
def test_rows_beyond_the_lengths_read_as_zeros_and_are_not_written(len_q, len_kv):
    case = Case("bfloat16", len_q, len_kv, dim=128, heads_q=3, batch=(2,))
    inputs = make_inputs(case, cupy)
    memory = cupy.full((2, 3, len_q + 70, 128), 77, inputs[0].dtype)
    out = memory[:, :, 1:-69]
    judge(case, inputs, planned(case, inputs, out=out)(*inputs, out=out))
    out[...] = 77
    assert bool((memory.astype("f") == 77).all())


SHAPE = (3, 4, 150, 64)
VIEWS = {
    "one batch element for all": lambda x: cupy.broadcast_to(x[:1], SHAPE),
    "one head for all": lambda x: cupy.broadcast_to(x[:, :1], SHAPE),
    "one row for all": lambda x: cupy.broadcast_to(x[:, :, :1], SHAPE),
    "every second row": lambda x: x.repeat(2, axis=2)[:, :, ::2],
    "heads inside": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "batch inside": lambda x: x.transpose(1, 2, 0, 3).copy().transpose(2, 0, 1, 3),
    "columns of more": lambda x: cupy.concatenate([cupy.full_like(x, numpy.nan), x], axis=-1)[..., 64:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("moved", ["q", "k", "v"])
def test_views_are_read_in_place(moved, view):
    """With the bits of a contiguous copy: strides of 0 are taken by the hardware as they are."""
    case = Case("float16", 150, 150, heads_q=4, batch=(3,), causal=True)
    inputs = dict(zip("qkv", (cupy.ascontiguousarray(x) for x in make_inputs(case, cupy))))
    inputs[moved] = VIEWS[view](inputs[moved])
    result = planned(case, inputs.values())(*inputs.values())
    judge(case, tuple(inputs.values()), result)
    copies = [cupy.ascontiguousarray(x) for x in inputs.values()]
    for found, expected in zip(result, planned(case, copies)(*copies)):
        assert same((cupy.ascontiguousarray(found),), (expected,))


def test_two_batch_axes_that_do_not_merge():
    case = Case("float16", 70, 90, heads_q=2, batch=(2, 3))
    q, k, v = make_inputs(case, cupy)
    k, v = (cupy.broadcast_to(x[:, :1], x.shape) for x in (k, v))
    judge(case, (q, k, v), planned(case, (q, k, v))(q, k, v))


def test_arrays_without_a_map_are_computed_without():
    case = Case("float16", 70, 90, heads_q=2, dim=36)
    inputs = make_inputs(case, cupy)
    plan = plan_attention(*inputs, **case.options)
    assert plan.kernel.file == "fwd_v2" and "no TMA: rows of q start 72 bytes apart" in str(plan)
    judge(case, inputs, attention(*inputs, **case.options))


MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (150, 70)}, "short window": {"window": (3, 0)}}


def name_of(case):
    row, pad = case
    return f"{row.width}-{row.tile_q}x{row.tile_kv}-{row.stages}k{'-line' * row.pingpong}-{pad}"


@pytest.mark.parametrize("case", thinned(list(product(HOPPER, (0, 2, 4, 7, 8)))), ids=name_of)
def test_every_tile_of_the_table(case, only_row):
    """More query tiles than blocks, warpgroups that see nothing of some key tiles, and out in rows with room between them."""
    row, pad = case
    only_row("fwd_hopper", row)
    rng = cupy.random.RandomState(15)
    width = row.width_v or row.width
    for (name, options), (len_q, len_kv) in product(MASKS.items(), ((1000, 1500), (200, 4000))):
        q, k, v = (rng.standard_normal((40, n, width), "f").astype("e")[..., : width - pad] for n in (len_q, len_kv, len_kv))
        room = cupy.full((40, len_q, width), numpy.nan, "e")
        out = room[..., : width - pad]
        plan = plan_attention(q, k, v, out=out, **options)
        c, p = plan.kernel.config, plan.problem
        knobs = ("tile_q", "tile_kv", "stages_q", "stages", "stages_v", "pingpong")
        assert all(getattr(c, knob.upper()) == getattr(row, knob) for knob in knobs)
        copied, staged = {0: 16, 2: 4, 4: 8, 7: 0, 8: 16}[pad], row.tma_store_out and pad % 8 == 0
        assert copied == c.COPY_BYTES and staged == c.TMA_STORE_OUT
        comparison = compare(plan(q, k, v, out=out), None, q, k, v, scale=p.scale, first_key=p.mask.left, last_key=p.mask.right)
        assert comparison.ok, f"{name}: {comparison.message}"
        assert cupy.isnan(room[..., width - pad :]).all()
