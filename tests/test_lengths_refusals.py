"""Lengths of sequences that are wrong: the message names the argument, what was expected and what came, and nothing is written."""

import numpy
import pytest

from cupy_flash import UnsupportedError, attention, attention_backward, attention_vjp, plan_attention, plan_attention_backward

HEADS, ROWS, KEYS, DIM = 2, 4, 6, 8
BACKENDS = ("numpy", "host")


def ones(*shape, dtype=numpy.float32):
    return numpy.ones(shape, dtype)


def ints(*numbers, dtype=numpy.int32):
    return numpy.array(numbers, dtype)


Q, K = ones(2, HEADS, ROWS, DIM), ones(2, HEADS, KEYS, DIM)
PACKED, CACHE = ones(HEADS, ROWS, DIM), ones(3, HEADS, 4, DIM)
TABLE = ints([0], [1])
OFFSETS = ints(0, 2, 4)


def case(message, q=Q, k=K, v=None, error=ValueError, **given):
    return pytest.param(message, q, k, k if v is None else v, error, given, id=message)


CASES = [
    # Kinds of arrays
    case("seqlens_kv: expected int32 or int64, got bool", error=TypeError, seqlens_kv=ones(2, dtype=bool)),
    case("seqlens_q: expected int32 or int64, got uint8", error=TypeError, seqlens_q=ones(2, dtype=numpy.uint8)),
    case("cu_seqlens_q: expected int32 or int64, got float32", PACKED, error=TypeError, cu_seqlens_q=ones(3)),
    case("seqlens_kv: expected a NumPy or CuPy array .* got list", error=TypeError, seqlens_kv=[1, 2]),
    case(r"seqlens_kv: expected one axis, got shape \(\)", seqlens_kv=3),
    case(r"seqlens_kv: expected one axis, got shape \(2, 1\)", seqlens_kv=ints([1], [2])),
    case(r"pages: expected \(sequences, pages of each\), got shape \(2,\)", k=CACHE, pages=ints(0, 1), seqlens_kv=ints(1, 1)),
    case(r"seqlens_kv: expected elements without gaps, got strides \(2,\)", seqlens_kv=ints(1, 2, 3, 4)[::2]),
    case(r"cu_seqlens_q: expected elements without gaps, got strides \(-1,\)", PACKED, cu_seqlens_q=ints(4, 2, 0)[::-1]),
    case("pages: expected elements without gaps", k=CACHE, pages=ints([0, 1], [1, 2])[:, :1], seqlens_kv=ints(1, 1)),
    # How many there are
    case(r"seqlens_kv: expected at least one sequence, got shape \(0,\)", seqlens_kv=ints()),
    case("cu_seqlens_q: expected at least 2 offsets, .* got 1", PACKED, cu_seqlens_q=ints(0)),
    case("q: expected 3 batch elements, the sequences that seqlens_kv have", seqlens_kv=ints(1, 2, 3)),
    case("k: expected 2 batch elements, the sequences that seqlens_kv have", k=ones(3, HEADS, KEYS, DIM), seqlens_kv=ints(1, 2)),
    case("v: expected 2 batch elements, the sequences that seqlens_kv have", v=ones(3, HEADS, KEYS, DIM), seqlens_kv=ints(1, 2)),
    case("q: expected 2 batch elements, the sequences that ", ones(3, HEADS, ROWS, DIM), PACKED, cu_seqlens_kv=OFFSETS),
    case("seqlens_q: expected 2 elements, for 2 sequences, got shape", PACKED, cu_seqlens_q=OFFSETS, seqlens_q=ints(1, 1, 1)),
    case("seqlens_kv: expected 2 elements, for 2 sequences, got shape", PACKED, cu_seqlens_q=OFFSETS, seqlens_kv=ints(1, 1, 1)),
    case("cu_seqlens_kv: expected 3 elements, for 2", PACKED, PACKED, cu_seqlens_q=OFFSETS, cu_seqlens_kv=ints(0, 1, 2, 3)),
    case("v: expected 3 elements along axis 0", k=CACHE, v=CACHE[:2], pages=TABLE, seqlens_kv=ints(1, 1)),
    case("v: expected 3 elements along axis 0", k=CACHE, v=CACHE[:2], cache_batch_idx=ints(1, 1)),
    case("k: expected pages of at least one key", k=CACHE[:, :, :0], pages=TABLE, seqlens_kv=ints(0, 0)),
    # Axes
    case("q: expected 3 or 4 axes with lengths of sequences, got shape", ones(1, 2, HEADS, ROWS, DIM), seqlens_kv=ints(1, 2)),
    case("q: expected 3 or 4 axes with lengths", ones(ROWS, DIM), ones(KEYS, DIM), seqlens_kv=ints(1, 2)),
    case("q: expected 3 axes, heads, all rows and dim, with offsets", Q, cu_seqlens_q=OFFSETS),
    case("k: expected 3 axes, heads, all rows and dim, with offsets", Q, cu_seqlens_kv=OFFSETS),
    case("k: expected 4 axes with pages or cache_batch_idx", k=CACHE[0], pages=TABLE, seqlens_kv=ints(1, 1)),
    # What they hold
    case("seqlens_kv: expected 0 to 6 for sequence 1, got -2", seqlens_kv=ints(1, -2)),
    case("seqlens_kv: expected 0 to 6 for sequence 1, got 7", seqlens_kv=ints(1, 7)),
    case("seqlens_q: expected 0 to 4 for sequence 0, got 1099511627776", seqlens_q=ints(2**40, 1, dtype=numpy.int64)),
    case("cu_seqlens_q: expected the first offset to be 0, got 1", PACKED, cu_seqlens_q=ints(1, 2, 4)),
    case("cu_seqlens_q: expected offsets that do not fall, got 3 and 2 for sequence 1", PACKED, cu_seqlens_q=ints(0, 3, 2)),
    case("cu_seqlens_q: expected offsets up to 4, the rows of the array, got 5", PACKED, cu_seqlens_q=ints(0, 3, 5)),
    # The difference of these is 1, where it has 32 bits.
    case("cu_seqlens_q: .* do not fall, got 2147483647 and -2147483648", PACKED, cu_seqlens_q=ints(0, 2**31 - 1, -(2**31))),
    case("seqlens_q: expected 0 to 2 for sequence 0, got 3", PACKED, cu_seqlens_q=OFFSETS, seqlens_q=ints(3, 1)),
    case("pages: expected pages from 0 to 2 where a sequence has keys, got 3 for page 0 of sequence 1",
         k=CACHE, pages=ints([0], [3]), seqlens_kv=ints(1, 1)),
    case("pages: expected pages from 0 to 2 .* got -1", k=CACHE, pages=ints([0], [-1]), seqlens_kv=ints(1, 1)),
    case("seqlens_kv: expected 0 to 4 for sequence 1, got 5", k=CACHE, pages=TABLE, seqlens_kv=ints(1, 5)),
    case("cache_batch_idx: expected 0 to 2 for sequence 1, got 3", k=CACHE, cache_batch_idx=ints(0, 3)),
    case("cache_batch_idx: expected 0 to 2 for sequence 0, got -1", k=CACHE, cache_batch_idx=ints(-1, 2)),
    # What does not go together
    case("seqlens_kv: expected how many keys each sequence has in its pages, got None", k=CACHE, pages=TABLE),
    case("pages: expected None with cu_seqlens_kv", k=CACHE, pages=TABLE, cu_seqlens_kv=OFFSETS, seqlens_kv=ints(1, 1)),
    case("cache_batch_idx: expected None with cu_seqlens_kv", k=PACKED, cache_batch_idx=ints(0, 1), cu_seqlens_kv=OFFSETS),
    case("cache_batch_idx: expected None with pages", k=CACHE, pages=TABLE, seqlens_kv=ints(1, 1), cache_batch_idx=ints(0, 1)),
    case("bias: expected None, or a score .* with packed sequences",
         PACKED, error=UnsupportedError, cu_seqlens_q=OFFSETS, bias=ones(4, 6)),
    case("mask: expected an expression with packed sequences, got an array",
         PACKED, error=UnsupportedError, cu_seqlens_q=OFFSETS, mask=ones(4, 6, dtype=bool)),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("message, q, k, v, error, given", CASES)
def test_wrong_lengths_are_refused_and_nothing_is_written(message, q, k, v, error, given, backend):
    out, lse = numpy.full(q.shape, 7, numpy.float32), numpy.full(q.shape[:-1], 7, numpy.float32)
    with pytest.raises(error, match=f"^{message}"):
        attention(q, k, v, out=out, lse=lse, backend=backend, **given)
    assert (out == 7).all() and (lse == 7).all()


def test_entries_of_pages_that_are_not_in_use_may_be_anything():
    pages = ints([0, -7], [99, 2**31 - 1])
    out = attention(Q, CACHE, CACHE, pages=pages, seqlens_kv=ints(4, 0))
    assert (out[0] == 1).all() and (out[1] == 0).all()


# Kernels, algorithms and gradients


HALF = [x.astype(numpy.float16) for x in (Q, K, K)]
LENGTHS = {"seqlens_kv": ints(1, 2)}


@pytest.mark.parametrize(
    "kernel, arch, why",
    [
        ("fwd_v1", "80", "None, 'fwd_v2' or 'fwd_hopper' with lengths of sequences, got 'fwd_v1'"),
        ("fwd_hopper", "80", "None or 'fwd_v2' for float16 on sm_80, got 'fwd_hopper'"),
        ("fwd_hopper", "90a", "None or 'fwd_v2' for these sequences, got 'fwd_hopper': few queries"),
    ],
)
def test_kernels_that_know_no_lengths_are_refused(kernel, arch, why):
    """Nor does fwd_hopper know few queries in windows, whose tiles blocks do not share."""
    with pytest.raises(UnsupportedError, match=f"^kernel: expected {why}"):
        plan_attention(*HALF, **LENGTHS, backend="host", arch=arch, kernel=kernel, window=(5, 0))


def test_v1_is_refused():
    with pytest.raises(UnsupportedError, match=r"^algorithm: expected 'auto' or 'v2' with lengths of sequences, got 'v1'"):
        attention(*HALF, **LENGTHS, backend="host", algorithm="v1")


@pytest.mark.parametrize("kernel", ["bwd_hopper", "bwd_hopper_wide"])
def test_backward_kernels_of_another_architecture_are_refused(kernel):
    q, k, v = HALF
    why = f"^kernel: expected None or 'bwd_v2', got '{kernel}': there is no other one for float16 on sm_80"
    with pytest.raises(UnsupportedError, match=why):
        plan_attention_backward(q, q, k, v, q, ones(2, HEADS, ROWS), **LENGTHS, backend="host", arch="80", kernel=kernel)


ROWS_OF_CACHE = {"cache_batch_idx": ints(1, 0), "seqlens_kv": ints(1, 2)}
WHY_NOT = [(LENGTHS, "few queries: heads of a group"), (ROWS_OF_CACHE, "few queries: heads of a group")]


@pytest.mark.parametrize("given, why", WHY_NOT)
@pytest.mark.parametrize("arch", ["90a", "80"])
def test_a_plan_says_why_it_is_not_the_kernel_of_the_architecture(arch, given, why):
    text = str(plan_attention(*HALF, **given, backend="host", arch=arch))
    assert "fwd_v2 for sm_" in text and (why in text) == (arch == "90a")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name, k, given",
    [
        ("pages", CACHE, {"pages": TABLE, "seqlens_kv": ints(1, 1)}),
        ("cache_batch_idx", CACHE, {"cache_batch_idx": ints(2, 0)}),
    ],
)
def test_a_cache_has_no_gradients(name, k, given, backend):
    lse, dq = ones(2, HEADS, ROWS), numpy.full(Q.shape, 7, numpy.float32)
    message = f"^{name}: expected None for gradients, which a cache has none of, got an array"
    with pytest.raises(UnsupportedError, match=message):
        attention_backward(Q, Q, k, k, Q, lse, dq=dq, backend=backend, **given)
    assert (dq == 7).all()
    with pytest.raises(UnsupportedError, match=message):
        plan_attention_backward(Q, Q, k, k, Q, lse, backend=backend, **given)
    with pytest.raises(UnsupportedError, match=message):
        attention_vjp(Q, k, k, backend=backend, **given)


# Plans


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_takes_the_lengths_that_it_was_made_for(backend):
    plan = plan_attention(Q, K, K, seqlens_kv=ints(1, 1), backend=backend)
    out = numpy.full(Q.shape, 7, numpy.float32)
    for message, given in {
        "seqlens_kv: expected an array, as planned, got None": {},
        "seqlens_q: expected None, the plan was made without it, got an array": {"seqlens_kv": ints(1, 1), "seqlens_q": ints(1, 1)},
        "seqlens_kv: expected dtype int32, as planned, got int64": {"seqlens_kv": ints(1, 1, dtype=numpy.int64)},
        r"seqlens_kv: expected shape \(2,\), as planned, got \(3,\)": {"seqlens_kv": ints(1, 1, 1)},
        "seqlens_kv: expected 0 to 6 for sequence 1, got 9": {"seqlens_kv": ints(1, 9)},
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            plan(Q, K, K, **given)
    with pytest.raises(TypeError, match=r"^zzz: expected an argument of a plan; beside those that it names there are cu_seqlens_q"):
        plan(Q, K, K, seqlens_kv=ints(1, 1), zzz=3)
    without = plan_attention(Q, K, K, out=out, backend=backend)
    with pytest.raises(ValueError, match=r"^seqlens_kv: expected None, the plan was made without it, got an array"):
        without(Q, K, K, out=out, seqlens_kv=ints(1, 1))
    assert (out == 7).all()


def test_a_plan_of_gradients_takes_the_lengths_that_it_was_made_for():
    given = Q, Q, K, K, Q, ones(2, HEADS, ROWS)
    plan = plan_attention_backward(*given, seqlens_kv=ints(1, 1))
    for message, lengths in {
        "seqlens_kv: expected an array, as planned, got None": {},
        "seqlens_q: expected None, the plan was made without it, got an array": {"seqlens_kv": ints(1, 1), "seqlens_q": ints(1, 1)},
        "seqlens_kv: expected 0 to 6 for sequence 0, got -1": {"seqlens_kv": ints(-1, 1)},
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            plan(*given, **lengths)
    with pytest.raises(TypeError, match=r"^zzz: expected an argument of a plan"):
        plan(*given, seqlens_kv=ints(1, 1), zzz=3)
