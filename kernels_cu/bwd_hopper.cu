// bwd_hopper.cu -- the backward of FlashAttention-2 for sm_90a: the loop of bwd_v2.cu, with TMA and products of whole
// warpgroups (wgmma). (FlashAttention-3: Shah et al., 2024.)
//
//   bwd_hopper_preprocess    for each query row:  delta = rowsum(dout o out) - dlse,  dQ = 0
//                            (VARLEN: and for each key tile, where it lies. STATS_AHEAD: delta of the first heads alone.
//                            ZEROS_AHEAD: dQ = 0 of these alone)
//
//   bwd_hopper        one block per key-value tile j. Its first warpgroup is the producer, each consumer owns 64 rows of K_j and V_j:
//
//     producer: K_j, V_j,  and for each query head that shares them, and each query tile i that sees one of them, the last first
//               (or the other way round, see semaphore_value):
//               Q_i with lse_i,  dO_i with delta_i                     as far ahead as there is room
//
//     consumer: for each such query tile i:
//                 start S^T = K_j Q_i^T
//                 start dP^T = V_j dO_i^T
//                 wait for S^T;  P^T = 2^(S^T - lse_i)                 beneath the second product
//                 start dV = dV + P^T dO_i                             P^T and dS^T are A operands as they are, in registers
//                 start dQ = dS_{i-1} K_j                              over the keys of all warpgroups, dealt out by its columns or rows;
//                                                                      a step late, so that no warpgroup waits for the dS of another
//                 wait for dP^T;  dS^T = P^T o (dP^T - delta_i)        beneath both products;  dS goes to shared memory
//                                                                      (STORE_DBIAS: an idle warp has TMA store it: it is the bias's gradient)
//                 start dK = dK + dS^T Q_i
//                 wait for dQ;  dQ_{i-1} = dQ_{i-1} + dQ               in device memory, where all blocks of the head meet; by the lanes
//                                                                      that hold it, or by TMA from shared memory
//               dv_j = dV,  dk_j = scale dK                          SCALE_SUMS: scale times what scores of the head are multiplied by, which
//               the last block of a head:  dq = scale dQ             dS is without
//
//     How blocks share dQ, and when its memory is used again, is in tile/dq_protocol.cuh. The last heads have blocks of their own for
//     dq = scale dQ, which start behind all others.
//
//     STATS_AHEAD: two idle warps, or IN_ORDER one, make delta of the queries of later heads, see tile/stats_ahead.cuh. ZEROS_AHEAD: another one sets dQ of later
//     heads to 0, see tile/dq_protocol.cuh.
//
//     PERSISTENT: as many blocks as there are multiprocessors take one key tile after the other. The producer goes on to the query tiles of the next
//     one beneath the last steps of this one; a scheduler warp, one of the idle ones, takes key tiles and tells the other warps of them. All heads
//     are among the last ones.
//
//     CLUSTER: neighbouring blocks own the same keys of batch elements that share a bias, and sum up their dS, see tile/dbias_sums.cuh.
//
//     WHOLE_HEADS: a block takes all key tiles of a head so, and then those of another one. dQ_i is then its own to sum up, and with the last key
//     tile that sees query tile i it is dq, see `OwnSums` in tile/dq_protocol.cuh.
//
//   bwd_hopper_postprocess   sums gradients of inputs that were broadcast, or of keys that several blocks have summed up
#include "config.cuh"
#include "params.cuh"
#include "tile/dbias_sums.cuh"
#include "tile/dq_protocol.cuh"
#include "tile/key_loads.cuh"
#include "tile/key_terms.cuh"
#include "tile/score.cuh"
#include "tile/softcap.cuh"

static_assert(TILE_KV == 64 * GROUPS, "a warpgroup owns 64 keys");
static_assert(WIDTH_V == WIDTH, "one shape of tile for keys and values");
static_assert(SCORES != EXPRESSION, "its registers hold both gradients, and P once");

// dQ = dS K is dealt out to the warpgroups by 64 rows, and where there are fewer of those, by columns, and lanes add what they hold. If its
// sums are staged, queries may be no multiple of 64: its transpose is computed, dQ^T = K^T dS^T, and dealt out by 64 columns of dQ.
constexpr int DQ_ACROSS = TMA_REDUCE_DQ ? WIDTH / 64 : GROUPS / (TILE_Q / 64), DQ_COLS = WIDTH / DQ_ACROSS;
static_assert(DQ_ACROSS * (TMA_REDUCE_DQ ? 1 : TILE_Q / 64) == GROUPS, "every warpgroup has a part of dQ");
static_assert(TMA_REDUCE_DQ || TILE_Q % 64 == 0, "and no row of dQ is left over");
OP int dq_row_of(int group) { return group / DQ_ACROSS * 64; }
OP int dq_col_of(int group) { return group % DQ_ACROSS * DQ_COLS; }

template <bool STAGED> struct OfQueries { typedef DqAccum Accum; typedef Acc<16, DQ_COLS> Part; };
template <> struct OfQueries<true> { typedef TransposedAccumTile<TILE_Q, WIDTH> Accum; typedef Acc<16, TILE_Q> Part; };
using Accum = OfQueries<TMA_REDUCE_DQ>::Accum;
using Part = OfQueries<TMA_REDUCE_DQ>::Part;                  // of dQ or its transpose, for a warp

template <bool STAGED = TMA_REDUCE_DQ, int N> OP void start_part(Acc<16, N>& dq, const GradientTile& ds, int row, const PanelTile<TILE_KV, WIDTH>& k, int col) {
  if constexpr (STAGED) start_transposed_product(dq, k, col, ds);
  else start_product(dq, ds, row, k, col);
}
template <bool STAGED = TMA_REDUCE_DQ, int N>
OP void add_part(const HopperBackwardParams& p, const KeyBlock& block, u32 number, u32 step, const Acc<16, N>& dq, int group, int row, int col) {
  if constexpr (STAGED) stage_queries(block, group, step, dq);
  else add_queries(p, block, number, step, dq, row, col);
}

// Whether dP starts from -delta: it saves subtractions, but the first product of a step waits for dO, and what is dropped is dP alone.
constexpr bool DELTA_AHEAD = WIDTH <= 64 && !DROPOUT;

constexpr float DELTA_SIGN = DELTA_AHEAD ? -1.f : 1.f;        // what delta is multiplied by in the statistics

// Whether dQ runs beneath dS, and not behind it: with a softcap, with dropout of sequences or beside terms, with more queries, or where pairs
// are asked (float16 packs otherwise, and more registers hold what it packs), there are no registers for dQ beside dP.
constexpr bool TERMS_CROWD = SCORES != UNCHANGED && (WIDTH > 64 || !(STAGED_BIAS || SCORES == SCALED));
constexpr bool EARLY = !EXPLICIT_SCORES && !(DROPOUT && (VARLEN || TERMS_CROWD)) && !TMA_REDUCE_DQ && !(MASKED_PAIRS && WIDTH > 64 && DTYPE == FLOAT16);

// Whether there are registers for what the pairs of a head have in common, which otherwise is asked again for each query tile.
constexpr bool KEEPS_TERMS = SCALE_SUMS || ((WIDTH > 64 || SCORES == SCALED || SCORES == PLUS_COLUMN) && !TMA_REDUCE_DQ);

// What the scores of the query head at hand have in common, unless it is that of the head before; whether it is another one.
OP bool find_terms(HeadTerms& of_head, int& head_of, const HopperBackwardParams& p, const KeyBlock& block) {
  const bool anew = head_of != block.now.head;
  if (!KEEPS_TERMS || anew) {
    head_of = block.now.head;
    of_head = head_terms(p, block.here, head_of, block.seq(p).q.len(), block.seq(p).kv.len());
  }
  return anew;
}
OP ScoreContext context_of_head(const HopperBackwardParams& p, const KeyBlock& block, const HeadTerms& of_head) {
  return score_context(p, block.here, block.now.head, of_head, block.seq(p).q.len(), block.seq(p).kv.len());
}

// Whether half way is behind dP, not behind P: as measured.
constexpr bool LATE = WIDTH > 64;
static_assert(GROUPS == 2, "one that begins, and one that follows");

// Of all consumer warps; of a warp of the second warpgroup, which begins when that of the first lets it: one for each such pair.
enum NamedBarrier { CONSUMERS = 1, BEGIN = 2 };
static_assert(BEGIN + 4 <= NAMED_BARRIERS);

constexpr int SHARED_BYTES = BLOCK_BYTES;

KERNEL(THREADS, VARLEN ? 4 : 1) bwd_hopper_preprocess(GRID_CONSTANT HopperBackwardParams p) {
  const u32 before = place_blocks(p);
  if constexpr (STATS_AHEAD || ZEROS_AHEAD) clear_progress(p);
  if (block_id() < before) return find_places(p);
  if (PERSISTENT && block_id() == 0 && warp_id() == 0) semaphore_clear(p.next_tile);
  const bool some_heads = !VARLEN;                            // of packed sequences, blocks are of heads that nobody else makes anything for
  const u32 accum_heads = ZEROS_AHEAD && some_heads ? p.heads_ahead : p.accum_heads_divmod.divisor;
  preprocess(p, DELTA_SIGN, TMA_REDUCE_DQ ? GROUPS : 1, accum_heads, STATS_AHEAD && some_heads ? p.heads_ahead : ~0u, block_id() - before);
}

KERNEL(THREADS, 1) IN_CLUSTERS bwd_hopper(GRID_CONSTANT HopperBackwardParams p) {
  const int warp = int(uniform(u32(warp_id())));
  if (block_id() >= first_finishing_block(p)) return postprocess_last_heads<Accum>(p);
  KeyBlock block(p);
  if (leaves_zeros(p, block)) return;
  const bool has_keys = !VARLEN || block.here.tile >= 0;
  if (!STATS_AHEAD && !has_keys) return;                      // with it, its warps have something to make all the same
  if (warp == 0) start_barriers(block);
  if constexpr (CLUSTER > 1) sync_cluster<CLUSTER>();         // the same, also at one of another block
  else sync_block();                                          // without it a warp arrives at a barrier that does not count yet
  if (warp < 4) {
    warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    if constexpr (PERSISTENT) {
      if (warp == 0) return load_key_tiles(p, block);         // returned from: as one text, the tasks of these warps spill registers
      if (LOADS_KEYS_APART && warp == 1) return load_keys(p, block);
      if (warp == 3) take_key_tiles(p, block);
      return;
    }
    if (warp == 0) load_tiles(p, block);
    if (TMA_REDUCE_DQ) {
      if (warp == 1 || warp == 2) send_queries(p, block, warp - 1, Accum::offset(dq_row_of(warp - 1), dq_col_of(warp - 1)));
    } else {
      if constexpr (STATS_AHEAD && !IN_ORDER) {
        if (warp == 1 || warp == 2) make_stats_ahead(p, block, warp - 1, DELTA_SIGN);
      }
      if ((!STATS_AHEAD || IN_ORDER) && warp == 1) acquire_dq_order(p, block);
      if ((!STATS_AHEAD || IN_ORDER) && warp == 2) release_dq_order(p, block);
      if (warp == 3) let_add(p, block);
      if constexpr (IN_ORDER) if (warp == 3) make_stats_ahead(p, block, 0, DELTA_SIGN);
    }
    if constexpr (CLUSTER > 1) {
      if (warp == 1 || warp == 2) sum_slices(p, block, warp - 1);
      if (warp == 3) send_slices(block);
    } else {
      if (STORE_DBIAS && warp == 3) send_dbias(p, block);
    }
    if constexpr (ZEROS_AHEAD) {
      if (warp == 3) make_zeros_ahead(p, block);
    } else if (warp == 3) clear_sums(p, block);
    if (warp == 3 && has_keys) count_heads(p, block);
    return;
  }
  if (!has_keys) return;

  warpgroup_reg_alloc<CONSUMER_REGISTERS>();
  KeyTile k_smem = block.keys.tile(), v_smem = block.values.tile();
  const int group = warp / 4 - 1, group_row = group * 64, own_row = group_row + warp % 4 * 16;
  const int dq_row = dq_row_of(group), dq_col = dq_col_of(group);
  ColumnRange common = PERSISTENT ? ColumnRange{0, -1} : unmasked_queries(block.mask, block.row0 + own_row, 16);

  Acc<16, DIM> dk_reg, dv_reg;
  fill(dk_reg, 0.f);
  fill(dv_reg, 0.f);
  u32 number = 0;                                             // of the query tile before,
  QueryCursor before{};                                       // WHOLE_HEADS: and where it is
  HeadTerms of_head{};                                        // of the scores of a query head,
  int head_of = -1;                                           // of this one
  Dropping dropout{};
  if constexpr (DROPOUT) dropout = seeded(p.scores);
  if constexpr (DROPOUT && WIDTH <= 64) dropout = once_a_warp(dropout);
  RowVec<16> terms;                                           // PLUS_LINEAR, TERMS_OF_KEYS: what the rows have in common


  const auto start_dq = [&](Part& dq_reg) {
    const u32 before = block.queries.count - 1;
    wait_for<LANES>(block.written, before % 2);               // without it dS is read that other warpgroups have not written
    start_part(dq_reg, block.ds_smem(before), dq_row, PanelTile<TILE_KV, WIDTH>{k_smem.base}, dq_col);
  };
  const auto add_dq = [&](Part& dq_reg) {
    if constexpr (WHOLE_HEADS) OwnSums(p, block, before).add_or_finish(p, block, number, dq_reg, dq_row + warp % 4 * 16, dq_col);
    else add_part(p, block, number, block.queries.count - 1, dq_reg, group, dq_row + warp % 4 * 16, dq_col);
  };
  // Warpgroups in step would all want the tensor cores at once, and then none of them. So the second one begins when the first is half
  // way through its first tile, and they stay apart by themselves.
  const auto begin = [&] {
    if (group > 0) sync_pair(BEGIN + warp % 4);               // without it the first one's arrival is left over
  };
  const auto let_begin = [&] {
    if (group == 0) arrive_pair(BEGIN + warp % 4);            // without it the second one waits for ever
  };
  // One query tile. Beneath it runs what the tile before it, if there was one, has left to do: dQ, for which all warpgroups' dS are needed.
  const auto step = [&](const bool follows) {
    const QueryTile q_smem = block.queries.tile(), do_smem = block.douts.tile();
    const int row0 = block.row0 + own_row;
    int col0 = block.now.tile * TILE_Q;                       // TILE_LIST: not yet
    Acc<16, TILE_Q> s_reg, dp_reg;
    OperandA<16> p_reg[TILE_Q / 16], factor_reg[TILE_Q / 16], ds_reg[TILE_Q / 16];
    Part dq_reg;

    consumer_wait(block.queries);                             // without it the product reads queries that have not arrived
    if (DELTA_AHEAD) consumer_wait(block.douts);              // without it the product reads gradients that have not arrived
    if (DELTA_AHEAD) fill_rows(dp_reg, block.delta_smem());
    start_product_transposed(s_reg, k_smem, group_row, q_smem);
    if (PERSISTENT && !follows) consumer_wait(block.values);  // without it the product reads values that have not arrived
    if (!DELTA_AHEAD) consumer_wait(block.douts);             // without it the product reads gradients that have not arrived
    start_product_transposed(dp_reg, v_smem, group_row, do_smem, DELTA_AHEAD);
    if constexpr (TILE_LIST) block.hear_tile(), col0 = block.now.tile * TILE_Q; // beneath both products
    KeptHalves<TILE_Q / 16> kept;
    if constexpr (DROPOUT) draw(kept, dropout, block.here.batch_number * p.heads + block.now.head, row0, col0);
    PairArrays<16, TILE_Q> arrays;
    bool anew = false;                                        // whether the head is another one
    if constexpr (ASKED_AHEAD) {
      anew = find_terms(of_head, head_of, p, block);
      load<true>(arrays, context_of_head(p, block, of_head), block.queries.tile(), own_row, row0, col0, !block.is_whole);
    }
    wait_for_products<1>(s_reg);                              // without it scores are read that do not exist yet
    const bool masked = !PAIR_BITS && !common.contains(col0, TILE_Q), ask_pairs = !TILE_LIST || !block.is_whole;
    if (EXPLICIT_SCORES) scale_scores(s_reg, p);
    if constexpr (MODIFIED) {
      if constexpr (!ASKED_AHEAD) anew = find_terms(of_head, head_of, p, block);
      const ScoreContext x = context_of_head(p, block, of_head);
      if (TERMS_OF_KEYS && (!KEEPS_TERMS || HAS_KEY_TERM || anew)) terms_of_keys(terms, x, not_ahead(block.row0) + own_row);
      if (TERMS_OF_KEYS) add_to_rows(s_reg, terms);
      if constexpr (!ASKED_AHEAD) load<true>(arrays, x, block.queries.tile(), own_row, row0, col0, ask_pairs);
      modify_scores<true>(s_reg, arrays, x, row0, col0, ask_pairs);
      if (BENDS && bend_of_tile(p, block) == ACROSS) bend_scores<true>(s_reg, x, not_ahead(row0), not_ahead(col0));
      if (SCORES == PLUS_LINEAR) terms_of_rows<true>(terms, s_reg, x, not_ahead(block.row0) + own_row, col0, BENDS ? bend_of_tile(p, block) : BEFORE);
    }
    if (masked) apply_mask(s_reg, mask_again(block), row0, col0, masked_score(of_head));
    probabilities(s_reg, p_reg, factor_reg, block.lse_smem(), EXPLICIT_SCORES ? 1.f : scale_of_head(p.scale * LOG2E, of_head), p.per_softcap, terms, 1.f, kept);
    if (!follows && !LATE) let_begin();
    start_product(dv_reg, p_reg, do_smem);
    const bool early = follows && EARLY;
    if (early) start_dq(dq_reg);
    if (early) wait_for_products<2>(dp_reg);                  // without it dP is read that does not exist yet
    else wait_for_products<1>(dp_reg);                        // the same: here no product of dQ runs
    if (!follows && LATE) let_begin();
    if (PAIR_BITS && ask_pairs) mask_pairs(dp_reg, arrays.taking_part, 0.f);
    if (masked) apply_mask(dp_reg, mask_again(block), row0, col0, 0.f);   // 0 times whatever dP was may be NaN
    if constexpr (DROPOUT) drop(dp_reg, kept), scale(dp_reg, dropout.scale);
    score_gradients<!DELTA_AHEAD>(ds_reg, EXPLICIT_SCORES || DROPOUT ? factor_reg : p_reg, dp_reg, block.delta_smem(), of_head.factor, !PAIR_BITS && ask_pairs);
    if (follows && !early) start_dq(dq_reg);
    store_transposed(block.ds_smem(block.queries.count), ds_reg, TMA_REDUCE_DQ ? not_ahead(own_row) : own_row);
    fence_proxy_async();                                      // without it the product does not see what lanes have stored
    start_product(dk_reg, ds_reg, q_smem);
    if (follows) wait_for_products<1>(dq_reg);                // without it sums are added that do not exist yet
    arrive_at<LANES>(block.written);                          // without it the other warpgroup waits for ever. Not earlier: of dS there are two,
                                                              // and the other one has been multiplied by now
    if (follows) add_dq(dq_reg);
    wait_for_products<0>(dk_reg);                             // without it the producer overwrites what the product reads
    wait_for_products<0>(dv_reg);                             // the same for dO
    consumer_release(block.queries);                          // without it the producer waits for ever
    block.douts.advance();
    number = TILE_LIST ? block.number : block.accum_number(p);
    if constexpr (WHOLE_HEADS) before = block.now;
    block.go_on(p);
  };

  // dV leaves beneath the last dQ, and dK by the same rows when these have left.
  if constexpr (PERSISTENT) {
    #pragma unroll 1
    while (block.hear_keys(p)) {
      if constexpr (STAGES_KV > 1) k_smem = block.keys.tile(), v_smem = block.values.tile();
      if constexpr (WHOLE_HEADS) common = unmasked_queries(block.mask, block.row0 + own_row, 16);
      if (block.steps > 0) {
        block.douts.count = block.queries.count;              // as it is: the compiler then has one of them in registers
        head_of = -1;
        consumer_wait(block.keys);                            // without it the products read keys that have not arrived
        begin();
        step(false);
        #pragma unroll 1
        for (int i = 1; i < block.steps; ++i) step(true);
        block.hear_place(p);
        if constexpr (DROPOUT) scale(dv_reg, dropout.scale);
        scale(dk_reg, scale_of_sums(p, of_head));
        Part dq_reg;
        start_dq(dq_reg);                                     // all warps have dP of the last step, and read values no more
        store_gradient(p, block, p.dv_map, true, p.dv_accum, v_smem, dv_reg, own_row);
        wait_for_products<0>(dq_reg);                         // without it sums are added that do not exist yet
        consumer_release(block.keys);                         // without it the producer waits for ever
        add_dq(dq_reg);
        wait_for_stores();                                    // without it rows of dV are overwritten that have not left
        store_gradient(p, block, p.dk_map, false, p.dk_accum, v_smem, dk_reg, own_row);
        fill(dk_reg, 0.f);
        fill(dv_reg, 0.f);
      } else {                                                // values of the next key tile may be on their way to where rows would leave from
        store_gradient<true>(p, block, p.dv_map, true, p.dv_accum, v_smem, dv_reg, own_row);
        store_gradient<true>(p, block, p.dk_map, false, p.dk_accum, v_smem, dk_reg, own_row);
      }
      arrive_at<LANES>(block.ended_of(block.taken.count));    // without it the block is never counted
      wait_for_stores();                                      // without it values arrive where rows of dK have not left
      if (block.steps > 0) consumer_release(block.values);    // without it the producer waits for ever
      block.taken.advance();
    }
    return;
  }

  if (block.steps > 0) {
    consumer_wait(block.keys);                                // without it the products read keys that have not arrived
    consumer_wait(block.values);                              // the same for values
    if (!TMA_REDUCE_DQ) wait_for<LANES>(block.cleared, 0);    // without it sums are added to those of another head
    begin();
    step(false);
    #pragma unroll 1
    for (int i = 1; i < block.steps; ++i) step(true);
    Part dq_reg;
    start_dq(dq_reg);
    wait_for_products<0>(dq_reg);                             // without it sums are added that do not exist yet
    add_dq(dq_reg);
  }

  if (!TMA_REDUCE_DQ) arrive_at<LANES>(block.ended);          // without it the block is never counted
  sync_last<4 * GROUPS>(CONSUMERS);                           // without it gradients overwrite keys that a slower warp still reads
  load_place(block);
  scale(dk_reg, scale_of_sums(p, of_head));
  if constexpr (DROPOUT) scale(dv_reg, dropout.scale);
  store_gradient(p, block, p.dk_map, false, p.dk_accum, k_smem, dk_reg, own_row);
  store_gradient(p, block, p.dv_map, true, p.dv_accum, v_smem, dv_reg, own_row);
  postprocess_heads<Accum>(p, block);
  wait_for_stores();                                          // without it the block, and its shared memory, may end before
}

KERNEL(THREADS, 1) bwd_hopper_postprocess(GRID_CONSTANT HopperBackwardParams p) { postprocess<Accum>(p); }

KERNEL(THREADS, 1) bwd_hopper_sinks(GRID_CONSTANT HopperBackwardParams p) {
  if constexpr (SINKS != NO_SINKS) gradient_of_sink(p, DELTA_SIGN);
}
