// bwd_scores_hopper.cu -- the gradient of one array that scores read: what bwd_scores.cu does, for sm_90a, with TMA and products of whole warpgroups
// (wgmma). It runs behind any backward, whose lse and delta of each query it reads, and computes S and dP again.
//
//   bwd_scores_hopper_clear    sums = 0                        where more than one sum goes to an element
//
//   bwd_scores_hopper   A block takes one unit of elements after the other, say those of a tile of keys j. Its first warpgroup is the producer, each
//                       consumer owns 64 queries of every tile:
//
//     producer: for each unit, and each batch element, head and pair of tiles (i, j) that share it:
//                 Q_i, K_j with lse_i,  and dO_i, V_j with delta_i             as far ahead as there are stages
//
//     consumer: for each unit:
//                 G = 0
//                 for each batch element, head and pair of tiles (i, j) that share it:
//                   S = Q_i K_j^T,  dP = dO_i V_j^T                            warpgroups start their products in turn (ping-pong), so that
//                   P = 2^(L - lse_i), L being what S becomes                  all else is done beneath those of the other one
//                   G += P o (dP - delta_i) o dL / d element                   in registers: of all pairs of a tile, or of its columns or rows
//                 G goes to the gradient, if the block is the only one of the unit, or to partial sums, or to whichever sums an index names
//
//     ONE_BIAS: of a bias of queries and keys, which batch elements or heads may share, a unit is a pair of tiles B_ij, which another warp of the
//     producer loads once. Scores become nothing more:
//
//                 for each batch element and head that share the unit:
//                   S = Q_i K_j^T,  dP = dO_i V_j^T                            DROPOUT: dP scaled, of what is not dropped
//                   P = 2^(S + B_ij - lse_i)                                   HAS_KEY_TERM: and of each, its term of key j
//                   G += P o (dP - delta_i)                                    MASKED_PAIRS: of pairs that take part. VARLEN: and exist
//
//   bwd_scores_hopper_add, _gather, _store    as those of bwd_scores.cu
#include "config.cuh"
#include "params.cuh"
#include "tile/key_terms.cuh"
#include "tile/unit_tiles.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS = WARPS / 4 - 1;                         // consumer warpgroups
static_assert(TILE_Q == 64 * GROUPS, "a warpgroup owns 64 queries");
static_assert(!ONE_BIAS || (SCORES == PLUS_TERM && HAS_BIAS && !WALKS && !SCATTERED && !GATHERED && !HAS_FACTOR), "its elements belong to a query and a key, and scores become nothing more");
static_assert(ONE_BIAS || !(VARLEN || BY_SCORE || STAGED_BIAS), "which bwd_scores computes");
static_assert(GROUPS > 1, "they take turns");

enum NamedBarrier { ORDER = 1 };                              // of ping-pong, for each warpgroup
static_assert(ORDER + GROUPS <= NAMED_BARRIERS);

// Of the registers that a launch deals out evenly, the producer gives back most: where sums of all pairs of a wide tile are beside S and dP, all that it
// can; and of narrow ones what is left over when consumers have as many as there may be.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = ONE_BIAS ? 40 : TILE_KV == 64 ? 72 : OF_DISTANCE ? 24 : 40;
constexpr int CONSUMER_REGISTERS = min_of((REGISTERS * (GROUPS + 1) - PRODUCER_REGISTERS) / GROUPS / 8 * 8, 240);

// Shared memory: operands of the products; the bias of a unit, or of two; statistics of queries; barriers.
constexpr int BIAS_OFFSET = STAGES * Operands::bytes;
constexpr int STATS_OFFSET = BIAS_OFFSET + BIAS_STAGES * BIAS_BYTES;
constexpr int RING_BARRIERS = STATS_OFFSET + STATS_BYTES;
constexpr int BIAS_BARRIERS = RING_BARRIERS + STAGES * STAGE_BARRIERS;
constexpr int SHARED_BYTES = BIAS_BARRIERS + STAGED_BIAS * BIAS_STAGES * STAGE_BARRIERS;

KERNEL(THREADS, 1) bwd_scores_hopper_clear(GRID_CONSTANT HopperScoreGradientParams p) {
  for_elements(p, [&](i64 i) { write(p.sums + i, 0.f); });
}

KERNEL(THREADS, 1) bwd_scores_hopper(GRID_CONSTANT HopperScoreGradientParams p) {
  const SharedAddress smem = shared_memory(), stats_smem = smem + STATS_OFFSET;
  const int warp = int(uniform(u32(warp_id())));
  Ring ring{smem, smem + RING_BARRIERS};                      // Q and K, dO and V, Q and K ...
  Biases biases{smem + BIAS_OFFSET, smem + BIAS_BARRIERS};
  if (warp == 0) {
    init_pipeline(ring, 4 * GROUPS);                          // warps that hand a stage back
    if (STAGED_BIAS) init_pipeline(biases, 4 * GROUPS);
  }
  sync_block();                                               // without it a warp arrives at a barrier that does not count yet

  if (warp < 4) {
    warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    if (warp == 0) {
      for_parts(p, [&](UnitPart& part) {
        #pragma unroll 1
        for (PairCursor& now = part.first; now.left > 0; advance_step(p, now)) {
          const StepCoord step(p, now);
          producer_acquire(ring);                             // without it operands are overwritten that a slower warp still reads
          load_operands(ring, p.q_map, p.k_map, p, step, false, stats_smem);
          producer_acquire(ring);                             // the same
          load_operands(ring, p.dout_map, p.v_map, p, step, true, stats_smem);
        }
      });
    }
    if (STAGED_BIAS && warp == 1) {
      for_parts(p, [&](const UnitPart& part) {
        if (part.first.left <= 0) return;
        producer_acquire(biases);                             // without it a bias is overwritten that a slower warp still reads
        load_bias(biases, p.bias_map, part.first);
      });
    }
    return;
  }

  warpgroup_reg_alloc<CONSUMER_REGISTERS>();
  const int group = warp / 4 - 1, group_row = group * 64, own_row = group_row + warp % 4 * 16;
  const Mask mask{p.mask, p.len_kv};
  const float scale_log2 = exponent_scale(p.scale);
  Dropping dropout{};
  if constexpr (DROPOUT) dropout = seeded(p.scores);
  if (group == GROUPS - 1) arrive_pingpong<ORDER>(group, GROUPS); // without it nobody begins
  const auto context = [&](const PairCursor& at, int len_q, int len_kv) {
    struct { const int (&batch)[BATCH_AXES]; u32 batch_number; } here{at.batch, at.batch_number(p)};
    return score_context(p, here, at.head, len_q, len_kv);
  };
  const auto sum_reads = [&](const UnitPart& part) {
    LaneSums<16, TILE_KV> sum_reg;                            // G
    fill(sum_reg, 0.f);
    #pragma unroll 1
    for (PairCursor now = part.first; now.left > 0; advance_step(p, now)) {
      const int row0 = now.q_tile * TILE_Q + own_row, col0 = now.kv_tile * TILE_KV;
      const ScoreContext x = context(now, p.len_q, p.len_kv);
      Acc<16, TILE_KV> s_reg, dp_reg;
      RowVec<16> lse_reg, delta_reg;
      consumer_wait(ring);                                    // without it the product reads queries and keys that have not arrived
      wait_pingpong<ORDER>(group);                            // without it products of both run at a time, and then none beneath which to compute
      start_product_transposed(s_reg, ring.tile().queries(), group_row, ring.tile().keys());
      Ring second = ring;
      second.advance();
      consumer_wait(second);                                  // without it the product reads gradients and values that have not arrived
      start_product_transposed(dp_reg, second.tile().queries(), group_row, second.tile().keys());
      arrive_pingpong<ORDER>(group, GROUPS);                  // without it the other warpgroup waits for ever
      load_rows(lse_reg, stats_of(stats_smem, ring), own_row);
      load_rows(delta_reg, stats_of(stats_smem, second), own_row, p.delta_sign);
      PairArrays<16, TILE_KV> arrays;
      if constexpr (SCORES != EXPRESSION) load<false>(arrays, x, row0, col0);
      KeptPairs<false, 16, TILE_KV> kept;
      if constexpr (DROPOUT) draw(kept, dropout, now.batch_number(p) * p.heads + now.head, row0, col0);
      wait_for_products<1>(s_reg);                            // without it scores are read that do not exist yet
      consumer_release(ring);                                 // without it the producer waits for ever
      if (EXPLICIT_SCORES) scale_scores(s_reg, p.scale, p.softcap);
      if constexpr (SCORES != EXPRESSION) {
        modify_scores<false>(s_reg, arrays, x, row0, col0);
        if constexpr (SCORES == PLUS_LINEAR) {                // lse as the backward left it, and without the rows' part of the term
          RowVec<16> terms_reg;
          terms_of_rows<false>(terms_reg, s_reg, x, row0, col0);
          make_whole(lse_reg, terms_reg, x, row0, int(p.stats_rows_divmod.divisor));
        }
        exponentiate(s_reg, lse_reg, scale_log2);
      }
      wait_for_products<0>(dp_reg);                           // without it dP is read that does not exist yet
      consumer_release(ring);                                 // without it the producer waits for ever
      if constexpr (DROPOUT) drop(dp_reg, kept), scale(dp_reg, dropout.scale);
      if constexpr (SCORES == EXPRESSION) gradients_of_reads(dp_reg, s_reg, lse_reg, delta_reg, x, row0, col0, scale_log2);
      else gradients_of_reads(dp_reg, s_reg, delta_reg, x, row0, col0);
      if (row0 + 16 > p.len_q || !unmasked_keys(mask, row0, 16).contains(col0, TILE_KV)) apply_mask(dp_reg, ExistingPairs{mask, p.len_q}, row0, col0, 0.f);
      add_to(sum_reg, dp_reg);
    }
    store_sums(p, part, sum_reg, own_row);
  };
  const auto sum_one_bias = [&](const UnitPart& part) {
    const PairCursor& first = part.first;
    const int row0 = first.q_tile * TILE_Q + own_row, col0 = first.kv_tile * TILE_KV;
    const auto see_all = [&](const ExistingPairs& pairs) { return row0 + 16 <= pairs.len_q && unmasked_keys(pairs.mask, row0, 16).contains(col0, TILE_KV); };
    ExistingPairs of_sequence;                                // VARLEN: those of the sequence at hand
    const auto existing = [&]() -> ExistingPairs { if constexpr (VARLEN) return of_sequence; else return {mask, p.len_q}; };
    bool whole = row0 + 16 <= p.len_q && unmasked_keys(mask, row0, 16).contains(col0, TILE_KV);
    const ScoreContext x = context(first, p.len_q, p.len_kv); // of the bias, which all of these share
    PairCursor now = first;                                   // MASKED_PAIRS, DROPOUT, VARLEN, HAS_KEY_TERM: whose masks, draws, lengths and terms are their own
    PairArrays<16, TILE_KV> arrays;                           // the bias, unless it is in shared memory
    if (!STAGED_BIAS && first.left > 0) load<false>(arrays, x, row0, col0);
    Acc<16, TILE_KV> sum_reg;                                 // G
    fill(sum_reg, 0.f);
    #pragma unroll 1
    for (i64 left = first.left; left > 0; --left) {
      Acc<16, TILE_KV> s_reg, dp_reg;
      RowVec<16> lse_reg, delta_reg;
      consumer_wait(ring);                                    // without it the product reads queries and keys that have not arrived
      wait_pingpong<ORDER>(group);                            // without it products of both run at a time, and then none beneath which to compute
      start_product_transposed(s_reg, ring.tile().queries(), group_row, ring.tile().keys());
      Ring second = ring;
      second.advance();
      consumer_wait(second);                                  // without it the product reads gradients and values that have not arrived
      start_product_transposed(dp_reg, second.tile().queries(), group_row, second.tile().keys());
      arrive_pingpong<ORDER>(group, GROUPS);                  // without it the other warpgroup waits for ever
      load_rows(lse_reg, stats_of(stats_smem, ring), own_row);
      load_rows(delta_reg, stats_of(stats_smem, second), own_row, p.delta_sign);
      Regs<u64, 1> taking_part;                               // a bit for each register
      if constexpr (VARLEN) of_sequence = existing_pairs(p, now), whole = see_all(of_sequence);
      if constexpr (MASKED_PAIRS) ask_pairs_of_tile<false, 16, TILE_KV>(taking_part, context(now, existing().len_q, existing().mask.len_kv), row0, col0);
      KeptPairs<false, 16, TILE_KV> kept;
      if constexpr (DROPOUT) draw(kept, dropout, now.batch_number(p) * p.heads + now.head, row0, col0);
      if constexpr (MASKED_PAIRS || DROPOUT || VARLEN) advance_step(p, now);
      wait_for_products<1>(s_reg);                            // without it scores are read that do not exist yet
      consumer_release(ring);                                 // without it the producer waits for ever
      if (EXPLICIT_SCORES) scale_scores(s_reg, p.scale, p.softcap);
      if constexpr (HAS_KEY_TERM) add_terms_of_keys(s_reg, context(now, p.len_q, p.len_kv), col0), advance_step(p, now);
      if constexpr (STAGED_BIAS) {
        consumer_wait(biases);                                // without it a bias is read that has not arrived
        modify_scores(s_reg, biases.tile(), x, own_row);
      } else {
        modify_scores<false>(s_reg, arrays, x, row0, col0, false);
      }
      exponentiate(s_reg, lse_reg, scale_log2);
      if constexpr (MASKED_PAIRS) mask_pairs(s_reg, taking_part, 0.f);
      if (!whole) apply_mask(s_reg, existing(), row0, col0, 0.f);
      wait_for_products<0>(dp_reg);                           // without it dP is read that does not exist yet
      if (STAGED_BIAS && (VARLEN ? now.left <= 0 : left == 1)) consumer_release(biases); // without it the producer waits for ever. All lanes have read it before they waited
      consumer_release(ring);                                 // without it the producer waits for ever
      if (!whole) apply_mask(dp_reg, existing(), row0, col0, 0.f); // 0 times whatever dP was may be NaN
      if constexpr (MASKED_PAIRS) mask_pairs(dp_reg, taking_part, 0.f);       // the same
      if constexpr (DROPOUT) drop(dp_reg, kept), scale(dp_reg, dropout.scale);
      add_gradients(sum_reg, s_reg, dp_reg, delta_reg);
      if constexpr (VARLEN) left = now.left + 1;              // those of which no pair takes part are left out
    }
    store_sums(p, part, sum_reg, own_row);
  };
  if constexpr (ONE_BIAS) for_parts(p, sum_one_bias);
  else for_parts(p, sum_reads);
  if (group == 0) wait_pingpong<ORDER>(group);                // without it the last one's arrival is left over
}

KERNEL(THREADS, 1) bwd_scores_hopper_add(GRID_CONSTANT HopperScoreGradientParams p) {
  if constexpr (OF_DISTANCE) add_diagonals(p);
  else if constexpr (OF_QUERY && OF_KEY && !SCATTERED) add_partials_of_pairs(p);
  else if constexpr (!SCATTERED) add_partials(p);
}

KERNEL(THREADS, 1) bwd_scores_hopper_gather(GRID_CONSTANT HopperScoreGradientParams p) {
  if constexpr (GATHERED) gather(p);
}

KERNEL(THREADS, 1) bwd_scores_hopper_store(GRID_CONSTANT HopperScoreGradientParams p) {
  for_elements(p, [&](i64 i) { write(static_cast<GradientElement*>(p.gradient.data) + i, read(p.sums + i)); });
}
