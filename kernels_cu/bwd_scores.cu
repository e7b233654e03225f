// bwd_scores.cu -- the gradient of one array that scores read: a bias, ALiBi slopes, or what an expression reads. It runs behind any backward,
// whose lse and delta of each query it reads, and computes S and dP again.
//
//   bwd_scores_clear    sums = 0                          where more than one sum goes to an element
//
//   bwd_scores          a block, or a few, for each unit of elements, say a head's tile of queries i and tile of keys j; where units are many,
//                       a block takes one after the other, and loads the tiles of the next beneath what it computes
//     G = 0
//     for each batch element, head and pair of tiles (i, j) that share the unit
//       S = Q_i K_j^T              dP = dO_i V_j^T
//       P = 2^(L - lse_i),         L being what S becomes
//       G += P o (dP - delta_i) o dL / d element         in registers
//     (VARLEN: i and j are tiles of a sequence, each of its own length. Pairs beyond the end of an axis have read its last element.)
//     rows and columns of G that share an element are added up
//     to the gradient, if the block is the only one of its unit; to partial sums; or to whichever sums a computed index names
//
//   bwd_scores_add      gradient = partial sums, added up in one order; or what each query, key or distance adds to a computed index,
//   bwd_scores_gather   gradient = the sum of these over all that read an element
//   bwd_scores_store    gradient = sums
#include "config.cuh"
#include "params.cuh"
constexpr int PRODUCERS = 0;                                  // warps that only load: none
#include "tile/element_sums.cuh"
#include "tile/mma.cuh"
#include "tile/sequence_sums.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = TILE_Q / WARPS;

using QueryTile = SharedTile<TILE_Q, WIDTH>;                  // of q or dout
using KeyTile = SharedTile<TILE_KV, WIDTH>;                   // of k or v
using WarpTile = SharedTile<WARP_ROWS, WIDTH>;                // rows of one warp in the first

// Shared memory, for each stage: Q, dO, K, V, and lse and delta of the queries; then what warps hand on of rows beyond an array.
constexpr int STATS_BYTES = 2 * TILE_Q * int(sizeof(float));
constexpr int STAGE_BYTES = 2 * QueryTile::bytes + 2 * KeyTile::bytes + STATS_BYTES;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + FOLDED_BYTES;

KERNEL(THREADS, 1) bwd_scores_clear(GRID_CONSTANT ScoreGradientParams p) {
  for_elements(p, [&](i64 i) { write(p.sums + i, 0.f); });
}

KERNEL(THREADS, MIN_BLOCKS) bwd_scores(GRID_CONSTANT ScoreGradientParams p) {
  const int warp_row = warp_id() * WARP_ROWS;

  const SharedAddress smem = shared_memory();
  const auto q_smem = [=](int stage) { return QueryTile{smem + stage * STAGE_BYTES}; };
  const auto do_smem = [=](int stage) { return QueryTile{q_smem(stage).base + QueryTile::bytes}; };
  const auto k_smem = [=](int stage) { return KeyTile{do_smem(stage).base + QueryTile::bytes}; };
  const auto v_smem = [=](int stage) { return KeyTile{k_smem(stage).base + KeyTile::bytes}; };
  const auto stats_smem = [=](int stage) { return v_smem(stage).base + KeyTile::bytes; };

  const auto first_of = [&](u32 part) { return first_pair(p, part / p.splits, part % p.splits); };
  u32 part = block_id(), coming_part = part;
  Cursor now = first_of(part), coming = now;
  const auto load_step = [&](int step) {                      // the pair of tiles that comes next, to the stage of this step
    while (coming.left <= 0 && part_after(coming_part) < p.parts) coming = first_of(coming_part = part_after(coming_part));
    if (coming.left > 0) {
      const int stage = step % STAGES, head_kv = coming.head / p.heads_per_kv;
      const auto& seq = coming.sequence(p);
      const int row0 = seq.q.first() + coming.q_tile * TILE_Q, col0 = seq.kv.first() + coming.kv_tile * TILE_KV;
      load_async<Block>(q_smem(stage), slice(p.q, coming.batch, coming.head, row0, seq.q.end(), p.dim));
      load_async<Block>(do_smem(stage), slice(p.dout, coming.batch, coming.head, row0, seq.q.end(), p.dim_v));
      load_async<Block>(k_smem(stage), slice(p.k, coming.batch, head_kv, col0, seq.kv.end(), p.dim));
      load_async<Block>(v_smem(stage), slice(p.v, coming.batch, head_kv, col0, seq.kv.end(), p.dim_v));
      load_stats_async(stats_smem(stage), p, coming);
      coming.advance(p);
    }
    commit_copies();                                          // also when empty: the wait below counts groups
  };
  for (int step = 0; step < STAGES - 1; ++step) load_step(step);

  Acc<WARP_ROWS, TILE_KV> sum_reg;                            // G
  fill(sum_reg, 0.f);
  Dropping dropout{};
  if constexpr (DROPOUT) dropout = seeded(p.scores);

  #pragma unroll 1
  for (int step = 0;; ++step, now.advance(p)) {
    while (now.left <= 0) {
      if constexpr (!BY_SCORE) end_unit(p, sum_reg, part / p.splits, part % p.splits, warp_row);
      if ((part = part_after(part)) >= p.parts) return;
      now = first_of(part);
      fill(sum_reg, 0.f);
    }
    wait_for_copies<max_of(STAGES - 2, 0)>();                 // without it these tiles are read before this thread's part has arrived
    sync_block();                                             // without it other threads' parts are missing, and the load below overwrites
                                                              // tiles that a slower warp still reads
    load_step(step + STAGES - 1);
    if (STAGES == 1) {
      wait_for_copies<0>();                                   // with one stage nothing arrives ahead: without these two lines the
      sync_block();                                           // tiles just asked for are read before they are there
    }

    const int stage = step % STAGES, row0 = now.q_tile * TILE_Q + warp_row, col0 = now.kv_tile * TILE_KV;
    const auto& seq = now.sequence(p);
    const Mask mask = mask_of(seq);
    const u32 batch_number = now.batch_number(p);
    struct { const int (&batch)[BATCH_AXES]; u32 batch_number; } here{now.batch, batch_number};
    const ScoreContext x = score_context(p, here, now.head, seq.q.len(), seq.kv.len());
    PairArrays<WARP_ROWS, TILE_KV> pairs_reg;                 // a bias or a mask, on its way beneath the products
    if constexpr (SCORES != EXPRESSION) load<false>(pairs_reg, x, row0, col0);
    Acc<WARP_ROWS, TILE_KV> s_reg, dp_reg;
    multiply_transposed(s_reg, RowsInShared<WARP_ROWS, WIDTH>(WarpTile{q_smem(stage).base + warp_row * QueryTile::row_bytes}), k_smem(stage));
    if (EXPLICIT_SCORES) scale_scores(s_reg, p.scale, p.softcap);
    multiply_transposed(dp_reg, RowsInShared<WARP_ROWS, WIDTH>(WarpTile{do_smem(stage).base + warp_row * QueryTile::row_bytes}), v_smem(stage));
    if constexpr (DROPOUT) {
      KeptPairs<false, WARP_ROWS, TILE_KV> kept;
      draw(kept, dropout, batch_number * p.heads + now.head, row0, col0);
      drop(dp_reg, kept), scale(dp_reg, dropout.scale);
    }

    RowVec<WARP_ROWS> lse_reg, delta_reg;
    load_rows(lse_reg, stats_smem(stage), warp_row);
    load_rows(delta_reg, stats_smem(stage) + TILE_Q * 4, warp_row, p.delta_sign);
    auto& gradient_reg = dp_reg;                              // dP becomes what is added to G
    if constexpr (SCORES != EXPRESSION) modify_scores<false>(s_reg, pairs_reg, x, row0, col0);
    if constexpr (SCORES == PLUS_LINEAR) {                    // lse as the backward left it, and without the rows' part of the term
      RowVec<WARP_ROWS> terms_reg;
      terms_of_rows<false>(terms_reg, s_reg, x, row0, col0);
      make_whole(lse_reg, terms_reg, x, row0, int(p.stats_rows_divmod.divisor));
    }
    gradients_of_reads(gradient_reg, s_reg, lse_reg, delta_reg, x, row0, col0, exponent_scale(p.scale));
    if (row0 + WARP_ROWS > seq.q.len() || !unmasked_keys(mask, row0, WARP_ROWS).contains(col0, TILE_KV))
      apply_mask(gradient_reg, ExistingPairs{mask, seq.q.len()}, row0, col0, 0.f);
    if constexpr (CLAMPED) fold(gradient_reg, smem + STAGES * STAGE_BYTES, p, now, warp_row);
    if constexpr (BY_SCORE) scatter_by_score(p.sums, gradient_reg, s_reg, x, row0, col0);
    else add(sum_reg, gradient_reg);
  }
}

KERNEL(THREADS, 1) bwd_scores_add(GRID_CONSTANT ScoreGradientParams p) {
  if constexpr (OF_DISTANCE) add_diagonals(p);
  else if constexpr (OF_QUERY && OF_KEY && !SCATTERED) add_partials_of_pairs(p);
  else if constexpr (!SCATTERED) add_partials(p);
}

KERNEL(THREADS, 1) bwd_scores_gather(GRID_CONSTANT ScoreGradientParams p) {
  if constexpr (GATHERED) gather(p);
}

KERNEL(THREADS, 1) bwd_scores_store(GRID_CONSTANT ScoreGradientParams p) {
  for_elements(p, [&](i64 i) { write(static_cast<GradientElement*>(p.gradient.data) + i, read(p.sums + i)); });
}
