// split.cuh -- few queries with many keys (SPLIT_KV in fwd_v2.cu): blocks share a query tile, each has some of its keys, a split, and
// fwd_v2_combine makes one result of all splits.
//
// Splits are about equally long, and how long follows from the length of the sequence alone: joined in their order, they have the same bits
// whatever else is in the batch. What no row of the tile sees is no split; a tile with one split needs no combining.
#pragma once
#include "tile/combine.cuh"
#include "tile/mask.cuh"
#include "tile/schedule.cuh"
#include "tile/sequence.cuh"

constexpr int MOST_SPLITS = 64;                               // of a query tile

// The splits first ... last of a query tile, of so many keys each.
struct KeySplits {
  int keys, first, last;
  OP bool is_one() const { return first == last; }
};
OP KeySplits splits_of_keys(const ForwardParams& p, int len_kv, const ColumnRange& visible) {
  const int splits = min_of(max_of(len_kv / p.split_keys, 1), MOST_SPLITS), keys = max_of(ceil_div(ceil_div(len_kv, splits), TILE_KV), 1) * TILE_KV;
  if (visible.last < visible.first) return {keys, 0, 0};
  return {keys, visible.first / keys, visible.last / keys};
}

// Number of the block among those of its query tile, and of the query tile among all.
OP u32 tile_of_block(const ForwardParams& p) { return divide(block_id(), p.splits_divmod); }
OP int split_of_block(const ForwardParams& p) { return int(block_id() - tile_of_block(p) * p.splits_divmod.divisor); }
OP u32 partial_number(const ForwardParams& p, u32 tile, int split) { return tile * p.splits_divmod.divisor + split; }

OP PartialTile out_partial(const ForwardParams& p, u32 number) { return {p.out_partials + i64(number) * p.partial_rows * WIDTH_V}; }
OP float* lse_partial(const ForwardParams& p, u32 number, int row) { return p.lse_partials + i64(number) * p.partial_rows + row; }

// dst[:, col0 : col0 + N] = acc, of any element type, clipped to dst
template <int N> OP void store_fragment(const ResultTile& dst, const Acc<16, N>& acc, int col0) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) {
      const int row = acc.row(l, r), col = col0 + acc.col(l, r);
      if (row < dst.rows && col < dst.cols) write(dst, row, col, acc.at(l, r));
    }
  }
}

// Each warp combines 16 rows and 32 columns of a query tile, as combine_splits does.
template <int AT_ONCE> OP void combine_key_splits(const ForwardParams& p) {
  constexpr int COLS = 32, ACROSS = WIDTH_V / COLS;
  const u32 own = block_id() * WARPS + warp_id(), fragment = own / ACROSS, fragments = p.partial_rows / 16, tile = fragment / fragments;
  const int row = int(fragment - tile * fragments) * 16, col0 = int(own - fragment * ACROSS) * COLS;
  if (tile >= u32(p.split_tiles)) return;
  const BlockCoord here = query_tile_coord(p, tile);
  if (VARLEN && here.row < 0) return;
  const auto seq = sequence_of(p, here.batch_number);
  const Mask mask{seq.mask(), seq.kv.len()};
  if (here.row >= seq.q.len()) return;
  const KeySplits splits = splits_of_keys(p, seq.kv.len(), visible_keys(mask, here.row, min_of(TILE_Q, seq.q.len() - here.row)));
  if (splits.is_one()) return;

  Acc<16, COLS> o_reg;
  OnlineSoftmax<16> softmax;
  fill(o_reg, 0.f);
  for (int split = splits.first; split <= splits.last; split += AT_ONCE) {
    Acc<16, COLS> partial_reg[AT_ONCE];
    RowVec<16> lse_reg[AT_ONCE], correction, weight;
    #pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {                       // all on their way before one is needed
      if (split + i > splits.last) continue;
      const u32 number = partial_number(p, tile, split + i);
      load(lse_reg[i], lse_partial(p, number, row));
      load_existing(partial_reg[i], out_partial(p, number), row, col0, seq.q.len() - here.row - row);
    }
    #pragma unroll
    for (int i = 0; i < AT_ONCE && split + i <= splits.last; ++i) {
      join(softmax, lse_reg[i], correction, weight);
      add(o_reg, correction, partial_reg[i], weight);
    }
  }
  if constexpr (SINKS != NO_SINKS) {                          // once for all splits
    RowVec<16> correction;
    join_sinks(softmax, correction, p, mask, here.head, here.row + row);
    rescale(o_reg, correction);
  }
  RowVec<16> lse;
  finalize(softmax, lse);
  rescale(o_reg, softmax.sum);
  if (VARLEN) clear_rows(o_reg, lse, seq.q.len() - here.row - row);
  const int row0 = seq.q.first() + here.row + row, rows = seq.q.end_of_room() - row0;
  store_fragment(slice<Result>(p.out, here.batch, here.head, row0, seq.q.end_of_room(), p.dim_v), o_reg, col0);
  if (p.lse.data && col0 == 0) store(row_slice(p.lse, here.batch, here.head, row0), p.lse.row_stride, rows, lse);
}
