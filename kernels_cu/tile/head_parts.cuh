// head_parts.cuh -- float32 rows of heads on their way to float16, scaled by a power of two for each head.
#pragma once
#include "row_params.cuh"
#include "tile/copy.cuh"
#include "tile/scheduler.cuh"
#include "tile/shared.cuh"

constexpr int ROWS_AT_ONCE = 4;                               // of a warp, whose reads are on their way together
constexpr int SAMPLES = 2;                                    // rows of a head that each warp looks at before
constexpr int LARGEST_EXPONENT = 14;                          // of an element in float16, which has numbers up to 2^16
// That scores are divided by 2^ of: those of heads of zeros shall be -infinity where they are masked, not NaN. What is divided by more is 0 either way.
constexpr int MOST_OF_SCORES = 100;
constexpr int SAMPLED_EXPONENT = 11;                          // of the largest element of the sampled rows: others may be 8 times as large

// Some rows of a head.
struct RowsOfHead {
  int operand, head;                                          // of q, k, v and dout; number of the head among all of the array
  int row, end;
  const float* from;                                          // row 0 of the head
  u16* to;                                                    // the same of its parts
};
OP const Tensor& tensor_of(const Fp16PartsParams& p, int operand) { return operand == 0 ? p.q : operand == 1 ? p.k : operand == 2 ? p.v : p.dout; }
OP u16* parts_of(const Fp16PartsParams& p, int operand) { return operand == 0 ? p.q_parts : operand == 1 ? p.k_parts : operand == 2 ? p.v_parts : p.dout_parts; }
OP RowsOfHead rows_of_head(const Fp16PartsParams& p, u32 block) {
  const int operand = (int(block) >= p.of[1].first_block) + (int(block) >= p.of[2].first_block) + (int(block) >= p.of[3].first_block);
  const OperandHeads& of = p.of[operand];
  const int number = int(block) - of.first_block, head = number / of.blocks_of_head, row = (number - head * of.blocks_of_head) * of.rows_of_block;
  int element[BATCH_AXES];
  batch_element(element, of.batch, u32(head / of.heads));
  const Tensor& tensor = tensor_of(p, operand);
  const float* const from = static_cast<const float*>(tensor.data) + offset_of(tensor, element, head % of.heads, 0);
  return {operand, head, row, min_of(row + of.rows_of_block, of.rows), from, parts_of(p, operand) + i64(head) * of.rows * FP16_PARTS * of.columns};
}
// Calls use(lane, column, x, y) for every pair of neighbouring elements of a row, by one warp.
template <typename Use> OP void for_pairs_of_row(const Fp16PartsParams& p, const RowsOfHead& at, int row, Use use) {
  const Tensor& tensor = tensor_of(p, at.operand);
  const int dim = p.of[at.operand].dim;
  for_lane(l) {
    #pragma unroll 1
    for (int col = 2 * l; col < dim; col += 64) {
      const float* const from = at.from + row * tensor.row_stride + col * tensor.col_stride;
      use(l, col, read(from), col + 1 < dim ? read(from + tensor.col_stride) : 0.f);
    }
  }
}
// Calls use(lane, row, column, x, y) for every pair of neighbouring elements of the rows, shared by the warps of a block; with zeros behind the array.
template <typename Use> OP void for_pairs(const Fp16PartsParams& p, const RowsOfHead& at, Use use) {
  const Tensor& tensor = tensor_of(p, at.operand);
  const OperandHeads& of = p.of[at.operand];
  #pragma unroll 1
  for (int row0 = at.row + warp_id() * ROWS_AT_ONCE; row0 < at.end; row0 += WARPS * ROWS_AT_ONCE) {
    #pragma unroll 1
    for (int col0 = 0; col0 < of.columns; col0 += 64) {
      for_lane(l) {
        const int col = col0 + 2 * l;
        float x[ROWS_AT_ONCE], y[ROWS_AT_ONCE];
        #pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; ++i) {
          const float* const from = at.from + (row0 + i) * tensor.row_stride + col * tensor.col_stride;
          x[i] = row0 + i < at.end && col < of.dim ? read(from) : 0.f;
          y[i] = row0 + i < at.end && col + 1 < of.dim ? read(from + tensor.col_stride) : 0.f;
        }
        #pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; ++i)
          if (row0 + i < at.end) use(l, row0 + i, col, x[i], y[i]);
      }
    }
  }
}
OP float finite(float x) { return fabsf(x) <= HIGHEST ? x : 0.f; }
OP float larger(float largest, float x, float y) { return fmaxf(largest, fmaxf(fabsf(finite(x)), fabsf(finite(y)))); }
OP void find_largest(Regs<float, 1>& x) { reduce_lanes<32>(x, [](float a, float b) { return fmaxf(a, b); }); }
// The exponent by which a number becomes 2^to ... 2^(to + 1) in magnitude; that of zero is as large as any.
OP int exponent_of(float x, int to) { return min_of(to + 127 - int(float_bits(x) >> 23), 127); }

// The exponent that a head probably needs, from rows spread over it: by all warps of a block, which meet.
OP int sampled_exponent(const Fp16PartsParams& p, const RowsOfHead& at) {
  const OperandHeads& of = p.of[at.operand];
  Regs<float, 1> largest;
  for_lane(l) largest.at(l, 0) = 0.f;
  #pragma unroll 1
  for (int i = 0; i < SAMPLES; ++i) {
    const int row = int(i64(warp_id() * SAMPLES + i) * of.rows / (WARPS * SAMPLES));
    for_pairs_of_row(p, at, row, [&](int l, int, float x, float y) { largest.at(l, 0) = larger(largest.at(l, 0), x, y); });
  }
  find_largest(largest);
  store_once(shared_memory() + warp_id() * int(sizeof(float)), largest.at(0, 0));
  sync_block();                                               // without it numbers are read that have not been written
  float of_all = 0.f;
  #pragma unroll
  for (int i = 0; i < WARPS; ++i) of_all = fmaxf(of_all, load_shared<float>(shared_memory() + i * int(sizeof(float))));
  return exponent_of(of_all, SAMPLED_EXPONENT);
}
// The largest magnitude of a head, from what warps have found of it.
OP float largest_of_head(const Fp16PartsParams& p, int operand, int head) {
  const OperandHeads& of = p.of[operand];
  const float* const found = p.largest + i64(of.first_block + head * of.blocks_of_head) * WARPS;
  Regs<float, 1> largest;
  for_lane(l) {
    largest.at(l, 0) = 0.f;
    #pragma unroll 4
    for (int i = l; i < of.blocks_of_head * WARPS; i += 32) largest.at(l, 0) = fmaxf(largest.at(l, 0), read(found + i));
  }
  find_largest(largest);
  return largest.at(0, 0);
}
// The exponent of a head in the end, and whether it is another one than its parts have been made with.
struct Exponent {
  int e;
  bool changed;
};
OP Exponent exponent_of_head(const Fp16PartsParams& p, int operand, int head) {
  const int needed = exponent_of(largest_of_head(p, operand, head), LARGEST_EXPONENT), sampled = p.exponents[p.of[operand].first_head + head];
  count_read(sizeof(int));
  return {min_of(needed, sampled), needed < sampled};
}
// 2^e, which may be beyond float32, or so small that it is zero
OP float power_of_two(int e) {
  const int half = e / 2;
  return bits_float(u32(half + 127) << 23) * bits_float(u32(e - half + 127) << 23);
}
// The rows as numbers of float16, x * 2^exponent = high + low, and the largest magnitude of what is finite in those that the warp has.
OP float make_parts(const Fp16PartsParams& p, const RowsOfHead& at, int exponent) {
  const float scale = power_of_two(exponent);
  const int columns = p.of[at.operand].columns;
  const auto write_pair = [](u16* to, u32 pair) {
    count_written(sizeof(pair));
    *reinterpret_cast<u32*>(to) = pair;
  };
  Regs<float, 1> largest;
  for_lane(l) largest.at(l, 0) = 0.f;
  for_pairs(p, at, [&](int l, int row, int col, float x, float y) {
    largest.at(l, 0) = larger(largest.at(l, 0), x, y);
    x *= scale, y *= scale;
    u16* const to = at.to + (i64(row) * FP16_PARTS * columns + col);
    const u32 high = pack<half_t>(x, y);
    write_pair(to, high);
    if constexpr (FP16_PARTS == 2) write_pair(to + columns, pack<half_t>(finite(x - unpack<half_t>(high, 0)), finite(y - unpack<half_t>(high, 1))));
  });
  find_largest(largest);
  return largest.at(0, 0);
}
// What a block has found of its rows, for the launch behind.
OP void store_found(const Fp16PartsParams& p, const RowsOfHead& at, int exponent, float largest) {
  const int warp = warp_id();
  float* const found = p.largest + i64(block_id()) * WARPS + warp;
  int* const exponent_of_rows = p.exponents + p.of[at.operand].first_head + at.head;
  for_lane(l) {
    if (l == 0) write(found, largest);
    if (l == 0 && warp == 0 && at.row == 0) count_written(sizeof(int)), *exponent_of_rows = exponent;
  }
}

// The number of the head of an operand that a query head has, of an array that may be the same along some axes.
OP int number_of_head(const OperandHeads& of, const int (&element)[BATCH_AXES], int head) {
  int number = 0;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) number = number * of.batch[i] + (of.batch[i] > 1 ? element[i] : 0);
  return number * of.heads + (of.heads > 1 ? head : 0);
}
// What the scores and the results of a query head are multiplied by in the end, by one warp.
OP void store_factors(const Fp16PartsParams& p, int number) {
  if (number >= p.all_heads) return;
  int element[BATCH_AXES];
  batch_element(element, p.batch, u32(number / p.heads));
  const int head = number % p.heads, head_kv = head / p.heads_per_kv;
  const int of_q = exponent_of_head(p, 0, number_of_head(p.of[0], element, head)).e, of_k = exponent_of_head(p, 1, number_of_head(p.of[1], element, head_kv)).e;
  const int of_v = exponent_of_head(p, 2, number_of_head(p.of[2], element, head_kv)).e;
  const bool of_gradients = p.factors_of_head > 2;
  const int of_dout = of_gradients ? exponent_of_head(p, 3, number_of_head(p.of[3], element, head)).e : 0;
  for_lane(l) {
    const int exponent = l == 0 ? min_of(of_q + of_k, MOST_OF_SCORES) : l == 1 ? of_v + of_dout : l == 2 ? of_q : l == 3 ? of_dout : of_k;
    if (l < p.factors_of_head) write(p.factors + p.factors_of_head * i64(number) + l, power_of_two(-exponent));
  }
}
