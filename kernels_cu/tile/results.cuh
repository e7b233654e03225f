// results.cuh -- results in float32 (FLOAT32_RESULTS): parts of what is put together by others, and rounded then. Lanes store what they hold,
// because tiles in shared memory have elements of 16 bits.
#pragma once
#include "tile/accum.cuh"
#include "tile/copy.cuh"

// to[0 : ELEMENTS] += x, y, which nobody else adds to meanwhile: without waiting for what is there.
template <int ELEMENTS> OP void add_apart(float* to, float x, float y) {
  count_read(ELEMENTS * sizeof(float));
  count_written(ELEMENTS * sizeof(float));
#if ON_GPU
  if constexpr (ELEMENTS == 2 && RED_V4) {
    red_add_v2(to, x, y);
  } else {
    red_add(to, x);
    if (ELEMENTS == 2) red_add(to + 1, y);
  }
#else
  to[0] += x;
  if (ELEMENTS == 2) to[1] += y;
#endif
}

// dst[:, col0 : col0 + N] = acc, clipped to dst, or with ADD_RESULTS, += acc: no two lanes have the same element. A lane writes the two
// neighbours that it has at once, where rows are multiples of them. Lanes stay together, see pipeline.cuh.
template <int = 0, int M, int N> OP void store(const TileOf<float>& dst, const Acc<M, N>& acc, int col0 = 0) {
  constexpr int elements = COPY_BYTES >= 8 ? 2 : 1, bytes = elements * int(sizeof(float));
  #pragma unroll
  for (int n = 0; n < N; n += 8) {
    #pragma unroll
    for (int slot = 0; slot < RowVec<M>::slots; ++slot) {
      for_lane(l) {
        // Kept, addresses would take registers. Which of the two is not, matters to the assembler where few are left.
        const int lane = N > 128 ? not_ahead(l) : l, r = acc.reg(slot, n / 4);
        const int row = N > 128 ? RowVec<M>::row(lane, slot) : not_ahead(RowVec<M>::row(lane, slot));
        #pragma unroll
        for (int i = 0; i < 2; i += elements) {
          const int col = col0 + n + lane % 4 * 2 + i;
          const u32 words[2] = {float_bits(acc.at(l, r + i)), float_bits(acc.at(l, r + 1))};
          const bool exists = row < dst.rows && col < dst.cols;
          if constexpr (ADD_RESULTS) {
            if (exists) add_apart<elements>(dst.at(row, col), bits_float(words[0]), bits_float(words[1]));
            continue;
          }
#if ON_GPU
          st_global_if<bytes>(dst.at(row, col), words, exists);
#else
          if (!exists) continue;
          count_written(bytes);
          std::memcpy(dst.at(row, col), words, bytes);
#endif
        }
      }
    }
  }
  sync_warp();                                                // for the assembler, as where 16 bits are stored
}

// What a warp or block has of a result: a tile in shared memory, or in float32, for which there is no room there, what it has in registers.
template <typename Scope, int ROWS, int WIDTH, int M, int N>
OP void store_result(const ResultTile& dst, SharedTile<ROWS, WIDTH> tile, const Acc<M, N>& acc) {
  if constexpr (FLOAT32_RESULTS) store(dst, acc);
  else store<Scope>(dst, tile);
}
