// column_terms.cuh -- a term of the key alone (PLUS_COLUMN) in fwd_hopper.cu. A warp finds it once for each key of a tile, where every lane would for
// all pairs that it has, and puts it into shared memory beside the keys. There it is one more step of the product of queries and keys,
// of ones beside the queries: S = [1 Q] [T K]^T, so that a score costs no instruction.
//
//   T is the term in units of products, less what all of a tile have in common, and behind a tile lies that, in units of log 2. It is 0 but
//   in a tile whose terms are all so large, such as -1e9, that only differences of such terms are exact: then it is the largest one. The largest of
//   the tiles so far is left out of a maximum (`OnlineSoftmax`) until all keys have been seen. Where one term is ordinary nothing is subtracted, or
//   a large one, of a key that is masked, would take from the others what they differ by.
#pragma once
#include "tile/key_terms.cuh"
#include "tile/pipeline.cuh"
#include "tile/score.cuh"
#include "tile/softmax.cuh"
constexpr bool CUTS_ADDRESSES = false;                        // as measured: 1 % at dim 64
#include "tile/wgmma.cuh"
#include "tile/work.cuh"

constexpr bool COLUMNS = SCORES == PLUS_COLUMN;
// Warps of the producer's group that find them, each those of every third key tile, or of every second one where three do not divide the stages
// (`bring_terms`): so keys do not wait for what a lane reads, and no scheduler has more to do than another. Where blocks take query tiles in turn, or
// key tiles of a list, the warp that brings keys finds them, since it alone is told which.
constexpr int TERM_WARPS = (COLUMNS || HAS_KEY_TERM) && !TAKES_TILES && !TILE_LIST ? (STAGES % 3 == 0 ? 3 : STAGES % 2 == 0 ? 2 : 1) : 0;
constexpr bool TERMS_BY_PRODUCER = COLUMNS && !TERM_WARPS;
static_assert(!HAS_KEY_TERM || (STAGED_BIAS && TERM_WARPS), "nobody has asked for these of lanes that read a bias, or beside lists");

struct ColumnTerms;
// In shared memory: ones, and for each stage of keys their terms, and what these have in common.
struct StoredColumns : TermTile<TILE_KV> {
  typedef ColumnTerms Found;
  static constexpr int stage_bytes = bytes + 16;
  static constexpr int all_bytes = bytes_of_factors + STAGES * stage_bytes, end_as_operand = all_bytes - stage_bytes + bytes_as_operand;
  OP StoredColumns(SharedAddress all, int stage, bool = false) : TermTile{all + bytes_of_factors + stage * stage_bytes, all} {}
  OP SharedAddress common() const { return base + bytes; }
};

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
  const bool none = warp_any(ordinary);
  if (!none) reduce_lanes<32>(columns.common, [](float a, float b) { return fmaxf(a, b); });
  for_lane(l) {
    const float largest = columns.common.at(l, 0), common = none || largest < -MOST_COMMON ? 0.f : largest;     // -inf - -inf would be NaN
    #pragma unroll
    for (int i = 0; i < columns.each; ++i) columns.term.at(l, i) = (columns.term.at(l, i) - common) * (1.f / p.scale);
    columns.common.at(l, 0) = common * LOG2E;
  }
}
OP void store(const StoredColumns& to, const ColumnTerms& columns) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < columns.each; ++i)
      if (32 * i + l < TILE_KV) store_shared(to.at(32 * i + l), parts_of(columns.term.at(l, i)));
    if (l == 0) store_shared(to.common(), columns.common.at(l, 0));
  }
  fence_proxy_async();                                        // without it products, and lanes, read what was there before
}
using BroughtTerms = Choose<HAS_KEY_TERM, StoredKeyTerms, StoredColumns>;
OP float load_common(const StoredColumns& columns) { return load_shared<float>(columns.common()); }

// Sleeps until the stage at hand is empty, or a while: no promise. The hardware wakes a warp many times before `SLEEPS` are over.
constexpr int SLEEPS = 64;
template <typename T, int DEPTH, Lanes LANES> OP void sleep_until_empty(const Pipeline<T, DEPTH, LANES>& pipeline) {
#if ON_GPU
  #pragma unroll 1
  for (int i = 0; i < SLEEPS && !mbarrier_try_wait_parity(pipeline.empty().address, pipeline.phase() ^ 1); ++i) {}
#endif
}

// By one of TERM_WARPS: the terms of its key tiles, to the stages of these, which are its own, since so many warps divide the stages. It waits for those
// alone, and for each of their phases: the next one does not end before it has arrived.
// At the stages of other tiles it sleeps, since one that has slept for several tiles wakes later: as measured, 2 to 3 % at dim 64.
template <typename Keys> OP void bring_terms(Keys keys, const WorkParams& p, const Mask& mask, SharedAddress all_columns, u32 warp) {
  #pragma unroll 1
  for (u32 index = 0; int(warp) < TERM_WARPS && has_work_tile(p, index); ++index) {
    const WorkTile here = work_tile_coord(p, index, TILE_Q);
    TileCoord of_keys = here;
    of_keys.head = here.head / p.heads_per_kv;
    NBlockRange tiles = n_block_range(mask, here.row, min_of(TILE_Q, rows_at<QUERIES>(p, here).len() - here.row), TILE_KV, {0, 1});
    if (is_split(p, index, here)) tiles = clip_range(here.split.keys, tiles);
    #pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile, keys.advance()) {
      if (keys.count % max_of(TERM_WARPS, 1) != warp) {
        if constexpr (GROUPS > 1) sleep_until_empty(keys);    // with one group a register would spill
        continue;
      }
      typename BroughtTerms::Found found;
      find_columns(found, p, of_keys, here.head, tile * TILE_KV);
      producer_acquire(keys);                                 // without it terms are overwritten that are still read
      store(BroughtTerms(all_columns, keys.stage()), found);
      arrive_at(keys.full());                                 // without it consumers wait for ever
    }
  }
}

// The stage at hand = keys from `row` on, and beneath that these terms; goes on to the next one. Bytes that come before they are announced count all the
// same, and the keys shall not wait until the terms have been written.
template <typename T, int DEPTH, Lanes LANES, typename Coord>
OP void load_with_terms(Pipeline<T, DEPTH, LANES>& keys, const TensorMap& map, const Coord& of_keys, int row, SharedAddress all_columns,
                        const ColumnTerms& columns, CallSite at = call_site()) {
  start_load(keys, map, of_keys.batch, of_keys.head, row, at);
  store(StoredColumns(all_columns, keys.stage()), columns);
  arrive_expect_tx(keys.full(), T::bytes, at);
  keys.advance();
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
