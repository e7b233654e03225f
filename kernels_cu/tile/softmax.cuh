// softmax.cuh -- the state of an online softmax: running maximum and running sum of each row.
// (Milakov and Gimelshein, 2018; FlashAttention, Algorithm 1.) Exponents are base 2, with the softmax scale folded in.
#pragma once
#include "tile/fragment.cuh"

// Over the scores seen so far: max = scale_log2 * largest score, sum = sum of 2^(scale_log2 * score - max).
// The sum is this lane's share until finalize(): adding the four shares once costs less than adding them in every step.
// WITH_TERMS: a score is what the fragment has, scaled, and a number for the rows of a lane, `terms`, which a tile has in common.
template <int M> struct OnlineSoftmax {
  RowVec<M> max, sum;
  OP OnlineSoftmax(float nothing = -infinity()) { fill(max, nothing); fill(sum, 0.f); }
};
constexpr float LOWEST = -3e38f;                              // in place of -inf, from which -inf cannot be subtracted
constexpr float LIFT = FP16_PARTS ? 8.f : 0.f;                // so that p is 2^8 times as large: its low part in float16 has bits left where p is small

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

// The same in parts, for an o that is still being summed up, and for a maximum that most steps leave as it is: a score may be above it by
// so much that p is large, but not too large. Whether it is, the sums of p tell, so nobody looks for the largest score before that.
// Rows that have seen nothing have the maximum LOWEST here, so that it is subtracted as it is.

// The maximum becomes that of the scores so far, and the sum is brought to it; so has o to be, by `correction`.
template <int M, int N>
OP void raise(OnlineSoftmax<M>& state, const Acc<M, N>& s, RowVec<M>& correction, float scale_log2, const RowVec<M>& terms) {
  RowVec<M> top, other;                                       // of every other pair: one chain of maxima would be twice as long
  fill(top, -infinity());
  fill(other, -infinity());
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      float& max = r % 2 ? top.at(l, s.slot(r)) : other.at(l, s.slot(r));
      max = fmaxf(max, SCORES == SCALED ? s.at(l, r) * scale_log2 : s.at(l, r));  // by a factor of either sign
    }
    #pragma unroll
    for (int i = 0; i < top.slots; ++i) {
      top.at(l, i) = fmaxf(top.at(l, i), other.at(l, i));
      if (WITH_TERMS) top.at(l, i) = fma_up(top.at(l, i), scale_log2, terms.at(l, i));   // not below it, however large: P would be
    }
  }
  quad_reduce(top, [](float a, float b) { return fmaxf(a, b); });
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < top.slots; ++i) {
      const float max = fmaxf(state.max.at(l, i), WITH_TERMS || SCORES == SCALED ? top.at(l, i) : FP16_PARTS ? fma_up(top.at(l, i), scale_log2, -LIFT) : top.at(l, i) * scale_log2);  // up, likewise
      const float factor = exp2_approx(state.max.at(l, i) - max);
      state.max.at(l, i) = max;
      state.sum.at(l, i) *= factor;
      correction.at(l, i) = factor;
    }
  }
}
// Whether a row has no maximum yet or, where scores rise from tile to tile, has got a larger one. NEAR: or one so far from 0 that a product must not
// start from terms, since each of its steps cuts sums off, eight of them by 2^-11 in an exponent of 512. A row of -1e9 would be anything.
constexpr float FARTHEST_START = 512.f;
template <bool NEAR, int M> OP Regs<bool, 1> unsettled(const OnlineSoftmax<M>& state, const RowVec<M>& correction, bool rising) {
  Regs<bool, 1> any;
  for_lane(l) {
    any.at(l, 0) = false;
    #pragma unroll
    for (int i = 0; i < correction.slots; ++i) any.at(l, 0) |= state.max.at(l, i) == LOWEST || (rising && correction.at(l, i) < 1.f) || (NEAR && fabsf(state.max.at(l, i)) > FARTHEST_START);
  }
  return any;
}
// What is added to a scaled score in an exponent. An instruction a score reads it, and of the rows of a lane in turns: in neighbouring registers both
// are kept at hand, in two of one bank they are not, see docs/tuning-hopper-forward.md.
OP RegisterPair exponent_offsets(const OnlineSoftmax<16>& state, const RowVec<16>& terms, int positive) {
  RowVec<16> offset;
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < offset.slots; ++i) offset.at(l, i) = WITH_TERMS ? terms.at(l, i) - state.max.at(l, i) : -state.max.at(l, i);
  }
  return side_by_side(offset, positive);
}
// s becomes p, and `sum` this lane's share of the sum of p. Of a row that has seen nothing so far, any score is too large.
template <int N> OP void exponentiate(const RegisterPair& offsets, Acc<16, N>& s, RowVec<16>& sum, float scale_log2) {
  RowVec<16> offset;
  apart(offset, offsets);
  fill(sum, -0.f);                                            // unlike 0 it can be left out of a sum
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      const float p = exp2_approx(fmaf(s.at(l, r), scale_log2, offset.at(l, s.slot(r))));
      s.at(l, r) = p;
      sum.at(l, s.slot(r)) += p;
    }
  }
  pin(s);                                                     // all of this now, and not when the product beneath has been waited for
  pin(sum);
}
// Whether a p may be beyond float16, or a score beyond the maximum of a row that has seen nothing. NaN is.
constexpr float LARGE = 32768.f;
template <int M> OP Regs<bool, 1> too_large(const RowVec<M>& sum) {
  Regs<bool, 1> large;
  for_lane(l) {
    large.at(l, 0) = false;
    #pragma unroll
    for (int i = 0; i < sum.slots; ++i) large.at(l, 0) |= !(sum.at(l, i) <= LARGE);
  }
  return large;
}
template <int M> OP void add(OnlineSoftmax<M>& state, const RowVec<M>& sum) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < sum.slots; ++i) state.sum.at(l, i) += sum.at(l, i);
  }
}
template <int M> OP void multiply(RowVec<M>& rows, const RowVec<M>& by) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < rows.slots; ++i) rows.at(l, i) *= by.at(l, i);
  }
}
template <int M, int D> OP void rescale(Acc<M, D>& o, const RowVec<M>& correction) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < o.regs; ++r) o.at(l, r) *= correction.at(l, o.slot(r));
  }
}

// Between two steps of the same rows, a kernel may keep them elsewhere: maximum, sum, and the weighted mean so far.
template <int M, int D> OP void pause(OnlineSoftmax<M>& state, Acc<M, D>& o, RowVec<M>& max, RowVec<M>& sum) {
  quad_reduce(state.sum, [](float a, float b) { return a + b; });
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < max.slots; ++i) {
      max.at(l, i) = state.max.at(l, i);
      sum.at(l, i) = state.sum.at(l, i);
      state.sum.at(l, i) = sum.at(l, i) == 0.f ? 0.f : 1.f / sum.at(l, i);
    }
    #pragma unroll
    for (int r = 0; r < o.regs; ++r) o.at(l, r) *= state.sum.at(l, o.slot(r));
  }
}
template <int M, int D> OP void resume(OnlineSoftmax<M>& state, Acc<M, D>& o, const RowVec<M>& max, const RowVec<M>& sum) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < max.slots; ++i) {
      state.max.at(l, i) = max.at(l, i);
      state.sum.at(l, i) = 0.25f * sum.at(l, i);              // the share of each of the four lanes
    }
    #pragma unroll
    for (int r = 0; r < o.regs; ++r) o.at(l, r) *= sum.at(l, o.slot(r));
  }
}

// What each of two sets of keys contributes to a row, and the log-sum-exp of both.
struct Weights { float a, b, lse; };
OP Weights weights_of(float lse_a, float lse_b) {
  const float top = fmaxf(lse_a, lse_b), safe = top == -infinity() ? 0.f : top;
  const float a = exp2_approx((lse_a - safe) * LOG2E), b = exp2_approx((lse_b - safe) * LOG2E), sum = a + b;
  if (sum == 0.f) return {0.f, 0.f, -infinity()};
  return {a / sum, b / sum, top + log2f(sum) * LN2};
}

// More than two sets, one after the other: the state of all from the lse of each, the factor that what there is has to be brought to the new
// maximum by, and the weight of what is added. A set of which a row sees no key has weight 0, and whatever it holds is left out.
template <int M> OP void join(OnlineSoftmax<M>& state, const RowVec<M>& lse, RowVec<M>& correction, RowVec<M>& weight) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < lse.slots; ++i) {
      const float score = lse.at(l, i) * LOG2E, max = fmaxf(state.max.at(l, i), score), safe = fmaxf(max, LOWEST);
      correction.at(l, i) = exp2_approx(state.max.at(l, i) - safe);
      weight.at(l, i) = exp2_approx(score - safe);
      state.sum.at(l, i) = fmaf(state.sum.at(l, i), correction.at(l, i), 0.25f * weight.at(l, i));         // the share of each of the four lanes
      state.max.at(l, i) = max;
    }
  }
}
template <int M, int D> OP void add(Acc<M, D>& o, const RowVec<M>& correction, const Acc<M, D>& part, const RowVec<M>& weight) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < o.regs; ++r) {
      const float added = weight.at(l, o.slot(r)) == 0.f ? 0.f : weight.at(l, o.slot(r)) * part.at(l, r);
      o.at(l, r) = fmaf(o.at(l, r), correction.at(l, o.slot(r)), added);
    }
  }
}

// All keys have been seen: lse = ln sum_j e^score_j, and the sum becomes its reciprocal, by which o becomes the weighted mean. A row that
// saw nothing gives 0 and -inf.
template <int M> OP void finalize(OnlineSoftmax<M>& state, RowVec<M>& lse) {
  quad_reduce(state.sum, [](float a, float b) { return a + b; });
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < lse.slots; ++i) {
      const float sum = state.sum.at(l, i);
      lse.at(l, i) = sum == 0.f ? -infinity() : (state.max.at(l, i) + log2_approx(sum)) * LN2;
      state.sum.at(l, i) = sum == 0.f ? 0.f : reciprocal(sum);
    }
  }
}
template <int M, int D> OP void finalize(OnlineSoftmax<M>& state, Acc<M, D>& o, RowVec<M>& lse) {
  finalize(state, lse);
  rescale(o, state.sum);
}
