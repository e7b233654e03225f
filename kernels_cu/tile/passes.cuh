// passes.cuh -- what every backward does before and after its loop: statistics of the queries, sums that become gradients.
#pragma once
#include "tile/gradient.cuh"
#include "tile/part_factors.cuh"
#include "tile/results.cuh"
#include "tile/scheduler.cuh"
#include "tile/score.cuh"
#include "tile/sequence.cuh"
#include "tile/sinks.cuh"
#include "tile/accum.cuh"

using DqAccum = AccumTile<TILE_Q, WIDTH>;
using DkAccum = AccumTile<TILE_KV, WIDTH>;
using DvAccum = AccumTile<TILE_KV, WIDTH_V>;

// number of a query tile where all batch elements are alike
OP u32 query_tile_number(const BackwardParams& p, u32 batch_number, int head, int tile) {
  return (batch_number * p.heads + head) * ceil_div(p.len_q, TILE_Q) + tile;
}

// Of a tile that no sequence has: what gradients of sinks are 0 from.
OP void clear_stats(const BackwardParams& p, float sign, u32 block) {
  const u32 tiles = tiles_of<QUERIES>(p), head = block / tiles, tile = tiles - 1 - (block - head * tiles);
  float* const stats = p.stats + (i64(head) * tiles + tile) * STATS * TILE_Q;
  for_lane(l) {
    for (int i = Block::thread(l); i < 2 * TILE_Q; i += Block::threads) write(stats + i, i < TILE_Q ? infinity() : sign * 0.f);
  }
}

// Of padded sequences: rows of dq from here on are padding of a sequence of so many queries, which the launch before clears. A warp makes 16 rows of
// the others of sums at once. Where that launch has no blocks for most heads (STATS_AHEAD), the last block of a sequence makes all rows.
constexpr bool CLEARS_PADDING = VARLEN && !STATS_AHEAD;
OP int rows_made(int queries) { return ceil_div(queries, 16) * 16; }

// how many keys a sequence has
OP int keys_of(const BackwardParams& p, u32 number) { return rows_of_sequence<KEYS>(p, number).len(); }

// With terms a row may have such scores alone, as of -1e9 where all its keys are padding, that float32 holds neither what they differ by nor their lse to
// more than many powers of two. P would be anything up to infinity. So such a row is one that sees nothing, and has no gradients.
constexpr bool HAS_TERMS = SCORES != UNCHANGED && SCORES != SCALED;
constexpr float LEAST_LSE = -0x1p22f;

// lse of a row as P is computed from it, in units of log 2
OP float stat_of_lse(float lse, float per_query, int row_in_tile) {
  const float less = SCORES == PLUS_LINEAR ? fmaf(lse, LOG2E, -part_of_query(per_query, row_in_tile, TILE_Q)) : lse * LOG2E;
  return (HAS_TERMS ? lse < LEAST_LSE : lse == -infinity()) ? infinity() : less; // a row that sees nothing: P = 2^(S - inf) = 0
}

// FP16_PARTS: of float32, where out and dout lie is what they are, not their parts.
typedef Choose<(FP16_PARTS > 0), float, Element> GivenElement;
// Calls use(row, whether it exists, rowsum(dout o out)) for the rows of a query tile.
template <typename T, typename Use> OP void delta_of_rows(const TileOf<T>& out, const TileOf<T>& dout, Use use) {
  if constexpr (FP16_PARTS > 0) for_row_dots<TILE_Q>(out, dout, use);
  else for_row_dots<TILE_Q, WIDTH_V>(out, dout, use);
}

// Before: one query tile's sums become 0, its statistics those that P and dS are computed from. Delta is multiplied by `sign`. `parts` of a
// tile have a semaphore each. Heads from `accum_heads` on will use the sums of others, and of those from `stats_heads` on others make the statistics.
OP void preprocess(const BackwardParams& p, float sign, int parts = 1, u32 accum_heads = ~0u, u32 stats_heads = ~0u, u32 block = block_id()) {
  const BlockCoord here = block_coord<QUERIES>(p, p.heads, block);
  if (VARLEN && here.row < 0) return clear_stats(p, sign, block);
  const auto queries = rows_of_sequence<QUERIES>(p, here.batch_number);
  const auto clear_rows = [&](int first) {                    // of dq, in this tile
    const int end = min_of(queries.first() + here.row + TILE_Q, queries.end_of_room());
    if (!ADD_RESULTS && p.dq_progress) clear<Block>(rows_of<Result>(p.dq, here.batch, here.head, queries.first() + first, end, p.dim));
  };
  // Nobody adds to the sums of padding, nor makes them dq. Gradients of sinks, and of what scores read, read statistics of all rows.
  if (CLEARS_PADDING && SINKS == NO_SINKS && !MODIFIED && p.dq_progress && here.row > 0 && here.row >= queries.len()) return clear_rows(here.row);
  const u32 number = query_tile_number(p, queries, here.head, here.row / TILE_Q);
  if (p.dq_semaphore && warp_id() < parts) semaphore_clear(p.dq_semaphore + number * parts + warp_id());
  if (p.dq_progress && warp_id() == 0 && here.row == 0)
    semaphore_clear(p.dq_progress + (VARLEN ? here.batch_number * p.heads + here.head : number / tiles_of<QUERIES>(p)));

  const auto out = slice<GivenElement>(p.out, here.batch, here.head, queries.first() + here.row, queries.end(), p.dim_v);
  const auto dout = slice<GivenElement>(p.dout, here.batch, here.head, queries.first() + here.row, queries.end(), p.dim_v);
  const float* lse = row_slice(p.lse, here.batch, here.head, queries.first() + here.row);
  const float* dlse = p.dlse.data ? row_slice(p.dlse, here.batch, here.head, queries.first() + here.row) : nullptr;
  float* const stats = p.stats + i64(number) * STATS * TILE_Q;
  const float per_query = VARLEN ? per_query_log2(p, here, here.head, queries.len(), keys_of(p, here.batch_number)) : per_query_log2(p, here, here.head);
  const float bend = VARLEN ? bend_log2(p, here, here.head, queries.len(), keys_of(p, here.batch_number)) : bend_log2(p, here, here.head);
  const auto write_stats = [&](int row, bool exists, float dot) {
    const float row_lse = exists ? read(lse + row * p.lse.row_stride) : -infinity();
    write(stats + row, stat_of_lse(row_lse, per_query, row));
    if (BENDS) write(stats + 2 * TILE_Q + row, stat_of_lse(row_lse, per_query - bend, row));
    write(stats + TILE_Q + row, sign * (exists && dlse ? dot - read(dlse + row * p.dlse.row_stride) : dot));
  };
  if (!STATS_AHEAD || here.batch_number * p.heads + here.head < stats_heads) delta_of_rows(out, dout, write_stats);
  if constexpr (VARLEN) {                                     // where no block owns keys, none makes sums dq
    if (keys_of(p, here.batch_number) == 0) clear_rows(here.row);
    else if (CLEARS_PADDING) clear_rows(max_of(rows_made(queries.len()), here.row));
  }
  if constexpr (WHOLE_HEADS) {                                // of rows that see no key, no block makes sums dq
    const ColumnRange seen = visible_keys(Mask{p.mask, p.len_kv}, here.row, min_of(TILE_Q, p.len_q - here.row));
    if (!ADD_RESULTS && seen.first > seen.last) clear<Block>(rows_of<Result>(p.dq, here.batch, here.head, here.row, p.len_q, p.dim));
    return;
  }
  if constexpr (FIRST_STORES) {
    const auto seq = sequence_of(p, here.batch_number);
    const int rows = min_of(TILE_Q, queries.len() - here.row);  // or none, of rows that are no queries
    const ColumnRange seen = visible_keys(Mask{seq.mask(), seq.kv.len()}, here.row, rows);
    if (rows > 0 && seen.first <= seen.last) return;
  }
  if (here.batch_number * p.heads + here.head < accum_heads)
    clear(DqAccum{p.dq_accum + i64(number) * DqAccum::size});         // last: ahead of what is read, it would delay that
}

// SCALE_SUMS: what sums of dQ of a head are multiplied by, in the batch element with this number, by which alone a factor knows it.
OP float scale_of_element(const BackwardParams& p, BlockCoord here, u32 number) {
  here.batch_number = number;
  const auto seq = sequence_of(p, number);
  return scale_of_sums(p, here, here.head, seq.q.len(), seq.kv.len());
}

// Columns of sums that are added up. Those beyond DIM exist, and nobody has written them where a first block stores (FIRST_STORES).
constexpr int SUM_COLS = FP16_PARTS ? DIM : WIDTH, SUM_COLS_V = FP16_PARTS ? DIM_V : WIDTH_V;

// One tile of a gradient from its sums, of which there are `parts` for each head and batch element. Those of all batch elements that
// the gradient does not tell apart are added up.
template <typename Accum, Side SIDE, int COLS>
OP void postprocess_tile(const BackwardParams& p, const Tensor& gradient, float* sums, int heads, int parts, int cols, u32 block, float factor) {
  constexpr int ROWS = TILE_ROWS<SIDE>;
  const BlockCoord here = block_coord<SIDE>(p, heads, block);
  if (VARLEN && here.row < 0) return;
  const auto rows = rows_of_sequence<SIDE>(p, here.batch_number);
  const bool is_packed = offsets_of<SIDE>(p);                 // so that its gradients are of one batch element, which is not told apart either
  int summed[BATCH_AXES];                                     // elements to add up along each axis
  u32 elements = 1;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) {
    const bool sum = p.batch[i] > 1 && gradient.batch_stride[i] == 0 && !is_packed;
    if (sum && here.batch[i] > 0) return;                     // the block of element 0 does it
    summed[i] = sum ? p.batch[i] : 1;
    elements *= summed[i];
  }

  const SharedTile<ROWS, Accum::cols> tile_smem{shared_memory()};
  const int tiles = tiles_of<SIDE>(p);
  for (int piece = warp_id(); piece < ROWS / 16 * (COLS / 16); piece += WARPS) {
    const int row = piece / (COLS / 16) * 16, col = piece % (COLS / 16) * 16;
    Acc<16, 16> sum_reg;
    fill(sum_reg, 0.f);
    for (u32 element = 0; element < elements; ++element) {
      int batch[BATCH_AXES];
      batch_element(batch, summed, element);
      u32 batch_number = 0;
      #pragma unroll
      for (int i = 0; i < BATCH_AXES; ++i) batch_number = batch_number * p.batch[i] + here.batch[i] + batch[i];
      if (is_packed) batch_number = 0;
      for (int part = 0; part < parts; ++part) {
        const i64 number = ((i64(batch_number) * heads + here.head) * parts + part) * tiles + rows.first_tile() + here.row / ROWS;
        Acc<16, 16> part_reg;
        load(part_reg, Accum{sums + number * Accum::size}, row, col);
        if constexpr (SCALE_SUMS && SIDE == QUERIES) scale(part_reg, scale_of_element(p, here, is_packed ? here.batch_number : batch_number));
        add(sum_reg, part_reg);
      }
    }
    if (!(SCALE_SUMS && SIDE == QUERIES)) scale(sum_reg, factor);
    if constexpr (FLOAT32_RESULTS) store(slice<Result>(gradient, here.batch, here.head, rows.first() + here.row + row, rows.end_of_room(), cols), sum_reg, col);
    else store(tile_smem, sum_reg, row, col);
  }
  if constexpr (!FLOAT32_RESULTS) {
    sync_block();                                             // without it a thread sends what other warps have not written
    store<Block>(slice(gradient, here.batch, here.head, rows.first() + here.row, rows.end_of_room(), cols), tile_smem);
  }
}

constexpr int POSTPROCESS_BYTES = max_of(SharedTile<TILE_Q, WIDTH>::bytes, SharedTile<TILE_KV, WIDTH>::bytes);

// After: the tile of a gradient that a block is for.
template <typename Accum = DqAccum> OP void postprocess(const BackwardParams& p) {
  u32 batch = 1;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) batch *= p.batch[i];
  const int heads_kv = p.heads / p.heads_per_kv, splits = p.heads_per_kv / p.heads_per_block;
  const u32 batch_q = offsets_of<QUERIES>(p) ? 1 : batch, batch_kv = offsets_of<KEYS>(p) ? 1 : batch;
  const u32 query_blocks = p.dq_progress || WHOLE_HEADS ? 0 : tiles_of<QUERIES>(p) * p.heads * batch_q, key_blocks = tiles_of<KEYS>(p) * heads_kv * batch_kv;
  const u32 block = block_id();
  const u32 key_block = block - query_blocks;
  if (block < query_blocks) postprocess_tile<Accum, QUERIES, SUM_COLS>(p, p.dq, p.dq_accum, p.heads, 1, p.dim, block, p.scale);
  else if (key_block < key_blocks) postprocess_tile<DkAccum, KEYS, SUM_COLS>(p, p.dk, p.dk_accum, heads_kv, splits, p.dim, key_block, 1.f);
  else postprocess_tile<DvAccum, KEYS, SUM_COLS_V>(p, p.dv, p.dv_accum, heads_kv, splits, p.dim_v, key_block - key_blocks, 1.f);
}

// After, with SINKS: the gradient of one sink, -sum of 2^(sink - lse) delta over all rows of its head and all batch elements, by one block and in
// one order. A sink has a share of each row's softmax, and since it belongs to no value, a dP of 0. `sign` is that of delta in the statistics.
constexpr int SINKS_BYTES = WARPS * int(sizeof(float));       // sums of the warps
OP void gradient_of_sink(const BackwardParams& p, float sign) {
  const int own = warp_id();                                  // asked by all lanes: it is a shuffle
  const int i = int(block_id()) / p.heads, head = int(block_id()) - i * p.heads, tiles = tiles_of<QUERIES>(p);
  const SharedAddress smem = shared_memory();
  const float sink = read_sink(p, head, i) * LOG2E;
  int batch = 1;
  #pragma unroll
  for (int axis = 0; axis < BATCH_AXES; ++axis) batch *= p.batch[axis];
  if (offsets_of<QUERIES>(p)) batch = 1;
  Regs<float, 1> sum;
  for_lane(l) sum.at(l, 0) = 0.f;
  #pragma unroll 1
  for (int element = 0; element < batch; ++element) {
    const float* const stats = p.stats + i64((element * p.heads + head) * tiles) * STATS * TILE_Q;
    struct { int batch[BATCH_AXES]; u32 batch_number; } here{{}, u32(element)};
    if constexpr (SCORES == PLUS_LINEAR) batch_element(here.batch, p.batch, u32(element));
    const float per_query = per_query_log2(p, here, head);
    #pragma unroll 4
    for (int row0 = own * 32; row0 < tiles * TILE_Q; row0 += 32 * WARPS) {
      for_lane(l) {
        const int row = row0 + l;
        const float* const of_row = stats + i64(row / TILE_Q) * STATS * TILE_Q + row % TILE_Q;   // of one that does not exist, lse is infinite
        const float above = SCORES == PLUS_LINEAR ? sink - part_of_query(per_query, row, TILE_Q) : sink;
        if (row < tiles * TILE_Q) sum.at(l, 0) = fmaf(exp2_approx(above - read(of_row)), read(of_row + TILE_Q), sum.at(l, 0));
      }
    }
  }
  reduce_lanes<32>(sum, [](float a, float b) { return a + b; });
  for_lane(l) if (l == 0) store_shared(smem + own * int(sizeof(float)), sum.at(l, 0));
  sync_block();                                               // without it sums are read that have not been written
  if (own > 0) return;
  float total = 0.f;
  for (int warp = 0; warp < WARPS; ++warp) total += load_shared<float>(smem + warp * int(sizeof(float)));
  for_lane(l) {
    if (l == 0) write(static_cast<Sink*>(p.dsinks) + i * p.heads + head, -sign * total);
  }
}
