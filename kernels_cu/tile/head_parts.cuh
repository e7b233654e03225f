// head_parts.cuh -- float32 rows of heads on their way to float16, scaled by a power of two for each head, or (VARLEN) for that of each sequence: what
// others hold decides none of its bits.
#pragma once
#include "row_params.cuh"
#include "tile/copy.cuh"
#include "tile/scheduler.cuh"
#include "tile/sequence.cuh"
#include "tile/shared.cuh"

constexpr int ROWS_AT_ONCE = 4;                               // of a warp, whose reads are on their way together
constexpr int SAMPLES = 2;                                    // rows of a head that each warp looks at before
constexpr int LARGEST_EXPONENT = 14;                          // of an element in float16, which has numbers up to 2^16
// That scores are divided by 2^ of: those of heads of zeros shall be -infinity where they are masked, not NaN. What is divided by more is 0 either way.
constexpr int MOST_OF_SCORES = 100;
constexpr int SAMPLED_EXPONENT = 11;                          // of the largest element of the sampled rows: others may be 8 times as large

// The number of a head among all of an array, or VARLEN of all sequences in it, and the blocks that have its rows.
struct HeadBlocks {
  int number, first, count;
};
OP HeadBlocks blocks_of_number(const OperandHeads& of, int number) { return {number, of.first_block + number * of.blocks_of_head, of.blocks_of_head}; }
// Some rows of a head.
struct RowsOfHead {
  int operand;                                                // of q, k, v and dout
  HeadBlocks head;
  int row, end, rows;                                         // VARLEN: row == end where the block has none; `rows` of the whole head
  const float* from;                                          // row 0 of the head
  u16* to;                                                    // the same of its parts
};
OP const Tensor& tensor_of(const Fp16PartsParams& p, int operand) { return operand == 0 ? p.q : operand == 1 ? p.k : operand == 2 ? p.v : p.dout; }
OP u16* parts_of(const Fp16PartsParams& p, int operand) { return operand == 0 ? p.q_parts : operand == 1 ? p.k_parts : operand == 2 ? p.v_parts : p.dout_parts; }

// VARLEN: what a sequence has of an operand.
OP bool has_queries(int operand) { return operand == 0 || operand == 3; }
OP bool is_packed(const Fp16PartsParams& p, int operand) { return has_queries(operand) ? offsets_of<QUERIES>(p) : offsets_of<KEYS>(p); }
template <typename Params> OP SequenceRows rows_of_operand(const Params& p, int operand, u32 sequence) {
  return has_queries(operand) ? rows_of_sequence<QUERIES>(p, sequence) : rows_of_sequence<KEYS>(p, sequence);
}
// The number of a head among those of the array: packed rows have one for all sequences, padded ones of each sequence.
OP int head_of_array(const Fp16PartsParams& p, int operand, u32 sequence, int head) {
  return is_packed(p, operand) ? head : int(sequence) * p.of[operand].heads + head;
}
template <typename Params> OP HeadBlocks blocks_of_sequence(const Params& p, int operand, u32 sequence, int head) {
  const OperandHeads& of = p.of[operand];
  const SequenceRows rows = rows_of_operand(p, operand, sequence);
  const int in_array = head_of_array(p, operand, sequence, head), sequences = p.sequences.sequences + 1; // and rows behind all
  const int number = is_packed(p, operand) ? in_array * sequences + int(sequence) : in_array;
  return {number, of.first_block + in_array * of.blocks_of_head + rows.first_tile(), ceil_div(rows.len(), TILE_Q)};
}
static_assert(!VARLEN || TILE_Q == TILE_KV, "rows of a block");
template <typename Params> OP RowsOfHead rows_of_sequence_head(const Params& p, int operand, int in_array, int tile) {
  const OperandHeads& of = p.of[operand];
  u32 sequence = u32(in_array / of.heads);
  int row = tile * TILE_Q;
  if (is_packed(p, operand))
    row = has_queries(operand) ? row_in_sequence<QUERIES>(p, tile, sequence) : row_in_sequence<KEYS>(p, tile, sequence);
  const SequenceRows rows = rows_of_operand(p, operand, sequence);
  if (row < 0 || row >= rows.len()) return {};
  const int head = in_array % of.heads;
  int element[BATCH_AXES] = {};
  element[BATCH_AXES - 1] = int(sequence);                    // packed rows have a stride of 0 there
  const Tensor& tensor = tensor_of(p, operand);
  const float* const from = static_cast<const float*>(tensor.data) + offset_of(tensor, element, head, rows.first());
  const i64 first_row = i64(in_array) * of.rows + rows.first();
  return {operand, blocks_of_sequence(p, operand, sequence, head), row, min_of(row + TILE_Q, rows.len()), rows.len(), from, parts_of(p, operand) + first_row * FP16_PARTS * of.columns};
}

template <typename Params> OP RowsOfHead rows_of_head(const Params& p, u32 block) {
  const int operand = (int(block) >= p.of[1].first_block) + (int(block) >= p.of[2].first_block) + (int(block) >= p.of[3].first_block);
  const OperandHeads& of = p.of[operand];
  const int number = int(block) - of.first_block, head = number / of.blocks_of_head;
  if constexpr (VARLEN) return rows_of_sequence_head(p, operand, head, number - head * of.blocks_of_head);
  const int row = (number - head * of.blocks_of_head) * of.rows_of_block;
  int element[BATCH_AXES];
  batch_element(element, of.batch, u32(head / of.heads));
  const Tensor& tensor = tensor_of(p, operand);
  const float* const from = static_cast<const float*>(tensor.data) + offset_of(tensor, element, head % of.heads, 0);
  return {operand, blocks_of_number(of, head), row, min_of(row + of.rows_of_block, of.rows), of.rows, from, parts_of(p, operand) + i64(head) * of.rows * FP16_PARTS * of.columns};
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
  Regs<float, 1> largest;
  for_lane(l) largest.at(l, 0) = 0.f;
  #pragma unroll 1
  for (int i = 0; i < SAMPLES; ++i) {
    const int row = int(i64(warp_id() * SAMPLES + i) * at.rows / (WARPS * SAMPLES));
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
OP float largest_of_head(const Fp16PartsParams& p, const HeadBlocks& head) {
  const float* const found = p.largest + i64(head.first) * WARPS;
  Regs<float, 1> largest;
  for_lane(l) {
    largest.at(l, 0) = 0.f;
    #pragma unroll 4
    for (int i = l; i < head.count * WARPS; i += 32) largest.at(l, 0) = fmaxf(largest.at(l, 0), read(found + i));
  }
  find_largest(largest);
  return largest.at(0, 0);
}
// The exponent of a head in the end, and whether it is another one than its parts have been made with.
struct Exponent {
  int e;
  bool changed;
};
OP Exponent exponent_of_head(const Fp16PartsParams& p, int operand, const HeadBlocks& head) {
  if (VARLEN && head.count == 0) return {exponent_of(0.f, LARGEST_EXPONENT), false};       // of a sequence without rows nobody has found any
  const int needed = exponent_of(largest_of_head(p, head), LARGEST_EXPONENT), sampled = p.exponents[p.of[operand].first_head + head.number];
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
  int* const exponent_of_rows = p.exponents + p.of[at.operand].first_head + at.head.number;
  for_lane(l) {
    if (l == 0) write(found, largest);
    if (l == 0 && warp == 0 && at.row == 0) count_written(sizeof(int)), *exponent_of_rows = exponent;
  }
}

// The head of an operand that a query head has, of an array that may be the same along some axes.
template <typename Params> OP HeadBlocks blocks_of_head(const Params& p, int operand, const int (&element)[BATCH_AXES], u32 batch_number, int head) {
  const OperandHeads& of = p.of[operand];
  if constexpr (VARLEN) return blocks_of_sequence(p, operand, batch_number, of.heads > 1 ? head : 0);
  int number = 0;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) number = number * of.batch[i] + (of.batch[i] > 1 ? element[i] : 0);
  return blocks_of_number(of, number * of.heads + (of.heads > 1 ? head : 0));
}
// What the scores and the results of a query head are multiplied by in the end, by one warp.
OP void store_factors(const Fp16PartsParams& p, int number) {
  if (number >= p.all_heads) return;
  const u32 batch_number = u32(number / p.heads);
  int element[BATCH_AXES];
  batch_element(element, p.batch, batch_number);
  const int head = number % p.heads, head_kv = head / p.heads_per_kv;
  const auto exponent_of = [&](int operand, int head) { return exponent_of_head(p, operand, blocks_of_head(p, operand, element, batch_number, head)).e; };
  const int of_q = exponent_of(0, head), of_k = exponent_of(1, head_kv), of_v = exponent_of(2, head_kv);
  const bool of_gradients = p.factors_of_head > 2;
  const int of_dout = of_gradients ? exponent_of(3, head) : 0;
  for_lane(l) {
    const int exponent = l == 0 ? min_of(of_q + of_k, MOST_OF_SCORES) : l == 1 ? of_v + of_dout : l == 2 ? of_q : l == 3 ? of_dout : of_k;
    if (l < p.factors_of_head) write(p.factors + p.factors_of_head * i64(number) + l, power_of_two(-exponent));
  }
}
