"""rotate and append_kv on a device: its own positions and lengths, graphs, streams, memory."""

import numpy
import pytest
from rotary import angles, bits, check, noise, normal
from test_append import BAD, hold_against_copies, places

from cupy_flash import UnsupportedError, append_kv, rotate

cupy = pytest.importorskip("cupy")

KINDS = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])


def is_refused(dtype, compute):
    """Whether the device has no such dtype, which it has to say then."""
    if dtype != "bfloat16" or int(cupy.cuda.Device().compute_capability) >= 80:
        return False
    with pytest.raises(UnsupportedError, match="which has no bfloat16"):
        compute()
    return True


@KINDS
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim, pairs", [(128, 64), (64, 12), (80, 20), (33, 7), (300, 1)])
def test_rows_are_rotated(dtype, dim, pairs, interleaved):
    rng = numpy.random.default_rng(0)
    x, (cos, sin) = normal(rng, 2, 3, 70, dim, dtype=dtype), angles(200, pairs)
    first, each = rng.integers(0, 130, 2), rng.integers(0, 200, (2, 70)).astype(numpy.int32)
    expected = {None: numpy.arange(70), 100: numpy.arange(100, 170)}
    on_device = [cupy.asarray(a) for a in (x, cos, sin)]
    if is_refused(dtype, lambda: rotate(*on_device)):
        return
    for positions, of_rows in expected.items():
        found = rotate(*on_device, positions=positions, interleaved=interleaved)
        check(cupy.asnumpy(found), x, cos, sin, of_rows, interleaved)
    for positions, of_rows in ((first, first[:, None] + numpy.arange(70)), (each, each)):
        for given in (positions, cupy.asarray(positions)):
            check(cupy.asnumpy(rotate(*on_device, positions=given, interleaved=interleaved)), x, cos, sin, of_rows, interleaved)
    swapped = on_device[0].swapaxes(1, 2).copy()
    found = rotate(swapped, *on_device[1:], interleaved=interleaved, layout="bshd", out=swapped)
    assert found is swapped
    check(cupy.asnumpy(found.swapaxes(1, 2)), x, cos, sin, numpy.arange(70), interleaved)


@KINDS
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("new", [1, 50])
def test_rows_are_appended_to_pages(dtype, page_size, new):
    rng = numpy.random.default_rng(0)
    k, v = normal(rng, 3, 2, new, 64, dtype=dtype), normal(rng, 3, 2, new, 40, dtype=dtype)
    seqlens, columns = numpy.array([0, 63, 17], numpy.int32), -(-(63 + new) // page_size)
    pages = rng.permutation(3 * columns + 4)[: 3 * columns].reshape(3, columns).astype(numpy.int32)
    caches = [noise(rng, 3 * columns + 4, 2, page_size, dim, dtype=dtype) for dim in (64, 40)]
    cos, sin = angles(120, 16)
    counts = numpy.array([new, 0, new])
    on_device = [cupy.asarray(x) for x in (*caches, k, v)]
    options = {"pages": pages, "seqlens_new": counts, "cos": cos, "sin": sin}
    options = {name: cupy.asarray(x) for name, x in options.items()}
    if is_refused(dtype, lambda: append_kv(*on_device, cupy.asarray(seqlens), **options)):
        return
    found = append_kv(*on_device, cupy.asarray(seqlens), **options)
    assert found[0] is on_device[0] and found[1] is on_device[1]
    where = list(places(seqlens.tolist(), counts.tolist(), page_size, len(caches[0]), pages))
    positions = numpy.add.outer(seqlens, numpy.arange(new))
    hold_against_copies([cupy.asnumpy(x) for x in found], caches, (k, v), where, (cos, sin, positions, False))


@KINDS
@pytest.mark.parametrize("dim, pairs, interleaved", [(128, 64, False), (80, 20, True), (33, 7, False)])
@pytest.mark.parametrize("new", [1, 50])
def test_queries_beside_keys_are_those_of_rotate(dtype, dim, pairs, interleaved, new):
    rng, (cos, sin) = numpy.random.default_rng(0), [cupy.asarray(x) for x in angles(120, pairs)]
    q, k, v = (cupy.asarray(normal(rng, 3, heads, new, dim, dtype=dtype)) for heads in (9, 3, 3))
    seqlens, positions = cupy.array([0, 63, 17], numpy.int32), cupy.array([5, 0, 110])
    options = {"cos": cos, "sin": sin, "interleaved": interleaved}
    caches = [cupy.asarray(noise(rng, 3, 3, 120, dim, dtype=dtype)) for _ in range(2)]
    if is_refused(dtype, lambda: append_kv(*caches, k, v, seqlens, q=q, **options)):
        return
    for of_rows in (None, positions):
        alone = [x.copy() for x in caches]
        append_kv(*alone, k, v, seqlens, positions=of_rows, **options)
        expected = rotate(q, positions=seqlens if of_rows is None else of_rows, **options)
        found = append_kv(*caches, k, v, seqlens, q=q, positions=of_rows, **options)[2]
        assert bits(cupy.asnumpy(found)) == bits(cupy.asnumpy(expected))
        assert all(bits(cupy.asnumpy(x)) == bits(cupy.asnumpy(y)) for x, y in zip(caches, alone))
    swapped = q.swapaxes(1, 2).copy().swapaxes(1, 2)
    assert append_kv(*caches, k, v, seqlens, q=swapped, q_out=swapped, positions=positions, **options)[2] is swapped
    assert bits(cupy.asnumpy(swapped)) == bits(cupy.asnumpy(expected))


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_what_has_no_place_is_left_out(bad):
    rng = numpy.random.default_rng(0)
    page_size, page_count = (4, 6) if "pages" in bad else (10, 6 if "cache_batch_idx" in bad else 4)
    k, v = normal(rng, 2, 4, 2, 7, 16, dtype="float16")
    before = noise(rng, 2, page_count, 2, page_size, 16, dtype="float16")
    caches = cupy.asarray(before)
    append_kv(*caches, *map(cupy.asarray, (k, v)), **{name: cupy.array(x, numpy.int64) for name, x in bad.items()})
    tables = {name: bad[name] for name in ("pages", "cache_batch_idx") if name in bad}
    counts = [min(7, max(0, count)) for count in bad.get("seqlens_new", [7] * 4)]
    where = list(places(bad["seqlens"], counts, page_size, page_count, **tables))
    hold_against_copies(cupy.asnumpy(caches), before, (k, v), where)


def test_positions_without_angles_are_taken_for_the_nearest():
    rng, (cos, sin) = numpy.random.default_rng(0), angles(30, 8)
    x, first = normal(rng, 4, 2, 5, 16, dtype="float32"), numpy.array([0, 28, -3, 2**63 - 1])
    found = rotate(*map(cupy.asarray, (x, cos, sin)), positions=cupy.asarray(first))
    positions = numpy.clip(first[:, None].astype(object) + numpy.arange(5), 0, 29).astype(int)
    check(cupy.asnumpy(found), x, cos, sin, positions, False)


def test_integers_in_host_memory_are_checked_before_anything_is_written():
    caches, k = cupy.zeros((2, 2, 2, 8, 16), numpy.float16), cupy.ones((2, 2, 3, 16), numpy.float16)
    for bad in (numpy.array([0, 6]), 6):
        with pytest.raises(ValueError, match=r"^seqlens: expected lengths .* room for the new rows in 8, got 6 at"):
            append_kv(*caches, k, k, bad)
    assert not caches.any()
    append_kv(*caches, k, k, numpy.array([0, 5], numpy.int32))
    assert int(caches.sum()) == 2 * 2 * 2 * 3 * 16


def test_a_graph_appends_what_lengths_say_when_it_runs():
    rng, (cos, sin) = numpy.random.default_rng(0), [cupy.asarray(x) for x in angles(64, 16)]
    k, v = (cupy.asarray(x) for x in normal(rng, 2, 2, 3, 1, 64, dtype="float16"))
    caches, seqlens = cupy.zeros((2, 2, 3, 64, 64), numpy.float16), cupy.array([0, 30], numpy.int32)
    x, q_out, count = cupy.empty_like(k), cupy.empty_like(k), cupy.zeros(2, numpy.int32)
    count += 1  # compiles what is captured
    append_kv(*cupy.zeros_like(caches), k, v, seqlens, q=k, q_out=q_out, cos=cos, sin=sin)  # compiled and loaded
    rotate(k, cos, sin, positions=seqlens, out=x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        append_kv(*caches, k, v, seqlens, q=k, q_out=q_out, cos=cos, sin=sin)
        rotate(k, cos, sin, positions=seqlens, out=x)
        seqlens += 1
        graph = stream.end_capture()
        for _ in range(20):
            graph.launch()
        stream.synchronize()
    rows = cupy.asnumpy(caches)
    assert cupy.asnumpy(seqlens).tolist() == [20, 50]
    for b, first in ((0, 0), (1, 30)):
        appended = rows[0, b, :, first : first + 20]
        check(appended, numpy.repeat(k[b].get(), 20, 1), cos.get(), sin.get(), numpy.arange(first, first + 20), False)
        assert bits(rows[1, b, :, first : first + 20]) == bits(numpy.repeat(v[b].get(), 20, 1))
        assert not rows[0, b, :, first + 20 :].any() and not rows[0, b, :, :first].any()
    check(x.get(), k.get(), cos.get(), sin.get(), numpy.array([[19], [49]]), False)
    assert bits(q_out.get()) == bits(x.get())


def test_a_call_allocates_nothing_and_waits_for_nothing():
    k, caches = cupy.ones((2, 3, 1, 64), numpy.float16), cupy.zeros((2, 2, 3, 64, 64), numpy.float16)
    seqlens = cupy.zeros(2, numpy.int32)
    append_kv(*caches, k, k, seqlens)
    used = cupy.get_default_memory_pool().used_bytes()
    text = 'extern "C" __global__ void slow() { const long long start = clock64(); while (clock64() - start < 500000000ll); }'
    cupy.RawKernel(text, "slow")((1,), (1,), ())
    ended = cupy.cuda.Event()
    append_kv(*caches, k, k, seqlens)
    ended.record()
    assert not ended.done and cupy.get_default_memory_pool().used_bytes() == used
    cupy.cuda.Device().synchronize()


def test_pages_beyond_two_to_the_31_elements():
    pages, dim = (1 << 31) // (2 * 64 * 128) + 600, 128  # 4.4 GB each
    caches = [cupy.zeros((pages, 2, 64, dim), numpy.float16) for _ in range(2)]
    k, v = (cupy.asarray(x) for x in normal(numpy.random.default_rng(0), 2, 1, 2, 65, dim, dtype="float16"))
    append_kv(*caches, k, v, 63, pages=cupy.array([[pages - 500, 5, pages - 1]], numpy.int32))
    for cache, rows in zip(caches, (k, v)):
        assert bool((cache[pages - 500, :, 63] == rows[0, :, 0]).all() and (cache[5] == rows[0, :, 1:]).all())
        assert not bool(cache[pages - 1].any()) and not bool(cache[:4].any())


def test_float64_is_refused():
    with pytest.raises(UnsupportedError, match="x: expected float16, bfloat16 or float32 on backend 'cuda', got float64"):
        rotate(cupy.zeros((2, 4, 8)), *(cupy.asarray(x) for x in angles(4, 4)))
