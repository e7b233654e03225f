// bias_tile.cuh -- a bias that comes by TMA (STAGED_BIAS), in the kernels for sm_90a: what a query tile and a key tile have of it is in the stage of
// the tile that passes, behind it: in fwd_hopper.cu of the keys, in bwd_hopper.cu of the queries. A lane gets eight pairs of it by one ldmatrix, or of
// float32, which that does not move, two by a load, and needs no address of a row.
#pragma once
#include "tile/pipeline.cuh"
#include "tile/scheduler.cuh"
#include "tile/score.cuh"

using BiasTile = PanelTile<TILE_Q, TILE_KV, BiasElement>;
constexpr int BIAS_BYTES = STAGED_BIAS ? BiasTile::bytes : 0; // of a stage

template <typename Tile> struct WithBias : Tile {
  static constexpr int bytes = Tile::bytes + BIAS_BYTES;
  OP BiasTile bias() const { return {this->base + Tile::bytes}; }
};
template <typename Tile> using MaybeWithBias = Choose<STAGED_BIAS, WithBias<Tile>, Tile>;

// The stage at hand = keys from `row` of their sequence on, and their bias for the queries of a tile and this head, zero beyond the arrays; goes on to
// the next one. Beyond a sequence a bias may be anything: of pairs that do not exist.
template <typename T, int DEPTH, Lanes LANES, typename Params, typename Coord>
OP void load_with_bias(Pipeline<T, DEPTH, LANES>& keys, const Params& p, const Coord& of_keys, int head, int first, int row,
                       CallSite at = call_site()) {
  arrive_expect_tx(keys.full(), T::bytes, at);
  start_load(keys, p.k_map, of_keys.batch, of_keys.head, first + row, at);
  start_load(keys, keys.tile().bias(), p.bias_map, of_keys.batch, head, of_keys.row, row, at);
  keys.advance();
}
// Queries of a backward from row_q of their sequence on, with one number for each and STAGED_BIAS their bias for keys from row_kv on: a part of what a
// stage waits for, and all of that; goes on to the next one.
template <typename T, int DEPTH, Lanes LANES, typename Params>
OP void start_query_tile(const Pipeline<T, DEPTH, LANES>& queries, const Params& p, const int (&batch)[BATCH_AXES], int head, int first, int row_q, int row_kv,
                         const float* from, SharedAddress to, CallSite at) {
  start_load(queries, p.q_map, batch, head, first + row_q, at);
  if constexpr (STAGED_BIAS) start_load(queries, queries.tile().bias(), p.bias_map, batch, head, row_q, row_kv, at);
  start_numbers(queries, from, to, at);
}
template <typename T, int DEPTH, Lanes LANES, typename Params>
OP void load_query_tile(Pipeline<T, DEPTH, LANES>& queries, const Params& p, const int (&batch)[BATCH_AXES], int head, int first, int row_q, int row_kv,
                         const float* from, SharedAddress to, CallSite at = call_site()) {
  arrive_expect_tx(queries.full(), T::bytes + T::rows * int(sizeof(float)), at);
  start_query_tile(queries, p, batch, head, first, row_q, row_kv, from, to, at);
  queries.advance();
}

// Of float32, the two elements of a lane in 8 x 8 pairs: of query row0 + l / 4 and keys col0 + 2 (l % 4) and the next one,
OP Two<BiasElement> two_keys(const BiasTile& tile, int l, int row0, int col0) {
  return load_shared<Two<BiasElement>>(tile.panel(col0 / 32).chunk_at(row0, l / 4, col0 % 32 / 4, l % 4 / 2) + l % 2 * 8);
}
// or of key row0 + l / 4 and such queries, which lie in two rows of the tile.
OP Two<BiasElement> two_queries(const BiasTile& tile, int l, int row0, int col0) {
  const SharedTile<TILE_Q, 64> panel = tile.panel(row0 / 32);
  const auto of = [&](int i) { return load_shared<BiasElement>(panel.chunk_at(col0, l % 4 * 2 + i, row0 % 32 / 4, l / 16) + l / 4 % 4 * 4); };
  return {of(0), of(1)};
}

// What a warp has of it for 16 rows of 16 columns.
template <typename T> struct BiasOf16x16 {
  Regs<typename PairOf<T>::type, 4> pairs;
  OP float of(int l, int r) const { return of_two<T>(pairs.at(l, r / 2), r % 2); }
};
template <typename T> OP void load(BiasOf16x16<T>& bias, const BiasTile& tile, int row0, int col0) {
  if constexpr (sizeof(T) == 4) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < 8; r += 2) bias.pairs.at(l, r / 2) = two_keys(tile, l, row0 + 8 * Acc<16, 16>::slot(r), col0 + Acc<16, 16>::reg_col(r));
    }
  } else {
    const SharedTile<TILE_Q, 64> panel = tile.panel(col0 / 64);
    ldmatrix(bias.pairs, 0, [=](int l) { return panel.chunk_at(row0, l % 16, col0 % 64 / 8, l / 16); });
  }
}

// What arrays have for the pairs of a warp. Of the tile it has the rows from row0 on; TRANSPOSED the columns, which are keys.
template <bool TRANSPOSED, typename Tile, int N>
OP void load(PairArrays<16, N>& arrays, const ScoreContext& x, const Tile& tile, int row0, int first_row, int col0, bool ask_pairs = true) {
  load<TRANSPOSED>(arrays, x, first_row, col0, ask_pairs);
  if constexpr (STAGED_BIAS && sizeof(BiasElement) == 4) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < Acc<16, N>::regs; r += 2) {
        const int row = row0 + 8 * Acc<16, N>::slot(r), col = Acc<16, N>::reg_col(r);
        arrays.bias.at(l, r / 2) = TRANSPOSED ? two_queries(tile.bias(), l, row, col) : two_keys(tile.bias(), l, row, col);
      }
    }
  } else if constexpr (STAGED_BIAS) {
    #pragma unroll
    for (int i = 0; i < N; i += 16) {
      const SharedTile<TILE_Q, 64> panel = tile.bias().panel(TRANSPOSED ? row0 / 64 : i / 64);
      if constexpr (TRANSPOSED) ldmatrix_trans(arrays.bias, i / 4, [=](int l) { return panel.chunk_at(i, l % 8 + l / 16 * 8, row0 % 64 / 8, l / 8 % 2); });
      else ldmatrix(arrays.bias, i / 4, [=](int l) { return panel.chunk_at(row0, l % 16, i % 64 / 8, l / 16); });
    }
  }
}
