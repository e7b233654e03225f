// dq_protocol.cuh -- how blocks of the backward for sm_90a share dq: all blocks of a head add to its sums, dq_accum, in any order or in that
// of keys; the last one makes them dq; others set them to zero, and a later head adds to them again. Two kinds of counters in device memory:
//
//   dq_progress, one for each head, counts through four states. n blocks own the keys of a head, w warps of a block are consumers.
//
//     0                          n                                n + w                         2 n + w
//     ADDING ----- n blocks ---> READING ---- w warps ----------> CLEARING ----- n blocks ----> ZERO
//       |   count_heads: each,     |   postprocess_heads: those     |   clear_sums: those of a    |
//       |   when it has added      |   of the last block, when     |   head `cleared_after`      |
//       |                          |   they have read              |   later, each its share     |
//       '--------- the head `accum_heads` later has the same sums, and waits for ZERO: wait_for_zeros'
//
//   A block only waits for blocks that started earlier, so that none waits for ever.
//   Where no sums are used again, the preprocess kernel makes all of them zero, or (ZEROS_AHEAD) those of the first heads alone, and blocks of a
//   head those of the head `heads_ahead` later, which they count in zeros_progress.
//   Nobody uses the sums of heads from `reused` on again, and nothing is counted for them behind ADDING. Of heads from `last_heads` on no
//   block is the last one: blocks that own no keys wait until ADDING has ended, and make the sums dq (postprocess_last_heads).
//   Of sequences of their own lengths (VARLEN) each has counters of its own, and no sums are used again: there is ADDING alone. If they are
//   packed, blocks of a head go through all of them, and `last_heads` and `heads_ahead` count heads, not sequences.
//   Of blocks that take key tiles in turn (PERSISTENT) there is ADDING alone as well: all heads are among the last ones.
//   Where all key tiles of a head are for one block (WHOLE_HEADS), sums of dQ are the block's own, and nothing is counted: of the key tiles that see
//   a query tile the first stores, and the last makes the sums dq.
//
//   dq_semaphore, one for each query tile, where blocks add in order: block number b of a tile adds when it is b, and makes it b + 1. FIRST_STORES: block
//   number 0 stores, so that nobody has to make the sums zero before.
//   Consumers do not wait for it themselves. Lanes that add are told by one warp, and another releases it:
//
//     warp 1: semaphore_wait -- acquired --> consumers: add -- added --> warp 2: semaphore_release
//        ^---------------------------------- noticed ----------------------'
//
//   Where TMA adds (TMA_REDUCE_DQ), a warp for each consumer warpgroup does both, with a semaphore of that warpgroup's own:
//
//     consumers: dQ to shared memory -- staged --> warp 1 or 2: semaphore_wait, TMA adds -- sent --> consumers: the next one
//                                                               semaphore_release when it has
#pragma once
#include "tile/key_block.cuh"

// dq_progress at the end of each state.
struct DqProgress {
  u32 added, read, cleared;
  OP DqProgress(const HopperBackwardParams& p) : added(ceil_div(p.len_kv, TILE_KV)), read(added + 4 * GROUPS), cleared(read + added) {}
};

// query heads of all batch elements
OP u32 heads_of_all(const HopperBackwardParams& p) {
  u32 heads = p.heads;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) heads *= p.batch[i];
  return heads;
}
// STATS_AHEAD, ZEROS_AHEAD: by all blocks of the preprocess kernel, of which there may be fewer than heads.
OP void clear_progress(const HopperBackwardParams& p) {
  const u32 heads = heads_of_all(p);
  for_lane(l) {
    for (u32 i = block_id() * Block::threads + Block::thread(l); i < heads; i += blocks() * Block::threads) {
      count_written((1 + STATS_AHEAD + ZEROS_AHEAD) * sizeof(u32));
      p.dq_progress[i] = 0;
      if (VARLEN && i >= u32(p.heads)) continue;              // others are of heads alone
      if (STATS_AHEAD) p.stats_progress[i] = 0;
      if (ZEROS_AHEAD) p.zeros_progress[i] = 0;
    }
  }
  if constexpr (IN_ORDER) {                                   // the tiles of later heads have no block here
    const u32 tiles = heads * ceil_div(p.len_q, TILE_Q);
    for_lane(l) {
      for (u32 i = block_id() * Block::threads + Block::thread(l); i < tiles; i += blocks() * Block::threads) {
        count_written(sizeof(u32));
        p.dq_semaphore[i] = 0;
      }
    }
  }
}

// ZERO. By one warp: until the head that had the same sums before has reached it, or (ZEROS_AHEAD) blocks of an earlier head have made the sums of
// this one zero. These blocks started so much earlier that this seldom waits.
OP void wait_for_zeros(const HopperBackwardParams& p, const KeyBlock& block) {
  const u32 blocks = DqProgress(p).added;
  if (ZEROS_AHEAD && head_ahead(block) >= p.heads_ahead) wait_for_count(p.zeros_progress + head_ahead(block), VARLEN ? makers(p) : blocks);
  if constexpr (!ZEROS_AHEAD) {
    if (block.head < p.accum_heads_divmod.divisor) return;
    for (int i = 0; i < p.heads_per_block; ++i) wait_for_count(p.dq_progress + block.head - p.accum_heads_divmod.divisor + i, DqProgress(p).cleared);
  }
}
// By an idle warp, where lanes add: the consumers wait for `cleared` instead.
OP void let_add(const HopperBackwardParams& p, const KeyBlock& block) {
  wait_for_zeros(p, block);                                   // without it sums are added to those of another head
  arrive_at<LANES>(block.cleared);                            // without it nobody adds
}
// ZEROS_AHEAD. By an idle warp: the block's share of the sums of the heads `heads_ahead` later.
OP void make_zeros_ahead(const HopperBackwardParams& p, const KeyBlock& block) {
  const u32 later = head_ahead(block) + p.heads_ahead;        // the first one of them
  if (later >= (VARLEN ? u32(p.heads) : heads_of_all(p))) return;
  if (VARLEN && block.packed_tile >= p.makers) return;
  const SharedAddress zeros = block.smem + ZEROS_OFFSET;
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < ZEROS; i += 128) store_shared(zeros + (i + l * 4) * int(sizeof(float)), Four{});
  }
  fence_proxy_async();                                        // without it TMA reads what was there before the zeros
  const u32 tiles = tiles_of<QUERIES>(p), count = p.heads_per_block * tiles * (DqAccum::size / ZEROS);
  const u32 share = ceil_div(count, u32(makers(p))), begin = (VARLEN ? block.packed_tile : block.here.tile) * share, end = min_of(begin + share, count);
  store_repeated<ZEROS>(p.dq_accum + i64(later) * tiles * DqAccum::size, begin * ZEROS, end * ZEROS, zeros);
  semaphore_release(p.zeros_progress + later);
}
// CLEARING. By an idle warp: the block's share of the sums of the heads that came `cleared_after` heads earlier.
OP void clear_sums(const HopperBackwardParams& p, const KeyBlock& block) {
  const u32 before = block.head - p.cleared_after;            // the first one of them
  if (block.head < p.cleared_after || before >= p.reused) return;
  const u32 count = ceil_div(p.len_q, TILE_Q) * DqAccum::size, blocks = ceil_div(p.len_kv, TILE_KV);
  const u32 share = ceil_div(ceil_div(count, 128), blocks) * 128;
  const u32 begin = block.here.tile * share, end = min_of(begin + share, count);
  for (int i = 0; i < p.heads_per_block; ++i) {
    float* const sums = p.dq_accum + i64((before + i) % p.accum_heads_divmod.divisor) * count;
    wait_for_count(p.dq_progress + before + i, DqProgress(p).read); // without it sums are cleared that have not been read
    clear(sums, begin, end);
    semaphore_release(p.dq_progress + before + i);
  }
}

// ADDING in order: how many blocks add to the query tile at hand before this one. They add in the order of their keys. Under a causal mask
// (`backwards`) the last keys come first: each block begins with the first queries that see its keys, and no other block adds to those
// before it, so that nobody waits. But then the longest blocks of a head come last, and would leave multiprocessors idle at the end: the
// last heads keep the order of keys.
OP u32 semaphore_value(const HopperBackwardParams& p, const KeyBlock& block) {
  if constexpr (TILE_LIST) {                                  // of the blocks that come first, those whose keys see the tile
    const int tile = block.here.tile, tiles = ceil_div(p.len_kv, TILE_KV);
    return count_column(p, block.here.batch_number, block.now.head, block.now.tile, block.backwards ? tile + 1 : 0, block.backwards ? tiles : tile);
  }
  const auto seq = block.seq(p);
  const int row = block.now.tile * TILE_Q;
  const ColumnRange keys = visible_keys(Mask{seq.mask(), seq.kv.len()}, row, min_of(TILE_Q, seq.q.len() - row));
  return block.backwards ? keys.last / TILE_KV - block.here.tile : block.here.tile - keys.first / TILE_KV;
}
OP void acquire_dq_order(const HopperBackwardParams& p, KeyBlock& block) {
  #pragma unroll 1
  for (int step = 0; p.dq_semaphore && step < block.steps; ++step, block.advance(p)) {
    semaphore_wait(p.dq_semaphore + block.tile_number(p), semaphore_value(p, block));
    if (step > 0) wait_for<LANES>(block.noticed, (step - 1) % 2); // without it `added` may complete a second phase before warp 2 has noticed
                                                              // the first, which it then misses
    if constexpr (FIRST_STORES) {
      store_once(block.smem + FIRST_OFFSET, u32(semaphore_value(p, block) == 0));
      sync_warp();                                            // without it consumers are told before one lane has written
    }
    arrive_at<LANES>(block.acquired);                         // without it nobody adds
  }
}
OP void release_dq_order(const HopperBackwardParams& p, KeyBlock& block) {
  #pragma unroll 1
  for (int step = 0; p.dq_semaphore && step < block.steps; ++step, block.advance(p)) {
    wait_for<LANES>(block.added, step % 2);                   // without it others add before all warps of this block have
    arrive_at<LANES>(block.noticed);                          // without it the next step is never acquired
    semaphore_release(p.dq_semaphore + block.tile_number(p));
  }
}

// Calls add() when it is the turn of the block, in order where order matters.
template <typename Add> OP void in_turn(const HopperBackwardParams& p, const KeyBlock& block, u32 step, const Add& add) {
  if (p.dq_semaphore) wait_for<LANES>(block.acquired, step % 2); // without it sums are added out of order
  add();
  if (p.dq_semaphore) arrive_at<LANES>(block.added);          // without it the semaphore is never released
}
// sums += acc, or by the first block that adds in order = acc.
template <typename Sums, int N> OP void add_or_store(const KeyBlock& block, const Sums& sums, const Acc<16, N>& acc, int row, int col) {
  if (FIRST_STORES && load_once<u32>(block.smem + FIRST_OFFSET)) store(sums, acc, row, col);
  else add(sums, acc, row, col);
}
// dQ_i += acc, of the query tile with this number: the part of the calling warp.
template <int N> OP void add_queries(const HopperBackwardParams& p, const KeyBlock& block, u32 number, u32 step, const Acc<16, N>& acc, int row, int col) {
  in_turn(p, block, step, [&] { add_or_store(block, DqAccum{p.dq_accum + i64(number) * DqAccum::size}, acc, row, col); });
}
// WHOLE_HEADS: the sums of a query tile, as the lanes have them that add to them.
struct OwnSums {
  const QueryCursor at;
  bool first, last;                                           // of the key tiles that see the query tile

  OP OwnSums(const HopperBackwardParams& p, const KeyBlock& block, const QueryCursor& at) : at(at) {
    const int row = at.tile * TILE_Q;
    const ColumnRange keys = visible_keys(Mask{p.mask, p.len_kv}, row, min_of(TILE_Q, p.len_q - row));
    first = block.here.tile <= keys.first / TILE_KV, last = block.here.tile >= keys.last / TILE_KV;
  }
  OP DqAccum sums(const HopperBackwardParams& p, u32 number) const { return {p.dq_accum + i64(number) * DqAccum::size}; }
  // dQ_i += acc, or dq = scale dQ.
  template <int N> OP void add_or_finish(const HopperBackwardParams& p, const KeyBlock& block, u32 number, Acc<16, N>& acc, int row, int col) const {
    if (!last) {
      if (first) store(sums(p, number), acc, row, col);
      else add(sums(p, number), acc, row, col);
      return;
    }
    if (!first) add(acc, sums(p, number), row, col);
    scale(acc, scale_of_sums(p, block.here, at.head, p.len_q, p.len_kv));
    store<16>(rows_of<Result>(p.dq, block.here.batch, at.head, at.tile * TILE_Q + row, p.len_q, p.dim), acc, col);
  }
};
// The same by a warp that has no part of it.
OP void add_nothing(const HopperBackwardParams& p, const KeyBlock& block, u32 step) { in_turn(p, block, step, [] {}); }

// The same by TMA, which keeps no consumer waiting: the four warps of a group leave their parts side by side in shared memory, and a warp of
// the first warpgroup has TMA add all of them at once, to the part of the tile that begins at `offset`.
template <int N> OP void stage_queries(const KeyBlock& block, int group, u32 step, const Acc<16, N>& acc) {
  wait_for<LANES>(block.sent(group), step % 2 ^ 1);           // without it the part of the step before is overwritten before it has left
  store(block.dq_smem(group) + not_ahead(warp_id()) % 4 * (16 * N * int(sizeof(float))), acc);
  fence_proxy_async();                                        // without it TMA does not see what lanes have stored
  arrive_at<LANES>(block.staged(group));                      // without it dQ never leaves
}
OP void send_queries(const HopperBackwardParams& p, KeyBlock& block, int group, int offset) {
  wait_for_zeros(p, block);                                   // without it sums are added to those of another head
  fence_proxy_async_global();                                 // without it TMA may add before there are zeros
  #pragma unroll 1
  for (int step = 0; step < block.steps; ++step, block.advance(p)) {
    u32* const semaphore = p.dq_semaphore + block.tile_number(p) * GROUPS + group;
    wait_for<LANES>(block.staged(group), step % 2);           // without it parts leave that have not been written
    if (p.dq_semaphore) semaphore_wait(semaphore, semaphore_value(p, block));
    const bool first = FIRST_STORES && semaphore_value(p, block) == 0;
    add_async(p.dq_accum + i64(block.accum_number(p)) * DqAccum::size + offset, block.dq_smem(group), DQ_BYTES / int(sizeof(float)), first);
    wait_for_stores();                                        // without it parts are overwritten that have not left
    arrive_at<LANES>(block.sent(group));                      // without it the group waits for ever
    if (p.dq_semaphore) {
      wait_for_reductions();                                  // without it others add before this block has
      semaphore_release(semaphore);
    }
  }
  wait_for_reductions();                                      // without it the block is counted before all has been added
  arrive_at<LANES>(block.ended);                              // without it the block is never counted
}

// READING. One warp counts the block, which takes a while, and tells the consumers of which heads it is the last one.
OP void count_heads(const HopperBackwardParams& p, const KeyBlock& block) {
  if (!p.dq_progress || !block.is_counted(p)) return;
  wait_for<LANES>(block.ended, 0);                            // without it the block is counted before all has been added
  const u32 in_order = VARLEN && offsets_of<KEYS>(p) ? u32(block.here.first_head) : block.head; // blocks of a head go through all packed sequences
  const u32 blocks = in_order < p.last_heads ? block.key_tiles(p) : ~0u;                   // of the last heads, no block finishes dq by itself
  count_block(p.dq_progress + block.head, p.heads_per_block, blocks, block.smem + LAST_OFFSET);
  sync_warp();                                                // without it consumers are told before one lane has written
  arrive_at<LANES>(block.counted);                            // without it the consumers wait for ever
}
// dq = scale * 16 rows of sums, or with SCALE_SUMS times `by`, by a warp that has nothing else to do.
template <typename Accum> OP void finish_rows(const HopperBackwardParams& p, const ResultTile& dq, const Accum& sums, int row, float by) {
  constexpr int COLS = FP16_PARTS ? SUM_COLS : WIDTH % 128 ? 64 : 128; // at a time
  #pragma unroll 1
  for (int col = 0; col < p.dim; col += COLS) {
    Acc<16, COLS> sum_reg;
    load(sum_reg, sums, row % TILE_Q, col);
    scale(sum_reg, SCALE_SUMS ? by : p.scale);
    store<16>(dq, sum_reg, col);                              // rows of dq are multiples of that, or TMA could not store them
  }
}

template <typename Accum = DqAccum> OP void postprocess_heads(const HopperBackwardParams& p, const KeyBlock& block) {
  if (!p.dq_progress || !block.is_counted(p)) return;
  const auto queries = block.seq(p).q;
  wait_for<LANES>(block.counted, 0);                          // without it warps read what has not been written
  const u32 others = load_shared<u32>(block.smem + LAST_OFFSET);
  const OutTile out_smem{block.smem + Q_OFFSET};
  const int own_row = (warp_id() - 4) * 16;
  #pragma unroll 1
  for (int i = 0; i < p.heads_per_block; ++i) {
    if (others >> i & 1) continue;
    const i64 first = VARLEN ? i64(block.number_of(p, block.here.first_head + i, 0)) : i64(block.head + i) * ceil_div(p.len_q, TILE_Q) - block.tiles_before;
    const int room = queries.end_of_room() - queries.first(), rows = CLEARS_PADDING ? rows_made(queries.len()) : room;
    #pragma unroll 1
    for (int row = own_row; row < rows; row += OutTile::rows) {
      if constexpr (FINISHES_BY_LANES) {
        const ResultTile dq = rows_of<Result>(p.dq, block.here.batch, block.here.first_head + i, queries.first() + row, queries.end_of_room(), p.dim);
        finish_rows(p, dq, Accum{p.dq_accum + (first + row / TILE_Q) * Accum::size}, row, p.scale);
        continue;
      }
      Acc<16, WIDTH> sum_reg;
      load(sum_reg, Accum{p.dq_accum + (first + row / TILE_Q) * Accum::size}, row % TILE_Q, 0);
      scale(sum_reg, scale_of_sums(p, block.here, block.here.first_head + i, queries.len(), block.seq(p).kv.len()));
      const int first_row = queries.first() + row;
      if (FLOAT32_RESULTS || (VARLEN && row + 16 > room)) {   // as in `store_gradient`
        store(rows_of<Result>(p.dq, block.here.batch, block.here.first_head + i, first_row, queries.end_of_room(), p.dim), sum_reg);
        continue;
      }
      wait_for_stores();                                      // without it rows are overwritten that have not left
      store(out_smem, sum_reg, own_row);
      fence_proxy_async();                                    // without it rows leave that have not been written
      store_async(p.dq_map, block.here.batch, block.here.first_head + i, first_row, out_smem, own_row);
    }
    if (block.head + i < p.reused) semaphore_release(p.dq_progress + block.head + i); // lanes have met since they read
  }
}

// VARLEN: 16 rows of a sequence of one of the last heads, by a warp that waits for the blocks of that sequence alone.
template <typename Accum> OP void postprocess_last_sequences(const HopperBackwardParams& p) {
  constexpr int PARTS = TILE_Q / 16;
  u32 heads = p.heads;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) heads *= offsets_of<QUERIES>(p) ? 1 : p.batch[i];
  const u32 later = (block_id() - p.owners) * WARPS + warp_id(), tile = p.last_heads * tiles_of<QUERIES>(p) + later / PARTS;
  if (tile >= heads * tiles_of<QUERIES>(p)) return;
  const BlockCoord here = block_coord<QUERIES>(p, p.heads, tile);
  const int row = here.row + int(later % PARTS) * 16;
  if (here.row < 0) return;
  const auto seq = sequence_of(p, here.batch_number);
  if (row >= (CLEARS_PADDING ? seq.q.len() : seq.q.end_of_room() - seq.q.first()) || seq.kv.len() == 0) return; // without keys, rows are zeros from the launch before
  // Without it rows are finished to which blocks still add.
  semaphore_wait(p.dq_progress + here.batch_number * p.heads + here.head, ceil_div(seq.kv.len(), TILE_KV));
  const ResultTile dq = rows_of<Result>(p.dq, here.batch, here.head, seq.q.first() + row, seq.q.end_of_room(), p.dim);
  const Accum sums{p.dq_accum + i64(query_tile_number(p, seq.q, here.head, here.row / TILE_Q)) * Accum::size};
  finish_rows(p, dq, sums, row, scale_of_sums(p, here, here.head, seq.q.len(), seq.kv.len()));
}

// PERSISTENT: how many blocks take key tiles, a device decides.
OP u32 first_finishing_block(const HopperBackwardParams& p) { return PERSISTENT ? blocks() - p.finishing : p.owners; }

// The sums of the last heads: by blocks that own no keys, 16 rows a warp. The last blocks of these heads alone would take long over it while
// all other multiprocessors have nothing left to do.
template <typename Accum = DqAccum> OP void postprocess_last_heads(const HopperBackwardParams& p) {
  if constexpr (VARLEN) return postprocess_last_sequences<Accum>(p);
  const u32 later = block_id() - first_finishing_block(p), blocks_of_head = ceil_div(p.len_q, 16 * WARPS), number = p.last_heads + later / blocks_of_head;
  const int row = (int(later % blocks_of_head) * WARPS + warp_id()) * 16;
  if (warp_id() == 0) semaphore_wait(p.dq_progress + number, ceil_div(p.len_kv, TILE_KV));
  sync_block();                                               // without it rows are finished to which blocks still add
  if (row >= p.len_q) return;
  struct { int batch[BATCH_AXES]; u32 batch_number; } here{{}, number / p.heads};
  batch_element(here.batch, p.batch[BATCH_AXES - 1], here.batch_number);
  const int head = int(number % p.heads);
  const ResultTile dq = rows_of<Result>(p.dq, here.batch, head, row, p.len_q, p.dim);
  const Accum sums{p.dq_accum + (i64(number % p.accum_heads_divmod.divisor) * ceil_div(p.len_q, TILE_Q) + row / TILE_Q) * Accum::size};
  finish_rows(p, dq, sums, row, scale_of_sums(p, here, head, p.len_q, p.len_kv));
}

// PERSISTENT: by the scheduler warp. Takes key tiles in the order of their numbers, so that whoever waits for one waits for a block that has begun,
// and counts those that have ended. It takes the next one when all of this one is on its way: earlier, others would have nothing left to take. What it
// tells of a key tile has the place of what it told two before, which has ended, so that no warp reads it any more.
OP void take_key_tiles(const HopperBackwardParams& p, KeyBlock& block) {
  u32 number = 0, head = 0;                                   // of the key tile before
  #pragma unroll 1
  for (u32 count = 0;; ++count) {
    if (count > 0) wait_for<LANES>(block.loaded, (count - 1) % 2);            // for the right time, and so that nobody has still to hear of it
    const u32 tiles = ceil_div(p.len_kv, TILE_KV);
    number = WHOLE_HEADS && count % tiles > 0 ? number + 1 : count_up(p.next_tile) * (WHOLE_HEADS ? tiles : 1);
    block.steps = -1;
    if (number < p.owners) block.find(p, [&] { return number; });
    block.tell_keys();
    if (count > 0) {
      // without it the block is counted before all has been added, and the next one is told of where a slower warp still reads
      wait_for<LANES>(block.ended_of(count - 1), (count - 1) / 2 % 2);
      if (p.dq_progress) count_block(p.dq_progress + head, p.heads_per_block);
    }
    if (block.steps < 0) return;
    head = block.head;
  }
}
