// softcap.cuh -- a softcap in few instructions where scores lie near 0, as nearly all do.
//
// A tanh that is right relatively takes 14 instructions, one of them of the unit that exponentials need (`scale_scores`). For scores within the softcap
// tanh x / x is a polynomial of degree 5 in x^2, and seven instructions are left of it, together with the exponent that it ends in. So a step takes that for
// all its pairs, and whether a score was beyond is found without an instruction of its own for each: the polynomial is in x^2 - 1, whose sign tells, and
// one operation joins the signs of two. Then the step is done again, as where P is too large.
#pragma once
#include "tile/softmax.cuh"

constexpr bool CAPPED = EXPLICIT_SCORES && SOFTCAP && SCORES == UNCHANGED && !(MASKED_PAIRS && !TILE_LIST);

// s becomes p = 2^(capped score - max), `sum` this lane's share of the sum of p, or infinity where a score is not near.
template <int N> OP void exponentiate_capped(const RegisterPair& offsets, Acc<16, N>& s, RowVec<16>& sum, const CapPolynomial& cap) {
  RowVec<16> offset, near;
  apart(offset, offsets);
  fill(sum, -0.f), fill(near, -1.f);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      const float score = s.at(l, r), over = fmaf(score, score, cap.minus_square);
      float& signs = near.at(l, s.slot(r));
      signs = bits_float(float_bits(signs) & float_bits(over));
      float factor = cap.factors[0];
      #pragma unroll
      for (int i = 1; i < 6; ++i) factor = fmaf(factor, over, cap.factors[i]);
      const float p = exp2_approx(fmaf(score, factor, offset.at(l, s.slot(r))));
      s.at(l, r) = p;
      sum.at(l, s.slot(r)) += p;
    }
    #pragma unroll
    for (int i = 0; i < sum.slots; ++i) sum.at(l, i) = float_bits(near.at(l, i)) >> 31 ? sum.at(l, i) : infinity();
  }
  pin(s);                                                     // all of this now, and not when the product beneath has been waited for
  pin(sum);
}

// Whether one of these products is of a score that is not near, in rows before `rows`.
template <int N> OP Regs<bool, 1> beyond_polynomial(const Acc<16, N>& s, int rows, const CapPolynomial& cap) {
  Regs<bool, 1> any;
  RowVec<16> near;
  fill(near, -1.f);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      float& signs = near.at(l, s.slot(r));
      signs = bits_float(float_bits(signs) & float_bits(fmaf(s.at(l, r), s.at(l, r), cap.minus_square)));
    }
  }
  fill_from(near, rows, -1.f);
  for_lane(l) {
    any.at(l, 0) = false;
    #pragma unroll
    for (int i = 0; i < near.slots; ++i) any.at(l, 0) |= !(float_bits(near.at(l, i)) >> 31);
  }
  return any;
}
