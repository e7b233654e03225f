"""Few queries whose keys blocks share: the block that ends last combines them, again and again, in graphs, on several streams."""

import numpy
import pytest
from combining import MARK, combined, counters

from cupy_flash import plan_attention
from cupy_flash.judge.compare import compare

cupy = pytest.importorskip("cupy")

SHAPES = {  # sequences, heads, heads of keys, queries, dim, room for keys
    "one": (1, 32, 8, 1, 128, 8192),
    "many": (16, 32, 8, 1, 128, 8192),
    "long": (1, 16, 2, 1, 64, 40_000),
    "wide": (5, 4, 2, 4, 256, 3000),
}


def drawn(shape, dtype=numpy.float16, seed=0):
    """Queries, a cache, lengths of which some are too short to be split, and results."""
    batch, heads, heads_kv, queries, dim, room = SHAPES[shape]
    rng = numpy.random.default_rng(seed)
    q, k, v = (
        cupy.asarray(rng.standard_normal(size, numpy.float32).astype(dtype))
        for size in ((batch, heads, queries, dim), *((batch, heads_kv, room, dim),) * 2)
    )
    return (q, k, v), {"seqlens_kv": cupy.asarray(lengths_of(rng, batch, room))}


def lengths_of(rng, batch, room):
    lengths = rng.integers(1, room + 1, batch).astype(numpy.int32)
    lengths[0] = room
    return lengths


def planned(arrays, told, **options):
    plan = plan_attention(*arrays, **told, kernel="fwd_v2", causal=True, return_lse=True, **options)
    return combined(plan, True), combined(plan, False)


def same_bits(found, expected):
    return all((x.view(cupy.uint8) == y.view(cupy.uint8)).all() for x, y in zip(found, expected))


def check_counters(plan, workspace):
    """Of query tiles that were shared they are as before the launch."""
    assert (counters(plan, cupy.asnumpy(workspace)) == MARK).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_launches_one_after_the_other_share_a_workspace(shape):
    """A thousand, with other lengths every now and then: the bits that a kernel of its own leaves each time."""
    arrays, told = drawn(shape)
    last, apart = planned(arrays, told)
    workspace, rng = cupy.full(last.workspace_bytes, 255, numpy.uint8), numpy.random.default_rng(1)
    results = cupy.empty_like(arrays[0]), cupy.empty(arrays[0].shape[:-1], numpy.float32)
    for _ in range(10):
        expected = apart(*arrays, **told)
        wrong = cupy.zeros((), bool)
        for _ in range(100):
            for x in results:
                x.fill(numpy.nan)
            last(*arrays, **told, out=results[0], lse=results[1], workspace=workspace)
            for x, y in zip(results, expected):
                wrong |= (x.view(cupy.uint8) != y.view(cupy.uint8)).any()
        assert not wrong
        check_counters(last, workspace)
        told["seqlens_kv"].set(lengths_of(rng, len(arrays[0]), arrays[1].shape[2]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_is_replayed(shape):
    """With lengths and queries that change, and now and then a workspace in which something else has been meanwhile."""
    arrays, told = drawn(shape)
    last, apart = planned(arrays, told)
    workspace, rng = cupy.empty(last.workspace_bytes, numpy.uint8), numpy.random.default_rng(1)
    results = cupy.empty_like(arrays[0]), cupy.empty(arrays[0].shape[:-1], numpy.float32)

    def step():
        last(*arrays, **told, out=results[0], lse=results[1], workspace=workspace)

    step()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for number in range(50):
            told["seqlens_kv"].set(lengths_of(rng, len(arrays[0]), arrays[1].shape[2]))
            arrays[0][...] = cupy.asarray(rng.standard_normal(arrays[0].shape, numpy.float32).astype(numpy.float16))
            if number % 10 == 5:
                workspace[...] = cupy.asarray(rng.integers(0, 256, workspace.size, numpy.uint8))
            for x in results:
                x.fill(numpy.nan)
            for _ in range(3):
                graph.launch(stream)
            assert same_bits(results, apart(*arrays, **told))
        check_counters(last, workspace)


def test_streams_with_workspaces_of_their_own():
    """And without: what CuPy allocates for a call belongs to the stream until the call has ended."""
    arrays, told = drawn("many")
    last, apart = planned(arrays, told)
    expected = apart(*arrays, **told)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]
    spaces = [cupy.empty(last.workspace_bytes, numpy.uint8) if i % 2 else None for i in range(len(streams))]
    found = []
    for _ in range(20):
        for stream, space in zip(streams, spaces):
            with stream:
                found.append(last(*arrays, **told, workspace=space))
    cupy.cuda.Device().synchronize()
    assert all(same_bits(results, expected) for results in found)


@pytest.mark.parametrize("dtype", [numpy.float16, numpy.float32])
def test_it_is_right(dtype):
    arrays, told = drawn("long", dtype)
    out, lse = map(cupy.asnumpy, planned(arrays, told)[0](*arrays, **told))
    q, k, v = map(cupy.asnumpy, arrays)
    for b, length in enumerate(told["seqlens_kv"].get().tolist()):
        judged = compare(out[b], lse[b], q[b], k[b, :, :length], v[b, :, :length], scale=q.shape[-1] ** -0.5)
        assert judged.ok, f"sequence {b} of {length} keys: {judged.message}"
