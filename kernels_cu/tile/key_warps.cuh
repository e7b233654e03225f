// key_warps.cuh -- few rows (WARPS_KV in fwd_v2.cu): the warps of a block have all rows of its query tile and keys of their own, and so a softmax
// and an O of their own, which become one in shared memory as splits do in device memory. They have the order of the warps, and so the same bits.
//
//   m = max of lse_w over the warps;  c_w = e^(lse_w - m)
//   out = sum of c_w out_w / sum of c_w,  lse = m + log sum of c_w
#pragma once
#include "tile/split.cuh"

// The keys that a warp has of a key tile, and their values, on their way: from key `row` on, of tile 0, 1, ... of those that the block visits in a row.
template <int ROWS, int W, int W_V>
OP void load_own(SharedTile<ROWS, W> k_smem, SharedTile<ROWS, W_V> v_smem, const GlobalTile& k, const GlobalTile& v, int row, int, Regs<int, 1>&) {
  load_async<Warp>(k_smem, k.from_row(row));
  load_async<Warp>(v_smem, v.from_row(row));
}
// The same in pages. Where so many keys as a warp has lie in one, a lane finds it for each of 32 tiles, all at the same time (`pages`). Else each
// tile would wait for the table, and each granule for its row.
template <int ROWS, int W, int W_V>
OP void load_own(SharedTile<ROWS, W> k_smem, SharedTile<ROWS, W_V> v_smem, const PagedTile& k, const PagedTile& v, int row, int tile, Regs<int, 1>& pages) {
  if (k.of->page_divmod.divisor % ROWS != 0) {
    load_async<Warp>(k_smem, k.from_row(row));
    load_async<Warp>(v_smem, v.from_row(row));
    return;
  }
  if (tile % 32 == 0) {
    for_lane(l) {
      const int first = row + l * TILE_KV;
      pages.at(l, 0) = first < k.rows ? k.page_of(first) : 0;
    }
  }
  const int page = value_of_lane(pages, tile % 32);
  load_async<Warp>(k_smem, k.in_page(row, page));
  load_async<Warp>(v_smem, v.in_page(row, page));
}

// What a warp leaves, in the place of its queries, keys and values: rows of out, float32, then an lse for each.
constexpr int STATE_ROW_BYTES = WIDTH_V * int(sizeof(float)) + 32;    // four rows that quads store at once then lie in all banks
constexpr int STATE_LSE = TILE_Q * STATE_ROW_BYTES, WARP_STATE_BYTES = STATE_LSE + TILE_Q * int(sizeof(float));

// By each warp, of the rows that exist.
template <int M, int N> OP void leave_state(SharedAddress to, const Acc<M, N>& acc, const RowVec<M>& lse, int rows) {
  sync_warp();                                                // without it a lane overwrites keys that its neighbours still read
  for_lane(l) {
    #pragma unroll
    for (int slot = 0; slot < RowVec<M>::slots; ++slot) {
      const int row = RowVec<M>::row(l, slot);
      if (row >= rows) continue;
      #pragma unroll
      for (int i = 0; i < ColVec<N>::slots; i += 2) {
        const int r = acc.reg(slot, i);
        store_shared(to + row * STATE_ROW_BYTES + acc.col(l, r) * int(sizeof(float)), Pair{acc.at(l, r), acc.at(l, r + 1)});
      }
      if (l % 4 == 0) store_shared(to + STATE_LSE + row * int(sizeof(float)), lse.at(l, slot));
    }
  }
}

// By all warps, when all states have been left, each region of `region` bytes: a row each, for the split of the block or, where it computes all of
// its query tile, for the result.
OP void merge_states(const ForwardParams& p, const BlockCoord& here, const Sequence<ForwardParams>& seq, bool is_whole, int region) {
  typedef Neighbours<float, OF_LANE> Columns;
  const int first = seq.q.first() + here.row, end = is_whole ? seq.q.end_of_room() : seq.q.end();
  const u32 number = SPLIT_KV ? partial_number(p, tile_of_block(p), split_of_block(p)) : 0;
  #pragma unroll 1
  for (int i = warp_id(); i < min_of(TILE_Q, end - first) * COMBINED_ACROSS; i += WARPS) {
    const int row = i / COMBINED_ACROSS, col0 = i % COMBINED_ACROSS * COMBINED_COLS;
    const bool exists = first + row < seq.q.end();
    Regs<float, OF_LANE> out;
    Regs<float, 1> factor, lse;
    for_lane(l) {
      float score[WARPS_KV], max = -infinity(), sum = 0.f;    // in units of log 2
      Columns part[WARPS_KV];
      #pragma unroll
      for (int warp = 0; warp < WARPS_KV; ++warp) {
        const SharedAddress state = shared_memory() + warp * region;
        score[warp] = exists ? load_shared<float>(state + STATE_LSE + row * int(sizeof(float))) * LOG2E : -infinity();
        part[warp] = load_shared<Columns>(state + row * STATE_ROW_BYTES + (col0 + l * OF_LANE) * int(sizeof(float)));
        max = fmaxf(max, score[warp]);
      }
      const float safe = fmaxf(max, LOWEST);
      #pragma unroll
      for (int e = 0; e < OF_LANE; ++e) out.at(l, e) = 0.f;
      #pragma unroll
      for (int warp = 0; warp < WARPS_KV; ++warp) {
        const float weight = exp2_approx(score[warp] - safe);
        sum += weight;
        #pragma unroll
        for (int e = 0; e < OF_LANE; ++e)                     // of a warp with no key that the row sees, whatever it holds is left out
          out.at(l, e) = weight == 0.f ? out.at(l, e) : fmaf(weight, part[warp].x[e], out.at(l, e));
      }
      factor.at(l, 0) = sum == 0.f ? 0.f : reciprocal(sum);
      lse.at(l, 0) = sum == 0.f ? -infinity() : (max + log2_approx(sum)) * LN2;
    }
    if (is_whole) {
      store_row(p, here, first + row, end, col0, out, factor, lse);
      continue;
    }
    for_lane(l) {
      Columns columns;
      #pragma unroll
      for (int e = 0; e < OF_LANE; ++e) columns.x[e] = out.at(l, e) * factor.at(l, 0);
      count_written(sizeof columns);
      *reinterpret_cast<Columns*>(out_partial(p, number, row) + col0 + l * OF_LANE) = columns;
      if (col0 == 0 && l == 0) write(lse_partial(p, number, row), lse.at(l, 0));
    }
  }
}
