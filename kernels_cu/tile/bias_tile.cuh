// bias_tile.cuh -- a bias that comes with the keys (STAGED_BIAS), in fwd_hopper.cu: what a query tile and a key tile have of it, by TMA, in the stage
// of the keys, behind them. A lane gets eight pairs of it by one ldmatrix, and no address of a row.
#pragma once
#include "tile/pipeline.cuh"
#include "tile/score.cuh"

using BiasTile = PanelTile<TILE_Q, TILE_KV>;
constexpr int BIAS_BYTES = STAGED_BIAS ? BiasTile::bytes : 0; // of a stage

struct KeysAndBias : PanelTile<TILE_KV, WIDTH> {
  static constexpr int bytes = PanelTile<TILE_KV, WIDTH>::bytes + BIAS_BYTES;
  OP BiasTile bias() const { return {base + PanelTile<TILE_KV, WIDTH>::bytes}; }
};

// The stage at hand = keys from `row` on, and the bias of these and the queries of a tile, zero beyond the array; goes on to the next one.
template <typename Keys, typename Params, typename Coord>
OP void load_with_bias(Keys& keys, const Params& p, const Coord& of_keys, int head, int row, CallSite at = call_site()) {
  arrive_expect_tx(keys.full(), Keys::Tile::bytes, at);
  start_load(keys, p.k_map, of_keys.batch, of_keys.head, row, at);
  start_load(keys, keys.tile().bias(), p.bias_map, of_keys.batch, head, of_keys.row, row, at);
  keys.advance();
}

// What arrays have for the pairs of a warp, whose rows of the tile of queries begin at row0.
template <typename Keys, int N> OP void load(PairArrays<16, N>& arrays, const ScoreContext& x, const Keys& keys, int first_row, int col0) {
  load<false>(arrays, x, first_row, col0);
  if constexpr (STAGED_BIAS) {
    const int row0 = not_ahead(warp_id() - 4) * 16;
    #pragma unroll
    for (int col = 0; col < N; col += 16) {
      const SharedTile<TILE_Q, 64> panel = keys.bias().panel(col / 64);
      ldmatrix(arrays.bias, col / 4, [=](int l) { return panel.chunk_at(row0, l % 16, col % 64 / 8, l / 16); });
    }
  }
}
