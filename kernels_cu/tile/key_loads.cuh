// key_loads.cuh -- the producer of a `KeyBlock`: what comes to a block of the backward for sm_90a, and in which order.
#pragma once
#include "tile/stats_ahead.cuh"

// BENDS: where the tile at hand lies; and which of the statistics of its queries are lse.
OP Bend bend_of_tile(const HopperBackwardParams& p, const KeyBlock& block) {
  const auto seq = block.seq(p);
  const int diagonal = diagonal_of(score_context(p, block.here, block.now.head, HeadTerms{}, seq.q.len(), seq.kv.len()));
  return bend_at(block.now.tile * TILE_Q + diagonal, TILE_Q, block.row0, TILE_KV);
}
OP const float* lse_stats(const HopperBackwardParams& p, const KeyBlock& block, const float* stats) {
  return BENDS && bend_of_tile(p, block) == BEYOND ? stats + 2 * TILE_Q : stats;
}

// The stages at hand of two pipelines = what `load` starts to bring, so many bytes in all, of whose rows the first `rows` count and the others
// become zeros, by one warp; goes on to the next ones. One after the other, whoever waits for the second would wait twice as long.
template <typename T, typename U, int DEPTH, int DEPTH_U, Lanes LANES, typename Load>
OP void clip_both(Pipeline<T, DEPTH, LANES>& first, Pipeline<U, DEPTH_U, LANES>& second, Clipping& clipping, int rows, int bytes, const Load& load,
                  CallSite at = call_site()) {
  Pipeline<T, 1, LANES> of_first(first.tile().base, clipping.arrived.address);
  Pipeline<U, 1, LANES> of_second(second.tile().base, clipping.arrived.address);
  of_first.count = of_second.count = clipping.count++;
  arrive_expect_tx(of_first.full(), bytes, at);
  load(of_first, of_second);
  consumer_wait(of_first, at);                                // without it TMA writes over the zeros
  const int warp = not_ahead(0);                              // known to be 0, it would take registers of the whole loop: which rows a lane clears
  clear_rows(first.tile(), max_of(rows, 0), warp);
  clear_rows(second.tile(), max_of(rows, 0), warp);
  fence_proxy_async();                                        // without it products read what was there before the zeros
  arrive_at<LANES>(first.full(), at);                         // without it the consumers wait for ever
  arrive_at<LANES>(second.full(), at);                        // the same
  first.advance(), second.advance();
}
// STATS_AHEAD: what the first step needs. Its statistics come last, since they may not have been made.
OP void load_first(const HopperBackwardParams& p, KeyBlock& block, const float* stats, int row) {
  const KeyBlockCoord& here = block.here;
  const CallSite at = call_site();
  arrive_expect_tx(block.queries.full(), QueryStage::bytes + STAT_BYTES);
  start_load(block.queries, p.q_map, here.batch, block.now.head, row, at);
  if (!VARLEN) load_async(block.values, p.v_map, here.batch, here.head_kv, block.row0);
  arrive_expect_tx(block.douts.full(), DoutTile::bytes + STAT_BYTES);
  start_load(block.douts, p.dout_map, here.batch, block.now.head, row, at);
  wait_for_stats(p, block);                                   // without it statistics are read that have not been made
  start_numbers(block.queries, lse_stats(p, block, stats), block.lse_smem(), at);
  start_numbers(block.douts, stats + TILE_Q, block.delta_smem(), at);
  block.queries.advance();
  block.douts.advance();
}

// What load_tiles does for a sequence, whose last tiles end within it.
OP void load_tiles_of_sequence(const HopperBackwardParams& p, KeyBlock& block) {
  const KeyBlockCoord& here = block.here;
  const auto seq = block.seq(p);
  Clipping clipping(block.smem + CLIPPING_BARRIER);
  const int key = seq.kv.first() + block.row0, keys = seq.kv.len() - block.row0;
  if (keys >= TILE_KV) {
    load_async(block.keys, p.k_map, here.batch, here.head_kv, key);
    load_async(block.values, p.v_map, here.batch, here.head_kv, key);
  } else {
    clip_both(block.keys, block.values, clipping, keys, KeyTile::bytes + ValueTile::bytes, [&](const Pipeline<KeyTile, 1, LANES>& k, const Pipeline<ValueTile, 1, LANES>& v) {
      start_load(k, p.k_map, here.batch, here.head_kv, key, call_site());
      start_load(v, p.v_map, here.batch, here.head_kv, key, call_site());
    });
  }
  #pragma unroll 1
  for (int step = 0; step < block.steps; ++step, block.advance(p)) {
    const float* const stats = p.stats + i64(block.tile_number(p)) * STATS * TILE_Q;
    const int head = block.now.head, row = block.now.tile * TILE_Q, query = seq.q.first() + row, queries = seq.q.len() - row;
    const SharedAddress lse = block.lse_smem(), delta = block.delta_smem();
    producer_acquire(block.queries);                          // without it tiles are overwritten that a slower warp still reads
    if (STATS_AHEAD && step == 0 && queries >= TILE_Q) {
      load_first(p, block, stats, query);
    } else if (queries >= TILE_Q) {
      load_query_tile(block.queries, p, here.batch, head, seq.q.first(), row, block.row0, lse_stats(p, block, stats), lse);
      load_async(block.douts, p.dout_map, here.batch, head, query, stats + TILE_Q, delta);
    } else {                                                  // as in the first step of most blocks under a causal mask
      constexpr int bytes = QueryStage::bytes + DoutTile::bytes + 2 * TILE_Q * int(sizeof(float));
      clip_both(block.queries, block.douts, clipping, queries, bytes, [&](const Pipeline<QueryStage, 1, LANES>& q, const Pipeline<DoutTile, 1, LANES>& dout) {
        if constexpr (STATS_AHEAD) {
          start_load(q, p.q_map, here.batch, head, query, call_site());
          start_load(dout, p.dout_map, here.batch, head, query, call_site());
          if (step == 0) wait_for_stats(p, block);            // without it statistics are read that have not been made
          start_numbers(q, lse_stats(p, block, stats), lse, call_site());
          start_numbers(dout, stats + TILE_Q, delta, call_site());
          return;
        }
        start_query_tile(q, p, here.batch, head, seq.q.first(), row, block.row0, lse_stats(p, block, stats), lse, call_site());
        start_load(dout, p.dout_map, here.batch, head, query, call_site());
        start_numbers(dout, stats + TILE_Q, delta, call_site());
      });
    }
  }
}

// One warp loads, as far ahead as there is room. Stages of Q and dO are released together, when the step is over.
OP void load_tiles(const HopperBackwardParams& p, KeyBlock& block) {
  if (block.steps == 0) return;
  if constexpr (VARLEN) return load_tiles_of_sequence(p, block);
  const KeyBlockCoord& here = block.here;
  if (!PERSISTENT) load_async(block.keys, p.k_map, here.batch, here.head_kv, block.row0);
  #pragma unroll 1
  for (int step = 0; step < block.steps; ++step, block.advance(p)) {
    const float* const stats = p.stats + i64(block.tile_number(p)) * STATS * TILE_Q;
    const int row = block.now.tile * TILE_Q;
    producer_acquire(block.queries);                          // without it tiles are overwritten that a slower warp still reads
    if constexpr (TILE_LIST) block.tell_tile(p);
    if (STATS_AHEAD && step == 0) {
      load_first(p, block, stats, row);
      continue;
    }
    load_query_tile(block.queries, p, here.batch, block.now.head, 0, row, block.row0, lse_stats(p, block, stats), block.lse_smem());
    if (!PERSISTENT && step == 0) load_async(block.values, p.v_map, here.batch, here.head_kv, block.row0);
    load_async(block.douts, p.dout_map, here.batch, block.now.head, row, stats + TILE_Q, block.delta_smem());
    if (PERSISTENT && !LOADS_KEYS_APART && step == 0) {      // last, because they wait for the end of the key tile before
      producer_acquire(block.keys);                           // without it keys are overwritten that a slower warp still reads
      load_async(block.keys, p.k_map, here.batch, here.head_kv, block.row0);
      producer_acquire(block.values);                         // the same for values, and rows of gradients that leave from there
      load_async(block.values, p.v_map, here.batch, here.head_kv, block.row0);
    }
  }
}

// STAGES_KV: keys and values come by a warp of their own, as far ahead as there is room. With one stage they wait for the end of the key tile before,
// and queries that other steps need would be in their way.
OP void load_keys(const HopperBackwardParams& p, KeyBlock& block) {
  #pragma unroll 1
  while (block.hear_keys(p)) {
    block.taken.advance();
    if (block.steps > 0) {
      producer_acquire(block.keys);                           // without it keys are overwritten that a slower warp still reads
      load_async(block.keys, p.k_map, block.here.batch, block.here.head_kv, block.row0);
      producer_acquire(block.values);                         // the same for values, and rows of gradients that leave from there
      load_async(block.values, p.v_map, block.here.batch, block.here.head_kv, block.row0);
    }
    arrive_at<LANES>(block.loaded);                           // without it the scheduler warp waits for ever
  }
}
// PERSISTENT: one warp loads, key tile after key tile.
OP void load_key_tiles(const HopperBackwardParams& p, KeyBlock& block) {
  #pragma unroll 1
  while (block.hear_keys(p)) {
    block.taken.advance();
    block.find_ends(p);
    if (TILE_LIST && block.steps > 0) block.find_tile(p);
    load_tiles(p, block);
    arrive_at<LANES>(block.loaded);                           // without it the scheduler warp waits for ever
  }
}
