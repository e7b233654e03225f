// linear_terms.cuh -- a term that is linear in the places of a pair (PLUS_LINEAR) in fwd_hopper.cu. What the rows have in common of it in a key tile
// goes into the exponent (`terms_of_rows`). What is left is how far a key is from the middle of the tile, times what the term changes by from a key to
// the next. That is one more step of the product of queries and keys, S = [step Q] [far K]^T, so that a score costs no instruction. Distances are the
// same in all tiles, and are stored once; the step of a head comes with its queries.
#pragma once
#include "tile/column_terms.cuh"

constexpr bool LINEAR = SCORES == PLUS_LINEAR;

// In shared memory: distances, and for each stage of queries the step.
struct StoredSteps : TermTile<TILE_KV> {
  static constexpr int all_bytes = bytes + STAGES_Q * bytes_of_factors;
  OP StoredSteps(SharedAddress all, int stage) : TermTile{all, all + bytes + stage * bytes_of_factors} {}
};
static_assert(TILE_KV <= 512, "bfloat16 has distances exactly");

template <typename Params, typename Coord> OP float step_of_head(const Params& p, const Coord& here) {
  return head_terms(p, here, here.head, rows_at<QUERIES>(p, here).len(), keys_of_sequence(p, here)).step;
}
// Both by the producer's warp, which shows them with the step.
OP void store_distances(const StoredSteps& to) {
  for_lane(l) {
    #pragma unroll
    for (int key = l; key < TILE_KV; key += 32) {
      const u32 far = float_bits(float(key - TILE_KV / 2)) >> 16;
      store_shared(to.at(key), TermParts{far | far << 16, far, 0, 0}); // one for each part of the step
    }
  }
}
OP void store_step(const StoredSteps& to, float step) {
  for_lane(l) if (l < 8) store_shared(to.factors + 16 * l, parts_of(step));
  fence_proxy_async();                                        // without it products read what was there before
}
OP float load_common(const StoredSteps&) { return 0.f; }

using StoredTerms = Choose<LINEAR, StoredSteps, StoredColumns>;
constexpr bool TERMS_IN_PRODUCT = COLUMNS || LINEAR;
// By the producer's warp, before a sync_block.
OP void init_terms(SharedAddress all) {
  if constexpr (COLUMNS) store_ones(StoredColumns(all, 0));
  if constexpr (LINEAR) store_distances(StoredSteps(all, 0));
}

// S = Q K^T is started, with the terms of these keys, if they have any.
template <int N, typename QueryTile, typename KeyTile> OP void start_scores(Acc<16, N>& s, const QueryTile& q, const KeyTile& k, const StoredTerms& terms) {
  if constexpr (TERMS_IN_PRODUCT) start_product_transposed(s, q, 0, k, terms);
  else start_product_transposed(s, q, 0, k);
}
