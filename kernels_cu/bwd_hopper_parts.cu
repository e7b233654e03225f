// bwd_hopper_parts.cu -- the loop of bwd_hopper_wide.cu for float32: each element of q, k, v and dout is two numbers of float16, high and low, which
// fp16_parts.cu makes, and a product is three, see tile/fp16_parts.cuh. So are P and dS.
//
//   bwd_hopper_parts_preprocess    as bwd_hopper_preprocess
//
//   bwd_hopper_parts   one block per key-value tile j, its first warpgroup is the producer; the two consumers, for each query tile i:
//
//     for values:                                          for keys:
//       S^T = K_j Q_i^T                                      dP^T = V_j dO_i^T
//       P^T = 2^(S^T - lse_i)          -- passed on -->      dS^T = P^T o (dP^T - delta_i)
//                                                            e = the exponent with which the largest element of dS 2^e nearly fills float16
//       P^T 2^14 in parts, rows far below others lifted      dS^T 2^e in parts                go to shared memory, where P was
//                                                            and are lifted, for dK alone
//       start P^T dO_i                                       start dS^T Q_i
//       dQ = dS_{i-1} K_j, the left columns                  dQ = dS_{i-1} K_j, the right ones
//       dQ_{i-1} = dQ_{i-1} + 2^-e dQ                        the same, in device memory
//       dV = dV + P^T dO_i                                   dK = dK + 2^-e dS^T Q_i          by additions that round
//     dv_j = dV                                            dk_j = scale dK
//     the last block of a head:  dq = scale dQ             see tile/dq_protocol.cuh
//   DROPOUT: of P for dV, and of dP, what is not dropped; both are scaled. VARLEN: of sequences, as in bwd_hopper_wide.
//
//   bwd_hopper_parts_postprocess   as bwd_hopper_postprocess
#include "config.cuh"
#include "params.cuh"
#include "tile/producer.cuh"
#include "tile/score.cuh"
#include "tile/softcap.cuh"

static_assert(TILE_KV == 64 && TILE_Q == 64 && GROUPS == 2, "a warpgroup for each gradient of 64 keys");
static_assert(WIDTH_V == WIDTH, "one shape of tile for keys and values");
static_assert(FP16_PARTS > 0 && FLOAT32_RESULTS && !TMA_REDUCE_DQ, "parts, and float32 gradients");
static_assert(!STAGED_BIAS && (SCORES == UNCHANGED || SCORES == PLUS_TERM), "nobody has asked for these of parts");

// dQ = dS K is dealt out by its columns, in whole panels.
constexpr int VALUES_COLS = min_of(DIM, 64), KEYS_COLS = DIM - VALUES_COLS;

// DROPOUT: what pairs are drawn from, asked in each step. Kept, it would take registers.
struct alignas(16) StoredDropping {
  Dropping of;
};

// P of a warp takes as much as dS, in whose place it is passed on: in float32 as much as two parts. Behind all else are the largest elements of dS that
// each of four warps has found, of some steps: that of a step is asked until the next one but one.
constexpr int P_BYTES = 16 * TILE_Q * FP16_PARTS * int(sizeof(Element)), LARGEST = 4, LARGEST_OFFSET = ceil_div(BLOCK_BYTES, 16) * 16;
static_assert(4 * P_BYTES == GradientTile::bytes);
constexpr int DROPPING_OFFSET = LARGEST_OFFSET + LARGEST * int(sizeof(Four));
constexpr int SHARED_BYTES = DROPPING_OFFSET + DROPOUT * int(sizeof(StoredDropping));

// Of P of a step, from a warp to the one that has the same keys, as in bwd_hopper_wide.cu; of the warps for keys.
enum NamedBarrier { PASSED = 1, FOR_KEYS = PASSED + 2 * 4 };
static_assert(FOR_KEYS < NAMED_BARRIERS);

KERNEL(THREADS, 3) bwd_hopper_parts_preprocess(GRID_CONSTANT HopperBackwardParams p) {
  const u32 before = place_blocks(p);
  if (block_id() < before) return find_places(p);
  if constexpr (ZEROS_AHEAD) clear_progress(p);
  preprocess(p, 1.f, 1, ZEROS_AHEAD ? p.heads_ahead : ~0u, ~0u, block_id() - before);
}

OP SharedAddress largest_smem(const KeyBlock& block, u32 step) { return block.smem + LARGEST_OFFSET + int(step % LARGEST * sizeof(Four)); }

// Whether products are brought to their scale one by one, before anything becomes of scores; if not, exponents are.
constexpr bool SCALED_ALONE = MODIFIED || EXPLICIT_SCORES;

// VARLEN: whether where the block is, is asked again in each step. Kept, it would take registers that wide heads have not.
constexpr bool ASKS_PLACE = VARLEN && WIDTH > 64;

// K or V of a warp, so many operands of 16 columns in registers, as far as there are some: shared memory, from which each product would read them, takes as
// long as tensor cores do.
constexpr int HIGH_KEPT = WIDTH > 64 && SCALED_ALONE ? 0 : min_of(DIM / 16, FP16_PARTS == 1 ? 8 : 7), LOW_KEPT = WIDTH <= 64 ? DIM / 16 : 0;
using OwnKeys = OwnRows<FP16_PARTS, HIGH_KEPT, LOW_KEPT>;

// Whether the first product of a tile is started beneath the last one of the tile before; of wide heads there are no registers for it.
constexpr bool LEADS = WIDTH <= 64;

// Whether dQ is added before what the tile adds is multiplied, not beneath: of wide heads there are no registers for both beside what is asked besides.
constexpr bool ADDS_FIRST = WIDTH > 64 && (SCORES == PLUS_TERM || FIRST_STORES || DROPOUT);

// What a warp has of dQ of the tile before: N columns, or none.
template <int N> struct PartOfQueries {
  Acc<16, N> reg;
  OP void start(const KeyBlock& block, u32 before, int col) {
    wait_for(block.written, before % 2);                      // without it dS is read that has not been written
    start_product(reg, block.ds_smem(before), 0, block.keys.tile(), col);
  }
  OP void wait() { wait_for_products<0>(reg); }               // without it sums are added that do not exist yet, and dS is overwritten
  OP void add(const HopperBackwardParams& p, const KeyBlock& block, u32 before, int row, int col, float of_keys) {
    scale(reg, of_keys * inverse_of_tile(exponent_of_tile(largest_smem(block, before))));
    add_queries(p, block, block.number_before(p), before, reg, row, col);
  }
};
template <> struct PartOfQueries<0> {
  OP void start(const KeyBlock&, u32, int) {}
  OP void wait() {}
  OP void add(const HopperBackwardParams& p, const KeyBlock& block, u32 before, int, int, float) { add_nothing(p, block, before); }
};
template <int N> OP void add_last_part(const HopperBackwardParams& p, const KeyBlock& block, int row, int col, float of_keys) {
  PartOfQueries<N> dq;
  dq.start(block, block.queries.count - 1, col);
  dq.wait();
  dq.add(p, block, block.queries.count - 1, row, col, of_keys);
}
// The tile at hand is handed back, of which product_reg is what it adds; `leads`: a product for the next one has been started since.
OP void release_tile(const HopperBackwardParams& p, KeyBlock& block, Acc<16, DIM>& product_reg, const bool leads) {
  if (leads) wait_for_products<1>(product_reg);               // without it the producer overwrites what the product reads
  else wait_for_products<0>(product_reg);                     // the same
  consumer_release(block.queries);                            // without it the producer waits for ever
  block.douts.advance();
  block.go_on(p);
}

KERNEL(THREADS, 1) bwd_hopper_parts(GRID_CONSTANT HopperBackwardParams p) {
  if (block_id() >= p.owners) return postprocess_last_heads(p);
  KeyBlock block(p);
  if ((VARLEN && block.here.tile < 0) || leaves_zeros(p, block)) return;
  if (warp_id() == 0) start_barriers(block);
  if (DROPOUT && warp_id() == 0) store_once(block.smem + DROPPING_OFFSET, StoredDropping{seeded(p.scores)});
  sync_block();                                               // without it a warp arrives at a barrier that does not count yet, or draws from nothing
  if (warp_id() < 4) {
    warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    return produce(p, block);
  }

  warpgroup_reg_alloc<CONSUMER_REGISTERS>();
  const KeyTile k_smem = block.keys.tile(), v_smem = block.values.tile();
  const bool for_values = warp_id() < 8;
  const int pair = warp_id() % 4, own_row = pair * 16;
  const auto mask = [&] {                                     // asked anew in each step: kept, it would take registers, and so would ranges
    if constexpr (VARLEN) return TransposedMask(mask_again(block));
    else return TransposedMask{-not_ahead(p.mask.right), -not_ahead(p.mask.left), p.len_q, p.len_kv, p.mask.prefix};
  };
  const auto kept_place = [&] { return load_shared<KeyPlace>(block.smem + PLACE_OFFSET); };
  const auto first_row = [&] {                                // for the assembler, which spills without it: as kept, computed anew, or asked again
    return ZEROS_AHEAD ? not_ahead(block.row0) : ASKS_PLACE ? kept_place().tile * TILE_KV : block.row0;
  };
  const auto steps = [&] { return ASKS_PLACE ? kept_place().count * p.heads_per_block : block.steps; };
  const auto cut = [&](int col0) { return !PAIR_BITS && !unmasked_queries(mask(), not_ahead((VARLEN ? first_row() : block.row0) + own_row), 16).contains(col0, TILE_Q); };
  const auto passed = [&](u32 step) { return PASSED + int(step % 2) * 4 + pair; };
  const auto p_smem = [&](u32 step) { return block.ds_smem(step).base + pair * P_BYTES; };
  const auto number_of = [&](int head) { return (ASKS_PLACE ? kept_place().batch_number : block.here.batch_number) * p.heads + head; };
  const auto factors = [&](int head) { return gradient_factors(p, number_of(head)); };
  const float of_keys = factors(block.here.first_head).keys;
  const auto dropout = [&] { return load_shared<StoredDropping>(block.smem + DROPPING_OFFSET).of; };
  KeptHalves<TILE_Q / 16> kept;                               // DROPOUT: pairs of a step
  Acc<16, DIM> sum_reg;                                       // dV or dK
  fill(sum_reg, 0.f);

  // S or dP of the tile behind so many others, whose stage is full in time: the other warpgroup needs it no earlier.
  const auto start_scores = [&](Acc<16, TILE_Q>& s_reg, const OwnKeys& own, u32 ahead) {
    auto queries = block.queries;
    queries.count += ahead;
    consumer_wait(queries);                                   // without it the product reads queries that have not arrived
    own.start(s_reg, QueryTile{uniform(queries.tile().base)});
  };
  const auto start_dp = [&](Acc<16, TILE_Q>& dp_reg, const OwnKeys& own, u32 ahead) {
    auto douts = block.douts;
    douts.count += ahead;
    consumer_wait(douts);                                     // without it the product reads gradients that have not arrived
    own.start(dp_reg, QueryTile{uniform(douts.tile().base)});
  };

  // One query tile. Beneath its exponentials runs dQ of the tile before it, if there was one, and beneath what it adds to the gradient the first product
  // of the next one, if there is one.
  const auto step_for_values = [&](Acc<16, TILE_Q>& s_reg, const OwnKeys& own, const bool follows, const bool leads) {
    const QueryTile do_smem{uniform(block.douts.tile().base)};
    const u32 step = block.queries.count;
    if (!LEADS) start_scores(s_reg, own, 0);
    if constexpr (TILE_LIST) block.hear_tile();
    const int row0 = first_row() + own_row, col0 = block.now.tile * TILE_Q;
    PartOfQueries<VALUES_COLS> dq;
    Acc<16, DIM> dv_reg;
    OperandA<16> p_reg[FP16_PARTS * TILE_Q / 16];
    GradientFactors of_parts = factors(block.now.head);
    if (follows) dq.start(block, step - 1, 0);
    if constexpr (DROPOUT) draw(kept, dropout(), number_of(block.now.head), row0, col0);
    if (!LEADS && follows) wait_for_products<1>(s_reg);       // without it scores are read that do not exist yet
    if (!LEADS && !follows) wait_for_products<0>(s_reg);      // the same
    if (MODIFIED) of_parts = factors(block.now.head);         // again, and once more below: kept, they would take registers
    if (SCALED_ALONE) scale(s_reg, of_parts.scores);
    if (EXPLICIT_SCORES) scale_scores(s_reg, p.scale, p.softcap);
    if constexpr (MODIFIED) {
      const ScoreContext x = score_context(p, block.here, block.now.head, block.seq(p).q.len(), block.seq(p).kv.len());
      const bool ask_pairs = !TILE_LIST || !block.is_whole;
      PairArrays<16, TILE_Q> arrays;
      load<true>(arrays, x, row0, col0, ask_pairs);
      modify_scores<true>(s_reg, arrays, x, row0, col0, ask_pairs);
    }
    if (cut(col0)) apply_mask(s_reg, mask(), row0, col0, -infinity());
    probabilities(s_reg, block.lse_smem(), exponent_scale(p.scale) * (SCALED_ALONE ? 1.f : of_parts.scores), p.per_softcap, p_smem(step));
    arrive_pair(passed(step));                                // without it the other warp waits for P for ever
    if constexpr (DROPOUT) drop(s_reg, kept);
    to_operands(p_reg, s_reg);
    Lifts lifts(0);
    lift_low_rows(p_reg, lifts, s_reg, 0);
    if (follows) dq.wait();
    arrive_at(block.written);                                 // without it the others wait for ever. Not earlier: P takes the place of dS that is multiplied
    consumer_wait(block.douts);                               // without it the product reads gradients that have not arrived
    if (ADDS_FIRST && follows) dq.add(p, block, step - 1, own_row, 0, of_keys);
    start_product(dv_reg, p_reg, do_smem, false);
    if (!ADDS_FIRST && follows) dq.add(p, block, step - 1, own_row, 0, of_keys);
    if (leads) start_scores(s_reg, own, 1);
    if (MODIFIED) of_parts = factors(block.now.head);
    release_tile(p, block, dv_reg, leads);
    promote(sum_reg, dv_reg, of_parts.douts, lifts);
    if (leads) wait_for_products<0>(s_reg);                   // without it scores are read that do not exist yet
  };
  const auto step_for_keys = [&](Acc<16, TILE_Q>& dp_reg, const OwnKeys& own, const bool follows, const bool leads) {
    const QueryTile q_smem{uniform(block.queries.tile().base)};
    const u32 step = block.queries.count;
    if (!LEADS) start_dp(dp_reg, own, 0);
    if constexpr (TILE_LIST) block.hear_tile();
    const int row0 = first_row() + own_row, col0 = block.now.tile * TILE_Q;
    PartOfQueries<KEYS_COLS> dq;
    Acc<16, DIM> dk_reg;
    OperandA<16> ds_reg[FP16_PARTS * TILE_Q / 16];
    GradientFactors of_parts = factors(block.now.head);
    if (follows) dq.start(block, step - 1, VALUES_COLS);
    if constexpr (DROPOUT) draw(kept, dropout(), number_of(block.now.head), row0, col0);
    if (!LEADS && follows) wait_for_products<1>(dp_reg);      // without it dP is read that does not exist yet
    if (!LEADS && !follows) wait_for_products<0>(dp_reg);     // the same
    if (cut(col0)) apply_mask(dp_reg, mask(), row0, col0, 0.f);       // 0 times whatever dP was may be NaN
    if constexpr (DROPOUT) drop(dp_reg, kept);
    sync_pair(passed(step));                                  // without it P is read before the other warp has written it
    score_gradients(dp_reg, p_smem(step), block.delta_smem(), DROPOUT ? of_parts.dp * p.scores.dropout.scale : of_parts.dp);
    store_once(largest_smem(block, step) + pair * int(sizeof(float)), largest_of_warp(dp_reg));
    sync_last<4>(FOR_KEYS);                                   // without it numbers are read that have not been written, and dS takes the place of P
                                                              // that a slower warp still reads
    const int exponent = exponent_of_tile(largest_smem(block, step));
    scale(dp_reg, two_to(exponent));
    to_operands(ds_reg, dp_reg);
    store_transposed(block.ds_smem(step), ds_reg, own_row);
    Lifts lifts(exponent);
    lift_low_rows(ds_reg, lifts, dp_reg, exponent);
    fence_proxy_async();                                      // without it the product does not see what lanes have stored
    if (follows) dq.wait();
    arrive_at(block.written);                                 // without it the others wait for ever
    consumer_wait(block.queries);                             // for the assembler, which spills without it: they have arrived, since P is made of them
    if (ADDS_FIRST && follows) dq.add(p, block, step - 1, own_row, VALUES_COLS, of_keys);
    start_product(dk_reg, ds_reg, q_smem, false);
    if (!ADDS_FIRST && follows) dq.add(p, block, step - 1, own_row, VALUES_COLS, of_keys);
    if (leads) start_dp(dp_reg, own, 1);
    if (MODIFIED) of_parts = factors(block.now.head);         // again: kept, they would take registers
    release_tile(p, block, dk_reg, leads);
    promote(sum_reg, dk_reg, of_parts.queries, lifts);
    if (leads) wait_for_products<0>(dp_reg);                  // without it dP is read that does not exist yet
  };

  if (block.steps > 0) {
    consumer_wait(block.keys);                                // without it the products read keys that have not arrived
    consumer_wait(block.values);                              // the same for values
    if (ZEROS_AHEAD) wait_for<LANES>(block.cleared, 0);       // without it sums are added to what was there before
    if (for_values) {
      Acc<16, TILE_Q> s_reg;
      const OwnKeys own(k_smem, own_row);
      if (LEADS) start_scores(s_reg, own, 0);
      if (LEADS) wait_for_products<0>(s_reg);                 // without it scores are read that do not exist yet
      if (!LEADS || block.steps == 1) step_for_values(s_reg, own, false, false);
      else step_for_values(s_reg, own, false, true);
      #pragma unroll 1
      for (int i = 1; i < steps() - LEADS; ++i) step_for_values(s_reg, own, true, LEADS);
      if (LEADS && block.steps > 1) step_for_values(s_reg, own, true, false);
      add_last_part<VALUES_COLS>(p, block, own_row, 0, of_keys);
    } else {
      Acc<16, TILE_Q> dp_reg;
      const OwnKeys own(v_smem, own_row);
      if (LEADS) start_dp(dp_reg, own, 0);
      if (LEADS) wait_for_products<0>(dp_reg);                // without it dP is read that does not exist yet
      if (!LEADS || block.steps == 1) step_for_keys(dp_reg, own, false, false);
      else step_for_keys(dp_reg, own, false, true);
      #pragma unroll 1
      for (int i = 1; i < steps() - LEADS; ++i) step_for_keys(dp_reg, own, true, LEADS);
      if (LEADS && block.steps > 1) step_for_keys(dp_reg, own, true, false);
      add_last_part<KEYS_COLS>(p, block, own_row, VALUES_COLS, of_keys);
    }
  }

  // Again: kept, where the block is would take registers of the loop.
  if constexpr (VARLEN) {
    load_place(block);
    block.row0 = block.here.tile * TILE_KV, block.head = block.here.batch_number * p.heads + block.here.first_head;
  } else if (!SCALED_ALONE) block.find(p, [] { return u32(not_ahead(int(block_id()))); });
  arrive_at(block.ended);                                     // without it the block is never counted
  if (!for_values) scale(sum_reg, p.scale);
  if (DROPOUT && for_values) scale(sum_reg, p.scores.dropout.scale);
  store_gradient(p, block, for_values ? p.dv_map : p.dk_map, for_values, for_values ? p.dv_accum : p.dk_accum, {k_smem.base}, sum_reg, own_row);
  postprocess_heads(p, block);
}

KERNEL(THREADS, 1) bwd_hopper_parts_postprocess(GRID_CONSTANT HopperBackwardParams p) { postprocess(p); }

KERNEL(THREADS, 1) bwd_hopper_parts_sinks(GRID_CONSTANT HopperBackwardParams p) {
  if constexpr (SINKS != NO_SINKS) gradient_of_sink(p, 1.f);
}
