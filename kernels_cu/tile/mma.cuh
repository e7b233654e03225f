// mma.cuh -- matrix products of fragments: one step, and the two products of attention.
#pragma once
#include "tile/blocked.cuh"
#include "tile/shared.cuh"

#if ON_GPU
OP void mma_m16n8k16_bf16(float* d, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
OP void mma_m16n8k16_f16(float* d, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
OP void mma_m16n8k8_f16(float* d, const u32* a, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
OP void mma_m16n8k8_tf32(float* d, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// acc[:, n0 : n0 + 16] += a b, on tensor cores
template <int M, int N> OP void tensor_mma(Acc<M, N>& acc, int n0, const OperandA<M>& a, const OperandB<>& b) {
#if ON_GPU
  #pragma unroll
  for (int m = 0; m < M / 16; ++m) {
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      float* d = acc.v + m * acc.per_16_rows + n0 / 2 + 4 * n;
      const u32 *x = a.v + 4 * m, *y = b.v + 2 * n;
      if constexpr (FAMILY == TF32) mma_m16n8k8_tf32(d, x, y);
      else if constexpr (ARCH < 80) mma_m16n8k8_f16(d, x, y[0]), mma_m16n8k8_f16(d, x + 2, y[1]);
      else if constexpr (DTYPE == FLOAT16) mma_m16n8k16_f16(d, x, y);
      else mma_m16n8k16_bf16(d, x, y);
    }
  }
#else
  constexpr int PER_REG = FAMILY == HALVES ? 2 : 1;
  auto value = [](u32 word, int i) {
    if constexpr (FAMILY == HALVES) return unpack<Element>(word, i);
    else return bits_float(word & ~0x1fffu);                // the unit reads ten mantissa bits
  };
  float b_f32[STEP_K][16];
  for_lane(l) for (int r = 0; r < 4; ++r) for (int i = 0; i < PER_REG; ++i) b_f32[b.k(l, r) + i][b.n(l, r)] = value(b.at(l, r), i);
  for (int m = 0; m < M / 16; ++m) {
    float a_f32[16][STEP_K], sum[16][16] = {};
    for_lane(l) for (int r = 0; r < 4; ++r) for (int i = 0; i < PER_REG; ++i)
      a_f32[a.row(l, r)][a.k(l, r) + i] = value(a.at(l, 4 * m + r), i);
    add_product(sum, a_f32, b_f32);
    for_lane(l) for (int r = 0; r < 8; ++r)
      acc.at(l, m * acc.per_16_rows + n0 / 2 + r) += sum[acc.row(l, r)][acc.col(l, r)];
  }
#endif
}

// x = large + small + an error below 2^-21 |x|: large is x rounded to tf32, of small the unit reads the ten mantissa bits it can.
// Adding half of the last place before cutting rounds to nearest; NaN stays NaN through small, infinity becomes NaN.
template <typename Operand> OP void split_tf32(Operand& large, Operand& small, const Operand& x) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < Operand::regs; ++r) {
      large.at(l, r) = (x.at(l, r) + 0x1000u) & ~0x1fffu;
      small.at(l, r) = float_bits(bits_float(x.at(l, r)) - bits_float(large.at(l, r)));
    }
  }
}

// x rounded to tf32
template <typename Operand> OP void round_tf32(Operand& x) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < Operand::regs; ++r) x.at(l, r) = float_bits(round_tf32(bits_float(x.at(l, r))));
  }
}

// acc[:, n0 : n0 + 16] += a b
template <int M, int N> OP void mma(Acc<M, N>& acc, int n0, const OperandA<M>& a, const OperandB<>& b) {
  count_flops(2 * M * STEP_N * STEP_K);
  if constexpr (FAMILY == HALVES) {
    tensor_mma(acc, n0, a, b);
  } else if constexpr (FAMILY == TF32) {
    OperandA<M> a_large = a;
    OperandB<> b_large = b;
    if constexpr (TF32_PASSES == 1) {
      round_tf32(a_large);
      round_tf32(b_large);
    } else {                                                  // small * small is below float32's own rounding; small terms first
      OperandA<M> a_small;
      OperandB<> b_small;
      split_tf32(a_large, a_small, a);
      split_tf32(b_large, b_small, b);
      tensor_mma(acc, n0, a_small, b_large);
      tensor_mma(acc, n0, a_large, b_small);
    }
    tensor_mma(acc, n0, a_large, b_large);
  } else {
    for_lane(l) {
      #pragma unroll
      for (int k = 0; k < STEP_K; ++k)
        #pragma unroll
        for (int r = 0; r < M / 2; ++r)                     // register r: row half r / 2 % 2, column r % 2 of 8-column group r / 4 % 2
          acc.at(l, r / 8 * acc.per_16_rows + n0 / 2 + r % 8) +=
              a.at(l, r / 8 * a.regs_per_16_rows + r / 2 % 2 * 8 + k) * b.at(l, 4 * k + r / 4 % 2 * 2 + r % 2);
    }
  }
}

// The rows of one warp as the A operand of Q K^T: in shared memory, or loaded once and kept in registers.
template <int M, int WIDTH> struct RowsInShared {
  SharedTile<M, WIDTH> tile;
  OP RowsInShared(SharedTile<M, WIDTH> q_smem) : tile(q_smem) {}
  OP void step(OperandA<M>& a, int k0) const { load(a, tile, 0, k0); }
};
template <int M, int WIDTH> struct RowsInRegisters {
  OperandA<M> steps[WIDTH / STEP_K];
  OP RowsInRegisters(SharedTile<M, WIDTH> q_smem) {
    #pragma unroll
    for (int i = 0; i < WIDTH / STEP_K; ++i) load(steps[i], q_smem, 0, i * STEP_K);
  }
  OP void step(OperandA<M>& a, int k0) const { a = steps[k0 / STEP_K]; }
};

// acc[:, n0 : n0 + 16] += part, by ordinary additions
template <int M, int N> OP void add(Acc<M, N>& acc, int n0, const Acc<M, STEP_N>& part) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < part.regs; ++r) acc.at(l, r / 8 * acc.per_16_rows + n0 / 2 + r % 8) += part.at(l, r);
  }
}

// Tensor cores truncate their sums. In half precision that is far below the rounding of the operands, but a float32 sum over
// thousands of keys would be dragged towards zero: there, tensor cores add up short runs, and additions that round join them.
constexpr bool SHORT_RUNS = FAMILY == TF32;

// s = q k^T
template <int M, int N, int WIDTH, template <int, int> class Rows>
OP void multiply_transposed(Acc<M, N>& s, const Rows<M, WIDTH>& q, SharedTile<N, WIDTH> k_smem) {
  fill(s, 0.f);
  #pragma unroll (FAMILY == HALVES ? WIDTH / STEP_K : 1)      // float32 steps are long; side by side they would spill
  for (int d = 0; d < WIDTH; d += STEP_K) {
    OperandA<M> q_reg;
    q.step(q_reg, d);
    #pragma unroll
    for (int n = 0; n < N; n += STEP_N) {
      OperandB<> k_reg;
      load_transposed(k_reg, k_smem, n, d);
      if constexpr (SHORT_RUNS) {
        Acc<M, STEP_N> run;
        fill(run, 0.f);
        mma(run, 0, q_reg, k_reg);
        add(s, n, run);
      } else {
        mma(s, n, q_reg, k_reg);
      }
    }
  }
}

// o += p v
template <int M, int N, int WIDTH> OP void multiply_add(Acc<M, WIDTH>& o, const OperandA<M> (&p_reg)[N], SharedTile<N * STEP_K, WIDTH> v_smem) {
  if constexpr (SHORT_RUNS) {
    #pragma unroll
    for (int n = 0; n < WIDTH; n += STEP_N) {
      Acc<M, STEP_N> run;
      fill(run, 0.f);
      #pragma unroll
      for (int i = 0; i < N; ++i) {
        OperandB<> v_reg;
        load(v_reg, v_smem, i * STEP_K, n);
        mma(run, 0, p_reg[i], v_reg);
      }
      add(o, n, run);
    }
  } else {
    #pragma unroll
    for (int i = 0; i < N; ++i) {
      #pragma unroll
      for (int n = 0; n < WIDTH; n += STEP_N) {
        OperandB<> v_reg;
        load(v_reg, v_smem, i * STEP_K, n);
        mma(o, n, p_reg[i], v_reg);
      }
    }
  }
}
template <int M, int N, int WIDTH> OP void multiply_add(Acc<M, WIDTH>& o, const Acc<M, N>& p, SharedTile<N, WIDTH> v_smem) {
  OperandA<M> p_reg[N / STEP_K];                              // all of P first: in half precision that frees half its registers
  to_operands(p_reg, p);
  multiply_add(o, p_reg, v_smem);
}

// d = a^T b, where d[i, j] pairs column m0 + i of a with column n0 + j of b
template <int M, int N, int ROWS, int WIDTH_A, int WIDTH_B>
OP void multiply_a_transposed(Acc<M, N>& d, BlockedTile<ROWS, WIDTH_A> a_smem, int m0, SharedTile<ROWS, WIDTH_B> b_smem, int n0) {
  constexpr bool aligned = (N & (N - 1)) == 0 || N % (b_smem.period * b_smem.per_chunk) == 0;   // then addresses differ by constants
  const auto b_part = aligned ? b_smem.from_col(n0) : b_smem;
  const int first_col = aligned ? 0 : n0;
  fill(d, 0.f);
  #pragma unroll (FAMILY == HALVES ? ROWS / STEP_K : 1)       // float32 steps are long; side by side they would spill
  for (int k = 0; k < ROWS; k += STEP_K) {
    OperandA<M> a_reg;
    load_transposed(a_reg, a_smem, m0, k);
    #pragma unroll
    for (int n = 0; n < N; n += STEP_N) {
      OperandB<> b_reg;
      load(b_reg, b_part, k, first_col + n);
      if constexpr (SHORT_RUNS) {
        Acc<M, STEP_N> run;
        fill(run, 0.f);
        mma(run, 0, a_reg, b_reg);
        add(d, n, run);
      } else {
        mma(d, n, a_reg, b_reg);
      }
    }
  }
}
