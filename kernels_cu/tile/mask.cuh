// mask.cuh -- which keys a query sees: an interval, whose ends do not fall from one query to the next. So what some rows see, any or all of
// them, follows from the first row and the last, and the queries that see a key are such an interval as well.
//
// A kind of mask is two functions, one for each direction, on what the kernel is told of it; MASK chooses when a kernel is compiled:
//   BAND     query i sees the keys i + left ... i + right that exist: causal masks, sliding windows, or with ends beyond all keys everything
//   PREFIX   without a left end: query i sees the keys up to i + right, and those before `prefix`
#pragma once
#include "params.cuh"
#include "tile/fragment.cuh"

// Columns first ... last, both included.
struct ColumnRange {
  int first, last;
  OP bool overlaps(int col0, int cols) const { return col0 <= last && first < col0 + cols; }
  OP bool contains(int col0, int cols) const { return first <= col0 && col0 + cols - 1 <= last; }
};

// Rows are queries, and columns are keys. In the backward it is the other way round.
struct Mask {
  MaskParams of;
  int len_kv;
};
struct TransposedMask {
  int left, right;                                            // key j is seen by the queries j + left ... j + right
  int len_q, len_kv;
  int prefix = 0;
};
OP TransposedMask transposed(const MaskParams& mask, int len_q, int len_kv) { return {-mask.right, -mask.left, len_q, len_kv, mask.prefix}; }

OP ColumnRange keys_of_query(const Mask& mask, int query) {
  const int last = min_of(query + mask.of.right, mask.len_kv - 1);
  if (MASK == PREFIX) return {0, max_of(last, mask.of.prefix - 1)};
  return {max_of(query + mask.of.left, 0), last};
}
OP ColumnRange queries_of_key(const TransposedMask& mask, int key) {
  const int first = max_of(key + mask.left, 0);
  if (MASK == PREFIX) return {key < mask.prefix ? 0 : first, mask.len_q - 1};
  return {first, min_of(key + mask.right, mask.len_q - 1)};
}

// The first and the last query of some rows. Where heads share tiles, more rows than one may be any of them.
struct QueryRange {
  int first, last;
};
OP QueryRange queries_of(const Mask& mask, int row0, int rows) {
  if (INNER_HEADS > 1) {                                      // several rows begin with the first head of a query
    const int first = int(u32(row0) / INNER_HEADS);
    return {first, rows % INNER_HEADS ? int(u32(row0 + rows - 1) / INNER_HEADS) : first + rows / INNER_HEADS - 1};
  }
  if (!PACK_GQA) return {row0, row0 + rows - 1};
  const FastDivmod& by_queries = mask.of.queries_divmod;
  const int queries = int(by_queries.divisor), row = not_ahead(row0), query = row - int(divide(row, by_queries)) * queries;
  return rows == 1 ? QueryRange{query, query} : QueryRange{0, queries - 1};
}

// the query head of a row, of rows of the heads from `head` on, or where heads share tiles, of its group
OP int query_head(const Mask& mask, int head, int row, int len_q) {
  if (INNER_HEADS > 1) return head * INNER_HEADS + row % INNER_HEADS;
  if (!PACK_GQA) return head;
  const int group = int(divide(len_q, mask.of.queries_divmod));
  return head * group + min_of(int(divide(row, mask.of.queries_divmod)), group - 1);
}

// the keys between the first and the last one that any of rows row0 ... row0 + rows - 1 sees
OP ColumnRange visible_keys(const Mask& mask, int row0, int rows) {
  const QueryRange of = queries_of(mask, row0, rows);
  return {keys_of_query(mask, of.first).first, keys_of_query(mask, of.last).last};
}
// the keys that each of these rows sees
OP ColumnRange unmasked_keys(const Mask& mask, int row0, int rows) {
  const QueryRange of = queries_of(mask, row0, rows);
  return {keys_of_query(mask, of.last).first, keys_of_query(mask, of.first).last};
}
// the queries between the first and the last one that see any of keys row0 ... row0 + rows - 1, of which the last ones may not exist
OP ColumnRange visible_queries(const TransposedMask& mask, int row0, int rows) {
  return {queries_of_key(mask, row0).first, queries_of_key(mask, row0 + min_of(rows, mask.len_kv - row0) - 1).last};
}
// the queries that see each of these keys
OP ColumnRange unmasked_queries(const TransposedMask& mask, int row0, int rows) {
  if (row0 + rows > mask.len_kv) return {0, -1};
  return {queries_of_key(mask, row0 + rows - 1).first, queries_of_key(mask, row0).last};
}

OP ColumnRange visible_in_row(const Mask& mask, int row) { return visible_keys(mask, row, 1); }
OP ColumnRange visible_in_row(const TransposedMask& mask, int row) { return row < mask.len_kv ? visible_queries(mask, row, 1) : ColumnRange{0, -1}; }

// Tiles begin ... end - 1 of `width` keys.
struct NBlockRange {
  int begin, end;
};
// the tiles that hold a key which any of these rows sees; if there is none, the first of `otherwise`
OP NBlockRange n_block_range(const Mask& mask, int row0, int rows, int width, const NBlockRange& otherwise) {
  const ColumnRange keys = visible_keys(mask, row0, rows);
  if (rows <= 0 || keys.last < keys.first) return {otherwise.begin, otherwise.begin + 1};
  return {keys.first / width, keys.last / width + 1};
}

// those of `tiles` that are among `all`; if there is none, the first of `all`
OP NBlockRange clip_range(const NBlockRange& all, const NBlockRange& tiles) {
  const NBlockRange both{max_of(tiles.begin, all.begin), min_of(tiles.end, all.end)};
  return both.begin < both.end ? both : NBlockRange{all.begin, all.begin + 1};
}

// `count` ones from bit `first` on. Both may be beyond 32.
OP u32 bmsk(u32 first, u32 count) {
#if ON_GPU
  u32 ones;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(ones) : "r"(first), "r"(count));
  return ones;
#else
  const u64 end = min_of(u64(first) + count, u64(32));
  return u32((u64(1) << end) - (u64(1) << min_of(u64(first), end)));
#endif
}

// How many columns of lane 0, which are 8 j and 8 j + 1, lie below this one, from the first column of the fragment on.
OP int columns_below(int col) { return ((col + 7) >> 3) + ((col + 6) >> 3); }

// Scores of pairs outside the mask become -inf. Selected, not added: whatever such a score was, NaN included, is gone.
// Which of its columns a row sees is a range, so for each 32 columns of a lane it is a word of ones, and each score is selected by its bit.
// The assembler makes predicates of seven bits at once, where comparing each column with two limits takes two instructions a score.
template <int M, int N, typename AnyMask> OP void apply_mask(Acc<M, N>& s, const AnyMask& mask, int row0, int col0, float masked = -infinity()) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      const ColumnRange keys = visible_in_row(mask, row0 + RowVec<M>::row(l, i));
      const int first = columns_below(keys.first - col0 - s.col(l, 0)), end = columns_below(keys.last + 1 - col0 - s.col(l, 0));
      #pragma unroll
      for (int bit0 = 0; bit0 < N / 4; bit0 += 32) {
        const int first_bit = max_of(first - bit0, 0);
        const u32 visible = bmsk(first_bit, max_of(end - bit0 - first_bit, 0));
        #pragma unroll
        for (int bit = 0; bit < min_of(N / 4 - bit0, 32); ++bit)
          if (!(visible >> bit & 1)) s.at(l, s.reg(i, bit0 + bit)) = masked;
      }
    }
  }
}

// Raw products become scores in units of log 2: scaled, and bent into [-softcap, softcap] if softcap > 0. In these units a score less the
// maximum is exact where they are close, however large; with the change of base after the difference, it would err by 2^-24 of either.
// What expressions are of is in natural units.
constexpr float SCORE_UNIT = SCORES == EXPRESSION ? 1.f : LOG2E;
OP float cap_inverse(float scale, float softcap) { return fminf(fmaxf(scale / softcap, -HIGHEST), HIGHEST); } // 0 times infinity is NaN
template <int M, int N> OP void scale_scores(Acc<M, N>& s, float scale, float softcap) {
  if (SOFTCAP && softcap > 0.f) {                             // asked once, not for each score
    const float inverse = cap_inverse(scale, softcap), height = softcap * SCORE_UNIT;
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) s.at(l, r) = tanh_by_sinh(s.at(l, r) * inverse) * height;
    }
  } else {
    const float factor = scale * (SCORES == UNCHANGED ? 1.f : SCORE_UNIT), unit = SCORES == UNCHANGED ? SCORE_UNIT : 1.f;
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) s.at(l, r) = s.at(l, r) * factor * unit;                  // scale * LOG2E may be infinite
    }
  }
}
