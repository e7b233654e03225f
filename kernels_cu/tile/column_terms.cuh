// column_terms.cuh -- a term of the key alone (PLUS_COLUMN) in fwd_hopper.cu. The producer finds it once for each key of a tile, where every lane
// would for all pairs that it has, and puts it into shared memory beside the keys. Products start from it, so that a score costs no addition.
//
//   What lies there is the term in units of products, less what all of a tile have in common, and behind them that, in units of log 2. It is 0 but
//   in a tile whose terms are all so large, such as -1e9, that only differences of such terms are exact: then it is the largest one. The largest of
//   the tiles so far is left out of a maximum (`OnlineSoftmax`) until all keys have been seen. Where one term is ordinary nothing is subtracted, or
//   a large one, of a key that is masked, would take from the others what they differ by.
#pragma once
#include "tile/score.cuh"
#include "tile/softmax.cuh"
#include "tile/work.cuh"

constexpr bool COLUMNS = SCORES == PLUS_COLUMN;
constexpr int COLUMN_BYTES = COLUMNS ? 4 * (TILE_KV + 4) : 0; // of a stage

constexpr float ORDINARY = 0x1p22f;                           // in units of log 2 a maximum of such terms is rounded by less than 1
constexpr float MOST_COMMON = 2e38f;                          // in units of log 2 it is no infinity

// Those of a tile: of a lane's keys, less what is in common, in units of products; and that, in units of log 2.
struct ColumnTerms {
  static constexpr int each = ceil_div(TILE_KV, 32);          // of a lane
  Regs<float, each> term;
  Regs<float, 1> common;
};
template <typename Params, typename Coord> OP void find_columns(ColumnTerms& columns, const Params& p, const Coord& of_keys, int head, int first_key) {
  const int len_kv = max_of(rows_at<KEYS>(p, of_keys).len(), 1);
  const ScoreContext x = score_context(p, of_keys, head, rows_at<QUERIES>(p, of_keys).len(), len_kv);
  Regs<bool, 1> ordinary;
  for_lane(l) {
    columns.common.at(l, 0) = -infinity();
    ordinary.at(l, 0) = false;
    #pragma unroll
    for (int i = 0; i < columns.each; ++i) {
      const float term = columns.term.at(l, i) = term_of_key(x, min_of(first_key + min_of(32 * i + l, TILE_KV - 1), len_kv - 1));
      ordinary.at(l, 0) |= fabsf(term) <= ORDINARY;
      if (term <= MOST_COMMON) columns.common.at(l, 0) = fmaxf(columns.common.at(l, 0), term);
    }
  }
  reduce_lanes<32>(columns.common, [](float a, float b) { return fmaxf(a, b); });
  const bool none = warp_any(ordinary);
  for_lane(l) {
    const float largest = columns.common.at(l, 0), common = none || largest < -MOST_COMMON ? 0.f : largest;     // -inf - -inf would be NaN
    #pragma unroll
    for (int i = 0; i < columns.each; ++i) columns.term.at(l, i) = (columns.term.at(l, i) - common) * (1.f / p.scale);
    columns.common.at(l, 0) = common * LOG2E;
  }
}
OP void store(SharedAddress to, const ColumnTerms& columns) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < columns.each; ++i)
      if (32 * i + l < TILE_KV) store_shared(to + 4 * (32 * i + l), columns.term.at(l, i));
    if (l == 0) store_shared(to + 4 * TILE_KV, columns.common.at(l, 0));
  }
}

// Two neighbours of a fragment from shared memory, where `always` says so. It does, but the assembler does not know: what was in the registers has to
// leave them before, and the same ones serve both.
OP void load_over(float& a, float& b, SharedAddress address, bool always) {
#if ON_GPU
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p ld.shared.v2.f32 {%0, %1}, [%2]; }" : "+f"(a), "+f"(b) : "r"(address), "r"(int(always)) : "memory");
#else
  const Pair pair = load_shared<Pair>(address);
  a = pair.x[0], b = pair.x[1];
#endif
}
// s, as a product starts from it. Returns what all columns have in common.
template <int M, int N> OP float start_from_columns(Acc<M, N>& s, SharedAddress columns) {
  const bool always = columns != SharedAddress{};
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; r += 2) load_over(s.at(l, r), s.at(l, r + 1), columns + s.col(l, r) * 4, always);
  }
  return load_shared<float>(columns + 4 * N);
}
// What the rows have in common in this tile, besides the largest of all tiles, which a tile may raise.
template <int M> OP void leave_out_largest(OnlineSoftmax<M>& state, RowVec<M>& terms, float common, float& largest) {
  if (common > largest) {
    for_lane(l) {
      #pragma unroll
      for (int i = 0; i < terms.slots; ++i) state.max.at(l, i) = fmaxf(state.max.at(l, i) + (largest - common), LOWEST);
    }
    largest = common;
  }
  fill(terms, common - largest);
}
// The end of a softmax: a maximum of scores.
template <int M> OP void count_largest(OnlineSoftmax<M>& state, float& largest) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < state.max.slots; ++i) state.max.at(l, i) += largest;
  }
  largest = LOWEST;
}
