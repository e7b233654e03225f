// combine.cuh -- what splits of a query tile leave in device memory, out and lse of each (FlashAttention-3: flash_fwd_combine), and how they
// become one.
#pragma once
#include "tile/accum.cuh"
#include "tile/own_tiles.cuh"
#include "tile/results.cuh"
#include "tile/scheduler.cuh"
#include "tile/sequence.cuh"
#include "tile/sinks.cuh"
#include "tile/softmax.cuh"

using PartialTile = AccumTile<TILE_Q, WIDTH_V>;               // out of a split of a query tile, in device memory
OP PartialTile out_partial(const HopperForwardCommon& p, u32 number) { return {p.out_partials + i64(number) * p.partial_rows * WIDTH_V}; }

// A query tile that is combined, by its number among these.
OP BlockCoord split_tile_coord(const HopperForwardParams& p, u32 tile) { return tile_coord(p, p.first_split_tile + tile, TILE_Q); }
// VARLEN: all are counted, also those of one split, which are as they should be: these have none here.
OP SplitRange splits_of_tile(const HopperVarlenParams& p, u32 tile) {
  const KeySplits splits = tile_of_sequence(p, tile).splits;
  return {tile * p.most_splits + splits.first + splits.is_one(), tile * p.most_splits + splits.last};
}

// Each warp combines 16 rows and 32 columns of a split query tile, AT_ONCE splits on their way at a time.
//
//   for each split:  m' = max(m, lse_i);  O = e^(m - m') O + e^(lse_i - m') out_i;  l = e^(m - m') l + e^(lse_i - m');  m = m'
//   out = O / l,  lse = m + log l
template <int AT_ONCE, typename Params> OP void combine_splits(const Params& p) {
  constexpr int COLS = 32, ACROSS = WIDTH_V / COLS;
  const u32 own = block_id() * WARPS + warp_id(), fragment = own / ACROSS, fragments = p.partial_rows / 16, tile = fragment / fragments;
  if (tile >= u32(p.split_tiles)) return;
  const int row = int(fragment - tile * fragments) * 16, col0 = int(own - fragment * ACROSS) * COLS;

  Acc<16, COLS> o_reg;
  OnlineSoftmax<16> softmax;
  fill(o_reg, 0.f);
  const SplitRange splits = splits_of_tile(p, tile);
  if constexpr (VARLEN) if (splits.first > splits.last || split_tile_coord(p, tile).row + row >= p.len_q) return;
  for (u32 split = splits.first; split <= splits.last; split += AT_ONCE) {
    Acc<16, COLS> partial_reg[AT_ONCE];
    RowVec<16> lse[AT_ONCE], correction, weight;
    #pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {                       // all on their way before one is needed; the last one more than once
      const u32 number = min_of(split + i, splits.last);
      load(lse[i], p.lse_partials + number * p.partial_rows + row);
      load(partial_reg[i], out_partial(p, number), row, col0);
    }
    #pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (split + i > splits.last) break;
      join(softmax, lse[i], correction, weight);
      add(o_reg, correction, partial_reg[i], weight);
    }
  }
  RowVec<16> lse;
  if constexpr (SINKS != NO_SINKS) {                          // once for all splits
    const BlockCoord of_tile = split_tile_coord(p, tile);
    RowVec<16> correction;
    join_sinks(softmax, correction, p, Mask{p.mask, p.len_kv}, of_tile.head, of_tile.row + row);
    rescale(o_reg, correction);
  }
  finalize(softmax, lse);
  rescale(o_reg, softmax.sum);

  const BlockCoord here = split_tile_coord(p, tile);
  store(rows_of<Result>(p.out, here.batch, here.head, here.row + row, p.len_q, p.dim_v), o_reg, col0);
  if (p.lse.data && col0 == 0) store(row_slice(p.lse, here.batch, here.head, here.row + row), p.lse.row_stride, p.len_q - here.row - row, lse);
}
