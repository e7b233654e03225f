// stats_ahead.cuh -- STATS_AHEAD: lse and delta of queries, as P and dS are computed from them, beneath the products of an earlier head. The
// preprocess kernel reads all of out and dO for them before any product begins. Here it makes those of the first heads, and blocks make those
// of the head `heads_ahead` later, each a share of its query tiles, by warps that have nothing to do where lanes add dQ in any order:
//
//   warps 1, 2 (IN_ORDER: warp 3 alone, since these pass on the order):
//                 out_i and dO_i of the later head, by TMA, behind what the first step of the block waits for
//                 lse_i;  delta_i = rowsum(dout o out) - dlse, a row for each lane
//                 count themselves at stats_progress of the later head
//   producer:     the first statistics, when all such warps have been counted at stats_progress of its own head
//
// A block waits for blocks that started earlier, and by so many that they are done: `heads_ahead` heads have more blocks than run at once. Of packed
// sequences a head has key tiles enough that the first `makers` of them do it for the next heads: as many as run at once come behind these.
#pragma once
#include "tile/key_block.cuh"

// The same of packed sequences (VARLEN), whose tiles are dealt out by their numbers. A tile may have rows of the next sequence behind its own, of
// which nothing counts, and some tiles are no sequence's. Of sequences without keys nobody sums up dq, so that it is cleared here.
template <typename Params> OP void make_stats_of_sequences(const Params& p, KeyBlock& block, int part, float sign) {
  if constexpr (VARLEN) {
    const int first_head = block.here.first_head + int(p.heads_ahead), tiles = tiles_of<QUERIES>(p);
    if (first_head >= p.heads || block.packed_tile >= p.makers) return;
    if (block.steps > 0) wait_for<LANES>(block.values.full(), 0);         // for the right time alone: what the first step needs comes first
    auto loading = block.of_stats;
    #pragma unroll 1
    for (int head = first_head; head < first_head + p.heads_per_block; ++head) {
      #pragma unroll 1
      for (int tile = int(block.packed_tile); tile < tiles; tile += int(p.makers)) {
        u32 number;
        const int row0 = row_in_sequence<QUERIES>(p, tile, number);
        const auto queries = rows_of_sequence<QUERIES>(p, number);
        const int rows = row0 < 0 ? 0 : queries.len() - row0, first_row = queries.first() + row0;
        int batch[BATCH_AXES];
        batch_element(batch, p.batch, number);
        if (part == 0 && rows > 0) {
          producer_acquire(loading);                            // without it rows are overwritten that the other warp still reads
          arrive_expect_tx(loading.full(), OutAndDout::bytes);
          start_load(loading, loading.tile().out(), p.out_map, batch, head, first_row, 0, call_site());
          start_load(loading, loading.tile().dout(), p.dout_map, batch, head, first_row, 0, call_site());
          loading.advance();
        }
        float* const stats = p.stats + i64(head * tiles + tile) * STATS * TILE_Q;
        for_lane(l) {
          #pragma unroll 1
          for (int row = part * 32 + l; row < TILE_Q; row += 32 * STATS_WARPS) {
            const float lse = row < rows ? read(row_slice(p.lse, batch, head, first_row + row)) : -infinity();
            write(stats + row, stat_of_lse(lse, 0.f, row));
            if (rows <= 0) write(stats + TILE_Q + row, sign * 0.f);
          }
        }
        if (rows > 0) {
          consumer_wait(block.of_stats);                        // without it rows are read that have not arrived
          for_row_dots<STATS_WARPS>(block.of_stats.tile().out(), block.of_stats.tile().dout(), part, [&](int row, float dot) {
            const float dlse = p.dlse.data && row < rows ? read(row_slice(p.dlse, batch, head, first_row + row)) : 0.f;
            write(stats + TILE_Q + row, row < rows ? sign * (dot - dlse) : sign * 0.f);        // those of another sequence may be NaN
          });
          consumer_release(block.of_stats);                     // without it the next tiles are never loaded
        }
        if (!ADD_RESULTS && part > 0 && row0 >= 0 && keys_of(p, number) == 0)
          clear<Warp>(rows_of<Result>(p.dq, batch, head, first_row, min_of(first_row + TILE_Q, queries.end_of_room()), p.dim));
      }
    }
    sync_warp();                                                // without it others read what a lane has not written
    semaphore_release(p.stats_progress + first_head);
  }
}

// By one of STATS_WARPS warps.
OP void make_stats_ahead(const HopperBackwardParams& p, KeyBlock& block, int part, float sign) {
  if constexpr (VARLEN) return make_stats_of_sequences(p, block, part, sign);
  BlockCoord there;
  there.batch_number = (block.head + p.heads_ahead) / p.heads;
  const int first_head = int(block.head + p.heads_ahead - there.batch_number * p.heads), apart = ceil_div(p.len_kv, TILE_KV) * TILE_Q;
  batch_element(there.batch, p.batch[BATCH_AXES - 1], there.batch_number);
  if (there.batch[BATCH_AXES - 2] >= p.batch[BATCH_AXES - 2]) return; // beyond the last head
  if (block.steps > 0) wait_for<LANES>(block.values.full(), 0);         // for the right time alone: what the first step needs comes first
  auto loading = block.of_stats;
  #pragma unroll 1
  for (int i = 0; i < p.heads_per_block; ++i) {
    there.head = first_head + i;
    float per_query = per_query_log2(p, there, there.head), bend = bend_log2(p, there, there.head);
    #pragma unroll 1
    for (there.row = block.here.tile * TILE_Q; there.row < p.len_q; there.row += apart) {
      if (WIDTH > 64 || IN_ORDER) loading = block.of_stats;   // as it is, in a register less; with it the loop of dim 64 has 0.996 of its rate
      if (part == 0) {
        producer_acquire(loading);                            // without it rows are overwritten that the other warp still reads
        arrive_expect_tx(loading.full(), OutAndDout::bytes);
        start_load(loading, loading.tile().out(), p.out_map, there.batch, there.head, there.row, 0, call_site());
        start_load(loading, loading.tile().dout(), p.dout_map, there.batch, there.head, there.row, 0, call_site());
        loading.advance();
      }
      float* const stats = p.stats + i64(query_tile_number(p, there.batch_number, there.head, there.row / TILE_Q)) * STATS * TILE_Q;
      const int rows = p.len_q - there.row;
      if (WIDTH > 64 && SCORES == PLUS_LINEAR) per_query = per_query_log2(p, there, there.head), bend = bend_log2(p, there, there.head); // anew, in a register less
      const float* const lse = row_slice(p.lse, there.batch, there.head, there.row);
      const auto write_lse = [&](float* to, float per_query) {
        for_lane(l) {
          #pragma unroll 1
          for (int row = part * 32 + (WIDTH > 64 || IN_ORDER ? not_ahead(l) : l); row < TILE_Q; row += 32 * STATS_WARPS)
            write(to + row, stat_of_lse(row < rows ? read(lse + row * p.lse.row_stride) : -infinity(), per_query, row));
        }
      };
      write_lse(stats, per_query);
      if constexpr (BENDS) write_lse(stats + 2 * TILE_Q, per_query - bend);
      consumer_wait(block.of_stats);                          // without it rows are read that have not arrived
      for_row_dots<STATS_WARPS>(block.of_stats.tile().out(), block.of_stats.tile().dout(), part, [&](int row, float dot) {
        const float dlse = p.dlse.data && row < rows ? read(row_slice(p.dlse, there.batch, there.head, there.row + row)) : 0.f;
        write(stats + TILE_Q + row, sign * (dot - dlse));
      });
      consumer_release(block.of_stats);                       // without it the next tiles are never loaded
    }
  }
  semaphore_release(p.stats_progress + block.head + p.heads_ahead); // lanes have met since they wrote
}

// By the producer, before TMA reads statistics of its head.
OP void wait_for_stats(const HopperBackwardParams& p, const KeyBlock& block) {
  if (head_ahead(block) < p.heads_ahead) return;
  wait_for_count(p.stats_progress + head_ahead(block), STATS_WARPS * makers(p));
  fence_proxy_async_global();                                 // without it TMA may read what was there before
}
