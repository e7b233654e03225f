"""Dropout: random bits are those of Philox and pcg4d, a pair's depend on where it is alone, and kernels draw what NumPy draws."""

import inspect
import math
import subprocess
from fractions import Fraction

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinned import thinned

from cupy_flash import dropout_mask, plan_attention
from cupy_flash.call import dropout as call
from cupy_flash.machine import host, machine_code, nvrtc, source, toolchain
from cupy_flash.machine.host import HostOptions
from cupy_flash.machine.numpy_path.dropout import keeps, pcg4d, philox4x32_7
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.matrix import every_plan
from cupy_flash.plan.sources import files, shelf
from cupy_flash.problem.dropout import Dropout, make_dropout, make_seed

SEED, OFFSET = 0x0123456789ABCDEF, 0xFEDCBA98
HALF = 1 << 14


def words(text):
    return tuple(int(word, 16) for word in text.split())


# The definition, in Python's integers


def reference_philox(counter, key):
    """Seven rounds of Philox4x32."""
    for _ in range(7):
        x0, x1, x2, x3 = counter
        product0, product1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        counter = product1 >> 32 ^ x1 ^ key[0], product1 % 2**32, product0 >> 32 ^ x3 ^ key[1], product0 % 2**32
        key = tuple((word + step) % 2**32 for word, step in zip(key, (0x9E3779B9, 0xBB67AE85)))
    return counter


def reference_pcg4d(x, y, z, w, f=0):
    """The listing of the paper, a statement a line, but that f changes y half way."""
    x, y, z, w = ((word * 1664525 + 1013904223) % 2**32 for word in (x, y, z, w))
    x = (x + y * w) % 2**32
    y = (y + z * x) % 2**32
    z = (z + x * y) % 2**32
    w = (w + y * z) % 2**32
    x, y, z, w = (word ^ word >> 16 for word in (x, y, z, w))
    y = y ^ f
    x = (x + y * w) % 2**32
    y = (y + z * x) % 2**32
    z = (z + x * y) % 2**32
    w = (w + y * z) % 2**32
    return x, y, z, w


def reference_keeps(threshold, seed, offset, batch_head, query, key):
    return reference_bits(seed, offset, batch_head, query, key) >= threshold


def reference_bits(seed, offset, batch_head, query, key):
    a, b, c, d = reference_philox((offset, 0, 0, 0), (seed % 2**32, seed >> 32))
    of_query, of_key = query // 64 * 8 + query % 2 * 4 + query % 8 // 2, key // 64 * 4 + key % 8 // 2
    f = (0x9E3779B9 if query // 16 % 2 else 0) ^ (0x85EBCA6B if query // 32 % 2 else 0)
    m = 0x7FEB352D * (0x27D4EB2D if key // 16 % 2 else 1) * (0xC2B2AE3B if key // 32 % 2 else 1)
    x, y, z, w = reference_pcg4d(b + of_query, c + of_key, a + batch_head, d, f)
    p = x + m * y
    four = p, y + m * z, z + m * w, w + m * p
    word = four[query // 8 % 2 * 2 + key // 8 % 2] % 2**32
    return (word >> 16 if key % 2 else word) % 2**15


# Random words

# kat_vectors of Random123, the authors' own implementation.
KNOWN = {
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
}


@pytest.mark.parametrize("counter, key, expected", [tuple(map(words, answer)) for answer in KNOWN.values()], ids=KNOWN)
def test_known_answers(counter, key, expected):
    assert reference_philox(counter, key) == expected
    assert tuple(map(int, philox4x32_7(tuple(map(numpy.uint32, counter)), key))) == expected
    several = tuple(numpy.full((2, 3), word, numpy.uint32) for word in counter)
    for found, word in zip(philox4x32_7(several, key), expected):
        assert found.dtype == numpy.uint32 and (found == word).all()


word = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(word, word, word, word), min_size=1, max_size=8), word)
def test_words_of_pcg4d(drawn, f):
    found = pcg4d(*numpy.array(drawn, numpy.uint32).T, f)
    assert all(of.dtype == numpy.uint32 for of in found)
    assert list(zip(*(of.tolist() for of in found))) == [reference_pcg4d(*words, f) for words in drawn]


# Which pairs are kept

positions = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**30)), max_size=8)


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**15 - 1), positions, positions
)
def test_pairs_anywhere_follow_the_definition(seed, offset, batch_head, threshold, queries, keys):
    kept = keeps(threshold, seed, offset, batch_head, numpy.array(queries, int), numpy.array(keys, int))
    assert kept.dtype == bool and kept.shape == (len(queries), len(keys))
    expected = [[reference_keeps(threshold, seed, offset, batch_head, query, key) for key in keys] for query in queries]
    assert kept.tolist() == expected


@given(st.data())
def test_a_part_of_a_mask_is_the_mask_of_that_part(data):
    starts, ends = zip(*[sorted(data.draw(st.tuples(st.integers(0, 100), st.integers(0, 100)))) for _ in range(2)])
    part = keeps(HALF, SEED, OFFSET, 3, *map(numpy.arange, starts, ends))
    numpy.testing.assert_array_equal(part, WHOLE[starts[0] : ends[0], starts[1] : ends[1]])


WHOLE = keeps(HALF, SEED, OFFSET, 3, numpy.arange(100), numpy.arange(100))


def test_a_mask_computed_in_parts_is_the_mask():
    """More than is evaluated at a time, in one direction and in the other."""
    wide = keeps(HALF, SEED, OFFSET, 3, numpy.arange(100), numpy.arange(70_000))
    tall = keeps(HALF, SEED, OFFSET, 3, numpy.arange(70_000), numpy.arange(100))
    for found in (wide[:, :100], tall[:100]):
        numpy.testing.assert_array_equal(found, WHOLE)
    late = numpy.arange(69_900, 70_000)
    numpy.testing.assert_array_equal(wide[:, -100:], keeps(HALF, SEED, OFFSET, 3, numpy.arange(100), late))
    numpy.testing.assert_array_equal(tall[-100:], keeps(HALF, SEED, OFFSET, 3, late, numpy.arange(100)))


def test_mask_is_that_of_each_head():
    mask = dropout_mask((2, 3, 5, 20, 40), 0.5, (SEED, OFFSET))
    assert type(mask) is numpy.ndarray and mask.dtype == bool
    for number, of_head in enumerate(mask.reshape(30, 20, 40)):
        numpy.testing.assert_array_equal(of_head, keeps(HALF, SEED, OFFSET, number, numpy.arange(20), numpy.arange(40)))
    numpy.testing.assert_array_equal(dropout_mask((20, 40), 0.5, (SEED, OFFSET)), mask[0, 0, 0])
    assert len({of_head.tobytes() for of_head in mask.reshape(30, -1)}) == 30


def test_mask_changes_with_each_part_of_the_seed():
    seeds = [0, 1, 1 << 32, (0, 1), (1, 1), (0, 1 << 31), 2**64 - 1]
    assert len({dropout_mask((16, 16), 0.5, seed).tobytes() for seed in seeds}) == len(seeds)
    numpy.testing.assert_array_equal(dropout_mask((16, 16), 0.5, 7), dropout_mask((16, 16), 0.5, [numpy.uint64(7), 0]))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share_of_pairs_kept(p):
    """Binomial, of all pairs and of each eighth row and column: within six standard deviations, but once in 500 million."""
    mask = dropout_mask((4, 512, 1024), p, SEED)
    parts = [mask, *(mask[:, i::8] for i in range(8)), *(mask[:, :, i::8] for i in range(8)), *mask]
    for part in parts:
        assert abs(part.sum() - part.size * (1 - p)) <= 6 * math.sqrt(part.size * p * (1 - p))


APART = [  # head, query, key: next to each other, or of those that share what is drawn
    (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 8, 0), (0, 0, 8), (0, 8, 8), (0, 8, 1), (0, 8, 9), (0, 16, 0), (0, 0, 16), (0, 16, 16),
    (0, 24, 0), (0, 0, 24), (0, 24, 24), (0, 24, 25), (0, 32, 0), (0, 0, 32), (0, 32, 32), (0, 48, 0), (0, 0, 48), (0, 48, 48),
    (0, 32, 16), (0, 16, 32), (0, 64, 0), (0, 0, 64),
]  # fmt: skip


def test_two_pairs_are_dropped_independently():
    """Both of two pairs next to each other, or that share what is drawn, are kept with probability 1/4, not more often or less."""
    mask = dropout_mask((4, 512, 1024), 0.5, SEED)
    heads, queries, keys = mask.shape
    for head, query, key in APART:
        both = mask[head:, query:, key:] & mask[: heads - head, : queries - query, : keys - key]
        # Two sums over disjoint pairs of independent events each have half of them: their deviations add at most.
        assert abs(both.sum() - both.size / 4) <= 2 * 6 * math.sqrt(both.size / 2 * 3 / 16)


def patterns(mask, axes):
    """How often which of 16 pairs are kept that share what is drawn, of those that differ in these bits of their places."""
    heads, queries, keys = mask.shape
    # Bits of a place: all above 5, then 5, 4, 3, 2 and 1, and 0.
    apart = mask.reshape(heads, queries // 64, 2, 2, 2, 4, 2, keys // 64, 2, 2, 2, 4, 2)
    names = ["head", *(f"{of}{bit}" for of in ("query", "key") for bit in ("", " 32", " 16", " 8", " 2", " 1"))]
    together = numpy.moveaxis(apart, [names.index(axis) for axis in axes], range(-len(axes), 0)).reshape(-1, 16)
    return numpy.bincount(numpy.packbits(together, axis=1).astype(int) @ [256, 1], minlength=1 << 16)


SIXTEEN = [  # of a lane of the forward and of the backward, of one word in all 16 x 16 pairs, and of what is left
    ("query 8", "key 16", "key 8", "key 1"),
    ("query 16", "query 8", "key 8", "key 1"),
    ("query 32", "query 16", "key 32", "key 16"),
    ("query 32", "query 8", "key 32", "key 1"),
]


@pytest.mark.parametrize("axes", SIXTEEN, ids=" ".join)
@pytest.mark.parametrize("p", thinned([0.5, 0.25]))
def test_sixteen_pairs_are_dropped_independently(p, axes):
    """Each of 65,536 patterns is as often as if all pairs were independent.

    By chi-square, whose mean is the number of patterns less one, within six standard deviations.
    """
    counts = patterns(dropout_mask((4, 2048, 4096), p, SEED), axes)
    kept = numpy.array([bin(pattern).count("1") for pattern in range(1 << 16)])
    expected = counts.sum() * (1 - p) ** kept * p ** (16 - kept)
    often = expected >= 5
    counts, expected = (numpy.append(x[often], x[~often].sum()) for x in (counts, expected))
    counts, expected = (x[expected > 0] for x in (counts, expected))
    freedom = len(counts) - 1
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) <= 6 * math.sqrt(2 * freedom)


def test_nothing_to_drop():
    assert dropout_mask((3, 20, 40), 0.0, 7).all() and dropout_mask((3, 20, 40), 1e-12, 7).all()
    assert dropout_mask((0, 20, 40), 0.5, 7).shape == (0, 20, 40) and dropout_mask((2, 0, 40), 0.5, 7).shape == (2, 0, 40)


def test_like_says_which_kind_of_array():
    for like in (None, numpy.zeros(3), numpy.zeros((), "f2")):
        assert type(dropout_mask((4, 4), 0.5, 7, like=like)) is numpy.ndarray


class LikeCupy:
    """What NumPy hands a function of its own to, if CuPy's has a parameter for each argument; NumPy computes it."""

    def __array_function__(self, function, types, args, options):
        inspect.signature(getattr(pytest.importorskip("cupy"), function.__name__)).bind(*args, **options)
        return function(*args, **options)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_arrays_are_made_as_cupy_makes_them(p):
    for shape in ((2, 20, 40), (2, 0, 40)):
        mask = call._mask(shape, make_dropout(p), 7, 0, LikeCupy())
        numpy.testing.assert_array_equal(mask, dropout_mask(shape, p, 7))


def test_like_a_tensor():
    torch = pytest.importorskip("torch")
    assert dropout_mask((4, 4), 0.5, 7, like=torch.zeros(2)).dtype == torch.bool


# Probability and seed


@pytest.mark.parametrize(
    "p, threshold",
    [
        (0.5, 1 << 14),
        (numpy.float32(0.25), 1 << 13),
        (Fraction(1, 3), 10923),
        (2.0**-15, 1),
        (2.0**-15 * 0.75, 1),
        (1 - 2.0**-15, 2**15 - 1),
        (math.nextafter(1, 0), 2**15 - 1),
    ],
)
def test_threshold_and_scale_agree(p, threshold):
    dropout = make_dropout(p)
    assert dropout == Dropout(threshold)
    assert dropout.scale == float(Fraction(2**15, 2**15 - threshold))


def test_a_plan_says_what_is_dropped_in_words():
    assert str(make_dropout(0.1)) == "dropout: leaves out 0.100006 of the pairs, multiplies the others by 1.11112"
    x = numpy.ones((1, 3, 4), numpy.float32)
    assert f"\n  {make_dropout(0.25)}\n" in str(plan_attention(x, x, x, dropout=0.25, seed=1))


@pytest.mark.parametrize("p", [0, 0.0, -0.0, 2.0**-17, numpy.float64(0)])
def test_no_dropout(p):
    assert make_dropout(p) is None


RANGE = "expected a number of at least 0 and below 1, got"
EITHER = r"expected an integer or a pair \(seed, offset\), got"
WRONG = [
    (ValueError, {"dropout": -0.1}, f"dropout: {RANGE} -0.1"),
    (ValueError, {"dropout": 1}, f"dropout: {RANGE} 1"),
    (ValueError, {"dropout": 10**400}, f"dropout: {RANGE} 1000"),
    (ValueError, {"dropout": math.nan}, f"dropout: {RANGE} nan"),
    (TypeError, {"dropout": True}, f"dropout: {RANGE} True"),
    (TypeError, {"dropout": "0.1"}, f"dropout: {RANGE} '0.1'"),
    (TypeError, {"dropout": None}, f"dropout: {RANGE} None"),
    (TypeError, {"dropout": numpy.array(0.5)}, f"dropout: {RANGE} array"),
    (TypeError, {"seed": None}, f"seed: {EITHER} None"),
    (TypeError, {"seed": 1.0}, f"seed: {EITHER} 1.0"),
    (TypeError, {"seed": numpy.True_}, f"seed: {EITHER} "),
    (TypeError, {"seed": (1, 2.0)}, r"seed: expected integers in the pair \(seed, offset\), got 2.0"),
    (TypeError, {"seed": (False, 2)}, r"seed: expected integers in the pair \(seed, offset\), got False"),
    (ValueError, {"seed": (1, 2, 3)}, rf"seed: {EITHER} \(1, 2, 3\)"),
    (ValueError, {"seed": -1}, r"seed: expected a seed of at least 0 and below 2\*\*64, got -1"),
    (ValueError, {"seed": (2**64, 0)}, r"seed: expected a seed of at least 0 and below 2\*\*64, got 18446744073709551616"),
    (ValueError, {"seed": (0, 2**32)}, r"seed: expected an offset of at least 0 and below 2\*\*32, got 4294967296"),
    (ValueError, {"seed": (0, -1)}, r"seed: expected an offset of at least 0 and below 2\*\*32, got -1"),
    (TypeError, {"shape": 16}, r"shape: expected a tuple of integers, \(\.\.\., heads, seq_q, seq_kv\), got 16"),
    (TypeError, {"shape": (4, 4.0)}, "shape: expected a tuple of integers, got 4.0"),
    (ValueError, {"shape": (4,)}, r"shape: expected at least 2 axes, \(\.\.\., heads, seq_q, seq_kv\), got \(4,\)"),
    (ValueError, {"shape": (4, -4)}, r"shape: expected sizes of at least 0, got \(4, -4\)"),
    (TypeError, {"like": "cupy"}, "like: expected a NumPy or CuPy array"),
]


@pytest.mark.parametrize("error, change, message", WRONG, ids=str)
def test_what_is_wrong_is_named(error, change, message):
    with pytest.raises(error, match=message):
        dropout_mask(**{"shape": (4, 4), "dropout": 0.5, "seed": 7} | change)


def test_seed_and_offset():
    assert make_seed(2**64 - 1) == (2**64 - 1, 0) and make_seed((numpy.int32(3), 2**32 - 1)) == (3, 2**32 - 1)


# The kernels' own

PLACES = [(0, 0, 0), (7, 16, 128), (2**32 - 1, 2**30 - 48, 2**20)]  # batch_head, row0, col0
TILES = [(16, 16), (16, 64), (32, 48), (16, 32), (16, 128)]
# The bits of the first pair at the first place, which is just kept.
THRESHOLD = reference_bits(SEED, OFFSET, 0, 0, 0)

PROGRAM = """
#include "tile/dropout.cuh"
#include <cstdio>
const host::KernelFile host::kernel_file{1, 0, nullptr};  // there is none
template <bool TRANSPOSED, int M, int N> void show(const Dropping& dropout, u32 batch_head, int row0, int col0) {
  Acc<M, N> x;
  for_lane(l) for (int r = 0; r < x.regs; ++r) {
    const int row = x.row(l, r), col = x.col(l, r);
    x.at(l, r) = (row + col) % 5 ? float(1 + row * N + col) : infinity();
  }
  KeptPairs<TRANSPOSED, M, N> kept;
  draw(kept, dropout, batch_head, row0, col0);
  drop(x, kept);
  float whole[M][N];
  for_lane(l) for (int r = 0; r < x.regs; ++r) whole[x.row(l, r)][x.col(l, r)] = x.at(l, r);
  std::fwrite(whole, sizeof whole, 1, stdout);
}
"""


def test_a_pair_whose_bits_are_the_threshold_is_kept():
    first = numpy.arange(1)
    assert keeps(THRESHOLD, SEED, OFFSET, 0, first, first) and not keeps(THRESHOLD + 1, SEED, OFFSET, 0, first, first)


def test_host_kernels_drop_the_same_pairs(tmp_path):
    scale = numpy.float32(Dropout(THRESHOLD).scale)
    calls, expected = [], []
    for transposed in (False, True):
        for rows, cols in TILES:
            for batch_head, row0, col0 in PLACES:
                col0 -= 32 * (cols % 64 > 0 and col0 > 0)  # narrow tiles may begin half way through what is drawn at once
                call = f"show<{str(transposed).lower()}, {rows}, {cols}>"
                told = f"DropoutParams{{{THRESHOLD}u, {float(scale)!r}f, {SEED % 2**32}u, {SEED >> 32}u, {OFFSET}u}}"
                calls.append(f"{call}(dropping({told}), {batch_head}u, {row0}, {col0});")
                places = numpy.arange(row0, row0 + rows), numpy.arange(col0, col0 + cols)
                kept = keeps(THRESHOLD, SEED, OFFSET, batch_head, *(places[::-1] if transposed else places))
                row, col = numpy.indices((rows, cols))
                x = numpy.where((row + col) % 5, 1 + row * cols + col, numpy.inf).astype("f4")
                expected.append(numpy.where(kept.T if transposed else kept, x, numpy.float32(0)).tobytes())
    (tmp_path / "dropout.cpp").write_text(PROGRAM + f"int main() {{ {' '.join(calls)} }}\n")
    (tmp_path / "machine.o").write_bytes(host._machine(files(), HostOptions()))
    command = [*toolchain.compiler(), "-std=c++17", "-pthread", "-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{shelf()}"]
    subprocess.run([*command, "dropout.cpp", "machine.o", "-o", "dropout"], check=True, cwd=tmp_path)
    assert subprocess.run([tmp_path / "dropout"], check=True, capture_output=True).stdout == b"".join(expected)


KERNEL = """
#include "tile/dropout.cuh"
KERNEL(128, 1) kernel(DropoutParams dropout, float* memory, u32 batch_head, int row0, int col0) {
  Acc<16, 64> x;
  for_lane(l) for (int r = 0; r < x.regs; ++r) x.at(l, r) = memory[32 * r + l];
  KeptPairs<%s, 16, 64> kept;
  draw(kept, dropping(dropout), batch_head, row0, col0);
  drop(x, kept);
  for_lane(l) for (int r = 0; r < x.regs; ++r) memory[32 * r + l] = x.at(l, r);
}
"""


@pytest.mark.parametrize("architecture", ["75", "80", "90a"])
@pytest.mark.parametrize("transposed", ["false", "true"])
def test_gpu_kernels_keep_fragments_in_registers(monkeypatch, architecture, transposed):
    headers = {name: text for name, text in source.files().items() if name.endswith(".cuh")}
    monkeypatch.setattr(nvrtc, "source_of", lambda plan: {"dropout.cu": KERNEL % transposed, **headers})
    plan = next(every_plan([ARCHITECTURES[architecture]], ["float16"]))
    code, _ = nvrtc.compile_plan(plan)
    assert machine_code.read(code)["kernel"].stack_bytes == 0
