// fragment.cuh -- pieces of a matrix held in the registers of one warp, and the map from (lane, register) to (row, column).
// The maps are those of mma.sync (PTX ISA, "Matrix Fragments for mma.m16n8k16" and its siblings). Masks, stores, conversions
// and the host's own matrix product are all written against them.
#pragma once
#include "tile/element.cuh"

// One value per row of an M-row fragment, the same in the four lanes of a quad. Slot s of a lane is row lane / 4 + 8 s.
template <int M> struct RowVec : Regs<float, M / 8> {
  static constexpr int slots = M / 8;
  static OP int row(int lane, int slot) { return lane / 4 + 8 * slot; }
};

// One value per column of an N-column fragment, the same in the eight lanes that share a column pair.
template <int N> struct ColVec : Regs<float, N / 4> {
  static constexpr int slots = N / 4;
  static OP int col(int lane, int slot) { return slot / 2 * 8 + lane % 4 * 2 + slot % 2; }
};

// M x N accumulator in float32.
template <int M, int N> struct Acc : Regs<float, M * N / 32> {
  static constexpr int regs = M * N / 32;
  static constexpr int per_16_rows = N / 2;
  static OP constexpr int slot(int r) { return r / per_16_rows * 2 + r / 2 % 2; }         // index into a RowVec<M>
  static OP constexpr int col_slot(int r) { return r % per_16_rows / 4 * 2 + r % 2; }     // index into a ColVec<N>
  static OP constexpr int reg_col(int r) { return r % per_16_rows / 4 * 8 + r % 2; }      // column of lane 0
  static OP constexpr int reg(int slot, int col_slot) { return slot / 2 * per_16_rows + col_slot / 2 * 4 + slot % 2 * 2 + col_slot % 2; }
  static OP int row(int lane, int r) { return lane / 4 + 8 * slot(r); }
  static OP int col(int lane, int r) { return reg_col(r) + lane % 4 * 2; }
};

template <int M, int N> OP void fill(Acc<M, N>& acc, float x) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) acc.at(l, r) = x;
  }
}
template <int M> OP void fill(RowVec<M>& rows, float x) {
  for_lane(l) {
    #pragma unroll
    for (int s = 0; s < rows.slots; ++s) rows.at(l, s) = x;
  }
}
// the same of rows from `first` on, whatever they hold
template <int M, int N> OP void fill_from(Acc<M, N>& acc, int first, float x) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r)
      if (acc.row(l, r) >= first) acc.at(l, r) = x;
  }
}
template <int M> OP void fill_from(RowVec<M>& rows, int first, float x) {
  for_lane(l) {
    #pragma unroll
    for (int s = 0; s < rows.slots; ++s)
      if (rows.row(l, s) >= first) rows.at(l, s) = x;
  }
}
// x *= factor
template <int M, int N> OP void scale(Acc<M, N>& acc, float factor) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) acc.at(l, r) *= factor;
  }
}
template <int M> OP void scale(RowVec<M>& rows, float factor) {
  for_lane(l) {
    #pragma unroll
    for (int s = 0; s < rows.slots; ++s) rows.at(l, s) *= factor;
  }
}

// The operands of a product come in three families. A step covers STEP_K of the inner extent and STEP_N = 16 columns.
//   halves     float16, bfloat16: two elements a register
//   tf32       float32 on tensor cores: one element a register
//   replicated float32 without tensor cores: each lane holds every operand its own accumulators need
enum Family { HALVES, TF32, REPLICATED };
constexpr Family FAMILY = DTYPE != FLOAT32 ? HALVES : ARCH >= 80 ? TF32 : REPLICATED;
constexpr int STEP_K = FAMILY == HALVES ? 16 : 8;
constexpr int STEP_N = 16;

// M x STEP_K A operand.
template <int M, Family = FAMILY> struct OperandA : Regs<u32, M / 4> {
  static constexpr int regs = M / 4;
  static constexpr int regs_per_16_rows = 4;
  static OP int row(int lane, int r) { return lane / 4 + 8 * (r % 2); }
  static OP int k(int lane, int r) { return FAMILY == HALVES ? lane % 4 * 2 + 8 * (r / 2) : lane % 4 + 4 * (r / 2); }
};
template <int M> struct OperandA<M, REPLICATED> : Regs<float, M> {
  static constexpr int regs = M;
  static constexpr int regs_per_16_rows = 16;
  static OP int row(int lane, int r) { return lane / 4 + 8 * (r / 8); }
  static OP int k(int, int r) { return r % 8; }
};

// STEP_K x STEP_N B operand.
template <Family = FAMILY> struct OperandB : Regs<u32, 4> {
  static constexpr int regs = 4;
  static OP int k(int lane, int r) { return FAMILY == HALVES ? lane % 4 * 2 + 8 * (r % 2) : lane % 4 + 4 * (r % 2); }
  static OP int n(int lane, int r) { return lane / 4 + 8 * (r / 2); }
};
template <> struct OperandB<REPLICATED> : Regs<float, 32> {
  static constexpr int regs = 32;
  static OP int k(int, int r) { return r / 4; }
  static OP int n(int lane, int r) { return lane % 4 * 2 + r % 2 + 8 * (r / 2 % 2); }
};

#if !ON_GPU
// sum += a b. The host spends most of its time here, so four columns are added at once, however little the compiler is asked to do.
template <int M, int K, int N> void add_product(float (&sum)[M][N], const float (&a)[M][K], const float (&b)[K][N]) {
  typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
  static_assert(N % 4 == 0);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; j += 4) {
      Four total = reinterpret_cast<const Four&>(sum[i][j]);
      for (int k = 0; k < K; ++k) total += a[i][k] * reinterpret_cast<const Four&>(b[k][j]);
      reinterpret_cast<Four&>(sum[i][j]) = total;
    }
}
#endif
