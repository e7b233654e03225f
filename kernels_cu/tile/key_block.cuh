// key_block.cuh -- a block of the backward for sm_90a, whichever way its warpgroups share the products: it owns TILE_KV keys, and the query
// tiles that see one of them pass through it. The first warpgroup serves the others, which compute.
#pragma once
#include "tile/pipeline.cuh"
#include "tile/mask.cuh"
#include "tile/passes.cuh"
#include "tile/wgmma.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS = WARPS / 4 - 1;                         // warpgroups that compute

// Of the registers that a launch deals out evenly, the first warpgroup gives back most.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = min_of((REGISTERS * (GROUPS + 1) - PRODUCER_REGISTERS) / GROUPS / 8 * 8, 240);

using KeyTile = PanelTile<TILE_KV, WIDTH>;                    // of k or v
using QueryTile = PanelTile<TILE_Q, WIDTH>;                   // of q or dout
using GradientTile = PanelTile<TILE_Q, TILE_KV>;              // dS
using OutTile = PanelTile<64 * GROUPS, WIDTH>;                // 16 rows of dq for each computing warp, in the place of Q
static_assert(OutTile::bytes <= STAGES * QueryTile::bytes, "finished rows of dq fit where Q was");

// Shared memory: K and V, in whose place their gradients leave; Q and dO; dS of two steps; lse and delta; dQ if it is staged; barriers.
constexpr int V_OFFSET = KeyTile::bytes;
constexpr int Q_OFFSET = V_OFFSET + KeyTile::bytes;
constexpr int DO_OFFSET = Q_OFFSET + STAGES * QueryTile::bytes;
constexpr int DS_OFFSET = DO_OFFSET + STAGES * QueryTile::bytes;
constexpr int STAT_BYTES = TILE_Q * int(sizeof(float));
constexpr int LSE_OFFSET = DS_OFFSET + 2 * GradientTile::bytes;
constexpr int DELTA_OFFSET = LSE_OFFSET + STAGES * STAT_BYTES;
constexpr int DQ_OFFSET = DELTA_OFFSET + STAGES * STAT_BYTES;         // of each computing warpgroup
constexpr int DQ_BYTES = TMA_REDUCE_DQ ? TILE_Q * WIDTH / GROUPS * int(sizeof(float)) : 0;
constexpr int K_BARRIERS = DQ_OFFSET + GROUPS * DQ_BYTES;
constexpr int V_BARRIERS = K_BARRIERS + STAGE_BARRIERS;
constexpr int Q_BARRIERS = V_BARRIERS + STAGE_BARRIERS;
constexpr int DO_BARRIERS = Q_BARRIERS + STAGES * STAGE_BARRIERS;
constexpr int DS_BARRIER = DO_BARRIERS + STAGES * STAGE_BARRIERS;
constexpr int ORDER_BARRIERS = DS_BARRIER + Mbarrier::bytes;
constexpr int END_BARRIERS = ORDER_BARRIERS + (TMA_REDUCE_DQ ? 2 * GROUPS : 3) * Mbarrier::bytes;
constexpr int LAST_OFFSET = END_BARRIERS + 3 * Mbarrier::bytes;
constexpr int BLOCK_BYTES = LAST_OFFSET + 2 * int(sizeof(u32));

constexpr Lanes LANES = WIDTH <= 64 ? CONVERGENT : DIVERGENT; // as measured: 5 % at dim 64, and nothing or 5 % the other way at dim 128

// What every warp of a block knows, and how far it is.
struct KeyBlock {
  SharedAddress smem = shared_memory();
  Pipeline<KeyTile, 1, LANES> keys{smem, smem + K_BARRIERS}, values{smem + V_OFFSET, smem + V_BARRIERS};
  Pipeline<QueryTile, STAGES, LANES> queries{smem + Q_OFFSET, smem + Q_BARRIERS}, douts{smem + DO_OFFSET, smem + DO_BARRIERS};
  Mbarrier written{smem + DS_BARRIER};                        // dS of a step, by all warps
  Mbarrier acquired{smem + ORDER_BARRIERS}, added{acquired.address + Mbarrier::bytes}, noticed{added.address + Mbarrier::bytes}; // to add to dQ in order
  OP Mbarrier staged(int group) const { return {smem + ORDER_BARRIERS + group * Mbarrier::bytes}; }                // dQ of a warpgroup, and
  OP Mbarrier sent(int group) const { return {smem + ORDER_BARRIERS + (GROUPS + group) * Mbarrier::bytes}; }       // its place is free again
  Mbarrier ended{smem + END_BARRIERS}, counted{smem + END_BARRIERS + Mbarrier::bytes};     // additions to dQ; and so the block
  Mbarrier cleared{counted.address + Mbarrier::bytes};        // sums that other heads had
  KeyBlockCoord here;
  TransposedBand band;
  u32 head;                                                   // the first query head, counted over all batch elements
  int row0;                                                   // the first key
  int from, to;                                               // the first tile of queries and the last one to come
  int steps;
  bool backwards;                                             // the last keys before the first ones, see semaphore_value
  QueryCursor now;
  u32 tiles_before;                                           // query tiles of heads that had the same sums before, and of all in between

  OP KeyBlock(const HopperBackwardParams& p)
      : here(key_block_coord(p, TILE_KV)),
        band(transposed(p.band_left, p.band_right, p.len_q, p.len_kv)), head(here.batch_number * p.heads + here.first_head) {
    backwards = head < p.backwards;
    if (backwards) here.tile = ceil_div(p.len_kv, TILE_KV) - 1 - here.tile;
    row0 = here.tile * TILE_KV;
    const ColumnRange seeing = visible_queries(band, row0, TILE_KV);
    const int first = seeing.first / TILE_Q, last = seeing.last / TILE_Q;
    steps = seeing.last < seeing.first ? 0 : (last + 1 - first) * p.heads_per_block;
    from = backwards ? first : last;
    to = backwards ? last : first;
    now = {here.first_head, from};
    tiles_before = divide(head, p.accum_heads_divmod) * p.accum_heads_divmod.divisor * ceil_div(p.len_q, TILE_Q);
  }
  OP void advance() { now.advance(from, to); }
  OP u32 tile_number(const BackwardParams& p) const { return query_tile_number(p, here.batch_number, now.head, now.tile); }
  OP u32 number_before(const BackwardParams& p) const {        // the same of the tile before
    const bool of_last_head = now.tile == from;
    const int tile = of_last_head ? to : now.tile - (from < to ? 1 : -1);
    return query_tile_number(p, here.batch_number, now.head - of_last_head, tile);
  }
  OP u32 accum_number(const BackwardParams& p) const { return tile_number(p) - tiles_before; }  // of the tile among those that have sums at a time
  OP SharedAddress lse_smem() const { return smem + LSE_OFFSET + queries.stage() * STAT_BYTES; }
  OP SharedAddress delta_smem() const { return smem + DELTA_OFFSET + douts.stage() * STAT_BYTES; }
  OP SharedAddress dq_smem(int group) const { return smem + DQ_OFFSET + group * DQ_BYTES; }
  OP GradientTile ds_smem(u32 step) const { return {smem + DS_OFFSET + step % 2 * GradientTile::bytes}; }
};

// By one warp, before a sync_block.
OP void start_barriers(const KeyBlock& block) {
  init_pipeline(block.keys, 1);
  init_pipeline(block.values, 1);
  init_pipeline(block.queries, 4 * GROUPS);                   // warps that hand a tile back
  init_pipeline(block.douts, 4 * GROUPS);
  init_mbarrier(block.written, 4 * GROUPS);
  if (TMA_REDUCE_DQ) {
    for (int group = 0; group < GROUPS; ++group) {
      init_mbarrier(block.staged(group), 4);
      init_mbarrier(block.sent(group), 1);
    }
  } else {
    init_mbarrier(block.acquired, 1);
    init_mbarrier(block.added, 4 * GROUPS);
    init_mbarrier(block.noticed, 1);
  }
  init_mbarrier(block.ended, TMA_REDUCE_DQ ? GROUPS : 4 * GROUPS);
  init_mbarrier(block.counted, 1);
  init_mbarrier(block.cleared, 1);
}

// One warp loads, as far ahead as there is room. Slots of Q and dO are handed back together, when the step is over.
OP void load_tiles(const HopperBackwardParams& p, KeyBlock& block) {
  if (block.steps == 0) return;
  const KeyBlockCoord& here = block.here;
  load_async(block.keys, p.k_map, here.batch, here.head_kv, block.row0);
  #pragma unroll 1
  for (int step = 0; step < block.steps; ++step, block.advance()) {
    const float* const stats = p.stats + i64(block.tile_number(p)) * 2 * TILE_Q;
    const int row = block.now.tile * TILE_Q;
    producer_acquire(block.queries);                          // without it tiles are overwritten that a slower warp still reads
    load_async(block.queries, p.q_map, here.batch, block.now.head, row, stats, block.lse_smem());
    if (step == 0) load_async(block.values, p.v_map, here.batch, here.head_kv, block.row0);
    load_async(block.douts, p.dout_map, here.batch, block.now.head, row, stats + TILE_Q, block.delta_smem());
  }
}

// What is counted for a head, one after the other: its blocks, when all they add has been added; then the warps that finish dq, when they have
// read the sums; then the blocks of a later head, each when it has cleared its share of them. Those of a still later one add to them again.
struct DqCounts {
  u32 ended, read, cleared;
  OP DqCounts(const HopperBackwardParams& p) : ended(ceil_div(p.len_kv, TILE_KV)), read(ended + 4 * GROUPS), cleared(read + ended) {}
};
// Heads whose sums others had before. All that is waited for has started so much earlier that it is done by now. By one warp.
OP void wait_for_zeros(const HopperBackwardParams& p, const KeyBlock& block) {
  if (block.head < p.accum_heads_divmod.divisor) return;
  for (int i = 0; i < p.heads_per_block; ++i) wait_for_count(p.dq_progress + block.head - p.accum_heads_divmod.divisor + i, DqCounts(p).cleared);
}
OP void let_add(const HopperBackwardParams& p, const KeyBlock& block) {
  wait_for_zeros(p, block);                                   // without it sums are added to those of another head
  arrive_at<LANES>(block.cleared);                            // without it nobody adds
}
// An idle warp clears sums of earlier heads, each block its share.
OP void clear_sums(const HopperBackwardParams& p, const KeyBlock& block) {
  const u32 before = block.head - p.cleared_after;            // and the heads behind it
  if (block.head < p.cleared_after || before >= p.reused) return;
  const u32 count = ceil_div(p.len_q, TILE_Q) * DqAccum::size, blocks = ceil_div(p.len_kv, TILE_KV);
  const u32 share = ceil_div(ceil_div(count, 128), blocks) * 128;
  const u32 begin = block.here.tile * share, end = min_of(begin + share, count);
  for (int i = 0; i < p.heads_per_block; ++i) {
    float* const sums = p.dq_accum + i64((before + i) % p.accum_heads_divmod.divisor) * count;
    wait_for_count(p.dq_progress + before + i, DqCounts(p).read); // without it sums are cleared that have not been read
    clear(sums, begin, end);
    semaphore_release(p.dq_progress + before + i);
  }
}

// If order matters, blocks add to the sums of a query tile in turn, each behind the block of the keys before. Under a causal mask it is the
// other way round, and each block begins with the first queries that see its keys, of which it is the first: nobody waits then, but the
// longest tiles come last, and so the last heads keep the first order. In either order a block only waits for ones that started earlier.
// Two warps do the waiting, one for the turn, the other to pass it on.
OP u32 semaphore_value(const HopperBackwardParams& p, const KeyBlock& block) {
  const int row = block.now.tile * TILE_Q;
  const ColumnRange keys = visible_keys({p.band_left, p.band_right, p.len_kv}, row, min_of(TILE_Q, p.len_q - row));
  return block.backwards ? keys.last / TILE_KV - block.here.tile : block.here.tile - keys.first / TILE_KV;
}
OP void acquire_dq_order(const HopperBackwardParams& p, KeyBlock& block) {
  #pragma unroll 1
  for (int step = 0; p.dq_semaphore && step < block.steps; ++step, block.advance()) {
    semaphore_wait(p.dq_semaphore + block.tile_number(p), semaphore_value(p, block));
    if (step > 0) wait_for<LANES>(block.noticed, (step - 1) % 2); // without it all may have added again before the other warp has noticed that
                                                              // they had, which it then misses
    arrive_at<LANES>(block.acquired);                         // without it nobody adds
  }
}
OP void release_dq_order(const HopperBackwardParams& p, KeyBlock& block) {
  #pragma unroll 1
  for (int step = 0; p.dq_semaphore && step < block.steps; ++step, block.advance()) {
    wait_for<LANES>(block.added, step % 2);                   // without it others add before all warps of this block have
    arrive_at<LANES>(block.noticed);                          // without it there is no next turn
    semaphore_release(p.dq_semaphore + block.tile_number(p));
  }
}

// dQ_i += acc, of the query tile with this number: the part of the calling warp, in its turn.
template <int N> OP void add_queries(const HopperBackwardParams& p, const KeyBlock& block, u32 number, u32 step, const Acc<16, N>& acc, int row, int col) {
  if (p.dq_semaphore) wait_for<LANES>(block.acquired, step % 2); // without it sums are added out of order
  add(DqAccum{p.dq_accum + i64(number) * DqAccum::size}, acc, row, col);
  if (p.dq_semaphore) arrive_at<LANES>(block.added);          // without it the turn is never passed
}

// The same by TMA, which keeps nobody waiting: the four warps of a group leave their parts side by side in shared memory, and one
// of the first warpgroup has them added at once, to the part of the tile that begins at `offset`. Each group's parts have a turn of their own.
template <int N> OP void stage_queries(const KeyBlock& block, int group, u32 step, const Acc<16, N>& acc) {
  wait_for<LANES>(block.sent(group), step % 2 ^ 1);           // without it the part of the step before is overwritten before it has left
  store(block.dq_smem(group) + not_ahead(warp_id()) % 4 * (16 * N * int(sizeof(float))), acc);
  fence_proxy_async();                                        // without it TMA does not see what lanes have stored
  arrive_at<LANES>(block.staged(group));                      // without it dQ never leaves
}
OP void send_queries(const HopperBackwardParams& p, KeyBlock& block, int group, int offset) {
  wait_for_zeros(p, block);                                   // without it sums are added to those of another head
  write_by_copies();                                          // without it TMA may add before there are zeros
  #pragma unroll 1
  for (int step = 0; step < block.steps; ++step, block.advance()) {
    u32* const semaphore = p.dq_semaphore + block.tile_number(p) * GROUPS + group;
    wait_for<LANES>(block.staged(group), step % 2);           // without it parts leave that have not been written
    if (p.dq_semaphore) semaphore_wait(semaphore, semaphore_value(p, block));
    add_async(p.dq_accum + i64(block.accum_number(p)) * DqAccum::size + offset, block.dq_smem(group), DQ_BYTES / int(sizeof(float)));
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

// 16 rows of dk or dv leave: to the result through the warp's rows of a tile that nobody reads any more, or to the sums of several blocks.
OP void store_gradient(const HopperBackwardParams& p, const KeyBlock& block, const TensorMap& map, float* accum, const KeyTile& tile,
                       const Acc<16, WIDTH>& acc, int row) {
  const KeyBlockCoord& here = block.here;
  if (accum) {
    const u32 unit = (here.batch_number * p.heads + here.first_head) / p.heads_per_block;
    const i64 number = i64(unit) * ceil_div(p.len_kv, TILE_KV) + here.tile;
    store(DkvAccum{accum + number * DkvAccum::size}, acc, row, 0);
  } else {
    store(tile, acc, row);
    fence_proxy_async();                                      // without it rows leave that have not been written
    store_async(map, here.batch, here.head_kv, block.row0 + row, tile, row);
  }
}

// The last block of a head makes its sums dq. One warp finds out whether this is the last one, which takes a while, and tells the others.
OP void count_heads(const HopperBackwardParams& p, const KeyBlock& block) {
  if (!p.dq_progress) return;
  wait_for<LANES>(block.ended, 0);                            // without it the block is counted before all has been added
  const u32 blocks = block.head < p.last_heads ? ceil_div(p.len_kv, TILE_KV) : ~0u;       // of the last heads, no block finishes dq by itself
  count_block(p.dq_progress + block.head, p.heads_per_block, blocks, block.smem + LAST_OFFSET);
  sync_warp();                                                // without it others are told before all lanes know, and one has written
  arrive_at<LANES>(block.counted);                            // without it the others wait for ever
}
template <typename Accum = DqAccum> OP void postprocess_heads(const HopperBackwardParams& p, const KeyBlock& block) {
  if (!p.dq_progress) return;
  wait_for<LANES>(block.counted, 0);                          // without it warps read what has not been counted
  const u32 others = load_shared<u32>(block.smem + LAST_OFFSET);
  const OutTile out_smem{block.smem + Q_OFFSET};
  const int own_row = (warp_id() - 4) * 16;
  #pragma unroll 1
  for (int i = 0; i < p.heads_per_block; ++i) {
    if (others >> i & 1) continue;
    const i64 first = i64(block.head + i) * ceil_div(p.len_q, TILE_Q) - block.tiles_before;
    #pragma unroll 1
    for (int row = own_row; row < p.len_q; row += OutTile::rows) {
      Acc<16, WIDTH> sum_reg;
      load(sum_reg, Accum{p.dq_accum + (first + row / TILE_Q) * Accum::size}, row % TILE_Q, 0);
      scale(sum_reg, p.scale);
      wait_for_stores();                                      // without it rows are overwritten that have not left
      store(out_smem, sum_reg, own_row);
      fence_proxy_async();                                    // without it rows leave that have not been written
      store_async(p.dq_map, block.here.batch, block.here.first_head + i, row, out_smem, own_row);
    }
    if (block.head + i < p.reused) semaphore_release(p.dq_progress + block.head + i); // lanes have met since they read
  }
}

// The last heads of all are left to blocks that start when no keys are left, each warp 16 rows: by themselves, the last blocks of these heads
// would keep all others waiting. They wait for blocks that started earlier.
template <typename Accum = DqAccum> OP void postprocess_last_heads(const HopperBackwardParams& p) {
  constexpr int COLS = WIDTH % 128 ? 64 : 128;                // at a time
  const u32 later = block_id() - p.owners, blocks_of_head = ceil_div(p.len_q, 16 * WARPS), number = p.last_heads + later / blocks_of_head;
  const int row = (int(later % blocks_of_head) * WARPS + warp_id()) * 16;
  if (warp_id() == 0) semaphore_wait(p.dq_progress + number, ceil_div(p.len_kv, TILE_KV));
  sync_block();                                               // without it rows are finished to which blocks still add
  if (row >= p.len_q) return;
  int batch[BATCH_AXES];
  batch_element(batch, p.batch[BATCH_AXES - 1], number / p.heads);
  const GlobalTile dq = rows_of(p.dq, batch, int(number % p.heads), row, p.len_q, p.dim);
  const Accum sums{p.dq_accum + (i64(number % p.accum_heads_divmod.divisor) * ceil_div(p.len_q, TILE_Q) + row / TILE_Q) * Accum::size};
  #pragma unroll 1
  for (int col = 0; col < p.dim; col += COLS) {
    Acc<16, COLS> sum_reg;
    load(sum_reg, sums, row % TILE_Q, col);
    scale(sum_reg, p.scale);
    store<16>(dq, sum_reg, col);                              // rows of dq are multiples of that, or TMA could not store them
  }
}
