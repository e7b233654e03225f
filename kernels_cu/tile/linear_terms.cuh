// linear_terms.cuh -- a term that is linear in the places of a pair (PLUS_LINEAR) in fwd_hopper.cu, in three parts.
//
//   How far a key is from the middle of its tile, times what the term changes by from a key to the next, is one more step of the product of queries
//   and keys, S = [step Q] [far K]^T, so that a score costs no instruction. Distances are the same in all tiles, and are stored once; the step of a
//   head comes with its queries.
//   How far the middle of the tile is from a key where the term of the warp's first row is about 0, times the same, is a number of the warp. It goes
//   into the exponent. Near the diagonal of ALiBi it is small, and so exact.
//   What is left is the same for all keys. A softmax does not change by it, so it is added to the maximum when that has ended.
//
//   BENDS: for tiles beyond the diagonal the step is another one, which comes with the queries too, and rows differ by what the bend makes of their
//   distance to the first one.
#pragma once
#include "tile/bend.cuh"
#include "tile/column_terms.cuh"

constexpr bool LINEAR = SCORES == PLUS_LINEAR;

// In shared memory: for each stage of queries the step, BENDS and that beyond the diagonal, and distances.
struct StoredSteps : TermTile<TILE_KV> {
  static constexpr int stage_bytes = (1 + BENDS) * bytes_of_factors, steps_bytes = STAGES_Q * stage_bytes, all_bytes = steps_bytes + bytes, end_as_operand = steps_bytes + bytes_as_operand;
  OP StoredSteps(SharedAddress all, int stage, bool beyond = false) : TermTile{all + steps_bytes, all + stage * stage_bytes + (BENDS && beyond ? bytes_of_factors : 0)} {}
};
static_assert(TILE_KV <= 512, "bfloat16 has distances exactly");

// Of a head, from a key to the next: what the term changes by, and BENDS beyond the diagonal.
struct Steps {
  float before, beyond;
};
template <typename Params, typename Coord> OP Steps step_of_head(const Params& p, const Coord& here) {
  const int len_q = rows_at<QUERIES>(p, here).len(), len_kv = keys_of_sequence(p, here);
  const HeadTerms terms = head_terms(p, here, here.head, len_q, len_kv);
  return {terms.step, BENDS ? terms.step + bend_of(score_context(p, here, here.head, terms, len_q, len_kv)) * terms.unit : 0.f};
}
// By a warp each.
OP void store_distances(const StoredSteps& to) {
  for_lane(l) {
    #pragma unroll
    for (int key = l; key < TILE_KV; key += 32) {
      const u32 far = float_bits(float(key - TILE_KV / 2)) >> 16;
      store_shared(to.at(key), TermParts{far | far << 16, far, 0, 0}); // one for each part of the step
    }
  }
}
OP void store_step(const StoredSteps& to, const Steps& steps) {
  for_lane(l) {
    if (l < 8) store_shared(to.factors + 16 * l, parts_of(steps.before));
    if (BENDS && l < 8) store_shared(to.factors + to.bytes_of_factors + 16 * l, parts_of(steps.beyond));
  }
  fence_proxy_async();                                        // without it products read what was there before
}
OP float load_common(const StoredSteps&) { return 0.f; }

// By a warp, in units of log 2: of its 16 rows, once for a query tile.
struct LinearTerms {
  float per_key, per_query, of_row0;                          // of_row0: at the key `from`
  int from;
};
constexpr float FARTHEST = 0x1p24f;                           // keys, where the term hardly changes by them
OP LinearTerms linear_terms(const ScoreContext& x, int row0) {
  const auto of_row0 = [&](int key) { return term_of({false, row0, key, float(row0), float(key), 0.f, 0.f, true}, x); };
  const float per_key = per_key_of(x);
  const int from = int(fminf(fmaxf(-of_row0(0) / per_key, -FARTHEST), FARTHEST));
  return {per_key * LOG2E, per_query_of(x) * LOG2E, of_row0(from) * LOG2E, from};
}
// BENDS: what it changes by beyond the diagonal, and what rows have there besides; and the tiles that the diagonal of the warpgroup's rows goes through.
template <int M> struct BendTerms {
  float per_key;
  RowVec<M> of_rows;
  int across, end;                                            // the first of them, and the one behind the last
  OP bool is_across(int tile) const { return BENDS && tile >= across && tile < end; }
  OP bool is_beyond(int tile) const { return BENDS && tile >= end; }
};
template <int M> OP void bend_terms(BendTerms<M>& terms, const ScoreContext& x, const LinearTerms& of, int row0) {
  const float bend = bend_of(x) * LOG2E;
  terms.per_key = of.per_key + bend;
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) terms.of_rows.at(l, i) = bend * float(beyond_diagonal(x, row0 + RowVec<M>::row(l, i), of.from));
  }
  const int met = (row0 & -ROWS) + diagonal_of(x);
  terms.across = uniform(max_of(met + 1, 0) / TILE_KV), terms.end = uniform(ceil_div(max_of(met + ROWS - 1, 0), TILE_KV));
}
// What scores of a key tile have in common, and what the rows have in the end.
template <int M, int N> OP void terms_of_tile(RowVec<M>& terms, const Acc<M, N>&, const LinearTerms& of, const BendTerms<M>& beyond, int tile) {
  const float far = float(tile * N + N / 2 - of.from);
  fill(terms, of.per_key * far);
  if (!beyond.is_beyond(tile)) return;
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < terms.slots; ++i) terms.at(l, i) = fmaf(beyond.per_key, far, beyond.of_rows.at(l, i));
  }
}
template <int M> OP void count_rows(OnlineSoftmax<M>& state, const LinearTerms& of) {
  for_lane(l) {
    const int lane = VARLEN ? not_ahead(l) : l;               // what follows from it, kept since the tile's beginning, would spill
    #pragma unroll
    for (int i = 0; i < state.max.slots; ++i) state.max.at(l, i) += fmaf(of.per_query, float(RowVec<M>::row(lane, i)), of.of_row0);
  }
}

using StoredTerms = Choose<LINEAR, StoredSteps, BroughtTerms>;
constexpr bool TERMS_IN_PRODUCT = COLUMNS || LINEAR;
// By the producer's warp, before a sync_block.
OP void init_terms(SharedAddress all) {
  if constexpr (COLUMNS) store_ones(StoredColumns(all, 0));
  if constexpr (LINEAR) store_distances(StoredSteps(all, 0));
  if constexpr (TERMS_IN_PRODUCT) fence_proxy_async();        // without it products read what was there before
}

// S = Q K^T is started, or S += Q K^T, with the terms of these keys, if they have any.
template <int N, typename QueryTile, typename KeyTile>
OP void start_scores(Acc<16, N>& s, const QueryTile& q, const KeyTile& k, const StoredTerms& terms, bool add = false) {
  if constexpr (TERMS_IN_PRODUCT) start_product_transposed(s, q, 0, k, terms);
  else start_product_transposed(s, q, 0, k, add);
}
