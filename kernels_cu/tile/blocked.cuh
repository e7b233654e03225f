// blocked.cuh -- tiles that pass from the accumulators of some warps to the operands of others, through shared memory.
#pragma once
#include "tile/shared.cuh"

struct alignas(16) Moved { u32 words[4]; };

// ROWS x COLS elements as 16 x 16 blocks, each of four 8 x 8 quarters in the order of an accumulator's registers: top left, bottom
// left, top right, bottom right. A quarter is 8 rows of 8 elements without gaps, which is what a warp stores of it at once and what
// ldmatrix reads of it at once: no bank conflicts, and constant distances between the addresses of a lane.
template <int ROWS, int COLS> struct BlockedTile {
  static constexpr int size = int(sizeof(Element));
  static constexpr int bytes = ROWS * COLS * size;
  SharedAddress base;
  static OP constexpr int offset(int row0, int col0) { return (row0 / 16 * (COLS / 16) + col0 / 16) * 256 * size; }
};

// Writes the four words that each lane holds of a 16 x 16 block in half precision.
OP void store_block(SharedAddress block, int lane, const Moved& moved) {
#if ON_GPU
  if constexpr (ARCH >= 90) return stmatrix_x4(block + lane * 16, moved.words);
  else
#endif
    #pragma unroll
    for (int i = 0; i < 4; ++i) store_shared(block + i * 128 + lane * 4, moved.words[i]);
}

// These words from the eight sums of a lane.
template <typename T = Element> OP Moved pack_block(const float* x) {
  Moved moved;
  #pragma unroll
  for (int i = 0; i < 4; ++i) moved.words[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  return moved;
}

// tile = acc, rounded to the element type, in memory that belongs to the warp
template <int ROWS, int COLS> OP void store(BlockedTile<ROWS, COLS> tile, const Acc<ROWS, COLS>& acc) {
  sync_warp();                                                // without it a lane overwrites what its neighbours still read there
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; r += 8) {
      const SharedAddress block = tile.base + tile.offset(r / acc.per_16_rows * 16, r % acc.per_16_rows / 8 * 16);
      if constexpr (FAMILY == HALVES) {
        store_block(block, l, pack_block(&acc.at(l, r)));
      } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i) store_shared(block + i * 256 + l * 8, Pair{acc.at(l, r + 2 * i), acc.at(l, r + 2 * i + 1)});
      }
    }
  }
}

// a = tile[k0 : k0 + STEP_K, m0 : m0 + M] transposed.
// In the tf32 family inner index t stands for row 2 t and t + 4 for row 2 t + 1, as in the B operand that it meets.
template <int M, int ROWS, int COLS> OP void load_transposed(OperandA<M>& a, BlockedTile<ROWS, COLS> tile, int m0, int k0) {
  const SharedAddress first = tile.base + tile.offset(0, m0);
  #pragma unroll
  for (int m = 0; m < M; m += 16) {
    const SharedAddress block = first + tile.offset(k0, m);
    if constexpr (FAMILY == HALVES) {
      ldmatrix_trans(a, m / 4, [=](int l) { return block + (l / 8 % 2 * 2 + l / 16) * 128 + l % 8 * 16; });
    } else {
      for_lane(l) {
        #pragma unroll
        for (int r = 0; r < a.regs_per_16_rows; ++r) {
          const int k = k0 % 16 + (FAMILY == TF32 ? l % 4 * 2 + r / 2 : a.k(l, r)), below = a.row(l, r) / 8;
          const SharedAddress element = block + (below * 2 + k / 8) * 256 + k % 8 * 32 + l / 4 * 4;
          if constexpr (FAMILY == TF32) a.at(l, m / 4 + r) = load_shared<u32>(element);
          else a.at(l, m + r) = load_shared_here(element);
        }
      }
    }
  }
}

// One M x N fragment passed from a warp to another, in the element type and in the order of registers: each lane of the second warp
// finds there what the same lane of the first held.
template <int M, int N> struct PassedTile {
  static constexpr int per_move = 16 / sizeof(Element);
  SharedAddress base;
  OP SharedAddress at(int lane, int r) const { return base + (r / per_move * 32 + lane) * 16; }
};
template <typename T = Element> OP Moved pack_moved(const float* x) {
  if constexpr (sizeof(T) == 2) return pack_block<T>(x);
  else return {{float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])}};
}
template <typename T = Element> OP float unpack_moved(const Moved& moved, int i) {
  if constexpr (sizeof(T) == 2) return unpack<T>(moved.words[i / 2], i % 2);
  else return bits_float(moved.words[i]);
}
