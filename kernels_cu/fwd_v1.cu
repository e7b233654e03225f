// fwd_v1.cu -- FlashAttention, forward (Dao, Fu, Ermon, Rudra, Re, 2022, Algorithm 1): outer loop over key-value tiles, inner loop over
// query tiles. To be read beside fwd_v2.cu, which turns the loops around.
//
//   one block per Q_TILES query tiles of a head; blocks share no row, so none waits for another. One warp per TILE_Q / WARPS rows of
//   each tile. O, l and m of all rows are in device memory:
//     O = 0,  l = 0,  m = -inf
//     for each key-value tile j:
//       load K_j, V_j
//       for each query tile i that sees one of these keys:
//         load Q_i, O_i, l_i, m_i
//         S = Q_i K_j^T                         masked where the mask or the end of the keys cuts the tile
//         m' = max(m_i, rowmax S)
//         P = 2^(S - m')                        scores in units of log 2, softmax scale included
//         l' = 2^(m_i - m') l_i + rowsum P
//         store O_i = (2^(m_i - m') l_i O_i + P V_j) / l',  l_i = l',  m_i = m'
//     out = O,  lse = m + log l
//
// Keys are read once and queries and results once for each key tile: Theta(n^2 d^2 / M) words with M words of shared memory, where
// fwd_v2 reads keys again for each query tile but writes each result once.
#include "config.cuh"
#include "params.cuh"
#include "tile/copy.cuh"
#include "tile/mask.cuh"
#include "tile/mma.cuh"
#include "tile/scheduler.cuh"
#include "tile/sinks.cuh"
#include "tile/softcap.cuh"
#include "tile/softmax.cuh"
#include "tile/accum.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = TILE_Q / WARPS;

using QueryTile = SharedTile<WARP_ROWS, WIDTH>;
using OutTile = SharedTile<WARP_ROWS, WIDTH_V>;
using KeyTile = SharedTile<TILE_KV, WIDTH>;
using ValueTile = SharedTile<TILE_KV, WIDTH_V>;
using Queries = Choose<Q_IN_REGISTERS, RowsInRegisters<WARP_ROWS, WIDTH>, RowsInShared<WARP_ROWS, WIDTH>>;
using OutAccum = AccumTile<TILE_Q, WIDTH_V>;

// Shared memory: one region per warp for its rows of Q and, at the end, of out; then K; then V.
constexpr int WARP_BYTES = max_of(QueryTile::bytes, OutTile::bytes);
constexpr int K_OFFSET = WARPS * WARP_BYTES;
constexpr int V_OFFSET = K_OFFSET + KeyTile::bytes;
constexpr int SHARED_BYTES = V_OFFSET + ValueTile::bytes;

// In device memory, for each query tile: O, then m and l of its rows. A warp reads and writes its own rows only.
constexpr int M_OFFSET = OutAccum::size;
constexpr int L_OFFSET = M_OFFSET + TILE_Q;
constexpr int STATE_SIZE = L_OFFSET + TILE_Q;

using Softmax = OnlineSoftmax<WARP_ROWS>;
using Out = Acc<WARP_ROWS, WIDTH_V>;

OP void load_state(Softmax& softmax, Out& o_reg, float* state) {
  const int row = warp_id() * WARP_ROWS;
  RowVec<WARP_ROWS> max, sum;
  load(o_reg, OutAccum{state}, row, 0);
  load(max, state + M_OFFSET + row);
  load(sum, state + L_OFFSET + row);
  resume(softmax, o_reg, max, sum);
}
OP void store_state(float* state, Softmax& softmax, Out& o_reg) {
  const int row = warp_id() * WARP_ROWS;
  RowVec<WARP_ROWS> max, sum;
  pause(softmax, o_reg, max, sum);
  store(OutAccum{state}, o_reg, row, 0);
  store(state + M_OFFSET + row, 1, WARP_ROWS, max);
  store(state + L_OFFSET + row, 1, WARP_ROWS, sum);
}

KERNEL(THREADS, MIN_BLOCKS) fwd_v1(GRID_CONSTANT ForwardParams p) {
  const BlockCoord here = block_coord(p.batch, p.heads, p.len_q, Q_TILES * TILE_Q);
  const int rows = min_of(Q_TILES * TILE_Q, p.len_q - here.row), query_tiles = ceil_div(rows, TILE_Q);
  const i64 first_number = (i64(here.batch_number) * p.heads + here.head) * ceil_div(p.len_q, TILE_Q) + here.row / TILE_Q;
  float* const state = p.state + first_number * STATE_SIZE;
  const GlobalTile q = slice(p.q, here.batch, here.head, here.row + warp_id() * WARP_ROWS, p.len_q, p.dim);

  const SharedAddress smem = shared_memory();
  const QueryTile q_smem{smem + warp_id() * WARP_BYTES};
  const OutTile out_smem{smem + warp_id() * WARP_BYTES};
  const KeyTile k_smem{smem + K_OFFSET};
  const ValueTile v_smem{smem + V_OFFSET};

  const Mask mask{p.mask, p.len_kv};
  const ColumnRange block_keys = visible_keys(mask, here.row, rows);

  #pragma unroll 1
  for (int i = 0; i < query_tiles; ++i) {
    Softmax softmax;
    Out o_reg;
    fill(o_reg, 0.f);
    if constexpr (SINKS != NO_SINKS) start_with_sinks(softmax, p, mask, here.head, here.row + i * TILE_Q + warp_id() * WARP_ROWS);
    store_state(state + i * STATE_SIZE, softmax, o_reg);
  }

  #pragma unroll 1
  for (int col0 = block_keys.first / TILE_KV * TILE_KV; col0 <= block_keys.last; col0 += TILE_KV) {
    sync_block();                                             // without it K and V are overwritten while a slower warp still reads them
    const BlockCoord coord = block_coord(p.batch, p.heads, p.len_q, Q_TILES * TILE_Q);   // again, instead of keeping it in registers
    load_async<Block>(k_smem, slice(p.k, coord.batch, coord.head / p.heads_per_kv, col0, p.len_kv, p.dim));
    load_async<Block>(v_smem, slice(p.v, coord.batch, coord.head / p.heads_per_kv, col0, p.len_kv, p.dim_v));
    commit_copies();
    wait_for_copies<0>();                                     // without it this tile is read before this thread's part has arrived
    sync_block();                                             // without it other threads' parts are missing

    #pragma unroll 1
    for (int i = 0; i < query_tiles; ++i) {
      const int warp_row = here.row + i * TILE_Q + warp_id() * WARP_ROWS;
      if (!visible_keys(mask, warp_row, WARP_ROWS).overlaps(col0, TILE_KV)) continue;
      Softmax softmax;
      Out o_reg;
      load_state(softmax, o_reg, state + i * STATE_SIZE);
      load_async<Warp>(q_smem, q.from_row(i * TILE_Q));
      commit_copies();
      wait_for_copies<0>();                                   // without it Q is read before it has arrived
      sync_warp();                                            // without it a lane reads rows that its neighbours have not finished

      Acc<WARP_ROWS, TILE_KV> s_reg;
      multiply_transposed(s_reg, Queries(q_smem), k_smem);
      if (EXPLICIT_SCORES) scale_scores(s_reg, p);
      if (!unmasked_keys(mask, warp_row, WARP_ROWS).contains(col0, TILE_KV)) apply_mask(s_reg, mask, warp_row, col0);
      update(softmax, s_reg, o_reg, EXPLICIT_SCORES ? 1.f : p.scale * LOG2E);
      multiply_add(o_reg, s_reg, v_smem);
      store_state(state + i * STATE_SIZE, softmax, o_reg);
    }
  }

  #pragma unroll 1
  for (int i = 0; i < query_tiles; ++i) {
    const int warp_row = here.row + i * TILE_Q + warp_id() * WARP_ROWS;
    Softmax softmax;
    Out o_reg;
    RowVec<WARP_ROWS> lse;
    load_state(softmax, o_reg, state + i * STATE_SIZE);
    finalize(softmax, o_reg, lse);
    store(out_smem, o_reg);
    sync_warp();                                              // without it a lane sends rows that its neighbours have not written
    const BlockCoord coord = block_coord(p.batch, p.heads, p.len_q, Q_TILES * TILE_Q);   // again
    const GlobalTile out = slice(p.out, coord.batch, coord.head, warp_row, p.len_q, p.dim_v);
    store<Warp>(out, out_smem);
    if (p.lse.data) store(row_slice(p.lse, coord.batch, coord.head, warp_row), p.lse.row_stride, out.rows, lse);
  }
}
