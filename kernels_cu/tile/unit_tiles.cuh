// unit_tiles.cuh -- what a unit of score_sums.cuh takes in bwd_scores_hopper.cu: the operands of two products for each batch element and head, S and
// dP, pass through one ring of stages; the bias of its pairs, which all of these share, stays for as long as the unit does.
#pragma once
#include "tile/bias_tile.cuh"
#include "tile/element_sums.cuh"
#include "tile/wgmma.cuh"

using QueryTile = PanelTile<TILE_Q, WIDTH>;                   // of q or dout
using KeyTile = PanelTile<TILE_KV, WIDTH>;                    // of k or v

// The operands of a product: Q and K, or dO and V.
struct Operands {
  static constexpr int bytes = QueryTile::bytes + KeyTile::bytes;
  SharedAddress base;
  OP QueryTile queries() const { return {base}; }
  OP KeyTile keys() const { return {base + QueryTile::bytes}; }
};
using Ring = Pipeline<Operands, STAGES, ELECT_ONE>;
using Biases = Pipeline<BiasTile, 1, ELECT_ONE>;

// With Q and K come the log-sum-exps of the queries, with dO and V their deltas: a number for each row, each kind in places of its own. Of these there
// is one more than stages of the kind are at work, so that a place is filled again only when all warps have started a product since they read it:
// what lanes read one by one, they then have.
constexpr int STAT_BYTES = TILE_Q * int(sizeof(float));
constexpr int STAT_PLACES = STAGES / 2 + 1;
constexpr int STATS_BYTES = 2 * STAT_PLACES * STAT_BYTES;
OP SharedAddress stats_of(SharedAddress stats, const Ring& ring) {
  return stats + int(ring.count % 2 * STAT_PLACES + ring.count / 2 % STAT_PLACES) * STAT_BYTES;
}

// Those of a tile lie in as many tiles of the backward as these have other rows. All have a multiple of so many, which lie side by side.
constexpr int PIECE_ROWS = 16, PIECES = TILE_Q / PIECE_ROWS, PIECE_BYTES = PIECE_ROWS * int(sizeof(float));

// How many pieces of a tile there are. Rows behind the last tile of the backward have none.
OP int stat_pieces(const ScoreGradientParams& p, const PairCursor& at) {
  const int rows = int(p.stats_rows_divmod.divisor), tiles = int(divide(p.len_q - 1, p.stats_rows_divmod)) + 1;
  return min_of((tiles * rows - at.q_tile * TILE_Q) / PIECE_ROWS, PIECES);
}
OP const float* stat_piece(const ScoreGradientParams& p, const PairCursor& at, bool deltas, int piece) {
  const int rows = int(p.stats_rows_divmod.divisor), tiles = int(divide(p.len_q - 1, p.stats_rows_divmod)) + 1;
  const int row = at.q_tile * TILE_Q + piece * PIECE_ROWS, tile = int(divide(row, p.stats_rows_divmod));
  const i64 number = i64(at.batch_number(p) * p.heads + at.head) * tiles + tile;
  return p.stats + (number * 2 + deltas) * rows + (row - tile * rows);
}
// They are on their way to `to`, and arrive with the stage at hand.
OP void start_stats(const Ring& ring, const ScoreGradientParams& p, const PairCursor& of, bool deltas, int pieces, SharedAddress to,
                    [[maybe_unused]] CallSite at) {
#if ON_GPU
  const int l = lane_id();
  if (l < pieces) cp_async_bulk(to + l * PIECE_BYTES, stat_piece(p, of, deltas, l), PIECE_BYTES, ring.full().address);
  __syncwarp();                                               // for the assembler, which would have the lanes meet later, and more often
#else
  for (int l = 0; l < pieces; ++l) {
    const float* const from = stat_piece(p, of, deltas, l);
    host::self->block->load_async(warp_id(), ring.full().address, {PIECE_BYTES, [=] {
      count_read(PIECE_BYTES);
      std::memcpy(to + l * PIECE_BYTES, from, PIECE_BYTES);
    }}, at);
  }
#endif
}

// The stage at hand = queries and keys of a pair of tiles, or with `deltas` gradients and values; goes on to the next one.
OP void load_operands(Ring& ring, const TensorMap& of_queries, const TensorMap& of_keys, const ScoreGradientParams& p, const PairCursor& of, bool deltas,
                      SharedAddress stats, CallSite at = call_site()) {
  const int pieces = stat_pieces(p, of);
  arrive_expect_tx(ring.full(), Operands::bytes + pieces * PIECE_BYTES, at);
  start_load(ring, ring.tile().queries(), of_queries, of.batch, of.head, of.q_tile * TILE_Q, 0, at);
  start_load(ring, ring.tile().keys(), of_keys, of.batch, of.head / p.heads_per_kv, of.kv_tile * TILE_KV, 0, at);
  start_stats(ring, p, of, deltas, pieces, stats_of(stats, ring), at);
  ring.advance();
}
// The bias of a unit, which is that of any batch element and head that share it.
OP void load_bias(Biases& biases, const TensorMap& map, const PairCursor& of, CallSite at = call_site()) {
  arrive_expect_tx(biases.full(), BiasTile::bytes, at);
  start_load(biases, biases.tile(), map, of.batch, of.head, of.q_tile * TILE_Q, of.kv_tile * TILE_KV, at);
  biases.advance();
}

// Calls use(first, part) for each part of a unit that the block takes, by its number and its first pair of tiles.
template <typename Use> OP void for_parts(const ScoreGradientParams& p, Use use) {
  #pragma unroll 1
  for (u32 part = block_id(); part < p.parts; part += blocks()) {
    PairCursor first;
    find_first(first, p, part / p.splits, part % p.splits);
    use(first, part);
  }
}

// Scores and what a tile in shared memory has for them, its rows from row0 on: a few at a time, which take no registers for the whole tile.
template <int N> OP void modify_scores(Acc<16, N>& s, const BiasTile& tile, const ScoreContext& x, int row0) {
  #pragma unroll
  for (int i = 0; i < N; i += 16) {
    Regs<u32, 4> bias;
    const SharedTile<TILE_Q, 64> panel = tile.panel(i / 64);
    ldmatrix(bias, 0, [=](int l) { return panel.chunk_at(row0, l % 16, i % 64 / 8, l / 16); });
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < 8; ++r) {
        PairPlace at{};
        at.bias = of_two<BiasElement>(bias.at(l, r / 2), r % 2);
        s.at(l, i / 2 + r) += term_of(at, x);
      }
    }
  }
}

// Scores become P = 2^(S - lse), rows being queries.
template <int M, int N> OP void exponentiate(Acc<M, N>& s, const RowVec<M>& lse, float scale_log2) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) s.at(l, r) = exp2_approx(fmaf(s.at(l, r), scale_log2, -lse.at(l, s.slot(r))));
  }
  pin(s);                                                     // all of this now, and not when the next product has been waited for
}

// sum += P o (dP - delta)
template <int M, int N> OP void add_gradients(Acc<M, N>& sum, const Acc<M, N>& p, const Acc<M, N>& dp, const RowVec<M>& delta) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < sum.regs; ++r) sum.at(l, r) = fmaf(p.at(l, r), dp.at(l, r) - delta.at(l, sum.slot(r)), sum.at(l, r));
  }
}
