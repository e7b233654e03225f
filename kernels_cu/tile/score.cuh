// score.cuh -- what becomes of scores besides scale and softcap, pair by pair: an expression of the user's, a bias and ALiBi (SCORES), and
// pairs that an expression or an array masks (MASKED_PAIRS). What they say is in expression.cuh; here is what they may read, and the
// functions that C++ has not.
#pragma once
#include "params.cuh"
#include "tile/copy.cuh"
#include "tile/dropout.cuh"
#include "tile/gradient.cuh"
#include "tile/mask.cuh"

// An array of which the pairs of one head read an element each.
struct PairTensor {
  u64 data;                                                   // of the first pair
  i64 row_stride, col_stride;
};

// What all pairs of a head have in common.
struct ScoreContext {
  const ScoreParams& of;
  int b, h, h_kv, q_len, kv_len;
  PairTensor bias, pair_mask;
  float alibi_slope;
};

#if !ON_GPU
OP float rsqrtf(float x) { return 1.f / sqrtf(x); }
OP int min(int a, int b) { return min_of(a, b); }
OP int max(int a, int b) { return max_of(a, b); }
#endif
OP float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
template <int N, typename T> OP T power(T x) {
  T product = 1;
  #pragma unroll
  for (int i = 0; i < N; ++i) product *= x;
  return product;
}
// As Python's // and %, but that an int divided by 0 is 0.
OP int floor_mod(int a, int b) {
  const int rest = b ? a % b : 0;
  return rest && (rest < 0) != (b < 0) ? rest + b : rest;
}
OP int floor_div(int a, int b) { return b ? (a - floor_mod(a, b)) / b : 0; }
OP float floor_mod(float a, float b) {
  const float rest = fmodf(a, b);
  return rest != 0.f && (rest < 0.f) != (b < 0.f) ? rest + b : rest;
}
OP float floor_div(float a, float b) { return roundf((a - floor_mod(a, b)) / b); }

// An element of any type as one of three kinds.
template <typename Kind> struct AsKind;
template <> struct AsKind<float> {
  template <typename T> static OP float of(T x) { return to_float(x); }
  static OP float of(double x) { return float(x); }
  static OP float of_bits(u64 bits) { return bits_float(u32(bits)); }
};
template <> struct AsKind<int> {
  template <typename T> static OP int of(T x) { return int(x); }
  static OP int of_bits(u64 bits) { return int(u32(bits)); }
};
template <> struct AsKind<bool> {
  static OP bool of(unsigned char x) { return x != 0; }
  static OP bool of_bits(u64 bits) { return u32(bits) != 0; }
};

template <typename T> OP T read_at(u64 data, i64 offset) {
  count_read(sizeof(T));
  return reinterpret_cast<const T*>(data)[offset];
}

// The element of an array that expressions read; an index beyond an axis is taken for the nearest one.
template <typename Kind, typename T, typename... Index> OP Kind captured(const ScoreContext& x, int number, Index... index) {
  const CapturedArray& array = x.of.captured[number];
  i64 offset = 0;
  int axis = 0;
  ((offset += i64(max_of(min_of(index, array.extent[axis] - 1), 0)) * array.stride[axis], ++axis), ...);
  return AsKind<Kind>::of(read_at<T>(array.data, offset));
}
// the same for a coordinate of the pair, which no axis that it indexes ends before
template <typename Kind, typename T, typename... Index> OP Kind captured_within(const ScoreContext& x, int number, Index... index) {
  const CapturedArray& array = x.of.captured[number];
  i64 offset = 0;
  int axis = 0;
  ((offset += i64(index) * array.stride[axis], ++axis), ...);
  return AsKind<Kind>::of(read_at<T>(array.data, offset));
}
template <typename Kind> OP Kind scalar(const ScoreContext& x, int number) { return AsKind<Kind>::of_bits(x.of.captured[number].data); }
template <typename Kind, typename T> OP Kind of_pair(const PairTensor& t, int q_idx, int kv_idx) {
  return AsKind<Kind>::of(read_at<T>(t.data, q_idx * t.row_stride + kv_idx * t.col_stride));
}

#include "expression.cuh"
constexpr bool MODIFIED = SCORES || MASKED_PAIRS;             // pairs are asked one by one
static_assert(EXPLICIT_SCORES || !MODIFIED, "expressions are of scores, not of products");

// Where the elements of a head begin.
OP PairTensor pair_tensor(const Tensor& t, const int (&batch)[BATCH_AXES], int head, int itemsize) {
  return {u64(t.data) + u64(offset_of(t, batch, head, 0) * itemsize), t.row_stride, t.col_stride};
}
template <typename Params, typename Coord> OP ScoreContext score_context(const Params& p, const Coord& here, int head) {
  const ScoreParams& s = p.scores;
  ScoreContext x{s, int(here.batch_number), head, head / p.heads_per_kv, p.len_q, p.len_kv, {}, {}, 0.f};
  if (HAS_BIAS) x.bias = pair_tensor(s.bias, here.batch, head, sizeof(BiasElement));
  if (HAS_PAIR_MASK) x.pair_mask = pair_tensor(s.pair_mask, here.batch, head, 1);
  if (HAS_ALIBI) x.alibi_slope = AsKind<float>::of(read_at<AlibiSlope>(u64(s.alibi_slopes.data), offset_of(s.alibi_slopes, here.batch, head, 0)));
  return x;
}

// Raw scores become what the expressions say, and those of pairs that take no part become -inf. Rows are queries, and columns are keys.
// Places beyond the ends are those of the last query and the last key, so that nothing is read that does not exist.
template <int M, int N> OP void modify_scores(Acc<M, N>& s, const ScoreContext& x, int first_row, int col0) {
  const int row0 = not_ahead(first_row);                      // where rows of arrays begin would take registers beneath all products
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      const int q_idx = min_of(row0 + s.row(l, r), x.q_len - 1), kv_idx = min_of(col0 + s.col(l, r), x.kv_len - 1);
      const float score = score_of(s.at(l, r), q_idx, kv_idx, x);
      s.at(l, r) = !MASKED_PAIRS || takes_part(q_idx, kv_idx, x) ? score : -infinity();
    }
  }
}

// Before the loop: seed and offset from where they are.
OP DropoutParams seeded(const ScoreParams& s) {
  DropoutParams dropout = s.dropout;
  if (s.seed) {
    const u64 seed = read_at<u64>(u64(s.seed), 0);
    dropout.seed_low = u32(seed), dropout.seed_high = u32(seed >> 32), dropout.offset = u32(read_at<u64>(u64(s.seed), 1));
  }
  return dropout;
}

// The same in the backward, where rows are keys and columns are queries: raw scores become p = 2^(score - lse), and the other warp is passed p
// times the derivatives of the expression and of the softcap. Selected, not multiplied: whatever is at a masked pair, p is 0 there.
template <int M, int N>
OP void probabilities(Acc<M, N>& s, const ColVec<N>& lse, const ScoreContext& x, const TransposedMask& mask, bool masked, int first_row,
                      int col0, float softcap, PassedTile<M, N> passed) {
  const int row0 = not_ahead(first_row);
  const float inverse = softcap > 0.f ? 1.f / softcap : 0.f;
  for_lane(l) {
    ColumnRange queries[M / 8];
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) queries[i] = masked ? visible_in_row(mask, row0 + RowVec<M>::row(l, i)) : ColumnRange{0, x.q_len - 1};
    #pragma unroll
    for (int r = 0; r < s.regs; r += passed.per_move) {
      float factor[passed.per_move];
      #pragma unroll
      for (int i = 0; i < passed.per_move; ++i) {
        const int slot = s.slot(r + i), col = col0 + s.col(l, r + i);
        const int q_idx = min_of(col, x.q_len - 1), kv_idx = min_of(row0 + s.row(l, r + i), x.kv_len - 1);
        const float score = s.at(l, r + i), bent = score * inverse;
        const bool seen = queries[slot].first <= col && col <= queries[slot].last && (!MASKED_PAIRS || takes_part(q_idx, kv_idx, x));
        const float modified = score_of(score, q_idx, kv_idx, x);
        const float p = seen ? exp2_approx(fmaf(modified, LOG2E, -lse.at(l, s.col_slot(r + i)))) : 0.f;
        s.at(l, r + i) = p;
        factor[i] = p == 0.f ? 0.f : p * (1.f - bent * bent) * slope_of(score, q_idx, kv_idx, x);
      }
      store_shared(passed.at(l, r), pack_moved(factor));
    }
  }
}

// The same where one warp has 16 keys: s becomes p, and factor_reg what the other warp is passed, as an A operand. `unit` is what a score is
// multiplied by for log 2; the log-sum-exp of the columns is read from shared memory when it is needed.
template <int N>
OP void probabilities(Acc<16, N>& s, OperandA<16> (&factor_reg)[N / 16], SharedAddress lse, const ScoreContext& x, const TransposedMask& mask,
                      bool masked, int first_row, int col0, float unit, float softcap) {
  const int row0 = not_ahead(first_row);
  const float inverse = softcap > 0.f ? (MODIFIED ? 1.f : LN2) / softcap : 0.f;
  for_lane(l) {
    ColumnRange queries[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) queries[i] = masked ? visible_in_row(mask, row0 + RowVec<16>::row(l, i)) : ColumnRange{0, x.q_len - 1};
    #pragma unroll
    for (int r = 0; r < s.regs; r += 4) {                     // two rows of two columns
      const Pair stat = load_shared<Pair>(lse + s.col(l, r) * 4);
      #pragma unroll
      for (int row = 0; row < 2; ++row) {
        float factor[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int col = col0 + s.col(l, r) + i, q_idx = min_of(col, x.q_len - 1), kv_idx = min_of(row0 + l / 4 + 8 * row, x.kv_len - 1);
          const float score = s.at(l, r + 2 * row + i), bent = score * inverse;
          const bool seen = queries[row].first <= col && col <= queries[row].last && (!MASKED_PAIRS || takes_part(q_idx, kv_idx, x));
          const float p = seen ? exp2_approx(fmaf(score_of(score, q_idx, kv_idx, x), unit, -stat.x[i])) : 0.f;
          s.at(l, r + 2 * row + i) = p;
          factor[i] = p == 0.f ? 0.f : p * (1.f - bent * bent) * slope_of(score, q_idx, kv_idx, x);
        }
        factor_reg[r / 8].at(l, r / 4 % 2 * 2 + row) = pack<Element>(factor[0], factor[1]);
      }
    }
  }
}
