"""append_kv: new rows of keys and values in caches, contiguous and paged, on NumPy and by the kernel; nothing else is touched."""

from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary import BACKENDS_AND_DTYPES, angles, bits, check, noise, normal, untouched
from thinned import thinned

from cupy_flash import UnsupportedError, append_kv, attention
from cupy_flash.call import append as call
from cupy_flash.machine import prepared
from cupy_flash.machine.operands import Operands
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.problem.append import APPEND_ARRAYS

backends = pytest.mark.parametrize("backend", ["host", "numpy"])


def places(seqlens, counts, page_size, page_count, pages=None, cache_batch_idx=None):
    """Of each new row that has a place: batch element, number, page, row of the page."""
    for b, (length, count) in enumerate(zip(seqlens, counts)):
        for i in range(count):
            at, row = divmod(length + i, page_size)
            if pages is None:
                at, page = 0 if at == 0 else -1, b if cache_batch_idx is None else cache_batch_idx[b]
            else:
                page = pages[b][at] if 0 <= at < len(pages[b]) else -1
            if length >= 0 and at >= 0 and 0 <= page < page_count:
                yield b, i, page, row


def hold_against_copies(found, before, new, where, rotation=None):
    """Caches `(pages, heads, page size, dim)` hold the new rows in their places, and all else is as it was, bit for bit."""
    for name, cache, old, rows in zip(("k", "v"), found, before, new):
        expected = old.copy()
        for b, i, page, row in where:
            if name == "k" and rotation is not None:
                cos, sin, positions, interleaved = rotation
                check(cache[page, :, row][:, None], rows[b, :, i][:, None], cos, sin, positions[b, i : i + 1], interleaved)
                expected[page, :, row] = cache[page, :, row]
            else:
                expected[page, :, row] = rows[b, :, i]
        assert bits(cache) == bits(expected)


def draw_tables(data, rng, batch, new):
    """What says where rows go: arguments of a call, number of pages, and their size."""
    seqlens = [data.draw(st.sampled_from([0, 1, 15, 16, 47, 63])) for _ in range(batch)]
    kind = data.draw(st.sampled_from(["own", "named", "paged"]))
    room = max(seqlens) + new
    if kind == "own":
        return {}, seqlens, batch, room + data.draw(st.integers(0, 2))
    if kind == "named":
        names = rng.permutation(batch + 3)[:batch]
        names[rng.random(batch) < 0.3] = data.draw(st.sampled_from([-1, -100]))
        return {"cache_batch_idx": names}, seqlens, batch + 3, room
    page_size = data.draw(st.sampled_from([1, 3, 16, 64]))
    columns = -(-room // page_size) + data.draw(st.integers(0, 1))
    pages = rng.permutation(batch * columns + 5)[: batch * columns].reshape(batch, columns)
    # What no row is appended to may be anything.
    for b, length in enumerate(seqlens):
        pages[b, : length // page_size] = pages[b, (length + new - 1) // page_size + 1 :] = -7
    return {"pages": pages}, seqlens, batch * columns + 5, page_size


@pytest.mark.parametrize("backend, dtypes", BACKENDS_AND_DTYPES)
@settings(max_examples=20)
@given(data=st.data())
def test_new_rows_are_where_they_belong_and_nothing_else_is_touched(backend, dtypes, data):
    dtype = data.draw(st.sampled_from(dtypes))
    dim, dim_v = data.draw(st.sampled_from([(64, 64), (64, 40), (33, 64), (128, 7), (2, 1)]))
    batch, heads, new = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 17, 40]))
    rng = numpy.random.default_rng(data.draw(st.integers(0, 9)))
    tables, seqlens, page_count, page_size = draw_tables(data, rng, batch, new)
    integers = data.draw(st.sampled_from(["int32", "int64"]))
    options = {name: numpy.array(x, integers) for name, x in tables.items()}
    counts = [new] * batch
    if data.draw(st.booleans()):
        counts = rng.integers(0, new + 1, batch).tolist()
        options["seqlens_new"] = numpy.array(counts, integers)
    rotation = None
    if data.draw(st.booleans()):
        cos, sin = angles(200, data.draw(st.integers(0, dim // 2)), data.draw(st.sampled_from(["float32", dtype])))
        interleaved, positions = data.draw(st.booleans()), numpy.add.outer(seqlens, numpy.arange(new))
        options |= {"cos": cos, "sin": sin, "interleaved": interleaved}
        kind = data.draw(st.sampled_from(["length", "first", "each"]))
        if kind == "each":
            options["positions"] = positions = rng.integers(0, 200, (batch, new))
        elif kind == "first":
            options["positions"] = first = rng.integers(0, 200 - new, batch)
            positions = first[:, None] + numpy.arange(new)
        rotation = cos, sin, positions, interleaved
    k, v = normal(rng, batch, heads, new, dim, dtype=dtype), normal(rng, batch, heads, new, dim_v, dtype=dtype)
    caches = [noise(rng, page_count, heads, page_size, width, dtype=dtype) for width in (dim, dim_v)]
    before = [cache.copy() for cache in caches]
    layout = data.draw(st.sampled_from(["bhsd", "bshd"]))
    given = [x if layout == "bhsd" else x.swapaxes(1, 2).copy() for x in (*caches, k, v)]
    found = append_kv(*given, numpy.array(seqlens, integers), layout=layout, backend=backend, **options)
    assert found[0] is given[0] and found[1] is given[1]
    found = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in found]
    hold_against_copies(found, before, (k, v), list(places(seqlens, counts, page_size, page_count, **tables)), rotation)


@pytest.mark.parametrize("schedule", ["eager", "deferred"])
@pytest.mark.parametrize("kind", thinned(product(("float16", "float32"), ("75", "80", "90a"))), ids="-".join)
def test_every_architecture_appends(kind, schedule, monkeypatch):
    dtype, arch = kind
    monkeypatch.setattr(prepared, "HOST", ARCHITECTURES[arch])
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    call._prepared.cache_clear()
    rng = numpy.random.default_rng(0)
    k, v = normal(rng, 2, 2, 3, 40, 64, dtype=dtype)
    caches = noise(rng, 2, 40, 3, 16, 64, dtype=dtype)
    before, pages, cos_sin = caches.copy(), rng.permutation(40)[:8].reshape(2, 4), angles(64, 16)
    append_kv(*caches, k, v, 24, pages=pages, cos=cos_sin[0], sin=cos_sin[1], backend="host")
    where = list(places([24, 24], [40, 40], 16, 40, pages))
    assert len(where) == 80
    hold_against_copies(caches, before, (k, v), where, (*cos_sin, numpy.tile(numpy.arange(24, 64), (2, 1)), False))
    call._prepared.cache_clear()


@backends
def test_caches_of_any_strides(backend):
    rng = numpy.random.default_rng(0)
    memory = noise(rng, 5, 60, 4, 3, 70, dtype="float16")
    before = memory.copy()
    caches = [(of[::-2, ::-3].transpose(0, 2, 1, 3))[..., 1:41:2] for of in (memory[..., 0, :], memory[..., 2, :])]
    k, v = numpy.broadcast_to(normal(rng, 2, 1, 1, 1, 7, 20, dtype="float16"), (2, 3, 1, 4, 7, 20))[:, :, 0, :, ::-1]
    append_kv(*caches, k, v, numpy.array([13, 0, 2], numpy.int64), backend=backend)
    copies = [(of[::-2, ::-3].transpose(0, 2, 1, 3))[..., 1:41:2] for of in (before[..., 0, :], before[..., 2, :])]
    hold_against_copies(caches, [x.copy() for x in copies], (k, v), list(places([13, 0, 2], [7] * 3, 20, 3)))
    for view, copy in zip(caches, copies):
        copy[...] = view
    assert bits(memory) == bits(before)


@backends
def test_keys_and_values_in_one_array(backend):
    rng = numpy.random.default_rng(0)
    memory = noise(rng, 9, 2, 4, 3, 16, dtype="float16")
    before = memory.copy()
    k, v = normal(rng, 2, 2, 3, 6, 16, dtype="float16")
    pages = numpy.array([[7, 2, 1], [0, 5, 3]], numpy.int32)
    new = k.swapaxes(1, 2), v.swapaxes(1, 2)
    append_kv(memory[:, 0], memory[:, 1], *new, 5, pages=pages, layout="bshd", backend=backend)
    where = list(places([5, 5], [6, 6], 4, 9, pages))
    caches, copies = ([x[:, i].swapaxes(1, 2) for i in (0, 1)] for x in (memory, before))
    hold_against_copies(caches, copies, (k, v), where)
    for apart in (0, 8):  # the same elements, or some of them
        shared = memory.reshape(-1)[apart:][: 8 * 384].reshape(8, 2, 4, 3, 16)
        with pytest.raises(ValueError, match=r"^k_cache: expected memory apart from that of v_cache \("):
            append_kv(memory[:8, 0], shared[:, 0], *new, 5, pages=pages, layout="bshd", backend=backend)
    with pytest.raises(ValueError, match=r"^k_cache: expected memory apart from that of k \("):
        append_kv(memory[:2, 0], memory[:2, 1], memory[:2, 0], memory[2:4, 1], 0, layout="bshd", backend=backend)


@backends
@pytest.mark.parametrize("dim", [4, 12])
def test_keys_and_values_side_by_side_in_rows(backend, dim):
    rng = numpy.random.default_rng(0)
    memory = noise(rng, 2, 3, 8, 16, dtype="float32")
    before = memory.copy()
    k, v = normal(rng, 2, 3, 5, dim, dtype="float32"), normal(rng, 2, 3, 5, 16 - dim, dtype="float32")
    append_kv(memory[..., :dim], memory[..., dim:], k, v, numpy.array([3, 0]), backend=backend)
    caches, copies = ((x[..., :dim], x[..., dim:]) for x in (memory, before))
    hold_against_copies(caches, copies, (k, v), list(places([3, 0], [5, 5], 8, 2)))
    for first in (dim - 1, 16 - 1):
        shared = memory.reshape(-1)[first:][: 2 * 3 * 7 * 16 + 15]
        shared = numpy.lib.stride_tricks.as_strided(shared, (2, 3, 7, 16 - dim), memory.strides)
        with pytest.raises(ValueError, match=r"^k_cache: expected memory apart from that of v_cache \("):
            append_kv(memory[:, :, :7, :dim], shared, k, v, 0, backend=backend)


@backends
def test_a_sequence_that_two_elements_name_gets_the_rows_of_both(backend):
    rng = numpy.random.default_rng(0)
    k, v = normal(rng, 2, 2, 2, 3, 8, dtype="float32")
    caches = noise(rng, 2, 4, 2, 10, 8, dtype="float32")
    before = caches.copy()
    names = numpy.array([2, 2], numpy.int32)
    append_kv(*caches, k, v, numpy.array([1, 6]), cache_batch_idx=names, backend=backend)
    hold_against_copies(caches, before, (k, v), list(places([1, 6], [3, 3], 10, 4, cache_batch_idx=names)))


BAD = [
    {"seqlens": [8, 3, -1, 2**31 - 1]},  # the end, room for some, and none
    {"seqlens": [2**63 - 1, -(2**63), 9, 0]},
    {"seqlens": [1, 2, 3, 4], "cache_batch_idx": [6, -1, 2**31, 5]},
    {"seqlens": [1, 2, 3, 4], "seqlens_new": [-5, 100, 2, 0]},
    {"seqlens": [0, 5, 10, 14], "pages": [[3, 99, 1, -1], [2**31 - 1, 0, -(2**31), 5], [1, 1, 4, 2], [9, 9, 9, 9]]},
]


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_what_only_a_device_reads_and_has_no_place_is_left_out(bad, rotates):
    """As if the host could not read the integers: the kernel sees whatever there is."""
    rng = numpy.random.default_rng(0)
    page_size, page_count = (4, 6) if "pages" in bad else (10, 6 if "cache_batch_idx" in bad else 4)
    k, v = normal(rng, 2, 4, 2, 7, 16, dtype="float16")
    caches = noise(rng, 2, page_count, 2, page_size, 16, dtype="float16")
    before = caches.copy()
    cos, sin = angles(6, 8) if rotates else (None, None)
    arrays = {name: numpy.array(x, numpy.int64) for name, x in bad.items()}
    arrays |= {"k": k, "v": v, "cos": cos, "sin": sin, "k_cache": caches[0], "v_cache": caches[1]}
    given = Operands(APPEND_ARRAYS, tuple(arrays.get(name) for name in APPEND_ARRAYS), required=2, results=3)
    options = (("interleaved", False), ("layout", "bhsd"), ("backend", "host"))
    call._prepared(tuple(given.descriptions), options, ()).run(given, None, {})
    tables = {name: bad[name] for name in ("pages", "cache_batch_idx") if name in bad}
    counts = [min(7, max(0, count)) for count in bad.get("seqlens_new", [7] * 4)]
    where = list(places(bad["seqlens"], counts, page_size, page_count, **tables))
    assert where and len(where) < 28
    positions = numpy.clip(numpy.add.outer(numpy.array(bad["seqlens"], object), numpy.arange(7)), 0, 5).astype(int)
    hold_against_copies(caches, before, (k, v), where, (cos, sin, positions, False) if rotates else None)


OK = {"k": (4, 2, 3, 16), "v": (4, 2, 3, 8), "k_cache": (4, 2, 10, 16), "v_cache": (4, 2, 10, 8)}
PAGED = OK | {"k_cache": (9, 2, 4, 16), "v_cache": (9, 2, 4, 8)}
NAMED = OK | {"k_cache": (6, 2, 10, 16), "v_cache": (6, 2, 10, 8)}
TABLE = numpy.arange(8).reshape(4, 2)
VALUES = [
    (OK, [0, 1, 8, 7], {}, "seqlens: expected lengths of at least 0 that leave room for the new rows in 10, got 8 at 2"),
    (OK, [0, -1, 7, 7], {}, "seqlens: expected lengths of at least 0 that leave room for the new rows in 10, got -1 at 1"),
    (OK, 8, {}, "seqlens: expected lengths of at least 0 that leave room for the new rows in 10, got 8 at 0"),
    (OK, -1, {}, "seqlens: expected a length of at least 0 and at most 10, got -1"),
    (OK, 2**70, {}, f"seqlens: expected a length of at least 0 and at most 10, got {2**70}"),
    (OK, [0, 10, 9, 7], {"seqlens_new": [0, 0, 2, 3]}, "leave room for the new rows in 10, got 9 at 2"),
    (OK, 0, {"seqlens_new": [0, 4, 2, 3]}, "expected numbers of rows, at least 0 and at most 3, those of k, got 4 at 1"),
    (OK, 0, {"seqlens_new": [0, -1, 2, 3]}, "seqlens_new: expected numbers of rows, at least 0 and at most 3, those"),
    (NAMED, 0, {"cache_batch_idx": [0, 1, 2, 6]}, "cache_batch_idx: expected rows of the cache below 6, or negative numbers"),
    (NAMED, [0, 8, 0, 0], {"cache_batch_idx": [0, 5, 2, 1]}, "leave room for the new rows in 10, got 8 at 1"),
    (PAGED, 6, {"pages": TABLE}, "leave room for the new rows in 8, got 6 at 0"),
    (PAGED, 3, {"pages": TABLE + 2}, "pages: expected numbers of pages, at least 0 and below 9, where rows are app"),
    (PAGED, 3, {"pages": TABLE - 1}, "where rows are appended, got -1 at (0, 0)"),
    (OK, 3, {"cos": 5}, "seqlens: expected lengths that leave the new rows at positions below 5, the rows of cos, got 3 at 0"),
    (OK, 3, {"cos": 5, "positions": [0, 1, 2, 3]}, "positions: expected positions of at least 0 and below 5, the rows"),
    (OK, 3, {"cos": 5, "positions": [[0, 1, 5]]}, "positions of at least 0 and below 5, the rows of cos, got 5 at (0, 2)"),
]


@backends
@pytest.mark.parametrize("shapes, seqlens, options, said", VALUES, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_rows_without_a_place_are_refused_and_nothing_is_written(backend, shapes, seqlens, options, said):
    rng = numpy.random.default_rng(0)
    given = {name: normal(rng, *shape, dtype="float16") for name, shape in shapes.items()}
    before = {name: bits(x) for name, x in given.items()}
    options = {name: numpy.array(x) for name, x in options.items()}
    if "cos" in options:
        options |= dict(zip(("cos", "sin"), angles(int(options["cos"]), 4)))
    with pytest.raises(ValueError) as raised:
        append_kv(**given, seqlens=seqlens if isinstance(seqlens, int) else numpy.array(seqlens), backend=backend, **options)
    assert said in str(raised.value) and {name: bits(x) for name, x in given.items()} == before


@backends
def test_what_is_not_appended_may_be_named_by_anything(backend):
    """Lengths, pages and positions of elements that are left out, and of rows that are not appended."""
    rng = numpy.random.default_rng(0)
    given = {name: normal(rng, *shape, dtype="float16") for name, shape in NAMED.items()}
    before = [given[name].copy() for name in ("k_cache", "v_cache")]
    given["k"][1, :, 2:] = given["v"][1, :, 2:] = numpy.nan
    names, seqlens, counts = numpy.array([-1, 5, 0, -2]), numpy.array([99, 8, -4, 2**40]), numpy.array([3, 2, 0, 3])
    positions = numpy.array([[9, 9, 9], [1, 4, 9], [-1, -1, -1], [2**40, 0, 0]])
    cos, sin = angles(5, 8)
    options = {"seqlens_new": counts, "cache_batch_idx": names, "cos": cos, "sin": sin, "positions": positions}
    found = append_kv(**given, seqlens=seqlens, backend=backend, **options)
    where = [(1, 0, 5, 8), (1, 1, 5, 9)]
    hold_against_copies(found, before, (given["k"], given["v"]), where, (cos, sin, numpy.clip(positions, 0, 4), False))


@backends
@pytest.mark.parametrize("shape", [(0, 2, 3, 16), (4, 0, 3, 16), (4, 2, 0, 16), (4, 2, 3, 0)])
def test_nothing_to_append(backend, shape):
    k, cache = numpy.ones(shape, numpy.float32), numpy.zeros((shape[0], shape[1], 10, shape[3]), numpy.float32)
    append_kv(cache, cache.copy(), k, k, numpy.full(shape[0], 7), backend=backend)
    assert not cache.any()
    seen = numpy.zeros((*shape[:2], 10, 5), numpy.float32)
    append_kv(seen, cache, numpy.ones((*shape[:3], 5), numpy.float32), k, numpy.full(shape[0], 7), backend=backend)
    assert seen.sum() == 5 * numpy.prod(shape[:3])


def test_float64_stays_float64():
    rng, (cos, sin) = numpy.random.default_rng(0), angles(40, 6, "float64")
    k, v = normal(rng, 2, 2, 3, 5, 16, dtype="float64")
    caches = noise(rng, 2, 2, 3, 20, 16, dtype="float64")
    before = caches.copy()
    append_kv(*caches, k, v, 11, cos=cos, sin=sin)
    where, positions = list(places([11, 11], [5, 5], 20, 2)), numpy.tile(numpy.arange(11, 16), (2, 1))
    hold_against_copies(caches, before, (k, v), where, (cos, sin, positions, False))
    with pytest.raises(UnsupportedError, match="k: expected float16, bfloat16 or float32 on backend 'host', got float64"):
        append_kv(*caches, k, v, 0, backend="host")


def test_pages_and_rows_beyond_two_to_the_31_elements():
    """Pages so far apart in memory of which only what is touched exists."""
    caches = [
        numpy.ndarray((5, 2, 3, 64), numpy.float16, untouched(90 << 30), strides=(2 * 2**33, 2 * 2**32, 2 * (2**30 + 64), 2))
        for _ in range(2)
    ]
    k, v = normal(numpy.random.default_rng(0), 2, 1, 2, 4, 64, dtype="float16")
    append_kv(*caches, k, v, 4, pages=numpy.array([[0, 4, 2]], numpy.int32), backend="host")
    for cache, new in zip(caches, (k, v)):
        assert numpy.array_equal(cache[4, :, 1:], new[0, :, :2]) and numpy.array_equal(cache[2, :, :2], new[0, :, 2:])
        assert not cache[4, :, 0].any() and not cache[2, :, 2].any() and not cache[0].any()


def test_steps_of_decoding_see_what_was_appended():
    """Rows appended one and some at a time are those of the whole."""
    rng, (cos, sin) = numpy.random.default_rng(0), angles(50, 8)
    k, v = normal(rng, 2, 2, 3, 50, 16, dtype="float32")
    whole = noise(rng, 2, 2, 3, 50, 16, dtype="float32")
    steps = whole.copy()
    append_kv(*whole, k, v, 0, cos=cos, sin=sin)
    for first, end in ((0, 30), (30, 31), (31, 32), (32, 50)):
        append_kv(*steps, k[:, :, first:end], v[:, :, first:end], first, cos=cos, sin=sin)
    assert bits(steps) == bits(whole)
    q = normal(rng, 2, 3, 1, 16, dtype="float32")
    out = attention(q, whole[0, :, :, :32], whole[1, :, :, :32])
    assert numpy.array_equal(out, attention(q, steps[0, :, :, :32], v[:, :, :32]))
