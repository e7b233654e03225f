// gradient.cuh -- the elementwise part of the backward: P from the scores and their log-sum-exp, dS from P and dP.
// Everything here is transposed: a row is a key, a column a query, and what belongs to a query is a number per column.
#pragma once
#include "tile/blocked.cuh"

// cols = src[0 : N], in shared memory
template <int N> OP void load(ColVec<N>& cols, SharedAddress src) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < cols.slots; i += 2) {
      const Pair pair = load_shared<Pair>(src + cols.col(l, i) * 4);
      cols.at(l, i) = pair.x[0], cols.at(l, i + 1) = pair.x[1];
    }
  }
}

// s becomes p = 2^(scale_log2 * s - lse), and the other warp is passed p, times the derivative of the softcap if there is one.
template <int M, int N>
OP void probabilities(Acc<M, N>& s, const ColVec<N>& lse, float scale_log2, float softcap, PassedTile<M, N> passed) {
  const float inverse = softcap > 0.f ? 1.f / softcap : 0.f;
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; r += passed.per_move) {
      float factor[passed.per_move];
      #pragma unroll
      for (int i = 0; i < passed.per_move; ++i) {
        const float score = s.at(l, r + i);
        const float p = exp2_approx(fmaf(score, scale_log2, -lse.at(l, s.col_slot(r + i))));
        s.at(l, r + i) = factor[i] = p;
        if (EXPLICIT_SCORES) {
          const float bent = score * inverse;
          factor[i] = p == 0.f ? 0.f : p * (1.f - bent * bent);     // of a masked pair, bent is infinite or NaN
        }
      }
      store_shared(passed.at(l, r), pack_moved(factor));
    }
  }
}

// dp becomes ds = p (dp - delta), with p from the other warp
template <int M, int N> OP void score_gradients(Acc<M, N>& dp, const ColVec<N>& delta, PassedTile<M, N> passed) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < dp.regs; r += passed.per_move) {
      const Moved p = load_shared<Moved>(passed.at(l, r));
      #pragma unroll
      for (int i = 0; i < passed.per_move; ++i)
        dp.at(l, r + i) = unpack_moved(p, i) * (dp.at(l, r + i) - delta.at(l, dp.col_slot(r + i)));
    }
  }
}

// acc *= factor
template <int M, int N> OP void scale(Acc<M, N>& acc, float factor) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) acc.at(l, r) *= factor;
  }
}
