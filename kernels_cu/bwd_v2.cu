// bwd_v2.cu -- FlashAttention-2, backward with recomputation (Dao, 2023, Algorithm 2): outer loop over key-value tiles, inner loop
// over query tiles. Three kernels, launched one after the other:
//
//   bwd_v2_preprocess    for each query row:  delta = rowsum(dout o out) - dlse,  dq = 0
//
//   bwd_v2        one block per key-value tile j;  S^T and P^T are never stored, but computed again from q, k and lse:
//     dK = 0,  dV = 0
//     for each query head that shares the keys, and each query tile i that sees one of them (TILE_LIST: those of a list), the last first:
//       S^T = K_j Q_i^T                         by the first half of the warps        dP^T = V_j dO_i^T           by the second half
//       P^T = 2^(S^T - lse_i)                   -- passed to the second half -->      dS^T = P^T o (dP^T - delta_i)
//       dV += P^T dO_i                          in registers                          dK += dS^T Q_i              in registers
//       dQ_i += dS K_j                          by all warps, added up in device memory, where all blocks of the head meet
//     dv_j = dV,  dk_j = scale dK
//
//   bwd_v2_postprocess   for each query tile:  dq_i = scale dQ_i;  also sums gradients of inputs that were broadcast
//
// Two warps, one of each half, share TILE_KV / PAIRS keys. Each keeps one gradient: both would not leave room for anything else.
#include "config.cuh"
#include "params.cuh"
#include "tile/mask.cuh"
#include "tile/mma.cuh"
#include "tile/passes.cuh"
#include "tile/score.cuh"
#include "tile/sequence.cuh"
#include "tile/softcap.cuh"
#include "tile/tile_list.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int PAIRS = WARPS / 2;
constexpr int PAIR_KEYS = TILE_KV / PAIRS;

using QueryTile = SharedTile<TILE_Q, WIDTH>;                  // of q or dout
using KeyTile = SharedTile<TILE_KV, WIDTH>;                   // of k or v
using PairTile = SharedTile<PAIR_KEYS, WIDTH>;                // rows of one pair of warps in either
using GradientTile = BlockedTile<TILE_KV, TILE_Q>;            // dS^T
using PairGradientTile = BlockedTile<PAIR_KEYS, TILE_Q>;
using Passed = PassedTile<PAIR_KEYS, TILE_Q>;                 // P^T, where the pair's part of dS^T will be

static_assert(WIDTH_V == WIDTH, "one shape of tile for keys and values");

// Shared memory: K, V, P^T and then dS^T, then for each stage Q, dO, and lse and delta of their rows.
constexpr int STATS_BYTES = 2 * TILE_Q * int(sizeof(float));
constexpr int V_OFFSET = KeyTile::bytes;
constexpr int DS_OFFSET = V_OFFSET + KeyTile::bytes;
constexpr int STAGE_OFFSET = DS_OFFSET + GradientTile::bytes;
constexpr int STAGE_BYTES = 2 * QueryTile::bytes + STATS_BYTES;
constexpr int SHARED_BYTES = STAGE_OFFSET + STAGES * STAGE_BYTES;

// dQ = dS K is dealt out to the warps in parts of DQ_ROWS x DQ_COLS: of 32 rows if that leaves whole steps of 16 columns.
constexpr bool DQ_BY_32 = TILE_Q % 32 == 0 && WARPS % (TILE_Q / 32) == 0 && WIDTH % (16 * (WARPS / (TILE_Q / 32))) == 0;
constexpr int DQ_ROWS = DQ_BY_32 ? 32 : 16;
constexpr int DQ_ACROSS = WARPS / (TILE_Q / DQ_ROWS);
constexpr int DQ_COLS = WIDTH / DQ_ACROSS;
static_assert(DQ_ACROSS * (TILE_Q / DQ_ROWS) == WARPS && DQ_COLS % 16 == 0, "every warp has a part of dQ, of whole 16-column steps");

// Of P, from one warp of a pair to the other: one for each pair.
enum NamedBarrier { PASSED = 1 };
static_assert(PASSED + PAIRS <= NAMED_BARRIERS);

KERNEL(THREADS, 1) bwd_v2_preprocess(GRID_CONSTANT BackwardParams p) { preprocess(p, 1.f); }

KERNEL(THREADS, MIN_BLOCKS) bwd_v2(GRID_CONSTANT BackwardParams p) {
  const KeyBlockCoord here = key_block_coord(p);
  if (VARLEN && here.tile < 0) return;
  const auto seq = sequence_of(p, here.batch_number);
  const int row0 = here.tile * TILE_KV;
  const int warp = warp_id(), pair = warp % PAIRS;
  const bool for_values = warp < PAIRS;                       // this warp sums up dV; otherwise dK
  const int pair_row = pair * PAIR_KEYS;

  const SharedAddress smem = shared_memory();
  const KeyTile k_smem{smem}, v_smem{smem + V_OFFSET};
  const GradientTile ds_smem{smem + DS_OFFSET};
  const PairTile own_smem{(for_values ? k_smem : v_smem).base + pair_row * KeyTile::row_bytes};
  const PairGradientTile pair_ds_smem{ds_smem.base + ds_smem.offset(pair_row, 0)};
  const Passed p_smem{pair_ds_smem.base};
  const auto q_smem = [=](int stage) { return QueryTile{smem + STAGE_OFFSET + stage * STAGE_BYTES}; };
  const auto do_smem = [=](int stage) { return QueryTile{q_smem(stage).base + QueryTile::bytes}; };
  const auto stats_smem = [=](int stage) { return do_smem(stage).base + QueryTile::bytes; };

  const TransposedMask mask = transposed(seq.mask(), seq.q.len(), seq.kv.len());
  const ColumnRange queries = visible_queries(mask, row0, TILE_KV);
  const ColumnRange common_queries = unmasked_queries(mask, row0 + pair_row, PAIR_KEYS);
  const int first_tile = queries.first / TILE_Q, last_tile = queries.last / TILE_Q;
  int steps = queries.last < queries.first ? 0 : (last_tile + 1 - first_tile) * p.heads_per_block;

  if (VARLEN && row0 >= seq.kv.len()) steps = 0;
  QueryCursor now{here.first_head, last_tile};
  const auto list_of = [&](int head) { return list_of_keys(p, here.batch_number, head, here.tile); };
  const auto advance = [&](QueryCursor& cursor) {
    cursor.advance(last_tile, first_tile);
    ListWords listed;                                         // not kept: several cursors are on their way
    if constexpr (TILE_LIST) find_listed(cursor, last_tile, first_tile, here.first_head + p.heads_per_block, listed, list_of);
  };
  if constexpr (TILE_LIST) {
    if (steps > 0) {
      steps = count_listed(here.first_head, p.heads_per_block, first_tile, last_tile + 1, list_of);
      ListWords listed;
      find_listed(now, last_tile, first_tile, here.first_head + p.heads_per_block, listed, list_of);
    }
  }
  const auto load_step = [&](int step, int ahead) {           // the query tile `ahead` of now, which is that of `step`, to its stage
    if (step < steps) {
      QueryCursor coming = now;
      #pragma unroll
      for (int i = 0; i < ahead; ++i) advance(coming);
      const int stage = step % STAGES;
      load_async<Block>(q_smem(stage), slice(p.q, here.batch, coming.head, seq.q.first() + coming.tile * TILE_Q, seq.q.end(), p.dim));
      load_async<Block>(do_smem(stage), slice(p.dout, here.batch, coming.head, seq.q.first() + coming.tile * TILE_Q, seq.q.end(), p.dim_v));
      const u32 number = query_tile_number(p, seq.q, coming.head, coming.tile);
      load_async(stats_smem(stage), p.stats + i64(number) * 2 * TILE_Q, 2 * TILE_Q);
    }
    commit_copies();                                          // also when empty: the wait below counts groups
  };
  if (steps > 0) {
    load_async<Block>(k_smem, slice(p.k, here.batch, here.head_kv, seq.kv.first() + row0, seq.kv.end(), p.dim));
    load_async<Block>(v_smem, slice(p.v, here.batch, here.head_kv, seq.kv.first() + row0, seq.kv.end(), p.dim_v));
  }
  for (int step = 0; step < STAGES - 1; ++step) load_step(step, step);

  Acc<PAIR_KEYS, WIDTH> sum_reg;                              // dV or dK
  fill(sum_reg, 0.f);
  Dropping dropout{};
  if constexpr (DROPOUT) dropout = seeded(p.scores);
  u32 number = 0;                                             // of the query tile

  #pragma unroll 1
  for (int step = 0; step < steps; ++step, advance(now)) {
    wait_for_copies<max_of(STAGES - 2, 0)>();                 // without it this tile is read before this thread's part has arrived
    sync_block();                                             // without it other threads' parts are missing, the load below overwrites
                                                              // a tile, and P below the dS, that a slower warp still reads
    if (p.dq_semaphore && step > 0 && warp == 0) semaphore_release(p.dq_semaphore + number); // all warps have added the dQ of the step before
    load_step(step + STAGES - 1, STAGES - 1);
    if (STAGES == 1) {
      wait_for_copies<0>();                                   // with one stage nothing arrives ahead: without these two lines the
      sync_block();                                           // tile just asked for is read before it is there
    }

    const int stage = step % STAGES, col0 = now.tile * TILE_Q;
    const bool masked = !common_queries.contains(col0, TILE_Q);
    // Both halves of the warps run one text of the products, on registers that have a name of their own where the halves part.
    Acc<PAIR_KEYS, TILE_Q> product_reg;
    OperandA<PAIR_KEYS> operand_reg[TILE_Q / STEP_K];
    ColVec<TILE_Q> stat_reg;
    multiply_transposed(product_reg, RowsInShared<PAIR_KEYS, WIDTH>(own_smem), for_values ? q_smem(stage) : do_smem(stage));
    load(stat_reg, stats_smem(stage) + (for_values ? 0 : TILE_Q * 4));
    if (EXPLICIT_SCORES && for_values) scale_scores(product_reg, p);
    const bool ask_pairs = !TILE_LIST || !list_of(now.head).is_whole(now.tile);
    if constexpr (MODIFIED && SCORES != EXPRESSION) {
      if (for_values) modify_scores<true>(product_reg, score_context(p, here, now.head, seq.q.len(), seq.kv.len()), row0 + pair_row, col0, ask_pairs);
    }
    if (masked && !(SCORES == EXPRESSION && for_values))
      apply_mask(product_reg, mask, row0 + pair_row, col0, for_values ? -infinity() : 0.f);    // 0 (0 - delta) is 0, whatever dP was
    KeptPairs<true, PAIR_KEYS, TILE_Q> kept;
    const u32 head_of_all = here.batch_number * p.heads + now.head;
    if (for_values) {
      auto &s_reg = product_reg, &p_reg = product_reg;        // S^T becomes P^T
      const auto& lse_reg = stat_reg;
      if constexpr (SCORES == EXPRESSION)
        probabilities(s_reg, lse_reg, score_context(p, here, now.head, seq.q.len(), seq.kv.len()), mask, masked, row0 + pair_row, col0, p.softcap, p_smem, ask_pairs);
      else probabilities(s_reg, lse_reg, EXPLICIT_SCORES ? 1.f : p.scale * LOG2E, p.per_softcap, p_smem);
      if constexpr (DROPOUT) draw(kept, dropout, head_of_all, row0 + pair_row, col0), drop(p_reg, kept);
      to_operands(operand_reg, p_reg);
      arrive_pair(PASSED + pair);                             // without it the other warp waits for P forever
    } else {
      auto &dp_reg = product_reg, &ds_reg = product_reg;      // dP^T becomes dS^T
      const auto& delta_reg = stat_reg;
      if constexpr (DROPOUT) draw(kept, dropout, head_of_all, row0 + pair_row, col0), drop(dp_reg, kept), scale(dp_reg, dropout.scale);
      sync_pair(PASSED + pair);                               // without it P is read before the other warp has written it
      score_gradients(dp_reg, delta_reg, p_smem);
      store(pair_ds_smem, ds_reg);                            // over P, which only this warp reads
      to_operands(operand_reg, ds_reg);
    }
    multiply_add(sum_reg, operand_reg, for_values ? do_smem(stage) : q_smem(stage));

    number = query_tile_number(p, seq.q, now.head, now.tile);
    if (p.dq_semaphore && warp == 0) {
      const int first_visible = visible_keys(Mask{seq.mask(), seq.kv.len()}, col0, 1).first;
      semaphore_wait(p.dq_semaphore + number, TILE_LIST ? count_column(p, here.batch_number, now.head, now.tile, 0, here.tile)
                                                        : here.tile - first_visible / TILE_KV);
    }
    sync_block();                                             // without it dS is read before its warps have written it, and dQ is
                                                              // added before the blocks that come first have added
    Acc<DQ_ROWS, DQ_COLS> dq_reg;
    const int dq_row = warp / DQ_ACROSS * DQ_ROWS, dq_col = warp % DQ_ACROSS * DQ_COLS;
    multiply_a_transposed(dq_reg, ds_smem, dq_row, k_smem, dq_col);
    add(DqAccum{p.dq_accum + i64(number) * DqAccum::size}, dq_reg, dq_row, dq_col);
  }

  sync_block();                                               // without it gradients overwrite K and V that a slower warp still reads
  if (p.dq_semaphore && steps > 0 && warp == 0) semaphore_release(p.dq_semaphore + number);
  if (!for_values) scale(sum_reg, p.scale);
  if constexpr (DROPOUT) if (for_values) scale(sum_reg, dropout.scale);
  // Computed again, instead of keeping it in registers that the loop needs.
  const KeyBlockCoord coord = key_block_coord(p);
  const auto keys = rows_of_sequence<KEYS>(p, coord.batch_number);
  float* const accum = for_values ? p.dv_accum : p.dk_accum;
  if (accum) {
    const u32 unit = (keys.batch_number() * p.heads + coord.first_head) / p.heads_per_block;
    const i64 tile_number = i64(unit) * tiles_of<KEYS>(p) + keys.first_tile() + coord.tile;
    store(DkAccum{accum + tile_number * DkAccum::size}, sum_reg, pair_row, 0);
    return;
  }
  const PairTile result_smem{(for_values ? v_smem : k_smem).base + pair_row * KeyTile::row_bytes};
  if constexpr (!FLOAT32_RESULTS) {
    store(result_smem, sum_reg);
    sync_warp();                                              // without it a lane sends rows that its neighbours have not written
  }
  const Tensor& gradient = for_values ? p.dv : p.dk;
  const int first_row = coord.tile * TILE_KV + pair_row;
  store_result<Warp>(slice<Result>(gradient, coord.batch, coord.head_kv, keys.first() + first_row, keys.end_of_room(), for_values ? p.dim_v : p.dim), result_smem, sum_reg);
}

KERNEL(THREADS, 1) bwd_v2_postprocess(GRID_CONSTANT BackwardParams p) { postprocess(p); }

KERNEL(THREADS, 1) bwd_v2_sinks(GRID_CONSTANT BackwardParams p) {
  if constexpr (SINKS != NO_SINKS) gradient_of_sink(p, 1.f);
}
