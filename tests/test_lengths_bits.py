"""What a sequence gives has the same bits alone and in any batch, in any order, and in each form that a call takes."""

from dataclasses import replace

import numpy
import pytest
from ragged import Ragged, assert_same_bits, backward, forward

from cupy_flash import attention, plan_attention, plan_attention_backward

LENS = ((70, 150), (1, 65), (130, 3), (0, 17), (64, 64), (5, 0), (33, 300))
KINDS_Q = ("packed", "padded", "roomy")
KINDS_KV = ("packed", "padded", "roomy", "pages", "cache")
FORMS = [(q, kv) for q in KINDS_Q for kv in KINDS_KV]
OF_GRADIENTS = [(q, kv) for q in KINDS_Q for kv in KINDS_KV[:3]]
CAUSAL = {"causal": True}
OPTIONS = (CAUSAL, {"window": (40, 9), "causal": "top_left"}, {"causal": True, "prefix": 20, "softcap": 5.0})
ORDER = (5, 2, 6, 0, 3, 1, 4)
quick = "80"
arches = pytest.mark.parametrize("arch", [None, quick, *(pytest.param(arch, marks=pytest.mark.release) for arch in ("75", "90a"))])


def alike(kinds, arch):
    """Those forms that one kernel serves: on sm_90a caches have another one than keys in rows of their own."""
    return kinds if arch != "90a" else [(q, kv) for q, kv in kinds if kv in KINDS_KV[:3]]


def several(kinds, arch):
    """Of kernels, which take longer, those forms that between them have each kind."""
    return kinds if arch is None else kinds[::2]


@pytest.mark.parametrize("options", [OPTIONS[0], *(pytest.param(o, marks=pytest.mark.release) for o in OPTIONS[1:])], ids=str)
@arches
def test_a_forward_has_the_same_bits_in_every_form(arch, options):
    ragged = Ragged(LENS)
    expected = forward(ragged, "packed", "packed", arch, **options)
    assert all(numpy.isfinite(out).all() for out, _ in expected)
    for turn, (kind_q, kind_kv) in enumerate(several(alike(FORMS, arch), arch)):
        assert_same_bits(forward(ragged, kind_q, kind_kv, arch, turn, **options), expected)


@arches
def test_a_forward_of_one_sequence_has_the_bits_that_it_has_among_others(arch):
    ragged = Ragged(LENS)
    expected = forward(ragged, "packed", "packed", arch, **CAUSAL)
    pages = "pages" if arch != "90a" else "roomy"
    assert_same_bits(forward(ragged.some(*ORDER), "padded", pages, arch, **CAUSAL), [expected[i] for i in ORDER])
    for number in range(len(LENS)):
        for kinds in (("packed", "padded"), ("padded", pages)):
            assert_same_bits(forward(ragged.some(number), *kinds, arch, number, **CAUSAL), [expected[number]])


@arches
def test_a_backward_has_the_same_bits_in_every_form(arch):
    ragged = Ragged(LENS)
    expected = backward(ragged, "packed", "packed", arch, **CAUSAL)
    assert all(numpy.isfinite(x).all() for gradients in expected for x in gradients)
    for turn, (kind_q, kind_kv) in enumerate(several(OF_GRADIENTS, arch)):
        assert_same_bits(backward(ragged, kind_q, kind_kv, arch, turn, **CAUSAL), expected)
    assert_same_bits(backward(ragged.some(*ORDER), "roomy", "padded", arch, **CAUSAL), [expected[i] for i in ORDER])
    for number in range(len(LENS)):
        assert_same_bits(backward(ragged.some(number), "padded", "packed", arch, number, **CAUSAL), [expected[number]])


@pytest.mark.release
@pytest.mark.parametrize("dtype, dim", [("float32", 32), ("bfloat16", 128), ("float16", 256)])
@pytest.mark.parametrize("arch", [None, "80", "90a"])
def test_bits_of_other_kernels(arch, dtype, dim):
    dtype = numpy.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
    ragged = Ragged(LENS, (2, 1), dim, dtype)
    expected = forward(ragged, "packed", "packed", arch, **CAUSAL), backward(ragged, "packed", "packed", arch, **CAUSAL)
    of_hopper = arch == "90a"  # which keys in rows of their own are for, and caches are not
    of_caches = forward(ragged, "packed", "pages", arch, **CAUSAL) if of_hopper else expected[0]
    assert_same_bits(forward(ragged, "padded", "padded" if of_hopper else "pages", arch, **CAUSAL), expected[0])
    assert_same_bits(forward(ragged.some(2, 0), "roomy", "cache", arch, **CAUSAL), [of_caches[i] for i in (2, 0)])
    assert_same_bits(backward(ragged, "padded", "roomy", arch, **CAUSAL), expected[1])
    assert_same_bits(backward(ragged.some(6), "roomy", "padded", arch, **CAUSAL), expected[1][6:])


def test_a_sequence_has_the_bits_of_a_call_without_lengths():
    """With NumPy of any; kernels without lengths have other tiles for few queries, and share tiles in other ways."""
    ragged = Ragged(LENS, dtype="float32")
    for number, (out, lse) in enumerate(forward(ragged, "packed", "pages", **CAUSAL)):
        part = ragged.parts[number]
        assert_same_bits([(out, lse)], [attention(part["q"], part["k"], part["v"], return_lse=True, **CAUSAL)])


def test_the_same_tile_serves_padded_and_packed_queries():
    """Of more queries than the rows of tuning tables for few of them; and where dq is summed in order, of few in a long array.

    Without lengths of queries blocks share the tiles of few heads, and not of many.
    """
    lens, offsets, options = numpy.array([9, 9]), numpy.array([0, 9, 18]), {"backend": "host", "arch": "90a"}
    for heads in (4, 80):
        part, packed = numpy.zeros((2, heads, 100, 64), numpy.float16), numpy.zeros((heads, 200, 64), numpy.float16)
        plans = [
            plan_attention(part, part, part, seqlens_q=lens, **options),
            plan_attention(packed, part, part, cu_seqlens_q=offsets, **options),
            plan_attention(part, part, part, seqlens_kv=lens, **options),
        ]
        kernels = [replace(plan.kernel, config=replace(plan.kernel.config, UNLISTED=False)) for plan in plans]
        assert kernels[0] == kernels[1] and not kernels[0].config.SPLIT_KV
        assert kernels[2].config.SPLIT_KV is (heads == 4) and (kernels[2] == kernels[0]) is (heads == 80)
        assert [plan.kernel.config.UNLISTED for plan in plans] == [True, heads == 4, True]  # packed, a head may have two tiles more
    part, packed = part[:, :4], packed[:4]
    gradients = []
    for q, given in ((part, {"seqlens_kv": lens}), (part, {"seqlens_q": lens}), (packed, {"cu_seqlens_q": offsets})):
        lse = numpy.zeros(q.shape[:-1], numpy.float32)
        gradients.append(plan_attention_backward(q, q, part, part, q, lse, deterministic=True, **given, **options))
    assert len({plan.kernel for plan in gradients}) == 1


def test_few_queries_that_are_neither_packed_nor_padded_have_a_tile_of_their_own():
    """As in decoding: heads of a group share a tile, so that results differ in bits from those of packed queries."""
    q, k = numpy.zeros((3, 4, 1, 64), numpy.float16), numpy.zeros((3, 2, 90, 64), numpy.float16)
    options = {"backend": "host", "arch": "80", "seqlens_kv": numpy.array([90, 1, 7])}
    few = plan_attention(q, k, k, **options)
    packed = plan_attention(q[:, :, 0].swapaxes(0, 1), k, k, cu_seqlens_q=numpy.arange(4), **options)
    assert (few.kernel.config.TILE_Q, packed.kernel.config.TILE_Q) == (16, 128)
    assert "2 query heads of a group share a tile" in str(few) and "share a tile" not in str(packed)


def test_the_kernel_does_not_depend_on_how_many_keys_there_is_room_for():
    """Nor on whether a window is wider than that: heads that share a tile are told which query a row is, or not."""
    q, lens = numpy.zeros((3, 32, 5, 64), numpy.float16), numpy.array([90, 1, 7])
    for options in ({"window": (100, None)}, {"window": (None, 95), "causal": "top_left"}, {"window": (100, 0), "prefix": 0}):
        kernels = set()
        for room in (90, 96, 300):
            k = numpy.zeros((3, 2, room, 64), numpy.float16)
            kernels.add(plan_attention(q, k, k, seqlens_kv=lens, backend="host", arch="80", **options).kernel)
        assert len(kernels) == 1
