// large_terms.cuh -- what is added to scores (PLUS_TERM) may be so large, such as -1e9 for all keys of a row, that their differences to a maximum are
// exact in the same units alone. Scaling scores one by one for that would cost each an instruction. So they are where a maximum is that large, from
// then on to the end of the query tile, and by 1 in the exponent.
#pragma once
#include "tile/gradient.cuh"
#include "tile/softmax.cuh"

constexpr bool SCALES_LARGE = SCORES == PLUS_TERM && !EXPLICIT_SCORES;
constexpr float LARGEST_ROUNDED = 0x1p22f;                    // in units of log 2: up to it a maximum is rounded by less than 1

// The maximum is that of these scores.
template <int M, int N> OP void scale_where_large(Acc<M, N>& s, const OnlineSoftmax<M>& state, float& scale_log2) {
  Regs<bool, 1> large;
  for_lane(l) {
    large.at(l, 0) = false;
    #pragma unroll
    for (int i = 0; i < state.max.slots; ++i) large.at(l, 0) |= fabsf(state.max.at(l, i)) > LARGEST_ROUNDED && state.max.at(l, i) != LOWEST;
  }
  if (!warp_any(large)) return;
  scale(s, scale_log2);
  scale_log2 = 1.f;
}
// Scores of another key tile.
template <int M, int N> OP void scale_as_before(Acc<M, N>& s, float scale_log2, float whole) {
  if (scale_log2 != whole) scale(s, whole);
}
