"""append_kv with queries: rotated in the same launch, bit for bit as `rotate` does it, while caches get what they get without."""

import types
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary import BACKENDS_AND_DTYPES, HALVES_AND_SINGLES, angles, bits, check, noise, normal
from test_append import BAD, draw_tables
from test_append_problem import ANGLES, SHAPES, laid, problem_of
from test_device import launched, told  # noqa: F401  a fixture
from thinned import thinned

from cupy_flash import UnsupportedError, append_kv, attention, plan_attention, rotate
from cupy_flash.call import append as call
from cupy_flash.call import rotate as call_of_rotate
from cupy_flash.machine import prepared
from cupy_flash.machine.operands import Operands
from cupy_flash.plan.append import append_launches, append_plan, make_append_plan
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.rotation_params import append_params
from cupy_flash.problem.append import APPEND_ARRAYS, make_append_problem
from cupy_flash.problem.rotate import ROTATE_ARRAYS

backends = pytest.mark.parametrize("backend", ["host", "numpy"])


def both(caches, k, v, seqlens, q, **options):
    """What is returned, once the caches are seen to be those of a call without queries, bit for bit."""
    caches = [*caches]
    alone = [x.copy() for x in caches]
    append_kv(*alone, k, v, seqlens, **{name: x for name, x in options.items() if name != "q_out"})
    found = append_kv(*caches, k, v, seqlens, q=q, **options)
    assert found[0] is caches[0] and found[1] is caches[1]
    assert [bits(x) for x in caches] == [bits(x) for x in alone]
    return found[2]


# On the host most is for a release: the next tests have the kernels of each architecture, and any strides.
ON_HOST = [pytest.param("host", dtypes, marks=pytest.mark.release) for dtypes in (("bfloat16",), HALVES_AND_SINGLES)]


@pytest.mark.parametrize("backend, dtypes", [BACKENDS_AND_DTYPES[0], *ON_HOST])
@settings(max_examples=30)
@given(data=st.data())
def test_queries_are_those_of_rotate(backend, dtypes, data):
    dtype, layout = data.draw(st.sampled_from(dtypes)), data.draw(st.sampled_from(["bhsd", "bshd"]))
    dim, dim_v = data.draw(st.sampled_from([(64, 64), (33, 64), (128, 7), (2, 1)]))
    batch, new = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 17, 40]))
    heads_q, heads = data.draw(st.sampled_from([(8, 2), (7, 1), (3, 3), (1, 4), (40, 1)]))
    rng = numpy.random.default_rng(data.draw(st.integers(0, 9)))
    tables, seqlens, page_count, page_size = draw_tables(data, rng, batch, new)
    options = {name: numpy.array(x, numpy.int32) for name, x in tables.items()} | {"layout": layout, "backend": backend}
    if data.draw(st.booleans()):
        options["seqlens_new"] = rng.integers(0, new + 1, batch)
    cos, sin = angles(200, data.draw(st.integers(0, dim // 2)), data.draw(st.sampled_from(["float32", dtype])))
    turn = {"interleaved": data.draw(st.booleans()), "layout": layout, "backend": backend}
    positions = numpy.array(seqlens)
    kind = data.draw(st.sampled_from(["length", "first", "each"]))
    if kind != "length":
        positions = options["positions"] = rng.integers(0, 200 - new, (batch, new) if kind == "each" else batch)

    def laid_out(heads, width, rows=new, count=batch):
        x = normal(rng, count, heads, rows, width, dtype=dtype)
        return x if layout == "bhsd" else x.swapaxes(1, 2).copy()

    q, k, v = laid_out(heads_q, dim), laid_out(heads, dim), laid_out(heads, dim_v)
    caches = [laid_out(heads, width, page_size, page_count) for width in (dim, dim_v)]
    expected = rotate(q, cos, sin, positions=positions, **turn)
    place = data.draw(st.sampled_from(["new", "given", "itself"]))
    around = noise(rng, q.size + 64, dtype=dtype)  # what lies about the rows is not touched
    before = around.copy()
    out = {"new": None, "given": around[32:-32].reshape(q.shape), "itself": q}[place]
    found = both(caches, k, v, numpy.array(seqlens), q, cos=cos, sin=sin, interleaved=turn["interleaved"], q_out=out, **options)
    assert bits(found) == bits(expected) and (out is None or found is out)
    assert bits(around[:32]) == bits(before[:32]) and bits(around[-32:]) == bits(before[-32:])


@pytest.mark.parametrize("schedule", thinned(["eager", "deferred"], first=1))
@pytest.mark.parametrize("kind", thinned(product(("float16", "float32"), ("75", "80", "90a"))), ids="-".join)
def test_every_architecture_rotates_queries(kind, schedule, monkeypatch):
    dtype, arch = kind
    monkeypatch.setattr(prepared, "HOST", ARCHITECTURES[arch])
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    for module in (call, call_of_rotate):
        module._prepared.cache_clear()
    rng, (cos, sin) = numpy.random.default_rng(0), angles(64, 16)
    (k, v), q = normal(rng, 2, 2, 3, 40, 64, dtype=dtype), normal(rng, 2, 9, 40, 64, dtype=dtype)
    options = {"cos": cos, "sin": sin, "pages": rng.permutation(40)[:8].reshape(2, 4), "backend": "host"}
    found = both(noise(rng, 2, 40, 3, 16, 64, dtype=dtype), k, v, 24, q, **options)
    assert bits(found) == bits(rotate(q, cos, sin, positions=24, backend="host"))
    check(found, q, cos, sin, numpy.arange(24, 64), False)
    for module in (call, call_of_rotate):
        module._prepared.cache_clear()


@backends
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_of_any_strides(backend, interleaved):
    """Backwards, every other one, broadcast, and as a part of what one matrix product gives for queries, keys and values."""
    rng, (cos, sin) = numpy.random.default_rng(0), angles(64, 10)
    k, v = normal(rng, 2, 2, 2, 5, 20, dtype="float16")
    memory = noise(rng, 2, 14, 13, 41, dtype="float16")
    memory[...] = normal(rng, *memory.shape, dtype="float16")
    of_all = normal(rng, 2, 5, (4 + 2 + 2) * 20, dtype="float16")
    together = of_all[..., :80].reshape(2, 5, 4, 20).swapaxes(1, 2)
    for q in (memory[::-1, ::-3, ::-3, 1::2], numpy.broadcast_to(memory[:1, :1, :1, :20], (2, 6, 5, 20)), together):
        before = q.copy()
        options = {"cos": cos, "sin": sin, "interleaved": interleaved, "backend": backend}
        positions = numpy.array([3, 0])
        expected = rotate(q, cos, sin, positions=positions, interleaved=interleaved, backend=backend)
        found = both(noise(rng, 2, 2, 2, 12, 20, dtype="float16"), k, v, positions, q, **options)
        assert bits(found) == bits(expected) and found.strides == expected.strides and bits(q) == bits(before)
        room = noise(rng, 2, 8, 11, 45, dtype="float16")
        out, kept = room[:, ::-1][:, : q.shape[1], 1::2, 2:42:2], room.copy()
        assert both(noise(rng, 2, 2, 2, 12, 20, dtype="float16"), k, v, positions, q, q_out=out, **options) is out
        assert bits(out) == bits(expected)
        kept[:, ::-1][:, : q.shape[1], 1::2, 2:42:2] = out
        assert bits(room) == bits(kept)


@backends
def test_rows_that_are_not_appended_have_queries_all_the_same(backend):
    """Of padded rows and of elements that are left out, at positions that may be anything: the nearest angles."""
    rng, (cos, sin) = numpy.random.default_rng(0), angles(9, 8)
    (k, v), q = normal(rng, 2, 3, 2, 4, 16, dtype="float32"), normal(rng, 3, 6, 4, 16, dtype="float32")
    lengths, counts, names = numpy.array([5, 7, 2**40]), numpy.array([4, 1, 3]), numpy.array([1, 0, -1])
    options = {"cos": cos, "sin": sin, "seqlens_new": counts, "cache_batch_idx": names, "backend": backend}
    found = both(noise(rng, 2, 2, 2, 9, 16, dtype="float32"), k, v, lengths, q, **options)
    check(found, q, cos, sin, numpy.minimum(lengths[:, None] + numpy.arange(4), 8), False)


@backends
def test_packed_rows_are_elements_of_a_batch(backend):
    """As a model reads prompts: each row is an element of its own, with a page table and a position of its own."""
    rng, (cos, sin) = numpy.random.default_rng(0), angles(64, 8)
    counts, cached = numpy.array([5, 1, 9]), numpy.array([0, 30, 2])
    sequence = numpy.repeat(numpy.arange(3), counts)
    places = numpy.arange(15) - numpy.repeat(numpy.cumsum(counts) - counts, counts) + cached[sequence]
    pages = rng.permutation(12).reshape(3, 4)[sequence].astype(numpy.int32)
    q, (k, v) = normal(rng, 15, 1, 6, 16, dtype="float16"), normal(rng, 2, 15, 1, 2, 16, dtype="float16")
    options = {"cos": cos, "sin": sin, "pages": pages, "layout": "bshd", "backend": backend}
    found = both(noise(rng, 2, 12, 8, 2, 16, dtype="float16"), k, v, places, q, **options)
    assert bits(found) == bits(rotate(q, cos, sin, positions=places, layout="bshd", backend=backend))


@pytest.mark.parametrize("bad", [{"seqlens": [2**63 - 1, -(2**63), 9, -3]}, *BAD], ids=str)
def test_what_only_a_device_reads_is_taken_for_the_nearest(bad):
    """As if the host could not read the integers: the kernel sees whatever there is, as that of `rotate` does."""
    rng, (cos, sin) = numpy.random.default_rng(0), angles(6, 8)
    page_size, page_count = (4, 6) if "pages" in bad else (10, 6 if "cache_batch_idx" in bad else 4)
    (k, v), q = normal(rng, 2, 4, 2, 7, 16, dtype="float16"), normal(rng, 4, 5, 7, 16, dtype="float16")
    caches = noise(rng, 2, page_count, 2, page_size, 16, dtype="float16")
    by_name = {name: numpy.array(x, numpy.int64) for name, x in bad.items()}
    by_name |= {"k": k, "v": v, "q": q, "cos": cos, "sin": sin, "k_cache": caches[0], "v_cache": caches[1]}
    options = (("interleaved", False), ("layout", "bhsd"), ("backend", "host"))
    given = Operands(APPEND_ARRAYS, tuple(by_name.get(name) for name in APPEND_ARRAYS), required=2, results=3)
    found = call._prepared(tuple(given.descriptions), options, ()).run(given, None, {})[2]
    given = Operands(ROTATE_ARRAYS, (q, cos, sin, by_name["seqlens"], None), required=3, results=1)
    assert bits(found) == bits(call_of_rotate._prepared(tuple(given.descriptions), options, ()).run(given, None, {}))


@backends
@pytest.mark.parametrize("sizes", [(0, 4, 2, 3, 8), (2, 0, 2, 3, 8), (2, 4, 0, 3, 8), (2, 4, 2, 0, 8), (2, 4, 2, 3, 0)], ids=str)
def test_nothing_to_rotate_or_to_append(backend, sizes):
    batch, heads_q, heads, new, dim = sizes
    rng, (cos, sin) = numpy.random.default_rng(0), angles(9, dim // 2)
    k, q = normal(rng, batch, heads, new, dim, dtype="float32"), normal(rng, batch, heads_q, new, dim, dtype="float32")
    v = normal(rng, batch, heads, new, 5, dtype="float32")
    caches = [noise(rng, batch, heads, 10, width, dtype="float32") for width in (dim, 5)]
    found = both(caches, k, v, numpy.full(batch, 6), q, cos=cos, sin=sin, backend=backend)
    assert found.shape == q.shape and bits(found) == bits(rotate(q, cos, sin, positions=6, backend=backend))


def test_float64_stays_float64():
    rng, (cos, sin) = numpy.random.default_rng(0), angles(40, 6, "float64")
    (k, v), q = normal(rng, 2, 2, 3, 5, 16, dtype="float64"), normal(rng, 2, 6, 5, 16, dtype="float64")
    caches = noise(rng, 2, 2, 3, 20, 16, dtype="float64")
    check(both(caches, k, v, 11, q, cos=cos, sin=sin), q, cos, sin, numpy.arange(11, 16), False)
    with pytest.raises(UnsupportedError, match="k: expected float16, bfloat16 or float32 on backend 'host', got float64"):
        append_kv(*caches, k, v, 0, q=q, cos=cos, sin=sin, backend="host")


def test_a_step_of_decoding_in_three_calls_and_in_two():
    rng, (cos, sin) = numpy.random.default_rng(0), angles(50, 8)
    lengths, caches = numpy.array([0, 31]), noise(rng, 2, 2, 3, 50, 16, dtype="float32")
    (k, v), q = normal(rng, 2, 2, 3, 1, 16, dtype="float32"), normal(rng, 2, 6, 1, 16, dtype="float32")
    rotated = both(caches, k, v, lengths, q, cos=cos, sin=sin)
    expected = attention(rotate(q, cos, sin, positions=lengths), *caches, seqlens_kv=lengths + 1)
    assert bits(attention(rotated, *caches, seqlens_kv=lengths + 1)) == bits(expected)


# What is refused

QUERIES = laid(4, 6, 3, 16)
ROTATES = {"q": QUERIES, "cos": ANGLES, "sin": ANGLES}
REFUSALS = [
    ({"q": QUERIES}, ValueError, "q: expected None without cos, since queries are only rotated and are in no cache, got an array"),
    ({"q_out": QUERIES}, ValueError, "q_out: expected None without q, got an array"),
    ({"q_out": QUERIES, "cos": ANGLES, "sin": ANGLES}, ValueError, "q_out: expected None without q, got an array"),
    (ROTATES | {"q": laid(6, 3, 16)}, ValueError, "q: expected at least 4 axes, (..., heads, seq, dim), got shape (6, 3, 16)"),
    (ROTATES | {"q": laid(1, 4, 6, 3, 16)}, ValueError, "q: expected 4 axes, (batch, heads, seq, dim), got shape (1, 4, 6, 3, 16)"),
    (ROTATES | {"q": laid(4, 6, 2, 16)}, ValueError, "q: expected shape (4, 6, 3, 16), got (4, 6, 2, 16)"),
    (ROTATES | {"q": laid(4, 6, 3, 8)}, ValueError, "q: expected shape (4, 6, 3, 16), got (4, 6, 3, 8)"),
    (ROTATES | {"q": laid(4, 6, 3, 16, dtype="float32")}, TypeError, "q: expected float16, got float32"),
    (ROTATES | {"q": laid(4, 6, 3, 16, device=0)}, ValueError, "q: expected an array in host memory (like k), got one"),
    (ROTATES | {"q_out": laid(4, 2, 3, 16)}, ValueError, "q_out: expected shape (4, 6, 3, 16), got (4, 2, 3, 16)"),
    (ROTATES | {"q_out": laid(4, 6, 3, 16, dtype="bfloat16")}, TypeError, "q_out: expected float16, got bfloat16"),
    (ROTATES | {"q_out": laid(4, 6, 3, 16, strides=(0, 48, 16, 1))}, ValueError, "q_out: expected elements apart from each other"),
    (ROTATES | {"cos": laid(0, 8), "sin": laid(0, 8), "k": laid(4, 0, 3, 16), "v": laid(4, 0, 3, 8), "k_cache": laid(4, 0, 10, 16),
                "v_cache": laid(4, 0, 10, 8)}, ValueError, "cos: expected at least 1 row, got 0"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, exception, message", REFUSALS, ids=lambda x: " ".join(x) if isinstance(x, dict) else "")
def test_refusals_name_argument_expected_and_got(arguments, exception, message):
    given = dict.fromkeys(APPEND_ARRAYS) | SHAPES | {"seqlens": laid(4, dtype="int32")} | arguments
    with pytest.raises(exception) as raised:
        make_append_problem(given, interleaved=False, layout="bhsd", backend="auto")
    assert message in str(raised.value)


@backends
def test_results_lie_apart_and_nothing_is_written_before_that_is_known(backend):
    rng, (cos, sin) = numpy.random.default_rng(0), angles(64, 4)
    (k, v), q = normal(rng, 2, 2, 2, 3, 8, dtype="float32"), normal(rng, 2, 2, 3, 8, dtype="float32")
    caches = noise(rng, 2, 2, 2, 3, 8, dtype="float32")
    shared = normal(rng, 200, dtype="float32")
    kept = [x.copy() for x in (*caches, k, v, q, shared)]
    for queries, out, said in (
        (q, k, "q_out: expected memory apart from that of k"),
        (q, caches[1], "v_cache: expected memory apart from that of q_out"),
        (shared[:96].reshape(q.shape), shared[8:104].reshape(q.shape), "q_out: expected memory apart from that of q"),
        (q, q[::-1], "q_out: expected memory apart from that of q"),
    ):
        with pytest.raises(ValueError, match=said):
            append_kv(*caches, k, v, 0, q=queries, q_out=out, cos=cos, sin=sin, backend=backend)
    with pytest.raises(ValueError, match="positions: expected positions of at least 0 and below 64, the rows of cos"):
        append_kv(*caches, k, v, 0, q=q, q_out=q, cos=cos, sin=sin, positions=numpy.array([0, 62]), backend=backend)
    with pytest.raises(ValueError, match=r"^q_out: expected a writable array"):
        append_kv(*caches, k, v, 0, q=q, q_out=numpy.broadcast_to(q[:1], q.shape), cos=cos, sin=sin, backend=backend)
    assert [bits(x) for x in (*caches, k, v, q, shared)] == [bits(x) for x in kept]


# What a plan is


def test_a_problem_becomes_numbers():
    problem = problem_of(**ROTATES | {"q": laid(4, 40, 3, 16, strides=(1920, 16, 640, 1))})
    plan = make_append_plan(problem, ARCHITECTURES["90a"])
    assert plan.config.ROTATE_Q and plan.name.endswith("-rotateq") and plan.config.COPY_BYTES == 16
    params = append_params(plan, problem)[0]
    assert [int(params[name]) for name in ("rows", "q_first", "q_rows")] == [6, 32, 120]
    assert [launch.blocks for launch in append_launches(plan, problem)] == [4 * (1 + 4)]
    strides = {name: [int(params[name][f"{axis}_stride"]) for axis in ("head", "row", "col")] for name in ("q", "q_out")}
    assert strides == {"q": [16, 640, 1], "q_out": [16, 640, 1]}  # in the memory order of q
    assert params["q"]["batch_stride"].tolist() == [0, 0, 0, 1920]
    without = problem_of(cos=ANGLES, sin=ANGLES)
    assert make_append_plan(without, ARCHITECTURES["90a"]) == append_plan(ARCHITECTURES["90a"], "float16")
    assert append_params(plan, without)[0]["q_rows"] == 0


def test_queries_decide_how_many_bytes_move_at_once():
    plan = make_append_plan(problem_of(**ROTATES | {"q": laid(4, 6, 3, 16, strides=(300, 50, 16, 1))}), ARCHITECTURES["80"])
    assert plan.config.COPY_BYTES == 4 and plan.reasons[1:] == ("copies of 4 bytes: an axis of q has a stride of 600 bytes",)


def test_rows_beyond_what_the_kernel_counts():
    problem = problem_of(**ROTATES | {"q": laid(4, 2**30, 3, 16, strides=(0, 0, 0, 1)), "q_out": laid(4, 2**30, 3, 16)})
    with pytest.raises(UnsupportedError, match="q: expected fewer than 2147483648 rows of all heads, with those of k, got 32"):
        append_params(make_append_plan(problem, ARCHITECTURES["80"]), problem)


def test_a_plan_says_what_it_is():
    plan = call.AppendPlan(problem_of(**ROTATES), append_plan(ARCHITECTURES["80"], "float16", rotate_q=True))
    assert str(plan) == "append of 3 rows of float16 to 4 sequences of 10 rows, with queries of 6 heads, on backend 'host'"


@pytest.mark.parametrize("paged", [False, True])
def test_a_layer_of_a_decoder_is_two_launches(launched, paged):  # noqa: F811
    """One call rotates queries and keys and stores keys and values, the other reads them in parts and joins these."""
    pytest.importorskip("cupy")
    q, k = numpy.zeros((4, 32, 1, 64), numpy.float16), numpy.zeros((4, 8, 1, 64), numpy.float16)
    caches = numpy.zeros((2, 4 * 32, 8, 64, 64) if paged else (2, 4, 8, 2048, 64), numpy.float16)
    told_pages = {"pages": numpy.zeros((4, 32), numpy.int32)} if paged else {}
    lengths, (cos, sin) = numpy.zeros(4, numpy.int32), angles(2048, 32)
    by_name = {"k": k, "v": k, "cos": cos, "sin": sin, "seqlens": lengths, "q": q, "q_out": q.copy()} | told_pages
    by_name |= {"k_cache": caches[0], "v_cache": caches[1]}
    given = Operands(APPEND_ARRAYS, tuple(by_name.get(name) for name in APPEND_ARRAYS), required=2, results=3)
    options = (("interleaved", False), ("layout", "bhsd"), ("backend", "host"))
    plan = call._prepared.__wrapped__(tuple(given.descriptions), options, ())
    plan._backend = "cuda"  # launches as if it were on a device
    assert plan.run(given, None, {})[2] is by_name["q_out"]
    [launch] = launched
    params = told(launch, "AppendParams")
    assert [int(params[name]["data"]) for name in APPEND_ARRAYS] == given.addresses
    assert launch.grid == [4 * 2, 1, 1, 128, 1, 1]  # of each sequence a block of keys and values, and one of queries

    for arch in ("80", "90a", "120"):
        attend = plan_attention(q, *caches, seqlens_kv=lengths, backend="host", arch=arch, **told_pages)
        assert [one.entry for one in attend.launches] == ["fwd_v2"]
        launched.clear()
        attend._execution.on_device.launch([0] * 20, types.SimpleNamespace(data=types.SimpleNamespace(ptr=0)))
        assert len(launched) == 1

