// part_factors.cuh -- what float32 in parts of float16 (FP16_PARTS) is multiplied by in the end: parts of a head are those of x * 2^e, see fp16_parts.cu.
#pragma once
#include "params.cuh"
#include "tile/copy.cuh"

// What the scores of a query head, and its results, are multiplied by in the end: 2^-e of both operands, and of values.
struct HeadFactors {
  float scores, values;
};
template <typename Params> OP const float* factors_of_parts(const Params& p) { // in the last array, which no expression reads then
  return reinterpret_cast<const float*>(p.scores.captured[CAPTURED - 1].data);
}
template <typename Params, typename Coord> OP HeadFactors factors_of_head(const Params& p, const Coord& here) {
  const float* const factors = factors_of_parts(p);
  const i64 number = i64(here.batch_number) * p.heads + here.head;
  return {read(factors + 2 * number), read(factors + 2 * number + 1)};
}

// What belongs to a query head, 2^-e of: q and k; v and dout; q; dout; k.
struct GradientFactors {
  float scores, dp, queries, douts, keys;
};
template <typename Params> OP GradientFactors gradient_factors(const Params& p, u32 number) {
  const float* const of_head = factors_of_parts(p) + i64(number) * int(sizeof(GradientFactors) / sizeof(float));
  return {read(of_head), read(of_head + 1), read(of_head + 2), read(of_head + 3), read(of_head + 4)};
}

// rowsum(dout o out) of ROWS rows, which are not in parts: calls use(row, whether it exists, sum). A warp has rows of its own, whose reads are on their way
// together.
template <int ROWS, typename Use> OP void for_row_dots(const TileOf<float>& out, const TileOf<float>& dout, Use use) {
  constexpr int AT_ONCE = ceil_div(ROWS, WARPS);
  const int row0 = warp_id() * AT_ONCE, end = min_of(ROWS, out.rows);
  Regs<float, AT_ONCE> dots;
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) dots.at(l, i) = 0.f;
  }
  #pragma unroll 1
  for (int col0 = 0; col0 < out.cols; col0 += 64) {
    for_lane(l) {
      float x[AT_ONCE][2], y[AT_ONCE][2];
      #pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int col = col0 + 32 * j + l;
          const bool exists = row0 + i < end && col < out.cols;
          x[i][j] = exists ? read(out.at(row0 + i, col)) : 0.f;
          y[i][j] = exists ? read(dout.at(row0 + i, col)) : 0.f;
        }
      }
      #pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) dots.at(l, i) = fmaf(y[i][1], x[i][1], fmaf(y[i][0], x[i][0], dots.at(l, i)));
    }
  }
  reduce_lanes<32>(dots, [](float x, float y) { return x + y; });
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (l == i && row0 + i < ROWS) use(row0 + i, row0 + i < end, dots.at(l, i));
  }
}
