"""Sequences of several lengths by the kernels of a device: right, alone and in batches, in graphs, far apart, again and again."""

import gc

import ml_dtypes
import numpy
import pytest
from lengths_on_machines import (
    Decoding,
    Machine,
    backward,
    drawn,
    expression,
    few_queries,
    forward,
    judge,
    padded_offsets,
    planned,
    replayed,
    rooms_with,
    some_sequences,
    wrong,
)
from ragged import Ragged, assert_same_bits

from cupy_flash import UnsupportedError, attention, attention_backward, plan_attention, plan_attention_backward

cupy = pytest.importorskip("cupy")

DTYPES = {"float16": numpy.float16, "bfloat16": ml_dtypes.bfloat16, "float32": numpy.float32}
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
BATCHES = {
    "edges": (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 257),
    "primes": (3, 5, 7, 31, 61, 97, 127, 251, 509),
    "one long": (*(1, 0, 2, 9, 3) * 4, 1100, *(5, 1) * 8),
    "one": (333,),
}
ROWS = [("packed", "packed"), ("roomy", "roomy"), ("padded", "padded")]  # keys have rows of their own
CACHES = [("packed", "pages"), ("padded", "cache")]  # or are in one, for which a device may have another kernel
KINDS = ROWS + CACHES
OPTIONS = [
    {"causal": True},
    {},
    {"window": (70, 9), "causal": "top_left"},
    {"causal": True, "prefix": 40, "softcap": 5.0},
]
PAGE_SIZES = (1, 3, 8, 16, 64)


def captured(step):
    """Call it once, which compiles what it launches, and then what launches its graph and waits for that."""
    step()
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()

    def launch():
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()

    return launch


DEVICE = Machine(cupy, cupy.asnumpy, captured)


def sequences_of(dtype, lens, **shape):
    """Random sequences; a device without bfloat16 has to say so instead."""
    if dtype == "bfloat16" and int(cupy.cuda.Device().compute_capability) < 80:
        ragged = some_sequences((3,), DTYPES[dtype])
        with pytest.raises(UnsupportedError, match="which has no bfloat16"):
            forward(DEVICE, ragged, rooms_with(ragged, "packed", "packed"))
        pytest.skip("a device without bfloat16 refuses it")
    return some_sequences(lens, DTYPES[dtype], **shape)


# Right


def of_forms(ragged, rooms_of, **options):
    """Forwards in all forms: right, and with the same bits where the same kernel computes them in the same tiles."""
    found = {}
    for rooms in map(rooms_of, KINDS):
        kernel, results = planned(DEVICE, ragged, rooms, **options).kernel, forward(DEVICE, ragged, rooms, **options)
        first = found.setdefault((kernel.file, kernel.config.TILE_Q, kernel.config.TILE_KV), results)
        if first is results:
            judge(ragged, first, **options)
        else:
            assert_same_bits(results, first)
    assert len(found) <= 2


@pytest.mark.parametrize("start", range(0, 80, 20))
def test_random_problems(start):
    """Any kind of places, options, expressions, masks and dropout, in NaN or infinities."""
    assert [found for i in drawn(2, start, 20) if (found := wrong(DEVICE, 2, i))] == []


@pytest.mark.parametrize("dtype, dim, dim_v", [("float32", 64, 64), ("float32", 128, 16), ("float16", 256, 32)])
def test_queries_without_keys_do_not_arrive_over_their_result(dtype, dim, dim_v):
    """They are asked for before it is known that no key asks for them; where they are in the way of a result, it waits."""
    rng = numpy.random.default_rng(0)
    q = cupy.asarray(rng.standard_normal((600, 8, 1, dim)).astype(dtype))
    k, v = (cupy.asarray(rng.standard_normal((600, 2, 40, n)).astype(dtype)) for n in (dim, dim_v))
    sinks, other = rng.standard_normal(8).astype("f4"), cupy.empty(2**26, "f4")
    for _ in range(20):
        other.fill(0)  # queries are no longer in the cache of the device, and take their time
        for given, expected in ((None, numpy.full(8, -numpy.inf)), (cupy.asarray(sinks), sinks)):
            lengths = {"seqlens_kv": cupy.zeros(600, numpy.int32), "sinks": given}
            out, lse = attention(q, k, v, **lengths, return_lse=True)
            assert not out.any()
            numpy.testing.assert_allclose(lse.get()[..., 0], numpy.broadcast_to(expected, (600, 8)), rtol=1e-6)


@pytest.mark.release
@pytest.mark.parametrize("start", range(0, 400, 40))
def test_many_random_problems(start):
    assert [found for i in drawn(3, start, 40) if (found := wrong(DEVICE, 3, i))] == []


@DTYPE
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_forwards(name, options, dtype):
    ragged = sequences_of(dtype, BATCHES[name])
    of_forms(ragged, lambda kinds: rooms_with(ragged, *kinds), **options)


@DTYPE
@pytest.mark.parametrize("options", [OPTIONS[0], *OPTIONS[2:]], ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_backwards(deterministic, name, options, dtype):
    ragged = sequences_of(dtype, BATCHES[name])
    kinds = ROWS if deterministic else ROWS[:1]
    first, *others = (backward(DEVICE, ragged, rooms_with(ragged, *of), deterministic, **options) for of in kinds)
    judge(ragged, first, **options)
    for found in others:
        assert_same_bits(found, first)


@DTYPE
@pytest.mark.parametrize("heads, dim", [((7, 1), 128), ((6, 2), 33), ((3, 3), 256)], ids=str)
def test_other_heads_and_dims(heads, dim, dtype):
    ragged = sequences_of(dtype, (130, 0, 1, 65, 300), heads=heads, dim=dim)
    for kinds in (("packed", "packed"), ("packed", "pages")):
        judge(ragged, forward(DEVICE, ragged, rooms_with(ragged, *kinds), causal=True), causal=True)
    if (dtype, dim) != ("float32", 256) or int(cupy.cuda.Device().compute_capability) >= 80:
        judge(ragged, backward(DEVICE, ragged, rooms_with(ragged, "packed", "padded"), causal=True), causal=True)


@DTYPE
def test_queries_and_keys_of_other_lengths(dtype):
    """More queries than keys, none of either, and many keys for few queries."""
    sequences_of(dtype, ())
    lens = ((70, 150), (150, 70), (0, 9), (9, 0), (1, 700), (200, 1), (65, 64))
    ragged = Ragged(lens, (4, 2), 64, DTYPES[dtype])
    for kinds in KINDS:
        judge(ragged, forward(DEVICE, ragged, rooms_with(ragged, *kinds), causal=True), causal=True)
    judge(ragged, backward(DEVICE, ragged, rooms_with(ragged, "packed", "padded"), causal=True), causal=True)


@DTYPE
@pytest.mark.parametrize("name", ["relative", "gate", "temperature", "decay"])
def test_expressions(name, dtype):
    ragged = sequences_of(dtype, (130, 0, 1, 65, 300))
    text, arrays = expression(name, ragged)
    first, *others = (forward(DEVICE, ragged, rooms_with(ragged, *of), score=text, arrays=arrays, causal=True) for of in ROWS)
    judge(ragged, first, score=name, arrays=arrays, causal=True)
    for found in others:
        assert_same_bits(found, first)
    found = backward(DEVICE, ragged, rooms_with(ragged, "packed", "packed"), score=text, arrays=arrays, causal=True)
    judge(ragged, found, score=name, arrays=arrays, causal=True)


@DTYPE
@pytest.mark.parametrize("queries", ["packed", "few"])
@pytest.mark.parametrize("size", PAGE_SIZES)
def test_pages(size, queries, dtype):
    """Shuffled, with absurd entries behind a sequence's last page, and NaN in pages and rows that nobody has."""
    ragged = sequences_of(dtype, (130, 0, 1, 65, 300, 16))
    if queries == "few":
        ragged = Ragged([(2, n) for _, n in ragged.lens], (6, 2), 64, DTYPES[dtype])

    def wanted(_, kv_room):
        table = kv_room.numbers["pages"]
        return kv_room.rows == size and table.shape[1] * size > 300 and kv_room.elements > sum(-(-n // size) for n in kv_room.lens)

    rooms = rooms_with(ragged, "all" if queries == "few" else "packed", "pages", wanted)
    for options in OPTIONS[:2]:
        judge(ragged, forward(DEVICE, ragged, rooms, **options), **options)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_room_for_more_sequences_and_rows(dtype):
    """Offsets that stand still, and rows behind the last one: their results and gradients are 0."""
    ragged = sequences_of(dtype, (130, 7, 65, *[0] * 9))
    rooms = rooms_with(ragged, "packed", "packed", lambda q_room, kv_room: min(q_room.rows, kv_room.rows) > 202 + 60)
    judge(ragged, forward(DEVICE, ragged, rooms, causal=True), causal=True)
    for deterministic in (False, True):
        judge(ragged, backward(DEVICE, ragged, rooms, deterministic, causal=True), causal=True)


# Few queries with many keys


@DTYPE
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_keys_of_few_queries_are_split(heads, dtype):
    sequences_of(dtype, ())
    for lens, capacity in (((5000,), 5000), ((70000,), 70016), ((5000, 0, 70000, 1, 1024, 2047), 70016)):
        plan, *contiguous = few_queries(DEVICE, DTYPES[dtype], lens, capacity, heads=heads)
        assert plan.kernel.file == "fwd_v2" and "split keys" in str(plan)
        pages = sum(-(-n // 16) for n in lens) + 50
        _, *paged = few_queries(DEVICE, DTYPES[dtype], lens, capacity, 16, pages, heads=heads)
        assert_same_bits([contiguous], [paged])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_decoded_sequence_has_the_bits_that_it_has_alone(dtype):
    rng = numpy.random.default_rng(0)
    lens = numpy.array([5000, 31, 12345, 0, 2047])
    q = cupy.asarray(rng.standard_normal((5, 8, 1, 64)).astype(dtype))
    k, v = cupy.asarray(rng.standard_normal((2, 5, 2, 12352, 64)).astype(dtype))
    expected = attention(q, k, v, seqlens_kv=cupy.asarray(lens))
    for b, n in enumerate(lens.tolist()):
        capacity = max(n + 3, 16)
        alone = attention(q[b : b + 1], *(x[b : b + 1, :, :capacity] for x in (k, v)), seqlens_kv=cupy.asarray(lens[b : b + 1]))
        assert (alone == expected[b : b + 1]).all()
    which = cupy.array([4, 2, 0], cupy.int32)
    found = attention(q[which], k, v, cache_batch_idx=which, seqlens_kv=cupy.asarray(lens)[which])
    assert (found == expected[which]).all()


# Bits


@pytest.mark.parametrize("dtype, dim", [("float16", 64), ("bfloat16", 128), ("float32", 32)])
def test_a_sequence_has_the_same_bits_alone_and_in_every_form(dtype, dim):
    ragged = sequences_of(dtype, (70, 1, 130, 0, 64, 5, 300), dim=dim)
    plain, order = rooms_with(ragged, "packed", "packed"), (5, 2, 6, 0, 3, 1, 4)
    expected = [compute(DEVICE, ragged, plain, causal=True) for compute in (forward, backward)]
    for turn, kinds in enumerate(ROWS):
        assert_same_bits(forward(DEVICE, ragged, ragged.rooms(*kinds, turn), causal=True), expected[0])
    for turn, kinds in enumerate(ROWS):
        assert_same_bits(backward(DEVICE, ragged, ragged.rooms(*kinds, turn), causal=True), expected[1])
    mixed = ragged.some(*order)
    for compute, right in zip((forward, backward), expected):
        assert_same_bits(compute(DEVICE, mixed, mixed.rooms("padded", "padded"), causal=True), [right[i] for i in order])
        for number in range(len(ragged.lens)):
            alone = ragged.some(number)
            assert_same_bits(compute(DEVICE, alone, alone.rooms("packed", "padded", number), causal=True), [right[number]])


def test_results_repeat():
    rng, lens = numpy.random.default_rng(0), (700, 1, 0, 3000, 64, 129, 333, 2)
    offsets = cupy.asarray(padded_offsets(lens, 10))
    q, k, v, dout = (cupy.asarray(rng.standard_normal((heads, 4300, 64)).astype(numpy.float16)) for heads in (8, 2, 2, 8))
    told = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "causal": True}
    out, lse = attention(q, k, v, return_lse=True, **told)
    first = attention_backward(dout, q, k, v, out, lse, deterministic=True, **told)
    decoding = {"seqlens_kv": cupy.array([2999, 4096, 70], cupy.int32)}
    caches = cupy.asarray(rng.standard_normal((2, 3, 2, 4096, 64)).astype(numpy.float16))
    queries = cupy.asarray(rng.standard_normal((3, 8, 1, 64)).astype(numpy.float16))
    decoded = attention(queries, *caches, **decoding)
    for _ in range(200):
        again = attention(q, k, v, return_lse=True, **told)
        assert (again[0] == out).all() and (again[1] == lse).all()
        gradients = attention_backward(dout, q, k, v, out, lse, deterministic=True, **told)
        assert all((x == y).all() for x, y in zip(gradients, first))
        assert (attention(queries, *caches, **decoding) == decoded).all()


# Graphs


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_graph_computes_what_lengths_say_when_it_runs(dtype):
    lens = ((300, 3, 65), (1, 0, 140, 7, 500), (), (1000,), (64,) * 8, (129, 512, 383))
    for replay, fresh in replayed(DEVICE, dtype, lens, 1024, 8):
        assert_same_bits([replay], [fresh])


def test_a_graph_of_gradients_follows_lengths():
    rng = numpy.random.default_rng(0)
    q, k, v, dout = (cupy.asarray(rng.standard_normal((heads, 600, 64)).astype(numpy.float16)) for heads in (4, 2, 2, 4))
    offsets = cupy.asarray(padded_offsets((300, 100), 6))
    told = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    forward_plan = plan_attention(q, k, v, causal=True, return_lse=True, **told)
    out, lse = forward_plan(q, k, v, **told)
    backward_plan = plan_attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True, **told)
    spaces = [cupy.empty(max(plan.workspace_bytes, 16), numpy.uint8) for plan in (forward_plan, backward_plan)]
    named = {f"d{name}": cupy.empty_like(x) for name, x in zip("qkv", (q, k, v))}

    def step():
        forward_plan(q, k, v, out=out, lse=lse, workspace=spaces[0], **told)
        backward_plan(dout, q, k, v, out, lse, workspace=spaces[1], **named, **told)

    launch = captured(step)
    for lens in ((1, 2, 3), (600,), (65, 0, 64, 129, 200, 142), ()):
        offsets[...] = cupy.asarray(padded_offsets(lens, 6))
        launch()
        found = [x.copy() for x in named.values()]
        step()
        assert all((x == y).all() for x, y in zip(found, named.values()))
        assert not any(x[:, sum(lens) :].any() for x in found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_graph_decodes_over_pages(page_size, dtype):
    """Rotate and append, attend, captured once: beside the same calls without a graph, with sequences that begin anew."""
    sequences_of(dtype, ())
    starts = (0, 31, 1023, 2040, 3500)
    by_graph, by_calls = (Decoding(DEVICE, DTYPES[dtype], starts, 4096, page_size) for _ in range(2))
    assert "split keys" in str(by_graph.plan)
    for decoding in (by_graph, by_calls):
        decoding.draw()
    launch = captured(by_graph.step)
    by_calls.step()
    for number in range(24):
        for decoding in (by_graph, by_calls):
            decoding.draw()
            if number == 10:
                decoding.lengths[1:4] = cupy.array([0, 2047, 15], numpy.int32)
        launch()
        by_calls.step()
        assert_same_bits(*([[cupy.asnumpy(x) for x in (d.out, d.lengths)]] for d in (by_graph, by_calls)))
    assert by_graph.lengths.tolist() == [25, 14, 2061, 29, 3525]
    by_graph.judge()
    assert (by_graph.pool.view(cupy.uint8) == by_calls.pool.view(cupy.uint8)).all()


# Far apart


def test_pages_beyond_two_to_the_32_elements():
    """Keys and values in one pool of 8.7 GB, of which only pages in use are written, from both of its ends."""
    heads, page_size, dim = (8, 2), 64, 128
    each = 2 * heads[1] * page_size * dim
    pages = 2**32 // each + 1000
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    free, needed = cupy.cuda.Device().mem_info[0], 2 * each * pages + (1 << 30)
    if free < needed:
        pytest.skip(f"takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    few_queries(DEVICE, numpy.float16, (5000, 0, 1, 321, 12800), 12864, page_size, pages, dim, heads)
