"""Attention on several ranks, judged as that of one device: each scheme, with the options there are."""

from dataclasses import replace

import numpy
import pytest
from ranks import ORDERS, SCHEMES, check, lengths_of, run, same_bits
from thinned import quick, thinned

from cupy_flash import Gradients, attention, attention_vjp, distributed, dropout_mask
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.cotangents import make_cotangents

CAUSAL = Case("float32", 45, 45, dim=16, heads_q=8, heads_kv=2, batch=(2,), causal=True)
CASES = {
    "causal": CAUSAL,
    "full": replace(CAUSAL, causal=False),
    "window": replace(CAUSAL, causal=False, window=(6, 2)),
    "top-left": replace(CAUSAL, len_kv=31, causal="top_left", window=(9, None), dim_v=12),
    "longer-keys": replace(CAUSAL, len_kv=70, batch=()),
    "first-see-nothing": replace(CAUSAL, len_kv=20),
    "prefix": replace(CAUSAL, prefix=11, softcap=3.0),
    "sinks": replace(CAUSAL, window=(4, None), sinks=2),
    "one-key-head": replace(CAUSAL, heads_q=3, heads_kv=1, scale=-0.2),
    "float16": replace(CAUSAL, dtype="float16"),
    "bfloat16": replace(CAUSAL, dtype="bfloat16", causal=False, window=(30, 0)),
    "float64": replace(CAUSAL, dtype="float64"),
    "dropout": replace(CAUSAL, dropout=0.3),
    "expressions": replace(CAUSAL, score="relative", mask="documents"),
    "alibi": replace(CAUSAL, alibi="batch"),
}
WRT = {"expressions": ("table",), "alibi": ("alibi_slopes",)}


EACH = [(name, scheme) for name in CASES for scheme in SCHEMES]


@pytest.mark.parametrize("name, scheme", quick(EACH, *(one for i, one in enumerate(EACH) if i % 5 < 3), spread=True))
def test_within_the_bounds_of_one_device(name, scheme):
    # Orders, numbers of ranks and parts take turns, so that each scheme has each of them in several cases.
    turn = [*CASES].index(name) + SCHEMES.index(scheme)
    order, ranks, divided = ORDERS[turn % 2], (2, 3, 4)[turn % 3], ("even", "uneven")[turn // 2 % 2]
    found = run(CASES[name], ranks, scheme, order, divided, wrt=WRT.get(name, ()))
    check(CASES[name], found, WRT.get(name, ()))


@pytest.mark.release
@pytest.mark.parametrize("divided", ["even", "uneven"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CASES)
def test_within_the_bounds_however_divided(name, scheme, order, ranks, divided):
    found = run(CASES[name], ranks, scheme, order, divided, wrt=WRT.get(name, ()))
    check(CASES[name], found, WRT.get(name, ()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_part_without_an_order_is_refused_by_the_bounds(scheme):
    """The judge would see rows at wrong positions: zigzag parts computed as contiguous ones."""
    found = run(CAUSAL, 2, scheme, "contiguous", gradients=False)
    lengths = lengths_of(CAUSAL, 2, "even")["q"]
    parts = [distributed.shard(found.out, rank, 2, lengths=lengths) for rank in range(2)]
    found.out = distributed.unshard(parts, order="zigzag")
    with pytest.raises(AssertionError):
        check(CAUSAL, found)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_repeats_give_the_same_bits(scheme):
    case = replace(CAUSAL, dtype="float16", sinks=1)
    first, second = (run(case, 3, scheme, "zigzag", "uneven") for _ in range(2))
    assert same_bits(first, second)
    assert numpy.array_equal(first.gradients.dsinks, second.gradients.dsinks)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_all_ranks_share_is_the_same_on_all(scheme):
    case = replace(CAUSAL, score="relative", sinks=1)
    found = run(case, 3, scheme, "contiguous", wrt=("table",))
    for own in found.of_all[1:]:
        assert numpy.array_equal(own.dsinks, found.gradients.dsinks)
        assert numpy.array_equal(own.darrays["table"], found.gradients.darrays["table"])


@pytest.mark.parametrize("scheme", ["ulysses", "all_gather"])
def test_a_scheme_that_computes_rows_at_once_gives_the_bits_of_one_device(scheme):
    """Of whole heads always, and of one rank."""
    case = replace(CAUSAL, dtype="float16", heads_q=8, heads_kv=4)
    found = run(case, 4, scheme, "zigzag", gradients=False)
    out, lse = attention(*make_inputs(case), causal=True, return_lse=True)
    if scheme == "ulysses":
        assert numpy.array_equal(found.out, out)
        assert numpy.array_equal(found.lse, lse)
    alone = run(case, 1, scheme, "zigzag", gradients=False)
    assert numpy.array_equal(alone.out, out)
    assert numpy.array_equal(alone.lse, lse)


def test_dropout_drops_the_pairs_of_one_process():
    """Values that are unit vectors show each probability, and so which are dropped."""
    case = Case("float32", 40, 40, dim=8, dim_v=40, heads_q=4, heads_kv=2, batch=(2,), dropout=0.4)
    q, k, _ = make_inputs(case)
    v = numpy.broadcast_to(numpy.eye(40, dtype=numpy.float32), (2, 2, 40, 40))
    seed = case.arrays()["seed"]
    kept = dropout_mask((2, 4, 40, 40), 0.4, seed)
    for scheme in SCHEMES:
        for order in ORDERS:

            def part(comm, scheme=scheme, order=order):
                own = [distributed.shard(x, comm.rank, 3, order=order) for x in (q, k, v)]
                return distributed.attention(*own, comm=comm, scheme=scheme, order=order, dropout=0.4, seed=seed)

            out = distributed.unshard(distributed.on_threads(3, part), order=order)
            assert numpy.array_equal(out != 0, kept)


def test_a_mask_by_an_expression_masks_the_pairs_of_one_process():
    q = numpy.zeros((1, 30, 8), numpy.float32)
    v = numpy.eye(30, dtype=numpy.float32)[None]
    rule = "(q_idx * 7 + kv_idx * 3 + q_len) % 5 != 1"
    whole = attention(q, q, v, mask=rule)
    for scheme in SCHEMES:

        def part(comm, scheme=scheme):
            own = [distributed.shard(x, comm.rank, 4, order="zigzag") for x in (q, q, v)]
            return distributed.attention(*own, comm=comm, scheme=scheme, order="zigzag", mask=rule)

        out = distributed.unshard(distributed.on_threads(4, part), order="zigzag")
        assert numpy.array_equal(out != 0, whole != 0)


PACKED = numpy.array([0, 4, 9, 9, 11, 30, 31, 52])  # of 60 rows, of which the last ones belong to no sequence


@pytest.mark.parametrize("order", thinned(ORDERS, first=1))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_sequences(scheme, order):
    """Each sequence as one call of its own gives it, though ranks cut it anywhere; lengths, numbers and places are its own."""
    rng = numpy.random.default_rng(0)
    q, dout = rng.standard_normal((2, 4, 60, 16), dtype=numpy.float32)
    k, v = rng.standard_normal((2, 2, 60, 16), dtype=numpy.float32)
    options = {
        "cu_seqlens_q": PACKED, "cu_seqlens_kv": PACKED, "causal": True, "window": (13, None),
        "alibi_slopes": numpy.arange(4, dtype=numpy.float32) / 8,
        "score": "score + 0.25 * b - 0.125 * (kv_idx % 3) + 1.0 * q_len / 64",
        "dropout": 0.25, "seed": 3,
    }  # fmt: skip
    (out, lse), vjp = attention_vjp(q, k, v, return_lse=True, **options)
    wanted = vjp(dout)

    def part(comm):
        own = [distributed.shard(x, comm.rank, 3, order=order) for x in (q, k, v, dout)]
        results, vjp = distributed.attention_vjp(*own[:3], comm=comm, scheme=scheme, order=order, return_lse=True, **options)
        return *results, *vjp(own[3])

    found = list(zip(*distributed.on_threads(3, part)))
    together = [distributed.unshard(parts, order=order, axis=-1 if i == 1 else -2) for i, parts in enumerate(found)]
    # Sums of at most 21 products of numbers of the order of 1 in float32, in another order.
    for got, want in zip(together, (out, lse, *wanted)):
        numpy.testing.assert_allclose(got, want, rtol=0, atol=32 * 2.0**-24 * max(1, numpy.abs(want[want > -numpy.inf]).max()))


def test_other_orders_of_axes_and_no_axis_of_heads():
    rng = numpy.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 20, 4, 8), dtype=numpy.float32)
    whole, lse = attention(q, k, v, layout="bshd", causal=True, return_lse=True)

    def part(comm, scheme):
        own = [distributed.shard(x, comm.rank, 2, axis=1) for x in (q, k, v)]
        out, vjp = distributed.attention_vjp(*own, comm=comm, scheme=scheme, layout="bshd", causal=True, return_lse=True)
        return *out, vjp(out[0]).dk

    for scheme in SCHEMES:
        outs, lses, dks = zip(*distributed.on_threads(2, lambda comm, scheme=scheme: part(comm, scheme)))
        numpy.testing.assert_allclose(distributed.unshard(outs, axis=1), whole, atol=1e-6)
        numpy.testing.assert_allclose(distributed.unshard(lses, axis=1), lse, atol=1e-6)
        assert dks[0].shape == (2, 10, 4, 8)
        one_head = [x[0, :, 0] for x in (q, k, v)]
        parts = distributed.on_threads(
            2, lambda comm, own=one_head, scheme=scheme: distributed.attention(
                *(distributed.shard(x, comm.rank, 2) for x in own), comm=comm, scheme=scheme
            )
        )  # fmt: skip
        numpy.testing.assert_allclose(distributed.unshard(parts), attention(*one_head), atol=1e-6)


@pytest.mark.parametrize("scheme", thinned(SCHEMES, keep=3, first=2))
def test_kernels_on_the_host(scheme):
    """The CUDA sources, executed on the CPU, compute the parts."""
    case = Case("float16", 67, 67, dim=64, heads_q=4, heads_kv=2, causal=True)
    check(case, run(case, 2, scheme, "zigzag", backend="host"))


@pytest.mark.release
def test_many_results_of_kernels_that_round_them():
    """Each is of 16 bits, as on a device, and what they are merged into is wider between the first and the last."""
    case = Case("bfloat16", 96, 96, dim=64, heads_q=4, heads_kv=2, causal=True)
    check(case, run(case, 5, "ring", "zigzag", backend="host"))


@pytest.mark.parametrize("scheme", thinned(SCHEMES, keep=3))
def test_dropout_in_kernels_on_the_host(scheme):
    """Kernels drop the pairs of one process as well, told where a part begins: at multiples of 32 rows."""
    case = Case("float16", 256, 256, dim=64, heads_q=4, heads_kv=2, causal=True, dropout=0.3)
    check(case, run(case, 2, scheme, "contiguous", backend="host"))


@pytest.mark.parametrize("scheme", thinned(SCHEMES, keep=3, first=1))
def test_expressions_in_kernels_on_the_host(scheme):
    case = Case("float16", 67, 67, dim=64, heads_q=4, heads_kv=2, score="relative", causal=True)
    check(case, run(case, 2, scheme, "contiguous", backend="host", gradients=False))


def test_gradients_are_unpacked_as_those_of_one_device():
    found = run(CAUSAL, 2, "ring", "zigzag")
    assert isinstance(found.gradients, Gradients)
    assert make_cotangents(CAUSAL)[0].shape == found.out.shape
