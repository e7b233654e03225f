// mask.cuh -- which keys a query may see: query i sees the keys i + left ... i + right that exist.
// Causal masks and sliding windows are such bands; without them the band is as wide as the keys.
#pragma once
#include "params.cuh"
#include "tile/fragment.cuh"

struct Band {
  int left, right, len_kv;
  FastDivmod queries_divmod{};                                // PACK_GQA: queries of each head
};

// The first and the last query of some rows. Where heads share tiles, more rows than one may be any of them.
struct QueryRange {
  int first, last;
};
OP QueryRange queries_of(const Band& band, int row0, int rows) {
  if (!PACK_GQA) return {row0, row0 + rows - 1};
  const int queries = int(band.queries_divmod.divisor), row = not_ahead(row0), query = row - int(divide(row, band.queries_divmod)) * queries;
  return rows == 1 ? QueryRange{query, query} : QueryRange{0, queries - 1};
}

// Columns first ... last, both included.
struct ColumnRange {
  int first, last;
  OP bool overlaps(int col0, int cols) const { return col0 <= last && first < col0 + cols; }
  OP bool contains(int col0, int cols) const { return first <= col0 && col0 + cols - 1 <= last; }
};
// the keys between the first and the last one that any of rows row0 ... row0 + rows - 1 sees
OP ColumnRange visible_keys(const Band& band, int row0, int rows) {
  const QueryRange of = queries_of(band, row0, rows);
  return {max_of(of.first + band.left, 0), min_of(of.last + band.right, band.len_kv - 1)};
}
// the keys that each of these rows sees
OP ColumnRange unmasked_keys(const Band& band, int row0, int rows) {
  const QueryRange of = queries_of(band, row0, rows);
  return {max_of(of.last + band.left, 0), min_of(of.first + band.right, band.len_kv - 1)};
}

// Tiles begin ... end - 1 of `width` keys.
struct NBlockRange {
  int begin, end;
};
// the tiles that hold a key which any of these rows sees; if there is none, the first of `otherwise`
OP NBlockRange n_block_range(const Band& band, int row0, int rows, int width, const NBlockRange& otherwise) {
  const ColumnRange keys = visible_keys(band, row0, rows);
  if (rows <= 0 || keys.last < keys.first) return {otherwise.begin, otherwise.begin + 1};
  return {keys.first / width, keys.last / width + 1};
}

// those of `tiles` that are among `all`; if there is none, the first of `all`
OP NBlockRange clip_range(const NBlockRange& all, const NBlockRange& tiles) {
  const NBlockRange both{max_of(tiles.begin, all.begin), min_of(tiles.end, all.end)};
  return both.begin < both.end ? both : NBlockRange{all.begin, all.begin + 1};
}

// The same band seen from the keys: key j is seen by the queries j - right ... j - left that exist, if it exists itself.
struct TransposedBand {
  int left, right, len_q, len_kv;
};
OP TransposedBand transposed(int left, int right, int len_q, int len_kv) { return {-right, -left, len_q, len_kv}; }
OP ColumnRange visible_queries(const TransposedBand& band, int row0, int rows) {
  return visible_keys({band.left, band.right, band.len_q}, row0, min_of(rows, band.len_kv - row0));
}
OP ColumnRange unmasked_queries(const TransposedBand& band, int row0, int rows) {
  if (row0 + rows > band.len_kv) return {0, -1};
  return unmasked_keys({band.left, band.right, band.len_q}, row0, rows);
}

OP ColumnRange visible_in_row(const Band& band, int row) { return visible_keys(band, row, 1); }
OP ColumnRange visible_in_row(const TransposedBand& band, int row) { return row < band.len_kv ? visible_queries(band, row, 1) : ColumnRange{0, -1}; }

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

// Scores of pairs outside the band become -inf. Selected, not added: whatever such a score was, NaN included, is gone.
// Which of its columns a row sees is a range, so for each 32 columns of a lane it is a word of ones, and each score is selected by its bit.
// The assembler makes predicates of seven bits at once, where comparing each column with two limits takes two instructions a score.
template <int M, int N, typename AnyBand> OP void mask(Acc<M, N>& s, const AnyBand& band, int row0, int col0, float masked = -infinity()) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      const ColumnRange keys = visible_in_row(band, row0 + RowVec<M>::row(l, i));
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
template <int M, int N> OP void scale_scores(Acc<M, N>& s, float scale, float softcap) {
  if (softcap > 0.f) {                                        // asked once, not for each score
    const float inverse = fminf(fmaxf(scale / softcap, -HIGHEST), HIGHEST), height = softcap * LOG2E;       // 0 times infinity is NaN
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) s.at(l, r) = tanh_by_sinh(s.at(l, r) * inverse) * height;
    }
  } else {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) s.at(l, r) = s.at(l, r) * scale * LOG2E;             // scale * LOG2E may be infinite
    }
  }
}
