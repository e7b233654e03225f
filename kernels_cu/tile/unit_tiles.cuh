// unit_tiles.cuh -- what a unit of score_sums.cuh takes in bwd_scores_hopper.cu: the operands of two products for each batch element and head, S and
// dP, pass through one ring of stages; the bias of its pairs, which all of these share, stays for as long as the unit does.
#pragma once
constexpr int PRODUCERS = 4;                                  // warps that only load: a warpgroup
#include "tile/bias_tile.cuh"
#include "tile/element_sums.cuh"
constexpr bool CUTS_ADDRESSES = true;                         // as in the other backwards; what it costs here has not been measured
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
// The bias of the next unit comes beneath the last steps of the one before, if there is room.
constexpr int BIAS_STAGES = WIDTH <= 64 ? 2 : 1;
using Biases = Pipeline<BiasTile, BIAS_STAGES, ELECT_ONE>;

// With Q and K come the log-sum-exps of the queries, with dO and V their deltas: a number for each row, each kind in places of its own. Of these
// there is one more than stages of the kind are at work, so that a place is filled again only when all warps have started a product since they
// read it: what lanes read one by one, they then have.
constexpr int STAT_BYTES = TILE_Q * int(sizeof(float));
constexpr int STAT_PLACES = STAGES / 2 + 1;
constexpr int STATS_BYTES = 2 * STAT_PLACES * STAT_BYTES;
OP SharedAddress stats_of(SharedAddress stats, const Ring& ring) {
  return stats + int(ring.count % 2 * STAT_PLACES + ring.count / 2 % STAT_PLACES) * STAT_BYTES;
}

// Those of a tile lie in as many tiles of the backward as these have other rows: in pieces, of rows that lie side by side.
constexpr int LEAST_PIECE = 16;                               // rows, of which all tiles have a multiple

// What the loads of a step need besides the cursor, found before a stage is waited for.
struct StepCoord {
  const PairCursor& at;
  int head_kv;
  int piece_rows, pieces;                                     // of the tile's statistics: rows behind the last tile of the backward have none
  const float* stats;                                         // of the first queries of the head

  OP StepCoord(const HopperScoreGradientParams& p, const PairCursor& at) : at(at), head_kv(at.head / p.heads_per_kv) {
    const int rows = int(p.stats_rows_divmod.divisor), tiles = int(divide(p.len_q - 1, p.stats_rows_divmod)) + 1;
    piece_rows = rows % TILE_Q == 0 ? TILE_Q : rows % (TILE_Q / 2) == 0 ? TILE_Q / 2 : LEAST_PIECE;
    pieces = min_of(tiles * rows - at.q_tile * TILE_Q, TILE_Q) / piece_rows;
    stats = p.stats + i64(at.batch_number(p) * p.heads + at.head) * tiles * STATS * rows;
  }
  OP int piece_bytes() const { return piece_rows * int(sizeof(float)); }
  OP const float* piece(const HopperScoreGradientParams& p, bool deltas, int number) const {
    const int rows = int(p.stats_rows_divmod.divisor), row = at.q_tile * TILE_Q + number * piece_rows, tile = int(divide(row, p.stats_rows_divmod));
    return stats + i64(tile * (STATS - 1) + deltas) * rows + row;
  }
};
// Statistics are on their way to `to`, and arrive with the stage at hand.
OP void start_stats(const Ring& ring, const HopperScoreGradientParams& p, const StepCoord& step, bool deltas, SharedAddress to,
                    [[maybe_unused]] CallSite at) {
#if ON_GPU
  const int l = lane_id();
  if (l < step.pieces) cp_async_bulk(to + l * step.piece_bytes(), step.piece(p, deltas, l), step.piece_bytes(), ring.full().address);
  __syncwarp();                                               // for the assembler, which would have the lanes meet later, and more often
#else
  for (int l = 0; l < step.pieces; ++l) {
    const float* const from = step.piece(p, deltas, l);
    const int bytes = step.piece_bytes();
    host::load_async(warp_id(), ring.full().address, bytes, [=] {
      count_read(bytes);
      std::memcpy(to + l * bytes, from, bytes);
    }, at);
  }
#endif
}

// The stage at hand = queries and keys of a pair of tiles, or with `deltas` gradients and values; goes on to the next one.
OP void load_operands(Ring& ring, const TensorMap& of_queries, const TensorMap& of_keys, const HopperScoreGradientParams& p, const StepCoord& step,
                      bool deltas, SharedAddress stats, CallSite at = call_site()) {
  arrive_expect_tx(ring.full(), Operands::bytes + step.pieces * step.piece_bytes(), at);
  start_load(ring, ring.tile().queries(), of_queries, step.at.batch, step.at.head, step.at.q_tile * TILE_Q, 0, at);
  start_load(ring, ring.tile().keys(), of_keys, step.at.batch, step.head_kv, step.at.kv_tile * TILE_KV, 0, at);
  start_stats(ring, p, step, deltas, stats_of(stats, ring), at);
  ring.advance();
}
// The bias of a unit, which is that of any batch element and head that share it.
OP void load_bias(Biases& biases, const TensorMap& map, const PairCursor& of, CallSite at = call_site()) {
  arrive_expect_tx(biases.full(), BiasTile::bytes, at);
  start_load(biases, biases.tile(), map, of.batch, of.head, of.q_tile * TILE_Q, of.kv_tile * TILE_KV, at);
  biases.advance();
}

// VARLEN: the pairs that the sequence of a batch element has, whose rows lie as if it were as long as the longest one; whether any of them that its
// mask leaves is in the tiles at hand; and to the next tiles of which that is so.
OP ExistingPairs existing_pairs(const HopperScoreGradientParams& p, const PairCursor& at) {
  const auto seq = sequence_of(p, at.batch_number(p));
  return {mask_of(seq), seq.q.len()};
}
OP bool is_visible(const HopperScoreGradientParams& p, const PairCursor& at) {
  const ExistingPairs pairs = existing_pairs(p, at);
  const int row = at.q_tile * TILE_Q, rows = min_of(pairs.len_q - row, TILE_Q);
  return rows > 0 && visible_keys(pairs.mask, row, rows).overlaps(at.kv_tile * TILE_KV, TILE_KV);
}
OP void advance_step(const HopperScoreGradientParams& p, PairCursor& now) {
  if constexpr (VARLEN) {
    do now.step(p);
    while (now.left > 0 && !is_visible(p, now));
  } else {
    now.advance(p);
  }
}

// Whether a unit is of more than one pair of tiles, which blocks go through.
constexpr bool WALKS = !(OF_QUERY && OF_KEY);

// Where a unit begins: `unit_of` without divisions, which consumers would wait for between two units.
OP PairCursor unit_at(const HopperScoreGradientParams& p, u32 number) {
  const u32 row = divide(number, p.key_tiles_divmod), of_heads = divide(row, p.query_tiles_divmod);
  u32 rest = divide(of_heads, p.owner_heads_divmod);
  PairCursor unit;
  unit.kv_tile = int(number - row * p.key_tiles_divmod.divisor);
  unit.q_tile = int(row - of_heads * p.query_tiles_divmod.divisor);
  unit.head = unit.first_head = int(of_heads - rest * p.owner_heads_divmod.divisor) * p.heads_summed;
  #pragma unroll
  for (int i = BATCH_AXES - 1; i >= 0; --i) unit.batch[i] = unit.first_batch[i] = rest > 0 ? take(rest, p.batch[i] / p.batch_summed[i]) : 0;
  unit.left = p.walked;
  return unit;
}
// A part of a unit: of its batch elements and heads, as many as of any other part, or one more. Of tiles that the mask hides it has none. VARLEN: it
// begins with the first that has any.
struct UnitPart {
  u32 unit, split;
  PairCursor first;

  OP UnitPart(const HopperScoreGradientParams& p, u32 part)
      : unit(divide(part, p.splits_divmod)), split(part - unit * p.splits), first(unit_at(p, unit)) {
    if constexpr (WALKS) {
      find_first(first, p, unit, split);
      return;
    }
    if (p.splits > 1) {
      i64 rest = p.walked * split / p.splits;
      first.left = p.walked * (split + 1) / p.splits - rest;
      first.head += take(rest, p.heads_summed);
      #pragma unroll
      for (int i = BATCH_AXES - 1; i >= 0; --i) first.batch[i] += take(rest, p.batch_summed[i]);
    }
    if constexpr (!VARLEN) {
      if (!first.visible({p.mask, p.len_kv})) first.left = 0;
    } else if (first.left > 0 && !is_visible(p, first)) {
      advance_step(p, first);
    }
  }
};
// Calls use(part) for each part that the block takes.
template <typename Use> OP void for_parts(const HopperScoreGradientParams& p, Use use) {
  #pragma unroll 1
  for (u32 part = block_id(); part < p.parts; part = part_after(part)) {
    UnitPart at(p, part);
    use(at);
  }
}

// The sums of 16 queries of a unit leave: to the gradient, if the block is the only one of its unit, or to partial sums.
template <typename T> constexpr bool IS_ELEMENT = false;
template <> constexpr bool IS_ELEMENT<Element> = true;
template <typename Sums> OP void store_sums(const HopperScoreGradientParams& p, const UnitPart& of, const Sums& sum, int row0) {
  if constexpr (ONE_BIAS && IS_ELEMENT<GradientElement>) {
    if (p.splits == 1) {
      GlobalTile rows = slice(p.gradient, of.first.batch, of.first.head, of.first.q_tile * TILE_Q + row0, p.len_q, p.len_kv);
      rows.base += of.first.kv_tile * TILE_KV * p.gradient.col_stride;
      rows.cols -= of.first.kv_tile * TILE_KV;
      store(rows, sum);
      return;
    }
  }
  end_unit(p, sum, of.unit, of.split, row0);
}

// Scores and what a tile in shared memory has for them, its rows from row0 on: a few at a time, which take no registers for the whole tile.
template <int N> OP void modify_scores(Acc<16, N>& s, const BiasTile& tile, const ScoreContext& x, int row0) {
  #pragma unroll
  for (int i = 0; i < N; i += 16) {
    BiasOf16x16<BiasElement> bias;
    load(bias, tile, row0, i);
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < 8; ++r) {
        PairPlace at{};
        at.bias = bias.of(l, r);
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

// dP becomes P o (dP - delta), times how fast scores change with what is read.
template <int M, int N>
OP void gradients_of_reads(Acc<M, N>& dp, const Acc<M, N>& p, const RowVec<M>& delta, const ScoreContext& x, int first_row, int col0) {
  const int row0 = not_ahead(first_row);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < dp.regs; ++r) {
      float gradient = p.at(l, r) * (dp.at(l, r) - delta.at(l, dp.slot(r)));
      if (HAS_FACTOR) gradient *= factor_of(0.f, place_of<false>(dp, l, r, row0, col0), x);
      if ((HAS_FACTOR || MASKED_PAIRS) && p.at(l, r) == 0.f) gradient = 0.f; // of a pair that is masked, dP and the factor may be anything
      dp.at(l, r) = gradient;
    }
  }
}

// sum += P o (dP - delta)
template <int M, int N> OP void add_gradients(Acc<M, N>& sum, const Acc<M, N>& p, const Acc<M, N>& dp, const RowVec<M>& delta) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < sum.regs; ++r) sum.at(l, r) = fmaf(p.at(l, r), dp.at(l, r) - delta.at(l, sum.slot(r)), sum.at(l, r));
  }
}
