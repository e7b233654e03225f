// fwd_v2.cu -- FlashAttention-2, forward (Dao, 2023, Algorithm 1): outer loop over query tiles, inner loop over key-value tiles.
//
//   fwd_v2_schedule    VARLEN: the query tiles of sequences of their own lengths, unless SPLIT_KV
//
//   fwd_v2             one block per query tile Q_i, one warp per TILE_Q / WARPS of its rows:
//     O = 0,  m = -inf,  l = 0                  SINKS: m and l of the sinks, which have no values
//     for each key-value tile j that a row of the block may see:      TILE_LIST: and of which it sees a key
//       S = Q_i K_j^T                           masked where the mask or the end of the keys cuts the tile; SCORES: and what they say
//       m' = max(m, rowmax S)
//       P = 2^(S - m')                          scores in units of log 2, softmax scale included
//       l = 2^(m - m') l + rowsum P
//       O = 2^(m - m') O + P V_j                DROPOUT: of P what is not dropped, times what keeps the mean
//       m = m'
//     out_i = O / l,  lse_i = m + log l         each written once; S and P exist in registers only
//
// WARPS_KV above 1: the rows are so few that each warp has all of them, and keys of its own of each tile; at the end their O, m and l are merged.
// SPLIT_KV: blocks share a query tile, each with some of its keys, and the last one to end combines what they have, or fwd_v2_combine does.
// K and V tiles pass through STAGES: while one is used, the next ones arrive.
#include "config.cuh"
#include "params.cuh"
#include "tile/copy.cuh"
#include "tile/key_warps.cuh"
#include "tile/mask.cuh"
#include "tile/mma.cuh"
#include "tile/schedule.cuh"
#include "tile/scheduler.cuh"
#include "tile/score.cuh"
#include "tile/sequence.cuh"
#include "tile/sinks.cuh"
#include "tile/softcap.cuh"
#include "tile/softmax.cuh"
#include "tile/split.cuh"
#include "tile/tile_list.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = TILE_Q * WARPS_KV / WARPS;
constexpr int WARP_KEYS = TILE_KV / WARPS_KV;                 // of each key tile
static_assert(WARPS_KV == 1 || (WARPS_KV == WARPS && STAGES > 1 && !DROPOUT), "pairs are drawn of whole tiles");

using QueryTile = SharedTile<WARP_ROWS, WIDTH>;
using OutTile = SharedTile<WARP_ROWS, WIDTH_V>;
using KeyTile = SharedTile<WARP_KEYS, WIDTH>;
using ValueTile = SharedTile<WARP_KEYS, WIDTH_V>;
using Queries = Choose<Q_IN_REGISTERS, RowsInRegisters<WARP_ROWS, WIDTH>, RowsInShared<WARP_ROWS, WIDTH>>;

// Shared memory: one region per warp for its rows of Q and, at the end, of out; then STAGES of K, then STAGES of V.
// A warp with keys of its own has all of this by itself, and so waits for no other one before the end.
constexpr int WARP_BYTES = max_of(QueryTile::bytes, OutTile::bytes);
constexpr int K_OFFSET = WARPS / WARPS_KV * WARP_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * KeyTile::bytes;
constexpr int REGION_BYTES = V_OFFSET + STAGES * ValueTile::bytes;
constexpr int SHARED_BYTES = WARPS_KV * REGION_BYTES;
static_assert(WARPS_KV == 1 || REGION_BYTES >= WARP_STATE_BYTES, "what a warp leaves takes the place of its queries, keys and values");

// Number of a warp among those that have rows of their own, and among those that have keys of their own.
OP int row_warp() {
  if constexpr (WARPS_KV == 1) return warp_id();
  else return 0;
}
OP int key_warp() {
  if constexpr (WARPS_KV == 1) return 0;
  else return warp_id();
}
OP SharedAddress region_of(int key_warp) {
  if constexpr (WARPS_KV == 1) return shared_memory();
  else return shared_memory() + key_warp * REGION_BYTES;
}
// of a key tile, the first key that the warp sees
OP int first_key(int tile, int key_warp) {
  if constexpr (WARPS_KV == 1) return tile * TILE_KV;
  else return tile * TILE_KV + key_warp * WARP_KEYS;
}

// Before: the query tiles of sequences.
KERNEL(THREADS, 1) fwd_v2_schedule(GRID_CONSTANT ForwardParams p) {
  if constexpr (SCHEDULED) schedule_queries(p);
}

KERNEL(THREADS, MIN_BLOCKS) fwd_v2(GRID_CONSTANT ForwardParams p) {
  const BlockCoord here = query_tile_coord(p, SPLIT_KV ? tile_of_block(p) : block_id());
  if (VARLEN && here.row < 0) return;                         // there are fewer tiles than there is room for
  const auto seq = sequence_of(p, here.batch_number);
  const int head_kv = here.head / p.heads_per_kv;
  const int warp_row = here.row + row_warp() * WARP_ROWS;

  const int warp_kv = key_warp();
  const SharedAddress smem = region_of(warp_kv);
  const QueryTile q_smem{smem + row_warp() * WARP_BYTES};
  const OutTile out_smem{smem + row_warp() * WARP_BYTES};
  // Before it is known how many keys there are, which takes a while to read.
  if constexpr (WARPS_KV > 1) load_async<Warp>(q_smem, slice(p.q, here.batch, here.head, seq.q.first() + warp_row, seq.q.end(), p.dim));

  const Mask mask{seq.mask(), seq.kv.len()};
  const ColumnRange block_keys = visible_keys(mask, here.row, min_of(TILE_Q, seq.q.len() - here.row));
  const ColumnRange warp_keys = visible_keys(mask, warp_row, WARP_ROWS);
  const ColumnRange common_keys = unmasked_keys(mask, warp_row, WARP_ROWS);
  int first_tile = block_keys.first / TILE_KV;
  int tiles = block_keys.last < block_keys.first ? 0 : block_keys.last / TILE_KV + 1 - first_tile;
  if (VARLEN && here.row >= seq.q.len()) tiles = 0;
  bool is_whole = true;                                       // SPLIT_KV: the block computes all of its query tile
  KeySplits splits{};
  if constexpr (SPLIT_KV) {
    splits = splits_of_keys(p, seq.kv.len(), block_keys);
    const int split = splits.first + split_of_block(p);       // what no row sees is no split, and has no block
    is_whole = splits.is_one() || here.row >= seq.q.len();
    if (is_whole ? split > splits.first : split > splits.last) return;
    if (!is_whole) {
      const int end = min_of(first_tile + tiles, (split + 1) * (splits.keys / TILE_KV));
      first_tile = max_of(first_tile, split * (splits.keys / TILE_KV));
      tiles = end - first_tile;
    }
  }
  const int end_tile = first_tile + tiles;
  TileList list{};
  if constexpr (TILE_LIST) {
    list = list_of_queries(p, here.batch_number, here.head, here.row / TILE_Q);
    tiles = list.count(first_tile, end_tile);
  }
  // The place of tile 0, 1, ... of those the block visits, which are asked for one after the other.
  const auto place_of_tile = [&](int tile, int& after) {
    if constexpr (!TILE_LIST) return first_tile + tile;
    const int place = list.next(after, end_tile);
    after = place + 1;
    return place;
  };
  int after_loaded = first_tile, after_used = first_tile;     // TILE_LIST: where the next one is looked for

  int batch_kv[BATCH_AXES];
  batch_of_keys(batch_kv, p, here);
  const KeySlice k = key_slice(p, p.k, batch_kv, head_kv, seq, here.batch_number, p.dim);
  const KeySlice v = key_slice(p, p.v, batch_kv, head_kv, seq, here.batch_number, p.dim_v);
  [[maybe_unused]] Regs<int, 1> pages;                        // of the keys of a warp, see load_own
  const auto load_kv = [&](int tile) {                        // tile 0, 1, ... to its stage
    if (tile < tiles) {
      const int col0 = first_key(place_of_tile(tile, after_loaded), warp_kv), stage = tile % STAGES;
      const KeyTile k_smem{smem + K_OFFSET + stage * KeyTile::bytes};
      const ValueTile v_smem{smem + V_OFFSET + stage * ValueTile::bytes};
      if constexpr (WARPS_KV > 1) {
        load_own(k_smem, v_smem, k, v, col0, tile, pages);
      } else {
        load_async<Block>(k_smem, k.from_row(col0));
        load_async<Block>(v_smem, v.from_row(col0));
      }
    }
    commit_copies();                                          // also when empty: the wait below counts groups
  };

  if (WARPS_KV == 1 && tiles > 0) load_async<Warp>(q_smem, slice(p.q, here.batch, here.head, seq.q.first() + warp_row, seq.q.end(), p.dim));
  if constexpr (WARPS_KV > 1) {                               // keys are on their way while it waits for Q
    commit_copies();
    #pragma unroll 1
    for (int tile = 0; tile < STAGES - 1; ++tile) load_kv(tile);
  }
  if (Q_IN_REGISTERS) {
    if (WARPS_KV == 1) commit_copies();
    wait_for_copies<WARPS_KV == 1 ? 0 : STAGES - 1>();        // without it Q is read before it has arrived
    sync_warp();                                              // without it a lane reads rows that its neighbours have not finished
  }
  const Queries q(q_smem);
  if constexpr (WARPS_KV == 1)
    for (int tile = 0; tile < STAGES - 1; ++tile) load_kv(tile);

  Acc<WARP_ROWS, WIDTH_V> o_reg;
  fill(o_reg, 0.f);
  OnlineSoftmax<WARP_ROWS> softmax;
  if constexpr (SINKS != NO_SINKS)
    if (is_whole && warp_kv == 0) start_with_sinks(softmax, p, mask, here.head, warp_row);   // of splits, when they are combined
  HeadTerms terms{};
  PackedRows<WARP_ROWS> rows;                                 // PACK_GQA: what each row has, of a head of its own
  if constexpr (MODIFIED && PACK_GQA) find_rows(rows, p, here, mask, seq.kv.len(), warp_row);
  else if constexpr (MODIFIED) terms = head_terms(p, here, here.head, seq.q.len(), seq.kv.len());
  Dropping dropout{};
  if constexpr (DROPOUT) dropout = seeded(p.scores);

  #pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_copies<max_of(STAGES - 2, 0)>();                 // without it this tile is read before this thread's part has arrived
    if constexpr (WARPS_KV > 1) sync_warp();                  // without it parts of other lanes are missing
    else sync_block();                                        // without it other threads' parts are missing, and the load below
                                                              // overwrites a tile that a slower warp still reads
    load_kv(tile + STAGES - 1);
    if (STAGES == 1) {
      wait_for_copies<0>();                                   // with one stage nothing arrives ahead: without these two lines the
      sync_block();                                           // tile just asked for is read before it is there
    }

    const int place = place_of_tile(tile, after_used), col0 = first_key(place, warp_kv), stage = tile % STAGES;
    if (!warp_keys.overlaps(col0, WARP_KEYS)) continue;       // other warps of the block see this tile, this one does not
    if (VARLEN && warp_row >= seq.q.len()) continue;          // it only loads
    const KeyTile k_smem{smem + K_OFFSET + stage * KeyTile::bytes};
    const ValueTile v_smem{smem + V_OFFSET + stage * ValueTile::bytes};

    Acc<WARP_ROWS, WARP_KEYS> s_reg;
    multiply_transposed(s_reg, q, k_smem);
    if (EXPLICIT_SCORES) scale_scores(s_reg, p);
    if constexpr (MODIFIED && PACK_GQA) {
      PairArrays<WARP_ROWS, WARP_KEYS> arrays;
      load_packed(arrays, rows, seq.kv.len(), col0);
      modify_packed_scores(s_reg, arrays, rows, p, here, mask, seq.kv.len(), col0, !TILE_LIST || !list.is_whole(place));
    } else if constexpr (MODIFIED)
      modify_scores<false>(s_reg, score_context(p, here, here.head, terms, seq.q.len(), seq.kv.len()), warp_row, col0, !TILE_LIST || !list.is_whole(place));
    if (!common_keys.contains(col0, WARP_KEYS)) apply_mask(s_reg, mask, warp_row, col0);
    update(softmax, s_reg, o_reg, exponent_scale(p.scale));
    if constexpr (DROPOUT) {                                  // of P, when it is in the sums
      KeptPairs<false, WARP_ROWS, WARP_KEYS> kept;
      draw(kept, dropout, here.batch_number * p.heads + here.head, warp_row, col0);
      drop(s_reg, kept);
    }
    multiply_add(o_reg, s_reg, v_smem);
  }

  RowVec<WARP_ROWS> lse;
  finalize(softmax, o_reg, lse);
  if constexpr (DROPOUT) scale(o_reg, dropout.scale);
  if constexpr (WARPS_KV > 1) {
    if constexpr (!Q_IN_REGISTERS) wait_for_copies<0>();      // without it queries that see no key may arrive over their own state
    leave_state(smem, o_reg, lse, seq.q.len() - warp_row);
    sync_block();                                             // without it states of slower warps are missing
    merge_states(p, here, seq, is_whole, REGION_BYTES);
    if constexpr (LAST_COMBINES)
      if (!is_whole) combine_if_last(p, {tile_of_block(p), here, seq, splits});
    return;
  }
  if (!is_whole) {
    const u32 number = partial_number(p, tile_of_block(p), split_of_block(p));
    const int row = warp_id() * WARP_ROWS, rows = seq.q.len() - warp_row;
    store_rows(out_partial(p, number, row), o_reg, rows);
    store(lse_partial(p, number, row), 1, rows, lse);
    if constexpr (LAST_COMBINES) combine_if_last(p, split_query_tile(p, tile_of_block(p)));
    return;
  }
  if (VARLEN) clear_rows(o_reg, lse, seq.q.len() - warp_row);
  if constexpr (!FLOAT32_RESULTS) {
    store(out_smem, o_reg);                                   // over the warp's own queries, which nobody else reads
    sync_warp();                                              // without it a lane sends rows that its neighbours have not written
  }
  const BlockCoord& coord = coord_again(p, here, SPLIT_KV ? tile_of_block(p) : block_id());
  const auto queries = rows_of_sequence<QUERIES>(p, coord.batch_number);
  const int row = VARLEN || SPLIT_KV ? coord.row + warp_id() * WARP_ROWS : warp_row;
  const ResultTile out = slice<Result>(p.out, coord.batch, coord.head, queries.first() + row, queries.end_of_room(), p.dim_v);
  store_result<Warp>(out, out_smem, o_reg);
  if (p.lse.data) store(row_slice(p.lse, coord.batch, coord.head, queries.first() + row), p.lse.row_stride, out.rows, lse);
}

// After: the splits of query tiles become one, unless that has been done.
KERNEL(THREADS, 1) fwd_v2_combine(GRID_CONSTANT ForwardParams p) {
  if constexpr (SPLIT_KV && !LAST_COMBINES) combine_key_splits(p);
}
