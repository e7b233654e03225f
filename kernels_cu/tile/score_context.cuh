// score_context.cuh -- what becomes of scores, and what it may depend on: of a bias, ALiBi or an expression of the user's (SCORES). What they say is
// in expression.cuh; here is what that may read, and the functions that C++ has not.
//
//   PLUS_TERM     a term is added that does not depend on the score, in the units that the fragment has: of products if the scale stays in the
//                 exponent, of log 2 if scores are scaled one by one. So it takes one addition, and the derivative is 1
//   PLUS_LINEAR   such a term that is linear in the places of a pair. What the rows of a lane have in common of it, for a tile, goes into the
//                 exponent (`terms_of_rows`), where columns are keys. What is left is a multiple of `step` for each column, a number known when
//                 this is compiled: one instruction a score, or in fwd_hopper.cu a step of the product, see tile/linear_terms.cuh. Where columns
//                 are queries, that is in the statistics already (`of_query`), and the rows' part is one addition. Rows of a tile are counted from
//                 its middle, so that neither is large near a diagonal
//   PLUS_COLUMN   such a term of the key alone. In the forward it is a step of the product, see tile/column_terms.cuh; where rows are keys, it is what
//                 a row has in common, and is added
//   SCALED        scores times what a head has in common: a scale of the head (`scale_of_head`), and a factor of dS
//   EXPRESSION    any other; of scores in natural units, and what they become is in units of log 2
#pragma once
#include "params.cuh"
#include "tile/copy.cuh"
#include "tile/dropout.cuh"
#include "tile/interval.cuh"
#include "tile/mask.cuh"

// An array of which the pairs of one head read an element each.
struct PairTensor {
  const char* data;                                           // of the first pair
  i64 row_stride, col_stride;
};

// What all pairs of a head have in common, and takes more than an instruction to find.
template <int UNIFORMS> struct HeadTermsOf {
  float unit;                                                 // of a score of 1, as the fragment has it
  float step;                                                 // PLUS_LINEAR: of the term, from a key to the next, as the fragment has it
  float factor;                                               // SCALED: of scores
  float alibi_slope;
  PairTensor bias, pair_mask;
  float uniform[max_of(UNIFORMS, 1)];
};
// What expressions may read.
template <int UNIFORMS> struct ScoreContextOf : HeadTermsOf<UNIFORMS> {
  const ScoreParams& of;
  int b, h, h_kv, q_len, kv_len;
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
// As Python's // and %, but that an int divided by 0 is 0, and a float divided by 0 infinite. A CPU ends a process that divides the least int by -1.
OP int floor_mod(int a, int b) {
  const int rest = b && (ON_GPU || b != -1) ? a % b : 0;
  return rest && (rest < 0) != (b < 0) ? rest + b : rest;
}
OP int floor_div(int a, int b) {
  if (!ON_GPU && b == -1) return int(0u - unsigned(a));
  return b ? (a - floor_mod(a, b)) / b : 0;
}
OP float floor_mod(float a, float b) {
  const float rest = fmodf(a, b);
  return rest != 0.f && (rest < 0.f) != (b < 0.f) ? rest + b : rest;
}
OP float floor_div(float a, float b) {
  if (b == 0.f) return a / b;
  const float rest = fmodf(a, b), whole = roundf((a - rest) / b);
  return rest != 0.f && (rest < 0.f) != (b < 0.f) ? whole - 1.f : whole;
}

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

template <typename T> OP T read_at(const char* from, i64 offset) {
  count_read(sizeof(T));
  return reinterpret_cast<const T*>(from)[offset];
}
// where it is an integer, of which the compiler cannot tell that it is in device memory
template <typename T> OP T read_at(u64 from, i64 offset) {
  count_read(sizeof(T));
  const T* element = reinterpret_cast<const T*>(from) + offset;
#if ON_GPU
  __builtin_assume(__isGlobal(element));
#endif
  return *element;
}

// The element of an array that expressions read; an index beyond an axis is taken for the nearest one. Offset: holds how far elements are apart.
template <typename Kind, typename T, typename Offset, typename Context, typename... Index> OP Kind captured(const Context& x, int number, Index... index) {
  const CapturedArray& array = x.of.captured[number];
  Offset offset = 0;
  int axis = 0;
  ((offset += Offset(max_of(min_of(index, array.extent[axis] - 1), 0)) * Offset(array.stride[axis]), ++axis), ...);
  return AsKind<Kind>::of(read_at<T>(array.data, offset));
}
// the same for a coordinate of the pair, which no axis that it indexes ends before; strides that are not 0 are stated
template <typename Kind, typename T, typename Offset, int... STRIDES, typename Context, typename... Index> OP Kind captured_within(const Context& x, int number, Index... index) {
  const CapturedArray& array = x.of.captured[number];
  Offset offset = 0;
  int axis = 0;
  constexpr int stated[] = {STRIDES..., 0};                   // and one more, since an array may have no axis
  ((offset += Offset(index) * (stated[axis] ? Offset(stated[axis]) : Offset(array.stride[axis])), ++axis), ...);
  return AsKind<Kind>::of(read_at<T>(array.data, offset));
}
template <typename Kind, typename Context> OP Kind scalar(const Context& x, int number) { return AsKind<Kind>::of_bits(x.of.captured[number].data); }

// By one warp: between which values the elements lie that indices in these intervals may name. If these are many, or lie along two axes, anything.
constexpr int MOST_ELEMENTS = 1024;
template <typename Kind, typename T, typename Context, typename... Index>
OP Interval<Kind> captured_in(const Context& x, int number, Index... indices) {
  const CapturedArray& array = x.of.captured[number];
  const Interval<int> index[] = {indices...};
  i64 offset = 0, step = 0;
  int further = 0, axes = 0;                                  // elements behind the first
  #pragma unroll
  for (int axis = 0; axis < int(sizeof...(Index)); ++axis) {
    const int last = array.extent[axis] - 1, low = max_of(min_of(index[axis].low, last), 0), high = max_of(min_of(index[axis].high, last), 0);
    offset += i64(low) * array.stride[axis];
    if (low < high) further = high - low, step = array.stride[axis], ++axes;
  }
  if (axes > 1 || further >= MOST_ELEMENTS) return anything<Kind>();
  constexpr int AT_ONCE = 4;                                  // reads of a lane on their way; the last element again, rather than none
  Regs<Kind, 1> low, high;
  for_lane(l) {
    Kind elements[AT_ONCE];
    const auto read_from = [&](int i) {
      #pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) elements[j] = AsKind<Kind>::of(read_at<T>(array.data, offset + min_of(i + j * 32, further) * step));
    };
    const auto look_at = [&](int begin) {
      #pragma unroll
      for (int j = begin; j < AT_ONCE; ++j) low.at(l, 0) = least(low.at(l, 0), elements[j]), high.at(l, 0) = greatest(high.at(l, 0), elements[j]);
    };
    read_from(l);
    low.at(l, 0) = high.at(l, 0) = elements[0];
    look_at(1);
    #pragma unroll 1
    for (int i = l + AT_ONCE * 32; i - l <= further; i += AT_ONCE * 32) {
      read_from(i);
      look_at(0);
    }
  }
  return hull_of_lanes(low, high);
}

#include "expression.cuh"
using HeadTerms = HeadTermsOf<UNIFORMS>;
using ScoreContext = ScoreContextOf<UNIFORMS>;
constexpr bool MODIFIED = SCORES != UNCHANGED || MASKED_PAIRS; // pairs are asked one by one
static_assert(SCORES != EXPRESSION || EXPLICIT_SCORES, "expressions are of scores, not of products");
static_assert(!SCALE_SUMS || SCORES == SCALED, "there is a factor");
static_assert(!(SCORES == PLUS_LINEAR || SCORES == PLUS_COLUMN || SCORES == SCALED) || !EXPLICIT_SCORES, "they are in the exponent in part");

// What a score in a fragment is multiplied by for log 2.
OP float exponent_scale(float scale) { return EXPLICIT_SCORES ? 1.f : scale * LOG2E; }

// SCALED: what the scores of a head are scaled by in all. Not by 0, which would leave no masked score masked, but by less than any score tells.
OP float scale_of_head(float scale, const HeadTerms& terms) {
  const float scaled = scale * terms.factor;
  return SCORES != SCALED ? scale : fabsf(scaled) < 0x1p-100f ? copysignf(0x1p-100f, scaled) : scaled;
}
// A score that, scaled, is -inf.
OP float masked_score(const HeadTerms& terms) { return SCORES == SCALED ? copysignf(infinity(), -terms.factor) : -infinity(); }

// Where the elements of a head begin.
OP PairTensor pair_tensor(const Tensor& t, const int (&batch)[BATCH_AXES], int head, int itemsize) {
  return {reinterpret_cast<const char*>(t.data) + offset_of(t, batch, head, 0) * itemsize, t.row_stride, t.col_stride};
}
// Query heads that share keys. PACK_GQA: the kernel is told of their queries as those of one.
template <typename Params> OP int heads_of_group(const Params& p) {
  return PACK_GQA ? int(divide(p.len_q, p.mask.queries_divmod)) : p.heads_per_kv;
}
template <typename Params, typename Coord>
OP ScoreContext score_context(const Params& p, const Coord& here, int head, const HeadTerms& terms, int len_q, int len_kv) {
  return {terms, p.scores, int(here.batch_number), head, head / heads_of_group(p), len_q, len_kv};
}
template <typename Params, typename Coord> OP ScoreContext score_context(const Params& p, const Coord& here, int head, const HeadTerms& terms) {
  return score_context(p, here, head, terms, p.len_q, p.len_kv);
}
template <typename Params, typename Coord> OP HeadTerms head_terms(const Params& p, const Coord& here, int head, int len_q, int len_kv) {
  const ScoreParams& s = p.scores;
  HeadTerms terms{};
  if constexpr (SCORES != UNCHANGED && SCORES != EXPRESSION) terms.unit = EXPLICIT_SCORES ? LOG2E : 1.f / p.scale;
  if (HAS_BIAS) terms.bias = pair_tensor(s.bias, here.batch, head, sizeof(BiasElement));
  if (HAS_PAIR_MASK) terms.pair_mask = pair_tensor(s.pair_mask, here.batch, head, 1);
  if (HAS_ALIBI) terms.alibi_slope = AsKind<float>::of(read_at<AlibiSlope>(u64(s.alibi_slopes.data), offset_of(s.alibi_slopes, here.batch, head, 0)));
  const ScoreContext x = score_context(p, here, head, terms, len_q, len_kv);
  #pragma unroll
  for (int i = 0; i < UNIFORMS; ++i) terms.uniform[i] = uniform_of(i, x);
  if constexpr (SCORES == PLUS_LINEAR) terms.step = per_key_of(score_context(p, here, head, terms, len_q, len_kv)) * terms.unit;
  if constexpr (SCORES == SCALED) terms.factor = slope_of(0.f, PairPlace{}, score_context(p, here, head, terms, len_q, len_kv));
  return terms;
}
template <typename Params, typename Coord> OP HeadTerms head_terms(const Params& p, const Coord& here, int head) {
  return head_terms(p, here, head, p.len_q, p.len_kv);
}
// Both, for a few pairs.
template <typename Params, typename Coord> OP ScoreContext score_context(const Params& p, const Coord& here, int head, int len_q, int len_kv) {
  return score_context(p, here, head, head_terms(p, here, head, len_q, len_kv), len_q, len_kv);
}
template <typename Params, typename Coord> OP ScoreContext score_context(const Params& p, const Coord& here, int head) {
  return score_context(p, here, head, p.len_q, p.len_kv);
}

// What sums of dQ and dK of a head are multiplied by. SCALE_SUMS: also by what its scores are, which dS is without then.
template <typename Params> OP float scale_of_sums(const Params& p, const HeadTerms& terms) { return SCALE_SUMS ? p.scale * terms.factor : p.scale; }
template <typename Params, typename Coord> OP float scale_of_sums(const Params& p, const Coord& here, int head, int len_q, int len_kv) {
  if constexpr (SCALE_SUMS) return scale_of_sums(p, head_terms(p, here, head, len_q, len_kv));
  return p.scale;
}
// PLUS_LINEAR: what the statistics of a query are without, in units of log 2: its part of the term, counted from the middle of a tile of so many
// rows. It belongs to a pair, but is the same for all keys.
template <typename Params, typename Coord, typename... Lengths> OP float per_query_log2(const Params& p, const Coord& here, int head, Lengths... lengths) {
  return SCORES == PLUS_LINEAR ? per_query_of(score_context(p, here, head, lengths...)) * LOG2E : 0.f;
}
// BENDS: so much less beyond the diagonal, where statistics are without that.
template <typename Params, typename Coord, typename... Lengths> OP float bend_log2(const Params& p, const Coord& here, int head, Lengths... lengths) {
  return BENDS ? bend_of(score_context(p, here, head, lengths...)) * LOG2E : 0.f;
}
OP float part_of_query(float per_query, int row, int rows) { return per_query * float(row % rows - rows / 2); }
