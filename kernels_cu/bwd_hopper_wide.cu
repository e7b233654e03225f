// bwd_hopper_wide.cu -- the loop of bwd_hopper.cu for head dims whose two gradients do not fit the registers of one warpgroup: one sums up
// dV, the other dK, both of the same 64 keys.
//
//   bwd_hopper_wide_preprocess    as bwd_hopper_preprocess
//
//   bwd_hopper_wide   one block per key-value tile j, its first warpgroup is the producer; the two consumers, for each query tile i:
//
//     for values:                                          for keys:
//       S^T = K_j Q_i^T                                      dP^T = V_j dO_i^T
//       P^T = 2^(S^T - lse_i)          -- passed on -->      dS^T = P^T o (dP^T - delta_i)   goes to shared memory
//                                                            (STORE_DBIAS: from there to device memory, as in bwd_hopper)
//       start dV = dV + P^T dO_i                             start dK = dK + dS^T Q_i
//       dQ = dS_{i-1} K_j, the left columns                  dQ = dS_{i-1} K_j, the right ones
//       dQ_{i-1} = dQ_{i-1} + dQ                             the same, in device memory
//     dv_j = dV                                            dk_j = scale dK              SCALE_SUMS: as in bwd_hopper
//     the last block of a head:  dq = scale dQ             see tile/dq_protocol.cuh
//
//   bwd_hopper_wide_postprocess   as bwd_hopper_postprocess
#include "config.cuh"
#include "params.cuh"
#include "tile/key_terms.cuh"
#include "tile/producer.cuh"
#include "tile/score.cuh"
#include "tile/softcap.cuh"

static_assert(TILE_KV == 64 && TILE_Q == 64 && GROUPS == 2, "a warpgroup for each gradient of 64 keys");
static_assert(WIDTH_V == WIDTH, "one shape of tile for keys and values");
static_assert(!TMA_REDUCE_DQ, "shared memory has no room for dQ");

// dQ = dS K is dealt out by its columns, in whole panels.
constexpr int VALUES_COLS = WIDTH / 128 * 64, KEYS_COLS = DIM - VALUES_COLS;

// Whether there are registers for what the pairs of a head have in common, which otherwise is asked again for each query tile.
constexpr bool KEEPS_TERMS = SCORES == SCALED || (SCORES == PLUS_LINEAR && !DROPOUT);

// P of two steps, on its way from a warp to the one that has the same keys.
using Passed = PassedTile<16, TILE_Q>;
constexpr int P_OFFSET = ceil_div(BLOCK_BYTES, 16) * 16, P_BYTES = 16 * TILE_Q * int(sizeof(Element));
constexpr int SHARED_BYTES = P_OFFSET + 2 * 4 * P_BYTES;

// Of all consumer warps; of P of a step, from a warp to the one that has the same keys. Of the latter each pair of warps has two: the warp that
// computes P may be a step ahead.
enum NamedBarrier { CONSUMERS = 1, PASSED = 2 };
static_assert(PASSED + 2 * 4 <= NAMED_BARRIERS);

KERNEL(THREADS, 1) bwd_hopper_wide_preprocess(GRID_CONSTANT HopperBackwardParams p) {
  const u32 before = place_blocks(p);
  if (block_id() < before) return find_places(p);
  if constexpr (ZEROS_AHEAD) clear_progress(p);
  preprocess(p, 1.f, 1, ZEROS_AHEAD ? p.heads_ahead : ~0u, ~0u, block_id() - before);
}

// dQ of the tile before: N columns of it.
template <int N> OP void multiply_queries(const KeyBlock& block, Acc<16, N>& dq_reg, int col) {
  const u32 before = block.queries.count - 1;
  wait_for(block.written, before % 2);                        // without it dS is read that has not been written
  start_product(dq_reg, block.ds_smem(before), 0, block.keys.tile(), col);
  wait_for_products<0>(dq_reg);                               // without it sums are added that do not exist yet
}
// What is left of the tile before, if there was one, and the tile at hand handed back. sum_reg is still being summed up.
template <int N>
OP void end_step(const HopperBackwardParams& p, KeyBlock& block, Acc<16, DIM>& sum_reg, const bool follows, int own_row, int col) {
  Acc<16, N> dq_reg;
  if (follows) multiply_queries(block, dq_reg, col);
  wait_for_products<0>(sum_reg);                              // without it the producer overwrites what the product reads
  arrive_at(block.written);                                   // without it the other warpgroup waits for ever. Not earlier: of dS there are two,
                                                              // and the other one has been multiplied by now
  consumer_release(block.queries);                            // without it the producer waits for ever
  block.douts.advance();
  if (follows) add_queries(p, block, block.number_before(p), block.queries.count - 2, dq_reg, own_row, col);
  block.go_on(p);
}
template <int N> OP void end_steps(const HopperBackwardParams& p, const KeyBlock& block, int own_row, int col) {
  Acc<16, N> dq_reg;
  multiply_queries(block, dq_reg, col);
  add_queries(p, block, block.number_before(p), block.queries.count - 1, dq_reg, own_row, col);
}

KERNEL(THREADS, 1) bwd_hopper_wide(GRID_CONSTANT HopperBackwardParams p) {
  if (block_id() >= p.owners) return postprocess_last_heads(p);
  KeyBlock block(p);
  if ((VARLEN && block.here.tile < 0) || leaves_zeros(p, block)) return;
  if (warp_id() == 0) start_barriers(block);
  sync_block();                                               // without it a warp arrives at a barrier that does not count yet
  if (warp_id() < 4) {
    warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    return produce(p, block);
  }

  warpgroup_reg_alloc<CONSUMER_REGISTERS>();
  const KeyTile k_smem = block.keys.tile(), v_smem = block.values.tile();
  const bool for_values = warp_id() < 8;
  const int pair = warp_id() % 4, own_row = pair * 16;
  const auto cut = [&](int col0) {                            // asked anew in each step: kept, the range would take registers
    return !PAIR_BITS && !unmasked_queries(block.mask, not_ahead(block.row0 + own_row), 16).contains(col0, TILE_Q);
  };
  const auto context = [&](int head) { return score_context(p, block.here, head, block.seq(p).q.len(), block.seq(p).kv.len()); };
  const auto passed = [&](u32 step) { return PASSED + int(step % 2) * 4 + pair; };
  const auto p_smem = [&](u32 step) { return Passed{block.smem + P_OFFSET + (step % 2 * 4 + pair) * P_BYTES}; };

  Dropping dropout{};
  if constexpr (DROPOUT) dropout = seeded(p.scores);
  const auto terms_of = [&](int head) { return head_terms(p, block.here, head, block.seq(p).q.len(), block.seq(p).kv.len()); };
  int head_of = block.here.first_head;                        // KEEPS_TERMS: whose scores have these
  HeadTerms of_head{};
  if constexpr (KEEPS_TERMS) of_head = terms_of(head_of);
  Acc<16, DIM> sum_reg;                                       // dV or dK
  fill(sum_reg, 0.f);

  const auto step_for_values = [&](const bool follows) {
    const QueryTile q_smem{uniform(block.queries.tile().base)}, do_smem{uniform(block.douts.tile().base)};
    const int row0 = block.row0 + own_row;
    int col0 = block.now.tile * TILE_Q;                       // TILE_LIST: not yet
    Acc<16, TILE_Q> s_reg;
    OperandA<16> p_reg[TILE_Q / 16], factor_reg[TILE_Q / 16];
    KeptHalves<TILE_Q / 16> kept;
    consumer_wait(block.queries);                             // without it the product reads queries that have not arrived
    if constexpr (TILE_LIST) block.hear_tile(), col0 = block.now.tile * TILE_Q;
    start_product_transposed(s_reg, k_smem, 0, q_smem);
    if constexpr (DROPOUT && SCORES != EXPRESSION) draw(kept, dropout, block.here.batch_number * p.heads + block.now.head, row0, col0);
    PairArrays<16, TILE_Q> arrays;
    if constexpr (ASKED_AHEAD && (SCORES != EXPRESSION || PAIR_BITS)) load<true>(arrays, context(block.now.head), block.queries.tile(), own_row, row0, col0, !block.is_whole);
    wait_for_products<0>(s_reg);                              // without it scores are read that do not exist yet
    if (EXPLICIT_SCORES) scale_scores(s_reg, p);
    float scale_log2 = exponent_scale(p.scale), masked = -infinity(), slope = 1.f;
    const int head = block.now.head;
    const bool ask_pairs = !TILE_LIST || !block.is_whole;
    RowVec<16> terms;
    if constexpr (MODIFIED && SCORES != EXPRESSION) {
      if (KEEPS_TERMS && !SCALE_SUMS && head != head_of) of_head = terms_of(head_of = head);
      const ScoreContext x = KEEPS_TERMS ? score_context(p, block.here, head, of_head, block.seq(p).q.len(), block.seq(p).kv.len()) : context(head);
      if (TERMS_OF_KEYS) terms_of_keys(terms, x, not_ahead(row0)), add_to_rows(s_reg, terms);
      if constexpr (!ASKED_AHEAD) load<true>(arrays, x, block.queries.tile(), own_row, row0, col0, ask_pairs);
      modify_scores<true>(s_reg, arrays, x, row0, col0, ask_pairs);
      const Bend bend = BENDS ? bend_of_tile(p, block) : BEFORE;
      if (BENDS && bend == ACROSS) bend_scores<true>(s_reg, x, row0, col0);
      if (SCORES == PLUS_LINEAR) terms_of_rows<true>(terms, s_reg, x, not_ahead(row0), col0, bend);
      if (SCORES == SCALED) scale_log2 = scale_of_head(scale_log2, x), masked = masked_score(x), slope = SCALE_SUMS ? 1.f : x.factor;
    }
    if (SCORES != EXPRESSION && cut(col0)) apply_mask(s_reg, block.mask, row0, col0, masked);
    if constexpr (SCORES == EXPRESSION) {
      const ScoreContext x = context(head);
      if constexpr (PAIR_BITS && !ASKED_AHEAD) load<true>(arrays, x, row0, col0, ask_pairs);
      probabilities(s_reg, factor_reg, block.lse_smem(), x, block.mask, cut(col0), row0, col0, scale_log2, p.softcap, terms, arrays.taking_part, ask_pairs);
      if constexpr (DROPOUT) draw(kept, dropout, block.here.batch_number * p.heads + head, row0, col0), drop(s_reg, kept);
      to_operands(p_reg, s_reg);
      pass(p_smem(block.queries.count), factor_reg);
    } else {
      probabilities(s_reg, p_reg, factor_reg, block.lse_smem(), scale_log2, p.per_softcap, terms, slope, kept);
      pass(p_smem(block.queries.count), FACTOR_APART ? factor_reg : p_reg);
    }
    arrive_pair(passed(block.queries.count));                 // without it the other warp waits for P for ever
    consumer_wait(block.douts);                               // without it the product reads gradients that have not arrived
    start_product(sum_reg, p_reg, do_smem);
    end_step<VALUES_COLS>(p, block, sum_reg, follows, own_row, 0);
  };
  const auto step_for_keys = [&](const bool follows) {
    const QueryTile q_smem{uniform(block.queries.tile().base)}, do_smem{uniform(block.douts.tile().base)};
    const int row0 = block.row0 + own_row;
    int col0 = block.now.tile * TILE_Q;                       // TILE_LIST: not yet
    Acc<16, TILE_Q> dp_reg;
    OperandA<16> factor_reg[TILE_Q / 16], ds_reg[TILE_Q / 16];
    KeptHalves<TILE_Q / 16> kept;
    consumer_wait(block.douts);                               // without it the product reads gradients that have not arrived
    if constexpr (TILE_LIST) block.hear_tile(), col0 = block.now.tile * TILE_Q;
    start_product_transposed(dp_reg, v_smem, 0, do_smem);
    if constexpr (DROPOUT) draw(kept, dropout, block.here.batch_number * p.heads + block.now.head, row0, col0);
    wait_for_products<0>(dp_reg);                             // without it dP is read that does not exist yet
    if (cut(col0)) apply_mask(dp_reg, block.mask, row0, col0, 0.f);       // 0 times whatever dP was may be NaN
    if constexpr (DROPOUT) drop(dp_reg, kept), scale(dp_reg, dropout.scale);
    sync_pair(passed(block.queries.count));                   // without it P is read before the other warp has written it
    receive(factor_reg, p_smem(block.queries.count));
    score_gradients<true>(ds_reg, factor_reg, dp_reg, block.delta_smem(), 1.f, !TILE_LIST || !block.is_whole);
    if (follows) wait_for(block.written, (block.queries.count - 1) % 2);       // without it dS is overwritten that is still multiplied
    store_transposed(block.ds_smem(block.queries.count), ds_reg, own_row);
    fence_proxy_async();                                      // without it the product does not see what lanes have stored
    start_product(sum_reg, ds_reg, q_smem);
    end_step<KEYS_COLS>(p, block, sum_reg, follows, own_row, VALUES_COLS);
  };
  const auto step = [&](const bool follows) {
    if (for_values) step_for_values(follows);
    else step_for_keys(follows);
  };

  if (block.steps > 0) {
    consumer_wait(block.keys);                                // without it the products read keys that have not arrived
    consumer_wait(block.values);                              // the same for values
    if (ZEROS_AHEAD) wait_for<LANES>(block.cleared, 0);       // without it sums are added to what was there before
    step(false);
    #pragma unroll 1
    for (int i = 1; i < block.steps; ++i) step(true);
    if (for_values) end_steps<VALUES_COLS>(p, block, own_row, 0);
    else end_steps<KEYS_COLS>(p, block, own_row, VALUES_COLS);
  }

  arrive_at(block.ended);                                     // without it the block is never counted
  sync_last<4 * GROUPS>(CONSUMERS);                           // without it gradients overwrite keys that a slower warp still reads
  load_place(block);
  if (!for_values) scale(sum_reg, scale_of_sums(p, of_head));
  if constexpr (DROPOUT) if (for_values) scale(sum_reg, dropout.scale);
  store_gradient(p, block, for_values ? p.dv_map : p.dk_map, for_values, for_values ? p.dv_accum : p.dk_accum,
                 KeyTile{for_values ? v_smem.base : k_smem.base}, sum_reg, own_row);
  postprocess_heads(p, block);
  wait_for_stores();                                          // without it the block, and its shared memory, may end before
}

KERNEL(THREADS, 1) bwd_hopper_wide_postprocess(GRID_CONSTANT HopperBackwardParams p) { postprocess(p); }

KERNEL(THREADS, 1) bwd_hopper_wide_sinks(GRID_CONSTANT HopperBackwardParams p) {
  if constexpr (SINKS != NO_SINKS) gradient_of_sink(p, 1.f);
}
