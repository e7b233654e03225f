// bwd_hopper_mla.cu -- the loop of bwd_hopper_wide.cu for keys that are wider than values, as in multi-head latent attention (MLA), 192 and 128
// columns (DeepSeek-V2, 2024). Values so narrow leave one warpgroup the registers for dV of 128 keys; two others have dK of 64 keys each. A block of
// twice the keys adds half as often to dQ, which is what bwd_hopper_wide.cu waits for.
//
//   bwd_hopper_mla_preprocess    as bwd_hopper_preprocess
//
//   bwd_hopper_mla   one block per key-value tile j, its first warpgroup is the producer; the three consumers, for each query tile i:
//
//     two for keys, each with 64 of them:                       one for values and queries:
//       S^T = K_j Q_i^T
//       P^T = 2^(S^T - lse_i)                 goes to shared memory
//       dP^T = V_j dO_i^T
//       dS^T = P^T o (dP^T - delta_i)         goes there too  -->  dV = dV + P^T dO_i       of all keys
//       dK = dK + dS^T Q_i                                         dQ^T = K_j^T dS^T        transposed, since queries are no multiple of 64
//                                                                  dQ_i = dQ_i + dQ         in device memory
//     dk_j = scale dK                                            dv_j = dV
//     the last block of a head:  dq = scale dQ                  see tile/dq_protocol.cuh
//
//   bwd_hopper_mla_postprocess   as bwd_hopper_postprocess
#include "config.cuh"
#include "params.cuh"
#include "tile/producer.cuh"
#include "tile/score.cuh"
#include "tile/softcap.cuh"

constexpr int KEY_GROUPS = 2, GROUP_KEYS = 64;                // warpgroups for keys, and the keys of each
static_assert(TILE_KV == KEY_GROUPS * GROUP_KEYS && GROUPS == KEY_GROUPS + 1 && DQ_GROUPS == 1, "two warpgroups for dK, and one for dV");
static_assert(WIDTH % 64 == 0 && !TMA_REDUCE_DQ && !TILE_LIST && !STORE_DBIAS && !STATS_AHEAD, "the loop has no code for these");
static_assert(!MODIFIED && !EXPLICIT_SCORES && !DROPOUT, "no registers are left");

// What consumers may have of the registers: dV of all keys is more than dK of half of them.
constexpr int KEYS_REGISTERS = 152, VALUES_REGISTERS = 184;
static_assert(128 * (PRODUCER_REGISTERS + KEY_GROUPS * KEYS_REGISTERS + VALUES_REGISTERS) <= 65536);

using Sums = TransposedAccumTile<TILE_Q, WIDTH>;              // dQ in device memory, as it is read,
using SumsTransposed = AccumTile<WIDTH, TILE_Q>;              // and as it is added to
using Passed = PassedTile<16, TILE_Q>;                        // P of 16 keys, on its way from a warp to the one that has the same of these

constexpr int P_OFFSET = ceil_div(BLOCK_BYTES, 16) * 16, P_BYTES = 16 * TILE_Q * int(sizeof(Element));
constexpr int SHARED_BYTES = P_OFFSET + 2 * TILE_KV / 16 * P_BYTES;

// Of P and dS of a step and a warpgroup for keys, which it has written; and which nobody reads any more. There are two each, as there are of P and dS.
enum NamedBarrier { WRITTEN = 1, FREED = WRITTEN + 2 * KEY_GROUPS };
static_assert(FREED + 2 * KEY_GROUPS <= NAMED_BARRIERS);
OP int written(u32 step, int group) { return WRITTEN + int(step % 2) * KEY_GROUPS + group; }
OP int freed(u32 step, int group) { return FREED + int(step % 2) * KEY_GROUPS + group; }
OP Passed p_smem(const KeyBlock& block, u32 step, int row) { return {block.smem + P_OFFSET + (int(step % 2) * (TILE_KV / 16) + row / 16) * P_BYTES}; }

// By the warpgroup for values and queries: P and dS of a step may be overwritten.
OP void free_places(u32 step) {
  #pragma unroll
  for (int group = 0; group < KEY_GROUPS; ++group)
    arrive_two_groups(freed(step, group));                    // without it the other warpgroup waits for ever
}

// Whether a mask hides any of the pairs of 16 keys with the query tile at hand. Asked anew in each step: kept, the range would take registers.
OP bool cut(const KeyBlock& block, int row) { return !unmasked_queries(block.mask, not_ahead(block.row0 + row), 16).contains(block.now.tile * TILE_Q, TILE_Q); }

// Calls step(number) for each query tile, which is handed back then.
template <typename Step> OP void for_query_tiles(const HopperBackwardParams& p, KeyBlock& block, Step step) {
  if (block.steps > 0) {
    consumer_wait(block.keys);                                // without it the products read keys that have not arrived
    consumer_wait(block.values);                              // the same for values
  }
  #pragma unroll 1
  for (int i = 0; i < block.steps; ++i) {
    step(u32(i));
    consumer_release(block.queries);                          // without it the producer waits for ever
    block.douts.advance();
    block.go_on(p);
  }
  arrive_at(block.ended);                                     // without it the block is never counted
  load_place(block);
}

OP void compute_dk(const HopperBackwardParams& p, KeyBlock& block, int group) {
  const int own_row = group * GROUP_KEYS + warp_id() % 4 * 16;
  Acc<16, DIM> dk_reg;
  fill(dk_reg, 0.f);

  for_query_tiles(p, block, [&](u32 step) {
    const KeyTile k_smem{uniform(block.keys.tile().base)};
    const ValueTile v_smem{uniform(block.values.tile().base)};
    const QueryTile q_smem{uniform(block.queries.tile().base)};
    const DoutTile do_smem{uniform(block.douts.tile().base)};
    const int row0 = not_ahead(block.row0 + own_row), col0 = block.now.tile * TILE_Q;
    const bool masked = cut(block, own_row);
    Acc<16, TILE_Q> s_reg, dp_reg;
    OperandA<16> p_reg[TILE_Q / 16], ds_reg[TILE_Q / 16];
    consumer_wait(block.queries);                             // without it the product reads queries that have not arrived
    start_product_transposed(s_reg, k_smem, group * GROUP_KEYS, q_smem);
    wait_for_products<0>(s_reg);                              // without it scores are read that do not exist yet
    if (masked) apply_mask(s_reg, block.mask, row0, col0, -infinity());
    probabilities(s_reg, p_reg, p_reg, block.lse_smem(), exponent_scale(p.scale), p.per_softcap, RowVec<16>{}, 1.f, KeptHalves<TILE_Q / 16>{});
    consumer_wait(block.douts);                               // without it the product reads gradients that have not arrived
    start_product_transposed(dp_reg, v_smem, group * GROUP_KEYS, do_smem);
    if (step >= 2) sync_two_groups(freed(step, group));       // without it P and dS are overwritten that are still multiplied
    pass(p_smem(block, step, own_row), p_reg);
    wait_for_products<0>(dp_reg);                             // without it dP is read that does not exist yet
    if (masked) apply_mask(dp_reg, block.mask, row0, col0, 0.f);          // 0 times whatever dP was may be NaN
    score_gradients<true>(ds_reg, p_reg, dp_reg, block.delta_smem());
    store_transposed(block.ds_smem(step), ds_reg, own_row);
    fence_proxy_async();                                      // without it products do not see what lanes have stored
    arrive_two_groups(written(step, group));                  // without it the other warpgroup waits for ever
    start_product(dk_reg, ds_reg, q_smem);
    wait_for_products<0>(dk_reg);                             // without it the producer overwrites what the product reads
  });
  #pragma unroll 1
  for (int step = max_of(block.steps - 2, 0); step < block.steps; ++step)
    sync_two_groups(freed(step, group));                      // without it dK overwrites keys that are still multiplied
  scale(dk_reg, p.scale);
  store_gradient(p, block, p.dk_map, false, p.dk_accum, block.keys.tile(), dk_reg, own_row);
}

OP void compute_dv(const HopperBackwardParams& p, KeyBlock& block) {
  const int own_row = warp_id() % 4 * 16;                     // of the keys of each other warpgroup, and of 64 columns of dQ
  Acc<16, DIM_V> dv_reg[KEY_GROUPS];
  #pragma unroll
  for (int group = 0; group < KEY_GROUPS; ++group) fill(dv_reg[group], 0.f);
  if (ZEROS_AHEAD && block.steps > 0) wait_for<LANES>(block.cleared, 0);       // without it sums are added to what was there before

  for_query_tiles(p, block, [&](u32 step) {
    const DoutTile do_smem{uniform(block.douts.tile().base)};
    const PanelTile<TILE_KV, WIDTH> k_smem{uniform(block.keys.tile().base)};
    const SumsTransposed sums{p.dq_accum + i64(block.tile_number(p)) * SumsTransposed::size};
    #pragma unroll
    for (int group = 0; group < KEY_GROUPS; ++group) {
      OperandA<16> p_reg[TILE_Q / 16];
      sync_two_groups(written(step, group));                  // without it P and dS are read that have not been written. dO has arrived by then
      receive(p_reg, p_smem(block, step, group * GROUP_KEYS + own_row));
      start_product(dv_reg[group], p_reg, do_smem);
      wait_for_products<0>(dv_reg[group]);                    // without it the producer overwrites what the product reads
    }
    in_turn(p, block, step, [&] {
      #pragma unroll
      for (int col = 0; col < WIDTH; col += 64) {
        Acc<16, TILE_Q> dq_reg;
        start_transposed_product(dq_reg, k_smem, col, block.ds_smem(step));
        wait_for_products<0>(dq_reg);                         // without it sums are added that do not exist yet
        if (col + 64 == WIDTH) free_places(step);             // not behind the last addition, for which the others would wait
        add_or_store(block, sums, dq_reg, col + own_row, 0);
      }
    });
  });
  #pragma unroll
  for (int group = 0; group < KEY_GROUPS; ++group)            // when dS of the last step has been written, nobody reads values any more
    store_gradient(p, block, p.dv_map, true, p.dv_accum, block.values.tile(), dv_reg[group], group * GROUP_KEYS + own_row);
}

KERNEL(THREADS, 1) bwd_hopper_mla_preprocess(GRID_CONSTANT HopperBackwardParams p) {
  const u32 before = place_blocks(p);
  if (block_id() < before) return find_places(p);
  if constexpr (ZEROS_AHEAD) clear_progress(p);
  preprocess(p, 1.f, 1, ZEROS_AHEAD ? p.heads_ahead : ~0u, ~0u, block_id() - before);
}

KERNEL(THREADS, 1) bwd_hopper_mla(GRID_CONSTANT HopperBackwardParams p) {
  if (block_id() >= p.owners) return postprocess_last_heads<Sums>(p);
  KeyBlock block(p);
  block.tiles_before = 0;                                     // no sums are used again
  if ((VARLEN && block.here.tile < 0) || leaves_zeros(p, block)) return;
  if (warp_id() == 0) start_barriers(block);
  sync_block();                                               // without it a warp arrives at a barrier that does not count yet
  if (warp_id() < 4) {
    warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    return produce(p, block);
  }
  if (warp_id() < 12) {
    warpgroup_reg_alloc<KEYS_REGISTERS>();
    compute_dk(p, block, warp_id() / 4 - 1);
  } else {
    warpgroup_reg_alloc<VALUES_REGISTERS>();
    compute_dv(p, block);
  }
  postprocess_heads<Sums>(p, block);
  wait_for_stores();                                          // without it the block, and its shared memory, may end before
}

KERNEL(THREADS, 1) bwd_hopper_mla_postprocess(GRID_CONSTANT HopperBackwardParams p) { postprocess<Sums>(p); }

KERNEL(THREADS, 1) bwd_hopper_mla_sinks(GRID_CONSTANT HopperBackwardParams p) {
  if constexpr (SINKS != NO_SINKS) gradient_of_sink(p, 1.f);
}
