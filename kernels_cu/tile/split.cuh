// split.cuh -- few queries with many keys (SPLIT_KV in fwd_v2.cu): blocks share a query tile, each has some of its keys, a split, and all
// splits are combined to one result: with LAST_COMBINES by the block of the query tile that ends last, else by fwd_v2_combine.
#pragma once
#include "tile/arrivals.cuh"
#include "tile/key_splits.cuh"
#include "tile/mask.cuh"
#include "tile/results.cuh"
#include "tile/schedule.cuh"
#include "tile/sequence.cuh"
#include "tile/sinks.cuh"
#include "tile/softmax.cuh"

constexpr int MOST_SPLITS = 64;                               // of a query tile
OP KeySplits splits_of_keys(const ForwardParams& p, int len_kv, const ColumnRange& visible) { return splits_of_keys(p, u32(MOST_SPLITS), len_kv, visible); }

// Number of the block among those of its query tile, of which the first has the first split that any of its rows sees, and of the query tile among all.
OP u32 tile_of_block(const ForwardParams& p) { return divide(block_id(), p.splits_divmod); }
OP int split_of_block(const ForwardParams& p) { return int(block_id() - tile_of_block(p) * p.splits_divmod.divisor); }
OP u32 partial_number(const ForwardParams& p, u32 tile, int split) { return tile * p.splits_divmod.divisor + split; }

// A row of what a split leaves, and its log-sum-exp.
OP float* out_partial(const ForwardParams& p, u32 number, int row) { return p.out_partials + (i64(number) * p.partial_rows + row) * WIDTH_V; }
OP float* lse_partial(const ForwardParams& p, u32 number, int row) { return p.lse_partials + i64(number) * p.partial_rows + row; }

template <typename T, int N> struct alignas(N * sizeof(T)) Neighbours { T x[N]; };     // of a row, moved at once

// to[row][:] = acc, of the first `rows` rows
template <int M, int N> OP void store_rows(float* to, const Acc<M, N>& acc, int rows) {
  typedef Neighbours<float, 2> Pair;
  for_lane(l) {
    #pragma unroll
    for (int slot = 0; slot < RowVec<M>::slots; ++slot) {
      const int row = RowVec<M>::row(l, slot);
      if (row >= rows) continue;
      #pragma unroll
      for (int i = 0; i < ColVec<N>::slots; i += 2) {
        const int r = acc.reg(slot, i);
        count_written(sizeof(Pair));
        *reinterpret_cast<Pair*>(to + row * N + acc.col(l, r)) = {acc.at(l, r), acc.at(l, r + 1)};
      }
    }
  }
}

// A query tile whose keys are split: its number, where it is, and the splits.
struct SplitQueryTile {
  u32 number;
  BlockCoord here;
  Sequence<ForwardParams> seq;
  KeySplits splits;
  OP Mask mask() const { return {seq.mask(), seq.kv.len()}; }
};
OP SplitQueryTile split_query_tile(const ForwardParams& p, u32 number) {
  const BlockCoord here = query_tile_coord(p, number);
  SplitQueryTile tile{number, here, sequence_of(p, here.batch_number), {}};
  tile.splits = splits_of_keys(p, tile.seq.kv.len(), visible_keys(tile.mask(), here.row, min_of(TILE_Q, tile.seq.q.len() - here.row)));
  return tile;
}

// A warp combines COMBINED_COLS columns of a row at a time, neighbours of them in each lane.
//
//   m = max of lse_i over the splits;  w_i = e^(lse_i - m)          a lane for each split; SINKS: and of the sinks, which have no out
//   out = sum of w_i out_i / sum of w_i,  lse = m + log sum of w_i  the sum of out in the order of splits
constexpr int OF_LANE = WIDTH_V % 128 == 0 ? 4 : WIDTH_V % 64 == 0 ? 2 : 1;
constexpr int STORED = COPY_BYTES >= OF_LANE * int(sizeof(Result)) ? OF_LANE : 1;          // of them at once: COPY_BYTES divides every row
constexpr int COMBINED_COLS = 32 * OF_LANE, COMBINED_ACROSS = WIDTH_V / COMBINED_COLS;
constexpr int COMBINED_AT_ONCE = 16;                          // splits on their way at a time
static_assert(MOST_SPLITS == 64 && 32 % COMBINED_AT_ONCE == 0, "a lane has the weights of two splits, of which those at hand are in one register");

// Columns of a row of the result leave, col0 ... times a factor, and its log-sum-exp.
OP void store_row(const ForwardParams& p, const BlockCoord& here, int row_q, int end, int col0, const Regs<float, OF_LANE>& out,
                  const Regs<float, 1>& factor, const Regs<float, 1>& lse) {
  const ResultTile to = slice<Result>(p.out, here.batch, here.head, row_q, end, p.dim_v);
  for_lane(l) {
    #pragma unroll
    for (int e = 0; e < OF_LANE; e += STORED) {
      const int col = col0 + l * OF_LANE + e;
      if (col >= to.cols) continue;
      Neighbours<Result, STORED> columns;
      #pragma unroll
      for (int i = 0; i < STORED; ++i) columns.x[i] = from_float<Result>(out.at(l, e + i) * factor.at(l, 0));
      count_written(sizeof columns);
      *reinterpret_cast<Neighbours<Result, STORED>*>(to.at(0, col)) = columns;
    }
    if (p.lse.data && col0 == 0 && l == 0) write(row_slice(p.lse, here.batch, here.head, row_q), lse.at(l, 0));
  }
}

OP void combine_row(const ForwardParams& p, const SplitQueryTile& tile, int row, int col0) {
  const int row_q = tile.seq.q.first() + tile.here.row + row, end = tile.seq.q.end_of_room(), count = tile.splits.count();
  if (row_q >= end) return;
  const bool exists = tile.here.row + row < tile.seq.q.len();
  const u32 number = partial_number(p, tile.number, 0);
  const float *const lse_partials = lse_partial(p, number, row), *out_partials = out_partial(p, number, row) + col0;
  typedef Neighbours<float, OF_LANE> Columns;
  const auto load_columns = [&](Regs<float, COMBINED_AT_ONCE * OF_LANE>& part, int splits) {     // of the next so many splits
    for_lane(l) {
      const float* from = out_partials + l * OF_LANE;
      #pragma unroll
      for (int i = 0; i < COMBINED_AT_ONCE; ++i, from += p.partial_rows * WIDTH_V) {
        Columns columns{};
        if (exists && i < splits) {
          count_read(sizeof columns);
          columns = *reinterpret_cast<const Columns*>(from);
        }
        #pragma unroll
        for (int e = 0; e < OF_LANE; ++e) part.at(l, i * OF_LANE + e) = columns.x[e];
      }
    }
    out_partials += i64(COMBINED_AT_ONCE) * p.partial_rows * WIDTH_V;
  };
  Regs<float, 2> score;                                       // in units of log 2: of splits number lane and 32 + lane
  Regs<float, 1> max, sum;
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int split = l + 32 * i;
      score.at(l, i) = exists && split < count ? read(lse_partials + split * p.partial_rows) * LOG2E : -infinity();
    }
    max.at(l, 0) = fmaxf(score.at(l, 0), score.at(l, 1));
  }
  Regs<float, COMBINED_AT_ONCE * OF_LANE> part;
  load_columns(part, count);                                  // on their way while weights are found
  reduce_lanes<32>(max, [](float a, float b) { return fmaxf(a, b); });
  Regs<float, 1> early, late;                                 // weights of the first 32 splits, and of the others
  for_lane(l) {
    const float safe = fmaxf(max.at(l, 0), LOWEST);
    early.at(l, 0) = exp2_approx(score.at(l, 0) - safe);
    late.at(l, 0) = exp2_approx(score.at(l, 1) - safe);
    sum.at(l, 0) = early.at(l, 0) + late.at(l, 0);
  }
  reduce_lanes<32>(sum, [](float a, float b) { return a + b; });

  Regs<float, OF_LANE> out;
  for_lane(l) {
    #pragma unroll
    for (int e = 0; e < OF_LANE; ++e) out.at(l, e) = 0.f;
  }
  #pragma unroll 1
  for (int first = 0; first < count; first += COMBINED_AT_ONCE) {
    if (first > 0) load_columns(part, count - first);
    Regs<float, 1> weights;
    for_lane(l) weights.at(l, 0) = first < 32 ? early.at(l, 0) : late.at(l, 0);
    for_lane(l) {
      #pragma unroll
      for (int i = 0; i < COMBINED_AT_ONCE; ++i) {
        const float weight = value_of_lane(weights, (first + i) % 32);
        #pragma unroll
        for (int e = 0; e < OF_LANE; ++e)                     // of a split of which the row sees no key, whatever it holds is left out
          out.at(l, e) = weight == 0.f ? out.at(l, e) : fmaf(weight, part.at(l, i * OF_LANE + e), out.at(l, e));
      }
    }
  }

  Regs<float, 1> factor, lse;
  for_lane(l) {
    float correction = 1.f;
    if constexpr (SINKS != NO_SINKS) {
      if (exists) correction = join_sinks(max.at(l, 0), sum.at(l, 0), p, query_head(tile.mask(), tile.here.head, tile.here.row + row, p.len_q));
    }
    const float total = sum.at(l, 0);
    factor.at(l, 0) = total == 0.f ? 0.f : correction * reciprocal(total);
    lse.at(l, 0) = total == 0.f ? -infinity() : (max.at(l, 0) + log2_approx(total)) * LN2;
  }
  store_row(p, tile.here, row_q, end, col0, out, factor, lse);
}

// By all warps of a block whose split has left: the one that is the last of its query tile combines all of them.
OP void combine_if_last(const ForwardParams& p, const SplitQueryTile& tile) {
  const SharedAddress before_smem = shared_memory();
  sync_block();                                               // without it rows are missing that slower warps have not stored when the block is counted,
                                                              // and the count is written over keys that they still read
  if (warp_id() == 0) count_arrival(p.arrivals + tile.number, before_smem);
  sync_block();                                               // without it warps do not know yet whether the block is the last
  if (load_shared<u32>(before_smem) + 1 < u32(tile.splits.count())) return;
  if (warp_id() == 0) clear_arrivals(p.arrivals + tile.number);
  #pragma unroll 1
  for (int i = warp_id(); i < p.partial_rows * COMBINED_ACROSS; i += WARPS) combine_row(p, tile, i / COMBINED_ACROSS, i % COMBINED_ACROSS * COMBINED_COLS);
}

// By warps of blocks of their own, a row each, when all splits have left.
OP void combine_key_splits(const ForwardParams& p) {
  const u32 own = block_id() * WARPS + warp_id(), of_tile = p.partial_rows * COMBINED_ACROSS, number = own / of_tile, i = own - number * of_tile;
  if (number >= u32(p.split_tiles)) return;
  const SplitQueryTile tile = split_query_tile(p, number);
  if (tile.here.row >= tile.seq.q.len() || tile.splits.is_one()) return;
  combine_row(p, tile, int(i / COMBINED_ACROSS), int(i % COMBINED_ACROSS) * COMBINED_COLS);
}
