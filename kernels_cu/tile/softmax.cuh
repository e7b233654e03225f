// softmax.cuh -- the state of an online softmax: running maximum and running sum of each row.
// (Milakov and Gimelshein, 2018; FlashAttention, Algorithm 1.) Exponents are base 2, with the softmax scale folded in.
#pragma once
#include "tile/fragment.cuh"

// Over the scores seen so far: max = scale_log2 * largest score, sum = sum of 2^(scale_log2 * score - max).
// The sum is this lane's share until finish(): adding the four shares once costs less than adding them in every step.
template <int M> struct OnlineSoftmax {
  RowVec<M> max, sum;
  OP OnlineSoftmax() { fill(max, -infinity()); fill(sum, 0.f); }
};

// s becomes p = 2^(scale_log2 * s - max) for the new maximum; o is brought to the same maximum.
template <int M, int N, int D>
OP void update(OnlineSoftmax<M>& state, Acc<M, N>& s, Acc<M, D>& o, float scale_log2) {
  RowVec<M> top, correction;
  fill(top, -infinity());
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) top.at(l, s.slot(r)) = fmaxf(top.at(l, s.slot(r)), s.at(l, r));
  }
  quad_reduce(top, [](float a, float b) { return fmaxf(a, b); });

  Regs<bool, 1> rescale;
  for_lane(l) {
    rescale.at(l, 0) = false;
    #pragma unroll
    for (int i = 0; i < top.slots; ++i) {
      const float max = fmaxf(state.max.at(l, i), top.at(l, i) * scale_log2);
      const float safe = max == -infinity() ? 0.f : max;      // a row that has seen nothing yet: -inf - -inf would be NaN
      correction.at(l, i) = exp2_approx(state.max.at(l, i) - safe);
      rescale.at(l, 0) |= state.max.at(l, i) != max;
      state.max.at(l, i) = max;
      top.at(l, i) = safe;
      state.sum.at(l, i) *= correction.at(l, i);
    }
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      const float p = exp2_approx(fmaf(s.at(l, r), scale_log2, -top.at(l, s.slot(r))));
      s.at(l, r) = p;
      state.sum.at(l, s.slot(r)) += p;
    }
  }
  if (LAZY_RESCALE && !warp_any(rescale)) return;             // every correction is exactly 1
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < o.regs; ++r) o.at(l, r) *= correction.at(l, o.slot(r));
  }
}

// o becomes the weighted mean; lse = ln sum_j e^score_j. A row that saw nothing gives 0 and -inf.
template <int M, int D> OP void finish(OnlineSoftmax<M>& state, Acc<M, D>& o, RowVec<M>& lse) {
  quad_reduce(state.sum, [](float a, float b) { return a + b; });
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < lse.slots; ++i) {
      const float sum = state.sum.at(l, i);
      lse.at(l, i) = sum == 0.f ? -infinity() : (state.max.at(l, i) + log2f(sum)) * LN2;
      state.sum.at(l, i) = sum == 0.f ? 0.f : 1.f / sum;
    }
    #pragma unroll
    for (int r = 0; r < o.regs; ++r) o.at(l, r) *= state.sum.at(l, o.slot(r));
  }
}
