"""Query tiles that blocks or heads share, of sequences of their own lengths, by the kernels of a device."""

import numpy
import pytest
from test_hopper_pages import in_pages
from test_hopper_splits import ASKED as OF_SPLITS
from test_hopper_splits import LENS, assert_same, computed, drawn, lengths_of, meaning
from test_inner_heads import ASKED as OF_HEADS
from test_inner_heads import Batch, on

from cupy_flash.judge.compare import compare
from cupy_flash.plan import hopper_splits

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.Device().compute_capability != "90", reason="fwd_hopper is for sm_90"
)
OPTIONS = {"return_lse": True}


def of_device(q, k, v, asked, unlisted=True, **lengths):
    arrays, asked = map(cupy.asarray, (q, k, v)), on(asked, cupy.asarray)
    found = computed(*arrays, asked, OPTIONS, unlisted, **on(lengths, cupy.asarray))
    return [x.get() for x in found]


@pytest.mark.usefixtures("shorter_splits")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OF_SPLITS)
def test_splits_are_right_and_the_same_bits_alone_and_in_pages(name, dtype, monkeypatch):
    """From a list, and by the numbers of blocks."""
    (q, k, v), asked = drawn(name, dtype)
    with monkeypatch.context() as listed:
        listed.setattr(hopper_splits, "ROUNDS", 0)
        out, lse = of_device(q, k, v, asked, unlisted=False, **lengths_of(LENS))
    for b, length in enumerate(LENS):
        comparison = compare(
            out[b], lse[b], q[b], k[b, :, :length], v[b, :, :length], **meaning(asked, q.shape[2], length, q.shape[3])
        )
        assert comparison.ok, (length, comparison.message)
        alone = of_device(q[b : b + 1], k[b : b + 1], v[b : b + 1], asked, **lengths_of([length]))
        assert_same(alone, (out[b : b + 1], lse[b : b + 1]))
    if "softcap" in asked or "prefix" in asked:
        return
    for size in (16, 48 if q.shape[3] % 64 == 0 else 64):
        pools, tables = zip(*(in_pages(x, LENS, size, numpy.random.default_rng(1)) for x in (k, v)))
        assert_same(of_device(q, *pools, asked, pages=tables[0], **lengths_of(LENS)), (out, lse))


@pytest.mark.parametrize("name", OF_HEADS)
def test_heads_with_one_query_are_right_in_every_form(name):
    batch = Batch(name)
    on_device = {"options": OPTIONS, "put": cupy.asarray, "get": cupy.asnumpy}
    expected = batch.computed(**on_device)
    batch.assert_right(expected)
    for kinds in (("padded", "packed"), ("packed", "pages"))[: 2 if batch.dim % 64 == 0 and "softcap" not in batch.asked else 1]:
        for pair, right in zip(batch.computed(*kinds, **on_device), expected, strict=True):
            assert_same(pair, right)


@pytest.mark.parametrize("sequences", [20, 33, 700, 3000])
def test_many_sequences_short_and_long(sequences):
    rng = numpy.random.default_rng(sequences)
    lens = rng.integers(0, 9, (sequences, 2))
    lens[sequences // 2], lens[-1] = (170, 300), (1100, 33)
    batch = Batch("eight", lens)
    batch.assert_right(batch.computed("packed", "packed", OPTIONS, cupy.asarray, cupy.asnumpy))


def test_a_graph_is_right_for_other_lengths():
    """Of splits, whose number follows from lengths that a kernel reads when it runs."""
    (q, k, v), asked = drawn("heads together")
    k, v = (numpy.nan_to_num(x) for x in (k, v))
    from cupy_flash import plan_attention

    arrays, lens = list(map(cupy.asarray, (q, k, v))), cupy.asarray(numpy.array(LENS, numpy.int32))
    plan = plan_attention(*arrays, seqlens_kv=lens, **asked, **OPTIONS)
    out, lse = plan(*arrays, seqlens_kv=lens)
    memory, stream = cupy.empty(plan.workspace_bytes, cupy.uint8), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan(*arrays, seqlens_kv=lens, out=out, lse=lse, workspace=memory)
        graph = stream.end_capture()
    for other in (LENS, (1, 2600, 0, 1024, 2048), (2048, 1023, 2600, 5, 2600)):
        lens.set(numpy.array(other, numpy.int32))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_same((out.get(), lse.get()), [x.get() for x in plan(*arrays, seqlens_kv=lens)])
        for b, length in enumerate(other):
            told = meaning(asked, q.shape[2], length, q.shape[3])
            comparison = compare(out[b].get(), lse[b].get(), q[b], k[b, :, :length], v[b, :, :length], **told)
            assert comparison.ok, (length, comparison.message)
