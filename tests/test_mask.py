"""Which scores the kernels mask, register by register, against the definition of a mask: a kernel on the host counts faults."""

import re

import pytest
from thinned import thinned

from cupy_flash import plan_attention
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.machine import source

DEFINITION = """\
#include <initializer_list>
#include "tile/pipeline.cuh"
#include "tile/mask.cuh"

static bool sees(const Mask& mask, i64 query, i64 key) {
  const bool near = query + mask.of.left <= key && key <= query + mask.of.right;
  return (near || key < mask.of.prefix) && 0 <= key && key < mask.len_kv;
}
static bool sees(const TransposedMask& mask, i64 key, i64 query) {
  const bool near = key + mask.left <= query && query <= key + mask.right;
  return (near || key < mask.prefix) && 0 <= query && query < mask.len_q && 0 <= key && key < mask.len_kv;
}
"""
# Visible scores are numbers of their own, the others NaN. Visible ones must come back as they were, the others as `masked`.
COUNTING = """
template <int M, int N, typename AnyMask> int faults(const AnyMask& mask, int row0, int col0) {
  const float masked = MASKED;
  Acc<M, N> s;
  const auto number = [&](int l, int r) { return float(s.row(l, r) * N + s.col(l, r)); };
  Regs<bool, s.regs> seen;
  for_lane(l)
    for (int r = 0; r < s.regs; ++r) {
      seen.at(l, r) = sees(mask, i64(row0) + s.row(l, r), i64(col0) + s.col(l, r));
      s.at(l, r) = seen.at(l, r) ? number(l, r) : bits_float(0x7fc00000u);
    }
  apply_mask(s, mask, row0, col0, masked);
  int found = 0;
  for_lane(l)
    for (int r = 0; r < s.regs; ++r) found += s.at(l, r) != (seen.at(l, r) ? number(l, r) : masked);
  return found;
}

template <int M, int N> int all_faults() {
  constexpr int UNBOUNDED = 1 << 30;
  int cases = 0, found = 0;
  const auto check = [&](int row0, int col0, int first, int last, int end) {
    [[maybe_unused]] const int rows = row0 + cases++ % (M + 2);      // of a transposed mask, some rows do not exist
    found += faults<M, N>(MASK_OF_CASE, row0, col0);
  };
  CASES
  return found;
}
"""
ENTRY = """
KERNEL(32 * WARPS, 1) fwd_hopper(GRID_CONSTANT HopperForwardParams p) {
  if (warp_id() > 0 || block_id() > 0) return;
  float* const out = static_cast<float*>(p.lse.data);
  RESULTS
}
"""
# Each end of a band passes each column of each row, alone and near the other end. Columns end before, in or behind the tile.
EVERY_EDGE = """
  const int row0 = 3 * M, col0 = 2 * N;
  const int ends[] = {0, col0, col0 + 1, col0 + N / 2 - 1, col0 + N - 8, col0 + N - 7, col0 + N, 5 * N};
  for (int edge = col0 - row0 - M - 9; edge <= col0 - row0 + N + 9; ++edge)
    for (const int width : {0, 1, 2, 3, 7, 8, 9, 10, 64, 65, 127, 128, 129, N, 4 * N}) {
      check(row0, col0, edge, edge + width - 1, ends[cases / 5 % 8]);
      check(row0, col0, edge - 2 * N, edge, ends[cases / 5 % 8]);
    }
"""
# Columns end anywhere, beneath bands that cut nothing, one side, or both.
EVERY_LENGTH = """
  for (int end = 0; end < 2 * N + 20; ++end)
    for (const int first : {-UNBOUNDED, -3, 5})
      for (const int last : {4, N, UNBOUNDED}) check(M, N, first, last, end);
"""
# The longest lengths, and bounds that cut nothing: a row, a bound and a column together do not always fit 32 bits.
FAR = """
  const int longest = UNBOUNDED - 1;
  for (const int row0 : {0, 64, longest - 200})
    for (const int col0 : {0, 64, longest - 200})
      for (const int first : {-UNBOUNDED, -longest + 100, -64, 0, longest - 100})
        for (const int last : {-longest + 100, 0, 64, longest - 100, UNBOUNDED})
          for (const int end : {1, 70, longest - 150, longest}) check(row0, col0, first, last, end);
"""
CASES = "\n".join(f"{{ {cases} }}" for cases in (EVERY_EDGE, EVERY_LENGTH, FAR))
# Of a kind of mask and a direction: options of a plan that is compiled for it, a mask from a case's numbers, and what is masked.
KEYS = "Mask{{first, last}, end}", "-infinity()"
QUERIES = "TransposedMask{first, last, end, rows}", "0.f"
PREFIX_KEYS = "Mask{{-UNBOUNDED, last, {}, max_of(min_of(first, end - 1), 0)}, end}", "-infinity()"
PREFIX_QUERIES = "TransposedMask{first, UNBOUNDED, end, rows, max_of(min_of(last, rows - 1), 0)}", "0.f"
PREFIX = {"causal": True, "prefix": 33}
MASKS = {"keys": ({}, *KEYS), "queries": ({}, *QUERIES)}
MASKS |= {"prefix, keys": (PREFIX, *PREFIX_KEYS), "prefix, queries": (PREFIX, *PREFIX_QUERIES)}
SHAPES = [(16, 64), (16, 112), (64, 48), (16, 256)]
OTHERS = [(16, 80), (16, 176), (32, 128)]
LARGEST = [(32, 256)]



def counting(kind):
    """The functions that count, for one kind of mask."""
    _, mask, masked = MASKS[kind]
    return COUNTING.replace("CASES", CASES).replace("MASK_OF_CASE", mask).replace("MASKED", masked)


@pytest.fixture
def results_of(change_kernel):
    """A function that runs a kernel with these functions, and returns what these expressions are in it."""

    def run(functions, expressions, options):
        results = "\n  ".join(f"out[{i}] = float({expression});" for i, expression in enumerate(expressions))
        change_kernel("fwd_hopper.cu", DEFINITION + functions + ENTRY.replace("RESULTS", results))
        inputs = make_inputs(Case("float16", 64, 64))
        _, lse = plan_attention(*inputs, backend="host", arch="90a", kernel="fwd_hopper", return_lse=True, **options)(*inputs)
        return lse[0, 0, : len(expressions)].tolist()

    return run


@pytest.fixture
def faults(results_of):
    """A function that runs all cases for one kind of mask, and returns how many scores came back wrong for each shape."""

    def run(kind, *shapes):
        calls = [f"all_faults<{rows}, {columns}>()" for rows, columns in shapes]
        return dict(zip(shapes, results_of(counting(kind), calls, MASKS[kind][0])))

    return run


@pytest.mark.parametrize("kind", thinned(MASKS, keep=6))
@pytest.mark.parametrize("shapes", thinned([SHAPES, OTHERS, LARGEST], keep=3), ids=str)
def test_scores_in_the_mask_stay_and_others_go(kind, shapes, faults):
    assert faults(kind, *shapes) == dict.fromkeys(shapes, 0)


@pytest.mark.release  # the last test has sums of the longest lengths as well, and sees what is wrong with them
@pytest.mark.parametrize("kind", thinned(MASKS, keep=5))
def test_no_sum_overflows(kind, faults, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "address")  # and undefined behaviour
    assert faults(kind, (16, 80)) == {(16, 80): 0}


# What could be wrong by one column, one row or one word.
MISTAKES = {
    "even columns": ("(col + 7) >> 3", "(col + 8) >> 3", "keys"),
    "odd columns": ("(col + 6) >> 3", "(col + 7) >> 3", "keys"),
    "first column": ("keys.first - col0", "keys.first + 1 - col0", "keys"),
    "last column": ("keys.last + 1 - col0", "keys.last - col0", "keys"),
    "place of the lane, first": ("keys.first - col0 - s.col(l, 0)", "keys.first - col0", "keys"),
    "place of the lane, end": ("keys.last + 1 - col0 - s.col(l, 0)", "keys.last + 1 - col0", "keys"),
    "before the tile": ("max_of(first - bit0, 0)", "first - bit0", "keys"),
    "nothing seen": ("max_of(end - bit0 - first_bit, 0)", "end - bit0 - first_bit", "keys"),
    "second word, first": ("max_of(first - bit0, 0)", "max_of(first, 0)", "keys"),
    "second word, end": ("end - bit0 - first_bit", "end - first_bit", "keys"),
    "ones": ("u64(first) + count", "u64(first) + count + 1", "keys"),
    "bit": ("visible >> bit & 1", "visible >> (bit ^ 1) & 1", "keys"),
    "rows that do not exist": ("row < mask.len_kv ?", "row <= mask.len_kv ?", "queries"),
    "end of the band": ("query + mask.of.right", "query + mask.of.right + 1", "keys"),
    "beginning of the band": ("query + mask.of.left", "query + mask.of.left + 1", "keys"),
    "end of the band, from a key": ("key + mask.right", "key + mask.right + 1", "queries"),
    "beginning of the band, from a key": ("key + mask.left", "key + mask.left + 1", "queries"),
    "end of the prefix": ("mask.of.prefix - 1", "mask.of.prefix", "prefix, keys"),
    "end of the prefix, from a key": ("key < mask.prefix", "key <= mask.prefix", "prefix, queries"),
    "queries behind the prefix": ("? 0 : first", "? first : 0", "prefix, queries"),
}


OF_MASKS = "keys_of_query|queries_of_key|visible_keys|visible_queries|unmasked_keys|unmasked_queries|visible_in_row"
FUNCTION = re.compile(rf"\b({OF_MASKS}|bmsk|columns_below|apply_mask|faults|all_faults)(?=[(<])")


def functions_of(text):
    """The functions that mask, without structs, of which there is one."""
    parts = (
        ("OP ColumnRange keys_of_query", "// The first and the last query of some rows"),
        ("// the keys between the first and the last one", "// Tiles begin"),
        ("// `count` ones", "// Raw products"),
    )
    return "".join(text[text.index(begin) : text.index(end)] for begin, end in parts)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.release, id="band"), pytest.param(PREFIX, id="prefix")])
def test_each_mistake_is_found(options, results_of):
    """Each is made in a copy of the functions that mask and count, whose names end in its number."""
    mistakes = {name: mistake for name, mistake in MISTAKES.items() if MASKS[mistake[2]][0] == options}
    masking = functions_of(source.files()["tile/mask.cuh"])
    assert [right for right, _, _ in mistakes.values() if masking.count(right) != 1] == []
    copies = [masking.replace(right, wrong) + counting(kind) for right, wrong, kind in mistakes.values()]
    functions = "\n".join(FUNCTION.sub(rf"\1_{i}", copy) for i, copy in enumerate(copies))
    found = results_of(functions, [f"all_faults_{i}<16, 144>()" for i in range(len(mistakes))], options)
    assert [name for name, faults in zip(mistakes, found) if faults == 0] == []
